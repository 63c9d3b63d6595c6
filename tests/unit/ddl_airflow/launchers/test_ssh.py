"""What the ssh launcher decides; the hosts are processes here, behind an ``ssh`` of the test's."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import chdir
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import LaunchError, SubmitFailed
from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import TrainStep
from ddl_airflow.launchers import preflight, remote, ssh
from ddl_airflow.launchers.local import LocalLauncher
from ddl_airflow.launchers.placement import Placement
from ddl_airflow.launchers.remote import Ssh
from ddl_airflow.launchers.ssh import SshLauncher
from ddl_airflow.lineage.record import Run
from ddl_airflow.steps.base import Site, StepContext
from ddl_airflow.steps.job import RunningJob
from ddl_airflow.steps.train import Train
from tests.limits import until, within

# Each host has a folder of its own in place of $WORK, if there is $WORK-HOST; and may be slow.
SSH = """\
#!/bin/sh
while true; do case "$1" in --) shift; break;; -F) shift 2;; -*) shift;; *) break;; esac; done
host=$1
shift
echo "$host $*" >> "$SAID"
[ ! -e "$SAID.slow-$host" ] || exec sleep 30
[ ! -e "$WORK-$host" ] || exec sh -c "$(printf %s "$*" | sed "s#$WORK#$WORK-$host#g")"
exec sh -c "$*"
"""
LOG = logging.getLogger(__name__)


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What was asked of hosts: each line a host and the command."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "ssh"
    program.write_text(SSH)
    program.chmod(0o755)
    path = tmp_path / "said"
    path.touch()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(path))
    monkeypatch.setenv("WORK", str(tmp_path / "run"))
    return path


def job_in(run: Path, **more: object) -> JobSpec:
    """With its folders, on h0 and h1."""
    folders = {name: run / name for name in ("code", "state", "logs")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    asked = {"env": {"RESULT_DIR": str(run / "result")}, "hosts": ("h0", "h1")} | more
    record_dir = folders["state"] / "ranks"
    record_dir.mkdir(exist_ok=True)
    return JobSpec(
        "j", "true", 2, 1, "python3", folders["code"], record_dir, folders["logs"], **asked
    )


def ended(launcher: SshLauncher, job: JobSpec) -> JobHandle:
    """The handle of one that it has started, and whose mpirun has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    launcher._started[process.pid] = process
    launcher._jobs[process.pid] = ssh._Job(job.hosts, job.python, None)
    return job.handle("ssh", process.pid)


def status_at_end(launcher: SshLauncher, handle: JobHandle) -> JobStatus:
    deadline = time.monotonic() + within(20)
    while not (status := launcher.status(handle)).ended:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return status


@pytest.mark.parametrize(
    ("name", "state"), [("ImportError", JobState.FAILED), ("UnavailableError", JobState.LOST)]
)
def test_a_slow_host_does_not_hide_how_a_rank_failed(said, tmp_path, monkeypatch, name, state):
    monkeypatch.setattr(ssh, "_ENDS_S", 0.3)
    (tmp_path / "said.slow-h0").touch()
    job = job_in(tmp_path / "run")
    raised = {"t": 1.0, "type": name, "bases": ["Exception"], "message": "no"}
    record = {"rank": 1, "host": "h1", "ended": 2.0, "exit_code": 1, "exception": raised}
    (job.record_dir / "rank-1.json").write_text(json.dumps(record))
    launcher = SshLauncher(["h0", "h1"])
    status = status_at_end(launcher, ended(launcher, job))
    assert status.state is state
    assert bool(status.failure and status.failure.permanent) is (state is JobState.FAILED)


def test_records_come_whole_and_logs_grow(tmp_path, monkeypatch):
    """Else a record that is read while it is written would fail the training."""
    asked = []

    def rsync(_: Ssh, words: list[str], **_more: object) -> str:
        asked.append(words)
        return ""

    monkeypatch.setattr(Ssh, "_rsync", rsync)
    job = job_in(tmp_path / "run")
    Placement(Ssh(), job, LOG)._bring_logs("h0")
    in_place = {words[-1]: "--inplace" in words for words in asked}
    assert in_place == {f"{job.log_dir}/": True, f"{job.record_dir.parent}/": False}


def look(host: str, *, sees: bool) -> preflight.Look:
    return preflight.Look(host, {"sees_marker": sees})


