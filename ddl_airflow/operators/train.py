"""train: the manifest's script on all ranks."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any, NoReturn

from airflow.configuration import conf
from airflow.sdk.exceptions import AirflowSkipException, TaskDeferralError

from ddl_airflow.core.beneath import read_beneath
from ddl_airflow.core.cluster import parameter_servers
from ddl_airflow.core.command import check_command
from ddl_airflow.core.communication import communication_line
from ddl_airflow.core.errors import ConnectionInvalid, FileRefused, JobLost, LaunchError, PlaceTaken
from ddl_airflow.core.job import JobHandle, JobSpec, JobStatus, StartedJob
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.metrics import Measurement, diverged, finite, newest, shown
from ddl_airflow.core.progress import Progress, everything_told
from ddl_airflow.core.scripts import CURE, will_train_apart
from ddl_airflow.launchers.base import (
    Launcher,
    Scheduler,
    how_trained,
    read_records,
    written_by_several,
)
from ddl_airflow.launchers.registry import launcher
from ddl_airflow.lineage.record import (
    begin_training,
    has_part,
    trained_with_other_code,
    trained_with_other_data,
    write_part,
)
from ddl_airflow.links import TensorBoardLink, TrainingLink
from ddl_airflow.operators.base import rank_python, ranks_user
from ddl_airflow.operators.job import JobOperator
from ddl_airflow.operators.launch import RunningJob, ScheduledJob, kept_job
from ddl_airflow.storage.filesystem import alone_in, lock_of, paths_below

# Files that stand for a checkpoint; ddl_ops.resume reads them.
_CHECKPOINTS = (".index", ".keras", ".h5")
# What may come of reading statistics that a script has written itself.
_ODD = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, FileRefused)
# More than it takes to end ranks that were told to.
_OTHERS_END_S = 30.0
# Than it takes to look whether somebody works in an experiment.
_OTHERS_LOOK_S = 0.5
# Files that several ranks wrote, each with a line in the log.
_MOST_SHARED = 5


class TrainOperator(JobOperator):
    """Starts the ranks, follows them, and explains how they ended.

    A retry finds the same RESULT_DIR, CHECKPOINT_DIR and EXPERIMENT_DIR, without checkpoints that
    are damaged, so a script that looks there resumes. So does a task that was cleared before its
    training had ended; after that, or where stage_data has brought other data meanwhile, the
    training is done again from its start.

    Where the launcher has a scheduler, the task submits the job and defers: a trigger waits, and no
    worker. Whatever is killed meanwhile, whoever comes next goes on with the same job; only when a
    person fails or clears the task is it cancelled.

    Where another training works in the experiment, the task defers too, until that has ended.

    Args:
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
        metrics: name and regular expression of each metric to find in rank 0's output.
        when_busy: what to do while another training works in the experiment: ``wait`` for its end,
            or ``skip`` this one.
        python, tf1, parameters, secrets: as ``JobOperator`` has them.
    """

    template_fields = (
        "command",
        "nodes",
        "slots",
        "launcher",
        "scheduler",
        "distribution",
        "python",
        "framework",
        "tf1",
        "metrics",
        "parameters",
        "secrets",
    )
    templated = ("command",)
    fixed = (*template_fields, "gpu", "when_busy")
    settable = ("nodes", "launcher")
    template_fields_renderers = {
        "command": "bash",
        "scheduler": "json",
        "metrics": "json",
        "parameters": "json",
        "secrets": "json",
    }
    ui_color = "#f7e3c3"
    operator_extra_links = (TrainingLink(), TensorBoardLink())

    def __init__(
        self,
        *,
        command: str,
        nodes: int = 1,
        slots: int = 1,
        launcher: str = "local",
        scheduler: Mapping[str, Any] | None = None,
        gpu: bool = False,
        distribution: str = "mpi",
        framework: str = "tensorflow",
        metrics: Sequence[Mapping[str, str]] = (),
        when_busy: str = "wait",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.command = command
        self.nodes = nodes
        self.slots = slots
        self.launcher = launcher
        self.scheduler = dict(scheduler or {})
        self.gpu = gpu
        self.distribution = distribution
        self.framework = framework
        self.metrics = [dict(m) for m in metrics]
        self.when_busy = when_busy

    def take_fixed(self, context: Any) -> None:
        """Besides, of a launcher that only this run has chosen, nothing that is another's."""
        super().take_fixed(context)
        if context["params"].get("launcher", self.launcher) != self.launcher:
            self.scheduler = {}

    def rehearse(self, layout: RunLayout) -> str:
        """The line that would start the ranks."""
        job = self._job_of(layout, 1)
        check_command(job.command, job.folder, job.python, job.world_size)
        if said := will_train_apart(job.folder, self.distribution, job.world_size):
            self.log.warning("%s. %s", said, CURE)
        submission = launcher(self.launcher, self.scheduler).render(job)
        return f"would start {job.world_size} rank(s): {submission}"

    def _job_of(self, layout: RunLayout, try_number: int) -> JobSpec:
        servers = self.distribution == "parameter_server"
        return JobSpec(
            job_id=f"{layout.training_id}/train-{try_number}",
            command=self.command,
            nodes=self.nodes,
            slots=self.slots,
            python=rank_python(self.python),
            folder=layout.code,
            record_dir=layout.records(try_number),
            log_dir=layout.logs,
            env={
                **self.environment(layout, trained=False),
                "DDL_METRICS": json.dumps(self.metrics),
                **({} if self.gpu else {"DDL_NO_GPU": "1"}),
            },
            cluster=parameter_servers(self.nodes, self.slots) if servers else None,
            gpu=self.gpu,
            lock=lock_of(layout.kept_alone),
            keep=(layout.experiment, layout.experiment_left) if layout.experiment_id else None,
            user=ranks_user(),
            averages=self.distribution == "mpi" and self.nodes * self.slots > 1,
        )

    def run_step(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        """Returns the world size and the last value of each metric."""
        try_number = context["ti"].try_number
        job = self._job_of(layout, try_number)
        check_command(job.command, job.folder, job.python, job.world_size)
        if not job.user:
            self.log.info("ranks run as Airflow's own user: [ddl] run_ranks_as is not set")
        chosen = launcher(self.launcher, self.scheduler)
        cleared = self.tries(context) == 1 and has_part(layout, "train")
        if cleared or trained_with_other_data(layout):
            # Cleared after its end: who does that wants another training, not the word that there
            # is nothing left to do. And what other data led to is nothing to go on from. From a
            # later try, if this one does not come that far.
            layout.to_start_again.touch()
        again = layout.to_start_again.exists()
        # Whatever is chosen now: the manifest may have been edited since.
        if not again and (kept := kept_job(layout.scheduled_job)) is not None:
            self._job = earlier = self._scheduled(layout, launcher(kept.handle.kind))
            if left := earlier.left():
                self._wait_for(left)
        with ExitStack() as held:
            lock = self._alone(held, layout, job.job_id)
            layout.statistics.unlink(missing_ok=True)  # of an earlier try
            if again:
                before = layout.replaced
                self.log.info("trained before: starts again; what it left is in %s", before)
                layout.start_again()
                layout.to_start_again.unlink()
            if job.averages:
                job = replace(job, trained_before=self._trained_before(layout, job, try_number))
            begin_training(layout)
            if layout.experiment_id and layout.experiment_left.exists():
                shutil.rmtree(layout.experiment_left)
            self._leave_whole_checkpoints(layout, try_number)
            if not isinstance(chosen, Scheduler):
                self._job = running = RunningJob(chosen, self.log)
                handle = running.run(replace(job, inherits=(lock,)), layout.progress)
                self._keep_experiment(layout, try_number)
                return self._result(layout, context, handle, running.progress)
        # From here on the job holds the place itself, while it runs.
        self._job = scheduled = self._scheduled(layout, chosen)
        self._wait_for(scheduled.submit(job, layout.progress))

    def _trained_before(self, layout: RunLayout, job: JobSpec, try_number: int) -> str:
        """As ``JobSpec`` has it, of the tries since the training last started again."""
        if trained_with_other_code(layout):
            return ""
        for number in reversed(range(1, try_number)):
            records = layout.records(number)
            try:
                before = read_records(
                    JobHandle("", job.job_id, 0, job.world_size, records, layout.logs)
                )
            except LaunchError as error:
                self.log.warning("try %d: %s", number, error)
                continue
            if how := how_trained(before):
                return how
        return ""

    def _alone(self, held: ExitStack, layout: RunLayout, job_id: str) -> int:
        """Keeps others out until ``held`` is closed; defers, or skips, while there are any."""
        place = layout.kept_alone
        if layout.experiment_id:
            try:
                return held.enter_context(alone_in(place, job_id, _OTHERS_LOOK_S))
            except PlaceTaken as taken:
                # An earlier try of this training ends soon, or is left on some host for ever.
                if not taken.holder.startswith(f"{layout.training_id}/"):
                    self._give_way(layout, taken.holder)
        return held.enter_context(alone_in(place, job_id, _OTHERS_END_S))

    def _give_way(self, layout: RunLayout, holder: str) -> NoReturn:
        # Not at the top: only who defers pays for it.
        from ddl_airflow.triggers.experiment import ExperimentTrigger

        said = f"in experiment {layout.experiment_id} another training works now: {holder}"
        if self.when_busy == "skip":
            raise AirflowSkipException(f"{said}. Skipped, as experiment.when_busy says.")
        self.log.info("%s. Waiting for its end, without a worker", said)
        layout.close_to_ranks()  # this task has no job meanwhile
        interval_s = conf.getfloat("ddl", "job_poll_interval", fallback=5.0)
        trigger = ExperimentTrigger(str(layout.experiment), interval_s)
        self.defer(trigger=trigger, method_name=self.execute_alone.__name__)

    def execute_alone(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        """Called by Airflow when nobody works in the experiment any more; returns as ``run_step``.

        Somebody else who waited for it may have been faster; then this task waits again.
        """

        def go_on(layout: RunLayout, context: Any) -> dict[str, Any]:
            if unseen := event.get("unseen"):
                raise LaunchError(f"cannot wait for the experiment: {unseen}", retryable=False)
            return self.run_step(layout, context)

        return self.with_layout(context, go_on)

    def _wait_for(self, started: StartedJob) -> NoReturn:
        # Not at the top: only who defers pays for it.
        from ddl_airflow.triggers.job import JobTrigger

        limit = self.execution_timeout
        trigger = JobTrigger(
            started.dump(),
            conf.getfloat("ddl", "job_poll_interval", fallback=5.0),
            limit.total_seconds() if limit else None,
        )
        self.defer(trigger=trigger, method_name=self.execute_complete.__name__)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> dict[str, Any]:
        """Called by Airflow when the trigger has seen the job end; returns as ``run_step``."""
        started = StartedJob.load(event["job"])

        def settle(layout: RunLayout, context: Any) -> dict[str, Any]:
            if unseen := event.get("unseen"):
                started.unwatch()  # so that the next try goes on with it
                raise LaunchError(
                    f"{unseen} {started.handle.kind} job {started.handle.number} runs on. When "
                    "that is mended, clear the task: it goes on with this job.",
                    retryable=False,
                )
            status = JobStatus.load(event["status"])
            with suppress(ConnectionInvalid):  # it may be gone meanwhile
                self.environment(layout)  # so that this process masks the script's secrets, too
            self._job = job = self._scheduled(layout, launcher(started.handle.kind))
            job.finish(started, status, self.timed_out() if event["timed_out"] else None)
            result = self._result(layout, context, started.handle, job.progress)
            job.forget()
            return result

        return self.with_layout(context, settle)

    def resume_execution(
        self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any
    ) -> Any:
        """As Airflow's own; a trigger that failed leaves no job behind, and is a lost job's end."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralError as error:
            failure = error

        def give_up(layout: RunLayout, context: Any) -> dict[str, Any]:
            if (kept := kept_job(layout.scheduled_job)) is None:
                raise LaunchError(f"what waited for the experiment failed: {failure}") from failure
            self._scheduled(layout, launcher(kept.handle.kind)).give_up()
            raise JobLost(
                f"what waited for the job failed: {failure}. The job was cancelled."
            ) from failure

        return self.with_layout(context, give_up)

    def _scheduled(self, layout: RunLayout, chosen: Launcher) -> ScheduledJob:
        assert isinstance(chosen, Scheduler), chosen.kind
        return ScheduledJob(chosen, self.log, layout.scheduled_job)

    def _result(
        self, layout: RunLayout, context: Any, job: JobHandle, progress: Progress
    ) -> dict[str, Any]:
        self._say_communication(layout)
        self._warn_of_shared_files(layout, job)
        if layout.experiment_id and not layout.experiment_left.is_dir():
            raise LaunchError(
                f"the training has ended well, and its job left no copy of experiment "
                f"{layout.experiment_id} in {layout.experiment_left}. See logs/launcher.log."
            )
        # Of all tries: this one may have found the training done, and have told nothing.
        told = everything_told(layout.progress, layout.workspace)
        lost = self._say_not_finite(told.measurements)
        metrics = finite(told.measurements)
        write_part(
            layout,
            "train",
            {
                "environment": self._environment(job),
                "result": {
                    "metrics": metrics,
                    "measurements": [one.dump() for one in told.measurements],
                    **({"not_finite": lost} if lost else {}),
                    "steps": told.step if progress.step is None else progress.step,
                    "wrote_model": layout.model.exists(),
                },
                "tries": {"train": self.tries(context)},
            },
        )
        return {"world_size": job.world_size, "metrics": metrics}

    def _say_not_finite(self, measurements: Sequence[Measurement]) -> dict[str, str]:
        """A training that diverged ends as any other: nobody may have asked for a bound."""
        lost = {}
        for one in newest(measurements).values():
            if not math.isfinite(one.value):
                lost[one.metric] = shown(one.value)
                self.log.warning("%s", diverged(one))
        return lost

    def _keep_experiment(self, layout: RunLayout, try_number: int) -> None:
        """Before another training goes on with one that has a name. A scheduler's job does so."""
        if layout.experiment_id:
            words = ["python", "-m", "ddl_ops.experiment"]
            words += [str(layout.experiment), str(layout.experiment_left)]
            log_dir = layout.logs / "experiment"
            self.run_once(layout, f"experiment-{try_number}", shlex.join(words), log_dir, {})

    def _leave_whole_checkpoints(self, layout: RunLayout, try_number: int) -> None:
        """Has a training that goes on go on from the newest checkpoint that can be read."""
        folders = (layout.result, layout.experiment)
        there = (path for folder in folders if folder.is_dir() for path in paths_below(folder))
        if not any(path.suffix in _CHECKPOINTS for path in there):
            return
        name = f"resume-{try_number}"
        words = ["python", "-m", "ddl_ops.resume", "--aside", str(layout.damaged)]
        command = shlex.join([*words, *map(str, folders)])
        env = {"CUDA_VISIBLE_DEVICES": "-1"}  # it reads files; GPUs are for the ranks
        self.run_once(layout, name, command, layout.logs / "resume", env)

    def _warn_of_shared_files(self, layout: RunLayout, job: JobHandle) -> None:
        shared = written_by_several(read_records(job))
        for name, ranks in list(shared.items())[:_MOST_SHARED]:
            self.log.warning(
                "%s each wrote %s, which may be damaged: save on rank 0 only "
                "(ddl.keras.CheckpointCallback)",
                *(ranks, name.removeprefix(f"{layout.root}/")),
            )
        if len(shared) > _MOST_SHARED:
            self.log.warning("… and %d more files", len(shared) - _MOST_SHARED)

    def _say_communication(self, layout: RunLayout) -> None:
        # A script that never starts ddl leaves none; one that ends without the others an empty one.
        try:
            said = read_beneath(layout.statistics, layout.workspace)
            if not said:
                return
            line = communication_line(json.loads(said))
        except FileNotFoundError:
            return
        except _ODD as error:  # not worth a training; worth a line
            self.log.warning("%s: %s: %s", layout.statistics, type(error).__name__, error)
        else:
            self.log.info("communication | %s", line)

    def _environment(self, job: JobHandle) -> dict[str, Any]:
        records = read_records(job)
        ranks = [records[n] for n in range(job.world_size)]
        return {
            "framework": self.framework,
            "launcher": job.kind,
            "distribution": self.distribution,
            "world_size": job.world_size,
            "nodes": self.nodes,
            "slots": self.slots,
            "hosts": sorted({r["host"] for r in ranks}),
            "devices": sorted({gpu for r in ranks for gpu in r.get("gpus", ())}) or ["CPU"],
            "versions": ranks[0].get("versions", {}),
        }
