"""Many objects at once: a dataset into a folder, results into a store; all or nothing."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ddl_airflow.core.errors import NoSpace, SourceMissing, StagingError, TransferCorrupt
from ddl_airflow.core.selection import ALL, Selection
from ddl_airflow.storage.cache import CACHED, Cache
from ddl_airflow.storage.filesystem import free_bytes, os_errors
from ddl_airflow.storage.fingerprint import file_sha256, fingerprint
from ddl_airflow.storage.marker import sealed
from ddl_airflow.storage.store import (
    CHUNK,
    PART_PREFIX,
    PIECE,
    RETIRED,
    SUCCESS,
    Left,
    ObjectSource,
    ObjectStore,
    StoredObject,
    Unfinished,
    check_keys,
)

# done_bytes, total_bytes, done_files, total_files; called from any thread, one call at a time.
Progress = Callable[[int, int, int, int], None]

COMPLETE = ".complete"  # in a staged folder: what it holds
# In one that still grows, for ``ddl_ops.data``: all keys, one a line; and why the rest never comes.
LISTING, FAILED = ".ddl-listing", ".ddl-failed"
OWN_FILES = (COMPLETE, LISTING, FAILED)
REPORT_INTERVAL_S = 0.25
_MOST_UNANSWERED = 2  # deletions, until nothing more is tried to be taken back
_MOST_NAMED = 5
_LARGE_AT_ONCE = 2  # objects of several parts, where the first is waited for
_TURN_S = 0.1
PUBLICATION = r"(?P<content>[0-9a-f]{16})-[0-9a-f]{8}"  # its name, as ``publish`` makes it

_log = logging.getLogger(__name__)
Job = TypeVar("Job")


@dataclass(frozen=True)
class StagedFile:
    """One file of a staged dataset.

    Attributes:
        key: path inside the folder.
        size: bytes.
        etag: as the store lists it.
        checked: "sha256", "md5", "md5-of-parts", "size", or "cache" if it was there before.
    """

    key: str
    size: int
    etag: str
    checked: str


@dataclass(frozen=True)
class StagedDataset:
    """What ``stage`` brought.

    Attributes:
        uri: where it is from.
        files: sorted by key.
        nbytes: of all files.
        fingerprint: digest of the listing.
        fetched: files that were transferred.
        reused: files that were not, because the cache had them.
    """

    uri: str
    files: tuple[StagedFile, ...]
    nbytes: int
    fingerprint: str
    fetched: int
    reused: int


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


class _Stopped(StagingError):
    """Ends a transfer because another one failed; the other's error is the one to raise."""


class _Meter:
    """Counts bytes and files of all threads, reports now and then, and stops them all."""

    def __init__(self, progress: Progress | None, nbytes: int, files: int) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._done, self._nbytes, self._done_files, self._files = 0, nbytes, 0, files
        self._next_report = 0.0
        self.stopped = False

    def advance(self, nbytes: int, files: int = 0) -> None:
        if self.stopped:
            raise _Stopped("stopped because another transfer failed")
        with self._lock:
            self._done += nbytes
            self._done_files += files
            end = self._done_files == self._files
            if self._progress and (end or time.monotonic() >= self._next_report):
                self._next_report = time.monotonic() + REPORT_INTERVAL_S
                self._progress(self._done, self._nbytes, self._done_files, self._files)


def _for_each(
    jobs: Iterable[Job], work: Callable[[Job], None], workers: int, meter: _Meter
) -> None:
    """Runs ``work`` on all jobs in threads. The first error stops the others and is raised."""
    with ThreadPoolExecutor(max(1, workers), thread_name_prefix="ddl-transfer") as pool:
        running = [pool.submit(work, job) for job in jobs]
        try:
            for future in as_completed(running):
                future.result()
        except BaseException:  # also a signal that ends the task: no thread goes on alone
            meter.stopped = True
            pool.shutdown(wait=True, cancel_futures=True)
            raise


class Listing(NamedTuple):
    """What a dataset consists of, and the digest of that."""

    objects: list[StoredObject]
    fingerprint: str


