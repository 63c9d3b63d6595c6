"""Subsets of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddl_ops.environment import PLACEMENT


class ProcessSet:
    """The ranks that take part in a collective.

    Args:
        ranks_or_comm: global ranks. Communicators of mpi4py are refused.

    Attributes:
        process_set_id: of a set that was added; 0 is that of all ranks.
        ranks: the global ranks, in order.
    """

    process_set_id: int | None = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        if not isinstance(ranks_or_comm, (list, tuple, range, set, frozenset)):
            raise TypeError(
                "A ProcessSet is made of ranks here, as ProcessSet([0, 2]); those of an mpi4py "
                "communicator are comm.allgather(hvd.rank())."
            )
        self.ranks: list[int] | None = sorted(int(rank) for rank in ranks_or_comm)
        self.mpi_comm = None

    def size(self) -> int | None:
        """Number of its ranks; None before it is added."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return len(self.ranks)

    def rank(self) -> int | None:
        """This rank's number within it; None before it is added, or where it is not in it."""
        if self.process_set_id is None or self.ranks is None or not self.included():
            return None
        return self.ranks.index(PLACEMENT.rank)

    def included(self) -> bool | None:
        """Whether this rank is in it; None before it is added."""
        if self.process_set_id is None or self.ranks is None:
            return None
        return PLACEMENT.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and (self.process_set_id, self.ranks) == (
            other.process_set_id,
            other.ranks,
        )

    __hash__ = object.__hash__


global_process_set = ProcessSet(range(PLACEMENT.size))
global_process_set.process_set_id = 0


def require_global(process_set: Any, what: str) -> None:
    """Raises NotImplementedError for anything but the set of all ranks."""
    if process_set is None or getattr(process_set, "process_set_id", process_set) == 0:
        return
    raise NotImplementedError(
        f"{what} over a subset of the ranks is not here yet: leave out process_set=, or start the "
        "ranks of each set as a job of its own."
    )


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Not here yet, but for the set of all ranks: NotImplementedError."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.ranks == global_process_set.ranks:
        raise ValueError("A process set of all ranks is there already: hvd.global_process_set.")
    require_global(-1, "hvd.add_process_set()")
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Whether it was removed: that of all ranks cannot be, and others are not here yet."""
    del process_set
    return False
