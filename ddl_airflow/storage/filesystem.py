"""Objects as files of a folder, and what the operating system's errors mean."""

from __future__ import annotations

import builtins
import copy
import errno
import fcntl
import hashlib
import json
import logging
import os
import pwd
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import unquote

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import (
    AccessDenied,
    ConnectionInvalid,
    FileChanged,
    NoSpace,
    PlaceTaken,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.core.real_path import place_of
from ddl_airflow.core.selection import ALL, Selection
from ddl_airflow.storage.fingerprint import Digest, Parts
from ddl_airflow.storage.links import Names
from ddl_airflow.storage.store import (
    CHUNK,
    PART_PREFIX,
    PIECE,
    Access,
    Advance,
    Fetched,
    Left,
    StoredObject,
    Unfinished,
    check_keys,
)

_log = logging.getLogger(__name__)
_LOOK_S = 0.1
_MOST_OF_A_NAME = 1000
_LONGEST_NAME = 255  # of a file, in bytes
_MOST_REMOVED = 100  # times that a folder goes between being made and being written to
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_NO_LINKS = (errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)  # of a file, in its folder
_LOCK_PREFIX = f"{PART_PREFIX}lock-"
_LEAVE_OUT = "Remove it. In data, training_data_reference.exclude can leave it out."
_TO_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
# Far longer than to replace a small file takes.
_REPLACED_S = 60.0


@contextmanager
def os_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Turns every OSError into a StagingError that names its file, or else ``path``.

    Args:
        path: what is being read or written.
        needed: bytes that are about to be written.
    """
    try:
        yield
    except OSError as exc:
        full = exc.errno in DISK_FULL
        # Of a copy, a link or a rename: the first is what there is already.
        name = exc.filename2 if full and exc.filename2 is not None else exc.filename
        # What was opened beneath a descriptor is named by its last part alone.
        where = Path(name) if isinstance(name, str) and os.path.isabs(name) else path
        if exc.errno == errno.ENOSPC and _lacks_inodes(where):
            raise NoSpace(
                f"{where}: {exc.strerror}: no more names (inodes) are free. Remove files there, or "
                "use a disk with more of them."
            ) from exc
        if full:
            wanted = f"{needed:,} bytes to write, " if needed else ""
            raise NoSpace(
                f"{where}: {exc.strerror}: {wanted}{free_bytes(where):,} bytes free. "
                "Free space there, raise the quota or limit, or use a larger disk."
            ) from exc
        if exc.errno in (errno.ENOENT, errno.ENOTDIR):
            raise SourceMissing(
                f"{where}: {exc.strerror}. Create it, or correct the path."
            ) from exc
        if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise AccessDenied(
                f"{where}: {exc.strerror}. Let user id {os.geteuid()} read and write there."
            ) from exc
        raise StagingError(f"{where}: {exc.strerror or exc}") from exc


def lock_of(folder: Path) -> Path:
    """The file that ``alone_in`` locks, and others who know it."""
    most = _LONGEST_NAME - len("." + ".lock")
    # The end of a training's id tells it from others; not so its beginning.
    name = os.fsdecode(os.fsencode(folder.name)[-most:])
    return folder.parent / f".{name}.lock"


@contextmanager
def alone_in(
    folder: Path, who: str, wait_s: float = 0.0, *, makes_room: bool = False
) -> Iterator[int]:
    """Keeps others, who ask in the same way, out of a folder.

    Yields a file descriptor. A process that inherits it keeps them out as well, for as long as it
    lives, also when the one that asked has died.

    Args:
        folder: need not exist.
        who: asks; what others are told.
        wait_s: for whoever is in it to leave.
        makes_room: others are not told who it is where the disk is too full for a name.

    Raises:
        PlaceTaken: somebody is in it, on this host or another that shares the file system.
        StagingError: the file system has no locks, or no room.
    """
    with os_errors(folder):
        path = lock_of(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        # A link there would have another file truncated below. Others have no business in it.
        opened = open_beneath(path, path.parent, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with open(opened, "a+b", buffering=0) as lock:
        deadline = time.monotonic() + wait_s
        while not _locked(lock.fileno(), path):
            if time.monotonic() > deadline:
                holder = _holder(lock.fileno())
                raise PlaceTaken(
                    f"{folder}: another training works there now: {holder}. Wait for its end, or "
                    "end what is left of it on that host; for an experiment, choose another "
                    "experiment_id.",
                    holder=holder,
                )
            time.sleep(_LOOK_S)
        lock.truncate(0)
        text = f"{who} on {socket.gethostname()}".encode()
        with suppress(*[NoSpace] if makes_room else []), os_errors(path):
            while text:
                text = text[lock.write(text) :]
        yield lock.fileno()


def holder_of(folder: Path) -> str:
    """Who is in a folder, as ``alone_in`` keeps others out of it; empty: nobody.

    Raises:
        FileNotFoundError: nobody ever was.
        StagingError: the file system has no locks.
    """
    path = lock_of(folder)
    lock = open_beneath(path, path.parent)
    try:
        # Shared: of several that only look none is in the way of another.
        return "" if _locked(lock, path, fcntl.LOCK_SH) else _holder(lock)
    finally:
        os.close(lock)


def _holder(lock: int) -> str:
    return os.pread(lock, _MOST_OF_A_NAME, 0).decode("utf-8", "replace").strip() or "unknown"


def _locked(descriptor: int, path: Path, how: int = fcntl.LOCK_EX) -> bool:
    try:
        return _took_lock(descriptor, how)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise StagingError(
                f"{path}: {error.strerror}. The file system locks no files for this host. Mount "
                "the workspace with locks, else two trainings could work in one place.",
                retryable=False,
            ) from error
        raise


def _write(writer: BinaryIO, body: bytes) -> None:
    writer.write(body)
    writer.flush()
    os.fsync(writer.fileno())


def _share(file: int, folder: int) -> None:
    """Gives a new file to those who may replace what is in the folder, whatever the umask."""
    mode = os.fstat(folder).st_mode
    wanted = 0 if mode & stat.S_ISVTX else mode & (stat.S_IWGRP | stat.S_IWOTH)
    _give(file, folder, wanted | wanted << 1)  # to read it, too


def _share_folder(made: int, folder: int) -> None:
    """Opens a new folder to those to whom the one that it is in is open, whatever the umask."""
    mode = os.fstat(folder).st_mode
    wanted = mode & (stat.S_IRWXG | stat.S_IRWXO)
    if mode & stat.S_ISVTX:  # there each may remove no more than what is their own
        wanted &= ~(stat.S_IWGRP | stat.S_IWOTH)
    _give(made, folder, wanted)


def _give(made: int, folder: int, wanted: int) -> None:
    """Gives what is new to owner and group of the folder, as far as that is permitted.

    Args:
        made: its descriptor.
        folder: the descriptor of the folder that it is in.
        wanted: bits of its mode, for group and others.
    """
    above, found = os.fstat(folder), os.fstat(made)
    if found.st_uid != os.geteuid():
        return
    if found.st_gid != above.st_gid:
        try:
            os.fchown(made, -1, above.st_gid)
        except OSError:  # another group is none but others, and no less
            wanted &= stat.S_IRWXO
            wanted |= wanted << 3
    if wanted & ~found.st_mode:
        with suppress(OSError):
            os.fchmod(made, stat.S_IMODE(found.st_mode) | wanted)
    if found.st_uid != above.st_uid:
        with suppress(OSError):  # only root may give what it has made to the folder's owner
            os.fchown(made, above.st_uid, -1)


def _make_folder(name: str, folder: int) -> None:
    """Makes a folder in another one, which is seen once it has its rights: from these the files
    that others put there meanwhile have theirs.
    """
    part = PART_PREFIX + uuid.uuid4().hex
    os.mkdir(part, dir_fd=folder)
    try:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        made = os.open(part, flags, dir_fd=folder)
        try:
            _share_folder(made, folder)
        finally:
            os.close(made)
        # Takes the place of an empty one that another process has just made: see _made_in.
        os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:  # it is there; or the file system renames no folders
        with suppress(FileNotFoundError):
            os.rmdir(part, dir_fd=folder)
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)


def _keep_access(file: int, name: str, folder: int) -> None:
    """Lets those use a file who may use the one that it is to replace: whoever changes a pointer
    may be root, or have the umask 077.
    """
    try:
        before = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        before = None
    if before is None or not stat.S_ISREG(before.st_mode):
        _share(file, folder)
        return
    # As far as that is permitted. One who may not give it away may still have its group.
    for user, group in ((-1, before.st_gid), (before.st_uid, -1)):
        with suppress(OSError):
            os.fchown(file, user, group)
    with suppress(OSError):
        os.fchmod(file, before.st_mode & 0o777)


def _is_called(lock: int, name: str, folder: int) -> bool:
    """Whether nobody has removed the file since it was opened: another would lock another one."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        return os.path.samestat(os.fstat(lock), found)
    except OSError:
        return False


def _unlink_lock(name: str, folder: int) -> None:
    """Removes a lock that nobody holds."""
    with suppress(OSError):
        lock = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            if _took_lock(lock) and _is_called(lock, name, folder):
                os.unlink(name, dir_fd=folder)
        finally:
            os.close(lock)


def _took_lock(descriptor: int, how: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def paths_below(folder: Path) -> Iterator[Path]:
    """All that is below a folder and is no folder itself, in the order of names.

    A folder that may not be read is there itself, in place of what is in it. No link is followed.
    Takes as many levels as a file system has, which ``Path.rglob`` and ``os.walk`` do not: they
    recurse.
    """
    waiting = [folder]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(here) as found:
                entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
        except FileNotFoundError:
            continue  # it was here a moment ago
        except PermissionError:
            yield here
            continue
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield here / entry.name
        waiting += [here / one.name for one in entries[::-1] if one.is_dir(follow_symlinks=False)]


def why_private(path: Path) -> str:
    """Why what a training left may not be read, and what to do: ranks of another user have made it
    for themselves alone, as Python's ``tempfile`` does, whatever the umask.
    """
    try:
        found = os.lstat(path)
    except PermissionError:
        return "its folder may not be entered. Let its group enter it (chmod g+x), or remove it"
    try:
        user = pwd.getpwuid(found.st_uid).pw_name
    except KeyError:
        user = f"id {found.st_uid}"
    right = "g+rx" if stat.S_ISDIR(found.st_mode) else "g+r"
    return f"only user {user} may read it. Let its group read it (chmod {right}), or remove it"


def free_bytes(path: Path) -> int:
    """Bytes that may be written where ``path`` is or will be."""
    return shutil.disk_usage(_that_exists(path)).free


def _lacks_inodes(path: Path) -> bool:
    """Whether no file can be made where ``path`` is or will be, however many bytes are free."""
    with suppress(OSError):
        found = os.statvfs(_that_exists(path))
        # Some file systems have no such number, and ZFS makes it of the bytes that are free.
        return found.f_files > 0 and found.f_favail == 0 and found.f_bavail > 0
    return False


def _that_exists(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


class FolderStore:
    """Files under ``path/prefix``. Links to files and folders are followed.

    A file counts as unchanged while its time of change and size are the same.

    Args:
        path: the folder.
        prefix: what is under it.
        within: folders out of which no link is followed, also one that is put there meanwhile:
            what is opened is looked at, and not its name alone. Empty: the folder itself. None:
            every link is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        prefix: str = "",
        within: Sequence[Path] | None = None,
    ) -> None:
        # Not resolved: the user's own name for the folder is what messages and lineage show.
        self.path = Path(os.path.abspath(path))
        self.prefix = prefix.strip("/")
        if self.prefix:
            check_keys([self.prefix], self.path.as_uri())
        self._root = self.path / self.prefix
        self._within = [self.path.resolve()] if within is not None and not within else within
        self._selection = ALL
        self._passed_over: frozenset[Path] = frozenset()
        self._names: Names | None = None
        self._told_of_links: Callable[[Path, Path], object] | None = None
        self.uri = self._root.as_uri()

    @classmethod
    def opened(cls, uri: str, access: Access) -> FolderStore:
        """The files of ``file:///folder``. Raises ConnectionInvalid if the path is not absolute."""
        path = uri.removeprefix("file://")
        if not path.startswith("/"):
            raise ConnectionInvalid(f"{uri!r} names no store. Write file:///path")
        return cls(Path(unquote(path)), within=access.within)

    @classmethod
    def client_of_environment(cls) -> None:
        """None: a folder is opened by nobody's keys."""

    @classmethod
    def access_by(cls, connection: AirflowConnection) -> Access:
        """Raises ConnectionInvalid: likewise."""
        raise ConnectionInvalid(
            f"connection {connection.conn_id!r}: a folder is opened by none. Leave it out."
        )

    def at(self, prefix: str) -> FolderStore:
        """The store of a folder inside this one."""
        return FolderStore(self.path, f"{self.prefix}/{prefix}", self._within)

    def selecting(self, selection: Selection) -> Self:
        """The same files, of which those that are left out need not be readable, nor be files."""
        store = copy.copy(self)
        store._selection = selection
        return store

    def private(self) -> list[str]:
        """Names of the folders here that may not be read."""
        with os_errors(self._root), os.scandir(self._root) as found:
            return sorted(
                one.name
                for one in found
                if one.is_dir() and not os.access(one.path, os.R_OK | os.X_OK, effective_ids=True)
            )

    def without(self, folders: Iterable[str]) -> Self:
        """The same files, but for those in folders here."""
        store = copy.copy(self)
        store._passed_over = frozenset(self._root / name for name in folders)
        return store

    def once(self, place: re.Pattern[str], told: Callable[[Path, Path], object]) -> Self:
        """The same files, of which what is at certain places is listed under one name.

        A link to a folder in here is passed over, unless nothing else gives what is there a place.

        Args:
            place: of keys, what ``Names`` has.
            told: is called with each link that is passed over, and where it leads, also if nothing
                is there.
        """
        store = copy.copy(self)
        store._names, store._told_of_links = Names(self._root, place), told
        return store

    def own_key(self, key: str, place: re.Pattern[str]) -> str:
        """The key under which ``once`` lists what has this one; the same, if it has no other."""
        names = Names(self._root, place)
        with suppress(StagingError):  # it may be a person's, or a damaged file's
            # Not ``Path.resolve``, which refuses links in a circle.
            real = Path(os.path.realpath(self._path(key)))
            if names.holds(real):
                return names.of(real) or key
        return key

    def last_change(self, key: str) -> float:
        """When a file, or with "" what is in the folder itself, came to be as it is, in seconds
        since 1970: a copy that has the time of its original did so when it was made. 0: it is gone.
        """
        path = self._path(key) if key else self._root
        with os_errors(path), suppress(FileNotFoundError):
            found = os.lstat(path)
            return max(found.st_mtime, found.st_ctime)
        return 0.0

    def check_writable(self) -> None:
        """Looks whether files could be put here, or where the folder would be made.

        Raises:
            AccessDenied: a file stands in its place, or nothing may be written there.
        """
        place = self._root
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            why = "is no folder. Move it away, or give another place"
        elif os.access(place, os.W_OK | os.X_OK):
            return
        elif os.statvfs(place).f_flag & os.ST_RDONLY:
            why = "is mounted read-only. Mount it for writing, or give another place"
        else:
            why = f"may not be written to. Let user id {os.getuid()} write there"
        where = "" if place == self._root else f"{self._root} cannot be made: "
        raise AccessDenied(f"{where}{place} {why}.")

    def list(self) -> list[StoredObject]:
        """All files below, sorted by key."""
        with os_errors(self._root):
            return sorted(self._walk(self._root, frozenset()), key=attrgetter("key"))

    def list_unless(self, digest: str) -> tuple[str, builtins.list[StoredObject] | None]:
        """All files: nothing but they themselves says whether they have changed."""
        return "", self.list()

    def names(self) -> builtins.list[str]:
        """Names of the files and folders here; a folder may be empty."""
        with os_errors(self._root):
            return sorted(
                name for name in os.listdir(self._root) if not name.startswith(PART_PREFIX)
            )

    def _walk(self, folder: Path, parents: frozenset[Path]) -> Iterator[StoredObject]:
        here = folder.resolve()
        self._check_within(folder, here)
        if here in parents:
            raise StagingError(
                f"{folder} links to a folder above itself. Remove the link.", retryable=False
            )
        for path in folder.iterdir():
            if path in self._passed_over:
                continue
            try:
                if path.is_dir():
                    if not self._is_another_name(path):
                        yield from self._walk(path, parents | {here})
                elif not path.name.startswith(PART_PREFIX):
                    self._check_within(path)
                    yield self._object(path.relative_to(self._root).as_posix(), path.stat())
            except (OSError, StagingError) as error:
                if isinstance(error, FileNotFoundError) and not os.path.lexists(path):
                    continue  # it was here a moment ago
                if self._is_left_out(path, error):
                    continue
                if isinstance(error, FileNotFoundError) and path.is_symlink():
                    if self._is_another_name(path):
                        continue
                    raise SourceMissing(
                        f"{path} is a link to {os.readlink(path)}, which is not there. {_LEAVE_OUT}"
                    ) from error
                raise

    def _is_another_name(self, path: Path) -> bool:
        """Whether it is a link to a folder in here, there or gone, that counts by another name."""
        if self._names is None or not path.is_symlink():
            return False
        real = Path(os.path.realpath(path))
        if not self._names.holds(real):
            return False
        if path.is_dir() and self._names.of(real) == path.relative_to(self._root).as_posix():
            return False
        if self._told_of_links is not None:
            self._told_of_links(path, real)
        return True

    def _is_left_out(self, path: Path, error: Exception) -> bool:
        key = path.relative_to(self._root).as_posix()
        # What may not be looked at may be a folder.
        if isinstance(error, PermissionError) or os.path.isdir(path):
            return self._selection.leaves_out_below(key)
        return self._selection.leaves_out(key)

    def _check_within(self, path: Path, real: Path | None = None) -> None:
        if self._within is None:
            return
        real = Path(os.path.realpath(path)) if real is None else real  # also of links in a circle
        if not any(real.is_relative_to(folder) for folder in self._within):
            raise StagingError(
                f"{path} leads to {real}, out of {', '.join(map(str, self._within))}. Put there "
                "what it leads to; or, for manifests, list that in [ddl] manifest_rights.",
                retryable=False,
            )

    def _opened(self, path: Path) -> int:
        """A descriptor of a regular file, to be read."""
        opened = os.open(path, _TO_READ)
        try:
            self._check_within(path, place_of(opened))
            self._object(path.relative_to(self._root).as_posix(), os.fstat(opened))
        except BaseException:
            os.close(opened)
            raise
        return opened

    @contextmanager
    def _folder(self, path: Path, *, make: bool = False) -> Iterator[int]:
        """Yields a descriptor of a folder, for what is done in it by name.

        Args:
            path: the folder.
            make: it and those above, if they are not there.
        """
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        folder = os.open(path.anchor if make else path, flags)
        try:
            for depth, part in enumerate(path.parts[1:] if make else (), 2):
                try:
                    deeper = os.open(part, flags, dir_fd=folder)
                except FileNotFoundError:
                    self._check_within(path, place_of(folder) / part)
                    if depth > len(self.path.parts):
                        _make_folder(part, folder)
                    else:  # the place itself is whose it is who makes it
                        with suppress(FileExistsError):
                            os.mkdir(part, dir_fd=folder)
                    deeper = os.open(part, flags, dir_fd=folder)
                os.close(folder)
                folder = deeper
            self._check_within(path, place_of(folder))
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def _made_in(self, folder: Path, name: str, flags: int) -> Iterator[tuple[int, BinaryIO]]:
        """Yields a descriptor of a folder, made if it is not there, and a file opened in it.

        Others may remove the folder while it is empty: from then on it is not.
        """
        for tries in count():
            with ExitStack() as held:
                try:
                    here = held.enter_context(self._folder(folder, make=True))
                    opened = os.open(name, flags | os.O_CREAT | os.O_CLOEXEC, 0o666, dir_fd=here)
                except FileNotFoundError:
                    if tries == _MOST_REMOVED:
                        raise
                    continue
                with open(opened, "wb") as file:
                    yield here, file
                return

    def _object(self, key: str, found: os.stat_result) -> StoredObject:
        if not stat.S_ISREG(found.st_mode):
            raise StagingError(f"{self._root / key} is no file. {_LEAVE_OUT}", retryable=False)
        etag = f"{found.st_mtime_ns:x}-{found.st_size:x}"
        return StoredObject(key, found.st_size, etag, found.st_mtime)

    def _path(self, key: str) -> Path:
        check_keys([key], self.uri)
        return self._root / key

    def identity(self, obj: StoredObject) -> str:
        """Path, time of change and size."""
        return json.dumps(["file", str(self._root.resolve() / obj.key), obj.etag, obj.size])

    @property
    def resolved_uri(self) -> str:
        """Where its links lead."""
        return self._root.resolve().as_uri()

    @property
    def endpoint(self) -> str:
        """Empty: the host's own file system has none."""
        return ""

    @property
    def caller(self) -> str:
        """Nobody is told apart: asking costs nothing."""
        return ""

    def check_access(self, obj: StoredObject) -> None:
        """Asks the operating system."""
        path = self._path(obj.key)
        with os_errors(path):
            os.close(self._opened(path))

    @property
    def resumes(self) -> bool:
        """A copy is begun anew."""
        return False

    def get(self, obj: StoredObject, path: Path, advance: Advance) -> Fetched:
        """A copy: a link would let a later edit of the file change what was staged."""
        pieces = Parts(PIECE, hashlib.sha256)
        with os_errors(path, obj.size), self._reading(obj) as reader, open(path, "xb") as writer:
            _copy(reader, writer, pieces, advance)
        return Fetched("size", [digest.hex() for digest in pieces.digests()])

    def read(self, obj: StoredObject, take: Callable[[bytes], object]) -> str:
        """The same, and nothing is written."""
        with os_errors(self._path(obj.key)), self._reading(obj) as reader:
            while chunk := reader.read(CHUNK):
                take(chunk)
        return "size"

    @contextmanager
    def _reading(self, obj: StoredObject) -> Iterator[BinaryIO]:
        """Yields the open file, which is to be read to its end, and then looks whether it is the
        one that was listed.
        """
        source = self._path(obj.key)
        with open(self._opened(source), "rb") as reader:
            yield reader
            found = self._object(obj.key, _stat_anew(reader.fileno(), source))
            if found != obj or reader.tell() != obj.size:
                raise TransferCorrupt(
                    f"{source} changed while it was read. Try again when it is complete."
                )

    def put(
        self, path: Path, key: str, sha256: str, advance: Advance, left: Sequence[Left] = ()
    ) -> StoredObject:
        """Copies under another name in the same folder, then renames."""

        def write(writer: BinaryIO) -> None:
            digest = hashlib.sha256()
            _copy(reader, writer, digest, advance)
            if digest.hexdigest() != sha256:
                raise FileChanged(f"{path} changed while it was copied to {self.uri}/{key}")

        with os_errors(path), open(path, "rb") as reader:
            return self._place(key, os.fstat(reader.fileno()).st_size, write)

    def put_bytes(self, key: str, body: bytes) -> StoredObject:
        """Writes under another name in the same folder, then renames."""

        return self._place(key, len(body), partial(_write, body=body))

    def _place(self, key: str, needed: int, write: Callable[[BinaryIO], None]) -> StoredObject:
        final = self._path(key)
        with self._part_of(final, needed) as (folder, part, writer):
            write(writer)
            made = os.fstat(writer.fileno())
            writer.close()
            try:
                os.replace(part, final.name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileNotFoundError:
                # NFS may do it, lose the answer and be asked again.
                there = os.stat(final.name, dir_fd=folder, follow_symlinks=False)
                if not os.path.samestat(made, there):
                    raise
            found = os.stat(final.name, dir_fd=folder, follow_symlinks=False)
        return self._object(key, found)

    @contextmanager
    def _part_of(self, final: Path, needed: int) -> Iterator[tuple[int, str, BinaryIO]]:
        """Yields the folder, and name and writer of a new file in it that goes in the end."""
        part = PART_PREFIX + uuid.uuid4().hex
        opened = self._made_in(final.parent, part, os.O_WRONLY | os.O_EXCL)
        with os_errors(final, needed), opened as (folder, writer):
            try:
                _keep_access(writer.fileno(), final.name, folder)
                yield folder, part, writer
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(part, dir_fd=folder)

    def read_bytes(self, key: str) -> bytes:
        """A file's content."""
        path = self._path(key)
        with os_errors(path), open(self._opened(path), "rb") as file:
            return file.read()

    def read_version(self, key: str) -> tuple[bytes, str] | None:
        """A file's content and its SHA-256."""
        try:
            body = self.read_bytes(key)
        except SourceMissing as missing:
            if isinstance(missing.__cause__, FileNotFoundError):
                return None
            raise
        return body, hashlib.sha256(body).hexdigest()

    def put_if(self, key: str, body: bytes, version: str | None) -> bool:
        """Links what is new to its name, which fails if there is one; compares and replaces while a
        lock file beside it is held, on all hosts that lock.
        """
        path = self._path(key)
        if version is None and (done := self._put_new(key, body)) is not None:
            return done
        with self._replacing(path):
            now = self.read_version(key)
            if (now and now[1]) != version:
                return False
            self.put_bytes(key, body)
            return True

    def _put_new(self, key: str, body: bytes) -> bool | None:
        """Whether it was not there; None: links do not tell."""
        path = self._path(key)
        with self._part_of(path, len(body)) as (folder, part, writer):
            try:
                _write(writer, body)
                os.link(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except FileExistsError:
                # NFS may do it, lose the answer and be asked again.
                if os.fstat(writer.fileno()).st_nlink > 1:
                    return True
                return None if self.read_version(key) is None else False  # a link to nowhere
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return None
        return True

    @contextmanager
    def _replacing(self, path: Path) -> Iterator[None]:
        """Holds the lock file beside it."""
        name = _LOCK_PREFIX + path.name
        for _ in range(_MOST_REMOVED):
            with self._opened_lock(path.with_name(name)) as (folder, lock):
                with os_errors(path.with_name(name)):
                    self._wait_for(lock, path)
                if _is_called(lock, name, folder):
                    yield
                    return
        raise StagingError(f"{path} is removed again and again. See who does that.")

    @contextmanager
    def _opened_lock(self, path: Path) -> Iterator[tuple[int, int]]:
        """Yields descriptors of the folder and of the file."""
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        with ExitStack() as held:
            with os_errors(path):
                try:
                    opened = self._made_in(path.parent, path.name, os.O_WRONLY | flags)
                    folder, lock = held.enter_context(opened)
                except PermissionError:  # another's, of an earlier version of ours
                    opened = self._made_in(path.parent, path.name, os.O_RDONLY | flags)
                    folder, lock = held.enter_context(opened)
            _share(lock.fileno(), folder)
            yield folder, lock.fileno()

    def _wait_for(self, lock: int, path: Path) -> None:
        deadline = time.monotonic() + _REPLACED_S
        try:
            while not _took_lock(lock):
                if time.monotonic() > deadline:
                    raise StagingError(
                        f"{path}: another process has been replacing it for {_REPLACED_S:.0f} s. "
                        "See which one hangs there, and end it."
                    )
                time.sleep(_LOOK_S / 10)
        except OSError as error:
            if error.errno == errno.EBADF:  # NFS locks what one may write, and nothing else
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None
            if error.errno == errno.ESTALE:  # removed on another host
                return
            if error.errno not in _NO_LOCKS:
                raise
            _log.warning(
                "%s: the file system locks no files for this host: of two processes that change "
                "it at the same moment, one may be lost",
                path,
            )

    def exists(self, key: str) -> bool:
        """Whether there is such a file."""
        return self._path(key).is_file()

    def delete(self, keys: Iterable[str]) -> None:
        """Removes files, and the folders inside the store that become empty."""
        for key in keys:
            path = self._path(key)
            with os_errors(path):
                with suppress(FileNotFoundError), self._folder(path.parent) as folder:
                    os.unlink(path.name, dir_fd=folder)
                    _unlink_lock(_LOCK_PREFIX + path.name, folder)
                for empty in path.parents:
                    if empty == self.path or not self._removed(empty):
                        break

    def _removed(self, folder: Path) -> bool:
        """Removes a folder if there is nothing in it; whether it is gone."""
        try:
            with self._folder(folder.parent) as above:
                os.rmdir(folder.name, dir_fd=above)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # the last: a link
                return False
            raise
        return True

    def unfinished(self) -> Iterator[Unfinished]:
        """Files that are being written beside their place, or were when somebody was killed."""
        with os_errors(self._root):
            for path in self._root.rglob(f"{PART_PREFIX}*"):
                if re.fullmatch("[0-9a-f]{32}", path.name.removeprefix(PART_PREFIX)):
                    said, key = path.stat(), path.relative_to(self._root).as_posix()
                    yield Unfinished(key, said.st_mtime, said.st_size, path.name)

    def discard(self, one: Unfinished) -> None:
        """Removes the file, and the folders inside the store that become empty."""
        path = self._path(one.key)
        with os_errors(path):
            self._removed(path)  # if it is a folder that was being made
        self.delete([one.key])


def _stat_anew(opened: int, path: Path) -> os.stat_result:
    """What an open file is now, also where another host has written to it: NFS asks the server when
    a file is opened, and goes by what it was told then while it is open.
    """
    with suppress(OSError):  # removed, or replaced: what is open has not changed by that
        again = os.open(path, _TO_READ)
        try:
            found = os.fstat(again)
        finally:
            os.close(again)
        if os.path.samestat(found, os.fstat(opened)):
            return found
    return os.fstat(opened)


def _copy(reader: BinaryIO, writer: BinaryIO, digest: Digest, advance: Advance) -> None:
    """Copies, and flushes to disk; ``digest`` gets what was read."""
    while chunk := reader.read(CHUNK):
        writer.write(chunk)
        digest.update(chunk)
        advance(len(chunk))
    writer.flush()
    os.fsync(writer.fileno())
