"""Ranks that are asked to end save at one step, end, and go on there: real ranks under mpirun."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ddl_airflow.core.job import JobHandle, JobState, JobStatus
from ddl_airflow.launchers.records import ranks_status
from tests.parallel.conftest import SCRIPTS
from tests.soak.driver import mpirun_command

# A training that never comes to its end.
_MOST_JOBS = 6


class Training:
    """The same command, again and again in one folder, each time a job with records of its own."""

    def __init__(
        self,
        run: Callable[..., object],
        folder: Path,
        ranks: int,
        *words: str,
        script: str = "preempted.py",
    ) -> None:
        self._run = run
        self._script = str(SCRIPTS / script)
        self._ranks = ranks
        self._words = words
        self.folder = folder
        self.said = ""
        folder.mkdir()

    def job(self, number: int) -> JobStatus:
        """Runs it once."""
        records = self.folder / f"try-{number}"
        records.mkdir()
        way, *rest = self._words
        script = [sys.executable, self._script, way, str(self.folder), *rest]
        shim = (sys.executable, "-m", "ddl_ops.rank", "--", *script)
        environment = {
            "DDL_OPTIONS": "-mode p",
            "DDL_RECORD_DIR": str(records),
            "LOG_DIR": str(records),
            "CHECKPOINT_DIR": str(self.folder / "checkpoints"),
        }
        self._run(mpirun_command(self._ranks, *shim), environment, 300)
        logs = (path.read_text(errors="replace") for path in sorted(records.glob("*.log")))
        self.said += f"--- job {number}\n" + "".join(logs)
        handle = JobHandle("local", "", 0, self._ranks, records, records, averages=True)
        return ranks_status(handle, running=False)

    def to_its_end(self) -> list[JobStatus]:
        """Runs it until it is not preempted any more."""
        ended: list[JobStatus] = []
        while not ended or ended[-1].state is JobState.PREEMPTED:
            assert len(ended) < _MOST_JOBS, self.said
            ended.append(self.job(len(ended)))
        assert ended[-1].state is JobState.SUCCEEDED, f"{ended[-1]}\n{self.said}"
        return ended

    def steps(self) -> list[int]:
        return [int(line) for line in (self.folder / "steps").read_text().split()]

    def weights(self) -> dict[str, bytes]:
        with np.load(self.folder / "final.npz") as arrays:
            return {name: arrays[name].tobytes() for name in arrays.files}


@pytest.fixture
def compared(mpirun: str, run_command: Callable[..., object], tmp_path: Path):
    """compared(ranks, way, steps, *hooks) -> steps at which the jobs were preempted, the training.

    The training ends as one that nobody interrupts, with each step done once.
    """

    def run(ranks: int, way: str, steps: int, *hooks: str) -> tuple[list[int | None], Training]:
        undisturbed = Training(run_command, tmp_path / "undisturbed", ranks, way, str(steps))
        assert len(undisturbed.to_its_end()) == 1
        training = Training(run_command, tmp_path / "asked", ranks, way, str(steps), *hooks)
        ended = training.to_its_end()
        assert training.steps() == list(range(1, steps + 1)), training.said
        assert training.weights() == undisturbed.weights()
        return [status.step for status in ended[:-1]], training

    return run


def test_a_loop_of_the_scripts_own(compared):
    # Before the first step; one rank alone, and again while it saves; all shims at once; and when
    # all is done but for the end, which then is the training's.
    hooks = ("start=0@1", "step=5@1", "saving=5@0", "shim=9@all", "end=12@0")
    preempted, training = compared(2, "loop", 12, *hooks)
    assert preempted == [1, 5, 9], training.said
    last = json.loads((training.folder / "try-3" / "rank-0.json").read_text())
    assert "preempted" not in last and last["listens"] and last["exit_code"] == 0


def test_ranks_that_have_joined_end_with_the_others(compared):
    # Rank 0 has 9 steps, and waits: what it has is old, so another one saves.
    preempted, training = compared(3, "joins", 12, "step=5@0", "shim=11@2")
    assert preempted == [5, 11], training.said


# Of a GAN nothing but optimizers of its own tells how far it is: compile()'s is never used. Where
# hosts share no disk, rank 0 is given what rank 1 has by itself: random generators, means of the
# epoch, gradients that wait.
@pytest.mark.parametrize("way, hooks", [("keras", ["apart=yes"]), ("gan", [])])
def test_keras_goes_on_in_the_middle_of_an_epoch(compared, way, hooks):
    # After the last step of an epoch, too: its end, with a checkpoint, comes in the next job.
    preempted, training = compared(2, way, 21, "step=5@1", "shim=14@0", *hooks)
    assert preempted == [5, 14], training.said
    logs = [
        (training.folder.parent / name / "logs").read_text() for name in ("asked", "undisturbed")
    ]
    assert logs[0] == logs[1]
    assert not list((training.folder / "checkpoints").glob("*preempted*"))


def test_a_session_of_tensorflow_1(compared):
    preempted, training = compared(2, "tf1", 9, "step=3@1")
    assert preempted == [3], training.said
