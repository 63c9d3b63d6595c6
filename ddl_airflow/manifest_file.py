"""One manifest file to its DAG: what the loader, the bundle and the importer have in common."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddl_airflow.core.errors import (
    ManifestError,
    ManifestInvalid,
    ManifestIssue,
    ManifestSyntaxError,
)
from ddl_airflow.core.manifest.folder import KEYS_FORGOTTEN, label, shared_dag_id
from ddl_airflow.core.manifest.load import load_manifest_text
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.rights import Place, read_at_its_place
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.manifest_dag import ManifestDag, Settings, dag_from

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ManifestFile:
    """A manifest that can be read.

    Attributes:
        path: where it lies; code and folders are relative to it.
        source: how messages name it.
        text: as written.
        manifest: what it says.
        settings: the site's, as they were then.
        place: where it lay when it was read; None: nobody has looked, or nothing depends on it.
    """

    path: Path
    source: str
    text: str
    manifest: Manifest
    settings: Settings
    place: Place | None = None

    @classmethod
    def of(
        cls,
        path: Path,
        source: str,
        content: bytes | OSError,
        settings: Settings | None = None,
        place: Place | None = None,
    ) -> ManifestFile:
        """Reads its bytes.

        Args:
            path, source: as above.
            content: the bytes, or why there are none.
            settings: the site's; by default as they are now.
            place: as above.

        Raises:
            ManifestError: they are no manifest, or there are none: then the OSError says why.
        """
        if isinstance(content, OSError):
            raise _unreadable(source, str(content.strerror))
        try:
            settings = settings or Settings.read()
            manifest = load_manifest_text(content, source, compute_table(settings.compute))
        except ManifestError:
            raise
        except Exception as error:  # the boundary: one manifest must not take the others along
            _log.exception("%s", source)
            message = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
            fix = "Report this; the traceback is in the log of Airflow's DAG processor."
            raise ManifestInvalid(source, [ManifestIssue(0, "", message, fix)]) from error
        return cls(path, source, content.decode(), manifest, settings, place)

    @classmethod
    def at_its_place(cls, path: Path, source: str, content: bytes | OSError) -> ManifestFile:
        """As ``of``, with its place; read once more for that, where manifests have rights."""
        settings, place = Settings.read(), None
        if settings.rights and isinstance(content, bytes):
            content, place = read_at_its_place(path, settings.rights, source)
        return cls.of(path, source, content, settings, place)

    @property
    def warnings(self) -> list[str]:
        """What its author should know, though it has a DAG: each a sentence with its line."""
        return [issue.render(self.source) for issue in self.manifest.warnings]

    def dag(self, shown_as_code: Path | None, *, in_documentation: bool) -> ManifestDag:
        """Its DAG.

        Args:
            shown_as_code: the file that Airflow's Code tab shows; by default the one it parses.
            in_documentation: whether that shows the text, since the Code tab does not.

        Raises:
            ManifestError: it can have none here.
        """
        try:
            text = self.text if in_documentation else ""
            return dag_from(
                self.manifest, self.path, text, shown_as_code, self.settings, self.place
            )
        except ManifestError:
            raise
        except Exception as error:  # the boundary: one manifest must not take the others along
            # Our rules let it pass and Airflow does not; the rules should have known.
            message = f"Airflow cannot make a DAG of it: {type(error).__name__}: {error}"
            fix = "Change the value that it names, and report this."
            issue = ManifestIssue(0, "", message, fix)
            raise ManifestInvalid(self.source, [issue]) from error

    def claimed_by(self, others: Sequence[str]) -> ManifestError:
        """What is wrong with it if others have its DAG id."""
        return ManifestInvalid(self.source, [shared_dag_id(self.manifest, others)])

    def claimed_by_one_more(self) -> Callable[[str], ManifestError]:
        """``claimed_by`` for who must not keep the manifest: keys may be written out in it."""
        source, issue = self.source, shared_dag_id(self.manifest, [""])

        def error(other: str) -> ManifestError:
            return ManifestInvalid(source, [replace(issue, message=issue.message + label(other))])

        return error


def _unreadable(source: str, reason: str) -> ManifestError:
    fix = "Correct its permissions."
    if reason == KEYS_FORGOTTEN:
        fix = "Start another run; and use conn_id, with which manifests are kept for a month."
    return ManifestSyntaxError(source, [ManifestIssue(0, "", f"cannot be read: {reason}", fix)])
