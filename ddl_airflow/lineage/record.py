"""The lineage record: which data, code, manifest and run made a model (docs/process-contract.md).

Each task writes the part that it knows to ``<run>/airflow/lineage/``, and what is known so far to
``<run>/airflow/record.json``; the upload puts the parts together and publishes the whole beside the
model. A part names what the run was made of when the step
worked, and counts only as long as the run is made of that: somebody may clear stage_data alone. No
part holds a key, a token or an environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ddl_airflow import __version__
from ddl_airflow.core.beneath import read_object, write_beneath
from ddl_airflow.core.errors import ObjectArchived, StagingError
from ddl_airflow.core.layout import HEARTBEAT_S, OWN_EXPERIMENT, RunLayout
from ddl_airflow.core.metrics import COMMAND, SAMPLE, Measurement, finite
from ddl_airflow.core.selection import ALL, Selection
from ddl_airflow.storage.experiments import (
    Before,
    may_have_others,
    note_training,
    noted_meanwhile,
)
from ddl_airflow.storage.fingerprint import file_sha256, object_sha256
from ddl_airflow.storage.store import ObjectStore, StoredObject, why_archived

LINEAGE = "lineage.json"
SCHEMA = "ddl-airflow/lineage/1"
SO_FAR = "record.json"
# A run without Airflow says so often that it is at work, and the clock of a file server may be
# another than ours.
_SILENT_S = 6 * HEARTBEAT_S
# Of a part or a record, which lists each object of the data.
MOST_BYTES = 2**30
_LESS = (
    "Pack the data into archives (`unpack` in training_data_reference), or select less of them "
    "(`include`, `exclude`)."
)
# In characters: a key of 4,096 bytes, each of which may be written as six.
_MOST_OF_AN_OBJECT = 25_000
_ENCODER = json.JSONEncoder(indent=2, sort_keys=True)
_READERS = 8  # objects at a time
BY_HAND = "by_hand"  # the type of a run without Airflow
# Whether ``went_on_from`` names all that trained before in an experiment that others may be in.
IS_WHOLE = "went_on_from_is_whole"
_RUN = "run.json"
_TRAINING = "training.json"
_PARTS = ("stage_data", "train", "transform", "evaluate")
_PASSED = "passed-"  # begins parts that say that a step let the model pass, and what it knows
APPROVE = "approve"  # its part says that a person approved, and is not of the record
# Ends the kind of steps on ways that a branch chooses between: those of one way have to let it
# pass.
OF_A_BRANCH = "_of_a_branch"
# Before the name of such a step: those on other ways, one of which may let it pass instead.
INSTEAD_OF = "instead_of:"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run of a DAG that a training is.

    Attributes:
        run_id: Airflow's, for example ``manual__2026-11-20T20:15:00+00:00``.
        type: Airflow's, such as ``scheduled``; or ``BY_HAND``.
        triggered_by: the user who did; None for nobody.
        by_a_person: whether somebody asked for it, so that it trains in any case.
        logical_date: as Airflow has it.
        due: what tells the older of two runs: of a backfill, too, when it would have been due.
        started: when it did.
        parameters: the run's values, by name.
    """

    dag_id: str
    run_id: str
    type: str
    due: datetime
    triggered_by: str | None = None
    by_a_person: bool = False
    logical_date: datetime | None = None
    started: datetime | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def check_can_list(listing: Sequence[Mapping[str, Any]]) -> None:
    """Looks whether a record can list the objects of the data: before they are fetched.

    Raises:
        StagingError: they are too many.
    """
    part, most = {"dataset": {"listing": listing}}, _most_of_a_part()
    if len(listing) * _MOST_OF_AN_OBJECT <= most:
        return
    if sum(map(len, _ENCODER.iterencode(part))) > most:
        raise StagingError(
            f"the data are {len(listing):,} objects, and their list is larger than {most:,} bytes, "
            f"which is more than a lineage record holds. {_LESS}",
            retryable=False,
        )


def write_part(layout: RunLayout, step: str, facts: Mapping[str, Any]) -> None:
    """Keeps what a step knows; a retry replaces it. Written whole or not at all.

    Raises:
        StagingError: it is larger than what is read again.
    """
    folder = layout.kept / "lineage"
    folder.mkdir(parents=True, exist_ok=True)
    of = _trained_with(layout) if step == "train" else _made_of(layout)
    _write(layout, folder / f"{step}.json", {**facts, "made_of": of}, _most_of_a_part())


