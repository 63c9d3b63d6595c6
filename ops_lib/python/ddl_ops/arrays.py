"""The collectives on NumPy arrays, in the order of the program. Imports no TensorFlow."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddl_ops import averaging
from ddl_ops.environment import PLACEMENT
from ddl_ops.loader import runtime
from ddl_ops.program_order import stream

# ddl::Code of ops_lib/cc/core/status.h.
_INVALID_ARGUMENT = 1
_UNAVAILABLE = 6
_DIGEST_WORDS = 8  # of 32 bits, so that sums over ranks fit 64
# What messages may still be written to. Never freed.
_abandoned: list[np.ndarray[Any, Any]] = []
_joins: list[int] = []
_SUMMED = ("float16", "float32", "float64", "int32", "int64")


class NotTogetherError(RuntimeError):
    """Some ranks did not call what all have to."""


def _raise_unless_ok(
    code: int, message: ctypes.Array[ctypes.c_char], given: np.ndarray[Any, Any] | None = None
) -> None:
    """Keeps what the collective was given if an error of the transport left it to MPI."""
    if code == 0:
        return
    if given is not None and runtime().ddl_has_abandoned_messages():
        _abandoned.append(given)
    text = message.value.decode(errors="replace")
    if code == _INVALID_ARGUMENT:
        raise ValueError(text)
    raise NotTogetherError(text) if code == _UNAVAILABLE else RuntimeError(text)


def _all_reduce(
    name: str, array: np.ndarray[Any, Any], *, average: bool = False, optional: bool = False
) -> None:
    """Sums (or averages) a contiguous array in place."""
    message = ctypes.create_string_buffer(2048)
    code = runtime().ddl_all_reduce(
        *(name.encode(), _stream(name), _dtype_number(array), average, optional),
        *(array.ctypes.data, array.size, message, len(message)),
    )
    _raise_unless_ok(code, message, array)


def _dtype_number(array: np.ndarray[Any, Any]) -> int:
    if array.dtype.name not in _SUMMED:
        raise TypeError(
            f"dl_comm cannot add arrays of {array.dtype.name}. Convert them to one of "
            f"{', '.join(_SUMMED)}."
        )
    return int(runtime().ddl_dtype(array.dtype.name.encode()))


def _stream(what: str) -> bytes:
    return stream(what).encode()


def barrier(name: str = "barrier", hint: str = "") -> None:
    """Waits until all ranks are at the barrier of that name.

    Args:
        name: what all ranks must have in common here, as "the end of epoch 3 after 100 steps".
        hint: a sentence on what to do where a rank is at something else.

    Raises ValueError on every rank, which names both, if ranks are at different things.
    """
    message = ctypes.create_string_buffer(2048)
    code = runtime().ddl_barrier(
        name.encode(), _stream("barrier()"), hint.encode(), message, len(message)
    )
    _raise_unless_ok(code, message)


def join() -> int:
    """Contributes zeros to what the other ranks reduce, until all ranks have called it.

    Meanwhile averages are over the ranks that have not joined. Returns the last rank that joined:
    the one that has had the most data. Raises RuntimeError if a rank leaves or does not come.
    """
    last = ctypes.c_int(0)
    message = ctypes.create_string_buffer(2048)
    code = runtime().ddl_join(_stream("join()"), ctypes.byref(last), message, len(message))
    _raise_unless_ok(code, message)
    _joins.append(last.value)
    return last.value


def last_to_join() -> int | None:
    """The rank that came last to the last join(); None before the first. The same on all."""
    return _joins[-1] if _joins else None


def have_joined() -> bool:
    """Whether all ranks have joined before; the answer is the same on all."""
    return bool(_joins)


def average(array: np.ndarray[Any, Any]) -> None:
    """Averages an array over the ranks, in place. Errors as gradients."""
    values = np.array(array, order="C")
    _all_reduce("dl_comm.average", values, average=True)
    if values.ndim:  # a single number is to be shown
        averaging.averaged_by_script()
    array[...] = values


def broadcast(arrays: Sequence[np.ndarray[Any, Any]], root: int) -> None:
    """Gives each array rank `root`'s values, in place: any dtype without pointers, NaN and all."""
    for number, array in enumerate(arrays):
        values = np.array(array, order="C")
        message = ctypes.create_string_buffer(2048)
        name = f"dl_comm.broadcast {number}"
        code = runtime().ddl_broadcast(
            *(name.encode(), _stream(name), root),
            *(values.ctypes.data, values.nbytes, message, len(message)),
        )
        _raise_unless_ok(code, message, values)
        array[...] = values


