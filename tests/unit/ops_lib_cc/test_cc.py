"""Runs the C++ tests, without TensorFlow and MPI, under sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.ops_lib_cc.conftest import HERE, VARIANTS, Compiler


@pytest.mark.parametrize("variant", VARIANTS)
def test_cc_tests_pass(variant: str, compiler: Compiler, tmp_path: Path) -> None:
    if compiler.path is None:
        pytest.skip("no g++: apt-get install g++")
    ran = subprocess.run(
        [compiler.program(variant)],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout
    names = [line for path in HERE.glob("*_test.cc") for line in path.read_text().splitlines()]
    expected = sum(line.startswith("TEST(") for line in names)
    assert ran.stdout.count("\nok     ") == expected, ran.stdout
