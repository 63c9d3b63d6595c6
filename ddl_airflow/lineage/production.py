"""Which of a DAG's trainings is the newest, and which one serves: pointers beside them.

``<results>/<dag id>/latest.json`` and ``production.json`` are small objects, each replaced in one
step and only if nobody has changed it meanwhile: a reader finds the one before or the one after,
and of two who change it at the same time the second looks again at what the first has left. What
a pointer names is never changed (``ddl_airflow.storage.publication.publish``).
"""

from __future__ import annotations

import json
import random
import re
import shlex
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

from ddl_airflow.core.errors import (
    DAMAGED,
    NoSuchModel,
    ObjectArchived,
    QualityTooLow,
    SourceMissing,
    StagingError,
)
from ddl_airflow.core.metrics import Measurement
from ddl_airflow.lineage.record import LINEAGE, in_digests_of, model_digest
from ddl_airflow.storage.publication import (
    PUBLICATION,
    marker_of,
    missing_from,
    own_name,
    publications,
    restore,
    results_in,
)
from ddl_airflow.storage.store import (
    RETIRED,
    SUCCESS,
    ObjectStore,
    StoredObject,
    why_archived,
)

LATEST = "latest"
PRODUCTION = "production"
_REJECTED = "rejected"
SCHEMA = "ddl-airflow/pointer/1"
_KEPT = 20  # earlier ones to go back to
_EVENTS = 1000  # of the history
_PATIENCE_S = 120.0  # with others who change the same pointer
_PLACE = r"[^/]+(/[^/]+)?"  # of a publication: in its training, or alone there as of before
_OF_NO_MODEL = ("attempts", "dry_run")  # settings of a run: its model is the same with any
_OLDEST = {"training_id", "before"}  # what each pointer has had, whichever version wrote it
# Of a pointer, and not of what it names; all else goes along with a publication, whoever wrote it.
_OF_POINTER = ("schema", "before", "history")
_NAMED = ("publication", "training_id", "model", "set", "withdrawn")  # and no fact of its model
_ROLLED_BACK = "rolled back"
_SAME = "the very model that is in production"
_GONE_BACK_FROM = "which somebody went back from"

Pointer = dict[str, Any]
ReadPointer = Callable[[str, str], Pointer | None]  # of a DAG's id, latest or production


class NoPointer(StagingError):
    """A JSON object in a pointer's place is none: somebody else's, or emptied."""

    def __init__(self, place: str) -> None:
        why = f"it has neither schema {SCHEMA} nor a training_id"
        super().__init__(_damaged(place, why), retryable=False)
        self.place = place

    def passed_over(self, dag_id: str, keys: Iterable[str]) -> str:
        """What to note of it, if it is somebody else's: no training there is named as the DAG's.

        Args:
            dag_id: whose pointer would be there.
            keys: of all objects in the results.

        Raises:
            NoPointer: else it was ours.
        """
        if any(key.startswith(f"{dag_id}-") for key in keys):
            raise self
        return f"{self.place} is passed over: it is no pointer to a model"


def read_pointer(store: ObjectStore, dag_id: str, name: str) -> Pointer | None:
    """The pointer, None if nothing was published or promoted yet.

    Args:
        store: of the results.
        dag_id: whose trainings.
        name: ``latest`` or ``production``.

    Returns:
        training_id, publication (its place in the store), model (its URI), digest (the model's),
        metrics (numbers by name), measurements (each with what it was measured on), made_of, set
        (time, ISO 8601), due (of its run, for example a schedule's time) and before: the same of
        earlier ones, the newest first, and whether each was withdrawn. history: every change, the
        newest first: number, event, publication, training_id, at, by and reason, and perhaps
        digest; of going back withdrawn, from which publications, and perhaps passed_over, each with
        what it holds. What one does not have because it was written by an earlier version of ours
        is empty.

    Raises:
        NoPointer: what is there has nothing of a pointer.
        StagingError: it is damaged.
    """
    key = _key(dag_id, name)
    found = _read(store, key)
    return None if found is None else _upgraded(found[0], f"{store.uri}/{key}")


