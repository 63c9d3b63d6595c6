from __future__ import annotations

import json
import os
import time

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from ddl_airflow.core.cancellations import cancellation_file, note_cancellation
from ddl_airflow.core.job import StartedJob
from ddl_airflow.core.layout import RunLayout, cancellations
from ddl_airflow.lineage.production import LATEST, point
from ddl_airflow.operators.clean import clean_dag
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import publish


@pytest.mark.parametrize("state", ["pending", "lost"])
def test_a_run_whose_cancelled_job_nobody_dealt_with_goes(
    workspace, context_of, monkeypatch, cluster, job, state
):
    """Its task was marked failed while it was deferred: the trigger cancels the job, no more."""
    monkeypatch.setenv("AIRFLOW__DDL__KEEP_RUNS", "30d")
    monkeypatch.setattr("ddl_airflow.operators.clean.run_is_open", lambda *_: False)
    layout = RunLayout(workspace, "digits", "digits-1")
    layout.create()
    started = StartedJob(cluster.submit(cluster.render(job().spec)), time.time(), {}, None)
    layout.scheduled_job.write_text(json.dumps(started.dump()))
    cluster.set(1, state)
    ago = time.time() - 40 * 86400
    for path in (*layout.root.rglob("*"), layout.root):
        os.utime(path, (ago, ago))
    monkeypatch.setattr("ddl_airflow.storage.cleaning._changed", lambda found: found.st_mtime)
    (task,) = clean_dag().tasks
    task.execute(context_of("ddl-clean"))
    assert layout.root.exists() is (state == "pending")


@pytest.mark.parametrize(
    ("of_task", "is_open", "waits", "goes"),
    [
        (False, True, True, True),
        (True, True, False, False),
        (True, False, False, True),
        (True, False, True, False),  # perhaps of another Airflow
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_jobs_that_are_to_be_cancelled_are(
    workspace, context_of, monkeypatch, cluster, job, capsys, of_task, is_open, waits, goes, dry_run
):
    """Who was to cancel them ended before, and no trigger has run since."""
    workspace.mkdir()
    monkeypatch.setattr("ddl_airflow.operators.clean.run_is_open", lambda *_: is_open)
    path = cancellation_file(cancellations(workspace), job().spec.job_id)
    handle = cluster.submit(cluster.render(job().spec))
    task = {"dag_id": "digits", "task_id": "train", "run_id": "r", "map_index": -1}
    note_cancellation(StartedJob(handle, time.time(), cancellation=path), task if of_task else None)
    if not waits:
        os.utime(path, (0, 0))
    (clean,) = clean_dag().tasks
    clean.execute(context_of("ddl-clean", dry_run=dry_run))
    assert cluster.state(1) == ("lost" if goes and not dry_run else "pending")
    said = capsys.readouterr().out
    words = "would cancel" if dry_run else "cancelled"
    assert (f"{words} fake-scheduler job 1 (unit/train-1)" in said) is goes


def test_a_place_that_cannot_be_opened_keeps_nothing_else_from_being_cleaned(
    tmp_path, workspace, context_of, monkeypatch, capsys
):
    """The task fails all the same, and says which."""
    monkeypatch.delenv("AIRFLOW_CONN_GONE", raising=False)
    (workspace / "runs" / "digits" / ".removing-abc").mkdir(parents=True)
    store = FolderStore(tmp_path / "results")
    for number in (1, 2):
        (tmp_path / "model").write_text(f"model {number}")
        marker = {"dag_id": "digits", "training_id": f"digits-{number}", "keep": 1}
        done = publish({"model/m": tmp_path / "model"}, store, f"digits-{number}", marker=marker)
        point(store, "digits", LATEST, f"digits-{number}/{done.name}", {})
    results = {"s3://results": "gone", "s3://others": "gone", store.uri: ""}
    (task,) = clean_dag(results=results).tasks
    with pytest.raises(AirflowException, match="ConnectionInvalid: .*gone") as failed:
        task.execute(context_of("ddl-clean"))
    assert not isinstance(failed.value, AirflowFailException)  # Airflow may tell it the next time
    said = capsys.readouterr().out
    assert "s3://results is not cleaned: ConnectionInvalid: " in said
    assert "s3://others is not cleaned: ConnectionInvalid: " in said
    assert "removed half removed: " in said
    assert not list(workspace.glob("runs/digits/*"))
    assert "removed publication: " in said
