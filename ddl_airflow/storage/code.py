"""A copy of the training's scripts as they are now, and what identifies them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from ddl_airflow.core.errors import SourceMissing, StagingError
from ddl_airflow.core.layout import REMOVING
from ddl_airflow.core.manifest.load import looks_like_manifest
from ddl_airflow.core.real_path import place_of
from ddl_airflow.core.removal import remove_tree
from ddl_airflow.storage.filesystem import os_errors

_MOST_BYTES = 256 * 2**20
_MOST_REFERENCES = 8 * 2**20  # bytes of git's packed-refs
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})


@dataclass(frozen=True)
class CodeSnapshot:
    """What was copied.

    Attributes:
        digest: ``sha256:…`` over the sorted files' names and contents.
        files: relative names.
        left_out: links that lead out of the folder, which were not followed.
        commit: the git commit that is checked out there, or empty. The files may differ from it;
            what they were is in the digest.
    """

    digest: str
    files: tuple[str, ...]
    commit: str
    left_out: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """For the lineage."""
        return {
            "digest": self.digest,
            "files": list(self.files),
            "git_commit": self.commit or None,
        }


def snapshot(
    source: Path,
    destination: Path,
    leave_out: Iterable[Path] = (),
    give: Callable[[Path], None] = lambda _: None,
    within: Iterable[Path] | None = None,
) -> CodeSnapshot:
    """Copies the scripts, without manifests (they may hold keys), hidden files and caches.

    The destination is replaced as a whole. What a link leads to outside the folder is not the
    author's to give: Airflow may read what the author, and the ranks, may not.

    Args:
        source: folder of the scripts; links to what is in it are followed.
        destination: where the copy goes.
        leave_out: folders in it that are no code: data and results of a manifest beside them.
        give: called with the copy, to give it its rights, before it is where others look.
        within: folders, without links, of which the source must be in one, wherever a link leads
            that is put there meanwhile; None: it may lie anywhere.

    Raises:
        SourceMissing: no such folder, or no file in it.
        StagingError: more than 256 MiB: data lies among the scripts; or a folder among them cannot
            be read; or a name is no text.
        NoSpace: the destination's disk is full.
    """
    if not source.is_dir():
        raise SourceMissing(f"code: {source} is not a folder. Set `code:` in the manifest.")
    with os_errors(source):
        top = source.resolve()
        if within is not None and not any(top.is_relative_to(folder) for folder in within):
            raise StagingError(
                f"code: {source} leads to {top}, out of {', '.join(map(str, within))}. Put the "
                "scripts' folder itself there."
            )
        names, left_out = _scripts(source, top, {folder.resolve() for folder in leave_out})
        total = sum((source / name).stat().st_size for name in names)
    if total > _MOST_BYTES:
        largest = max(names, key=lambda name: (source / name).stat().st_size)
        raise StagingError(
            f"code: {source} holds {total / 2**20:.0f} MiB, more than {_MOST_BYTES // 2**20}; the "
            f"largest is {largest}. Keep data out of it, or set `code:` to the scripts' folder.",
            retryable=False,
        )
    if not names:
        links = f" but links that lead out of it ({', '.join(left_out[:3])})" if left_out else ""
        raise SourceMissing(f"code: {source} holds no file{links}. Set `code:` in the manifest.")
    with os_errors(destination, total):
        digest = _copy(source, top, names, destination, give)
    return CodeSnapshot(f"sha256:{digest}", tuple(names), _commit(source), tuple(left_out))


def why_not_copied(source: Path, name: str, leave_out: Iterable[Path] = ()) -> str:
    """Why ``snapshot`` would not copy a file of the folder; empty if it would.

    Args:
        source, leave_out: as ``snapshot`` has them.
        name: of a file that is there, from the folder.
    """
    parts = PurePath(os.path.normpath(name)).parts
    if parts[0] == ".." or not (source / name).resolve().is_relative_to(source.resolve()):
        return "it lies outside the code folder"
    for part in parts:
        if _is_skipped(part):
            return f"hidden files and caches such as {part} are left out"
    around = {source.joinpath(*parts[:depth]).resolve() for depth in range(len(parts))}
    if not around.isdisjoint(folder.resolve() for folder in leave_out):
        return "it lies in the folder of the data or the results"
    return ""


def digest_of(files: Mapping[str, Path]) -> str:
    """What ``CodeSnapshot.digest`` is of these files, by name."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(_line(name, files[name]))
    return f"sha256:{digest.hexdigest()}"


def _line(name: str, file: Path) -> bytes:
    return f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode()


