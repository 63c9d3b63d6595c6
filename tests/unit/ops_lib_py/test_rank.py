"""The rank shim, as a process of its own; mpirun itself is in the launchers' tests."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
from ddl_ops import rank as shim
from ddl_ops.environment import Placement
from ddl_ops.metric_reader import MetricReader
from ddl_ops.rank import child_environment
from ddl_ops.rank_record import RankRecord, preemption_file, writes_file

from tests.limits import until, within

LONG_S = 20.0
OWN = shlex.quote(sys.executable)
PLAIN, OF_A_SHELL = "python main.py", "python main.py; exit $?"


def environment(folder: Path, rank: int = 0, size: int = 1, **more: str) -> dict[str, str]:
    """What mpirun and the launcher give a rank."""
    kept = {n: os.environ[n] for n in ("PATH", "HOME", "LANG", "PYTHONPATH") if n in os.environ}
    return kept | {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        "DDL_RECORD_DIR": str(folder),
        "LOG_DIR": str(folder),
        **more,
    }


WARNED = """
    import signal, sys
    def told(*_):
        print("warned")
        sys.exit(5)
    signal.signal(signal.SIGUSR2, told)
    open("up", "w").write("up")
    signal.pause()
"""


class Shim:
    """One started shim, its script, and what it leaves."""

    def __init__(
        self, folder: Path, command: list[str], env: dict[str, str], new_group: bool = False
    ) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddl_ops.rank", *command],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0 if new_group else None,
        )

    def end(self) -> Shim:
        self.output, self.errors = self.process.communicate(timeout=within(LONG_S))
        return self

    @property
    def code(self) -> int:
        return self.process.returncode

    def record(self, rank: int = 0) -> dict:
        return json.loads((self.folder / f"rank-{rank}.json").read_text("utf-8"))

    def log(self, rank: int = 0) -> str:
        return (self.folder / f"rank-{rank}.log").read_text("utf-8")

    def wait_for(self, name: str) -> str:
        path, deadline = self.folder / name, time.monotonic() + within(LONG_S)
        while not (path.exists() and path.read_text()):
            assert time.monotonic() < deadline, f"no {name}"
            time.sleep(0.02)
        return path.read_text()


@pytest.fixture
def start(tmp_path):
    """start(script, command=, rank=, size=, **environment) -> Shim."""
    started: list[Shim] = []

    def make(
        script: str = "",
        *,
        command: str = PLAIN,
        rank: int = 0,
        size: int = 1,
        new_group: bool = False,
        **more,
    ) -> Shim:
        (tmp_path / "main.py").write_text(textwrap.dedent(script))
        env = environment(tmp_path, rank, size, **more)
        started.append(Shim(tmp_path, ["--command", command], env, new_group))
        return started[-1]

    yield make
    for one in started:
        one.process.kill()
        one.process.communicate()


# --- commands -------------------------------------------------------------------------------


def test_assignment_and_expansion_reach_the_script(start):
    script = "import os, sys; print(os.environ['LR'], sys.argv[1:], os.getppid())"
    one = start(script, command='LR=0.1 python main.py "$NAME" $NAME', NAME="a b").end()
    assert one.log() == f"0.1 ['a b', 'a', 'b'] {one.process.pid}\n"  # no shell in between


def test_words_after_two_dashes_are_one_argv(tmp_path):
    words = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "a b", "$HOME;"]
    env = environment(tmp_path)
    del env["DDL_RECORD_DIR"]
    one = Shim(tmp_path, ["--", *words], env).end()
    # Without a record folder nothing is written and the output goes on.
    assert one.output == "['a b', '$HOME;']\n"
    assert one.code == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [[], ["--command", ""], ["--command", "a", "--", "b"]])
def test_one_command_has_to_be_given(tmp_path, words):
    one = Shim(tmp_path, words, environment(tmp_path)).end()
    assert one.code == 2
    assert "--command" in one.errors


# --- what the script finds ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "slots", "learner"), [(0, 2, "1"), (1, 2, "1"), (2, 2, "2"), (5, 2, "3"), (3, 1, "4")]
)
def test_learner_id_is_the_node_from_one(rank, slots, learner):
    placement = Placement(rank, 6, rank, 6, launched=True)
    env = child_environment({"DDL_SLOTS": str(slots)}, placement)
    assert (env["LEARNER_ID"], env["NUM_LEARNERS"]) == (learner, str(6 // slots))


@pytest.mark.parametrize(
    ("environ", "placement", "learners"),
    [
        ({"DDL_SLOTS": "2"}, Placement(0, 3, 0, 3, launched=True), "2"),  # by ddl-run --np 3
        ({"DDL_SLOTS": "2,1"}, Placement(2, 3, 0, 1, launched=True, slots=(2, 1)), "2"),
        ({}, Placement(3, 4, 1, 2, launched=True), "2"),
        ({}, Placement(0, 1, 0, 1, launched=False), "1"),
        ({"DDL_TASK": '{"learner": 2, "nodes": 3}'}, Placement(4, 9, 0, 3, launched=True), "3"),
    ],
)
def test_it_is_told_how_many_learners_there_are(environ, placement, learners):
    """FfDL's scripts part the data by it: without it each would take all."""
    assert child_environment(environ, placement)["NUM_LEARNERS"] == learners


