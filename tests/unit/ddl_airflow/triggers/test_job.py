"""What the trigger of a scheduler's job does, over a scheduler that says what it is told."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException, AirflowSecretsBackendAccessDenied
from structlog.contextvars import bound_contextvars

from ddl_airflow.airflow_internals import state_of_task
from ddl_airflow.core.cancellations import UNKNOWN_S, drop_conditional, note_cancellation
from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import LaunchError, SubmitFailed
from ddl_airflow.core.job import JobState, JobStatus, StartedJob
from ddl_airflow.core.progress import Tail
from ddl_airflow.launchers.kubernetes.api import Refused
from ddl_airflow.triggers.job import _ENDING, JobTrigger
from tests.limits import within
from tests.unit.ddl_airflow.conftest import FakeScheduler


@pytest.fixture
def said(capsys):
    """said(): what was logged since the last time."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def triggered(cluster, job, tmp_path, monkeypatch):
    """triggered(**settings): a trigger, as it comes out of Airflow's database, of job 1."""
    submission = cluster.render(job().spec)
    reports, note = (tmp_path / "progress", 0), tmp_path / "kept" / "try-1.watched"
    note.parent.mkdir()
    noted = tmp_path / "cancellations" / "1.json"
    started = StartedJob(cluster.submit(submission), time.time(), {}, reports, note, noted)
    monkeypatch.setattr("ddl_airflow.triggers.job._LOOKED", {})

    def make(**settings):
        path, arguments = JobTrigger(started.dump(), interval_s=0.01, **settings).serialize()
        module, _, name = path.rpartition(".")
        arguments = json.loads(json.dumps(arguments))
        return getattr(import_module(module), name)(**arguments)

    make.started = started
    return make


def events(trigger, *changes):
    """What the trigger yields; each change is made after another look of it has ended."""
    looks, look = [], trigger._look

    async def counted(*words):
        status = await look(*words)
        looks.append(status)
        return status

    trigger._look = counted

    async def collect():
        async def change():
            for one in changes:
                begun = len(looks) + 1  # one may be under way, and have read what was before
                while len(looks) <= begun:
                    await asyncio.sleep(0.01)
                one()

        changing = asyncio.create_task(change())
        found = [event.payload async for event in trigger.run()]
        await changing
        return found

    return asyncio.run(asyncio.wait_for(collect(), within(20)))


def test_it_fires_once_when_the_job_has_ended(triggered, cluster, tmp_path, said):
    report = json.dumps({"t": 1.0, "source": "script", "step": 7}) + "\n"
    changes = (
        lambda: cluster.set(1, "running", reason="on n1"),
        lambda: (tmp_path / "progress").write_text(report),
        lambda: cluster.set(1, "succeeded"),
    )
    (event,) = events(triggered(), *changes)
    assert StartedJob.load(event["job"]) == triggered.started
    assert JobStatus.load(event["status"]).state is JobState.SUCCEEDED
    assert event["timed_out"] is False
    assert triggered.started.monitored
    log = said()
    assert "fake-scheduler job 1: on n1" in log and "progress | step 7" in log


def test_how_a_job_goes_is_in_the_log_of_its_task(triggered, cluster, tmp_path, said):
    """A triggerer knows by its context which task's log a line is for: ``run_trigger``."""

    def end():
        # What it says in a thread of the workspace's, and no progress but a link.
        (tmp_path / "progress").unlink()
        (tmp_path / "progress").symlink_to(tmp_path / "elsewhere")

    report = json.dumps({"t": 1.0, "source": "script", "step": 7}) + "\n"
    changes = (
        lambda: (tmp_path / "progress").write_text(report),
        end,
        lambda: cluster.set(1, "succeeded"),
    )
    with bound_contextvars(trigger_id=4711):
        events(triggered(), *changes)
    lines = [line for line in said().splitlines() if "progress" in line]
    assert len(lines) == 2
    assert all("trigger_id=4711" in line for line in lines), lines


