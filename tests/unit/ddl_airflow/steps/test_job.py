from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import textwrap
import threading
import time
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import pytest

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.cancellations import drop_conditional, note_cancellation
from ddl_airflow.core.errors import (
    JobFailed,
    JobLost,
    JobPreempted,
    LaunchError,
    SubmitFailed,
)
from ddl_airflow.core.job import JobState, JobStatus, RankFailure, StartedJob
from ddl_airflow.launchers.base import cancel_noted
from ddl_airflow.launchers.fake import FakeLauncher
from ddl_airflow.launchers.processes import marked
from ddl_airflow.steps import job as steps_job
from ddl_airflow.steps.job import (
    RunningJob,
    ScheduledJob,
    cancel_all_noted,
    kept_job,
    may_run,
)
from tests.limits import within
from tests.unit.ddl_airflow.conftest import FakeScheduler

LOG = logging.getLogger("unit.launch")


@pytest.fixture
def said(caplog):
    """said(): the messages so far."""
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_output_of_rank_0_and_the_command_are_logged(job, said):
    one = job("python main.py", launcher=FakeLauncher(output="a\nb ü\n"))
    RunningJob(one.launcher, LOG).run(one.spec)
    assert said() == ["python main.py", "rank 0 | a", "rank 0 | b ü"]


def test_last_words_without_a_line_end_are_logged(job, said):
    one = job(launcher=FakeLauncher(output="a\nlast words"))
    RunningJob(one.launcher, LOG).run(one.spec)
    assert said()[-1] == "rank 0 | last words"


def test_output_of_a_try_before_is_not_said_again(job, said):
    one = job(launcher=FakeLauncher(output="x\n"))
    one.spec.log_dir.mkdir()
    (one.spec.log_dir / "rank-0.log").write_text("of another try\n")
    one.launcher = _Appending("of this try\n")
    RunningJob(one.launcher, LOG).run(one.spec)
    assert "rank 0 | of this try" in said()
    assert "rank 0 | of another try" not in said()


class _Appending(FakeLauncher):
    """Appends to the logs, as the rank shim does."""

    def submit(self, submission):
        path = submission.job.log_dir / "rank-0.log"
        before = path.read_text()
        handle = super().submit(submission)
        path.write_text(before + self.output)
        return handle

    def __init__(self, output):
        super().__init__(output=output)