def test_ranks_of_a_host_share_its_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("ddl_ops.rank._OWN_CGROUPS", tmp_path / "none")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    shared = child_environment({}, Placement(0, 3, 0, 3, launched=True))
    assert (shared["OMP_NUM_THREADS"], shared["TF_NUM_INTRAOP_THREADS"]) == ("2", "2")
    crowded = child_environment({}, Placement(0, 20, 0, 20, launched=True))
    assert crowded["OMP_NUM_THREADS"] == "1"
    own = child_environment({"OMP_NUM_THREADS": "5"}, Placement(0, 3, 0, 3, launched=True))
    assert own["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("group", "files", "threads"),
    [
        ("0::/", {"cpu.max": "250000 100000"}, "3"),
        ("0::/", {"cpu.max": "max 100000"}, "8"),
        ("0::/", {}, "8"),
        # As of a host's own: a group above may allow less.
        ("0::/one/job", {"one/cpu.max": "200000 100000", "one/job/cpu.max": "max 100000"}, "2"),
        ("0::/../elsewhere", {"cpu.max": "400000 100000"}, "4"),
        (
            "4:cpu,cpuacct:/kubepods/one\n0::/",
            {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"},
            "2",
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "8"),
    ],
)
def test_ranks_start_no_more_threads_than_a_limit_of_cpu_lets_run(
    tmp_path, monkeypatch, group, files, threads
):
    """Of a pod on a node of 96 cores each rank started 96, which the kernel then held back."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    monkeypatch.setattr("ddl_ops.rank._CGROUPS", tmp_path)
    monkeypatch.setattr("ddl_ops.rank._OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text(f"9:memory:/x\n{group}\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    env = child_environment({}, Placement(0, 1, 0, 1, launched=True))
    assert (env["TF_NUM_INTRAOP_THREADS"], env["OMP_NUM_THREADS"]) == (threads, threads)


def test_rank_of_a_job_that_a_rank_starts_is_no_child():
    of_another = {"DDL_RANK_PROCESS": "7 -", "DDL_SHELL": "6"}
    env = child_environment(of_another, Placement(0, 1, 0, 1, launched=True))
    assert not env.keys() & of_another.keys()


def test_python_means_the_python_of_the_shim_and_the_callers_path_stays():
    env = child_environment(
        {"PATH": "/a:/b", "PYTHONPATH": "/mine"}, Placement(0, 1, 0, 1, launched=True)
    )
    assert env["PATH"].split(":") == [str(Path(sys.executable).parent), "/a", "/b"]
    startup, mine = env["PYTHONPATH"].split(":")
    assert Path(startup, "sitecustomize.py").is_file()
    assert mine == "/mine"


def test_a_sitecustomize_of_the_site_still_runs(start, tmp_path):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import builtins\nbuiltins.ran = __file__\n")
    one = start("import builtins; print(builtins.ran)", PYTHONPATH=str(site)).end()
    assert one.log() == f"{site / 'sitecustomize.py'}\n"


# --- output and metrics ---------------------------------------------------------------------


def test_output_of_both_kinds_is_kept_in_order_and_appended(start, tmp_path):
    (tmp_path / "rank-2.log").write_text("of the try before\n")
    script = "import sys; print('out', flush=True); print('err ü', file=sys.stderr)"
    one = start(script, rank=2, size=3, LANG="C.UTF-8").end()
    assert one.log(2) == "of the try before\nout\nerr ü\n"
    assert (one.output, one.errors) == ("", "")


def test_output_is_there_while_the_script_runs(start, tmp_path):
    one = start("import time; print('up\\n', end=''); time.sleep(60)")
    assert one.wait_for("rank-0.log") == "up\n"


def test_metric_reader_takes_lines_however_they_come_apart():
    reader = MetricReader([{"name": "loss", "regex": "Löss= ([0-9.]+)"}])
    text = "Löss= 0.25 more\nnothing\rLöss= 0.5\r\nLöss= 0.7".encode()
    found = []
    for index in range(len(text)):
        found += reader.feed(text[index : index + 1])
    assert found == [{"loss": 0.25}, {"loss": 0.5}]


def test_metric_reader_leaves_out_what_is_no_number():
    reader = MetricReader(
        [{"name": "loss", "regex": r"loss=(\S+)"}, {"name": "acc", "regex": r"acc=(\S+)?"}]
    )
    assert reader.feed(b"loss=high acc=0.5\nacc=\nloss=1e-3\n") == [{"acc": 0.5}, {"loss": 0.001}]


@pytest.mark.parametrize(
    ("regex", "line", "value"),
    [
        (r"loss= (\S+)", "loss= nan", "nan"),
        (r"loss= ([0-9.]+)", "step 3 loss= nan", "nan"),
        (r"loss= ([0-9.]+), acc", "loss= -inf, acc= nan", "-inf"),
        (r"loss=\s*([0-9.]*)", "loss= NaN", "nan"),
        (r"loss= (\d+\.\d{4}),", "nan: loss= Infinity, nan", None),  # more digits than it wants
        (r"loss= (\d\.\d+e[+-]\d+)", "loss= -nan", "nan"),
        (r"loss= (\d+)\b", "loss= inf", "inf"),
        (r"loss= ([0-9.]+)", "loss= nano", None),
        (r"loss= ([0-9.]+)", "nan loss= unknown", None),
        (r"([0-9.]+) is the loss", "nan of these, 7 is the loss", "7"),
    ],
)
def test_nan_and_infinities_are_found_by_expressions_for_digits(regex, line, value):
    reader = MetricReader([{"name": "loss", "regex": regex}])
    found = reader.feed(f"{line}\n".encode())
    assert repr(found) == repr([] if value is None else [{"loss": float(value)}])


@pytest.mark.parametrize(
    ("regex", "line"),
    [
        (r"loss.*acc.*= ([0-9.]+)", "loss acc " * 7000),
        (r"(?:a+)+b([0-9]+)", "a" * 60 + " nan"),
        (r"(?:a+)+b([0-9]+)", "a" * 60),
        (r"a.*a.*a.*a.*= ([0-9.]+)", "a" * 4000),
    ],
)
def test_an_expression_that_takes_long_on_a_line_does_not_hold_the_training(regex, line):
    reader = MetricReader([{"name": "slow", "regex": regex}, {"name": "x", "regex": r"x=(\d+)"}])
    began = time.process_time()
    found = reader.feed(f"{line}\nx=1\n".encode() * 10)  # each at most 0.1 s
    assert found == [{"x": 1.0}] * 10
    assert time.process_time() - began < within(5)
    assert [note for note in reader.notes() if "'slow'" in note] or len(line) > 4096
    assert reader.notes() == []


def test_a_value_is_searched_in_the_beginning_of_a_long_line():
    reader = MetricReader([{"name": "x", "regex": r"x=(\d+)"}])
    text = "x=1" + " " * 5000 + "\n" + " " * 5000 + "x=2\n" + "y" * 100_000
    assert reader.feed(text.encode()) == [{"x": 1.0}]
    assert reader.feed(b"\nx=3\n") == [{"x": 3.0}]


def metrics_of(one: Shim) -> list[dict]:
    assert (one.end().code, one.errors) == (0, "")
    path = one.folder / "progress.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [
        {n: v for n, v in json.loads(line).items() if n not in ("t", "source")} for line in lines
    ]


def with_metrics(folder: Path, *pairs: tuple[str, str]) -> dict[str, str]:
    definitions = [{"name": name, "regex": regex} for name, regex in pairs]
    return {"DDL_METRICS": json.dumps(definitions), "DDL_PROGRESS": str(folder / "progress.jsonl")}


def test_metrics_come_from_the_output(start, tmp_path):
    env = with_metrics(tmp_path, ("step", r"step (\d+)"), ("loss", r"loss= (\S+)"))
    script = "print('step 10 loss= 0.5'); print('hm'); print('step 20 loss= nan')"
    expected = [{"step": 10, "loss": 0.5}, {"step": 20, "loss": "NaN"}]
    assert metrics_of(start(script, **env)) == expected


def test_metric_in_a_last_line_without_an_end_counts(start, tmp_path):
    script = "import sys; sys.stdout.write('accuracy= 0.75')"
    env = with_metrics(tmp_path, ("accuracy", r"accuracy= (\S+)"))
    assert metrics_of(start(script, **env)) == [{"accuracy": 0.75}]


@pytest.mark.parametrize("word", ["nan", "inf", "1e999"])
def test_a_count_that_is_no_number_does_not_end_the_training(start, tmp_path, word):
    script = f"print('epoch {word} loss= 0.5'); print('done')"
    env = with_metrics(tmp_path, ("epoch", r"epoch (\S+)"), ("loss", r"loss= (\S+)"))
    one = start(script, **env)
    assert [line.get("loss") for line in metrics_of(one)] == [0.5]
    assert one.record()["exit_code"] == 0


# --- ends -----------------------------------------------------------------------------------


def test_record_says_who_where_and_how_long(start):
    before = time.time()
    one = start("import sys; sys.exit(7)", rank=3, size=4).end()
    record = one.record(3)
    assert one.code == record["exit_code"] == 7
    assert (record["rank"], record["host"]) == (3, os.uname().nodename)
    assert before <= record["started"] <= record["ended"] <= time.time()
    assert "exception" not in record and "asked_to_end" not in record
    assert "versions" not in record  # rank 0's are everybody's


def test_rank_0_records_what_decides_how_it_computes_and_nothing_else(start):
    record = start("", TF_DETERMINISTIC_OPS="1", SECRET_KEY="a-secret").end().record()
    assert record["world_size"] == 1
    assert record["settings"]["TF_DETERMINISTIC_OPS"] == "1"
    assert int(record["settings"]["TF_NUM_INTRAOP_THREADS"]) > 0  # which the shim has set
    assert record["cpu"] and "a-secret" not in json.dumps(record)


def test_rank_0_records_the_versions_the_model_depends_on(start):
    versions = start("").end().record()["versions"]
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert {"numpy", "keras"} <= set(versions)


def test_record_is_there_before_the_end(start):
    one = start("import time; time.sleep(60)")
    record = json.loads(one.wait_for("rank-0.json"))
    assert record["pid"] == one.process.pid
    assert "ended" not in record and "exit_code" not in record


def test_exception_is_recorded_with_its_place(start, tmp_path):
    script = """
        class Odd(ValueError):
            pass
        def inner():
            raise Odd("pixel 17 ü")
        inner()
    """
    one = start(script).end()
    said = one.record()["exception"]
    assert (said["type"], said["message"], said["line"]) == ("Odd", "pixel 17 ü", 5)
    assert said["file"] == "main.py"
    assert said["bases"][:2] == ["ValueError", "Exception"]
    assert "Traceback" in one.log()
    assert one.code == 1


def test_a_message_is_no_longer_than_what_is_read_of_it(start):
    one = start("import sys; sys.tracebacklimit = 0; raise ValueError('x' * 3_000_000)").end()
    assert one.record()["exception"]["message"] == "x" * 200_000


def test_syntax_error_has_its_line(start, tmp_path):
    said = start("x = 1\ny = (\n").end().record()["exception"]
    assert (said["type"], said["line"]) == ("SyntaxError", 2)
    assert said["file"].endswith("main.py")


@pytest.mark.parametrize(
    ("script", "code"), [("import os; os.kill(os.getpid(), 9)", 137), ("raise SystemExit(3)", 3)]
)
@pytest.mark.parametrize(
    "then", ["python main.py", "exec python main.py", "python main.py & python main.py; wait $!"]
)
def test_an_exception_of_an_earlier_python_is_not_why_a_later_one_ended(start, script, code, then):
    one = start(script, command=f"python -c 'import no_such' 2> probed || {then}").end()
    assert "ModuleNotFoundError" in (one.folder / "probed").read_text()
    assert one.code == one.record()["exit_code"] == code
    assert "exception" not in one.record()


@pytest.mark.parametrize(
    "command",
    [
        "sh run.sh",
        "python main.py || (python -c 'print(1)' && false)",
        "(python main.py || (sleep 0.5 && exit 1)) 2>&1 | (sleep 0.4 && exec python -c 'input()')",
    ],
)
def test_an_earlier_pythons_exception_is_told_beside_the_last_line(start, tmp_path, command):
    """It may be why the command ends so, or one that it got over: the shim cannot know."""
    (tmp_path / "run.sh").write_text("python main.py\nrc=$?\npython -c 'print(1)'\nexit $rc\n")
    one = start("import no_such", command=command).end()
    assert one.code == one.record()["exit_code"] == 1
    assert "exception" not in one.record()
    told = "an earlier Python ended with ModuleNotFoundError: No module named 'no_such'"
    assert told in one.record()["reason"]


def test_an_exception_that_the_command_got_over_is_not_why_it_ends_when_asked(start):
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        open("up", "w").write("x")
        time.sleep(60)
    """
    one = start(script, command="python -c 'import no_such' || python main.py")
    one.wait_for("up")
    one.process.terminate()
    assert one.end().record()["exit_code"] == 1
    assert "exception" not in one.record()


@pytest.mark.parametrize("bash", [True, False])
@pytest.mark.parametrize(
    "command",
    ["sh run.sh", "cd . && sh run.sh", "sh run.sh --n $(echo 2)", "(cd . && sh run.sh)"],
)
def test_an_exception_that_a_script_got_over_behind_a_pipe_is_no_failure(
    start, tmp_path, command, bash
):
    (tmp_path / "run.sh").write_text("python -c 'import no_such' || echo without\npython main.py\n")
    more = {} if bash else {"PATH": str(without_bash(tmp_path, "sh"))}
    one = start("print('ran')", command=f"{command} 2>&1 | tee out", **more).end()
    assert (one.code, one.log().endswith("without\nran\n")) == (0, True)


def test_an_exception_of_one_of_two_pythons_that_run_together_is_recorded(start):
    script = "import os, time; open('up', 'w').close(); time.sleep(1); raise ValueError('one')"
    both = "python main.py & until [ -e up ]; do sleep 0.1; done; python -c 0; wait $!"
    one = start(script, command=both).end()
    assert (one.code, one.record()["exception"]["type"]) == (1, "ValueError")


def test_what_a_script_starts_leaves_its_exception_alone(start):
    script = """
        import atexit, subprocess, sys
        atexit.register(subprocess.run, [sys.executable, "-c", "import no_such"])
        raise ValueError("its own")
    """
    assert start(script).end().record()["exception"]["type"] == "ValueError"


WRITES = """
    import os, sys, threading
    from pathlib import Path
    result = os.environ["RESULT_DIR"]
    os.chdir(result)
    for name, mode in (("w", "w"), ("x", "xb"), ("both", "w+b")):
        open(name, mode).close()
        open(Path(result) / ".." / "result" / name, mode.replace("x", "w")).close()
    for name, mode in (("log", "a"), ("log", "a+b"), ("w", "r"), ("w", "rb")):
        open(name, mode).close()
    # A lock, a part of a file, and what only one rank can have made.
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY, os.O_WRONLY | os.O_APPEND):
        os.close(os.open(f"os-{flags}", flags | os.O_CREAT))
        os.close(os.open(f"os-new-{flags}", flags | os.O_CREAT | os.O_EXCL | os.O_TRUNC))
    os.close(os.open("os-emptied", os.O_RDWR | os.O_CREAT | os.O_TRUNC))
    open("only-new", "x").close()
    open("only-new", "r+b").close()
    open("../elsewhere", "w").close()
    open(os.open("w", os.O_RDONLY), "rb").close()
    sys.audit("open", "told", "w", 0)
    sys.audit("open", b"\\xff", "w", 0)
    for odd in (None, 3.5, [], "/a\\0b"):
        sys.audit("open", odd, "w", 0)
    def in_thread(number):
        open(f"thread-{number}", "w").close()
    threads = [threading.Thread(target=in_thread, args=[n]) for n in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    if (child := os.fork()) == 0:
        open("forked", "w").close()
        os._exit(0)
    os.waitpid(child, 0)
    try:
        open("none/there", "w")
    except FileNotFoundError:
        print("not there")
    for n in range(int(sys.argv[1])):
        open("many-%d" % n, "w").close()
"""


def test_results_that_are_written_are_noted_once(start, tmp_path):
    (tmp_path / "result").mkdir()
    one = start(
        WRITES,
        command="python main.py 0; python -c 0",
        size=2,
        rank=1,
        RESULT_DIR=str(tmp_path / "result"),
    ).end()
    assert one.log(1) == "not there\n"
    wrote = one.record(1)["wrote"]
    assert all(name.startswith(f"{tmp_path}/result/") for name in wrote)
    names = [name.removeprefix(f"{tmp_path}/result/") for name in wrote]
    assert len(names) == len(set(names))
    assert set(names) == {
        *("w", "x", "both", "os-emptied", "told", "\udcff", "forked", "none/there"),
        *("thread-0", "thread-1", "thread-2"),
    }


def test_an_h5_file_is_written_unless_it_is_opened_to_be_read(tmp_path):
    from ddl_ops import written_files

    path = tmp_path / "model.h5"
    for mode in ("r", None):
        assert written_files._opened(path, mode) == ""
    assert written_files._opened(path) == ""
    assert written_files._opened(path, "w") == str(path)
    assert written_files._opened(open, "w") == ""


def test_files_that_are_noted_have_an_end(start, tmp_path):
    (tmp_path / "result").mkdir()
    one = start(WRITES, command="python main.py 1000", size=2, RESULT_DIR=str(tmp_path / "result"))
    assert len(one.end().record()["wrote"]) == 200 + 1  # the fork counts by itself
    assert len(list((tmp_path / "result").glob("many-*"))) == 1000
    (tmp_path / "rank-0.writes").unlink()
    alone = start(
        WRITES.replace("xb", "w"), command="python main.py 0", RESULT_DIR=str(tmp_path / "result")
    )
    assert "wrote" not in alone.end().record()  # one rank has nobody to write with


def test_exit_on_purpose_is_no_exception(start):
    one = start("import sys; sys.exit('no data')").end()
    assert "exception" not in one.record()
    assert (one.code, one.log()) == (1, "no data\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_signal_is_128_and_its_number(start, number):
    one = start(f"import os; os.kill(os.getpid(), {int(number)})").end()
    assert one.code == one.record()["exit_code"] == 128 + number
    assert "asked_to_end" not in one.record()


KILLS_ITSELF = "import os; os.kill(os.getpid(), 9)"
RAISES = "raise ValueError('too small')"


@pytest.mark.parametrize(
    ("script", "command", "code"),
    [
        (RAISES, "python main.py | cat", 1),
        (RAISES, "cd . && python main.py 2>&1 | tee out | cat", 1),
        (RAISES, "python main.py | tee out && cat out", 1),
        ("import sys; sys.exit(7)", "(cd . && python main.py) 2>&1 | tee out", 7),
        ("import sys; sys.exit(7)", "bash -c 'cd .; python main.py | tee out'", 7),
        (RAISES, "bash -c 'cd .; python main.py | tee out && cat out'", 1),
        (RAISES, "bash -c 'python main.py | tee out; cd . && cat out'", 0),
        (RAISES, "bash -c '(python main.py | tee out); cat out'", 0),
        (KILLS_ITSELF, "python main.py | cat", 137),
        ("", "python main.py | (cat; exit 3)", 3),
        ("", "python main.py | (cat; exit 3) | cat", 3),
        ("", "no-such-program | cat", 127),
        ("", "python main.py | cat", 0),
        ("", "! python main.py | grep x", 0),
        ("", "yes | head -1", 0),  # whose reader has had enough
        ("", "yes | head -1 | cat && python main.py", 0),
        ("", "yes | grep -q y && python main.py", 0),
        (RAISES, "(cd . && python main.py 2>&1 | tee out)", 1),
        ("", "(cd . && python main.py 2>&1 | tee out)", 0),
        (RAISES, "python main.py | cat || true", 0),
        (RAISES, "(python main.py || true) | cat; exit 0", 0),
        (RAISES, "python main.py || true", 0),
    ],
)
def test_a_pipe_fails_where_a_part_of_it_fails(start, script, command, code):
    one = start(script, command=command).end()
    assert one.code == one.record()["exit_code"] == code, one.log()


@pytest.mark.parametrize(
    "arguments", ["--shape={28,28} {a..c} {x,y}{1,2}", "~ $LANG", "'a  b' m*.py"]
)
def test_a_pipe_leaves_the_words_of_a_command_as_they_are(start, tmp_path, arguments):
    script = "import sys; print(sys.argv[1:])"
    logs = []
    for more in (" && true", " | cat", " 2>&1 | cat"):
        logs.append(start(script, command=f"python main.py {arguments}{more}").end().log())
        (tmp_path / "rank-0.log").unlink()
    assert logs[0].startswith("[") and len({*logs}) == 1, logs


def without_bash(folder: Path, *more: str) -> Path:
    """A folder of programs for PATH."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("cat", "tee", "grep", *more):
        (programs / name).symlink_to(shutil.which(name))
    return programs


def test_without_bash_an_exception_behind_a_pipe_is_no_success(start, tmp_path):
    path = str(without_bash(tmp_path))
    for script, code in ((RAISES, 1), ("", 0)):
        one = start(script, command="python main.py 2>&1 | cat", PATH=path).end()
        assert one.code == one.record()["exit_code"] == code
        (tmp_path / "rank-0.exception.json").unlink(missing_ok=True)


@pytest.mark.parametrize("command", ["no-such-program a", "no-such-program $HOME"])
def test_command_not_found_is_127(start, command):
    one = start(command=command).end()
    assert one.code == one.record()["exit_code"] == 127
    log = one.folder / "rank-0.log"
    assert "no-such-program" in one.errors + (log.read_text() if log.exists() else "")


def test_program_that_may_not_be_run_is_126(start):
    one = start(command="./main.py").end()
    assert one.code == one.record()["exit_code"] == 126
    assert "./main.py" in one.record()["reason"]


def test_a_launcher_of_another_contract_starts_no_script(start):
    one = start("print('ran')", DDL_CONTRACT="99").end()
    assert one.code == one.record()["exit_code"] == 126
    assert "of another release than ddl-airflow: process contract 1, and 99" in one.errors
    assert "Install the same release of both" in one.record()["reason"]


def test_a_schedulers_warning_is_no_release(start, tmp_path):
    """As of ``sbatch --signal=B:USR2@120``, which mpirun passes on."""
    one = start(WARNED)
    one.wait_for("up")
    one.process.send_signal(signal.SIGUSR2)
    one.end()
    assert (one.code, one.log()) == (5, "warned\n")
    assert not {"released", "asked_to_end"} & one.record().keys()


def test_sigterm_goes_on_to_the_script_and_is_recorded_at_once(start, tmp_path):
    script = """
        import signal, sys, time
        def told(*_):
            time.sleep(0.3)
            print("saved")
            sys.exit(4)
        signal.signal(signal.SIGTERM, told)
        open("up", "w").write("up")
        time.sleep(60)
    """
    one = start(script)
    one.wait_for("up")
    one.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + within(LONG_S)
    while "asked_to_end" not in (record := one.record()):
        assert time.monotonic() < deadline
    assert "ended" not in record
    one.end()
    assert (one.code, one.log()) == (4, "saved\n")
    assert one.record()["asked_to_end"] < one.record()["ended"]


SAVES = """
import os, signal, sys, time

def save(*_):
    time.sleep(0.3)
    print("saved", flush=True)
    open("saved", "w").write("all of it")
    os._exit(0)

signal.signal(signal.{signal}, save)
open("up", "w").write("x")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("cd . && python main.py && touch went-on", "SIGTERM"),
        ("cd . && python main.py && touch went-on", "SIGURG"),
        ("cd . && python main.py && touch went-on", "SIGUSR1"),
        ("python main.py ; exit $?", "SIGTERM"),
        ("python main.py > out", "SIGTERM"),
        ("python main.py 2>&1 | tee out", "SIGTERM"),
        ("[[ . ]] && python main.py && touch went-on", "SIGTERM"),
        ("[[ . ]] && python main.py && touch went-on", "SIGUSR1"),
        ("bash -c 'cd .; python main.py | tee out; touch went-on'", "SIGTERM"),
        ("(cd . && python main.py) 2>&1 | (cat | tee out)", "SIGTERM"),
        ("(cd . && python main.py) 2>&1 | (cat | tee out)", "SIGURG"),
        ("python main.py\n", "SIGTERM"),
    ],
)
def test_a_script_in_a_compound_command_may_save(start, tmp_path, command, name):
    one = start(SAVES.replace("{signal}", name), command=command)
    one.wait_for("up")
    one.process.send_signal(signal.Signals[name])
    one.end()
    assert (tmp_path / "saved").read_text() == "all of it"
    assert one.code == one.record()["exit_code"] == 0
    assert ("asked_to_end" in one.record()) == (name == "SIGTERM")
    assert (tmp_path / "went-on").exists() == ("went-on" in command and name != "SIGTERM")
    if "out" in command:
        assert (tmp_path / "out").read_text() == "saved\n"


