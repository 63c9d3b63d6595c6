"""Ranks of another user than Airflow's: real ones, of user nobody."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from ddl_airflow.core.beneath import make_folder, read_beneath
from ddl_airflow.core.cluster import counted
from ddl_airflow.core.errors import FileRefused, LaunchError
from ddl_airflow.core.job import JobState
from ddl_airflow.launchers import run_as, slurm
from ddl_airflow.launchers.local import LocalLauncher, OnceLauncher
from ddl_airflow.launchers.loopback import confined
from ddl_airflow.launchers.processes import kill_marked, marked
from ddl_airflow.launchers.slurm import SlurmLauncher
from tests.limits import within
from tests.unit.ddl_airflow.conftest import Job

SOON_S = 20.0


def opened_by(pids) -> set[str]:
    """The files that processes have open, but for their standard input."""
    found = set()
    for pid in pids:
        for file in set(os.listdir(f"/proc/{pid}/fd")) - {"0"}:
            with suppress(FileNotFoundError):  # closed meanwhile
                found.add(os.readlink(f"/proc/{pid}/fd/{file}"))
    return found


@pytest.fixture
def job(trainer, job):
    """As the fixture of that name, for the other user and where that one may go."""

    def make(script: str, **settings) -> Job:
        one = job(python=trainer.python, **settings)
        place = trainer.place / one.spec.record_dir.parent.name
        code = place / "code"
        code.mkdir(parents=True)
        (code / "main.py").write_text(textwrap.dedent(script))
        spec = replace(
            one.spec,
            user=trainer.name,
            folder=code,
            record_dir=place / "records",
            log_dir=place / "logs",
        )
        one.spec = spec
        return one

    return make


LOOK = """
    import json, os
    def read(path):
        try:
            with open(path, "rb") as file:
                return len(file.read())
        except OSError as error:
            return type(error).__name__
    seen = {path: read(path) for path in os.environ["PLACES"].split(":")}
    about = {name: os.environ.get(name) for name in ("HOME", "USER", "TMPDIR", "AIRFLOW_CONN_X")}
    print(json.dumps({"uid": os.getuid(), "groups": os.getgroups(), "seen": seen, **about}))
    open(os.environ["DDL_RECORD_DIR"] + "/own", "w").close()
"""


@pytest.mark.parametrize("launcher", [LocalLauncher, OnceLauncher])
def test_ranks_cannot_read_what_airflow_reads(job, trainer, launcher, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_X", "aws://key:secret@")
    monkeypatch.setenv("TMPDIR", "/root")
    settings = trainer.place / "airflow.cfg"
    settings.write_text("fernet_key = secret")
    settings.chmod(0o600)
    places = [f"/proc/{os.getpid()}/environ", str(settings)]
    many = {} if launcher is OnceLauncher else {"nodes": 2}
    one = job(LOOK, launcher=launcher(), env={"PLACES": ":".join(places)}, **{"nodes": 1} | many)
    assert one.start().wait(SOON_S).state is JobState.SUCCEEDED, one.said()
    for rank in range(one.spec.world_size):
        said = json.loads(one.log(rank))
        assert said["seen"] == dict.fromkeys(places, "PermissionError")
        assert said["uid"] == trainer.uid and 0 not in said["groups"]
        assert (said["USER"], said["TMPDIR"]) == (trainer.name, None)
        assert said["AIRFLOW_CONN_X"] is None
    own = (one.spec.record_dir / "own").stat()
    assert (own.st_uid, own.st_gid, own.st_mode & 0o777) == (trainer.uid, trainer.gid, 0o660)


@pytest.mark.parametrize("as_user", [True, False])
def test_a_python_that_a_manifest_names_is_asked_with_no_more_than_ranks_have(
    trainer, monkeypatch, as_user
):
    monkeypatch.setenv("AIRFLOW_CONN_X", "aws://key:secret@")
    said = trainer.place / "said"
    said.mkdir()
    said.chmod(0o777)
    python = trainer.place / "bin" / "odd-python"
    python.write_text(
        f"#!/bin/sh\nid -u >{said}/user\nenv >{said}/environment\necho /no/ddl_ops/__init__.py\n"
    )
    python.chmod(0o755)
    assert confined(str(python), {}, mpi=True, user=trainer.name if as_user else "") == {}
    assert int((said / "user").read_text()) == (trainer.uid if as_user else os.geteuid())
    assert "AIRFLOW" not in (said / "environment").read_text()


def test_the_environment_is_in_no_list_of_processes(job, trainer):
    script = """
        import time
        print("up", flush=True)
        time.sleep(60)
    """
    one = job(script, nodes=1, env={"PARAM_TOKEN": "canary-of-this-test"}).start()
    one.wait_for(one.spec.log_dir / "rank-0.log")
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert "main.py" in lines.stdout and "canary-of-this-test" not in lines.stdout
    assert len(one.processes()) >= 3


def test_the_tasks_of_a_cluster_run_so(job, trainer):
    script = """
        import os
        print(os.getuid(), "TF_CONFIG" in os.environ)
    """
    one = job(script, nodes=1)
    one.spec = replace(one.spec, cluster=counted("worker=2"))
    assert one.start().wait(SOON_S).state is JobState.SUCCEEDED, one.said()
    assert [one.log(rank) for rank in (0, 1)] == [f"{trainer.uid} True\n"] * 2
    # The ranks' Python need not have ddl-airflow.
    assert "ddl_ops.tasks" in one.launcher.render(one.spec).argv


ENDLESS = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    print("up", flush=True)
    time.sleep(60)
"""


