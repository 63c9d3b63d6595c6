"""Plan to DAG, and a folder of manifests to DAGs.

Parsing reads manifests and nothing else: no network, no connection, no TensorFlow, no process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.exceptions import SerializationError
from airflow.sdk import DAG, get_parsing_context

from ddl_airflow.core.errors import (
    ManifestError,
    ManifestInvalid,
    ManifestIssue,
    ManifestSyntaxError,
)
from ddl_airflow.core.manifest import (
    Manifest,
    load_manifest_text,
    looks_like_manifest,
    redacted_text,
)
from ddl_airflow.core.plan import Plan, plan
from ddl_airflow.form import form
from ddl_airflow.operators.stage import StageDataOperator
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.operators.transform import TransformOperator
from ddl_airflow.operators.upload import UploadResultsOperator

_LARGEST_MANIFEST = 1024 * 1024
_log = logging.getLogger(__name__)


def dag_from(manifest: Manifest, path: Path, text: str = "") -> DAG:
    """The DAG of one manifest.

    Args:
        manifest: as loaded.
        path: its file; code and folders are relative to it.
        text: the manifest as written, shown (without keys) in the DAG's documentation.
    """
    steps = plan(manifest, path)
    retries = manifest.retries
    with DAG(
        dag_id=steps.dag_id,
        description=manifest.model_definition.description or f"Training from {path.name}",
        schedule=manifest.schedule,
        start_date=datetime(2024, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        params=form(manifest),
        tags={"ddl", manifest.model_definition.framework.name},
        doc_md=_documentation(manifest, path, text),
        default_args={
            "retries": retries.retries,
            "retry_delay": retries.delay,
            "retry_exponential_backoff": 2.0 if retries.backoff == "exponential" else 0,
            "max_retry_delay": max(timedelta(hours=1), retries.delay),
        },
    ) as dag:
        _tasks(steps, list(dag.params))
    return dag


def _tasks(steps: Plan, settings: Sequence[str]) -> None:
    train, transform = steps.train, steps.transform
    stage_data = StageDataOperator(
        task_id="stage_data",
        task_display_name="stage-data",
        dataset=steps.stage_data.dataset,
        code=steps.stage_data.code,
        not_code=steps.stage_data.not_code,
        python=train.python,
        commands=[train.command, *transform.commands],
        settings=settings,
    )
    trained = TrainOperator(
        task_id="train",
        command=train.command,
        nodes=train.nodes,
        slots=train.slots,
        launcher=train.launcher,
        distribution=train.distribution,
        python=train.python,
        framework=train.framework,
        tf1=train.tf1,
        metrics=train.metrics,
        parameters=steps.parameters,
    )
    transformed = TransformOperator(
        task_id="transform",
        commands=transform.commands,
        checkpoint=transform.checkpoint,
        inputs=transform.inputs,
        outputs=transform.outputs,
        sample=transform.sample,
        python=transform.python,
        tf1=transform.tf1,
        parameters=steps.parameters,
    )
    uploaded = UploadResultsOperator(
        task_id="upload_results",
        task_display_name="upload-results",
        results=steps.upload_results.results,
        manifest=steps.manifest,
    )
    stage_data >> trained >> transformed >> uploaded


def _documentation(manifest: Manifest, path: Path, text: str) -> str:
    warned = "".join(f"- ⚠ {issue.render(path.name)}\n" for issue in manifest.warnings)
    return f"{warned}\n```yaml\n{redacted_text(text)}\n```\n" if text else warned


class ManifestProblem(SerializationError):
    """What is wrong in a manifest, as Airflow's import errors show it.

    Airflow wraps any other error that rises while it serialises a DAG, and shows both.
    """


class BrokenManifest(DAG):
    """Stands in for the DAG of a manifest that has none, and tells Airflow why.

    An error raised while the loader file is parsed would make all its DAGs stale. So the loader
    never raises; instead this DAG raises while Airflow serialises it, and Airflow then files the
    error under ``relative_fileloc``: the manifest's own path, beside the DAGs that are well.
    Seen in Airflow 3.3: ``airflow/dag_processing/processor.py``, ``_serialize_dags``.
    """

    _error: ManifestError | None = None
    _manifest = ""

    def __init__(self, error: ManifestError) -> None:
        digest = hashlib.sha256(error.source.encode()).hexdigest()[:16]
        super().__init__(f"broken-manifest-{digest}", schedule=None)
        self._manifest = error.source
        self._error = error

    @property
    def relative_fileloc(self) -> str | None:
        """The manifest, whatever file the DAG processor believes it to come from."""
        return self._manifest

    @relative_fileloc.setter
    def relative_fileloc(self, value: str | None) -> None:
        """Airflow sets the loader's path here; the manifest's stays."""

    @property
    def tags(self) -> Any:
        """Read by the serialisation, which is where the error must rise."""
        if self._error is not None:
            raise ManifestProblem(f"\n{self._error}") from None
        return set()

    @tags.setter
    def tags(self, value: Any) -> None:
        """A broken manifest has no tags."""


def manifests_in(folder: Path) -> Iterator[tuple[Path, bytes | OSError]]:
    """Every manifest below the folder, with its bytes or why they cannot be read.

    Other YAML files are left alone. A folder that several links lead to is searched once.
    """
    seen: set[Path] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = Path(parent).resolve()
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__")))
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for name in sorted(files):
            path = Path(parent, name)
            if path.suffix not in (".yml", ".yaml") or name.startswith(".") or not path.is_file():
                continue
            try:
                with path.open("rb") as file:
                    content = file.read(_LARGEST_MANIFEST + 1)
            except OSError as error:
                if looks_like_manifest(name, ""):
                    yield path, error
                continue
            if looks_like_manifest(name, content.decode("utf-8", "replace")):
                yield path, content


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
        source = path.relative_to(folder).as_posix()
        if isinstance(content, OSError):
            broken.append(_unreadable(source, content))
            continue
        try:
            manifest = load_manifest_text(content, source)
        except ManifestError as error:
            broken.append(error)
            continue
        if wanted in (None, manifest.dag_id):
            loaded[manifest.dag_id].append(_Loaded(path, source, content.decode(), manifest))
    dags: dict[str, DAG] = {}
    for dag_id, claims in loaded.items():
        if len(claims) > 1:
            broken += [_claimed_twice(claim, claims) for claim in claims]
            continue
        (claim,) = claims
        for issue in claim.manifest.warnings:
            warnings.warn(issue.render(claim.source), stacklevel=1)
        try:
            dags[dag_id] = dag_from(claim.manifest, claim.path, claim.text)
        except Exception as refusal:  # the boundary: one manifest must not take the others along
            broken.append(_refused(claim, refusal))
    if wanted is None:
        dags |= {dag.dag_id: dag for dag in map(BrokenManifest, broken)}
    elif wanted not in dags:
        # A task of a DAG whose manifest was broken meanwhile: its log should say so.
        for problem in broken:
            _log.error("%s", problem)
    return dags


@dataclass(frozen=True)
class _Loaded:
    path: Path
    source: str
    text: str
    manifest: Manifest


def _unreadable(source: str, error: OSError) -> ManifestError:
    issue = ManifestIssue(0, "", f"cannot be read: {error.strerror}", "Correct its permissions.")
    return ManifestSyntaxError(source, [issue])


def _refused(claim: _Loaded, error: Exception) -> ManifestError:
    """For what our rules let pass and Airflow does not; the rules should have known."""
    message = f"Airflow cannot make a DAG of it: {type(error).__name__}: {error}"
    issue = ManifestIssue(0, "", message, "Change the value that it names, and report this.")
    refused = ManifestInvalid(claim.source, [issue])
    refused.__cause__ = error
    return refused


def _claimed_twice(claim: _Loaded, claims: list[_Loaded]) -> ManifestError:
    others = ", ".join(other.source for other in claims if other is not claim)
    issue = ManifestIssue(
        line=claim.manifest.line_of("model_definition.name"),
        field="model_definition.name",
        message=f"the DAG id {claim.manifest.dag_id!r} is also claimed by {others}",
        fix="Give each manifest its own name.",
    )
    return ManifestInvalid(claim.source, [issue])
