"""All publications of a place of results in one file, for questions about many of them.

``<results>/_lineage/index.json.gz`` has a summary of each. An upload puts its own beside it, as
``_lineage/new/<publication>.json``, and now and then merges what has gathered there. The records
alone count (``lineage.json``): where the index is missing or damaged it is made of them again. A
record that cannot be read then is noted as that, and read again by each question until it can.

Before it publishes, an upload notes there that it begins. Of one that was killed before it came to
the index the note stays: who reads looks what there is of that training, and so does its next
upload, which takes the note away.

Who reads looks at ``new/`` first and at the index after that; who merges, an upload or a question,
writes the index first and removes from ``new/`` after that. So no reader misses one that others
merge meanwhile.

What is there no more stays in an index of which a question finds that it lacks something: to
``lost`` that alone tells of it. Only who asks for another index gets one of the records alone.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ddl_airflow.core.errors import (
    DAMAGED,
    AccessDenied,
    ObjectArchived,
    SourceMissing,
    StagingError,
)
from ddl_airflow.core.layout import OWN_EXPERIMENT
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    NoPointer,
    Pointer,
    ReadPointer,
    dags_among,
    pointers_of,
)
from ddl_airflow.lineage.record import IS_WHOLE, LINEAGE
from ddl_airflow.storage.publication import (
    PUBLICATION,
    marker_of,
    own_name,
    published_at,
    results_in,
)
from ddl_airflow.storage.store import RETIRED, SUCCESS, ObjectStore, check_keys, why_archived_at

SCHEMA = "ddl-airflow/index/1"
FOLDER = "_lineage"
_INDEX = f"{FOLDER}/index.json.gz"
_NEW = f"{FOLDER}/new"
_BEGUN = "-begun.json"
_BEGUN_S = 7 * 86400.0  # after which an upload that has not ended is none any more
_MERGED_AT = 50  # new ones, which cost a reader a request each
_READERS = 16
# Of a larger index it is not asked which trainings it lacks: to name 10,000 takes Ceph a second.
_MOST_COMPARED = 2_000
# Early models lie in their training's folder itself; a publication in the one that is asked about
# is none of them.
_EARLY = r"(?![0-9a-f]{16}-[0-9a-f]{8}/)[^/]+-[0-9a-f]{8}(?:[0-9a-f]{24})?"
_MARKER = re.compile(rf"([^/]+/{PUBLICATION}|{_EARLY})/(?:{SUCCESS}|{RETIRED})")

# What the index says of one publication; ``summary`` makes it. Of one whose record cannot be read
# that is its place, and ``unread``, why.
Summary = dict[str, Any]
# A training and its data: one that is cleared may train on others.
Trained = tuple[str, str, str, str]
# In a summary by an earlier version of ours, which has no ``experiment``, of a publication whose
# record has been lost since.
_LOST = "experiment_is_lost"
_ARCHIVED = f"its {LINEAGE} is archived"
# Called with the place of what is not known, and why.
_Unread = Callable[[str, str], object]


@dataclass(frozen=True)
class Lost:
    """What is known of a place of results and not there.

    Attributes:
        known: how many publications are known.
        gone: of those that are not there the place in the store, and who knows of it.
        notes: what was not looked at, and why.
        unread: why the record of a publication cannot be read, by its place, where the index could
            not be made of it; and why what the index is in, or a pointer, cannot.
    """

    known: int
    gone: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)
    unread: dict[str, str] = field(default_factory=dict)


def summary(record: Mapping[str, Any], publication: str, published: str) -> Summary:
    """What the index keeps of a record.

    Args:
        record: of the publication.
        publication: its place in the store.
        published: when; ISO 8601, in UTC.

    Raises:
        LookupError, TypeError: it is no record.
    """
    run, dataset, code, result = (record[name] for name in ("run", "dataset", "code", "result"))
    environment = record.get("environment", {})
    data = ["uri", "fingerprint", "files", "bytes"] + ["resolved_uri"] * ("resolved_uri" in dataset)
    in_own = run.get("experiment") in (None, record["training_id"])
    others = [_other(one) for one in result.get("went_on_from", ()) if "training_id" in one]
    return {
        "publication": publication,
        "published": published,
        "training_id": record["training_id"],
        "dag_id": run["dag_id"],
        "run_id": run["run_id"],
        "triggered_by": run["triggered_by"],
        "manifest": {name: record["manifest"].get(name) for name in ("name", "digest")},
        "dataset": {name: dataset[name] for name in data},
        "code": {name: code.get(name) for name in ("digest", "git_commit")},
        "parameters": run["parameters"],
        "metrics": result["metrics"],
        "held_s": result.get("goodput", {}).get("held_s"),
        "launcher": environment.get("launcher"),
        "world_size": environment.get("world_size"),
        "experiment": None if in_own else run["experiment"],
        **({"went_on_from": others} if others else {}),
        **{name: result[name] for name in (IS_WHOLE,) if name in result},
    }


def _other(training: Mapping[str, Any]) -> dict[str, Any]:
    """Which data a training read that was in the experiment before."""
    told = {name: training[name] for name in ("uri", "resolved_uri") if name in training}
    told["fingerprint"] = training["dataset"]
    return {"training_id": training["training_id"], "dataset": told}


def trained(one: Mapping[str, Any]) -> Trained:
    """Which training, and on what: of a summary, or of what one went on from."""
    data, training_id = one["dataset"], one["training_id"]
    return training_id, data.get("uri", ""), data.get("resolved_uri", ""), data["fingerprint"]


def tells_experiment(one: Summary) -> bool:
    """Whether a summary says whether the training was in an experiment with a name."""
    return "experiment" in one and _LOST not in one


def begin(store: ObjectStore, training_id: str) -> None:
    """Notes that something of a training is about to be published; ``add`` takes the note away.

    Raises:
        StagingError: as ``ObjectStore`` does.
    """
    body = json.dumps({"begun": training_id, "at": time.time()})
    store.put_bytes(begun_key(training_id), body.encode())


def begun_key(training_id: str) -> str:
    """Where ``begin`` puts its note."""
    return f"{_NEW}/{hashlib.sha256(training_id.encode()).hexdigest()}{_BEGUN}"


def add(store: ObjectStore, record: Mapping[str, Any], publication: str) -> None:
    """Puts a publication into the index, and merges what has gathered, if that is much.

    Raises:
        StagingError: as ``ObjectStore`` does.
    """
    if not store.exists(_place(publication)):  # put by an earlier try
        at = datetime.now(UTC).isoformat(timespec="seconds")
        _put(store, summary(record, publication, at))
    training_id = publication.partition("/")[0]
    # An earlier upload may have died before it came here, and the note is the same for both.
    for name, marked in _marked(store, training_id).items():
        if not store.exists(_place(name)) and (one := _of_record(store, name, marked)) is not None:
            _put(store, one)
    # All is known from here on: who may not delete leaves the rest to a question that may.
    with suppress(AccessDenied):
        store.delete([begun_key(training_id)])
    # Without an index nothing is merged: only the records tell what was published before.
    listed = _listed(store)
    if len(listed) >= _MERGED_AT and (found := _read_index(store)) is not None:
        new = _read_new(store, listed, _pass_over)
        merged = _with(found[0], new.values())
        with suppress(AccessDenied):
            if merged == found[0]:
                store.at(_NEW).delete(new)
            else:
                _write(store, merged, found[1], new)


def mark_removed(store: ObjectStore, publication: str) -> None:
    """Notes that a publication is removed, before its record is; the index goes on knowing of it.

    Raises:
        StagingError: as ``ObjectStore`` does.
    """
    at = datetime.now(UTC).isoformat(timespec="seconds")
    place, known = store.at(publication), None
    # What an upload that was killed has left never was a publication.
    if place.exists(SUCCESS) or place.exists(RETIRED):
        # The index need not know of it, and from now on nothing else does.
        known = _of_record(store, publication, time.time())
    body = json.dumps((known or {"publication": publication}) | {"removed": at})
    store.put_bytes(_place(publication, "-removed"), body.encode())


def read_index(
    store: ObjectStore,
    *,
    rebuild: bool = False,
    progress: Callable[[int, int], None] | None = None,
    pointer: ReadPointer | None = None,
    unread: _Unread | None = None,
    experiments: bool = False,
) -> list[Summary]:
    """Summaries of all publications, the newest first; of removed ones too, with ``removed``.

    Args:
        store: of the results.
        rebuild: to make the index of the records again.
        progress: is called with how many records were read, and of how many.
        pointer: of that store, if more is asked of its pointers.
        unread: is called with each publication of which nothing is known because its record cannot
            be read, and why it cannot; and with each file in ``FOLDER`` of which that is so.
        experiments: whether it is asked who trained in which: an earlier version of ours did not
            say it, so that the records are read.

    Raises:
        StagingError: as ``ObjectStore`` does. An index that cannot be written is none.
    """
    say = unread or _pass_over
    locked = False

    def lock(place: str, why: str) -> None:
        nonlocal locked
        locked = True
        say(place, why)

    listed = _listed(store)
    new = _read_new(store, listed, say)
    found = _read_index(store, lock)
    gone: set[str] = set()
    pointer = pointer or pointers_of(store)
    if found is None or rebuild:
        # As it is before the records are read: others may merge meanwhile, and that is to stay.
        before = None if locked else store.read_version(_INDEX)
        known = _of_records(store, progress)
        if found is not None:  # which alone knows what is there no more
            known |= {
                name: one
                for name, one in found[0].items()
                if "removed" in one or _is_archived(known.get(name, {}))
            }
        # Where nothing was published who asks may have slipped: it is data, or a publication.
        # One that cannot be read stays: it alone knows what was removed.
        if not locked and (known or new or found is not None):
            with suppress(StagingError):  # it may be another's to write there
                _write(store, _with(known, new.values()), before and before[1], new)
    else:
        known = _by_own_names(store, found[0])
        names: list[str] = []
        if len(known) <= _MOST_COMPARED:
            with suppress(StagingError):  # who asks may not list them
                names = store.names()
        so_far = _with(known, new.values())
        restored, gone = _looked_at_again(store, so_far)
        missed = _missed(store, so_far, names)
        if _misses_named(store, so_far, pointer):
            there = _of_records(store, progress)
            missed |= {name: there[name] for name in there.keys() - so_far.keys()}
        missed |= restored
        if experiments:
            missed |= _completed(store, so_far, progress)
        if missed or known != found[0] or len(new) >= _MERGED_AT:
            known = known | missed
            merged = _with(known, new.values())
            with suppress(StagingError):
                if merged == found[0]:  # who asked before may write the index, and not delete these
                    store.at(_NEW).delete(new)
                else:
                    _write(store, merged, found[1], new)
    together = _with(known, new.values())
    together |= _begun(store, together, listed, say)
    if unread is not None:
        for name, why in sorted(_unread(together).items()):
            if name not in gone:
                unread(name, why)
    # What is only known to be gone was published before there was an index.
    whole = (one for one in together.values() if "published" in one)
    return sorted(whole, key=lambda one: (one["published"], one["publication"]), reverse=True)


def lost(store: ObjectStore, training_id: str = "", dag_ids: Iterable[str] = ()) -> Lost:
    """Which publications are known, and are not there as a whole.

    The index knows of all that it does not say were removed, the pointers of those that they name.
    What is known to neither, nobody misses. Nothing is written, and no record is read but those of
    which the index could not be made.

    Args:
        store: of the results.
        training_id: to look for what is of that training alone.
        dag_ids: whose pointers are asked, beside those of all that the index knows of.

    Raises:
        StagingError: as ``ObjectStore`` does; a pointer is damaged.
    """
    unread: dict[str, str] = {}
    new = _read_new(store, _listed(store), unread.__setitem__)
    found = _read_index(store, unread.__setitem__)
    index = _with(found[0] if found else {}, new.values())
    asked = {*dag_ids, *(one["dag_id"] for one in index.values() if "dag_id" in one)}
    pointer, notes = pointers_of(store), []
    keys = [] if training_id else [obj.key for obj in results_in(store)]
    for dag_id in dags_among(keys):
        try:
            _named(pointer, [dag_id], _pass_over)
            asked.add(dag_id)
        except NoPointer as error:
            notes.append(error.passed_over(dag_id, keys))
    knows = _named(pointer, asked, unread.__setitem__)
    for name, one in index.items():
        if "removed" not in one:
            knows.setdefault(name, []).append("the index")
    prefix = f"{training_id}/" if training_id else ""
    # After the pointers: what they name was there before they named it.
    found_there = store.at(training_id).list() if prefix else results_in(store)
    listed = (prefix + obj.key for obj in found_there)
    there = {key.rpartition("/")[0] for key in listed if key.endswith((SUCCESS, RETIRED, LINEAGE))}
    of_it = {name: who for name, who in sorted(knows.items()) if name.startswith(prefix)}
    gone = {
        name: who
        for name, who in of_it.items()
        if name not in there and own_name(store, name) not in there
    }
    present = {name: index[name] for name in of_it if name in index and name not in gone}
    unread |= _unread(present | _looked_at_again(store, present)[0])
    return Lost(len(of_it), gone, notes, unread)


def lost_of(
    store: ObjectStore, dag_ids: Iterable[str], pointer: ReadPointer, unread: _Unread
) -> dict[str, list[str]]:
    """Which publications the pointers of DAGs name that are not there: by place, what names them.

    ``unread`` is called with each pointer that cannot be read, and why.

    Raises:
        StagingError: as ``lost``.
    """
    named = _named(pointer, dag_ids, unread)

    def is_gone(name: str) -> bool:
        # To read a small object takes less of a processor than to list it.
        marks = (f"{name}/{key}" for key in (SUCCESS, RETIRED, LINEAGE))
        return all(store.read_version(mark) is None for mark in marks)

    with ThreadPoolExecutor(_READERS) as pool:
        gone = list(pool.map(is_gone, named))
    return {name: who for (name, who), away in zip(named.items(), gone, strict=True) if away}


def _named(pointer: ReadPointer, dag_ids: Iterable[str], unread: _Unread) -> dict[str, list[str]]:
    """The publications that pointers name now, and which do; without pointers that are unread."""
    pointers = [(dag_id, name) for dag_id in sorted(dag_ids) for name in (LATEST, PRODUCTION)]
    named: dict[str, list[str]] = {}

    def look(one: tuple[str, str]) -> Pointer | None:
        try:
            return pointer(*one)
        except (AccessDenied, ObjectArchived) as error:
            key = f"{one[0]}/{one[1]}.json"
            unread(key, _why(key, error))
            return None

    with ThreadPoolExecutor(_READERS) as pool:
        read = pool.map(look, pointers)
        for (dag_id, name), said in zip(pointers, read, strict=True):
            if said is not None:
                named.setdefault(said["publication"], []).append(f"{dag_id}/{name}.json")
    return named


def _with(known: Mapping[str, Summary], new: Iterable[Summary]) -> dict[str, Summary]:
    together = dict(known)

    def age(one: Summary) -> tuple[str, int]:
        return one.get("published", ""), len(one.get("went_on_from", ()))

    for one in sorted(new, key=age):  # what is before says what those after it need not
        name = one["publication"]
        together[name] = one | together.get(name, {})  # when it was published first
        if "published" in together[name]:  # its record could be read at some time
            together[name].pop("unread", None)
    return together


def _unread(known: Mapping[str, Summary]) -> dict[str, str]:
    """Why records cannot be read, by publication; what was removed needs none any more."""
    return {
        name: one["unread"]
        for name, one in known.items()
        if "unread" in one and "removed" not in one
    }


def _looked_at_again(
    store: ObjectStore, known: Mapping[str, Summary]
) -> tuple[dict[str, Summary], set[str]]:
    """Of what has a record that could not be read: the summaries of those that now can, and which
    are not there any more.
    """
    found, gone = {}, set()
    for name in _unread(known):
        with suppress(StagingError):  # it stays as it is known
            marked = _marked(store, name.partition("/")[0])
            one = _of_record(store, name, marked[name]) if name in marked else None
            if one is None:
                gone.add(name)
            elif "unread" not in one:
                found[name] = one
    return found, gone


def _completed(
    store: ObjectStore, known: Mapping[str, Summary], progress: Callable[[int, int], None] | None
) -> dict[str, Summary]:
    """What an earlier version of ours has summarized, without the experiment, as it is now; of what
    has no record that can be read any more, that this is lost.
    """
    lacking = [
        name
        for name, one in known.items()
        if "published" in one and "experiment" not in one and "removed" not in one
    ]

    def look(name: str) -> Summary | None:
        with suppress(StagingError):  # it stays as it is known
            one = _of_record(store, name, 0.0)
            return one if one and "published" in one else {"experiment": None, _LOST: True}
        return None

    completed = {}
    with ThreadPoolExecutor(_READERS) as pool:
        found = pool.map(look, lacking)
        for number, (name, one) in enumerate(zip(lacking, found, strict=True), 1):
            if one is not None:
                completed[name] = one | known[name]
            if progress is not None:
                progress(number, len(lacking))
    return completed


def _by_own_names(store: ObjectStore, known: dict[str, Summary]) -> dict[str, Summary]:
    """The same, without what an earlier version of ours has counted by a person's link as well."""
    folders = {name.partition("/")[0] for name, one in known.items() if "removed" not in one}
    links = {
        name
        for name in folders
        if not re.fullmatch(OWN_EXPERIMENT, name) and own_name(store, name) != name
    }
    own = {name: one for name, one in known.items() if name.partition("/")[0] not in links}
    for name in known.keys() - own.keys():
        its = own_name(store, name)
        # The link may lead elsewhere by now, where there never was such a publication.
        if its not in own and any(store.exists(f"{its}/{mark}") for mark in (SUCCESS, RETIRED)):
            own[its] = known[name] | {"publication": its}
    return own


