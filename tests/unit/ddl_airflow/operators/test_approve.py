from __future__ import annotations

import json
from datetime import UTC, datetime

import airflow
import pytest
from airflow.api_fastapi.execution_api.datamodels.hitl import HITLDetailRequest
from airflow.api_fastapi.execution_api.routes.hitl import upsert_hitl_detail
from airflow.models import DagModel, TaskInstance
from airflow.models.dagbundle import DagBundleModel
from airflow.models.hitl import HITLDetail
from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import clear_task_instances
from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.comms import CreateHITLDetailPayload, HITLDetailRequestResult
from airflow.serialization.serialized_objects import DagSerialization, LazyDeserializedDAG
from airflow.utils.state import DagRunState
from airflow.utils.types import DagRunTriggeredByType, DagRunType
from packaging.version import Version
from sqlalchemy import select

from ddl_airflow.core.errors import StagingError
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import ApproveStep, StoreReference
from ddl_airflow.lineage.record import fix_run
from ddl_airflow.operators.approve import ApproveOperator
from ddl_airflow.site import training_of

# Of a task that is tried again; since 3.4 it gets another one.
KEEPS_FORMS = Version(airflow.__version__) < Version("3.4.0b1")


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
        first, second = (m for m in ended.sent if isinstance(m, CreateHITLDetailPayload))
        assert first == second  # ours, to see what Airflow shows, and its own operator's
        return second.body

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


@pytest.fixture
def decided(workspace, context_of, tmp_path, monkeypatch):
    """decided(option) -> what Airflow's own operator got of that answer; and the run's folder."""
    acted_on = []

    def act(_self, context, event):
        acted_on.append(event)

    monkeypatch.setattr(ApprovalOperator, "execute_complete", act)
    reference = StoreReference((tmp_path / "results").as_uri())
    with DAG("digits", schedule=None):
        step = ApproveStep(results=reference)
        task = ApproveOperator(task_id="approve", subject="Publish?", body="", step=step)
    context = context_of("digits")
    run_id = context["dag_run"].run_id
    layout = RunLayout(workspace, "digits", training_of("digits", run_id))
    layout.create()
    fix_run(layout, run_id, {"parameters": {}}, {})

    def decide(option):
        answer = {"chosen_options": [option], "responded_by_user": {"name": "ada"}}
        task.execute_complete(context, answer)
        assert acted_on == [answer]

    return decide, layout


def test_a_rejection_is_in_the_runs_record(decided):
    decide, layout = decided
    decide("Reject")
    outcome = json.loads((layout.kept / "record.json").read_text())["outcome"]
    assert outcome == {"state": "rejected", "step": "approve", "message": "ada rejected it"}


@pytest.mark.parametrize("away", ["store_of", "layout_of", "fixed_run", "keep_so_far"])
@pytest.mark.parametrize("error", [StagingError("it is away", retryable=True), RuntimeError("STS")])
def test_a_rejection_counts_whatever_cannot_be_reached(decided, monkeypatch, capsys, away, error):
    """Another try would ask again, and nobody may answer in time; then `then` counts."""

    def fails(*_):
        raise error

    monkeypatch.setattr(f"ddl_airflow.operators.approve.{away}", fails)
    decide, layout = decided
    decide("Reject")
    assert "ada rejected it" in capsys.readouterr().out
    assert (layout.kept / "record.json").exists() is (away == "store_of")


@pytest.mark.parametrize("away", ["layout_of", "write_part"])
def test_an_approval_that_cannot_be_kept_is_not_asked_for_again_in_silence(
    decided, monkeypatch, away
):
    def fails(*_):
        raise StagingError("the disk is full", retryable=True)

    monkeypatch.setattr(f"ddl_airflow.operators.approve.{away}", fails)
    decide, _ = decided
    with pytest.raises(AirflowFailException, match="ada approved it.* the disk is full.*Clear app"):
        decide("Approve")