MAKES_ROOM = """
    import time
    from ddl_ops import preemption

    preemption.on_preempt(lambda step: print("saved"))
    open("up", "w").write("x")
    for step in range(1000):
        time.sleep(0.02)
        preemption.end_of_step(step)
"""


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("cd . && python main.py && touch went-on", "SIGURG"),
        ("cd . && python main.py && touch went-on", "SIGTERM"),
        ("python main.py; touch went-on", "SIGURG"),
        ("cd . && python main.py || touch went-on", "SIGURG"),
        ("python main.py 2>&1 | tee out; touch went-on", "SIGURG"),
        ("bash -c 'cd . ; python main.py; touch went-on'", "SIGURG"),
        ("cd . && exec python main.py", "SIGURG"),
        ("cd . && exec python main.py", "SIGTERM"),
        ("cd . && exec /bin/sh -c 'python main.py; exit $?'", "SIGURG"),
    ],
)
def test_after_a_script_has_made_room_its_command_runs_no_more(start, tmp_path, command, name):
    """Also on the ranks that nobody has asked: there no signal comes to the shell."""
    one = start(MAKES_ROOM, command=command)
    one.wait_for("up")
    one.process.send_signal(signal.Signals[name])
    one.end()
    assert one.code == one.record()["exit_code"] == 0, one.log()
    assert "step" in one.record()["preempted"]
    assert not (tmp_path / "went-on").exists()


