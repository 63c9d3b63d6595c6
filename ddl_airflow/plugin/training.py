"""What is known of one training: how far it is, why it failed, what each try did, and where.

Most of it was written by ranks, which may write anything: what is not of its type is left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from ddl_airflow.core.advice import advice
from ddl_airflow.core.beneath import check_folder, open_beneath, read_object
from ddl_airflow.core.errors import FileRefused, StagingError
from ddl_airflow.core.job import LAST_OF_SIGNALS
from ddl_airflow.core.layout import (
    RunLayout,
    experiments,
    is_experiment,
    owners_of,
)
from ddl_airflow.core.metrics import COMMAND, SAMPLE, Measurement, newest
from ddl_airflow.core.progress import Progress
from ddl_airflow.lineage.record import (
    BY_HAND,
    LINEAGE,
    SO_FAR,
    evaluated,
    has_part,
    is_silent,
    last_sign,
    measured,
)
from ddl_airflow.plugin.unchanged import Budget, Unchanged

_LONGEST_MESSAGE = 10_000
_MOST_RANKS = 4096
_MOST_JOBS = 1000
# Bytes: of one file of a rank, whose message and traceback may be long, and of all for one answer.
_MOST_OF_RANK = 4 * 2**20
_MOST_OF_RANKS = 64 * 2**20
# Of what lists each object of the data: some 400,000.
_MOST_OF_LINEAGE = 64 * 2**20
_MOST_CHECKPOINTS = 50
_MOST_ENTRIES = 10_000
# Of the progress, for what is left: the lines of some minutes.
_TAIL = 128 * 1024
# How many times as much is searched for how many steps there are, if that does not say it.
_SEARCHED = 64
# How the message of a failed job ends; the page has the log beside it.
_LOG_OF_RANK = re.compile(r"\s*All ranks were ended\.(\s*Its whole log: .*)?$", re.DOTALL)
_LINE = re.compile(r"(?:^| at )([^\s:'\"]+\.(?:py|ya?ml|json):\d+)\b")
_SENTENCE = re.compile(r"[.?!]\s+(?=[A-Z`$])")
_CHECKPOINT = re.compile(r"(?P<name>.*?)(?:\.index|\.keras|(?:\.weights)?\.h(?:df)?5)")
# Of a name: TensorFlow's own ends in the step. Another number may be an epoch's or a loss.
_STEP_OF_INDEX = re.compile(r"[-_.](\d{1,15})\.index$")
_STEP = re.compile(r"step[-_=.]?(\d{1,15})(?!\d)", re.IGNORECASE)
_STATE = re.compile(r"[a-z_]{1,30}")
# Of a run without Airflow of which nobody has noted an end.
SILENT = "no_sign_of_life"
# Of facts: characters of a text and of a name, entries of a list or an object, and how deep they
# may lie in each other.
_LONGEST_FACT = 2000
_LONGEST_NAME = 200
_MOST_OF_FACT = 1000
_DEEPEST_FACT = 4
# What of a record the page shows: no listings, and nothing that is long.
_SHOWN = {
    "manifest": ("name", "file", "digest", "dialect"),
    "dataset": ("uri", "fingerprint", "files", "bytes"),
    "code": ("digest", "git_commit", "files"),
    "environment": (
        *("framework", "launcher", "distribution", "world_size", "nodes", "slots", "hosts"),
        *("devices", "processors", "images", "settings", "versions"),
    ),
    "run": ("type", "triggered_by", "started", "due", "parameters", "experiment"),
    "result": ("metrics", "steps", "goodput"),
}
# Those of them that are no single text or number.
_NESTED = frozenset(
    {
        *("files", "hosts", "devices", "processors", "settings", "versions"),
        *("parameters", "metrics", "goodput"),
    }
)


def read_record(layout: RunLayout, files: Unchanged | None = None) -> dict[str, Any]:
    """The training's record so far; of an earlier version of ours, which kept none, the whole one.

    Empty if there is none, or it is damaged. The whole one does not stand in for one that cannot
    be read: it is of what was published, and the run may have been cleared since.

    Args:
        layout: the run's.
        files: what was read of the whole one before.

    Raises:
        OSError: it is there, and cannot be read now.
    """
    with suppress(FileRefused):
        try:
            return read_object(layout.kept / SO_FAR, layout.workspace)
        except FileNotFoundError:
            pass
        with suppress(FileNotFoundError):
            files = files or Unchanged()
            return files.read(layout.kept / LINEAGE, layout.workspace, _without_listings)
    return {}


def _without_listings(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record without its two parts that may be long, of which the page shows none."""
    told = dict(record)
    for section, name in (("dataset", "listing"), ("result", "files")):
        if isinstance(said := told.get(section), Mapping):
            told[section] = {key: value for key, value in said.items() if key != name}
    return told


def facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """What made it, of a record, without what is long."""
    told = {}
    for section, names in _SHOWN.items():
        said = record.get(section)
        if isinstance(said, Mapping):
            known = {
                name: fact(said.get(name), _DEEPEST_FACT if name in _NESTED else 0)
                for name in names
            }
            told[section] = {name: one for name, one in known.items() if one is not None}
    return told


def fact(said: object, depth: int = 0) -> Any:
    """A value as far as it can be shown; None if it is nothing of the kind.

    Where something is cut there is a digest of the whole: two that differ are not shown as the
    same.

    Args:
        said: whatever JSON has.
        depth: how deep lists and objects in it may lie in each other; 0: a text or number alone.
    """
    if isinstance(said, str):
        text = word(said, _LONGEST_FACT)
        if len(said) > _LONGEST_FACT:
            text += f"… ({len(said):,} characters, {_digest(said)})"
        return text
    if isinstance(said, int | float):
        return said
    if isinstance(said, list) and depth:
        shown = [_within(one, depth - 1) for one in said[:_MOST_OF_FACT]]
        more = len(said) - _MOST_OF_FACT
        return [*shown, f"… and {more:,} more ({_digest(said)})"] if more > 0 else shown
    if isinstance(said, Mapping) and depth:
        some = islice(said.items(), _MOST_OF_FACT)
        known = {word(name): _within(one, depth - 1) for name, one in some}
        # There are too many, or names that are the same where they are cut.
        if more := len(said) - len(known):
            known["…"] = f"and {more:,} more ({_digest(said)})"
        elif any(len(name) > _LONGEST_NAME for name in said):
            known["…"] = _digest(said)
        return known
    return None


def _within(said: object, depth: int) -> Any:
    """A value in a list or an object."""
    if isinstance(said, list | Mapping) and not depth:
        return f"… ({_digest(said)})"
    return fact(said, depth)


def _digest(said: Any) -> str:
    told = said if isinstance(said, str) else json.dumps(said, sort_keys=True)
    return f"sha256:{hashlib.sha256(told.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def read_state(layout: RunLayout, record: Mapping[str, Any]) -> dict[str, Any]:
    """How far it has come, as far as was noted.

    Returns:
        ``state``, as ``keep_so_far`` has it; of a run without Airflow that was noted to be running
        and is not, ``SILENT`` or ``ended``. ``step``, the last one that did something, or empty.
        ``signed``: when such a run last gave a sign of life, in unix seconds; else null.
        ``by_hand``: whether it is one.
    """
    outcome, run = mapping(record.get("outcome")), mapping(record.get("run"))
    said = outcome.get("state", "running")
    state = said if isinstance(said, str) and _STATE.fullmatch(said) else "unknown"
    if "outcome" not in record and record:
        state = "published"  # of an earlier version of ours: the whole record
    by_hand, signed = run.get("type") == BY_HAND, None
    if by_hand and state == "running" and is_silent(layout):
        # It may be a step that one asked for alone; the record says that it has ended.
        state, signed = SILENT if outcome.get("at_work") else "ended", last_sign(layout)
    step = word(outcome.get("step"))
    return {"state": state, "step": step, "signed": signed, "by_hand": by_hand}


