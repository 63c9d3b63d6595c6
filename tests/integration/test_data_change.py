"""A training that runs when its data changes: real triggerer, real folder."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.integration

MANIFEST = """\
model_definition:
  name: watched
  framework: {name: tensorflow, version: "2.21"}
  execution: {command: python train.py, compute_configuration: {name: cpu}}
training_data_reference: {type: fs, source: {path: ./data}}
training_results_reference: {type: fs, target: {path: ./published}}
schedule: {on_data_change: true}
retries: {attempts: 1}
"""


def _runs(site):
    return site.call("GET", "/dags/watched/dagRuns")["dag_runs"]


def _wait(site, number):
    deadline = time.monotonic() + 120
    while len(_runs(site)) < number:
        assert time.monotonic() < deadline, _runs(site)
        time.sleep(0.5)


def test_changed_data_starts_a_run_and_unchanged_data_none(site, dags_folder):
    folder = dags_folder / "watched"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "numbers").write_text("1 2 3")
    # No checkpoint, so nothing is published, and each run ends soon.
    (folder / "train.py").write_text("print('trained')")
    triggerer = site.also("triggerer")
    try:
        (folder / "manifest.yml").write_text(MANIFEST)
        site.wait_for_dag("watched")
        _wait(site, 1)
        time.sleep(5)  # several looks
        (folder / "data" / "more").write_text("4 5 6")
        _wait(site, 2)
    finally:
        triggerer.stop()
    runs = sorted(_runs(site), key=lambda run: run["queued_at"])
    assert [run["run_type"] for run in runs] == ["asset_triggered"] * 2
    files = []
    for run in runs:
        site.wait_for_run("watched", run["dag_run_id"], 120)
        files.append(site.xcom("watched", run["dag_run_id"], "stage_data")["files"])
    assert files == [1, 2]
