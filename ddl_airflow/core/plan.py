"""Manifest to plan: the steps of one training and their settings. No Airflow words.

``stage_data -> train -> transform (-> evaluate (-> approve)) -> upload_results``. Same manifest,
same plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

from ddl_airflow.core.compute import Place
from ddl_airflow.core.manifest.digest import digest, earlier_digests
from ddl_airflow.core.manifest.folder import label
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.sections.places import Connection, Reference
from ddl_airflow.core.manifest.sections.schedule import Schedule
from ddl_airflow.core.manifest.values import has_written_secret
from ddl_airflow.core.selection import Selection

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


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step is asked to do; a value, which says nothing of how.

    Attributes:
        settable: fields that a run may set, by parameters of their names.
        templated: fields in which templates are filled in.
        not_fixed: fields that a run takes as they are now; all others it keeps as they were when
            it staged its data, whatever becomes of the manifest.
    """

    settable: ClassVar[tuple[str, ...]] = ()
    templated: ClassVar[tuple[str, ...]] = ()
    not_fixed: ClassVar[tuple[str, ...]] = ()

    def fixed(self) -> dict[str, Any]:
        """The fields that a run keeps, by name: those that are values by now."""
        kept = {
            one.name: getattr(self, one.name)
            for one in fields(self)
            if one.name not in self.not_fixed
        }
        # Of an operator of a Python DAG an earlier task may be about to return the others.
        return {name: value for name, value in kept.items() if _is_value(value)}


def _is_value(value: Any) -> bool:
    """Whether a run can keep it, as JSON."""
    if isinstance(value, Mapping):
        return all(map(_is_value, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_is_value, value))
    return value is None or isinstance(value, (bool, int, float, str))


@dataclass(frozen=True, kw_only=True)
class ScriptStep(Step):
    """A step that starts processes of the manifest, in the ranks' Python.

    Attributes:
        python: the processes' Python; empty for the site's.
        tf1: whether the scripts are written for TensorFlow 1: `import tensorflow` gives that API.
        parameters: values that a run may change, by name; ``PARAM_<NAME>`` in the environment.
        secrets: of each secret parameter the id of the Airflow connection whose password is its
            value; ``PARAM_<NAME>`` in the environment, and nowhere else.
    """

    python: str = ""
    tf1: bool = False
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StageDataStep(Step):
    """Bring the data and the code to where ranks find them.

    Attributes:
        dataset: the training data.
        code: folder of the scripts.
        commands: the manifest's commands, that of the training first; checked against the code.
        evaluation: that of the evaluation, checked as well; empty: none.
        not_code: folders that may lie in it and are no scripts: data and results.
        python: the ranks' Python, for the checks; empty for the site's.
        results: where trainings are published. A run that no person started does nothing if the
            newest one there was made of the same and is whole, or one that was rejected was. None:
            it always trains.
        manifest: name, digest and dialect of the manifest, for that, ``said``: what its digest
            covers, and ``earlier_digests``: what earlier versions of ours called the same one.
            Empty in a Python DAG, which has none: see ``named_by``.
        prove: whether the lineage has a digest of each file.
        include, exclude: patterns of the objects of the place that are the data, as ``Selection``
            has them.
        unpack: whether archives among them become folders of what is in them.
        not_before: ISO 8601; a run that an event has started before then does nothing. Empty: none.
    """

    dataset: StoreReference
    code: Path
    commands: Sequence[str]
    evaluation: str = ""
    not_code: Sequence[Path] = ()
    python: str = ""
    results: StoreReference | None = None
    manifest: Mapping[str, Any] = field(default_factory=dict)
    prove: bool = False
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    unpack: bool = False
    not_before: str = ""

    @property
    def selection(self) -> Selection:
        """Which objects of the place are the data."""
        return Selection(tuple(self.include), tuple(self.exclude))

    def fixed(self) -> dict[str, Any]:
        """Nothing: this is the step that fixes what the run trains with."""
        return {}


