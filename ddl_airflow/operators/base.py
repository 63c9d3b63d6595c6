"""What the operators share: Airflow's context to a step's, and back what the step says."""

from __future__ import annotations

import json
import pwd
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

from airflow.configuration import AIRFLOW_HOME, conf
from airflow.sdk import BranchMixIn, Param, XComArg
from airflow.sdk.exceptions import AirflowSkipException, AirflowTaskTimeout, TaskDeferred
from airflow.sdk.log import redact  # type: ignore[attr-defined]

from ddl_airflow.airflow_internals import (
    PrototypedOperator,
    is_supervised,
    tries_before_cleared,
)
from ddl_airflow.boundary import airflow_errors
from ddl_airflow.core.beneath import read_object, write_beneath
from ddl_airflow.core.errors import (
    WORKER_LOST,
    CommandInvalid,
    DdlError,
    FileRefused,
    JobLost,
    SettingInvalid,
    SubmitFailed,
    TimedOut,
)
from ddl_airflow.core.layout import RunLayout, owners_of
from ddl_airflow.core.manifest.sections.parameters import RUN_SETTINGS
from ddl_airflow.core.manifest.templates import (
    ATTRIBUTES,
    DATES,
    VALUES,
    WITHOUT_DATES,
    command_findings,
)
from ddl_airflow.core.parameters import OF_AIRFLOW, NoValue, check_settings, no_value, word_of
from ddl_airflow.core.plan import (
    ApproveStep,
    EvaluateStep,
    ScriptStep,
    StageDataStep,
    Step,
    StoreReference,
    TrainStep,
    UploadResultsStep,
)
from ddl_airflow.hooks.store import connection_of, secret_of, store_of
from ddl_airflow.launchers.run_as import account
from ddl_airflow.lineage.flow import flow_of
from ddl_airflow.lineage.record import (
    APPROVE,
    INSTEAD_OF,
    MOST_BYTES,
    OF_A_BRANCH,
    SO_FAR,
    Run,
    fixed_run,
    keep_so_far,
)
from ddl_airflow.site import training_of, workspace
from ddl_airflow.steps.base import (
    Site,
    StepContext,
    StepSkipped,
    StepTry,
    WaitForExperiment,
    WaitForJob,
    prepared,
)
from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.workspace import check_mounted

_LONGEST_MESSAGE = 10_000
# In AIRFLOW_HOME, which is the host's own where the workspace is not.
_SEEN = "ddl-workspaces"
# What tells of tasks; loaded where OpenLineage has somewhere to tell it.
_LISTENER = "airflow.providers.openlineage.plugins.listener"
# How what an earlier task returns stands in a text that a Python DAG has made with it.
_PULLS = "{{ task_instance.xcom_pull("
# Types of run: from the UI, the API or the command line, and "Materialize" of an asset in the UI.
_BY_A_PERSON = ("manual", "backfill", "asset_materialization")


def layout_of(context: Any) -> RunLayout:
    """The folder of the run that a task belongs to.

    Raises:
        StagingError: the workspace is not mounted.
        SettingInvalid: the run's experiment has no name that a folder can have.
    """
    asked = context["params"].get("experiment_id")
    return replace(_layout_alone(context), experiment_id="" if asked is None else asked)


def _layout_alone(context: Any) -> RunLayout:
    """The folder of the run, of no experiment but its own."""
    run, place = context["dag_run"], workspace()
    with os_errors(place):
        check_mounted(place, Path(AIRFLOW_HOME) / _SEEN)
    user = ranks_user()
    return RunLayout(
        place,
        run.dag_id,
        training_of(run.dag_id, run.run_id),
        ranks_group=pwd.getpwnam(user).pw_gid if user else None,
    )


def _admitted_layout(context: Any) -> RunLayout:
    """The folder of the run; of the experiment that it asks for only if that is its DAG's."""
    with suppress(SettingInvalid, FileRefused, OSError):
        layout = layout_of(context)
        named = layout.experiment_id
        if not named or layout.dag_id in owners_of(layout.workspace, named):
            return layout
    return _layout_alone(context)


