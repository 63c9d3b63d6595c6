"""Adasum by real ranks: scripts/adasum.py compares with NumPy."""

from __future__ import annotations

import os

import pytest

from tests.parallel.conftest import OPS_LIB, SCRIPTS


@pytest.mark.parametrize(
    ("ranks", "of_a_host", "transport"),
    # One host; a host of three and one of one, also for a set of ranks.
    [(2, 2, "over shared memory"), (4, 3, "over shared memory, and MPI between hosts")],
)
def test_adasum_is_as_defined(run_ranks, ranks: int, of_a_host: int, transport: str):
    paths = (OPS_LIB / "python", OPS_LIB / "python" / "ddl_ops" / "stand_in", SCRIPTS)
    job = run_ranks(
        *("adasum.py", ranks, str(of_a_host)),
        DDL_LOG="info",
        PYTHONPATH=os.pathsep.join(map(str, paths)),
    )
    assert job.returncode == 0, job.output
    for rank in range(ranks):
        assert job.lines_of(rank) == ["all as NumPy has it"], job.output
    assert f"ddl: rank 0: of {ranks}, local rank 0 of {ranks}, {transport}\n" in job.output