def list_dataset(
    store: ObjectSource,
    selection: Selection = ALL,
    warn: Callable[[str], object] = lambda said: None,
) -> Listing:
    """The objects of a dataset: those selected, but for those of size 0 that stand for folders.

    Args:
        store: where they lie.
        selection, warn: see ``Selection``.

    Raises:
        SourceMissing: no such bucket or folder, nothing in it, or nothing that is selected.
    """
    return dataset_of(store, store.list(), selection, warn)


def dataset_of(
    store: ObjectSource,
    listed: Iterable[StoredObject],
    selection: Selection = ALL,
    warn: Callable[[str], object] = lambda said: None,
) -> Listing:
    """The same, of a listing that is there already."""
    objects = [obj for obj in listed if obj.size or not _names_folder(obj.key)]
    if not objects:
        raise SourceMissing(
            f"{store.uri} holds no objects. Upload the training data there, or correct bucket, "
            "prefix or path in the manifest."
        )
    objects = selection.of(objects, store.uri, warn)
    return Listing(objects, fingerprint(objects))


def stage(
    store: ObjectSource,
    cache: Cache,
    destination: Path,
    *,
    listing: Listing | None = None,
    closed_cache: bool = False,
    workers: int = 8,
    progress: Progress | None = None,
    arrived: Callable[[int], None] | None = None,
) -> StagedDataset:
    """Makes ``destination`` a folder of links to the store's objects, through the cache.

    The folder appears whole, with its marker ``.complete``, or not at all; the same data staged
    again changes nothing. Objects of size 0 whose key ends in "/" stand for folders and are left
    out.

    With ``arrived`` it appears before, with ``.ddl-listing``, and whole files come into it in the
    order of the listing: what is there is always the beginning of that. The marker comes last.

    Args:
        store: where the data lies.
        cache: where it is kept.
        destination: the folder.
        listing: of the store, where that is known; None: it is listed.
        closed_cache: whoever reads the folder cannot go into the cache. Then the links are names of
            the same files (link(2)): deleting them from the cache alone frees no room.
        workers: transfers at once.
        progress: see ``Progress``.
        arrived: gets how many files are there, whenever it is more; one call at a time. None: the
            folder is to be whole.

    Raises:
        SourceMissing: no such bucket or folder, or nothing in it.
        NoSpace: the cache's disk has less room than there is to fetch; nothing was fetched then.
        StagingError: keys that cannot be files of one folder, and all that ``ObjectStore`` raises.
    """
    objects, digest = listing or list_dataset(store)
    check_keys([*(obj.key for obj in objects), *OWN_FILES], store.uri)
    checks = dict.fromkeys((obj.key for obj in objects), CACHED)
    nbytes = sum(obj.size for obj in objects)
    facts = {"uri": store.uri, "fingerprint": digest, "nbytes": nbytes}
    marker = json.dumps(facts | ({"links": "hard"} if closed_cache else {})) + "\n"

    with cache.in_use():
        held, to_ask = cache.held(store, objects)
        asking = _Meter(progress if arrived else None, nbytes, len(objects))

        def ask(obj: StoredObject) -> None:
            cache.check_access(store, obj)
            asking.advance(0)  # raises if nobody wants the data any more

        _for_each(to_ask, ask, workers, asking)
        damaged = cache.drop_damaged(store, held)
        missing = sorted({*objects} - {*held} | {*damaged})
        # One that is there and not held was changed where it is, and links lead to it.
        changed = any(os.path.exists(cache.path(store, obj)) for obj in missing)
        if damaged or changed or not _is_staged(destination, marker, objects):
            _check_room(cache, store, missing)
            meter = _Meter(progress, nbytes, len(objects))
            if len(missing) < len(objects):
                there = nbytes - sum(obj.size for obj in missing)
                meter.advance(there, len(objects) - len(missing))
            blobs = {obj.key: cache.path(store, obj) for obj in objects}
            links = _Links(destination, blobs, closed_cache=closed_cache)
            growing = arrived and _Growing(links, {obj.key for obj in missing}, arrived)
            turns = threading.BoundedSemaphore(_LARGE_AT_ONCE)

            def came(obj: StoredObject, checked: str) -> None:
                checks[obj.key] = checked
                if growing:
                    growing.came(obj.key)
                meter.advance(0, files=1)

            def fetch(job: Sequence[StoredObject]) -> None:
                if len(job) > 1:
                    cache.fetch_small(store, job, meter.advance, came)
                    return
                with ExitStack() as held:
                    if growing and job[0].size > PIECE:
                        held.enter_context(_turn(turns, meter))
                    checked = cache.fetch(store, job[0], meter.advance)
                came(job[0], checked)

            jobs = [[obj] for obj in missing] if growing else _jobs(missing, blobs)
            _for_each(jobs, fetch, workers, meter)
            with os_errors(destination):
                if growing:
                    growing.end(marker)
                else:
                    links.place({COMPLETE: marker}, blobs)
        elif arrived:
            arrived(len(objects))

    fetched = sum(check != CACHED for check in checks.values())
    return StagedDataset(
        uri=store.uri,
        files=tuple(StagedFile(o.key, o.size, o.etag, checks[o.key]) for o in objects),
        nbytes=nbytes,
        fingerprint=digest,
        fetched=fetched,
        reused=len(objects) - fetched,
    )


