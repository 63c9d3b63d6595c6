"""Airflow in pods of the built images, by the settings of docker/helm-values.yaml, on a cluster.

Not the chart: there is no helm here. Variables, volumes, mounts and images are those of the file;
the objects around them (one pod with Airflow's services over SQLite, an account, claims) are ours.
Each task of the DAG is a pod that the KubernetesExecutor makes, and the ranks run in it.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddl_airflow import __version__
from tests.integration import images
from tests.integration.images import ROOT
from tests.integration.kubernetes import KubernetesCluster
from tests.integration.test_images import SKIP, UID, source  # noqa: F401  # a fixture
from tests.integration.test_trainer_pods import write_example
from tests.limits import until

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(SKIP), reason=SKIP)]

HELM = yaml.safe_load((ROOT / "docker" / "helm-values.yaml").read_text())
SPACE = "airflow"
SERVICES = ("api-server", "scheduler", "dag-processor")
PORT = 8080


def image(part: str) -> str:
    """As the values name it, of this machine."""
    named = HELM["images"][part]
    return f"localhost/{named['repository']}:{named['tag']}"


def variables() -> list[dict[str, str]]:
    """Those of the values, and what the chart sets by itself or asks secrets for."""
    own = {
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
        "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
        "AIRFLOW__CORE__FERNET_KEY": "",
        "AIRFLOW__CORE__AUTH_MANAGER": "airflow.api_fastapi.auth.managers.simple."
        "simple_auth_manager.SimpleAuthManager",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://airflow:{PORT}/execution/",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": "sqlite:////opt/airflow/database/airflow.db?timeout=60",
        "AIRFLOW__KUBERNETES_EXECUTOR__NAMESPACE": SPACE,
        "AIRFLOW__KUBERNETES_EXECUTOR__POD_TEMPLATE_FILE": "/opt/airflow/pod_templates/pod.yaml",
        "AIRFLOW__SCHEDULER__ENABLE_HEALTH_CHECK": "True",
        # To be looked at when they have ended.
        "AIRFLOW__KUBERNETES_EXECUTOR__DELETE_WORKER_PODS": "False",
        # On a busy machine, and over SQLite.
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
    }
    return [*HELM["env"], *({"name": name, "value": value} for name, value in own.items())]


def pod_of(containers: list[dict[str, Any]], volumes: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "serviceAccountName": "airflow",
        "securityContext": {"runAsUser": UID, "fsGroup": 0},
        "containers": containers,
        "volumes": [*HELM["volumes"], *volumes],
    }


def objects(folders: dict[str, Path]) -> list[dict[str, Any]]:
    """All that runs Airflow, in the namespace ``SPACE``."""

    def made(kind: str, name: str, version: str = "v1", **rest: Any) -> dict[str, Any]:
        metadata = {"name": name, "namespace": SPACE, "labels": {"part": name}}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}

    environment = variables()
    executor = [{"name": "AIRFLOW__CORE__EXECUTOR", "value": HELM["executor"]}]
    task = {
        # As the chart's template: a task's pod itself runs nothing in other pods.
        "name": "base",
        "image": image("pod_template"),
        "env": [*environment, {"name": "AIRFLOW__CORE__EXECUTOR", "value": "LocalExecutor"}],
        "volumeMounts": HELM["volumeMounts"],
    }
    template = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "a-task"},
        "spec": {**pod_of([task], []), "restartPolicy": "Never"},
    }
    mounts = [
        *HELM["volumeMounts"],
        {"name": "database", "mountPath": "/opt/airflow/database"},
        {"name": "template", "mountPath": "/opt/airflow/pod_templates"},
    ]
    common = {
        "image": image("airflow"),
        "env": [*environment, *executor],
        "volumeMounts": mounts,
    }
    containers = [
        {**common, "name": one, "args": ["airflow", one], "readinessProbe": probe(one)}
        for one in SERVICES
    ]
    airflow = pod_of(
        containers,
        [
            {"name": "database", "emptyDir": {}},
            {"name": "template", "configMap": {"name": "template"}},
        ],
    )
    airflow["initContainers"] = [
        {**common, "name": "migrate", "args": ["airflow", "db", "migrate"]}
    ]
    verbs = ["create", "get", "list", "watch", "patch", "delete"]
    rules = [
        {"apiGroups": [""], "resources": ["pods"], "verbs": verbs},
        {"apiGroups": [""], "resources": ["pods/log", "events"], "verbs": ["get", "list"]},
    ]
    rbac = "rbac.authorization.k8s.io/v1"
    subject = {"kind": "ServiceAccount", "name": "airflow", "namespace": SPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "airflow"}
    found = [
        made("ServiceAccount", "airflow"),
        made("Role", "airflow", rbac, rules=rules),
        made("RoleBinding", "airflow", rbac, roleRef=role, subjects=[subject]),
        made("ConfigMap", "template", data={"pod.yaml": yaml.safe_dump(template)}),
        made(
            "Service", "airflow", spec={"selector": {"part": "airflow"}, "ports": [{"port": PORT}]}
        ),
        made("Pod", "airflow", spec=airflow),
    ]
    for claim, folder in folders.items():
        size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
        volume = made(
            "PersistentVolume",
            claim,
            spec={
                "capacity": size,
                "accessModes": modes,
                "storageClassName": claim,
                "hostPath": {"path": str(folder)},
            },
        )
        del volume["metadata"]["namespace"]
        asked = {"accessModes": modes, "storageClassName": claim, "resources": {"requests": size}}
        found[:0] = [volume, made("PersistentVolumeClaim", claim, spec=asked)]
    return found


def probe(service: str) -> dict[str, Any]:
    """The healthcheck of the image."""
    return {
        "exec": {"command": ["healthcheck", service]},
        "periodSeconds": 5,
        "timeoutSeconds": 60,
        "failureThreshold": 100,
    }


@pytest.fixture
def airflow_pod(
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
    run_in(kubernetes_cluster, tmp_path)
    yield kubernetes_cluster
    kubernetes_cluster.kubectl("delete", "namespace", SPACE, "--wait=false")


def run_in(cluster: KubernetesCluster, folder: Path) -> None:
    """Starts Airflow there, and waits until it is well."""
    folders = {f"ddl-{name}": folder / name for name in ("workspace", "trainings")}
    for one in folders.values():
        one.mkdir()
        os.chown(one, UID, 0)
    example = folders["ddl-trainings"] / "mnist-keras"
    write_example(example, {"kind": "local"}, at=Path("/workspace"))
    (example / "data").rename(folders["ddl-workspace"] / "data")
    cluster.kubectl("create", "namespace", SPACE)
    cluster.apply(*objects(folders))
    words = ("-n", SPACE, "get", "pod", "airflow", "-o")
    ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    until(
        lambda: cluster.kubectl(*words, ready) == "True",
        240,
        lambda: cluster.kubectl(*words, "yaml"),
    )
    # The first task would otherwise wait for its imports.
    url = f"http://airflow:{PORT}/execution/health"
    warms = f"import urllib.request as r; print(r.urlopen('{url}').status)"
    there = ("-n", SPACE, "exec", "airflow", "-c", "scheduler", "--", "python", "-c", warms)
    until(lambda: cluster.kubectl(*there, check=False).strip() == "200", 120)


def airflow(cluster: KubernetesCluster, *words: str, check: bool = True) -> str:
    """What a command of Airflow says, in the scheduler's container."""
    there = ("-n", SPACE, "exec", "airflow", "-c", "scheduler", "--")
    return cluster.kubectl(*there, "airflow", *words, check=check)


def test_the_example_trains_in_pods_that_the_kubernetes_executor_makes_by_the_values_of_the_chart(
    airflow_pod: KubernetesCluster, tmp_path: Path
) -> None:
    trains(airflow_pod, tmp_path)


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
    told += [
        cluster.kubectl(*there, "get", "pods,events", check=False),
        *(
            cluster.kubectl(*there, "logs", "airflow", "-c", one, "--tail=60", check=False)
            for one in SERVICES
        ),
    ]
    return "\n".join(told)
