"""train as a task, which waits without a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

from airflow.configuration import conf
from airflow.sdk import TaskInstanceState
from airflow.sdk.exceptions import TaskDeferralError

from ddl_airflow.airflow_internals import is_supervised, state_of_own_task
from ddl_airflow.core.cancellations import drop_conditional
from ddl_airflow.core.errors import JobLost, LaunchError, SettingInvalid
from ddl_airflow.core.job import JobStatus, StartedJob
from ddl_airflow.core.plan import TrainStep
from ddl_airflow.links import TensorBoardLink, TrainingLink
from ddl_airflow.operators.base import StepOperator, fields_of
from ddl_airflow.steps.base import StepTry, WaitForExperiment, WaitForJob
from ddl_airflow.steps.train import Train


class TrainOperator(StepOperator):
    """Trains on all ranks: ``ddl_airflow.steps.train.Train``.

    A run is one training: a DAG has one of it, which is not mapped.

    Where the launcher has a scheduler, the task submits the job and defers: a trigger waits, and no
    worker. Whatever is killed meanwhile, whoever comes next goes on with the same job; only when a
    person fails or clears the task is it cancelled. Where another training works in the experiment,
    the task defers too, until that has ended.

    Args:
        step: a ``TrainStep``.
    """

    work = Train
    step_type = TrainStep
    template_fields = fields_of(step_type)
    template_fields_renderers = {
        "command": "bash",
        "scheduler": "json",
        "metrics": "json",
        "parameters": "json",
        "secrets": "json",
    }
    ui_color = "#fbe3c5"
    operator_extra_links = (TrainingLink(), TensorBoardLink())

    launcher: str
    scheduler: Mapping[str, Any]

    def take_fixed(self, context: Any) -> None:
        """Besides, of a launcher that only this run has chosen, nothing that is another's."""
        super().take_fixed(context)
        if context["params"].get("launcher", self.launcher) != self.launcher:
            self.scheduler = {}

    def _runs_as_ranks(self) -> str:
        return "ranks run"

    def _rehearsed_or_run(self, step: StepTry[Any], context: Any) -> dict[str, Any]:
        """Besides, looks at what it would wait with: before there is a job to wait for."""
        _poll_interval()
        return super()._rehearsed_or_run(step, context)

    def defer_until(self, waits: WaitForJob | WaitForExperiment) -> NoReturn:
        """Defers to the trigger that waits for the job, or for the other training."""
        # Not at the top: only who defers pays for it.
        from ddl_airflow.triggers.experiment import ExperimentTrigger
        from ddl_airflow.triggers.job import JobTrigger

        interval_s = _poll_interval()
        if isinstance(waits, WaitForExperiment):
            self.defer(
                trigger=ExperimentTrigger(str(waits.experiment), interval_s),
                method_name=self.execute_alone.__name__,
            )
        self._check_not_ended(waits.started)
        limit = self.execution_timeout
        limit_s = limit.total_seconds() if limit else None
        self.defer(
            trigger=JobTrigger(waits.started.dump(), interval_s, limit_s),
            method_name=self.execute_complete.__name__,
        )

    def _check_not_ended(self, started: StartedJob) -> None:
        """Cancels the job, and raises JobLost, if a person has ended the task meanwhile.

        Airflow tells a task so up to 5 s later, and one that defers before that never: it refuses
        the deferral (409), of which its task runner only writes a line, no trigger starts, and
        nobody would cancel the job. In the moment between this question and the deferral that can
        still happen: then somebody does it by the note that the job is to be cancelled once the
        task has ended. Source: ``run`` in ``airflow/sdk/execution_time/task_runner.py``, Airflow
        3.3.
        """
        if self._airflow is None or not is_supervised():  # by no task runner
            return
        try:
            state = state_of_own_task(self._airflow["ti"])
        except Exception as error:  # it is noted all the same
            self.log.warning("the state of this task is not known: %s", error)
            return
        if state != TaskInstanceState.RUNNING:
            self.on_kill()
            handle = started.handle
            raise JobLost(
                f"the task was ended ({state}) before it could wait for {handle.kind} job "
                f"{handle.number}. The job was cancelled."
            )

    def execute_alone(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        """Called by Airflow when nobody works in the experiment any more; returns as ``execute``.

        Somebody else who waited for it may have been faster; then this task waits again.
        """

        def go_on(step: StepTry[Any], context: Any) -> dict[str, Any]:
            if unseen := event.get("unseen"):
                raise LaunchError(f"cannot wait for the experiment: {unseen}", retryable=False)
            return step.run()

        return self.with_layout(context, go_on)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        """Called by Airflow when the trigger has seen the job end; returns as ``execute``."""
        started = StartedJob.load(event["job"])

        def settle(step: StepTry[Any], context: Any) -> dict[str, Any]:
            if unseen := event.get("unseen"):
                started.unmark_monitored()  # so that the next try goes on with it
                drop_conditional(started)
                raise LaunchError(
                    f"{unseen} {started.handle.kind} job {started.handle.number} runs on. When "
                    "that is mended, clear the task: it goes on with this job.",
                    retryable=False,
                )
            late = self.timed_out() if event["timed_out"] else None
            return cast(Train, step).settle(started, JobStatus.load(event["status"]), late)

        return self.with_layout(context, settle)

    def resume_execution(
        self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any
    ) -> Any:
        """As Airflow's own; a trigger that failed leaves no job behind, and is a lost job's end."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralError as error:
            failure = error

        def give_up(step: StepTry[Any], context: Any) -> dict[str, Any]:
            if not cast(Train, step).cancel_orphan():
                raise LaunchError(f"what waited for the experiment failed: {failure}") from failure
            raise JobLost(
                f"what waited for the job failed: {failure}. The job was cancelled."
            ) from failure

        return self.with_layout(context, give_up)


def _poll_interval() -> float:
    """Seconds between two looks of a trigger.

    Raises:
        SettingInvalid: ``[ddl] job_poll_interval`` is none.
    """
    from ddl_airflow.triggers.interval import JOB_S, problem_of  # no parse needs it

    seconds = conf.getfloat("ddl", "job_poll_interval", fallback=JOB_S)
    if problem := problem_of(seconds):
        raise SettingInvalid(
            f"[ddl] job_poll_interval {problem}. Correct that in Airflow's configuration."
        )
    return seconds
