"""Starts the ranks' communication and ends it together, whatever happens."""

from __future__ import annotations

import atexit
import ctypes
import functools
import sys
from types import TracebackType

from ddl_ops import averaging
from ddl_ops.environment import (
    PLACEMENT,
    child_of_rank,
    claim_rank,
    require_launched,
    unknown_settings,
)
from ddl_ops.loader import runtime
from ddl_ops.own_errors import shortened

_started = False
_by_import = False


def initialised() -> bool:
    """Whether init() has succeeded, in this process: a fork of it is no rank."""
    return _started and not child_of_rank()


def init(what: str = "ddl.init()", *, by_import: bool = False) -> None:
    """Starts communication among all ranks. Collective: waits until all have come.

    From here on an uncaught exception on one rank, also one that this function raises, ends all of
    them, and a rank that ends normally waits for the others. Raises RuntimeError outside mpirun, on
    a second call, in a process that a rank has started, and if MPI does not start or does not
    connect all ranks.

    Args:
        what: the call of the script, for the message.
        by_import: `import ddl` calls, because of DDL_OPTIONS. Then the script may call once more:
            it runs in both modes unchanged.
    """
    global _started, _by_import
    require_launched(what)
    if _started and _by_import and not by_import:
        _by_import = False
        return
    if _started:
        raise RuntimeError("ddl is already initialised: call ddl.init() once.")
    _by_import = by_import
    library = runtime()
    # Before the start: whatever is started from now on, meanwhile as well, is no rank.
    claim_rank()
    # Before the start: where it fails on one rank, the others wait for that one.
    _abort_on_uncaught_exceptions()
    if PLACEMENT.rank == 0:
        for sentence in unknown_settings():
            print(f"ddl: rank 0: {sentence}", file=sys.stderr)
    topology = (ctypes.c_int * 4)()
    message = ctypes.create_string_buffer(2048)
    if library.ddl_init(topology, message, len(message)) != 0:
        raise RuntimeError(f"ddl could not start: {message.value.decode(errors='replace')}")
    rank, size = topology[0], topology[1]
    if (rank, size) != (PLACEMENT.rank, PLACEMENT.size):
        raise RuntimeError(
            f"The launcher started rank {PLACEMENT.rank} of {PLACEMENT.size}, but MPI connected it "
            f"as rank {rank} of {size}. Use the mpirun that belongs to this Python environment's "
            "MPI (ddl-run does)."
        )
    _started = True
    averaging.started()
    atexit.register(_leave)


def shutdown() -> None:
    """Leaves the group of ranks, once what was started has run and the others leave too.

    Nothing happens before init(), a second time or in a fork. No collective may follow.
    """
    if initialised():
        runtime().ddl_shutdown()


def _leave() -> None:
    trace = getattr(sys, "last_traceback", None)
    # The script has its own sys.excepthook in the place of ours. Only of an exception that nobody
    # has caught does the traceback begin where nothing has called: see startup/sitecustomize.py.
    if trace is not None and trace.tb_frame.f_back is None and initialised():
        record = getattr(sys.modules.get("sitecustomize"), "record_uncaught", None)
        if record is not None:
            record()  # its own turn at the end would come later
        _abort()
    shutdown()


def _abort() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    runtime().ddl_abort(1)


@functools.cache
def _abort_on_uncaught_exceptions() -> None:
    # The other ranks would wait for this one; mpirun's own signal would hide the traceback.
    previous = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            error, traceback = shortened(error, traceback) or (error, traceback)
        except Exception as problem:  # whatever it is, the others must be ended
            print(f"ddl: the error below could not be shortened: {problem!r}", file=sys.stderr)
        previous(kind, error, traceback)
        if child_of_rank():
            return  # a fork: it ends alone
        _abort()

    sys.excepthook = hook