def pointers_of(store: ObjectStore) -> ReadPointer:
    """``read_pointer`` of that store, which reads each once: for one question about many models."""
    return cache(partial(read_pointer, store))


def dags_in(store: ObjectStore) -> list[str]:
    """Ids of the DAGs whose results are there, as the pointers' places say."""
    return dags_among(one.key for one in results_in(store))


def dags_among(keys: Iterable[str]) -> list[str]:
    """Ids of the DAGs whose pointers are among the keys of a place of results.

    A file that a rank has called so is none of them: it lies in a publication.
    """
    pointer = re.compile(rf"([^/]+)/(?:{LATEST}|{PRODUCTION})\.json")
    found = {match[1] for match in map(pointer.fullmatch, keys) if match}
    return sorted(name for name in found if not re.fullmatch(PUBLICATION, name))


def point(
    store: ObjectStore,
    dag_id: str,
    name: str,
    publication: str,
    metrics: Mapping[str, float],
    *,
    measurements: Sequence[Mapping[str, Any]] = (),
    made_of: Mapping[str, Any] | None = None,
    due: datetime | None = None,
    check: Callable[[Pointer], None] | None = None,
    by: str = "",
) -> Pointer:
    """Lets the pointer name a publication, if it may, and returns the pointer as it then is.

    To name again what was named before changes nothing: to go back there is ``rollback``. Nor does
    one overtake another whose run was due later, or bring back a model that somebody has gone back
    from, whatever is published with it: ``why_stays`` says so.

    Args:
        publication: its place in the store; begins with the training's id.
        metrics: of its model.
        measurements: what they were measured on, as ``Measurement.dump`` has them.
        made_of: dataset (fingerprint), code and manifest (digests) and parameters.
        due: when its run was; None: it may overtake any.
        check: is given the pointer as it is when it changes, and raises if it must stay.
        by: who.
    """

    _check_place(store, publication)
    models = _Models(store)

    def change(now: Pointer | None) -> Pointer | None:
        if now is not None:
            if _why_stays(models, dag_id, now, publication, due):
                return None
            models.note(now)
            if check is not None:
                check(now)
        facts = {
            "metrics": dict(metrics),
            "measurements": list(measurements),
            "made_of": dict(made_of or {}),
            "due": due and due.isoformat(),
        }
        event = {"event": "promoted" if name == PRODUCTION else "published", "by": by, "reason": ""}
        return _next(store, now, publication, facts, event)

    return _changed(store, _key(dag_id, name), change)


def why_stays(
    store: ObjectStore,
    dag_id: str,
    now: Pointer,
    publication: str,
    due: datetime | None = None,
) -> str:
    """Why a pointer goes on naming what it names, when something is published; empty: it does not.

    Args:
        store: of the results.
        dag_id: whose pointer.
        now: the pointer.
        publication: the other one's place in the store.
        due: when its run was; None: it may overtake any.
    """
    return _why_stays(_Models(store), dag_id, now, publication, due)


def _why_stays(
    models: _Models, dag_id: str, now: Pointer, publication: str, due: datetime | None
) -> str:
    store, new = models.store, {"publication": publication}
    if _same(now["publication"], publication):
        if now["publication"] == publication or _whole(store, now):
            return "that has the same content"
    else:
        known = (*now["before"], *now["history"])  # the history goes further back
        if gone := models.gone_back_from(now, new):
            named = "one before," if _same(gone, publication) else f"very model before, as {gone},"
            why = f"it named this {named} and somebody went back from it"
            place = shlex.quote(f"{store.uri}/{dag_id}")
            to = shlex.quote(publication)
            return f"{why}. `ddl-airflow promote {place} --to {to}` puts it there all the same"
        if any(_same(one["publication"], publication) for one in known):
            return "it named this one before"
        training_id = publication.partition("/")[0]
        its = [one for one in known if one["training_id"] == training_id]
        # The same model is its own successor, for example with another signature. And a training
        # that serves, and has this model once more, has been trained again.
        if its and now["training_id"] != training_id and not models.same(now, new):
            for one in its:
                if models.same(one, new):
                    return f"it named this very model before, as {one['publication']}"
    if due is not None and now["due"] and datetime.fromisoformat(now["due"]) > due:
        return f"the run of that was due later, {now['due']}"
    return ""


