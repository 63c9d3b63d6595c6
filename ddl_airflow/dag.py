"""A folder of manifests, or a stub of a bundle, to DAGs.

Parsing reads manifests and nothing else: no network, no connection, no TensorFlow, no process.
Airflow gets the DAGs from a loader file (``dags_from``) or from a bundle (``ddl_airflow.bundle``).
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from airflow.exceptions import SerializationError
from airflow.sdk import DAG, get_parsing_context

from ddl_airflow.airflow_internals import DagThatIsNotStored
from ddl_airflow.core.collector import without_collector
from ddl_airflow.core.errors import ManifestError, ManifestInvalid, ManifestIssue
from ddl_airflow.core.manifest.folder import ManifestText, label, manifests_in, may_have_dag_id
from ddl_airflow.core.manifest.rights import (
    SETTING,
    Place,
    RightsTable,
    looked_up,
    read_at_its_place,
)
from ddl_airflow.core.real_path import FirstLink, first_link, real_path, real_path_in
from ddl_airflow.manifest_dag import ManifestDag, Settings
from ddl_airflow.manifest_file import ManifestFile

_log = logging.getLogger(__name__)


class ManifestProblem(SerializationError):
    """What is wrong in a manifest, for who serialises its stand-in without having collected it.

    Airflow wraps any other error that rises while it serialises a DAG, and shows both.
    """


class BrokenManifest(DagThatIsNotStored):
    """Stands in for the DAG of a manifest that has none, and tells Airflow why.

    Args:
        error: what is wrong.
        filed_under: path under which Airflow files the error; by default the file it parses. In a
            loader, the manifest's own, since the other DAGs of the file are well.
    """

    def __init__(self, error: ManifestError, filed_under: str | None = None) -> None:
        digest = hashlib.sha256(error.source.encode()).hexdigest()[:16]
        super().__init__(f"broken-manifest-{digest}", ManifestProblem(f"\n{error}"), filed_under)


# Thousands of DAGs may be made, and all stay.
@without_collector()
def dags_from(folder: str | Path) -> dict[str, DAG]:
    """A DAG for each manifest below the folder; for a broken one, a DAG that says what is wrong.

    Call it from a file in Airflow's DAG folder and put the result into ``globals()``. Never
    raises for what a manifest says. In a task's process only the DAG of that task is built.

    Args:
        folder: searched with all folders below it.

    Returns:
        Name for ``globals()`` to DAG.
    """
    folder = Path(folder)
    wanted = get_parsing_context().dag_id
    loaded: dict[str, list[ManifestFile]] = defaultdict(list)
    broken: list[ManifestError] = []
    settings = Settings.read(for_many=wanted is None)
    texts, table = _read_with_rights(folder, settings.rights)
    for path, text in texts:
        content, place = text.content, None
        if isinstance(content, bytes) and wanted and not may_have_dag_id(content, wanted):
            continue
        try:
            source = label(path.relative_to(folder).as_posix())
            if table is not None and text.folder is not None:
                place = Place(text.folder, table.of(text.folder))
            elif settings.rights and isinstance(content, bytes):
                content, place = read_at_its_place(path, settings.rights, source)
            file = ManifestFile.of(path, source, content, settings, place)
        except ManifestError as error:
            broken.append(error)
            continue
        if wanted in (None, file.manifest.dag_id):
            loaded[file.manifest.dag_id].append(file)
    dags: dict[str, DAG] = {}
    for dag_id, claims in loaded.items():
        if len(claims) > 1:
            broken += [
                claim.claimed_by([other.source for other in claims if other is not claim])
                for claim in claims
            ]
            continue
        (claim,) = claims
        try:
            # The manifest may have got keys when Airflow reads the code, some time after the parse.
            dag = _built(claim, None)
        except ManifestError as refusal:
            broken.append(refusal)
            continue
        dag.also_claimed_by = claim.claimed_by_one_more()
        dags[dag_id] = dag
    if wanted is None:
        stand_ins = (BrokenManifest(error, error.source) for error in broken)
        dags |= {dag.dag_id: dag for dag in stand_ins}
    elif wanted not in dags:
        # A task of a DAG whose manifest was broken meanwhile: its log should say so.
        for problem in broken:
            _log.error("%s", problem)
    return dags


def _read_with_rights(
    folder: Path, setting: str
) -> tuple[Iterable[tuple[Path, ManifestText]], RightsTable | None]:
    """The manifests below a folder, and the table of rights as it was when they were read.

    Returns:
        None for the table if the site has none, or each manifest is to be looked up alone: it
        cannot be read, or somebody turns links all the time.
    """
    if setting:
        with suppress(ManifestError):
            return looked_up(
                setting,
                lambda: list(manifests_in(folder)),
                lambda found: [text.folder for _, text in found if text.folder],
                "",
            )
    return manifests_in(folder), None


def dag_of_stub(
    stub: str,
    *,
    folder: str,
    path: str,
    text: str = "",
    claimed_by: Sequence[str] = (),
    unreadable: str = "",
    was: bool = False,
    copy: str = "",
    shown: str = "",
    alone: bool = False,
    domain: str = "",
) -> DAG:
    """The DAG of one manifest in a version of a bundle, or a DAG that says why there is none.

    Args:
        stub: the Python file that calls this, ``<copy of the manifest>.py``.
        folder: the bundle's folder, where the manifest was copied from.
        path: the manifest, relative to that folder; code and folders are relative to it there.
        text: digest of the manifest: a stub changes whenever its manifest does.
        claimed_by: other manifests of the same DAG id.
        unreadable: why there is no copy of the manifest.
        was: whether the manifest is gone, and the DAG is there for its open runs alone.
        copy: name of the manifest's copy, beside the stub.
        shown: the file to show as code, without keys; one that has been shown never changes. By
            default, as in stubs of earlier releases, it is the stub.
        alone: whether this is the stub's only DAG. An error of the stub itself would have Airflow
            leave the others alone too, so then it is filed under the manifest.
        domain: of a manifest that was read through a link, as ``RightsTable.domain`` has it.
    """
    place = Path(stub).with_name(copy)
    source = label(path)
    try:
        content = OSError(0, unreadable) if unreadable else place.read_bytes()
        settings, at = Settings.of_this_parse(), None
        if settings.rights and not unreadable:
            at = _place_of_stub(folder, path, domain, settings.rights)
        file = ManifestFile.of(Path(folder, path), source, content, settings, at)
        if was:  # no run begins by itself
            manual = file.manifest.model_copy(update={"schedule": None})
            file = replace(file, manifest=manual)
        if claimed_by:
            raise file.claimed_by(claimed_by)
        dag = _built(file, Path(shown) if shown and Path(shown).exists() else None)
    except ManifestError as error:
        return BrokenManifest(error, None if alone else source)
    if was:
        gone = f"⚠ {source} no longer has this DAG, which goes when its open runs have ended."
        dag.doc_md = f"{gone}\n\n{dag.doc_md}"
    return dag


def _place_of_stub(folder: str, path: str, domain: str, setting: str) -> Place | None:
    """Where a manifest lies now, whose text was read before: its scripts are those there.

    Args:
        folder, path, domain: as ``dag_of_stub`` has them.
        setting: ``[ddl] manifest_rights``.

    Raises:
        ManifestError: its folder leads to where the text would have other rights, or ones of
            another folder; or as ``looked_up``.
    """
    parent = Path(path).parent

    def look() -> tuple[Path, Path, FirstLink | None]:
        try:
            top, now = real_path_in(folder, parent)
        except OSError:  # it is gone, and the DAG is there for its open runs
            top, now = real_path(folder), real_path(Path(folder, parent))
        return top, now, first_link(top, parent) if domain else None

    (top, now, link), table = looked_up(setting, look, lambda found: [found[1]], label(path))
    if table is None:
        return None
    goes_on = now == top / parent
    if domain:
        goes_on = domain == table.domain(now, top, Path(folder, parent), link)
    if goes_on:
        return Place(now, table.of(now))
    message = (
        f"its folder leads to {label(str(now))} now, and not where its rights ({SETTING}) were "
        "looked up when it was read"
    )
    fix = (
        "Wait until the bundle is refreshed; for a run that began before, put back the folder, the "
        "link or the table."
    )
    raise ManifestInvalid(label(path), [ManifestIssue(0, "", message, fix)])


def _built(file: ManifestFile, shown_as_code: Path | None) -> ManifestDag:
    for warning in file.warnings:
        warnings.warn(warning, stacklevel=1)
    return file.dag(shown_as_code, in_documentation=shown_as_code is None)
