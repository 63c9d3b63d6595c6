"""A command's output where nobody reads it any more, as behind ``| head -1``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable


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
