"""Places where jobs of one launcher run, and what can happen there to them and to their hosts."""

from __future__ import annotations

import json
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddl_airflow.launchers.kubernetes.objects import (
    JOB_LABEL,
    ROLE_LABEL,
    name_of,
    worker_name,
)
from ddl_airflow.launchers.processes import marked
from tests.integration.hosts import Hosts
from tests.integration.kubernetes import IMAGE, SPACE, KubernetesCluster, ours, sources
from tests.integration.kubernetes import python as ranks_python
from tests.integration.launched import LaunchedJob, over_ssh
from tests.integration.slurm import SlurmCluster
from tests.limits import within


class Bench(ABC):
    """A place where jobs of one launcher run."""

    kind: str
    # Whether a job outlives the process that submitted it.
    has_scheduler = False
    # Of a job that others may take the place of; and of one that has a limit of time.
    spare: Mapping[str, Any] = {}
    limited: Mapping[str, Any] = {}

    @abstractmethod
    def launch(self, job_id: str, root: Path, script: str, **asked: Any) -> LaunchedJob:
        """A job on two nodes that has begun."""

    def lose_node(self) -> None:
        """Takes the second node of the ranks away."""
        raise NotImplementedError

    def cut_link(self) -> None:
        """Takes its cable out."""
        raise NotImplementedError

    def mend(self) -> None:
        """All is as before."""
        raise NotImplementedError

    def preempt(self, one: LaunchedJob) -> None:
        """Has the job make room; as it is here, one of its hosts is told that it will be taken."""
        shims = [pid for pid in marked("DDL_JOB_ID", one.job_id) if _is_shim(pid)]
        os.kill(shims[-1], signal.SIGTERM)

    def end_time(self, one: LaunchedJob) -> None:
        """Lets the limit of its time be over soon."""
        raise NotImplementedError

    def kill(self, one: LaunchedJob, number: signal.Signals) -> None:
        """Sends a signal to the process that launched a job."""
        os.kill(one.process.pid, number)


class Local(Bench):
    kind = "local"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def launch(self, job_id: str, root: Path, script: str, **asked: Any) -> LaunchedJob:
        return LaunchedJob(
            lambda words: words, self._folder, job_id, root, self.kind, script, **asked
        )


class Ssh(Bench):
    kind = "ssh"

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    def launch(self, job_id: str, root: Path, script: str, **asked: Any) -> LaunchedJob:
        return over_ssh(self._hosts, job_id, root, script, **asked)

    def lose_node(self) -> None:
        self._hosts.cut_power(2)

    def cut_link(self) -> None:
        self._hosts.cut(2)

    def mend(self) -> None:
        self._hosts.start(2)
        self._hosts.connect(2)

    def kill(self, one: LaunchedJob, number: signal.Signals) -> None:
        # What nsenter has started, not nsenter.
        for pid in (
            Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text().split()
        ):
            os.kill(int(pid), number)


class Slurm(Bench):
    kind = "slurm"
    has_scheduler = True
    spare = {"partition": "spare"}
    limited = {"time_limit_s": 60.0}

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        self._folder = folder
        self._cluster = cluster

    def launch(self, job_id: str, root: Path, script: str, **asked: Any) -> LaunchedJob:
        around = [f"{name}={text}" for name, text in self._cluster.environment.items()]
        return LaunchedJob(
            lambda words: ["env", *around, *words],
            *(self._folder, job_id, root, self.kind, script),
            **asked,
        )

    def lose_node(self) -> None:
        self._cluster.fail_node()

    def mend(self) -> None:
        self._cluster.wait_for_nodes()

    def preempt(self, one: LaunchedJob) -> None:
        self._cluster.take_all()

    def end_time(self, one: LaunchedJob) -> None:
        self._cluster.end_time(one.job_id)


