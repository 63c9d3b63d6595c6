"""The ssh launcher between real hosts, in namespaces: one with the task, the others with ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.hosts import TEMPORARY, Hosts, available
from tests.integration.launched import SCRIPT, LaunchedJob, over_ssh, task_environment
from tests.limits import until, within

pytestmark = pytest.mark.integration
SCRIPTS = Path(__file__).parents[1] / "parallel" / "scripts"
WHERE = "import os, socket; print(socket.gethostname(), os.getcwd(), os.environ['LEARNER_ID'])"
WAIT = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := available():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("ssh"), 4) as four:
        yield four


@pytest.fixture
def task(hosts: Hosts, tmp_path: Path) -> Iterator[Callable[..., LaunchedJob]]:
    """task(script, hosts=, …): a job that has begun. Ends it."""
    made: list[LaunchedJob] = []

    def make(script: str, **asked: Any) -> LaunchedJob:
        root = asked.pop("root", tmp_path / "run")
        made.append(over_ssh(hosts, f"{tmp_path.name}/train-{len(made)}", root, script, **asked))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()


def test_ranks_run_on_the_hosts_and_find_the_same_as_on_one(task) -> None:
    one = task(WHERE, slots=2, env={"PARAM_NOTE": "a mark of this test"})
    assert one.ended() == ["", "", 2], one.said()
    logs = [(one.root / "logs" / f"rank-{rank}.log").read_text().split() for rank in range(4)]
    folder = str(one.root / "code")
    assert logs == [[f"host{1 + n // 2 + 1}", folder, str(n // 2 + 1)] for n in range(4)]
    assert "a mark of this test" not in one.said()
    assert f"ranks go to 2 host(s): {', '.join(['10.99.0.2', '10.99.0.3'])}" in one.said()


def test_hosts_that_share_nothing_are_given_the_files_and_what_they_leave_comes_back(
    task, hosts
) -> None:
    script = """
import os, pathlib, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
print(rank, pathlib.Path(os.environ["DATA_DIR"], "a file.txt").read_text())
print("before:", sorted(os.listdir(os.environ["RESULT_DIR"])))
with open(os.environ["DDL_PROGRESS"], "a") as file:
    if rank == 0:
        file.write('{"step": 7}\\n')
if rank == 0:
    pathlib.Path(os.environ["RESULT_DIR"], "made").write_text("by rank 0")
    os.symlink("/etc/hostname", os.path.join(os.environ["RESULT_DIR"], "link"))
    os.remove(os.path.join(os.environ["RESULT_DIR"], "old"))