def _part(layout: RunLayout, step: str) -> Path:
    return layout.kept / "lineage" / f"{step}.json"


def read_part(layout: RunLayout, step: str) -> dict[str, Any]:
    """What a step kept.

    Raises:
        StagingError: it has not run to its end; or it did before stage_data brought other data,
            code or settings.
    """
    try:
        part = read_object(_part(layout, step), layout.workspace, MOST_BYTES)
    except FileNotFoundError:
        raise StagingError(
            f"{step} has left nothing in {layout.root}: it has not run to its end, though "
            f"somebody may have marked it success. Clear {step}.",
            retryable=False,
        ) from None
    run = fixed_run(layout) or {"made_of": {}}
    now: dict[str, Any] = run["made_of"]
    before = in_digests_of(now, run.get("earlier_digests", ()), part.pop("made_of") or {})
    if other := [name for name in now if before.get(name) != now[name]]:
        raise StagingError(
            f"{step} worked with another {' and '.join(other)} than stage_data has brought since. "
            f"Clear {step} with downstream.",
            retryable=False,
        )
    return part


def drop_parts(layout: RunLayout, first: str) -> None:
    """Drops what a step and those after it kept, if they have run."""
    for step in (*_PARTS[_PARTS.index(first) :], APPROVE):
        drop_part(layout, step)
    for passed in (layout.kept / "lineage").glob(f"{_PASSED}*.json"):
        passed.unlink(missing_ok=True)