@pytest.mark.parametrize("slots", [1, 2])
def test_one_rank_that_is_left_need_not_average(said, tmp_path, monkeypatch, slots):
    """``min_nodes`` allows it; a script that averages where there are several ranks does not."""
    looks = [look("h0", sees=True), preflight.Look("h1", wrong=("it does not answer",))]
    monkeypatch.setattr(preflight, "look_at", lambda *_: looks)
    launcher = SshLauncher(["h0", "h1"], min_nodes=1, preflight=False)
    job = replace(job_in(tmp_path / "run", hosts=(), averages=True), slots=slots)
    job = launcher.prepare(job, LOG)
    ddl = {"averaged": False, "gradients": True, "alone": True, "applied": True, "explicit": False}
    for rank in range(slots):
        record = {"rank": rank, "host": "h0", "ended": 2.0, "exit_code": 0, "ddl": ddl}
        (job.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
    status = status_at_end(launcher, ended(launcher, job))
    assert (status.state is JobState.SUCCEEDED, status.apart) == (slots == 1, slots > 1)


@pytest.mark.parametrize("first", [True, False])
def test_hosts_of_which_some_share_the_workspace_are_refused(said, tmp_path, monkeypatch, first):
    """Else files of the run would be removed from it at the end."""
    looks = [look("h0", sees=first), look("h1", sees=not first)]
    monkeypatch.setattr(preflight, "look_at", lambda *_: looks)
    job = job_in(tmp_path / "run", hosts=())
    with pytest.raises(SubmitFailed) as caught:
        SshLauncher(["h0", "h1"], preflight=False).prepare(job, LOG)
    sees, other = ("h0", "h1") if first else ("h1", "h0")
    assert f"{sees} shares the workspace, and {other} does not" in str(caught.value)
    assert "Mount the same file system on all, or on none" in str(caught.value)
    assert said.read_text() == ""


def test_hosts_that_would_not_see_data_come_are_refused(said, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "look_at", lambda *_: [look("h0", sees=False)])
    job = replace(job_in(tmp_path / "run", hosts=()), data_comes=True)
    with pytest.raises(SubmitFailed, match="training_data_reference.stream: the hosts") as caught:
        SshLauncher(["h0"], preflight=False).prepare(replace(job, nodes=1), LOG)
    assert not caught.value.retryable and said.read_text() == ""


def test_hosts_that_share_a_folder_that_is_not_the_workspace_are_refused(said, tmp_path):
    """Else many would be sent to one folder at once."""
    run = tmp_path / "run"
    job = job_in(run)
    (tmp_path / "run-h0").mkdir()
    (tmp_path / "run-h1").symlink_to("run-h0")
    with pytest.raises(SubmitFailed, match="h0 and h1 share") as caught:
        Placement(Ssh(), job, LOG).send()
    assert not caught.value.retryable
    assert [path for path in (tmp_path / "run-h0").rglob("*") if not path.is_dir()] == []
    assert "hosts" not in [path.name for path in (tmp_path / "run-h0").rglob("*")]


def test_hosts_with_folders_of_their_own_are_sent_to(said, tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr(Ssh, "copy_to", lambda _, host, folder, **__: sent.append(host) or "")
    for host in ("h0", "h1"):
        (tmp_path / f"run-{host}").mkdir()
    Placement(Ssh(), job_in(tmp_path / "run"), LOG).send()
    assert {*sent} == {"h0", "h1"}


def test_cancelling_kills_what_is_left_before_it_copies(said, tmp_path):
    """For Airflow kills the task 5 s after it asked it to end."""
    job = job_in(tmp_path / "run")
    launcher = SshLauncher(["h0", "h1"])
    handle = ended(launcher, job)
    launcher._jobs[handle.number].placement = Placement(Ssh(), job, LOG)
    launcher.cancel(handle, 0.1)
    done = [line.split()[1] for line in said.read_text().splitlines()]
    assert done[:2] == ["python3", "python3"]
    assert {*done[2:]} == {"rsync", "sh"}


def test_copying_back_comes_to_an_end(said, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_MOST_S", 0.3)
    (tmp_path / "said.slow-h0").touch()
    why = Ssh().copy_from("h0", tmp_path, only=["rank-0.log"])
    assert why == "rsync: it was not done within 0 s"


def test_a_training_whose_results_cannot_be_brought_has_not_succeeded(said, tmp_path, monkeypatch):
    """What follows would publish what came before."""
    job = job_in(tmp_path / "run")
    for rank in range(2):
        record = {"rank": rank, "host": f"h{rank}", "ended": 2.0, "exit_code": 0}
        (job.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
    launcher = SshLauncher(["h0", "h1"])
    handle = ended(launcher, job)
    launcher._jobs[handle.number].placement = Placement(Ssh(), job, LOG)
    removed: list[str] = []
    monkeypatch.setattr(Placement, "_remove_all", lambda _, hosts: removed.extend(hosts))
    monkeypatch.setattr(Placement, "_bring_logs", lambda *_: "")
    monkeypatch.setattr(Placement, "_bring_results", lambda *_, **__: "rsync: no space left")
    status = status_at_end(launcher, handle)
    assert (status.state, status.permanent) == (JobState.LOST, False)
    assert "h0: what was saved there could not be brought: rsync: no space" in status.reason
    assert removed == ["h1"]


def test_a_training_whose_first_host_is_silent_at_its_end_has_not_succeeded(
    said, tmp_path, monkeypatch
):
    """What it saved last is there alone; its record came before, those of others came since."""
    job = job_in(tmp_path / "run")

    def records(rank: int) -> str:
        record = {"rank": rank, "host": f"h{rank}", "ended": 2.0, "exit_code": 0}
        (job.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
        return ""

    def run(_: Ssh, host: str, *_words: object, **_more: object) -> remote.Said:
        return remote.Said(None if host == "h0" else 0, why="it does not answer")

    monkeypatch.setattr(Ssh, "run", run)
    monkeypatch.setattr(Placement, "_bring_logs", lambda _, host: records(int(host[1:])))
    launcher = SshLauncher(["h0", "h1"])
    handle = ended(launcher, job)
    placement = launcher._jobs[handle.number].placement = Placement(Ssh(), job, LOG)
    placement.start()
    records(0)
    status = status_at_end(launcher, handle)
    assert (status.state, status.permanent) == (JobState.LOST, False)
    assert "h0: what was saved there could not be brought: it does not answer" in status.reason
    assert (job.record_dir / "placed").exists()  # the next try brings it


@pytest.fixture
def disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """rsync works between ``run`` and ``run-h0`` or ``run-h1``; not to hosts that are listed."""
    rsync = Ssh._rsync
    full: list[str] = []

    def of_folder(ssh: Ssh, words: list[str], *more: object, **others: object) -> str:
        source = words[-2].partition(":")[0]
        if source in full:
            return "rsync: write failed: No space left on device (28)"
        for host in ("h0", "h1"):
            words = [
                one.replace(f"{host}:{tmp_path}/run", f"{tmp_path}/run-{host}") for one in words
            ]
        return rsync(ssh, words, *more, **others)

    monkeypatch.setattr(Ssh, "_rsync", of_folder)
    for host in ("h0", "h1"):
        (tmp_path / f"run-{host}").mkdir()
    return full


def saved_in(run: Path, *names: str) -> list[str]:
    """What is in its folder of results, with what is added to it."""
    folder = run / "result"
    for name in names:
        (folder / name).write_text(name)
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def next_try(job: JobSpec, number: int) -> JobSpec:
    record_dir = job.record_dir.parent / f"try-{number}"
    record_dir.mkdir()
    return replace(job, record_dir=record_dir)


def first_try(run: Path) -> tuple[JobSpec, Placement]:
    """One whose ranks are at work, and its files."""
    job = next_try(job_in(run), 1)
    (run / "result").mkdir()
    placement = Placement(Ssh(), job, LOG)
    placement.send()
    placement.start()
    return job, placement


@pytest.mark.parametrize("ends", ["well", "before its ranks"])
def test_nothing_is_removed_from_a_workspace_that_a_host_has_mounted_since(
    said, disks, tmp_path, caplog, ends
):
    """It came up before its file server; what is removed there would be the worker's own."""
    _, placement = first_try(tmp_path / "run")
    saved_in(tmp_path / "run", "step-90000")
    for host in ("h0", "h1"):
        shutil.rmtree(tmp_path / f"run-{host}")
        (tmp_path / f"run-{host}").symlink_to("run")
    if ends == "well":
        placement.finish(["h0", "h1"])
    else:
        placement._ending.set()
        placement.take_back()
    assert saved_in(tmp_path / "run") == ["step-90000"]
    for folder in ("code", "logs", "state"):
        assert (tmp_path / "run" / folder).is_dir()
    for host in ("h0", "h1"):
        assert (
            f"{host}: the run's files stay there: it has mounted the workspace since" in caplog.text
        )


def test_results_of_before_stay_on_a_host_that_has_mounted_the_workspace_since(
    said, disks, tmp_path, monkeypatch
):
    job = job_in(tmp_path / "run", hosts=("h0",))
    (tmp_path / "run-h0" / "result").mkdir()
    saved_in(tmp_path / "run-h0", "model-1")
    run = Ssh.run

    def mounts(ssh: Ssh, host: str, words: list[str], **more: object) -> remote.Said:
        if "rm" in words and str(tmp_path / "run" / "result") in words:
            (tmp_path / "run-h0" / ".worker").touch()
        return run(ssh, host, words, **more)

    monkeypatch.setattr(Ssh, "run", mounts)
    with pytest.raises(SubmitFailed, match="h0: it has mounted the workspace since") as caught:
        Placement(Ssh(), job, LOG).send()
    assert caught.value.retryable
    assert saved_in(tmp_path / "run-h0") == ["model-1"]


@pytest.mark.parametrize("ends", ["full", "killed"])
def test_what_a_try_saved_and_nobody_brought_is_there_for_the_next(
    said, disks, tmp_path, caplog, ends
):
    """Its copy on the host is the only one: the worker's disk was full, or the worker killed."""
    first, placement = first_try(tmp_path / "run")
    saved_in(tmp_path / "run-h0", "step-90000")
    disks.append("h0")
    if ends == "full":
        placement.finish(["h0", "h1"])
        assert "No space left" in placement.missing
    else:
        placement._ending.set()
    second = next_try(first, 2)
    with pytest.raises(SubmitFailed, match="h0 .*No space left.*try-1/placed") as caught:
        Placement(Ssh(), second, LOG).send()
    assert caught.value.retryable
    assert saved_in(tmp_path / "run-h0") == ["step-90000"]
    # It may go on elsewhere.
    disks.clear()
    Placement(Ssh(), replace(second, hosts=("h1", "h0")), LOG).send()
    for host in ("", "-h0", "-h1"):
        assert saved_in(tmp_path / f"run{host}") == ["step-90000"]


def sent_elsewhere(tmp_path, disks):
    """The first try, whose host went with what it had saved; the next one, and its placement."""
    first, placement = first_try(tmp_path / "run")
    placement._ending.set()
    saved_in(tmp_path / "run-h0", "step-90000")
    disks.append("h0")
    job = replace(next_try(first, 2), hosts=("h1",), nodes=1)
    second = Placement(Ssh(), job, LOG)
    second.send()
    return first, job, second


def test_a_host_that_is_gone_for_good_does_not_hold_up_the_next_try(said, disks, tmp_path, caplog):
    first, job, second = sent_elsewhere(tmp_path, disks)
    assert "h0: what was saved there since could not be brought" in caplog.text
    second.start()
    assert (first.record_dir / "placed").exists()
    # Its ranks have started, and save what is newer.
    there = tmp_path / "run-h1" / job.record_dir.relative_to(tmp_path / "run")
    (there / "rank-0.json").write_text("{}")
    until(lambda: not (first.record_dir / "placed").exists(), 20)
    second._ending.set()
    assert (job.record_dir / "placed").read_text() == "h1\n"


@pytest.mark.parametrize("comes_to", ["its files", "mpirun", "ranks that ended"])
def test_a_host_that_comes_back_has_what_it_saved_where_no_ranks_started_since(
    said, disks, tmp_path, comes_to
):
    """It went, and the try after that failed early on other hosts."""
    first, job, second = sent_elsewhere(tmp_path, disks)
    if comes_to == "its files":
        second.take_back()
    else:
        second.start()
        there = tmp_path / "run-h1" / job.record_dir.relative_to(tmp_path / "run")
        if comes_to == "ranks that ended":
            saved_in(tmp_path / "run-h1", "step-100000")
            (there / "rank-0.json").write_text("{}")
        second.finish(["h1"])
    disks.clear()
    Placement(Ssh(), next_try(first, 3), LOG).send()
    expected = "step-100000" if comes_to == "ranks that ended" else "step-90000"
    assert saved_in(tmp_path / "run") == saved_in(tmp_path / "run-h0") == [expected]


def test_what_ended_well_is_not_asked_for_again(said, disks, tmp_path):
    first, placement = first_try(tmp_path / "run")
    saved_in(tmp_path / "run-h0", "step-7")
    placement.finish(["h0", "h1"])
    assert placement.missing == ""
    run = tmp_path / "run"
    assert saved_in(run) == ["step-7"] and saved_in(tmp_path / "run-h0") == []
    (run / "result" / "step-7").unlink()  # as a training that starts again does
    disks.append("h0")
    Placement(Ssh(), replace(next_try(first, 2), hosts=("h1",), nodes=1), LOG).send()


def test_a_checkpoint_that_was_half_written_on_its_host_is_not_gone_on_with(
    said, disks, tmp_path, monkeypatch
):
    """The worker was killed while rank 0 saved; the next try brings it, and sends it to all."""
    layout = RunLayout(tmp_path / "run", "digits", "digits-1")
    layout.create()
    (layout.code / "train.py").write_text("")
    layout.staged.mkdir()
    there = tmp_path / "run-h0" / layout.checkpoints.relative_to(layout.workspace)
    there.mkdir(parents=True)
    for step, folder in ((4, layout.checkpoints), (5, there)):
        with zipfile.ZipFile(folder / f"model-{step}.keras", "w") as archive:
            archive.writestr("model.weights.h5", str(step) * 1000)
    os.truncate(there / "model-5.keras", 500)
    (before := layout.records(1)).mkdir()
    (before / "placed").write_text("h0\n")
    sent = []

    def submit(*_: object) -> None:
        sent.extend(sorted(path.name for path in there.iterdir()))
        raise SubmitFailed("enough")

    monkeypatch.setattr(preflight, "look_at", lambda *_: [look("h0", sees=False)])
    monkeypatch.setattr(SshLauncher, "submit", submit)
    run = Run(dag_id="digits", run_id="one", type="manual", due=datetime.now(UTC))
    site = Site(sys.executable, lambda _: None, lambda _: "")
    context = StepContext(layout, run, LOG, site, try_number=2, tries=2)
    asked = {"launcher": "ssh", "scheduler": {"hosts": ["h0"], "preflight": False}}
    with pytest.raises(SubmitFailed, match="enough"):
        Train(TrainStep(command="python train.py", **asked), context).run()
    assert sent == ["model-4.keras"]
    assert [path.name for path in layout.checkpoints.iterdir()] == ["model-4.keras"]
    assert (layout.damaged / "checkpoints" / "model-5.keras").stat().st_size == 500
    assert isinstance(context.job, RunningJob) and context.job._launcher.kind == "ssh"


def all_end(
    run: Path, job: JobSpec, placement: Placement, code: int = 0, *, damaged: bool = False
) -> None:
    """Has the ranks of a first try end so, each on its host, perhaps with records of no use."""
    for rank, host in enumerate(job.hosts):
        path = job.record_dir / f"rank-{rank}.json"
        record = {"rank": rank, "host": host, "ended": 2.0, "exit_code": code}
        there = run.with_name(f"{run.name}-{host}") / path.relative_to(run)
        there.write_text("[]" if damaged else json.dumps(record))
    launcher = SshLauncher(job.hosts)
    handle = ended(launcher, job)
    launcher._jobs[handle.number].placement = placement
    status_at_end(launcher, handle)


def test_what_a_script_has_removed_is_not_published(said, disks, tmp_path):
    """As a training does that keeps its newest three checkpoints, and renames what is whole."""
    job, placement = first_try(tmp_path / "run")
    here, there = tmp_path / "run", tmp_path / "run-h0"
    (there / "result" / "old").mkdir()
    (there / "result" / "old" / "part").touch()
    saved_in(there, "best", "model-1", "model-2", "tmp")
    assert placement._bring_results("h0") == ""
    assert saved_in(here) == ["best", "model-1", "model-2", "old", "tmp"]
    shutil.rmtree(there / "result" / "old")
    for name in ("model-1", "tmp"):
        (there / "result" / name).unlink()
    saved_in(there, "model-3")
    # Until it has ended nobody knows whether what it saves next comes to be whole.
    assert placement._bring_results("h0") == ""
    assert {*saved_in(here)} >= {"model-1", "model-2", "model-3"}
    (tmp_path / "run-h1" / "logs" / "rank-1.log").write_text("of the other host")
    all_end(here, job, placement)
    assert placement.missing == ""
    assert saved_in(here) == ["best", "model-2", "model-3"]
    assert (here / "logs" / "rank-1.log").read_text() == "of the other host"


def test_what_a_try_that_failed_had_removed_stays(said, disks, tmp_path):
    """It may have removed what was whole to write what is not."""
    job, placement = first_try(tmp_path / "run")
    saved_in(tmp_path / "run-h0", "model-1")
    assert placement._bring_results("h0") == ""
    (tmp_path / "run-h0" / "result" / "model-1").rename(tmp_path / "run-h0" / "result" / "model-2")
    all_end(tmp_path / "run", job, placement, 1)
    assert placement.missing == ""
    assert saved_in(tmp_path / "run") == ["model-1", "model-2"]


@pytest.mark.parametrize("left", ["no folder", "a file", "nothing", "a folder", "what fails"])
def test_what_a_host_has_lost_stays_here(said, disks, tmp_path, left):
    """Its disk was replaced, or unmounted, or cannot be read."""
    job, placement = first_try(tmp_path / "run")
    there = tmp_path / "run-h0" / "result"
    saved_in(tmp_path / "run-h0", "model-1", "model-2")
    assert placement._bring_results("h0") == ""
    shutil.rmtree(there)
    if left == "a file":
        there.write_text("")
    elif left != "no folder":
        there.mkdir()
    if left == "a folder":
        (there / "checkpoints").mkdir()
    elif left == "what fails":
        saved_in(tmp_path / "run-h0", "model-2")
        with chdir(there):
            for _ in range(18):  # a longer path than rsync can send
                os.mkdir("x" * 230)
                os.chdir("x" * 230)
    all_end(tmp_path / "run", job, placement)
    assert {*saved_in(tmp_path / "run")} >= {"model-1", "model-2"}
    assert bool(placement.missing) is (left not in ("nothing", "a folder"))


def test_results_come_also_where_a_record_cannot_be_read(said, disks, tmp_path, monkeypatch):
    monkeypatch.setattr("ddl_airflow.launchers.placement._LOGS_S", 60.0)  # it comes at the end
    job, placement = first_try(tmp_path / "run")
    saved_in(tmp_path / "run-h0", "model-1")
    there = tmp_path / "run-h0" / job.record_dir.relative_to(tmp_path / "run")
    with pytest.raises(LaunchError, match="no JSON object"):
        all_end(tmp_path / "run", job, placement, damaged=True)
    until(lambda: not there.exists(), 20)
    assert saved_in(tmp_path / "run") == ["model-1"]


def test_what_ends_the_bringing_is_said(said, disks, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(36, "File name too long")

    job, placement = first_try(tmp_path / "run")
    monkeypatch.setattr(placement, "_bring_results", fails)
    with pytest.raises(OSError, match="File name too long"):
        all_end(tmp_path / "run", job, placement)


def test_a_training_from_its_start_finds_no_results_of_before_on_a_host(said, disks, tmp_path):
    """Of a try whose host could not be asked to remove them."""
    job = job_in(tmp_path / "run")
    (tmp_path / "run-h0" / "result").mkdir()
    saved_in(tmp_path / "run-h0", "of-other-data")
    Placement(Ssh(), job, LOG).send()
    assert saved_in(tmp_path / "run-h0") == []


def test_that_nothing_can_be_brought_is_said_at_once(said, disks, tmp_path, monkeypatch, caplog):
    """Not days later, when the training ends."""
    monkeypatch.setattr("ddl_airflow.launchers.placement._LOGS_S", 0.01)
    monkeypatch.setattr("ddl_airflow.launchers.placement._RESULTS_S", 0.0)
    placement = Placement(Ssh(), job_in(tmp_path / "run"), LOG)
    disks.append("h0")
    placement.start()
    until(lambda: caplog.text.count("No space left") == 1, 20)
    time.sleep(0.1)
    placement._ending.set()
    assert caplog.text.count("No space left") == 1


def test_bringing_goes_on_after_an_error_that_passes(said, tmp_path, monkeypatch, caplog):
    """As where the worker has no process to spare: what is saved would be brought no more."""
    monkeypatch.setattr("ddl_airflow.launchers.placement._LOGS_S", 0.01)
    asked: list[str] = []

    def bring(_: Placement, host: str) -> str:
        asked.append(host)
        if len(asked) < 4:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return ""

    monkeypatch.setattr(Placement, "_bring_logs", bring)
    placement = Placement(Ssh(), job_in(tmp_path / "run"), LOG)
    placement.start()
    until(lambda: len(asked) > 5, 20)
    placement._ending.set()
    assert caplog.text.count("nothing is brought from the hosts for now: [Errno 11]") == 1


def test_the_last_copy_waits_for_the_one_before(said, tmp_path, monkeypatch):
    monkeypatch.setattr("ddl_airflow.launchers.placement._LOGS_S", 0.01)
    monkeypatch.setattr("ddl_airflow.launchers.placement._RESULTS_S", 0.0)
    at_once, most = [], []

    def bring(*_: object, **__: object) -> str:
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.5)
        at_once.pop()
        return ""

    monkeypatch.setattr(Placement, "_bring_results", bring)
    monkeypatch.setattr(Placement, "_bring_logs", lambda *_: "")
    placement = Placement(Ssh(), job_in(tmp_path / "run"), LOG)
    placement.start()
    until(lambda: most, 20)
    placement.finish(["h0", "h1"])
    assert (len(most), max(most)) == (2, 1)


def test_a_folder_of_results_that_cannot_be_read_is_an_error(said, disks, tmp_path):
    """As on a disk that was unmounted: what was brought before is not all of it."""
    placement = Placement(Ssh(), job_in(tmp_path / "run"), LOG)
    placement.start()
    (tmp_path / "run-h0" / "result").write_text("no folder")
    placement.finish(["h0", "h1"])
    assert "change_dir" in placement.missing
    again = Placement(Ssh(), job_in(tmp_path / "run"), LOG)
    (tmp_path / "run-h0" / "result").unlink()
    again.start()
    again.finish(["h0", "h1"])
    assert "change_dir" in again.missing


def test_a_workspace_that_a_host_lacks_is_made_closed_to_others(said, disks, tmp_path):
    """As it is here; what a site has made keeps its rights."""
    (tmp_path / "run-h0").chmod(0o755)
    job = job_in(tmp_path / "run" / "workspace" / "one", hosts=("h0",))
    Placement(Ssh(), job, LOG).send()
    made = tmp_path / "run-h0" / "workspace"
    assert (made / "one" / "code").is_dir() and made.stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "run-h0").stat().st_mode & 0o777 == 0o755


def test_an_object_that_a_hosts_cache_has_but_in_part_is_sent_again(tmp_path, monkeypatch):
    """As after a loss of power."""
    rsync, host = Ssh._rsync, tmp_path / "host"
    blob = tmp_path / "blob"
    blob.write_bytes(bytes(100_000))
    there = host / str(blob).lstrip("/")
    there.parent.mkdir(parents=True)
    there.touch()

    def to_folder(ssh: Ssh, words: list[str], *more: object) -> str:
        return rsync(ssh, [one.replace("h0:/", f"{host}/") for one in words], *more)

    monkeypatch.setattr(Ssh, "_rsync", to_folder)
    assert Ssh().add_to("h0", [blob]) == ""
    assert there.stat().st_size == 100_000
    inode = there.stat().st_ino
    blob.touch()  # used once more
    assert Ssh().add_to("h0", [blob]) == ""
    assert there.stat().st_ino == inode


def test_folders_that_a_host_has_stay_as_they_are(tmp_path, monkeypatch):
    """Those above the workspace are root's there: another user may not change them."""
    rsync, host = Ssh._rsync, tmp_path / "host"
    blob = tmp_path / "srv" / "cache" / "ab" / "blob"
    blob.parent.mkdir(parents=True)
    blob.write_text("data")
    (tmp_path / "srv").chmod(0o750)
    above = host / str(tmp_path / "srv").lstrip("/")
    above.mkdir(0o755, parents=True)
    os.utime(above, (1, 1))

    def to_folder(ssh: Ssh, words: list[str], *more: object) -> str:
        return rsync(ssh, [one.replace("h0:/", f"{host}/") for one in words], *more)

    monkeypatch.setattr(Ssh, "_rsync", to_folder)
    assert Ssh().add_to("h0", [blob]) == ""
    assert (above / "cache" / "ab" / "blob").read_text() == "data"
    assert above.stat().st_mode & 0o777 == 0o755


def test_no_half_of_a_file_is_among_what_was_saved(disks, tmp_path):
    """Where the disk has no room for it; nor what a try left that was killed while it copied."""
    job = job_in(tmp_path / "run")
    there, here = tmp_path / "run-h0" / "result", tmp_path / "run" / "result"
    for folder in (there, here / ".~tmp~", tmp_path / "run" / "state" / "incoming"):
        folder.mkdir(parents=True)
    (here / ".~tmp~" / "model.keras").write_text("half")
    (tmp_path / "run" / "state" / "incoming" / ".model.keras.x7Gh2k").write_text("half")
    (there / "checkpoint").write_text("of step 7")
    (there / "large").write_bytes(bytes(3 << 20))
    placement = Placement(Ssh(), job, LOG)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        why = placement._bring_results("h0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "rsync: " in why
    left = sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "run").rglob("*"))
    assert not [path for path in left if "tmp~" in path or "incoming" in path or "large" in path]
    assert placement._bring_results("h0") == ""
    assert sorted(path.name for path in here.iterdir()) == ["checkpoint", "large"]


def test_another_user_is_refused_also_where_it_is_only_shown(tmp_path):
    job = replace(job_in(tmp_path / "run"), user="nobody")
    for refused in (SshLauncher(["h0"]).render, lambda job: SshLauncher(["h0"]).prepare(job, LOG)):
        with pytest.raises(SubmitFailed, match="run_ranks_as is") as caught:
            refused(job)
        assert not caught.value.retryable


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ("send", "h1: no room"),
        ("cancel", "was cancelled before"),
        ("render", "no such thing"),
        ("submit", "no such thing"),
    ],
)
def test_nothing_is_left_of_what_was_prepared_where_nothing_starts(
    said, tmp_path, monkeypatch, ends, words
):
    """Neither files on hosts nor the keys that reach them."""

    def fail(*_: object) -> None:
        raise SubmitFailed("no such thing")

    def looked(*_: object) -> list[preflight.Look]:
        if ends == "cancel":
            running.cancel()
        return [look(host, sees=False) for host in ("h0", "h1")]

    def copy_to(_: Ssh, host: str, folder: Path, **_more: object) -> str:
        return "no room" if ends == "send" and host == "h1" else ""

    launcher = SshLauncher(connection="gpu", preflight=False)
    launcher.find_connections(
        lambda _: AirflowConnection("gpu", conn_type="ssh", host="h0,h1", extra={})
    )
    running = RunningJob(launcher, LOG)
    monkeypatch.setattr(preflight, "look_at", looked)
    monkeypatch.setattr(Ssh, "copy_to", copy_to)
    monkeypatch.setattr(SshLauncher, "render", lambda *_: fail() if ends == "render" else None)
    monkeypatch.setattr(LocalLauncher, "submit", fail)
    for host in ("h0", "h1"):
        (tmp_path / f"run-{host}").mkdir()
    with pytest.raises(LaunchError, match=words):
        running.run(job_in(tmp_path / "run", hosts=()))
    assert [path for path in tmp_path.glob("run-h?/*")] == []
    assert not launcher._connected.config.exists()
    assert (tmp_path / "run" / "code").is_dir()


def test_an_rsync_before_3_2_3_is_new_enough(said, tmp_path):
    real = shutil.which("rsync")
    program = tmp_path / "bin" / "rsync"
    program.write_text(
        '#!/bin/sh\nfor word; do case "$word" in --secluded-args | --mkpath)\n'
        f'echo "rsync: $word: unknown option" >&2; exit 1;; esac; done\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    (tmp_path / "run-h0").mkdir()
    job = job_in(tmp_path / "run", hosts=("h0",))
    Placement(Ssh(), job, LOG).send()
    asked = said.read_text()
    (made,) = [line for line in asked.splitlines() if "mkdir" in line and "hosts" not in line]
    for folder in (job.folder, job.log_dir, job.record_dir, Path(job.env["RESULT_DIR"])):
        assert str(folder) in made
    assert "rsync --server" in asked[asked.index(made) :]


def test_a_shell_that_writes_where_rsync_reads_is_named_with_the_cure(said, tmp_path):
    program = tmp_path / "bin" / "ssh"
    program.write_text(program.read_text().replace("host=$1\n", "host=$1\necho Welcome\n"))
    assert "Let ~/.bashrc and the like write nothing" in Ssh().copy_to("h0", tmp_path / "run")


@pytest.mark.parametrize("scheduler", [{}, {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}])
def test_a_host_whose_name_begins_as_this_ones_is_reached_by_ssh(tmp_path, monkeypatch, scheduler):
    """mpirun would take gpu1.lab for gpu1, itself; and in a shell of Slurm for none of its own."""
    (tmp_path / "ssh").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\nexit 255\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in scheduler.items():
        monkeypatch.setenv(name, value)
    host = f"{socket.gethostname().partition('.')[0]}.gpu.example.com"
    job = replace(job_in(tmp_path / "run", hosts=(host,)), nodes=1, python=sys.executable)
    asked = SshLauncher(hosts=[f"{host}:1"]).render(job)
    ended = subprocess.run(
        asked.argv,
        env={**scheduler, **asked.env},
        capture_output=True,
        text=True,
        timeout=within(60),
    )
    assert ended.returncode != 0
    assert host in (tmp_path / "asked").read_text(), ended.stderr


def test_a_hostfile_of_another_system_is_read_and_one_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfh0 slots=1\r\nh1:1\r\n")
    launcher = SshLauncher(hostfile=str(path))
    job = replace(job_in(tmp_path / "run", hosts=()), python=sys.executable)
    assert "h0:1,h1:1" in launcher.render(job).argv
    path.write_bytes(b"\xff\xfeh\0")
    with pytest.raises(SubmitFailed, match=f"launcher.hostfile: {path} is no text"):
        launcher.render(job)