def rollback(
    store: ObjectStore,
    dag_id: str,
    to: str = "",
    *,
    by: str = "",
    reason: str = "",
    mark: str = "",
    instead_of: str = "",
) -> Pointer:
    """Lets production name the model before, and returns the pointer.

    Whatever else has the very model that is left counts as gone back from, too, for it may have
    been published again with another record.

    Args:
        to: another training or publication that was in production; empty: the newest with another
            model than what serves, that was not withdrawn by going back from it.
        by: who.
        reason: why.
        mark: of this decision: once it is in the history, nothing changes. Empty: one of its own.
        instead_of: the training or publication that serves, as whoever decides has seen it. Empty:
            whatever serves.

    Raises:
        NoSuchModel: there is none before, it was never in production, is the very model that
            serves, or is no longer whole; or another serves than ``instead_of``.
    """

    to = to.strip("/")
    models = _Models(store)

    def change(now: Pointer | None) -> Pointer:
        if now is None:
            raise NoSuchModel(
                f"{store.uri}/{dag_id}: no training of this DAG was ever in production."
            )
        _check_seen(store, dag_id, now, instead_of)
        known: list[Pointer] = now["before"]
        if to:
            # The history goes further back, and names what served without its facts.
            wanted = [
                one
                for one in (*known, *now["history"])
                if to in (one["training_id"], one["publication"])
                and one["publication"] != now["publication"]
            ]
        else:
            wanted = [one for one in known if not one["withdrawn"]]
        passed, one = models.first_other(now, wanted, by_itself=not to)
        if one is None and to in (now["training_id"], now["publication"]):
            raise NoSuchModel(f"{store.uri}/{dag_id}: {to} is in production now.")
        if one is None and to and passed:
            raise NoSuchModel(
                f"{store.uri}/{dag_id}: {to} holds {_SAME}, {now['publication']}: to go back there "
                "changes nothing. `ddl-airflow promote --to` lets production name it all the same."
            )
        if one is None:
            listed = ", ".join(other["publication"] for other in known) or "none"
            asked = f"{to} was not" if to else "no other training was"
            hint = " `ddl-airflow promote --to` puts any other into production." if to else ""
            said = "".join(f" {place} holds {why}." for place, why in passed.items())
            raise NoSuchModel(
                f"{store.uri}/{dag_id}: {asked} in production before. There is: {listed}.{said}"
                f"{hint}"
            )
        if not _whole(store, one):
            raise NoSuchModel(
                f"{store.uri}/{one['publication']} is no longer there, not as it was published, or "
                "archived. Choose another with --to."
            )
        if one in known:
            facts = {field: one[field] for field in one if field not in _NAMED}
        else:
            facts = _facts(json.loads(store.at(one["publication"]).read_bytes(LINEAGE)))
        # Those that are passed over are gone back from, too.
        at = known.index(one) if one in known else len(known)
        left = [now, *known[:at]]
        before = [*known[:at]]
        before += [
            other
            for other in known[at:]
            if other is not one and any(models.same(other, was) for was in left)
        ]
        withdrawn = [other["publication"] for other in (now, *before)]
        models.note(now)
        now = {
            **now,
            "before": [
                other | {"withdrawn": other["withdrawn"] or other["publication"] in withdrawn}
                for other in known
            ],
        }
        event: dict[str, Any] = {"event": _ROLLED_BACK, "by": by, "reason": reason}
        event["withdrawn"] = withdrawn
        if passed:
            event["passed_over"] = passed
        return _next(store, now, one["publication"], facts, event, withdraw=True)

    key = _key(dag_id, PRODUCTION)
    if to:  # it may be asked for again
        return _changed(store, key, change, mark)
    place = shlex.quote(f"{store.uri}/{dag_id}")
    look = f"Look what serves before you go back again: ddl-airflow production {place}"
    return _changed(store, key, change, mark, look)


