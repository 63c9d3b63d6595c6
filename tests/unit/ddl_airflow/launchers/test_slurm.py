"""What the Slurm launcher asks for, and what it makes of answers that were recorded from Slurm
22.05. A real cluster is in tests/integration/test_slurm_launcher.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import ddl_ops
import pytest

from ddl_airflow.core.errors import LaunchError, SubmitFailed
from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus, StartedJob
from ddl_airflow.core.manifest.load import load_manifest_text
from ddl_airflow.core.plan import plan
from ddl_airflow.launchers.registry import launcher
from ddl_airflow.launchers.slurm import MAKE_ROOM, SlurmLauncher
from tests.limits import within

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
JOB = "{}|{}|{}|n[1-2]|2026-11-21T17:27:44|2026-11-21T18:28:45|0:05|{}|2|8|{}|{}"


def queued(
    state, reason="None", number=12, name=SPEC.job_id, *, partition="gpu", folder="/elsewhere"
):
    """What squeue prints of a job."""
    form = JOB.replace("|", "\x1f")
    return f"{form.format(number, state, reason, partition, name, folder)}\x1e\n"


HEADER = queued("STATE", "REASON", "JOBID", "NAME", partition="PARTITION", folder="WORK_DIR")
PARTITION = (
    "PartitionName=gpu MaxNodes={} State=UP TotalCPUs={} TotalNodes={} SelectTypeParameters="
)
AWAY = "Unable to contact slurm controller (connect failure)"


@pytest.fixture
def says(tmp_path, monkeypatch):
    """says(program, output, error, code): a program of that name on PATH says it; squeue, after
    its header.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))  # and no other Slurm

    def make(program, output="", error="", code=0, when=""):
        if program == "squeue" and not code:
            output = HEADER + output
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


@pytest.fixture
def started(tmp_path, says):
    """started(lock, keep): the script has run on a node, with an mpirun that says that it did."""
    says("mpirun", "mpirun ran")

    def run(lock, keep=None, folder=None):
        # One beside the Python would be taken.
        python = shutil.which("python3", path="/usr/bin:/bin")
        spec = replace(SPEC, python="python3", lock=lock, keep=keep, folder=folder or tmp_path)
        submission = SlurmLauncher(preflight=False).render(spec)
        env = {
            "PATH": f"{tmp_path / 'bin'}:{Path(python).parent}:/bin",
            "PYTHONPATH": str(Path(ddl_ops.__file__).parents[1]),
        }
        return subprocess.run(
            ["/bin/bash"],
            input=submission.script,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_the_script_runs_in_the_folder_of_the_code_or_not_at_all(tmp_path, started):
    """Slurm would start it in /tmp, where that is not on the node."""
    code = tmp_path / "the code's"
    ran = started(tmp_path / ".lock", folder=code)
    assert (ran.returncode, ran.stdout) == (1, "") and "No such file or directory" in ran.stderr
    code.mkdir()
    Path(shutil.which("mpirun")).write_text("#!/bin/sh\npwd\n")
    assert started(tmp_path / ".lock", folder=code).stdout == f"{code}\n"


def test_the_script_leaves_a_copy_of_a_named_experiment(tmp_path, started):
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "weights").write_text("7")
    ran = started(tmp_path / ".wide.lock", (tmp_path / "wide", tmp_path / "copy"))
    assert (ran.returncode, ran.stdout) == (0, "mpirun ran"), ran.stderr
    assert (tmp_path / "copy" / "weights").read_text() == "7"


# Says what it was sent, and ends then.
LISTENS = """#!/bin/sh
trap 'echo {name}; exit 3' {name}
: > "{up}"
while :; do /bin/sleep 0.05; done
"""


