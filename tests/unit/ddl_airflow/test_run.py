"""``ddl-run`` as a person calls it."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
import venv
from contextlib import suppress
from pathlib import Path

import ddl_ops
import pytest

from ddl_airflow import run
from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.launchers.terminal import Lines
from tests.limits import output, until, within

NEXT = "`ddl-airflow run`, or the DAG, goes on with"
CALL = [sys.executable, "-c", "import sys; from ddl_airflow.run import main; sys.exit(main())"]


def clean(**more):
    env = {n: v for n, v in os.environ.items() if not n.startswith(("OMPI_", "DDL_"))}
    return env | more


def ddl_run(*words, folder, **more):
    return subprocess.run(
        [*CALL, *words],
        cwd=folder,
        env=clean(**more),
        capture_output=True,
        text=True,
        timeout=within(30),
        check=False,
    )


def test_ranks_run_as_the_train_task_runs_them_in_the_callers_world(tmp_path):
    (tmp_path / "main.py").write_text(
        textwrap.dedent("""
            import json, os, sys
            names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "DDL_OPTIONS", "LEARNER_ID")
            seen = {name: os.environ.get(name) for name in (*names, "MY_OWN", "DDL_RECORD_DIR")}
            print(json.dumps([seen, sys.argv[1:], os.getcwd()]) + "\\n", end="", flush=True)
        """)
    )
    done = ddl_run(
        *("--np", "2", "python", "main.py", "--np", "9", "a b", "$MY_OWN"),
        folder=tmp_path,
        MY_OWN="kept",
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.removeprefix("[rank ").split("] ", 1) for line in done.stdout.splitlines())
    assert sorted(said) == ["0", "1"]
    for rank, (seen, arguments, folder) in ((r, json.loads(one)) for r, one in said.items()):
        assert seen["OMPI_COMM_WORLD_RANK"] == rank
        assert seen["OMPI_COMM_WORLD_SIZE"] == "2"
        assert (seen["DDL_OPTIONS"], seen["MY_OWN"]) == ("-mode p", "kept")
        assert not os.path.exists(seen["DDL_RECORD_DIR"])  # it was there for as long as the ranks
        assert arguments == ["--np", "9", "a b", "$MY_OWN"]
        assert folder == str(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["main.py"]


def test_ranks_stay_on_this_host_in_an_allocation_of_several(tmp_path):
    """As in a shell of ``salloc -N2``: mpirun would start daemons on the other nodes."""
    given = {
        **{"SLURM_JOBID": "7", "SLURM_JOB_ID": "7", "SLURM_NODELIST": "n[1-2]"},
        **{"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"},
    }
    script = "import os; print(os.environ['SLURM_JOB_ID'])"
    done = ddl_run("--np", "2", "--", "python", "-c", script, folder=tmp_path, **given)
    assert (done.returncode, done.stdout.count("7")) == (0, 2), done.stderr


def test_flags_of_the_command_are_left_to_it(tmp_path):
    words = ["--host", "a", "--ssh", "--m", "1"]  # each begins like several of ours
    done = ddl_run("--np", "1", "echo", *words, folder=tmp_path)
    assert done.stdout == " ".join(words) + "\n", done.stderr


@pytest.mark.parametrize("tf1", [True, False])
def test_tensorflow_1_is_asked_for_by_an_option(tmp_path, tf1):
    script = (
        "import os, sys; print('DDL_TF1' in os.environ, sum('ddl_ops.tf1' in type(f).__module__"
        " for f in sys.meta_path))"
    )
    words = ["--tf1"] if tf1 else []
    done = ddl_run(*words, "--np", "1", "python", "-c", script, folder=tmp_path)
    assert done.stdout == f"False {int(tf1)}\n", done.stderr


def test_timeline_is_written_where_the_caller_is(tmp_path):
    script = "import os; os.chdir('/'); print(os.environ['DDL_TIMELINE'])"
    done = ddl_run(*("--timeline", "trace.json", "python", "-c", script), folder=tmp_path)
    assert done.stdout == f"{tmp_path}/trace.json\n"


def test_one_rank_by_default_with_the_callers_options_and_its_exit_code(tmp_path):
    script = "import os, sys; print(os.environ['DDL_OPTIONS']); sys.exit(9)"
    done = ddl_run("--", "python", "-c", script, folder=tmp_path, DDL_OPTIONS="-mode x")
    assert done.stdout == "-mode x\n"
    assert done.returncode == 9


def test_each_task_of_a_cluster_has_its_own_tf_config(tmp_path):
    script = (
        "import json, os, time; task = json.loads(os.environ['TF_CONFIG'])['task'];"
        "task['type'] == 'ps' and time.sleep(60);"
        "seen = [task, os.environ['MY_OWN'], 'DDL_OPTIONS' in os.environ];"
        "print(json.dumps(seen) + '\\n', end='')"
    )
    words = ("--tf-config", "worker=2,ps=1,master=1", "python", "-c", script)
    done = ddl_run(*words, folder=tmp_path, MY_OWN="kept")
    assert done.returncode == 0, done.stderr
    lines = [line.split("] ", 1) for line in done.stdout.splitlines()]
    said = {who: json.loads(text) for who, text in lines}
    assert sorted(said) == ["[master 0", "[worker 0", "[worker 1"]
    assert all(rest == ["kept", False] for _, *rest in said.values())
    tasks = sorted((task["type"], task["index"]) for task, *_ in said.values())
    assert tasks == [("master", 0), ("worker", 0), ("worker", 1)]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def ops_alone(tmp_path):
    """A Python with what the wheel of ddl-ops has, and no ddl-airflow."""
    python, site = tmp_path / "env" / "bin" / "python", tmp_path / "site" / "ddl_ops"
    venv.create(python.parents[1], symlinks=True)
    site.mkdir(parents=True)
    for path in Path(ddl_ops.__file__).parent.iterdir():
        (site / path.name).symlink_to(path)
    (site / "launch").mkdir()
    (site / "launch" / "ddl_airflow").symlink_to(Path(run.__file__).parent)
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "ddl_ops.pth").write_text(f"{site.parent}\n")
    return python


def test_a_cluster_runs_where_there_is_ddl_ops_alone(ops_alone, tmp_path):
    def ended(code: str, *words: str) -> tuple[int, str]:
        call = [ops_alone, "-c", code, *words]
        done = subprocess.run(
            call, cwd=tmp_path, env=clean(), capture_output=True, text=True, timeout=within(30)
        )
        return done.returncode, done.stderr

    assert ended("import ddl_airflow")[0] == 1
    words = ("--tf-config", "master=1,worker=1", "python", "-c")
    call = "import sys; from ddl_ops.run import main; sys.exit(main())"
    assert ended(call, *words, "import os; os.environ['TF_CONFIG']") == (0, "")


def test_exit_code_of_a_cluster_is_that_of_the_task_that_failed(tmp_path):
    script = (
        "import json, os, sys, time; task = json.loads(os.environ['TF_CONFIG'])['task'];"
        "sys.exit(9) if task['index'] else time.sleep(60)"
    )
    done = ddl_run("--tf-config", "worker=2", "python", "-c", script, folder=tmp_path)
    assert done.returncode == 9
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ddl-run: worker 1 (rank 1 of 2) on ")
    assert last.endswith(" exited with code 9. All ranks were ended.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tf-config", "wroker=1", "python", "a.py"], "'wroker' is no kind of task"),
        (["--tf-config", "worker=1", "--np", "2", "python", "a.py"], "not allowed with"),
        (["--tf-config", "worker=1", "--timeline", "t", "python", "a.py"], "--timeline records"),
        ([], "no COMMAND given"),
        (["--np", "2"], "no COMMAND given"),
        (["--"], "no COMMAND given"),
        (["--np", "0", "python", "a.py"], "'0' is not a number of ranks"),
        (["--np", "two", "python", "a.py"], "'two' is not a number of ranks"),
        (["--np", "-1", "python", "a.py"], "--np"),
        (["--set", "a=1", "python", "a.py"], "--set is for a training of --manifest"),
        (["--data", "d", "python", "a.py"], "--data is for a training of --manifest"),
        (["--manifest", "m.yml", "--set", "a"], "'a' is not NAME=VALUE"),
        (["--manifest", "no-such.yml"], "no-such.yml: cannot be read"),
    ],
)
def test_wrong_call_is_explained(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        run.main(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_no_mpirun_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        run.main(["python", "a.py"])
    assert caught.value.code == 2
    assert "-m pip install ./ops_lib" in capsys.readouterr().err


# --- what a person sees ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "whole"),
    [
        ([b"a\nb", b"c\nd"], b"> a\n> bc\n> d\n"),
        ([b"\n\na\n"], b"> \n> \n> a\n"),
        ([b"a\r", b"\nb\r\n\r\n"], b"> a\n> b\n> \n"),
        ([b"\r 10%", b"\r 20%\r", b" 30%\n"], b">  10%\n>  20%\n>  30%\n"),
        ([b"a\r"], b"> a\n"),
        ([b"\xff\0\n"], b"> \xff\0\n"),
        ([], b""),
    ],
)
def test_lines_are_passed_on_whole(chunks, whole):
    lines = Lines("> ")
    assert b"".join(map(lines.take, [*chunks, b""])) == whole


def test_a_line_without_end_does_not_fill_memory():
    lines = Lines("> ")
    assert len(lines.take(b"x" * (1 << 21))) > 1 << 20


def test_many_lines_keep_their_rank_and_their_stream(tmp_path):
    script = textwrap.dedent("""
        import os, sys
        rank = os.environ["OMPI_COMM_WORLD_RANK"]
        for i in range(30000):
            sys.stdout.write(f"{i} of {rank} " + "x" * 60 + "\\n")
            i % 100 or sys.stderr.write(f"{i} of {rank} there\\n")
        sys.stdout.write("no end")
    """)
    done = ddl_run("--np", "2", "python", "-c", script, folder=tmp_path)
    assert done.returncode == 0
    for rank in "01":
        out = [line for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}] ")]
        wanted = [f"[rank {rank}] {i} of {rank} {'x' * 60}" for i in range(30000)]
        assert out == [*wanted, f"[rank {rank}] no end"]
        err = [line for line in done.stderr.splitlines() if line.startswith(f"[rank {rank}] ")]
        assert err == [f"[rank {rank}] {i} of {rank} there" for i in range(0, 30000, 100)]


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (
            "if rank == 1: raise ValueError('not\\na number')",
            1,
            r"rank 1 of 2 on \S+ raised ValueError at main.py:\d+: not a number. "
            r"All ranks were ended.",
        ),
        ("if rank == 1: sys.exit(9)", 9, r"rank 1 of 2 on \S+ exited with code 9. All ranks .*"),
        (
            "if rank == 0: os.kill(os.getppid(), 9)",
            137,
            r"rank 0 of 2 on \S+ was killed without a word .*",
        ),
        (
            "open(os.environ['RESULT_DIR'] + '/x')",
            1,
            r"rank . of 2 on \S+ raised KeyError at main.py:\d+: 'RESULT_DIR'. .*"
            r"ddl-run --manifest manifest.yml",
        ),
    ],
)
def test_the_last_line_says_which_rank_failed_and_why(tmp_path, script, code, said):
    start = "import os, sys, time; rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
    (tmp_path / "main.py").write_text(f"{start}{script}\ntime.sleep(60)\n")
    done = ddl_run("--np", "2", "python", "main.py", folder=tmp_path)
    assert done.returncode == code
    assert re.fullmatch(f"ddl-run: {said}", done.stderr.splitlines()[-1]), done.stderr
    assert "\0" not in done.stderr
    assert "prterun" not in done.stderr


def test_a_kill_after_a_probe_that_failed_is_said_to_be_one(tmp_path):
    (tmp_path / "main.py").write_text(
        "import os, time\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.kill(os.getpid(), 9)\n"
        "time.sleep(60)\n"
    )
    (tmp_path / "go.sh").write_text(
        "python -c 'import no_such' 2> /dev/null || exec python main.py\n"
    )
    done = ddl_run("--np", "2", "sh", "go.sh", folder=tmp_path)
    assert done.returncode == 137
    assert re.match(r"ddl-run: rank 1 of 2 on \S+ was ended by SIGKILL ", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("line", "hidden"), [("python main.py | cat", True), ("python main.py || python -c 0", False)]
)
def test_an_exception_that_the_callers_shell_hides_is_said(tmp_path, line, hidden):
    (tmp_path / "main.py").write_text("raise ValueError('too small')\n")
    done = ddl_run("--np", "2", "sh", "-c", line, folder=tmp_path)
    assert done.returncode == 0  # which is the shell's
    said = (
        r"ddl-run: rank 0 of 2 on \S+ raised ValueError at main.py:1: too small. "
        r"Its command ended with exit code 0 all the same: .*`set -o pipefail`.*"
    )
    notes = [one for one in done.stderr.splitlines() if one.startswith("ddl-run: ")]
    assert len(notes) == hidden and all(re.fullmatch(said, one) for one in notes), done.stderr


def test_what_the_launcher_says_is_shown_where_no_rank_started(tmp_path):
    done = ddl_run("--np", "2", "python", "a.py", folder=tmp_path, PRTE_MCA_rmaps="no-such")
    assert done.returncode not in (0, 2)
    *said, last = done.stderr.splitlines()
    assert said and "\0" not in done.stderr
    assert last.startswith("ddl-run: not every rank did its work, and none says why")


@pytest.mark.parametrize("closed", [(0, 1, 2), (1,)])
def test_streams_may_be_closed(tmp_path, closed):
    script = "import sys; print(1); sys.stderr.write('end'); open(sys.argv[1], 'a').write('x')"
    call = [*CALL, "--np", "2", "python", "-c", script, str(tmp_path / "done")]
    line = " ".join(f"{one}>&-" for one in closed)
    words = ["/bin/sh", "-c", f'exec "$@" {line}', "sh", *call]
    done = subprocess.run(words, env=clean(), capture_output=True, text=True, timeout=within(30))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").read_text() == "xx"
    assert ("end" in done.stderr) == (2 not in closed)


def test_a_reader_that_goes_away_ends_the_ranks():
    call = [*CALL, "--np", "2", "python", "-c", "while True: print('a' * 100)"]
    with subprocess.Popen(
        call, env=clean(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline().startswith("[rank ")
        process.stdout.close()
        assert process.wait(15) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""


def test_output_that_cannot_be_written_ends_the_ranks():
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*CALL, "--np", "2", "python", "-c", "print(1); import time; time.sleep(60)"],
            env=clean(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=within(30),
        )
    assert done.returncode == 1
    assert done.stderr == "ddl-run: the output cannot be written: No space left on device\n"


class AtTerminal:
    """``ddl-run`` at a terminal of its own."""

    def __init__(self, *words, folder):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execve(CALL[0], [*CALL, *words], clean())
        self.shown = ""

    def wait_for(self, text):
        deadline = time.monotonic() + within(20)
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            with suppress(OSError):  # the other end is closed
                self.shown += os.read(self.terminal, 4096).decode()

    def type(self, text):
        os.write(self.terminal, text.encode())

    def end(self):
        with suppress(OSError):
            while chunk := os.read(self.terminal, 4096):
                self.shown += chunk.decode()
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.terminal)
        return code


def test_one_rank_alone_has_the_terminal(tmp_path):
    (tmp_path / "main.py").write_text("import sys\nvalue = 40\nbreakpoint()\nsys.exit(value)\n")
    seen = AtTerminal("python", "main.py", folder=tmp_path)
    seen.wait_for("(Pdb) ")
    seen.type("import os; print([os.isatty(n) for n in range(3)])\n")
    seen.wait_for("[True, True, True]")
    seen.type("value += 2\ncontinue\n")
    assert seen.end() == 42
    assert seen.shown.splitlines()[-1].endswith(" exited with code 42.")


@pytest.mark.parametrize("deaf", [False, True])
def test_ctrl_c_ends_all_ranks(tmp_path, deaf):
    (tmp_path / "main.py").write_text(
        "import os, signal, subprocess, sys, time\n"
        f"if {deaf}: signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open(f'pid-{os.getpid()}', 'w'); open(f'pid-{child.pid}', 'w')\n"
        "print('up', flush=True); time.sleep(600)\n"
    )
    seen = AtTerminal("--np", "2", "python", "main.py", folder=tmp_path)
    seen.wait_for("[rank 0] up")
    seen.wait_for("[rank 1] up")
    began = time.monotonic()
    seen.type("\x03")
    assert seen.end() == -signal.SIGINT
    assert time.monotonic() - began < within(8)
    assert seen.shown.splitlines()[-1] == "ddl-run: ended by SIGINT. All ranks were ended."
    pids = [path.name.removeprefix("pid-") for path in tmp_path.glob("pid-*")]
    assert len(pids) == 4
    assert [pid for pid in pids if runs(pid)] == []


def test_ctrl_c_ends_a_loop_of_the_shell_as_well(tmp_path):
    """Which goes on where a command has dealt with the signal: that is what 130 would say."""
    (tmp_path / "main.py").write_text(
        "import os, time\nopen(f'pid-{os.getpid()}', 'w'); time.sleep(600)\n"
    )
    words = ["bash", "-c", 'for n in 1 2 3; do "$@"; done; touch went-on', "bash"]
    shell = subprocess.Popen(
        [*words, *CALL, "--np", "2", "python", "main.py"],
        cwd=tmp_path,
        env=clean(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, 60)
        os.killpg(shell.pid, signal.SIGINT)
        _, said = shell.communicate(timeout=within(60))
    finally:
        if shell.poll() is None:
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == -signal.SIGINT
    assert said.splitlines()[-1] == "ddl-run: ended by SIGINT. All ranks were ended."
    pids = [path.name.removeprefix("pid-") for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2 and not (tmp_path / "went-on").exists()
    assert [pid for pid in pids if runs(pid)] == []


@pytest.mark.parametrize("nohup", [False, True])
def test_a_terminal_that_is_closed_ends_all_ranks(tmp_path, nohup):
    """As with its window, or the connection to its host; but for who has said nohup."""
    (tmp_path / "main.py").write_text(
        "import os, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "open(f'pid-{os.getpid()}', 'w'); open(f'pid-{child.pid}', 'w')\n"
        "print('up', flush=True); time.sleep(5 if os.environ.get('SHORT') else 600)\n"
        "open(f'whole-{os.getpid()}', 'w')\n"
    )
    words = [*CALL, "--np", "2", "python", "main.py"]
    environ = clean() | ({"SHORT": "1"} if nohup else {})
    with open(tmp_path / "shown", "wb") as shown:
        process = subprocess.Popen(
            ["nohup", *words] if nohup else words,
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=subprocess.STDOUT,
        )
    until(lambda: (tmp_path / "shown").read_text().count("] up") == 2, 60)
    process.send_signal(signal.SIGHUP)
    assert process.wait(within(30)) == (0 if nohup else -signal.SIGHUP)
    assert len(list(tmp_path.glob("whole-*"))) == (2 if nohup else 0)
    last = (tmp_path / "shown").read_text().splitlines()[-1]
    assert nohup or last == "ddl-run: ended by SIGHUP. All ranks were ended."
    pids = [path.name.removeprefix("pid-") for path in tmp_path.glob("pid-*")]
    assert len(pids) == 4
    assert [pid for pid in pids if runs(pid)] == []


def runs(pid):
    try:
        stat = Path("/proc", pid, "stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"  # else it has ended, and nobody asked how


def test_ctrl_c_while_hosts_are_waited_for_is_no_traceback(tmp_path):
    words = ["--min-np", "2", "--host-discovery-script", "echo localhost:1", "python", "main.py"]
    seen = AtTerminal(*words, folder=tmp_path)
    seen.wait_for("Waiting for hosts.")
    seen.type("\x03")
    assert seen.end() == -signal.SIGINT
    assert seen.shown.splitlines()[-1] == "ddl-run: ended by SIGINT."
    assert "Traceback" not in seen.shown


class Hosts:
    """One that does not answer at the end, when there is ``meanwhile`` to do."""

    meanwhile = staticmethod(lambda: None)

    def __init__(self, *_):
        self.left = []

    look = environment = argv = lambda self, *_: {}

    def finish(self):
        self.meanwhile()
        return {"gpu1": "it does not answer"}


@pytest.fixture
def start(monkeypatch):
    """start(slots): of ranks that end at once."""
    monkeypatch.setattr(run, "NamedHosts", Hosts)
    monkeypatch.setattr(run.terminal, "run", lambda *_, **__: run.terminal.Ended(1, "", 0, ()))
    options = run._parser().parse_args(["--hosts", "gpu1:1", "true"])
    return lambda slots: run._run(run._Training(["true"], 1, slots=slots), options, None)[1]


def test_hosts_are_cleaned_whoever_is_impatient(start, monkeypatch):
    """Ctrl-C at a terminal goes to what reaches the hosts, too."""
    finished = []

    def ask():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        shell = ["sh", "-c", "kill -INT $$; kill -TERM $$; echo whole"]
        finished.append(subprocess.run(shell, stdout=subprocess.PIPE).stdout)

    monkeypatch.setattr(Hosts, "meanwhile", staticmethod(ask))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert "A host is gone. gpu1: it does not answer." in start({"gpu1": 1}).reason
    assert finished == [b"whole\n"]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("slots", [{}, {"gpu1": 1}])
def test_nothing_is_open_and_nobody_waits_after_a_start(start, slots):
    """Elastic jobs start again and again."""
    before, waited = os.listdir("/proc/self/fd"), waiting()
    for _ in range(2):
        start(slots)
    assert os.listdir("/proc/self/fd") == before
    until(lambda: waiting() <= waited, 20)


def waiting():
    """The command lines of what waits to remove a directory of this process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.add(path.read_text(errors="replace"))
    return {line for line in found if f"-{os.getpid()}-" in line}