def _misses_named(store: ObjectStore, known: Mapping[str, Summary], pointer: ReadPointer) -> bool:
    """Whether a DAG's newest publication, or the one in production, is there and not known: uploads
    could not write here.
    """

    def is_missed(asked: tuple[str, str]) -> bool:
        # Who asks for production hears of a damaged pointer.
        with suppress(StagingError, *DAMAGED):
            said = pointer(*asked)
            if said is not None:
                name = own_name(store, said["publication"])
                # What is at no place of a publication would not be found.
                if {name, said["publication"]}.isdisjoint(known) and _MARKER.fullmatch(
                    f"{name}/{SUCCESS}"
                ):
                    return _of_record(store, name, 0.0) is not None
        return False

    dag_ids = {one["dag_id"] for one in known.values() if "dag_id" in one}
    pointers = [(dag_id, name) for dag_id in dag_ids for name in (LATEST, PRODUCTION)]
    with ThreadPoolExecutor(_READERS) as pool:
        return any(list(pool.map(is_missed, pointers)))


def _missed(
    store: ObjectStore, known: Mapping[str, Summary], names: Iterable[str]
) -> dict[str, Summary]:
    """What trainings have published of which nothing is known: their uploads could not write here,
    whatever others of the DAG can.

    Args:
        store: of the results.
        known: what is, by publication.
        names: of what lies in the results, among which are the trainings'.
    """
    trainings = {publication.partition("/")[0] for publication in known}
    unknown = [
        name
        for name in names
        if name not in trainings
        and re.fullmatch(OWN_EXPERIMENT, name)
        and own_name(store, name) == name
    ]

    def look(training_id: str) -> list[Summary | None]:
        try:
            there = _marked(store, training_id)
        except StagingError:  # it stays unknown, so it is looked at again
            return []
        return [_of_record(store, publication, marked) for publication, marked in there.items()]

    with ThreadPoolExecutor(_READERS) as pool:
        found = [one for every in pool.map(look, unknown) for one in every if one is not None]
    return {one["publication"]: one for one in found}