@dataclass(frozen=True, kw_only=True)
class TrainStep(ScriptStep):
    """Run the manifest's first command on all ranks.

    Attributes:
        command: what each rank runs, in the run's copy of the code.
        nodes, slots: hosts, and ranks on each.
        launcher: how ranks start, a name of ``ddl_airflow.launchers.registry``.
        scheduler: arguments of the launcher's class; nothing to a launcher that a run chooses
            instead.
        gpu: whether each rank expects a GPU of its own.
        distribution: ``mpi``: ``nodes * slots`` ranks, which must not train apart;
            ``independent``: the same, and they may; ``parameter_server``: the tasks of
            ``ddl_airflow.core.cluster.parameter_servers``, each with its own TF_CONFIG.
        framework: shown only; what runs is what the ranks' Python has.
        when_busy: while another training works in the experiment: ``wait``, or ``skip`` this one.
        metrics: name and regular expression of each metric to find in rank 0's output.
        prove: whether rank 0 notes digests of the weights as it trains, and the lineage has a
            digest of each file that has come meanwhile.
        stream: whether the data come while the ranks run; ``stage_data`` then only lists them.
        dataset: where from; None where nothing comes.
        upload_every_s: how often checkpoints are saved while the ranks run; None: never.
        results: where to; None where none are.
    """

    settable = ("nodes", "launcher")
    templated = ("command",)
    # The keys are those of now. That it is the run's data, the step sees.
    not_fixed = ("dataset", "upload_every_s", "results")

    command: str
    nodes: int = 1
    slots: int = 1
    launcher: str = "local"
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    gpu: bool = False
    distribution: str = "mpi"
    framework: str = ""
    when_busy: str = "wait"
    metrics: Sequence[Mapping[str, str]] = ()
    prove: bool = False
    stream: bool = False
    dataset: StoreReference | None = None
    upload_every_s: float | None = None
    results: StoreReference | None = None


@dataclass(frozen=True, kw_only=True)
class TransformStep(ScriptStep):
    """Checkpoint to SavedModel: the manifest's further commands, or the built-in way.

    Attributes:
        commands: run in order, once each; empty for the built-in transform.
        checkpoint: ``latest`` or a step.
        inputs, outputs: signature name to tensor name; empty to look in the graph.
        sample: file whose rows the reloaded model must predict; empty to look for one.
    """

    settable = ("checkpoint",)
    templated = ("commands",)

    commands: Sequence[str] = ()
    checkpoint: str = "latest"
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    sample: str = ""


@dataclass(frozen=True, kw_only=True)
class EvaluateStep(ScriptStep):
    """Ask whether the model is good enough.

    Attributes:
        results: where production's metrics are.
        command: run once; writes a JSON object of numbers to ``$EVALUATION``. Empty: none.
        metric: that decides; empty if none does, and a person is only shown all.
        source: what it must be measured on (``ddl_airflow.core.metrics``); empty: anything but
            training batches.
        minimum, maximum: that it must reach, may not exceed.
        not_worse: whether it must be at least as good as that of the model in production.
    """

    templated = ("command",)
    not_fixed = ("results",)

    results: StoreReference
    command: str = ""
    metric: str = ""
    source: str = ""
    minimum: float | None = None
    maximum: float | None = None
    not_worse: bool = False


@dataclass(frozen=True, kw_only=True)
class ApproveStep(Step):
    """Ask a person.

    Attributes:
        results: where rejections are remembered.
        timeout_s: how long to wait for the answer; None without an end.
        then: the answer that counts after that: ``reject`` or ``approve``.
    """

    not_fixed = ("results", "timeout_s", "then")

    results: StoreReference
    timeout_s: float | None = None
    then: str = "reject"


@dataclass(frozen=True, kw_only=True)
class UploadResultsStep(Step):
    """Publish the results with their lineage.

    Attributes:
        results: where to.
        manifest: name, digest and dialect of the manifest, for the lineage. Empty in a Python DAG,
            which has none: see ``named_by``.
        promote: whether the model goes into production, unless that of a later run is there.
        not_worse_in: the metric in which it then must be as good as that in production is at that
            moment; empty: none.
        source: what that must be measured on; empty: anything but training batches.
        small: whether less of the metric is better.
        keep: publications of the DAG that stay when the results are cleaned, the newest; None: all.
        with_code: whether the scripts are published beside the model.
    """

    # They go to where they are wanted now.
    not_fixed = ("results", "keep", "with_code")

    results: StoreReference
    manifest: Mapping[str, Any] = field(default_factory=dict)
    promote: bool = False
    not_worse_in: str = ""
    source: str = ""
    small: bool = False
    keep: int | None = None
    with_code: bool = True