@pytest.mark.parametrize("name", ["USR1", "USR2", "URG"])
def test_what_warns_a_job_reaches_mpirun_where_the_experiment_has_a_name(tmp_path, says, name):
    """``sbatch --signal=B:USR1@120``, and ``B:USR2``; URG is ours."""
    says("mpirun")
    up = tmp_path / "up"
    Path(shutil.which("mpirun")).write_text(LISTENS.format(name=name, up=up))
    (tmp_path / "wide").mkdir()
    keep = ["--keep", str(tmp_path / "wide"), str(tmp_path / "copy")]
    locked = [sys.executable, "-m", "ddl_ops.locked", *keep, str(tmp_path / ".lock"), "it", "--"]
    with subprocess.Popen([*locked, shutil.which("mpirun")], stdout=subprocess.PIPE) as process:
        deadline = time.monotonic() + within(20)
        while not up.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(getattr(signal, f"SIG{name}"))
        said, _ = process.communicate(timeout=within(20))
    assert (said.decode().split(), process.returncode) == ([name], 3)
    assert not (tmp_path / "copy").exists()


def test_the_script_holds_the_lock_and_says_who(tmp_path, started):
    lock = tmp_path / "of one.lock"
    ran = started(lock)
    assert (ran.returncode, ran.stdout) == (0, "mpirun ran"), ran.stderr
    assert lock.read_text().startswith("digits-manual-1a2b/train-1 on ")
    with lock.open("r+") as file:
        file.truncate(0)
        file.write("digits/train-3 on n7")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        ran = started(lock)
    assert (ran.returncode, ran.stdout) == (75, "")
    words = "another training works there now: digits/train-3 on n7. Wait for its end"
    assert words in ran.stderr and len(ran.stderr.splitlines()) == 1, ran.stderr


@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_place_of_the_lock_is_not_written_through(tmp_path, started, there):
    precious, lock = tmp_path / "precious", tmp_path / "of one.lock"
    if there:
        precious.write_text("of another")
    lock.symlink_to(precious)
    ran = started(lock)
    assert (ran.returncode, ran.stdout) == (77, "")
    assert f"cannot lock {lock}" in ran.stderr and "remove it" in ran.stderr
    assert precious.exists() == there
    assert not there or precious.read_text() == "of another"


def test_a_pipe_in_place_of_the_lock_is_refused(tmp_path, started):
    os.mkfifo(tmp_path / "of one.lock")
    assert started(tmp_path / "of one.lock").returncode == 77


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


@pytest.mark.parametrize(
    "answer",
    ["4711\n", "4711;cluster\n", "Welcome, 12 users\n4711\n", "4711\nIt may wait 12\n", "4711"],
)
def test_the_number_is_what_sbatch_says(tmp_path, says, answer, caplog):
    caplog.set_level("INFO")
    warning = "sbatch: Warning: can't run 1 processes on 2 nodes, setting nnodes to 1\n"
    says("sbatch", answer, warning)
    assert submitted(tmp_path).number == 4711
    assert [text for text in caplog.messages if "nnodes" in text] == [warning.strip()]


@pytest.mark.parametrize("answer", ["", "Submitted. Have a nice day\n"])
@pytest.mark.parametrize("taken", [True, False])
def test_a_job_of_which_sbatch_says_no_number_is_looked_for(tmp_path, says, answer, taken):
    """It ended the task by a ValueError, and its job ran on."""
    says("sbatch", answer)
    says("squeue", queued("PENDING", number=4712) if taken else "")
    if taken:
        assert submitted(tmp_path).number == 4712
        return
    with pytest.raises(LaunchError, match="sbatch: its answer cannot be read") as caught:
        submitted(tmp_path)
    assert caught.value.retryable and not isinstance(caught.value, SubmitFailed)


def test_a_job_that_went_to_another_cluster_has_not_ended(tmp_path, says):
    """By a script of the site's (``sbatch -M``): it counted as ended, and a second one followed."""
    says("sbatch", "4711;rigi\n")
    says("scontrol", CONFIG.format("alps"), when="show config")
    says("squeue", queued("RUNNING", number=4711, name="of/another"))
    mine = submitted(tmp_path)
    for ask in (SlurmLauncher().status, SlurmLauncher().cancel):
        with pytest.raises(LaunchError, match="cluster alps .*job 4711 .* rigi.*SLURM_CONF"):
            ask(mine)


