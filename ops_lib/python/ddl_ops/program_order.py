"""Which thread of the program keeps the order of its collectives, by a name that all ranks know."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import thread as pools
from contextlib import contextmanager
from typing import ClassVar

# What threading calls threads that nobody has named.
_AUTOMATIC = re.compile(r"(Thread|Dummy|Timer)-\d+")


class _Threads:
    """The threads that have asked for collectives: of each stream the last one.

    Attributes:
        unnamed_allowed: whether those that have no name may.
        local: of each thread, whether it does a part of the main one.
        others: of a stream, the threads that there were when its thread first asked for anything.
    """

    unnamed_allowed = False
    local = threading.local()
    streams: ClassVar[dict[str, threading.Thread]] = {}
    others: ClassVar[dict[str, weakref.WeakSet[threading.Thread]]] = {}
    lock = threading.Lock()


def allow_unnamed_threads() -> None:
    """From here on a thread that has no name is known by the function that it runs.

    Scripts for Horovod need not name threads: there collectives are known by the names of tensors.
    Several threads of one function are refused still, unless one begins after another's end.
    """
    _Threads.unnamed_allowed = True


@contextmanager
def as_main_thread() -> Iterator[None]:
    """Within it this thread's stream is the main one's, which waits for what this thread does.

    TensorFlow runs ops in threads of its own, which the ranks cannot tell apart; and what a rank
    does in an op another one may do in no graph.
    """
    _Threads.local.stands_in = True
    try:
        yield
    finally:
        _Threads.local.stands_in = False


def stream(what: str) -> str:
    """The stream of a collective that this thread asks for without a name.

    The main thread's is "". A thread that the program has named has that name. All others, unless
    allow_unnamed_threads was called, are refused: a number that Python gave, or a place in a pool,
    may be another task's on another rank, and their tensors would be mixed without a word.

    Args:
        what: the call, for the message.

    Raises RuntimeError in a thread without a name, in those of a pool, and in one whose name
    another one has, or had while both were there.
    """
    thread = threading.current_thread()
    if thread is threading.main_thread() or getattr(_Threads.local, "stands_in", False):
        return ""
    if _AUTOMATIC.match(thread.name) or _is_in_pool(thread):
        if _Threads.unnamed_allowed and (known := _by_function(thread)):
            return known
        raise RuntimeError(
            f"{what} in {thread.name}: the ranks cannot tell which of their threads this is. Name "
            "the thread, alike on all ranks (threading.Thread(name=...)), or, in a pool, each "
            "collective (ddl.allreduce(..., name=...))."
        )
    if not _is_alone(thread.name, thread):
        raise RuntimeError(
            f"{what} in {thread.name}: two threads have this name, and the ranks cannot tell which "
            "of them this is. Give each a name of its own, alike on all ranks."
        )
    return thread.name


def _by_function(thread: threading.Thread) -> str:
    """The stream of an unnamed thread; empty if another rank may take another thread for it."""
    function = getattr(thread, "_target", None)
    if function is None and type(thread).run is not threading.Thread.run:
        function = type(thread)  # one with a run() of its own
    name = getattr(function, "__qualname__", "")
    if not name or _is_in_pool(thread):
        return ""
    name = f"thread of {getattr(function, '__module__', '')}.{name}"
    return name if _is_alone(name, thread) else ""


def _is_alone(name: str, thread: threading.Thread) -> bool:
    """Whether the stream can be that of no other thread, on any rank."""
    with _Threads.lock:
        before = _Threads.streams.get(name)
        if before is thread:
            return True
        if before is not None and (before.is_alive() or thread in _Threads.others[name]):
            return False
        _Threads.streams[name] = thread
        _Threads.others[name] = weakref.WeakSet(threading.enumerate())
        return True


def _is_in_pool(thread: threading.Thread) -> bool:
    # Also where the pool has a prefix for their names.
    return getattr(thread, "_target", None) is getattr(pools, "_worker", thread)


def keeps_order(name: str | None) -> bool:
    """Whether a collective runs at a fixed place in its stream, rather than is known by its name.

    A name in a thread beside the main one is asked for so that it is known by it: tasks of a pool
    come in any order.
    """
    return name is None or threading.current_thread() is threading.main_thread()
