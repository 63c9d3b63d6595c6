"""Threads of a rank, which start in another order on each rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from speech import RANK


def in_threads(
    *functions: Callable[[], object], names: Sequence[str] = (), apart_s: float = 0.05
) -> list[object]:
    """What each returned or raised; without names the threads have those that Python gives."""
    results: list[object] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except Exception as error:
            results[index] = error

    threads = [
        threading.Thread(target=run, args=(i,), name=names[i] if names else None)
        for i in range(len(functions))
    ]
    for thread in threads if RANK % 2 == 0 else threads[::-1]:
        thread.start()
        time.sleep(apart_s)
    for thread in threads:
        thread.join()
    return results
