"""What each step of a training has read and written, named as OpenLineage names it.

Facts alone: what a step has not read or written is not there, and what several outputs were made of
is said for each. Of what ranks may have written, nothing is believed that is not looked at here. No
OpenLineage: ``ddl_airflow.operators.openlineage`` makes its events of this.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.errors import DdlError
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import (
    ApproveStep,
    EvaluateStep,
    StageDataStep,
    Step,
    TrainStep,
    TransformStep,
    UploadResultsStep,
)
from ddl_airflow.lineage.production import PRODUCTION, Pointer
from ddl_airflow.lineage.record import (
    LINEAGE,
    MOST_BYTES,
    evaluated,
    fixed_run,
    model_digest,
    read_part,
)

SAVED_MODEL = "saved_model"
_MOST_FIELDS, _LONGEST_NAME = 200, 200
_OF_ENVIRONMENT = ("framework", "launcher", "distribution", "world_size", "nodes", "slots")
_ODD = (DdlError, OSError, ValueError, KeyError, TypeError)

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Data at a place.

    Attributes:
        namespace, name: OpenLineage's: ``s3://bucket`` and the key; ``file`` and the path. No
            slash at the end: Airflow's own names of assets have none, and these are to be the same.
        layer: what keeps it, such as ``s3``.
        format: of its files, where that is known.
        version: changes when the content does; empty: nobody knows.
        fields: name and type of each input and output of a model.
        files, nbytes: how much it is; None: nobody knows.
        model: what is known of the model that it is, or names.
        made_of: what it was made of, among the inputs and outputs of its step.
    """

    namespace: str
    name: str
    layer: str
    format: str = ""
    version: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    files: int | None = None
    nbytes: int | None = None
    model: Facts = field(default_factory=dict)
    made_of: tuple[Dataset, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What a step has read and written so far.

    Attributes:
        training: what is known of the training, for its run.
        manifest: name, digest and dialect.
    """

    inputs: tuple[Dataset, ...] = ()
    outputs: tuple[Dataset, ...] = ()
    training: Facts = field(default_factory=dict)
    manifest: Facts = field(default_factory=dict)


def dataset_at(uri: str, **facts: Any) -> Dataset:
    """The dataset of a place, ``s3://bucket[/key]`` or ``file:///folder``.

    Args:
        uri: the place; a slash at its end is no part of it.
        facts: the other fields.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        path = unquote(parts.path).rstrip("/") or "/"
        return Dataset(namespace="file", name=path, layer="file", **facts)
    namespace = f"{parts.scheme}://{parts.netloc}"
    # Of a whole bucket, as Airflow's provider has it. A key may have any character, "#" too.
    key = uri.removeprefix(namespace).strip("/") or "/"
    return Dataset(namespace=namespace, name=key, layer=parts.scheme, **facts)


def flow_of(
    step: Step,
    dag_id: str,
    layout: RunLayout | None,
    done: Mapping[str, Any] | None = None,
    *,
    failed: bool = False,
) -> Flow:
    """What a step has read and written. Raises nothing: what cannot be read is not said.

    Args:
        step: what is asked.
        dag_id: whose.
        layout: the run's; None: it cannot be reached.
        done: what the step returned, and of the upload what it told those who wait for the model;
            None: it has not ended, has failed, or did nothing.
        failed: whether it has; then why goes with the training.
    """
    if layout is None:
        source = (dataset_at(step.dataset.uri),) if isinstance(step, StageDataStep) else ()
        return Flow(inputs=source)
    try:
        inputs, outputs = _KINDS[type(step)](step, dag_id, layout, done)
    except _ODD:  # damaged, or cleaned away meanwhile
        inputs, outputs = (), ()
    training = _training(layout)
    if failed:
        training |= _failure(layout)
    return Flow(
        inputs=inputs,
        outputs=outputs if done is not None else (),
        training=training,
        manifest=_manifest(step, layout),
    )


def flow_of_pointer(results: str, dag_id: str, pointer: Pointer, digest: str | None) -> Flow:
    """What it is to let production name a model.

    Args:
        results: where the trainings are published.
        dag_id: the DAG that trains the model.
        pointer: as it is then.
        digest: of the model; None: nobody knows.
    """
    facts = {
        "training_id": pointer["training_id"],
        "publication": pointer["publication"],
        "digest": digest,
        "metrics": _numbers(pointer["metrics"]),
        **{name: pointer["made_of"].get(name) for name in ("dataset", "code", "manifest")},
    }
    model = dataset_at(
        pointer["model"], version=_name_of(pointer["publication"]), format=SAVED_MODEL, model=facts
    )
    return Flow(inputs=(model,), outputs=(_pointer(results, dag_id, PRODUCTION, model),))


_Both = tuple[tuple[Dataset, ...], tuple[Dataset, ...]]


def _stage(
    step: StageDataStep, dag_id: str, layout: RunLayout, done: Mapping[str, Any] | None
) -> _Both:
    if done is None:  # what an earlier try has left may be another version's
        return (dataset_at(step.dataset.uri),), ()
    told = read_part(layout, "stage_data")["dataset"]
    source = dataset_at(
        told["uri"], version=told["fingerprint"], files=told["files"], nbytes=told["bytes"]
    )
    return (source,), (_staged(layout),)


def _train(
    step: TrainStep, dag_id: str, layout: RunLayout, done: Mapping[str, Any] | None
) -> _Both:
    return (_staged(layout),), (_result(layout),)


def _transform(
    step: TransformStep, dag_id: str, layout: RunLayout, done: Mapping[str, Any] | None
) -> _Both:
    return (_result(layout),), (_model(layout),)


def _evaluate(
    step: EvaluateStep, dag_id: str, layout: RunLayout, done: Mapping[str, Any] | None
) -> _Both:
    inputs = [_model(layout)]
    known = evaluated(layout) if done is not None else None
    if known is not None and known["result"]["evaluation"]["production"]:
        inputs.append(dataset_at(f"{step.results.uri}/{dag_id}/{PRODUCTION}.json", format="json"))
    return tuple(inputs), ()


def _approve(
    step: ApproveStep, dag_id: str, layout: RunLayout, done: Mapping[str, Any] | None
) -> _Both:
    return (_model(layout),), ()


def _upload(
    step: UploadResultsStep, dag_id: str, layout: RunLayout, done: Mapping[str, Any] | None
) -> _Both:
    model = _model(layout)
    if done is None:
        return (model,), ()
    record = read_object(layout.kept / LINEAGE, layout.workspace, MOST_BYTES)
    told = [file for file in record["result"]["files"] if file["key"].startswith("model/")]
    facts = {
        **model.model,
        "publication": f"{layout.training_id}/{done['training'].rpartition('/')[2]}",
        "digest": model_digest(record),
        "lineage": done["lineage"],
        "metrics": _numbers(record["result"]["metrics"]),
        "dataset": record["dataset"]["fingerprint"],
        "code": record["code"]["digest"],
        "manifest": record["manifest"]["digest"],
    }
    published = dataset_at(
        done["model"],
        version=_name_of(facts["publication"]),
        format=SAVED_MODEL,
        fields=model.fields,
        files=len(told),
        nbytes=sum(file["size"] for file in told),
        model=facts,
        made_of=(model,),
    )
    moved = [_pointer(step.results.uri, dag_id, name, published) for name in done["pointers"]]
    # What Airflow calls the asset: who waits for it has it as an input.
    asset = dataset_at(
        f"{step.results.uri}/{dag_id}",
        version=facts["publication"],
        model=facts,
        made_of=(published,),
    )
    return (model,), (published, *moved, asset)


_KINDS: Mapping[type[Step], Any] = {
    StageDataStep: _stage,
    TrainStep: _train,
    TransformStep: _transform,
    EvaluateStep: _evaluate,
    ApproveStep: _approve,
    UploadResultsStep: _upload,
}


def _at(path: Path, **facts: Any) -> Dataset:
    return Dataset(namespace="file", name=str(path), layer="file", **facts)


def _staged(layout: RunLayout) -> Dataset:
    told = _part(layout, "stage_data").get("dataset")
    if told is None:
        return _at(layout.staged)
    return _at(
        layout.staged, version=told["fingerprint"], files=told["files"], nbytes=told["bytes"]
    )


def _result(layout: RunLayout) -> Dataset:
    return _at(layout.result)


def _model(layout: RunLayout) -> Dataset:
    told = _part(layout, "transform").get("result", {})
    facts: Facts = {"training_id": layout.training_id}
    checkpoint, step = told.get("checkpoint"), told.get("checkpoint_step")
    if isinstance(checkpoint, str):
        facts["checkpoint"] = checkpoint[:_LONGEST_NAME]
    if type(step) is int:
        facts["checkpoint_step"] = step
    fields = tuple(_fields(told.get("signatures")))
    return _at(layout.model, format=SAVED_MODEL, fields=fields, model=facts)


def _pointer(results: str, dag_id: str, name: str, model: Dataset) -> Dataset:
    return dataset_at(
        f"{results}/{dag_id}/{name}.json",
        version=model.model["publication"],
        format="json",
        model=model.model,
        made_of=(model,),
    )


def _fields(signatures: Any) -> Iterator[tuple[str, str]]:
    """Of each signature its inputs and outputs; the report was written where ranks may write."""
    left = _MOST_FIELDS
    for name, sides in _items(signatures):
        for side in ("inputs", "outputs"):
            for tensor, spec in _items(sides.get(side) if isinstance(sides, Mapping) else None):
                if not left or not isinstance(spec, Mapping):
                    return
                left -= 1
                shape = json.dumps(spec.get("shape"))[:_LONGEST_NAME]
                said = f"{spec.get('dtype')} {shape}"
                yield f"{name}.{side}.{tensor}"[:_LONGEST_NAME], said[:_LONGEST_NAME]


def _items(value: Any) -> list[tuple[str, Any]]:
    return sorted(value.items()) if isinstance(value, Mapping) else []


def _training(layout: RunLayout) -> Facts:
    """What is known of the training by now."""
    staged, trained = _part(layout, "stage_data"), _part(layout, "train")
    known: Facts = {"training_id": layout.training_id, "experiment": layout.experiment.name}
    if staged:
        known["dataset"] = staged["dataset"]["fingerprint"]
        known["code"] = staged["code"]["digest"]
        known["git_commit"] = staged["code"]["git_commit"]
    if trained:
        environment, result = trained["environment"], trained["result"]
        known |= {name: environment.get(name) for name in _OF_ENVIRONMENT}
        known["metrics"] = _numbers(result["metrics"])
        known["steps"] = result["steps"]
    return known


def _failure(layout: RunLayout) -> Facts:
    try:
        told = read_object(layout.failure, layout.workspace)
    except _ODD:  # nobody could note it
        return {}
    return {"failure": {name: told.get(name) for name in ("step", "try", "error", "rank")}}


def _manifest(step: Step, layout: RunLayout) -> Facts:
    told = getattr(step, "manifest", None) or _part(layout, "stage_data").get("manifest", {})
    known = ("name", "digest", "dialect", "file", "author")
    return {name: told[name] for name in known if name in told}


def _part(layout: RunLayout, step: str) -> Facts:
    try:
        return read_part(layout, step) if fixed_run(layout) is not None else {}
    except _ODD:  # it has not ended; or it worked with what is no longer there
        return {}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """JSON has no others."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _name_of(publication: str) -> str:
    return publication.rpartition("/")[2]
