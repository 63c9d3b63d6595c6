from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.metrics import Measurement, deciding
from ddl_airflow.core.plan import EvaluateStep, StoreReference
from ddl_airflow.lineage.production import PRODUCTION, point
from ddl_airflow.lineage.record import evaluated, read_part, write_part
from ddl_airflow.operators.evaluate import EvaluateOperator
from ddl_airflow.plugin.training import read_measurements
from ddl_airflow.site import training_of
from ddl_airflow.storage.filesystem import FolderStore


@pytest.fixture
def layout(workspace, context_of):
    """A training whose script reported its loss, and whose model was asked."""
    run = context_of("digits")["dag_run"]
    layout = RunLayout(workspace, "digits", training_of("digits", run.run_id))
    layout.create()
    told(layout, ("loss", 0.25, "output"))
    sample = {"accuracy": 0.9, "sample": "digits.npz", "rows": 40}
    write_part(layout, "transform", {"result": sample, "tries": {}})
    return layout


def told(layout, *measured):
    """What train has kept: metric, value and source of each measurement."""
    dumped = [Measurement(*one).dump() for one in measured]
    metrics = {metric: value for metric, value, *_ in measured if math.isfinite(value)}
    write_part(
        layout, "train", {"result": {"metrics": metrics, "measurements": dumped}, "tries": {}}
    )


def unlabelled(layout):
    why = {"accuracy": None, "no_accuracy": "sample digits.npz has no labels"}
    write_part(layout, "transform", {"result": why, "tries": {}})


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "results")


@pytest.fixture
def evaluate(layout, store, context_of):
    """evaluate(script, name, **settings) -> what the step of that name returns."""

    def run(script="", name="evaluate", **settings):
        if script:
            (layout.code / f"{name}.py").write_text(script)
            settings["command"] = f"python {name}.py"
        with DAG("digits", schedule=None):
            task = EvaluateOperator(
                task_id=name, step=EvaluateStep(results=StoreReference(store.uri), **settings)
            )
        return task.execute(context_of("digits"))

    return run


AT_ONCE = """
import json, os, pathlib, time
json.dump({{"{name}_accuracy": {value}}}, open(os.environ["EVALUATION"], "w"))
pathlib.Path("{name}").touch()
until = time.monotonic() + 60
while not pathlib.Path("{other}").exists() and time.monotonic() < until:
    time.sleep(0.01)
"""


def test_two_at_once_do_not_read_each_others_numbers(evaluate, layout):
    """As in `train >> [quick, thorough] >> upload`."""
    bounds = {"minimum": 0.9}
    with ThreadPoolExecutor() as pool:
        quick, thorough = (
            pool.submit(
                evaluate,
                AT_ONCE.format(name=name, other=other, value=value),
                name,
                metric=f"{name}_accuracy",
                **bounds,
            )
            for name, other, value in (("quick", "thorough", 0.5), ("thorough", "quick", 0.97))
        )
        with pytest.raises(AirflowFailException, match="QualityTooLow: quick_accuracy is 0.5"):
            quick.result()
        assert thorough.result()["metrics"]["thorough_accuracy"] == 0.97
    logs = sorted(path.parent.name for path in layout.logs.glob("evaluate*/*"))
    assert len(set(logs)) == 2  # these are published