# A rank is over for half a second, in place of two minutes, before it is not waited for.
IMPATIENT = [
    *CALL[:2],
    "from ddl_airflow.launchers import terminal; terminal.END_S, terminal._OVER_S = 0.5, 0.1; "
    + CALL[2],
]


@pytest.mark.parametrize(
    ("words", "elastic"),
    [(["--tf-config", "worker=2"], False), (["--np", "2", "--min-np", "2"], True)],
)
def test_what_cannot_end_is_named_and_not_waited_for(tmp_path, freezer, words, elastic):
    """One rank fails and another cannot end. Killed, it runs no more of its script."""
    (tmp_path / "main.py").write_text(
        "import os, sys, time\n"
        "first = '\"index\": 0' in os.environ.get('TF_CONFIG', '') or "
        "os.environ.get('OMPI_COMM_WORLD_RANK') == '0'\n"
        "open(f'up-{first}', 'w').write(f'{os.getppid()}\\n')\n"
        "while not (first and os.path.exists('fail')): time.sleep(0.02)\n"
        "sys.exit(7)\n"
    )
    process = subprocess.Popen(
        [*IMPATIENT, *words, "python", "main.py"],
        cwd=tmp_path,
        env=clean(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        up = [tmp_path / f"up-{first}" for first in (True, False)]
        until(lambda: all(path.exists() and path.read_text() for path in up), 20)
        freezer.freeze(pid := int(up[1].read_text()))
        (tmp_path / "fail").touch()
        said = output(process, 20)[1]
    finally:
        freezer.thaw()
        process.kill()
    assert process.returncode == 7
    assert re.search(
        rf"\. These did not end: process {pid} \(.*, in uninterruptible sleep in ", said
    )
    assert ("Starts again (1)." in said) is elastic
    until(lambda: not runs(str(pid)), 20)


# --- a manifest by hand ------------------------------------------------------------------------

MANIFEST = """
model_definition:
  name: by hand
  framework: {name: tensorflow, version: "1.15"}
  execution:
    command: python main.py --epochs {{ params.epochs }} "$PARAM_NAME"; python after.py
    compute_configuration: {name: cpu2, nodes: 1}
training_data_reference: {type: fs, source: {path: ./data}}
training_results_reference: {type: fs, target: {path: ./results}}
code: ./src
distribution: independent
metrics: [{name: loss, regex: "loss= ([0-9.]+)"}]
parameters:
  epochs: {default: 4, minimum: 1, maximum: 50}
  name: a b
"""
SHOWS = """
import json, os, sys
from pathlib import Path
names = '''DATA_DIR RESULT_DIR CHECKPOINT_DIR LOG_DIR JOB_STATE_DIR TRAINING_ID JOB_NAME MODEL_DIR
    EXPERIMENT_ID EXPERIMENT_DIR PARAM_EPOCHS PARAM_NAME DDL_OPTIONS LEARNER_ID NUM_LEARNERS
    GPU_COUNT DLAAS_JOB_ID'''.split()
seen = {name: os.environ[name] for name in names}
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    print("loss= 0.25", file=sys.stderr)
    Path(os.environ["RESULT_DIR"], "model").mkdir()
    tf1 = any("ddl_ops.tf1" in type(one).__module__ for one in sys.meta_path)
    print("seen " + json.dumps([seen, sys.argv[1:], os.getcwd(), tf1]))
"""


@pytest.fixture
def written(tmp_path):
    """A folder with a manifest, its scripts and its data."""
    for name in ("src", "data"):
        (tmp_path / name).mkdir()
    (tmp_path / "manifest.yml").write_text(MANIFEST)
    (tmp_path / "src" / "main.py").write_text(SHOWS)
    return tmp_path


def test_a_manifest_gives_what_the_train_task_would(written):
    words = ("--manifest", "manifest.yml", "--set", "epochs=7")
    done = ddl_run(*words, folder=written)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    seen, arguments, folder, tf1 = json.loads(line.removeprefix("[rank 0] seen "))
    assert tf1
    assert arguments == ["--epochs", "7", "a b"]
    assert folder == seen["MODEL_DIR"] == str(written / "src")
    assert seen["DATA_DIR"] == str(written / "data")
    first = done.stderr.splitlines()[0]
    root = written / first.removeprefix("ddl-run: this training's folder is ")
    assert seen["RESULT_DIR"] == f"{root}/result"
    assert (root / "result" / "model").is_dir()
    assert seen["CHECKPOINT_DIR"] == f"{root}/result/checkpoints"
    assert (seen["LOG_DIR"], seen["JOB_STATE_DIR"]) == (f"{root}/logs", f"{root}/ddl")
    assert seen["TRAINING_ID"] == seen["EXPERIMENT_ID"] == root.name
    assert (seen["JOB_NAME"], seen["LEARNER_ID"]) == ("by-hand", "1")
    assert (seen["NUM_LEARNERS"], seen["GPU_COUNT"]) == ("1", "0")
    assert seen["DLAAS_JOB_ID"] == seen["TRAINING_ID"]
    assert (seen["PARAM_EPOCHS"], seen["PARAM_NAME"]) == ("7", "a b")
    assert "[rank 0] loss= 0.25" in done.stderr
    (progress,) = map(json.loads, (root / "ddl" / "progress.jsonl").read_text().splitlines())
    assert (progress["loss"], progress["source"]) == (0.25, "metrics")
    again = ddl_run(*words, "--np", "1", "python", "src/main.py", "x", folder=written)
    seen_again, arguments, folder, _ = json.loads(again.stdout.removeprefix("seen "))
    assert (arguments, folder) == (["x"], str(written))
    assert seen_again["RESULT_DIR"] != seen["RESULT_DIR"]


RESULTS_OF = """
import os, sys
from pathlib import Path
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    print("loss= {loss}")
    for name in {names}:
        path = Path(os.environ["RESULT_DIR"], name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
"""
KERAS = ["checkpoints/model-1.keras", "checkpoints/model-2.keras"]


@pytest.mark.parametrize(
    ("loss", "names", "change", "lines"),
    [
        (
            0.25,
            KERAS,
            {"; python after.py": ""},
            [
                "results are in {result}: 2 checkpoints, the newest checkpoints/model-2.keras; "
                "loss 0.25 (the output)",
                f"{NEXT}: transform, upload to ./results.",
            ],
        ),
        (
            "nan",
            ["model/saved_model.pb"],
            {
                "; python after.py": "",
                "code:": "evaluation: {metric: accuracy, minimum: 0.9}\ncode:",
            },
            [
                "results are in {result}: model; loss NaN (the output)",
                f"{NEXT}: transform, evaluation, upload to ./results.",
                "warning: loss is NaN at the end of the training (the output): it diverged, or ",
            ],
        ),
        (
            0.5,
            ["notes.txt"],
            {"; python after.py": ""},
            [
                "results are in {result}: notes.txt; loss 0.5 (the output)",
                f"{NEXT}: transform, upload to ./results.",
                "warning: transform would fail: {result}: no checkpoint; found notes.txt. Save to ",
            ],
        ),
        (
            0.5,
            KERAS,
            {"; python after.py": "", "code:": "transform: {checkpoint: 7}\ncode:"},
            [
                "results are in {result}: 2 checkpoints, the newest checkpoints/model-2.keras; ",
                f"{NEXT}: transform, upload to ./results.",
                "warning: transform would fail: {result}/checkpoints: no checkpoint at step 7; ",
            ],
        ),
        (
            0.5,
            [],
            {},
            [
                "results are in {result}: nothing; loss 0.5 (the output)",
                f"{NEXT}: python after.py, upload to ./results.",
            ],
        ),
    ],
)
def test_a_manifest_by_hand_ends_with_what_it_left_and_did_not_do(
    written, loss, names, change, lines
):
    text = MANIFEST
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    (written / "manifest.yml").write_text(text)
    (written / "src" / "main.py").write_text(RESULTS_OF.format(loss=loss, names=names))
    done = ddl_run("--manifest", "manifest.yml", folder=written)
    assert done.returncode == 0, done.stderr
    first, *said = done.stderr.splitlines()
    result = first.removeprefix("ddl-run: this training's folder is ") + "/result"
    assert len(said) == len(lines), said
    for line, begins in zip(said, lines, strict=True):
        assert line.startswith(f"ddl-run: {begins.format(result=result)}")


def test_ranks_that_trained_apart_are_told_so(written):
    """As the train task does for a manifest; by hand they need not train at all."""
    manifest = written / "manifest.yml"
    manifest.write_text(MANIFEST.replace("distribution: independent\n", ""))
    (written / "src" / "main.py").write_text("print('trained')")
    said = "ddl-run: The 2 ranks trained apart, each a model of its own: ranks 0 and 1 did not"
    done = ddl_run("--manifest", "manifest.yml", folder=written)
    assert (done.returncode, done.stderr.splitlines()[-1].startswith(said)) == (1, True)
    done = ddl_run("--np", "2", "python", "src/main.py", folder=written)
    assert (done.returncode, done.stderr.startswith(said)) == (0, True)
    for command in (["--np", "1", "python", "src/main.py"], ["--np", "2", "echo", "trained"]):
        done = ddl_run(*command, folder=written)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ({}, ["--set", "epoch=7"], "'epoch' is not known. Did you mean epochs?"),
        ({}, ["--set", "epochs=x"], "epochs is 'x', wanted a whole number."),
        ({}, ["--set", "epochs=51"], "epochs is 51, beyond the maximum 50."),
        ({}, ["--set", "nodes=2"], "'nodes' is not known."),
        ({}, ["--data", "no-such"], "the training data no-such is no folder"),
        ({"{path: ./data}": "{path: ./there}"}, [], "Give one: --data DIR"),
        (
            {
                "{type: fs, source: {path: ./data}}": "{type: s3, connection: {conn_id: c}, "
                "source: {bucket: digits}}"
            },
            [],
            "the data is of type s3, which ddl-run does not fetch. Use `ddl-airflow run`, or give "
            "a folder that has it: --data DIR",
        ),
        *(
            (
                {"{path: ./data}}": f"{{path: ./data}}, {field}}}"},
                [],
                f"ddl-run reads data in place, without training_data_reference.{name}. Use "
                "`ddl-airflow run`, or give a folder that has it as it is staged: --data DIR",
            )
            for name, field in (
                ("unpack", "unpack: true"),
                ("exclude", "exclude: ['*.tmp']"),
                ("include", "include: ['*.npz']"),
            )
        ),
        ({"name: a b": "key: {secret: true}"}, [], "secret: set PARAM_KEY in the environment"),
        (
            {"name: a b": "key: {secret: true}"},
            ["--set", "key=k"],
            "Set PARAM_KEY in the environment.",
        ),
        ({"{{ params.epochs }}": "{{ ds }}"}, [], "cannot be filled in outside Airflow: 'ds' is"),
        ({"epochs: {": "epocs: {"}, [], "manifest.yml:6: model_definition.execution.command"),
    ],
)
def test_what_a_manifest_by_hand_needs_is_said(written, monkeypatch, capsys, change, words, said):
    text = MANIFEST
    for old, new in change.items():
        assert old in text
        text = text.replace(old, new)
    (written / "manifest.yml").write_text(text)
    monkeypatch.chdir(written)
    with pytest.raises(SystemExit) as caught:
        run.main(["--manifest", "manifest.yml", *words])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert not (written / ".ddl-run").exists()