def test_a_triggerer_that_starts_again_sees_what_ended_meanwhile(triggered, cluster):
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(anext(triggered().run()), 0.1))
    cluster.set(1, "succeeded")
    assert len(events(triggered())) == 1
    assert cluster.numbers() == [1]


def test_a_triggerer_that_starts_again_does_not_read_all_that_its_jobs_have_told(
    triggered, cluster, tmp_path, said, monkeypatch
):
    monkeypatch.setattr("ddl_airflow.triggers.job._MOST_TOLD", 4096, raising=False)
    lines = [{"t": 1.0 + step, "source": "script", "step": step} for step in range(1, 2000)]
    lines[0]["steps"] = 2000
    (tmp_path / "progress").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trigger = triggered()
    feed, told = trigger._progress.feed, []
    trigger._progress.feed = lambda text: told.append(len(text)) or feed(text)
    events(trigger, lambda: None, lambda: cluster.set(1, "succeeded"))
    assert "progress | step 1999/2000" in said()
    assert sum(told) <= 2 * 4096


def test_of_a_job_that_ended_meanwhile_the_last_step_is_said(
    triggered, cluster, tmp_path, said, monkeypatch
):
    monkeypatch.setattr("ddl_airflow.triggers.job._MOST_TOLD", 4096)
    lines = (json.dumps({"t": 1.0, "source": "script", "step": step}) for step in range(2000))
    (tmp_path / "progress").write_text("".join(f"{line}\n" for line in lines))
    cluster.set(1, "succeeded")
    events(triggered())
    assert re.findall(r"progress \| step (\d+)", said()) == ["1999"]


UNFORESEEN = KeyError("items")
REFUSED = Refused(403, "Forbidden", "jobs.batch is forbidden")


def failing(calls, times, call, error=UNFORESEEN, *, well=0):
    """The call, which is well so many times, and after that fails so many."""

    def fails(*words):
        calls.append(words)
        if well < len(calls) <= well + times:
            raise error
        return call(*words)

    return fails


@pytest.mark.parametrize(
    ("error", "well", "words"),
    [
        (LaunchError("connect failure."), 0, "connect failure."),
        # As Kubernetes' API server while roles are applied anew, of what it answered before.
        (REFUSED, 1, "Kubernetes' API server: jobs.batch is forbidden."),
        # Airflow gives up a job whose trigger has died, and one question is for many jobs.
        (UNFORESEEN, 0, "KeyError: 'items'"),
    ],
    ids=["away", "refuses", "unforeseen"],
)
def test_a_scheduler_that_fails_for_a_moment_is_outlasted(
    triggered, cluster, said, monkeypatch, error, well, words
):
    looks, status = [], FakeScheduler.status

    def ends(self, handle):
        if len(looks) > well:
            cluster.set(1, "succeeded")
        return status(self, handle)

    monkeypatch.setattr(FakeScheduler, "status", failing(looks, 4, ends, error, well=well))
    (event,) = events(triggered())
    assert JobStatus.load(event["status"]).state is JobState.SUCCEEDED
    assert len(looks) == well + 5 and said().count(f"{words} Asking again.") == 1


def test_a_triggerer_that_starts_again_outlasts_a_refusal(triggered, cluster, said, monkeypatch):
    """The job was given up, and ran on unwatched: its task fails without another try."""
    cluster.set(1, "running")
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(anext(triggered().run()), 0.1))
    cluster.set(1, "succeeded")
    monkeypatch.setattr(FakeScheduler, "status", failing([], 3, FakeScheduler.status, REFUSED))
    (event,) = events(triggered())
    assert "unseen" not in event
    assert JobStatus.load(event["status"]).state is JobState.SUCCEEDED
    assert "jobs.batch is forbidden. Asking again." in said()


