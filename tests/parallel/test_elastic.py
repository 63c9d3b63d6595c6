"""Elastic states of scripts for Horovod: what is committed outlives the job. Real ranks."""

from __future__ import annotations

import os
from pathlib import Path

from ddl_airflow.core.job import JobState
from tests.parallel.conftest import OPS_LIB
from tests.parallel.test_preemption import Training


def test_a_script_goes_on_from_its_last_commit_in_each_start_of_the_job(
    mpirun, run_command, tmp_path: Path
):
    training = Training(run_command, tmp_path / "run", 2, "phases", script="elastic.py")
    asked = training.job(0)
    # Asked at step 5, and committed by all at step 6, where they ask each other for the 4th time.
    assert (asked.state, asked.step) == (JobState.PREEMPTED, 4), training.said
    assert training.steps() == [1, 2, 3, 4, 5, 6]
    lost = training.job(1)
    assert lost.state is JobState.FAILED, training.said
    assert training.steps()[6:] == [7, 8, 101, 102, 103, 104, 105]
    assert training.job(2).state is JobState.SUCCEEDED, training.said
    # The second epoch was not committed, and is done again. Nothing else is.
    assert training.steps()[13:] == [104, 105, 106, 107, 108, 109], training.said
    assert training.said.count(": the weights are the same\n") == 2
    left = sorted(path.name for path in (training.folder / "checkpoints").iterdir())
    assert left == [f"horovod-{n}.commit" for n in ("1-5", "1-6", "2-2", "2-3")], left


def test_a_state_of_a_session(run_alone, tmp_path: Path):
    stand_in = OPS_LIB / "python" / "ddl_ops" / "stand_in"
    done = run_alone(
        *("elastic.py", "session", str(tmp_path)),
        CHECKPOINT_DIR=str(tmp_path),
        PYTHONPATH=os.pathsep.join(map(str, (OPS_LIB / "python", stand_in))),
    )
    assert done.returncode == 0 and "gone on\n" in done.output, done.output
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["horovod-1-1.commit", "horovod-1-2.commit"]