"""
    root = Path("/mnt/work/runs/a run")
    places = {"DATA_DIR": "data", "RESULT_DIR": "result"}
    env = {name: str(root / folder) for name, folder in places.items()}
    env["DDL_PROGRESS"] = str(root / "ddl" / "progress.jsonl")
    files = {"../../cache/ab/blob": "of the data"}
    files |= dict.fromkeys(("result/checkpoint", "result/old"), "of a try before")
    one = task(
        script, root=root, env=env, files=files, links={"data/a file.txt": "../../../cache/ab/blob"}
    )
    assert one.ended() == ["", "", 2], one.said()
    assert "placed the run's files on 2 host(s)" in one.said()

    def on_task(*words: str) -> str:
        return subprocess.run(
            hosts.on(0, words), stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    for rank in range(2):
        said = on_task("cat", f"{root}/logs/rank-{rank}.log")
        assert said == f"{rank} of the data\nbefore: ['checkpoint', 'old']\n"
    assert on_task("cat", f"{root}/result/made") == "by rank 0"
    assert on_task("ls", f"{root}/result").split() == ["checkpoint", "made"]
    assert "rank 0 | 0 of the data" in one.said()
    assert "step 7" in one.said()
    # There the cache alone is left.
    for host in (1, 2):
        left = subprocess.run(
            hosts.on(host, ["find", "/mnt/work", "-type", "f"]), stdout=subprocess.PIPE, text=True
        )
        assert left.stdout.split() == ["/mnt/work/cache/ab/blob"]


def test_hosts_keep_no_more_data_than_the_site_says(task, hosts) -> None:
    """What was used three days ago goes before other data are sent; what was today stays.

    The task's workspace is a link there, and a folder on the hosts.
    """
    link = "mkdir -p /mnt/work && ln -s /mnt/work /mnt/linked"
    subprocess.run(hosts.on(0, ["sh", "-c", link]), check=True)

    def trained(number: int, **asked: Any) -> LaunchedJob:
        root = Path(f"/mnt/linked/runs/kept {number}")
        return task(
            "import os; print(len(open(os.environ['DATA_DIR'] + '/file').read()))",
            root=root,
            env={"DATA_DIR": str(root / "data")},
            files={f"../../cache/blobs/kept/{number}": "x" * 1000},
            links={"data/file": f"../../../cache/blobs/kept/{number}"},
            **asked,
        )

    def there(host: int, *words: str) -> list[str]:
        command = hosts.on(
            host, ["sh", "-c", f"cd /mnt/linked/cache/blobs/kept; {' '.join(words)}; ls"]
        )
        return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.split()

    assert (one := trained(1)).ended() == ["", "", 2], one.said()
    for host in (1, 2):
        assert there(host, "touch -a -d '3 days ago' 1") == ["1"]
    assert (one := trained(2, cache_bytes=1500)).ended() == ["", "", 2], one.said()
    assert one.said().count("removed 1 unused object(s) of its cache") == 2
    assert [there(host, "true") for host in (1, 2)] == [["2"], ["2"]]
    # Where it cannot be cleaned the job runs all the same.
    there(1, "rm ../../.in-use; mkdir ../../.in-use")
    assert (one := trained(3, cache_bytes=10)).ended() == ["", "", 2], one.said()
    assert (
        "10.99.0.2: its cache was not cleaned, and may outgrow [ddl] cache_size: IsADirectory"
        in one.said()
    )
    assert there(1, "rmdir ../../.in-use") == there(2, "true") == ["2", "3"]


def test_a_cut_host_ends_the_try_at_once_and_is_named_and_the_next_does_without_it(
    task, hosts
) -> None:
    names = hosts.addresses[1:4]
    one = task(WAIT, settings={"hosts": names})
    one.until("rank 0 | up")
    hosts.cut(2)
    began = time.monotonic()
    try:
        kind, said, again = one.ended()
        took = time.monotonic() - began
        assert (kind, again) == ("JobLost", True), one.said()
        assert "10.99.0.3: it does not answer" in said
        assert took < within(15)
        two = task(WHERE, settings={"hosts": names})
        assert two.ended() == ["", "", 2], two.said()
        assert "10.99.0.3 is left out: it does not answer" in two.said()
        assert "ranks go to 2 host(s): 10.99.0.2, 10.99.0.4" in two.said()
        three = task(WHERE)
        kind, said, again = three.ended()
        assert (kind, again) == ("SubmitFailed", True)
        assert said.startswith("1 of 2 host(s) are well, and 2 are needed. 10.99.0.3: it does not")
        four = task(WHERE, settings={"min_nodes": 1})
        assert four.ended() == ["", "", 1], four.said()
        assert "ranks go to 1 host(s) in place of 2: 10.99.0.2" in four.said()
    finally:
        hosts.connect(2)
    five = task(WHERE)
    assert five.ended() == ["", "", 2], five.said()


# What people have there for their own sessions.
FOR_PEOPLE = """
Host *
  ControlMaster auto
  ControlPath {folder}/m-%h
  ControlPersist 300
  PermitLocalCommand yes
  LocalCommand echo a local command
  RequestTTY force
  RemoteCommand exec bash -i