def test_the_record_has_what_each_has_measured(evaluate, layout):
    """Of several only the last one's was there: production had none to compare the next with."""
    write = "import json, os; json.dump(%s, open(os.environ['EVALUATION'], 'w'))"
    evaluate(write % {"f1": 0.8, "accuracy": 0.7}, "quick", metric="f1", minimum=0.5)
    said = evaluate(write % {"recall": 0.6, "accuracy": 0.75}, "a", metric="recall", minimum=0.5)
    assert "f1" not in said["metrics"]
    known = evaluated(layout)["result"]
    metrics = {"f1": 0.8, "recall": 0.6, "accuracy": 0.75, "loss": 0.25}
    assert known["metrics"] == metrics and known["evaluation"]["metric"] == "recall"
    told = [Measurement.load(one) for one in known["measurements"]]
    assert deciding(told, "f1", "command").value == 0.8
    assert deciding(told, "accuracy", "sample").value == 0.9
    shown = {one["metric"]: one["value"] for one in read_measurements(layout, {})}
    assert shown == metrics
    # One that is done again takes back its own alone.
    with pytest.raises(AirflowFailException, match="QualityTooLow"):
        evaluate(write % {"recall": 0.4}, "a", metric="recall", minimum=0.5)
    assert evaluated(layout)["result"]["metrics"] == {"f1": 0.8, "accuracy": 0.7, "loss": 0.25}


@pytest.mark.parametrize("script", ["", "print('measured nothing')"])
def test_whose_user_its_command_runs_as_is_said_where_it_has_one(evaluate, script, capsys):
    with suppress(AirflowFailException):
        evaluate(script)
    said = "evaluate runs on this host as Airflow's own user: [ddl] run_ranks_as is not set"
    assert (said in capsys.readouterr().out) is bool(script)


def test_a_good_model_goes_on_and_its_metrics_into_the_lineage(evaluate, layout):
    said = evaluate(metric="accuracy", minimum=0.9)
    assert said["metrics"] == {"accuracy": 0.9, "loss": 0.25}
    assert said["production"] is None
    assert said["table"].splitlines() == [
        "| metric | this model | production | measured on | asked for |",
        "| --- | --- | --- | --- | --- |",
        "| `accuracy` | 0.9 |  | `sample digits.npz, 40 rows` | at least 0.9 |",
        "| `loss` | 0.25 |  | `the output` |  |",
        "",
        "No model is in production yet.",
    ]
    part = read_part(layout, "evaluate")
    assert part["result"]["metrics"] == said["metrics"]
    assert part["result"]["evaluation"] == {
        **{"metric": "accuracy", "minimum": 0.9, "maximum": None, "production": None},
        "measured": Measurement("accuracy", 0.9, "sample", "digits.npz", 40).dump(),
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"metric": "accuracy", "minimum": 0.95},
            r"0.9, 0.05 below the minimum 0.95 \(sample digits.npz, 40 rows\). Nothing was publ",
        ),
        (
            {"metric": "loss", "maximum": 0.2},
            r"is 0.25, 0.05 above the maximum 0.2 \(the output\). Nothing was published",
        ),
        (
            {"metric": "f1", "minimum": 0},
            r"nobody measured 'f1'. There is: accuracy \(sample digits.npz, 40 rows\), loss \(the ",
        ),
        (
            {"metric": "loss", "source": "script", "maximum": 1},
            r"nobody measured 'loss' by source script. There is: .*loss \(the output\)",
        ),
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


def test_training_batches_decide_only_where_that_is_asked_for(evaluate, layout, capsys):
    """The one that Keras's progress callback reports, beside a sample without labels."""
    unlabelled(layout)
    told(layout, ("accuracy", 0.9921, "training"))
    with pytest.raises(AirflowFailException, match="EvaluationInvalid") as caught:
        evaluate(metric="accuracy", minimum=0.5)
    assert (
        "evaluation.metric: accuracy is 0.9921 on training batches, which the model has learnt: "
        "that decides nothing. Name a sample with labels in transform.sample (sample digits.npz "
        "has no labels), write it in evaluation.command, or report it from held-out data "
        "(ddl.report, or fit() for val_accuracy). evaluation.source: training takes it all "
        "the same."
    ) in str(caught.value)
    told(layout, ("accuracy", 0.9921, "training"), ("val_accuracy", 0.75, "validation"))
    with pytest.raises(AirflowFailException, match="or take metric: val_accuracy, which is 0.75"):
        evaluate(metric="accuracy", minimum=0.5)
    said = evaluate(metric="val_accuracy", minimum=0.5)
    assert "| `accuracy` | 0.9921 |  | `training batches` |" in said["table"]
    bounds = {"minimum": 0.5, "maximum": 1, "not_worse": True}
    said = evaluate(metric="accuracy", source="training", **bounds)
    asked = "at least 0.5 and at most 1 and no worse than production"
    row = f"| `accuracy` | 0.9921 |  | `training batches` | {asked} |"
    assert said["table"].splitlines()[2] == row
    assert "accuracy decides, as measured on training batches" in capsys.readouterr().out
    told(layout, ("val_accuracy", 0.75, "validation"))
    with pytest.raises(AirflowFailException, match="nobody measured 'accuracy'.*take metric: val_"):
        evaluate(metric="accuracy", minimum=0.5)


