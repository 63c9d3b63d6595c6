"""Conversions of half types against NumPy's: every float16 and bfloat16, and float32s of all kinds.

Once as compiled for this processor and once without its instructions.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

CC = Path(__file__).resolve().parents[4] / "ops_lib" / "cc"
DRIVER = Path(__file__).resolve().parent / "half_driver.cc"
ml_dtypes = pytest.importorskip("ml_dtypes", reason="TensorFlow brings NumPy's bfloat16")
TYPES = {0: np.dtype(np.float16), 1: np.dtype(ml_dtypes.bfloat16)}
pytestmark = pytest.mark.cc


@pytest.fixture(scope="module", params=["vectors", "portable"])
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++: apt-get install g++")
    folder = tmp_path_factory.mktemp("half")
    lines = ["#include <cstdint>", "#include <cstring>"]  # these need the macro
    if request.param == "portable":
        lines.append("#undef __x86_64__")
    lines += [f'#include "{path}"' for path in (CC / "core" / "half.cc", DRIVER)]
    source, target = folder / "half.cc", folder / "half.so"
    source.write_text("\n".join(lines) + "\n")
    command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([*command, f"-I{CC}", str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    for function in (library.widen, library.narrow):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        function.restype = None
    return library


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bits, but for NaNs, of which the kind is enough."""
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    bits = f"u{want.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~nan], want.view(bits)[~nan])


@pytest.mark.parametrize("brain", [0, 1], ids=["float16", "bfloat16"])
def test_every_half_widens_exactly(half: ctypes.CDLL, brain: int) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(TYPES[brain])
    floats = np.empty(halves.size, np.float32)
    half.widen(halves.ctypes.data, floats.ctypes.data, halves.size, brain)
    same(floats, halves.astype(np.float32))


def floats_of_all_kinds() -> np.ndarray:
    generator = np.random.RandomState(3)
    anything = generator.randint(0, 1 << 32, 1_000_003, dtype=np.uint64).astype(np.uint32)
    # Around every float16 and bfloat16 and half way to the next, where rounding decides.
    halves = np.arange(1 << 16, dtype=np.uint32)
    near = [(halves << 16) + np.uint32(d) for d in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
    wide = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    near += [wide + np.uint32(d) for d in (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)]
    small = (generator.randn(100_000) * 2.0 ** generator.randint(-30, -12, 100_000)).astype("f4")
    return np.concatenate([anything, *near, small.view(np.uint32)]).view(np.float32)


@pytest.mark.parametrize("brain", [0, 1], ids=["float16", "bfloat16"])
def test_floats_round_to_the_nearest_half(half: ctypes.CDLL, brain: int) -> None:
    floats = floats_of_all_kinds()
    halves = np.empty(floats.size, TYPES[brain])
    half.narrow(floats.ctypes.data, halves.ctypes.data, floats.size, brain)
    with np.errstate(over="ignore", invalid="ignore"):
        want = floats.astype(TYPES[brain])
    same(halves, want)


@pytest.mark.parametrize("brain", [0, 1], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 31])
def test_any_count_writes_no_further(half: ctypes.CDLL, brain: int, count: int) -> None:
    floats = np.arange(40, dtype=np.float32)
    halves = np.full(40, -1, TYPES[brain])
    half.narrow(floats.ctypes.data, halves.ctypes.data, count, brain)
    assert halves.astype("f4").tolist() == [*range(count), *[-1] * (40 - count)]
    back = np.full(40, -1, np.float32)
    half.widen(halves.ctypes.data, back.ctypes.data, count, brain)
    assert back.tolist() == [*range(count), *[-1] * (40 - count)]
