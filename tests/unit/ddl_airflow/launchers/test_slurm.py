"""What the Slurm launcher asks for, and what it makes of answers that were recorded from Slurm
22.05. A real cluster is in tests/integration/test_slurm_launcher.py.
"""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ddl_airflow.core.errors import LaunchError, SubmitFailed
from ddl_airflow.core.job import JobHandle, JobSpec, JobState
from ddl_airflow.core.manifest import load_manifest_text
from ddl_airflow.core.plan import plan
from ddl_airflow.launchers.registry import launcher
from ddl_airflow.launchers.slurm import SlurmLauncher

SPEC = JobSpec(
    job_id="digits-manual-1a2b/train-1",
    command="python train.py --name 'a b'",
    nodes=2,
    slots=4,
    python="/opt/train/bin/python",
    folder=Path("/shared/50% of runs/code"),
    record_dir=Path("/shared/records"),
    log_dir=Path("/shared/50% of runs/logs"),
    env={"DATA_DIR": "/shared/data"},
    gpu=True,
    lock=Path("/shared/experiments/.digits wide.lock"),
)
JOB = (
    "JobId=12 JobName=digits-manual-1a2b/train-1 UserId=u(1) Account=(null) {} Requeue=0 "
    "SubmitTime=2026-11-21T17:27:44 StartTime=2026-11-21T18:28:45 Partition=gpu "
    "NodeList=n[1-2] NumNodes=2 NumCPUs=8 Command=(null) WorkDir=/shared/50% of runs/code Power= "
)
PARTITION = (
    "PartitionName=gpu MaxNodes={} State=UP TotalCPUs={} TotalNodes={} SelectTypeParameters="
)
AWAY = "Unable to contact slurm controller (connect failure)"


