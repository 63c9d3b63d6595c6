from __future__ import annotations

import pytest

from ddl_airflow.core.job import JobState
from ddl_airflow.launchers.base import Scheduler
from ddl_airflow.launchers.fake import FakeLauncher


def test_success_by_default(job):
    one = job("python main.py --x 1", launcher=FakeLauncher()).start()
    assert one.status().state is JobState.SUCCEEDED
    (submission,) = one.launcher.submitted
    assert submission.argv == ("python", "main.py", "--x", "1")
    assert submission.job == one.spec


def test_output_is_in_every_log(job):
    one = job(launcher=FakeLauncher(output="hello\n"), nodes=3).start()
    assert [one.launcher.log(one.handle, n).read_text() for n in range(3)] == ["hello\n"] * 3


def test_a_failed_rank_is_named(job):
    one = job(launcher=FakeLauncher([0, 0, 7]), nodes=4).start()
    status = one.status()
    assert status.state is JobState.FAILED
    assert (status.failure.rank, status.failure.exit_code) == (2, 7)


@pytest.mark.parametrize("codes", [[None], [0, None], [None, None]])
def test_a_rank_without_a_word_is_no_success(job, codes):
    assert job(launcher=FakeLauncher(codes)).start().status().state is not JobState.SUCCEEDED


def test_cancel_is_remembered(job):
    one = job(launcher=FakeLauncher()).start()
    one.launcher.cancel(one.handle)
    assert one.launcher.cancelled == [one.handle]


def test_a_scheduler_is_told_from_other_launchers(cluster):
    assert isinstance(cluster, Scheduler)
    assert not isinstance(FakeLauncher(), Scheduler)
