"""Elastic states of Horovod's, without a framework, in scripts that have more than one of them.

Arguments: FOLDER WAY [NAME]. WAY is `stage`: one state, of a script that is started with several
NAMEs; `skips`: a first phase that is left out when it is done, then a second one; `folds`: three
states from one place; `shared`: two phases of one state, of which the last is called twice;
`alias`: a list that the script goes on to use; `fails`: rank 0 raises when all is trained; `exits`:
all end in each of the first four starts, after a step, without saying why; `own`: the script sets
CHECKPOINT_DIR to FOLDER/own, and tells the lock there; `dies`: the last rank kills itself before
there is a state; `logs`: so it does, when it has written to a log in CHECKPOINT_DIR; `saves`: so it
does, when a session of TensorFlow 1 has saved the step that it begins with there.

Each state has 3 steps. Rank 0 appends to FOLDER/told where each begins. The last rank kills itself
once, after the first step of the state that FOLDER/kill names; after that step all wait while there
is FOLDER/wait.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ddl_ops import arrays, lifecycle
from elastic_common import FOLDER, RANK, SIZE, of_rank_0, tell
from horovod.common.elastic import ObjectState, run_fn

WAY, *NAMES = sys.argv[2:]
WAKE = """\
import os, signal, sys, time
end = time.monotonic() + 60
while not os.path.exists(sys.argv[2]) and time.monotonic() < end:
    time.sleep(0.05)
os.kill(int(sys.argv[1]), signal.SIGCONT)
"""


def state_of(**attributes: object) -> ObjectState:
    return ObjectState(of_rank_0, lambda: RANK, step=0, **attributes)


def steps(state, name: str) -> None:
    tell(name, state.step)
    while state.step < 3:
        state.step += 1
        state.commit()
        kill = FOLDER / "kill"
        if state.step == 1 and RANK == SIZE - 1 and kill.exists() and kill.read_text() == name:
            kill.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if SIZE > 1:
            arrays.barrier("after a step")  # so that no rank commits once more
        while state.step == 1 and (FOLDER / "wait").exists():
            time.sleep(0.05)


@run_fn
def pretrain(state) -> None:
    steps(state, "pretrain")


@run_fn
def finetune(state) -> None:
    steps(state, "finetune")


@run_fn
def train(state, name: str) -> None:
    steps(state, name)


@run_fn
def append(state, losses: list[int]) -> None:
    while state.step < 3:
        losses.append(state.step)
        state.step += 1
        state.commit()


def waits_to_be_ended(*error: object, record=sys.excepthook) -> None:
    record(*error)
    (FOLDER / "raised").touch()
    time.sleep(60)


if WAY == "dies":
    sys.excepthook = waits_to_be_ended  # before the one that aborts the job
lifecycle.init("stages.py")
if WAY == "stage":
    train(state_of(), NAMES[0])
elif WAY == "skips":
    if not (FOLDER / "pretrained").exists():
        pretrain(state_of())
        (FOLDER / "pretrained").touch()
    finetune(state_of())
elif WAY == "folds":
    for fold in range(3):
        train(state_of(), f"fold-{fold}")
elif WAY == "shared":
    one = state_of()
    pretrain(one)
    one.step = 0
    for _ in range(2):
        finetune(one)
elif WAY == "logs":
    with Path(os.environ["CHECKPOINT_DIR"], "train.log").open("a") as log:
        log.write("begins\n")
    os.kill(os.getpid(), signal.SIGKILL)
elif WAY == "saves":
    import tensorflow.compat.v1 as tf

    tf.disable_eager_execution()
    tf.train.get_or_create_global_step()
    tf.train.MonitoredTrainingSession(checkpoint_dir=os.environ["CHECKPOINT_DIR"])
    os.kill(os.getpid(), signal.SIGKILL)
elif WAY == "dies":
    if RANK == SIZE - 1:
        # Its shim hears of it when rank 0 has raised: mpirun would end that one before, mostly.
        os.kill(shim := os.getppid(), signal.SIGSTOP)
        subprocess.Popen([sys.executable, "-c", WAKE, str(shim), str(FOLDER / "raised")])
        os.kill(os.getpid(), signal.SIGKILL)
    train(state_of(), "one")
elif WAY == "exits":
    starts = state_of()

    @run_fn
    def exit_after_a_step(state) -> None:
        if state.step < 4:
            state.step += 1
            state.commit()
            sys.exit(1)

    exit_after_a_step(starts)
elif WAY == "own":
    os.environ["CHECKPOINT_DIR"] = str(FOLDER / "own")
    train(state_of(), "own")
    tell(*(path.name for path in (FOLDER / "own").glob(".*-lock")))
elif WAY == "fails":
    train(finished := state_of(), "all")
    finished.commit()
    if RANK == 0:
        raise OSError("no such folder")
else:
    losses: list[int] = []
    state = state_of(losses=losses)
    append(state, losses)
    assert (state.losses is losses) is (RANK == 0)
    state.restore()
    tell(state.losses)
