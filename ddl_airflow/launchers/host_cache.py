"""Room for data in a host's own cache: ``ssh HOST PYTHON -SE -``, before a job's data are sent.

The program travels through standard input, as ``probe.py`` does. Standard library only, and none
of this package.

What a job needs is marked as used, in its access time, under the lock that whoever removes holds.
So nothing goes between the look whether a host has it and the start of the ranks.
"""

from __future__ import annotations

import fcntl
import os
import stat
import time

# What was used since stays: a job that is being sent has no links there yet.
_USED_S = 86400.0
# As ``ddl_airflow.storage.cache`` has them: the host may be another worker of Airflow's.
_LOCK, _BLOBS = ".in-use", "blobs"


def make_room(cache: str, runs: str, needed: dict[str, int], most: int) -> dict[str, int]:
    """Removes objects until those that are needed have room in the cache.

    Those go first that were used least lately; none that a link below ``runs`` leads to, nor one
    that was used within a day. So there may be less room than was asked for.

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
        files = _files(os.path.join(cache, _BLOBS))
        for name in needed:
            path = os.path.join(cache, name)
            if (found := files.pop(path, None)) is not None:
                os.utime(path, ns=(time.time_ns(), found.st_mtime_ns))
        nbytes = sum(needed.values()) + sum(found.st_size for found in files.values())
        old = time.time() - _USED_S
        unused = {path: found for path, found in files.items() if found.st_atime < old}
        if nbytes <= most or not unused:
            return {"removed": 0, "bytes": nbytes}
        linked, removed = _linked(runs), 0
        for path, found in sorted(unused.items(), key=lambda one: one[1].st_atime):
            if nbytes <= most:
                break
            # A run may also have it by another name, not by a link to it.
            if found.st_nlink == 1 and os.path.realpath(path) not in linked:
                os.unlink(path)
                removed += 1
                nbytes -= found.st_size
    return {"removed": removed, "bytes": nbytes}


def _files(blobs: str) -> dict[str, os.stat_result]:
    found = {}
    for folder, _, names in os.walk(blobs, onerror=_raise):
        for name in names:
            path = os.path.join(folder, name)
            try:
                one = os.lstat(path)
            except FileNotFoundError:  # of rsync, which has given it its name
                continue
            if stat.S_ISREG(one.st_mode):
                found[path] = one
    return found


def _linked(runs: str) -> set[str]:
    linked = set()
    for folder, folders, names in os.walk(runs, onerror=_raise):
        for path in (os.path.join(folder, name) for name in (*folders, *names)):
            if os.path.islink(path):
                linked.add(os.path.realpath(path))
    return linked


def _raise(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
