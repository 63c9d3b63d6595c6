from __future__ import annotations

import pytest
from airflow.sdk.exceptions import AirflowFailException

from ddl_airflow.lineage.production import LATEST, point
from ddl_airflow.operators.clean import clean_dag
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import publish


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
    with pytest.raises(AirflowFailException, match="ConnectionInvalid: .*gone"):
        task.execute(context_of("ddl-clean"))
    said = capsys.readouterr().out
    assert "s3://results is not cleaned: ConnectionInvalid: " in said
    assert "s3://others is not cleaned: ConnectionInvalid: " in said
    assert "removed half removed: " in said
    assert not list(workspace.glob("runs/digits/*"))
    assert "removed publication: " in said