class Kubernetes(Bench):
    kind = "kubernetes"
    has_scheduler = True
    # In which a container may write little beside its volumes. A kubelet looks once in a minute.
    narrow = "narrow"

    def __init__(self, folder: Path, cluster: KubernetesCluster) -> None:
        self._folder = folder
        self.cluster = cluster
        self._seen_of = ""
        self.names: list[tuple[str, str]] = []

    @property
    def limited(self) -> Mapping[str, Any]:
        """Long enough for the ranks to begin; the cluster ends the job after as many seconds."""
        return {"time_limit_s": float(round(within(12)))}

    def launch(self, job_id: str, root: Path, script: str, **asked: Any) -> LaunchedJob:
        workspace = {"host_path": str(root.parent), "mount_path": str(root.parent)}
        self._seen_of = job_id
        settings = {
            **{"image": IMAGE, "namespace": SPACE, "grace_s": float(round(within(3.0)))},
            **{"keep_finished_s": 20.0, "python": asked.pop("python", ranks_python())},
            **{"volumes": [*ours(), workspace]},
            **asked.pop("settings", {}),
        }
        self.names.append((name_of(job_id), settings["namespace"]))
        return LaunchedJob(
            lambda words: ["env", f"KUBECONFIG={self.cluster.kubeconfig}", *words],
            *(self._folder, job_id, root, self.kind, script),
            env={"PYTHONPATH": sources()},
            settings=settings,
            **asked,
        )

    def preempt(self, one: LaunchedJob) -> None:
        """As who drains a node does."""
        pod = worker_name(name_of(one.job_id), 1)
        eviction = {
            **{"apiVersion": "policy/v1beta1", "kind": "Eviction"},
            "metadata": {"name": pod, "namespace": SPACE},
        }
        path = f"/api/v1/namespaces/{SPACE}/pods/{pod}/eviction"
        self.cluster.kubectl("create", "--raw", path, "-f", "-", given=json.dumps(eviction))

    def end_time(self, one: LaunchedJob) -> None:
        # Kubernetes 1.20 looks when it is time, and not again if that was a moment too early, as
        # where the host's clock was set back. It looks again when the Job changes.
        began = time.monotonic()
        while one.process.poll() is None and time.monotonic() - began < within(60):
            time.sleep(5)
            note = f"ddl-test/looks={time.time()}"
            words = ("annotate", "--overwrite", "job", name_of(one.job_id), note)
            self.cluster.kubectl("-n", SPACE, *words, check=False)

    def make_narrow(self) -> None:
        """The namespace."""
        self.cluster.kubectl("create", "namespace", self.narrow)
        limit = {"type": "Container", "default": {"ephemeral-storage": "16Mi"}}
        self.cluster.apply(
            {
                **{"apiVersion": "v1", "kind": "LimitRange", "spec": {"limits": [limit]}},
                "metadata": {"name": "narrow", "namespace": self.narrow},
            }
        )

    def wants_room(self) -> None:
        """A pod of higher priority, which a node has room for without the job alone."""
        container = {
            **{"name": "one", "image": IMAGE, "command": ["/bin/sleep", "1"]},
            "resources": {"requests": {"cpu": "1500m"}},
        }
        spec = {"priorityClassName": "urgent", "restartPolicy": "Never", "containers": [container]}
        about = {"name": "better", "namespace": SPACE}
        self.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec})

    def lose_node(self) -> None:
        self._lost = self._node_of(worker_name(name_of(self._seen_of), 1))
        self.cluster.cut_power(self._lost)
        self._mends = self.cluster.start

    def cut_link(self) -> None:
        # The launcher's pod finds out; of its own node Kubernetes says so, and much later.
        name = name_of(self._seen_of)
        workers = {self._node_of(worker_name(name, number)) for number in (0, 1)}
        launcher = self._node_of("-l", f"{JOB_LABEL}={name},{ROLE_LABEL}=launcher")
        self._lost = (workers - {launcher}).pop()
        self.cluster.cut(self._lost)
        self._mends = self.cluster.connect

    def mend(self) -> None:
        self._mends(self._lost)

    def _node_of(self, *pod: str) -> str:
        name = "jsonpath={..nodeName}"
        return self.cluster.kubectl("-n", SPACE, "get", "pod", *pod, "-o", name)


def _is_shim(pid: int) -> bool:
    return b"ddl_ops.rank" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