def test_a_folder_that_is_given_is_the_data_as_it_is(written):
    text = MANIFEST.replace("{path: ./data}}", "{path: ./no-such}, unpack: true, exclude: [x]}")
    (written / "manifest.yml").write_text(text)
    done = ddl_run("--manifest", "manifest.yml", "--data", "data", folder=written)
    assert done.returncode == 0, done.stderr
    assert str(written / "data") in done.stdout


@pytest.mark.parametrize("blocking", [True, False])
def test_ctrl_c_ends_the_ranks_while_nobody_reads_what_they_say(tmp_path, blocking):
    """As behind ``| less`` that waits for a key: its pipe is full, and it has not gone."""
    (tmp_path / "main.py").write_text(
        "import os\nopen(f'pid-{os.getpid()}', 'w').close()\nwhile True: print('a' * 1000)\n"
    )
    reader, writer = os.pipe()
    os.set_blocking(writer, blocking)
    try:
        with subprocess.Popen(
            [*CALL, "--np", "2", "python", "main.py"],
            cwd=tmp_path,
            env=clean(),
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                deadline = time.monotonic() + within(20)
                while not list(tmp_path.glob("pid-*")):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                time.sleep(1)  # until the pipe is full
                began = time.monotonic()
                process.send_signal(signal.SIGINT)
                assert process.wait(15) == -signal.SIGINT
                assert time.monotonic() - began < within(10)
                last = process.stderr.read().splitlines()[-1]
                assert last == "ddl-run: ended by SIGINT. All ranks were ended."
            finally:
                process.kill()
    finally:
        os.close(reader)
        os.close(writer)
    assert [p.name for p in tmp_path.glob("pid-*") if runs(p.name.removeprefix("pid-"))] == []


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_host_that_goes_before_the_ranks_start_ends_no_elastic_job(
    monkeypatch, tmp_path, capfd, times
):
    """The hosts are looked at again; but not for ever."""
    starts = []

    def start(*_args):
        starts.append("")
        if len(starts) <= times:
            raise SubmitFailed("not all hosts are well. b: it does not answer")
        raise SystemExit(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_run", start)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    words = ["--min-np", "1", "--hosts", "localhost:1", "python", "main.py"]
    try:
        code = run.main(words)
    except SystemExit as ended:
        code = ended.code
    said = capfd.readouterr().err
    assert code == (2 if times == 3 else 0), said
    assert said.count("not all hosts are well. b: it does not answer") == times, said
    assert said.count("The hosts are looked at again.") == min(times, 2), said
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
