"""Compiles the C++ tests, without TensorFlow and MPI, and runs them plain and under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "ops_lib" / "cc"

VARIANTS = {
    "plain": ["-O2"],
    "address-undefined": [
        "-O1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=undefined",
    ],
    "thread": ["-O1", "-fsanitize=thread"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_cc_tests_pass(variant: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: apt-get install g++")
    tested = [
        SOURCES / "core" / "arithmetic.cc",
        SOURCES / "core" / "dtype.cc",
        SOURCES / "core" / "half.cc",
        SOURCES / "core" / "tuner.cc",
        SOURCES / "core" / "vector.cc",
        *(
            path
            for layer in ("transport", "algorithms")
            for path in sorted((SOURCES / layer).glob("*.cc"))
            if not path.name.startswith("mpi_")
        ),
        *sorted((SOURCES / "comm").glob("nccl_*.cc")),
        SOURCES / "runtime" / "agreement.cc",
        SOURCES / "runtime" / "description.cc",
        SOURCES / "runtime" / "fused_allreduce.cc",
        SOURCES / "runtime" / "negotiator.cc",
        SOURCES / "runtime" / "statistics.cc",
        SOURCES / "runtime" / "teams.cc",
        SOURCES / "runtime" / "timeline.cc",
    ]
    program = tmp_path / "tests"
    compiled = subprocess.run(
        [
            *(compiler, "-std=c++17", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"),
            *VARIANTS[variant],
            *(f"-I{SOURCES}", f"-I{HERE}", "-o", str(program)),
            *map(str, [*sorted(HERE.glob("*.cc")), *tested]),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stdout
    ran = subprocess.run(
        [str(program)],
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
