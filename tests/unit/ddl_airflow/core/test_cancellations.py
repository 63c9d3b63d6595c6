from __future__ import annotations

import json
import logging
import os
import stat
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ddl_airflow.core.cancellations import (
    cancellation_file,
    cancellation_of,
    cancellations_in,
    drop_cancellation,
    keep_waiting,
    note_cancellation,
    say_undone,
)
from ddl_airflow.core.job import JobHandle, StartedJob
from ddl_airflow.core.layout import RunLayout, cancellations


def started_in(workspace, number=1):
    """A job with a note; below the workspace there need be nothing."""
    job_id = f"digits-1/train-{number}"
    place = RunLayout(workspace, "digits", "digits-1")
    handle = JobHandle("slurm", job_id, number, 1, place.records(number), place.logs)
    path = cancellation_file(cancellations(workspace), job_id)
    return StartedJob(handle, 1.0, {}, None, None, path)


@contextmanager
def acting(user, *groups):
    """This process, which is root's, is another user's meanwhile."""
    before, umask = os.getgroups(), os.umask(0o077)
    os.setgroups(groups)
    os.setegid(groups[0])
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(before)
        os.umask(umask)


def make_owned(folder, user, group, mode):
    """A folder of that user and group, whatever the umask."""
    folder.mkdir()
    os.chown(folder, user, group)
    folder.chmod(mode)


@pytest.fixture
def users(trainer):
    """A workspace, two users of Airflow's tasks, and the group in which both are."""
    return trainer.place / "workspace", (4001, 4002), 4000


@pytest.mark.parametrize("own", [(4001, 4000), (4001, 4001, 4000)], ids=["group", "further group"])
def test_tasks_of_several_users_of_a_group_note_and_cancel(users, trainer, own, caplog):
    """The folder was the first one's alone, and a note of the other was only warned of."""
    workspace, (first, second), group = users
    make_owned(workspace, 0, group, 0o2771)
    one, other = started_in(workspace, 1), started_in(workspace, 2)
    with acting(*own):
        note_cancellation(one)
    with acting(second, group):
        note_cancellation(other)
        assert [noted.started for noted in cancellations_in(one.cancellation.parent)] == (
            sorted([one, other], key=lambda job: str(job.cancellation))
        )
        note_cancellation(one, {"dag_id": "digits"})  # in place of the other's
        drop_cancellation(other)
    with acting(*own):
        assert cancellation_of(one).task == {"dag_id": "digits"}
        drop_cancellation(one)
    assert list(one.cancellation.parent.iterdir()) == []
    with trainer.acting(), pytest.raises(PermissionError):  # as which ranks run
        (one.cancellation.parent / "1.json").touch()
    assert caplog.messages == []


