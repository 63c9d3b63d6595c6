"""All trainings of the site, in a line each, as their folders in the workspace say."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.sections.definition import slug
from ddl_airflow.core.metrics import SAMPLE, is_word, number_of, spelled
from ddl_airflow.lineage.record import is_silent, written_ns
from ddl_airflow.plugin.sendable import sendable
from ddl_airflow.plugin.training import (
    finite,
    mapping,
    read_failure,
    read_measurements,
    read_pace,
    read_record,
    read_state,
    word,
)

_log = logging.getLogger(__name__)

_MOST = 2000
# Of which what was read is kept, some 4 KB each: those of a few DAGs, and of the list of all.
_MOST_KNOWN = 10 * _MOST
_TAIL = 16 * 1024
# A folder in which something was written within that time may be written once more without its
# time telling.
_SETTLED_S = 2.0
# Of what made a training: what the table shows or is searched for.
_FACTS = {
    "dataset": ("uri", "fingerprint"),
    "code": ("digest", "git_commit"),
    "manifest": ("digest",),
}
# Of one training: characters of a text, and metrics. There are 2000.
_LONGEST = 1000
_MOST_METRICS = 100
_ANY = RunLayout(Path("/"), "any", "training")
_KEPT = str(_ANY.kept.relative_to(_ANY.root))
# What a line is made of, below the training's folder.
_FILES = tuple(
    str(path.relative_to(_ANY.root))
    for path in (
        _ANY.kept / "record.json",
        _ANY.kept / "run.json",
        _ANY.failure,
        _ANY.kept / "lineage.json",
        _ANY.progress,
    )
)


class Line(dict[str, Any]):
    """What is shown of a training in the table of all; it is not changed any more."""

    @cached_property
    def json(self) -> bytes:
        """Made once, for of thousands this takes longer than all else."""
        told = {name: one for name, one in self.items() if name != "results"}
        return json.dumps(sendable(told), ensure_ascii=False, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.json).digest()


@dataclass(frozen=True)
class _Known:
    """A line, what its files were like, and when their folder was changed last; -1: just now, or
    that does not tell.
    """

    line: Line
    seen: tuple[object, ...]
    changed_ns: int


class Trainings:
    """Lines about trainings; of those that have not changed it keeps what it has read."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known] = {}
        self._left_out: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def read(
        self, workspace: Path, may_read: Callable[[Iterable[str]], set[str]], only: str = ""
    ) -> tuple[list[Line], int]:
        """The newest 2000 trainings, of the DAGs that somebody may read, the newest first; and how
        many older ones there are.

        Each has ``dag_id``, ``run_id``, ``training_id``, what ``read_state`` has, ``started``,
        ``changed`` (unix seconds), ``pace`` (while it runs), ``metrics``, ``held_s``, ``failure``
        (its cause), ``publication``, ``facts`` and ``results``, which is not in its JSON.

        Args:
            workspace: the site's.
            may_read: which of some DAGs somebody may read.
            only: the DAG whose trainings are wanted; by default those of all.
        """
        runs = workspace / "runs"
        dags = [name for name in _folders(runs) if slug(name) == name and only in ("", name)]
        readable = may_read(dags)
        found: list[tuple[int, str, str]] = []
        for dag_id in dags:
            if dag_id in readable:
                # As text: of tens of thousands, paths take longer than the look at the file.
                folder = str(runs / dag_id)
                for training in _folders(folder):
                    with suppress(OSError):
                        stat = os.lstat(f"{folder}/{training}/{_KEPT}")
                        found.append((stat.st_mtime_ns, dag_id, training))
        newest = sorted(found, reverse=True)[:_MOST]
        lines = (self._line(workspace, *one) for one in newest)
        return [line for line in lines if line], len(found) - len(newest)

    def _line(self, workspace: Path, changed_ns: int, dag_id: str, training_id: str) -> Line | None:
        key = (dag_id, training_id)
        with self._lock:
            known = self._known.pop(key, None)
            if known is not None:
                self._known[key] = known  # the last to be forgotten
        # Files in the folder are replaced, never written, so that its own time tells: of one that
        # has ended, nothing else is looked at.
        if known and known.changed_ns == changed_ns:
            return known.line
        layout = RunLayout(workspace, dag_id, training_id)
        settled = time.time() - changed_ns / 1e9 > _SETTLED_S
        root = str(layout.root)
        seen = (*(_stamp(f"{root}/{name}") for name in _FILES), is_silent(layout))
        try:
            line = known.line if known and known.seen == seen else _read_line(layout)
        except Exception as error:
            # Whatever a training has left, the others are shown.
            if key not in self._left_out:
                _log.warning("%s is left out of the trainings: %r", layout.root, error)
                self._left_out.add(key)
            return None
        if line is not None:
            with self._lock:
                # What runs writes elsewhere, too; and so does what was silent, once it is not.
                over = line["state"] != "running" and line["signed"] is None
                self._known[key] = _Known(line, seen, changed_ns if settled and over else -1)
                if len(self._known) > _MOST_KNOWN:
                    del self._known[next(iter(self._known))]
        return line


