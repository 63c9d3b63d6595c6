"""An elastic state of Horovod's, without a framework, in a job that horovodrun starts again.

Arguments: FOLDER STEPS. Rank 0 appends to FOLDER/told where each start begins, of how many ranks
and on which hosts, and each step that is done. What is to happen after a step is in FOLDER/STEP:
the number of the rank that kills itself, `wait` until all are asked to make room, or `hang`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import numpy as np
from ddl_ops import arrays, lifecycle, preemption
from elastic_common import FOLDER, RANK, SIZE, of_rank_0, tell
from horovod.common.elastic import ObjectState, run_fn

STEPS = int(sys.argv[2])


def hosts() -> str:
    names = np.zeros([SIZE, 16], np.int64)
    name = socket.gethostname().encode()[:16]
    names[RANK, : len(name)] = list(name)
    if SIZE > 1:
        arrays.add("hosts", names)
    return ",".join(bytes(row[row > 0].astype(np.uint8)).decode() for row in names)


def event(step: int) -> None:
    place = FOLDER / str(step)
    what = place.read_text() if place.exists() else ""
    if SIZE > 1:
        arrays.barrier(f"known {step}")  # before it is taken away
    if what == "wait":
        while not preemption._State.asked:
            time.sleep(0.05)
        place.unlink(missing_ok=True)
    elif what == str(RANK):
        place.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "hang":
        place.unlink(missing_ok=True)
        time.sleep(600)


lifecycle.init("restarts.py")
state = ObjectState(of_rank_0, lambda: RANK, step=0, total=0.0)


@run_fn
def train(state) -> None:
    tell("begin", state.step, SIZE, hosts())
    while state.step < STEPS:
        one = np.full(1, (state.step + 1) / SIZE)
        if SIZE > 1:
            arrays.add("step", one)
        state.total += one[0]
        state.step += 1
        tell("step", state.step)
        event(state.step)
        if state.step % 2 == 0:
            state.commit()


train(state)
assert abs(state.total - STEPS * (STEPS + 1) / 2) < 1e-9, state.total
tell("end", state.step, SIZE)
