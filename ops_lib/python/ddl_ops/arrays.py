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
_FAILED_PRECONDITION = 2
_ABORTED = 5
_UNAVAILABLE = 6
_DIGEST_WORDS = 8  # of 32 bits, so that sums over ranks fit 64
# What messages may still be written to. Never freed.
_abandoned: list[np.ndarray[Any, Any]] = []
_joins: list[int] = []
_ONLY_NONE = "gradients without values"  # as a collective's name has them
_SUMMED = ("float16", "float32", "float64", "int32", "int64")


class NotTogetherError(RuntimeError):
    """Some ranks did not call what all have to."""


class RankGoneError(RuntimeError):
    """A rank has left or died, or none can be reached: a consequence of what ended that one.

    Whoever started the job looks for the cause elsewhere (ddl_airflow.launchers.records). The ops
    raise FailedPreconditionError for the same.
    """


_ERRORS = {
    _INVALID_ARGUMENT: ValueError,
    _FAILED_PRECONDITION: RankGoneError,
    _ABORTED: RankGoneError,
    _UNAVAILABLE: NotTogetherError,
}


def _raise_unless_ok(
    code: int, message: ctypes.Array[ctypes.c_char], given: np.ndarray[Any, Any] | None = None
) -> None:
    """Keeps what the collective was given if an error of the transport left it to MPI."""
    if code == 0:
        return
    if given is not None and runtime().ddl_has_abandoned_messages():
        _abandoned.append(given)
    raise _ERRORS.get(code, RuntimeError)(message.value.decode(errors="replace"))


def _all_reduce(
    name: str, array: np.ndarray[Any, Any], *, average: bool = False, optional: bool = False
) -> None:
    """Sums (or averages) a contiguous array in place."""
    message = ctypes.create_string_buffer(2048)
    code = runtime().ddl_all_reduce(
        *(name.encode(), _stream(name), _dtype_number(array), average, optional),
        *(array.ctypes.data, _dims(array.shape), array.ndim, message, len(message)),
    )
    _raise_unless_ok(code, message, array)


def _dtype_number(array: np.ndarray[Any, Any]) -> int:
    if array.dtype not in _SUMMED:  # nor are numbers of the other byte order
        raise TypeError(
            f"dl_comm cannot add arrays of {array.dtype}. Convert them to one of "
            f"{', '.join(_SUMMED)}."
        )
    return int(runtime().ddl_dtype(array.dtype.name.encode()))


def _dims(*shapes: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """Those of all shapes, one after the other."""
    dims = [dim for shape in shapes for dim in shape]
    return (ctypes.c_int64 * len(dims))(*dims)


def _native(array: np.ndarray[Any, Any], *, copy: bool | None = None) -> np.ndarray[Any, Any]:
    """The array in one piece, and in the byte order of this machine, in which ranks add up."""
    return np.array(array, array.dtype.newbyteorder("="), copy=copy, order="C")


def _layout(dtype: np.dtype[Any]) -> str:
    """What its bytes mean: fields and where they are, whatever kind of record it is."""
    if dtype.names is None:
        return str(dtype)
    fields = (dtype.fields or {}).items()
    return str([(name, _layout(field[0]), field[1]) for name, field in fields])


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
    the one that has had the most data. Raises RankGoneError if a rank leaves, and RuntimeError if
    one does not come.
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


def times_joined() -> int:
    """How often all ranks have joined; the answer is the same on all."""
    return len(_joins)


def have_joined() -> bool:
    """Whether all ranks have joined before; the answer is the same on all."""
    return bool(_joins)


def average(array: np.ndarray[Any, Any]) -> None:
    """Averages an array over the ranks, in place. Errors as gradients."""
    values = _native(array, copy=True)
    _all_reduce("dl_comm.average", values, average=True)
    if values.ndim:  # a single number is to be shown
        averaging.averaged_by_script()
    array[...] = values


def broadcast(arrays: Sequence[np.ndarray[Any, Any]], root: int) -> None:
    """Gives each array rank `root`'s values, in place: any dtype without pointers, NaN and all.

    Raises ValueError on every rank if an array's shape or dtype differs between ranks; the byte
    order may.
    """
    for number, array in enumerate(arrays):
        values = _native(array, copy=True)
        message = ctypes.create_string_buffer(2048)
        name, shape = f"dl_comm.broadcast {number}", values.shape
        dtype = runtime().ddl_dtype(values.dtype.name.encode())
        if dtype < 0:  # text, dates, records: bytes, and the name says of what
            name, shape = f"{name} of {_layout(values.dtype)}", (*shape, values.itemsize)
            dtype = runtime().ddl_dtype(b"uint8")
        code = runtime().ddl_broadcast(
            *(name.encode(), _stream(name), dtype, root),
            *(values.ctypes.data, _dims(shape), len(shape), message, len(message)),
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
        hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
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
    given = [None if array is None else _native(array) for array in arrays]
    results = [None if array is None else np.empty_like(array) for array in given]
    by_dtype: dict[str, list[int]] = {}
    for index, array in enumerate(given):
        if array is not None:
            by_dtype.setdefault(array.dtype.name, []).append(index)
    absent = [index for index, array in enumerate(given) if array is None]
    # Where there is none, too: a rank that left out the step would be one behind from then on.
    for number, (dtype, members) in enumerate((by_dtype or {"float32": []}).items()):
        name = f"{dtype if members else f'{len(given)} {_ONLY_NONE}'} of team {team}"
        # Once, an empty array stands for each that is None: ranks compare shapes, and would add up
        # others of one shape where different ones are None.
        places = sorted([*absent, *members]) if number == 0 else members
        empty = np.empty(0, dtype)
        sent = [empty if (one := given[index]) is None else one for index in places]
        taken = [empty if (one := results[index]) is None else one for index in places]
        if not sent:  # of no gradients
            sent, taken = [empty], [empty]
        message = ctypes.create_string_buffer(2048)
        code = runtime().ddl_team_gradients(
            *(team, name.encode(), _stream("dl_comm.gradients()")),
            *(_dtype_number(sent[0]), len(sent)),
            (ctypes.c_void_p * len(sent))(*(array.ctypes.data for array in sent)),
            (ctypes.c_void_p * len(sent))(*(array.ctypes.data for array in taken)),
            _dims(*(array.shape for array in sent)),
            (ctypes.c_int * len(sent))(*(array.ndim for array in sent)),
            *(message, len(message)),
        )
        try:
            _raise_unless_ok(code, message)
        except ValueError as error:
            if _ONLY_NONE in str(error):
                none = f"Of “{_ONLY_NONE}” all are None there"
            elif "[0]" in str(error):
                none = "One of 0 elements is None there"
            else:
                raise
            raise ValueError(f"{error} {none}, and must be on every rank: give zeros.") from None
    averaging.averaged_by_script()
    return [
        None if array is None or result is None else result.astype(array.dtype, copy=False)
        for array, result in zip(arrays, results, strict=True)
    ]


def say(sentence: str) -> None:
    """One line of this rank to stderr, which ends in the job's log."""
    print(f"ddl: rank {PLACEMENT.rank}: {sentence}", file=sys.stderr, flush=True)