@pytest.mark.parametrize("there", [True, False])
def test_a_job_that_was_renamed_before_its_number_was_known_is_found(says, handle, there):
    """By the folder that it works in: a second one was submitted beside it."""
    ours = queued("PENDING", number=14, name="urgent", folder=handle.record_dir)
    others = [
        queued("RUNNING", number="13_4", name="an array"),
        queued("RUNNING", number=15, name="of\x1fa\x1ehostile\nuser"),
        queued("RUNNING", number=16, name="try 2", folder=handle.record_dir.parent / "records-2"),
        queued("RUNNING", number=17, name="below", folder=handle.record_dir / "deeper"),
    ]
    says("squeue", "", when="--name=")
    says("squeue", "".join([*others, ours if there else ""]), when="--me --all")
    lost = replace(handle, number=0)
    assert SlurmLauncher().find(lost).number == (14 if there else 0)


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
    ("said", "refused"),
    [
        (f"sbatch: error: Batch job submission failed: {AWAY}", False),
        (
            "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
            False,
        ),
        ("sbatch: error: Batch job submission failed: Protocol authentication error", True),
        (
            "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job "
            "submit limit, user's size and/or time limits)",
            True,
        ),
        ("", False),
    ],
)
def test_what_may_pass_is_tried_again(tmp_path, says, said, refused):
    """The next try looks for the job where Slurm did not say that it has none."""
    says("sbatch", error=said, code=1)
    with pytest.raises(SubmitFailed) as caught:
        submitted(tmp_path)
    assert (caught.value.retryable, caught.value.refused) == (True, refused)


def test_a_job_that_slurm_took_though_it_answered_too_late_is_found(tmp_path, says):
    late = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    says("sbatch", error=late, code=1)
    says("squeue", queued("PENDING", number=4712))
    assert submitted(tmp_path).number == 4712


# Says why it waits, and does not come to an end.
BUSY = """#!/bin/sh
echo "sbatch: Slurm job queue full, sleeping and retrying" >&2
exec /bin/sleep 60
"""


@pytest.mark.parametrize("taken", [True, False])
def test_a_controller_that_keeps_sbatch_waiting_leaves_no_job_that_nobody_watches(
    tmp_path, says, monkeypatch, taken
):
    monkeypatch.setattr("ddl_airflow.launchers.slurm._SUBMIT_S", 0.5)
    says("sbatch")
    Path(shutil.which("sbatch")).write_text(BUSY)
    says("squeue", queued("PENDING", number=4712) if taken else "")
    if taken:
        assert submitted(tmp_path).number == 4712
        return
    with pytest.raises(LaunchError, match="sbatch gave no answer .*: Slurm job queue full"):
        submitted(tmp_path)


SUBMITS = """
from pathlib import PosixPath
from ddl_airflow.core.job import JobSpec
from ddl_airflow.launchers.slurm import SlurmLauncher
launcher = SlurmLauncher()
launcher.submit(launcher.render({spec!r}))
"""
# As a script of the site's, which starts what has Slurm take the job after a while.
SLOW = """#!/bin/sh
/bin/sh -c 'echo $$ > "{here}/up"; /bin/sleep 600'
"""


@pytest.mark.parametrize("ends", ["its task is killed", "it takes too long"])
def test_an_sbatch_that_nobody_waits_for_submits_nothing(tmp_path, says, monkeypatch, ends):
    """Nor one whose task cannot end it, for it is killed or stands still: another try may begin."""
    killed, up = ends == "its task is killed", tmp_path / "up"
    says("sbatch")
    Path(shutil.which("sbatch")).write_text(SLOW.format(here=tmp_path))
    spec = replace(SPEC, record_dir=tmp_path / "records", log_dir=tmp_path / "logs", lock=None)
    script = SUBMITS.format(spec=spec)
    if not killed:
        script = script.replace(
            "launcher =", "import ddl_airflow.launchers.slurm as s; s._SUBMIT_S = 1.0; launcher ="
        )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as task:
        deadline = time.monotonic() + within(20)
        while not up.exists() or not up.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        task.send_signal(signal.SIGKILL if killed else signal.SIGSTOP)
        try:
            while Path("/proc", up.read_text().strip()).exists():
                assert time.monotonic() < deadline, "sbatch goes on"
                time.sleep(0.02)
        finally:
            task.kill()
            with suppress(ProcessLookupError):
                os.kill(int(up.read_text()), signal.SIGKILL)