def passed_over(pointer: Pointer) -> dict[str, str]:
    """What the last going back has passed over, and what that holds, by publication."""
    return dict(pointer["history"][0].get("passed_over", {}))


def promote(
    store: ObjectStore,
    dag_id: str,
    publication: str,
    *,
    by: str = "",
    reason: str = "",
    mark: str = "",
    instead_of: str = "",
) -> Pointer:
    """Lets production name what a person chose, whatever serves now; returns the pointer.

    Args:
        publication: its place in the store, or a training's id: of that the newest.
        by: who.
        reason: why.
        mark: of this decision: once it is in the history, nothing changes. Empty: one of its own.
        instead_of: the training or publication that serves, as whoever decides has seen it. Empty:
            whatever serves.

    Raises:
        NoSuchModel: nothing whole was published there, or that is no such place; or another serves
            than ``instead_of``.
        ObjectArchived: of a training, which publication is the newest is in an archive.
    """
    publication = publication.strip("/")
    if not re.fullmatch(rf"[^/]+(/{PUBLICATION})?", publication):
        raise NoSuchModel(
            f"{publication!r} is neither a training's id nor, with the name of a publication after "
            f"it, a place in {store.uri}. `ddl-airflow lineage list` has these places."
        )
    if "/" not in publication:
        publication = _newest_of(store, publication)
    publication = own_name(store, publication)
    if gone := missing_from(store.at(publication)):
        raise NoSuchModel(
            f"{store.uri}/{publication} is not there, or not as it was published: {gone[0]} is "
            "missing, changed or archived."
        )
    record = json.loads(store.at(publication).read_bytes(LINEAGE))
    if record["run"]["dag_id"] != dag_id:
        raise NoSuchModel(
            f"{store.uri}/{publication} is a model of {record['run']['dag_id']}, not of {dag_id}."
        )
    facts = _facts(record)
    event = {"event": "promoted", "by": by, "reason": reason}

    def change(now: Pointer | None) -> Pointer | None:
        if now is not None and now["publication"] == publication:
            return None
        _check_seen(store, dag_id, now, instead_of)
        return _next(store, now, publication, facts, event)

    return _changed(store, _key(dag_id, PRODUCTION), change, mark)


def _newest_of(store: ObjectStore, training_id: str) -> str:
    """The place of a training's newest publication; the training's where there is none in it.

    Raises:
        ObjectArchived: which is the newest, a marker in an archive would say.
    """
    listed: list[StoredObject] = []
    with suppress(SourceMissing):
        listed = store.at(training_id).list()
    for one in listed:
        name, _, key = one.key.partition("/")
        if one.archived and key == SUCCESS and re.fullmatch(PUBLICATION, name):
            raise ObjectArchived(
                f"{store.uri}/{training_id}/{one.key} is {why_archived(one.archived)}. So nobody "
                f"can tell which publication of {training_id} is the newest: say which one, "
                f"{training_id}/<name>."
            )
    there = publications(store.at(training_id), listed)
    return f"{training_id}/{next(iter(there))}" if there else training_id


