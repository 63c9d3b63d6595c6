"""Airflow with CeleryExecutor, PostgreSQL, Redis and two workers; and what happens when parts die.

The workers are processes of this host, each with a name and a queue of its own; the workspace is
what a shared file system would be.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from ddl_airflow.demo.show import connection_environment
from ddl_airflow.demo.site import AirflowSite, Service, running
from ddl_airflow.launchers.processes import marked
from tests.integration.databases import PostgreSql, Redis
from tests.limits import PatientSite, within

MISSING = " ".join(filter(None, (PostgreSql.missing(), Redis.missing())))
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(MISSING), reason=f"needs PostgreSQL and Redis: {MISSING}"),
]

ROOT = Path(__file__).parents[2]
# The training on one worker, all else on the other. Either training fits, both do not.
COMPUTE = {
    "cpu": {"pool": "cores", "queue": "training", "other_steps": {"queue": "around"}},
}
POOL_SLOTS = 3
# Airflow's own patience, in seconds: minutes by default.
SETTINGS = {
    "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
    "AIRFLOW__DDL__COMPUTE": json.dumps({"compute": COMPUTE}),
    "AIRFLOW__CORE__HOSTNAME_CALLABLE": "worker_name.name",
    "AIRFLOW__CELERY__SYNC_PARALLELISM": "1",
    "AIRFLOW__CELERY_BROKER_TRANSPORT_OPTIONS__VISIBILITY_TIMEOUT": "3600",
    # Longer than a busy machine takes to start the API server again.
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
    "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "5",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "2",
    "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
    "AIRFLOW__WORKERS__MAX_FAILED_HEARTBEATS": "60",
}
WORKER_NAME = "import os\n\n\ndef name():\n    return os.environ.get('WORKER_NAME', 'control')\n"

# Takes 2 of the 3 slots, as the example does. Leaves no model, so what follows it fails at once.
RIVAL = """\
model_definition:
  name: rival
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py
    compute_configuration: {name: cpu, nodes: 2}
training_data_reference: {type: fs, source: {path: ./data}}
training_results_reference: {type: fs, target: {path: ./results}}
distribution: independent
"""
WAITS = """\
import os, time
while not os.path.exists({until!r}):
    time.sleep(0.1)
"""

# Two steps of the product, without TensorFlow.
FAULTS = """\
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG

from ddl_airflow.core.plan import StageDataStep, StoreReference, TrainStep
from ddl_airflow.operators.stage import StageDataOperator
from ddl_airflow.operators.train import TrainOperator

HERE = Path(__file__).parent
with DAG("faults", schedule=None):
    StageDataOperator(
        task_id="stage_data",
        step=StageDataStep(
            dataset=StoreReference((HERE / "data").as_uri()),
            code=HERE / "code",
            commands=["python train.py"],
        ),
        queue="around",
    ) >> TrainOperator(
        task_id="train",
        step=TrainStep(command="python train.py", nodes=2, distribution="independent"),
        queue="training",
        retries=2,
        retry_delay=timedelta(seconds=0),
    )
"""
# Each rank counts, keeps what it has counted, and says when it starts and from where. It holds a
# lock of its own: a second training of the same run would find it taken.
COUNTS = """\
import fcntl, os, time
from pathlib import Path

rank = os.environ["OMPI_COMM_WORLD_RANK"]
result = Path(os.environ["RESULT_DIR"])
witness = (result / f"alive-{rank}").open("a")
try:
    fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
    alone = True
except BlockingIOError:
    alone = False
kept = Path(os.environ["CHECKPOINT_DIR"]) / f"count-{rank}"
count = int(kept.read_text()) if kept.exists() else 0
with (result / "starts").open("a") as starts:
    starts.write(f"{rank} {count} {'alone' if alone else 'BESIDE ANOTHER'}\\n")
while not (result / "enough").exists():
    count += 1
    part = kept.with_suffix(".part")
    part.write_text(str(count))
    part.replace(kept)
    time.sleep(0.05)
