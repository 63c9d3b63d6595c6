"""Results into a store: a publication has all its files and its marker, or is none."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ddl_airflow.core.errors import (
    AccessDenied,
    ObjectArchived,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.core.layout import OWN_EXPERIMENT
from ddl_airflow.storage.filesystem import FolderStore, os_errors
from ddl_airflow.storage.fingerprint import file_sha256, object_sha256
from ddl_airflow.storage.marker import sealed
from ddl_airflow.storage.store import (
    RETIRED,
    SUCCESS,
    Left,
    ObjectStore,
    StoredObject,
    Unfinished,
    check_keys,
)
from ddl_airflow.storage.transfer import Meter, Progress, for_each

PUBLICATION = r"(?P<content>[0-9a-f]{16})-[0-9a-f]{8}"  # its name, as ``publish`` makes it
_PLACE = re.compile(rf"[^/]+(?:/{PUBLICATION})?")  # of trainings and publications in results
_MOST_UNANSWERED = 2  # deletions, until nothing more is tried to be taken back
_MOST_NAMED = 5

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishedFile:
    """One published object: its key under the result's uri, bytes, SHA-256 in hex, and ETag."""

    key: str
    size: int
    sha256: str
    etag: str


@dataclass(frozen=True)
class PublishedResult:
    """What ``publish`` put, sorted by key, without the marker.

    Attributes:
        name: of the publication under the prefix that ``publish`` was given.
        uri: of the publication.
    """

    name: str
    uri: str
    files: tuple[PublishedFile, ...]


def publish(
    files: Mapping[str, Path],
    store: ObjectStore,
    prefix: str = "",
    *,
    known: Mapping[str, tuple[str, int]] | None = None,
    marker: Mapping[str, object] | None = None,
    workers: int = 8,
    progress: Progress | None = None,
) -> PublishedResult:
    """Puts files under ``<prefix>/<name>/`` and, when all are there, the marker ``_SUCCESS``.

    The name begins with a digest of keys and contents, and ends with one that no other call has:
    a publication is written once, by one call, and never changed. So whoever reads one that is
    whole goes on reading it, whatever is published meanwhile. The same files published again are
    found, if they are still whole, and not sent; of others that is not sent which an earlier
    publication of the prefix has, or a killed process left. After an error everything that this
    call put is gone, unless the marker came and only the answer was lost: then it is published, and
    the next call finds it. What a killed process leaves has no marker, nobody's publication is in
    it, and its unfinished uploads are ended by the next call that comes to its end.

    The marker is JSON: ``marker``'s fields, ``files``, a list of key, size, sha256 and etag, and
    ``marked``, when that was, under its own digest (``sealed``).

    Args:
        files: key in the publication -> file.
        store: where to.
        prefix: "" for the store itself.
        known: SHA-256 in hex and bytes, by key, of files that something else that is published
            says to be so; they are not read for theirs.
        marker: facts of the caller for the marker.
        workers: transfers at once.
        progress: see ``Progress``.

    Raises:
        FileChanged: a file is not what its digest is of: somebody writes to it.
        StagingError: and its subclasses, as ``ObjectStore`` does.
    """
    target = store.at(prefix)
    if not files:
        raise StagingError(f"{target.uri}: no files to publish", retryable=False)
    check_keys([*files, SUCCESS], target.uri)
    digests = dict(known or {})
    digests |= _digests({key: files[key] for key in files.keys() - digests.keys()}, workers)
    content = content_of(digests)
    listed = _listed(target)
    for name, found in _marked(target, listed).items():
        if name.partition("-")[0] == content and not missing_from(target.at(name)):
            same = tuple(PublishedFile(**entry) for entry in found["files"])
            return PublishedResult(name, target.at(name).uri, same)
    earlier = _Earlier(target, listed, digests)
    name = f"{content}-{uuid.uuid4().hex[:8]}"
    target = target.at(name)
    put: list[str] = []
    marked = False
    try:
        stored = _upload(files, digests, target, put, earlier, workers, progress)
        result = tuple(
            PublishedFile(key, size, sha256, stored[key].etag)
            for key, (sha256, size) in sorted(digests.items())
        )
        listing = [asdict(file) for file in result]
        facts = {**(marker or {}), "files": listing, "marked": time.time()}
        marked = True
        target.put_bytes(SUCCESS, sealed(facts))
    except BaseException as exc:  # also a signal that ends the task
        if not marked or not _may_have_marker(target):
            _withdraw(target, put, exc)
        elif isinstance(exc, StagingError):  # others may have it in production by now
            raise type(exc)(
                f"{exc} It may be published all the same, in {target.uri}: the next try finds it.",
                retryable=exc.retryable,
            ) from exc
        raise
    earlier.end()
    return PublishedResult(name, target.uri, result)


