"""The Slurm launcher on a real cluster: what it makes of each way in which a job can end."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus
from ddl_airflow.launchers.base import Scheduler
from ddl_airflow.launchers.processes import marked
from ddl_airflow.launchers.slurm import SlurmLauncher
from ddl_airflow.steps.job import ScheduledJob
from tests.integration.slurm import SlurmCluster
from tests.limits import within

pytestmark = pytest.mark.integration

_WAIT_S = 40.0
SLEEP = """\
import os, signal, sys, time
def end(*_):
    open("asked-" + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
open("up-" + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
time.sleep(600)
"""


class Job:
    """One job; each question is asked by a launcher of its own, as other processes ask."""

    def __init__(self, spec: JobSpec, launcher: SlurmLauncher) -> None:
        self.spec = spec
        self.launcher = launcher
        self.handle: JobHandle | None = None

    def start(self) -> Job:
        self.handle = self.launcher.submit(self.launcher.render(self.spec))
        return self

    def status(self) -> JobStatus:
        return SlurmLauncher().status(self.handle)

    def cancel(self) -> None:
        SlurmLauncher().cancel(self.handle)

    def until(self, done: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + within(_WAIT_S)
        while not done():
            assert time.monotonic() < deadline, f"not {what}: {self.status()}\n{self.said()}"
            time.sleep(0.05)

    def wait(self) -> JobStatus:
        self.until(lambda: self.status().ended, "ended")
        return self.status()

    def up(self) -> Job:
        """Waits until each rank runs."""
        ranks = [self.spec.folder / f"up-{n}" for n in range(self.spec.world_size)]
        self.until(lambda: all(path.exists() for path in ranks), "up")
        return self

    def log(self, rank: int) -> str:
        return (self.spec.log_dir / f"rank-{rank}.log").read_text()

    def said(self) -> str:
        logs = sorted(self.spec.log_dir.glob("*.log"))
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')}" for path in logs)


@pytest.fixture
def job(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Job]]:
    """job(script, nodes=, slots=, env=, lock=, **settings): not yet started. Leaves no process."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    made: list[Job] = []

    def make(
        script: str = "",
        *,
        nodes: int = 2,
        slots: int = 1,
        env: dict[str, str] | None = None,
        lock: Path | None = None,
        **settings: object,
    ) -> Job:
        root = tmp_path / f"50% of job {len(made)}"  # a % is a pattern to Slurm
        (root / "code").mkdir(parents=True)
        (root / "code" / "main.py").write_text(script)
        spec = JobSpec(
            job_id=f"{tmp_path.name}/train-{len(made)}",
            command="python main.py",
            nodes=nodes,
            slots=slots,
            python=sys.executable,
            folder=root / "code",
            record_dir=root / "records",
            log_dir=root / "logs",
            env=env or {},
            lock=lock,
        )
        made.append(Job(spec, SlurmLauncher(**settings)))
        return made[-1]

    yield make
    for one in made:
        if one.handle is not None:
            one.cancel()
            one.wait()
            one.until(lambda one=one: not marked("DDL_JOB_ID", one.spec.job_id), "gone")


def test_ranks_run_on_all_nodes_and_find_the_same_as_on_one_host(job, slurm, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_X", "aws://key:secret@")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    script = "import json, os; print(json.dumps(dict(os.environ)))"
    one = job(script, slots=2, env={"DATA_DIR": "/d a/ta", "PARAM_NOTE": "a mark of this test"})
    one.start()
    assert one.wait().state is JobState.SUCCEEDED, one.said()
    seen = [json.loads(one.log(rank)) for rank in range(4)]
    assert [rank["SLURMD_NODENAME"] for rank in seen] == ["n1", "n1", "n2", "n2"]
    assert [rank["LEARNER_ID"] for rank in seen] == ["1", "1", "2", "2"]
    for number, rank in enumerate(seen):
        assert rank["OMPI_COMM_WORLD_RANK"] == str(number)
        assert rank["OMPI_COMM_WORLD_SIZE"] == "4"
        assert rank["DATA_DIR"] == "/d a/ta"
        assert rank["DDL_OPTIONS"] == "-mode p"
        assert not {"AIRFLOW_CONN_X", "CUDA_VISIBLE_DEVICES"} & rank.keys()
    kept = slurm.ask("scontrol", "write", "batch_script", str(one.handle.number), "-")
    assert kept.strip() == one.launcher.render(one.spec).script.strip()
    assert "a mark of this test" not in kept
    # Slurm forgets a job; the records tell how it ended.
    assert SlurmLauncher().status(replace(one.handle, number=99999)).state is JobState.SUCCEEDED
    assert isinstance(one.launcher, Scheduler)


def test_cancel_lets_ranks_end_and_may_come_twice(job, slurm):
    one = job(SLEEP).start().up()
    assert one.status().state is JobState.RUNNING
    assert re.match(r"on n\[1-2\], after \d", one.status().reason)
    one.cancel()
    one.cancel()
    status = one.wait()
    assert (status.state, status.permanent) == (JobState.LOST, False)
    assert "CANCELLED" in status.reason and "scancel" in status.reason
    assert all((one.spec.folder / f"asked-{rank}").exists() for rank in (0, 1))
    one.cancel()
    assert slurm.jobs(one.spec.job_id) == {one.handle.number: "CANCELLED"}


def test_a_lost_node_ends_the_job_and_it_is_not_started_again(job, slurm):
    one = job(SLEEP).start().up()
    slurm.fail_node()
    status = one.wait()
    slurm.wait_for_nodes()
    assert status.state is JobState.LOST
    assert "NODE_FAIL" in status.reason
    assert slurm.jobs(one.spec.job_id) == {one.handle.number: "NODE_FAIL"}


def test_a_job_waits_for_room_and_says_so(job):
    first = job(SLEEP, options=["--exclusive"]).start().up()
    second = job(options=["--exclusive"]).start()
    second.until(lambda: "(Priority)" not in second.status().reason, "tried by the scheduler")
    status = second.status()
    assert (status.state, status.reason) == (JobState.PENDING, "in Slurm's queue (Resources)")
    first.cancel()
    assert second.wait().state is JobState.SUCCEEDED


def test_a_job_is_found_by_its_name_where_the_answer_to_sbatch_was_lost(job):
    one = job(SLEEP).start()
    expected = SlurmLauncher().expected(one.spec)
    assert expected.number == 0
    assert SlurmLauncher().find(expected) == one.handle
    SlurmLauncher().cancel(expected)
    assert one.wait().state is JobState.LOST
    elsewhere = one.spec.record_dir.with_name("never")
    never = replace(expected, job_id="never/submitted", record_dir=elsewhere)
    assert SlurmLauncher().find(never) == never
    assert SlurmLauncher().status(never).state is JobState.LOST
    SlurmLauncher().cancel(never)


SUBMITS = """
import logging
from pathlib import PosixPath
from ddl_airflow.core.job import JobSpec
from ddl_airflow.launchers.slurm import SlurmLauncher
from ddl_airflow.steps.job import ScheduledJob
scheduled = ScheduledJob(SlurmLauncher(), logging.getLogger(), {kept!r}, {kept!r}.parent)
scheduled.submit({spec!r}, {progress!r})
"""


def test_no_second_job_beside_one_that_a_killed_task_has_asked_a_busy_controller_for(
    job, slurm, tmp_path
):
    """The controller reads what sbatch has sent, though sbatch has ended with its task."""
    one = job(SLEEP)
    kept = tmp_path / "run" / "airflow" / "job.json"
    kept.parent.mkdir(parents=True)
    script = SUBMITS.format(kept=kept, spec=one.spec, progress=tmp_path / "progress")
    controller = int((slurm.folder / "slurmctld.pid").read_text())
    os.kill(controller, signal.SIGSTOP)
    try:
        with subprocess.Popen([sys.executable, "-c", script]) as task:
            deadline = time.monotonic() + within(_WAIT_S)
            while not (sbatch := children(task.pid)):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(2)  # its words are on their way
            task.kill()
        assert gone(sbatch[0])
        waking = threading.Timer(2, os.kill, (controller, signal.SIGCONT))
        waking.start()
        next_try = ScheduledJob(SlurmLauncher(), logging.getLogger(), kept, kept.parent)
        left = next_try.adopt()
        waking.join()
    finally:
        os.kill(controller, signal.SIGCONT)
    one.handle = left.handle
    assert list(slurm.jobs(one.spec.job_id)) == [left.handle.number]


def gone(pid: int) -> bool:
    deadline = time.monotonic() + within(_WAIT_S)
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()


def children(pid: int) -> list[int]:
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_another_job_under_the_same_number_is_left_alone(job):
    one = job(SLEEP).start().up()
    elsewhere = one.spec.folder.parent / "another"
    places = {"record_dir": elsewhere / "records", "log_dir": elsewhere / "logs"}
    other = replace(one.handle, job_id="another/train-1", **places)
    SlurmLauncher().cancel(other)
    assert SlurmLauncher().status(other).ended
    assert one.status().state is JobState.RUNNING


def test_a_job_that_somebody_renames_is_still_ours(job, slurm):
    """It was taken for one that had ended, and a second one was submitted beside it."""
    one = job(SLEEP).start().up()
    number = str(one.handle.number)
    slurm.ask("scontrol", "update", f"JobId={number}", "JobName=urgent | of Ann")
    assert one.status().state is JobState.RUNNING
    # Though its task was killed before it had the answer.
    expected = SlurmLauncher().expected(one.spec)
    assert SlurmLauncher().find(expected) == one.handle
    never = replace(expected, job_id="never/submitted", record_dir=one.spec.record_dir / "other")
    assert SlurmLauncher().find(never) == never
    SlurmLauncher().cancel(expected)
    assert "CANCELLED" in one.wait().reason


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"partition": "cpuu"}, "partition.*launcher.partition; `sinfo` lists them"),
        ({"options": ["--constraint=v100"]}, "feature.*launcher.options"),
        ({"options": ["--no-such-option"]}, "unrecognized option.*launcher.options"),
        ({"options": ["--gres=gpu:1"]}, "gres.*knows no GPUs"),
    ],
)
def test_what_slurm_refuses_is_not_tried_again(job, settings, words):
    with pytest.raises(SubmitFailed, match=words) as caught:
        job(**settings).start()
    assert caught.value.retryable is False


