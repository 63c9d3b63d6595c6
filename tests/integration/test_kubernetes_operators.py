"""The Kubernetes launcher with an MPIJob and with a TrainJob, on a real cluster of two nodes where
a stand-in makes the operators' pods: see tests/integration/operators.py. No operator runs here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.core.job import JobState
from tests.integration.kubernetes import NODES, SPACE, KubernetesCluster, ours
from tests.integration.kubernetes_jobs import OBJECTS, SLEEP, Job, Jobs

pytest.importorskip("kubernetes", reason="no package `kubernetes` in this environment")
from ddl_airflow.launchers.kubernetes import KubernetesLauncher
from tests.integration.operators import StandIn

pytestmark = pytest.mark.integration

# Each rank has other data; together they come to the weight of both.
TRAIN = """\
import tensorflow as tf
import ddl
ddl.init()
weight = tf.Variable(0.0)
for step in range(50):
    with tf.GradientTape() as tape:
        loss = (weight - 4.0 * ddl.rank()) ** 2
    (pair,) = ddl.grads_reduce([(tape.gradient(loss, weight), weight)])
    weight.assign_sub(0.2 * pair[0])
print("rank", ddl.rank(), "of", ddl.size(), "weight", round(float(weight), 3))
"""
# The same without TensorFlow, whose import takes longer than all else.
ARRAYS = """\
from mpi4py import MPI
world = MPI.COMM_WORLD
weight = 0.0
for step in range(50):
    gradient = 2 * (weight - 4.0 * world.rank)
    weight -= 0.2 * world.allreduce(gradient) / world.size