class _Earlier:
    """What there is of a training's files already: published, or left by who was killed.

    Args:
        target: of all publications of the training.
        listed: its objects.
        digests: SHA-256 in hex and bytes of the files, by key.
    """

    def __init__(
        self,
        target: ObjectStore,
        listed: Iterable[StoredObject],
        digests: Mapping[str, tuple[str, int]],
    ) -> None:
        self._target = target
        self._unfinished: list[Unfinished] = []
        self._of: dict[str, list[Left]] = {}
        if not target.resumes:
            return
        found: list[tuple[str, Left]] = []
        for obj in sorted(listed, key=lambda obj: obj.modified, reverse=True):
            key = _key_in_publication(obj.key)
            if key in digests and obj.size == digests[key][1] and not obj.archived:
                found.append((key, Left(target, obj)))
        for one in unfinished_in(target):
            if key := _key_in_publication(one.key):
                self._unfinished.append(one)
                found.append((key, Left(target, one)))
        for key, left in found:
            self._of.setdefault(key, []).append(left)

    def of(self, key: str) -> Sequence[Left]:
        """What there may be of a file, whole objects first."""
        return self._of.get(key, ())

    def end(self) -> None:
        """Ends what killed processes began, once all of it is published."""
        for one in self._unfinished:
            try:
                self._target.discard(one)
            except StagingError as error:
                _log.warning("%s `ddl-airflow clean` ends this upload", error)


def unfinished_in(store: ObjectStore, level: int = logging.INFO) -> list[Unfinished]:
    """What somebody began to store there; none, and a line in the log, where nobody may ask."""
    try:
        return list(store.unfinished())
    except StagingError as error:  # not all have the right, and not all services have the call
        _log.log(level, "%s What was left unfinished is not looked for", error)
        return []


def _key_in_publication(key: str) -> str:
    """The rest of a key that begins with a publication's name; empty: it does not."""
    name, _, rest = key.partition("/")
    return rest if re.fullmatch(PUBLICATION, name) else ""


def results_in(store: ObjectStore) -> list[StoredObject]:
    """All objects of a place of results, each under one name.

    A link to a folder that is there as well is passed over, with a warning: what a person links to
    as ``current`` is no second publication, and may not be removed as one. A training in a deeper
    folder, such as ``archive``, counts by one link to it.

    A folder beside the trainings that may not be read is passed over, with a warning: at the top of
    a disk ``lost+found`` is root's alone. One of a training, or of a DAG's pointers, is not.

    Raises:
        StagingError: as ``ObjectStore.list``.
    """
    if isinstance(store, FolderStore):
        store = store.once(_PLACE, _warn_of_link)
    try:
        return store.list()
    except AccessDenied:
        if not isinstance(store, FolderStore):
            raise
        names = store.names()
        private = [name for name in store.private() if not _may_be_ours(name, names)]
        if not private:
            raise
    for name in private:
        _warn_of_private(f"{store.uri}/{name}")
    return store.without(private).list()


def _may_be_ours(name: str, names: Iterable[str]) -> bool:
    """Whether a folder may be of a training, or of a DAG that has trainings among those names."""
    if name.startswith("_") or re.fullmatch(f"{PUBLICATION}|{OWN_EXPERIMENT}", name):
        return True
    return any(other.startswith(f"{name}-") for other in names)


