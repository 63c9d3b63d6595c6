from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from airflow.serialization.serialized_objects import DagSerialization

from ddl_airflow.airflow_internals import asset_of
from ddl_airflow.lineage.production import PRODUCTION, point, promote, read_pointer
from ddl_airflow.operators.production import production_dag
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import publish


@pytest.fixture
def results(tmp_path):
    """Two models of a DAG, in production one after the other, and one that never was."""
    store = FolderStore(tmp_path / "results")
    for number in (1, 2, 3):
        record = tmp_path / f"{number}.json"
        made = {"dataset": {"fingerprint": "d"}, "code": {"digest": "c"}}
        made |= {"manifest": {"digest": "m"}, "result": {"metrics": {}}}
        record.write_text(json.dumps(made | {"run": {"dag_id": "digits", "parameters": {}}}))
        done = publish({"lineage.json": record}, store, f"digits-{number}")
        if number < 3:
            point(store, "digits", PRODUCTION, f"digits-{number}/{done.name}", {})
    return store


@pytest.fixture
def decide(results, run_task):
    """decide(**params) -> how the task ended, as triggered with these."""

    def run(**params):
        task = production_dag(results.uri).get_task("set_production")
        for name, value in params.items():
            task.params[name] = task.dag.params[name] = value
        return run_task(task)

    return run


@pytest.mark.parametrize(
    ("params", "said", "names"),
    [
        ({}, "rolled back", "digits-1"),
        ({"action": "promote", "to": "digits-3"}, "promoted", "digits-3"),
        ({"action": "promote", "to": "digits-3/"}, "promoted", "digits-3"),
    ],
)
def test_a_person_moves_production_in_the_ui_and_others_are_told(
    decide, results, params, said, names
):
    ended = decide(model="digits", reason="too slow", **params)
    assert ended.state == "success", ended.error
    pointer = read_pointer(results, "digits", PRODUCTION)
    event = pointer["history"][0]
    assert (pointer["training_id"], event["event"]) == (names, said)
    assert (event["reason"], event["number"]) == ("too slow", 3)
    assert event["by"].startswith("a tester, run manual__")
    (told,) = ended.message("SucceedTask").outlet_events
    assert told["dest_asset_key"]["uri"] == asset_of(f"{results.uri}/digits").uri
    assert told["extra"]["model"] == pointer["model"] and told["extra"]["event"] == said


@pytest.mark.parametrize(
    "params", [{}, {"action": "promote", "to": "digits-3"}], ids=["rollback", "promote"]
)
def test_a_run_that_is_cleared_decides_once(decide, results, params, monkeypatch):
    """Its worker is killed when production.json is written, and before Airflow is told."""
    with monkeypatch.context() as patched:
        patched.setattr("ddl_airflow.operators.production.asset_of", lambda uri: 1 / 0)
        assert decide(model="digits", **params).state == "failed"
    decided = read_pointer(results, "digits", PRODUCTION)
    ended = decide(model="digits", **params)
    assert ended.state == "success", ended.error
    assert read_pointer(results, "digits", PRODUCTION) == decided
    # Somebody has decided otherwise since: to clear the old run does not undo that.
    promote(results, "digits", "digits-2")
    since = read_pointer(results, "digits", PRODUCTION)
    assert decide(model="digits", **params).state == "success"
    assert read_pointer(results, "digits", PRODUCTION) == since


def test_what_a_person_decided_is_not_tried_again_later():
    """Production may be another by then, whatever the site does with its tasks."""
    script = """if True:
        from ddl_airflow.operators.production import production_dag
        print("retries:", production_dag("s3://results").get_task("set_production").retries)
    """
    # Airflow reads this setting when it is imported.
    env = os.environ | {"AIRFLOW__CORE__DEFAULT_TASK_RETRIES": "3"}
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert "retries: 0" in done.stdout


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"model": "others"}, "no training of this DAG was ever in production"),
        ({"model": "digits", "action": "promote"}, "to: which one?"),
        ({"model": "digits", "to": "digits-3"}, "digits-3 was not in production before"),
        ({"model": "digits", "instead_of": "digits-1"}, "is in production now, not digits-1"),
        (
            {"model": "digits", "action": "promote", "to": "digits-3", "instead_of": "digits-1"},
            "is in production now, not digits-1",
        ),
    ],
)
def test_what_cannot_be_is_said_and_changes_nothing(decide, results, params, words):
    ended = decide(**params)
    assert ended.state == "failed" and words in str(ended.error)
    assert read_pointer(results, "digits", PRODUCTION)["training_id"] == "digits-2"


def test_the_form_can_be_sent_with_no_more_than_the_model():
    dag = production_dag("s3://results")
    assert [*dag.params] == ["model", "action", "to", "instead_of", "reason"]
    for name in ("to", "instead_of", "reason"):
        assert dag.params.get_param(name).schema["type"] == ["null", "string"]
    # Nor does it wait, unseen, until somebody switches the DAG on.
    assert dag.is_paused_upon_creation is False


def test_airflow_stores_the_dag(tmp_path):
    shown = json.dumps(DagSerialization.to_dict(production_dag("s3://results", "my_s3")))
    assert "my_s3" in shown and "production of s3://results" in shown
