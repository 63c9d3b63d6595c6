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
from contextlib import contextmanager
from typing import Any

from ddl_airflow.core.errors import (
    AccessDenied,
    NoSpace,
    ObjectArchived,
    SourceMissing,
    StagingError,
)
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
            removed, and stays, or if a marker or a pointer cannot be read: what these decide on
            stays, too.
    """
    listed = results_in(store)
    found: dict[str, dict[str, StoredObject]] = defaultdict(dict)
    for obj in listed:
        if match := _PUBLISHED.fullmatch(obj.key):
            found[match[1]][obj.key[match.end(1) + 1 :]] = obj
    unread = _Unread()
    named, notes = _named(store, listed, unread)
    for note in notes:
        _log.warning("%s", note)
    to_restore = []
    unnoted: StagingError | None = None
    for publication, objects in found.items():
        if SUCCESS in objects or not _is_ours(publication, objects):
            continue
        target = store.at(publication)
        if publication in named:
            if RETIRED in objects:
                to_restore.append(publication)
                continue
            with unread.of(publication):  # a listing may be behind
                if target.read_version(SUCCESS) is None and not target.exists(RETIRED):
                    _log.warning(
                        "%s has no %s, though a pointer names it: somebody has removed that, or it "
                        "was copied without. Nobody can load it: publish it again (clear "
                        "upload_results), or promote another one",
                        *(target.uri, SUCCESS),
                    )
                    continue
            to_restore.append(publication)
            continue
        if not _is_older(target, objects, LEFT_S, now) or unread.may_name(publication):
            continue
        with unread.of(publication):
            # A listing may be behind, of the pointers as well: all of it would go.
            if target.read_version(SUCCESS) is not None:
                _log.warning(
                    "%s is left: it has a %s, which the listing does not show", target.uri, SUCCESS
                )
                continue
            dag_id = marker_of(target, RETIRED).get("dag_id")
        if unread.has(publication):
            continue
        if isinstance(dag_id, str) and publication in _named_by(store, dag_id):
            to_restore.append(publication)
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
    for publication in to_restore:
        with unread.of(publication):
            if not dry_run:
                restore(store.at(publication))
    yield from _retire(store, listed, found, unread, dry_run)
    if unnoted is not None:
        raise unnoted
    unread.check()


class _Unread:
    """What of results cannot be read, such as what is archived. It says what must not go: nobody
    can tell what the rules make of that. All else goes on.
    """

    def __init__(self) -> None:
        self._markers: dict[str, StagingError] = {}
        self._pointers: dict[str, StagingError] = {}

    @contextmanager
    def of(self, publication: str) -> Iterator[None]:
        """Notes it where a publication's marker cannot be read."""
        try:
            yield
        except (AccessDenied, ObjectArchived) as error:
            _log.warning("%s stays: %s", publication, error)
            self._markers[publication] = error

    def has(self, publication: str) -> bool:
        """Whether the publication's marker could not be read."""
        return publication in self._markers

    def pointer(self, dag_id: str, error: StagingError) -> None:
        """Notes that a pointer cannot be read."""
        if dag_id not in self._pointers:
            _log.warning("What is of %s stays: %s", dag_id, error)
        self._pointers[dag_id] = error

    def may_name(self, publication: str, dag_id: str = "") -> bool:
        """Whether such a pointer may name a publication, which is the DAG's if that is known."""
        training = publication.partition("/")[0]
        return dag_id in self._pointers or any(
            # What lies there under another name is any DAG's.
            training.startswith(f"{one}-") or not re.fullmatch(OWN_EXPERIMENT, training)
            for one in self._pointers
        )

    def may_be_newer(
        self, dag_id: str, marked: float, found: Mapping[str, Mapping[str, StoredObject]]
    ) -> str:
        """One that may be of the DAG, and whose rule may hold in place of that of the newest.

        Args:
            dag_id: the DAG.
            marked: when the newest known was published, in seconds since 1970.
            found: the objects of publications.
        """
        for publication in self._markers:
            training = publication.partition("/")[0]
            is_own = re.fullmatch(OWN_EXPERIMENT, training) is not None
            if is_own and not training.startswith(f"{dag_id}-"):
                continue
            marker = found[publication].get(SUCCESS)  # what was withdrawn has no say
            if marker is not None and marker.modified > marked:
                return publication
        return ""

    def check(self) -> None:
        """Raises StagingError if there is anything."""
        errors = [*self._pointers.values(), *self._markers.values()]
        if errors:
            more = f", and {len(errors) - 1} more that the log names" if errors[1:] else ""
            first = str(errors[0]).rstrip(".")
            raise StagingError(f"{first}. What depends on it{more} stays.", retryable=False)


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
    unread: _Unread,
    dry_run: bool,
) -> Iterator[Removed]:
    """Takes the markers of those that are too many."""
    of_dag: dict[str, list[tuple[float, str, Any]]] = defaultdict(list)
    for publication, objects in found.items():
        if SUCCESS in objects:
            marker: Mapping[str, Any] = {}
            with unread.of(publication):
                marker = marker_of(store.at(publication))  # none, if others clean as well
            if isinstance(dag_id := marker.get("dag_id"), str):
                marked = published_at(marker, objects[SUCCESS].modified)
                entry = (marked, publication, marker.get("keep"))
                of_dag[dag_id].append(entry)
    named, _ = _named(store, listed, unread)
    for dag_id, published in of_dag.items():
        published.sort(reverse=True)
        if newer := unread.may_be_newer(dag_id, published[0][0], found):
            _log.warning("What is of %s stays: %s may say how many are kept", dag_id, newer)
            continue
        keep = published[0][2]  # as the manifest says now
        if not isinstance(keep, int) or keep < 1:
            continue
        for marked, publication, _ in published[keep:]:
            # Cleaning takes a while, and a person may have promoted it meanwhile.
            if unread.may_name(publication, dag_id) or publication in named:
                continue
            if publication in _named_by(store, dag_id):
                continue
            target = store.at(publication)
            if not dry_run:
                try:
                    taken = retire(target, marked)
                except SourceMissing:  # others have
                    continue
                if publication in _named_by(store, dag_id):
                    restore(target, taken)
                    continue
            nbytes = sum(obj.size for obj in found[publication].values())
            yield Removed("publication", target.uri, nbytes)


def _named(
    store: ObjectStore, listed: list[StoredObject], unread: _Unread
) -> tuple[set[str], list[str]]:
    """The publications that are named by a pointer of any DAG, as the pointers are now; and what
    to note of files that are only called as pointers are.

    Pointers that are damaged, or not to be read, are added to ``unread``.
    """
    keys = [obj.key for obj in listed]
    named: set[str] = set()
    notes = []
    for dag_id in dags_among(keys):
        try:
            try:
                named |= _named_by(store, dag_id)
            except NoPointer as error:
                notes.append(error.passed_over(dag_id, keys))
        except StagingError as error:
            if error.retryable:
                raise
            unread.pointer(dag_id, error)
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