def read_measurements(
    layout: RunLayout, record: Mapping[str, Any], files: Unchanged | None = None
) -> list[dict[str, Any]]:
    """What the run's steps have measured of the model, the newest of each metric; no steps, none.

    Each has ``metric``, ``value`` (a number, or "NaN" and the like) and ``measured_on``.

    Args:
        layout: the run's.
        record: as ``read_record`` gives it.
        files: what was read before.
    """
    try:
        if (said := evaluated(layout)) is not None:
            known = [Measurement.load(one) for one in said["result"]["measurements"]]
        elif has_part(layout, "train"):
            known = measured(layout, _trained(layout, record, files or Unchanged()))
        else:
            return []  # no step has come so far, or one has begun again
        return [
            {name: fact(value) for name, value in one.dump().items()}
            | {"metric": word(one.metric), "measured_on": word(one.measured_on)}
            for one in newest(known).values()
        ]
    except (
        StagingError,
        OSError,
        LookupError,
        ArithmeticError,
        TypeError,
        ValueError,
        AttributeError,
    ):
        return []  # it is of another version of ours, or another step is to come


def _trained(layout: RunLayout, record: Mapping[str, Any], files: Unchanged) -> Mapping[str, Any]:
    """What train measured. Its own part lists each object of streamed data, and may be long."""
    told = mapping(record.get("result")).get("measurements")
    if isinstance(told, list):
        later = (SAMPLE, COMMAND)  # by transform and evaluate, which may have begun again
        own = [one for one in told if mapping(one).get("source") not in later]
        return {"metrics": {}, "measurements": own}
    path = layout.kept / "lineage" / "train.json"
    return files.read(path, layout.workspace, _result_alone, most_bytes=_MOST_OF_LINEAGE)


def _result_alone(part: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = part["result"]
    return {name: result[name] for name in ("metrics", "measurements") if name in result}


def read_failure(layout: RunLayout) -> dict[str, Any] | None:
    """Which step of the run failed last, and why; None if none did.

    Returns:
        ``step``, ``try``, ``error``, ``rank`` and ``message`` as the step kept them; and of the
        message ``cause``, ``fix`` and ``line`` (``train.py:33``), which may be empty.
    """
    try:
        said = read_object(layout.failure, layout.workspace)
    except (FileRefused, OSError):
        return None
    texts = {name: said.get(name) for name in ("step", "error", "message")}
    tried, rank = said.get("try"), said.get("rank")
    sound = all(isinstance(text, str) for text in texts.values())
    if not sound or type(tried) is not int or not (rank is None or type(rank) is int):
        return None
    cut = {name: str(text)[:_LONGEST_MESSAGE] for name, text in texts.items()}
    return {**cut, "try": tried, "rank": rank, **_explained(cut["message"])}


def _explained(message: str) -> dict[str, str]:
    text = _LOG_OF_RANK.sub("", message).strip()
    line = _LINE.search(text)
    cause, fix = text, ""
    raised = re.search(r"raised (\w+)(?: at \S+?)?(?:: (.*))?$", text, re.DOTALL)
    known = advice(raised[1], raised[2] or "") if raised else ""
    if known and text.endswith(known):
        cause, fix = text[: -len(known)].rstrip(), known
    elif end := _SENTENCE.search(text):
        cause, fix = text[: end.start() + 1], text[end.end() :]
    return {"cause": cause, "fix": fix, "line": line[1] if line else ""}


def read_pace(layout: RunLayout, most_bytes: int = _TAIL) -> dict[str, Any]:
    """How far it is: ``step``, ``steps``, ``epoch``, ``done`` (share, 0 to 1), ``steps_per_s``,
    ``examples_per_s``, ``left_s`` and whether it ``stopped_early``; null for what is not known.

    A training whose step has ended well is done, whatever it announced: it may have stopped early.

    Args:
        layout: the run's.
        most_bytes: of the end of its progress that are looked at; for how many steps there are,
            64 times as many are searched.
    """
    progress = Progress()
    try:
        with open(open_beneath(layout.progress, layout.workspace), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - most_bytes))
            tail = file.read(most_bytes)
            announced = b""
            if len(tail) == most_bytes and b'"steps"' not in tail:
                file.seek(max(0, size - _SEARCHED * most_bytes))
                announced = _last_with(b'"steps"', file.read(_SEARCHED * most_bytes))
    except (FileRefused, OSError):
        tail = announced = b""
    if len(tail) == most_bytes:
        tail = announced + tail[tail.find(b"\n") + 1 :]
    progress.feed(tail.decode("utf-8", "replace"))
    ended, failed = has_part(layout, "train"), layout.failure.exists()
    step, steps = progress.step, progress.steps
    done = min(1.0, max(0.0, step / steps)) if step is not None and steps else None
    return {
        "step": step,
        "steps": steps,
        "epoch": progress.epoch,
        "done": 1.0 if ended else done,
        # Who counts from 0 ends at the one before.
        "stopped_early": bool(ended and step is not None and steps and step + 1 < steps),
        "steps_per_s": progress.steps_per_s,
        "examples_per_s": finite(progress.examples_per_s),
        "left_s": None if ended or failed or not steps else progress.eta_s,
    }


