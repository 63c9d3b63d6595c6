"""Adasum by real ranks: scripts/adasum.py compares with NumPy."""

from __future__ import annotations

import os

from tests.parallel.conftest import HOROVOD_PATHS, SCRIPTS


def test_adasum_is_as_defined(run_ranks):
    """Of a host of three ranks and one of one; also for sets of ranks, one of them of one host."""
    ranks, of_a_host, transport = 4, 3, "over shared memory, and MPI between hosts"
    job = run_ranks(
        *("adasum.py", ranks, str(of_a_host)),
        DDL_LOG="info",
        PYTHONPATH=os.pathsep.join((HOROVOD_PATHS, str(SCRIPTS))),
    )
    assert job.returncode == 0, job.output
    for rank in range(ranks):
        assert job.lines_of(rank) == ["all as NumPy has it"], job.output
    assert f"ddl: rank 0: of {ranks}, local rank 0 of {ranks}, {transport}\n" in job.output