@pytest.mark.parametrize(
    ("error", "well", "words"),
    [
        (REFUSED, 1, "Kubernetes' API server: jobs.batch is forbidden."),
        (
            UNFORESEEN,
            0,
            "fake-scheduler job 1 cannot be watched: KeyError: 'items'. It goes on. The "
            "triggerer's log has all of it; clear the task when that is mended.",
        ),
    ],
    ids=["refuses", "unforeseen"],
)
def test_a_scheduler_that_goes_on_failing_leaves_the_job_to_the_next_try(
    triggered, cluster, monkeypatch, error, well, words
):
    monkeypatch.setattr("ddl_airflow.triggers.job._PASSES_S", 0.1)
    looks, status = [], FakeScheduler.status
    monkeypatch.setattr(FakeScheduler, "status", failing(looks, 10**6, status, error, well=well))
    (event,) = events(triggered())
    assert event["unseen"] == words
    assert len(looks) > well + 1 and cluster.state(1) == "pending"


def test_a_job_that_takes_too_long_is_ended(triggered, cluster):
    cluster.set(1, "running")
    (event,) = events(triggered(timeout_s=0.3))
    assert event["timed_out"] is True
    assert cluster.status(triggered.started.handle).ended


def test_the_end_of_a_job_that_took_too_long_is_waited_for(triggered, cluster, monkeypatch):
    cluster.set(1, "running")
    looks, status = [], FakeScheduler.status

    def ending(self, handle):
        found = status(self, handle)
        looks.append(found.ended)
        return found if looks.count(True) > 2 else JobStatus(JobState.RUNNING)

    monkeypatch.setattr(FakeScheduler, "status", ending)
    (event,) = events(triggered(timeout_s=0.0))
    assert (event["timed_out"], JobStatus.load(event["status"]).state) == (True, JobState.LOST)
    assert looks.count(True) == 3


def test_a_job_that_took_too_long_has_the_time_to_save_that_its_launcher_leaves_it(
    triggered, cluster, monkeypatch
):
    looks = []

    def saves(self, handle):
        looks.append(handle)
        return JobStatus(JobState.LOST if len(looks) > 5 else JobState.RUNNING)

    monkeypatch.setattr("ddl_airflow.triggers.job.END_S", 0.0)
    monkeypatch.setattr(FakeScheduler, "status", saves)
    started = triggered.started
    patient = replace(started, handle=replace(started.handle, grace_s=60.0))
    events(JobTrigger(patient.dump(), interval_s=0.01, timeout_s=0.0))
    assert len(looks) == 6


def test_a_job_that_took_too_long_and_never_ends_is_not_waited_for_for_ever(
    triggered, cluster, monkeypatch
):
    monkeypatch.setattr("ddl_airflow.triggers.job.END_S", 0.2)
    monkeypatch.setattr(FakeScheduler, "cancel", lambda *words: None)
    cluster.set(1, "running")
    (event,) = events(triggered(timeout_s=0.0))
    assert (event["timed_out"], JobStatus.load(event["status"]).state) == (True, JobState.LOST)


def test_a_file_system_that_is_away_is_outlasted(triggered, cluster, tmp_path, said, monkeypatch):
    gone, fails = (
        OSError(errno.ESTALE, "Stale file handle"),
        {"status": 2, "mark_monitored": 2, "read": 3},
    )

    def failing(owner, name):
        once = getattr(owner, name)

        def call(*words, **more):
            fails[name] -= 1
            if fails[name] >= 0:
                raise gone
            return once(*words, **more)

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((FakeScheduler, "status"), (StartedJob, "mark_monitored"), (Tail, "read")):
        failing(owner, name)
    cluster.set(1, "running")
    events(triggered(), lambda: None, lambda: cluster.set(1, "succeeded"))
    assert max(fails.values()) < 0
    assert triggered.started.monitored
    log = said()
    assert log.count("Stale file handle Asking again.") == 1
    assert log.count("progress.jsonl: [Errno 116] Stale file handle") == 1


@pytest.fixture
def deferred_as(monkeypatch):
    """deferred_as(state): Airflow says that the task is in that state; None: that it has no run."""
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import TaskStatesResult

    def answer(state):
        states = {"run": {"train": state}} if state else {}
        told = SimpleNamespace(send=lambda asked: TaskStatesResult(task_states=states))
        monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", told, raising=False)
        return SimpleNamespace(dag_id="dag", task_id="train", run_id="run", map_index=-1)

    return answer


