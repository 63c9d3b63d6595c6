"""Subsets of the ranks, whose collectives run at the same time as those of others.

A set has a number, the same on all ranks; 0 is all ranks. Imports no TensorFlow.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from ddl_ops import arrays
from ddl_ops.environment import PLACEMENT
from ddl_ops.loader import runtime

_ranks: dict[int, tuple[int, ...]] = {}
_last = 0


def ranks(process_set: int) -> list[int]:
    """The ranks of a set, in their order. Raises ValueError if there is none."""
    if process_set == 0:
        return list(range(PLACEMENT.size))
    if process_set not in _ranks:
        raise ValueError(
            f"There is no process set {process_set}, only {sorted(all_sets())}. Add it first."
        )
    return list(_ranks[process_set])


def all_sets() -> dict[int, list[int]]:
    """The ranks of each set, by its number."""
    return {0: ranks(0)} | {number: list(members) for number, members in _ranks.items()}


def rank_within(process_set: int, rank: int) -> int:
    """The number that `rank` has in a set. Raises ValueError if it is not of it.

    Of all ranks it is `rank`, whatever that is: the op says on which ranks there is no such one.
    """
    if process_set == 0:
        return rank
    members = ranks(process_set)
    if rank not in members:
        raise ValueError(
            f"Rank {rank} is not of process set {process_set}, which has ranks {members}."
        )
    return members.index(rank)


def add(members: Iterable[int]) -> int:
    """Adds a set of these ranks, in any order; returns its number. Collective over all ranks.

    Raises ValueError for ranks that there are not, none, or one twice, and where there is such a
    set, all ranks among them; and on every rank if the ranks differ in what they add. RuntimeError
    before init(), or if a rank does not come.
    """
    global _last
    wanted = sorted(members)
    if not wanted or wanted[0] < 0 or wanted[-1] >= PLACEMENT.size:
        raise ValueError(f"A process set needs ranks from 0 to {PLACEMENT.size - 1}, not {wanted}.")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"A process set has each rank once, not {wanted}.")
    for number, others in all_sets().items():
        if others == wanted:
            raise ValueError(f"There is a process set of ranks {wanted} already: {number}.")
    number = _last + 1
    arrays.barrier(f"adding process set {number} of ranks {wanted}", _SAME)
    _last = number
    message = ctypes.create_string_buffer(2048)
    code = runtime().ddl_add_process_set(
        number, (ctypes.c_int * len(wanted))(*wanted), len(wanted), message, len(message)
    )
    if code:
        raise RuntimeError(
            f"process set {number} of ranks {wanted}: {message.value.decode(errors='replace')}"
        )
    _ranks[number] = tuple(wanted)
    return number


def remove(process_set: int) -> None:
    """Ends a set, when what was asked of it is done. Collective over all ranks.

    Its number is not given again. Raises ValueError if there is no such set, and for 0; and on
    every rank if the ranks differ in what they remove.
    """
    members = ranks(process_set)
    if process_set == 0:
        raise ValueError("The process set of all ranks stays: it cannot be removed.")
    arrays.barrier(f"removing process set {process_set} of ranks {members}", _SAME)
    message = ctypes.create_string_buffer(2048)
    code = runtime().ddl_remove_process_set(process_set, message, len(message))
    del _ranks[process_set]
    if code:
        raise RuntimeError(message.value.decode(errors="replace"))


_SAME = "All ranks add and remove the same process sets in the same order, also those not of them."
