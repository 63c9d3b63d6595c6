"""A folder of manifests, or a stub of a bundle, to DAGs.

Parsing reads manifests and nothing else: no network, no connection, no TensorFlow, no process.
Airflow gets the DAGs from a loader file (``dags_from``) or from a bundle (``ddl_airflow.bundle``).
"""

from __future__ import annotations

import gc
import hashlib
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from airflow.configuration import conf
from airflow.exceptions import SerializationError
from airflow.sdk import DAG, get_parsing_context

from ddl_airflow.airflow_internals import DagThatIsNotStored
from ddl_airflow.core.compute import Compute
from ddl_airflow.core.errors import (
    ManifestError,
    ManifestInvalid,
    ManifestIssue,
    ManifestSyntaxError,
)
from ddl_airflow.core.manifest import (
    KEYS_FORGOTTEN,
    REDACTED,
    Manifest,
    label,
    load_manifest_text,
    manifests_in,
    may_have_dag_id,
    redacted_text,
    shared_dag_id,
)
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.manifest_dag import ManifestDag, dag_from

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


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Saves the garbage collector its search: what is made here stays, thousands of DAGs of it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage()
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
    loaded: dict[str, list[_Loaded]] = defaultdict(list)
    broken: list[ManifestError] = []
    for path, content in manifests_in(folder):
        source = label(path.relative_to(folder).as_posix())
        if isinstance(content, OSError):
            broken.append(_unreadable(source, str(content.strerror)))
            continue
        if wanted is not None and not may_have_dag_id(content, wanted):
            continue
        try:
            manifest = _manifest(content, source)
        except ManifestError as error:
            broken.append(error)
            continue
        if wanted in (None, manifest.dag_id):
            loaded[manifest.dag_id].append(_Loaded(path, source, content.decode(), manifest))
    dags: dict[str, DAG] = {}
    for dag_id, claims in loaded.items():
        if len(claims) > 1:
            broken += [
                _claimed_twice(claim, [other.source for other in claims if other is not claim])
                for claim in claims
            ]
            continue
        (claim,) = claims
        try:
            # A loader has no file without keys to show as code, so then it is the loader itself.
            without_keys = redacted_text(claim.text) == claim.text
            dag = _built(claim, claim.path if without_keys else None)
        except ManifestError as refusal:
            broken.append(refusal)
            continue
        dag.also_claimed_by = _also_claimed_by(claim)
        dags[dag_id] = dag
    if wanted is None:
        stand_ins = (BrokenManifest(error, error.source) for error in broken)
        dags |= {dag.dag_id: dag for dag in stand_ins}
    elif wanted not in dags:
        # A task of a DAG whose manifest was broken meanwhile: its log should say so.
        for problem in broken:
            _log.error("%s", problem)
    return dags


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
    alone: bool = False,
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
        alone: whether this is the stub's only DAG. An error of the stub itself would have Airflow
            leave the others alone too, so then it is filed under the manifest.
    """
    place = Path(stub).with_name(copy)
    source = label(path)
    try:
        if unreadable:
            raise _unreadable(source, unreadable)
        content = place.read_bytes()
        manifest = _manifest(content, source)
        if was:  # no run begins by itself
            manifest = manifest.model_copy(update={"schedule": None})
        claim = _Loaded(Path(folder, path), source, content.decode(), manifest)
        if claimed_by:
            raise _claimed_twice(claim, claimed_by)
        redacted = place.with_name(f"{place.name}{REDACTED}")
        dag = _built(claim, redacted if redacted.exists() else place)
    except ManifestError as error:
        return BrokenManifest(error, None if alone else source)
    if was:
        gone = f"⚠ {source} no longer has this DAG, which goes when its open runs have ended."
        dag.doc_md = f"{gone}\n\n{dag.doc_md}"
    return dag


def _manifest(content: bytes, source: str) -> Manifest:
    try:
        return load_manifest_text(content, source, _site_compute())
    except ManifestError:
        raise
    except Exception as error:  # the boundary: one manifest must not take the others along
        _log.exception("%s", source)
        message = f"cannot be read: {type(error).__name__}: {str(error)[:200]}"
        fix = "Report this; the traceback is in the log of Airflow's DAG processor."
        raise ManifestInvalid(source, [ManifestIssue(0, "", message, fix)]) from error


def _site_compute() -> Mapping[str, Compute]:
    """The kinds of node that manifests may name: ``[ddl] compute`` over the built-in ones.

    Raises:
        ManifestError: the table cannot be read, or says what cannot be.
    """
    return compute_table(conf.get("ddl", "compute", fallback=""))


@dataclass(frozen=True)
class _Loaded:
    path: Path
    source: str
    text: str
    manifest: Manifest


def _built(claim: _Loaded, shown_as_code: Path | None) -> ManifestDag:
    for issue in claim.manifest.warnings:
        warnings.warn(issue.render(claim.source), stacklevel=1)
    try:
        return dag_from(claim.manifest, claim.path, claim.text, shown_as_code)
    except ManifestError:
        raise
    except Exception as refusal:  # the boundary: one manifest must not take the others along
        raise _refused(claim, refusal) from refusal


def _unreadable(source: str, reason: str) -> ManifestError:
    fix = "Correct its permissions."
    if reason == KEYS_FORGOTTEN:
        fix = "Start another run; and use conn_id, with which manifests are kept for a month."
    issue = ManifestIssue(0, "", f"cannot be read: {reason}", fix)
    return ManifestSyntaxError(source, [issue])


def _refused(claim: _Loaded, error: Exception) -> ManifestError:
    """For what our rules let pass and Airflow does not; the rules should have known."""
    message = f"Airflow cannot make a DAG of it: {type(error).__name__}: {error}"
    issue = ManifestIssue(0, "", message, "Change the value that it names, and report this.")
    return ManifestInvalid(claim.source, [issue])


def _also_claimed_by(claim: _Loaded) -> Callable[[str], ManifestError]:
    # The manifest stays out of the DAG: keys may be written out in it.
    source, issue = claim.source, shared_dag_id(claim.manifest, [""])

    def error(other: str) -> ManifestError:
        return ManifestInvalid(source, [replace(issue, message=issue.message + label(other))])

    return error


def _claimed_twice(claim: _Loaded, others: Sequence[str]) -> ManifestError:
    return ManifestInvalid(claim.source, [shared_dag_id(claim.manifest, others)])