def _check_seen(store: ObjectStore, dag_id: str, now: Pointer | None, instead_of: str) -> None:
    """Raises NoSuchModel if another serves than whoever decided has seen."""
    serves = ("nothing",) if now is None else (now["publication"], now["training_id"])
    if instead_of and instead_of.strip("/") not in serves:
        raise NoSuchModel(
            f"{store.uri}/{dag_id}: {serves[0]} is in production now, not {instead_of}: it has "
            "changed since this was decided. Look at what serves, and decide again."
        )


def made_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a model was made of, of its lineage record: equal for a training that is no news."""
    return {
        "dataset": record["dataset"]["fingerprint"],
        "code": record["code"]["digest"],
        "manifest": record["manifest"]["digest"],
        "parameters": record["run"]["parameters"],
    }


def is_no_news(
    made_of: Mapping[str, Any],
    known: Mapping[str, Any],
    defaults: Mapping[str, Any],
    earlier_digests: Collection[str] = (),
) -> bool:
    """Whether what something is made of makes the model again that is known.

    Args:
        made_of: of today, as ``made_of`` gives it.
        known: of the model; perhaps an earlier version of ours wrote it.
        defaults: settings of a run, by name, as they are where it has none of that name: which ones
            it has depends on the manifest, and on whether Airflow ran it.
        earlier_digests: the manifest's, as earlier versions of ours made them.
    """
    known = in_digests_of(made_of, earlier_digests, known)
    return _of_the_model(known, defaults) == _of_the_model(made_of, defaults)


def _of_the_model(made_of: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    values = {**defaults, **made_of.get("parameters", {})}
    if values.get("experiment_id") == "":  # so versions of ours wrote that it has none
        del values["experiment_id"]
    told = {
        name: value
        for name, value in values.items()
        if name not in _OF_NO_MODEL and value is not None
    }
    return {**made_of, "parameters": told}


def _facts(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a pointer says of a model, of its lineage record."""
    return {
        "metrics": record["result"]["metrics"],
        "measurements": record["result"].get("measurements", []),
        "made_of": made_of(record),
        "due": record["run"].get("due"),
    }


def serving(pointer: Pointer | None, metric: str) -> list[Measurement]:
    """What is known of the model in production, of one metric, by each source; the newest last."""
    if pointer is None or metric not in pointer["metrics"]:
        return []
    told = [Measurement.load(one) for one in pointer["measurements"] if one["metric"] == metric]
    return told or [Measurement(metric, pointer["metrics"][metric])]


def check_not_worse(one: Measurement | None, pointer: Pointer | None, *, small: bool) -> str:
    """Raises QualityTooLow if a model is worse than the one in production.

    Args:
        one: what decides, of the model; None: nobody has measured it.
        pointer: to production; None, or without the metric: nothing to compare with.
        small: whether less of it is better.

    Returns:
        Why the two are not compared, for people; empty if they are, or there is nothing.
    """
    known = [] if one is None else serving(pointer, one.metric)
    if one is None or pointer is None or not known:
        return ""
    like = [other for other in known if one.like(other)]
    if not like:
        return (
            f"{one.metric} is not compared with that of the model in production: here it is of "
            f"{one.measured_on}, there of {known[-1].measured_on}."
        )
    value, serves = one.value, like[-1].value
    if (value > serves) if small else (value < serves):
        raise QualityTooLow(
            f"{one.metric} is {value:.4g}, {abs(value - serves):.4g} worse than the {serves:.4g} "
            f"of the model in production, {pointer['training_id']}."
        )
    return ""


def reject(
    store: ObjectStore, dag_id: str, training_id: str, made_of: Mapping[str, Any], why: str
) -> None:
    """Remembers that what was made of this is not wanted, in ``<results>/<dag id>/rejected.json``.

    Args:
        training_id: which one it was.
        made_of: as ``made_of`` gives it.
        why: for people.
    """
    at = datetime.now(UTC).isoformat(timespec="seconds")
    one = {"training_id": training_id, "made_of": dict(made_of), "why": why, "at": at}

    def change(now: Any) -> Any:
        known = now["rejected"] if now else []
        others = [other for other in known if other["made_of"] != one["made_of"]]
        return {"rejected": [one, *others][:_EVENTS]}

    _replaced(store, _key(dag_id, _REJECTED), change)