def _last_with(words: bytes, text: bytes) -> bytes:
    """The last whole line with some words in it; empty if there is none."""
    at = text.rfind(words)
    begin, end = text.rfind(b"\n", 0, at) + 1, text.find(b"\n", at) + 1
    return text[begin:end] if at >= 0 else b""


def read_jobs(layout: RunLayout, files: Unchanged | None = None) -> list[dict[str, Any]]:
    """The jobs of the training, in their order: what each was, did and became.

    Each has ``name`` (``try 2``), ``state`` (running, done, failed, made_room, ended), ``words``
    for people, whether it is ``over``, so that no rank is at work, ``started`` and ``ended`` (unix
    seconds or null), ``hosts``, and of the last one ``ranks``: of each ``rank``, ``host``,
    ``task``, ``cpu``, ``gpus``, ``started``, ``ended``, ``exit_code``, whether it was ``asked`` to
    end, and ``usage``: ``cores`` (lately, or of one that has ended on the whole), ``memory`` and
    ``peak`` (bytes), ``gpu`` (percent of the time in which it computed, as ``cores``),
    ``gpu_memory`` and ``gpu_peak``; null for what is not known.

    Args:
        layout: the run's.
        files: what was read of them before.
    """
    files, budget = files or Unchanged(), Budget(_MOST_OF_RANKS)
    folders = _folders(layout)
    # The last first: should all together be too much, that is what people look at.
    jobs = [
        _job(layout, folder, files, budget, last=folder is folders[-1])
        for folder in reversed(folders)
    ]
    return jobs[::-1]


def read_starts(layout: RunLayout, files: Unchanged | None = None) -> list[float]:
    """When each job of the training began, in their order; infinity of one that has yet to.

    One that never began, for its hosts could not be reached, has the next one's time. Empty if
    they are in no order, for then nothing follows from them.
    """
    files, budget = files or Unchanged(), Budget(_MOST_OF_RANKS)
    starts: list[float] = []
    following = math.inf
    for folder in reversed(_folders(layout)):
        with suppress(FileRefused, OSError):
            record = _record(folder, 0, layout.workspace, files, budget)
            at = record["started"]
            following = following if at is None else at
        starts.append(following)
    starts.reverse()
    return starts if starts == sorted(starts) else []


def _folders(layout: RunLayout) -> list[Path]:
    """Those of the records of the last jobs, in their order."""
    return layout.all_records(_MOST_ENTRIES)[-_MOST_JOBS:]