def _begun(
    store: ObjectStore, known: Mapping[str, Summary], listed: Iterable[str], unread: _Unread
) -> dict[str, Summary]:
    """What uploads that have not ended, or never will, have published; and puts it into the index.

    Notes of long ago are taken away. ``unread`` is called with those that cannot be read.
    """
    found: dict[str, Summary] = {}
    place = store.at(_NEW)
    for key in (key for key in listed if key.endswith(_BEGUN)):
        try:
            note = json.loads(place.read_bytes(key))
            training_id, at = str(note["begun"]), float(note["at"])
            training_id = training_id if _may_be_a_name(training_id) else ""
        except SourceMissing:  # ended meanwhile
            continue
        except (AccessDenied, ObjectArchived) as error:
            unread(f"{_NEW}/{key}", _why(f"{_NEW}/{key}", error))
            continue
        except DAMAGED:  # others may write there, too
            training_id, at = "", 0.0
        try:
            there = _marked(store, training_id) if training_id else {}
        except StagingError:  # what there is may be seen the next time, by this note
            continue
        is_put = True
        for publication, marked in there.items():
            one = None if publication in known else _of_record(store, publication, marked)
            if one is not None:
                found[publication] = one
                try:
                    _put(store, one)
                except StagingError:  # it may be another's to write there
                    is_put = False
        if is_put and time.time() - at > _BEGUN_S:
            with suppress(StagingError):
                place.delete([key])
    return found


