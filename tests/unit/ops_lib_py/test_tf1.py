"""TensorFlow 1 mode, as the rank shim gives it to a script: many checks in one process for each
set of packages, because each start of TensorFlow costs seconds."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import within

SCRIPT = Path(__file__).parent / "scripts" / "tf1_checks.py"
CHECKS = re.findall(r"^@check\ndef (\w+)", SCRIPT.read_text(), re.MULTILINE)
PYTHON = Path(__file__).parents[3] / "ops_lib" / "python"
LEGACY = ("tf_keras", "tf_slim", "tensorflow_estimator")


def run_rank(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {n: t for n, t in os.environ.items() if not n.startswith(("OMPI_", "DDL_", "PMI"))}
    return subprocess.run(
        [sys.executable, "-m", "ddl_ops.rank", "--", *map(str, command)],
        env=kept | {"PYTHONPATH": str(PYTHON), "TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within(300),
        check=False,
    )


@pytest.fixture(scope="module")
def with_legacy() -> subprocess.CompletedProcess[str]:
    missing = [name for name in LEGACY if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -r requirements/legacy.txt")
    return run_rank("python", SCRIPT, DDL_TF1="1")


@pytest.fixture(scope="module")
def without_legacy() -> subprocess.CompletedProcess[str]:
    return run_rank("python", SCRIPT, "without-legacy", DDL_TF1="1")


@pytest.mark.parametrize("name", [n for n in CHECKS if not n.startswith("without_")])
def test_check_passes(with_legacy, name: str) -> None:
    assert f"{name}: ok" in with_legacy.stdout.splitlines(), with_legacy.stdout + with_legacy.stderr


@pytest.mark.parametrize("name", [n for n in CHECKS if not n.startswith("legacy_")])
def test_check_passes_without_the_legacy_packages(without_legacy, name: str) -> None:
    said = without_legacy.stdout
    assert f"{name}: ok" in said.splitlines(), said + without_legacy.stderr


FINDERS = (
    "import os, sys; print([type(f).__module__ for f in sys.meta_path"
    " if type(f).__module__.startswith('ddl_ops')], 'DDL_TF1' in os.environ)"
)


@pytest.mark.parametrize("value", ["0", None])
def test_other_ranks_know_nothing_of_it(value: str | None) -> None:
    environment = {"DDL_TF1": value} if value else {}
    assert run_rank("python", "-c", FINDERS, **environment).stdout == "[] False\n"


def test_each_python_that_the_command_starts_is_in_the_mode_and_its_children_are_not() -> None:
    child = (
        f"import subprocess, sys; {FINDERS}; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    )
    said = run_rank(
        *("sh", "-c", 'python -c "$0" "$1" && python -c "$1"', child, FINDERS), DDL_TF1="1"
    )
    on, off = "['ddl_ops.tf1.importing'] False", "[] False"
    assert said.stdout.splitlines() == [on, off, on], said.stderr


def test_a_python_without_the_layer_ends_and_says_so(tmp_path: Path) -> None:
    startup = PYTHON / "ddl_ops" / "startup"
    bare = subprocess.run(
        [sys.executable, "-S", "-c", "import sitecustomize"],
        env={"PYTHONPATH": str(startup), "DDL_TF1": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert bare.returncode == 1
    assert "TensorFlow 1 mode needs ddl-ops in" in bare.stderr
