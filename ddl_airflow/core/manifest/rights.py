"""The site's rights of manifests: ``[ddl] manifest_rights``, by the folder that they lie in."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BeforeValidator, Field

from ddl_airflow.core.errors import ManifestInvalid, ManifestIssue
from ddl_airflow.core.manifest.document import child
from ddl_airflow.core.manifest.folder import ManifestText, read_manifest
from ddl_airflow.core.manifest.load import read_fields
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.launchers import (
    launcher_is_available,
    offered_kinds,
    site_kinds,
)
from ddl_airflow.core.manifest.sections.notifications import says_where_to
from ddl_airflow.core.manifest.sections.places import Reference
from ddl_airflow.core.manifest.site import read_setting
from ddl_airflow.core.manifest.values import Text
from ddl_airflow.core.real_path import FirstLink, real_path

SETTING = "[ddl] manifest_rights"
_TRIES = 3
_Looked = TypeVar("_Looked")


class _Rights(Section):
    connections: tuple[Text, ...] = Field(
        default=(),
        description="Ids of Airflow connections; * is any text.",
        examples=[["vision_*"]],
    )
    paths: tuple[Text, ...] = Field(
        default=(), description="Folders outside the manifest's own.", examples=[["/data/vision"]]
    )
    launchers: tuple[Text, ...] | None = Field(
        default=None,
        description="Kinds of launcher, which runs may choose too; by default any in a manifest, "
        "and no other in its runs.",
        examples=[["slurm"]],
    )
    variables: tuple[Text, ...] = Field(
        default=(),
        description="Environment variables that ${NAME} may read, of those that "
        "[ddl] manifest_variables lists; * is any text.",
        examples=[["VISION_*"]],
    )


_PLAIN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:()!-]*")


class _Table(Section):
    rights: Mapping[str, Annotated[_Rights, BeforeValidator(lambda value: value or {})]] = Field(
        description="What manifests may name, by the folder that they lie in, or below.",
        examples=[{"/opt/airflow/dags/vision": {"connections": ["vision_*"]}}],
    )


def _folders_are_absolute(at: str, table: Mapping[str, _Rights]) -> Findings:
    for name, entry in table.items():
        for folder in (name, *entry.paths):
            if not folder.startswith("/") or "\0" in folder:
                fix = "Write the folder's absolute path."
                yield Finding(f"{at}.{name}", f"{folder[:60]!r} is no absolute path", fix)
        for kind in entry.launchers or ():
            if any(launcher_is_available(at, kind)):
                fix = f"Known: {', '.join((*offered_kinds(), *site_kinds()))}."
                yield Finding(f"{at}.{name}", f"{kind[:40]!r} is no launcher", fix)


_RULES = (Rule(("rights",), _folders_are_absolute, warning=False),)


@dataclass(frozen=True)
class Rights:
    """What the manifests of a folder may name, besides what lies beside them.

    Attributes:
        connections: ids of Airflow connections; ``*`` is any text.
        paths: folders.
        launchers: kinds, also for runs; None: any, and for runs the manifest's alone.
        variables: that ``${NAME}`` may read, of those that the site lists; ``*`` is any text.
    """

    connections: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    launchers: tuple[str, ...] | None = None
    variables: tuple[str, ...] = ()


class Place(NamedTuple):
    """Where a manifest lay when it was read, without links, and the rights that it has by that."""

    folder: Path
    rights: Rights


@dataclass(frozen=True)
class RightsTable:
    """``[ddl] manifest_rights``, with the links on its folders' paths as they lead now.

    Attributes:
        entries: by the folder without links: its path as written, and the rights there, as
            written. Of two that lead to one folder the one that is written without links, else
            the last.
    """

    entries: Mapping[Path, tuple[str, Rights]]

    @classmethod
    def read(cls, setting: str) -> RightsTable | None:
        """The table of a setting.

        Args:
            setting: a path, or the table itself where it begins with a brace.

        Returns:
            None where the setting is empty: a manifest may name what it likes.

        Raises:
            ManifestError: the table cannot be read, or says what cannot be; with file, field and
                fix.
        """
        setting = setting.strip()
        if not setting:
            return None
        written = read_setting(setting, SETTING, _entries)
        leads = {name: real_path(name) for name in written}
        in_order = sorted(written, key=lambda name: leads[name] == name)
        return cls({leads[name]: (str(name), written[name]) for name in in_order})

    def of(self, folder: Path) -> Rights:
        """The rights of the manifests in a folder: of the nearest one above that is listed.

        Args:
            folder: where the manifest lies, without links.

        Returns:
            No connections, paths and variables where the table says nothing of the folder.
        """
        found = self._nearest(folder)
        if found is None:
            return Rights()
        rights = self.entries[found][1]
        return replace(rights, paths=tuple(map(real_path, rights.paths)))

    def domain(self, folder: Path, top: Path, name: Path, link: FirstLink | None) -> str:
        """In what links may be turned, as by git-sync, and the manifest behind them goes on.

        Whoever owns a folder may put a link in its place, to what is not theirs. So the text of a
        manifest has rights only in the domain in which it was read.

        Args:
            folder: where the manifest lies, without links.
            top: the folder of all manifests, without links.
            name: the manifest's folder as its path has it, from / on.
            link: the first one on that path from ``top`` on.

        Returns:
            The entry that the folder falls under, as written; if that is none, or in ``top`` one
            of all in there: the folder of the link, from ``.`` on, if all else lies behind it in
            there. Else the folder alone, after ``=``: as where a part of it has another entry.
        """
        if entry := self._own_entry(folder, top):
            others = any(
                folder in real.parents and not Path(written).is_relative_to(name)
                for real, (written, _) in self.entries.items()
            )
            return f"={folder}" if others or top.is_relative_to(folder) else entry
        if link and folder == link.target / link.rest and link.holder in link.target.parents:
            return f"./{link.holder.relative_to(top).as_posix()}"
        return f"={folder}"

    def _own_entry(self, folder: Path, top: Path) -> str | None:
        found = self._nearest(folder)
        if found is None or (folder.is_relative_to(top) and top.is_relative_to(found)):
            return None
        return self.entries[found][0]

    def says_the_same(self, other: RightsTable | None, folders: Iterable[Path]) -> bool:
        """Whether each of the folders falls under the same entry in both."""

        def entry(table: RightsTable, folder: Path) -> tuple[str, Rights] | None:
            found = table._nearest(folder)
            return table.entries[found] if found else None

        return other is not None and all(entry(self, one) == entry(other, one) for one in folders)

    def _nearest(self, folder: Path) -> Path | None:
        return next((one for one in (folder, *folder.parents) if one in self.entries), None)


def looked_up(
    setting: str,
    look: Callable[[], _Looked],
    folders_of: Callable[[_Looked], Iterable[Path]],
    source: str,
) -> tuple[_Looked, RightsTable | None]:
    """What is found in a folder, and the table, as the links on the paths of both led at once.

    Args:
        setting: as ``RightsTable.read`` has it.
        look: finds it.
        folders_of: where that lay, without links.
        source: names the manifest in messages.

    Returns:
        What was found; and the table, None where the site has none.

    Raises:
        ManifestError: as ``RightsTable.read``; or links have been turned each time.
    """
    before = RightsTable.read(setting)
    for _ in range(_TRIES):
        found = look()
        if before is None:
            return found, None
        after = RightsTable.read(setting)
        if before.says_the_same(after, folders_of(found)):
            return found, after
        before = after
    message = f"links on its path, or on those of {SETTING}, are turned all the time"
    raise ManifestInvalid(source, [ManifestIssue(0, "", message, "Leave them alone for a moment.")])


def read_at_its_place(
    path: Path, setting: str, source: str
) -> tuple[bytes | OSError, Place | None]:
    """A manifest's text, or why it cannot be read, and where it lies.

    Args:
        path: the manifest.
        setting, source: as ``looked_up`` has them.

    Raises:
        ManifestError: as ``looked_up``.
    """
    text, table = looked_up(
        setting,
        lambda: read_manifest(path) or ManifestText(OSError(0, "it is no manifest any more")),
        lambda found: [found.folder] if found.folder else [],
        source,
    )
    if table is None or text.folder is None:
        return text.content, None
    return text.content, Place(text.folder, table.of(text.folder))


@lru_cache(1)
def _entries(text: bytes, source: str) -> Mapping[Path, Rights]:
    table = read_fields(_Table, text, source, _RULES)
    return {
        Path(os.path.normpath(f"/{name.lstrip('/')}")): Rights(
            entry.connections, tuple(map(Path, entry.paths)), entry.launchers, entry.variables
        )
        for name, entry in table.rights.items()
    }


def beyond(
    manifest: Manifest,
    folder: Path,
    rights: Rights | None,
    default_connections: Callable[[str], Mapping[str, str]],
) -> Findings:
    """What a manifest names that is not its to name.

    Args:
        manifest: as loaded.
        folder: where it lies; without links where there are rights.
        rights: of that folder.
        default_connections: returns the connections that a notifier takes where the manifest
            names none, by argument. Called only where there are rights.
    """
    beside = Path(manifest.code) == Path()
    if rights is None and beside:  # the most, of thousands
        return
    own = folder if rights is not None else folder.resolve()
    if not beside and not (folder / manifest.code).resolve().is_relative_to(own):
        fix = "Put the scripts beside the manifest, or below it."
        yield Finding("code", "is a link that leads out of the manifest's folder", fix)
    if rights is None:
        return
    ask = f"Or ask the site's administrator for the right ({SETTING})."
    references: dict[str, Reference] = {
        "training_data_reference": manifest.training_data_reference,
        "training_results_reference": manifest.training_results_reference,
    }
    for name, reference in references.items():
        connection = reference.connection
        if connection is not None and connection.conn_id is not None:
            at = f"{name}.connection.conn_id"
            yield from _connection(at, connection.conn_id, rights, ask)
        for variable_of, variable in connection.variables() if connection is not None else ():
            # The endpoint beside it is the author's to choose, and gets its value.
            if not any(fnmatchcase(variable, one) for one in rights.variables):
                at = f"{name}.connection.{variable_of}"
                fix = f"{_named('variables', rights.variables)} {ask}"
                said = f"${{{variable[:60]}}} is not a variable for this manifest"
                yield Finding(at, said, fix)
        place = reference.store.folder(reference.place, folder)
        within = (own, *rights.paths)
        if place is not None and not any(place.is_relative_to(one) for one in within):
            at = f"{name}.{'source' if name.startswith('training_data') else 'target'}.path"
            fix = f"{_named('folders', rights.paths)} {ask}"
            yield Finding(at, f"{place} is not a folder for manifests in {own}", fix)
    for event in ("on_failure", "on_success", "on_approval"):
        for index, one in enumerate(getattr(manifest.notifications, event)):
            for argument, value in {**default_connections(one.notifier), **one.arguments}.items():
                at = child(f"notifications.{event}[{index}].arguments", argument)
                if argument.endswith("conn_id"):
                    yield from _connection(at, str(value), rights, ask)
                elif says_where_to(argument):
                    message = "says where to send what the connection holds, such as a token"
                    yield Finding(at, message, "Delete it: the connection says where to.")
    for parameter, asked in manifest.parameters.items():
        if asked.secret:
            at = child("parameters", parameter)
            yield from _connection(at, asked.conn_id or parameter, rights, ask)
    if conn_id := getattr(manifest.launcher, "connection", None):
        yield from _connection("launcher.connection", conn_id, rights, ask)
    # ssh's configuration may name programs, which the worker runs: no manifest brings its own.
    for name, folders in (("hostfile", (own, *rights.paths)), ("ssh_config", rights.paths)):
        path = getattr(manifest.launcher, name, None)
        if path and not any(real_path(path).is_relative_to(one) for one in folders):
            fix = f"{_named('folders', rights.paths)} {ask}"
            yield Finding(f"launcher.{name}", f"{path} is not a file for manifests in {own}", fix)
    kind = manifest.launcher.kind
    if rights.launchers is not None and kind not in rights.launchers:
        fix = f"{_named('launchers', rights.launchers)} {ask}"
        yield Finding("launcher.kind", f"{kind} is not for manifests in {own}", fix)


def _connection(at: str, conn_id: str, rights: Rights, ask: str) -> Findings:
    # A pattern holds of plain ids alone. What a template makes of one is known when it is used, and
    # Airflow asks for an id as a part of a URL: `team_/../other` is `other` there.
    listed = conn_id in rights.connections or (
        _PLAIN_ID.fullmatch(conn_id)
        and any(fnmatchcase(conn_id, one) for one in rights.connections)
    )
    if not listed:
        fix = f"{_named('connections', rights.connections)} {ask}"
        yield Finding(at, f"{conn_id[:60]!r} is not a connection for this manifest", fix)


def _named(what: str, there: tuple[object, ...]) -> str:
    return f"Its {what}: {', '.join(map(str, there)) or 'none'}."