@pytest.mark.parametrize("state", ["failed", "success", "scheduled", "running", None])
def test_on_kill_cancels_the_job_and_an_end_of_the_triggerer_does_not(
    triggered, cluster, said, deferred_as, state
):
    cluster.set(1, "running")
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(anext(triggered().run()), 0.1))
    asyncio.run(triggered().cleanup())
    assert not cluster.status(triggered.started.handle).ended
    trigger = triggered()
    trigger._task_instance = deferred_as(state)
    asyncio.run(trigger.on_kill())
    assert cluster.status(triggered.started.handle).ended
    assert "cancelled fake-scheduler job 1" in said()


@pytest.mark.parametrize("fails", ["the task's state", "the cancelling"])
def test_on_kill_asks_again_where_that_fails(triggered, cluster, deferred_as, monkeypatch, fails):
    """Airflow only says that it raised, and does not call it again."""
    monkeypatch.setattr("ddl_airflow.triggers.job._AGAIN_S", 0.01)
    cluster.set(1, "running")
    trigger = triggered()
    trigger._task_instance = deferred_as("failed")
    calls = []
    if fails == "the cancelling":
        monkeypatch.setattr(FakeScheduler, "cancel", failing(calls, 2, FakeScheduler.cancel))
    else:
        state = failing(calls, 2, state_of_task)
        monkeypatch.setattr("ddl_airflow.triggers.job.state_of_task", state)
    asyncio.run(asyncio.wait_for(trigger.on_kill(), within(20)))
    assert len(calls) == 3
    assert cluster.status(triggered.started.handle).ended


def test_on_kill_that_is_itself_cancelled_ends_the_job_all_the_same(
    triggered, cluster, deferred_as
):
    cluster.set(1, "running")
    trigger = triggered()
    trigger._task_instance = deferred_as("failed")

    async def cancelled_again():
        killing = asyncio.create_task(trigger.on_kill())
        await asyncio.sleep(0)  # until it has begun
        killing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killing
        await asyncio.gather(*_ENDING)

    asyncio.run(cancelled_again())
    assert cluster.status(triggered.started.handle).ended


@pytest.fixture
def another(triggered, cluster, job, tmp_path):
    """another(): the trigger of job 2, which another task waits for."""
    spec = replace(job().spec, job_id="other/train-1")
    handle = cluster.submit(cluster.render(spec))
    path = tmp_path / "cancellations" / "2.json"
    started = StartedJob(handle, time.time(), {}, None, None, path)
    return lambda: JobTrigger(started.dump(), interval_s=0.01)


def test_a_job_that_could_not_be_cancelled_is_after_the_triggerer_has_started_again(
    triggered, another, cluster, said, deferred_as, monkeypatch
):
    """Its task has ended, so it has no trigger any more: it ran on."""
    monkeypatch.setattr("ddl_airflow.triggers.job._AGAIN_S", 0.01)
    cluster.set(1, "running")
    trigger = triggered()
    trigger._task_instance = deferred_as("failed")
    cancel = FakeScheduler.cancel

    def away(*words):
        raise LaunchError("the controller is away")

    monkeypatch.setattr(FakeScheduler, "cancel", away)
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(trigger.on_kill(), 0.5))
    assert cluster.state(1) == "running" and "cannot cancel" in said()
    monkeypatch.setattr(FakeScheduler, "cancel", cancel)
    # What a restarted triggerer runs.
    events(another(), *[lambda: None] * 5, lambda: cluster.set(2, "succeeded"))
    assert cluster.state(1) == "lost"
    assert "cancelled fake-scheduler job 1 (unit/train-1), as was noted" in said()
    assert not triggered.started.cancellation.exists()


def test_a_scheduler_that_is_away_when_the_triggerer_starts_is_asked_again(
    triggered, another, cluster, monkeypatch, said
):
    monkeypatch.setattr("ddl_airflow.triggers.job._NOTED_S", 0.01)
    cluster.set(1, "running")
    note_cancellation(triggered.started)
    (triggered.started.cancellation.parent / "odd.json").write_text("{}")
    calls = []
    monkeypatch.setattr(
        FakeScheduler,
        "cancel",
        failing(calls, 2, FakeScheduler.cancel, LaunchError("connect failure.")),
    )
    changes = [lambda: None] * 40
    events(another(), *changes, lambda: cluster.set(2, "succeeded"))
    assert (len(calls), cluster.state(1)) == (3, "lost")
    noted = triggered.started.cancellation
    words = f"(unit/train-1) cannot be cancelled yet, as {noted} notes: connect failure."
    assert said().count(words) == 1