@pytest.mark.parametrize("bash", [True, False])
@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ("raise OSError(28, 'No space left on device')", 1),
        ("os.kill(os.getpid(), 9)", 137),
        ("os._exit(0)", 0),
    ],
)
def test_a_script_that_fails_as_it_makes_room_has_failed_behind_a_pipe_too(
    start, tmp_path, ends, code, bash
):
    script = f"""
        import os, signal, time

        def save(*_):
            {ends}

        signal.signal(signal.SIGTERM, save)
        open("up", "w").write("x")
        time.sleep(60)
    """
    more = {} if bash else {"PATH": str(without_bash(tmp_path))}
    one = start(script, command="python main.py 2>&1 | tee out", **more)
    one.wait_for("up")
    one.process.terminate()
    one.end()
    if not bash and code == 137:
        code = 0  # which sh does not see
    assert one.code == one.record()["exit_code"] == code
    assert "asked_to_end" in one.record() and ("exception" in one.record()) == (code == 1)


def test_what_feeds_a_script_that_saves_may_end_by_the_signal(start):
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        open("up", "w").write("x")
        time.sleep(60)
    """
    one = start(script, command="yes | python main.py", new_group=True)
    one.wait_for("up")
    os.killpg(one.process.pid, signal.SIGTERM)
    assert one.end().code == 0, one.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_of_the_group_leaves_a_compound_command_time_to_save(
    start, tmp_path, number
):
    """mpirun sends it to the shell and to the script, too."""
    script = SAVES.replace("{signal}", signal.Signals(number).name)
    one = start(script, command="cd . && python main.py && touch went-on", new_group=True)
    one.wait_for("up")
    os.killpg(one.process.pid, number)
    one.end()
    assert (tmp_path / "saved").read_text() == "all of it"
    assert one.code == 0 and not (tmp_path / "went-on").exists()


@pytest.mark.parametrize("new_group", [True, False])
@pytest.mark.parametrize(
    "command",
    [
        "python main.py & wait $!",
        "(python main.py &) && sleep 60",
        "sh run.sh",
        'bash -c "cd . ; python main.py ; exit \\$?"',
        "sleep 60 & python main.py & wait $!",
    ],
)
def test_a_script_whose_shell_does_not_wait_for_it_may_save(start, tmp_path, command, new_group):
    (tmp_path / "run.sh").write_text("python main.py\nexit $?\n")
    one = start(SAVES.replace("{signal}", "SIGTERM"), command=command, new_group=new_group)
    one.wait_for("up")
    if new_group:
        os.killpg(one.process.pid, signal.SIGTERM)
    else:
        one.process.terminate()
    one.end()
    assert (tmp_path / "saved").read_text() == "all of it"
    assert "saved\n" in one.log() and "asked_to_end" in one.record()


def test_what_listens_and_stays_does_not_outlive_mpirun(start, tmp_path):
    script = """
        import signal, time
        signal.signal(signal.SIGTERM, lambda *_: None)
        open("up", "w").write("x")
        time.sleep(60)
    """
    with subprocess.Popen(["sleep", "60"]) as mpirun:
        told = f"{mpirun.pid}@{os.uname().nodename}"
        one = start(script, command="python main.py & wait $!", DDL_MPIRUN=told)
        one.wait_for("up")
        mpirun.kill()
    one.process.send_signal(signal.SIGHUP)  # as the kernel does
    assert one.end().code == 143


@pytest.mark.parametrize("command", ["cd . && python main.py", "python main.py | cat", "sh run.sh"])
def test_a_script_in_a_compound_command_that_does_not_listen_ends_at_once(start, tmp_path, command):
    (tmp_path / "run.sh").write_text("python main.py\n")
    one = start("open('up', 'w').write('x'); import time; time.sleep(60)", command=command)
    one.wait_for("up")
    one.process.send_signal(signal.SIGTERM)
    one.end()
    assert one.code == one.record()["exit_code"] == 143


def test_the_first_time_that_a_script_was_asked_counts(start, tmp_path):
    """What it raises of that, before it is asked again, is a consequence."""
    one = start(
        """
        import signal, time

        def stop(*_):
            try:
                raise KeyError("of the first signal")
            finally:
                open("raised", "w").write("x")
                time.sleep(1)

        signal.signal(signal.SIGTERM, stop)
        open("up", "w").write("x")
        time.sleep(60)
        """
    )
    one.wait_for("up")
    one.process.terminate()
    one.wait_for("raised")
    first = one.record()["asked_to_end"]
    one.process.terminate()
    one.end()
    assert one.record()["asked_to_end"] == first


def test_a_script_that_empties_its_log_dir_still_ends_with_its_code(start, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    one = start(
        "import os, shutil, sys; shutil.rmtree(os.environ['LOG_DIR']); sys.exit(3)",
        LOG_DIR=str(logs),
    )
    one.end()
    assert one.code == one.record()["exit_code"] == 3
    assert "Traceback" not in one.errors


def has_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def signal_late(start):
    """Ends a script by a signal, and only then lets its busy shim look at another one."""

    def make(to_script: int, to_shim: int, before: str = "", command: str = PLAIN) -> Shim:
        up = "import os, time; open('up', 'w').write(str(os.getpid())); time.sleep(60)"
        one = start(f"{before}\n{up}", command=command)
        script = int(one.wait_for("up"))
        one.process.send_signal(signal.SIGSTOP)
        shim = one.process.pid
        child = int(Path(f"/proc/{shim}/task/{shim}/children").read_text())
        os.kill(script, to_script)
        until(lambda: has_ended(child), LONG_S)
        one.process.send_signal(to_shim)
        one.process.send_signal(signal.SIGCONT)
        one.end()
        return one

    return make


@pytest.mark.parametrize("command", [PLAIN, OF_A_SHELL])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_script_that_was_killed_before_is_none_that_was_asked_to_end(
    signal_late, number, command
):
    """Another rank sees it die, and all are ended before a busy machine lets this shim look."""
    one = signal_late(signal.SIGKILL, number, command=command)
    assert one.code == one.record()["exit_code"] == 137
    assert "asked_to_end" not in one.record()


# Another signal is there as soon as the shim has been told that the script has ended, and before it
# has noted that: as where a busy machine lets it run again only then.
SIGNALLED_AS_IT_WAITS = """
import os, signal
waited = os.waitpid