def let_pass(layout: RunLayout, gate: str, facts: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Notes that a step lets the model pass, as it is now, to what publishes it.

    Args:
        layout: the run's.
        gate: the step's name. Several may be of one kind, and each has to.
        facts: what an evaluation knows, for ``evaluated``.
    """
    write_part(layout, _passed(gate), {"gate": gate, **facts})


def take_back(layout: RunLayout, gate: str) -> None:
    """Drops what ``let_pass`` noted."""
    drop_part(layout, _passed(gate))


def lets_pass(layout: RunLayout, gate: str) -> bool:
    """Whether ``let_pass`` noted it of what the run is made of now."""
    try:
        read_part(layout, _passed(gate))
    except StagingError:
        return False
    return True


def evaluated(layout: RunLayout) -> dict[str, Any] | None:
    """What the evaluations that let the model pass know of it together; None if there is none.

    It is that of the last one, with what the commands of the others have measured in front of what
    its own has, so that of one metric the last one's value counts.

    Raises:
        StagingError: as ``read_part``.
    """
    last = read_part(layout, "evaluate") if has_part(layout, "evaluate") else None
    passed = []
    for path in (layout.kept / "lineage").glob(f"{_PASSED}*.json"):
        with suppress(StagingError):  # of what the run was made of before
            part = read_part(layout, path.stem)
            if "result" in part:  # else it is an approval's, or of an earlier version of ours
                passed.append((part.pop("gate"), part))
    passed.sort(key=lambda one: one[0])
    if last is None and passed:  # another one has begun again, or has refused the model
        last = passed[-1][1]
    if last is None or "measurements" not in last["result"]:
        return last
    own = last["result"]["measurements"]
    others = [
        one
        for _, part in passed
        for one in part["result"]["measurements"]
        if one["source"] == COMMAND and one not in own
    ]
    if others:
        known = [
            *(one for one in own if one["source"] != COMMAND),
            *others,
            *(one for one in own if one["source"] == COMMAND),
        ]
        last["result"].update(_numbers([Measurement.load(one) for one in known]))
    return last


def _passed(gate: str) -> str:
    # Its name may be as long as a file's may be.
    return f"{_PASSED}{hashlib.sha256(gate.encode()).hexdigest()[:32]}"


def drop_part(layout: RunLayout, step: str) -> None:
    """Drops what a step kept, if it has run."""
    (layout.kept / "lineage" / f"{step}.json").unlink(missing_ok=True)


def has_part(layout: RunLayout, step: str) -> bool:
    """Whether the step has run to its end, and nobody has started it again."""
    return (layout.kept / "lineage" / f"{step}.json").exists()


def measured(layout: RunLayout, trained: Mapping[str, Any] | None = None) -> list[Measurement]:
    """What train and transform know of the model's quality, in the order in which they learnt it.

    Args:
        layout: the run's.
        trained: the result of train, from who knows it: of streamed data its part is long.

    Raises:
        StagingError: as ``read_part``.
    """
    trained = read_part(layout, "train")["result"] if trained is None else trained
    return _measured(trained, read_part(layout, "transform")["result"])


def _measured(trained: Mapping[str, Any], formed: Mapping[str, Any]) -> list[Measurement]:
    # Of an earlier version of ours: numbers alone.
    told = [Measurement(name, value) for name, value in trained["metrics"].items()]
    if "measurements" in trained:
        told = [Measurement.load(one) for one in trained["measurements"]]
    if (accuracy := formed.get("accuracy")) is not None:
        file, rows = formed.get("sample") or "", formed.get("rows") or 0
        told.append(Measurement("accuracy", accuracy, SAMPLE, file, rows))
    return told


def _numbers(known: Sequence[Measurement]) -> dict[str, Any]:
    return {"metrics": finite(known), "measurements": [one.dump() for one in known]}


def fix_run(
    layout: RunLayout,
    run_id: str,
    made_of: Mapping[str, Any],
    steps: Mapping[str, Mapping[str, Any]],
    earlier_digests: Sequence[str] = (),
    selection: Selection = ALL,
    data: Mapping[str, str] | None = None,
    gates: Mapping[str, Mapping[str, Sequence[str]]] | None = None,
) -> None:
    """Keeps what the run trains with from here on, whatever becomes of the manifest.

    Args:
        layout: the run's.
        run_id: Airflow's, by which it is asked whether the run has ended.
        made_of: dataset (fingerprint), code and manifest (digests) and parameters.
        steps: settings of each later step, by its name: command, bounds, the manifest's digest.
        earlier_digests: the manifest's, as earlier versions of ours made them.
        selection: by which the data were listed.
        data: their ``uri`` and, where that is another, ``resolved_uri``.
        gates: as ``StepContext`` has them; None: there is at most one of each kind.
    """
    told = {"run_id": run_id, "made_of": made_of, "steps": steps, "data": data or {}}
    if gates is not None:
        told["gates"] = gates
    told["selection"] = {"include": selection.include, "exclude": selection.exclude}
    told |= {"experiment": layout.experiment_id, "earlier_digests": list(earlier_digests)}
    _write(layout, layout.kept / _RUN, told)


def fixed_run(layout: RunLayout) -> dict[str, Any] | None:
    """What ``fix_run`` kept; None if nothing was."""
    try:
        return read_object(layout.kept / _RUN, layout.workspace)
    except FileNotFoundError:
        return None


def selected_by(layout: RunLayout) -> Selection:
    """By what ``stage_data`` listed the data of the run."""
    told = (fixed_run(layout) or {}).get("selection")
    # Of an earlier version of ours: it is not known.
    return Selection(tuple(told["include"]), tuple(told["exclude"])) if told else ALL


def in_digests_of(
    made_of: Mapping[str, Any], earlier_digests: Collection[str], known: Mapping[str, Any]
) -> Mapping[str, Any]:
    """What something was made of, with the manifest's digest of today where it is the same one's.

    Args:
        made_of: of today.
        earlier_digests: the manifest's, as earlier versions of ours made them.
        known: what an earlier version of ours may have written.
    """
    same = known.get("manifest") in earlier_digests
    return {**known, "manifest": made_of["manifest"]} if same else known


def begin_training(
    layout: RunLayout, *, anew: bool, brought: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Notes what ranks are about to train with; no step has worked with what they will leave.

    Args:
        layout: the run's.
        anew: whether there is nothing of earlier ranks to go on from. Else it is kept what these
            trained with.
        brought: what ``begun_with`` said where checkpoints were made that came from elsewhere.
    """
    drop_parts(layout, "train")
    before = begun_with(layout)
    known = [
        made_of
        for told in (() if anew else (before, brought))
        for made_of in (*told.get("went_on_from", ()), told.get("made_of"))
    ]
    told: dict[str, Any] = {"made_of": _made_of(layout)}
    if may_have_others(layout):
        others = Before(brought.get("went_on_from", ()), brought.get(IS_WHOLE, False))
        in_experiment = note_training(
            layout,
            _training(layout),
            _owner_of_experiment(layout),
            others if brought else None,
        )
        # Also where the run starts again: the experiment stays.
        known += in_experiment.trainings
        told[IS_WHOLE] = in_experiment.whole and (anew or before.get(IS_WHOLE, True))
    told["went_on_from"] = _others(layout, known)
    _write(layout, layout.kept / _TRAINING, told)


def beginnings(layout: RunLayout, began: float) -> dict[str, Any]:
    """What earlier ranks trained with, from whose checkpoints the last ones may have gone on, where
    that was something else, as the record has it: ``went_on_from``, the oldest first, and of a run
    in an experiment with others whether these are all.

    Args:
        layout: the run's.
        began: when the last ranks did, in seconds since 1970.
    """
    begun = begun_with(layout)
    if may_have_others(layout):
        meanwhile = noted_meanwhile(layout, began)
        known = [*begun.get("went_on_from", ()), *meanwhile.trainings]
        begun["went_on_from"] = _others(layout, known)
        begun[IS_WHOLE] = begun.get(IS_WHOLE, not layout.experiment_id) and meanwhile.whole
    told = {IS_WHOLE: begun[IS_WHOLE]} if IS_WHOLE in begun else {}
    return told | ({"went_on_from": begun["went_on_from"]} if begun.get("went_on_from") else {})


def _others(
    layout: RunLayout, known: Iterable[Mapping[str, Any] | None]
) -> list[Mapping[str, Any]]:
    """Those that are not what the run is made of, each once."""
    run, now = fixed_run(layout), _training(layout)
    if run is None or now is None:
        return []
    others: list[Mapping[str, Any]] = []
    for one in known:
        if one is None:
            continue
        one = in_digests_of(now, run.get("earlier_digests", ()), one)
        same = all(now.get(name) == one[name] for name in one if name != "training_id")
        if not same and one not in others:
            others.append(one)
    return others


def _training(layout: RunLayout) -> dict[str, Any] | None:
    """The run as another record names it."""
    run = fixed_run(layout)
    if not run or not run["made_of"]:
        return None
    return {"training_id": layout.training_id, **run.get("data", {}), **run["made_of"]}


def _owner_of_experiment(layout: RunLayout) -> dict[str, Any] | None:
    """The training whose own experiment the run goes on with."""
    if not re.fullmatch(OWN_EXPERIMENT, layout.experiment_id):
        return None
    owner = replace(layout, training_id=layout.experiment_id, experiment_id="")
    training, trained_with = _training(owner), begun_with(owner).get("made_of")
    return training and {**training, **(trained_with or {})}


def begun_with(layout: RunLayout) -> dict[str, Any]:
    """What ``begin_training`` kept, made_of and went_on_from; nothing if ranks were never
    started.
    """
    path = layout.kept / _TRAINING
    with suppress(FileNotFoundError):
        # Empty: of an earlier version of ours, whose host crashed before it was on disk.
        if path.lstat().st_size:
            return read_object(path, layout.workspace)
    return {}


def has_begun_training(layout: RunLayout) -> bool:
    """Whether ranks have ever been started in the run's folder."""
    return (layout.kept / _TRAINING).exists()


def trained_with_other_data(layout: RunLayout) -> bool:
    """Whether what ranks left is of another dataset than the one that is staged."""
    return _differs(layout, "dataset")


def trained_with_other_code(layout: RunLayout) -> bool:
    """Whether the last ranks that were started ran other scripts than those that are staged."""
    return _differs(layout, "code")


def _differs(layout: RunLayout, what: str) -> bool:
    before, now = _trained_with(layout), _made_of(layout)
    return before is not None and now is not None and before[what] != now[what]


def _made_of(layout: RunLayout) -> dict[str, Any] | None:
    run = fixed_run(layout)
    return run and run["made_of"]


def _trained_with(layout: RunLayout) -> dict[str, Any] | None:
    training = begun_with(layout)
    made_of: dict[str, Any] | None = training["made_of"] if training else _made_of(layout)
    return made_of


def assemble(
    layout: RunLayout,
    manifest: Mapping[str, Any],
    run: Run,
    files: Mapping[str, Path],
    *,
    tries: int,
    published: Iterable[Mapping[str, Any]] = (),
    evidence: Callable[[dict[str, Any]], Mapping[str, Path]] = lambda _record: {},
) -> dict[str, Any]:
    """The record of a training, for ``write_lineage`` once it is whole.

    Args:
        layout: the run's folder, with the parts of the steps before.
        manifest: name, digest and dialect.
        run: that it belongs to.
        files: what is published, by key; each goes in with size and SHA-256.
        tries: of the upload.
        published: markers of what was published of the training. When the record of an earlier
            try is among that, and is of the same results, when the run started and the tries of
            the upload stay those of that time: the same results are the same record.
        evidence: makes files of the record, by key, which go into it as well; it may add to it.

    Raises:
        StagingError: as ``read_part``.
    """
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "training_id": layout.training_id,
        "manifest": {name: manifest[name] for name in manifest if name != "earlier_digests"},
        "run": _of(run, layout.experiment.name),
    }
    parts = {step: read_part(layout, step) for step in _PARTS if step != "evaluate"}
    if (known := evaluated(layout)) is not None:  # not all trainings have an evaluation
        parts["evaluate"] = known
    _put_together(record, parts)
    record["run"]["tries"]["upload_results"] = tries
    versions = record["environment"]["versions"]
    versions["ddl-airflow"] = __version__
    if run.type != BY_HAND:
        from importlib import metadata  # who only reads records need not wait for it

        versions["apache-airflow"] = metadata.version("apache-airflow")
    record["result"]["files"] = _listed(files)
    if _is_published(layout.kept / LINEAGE, published):
        before = read_object(layout.kept / LINEAGE, layout.workspace, MOST_BYTES)
        if _of_results(before) == _of_results(record):
            before = before["run"]
            record["run"]["started"] = before["started"]
            record["run"]["tries"]["upload_results"] = before["tries"]["upload_results"]
    record["result"]["files"] += _listed(evidence(record))
    record["result"]["files"].sort(key=lambda file: file["key"])
    return record


