"""Manifest to plan: the steps of one training and their settings. No Airflow words.

``stage_data -> train -> transform (-> evaluate (-> approve)) -> upload_results``. Same manifest,
same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddl_airflow.core.compute import Place
from ddl_airflow.core.manifest import Connection, Manifest, Reference, Schedule

_MASK = "***"


@dataclass(frozen=True)
class StoreReference:
    """Where objects lie and how to reach them.

    Attributes:
        uri: as the ``StoreKind`` has it; never ends with a slash.
        connection: keys, or where to find them; None for a store that needs none.
        within: folders out of which no link of that folder may lead; empty: the folder itself;
            None: it may.
    """

    uri: str
    connection: Connection | None = None
    within: tuple[Path, ...] | None = None

    def view(self) -> dict[str, str]:
        """What may be shown: everything but keys."""
        shown = {"uri": self.uri}
        if self.connection is None:
            return shown
        if self.connection.conn_id:
            return shown | {"conn_id": self.connection.conn_id}
        return shown | {
            "endpoint_url": str(self.connection.endpoint_url),
            "access_key_id": _MASK,
            "secret_access_key": _MASK,
        }


@dataclass(frozen=True)
class ScheduleStep:
    """When the training runs by itself.

    Attributes:
        cron: cron expression or preset; empty for none.
        timetable: class path of a registered timetable; empty for none.
        timezone: of cron and start.
        start: ISO 8601, without a zone; empty: long ago.
        catchup: whether every missed time is made up for.
        on_data_change: whether it runs when the dataset has changed.
        assets: URIs and names; it runs when all of them were updated.
        max_active_runs: runs at the same time.
    """

    cron: str
    timetable: str
    timezone: str
    start: str
    catchup: bool
    on_data_change: bool
    assets: tuple[str, ...]
    max_active_runs: int


@dataclass(frozen=True)
class Tries:
    """How often a step is tried, and for how long.

    Attributes:
        attempts: in all, the first included.
        delay_s: seconds before the second; each further pause doubles if ``backoff`` is
            ``exponential``.
        timeout_s: seconds that one try may take; None for no limit.
    """

    attempts: int
    delay_s: float
    backoff: str
    timeout_s: float | None


@dataclass(frozen=True)
class StageDataStep:
    """Bring the data and the code to where ranks find them.

    Attributes:
        dataset: the training data.
        code: folder of the scripts.
        not_code: folders that may lie in it and are no scripts: data and results.
    """

    dataset: StoreReference
    code: Path
    not_code: tuple[Path, ...]


@dataclass(frozen=True)
class TrainStep:
    """Run the manifest's first command on all ranks.

    Attributes:
        scheduler: arguments of the launcher's class; none for a kind without fields of its own.
        gpu: whether each rank expects a GPU of its own.
        distribution: ``mpi``, ``independent`` or ``parameter_server``.
        tf1: whether the script is written for TensorFlow 1.
        when_busy: while another training works in the experiment: ``wait``, or ``skip`` this one.
        place: where Airflow runs it.
        pool_slots: of the place's pool: one for each rank, which is each GPU.
    """

    command: str
    nodes: int
    slots: int
    place: Place
    pool_slots: int
    launcher: str
    scheduler: Mapping[str, Any]
    gpu: bool
    distribution: str
    python: str
    framework: str
    tf1: bool
    when_busy: str
    metrics: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class TransformStep:
    """Checkpoint to SavedModel: the manifest's further commands, or the built-in way.

    Attributes:
        commands: run in order, once each; empty for the built-in transform.
        checkpoint: ``latest`` or a step.
        inputs, outputs: signature name to tensor name; empty to look in the graph.
        sample: file whose rows the reloaded model must predict; empty to look for one.
        tf1: whether the commands' scripts are written for TensorFlow 1.
    """

    commands: tuple[str, ...]
    checkpoint: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    sample: str
    python: str
    tf1: bool


@dataclass(frozen=True)
class EvaluateStep:
    """Ask whether the model is good enough.

    Attributes:
        command: run once; empty for none.
        metric: that decides; empty if none does, and a person is only shown all.
        source: what it must be measured on (``ddl_airflow.core.metrics``); empty: anything but
            training batches.
        minimum, maximum: its bounds.
        not_worse: whether the model in production is one too.
    """

    command: str = ""
    metric: str = ""
    source: str = ""
    minimum: float | None = None
    maximum: float | None = None
    not_worse: bool = False


@dataclass(frozen=True)
class ApproveStep:
    """Ask a person.

    Attributes:
        timeout_s: how long; None without an end.
        then: what counts as the answer after that: ``reject`` or ``approve``.
    """

    timeout_s: float | None
    then: str


@dataclass(frozen=True)
class UploadResultsStep:
    """Publish the results with their lineage.

    Attributes:
        promote: whether what is published goes into production: it was looked at before.
        keep: publications that stay, the newest; None: all.
    """

    results: StoreReference
    promote: bool
    keep: int | None


@dataclass(frozen=True)
class Plan:
    """One manifest's training.

    Attributes:
        tries: of each step, by its name.
        parameters: values of the script's parameters, where a run sets no others.
        secrets: of each secret one the connection that has its value, by the parameter's name.
        experiment: the experiment that its runs go on with; empty: each is one of its own.
        experiments: whether the script is expected to work in experiments, so that a run may choose
            one.
        other_steps: where Airflow runs all steps but the training.
    """

    dag_id: str
    manifest: Mapping[str, Any]
    schedule: ScheduleStep
    tries: Mapping[str, Tries]
    parameters: Mapping[str, bool | int | float | str]
    secrets: Mapping[str, str]
    experiment: str
    experiments: bool
    stage_data: StageDataStep
    train: TrainStep
    transform: TransformStep
    evaluate: EvaluateStep | None
    approve: ApproveStep | None
    upload_results: UploadResultsStep
    other_steps: Place


def _store(reference: Reference, folder: Path) -> StoreReference:
    return StoreReference(reference.store.uri(reference.place, folder), reference.connection)


def plan(manifest: Manifest, path: Path) -> Plan:
    """The plan of a manifest.

    Args:
        manifest: as loaded.
        path: the manifest's file; ``code:`` and folders are relative to it.
    """
    definition = manifest.model_definition
    framework = definition.framework
    first, *rest = manifest.commands
    nodes = definition.execution.compute_configuration.nodes
    references = (manifest.training_data_reference, manifest.training_results_reference)
    return Plan(
        dag_id=manifest.dag_id,
        manifest={
            "name": definition.name,
            "digest": manifest.digest,
            "dialect": manifest.dialect,
            "file": path.name,
        },
        parameters={
            name: one.default
            for name, one in manifest.parameters.items()
            if one.default is not None
        },
        secrets={
            name: one.conn_id or name for name, one in manifest.parameters.items() if one.secret
        },
        experiment=manifest.experiment.name if manifest.experiment else "",
        experiments=manifest.experiment is not None or manifest.distribution == "parameter_server",
        schedule=_schedule(manifest.schedule or Schedule()),
        tries=_tries(manifest),
        stage_data=StageDataStep(
            dataset=_store(manifest.training_data_reference, path.parent),
            code=(path.parent / manifest.code).resolve(),
            not_code=tuple(
                folder
                for reference in references
                if (folder := reference.store.folder(reference.place, path.parent)) is not None
            ),
        ),
        train=TrainStep(
            command=first,
            nodes=nodes,
            slots=manifest.slots,
            place=manifest.compute.train,
            pool_slots=nodes * manifest.slots if manifest.compute.train.pool else 1,
            launcher=manifest.launcher.kind,
            scheduler=manifest.launcher.settings(),
            gpu=manifest.compute.gpu,
            distribution=manifest.distribution,
            python=manifest.launcher.python or "",
            framework=f"{framework.name} {framework.version}",
            tf1=manifest.tf1,
            when_busy=manifest.experiment.when_busy if manifest.experiment else "wait",
            metrics=tuple({"name": m.name, "regex": m.regex} for m in manifest.metrics),
        ),
        transform=TransformStep(
            commands=tuple(rest),
            checkpoint=str(manifest.transform.checkpoint),
            inputs=dict(manifest.transform.inputs),
            outputs=dict(manifest.transform.outputs),
            sample=manifest.transform.sample or "",
            python=manifest.launcher.python or "",
            tf1=manifest.tf1,
        ),
        evaluate=_evaluate(manifest),
        approve=_approve(manifest),
        upload_results=UploadResultsStep(
            results=_store(manifest.training_results_reference, path.parent),
            promote=_evaluate(manifest) is not None,
            keep=manifest.keep,
        ),
        other_steps=manifest.compute.other_steps,
    )


def _tries(manifest: Manifest) -> dict[str, Tries]:
    common = manifest.retries
    return {
        name: Tries(
            attempts=common.attempts if step.attempts is None else step.attempts,
            delay_s=(common.delay if step.delay is None else step.delay).total_seconds(),
            backoff=common.backoff,
            timeout_s=None if step.timeout is None else step.timeout.total_seconds(),
        )
        for name, step in manifest.steps
        if name != "evaluate" or _evaluate(manifest) is not None
    }


def _schedule(asked: Schedule) -> ScheduleStep:
    return ScheduleStep(
        cron=asked.cron or "",
        timetable=asked.timetable or "",
        timezone=asked.timezone or "UTC",
        start=asked.start.isoformat() if asked.start else "",
        catchup=asked.catchup,
        on_data_change=asked.on_data_change,
        assets=asked.assets,
        max_active_runs=asked.max_active_runs,
    )


def _evaluate(manifest: Manifest) -> EvaluateStep | None:
    """The step, also where there are no bounds but a person who wants to see."""
    asked = manifest.evaluation
    if asked is None:
        return EvaluateStep() if manifest.approval.required else None
    return EvaluateStep(
        command=asked.command or "",
        metric=asked.metric,
        source=asked.source or "",
        minimum=asked.minimum,
        maximum=asked.maximum,
        not_worse=asked.not_worse_than_production,
    )


def _approve(manifest: Manifest) -> ApproveStep | None:
    asked = manifest.approval
    if not asked.required:
        return None
    timeout_s = None if asked.timeout is None else asked.timeout.total_seconds()
    return ApproveStep(timeout_s, asked.then)
