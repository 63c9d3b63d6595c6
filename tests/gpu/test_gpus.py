"""Collectives of tensors in the memory of GPUs, over NCCL: one rank for each GPU of this host."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parallel.conftest import Ended, mpirun, run_ranks  # noqa: F401  fixtures

SCRIPT = Path(__file__).resolve().parent / "scripts" / "gpu_checks.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many GPUs TensorFlow sees here; skips where it is none."""
    tf = pytest.importorskip("tensorflow")
    count = len(tf.config.list_physical_devices("GPU"))
    if count == 0:
        pytest.skip("TensorFlow sees no GPU: needs one of NVIDIA's, and tensorflow[and-cuda]")
    return count


@pytest.fixture(scope="module", params=[1, 2, 4, 8], ids=lambda ranks: f"np{ranks}")
def job(request: pytest.FixtureRequest, gpus: int, run_ranks: Callable[..., Ended]):  # noqa: F811
    if request.param > gpus:
        pytest.skip(f"{request.param} ranks need as many GPUs; this host has {gpus}")
    ended = run_ranks(
        str(SCRIPT), request.param, "GPU:0", DDL_OPTIONS="", DDL_GPU="nccl", DDL_LOG="info"
    )
    return request.param, ended


@pytest.mark.parametrize("name", CHECKS)
def test_check_passes_on_every_rank(job: tuple[int, Ended], name: str) -> None:
    ranks, ended = job
    said = [line for r in range(ranks) for line in ended.lines_of(r) if line.startswith(f"{name}:")]
    assert said == [f"{name}: ok"] * ranks, ended.output


def test_job_ends_cleanly(job: tuple[int, Ended]) -> None:
    _, ended = job
    assert ended.returncode == 0, ended.output
    assert "tensors of GPUs over NCCL" in ended.output


def test_ranks_that_share_a_gpu_go_through_the_host(
    gpus: int,
    run_ranks: Callable[..., Ended],  # noqa: F811
) -> None:
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        pytest.skip("CUDA_VISIBLE_DEVICES hides how many GPUs this host has")
    ended = run_ranks(str(SCRIPT), gpus + 1, "CPU:0", DDL_OPTIONS="", DDL_LOG="info")
    assert ended.returncode == 0, ended.output
    assert "through the host's memory: this host has" in ended.output
    assert "FAILED" not in ended.output