def _job(
    layout: RunLayout, folder: Path, files: Unchanged, budget: Budget, *, last: bool
) -> dict[str, Any]:
    records = dict(_records(folder, layout.workspace, files, budget))
    ranks = [_rank(rank, record) for rank, record in sorted(records.items())]
    # Its ranks may have been killed, without a word.
    is_over = not last or has_part(layout, "train") or layout.failure.exists()
    if last:
        for one in ranks:
            ended = is_over or one["ended"] is not None
            one["usage"] = _usage(folder, one, layout.workspace, files, budget, ended=ended)
    begun = [one["started"] for one in ranks if one["started"] is not None]
    over = [one["ended"] for one in ranks if one["ended"] is not None]
    all_over = bool(ranks) and len(over) == len(ranks)
    try_number, _, again = folder.name.partition("-")[2].partition(".")
    state, words = _what_became(records, ranks)
    if state == "running" and is_over:
        state, words = "ended", "was ended, and its ranks said no more"
    if budget.spent:
        state, words = "ended", "is not shown: the ranks of all jobs are more than a page looks at"
    return {
        "name": f"try {try_number}" + (f", job {int(again) + 1}" if again else ""),
        "try": int(try_number),
        "state": state,
        "words": words,
        "over": is_over,
        "started": min(begun, default=None),
        "ended": max(over) if all_over or (over and state != "running") else None,
        "hosts": list(dict.fromkeys(one["host"] for one in ranks if one["host"])),
        "ranks": ranks if last else [],
    }


def _records(
    folder: Path, root: Path, files: Unchanged, budget: Budget
) -> Iterator[tuple[int, dict[str, Any]]]:
    if budget.spent:
        return
    numbers = (re.fullmatch(r"rank-(\d{1,9})\.json", name) for name in budget.names(folder))
    for rank in sorted(int(match[1]) for match in numbers if match)[:_MOST_RANKS]:
        with suppress(FileRefused, OSError):
            yield rank, _record(folder, rank, root, files, budget)


def _record(
    folder: Path, rank: int, root: Path, files: Unchanged, budget: Budget
) -> dict[str, Any]:
    path = folder / f"rank-{rank}.json"
    return files.read(path, root, _what_counts, budget=budget, most_bytes=_MOST_OF_RANK)


def _what_counts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a rank's record what is looked at here, without what is long."""
    told: dict[str, Any] = {name: finite(record.get(name)) for name in ("started", "ended")}
    told["exit_code"] = _integer(record.get("exit_code"))
    told |= {name: word(record.get(name)) for name in ("host", "task", "cpu")}
    gpus = record.get("gpus")
    told["gpus"] = [word(gpu, 100) for gpu in gpus[:32]] if isinstance(gpus, list) else []
    if "asked_to_end" in record:
        told["asked_to_end"] = True
    if isinstance(saved := record.get("preempted"), Mapping):
        told["preempted"] = {"step": _integer(saved.get("step"))}
    raised = _raised(record)
    told["exception"] = {"t": finite(raised.get("t")), "line": _integer(raised.get("line"))}
    told["exception"] |= {name: word(raised.get(name), 500) for name in ("type", "file", "message")}
    return told


def _rank(rank: int, record: Mapping[str, Any]) -> dict[str, Any]:
    code = record["exit_code"]
    return {
        "rank": rank,
        **{name: record[name] for name in ("host", "task", "cpu", "gpus")},
        "started": record["started"],
        "ended": record["ended"],
        "exit_code": code if code is not None and abs(code) < 2**31 else None,
        "asked": "asked_to_end" in record,
    }


def _usage(
    folder: Path,
    rank: Mapping[str, Any],
    root: Path,
    files: Unchanged,
    budget: Budget,
    *,
    ended: bool,
) -> dict[str, float | None]:
    """What a rank takes of its host, or took, as far as it has been looked at."""
    path = folder / f"rank-{rank['rank']}.usage"
    try:
        told = dict(files.read(path, root, _measured, budget=budget, most_bytes=_MOST_OF_RANK))
    except (FileRefused, OSError):
        told = dict(_measured({}))
    at, began = told.pop("t"), rank["started"]
    spent, average = told.pop("cpu_s"), told.pop("gpu_average")
    if ended:
        known = at is not None and began is not None and spent is not None and at > began
        told |= {"cores": spent / (at - began) if known else None, "memory": None}
        told |= {"gpu": average, "gpu_memory": None}
    return told