def test_a_workspace_that_hangs_keeps_no_job_from_being_cancelled(
    triggered, cluster, deferred_as, monkeypatch
):
    monkeypatch.setattr("ddl_airflow.triggers.job._NOTING_S", 0.1)
    back = threading.Event()
    monkeypatch.setattr("ddl_airflow.triggers.job.note_cancellation", lambda *_: back.wait(30))
    cluster.set(1, "running")
    trigger = triggered()
    trigger._task_instance = deferred_as("failed")

    async def kill() -> None:
        killing = asyncio.ensure_future(trigger.on_kill())
        while cluster.state(1) != "lost":
            await asyncio.sleep(0.01)
        back.set()
        await killing

    asyncio.run(asyncio.wait_for(kill(), within(20)))


TASK = {"dag_id": "dag", "task_id": "train", "run_id": "run", "map_index": -1}


@pytest.mark.parametrize(
    ("state", "age_s", "ended"),
    [
        ("failed", 0, True),
        ("success", 0, True),
        ("deferred", 2 * UNKNOWN_S, False),
        ("running", 2 * UNKNOWN_S, False),
        (None, 2 * UNKNOWN_S, True),  # its run was deleted
        # Perhaps of another Airflow, of which no triggerer has run over the weekend.
        (None, 3 * 86400, False),
    ],
)
@pytest.mark.parametrize("watched", [True, False])
def test_the_job_of_a_task_that_has_ended_unseen_is_cancelled(
    triggered, another, cluster, deferred_as, watched, state, age_s, ended
):
    """A person ended it just before it could defer, or while no triggerer ran: Airflow tells it to
    nobody.
    """
    cluster.set(1, "running")
    deferred_as(state)
    note_cancellation(triggered.started, TASK)
    if watched:
        with suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(anext(triggered().run()), 0.1))
    assert triggered.started.monitored is watched
    ago = time.time() - age_s
    os.utime(triggered.started.cancellation, (ago, ago))
    with pytest.MonkeyPatch.context() as starts:  # another triggerer
        starts.setattr("ddl_airflow.triggers.job._LOOKED", {})
        events(another(), *[lambda: None] * 5, lambda: cluster.set(2, "succeeded"))
    assert cluster.state(1) == ("lost" if ended else "running")
    assert triggered.started.cancellation.exists() is not ended


def test_what_a_trigger_here_waits_for_is_not_asked_for_and_stays_noted(
    triggered, cluster, monkeypatch
):
    asked = []
    monkeypatch.setattr("ddl_airflow.triggers.job.state_of_task", asked.append)
    note_cancellation(triggered.started, TASK)
    path = triggered.started.cancellation
    os.utime(path, (0, 0))
    events(triggered(), *[lambda: None] * 5, lambda: cluster.set(1, "succeeded"))
    assert time.time() - path.stat().st_mtime < within(60)
    assert asked == []


def test_a_job_that_is_told_to_run_on_while_another_is_cancelled_does(
    triggered, another, cluster, job, deferred_as, monkeypatch
):
    """A scheduler took long for the first, and what was noted of the second was read before."""
    deferred_as("failed")  # as a task is whose triggerer did not see its job
    handle = cluster.submit(cluster.render(replace(job().spec, job_id="unit/third")))
    path = triggered.started.cancellation.with_name("3.json")
    third = StartedJob(handle, time.time(), cancellation=path)
    note_cancellation(triggered.started)
    note_cancellation(third, TASK)
    cancel = FakeScheduler.cancel

    def takes_long(self, handle, grace_s):
        drop_conditional(third)
        cancel(self, handle, grace_s)

    monkeypatch.setattr(FakeScheduler, "cancel", takes_long)
    events(another(), *[lambda: None] * 5, lambda: cluster.set(2, "succeeded"))
    assert (cluster.state(1), cluster.state(3)) == ("lost", "pending")


