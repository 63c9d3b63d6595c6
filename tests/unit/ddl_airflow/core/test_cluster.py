"""Which tasks a cluster has, where they run, and what each is told."""

from __future__ import annotations

import json

import pytest

from ddl_airflow.core.cluster import (
    Cluster,
    Task,
    counted,
    devices,
    parameter_servers,
    tf_config,
)


@pytest.mark.parametrize(
    ("nodes", "slots", "text"),
    [
        (1, 1, "master:0,worker:0,worker:1,ps:0"),
        (1, 4, "master:0,worker:0,worker:1,ps:0"),
        (2, 1, "master:0,worker:0,worker:1,ps:0/worker:2,ps:1"),
        (
            3,
            4,
            "master:0,worker:0,worker:1,ps:0/worker:2,worker:3,worker:4,worker:5,ps:1"
            "/worker:6,worker:7,worker:8,worker:9,ps:2",
        ),
    ],
)
def test_processes_are_those_of_the_document(nodes, slots, text):
    cluster = parameter_servers(nodes, slots)
    assert str(cluster) == text
    assert Cluster.parse(text) == cluster
    assert cluster.size == 3 + nodes + (nodes - 1) * slots
    assert cluster.tasks[0] == Task("master", 0)
    assert [t.job for t in cluster.tasks[-nodes:]] == ["ps"] * nodes  # nobody reads their output
    for job in ("worker", "ps"):
        indices = [task.index for task in cluster.tasks if task.job == job]
        assert indices == list(range(len(indices)))


def test_tasks_are_counted_in_any_order():
    tasks = counted(" ps=2, worker=11,chief=1 , evaluator=1").tasks
    assert tasks[0] == Task("chief", 0)
    assert tasks[1:12] == tuple(Task("worker", n) for n in range(11))
    assert tasks[12:] == (Task("ps", 0), Task("ps", 1), Task("evaluator", 0))
    assert str(tasks[11]) == "worker 10"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'' is no kind of task; use chief, master, worker, ps, evaluator"),
        ("wroker=1", "'wroker' is no kind"),
        ("worker", "'worker': write worker=1"),
        ("worker=0", "'worker=0': write worker=1"),
        ("worker=-1", "'worker=-1'"),
        ("worker=5000", "up to 4096"),
        ("worker=1,worker=2", "worker is given twice"),
        ("master=2", "one chief or one master"),
        ("master=1,chief=1", "one chief or one master"),
        ("ps=1", "nobody trains"),
    ],
)
def test_wrong_counts_are_explained(text, said):
    with pytest.raises(ValueError) as caught:
        counted(text)
    assert said in str(caught.value)


def test_each_task_is_told_who_it_is_and_where_all_are():
    cluster = parameter_servers(2, 2)
    ports = [7000 + rank for rank in range(cluster.size)]
    addresses = cluster.addresses(["first", "second"], ports)
    assert addresses == {
        "master": ["first:7000"],
        "worker": ["first:7001", "first:7002", "second:7003", "second:7004"],
        "ps": ["first:7005", "second:7006"],
    }
    assert json.loads(tf_config(cluster.tasks[4], addresses)) == {
        "cluster": addresses,
        "task": {"type": "worker", "index": 3},
        "environment": "cloud",
    }


def test_an_evaluator_is_no_part_of_the_cluster():
    assert counted("chief=1,evaluator=1").addresses(["h"], [1, 2]) == {"chief": ["h:1"]}


def test_tasks_that_compute_share_the_gpus_and_servers_get_none():
    cluster = parameter_servers(1, 4)
    assert devices(cluster.tasks, ["0", "1", "2", "3"]) == ["0", "1", "2", ""]
    assert devices(cluster.tasks, ["GPU-a", "GPU-b"]) == ["GPU-a", "GPU-b", "GPU-a", ""]
