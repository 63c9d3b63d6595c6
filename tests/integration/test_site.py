"""The demo's own Airflow, over SQLite."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddl_airflow.demo.site import AirflowSite, running

pytestmark = pytest.mark.integration

MANIFEST = """\
model_definition:
  name: trains
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py
    compute_configuration: {name: cpu, nodes: 1}
training_data_reference: {type: fs, source: {path: ./data}}
training_results_reference: {type: fs, target: {path: ./published}}
"""


def test_many_may_write_at_once_and_a_scheduler_that_ends_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ddl_airflow.demo.site._TOO_SOON_S", 0.0)
    folder = tmp_path / "dags" / "trains"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "none.txt").touch()
    (folder / "manifest.yml").write_text(MANIFEST)
    (folder / "train.py").write_text("print('trained')")
    site = AirflowSite(tmp_path / "home", tmp_path / "dags", port=18300)
    with running(site):
        guard = site.service("scheduler").pid
        (scheduler,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        os.kill(int(scheduler), signal.SIGKILL)
        pools = [{"name": f"pool-{n}", "slots": 1, "include_deferred": False} for n in range(24)]
        with ThreadPoolExecutor(8) as people:
            made = people.map(lambda pool: site.call("POST", "/pools", json=pool), pools)
            assert [pool["name"] for pool in made] == [pool["name"] for pool in pools]
        deadline = time.monotonic() + 30
        while not (said := site.revive()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert said[0].startswith("scheduler ended with code ")
        site.wait_for_dag("trains")
        run_id = site.trigger("trains")
        assert site.wait_for_run("trains", run_id, 120) == "failed"  # there is no model
        assert site.task_instances("trains", run_id)["train"]["state"] == "success"
    assert (tmp_path / "home" / "airflow.db").exists()
