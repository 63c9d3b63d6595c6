"""Plan to DAG: the DAG of one manifest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from airflow.configuration import conf
from airflow.sdk import (
    Asset,
    AssetAll,
    AssetAny,
    AssetWatcher,
    BaseOperator,
    Param,
    get_parsing_context,
)
from pendulum import timezone

from ddl_airflow.airflow_internals import (
    DagShownAs,
    asset_of,
    collecting,
    executors,
    leave_out,
    looked_up_by_dags,
    made_task,
    set_params,
)
from ddl_airflow.core.errors import ManifestError, ManifestInvalid, ManifestIssue
from ddl_airflow.core.manifest.folder import label
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.rights import Place, beyond, looked_up
from ddl_airflow.core.manifest.rule import suggestion
from ddl_airflow.core.manifest.rules import findings_beside
from ddl_airflow.core.manifest.sections.schedule import DATA_CHANGE
from ddl_airflow.core.manifest.sections.stores import kind_of_uri
from ddl_airflow.core.plan import ApproveStep, Plan, ScheduleStep, Step, confined, plan
from ddl_airflow.core.real_path import real_path
from ddl_airflow.documentation import documentation
from ddl_airflow.form import form
from ddl_airflow.notifications import default_connections, notifiers, say_error
from ddl_airflow.operators.base import StepOperator
from ddl_airflow.operators.evaluate import EvaluateOperator
from ddl_airflow.operators.stage import StageDataOperator
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.operators.transform import TransformOperator
from ddl_airflow.operators.upload import UploadResultsOperator


class ManifestDag(DagShownAs):
    """The DAG of one manifest, which is what Airflow's UI shows as its code."""

    # In a loader: what is wrong with the manifest if that other file has its DAG id.
    also_claimed_by: Callable[[str], ManifestError] | None = None

    def validate(self) -> None:
        """Beside Airflow's own checks: no DAG of a loader has the id of one in another file.

        Airflow files that under the loader, and makes all its DAGs stale.

        Raises:
            AirflowClusterPolicySkipDag: another has it, which is filed under the manifest.
        """
        super().validate()
        if self.also_claimed_by is None or (bag := collecting()) is None:
            return
        other = bag.dags.get(self.dag_id)
        if other is not None and other.fileloc != self.fileloc:
            error = self.also_claimed_by(other.relative_fileloc or other.fileloc)
            leave_out(bag, error.source, str(error))


@dataclass(frozen=True)
class Settings:
    """What Airflow's configuration says that is the same for all manifests of a parse.

    A look-up takes as long as a page of documentation, and each DAG would make half a dozen.

    Attributes:
        compute: ``[ddl] compute``.
        rights: ``[ddl] manifest_rights``.
        dag: arguments of ``DAG`` that it would else look up.
    """

    compute: str
    rights: str
    dag: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, *, for_many: bool = False) -> Settings:
        """As they are now.

        Args:
            for_many: whether many DAGs are made with them, so that their own are worth reading.
        """
        return cls(
            conf.get("ddl", "compute", fallback=""),
            conf.get("ddl", "manifest_rights", fallback=""),
            looked_up_by_dags() if for_many else {},
        )

    @classmethod
    def of_this_parse(cls) -> Settings:
        """As they were when the ``DagBag`` that calls came to its first stub, if one calls."""
        bag = collecting()
        if bag is None:
            return cls.read()
        known = _of_bags.get(bag)
        if known is None:
            known = cls.read()  # most have one stub alone
        elif not known.dag:
            known = cls.read(for_many=True)
        _of_bags[bag] = known
        return known


_of_bags: WeakKeyDictionary[Any, Settings] = WeakKeyDictionary()


def dag_from(
    manifest: Manifest,
    path: Path,
    text: str = "",
    shown_as_code: Path | None = None,
    settings: Settings | None = None,
    place: Place | None = None,
) -> ManifestDag:
    """The DAG of one manifest.

    Args:
        manifest: as loaded.
        path: its file; code and folders are relative to it.
        text: the manifest as written, shown (without keys) in the DAG's documentation where the
            Code tab does not show it.
        shown_as_code: the file that Airflow's Code tab shows; by default the one that calls this.
        settings: the site's; by default as they are now.
        place: where the file lay when it was read; by default where it lies now.
    """
    settings = settings or Settings.read()
    steps = plan(manifest, path)
    # Once: a name may lead to another folder, with other rights, the next time.
    place = place or _place_now(path, settings.rights, manifest.source)
    _check_place(manifest, path, place)
    _check_executors(steps, manifest)
    if place is not None:
        steps = confined(steps, (place.folder, *place.rights.paths))
    _check_names(steps, manifest)
    failed = notifiers(manifest, "on_failure")
    with ManifestDag(
        dag_id=steps.dag_id,
        description=manifest.model_definition.description or f"Training from {label(path.name)}",
        schedule=_schedule(steps, manifest),
        start_date=_start(steps.schedule),
        catchup=steps.schedule.catchup,
        max_active_runs=steps.schedule.max_active_runs,
        tags={"ddl", manifest.model_definition.framework.name},
        doc_md=documentation(manifest, steps, path, "" if shown_as_code else text),
        default_args={"on_failure_callback": [say_error, *failed] if failed else None},
        **settings.dag,
    ) as dag:
        dag.shown_as_code = shown_as_code
        fields = form(manifest, steps, (place and place.rights.launchers) or ())
        _tasks(dag, steps, list(fields), manifest)
    if get_parsing_context().task_id not in (None, "stage_data"):
        # The task of a run whose values were held to the form of then, by Airflow when it began
        # and by stage_data: the manifest may have been edited since.
        fields = {name: Param(one.value) for name, one in fields.items()}
    # After the tasks: each would make its own copy, and a run takes the DAG's.
    set_params(dag, fields)
    return dag


