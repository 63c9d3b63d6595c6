"""Which hosts the next start of an elastic job has."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import time
import uuid
from pathlib import Path

import pytest

from ddl_airflow.core.errors import SettingInvalid, SubmitFailed
from ddl_airflow.core.hosts import Host
from ddl_airflow.launchers import elastic
from ddl_airflow.launchers.elastic import Bounds, Pool, commit_folder, discovered
from ddl_airflow.launchers.processes import marked
from tests.limits import until, within


class Hosts:
    """Hosts that come, go and fall ill; and what a pool of them has said."""

    def __init__(self, *there: str, **bounds: object) -> None:
        self.there = list(there)
        self.ill: dict[str, str] = {}
        self.said: list[str] = []
        self.pool = Pool(Bounds(**bounds), self.find, self.look, self.said.append)  # type: ignore[arg-type]

    def find(self) -> list[Host]:
        if not self.there:
            raise SubmitFailed("the script fails")
        pairs = (one.split(":") for one in self.there)
        return [Host(name, int(slots)) for name, slots in pairs]

    def look(self, slots):
        return {name: why for name, why in self.ill.items() if name in slots}


def test_a_job_has_as_many_ranks_as_there_are_slots_up_to_the_most():
    assert Hosts("a:2", "b:2", least=2).pool.choose() == {"a": 2, "b": 2}
    assert Hosts("a:2", "b:2", least=2, most=3).pool.choose() == {"a": 2, "b": 1}


def test_a_host_that_is_not_well_is_left_out_and_named():
    hosts = Hosts("a:2", "b:2", least=2)
    hosts.ill["a"] = "it does not answer"
    assert hosts.pool.choose() == {"b": 2}
    assert hosts.said == ["a is left out: it does not answer."]
    hosts.ill.clear()
    assert hosts.pool.choose() == {"b": 2, "a": 2}  # what ran there goes on there


def test_a_script_that_cannot_be_started_has_to_be_mended_and_one_that_is_replaced_is_waited_for(
    monkeypatch,
):
    hosts, finds = Hosts("a:2", least=2), []

    def find():
        finds.append("")
        if len(finds) in (1, 3):
            raise SettingInvalid("find-hosts.sh: not found")
        return hosts.find()

    pool = Pool(Bounds(least=2), find, hosts.look, hosts.said.append)
    with pytest.raises(SettingInvalid):
        pool.choose()
    assert pool.choose() == {"a": 2}
    monkeypatch.setattr(elastic, "_LOOK_S", 0.01)
    assert pool.choose() == {"a": 2} and len(finds) == 4
    assert "find-hosts.sh: not found. Waiting for hosts." in hosts.said[-1]


def test_a_host_whose_rank_has_failed_rests_if_others_suffice():
    hosts = Hosts("a:2", "b:2", "c:1", least=3)
    hosts.pool.choose()
    hosts.pool.failed_on(2)
    assert hosts.pool.choose() == {"a": 2, "c": 1}
    assert hosts.said == ["b is left out: a rank has failed there."]
    hosts.pool.failed_on(0)
    assert hosts.pool.choose() == {"a": 2, "c": 1, "b": 2}


def test_it_rests_as_long_as_the_cooldown_says(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(elastic.time, "monotonic", lambda: now[0])
    hosts = Hosts("a:1", "b:1", least=1, most=1, cooldown_s=(10.0, 15.0))
    assert hosts.pool.choose() == {"a": 1}
    for rests_s in (10, 15, 15):
        hosts.pool.failed_on(0)
        now[0] += rests_s - 1
        assert hosts.pool.choose() == {"b": 1}
        hosts.there = ["a:1"]  # so that the next start is there
        assert hosts.pool.choose() == {"a": 1}
        hosts.there = ["b:1", "a:1"]
        now[0] += 1
        assert hosts.pool.choose() == {"a": 1}


def test_too_few_are_waited_for_and_then_named(monkeypatch):
    monkeypatch.setattr(elastic, "_LOOK_S", 0.01)
    hosts = Hosts("a:2", "b:2", least=3, wait_s=0.05)
    hosts.ill["b"] = "it does not answer"
    with pytest.raises(SubmitFailed, match="3 ranks are needed.* 2 slots. b: it does not answer."):
        hosts.pool.choose()
    assert hosts.said[1:] == [
        "3 ranks are needed at least, and there are 2 slots. Waiting for hosts."
    ]
    hosts.there.clear()
    with pytest.raises(SubmitFailed, match="there are 0 slots. the script fails"):
        hosts.pool.choose()


@pytest.mark.parametrize(
    ("there", "changes"),
    [
        (["a:1", "b:1"], False),
        (["b:1", "a:1"], False),
        (["a:1", "b:1", "c:1"], True),
        (["a:2", "b:1"], True),
        (["b:1"], True),
        ([], False),
        (["a:1", "b:1", "ill:1"], False),
    ],
)
def test_hosts_that_come_or_go_are_seen_while_ranks_run(there, changes, monkeypatch):
    monkeypatch.setattr(elastic, "_LOOK_S", 0.001)
    hosts = Hosts("a:1", "b:1", "ill:1", least=1)
    hosts.ill["ill"] = "it does not answer"
    hosts.pool.choose()
    hosts.there = there
    assert hosts.pool._would_change() is changes
    if changes:
        with hosts.pool.watched() as changed:
            while not changed():
                pass


def test_a_host_that_comes_before_it_is_well_is_waited_for_while_ranks_run():
    """As one that is printed before its sshd is up: a start without it would be for nothing."""
    hosts = Hosts("a:1", "b:1", least=1)
    hosts.pool.choose()
    hosts.there = ["a:1", "b:1", "c:1"]
    hosts.ill["c"] = "it does not answer"
    assert not hosts.pool._would_change()
    hosts.ill.clear()
    assert hosts.pool._would_change()
    assert hosts.pool.choose() == {"a": 1, "b": 1, "c": 1}


def test_a_host_that_was_left_out_and_is_well_again_is_seen_while_ranks_run():
    hosts = Hosts("a:1", "b:1", "c:1", least=1)
    hosts.ill["c"] = "it does not answer"
    assert hosts.pool.choose() == {"a": 1, "b": 1}
    hosts.pool.failed_on(1)
    assert hosts.pool.choose() == {"a": 1}
    assert not hosts.pool._would_change()  # b rests, and would do so in the next start
    hosts.ill.clear()
    assert hosts.pool._would_change()
    assert hosts.pool.choose() == {"a": 1, "c": 1}


def test_hosts_at_work_are_looked_at_only_where_another_may_be_well():
    """One that is well by itself may differ from them; and they, who are busy, stay."""
    hosts, looks = Hosts("a:1", "b:1", least=1), []
    hosts.pool.choose()
    hosts.there = ["a:1", "b:1", "c:1", "d:1"]

    def look(slots):
        looks.append("".join(slots))
        ill = {"c": "it does not answer", "a": "it has no memory"}
        return ill | ({"d": "it differs"} if "a" in slots else {})

    hosts.pool._look = look
    assert not hosts.pool._would_change()
    assert looks == ["cd", "abcd"]
    hosts.there = ["b:2", "c:1"]
    assert hosts.pool._would_change()  # one has gone, the other has more slots


def test_what_a_script_prints_are_the_hosts(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Without a line that says what runs it, as Horovod's guide has it; and started by a shell.
    Path("hosts script").write_text("echo a:2\necho ' b'\necho\necho a:2\n")
    Path("hosts script").chmod(0o700)
    a, b = Host("a", 2), Host("b", 3)
    assert discovered("'./hosts script'", 3) == [a, b]
    assert discovered("'./hosts script' | grep a", 3) == [a]
    assert discovered('"$PWD/hosts script" && echo b:3', 3) == [a, b]
    for command, said in (
        ("echo no such cloud >&2; exit 3", "exit code 3. no such cloud"),
        ("echo a b", "'a b' is no host"),
        ("echo a:1; echo a:2", "a is printed twice, with 1 and 2 slots"),
        ("echo a; echo a:2", "a is printed twice, with 1 and 2 slots"),
    ):
        with pytest.raises(SubmitFailed, match=said):
            discovered(command, 1)


@pytest.mark.parametrize("command", ["./none", "'", "./plain"])
def test_a_script_that_cannot_be_started_is_named(tmp_path: Path, monkeypatch, command: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").touch(0o600)
    with pytest.raises(SettingInvalid, match=f"--host-discovery-script {command}: .+"):
        discovered(command, 1)


def test_a_script_that_takes_too_long_is_ended_with_all_that_it_started(monkeypatch):
    monkeypatch.setenv("DDL_TEST_SCRIPT", mark := uuid.uuid4().hex)
    monkeypatch.setattr(elastic, "_SCRIPT_S", 0.2)
    began = time.monotonic()
    with pytest.raises(SubmitFailed, match="it takes longer than 0 s"):
        discovered("sleep 60 | cat", 1)
    assert time.monotonic() - began < within(20)
    until(lambda: not marked("DDL_TEST_SCRIPT", mark), 20)


def test_a_folder_of_commits_goes_with_a_training_that_has_ended(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("CHECKPOINT_DIR", raising=False)
    said: list[str] = []
    beneath = tmp_path / ".ddl-run"
    for done in (True, False):
        with commit_folder(beneath, said.append) as commits:
            before = commits.state()
            (commits.folder / ".partial").touch()
            assert commits.state() == before
            (commits.folder / "horovod-1-1.commit").touch()
            assert commits.state() != before
            commits.done = done
        assert commits.folder.exists() is not done
    assert said == [f"To go on from what was committed, set CHECKPOINT_DIR={commits.folder}."]
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path / "mine"))
    with commit_folder(tmp_path, said.append) as mine:
        mine.done = True
    assert mine.folder == tmp_path / "mine" and mine.folder.is_dir()
    folder = str(mine.folder)
    assert mine.environment == {"CHECKPOINT_DIR": folder, "DDL_COMMIT_LOCK": folder}
    assert not list(mine.folder.iterdir())


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("horovod-1-1.commit", True),
        ("model-3.keras", True),
        ("model-3.weights.h5", True),
        ("model.ckpt-7.index", True),
        ("model-3.hdf5", True),
        ("weights.npz", True),
        ("torch.ckpt", True),
        ("ckpt-100/shard.0", True),
        ("preempted-7/model.npz", True),
        ("orbax/100/d/manifest.ocdbt", True),
        ("run/step_7/optimizer.bin", True),
        ("run/model-3.keras", True),
        ("logs/rank-0.out", False),
        ("logs/train.log.1", False),
        ("runs/20261130-021000/config.yaml", False),
        ("runs/1796003898/graph.pbtxt", False),
        ("train.log", False),
        ("metrics.csv", False),
        ("said.txt", False),
        ("state.json", False),
        ("events.out.tfevents.1.host", False),
        ("logs/events.out.tfevents.1.host", False),
        ("logs/1796003898/train.log", False),
        (".model-3.keras", False),
        (".cache/shard.0", False),
        ("model.ckpt-7_temp/part-00000-of-00001.data-00000-of-00001", False),
    ],
)
def test_commits_and_checkpoints_are_progress_and_logs_are_none(
    tmp_path: Path, name: str, counts: bool
):
    commits = elastic.Commits(tmp_path, {})
    before = commits.state()
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert bool(commits.state() - before) is counts


def test_a_step_that_is_saved_again_is_no_progress(tmp_path: Path):
    commits = elastic.Commits(tmp_path, {})

    def save(name: str, *more: str) -> bool:
        before = commits.state()
        for one in (name, *more):
            path = tmp_path / one
            path.touch()
            os.utime(path, ns=(next(times),) * 2)
        return bool(commits.state() - before)

    times = itertools.count(10**18, 10**9)
    files = (".index", ".meta", ".data-00000-of-00001")
    saved = [save("checkpoint", *(f"model.ckpt-{n}{one}" for one in files)) for n in (0, 0, 9, 9)]
    assert saved == [True, False, True, False]
    # No step is told by these.
    for name in ("model.ckpt.index", "model.ckpt.data-00000-of-00001", "resnet-50"):
        name += "" if "." in name else ".index"
        assert save(name) and save(name), name


def test_one_job_at_a_time_commits_in_a_folder(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(elastic, "_LOCK_S", 0.0)
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path))
    who = rf"process {os.getpid()} on {os.uname().nodename}\. Give each job a CHECKPOINT_DIR of"
    with commit_folder(tmp_path, print), pytest.raises(SettingInvalid, match=who):
        commit_folder(tmp_path, print).__enter__()
    (tmp_path / ".horovod-lock").write_text("of a job that was killed")
    with commit_folder(tmp_path, print):
        # What the job starts, and leaves, has not got it.
        left = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        with commit_folder(tmp_path, print):
            pass
    finally:
        left.kill()
        left.wait()


def test_where_there_are_no_locks_that_is_said(tmp_path: Path, monkeypatch):
    def missing(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    said: list[str] = []
    monkeypatch.setattr(elastic.fcntl, "flock", missing)
    monkeypatch.setenv("CHECKPOINT_DIR", str(tmp_path))
    with commit_folder(tmp_path, said.append):
        pass
    (sentence,) = said
    assert sentence.startswith(f"{tmp_path}: No locks available: the file system has no locks")


def test_output_files_have_all_starts(tmp_path: Path):
    from ddl_airflow.launchers.terminal import OutputFiles

    (tmp_path / "rank.00").mkdir()
    (tmp_path / "rank.00" / "stdout").write_text("of an earlier call")
    files = OutputFiles(tmp_path)
    for chunk in (b"one\n", b"two\n"):
        files.add(0, 11, 1, chunk)
    files.add(10, 11, 2, b"err")
    files.close()
    assert (tmp_path / "rank.00" / "stdout").read_text() == "one\ntwo\n"
    assert (tmp_path / "rank.10" / "stderr").read_text() == "err"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank.00", "rank.10"]
