"""One contract for all launchers: each way in which a job can end, on the real thing.

``local`` on this host, ``ssh`` between hosts in namespaces, ``slurm`` and ``kubernetes`` on
clusters of two nodes. At the end a table is printed: how each case ended on each launcher, the
seconds that it took, and the sentence that a person reads then.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddl_airflow.launchers.processes import marked
from tests.integration.benches import Bench, Kubernetes, Local, Slurm, Ssh
from tests.integration.hosts import Hosts, available
from tests.integration.kubernetes import python as ranks_python
from tests.integration.launched import LaunchedJob
from tests.limits import until, within

pytestmark = pytest.mark.integration
SAYS = "import os; print('of rank', os.environ['OMPI_COMM_WORLD_RANK'])\n"
RANK_1 = "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': "
WAIT = "import time; print('up', flush=True); time.sleep(600)"
# Goes on from the step that it saved when it was asked to make room. Without TensorFlow, whose
# import takes longer than all the rest; ddl.on_preempt and ddl.end_of_step are these.
TRAINS = """\
import os, time
from ddl_ops import lifecycle, preemption

def save(step, saver):
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == saver:
        with open("saved", "w") as file:
            file.write(str(step))

lifecycle.init()
preemption.save_by(save)
first = int(open("saved").read()) if os.path.exists("saved") else 0
for step in range(first + 1, first + 6 if first else 10000):
    time.sleep(0.1)
    with open("steps-" + os.environ["OMPI_COMM_WORLD_RANK"], "a") as file:
        file.write(f"{step}\\n")
    print("up", flush=True)
    if preemption.wanted(step, ""):
        preemption.end(step)