def rejected(
    store: ObjectStore,
    dag_id: str,
    made_of: Mapping[str, Any],
    defaults: Mapping[str, Any],
    earlier_digests: Collection[str] = (),
) -> str:
    """Which model of this was rejected, and why; empty if none was.

    Args:
        made_of, defaults, earlier_digests: as ``is_no_news`` has them.
    """
    found = _read(store, _key(dag_id, _REJECTED))
    known = found[0]["rejected"] if found else []
    said = (
        f"{one['training_id']}, {one['why']}"
        for one in known
        if is_no_news(made_of, one["made_of"], defaults, earlier_digests)
    )
    return next(said, "")


def _changed(
    store: ObjectStore,
    key: str,
    change: Callable[[Pointer | None], Pointer | None],
    mark: str = "",
    look: str = "",
) -> Pointer:
    """Replaces a pointer by what ``change`` makes of it, and returns what is there then.

    ``change`` is called again when somebody else was faster; None of it leaves all as it is. So
    does a mark that is in the history: only the answer to that write was lost, or the writer was.
    ``look`` is said with an error after which it may have been replaced: what to do then, where the
    same change once more would be another one.
    """
    mark, place = mark or uuid.uuid4().hex, f"{store.uri}/{key}"
    pointer, may_be_there = None, False

    def marked(body: Any) -> Pointer | None:
        nonlocal may_be_there
        now = None if body is None else _upgraded(body, place)
        if now is not None and any(event.get("id") == mark for event in now["history"]):
            return None
        may_be_there = False
        new = change(now)
        if new is not None:
            new["history"][0]["id"] = mark
            may_be_there = True  # from here on
        return new

    try:
        pointer = _upgraded(_replaced(store, key, marked), place)
        # It was whole when it was looked at; cleaning may have begun with it since.
        restore(store.at(pointer["publication"]))
    except StagingError as error:
        if not (look and may_be_there):
            raise
        changed = "may have changed" if pointer is None else "has changed"
        said = f"{error} Production {changed} all the same. {look}"
        raise type(error)(said, retryable=error.retryable) from error
    return pointer


def _read(store: ObjectStore, key: str) -> tuple[dict[str, Any], str] | None:
    """A JSON object and its version; None if there is none."""
    found = store.read_version(key)
    if found is None:
        return None
    try:
        body = json.loads(found[0])
        if not isinstance(body, dict):
            raise ValueError(f"a JSON object is expected, not a {type(body).__name__}")
    except ValueError as error:
        raise StagingError(_damaged(f"{store.uri}/{key}", error), retryable=False) from error
    return body, found[1]


def _damaged(place: str, why: object) -> str:
    return (
        f"{place} is damaged: {why}. Put an earlier version of it back; or delete "
        "it: the next upload writes another, without what this one knew of earlier ones."
    )


def _replaced(store: ObjectStore, key: str, change: Callable[[Any], Any]) -> Any:
    """Replaces a JSON object, in one order with all others who do, and returns what is there."""
    deadline, pause_s = time.monotonic() + _PATIENCE_S, 0.01
    while True:
        now, version = _read(store, key) or (None, None)
        new = change(now)
        if new is None:
            return now
        if store.put_if(key, (json.dumps(new, indent=2, sort_keys=True) + "\n").encode(), version):
            return new
        if time.monotonic() > deadline:
            raise StagingError(
                f"{store.uri}/{key}: others have changed it all the time for {_PATIENCE_S:.0f} s. "
                "See who does."
            )
        time.sleep(random.uniform(0, pause_s))  # noqa: S311
        pause_s = min(2 * pause_s, 0.5)


