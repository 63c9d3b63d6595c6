"""type: fs: a folder."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ddl_airflow.core.manifest.rule import Finding, Findings
from ddl_airflow.core.manifest.sections.store import StoreKind

if TYPE_CHECKING:
    from ddl_airflow.core.manifest.sections.places import Connection, Location


class Folder(StoreKind):
    """``file:///folder``."""

    kind_name = "fs"
    scheme = "file"
    is_a = "a folder"
    form = "file:///path"
    implementation = "ddl_airflow.storage.filesystem:FolderStore"
    fields = ("path",)
    required = {"path": "./folder"}
    examples = {"source": {"path": "./data"}, "target": {"path": "./results"}}
    needs_connection = False
    has_buckets = False
    watched_at_once = 32

    def findings(self, at: str, location: Location) -> Findings:
        """Yields a path of which nobody sees where it leads."""
        path, fix = location.path or "", "Write the folder's absolute path."
        if ".." in PurePosixPath(path).parts:
            yield Finding(f"{at}.path", "has `..` in it", fix)
        if path.startswith("~"):
            yield Finding(f"{at}.path", "begins with ~, which is nobody's home here", fix)
        if path.startswith("$") or "${" in path:
            yield Finding(f"{at}.path", "has a variable, and none is read here", fix)
        if "://" in path:
            yield Finding(f"{at}.path", "is an address, wanted a path", fix)

    def uri(self, location: Location, beside: Path) -> str:
        """``file:///folder``, links followed."""
        return self.folder(location, beside).as_uri()

    def fixed_uri(self, location: Location) -> None:
        """None: links may lie on the way."""
        return None

    def folder(self, location: Location, beside: Path) -> Path:
        """The folder; a relative path starts beside the manifest."""
        return (beside / str(location.path)).resolve()

    def place(self, location: Location, connection: Connection | None) -> tuple[str, ...] | None:
        """Kind, where the path starts, and its parts: a relative one is inside no absolute one."""
        if not location.path:
            return None
        path = PurePosixPath(location.path)
        return ("fs", *(() if path.is_absolute() else (".",)), *path.parts)


KIND = Folder()
