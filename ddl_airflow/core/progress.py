"""How far a training is, from the JSON lines that rank 0 writes (docs/process-contract.md)."""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.metrics import Measurement, is_word, number_of, source_of, spelled

# Not metrics of the model: about the run itself.
ABOUT_RUN = frozenset(
    {
        *("t", "source", "step", "steps", "epoch", "examples_per_s"),
        *("comm_s", "wait_s", "bytes_reduced"),
    }
)
_WINDOW_S = 30.0
_PIECE = 1 << 20
# In one call: whoever reads looks at the job in between, and a file may be as long as it says.
_MOST = 16 * _PIECE
# For the record of a training that has ended: what was measured once may stand long before the end.
_MOST_OF_ALL = 256 * _PIECE
_MOST_STALE = 3  # times that it is read once more

# A script writes these lines, and may write anything: what is beyond is no progress.
MAX_LINE = 16 * 1024
MAX_FIELDS = 100  # metrics that are kept, too
_MAX_TEXT = 200
LARGEST = 2**63
# Of what is counted, which JavaScript, too, can tell from the next: the page draws it.
_COUNTED = frozenset({"step", "steps", "epoch"})
_LARGEST_COUNT = 2**53 - 1
_MAX_RECENT = 10_000


def read_line(line: str | bytes) -> dict[str, float | int | str] | None:
    """Returns the numbers and short texts of a progress line by name; None if it is none.

    NaN and infinities, which JSON has not, are the texts "NaN", "Infinity" and "-Infinity",
    whichever way they were written; null is left out. A line with more or other than numbers, short
    texts and null is none at all, nor is one with a step of 2**53 or more.
    """
    if len(line) > MAX_LINE:
        return None
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict) or len(said) > MAX_FIELDS:
        return None
    fields: dict[str, float | int | str] = {}
    for name, value in said.items():
        if not is_text(name):
            return None
        largest = _LARGEST_COUNT if name in _COUNTED else LARGEST
        if isinstance(value, float) or is_word(value):
            if name not in ABOUT_RUN:
                fields[name] = spelled(number_of(value))
            elif isinstance(value, float) and abs(value) <= largest:  # not so NaN
                fields[name] = value
            elif isinstance(value, float) and name == "step" and math.isfinite(value):
                return None
        elif isinstance(value, int):  # or a bool
            if abs(value) > largest:
                return None
            fields[name] = value
        elif isinstance(value, str) and is_text(value):
            fields[name] = value
        elif value is not None:
            return None
    return fields


def is_text(value: str) -> bool:
    """Whether a name or a text is kept: it is short, and can be written as UTF-8."""
    return len(value) <= _MAX_TEXT and not re.search("[\ud800-\udfff]", value)