@pytest.mark.parametrize(
    ("settings", "size", "words"),
    [
        ({"time_limit_s": 7200.0}, {}, "PartitionTimeLimit.*launcher.time_limit"),
        ({}, {"nodes": 3}, "asks for 3 nodes, and partition cpu has 2"),
        ({}, {"slots": 64}, "asks for 128 cores, and partition cpu has 16"),
    ],
)
def test_a_job_that_slurm_takes_and_never_starts_is_not_waited_for(job, settings, size, words):
    one = job(**size, **settings).start()
    status = one.wait()
    assert status.state is JobState.FAILED and status.permanent
    assert re.search(words, status.reason), status.reason


def test_only_one_job_works_in_an_experiment(job, tmp_path):
    lock = tmp_path / ".shared one.lock"
    first = job(SLEEP, nodes=1, lock=lock).start().up()
    second = job(nodes=1, lock=lock).start()
    assert second.wait().state is JobState.LOST
    who = f"another training works there now: {first.spec.job_id} on {socket.gethostname()}"
    assert who in second.said()
    first.cancel()
    first.wait()
    assert job(nodes=1, lock=lock).start().wait().state is JobState.SUCCEEDED


def test_a_job_is_that_of_the_user_that_ranks_run_as(trainer, monkeypatch):
    if reason := SlurmCluster.missing():
        pytest.skip(reason)
    # A cluster of its own: that user must be able to read how to reach it.
    place = trainer.place / "job"
    for folder in (trainer.place / "slurm", place, place / "code"):
        folder.mkdir()
        folder.chmod(0o755)
    (place / "code" / "main.py").write_text("import os; print(os.getuid(), os.environ['PARAM_X'])")
    (place / "code" / "long.py").write_text("import time; time.sleep(600)")
    spec = JobSpec(
        job_id="of-another/train-1",
        command="python main.py",
        nodes=2,
        slots=1,
        python=trainer.python,
        folder=place / "code",
        record_dir=place / "records",
        log_dir=place / "logs",
        env={"PARAM_X": "a"},
        lock=place / ".one.lock",
        user=trainer.name,
    )
    with SlurmCluster(trainer.place / "slurm") as slurm:
        for name, value in slurm.environment.items():
            monkeypatch.setenv(name, value)
        one = Job(spec, SlurmLauncher()).start()
        assert one.wait().state is JobState.SUCCEEDED, one.said()
        assert [one.log(rank) for rank in (0, 1)] == [f"{trainer.uid} a\n"] * 2
        records = [path.stat() for path in spec.record_dir.iterdir()]
        assert {(found.st_uid, found.st_mode & 0o777) for found in records} == (
            {(trainer.uid, 0o660)}
        )
        told = slurm.ask("scontrol", "show", "job", str(one.handle.number))
        assert f"UserId={trainer.name}(" in told
        command = {"command": "python long.py", "record_dir": place / "records-2"}
        long = replace(spec, job_id="of-another/train-2", **command)
        other = Job(long, SlurmLauncher()).start()
        other.until(lambda: other.status().state is JobState.RUNNING, "running")
        assert SlurmLauncher().find(replace(other.handle, number=0)) == other.handle
        other.cancel()
        # Its script may have ended before the shim was told, too.
        assert other.wait().state in (JobState.LOST, JobState.FAILED)
