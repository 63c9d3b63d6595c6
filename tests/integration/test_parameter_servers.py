"""Clusters of parameter servers and workers over several hosts, on each launcher that has such.

``ssh`` between hosts in namespaces, ``slurm`` and ``kubernetes`` on clusters of two nodes. On the
first node a master, workers 0 and 1 and a server; on the other worker 2 and a server.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddl_airflow.launchers.processes import marked
from tests.integration.hosts import Hosts, available
from tests.integration.launched import LaunchedJob, over_ssh
from tests.integration.test_launcher_contract import NODE_LOST, Bench, Kubernetes, Slurm, Ssh
from tests.limits import until, within

pytestmark = pytest.mark.integration
TASKS = ("master 0", "worker 0", "worker 1", "worker 2", "ps 0", "ps 1")
NODE = (0, 0, 0, 1, 0, 1)
SERVE = """\
import json, os, socket, sys, time
config = json.loads(os.environ["TF_CONFIG"])
kind, index = config["task"]["type"], config["task"]["index"]
# As TensorFlow's servers do it.
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("", int(config["cluster"][kind][index].rsplit(":")[1])))
server.listen()
while kind == "ps":
    peer = server.accept()[0]
    peer.sendall(f"{kind} {index}".encode())
    peer.close()
def asked(address):
    host, port = address.rsplit(":", 1)
    for _ in range(600):
        try:
            with socket.create_connection((host, int(port)), 5) as peer:
                return peer.recv(9).decode()
        except OSError:
            time.sleep(0.05)
"""
ASKS = (
    SERVE
    + """\
import ddl_ops.environment
said = [asked(address) for address in config["cluster"]["ps"]]
names = ("LEARNER_ID", "DDL_OPTIONS", "DDL_TASK", "DDL_PROGRESS")
print(json.dumps({
    "task": f"{kind} {index}", "served": said, "cluster": config["cluster"],
    "env": {name: os.environ.get(name) for name in names},
    "mpi": [name for name in os.environ if name.startswith(("OMPI_", "PMIX_"))],
    "ranks": ddl_ops.environment.PLACEMENT.size,
}))
"""
)
# Whether what takes long is tested, too.
FAULTS = int(os.environ.get("TESTS_FAULTS", "0"))
WAITS = "import time; print('up', flush=True); time.sleep(600)"


@pytest.fixture(scope="module", params=["ssh", "slurm", "kubernetes"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "slurm":
        yield Slurm(folder, request.getfixturevalue("slurm"))
    elif request.param == "kubernetes":
        yield Kubernetes(folder, request.getfixturevalue("kubernetes_cluster"))
    else:
        if reason := available():
            pytest.skip(reason)
        with Hosts(folder, 3) as three:
            yield Ssh(three)


@pytest.fixture
def cluster(bench: Bench, tmp_path: Path) -> Iterator[Callable[..., LaunchedJob]]:
    """cluster(script, …): one that has begun. Leaves no process."""
    made: list[LaunchedJob] = []
    job_id = f"{tmp_path.name}/train-1"

    def make(script: str, **asked: Any) -> LaunchedJob:
        made.append(bench.launch(job_id, tmp_path / "run", script, servers=True, **asked))
        return made[-1]

    yield make
    for one in made:
        if one.process.poll() is None:
            bench.kill(one, signal.SIGTERM)
            one.process.wait(within(60))
    # Every process of every host is this machine's.
    until(lambda: not marked("DDL_JOB_ID", job_id), 30)


def up(one: LaunchedJob) -> None:
    """Waits until every task runs."""
    logs = [one.root / "logs" / f"rank-{rank}.log" for rank in range(len(TASKS))]

    def are() -> bool:
        assert one.process.poll() is None, one.said()
        return all(log.exists() and "up" in log.read_text() for log in logs)

    until(are, 60, one.said)


def records(one: LaunchedJob) -> list[dict[str, Any]]:
    folder = one.root / "ddl" / "try-1"
    return [json.loads((folder / f"rank-{n}.json").read_text()) for n in range(len(TASKS))]


def test_tasks_of_all_hosts_reach_each_other_and_servers_end_when_the_others_are_done(
    cluster,
) -> None:
    one = cluster(ASKS)
    assert one.ended() == ["", "", 2], one.said()
    left = records(one)
    assert [record["task"] for record in left] == list(TASKS)
    hosts = [record["host"] for record in left]
    assert len(set(hosts)) == 2
    assert hosts == [(hosts[0], hosts[3])[node] for node in NODE]
    assert ["released" in record for record in left] == [False] * 4 + [True] * 2
    for rank in range(4):
        seen = json.loads((one.root / "logs" / f"rank-{rank}.log").read_text())
        assert seen["task"] == TASKS[rank]
        assert seen["served"] == ["ps 0", "ps 1"]
        assert seen["env"]["LEARNER_ID"] == str(NODE[rank] + 1)
        assert seen["env"]["DDL_OPTIONS"] is seen["env"]["DDL_TASK"] is None
        assert (seen["mpi"], seen["ranks"]) == ([], 1)
        assert {name: len(at) for name, at in seen["cluster"].items()} == {
            **{"master": 1, "worker": 3, "ps": 2}
        }


def test_a_task_that_fails_is_named_with_its_host_and_ends_the_others(cluster) -> None:
    fails = "if (kind, index) == ('worker', 2):\n    raise ValueError('too small')\ntime.sleep(600)"
    one = cluster(SERVE + fails)
    kind, said, again = one.ended()
    assert (kind, again) == ("JobFailed", True), one.said()
    assert said.startswith("worker 2 (rank 3 of 6) on ") and "too small" in said


def test_a_lost_host_ends_the_cluster_and_is_named(cluster, bench) -> None:
    if bench.kind == "kubernetes" and not FAULTS:
        pytest.skip("the node takes a minute to come back: TESTS_FAULTS=1")
    one = cluster(WAITS)
    up(one)
    bench.lose_node()
    try:
        kind, said, again = one.ended()
        assert (kind, again) == ("JobLost", True), one.said()
        assert NODE_LOST[bench.kind] in said
    finally:
        bench.mend()


def test_cancelling_ends_all_tasks_everywhere(cluster, bench) -> None:
    one = cluster(WAITS)
    up(one)
    bench.kill(one, signal.SIGTERM)
    kind, said, _ = one.ended()
    assert (kind, "was cancelled" in said) == ("JobLost", True), one.said()


# Variables on both servers, each of which writes its part of the checkpoint.
TRAINS = """\
import json, os
import tensorflow as tf
config = json.loads(os.environ["TF_CONFIG"])
kind, index = config["task"]["type"], config["task"]["index"]
cluster = tf.train.ClusterSpec(config["cluster"])
server = tf.train.Server(cluster, job_name=kind, task_index=index)
if kind == "ps":
    server.join()