def _measured(said: Mapping[str, Any]) -> dict[str, float | None]:
    names = "t cores cpu_s memory peak gpu gpu_average gpu_memory gpu_peak"
    return {name: finite(said.get(name)) for name in names.split()}


def _what_became(
    records: Mapping[int, Mapping[str, Any]], ranks: list[dict[str, Any]]
) -> tuple[str, str]:
    """State and words of a job."""
    if not ranks:
        return "running", "no rank has begun"
    saved = [one.get("preempted") for one in records.values()]
    steps = [one.get("step") for one in saved if isinstance(one, Mapping)]
    if len(steps) == len(ranks):
        at = "" if steps[0] is None else f" after step {steps[0]}"
        return "made_room", f"made room for other jobs{at}, where it was saved"
    failed = [
        (_raised(record).get("t") or one["ended"] or 0.0, one, _raised(record))
        for one, record in zip(ranks, (records[r["rank"]] for r in ranks), strict=True)
        if one["exit_code"] not in (None, 0) and "asked_to_end" not in record
    ]
    if failed:
        _, one, raised = min(failed, key=lambda told: told[0])
        on = f" on {one['host']}" if one["host"] else ""
        if kind := word(raised.get("type")):
            place = ""
            if file := word(raised.get("file")):
                place = "" if raised["line"] is None else f" at {file}:{raised['line']}"
            said = word(raised.get("message"), 500)
            return "failed", f"rank {one['rank']}{on} raised {kind}{place}: {said}".rstrip(": ")
        code = one["exit_code"]
        how = f"exited with code {code}"
        if 128 < code <= LAST_OF_SIGNALS:
            how = f"was ended by signal {code - 128}"
        return "failed", f"rank {one['rank']}{on} {how}"
    if any(one["ended"] is None for one in ranks):
        return "running", f"{_count(len(ranks), 'rank')} at work"
    if any("asked_to_end" in record for record in records.values()):
        return "ended", "was ended from outside"
    return "done", f"{_count(len(ranks), 'rank')} ended well"


def _raised(record: Mapping[str, Any]) -> Mapping[str, Any]:
    said = record.get("exception")
    return said if isinstance(said, Mapping) else {}


def read_communication(layout: RunLayout, files: Unchanged | None = None) -> dict[str, Any] | None:
    """How each rank of the last job spent its time; so far, unless all of it has ended well.

    Args:
        layout: the run's.
        files: what was read of them before.

    Returns:
        ``ended``, whether that is all; ``straggler`` (a rank, or null) and ``ranks``: of each
        ``rank``, ``host`` and the seconds ``run_s``, ``computing_s``, ``reducing_s`` and
        ``waiting_s``. None where no rank has said anything.
    """
    files, budget = files or Unchanged(), Budget(_MOST_OF_RANKS)
    with suppress(FileRefused, OSError):
        if told := files.read(layout.statistics, layout.workspace, _spent, budget=budget):
            return {"ended": True, **told}
    for folder in _folders(layout)[-1:]:
        ranks = []
        for number, record in _records(folder, layout.workspace, files, budget):
            with suppress(FileRefused, OSError):
                path = folder / f"rank-{number}.communication"
                seconds = files.read(
                    path, layout.workspace, _seconds, budget=budget, most_bytes=_MOST_OF_RANK
                )
                if seconds is not None:
                    ranks.append({"rank": number, "host": record["host"], **seconds})
        if ranks:
            least = min(ranks, key=lambda one: one["waiting_s"])
            straggler = least["rank"] if len(ranks) > 1 else None
            return {"ended": False, "straggler": straggler, "ranks": ranks}
    return None


