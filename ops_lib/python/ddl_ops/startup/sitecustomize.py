"""Runs when the Python of a rank starts: notes how it ends and what it writes; TensorFlow 1.

The rank shim puts this folder on ``PYTHONPATH``. The record tells whoever started the job which
exception ended the script, by type and place, so that a syntax error is not tried three times; and
which results it wrote, so that several ranks that write one file are known. With DDL_TF1
`import tensorflow` will give the 1.x API. The garbage collector rests while TensorFlow is imported.
Where no Horovod is installed, `import horovod` gives ours (``ddl_ops/stand_in``).
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from ddl_tensorflow_finder import TensorFlowFinder


def _place(error: BaseException, trace: TracebackType | None) -> tuple[str, int]:
    """Where it happened: the last frame in the current folder, else the last of all."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(trace)]
    if not frames:  # a syntax error of the script itself
        frames = [(getattr(error, "filename", None) or "", getattr(error, "lineno", None) or 0)]
    here = f"{_folder}{os.sep}"
    own = [(file.removeprefix(here), line) for file, line in frames if file.startswith(here)]
    return own[-1] if own else frames[-1]


def _record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _file is None:
        return
    file, line = _place(error, trace)
    facts = {
        "t": time.time(),
        "type": kind.__name__,
        "bases": [base.__name__ for base in kind.__mro__[1:]],
        "message": str(error)[:_LONGEST_MESSAGE],
        "file": file,
        "line": line,
    }
    try:
        partial = Path(f"{_file}.partial")
        partial.write_text(json.dumps(facts), "utf-8")
        partial.replace(_file)
    except OSError as problem:  # a full disk must not hide the traceback itself
        print(f"cannot record the exception in {_file}: {problem}", file=sys.stderr)


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    _previous_hook(kind, error, trace)
    sys.stderr.flush()
    if os.getpid() != _pid:
        return  # a fork: it ends alone
    _record(kind, error, trace)
    _abort_mpi()


def _abort_mpi() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        # A script that uses mpi4py alone would wait in MPI_Finalize for ranks that wait for it.
        mpi.COMM_WORLD.Abort(1)


def record_uncaught() -> None:
    """At the end of a script that has put a hook of its own in the place of ours.

    Python keeps the exception before it calls any hook. A test runner keeps one that it
    has caught in the same place: the traceback of that begins further in.
    """
    error, trace = getattr(sys, "last_value", None), getattr(sys, "last_traceback", None)
    if os.getpid() != _pid or error is None or trace is None:
        return
    if trace.tb_frame.f_back is None:
        _record(type(error), error, trace)
        _abort_mpi()


def _note_writes(file: str, folders: list[str]) -> None:
    """From here on notes each file below `folders` that is opened for writing, once, in `file`.

    Python itself tells of it, in whatever thread, and in forks. What C code opens it does not see,
    unless somebody tells (sys.audit), as ddl does of h5py.
    """
    known: set[str] = set()
    below = tuple(os.path.abspath(folder) + os.sep for folder in folders)

    def noted(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, mode, flags = arguments
        # Files that are emptied: many may append to one, or write a part each; one that must be new
        # is made by one rank alone.
        if mode is None:  # os.open
            if not flags & os.O_TRUNC or flags & os.O_EXCL:
                return
        elif "w" not in mode:
            return
        try:
            if isinstance(path, int):
                return
            name = os.path.abspath(os.fsdecode(path))
            if not name.startswith(below) or name in known or len(known) >= _MOST_FILES:
                return
            known.add(name)
            line = json.dumps(name)[:_LONGEST] + "\n"
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(descriptor, line.encode())  # one write, so that lines stay whole
            finally:
                os.close(descriptor)
        except Exception:  # what is raised here is raised by the script's own open()
            return

    sys.addaudithook(noted)


class _HorovodFinder(MetaPathFinder):
    """Finds horovod where it is installed, else among what stands in."""

    def __init__(self) -> None:
        self._asks = self._said = False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "horovod" or self._asks:
            return None
        self._asks = True  # the others
        try:
            spec = importlib.util.find_spec(name)
            here = importlib.util.find_spec("ddl_ops") is not None
        finally:
            self._asks = False
        if spec is not None and spec.origin is not None:  # None: a mere folder of that name
            if not self._said and not Path(spec.origin).is_relative_to(_OPS):
                _say(f"`import horovod` gives {spec.origin}, which is installed, and not ddl's own")
                self._said = True
            return spec
        # Without ddl_ops in this Python, ours would find nothing.
        return PathFinder.find_spec(name, [str(_OPS / "stand_in")]) if here else spec


def _say(what: str) -> None:
    """In the job's log, once for all ranks."""
    if all(os.environ.get(rank, "0") == "0" for rank in _RANKS):
        print(f"ddl: rank 0: {what}", file=sys.stderr, flush=True)


def _chain() -> None:
    """Runs the sitecustomize that this one stands in front of, if there is one."""
    here = Path(__file__).resolve().parent
    for folder in sys.path:
        other = Path(folder or ".", "sitecustomize.py")
        if other.resolve().parent != here and other.is_file():
            code = compile(other.read_bytes(), str(other), "exec")
            exec(code, {"__name__": "sitecustomize", "__file__": str(other)})  # noqa: S102
            return


def _start_tensorflow_1() -> None:
    try:
        from ddl_ops.tf1 import importing
    except ImportError as error:  # Python only mentions what goes wrong here, and would go on
        raise SystemExit(
            f"TensorFlow 1 mode needs ddl-ops in {sys.executable} ({error}). Write `python` in "
            "the command, which is the ranks' Python, or install it there."
        ) from error
    importing.install()


_OPS = Path(__file__).resolve().parents[1]
# What launchers set: ddl_ops.environment.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_MOST_FILES = 200
_LONGEST = 2_000
_LONGEST_MESSAGE = 200_000  # of which no more is read; ddl_airflow.launchers.records
_folder = os.getcwd()
_pid = os.getpid()
# Taken away, so that Pythons which the script starts do not speak for it, and are not changed.
_file = os.environ.pop("DDL_EXCEPTION_FILE", None)
if _file is not None:
    # Of an earlier Python. The command may have got over it, as over one that looks for a module:
    # the shim sees how it ends.
    with suppress(OSError):
        os.replace(_file, f"{_file}.earlier")
_previous_hook = sys.excepthook
sys.excepthook = _hook
atexit.register(record_uncaught)
_writes_file = os.environ.pop("DDL_WRITES_FILE", None)
_results = ("RESULT_DIR", "CHECKPOINT_DIR", "EXPERIMENT_DIR")
if _writes_file is not None:
    _note_writes(_writes_file, [os.environ[name] for name in _results if os.environ.get(name)])
if os.environ.pop("DDL_TF1", "0") != "0":
    _start_tensorflow_1()
sys.meta_path[:0] = [TensorFlowFinder(), _HorovodFinder()]
_chain()