"""


class Cluster:
    """The running parts, and the means to hurt them."""

    def __init__(self, folder: Path, site: AirflowSite, database: PostgreSql) -> None:
        self.folder = folder
        self.site = site
        self.database = database
        self.workers: dict[str, Service] = {}

    def start_worker(self, queue: str) -> None:
        """A Celery worker for one queue, named after it."""
        words = ["celery", "worker", "-q", queue, "-H", queue, "-c", "2", "--skip-serve-logs"]
        words += ["--without-mingle", "--without-gossip"]
        words += ["--pid", str(self.site.home / f"worker-{queue}-{time.monotonic_ns()}.pid")]
        self.workers[queue] = self.site.also(
            *words, name=f"worker-{queue}", environment={"WORKER_NAME": f"{queue}-worker"}
        )

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.terminate()
        for worker in self.workers.values():
            worker.stop()

    def start(self) -> None:
        for queue in ("around", "training"):
            self.start_worker(queue)


@pytest.fixture(scope="module")
def cluster(object_store, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    dags, loader = folder / "dags", folder / "loader"
    shutil.copytree(ROOT / "dags" / "mnist-keras", dags / "mnist-keras")
    (dags / "rival" / "data").mkdir(parents=True)
    (dags / "rival" / "manifest.yml").write_text(RIVAL)
    (dags / "rival" / "data" / "none.txt").touch()
    (dags / "rival" / "train.py").write_text(WAITS.format(until=str(folder / "enough")))
    for name in ("code", "data"):
        (loader / name).mkdir(parents=True)
    (loader / "data" / "none.txt").touch()
    (loader / "faults.py").write_text(FAULTS)
    (loader / "code" / "train.py").write_text(COUNTS)
    (folder / "worker_name.py").write_text(WORKER_NAME)
    database, broker = PostgreSql(folder / "logs"), Redis(folder / "logs")
    environment = {
        **connection_environment(object_store),
        **SETTINGS,
        "PYTHONPATH": str(folder),
        "AIRFLOW__CELERY__BROKER_URL": broker.url,
    }
    bundle = {
        "name": "loader",
        "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
        "kwargs": {"path": str(loader)},
    }
    site = PatientSite(
        folder / "home", dags, environment, port=18200, bundles=[bundle], database=database.url
    )
    parts = Cluster(folder, site, database)
    with running(database, broker, site, parts):
        pool = {"name": "cores", "slots": POOL_SLOTS, "include_deferred": True}
        site.call("POST", "/pools", json=pool)
        yield parts


def until(holds: Callable[[], bool], timeout_s: float, said: Callable[[], object] = str) -> None:
    deadline = time.monotonic() + within(timeout_s)
    while not holds():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


def test_steps_run_on_two_workers_and_trainings_of_one_pool_never_together(cluster):
    site = cluster.site
    for dag_id in ("mnist-keras", "rival"):
        site.wait_for_dag(dag_id)
    runs = {"rival": site.trigger("rival")}

    def state(dag_id: str, task_id: str) -> str:
        return site.task_instances(dag_id, runs[dag_id])[task_id]["state"]

    until(lambda: state("rival", "train") == "running", 60)
    runs["mnist-keras"] = site.trigger("mnist-keras", {"epochs": 1})
    until(lambda: state("mnist-keras", "stage_data") == "success", 60)
    (cluster.folder / "enough").touch()
    assert site.wait_for_run("mnist-keras", runs["mnist-keras"], 200) == "success"
    assert site.wait_for_run("rival", runs["rival"], 60) == "failed"  # there is no model
    tasks = {dag_id: site.task_instances(dag_id, run_id) for dag_id, run_id in runs.items()}
    where = {name: (t["queue"], t["hostname"]) for name, t in tasks["mnist-keras"].items()}
    assert where.pop("train") == ("training", "training-worker")
    others = ("stage_data", "transform", "evaluate", "upload_results")
    assert where == dict.fromkeys(others, ("around", "around-worker"))
    first, second = (tasks[dag_id]["train"] for dag_id in ("rival", "mnist-keras"))
    for train in (first, second):
        where = (train["pool"], train["pool_slots"], train["state"])
        assert where == ("cores", 2, "success")
    # It could have started, but for the pool.
    assert tasks["mnist-keras"]["stage_data"]["end_date"] < first["end_date"]
    assert first["end_date"] <= second["start_date"]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def below(pid: int) -> list[int]:
    """Children, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *below(child))]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Training:
    """A run of the DAG of faults, and what its ranks tell."""

    def __init__(self, site: AirflowSite, dag_id: str) -> None:
        self.site, self.dag_id = site, dag_id
        site.wait_for_dag(dag_id)
        self.run_id = site.trigger(dag_id)
        self.layout = site.layout(dag_id, self.run_id)
        until(lambda: len(self.starts()) == 2, 60, lambda: (self.state(), self.starts()))
        until(lambda: self.state() == ("running", 1), 10)

    def starts(self) -> list[list[str]]:
        """Rank, what it had counted before, and whether it was alone: of each start of each."""
        path = self.layout.result / "starts"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split(None, 2) for line in lines]

    def counted(self) -> dict[str, int]:
        """By rank."""
        kept = {rank: self.layout.checkpoints / f"count-{rank}" for rank in ("0", "1")}
        return {rank: int(path.read_text()) for rank, path in kept.items()}

    def state(self) -> tuple[str, int]:
        train = self.site.task_instances(self.dag_id, self.run_id)["train"]
        return train["state"], train["try_number"]

    def job(self, try_number: int = 1) -> list[int]:
        return marked("DDL_JOB_ID", f"{self.layout.training_id}/train-{try_number}")

    def goes_on(self) -> None:
        """Counts on, in the same processes."""
        before, ranks = self.counted()["0"], set(self.job())
        until(lambda: self.counted()["0"] > before + 40, 20)
        assert set(self.job()) == ranks and len(self.starts()) == 2

    def processes(self) -> tuple[int, int, list[int]]:
        """The supervisor, the task, and the job."""
        job = self.job()
        mpirun = next(pid for pid in job if parent_of(pid) not in job)
        return parent_of(parent_of(mpirun)), parent_of(mpirun), job

    def resumes_once_and_ends(self, counted: dict[str, int]) -> None:
        """The second try goes on from the first's count, alone, and is the last."""
        until(lambda: len(self.starts()) == 4, 120, lambda: (self.state(), self.starts()))
        assert self.state() == ("running", 2)
        again = {rank: int(count) for rank, count, _ in self.starts()[2:]}
        assert again.keys() == counted.keys()
        assert all(again[rank] >= counted[rank] for rank in counted)
        (self.layout.result / "enough").touch()
        assert self.site.wait_for_run(self.dag_id, self.run_id, 60) == "success"
        assert self.state() == ("success", 2)
        assert [how for *_, how in self.starts()] == ["alone"] * 4
        assert self.job(1) == self.job(2) == []