def _jobs(objects: Iterable[StoredObject], blobs: Mapping[str, Path]) -> list[list[StoredObject]]:
    """Large objects each for itself, small ones by their blobs' folders."""
    large, small = [], dict[str, list[StoredObject]]()
    for obj in objects:
        if obj.size <= CHUNK:
            small.setdefault(blobs[obj.key].name[:2], []).append(obj)
        else:
            large.append([obj])
    return [*large, *small.values()]


def _names_folder(key: str) -> bool:
    return not key or key.endswith("/")


def check_stageable(store: ObjectStore, cache: Cache, objects: Sequence[StoredObject]) -> None:
    """Whether these could be staged now. Raises as ``stage`` does, before it fetches anything."""
    check_keys([*(obj.key for obj in objects), *OWN_FILES], store.uri)
    _check_room(cache, store, [obj for obj in objects if not cache.holds(store, obj)])


def _check_room(cache: Cache, store: ObjectSource, missing: Sequence[StoredObject]) -> None:
    needed = sum(obj.size - cache.nbytes_of_parts(store, obj) for obj in missing)
    with os_errors(cache.root, needed):
        cache.root.mkdir(parents=True, exist_ok=True)
        free = free_bytes(cache.root)
    if needed > free:
        raise NoSpace(
            f"{cache.root}: {store.uri} needs {needed:,} bytes, {free:,} are free. Free space "
            "there, run `ddl-airflow clean`, or set the workspace to a larger disk."
        )


def _is_staged(destination: Path, marker: str, listing: Sequence[StoredObject]) -> bool:
    """Whether the folder holds this data, with no blob behind its links lost or cut since."""
    try:
        return (destination / COMPLETE).read_text() == marker and all(
            os.stat(f"{destination}/{obj.key}").st_size == obj.size for obj in listing
        )
    except (FileNotFoundError, NotADirectoryError):
        return False


