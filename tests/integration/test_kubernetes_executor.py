"""Airflow's official chart with the values of docker/helm-values.yaml, installed on a cluster.

Helm installs it as docs/docker.md says, with the secrets that its commands make, and the images
that are built here. Each task of the DAG is a pod that the KubernetesExecutor makes, and the ranks
run in it. The chart is not ours: ``DDL_AIRFLOW_CHART`` names its archive.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddl_airflow import __version__
from tests.integration import images
from tests.integration.databases import PostgreSql
from tests.integration.images import ROOT
from tests.integration.kubernetes import CONTROL, KubernetesCluster
from tests.integration.test_images import SKIP, UID, source  # noqa: F401  # a fixture
from tests.integration.test_trainer_pods import write_example
from tests.limits import until, within

VALUES = ROOT / "docker" / "helm-values.yaml"
HELM = yaml.safe_load(VALUES.read_text())
PAGE = (ROOT / "docs" / "docker.md").read_text()
CHART = os.environ.get("DDL_AIRFLOW_CHART", "")
if not SKIP and not (CHART and shutil.which("helm")):
    SKIP = (
        "needs helm, and in DDL_AIRFLOW_CHART the archive that `helm pull apache-airflow/airflow "
        "--version 1.22.0` fetches"
    )
SKIP = SKIP or PostgreSql.missing()
pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(SKIP), reason=SKIP)]

SPACE = "airflow"
PARTS = ("api-server", "scheduler", "dag-processor", "triggerer")
# On a busy machine all parts start at once; and pods are looked at when they have ended.
PATIENT = {
    **{
        part: {"startupProbe": {"failureThreshold": 60, "timeoutSeconds": 60}}
        for part in ("apiServer", "scheduler")
    },
    **{part: {"livenessProbe": {"timeoutSeconds": 60}} for part in ("dagProcessor", "triggerer")},
    "config": {
        "core": {"dags_are_paused_at_creation": "False"},
        "kubernetes_executor": {"delete_worker_pods": "False"},
        "workers": {"execution_api_timeout": "60"},
    },
    "images": {
        name: {"repository": f"localhost/{HELM['images'][name]['repository']}"}
        for name in ("airflow", "pod_template")
    },
}


def image(part: str) -> str:
    """As the values name it, of this machine."""
    named = HELM["images"][part]
    return f"localhost/{named['repository']}:{named['tag']}"


def claims(folders: dict[str, Path]) -> list[dict[str, Any]]:
    """That the page asks for: for every node, of this machine's folders."""
    found: list[dict[str, Any]] = []
    size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
    for name, folder in folders.items():
        volume = {"capacity": size, "accessModes": modes, "storageClassName": name}
        asked = {"accessModes": modes, "storageClassName": name, "resources": {"requests": size}}
        found += [
            {
                **{"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}},
                "spec": volume | {"hostPath": {"path": str(folder)}},
            },
            {
                **{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": asked},
                "metadata": {"name": name, "namespace": SPACE},
            },
        ]
    return found


def commands(before: str, language: str = "sh") -> str:
    """The commands of the page that follow these words."""
    found = re.search(f"{re.escape(before)}.*?```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found, before
    return found[1]


def shell(cluster: KubernetesCluster, script: str, **env: str) -> str:
    """What commands of a person say, with kubectl of the cluster."""
    path = os.pathsep.join([str(cluster.folder / "bin"), os.environ["PATH"]])
    known = {"PATH": path, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(cluster.folder)}
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=ROOT,
        env=known | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=within(600),
    )
    assert done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture
def airflow_pods(
    source: Path,  # noqa: F811
    kubernetes_cluster: KubernetesCluster,
    tmp_path: Path,
) -> Iterator[KubernetesCluster]:
    """Airflow runs in the cluster; the example is among its trainings."""
    labels = {"VERSION": __version__, "REVISION": "abc"}
    dockerfile = "docker/airflow/Dockerfile"
    images.build(source, "docker/trainer/Dockerfile", "ddl-trainer", **labels)
    images.build(source, dockerfile, "ddl-airflow", "airflow", **labels)
    trainer = {"TRAINER_IMAGE": "localhost/ddl-trainer"}
    images.build(source, dockerfile, "ddl-worker", "worker", **labels, **trainer)
    for name, part in (("ddl-airflow", "airflow"), ("ddl-worker", "pod_template")):
        archive = tmp_path / "image.tar"
        images.save(name, image(part), archive)
        kubernetes_cluster.load(archive, limit_s=600)
        archive.unlink()
    database = PostgreSql(tmp_path, CONTROL, kubernetes_cluster.there("control"))
    database.start()
    try:
        install(kubernetes_cluster, tmp_path, database.url)
        yield kubernetes_cluster
    finally:
        kubernetes_cluster.kubectl("delete", "namespace", SPACE, "--wait=false")
        database.stop()


def install(cluster: KubernetesCluster, folder: Path, database: str) -> None:
    """Does what the page says, and waits until Airflow is well."""
    folders = {f"ddl-{name}": folder / name for name in ("workspace", "trainings")}
    for one in folders.values():
        one.mkdir()
        os.chown(one, UID, 0)
    example = folders["ddl-trainings"] / "mnist-keras"
    write_example(example, {"kind": "local"}, at=Path("/workspace"))
    (example / "data").rename(folders["ddl-workspace"] / "data")
    made = commands("The values want, made by you:")
    place = "postgresql+psycopg2://USER:PASSWORD@HOST/airflow"
    assert place in made
    made = made.replace(place, database)
    shell(cluster, made.replace(", …}", ', "host": "example.com"}'))
    cluster.apply(*claims(folders))
    (folder / "patient.yaml").write_text(yaml.safe_dump(PATIENT))
    shell(
        cluster,
        f"helm upgrade --install airflow '{CHART}' --namespace {SPACE} --timeout 10m "
        f"--values '{VALUES}' --values '{folder / 'patient.yaml'}'",
        PATH=os.environ["PATH"],
    )
    until(lambda: not unready(cluster), 420, lambda: said(cluster, folder))
    shell(cluster, commands("Make a user once the pods are up:").replace("PASSWORD", "secret"))


def unready(cluster: KubernetesCluster) -> set[str]:
    """Parts of Airflow that are not, or whose containers are not all well."""
    words = ("-n", SPACE, "get", "pods", "-l", "release=airflow", "-o", "json")
    well = set()
    for pod in json.loads(cluster.kubectl(*words))["items"]:
        if all(one["ready"] for one in pod["status"].get("containerStatuses") or [{"ready": 0}]):
            well.add(pod["metadata"]["labels"]["component"])
    return set(PARTS) - well


def airflow(cluster: KubernetesCluster, *words: str, check: bool = True) -> str:
    """What a command of Airflow says, in the scheduler's container."""
    there = ("-n", SPACE, "exec", "deploy/airflow-scheduler", "-c", "scheduler", "--")
    return cluster.kubectl(*there, "airflow", *words, check=check)


def test_the_example_trains_in_pods_of_the_official_chart(
    airflow_pods: KubernetesCluster, tmp_path: Path
) -> None:
    trains(airflow_pods, tmp_path)
    users = airflow(airflow_pods, "users", "list", "-o", "json")
    (user,) = json.loads(users[users.index("[{") :])
    assert user["username"] == "you"


def trains(cluster: KubernetesCluster, folder: Path) -> None:
    until(lambda: "mnist-keras" in airflow(cluster, "dags", "list", "-o", "plain"), 120)
    airflow(
        cluster, "dags", "trigger", "mnist-keras", "--run-id", "once", "--conf", '{"epochs": 2}'
    )

    def ended() -> bool:
        time.sleep(15)  # each look starts an Airflow in the cluster
        return state(cluster) in ("success", "failed")

    until(ended, 480, lambda: said(cluster, folder))
    assert state(cluster) == "success", said(cluster, folder)
    words = ("-n", SPACE, "get", "pods", "-l", "kubernetes_executor=True", "-o", "json")
    pods = json.loads(cluster.kubectl(*words))["items"]
    found = {pod["metadata"]["labels"]["task_id"] for pod in pods}
    assert found == {"stage_data", "train", "transform", "evaluate", "upload_results"}
    assert {pod["spec"]["containers"][0]["image"] for pod in pods} == {image("pod_template")}
    assert list((folder / "workspace" / "published").rglob("saved_model.pb"))


def state(cluster: KubernetesCluster) -> str:
    printed = airflow(cluster, "dags", "list-runs", "mnist-keras", "-o", "json")
    runs = json.loads(printed[printed.index("[{") :])  # after what is logged
    return str(runs[0]["state"])


def said(cluster: KubernetesCluster, folder: Path) -> str:
    """The tasks' logs, which outlive their pods; and why there may be none."""
    logs = sorted((folder / "workspace").rglob("attempt=*.log"))
    told = [f"{path}: {path.read_text(errors='replace')[-3000:]}" for path in logs]
    there = ("-n", SPACE)
    told.append(cluster.kubectl(*there, "get", "pods,events", check=False))
    for one in PARTS:
        of_part = (*there, "logs", "--tail=60", f"deploy/airflow-{one}", "-c")
        told += [
            cluster.kubectl(*of_part, container, check=False)
            for container in (one, "wait-for-airflow-migrations")
        ]
    return "\n".join(told)