@cache
def _warn_of_private(place: str) -> None:
    """Once in a process, which may list the same place time and again."""
    _log.warning(
        "%s is passed over: it may not be read, and is called neither as a training nor as a DAG "
        "that has trainings there",
        place,
    )


@cache
def _warn_of_link(link: Path, folder: Path) -> None:
    _log.warning(
        "%s is passed over: it is a link to %s, and what is there counts by one name alone",
        *(link, folder),
    )


def own_name(store: ObjectStore, publication: str) -> str:
    """By which ``results_in`` lists a publication that somebody may have named by a link."""
    if not isinstance(store, FolderStore):
        return publication
    return store.own_key(publication, _PLACE)


def publications(
    target: ObjectStore, listed: Iterable[StoredObject] | None = None
) -> dict[str, dict[str, Any]]:
    """What was published under a prefix and has its marker: name -> marker, the newest first.

    Without what has its marker in an archive.

    Args:
        target: the prefix.
        listed: its objects, for who has them already.
    """
    return _marked(target, _listed(target) if listed is None else listed)


def _listed(target: ObjectStore) -> list[StoredObject]:
    try:
        return target.list()
    except SourceMissing:  # a folder, that is made when something is published
        return []


def _marked(target: ObjectStore, listed: Iterable[StoredObject]) -> dict[str, dict[str, Any]]:
    times: dict[str, float] = {}
    marked: dict[str, dict[str, Any]] = {}
    for obj in listed:
        name, _, key = obj.key.partition("/")
        if key != SUCCESS:
            continue
        marker: dict[str, Any] = {}
        with suppress(ObjectArchived):  # nobody can tell what is there before it is restored
            marker = _read_marker(target.at(name))
        if marker:
            marked[name], times[name] = marker, published_at(marker, obj.modified)
    return {name: marked[name] for name in sorted(marked, key=times.__getitem__, reverse=True)}


def published_at(marker: Mapping[str, Any], modified: float) -> float:
    """When what has the marker was published, in seconds since 1970.

    Args:
        marker: its content.
        modified: of the object, which a copy has from when it was copied: what tells of a marker
            that an earlier version of ours wrote.
    """
    marked = marker.get("marked")
    return marked if isinstance(marked, float) else modified


def missing_from(publication: ObjectStore) -> list[str]:
    """Keys of files that a publication's marker lists, and that cannot be read there as they were
    put: they are gone, changed, or in an archive. The marker's key alone, where that holds for it.

    Sizes and ETags are compared. A file of which only the ETag differs is read and its SHA-256
    compared: after results were moved or restored that is so of each. What is in an archive cannot
    be read until somebody restores it.
    """
    marker: Mapping[str, Any] = {}
    with suppress(ObjectArchived):
        marker = _read_marker(publication)
    if not marker:
        return [SUCCESS]
    listed = {obj.key: obj for obj in publication.list()}

    def is_there(entry: Mapping[str, Any]) -> bool:
        found = listed.get(entry["key"])
        if found is None or found.size != entry["size"]:
            return False
        # Removed or changed meanwhile, or not restored.
        with suppress(SourceMissing, TransferCorrupt, ObjectArchived):
            if found.etag == entry["etag"] and not found.archived:
                return True
            return object_sha256(publication, found) == str(entry["sha256"])
        return False

    return [entry["key"] for entry in marker["files"] if not is_there(entry)]


def retire(publication: ObjectStore, marked: float) -> bytes:
    """Takes the marker of a publication, and keeps it for ``restore``; returns it, too.

    Args:
        publication: the place.
        marked: when it got the marker, in seconds since 1970; one that is restored still says so.
    """
    marker = json.loads(publication.read_bytes(SUCCESS)) | {"marked": marked}
    publication.put_bytes(RETIRED, taken := sealed(marker))
    publication.delete([SUCCESS])
    return taken