@pytest.fixture
def says(tmp_path, monkeypatch):
    """says(program, output, error, code): a program of that name on PATH says it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))  # and no other Slurm

    def make(program, output="", error="", code=0, when=""):
        path = folder / program
        text = path.read_text() if path.exists() else "#!/bin/sh\n"
        text += (
            f'case "$*" in *{shlex.quote(when)}*) printf %s {shlex.quote(output)}; '
            f"printf %s {shlex.quote(error)} >&2; exit {code};; esac\n"
        )
        path.write_text(text)
        path.chmod(0o755)

    return make


@pytest.fixture
def handle(tmp_path):
    return JobHandle("slurm", SPEC.job_id, 12, 2, tmp_path / "records", tmp_path / "logs")


def test_the_script_asks_for_everything(golden):
    launcher = SlurmLauncher("gpu", "vision", 5401.0, ["--qos=high", '--comment=a "b" \\c'])
    golden("slurm_full.txt", f"{launcher.render(SPEC)}\n")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (75, "another training works there now: digits/train-3 on n7. Wait for its end"),
        (71, "flock ended with 71. Mount the workspace there with locks"),
    ],
)
def test_the_script_tells_a_taken_lock_from_one_that_cannot_be_had(tmp_path, says, code, words):
    says("flock", code=code)
    lock = tmp_path / "of one.lock"
    lock.write_text("digits/train-3 on n7")
    script = SlurmLauncher().render(replace(SPEC, lock=lock)).script
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    ran = subprocess.run(
        ["/bin/bash"], input=script, env={"PATH": path}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == code
    assert words in ran.stderr and len(ran.stderr.splitlines()) == 1, ran.stderr


def test_the_script_asks_for_no_more_than_it_must(golden):
    spec = replace(SPEC, python="python3", gpu=False, lock=None)
    golden("slurm_least.txt", f"{SlurmLauncher().render(spec)}\n")


def test_no_value_of_the_environment_is_in_the_script(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("AIRFLOW_CONN_X", "aws://key:secret@")
    submission = SlurmLauncher().render(replace(SPEC, env={"PARAM_X": "of this run"}))
    assert "of this run" not in str(submission)
    assert submission.env["PARAM_X"] == "of this run"
    assert not {"CUDA_VISIBLE_DEVICES", "AIRFLOW_CONN_X", "TMPDIR"} & submission.env.keys()


def submitted(tmp_path):
    spec = replace(SPEC, record_dir=tmp_path / "records", log_dir=tmp_path / "logs")
    launcher = SlurmLauncher()
    return launcher.submit(launcher.render(spec))


@pytest.mark.parametrize("answer", ["4711\n", "4711;cluster\n"])
def test_the_number_is_what_sbatch_says(tmp_path, says, answer):
    says("sbatch", answer)
    assert submitted(tmp_path).number == 4711


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            "launcher.partition",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition "
            "combination specified",
            "launcher.account",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing "
            "or exceeds some limit)",
            "launcher.time_limit",
        ),
        (
            "sbatch: error: Batch job submission failed: Requested node configuration is not "
            "available",
            "Lower nodes",
        ),
        (
            "sbatch: error: Batch job submission failed: User's group not permitted to use this "
            "partition",
            "ask for access",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "options"),
        (
            "sbatch: unrecognized option '--x'\nTry \"sbatch --help\" for more information",
            "unrecognized option '--x'. Correct launcher.options",
        ),
    ],
)
def test_a_refusal_names_its_fix_and_is_not_retried(tmp_path, says, said, fix):
    says("sbatch", error=said, code=1)
    with pytest.raises(SubmitFailed, match="Slurm does not take the job: ") as caught:
        submitted(tmp_path)
    assert fix in str(caught.value)
    assert caught.value.retryable is False


@pytest.mark.parametrize(
    "said",
    [
        f"sbatch: error: Batch job submission failed: {AWAY}",
        "sbatch: error: Batch job submission failed: Protocol authentication error",
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
        "submit limit, user's size and/or time limits)",
        "",
    ],
)
def test_what_may_pass_is_tried_again(tmp_path, says, said):
    says("sbatch", error=said, code=1)
    with pytest.raises(SubmitFailed) as caught:
        submitted(tmp_path)
    assert caught.value.retryable is True


def test_a_host_without_slurm_says_so(tmp_path, says):
    with pytest.raises(SubmitFailed, match="sbatch is not on PATH of this host") as caught:
        submitted(tmp_path)
    assert caught.value.retryable is False


@pytest.mark.parametrize(
    ("told", "state", "reason"),
    [
        ("JobState=RUNNING Reason=None", "running", "on n[1-2], after 1:01:01 in Slurm's queue"),
        ("JobState=COMPLETING Reason=None", "running", "on n[1-2]"),
        ("JobState=A_NEW_ONE Reason=None", "running", "on n[1-2]"),
        ("JobState=PENDING Reason=Resources", "pending", "in Slurm's queue (Resources)"),
        ("JobState=CONFIGURING Reason=None", "pending", "in Slurm's queue (None)"),
        ("JobState=COMPLETED Reason=None", "lost", ""),
        ("JobState=FAILED Reason=NonZeroExitCode", "lost", ""),
        ("JobState=FAILED Reason=JobLaunchFailure", "lost", "must be a file system that all"),
        ("JobState=TIMEOUT Reason=TimeLimit", "lost", "Raise launcher.time_limit"),
        ("JobState=OUT_OF_MEMORY Reason=OutOfMemory", "lost", "--mem=16G"),
    ],
)
def test_states(says, handle, told, state, reason):
    says("scontrol", JOB.format(told))
    status = SlurmLauncher().status(handle)
    assert status.state is JobState(state)
    assert reason in status.reason
    assert not status.permanent


@pytest.mark.parametrize(
    ("reason", "partition", "never"),
    [
        ("PartitionTimeLimit", ("UNLIMITED", 8, 2), "launcher.time_limit is longer"),
        ("InvalidAccount", ("UNLIMITED", 8, 2), "launcher.account"),
        ("PartitionNodeLimit", ("UNLIMITED", 8, 1), "2 nodes, and partition gpu has 1"),
        ("PartitionNodeLimit", ("1", 8, 2), "2 nodes, and partition gpu allows 1"),
        ("PartitionConfig", ("UNLIMITED", 7, 2), "8 cores, and partition gpu has 7"),
        # Its nodes are down: that passes.
        ("PartitionNodeLimit", ("UNLIMITED", 8, 2), ""),
        ("PartitionDown", ("UNLIMITED", 8, 2), ""),
    ],
)
def test_a_job_that_can_never_start_is_told_from_one_that_waits(
    says, handle, reason, partition, never
):
    says("scontrol", PARTITION.format(*partition), when="show partition gpu")
    says("scontrol", JOB.format(f"JobState=PENDING Reason={reason}"))
    status = SlurmLauncher().status(handle)
    assert (status.state, status.permanent) == (
        (JobState.FAILED, True) if never else (JobState.PENDING, False)
    )
    assert (never or f"({reason})") in status.reason


def test_a_controller_that_is_away_is_no_end_of_a_job(says, handle):
    says("scontrol", error=f"slurm_load_jobs error: {AWAY}", code=1)
    for ask in (SlurmLauncher().status, SlurmLauncher().cancel):
        with pytest.raises(LaunchError, match="connect failure.*Is Slurm's controller up"):
            ask(handle)


def test_a_job_that_slurm_has_forgotten_ended_as_its_ranks_say(says, handle):
    says("scontrol", error="slurm_load_jobs error: Invalid job id specified", code=1)
    assert SlurmLauncher().status(handle).state is JobState.LOST
    handle.record_dir.mkdir()
    for rank in (0, 1):
        record = f'{{"rank": {rank}, "host": "n{rank}", "ended": 1.0, "exit_code": 0}}'
        (handle.record_dir / f"rank-{rank}.json").write_text(record)
    assert SlurmLauncher().status(handle).state is JobState.SUCCEEDED
    SlurmLauncher().cancel(handle)  # nothing to cancel


def test_the_manifest_in_the_documentation_is_one():
    page = Path(__file__).parents[4] / "docs" / "slurm.md"
    shown = page.read_text().partition("```yaml\n")[2].partition("```")[0]
    folders = (
        "training_data_reference: {type: fs, source: {path: ./data}}\n"
        "training_results_reference: {type: fs, target: {path: ./results}}\n"
    )
    train = plan(load_manifest_text(shown + folders, "slurm.md"), page).train
    assert (train.nodes, train.slots, train.gpu) == (2, 4, True)
    job = replace(SPEC, nodes=train.nodes, slots=train.slots, gpu=train.gpu)
    script = launcher(train.launcher, train.scheduler).render(job).script
    asked = ("nodes=2", "gres=gpu:4", "partition=gpu", "account=vision", "time=720", "mem=64G")
    for option in asked:
        assert f"#SBATCH --{option}\n" in script
