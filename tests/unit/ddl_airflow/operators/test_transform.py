from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.plan import TransformStep
from ddl_airflow.lineage.record import read_part, write_part
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.operators.transform import TransformOperator
from ddl_airflow.site import training_of
from ddl_airflow.steps.transform import Transform, first_row


@pytest.fixture
def layout(workspace, context_of):
    run = context_of("forming")["dag_run"]
    layout = RunLayout(workspace, "forming", training_of("forming", run.run_id))
    layout.create()
    layout.staged.mkdir()
    return layout


@pytest.fixture
def transform(layout):
    """transform(script, **settings) -> the operator, with the script in the run's code."""

    def make(script: str = "", **settings) -> TransformOperator:
        (layout.code / "export.py").write_text(textwrap.dedent(script))
        with DAG("forming", schedule=None):
            return TransformOperator(task_id="transform", step=TransformStep(**settings))

    return make


WRITES = """
    import os, sys
    folder = os.environ["RESULT_DIR"] + "/model"
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/saved_model.pb", "a") as file:
        file.write(" ".join(sys.argv[1:]) + os.environ.get("OMPI_COMM_WORLD_RANK", "") + ";")
"""


def test_own_commands_run_once_each_in_order_and_their_model_must_load(
    transform, layout, context_of
):
    commands = ["python export.py one", "python export.py two"]
    with pytest.raises(AirflowFailException, match="ModelRejected: .*model cannot be loaded"):
        transform(WRITES, commands=commands).execute(context_of("forming", 2))
    assert (layout.model / "saved_model.pb").read_text() == "one;two;"
    assert not (layout.kept / "lineage" / "transform.json").exists()
    assert (layout.logs / "transform" / "rank-0.log").is_file()  # not over the training's
    assert not (layout.logs / "rank-0.log").exists()


@pytest.mark.parametrize("linked", [False, True])
def test_a_model_of_an_earlier_try_is_not_taken_for_this_ones(
    transform, layout, context_of, linked
):
    write_part(layout, "train", {"result": {"wrote_model": False}})
    model = layout.result / "export" if linked else layout.model
    model.mkdir()
    (model / "saved_model.pb").touch()
    if linked:
        layout.model.symlink_to(model)
    # What was beside a model that an Estimator had exported there.
    besides = [layout.result / f"model.of-training{number}" for number in ("", "-2")]
    for beside in besides:
        beside.mkdir()
    with pytest.raises(AirflowFailException, match="wrote no SavedModel"):
        transform("print(1)", commands=["python export.py"]).execute(context_of("forming"))
    assert not any(map(os.path.lexists, (layout.model, *besides)))


def refuse(*_):
    raise PermissionError


@pytest.mark.parametrize("moved", [True, False, "by a killed try", "by another user", "never"])
def test_an_earlier_model_is_not_taken_where_the_training_has_other_files_there(
    transform, layout, context_of, monkeypatch, moved
):
    """It was moved from the folder of a time, where own commands export as Estimators do."""
    said = {"wrote_model": True, "wrote_saved_model": False, "metrics": {}, "measurements": []}
    write_part(layout, "train", {"result": said})
    aside = moved and moved != "never"
    of_training = layout.result / "model.of-training" if aside else layout.model
    for folder in {layout.model, of_training}:
        folder.mkdir()
    (of_training / "vocabulary.txt").touch()
    if moved == "by a killed try":  # while it removed what it had made
        (layout.model / "variables").mkdir()
    elif moved == "never":  # a try that failed once it had exported
        (layout.model / "1524000000").mkdir()
        (layout.model / "1524000000" / "saved_model.pb").write_text("of the try before")
    else:
        (layout.model / "saved_model.pb").write_text("of the try before")
    if moved == "by another user":
        monkeypatch.setattr(Path, "rename", refuse)
    taken = []
    monkeypatch.setattr(
        Transform,
        "_saved_model",
        lambda *_: {"there": taken.extend(sorted(layout.result.rglob("*.*")))},
    )
    writes = WRITES.replace("/model", "/model/1525000000")
    transform(writes, commands=["python export.py"]).execute(context_of("forming"))
    assert [str(path.relative_to(layout.result)) for path in taken] == [
        "model/1525000000/saved_model.pb",
        "model/vocabulary.txt",
    ]


@pytest.mark.parametrize("by_its_user", [True, False])
def test_a_model_that_is_closed_to_airflow_is_removed_by_its_user_or_the_step_fails(
    transform, layout, context_of, monkeypatch, by_its_user
):
    """As one of the ranks' user is, where the script has taken the group's rights away."""
    write_part(layout, "train", {"result": {"wrote_model": False}})
    layout.model.mkdir()
    (layout.model / "saved_model.pb").touch()
    monkeypatch.setattr("ddl_airflow.steps.transform.remove_tree", lambda _: None)
    said = "wrote no SavedModel"
    if not by_its_user:
        said = rf"model, of an earlier try, .* user id {os.geteuid()}: remove it"
        monkeypatch.setattr(Transform, "run_once", lambda *_: None)
    with pytest.raises(AirflowFailException, match=f"TransformError: .*{said}"):
        transform("print(1)", commands=["python export.py"]).execute(context_of("forming"))
    assert layout.model.exists() is not by_its_user