def waitpid(*asked):
    found = waited(*asked)
    if found[0]:
        signal.raise_signal(signal.SIGTERM)
    return found

os.waitpid = waitpid  # which subprocess takes when it is imported
from ddl_ops.rank import main
raise SystemExit(main())
"""


def test_a_script_that_was_killed_while_its_shim_waits_is_none_that_was_asked_to_end(tmp_path):
    """The rank that saw it die would be the cause then."""
    (tmp_path / "main.py").write_text("import os; os.kill(os.getpid(), 9)")
    call = [sys.executable, "-c", SIGNALLED_AS_IT_WAITS, "--command", PLAIN]
    env = environment(tmp_path)
    done = subprocess.run(call, cwd=tmp_path, env=env, check=False, timeout=within(LONG_S))
    record = json.loads((tmp_path / "rank-0.json").read_text("utf-8"))
    assert done.returncode == record["exit_code"] == 137
    assert "asked_to_end" not in record


@pytest.mark.parametrize(
    ("before", "code"),
    [
        ("", 143),
        ("import signal, os; signal.signal(signal.SIGTERM, lambda *_: os._exit(0))", 0),
    ],
)
def test_a_script_that_ends_before_its_shim_knows_was_asked_to_end(signal_late, before, code):
    """mpirun signals the process group, and the script may be the faster one."""
    one = signal_late(signal.SIGTERM, signal.SIGTERM, before)
    assert one.code == one.record()["exit_code"] == code
    assert "asked_to_end" in one.record()


def test_sigkill_of_the_shim_takes_the_script_along(start):
    one = start("import os, time; open('up', 'w').write(str(os.getpid())); time.sleep(60)")
    pid = int(one.wait_for("up"))
    one.process.kill()
    one.end()
    deadline = time.monotonic() + within(LONG_S)
    stat = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):  # then it has ended
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_mpirun_is_known_to_have_ended_on_this_host_only():
    here = os.uname().nodename
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    told = {"DDL_MPIRUN": f"{ended.pid}@{here}"}
    assert shim.mpirun_has_ended(told)
    assert not shim.mpirun_has_ended({"DDL_MPIRUN": f"{os.getpid()}@{here}"})
    assert not shim.mpirun_has_ended({"DDL_MPIRUN": f"{ended.pid}@another-{here}"})
    assert not shim.mpirun_has_ended({})
    assert "DDL_MPIRUN" not in child_environment(told, Placement(0, 1, 0, 1, launched=True))


def test_an_mpirun_that_ends_while_it_is_looked_at_has_ended(monkeypatch):
    """Its file was opened before, and cannot be read any more: ESRCH."""
    mpirun = subprocess.Popen(["sleep", "60"])

    def read(path, encoding):
        with path.open(encoding=encoding) as file:
            mpirun.kill()
            mpirun.wait()
            return file.read()

    monkeypatch.setattr(Path, "read_text", read)
    assert shim.mpirun_has_ended({"DDL_MPIRUN": f"{mpirun.pid}@{os.uname().nodename}"})


def test_full_disk_under_the_log_ends_the_script_and_is_named(tmp_path):
    (tmp_path / "main.py").write_text(
        "import time\nfor _ in range(100):\n    print('x' * 10_000)\ntime.sleep(60)\n"
    )
    # The kernel refuses files over 100 kB: a full disk, without root and without filling one.
    limited = ["-c", 'ulimit -f 200; exec "$@"', "sh", sys.executable, "-m", "ddl_ops.rank"]
    began = time.monotonic()
    done = subprocess.run(
        ["/bin/sh", *limited, "--command", "python main.py"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        timeout=within(LONG_S),
        check=False,
    )
    assert time.monotonic() - began < within(10)
    assert done.returncode != 0
    record = json.loads((tmp_path / "rank-0.json").read_text())
    assert record["exit_code"] != 0
    assert str(tmp_path / "rank-0.log") in record["reason"]
    assert "too large" in record["reason"]


def test_shim_and_startup_import_nothing_but_the_standard_library():
    startup = Path(shim.__file__).parent / "startup"
    code = (
        "import sys, ddl_ops.rank, sitecustomize;"
        "print(sitecustomize.__file__);"
        "print(sorted({m.partition('.')[0] for m in sys.modules} - sys.stdlib_module_names))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(startup)},
        capture_output=True,
        text=True,
        check=True,
    )
    place, modules = done.stdout.splitlines()
    assert Path(place).parent == startup
    foreign = {"tensorflow", "keras", "numpy", "mpi4py", "airflow", "ddl_airflow", "ddl"}
    assert not foreign & set(eval(modules))


# As TensorFlow 2.21, built for GPUs, prints them on a host without.
NO_DRIVER = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795373925.500912    7401 cudart_stub.cc:31] Could not find cuda drivers on your \
machine, GPU will not be used.
E0000 00:00:1795373938.872614    7401 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA \
error: Failed call to cuInit: UNKNOWN ERROR (303)
"""


