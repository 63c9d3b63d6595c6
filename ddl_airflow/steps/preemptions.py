"""How often a training had to make room, over all its tries, and what that cost.

In ``airflow/preemptions.json`` of the run's folder, so that whoever goes on with the training
knows: a job that was preempted is no try of Airflow's, which so does not count it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ddl_airflow.core.beneath import read_object, write_beneath
from ddl_airflow.core.errors import LaunchError
from ddl_airflow.core.job import JobHandle
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.launchers.records import read_records

# A training that gets nowhere waits, twice as long each time, so that it does not hold what is
# wanted by others over and over.
_FIRST_WAIT_S = 15.0
_LONGEST_WAIT_S = 1800.0
# One that has had nodes for so long has not begun over and over; a script that does not tell of its
# steps may well have left checkpoints meanwhile.
_HELD_S = 600.0


class Preemptions:
    """Those of one training since it last began from its start."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        try:
            told = read_object(layout.preemptions, layout.workspace)
        except FileNotFoundError:
            told = {}
        self._jobs: list[dict[str, Any]] = list(told.get("jobs", ()))

    def __len__(self) -> int:
        return len(self._jobs)

    def of_try(self, try_number: int) -> int:
        """How many jobs of that try of Airflow's were preempted."""
        return sum(job["try"] == try_number for job in self._jobs)

    def add(self, handle: JobHandle, try_number: int, step: int | None) -> None:
        """Notes that a job was. Once, however often it is said.

        Args:
            handle: the job.
            try_number: Airflow's.
            step: at which all its ranks saved; None: they did not.
        """
        if any(job["job"] == handle.job_id for job in self._jobs):
            return
        note = {"job": handle.job_id, "try": try_number, "step": step}
        self._jobs.append({**note, "held_s": _held_s(handle)})
        said = json.dumps({"jobs": self._jobs}).encode()
        write_beneath(self._layout.preemptions, self._layout.workspace, said)

    @property
    def wait_s(self) -> float:
        """How long the next job should wait: not at all, if the last one has done a step, or has
        had its nodes for long."""
        in_vain = 0
        for before, job in reversed(list(pairwise(self._jobs))):
            alike = job["step"] is None or job["step"] == before["step"]
            if not alike or job.get("held_s", 0.0) >= _HELD_S:
                break
            in_vain += 1
        return min(_FIRST_WAIT_S * 2 ** (in_vain - 1), _LONGEST_WAIT_S) if in_vain else 0.0


def goodput(
    layout: RunLayout, preemptions: int, steps: int | None
) -> dict[str, float | int | None]:
    """How much of the time in which its jobs held nodes a training has used.

    Args:
        layout: the run's.
        preemptions: how many there were.
        steps: that are in the result.

    Returns ``steps``, ``held_s`` (sum over the jobs of all tries, each from the start of its first
    rank to the end of its last), ``between_s`` (from the end of a job to the start of the next: in
    a queue, or waiting to be tried again), ``preemptions`` and ``steps_per_held_s``.
    """
    spans = []
    for records in layout.all_records():
        try:
            ranks = _records_in(records, layout)
        except LaunchError:  # a training may write there, too; what it says does not count
            continue
        began = [one["started"] for one in ranks.values() if "started" in one]
        ended = [one["ended"] for one in ranks.values() if "ended" in one]
        if began and ended and max(ended) >= min(began):
            spans.append((min(began), max(ended)))
    spans.sort()
    held_s = sum(end - begin for begin, end in spans)
    between_s = sum(max(0.0, spans[n + 1][0] - spans[n][1]) for n in range(len(spans) - 1))
    return {
        "steps": steps,
        "held_s": round(held_s, 3),
        "between_s": round(between_s, 3),
        "preemptions": preemptions,
        "steps_per_held_s": round(steps / held_s, 3) if steps and held_s else None,
    }


def goodput_line(facts: Mapping[str, float | int | None]) -> str:
    """The same for the log: ``400 steps in 812 s held (0.49 steps/s) · 2 preemptions · …``."""
    parts = [f"{facts['held_s']:.0f} s held by jobs"]
    if facts["steps_per_held_s"] is not None:
        parts = [f"{facts['steps']} steps in {parts[0]} ({facts['steps_per_held_s']:.2f} steps/s)"]
    parts.append(f"{facts['preemptions']} preemptions")
    parts.append(f"{facts['between_s']:.0f} s between jobs")
    return " · ".join(parts)


def _held_s(handle: JobHandle) -> float:
    """For how many seconds the ranks of a job that has just ended had their nodes."""
    try:
        ranks = read_records(handle)
    except LaunchError:
        return 0.0
    began = [one["started"] for one in ranks.values() if "started" in one]
    # Of those that were killed nobody has noted the end.
    ended = [one["ended"] for one in ranks.values() if "ended" in one] or [time.time()]
    return round(max(0.0, max(ended) - min(began)), 3) if began else 0.0


def _records_in(folder: Any, layout: RunLayout) -> dict[int, dict[str, Any]]:
    size = sum(1 for _ in folder.glob("rank-*.json"))
    return read_records(JobHandle("", "", 0, size, folder, layout.logs))
