"""Which thread of the program keeps the order of its collectives, by a name that all ranks know."""

from __future__ import annotations

import re
import threading
from concurrent.futures import thread as pools

# What threading calls threads that nobody has named.
_AUTOMATIC = re.compile(r"(Thread|Dummy|Timer)-\d+")


def stream(what: str) -> str:
    """The stream of a collective that this thread asks for without a name.

    The main thread's is "". A thread that the program has named has that name. All others are
    refused: a number that Python gave, or a place in a pool, may be another task's on another rank,
    and their tensors would be mixed without a word.

    Args:
        what: the call, for the message.

    Raises RuntimeError in a thread without a name, and in those of a pool.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    if _AUTOMATIC.match(thread.name) or _is_in_pool(thread):
        raise RuntimeError(
            f"{what} in {thread.name}: the ranks cannot tell which of their threads this is. Name "
            "the thread, alike on all ranks (threading.Thread(name=...)), or, in a pool, each "
            "collective (ddl.allreduce(..., name=...))."
        )
    return thread.name


def _is_in_pool(thread: threading.Thread) -> bool:
    # Also where the pool has a prefix for their names.
    return getattr(thread, "_target", None) is getattr(pools, "_worker", thread)


def keeps_order(name: str | None) -> bool:
    """Whether a collective runs at a fixed place in its stream, rather than is known by its name.

    A name in a thread beside the main one is asked for so that it is known by it: tasks of a pool
    come in any order.
    """
    return name is None or threading.current_thread() is threading.main_thread()