def _folders(path: Path | str) -> list[str]:
    """Names of the folders in it; a link is none."""
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _stamp(path: Path | str) -> tuple[int, int]:
    try:
        stat = os.lstat(path)
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)


def _read_line(layout: RunLayout) -> Line | None:
    record = read_record(layout)
    run, outcome = mapping(record.get("run")), mapping(record.get("outcome"))
    result, results = mapping(record.get("result")), outcome.get("results")
    goodput = mapping(result.get("goodput"))
    run_id = run.get("run_id")
    if run_id is None:
        with suppress(FileRefused, OSError):
            run_id = read_object(layout.kept / "run.json", layout.workspace).get("run_id")
    if not isinstance(run_id, str):
        return None  # nothing has been staged, so there is nothing to show
    state = read_state(layout, record)
    metrics = {
        word(name): number
        for name, value in islice(_metrics(layout, result).items(), _MOST_METRICS)
        if (number := _number(value)) is not None
    }
    failure = read_failure(layout)
    changed = max(written_ns(path) for path in (layout.kept / "record.json", layout.progress)) / 1e9
    told = {
        "dag_id": layout.dag_id,
        "run_id": run_id[:_LONGEST],
        "training_id": layout.training_id,
        **state,
        "started": _text(run.get("started")),
        "changed": changed or None,
        # Of one that has ended, the record says it; and of many the list has to be quick.
        "pace": read_pace(layout, _TAIL) if state["state"] == "running" else None,
        "metrics": metrics,
        "held_s": finite(goodput.get("held_s")),
        "steps_per_s": finite(goodput.get("steps_per_held_s")),
        "failure": failure and failure["cause"][:_LONGEST],
        "publication": _text(outcome.get("publication")),
        "results": results if isinstance(results, Mapping) else None,
        "facts": {
            section: known
            for section, names in _FACTS.items()
            if (known := _texts(mapping(record.get(section)), names))
        },
    }
    return Line(told)


def _number(said: Any) -> float | str | None:
    if isinstance(said, int | float) or is_word(said):
        with suppress(OverflowError):  # no float is so large
            return spelled(number_of(said))
    return None


def _text(said: object) -> str | None:
    return word(said, _LONGEST) or None


def _texts(section: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    return {name: text for name in names if (text := _text(section.get(name)))}


def _metrics(layout: RunLayout, result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The newest of each; of earlier versions of ours a record so far leaves out the sample's."""
    known, told = dict(mapping(result.get("metrics"))), result.get("measurements")
    sources = [mapping(one).get("source") for one in told] if isinstance(told, list) else []
    if result.get("accuracy") is not None and SAMPLE not in sources:
        measured = read_measurements(layout, {"result": result})
        return known | {one["metric"]: one["value"] for one in measured}
    return known
