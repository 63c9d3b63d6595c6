"""Makefile and scripts/install: what they make, and of which Python. Their Pythons do nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A Python of some version, whose environments have it and a uv.
PYTHON = f"""\
#!/bin/sh
case "$1 $2" in
--version*) echo Python {{version}}.0 ;;
-c*) exec {sys.executable} -c "import sys; sys.version_info = ({{numbers}}, 0); $2" ;;
"-m venv")
    rm -rf "$4"
    mkdir -p "$4/bin"
    cp "$0" "$4/bin/python"
    printf '#!/bin/sh\\n' >"$4/bin/uv"
    chmod +x "$4/bin/uv"
    ;;
esac
"""
NEEDS = (
    *("requirements/bootstrap.txt", "requirements/lock.txt", "requirements/legacy.txt"),
    *("pyproject.toml", "setup.py", "ops_lib/pyproject.toml", "ops_lib/setup.py"),
    *("ops_lib/build.py", "ops_lib/cc/core/a.cc", "ops_lib/python/ddl_ops/_ddl_ops.so"),
)


@pytest.fixture
def tree(tmp_path):
    """Files of the names that make looks at, and Pythons python3.10 to python3.14."""
    for name in NEEDS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "scripts").mkdir()
    for name in ("Makefile", "scripts/install"):
        shutil.copy(ROOT / name, tmp_path / name)
    for minor in (10, 11, 13, 14):
        path = tmp_path / f"python3.{minor}"
        path.write_text(PYTHON.format(version=f"3.{minor}", numbers=f"3, {minor}"))
        path.chmod(0o755)
    return tmp_path


def make(tree, *words, python3="3.11", **variables):
    """Calls make where python3 is of a version, and nobody has named another."""
    (tree / "bin").mkdir(exist_ok=True)
    (tree / "bin" / "python3").unlink(missing_ok=True)
    (tree / "bin" / "python3").symlink_to(tree / f"python{python3}")
    env = {"PATH": f"{tree}/bin:{tree}:{os.defpath}", "HOME": str(tree), **variables}
    return subprocess.run(["make", *words], cwd=tree, env=env, capture_output=True, text=True)


def version(tree):
    words = [tree / ".venv" / "bin" / "python", "--version"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1]


INSTALLED = ".venv/.installed"


@pytest.mark.parametrize("minor", [10, 14])
def test_a_python_that_tensorflow_has_no_wheels_for_is_refused(tree, minor):
    for words, python3 in (([], f"3.{minor}"), ([f"PYTHON=python3.{minor}"], "3.11")):
        ended = make(tree, INSTALLED, *words, python3=python3)
        assert ended.returncode == 2
        assert f"Python 3.{minor}.0: 3.11 to 3.13 is needed" in ended.stderr
        assert "make PYTHON=python3.12" in ended.stderr
        assert not (tree / ".venv").exists()


def test_the_environment_is_of_the_python_that_is_named(tree):
    assert make(tree, INSTALLED).returncode == 0 and version(tree) == "3.11.0"
    assert make(tree, INSTALLED, "PYTHON=python3.14").returncode == 2
    assert version(tree) == "3.11.0"  # what there is stays
    assert make(tree, INSTALLED, "PYTHON=python3.13").returncode == 0
    assert version(tree) == "3.13.0"
    for python3 in ("3.11", "3.14"):
        (tree / "requirements" / "lock.txt").touch()
        assert make(tree, INSTALLED, python3=python3).returncode == 0
        assert version(tree) == "3.13.0"  # whom nobody names is no reason to make it anew
    for words in ([], ["PYTHON=python3.13"]):
        assert "up to date" in make(tree, INSTALLED, *words).stdout


def test_what_is_left_of_a_python_that_does_not_fit_is_made_anew(tree):
    subprocess.run([tree / "python3.14", "-m", "venv", "--clear", tree / ".venv"], check=True)
    assert make(tree, INSTALLED).returncode == 0
    assert version(tree) == "3.11.0"


def test_ops_are_looked_at_after_each_installation(tree):
    """Of another TensorFlow they are other ops; what is to be compiled ops_lib/build.py knows."""
    ops = "ops_lib/python/ddl_ops/_ddl_ops.so"
    assert make(tree, ops).returncode == 0
    assert "up to date" in make(tree, ops).stdout
    (tree / "requirements" / "lock.txt").touch()
    assert "ops_lib/build.py" in make(tree, "-n", ops).stdout
    assert make(tree, ops).returncode == 0
    assert "up to date" in make(tree, ops).stdout


@pytest.mark.parametrize("python", ["python3", "python3.14", "/not/there", ""])
def test_an_environment_that_is_there_stays_whatever_python_other_tools_have_named(tree, python):
    assert make(tree, INSTALLED, "PYTHON=python3.13").returncode == 0
    os.utime(tree / "setup.py")  # to be installed again
    assert make(tree, INSTALLED, PYTHON=python).returncode == 0 and version(tree) == "3.13.0"


def test_a_python_that_is_not_there_is_named(tree):
    ended = make(tree, INSTALLED, "PYTHON=/not/there")
    assert ended.returncode == 2 and "/not/there is not there. Name a Python" in ended.stderr
