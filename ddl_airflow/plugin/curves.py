"""Progress lines as curves: of each metric one part per job, by step, in as many points as drawn.

A training may be tried several times, and goes on where its last checkpoint is. So what one job
reported of a step stands beside what the next one did, and within a job the last word on a step
counts: no curve goes back.
"""

from __future__ import annotations

import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.curves import Point, averaged, downsampled
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.metrics import Measurement, is_word, number_of, source_of, spelled
from ddl_airflow.core.progress import ABOUT_RUN, MAX_LINE, read_line

MOST_POINTS = 4000
_PIECE = 1 << 20
# In one answer: about 100,000 lines. Who asks again gets the rest. Several are made at once, in a
# process that also answers for Airflow, and each point takes some 90 bytes and 3 us meanwhile.
_MOST_BYTES = 16 * _PIECE
_MOST_POINTS_READ = 400_000
_MOST_METRICS = 100
_MOST_JOBS = 1000
_MOST_GAPS = 100
# Of all parts of all curves together: a rank may have made up jobs and metrics.
_MOST_DRAWN = 400_000
_CURSOR = re.compile(r"(\d{1,18})\.(\d{1,4})\.(\d{1,18})\.(\d{1,18})\.([01])\.(\d{1,10})")
# A rank's record is written a moment after the clock is read for its first line, or before.
_SLACK_S = 0.5


@dataclass
class Cursor:
    """Where an answer ended, so that the next one goes on there.

    Attributes:
        offset: in the file, in bytes.
        job: that wrote the last line, by its place among the training's jobs.
        ops: steps as the ops of that job counted them last.
        step: the last one that was reported.
        script: whether the script counts its steps itself, which goes before the ops' count.
        first: a checksum of the file's first line, for a training may begin anew.
    """

    offset: int = 0
    job: int = 0
    ops: int = 0
    step: int = 0
    script: bool = False
    first: int = 0

    @classmethod
    def read(cls, text: str) -> Cursor:
        """What ``str`` made; the beginning, if it is none."""
        match = _CURSOR.fullmatch(text)
        if match is None:
            return cls()
        offset, job, ops, step = map(int, match.groups()[:4])
        return cls(offset, min(job, _MOST_JOBS), ops, step, match[5] == "1", int(match[6]))

    def __str__(self) -> str:
        numbers = (self.offset, self.job, max(0, self.ops), max(0, self.step), int(self.script))
        return ".".join(map(str, (*numbers, self.first)))


@dataclass
class _Parts:
    """What one metric was, by job and step."""

    source: str
    jobs: dict[int, dict[int, float]] = field(default_factory=dict)


