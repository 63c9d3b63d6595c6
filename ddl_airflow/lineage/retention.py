"""Published trainings: which of them need not be kept, and how they go.

``keep`` of a manifest says how many of its publications stay, the newest; the rule stands in the
marker of each. Besides stays what ``latest.json`` names, and what ``production.json`` or its
history names. Nobody can be hurt half-way: a publication first gives up its marker, so that nobody
puts it into production any more, and only two days later its files, after another look at the
pointers. If one names it after all, it gets the marker back at once: whoever moves a pointer looks
at the marker afterwards, and whoever takes a marker at the pointers.
"""

from __future__ import annotations

import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from ddl_airflow.core.errors import NoSpace, SourceMissing, StagingError
from ddl_airflow.core.layout import OWN_EXPERIMENT
from ddl_airflow.lineage.index import mark_removed
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    NoPointer,
    dags_among,
    read_pointer,
)
from ddl_airflow.lineage.record import LINEAGE
from ddl_airflow.storage.cleaning import LEFT_S, Removed
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import (
    marker_of,
    own_name,
    published_at,
    restore,
    results_in,
    retire,
    unfinished_in,
)
from ddl_airflow.storage.snapshots import SNAPSHOTS, drop, why_not_ours
from ddl_airflow.storage.store import RETIRED, SUCCESS, ObjectStore, StoredObject

_SAVED_S = 30 * 86400.0  # checkpoints of a training that nobody has gone on with
_SAVED = re.compile(rf"([^/]+)/{SNAPSHOTS}/(.+)")
# <training id>/<content>-<token>/..., as ``ddl_airflow.storage.publication.publish`` names it.
_PUBLISHED = re.compile(r"([^/]+/[0-9a-f]{16}-[0-9a-f]{8})/.+")
_log = logging.getLogger(__name__)


def clean_results(
    store: ObjectStore, *, dry_run: bool = False, now: Callable[[], float] = time.time
) -> Iterator[Removed]:
    """Removes what the manifests' ``keep`` does not keep, what killed uploads left, and checkpoints
    that trainings saved and nobody has gone on with.

    Args:
        store: of the results, of all DAGs that publish there.
        dry_run: to remove nothing.
        now: seconds since 1970.

    Yields:
        What was removed; a publication that gives up its marker counts as removed then.

    Raises:
        StagingError: as ``ObjectStore`` does; at the end, if what had to go could not be noted as
            removed, and stays.
    """
    listed = results_in(store)
    found: dict[str, dict[str, StoredObject]] = defaultdict(dict)
    for obj in listed:
        if match := _PUBLISHED.fullmatch(obj.key):
            found[match[1]][obj.key[match.end(1) + 1 :]] = obj
    named, notes = _named(store, listed)
    for note in notes:
        _log.warning("%s", note)
    to_restore = []
    unnoted: StagingError | None = None
    for publication, objects in found.items():
        if SUCCESS in objects or not _is_ours(publication, objects):
            continue
        target = store.at(publication)
        if publication in named:
            to_restore.append(target)
            continue
        if not _is_older(target, objects, LEFT_S, now):
            continue
        # A listing may be behind, of the pointers as well: all of it would go.
        if target.read_version(SUCCESS) is not None:
            _log.warning(
                "%s is left: it has a %s, which the listing does not show", target.uri, SUCCESS
            )
            continue
        dag_id = marker_of(target, RETIRED).get("dag_id")
        if isinstance(dag_id, str) and publication in _named_by(store, dag_id):
            to_restore.append(target)
            continue
        nbytes = sum(obj.size for obj in objects.values())
        # First: who is killed meanwhile leaves nothing that is missed.
        known = LINEAGE in objects or RETIRED in objects
        try:
            noted = known and not dry_run and _note(store, publication)
        except StagingError as error:
            unnoted = error
            continue
        yield Removed("publication without a marker", target.uri, nbytes)
        if not dry_run:
            # Its former marker last: who is killed meanwhile leaves what can be told from others'.
            target.delete(sorted(objects, key=lambda key: key == RETIRED))
            if known and not noted:
                _note(store, publication)  # the disk was full, and this has freed room
    yield from _saved(store, listed, found, dry_run, now)
    for part in unfinished_in(store, logging.WARNING):
        match = _PUBLISHED.fullmatch(part.key)
        if not match or not _is_ours(match[1], found.get(match[1], ())):
            continue
        if now() - part.started > LEFT_S:
            yield Removed("unfinished upload", f"{store.uri}/{part.key}", part.nbytes)
            if not dry_run:
                store.discard(part)
    # At the end what takes room: the disk may have had none.
    for target in to_restore:
        if not dry_run:
            restore(target)
    yield from _retire(store, listed, found, dry_run)
    if unnoted is not None:
        raise unnoted