def _start(asked: ScheduleStep) -> datetime:
    """Its time zone is the DAG's, in which Airflow reads a cron expression."""
    start = datetime.fromisoformat(asked.start or "2024-01-01")
    return start.replace(tzinfo=timezone(asked.timezone))


def _schedule(steps: Plan, manifest: Manifest) -> Any:
    """Time, events of assets, whichever comes first, or None."""
    asked = steps.schedule
    time: Any = _registered(asked.timetable, manifest) if asked.timetable else asked.cron or None
    events: list[Any] = []
    if asked.on_data_change:
        events.append(_changed_data(steps, manifest))
    if asked.assets:
        named = enumerate(asked.assets)
        events.append(AssetAll(*(_asset_of_others(manifest, i, asset) for i, asset in named)))
    if not events:
        return time
    event = events[0] if len(events) == 1 else AssetAny(*events)
    if time is None:
        return event
    from airflow.sdk import AssetOrTimeSchedule, CronTriggerTimetable

    if isinstance(time, str):
        # Presets other than @once are cron expressions to this timetable too.
        time = CronTriggerTimetable(time, timezone=asked.timezone)
    return AssetOrTimeSchedule(timetable=time, assets=event)


def _registered(name: str, manifest: Manifest) -> Any:
    """A timetable of the site's plugins: a manifest has no other class made."""
    from airflow.plugins_manager import get_timetables_plugins

    known = get_timetables_plugins()
    if name in known:
        return known[name]()
    at, fix = "schedule.timetable", "Register it: docs/manifests.md says how."
    if known:
        fix = suggestion(name, known)
    message = f"no plugin of this Airflow registers {name}"
    issue = ManifestIssue(manifest.line_of(at), at, message, fix)
    raise ManifestInvalid(manifest.source, [issue])


def _asset_of_others(manifest: Manifest, i: int, asset: str) -> Any:
    """By reference: whoever makes the asset may give it a name besides its URI.

    Of other schemes than our stores' the provider makes the URI regular, as for the DAG that has
    the asset as an outlet: redshift:// gets its port. Only such manifests pay for its import.
    """
    if "://" not in asset:
        return Asset.ref(name=asset)
    if kind_of_uri(asset) is not None:
        return Asset.ref(uri=asset_of(asset).uri)
    try:
        return Asset.ref(uri=Asset(asset).uri)
    except ValueError as error:
        at, fix = f"schedule.assets[{i}]", "Write it as the DAG does that has it as an outlet."
        issue = ManifestIssue(manifest.line_of(at), at, f"{asset!r} is no asset: {error}", fix)
        raise ManifestInvalid(manifest.source, [issue]) from error


def _changed_data(steps: Plan, manifest: Manifest) -> Asset:
    from ddl_airflow.triggers.data_change import DataChangeTrigger
    from ddl_airflow.triggers.interval import DATA_S, problem_of

    interval_s = conf.getfloat("ddl", "data_poll_interval", fallback=DATA_S)
    if problem := problem_of(interval_s):
        at, fix = "schedule.on_data_change", "Correct that in Airflow's configuration."
        message = f"[ddl] data_poll_interval {problem}"
        issue = ManifestIssue(manifest.line_of(at), at, message, fix)
        raise ManifestInvalid(manifest.source, [issue])
    dataset = steps.stage_data.dataset
    watch = DataChangeTrigger(
        dataset.uri,
        dataset.connection.references() if dataset.connection else None,
        interval_s,
        steps.dag_id,
        None if dataset.within is None else [str(folder) for folder in dataset.within],
        list(steps.stage_data.include),
        list(steps.stage_data.exclude),
    )
    # Not the dataset's own asset, which others may update as well.
    changed = asset_of(f"{DATA_CHANGE}{steps.dag_id}")
    changed.watchers = [AssetWatcher(name=f"{steps.dag_id} data", trigger=watch)]
    return changed


