from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddl_airflow.links import ResultsLink, TensorBoardLink, TrainingLink, tensorboard
from ddl_airflow.site import training_of

RUN_ID = "manual__2026-11-20T20:15:00+00:00"
TI = SimpleNamespace(dag_id="mnist", run_id=RUN_ID)


@pytest.mark.parametrize("base", ["https://airflow.example.com", "https://example.com/airflow/"])
def test_training_is_a_tab_of_the_run(monkeypatch, base):
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", base)
    link = TrainingLink().get_link(None, ti_key=TI)
    run = "manual__2026-11-20T20%3A15%3A00%2B00%3A00"
    assert link == f"{base.rstrip('/')}/dags/mnist/runs/{run}/plugin/ddl-training"


@pytest.mark.parametrize(
    ("configured", "link"),
    [
        ("", None),
        ("https://board.example.com/x", "https://board.example.com/x"),
        ("http://localhost:6006", "http://localhost:6006"),
        ("javascript:alert(1)", None),
    ],
)
def test_link_to_tensorboard_is_the_sites(monkeypatch, configured, link):
    monkeypatch.setenv("AIRFLOW__DDL__TENSORBOARD_URL", configured)
    assert tensorboard() == link
    assert TensorBoardLink().get_link(None, ti_key=TI) == (link or "")


@pytest.mark.parametrize(
    ("uri", "bucket", "folder"),
    [("s3://models", "models", ""), ("s3://models/a/b c", "models", "a/b%20c/")],
)
def test_results_are_where_the_sites_browser_shows_them(
    workspace, monkeypatch, uri, bucket, folder
):
    monkeypatch.setenv("AIRFLOW__DDL__RESULTS_URL", "https://s/{bucket}?p={prefix}/")
    link = ResultsLink().get_link(SimpleNamespace(results={"uri": uri}), ti_key=TI)
    assert link == f"https://s/{bucket}?p={folder}{training_of('mnist', RUN_ID)}/"


def test_there_is_no_link_to_a_folder_nor_without_a_browser(monkeypatch):
    operator = SimpleNamespace(results={"uri": "s3://models"})
    assert ResultsLink().get_link(operator, ti_key=TI) == ""
    monkeypatch.setenv("AIRFLOW__DDL__RESULTS_URL", "https://s/{bucket}")
    operator.results["uri"] = "file:///models"
    assert ResultsLink().get_link(operator, ti_key=TI) == ""
