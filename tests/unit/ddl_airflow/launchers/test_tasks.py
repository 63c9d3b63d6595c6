"""Real clusters of plain Python scripts: what each task finds, and how they end together."""

from __future__ import annotations

import json
import os
import signal
import socket
import textwrap
import time

import pytest

from ddl_airflow.core.cluster import counted, parameter_servers
from ddl_airflow.core.job import JobState
from ddl_airflow.launchers.tasks import reserve
from tests.limits import within

SOON_S = 10.0
SERVE = """
    import json, os, signal, socket, sys, time
    config = json.loads(os.environ["TF_CONFIG"])
    kind, index = config["task"]["type"], config["task"]["index"]

    def serve():
        # As TensorFlow's servers do it.
        server = socket.socket()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", int(config["cluster"][kind][index].rsplit(":")[1])))
        server.listen()
        return server
"""


@pytest.fixture
def cluster(job):
    """cluster(script, tasks=, **settings) -> Job, of master 0, workers 0 and 1, ps 0."""

    def make(script: str, tasks: str = "master=1,worker=2,ps=1", **settings):
        one = job(script=textwrap.dedent(SERVE) + textwrap.dedent(script), **settings)
        one.spec = type(one.spec)(**{**vars(one.spec), "cluster": counted(tasks)})
        return one

    return make


def test_tasks_reach_each_other_and_servers_are_ended_when_the_others_are_done(cluster):
    script = """
        server = serve()
        if kind == "ps":
            while True:
                peer = server.accept()[0]
                peer.sendall(b"served")
                peer.close()
        for address in config["cluster"]["ps"]:
            host, port = address.split(":")
            for _ in range(200):
                try:
                    with socket.create_connection((host, int(port))) as peer:
                        print(kind, index, peer.recv(6).decode(), os.environ["LEARNER_ID"])
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
    """
    one = cluster(script).start()
    assert one.wait().state is JobState.SUCCEEDED, one.said()
    assert [one.log(rank) for rank in range(4)] == [
        "master 0 served 1\n",
        "worker 0 served 1\n",
        "worker 1 served 1\n",
        "",
    ]
    assert [one.record(rank)["task"] for rank in range(4)] == [
        *("master 0", "worker 0", "worker 1", "ps 0")
    ]
    assert one.record(3)["exit_code"] == 143 and one.record(3)["released"] > 0
    assert "versions" in one.record(0)
    assert one.processes() == []


def test_a_server_that_will_not_end_is_ended_and_the_job_succeeds(cluster, tmp_path):
    script = f"""
        up = {str(tmp_path / "up")!r}
        if kind == "ps":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open(up, "w").close()
            time.sleep(60)
        while not os.path.exists(up):
            time.sleep(0.02)
    """
    one = cluster(script).start()
    assert one.wait(SOON_S).state is JobState.SUCCEEDED, one.said()
    assert one.record(3)["exit_code"] == 137
    assert one.processes() == []


def test_all_may_be_done_before_a_server_has_begun(cluster):
    one = cluster("", tasks="worker=1,ps=3").start()
    assert one.wait(SOON_S).state is JobState.SUCCEEDED, one.said()


def test_whoever_ends_long_before_the_others_is_named(cluster, tmp_path):
    script = f"""
        done = {str(tmp_path / "done")!r}
        while kind == "worker" and not os.path.exists(done):
            time.sleep(0.02)
    """
    one = cluster(script, tasks="master=1,worker=1,ps=1").start()
    until = time.monotonic() + within(SOON_S)
    said = ("master 0 has ended, and worker 0 not. ", "ps 0 has ended, and worker 0 not. ")
    while not all(one.said().count(words) == 1 for words in said):
        assert time.monotonic() < until, one.said()
        time.sleep(0.05)
    (tmp_path / "done").touch()
    assert one.wait().state is JobState.SUCCEEDED, one.said()


def test_environment_of_a_task_is_the_contract_without_mpi(cluster, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "of whoever runs Airflow")
    script = "print(json.dumps(dict(os.environ)))\n"
    # gRPC would ask the proxy for the other tasks.
    proxy = {"http_proxy": "http://proxy:3128", "no_proxy": "store"}
    env = {"DDL_PROGRESS": "/p", "RESULT_DIR": "/r", **proxy}
    one = cluster(script, tasks="master=1,worker=1", env=env).start()
    assert one.wait().state is JobState.SUCCEEDED
    for rank in range(2):
        seen = json.loads(one.log(rank))
        assert (seen["RESULT_DIR"], seen["DDL_JOB_ID"]) == ("/r", one.spec.job_id)
        assert seen["no_grpc_proxy"] == "store,127.0.0.1"
        # The first one speaks for all.
        assert ("DDL_PROGRESS" in seen) == (rank == 0)
        for absent in ("DDL_OPTIONS", "DDL_TASK"):
            assert absent not in seen
        assert not [name for name in seen if name.startswith("OMPI_")]
        assert json.loads(seen["TF_CONFIG"])["task"]["type"] == ("master", "worker")[rank]


def test_learner_id_is_the_node_also_where_one_host_has_all(job):
    script = "import os; print(os.environ['LEARNER_ID'], os.environ['NUM_LEARNERS'])"
    one = job(script=script)
    one.spec = type(one.spec)(**{**vars(one.spec), "cluster": parameter_servers(2, 2)})
    assert one.start().wait().state is JobState.SUCCEEDED, one.said()
    # master 0, workers 0 and 1; workers 2 and 3. The servers are ended whenever the others are.
    assert [one.log(rank) for rank in range(5)] == [*["1 2\n"] * 3, "2 2\n", "2 2\n"]