def restore(publication: ObjectStore, taken: bytes = b"") -> None:
    """Gives a publication back the marker that ``retire`` took, if it did.

    Args:
        publication: the place.
        taken: as ``retire`` returned it, for who took it. Of two who do, one may remove what both
            have kept before the other takes the marker that was given back.
    """
    if publication.exists(SUCCESS):
        return
    with suppress(SourceMissing):  # none was taken, or somebody else has given it back
        publication.put_bytes(SUCCESS, taken or publication.read_bytes(RETIRED))
        publication.delete([RETIRED])


def content_of(digests: Mapping[str, tuple[str, int]]) -> str:
    """What the name of a publication begins with.

    Args:
        digests: SHA-256 in hex and bytes of each file but the marker, by its key.
    """
    lines = (json.dumps([key, *digests[key]]) + "\n" for key in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _digests(files: Mapping[str, Path], workers: int) -> dict[str, tuple[str, int]]:
    """Key -> SHA-256 in hex, and bytes."""
    digests: dict[str, tuple[str, int]] = {}

    def read(key: str) -> None:
        with os_errors(files[key]):
            digests[key] = file_sha256(files[key])

    for_each(files, read, workers, Meter(None, 0, 0))
    return digests


def marker_of(publication: ObjectStore, key: str = SUCCESS) -> dict[str, Any]:
    """What a marker says; empty: there is none, or it is no JSON object.

    Args:
        publication: the place.
        key: ``_SUCCESS``, or ``_RETIRED``.
    """
    if (read := publication.read_version(key)) is None:  # or it was taken a moment ago
        return {}
    try:
        found = json.loads(read[0])
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _read_marker(target: ObjectStore) -> dict[str, Any]:
    """The marker that lies there; empty: there is none, or one that is not ours."""
    found = marker_of(target)
    try:
        return found if {"key", "size", "sha256", "etag"} <= set(found["files"][0]) else {}
    except (LookupError, TypeError):
        return {}


def _upload(
    files: Mapping[str, Path],
    digests: Mapping[str, tuple[str, int]],
    target: ObjectStore,
    put: list[str],
    earlier: _Earlier,
    workers: int,
    progress: Progress | None,
) -> dict[str, StoredObject]:
    """Puts all files and compares the store's listing. Adds to ``put`` what may now be there."""
    meter = Meter(progress, sum(size for _, size in digests.values()), len(files))
    stored: dict[str, StoredObject] = {}

    def send(key: str) -> None:
        put.append(key)
        sha256, _ = digests[key]
        stored[key] = target.put(files[key], key, sha256, meter.advance, earlier.of(key))
        meter.advance(0, files=1)

    for_each(files, send, workers, meter)
    listed = {obj.key: obj for obj in target.list()}
    for key, obj in stored.items():
        if listed.get(key) != obj:
            raise TransferCorrupt(
                f"{target.uri}/{key}: {obj.size:,} bytes were stored, but the listing says "
                f"{listed.get(key)}. Another writer? Publish each training under its own prefix."
            )
    return stored


def _withdraw(target: ObjectStore, keys: Iterable[str], cause: BaseException) -> None:
    """Deletes what a failed call put. Raises ``cause`` again, with more said, if it cannot.

    A store that has gone is not asked for each of maybe thousands.
    """
    left, unanswered = [], 0
    for key in keys:
        if unanswered == _MOST_UNANSWERED:
            left.append(key)
            continue
        try:
            target.delete([key])  # also one that never came to be: its folder did
        except StagingError as exc:
            unanswered += type(exc) is StagingError and exc.retryable
            if _may_exist(target, key):
                left.append(f"{key} ({exc})")
    if left and isinstance(cause, StagingError):
        more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
        raise type(cause)(
            f"{cause} Could not remove, without {SUCCESS}: {', '.join(left[:_MOST_NAMED])}{more}",
            retryable=cause.retryable,
        ) from cause


def _may_exist(target: ObjectStore, key: str) -> bool:
    try:
        return target.exists(key)
    except StagingError:
        return True


def _may_have_marker(target: ObjectStore) -> bool:
    """Asked by its key, too: a listing may be behind."""
    try:
        return target.exists(SUCCESS) or target.read_version(SUCCESS) is not None
    except StagingError:
        return True
