"""Scripts for Horovod on two ranks, started as a person starts them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "scripts" / "horovod_checks.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def job(mpirun, run_command):
    horovodrun = [sys.executable, "-c", "from ddl_ops.horovodrun import main; main()"]
    # Four bytes: each gradient travels alone.
    flags = ["-np", "2", "-H", "localhost:2", "--cycle-time-ms", "1", "--fusion-threshold-mb=4e-6"]
    environment = {"DDL_STALL_TIMEOUT": "60"}
    return run_command([*horovodrun, *flags, "python", str(SCRIPT)], environment, 240)


def test_horovodrun_names_flags_without_effect_and_ends_well(job):
    assert "horovodrun: --cycle-time-ms has no effect here\n" in job.output
    assert job.returncode == 0, job.output


@pytest.mark.parametrize("name", CHECKS)
def test_check_of_horovod_passes_on_every_rank(job, name):
    said = [line for rank in range(2) for line in job.lines_of(rank)]
    assert [line for line in said if line.startswith(f"{name}:")] == [f"{name}: ok"] * 2, job.output