def test_a_refusal_has_all_that_the_sites_plug_in_says(tmp_path, says):
    said = (
        "sbatch: error: Please give --account and --time.\n"
        "sbatch: error: Batch job submission failed: Unspecified error\n"
    )
    says("sbatch", error=said, code=1)
    words = "Please give --account and --time; Batch job submission failed: Unspecified error"
    with pytest.raises(SubmitFailed, match=words):
        submitted(tmp_path)


def test_a_job_in_a_partition_that_slurm_hides_is_found(says, handle):
    """It would be submitted a second time."""
    says("squeue", queued("PENDING"), when="--me --all")
    says("squeue", queued("PENDING", "PartitionNodeLimit"), when="--all")
    says("scontrol", PARTITION.format("1", 8, 2), when="--all --oneliner show partition gpu")
    slurm, lost = SlurmLauncher(), replace(handle, number=0)
    assert slurm.find(lost).number == 12
    assert "partition gpu allows 1" in slurm.status(lost).reason


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to run as another user")
def test_a_host_without_what_starts_its_commands_says_so(tmp_path, says, handle):
    says("squeue", queued("PENDING"))
    (tmp_path / "bin" / "timeout").write_text("not a program")  # as one that nobody may run
    with pytest.raises(SubmitFailed, match="timeout: Permission denied. Install it") as caught:
        SlurmLauncher().status(replace(handle, user="nobody"))
    assert caught.value.retryable is False


def test_a_host_without_slurm_says_so(tmp_path, says):
    with pytest.raises(SubmitFailed, match="sbatch is not on PATH of this host") as caught:
        submitted(tmp_path)
    assert caught.value.retryable is False


@pytest.mark.parametrize(
    ("told", "state", "reason"),
    [
        ("RUNNING None", "running", "on n[1-2], after 1:01:01 in Slurm's queue"),
        ("COMPLETING None", "running", "on n[1-2]"),
        ("A_NEW_ONE None", "running", "on n[1-2]"),
        ("PENDING Resources", "pending", "in Slurm's queue (Resources)"),
        ("CONFIGURING None", "pending", "in Slurm's queue (None)"),
        ("COMPLETED None", "lost", ""),
        ("FAILED NonZeroExitCode", "lost", ""),
        ("FAILED JobLaunchFailure", "lost", "must be a file system that all"),
        ("TIMEOUT TimeLimit", "lost", "Raise launcher.time_limit"),
        ("OUT_OF_MEMORY OutOfMemory", "lost", "--mem=16G"),
        ("PREEMPTED None", "preempted", "had to make room"),
        ("NODE_FAIL None", "lost", "a node failed"),
        ("SUSPENDED None", "running", "suspended, on n[1-2]"),
        ("STOPPED None", "running", "stopped, on n[1-2]"),
        ("REQUEUED BeginTime", "pending", "in Slurm's queue (BeginTime)"),
        ("REQUEUE_HOLD job_requeued_in_held_state", "pending", "(job_requeued_in_held_state)"),
        ("RESV_DEL_HOLD Reservation", "pending", "in Slurm's queue (Reservation)"),
    ],
)
def test_states(says, handle, told, state, reason):
    says("squeue", queued(*told.split()))
    status = SlurmLauncher().status(handle)
    assert status.state is JobState(state)
    assert reason in status.reason
    assert not status.permanent


# Prints the fields that it is asked for, and as Slurm does: times of its own zone, which is TZ's.
SQUEUE = """#!/bin/sh
for word; do case $word in --format=*) form=${{word#--format=}};; esac; done
echo "$form"
now=$(/bin/date +%FT%T)
echo "$form" | /bin/sed "s/%i/12/; s/%T/RUNNING/; s/%r/None/; s/%N/n1/; s/%V/$now/; s/%S/$now/
s/%M/{ran}/; s/%P/gpu/; s/%D/2/; s/%C/8/; s#%j#{name}#; s/%Z/elsewhere/"
"""