def test_no_older_value_of_another_source_decides(evaluate, layout):
    unlabelled(layout)
    told(layout, ("accuracy", 0.75, "script"), ("accuracy", 0.9921, "training"))
    with pytest.raises(AirflowFailException, match="Before it, 0.75 came from the script: ") as one:
        evaluate(metric="accuracy", minimum=0.5)
    assert "evaluation.source: script takes that" in str(one.value)
    with pytest.raises(AirflowFailException, match="is 0.75, 0.05 below .* \\(the script\\)"):
        evaluate(metric="accuracy", source="script", minimum=0.8)
    told(layout, ("accuracy", 0.5, "script"), ("accuracy", math.nan, "output"))
    with pytest.raises(AirflowFailException, match="accuracy is NaN \\(the output\\)"):
        evaluate(metric="accuracy", minimum=0.25)
    # Nor does the sample's, where the command measures it as well.
    said = evaluate(MEASURES, metric="accuracy", minimum=0.5, parameters={"f1": 0.75})
    assert "| `accuracy` | 0.99 |  | `evaluation.command` |" in said["table"]


def test_a_training_of_an_earlier_version_has_to_be_done_again(evaluate, layout):
    write_part(layout, "train", {"result": {"metrics": {"f1": 0.5}}, "tries": {}})
    with pytest.raises(AirflowFailException, match="f1 is of a training of an earlier version"):
        evaluate(metric="f1", minimum=0.25)
    assert evaluate(metric="accuracy", minimum=0.5)["metrics"] == {"f1": 0.5, "accuracy": 0.9}


@pytest.mark.parametrize(
    ("measured", "compared"),
    [
        (("accuracy", 0.99, "sample", "digits.npz", 7), True),
        (("accuracy", 0.99), True),
        (("accuracy", 0.99, "sample", "other.npz", 40), False),
        (("accuracy", 0.99, "training"), False),
    ],
)
def test_production_is_compared_by_what_was_measured_on_the_same(
    evaluate, store, measured, compared, capsys
):
    """A pointer of before, that knows no sources, is compared as it was."""
    one = Measurement(*measured)
    dumped = [one.dump()] if one.source else []
    point(store, "digits", PRODUCTION, "digits-1", {"accuracy": 0.99}, measurements=dumped)
    settings = {"metric": "accuracy", "minimum": 0.5, "not_worse": True}
    if compared:
        with pytest.raises(AirflowFailException, match="0.09 worse than the 0.99"):
            evaluate(**settings)
        return
    said = evaluate(**settings)
    assert f"| `accuracy` | 0.9 | 0.99 (`{one.measured_on}`) |" in said["table"]
    told = f"here it is of sample digits.npz, 40 rows, there of {one.measured_on}"
    assert f"accuracy is not compared with that of the model in production: {told}" in (
        capsys.readouterr().out
    )


