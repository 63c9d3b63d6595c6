"""Pods of the built trainer image, on a real cluster of two nodes: kubelets and containerd run it.

The image is built by buildah on a stand-in for its base, as in ``test_images``, and loaded into the
nodes' containerd: there is no registry. Airflow runs on this machine, outside of the cluster.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddl_airflow import __version__
from ddl_airflow.core.job import JobSpec, JobState
from ddl_airflow.demo.digits import write_digits
from ddl_airflow.demo.site import AirflowSite, running
from tests.integration import images
from tests.integration.images import ROOT
from tests.integration.kubernetes import NODES, SPACE, KubernetesCluster
from tests.integration.test_images import AVERAGE, SKIP, source  # noqa: F401  # a fixture
from tests.limits import PatientSite, until

pytest.importorskip("kubernetes", reason="no package `kubernetes` in this environment")
from ddl_airflow.launchers.kubernetes import KubernetesLauncher
from ddl_airflow.launchers.kubernetes.objects import name_of

pytestmark = [pytest.mark.integration, pytest.mark.skipif(bool(SKIP), reason=SKIP)]

IMAGE = "localhost/ddl-trainer:test"


@pytest.fixture(scope="module")
def trainer_image(
    source: Path,  # noqa: F811
    kubernetes_cluster: KubernetesCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """Its id; both nodes have it."""
    labels = {"VERSION": __version__, "REVISION": "abc"}
    images.build(source, "docker/trainer/Dockerfile", "ddl-trainer", **labels)
    archive = tmp_path_factory.mktemp("image") / "ddl-trainer.tar"
    digest = images.save("ddl-trainer", IMAGE, archive)
    print(f"\nddl-trainer: {archive.stat().st_size / 1e6:.0f} MB for each node")
    kubernetes_cluster.load(archive, limit_s=600)
    archive.unlink()
    return digest


@pytest.fixture
def airflow(kubernetes_cluster: KubernetesCluster, tmp_path: Path) -> Iterator[AirflowSite]:
    """An Airflow of its own, which has the cluster's kubeconfig."""
    environment = {
        "KUBECONFIG": str(kubernetes_cluster.kubeconfig),
        "AIRFLOW__DDL__JOB_POLL_INTERVAL": "0.5",
    }
    site = PatientSite(tmp_path / "home", tmp_path / "dags", environment, port=18400)
    (tmp_path / "dags").mkdir()
    with running(site):
        triggerer = site.also("triggerer")
        yield site
        triggerer.stop()


def write_example(folder: Path, launcher: dict[str, Any], at: Path | None = None) -> None:
    """mnist-keras, with nothing else changed than where ranks run, and that all is in folders.

    Args:
        folder: made, with the digits in it.
        launcher: of the manifest.
        at: where Airflow finds ``data`` and makes ``published``; by default beside the manifest.
    """
    shutil.copytree(ROOT / "dags" / "mnist-keras", folder)
    write_digits(folder / "data")
    manifest = yaml.safe_load((folder / "manifest.yml").read_text())
    place = str(at or ".")
    data, published = {"path": f"{place}/data"}, {"path": f"{place}/published"}
    manifest["training_data_reference"] = {"type": "fs", "source": data}
    manifest["training_results_reference"] = {"type": "fs", "target": published}
    manifest["launcher"] = launcher
    (folder / "manifest.yml").write_text(yaml.safe_dump(manifest))


def test_a_dag_trains_the_example_in_pods_of_the_trainer_image_one_rank_on_each_node(
    airflow: AirflowSite, trainer_image: str, kubernetes_cluster: KubernetesCluster, tmp_path: Path
) -> None:
    airflow.workspace.mkdir()
    # All that the pods have of this machine: no Python, and nothing of ours.
    volume = {"host_path": str(airflow.workspace), "mount_path": str(airflow.workspace)}
    launcher = {"kind": "kubernetes", "image": IMAGE, "namespace": SPACE, "volumes": [volume]}
    write_example(tmp_path / "mnist-keras", launcher)
    folder = (tmp_path / "mnist-keras").rename(tmp_path / "dags" / "mnist-keras")
    airflow.wait_for_dag("mnist-keras")
    run_id = airflow.trigger("mnist-keras", {"epochs": 3})
    state = airflow.wait_for_run("mnist-keras", run_id, 600)
    log = airflow.task_log("mnist-keras", run_id, "train")
    assert state == "success", (airflow.task_instances("mnist-keras", run_id), log)
    job_id = f"{airflow.layout('mnist-keras', run_id).training_id}/train-1"
    words = ("-n", SPACE, "get", "pods", "-o", "json")
    chosen = ("-l", f"ddl-airflow/job={name_of(job_id)},ddl-airflow/role=worker")
    pods = json.loads(kubernetes_cluster.kubectl(*words, *chosen))["items"]
    assert sorted(pod["spec"]["nodeName"] for pod in pods) == sorted(NODES)
    for pod in pods:
        (container,) = pod["status"]["containerStatuses"]
        assert container["imageID"].endswith(trainer_image), container
        paths = [one["hostPath"]["path"] for one in pod["spec"]["volumes"] if "hostPath" in one]
        assert paths == [str(airflow.workspace)]
    result = airflow.xcom("mnist-keras", run_id, "train")
    assert result["world_size"] == 2
    accuracy = re.search(r"test accuracy= ([\d.]+)", log)
    assert accuracy is not None and float(accuracy[1]) > 0.9, log
    assert list((folder / "published").rglob("saved_model.pb"))
    print(f"\ntest accuracy {accuracy[1]}; {log[-1500:]}")


@pytest.mark.usefixtures("trainer_image")
def test_ranks_average_in_pods_of_the_trainer_image_as_a_user_that_is_not_root(
    kubernetes_cluster: KubernetesCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubernetes_cluster.kubeconfig))
    tmp_path.chmod(0o755)
    code = tmp_path / "run" / "code"
    code.mkdir(parents=True)
    (code / "main.py").write_text(AVERAGE + "import os; print('as', os.getuid())\n")
    spec = JobSpec(
        job_id=f"{tmp_path.name}/train-1",
        command="python main.py",
        nodes=2,
        slots=1,
        python="of Airflow's own host",
        folder=code,
        record_dir=code.parent / "records",
        log_dir=code.parent / "logs",
        env={},
        user="nobody",
    )
    volume = {"host_path": str(tmp_path), "mount_path": str(tmp_path)}
    launcher = KubernetesLauncher(image=IMAGE, namespace=SPACE, grace_s=5.0, volumes=[volume])
    handle = launcher.submit(launcher.render(spec))
    try:
        until(lambda: launcher.status(handle).ended, 120, lambda: launcher.status(handle))
        status = launcher.status(handle)
        said = launcher.log(handle, 1).read_text()
        assert status.state is JobState.SUCCEEDED, (status, said)
        assert "rank 1 of 2 [3.0, 20.0]" in said
        assert re.search(r"^as (\d+)$", said, re.M)[1] != "0"
    finally:
        launcher.cancel(handle)