@pytest.mark.parametrize("left", [None, 0o755, 0o777, 0o2777])
def test_nobody_notes_in_a_workspace_that_is_closed_to_him(users, trainer, left):
    """Whatever the umask of an earlier version has made of the folder."""
    workspace, (first, _), group = users
    make_owned(workspace, first, group, 0o711)  # so that ranks come to their own
    one = started_in(workspace)
    if left is not None:
        make_owned(one.cancellation.parent, first, group, left)
    with acting(first, group):
        note_cancellation(one)
        assert cancellation_of(one).started == one
    assert stat.S_IMODE(one.cancellation.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(one.cancellation.stat().st_mode) == 0o600


def test_a_group_that_its_user_is_not_in_keeps_nobody_from_noting(users, caplog):
    workspace, (first, _), group = users
    make_owned(workspace, first, group, 0o770)
    one = started_in(workspace)
    with acting(first, first):
        note_cancellation(one)
        assert cancellation_of(one).started == one
    assert caplog.messages == []
    assert stat.S_IMODE(one.cancellation.parent.stat().st_mode) == 0o700


def test_what_ranks_may_have_noted_cancels_nothing(tmp_path, caplog):
    """In a folder that an earlier version has made under the umask 0, and that nobody came to."""
    one = started_in(tmp_path)
    note_cancellation(one)
    one.cancellation.parent.chmod(0o777)
    for _ in range(2):
        assert cancellations_in(one.cancellation.parent) == []
    (said,) = caplog.messages
    assert f"{one.cancellation.parent} is open to others" in said and "chmod o-w" in said


def test_a_folder_of_another_user_is_said_to_be_one(users, caplog):
    workspace, (first, second), group = users
    make_owned(workspace, first, group, 0o2770)
    one = started_in(workspace)
    make_owned(one.cancellation.parent, first, first, 0o755)
    with acting(second, group):
        note_cancellation(one)
    (said,) = caplog.messages
    assert "cannot be noted: " in said and "2770" in said and "have its owner" in said


@pytest.mark.parametrize("known", [True, False])
def test_a_note_that_cannot_be_read_is_said_once_with_its_job_and_not_for_ever(
    tmp_path, caplog, known
):
    """It was said each minute, by each triggerer, and did not say of which job it was."""
    one, other = started_in(tmp_path), started_in(tmp_path, 2)
    note_cancellation(other)
    one.cancellation.write_text('{"task": null}')
    if known:
        layout = RunLayout(tmp_path, "digits", "digits-1")
        layout.create()
        layout.scheduled_job.write_text(json.dumps(one.dump()))
    folder = one.cancellation.parent
    for _ in range(3):
        assert [noted.started for noted in cancellations_in(folder)] == [other]
    (said,) = caplog.messages
    assert f"{one.cancellation} does not say which job is to be cancelled" in said
    words = "It is of slurm job 1 (digits-1/train-1): cancel that"
    assert (words in said) is known
    for mark in folder.glob("*.said"):
        os.utime(mark, (0, 0))
    assert len(cancellations_in(folder)) == 1
    assert "could not be read for 30 days, and is removed" in caplog.messages[-1]
    assert [path.name for path in folder.iterdir()] == [other.cancellation.name]


def test_what_was_said_of_a_note_goes_with_it(tmp_path, caplog):
    one = started_in(tmp_path)
    for _ in range(2):
        note_cancellation(one)
        one.cancellation.write_text("{}")
        assert cancellation_of(one) is None
        drop_cancellation(one)
        assert list(one.cancellation.parent.iterdir()) == []
    assert len(caplog.messages) == 2


def test_what_was_said_of_a_job_that_somebody_waits_for_counts_no_more(tmp_path, caplog):
    """Airflow's database was away for a minute, a month before the scheduler was."""
    one = started_in(tmp_path)
    note_cancellation(one, {"dag_id": "digits"})
    noted = cancellation_of(one)
    say_undone(noted, "away", logging.getLogger())
    for mark in one.cancellation.parent.glob("*.said"):
        os.utime(mark, (0, 0))
    keep_waiting(one)
    say_undone(noted, "away", logging.getLogger())
    assert [" cannot be cancelled yet" in said for said in caplog.messages] == [True, True]
    assert cancellation_of(one) == noted


def test_a_dry_run_only_says_what_cannot_be_read(tmp_path, caplog):
    one = started_in(tmp_path)
    note_cancellation(one)
    noted = cancellation_of(one)
    for age_s in (0.0, 40 * 86400.0):
        one.cancellation.write_text("{}")
        if age_s:  # some have been said by others
            assert cancellations_in(one.cancellation.parent) == []
            ago = time.time() - age_s
            for mark in one.cancellation.parent.glob("*.said"):
                os.utime(mark, (ago, ago))
        before = {path: path.stat().st_mtime for path in one.cancellation.parent.iterdir()}
        caplog.clear()
        assert cancellations_in(one.cancellation.parent, dry_run=True) == []
        say_undone(noted, "away", logging.getLogger(), dry_run=True)
        assert {path: path.stat().st_mtime for path in one.cancellation.parent.iterdir()} == before
        assert len(caplog.messages) == 2


def test_a_folder_that_may_not_be_read_is_said(users, caplog):
    """It was as one without notes: no job was cancelled, and nobody knew."""
    workspace, (first, second), group = users
    workspace.mkdir()
    one = started_in(workspace)
    assert cancellations_in(one.cancellation.parent) == []
    assert caplog.messages == []
    one.cancellation.parent.mkdir(0o700)
    os.chown(one.cancellation.parent, first, first)
    with acting(second, group):
        for _ in range(2):
            assert cancellations_in(one.cancellation.parent) == []
    (said,) = caplog.messages
    assert "cannot be listed: which jobs are to be cancelled?" in said and "Permission" in said


def test_a_job_without_a_note_is_none(tmp_path):
    alone = replace(started_in(tmp_path), cancellation=None)
    note_cancellation(alone)
    drop_cancellation(alone)
    assert cancellation_of(alone) is None and list(tmp_path.iterdir()) == []