def _next(
    store: ObjectStore,
    now: Pointer | None,
    publication: str,
    facts: Mapping[str, Any],
    event: Mapping[str, Any],
    *,
    withdraw: bool = False,
) -> Pointer:
    _check_place(store, publication)
    training_id = publication.partition("/")[0]
    before = [] if now is None else [_entry(now, withdraw), *now["before"]]
    history = [] if now is None else now["history"]
    at = datetime.now(UTC).isoformat(timespec="seconds")
    number = history[0]["number"] + 1 if history else 1
    named = {"publication": publication, "training_id": training_id}
    digest = facts.get("digest") or _digest_at(store, publication)
    known = {"digest": digest} if digest else {}
    return {
        "schema": SCHEMA,
        **named,
        "model": f"{store.uri}/{publication}/model",
        **facts,
        "digest": digest,
        "set": at,
        "before": [one for one in before if one["publication"] != publication][:_KEPT],
        "history": [{"number": number, "at": at, **named, **known, **event}, *history][:_EVENTS],
    }


def _upgraded(pointer: Pointer, place: str) -> Pointer:
    """A pointer as it is written now; one of before has what can be told of it.

    Raises:
        NoPointer: it is none.
        StagingError: it is damaged.
    """
    if pointer.get("schema") != SCHEMA and not pointer.keys() >= _OLDEST:
        raise NoPointer(place)
    try:
        for one in (pointer, *pointer["before"]):
            one.setdefault("publication", one["training_id"])
            one |= {"due": None, "measurements": [], "made_of": {}, "set": "", "digest": ""} | one
        if "history" not in pointer:
            known = (pointer, *pointer["before"])
            pointer["history"] = [
                {
                    **{"number": len(known) - index, "event": "promoted", "at": one["set"]},
                    **{"publication": one["publication"], "training_id": one["training_id"]},
                    **{"by": "", "reason": ""},
                }
                for index, one in enumerate(known)
            ]
        _check(pointer)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise StagingError(_damaged(place, why), retryable=False) from error
    return pointer


def _check(pointer: Pointer) -> None:
    """Raises what the lack of a field, or another type, does; and takes away slashes that earlier
    versions of ours left at the end of places.
    """
    for one in (pointer, *pointer["before"]):
        one["model"] = re.sub("/+model$", "/model", one["model"])
        for field, kind in {"metrics": dict, "made_of": dict, "measurements": list}.items():
            if not isinstance(one[field], kind):
                raise TypeError(f"{field} is no {kind.__name__}")
        if one["due"] is not None:
            datetime.fromisoformat(one["due"])
        _ = one is pointer or one["withdrawn"]
    for one in (pointer, *pointer["before"], *pointer["history"]):
        one["publication"] = one["publication"].strip("/")
        if not isinstance(one["training_id"], str) or not isinstance(one.get("digest", ""), str):
            raise TypeError("a training_id or digest is no text")
    for event in pointer["history"]:
        if not all(isinstance(one, str) for one in event.get("withdrawn", ())):
            raise TypeError("what somebody went back from is no list of publications")
        dict(event.get("passed_over", {}))
    if not all(isinstance(event["number"], int) for event in pointer["history"]):
        raise TypeError("a number of the history is none")


def _check_place(store: ObjectStore, publication: str) -> None:
    if not re.fullmatch(_PLACE, publication):
        raise NoSuchModel(f"{publication!r} is no place of a publication in {store.uri}.")


def _same(one: str, other: str) -> bool:
    """Whether two publications are of the same training, with the same content: the record, too."""
    trainings_and_contents = [
        (training, name.partition("-")[0])
        for training, _, name in (one.partition("/"), other.partition("/"))
    ]
    return trainings_and_contents[0] == trainings_and_contents[1]