# --- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "index", "rank", "way", "code", "reason"),
    [
        ("worker", 1, 2, "sys.exit(41)", 41, "exited with code 41"),
        ("ps", 0, 3, "os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("master", 0, 0, "raise ValueError('no such image')", 1, "ValueError at main.py"),
    ],
)
def test_task_that_fails_is_named_and_ends_the_others(
    cluster, kind, index, rank, way, code, reason
):
    script = f"""
        if (kind, index) == ({kind!r}, {index}):
            time.sleep(0.5)
            {way}
        time.sleep(60)
    """
    one = cluster(script).start()
    status = one.wait(SOON_S)
    assert status.state is JobState.FAILED, one.said()
    failure = status.failure
    assert (failure.task, failure.rank, failure.exit_code) == (f"{kind} {index}", rank, code)
    assert reason in failure.reason
    others = [one.record(n) for n in range(4) if n != rank]
    assert all("asked_to_end" in record for record in others)
    assert f"{kind} {index} ended with exit code {code}" in one.said()  # in launcher.log


def test_a_server_that_dies_is_blamed_not_the_worker_that_misses_it(cluster, tmp_path):
    script = f"""
        gone = {str(tmp_path / "gone")!r}
        if kind == "ps":
            time.sleep(0.5)
            open(gone, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        class UnavailableError(Exception):
            pass
        while not os.path.exists(gone):
            time.sleep(0.001)
        raise UnavailableError("failed to connect to all addresses")
    """
    failure = cluster(script).start().wait(SOON_S).failure
    assert failure.task == "ps 0"


def test_script_that_asks_for_what_has_left_tensorflow_is_not_retried(cluster):
    script = """
        class LeftTensorFlow(AttributeError):
            pass
        raise LeftTensorFlow("tensorflow.contrib.data is gone from TensorFlow. Use tf.data.")
    """
    failure = cluster(script, tasks="worker=1").start().wait(SOON_S).failure
    assert failure.permanent is True
    assert "Use tf.data" in failure.reason


# --- ending ---------------------------------------------------------------------------------

ENDLESS = """
    def told(*_):
        open(f"{os.environ['PLACE']}/told-{kind}-{index}", "w").close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, told)
    with open(f"{os.environ['PLACE']}/up-{kind}-{index}", "w") as file:
        file.write("up")
    time.sleep(60)
"""
NAMES = ("master-0", "worker-0", "worker-1", "ps-0")


def test_cancel_asks_every_task_and_leaves_no_process(cluster, tmp_path):
    one = cluster(ENDLESS, env={"PLACE": str(tmp_path)}).start()
    for name in NAMES:
        one.wait_for(tmp_path / f"up-{name}")
    assert len(one.processes()) == 9  # who holds them together, four shims, four scripts
    one.launcher.cancel(one.handle, 3.0)
    assert one.processes() == []
    assert all((tmp_path / f"told-{name}").exists() for name in NAMES)
    assert one.status().state is not JobState.SUCCEEDED


@pytest.mark.parametrize("number", [signal.SIGURG, signal.SIGUSR1])
def test_every_task_hears_what_asks_the_ranks_of_other_jobs(cluster, tmp_path, number):
    script = ENDLESS.replace("signal.SIGTERM", f"signal.{number.name}")
    one = cluster(script, env={"PLACE": str(tmp_path)}).start()
    for name in NAMES:
        one.wait_for(tmp_path / f"up-{name}")
    os.kill(one.handle.number, number)
    assert one.wait(SOON_S).state is JobState.SUCCEEDED, one.said()
    assert all((tmp_path / f"told-{name}").exists() for name in NAMES)


def test_everything_ends_with_the_process_that_holds_it_together(cluster, tmp_path):
    one = cluster(ENDLESS, env={"PLACE": str(tmp_path)}).start()
    for name in NAMES:
        one.wait_for(tmp_path / f"up-{name}")
    os.kill(one.handle.number, signal.SIGKILL)
    deadline = time.monotonic() + within(SOON_S)
    while one.processes():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert one.wait(SOON_S).state is not JobState.SUCCEEDED


# --- ports ----------------------------------------------------------------------------------


def test_reserved_port_goes_to_nobody_but_its_server():
    held = reserve(20)
    ports = {one.getsockname()[1] for one in held}
    assert len(ports) == 20
    others = []
    try:
        for _ in range(300):  # whoever asks for any port gets another
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            others.append(other)
        assert not ports & {other.getsockname()[1] for other in others}
        for port in ports:
            server = socket.socket()
            others.append(server)
            with pytest.raises(OSError, match="in use"):
                server.bind(("0.0.0.0", port))  # by name, but without what TensorFlow sets
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("0.0.0.0", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port)):
                pass
    finally:
        for one in (*held, *others):
            one.close()


def test_clusters_of_one_host_do_not_meet(cluster, tmp_path):
    script = """
        server = serve()
        open(f"{os.environ['PLACE']}/{os.environ['NAME']}-{kind}-{index}", "w").close()
        while len(os.listdir(os.environ["PLACE"])) < 8:
            time.sleep(0.02)
        print(server.getsockname()[1])
    """
    place = tmp_path / "place"
    place.mkdir()
    jobs = [
        cluster(script, tasks="worker=4", env={"PLACE": str(place), "NAME": name}).start()
        for name in ("a", "b")
    ]
    assert [one.wait().state for one in jobs] == [JobState.SUCCEEDED] * 2, jobs[0].said()
    ports = {one.log(rank) for one in jobs for rank in range(4)}
    assert len(ports) == 8
