"""A dataset into a folder: all of it or nothing, through the cache."""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ddl_airflow.core.errors import NoSpace, SourceMissing, StagingError
from ddl_airflow.core.removal import remove_tree
from ddl_airflow.core.selection import ALL, Selection
from ddl_airflow.storage.cache import CACHED, Cache
from ddl_airflow.storage.filesystem import FolderStore, free_bytes, os_errors
from ddl_airflow.storage.fingerprint import fingerprint
from ddl_airflow.storage.store import (
    CHUNK,
    PART_PREFIX,
    PIECE,
    ObjectSource,
    ObjectStore,
    StoredObject,
    check_keys,
)
from ddl_airflow.storage.transfer import Meter, Progress, for_each

COMPLETE = ".complete"  # in a staged folder: what it holds
# In one that still grows, for ``ddl_ops.data``: all keys, one a line; and why the rest never comes.
LISTING, FAILED = ".ddl-listing", ".ddl-failed"
OWN_FILES = (COMPLETE, LISTING, FAILED)
_LARGE_AT_ONCE = 2  # objects of several parts, where the first is waited for
_TURN_S = 0.1
Source = TypeVar("Source", bound=ObjectSource)


@dataclass(frozen=True)
class StagedFile:
    """One file of a staged dataset.

    Attributes:
        key: path inside the folder.
        size: bytes.
        etag: as the store lists it.
        checked: as ``Fetched`` has it, or "cache" if it was there before.
        proved: what was found out of it when it came, as ``Fetched`` has it.
    """

    key: str
    size: int
    etag: str
    checked: str
    proved: Mapping[str, Any] = field(default_factory=dict, compare=False)


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
    return dataset_of(store, readable(store, selection).list(), selection, warn)


def readable(store: Source, selection: Selection) -> Source:
    """A store that can be listed though some of its files cannot, if the selection leaves these
    out: ``lost+found`` at the top of a disk is root's alone.
    """
    return store.selecting(selection) if isinstance(store, FolderStore) else store


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
        SourceMissing: no such bucket or folder, or nothing in it; or, and another try may help, an
            object went since it was listed.
        NoSpace: the cache's disk has less room than there is to fetch; nothing was fetched then.
        StagingError: keys that cannot be files of one folder, and all that ``ObjectStore`` raises.
    """
    objects, digest = listing or list_dataset(store)
    _check_keys(store, objects)
    checks = dict.fromkeys((obj.key for obj in objects), CACHED)
    nbytes = sum(obj.size for obj in objects)
    facts = {"uri": store.uri, "fingerprint": digest, "nbytes": nbytes}
    marker = json.dumps(facts | ({"links": "hard"} if closed_cache else {})) + "\n"

    asking = Meter(progress if arrived else None, nbytes, len(objects))
    with cache.in_use(waiting=lambda: asking.advance(0)):
        held, to_ask = cache.held(store, objects)

        def ask(obj: StoredObject) -> None:
            cache.check_access(store, obj)
            asking.advance(0)  # raises if nobody wants the data any more

        for_each(to_ask, ask, workers, asking)
        damaged = cache.drop_damaged(store, [*held])
        missing = sorted({*objects} - {*held} | {*damaged})
        blobs = {obj.key: cache.path(store, obj) for obj in objects}
        # What is not held may still be there, changed, behind a link; or under its hard link alone.
        if missing or not _is_staged(destination, marker, objects, blobs if closed_cache else None):
            _check_room(cache, store, missing)
            meter = Meter(progress, nbytes, len(objects))
            if len(missing) < len(objects):
                there = nbytes - sum(obj.size for obj in missing)
                meter.advance(there, len(objects) - len(missing))
            links = _Links(destination, blobs, closed_cache=closed_cache)
            growing = arrived and _Growing(links, {obj.key for obj in missing}, arrived)
            turns = threading.BoundedSemaphore(_LARGE_AT_ONCE)

            def came(obj: StoredObject, checked: str) -> None:
                checks[obj.key] = checked
                if growing:
                    growing.came(obj.key)
                meter.advance(0, files=1)

            def fetch(job: Sequence[StoredObject]) -> None:
                if not growing and job[0].size <= CHUNK:  # one, too: removes what was left there
                    cache.fetch_small(store, job, meter.advance, came)
                    return
                with ExitStack() as held:
                    if growing and job[0].size > PIECE:
                        held.enter_context(_turn(turns, meter))
                    checked = cache.fetch(store, job[0], meter.advance)
                came(job[0], checked)

            jobs = [[obj] for obj in missing] if growing else _jobs(missing, blobs)
            for_each(jobs, fetch, workers, meter)
            with os_errors(destination):
                if growing:
                    growing.end(marker)
                else:
                    links.place({COMPLETE: marker}, blobs)
        elif arrived:
            arrived(len(objects))
        proved = held | {obj: cache.proved(store, obj) for obj in missing}

    fetched = sum(check != CACHED for check in checks.values())
    return StagedDataset(
        uri=store.uri,
        files=tuple(StagedFile(o.key, o.size, o.etag, checks[o.key], proved[o]) for o in objects),
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
    _check_keys(store, objects)
    _check_room(cache, store, [obj for obj in objects if not cache.holds(store, obj)])


def _check_keys(store: ObjectSource, objects: Sequence[StoredObject]) -> None:
    keys = [obj.key for obj in objects]
    if own := next((key for key in keys if key in OWN_FILES), None):
        raise StagingError(
            f"{store.uri}: key {own!r} has the name of a file of ours in the staged folder. Rename "
            "or remove the object, or leave it out by training_data_reference.exclude.",
            retryable=False,
        )
    check_keys([*keys, *OWN_FILES], store.uri)


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


def _is_staged(
    destination: Path,
    marker: str,
    listing: Sequence[StoredObject],
    same_as: Mapping[str, Path] | None,
) -> bool:
    """Whether the folder holds this data, with no blob behind its links lost or cut since.

    Args:
        destination, marker: the folder, and what its marker says then.
        listing: the data.
        same_as: by key, the blobs of which the files are hard links; None: they are symbolic ones.
    """
    try:
        if (destination / COMPLETE).read_text() != marker:
            return False
        for obj in listing:
            found = os.stat(f"{destination}/{obj.key}")
            if found.st_size != obj.size:
                return False
            # A hard link keeps a damaged blob that was removed, or replaced, since.
            if same_as is not None and not os.path.samestat(found, os.stat(same_as[obj.key])):
                return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


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
def _turn(turns: threading.BoundedSemaphore, meter: Meter) -> Iterator[None]:
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
        remove_tree(old)
        return
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise StagingError(
            f"{destination} holds files that were not staged. Move them, or stage elsewhere.",
            retryable=False,
        )
    os.rename(fresh, destination)  # over nothing, or over an empty folder