def test_what_is_mounted_in_an_earlier_model_is_not_emptied_by_the_ranks_user(
    transform, layout, context_of, mounted, tmp_path
):
    of_others = tmp_path / "of others"
    of_others.mkdir()
    (of_others / "only copy").touch()
    write_part(layout, "train", {"result": {"wrote_model": False}})
    mounted(of_others, layout.model / "assets")
    said = f"{layout.model}/assets is mounted in .*: unmount it, and clear transform"
    with pytest.raises(AirflowFailException, match=f"TransformError: {said}"):
        transform("print(1)", commands=["python export.py"]).execute(context_of("forming"))
    assert (of_others / "only copy").exists()


def test_whose_user_it_runs_as_is_said_whatever_trains(
    layout, context_of, write_manifest, tmp_path, monkeypatch, capsys
):
    """Slurm runs the training on other hosts, and none of what comes after it."""
    monkeypatch.setattr(Transform, "_saved_model", lambda *words: {})
    more = "launcher: {kind: slurm}\n"
    path = write_manifest(tmp_path / "dags", "forming", "python a.py ; python export.py", more)
    (layout.code / "export.py").write_text(textwrap.dedent(WRITES))
    write_part(layout, "stage_data", {})
    dag_from(load_manifest(path), path).get_task("transform").execute(context_of("forming"))
    said = "transform runs on this host as Airflow's own user: [ddl] run_ranks_as is not set"
    assert said in capsys.readouterr().out


def test_own_command_that_writes_no_model_fails(transform, context_of):
    with pytest.raises(AirflowFailException, match=r"TransformError: .*\$RESULT_DIR/model"):
        transform("print(1)", commands=["python export.py"]).execute(context_of("forming"))


def test_own_command_may_write_a_model_as_estimators_do(transform, layout, context_of):
    writes = WRITES.replace("/model", "/model/1525000000")
    with pytest.raises(AirflowFailException, match="ModelRejected: .*1525000000 cannot be loaded"):
        transform(writes, commands=["python export.py"]).execute(context_of("forming"))
    (layout.model / "1525000000" / "saved_model.pb").rename(layout.model / "saved_model.txt")
    with pytest.raises(AirflowFailException, match=r"model, but 1525000000, saved_model\.txt\. "):
        transform("print(1)", commands=["python export.py"]).execute(context_of("forming"))


def test_own_command_that_fails_ends_the_step(transform, layout, context_of):
    commands = ["python export.py", "python -c 'import sys; sys.exit(3)'", "touch after"]
    with pytest.raises(AirflowException, match="exited with code 3"):
        transform(WRITES, commands=commands).execute(context_of("forming"))
    assert not (layout.code / "after").exists()
    assert not (layout.kept / "lineage" / "transform.json").exists()


@pytest.mark.parametrize("script", ["raise SyntaxError('x')", "import no_such_module_here"])
def test_own_command_that_cannot_run_fails_at_once(transform, context_of, script):
    with pytest.raises(AirflowFailException):
        transform(script, commands=["python export.py"]).execute(context_of("forming"))


@pytest.mark.parametrize("tf1", [True, False])
def test_own_commands_know_which_tensorflow_they_are_for(transform, layout, context_of, tf1):
    script = """
        import sys
        found = [f for f in sys.meta_path if type(f).__module__.startswith("ddl_ops.tf1")]
        open("found", "w").write(str(len(found)))
    """
    task = transform(script, commands=["python export.py"], tf1=tf1)
    with pytest.raises(AirflowFailException, match="wrote no SavedModel"):
        task.execute(context_of("forming"))
    assert (layout.code / "found").read_text() == str(int(tf1))


def test_the_built_in_transform_knows_the_parameters_and_is_for_tensorflow_2(
    transform, layout, context_of, monkeypatch
):
    asked = {}
    run_once = Transform.run_once

    def watched(self, name, command, log_dir, env):
        asked.update(env)
        run_once(self, name, command, log_dir, env)

    monkeypatch.setattr(Transform, "run_once", watched)
    with pytest.raises(AirflowFailException, match="CheckpointMissing"):
        transform(tf1=True, parameters={"width": 3}).execute(context_of("forming"))
    assert asked["PARAM_WIDTH"] == "3"
    assert asked["RESULT_DIR"] == str(layout.result)
    assert "DDL_TF1" not in asked


def test_no_checkpoint_is_named_and_not_retried(transform, layout, context_of):
    with pytest.raises(AirflowFailException, match="CheckpointMissing: .*no checkpoint"):
        transform().execute(context_of("forming"))
    assert not layout.model.exists()