def _put_together(record: dict[str, Any], parts: Mapping[str, dict[str, Any]]) -> None:
    """Adds what steps kept, by their names and in their order."""
    for part in parts.values():
        record["run"]["tries"].update(part.pop("tries", {}))
        for section, facts in part.items():
            record.setdefault(section, {}).update(facts)
    if parts.keys() >= {"train", "transform"} and "evaluate" not in parts:
        known = _measured(parts["train"]["result"], parts["transform"]["result"])
        record["result"].update(_numbers(known))


def write_lineage(layout: RunLayout, record: Mapping[str, Any]) -> None:
    """Writes ``<run>/airflow/lineage.json``.

    Once, as it is published: by that a further try knows what was published before.
    """
    _write(layout, layout.kept / LINEAGE, record)


def encoded(record: Mapping[str, Any]) -> bytes:
    """What is in ``lineage.json``."""
    return (_ENCODER.encode(record) + "\n").encode()


def _listed(files: Mapping[str, Path]) -> list[dict[str, Any]]:
    listed = []
    for key, path in sorted(files.items()):
        sha256, size = file_sha256(path)
        listed.append({"key": key, "size": size, "sha256": sha256})
    return listed


def lineage_schema() -> dict[str, Any]:
    """The JSON Schema of ``lineage.json``."""
    return _schema("lineage")