def differing(arrays: Sequence[np.ndarray[Any, Any]]) -> list[int]:
    """Indices of the arrays whose values, shape or dtype are not the same on all ranks.

    Every bit counts. Raises NotTogetherError if rank 0 calls it and the others are seen to wait
    with something else for 5 s (or a fourth of DDL_STALL_TIMEOUT): nothing was compared then, and
    the ranks can go on.
    """
    mine = digests(arrays)
    total = mine.copy()
    _all_reduce("dl_comm.check_buffers_match", total, optional=True)
    return np.flatnonzero((total != PLACEMENT.size * mine).any(axis=1)).tolist()


def digests(arrays: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """int64 [arrays, words], which depends on every bit, shape and dtype; ranks may add them up."""
    found = np.zeros((len(arrays), _DIGEST_WORDS), np.int64)
    for digest, array in zip(found, arrays, strict=True):
        hashed = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=32)
        hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        digest[:] = np.frombuffer(hashed.digest(), np.uint32)
    return found


def add(name: str, array: np.ndarray[Any, Any]) -> None:
    """Sums a contiguous array over the ranks, in place; those that have joined add zeros.

    Args:
        name: what it is, alike on all ranks: ValueError on every rank where they differ.
        array: float16, float32, float64, int32 or int64, of one shape.
    """
    _all_reduce(name, array)


def prepare_teams(count: int, max_elements: int) -> None:
    """How many teams there are, and how many elements a step of one has at most."""
    runtime().ddl_prepare_teams(count, max_elements)


def configure_team(
    team: int, *, smooth: bool, ksteps: int, max_steps: int, report_every: int
) -> None:
    """See TeamPlan of ops_lib/cc/runtime/teams.h. Raises ValueError if there is no such team."""
    message = ctypes.create_string_buffer(2048)
    code = runtime().ddl_configure_team(
        team, smooth, ksteps, max_steps, report_every, message, len(message)
    )
    _raise_unless_ok(code, message)


def gradients(
    arrays: Sequence[np.ndarray[Any, Any] | None], team: int
) -> list[np.ndarray[Any, Any] | None]:
    """What a team's step applies, in new arrays; None stays None, and must on every rank.

    Raises ValueError if shapes differ between ranks or from the step before, or if there are too
    many elements; RuntimeError without a plan for the team, or if a rank has left or does not come;
    TypeError for dtypes that cannot be added.
    """
    results: list[np.ndarray[Any, Any] | None] = [
        None if array is None else np.empty(array.shape, array.dtype) for array in arrays
    ]
    by_dtype: dict[str, list[int]] = {}
    for index, array in enumerate(arrays):
        if array is not None:
            by_dtype.setdefault(array.dtype.name, []).append(index)
    absent = [index for index, array in enumerate(arrays) if array is None]
    for number, (dtype, members) in enumerate(by_dtype.items()):
        name = f"{dtype} of team {team}"
        # Once, an empty array stands for each that is None: ranks compare sizes, and would add up
        # others of one size where different ones are None.
        places = sorted([*absent, *members]) if number == 0 else members
        empty = np.empty(0, dtype)
        sent = [
            empty if array is None else np.ascontiguousarray(array)
            for array in (arrays[index] for index in places)
        ]
        taken = [empty if (one := results[index]) is None else one for index in places]
        message = ctypes.create_string_buffer(2048)
        code = runtime().ddl_team_gradients(
            *(team, name.encode(), _stream("dl_comm.gradients()")),
            *(_dtype_number(sent[0]), len(sent)),
            (ctypes.c_void_p * len(sent))(*(array.ctypes.data for array in sent)),
            (ctypes.c_void_p * len(sent))(*(array.ctypes.data for array in taken)),
            (ctypes.c_int64 * len(sent))(*(array.size for array in sent)),
            *(message, len(message)),
        )
        try:
            _raise_unless_ok(code, message)
        except ValueError as error:
            if "[0]" not in str(error):
                raise
            raise ValueError(
                f"{error} One of 0 elements is None there, and must be on every rank: give zeros."
            ) from None
    averaging.averaged_by_script()
    return results


def say(sentence: str) -> None:
    """One line of this rank to stderr, which ends in the job's log."""
    print(f"ddl: rank {PLACEMENT.rank}: {sentence}", file=sys.stderr, flush=True)