def _may_be_a_name(training_id: str) -> bool:
    try:
        check_keys([training_id], "")
    except StagingError:
        return False
    return True


def _put(store: ObjectStore, one: Summary) -> None:
    store.put_bytes(_place(one["publication"]), json.dumps(one).encode())


def _place(publication: str, what: str = "") -> str:
    # Ids of trainings may be almost as long as a file's name may be.
    return f"{_NEW}/{hashlib.sha256(publication.encode()).hexdigest()}{what}.json"


def _listed(store: ObjectStore) -> list[str]:
    try:
        return [obj.key for obj in store.at(_NEW).list() if obj.key.endswith(".json")]
    except SourceMissing:
        return []


def _pass_over(_place: str, _why: str) -> None:
    """For who needs no more than can be read."""


def _read_new(store: ObjectStore, listed: Iterable[str], unread: _Unread) -> dict[str, Summary]:
    """What of the listed is a summary that is not merged yet, by key.

    ``unread`` is called with those that cannot be read: in an archive, or not for us.
    """
    place = store.at(_NEW)

    def read(key: str) -> tuple[str, Summary] | None:
        try:
            with suppress(SourceMissing, *DAMAGED):  # merged meanwhile
                one: Summary = json.loads(place.read_bytes(key))
                if _is_sound(one):
                    return key, one
        except (AccessDenied, ObjectArchived) as error:
            if not key.endswith(_BEGUN):  # which ``_begun`` reads
                unread(f"{_NEW}/{key}", _why(f"{_NEW}/{key}", error))
        return None

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(one for one in pool.map(read, listed) if one is not None)