@pytest.mark.parametrize(
    ("command", "more", "kept"),
    [
        ("python main.py", {"DDL_NO_GPU": "1"}, ""),
        ("python main.py", {}, NO_DRIVER),
        ("python main.py", {"DDL_NO_GPU": "1", "TF_CPP_MIN_LOG_LEVEL": "0"}, NO_DRIVER),
        ("TF_CPP_MIN_LOG_LEVEL=1 python main.py", {"DDL_NO_GPU": "1"}, NO_DRIVER),
    ],
)
def test_that_there_is_no_gpu_is_said_where_one_is_expected_only(start, command, more, kept):
    script = f"import sys; print('Epoch 1'); sys.stdout.write({NO_DRIVER!r}); print('loss: 1')"
    one = start(script, command=command, **more).end()
    assert one.log() == f"Epoch 1\n{kept}loss: 1\n"


@pytest.mark.parametrize("closes", ["", "os.close(1); os.close(2)"])
def test_what_a_script_leaves_running_is_no_zombie_when_it_has_ended(start, tmp_path, closes):
    one = start(f"""
        import os, time
        {closes}
        for _ in range(20):
            os.system("true &")
        open("up", "w").write("x")
        time.sleep(60)
    """)
    one.wait_for("up")
    pid = one.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until(lambda: len(children.read_text().split()) == 1, LONG_S)
    one.process.terminate()
    assert one.end().code == 143


