"""Runs the C++ tests, without TensorFlow and MPI: under sanitizers, and on another processor."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.limits import within
from tests.unit.ops_lib_cc.conftest import AARCH64, HERE, SANITIZERS, Compiler

pytestmark = pytest.mark.cc


def _names(sources: Iterable[Path]) -> list[str]:
    lines = [line for path in sources for line in path.read_text().splitlines()]
    return [found[1] for line in lines if (found := re.match(r"(?:TIMED_)?TEST\((\w+)\) {", line))]


def _check(words: list[str | Path], expected: int, folder: Path, **environment: str | Path) -> str:
    ran = subprocess.run(
        words,
        env=os.environ | {"TMPDIR": folder} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within(900),
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout.count("\nok     ") == expected, ran.stdout
    return ran.stdout


def test_another_tests_path_and_folder_do_not_reach_the_compiler(monkeypatch, tmp_path):
    """Only some of it is compiled when other tests begin."""
    compiler = Compiler()
    if not compiler.can("thread"):
        pytest.skip("no g++: apt-get install g++")
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PATH", str(tmp_path))
    gone.rmdir()
    compiler._run("thread", ["--version"])
    compiler.end()
    assert not compiler._folder.exists()


@pytest.mark.parametrize("variant", SANITIZERS)
def test_cc_tests_pass(variant: str, compiler: Compiler, tmp_path: Path) -> None:
    if not compiler.can(variant):
        pytest.skip("no g++: apt-get install g++")
    _check([compiler.program(variant)], len(_names(HERE.glob("*_test.cc"))), tmp_path)


@pytest.mark.parametrize("variant", ["address-undefined"])
def test_numbers_have_a_point_where_the_locale_has_a_comma(variant, compiler, tmp_path):
    """What other programs read, and settings; teams' reports are compared with the same text."""
    if not compiler.can(variant):
        pytest.skip("no g++: apt-get install g++")
    made = ("localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE.UTF-8")
    if not Path("/usr/share/i18n/locales/de_DE").exists() or subprocess.run(made).returncode:
        pytest.skip("no German locale: apt-get install locales")
    parts = ("statistics", "progress", "SecondsHave", "ADescriptionTells", "teams_report")
    names = [name for name in _names(HERE.glob("*_test.cc")) if name.startswith(parts)]
    words = [compiler.program(variant), *names]
    said = _check(words, len(names), tmp_path, LOCPATH=tmp_path, LC_ALL="de_DE.UTF-8")
    assert "decimal point: ,\n" in said, said


@pytest.mark.parametrize("variant", ["aarch64"])
def test_cc_tests_pass_on_aarch64(variant: str, compiler: Compiler, tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64")
    if not compiler.can(variant) or emulator is None:
        pytest.skip("no aarch64: apt-get install g++-aarch64-linux-gnu qemu-user")
    names = _names(path for path in AARCH64.sources if path.name.endswith("_test.cc"))
    # The emulator does not tell the others when a process that held a robust mutex is killed; and
    # these are long there, and the same on every processor.
    left_out = ("DeathOf", "Killed", "BitsBetweenHosts", "RanksSend")
    names = [name for name in names if not name.startswith(left_out)]
    _check([emulator, compiler.program(variant), *names], len(names), tmp_path)