def _read_index(
    store: ObjectStore, unread: _Unread = _pass_over
) -> tuple[dict[str, Summary], str] | None:
    """What is in the index, by publication, and its version; None if it is missing or damaged.

    Nor is there one where it cannot be read, for it is in an archive or not for us; with that
    ``unread`` is called.
    """
    try:
        found = store.read_version(_INDEX)
    except (AccessDenied, ObjectArchived) as error:
        unread(_INDEX, _why(_INDEX, error))
        return None
    if found is None:
        return None
    try:
        body = json.loads(gzip.decompress(found[0]))
        if body["schema"] != SCHEMA:
            return None
        known = {one["publication"]: one for one in body["publications"] if _is_sound(one)}
        return known, found[1]
    except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError, zlib.error):
        return None


def _why(key: str, error: StagingError) -> str:
    """What a store says of an object, without the place that is said in front of it."""
    return re.sub(rf".*?/{re.escape(key)}(: | (?=at ))", "", str(error), count=1)  # at an endpoint


def _is_sound(one: Any) -> bool:
    """Whether it is as ``summary``, ``mark_removed`` or ``_of_record`` make them: others may write
    there, too.
    """
    try:
        if not all(map(_is_name, one["publication"].split("/"))):
            return False
        if "published" not in one:
            said = isinstance(one.get("removed", one.get("unread")), str)
            return said and "went_on_from" not in one
        texts = [one["published"], one["dag_id"], one["training_id"], one["dataset"]["uri"]]
        texts += [one["dataset"]["fingerprint"], one["code"]["digest"]]
        texts.append(one["dataset"].get("resolved_uri", ""))
        for other in one.get("went_on_from", []):
            data = other["dataset"]
            texts += [other["training_id"], data["fingerprint"], *data.values()]
        datetime.fromisoformat(one["published"])
        if not _is_name(one["dag_id"]):  # what is of no DAG has no pointers to look for
            return False
        # Of each of many: sets of types are the quickest to look at.
        return (
            set(map(type, texts)) == {str}
            and {int, float, bool}.issuperset(map(type, one["metrics"].values()))
            and isinstance(one["parameters"], dict)
            and isinstance(one.get("experiment"), str | None)
            and isinstance(one["code"]["git_commit"], str | None)
        )
    except DAMAGED:
        return False


