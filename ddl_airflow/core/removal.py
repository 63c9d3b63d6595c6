"""Removes folders, and nothing that is mounted in them.

A person may have mounted a disk, or a folder of other data, where a training looked for it: to
remove the run must not empty that. A bind mount has the device number of what it shows, so mounts
are told apart by their ids as well. Source: proc(5), ``/proc/[pid]/fdinfo`` and ``mountinfo``.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass
class Folder:
    """A folder on the way through a tree.

    Attributes:
        opened: its descriptor.
        names: of the folders on the way to it, from the first.
        folders: names of the folders in it.
        others: names of all else in it.
    """

    opened: int
    names: list[str]
    folders: list[str]
    others: list[str]

    def path(self, name: str = "") -> str:
        """Its path, or that of something in it."""
        return "/".join([*self.names, name] if name else self.names)


def remove_tree(folder: Path) -> None:
    """Removes a folder with all that is in it, as far as that can be removed.

    As ``shutil.rmtree`` it follows no link; but it goes into nothing that is mounted there, goes on
    after an error, and takes folders of any depth.

    Raises:
        OSError: the first thing that could not be removed, and why.
    """
    failed: list[OSError] = []

    def note(error: OSError) -> None:
        if not failed:
            failed.append(error)

    for one in walk_mount(folder, note):
        for remove, names in ((os.unlink, one.others), (os.rmdir, one.folders)):
            for name in names:
                try:
                    remove(name, dir_fd=one.opened)
                except FileNotFoundError:  # somebody else does the same
                    continue
                except OSError as error:
                    note(OSError(error.errno, error.strerror, one.path(name)))
    if failed:
        raise failed[0]
    os.rmdir(folder)


def walk_mount(folder: Path, onerror: Callable[[OSError], object]) -> Iterator[Folder]:
    """Goes through a folder from the bottom up, but not into what is mounted there.

    ``os.fwalk`` keeps a descriptor for each level and is recursive; a script can make folders
    deeper than that lasts, and than a path may be long.

    Args:
        folder: where to begin.
        onerror: is called with what cannot be looked into, such as a mount point.
    """
    levels: list[tuple[Folder, list[str], tuple[int, int]]] = []
    try:
        mount = _mount_at(folder.parent)
        here = _entered(str(folder), mount, None, onerror)
    except OSError as error:
        onerror(error)
        return
    waiting = [*here.folders]
    try:
        while True:
            if waiting:
                try:
                    deeper = _entered(waiting.pop(), mount, here, onerror)
                except OSError as error:
                    onerror(error)
                    continue
                found = os.fstat(here.opened)
                levels.append((here, waiting, (found.st_dev, found.st_ino)))
                os.close(here.opened)
                here, waiting = deeper, [*deeper.folders]
                continue
            yield here
            if not levels:
                return
            above, waiting, known = levels.pop()
            above.opened = os.open("..", _FOLDER, dir_fd=here.opened)
            os.close(here.opened)
            here = above
            here.names.pop()
            found = os.fstat(here.opened)
            if (found.st_dev, found.st_ino) != known:
                raise OSError(errno.ESTALE, "a folder in it was moved meanwhile", here.path())
    except OSError as error:
        onerror(error)
    finally:
        os.close(here.opened)


def mounted_in(folder: Path) -> str:
    """What is mounted at a folder or in it, as the kernel lists it; empty: nothing is."""
    top = os.path.realpath(folder)
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            points = [_unescaped(line.split(b" ")[4]) for line in file]
    except OSError:  # there is no /proc
        return ""
    return next((one for one in points if one == top or one.startswith(f"{top}/")), "")


def _unescaped(field: bytes) -> str:
    return os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), field))


def _mount_at(folder: Path) -> tuple[int, str]:
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _mount_of(opened)
    finally:
        os.close(opened)


def _mount_of(opened: int) -> tuple[int, str]:
    """The device and, where /proc tells it, the mount that a descriptor is of."""
    device = os.fstat(opened).st_dev
    try:
        with open(f"/proc/self/fdinfo/{opened}") as file:
            said = re.search(r"^mnt_id:\s*(\d+)", file.read(), re.MULTILINE)
    except OSError:
        said = None
    return device, said[1] if said else ""


def _entered(
    name: str, mount: tuple[int, str], above: Folder | None, onerror: Callable[[OSError], object]
) -> Folder:
    """A folder in another, or by its path. Raises OSError where it is of another mount."""
    names = [name] if above is None else above.names
    inside = "" if above is None else name
    within = None if above is None else above.opened
    try:
        if above is not None:  # from one that may be read and not entered nothing leads back
            os.stat(f"{name}/.", dir_fd=within)
        opened = os.open(name, _FOLDER, dir_fd=within)
    except OSError as error:
        place = name if above is None else above.path(name)
        raise OSError(error.errno, error.strerror, place) from None
    one = Folder(opened, names, [], [])
    if _mount_of(opened) != mount:
        os.close(opened)
        place = one.path(inside)
        raise OSError(errno.EBUSY, "something is mounted there: unmount it", place)
    try:
        with os.scandir(opened) as entries:
            for entry in entries:
                kind = one.folders if entry.is_dir(follow_symlinks=False) else one.others
                kind.append(entry.name)
    except OSError as error:
        onerror(OSError(error.errno, error.strerror, one.path(inside)))
    if above is not None:
        names.append(name)
    return one
