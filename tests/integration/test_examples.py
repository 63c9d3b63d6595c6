"""The road of one manifest through a real Airflow: each example, to the model in the bucket."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import httpx
import pytest

from ddl_airflow.core.progress import Progress
from ddl_airflow.demo.digits import HELD_OUT_LABELS
from ddl_airflow.demo.show import DATA_BUCKET, RESULTS_BUCKET
from ddl_airflow.evidence.names import BOM, CARD, CURVES, DATASET, PROVENANCE
from ddl_airflow.evidence.verification import verify
from ddl_airflow.launchers.processes import marked
from ddl_airflow.lineage.record import check_files
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.stores import open_store
from tests.conftest import ENTERED, ROOT, TRAINED
from tests.documents import with_real_connection, wml_document
from tests.limits import within
from tests.schemas import check_lineage_schema

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("dag_id", TRAINED)
def test_example_trains_publishes_and_tells_its_lineage(site, object_store, finished, dag_id):
    run_id, state = finished[dag_id]
    assert state == "success", site.task_log(dag_id, run_id, "train")
    places = site.xcom(dag_id, run_id, "upload_results")
    training = site.layout(dag_id, run_id).training_id
    assert places["model"].startswith(f"s3://{RESULTS_BUCKET}/{training}/")

    store = open_store(places["training"], object_store.client)
    keys = {obj.key for obj in store.list()}
    assert {"_SUCCESS", "lineage.json", "model/saved_model.pb", "logs/rank-1.log"} <= keys
    record = json.loads(store.read_bytes("lineage.json"))
    check_lineage_schema(record)
    found = verify(store)
    assert found.problems == {} and found.notes == [] and found.files == len(keys)
    # A script may report too little for curves.
    assert {CARD, BOM, DATASET, PROVENANCE} <= keys and found.not_made.keys() <= {CURVES}
    assert record["result"]["metrics"]["test_accuracy"] >= 0.90
    # Not the script's own word: the SavedModel, reloaded from disk, over all held-out digits.
    assert record["result"]["accuracy"] >= 0.90
    assert record["result"]["rows"] > 300
    assert set(record["result"]["signatures"]) == {"predict_images", "serving_default"}
    servers = dag_id == "parameter-server"  # a master, two workers and the server
    assert record["environment"]["world_size"] == (4 if servers else 2)
    assert ("experiment/checkpoint" in keys) == servers
    assert record["dataset"]["uri"] == "s3://mnist-training-data"
    assert record["run"]["run_id"] == run_id
    assert record["run"]["triggered_by"] == "admin"
    tries = record["run"]["tries"]
    assert {"stage_data", "train", "transform", "upload_results"} <= set(tries)
    assert set(tries.values()) == {1}
    assert check_files(record, store) == []


@pytest.mark.parametrize("dag_id", TRAINED)
def test_no_key_is_shown_anywhere(site, object_store, finished, dag_id):
    run_id, _ = finished[dag_id]
    secret = object_store.secret_access_key
    rendered = json.dumps(site.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances"))
    assert secret not in rendered
    assert "'uri': 's3://mnist-training-data'" in rendered or "s3://mnist-training-data" in rendered
    for task_id in ("stage_data", "train", "transform", "upload_results"):
        assert secret not in site.task_log(dag_id, run_id, task_id)
    for path in site.layout(dag_id, run_id).root.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


def test_what_was_entered_reaches_the_script_the_ui_and_the_lineage(site, object_store, finished):
    dag_id = "mnist-keras"
    run_id, _ = finished[dag_id]
    assert "Epoch 3/3" in site.task_log(dag_id, run_id, "train")
    shown = site.task_instances(dag_id, run_id)["train"]["rendered_fields"]
    assert shown["parameters"] == ENTERED[dag_id]
    places = site.xcom(dag_id, run_id, "upload_results")
    store = open_store(places["training"], object_store.client)
    record = json.loads(store.read_bytes("lineage.json"))
    assert record["run"]["parameters"] == ENTERED[dag_id] | {
        **{"nodes": 2, "launcher": "local", "checkpoint": "latest"},
        **{"attempts": 3, "dry_run": False},
    }


def test_what_the_form_does_not_allow_starts_no_run(site, finished):
    with pytest.raises(httpx.HTTPStatusError, match="400") as refused:
        site.trigger("mnist-keras", {"epochs": 51})
    assert "epochs" in refused.value.response.text
    run_id = site.trigger("mnist-keras", {"epoch": 3})
    assert site.wait_for_run("mnist-keras", run_id, 60) == "failed"
    assert "Did you mean epochs?" in site.task_log("mnist-keras", run_id, "stage_data")


def test_dry_run_skips_every_step_and_publishes_nothing(site, object_store, finished):
    run_id = site.trigger("mnist-keras", {"dry_run": True, "nodes": 1})
    site.wait_for_run("mnist-keras", run_id, 60)
    states = {name: t["state"] for name, t in site.task_instances("mnist-keras", run_id).items()}
    assert set(states.values()) == {"skipped"} and "upload_results" in states
    said = site.task_log("mnist-keras", run_id, "stage_data")
    assert "would start 1 rank(s): " in said
    store = S3Store(
        object_store.client, RESULTS_BUCKET, site.layout("mnist-keras", run_id).training_id
    )
    assert store.list() == []


def test_lineage_command_checks_the_published_files(site, object_store, finished):
    run_id, _ = finished["mnist-tf1"]
    uri = site.xcom("mnist-tf1", run_id, "upload_results")["lineage"]
    keys = {
        "AWS_ENDPOINT_URL": object_store.endpoint_url,
        "AWS_ACCESS_KEY_ID": object_store.access_key_id,
        "AWS_SECRET_ACCESS_KEY": object_store.secret_access_key,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "ddl_airflow.cli", "lineage", "--json", uri]
    said = subprocess.run(command, env=os.environ | keys, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["run"]["run_id"] == run_id
    assert "files are as recorded" in said.stderr
    results = uri.removesuffix("/lineage.json").rpartition("/")[0].rpartition("/")[0]
    command[3:] = ["lineage", "list", "--json", "--dag", "mnist-tf1", results]
    said = subprocess.run(command, env=os.environ | keys, capture_output=True, text=True)
    assert run_id in [one["run_id"] for one in json.loads(said.stdout)], said.stderr
    command[3:] = ["lineage", "--json", uri]

    store = open_store(uri.removesuffix("/lineage.json"), object_store.client)
    original = store.read_bytes("logs/rank-1.log")
    store.put_bytes("logs/rank-1.log", b"another run's words")
    said = subprocess.run(command, env=os.environ | keys, capture_output=True, text=True)
    store.put_bytes("logs/rank-1.log", original)
    assert said.returncode == 1
    assert "logs/rank-1.log is not the file that was published" in said.stderr


def test_each_model_is_an_asset_event_that_says_its_data(site, finished):
    events = site.call("GET", "/assets/events", params={"limit": 100})["asset_events"]
    by_name = {(e["name"], e["source_run_id"]): e["extra"] for e in events}
    for dag_id, (run_id, _) in finished.items():
        data = site.xcom(dag_id, run_id, "stage_data")
        model = by_name[f"s3://{RESULTS_BUCKET}/{dag_id}", run_id]
        assert data["fingerprint"].startswith("sha256:")
        assert model["dataset"] == data["fingerprint"]
        assert model["training_id"] == site.layout(dag_id, run_id).training_id


def test_second_run_fetches_nothing(site, finished):
    """Unchanged data comes from the cache: the log of whichever example came second says so."""
    run_id, _ = finished["mnist-keras"]
    assert "4 files" in site.task_log("mnist-keras", run_id, "stage_data")
    assert "0 fetched, 4 already in the cache" in site.task_log("mnist-keras", run_id, "stage_data")


def test_killed_rank_ends_the_try_and_the_retry_goes_on(site, finished):
    dag_id = "mnist-tf1"
    run_id = site.trigger(dag_id)
    layout = site.layout(dag_id, run_id)
    _wait(lambda: _step(layout) >= 100, 120)
    victim = _rank_process(f"{layout.training_id}/train-1", rank=1)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    _wait(lambda: site.task_instances(dag_id, run_id)["train"]["state"] != "running", 30)
    assert time.monotonic() - killed < within(10)
    assert marked("DDL_JOB_ID", f"{layout.training_id}/train-1") == []
    first = site.task_log(dag_id, run_id, "train", 1)
    assert "rank 1 of 2" in first and "SIGKILL" in first
    # The retry finds the first try's checkpoints and goes on from there.
    resumed = _wait(lambda: re.search(r"goes on from step (\d+)", _log(site, dag_id, run_id)), 120)
    assert int(resumed[1]) >= 100
    # Its model would be as that of the example.
    site.call("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", json={"state": "failed"})
    _wait(lambda: marked("DDL_JOB_ID", f"{layout.training_id}/train-2") == [], 30)


def test_killed_worker_is_named_and_the_retry_goes_on_with_the_experiment(site, finished):
    dag_id = "parameter-server"
    run_id = site.trigger(dag_id, {"experiment_id": "killed-once"})
    job_id = f"{site.layout(dag_id, run_id).training_id}/train-1"
    experiment = site.workspace / "experiments" / "killed-once"
    _wait(lambda: len(list(experiment.glob("model.ckpt-*.index"))) > 1, 120)
    os.kill(_process(job_id, b'"task": {"type": "worker", "index": 1}'), signal.SIGKILL)
    _wait(lambda: site.task_instances(dag_id, run_id)["train"]["state"] != "running", 30)
    assert marked("DDL_JOB_ID", job_id) == []
    first = site.task_log(dag_id, run_id, "train", 1)
    assert "worker 1 (rank 2 of 4)" in first and "SIGKILL" in first
    restored = rf"Restoring parameters from {experiment}/model.ckpt-(\d+)"
    resumed = _wait(lambda: re.search(restored, _log(site, dag_id, run_id)), 120)
    assert int(resumed[1]) >= 300
    # Its model would be as that of the example.
    site.call("PATCH", f"/dags/{dag_id}/dagRuns/{run_id}", json={"state": "failed"})


def test_the_wml_document_runs_as_a_dag(site, object_store, dags_folder, finished):
    """Its manifest and both scripts as printed, but for the connection, which it leaves open."""
    document = wml_document()
    folder = dags_folder / "wml-document"
    folder.mkdir()
    (folder / "mnist-train-ddl.py").write_text(document.train, "utf-8")
    (folder / "transform.py").write_text(document.transform, "utf-8")
    (folder / "manifest.yml").write_text(with_real_connection(document.manifest), "utf-8")
    site.wait_for_dag("tf-mnist")
    run_id = site.trigger("tf-mnist")
    state = site.wait_for_run("tf-mnist", run_id, 300)
    assert state == "success", site.task_log("tf-mnist", run_id, "train")
    places = site.xcom("tf-mnist", run_id, "upload_results")
    store = open_store(places["training"], object_store.client)
    record = json.loads(store.read_bytes("lineage.json"))
    assert record["result"]["transform"] == ["python transform.py"]
    assert set(record["result"]["signatures"]) == {"predict_images", "serving_default"}
    assert record["result"]["rows"] > 300
    assert {"mnist-20.index", "mnist_basegraph.meta"} <= {
        obj.key.rpartition("/")[2] for obj in store.list()
    }


def _log(site, dag_id, run_id):
    """That of the second try of train, as far as it is written."""
    train = site.task_instances(dag_id, run_id)["train"]
    return site.task_log(dag_id, run_id, "train", 2) if train["try_number"] == 2 else ""


def _step(layout):
    progress = Progress()
    if layout.progress.exists():
        progress.feed(layout.progress.read_text())
    return progress.step or 0


def _rank_process(job_id, rank):
    """The script of a rank, beneath its shim."""
    return _process(job_id, f"\0OMPI_COMM_WORLD_RANK={rank}\0".encode())


def _process(job_id, mark):
    """The train.py of the job that has the mark in its environment."""
    for pid in marked("DDL_JOB_ID", job_id):
        with open(f"/proc/{pid}/environ", "rb") as file:
            mine = mark in b"\0" + file.read()
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if mine and b"train.py" in file.read().split(b"\0"):
                return pid
    raise AssertionError(f"nobody with {mark!r} in {job_id}")


def _wait(done, timeout_s):
    deadline = time.monotonic() + within(timeout_s)
    while not (result := done()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.2)
    return result


def test_what_is_in_production_scores(site, object_store, finished, loader_folder):
    """An ordinary DAG file, which a training's asset or the clock starts; here a person does."""
    run_id, _ = finished["mnist-keras"]
    dag, script = loader_folder / "score_nightly.py", loader_folder / "score-nightly"
    shutil.copytree(ROOT / "dags" / "score-nightly", script)
    shutil.copy(ROOT / "dags" / "score_nightly.py", dag)
    try:
        site.wait_for_dag("score-nightly")
        asset = site.call("GET", "/dags/score-nightly/details")["asset_expression"]
        assert asset["asset"]["uri"] == f"s3://{RESULTS_BUCKET}/mnist-keras"
        scored = site.trigger("score-nightly")
        state = site.wait_for_run("score-nightly", scored, 120)
        assert state == "success", site.task_log("score-nightly", scored, "score")
        model = site.xcom("mnist-keras", run_id, "upload_results")["model"]
        assert site.xcom("score-nightly", scored, "newest_in_production")["model"] == model
        place, _, name = site.xcom("score-nightly", scored, "score").rpartition("/")
        lines = open_store(place, object_store.client).read_bytes(name).decode().splitlines()
    finally:
        dag.unlink()
        shutil.rmtree(script)
    digits = [int(line.split(",")[2]) for line in lines if line.startswith("t10k")]
    with gzip.open(
        io.BytesIO(
            object_store.client.get_object(Bucket=DATA_BUCKET, Key=HELD_OUT_LABELS)["Body"].read()
        )
    ) as file:
        labels = [*file.read()[8:]]
    right = sum(digit == label for digit, label in zip(digits, labels, strict=True))
    assert right / len(labels) >= 0.90
