"""Real parts for the tests that need them, started once and only if a test asks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddl_airflow.demo.show import EXAMPLES, connection_environment, fill_buckets
from ddl_airflow.demo.site import AirflowSite, EmbeddedObjectStore, running
from tests.integration import planted
from tests.integration.ceph import CephObjectStore, available
from tests.integration.databases import PostgreSql
from tests.integration.kubernetes import KubernetesCluster
from tests.integration.mail import Mailbox
from tests.integration.slurm import SlurmCluster
from tests.limits import PatientSite, calibrate, within
from tests.other_user import trainer  # noqa: F401  # a fixture

# Before anything imports Airflow, as the conftest.py of a folder does: it reads its settings once,
# by default those of whoever runs the tests, and writes where it lives.
_AIRFLOW_HOME = os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="airflow-")

ROOT = Path(__file__).parents[1]
# The examples whose runs the tests look at; the demo shows only the first ones.
TRAINED = (
    *EXAMPLES,
    *("horovod-keras", "mpi-collectives", "cray-dl-comm", "ffdl-digits", "parameter-server"),
)
# What a person enters when triggering them.
ENTERED = {"mnist-keras": {"epochs": 3, "learning_rate": 0.003}}


_LEFTOVERS = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Gives what processes leave behind one folder, and SIGTERM an end that cleans up."""
    # pytest keeps its own folders, to look at what failed.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="ddl-tests-")
    config.stash[_LEFTOVERS] = os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGTERM, partial(_terminated, config))
    # A shell has it ignored in what it starts in the background, and so have all children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    calibrate()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Takes back what ends this session: a test may have left its own handlers of signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return (yield)
    finally:
        # That of SIGTERM has put another in its place where the session ends.
        if signal.getsignal(signal.SIGTERM) is not _ends_already:
            for number, handler in handlers.items():
                if handler is not None:  # else it is not Python's
                    signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last what needs the running Airflow: it keeps a processor busy while others are tested."""
    items.sort(key=lambda item: "site" in getattr(item, "fixturenames", ()))
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "site" in fixtures:
            item.add_marker("site")
        if "kubernetes_cluster" in fixtures or parameters.get("bench") == "kubernetes":
            item.add_marker("kubernetes")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes it, and Airflow's home."""
    for folder in (config.stash[_LEFTOVERS], _AIRFLOW_HOME):
        shutil.rmtree(folder, ignore_errors=True)


def _terminated(config: pytest.Config, *_: object) -> None:
    # The error by which pytest exits may be caught by what is tested.
    if session := config.pluginmanager.get_plugin("session"):
        session.shouldstop = "SIGTERM"
    # Who ends a group of processes tells scripts/test, too, which tells this one again: that is not
    # to cut off what fixtures do at their end.
    signal.signal(signal.SIGTERM, _ends_already)
    pytest.exit("SIGTERM", 128 + signal.SIGTERM)


def _ends_already(*_: object) -> None:
    """A handler, for what is started then is to end of it."""


@dataclass
class StoreUnderTest:
    """An S3-compatible store that runs.

    Attributes:
        real: Ceph, which checks keys; else the demo's embedded one, which does not.
        client: a boto3 S3 client; both example buckets exist, with the digits in one.
    """

    endpoint_url: str
    access_key_id: str
    secret_access_key: str
    real: bool
    client: Any = None


@pytest.fixture(scope="session")
def object_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreUnderTest]:
    """Ceph's gateway where it is installed; says so where it is not."""
    if reason := available():
        print(f"\nWARNING: DAGs run against the embedded store, not Ceph: {reason}")
        embedded = EmbeddedObjectStore(tmp_path_factory.mktemp("store"))
        with running(embedded):
            store = StoreUnderTest(
                embedded.endpoint_url,
                embedded.access_key_id,
                embedded.secret_access_key,
                real=False,
            )
            store.client = fill_buckets(store)
            yield store
            store.client.close()
        return
    with CephObjectStore(tmp_path_factory.mktemp("ceph") / "store") as ceph:
        store = StoreUnderTest(ceph.endpoint_url, *ceph.add_user("dags"), real=True)
        store.client = fill_buckets(store)
        yield store
        store.client.close()


