"""HOROVOD_* in the environment: what has a counterpart is taken, the others are named once."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import MutableMapping

from ddl_ops.environment import PLACEMENT

# Taken under our name, as they are.
_SAME = {
    "HOROVOD_TIMELINE": "DDL_TIMELINE",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "DDL_STALL_TIMEOUT",
}
# In Horovod a rank waits for ever, as long as one validates or saves alone, say. Here, where nobody
# says for how long, and where somebody says for ever; in seconds.
_WAITS_S, _FOR_EVER_S = "3600", str(30 * 86400)
_LEVELS = {"trace": "info", "debug": "info", "info": "info"}
_BYTES_OF_FLOAT = 4
# No file: start_timeline() would name one.
_DYNAMIC = "DYNAMIC"
# Set for every script by whoever starts ranks, or read by whoever does, or without anything to do
# here.
_SILENT = frozenset(
    """
    HOROVOD_RANK HOROVOD_SIZE HOROVOD_LOCAL_RANK HOROVOD_LOCAL_SIZE HOROVOD_CROSS_RANK
    HOROVOD_CROSS_SIZE HOROVOD_HOSTNAME HOROVOD_STALL_CHECK_DISABLE
    HOROVOD_LOG_LEVEL HOROVOD_FUSION_THRESHOLD HOROVOD_ELASTIC HOROVOD_MIN_NP HOROVOD_MAX_NP
    HOROVOD_ELASTIC_TIMEOUT
    """.split()
)
# What a build of Horovod reads, as sites and images export it for all that follows.
_OF_BUILDS = tuple(
    f"HOROVOD_{part}"
    for part in "BUILD_ CUDA_ GPU_ MPICXX_SHOW NCCL_ RCCL_ ROCM_ VERSION WITH".split()
)
_WHY = {
    "HOROVOD_CYCLE_TIME": "nothing waits for a cycle here",
    "HOROVOD_CACHE_CAPACITY": "what ranks have agreed on is kept without a limit",
    "HOROVOD_HIERARCHICAL_ALLREDUCE": "ranks of one host reduce through shared memory first anyway",
    "HOROVOD_HIERARCHICAL_ALLGATHER": "ranks of one host share their memory anyway",
    "HOROVOD_AUTOTUNE": "there is nothing to tune",
}


@functools.cache
def take_settings() -> None:
    """Translates this process's HOROVOD_* to DDL_*, once; rank 0 names those without effect."""
    said = translate(os.environ)
    if PLACEMENT.rank == 0:
        for sentence in said:
            print(f"ddl: rank 0: {sentence}", file=sys.stderr, flush=True)


def translate(environ: MutableMapping[str, str]) -> list[str]:
    """Adds to `environ` what its HOROVOD_* mean, unless ours is set; a sentence for each other.

    HOROVOD_FUSION_THRESHOLD, bytes, becomes DDL_GROUP_SIZE, elements of float32; 0 is 1: each
    tensor alone. DDL_STALL_TIMEOUT is longer than by default, as nothing ends the wait in Horovod.
    """
    said = []
    for theirs, ours in _SAME.items():
        if (value := environ.get(theirs, "0")) == _DYNAMIC:
            said.append(
                f"{theirs}={value} has no effect with ddl in Horovod's place: a timeline is of the "
                "whole job here; set it to the name of a file."
            )
        elif value not in ("", "0"):  # 0: never
            environ.setdefault(ours, value)
    for_ever = environ.get("HOROVOD_STALL_CHECK_DISABLE", "0") not in ("", "0")
    for_ever = for_ever or environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS") == "0"
    environ.setdefault("DDL_STALL_TIMEOUT", _FOR_EVER_S if for_ever else _WAITS_S)
    if environ.get("HOROVOD_FUSION_THRESHOLD", "").isdecimal():
        elements = int(environ["HOROVOD_FUSION_THRESHOLD"]) // _BYTES_OF_FLOAT
        environ.setdefault("DDL_GROUP_SIZE", str(max(elements, 1)))
    if (level := environ.get("HOROVOD_LOG_LEVEL")) is not None:
        environ.setdefault("DDL_LOG", _LEVELS.get(level.lower(), "warning"))
    for name in sorted(environ):
        if name in _SAME or name in _SILENT or name.startswith(_OF_BUILDS):
            continue
        if name.startswith("HOROVOD_"):
            why = _WHY.get(name, "it has no counterpart")
            said.append(f"{name} has no effect with ddl in Horovod's place: {why}.")
    return said