class Tail:
    """Reads what is appended to a file.

    Args:
        path: the file; it need not be there yet.
        offset: where to begin, in bytes; by default at what is its end now.
        root: no link beneath it is followed; by default the file's folder.
    """

    def __init__(self, path: Path, offset: int | None = None, root: Path | None = None) -> None:
        self.path = path
        self._root = path.parent if root is None else root
        self._refused = False
        if offset is None:
            offset = path.lstat().st_size if path.exists() else 0
        self._offset = offset

    def read(self, *, ended: bool = False, most: int | None = None) -> Iterator[str]:
        """Whole lines up to what is the file's end now, in pieces that fit into memory.

        A line longer than a piece is cut. What is more than ``most`` waits for the next call.

        Args:
            ended: nothing will be appended: also what has no line end, and of more than ``most``
                the last.
            most: bytes in one call; by default 16 MiB.

        Raises:
            FileRefused: it is a link or no regular file; said once, then nothing is read.
        """
        if self._refused:
            return
        most = _MOST if most is None else most
        try:
            opened = open_beneath(self.path, self._root)
        except FileNotFoundError:
            return
        except FileRefused:
            self._refused = True
            raise
        with open(opened, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            if ended:
                self._offset = max(self._offset, end - most)
            end = min(end, self._offset + most)
            while self._offset < end:
                file.seek(self._offset)
                piece = file.read(min(_PIECE, end - self._offset))
                last = self._offset + len(piece) >= end
                # A character may be cut at the end of what is there so far; take whole lines only.
                whole = len(piece) if last and ended else piece.rfind(b"\n") + 1
                if not whole:
                    if len(piece) < _PIECE:
                        return
                    whole = len(piece)
                self._offset += whole
                yield piece[:whole].decode("utf-8", "replace")

    def pass_over(self, most: int) -> None:
        """Goes on with the last of what is there by now, if that is more than so many bytes."""
        with suppress(OSError):
            self._offset = max(self._offset, self.path.lstat().st_size - most)


@dataclass
class Progress:
    """The newest of each value, and the speed over the last half minute.

    Attributes:
        step, steps, epoch: steps done, steps in all, epoch; None while unknown.
        metrics: newest value of each metric of the script, which may be NaN or infinite.
        comm_s: seconds that rank 0 spent in collectives.
        wrong: how many lines were no progress.
        first_wrong: the beginning of the first of them.
    """

    step: int | None = None
    steps: int | None = None
    epoch: int | None = None
    examples_per_s: float | None = None
    comm_s: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    wrong: int = 0
    first_wrong: str = ""
    _recent: deque[tuple[float, int]] = field(
        default_factory=lambda: deque(maxlen=_MAX_RECENT), repr=False
    )
    _rest: str = field(default="", repr=False)
    _script_counts: bool = field(default=False, repr=False)
    _told: dict[tuple[str, str], float] = field(default_factory=dict, repr=False)

    @property
    def measurements(self) -> list[Measurement]:
        """The newest value of each metric by each source, in the order in which they came."""
        return [Measurement(metric, value, of) for (metric, of), value in self._told.items()]

    def feed(self, text: str) -> bool:
        """Takes what was appended to the file since the last call; true if a whole line came.

        A line that is no progress is counted, and changes nothing else.
        """
        *lines, rest = (self._rest + text).split("\n")
        self._rest = rest[: MAX_LINE + 1]  # of one that is too long, enough to tell
        for line in filter(None, lines):
            fields = read_line(line)
            if fields is None or not self._take(fields):
                self.wrong += 1
                self.first_wrong = self.first_wrong or ascii(line[:80])
        return bool(lines)

    def _take(self, line: Mapping[str, Any]) -> bool:
        """Returns whether the fields are what they should be; if not nothing is taken."""
        counts = ("t", "step", "steps", "epoch", "examples_per_s", "comm_s")
        if any(isinstance(line.get(name), str) for name in counts):
            return False
        source = line.get("source")
        step = line.get("step")
        if step is not None:
            # The ops count reductions from the start of this try; a script that counts its own
            # steps knows better, for instance where it resumed.
            if source != "ops":
                if not self._script_counts:
                    self._recent.clear()
                self._script_counts = True
            if source != "ops" or not self._script_counts:
                self.step = int(step)
                self._recent.append((float(line.get("t", 0.0)), self.step))
                while self._recent[-1][0] - self._recent[0][0] > _WINDOW_S:
                    self._recent.popleft()
        for name in ("steps", "epoch"):
            if line.get(name) is not None:
                setattr(self, name, int(line[name]))
        for name in ("examples_per_s", "comm_s"):
            if line.get(name) is not None:
                setattr(self, name, float(line[name]))
        for name, value in line.items():
            known = name in self.metrics or len(self.metrics) < MAX_FIELDS
            is_number = isinstance(value, (int, float)) or is_word(value)
            if name not in ABOUT_RUN and is_number and known:
                self.metrics[name] = number_of(value)
                of = name, source_of(name, source)
                self._told.pop(of, None)  # to the end
                self._told[of] = self.metrics[name]
        return True

    @property
    def steps_per_s(self) -> float | None:
        """Speed over the recent window, None until two steps were seen apart."""
        if len(self._recent) < 2:
            return None
        (t0, s0), (t1, s1) = self._recent[0], self._recent[-1]
        return (s1 - s0) / (t1 - t0) if t1 > t0 and s1 > s0 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at this speed."""
        if self.steps_per_s is None or self.step is None or self.steps is None:
            return None
        return max(0.0, (self.steps - self.step) / self.steps_per_s)

    def line(self, *, ended: bool = False) -> str:
        """One line for a log: ``step 120/400 · 12.3 steps/s · loss 0.1234 · ETA 0:23``.

        Args:
            ended: whether the training has: no time is left then, whatever steps are.
        """
        parts = []
        if self.step is not None:
            parts.append(f"step {self.step}" + (f"/{self.steps}" if self.steps else ""))
        if self.epoch is not None:
            parts.append(f"epoch {self.epoch}")
        if self.steps_per_s is not None:
            parts.append(f"{self.steps_per_s:.1f} steps/s")
        if self.examples_per_s is not None:
            parts.append(f"{self.examples_per_s:.0f} examples/s")
        parts += [f"{name} {value:.4g}" for name, value in self.metrics.items()]
        if not ended and self.eta_s is not None and self.eta_s > 0:
            minutes, seconds = divmod(round(self.eta_s), 60)
            parts.append(f"ETA {minutes}:{seconds:02d}")
        return " · ".join(parts)


def everything_told(path: Path, root: Path) -> Progress:
    """The newest of each value in a file of progress lines, by all tries; nothing if it is none.

    Of more than 256 MiB the last.

    Args:
        path: the file; it need not be there.
        root: no link beneath it is followed.

    Raises:
        OSError: the file system does not give it.
    """
    for tries in count(1):
        told = Progress()
        try:
            with suppress(FileRefused):
                for text in Tail(path, 0, root).read(ended=True, most=_MOST_OF_ALL):
                    told.feed(text)
            break
        except OSError as error:
            if error.errno != errno.ESTALE or tries > _MOST_STALE:  # of NFS: to be opened again
                raise
    return told