def _is_older(
    place: ObjectStore, objects: Mapping[str, StoredObject], age_s: float, now: Callable[[], float]
) -> bool:
    """Whether nothing has changed in a place for so long.

    Args:
        place: a publication, or what a training has saved.
        objects: what was listed there, by key.
        age_s: for how long, in seconds.
        now: seconds since 1970.
    """
    then = now() - age_s
    if any(obj.modified >= then for obj in objects.values()):
        return False
    # Whoever copies or moves files has them keep their times: they look old before all are there.
    return not isinstance(place, FolderStore) or all(
        place.last_change(key) < then for key in ("", *objects)
    )


def _is_ours(publication: str, keys: Collection[str]) -> bool:
    """Whether what is called as a publication, and has these keys, is one of ours: others may call
    theirs by digests as well.
    """
    if re.fullmatch(OWN_EXPERIMENT, publication.partition("/")[0]):  # as trainings are called
        return True
    ours = (SUCCESS, RETIRED, LINEAGE)
    return any(key in ours or key.startswith("evidence/") for key in keys)


def _note(store: ObjectStore, publication: str) -> bool:
    """Notes that it was removed; False where the disk is full."""
    try:
        mark_removed(store, publication)
    except NoSpace:
        return False
    return True


def _saved(
    store: ObjectStore,
    listed: list[StoredObject],
    found: dict[str, dict[str, StoredObject]],
    dry_run: bool,
    now: Callable[[], float],
) -> Iterator[Removed]:
    """Removes checkpoints that were saved while a training ran, and that it has no use for."""
    of_training: dict[str, dict[str, StoredObject]] = defaultdict(dict)
    for obj in listed:
        if match := _SAVED.fullmatch(obj.key):
            of_training[match[1]][match[2]] = obj
    published = {name.partition("/")[0] for name, objects in found.items() if SUCCESS in objects}
    for training, objects in of_training.items():
        place = store.at(f"{training}/{SNAPSHOTS}")
        keep_s = LEFT_S if training in published else _SAVED_S
        if not _is_older(place, objects, keep_s, now):
            continue
        if why := why_not_ours(objects):
            _log.warning("%s is left: %s", place.uri, why)
            continue
        nbytes = sum(obj.size for obj in objects.values())
        yield Removed("saved checkpoints", place.uri, nbytes)
        if not dry_run:
            drop(place, objects)


def _retire(
    store: ObjectStore,
    listed: list[StoredObject],
    found: dict[str, dict[str, StoredObject]],
    dry_run: bool,
) -> Iterator[Removed]:
    """Takes the markers of those that are too many."""
    of_dag: dict[str, list[tuple[float, str, Any]]] = defaultdict(list)
    for publication, objects in found.items():
        if SUCCESS in objects:
            marker = marker_of(store.at(publication))  # none, if others clean as well
            if isinstance(dag_id := marker.get("dag_id"), str):
                marked = published_at(marker, objects[SUCCESS].modified)
                entry = (marked, publication, marker.get("keep"))
                of_dag[dag_id].append(entry)
    named, _ = _named(store, listed)
    for dag_id, published in of_dag.items():
        published.sort(reverse=True)
        keep = published[0][2]  # as the manifest says now
        if not isinstance(keep, int) or keep < 1:
            continue
        for marked, publication, _ in published[keep:]:
            # Cleaning takes a while, and a person may have promoted it meanwhile.
            if publication in named or publication in _named_by(store, dag_id):
                continue
            target = store.at(publication)
            if not dry_run:
                try:
                    retire(target, marked)
                except SourceMissing:  # others have
                    continue
                if publication in _named_by(store, dag_id):
                    restore(target)
                    continue
            nbytes = sum(obj.size for obj in found[publication].values())
            yield Removed("publication", target.uri, nbytes)


def _named(store: ObjectStore, listed: list[StoredObject]) -> tuple[set[str], list[str]]:
    """The publications that are named by a pointer of any DAG, as the pointers are now; and what
    to note of files that are only called as pointers are.
    """
    keys = [obj.key for obj in listed]
    named: set[str] = set()
    notes = []
    for dag_id in dags_among(keys):
        try:
            named |= _named_by(store, dag_id)
        except NoPointer as error:
            notes.append(error.passed_over(dag_id, keys))
    return named, notes


def _named_by(store: ObjectStore, dag_id: str) -> set[str]:
    """The publications that are named by a DAG's pointers, or the history of production; also as
    they are listed, where a link was named.
    """
    named: set[str] = set()
    if pointer := read_pointer(store, dag_id, LATEST):
        named.add(pointer["publication"])
    if pointer := read_pointer(store, dag_id, PRODUCTION):
        every = (pointer, *pointer["before"], *pointer["history"])
        named |= {one["publication"] for one in every}
    return named | {own_name(store, one) for one in named}
