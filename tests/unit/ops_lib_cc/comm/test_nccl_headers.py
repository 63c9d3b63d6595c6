"""Holds our declarations of NCCL and CUDA against their own headers and libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.limits import within

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
SOURCES = ROOT / "ops_lib" / "cc"
# Of TensorFlow's own wheels, or what `make check-nccl` has fetched.
FOLDERS = [Path(sysconfig.get_paths()["purelib"]) / "nvidia", ROOT / "build" / "nvidia" / "nvidia"]
PACKAGES = ["nccl", "cuda_runtime", "cuda_nvcc", "cuda_cccl"]
pytestmark = pytest.mark.cc


@pytest.fixture(scope="module")
def nvidia() -> Path:
    for folder in FOLDERS:
        if all((folder / package / "include").is_dir() for package in PACKAGES):
            return folder
    pytest.skip("no headers of NCCL and CUDA: make check-nccl fetches them (400 MB)")


@pytest.fixture(scope="module")
def program(nvidia: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++: apt-get install g++")
    path = tmp_path_factory.mktemp("nccl") / "nccl_headers"
    sources = [HERE / "nccl_headers.cc", *sorted((SOURCES / "comm").glob("nccl_*.cc"))]
    includes = [word for p in PACKAGES for word in ("-isystem", str(nvidia / p / "include"))]
    compiled = subprocess.run(
        [
            *(compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}", *includes),
            *("-o", str(path), *map(str, sources), str(SOURCES / "core" / "dtype.cc"), "-ldl"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    return path


def test_real_libraries_have_what_we_call(program: Path, nvidia: Path, tmp_path: Path) -> None:
    folders = [nvidia / "nccl" / "lib", nvidia / "cuda_runtime" / "lib"]
    try:
        driver = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=True)
        has_driver = "libcuda.so.1" in driver.stdout
    except FileNotFoundError:
        has_driver = False
    if not has_driver:
        # An empty one, so that the search goes on; CUDA itself then finds no driver in it.
        subprocess.run(
            ["g++", "-shared", "-x", "c", "/dev/null", "-o", str(tmp_path / "libcuda.so.1")],
            check=True,
        )
        folders.append(tmp_path)
    done = subprocess.run(
        [str(program)],
        env=os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=within(300),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("nccl 2"), done.stdout
    if not has_driver:
        assert "gpu: cudaSetDevice failed: CUDA driver version is insufficient" in done.stdout
