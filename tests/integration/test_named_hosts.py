"""horovodrun and ddl-run on real hosts, in namespaces: one where they are called, others by ssh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.hosts import Hosts, available
from tests.integration.launched import task_environment
from tests.limits import until, within

pytestmark = pytest.mark.integration
STAND_IN = Path(__file__).parents[2] / "ops_lib" / "python" / "ddl_ops" / "stand_in"
HOROVODRUN = [sys.executable, "-c", "from ddl_ops.horovodrun import main; raise SystemExit(main())"]
WHERE = """
import os, socket, sys
print(socket.gethostname(), os.getcwd(), os.environ["A_SETTING"], "half a", end=" ", flush=True)
print("line")
print("to stderr", file=sys.stderr)
"""
# As where there are more hosts than mpirun keeps connections to: 128.
MANY_HOSTS = {"PRTE_MCA_plm_ssh_num_concurrent": "1"}
SETTINGS = {"A_SETTING": "set by hand", "TF_CPP_MIN_LOG_LEVEL": "3"} | MANY_HOSTS
SCRIPTS = Path(__file__).parents[1] / "parallel" / "scripts"
SUM = """
import os
import horovod.tensorflow as hvd
hvd.init()
place = hvd.local_rank(), hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()
print(*place, os.environ["LEARNER_ID"], hvd.allreduce([hvd.rank() + 1.0], op=hvd.Sum).numpy())
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := available():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("named"), 3) as three:
        # horovodrun has no flag that names ssh's configuration: there it is the host's own.
        mount = ["mount", "--bind", str(three.ssh_config), "/etc/ssh/ssh_config"]
        subprocess.run(three.on(0, mount), check=True)
        yield three


