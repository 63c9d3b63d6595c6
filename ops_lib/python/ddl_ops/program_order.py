"""Which thread of the program keeps the order of its collectives, by a name that all ranks know."""

from __future__ import annotations

import re
import threading
import weakref

# What threading and concurrent.futures call threads that nobody has named.
_AUTOMATIC = re.compile(r"(Thread|Dummy|ThreadPoolExecutor|asyncio|Timer)-\d+")
_lock = threading.Lock()
_unnamed: weakref.ref[threading.Thread] | None = None


def stream(what: str) -> str:
    """The stream of a collective that this thread asks for without a name.

    The main thread's is "". A thread that the program has named has that name. Of the others there
    may be one at a time beside these: two could not be told apart between ranks, because which of
    them comes first differs from rank to rank.

    Args:
        what: the call, for the message.

    Raises RuntimeError in a second thread without a name while the first lives.
    """
    global _unnamed
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return ""
    if not _AUTOMATIC.match(thread.name):
        return thread.name
    with _lock:
        first = _unnamed and _unnamed()
        if first is None or not first.is_alive():
            _unnamed = weakref.ref(thread)
        elif first is not thread:
            raise RuntimeError(
                f"{what} from {thread.name}, while {first.name} asks for collectives too: the "
                "ranks could not tell them apart. Name the threads, alike on all ranks "
                "(threading.Thread(name=...)), or each collective (name=...)."
            )
    return "another thread"


def keeps_order(name: str | None) -> bool:
    """Whether a collective runs at a fixed place in its stream, rather than is known by its name.

    A name in a thread beside the main one is asked for so that it is known by it: tasks of a pool
    come in any order.
    """
    return name is None or threading.current_thread() is threading.main_thread()
