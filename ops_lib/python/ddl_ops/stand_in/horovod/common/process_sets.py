"""Subsets of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ddl_ops import process_sets
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
        """Whether this rank is in it, or will be when it is added; None without ranks."""
        return None if self.ranks is None else PLACEMENT.rank in self.ranks

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and (self.process_set_id, self.ranks) == (
            other.process_set_id,
            other.ranks,
        )

    __hash__ = object.__hash__


global_process_set = ProcessSet(range(PLACEMENT.size))
global_process_set.process_set_id = 0
# By id, which is given again where a set is removed: the set, and the number that ddl gave it.
_added: dict[int, tuple[ProcessSet, int]] = {0: (global_process_set, 0)}
# By ranks: the numbers of sets from before shutdown(), which need not be made again.
_former: dict[tuple[int, ...], int] = {}


def number_of(process_set: ProcessSet | int | None) -> int:
    """By what number ddl knows a set, or that of an id; None is all ranks.

    Raises ValueError if it was not added, or was removed.
    """
    if process_set is None:
        return 0
    number = process_set.process_set_id if isinstance(process_set, ProcessSet) else process_set
    if number is None or number not in _added:
        raise ValueError(f"{process_set} is none that there is: hvd.add_process_set() adds it.")
    return _added[number][1]


def set_of(process_set_id: int) -> ProcessSet:
    """The set of that id. Raises ValueError if there is none."""
    number_of(process_set_id)
    return _added[process_set_id][0]


def ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of each set, by its id."""
    return {number: list(one.ranks or []) for number, (one, _) in _added.items()}


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a set of these ranks, and returns it. Collective over all ranks.

    HOROVOD_DYNAMIC_PROCESS_SETS need not be set. Raises as ddl_ops.process_sets.add: ValueError
    where there is a set of the same ranks, all ranks among them.
    """
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = added.ranks or []
    number = _former.pop(tuple(ranks), 0) or process_sets.add(ranks)
    added.process_set_id = next(one for one in range(len(_added) + 1) if one not in _added)
    _added[added.process_set_id] = (added, number)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a set, and returns whether there was one that can be. Collective over all ranks."""
    number = process_set.process_set_id
    if not number or number not in _added:
        return False
    process_sets.remove(number_of(process_set))
    del _added[number]
    process_set.process_set_id = None
    return True


def forget() -> None:
    """From here on none was added. On this rank alone: whoever adds one of them again gets it."""
    for one, number in _added.values():
        if number:
            _former[tuple(one.ranks or [])] = number
            one.process_set_id = None
    _added.clear()
    _added[0] = (global_process_set, 0)