@pytest.mark.parametrize(
    ("ran", "state"),
    [
        ("0:05", JobState.FAILED),
        ("9:59", JobState.FAILED),
        ("INVALID", JobState.FAILED),
        ("10:00", JobState.RUNNING),
        ("1:00:05", JobState.RUNNING),
        ("2-00:00:05", JobState.RUNNING),
    ],
)
@pytest.mark.parametrize("zone", ["UTC0", "EARLY-9", "LATE+9"])
def test_ranks_on_wrong_hosts_are_noticed_early_whatever_the_time_zone(
    tmp_path, says, handle, monkeypatch, zone, ran, state
):
    """Later that is known at the end: reading all records takes its time."""
    says("squeue")
    Path(shutil.which("squeue")).write_text(SQUEUE.format(ran=ran, name=SPEC.job_id))
    handle.record_dir.mkdir()
    for rank in (0, 1):
        (handle.record_dir / f"rank-{rank}.json").write_text(f'{{"rank": {rank}, "host": "n1"}}')
    with monkeypatch.context() as changed:
        changed.setenv("TZ", zone)
        time.tzset()
        status = SlurmLauncher().status(replace(handle, nodes=2))
    time.tzset()
    assert status.state is state, status.reason


@pytest.mark.parametrize(
    ("reason", "partition", "never"),
    [
        ("PartitionTimeLimit", ("UNLIMITED", 8, 2), "launcher.time_limit is longer"),
        ("InvalidAccount", ("UNLIMITED", 8, 2), "launcher.account"),
        ("PartitionNodeLimit", ("UNLIMITED", 8, 1), "2 nodes, and partition gpu has 1"),
        ("PartitionNodeLimit", ("1", 8, 2), "2 nodes, and partition gpu allows 1"),
        ("PartitionConfig", ("UNLIMITED", 7, 2), "8 cores, and partition gpu has 7"),
        ("ReservationDeleted", ("UNLIMITED", 8, 2), "its reservation is gone"),
        ("QOSMaxWallDurationPerJobLimit", ("UNLIMITED", 8, 2), "launcher.time_limit"),
        ("QOSMaxGRESPerJob", ("UNLIMITED", 8, 2), "one job may not have so much"),
        ("AssocMaxNodePerJobLimit", ("UNLIMITED", 8, 2), "one job may not have so much"),
        # What others of the account, or of the user, have now passes, too.
        ("QOSMaxCpuMinutesPerJobLimit", ("UNLIMITED", 8, 2), ""),
        ("QOSMaxJobsPerUserLimit", ("UNLIMITED", 8, 2), ""),
        ("AssocGrpNodeLimit", ("UNLIMITED", 8, 2), ""),
        # Its nodes are down: that passes.
        ("PartitionNodeLimit", ("UNLIMITED", 8, 2), ""),
        ("PartitionDown", ("UNLIMITED", 8, 2), ""),
    ],
)
def test_a_job_that_can_never_start_is_told_from_one_that_waits(
    says, handle, reason, partition, never
):
    says("scontrol", PARTITION.format(*partition), when="show partition gpu")
    says("squeue", queued("PENDING", reason))
    status = SlurmLauncher().status(handle)
    assert (status.state, status.permanent) == (
        (JobState.FAILED, True) if never else (JobState.PENDING, False)
    )
    assert (never or f"({reason})") in status.reason


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("PartitionTimeLimit", JobState.PENDING),
        ("PartitionNodeLimit", JobState.PENDING),
        ("PartitionConfig", JobState.PENDING),
        ("AccountNotAllowed", JobState.PENDING),
        ("QOSNotAllowed", JobState.PENDING),
        ("InvalidAccount", JobState.FAILED),
    ],
)
def test_a_job_for_several_partitions_waits_for_any_of_them(says, handle, reason, state):
    """Slurm's reason is of the one that it has looked at last."""
    says("scontrol", error="Partition gpu,long not found", code=1)
    says("squeue", queued("PENDING", reason, partition="gpu,long"))
    assert SlurmLauncher().status(handle).state is state


