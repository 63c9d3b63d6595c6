from __future__ import annotations

import shlex
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from ddl_airflow.core.job import JobSpec, Submission

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