with tf.device(tf.train.replica_device_setter(
    cluster=cluster, worker_device=f"/job:{kind}/task:{index}"
)):
    weights = [tf.get_variable(f"w{n}", [2, 1], initializer=tf.zeros_initializer()) for n in (0, 1)]
    step = tf.train.get_or_create_global_step()
    loss = tf.reduce_mean((tf.ones([4, 2]) @ (weights[0] + weights[1]) - 1.0) ** 2)
    train = tf.train.GradientDescentOptimizer(0.05).minimize(loss, global_step=step)
saver = tf.train.Saver(sharded=True)
own = tf.ConfigProto(device_filters=["/job:ps", f"/job:{kind}/task:{index}"])
with tf.train.MonitoredTrainingSession(
    server.target, is_chief=kind == "master", config=own,
    scaffold=tf.train.Scaffold(saver=saver),
    checkpoint_dir=os.environ["CHECKPOINT_DIR"] if kind == "master" else None,
    hooks=[tf.train.StopAtStepHook(last_step=40)],
) as session:
    while not session.should_stop():
        done, now = session.run([step, loss, train])[:2]
print(kind, index, "at", done, "loss", now)
"""


def test_tensorflows_servers_on_two_hosts_hold_and_save_the_variables_of_one_model(
    tmp_path: Path,
) -> None:
    if reason := available():
        pytest.skip(reason)
    kept = tmp_path / "kept"
    kept.mkdir()
    env = {"CHECKPOINT_DIR": str(kept), "DDL_TF1": "1"}
    with Hosts(tmp_path / "hosts", 3) as hosts:
        before = hosts.sent_bytes()
        one = over_ssh(hosts, "train-1", tmp_path / "run", TRAINS, servers=True, env=env)
        assert one.ended() == ["", "", 2], one.said()
        sent = [now - was for now, was in zip(hosts.sent_bytes(), before, strict=True)]
    assert all("released" in record for record in records(one)[4:])
    assert "rank 0 | master 0 at" in one.said()
    # Of each server a part, from one to the other host.
    names = sorted(path.name for path in kept.glob("model.ckpt-*.data-*"))
    assert any("-00000-of-00002" in name for name in names), names
    assert any("-00001-of-00002" in name for name in names), names
    assert min(sent[1:]) > 10_000, sent
