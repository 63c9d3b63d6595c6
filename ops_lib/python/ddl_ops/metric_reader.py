"""Numbers in what a rank prints, by the manifest's expressions.

Standard library only, as ``ddl_ops.rank``.
"""

from __future__ import annotations

import codecs
import re
import signal
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

# Of a line, for metrics: what is longer is data.
_LONGEST = 4096
# CPU time of one search, and how often it may be exceeded.
_SEARCH_S = 0.1
_SLOW_LINES = 5
# What C, Python and others print in the place of a number.
_NOT_FINITE = re.compile(r"(?<![\w.])[-+]?(?:nan|inf(?:inity)?)(?![\w.])", re.IGNORECASE)
# Numbers that an expression may have been written for.
_USUAL_NUMBERS = ("0.00000000", "0.00000000e+00", "0")


class _TooSlow(Exception):
    """A regular expression took more time on a line than it may."""


def _too_slow(_signum: int, _frame: FrameType | None) -> None:
    raise _TooSlow


class MetricReader:
    """Finds the manifest's ``metrics:`` in a rank's output.

    In the first 4,096 characters of each line. An expression that takes long, as some do on some
    lines, is no longer searched: the script waits while its output is not read. Python's own
    engine looks for signals as it searches, so a timer ends it. Source: ``Modules/_sre``.

    Args:
        definitions: pairs of name and regular expression with one group, as SageMaker's metric
            definitions are. One for digits alone, such as ``loss= ([0-9.]+)``, finds NaN and
            infinities as well: a training that diverged would go on showing its last number.
    """

    def __init__(self, definitions: Sequence[Mapping[str, str]]) -> None:
        self._patterns = {d["name"]: re.compile(d["regex"]) for d in definitions}
        self._slow: dict[str, int] = {}
        self._notes: list[str] = []
        if self._patterns:
            signal.signal(signal.SIGVTALRM, _too_slow)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, chunk: bytes) -> list[dict[str, Any]]:
        """The metrics of each complete line in what has arrived, one dict per line with any.

        An empty chunk is the end: what has no line end by then is a line as well.
        """
        if not self._patterns:
            return []
        text = self._rest + self._decoder.decode(chunk, final=not chunk)
        *lines, self._rest = re.split(r"[\r\n]", text if chunk else text + "\n")
        self._rest = self._rest[:_LONGEST]  # a script that never ends a line must not fill memory
        found = []
        for line in lines:
            values: dict[str, Any] = {}
            lost = list(_NOT_FINITE.finditer(line[:_LONGEST]))
            for name in tuple(self._patterns):
                match = self._search(name, line[:_LONGEST])
                try:
                    values[name] = float(match.group(1) if match else "")
                except (TypeError, ValueError):  # the group matched something that is no number
                    if lost and (word := self._search_not_finite(name, line[:_LONGEST], lost)):
                        values[name] = float(word)
            if values:
                found.append(values)
        return found

    def notes(self) -> list[str]:
        """What there is to say since the last call: a line for each expression given up."""
        notes, self._notes = self._notes, []
        return notes

    def _search_not_finite(self, name: str, line: str, lost: list[re.Match[str]]) -> str:
        """The word that stands where the expression wants a number; empty if none does."""
        for number in _USUAL_NUMBERS:
            text, after = "", 0
            places: list[tuple[range, str]] = []
            for word in lost:
                text += line[after : word.start()]
                places.append((range(len(text), len(text) + len(number)), word[0]))
                text, after = text + number, word.end()
            if name not in self._patterns:  # it was given up
                return ""
            if match := self._search(name, text + line[after:]):
                return next((word for place, word in places if match.start(1) in place), "")
        return ""

    def _search(self, name: str, line: str) -> re.Match[str] | None:
        try:
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, _SEARCH_S)
                return self._patterns[name].search(line)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        except _TooSlow:
            self._slow[name] = self._slow.get(name, 0) + 1
            if self._slow[name] == _SLOW_LINES:
                del self._patterns[name]
                self._notes.append(
                    f"metric {name!r}: its regular expression takes more than {_SEARCH_S} s on "
                    f"each of {_SLOW_LINES} lines and is no longer searched. Write it without .* "
                    "or nested + and *."
                )
            return None