def test_a_partition_of_which_nothing_is_known_keeps_no_job_from_being_looked_at(says, handle):
    says("scontrol", error="slurm_load_partitions error: Access/permission denied", code=1)
    says("squeue", queued("PENDING", "PartitionConfig") + queued("RUNNING", "None", 13, "other"))
    slurm = SlurmLauncher()
    handles = [handle, replace(handle, number=13, job_id="other")]
    said = [slurm.conclude(h, t) for h, t in zip(handles, slurm.ask(handles), strict=True)]
    assert [status.state for status in said] == [JobState.PENDING, JobState.RUNNING]


def test_jobs_are_asked_for_together(says, handle, tmp_path):
    """Also those that the controller has forgotten; and no number is taken for another's job."""
    others = {12: SPEC.job_id, 13: "digits/train-2", 14: "a|b", 15: "gone", 16: "away", 17: "x"}
    lines = [queued("RUNNING"), queued("PENDING", "Priority", 13, "not/mine")]
    says(
        "squeue",
        "".join([*lines, queued("PENDING", "Priority", 14, "a|b")]),
    )
    accounted = "13|COMPLETED|/x|digits/train-2\n15|CANCELLED by 7|/x|gone\n16|RUNNING|/x|away\n"
    says("sacct", accounted.replace("|", "\x1f"))
    handles = [replace(handle, number=n, job_id=name) for n, name in others.items()]
    slurm = SlurmLauncher()
    said = [slurm.conclude(h, told) for h, told in zip(handles, slurm.ask(handles), strict=True)]
    assert [status.state.value for status in said] == [
        *("running", "lost", "pending", "lost", "lost", "lost")
    ]
    assert "somebody cancelled it" in said[3].reason
    assert (said[1].reason, said[4].reason) == ("", "")


def test_a_job_that_was_renamed_is_known_by_where_it_works(says, handle, tmp_path):
    """By ``scontrol update JobName``: it was taken for another's, and so for one that has ended."""
    renamed = {"name": "urgent | of Ann", "folder": f"{tmp_path}/a | b/code"}
    says("squeue", queued("RUNNING", **renamed))
    says("scancel", "cancelled")
    slurm = SlurmLauncher()
    assert slurm.status(handle).state is JobState.RUNNING
    Path(shutil.which("scancel")).write_text(f"#!/bin/sh\necho $1 > {tmp_path}/cancelled\n")
    slurm.cancel(handle)
    assert (tmp_path / "cancelled").read_text() == "12\n"
    Path(shutil.which("squeue")).unlink()
    says("squeue")  # forgotten
    says("sacct", f"12|TIMEOUT|{tmp_path}/code|urgent\n".replace("|", "\x1f"))
    assert "TIMEOUT" in slurm.status(handle).reason


def test_a_reason_may_say_anything(says, handle):
    """What Slurm or a plug-in wrote of a job is shown in place of the reason."""
    says("squeue", queued("PENDING", "held | by Ann\u2028see\nher mail"))
    status = SlurmLauncher().status(handle)
    assert (status.state, "held | by Ann" in status.reason) == (JobState.PENDING, True)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Welcome, 12 users\n",
        HEADER + queued("RUNNING")[:30],
        HEADER + "12\x1fRUNNING\x1e\n",
        HEADER + queued("RUNNING", number="12_3"),
    ],
    ids=["nothing", "other words", "cut off", "other fields", "other jobs"],
)
def test_an_answer_that_cannot_be_read_is_no_end_of_a_job(says, handle, answer):
    """As of a script of the site's own in Slurm's place."""
    says("squeue")
    squeue = Path(shutil.which("squeue"))
    squeue.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(answer)}\n")
    for ask in (SlurmLauncher().status, SlurmLauncher().cancel, SlurmLauncher().find):
        with pytest.raises(LaunchError, match="squeue: its answer cannot be read") as caught:
            ask(replace(handle, number=0) if ask.__name__ == "find" else handle)
        assert caught.value.retryable


