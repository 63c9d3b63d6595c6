"""The gate before publishing, and the person: a model of an example, published again."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest

from tests.integration.mail import body
from tests.limits import within

pytestmark = pytest.mark.integration

MANIFEST = """\
model_definition:
  name: approved
  framework: {name: tensorflow, version: "2.21"}
  execution: {command: python train.py ; python export.py, compute_configuration: {name: cpu}}
training_data_reference: {type: fs, source: {path: ./data}}
training_results_reference: {type: fs, target: {path: ./published}}
evaluation: {metric: quality, minimum: 0.5, command: python evaluate.py}
approval: {required: true}
notifications: {on_approval: [boss@example.com], on_success: [ml@example.com]}
parameters:
  quality: 0.75
"""
SCRIPTS = {
    "train.py": "print('trained')",
    "export.py": """\
import os, shutil
shutil.copytree(os.environ["DATA_DIR"], os.environ["RESULT_DIR"] + "/model", dirs_exist_ok=True)
""",
    "evaluate.py": """\
import json, os
json.dump({"quality": float(os.environ["PARAM_QUALITY"])}, open(os.environ["EVALUATION"], "w"))
""",
}


@pytest.fixture(scope="module")
def folder(site, dags_folder, finished):
    """The manifest's, whose data is the model that mnist-keras made."""
    run_id, _ = finished["mnist-keras"]
    layout = site.layout("mnist-keras", run_id)
    folder = dags_folder / "approved"
    shutil.copytree(layout.model, folder / "data")
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    (folder / "manifest.yml").write_text(MANIFEST)
    site.wait_for_dag("approved")
    return folder


def _states(site, run_id):
    return {name: t["state"] for name, t in site.task_instances("approved", run_id).items()}


def has_asked(site, dag_id, run_id):
    """Whether the task waits, and Airflow's scheduler has seen its first process end.

    Airflow 3.3 takes an answer that comes in the second between for the end of a killed task, and
    asks again: ``process_executor_events`` in ``airflow/jobs/scheduler_job_runner.py``.
    """
    seen = f"Received executor event .*task_id='approve', run_id='{re.escape(run_id)}'"
    task = site.task_instances(dag_id, run_id)["approve"]
    return task["state"] == "awaiting_input" and re.search(
        seen, site.service("scheduler").log.read_text("utf-8", "replace")
    )


def _answer(site, run_id, option):
    """What the form in Airflow's UI sends; returns what it shows."""
    deadline = time.monotonic() + within(180)
    while not has_asked(site, "approved", run_id):
        assert time.monotonic() < deadline, _states(site, run_id)
        time.sleep(0.5)
    path = f"/dags/approved/dagRuns/{run_id}/taskInstances/approve/-1/hitlDetails"
    shown = site.call("GET", path)
    site.call("PATCH", path, json={"chosen_options": [option], "params_input": {}})
    return shown


def test_a_person_decides_and_production_follows(site, mailbox, folder):
    pointer = folder / "published" / "approved" / "production.json"
    first = site.trigger("approved")
    shown = _answer(site, first, "Approve")
    assert f"run {first}" in shown["subject"] and "| `quality` | 0.75 |  |" in shown["body"]
    assert not (folder / "published").exists()
    assert site.wait_for_run("approved", first, 120) == "success"
    assert (
        json.loads(pointer.read_text())["training_id"] == site.layout("approved", first).training_id
    )

    (asked,), (told,) = mailbox.about("waits for approval"), mailbox.about("was published")
    assert (asked["To"], told["To"]) == ("boss@example.com", "ml@example.com")
    assert "| `quality` | 0.75 |" in body(asked)
    assert json.loads(pointer.read_text())["model"] in body(told)

    second = site.trigger("approved", {"quality": 0.9})
    shown = _answer(site, second, "Reject")
    assert "| `quality` | 0.9 | 0.75 |" in shown["body"]
    site.wait_for_run("approved", second, 120)
    assert _states(site, second)["upload_results"] == "skipped"
    assert (
        json.loads(pointer.read_text())["training_id"] == site.layout("approved", first).training_id
    )
    assert not (folder / "published" / site.layout("approved", second).training_id).exists()


def test_a_model_below_the_minimum_is_shown_to_nobody(site, folder):
    run_id = site.trigger("approved", {"quality": 0.25})
    assert site.wait_for_run("approved", run_id, 120) == "failed"
    states = _states(site, run_id)
    assert states["evaluate"] == "failed"
    assert states["approve"] == states["upload_results"] == "upstream_failed"
    assert "quality is 0.25, 0.25 below the minimum 0.5" in site.task_log(
        "approved", run_id, "evaluate"
    )
