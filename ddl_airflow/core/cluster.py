"""A TensorFlow cluster of parameter servers and workers, and the TF_CONFIG of each of its tasks.

Between-graph replication: every task runs the same script, and learns from ``TF_CONFIG`` which
task it is and where the others are. Pure values: who starts the tasks brings hosts and ports.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# In the order of ranks: rank 0 is the one whose output people read, never a parameter server.
_JOBS = ("chief", "master", "worker", "ps", "evaluator")
PARAMETER_SERVER = "ps"
_EVALUATOR = "evaluator"


@dataclass(frozen=True)
class Task:
    """One process of the cluster.

    Attributes:
        job: ``master``, ``worker``, ``ps`` or another of TensorFlow's names.
        index: its number among the tasks of its job.
        node: the host that it runs on, from 0.
    """

    job: str
    index: int
    node: int = 0

    def __str__(self) -> str:
        return f"{self.job} {self.index}"


@dataclass(frozen=True)
class Cluster:
    """All tasks; the place of a task in ``tasks`` is its rank.

    As text, ``master:0,worker:0,ps:0/worker:1``: nodes are separated by ``/``.
    """

    tasks: tuple[Task, ...]

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> Cluster:
        """The cluster of these tasks, in the order of their ranks."""
        return cls(tuple(sorted(tasks, key=lambda task: (_JOBS.index(task.job), task.index))))

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """What ``str()`` wrote. Raises ValueError on anything else."""
        tasks = []
        for node, names in enumerate(text.split("/")):
            for name in names.split(","):
                job, _, index = name.partition(":")
                tasks.append(Task(job, int(index), node))
        return cls.of(tasks)

    def __str__(self) -> str:
        nodes = sorted({task.node for task in self.tasks})
        return "/".join(
            ",".join(f"{task.job}:{task.index}" for task in self.tasks if task.node == node)
            for node in nodes
        )

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.tasks)

    def ranks_by_node(self) -> list[list[int]]:
        """The ranks of each node's tasks."""
        nodes = 1 + max(task.node for task in self.tasks)
        return [
            [rank for rank, task in enumerate(self.tasks) if task.node == node]
            for node in range(nodes)
        ]

    def addresses(self, hosts: Sequence[str], ports: Sequence[int]) -> dict[str, list[str]]:
        """Job to the addresses of its tasks, as ``tf.train.ClusterSpec`` takes it.

        Args:
            hosts: one for each node.
            ports: one for each task, by rank. An evaluator's is not used: it looks at checkpoints
                and is no part of the cluster that trains.
        """
        found: dict[str, list[str]] = {}
        for task, port in zip(self.tasks, ports, strict=True):
            if task.job != _EVALUATOR:
                found.setdefault(task.job, []).append(f"{hosts[task.node]}:{port}")
        return found


def parameter_servers(nodes: int, slots: int) -> Cluster:
    """The processes that IBM's distributed TensorFlow on Power started.

    One parameter server on every node; on the first node also master 0 and workers 0 and 1; on
    each other node a worker for each slot.
    """
    tasks = [Task("master", 0), Task("worker", 0), Task("worker", 1)]
    for node in range(1, nodes):
        first = 2 + (node - 1) * slots
        tasks += [Task("worker", first + slot, node) for slot in range(slots)]
    return Cluster.of(tasks + [Task(PARAMETER_SERVER, node, node) for node in range(nodes)])


def counted(text: str) -> Cluster:
    """The tasks of ``master=1,ps=1,worker=2``, on one node.

    Raises:
        ValueError: says what is wrong with the text, and what to write.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        job, _, count = (word.strip() for word in part.partition("="))
        if job not in _JOBS:
            raise ValueError(f"{job!r} is no kind of task; use {', '.join(_JOBS)}")
        if job in counts:
            raise ValueError(f"{job} is given twice")
        if not count.isdecimal() or not 1 <= int(count) <= 4096:
            raise ValueError(f"{part.strip()!r}: write {job}=1, or a larger number up to 4096")
        counts[job] = int(count)
    leaders = counts.get("chief", 0) + counts.get("master", 0)
    if leaders > 1:
        raise ValueError("there may be one chief or one master, not both and not several")
    if counts.keys() <= {PARAMETER_SERVER, _EVALUATOR}:
        raise ValueError("nobody trains; add master=1 or worker=1")
    return Cluster.of(Task(job, index) for job, count in counts.items() for index in range(count))


def tf_config(task: Task, addresses: Mapping[str, Sequence[str]]) -> str:
    """The value of ``TF_CONFIG`` for one task.

    ``environment`` is what ``tf.contrib.learn`` asked for before it started servers.
    """
    whole = {
        "cluster": addresses,
        "task": {"type": task.job, "index": task.index},
        "environment": "cloud",
    }
    return json.dumps(whole)


def devices(tasks: Sequence[Task], visible: Sequence[str]) -> list[str]:
    """``CUDA_VISIBLE_DEVICES`` of each task: one GPU for each that computes, in turn.

    A parameter server gets none: it would take the memory of a GPU to keep its variables there.

    Args:
        tasks: all that run on the host that has the GPUs.
        visible: the host's GPUs, at least one.
    """
    found, taken = [], 0
    for task in tasks:
        if task.job == PARAMETER_SERVER:
            found.append("")
        else:
            found.append(visible[taken % len(visible)])
            taken += 1
    return found