@cache
def facets_schema() -> dict[str, Any]:
    """The JSON Schema of what we add to OpenLineage's events."""
    return _schema("openlineage")


def _schema(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(
        Path(__file__).with_name(f"{name}.schema.json").read_bytes()
    )
    return schema


def model_digest(record: Mapping[str, Any]) -> str:
    """One digest of all files of a published model: ``sha256:`` and that of what ``sha256sum``
    prints for them, sorted by their names in ``model/``.
    """
    told = sorted((file["key"], file["sha256"]) for file in record["result"]["files"])
    lines = (f"{sha256}  {key}\n" for key, sha256 in told if key.startswith("model/"))
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def keep_so_far(layout: RunLayout, run: Run, outcome: Mapping[str, Any]) -> None:
    """Writes ``<run>/airflow/record.json``: what is known of a training that has not ended, or has
    failed or been cancelled; the same sections as the whole record's, as far as there are some of
    what the run is made of now, but without the list of the data's objects.

    Args:
        layout: the run's.
        run: that it belongs to.
        outcome: ``state``: running, skipped, rejected, failed, cancelled or published; ``step``,
            the last one that did something; ``at_work`` and ``try`` while it does; and of a
            failure what ``failure.json`` has.
    """
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "training_id": layout.training_id,
        "outcome": dict(outcome),
        "run": _of(run, layout.experiment.name),
    }
    # What a step does again is not what it did before, nor is what comes after it.
    again = outcome["step"] if outcome.get("at_work") else None
    parts = {}
    for step in _PARTS[: _PARTS.index(again) if again in _PARTS else None]:
        with suppress(StagingError):  # it has not run yet, or with other data, code or settings
            part = evaluated(layout) if step == "evaluate" else read_part(layout, step)
            if part is not None:
                parts[step] = part
    _put_together(record, parts)
    # Of 100,000 objects it would be larger than what the page reads; ``lineage.json`` has it.
    record.get("dataset", {}).pop("listing", None)
    _write(layout, layout.kept / SO_FAR, record)