@contextmanager
def unguarded(service: Service) -> Iterator[None]:
    """Its guard, which would end what it leaves behind, does not look."""
    os.kill(service.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(service.pid, signal.SIGCONT)


def test_a_training_outlives_scheduler_and_database_and_goes_on_after_its_worker(cluster):
    site = cluster.site
    training = Training(site, "faults")

    os.kill(below(site.service("scheduler").pid)[0], signal.SIGKILL)
    training.goes_on()
    scheduler_comes_back(site)
    assert training.state() == ("running", 1)

    # For longer than a heartbeat; it takes along whom it may.
    with cluster.database.away():
        training.goes_on()
    scheduler_comes_back(site)
    training.goes_on()
    assert training.state() == ("running", 1)

    supervisor, task, job = training.processes()
    with unguarded(cluster.workers["training"]):
        worker = below(cluster.workers["training"].pid)[0]
        assert supervisor in below(worker)
        for pid in (worker, supervisor):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(alive, [task, *job])), 15)
    last = training.counted()
    cluster.workers["training"].stop()
    cluster.start_worker("training")
    training.resumes_once_and_ends(last)


def scheduler_comes_back(site: AirflowSite) -> None:
    """Starts what has ended, as systemd would, and waits until a scheduler says that it lives."""
    asked_at = datetime.now(UTC).isoformat()

    def said_so() -> bool:
        for name in ("scheduler", "dag-processor", "api-server"):
            try:
                site.service(name).check()
            except RuntimeError:
                site.restart(name)
        try:
            scheduler = site.call("GET", "/monitor/health")["scheduler"]
        except httpx.HTTPError:  # the database is not back yet
            return False
        heard = str(scheduler["latest_scheduler_heartbeat"] or "")
        return bool(scheduler["status"] == "healthy" and heard > asked_at)

    until(said_so, 120)