def test_cancel_ends_everything_of_that_user(job):
    one = job(ENDLESS, nodes=2).start()
    for rank in (0, 1):
        one.wait_for(one.spec.log_dir / f"rank-{rank}.log")
    assert one.status().state is JobState.RUNNING
    began = time.monotonic()
    one.launcher.cancel(one.handle, 3.0)
    assert time.monotonic() - began < within(5.0)
    assert one.processes() == []
    one.launcher.cancel(one.handle, 3.0)


def test_everything_ends_when_the_starting_process_is_killed(job, trainer):
    spec = job(ENDLESS, nodes=1).spec
    starter = f"""
        import time
        from pathlib import PosixPath
        from ddl_airflow.core.job import JobSpec
        from ddl_airflow.launchers.local import LocalLauncher
        launcher = LocalLauncher()
        launcher.submit(launcher.render({spec!r}))
        time.sleep(60)
    """
    argv = [sys.executable, "-c", textwrap.dedent(starter)]
    with subprocess.Popen(argv, start_new_session=True) as process:
        deadline = time.monotonic() + within(SOON_S)
        while not list(spec.log_dir.glob("rank-0.log")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    while marked("DDL_RECORD_DIR", str(spec.record_dir)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


# What root has in a container, unless somebody asks for more. Source: Docker's documentation.
_OF_A_CONTAINER = """
    chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot
    mknod audit_write setfcap
""".split()


@pytest.mark.parametrize("killed", ["os.getppid()", "*path_to_the_top()"])
def test_what_detached_itself_ends_where_root_may_not_look_at_others(job, killed):
    """As in a container, whose root has CAP_KILL, and no CAP_SYS_PTRACE."""
    script = f"""
        import os, signal, subprocess, sys
        def path_to_the_top():
            pid, found = os.getppid(), []
            while os.stat(f"/proc/{{pid}}").st_uid == os.getuid():
                found.insert(0, pid)
                with open(f"/proc/{{pid}}/stat") as file:
                    pid = int(file.read().rpartition(")")[2].split()[1])
            return found
        subprocess.Popen(["setsid", "sleep", "300"])
        for pid in [{killed}]:
            os.kill(pid, signal.SIGKILL)
    """
    one = job(script, nodes=1, launcher=OnceLauncher())
    starter = f"""
        import time
        from pathlib import PosixPath
        from ddl_airflow.core.job import JobSpec
        from ddl_airflow.launchers.local import OnceLauncher
        launcher = OnceLauncher()
        handle = launcher.submit(launcher.render({one.spec!r}))
        while launcher.status(handle).state.value == "running":
            time.sleep(0.05)
        launcher.cancel(handle)
    """
    bounds = ",".join(["-all", *(f"+{name}" for name in _OF_A_CONTAINER)])
    argv = [
        "setpriv",
        f"--bounding-set={bounds}",
        "--inh-caps=-all",
        sys.executable,
        "-c",
        textwrap.dedent(starter),
    ]
    try:
        subprocess.run(argv, check=True, timeout=within(SOON_S))
        assert marked("DDL_RECORD_DIR", str(one.spec.record_dir)) == []
    finally:
        kill_marked("DDL_RECORD_DIR", str(one.spec.record_dir))


def test_what_the_job_inherits_reaches_mpirun(job, trainer):
    (trainer.place / "lock").write_text("")
    descriptor = os.open(trainer.place / "lock", os.O_RDWR)
    script = """
        import os, time
        print("up", flush=True)
        time.sleep(60)
    """
    one = job(script, nodes=1)
    one.spec = replace(one.spec, inherits=(descriptor,))
    one.start()
    one.wait_for(one.spec.log_dir / "rank-0.log")
    os.close(descriptor)
    assert str(trainer.place / "lock") in opened_by(one.processes())


def test_a_folder_that_the_user_cannot_reach_is_named(job):
    one = job("print(1)", nodes=1)
    one.spec.folder.parent.chmod(0o700)
    one.start()
    assert one.wait(SOON_S).state is not JobState.SUCCEEDED
    assert (
        f"cannot go into {one.spec.folder.parent}"
        in (one.spec.log_dir / "launcher.log").read_text()
    )


def test_it_runs_as_nobody_else(trainer):
    argv = [sys.executable, "-SE", run_as.__file__, trainer.name, "id"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (125, "")
    assert f"as user id 0, and not as {trainer.name}" in done.stderr


def test_a_file_of_others_in_the_ranks_folder_is_refused(trainer):
    make_folder(trainer.place / "logs", trainer.place, trainer.gid)
    own, linked = trainer.place / "logs" / "own", trainer.place / "logs" / "linked"
    own.write_text("said")
    (trainer.place / "secret").write_text("of Airflow")
    os.link(trainer.place / "secret", linked)
    os.chown(own, trainer.uid, -1)
    assert read_beneath(own, trainer.place) == b"said"
    with pytest.raises(FileRefused, match="linked belongs to user id 0"):
        read_beneath(linked, trainer.place)
    below = trainer.place / "logs" / "below"
    below.mkdir()
    os.chown(below, trainer.uid, trainer.gid)
    os.link(trainer.place / "secret", below / "linked")
    with pytest.raises(FileRefused, match="linked belongs to user id 0"):
        read_beneath(below / "linked", trainer.place)


SBATCH = """#!/bin/sh
if [ "$(id -un)" = root ]; then exit 1; fi
case $0 in
*sbatch) cat >script; env >environment; echo 7;;
*squeue) echo "{line}";;
*scancel) echo $1 >cancelled;;
esac
"""


def test_slurms_jobs_are_that_users(job, trainer, monkeypatch):
    one = job("", nodes=1, launcher=SlurmLauncher(), env={"PARAM_TOKEN": "canary"})
    spool = trainer.place / "spool"
    spool.mkdir()
    spool.chmod(0o777)
    fields = {"JobId": "7", "JobName": "unit/train-1", "JobState": "RUNNING"}
    told = ({name: name for name in slurm._FIELDS}, fields)  # after a header
    line = "\n".join(
        slurm._FIELD_ENDS.join(one.get(name, "") for name in slurm._FIELDS) + slurm._RECORD_ENDS
        for one in told
    )
    for name in ("sbatch", "squeue", "scancel"):
        command = trainer.place / "bin" / name
        command.write_text(SBATCH.replace("{line}", line).replace("case", f"cd {spool}\ncase", 1))
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{trainer.place}/bin:{os.environ['PATH']}")
    one.spec = replace(one.spec, lock=trainer.place / ".one.lock")
    assert one.start().handle.number == 7
    assert one.status().state is JobState.RUNNING
    one.launcher.cancel(one.handle)
    for name in ("script", "environment", "cancelled"):
        made = (spool / name).stat()
        assert (made.st_uid, made.st_mode & 0o777) == (trainer.uid, 0o660)
    said = dict(line.split("=", 1) for line in (spool / "environment").read_text().splitlines())
    assert (said["USER"], said["PARAM_TOKEN"]) == (trainer.name, "canary")
    assert (one.spec.lock.stat().st_gid, one.spec.lock.stat().st_mode & 0o777) == (
        *(trainer.gid, 0o660),
    )


RUNS = """
from ddl_airflow.launchers import run_as
words = ["sh", "-c", "echo up > {here}/up; sleep 4; echo done > {here}/done"]
run_as.run({user!r}, {python!r}, words, env={{"PATH": "/usr/bin:/bin"}}, timeout_s=0.5)
"""


def test_what_runs_as_another_user_ends_by_itself_where_its_starter_was_killed(trainer):
    """As an sbatch: it would submit a job of which nobody knows."""
    spool = trainer.place / "spool"
    spool.mkdir()
    spool.chmod(0o777)
    script = RUNS.format(here=spool, user=trainer.name, python=trainer.python)
    with subprocess.Popen([sys.executable, "-c", script]) as task:
        deadline = time.monotonic() + within(SOON_S)
        while not (spool / "up").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        task.kill()
    time.sleep(5)
    assert not (spool / "done").exists()


# Has Slurm take the job after a while: a script of the site's, which starts what does so.
SLOW_SBATCH = """#!/bin/sh
cat >{spool}/script
id -un >{spool}/user
sh -c 'echo $$ >{spool}/up; sleep 600'
"""
SUBMITS = """
    import os
    from pathlib import PosixPath
    from ddl_airflow.core.job import JobSpec
    from ddl_airflow.launchers import slurm
    from ddl_airflow.launchers.slurm import SlurmLauncher
    os.environ["PATH"] = {path!r}
    slurm._SUBMIT_S = {limit_s}
    print(os.getpid(), flush=True)
    launcher = SlurmLauncher()
    launcher.submit(launcher.render({spec!r}))
"""


@pytest.mark.parametrize("ends", ["its task is killed", "its task stands still"])
@pytest.mark.parametrize("by_sudo", [False, True])
def test_an_sbatch_of_another_user_ends_with_its_task(job, trainer, by_sudo, ends):
    """It went on for three minutes: after a last attempt its job was nobody's."""
    if by_sudo and (
        shutil.which("sudo") is None or subprocess.run(["unshare", "-m", "true"]).returncode
    ):
        pytest.skip("needs sudo, and the right to put a rule before it: unshare -m")
    spool = trainer.place / "spool"
    spool.mkdir()
    spool.chmod(0o777)
    sbatch = trainer.place / "bin" / "sbatch"
    sbatch.write_text(SLOW_SBATCH.format(spool=spool))
    sbatch.chmod(0o755)
    spec = job("", nodes=1, launcher=SlurmLauncher()).spec
    killed = ends == "its task is killed"
    script = SUBMITS.format(
        spec=spec, path=f"{sbatch.parent}:/usr/bin:/bin", limit_s=600.0 if killed else 3.0
    )
    words = [sys.executable, "-c", textwrap.dedent(script)]
    if by_sudo:
        os.chown(spec.record_dir.parent, pwd.getpwnam("daemon").pw_uid, -1)
        rule = trainer.place / "sudoers"
        rule.write_text(f"daemon ALL=({trainer.name}) NOPASSWD: ALL\n")
        rule.chmod(0o440)
        words = [
            *("unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/sudoers && exec "$@"'),
            *(str(rule), "setpriv", "--reuid=daemon", "--regid=daemon"),
            *(f"--groups={trainer.gid}", trainer.python, *words[1:]),
        ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=trainer.place) as task:
        pid = int(task.stdout.readline())
        deadline = time.monotonic() + within(SOON_S)
        while not (spool / "up").exists() or not (spool / "up").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        submitting = int((spool / "up").read_text())
        os.kill(pid, signal.SIGKILL if killed else signal.SIGSTOP)
        try:
            while os.path.exists(f"/proc/{submitting}"):
                assert time.monotonic() < deadline, "sbatch goes on"
                time.sleep(0.02)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(submitting, signal.SIGKILL)
    assert (spool / "user").read_text() == f"{trainer.name}\n"
    assert (spool / "script").read_text().startswith("#!/bin/bash\n")


def test_a_lock_that_another_user_may_not_write_is_said_to_be_one(trainer):
    lock = trainer.place / ".one.lock"
    lock.touch(0o600)
    words = [trainer.python, "-m", "ddl_ops.locked", str(lock), "unit/train-1", "--", "true"]
    ran = subprocess.run(words, user=trainer.name, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (77, "")
    assert f"Permission denied. Let user {trainer.uid} write to it" in ran.stderr


BY_SUDO = """
    import os, sys, time
    from dataclasses import replace
    from pathlib import PosixPath
    from ddl_airflow.core.job import JobSpec
    from ddl_airflow.launchers.local import LocalLauncher
    launcher = LocalLauncher()
    lock = os.open({lock!r}, os.O_RDWR)
    handle = launcher.submit(launcher.render(replace({spec!r}, inherits=(lock,))))
    while not os.path.exists({log!r}) or not os.path.getsize({log!r}):
        assert launcher.status(handle).state.value == "running", launcher.status(handle)
        time.sleep(0.05)
    print(os.getuid(), launcher.status(handle).state.value, flush=True)
    sys.stdin.readline()
    launcher.cancel(handle, 3.0)
    print(launcher.status(handle).state.value)
"""


def test_a_rule_of_sudo_is_enough(job, trainer):
    """Airflow's user is daemon, which may run anything as the ranks' user, and is in its group."""
    if shutil.which("sudo") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("needs sudo, and the right to put a rule before it: unshare -m")
    one = job(ENDLESS, nodes=2, env={"PARAM_TOKEN": "canary-of-this-test"})
    place = one.spec.folder.parent
    for folder in (place, one.spec.folder):
        os.chown(folder, pwd.getpwnam("daemon").pw_uid, -1)
    lock = trainer.place / "lock"
    lock.write_text("")
    os.chown(lock, pwd.getpwnam("daemon").pw_uid, -1)
    rule = trainer.place / "sudoers"
    rule.write_text(f"daemon ALL=({trainer.name}) NOPASSWD: ALL\n")
    rule.chmod(0o440)
    log = one.spec.log_dir / "rank-0.log"
    script = textwrap.dedent(BY_SUDO).format(spec=one.spec, lock=str(lock), log=str(log))
    groups = f"--groups={trainer.gid}"
    inside = [
        *("unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/sudoers && exec "$@"', str(rule)),
        *("setpriv", "--reuid=daemon", "--regid=daemon", groups, trainer.python, "-c", script),
    ]
    with subprocess.Popen(
        inside, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=trainer.place
    ) as airflow:
        assert airflow.stdout.readline() == "1 running\n", one.said()
        lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
        assert "main.py" in lines.stdout and "canary-of-this-test" not in lines.stdout
        pids = one.processes()
        assert {os.stat(f"/proc/{pid}").st_uid for pid in pids} == {trainer.uid}
        assert str(lock) in opened_by(pids)
        airflow.stdin.write("\n")
        airflow.stdin.flush()
        assert airflow.stdout.readline() != "succeeded\n"
    assert one.processes() == []


def test_a_sudo_that_may_not_be_killed_is_not_waited_for(tmp_path, monkeypatch):
    """It is root's: Airflow's user may not signal it."""
    sudo = tmp_path / "sudo"
    sudo.write_text("#!/bin/sh\nexec sleep 30\n")
    sudo.chmod(0o755)
    started = []

    def kill(process):
        started.append(process)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(run_as, "_sudo", lambda: str(sudo))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_as.run("nobody", sys.executable, ["true"], env={}, timeout_s=0.2)
    assert time.monotonic() - began < within(15)
    for process in started:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("answers", [True, False])
def test_what_is_left_is_ended_by_airflows_python_and_an_end_unseen_is_said(
    job, trainer, monkeypatch, answers
):
    """A manifest names the ranks' Python, which may be a script that does nothing."""
    one = job("print('trained')").start()
    one.wait()
    asked = []

    def run(user, python, words, *, env, timeout_s):
        asked.append((user, python, words[0]))
        if not answers:
            raise subprocess.TimeoutExpired(words, timeout_s)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(run_as, "run", run)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setattr(sys, "executable", "/airflow/python")
    if answers:
        one.launcher.cancel(one.handle)
    else:
        with pytest.raises(LaunchError, match=f"what {trainer.name} runs, of which no end"):
            one.launcher.cancel(one.handle)
    assert asked == [(trainer.name, "/airflow/python", "/airflow/python")]
