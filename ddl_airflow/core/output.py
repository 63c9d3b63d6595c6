"""What a command prints of others' words; and how one ends whose output nobody reads any more, as
behind ``| head -1``, or that a signal has interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def printable(text: str, keep: str = "\t") -> str:
    """The text without what a terminal would obey: others than the reader chose its words.

    Args:
        text: from whomever.
        keep: characters that are shown as they are, with all that can be printed.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def ended_by_its_reader(command: Callable[[], int]) -> int:
    """Runs a command, and writes out what it has printed.

    Returns what it does. If its reader went away, it ends where it prints, and the result is
    128 + SIGPIPE, as a shell shows of other programs.
    """
    try:
        try:
            return command()
        finally:  # also where it raises SystemExit, as --help does
            if sys.stdout is not None:  # it may have been closed before
                sys.stdout.flush()
    except BrokenPipeError:
        # What is still held would be written when Python ends, and fail once more.
        null = os.open(os.devnull, os.O_WRONLY)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            try:
                stream.flush()
            except BrokenPipeError:
                os.dup2(null, stream.fileno())
        os.close(null)
        return 128 + signal.SIGPIPE


class EndedBySignal(SystemExit):
    """A command is to end for a signal, once all is put in order.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def ended_by_its_signal(command: Callable[[], int], *, alone: bool) -> int:
    """Runs a command; where it raises EndedBySignal, this process ends by that signal itself.

    An exit code of 130 tells a shell that the command has dealt with Ctrl-C, so that a loop around
    it goes on. Source: bash(1), SIGNALS; https://www.cons.org/cracauer/sigint.html.

    Args:
        command: returns an exit code, as this does.
        alone: whether the process is the command's. Else 128 + the signal's number is returned; as
            where the signal does not end it, for it is the first of a container.
    """
    try:
        return command()
    except EndedBySignal as ended:
        if alone:
            for stream in filter(None, (sys.stdout, sys.stderr)):
                with suppress(OSError, ValueError):
                    stream.flush()
            signal.signal(ended.number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [ended.number])
            os.kill(os.getpid(), ended.number)
        return 128 + ended.number


@contextmanager
def handling(numbers: Iterable[int], handler: Any) -> Iterator[None]:
    """Has a handler take signals, and then again who took them before: a command may be called in
    the process of somebody else, who would not end any more.

    Args:
        numbers: of the signals.
        handler: as ``signal.signal`` takes it.
    """
    before: dict[int, Any] = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            if earlier is not None:  # set by other code than Python's, and cannot be given back
                signal.signal(number, earlier)