def test_records_of_an_earlier_try_of_this_number_are_no_success(job):
    # A run that was deleted and is triggered again under its id repeats it, in the same folder.
    one = job(nodes=2, launcher=FakeLauncher([None, None]))
    one.spec.record_dir.mkdir()
    for rank in (0, 1):
        record = {"rank": rank, "host": "h", "ended": 1.0, "exit_code": 0}
        (one.spec.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
    with pytest.raises((JobLost, JobFailed)):
        RunningJob(one.launcher, LOG).run(one.spec)


def test_failed_rank_is_explained_with_its_last_lines(job, said):
    output = "".join(f"line {n}\n" for n in range(40))
    one = job(nodes=3, launcher=FakeLauncher([0, 0, 139], output))
    with pytest.raises(JobFailed) as caught:
        RunningJob(one.launcher, LOG).run(one.spec)
    error = caught.value
    assert (error.rank, error.host, error.exit_code) == (2, "fake", 139)
    assert error.retryable is True
    assert str(error).startswith("rank 2 of 3 on fake was ended by SIGSEGV. All ranks were ended.")
    assert str(one.spec.log_dir / "rank-2.log") in str(error)
    shown = [line for line in said() if line.startswith("rank-2 | ")]
    assert shown == [f"rank-2 | line {n}" for n in range(15, 40)]


def test_a_rank_that_said_much_costs_no_memory(job, monkeypatch, said):
    one = job(nodes=1, launcher=FakeLauncher([7], "x" * 99 + "\n"))
    running = RunningJob(one.launcher, LOG)
    submit = one.launcher.submit

    def much(submission):
        handle = submit(submission)
        with (handle.log_dir / "rank-0.log").open("a") as file:
            for _ in range(640):
                file.write(("y" * 99 + "\n") * 1000)
            file.write("the cause\n")
        return handle

    one.launcher.submit = much
    monkeypatch.setattr(steps_job, "_MOST_LINES", 10)
    tracemalloc.start()
    with pytest.raises(JobFailed):
        running.run(one.spec)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 20 << 20, "of 61 MiB"
    assert [line for line in said() if line.endswith("the cause")] == ["rank 0 | the cause"]


def test_command_not_found_is_not_retried(job):
    one = job(launcher=FakeLauncher([127]))
    with pytest.raises(JobFailed, match="command not found") as caught:
        RunningJob(one.launcher, LOG).run(one.spec)
    assert caught.value.retryable is False


def test_lost_job_shows_what_mpirun_said(job, said):
    class NobodyStarted(FakeLauncher):
        def submit(self, submission):
            handle = super().submit(submission)
            for record in handle.record_dir.iterdir():
                record.unlink()
            return handle

    one = job(launcher=NobodyStarted())
    one.spec.log_dir.mkdir()
    (one.spec.log_dir / "launcher.log").write_text("of another try\n")
    with pytest.raises(JobLost, match="launcher.log") as caught:
        RunningJob(one.launcher, LOG).run(one.spec)
    assert caught.value.retryable is True
    assert "mpirun | of another try" not in said()


def test_job_is_always_cancelled_at_its_end(job):
    for codes in ([], [5]):
        one = job(launcher=FakeLauncher(codes))
        running = RunningJob(one.launcher, LOG)
        with suppress(JobFailed):
            running.run(one.spec)
        assert len(one.launcher.cancelled) == 1


def test_cancel_before_the_start_is_nothing(job):
    one = job(launcher=FakeLauncher())
    RunningJob(one.launcher, LOG).cancel()
    assert one.launcher.cancelled == []


def test_progress_of_this_try_is_followed_and_logged(job, said, tmp_path, monkeypatch):
    monkeypatch.setattr(steps_job, "_SAY_EVERY_S", 0.2)
    path = tmp_path / "progress.jsonl"
    path.write_text(json.dumps({"t": 1.0, "source": "script", "step": 999}) + "\n")
    script = """
        import json, os, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            for step in range(1, 6):
                line = {"t": 10.0 + step, "source": "script", "step": step, "steps": 5}
                with open(os.environ["DDL_PROGRESS"], "a") as file:
                    file.write(json.dumps(line)[:9])
                    file.flush()
                    time.sleep(0.1)
                    file.write(json.dumps(line)[9:] + "\\n")
    """
    one = job(script=textwrap.dedent(script), env={"DDL_PROGRESS": str(path)})
    running = RunningJob(one.launcher, LOG)
    running.run(one.spec, path)
    assert (running.progress.step, running.progress.steps) == (5, 5)
    assert running.progress.steps_per_s == pytest.approx(1.0)
    lines = [line for line in said() if line.startswith("progress | ")]
    assert len(lines) > 1
    assert lines[-1] == "progress | step 5/5 · 1.0 steps/s"


def test_a_progress_line_that_is_none_is_said_and_ends_no_training(job, tmp_path, said):
    path = tmp_path / "progress.jsonl"
    script = """
        import os, time
        with open(os.environ["DDL_PROGRESS"], "a") as file:
            for line in ("not json", "[" * 100000, '{"step": [1]}', '{"step": ' + "1" * 4000 + "}"):
                file.write(line + "\\n")
        time.sleep(0.5)
    """
    one = job(script=textwrap.dedent(script), nodes=1, env={"DDL_PROGRESS": str(path)})
    RunningJob(one.launcher, LOG).run(one.spec, path)
    warned = [line for line in said() if "no progress" in line]
    assert ["not json" in warned[0], "4 lines were" in warned[1], len(warned)] == [True, True, 2]


def test_files_that_cannot_be_read_for_a_while_end_no_training(job, tmp_path, said, monkeypatch):
    """As on a network file system whose server starts again."""
    path = tmp_path / "progress.jsonl"
    script = """
        import os, time
        with open(os.environ["DDL_PROGRESS"], "a") as file:
            file.write('{"t": 1.0, "source": "script", "step": 5}\\n')
        print("trained")
        time.sleep(0.5)
    """
    asked = []

    def opened(file, root):
        asked.append(file)
        if asked.count(file) < 4:
            raise OSError(errno.ESTALE, "Stale file handle", str(file))
        return open_beneath(file, root)

    monkeypatch.setattr("ddl_airflow.core.progress.open_beneath", opened)
    one = job(script=textwrap.dedent(script), nodes=1, env={"DDL_PROGRESS": str(path)})
    running = RunningJob(one.launcher, LOG)
    running.run(one.spec, path)
    assert (running.progress.step, "rank 0 | trained" in said()) == (5, True)
    for file in (path, one.spec.log_dir / "rank-0.log"):
        warned = [line for line in said() if "Stale file handle" in line and f"{file}" in line]
        assert len(warned) == 1


def test_a_rank_whose_log_cannot_be_read_is_named_all_the_same(job, said, monkeypatch):
    def opened(file, root):
        raise PermissionError(errno.EACCES, "Permission denied", str(file))

    monkeypatch.setattr(steps_job, "open_beneath", opened)
    one = job(nodes=2, launcher=FakeLauncher([0, 7]))
    with pytest.raises(JobFailed, match="rank 1 of 2 on fake exited with code 7"):
        RunningJob(one.launcher, LOG).run(one.spec)
    assert any("Permission denied" in line and "rank-1.log" in line for line in said())


def test_failing_ranks_end_with_what_they_said_in_the_log(job, said):
    script = """
        import os, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            raise ValueError("sample 17 has 783 pixels")
        time.sleep(60)
    """
    one = job(script=textwrap.dedent(script))
    with pytest.raises(JobFailed, match="rank 1 of 2 on .* raised ValueError at .*main.py:4"):
        RunningJob(one.launcher, LOG).run(one.spec)
    assert "rank-1 | ValueError: sample 17 has 783 pixels" in said()
    assert one.processes() == []


def test_a_rank_in_uninterruptible_sleep_is_named_and_holds_no_task(
    job, tmp_path, freezer, monkeypatch, said
):
    """One rank fails and another cannot end: mpirun waits for it, and the task does not."""
    for name, seconds in (("END_S", 0.5), ("_LOOK_S", 0.1), ("_KILLED_S", 0.5)):
        monkeypatch.setattr(f"ddl_airflow.launchers.local.{name}", seconds)
    script = f"""
        import os, sys, time
        rank, folder = os.environ["OMPI_COMM_WORLD_RANK"], {str(tmp_path)!r}
        open(f"{{folder}}/up-{{rank}}", "w").write(str(os.getpid()))
        while rank == "1" or not os.path.exists(f"{{folder}}/fail"):
            time.sleep(0.02)
        sys.exit(7)
    """
    one = job(script=textwrap.dedent(script))
    frozen = []

    def freeze():
        for rank in (0, 1):
            frozen.append(int(one.wait_for(tmp_path / f"up-{rank}")))
        freezer.freeze(frozen[1])
        (tmp_path / "fail").touch()

    freezing = threading.Thread(target=freeze)
    freezing.start()
    with pytest.raises(JobFailed, match="rank 0 of 2 on .* exited with code 7") as caught:
        RunningJob(one.launcher, LOG).run(one.spec)
    freezing.join()
    left = rf"But on {socket.gethostname()} process {frozen[1]} \(.*, in uninterruptible sleep in "
    assert re.search(left + r".* did not end .* Mend what it waits for", str(caught.value))
    assert any(f"process {frozen[1]} (" in line for line in said())
    assert marked("DDL_RECORD_DIR", str(one.spec.record_dir)) == [frozen[1]]
    freezer.thaw()
    deadline = time.monotonic() + within(20)
    while one.processes() and time.monotonic() < deadline:
        time.sleep(0.02)  # it was killed long ago


def test_cancel_from_another_thread_ends_the_wait(job):
    one = job(script="open('up', 'w').close(); import time; time.sleep(60)")
    running = RunningJob(one.launcher, LOG)

    def stop():
        deadline = time.monotonic() + within(20)
        while not (one.spec.folder / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        running.cancel()

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises((JobLost, JobFailed)):
        running.run(one.spec)
    stopper.join()
    assert one.processes() == []


# --- jobs of a scheduler: what a new process goes on with ---


@pytest.fixture
def process(cluster, tmp_path):
    """process(launcher=): what a new process of the task has."""
    kept = tmp_path / "kept.json"
    noted = tmp_path / "cancellations"

    def make(launcher=None):
        return ScheduledJob(launcher or FakeScheduler(cluster.folder), LOG, kept, noted)

    return make


def test_the_first_process_leaves_nothing_and_submits(job, process, cluster, tmp_path):
    one = process()
    assert one.adopt() is None
    started = one.submit(job().spec, tmp_path / "progress")
    assert cluster.numbers() == [started.handle.number] == [1]


@pytest.mark.parametrize("state", ["pending", "running", "succeeded"])
def test_a_job_that_nobody_waited_for_is_gone_on_with(job, process, cluster, tmp_path, state):
    spec = job().spec
    spec.log_dir.mkdir(parents=True)
    (spec.log_dir / "rank-0.log").write_text("of another try")
    submitted = process().submit(spec, tmp_path / "progress")
    cluster.set(1, state)
    left = process().adopt()
    assert left == submitted
    assert left.sizes == {"rank-0.log": 14}
    assert cluster.numbers() == [1]


def test_a_job_is_found_though_its_number_was_never_learned(job, process, cluster, tmp_path):
    class Dies(FakeScheduler):
        def submit(self, submission):
            super().submit(submission)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        process(Dies(cluster.folder)).submit(job().spec, tmp_path / "progress")
    assert process().adopt().handle.number == 1


def test_a_process_that_died_before_it_submitted_left_nothing(job, process, cluster, tmp_path):
    class Refuses(FakeScheduler):
        def submit(self, submission):
            raise SubmitFailed("the controller is away")

    with pytest.raises(SubmitFailed):
        process(Refuses(cluster.folder)).submit(job().spec, tmp_path / "progress")
    assert process().adopt() is None
    assert cluster.numbers() == []


class Slow(FakeScheduler):
    """May take a job for a second after its submission began; and then has it."""

    takes = True
    looks = 0

    def expected(self, job):
        return replace(super().expected(job), submit_s=1.0)

    def submit(self, submission):
        self.submission = submission
        raise KeyboardInterrupt

    def find(self, handle):
        self.looks += 1
        if self.looks == 2 and self.takes:
            super().submit(self.submission)
        return super().find(handle)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_job_that_its_scheduler_takes_after_the_task_was_killed_is_found(
    job, process, cluster, tmp_path, monkeypatch, wanted
):
    """A second one was submitted beside it."""
    monkeypatch.setattr(steps_job, "_ASK_S", 0.05)
    slow = Slow(cluster.folder)
    with pytest.raises(KeyboardInterrupt):
        process(slow).submit(job().spec, tmp_path / "progress")
    if wanted:
        assert process(slow).adopt().handle.number == 1
        return
    process(slow).give_up()
    assert cluster.state(1) == "lost"


def test_a_job_is_known_not_to_be_there_only_when_its_scheduler_can_no_longer_take_it(
    job, process, cluster, tmp_path, monkeypatch, said
):
    monkeypatch.setattr(steps_job, "_ASK_S", 0.05)
    slow = Slow(cluster.folder)
    slow.takes = False
    began = time.time()
    with pytest.raises(KeyboardInterrupt):
        process(slow).submit(job().spec, tmp_path / "progress")
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert process(slow).adopt() is None
    assert time.time() - began >= 1.0
    assert any("may still take" in line for line in said())
    # One that began long ago, or by a clock that is ahead, is not waited for any longer.
    for started in (0.0, time.time() + 3600):
        (tmp_path / "kept.json").write_text(json.dumps(kept | {"started": started}))
        began = time.monotonic()
        assert process(slow).adopt() is None
        assert time.monotonic() - began < within(1.5)


def test_a_task_that_is_ended_while_it_looks_for_a_job_submits_none(
    job, process, cluster, tmp_path
):
    slow = Slow(cluster.folder)
    slow.takes = False
    with pytest.raises(KeyboardInterrupt):
        process(slow).submit(job().spec, tmp_path / "progress")
    one = process(slow)
    one.cancel()
    with pytest.raises(JobLost, match="cancelled"):
        one.adopt()
    assert (tmp_path / "kept.json").exists()


@pytest.mark.parametrize("state", ["failed", "lost"])
def test_a_job_that_failed_is_not_gone_on_with(job, process, cluster, tmp_path, state):
    process().submit(job().spec, tmp_path / "progress")
    cluster.set(1, state)
    assert process().adopt() is None


LEFT = pytest.mark.parametrize("left", [{"permanent": True}, {"waits": True}], ids=str)


@LEFT
def test_a_job_that_would_wait_for_ever_is_taken_from_the_queue(
    job, process, cluster, tmp_path, left
):
    class Never(FakeScheduler):
        def status(self, handle):
            status = super().status(handle)
            if status.state is not JobState.PENDING:
                return status
            return JobStatus(JobState.FAILED, reason="It does not start.", **left)

        def cancel(self, handle, grace_s=0.0):
            self.set(handle.number, JobState.LOST.value)

    process().submit(job().spec, tmp_path / "progress")
    assert process(Never(cluster.folder)).adopt() is None
    assert cluster.state(1) == "lost"
    assert not (tmp_path / "kept.json").exists()


@pytest.mark.parametrize("state", ["pending", "running"])
def test_a_job_that_was_given_up_is_ended_first(job, process, cluster, tmp_path, said, state):
    started = process().submit(job().spec, tmp_path / "progress")
    cluster.set(1, state)
    started.mark_monitored()
    assert process().adopt() is None
    assert cluster.status(started.handle).ended
    assert said()[-1].startswith("fake-scheduler job 1 (")
    assert "was given up" in said()[-1]


def test_no_second_job_beside_one_that_does_not_end(job, process, cluster, tmp_path, monkeypatch):
    class Deaf(FakeScheduler):
        def cancel(self, handle, grace_s=0.0):
            pass

    monkeypatch.setattr("ddl_airflow.steps.job.END_S", 0.2)
    monkeypatch.setattr("ddl_airflow.steps.job._ASK_S", 0.05)
    process().submit(job().spec, tmp_path / "progress").mark_monitored()
    cluster.set(1, "running")
    with pytest.raises(LaunchError, match="job 1 of an earlier try .* has not ended"):
        process(Deaf(cluster.folder)).adopt()


def test_a_job_has_the_time_to_save_that_its_launcher_leaves_it(
    job, process, cluster, tmp_path, monkeypatch
):
    class Saves(FakeScheduler):
        looks = 0

        def expected(self, job):
            return replace(super().expected(job), grace_s=60.0)

        def cancel(self, handle, grace_s=0.0):
            pass

        def status(self, handle):
            self.looks += 1
            return JobStatus(JobState.LOST if self.looks > 5 else JobState.RUNNING)

    monkeypatch.setattr("ddl_airflow.steps.job.END_S", 0.0)
    monkeypatch.setattr("ddl_airflow.steps.job._ASK_S", 0.01)
    saves = Saves(cluster.folder)
    process(saves).submit(job().spec, tmp_path / "progress").mark_monitored()
    assert process(saves).adopt() is None


@pytest.mark.parametrize("state", ["pending", "running", "succeeded"])
def test_a_job_that_nobody_wants_any_more_is_ended(job, process, cluster, tmp_path, state):
    process().submit(job().spec, tmp_path / "progress")
    cluster.set(1, state)
    process().give_up()
    assert cluster.state(1) == ("succeeded" if state == "succeeded" else "lost")
    assert process().adopt() is None


@pytest.mark.parametrize(
    ("state", "may"),
    [("pending", True), ("running", True), ("lost", False), ("failed", False)],
)
def test_a_job_may_run_until_its_scheduler_says_that_it_has_ended(
    job, process, cluster, tmp_path, state, may
):
    one = process()
    assert not may_run(one._kept)
    one.submit(job().spec, tmp_path / "progress")
    cluster.set(1, state)
    assert may_run(one._kept) is may


@LEFT
def test_a_job_that_has_taken_too_long_to_start_is_taken_from_the_queue_at_its_end(
    job, process, cluster, tmp_path, monkeypatch, left
):
    started = process().submit(job().spec, tmp_path / "progress")
    cancelled = []
    monkeypatch.setattr(FakeScheduler, "cancel", lambda self, *words: cancelled.append(words[0]))
    with pytest.raises(JobLost, match="It does not start") as caught:
        process().finish(started, JobStatus(JobState.FAILED, reason="It does not start.", **left))
    assert cancelled == [started.handle] and caught.value.retryable is ("waits" in left)


@LEFT
def test_a_job_of_which_nothing_is_known_may_run(
    job, process, cluster, tmp_path, monkeypatch, left
):
    one = process()
    one.submit(job().spec, tmp_path / "progress")

    def away(*_):
        raise LaunchError("the controller is away")

    never = JobStatus(JobState.FAILED, reason="It does not start.", **left)
    for status in (away, lambda *_: never):  # what never starts still waits
        monkeypatch.setattr(FakeScheduler, "status", status)
        assert may_run(one._kept)
    monkeypatch.undo()  # here that scheduler is not known
    assert may_run(one._kept)
    for text in ("{}", "no JSON"):
        one._kept.write_text(text)
        assert may_run(one._kept)


def test_a_job_that_is_refused_for_good_is_not_looked_for(job, process, cluster, tmp_path):
    class Refuses(FakeScheduler):
        def submit(self, submission):
            raise SubmitFailed("no such partition", retryable=retryable, refused=refused)

    for retryable, refused in ((True, False), (True, True), (False, False)):
        one = process(Refuses(cluster.folder))
        with pytest.raises(SubmitFailed):
            one.submit(job().spec, tmp_path / "progress")
        assert one._kept.exists() is (retryable and not refused)


def test_a_job_that_made_room_and_was_not_dealt_with_is_said(job, process, cluster, tmp_path):
    process().submit(job().spec, tmp_path / "progress")
    cluster.set(1, "preempted", "all ranks saved", step=40)
    for _ in range(2):  # until somebody has noted it
        with pytest.raises(JobPreempted, match="all ranks saved") as caught:
            process().adopt()
        assert caught.value.step == 40


def test_nothing_is_submitted_while_it_is_not_known_what_runs(job, process, cluster, tmp_path):
    class Away(FakeScheduler):
        def status(self, handle):
            raise LaunchError("the controller is away")

    process().submit(job().spec, tmp_path / "progress")
    with pytest.raises(LaunchError, match="away"):
        process(Away(cluster.folder)).adopt()


@pytest.mark.parametrize(
    "status",
    [None, JobStatus(JobState.FAILED, reason="It never starts.", permanent=True)],
    ids=["unknown", "permanent"],
)
def test_a_job_is_not_forgotten_where_its_scheduler_does_not_answer(
    job, process, cluster, tmp_path, status
):
    class Away(FakeScheduler):
        def status(self, handle):
            raise LaunchError("the controller is away", retryable=False)

        def cancel(self, handle, grace_s=0.0):
            raise LaunchError("the controller is away")

    started = process().submit(job().spec, tmp_path / "progress")
    with pytest.raises(LaunchError, match="away"):
        process(Away(cluster.folder)).finish(started, status)
    assert process().adopt() == started


def test_a_job_that_is_waited_for_here_is_asked_for_now_and_then_and_outlasts_its_scheduler(
    job, process, cluster, tmp_path, monkeypatch, said
):
    """Each question starts a process, and a controller that starts again answers none."""
    monkeypatch.setattr(steps_job, "_LOOK_S", 0.5)
    asked = []

    class Restarts(FakeScheduler):
        def status(self, handle):
            asked.append(handle)
            if len(asked) in (2, 3):
                raise LaunchError("squeue: no answer. Is Slurm's controller up?")
            if time.monotonic() - began > 2.0:
                cluster.set(1, "succeeded", output="last words")
            return super().status(handle)

    started = process().submit(job().spec, tmp_path / "progress")
    cluster.set(1, "running")
    began = time.monotonic()
    process(Restarts(cluster.folder)).finish(started, None)
    assert len(asked) <= 6
    assert said()[-1] == "rank 0 | last words"
    assert len([line for line in said() if "squeue: no answer" in line]) == 1


def test_a_task_that_is_killed_while_it_submits_leaves_no_job(job, cluster, process, tmp_path):
    class Killed(FakeScheduler):
        def submit(self, submission):
            one.cancel()  # Airflow's signal handler comes in between
            return super().submit(submission)

    one = process(Killed(cluster.folder))
    with pytest.raises(JobLost, match="cancelled"):
        one.submit(job().spec, tmp_path / "progress")
    assert cluster.status(replace(cluster.expected(job().spec), number=1)).ended


def test_a_job_that_a_killed_task_could_not_cancel_is_given_up_by_the_next_try(
    job, cluster, process, tmp_path
):
    """Airflow kills it 5 s after it has told it to end; the scheduler may need longer."""

    class Away(FakeScheduler):
        def cancel(self, handle, grace_s=0.0):
            raise LaunchError("the controller is away")

    one = process(Away(cluster.folder))
    started = one.submit(job().spec, tmp_path / "progress")
    with pytest.raises(LaunchError, match="away"):
        one.cancel()
    assert started.cancellation.exists()
    assert process().adopt() is None
    assert cluster.state(1) == "lost"
    assert not started.cancellation.exists()


def test_a_job_whose_task_was_ended_while_it_was_submitted_is_noted_to_be_cancelled(
    job, cluster, process, tmp_path
):
    class Killed(FakeScheduler):
        def submit(self, submission):
            super().submit(submission)
            one.cancel()
            raise KeyboardInterrupt  # and so is the process, before it has the answer

    one = process(Killed(cluster.folder))
    with pytest.raises(KeyboardInterrupt):
        one.submit(job().spec, tmp_path / "progress")
    folder = tmp_path / "cancellations"
    assert list(cancel_all_noted(folder, lambda *_: True, dry_run=True)) == [
        "fake-scheduler job 0 (unit/train-1)"
    ]
    assert cluster.state(1) == "pending"
    list(cancel_all_noted(folder, lambda *_: True))
    assert cluster.state(1) == "lost"
    assert list(folder.iterdir()) == []


def test_a_job_that_its_task_has_cancelled_is_not_gone_on_with_while_it_ends(
    job, cluster, process, tmp_path, monkeypatch
):
    one = process()
    one.submit(job().spec, tmp_path / "progress")
    with monkeypatch.context() as ending:
        ending.setattr(FakeScheduler, "cancel", lambda *_: None)  # ranks save yet
        one.cancel()
    assert process().adopt() is None
    assert cluster.state(1) == "lost"


@pytest.mark.parametrize("late", [True, False])
def test_a_note_of_a_job_that_may_still_be_taken_stays(job, cluster, process, tmp_path, late):
    slow = Slow(cluster.folder)
    slow.takes = False
    with pytest.raises(KeyboardInterrupt):
        process(slow).submit(job().spec, tmp_path / "progress")
    noted = kept_job(tmp_path / "kept.json")
    noted = replace(noted, started=0.0 if late else time.time())
    note_cancellation(noted)
    assert not cancel_noted(slow, noted)  # there is none
    assert noted.cancellation.exists() is not late


def test_a_note_that_cannot_be_read_or_done_keeps_no_other_job(job, cluster, process, tmp_path):
    process().submit(job().spec, tmp_path / "progress")
    noted = kept_job(tmp_path / "kept.json")
    note_cancellation(noted)
    unknown = replace(noted, cancellation=noted.cancellation.with_name("0.json"))
    note_cancellation(replace(unknown, handle=replace(noted.handle, kind="gone")))
    noted.cancellation.with_name("1.json").mkdir()
    folder = noted.cancellation.parent
    assert list(cancel_all_noted(folder, lambda *_: True)) == [
        "fake-scheduler job 1 (unit/train-1)"
    ]
    assert cluster.state(1) == "lost" and not noted.cancellation.exists()
    assert list(cancel_all_noted(tmp_path / "kept.json", lambda *_: True)) == []


def test_a_workspace_that_hangs_keeps_no_job_from_being_cancelled(
    job, cluster, process, tmp_path, monkeypatch
):
    monkeypatch.setattr(steps_job, "_NOTING_S", 0.1)
    monkeypatch.setattr(steps_job, "note_cancellation", lambda *_: time.sleep(30))
    one = process()
    one.submit(job().spec, tmp_path / "progress")
    one.cancel()
    assert cluster.state(1) == "lost"


def test_the_end_is_said_once_and_then_forgotten(job, process, cluster, tmp_path, said):
    spec = job().spec
    progress = tmp_path / "progress"
    started = process().submit(spec, progress)
    progress.write_text(json.dumps({"t": 1.0, "source": "script", "step": 3, "loss": 0.5}) + "\n")
    cluster.set(1, "succeeded", output="last words")
    last = process()
    last.finish(started, cluster.status(started.handle))
    assert said()[-2:] == ["rank 0 | last words", "progress | step 3 · loss 0.5"]
    assert last.progress.metrics == {"loss": 0.5}
    assert process().adopt() == started, "until the result is kept"
    last.drop_note()
    assert process().adopt() is None


@pytest.mark.parametrize(
    ("status", "kind", "words", "retryable"),
    [
        (
            JobStatus(JobState.FAILED, RankFailure(1, "n2", 41, "exited with code 41")),
            JobFailed,
            "rank 1 of 2 on n2 exited with code 41",
            True,
        ),
        (JobStatus(JobState.LOST, reason="Slurm ended it."), JobLost, "Slurm ended it.", True),
        (
            JobStatus(JobState.FAILED, reason="It never starts.", permanent=True),
            JobLost,
            "It never starts.",
            False,
        ),
        (JobStatus(JobState.LOST), JobLost, "none failed by itself", True),
    ],
)
def test_a_bad_end_is_explained_and_forgotten(
    job, process, tmp_path, status, kind, words, retryable
):
    started = process().submit(job().spec, tmp_path / "progress")
    last = process()
    with pytest.raises(kind, match=words) as caught:
        last.finish(started, status)
    assert caught.value.retryable is retryable
    assert process().adopt() is None


GRAPH_ERROR = """\
Epoch 2/4
W0000 00:00:1795371129.727467   17269 local_rendezvous.cc:412] Local rendezvous is aborting with \
status: INVALID_ARGUMENT: Barrier: give all ranks as many steps.
\t [[{{function_node __inference_one_step_on_data_847}}{{node ddl_gradients_0}}]]
Traceback (most recent call last):
  File "/run/code/train.py", line 16, in <module>
    model.fit(x, y)
InvalidArgumentError: Graph execution error:

Detected at node ddl_gradients_0 defined at (most recent call last):
  File "/run/code/train.py", line 16, in <module>

  File "/lib/keras/src/backend/tensorflow/trainer.py", line 399, in fit

Barrier: give all ranks as many steps.
\t [[{{node ddl_gradients_0}}]] [Op:__inference_multi_step_on_iterator_883]
"""


@pytest.mark.parametrize("failed", [0, 1])
def test_the_trace_of_a_graph_does_not_bury_what_a_person_needs(job, said, failed):
    codes = [0, 0]
    codes[failed] = 1
    one = job(nodes=2, launcher=FakeLauncher(codes, GRAPH_ERROR))
    with pytest.raises(JobFailed):
        RunningJob(one.launcher, LOG).run(one.spec)
    for who in {"rank 0", f"rank-{failed}"} - {"rank-0"}:
        shown = [line.removeprefix(f"{who} | ") for line in said() if line.startswith(f"{who} | ")]
        path = one.spec.log_dir / f"rank-{failed if who == f'rank-{failed}' else 0}.log"
        assert shown == [
            "Epoch 2/4",
            "Traceback (most recent call last):",
            '  File "/run/code/train.py", line 16, in <module>',
            "    model.fit(x, y)",
            "InvalidArgumentError: Graph execution error:",
            "",
            f"… TensorFlow's trace of the graph is in {path}",
            "Barrier: give all ranks as many steps.",
        ]


@pytest.mark.parametrize("content", ["", "{}", '{"handle": 1}'])
def test_a_note_that_names_no_job_says_what_to_do(tmp_path, content):
    """Empty: the host has crashed before it was on disk."""
    note = tmp_path / "run" / "job.json"
    note.parent.mkdir()
    note.write_text(content)
    with pytest.raises(LaunchError, match="End what runs of it, and delete the file") as raised:
        kept_job(note)
    assert str(note) in str(raised.value) and not raised.value.retryable


@pytest.fixture
def unattended(job, cluster, tmp_path):
    """The job of a task for which nobody has waited for long, as it is noted."""
    path = tmp_path / "cancellations" / "1.json"
    started = StartedJob(cluster.submit(cluster.render(job().spec)), 1.0, cancellation=path)
    note_cancellation(started, {"dag_id": "digits", "run_id": "r"})
    os.utime(path, (0, 0))
    return started


def test_airflow_that_does_not_say_whether_a_run_is_open_counts_for_no_failure(
    unattended, cluster, job, said
):
    """Its being away once, and the scheduler's a month later, ended all attempts."""

    def away(*_):
        raise RuntimeError("API is away")

    folder = unattended.cancellation.parent
    other = cluster.submit(cluster.render(replace(job().spec, job_id="unit/other")))
    note_cancellation(StartedJob(other, 1.0, cancellation=folder / "2.json"))
    assert list(cancel_all_noted(folder, away)) == ["fake-scheduler job 2 (unit/other)"]
    assert list(folder.iterdir()) == [unattended.cancellation]
    (line,) = said()
    assert "job 1 (unit/train-1) stays noted" in line and "API is away" in line


def test_a_job_that_is_told_to_run_on_meanwhile_is_not_cancelled(unattended, cluster):
    is_open = lambda *_: bool(drop_conditional(unattended))  # noqa: E731
    assert list(cancel_all_noted(unattended.cancellation.parent, is_open)) == []
    assert cluster.state(1) == "pending"
