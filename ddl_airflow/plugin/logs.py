"""Logs of ranks: whole, in pieces from their end, and the lines that have some words in them."""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.layout import names_in

_PIECE = 64 * 1024
# Of a log, in one answer: its end first, of which people want to read the last lines.
_TAIL = 64 * 1024
_MOST_FOUND = 200
_MOST_SEARCHED = 256 * 1024 * 1024
_AT_ONCE = 1024 * 1024
# That have the words: half a second's work.
_MOST_LINES = 1_000_000
_LONGEST_LINE = 1000
_MOST_NAMES = 20_000
# What a terminal takes for a colour and the like; the page shows none of it.
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_MOST_RANKS = 4096


def rank_log(folder: Path, root: Path, rank: int) -> BinaryIO | None:
    """The rank's log; None if there is none, or a link to what is not the script's to show.

    Args:
        folder: of the logs.
        root: no link beneath it is followed.
        rank: from 0.
    """
    try:
        return open(open_beneath(folder / f"rank-{rank}.log", root), "rb")
    except (FileNotFoundError, FileRefused):
        return None


def ranks_with_logs(folder: Path) -> list[int]:
    """Ranks whose log is in the folder, in order, as many as a page shows."""
    # The shim writes no other names; int() would take more, and fail over "²".
    logs = (re.fullmatch(r"rank-([0-9]{1,9})\.log", name) for name in names_in(folder, _MOST_NAMES))
    return sorted(int(log[1]) for log in logs if log)[:_MOST_RANKS]


def whole_log(file: BinaryIO) -> Iterator[bytes]:
    """All of it, as it is now: what ranks add meanwhile is for the next request."""
    with file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (piece := file.read(min(_PIECE, left))):
            left -= len(piece)
            yield piece


def part_of_log(file: BinaryIO, before: int | None, after: int | None) -> dict[str, Any]:
    """A piece of a log, at most 64 KiB, in whole lines where they are shorter than that.

    Args:
        file: the log, which may grow.
        before: where the piece ends, in bytes; by default the log's end.
        after: where it begins instead, to follow the log. Beyond the end: as without.

    Returns:
        ``text``, its ``start`` and ``end`` in the file, and the file's ``size``, in bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if after is not None and 0 <= after <= size:
        start, end = after, min(size, after + _TAIL)
    else:
        end = size if before is None else min(max(0, before), size)
        start = max(0, end - _TAIL)
    file.seek(start)
    piece = file.read(end - start)
    if start > 0 and after is None:
        line = piece.find(b"\n") + 1  # 0 where there is none
        piece = piece[line if line < len(piece) else 0 :]
    start = file.tell() - len(piece)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(piece)
    cut = len(decoder.getstate()[0])  # of a character, whose rest is still to come
    return {"text": text, "start": start, "end": start + len(piece) - cut, "size": size}


def lines_with(file: BinaryIO, words: str) -> dict[str, Any]:
    """The newest lines of a log that have some words in them, in capitals or not, as a terminal
    shows them: without colours.

    Returns:
        ``found``: ``text`` (at most 1000 characters of the line) and its ``end`` in the file, in
        bytes, the newest last; ``more``: how many older ones there are in what was searched;
        ``searched``: the bytes that were looked at, from the log's end; ``size``: the log's.
    """
    size = end = os.fstat(file.fileno()).st_size
    first, sought = max(0, size - _MOST_SEARCHED), words.casefold()
    found: list[dict[str, Any]] = []
    count = 0
    # From the end: should the lines be too many, the newest are those that count.
    while end > first and count < _MOST_LINES:
        start = _begin_of_line(file, max(first, end - _AT_ONCE), first)
        file.seek(start)
        piece = file.read(end - start)
        end = start
        numbers = _lines_with(_shown(piece).casefold(), sought)
        count += len(numbers)
        if numbers and len(found) < _MOST_FOUND:
            lines = piece.split(b"\n")
            ends = list(accumulate(len(line) + 1 for line in lines))
            for number in reversed(numbers[len(found) - _MOST_FOUND :]):
                text = _shown(lines[number])[:_LONGEST_LINE]
                found.append({"text": text, "end": start + min(ends[number], len(piece))})
    more = count - len(found)
    return {"found": found[::-1], "more": more, "searched": size - end, "size": size}


def _lines_with(text: str, sought: str) -> list[int]:
    """Numbers of the lines that have it in them, from 0; without a look at the others."""
    numbers: list[int] = []
    number = line_end = 0
    at = -1 if "\n" in sought else text.find(sought)
    while at >= 0:
        number += text.count("\n", line_end, at)
        numbers.append(number)
        line_end = text.find("\n", at)
        at = text.find(sought, line_end) if line_end >= 0 else -1
    return numbers


def _shown(piece: bytes) -> str:
    text = piece.decode("utf-8", "replace")
    return _CONTROL.sub("", text) if "\x1b" in text else text


def _begin_of_line(file: BinaryIO, at: int, first: int) -> int:
    """Where the line at a place begins, or a place within it: one may be as long as the log."""
    before = max(first, at - _PIECE)
    file.seek(before)
    return before + file.read(at - before).rfind(b"\n") + 1