print("rank", world.rank, "of", world.size, "weight", round(weight, 3))
"""


@pytest.fixture
def job(
    kubernetes_cluster: KubernetesCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Job]]:
    """As ``Jobs.make``. Leaves nothing."""
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_cluster.kubeconfig))
    with Jobs(kubernetes_cluster, tmp_path) as jobs:
        yield jobs.make


@pytest.fixture(scope="module")
def stand_in(kubernetes_cluster: KubernetesCluster) -> Iterator[StandIn]:
    with StandIn(kubernetes_cluster) as one:
        yield one


either = pytest.mark.parametrize("operator", ["mpi", "trainer"])


# Before the cluster has them.
@either
def test_an_operator_that_the_cluster_has_not_is_named_with_the_field(job, operator):
    one = job(nodes=1, operator=operator)
    kind = {"mpi": "MPIJob", "trainer": "TrainJob"}[operator]
    words = f"launcher.operator is {operator}, and this cluster has no {kind} .*operator: none"
    with pytest.raises(SubmitFailed, match=words) as caught:
        one.start()
    assert caught.value.retryable is False
    assert one.cluster.of_job(one.name, SPACE) == []


@pytest.mark.parametrize(("operator", "script"), [("mpi", TRAIN), ("trainer", ARRAYS)])
def test_two_ranks_train_in_pods_that_a_stand_in_for_the_operator_makes(
    job, stand_in, operator, script
):
    one = job(script, operator=operator, delay_s=4.0, keep_finished_s=0.0)
    one.start()
    assert "is not to start before" in one.status().reason
    sent = {
        made["kind"]: made["spec"]
        for made in yaml.safe_load_all(one.launcher.render(one.spec).script)
        if "spec" in made
    }
    kept = one.cluster.kubectl("-n", SPACE, "get", *kinds(operator), "-o", "json")
    for made in json.loads(kept)["items"]:
        if made["metadata"]["name"] == one.name:
            assert included(sent[made["kind"]], made["spec"])  # nothing is pruned
    one.until(lambda: one.status().state is JobState.RUNNING, "running")
    nodes = [one.pod_of(node)["spec"]["nodeName"] for node in (0, 1)]
    launchers = f"ddl-airflow/job={one.name},ddl-airflow/role=launcher"
    pods = one.cluster.kubectl("-n", SPACE, "get", "pods", "-l", launchers, "-o", "name")
    assert len(pods.split()) == 1
    status = one.wait()
    assert status.state is JobState.SUCCEEDED, (status, one.said())
    assert set(nodes) == set(NODES)
    for rank in (0, 1):
        assert one.log(rank).splitlines()[-1] == f"rank {rank} of 2 weight 2.0"
        record = json.loads((one.spec.record_dir / f"rank-{rank}.json").read_text())
        assert record["host"] == one.pod(rank)
    # The operators do not remove their objects. Who looks at another job does.
    never = replace(one.launcher.expected(one.spec), job_id="never")
    one.until(lambda: KubernetesLauncher().ask([never]) and left(one) == [], "removed")


@either
def test_a_failed_rank_is_named_with_its_pod_made_by_a_stand_in(job, stand_in, operator):
    script = "import os, sys, time\nif os.environ['LEARNER_ID'] == '2':\n    sys.exit(41)\n"
    one = job(script + "time.sleep(600)", operator=operator).start()
    status = one.wait()
    assert (status.state, status.failure.rank) == (JobState.FAILED, 1), (status, one.said())
    assert (status.failure.exit_code, status.failure.host) == (41, one.pod(1))
    assert status.permanent is False


@either
def test_another_process_finds_the_job_and_cancels_it_at_a_stand_in(job, stand_in, operator):
    one = job(SLEEP, operator=operator).start().up()
    assert one.status().reason == "on node-1, node-2"
    expected = one.launcher.expected(one.spec)
    assert expected.number == 0
    assert KubernetesLauncher().find(expected) == one.handle
    one.cancel()
    one.cancel()
    status = one.wait()
    assert (status.state, status.permanent) == (JobState.LOST, False)
    assert "cancelled" in status.reason
    assert all((one.spec.folder / f"asked-{rank}").exists() for rank in (0, 1))
    one.gone()


@either
def test_a_drained_worker_of_a_stand_in_is_a_preemption(job, stand_in, operator):
    one = job(SLEEP, operator=operator).start().up()
    pod = one.pod_of(1)["metadata"]["name"]
    one.cluster.kubectl("-n", SPACE, "delete", "pod", pod, "--wait=false")
    status = one.wait()
    assert status.state is JobState.PREEMPTED, (status, one.said())
    assert "deleted while the job ran" in status.reason


@either
def test_a_stand_in_that_runs_every_rank_in_the_launchers_pod_fails_the_try(
    job, stand_in, operator, monkeypatch
):
    """As the operators do with Open MPI 5, which does not read their variables."""
    monkeypatch.setattr(stand_in, "blind", True)
    script = "import os\nprint(os.uname().nodename)"
    one = job(script, operator=operator).start()
    said = stand_in.conditions
    done = {"mpi": "Succeeded", "trainer": "Complete"}[operator]
    one.until(lambda: done in said(OBJECTS[operator][0], one.name), "reported as done")
    assert one.log(0) == one.log(1)  # on one host
    status = one.wait()
    assert (status.state, status.permanent) == (JobState.FAILED, True)
    assert "2 hosts with 1 rank(s) each were asked for" in status.reason
    assert "ranks 0 and 1 on " in status.reason


def test_a_worker_that_ends_before_its_launcher_comes_ends_the_job_at_a_stand_in(job, stand_in):
    one = job(nodes=1, operator="mpi", volumes=ours()).start()  # without the workspace
    status = one.wait()
    assert (status.state, status.permanent) == (JobState.FAILED, True), (status, one.said())
    assert "cannot be written" in status.reason


def kinds(operator: str) -> tuple[str, ...]:
    return (",".join(OBJECTS[operator]),)


def left(one: Job) -> list[str]:
    return one.cluster.of_job(one.name, SPACE, OBJECTS[one.operator])


def included(sent: object, kept: object) -> bool:
    """Whether all of it was kept; the server adds defaults."""
    if isinstance(sent, dict):
        return isinstance(kept, dict) and all(
            name in kept and included(one, kept[name]) for name, one in sent.items()
        )
    if isinstance(sent, list):
        return isinstance(kept, list) and all(map(included, sent, kept))
    return sent == kept
