"""A training of two ranks on a real Slurm cluster that has to make room.

With 50 preemptions: ``python -m benchmarks.preemptions``.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.preemptions import measure
from tests.integration.slurm import SlurmCluster

pytestmark = pytest.mark.integration

TIMES = 1


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short: sockets in it have short names only."""
    if reason := SlurmCluster.missing():
        pytest.skip(reason)
    made = Path(tempfile.mkdtemp(prefix="preempt-"))
    yield made
    shutil.rmtree(made)


def test_no_step_is_done_twice_and_no_try_is_used(folder):
    found = measure(folder, TIMES, "loop")
    assert found["weights_equal"], found
    assert (found["preemptions"], found["tries"]) == (TIMES, 1)
    assert (found["steps_repeated"], found["steps_missing"]) == (0, 0)
