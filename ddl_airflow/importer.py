"""A DAG importer of manifests, for Airflow 3.4: its own way to DAG files that are not Python.

Airflow gives each file ending to one importer, and has one of its own for YAML. So this one takes
``.yml`` and ``.yaml``, makes the DAGs of manifests, and hands Airflow's own YAML on to Airflow's.

Listing runs in the main loop of Airflow's DAG processor, which waits for it, and takes what is not
listed for deleted. So it is bounded, and whenever it cannot say which manifests there are it raises
an error: then Airflow goes on with the files that it has, and lists again at the next refresh.
Parsing is in a process for each file, forked from there: it knows what was listed last.

Seen in 3.4.0b2, whose importers are experimental (``airflow/sdk/importers/base.py``):

- ``DagImporterRegistry`` gives an ending to who registered last: Airflow's defaults, then
  ``[dag_processor] dag_importer_configs``, then ``importers`` in a bundle's entry. It makes one
  importer for each bundle, before the DAG processor forks.
- ``DagFileProcessorManager`` lists a bundle after its refresh; files that are not listed have no
  DAGs any more. A file is parsed by a ``DagBag``, which lists it again, alone, and imports it. So
  an error that listing yields is only shown because listing that file alone yields it again.
- A path that is not UTF-8 ends the whole DAG processor, also that of a Python file.
- Of an error Airflow stores the message, of a DAG's warnings one for each ``warning_type``, which
  must read ``name:kind``. The code is that of ``get_source_code``; the file's, if that raises.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from airflow.dag_processing.bundles.base import BaseDagBundle
from airflow.sdk.exceptions import AirflowException

from ddl_airflow.airflow_internals import files_not_ignored, yaml_importer
from ddl_airflow.bundle import check_mounted, is_copy
from ddl_airflow.core.errors import ManifestError
from ddl_airflow.core.manifest.folder import (
    ManifestText,
    is_passed_over,
    label,
    may_be_read,
    read_manifest,
    state_of,
)
from ddl_airflow.core.manifest.load import without_keys
from ddl_airflow.manifest_file import ManifestFile

try:
    from airflow.sdk.importers import (
        AbstractDagImporter,
        DagImportError,
        DagImportResult,
        DagImportWarning,
        DagSourceCode,
        FilesystemDagDefinition,
        get_file_suffix,
    )
except ImportError as error:
    raise ImportError(
        "ddl_airflow.importer needs Airflow 3.4, the first that has DAG importers; in an older one "
        "ddl_airflow.bundle.ManifestBundle makes DAGs of manifests."
    ) from error

_LISTING_S = 10.0
_LOOK_S = 1.0  # more, for a listing to end by itself
# Airflow's own importer reads a file whole to see whether it is for it.
_MOST_BYTES_OF_OTHERS = 10_000_000
# Airflow's table of import errors has 1024.
_LONGEST_PATH = 1000
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Seen:
    """What a YAML file was when it was listed.

    Attributes:
        state: what changes with the file.
        ours: whether it is a manifest.
        others: whether Airflow's own importer takes it.
        dag_id: of a manifest; empty if it has none, None if nobody has looked yet.
    """

    state: tuple[int, ...]
    ours: bool
    others: bool
    dag_id: str | None = None


class _Listing(threading.Thread):
    """Lists in a thread of its own, for which a file server that hangs need not be waited for.

    Attributes:
        at: the path that is being looked at.
    """

    def __init__(self, folder: Path, work: Callable[[_Listing], dict[Path, _Seen]]) -> None:
        super().__init__(name="ddl-listing", daemon=True)
        self.at = folder
        self._work = work
        self._seen: dict[Path, _Seen] = {}
        self._error: BaseException | None = None

    def run(self) -> None:
        """Lists, and keeps what comes of it."""
        try:
            self._seen = self._work(self)
        except BaseException as error:  # for who waits
            self._error = error

    def result(self, limit_s: float) -> dict[Path, _Seen] | None:
        """What was listed; None if that takes longer. Raises what the listing did."""
        self.join(limit_s)
        if self.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._seen


class ManifestImporter(AbstractDagImporter[Any]):  # type: ignore[misc]
    """One DAG for each manifest of a bundle, whichever bundle it is; see the top of this module.

    Args:
        listing_timeout: seconds that listing one bundle may take.
    """

    supported_extensions = [".yml", ".yaml"]

    def __init__(self, listing_timeout: float = _LISTING_S) -> None:
        if isinstance(listing_timeout, bool) or not listing_timeout > 0:
            raise ValueError(f"listing_timeout is {listing_timeout!r}, wanted seconds above 0")
        self._limit_s = float(listing_timeout)
        self._airflows = yaml_importer()
        # By the bundle's folder and the file.
        self._seen: dict[Path, dict[Path, _Seen]] = {}
        self._hanging: dict[Path, _Listing] = {}  # by the bundle's folder

    def can_handle(self, definition: Any) -> bool:
        """Whether its name ends as one of YAML."""
        return get_file_suffix(definition) in self.supported_extensions

    # --- listing: in the DAG processor's main loop --------------------------------------------

    def list_dag_definitions(
        self, bundle: BaseDagBundle, *, safe_mode: bool = True
    ) -> Iterator[Any]:
        """Yields what a DAG is made of: manifests, and the YAML that Airflow's own importer takes.

        Args:
            bundle: its path is a folder, or one file when that is parsed.
            safe_mode: whether Airflow's own importer looks into files; without it, it takes all.

        Raises:
            AirflowException: it takes too long, or the folder is away: Airflow keeps its DAGs.
        """
        seen = self._list_in_time(bundle.path, bundle.name, safe_mode)
        # Only now: whoever asks may import each before asking for the next, and take their time.
        for file, one in seen.items():
            if one.ours or one.others:
                yield FilesystemDagDefinition(path=file)

    def _list_in_time(self, path: Path, bundle: str, safe_mode: bool) -> dict[Path, _Seen]:
        limit_s = _LOOK_S
        listing = self._hanging.pop(path, None)
        if listing is None or not listing.is_alive():
            listing = _Listing(path, lambda own: self._list(own, path, bundle, safe_mode))
            listing.start()
            limit_s += self._limit_s
        if (seen := listing.result(limit_s)) is not None:
            return seen
        self._hanging[path] = listing
        raise AirflowException(
            f"the DAGs stay as they were: listing {path} of bundle {bundle} hangs at "
            f"{label(str(listing.at))}. See whether the file server answers."
        )

    def _list(
        self, listing: _Listing, folder: Path, bundle: str, safe_mode: bool
    ) -> dict[Path, _Seen]:
        if folder.is_file():  # it is parsed
            return {folder: self._look(folder, safe_mode)} if self.can_handle(folder) else {}
        until = time.monotonic() + self._limit_s
        before, seen = self._seen.get(folder, {}), dict[Path, _Seen]()
        known = sum(one.ours for one in before.values())
        check_mounted(folder, bundle, known)
        for path in files_not_ignored(folder):
            listing.at = path
            if time.monotonic() > until:
                # What was read need not be read again, so a slow file server gets there.
                self._seen[folder] = before | seen
                raise AirflowException(
                    f"the DAGs stay as they were: listing {folder} of bundle {bundle} took longer "
                    f"than {self._limit_s:g} s. Have .airflowignore pass over what holds no DAGs, "
                    "or give ManifestImporter a larger listing_timeout."
                )
            if path.suffix.lower() in self.supported_extensions and _can_be_stored(path, folder):
                one = self._look(path, safe_mode, before.get(path))
                hidden = one.ours and is_passed_over(path.relative_to(folder))
                seen[path] = replace(one, ours=False) if hidden else one
        for path in before.keys() - seen.keys():
            if (before[path].ours or before[path].others) and not _is_gone(path, folder):
                seen[path] = before[path]  # whoever parses it says why it cannot be read
        for path, one in seen.items():
            if one.ours and one.dag_id is None and time.monotonic() < until:
                listing.at = path
                seen[path] = replace(one, dag_id=_dag_id(path))
        self._seen[folder] = seen
        return seen

    def _look(self, path: Path, safe_mode: bool, before: _Seen | None = None) -> _Seen:
        state = state_of(path)
        if before is not None and state and before.state == state:
            return before
        if not may_be_read(path):
            return _Seen((), ours=False, others=False)
        if read_manifest(path) is not None:
            return _Seen(state, ours=not is_copy(path), others=False)
        return _Seen(state, ours=False, others=self._is_airflows(path, safe_mode))

    def _is_airflows(self, path: Path, safe_mode: bool) -> bool:
        if self._airflows is None:
            return False
        try:
            if path.stat().st_size > _MOST_BYTES_OF_OTHERS:
                _log.warning("%s is left alone: too large for a DAG", label(str(path)))
                return False
        except OSError:
            pass  # Airflow's own says what is wrong
        definition = FilesystemDagDefinition(path=path)
        return bool(self._airflows.might_contain_dag(definition, safe_mode))

    # --- parsing: in a process for each file --------------------------------------------------

    def import_definition(self, definition: Any, bundle: BaseDagBundle) -> Any:
        """The DAG of a manifest, or what is wrong with it; Airflow's own result for its YAML."""
        text = self._of(definition)
        if text is None and self._airflows is not None:
            return self._airflows.import_definition(definition, bundle)
        result = DagImportResult(definition=definition)
        if text is None:
            said = "is no manifest, and this Airflow has no importer for other YAML"
            result.errors.append(DagImportError(repr(definition), said))
            return result
        path = definition.path
        within = path.is_relative_to(bundle.path) and path != bundle.path
        source = label(path.relative_to(bundle.path).as_posix() if within else path.name)
        try:
            file = ManifestFile.at_its_place(path, source, text.content)
            if others := self._also_claiming(file, bundle.path):
                raise file.claimed_by(others)
            result.dags.append(file.dag(None, in_documentation=False))
        except ManifestError as error:
            line = error.issues[0].line or None
            result.errors.append(DagImportError(repr(definition), str(error), "manifest", line))
        else:
            if file.warnings:  # one: Airflow keeps one of a kind for each DAG
                said = "\n".join(file.warnings)
                result.warnings.append(DagImportWarning(repr(definition), said, "ddl:manifest"))
        return result

    @staticmethod
    def _of(definition: Any) -> ManifestText | None:
        """A manifest's text; None for what is no manifest.

        Nor is a file in an archive, which has no folder with scripts beside it.
        """
        if isinstance(definition, FilesystemDagDefinition):
            return read_manifest(definition.path)
        return None

    def _also_claiming(self, file: ManifestFile, folder: Path) -> list[str]:
        """The other manifests of its DAG id, as far as those were listed in this process.

        A task's process lists its own file alone: a run goes on whoever else claims its DAG.
        """
        dag_id, others = file.manifest.dag_id, []
        for path, one in self._seen.get(folder, {}).items():
            if one.dag_id == dag_id and path != file.path:
                as_listed = one.state and state_of(path) == one.state
                if as_listed or _dag_id(path) == dag_id:
                    others.append(label(path.relative_to(folder).as_posix()))
        return others

    def get_source_code(self, definition: Any, dag_id: str | None = None) -> Any:
        """What the Code tab shows: the manifest without keys that are written out in it.

        Never raises: Airflow would show the file itself.
        """
        try:
            if self._airflows is not None and self._of(definition) is None:
                return self._airflows.get_source_code(definition, dag_id)
            return DagSourceCode(without_keys(definition.read_bytes()).decode(), "yaml")
        except Exception:  # the boundary: whatever it is, keys must not be shown
            _log.exception("%s", label(repr(definition)))
            return DagSourceCode("", "yaml")


def _dag_id(path: Path) -> str:
    """Returns the DAG id of a manifest; empty if it has none."""
    text = read_manifest(path)
    try:
        return ManifestFile.of(path, "", text.content).manifest.dag_id if text is not None else ""
    except ManifestError:
        return ""  # whoever parses it says why


def _is_gone(path: Path, folder: Path) -> bool:
    """Returns whether a file that is not listed is deleted or ignored, and not out of reach."""
    try:
        path.stat()
        for parent in path.relative_to(folder).parents:
            os.scandir(folder / parent).close()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return True


def _can_be_stored(path: Path, folder: Path) -> bool:
    """Returns whether Airflow's database takes the path; of a name in bytes it would stop."""
    relative = path.relative_to(folder).as_posix()
    try:
        relative.encode()
    except UnicodeEncodeError:
        said = "has a name that is not UTF-8"
    else:
        if len(relative) <= _LONGEST_PATH:
            return True
        said = f"has a path of more than {_LONGEST_PATH} characters"
    _log.warning("%s is left alone: it %s. Rename it.", label(relative), said)
    return False
