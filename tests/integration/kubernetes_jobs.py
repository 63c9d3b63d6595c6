"""Jobs on the cluster of tests/integration/kubernetes.py, as launchers submit and follow them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddl_airflow.core.job import JobHandle, JobSpec, JobStatus
from ddl_airflow.launchers.kubernetes import KubernetesLauncher
from ddl_airflow.launchers.kubernetes.objects import name_of, worker_name
from tests.integration.kubernetes import IMAGE, SPACE, KubernetesCluster, ours, python, sources
from tests.limits import within

_WAIT_S = 60.0
# Beside plain objects.
OBJECTS = {"": (), "mpi": ("mpijobs",), "trainer": ("trainjobs", "trainingruntimes")}
SLEEP = """\
import os, signal, sys, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
def end(*_):
    open("asked-" + rank, "w").close()
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
open("up-" + rank, "w").close()
time.sleep(600)
"""


class Job:
    """One job; each question is asked by a launcher of its own, as other processes ask."""

    def __init__(
        self, spec: JobSpec, launcher: KubernetesLauncher, cluster: KubernetesCluster
    ) -> None:
        self.spec = spec
        self.launcher = launcher
        self.cluster = cluster
        self.name = name_of(spec.job_id)
        # As ``JobHandle.place`` has it.
        self.operator, _, _ = launcher.expected(spec).place.partition("/")[0].rpartition(":")
        self.handle: JobHandle | None = None

    def start(self) -> Job:
        self.handle = self.launcher.submit(self.launcher.render(self.spec))
        return self

    def status(self) -> JobStatus:
        return KubernetesLauncher().status(self.handle)

    def cancel(self) -> None:
        KubernetesLauncher().cancel(self.handle)

    def until(self, done: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + within(_WAIT_S)
        while not done():
            assert time.monotonic() < deadline, f"not {what}: {self.status()}\n{self.said()}"
            time.sleep(0.2)

    def wait(self) -> JobStatus:
        self.until(lambda: self.status().ended, "ended")
        return self.status()

    def up(self) -> Job:
        """Waits until each rank runs."""
        ranks = [self.spec.folder / f"up-{n}" for n in range(self.spec.world_size)]
        self.until(lambda: all(path.exists() for path in ranks), "up")
        return self

    def pod(self, node: int) -> str:
        return worker_name(self.name, node, self.operator)

    def pod_of(self, node: int) -> dict[str, Any]:
        """The pod that has the node's ranks."""
        words = ("get", "pods", "-l", f"ddl-airflow/job={self.name}", "-o", "json")
        pods = json.loads(self.cluster.kubectl("-n", SPACE, *words))["items"]
        (found,) = (one for one in pods if one["spec"].get("hostname") == self.pod(node))
        return dict(found)

    def node_of(self, node: int) -> str:
        words = ("-n", SPACE, "get", "pod", self.pod(node), "-o", "jsonpath={.spec.nodeName}")
        return self.cluster.kubectl(*words)

    def log(self, rank: int) -> str:
        return self.launcher.log(self.handle, rank).read_text()

    def said(self) -> str:
        logs = sorted(self.spec.log_dir.glob("*.log"))
        said = [f"{path.name}: {path.read_text(errors='replace')}" for path in logs]
        pods = ("-n", SPACE, "get", "pods", "-l", f"ddl-airflow/job={self.name}", "-o", "wide")
        return "\n".join([*said, self.cluster.kubectl(*pods, check=False)])

    def gone(self) -> None:
        """Waits until nothing is left of it."""
        kinds = OBJECTS[self.operator]
        self.until(lambda: not self.cluster.of_job(self.name, SPACE, kinds), "gone")


class Jobs:
    """Jobs of one test, whose folder they work in. Ends by removing them."""

    def __init__(self, cluster: KubernetesCluster, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._made: list[Job] = []

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._made:
            kind = OBJECTS[one.operator][0] if one.operator else "job"
            self._cluster.kubectl(
                "-n", SPACE, "delete", kind, one.name, "--wait=false", check=False
            )

    def make(
        self,
        script: str = "",
        *,
        nodes: int = 2,
        slots: int = 1,
        env: dict[str, str] | None = None,
        lock: Path | None = None,
        user: str = "",
        delay_s: float = 0.0,
        **settings: object,
    ) -> Job:
        """Not yet started; ``settings`` are the launcher's."""
        self._folder.chmod(0o755)  # ranks may be another user's
        root = self._folder / f"job {len(self._made)}"
        (root / "code").mkdir(parents=True)
        (root / "code" / "main.py").write_text(script)
        spec = JobSpec(
            job_id=f"{self._folder.name}/train-{len(self._made)}",
            command="python main.py",
            nodes=nodes,
            slots=slots,
            python="of Airflow's own host",
            folder=root / "code",
            record_dir=root / "records",
            log_dir=root / "logs",
            env={"PYTHONPATH": sources(), **(env or {})},
            lock=lock,
            user=user,
            delay_s=delay_s,
        )
        workspace = {"host_path": str(self._folder), "mount_path": str(self._folder)}
        said: dict[str, object] = {
            **{"image": IMAGE, "python": python(), "namespace": SPACE, "grace_s": 5.0},
            **{"volumes": [*ours(), workspace], "keep_finished_s": 600.0},
        }
        one = Job(spec, KubernetesLauncher(**(said | settings)), self._cluster)
        self._made.append(one)
        return one