"""
TAKES_MEMORY = f"{RANK_1}\n    b = []\n    while True: b.append(bytearray(10 << 20))\n{WAIT}"
# What of its image's file system a rank may write is limited; see ``Kubernetes``.
WRITES = "import time\nopen('/tmp/much', 'wb').write(bytes(40 << 20)); time.sleep(600)"
# It goes on when the file is there.
UNTIL = "import os, time; print('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.05)"
# Does as mpirun does where nobody has named hosts, or given it an allocation; not when hosts are
# looked at before.
BLIND = """\
#!{python}
import os, sys
words, env = sys.argv[1:], dict(os.environ)
if not {{"ddl_ops.preflight", "ddl_ops.nodes"}} & {{*words}}:
    for option in ("--host", "--map-by"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    words = ["--host", "localhost:9", *words]
    env = {{name: text for name, text in env.items() if name[:6] != "SLURM_"}}
os.execve("{mpirun}", ["{mpirun}", *words], env)
"""
# A program that on the second node finds something else.
NOT_ALIKE = """\
#!/bin/sh
read host < /proc/sys/kernel/hostname
case "${{SLURMD_NODENAME:-$host}}" in
n2 | host3 | *-worker-1) export PYTHONPATH="{other}:$PYTHONPATH" ;;
esac
export PATH="$PATH:{bin}"
exec "{bin}/{name}" "$@"
"""
NOT_WELL = {"ssh": "10.99.0.3: ", "slurm": "n2: ", "kubernetes": "-worker-1 on node node-"}
# While a host goes down its port may still be answered for.
LINK_CUT_S = {"ssh": 15, "kubernetes": 40}
NODE_LOST = {"ssh": "10.99.0.3: ", "slurm": "a node failed", "kubernetes": "node"}
# Of the task, which then cancels, as in that case.
OF_ITS_STEP = "the time of its step is the only one: operators/test_train.py"
# Cases that a launcher does not have, and why; or where they are.
NOT_THERE = {
    ("local", "node lost"): "its only host is the task's",
    ("local", "cut link"): "there is none",
    ("local", "wrong hosts"): "it has one",
    ("local", "node not well"): "it has one",
    ("local", "timeout"): OF_ITS_STEP,
    ("ssh", "timeout"): OF_ITS_STEP,
    ("kubernetes", "wrong hosts"): "an operator's could have them: test_kubernetes_operators.py",
    ("slurm", "cut link"): "both nodes of the cluster are on this host",
}


class Row(NamedTuple):
    """How a case ended on a launcher: what the try raised, after how long, and what is said."""

    ended: str
    took_s: float = 0.0
    said: str = ""


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, str], Row]]:
    """How each case ended on each launcher; printed at the end, whether or not others capture."""
    told: dict[tuple[str, str], Row] = {}
    yield told
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\ncase | launcher | ended | seconds | said")
        for case in dict.fromkeys(case for _, case in told):
            for (kind, of), row in told.items():
                if of == case:
                    took = f"{row.took_s:.0f}" if row.took_s else ""
                    print(" | ".join([case, kind, row.ended, took, row.said]))


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
        self._jobs = 0
        self._began = time.monotonic()
        self.root = folder / "run"
        self.job: LaunchedJob | None = None
        table[bench.kind, name] = Row("FAILED THE TEST")

    def launch(self, script: str, **asked: Any) -> LaunchedJob:
        """The first job, or the next one, of the same run."""
        self._jobs += 1
        job_id = f"{self.root.parent.name}/train-{self._jobs}"
        self.job = self._bench.launch(job_id, self.root, script, **asked)
        return self.job

    def up(self) -> None:
        """Waits until every rank runs."""
        logs = [self.root / "logs" / f"rank-{rank}.log" for rank in range(2)]

        def are() -> bool:
            assert self.job.process.poll() is None, self.job.said()
            return all(log.exists() and "up" in log.read_text() for log in logs)

        until(are, 60, self.job.said)

    def ends(self, kind: str, words: str = "") -> str:
        """It has ended so, and said that; returns all it said."""
        name, said, _ = self.job.ended()
        assert name == kind, f"{said}\n\n{self.job.said()}"
        assert words in str(said), said
        took_s = time.monotonic() - self._began
        shown = re.sub(r" What its launcher said is above.*| Its whole log: .*", "", str(said))
        self._table[self._bench.kind, self._name] = Row(kind or "succeeded", took_s, shown)
        return str(said)


@pytest.fixture
def case(request: pytest.FixtureRequest, bench: Bench, tmp_path: Path, table) -> Iterator[Case]:
    name = request.node.originalname.removeprefix("test_").replace("_", " ")
    if reason := NOT_THERE.get((bench.kind, name)):
        table[bench.kind, name] = Row(f"– ({reason})")
        pytest.skip(f"{bench.kind}: {reason}")
    one = Case(name, bench, tmp_path, table)
    yield one
    assert one.job is not None
    if one.job.process.poll() is None:
        bench.kill(one.job, signal.SIGTERM)
        one.job.process.wait(within(60))
    # Every process of every host is this machine's.
    until(lambda: not marked("DDL_JOB_ID", one.job.job_id), 30)


def test_success(case: Case) -> None:
    """With the output of each rank where it belongs."""
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
        until(lambda: not marked("DDL_JOB_ID", one.job_id), 30)
    (one.root / "code" / "go").touch()
    one.start_again()
    case.ends("")
    went_on = "submitted by a process that is gone" in one.said()
    assert went_on is bench.has_scheduler


def test_timeout(case: Case, bench: Bench) -> None:
    one = case.launch(WAIT, settings=bench.limited)
    case.up()
    bench.end_time(one)
    assert "time_limit" in case.ends("JobLost", "took longer than ")


def test_preempted(case: Case, bench: Bench) -> None:
    _makes_room(case, bench.spare, bench.preempt)


def _makes_room(
    case: Case,
    settings: Mapping[str, Any],
    preempt: Callable[[LaunchedJob], None],
    words: str = "",
) -> None:
    """All ranks save at one step, and the next job of the same try goes on from there."""
    one = case.launch(TRAINS, settings=settings)
    case.up()
    preempt(one)
    case.ends("JobPreempted", words)
    step = one.ended()[2]
    assert step, one.said()
    again = case.launch(TRAINS, settings=settings)
    assert again.ended()[0] == "", again.said()
    for rank in range(2):
        steps = (one.root / "code" / f"steps-{rank}").read_text().split()
        assert list(map(int, steps)) == list(range(1, step + 6))


of_pods = pytest.mark.parametrize("bench", ["kubernetes"], indirect=True)


@of_pods
def test_out_of_memory(case: Case) -> None:
    case.launch(TAKES_MEMORY, settings={"resources": {"memory": "400Mi"}})
    said = case.ends("JobFailed", "took more memory than its limit (OOMKilled)")
    assert said.startswith("rank 1 of 2 on ") and "launcher.resources.memory" in said


@of_pods
def test_no_such_image(case: Case) -> None:
    settings = {"image": "registry.invalid/none:1", "start_timeout_s": 20.0}
    one = case.launch(SAYS, settings=settings)
    said = case.ends("JobLost", "image registry.invalid/none:1 cannot be pulled")
    # A registry may be back at another try; this one does not start any more.
    assert "launcher.start_timeout" in said and one.ended()[2] is True


@of_pods
def test_no_room(case: Case) -> None:
    settings = {"resources": {"cpu": "64"}, "start_timeout_s": 8.0}
    one = case.launch(SAYS, settings=settings)
    said = case.ends("JobLost", "0/2 nodes are available: 2 Insufficient cpu")
    assert "launcher.resources.cpu" in said and "start_timeout" in said
    assert one.ended()[2] is True


@of_pods
def test_higher_priority(case: Case, bench: Kubernetes) -> None:
    full = {"resources": {"cpu": "1500m"}}
    words = "had to make room for one of higher priority"
    _makes_room(case, full, lambda _: bench.wants_room(), words)


@of_pods
def test_evicted(case: Case, bench: Kubernetes) -> None:
    """By the kubelet of its node: it writes more than it may."""
    bench.make_narrow()
    case.launch(WRITES, settings={"namespace": bench.narrow})
    assert "ephemeral" in case.ends("JobFailed", "was evicted: ")


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
        assert time.monotonic() - began < within(LINK_CUT_S[bench.kind])
    finally:
        bench.mend()


def test_node_not_well(case: Case, bench: Bench, tmp_path: Path) -> None:
    """Its mpi4py is not that of the other one: said before any rank starts."""
    other = tmp_path / "other" / "mpi4py-3.0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: mpi4py\nVersion: 3.0.0\n")
    real = Path(ranks_python())
    for name in ("python", "mpirun"):
        program = NOT_ALIKE.format(bin=real.parent, name=name, other=other.parent)
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    one = case.launch(WAIT, python=str(tmp_path / "python"))
    kind = "JobLost" if bench.has_scheduler else "SubmitFailed"
    said = case.ends(kind, "mpi4py is 3.0.0, and ")
    assert NOT_WELL[bench.kind] in said, said
    assert one.ended()[2] is True  # other hosts may be given then
    assert not (case.root / "logs" / "rank-0.log").exists()


def test_wrong_hosts(case: Case, tmp_path: Path) -> None:
    """An mpirun that does not see the hosts starts all ranks beside itself."""
    real = Path(sys.executable)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {real} "$@"\n')
    (tmp_path / "mpirun").write_text(BLIND.format(python=real, mpirun=real.parent / "mpirun"))
    for name in ("python", "mpirun"):
        (tmp_path / name).chmod(0o755)
    case.launch(WAIT, python=str(tmp_path / "python"))
    case.ends("JobLost", "2 hosts with 1 rank(s) each were asked for")


@of_pods
def test_nothing_is_left(case: Case, bench: Kubernetes) -> None:
    """Of the objects of all jobs before."""
    case.launch(SAYS)
    case.ends("")
    for name, space in bench.names:
        until(lambda name=name, space=space: not bench.cluster.of_job(name, space), 90)