def named_by(
    manifest: Mapping[str, Any], dag_id: str, steps: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any]:
    """What a training is known by: its manifest, or what the steps of its Python DAG say.

    Args:
        manifest: as ``UploadResultsStep`` has it.
        dag_id: its DAG.
        steps: what was fixed of the steps after the staging, by their names.
    """
    if "digest" in manifest:
        return manifest
    return {"name": dag_id, "dialect": "python", **manifest, "digest": digest(steps)}


@dataclass(frozen=True)
class Plan:
    """One manifest's training.

    Attributes:
        tries: of each step, by its name.
        experiment: the experiment that its runs go on with; empty: each is one of its own.
        experiments: whether the script is expected to work in experiments, so that a run may choose
            one.
        train_on: where Airflow runs the training.
        pool_slots: of that place's pool: one for each rank, which is each GPU.
        other_steps: where Airflow runs all other steps.
    """

    dag_id: str
    schedule: ScheduleStep
    tries: Mapping[str, Tries]
    experiment: str
    experiments: bool
    stage_data: StageDataStep
    train: TrainStep
    transform: TransformStep
    evaluate: EvaluateStep | None
    approve: ApproveStep | None
    upload_results: UploadResultsStep
    train_on: Place
    pool_slots: int
    other_steps: Place


def _store(reference: Reference, folder: Path) -> StoreReference:
    return StoreReference(reference.store.uri(reference.place, folder), reference.connection)


def plan(manifest: Manifest, path: Path) -> Plan:
    """The plan of a manifest.

    Args:
        manifest: as loaded.
        path: the manifest's file; ``code:`` and folders are relative to it.
    """
    definition, said = manifest.model_definition, manifest.said
    framework = definition.framework
    first, *rest = manifest.commands
    nodes = definition.execution.compute_configuration.nodes
    references = (manifest.training_data_reference, manifest.training_results_reference)
    dataset = _store(manifest.training_data_reference, path.parent)
    results = _store(manifest.training_results_reference, path.parent)
    stream, saved = manifest.training_data_reference.stream, manifest.checkpoints
    named = {
        "name": definition.name,
        "digest": digest(said),
        "earlier_digests": list(earlier_digests(said)),
        "dialect": manifest.dialect,
        "file": label(path.name),
        **({"author": str(author)} if (author := definition.author) else {}),
    }
    scripts = _scripts(manifest)
    evaluate = _evaluate(manifest, results, scripts)
    evaluation = evaluate.command if evaluate else ""
    # The record is published, and with it what is written into a command.
    has_secret = any(map(has_written_secret, (*manifest.commands, evaluation)))
    return Plan(
        dag_id=manifest.dag_id,
        experiment=manifest.experiment.name if manifest.experiment else "",
        experiments=manifest.experiment is not None or manifest.distribution == "parameter_server",
        schedule=_schedule(manifest.schedule or Schedule()),
        tries=_tries(manifest),
        stage_data=StageDataStep(
            dataset=dataset,
            code=(path.parent / manifest.code).resolve(),
            commands=manifest.commands,
            evaluation=evaluation,
            not_code=tuple(
                folder
                for reference in references
                if (folder := reference.store.folder(reference.place, path.parent)) is not None
            ),
            python=_python(manifest),
            results=results,
            manifest=named if has_secret else {**named, "said": said},
            prove=manifest.lineage.prove,
            include=manifest.training_data_reference.include,
            exclude=manifest.training_data_reference.exclude,
            unpack=manifest.training_data_reference.unpack,
            not_before=_not_before(manifest.schedule or Schedule()),
        ),
        train=TrainStep(
            command=first,
            nodes=nodes,
            slots=manifest.slots,
            launcher=manifest.launcher.kind,
            scheduler=manifest.launcher.settings(),
            gpu=manifest.compute.gpu,
            distribution=manifest.distribution,
            framework=f"{framework.name} {framework.version}",
            when_busy=manifest.experiment.when_busy if manifest.experiment else "wait",
            metrics=tuple({"name": m.name, "regex": m.regex} for m in manifest.metrics),
            prove=manifest.lineage.prove,
            stream=stream,
            dataset=dataset if stream else None,
            upload_every_s=saved.upload_every.total_seconds() if saved else None,
            results=results if saved else None,
            **scripts,
        ),
        transform=TransformStep(
            commands=tuple(rest),
            checkpoint=str(manifest.transform.checkpoint),
            inputs=dict(manifest.transform.inputs),
            outputs=dict(manifest.transform.outputs),
            sample=manifest.transform.sample or "",
            **scripts,
        ),
        evaluate=evaluate,
        approve=_approve(manifest, results),
        upload_results=_upload(manifest, results, named, evaluate),
        train_on=manifest.compute.train,
        pool_slots=nodes * manifest.slots if manifest.compute.train.pool else 1,
        other_steps=manifest.compute.other_steps,
    )