def _is_name(text: str) -> bool:
    """Whether a key may have such a part, as ``check_keys`` has it; but quicker, for many."""
    if text in ("", ".", "..") or "/" in text or "\0" in text:
        return False
    return (len(text) if text.isascii() else len(text.encode())) <= 255


def _is_archived(one: Mapping[str, Any]) -> bool:
    """Whether a record could not be read for that alone: then it is what it was."""
    return str(one.get("unread", "")).startswith(_ARCHIVED)


def _write(
    store: ObjectStore,
    known: Mapping[str, Summary],
    version: str | None,
    merged: Iterable[str],
) -> None:
    """Replaces the index, unless somebody else just did, and removes what is in it now."""
    if store.put_if(_INDEX, _packed(known), version):
        store.at(_NEW).delete(merged)


def _packed(known: Mapping[str, Summary]) -> bytes:
    body = {"schema": SCHEMA, "id": uuid.uuid4().hex, "publications": _shortened(known.values())}
    return gzip.compress(json.dumps(body).encode(), 6)


def _shortened(known: Iterable[Summary]) -> list[Summary]:
    """The same, where of what a training went on from only that is named which does not follow from
    the summaries before it. Of an experiment that many have gone on with each would name all.
    """
    before: dict[Trained, list[Trained]] = {}
    shortened = []
    for one in known:
        if others := one.get("went_on_from"):
            one = one | {"went_on_from": _not_implied(others, before)}
        if "published" in one:
            others = one.get("went_on_from", ())
            before.setdefault(trained(one), []).extend(map(trained, others))
        shortened.append(one)
    return shortened