class _Links:
    """Builds a folder of links beside its place, and renames it there.

    Args:
        destination: the folder.
        blobs: what each link leads to, by key.
        closed_cache: as ``stage`` has it.
    """

    def __init__(self, destination: Path, blobs: Mapping[str, Path], *, closed_cache: bool) -> None:
        self._given, self.blobs, self._closed = destination, blobs, closed_cache
        self._real = functools.cache(os.path.realpath)
        self._between = functools.cache(
            lambda held, inside: os.path.relpath(self._real(held), self.folder / inside)
        )

    @functools.cached_property
    def folder(self) -> Path:
        """Its place, once there is one to put it into."""
        self._given.parent.mkdir(parents=True, exist_ok=True)
        # Links are relative, so that a workspace may be mounted elsewhere in another container.
        return self._given.parent.resolve() / self._given.name

    def place(self, files: Mapping[str, str], keys: Iterable[str]) -> None:
        """The folder, with folders for all keys, files of ours, and links for these keys."""
        fresh = self.folder.with_name(PART_PREFIX + uuid.uuid4().hex)
        try:
            for inside in {"", *(key.rpartition("/")[0] for key in self.blobs)}:
                (fresh / inside).mkdir(parents=True, exist_ok=True)
            for key in keys:
                self.add(key, fresh)
            for name, text in files.items():
                self.write(name, text, fresh)
            if self._closed:  # whose readers have another user, whatever the umask
                for each, _, _ in os.walk(fresh):
                    os.chmod(each, 0o755)  # noqa: S103  # in a run's folder, which is closed
            _place(fresh, self.folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def add(self, key: str, into: Path | None = None) -> None:
        """A link, which is there in one step, in that folder or in its place."""
        held, _, name = str(self.blobs[key]).rpartition("/")
        path = f"{into or self.folder}/{key}"
        if self._closed:
            os.link(f"{self._real(held)}/{name}", path)
        else:
            os.symlink(f"{self._between(held, key.rpartition('/')[0])}/{name}", path)

    def write(self, name: str, text: str, into: Path | None = None) -> None:
        """A file of ours, whole or not at all."""
        path = (into or self.folder) / name
        part = path.with_name(PART_PREFIX + uuid.uuid4().hex)
        part.write_text(text, "utf-8")
        if self._closed:
            part.chmod(0o644)
        part.replace(path)


class _Growing:
    """A folder that is there, and gets its links in the order of the listing.

    Args:
        links: all of them.
        missing: keys of what has to come first.
        arrived: as ``stage`` has it.
    """

    def __init__(self, links: _Links, missing: set[str], arrived: Callable[[int], None]) -> None:
        self._links, self._missing, self._arrived = links, missing, arrived
        self._keys = list(links.blobs)
        self._lock = threading.Lock()
        self._count = self._whole()
        with os_errors(links.folder):
            listing = "".join(f"{json.dumps(key)}\n" for key in self._keys)
            links.place({LISTING: listing}, self._keys[: self._count])
        if self._count:
            arrived(self._count)

    def _whole(self, count: int = 0) -> int:
        """How many there are, from the first on, of which nothing is missing."""
        while count < len(self._keys) and self._keys[count] not in self._missing:
            count += 1
        return count

    def came(self, key: str) -> None:
        """Links it, and what has waited for it; or leaves that to what it has to wait for."""
        with self._lock:
            self._missing.discard(key)
            before, self._count = self._count, self._whole(self._count)
            if before == self._count:
                return
            with os_errors(self._links.folder):
                for each in self._keys[before : self._count]:
                    self._links.add(each)
            self._arrived(self._count)

    def end(self, marker: str) -> None:
        """All are there."""
        self._links.write(COMPLETE, marker)


@contextmanager
def _turn(turns: threading.BoundedSemaphore, meter: _Meter) -> Iterator[None]:
    """Waits for a turn until the meter stops it."""
    while not turns.acquire(timeout=_TURN_S):
        meter.advance(0)
    try:
        yield
    finally:
        turns.release()


def say_failed(destination: Path, why: str, *, closed_cache: bool) -> None:
    """Tells who reads a folder that grows, and waits for more, why nothing more comes."""
    with os_errors(destination):
        _Links(destination, {}, closed_cache=closed_cache).write(FAILED, why)


def _place(fresh: Path, destination: Path) -> None:
    """Renames; data staged there before goes, anything else that is there is left and refused."""
    if any((destination / name).is_file() for name in (COMPLETE, LISTING)):
        old = destination.with_name(PART_PREFIX + uuid.uuid4().hex)
        os.rename(destination, old)
        os.rename(fresh, destination)
        shutil.rmtree(old)
        return
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise StagingError(
            f"{destination} holds files that were not staged. Move them, or stage elsewhere.",
            retryable=False,
        )
    os.rename(fresh, destination)  # over nothing, or over an empty folder


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
    call put is gone; what a killed process leaves has no marker, nobody's publication is in it, and
    its unfinished uploads are ended by the next call that comes to its end.

    The marker is JSON: ``marker``'s fields and ``files``, a list of key, size, sha256 and etag,
    under its own digest (``sealed``).

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
    try:
        stored = _upload(files, digests, target, put, earlier, workers, progress)
        result = tuple(
            PublishedFile(key, size, sha256, stored[key].etag)
            for key, (sha256, size) in sorted(digests.items())
        )
        facts = {**(marker or {}), "files": [asdict(file) for file in result]}
        put.append(SUCCESS)
        target.put_bytes(SUCCESS, sealed(facts))
    except BaseException as exc:  # also a signal that ends the task
        _withdraw(target, put[::-1], exc)  # the marker first
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
            if key in digests and obj.size == digests[key][1]:
                found.append((key, Left(target, obj)))
        try:
            every = list(target.unfinished())
        except StagingError as error:  # not all have the right, and not all services have the call
            _log.info("%s What was left unfinished is not looked for", error)
            every = []
        for one in every:
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


def _key_in_publication(key: str) -> str:
    """The rest of a key that begins with a publication's name; empty: it does not."""
    name, _, rest = key.partition("/")
    return rest if re.fullmatch(PUBLICATION, name) else ""


def publications(target: ObjectStore) -> dict[str, dict[str, Any]]:
    """What was published under a prefix and has its marker: name -> marker, the newest first."""
    return _marked(target, _listed(target))


def _listed(target: ObjectStore) -> list[StoredObject]:
    try:
        return target.list()
    except SourceMissing:  # a folder, that is made when something is published
        return []


def _marked(target: ObjectStore, listed: Iterable[StoredObject]) -> dict[str, dict[str, Any]]:
    marked = [obj for obj in listed if obj.key.endswith(f"/{SUCCESS}") and obj.key.count("/") == 1]
    marked.sort(key=lambda obj: obj.modified, reverse=True)
    names = [obj.key.partition("/")[0] for obj in marked]
    read = {name: _read_marker(target.at(name)) for name in names}
    return {name: marker for name, marker in read.items() if marker}


def missing_from(publication: ObjectStore) -> list[str]:
    """Keys that a publication says it has, and has not, or not as they were put; the marker too.

    Sizes and ETags are compared, nothing is read but the marker.
    """
    marker = _read_marker(publication)
    if not marker:
        return [SUCCESS]
    listed = {obj.key: obj for obj in publication.list()}
    return [
        entry["key"]
        for entry in marker["files"]
        if listed.get(entry["key"]) != StoredObject(entry["key"], entry["size"], entry["etag"])
    ]


def retire(publication: ObjectStore, marked: float) -> None:
    """Takes the marker of a publication, and keeps it for ``restore``.

    Args:
        publication: the place.
        marked: when it got the marker, in seconds since 1970; one that is restored still says so.
    """
    marker = json.loads(publication.read_bytes(SUCCESS)) | {"marked": marked}
    publication.put_bytes(RETIRED, sealed(marker))
    publication.delete([SUCCESS])


def restore(publication: ObjectStore) -> None:
    """Gives a publication back the marker that ``retire`` took, if it did."""
    if publication.exists(SUCCESS):
        return
    with suppress(SourceMissing):  # none was taken, or somebody else has given it back
        publication.put_bytes(SUCCESS, publication.read_bytes(RETIRED))
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

    _for_each(files, read, workers, _Meter(None, 0, 0))
    return digests


def _read_marker(target: ObjectStore) -> dict[str, Any] | None:
    """The marker that lies there: None for none, {} for one that is not ours."""
    if (read := target.read_version(SUCCESS)) is None:  # or it was taken a moment ago
        return None
    try:
        found = json.loads(read[0])
        return found if {"key", "size", "sha256", "etag"} <= set(found["files"][0]) else {}
    except (ValueError, LookupError, TypeError):
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
    meter = _Meter(progress, sum(size for _, size in digests.values()), len(files))
    stored: dict[str, StoredObject] = {}

    def send(key: str) -> None:
        put.append(key)
        sha256, _ = digests[key]
        stored[key] = target.put(files[key], key, sha256, meter.advance, earlier.of(key))
        meter.advance(0, files=1)

    _for_each(files, send, workers, meter)
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