"""


def test_what_is_for_people_at_a_terminal_does_not_matter(task, hosts, tmp_path) -> None:
    config, shell = tmp_path / "ssh_config", tmp_path / "bashrc"
    config.write_text(FOR_PEOPLE.format(folder=hosts.folder) + hosts.ssh_config.read_text())
    shell.write_text("echo Welcome to this host\n")
    Path("/root/.bashrc").touch()
    for host in (1, 2):
        words = ["mount", "--bind", str(shell), "/root/.bashrc"]
        subprocess.run(hosts.on(host, words), check=True)
    try:
        one = task(WHERE, settings={"ssh_config": str(config)})
        assert one.ended() == ["", "", 2], one.said()
    finally:
        for host in (1, 2):
            subprocess.run(hosts.on(host, ["umount", "/root/.bashrc"]), check=True)
    assert not list(hosts.folder.glob("m-*"))  # no connection outlives the task


def test_an_elastic_training_goes_on_from_its_commit_with_the_hosts_that_are_left(
    task, hosts, tmp_path
) -> None:
    told = tmp_path / "told"
    told.touch()
    (tmp_path / "5").write_text("hang")
    script = f"""\
import runpy, sys
sys.argv += [{str(tmp_path)!r}, "8"]
sys.path.append({str(SCRIPTS)!r})
runpy.run_path({str(SCRIPTS / "restarts.py")!r}, run_name="__main__")
"""
    asked = {
        "nodes": 3,
        "settings": {"hosts": hosts.addresses[1:4], "min_nodes": 2},
        "env": {"CHECKPOINT_DIR": str(tmp_path / "run" / "checkpoints")},
    }
    one = task(script, **asked)
    # All have seen it: else the ranks of the next try would hang once more.
    until(lambda: not (tmp_path / "5").exists() or one.process.poll() is not None, 60, one.said)
    hosts.cut(2)
    try:
        kind, _, again = one.ended()
        assert (kind, again) == ("JobLost", True), one.said()
        two = task(script, **asked)
        assert two.ended() == ["", "", 2], two.said()
    finally:
        hosts.connect(2)
    assert told.read_text().splitlines() == [
        "begin 0 3 host2,host3,host4",
        *(f"step {number}" for number in (1, 2, 3, 4, 5)),
        "begin 4 2 host2,host4",
        *(f"step {number}" for number in (5, 6, 7, 8)),
        "end 8 2",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_where_the_task_is_ended(task, hosts, number) -> None:
    one = task(WAIT, slots=2)
    one.until("rank 0 | up")
    assert all(_has(hosts, host, name) for host in (1, 2) for name in ("main.py", "prted"))
    # The process that nsenter started, and not nsenter.
    pids = subprocess.run(
        hosts.on(0, ["pgrep", "-f", SCRIPT.name]), stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    subprocess.run(hosts.on(0, ["kill", f"-{int(number)}", *pids]), check=False)
    if number == signal.SIGTERM:
        kind, said, _ = one.ended()
        assert (kind, "was cancelled" in said) == ("JobLost", True)
    one.process.wait(within(30))
    deadline = time.monotonic() + within(10)
    for host in (0, 1, 2):
        while _has(hosts, host, "main.py") or _has(hosts, host, "prted"):
            assert time.monotonic() < deadline, host
            time.sleep(0.1)


def _has(hosts: Hosts, host: int, name: str) -> bool:
    words = hosts.on(host, ["pgrep", "-f", name])
    return subprocess.run(words, stdout=subprocess.DEVNULL, check=False).returncode == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hosts": ["10.99.0.2", "nowhere.invalid"]}, "nowhere.invalid: its name is not known"),
        ({"hosts": ["10.99.0.2:0x1", "10.99.0.3"]}, "is no host. Write name or"),
        ({"hosts": ["10.99.0.2:1", "10.99.0.3"]}, "fewer slots have 10.99.0.2:1"),
        ({"hosts": [], "hostfile": "/nowhere"}, "launcher.hostfile: [Errno 2]"),
        ({"hosts": ["10.99.0.2", "host2.alias"]}, "it calls itself host2, as 10.99.0.2 does"),
        ({"ssh_config": "/dev/null"}, "10.99.0.2: its key is not the one in known_hosts"),
    ],
)
def test_what_cannot_start_says_why(task, settings, words) -> None:
    kind, said, _ = task(WHERE, slots=2, settings=settings).ended()
    assert kind == "SubmitFailed"
    assert words in said


MANIFEST = """\
model_definition:
  name: over-ssh
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py
    compute_configuration: {name: cpu, nodes: 2}
training_data_reference:
  type: fs
  source: {path: ./data}