class _Models:
    """Which models are the same, byte for byte, whatever was published with them.

    What is compared has a ``publication``, and may have the ``digest`` of its model; else that is
    made of the publication's marker.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._read: dict[str, str] = {}

    def note(self, pointer: Pointer) -> None:
        """Adds the digests that were read to a pointer, to be written with it: earlier versions of
        ours left them out, and each upload would read hundreds of markers.
        """
        for one in (pointer, *pointer["before"], *pointer["history"]):
            if not one.get("digest") and (digest := self._read.get(one["publication"])):
                one["digest"] = digest

    def same(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Whether two have the same model. What nobody knows the digest of any more: by name."""
        if _same(one["publication"], other["publication"]):
            return True
        digest = self._of(one)
        return bool(digest) and digest == self._of(other)

    def first_other(
        self, now: Pointer, wanted: Iterable[Pointer], *, by_itself: bool
    ) -> tuple[dict[str, str], Pointer | None]:
        """The first with another model than the one that serves; and what is passed over, with why.

        Where what serves is damaged, one that a person has named may have the same model.

        Args:
            now: the pointer.
            wanted: what may be chosen, the newest first.
            by_itself: whether nobody has named it: then it is none that somebody went back from.
        """
        passed = {}
        for one in wanted:
            if self.same(one, now) and (by_itself or _whole(self.store, now)):
                passed[one["publication"]] = _SAME
            elif by_itself and (gone := self.gone_back_from(now, one)):
                passed[one["publication"]] = f"the very model of {gone}, {_GONE_BACK_FROM}"
            else:
                return passed, one
        return passed, None

    def gone_back_from(self, now: Pointer, one: Mapping[str, Any]) -> str:
        """As which publication a model served the last time, if somebody went back from it then;
        else empty.
        """
        gone = {other["publication"] for other in now["before"] if other["withdrawn"]}
        newer: Mapping[str, Any] = {}
        seen: dict[str, Mapping[str, Any]] = {}  # the last time that each served
        for event in now["history"]:
            served = str(event["publication"])
            if newer.get("event") == _ROLLED_BACK and served not in seen:
                gone.add(served)
            # Of a thousand events of earlier versions of ours not each is worth reading a marker.
            may_matter = served in gone or "digest" in event
            if _same(served, one["publication"]) or (may_matter and self.same(event, one)):
                if served not in gone:
                    return ""
                # As one of another name it may have served again since.
                later = (other for other in seen.values() if "digest" not in other)
                return "" if any(self.same(other, one) for other in later) else served
            seen.setdefault(served, event)
            gone.update(place for place in event.get("withdrawn", ()) if place not in seen)
            newer = event
        for other in now["before"]:  # the history is that of a pointer of before there was one
            if other["withdrawn"] and self.same(other, one):
                return str(other["publication"])
        return ""

    def _of(self, one: Mapping[str, Any]) -> str:
        place = one["publication"]
        if not one.get("digest") and place not in self._read:
            self._read[place] = _digest_at(self.store, place)
        return str(one.get("digest") or self._read[place])


def _digest_at(store: ObjectStore, publication: str) -> str:
    """Of the model in a publication, as the marker lists its files; empty: nobody knows."""
    # What was archived, or is not for us to read, keeps nobody from publishing another: nor does a
    # place that none can have, of a pointer that somebody wrote.
    with suppress(OSError, *DAMAGED):
        try:
            place = store.at(publication)
            marker = marker_of(place) or marker_of(place, RETIRED)
        except StagingError as error:
            if error.retryable:
                raise
            return ""
        if any(file["key"].startswith("model/") for file in marker["files"]):
            return model_digest({"result": marker})
    return ""


def _whole(store: ObjectStore, one: Pointer) -> bool:
    return not missing_from(store.at(one["publication"]))


def _key(dag_id: str, name: str) -> str:
    return f"{dag_id}/{name}.json"


def _entry(pointer: Mapping[str, Any], withdrawn: bool) -> Pointer:
    told = {field: pointer[field] for field in pointer if field not in _OF_POINTER}
    return told | {"withdrawn": withdrawn}
