"""Ends all ranks together where their place is wanted: what was saved is gone on from.

SIGTERM (Kubernetes, a spot host), or SIGURG, which nobody else minds, asks a rank to end. It may
reach one rank alone, at any moment. So the ranks agree, at the end of each step, whether any of
them has been asked, and save at one and the same step.

A rank tells whoever started the job what became of that, in
``$DDL_RECORD_DIR/rank-<n>.preemption.json``, which the rank shim puts into its record:

    {"listens": whether SIGTERM asks it, and does not end it, "step": at which it has been saved}

Imports no TensorFlow.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import numpy as np

from ddl_ops import arrays, progress
from ddl_ops.command_line import KEEPS_ID
from ddl_ops.environment import PLACEMENT, SHELL, child_of_rank
from ddl_ops.lifecycle import initialised
from ddl_ops.rank_record import preemption_file

# Of a step's number, a second sum: ranks at 1, 2 and 3 have the mean of ranks that are all at 2.
_SPREAD = 2_654_435_761
_MODULO = 2**31
_REPORT_S = 1.0
# Of the file that tells of it, so that it can be written over.
_RESERVED_BYTES = 256

# Where TensorFlow has the classes of its errors, and the ops that run Python.
_ERRORS, _OPS = "errors_impl.py", "script_ops.py"

# Called with the step after which the ranks end, and the rank that saves for all.
Save = Callable[[int, int], None]


class _State:
    """What this process knows. Signal handlers run in the main thread, too."""

    listening = False
    asked = False
    save: Save | None = None
    done: int | None = None  # not reported yet
    reported_at = -math.inf
    ending: tuple[int, int] | None = None  # the step and the saver, for the main thread to end with
    present = 1  # ranks that had not joined when they agreed to end


def listen() -> None:
    """From here on a signal asks this rank to end; it ends at the next end of a step.

    A handler of SIGTERM that the script has installed stays, and so does one that it installs
    later: then SIGTERM is the script's, and SIGURG alone asks. What the rank starts or forks is
    ended by SIGTERM as ever.

    Raises RuntimeError beside the main thread, where Python sets no handlers.
    """
    if _State.listening or child_of_rank():
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "ddl can be told to end in the main thread only: call ddl.on_preempt() there, before "
            "the training begins."
        )
    mine = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, _hear)
    signal.signal(signal.SIGURG, _hear)
    os.register_at_fork(after_in_child=_forget)
    _State.listening = True
    _tell({"listens": mine}, anew=True)


def on_preempt(save: Callable[[int], None], *, every_rank: bool = False) -> None:
    """See ``ddl.on_preempt``."""

    def save_here(step: int, saver: int) -> None:
        if every_rank or PLACEMENT.rank == saver:
            save(step)

    save_by(save_here)
    atexit.register(_report)


def save_by(save: Save) -> None:
    """From here on the ranks can be asked to end, and each calls ``save`` before it does."""
    _State.save = save
    listen()


def end_of_step(step: int) -> None:
    """See ``ddl.end_of_step``."""
    if _State.save is None:
        raise RuntimeError("ddl.end_of_step() before ddl.on_preempt(save): say what saves.")
    step = progress.whole_steps(step, "ddl.end_of_step")
    if PLACEMENT.rank == 0:
        _State.done = step
        if time.monotonic() - _State.reported_at >= _REPORT_S:
            _report()
    if wanted(step, "Give ddl.end_of_step() the number of steps that all ranks have done."):
        end(step)


def _report() -> None:
    """Shows where the training is, by the steps that are done in all tries."""
    if _State.done is not None:
        progress.append({"step": _State.done}, source="script")
        _State.reported_at = time.monotonic()
        _State.done = None


def wanted(step: int, cure: str) -> bool:
    """Whether the ranks are to end now, after so many steps: the same on all. Collective.

    Args:
        step: how many all ranks have done.
        cure: a sentence on what to do where they have done different numbers.

    Raises RuntimeError if ranks are to end and are at different steps; else as a barrier.
    """
    if not _together():
        return _State.asked
    present, asked, *of_steps = _sums(int(_State.asked), step)
    if not asked:
        return False
    if of_steps != [present * one for one in _of_step(step)]:
        raise RuntimeError(
            f"the ranks are to end, and are not at the same step: rank {PLACEMENT.rank} is at "
            f"{step}. {cure}"
        )
    _State.present = present
    return True


def furthest(step: int) -> int:
    """The most steps that any rank has done. Collective, where no rank has joined."""
    if not _together():
        return step
    steps = np.zeros(PLACEMENT.size, np.int64)
    steps[PLACEMENT.rank] = step
    arrays.add("how many steps are done", steps)
    return int(steps.max())


def end(step: int) -> NoReturn:
    """After ``wanted`` was true: saves, and ends this process with the others, by SystemExit."""
    saver = 0
    if _together() and _State.present < PLACEMENT.size:
        # Lets those return that have joined, and come to after_join. The weights of rank 0 may be
        # old, if it is one of them: whoever joins last has not joined before.
        saver = arrays.join()
        _sums(1, step)
    _end(step, saver)


def after_join(last: int) -> None:
    """For a rank that has joined: ends it where the others agreed to end while it waited.

    Args:
        last: the rank that joined last.

    Raises SystemExit then, also in an op, whose run fails; the main thread ends right after it.
    """
    if not _State.listening or not _together():
        return
    _, ending, of_steps, _ = _sums(0, 0)
    if not ending:
        return
    _State.ending = of_steps // ending, last
    if threading.current_thread() is threading.main_thread():
        _end_outside(sys._getframe())
    elif signal.getsignal(signal.SIGURG) is not _hear:
        _end_now()  # the script has taken it: nobody ends it then
    else:
        os.kill(os.getpid(), signal.SIGURG)
    raise SystemExit(0)


def _end(step: int, saver: int) -> NoReturn:
    if _State.save is not None:
        _State.save(step, saver)
    if _together():
        arrays.barrier(f"all have saved after step {step}")
    told = _tell({"step": step})
    if PLACEMENT.rank == 0:
        print(f"ddl: asked to make room: saved after step {step}, all ranks end", flush=True)
    # Who ends well, and is not known to have made room, is taken for one whose training is done.
    if not told:
        raise SystemExit(1)
    _end_shell()
    raise SystemExit(0)


def _end_shell() -> None:
    """Has the shell that runs this script, if one does, run no more of its command after it.

    That is what it does on SIGTERM, which comes to it only on ranks that were asked by it.
    """
    if not (pid := os.environ.get(SHELL)):
        return
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # or it has ended
        # Something else may have taken its place, by exec, or have its number elsewhere.
        if KEEPS_ID.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGTERM)


def _together() -> bool:
    return PLACEMENT.size > 1 and initialised()


def _of_step(step: int) -> list[int]:
    return [step, step * _SPREAD % _MODULO]


def _sums(flag: int, step: int) -> list[int]:
    """Sums over the ranks that have not joined: how many they are, flags, numbers of the step."""
    values = np.array([1, flag, *_of_step(step)], np.int64)
    arrays.add("whether the ranks are to end", values)
    return [int(one) for one in values]


def _hear(_signum: int, frame: FrameType | None) -> None:
    if _State.ending is None:
        _State.asked = True
    else:
        _end_outside(frame)


def _end_outside(frame: FrameType | None) -> None:
    """In the main thread: ends at once, or as soon as it is out of TensorFlow's C++.

    SystemExit of an op is an error of its run, with which the script would fail, or go on; and C++
    that makes an error takes another one for its own fault.
    """
    outside = _caller_of_tensorflow(frame)
    if outside is None:
        _end_now()
        return

    def end_behind(frame: FrameType, _event: str, _argument: Any) -> None:
        """Of Python, at each call and return: C++ calls Python for the error's text, too."""
        if frame is outside or not _is_called_by(outside, frame):
            sys.setprofile(None)
            _end_now()

    sys.setprofile(end_behind)