@pytest.fixture(scope="session")
def dags_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of ``dags/`` that tests may add to."""
    folder = tmp_path_factory.mktemp("site") / "dags"
    shutil.copytree(ROOT / "dags", folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="session")
def loader_folder(dags_folder: Path) -> Path:
    """A folder of Python files, as Airflow has without our bundle."""
    folder = dags_folder.parent / "loader"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def importer_folder(dags_folder: Path) -> Path:
    """A folder of which the importer makes DAGs, where Airflow has importers."""
    folder = dags_folder.parent / "importer"
    folder.mkdir()
    return folder


def events_of(dags_folder: Path) -> Path:
    """Where the running Airflow writes its events of OpenLineage, a line for each."""
    return dags_folder.parent / "openlineage.jsonl"


@pytest.fixture(scope="session")
def mailbox() -> Iterator[Mailbox]:
    """What the running Airflow mails."""
    with Mailbox() as box:
        yield box


@pytest.fixture(scope="session")
def slurm_folder() -> Path:
    """Where the cluster of ``slurm`` lives, whether or not a test starts it."""
    return Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets in it have short names only


@pytest.fixture(scope="session")
def slurm(slurm_folder: Path) -> Iterator[SlurmCluster]:
    """A Slurm cluster of two nodes on this host."""
    if reason := SlurmCluster.missing():
        pytest.skip(reason)
    with SlurmCluster(slurm_folder) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kubernetes_cluster() -> Iterator[KubernetesCluster]:
    """A Kubernetes cluster of two nodes on this host."""
    if reason := KubernetesCluster.missing():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="kubernetes-"))
    with KubernetesCluster(folder) as cluster:
        yield cluster
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a PostgreSQL, as Airflow has in earnest; nothing, for SQLite, where there is none."""
    if reason := PostgreSql.missing():
        print(f"\nWARNING: Airflow runs over SQLite, not PostgreSQL: {reason}")
        yield ""
        return
    server = PostgreSql(tmp_path_factory.mktemp("postgresql"))
    with running(server):
        yield server.url


@pytest.fixture(scope="session")
def site(
    database: str,
    object_store: StoreUnderTest,
    mailbox: Mailbox,
    dags_folder: Path,
    loader_folder: Path,
    importer_folder: Path,
    slurm_folder: Path,
) -> Iterator[AirflowSite]:
    """A running Airflow over all folders, connected to the object store, mailbox and Slurm."""
    smtp = {"from_email": "airflow@example.com", "disable_ssl": True, "disable_tls": True}
    mail = {"conn_type": "smtp", "host": "127.0.0.1", "port": mailbox.port, "extra": smtp}
    store = object_store.endpoint_url
    secrets = connection_environment(object_store) | planted.environment(store, mailbox.port)
    environment = secrets | {
        "AIRFLOW__DDL__DATA_POLL_INTERVAL": "1",
        "AIRFLOW__DDL__JOB_POLL_INTERVAL": "0.5",
        # Ceph has no pages for people; its own listing does for a link.
        "AIRFLOW__DDL__RESULTS_URL": f"{store}/{{bucket}}?prefix={{prefix}}/",
        "AIRFLOW__DDL__TENSORBOARD_URL": f"{store}/?tensorboard",
        "AIRFLOW__CORE__TEST_CONNECTION": "Enabled",
        # Passed over where the provider is not installed.
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(
            {"type": "file", "log_file_path": str(events_of(dags_folder)), "append": True}
        ),
        "AIRFLOW_CONN_SMTP_DEFAULT": json.dumps(mail),
        # Before Slurm's own commands come those that a test puts there.
        "PATH": os.pathsep.join(
            [str(slurm_folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
        ),
        "SLURM_CONF": str(slurm_folder / "slurm.conf"),
        # Another triggerer takes over from one that was killed: soon.
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": f"{within(4):.0f}",
    }
    local = {
        "name": "loader",
        "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
        "kwargs": {"path": str(loader_folder)},
    }
    imported = {
        **local,
        "name": "importer",
        "kwargs": {"path": str(importer_folder), "refresh_interval": 1},
        # Passed over by an Airflow that has no importers.
        "importers": ["ddl_airflow.importer.ManifestImporter"],
    }
    home = dags_folder.parent / "home"
    airflow = PatientSite(
        home, dags_folder, environment, port=18080, bundles=[local, imported], database=database
    )
    with running(airflow):
        yield airflow


@pytest.fixture(scope="session")
def finished(site: AirflowSite) -> dict[str, tuple[str, str]]:
    """Each example, run once: DAG id to (run id, state).

    The first fetches the data, the others together find it in the cache.
    """
    runs: dict[str, tuple[str, str]] = {}
    for group in (TRAINED[:1], TRAINED[1:]):
        for dag_id in group:
            site.wait_for_dag(dag_id)
        started = {dag_id: site.trigger(dag_id, ENTERED.get(dag_id)) for dag_id in group}
        for dag_id, run_id in started.items():
            runs[dag_id] = (run_id, site.wait_for_run(dag_id, run_id, 400))
    return runs