def _scripts(manifest: Manifest) -> dict[str, Any]:
    """What all steps that start processes of the manifest have in common: ``ScriptStep``."""
    given = manifest.parameters.items()
    return {
        "python": _python(manifest),
        "tf1": manifest.tf1,
        "parameters": {name: one.default for name, one in given if one.default is not None},
        "secrets": {name: one.conn_id or name for name, one in given if one.secret},
    }


def _python(manifest: Manifest) -> str:
    """The interpreter of what runs on Airflow's hosts; empty: the site's.

    A launcher with an image has that of the ranks among its settings.
    """
    return "" if manifest.launcher.has_image else manifest.launcher.python or ""


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
        if name != "evaluate" or _is_evaluated(manifest)
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


def _not_before(asked: Schedule) -> str:
    zone = ZoneInfo(asked.timezone or "UTC")
    return asked.start.replace(tzinfo=zone).isoformat() if asked.start else ""


def _is_evaluated(manifest: Manifest) -> bool:
    """Also where there are no bounds but a person who wants to see."""
    return manifest.evaluation is not None or manifest.approval.required


def _evaluate(
    manifest: Manifest, results: StoreReference, scripts: Mapping[str, Any]
) -> EvaluateStep | None:
    if not _is_evaluated(manifest):
        return None
    asked = manifest.evaluation
    if asked is None:
        return EvaluateStep(results=results, **scripts)
    return EvaluateStep(
        results=results,
        command=asked.command or "",
        metric=asked.metric,
        source=asked.source or "",
        minimum=asked.minimum,
        maximum=asked.maximum,
        not_worse=asked.not_worse_than_production,
        **scripts,
    )


def _upload(
    manifest: Manifest,
    results: StoreReference,
    named: Mapping[str, Any],
    evaluate: EvaluateStep | None,
) -> UploadResultsStep:
    bound: dict[str, Any] = {}
    if evaluate is not None and evaluate.not_worse:  # it must still hold when it is published
        small = smaller_is_better(evaluate.minimum, evaluate.maximum)
        bound = {"not_worse_in": evaluate.metric, "source": evaluate.source, "small": small}
    promote = evaluate is not None  # what is published was looked at before
    return UploadResultsStep(
        results=results,
        manifest=named,
        promote=promote,
        keep=manifest.keep,
        with_code=manifest.lineage.code,
        **bound,
    )


def smaller_is_better(minimum: float | None, maximum: float | None) -> bool:
    """Whoever bounds a metric from above alone wants it small."""
    return minimum is None and maximum is not None


def _approve(manifest: Manifest, results: StoreReference) -> ApproveStep | None:
    asked = manifest.approval
    if not asked.required:
        return None
    timeout_s = None if asked.timeout is None else asked.timeout.total_seconds()
    return ApproveStep(results=results, timeout_s=timeout_s, then=asked.then)


def confined(steps: Plan, within: tuple[Path, ...]) -> Plan:
    """The plan, in which no link of a folder leads out of these.

    Args:
        steps: a plan.
        within: folders, as ``StoreReference`` has them.
    """

    def to(reference: StoreReference) -> StoreReference:
        return replace(reference, within=within)

    results = to(steps.upload_results.results)
    train = steps.train
    return replace(
        steps,
        train=replace(
            train,
            dataset=train.dataset and to(train.dataset),
            results=train.results and to(train.results),
        ),
        stage_data=replace(steps.stage_data, dataset=to(steps.stage_data.dataset), results=results),
        evaluate=steps.evaluate and replace(steps.evaluate, results=results),
        approve=steps.approve and replace(steps.approve, results=results),
        upload_results=replace(steps.upload_results, results=results),
    )
