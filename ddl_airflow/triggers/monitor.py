"""Asks a scheduler about the jobs of all triggers of a process at once.

A triggerer may wait for hundreds of jobs. Each asking for its own would start a process per job
and look, and fill the threads that all triggers of the triggerer share as soon as the scheduler
hangs. So one question per interval goes out for all of them at one place, such as a cluster, or for
all of each user that they run as, from a thread that does nothing else; and what cancels jobs,
touches the workspace, or lists a dataset has threads of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache, partial
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from ddl_airflow.core.job import JobHandle
from ddl_airflow.core.manifest.sections.stores import kind_of_uri
from ddl_airflow.launchers.base import Scheduler, Told

_Result = TypeVar("_Result")
# Cancellations and looks at the workspace under way at the same time.
_THREADS = 4
_SILENT_S = 60.0
# By kind and place.
_Monitors: TypeAlias = dict[tuple[str, str], "Monitor"]
_MONITORS: WeakKeyDictionary[asyncio.AbstractEventLoop, _Monitors] = WeakKeyDictionary()


@cache
def _threads(purpose: str, number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number, f"ddl-{purpose}")


async def _in_thread(
    threads: ThreadPoolExecutor, call: Callable[..., _Result], *words: Any
) -> _Result:
    return await asyncio.get_running_loop().run_in_executor(threads, partial(call, *words))


def _logged(call: Callable[..., _Result]) -> Callable[..., _Result]:
    """The call, whose lines are in the log of the task whose trigger asks.

    A triggerer finds that by context variables, which a thread of ours does not have by itself. It
    is not for what is asked for several triggers.
    """
    return partial(copy_context().run, call)


async def cancelling(kind: str, call: Callable[..., _Result], *words: Any) -> _Result:
    """Runs the call in a thread that no look at a job of that kind can keep busy."""
    return await _in_thread(_threads(f"{kind}-cancel", _THREADS), _logged(call), *words)


async def in_workspace(call: Callable[..., _Result], *words: Any) -> _Result:
    """Runs the call in a thread that the workspace's files can keep busy, but no scheduler."""
    return await _in_thread(_threads("workspace", _THREADS), _logged(call), *words)


async def at_dataset(uri: str, call: Callable[..., _Result], *words: Any) -> _Result:
    """Runs the call in a thread that only datasets in that kind of store can keep busy."""
    kind = kind_of_uri(uri)
    assert kind is not None, uri
    threads = _threads(f"{kind.scheme}-datasets", kind.watched_at_once)
    return await _in_thread(threads, call, *words)


async def answered(
    look: Coroutine[Any, Any, _Result] | asyncio.Task[_Result],
    place: str,
    log: Any,
) -> _Result:
    """Waits for a look at a place, which others may wait for too; warns once if it takes long."""
    looking = asyncio.ensure_future(look)
    done, _ = await asyncio.wait([looking], timeout=_SILENT_S)
    if not done:
        log.warning(
            "%s: no answer for %.0f s; what happens there is not seen until there is one. See "
            "whether its file system or store hangs, for this host",
            *(place, _SILENT_S),
        )
    return await asyncio.shield(looking)


def monitor_of(scheduler: Scheduler, handle: JobHandle) -> Monitor:
    """Returns the monitor of all jobs of that kind, and at the job's place, in this event loop."""
    of_loop = _MONITORS.setdefault(asyncio.get_running_loop(), {})
    return of_loop.setdefault((scheduler.kind, handle.place), Monitor(scheduler))


class Monitor:
    """One question per interval about the jobs that somebody waits for at a place, of each user.

    Args:
        scheduler: is asked, by one thread.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._thread = ThreadPoolExecutor(1, f"ddl-{scheduler.kind}-ask")
        self._waiting: list[tuple[JobHandle, asyncio.Future[Told]]] = []
        self._asking: asyncio.Task[None] | None = None
        self._asked = 0.0

    async def told(self, handle: JobHandle, interval_s: float) -> Told:
        """Returns what the scheduler says of the job when it is asked next.

        Args:
            handle: the job.
            interval_s: between two questions, at least.

        Raises:
            LaunchError: the scheduler does not answer.
        """
        answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._waiting.append((handle, answer))
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(interval_s))
        return await answer

    async def _ask(self, interval_s: float) -> None:
        while self._waiting:
            await asyncio.sleep(max(0.0, self._asked + interval_s - time.monotonic()))
            waiting = [(handle, answer) for handle, answer in self._waiting if not answer.done()]
            self._waiting.clear()
            self._asked = time.monotonic()
            if not waiting:  # their triggers have ended
                return
            # Each is asked for as its user: one that may not ask any more is none of the others'.
            for user in dict.fromkeys(handle.user for handle, _ in waiting):
                await self._ask_for([one for one in waiting if one[0].user == user])

    async def _ask_for(self, waiting: Sequence[tuple[JobHandle, asyncio.Future[Told]]]) -> None:
        handles = list(dict.fromkeys(handle for handle, _ in waiting))
        try:
            said = await _in_thread(self._thread, self._scheduler.ask, handles)
            told = dict(zip(handles, said, strict=True))
        except Exception as error:  # theirs to judge; a question that fails must end none else's
            for _, answer in waiting:
                if not answer.done():
                    answer.set_exception(error)
        else:
            for handle, answer in waiting:
                if not answer.done():
                    answer.set_result(told[handle])
