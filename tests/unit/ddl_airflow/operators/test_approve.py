from __future__ import annotations

import json

import pytest
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import ApproveStep, StoreReference
from ddl_airflow.lineage.record import fix_run
from ddl_airflow.operators.approve import ApproveOperator
from ddl_airflow.site import training_of


@pytest.fixture
def asked(workspace, run_task, tmp_path):
    """asked() -> what Airflow's form is given."""

    def ask(**params):
        reference = StoreReference((tmp_path / "results").as_uri())
        with DAG("digits", schedule=None, params=params):
            task = ApproveOperator(
                task_id="approve",
                subject="Publish?",
                body="the metrics",
                step=ApproveStep(results=reference),
            )
        ended = run_task(task)
        assert ended.state == "awaiting_input", ended.error
        return ended.message("CreateHITLDetailPayload").body

    return ask


def test_the_form_shows_what_the_run_trained_with(asked, workspace, context_of):
    assert asked() == "the metrics"
    assert "| `epochs` | `3` |" in asked(epochs=3)
    run = context_of("digits")["dag_run"]
    layout = RunLayout(workspace, "digits", training_of("digits", run.run_id))
    layout.create()
    # As it was when its data was staged, whatever the manifest says by now.
    trained = {"epochs": 5, "note": "a|b `c`\n![x](http://y) <b>", "dry_run": False, "x": None}
    fix_run(layout, run.run_id, {"parameters": trained}, {})
    assert asked(epochs=3).splitlines() == [
        "the metrics",
        "",
        "| parameter | this run |",
        "| --- | --- |",
        "| `epochs` | `5` |",
        "| `dry_run` | `false` |",
        r"| `note` | ``a\|b `c` ![x](http://y) <b>`` |",
        "| `x` | `null` |",
    ]


def test_a_rejection_is_in_the_runs_record(workspace, context_of, tmp_path, monkeypatch):
    monkeypatch.setattr(ApprovalOperator, "execute_complete", lambda *_, **__: None)
    reference = StoreReference((tmp_path / "results").as_uri())
    with DAG("digits", schedule=None):
        step = ApproveStep(results=reference)
        task = ApproveOperator(task_id="approve", subject="Publish?", body="", step=step)
    context = context_of("digits")
    run_id = context["dag_run"].run_id
    layout = RunLayout(workspace, "digits", training_of("digits", run_id))
    layout.create()
    fix_run(layout, run_id, {"parameters": {}}, {})
    answer = {"chosen_options": ["Reject"], "responded_by_user": {"name": "ada"}}
    task.execute_complete(context, answer)
    outcome = json.loads((layout.kept / "record.json").read_text())["outcome"]
    assert outcome == {"state": "rejected", "step": "approve", "message": "ada rejected it"}