def _copy(
    source: Path,
    top: Path,
    names: Iterable[str],
    destination: Path,
    give: Callable[[Path], None],
) -> str:
    digest = hashlib.sha256()
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=destination.parent, prefix=".code-"))
    try:
        for name in names:
            target = partial / name
            target.parent.mkdir(parents=True, exist_ok=True)
            _copy_file(source / name, target, top)
            digest.update(_line(name, target))
        partial.chmod(0o755)
        give(partial)
        # The ranks' user may have left what only that one may delete: cleaning tries it again.
        before = destination.with_name(f"{REMOVING}{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            destination.rename(before)
        partial.replace(destination)
        with suppress(OSError):
            remove_tree(before)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return digest.hexdigest()


def _copy_file(source: Path, target: Path, top: Path) -> None:
    # Not to wait for the other end of a pipe.
    with open(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as reader:
        # What was looked at before may be a link by now.
        if not (real := place_of(reader.fileno())).is_relative_to(top):
            raise StagingError(
                f"code: {source} leads to {real}, out of the folder of the scripts. No such link "
                "is followed: put the file itself there.",
                retryable=False,
            )
        with open(target, "xb") as writer:
            shutil.copyfileobj(reader, writer)
        found = os.fstat(reader.fileno())
    target.chmod(stat.S_IMODE(found.st_mode) & 0o777)
    os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))


def _scripts(source: Path, top: Path, leave_out: set[Path]) -> tuple[list[str], list[str]]:
    """Names of the scripts, and of links that lead out of the folder, which lies at ``top``."""
    names, left_out = [], []

    def unreadable(error: OSError) -> None:
        raise error  # os.walk would go on without what is in it

    for folder, folders, files in os.walk(source, onerror=unreadable, followlinks=True):
        real = Path(folder).resolve()
        if not real.is_relative_to(top):
            left_out.append(Path(folder).relative_to(source).as_posix())
            folders.clear()
            continue
        parts = Path(folder).relative_to(source).parts
        above = {source.joinpath(*parts[:depth]).resolve() for depth in range(len(parts))}
        if real in leave_out | above:
            folders.clear()
            continue
        folders[:] = sorted(f for f in folders if not _is_skipped(f))
        for file in files:
            path = Path(folder, file)
            if file.startswith(".") or not path.is_file():
                continue
            if not path.resolve().is_relative_to(top):
                left_out.append(path.relative_to(source).as_posix())
                continue
            # Also what editors leave of them: manifest.yml~, manifest.yml.bak, #manifest.yml#.
            if re.search(r"\.ya?ml", file) and looks_like_manifest(
                file, path.read_text("utf-8", "replace")
            ):
                continue
            name = path.relative_to(source).as_posix()
            try:
                name.encode()
            except UnicodeEncodeError:  # Python has other bytes as halves of a character
                raise StagingError(
                    f"code: {source}: the name {name!a} is no text in UTF-8. Rename it, or keep "
                    "the file out of the folder of the scripts.",
                    retryable=False,
                ) from None
            names.append(name)
    return sorted(names), sorted(left_out)


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED_FOLDERS


def _commit(folder: Path) -> str:
    """The commit that is checked out in a folder or around it, or empty.

    Git itself is not asked: it runs programs that the repository's configuration names
    (``core.fsmonitor``, filters), here with Airflow's environment. Source: gitrepository-layout(5).
    """
    for around in (folder, *folder.parents):
        where = around / ".git"
        if where.is_file():  # a worktree or a submodule
            where = around / _said(where, around).removeprefix("gitdir:").strip()
        if where.is_dir():
            break
    else:
        return ""
    head = _said(where / "HEAD", where)
    if not head.startswith("ref:"):
        return _as_commit(head)
    reference = head.removeprefix("ref:").strip()
    if not re.fullmatch(r"refs(/[^/\0.][^/\0]*)+", reference):
        return ""
    common = where / (_said(where / "commondir", where) or ".")
    for place in (where, common):
        if commit := _as_commit(_said(place / reference, place)):
            return commit
    for line in _said(common / "packed-refs", common, _MOST_REFERENCES).splitlines():
        if line.endswith(f" {reference}"):
            return _as_commit(line.partition(" ")[0])
    return ""


def _said(path: Path, root: Path, most: int = 4096) -> str:
    """The text of a small file below a folder; nothing where there is none, or it leads out."""
    try:
        # Not to wait for the other end of a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not place_of(file.fileno()).is_relative_to(root.resolve()):
                return ""
            return file.read(most).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _as_commit(text: str) -> str:
    return text if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", text) else ""