def _caller_of_tensorflow(frame: FrameType | None) -> FrameType | None:
    """What waits for TensorFlow's C++, which makes an error or runs an op; None if nothing does."""
    caller = None
    while frame is not None:
        if Path(frame.f_code.co_filename).name in (_ERRORS, _OPS):
            caller = frame.f_back
        frame = frame.f_back
    return caller


def _is_called_by(caller: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not caller:
        frame = frame.f_back
    return frame is not None


def _end_now() -> None:
    if _State.ending is not None:
        ending, _State.ending = _State.ending, None
        _end(*ending)


def _forget() -> None:
    """In a fork: nobody looks at the flag there, so SIGTERM has to end it."""
    for number in (signal.SIGTERM, signal.SIGURG):
        if signal.getsignal(number) is _hear:
            signal.signal(number, signal.SIG_DFL)
    _State.listening = _State.asked = False
    _State.ending = None


def _tell(facts: dict[str, Any], *, anew: bool = False) -> bool:
    """Adds to what whoever started the job knows of this rank; says it where that cannot be.

    Args:
        facts: to add.
        anew: what is known is of an earlier program of the command.

    Returns whether it is known, or nobody wants to know.
    """
    if not (directory := os.environ.get("DDL_RECORD_DIR")):
        return True
    path = preemption_file(Path(directory), PLACEMENT.rank)
    text = json.dumps(({} if anew else _told(path)) | facts).encode().ljust(_RESERVED_BYTES)
    partial = Path(f"{path}.partial")
    try:
        partial.write_bytes(text)
        partial.replace(path)
    except OSError as error:
        try:  # a full disk has room where the file is
            with path.open("r+b") as file:
                file.write(text)
                file.truncate()
        except OSError:
            arrays.say(f"cannot note {json.dumps(facts)} in {path}: {error.strerror}")
            return False
    return True


def _told(path: Path) -> dict[str, Any]:
    """What is known so far: nothing if the file is not there, or no longer whole."""
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
