"""The demo's own Airflow, over SQLite."""

from __future__ import annotations

import os
import signal
import time
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


def test_a_scheduler_that_ends_is_started_again_and_goes_on(tmp_path):
    folder = tmp_path / "dags" / "trains"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "none.txt").touch()
    (folder / "manifest.yml").write_text(MANIFEST)
    (folder / "train.py").write_text("print('trained')")
    site = AirflowSite(tmp_path / "home", tmp_path / "dags", port=18300)
    with running(site):
        site.wait_for_dag("trains")
        assert site.revive() == []
        guard = site.service("scheduler").pid
        (scheduler,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        os.kill(int(scheduler), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while not (said := site.revive()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(said) == 1
        assert said[0].startswith("scheduler ended with code ")
        run_id = site.trigger("trains")
        assert site.wait_for_run("trains", run_id, 120) == "failed"  # there is no model
        assert site.task_instances("trains", run_id)["train"]["state"] == "success"
