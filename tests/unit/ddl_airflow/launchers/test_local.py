"""Real ranks: mpirun and plain Python scripts."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import pwd
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ddl_airflow.core.cluster import counted
from ddl_airflow.core.errors import JobFailed, JobLost, NoSpace, SubmitFailed
from ddl_airflow.core.job import JobState
from ddl_airflow.launchers.local import LocalLauncher, OnceLauncher, inherited
from ddl_airflow.launchers.processes import kill_marked, marked
from ddl_airflow.steps.job import RunningJob
from tests.integration.disk import tiny_disk
from tests.limits import within

PRINT_ENVIRONMENT = "import json, os; print(json.dumps(dict(os.environ)))"
# The parts of ending a job that take longer than this are hanging.
SOON_S = 10.0


def test_every_rank_runs_keeps_its_output_and_knows_its_place(job):
    script = "import os; print('rank', os.environ['OMPI_COMM_WORLD_RANK'], os.getcwd())"
    one = job(script=script, nodes=3).start()
    assert one.wait().state is JobState.SUCCEEDED
    for rank in range(3):
        assert one.log(rank) == f"rank {rank} {one.spec.folder}\n"
        assert (one.record(rank)["rank"], one.record(rank)["exit_code"]) == (rank, 0)
    assert "python" in one.record(0)["versions"]


def test_environment_of_a_rank_is_an_allow_list(job, monkeypatch):
    hidden = {
        "AIRFLOW_CONN_X": "aws://key:secret@",
        "AIRFLOW__CORE__FERNET_KEY": "f",
        "AWS_SECRET_ACCESS_KEY": "s",
        "S3_SECRET_ACCESS_KEY": "s",
        "SLURM_PROCID": "7",
        "OMPI_COMM_WORLD_RANK": "9",
    }
    passed = {"LC_ALL": "C.UTF-8", "OMP_SCHEDULE": "static", "DDL_LOG": "warning"}
    for name, value in (hidden | passed).items():
        monkeypatch.setenv(name, value)
    given = {"DATA_DIR": "/d a/ta", "TRAINING_ID": "t-1", "DDL_LOG": "info"}
    one = job(script=PRINT_ENVIRONMENT, nodes=1, slots=2, env=given).start()
    assert one.wait().state is JobState.SUCCEEDED
    for rank in range(2):
        seen = json.loads(one.log(rank))
        assert not {n for n in hidden if seen.get(n) == hidden[n]}
        assert not [n for n in seen if n.startswith(("AIRFLOW", "AWS_", "SLURM_"))]
        assert {n: seen[n] for n in passed if n != "DDL_LOG"} == {
            "LC_ALL": "C.UTF-8",
            "OMP_SCHEDULE": "static",
        }
        assert {n: seen[n] for n in given} == given  # the job's own win
        assert seen["DDL_JOB_ID"] == one.spec.job_id
        assert seen["DDL_OPTIONS"] == "-mode p"
        assert seen["LOG_DIR"] == str(one.spec.log_dir)
        assert seen["OMPI_COMM_WORLD_RANK"] == str(rank)
        assert seen["OMPI_COMM_WORLD_SIZE"] == "2"


def test_ranks_run_where_the_environment_has_no_home(job, monkeypatch):
    """As of services of systemd."""
    monkeypatch.delenv("HOME")
    one = job(script=PRINT_ENVIRONMENT, nodes=1).start()
    assert one.wait().state is JobState.SUCCEEDED
    assert json.loads(one.log(0))["HOME"] == pwd.getpwuid(os.geteuid()).pw_dir


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user without sudo")
def test_ranks_of_another_user_have_that_users_home(job, monkeypatch):
    monkeypatch.delenv("HOME")
    spec = dataclasses.replace(job().spec, user="nobody")
    assert LocalLauncher().render(spec).env["HOME"] == pwd.getpwnam("nobody").pw_dir


def test_learner_id_counts_nodes_from_one(job):
    script = "import os; print(os.environ['LEARNER_ID'], os.environ['OMPI_COMM_WORLD_SIZE'])"
    one = job(script=script, nodes=2, slots=2).start()
    assert one.wait().state is JobState.SUCCEEDED
    assert [one.log(rank) for rank in range(4)] == ["1 4\n", "1 4\n", "2 4\n", "2 4\n"]


def test_shell_words_and_compound_commands_run_on_every_rank(job):
    command = (
        'cd "$PLACE" && echo "$OMPI_COMM_WORLD_RANK" > by-$OMPI_COMM_WORLD_RANK && ls -d "$PWD"'
    )
    one = job(command, env={"PLACE": "sub dir"})
    (one.spec.folder / "sub dir").mkdir()
    one.start()
    assert one.wait().state is JobState.SUCCEEDED
    assert one.log(1) == f"{one.spec.folder}/sub dir\n"
    assert [(one.spec.folder / f"sub dir/by-{n}").read_text() for n in (0, 1)] == ["0\n", "1\n"]


def test_metrics_of_rank_0_alone_become_progress(job, tmp_path):
    progress = tmp_path / "progress.jsonl"
    definitions = [{"name": "step", "regex": r"step (\d+)"}, {"name": "loss", "regex": r"l=(\S+)"}]
    script = "import os; r = os.environ['OMPI_COMM_WORLD_RANK']; print(f'step 1{r} l=0.{r}5')"
    env = {"DDL_METRICS": json.dumps(definitions), "DDL_PROGRESS": str(progress)}
    assert job(script=script, env=env).start().wait().state is JobState.SUCCEEDED
    (line,) = [json.loads(text) for text in progress.read_text().splitlines()]
    assert line.pop("t") == pytest.approx(time.time(), abs=60)
    assert line == {"source": "metrics", "step": 10, "loss": 0.05}


# --- failures -------------------------------------------------------------------------------


def test_exit_code_of_one_rank_ends_all_and_names_it(job):
    script = """
        import os, sys, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            sys.exit(41)
        time.sleep(60)
    """
    one = job(script=textwrap.dedent(script)).start()
    status = one.wait(SOON_S)
    assert status.state is JobState.FAILED
    assert (status.failure.rank, status.failure.exit_code) == (1, 41)
    assert status.failure.reason == "exited with code 41"
    assert status.failure.host == one.record(1)["host"] != ""
    assert status.failure.permanent is False
    assert "asked_to_end" in one.record(0)


def test_exception_on_one_rank_is_recorded_and_blamed(job):
    script = """
        import os, time
        def pick(row):
            raise ValueError(f"row {row} of rank 1 has 783 pixels")
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            pick(17)
        time.sleep(60)
    """
    one = job(script=textwrap.dedent(script)).start()
    failure = one.wait(SOON_S).failure
    assert (failure.rank, failure.exit_code, failure.exception) == (1, 1, "ValueError")
    assert failure.reason == "raised ValueError at main.py:4: row 17 of rank 1 has 783 pixels"
    assert failure.permanent is False
    assert "Traceback" in one.log(1) and "783 pixels" in one.log(1)
    said = one.record(1)["exception"]
    assert (said["type"], said["file"], said["line"]) == ("ValueError", "main.py", 4)


def test_exception_that_the_scripts_own_hook_shows_is_recorded(job):
    """As a command line made with typer has one, and whoever logs what nobody caught."""
    script = """
        import sys
        sys.excepthook = lambda kind, error, trace: print("uncaught:", error)
        def main():
            raise ValueError("too small")
        main()
    """
    one = job(script=textwrap.dedent(script), nodes=1).start()
    failure = one.wait(SOON_S).failure
    assert failure.reason == "raised ValueError at main.py:5: too small"
    assert "uncaught: too small" in one.log(0)


@pytest.mark.parametrize("hook", ["sys.__excepthook__", "sys.excepthook"])
def test_exception_of_a_fork_is_not_the_ranks(job, hook):
    script = f"""
        import os, sys
        hook = {hook}
        sys.excepthook = lambda *told: hook(*told)
        if not (child := os.fork()):
            raise ValueError("in the child")
        os.waitpid(child, 0)
    """
    one = job(script=textwrap.dedent(script), nodes=1).start()
    assert one.wait(SOON_S).state is JobState.SUCCEEDED, one.log(0)
    assert "in the child" in one.log(0) and not one.record(0).get("exception"), one.record(0)


def test_exception_behind_a_pipe_is_blamed(job):
    script = """
        import os, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            raise ValueError("too small")
        time.sleep(60)
    """
    one = job(script=textwrap.dedent(script), command="python main.py 2>&1 | tee out-$LEARNER_ID")
    failure = one.start().wait(SOON_S).failure
    assert (failure.rank, failure.exit_code, failure.exception) == (1, 1, "ValueError")


def test_exception_in_a_library_is_placed_in_the_script(job):
    script = "import json\n\njson.loads('not json')\n"
    failure = job(script=script, nodes=1).start().wait(SOON_S).failure
    assert failure.reason.startswith("raised JSONDecodeError at main.py:3: ")


def test_first_failing_rank_is_blamed_also_when_the_others_raise_because_of_it(job, tmp_path):
    script = f"""
        import os, signal, time
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        mark = {str(tmp_path / "fallen")!r}
        def told(*_):
            raise RuntimeError("the others are gone")
        signal.signal(signal.SIGTERM, told)
        open(mark + f"-up-{{rank}}", "w").close()
        if rank == 2:
            while not all(os.path.exists(mark + f"-up-{{n}}") for n in (0, 1)):
                time.sleep(0.01)
            raise KeyError("the cause")
        time.sleep(60)
    """
    one = job(script=textwrap.dedent(script), nodes=3).start()
    failure = one.wait(SOON_S).failure
    assert failure is not None, one.said()
    assert (failure.rank, failure.exception) == (2, "KeyError")
    assert "the cause" in failure.reason


@pytest.mark.parametrize(
    ("script", "kind"),
    [("def f(:\n", "SyntaxError"), ("import no_such_module_here", "ModuleNotFoundError")],
)
def test_code_that_cannot_run_is_permanent(job, script, kind):
    failure = job(script=script).start().wait(SOON_S).failure
    assert failure.exception == kind
    assert failure.permanent is True
    assert "main.py:1" in failure.reason


def test_exception_of_a_program_that_the_script_started_is_not_the_scripts(job):
    # The script lives with its helper's failure, and is killed later.
    script = """
        import os, subprocess, sys
        done = subprocess.run([sys.executable, "-c", "import no_such_module_here"])
        assert done.returncode == 1
        os.kill(os.getpid(), 9)
    """
    failure = job(script=textwrap.dedent(script), nodes=1).start().wait(SOON_S).failure
    assert failure.exit_code == 137
    assert failure.exception == ""
    assert failure.permanent is False


def test_sigkill_of_a_script_names_its_rank(job, tmp_path):
    script = f"""
        import os, time
        rank = os.environ["OMPI_COMM_WORLD_RANK"]
        with open({str(tmp_path)!r} + "/pid-" + rank, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
    """
    one = job(script=textwrap.dedent(script)).start()
    pids = [int(one.wait_for(tmp_path / f"pid-{n}")) for n in (0, 1)]
    os.kill(pids[1], signal.SIGKILL)
    status = one.wait(SOON_S)
    assert status.state is JobState.FAILED
    assert (status.failure.rank, status.failure.exit_code) == (1, 137)
    assert "SIGKILL" in status.failure.reason
    assert status.failure.permanent is False


def test_sigkill_of_a_shim_takes_its_script_along_and_names_its_rank(job, tmp_path):
    script = f"""
        import os, time
        rank = os.environ["OMPI_COMM_WORLD_RANK"]
        with open({str(tmp_path)!r} + "/pid-" + rank, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
    """
    one = job(script=textwrap.dedent(script)).start()
    pids = [int(one.wait_for(tmp_path / f"pid-{n}")) for n in (0, 1)]
    os.kill(one.record(0)["pid"], signal.SIGKILL)
    failure = one.wait(SOON_S).failure
    assert (failure.rank, failure.exit_code) == (0, None)
    assert "SIGKILL" in failure.reason
    deadline = time.monotonic() + within(SOON_S)
    while set(one.processes()) & set(pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("command", ["pythom main.py", "pythom main.py $HOME", "./main.py"])
def test_command_that_cannot_be_run_is_permanent_and_named(job, command):
    status = job(command, script="print(1)").start().wait(SOON_S)
    assert status.state is JobState.FAILED
    assert status.failure.exit_code in (126, 127)
    assert status.failure.permanent is True
    assert "command" in status.failure.reason


def test_a_script_that_leaves_a_process_behind_ends_all_the_same(job):
    # As a script does that starts TensorBoard. Whatever it left ends with the job.
    script = """
        import subprocess, sys
        sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
        subprocess.Popen(sleep, start_new_session=True)
        print("trained")
    """
    one = job(script=textwrap.dedent(script), nodes=1).start()
    assert one.wait(4.0).state is JobState.SUCCEEDED
    assert one.log(0) == "trained\n"


@pytest.mark.parametrize("launcher", [LocalLauncher, OnceLauncher])
def test_python_that_does_not_exist_is_named_and_not_retried(job, launcher, monkeypatch):
    # With an mpirun on PATH, as a site has that names another Python.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    one = job(python="/no/such/python", launcher=launcher())
    with pytest.raises(SubmitFailed, match="/no/such/python") as caught:
        one.start()
    assert caught.value.retryable is False


@pytest.mark.parametrize("launcher", [LocalLauncher, OnceLauncher])
def test_python_may_be_named_as_it_is_on_path(job, launcher, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    one = job(script="print(1)", nodes=1, python="python", launcher=launcher()).start()
    assert one.wait().state is JobState.SUCCEEDED


def test_folder_that_does_not_exist_is_named(job):
    one = job()
    (one.spec.folder / "main.py").unlink()
    one.spec.folder.rmdir()
    with pytest.raises(SubmitFailed, match=str(one.spec.folder)):
        one.start()


# --- ending ---------------------------------------------------------------------------------

ENDLESS = """
    import os, signal, subprocess, sys, time
    folder = os.environ["PLACE"]
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    if rank == "1":
        subprocess.Popen(sleep, start_new_session=True)
    def told(*_):
        open(f"{folder}/told-{rank}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, told)
    with open(f"{folder}/up-{rank}", "w") as file:
        file.write("up")
    time.sleep(60)
"""


def test_cancel_asks_first_and_ends_everything(job, tmp_path):
    one = job(script=textwrap.dedent(ENDLESS), env={"PLACE": str(tmp_path)}).start()
    for rank in (0, 1):
        one.wait_for(tmp_path / f"up-{rank}")
    assert one.status().state is JobState.RUNNING
    assert len(one.processes()) == 6  # mpirun, two shims, two scripts, a grandchild
    began = time.monotonic()
    one.launcher.cancel(one.handle, 3.0)
    assert time.monotonic() - began < within(5.0)
    assert one.processes() == []
    assert [(tmp_path / f"told-{rank}").exists() for rank in (0, 1)] == [True, True]
    assert one.status().state is not JobState.SUCCEEDED
    one.launcher.cancel(one.handle, 3.0)


def test_cancel_leaves_ranks_that_listen_time_to_save(job, tmp_path):
    """Mpirun by itself kills them a quarter of a second after SIGTERM."""
    script = """
        import os, signal, sys, time
        folder, rank = os.environ["PLACE"], os.environ["OMPI_COMM_WORLD_RANK"]
        def told(*_):
            time.sleep(1.0)
            open(f"{folder}/saved-{rank}", "w").close()
            sys.exit(0)
        signal.signal(signal.SIGTERM, told)
        with open(f"{folder}/up-{rank}", "w") as file:
            file.write("up")
        time.sleep(60)
    """
    one = job(script=textwrap.dedent(script), env={"PLACE": str(tmp_path)}).start()
    for rank in (0, 1):
        one.wait_for(tmp_path / f"up-{rank}")
    one.launcher.cancel(one.handle, 3.0)
    assert one.processes() == []
    assert [(tmp_path / f"saved-{rank}").exists() for rank in (0, 1)] == [True, True]


def test_cancel_ends_a_script_that_will_not_listen(job, tmp_path):
    script = f"""
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open({str(tmp_path / "up")!r}, "w") as file:
            file.write("up")
        time.sleep(60)
    """
    one = job(script=textwrap.dedent(script), nodes=1).start()
    one.wait_for(tmp_path / "up")
    began = time.monotonic()
    one.launcher.cancel(one.handle, 0.5)
    assert time.monotonic() - began < within(4.0)
    assert one.processes() == []


def test_cancel_of_one_job_leaves_another_alone(job, tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    jobs = []
    for folder in folders:
        folder.mkdir()
        jobs.append(job(script=textwrap.dedent(ENDLESS), nodes=1, env={"PLACE": str(folder)}))
    for one, folder in zip(jobs, folders, strict=True):
        one.start()
        one.wait_for(folder / "up-0")
    jobs[0].launcher.cancel(jobs[0].handle, 3.0)
    assert jobs[0].processes() == []
    assert len(jobs[1].processes()) == 3
    assert jobs[1].status().state is JobState.RUNNING


def test_everything_ends_when_mpirun_is_killed(job, tmp_path):
    one = job(script=textwrap.dedent(ENDLESS), env={"PLACE": str(tmp_path)}).start()
    one.wait_for(tmp_path / "up-0")
    (session_directory,) = _session_directories([one.handle.number])
    os.kill(one.handle.number, signal.SIGKILL)
    assert one.wait(SOON_S).state is not JobState.SUCCEEDED
    one.launcher.cancel(one.handle, 1.0)
    assert one.processes() == []
    deadline = time.monotonic() + within(SOON_S)
    while session_directory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_everything_ends_when_the_starting_process_is_killed(tmp_path):
    (tmp_path / "main.py").write_text(textwrap.dedent(ENDLESS))
    starter = f"""
        import sys, time
        from pathlib import Path
        from ddl_airflow.core.job import JobSpec
        from ddl_airflow.launchers.local import LocalLauncher
        folder = Path({str(tmp_path)!r})
        spec = JobSpec({tmp_path.name!r}, "python main.py", 2, 1, sys.executable, folder,
                       folder / "records", folder / "logs", {{"PLACE": str(folder)}})
        launcher = LocalLauncher()
        launcher.submit(launcher.render(spec))
        time.sleep(60)
    """
    argv = [sys.executable, "-c", textwrap.dedent(starter)]
    try:
        with subprocess.Popen(argv, start_new_session=True) as process:
            deadline = time.monotonic() + within(20)
            while not (tmp_path / "up-0").exists() or not (tmp_path / "up-1").exists():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            pids = marked("DDL_JOB_ID", tmp_path.name)
            # What a script moved to a session of its own outlives its rank; nothing else may.
            moved = {pid for pid in pids if os.getsid(pid) == pid and _is_sleep(pid)}
            assert len(pids) == 6 and len(moved) == 1
            files = _session_directories(pids)
            assert files
            process.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + within(SOON_S)
        while set(marked("DDL_JOB_ID", tmp_path.name)) - moved or any(map(Path.exists, files)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        kill_marked("DDL_JOB_ID", tmp_path.name)


def _session_directories(pids: list[int]) -> list[Path]:
    return [one for pid in pids for one in Path("/dev/shm").glob(f"ddl-mpi-{pid}-*")]


def _is_sleep(pid: int) -> bool:
    return b"time.sleep(60)" in Path(f"/proc/{pid}/cmdline").read_bytes()


# --- once -----------------------------------------------------------------------------------


def test_once_runs_one_process_without_mpi(job):
    one = job(script=PRINT_ENVIRONMENT, launcher=OnceLauncher(), nodes=1, env={"DATA_DIR": "/d"})
    assert one.start().wait().state is JobState.SUCCEEDED
    seen = json.loads(one.log(0))
    assert seen["DATA_DIR"] == "/d"
    assert not [name for name in seen if name.startswith("OMPI_COMM_WORLD")]
    assert "DDL_OPTIONS" not in seen


def test_once_blames_the_exception(job):
    one = job(script="raise OSError('full')", launcher=OnceLauncher(), nodes=1).start()
    failure = one.wait(SOON_S).failure
    assert (failure.rank, failure.exception, failure.permanent) == (0, "OSError", False)


# --- what listens ---------------------------------------------------------------------------

LISTENS = """
import os, socket, sys, time
from pathlib import Path
if "TF_CONFIG" not in os.environ:
    from mpi4py import MPI  # initializes: from here on ranks may listen, too
    assert MPI.COMM_WORLD.allreduce(1) == 2
servers = []
for family, address, only in (
    (socket.AF_INET, "0.0.0.0", None), (socket.AF_INET6, "::", 0), (socket.AF_INET6, "::", 1),
):
    one = socket.socket(family)
    if only is not None:
        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
    one.bind((address, 0))
    servers.append(one)
servers.append(socket.socket())  # never bound
for one in servers:
    one.listen()
for one in servers[:2]:  # who is told 127.0.0.1 reaches both
    socket.create_connection(("127.0.0.1", one.getsockname()[1])).close()
print("up", flush=True)
end = Path("end")
while not end.exists():
    time.sleep(0.05)
"""


def _listening(pids: list[int]) -> list[tuple[str, str]]:
    """Addresses in hex, as /proc has them, on which the processes listen, and who does.

    Source: proc(5); 0A is TCP_LISTEN.
    """
    addresses = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                addresses[f"socket:[{words[9]}]"] = words[1].partition(":")[0]
    found = []
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                address = addresses.get(os.readlink(link))
            except FileNotFoundError:
                continue
            if address is not None:
                found.append((address, Path(f"/proc/{pid}/cmdline").read_text()))
    return found


@pytest.mark.parametrize("cluster", [None, counted("worker=1,ps=1")], ids=["mpi", "tf_config"])
def test_nothing_listens_to_other_hosts(job, cluster):
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", f"{'0' * 24}01000000"}
    one = job(script=LISTENS, nodes=2)
    one.spec = dataclasses.replace(one.spec, cluster=cluster)
    one.start()
    for rank in range(2):
        assert one.wait_for(one.spec.log_dir / f"rank-{rank}.log").strip() == "up"
    found = _listening(one.processes())
    (one.spec.folder / "end").touch()
    assert one.wait().state is JobState.SUCCEEDED, one.log(0)
    assert len(found) >= 8 and {address for address, _ in found} == loopback, found
    assert cluster or any("prterun" in who for _, who in found)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *(("TF_CPP_MIN_LOG_LEVEL", True), ("TF_GPU_ALLOCATOR", True), ("NCCL_DEBUG", True)),
        *(("NVIDIA_VISIBLE_DEVICES", True), ("CUDA_VISIBLE_DEVICES", True), ("PATH", True)),
        *(("TF_TOKEN_app_terraform_io", False), ("TF_VAR_db_password", False)),
        *(("NVIDIA_API_KEY", False), ("TF_CONFIG", False), ("KERAS_HUB_TOKEN", False)),
        *(("AIRFLOW_CONN_MYDB", False), ("AIRFLOW__CORE__FERNET_KEY", False)),
        *(("AWS_SECRET_ACCESS_KEY", False), ("CUDA_SECRET", False)),
        # What only begins as a setting does.
        *(("LC_LICENCE", False), ("KERAS_LOGIN", False), ("XLA_REGISTRY", False)),
        *(("TF_CPP_LICENCE", False), ("OMP_LICENCE", False), ("CUDA_REGISTRY_AUTH", False)),
        *(("OMPI_MCA_btl", True), ("OMPI_MCA_my_token", False)),
    ],
)
def test_ranks_inherit_settings_and_no_secrets(name, given):
    assert (name in inherited({name: "x"})) is given


# --- a disk that is full ------------------------------------------------------------------------

CURE = ". Free space there, raise the quota, or use a larger disk."
FILLS = """
import os
with open(os.environ["LOG_DIR"] + "/data", "wb", buffering=0) as file:
    while True:
        file.write(bytes(1 << 14))
"""
PRINTS = """
while True:
    print("x" * 1000)
"""
# What a script of another language leaves: no exception.
FILLS_AND_EXITS = f"""
try:
    {FILLS.strip().replace(chr(10), chr(10) + "    ")}
except OSError:
    os._exit(3)
"""


@pytest.fixture
def disk(tmp_path):
    with tiny_disk(tmp_path / "disk", 512 * 1024) as folder:
        yield folder


def on(disk, one):
    one.spec = dataclasses.replace(one.spec, record_dir=disk / "records", log_dir=disk / "logs")
    return one


@pytest.mark.parametrize("script", [FILLS, PRINTS, FILLS_AND_EXITS], ids=["file", "log", "exit"])
def test_a_rank_that_fills_the_disk_says_so(disk, job, script):
    one = on(disk, job(script=script, nodes=1)).start()
    status = one.wait()
    assert status.state is JobState.FAILED
    assert (status.failure.rank, status.failure.permanent) == (0, False)
    assert "No space left on device" in status.failure.reason
    assert status.failure.reason.endswith(CURE)
    assert "memory" not in status.failure.reason


def test_ranks_that_can_say_nothing_are_not_blamed_on_memory(disk, job):
    one = on(disk, job(script="print(1)", nodes=2))
    (disk / "logs").mkdir()
    (disk / "records").mkdir()
    (disk / "logs" / "launcher.log").touch()
    with pytest.raises(OSError) as caught, open(disk / "fill", "wb", buffering=0) as fill:
        while True:
            fill.write(bytes(4096))
    assert caught.value.errno == errno.ENOSPC
    one.start()
    status = one.wait()
    assert status.state in (JobState.FAILED, JobState.LOST)
    said = status.failure.reason if status.failure else status.reason
    assert f"{disk}/records: No space left on device{CURE}" in said
    with pytest.raises((JobFailed, JobLost, NoSpace), match="Free space there"):
        RunningJob(one.launcher, logging.getLogger()).run(one.spec)