def ranks_user() -> str:
    """The user that ranks run as: ``[ddl] run_ranks_as``; empty where that is this process's.

    Raises:
        SubmitFailed: this host has no such user.
    """
    user: str = conf.get("ddl", "run_ranks_as", fallback="").strip()
    try:
        return user if account(user) else ""
    except KeyError:
        raise SubmitFailed(
            f"this host has no user {user!r}. Create it, or correct [ddl] run_ranks_as in "
            "Airflow's configuration.",
            retryable=False,
        ) from None


def rank_python(configured: str) -> str:
    """The Python that starts ranks: the manifest's, the site's, or the one that runs Airflow."""
    return configured or conf.get("ddl", "python", fallback="") or sys.executable


def site() -> Site:
    """What the site's settings and connections say.

    Raises:
        SubmitFailed: as ``ranks_user``.
        SettingInvalid: ``[ddl] cache_size`` is no size.
    """
    from ddl_airflow.storage.cleaning import rules  # no parse needs it

    return Site(
        python=rank_python(""),
        open_store=store_of,
        secret=secret_of,
        connection=connection_of,
        ranks_user=ranks_user(),
        transfer_workers=conf.getint("ddl", "transfer_workers", fallback=8),
        most_preemptions=conf.getint("ddl", "preemptions", fallback=100),
        evidence=conf.getboolean("ddl", "evidence", fallback=True),
        signing_key=conf.get("ddl", "signing_key", fallback="").strip(),
        cache_bytes=rules("", "", conf.get("ddl", "cache_size", fallback="")).cache_bytes,
    )


def run_of(context: Any) -> Run:
    """The run that Airflow's context is of."""
    run = context["dag_run"]
    kind = getattr(run.run_type, "value", run.run_type)
    return Run(
        dag_id=run.dag_id,
        run_id=run.run_id,
        type=str(kind),
        due=run.data_interval_end or run.logical_date or run.run_after,
        triggered_by=run.triggering_user_name,
        by_a_person=kind in _BY_A_PERSON,
        logical_date=run.logical_date,
        started=run.start_date,
        parameters=dict(context["params"]),
    )


def _end_with_supervisor() -> None:
    """A task whose supervisor was killed would go on, unseen, beside its next try."""
    from ddl_airflow.launchers.tether import end_with_parent

    # In `airflow dags test` there is no supervisor: the parent is the user's shell.
    if is_supervised():
        end_with_parent()


