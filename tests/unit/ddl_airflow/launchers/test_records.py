"""How a job stands, from its ranks' records; and one contract for every launcher."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ddl_airflow.core.errors import LaunchError
from ddl_airflow.core.job import JobHandle, JobState, JobStatus
from ddl_airflow.launchers import records
from ddl_airflow.launchers.fake import FakeLauncher
from ddl_airflow.launchers.local import LocalLauncher, OnceLauncher
from ddl_airflow.launchers.records import (
    explained,
    how_trained,
    ranks_status,
    read_records,
    written_by_several,
)

GOOD = {"ended": 5.0, "exit_code": 0}


def status_of(
    folder: Path, *records: dict | None, running: bool = False, **asked: object
) -> JobStatus:
    """The status of a job whose ranks left these records; None is no file."""
    for rank, record in enumerate(records):
        if record is not None:
            whole = {"rank": rank, "host": f"host-{rank}", **record}
            (folder / f"rank-{rank}.json").write_text(json.dumps(whole))
    handle = JobHandle("x", "j", 1, len(records), folder, folder, **asked)
    return ranks_status(handle, running=running)


def raised(t: float, name: str, *bases: str, **more: object) -> dict:
    facts = {"t": t, "type": name, "bases": [*bases, "Exception"], "message": "why"}
    return {"exception": facts | {"file": "train.py", "line": 3} | more, "exit_code": 1}


def test_all_ranks_at_their_end_is_success(tmp_path):
    assert status_of(tmp_path, GOOD, GOOD) == JobStatus(JobState.SUCCEEDED)


@pytest.mark.parametrize("text", ["", '{"rank": 0, "ho'])
def test_a_record_that_is_not_whole_is_none_yet_and_wrong_at_the_end(tmp_path, text):
    (tmp_path / "rank-0.json").write_text(text)
    assert status_of(tmp_path, None, GOOD, running=True, nodes=2) == JobStatus(JobState.RUNNING)
    with pytest.raises(LaunchError, match="rank 0: .* holds no JSON") as caught:
        status_of(tmp_path, None, GOOD)
    assert not caught.value.retryable


def test_a_record_that_a_file_system_does_not_give_may_come_later(tmp_path, monkeypatch):
    def stale(*_: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(records, "read_object", stale)
    assert status_of(tmp_path, None, running=True, nodes=1) == JobStatus(JobState.RUNNING)
    with pytest.raises(LaunchError, match="rank 0: .*Stale") as caught:
        status_of(tmp_path, None)
    assert caught.value.retryable


@pytest.mark.parametrize("place", ["ddl/try-1", "."])
def test_a_record_that_came_since_it_was_looked_for_is_found(tmp_path, monkeypatch, place):
    """NFS keeps for a while that there was none, unless somebody opens the folder: nfs(5)."""
    folder = tmp_path / place
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rank-0.json").write_text(json.dumps({"host": "n1", **GOOD}))
    opened, read, fresh = os.open, records.read_object, []

    def notes(path: str, flags: int, *more: int, **others: int) -> int:
        got = opened(path, flags, *more, **others)
        if not flags & os.O_PATH and os.path.samestat(os.fstat(got), os.stat(folder)):
            fresh.append(path)
        return got

    def cached(path: Path, root: Path) -> dict:
        if not fresh:
            raise FileNotFoundError(path)
        return read(path, root)

    monkeypatch.setattr(os, "open", notes)
    monkeypatch.setattr(records, "read_object", cached)
    handle = JobHandle("slurm", "j", 1, 1, folder, tmp_path / ("logs" if place != "." else place))
    assert ranks_status(handle, running=False).state is JobState.SUCCEEDED


def test_a_folder_of_records_that_is_a_link_is_not_looked_into(tmp_path, monkeypatch):
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    for folder in (elsewhere, run):
        folder.mkdir()
    (elsewhere / "rank-0.json").write_text(json.dumps({"host": "n1", **GOOD}))
    (run / "try-1").symlink_to(elsewhere)
    handle = JobHandle("slurm", "j", 1, 1, run / "try-1", run / "logs")
    with pytest.raises(LaunchError, match="is a link"):
        ranks_status(handle, running=False)


@pytest.mark.parametrize(
    ("hosts", "where"),
    [
        (["a", "a", "b", "b"], ""),
        (["a", "b", "a", "b"], ""),
        (["a", "a", "a", "a"], "ranks 0 to 3 on a."),
        (["a", "a", "a", "b"], "ranks 0 to 2 on a, rank 3 on b."),
        (["a", "b", "c", "d"], "rank 0 on a, rank 1 on b, rank 2 on c, rank 3 on d."),
    ],
)
@pytest.mark.parametrize("running", [False, True])
def test_ranks_must_be_on_the_hosts_that_were_asked_for(tmp_path, hosts, where, running):
    records = [GOOD | {"host": host} for host in hosts]
    status = status_of(tmp_path, *records, running=running, nodes=2)
    if where:
        assert (status.state, status.permanent) == (JobState.FAILED, True)
        assert status.reason.startswith("2 hosts with 2 rank(s) each were asked for, and")
        assert where in status.reason
    else:
        assert status.state is (JobState.RUNNING if running else JobState.SUCCEEDED)
    # Not before all have begun.
    (tmp_path / "rank-3.json").unlink()
    assert status_of(tmp_path, *records[:3], None, running=True, nodes=2).state is JobState.RUNNING


def test_hosts_of_one_name_are_told_apart(tmp_path):
    """As those that were made as copies of one, all `localhost`: their job was ended."""
    boots = ["1", "1", "2", "2"]
    records = [GOOD | {"host": "localhost", "boot": boot} for boot in boots]
    assert status_of(tmp_path, *records, nodes=2).state is JobState.SUCCEEDED
    # Containers of one host have names of their own; one host by two names has one.
    records = [GOOD | {"host": host, "boot": "1"} for host in "aabb"]
    assert status_of(tmp_path, *records, nodes=2).state is JobState.SUCCEEDED
    records = [GOOD | {"host": "gpu1", "boot": "1"} for _ in boots]
    status = status_of(tmp_path, *records, nodes=2)
    assert (status.state, status.permanent) == (JobState.FAILED, True)
    assert "ranks 0 to 3 on gpu1. Two names that were given are of one host, or " in status.reason


AVERAGED = GOOD | {"ddl": {"averaged": True, "gradients": True}}
JOINED = GOOD | {"ddl": {"averaged": False, "gradients": False}}
ALONE = GOOD | {"ddl": {"averaged": False, "gradients": True}}


@pytest.mark.parametrize(
    ("records", "who"),
    [
        ([AVERAGED, AVERAGED], ""),
        ([AVERAGED, JOINED], ""),  # it had no data, and added zeros to what the other reduced
        ([JOINED, JOINED], ""),  # the training was found done
        ([GOOD, GOOD], "ranks 0 and 1 did not import ddl."),
        ([GOOD] * 12, "ranks 0 to 11 did not import ddl."),
        ([ALONE, ALONE], "ranks 0 and 1 imported ddl, computed gradients and averaged none."),
        ([JOINED, ALONE], "ranks 0 and 1 imported ddl, computed gradients and averaged none."),
        ([AVERAGED, GOOD], "rank 1 did not import ddl, rank 0 averaged gradients."),
        ([GOOD, JOINED, GOOD], "ranks 0 and 2 did not import ddl, rank 1 imported it and averaged"),
        ([GOOD | {"ddl": "averaged"}, AVERAGED], "rank 0 did not import ddl"),
        ([GOOD | {"ddl": {"averaged": 1}}, JOINED], ""),
        ([GOOD | {"ddl": {"gradients": "x"}}, JOINED], ""),
    ],
)
def test_ranks_that_did_not_train_together_have_failed(tmp_path, records, who):
    status = status_of(tmp_path, *records, averages=True)
    assert status.state is (JobState.FAILED if who else JobState.SUCCEEDED)
    assert (status.apart, status.permanent, status.failure) == (bool(who), bool(who), None)
    if who:
        start = f"The {len(records)} ranks trained apart, each a model of its own: {who}"
        assert status.reason.startswith(start)
        assert "ddl.keras.DistributedOptimizer(optimizer)" in status.reason
        assert "`distribution: independent`" in status.reason
        assert JobStatus.load(json.loads(json.dumps(status.dump()))) == status
    assert status_of(tmp_path, *records).state is JobState.SUCCEEDED  # they need not


@pytest.mark.parametrize(("size", "how"), [(1, "together"), (2, "apart")])
def test_one_rank_trains_one_model(tmp_path, size, how):
    """As where ``min_nodes`` left one: several that find its training done go on with that."""
    status_of(tmp_path, ALONE | {"world_size": size})  # of two, the other one's host may be lost
    before = JobHandle("x", "j", 0, 2, tmp_path, tmp_path)
    assert how_trained(read_records(before)) == how


def test_ranks_that_fitted_alone_trained_apart_whatever_they_averaged_before(tmp_path):
    fitted = AVERAGED | {"ddl": AVERAGED["ddl"] | {"alone": True}}
    status = status_of(tmp_path, fitted, fitted, averages=True)
    assert status.apart
    assert "ranks 0 and 1 updated weights with an optimizer that does not av" in status.reason
    assert not status_of(tmp_path, fitted, AVERAGED, averages=True).apart  # a model of rank 0's own


@pytest.mark.parametrize("explicit", [False, True])
def test_ranks_that_applied_what_nobody_averaged_trained_apart(tmp_path, explicit):
    """Unless the script averages tensors itself: its gradients, or now and then its weights."""
    ddl = AVERAGED["ddl"] | {"applied": True, "explicit": explicit}
    applied = AVERAGED | {"ddl": ddl}
    assert status_of(tmp_path, applied, applied, averages=True).apart is not explicit
    assert not status_of(tmp_path, applied, AVERAGED, averages=True).apart


@pytest.mark.parametrize(
    ("records", "apart"),
    [
        ([GOOD, GOOD], False),  # found done before they imported ddl
        ([GOOD, JOINED], False),
        ([ALONE, ALONE], True),  # an optimizer that was loaded and not distributed again
        ([AVERAGED, GOOD], True),
    ],
)
def test_ranks_that_resume_must_not_train_apart_either(tmp_path, records, apart):
    assert status_of(tmp_path, *records, averages=True, trained_before="together").apart is apart


def test_a_rank_that_failed_is_the_cause_whether_they_averaged_or_not(tmp_path):
    status = status_of(tmp_path, GOOD, {"ended": 3.9, "exit_code": 9}, averages=True)
    assert (status.apart, status.failure.rank) == (False, 1)


def test_a_running_job_is_running_whatever_the_records_say(tmp_path):
    assert status_of(tmp_path, GOOD, None, running=True).state is JobState.RUNNING


@pytest.mark.parametrize("records", [(None, None), (GOOD, None)])
def test_a_rank_that_left_nothing_is_lost_not_success(tmp_path, records):
    assert status_of(tmp_path, *records) == JobStatus(JobState.LOST)


def test_ranks_that_were_only_asked_to_end_are_lost(tmp_path):
    asked = {"asked_to_end": 4.0, "ended": 4.1, "exit_code": 143}
    assert status_of(tmp_path, asked, asked) == JobStatus(JobState.LOST)


def test_ranks_that_were_asked_to_end_did_not_do_their_work_however_they_ended(tmp_path):
    asked = {"asked_to_end": 4.0, "ended": 4.1, "exit_code": 0}
    assert status_of(tmp_path, GOOD, asked) == JobStatus(JobState.LOST)


SAVED = GOOD | {"asked_to_end": 4.0, "listens": True, "preempted": {"step": 7}}


def test_ranks_that_all_saved_at_one_step_made_room(tmp_path):
    # One alone may have been told.
    alone = GOOD | {"listens": True, "preempted": {"step": 7}}
    status = status_of(tmp_path, SAVED, alone, averages=True)
    assert (status.state, status.step) == (JobState.PREEMPTED, 7)
    assert JobStatus.load(status.dump()) == status


def test_ranks_that_saved_at_different_steps_cannot_go_on_together(tmp_path):
    other = SAVED | {"preempted": {"step": 8}}
    status = status_of(tmp_path, SAVED, other, averages=True)
    assert status.state is JobState.FAILED and "different steps: 7, 8" in status.reason
    apart = status_of(tmp_path, SAVED, other, averages=False)
    assert (apart.state, apart.step) == (JobState.PREEMPTED, 7)


@pytest.mark.parametrize(
    "other",
    [
        GOOD,
        SAVED | {"exit_code": 137},  # killed while it ended
        {"asked_to_end": 4.0, "preempted": {"step": 7}},
        SAVED | {"preempted": {"step": "7"}},
        SAVED | {"preempted": 7},
        None,
    ],
)
def test_ranks_of_which_not_all_saved_are_not_preempted(tmp_path, other):
    assert status_of(tmp_path, SAVED, other).state is not JobState.PREEMPTED


def test_a_rank_that_listens_and_came_to_its_end_first_did_its_work(tmp_path):
    first = {"asked_to_end": 4.0, "listens": True} | GOOD
    assert status_of(tmp_path, GOOD, first) == JobStatus(JobState.SUCCEEDED)


def test_a_rank_that_says_that_it_was_released_has_not_done_its_work(tmp_path):
    """It is no task of a cluster."""
    released = {"released": 4.0, "ended": 4.1, "exit_code": 0, "preempted": {"step": 7}}
    assert status_of(tmp_path, GOOD, released).state is not JobState.SUCCEEDED
    killed = {"released": 4.0, "ended": 4.1, "exit_code": 137}
    assert status_of(tmp_path, killed, killed).state is JobState.FAILED


def test_released_parameter_server_has_succeeded_however_it_ended(tmp_path):
    released = {"task": "ps 0", "released": 4.0, "ended": 4.1, "exit_code": 143}
    assert status_of(tmp_path, SAVED, released).state is JobState.PREEMPTED
    assert status_of(tmp_path, GOOD, released) == JobStatus(JobState.SUCCEEDED)
    died = {"task": "ps 0", "ended": 4.1, "exit_code": 143}
    assert status_of(tmp_path, GOOD, died).failure.task == "ps 0"
    failure = status_of(tmp_path, {"task": "worker 0", "ended": 3.9, "exit_code": 9}, released)
    assert failure.failure.task == "worker 0"


def test_exit_code_of_the_rank_that_failed_by_itself_is_blamed(tmp_path):
    asked = {"asked_to_end": 4.0, "ended": 4.1, "exit_code": 143}
    failure = status_of(tmp_path, asked, {"ended": 3.9, "exit_code": 9}, asked).failure
    assert (failure.rank, failure.host, failure.exit_code) == (1, "host-1", 9)
    assert failure.reason == "exited with code 9"
    assert failure.permanent is False


@pytest.mark.parametrize("error", ["FailedPreconditionError", "RankGoneError"])
@pytest.mark.parametrize("died", [{"ended": 4.0, "exit_code": 137}, {}])
def test_rank_that_died_is_blamed_not_one_that_saw_it_first(tmp_path, died, error):
    failure = status_of(tmp_path, raised(3.9, error), died).failure
    assert failure.rank == 1
    assert "SIGKILL" in failure.reason


def test_rank_that_ended_its_script_first_and_was_killed_with_the_job_is_not_blamed(tmp_path):
    # mpirun's SIGKILL came before the others had written that they were told to end.
    said = 'AllReduce "AllReduce": rank 1 has already ended its script, but rank 0 still runs'
    seen = raised(3.9, "FailedPreconditionError", message=said)
    failure = status_of(tmp_path, seen, {}, {}).failure
    assert (failure.rank, failure.exception) == (0, "FailedPreconditionError")
    failure = status_of(tmp_path, seen, {"ended": 4.0, "exit_code": 3}, {}).failure
    assert (failure.rank, failure.exit_code) == (1, 3)


def test_rank_that_saw_another_die_is_better_than_none(tmp_path):
    asked = {"asked_to_end": 4.0, "ended": 4.1, "exit_code": 143}
    failure = status_of(tmp_path, raised(3.9, "FailedPreconditionError"), asked).failure
    assert (failure.rank, failure.exception) == (0, "FailedPreconditionError")


def test_the_first_of_several_failures_is_blamed(tmp_path):
    late, first = {"ended": 4.0, "exit_code": 1}, {"ended": 3.0, "exit_code": 2}
    assert status_of(tmp_path, late, first, late).failure.rank == 1


def test_an_exception_counts_from_when_it_was_raised(tmp_path):
    # Rank 0 raised first and took long to end; rank 1 fell over it.
    first = {"ended": 9.0, **raised(2.0, "ValueError")}
    failure = status_of(tmp_path, first, {"ended": 5.0, "exit_code": 1}).failure
    assert (failure.rank, failure.exception) == (0, "ValueError")
    assert failure.reason == "raised ValueError at train.py:3: why"


def test_an_exception_that_the_end_of_the_job_caused_is_not_blamed(tmp_path):
    # Rank 1's shim was killed with SIGKILL. Rank 0 was then told to end, and its script's own
    # handler of SIGTERM raised.
    told = {"asked_to_end": 4.0, "ended": 4.2, **raised(4.1, "KeyboardInterrupt")}
    failure = status_of(tmp_path, told, {"started": 1.0}).failure
    assert (failure.rank, failure.exit_code) == (1, None)


def test_an_exception_of_a_rank_that_ended_well_is_no_failure(tmp_path):
    handled = {"ended": 5.0, **raised(2.0, "ValueError"), "exit_code": 0}
    assert status_of(tmp_path, handled, GOOD).state is JobState.SUCCEEDED


@pytest.mark.parametrize(
    "odd",
    [
        {"exit_code": 1},
        {"exit_code": 1, "ended": 10**4000},
        {"exit_code": 1, "ended": float("nan")},
        {"exit_code": 10**4000, "ended": 5.0},
        {"exit_code": 1, "ended": 5.0, "asked_to_end": 10**4000},
        raised(10**4000, "ValueError", ended=5.0) | {"ended": 5.0},
        raised(1.0, "ValueError", line=10**4000, bases=[[], {}], file={}) | {"ended": 5.0},
        {"exit_code": 1, "ended": 5.0, "exception": []},
    ],
)
def test_a_record_that_no_rank_wrote_is_no_success_and_can_be_said(tmp_path, odd):
    status = status_of(tmp_path, {**GOOD, "started": 1.0}, odd)
    assert status.state in (JobState.FAILED, JobState.LOST)
    json.dumps(status.dump(), allow_nan=False).encode()


def test_fields_of_another_type_are_left_out_of_a_record(tmp_path):
    said = {"host": "\ud800", "gpus": [[], "A100", 1], "versions": {"numpy": [], "keras": "3"}}
    said |= {"cpu": 7, "settings": {"OMP_NUM_THREADS": 2, "XLA_FLAGS": "-"}}
    status_of(tmp_path, {**GOOD, **said})
    (record,) = read_records(JobHandle("x", "j", 1, 1, tmp_path, tmp_path)).values()
    assert (record["host"], record["gpus"]) == ("?", ["A100"])
    assert record["versions"] == {"keras": "3"}
    assert "cpu" not in record and record["settings"] == {"XLA_FLAGS": "-"}


def test_a_record_holds_no_more_than_any_rank_has_to_say(tmp_path):
    many = {str(n): "x" * 300 for n in range(500)}
    said = {"gpus": ["A100"] * 500, "versions": many, "settings": many}
    bases = {"exception": {"bases": ["Exception"] * 500}}
    handle = JobHandle("x", "j", 1, 1, tmp_path, tmp_path)
    status_of(tmp_path, {**GOOD, **said, **bases})
    (record,) = read_records(handle).values()
    assert (len(record["gpus"]), len(record["exception"]["bases"])) == (32, 100)
    for name in ("versions", "settings"):
        assert (len(record[name]), {*record[name].values()}) == (100, {"x" * 200})


def test_files_that_several_ranks_wrote_are_named(tmp_path):
    wrote = [["/r/a", "/r/b", "/r/b"], ["/r/b", 3, None, "/r/\ud800"], ["/r/a", "/r/b"], "/r/a"]
    status_of(tmp_path, *(GOOD | {"wrote": names} for names in wrote))
    records = read_records(JobHandle("x", "j", 1, 4, tmp_path, tmp_path))
    assert written_by_several(records) == {"/r/a": "ranks 0 and 2", "/r/b": "ranks 0 to 2"}
    assert records[1]["wrote"] == ["/r/b", "/r/?"]
    status_of(tmp_path, GOOD | {"wrote": [f"/{n}" for n in range(9_999)]})
    assert len(read_records(JobHandle("x", "j", 1, 1, tmp_path, tmp_path))[0]["wrote"]) == 1_000


def test_a_rank_killed_without_a_word_is_named(tmp_path):
    asked = {"asked_to_end": 4.0, "ended": 4.1, "exit_code": 143}
    failure = status_of(tmp_path, asked, {"started": 1.0}).failure
    assert (failure.rank, failure.exit_code, failure.permanent) == (1, None, False)
    assert "SIGKILL" in failure.reason


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (137, "ended by SIGKILL (often the machine ran out of memory)"),
        (139, "ended by SIGSEGV"),
        (134, "ended by SIGABRT"),
        (192, "ended by signal 64"),
        (193, "exited with code 193"),
        (255, "exited with code 255"),  # sys.exit(-1)
    ],
)
def test_a_signal_is_named(tmp_path, code, words):
    failure = status_of(tmp_path, {"ended": 1.0, "exit_code": code}, GOOD).failure
    assert words in failure.reason or (code == 192 and "SIGRTMAX" in failure.reason)
    assert failure.permanent is False


@pytest.mark.parametrize(
    ("record", "permanent"),
    [
        ({"ended": 1.0, "exit_code": 127}, True),
        ({"ended": 1.0, "exit_code": 126}, True),
        ({"ended": 1.0, "exit_code": 1}, False),
        ({"ended": 1.0, **raised(1.0, "SyntaxError")}, True),
        ({"ended": 1.0, **raised(1.0, "IndentationError", "SyntaxError")}, True),
        ({"ended": 1.0, **raised(1.0, "ModuleNotFoundError", "ImportError")}, True),
        ({"ended": 1.0, **raised(1.0, "MemoryError")}, False),
    ],
)
def test_what_a_retry_cannot_mend_is_permanent(tmp_path, record, permanent):
    assert status_of(tmp_path, record, GOOD).failure.permanent is permanent


# --- one contract ---------------------------------------------------------------------------

LAUNCHERS = [FakeLauncher, LocalLauncher, OnceLauncher]


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_render_is_pure(job, kind):
    one = job(script="print(1)", nodes=1, launcher=kind())
    rendered = one.launcher.render(one.spec)
    assert rendered == one.launcher.render(one.spec)
    assert rendered.job == one.spec
    assert not one.spec.record_dir.exists()
    assert not one.spec.log_dir.exists()


@pytest.mark.parametrize("kind", LAUNCHERS)
def test_a_job_that_ends_well_succeeds_and_cancel_changes_nothing(job, kind):
    one = job(script="print('said')", nodes=1, launcher=kind()).start()
    assert one.wait() == JobStatus(JobState.SUCCEEDED)
    assert one.handle.job_id == one.spec.job_id
    assert one.handle.kind == kind.kind
    assert one.handle.world_size == 1
    assert one.launcher.log(one.handle, 0).is_file()
    one.launcher.cancel(one.handle, 1.0)
    one.launcher.cancel(one.handle, 1.0)
    assert one.status() == JobStatus(JobState.SUCCEEDED)
    assert one.processes() == []


def test_a_module_that_is_missing_is_told_with_the_python_that_misses_it(tmp_path):
    record = raised(1.0, "ModuleNotFoundError", "ImportError", message="No module named 'pandas'")
    failure = status_of(tmp_path, record | {"python": "/opt/trainer/bin/python"}).failure
    assert failure.permanent
    assert failure.reason.startswith(
        "raised ModuleNotFoundError at train.py:3: No module named 'pandas'. The ranks' Python is "
        "/opt/trainer/bin/python: install it there"
    )
    assert "[ddl] python" in failure.reason


TRACE = """Graph execution error:

Detected at node ddl_gradients_0 defined at (most recent call last):
  File "/run/code/train.py", line 16, in <module>

  File "/lib/keras/src/backend/tensorflow/trainer.py", line 399, in fit

Barrier: rank 1 runs AllReduce "x". Give all ranks
as many steps.
\t [[{{node ddl_gradients_0}}]] [Op:__inference_multi_step_on_iterator_883]"""
SEVERAL = """Graph execution error:

Detected at node sub defined at (most recent call last):
  File "/run/code/train.py", line 16, in <module>

2 root error(s) found.
  (0) INVALID_ARGUMENT:  required broadcastable shapes
\t [[{{node sub}}]]
\t [[gradients/g/_3]]
  (1) INVALID_ARGUMENT:  required broadcastable shapes
\t [[{{node sub}}]]
0 successful operations."""


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (TRACE, 'Barrier: rank 1 runs AllReduce "x". Give all ranks as many steps.'),
        (SEVERAL, "INVALID_ARGUMENT: required broadcastable shapes."),
        ("2 root error(s) found." + "\n" * 500_000, "2 root error(s) found."),  # soon
        ("is this\n  right?", "is this right?"),
        ("Graph execution error:", "Graph execution error:."),
        ("", ""),
    ],
)
def test_the_sentence_is_what_was_raised_without_the_trace_of_a_graph(tmp_path, message, said):
    status = status_of(tmp_path, raised(1.0, "InvalidArgumentError", message=message), GOOD)
    sentence = explained(status.failure, 2)
    assert "\n" not in sentence
    start = "rank 0 of 2 on host-0 raised InvalidArgumentError at train.py:3"
    assert sentence == (f"{start}: {said}" if said else f"{start}.")