@pytest.mark.parametrize("again", [False, True])
def test_a_job_that_can_never_be_cancelled_is_said_once_and_not_for_ever(
    triggered, another, cluster, monkeypatch, said, again
):
    """Each triggerer that started said it once more, and the note stayed."""

    def gone(*words):
        raise LaunchError("no user trainer is known on this host", retryable=False)

    monkeypatch.setattr(FakeScheduler, "cancel", gone)
    cluster.set(1, "running")
    note_cancellation(triggered.started)
    told = ""
    for number in (1, 2):
        with monkeypatch.context() as starts:
            starts.setattr("ddl_airflow.triggers.job._LOOKED", {})
            cluster.set(2, "running") if number == 2 else None
            events(another(), *[lambda: None] * 5, lambda: cluster.set(2, "succeeded"))
        told += said()
        if again and number == 1:
            for mark in triggered.started.cancellation.parent.glob("*.said"):
                os.utime(mark, (0, 0))
    path = triggered.started.cancellation
    assert told.count("(unit/train-1) cannot be cancelled yet") == 1
    assert told.count("could not be cancelled for 30 days, and nobody tries any more") == again
    assert path.exists() is not again
    assert len(list(path.parent.iterdir())) == (0 if again else 2)


def test_on_kill_in_a_triggerer_that_slept_leaves_the_job_to_another(
    triggered, cluster, said, deferred_as
):
    cluster.set(1, "running")
    trigger = triggered()
    trigger._task_instance = deferred_as("deferred")
    asyncio.run(trigger.on_kill())
    assert cluster.state(1) == "running"
    assert "fake-scheduler job 1 goes on: another triggerer waits for it" in said()


def test_a_triggerer_without_the_workspace_says_so(triggered, cluster):
    shutil.rmtree(triggered.started.note.parent)
    (event,) = events(triggered())
    assert "watched: No such file" in event["unseen"]
    assert "must see the workspace" in event["unseen"]
    assert cluster.state(1) == "pending"


def test_a_triggerer_without_the_schedulers_commands_says_so(triggered, cluster, monkeypatch):
    def absent(self, handle):
        raise SubmitFailed("scontrol is not on PATH of this host.", retryable=False)

    monkeypatch.setattr(FakeScheduler, "status", absent)
    (event,) = events(triggered())
    assert event == {
        "job": triggered.started.dump(),
        "unseen": "scontrol is not on PATH of this host.",
    }
    assert cluster.state(1) == "pending"


@pytest.mark.parametrize("left", [{"permanent": True}, {"waits": True}], ids=str)
def test_a_job_that_would_wait_for_ever_is_taken_from_the_queue(
    triggered, cluster, monkeypatch, left
):
    never = JobStatus(JobState.FAILED, reason="It does not start.", **left)
    monkeypatch.setattr(FakeScheduler, "status", lambda self, handle: never)
    cancelled = []
    monkeypatch.setattr(FakeScheduler, "cancel", lambda self, *words: cancelled.append(words[0]))
    (event,) = events(triggered())
    assert JobStatus.load(event["status"]) == never
    assert cancelled == [triggered.started.handle]


@pytest.fixture
def connects(monkeypatch):
    """The scheduler is reached by the connection "my_cluster"; what it was at each question."""
    found = []
    ask = FakeScheduler.ask

    def asks(self, handles):
        found.append(self.found("my_cluster").login)
        return ask(self, handles)

    def find_connections(self, find):
        self.found = find

    monkeypatch.setattr(FakeScheduler, "ask", asks)
    monkeypatch.setattr(FakeScheduler, "find_connections", find_connections, raising=False)
    monkeypatch.setattr(FakeScheduler, "connection_of", lambda *_: "my_cluster", raising=False)
    monkeypatch.setattr("ddl_airflow.triggers.job._CONNECTIONS", {})
    return found