def test_names_that_a_training_chose_are_text_in_the_form(evaluate, layout):
    """And no links, which Markdown makes of bare addresses, too."""
    odd = "a|b [x](http://y) <b>`c`\n_d_"
    told(
        layout,
        (odd, 0.5, "script"),
        ("a\\|b", 1.5, "script"),
        ("www.example.com", 0.25, "sample", "a@b.example", 1),
    )
    rows = evaluate()["table"].splitlines()
    shown = r"``a\|b [x](http://y) <b>`c` _d_``"
    assert f"| {shown} | 0.5 |  | `the script` |  |" in rows
    assert r"| `a\ \|b` | 1.5 |  | `the script` |  |" in rows  # an escape that is escaped is none
    assert "| `www.example.com` | 0.25 |  | `sample a@b.example, 1 rows` |  |" in rows
    assert len(rows) == 8


MEASURES = """
import json, os
assert os.path.basename(os.environ["MODEL"]) == "model"
measured = {"f1": float(os.environ["PARAM_F1"]), "accuracy": 0.99}
json.dump(measured, open(os.environ["EVALUATION"], "w"))
"""


def test_the_manifests_own_command_measures(evaluate):
    said = evaluate(MEASURES, metric="f1", minimum=0.5, parameters={"f1": 0.75})
    assert said["metrics"] == {"accuracy": 0.99, "f1": 0.75, "loss": 0.25}


def test_a_whole_number_keeps_all_its_digits(evaluate):
    """Up to those that Airflow's messages, as XCom, can have as one."""
    told = {"accuracy": 0.75, "rows": 2**53 + 1, "none": True, "flops": 10**20}
    said = evaluate(MANY.format(told), metric="accuracy", minimum=0.5)["metrics"]
    assert (said["rows"], said["none"], said["flops"]) == (2**53 + 1, 1.0, 1e20)
    assert type(said["flops"]) is float


MANY = "import json, os; json.dump({}, open(os.environ['EVALUATION'], 'w'))"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("pass", "wrote no \\$EVALUATION"),
        ("import os; open(os.environ['EVALUATION'], 'w').write('[1]')", "holds no JSON object"),
        ("import os; open(os.environ['EVALUATION'], 'w').write('{\"a\": \"b\"}')", "JSON object"),
        (MANY.format({str(n): 1 for n in range(101)}), "it has 101, and at most 100 are kept"),
        (MANY.format({"a" * 201: 1}), "'a{50}'... is too long for a name"),
        (MANY.format({"\ud800": 1}), "is no UTF-8"),
        (MANY.format({"a": 10**400}), "too large"),
    ],
)
def test_a_command_that_measures_nothing_is_told_what_to_write(evaluate, script, words):
    with pytest.raises(AirflowFailException, match=words):
        evaluate(script, metric="accuracy", minimum=0)


def test_nan_is_never_good_enough(evaluate):
    script = "import json, os; json.dump({'f1': float('nan')}, open(os.environ['EVALUATION'], 'w'))"
    with pytest.raises(AirflowFailException, match="f1 is NaN"):
        evaluate(script, metric="f1", minimum=0)


@pytest.mark.parametrize(
    ("value", "word"), [("nan", "NaN"), ("inf", "Infinity"), ("-inf", "-Infinity")]
)
def test_what_decides_nothing_and_is_no_number_is_named(evaluate, layout, value, word):
    measured = f"{{'f1': float('{value}'), 'f2': 1}}"
    script = f"import json, os; json.dump({measured}, open(os.environ['EVALUATION'], 'w'))"
    said = evaluate(script, metric="accuracy", minimum=0.5)
    assert said["metrics"] == {"accuracy": 0.9, "f2": 1.0, "loss": 0.25}
    json.dumps(said, allow_nan=False)  # as XCom wants it
    assert f"| `f1` | {word} |" in said["table"]
    result = read_part(layout, "evaluate")["result"]
    assert result["metrics"] == said["metrics"]
    json.dumps(result, allow_nan=False)
    assert {"metric": "f1", "value": word, "source": "command"} in result["measurements"]


def test_without_bounds_it_only_shows(evaluate, layout):
    assert json.loads(json.dumps(evaluate()))["metrics"] == {"accuracy": 0.9, "loss": 0.25}
