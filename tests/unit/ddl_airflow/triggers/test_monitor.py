"""One question for the jobs of all triggers, and threads that a scheduler cannot keep busy."""

from __future__ import annotations

import asyncio
import os
import shlex
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ddl_airflow.core.errors import LaunchError
from ddl_airflow.core.job import JobHandle, StartedJob
from ddl_airflow.triggers.job import JobTrigger
from ddl_airflow.triggers.monitor import cancelling, monitor_of
from tests.limits import within

JOBS = 500


class Scheduler:
    """Says of each job how often it was asked for it, unless it is told to wait or to fail."""

    kind = "asked"

    def __init__(self) -> None:
        self.questions: list[list[int]] = []
        self.answers = threading.Event()
        self.answers.set()
        self.fails = 0

    def render(self, job): ...
    def submit(self, submission): ...
    def status(self, handle): ...
    def log(self, handle, rank): ...
    def expected(self, job): ...
    def find(self, handle): ...
    def conclude(self, handle, told): ...

    def cancel(self, handle, grace_s):
        return handle.number

    def ask(self, handles):
        self.questions.append([handle.number for handle in handles])
        assert self.answers.wait(20)
        if len(self.questions) <= self.fails:
            raise LaunchError("connect failure.")
        return [{"number": str(handle.number)} for handle in handles]


def handle_of(number: int, folder: Path = Path("/nowhere")) -> JobHandle:
    return JobHandle("slurm", f"digits/train-{number}", number, 1, folder / "r", folder / "l")


def test_many_that_wait_are_one_question_per_interval():
    scheduler = Scheduler()

    async def look():
        watch = monitor_of(scheduler, handle_of(1))
        for _ in range(3):
            told = await asyncio.gather(*(watch.told(handle_of(n), 0.2) for n in range(JOBS)))
            assert [one["number"] for one in told] == [str(n) for n in range(JOBS)]

    begun = time.monotonic()
    asyncio.run(look())
    assert [len(asked) for asked in scheduler.questions] == [JOBS] * 3
    assert time.monotonic() - begun >= 0.4


def test_a_question_that_fails_is_everybodys_and_the_next_one_is_asked():
    scheduler = Scheduler()
    scheduler.fails = 1

    async def look():
        watch = monitor_of(scheduler, handle_of(1))
        first = await asyncio.gather(
            *(watch.told(handle_of(n), 0.01) for n in range(3)), return_exceptions=True
        )
        assert [type(error) for error in first] == [LaunchError] * 3
        assert (await watch.told(handle_of(1), 0.01))["number"] == "1"

    asyncio.run(look())


def test_a_user_whose_jobs_cannot_be_asked_for_blinds_nobody_else():
    """As where a rule of sudo was replaced: those of ``run_ranks_as`` before are asked for too."""

    class Denies(Scheduler):
        def ask(self, handles):
            if any(handle.user == "gone" for handle in handles):
                raise LaunchError("sudo: a password is required")
            return super().ask(handles)

    async def look():
        watch = monitor_of(Denies(), handle_of(1))
        jobs = [replace(handle_of(n), user=user) for n, user in enumerate(("", "gone", "trainer"))]
        told = await asyncio.gather(
            *(watch.told(one, 0.01) for one in jobs), return_exceptions=True
        )
        assert [told[0], told[2]] == [{"number": "0"}, {"number": "2"}]
        assert "a password is required" in str(told[1])

    asyncio.run(look())


def test_a_scheduler_that_hangs_keeps_neither_cancellations_nor_others_waiting():
    scheduler = Scheduler()
    scheduler.answers.clear()

    async def look():
        looking = [
            asyncio.create_task(monitor_of(scheduler, handle_of(n)).told(handle_of(n), 0))
            for n in range(50)
        ]
        while not scheduler.questions:
            await asyncio.sleep(0.01)
        for n in range(20):
            assert await cancelling("asked", scheduler.cancel, handle_of(n), 0.0) == n
        # Those of all other triggers of the triggerer.
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 0) for _ in range(50)))
        assert not any(task.done() for task in looking)
        scheduler.answers.set()
        await asyncio.gather(*looking)

    asyncio.run(asyncio.wait_for(look(), within(20)))


def test_a_cluster_that_hangs_keeps_no_other_waiting():
    """As one whose credentials somebody is asked for: the jobs of all clusters were not seen."""
    answers = threading.Event()

    class Hangs(Scheduler):
        def ask(self, handles):
            if any(handle.place == "away" for handle in handles):
                assert answers.wait(within(20))
            return super().ask(handles)

    async def look():
        away, here = (replace(handle_of(1), place=place) for place in ("away", "here"))
        looking = asyncio.create_task(monitor_of(Hangs(), away).told(away, 0))
        for _ in range(3):
            await monitor_of(Hangs(), here).told(here, 0.01)
        assert not looking.done()
        answers.set()
        await looking

    try:
        asyncio.run(asyncio.wait_for(look(), within(10)))
    finally:
        answers.set()


def test_nobody_is_asked_for_who_has_gone():
    scheduler = Scheduler()

    async def look():
        watch = monitor_of(scheduler, handle_of(1))
        await watch.told(handle_of(1), 0.1)
        gone = asyncio.create_task(watch.told(handle_of(2), 0.1))
        await asyncio.sleep(0)
        gone.cancel()
        await watch.told(handle_of(3), 0.1)

    asyncio.run(look())
    assert scheduler.questions == [[1], [3]]


@pytest.fixture
def counted(tmp_path, monkeypatch):
    """counted(name): how often a command of Slurm was started; squeue knows all jobs."""
    folder, count = tmp_path / "bin", tmp_path / "count"
    folder.mkdir()
    for name in ("squeue", "scontrol", "sacct"):
        script = f"#!/bin/sh\necho {name} >> {shlex.quote(str(count))}\n"
        if name == "squeue":
            script += (
                f'while read line; do echo "$line"; done < {shlex.quote(str(tmp_path))}/jobs\n'
            )
        (folder / name).write_text(script)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return lambda name: count.read_text().split().count(name) if count.exists() else 0


def test_hundreds_of_slurm_jobs_start_one_process_per_look(tmp_path, counted):
    times = "2026-11-21T17:27:44|2026-11-21T18:28:45|0:05"
    line = f"{{0}}|{{1}}|None|n1|{times}|gpu|1|1|digits/train-{{0}}|/code\x1e\n".replace(
        "|", "\x1f"
    )

    def answer(state):
        jobs = ((n, state) for n in range(1, JOBS + 1))
        return "".join(line.format(*job) for job in (("JOBID", "STATE"), *jobs))

    (tmp_path / "jobs").write_text(answer("RUNNING"))
    triggers = []
    for number in range(1, JOBS + 1):
        handle = handle_of(number, tmp_path / str(number))
        os.makedirs(handle.record_dir)
        started = StartedJob(handle, time.time(), {}, (tmp_path / str(number) / "progress", 0))
        triggers.append(JobTrigger(started.dump(), interval_s=0.5))

    async def wait():
        ends = [asyncio.create_task(anext(trigger.run())) for trigger in triggers]
        while counted("squeue") < 3:
            await asyncio.sleep(0.05)
        (tmp_path / "new").write_text(answer("CANCELLED"))
        (tmp_path / "new").rename(tmp_path / "jobs")
        return await asyncio.gather(*ends)

    events = asyncio.run(asyncio.wait_for(wait(), within(60)))
    assert len(events) == JOBS
    assert all("somebody cancelled it" in e.payload["status"]["reason"] for e in events)
    assert 3 <= counted("squeue") <= JOBS / 10
    assert counted("scontrol") == counted("sacct") == 0