def _spent(said: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        ranks = []
        for one in said["ranks"][:_MOST_RANKS]:
            if (seconds := _seconds(one)) is None or type(one["rank"]) is not int:
                return None
            ranks.append({"rank": one["rank"], "host": word(one.get("host")), **seconds})
        straggler = said.get("straggler")
        who = straggler.get("rank") if isinstance(straggler, Mapping) else None
    except (LookupError, TypeError, AttributeError):
        return None
    return {"straggler": who if type(who) is int else None, "ranks": ranks}


def _seconds(said: Mapping[str, Any]) -> dict[str, float] | None:
    """What a rank has spent on what; None if it is not said."""
    run, comm, wait = (finite(said.get(name)) for name in ("run_s", "comm_s", "wait_s"))
    if run is None or comm is None or wait is None:
        return None
    comm = min(max(0.0, comm), run)
    wait = min(max(0.0, wait), comm)
    return {
        "run_s": run,
        "computing_s": run - comm,
        "reducing_s": comm - wait,
        "waiting_s": wait,
    }


def experiment_of(layout: RunLayout, record: Mapping[str, Any]) -> Path:
    """The folder of the experiment that a training is in, as it left it; or, where it works in one
    with a name, that itself. One of another DAG, which a run was refused, is not shown.

    Args:
        layout: the run's, which has no name of an experiment.
        record: as ``read_record`` gives it.
    """
    named = mapping(record.get("run")).get("experiment")
    if isinstance(named, str) and named != layout.training_id and is_experiment(named):
        with suppress(FileRefused, OSError):
            left = replace(layout, experiment_id=named).experiment_copy
            if left.is_dir():
                return left
            if layout.dag_id in owners_of(layout.workspace, named):
                return experiments(layout.workspace) / named
    return layout.experiment


def read_checkpoints(layout: RunLayout, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The newest checkpoints: ``name``, ``step`` (or null), ``bytes`` and ``at`` (unix seconds).

    Args:
        layout: the run's.
        record: as ``read_record`` gives it.
    """
    found: dict[str, dict[str, Any]] = {}
    for folder in (layout.result, layout.checkpoints, experiment_of(layout, record)):
        with suppress(FileRefused, OSError):
            check_folder(folder, layout.workspace)
            with os.scandir(folder) as entries:
                for _, entry in zip(range(_MOST_ENTRIES), entries, strict=False):
                    match = _CHECKPOINT.fullmatch(entry.name)
                    if match is None or not entry.is_file(follow_symlinks=False):
                        continue
                    stat = entry.stat(follow_symlinks=False)
                    size = stat.st_size
                    if entry.name.endswith(".index"):  # TensorFlow's: the values lie beside it
                        beside = Path(folder, f"{match['name']}.data-00000-of-00001")
                        with suppress(OSError):
                            size += beside.lstat().st_size
                    said = _STEP_OF_INDEX.search(entry.name) or _STEP.search(match["name"])
                    step = int(said[1]) if said else None
                    name = word(entry.name.removesuffix(".index"))
                    told = {"name": name, "step": step, "bytes": size, "at": stat.st_mtime}
                    found[f"{folder.name}/{name}"] = told
    return sorted(found.values(), key=lambda one: one["at"], reverse=True)[:_MOST_CHECKPOINTS]


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'s' * (number != 1)}"


def mapping(said: object) -> Mapping[str, Any]:
    """What is one; else an empty one."""
    return said if isinstance(said, Mapping) else {}


def word(said: object, longest: int = _LONGEST_NAME) -> str:
    """Text that can be sent; empty if it is none."""
    text = said[:longest] if isinstance(said, str) else ""
    return text.encode("utf-8", "replace").decode("utf-8")


def finite(said: object) -> float | None:
    if isinstance(said, bool) or not isinstance(said, int | float):
        return None
    with suppress(OverflowError):
        number = float(said)
        return number if math.isfinite(number) else None
    return None


def _integer(said: object) -> int | None:
    return said if type(said) is int and abs(said) < 2**63 else None
