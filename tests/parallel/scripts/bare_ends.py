"""Ways in which a job can end, one for each name, without TensorFlow: a start in milliseconds.

The engine and ddl_ops.lifecycle are the real ones; the library that carries them was compiled
without the ops. argv: that library, how to end.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import types

from speech import RANK, SIZE, SLOWNESS, say

LIBRARY, HOW = sys.argv[1:]


def load() -> ctypes.CDLL:
    library = ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)  # MPI's plugins look for MPI
    library.ddl_init.argtypes = [ctypes.POINTER(ctypes.c_int), ctypes.c_char_p, ctypes.c_int]
    return library


def total() -> str:
    """The sum over the ranks of [1, rank], or the code and text of the error."""
    values = (ctypes.c_float * 2)(1.0, float(RANK))
    message = ctypes.create_string_buffer(2048)
    code = load().engine_sum(values, 2, message, len(message))
    return f"error {code}: {message.value.decode()}" if code else f"total {list(values)}"


def total_or_raise() -> None:
    said = total()
    if said.startswith("error"):
        raise RuntimeError(said)


def catch_and_keep() -> None:
    """As a test runner does, for a debugger."""
    try:
        raise ValueError("caught")
    except ValueError:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()


# What ddl_ops.loader does with the library, without its import of TensorFlow.
stand_in = types.ModuleType("ddl_ops.loader")
stand_in.runtime = load
sys.modules["ddl_ops.loader"] = stand_in

if HOW.startswith("mpi4py"):
    import mpi4py

    if HOW == "mpi4py funneled" or (HOW == "mpi4py funneled on one" and RANK == 1):
        mpi4py.rc.thread_level = "funneled"
    if HOW != "mpi4py second":
        from mpi4py import MPI

        say(f"mpi4py: rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}")

from ddl_ops import lifecycle  # noqa: E402

lifecycle.init()
say(total())

if HOW == "sys.exit":
    sys.exit(0)
elif HOW == "raise":
    if RANK == SIZE - 1:
        raise ValueError("this rank has had enough")
    while True:
        total_or_raise()
elif HOW == "raise past a hook of the script's own":
    sys.excepthook = lambda kind, error, trace: say(f"{kind.__name__}: {error}")
    if RANK == SIZE - 1:
        raise ValueError("no space left")
    time.sleep(20)
elif HOW == "caught and kept":
    catch_and_keep()
elif HOW == "os._exit":
    if RANK == SIZE - 1:
        say("gone")
        os._exit(0)
    while True:
        total_or_raise()
elif HOW == "exit 3":
    if RANK == SIZE - 1:
        say(f"exiting at {time.time()}")
        sys.exit(3)
    total_or_raise()
elif HOW == "exit 3 together":
    sys.exit(3)
elif HOW == "late end":
    time.sleep(1.5 * RANK * SLOWNESS)  # the others wait, without a limit and without an error
elif HOW == "missing root":
    if RANK == 0:
        time.sleep(2.4 * float(os.environ["DDL_STALL_TIMEOUT"]))
    say(total())
    say(total())
elif HOW == "slow member":
    # Rank 1 waits for rank 0, which waits for rank 2: longer than the limit in all, each within it.
    time.sleep({0: 3, 1: 0, 2: 6}[RANK])
    say(total())
elif HOW == "SIGTERM":
    say(f"pid {os.getpid()}")
    while True:
        total_or_raise()
elif HOW in ("in a thread", "in a daemon thread"):
    # The script ends; a thread of it is still in a collective to which nobody comes. Python waits
    # for it, or does not.
    if RANK == 0:
        alone = HOW == "in a daemon thread"
        threading.Thread(target=lambda: say(total()), daemon=alone).start()
        time.sleep(0.3)
elif HOW == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(7)  # runs what is registered for the exit of the rank
    say(f"child {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    say(total())
elif HOW == "mpi4py second":
    from mpi4py import MPI

    say(f"mpi4py: {MPI.Query_thread() == MPI.THREAD_MULTIPLE} {MPI.COMM_WORLD.allreduce(RANK)}")
elif HOW == "mpi4py first":
    # The user's own end of MPI, with our thread still running.
    MPI.Finalize()
    say("finalized by mpi4py")
say("end of script")