def read_curves(
    path: Path, root: Path, *, cursor: str = "", started: Sequence[float] = (), points: int = 800
) -> dict[str, Any]:
    """What was reported since a cursor.

    Args:
        path: of the progress lines; it need not be there.
        root: no link beneath it is followed.
        cursor: of the answer before; empty for all.
        started: when each job of the training began, as far as is known, in their order.
        points: about how many a part of a curve has at most.

    Returns:
        ``curves``: of each metric ``name``, ``measured_on`` and ``parts``, of which each has
        ``job``, ``steps``, ``values`` (null for what is no number), ``gaps``: first and last step
        and the word for what is none; and ``means``: null, or, where points are left out,
        ``steps`` and ``values`` that are not only of the extremes. ``cursor``: to ask again with.
        ``more``: whether it is known already that there is more to ask for. ``again``: whether the
        file is another than the cursor's, so that this is all of it.
    """
    at = Cursor.read(cursor)
    try:
        opened = open_beneath(path, root)
    except (FileNotFoundError, FileRefused):
        return {"curves": [], "cursor": str(Cursor()), "more": False, "again": at.offset > 0}
    except OSError:  # nobody may read it, or its file system is away: what was read stays
        return {"curves": [], "cursor": cursor, "more": False, "again": False}
    metrics: dict[str, _Parts] = {}
    with open(opened, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = crc32(file.readline(MAX_LINE))
        again = at.offset > 0 and (at.offset > size or first != at.first)
        if again:
            at = Cursor()
        at.first = first
        taken = 0
        for line in _lines(file, at):
            taken += max(1, _take(line, at, started, metrics))
            if taken >= _MOST_POINTS_READ:
                break
        more = file.tell() < size or taken >= _MOST_POINTS_READ
    drawn = sum(len(parts.jobs) for parts in metrics.values())
    limit = max(8, min(points, MOST_POINTS, _MOST_DRAWN // max(1, drawn)))
    return {
        "curves": [_curve(name, parts, limit) for name, parts in metrics.items()],
        "cursor": str(at),
        "more": more,
        "again": again,
    }


def _lines(file: Any, at: Cursor) -> Iterator[Mapping[str, Any]]:
    """Whole lines, empty where they are no progress; moves the cursor on."""
    file.seek(at.offset)
    rest, left = b"", _MOST_BYTES
    while left > 0 and (piece := file.read(min(_PIECE, left))):
        left -= len(piece)
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            at.offset += len(line) + 1
            yield read_line(line) or {}
        if len(rest) > MAX_LINE:  # is none, and must not stand in the others' way
            at.offset += len(rest)
            rest = b""


def _take(
    line: Mapping[str, Any],
    at: Cursor,
    started: Sequence[float],
    metrics: dict[str, _Parts],
) -> int:
    """Takes what a line says, and returns how many points that was."""
    taken = 0
    said, t, source = line.get("step"), line.get("t"), line.get("source")
    step = int(said) if isinstance(said, int | float) and said >= 0 else None
    job = at.job
    if isinstance(t, int | float) and len(started) > 1:
        job = max(job, bisect_right(started, t + _SLACK_S) - 1)
    # The ops begin at 0 in each job, also where nobody has noted when it began.
    if source == "ops" and step is not None:
        if step < at.ops and job == at.job:
            job += 1
        at.ops = step
    if job != at.job:
        at.job, at.step, at.script = min(job, _MOST_JOBS), 0, False
    if step is not None and (source != "ops" or not at.script):
        at.step, at.script = step, at.script or source != "ops"
    for name, value in line.items():
        is_curve = name not in ABOUT_RUN or name == "examples_per_s"
        if not is_curve or not (isinstance(value, int | float) or is_word(value)):
            continue
        if name not in metrics:
            if len(metrics) >= _MOST_METRICS:
                continue
            metrics[name] = _Parts("")
        of = "" if name == "examples_per_s" else source_of(name, _text(source))
        metrics[name].source = of
        part = metrics[name].jobs.setdefault(at.job, {})
        part[at.step if step is None else step] = float(number_of(value))
        taken += 1
    return taken


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _curve(name: str, told: _Parts, limit: int) -> dict[str, Any]:
    parts = []
    for job, values in told.jobs.items():
        ordered = sorted(values.items())
        left_out = len(ordered) > limit
        parts.append(
            {
                "job": job,
                **_told(downsampled(ordered, limit)),
                "gaps": _gaps(ordered),
                "means": _told(averaged(ordered, limit)) if left_out else None,
            }
        )
    of = Measurement(name, 0.0, told.source).measured_on if told.source else ""
    return {"name": name, "measured_on": of, "parts": parts}


def _told(points: Sequence[Point]) -> dict[str, list[Any]]:
    return {
        "steps": [step for step, _ in points],
        "values": [value if math.isfinite(value) else None for _, value in points],
    }


def _gaps(points: Sequence[Point]) -> list[list[Any]]:
    """First and last step, and the word, of each stretch that has no numbers."""
    gaps: list[list[Any]] = []
    before = False
    for step, value in points:
        lost = not math.isfinite(value)
        if lost and before and gaps[-1][2] == spelled(value):
            gaps[-1][1] = step
        elif lost and len(gaps) < _MOST_GAPS:
            gaps.append([step, step, spelled(value)])
        before = lost
    return gaps
