from __future__ import annotations

import json

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.lineage.production import PRODUCTION, point
from ddl_airflow.lineage.record import read_part, write_part
from ddl_airflow.operators.evaluate import EvaluateOperator
from ddl_airflow.site import training_of
from ddl_airflow.storage.filesystem import FolderStore


@pytest.fixture
def layout(workspace, context_of):
    """A training whose script reported its loss, and whose model was asked."""
    run = context_of("digits")["dag_run"]
    layout = RunLayout(workspace, "digits", training_of("digits", run.run_id))
    layout.create()
    write_part(layout, "train", {"result": {"metrics": {"loss": 0.25}}, "tries": {}})
    write_part(layout, "transform", {"result": {"accuracy": 0.9}, "tries": {}})
    return layout


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "results")


@pytest.fixture
def evaluate(layout, store, context_of):
    """evaluate(script, **settings) -> what the step returns."""

    def run(script="", **settings):
        if script:
            (layout.code / "evaluate.py").write_text(script)
            settings["command"] = "python evaluate.py"
        with DAG("digits", schedule=None):
            task = EvaluateOperator(
                task_id="evaluate", results=StoreReference(store.uri), **settings
            )
        return task.execute(context_of("digits"))

    return run


def test_a_good_model_goes_on_and_its_metrics_into_the_lineage(evaluate, layout):
    said = evaluate(metric="accuracy", minimum=0.9)
    assert said["metrics"] == {"accuracy": 0.9, "loss": 0.25}
    assert said["production"] is None
    assert "| accuracy | 0.9 |  |" in said["table"]
    part = read_part(layout, "evaluate")
    assert part["result"]["metrics"] == said["metrics"]
    assert part["result"]["evaluation"] == {
        **{"metric": "accuracy", "minimum": 0.9, "maximum": None, "production": None}
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"metric": "accuracy", "minimum": 0.95}, "is 0.9, 0.05 below the minimum 0.95. Nothing"),
        ({"metric": "loss", "maximum": 0.2}, "is 0.25, 0.05 above the maximum 0.2. Nothing"),
        ({"metric": "f1", "minimum": 0}, "nobody measured 'f1'. There is: accuracy, loss."),
    ],
)
def test_a_model_that_is_not_good_enough_ends_the_run(evaluate, layout, settings, words):
    with pytest.raises(AirflowFailException, match=words):
        evaluate(**settings)
    assert not (layout.kept / "lineage" / "evaluate.json").exists()


@pytest.mark.parametrize(
    ("serves", "settings", "worse"),
    [
        ({"accuracy": 0.91}, {"metric": "accuracy", "minimum": 0.5}, "0.01 worse than the 0.91"),
        ({"accuracy": 0.9}, {"metric": "accuracy"}, None),
        ({"loss": 0.3}, {"metric": "loss", "maximum": 1}, None),
        ({"loss": 0.2}, {"metric": "loss", "maximum": 1}, "0.05 worse than the 0.2"),
        ({"other": 1}, {"metric": "accuracy"}, None),
    ],
)
def test_production_is_a_bound_where_it_is_asked_for(evaluate, store, serves, settings, worse):
    point(store, "digits", PRODUCTION, "digits-1", serves)
    assert evaluate(**settings)["production"] == serves
    if worse is None:
        evaluate(**settings, not_worse=True)
    else:
        with pytest.raises(AirflowFailException, match=worse):
            evaluate(**settings, not_worse=True)


MEASURES = """
import json, os
assert os.path.basename(os.environ["MODEL"]) == "model"
measured = {"f1": float(os.environ["PARAM_F1"]), "accuracy": 0.99}
json.dump(measured, open(os.environ["EVALUATION"], "w"))
"""


def test_the_manifests_own_command_measures(evaluate):
    said = evaluate(MEASURES, metric="f1", minimum=0.5, parameters={"f1": 0.75})
    assert said["metrics"] == {"accuracy": 0.99, "f1": 0.75, "loss": 0.25}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("pass", "wrote no \\$EVALUATION"),
        ("import os; open(os.environ['EVALUATION'], 'w').write('[1]')", "holds no JSON object"),
        ("import os; open(os.environ['EVALUATION'], 'w').write('{\"a\": \"b\"}')", "JSON object"),
    ],
)
def test_a_command_that_measures_nothing_is_told_what_to_write(evaluate, script, words):
    with pytest.raises(AirflowFailException, match=words):
        evaluate(script, metric="accuracy", minimum=0)


def test_nan_is_never_good_enough(evaluate):
    script = "import json, os; json.dump({'f1': float('nan')}, open(os.environ['EVALUATION'], 'w'))"
    with pytest.raises(AirflowFailException, match="f1 is nan"):
        evaluate(script, metric="f1", minimum=0)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_decides_nothing_and_is_no_number_is_left_out(evaluate, layout, value, capsys):
    measured = f"{{'f1': float('{value}'), 'f2': 1}}"
    script = f"import json, os; json.dump({measured}, open(os.environ['EVALUATION'], 'w'))"
    said = evaluate(script, metric="accuracy", minimum=0.5)
    assert said["metrics"] == {"accuracy": 0.9, "f2": 1.0, "loss": 0.25}
    json.dumps(said, allow_nan=False)  # as XCom wants it
    assert read_part(layout, "evaluate")["result"]["metrics"] == said["metrics"]
    assert f"metric f1 is {value} and is left out" in capsys.readouterr().out


def test_without_bounds_it_only_shows(evaluate, layout):
    assert json.loads(json.dumps(evaluate()))["metrics"] == {"accuracy": 0.9, "loss": 0.25}
