"""Trainings that nobody triggers: their data has changed, or what another DAG makes."""

from __future__ import annotations

import time

import pytest

from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.lineage.production import LATEST, point
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import publish
from tests.limits import within

pytestmark = pytest.mark.integration

MANIFEST = """\
model_definition:
  name: {name}
  framework: {{name: tensorflow, version: "2.21"}}
  execution: {{command: python train.py, compute_configuration: {{name: cpu}}}}
training_data_reference: {{type: fs, source: {{path: ./data}}}}
training_results_reference: {{type: fs, target: {{path: ./published}}}}
schedule: {schedule}
retries: {{attempts: 1}}
"""
# As a platform team writes it: the asset has a name besides its URI.
UPSTREAM = """\
from airflow.sdk import DAG, Asset, task

with DAG("upstream", schedule=None):

    @task(outlets=[Asset(name="digits, clean", uri="s3://features/digits")])
    def publish():
        pass

    publish()
"""


def _write(folder, schedule):
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "numbers").write_text("1 2 3")
    # No checkpoint, so nothing is published, and each run ends soon.
    (folder / "train.py").write_text("print('trained')")
    (folder / "manifest.yml").write_text(MANIFEST.format(name=folder.name, schedule=schedule))


def _wait(site, dag_id, number):
    """The runs, oldest first, as soon as there are so many; an asset's event started each.

    Once, on a busy machine, one never came. An event waits in Airflow's queue for its DAG, and the
    DAG stood still: ``airflow_internals.held_back`` says why, and the bundle looks for it now.
    """
    deadline = time.monotonic() + within(120)
    while True:
        runs = site.call("GET", f"/dags/{dag_id}/dagRuns")["dag_runs"]
        if len(runs) >= number:
            assert [run["run_type"] for run in runs] == ["asset_triggered"] * number
            return sorted(runs, key=lambda run: run["queued_at"])
        if time.monotonic() >= deadline:
            waiting = site.call("GET", f"/dags/{dag_id}/assets/queuedEvents")
            raise AssertionError((runs, waiting, site.call("GET", f"/dags/{dag_id}")))
        time.sleep(0.5)


def test_changed_data_starts_a_run_and_unchanged_data_none(site, dags_folder):
    folder = dags_folder / "watched"
    triggerer = site.also("triggerer")
    try:
        _write(folder, "{on_data_change: true}")
        site.wait_for_dag("watched")
        (first,) = _wait(site, "watched", 1)
        # Before it has listed the data, what is added belongs to it, too.
        site.wait_for_run("watched", first["dag_run_id"], 120)
        time.sleep(5)  # several looks
        (folder / "data" / "more").write_text("4 5 6")
        runs = _wait(site, "watched", 2)
    finally:
        triggerer.stop()
    files = []
    for run in runs:
        site.wait_for_run("watched", run["dag_run_id"], 120)
        files.append(site.xcom("watched", run["dag_run_id"], "stage_data")["files"])
    assert files == [1, 2]


def test_another_dags_asset_starts_a_run_which_does_nothing_twice(site, dags_folder, loader_folder):
    folder = dags_folder / "downstream"
    _write(folder, "{assets: [s3://features/digits]}")
    (loader_folder / "upstream.py").write_text(UPSTREAM)
    site.wait_for_dag("downstream")
    site.wait_for_dag("upstream")
    assert site.wait_for_run("upstream", site.trigger("upstream"), 120) == "success"
    (first,) = _wait(site, "downstream", 1)
    site.wait_for_run("downstream", first["dag_run_id"], 120)
    assert site.task_instances("downstream", first["dag_run_id"])["train"]["state"] == "success"

    # As if that training had been published.
    staged = site.xcom("downstream", first["dag_run_id"], "stage_data")
    made_of = {
        "dataset": staged["fingerprint"],
        "code": staged["code"],
        "manifest": load_manifest(folder / "manifest.yml").digest,
        "parameters": {
            **{"nodes": 1, "launcher": "local", "checkpoint": "latest"},
            **{"attempts": 1, "dry_run": False},
        },
    }
    store = FolderStore(folder / "published")
    done = publish({"manifest": folder / "manifest.yml"}, store, "downstream-1")
    place = f"downstream-1/{done.name}"
    point(store, "downstream", LATEST, place, {}, made_of=made_of)
    assert site.wait_for_run("upstream", site.trigger("upstream"), 120) == "success"
    again = _wait(site, "downstream", 2)[1]["dag_run_id"]
    assert site.wait_for_run("downstream", again, 120) == "success"
    states = {n: t["state"] for n, t in site.task_instances("downstream", again).items()}
    assert set(states.values()) == {"skipped"}
