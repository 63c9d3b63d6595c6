"""Which objects of a cache of data may go, and room in that of a host.

Standard library only, and none of this package: a host that does not share the workspace is sent
this file, ``ssh HOST PYTHON -SE -``, and calls ``make_room`` before it is sent a job's data.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# Of a host: what was used since stays, for a job that is being sent has no links there yet.
_USED_S = 86400.0
# As ``ddl_airflow.storage.cache`` has them: the host may be another worker of Airflow's.
_LOCK, _BLOBS = ".in-use", "blobs"
# Of a blob, and how deep a run's folder is among all runs.
_DIGEST = re.compile("[0-9a-f]{64}")
_RUN = 2
# Of links, and of what is gone meanwhile.
_LEADS_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Blob(NamedTuple):
    """A cached object.

    Attributes:
        used: when it was, in seconds since 1970.
        path: of its file.
        nbytes: of that.
        names: hard links to it.
    """

    used: float
    path: str
    nbytes: int
    names: int


def evictable(blobs: Iterable[Blob], excess: int, runs: str) -> Iterator[Blob]:
    """Those that were used least lately, until they have ``excess`` bytes; of no run's data.

    Args:
        blobs: that may go.
        excess: bytes that are to be freed; with 0 or less none is yielded.
        runs: folder of all runs of the cache.

    Raises:
        OSError: a folder or a link below ``runs`` cannot be read: what it has may be in use.
    """
    if excess <= 0:
        return
    blobs = sorted(blobs)
    named, linked = _linked(runs, {os.path.basename(blob.path) for blob in blobs})
    for blob in blobs:
        # A run may also have it by another name, not by a link to it.
        if blob.names > 1 or os.path.basename(blob.path) in named:
            continue
        if not linked or os.path.realpath(blob.path) not in linked:
            yield blob
            excess -= blob.nbytes
            if excess <= 0:
                return


def make_room(cache: str, runs: str, needed: dict[str, int], most: int) -> dict[str, int]:
    """Removes objects until those that are needed have room in a host's cache.

    What is needed is marked as used, in its access time, under the lock that whoever removes holds:
    so nothing goes between the look whether the host has it and the start of the ranks. What was
    used within a day stays, so there may be less room than was asked for.

    Args:
        cache: folder; it need not be there.
        runs: folder of all runs of that cache.
        needed: size in bytes of each object, by its path in the cache.
        most: bytes that all objects of the cache may have together.

    Returns:
        How many were ``removed``, and ``bytes``: what there is then, with what is to come.

    Raises:
        OSError: something cannot be read or removed, or the file system has no locks.
    """
    if not os.path.isdir(cache):
        return {"removed": 0, "bytes": sum(needed.values())}
    with open(os.path.join(cache, _LOCK), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        blobs, removed = _blobs(os.path.join(cache, _BLOBS)), 0
        for name in needed:
            path = os.path.join(cache, name)
            if blobs.pop(path, None) is not None:
                os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))
        nbytes = sum(needed.values()) + sum(blob.nbytes for blob in blobs.values())
        old = time.time() - _USED_S
        unused = [blob for blob in blobs.values() if blob.used < old]
        for blob in evictable(unused, nbytes - most, runs):
            os.unlink(blob.path)
            removed += 1
            nbytes -= blob.nbytes
    return {"removed": removed, "bytes": nbytes}


def _blobs(folder: str) -> dict[str, Blob]:
    found = {}
    for above, _, names in os.walk(folder, onerror=_raise):
        for name in names:
            path = os.path.join(above, name)
            try:
                one = os.lstat(path)
            except FileNotFoundError:  # of rsync, which has given it its name
                continue
            if stat.S_ISREG(one.st_mode):
                found[path] = Blob(one.st_atime, path, one.st_size, one.st_nlink)
    return found


def _linked(runs: str, names: set[str]) -> tuple[set[str], set[str]]:
    """What staged data are links to, also of a run that is half removed, or half staged.

    There may be millions, and who stages waits. So a link is read, and not followed, where it names
    a blob: no two have one name.

    Args:
        runs: folder of all runs.
        names: of the blobs that are asked for.

    Returns:
        Those of the names that are linked to; and where links lead that name no blob at all.
    """
    named, others = set(), set()
    waiting = [(runs, 0)]
    while waiting:
        folder, depth = waiting.pop()
        for entry in _entries(folder):
            if not entry.is_symlink():
                data = depth != _RUN or entry.name == "data" or entry.name[0] == "."
                if data and entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))
                continue
            try:
                name = os.readlink(entry.path).rpartition("/")[2]
                if name in names:
                    named.add(name)
                elif not _DIGEST.fullmatch(name):
                    others.add(os.path.realpath(entry.path, strict=True))
            except OSError as error:
                _raise(error)
    return named, others


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        _raise(error)
        return []


def _raise(error: OSError) -> None:
    if error.errno not in _LEADS_NOWHERE:
        raise error
