"""Opens what trainings leave, and nothing else.

A training may put links, pipes or another's file where Airflow looks for its own. So no link is
followed beneath a run's folder, and only regular files of the expected owner are opened. Of the
folder itself and what is above it, which are the site's, links are followed.

Source: openat(2), O_NOFOLLOW; the walk is what ``openat2`` does with RESOLVE_BENEATH and
RESOLVE_NO_SYMLINKS, which not all kernels and file systems have.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ddl_airflow.core.errors import FileRefused

_MOST_BYTES = 16 * 2**20
# Of a folder that ranks write as another user: theirs by its group.
SHARED = 0o2770
_NO_FILE = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR, errno.ENAMETOOLONG)


def open_beneath(path: Path, root: Path, flags: int = os.O_RDONLY, mode: int = 0o666) -> int:
    """Returns a descriptor of a regular file.

    Args:
        path: the file, below root.
        root: a folder; no link beneath it is followed.
        flags, mode: as ``os.open`` has them.

    Raises:
        FileRefused: a part of the path is a link, or no folder; or the file is not regular; or it
            is neither of its folder's or root's owner nor of this process's user. In a folder that
            ranks write as another user, or have made: or it is not theirs.
        OSError: as ``os.open``.
    """
    with _folder_of(path, root) as folder, _refusing(path):
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path.name, flags, mode, dir_fd=folder)
        of, site = os.fstat(folder), os.stat(root)
    found = os.fstat(descriptor)
    ours = {os.geteuid(), site.st_uid}
    if of.st_uid not in ours:
        # Where Airflow's tasks run as users of their own, a run's folders are such a user's.
        belongs = found.st_uid == of.st_uid
    elif of.st_mode & stat.S_ISGID:
        # What is linked there from elsewhere (link(2)) keeps its group.
        belongs = found.st_gid == of.st_gid
    else:
        belongs = found.st_uid in ours
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise FileRefused(f"{path} is no regular file. Nothing else is read there: remove it.")
    if not belongs:
        os.close(descriptor)
        raise FileRefused(
            f"{path} belongs to user id {found.st_uid}, group id {found.st_gid}, and its folder "
            "to another. Copy it there."
        )
    return descriptor


def read_beneath(path: Path, root: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Returns a file's content.

    Raises:
        FileRefused: as ``open_beneath``, or it is larger than ``most_bytes``.
        OSError: as ``os.open``.
    """
    with open(open_beneath(path, root), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise FileRefused(f"{path} is larger than {most_bytes:,} bytes. Write less there.")
    return content


def read_object(path: Path, root: Path, most_bytes: int = _MOST_BYTES) -> dict[str, Any]:
    """Returns the JSON object in a file of at most so many bytes.

    Raises:
        FileRefused: as ``read_beneath``, or the content is no JSON object.
        OSError: as ``os.open``.
    """
    try:
        said = json.loads(read_beneath(path, root, most_bytes))
    except (ValueError, RecursionError) as error:
        raise FileRefused(f"{path} holds no JSON: {type(error).__name__}: {error}") from None
    if not isinstance(said, dict):
        raise FileRefused(f"{path} holds no JSON object.")
    return said


def write_beneath(path: Path, root: Path, content: bytes, mode: int | None = None) -> None:
    """Writes a file whole or not at all, also where the host crashes; a link that is there is
    replaced, not followed.

    Args:
        path: the file, below root.
        root: no link beneath it is followed.
        content: of the file.
        mode: its rights; None: as the umask has them.

    Raises:
        FileRefused: a part of the path to the file's folder is a link, or no folder.
        OSError: as ``os.open`` and ``os.replace``.
    """
    new = f".{path.name}.new"
    with _folder_of(path, root) as folder, _refusing(path):
        with suppress(FileNotFoundError):
            os.unlink(new, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o666, dir_fd=folder), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        with suppress(OSError):  # not every file system can, and not every folder may be read
            opened = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
            try:
                os.fsync(opened)  # the name too: a job that no note names would be started twice
            finally:
                os.close(opened)


def check_folder(path: Path, root: Path) -> None:
    """Raises FileRefused if a part of the path from root on is a link, or no folder."""
    with _folder_of(path / "file", root):
        pass


def look_anew(folder: Path, root: Path) -> None:
    """Has what is in a folder looked for anew: NFS keeps for a while that a file was not there.

    Opening the folder by its name ends that (close-to-open, nfs(5)), and O_PATH is no opening.

    Args:
        folder: root, or below it.
        root: no link beneath it is followed.

    Raises:
        FileRefused: a part of the path is a link, or no folder.
        OSError: as ``os.open``.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    if folder == root:
        os.close(os.open(root, flags))
        return
    with _folder_of(folder, root) as above, _refusing(folder):
        os.close(os.open(folder.name, flags | os.O_NOFOLLOW, dir_fd=above))


def make_folder(path: Path, root: Path, group: int | None = None) -> None:
    """Makes a folder and those on the way to it, if they are not there.

    Args:
        path: the folder, below root.
        root: a folder that is there; no link beneath it is followed.
        group: the id of a group whose members read and write in the folder, and others do not:
            what is made in it is the group's (setgid). None: as the umask has it.

    Raises:
        FileRefused: a part of the path is a link, or no folder.
        OSError: as ``os.mkdir``.
    """
    parts = (path / "file").relative_to(root).parts
    for depth in range(1, len(parts)):
        part = root.joinpath(*parts[:depth])
        with _folder_of(part, root) as folder, _refusing(part), suppress(FileExistsError):
            os.mkdir(part.name, dir_fd=folder)
    with _folder_of(path / "file", root) as folder, _refusing(path):
        if group is None:
            return
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        opened = os.open(".", flags, dir_fd=folder)
        try:
            found = os.fstat(opened)
            if found.st_gid != group:
                os.fchown(opened, -1, group)
            if stat.S_IMODE(found.st_mode) != SHARED and found.st_uid == os.geteuid():
                os.fchmod(opened, SHARED)
        finally:
            os.close(opened)


def share_file(path: Path, root: Path, group: int) -> None:
    """Makes a file, if it is not there, and one that a group's members write.

    Raises:
        FileRefused, OSError: as ``open_beneath``.
    """
    opened = open_beneath(path, root, os.O_RDWR | os.O_CREAT)
    try:
        os.fchown(opened, -1, group)
        os.fchmod(opened, 0o660)
    finally:
        os.close(opened)


def share_folder(path: Path, root: Path, group: int) -> None:
    """Gives a group a folder that this process has made, and all that is in it.

    A folder is opened to the group once all in it has its rights: until then its members cannot
    put a link in the place of a file.

    Args:
        path: the folder, below root.
        root: no link beneath it is followed.
        group: the group's id.

    Raises:
        FileRefused: a part of the path is a link, or no folder; or something in it is a link, not
            regular, another user's, or has further names (link(2)).
        OSError: as ``os.open``, ``os.fchown`` and ``os.fchmod``.
    """

    def unreadable(error: OSError) -> None:
        raise error  # os.fwalk would go on without what is in it

    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with _folder_of(path / "file", root) as top:
        walk = os.fwalk(".", topdown=False, onerror=unreadable, dir_fd=top)
        for inside, _, names, folder in walk:
            for name in names:
                with _refusing(path / inside / name):
                    opened = os.open(name, flags, dir_fd=folder)
                try:
                    found = os.fstat(opened)
                    alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
                    _check_own(path / inside / name, found, alone)
                    os.fchown(opened, -1, group)
                    owner = found.st_mode & 0o700
                    os.fchmod(opened, owner | owner >> 3)
                finally:
                    os.close(opened)
            _check_own(path / inside, os.fstat(folder))
            os.fchown(folder, -1, group)
            os.fchmod(folder, SHARED)


def _check_own(path: Path, found: os.stat_result, alone: bool = True) -> None:
    if not alone or found.st_uid != os.geteuid():
        raise FileRefused(
            f"{path} is not as user id {os.geteuid()} has made it: it is another user's, has "
            "further names, or is no regular file. Remove it, and clear the task."
        )


@contextmanager
def _folder_of(path: Path, root: Path) -> Iterator[int]:
    """Yields a descriptor of the file's folder, which need not be readable."""
    try:
        parts = path.relative_to(root).parts
    except ValueError:
        parts = ()
    if not parts or ".." in parts:
        raise FileRefused(f"{path} is not below {root}.")
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    folder = os.open(root, flags)
    try:
        with _refusing(path):
            for part in parts[:-1]:
                deeper = os.open(part, flags | os.O_NOFOLLOW, dir_fd=folder)
                os.close(folder)
                folder = deeper
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_FILE:
            raise FileRefused(
                f"{path} is a link, or leads over one, or is no file. No link beneath a run's "
                "folder is followed: put the file itself there."
            ) from None
        error.filename = str(path)  # not the last part alone
        raise
