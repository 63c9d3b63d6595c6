from __future__ import annotations

import json
import shlex
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from ddl_airflow.core.job import (
    JobHandle,
    JobSpec,
    JobState,
    JobStatus,
    RankFailure,
    StartedJob,
    Submission,
)

JOB = JobSpec("t/train-1", "python a.py", 3, 4, "/p/python", Path("c"), Path("r"), Path("l"))


def test_world_size_is_nodes_times_slots():
    assert JOB.world_size == 12


def test_submission_prints_as_a_command_that_a_shell_reads_back():
    argv = ("mpirun", "-n", "2", "python", "--command", "python a.py --name 'x y' $HOME;")
    shown = str(Submission(JOB, argv, {"SECRET": "not-shown"}))
    assert shlex.split(shown) == list(argv)
    assert "not-shown" not in shown


def test_job_values_do_not_change():
    with pytest.raises(FrozenInstanceError):
        JOB.nodes = 1


def test_values_come_out_of_json_as_they_went_in(tmp_path):
    handle = JobHandle("slurm", "t/train-1", 12, 4, tmp_path / "r", tmp_path / "l")
    started = StartedJob(handle, 17.5, {"rank-0.log": 3}, (tmp_path / "p", 9))
    for one in (started, replace(started, progress=None, note=tmp_path / "n")):
        assert StartedJob.load(json.loads(json.dumps(one.dump()))) == one
    failure = RankFailure(1, "n1", 41, "exited with code 41")
    for status in (JobStatus(JobState.FAILED, failure), JobStatus(JobState.LOST, reason="gone")):
        assert JobStatus.load(json.loads(json.dumps(status.dump()))) == status
