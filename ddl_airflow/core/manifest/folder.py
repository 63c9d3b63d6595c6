"""Which files below a folder are manifests, and how messages name them."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddl_airflow.core.errors import ManifestIssue
from ddl_airflow.core.manifest.document import MAX_BYTES
from ddl_airflow.core.manifest.load import looks_like_manifest
from ddl_airflow.core.manifest.model import Manifest

# Why a manifest of an earlier version is gone (ddl_airflow.bundle).
KEYS_FORGOTTEN = "keys were written out in it, and it was changed more than a day ago"
_LONGEST_LABEL = 300
# A file's time of change tells nothing about changes that follow within a moment.
_SETTLED_S = 2.0


def manifests_in(folder: Path) -> Iterator[tuple[Path, bytes | OSError]]:
    """Yields every manifest below the folder, with its bytes or why they cannot be read.

    Other YAML files are left alone. A folder that cannot be searched comes like a manifest that
    cannot be read: there may be some in it.
    """
    closed: list[OSError] = []
    for path in yaml_files(folder, closed):
        content = read_manifest(path)
        if content is not None:
            yield path, content
    for error in closed:
        yield Path(error.filename), error


def yaml_files(folder: Path, closed: list[OSError]) -> Iterator[Path]:
    """Yields every YAML file below the folder, always in the same order.

    Names that start with a dot or with ``__`` are passed over. A folder that several links lead to
    is searched once.

    Args:
        closed: gets an error for each folder that cannot be searched.
    """
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=closed.append):
        real = os.path.realpath(parent)
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__")))
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in sorted(files):
            if name.endswith((".yml", ".yaml")) and not name.startswith("."):
                path = Path(parent, name)
                if may_be_read(path):
                    yield path


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


def read_manifest(path: Path) -> bytes | OSError | None:
    """Returns a manifest's bytes, why they cannot be read, or None where it is no manifest.

    Of a file that is too large only the first bytes: enough for the loader to say so. A pipe that
    has taken the place of a file is none, and is not waited for.
    """
    try:
        with open(path, "rb", opener=_not_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        return error if looks_like_manifest(path.name, "") else None
    return content if looks_like_manifest(path.name, content.decode("utf-8", "replace")) else None


def _not_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


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
