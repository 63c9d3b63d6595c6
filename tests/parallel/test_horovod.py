"""Scripts for Horovod on two ranks, started as a person starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "scripts" / "horovod_checks.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def job(mpirun, ddl_run):
    return ddl_run(
        *("--np", "2", "python", SCRIPT), DDL_STALL_TIMEOUT="60", HOROVOD_FUSION_THRESHOLD="4"
    )


@pytest.mark.parametrize("name", CHECKS)
def test_check_of_horovod_passes_on_every_rank(job, name):
    said = [line for rank in range(2) for line in job.lines_of(rank)]
    assert [line for line in said if line.startswith(f"{name}:")] == [f"{name}: ok"] * 2, job.output
