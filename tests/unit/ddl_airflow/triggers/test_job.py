"""What the trigger of a scheduler's job does, over a scheduler that says what it is told."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from contextlib import suppress
from importlib import import_module

import pytest

from ddl_airflow.core.errors import LaunchError
from ddl_airflow.core.job import JobState, JobStatus, StartedJob
from ddl_airflow.launchers.fake import FakeScheduler
from ddl_airflow.triggers.job import JobTrigger


@pytest.fixture
def said(capsys):
    """said(): what was logged since the last time."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def triggered(cluster, job, tmp_path):
    """triggered(**settings): a trigger, as it comes out of Airflow's database, of job 1."""
    submission = cluster.render(job().spec)
    started = StartedJob(cluster.submit(submission), time.time(), {}, (tmp_path / "progress", 0))

    def make(**settings):
        path, arguments = JobTrigger(started.dump(), interval_s=0.01, **settings).serialize()
        module, _, name = path.rpartition(".")
        arguments = json.loads(json.dumps(arguments))
        return getattr(import_module(module), name)(**arguments)

    make.started = started
    return make


def events(trigger, *changes):
    """What the trigger yields; each change is made after another look of it."""

    async def collect():
        async def change():
            for one in changes:
                await asyncio.sleep(0.1)
                one()

        changing = asyncio.create_task(change())
        found = [event.payload async for event in trigger.run()]
        await changing
        return found

    return asyncio.run(asyncio.wait_for(collect(), 20))


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
    assert triggered.started.watched
    log = said()
    assert "fake-scheduler job 1: on n1" in log and "progress | step 7" in log


def test_a_triggerer_that_starts_again_sees_what_ended_meanwhile(triggered, cluster):
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(anext(triggered().run()), 0.1))
    cluster.set(1, "succeeded")
    assert len(events(triggered())) == 1
    assert cluster.numbers() == [1]


def test_a_scheduler_that_is_away_is_outlasted(triggered, cluster, said, monkeypatch):
    looks, status = [], FakeScheduler.status

    def away(self, handle):
        looks.append(handle)
        if len(looks) < 5:
            raise LaunchError("connect failure.")
        return status(self, handle)

    monkeypatch.setattr(FakeScheduler, "status", away)
    cluster.set(1, "succeeded")
    assert len(events(triggered())) == 1
    assert said().count("connect failure. Asking again.") == 1


def test_a_job_that_takes_too_long_is_ended(triggered, cluster):
    cluster.set(1, "running")
    (event,) = events(triggered(timeout_s=0.3))
    assert event["timed_out"] is True
    assert cluster.status(triggered.started.handle).ended


def test_on_kill_cancels_the_job_and_an_end_of_the_triggerer_does_not(triggered, cluster, said):
    cluster.set(1, "running")
    with suppress(TimeoutError):
        asyncio.run(asyncio.wait_for(anext(triggered().run()), 0.1))
    asyncio.run(triggered().cleanup())
    assert not cluster.status(triggered.started.handle).ended
    asyncio.run(triggered().on_kill())
    assert cluster.status(triggered.started.handle).ended
    assert "cancelled fake-scheduler job 1" in said()


def test_a_triggerer_without_the_workspace_says_so(triggered):
    shutil.rmtree(triggered.started.handle.record_dir)
    with pytest.raises(LaunchError, match="watched: No such file.*must see the workspace"):
        events(triggered())


def test_a_job_that_would_wait_for_ever_is_taken_from_the_queue(triggered, cluster, monkeypatch):
    never = JobStatus(JobState.FAILED, reason="It never starts.", permanent=True)
    monkeypatch.setattr(FakeScheduler, "status", lambda self, handle: never)
    cancelled = []
    monkeypatch.setattr(FakeScheduler, "cancel", lambda self, *words: cancelled.append(words[0]))
    (event,) = events(triggered())
    assert JobStatus.load(event["status"]) == never
    assert cancelled == [triggered.started.handle]