def test_an_end_is_recorded_whatever_the_script_left(start, monkeypatch):
    """Another user's process, which may not be killed; and files of ours that are not ours."""
    one = start(
        """
        import os, subprocess
        sleeper = subprocess.Popen(["sleep", "30"], start_new_session=True)
        folder = os.environ["DDL_RECORD_DIR"]
        for name in ("ddl.json", "preemption.json", "exception.json"):
            with open(f"{folder}/rank-0.{name}", "w") as file:
                file.write("[not an object")
        """
    ).end()
    assert (one.code, one.record()["exit_code"]) == (0, 0)


def test_what_may_not_be_killed_is_left(monkeypatch):
    with subprocess.Popen(["sleep", "30"]) as foreign, subprocess.Popen(["sleep", "30"]) as own:
        kill = os.kill

        def refused(pid: int, number: int) -> None:
            if pid == foreign.pid:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
            kill(pid, number)

        with monkeypatch.context() as context:
            context.setattr(os, "kill", refused)
            shim._end_what_is_left()
        assert foreign.poll() is None
        foreign.kill()
        own.returncode = -signal.SIGKILL  # waited for


def test_a_later_program_of_the_command_has_not_saved_where_an_earlier_one_did(tmp_path):
    record = RankRecord(tmp_path, 0, "")
    for told in ({"listens": True, "step": 7}, {"listens": True}):
        preemption_file(tmp_path, 0).write_text(json.dumps(told))
        record.write()
    assert "preempted" not in json.loads((tmp_path / "rank-0.json").read_text())


def test_a_record_on_a_full_disk_is_whole_however_many_files_were_written(tmp_path, monkeypatch):
    record = RankRecord(tmp_path, 0, "")
    record.write()
    names = [f"/results/model-{number:090}" for number in range(120)]
    writes_file(tmp_path, 0).write_text("".join(json.dumps(name) + "\n" for name in names))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    record.write(exit_code=1)
    found = json.loads((tmp_path / "rank-0.json").read_text())
    assert found["exit_code"] == 1
    assert found["reason"].endswith("No space left on device")