def test_what_a_site_says_before_the_answer_is_no_part_of_it(says, handle):
    says("squeue")
    answer = f"Welcome, 12 users\n{HEADER}{queued('RUNNING')}Good-bye\n"
    Path(shutil.which("squeue")).write_text(f"#!/bin/sh\nprintf %s {shlex.quote(answer)}\n")
    assert SlurmLauncher().status(handle).state is JobState.RUNNING
    assert SlurmLauncher().find(replace(handle, number=0)).number == 12


CONFIG = (
    "Configuration data as of now\nClusterName             = {}\nCommunicationParameters = (null)\n"
)


@pytest.mark.parametrize("answer", ["", queued("RUNNING", name="of/another")])
def test_the_controller_of_another_cluster_does_not_say_that_a_job_has_ended(
    tmp_path, says, handle, answer
):
    """Where SLURM_CONF, or what it names, is another one's: the job was left running."""
    says("sbatch", "12\n")
    says("scontrol", CONFIG.format("alps"), when="show config")
    assert (mine := submitted(tmp_path)).place == "alps"
    says("squeue", answer)
    assert SlurmLauncher().status(mine).state is JobState.LOST
    Path(shutil.which("scontrol")).unlink()
    says("scontrol", CONFIG.format("rigi"), when="show config")
    for ask in (SlurmLauncher().status, SlurmLauncher().cancel):
        with pytest.raises(
            LaunchError, match="cluster rigi .*job 12 .* alps.*SLURM_CONF"
        ) as caught:
            ask(mine)
        assert caught.value.retryable


def test_the_accounting_is_not_waited_for(says, handle, monkeypatch):
    monkeypatch.setattr("ddl_airflow.launchers.slurm._ACCOUNTING_S", 0.2)
    says("squeue")
    says("sacct")
    script = Path(shutil.which("sacct"))
    script.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    assert SlurmLauncher().status(handle).state is JobState.LOST


def test_a_controller_that_is_away_is_no_end_of_a_job(says, handle):
    says("squeue", error=f"slurm_load_jobs error: {AWAY}", code=1)
    for ask in (SlurmLauncher().status, SlurmLauncher().cancel):
        with pytest.raises(LaunchError, match="connect failure.*Is Slurm's controller up"):
            ask(handle)


def test_a_user_whom_nobody_knows_for_a_moment_is_no_end_of_a_job(says, handle):
    """As where the directory of users does not answer."""
    for ask in (SlurmLauncher().status, SlurmLauncher().cancel):
        with pytest.raises(LaunchError, match="no user nobody-knows.*getent passwd") as caught:
            ask(replace(handle, user="nobody-knows"))
        assert caught.value.retryable


def test_a_job_that_slurm_has_forgotten_ended_as_its_ranks_say(says, handle):
    says("squeue", error="slurm_load_jobs error: Invalid job id specified", code=1)
    assert SlurmLauncher().status(handle).state is JobState.LOST
    handle.record_dir.mkdir()
    for rank in (0, 1):
        record = f'{{"rank": {rank}, "host": "n{rank}", "ended": 1.0, "exit_code": 0}}'
        (handle.record_dir / f"rank-{rank}.json").write_text(record)
    assert SlurmLauncher().status(handle).state is JobState.SUCCEEDED
    SlurmLauncher().cancel(handle)  # nothing to cancel


@pytest.mark.parametrize("state", ["COMPLETED", "TIMEOUT"])
def test_ranks_that_trained_apart_have_failed_whoever_looks(says, handle, state):
    handle.record_dir.mkdir()
    for rank in (0, 1):
        record = f'{{"rank": {rank}, "host": "n{rank}", "ended": 1.0, "exit_code": 0}}'
        (handle.record_dir / f"rank-{rank}.json").write_text(record)
    says("squeue", queued(state))
    assert SlurmLauncher().status(handle).state is JobState.SUCCEEDED
    # As the trigger has it, and a later process: out of what the task that submitted it noted.
    expected = SlurmLauncher().expected(replace(SPEC, averages=True))
    assert expected.averages
    noted = StartedJob(replace(handle, averages=expected.averages), 1.0)
    again = StartedJob.load(json.loads(json.dumps(noted.dump()))).handle
    status = SlurmLauncher().status(again)
    assert (status.state, status.apart, status.permanent) == (JobState.FAILED, True, True)
    assert JobStatus.load(json.loads(json.dumps(status.dump()))) == status


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