def test_airflow_is_asked_for_the_connection_by_which_a_job_is_reached(
    triggered, cluster, connects, monkeypatch
):
    told = {"conn_type": "kubernetes", "login": "trainer"}
    monkeypatch.setenv("AIRFLOW_CONN_MY_CLUSTER", json.dumps(told))
    cluster.set(1, "succeeded", "")
    (event,) = events(triggered())
    assert event["status"]["state"] == "succeeded"
    assert connects == ["trainer"]


def test_a_connection_that_airflow_had_is_kept_while_it_does_not_answer(
    triggered, cluster, connects, monkeypatch
):
    known = AirflowConnection("my_cluster", "kubernetes", login="trainer")
    monkeypatch.setattr("ddl_airflow.triggers.job._CONNECTIONS", {"my_cluster": (-1e9, known)})
    cluster.set(1, "succeeded", "")
    (event,) = events(triggered())
    assert event["status"]["state"] == "succeeded"
    assert connects == ["trainer"]


def test_a_connection_that_airflow_does_not_have_is_named(
    triggered, cluster, connects, said, monkeypatch
):
    monkeypatch.setattr("ddl_airflow.triggers.job._PASSES_S", 0.1)
    (event,) = events(triggered())
    words = "launcher.connection: Airflow has no connection 'my_cluster'"
    assert words in event["unseen"]
    assert said().count(words) == 1  # at once, and no more while it is waited for
    assert cluster.state(1) == "pending"


@pytest.fixture
def airflow_tells(monkeypatch):
    """airflow_tells(told): what it says of a connection, one after the other: or raises."""

    def will(*told):
        left = list(told)

        async def aget_connection(conn_id):
            if isinstance(one := left.pop(0) if len(left) > 1 else left[0], Exception):
                raise one
            return Connection(conn_id=conn_id, conn_type="kubernetes", login=one)

        monkeypatch.setattr("ddl_airflow.hooks.store.BaseHook.aget_connection", aget_connection)

    return will


AWAY = AirflowNotFoundException("The conn_id `my_cluster` isn't defined")
DENIED = AirflowSecretsBackendAccessDenied("Access denied for connection 'my_cluster'")


def test_a_connection_that_airflow_does_not_tell_for_a_moment_is_waited_for(
    triggered, cluster, connects, airflow_tells
):
    """Airflow says the same where its secrets backend, or its own API, is away."""
    airflow_tells(AWAY, AWAY, "trainer")
    cluster.set(1, "succeeded", "")
    (event,) = events(triggered())
    assert event["status"]["state"] == "succeeded"
    assert connects == ["trainer"]


def test_a_job_is_cancelled_when_airflow_tells_the_connection(
    triggered, cluster, connects, airflow_tells, deferred_as, monkeypatch
):
    monkeypatch.setattr("ddl_airflow.triggers.job._AGAIN_S", 0.01)
    airflow_tells(AWAY, "trainer")
    cluster.set(1, "running")
    trigger = triggered()
    trigger._task_instance = deferred_as("failed")
    asyncio.run(asyncio.wait_for(trigger.on_kill(), within(20)))
    assert cluster.state(1) not in ("pending", "running")


def test_a_connection_that_airflow_denies_is_named_at_once(
    triggered, cluster, connects, airflow_tells
):
    """It is a PermissionError, and was waited for as a file system is that is away: for ever."""
    airflow_tells(DENIED)
    (event,) = events(triggered())
    assert "launcher.connection: Airflow denies the connection 'my_cluster'" in event["unseen"]
    assert cluster.state(1) == "pending"


def test_a_connection_that_airflow_denies_later_is_waited_for_and_not_for_ever(
    triggered, cluster, connects, airflow_tells, monkeypatch
):
    monkeypatch.setattr("ddl_airflow.triggers.job._KNOWN_S", 0.0)
    monkeypatch.setattr("ddl_airflow.triggers.job._PASSES_S", 0.1)
    airflow_tells("trainer", DENIED)
    (event,) = events(triggered())
    assert "Airflow denies the connection" in event["unseen"]
    assert connects == ["trainer"]