@pytest.fixture
def call(hosts: Hosts, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts horovodrun on the first host, in a folder with the script."""

    def begin(script: str, *words: str, args: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(script)
        inside = ["env", "-C", str(tmp_path), *HOROVODRUN, *words, "python", "script.py", *args]
        return subprocess.Popen(
            hosts.on(0, inside),
            env=task_environment() | SETTINGS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    """Exit code, sorted lines of standard output, and standard error."""
    out, err = process.communicate(timeout=within(90))
    return process.returncode, sorted(out.splitlines()), err


def test_ranks_fill_the_hosts_one_by_one_and_their_lines_name_them(hosts, call, tmp_path) -> None:
    words = ("-np", "4", "-H", "10.99.0.2:2,10.99.0.3:3")
    code, lines, err = ended(call(WHERE, *words))
    assert code == 0, err
    said = f"{tmp_path} set by hand half a line"
    assert lines == [f"[rank {n}] host{2 + n // 2} {said}" for n in range(4)]
    # With one connection at a time Open MPI may remark that ssh ran before it had set its group.
    *theirs, note = [line for line in err.splitlines() if "Warning: setpgid" not in line]
    assert sorted(theirs) == [f"[rank {n}] to stderr" for n in range(4)]
    assert note.startswith("ddl-run: The 4 ranks trained apart")  # as where they run on this host
    until(lambda: not hosts.left_in_memory(), 120, hosts.left_in_memory)


def test_ranks_of_a_hostfile_compute_together_also_on_this_host(call, tmp_path) -> None:
    (tmp_path / "hosts").write_text("10.99.0.1 slots=1  # where horovodrun runs\nhost2.alias:2\n")
    words = ("-np", "3", "--hostfile", "hosts", "--network-interfaces", "10.99.0.0/24")
    code, lines, err = ended(call(SUM, *words))
    assert code == 0, err
    assert lines == [
        "[rank 0] 0 0 2 False 1 [6.]",
        "[rank 1] 0 1 2 False 2 [6.]",
        "[rank 2] 1 0 1 False 2 [6.]",
    ]


def test_horovod_run_calls_a_function_on_hosts(hosts, tmp_path) -> None:
    # In a module, which the ranks import from the current folder.
    (tmp_path / "mine.py").write_text(
        "import os, socket\n"
        "def where(word): return word, socket.gethostname(), os.environ['OMPI_COMM_WORLD_RANK']\n"
    )
    (tmp_path / "called.py").write_text(
        "import horovod, mine\n"
        "print(horovod.run(mine.where, ('at',), num_proc=2, hosts='10.99.0.2:1,10.99.0.3:1'))\n"
    )
    environment = task_environment()
    paths = [str(STAND_IN), environment["PYTHONPATH"]]
    done = subprocess.run(
        hosts.on(0, ["env", "-C", str(tmp_path), sys.executable, "called.py"]),
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "[('at', 'host2', '0'), ('at', 'host3', '1')]\n", done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("10.99.0.2:1,no.such.host:1", "no.such.host: its name is not known here."),
        ("10.99.0.2:1,10.99.0.9:1", "10.99.0.9: it does not answer."),
        ("10.99.0.2:1,host2.alias:1", "host2.alias: it calls itself host2, as 10.99.0.2 does."),
        ("10.99.0.2:1", "2 ranks are asked for, and there are 1 slots: 10.99.0.2:1."),
    ],
)
def test_a_host_that_cannot_take_ranks_is_named(call, asked, said) -> None:
    code, lines, err = ended(call(WHERE, "-np", "2", "-H", asked))
    assert code == 2 and lines == []
    assert said in err


def test_this_host_is_known_where_sockets_may_have_foreign_addresses(hosts) -> None:
    """As on one that stands in for another: there each can be bound to."""
    other = "ip addr add 10.99.0.101/24 dev eth0; "
    foreign = "echo 1 > /proc/sys/net/ipv4/ip_nonlocal_bind; "
    names = ["10.99.0.1", "10.99.0.101", "127.0.1.1", "10.99.0.2", "10.99.0.9", "::1"]
    asked = (
        f"from ddl_airflow.launchers.named_hosts import is_here; print([*map(is_here, {names})])"
    )
    done = subprocess.run(
        hosts.on(0, ["sh", "-c", f'{other}{foreign}exec {sys.executable} -c "$0"', asked]),
        env=task_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    undo = "ip addr del 10.99.0.101/24 dev eth0; echo 0 > /proc/sys/net/ipv4/ip_nonlocal_bind"
    subprocess.run(hosts.on(0, ["sh", "-c", undo]), check=True)
    assert done.stdout == "[True, True, True, False, False, True]\n"


def test_a_host_without_the_folder_is_named(hosts, tmp_path) -> None:
    inside = ["env", "-C", "/mnt", *HOROVODRUN, "-np", "1", "-H", "10.99.0.2:1", "true"]
    subprocess.run(hosts.on(0, ["mkdir", "/mnt/mine"]), check=True)
    inside[2] = "/mnt/mine"
    done = subprocess.run(
        hosts.on(0, inside), env=task_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "10.99.0.2: it has no /mnt/mine, where the ranks are to run." in done.stderr


def test_a_rank_that_fails_is_named_with_its_host(call) -> None:
    fail = 'import os, time; os.environ["OMPI_COMM_WORLD_RANK"] == "1" and exit(3); time.sleep(60)'
    code, lines, err = ended(call(fail, "-np", "2", "-H", "10.99.0.2:1,10.99.0.3:1"))
    assert (code, lines) == (3, [])
    assert err == "ddl-run: rank 1 of 2 on host3 exited with code 3. All ranks were ended.\n"


@pytest.mark.parametrize("owed", [False, True])
def test_a_host_that_is_cut_off_ends_the_job_and_is_named(call, hosts, owed) -> None:
    """Also where mpirun sends it something just then, which nobody there acknowledges."""
    process = call(
        "import time; print('up', flush=True); time.sleep(600)",
        *("-np", "2", "-H", "10.99.0.2:1,10.99.0.3:1"),
    )
    assert process.stdout is not None
    up = {process.stdout.readline() for _ in range(2)}
    assert up == {"[rank 0] up\n", "[rank 1] up\n"}, process.stderr
    hosts.cut(2)
    began = time.monotonic()
    try:
        if owed:
            subprocess.run(hosts.on(0, ["pkill", "-URG", "prterun"]), check=True)
        code, _, err = ended(process)
        took = time.monotonic() - began
    finally:
        hosts.connect(2)
    assert code != 0
    assert "A host is gone. 10.99.0.3: it does not answer." in err
    assert took < within(40)


def test_a_host_that_is_busy_for_seconds_is_none_that_is_gone(call, hosts) -> None:
    words = ("-np", "2", "-H", "10.99.0.2:1,10.99.0.3:1")
    process = call("import time; print('up', flush=True); time.sleep(8)", *words)
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"[rank 0] up\n", "[rank 1] up\n"}
    subprocess.run(hosts.on(2, ["pkill", "-STOP", "sshd"]), check=True)
    try:
        time.sleep(7)
    finally:
        subprocess.run(hosts.on(2, ["pkill", "-CONT", "sshd"]), check=True)
    code, _, err = ended(process)
    assert code == 0, err


def test_ranks_that_are_lost_start_again_on_the_hosts_that_are_left(call, hosts, tmp_path) -> None:
    """A rank is killed on the second host, and then the third one is cut off."""
    told = tmp_path / "told"
    told.touch()
    (tmp_path / "3").write_text("1")
    (tmp_path / "7").write_text("hang")
    named = "10.99.0.1:1,10.99.0.2:1,10.99.0.3:1"
    words = ("-np", "3", "--min-np", "2", "-H", named)
    shutil.copy(SCRIPTS / "elastic_common.py", tmp_path)
    process = call((SCRIPTS / "restarts.py").read_text(), *words, args=(str(tmp_path), "10"))
    # All have seen it: else the ranks that start again would hang once more.
    until(lambda: not (tmp_path / "7").exists() or process.poll() is not None, 60)
    hosts.cut(2)
    try:
        code, _, err = ended(process)
    finally:
        hosts.connect(2)
    assert code == 0, err
    assert told.read_text().splitlines() == [
        "begin 0 3 host1,host2,host3",
        *(f"step {number}" for number in (1, 2, 3)),
        "begin 2 2 host1,host3",  # the third step had not been committed
        *(f"step {number}" for number in (3, 4, 5, 6, 7)),
        "begin 6 2 host1,host2",  # where a rank has failed, but there is no other
        *(f"step {number}" for number in (7, 8, 9, 10)),
        "end 10 2",
    ], err
    for line in (
        "rank 1 of 3 on host2 was ended by SIGKILL",
        "ddl-run: 10.99.0.2 is left out: a rank has failed there.\n",
        "A host is gone. 10.99.0.3: it does not answer.",
        "ddl-run: 10.99.0.3 is left out: it does not answer.",
        "ddl-run: 2 ranks on 10.99.0.1:1, 10.99.0.2:1.\n",
    ):
        assert line in err
    assert not (tmp_path / ".ddl-run").exists()


def test_hosts_that_do_not_share_the_commits_are_named(call, hosts) -> None:
    subprocess.run(hosts.on(0, ["mkdir", "-p", "/mnt/commits"]), check=True)
    words = ("-np", "2", "--min-np", "2", "--elastic-timeout", "0")
    os.environ["CHECKPOINT_DIR"] = "/mnt/commits"
    try:
        process = call(WHERE, *words, "-H", "10.99.0.1:1,10.99.0.2:1")
    finally:
        del os.environ["CHECKPOINT_DIR"]
    code, lines, err = ended(process)
    assert (code, lines) == (2, [])
    assert "10.99.0.2: it does not see /mnt/commits, where this host has what is committed." in err