@pytest.mark.parametrize(
    ("state", "saved", "told", "expected"),
    [
        ("COMPLETED", True, True, "preempted"),
        ("PREEMPTED", True, True, "preempted"),
        ("", True, False, "preempted"),  # forgotten: the ranks know
        ("CANCELLED", True, True, "lost"),  # a person's wish
        ("TIMEOUT", True, True, "lost"),
        ("NODE_FAIL", True, False, "lost"),
        ("COMPLETED", False, True, "preempted"),  # none listened
        ("FAILED", False, True, "preempted"),
        ("CANCELLED", False, True, "lost"),
        ("", False, True, "lost"),  # forgotten: it may have been cancelled
        ("COMPLETED", False, False, "lost"),
    ],
)
def test_a_job_that_makes_room_is_told_from_one_that_is_cancelled(
    handle, state, saved, told, expected
):
    handle.record_dir.mkdir(parents=True, exist_ok=True)
    if told:
        (handle.record_dir / MAKE_ROOM).touch()
    for rank in range(handle.world_size):
        record = {"rank": rank, "host": "n", "started": 1.0, "asked_to_end": 2.0, "ended": 3.0}
        ended = {"exit_code": 0, "preempted": {"step": 9}} if saved else {"exit_code": 143}
        (handle.record_dir / f"rank-{rank}.json").write_text(json.dumps(record | ended))
    known = {"JobState": state, "JobName": handle.job_id} if state else {}
    status = SlurmLauncher().conclude(handle, known)
    assert status.state.value == expected
    assert status.step == (9 if saved and expected == "preempted" else None)


def test_a_script_that_ended_by_the_signal_before_its_shim_heard_of_it_made_room(handle):
    handle.record_dir.mkdir(parents=True, exist_ok=True)
    (handle.record_dir / MAKE_ROOM).touch()
    for rank, code in enumerate((143, 1)):
        record = {"rank": rank, "host": "n", "started": 1.0, "ended": 3.0, "exit_code": code}
        if code == 1:  # it saw the other one end
            raised = {"t": 3.0, "type": "FailedPreconditionError", "message": "", "file": ""}
            record |= {"exception": raised}
        (handle.record_dir / f"rank-{rank}.json").write_text(json.dumps(record))
    known = {"JobState": "FAILED", "JobName": handle.job_id}
    assert SlurmLauncher().conclude(handle, known).state is JobState.PREEMPTED


@pytest.mark.parametrize("state", ["NODE_FAIL", "TIMEOUT"])
def test_a_script_that_answers_slurms_signal_with_a_code_of_its_own_has_not_failed(handle, state):
    """Its shim may hear of the signal after it: Slurm sends it to each process."""
    handle.record_dir.mkdir(parents=True, exist_ok=True)
    known = {"JobState": state, "JobName": handle.job_id}
    record = {"rank": 0, "host": "n", "started": 1.0, "ended": 3.0, "exit_code": 3}
    (handle.record_dir / "rank-0.json").write_text(json.dumps(record))
    assert SlurmLauncher().conclude(handle, known).state is JobState.LOST
    raised = {"t": 3.0, "type": "ValueError", "message": "", "file": ""}
    (handle.record_dir / "rank-0.json").write_text(json.dumps(record | {"exception": raised}))
    assert SlurmLauncher().conclude(handle, known).failure.exception == "ValueError"


def test_a_job_that_is_to_wait_asks_slurm_to():
    assert "#SBATCH --begin=now+31\n" in SlurmLauncher().render(replace(SPEC, delay_s=30.2)).script