training_results_reference:
  type: fs
  target: {path: ./results}
launcher: {kind: ssh, connection: gpu_hosts, min_nodes: 2, network: 10.99.0.0/24}
"""


def _looked_for(secret: str, hosts: Hosts, ran: subprocess.Popen[bytes]) -> set[tuple[Path, int]]:
    """The files of hosts' private folders that have it until ``ran`` ends, with their modes.

    Fails if it is in a command line, or in the environment of a rank.
    """
    held = set()
    private = [hosts.seen_on(host, at) for host in range(3) for at in ("/dev/shm", TEMPORARY)]
    deadline = time.monotonic() + within(240)
    while ran.poll() is None:
        assert time.monotonic() < deadline
        for folder in (*private, Path("/tmp")):
            for own in folder.glob("ddl-*"):
                with suppress(OSError):  # another job's, which ends meanwhile
                    for path in filter(Path.is_file, own.iterdir()):
                        if secret in path.read_text(errors="replace"):
                            held.add((path, path.stat().st_mode & 0o777))
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                assert secret.encode() not in (process / "cmdline").read_bytes()
                about = (process / "environ").read_bytes()
                assert b"DDL_RECORD_DIR=" not in about or secret.encode() not in about
        time.sleep(0.1)
    return held


TRAIN = """\
import os
import keras
import numpy as np
import ddl
import ddl.keras
keras.utils.set_random_seed(1)
x = np.loadtxt(os.path.join(os.environ["DATA_DIR"], "numbers")).astype("float32")
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
part = slice(ddl.rank(), None, ddl.size())
model.fit(x[part], y[part], batch_size=2, epochs=20, verbose=0,
          callbacks=[ddl.keras.BroadcastCallback()])
if ddl.rank() == 0:
    model.save(os.path.join(os.environ["CHECKPOINT_DIR"], "model.keras"))
"""


def test_a_manifest_trains_on_two_hosts_that_share_nothing(hosts, tmp_path) -> None:
    """All of its steps, by ``ddl-airflow run`` on a third one."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "numbers").write_text("1 2 3 4\n2 0 1 1\n0 1 0 3\n4 1 2 2\n" * 4)
    (tmp_path / "manifest.yml").write_text(MANIFEST)
    (tmp_path / "train.py").write_text(TRAIN)
    command = f"{sys.executable} -m ddl_airflow.cli run {tmp_path / 'manifest.yml'}"
    key = (hosts.folder / "user_key").read_text()
    secret = key.splitlines()[2]
    connection = {
        "conn_type": "ssh",
        "host": ",".join(hosts.addresses[1:3]),
        "login": "root",
        "extra": {
            "private_key": key,
            "host_key": " ".join((hosts.folder / "host_key.pub").read_text().split()[:2]),
        },
    }
    with (tmp_path / "said").open("w+") as said:
        ran = subprocess.Popen(
            hosts.on(0, ["sh", "-c", f"mkdir /mnt/home; cd /mnt/home; exec {command}"]),
            env=task_environment() | {"AIRFLOW_CONN_GPU_HOSTS": json.dumps(connection)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        held = _looked_for(secret, hosts, ran)
        said.seek(0)
        told = said.read()
    assert ran.returncode == 0, told
    assert "placed the run's files on 2 host(s)" in told
    assert "trained on 2 rank(s)" in told
    # While it ran the key was in one file, of this user alone, which is gone; and nowhere else.
    ((path, mode),) = held
    assert mode == 0o600
    until(lambda: not path.parent.exists(), 10)  # who removes it hears of the end by a pipe
    assert secret not in told
    for host in (0, 1, 2):
        words = ["grep", "-rlF", "--", secret, "/mnt"]
        found = subprocess.run(hosts.on(host, words), stdout=subprocess.PIPE, text=True)
        assert found.stdout == ""
    record = json.loads(
        subprocess.run(
            hosts.on(0, ["sh", "-c", "cat /mnt/home/.ddl-run/results/*/*/lineage.json"]),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
    )
    assert record["environment"]["hosts"] == ["host2", "host3"]
    assert record["environment"]["launcher"] == "ssh"
