"""Where paths lead, without links, as the kernel says.

``os.path.realpath`` of Python 3.11 calls itself for each link of a chain, and so a chain of some
hundred ends with a RecursionError; the kernel follows 40. Source: path_resolution(7), proc(5).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

_FLAGS = os.O_PATH | os.O_CLOEXEC


def place_of(descriptor: int) -> Path:
    """Returns where an open file or folder lies. No link is on that path."""
    return Path(os.readlink(f"/proc/self/fd/{descriptor}"))


def place_of_folder(descriptor: int) -> Path:
    """Returns where an open folder lies. No link is on that path, and it leads to that folder.

    Raises:
        OSError: it has been moved meanwhile, or its path is one of another mount namespace, as of
            what lies below ``/proc/<pid>/root``.
    """
    place = place_of(descriptor)
    if not os.path.samestat(os.stat(place), os.fstat(descriptor)):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(place))
    return place


def real_path(path: str | Path) -> Path:
    """Returns where a path leads; what is not there, or out of reach, stays as it is written.

    Args:
        path: an absolute path, of a file or a folder.
    """
    above, rest = os.fspath(path), list[str]()
    while True:
        try:
            return Path(os.path.normpath(_real(above).joinpath(*reversed(rest))))
        except OSError:
            parent, name = os.path.split(above.rstrip("/"))
            if parent == above:
                return Path(os.path.normpath(path))
            rest.append(name)
            above = parent


def real_path_in(top: str | Path, name: str | Path) -> tuple[Path, Path]:
    """Returns where a folder leads, and where a path in it does, as both are at one moment.

    Args:
        top: the folder.
        name: the path from there.

    Raises:
        OSError: one of them is not there, or cannot be reached.
    """
    opened = os.open(top, _FLAGS | os.O_DIRECTORY)
    try:
        return place_of_folder(opened), _real(name, opened)
    finally:
        os.close(opened)


class FirstLink(NamedTuple):
    """The first link on a path.

    Attributes:
        holder: the folder that it lies in, without links.
        target: where it leads, without links.
        rest: the path from there.
    """

    holder: Path
    target: Path
    rest: Path


def first_link(top: Path, name: Path) -> FirstLink | None:
    """Returns the first link on a path; None if there is none.

    Args:
        top: where the path begins, without links.
        name: the path from there.
    """
    holder = top
    for depth, part in enumerate(name.parts, 1):
        if (target := real_path(holder / part)) != holder / part:
            return FirstLink(holder, target, Path(*name.parts[depth:]))
        holder = target
    return None


def _real(path: str | Path, folder: int | None = None) -> Path:
    opened = os.open(path, _FLAGS, dir_fd=folder)
    try:
        return place_of_folder(opened)
    finally:
        os.close(opened)