def _not_implied(
    others: Sequence[dict[str, Any]], before: Mapping[Trained, Iterable[Trained]]
) -> list[dict[str, Any]]:
    """Without those from whom later ones went on, the oldest first."""
    kept = []
    implied: set[Trained] = set()
    wanted = set(map(trained, others))
    for other in reversed(others):
        if trained(other) in implied:
            continue
        kept.append(other)
        waiting = [trained(other)]
        while waiting and wanted:
            one = waiting.pop()
            if one not in implied:
                implied.add(one)
                wanted.discard(one)
                waiting.extend(before.get(one, ()))
    return kept[::-1]


def _of_records(
    store: ObjectStore, progress: Callable[[int, int], None] | None
) -> dict[str, Summary]:
    marked = _marked(store)
    there = sorted(marked)

    def read(publication: str) -> Summary | None:
        return _of_record(store, publication, marked[publication])

    known = {}
    with ThreadPoolExecutor(_READERS) as pool:
        for number, one in enumerate(pool.map(read, there), 1):
            if one is not None:
                known[one["publication"]] = one
            if progress is not None:
                progress(number, len(there))
    return known


def _marked(store: ObjectStore, training_id: str = "") -> dict[str, float]:
    """When what has a marker got it, by publication: of one training, or of all.

    What cleaning has withdrawn is among it: its files are there for two more days, and after that
    the index alone knows what it was.

    Raises:
        StagingError: as ``ObjectStore.list``. Only that there is nothing yet is no error: what was
            not seen for another reason may be there, and notes of it have to stay.
    """
    prefix = f"{training_id}/" if training_id else ""
    marked: dict[str, float] = {}
    try:
        listed = store.at(training_id).list() if training_id else results_in(store)
    except SourceMissing:
        if training_id:  # nothing yet
            return {}
        raise
    for obj in listed:
        if match := _MARKER.fullmatch(prefix + obj.key):
            marked[match[1]] = obj.modified
    return marked


def _of_record(store: ObjectStore, publication: str, marked: float) -> Summary | None:
    """The summary of a publication's record, or why it cannot be read; None where it has none.

    Args:
        store: of the results.
        publication: its place there.
        marked: when the object that marks it changed, in seconds since 1970.

    Raises:
        StagingError: the store cannot be read, which says nothing of the record.
    """
    record, why = None, "damaged"
    place, unread = store.at(publication), {"publication": publication}
    try:
        record = json.loads(store.read_bytes(f"{publication}/{LINEAGE}"))
    except SourceMissing:
        why = "gone"
    except ObjectArchived:
        why = why_archived_at(place, LINEAGE)
    except DAMAGED:
        pass
    unread["unread"] = f"its {LINEAGE} is {why}"
    try:
        marker = marker_of(place) or marker_of(place, RETIRED)
    except ObjectArchived:
        if why == "gone":
            return None
        marker = {"files": [{"key": LINEAGE}]}  # as it may say; and when, a listing does
    except StagingError:
        if why == "gone":  # somebody else's marker, which is not for us to read
            return None
        raise
    with suppress(OSError, *DAMAGED):
        published = datetime.fromtimestamp(published_at(marker, marked), UTC)
        one = summary(record or {}, publication, published.isoformat(timespec="seconds"))
        if _is_sound(one):
            return one
    # What a marker does not list is a file of somebody else's.
    with suppress(*DAMAGED):
        if any(file["key"] == LINEAGE for file in marker["files"]):
            return unread
    return None
