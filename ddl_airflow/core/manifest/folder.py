"""Which files below a folder are manifests, and how messages name them."""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence
from operator import attrgetter
from os.path import join
from pathlib import Path
from typing import NamedTuple

from ddl_airflow.core.errors import ManifestIssue
from ddl_airflow.core.manifest.document import MAX_BYTES
from ddl_airflow.core.manifest.load import looks_like_manifest
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.real_path import place_of_folder

# Why a manifest of an earlier version is gone (ddl_airflow.bundle).
KEYS_FORGOTTEN = "keys were written out in it, and it was changed more than a day ago"
_LONGEST_LABEL = 300
# A file's time of change tells nothing about changes that follow within a moment.
_SETTLED_S = 2.0


class ManifestText(NamedTuple):
    """What was read of a manifest.

    Attributes:
        content: its bytes, or why they cannot be read.
        folder: where its file lay then, without links: its rights are those of that folder. None
            where the folder could not be reached.
        mode: the file's permissions.
    """

    content: bytes | OSError
    folder: Path | None = None
    mode: int = 0


def manifests_in(folder: Path) -> Iterator[tuple[Path, ManifestText]]:
    """Yields every manifest below the folder, with its bytes or why they cannot be read.

    Other YAML files are left alone. A folder that cannot be searched comes like a manifest that
    cannot be read: there may be some in it.
    """
    closed: list[OSError] = []
    for path, _ in yaml_files(folder, closed):
        text = read_manifest(path)
        if text is not None:
            yield path, text
    for error in closed:
        yield Path(error.filename), ManifestText(error)


def yaml_files(folder: Path, closed: list[OSError]) -> Iterator[tuple[Path, Path]]:
    """Yields every YAML file below the folder, and where its folder lies, without links; always in
    the same order.

    Names that start with a dot or with ``__`` are passed over. Each folder is searched once, by the
    first path to it. Links that lead out of the folder that they lie in come last: they may not be
    made by who owns what they lead to, and take no other path over.

    Args:
        closed: gets an error for each folder that cannot be searched.
    """
    seen: set[Path] = set()
    # Paths of folders, each with the folder that has it, without links, and whether it is a link.
    below: list[tuple[str, Path | None, bool]] = [(str(folder), None, False)]
    outward: deque[tuple[str, None, bool]] = deque()
    # Not os.walk, which calls itself in Python 3.11: a thousand folders in each other would end it.
    while below or outward:
        here, holder, is_link = below.pop() if below else outward.popleft()
        try:
            real, folders, files = _searched(here, holder, is_link, seen)
        except OSError as error:
            error.filename = here
            closed.append(error)
        except _LeadsOut:
            outward.append((here, None, True))
        else:
            below += ((join(here, name), real, link) for name, link in reversed(folders))
            for name in files:
                path = Path(here, name)
                if may_be_read(path):
                    yield path, real


class _LeadsOut(Exception):
    """A folder does not lie in the one that has its path."""


def _searched(
    here: str, holder: Path | None, is_link: bool, seen: set[Path]
) -> tuple[Path, list[tuple[str, bool]], list[str]]:
    """Where a folder lies, the names of those in it, and which are links, and of YAML files.

    Nothing of one that was seen. By a descriptor: its name may lead elsewhere the next time.

    Args:
        here: its path.
        holder: in what it must lie; None: it may lie anywhere.
        is_link: whether it may lie deeper there than its path says.
        seen: gets where it lies.

    Raises:
        _LeadsOut: it lies elsewhere.
        OSError: it cannot be searched.
    """
    opened = os.open(here, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        real = place_of_folder(opened)
        folders: list[tuple[str, bool]] = []
        files: list[str] = []
        if real in seen:
            return real, folders, files
        if holder is not None and holder not in (real.parents if is_link else [real.parent]):
            raise _LeadsOut
        seen.add(real)
        with os.scandir(opened) as entries:
            found = sorted(entries, key=attrgetter("name"))
        for entry in found:
            if _is_folder(entry):
                if not entry.name.startswith((".", "__")):
                    folders.append((entry.name, entry.is_symlink()))
            elif entry.name.endswith((".yml", ".yaml")) and not entry.name.startswith("."):
                files.append(entry.name)
        return real, folders, files
    finally:
        os.close(opened)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link in a circle, say


def is_passed_over(path: Path) -> bool:
    """Returns whether ``yaml_files`` yields no file of this path, relative to the folder."""
    hidden = any(part.startswith((".", "__")) for part in path.parts[:-1])
    return hidden or path.name.startswith(".")


def may_be_read(path: Path) -> bool:
    """Returns whether reading a file ends, with its bytes or an error."""
    try:
        return stat.S_ISREG(path.stat().st_mode)  # a pipe would never end
    except FileNotFoundError:
        return False  # a link to nowhere, or deleted just now
    except OSError:
        return True  # whoever reads it says why not


def read_manifest(path: Path) -> ManifestText | None:
    """Returns a manifest's text, or None where it is no manifest.

    Of a file that is too large only the first bytes: enough for the loader to say so. A pipe that
    has taken the place of a file is none, and is not waited for.
    """
    real: Path | None = None
    try:
        # The file is opened in the folder whose place is known, whatever becomes of its name.
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            real = place_of_folder(folder)
            opened = os.open(path.name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        with open(opened, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                return None
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        return ManifestText(error, real) if looks_like_manifest(path.name, "") else None
    if not looks_like_manifest(path.name, content.decode("utf-8", "replace")):
        return None
    return ManifestText(content, real, mode & 0o777)


def state_of(path: Path) -> tuple[int, ...]:
    """Returns what changes with a file; empty if that cannot be told."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    settled = time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLED_S
    return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino) if settled else ()


def label(path: str) -> str:
    """Returns a path as messages, databases and pages can show it: printable, and not too long."""
    if not path.isprintable():
        path = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in path)
    return path if len(path) <= _LONGEST_LABEL else f"…{path[-_LONGEST_LABEL:]}"


def shared_dag_id(manifest: Manifest, others: Sequence[str]) -> ManifestIssue:
    """Returns what is wrong with a manifest whose DAG id the other files claim as well."""
    field = "model_definition.name"
    return ManifestIssue(
        manifest.line_of(field),
        manifest.original(field) or field,
        f"the DAG id {manifest.dag_id!r} is also claimed by {', '.join(others)}",
        "Give each manifest its own name.",
    )


def may_have_dag_id(content: bytes, dag_id: str) -> bool:
    """Returns False only if no manifest of this text can have the DAG id; parses nothing.

    The id is the model's name with ``-`` for what an id cannot hold, so the pieces between are in
    the text as they are; unless the text has a backslash, which may write any of them otherwise.
    """
    return b"\\" in content or all(piece.encode() in content for piece in dag_id.split("-"))
