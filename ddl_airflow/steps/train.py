"""train: the manifest's script on all ranks."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from ddl_airflow.core import environment
from ddl_airflow.core.beneath import read_beneath, write_beneath
from ddl_airflow.core.cluster import parameter_servers
from ddl_airflow.core.command import check_command
from ddl_airflow.core.communication import communication_line
from ddl_airflow.core.errors import (
    ConnectionInvalid,
    DdlError,
    FileRefused,
    JobLost,
    JobPreempted,
    LaunchError,
    PlaceTaken,
    TrainedOnPart,
)
from ddl_airflow.core.job import JobHandle, JobSpec, JobStatus, StartedJob, Submission
from ddl_airflow.core.layout import cancellations
from ddl_airflow.core.metrics import Measurement, diverged, finite, newest, shown
from ddl_airflow.core.plan import TrainStep
from ddl_airflow.core.progress import everything_told
from ddl_airflow.core.scripts import CURE, will_train_apart
from ddl_airflow.launchers.base import Bringing, Launcher, Scheduler
from ddl_airflow.launchers.records import how_trained, read_records, written_by_several
from ddl_airflow.launchers.registry import launcher
from ddl_airflow.lineage.proof import read_notes_of, summary
from ddl_airflow.lineage.record import (
    begin_training,
    beginnings,
    has_part,
    read_part,
    trained_with_other_code,
    trained_with_other_data,
    write_part,
)
from ddl_airflow.steps.base import ScriptTry, StepSkipped, WaitForExperiment, WaitForJob
from ddl_airflow.steps.checkpoints import CheckpointsInStore, check_can_save
from ddl_airflow.steps.job import RunningJob, ScheduledJob, kept_job
from ddl_airflow.steps.preemptions import Preemptions, goodput, goodput_line
from ddl_airflow.steps.streaming import (
    check_all_read,
    check_can_stream,
    streamed,
    wait_for_rest,
    with_digests,
    with_proved,
)
from ddl_airflow.storage.filesystem import alone_in, lock_of, paths_below

if TYPE_CHECKING:
    from pathlib import Path

    from ddl_airflow.storage.staging import StagedDataset
    from ddl_airflow.storage.stream import Stream

# What may come of reading statistics that a script has written itself.
_ODD = (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, FileRefused)
# More than it takes to end ranks that were told to.
_OTHERS_END_S = 30.0
# Than it takes to look whether somebody works in an experiment.
_OTHERS_LOOK_S = 0.5
# Files that several ranks wrote, each with a line in the log.
_MOST_SHARED = 5


class Train(ScriptTry[TrainStep]):
    """Starts the ranks, follows them, and explains how they ended.

    A retry finds the same RESULT_DIR, CHECKPOINT_DIR and EXPERIMENT_DIR, without checkpoints that
    are damaged, so a script that looks there resumes. So does a step that was cleared before its
    training had ended; after that, or where stage_data has brought other data meanwhile, the
    training is done again from its start.

    Where the launcher has a scheduler, the step submits the job and raises ``WaitForJob``. Whatever
    is killed meanwhile, whoever comes next goes on with the same job.

    A job that has to make room is followed by another one of the same try.

    With ``stream`` the data come while the ranks run, and what keeps them from coming ends these.

    With ``upload_every_s`` its checkpoints are saved in the place of results while the ranks run. A
    try that finds older ones here, or none, goes on from those.
    """

    def rehearse(self) -> str:
        """The line that would start the ranks."""
        job = self._job_of()
        check_command(job.command, job.folder, job.python, job.world_size)
        if said := will_train_apart(job.folder, self.step.distribution, job.world_size):
            self.log.warning("%s. %s", said, CURE)
        return f"would start {job.world_size} rank(s): {self.submission()}"

    def submission(self) -> Submission:
        """Exactly what would be started. Starts nothing, and looks at no other host.

        Raises:
            SubmitFailed: nothing could be.
        """
        return self._launcher_of(self.step.launcher, self.step.scheduler).render(self._job_of())

    def _job_of(self) -> JobSpec:
        layout, step = self.layout, self.step
        number, preemptions = self.context.try_number, Preemptions(layout)
        # Each job of a try has an id of its own, by which its scheduler and its records are found.
        before = preemptions.of_try(number)
        servers = step.distribution == "parameter_server"
        return JobSpec(
            job_id=f"{layout.training_id}/train-{number}{f'.{before}' if before else ''}",
            command=step.command,
            nodes=step.nodes,
            slots=step.slots,
            python=self.python,
            folder=layout.code,
            record_dir=layout.records(number, before),
            log_dir=layout.logs,
            env=self.environment(trained=False) | environment.of_training(step),
            cluster=parameter_servers(step.nodes, step.slots) if servers else None,
            gpu=step.gpu,
            lock=lock_of(layout.experiment),
            keep=(layout.experiment, layout.experiment_copy) if layout.experiment_id else None,
            user=self.site.ranks_user,
            averages=step.distribution == "mpi" and step.nodes * step.slots > 1,
            delay_s=preemptions.wait_s if before else 0.0,
            data_comes=step.stream,
            cache=layout.cache,
            cache_bytes=self.site.cache_bytes,
        )

    def run(self) -> dict[str, Any]:
        """Returns the world size and the last value of each metric."""
        layout = self.layout
        job = self._job_of()
        check_command(job.command, job.folder, job.python, job.world_size)
        if self.step.stream:
            check_can_stream(self.step.launcher)
        if self.step.upload_every_s is not None:
            check_can_save(self.step.launcher)
        chosen = self._launcher_of(self.step.launcher, self.step.scheduler)
        if self._cleared_after_its_end() or trained_with_other_data(layout):
            # Who clears it then wants another training, not the word that there is nothing left to
            # do. And what other data led to is nothing to go on from. From a later try, if this one
            # does not come that far.
            layout.restart_requested.touch()
        again = layout.restart_requested.exists()
        # Whatever is chosen now: the manifest may have been edited since.
        if (kept := kept_job(layout.scheduled_job)) is not None:
            earlier = self._scheduled(self._launcher_of(kept.handle.kind))
            self.context.set_job(earlier)
            if again:  # it may wait in a queue yet, and would train with what counts no more
                earlier.give_up()
            else:
                try:
                    if orphan := earlier.adopt():
                        raise WaitForJob(orphan)
                except JobPreempted as preempted:
                    self._make_room_of(earlier, kept.handle, preempted)
                    job = replace(self._job_of(), delay_s=Preemptions(layout).wait_s)
        with ExitStack() as held:
            lock = self._alone(held, job.job_id)
            saves = self._in_store()
            layout.statistics.unlink(missing_ok=True)  # of an earlier try
            if saves is not None and (again or self.context.try_number == 1):
                # What the first try finds is of a deleted run of this id.
                saves.start_again()
            if again:
                before = layout.replaced
                self.log.info("trained before: starts again; what it left is in %s", before)
                layout.restart()
                layout.restart_requested.unlink()
                job = self._job_of()  # what had to make room before does not count
            if job.averages:
                job = replace(job, trained_before=self._trained_before(job))
            begin_training(layout, anew=again)
            layout.drop_experiment_copy()
            # What is half-written here is newer than what is whole in the store.
            self._leave_whole_checkpoints()
            if saves is not None:
                saves.restore(self._leave_whole_checkpoints)
                if saves.brought:  # which this workspace may know nothing of
                    begin_training(layout, anew=False, brought=saves.brought)
            if not self._may_go_on():
                begin_training(layout, anew=True)
                layout.put_progress_away(self.context.try_number)
            if not isinstance(chosen, Scheduler):
                stream = came = None
                if self.step.stream:
                    stream = held.enter_context(streamed(self.step, layout, self.site, self.log))
                running = RunningJob(chosen, self.log, stream)
                self.context.set_job(running)
                if isinstance(chosen, Bringing):
                    chosen.look_at_brought(partial(self._leave_whole_once_more, running))
                with saves.saved(lambda: not running.cancelled) if saves else nullcontext():
                    handle = self._run_here(running, replace(job, inherits=(lock,)))
                if stream is not None:
                    came = self._end_stream(stream, handle, running)
                self._keep_experiment()
                return self._result(handle, running, came)
        # From here on the job holds the place itself, while it runs.
        scheduled = self._scheduled(chosen)
        self.context.set_job(scheduled)
        raise WaitForJob(scheduled.submit(job, layout.progress))

    def _cleared_after_its_end(self) -> bool:
        """Whether somebody has cleared the step since the training last ended."""
        if not has_part(self.layout, "train"):
            return False
        if self.context.tries == 1:
            return True
        # The first try after the clearing may have ended before it came to this.
        try:
            ended_in = int(read_beneath(self.layout.trained_in, self.layout.workspace))
        except (FileNotFoundError, ValueError):  # of an earlier version of ours: none, or empty
            return False
        return ended_in <= self.context.try_number - self.context.tries

    def _in_store(self) -> CheckpointsInStore | None:
        if self.step.upload_every_s is None:
            return None
        return CheckpointsInStore(
            self.step, self.layout, self.site, self.log, self.context.try_number
        )

    def _end_stream(self, stream: Stream, job: JobHandle, running: RunningJob) -> StagedDataset:
        try:
            check_all_read(stream, job)
        except TrainedOnPart:
            self.layout.restart_requested.touch()  # what that led to is nothing to go on from
            raise
        return wait_for_rest(stream, lambda: not running.cancelled, self.log)

    def _run_here(self, running: RunningJob, job: JobSpec) -> JobHandle:
        """Runs the job, and again while it has to make room."""
        while True:
            try:
                return running.run(job, self.layout.progress)
            except JobPreempted as preempted:
                self._make_room(job.handle(self.step.launcher, 0), preempted)
            again = self._job_of()
            job = replace(
                job, job_id=again.job_id, record_dir=again.record_dir, delay_s=again.delay_s
            )
            self._leave_whole_once_more(running)

    def _leave_whole_once_more(self, running: RunningJob) -> None:
        """As ``_leave_whole_checkpoints``, while there is a job that has not begun."""
        self._leave_whole_checkpoints()
        self.context.set_job(running)

    def _make_room(self, job: JobHandle, preempted: JobPreempted) -> None:
        """Notes that a job was preempted; raises JobLost if that was once too often."""
        before, most = Preemptions(self.layout), self.site.most_preemptions
        before.add(job, self.context.try_number, preempted.step)
        if len(before) > most:
            raise JobLost(
                f"{preempted}. The training had to make room {len(before)} times, more often than "
                f"[ddl] preemptions allows ({most}). Raise that, or ask for a place that is not "
                "taken away.",
                retryable=False,
            )
        delay_s = before.wait_s
        self.log.warning(
            "preempted, for the %d. time: %s. It is started again, and this is no attempt%s",
            len(before),
            preempted,
            f"; in {delay_s:.0f} s, for it got nowhere" if delay_s else "",
        )

    def _make_room_of(self, job: ScheduledJob, handle: JobHandle, preempted: JobPreempted) -> None:
        """As ``_make_room``, of a scheduler's job, with which then nobody goes on."""
        # First the note that it was, then none that it runs: who comes after a process that is
        # killed here finds a job that has ended, and starts the next one.
        try:
            self._make_room(handle, preempted)
        except JobLost:  # once too often
            job.drop_note()
            raise
        job.drop_note()

    def _trained_before(self, job: JobSpec) -> str:
        """As ``JobSpec`` has it, of the tries since the training last started again."""
        layout = self.layout
        if trained_with_other_code(layout):
            return ""
        for records in reversed(layout.all_records()):
            if records == job.record_dir:
                continue  # of a deleted run of that id
            try:
                before = read_records(
                    JobHandle("", job.job_id, 0, job.world_size, records, layout.logs)
                )
            except LaunchError as error:
                self.log.warning("%s: %s", records.name, error)
                continue
            if how := how_trained(before):
                return how
        return ""

    def _alone(self, held: ExitStack, job_id: str) -> int:
        """Keeps others out until ``held`` is closed; gives way while there are any."""
        layout = self.layout
        lock = self._alone_in(layout.experiment, held, job_id)
        if lock_of(layout.earlier_kept_alone).exists():
            self._alone_in(layout.earlier_kept_alone, held, job_id)
        return lock

    def _alone_in(self, place: Path, held: ExitStack, job_id: str) -> int:
        try:
            return held.enter_context(alone_in(place, job_id, _OTHERS_LOOK_S))
        except PlaceTaken as taken:
            # An earlier try of this training ends soon, or is left on some host for ever.
            if not taken.holder.startswith(f"{self.layout.training_id}/"):
                self._give_way(place, taken.holder)
        return held.enter_context(alone_in(place, job_id, _OTHERS_END_S))

    def _give_way(self, place: Path, holder: str) -> NoReturn:
        layout = self.layout
        said = f"in experiment {layout.experiment.name} another training works now: {holder}"
        if self.step.when_busy == "skip":
            raise StepSkipped(f"{said}. Skipped, as experiment.when_busy says.")
        self.log.info("%s. Waiting for its end, without a worker", said)
        layout.close_to_ranks()  # this step has no job meanwhile
        raise WaitForExperiment(place)

    def settle(
        self, started: StartedJob, status: JobStatus | None, error: DdlError | None = None
    ) -> dict[str, Any]:
        """Says what a scheduler's job has said, and returns as ``run``, or raises, as it ended.

        Args:
            started: the job.
            status: how it ended; None: it is waited for here. Where it had to make room, the next
                one is submitted: raises WaitForJob.
            error: why it was ended, where that is known better than it is to the scheduler.
        """
        with suppress(ConnectionInvalid):  # it may be gone meanwhile
            self.environment()  # so that this process masks the script's secrets, too
        job = self._scheduled(self._launcher_of(started.handle.kind))
        self.context.set_job(job)
        try:
            job.finish(started, status, error)
        except JobPreempted as preempted:
            self._make_room_of(job, started.handle, preempted)
            return self.run()
        try:
            result = self._result(started.handle, job)
        except LaunchError:
            job.drop_note()  # what this job has not left the next try's may leave
            raise
        job.drop_note()
        return result

    def cancel_orphan(self) -> bool:
        """Cancels the scheduler's job that an earlier process left; False if it left none."""
        if (kept := kept_job(self.layout.scheduled_job)) is None:
            return False
        self._scheduled(self._launcher_of(kept.handle.kind)).cancel_orphan()
        return True

    def _launcher_of(self, kind: str, settings: Mapping[str, Any] | None = None) -> Launcher:
        return launcher(kind, settings, self.site.connection)

    def _scheduled(self, chosen: Launcher) -> ScheduledJob:
        assert isinstance(chosen, Scheduler), chosen.kind
        layout = self.layout
        noted = cancellations(layout.workspace)
        return ScheduledJob(chosen, self.log, layout.scheduled_job, noted, self.context.task)

    def _result(
        self, job: JobHandle, ran: RunningJob, came: StagedDataset | None = None
    ) -> dict[str, Any]:
        layout, records = self.layout, read_records(job)
        self._say_communication()
        self._warn_of_shared_files(records)
        if layout.experiment_id and not layout.experiment_copy.is_dir():
            raise LaunchError(
                f"the training has ended well, and its job left no copy of experiment "
                f"{layout.experiment_id} in {layout.experiment_copy}. See logs/launcher.log."
            )
        started = [one["started"] for one in records.values() if "started" in one]
        # Of all tries of this training: the last may have found it done, and have told nothing.
        told = everything_told(layout.progress, layout.workspace)
        lost = self._say_not_finite(told.measurements)
        metrics = finite(told.measurements)
        steps = told.step if ran.progress.step is None else ran.progress.step
        used = goodput(layout, len(Preemptions(layout)), steps)
        self.log.info("goodput | %s", goodput_line(used))
        dataset = {}
        if came is not None:  # while the ranks trained
            listed = read_part(layout, "stage_data")["dataset"]["listing"]
            listing = with_proved(listed, came.files)
            if self.step.prove:
                listing = with_digests(layout, listing)
            dataset = {"dataset": {"listing": listing}}
        # It counts once the part is there.
        ended_in = str(self.context.try_number).encode()
        write_beneath(layout.trained_in, layout.workspace, ended_in)
        write_part(
            layout,
            "train",
            {
                **dataset,
                "environment": self._environment(job, records, ran.images),
                "result": {
                    "metrics": metrics,
                    "measurements": [one.dump() for one in told.measurements],
                    **({"not_finite": lost} if lost else {}),
                    "steps": steps,
                    "goodput": used,
                    **beginnings(layout, min(started, default=math.inf)),
                    **self._proof(),
                    "wrote_model": layout.model.exists(),
                    **self._wrote_saved_model(),
                },
                "tries": {"train": self.context.tries},
            },
        )
        return {"world_size": job.world_size, "metrics": metrics}

    def _wrote_saved_model(self) -> dict[str, bool]:
        """Nothing where the ranks' user keeps it private, as what ``tempfile`` has made."""
        with suppress(PermissionError):
            return {"wrote_saved_model": self.layout.has_any_model}
        return {}

    def _proof(self) -> dict[str, Any]:
        if not self.step.prove:
            return {}
        try:
            if notes := read_notes_of(self.layout):
                return {"proof": summary(notes)}
            why = (
                "the script left no digests of its weights. fit() of Keras models and sessions "
                "that average do; a loop of its own calls ddl.note_weights"
            )
        except (FileRefused, OSError) as error:
            why = str(error)
        self.log.warning("`rerun --prove` will have nothing to compare: %s", why)
        return {}

    def _say_not_finite(self, measurements: Sequence[Measurement]) -> dict[str, str]:
        """A training that diverged ends as any other: nobody may have asked for a bound."""
        lost = {}
        for one in newest(measurements).values():
            if not math.isfinite(one.value):
                lost[one.metric] = shown(one.value)
                self.log.warning("%s", diverged(one))
        return lost

    def _keep_experiment(self) -> None:
        """Before another training goes on with one that has a name. A scheduler's job does so."""
        layout = self.layout
        if layout.experiment_id:
            words = ["python", "-m", "ddl_ops.experiment"]
            words += [str(layout.experiment), str(layout.experiment_copy)]
            log_dir = layout.logs / "experiment"
            self.run_once(f"experiment-{self.context.try_number}", shlex.join(words), log_dir, {})

    def _may_go_on(self) -> bool:
        """Whether there is anything that ranks may go on from, whatever they call it."""
        from ddl_airflow.launchers.placement import PLACED  # no parse needs these
        from ddl_airflow.storage.checkpoint_files import has_any

        layout = self.layout
        # What a host still has is brought before the ranks start.
        return any((records / PLACED).exists() for records in layout.all_records()) or any(
            has_any(folder, layout.workspace) for folder in (layout.result, layout.experiment)
        )

    def _leave_whole_checkpoints(self, *folders: Path) -> None:
        """Has a training that goes on go on from the newest checkpoint that can be read, in those
        folders, or else where its ranks write.
        """
        from ddl_airflow.storage.checkpoint_files import READ_AGAIN  # no parse needs it

        layout = self.layout
        name = f"resume-{self.context.try_number}"
        env = {"CUDA_VISIBLE_DEVICES": "-1"}  # it reads files; GPUs are for the ranks
        for folder in folders or (layout.result, layout.experiment):
            there = paths_below(folder) if folder.is_dir() else ()
            if not any(
                path.suffix in READ_AGAIN or path.parent.name.startswith("preempted-")
                for path in there
            ):
                continue
            # Those of an experiment apart: none of them is ever in the store.
            of_experiment = folder == layout.experiment
            aside = layout.damaged / "experiment" if of_experiment else layout.damaged
            words = ["python", "-m", "ddl_ops.resume", "--aside", str(aside), str(folder)]
            self.run_once(name, shlex.join(words), layout.logs / "resume", env)

    def _warn_of_shared_files(self, records: Mapping[int, dict[str, Any]]) -> None:
        layout = self.layout
        shared = written_by_several(records)
        for name, ranks in list(shared.items())[:_MOST_SHARED]:
            self.log.warning(
                "%s each wrote %s, which may be damaged: save on rank 0 only "
                "(ddl.keras.CheckpointCallback)",
                *(ranks, name.removeprefix(f"{layout.root}/")),
            )
        if len(shared) > _MOST_SHARED:
            self.log.warning("… and %d more files", len(shared) - _MOST_SHARED)

    def _say_communication(self) -> None:
        # A script that never starts ddl leaves none; one that ends without the others an empty one.
        layout = self.layout
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

    def _environment(
        self, job: JobHandle, records: Mapping[int, dict[str, Any]], images: Sequence[str]
    ) -> dict[str, Any]:
        ranks = [records[n] for n in range(job.world_size)]
        return {
            "framework": self.step.framework,
            "launcher": job.kind,
            "distribution": self.step.distribution,
            "world_size": job.world_size,
            "nodes": job.nodes or self.step.nodes,
            "slots": self.step.slots,
            "hosts": sorted({r["host"] for r in ranks}),
            "devices": sorted({gpu for r in ranks for gpu in r.get("gpus", ())}) or ["CPU"],
            "processors": sorted({r["cpu"] for r in ranks if r.get("cpu")}),
            **({"images": list(images)} if images else {}),
            "settings": ranks[0].get("settings", {}),
            "versions": ranks[0].get("versions", {}),
        }