def test_a_model_of_the_training_itself_is_asked_where_there_is_no_checkpoint(
    transform, layout, context_of
):
    layout.model.mkdir()
    (layout.model / "saved_model.pb").write_text("no model")
    write_part(layout, "train", {"result": {"wrote_model": True}})
    with pytest.raises(AirflowFailException, match="ModelRejected: .*model cannot be loaded"):
        transform().execute(context_of("forming"))
    (layout.model / "1525000000").mkdir()
    (layout.model / "saved_model.pb").rename(layout.model / "1525000000" / "saved_model.pb")
    with pytest.raises(AirflowFailException, match="ModelRejected: .*1525000000 cannot be loaded"):
        transform().execute(context_of("forming"))
    write_part(layout, "train", {"result": {"wrote_model": False}})
    with pytest.raises(AirflowFailException, match="CheckpointMissing: .*but 1525000000"):
        transform().execute(context_of("forming"))


def test_a_model_of_an_earlier_try_is_not_that_of_a_training_that_wrote_logs_there(
    transform, layout, context_of
):
    """They are in model.of-training by now."""
    layout.model.mkdir()
    (layout.model / "saved_model.pb").write_text("no model")
    result = {"wrote_model": True, "wrote_saved_model": False}
    write_part(layout, "train", {"result": result})
    with pytest.raises(AirflowFailException, match="CheckpointMissing"):
        transform().execute(context_of("forming"))


def test_checkpoint_that_was_not_saved_is_named(transform, layout, context_of):
    for name in ("mnist_basegraph.meta", "mnist-10.index", "mnist-10.data-00000-of-00001"):
        (layout.result / name).write_text("")
    with pytest.raises(AirflowFailException, match=r"CheckpointMissing: .*20"):
        transform(checkpoint="20").execute(context_of("forming"))


def test_report_of_an_earlier_try_does_not_count(transform, layout, context_of):
    # This try's process ends before it reports: the old report must not be taken for its own.
    report = {"error": "of another try", "kind": "CheckpointMissing"}
    layout.transform_report.write_text(json.dumps(report))
    with pytest.raises(AirflowException, match="exited with code 2"):
        transform(checkpoint="no step").execute(context_of("forming"))


@pytest.mark.parametrize(
    "odd",
    [
        *({"accuracy": []}, {"accuracy": 10**400}, {"checkpoint": 1}, {"checkpoint_step": "x"}),
        *({"sample": ["x"]}, {"rows": "9"}, {"no_accuracy": {}}),
    ],
)
def test_a_report_that_is_not_ours_is_refused(transform, layout, context_of, monkeypatch, odd):
    def wrote(self, *_):
        layout.transform_report.write_text(json.dumps({"prediction": {}} | odd))

    monkeypatch.setattr(Transform, "run_once", wrote)
    with pytest.raises(AirflowException, match=r"TransformError: ddl/transform\.json"):
        transform().execute(context_of("forming"))
    assert not (layout.kept / "lineage" / "transform.json").exists()


def test_of_a_report_only_what_ours_says_goes_into_the_record(
    transform, layout, context_of, monkeypatch
):
    """A script writes in that folder: what other steps noted of the model is not its to say."""
    ours = {"framework": "keras", "tensorflow": "2.16.2", "base_graph": None}
    ours |= {"checkpoint": "model-3.keras", "checkpoint_step": 3, "signatures": {"predict": {}}}
    ours |= {"sample": "a.npz", "rows": 9, "prediction": {"class": [1]}, "labels": [1]}
    ours |= {"accuracy": 1.0, "no_accuracy": "", "warnings": [], "files": [], "seconds": 0.5}
    others = ("went_on_from", "goodput", "proof", "evaluation", "metrics", "transform")

    def wrote(self, *_):
        said = ours | dict.fromkeys(others, []) | {"no_accuracy": "x" * 99_999}
        layout.transform_report.write_text(json.dumps(said))

    monkeypatch.setattr(Transform, "run_once", wrote)
    transform().execute(context_of("forming"))
    kept = read_part(layout, "transform")["result"]
    assert kept == ours | {"no_accuracy": "x" * 10_000}


def test_a_checkpoint_may_have_a_name_that_tells_no_step(
    transform, layout, context_of, monkeypatch
):
    def wrote(self, *_):
        report = {"checkpoint": "model.keras", "checkpoint_step": None, "accuracy": None}
        layout.transform_report.write_text(json.dumps(report))

    monkeypatch.setattr(Transform, "run_once", wrote)
    made = transform().execute(context_of("forming"))
    assert (made["checkpoint"], made["checkpoint_step"]) == ("model.keras", None)


def test_on_kill_before_the_start_is_nothing(transform):
    transform().on_kill()


@pytest.mark.parametrize(
    ("prediction", "shown"),
    [
        (
            {"class_index": [3, 1], "scores": [[0.25] * 1000] * 2},
            "{'class_index': 3, 'scores': [0.25, 0.25, 0.25, 0.25, ...]}",
        ),
        ({"image": [[[[0.5] * 9] * 28] * 28]}, "{'image': [[...], [...], [...], [...], ...]}"),
        ({"mean": 0.5, "none": []}, "{'mean': 0.5, 'none': []}"),
        (None, "None"),
    ],
)
def test_the_log_has_one_short_line_of_what_the_model_answered(prediction, shown):
    assert first_row(prediction) == shown
