"""One contract for all launchers: each way in which a job can end, on the real thing.

``local`` on this host, ``ssh`` between hosts in namespaces, ``slurm`` and ``kubernetes`` on
clusters of two nodes. A table of what was tried, and how it ended, is printed at the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddl_airflow.launchers.kubernetes.objects import name_of, worker_name
from ddl_airflow.launchers.processes import marked
from tests.integration.hosts import Hosts, available
from tests.integration.kubernetes import IMAGE, ROOT, SPACE, KubernetesCluster, ours
from tests.integration.kubernetes import python as ranks_python
from tests.integration.launched import LaunchedJob, over_ssh
from tests.integration.slurm import SlurmCluster
from tests.limits import until, within

pytestmark = pytest.mark.integration
SAYS = "import os; print('of rank', os.environ['OMPI_COMM_WORLD_RANK'])\n"
RANK_1 = "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': "
WAIT = "import time; print('up', flush=True); time.sleep(600)"
# It goes on when the file is there.
UNTIL = "import os, time; print('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)"
# Does as mpirun does where nobody has named hosts, or given it an allocation.
BLIND = """\
#!{python}
import os, sys
words = sys.argv[1:]
if not any("preflight" in word for word in words):
    for option in ("--host", "--map-by"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    words = ["--host", "localhost:9", *words]
env = {{n: text for n, text in os.environ.items() if n[:6] != "SLURM_"}}
os.execve("{mpirun}", ["{mpirun}", *words], env)
"""
# While a host goes down its port may still be answered for.
NODE_LOST = {"ssh": "10.99.0.3: ", "slurm": "a node failed", "kubernetes": "node"}
# Cases that a launcher does not have, and why.
NOT_THERE = {
    ("local", "node lost"): "its only host is the task's",
    ("local", "cut link"): "there is none",
    ("local", "wrong hosts"): "it has one",
    ("kubernetes", "cut link"): "to the cluster it is a node that is lost",
    ("kubernetes", "wrong hosts"): "its hostfile is made in the launcher's pod",
    ("slurm", "cut link"): "both nodes of the cluster are on this host",
}


class Bench(ABC):
    """A place where jobs of one launcher run."""

    kind: str
    # Whether a job outlives the process that submitted it.
    has_scheduler = False

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


class Kubernetes(Bench):
    kind = "kubernetes"
    has_scheduler = True

    def __init__(self, folder: Path, cluster: KubernetesCluster) -> None:
        self._folder = folder
        self._cluster = cluster
        self._seen_of = ""

    def launch(self, job_id: str, root: Path, script: str, **asked: Any) -> LaunchedJob:
        workspace = {"host_path": str(root.parent), "mount_path": str(root.parent)}
        self._seen_of = job_id
        settings = {
            **{"image": IMAGE, "namespace": SPACE, "grace_s": 3.0, "keep_finished_s": 60.0},
            **{"python": asked.pop("python", ranks_python()), "volumes": [*ours(), workspace]},
        }
        # A wheel of ddl-ops has what is needed of ddl_airflow in it.
        sources = {"PYTHONPATH": f"{ROOT / 'ops_lib' / 'python'}:{ROOT}"}
        return LaunchedJob(
            lambda words: ["env", f"KUBECONFIG={self._cluster.kubeconfig}", *words],
            *(self._folder, job_id, root, self.kind, script),
            env=sources,
            settings=settings,
            **asked,
        )

    def _second(self) -> str:
        pod = worker_name(name_of(self._seen_of), 1)
        words = ("-n", SPACE, "get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")
        return self._cluster.kubectl(*words)

    def lose_node(self) -> None:
        self._lost = self._second()
        self._cluster.cut_power(self._lost)

    def mend(self) -> None:
        self._cluster.start(self._lost)


@pytest.fixture(scope="module")
def table() -> Iterator[dict[tuple[str, str], str]]:
    """How each case ended on each launcher; printed at the end."""
    told: dict[tuple[str, str], str] = {}
    yield told
    cases = list(dict.fromkeys(case for _, case in told))
    kinds = list(dict.fromkeys(kind for kind, _ in told))
    print("\n" + " | ".join(["case", *kinds]))
    for case in cases:
        print(" | ".join([case, *(told.get((kind, case), "not run") for kind in kinds)]))


@pytest.fixture(scope="module", params=["local", "ssh", "slurm", "kubernetes"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "local":
        yield Local(folder)
    elif request.param == "slurm":
        yield Slurm(folder, request.getfixturevalue("slurm"))
    elif request.param == "kubernetes":
        yield Kubernetes(folder, request.getfixturevalue("kubernetes_cluster"))
    else:
        if reason := available():
            pytest.skip(reason)
        with Hosts(folder, 3) as three:
            yield Ssh(three)


class Case:
    """One case on one launcher."""

    def __init__(self, name: str, bench: Bench, folder: Path, table: dict) -> None:
        self._name = name
        self._bench = bench
        self._table = table
        self._root = folder / "run"
        self.job_id = f"{folder.name}/train-1"

    def launch(self, script: str, **asked: Any) -> LaunchedJob:
        self.job = self._bench.launch(self.job_id, self._root, script, **asked)
        return self.job

    def up(self) -> None:
        """Waits until every rank runs."""
        logs = [self._root / "logs" / f"rank-{rank}.log" for rank in range(2)]

        def are() -> bool:
            assert self.job.process.poll() is None, self.job.said()
            return all(log.exists() and "up" in log.read_text() for log in logs)

        until(are, 60, self.job.said)

    def ends(self, kind: str, words: str = "") -> str:
        """It has ended so, and said that; returns all it said."""
        name, said, _ = self.job.ended()
        assert name == kind, self.job.said()
        assert words in str(said), said
        self._table[self._bench.kind, self._name] = kind or "succeeded"
        return str(said)


@pytest.fixture
def case(request: pytest.FixtureRequest, bench: Bench, tmp_path: Path, table) -> Iterator[Case]:
    name = request.node.originalname.removeprefix("test_").replace("_", " ")
    if reason := NOT_THERE.get((bench.kind, name)):
        table[bench.kind, name] = f"– ({reason})"
        pytest.skip(f"{bench.kind}: {reason}")
    one = Case(name, bench, tmp_path, table)
    yield one
    if one.job.process.poll() is None:
        bench.kill(one.job, signal.SIGTERM)
        one.job.process.wait(within(60))
    # Every process of every host is this machine's.
    until(lambda: not marked("DDL_JOB_ID", one.job_id), 30)


def test_success(case: Case) -> None:
    case.launch(SAYS)
    case.ends("")


def test_log_fetch(case: Case) -> None:
    one = case.launch(SAYS)
    case.ends("")
    assert "rank 0 | of rank 0" in one.said()
    assert (one.root / "logs" / "rank-1.log").read_text() == "of rank 1\n"


def test_user_failure(case: Case) -> None:
    one = case.launch(f"{RANK_1}raise ValueError('too small')\ntime.sleep(600)")
    said = case.ends("JobFailed", "raised ValueError at ")
    assert said.startswith("rank 1 of 2 on ") and "main.py:2: too small" in said
    assert "rank-1 | ValueError: too small" in one.said()


def test_rank_killed(case: Case) -> None:
    case.launch(f"{RANK_1}os.kill(os.getpid(), 9)\ntime.sleep(600)")
    assert case.ends("JobFailed", "was ended by SIGKILL").startswith("rank 1 of 2 on ")


def test_cancel(case: Case, bench: Bench) -> None:
    case.launch(WAIT)
    case.up()
    bench.kill(case.job, signal.SIGTERM)
    case.ends("JobLost", "was cancelled")


def test_restart(case: Case, bench: Bench) -> None:
    """Of the process that launched it, which is killed."""
    one = case.launch(UNTIL)
    case.up()
    bench.kill(one, signal.SIGKILL)
    one.process.wait(within(10))
    if not bench.has_scheduler:
        until(lambda: not marked("DDL_JOB_ID", case.job_id), 30)
    (one.root / "code" / "go").touch()
    one.start_again()
    case.ends("")
    went_on = "submitted by a process that is gone" in one.said()
    assert went_on is bench.has_scheduler


def test_node_lost(case: Case, bench: Bench) -> None:
    case.launch(WAIT)
    case.up()
    bench.lose_node()
    try:
        case.ends("JobLost", NODE_LOST[bench.kind])
    finally:
        bench.mend()


def test_cut_link(case: Case, bench: Bench) -> None:
    case.launch(WAIT)
    case.up()
    bench.cut_link()
    began = time.monotonic()
    try:
        case.ends("JobLost", "does not answer")
        assert time.monotonic() - began < within(15)
    finally:
        bench.mend()


def test_wrong_hosts(case: Case, tmp_path: Path) -> None:
    """An mpirun that does not see the hosts starts all ranks beside itself."""
    real = Path(sys.executable)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    (tmp_path / "mpirun").write_text(BLIND.format(python=real, mpirun=real.parent / "mpirun"))
    for name in ("python", "mpirun"):
        (tmp_path / name).chmod(0o755)
    case.launch(WAIT, python=str(tmp_path / "python"))
    case.ends("JobLost", "2 hosts with 1 rank(s) each were asked for")