def is_silent(layout: RunLayout) -> bool:
    """Whether a run without Airflow says no more that it is at work. It may be frozen, or its host
    away: it need not be dead.
    """
    return time.time() - last_sign(layout) > _SILENT_S


def last_sign(layout: RunLayout) -> float:
    """When it last said so, in unix seconds."""
    # Jobs of a scheduler go on without it, and report progress.
    signs = (layout.heartbeat, layout.kept / SO_FAR, layout.progress)
    return max(written_ns(path) for path in signs) / 1e9


def written_ns(path: Path) -> int:
    """When a file was written, in nanoseconds since 1970; 0 if it is not there."""
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0


def _of_results(record: Mapping[str, Any]) -> Any:
    """A record without its evidence, and without what a further try of the upload changes."""
    told = json.loads(json.dumps(record))
    made = told.pop("evidence", {"made": []})["made"]
    told["result"]["files"] = [one for one in told["result"]["files"] if one["key"] not in made]
    del told["run"]["started"], told["run"]["tries"]["upload_results"]
    return told


def _is_published(path: Path, markers: Iterable[Mapping[str, Any]]) -> bool:
    if not path.exists():
        return False
    mine = (LINEAGE, file_sha256(path)[0])
    return any(mine == (file["key"], file["sha256"]) for m in markers for file in m["files"])


def check_files(record: Mapping[str, Any], store: ObjectStore) -> list[str]:
    """What is not as recorded: one sentence for each published file that is gone or changed."""
    problems = []
    listed = {obj.key: obj for obj in store.list()}
    files = record["result"]["files"]
    there = [listed[file["key"]] for file in files if file["key"] in listed]

    def read_one(obj: StoredObject) -> str:
        try:
            return object_sha256(store, obj)
        except ObjectArchived:
            return ""

    with ThreadPoolExecutor(_READERS) as pool:
        read = dict(zip(there, pool.map(read_one, there), strict=True))
    for file in files:
        obj = listed.get(file["key"])
        if obj is None:
            problems.append(f"{store.uri}/{file['key']} is gone")
        elif not read[obj]:
            problems.append(f"{store.uri}/{file['key']} is {why_archived(obj.archived)}")
        elif read[obj] != file["sha256"]:
            problems.append(f"{store.uri}/{file['key']} is not the file that was published")
    return problems


def _of(run: Run, experiment: str) -> dict[str, Any]:
    return {
        "dag_id": run.dag_id,
        "run_id": run.run_id,
        "type": run.type,
        "triggered_by": run.triggered_by,
        "logical_date": run.logical_date.isoformat() if run.logical_date else None,
        "due": run.due.isoformat(),
        "started": run.started.isoformat() if run.started else None,
        "parameters": dict(run.parameters),
        "tries": {},
        "experiment": experiment,
    }


def _most_of_a_part() -> int:
    return MOST_BYTES * 15 // 16  # the whole record has more than the list of the data


def _write(
    layout: RunLayout, path: Path, value: Mapping[str, Any], most: int | None = None
) -> None:
    content = encoded(value)
    most = most or MOST_BYTES
    if len(content) > most:
        raise StagingError(
            f"{path} would have {len(content):,} bytes, more than {most:,}: the data are too many "
            f"objects. {_LESS}",
            retryable=False,
        )
    write_beneath(path, layout.workspace, content)