def _place_now(path: Path, setting: str, source: str) -> Place | None:
    folder, table = looked_up(
        setting, lambda: real_path(path.parent.absolute()), lambda found: [found], source
    )
    return Place(folder, table.of(folder)) if table else None


def _check_place(manifest: Manifest, path: Path, place: Place | None) -> None:
    """Raises ManifestInvalid if what the manifest names is wrong, or not its to name, there."""
    folder, rights = place or (path.parent, None)
    found = (
        *findings_beside(manifest, path.parent),
        *beyond(manifest, folder, rights, default_connections),
    )
    issues = [ManifestIssue(manifest.line_of(one.field), *one) for one in found]
    if issues:
        raise ManifestInvalid(manifest.source, issues)


def _check_names(steps: Plan, manifest: Manifest) -> None:
    """Of another name Airflow can make no message: with it all DAGs of the file would be lost.

    Raises:
        ManifestInvalid: the name of a folder is not UTF-8.
    """
    staged = steps.stage_data
    for folder in (staged.code, *staged.not_code, *(staged.dataset.within or ())):
        try:
            str(folder).encode()
        except UnicodeEncodeError:
            message = f"works with a folder whose name is not UTF-8: {label(str(folder))}"
            issue = ManifestIssue(0, "", message, "Rename it.")
            raise ManifestInvalid(manifest.source, [issue]) from None


def _check_executors(steps: Plan, manifest: Manifest) -> None:
    """Airflow would file the error under the loader, and take all its DAGs away.

    Raises:
        ManifestInvalid: the site's table has an executor that this Airflow has not.
    """
    asked = {steps.train_on.executor, steps.other_steps.executor} - {""}
    if not asked:
        return
    there = executors()
    for name in sorted(asked - there):
        at = "model_definition.execution.compute_configuration.name"
        message = f"its kind of node has executor {name} in [ddl] compute; this Airflow has not"
        issue = ManifestIssue(manifest.line_of(at), at, message, suggestion(name, sorted(there)))
        raise ManifestInvalid(manifest.source, [issue])


def _named(steps: Plan, step: str) -> dict[str, Any]:
    """A task's id, where it runs, and what Airflow is to do when it fails or takes too long."""
    tries = steps.tries[step]
    delay = timedelta(seconds=tries.delay_s)
    place, pool_slots = (
        (steps.train_on, steps.pool_slots) if step == "train" else (steps.other_steps, 1)
    )
    # What a place leaves open is Airflow's own default.
    where = {"pool": place.pool, "queue": place.queue, "executor": place.executor}
    return {
        **{name: value for name, value in where.items() if value},
        "pool_slots": pool_slots,
        "priority_weight": place.priority_weight,
        "task_id": step,
        "retries": tries.attempts - 1,
        "retry_delay": delay,
        "retry_exponential_backoff": 2.0 if tries.backoff == "exponential" else 0,
        "max_retry_delay": max(timedelta(hours=1), delay),
        "execution_timeout": tries.timeout_s and timedelta(seconds=tries.timeout_s),
    }


def _tasks(dag: ManifestDag, steps: Plan, settings: Sequence[str], manifest: Manifest) -> None:
    common = {"settings": settings, "experiment": steps.experiment}

    def task(operator: type[StepOperator], step: Step, name: str, **more: Any) -> StepOperator:
        return made_task(operator, dag, _named(steps, name) | more, {**common, "step": step})

    shown = "task_display_name"
    road: list[BaseOperator] = [
        task(StageDataOperator, steps.stage_data, "stage_data", **{shown: "stage-data"}),
        task(TrainOperator, steps.train, "train"),
        task(TransformOperator, steps.transform, "transform"),
    ]
    if steps.evaluate is not None:
        road.append(task(EvaluateOperator, steps.evaluate, "evaluate"))
    if steps.approve is not None:
        road.append(_approved(steps, steps.approve, manifest))
    told = notifiers(manifest, "on_success")
    more = {shown: "upload-results", "on_success_callback": told or None}
    road.append(task(UploadResultsOperator, steps.upload_results, "upload_results", **more))
    for before, after in pairwise(road):
        before >> after


def _approved(steps: Plan, approve: ApproveStep, manifest: Manifest) -> BaseOperator:
    """Airflow's own form; the task waits without a worker."""
    from ddl_airflow.operators.approve import ApproveOperator  # only who asks pays for its import

    # Its own tries are no step of the manifest; and a person may take any time.
    named = _named(steps, "evaluate") | {"task_id": "approve", "execution_timeout": None}
    return ApproveOperator(
        **named,
        step=approve,
        subject="Publish the model of {{ dag.dag_id }}, run {{ run_id }}?",
        body="{{ ti.xcom_pull(task_ids='evaluate')['table'] }}",
        notifiers=notifiers(manifest, "on_approval"),
    )