class StepOperator(PrototypedOperator):
    """A step of a training as a task. Not for use by itself.

    It maps Airflow's context to the step's, has the step do its work (``ddl_airflow.steps``), and
    maps what that says back. XCom carries places and digests, never data.

    Args:
        step: what is asked, a ``step_type``; keys in it are never serialised nor rendered.
        settings: names of all that a run may set; None if whoever made the DAG decides.
        experiment: the experiment that the manifest names.
    """

    # Who does the work, and what is asked of it.
    work: ClassVar[type[StepTry[Any]]]
    step_type: ClassVar[type[Step]] = Step
    step: Step
    settings: list[str] | None
    experiment: str
    # Of a step that runs scripts.
    parameters: Mapping[str, Any]
    _context: StepContext | None
    _killed: bool
    # Of the try that runs in this process; for what is told of it (OpenLineage).
    _airflow: Any
    _done: dict[str, Any] | None

    def __init__(
        self,
        *,
        step: Step,
        settings: Sequence[str] | None = None,
        experiment: str = "",
        **kwargs: Any,
    ) -> None:
        task, wanted = kwargs.get("task_id"), self.step_type.__name__
        if not isinstance(step, self.step_type):
            raise TypeError(
                f"{task}: step is of type {type(step).__name__}, and {type(self).__name__} wants a "
                f"{wanted} of ddl_airflow.core.plan"
            )
        _check_commands(task, step)
        super().__init__(**kwargs)
        # Past Airflow's __setattr__, which looks for earlier tasks at each field, and once more for
        # all when this has returned.
        own = {"step": step, "settings": settings, "experiment": experiment}
        vars(self).update(self.own_state(self.dag_id, own))

    @classmethod
    def own_state(cls, dag_id: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes that are not Airflow's; the step's fields are as Airflow shows them."""
        step, settings = own["step"], own["settings"]
        return {
            **own,
            "settings": None if settings is None else list(settings),
            "_context": None,
            "_killed": False,
            "_airflow": None,
            "_done": None,
            **{name: _shown(getattr(step, name)) for name in cls.template_fields},
        }

    def asked(self) -> Any:
        """The step, with what has been rendered, and set for this run."""
        now = {
            name: getattr(self, name)
            for name in self.template_fields
            if not isinstance(getattr(self.step, name), StoreReference)
        }
        return replace(self.step, **now)

    def execute(self, context: Any) -> dict[str, Any]:
        """Runs the step. Raises AirflowFailException when trying again cannot help."""
        return self.with_layout(context, self._rehearsed_or_run, begins=True)

    def with_layout(
        self,
        context: Any,
        work: Callable[[StepTry[Any], Any], dict[str, Any]],
        *,
        begins: bool = False,
    ) -> dict[str, Any]:
        """Does the work, in the run's folder and with errors that Airflow understands.

        Args:
            begins: whether the step does, and does not look after a job that it has started.
        """
        _end_with_supervisor()
        attempts = context["params"].get("attempts", sys.maxsize)
        left = self.tries(context) < attempts
        with airflow_errors(attempts_left=left), self._noting_failure(context):
            try:
                if begins:
                    self._check_one_training(context)
                layout = layout_of(context)
                # Airflow takes any name in a run's conf, and makes a parameter of it. Once data are
                # staged, the run's names have been looked at, with the manifest that it began with.
                if not self._follows_staging() or fixed_run(layout) is None:
                    given = context["dag_run"].conf or {}
                    ours = {name: given[name] for name in given if name not in OF_AIRFLOW}
                    check_settings(ours, self.settings)
                self._check_attempts(layout, context, attempts)
                with os_errors(layout.root), self._timeout():
                    return self._prepared(layout, context, work)
            except DdlError as error:
                # In lines of its own: what follows in the log is Airflow's traceback.
                for line in f"{type(error).__name__}: {error}".splitlines():
                    self.log.error("%s", line)
                raise

    def _check_one_training(self, context: Any) -> None:
        """Raises SettingInvalid where another training would work in the folder of this run: it
        would take this one's data, and be published as this one.
        """
        several, index = "", getattr(context["ti"], "map_index", None)
        if index is not None and index >= 0:
            several = "this task is mapped"
        elif (dag := self.get_dag()) is not None:
            for kind in (StageDataStep, TrainStep):
                tasks = [
                    task for task in dag.tasks if isinstance(getattr(task, "step", None), kind)
                ]
                # Of those behind branches one runs.
                sure = sum(not _follows_branch(task) for task in tasks)
                if (count := sure + (sure < len(tasks))) > 1:
                    names = ", ".join(sorted(task.task_id for task in tasks))
                    several = f"DAG {dag.dag_id} has {count} of a kind: {names}"
        if several:
            raise SettingInvalid(
                f"A run is one training, with one folder, and {several}. Start a run for each "
                "training, such as by an expanded TriggerDagRunOperator; or make each a DAG."
            )

    def _check_attempts(self, layout: RunLayout, context: Any, attempts: int) -> None:
        """Raises JobLost in a try that the run was not given: of a worker that is killed nobody
        says that it was the last attempt, and Airflow knows only the task's own.
        """
        number, tries = context["ti"].try_number, self.tries(context)
        # More than its own it has only where it was cleared while it ran.
        if not attempts < tries <= (self.retries or 0) + 1 or layout.scheduled_job.exists():
            return  # or it goes on with the job of the try before
        before: dict[str, Any] = {}
        with suppress(FileNotFoundError, FileRefused):
            before = read_object(layout.kept / SO_FAR, layout.workspace, MOST_BYTES)["outcome"]
        mine = before.get("step") == self.task_id
        if mine and (before.get("state") == "cancelled" or before.get("try") == number):
            return  # cleared while it ran; or this try has waited without a worker
        why = WORKER_LOST
        if mine and "error" in before:
            why = f"failed of {before['error']}: {before.get('message')}"
        raise JobLost(f"try {number - 1} {why}. Clear the task to go on.")

    def _prepared(
        self, layout: RunLayout, context: Any, work: Callable[[StepTry[Any], Any], dict[str, Any]]
    ) -> dict[str, Any]:
        with _said_to_airflow(self):
            ready = prepared(
                layout,
                staged=self._follows_staging(),
                experiment=self.experiment,
                scripts=self.work.runs_scripts,
            )
            with ready:
                self._context = now = self._context_of(layout, context)
                if self._killed:  # before there was a step to cancel
                    now.cancel()
                if not context["params"].get("dry_run"):
                    now.begins(self.task_id)
                step = self.work(self.asked(), now)
                try:
                    done = work(step, context)
                except StepSkipped:
                    now.tell("skipped", self.task_id)
                    raise
                self._done = {**(self._done or {}), **done}
                now.tell(step=self.task_id, **step.became(done))
                return done

    def _context_of(self, layout: RunLayout, context: Any) -> StepContext:
        cleared = self.was_cleared(context) or bool(context["dag_run"].clear_number)
        return StepContext(
            layout,
            run_of(context),
            self.log,
            site(),
            try_number=context["ti"].try_number,
            tries=self.tries(context),
            cleared=cleared,
            later={one.task_id: one.asked() for one in self._later()} | self._kinds_of_gates(),
            unsure={one.task_id for one in self._later() if self._is_unsure_of(one)},
            name=self.task_id,
            gates=self._gates(),
            published=lambda facts: self._published(context, facts),
            task=self._names(context),
        )

    def _names(self, context: Any) -> dict[str, Any] | None:
        """What Airflow knows the task by."""
        if self._airflow is None:  # run by no task runner
            return None
        run, index = context["dag_run"], getattr(context["ti"], "map_index", -1)
        return {
            "dag_id": run.dag_id,
            "task_id": self.task_id,
            "run_id": run.run_id,
            "map_index": index,
        }

    def _published(self, context: Any, facts: Mapping[str, Any]) -> None:
        """Tells those who wait for the model."""
        context["outlet_events"][self.outlets[0]].extra = dict(facts)
        self._done = dict(facts)

    def _later(self) -> list[StepOperator]:
        later = [s for s in self.get_flat_relatives() if isinstance(s, StepOperator)]
        return sorted(later, key=lambda step: len(step.get_flat_relatives(upstream=True)))

    def _is_unsure_of(self, later: StepOperator) -> bool:
        elsewhere = (later.queue, later.executor) != (self.queue, self.executor)
        return elsewhere or _follows_branch(later)

    def _gates(self) -> dict[str, dict[str, list[str]]]:
        """What has to let the model pass before it is published, as ``StepContext`` has it.

        Whatever a Python DAG calls its tasks, and however many there are.
        """
        gates: dict[str, dict[str, list[str]]] = {}
        later = {task.task_id: task for task in self.get_flat_relatives()}
        for upload in later.values():
            if not isinstance(getattr(upload, "step", None), UploadResultsStep):
                continue
            of_it = gates[upload.task_id] = {"evaluate": [], APPROVE: []}
            chosen: list[Any] = []
            for task in upload.get_flat_relatives(upstream=True):
                if task.task_id in later and (kind := _kind_of_gate(task)):
                    if _may_be_passed_by(task, upload):
                        kind += OF_A_BRANCH
                        chosen.append(task)
                    of_it.setdefault(kind, []).append(task.task_id)
            for task in chosen:
                others = [one.task_id for one in chosen if _are_on_other_ways(task, one)]
                of_it[INSTEAD_OF + task.task_id] = others
            for names in of_it.values():
                names.sort()
        return gates

    def _kinds_of_gates(self) -> dict[str, Step]:
        """One of each kind, by the kind: so earlier versions of ours know of them."""
        gates: dict[str, Step] = {}
        for task in self.get_flat_relatives():
            after = (getattr(later, "step", None) for later in task.get_flat_relatives())
            if not any(isinstance(step, UploadResultsStep) for step in after):
                continue
            if kind := _kind_of_gate(task):
                ours = isinstance(task, StepOperator)  # what asks a person is no operator of these
                gates[kind] = cast(StepOperator, task).asked() if ours else cast(Any, task).step
        return gates

    def _runs_as_ranks(self) -> str:
        """What runs as the ranks' user, for the log; empty if nothing does."""
        return ""

    def _rehearsed_or_run(self, step: StepTry[Any], context: Any) -> dict[str, Any]:
        if (what := self._runs_as_ranks()) and not step.site.ranks_user:
            self.log.info("%s as Airflow's own user: [ddl] run_ranks_as is not set", what)
        if context["params"].get("dry_run"):
            self._rehearse_from_here(step, context)
        return step.run()

    def _rehearse_from_here(self, step: StepTry[Any], context: Any) -> NoReturn:
        """Rehearses this step and those after it, and has them skipped."""
        self.log.info("dry run | %s: %s", self.task_display_name, step.rehearse())
        for one in self._later():
            one.render_template_fields(context)
            said = one.work(one.asked(), replace(step.context, log=one.log)).rehearse()
            self.log.info("dry run | %s: %s", one.task_display_name, said)
        raise StepSkipped("Dry run: nothing was fetched, trained or published.")

    def defer_until(self, waits: WaitForJob | WaitForExperiment) -> NoReturn:
        """Has Airflow wait without a worker."""
        raise waits

    def on_kill(self) -> None:
        """Ends every process. Airflow calls it when the task is failed, cleared or timed out."""
        self._killed = True
        if self._context is not None:
            self._context.cancel()
        self._say_aborted()

    def get_openlineage_facets_on_start(self) -> Any:
        """What the step reads; called by Airflow's provider of OpenLineage, as the next two."""
        return openlineage_of(self.step, self.dag_id, self._airflow)

    def get_openlineage_facets_on_complete(self, _task_instance: Any) -> Any:
        """What it has read and written; of one that was skipped, nothing was written."""
        return openlineage_of(self.step, self.dag_id, self._airflow, self._done)

    def get_openlineage_facets_on_failure(self, _task_instance: Any) -> Any:
        """What it has read, and why it failed."""
        return openlineage_of(self.step, self.dag_id, self._airflow, failed=True)

    def _say_aborted(self) -> None:
        # The provider is at work in this process, or is not asked for.
        if self._airflow is None or _LISTENER not in sys.modules:
            return
        try:
            from ddl_airflow.operators.openlineage import say_aborted

            found = openlineage_of(self.step, self.dag_id, self._airflow)
            say_aborted(self, self._airflow["ti"], found)
        except Exception as error:  # whatever a catalogue has, the task ends
            self.log.warning("OpenLineage is not told that this was aborted: %s", error)

    @contextmanager
    def _noting_failure(self, context: Any) -> Iterator[None]:
        """Leaves in the run's folder why the step failed."""
        try:
            yield
        except (AirflowSkipException, TaskDeferred):  # it did not
            raise
        except BaseException as error:
            try:
                self._note(_admitted_layout(context), context, error)
            except (DdlError, OSError) as unnoted:  # the log has it all the same
                self.log.warning("the Training tab will not show why this failed: %s", unnoted)
            raise

    def _note(self, layout: RunLayout, context: Any, error: BaseException) -> None:
        if not self._follows_staging():
            layout.create()
        if not layout.kept.is_dir():
            return  # another host's disk, which the tab does not see
        failure = {
            "step": self.task_id,
            "try": context["ti"].try_number,
            "error": type(error).__name__,
            "message": str(redact(str(error)))[:_LONGEST_MESSAGE],
            "rank": getattr(error, "rank", None),
        }
        write_beneath(layout.failure, layout.workspace, json.dumps(failure).encode())
        # Airflow ends what takes too long in the same way.
        cancelled = self._killed and not isinstance(error, TimedOut)
        state = "cancelled" if cancelled else "failed"
        keep_so_far(layout, run_of(context), {"state": state, **failure})

    def _follows_staging(self) -> bool:
        return any(
            task.task_id == "stage_data" or isinstance(getattr(task, "step", None), StageDataStep)
            for task in self.get_flat_relatives(upstream=True)
        )

    def tries(self, context: Any) -> int:
        """Which try this is, from 1, since the task was last cleared."""
        tries: int = context["ti"].try_number - self._tries_before(context)
        return max(1, tries)  # the manifest may have got other attempts since

    def was_cleared(self, context: Any) -> bool:
        """Whether somebody has cleared the task since it was first tried."""
        return self._tries_before(context) > 0

    def _tries_before(self, context: Any) -> int:
        return tries_before_cleared(context["ti"], self.retries or 0)

    @contextmanager
    def _timeout(self) -> Iterator[None]:
        try:
            yield
        except AirflowTaskTimeout as error:
            raise self.timed_out() from error

    def timed_out(self) -> TimedOut:
        """The error of a try that took longer than its ``execution_timeout``."""
        return TimedOut(
            f"{self.task_display_name} was ended after {self.execution_timeout}. If that was "
            f"too early, raise steps.{self.task_id}.timeout in the manifest."
        )

    def render_template_fields(self, context: Any, jinja_env: Any = None) -> None:
        """Renders what is templated and takes the run's settings.

        What the manifest said when the run staged its data holds until its end: this task may have
        been made of one that was edited since. A brace in the regex of a metric is no template.
        """
        self._airflow = context
        with airflow_errors(), self._noting_failure(context):
            self.take_fixed(context)
            context["params"] = self._as_the_form_means(context["params"])
            for name, value in self.filled_in(context, jinja_env).items():
                setattr(self, name, value)
            self._take_returned(context)
        params = context["params"]
        for name in self.step.settable:
            if name in params:
                setattr(self, name, params[name])
        if isinstance(self.step, ScriptStep):
            self.parameters = self.given(params)

    def given(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of its scripts, as the run has them.

        Args:
            params: the run's values.
        """
        return {name: params.get(name, value) for name, value in self.parameters.items()}

    def _take_returned(self, context: Any) -> None:
        """Takes what earlier tasks have returned, in fields of an operator of a Python DAG.

        Raises:
            SettingInvalid: the place of data is no text.
        """
        for name in self.template_fields:
            value = getattr(self, name)
            if next(XComArg.iter_xcom_references(value), None) is None:
                continue
            value = _returned(value, context)
            if isinstance(place := getattr(self.step, name), StoreReference):
                if not isinstance(uri := value["uri"], str):
                    raise SettingInvalid(
                        f"{name}: the task that was to say its place has returned "
                        f"{ascii(uri)[:60]}, wanted a URI as text."
                    )
                place = replace(place, uri=uri.rstrip("/"))
                self.step, value = replace(self.step, **{name: place}), place.view()
            setattr(self, name, value)

    def filled_in(self, context: Any, jinja_env: Any = None) -> dict[str, Any]:
        """The fields with templates, by name, with the run's values in them.

        Raises:
            CommandInvalid: a template says what none may.
            SettingInvalid: the run has no value for one.
        """
        from jinja2 import UndefinedError  # slow to import, and rarely needed

        # The rules of the manifest say so too; an operator may have been made without one.
        for name in self.step.templated:
            _check_templates(name, getattr(self, name))
        environment = (jinja_env or self.get_template_env()).overlay(finalize=word_of)
        given: Any = _plain_values(context)

        def rendered(value: Any) -> Any:
            return self.render_template(value, given, environment, set())

        filled = {}
        for name in self.step.templated:
            value = getattr(self, name)
            try:
                filled[name] = rendered(value)
            except UndefinedError as error:
                raise _not_filled_in(name, value, error, context) from None
            except NoValue:
                raise no_value(name, _text(value), rendered) from None
        return filled

    def _as_the_form_means(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The run's values, with an int for each integer of the form, and "" for an empty text.

        In JSON Schema, to which Airflow holds them, 4.0 is an integer, and a script that wants 4
        may fail. An empty text comes as null. What Airflow has put there of its own is no value of
        the run's: it would make each training another.
        """
        dag = self.get_dag()
        form: Any = dag.params if dag is not None else {}
        meant = {
            name: value for name, value in params.items() if name in form or name not in OF_AIRFLOW
        }
        for name, value in meant.items():
            if name not in form:
                continue
            field = form.get_param(name)
            if isinstance(value, float) and value.is_integer() and _is_integer(field):
                meant[name] = int(value)
            elif value is None and self.settings is not None and name not in RUN_SETTINGS:
                meant[name] = ""  # of a manifest's parameters null is no value
        return meant

    def take_fixed(self, context: Any) -> None:
        """Takes fields and parameters as the run began with them, if it has staged its data."""
        begun = fixed_run(layout_of(context))
        if begun is None:
            return
        context["params"] = begun["made_of"]["parameters"]
        for name, value in begun["steps"].get(self.task_id, {}).items():
            if name in self.template_fields and name not in self.step.not_fixed:
                setattr(self, name, value)


def openlineage_of(
    step: Step,
    dag_id: str,
    context: Any,
    done: Mapping[str, Any] | None = None,
    *,
    failed: bool = False,
) -> Any:
    """What Airflow's provider of OpenLineage puts into an event of a step.

    One that cannot be made would be an event without inputs and outputs, so this raises nothing.

    Args:
        step: what is asked.
        dag_id: whose.
        context: Airflow's; None: it has given none.
        done, failed: as ``flow_of`` has them.
    """
    # The provider is an extra, and calls this: it is there.
    from ddl_airflow.operators.openlineage import operator_lineage

    layout = None
    if context is not None:
        with suppress(DdlError, OSError):  # the workspace cannot be reached
            layout = layout_of(context)
    return operator_lineage(flow_of(step, dag_id, layout, done, failed=failed))


@contextmanager
def _said_to_airflow(operator: StepOperator) -> Iterator[None]:
    try:
        yield
    except StepSkipped as skipped:
        raise AirflowSkipException(str(skipped)) from None
    except (WaitForJob, WaitForExperiment) as waits:
        operator.defer_until(waits)


def _kind_of_gate(task: Any) -> str:
    """Whether a task is to let the model pass: ``evaluate``, ``approve`` or empty."""
    asked = getattr(task, "step", None)
    if isinstance(asked, ApproveStep):
        return APPROVE
    return "evaluate" if isinstance(asked, EvaluateStep) else ""


def _may_be_passed_by(task: Any, upload: Any) -> bool:
    """Whether a branch may choose a way to the upload on which the task is not."""
    before: list[Any] = task.get_flat_relatives(upstream=True)
    branches: list[Any] = [one for one in before if isinstance(one, BranchMixIn)]
    return any(
        task not in (way, *way.get_flat_relatives())
        for one in branches
        for way in one.downstream_list
        if upload in way.get_flat_relatives()
    )


def _are_on_other_ways(one: Any, other: Any) -> bool:
    """Whether a branch that chooses one way to one of two tasks leaves out the other."""
    before: list[Any] = one.get_flat_relatives(upstream=True)
    branches: list[Any] = [task for task in before if isinstance(task, BranchMixIn)]
    for branch in branches:
        ways = [{way, *way.get_flat_relatives()} for way in branch.downstream_list]
        both = [(one in way, other in way) for way in ways]
        if (False, True) in both and (True, True) not in both:
            return True
    return False


def _follows_branch(task: Any) -> bool:
    return any(isinstance(one, BranchMixIn) for one in task.get_flat_relatives(upstream=True))


def _shown(value: Any) -> Any:
    """A field as Airflow shows it, and keeps it in its database."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, StoreReference):
        return value.view()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_shown(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


def _returned(value: Any, context: Any) -> Any:
    """The value with what earlier tasks have returned where it refers to them."""
    if isinstance(value, XComArg):
        return value.resolve(context)
    if isinstance(value, Mapping):
        return {name: _returned(one, context) for name, one in value.items()}
    return [_returned(one, context) for one in value] if isinstance(value, list) else value


def _is_integer(field: Param) -> bool:
    kinds = field.schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return "integer" in kinds and "number" not in kinds


def fields_of(step: type[Step]) -> tuple[str, ...]:
    """What Airflow shows of a step: all its fields."""
    return tuple(one.name for one in fields(step))


def _check_commands(task_id: object, step: Step) -> None:
    """Raises TypeError of a command that whoever made the step has given as something else."""
    for name, wanted in (("command", "text"), ("commands", "a list of texts")):
        given = getattr(step, name, () if name == "commands" else "")
        listed = isinstance(given, (list, tuple))
        texts: Sequence[Any] = given if listed else [given]
        if any(isinstance(one, XComArg) or _PULLS in str(one) for one in texts):
            raise TypeError(
                f"{task_id}: {name} is, in part or whole, what an earlier task returns, and what "
                "runs has to be written out. Give values as parameters of the step, such as "
                "parameters={'rate': search.output}; the script reads $PARAM_RATE"
            )
        if listed != (name == "commands") or not all(isinstance(one, str) for one in texts):
            raise TypeError(f"{task_id}: {name} is {ascii(given)[:60]}, wanted {wanted}")


def _check_templates(name: str, value: str | Sequence[str]) -> None:
    for found in command_findings(name, [value] if isinstance(value, str) else value):
        raise CommandInvalid(f"{found.field}: {found.message}. {found.fix}")


def _not_filled_in(
    name: str, value: str | Sequence[str], error: Exception, context: Any
) -> SettingInvalid:
    missing = re.match(r"'(\w+)' is undefined", str(error))
    if missing and missing[1] in DATES and context.get("logical_date") is None:
        return no_logical_date(name, value, missing[1])
    return SettingInvalid(f"{name}: {_text(value)!r} cannot be filled in: {error}.")


def no_logical_date(name: str, value: str | Sequence[str], date: str) -> SettingInvalid:
    """The error of a template that asks for a date in a run that has none.

    Args:
        name: of the step's field.
        value: of it: a template, or several.
        date: one of ``DATES``.
    """
    return SettingInvalid(
        f"{name}: {_text(value)!r} names {date}, and this run has no logical date: changed data, "
        f"an asset, or somebody who gave none has started it. {WITHOUT_DATES}"
    )


def _text(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else " ; ".join(value)


def _plain_values(context: Any) -> dict[str, Any]:
    """What templates may name, and of Airflow's objects no more than they may ask for."""
    given: dict[str, Any] = {name: context[name] for name in VALUES if name in context}
    given["params"] = dict(context["params"])
    for name, attributes in ATTRIBUTES.items():
        if name in context:
            of = context[name]
            given[name] = {one: getattr(of, one) for one in attributes if hasattr(of, one)}
    return given