class Form:
    """A run's task ``approve`` in Airflow's database, by whose own functions it is cleared."""

    def __init__(self, airflow_database, run_task, tmp_path):
        self._database, self._run_task = airflow_database, run_task
        self._results = StoreReference((tmp_path / "results").as_uri())
        dag = self._task("").dag
        serialized = DagSerialization.from_dict(DagSerialization.to_dict(dag))
        with self._database() as session:
            session.add(DagBundleModel(name="trainings"))
            session.flush()
            session.add(DagModel(dag_id="digits", bundle_name="trainings", fileloc="x"))
            session.flush()
            stored = LazyDeserializedDAG.from_dag(dag)
            SerializedDagModel.write_dag(stored, bundle_name="trainings", session=session)
            session.flush()
            serialized.create_dagrun(
                run_id="r1",
                run_type=DagRunType.MANUAL,
                run_after=datetime.now(UTC),
                state=DagRunState.RUNNING,
                triggered_by=DagRunTriggeredByType.TEST,
                session=session,
            )

    def _task(self, body, **step):
        with DAG("digits", schedule=None, start_date=datetime(2024, 1, 1, tzinfo=UTC)):
            asked = ApproveStep(results=self._results, **step)
            return ApproveOperator(task_id="approve", subject="Publish?", body=body, step=asked)

    def asks(self, body, **step):
        """Runs the task; returns how that ended, and what the form shows then."""
        with self._database() as session:
            ti_id = session.scalar(select(TaskInstance.id))

        def kept(message):
            request = HITLDetailRequest(**message.model_dump(exclude={"type"}))
            with self._database() as session:
                answer = upsert_hitl_detail(ti_id, request, session)
            # As the supervisor hands it on.
            received = HITLDetailRequestResult.model_validate_json(
                answer.model_dump_json(exclude_defaults=True)
            )
            return HITLDetailRequestResult.from_api_response(received)

        answers = {"CreateHITLDetailPayload": kept}
        ended = self._run_task(self._task(body, **step), answers=answers, ti_id=ti_id)
        with self._database() as session:
            return ended, session.scalar(select(HITLDetail.body).where(HITLDetail.ti_id == ti_id))

    def counts(self):
        """What counts when nobody answers."""
        with self._database() as session:
            return session.scalar(select(HITLDetail.defaults))

    def answer(self, option):
        with self._database() as session:
            form = session.scalar(select(HITLDetail))
            form.responded_at, form.chosen_options = datetime.now(UTC), [option]

    def clear(self):
        with self._database() as session:
            clear_task_instances([session.scalar(select(TaskInstance))], session)


@pytest.fixture
def form(airflow_database, run_task, workspace, tmp_path):
    return Form(airflow_database, run_task, tmp_path)


@pytest.mark.parametrize("answered", [False, True])
def test_nobody_is_asked_about_a_model_with_the_numbers_of_another(form, answered):
    ended, shown = form.asks("accuracy 0.96")
    assert (ended.state, shown) == ("awaiting_input", "accuracy 0.96")
    if answered:
        form.answer("Reject")
    form.clear()
    ended, shown = form.asks("accuracy 0.71")
    if not KEEPS_FORMS:
        assert (ended.state, shown) == ("awaiting_input", "accuracy 0.71")
        return
    assert (ended.state, shown) == ("failed", "accuracy 0.96")
    assert isinstance(ended.error, AirflowFailException)
    assert "Airflow still shows the form of an earlier try" in str(ended.error)
    assert "Trigger a new run" in str(ended.error)


def test_a_person_is_asked_again_about_the_same_numbers(form):
    form.asks("accuracy 0.96")
    form.answer("Reject")
    form.clear()
    assert form.asks("accuracy 0.96")[0].state == "awaiting_input"


def test_what_counts_when_nobody_answers_is_what_the_manifest_says_now(form):
    assert form.asks("accuracy 0.96", timeout_s=60, then="approve")[0].state == "awaiting_input"
    form.clear()
    ended, _ = form.asks("accuracy 0.96", timeout_s=60, then="reject")
    if KEEPS_FORMS:
        assert ended.state == "failed" and "Approve" in str(ended.error)
    else:
        assert ended.state == "awaiting_input" and form.counts() == ["Reject"]
    assert form.asks("accuracy 0.96", timeout_s=90, then="approve")[0].state == "awaiting_input"
    form.clear()
    assert form.asks("accuracy 0.96")[0].state == "awaiting_input"  # without an end
