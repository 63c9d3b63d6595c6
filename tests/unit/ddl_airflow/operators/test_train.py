from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import socket
import sys
import textwrap
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from datetime import timedelta

import pytest
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    TaskDeferred,
)
from airflow.sdk.execution_time import macros
from airflow.sdk.execution_time.comms import TaskStatesResult

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.cancellations import cancellations_in
from ddl_airflow.core.errors import LaunchError, SettingInvalid
from ddl_airflow.core.job import JobHandle, StartedJob
from ddl_airflow.core.layout import RunLayout, cancellations
from ddl_airflow.core.plan import StageDataStep, StoreReference, TrainStep
from ddl_airflow.launchers.base import cancel_noted
from ddl_airflow.launchers.processes import marked
from ddl_airflow.lineage.record import (
    SO_FAR,
    begin_training,
    beginnings,
    fix_run,
    has_part,
    measured,
    read_part,
    write_part,
)
from ddl_airflow.operators.base import layout_of
from ddl_airflow.operators.stage import StageDataOperator
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.site import training_of
from ddl_airflow.steps.job import ScheduledJob, cancel_all_noted, kept_job
from ddl_airflow.steps.preemptions import Preemptions
from ddl_airflow.storage.filesystem import alone_in, holder_of, lock_of
from ddl_airflow.triggers.experiment import ExperimentTrigger
from tests.limits import within
from tests.unit.ddl_airflow.conftest import RUN_ID, FakeScheduler


@pytest.fixture
def layout(workspace, context_of):
    run = context_of("training")["dag_run"]
    layout = RunLayout(workspace, "training", training_of("training", run.run_id))
    layout.create()
    return layout


@pytest.fixture
def train(layout):
    """train(script, **settings) -> the operator, with the script in the run's code."""

    def make(script: str, **settings) -> TrainOperator:
        (layout.code / "train.py").write_text(textwrap.dedent(script))
        # Most scripts here train nothing.
        usual = {"command": "python train.py", "nodes": 2, "distribution": "independent"}
        of_step = {one.name for one in fields(TrainStep)}
        asked = {name: value for name, value in settings.items() if name in of_step}
        others = {name: value for name, value in settings.items() if name not in of_step}
        with DAG("training", schedule=None):
            return TrainOperator(task_id="train", step=TrainStep(**usual | asked), **others)

    return make


def job_of(task, context):
    """What the task asks a launcher to run."""
    return task.work(task.asked(), task._context_of(layout_of(context), context))._job_of()


SCRIPT = """
    import os
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    assert os.getcwd() == os.environ["MODEL_DIR"]
    print("step 5 loss= 0.2" + rank)
    with open(os.environ["RESULT_DIR"] + "/by-" + rank, "w") as file:
        file.write(os.environ["TRAINING_ID"] + " " + os.environ["LEARNER_ID"])
"""
CANARY = "canary7secretOfAParameter"
METRICS = [{"name": "step", "regex": r"step (\d+)"}, {"name": "loss", "regex": r"loss= (\S+)"}]


FINDS = """\
import os, sys
folder = os.environ["CHECKPOINT_DIR"]
print(len(os.listdir(folder)), "found")
open(folder + "/step-1", "w").close()
sys.exit(sys.argv[1:] == ["fails"])
"""


def test_hosts_are_told_what_the_site_keeps_of_data(train, layout, context_of, monkeypatch):
    task, context = train("1"), context_of("training")
    assert job_of(task, context).cache_bytes is None
    monkeypatch.setenv("AIRFLOW__DDL__CACHE_SIZE", "1Gi")
    assert (job := job_of(task, context)).cache_bytes == 2**30 and job.cache == layout.cache
    monkeypatch.setenv("AIRFLOW__DDL__CACHE_SIZE", "much")
    with pytest.raises(SettingInvalid, match=r"\[ddl\] cache_size: .*much"):
        job_of(task, context)


@pytest.fixture
def staged(layout, tmp_path, train, context_of):
    """staged(try_number, max_tries, fails=, script=) -> what stage_data and then train's script
    found.
    """
    (tmp_path / "input").mkdir()
    (tmp_path / "input" / "a").write_text("1")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(FINDS)
    with DAG("training", schedule=None):
        stage = StageDataOperator(
            task_id="stage_data",
            step=StageDataStep(
                dataset=StoreReference((tmp_path / "input").as_uri()),
                code=tmp_path / "scripts",
                commands=["python train.py"],
            ),
        )

    def run(try_number: int, max_tries: int = 0, fails: bool = False, script: str = FINDS) -> str:
        context = context_of("training", try_number, max_tries)
        context["dag_run"].clear_number = max_tries
        stage.execute(context)
        (layout.logs / "rank-0.log").unlink(missing_ok=True)
        task = train(script, nodes=1, command="python train.py" + " fails" * fails)
        context = context_of("training", 2)  # went on after a first try
        if fails:
            with pytest.raises(AirflowException, match="code 1"):
                task.execute(context)
        else:
            task.execute(context)
        return (layout.logs / "rank-0.log").read_text()

    return run


def test_a_run_made_again_under_its_id_is_another_training(staged):
    """Deleted and triggered with the same run id: new data and code, and no old checkpoints."""
    assert staged(1) == "0 found\n"
    assert staged(1) == "0 found\n"
    # Its first try came to nothing before it had begun.
    assert staged(2) == "0 found\n"
    assert staged(2, 1) == "1 found\n"  # cleared


def test_checkpoints_of_other_data_are_not_gone_on_with(staged, layout, tmp_path):
    """The training wrote its last one, and failed; then data changed, and all was cleared."""
    assert staged(1, fails=True) == "0 found\n"
    assert staged(2, 1, fails=True) == "1 found\n"
    (tmp_path / "input" / "a").write_text("2")
    assert staged(3, 2, fails=True) == "0 found\n"
    assert (layout.replaced / "result" / "checkpoints" / "step-1").exists()
    assert staged(4, 3) == "1 found\n"


def test_a_note_that_a_crash_of_the_host_left_empty_keeps_nobody_from_going_on(staged, layout):
    assert staged(1, fails=True) == "0 found\n"
    (layout.kept / "training.json").write_bytes(b"")
    assert staged(2, 1) == "1 found\n"


def test_it_is_kept_what_made_the_checkpoints_that_a_training_goes_on_from(
    staged, layout, tmp_path
):
    """It failed after some epochs, and the script was mended, twice."""

    def went_on_from():
        return [one["code"] for one in read_part(layout, "train")["result"].get("went_on_from", ())]

    def code():
        return read_object(layout.kept / "run.json", layout.workspace)["made_of"]["code"]

    codes, script = [], tmp_path / "scripts" / "train.py"
    for number in range(3):
        script.write_text(f"{FINDS}# {number}\n")
        staged(1 + number, number, fails=number < 2)
        codes.append(code())
    assert went_on_from() == codes[:2] and len({*codes}) == 3
    script.write_text(f"{FINDS}# {0}\n")
    staged(4, 3)
    assert went_on_from() == codes[1:]
    # Where nothing was left there was nothing to go on from.
    script.write_text(FINDS)
    (layout.checkpoints / "step-1").unlink()
    assert staged(5, 4) == "0 found\n" and went_on_from() == []
    # Nor of other data.
    script.write_text(f"{FINDS}# 4\n")
    (tmp_path / "input" / "a").write_text("2")
    assert staged(6, 5) == "0 found\n" and went_on_from() == []


GOES_ON = """\
import os
folder = os.environ["EXPERIMENT_DIR"]
os.makedirs(folder, exist_ok=True)
print(len(os.listdir(folder)), "found")
open(folder + "/" + os.environ["TRAINING_ID"], "w").close()
"""


@pytest.fixture
def in_experiment(workspace, tmp_path, context_of):
    """in_experiment(number, data, script=, **run) -> what the record has of the experiment."""
    (tmp_path / "scripts").mkdir()

    def run(number, data, script=GOES_ON, experiment="wide", **more):
        (tmp_path / "scripts" / "train.py").write_text(script)
        (tmp_path / data).mkdir(exist_ok=True)
        if more.get("try_number", 1) == 1:  # another fingerprint each time
            (tmp_path / data / "a").write_text(data)
        with DAG("training", schedule=None):
            dataset = StoreReference((tmp_path / data).as_uri())
            step = StageDataStep(
                dataset=dataset, code=tmp_path / "scripts", commands=["python train.py"]
            )
            stage = StageDataOperator(task_id="stage_data", step=step)
            step = TrainStep(command="python train.py", nodes=1, distribution="independent")
            train = TrainOperator(task_id="train", step=step)
        context = context_of("training", experiment_id=experiment, **more)
        context["dag_run"].run_id = f"manual__{number}"
        layout = layout_of(context)
        stage.execute(context)
        train.execute(context)
        told = read_part(layout, "train")["result"]
        trainings = {training_of("training", f"manual__{n}"): n for n in range(9)}
        others = [
            (trainings[one["training_id"]], one["uri"].rpartition("/")[2])
            for one in told.get("went_on_from", ())
        ]
        return others, told.get("went_on_from_is_whole")

    return run


def test_it_is_kept_who_trained_in_the_experiment_before(in_experiment, workspace):
    """With data that turn out to be bad, long after others have gone on from its weights."""
    assert in_experiment(1, "bad") == ([], True)
    assert in_experiment(2, "good") == ([(1, "bad")], True)
    assert in_experiment(3, "good", "raise SystemExit") == ([(1, "bad"), (2, "good")], True)
    assert in_experiment(4, "good", experiment="narrow") == ([], True)
    assert in_experiment(4, "good", experiment=None) == ([], None)
    # Cleared with other data: the experiment stays.
    assert in_experiment(2, "better") == ([(1, "bad"), (2, "good"), (3, "good")], True)
    # Removed, it starts anew.
    shutil.rmtree(workspace / "experiments" / "wide")
    assert in_experiment(5, "good") == ([], True)
    note = workspace / "experiments" / ".trainings" / "wide.json"
    for said in ("{", '{"trainings": [{"training_id": 5}], "whole": true}'):
        note.write_text(said)
        assert in_experiment(6, "good") == ([], False)
        assert in_experiment(7, "bad") == ([(6, "good")], False)
    note.unlink()  # as an earlier version of ours left it
    assert in_experiment(8, "good") == ([], False)


def test_who_goes_on_with_the_experiment_of_one_training_names_that(in_experiment, workspace):
    in_experiment(1, "bad", experiment=None)
    own = training_of("training", "manual__1")
    assert in_experiment(2, "good", experiment=own) == ([(1, "bad")], False)
    assert in_experiment(3, "good", experiment=own)[0] == [(1, "bad"), (2, "good")]


def test_who_has_an_experiment_of_its_own_names_who_came_to_it(in_experiment):
    """It fails; another goes on from its weights; and it is tried again."""
    own = training_of("training", "manual__1")
    script = GOES_ON + "raise SystemExit(len(os.listdir(folder)) < 2)"
    with pytest.raises(AirflowException):
        in_experiment(1, "good", script, experiment=None)
    in_experiment(2, "bad", experiment=own)
    again = {"try_number": 2, "max_tries": 1, "experiment": None}
    assert in_experiment(1, "good", script, **again) == ([(2, "bad")], False)


@pytest.mark.parametrize("told", [{}, {"went_on_from_is_whole": False}])
def test_checkpoints_of_another_workspace_may_be_of_an_experiment_that_nobody_noted(layout, told):
    """Restored where the experiment itself is not, and gone on with there by others."""
    layout = replace(layout, experiment_id="wide")
    fix_run(layout, "manual__1", MADE_OF, {}, data={"uri": "s3://bucket/good"})
    bad = {**MADE_OF, "training_id": "training-of-bad", "dataset": "sha256:bad", "uri": "s3://bad"}
    begin_training(layout, anew=False)
    begin_training(layout, anew=False, brought={"went_on_from": [bad, MADE_OF], **told})
    assert beginnings(layout, time.time()) == {
        "went_on_from": [bad],
        "went_on_from_is_whole": False,
    }
    layout.experiment.mkdir(parents=True)
    (layout.experiment / "model").touch()
    other = replace(layout, training_id="training-other")
    other.create()
    fix_run(other, "manual__2", MADE_OF, {}, data={"uri": "s3://bucket/good"})
    begin_training(other, anew=False)
    told = beginnings(other, time.time())
    assert told["went_on_from"][0] == bad and told["went_on_from_is_whole"] is False


MADE_OF = {"dataset": "sha256:good", "code": "sha256:c", "manifest": "sha256:m", "parameters": {}}


@pytest.mark.parametrize("is_new", [True, False])
def test_who_waited_in_a_queue_went_on_from_those_who_did_not(
    scheduled, cluster, context_of, workspace, is_new
):
    """A scheduler lets a later training of the experiment train first."""

    def training(number):
        context = context_of("training", experiment_id="wide")
        context["dag_run"].run_id = f"manual__{number}"
        layout = layout_of(context)
        layout.create()
        made_of = {**MADE_OF, "dataset": f"sha256:{number}"}
        fix_run(layout, f"manual__{number}", made_of, {}, data={"uri": f"s3://{number}"})
        layout.code.mkdir(exist_ok=True)
        (layout.code / "train.py").touch()
        return context, layout

    def end(number, context, layout, wish, began):
        for path in layout.records(1, 0).glob("rank-*.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "started": began}))
        event = ended(wish.trigger)
        layout.experiment_copy.mkdir(parents=True, exist_ok=True)
        (layout.experiment / f"by-{number}").touch()
        scheduled.execute_complete(context, event)
        told = read_part(layout, "train")["result"]
        assert told["went_on_from_is_whole"]
        return [one["uri"] for one in told.get("went_on_from", ())]

    experiment = workspace / "experiments" / "wide"
    first, second, third = (training(number) for number in (1, 2, 3))
    first_wish = deferred(scheduled, first[0])
    experiment.mkdir(parents=True, exist_ok=True)
    if not is_new:
        (experiment / "model").touch()
    second_wish = deferred(scheduled, second[0])
    cluster.set(2, "succeeded")
    assert end(2, *second, second_wish, time.time()) == ["s3://1"]
    cluster.set(1, "succeeded")
    began = time.time()
    # The next one comes as soon as it may, before what the first has left is looked at.
    deferred(scheduled, third[0])
    assert end(1, *first, first_wish, began) == ["s3://2"]


TELLS = """\
import os, sys
with open(os.environ["DDL_PROGRESS"], "a") as file:
    file.write('{"test_accuracy": 0.99, "source": "script"}\\n')
sys.exit(1)
"""


@pytest.mark.parametrize("left_on_a_host", [False, True])
def test_what_a_training_told_that_left_nothing_is_not_said_of_the_next(
    staged, layout, left_on_a_host
):
    """A script that measures the model, and fails; mended, it measures no more."""

    def told():
        write_part(layout, "transform", {"result": {}, "tries": {"transform": 1}})
        return {one.metric: one.value for one in measured(layout)}

    staged(1, fails=True, script=TELLS)
    if left_on_a_host:  # which shares no workspace, and was silent when the ranks ended
        (layout.state / "try-1").mkdir()
        (layout.state / "try-1" / "placed").write_text("gpu-1\n")
    staged(2, 1, script="")
    assert told() == ({"test_accuracy": 0.99} if left_on_a_host else {})
    kept = layout.replaced / "progress-before-try-2.jsonl"
    assert kept.exists() is not left_on_a_host


def test_nothing_goes_on_with_what_stage_data_left_half_done(staged, layout, tmp_path, context_of):
    """Cleared alone, it took the new code and then found no data."""
    assert staged(1) == "0 found\n"
    (tmp_path / "input" / "a").unlink()
    with pytest.raises(AirflowFailException, match="SourceMissing"):
        staged(2, 1)
    assert not has_part(layout, "stage_data")


def test_nodes_may_be_what_an_earlier_task_returned(train, context_of, monkeypatch):
    task = train(SCRIPT)
    many = BaseOperator(task_id="counts", dag=task.dag).output
    task.nodes = many  # as its constructor keeps it
    monkeypatch.setattr(type(many), "resolve", lambda self, context: 1)
    context = context_of("training")
    task.render_template_fields(context)
    assert task.execute(context)["world_size"] == 1


def test_metrics_of_all_tries_count(train, layout, context_of):
    """The first try trains, and fails after; the second finds that it is done."""
    task = train(
        """
        import os, sys
        done = os.environ["RESULT_DIR"] + "/done"
        if os.path.exists(done):
            print("nothing left to do")
        elif os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            print("loss= 0.25")
            open(done, "w").close()
            sys.exit(1)
        """,
        metrics=METRICS,
        nodes=1,
    )
    with pytest.raises(AirflowException):
        task.execute(context_of("training", try_number=1))
    assert task.execute(context_of("training", try_number=2))["metrics"] == {"loss": 0.25}
    assert read_part(layout, "train")["result"]["metrics"] == {"loss": 0.25}


def test_a_loss_that_is_nan_at_the_end_is_said(train, layout, context_of, capsys):
    """Though its regular expression is for digits; nobody may have asked for a bound."""
    script = "import time; print('loss= 144.7', flush=True); time.sleep(0.3); print('loss= nan')"
    metrics = [{"name": "loss", "regex": "loss= ([0-9.]+)"}]
    result = train(script, metrics=metrics, nodes=1).execute(context_of("training"))
    assert result == {"world_size": 1, "metrics": {}}
    said = capsys.readouterr().out
    assert "progress | loss nan" in said
    assert "loss is NaN at the end of the training (the output): it diverged" in said
    result = read_part(layout, "train")["result"]
    assert result["not_finite"] == {"loss": "NaN"}
    assert result["measurements"] == [{"metric": "loss", "value": "NaN", "source": "output"}]


def test_ranks_run_in_the_runs_folder_and_metrics_come_back(train, layout, context_of):
    task = train(SCRIPT, metrics=METRICS, framework="tensorflow 2.21")
    result = task.execute(context_of("training", 2))
    assert result == {"world_size": 2, "metrics": {"loss": 0.20}}
    for rank in (0, 1):
        said = (layout.result / f"by-{rank}").read_text()
        assert said == f"{layout.training_id} {rank + 1}"
        assert (layout.logs / f"rank-{rank}.log").read_text() == f"step 5 loss= 0.2{rank}\n"
    assert (layout.state / "try-2" / "rank-1.json").is_file()
    part = json.loads((layout.kept / "lineage" / "train.json").read_text())
    used = part["result"].pop("goodput")
    assert (used["steps"], used["preemptions"], used["between_s"]) == (5, 0, 0)
    assert used["steps_per_held_s"] == pytest.approx(5 / used["held_s"], rel=0.01)
    assert part["result"] == {
        **{"metrics": {"loss": 0.2}, "steps": 5},
        **{"wrote_model": False, "wrote_saved_model": False},
        "measurements": [{"metric": "loss", "value": 0.2, "source": "output"}],
    }
    assert part["tries"] == {"train": 2}
    about = part["environment"]
    assert (about["world_size"], about["nodes"], about["slots"]) == (2, 2, 1)
    assert (about["framework"], about["launcher"]) == ("tensorflow 2.21", "local")
    assert about["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(about["hosts"]) == 1 and about["devices"]


def test_parameters_of_the_run_reach_the_script_and_are_shown(train, layout, context_of):
    script = """
        import os, sys
        print(os.environ["PARAM_NOTE"], os.environ["PARAM_RATE"], sys.argv[1:])
    """
    task = train(
        script,
        command="python train.py {{ params.rate }} {{ params.note }} {{ params.big }}",
        parameters={"note": "none", "rate": 0.5, "big": True},
    )
    context = context_of("training", nodes=1, rate=0.5, note="a b; echo $HOME", big=False)
    task.render_template_fields(context)
    assert (task.nodes, task.slots) == (1, 1)
    assert task.parameters == {"note": "a b; echo $HOME", "rate": 0.5, "big": False}
    assert task.execute(context)["world_size"] == 1
    said = (layout.logs / "rank-0.log").read_text()
    assert said == "a b; echo $HOME 0.5 ['0.5', 'a b; echo $HOME', 'false']\n"


@pytest.mark.parametrize(
    "command",
    [
        'python train.py --name "{{ params.who }}"',
        "python train.py {{ macros.uuid.os.environ['PLANTED'] }}",
        "{{ params.who }} train.py",
    ],
)
def test_values_are_no_commands_and_templates_see_no_environment(
    train, layout, context_of, command, monkeypatch
):
    monkeypatch.setenv("PLANTED", "of Airflow's process")
    task = train("import sys; print(sys.argv[1:])", command=command, nodes=1)
    who = f"$(touch {layout.result}/planted)"
    context = context_of("training", who=who) | {"macros": macros}
    with pytest.raises(AirflowFailException, match=r"CommandInvalid: command: "):
        task.render_template_fields(context)
        task.execute(context)
    assert not (layout.result / "planted").exists()


def test_templates_get_the_runs_values_only(train, layout, context_of):
    command = "python train.py {{ dag_run.run_id }} {{ macros.ds_add('2026-01-01', 2) }}"
    task = train("import sys; print(sys.argv[1:])", command=command, nodes=1)
    context = context_of("training") | {"macros": macros}
    task.render_template_fields(context)
    assert task.command == f"python train.py {context['dag_run'].run_id} 2026-01-03"


PLANTS = """
    import os
    for path in (os.environ["DDL_PROGRESS"], os.environ["DDL_STATS"],
                 os.environ["LOG_DIR"] + "/rank-0.log"):
        if os.path.exists(path):
            os.unlink(path)
        os.symlink("{victim}/secret", path)
    for name in ("lineage", "run.json", "job.json"):
        os.symlink("{victim}/none", os.environ["JOB_STATE_DIR"] + "/" + name)
"""


def test_links_that_a_training_plants_are_not_followed(train, layout, context_of, tmp_path, capsys):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "secret").write_text('{"step": 1, "secret": "of another"}\n')
    task = train(PLANTS.format(victim=victim), nodes=1)
    task.execute(context_of("training"))
    said = capsys.readouterr().out
    assert "of another" not in said and "rank-0.log is a link" in said
    (secret,) = victim.iterdir()
    assert secret.read_text() == '{"step": 1, "secret": "of another"}\n'


def test_what_a_rank_writes_is_not_what_the_next_steps_run(train, layout, context_of):
    told = json.dumps({"made_of": {"parameters": {}}, "steps": {"train": {"command": "false"}}})
    script = f"""
        import os
        for name in ("run.json", "job.json"):
            with open(os.environ["JOB_STATE_DIR"] + "/" + name, "w") as file:
                file.write({told!r})
    """
    task = train(script, nodes=1)
    task.execute(context_of("training"))
    assert (layout.state / "run.json").read_text() == told
    task.render_template_fields(context_of("training", 2))
    assert task.command == "python train.py"
    assert kept_job(layout.scheduled_job) is None


def test_a_run_folder_that_became_a_link_is_refused(train, layout, context_of, tmp_path):
    task = train("pass", nodes=1)
    layout.root.rename(tmp_path / "elsewhere")
    layout.root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AirflowFailException, match="No link beneath a run's folder is followed"):
        task.execute(context_of("training"))


def test_a_script_for_tensorflow_1_is_told_apart(train, layout, context_of):
    script = """
        import os, sys
        assert "DDL_TF1" not in os.environ
        found = [f for f in sys.meta_path if type(f).__module__.startswith("ddl_ops.tf1")]
        print(len(found))
    """
    for number, tf1 in enumerate((True, False)):
        train(script, tf1=tf1).execute(context_of("training", number + 1))
    assert (layout.logs / "rank-1.log").read_text() == "1\n0\n"


LEAVES_STATISTICS = """
    import os
    left = {!r}
    if left is not None and os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        open(os.environ["DDL_STATS"], "w").write(left)
"""


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (
            '{"straggler": null, "ranks": [{"rank": 0, "comm_s": 1, "wait_s": 0, "run_s": 4}]}',
            ["communication | 25% of 4.0 s on rank 0, 0% waiting for others"],
        ),
        ("", []),
        (None, []),
        ('{"ranks": ', ["JSONDecodeError: Expecting value"]),
        ('{"straggler": null}', ["KeyError: 'ranks'"]),
    ],
    ids=["statistics", "empty", "none", "cut off", "something else"],
)
def test_communication_is_said_at_the_end(train, layout, context_of, capsys, left, said):
    layout.statistics.write_text("of an earlier try")
    train(LEAVES_STATISTICS.format(left)).execute(context_of("training"))
    output = capsys.readouterr().out.splitlines()
    lines = [line for line in output if "communication |" in line or "Error" in line]
    assert len(lines) == len(said)
    assert all(text in line for text, line in zip(said, lines, strict=True))


def test_what_is_asked_of_the_manifests_launcher_is_not_asked_of_another(train, context_of):
    asked = train("1", launcher="slurm", scheduler={"partition": "gpu"})
    asked.render_template_fields(context_of("training", launcher="slurm"))
    assert asked.scheduler == {"partition": "gpu"}
    asked.render_template_fields(context_of("training", launcher="fake"))
    assert (asked.launcher, asked.scheduler) == ("fake", {})


def test_fake_launcher_trains_without_processes(train, context_of):
    result = train("1", launcher="fake", nodes=3, slots=2).execute(context_of("training"))
    assert result == {"world_size": 6, "metrics": {}}


NOTES = """
    import json, os, sys
    from pathlib import Path
    from ddl_ops import averaging
    if "PARAM_TRAINS" in os.environ:
        averaging.started()
        averaging.computed_gradients()
    if os.environ["PARAM_AVERAGES"] == "true":
        averaging.started()
        averaging.averaged()
    sys.exit(os.environ["PARAM_FAILS"] == "true")
"""


def test_ranks_that_trained_apart_fail_the_task_unless_an_earlier_try_averaged(
    train, layout, context_of
):
    """The script finds its training done in the retry, and ends before it imports ddl."""

    def run(try_number, max_tries=5, *, averages=False, fails=False, trains=False, **settings):
        parameters = {"averages": averages, "fails": fails} | ({"trains": True} if trains else {})
        settings = {"distribution": "mpi", "retries": 5, "parameters": parameters, **settings}
        task = train(NOTES, **settings)
        context = context_of("training", try_number, max_tries)
        if fails:
            with pytest.raises(AirflowException, match="code 1"):
                task.execute(context)
            return None
        try:
            return task.execute(context)
        except AirflowFailException as error:
            return str(error)

    why = "TrainedApart: The 2 ranks trained apart, each a model of its own: ranks 0 and 1 did not"
    assert run(1).startswith(why)
    assert run(1, nodes=1)["world_size"] == 1
    assert run(1, distribution="independent")["world_size"] == 2
    assert read_part(layout, "train")["environment"]["distribution"] == "independent"
    assert run(2, averages=True, fails=True) is None
    assert run(3, fails=True) is None
    alone = "ranks 0 and 1 imported ddl, computed gradients and averaged none"
    assert alone in run(4, trains=True)  # loaded, and not distributed again
    assert "found their training done, by an earlier try in which each trained a mod" in run(5)
    assert run(6, averages=True, fails=True) is None
    assert run(7)["world_size"] == 2
    assert run(8, 12).startswith(why)  # cleared after its end: trained again from its start
    assert run(9, 12).startswith(why)
    (layout.state / "try-9" / "rank-0.json").unlink()
    (layout.state / "try-9" / "rank-0.json").symlink_to("/etc/hostname")
    assert run(10, 12).startswith(why)


def test_ranks_that_write_one_file_are_warned_of(train, context_of, capsys):
    script = """
        import os
        rank = os.environ["OMPI_COMM_WORLD_RANK"]
        folder = os.environ["RESULT_DIR"]
        for number in range(7):
            open(f"{folder}/model-{number}.keras", "w").close()
        for name in (f"{folder}/own-{rank}", os.environ["LOG_DIR"] + "/x", f"{folder}/log"):
            open(name, "a" if name.endswith("log") else "w").close()
    """
    train(script).execute(context_of("training"))
    said = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    shared = [line for line in said if "each wrote" in line]
    assert "ranks 0 and 1 each wrote result/model-0.keras, which may be damaged: save on" in said[1]
    assert len(shared) == 5
    assert any("and 2 more files" in line for line in said)


def test_other_scripts_than_those_that_averaged_have_to(train, layout, context_of):
    made_of = {"dataset": "d", "code": "1", "manifest": "m", "parameters": {}}

    def run(try_number, *, averages, fails=False):
        fix_run(layout, "run", made_of, {})
        parameters = {"averages": averages, "fails": fails}
        task = train(NOTES, distribution="mpi", retries=5, parameters=parameters)
        with pytest.raises(AirflowException, match="code 1" if fails else "trained apart"):
            task.execute(context_of("training", try_number, 5))

    run(1, averages=True, fails=True)
    made_of["code"] = "2"
    run(2, averages=False)


def test_a_retry_sees_what_the_try_before_left(train, layout, context_of):
    script = """
        import os
        path = os.environ["CHECKPOINT_DIR"] + "/step"
        if not os.path.exists(path):
            if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
                open(path, "w").write("7")
            raise RuntimeError("the machine fell over")
        print("resumed at", open(path).read())
    """
    with pytest.raises(AirflowException, match="RuntimeError.*fell over") as caught:
        train(script, nodes=1).execute(context_of("training", 1))
    assert not isinstance(caught.value, AirflowFailException)
    train(script, nodes=1).execute(context_of("training", 2))
    assert (layout.logs / "rank-0.log").read_text().endswith("resumed at 7\n")


LEAVES_A_STEP = """
    import os, sys
    folder = os.environ["CHECKPOINT_DIR"]
    steps = len(os.listdir(folder))
    print("found", steps)
    for name in (f"{folder}/step-{steps}", os.environ["EXPERIMENT_DIR"] + "/curve"):
        os.makedirs(os.path.dirname(name), exist_ok=True)
        open(name, "w").close()
    sys.exit(os.environ["PARAM_FAILS"] == "true")
"""


def test_a_cleared_training_starts_again_if_it_had_ended_and_else_goes_on(
    train, layout, context_of, monkeypatch
):
    def run(try_number, max_tries, fails=False, **params):
        task = train(LEAVES_A_STEP, nodes=1, retries=2, parameters={"fails": fails})
        context = context_of("training", try_number, max_tries, **params)
        if fails:
            with pytest.raises(AirflowException, match="code 1"):
                task.execute(context)
        else:
            task.execute(context)
        return (layout.logs / "rank-0.log").read_text().splitlines()[-1]

    assert run(1, 2, fails=True) == "found 0"
    # Airflow's limit after a task of two retries was cleared that had been tried once.
    assert run(2, 3, fails=True) == "found 1"
    assert run(3, 3) == "found 2"
    # The worker died before it could say that the training had ended: not cleared, tried again.
    assert run(4, 4) == "found 3"
    assert run(5, 6) == "found 0"
    assert len(list((layout.replaced / "result" / "checkpoints").iterdir())) == 4
    assert (layout.replaced / layout.training_id / "curve").exists()
    part = json.loads((layout.kept / "lineage" / "train.json").read_text())
    assert part["tries"] == {"train": 1}
    # Of those that were replaced, only the last are kept.
    assert run(6, 7, fails=True) == "found 0"
    assert len(list((layout.replaced / "result" / "checkpoints").iterdir())) == 1
    assert run(7, 7) == "found 1"
    # The first try after the clearing came to nothing before it had begun.
    before = f"{layout.training_id}/train-7"
    with alone_in(layout.experiment, before):
        monkeypatch.setattr("ddl_airflow.steps.train._OTHERS_END_S", 0.0)
        with pytest.raises(AirflowException, match=f"another training works there now: {before}"):
            run(8, 12)
    assert run(9, 12) == "found 0"
    # An experiment with a name is there to be gone on with.
    assert run(10, 11, experiment_id="wide") == "found 0"
    assert run(11, 12, experiment_id="wide") == "found 0"
    assert not (layout.replaced / "wide").exists()
    assert (layout.workspace / "experiments" / "wide" / "curve").exists()


def test_a_cleared_training_starts_again_though_its_first_try_never_came_to_it(
    train, layout, context_of, workspace, tmp_path
):
    """Mended scripts: the weights of those before would be published as theirs."""

    def task():
        return train(LEAVES_A_STEP, nodes=1, retries=2, parameters={"fails": False})

    def said():
        return (layout.logs / "rank-0.log").read_text().splitlines()[-1]

    made_of = {"dataset": "d", "code": "old", "manifest": "m", "parameters": {}}
    fix_run(layout, "run", made_of, {})
    task().execute(context_of("training", 1, 2))
    fix_run(layout, "run", made_of | {"code": "mended"}, {})
    again = task()
    workspace.rename(tmp_path / "away")
    with pytest.raises(AirflowException, match="is not the workspace that was there"):
        again.execute(context_of("training", 2, 3))
    (tmp_path / "away").rename(workspace)
    task().execute(context_of("training", 3, 3))
    assert said() == "found 0"
    assert len(list((layout.replaced / "result" / "checkpoints").iterdir())) == 1
    # Not cleared: the worker died before it could say that the training had ended.
    task().execute(context_of("training", 4, 4))
    assert said() == "found 1"
    # Of an earlier version, which did not note in which try that was.
    layout.trained_in.unlink()
    task().execute(context_of("training", 5, 5))
    assert said() == "found 2"
    layout.trained_in.write_bytes(b"")  # or whose host crashed
    task().execute(context_of("training", 6, 6))
    assert said() == "found 3"
    layout.trained_in.unlink()
    task().execute(context_of("training", 7, 8))
    assert said() == "found 0"


def test_a_retry_finds_no_damaged_checkpoint(train, layout, context_of, capsys):
    script = """
        import os, sys, zipfile
        folder = os.environ["CHECKPOINT_DIR"]
        print(sorted(os.listdir(folder)))
        for step in (1, 2):
            with zipfile.ZipFile(f"{folder}/model-{step}.keras", "w") as archive:
                archive.writestr("model.weights.h5", str(step) * 1000)
        os.truncate(f"{folder}/model-2.keras", 500)
        sys.exit(1)
    """
    for number in (1, 2):
        with pytest.raises(AirflowException, match="code 1"):
            train(script, nodes=1).execute(context_of("training", number))
    said = (layout.logs / "rank-0.log").read_text().splitlines()
    assert said == ["[]", "['model-1.keras']"]
    assert (layout.damaged / "checkpoints" / "model-2.keras").stat().st_size == 500
    log = capsys.readouterr().out
    assert "model-2.keras is damaged or half written" in log
    assert "model-1.keras is the newest complete one to go on from" in log


def test_a_retry_finds_no_damaged_place_in_an_epoch(train, layout, context_of, capsys):
    """Also where a script saves no checkpoint beside it."""
    script = """
        import os, sys, zipfile
        folder = os.environ["CHECKPOINT_DIR"]
        print(sorted(os.listdir(folder)))
        place = f"{folder}/preempted-7"
        os.makedirs(place, exist_ok=True)
        with zipfile.ZipFile(f"{place}/model.npz", "w") as archive:
            archive.writestr("0.npy", "weights" * 1000)
        os.truncate(f"{place}/model.npz", 500)
        sys.exit(1)
    """
    for number in (1, 2):
        with pytest.raises(AirflowException, match="code 1"):
            train(script, nodes=1).execute(context_of("training", number))
    assert (layout.logs / "rank-0.log").read_text().splitlines() == ["[]", "[]"]
    place = layout.damaged / "checkpoints" / "preempted-7"
    assert (place / "model.npz").stat().st_size == 500
    assert "preempted-7 is damaged or half written (model.npz: " in capsys.readouterr().out


def test_a_try_that_takes_too_long_is_ended_and_tried_again(run_task, workspace, tmp_path):
    with DAG("training", schedule=None):
        task = TrainOperator(
            task_id="train",
            retries=1,
            execution_timeout=timedelta(seconds=1),
            step=TrainStep(command="bash -c 'sleep 60; touch $RESULT_DIR/slept'"),
        )
    ended = run_task(task)
    assert ended.state == "up_for_retry"
    assert "train was ended after 0:00:01" in str(ended.error)
    assert "steps.train.timeout" in str(ended.error)
    (folder,) = (workspace / "runs" / "training").iterdir()
    assert not list(folder.rglob("slept"))
    assert marked("DDL_JOB_ID", f"{folder.name}/train-1") == []
    assert run_task(task, 2).state == "failed"


@pytest.mark.parametrize(
    ("script", "settings", "words"),
    [
        ("import no_such_module_here", {}, "ModuleNotFoundError"),
        ("1", {"command": "trainer train.py"}, "command not found"),
        ("1", {"command": "python trian.py"}, "CommandInvalid"),
        ("def f(:", {}, "train.py:1"),
        ("1", {"launcher": "slrum"}, "'slrum' is not known"),
    ],
)
def test_what_a_retry_cannot_mend_fails_at_once(train, context_of, script, settings, words):
    with pytest.raises(AirflowFailException, match=words):
        train(script, **settings).execute(context_of("training"))


def test_on_kill_ends_every_rank(train, layout, context_of):
    script = "import time\nopen('up', 'w').close()\ntime.sleep(60)\nopen('slept', 'w').close()\n"
    task = train(script)
    job_id = f"{layout.training_id}/train-1"

    def kill():
        deadline = time.monotonic() + within(20)
        while not (layout.code / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        task.on_kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(AirflowException):
        task.execute(context_of("training"))
    killer.join()
    assert not (layout.code / "slept").exists()
    assert marked("DDL_JOB_ID", job_id) == []


def test_on_kill_before_the_start_is_nothing(train):
    train("1").on_kill()


CLUSTER = """
    import json, os, sys, time
    task = json.loads(os.environ["TF_CONFIG"])["task"]
    with open(os.environ["RESULT_DIR"] + f"/{task['type']}-{task['index']}", "w") as file:
        file.write(os.environ["EXPERIMENT_DIR"])
    if task["type"] == "ps":
        time.sleep(60)
    print("step 5 loss= 0.2" if task["type"] == "master" else "step 9 loss= 0.9")
    if task == FAILS:
        sys.exit(7)
"""


def test_cluster_runs_as_ranks_do(train, layout, context_of):
    task = train(
        CLUSTER.replace("FAILS", "None"), nodes=2, distribution="parameter_server", metrics=METRICS
    )
    result = task.execute(context_of("training", experiment_id="wide"))
    # On the first node a master, two workers and a server; on the other a worker and a server.
    assert result == {"world_size": 6, "metrics": {"loss": 0.2}}
    experiment = layout.workspace / "experiments" / "wide"
    for name in ("master-0", "worker-0", "worker-1", "worker-2"):
        assert (layout.result / name).read_text() == str(experiment)
    about = json.loads((layout.kept / "lineage" / "train.json").read_text())["environment"]
    assert (about["world_size"], about["distribution"]) == (6, "parameter_server")
    tasks = [
        json.loads((layout.records(1) / f"rank-{n}.json").read_text())["task"] for n in range(6)
    ]
    assert tasks == ["master 0", "worker 0", "worker 1", "worker 2", "ps 0", "ps 1"]


def test_failed_task_is_named_and_its_last_lines_are_shown(train, layout, context_of, capsys):
    fails = '{"type": "worker", "index": 1}'
    task = train(CLUSTER.replace("FAILS", fails), nodes=1, distribution="parameter_server")
    with pytest.raises(AirflowException, match=r"worker 1 \(rank 2 of 4\) on .* code 7"):
        task.execute(context_of("training"))
    assert "rank-2 | step 9 loss= 0.9" in capsys.readouterr().out
    assert marked("DDL_JOB_ID", f"{layout.training_id}/train-1") == []


ONE_HERE = f"one/train-1 on {socket.gethostname()}"


@pytest.mark.parametrize("experiment", ["wide", None])
def test_two_tries_of_a_training_are_never_at_once(
    train, layout, context_of, monkeypatch, experiment
):
    monkeypatch.setattr("ddl_airflow.steps.train._OTHERS_END_S", 0.2)
    task = train("", nodes=1)
    place = layout.workspace / "experiments" / (experiment or layout.training_id)
    before = f"{layout.training_id}/train-1"
    with (
        alone_in(place, before),
        pytest.raises(AirflowException, match=f"another training works there now: {before}"),
    ):
        task.execute(context_of("training", 2, experiment_id=experiment))
    task.execute(context_of("training", 2, experiment_id=experiment))


@pytest.mark.parametrize(
    ("is_own", "of_earlier_version"), [(True, False), (False, False), (False, True)]
)
def test_a_training_and_another_that_named_its_experiment_are_never_at_once(
    train, layout, context_of, is_own, of_earlier_version
):
    """Whichever of them comes second waits for the end of the other."""
    first = layout.training_id if is_own else "training-first-" + 32 * "1"
    RunLayout(layout.workspace, "training", first).create()
    task = train("", nodes=1)
    context = context_of("training", 2, experiment_id=None if is_own else first)
    place = layout.workspace / "experiments" / first
    assert job_of(task, context).lock == lock_of(place)  # which a scheduler's job takes itself
    if of_earlier_version:
        place = layout.root.with_name(first) / "ddl"
    with alone_in(place, "training-other/train-1"), pytest.raises(TaskDeferred) as caught:
        task.execute(context)
    assert caught.value.trigger.folder == str(place)
    assert task.execute(context)["world_size"] == 1
    for folder in (layout.workspace / "experiments" / first, place):
        assert holder_of(folder) == ""


def test_a_try_of_an_earlier_version_is_not_trained_beside(train, layout, context_of, monkeypatch):
    monkeypatch.setattr("ddl_airflow.steps.train._OTHERS_END_S", 0.2)
    before = f"{layout.training_id}/train-1"
    with (
        alone_in(layout.state, before),
        pytest.raises(AirflowException, match=f"another training works there now: {before}"),
    ):
        train("", nodes=1).execute(context_of("training", 2))


@pytest.mark.parametrize("seconds", ["0", "nan", "1e12"])
def test_an_interval_that_is_none_is_refused_before_there_is_a_job(
    train, layout, context_of, monkeypatch, seconds
):
    monkeypatch.setenv("AIRFLOW__DDL__JOB_POLL_INTERVAL", seconds)
    with pytest.raises(AirflowException, match=r"SettingInvalid: \[ddl\] job_poll_interval is "):
        train("print(1)", nodes=1).execute(context_of("training"))
    assert not list(layout.logs.glob("*"))
    # One that an earlier version stored leaves no job to nobody, nor the triggerer no time.
    assert ExperimentTrigger(str(layout.experiment), float(seconds)).interval_s == 5


def test_the_second_training_of_an_experiment_waits_without_a_worker(
    train, layout, context_of, monkeypatch, capsys
):
    monkeypatch.setenv("AIRFLOW__DDL__JOB_POLL_INTERVAL", "0.02")
    task = train("print('trained')", nodes=1)
    context = context_of("training", experiment_id="wide")
    place = layout.workspace / "experiments" / "wide"

    def deferred(begin):
        with pytest.raises(TaskDeferred) as caught:
            begin()
        return caught.value

    def resumed(waited, event):
        return lambda: task.resume_execution(waited.method_name, {"event": event.payload}, context)

    async def wait(waited, others):
        """The trigger's event, after which another training is in the experiment if it is asked."""
        path, arguments = waited.trigger.serialize()
        module, _, name = path.rpartition(".")
        trigger = getattr(sys.modules[module], name)(**arguments)
        fired = asyncio.ensure_future(anext(trigger.run()))
        await asyncio.sleep(0.2)
        assert not fired.done()
        others.close()
        return await asyncio.wait_for(fired, within(20))

    one = ExitStack()
    one.enter_context(alone_in(place, "one/train-1"))
    waited = deferred(lambda: task.execute(context))
    event = asyncio.run(wait(waited, one))
    assert f"waiting for {ONE_HERE}" in capsys.readouterr().out
    with ExitStack() as faster:
        faster.enter_context(alone_in(place, "two/train-1"))
        waited = deferred(resumed(waited, event))
        event = asyncio.run(wait(waited, faster))
    assert resumed(waited, event)()["world_size"] == 1
    assert (layout.logs / "rank-0.log").read_text() == "trained\n"


def test_who_waits_for_an_experiment_leaves_no_folder_open_to_ranks(
    train, layout, context_of, monkeypatch
):
    """No step of it runs, and the other training's ranks are the same user's."""
    open_now = []
    monkeypatch.setattr(RunLayout, "open_to_ranks", lambda layout: open_now.append(layout))
    monkeypatch.setattr(RunLayout, "close_to_ranks", lambda layout: open_now.clear())
    place = layout.workspace / "experiments" / "wide"
    with alone_in(place, "one/train-1"), pytest.raises(TaskDeferred):
        train("", nodes=1).execute(context_of("training", experiment_id="wide"))
    assert not open_now


def test_the_second_training_of_an_experiment_is_skipped_where_the_manifest_says_so(
    train, layout, context_of
):
    task = train("", nodes=1, when_busy="skip")
    context = context_of("training", experiment_id="wide")
    with (
        alone_in(layout.workspace / "experiments" / "wide", "one/train-1"),
        pytest.raises(AirflowSkipException, match=f"works now: {ONE_HERE}. Skipped, as experim"),
    ):
        task.execute(context)
    assert task.execute(context)["world_size"] == 1


def test_a_triggerer_without_the_workspace_says_so(train, context_of, tmp_path):
    trigger = ExperimentTrigger(str(tmp_path / "not here" / "wide"))
    event = asyncio.run(anext(trigger.run()))
    with pytest.raises(AirflowFailException, match="not here.*The triggerer must see the workspa"):
        train("", nodes=1).execute_alone(context_of("training"), event.payload)


def test_the_record_of_a_run_that_trains_again_has_no_numbers_of_before(train, layout, context_of):
    script = """
        import os, shutil
        result = os.environ["RESULT_DIR"]
        shutil.copy(result + "/../airflow/record.json", result + "/told.json")
        print("step 5 loss= 0.25")
    """
    task = train(script, nodes=1, metrics=METRICS)
    for cleared in (0, 1):
        task.execute(context_of("training", 1 + cleared, max_tries=cleared))
        told = json.loads((layout.result / "told.json").read_text())
        assert "result" not in told and told["outcome"]["try"] == 1 + cleared
    told = json.loads((layout.kept / SO_FAR).read_text())
    assert told["result"]["metrics"] == {"loss": 0.25}
    assert (layout.replaced / "result" / "told.json").exists()


def test_what_holds_the_ranks_together_keeps_others_out(train, layout, context_of):
    script = """
        import os
        from pathlib import Path
        parent = os.getppid()
        while Path(f"/proc/{parent}/comm").read_text().strip() not in ("mpirun", "prterun"):
            parent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        # Others of the job may be closed meanwhile.
        opened = [os.path.realpath(fd) for fd in Path(f"/proc/{parent}/fd").iterdir()]
        folder, name = os.path.split(os.environ["EXPERIMENT_DIR"])
        assert f"{folder}/.{name}.lock" in opened, opened
    """
    train(script).execute(context_of("training"))


# --- on a scheduler ---


@pytest.fixture
def scheduled(train, cluster):
    """The operator, over a scheduler."""
    return train("1", launcher=cluster.kind)


def ended(trigger):
    """The event of a trigger whose job has ended."""
    return asyncio.run(asyncio.wait_for(anext(trigger.run()), within(20))).payload


def deferred(task, context):
    with pytest.raises(TaskDeferred) as caught:
        task.execute(context)
    return caught.value


def test_the_task_defers_and_its_result_comes_from_the_job(scheduled, layout, cluster, context_of):
    wish = deferred(scheduled, context_of("training"))
    cluster.set(1, "succeeded", images=["trainer@sha256:aa"])
    event = ended(wish.trigger)
    result = getattr(scheduled, wish.method_name)(context_of("training"), event)
    assert result == {"world_size": 2, "metrics": {}}
    part = json.loads((layout.kept / "lineage" / "train.json").read_text())
    assert part["environment"]["launcher"] == "fake-scheduler"
    assert part["environment"]["images"] == ["trainer@sha256:aa"]
    assert not layout.scheduled_job.exists()


@pytest.mark.parametrize("kept", [True, False])
def test_a_job_of_a_named_experiment_leaves_a_copy_for_later_steps(
    scheduled, cluster, context_of, kept
):
    context = context_of("training", experiment_id="wide")
    wish = deferred(scheduled, context)
    layout = layout_of(context)
    assert job_of(scheduled, context).keep == (layout.experiment, layout.experiment_copy)
    cluster.set(1, "succeeded")
    if kept:
        layout.experiment_copy.mkdir()
        assert scheduled.execute_complete(context, ended(wish.trigger))["world_size"] == 2
        return
    with pytest.raises(AirflowException, match="its job left no copy of experiment wide"):
        scheduled.execute_complete(context, ended(wish.trigger))
    # Going on with that job would end so each time.
    deferred(scheduled, context_of("training", 2, experiment_id="wide"))
    assert cluster.numbers() == [1, 2]


@pytest.mark.parametrize("link_to", [None, "../result", "nowhere"])
def test_a_named_experiment_is_trained_again_whatever_ranks_made_of_its_copy(
    train, layout, context_of, monkeypatch, link_to
):
    def refusing(path):
        raise PermissionError(13, "Permission denied", str(path))

    copy = layout.root / "experiment" / "wide"
    copy.parent.mkdir()
    if link_to is None:
        copy.mkdir()
        monkeypatch.setattr("ddl_airflow.core.layout.remove_tree", refusing)
    else:
        copy.symlink_to(link_to)
    task = train("", nodes=1)
    task.execute(context_of("training", 2, experiment_id="wide"))
    assert copy.is_dir() and not copy.is_symlink()
    assert layout.result.is_dir()


def test_a_retry_goes_on_with_the_job_of_the_try_before(scheduled, layout, cluster, context_of):
    first = deferred(scheduled, context_of("training", 1))
    layout.statistics.write_text('{"left": "by the job, which has ended meanwhile"}')
    again = deferred(scheduled, context_of("training", 2))
    assert again.trigger.job == first.trigger.job
    assert cluster.numbers() == [1]
    assert layout.statistics.exists()


def test_a_run_with_one_attempt_goes_on_with_the_job_of_the_try_before(
    scheduled, layout, cluster, context_of
):
    """Though its worker was killed: no training is begun once more. Else that would be one."""
    scheduled.retries = 2
    deferred(scheduled, context_of("training", 1, 2, attempts=1))
    context = context_of("training", 2, 2, attempts=1)
    wish = deferred(scheduled, context)
    assert cluster.numbers() == [1]
    cluster.set(1, "succeeded")
    scheduled.execute_complete(context, ended(wish.trigger))
    assert read_part(layout, "train")["tries"] == {"train": 2}


def test_a_task_cleared_after_its_end_trains_again(scheduled, layout, cluster, context_of):
    wish = deferred(scheduled, context_of("training", 1))
    cluster.set(1, "succeeded")
    scheduled.execute_complete(context_of("training", 1), ended(wish.trigger))
    deferred(scheduled, context_of("training", 1))
    assert cluster.numbers() == [1, 2]


def preempted(task, context, wish, cluster, number, step):
    """The task, deferred again: its job had to make room."""
    cluster.set(number, "preempted", "all ranks saved", step=step)
    with pytest.raises(TaskDeferred) as caught:
        task.execute_complete(context, ended(wish.trigger))
    return caught.value


def test_a_job_that_makes_room_is_followed_by_another_of_the_same_try(
    scheduled, layout, cluster, context_of, capsys
):
    context = context_of("training", 1)
    second = preempted(scheduled, context, deferred(scheduled, context), cluster, 1, 40)
    third = preempted(scheduled, context, second, cluster, 2, 90)
    handles = [StartedJob.load(wish.trigger.job).handle for wish in (second, third)]
    assert [handle.job_id.rpartition("/")[2] for handle in handles] == ["train-1.1", "train-1.2"]
    assert [handle.record_dir.name for handle in handles] == ["try-1.1", "try-1.2"]
    assert "preempted, for the 2. time: all ranks saved" in capsys.readouterr().out
    cluster.set(3, "succeeded")
    scheduled.execute_complete(context, ended(third.trigger))
    result = read_part(layout, "train")["result"]
    assert result["goodput"]["preemptions"] == 2
    assert read_part(layout, "train")["tries"] == {"train": 1}
    assert cluster.numbers() == [1, 2, 3]
    deferred(scheduled, context)  # cleared after its end: begins anew
    assert StartedJob.load(kept_job(layout.scheduled_job).dump()).handle.job_id.endswith("train-1")


def test_a_job_found_to_have_made_room_counts_and_the_next_one_waits(
    scheduled, layout, cluster, context_of
):
    """Its task was killed before it deferred: the next try sees that first."""
    context = context_of("training", 1)
    second = preempted(scheduled, context, deferred(scheduled, context), cluster, 1, 40)
    assert StartedJob.load(second.trigger.job).handle.number == 2
    cluster.set(2, "preempted", "all ranks saved", step=40)
    third = deferred(scheduled, context_of("training", 2))
    handle = StartedJob.load(third.trigger.job).handle
    assert (handle.number, handle.job_id.rpartition("/")[2]) == (3, "train-2.1")
    assert (len(Preemptions(layout)), cluster.delays()) == (2, [0, 0, 15])


def test_a_job_found_to_have_made_room_may_be_once_too_often(
    scheduled, layout, cluster, context_of, monkeypatch
):
    monkeypatch.setenv("AIRFLOW__DDL__PREEMPTIONS", "0")
    deferred(scheduled, context_of("training", 1))
    cluster.set(1, "preempted", "all ranks saved", step=40)
    with pytest.raises(AirflowFailException, match="make room 1 times.*preemptions allows .0."):
        scheduled.execute(context_of("training", 2))
    assert cluster.numbers() == [1] and not layout.scheduled_job.exists()


def test_the_job_of_a_training_that_gets_other_data_is_ended_first(
    scheduled, layout, cluster, context_of, monkeypatch
):
    """It waited in the queue, and nobody has cancelled it; all was cleared from stage_data on."""
    wish = deferred(scheduled, context_of("training", 1))
    StartedJob.load(wish.trigger.job).mark_monitored()
    monkeypatch.setattr("ddl_airflow.steps.train.trained_with_other_data", lambda layout: True)
    again = deferred(scheduled, context_of("training", 2, 1))
    assert (cluster.state(1), cluster.state(2)) == ("lost", "pending")
    assert StartedJob.load(again.trigger.job).handle.number == 2


@pytest.mark.parametrize("makes_room", [False, True])
def test_a_task_that_a_person_ends_before_its_job_is_there_submits_none(
    scheduled, cluster, context_of, monkeypatch, makes_room
):
    """Airflow's signal handler calls on_kill and returns; the task goes on until it is killed."""
    context = context_of("training", 1)
    begin = scheduled.execute
    if makes_room:
        wish = deferred(scheduled, context)
        cluster.set(1, "preempted", "all ranks saved", step=40)
        event = ended(wish.trigger)

        def begin(context):
            scheduled.execute_complete(context, event)

    monkeypatch.setattr(
        "ddl_airflow.steps.train.begin_training", lambda layout, anew: scheduled.on_kill()
    )
    with pytest.raises(AirflowException, match="was cancelled before it was submitted"):
        begin(context)
    assert cluster.numbers() == [1] * makes_room


def test_a_task_that_a_person_ends_before_its_step_begins_does_nothing(
    scheduled, cluster, context_of
):
    scheduled.on_kill()
    with pytest.raises(AirflowException, match="cancelled"):
        scheduled.execute(context_of("training", 1))
    assert cluster.numbers() == []


@pytest.fixture
def folder_of_ranks(layout, monkeypatch):
    """folder_of_ranks() -> the mode of the run's folder, which is open while ranks may write."""
    monkeypatch.setenv("AIRFLOW__DDL__RUN_RANKS_AS", "nobody")
    return lambda: layout.root.stat().st_mode & 0o777


@pytest.mark.parametrize("why", ["no answer", "unseen"])
def test_ranks_keep_their_folder_while_their_job_runs_though_a_try_fails(
    scheduled, cluster, context_of, monkeypatch, folder_of_ranks, why
):
    wish = deferred(scheduled, context_of("training", 1))
    cluster.set(1, "running")
    assert folder_of_ranks() == 0o710
    with monkeypatch.context() as patch, pytest.raises(AirflowException, match="away"):
        if why == "unseen":
            event = {"job": wish.trigger.job, "unseen": "squeue is away."}
            scheduled.execute_complete(context_of("training", 1), event)
        else:
            patch.setattr(type(cluster), "status", _away)
            scheduled.execute(context_of("training", 2))
    assert folder_of_ranks() == 0o710
    cluster.set(1, "failed", "of itself")
    with pytest.raises(AirflowException):
        scheduled.execute_complete(context_of("training", 2), ended(wish.trigger))
    assert folder_of_ranks() == 0o700


def _away(*_words):
    raise LaunchError("the controller is away")


@pytest.mark.parametrize("noted", [True, False])
def test_whoever_is_killed_as_a_job_makes_room_neither_loses_nor_doubles_it(
    scheduled, layout, cluster, context_of, monkeypatch, noted
):
    context = context_of("training", 1)
    wish = deferred(scheduled, context)
    cluster.set(1, "preempted", "all ranks saved", step=40)
    event = ended(wish.trigger)
    place = ScheduledJob if noted else Preemptions
    with monkeypatch.context() as patch:
        patch.setattr(place, "drop_note" if noted else "add", _killed)
        with pytest.raises(KeyboardInterrupt):
            scheduled.execute_complete(context, event)
    assert kept_job(layout.scheduled_job).handle.number == 1
    again = deferred(scheduled, context_of("training", 2))
    assert len(Preemptions(layout)) == 1
    job_id = StartedJob.load(again.trigger.job).handle.job_id
    assert job_id.endswith("train-2" if noted else "train-2.1")
    assert cluster.numbers() == [1, 2]
    # As the process that was killed would have, had it come once more.
    assert preempted(scheduled, context_of("training", 2), again, cluster, 2, 50)
    assert cluster.numbers() == [1, 2, 3]


def _killed(*_words):
    raise KeyboardInterrupt


def test_a_training_that_gets_nowhere_waits_longer_each_time_and_fails_in_the_end(
    scheduled, layout, cluster, context_of, monkeypatch
):
    monkeypatch.setenv("AIRFLOW__DDL__PREEMPTIONS", "4")
    context = context_of("training", 1)
    wish, delays = deferred(scheduled, context), []
    for number, step in enumerate((40, 40, None, 80), 1):
        wish = preempted(scheduled, context, wish, cluster, number, step)
        delays.append(job_of(scheduled, context).delay_s)
    assert delays == [0, 15, 30, 0]
    cluster.set(5, "preempted", step=90)
    with pytest.raises(AirflowFailException, match="make room 5 times.*preemptions allows .4."):
        scheduled.execute_complete(context, ended(wish.trigger))
    assert not layout.scheduled_job.exists()


def test_a_model_that_the_ranks_user_keeps_private_is_left_to_transform(
    train, layout, context_of, monkeypatch
):
    """As what `tempfile.mkdtemp` has made, and the script has moved to its place."""

    def has_any_model(_layout):
        raise PermissionError(13, "Permission denied", "model/saved_model.pb")

    monkeypatch.setattr(RunLayout, "has_any_model", property(has_any_model))
    train("print('trained')").execute(context_of("training", 1))
    result = read_part(layout, "train")["result"]
    assert "wrote_saved_model" not in result and result["wrote_model"] is False


def test_a_job_that_had_its_nodes_for_long_is_not_taken_to_have_got_nowhere(layout):
    """Its script may have saved by itself, and not know of preemptions."""
    for number, held_s in enumerate((5, 5, 5, 3600), 1):
        records = layout.records(number)
        records.mkdir(parents=True)
        record = {"rank": 0, "started": time.time() - held_s}  # killed, so nobody noted its end
        (records / "rank-0.json").write_text(json.dumps(record))
        job = JobHandle("slurm", f"digits/train-{number}", number, 1, records, layout.logs)
        Preemptions(layout).add(job, number, None)
        assert Preemptions(layout).wait_s == (0, 15, 30, 0)[number - 1]


def test_ranks_here_that_make_room_are_started_again(train, layout, context_of, capsys):
    script = """
        import json, os
        rank = os.environ["OMPI_COMM_WORLD_RANK"]
        step = os.environ["RESULT_DIR"] + "/step-" + rank
        done = int(open(step).read()) if os.path.exists(step) else 0
        print("from", done)
        if done < 20:
            open(step, "w").write(str(done + 10))
            told = os.environ["DDL_RECORD_DIR"] + "/rank-" + rank + ".preemption.json"
            open(told, "w").write(json.dumps({"listens": True, "step": done + 10}))
    """
    train(script).execute(context_of("training", 1))
    assert (layout.logs / "rank-1.log").read_text() == "from 0\nfrom 10\nfrom 20\n"
    said = capsys.readouterr().out
    assert "preempted, for the 2. time: all ranks saved after step 20" in said
    assert "goodput | " in said and "2 preemptions" in said


def test_airflows_task_runner_makes_it_a_deferred_task(scheduled, run_task):
    run = run_task(scheduled)
    assert run.state == "deferred"
    message = run.message("DeferTask")
    assert message.classpath == "ddl_airflow.triggers.job.JobTrigger"
    assert message.next_method == "execute_complete"


@pytest.mark.parametrize("state", ["failed", "success", "restarting", None])
def test_a_task_that_a_person_ends_just_before_it_defers_leaves_no_job(
    scheduled, layout, run_task, cluster, monkeypatch, state
):
    """Airflow refuses the deferral, and nobody cancelled the job."""
    monkeypatch.setattr("ddl_airflow.operators.train.is_supervised", lambda: True)
    told = TaskStatesResult(task_states={RUN_ID: {"train": state}})
    run = run_task(scheduled, answers={"GetTaskStates": lambda _: told})
    assert run.state == "failed" or run.state == "up_for_retry"
    assert "the task was ended" in str(run.error)
    assert cluster.state(1) == "lost"
    assert list(cancellations(layout.workspace).iterdir()) == []


@pytest.mark.parametrize("answers", [True, False])
def test_the_job_of_a_deferral_that_airflow_refuses_is_noted_until_a_trigger_waits(
    scheduled, layout, run_task, cluster, monkeypatch, answers
):
    """A person may end the task after the question, and Airflow's API may not answer that."""

    def states(_):
        if not answers:
            raise RuntimeError("away")
        return TaskStatesResult(task_states={RUN_ID: {"train": "running"}})

    def refuse(_):
        raise RuntimeError("409: the task is failed")

    monkeypatch.setattr("ddl_airflow.operators.train.is_supervised", lambda: True)
    run = run_task(scheduled, answers={"GetTaskStates": states, "DeferTask": refuse})
    assert run.state == "deferred"
    folder = cancellations(layout.workspace)
    (noted,) = cancellations_in(folder)
    assert (noted.task["run_id"], noted.started.handle.number) == (RUN_ID, 1)
    # Nobody cancels it while Airflow has not ended the run, nor where another may have it.
    assert list(cancel_all_noted(folder, lambda *_: True)) == []
    assert list(cancel_all_noted(folder, lambda *_: False)) == []
    assert cluster.state(1) == "pending"
    os.utime(noted.started.cancellation, (0, 0))
    assert list(cancel_all_noted(folder, lambda *_: True)) == []
    assert len(list(cancel_all_noted(folder, lambda *_: False))) == 1
    assert cluster.state(1) == "lost"


@pytest.mark.parametrize("answered", [True, False])
def test_the_job_of_a_task_that_was_killed_before_it_could_defer_is_noted(
    scheduled, layout, run_task, cluster, monkeypatch, answered
):
    """In its last attempt nobody came after it, and the job ran on."""
    submit = FakeScheduler.submit

    class Killed(BaseException):
        pass

    def dies(self, submission):
        submit(self, submission)
        raise Killed

    def checks(*_):
        raise Killed

    if answered:
        monkeypatch.setattr("ddl_airflow.operators.train.TrainOperator._check_not_ended", checks)
    else:
        monkeypatch.setattr(FakeScheduler, "submit", dies)
    with suppress(Killed):
        run_task(scheduled)
    (noted,) = cancellations_in(cancellations(layout.workspace))
    assert (noted.task["dag_id"], noted.task["task_id"]) == ("training", "train")
    assert (noted.task["run_id"], noted.task["map_index"]) == (RUN_ID, -1)
    assert noted.started.handle.number == (1 if answered else 0)
    assert cancel_noted(FakeScheduler(cluster.folder), noted.started)
    assert cluster.state(1) == "lost"


def test_nothing_is_noted_of_a_job_whose_end_was_dealt_with(
    scheduled, layout, run_task, cluster, context_of
):
    """Nor of one that had to make room, nor of one that failed."""
    noted = lambda: cancellations_in(cancellations(layout.workspace))  # noqa: E731
    job = run_task(scheduled).message("DeferTask").trigger_kwargs["job"]
    assert [one.started for one in noted()] == [StartedJob.load(job)]

    def ended(state, number=1):
        cluster.set(number, state)
        started = kept_job(layout.scheduled_job)
        status = FakeScheduler(cluster.folder).status(started.handle)
        return {"job": started.dump(), "status": status.dump(), "timed_out": False}

    scheduled._airflow = {}  # as in the process of a task runner
    with pytest.raises(TaskDeferred):
        scheduled.execute_complete(context_of("training"), ended("preempted"))
    assert [one.started.handle.number for one in noted()] == [2]
    with pytest.raises(AirflowException):
        scheduled.execute_complete(context_of("training"), ended("lost", 2))
    assert noted() == []
    with pytest.raises(TaskDeferred):
        scheduled.execute(context_of("training", 2))
    assert [one.started.handle.number for one in noted()] == [3]
    scheduled.execute_complete(context_of("training", 2), ended("succeeded", 3))
    assert noted() == []


def test_a_job_that_a_triggerer_could_not_see_is_not_cancelled(
    scheduled, layout, run_task, cluster, context_of
):
    run = run_task(scheduled)
    job = run.message("DeferTask").trigger_kwargs["job"]
    event = {"job": kept_job(layout.scheduled_job).dump(), "unseen": "squeue is away."}
    assert job is not None and cancellations_in(cancellations(layout.workspace))
    with pytest.raises(AirflowException, match="runs on"):
        scheduled.execute_complete(context_of("training"), event)
    assert cancellations_in(cancellations(layout.workspace)) == []
    assert cluster.state(1) == "pending"


def test_a_trigger_that_failed_leaves_no_job(scheduled, cluster, context_of):
    deferred(scheduled, context_of("training"))
    cluster.set(1, "running")
    failure = ("__fail__", {"error": "Trigger failure"})
    with pytest.raises(AirflowException, match="JobLost: .*Trigger failure") as caught:
        scheduled.resume_execution(*failure, context_of("training"))
    assert not isinstance(caught.value, AirflowFailException)
    assert cluster.state(1) == "lost"


def test_a_trigger_that_failed_counts_as_an_attempt_of_the_run(scheduled, cluster, context_of):
    deferred(scheduled, context_of("training"))
    context = context_of("training", attempts=1)
    with pytest.raises(AirflowFailException, match="no more attempts"):
        scheduled.resume_execution("__fail__", {"error": "Trigger failure"}, context)


def test_the_job_of_a_trigger_that_failed_is_not_gone_on_with(
    scheduled, cluster, context_of, monkeypatch
):
    deferred(scheduled, context_of("training"))
    cluster.set(1, "running")
    cancel = type(cluster).cancel
    # It takes its time to end, as ranks do that write a last checkpoint.
    monkeypatch.setattr(type(cluster), "cancel", lambda *words: None)
    with pytest.raises(AirflowException, match="JobLost"):
        scheduled.resume_execution("__fail__", {"error": "Trigger failure"}, context_of("training"))
    assert cluster.state(1) == "running"
    monkeypatch.setattr(type(cluster), "cancel", cancel)
    again = deferred(scheduled, context_of("training", 2))
    assert (cluster.state(1), cluster.numbers()) == ("lost", [1, 2])
    assert StartedJob.load(again.trigger.job).handle.number == 2


def test_a_job_is_settled_by_its_own_launcher_though_the_manifest_names_another_now(
    train, scheduled, layout, cluster, context_of
):
    wish = deferred(scheduled, context_of("training"))
    edited = train("1", launcher="fake")
    assert deferred(edited, context_of("training", 2)).trigger.job == wish.trigger.job
    cluster.set(1, "succeeded")
    result = edited.execute_complete(context_of("training", 2), ended(wish.trigger))
    assert result == {"world_size": 2, "metrics": {}}
    part = json.loads((layout.kept / "lineage" / "train.json").read_text())
    assert part["environment"]["launcher"] == cluster.kind


def test_a_job_is_given_up_though_the_manifest_names_another_launcher_now(
    train, scheduled, layout, cluster, context_of
):
    deferred(scheduled, context_of("training"))
    cluster.set(1, "running")
    edited = train("1", launcher="fake")
    with pytest.raises(AirflowException, match="JobLost"):
        edited.resume_execution("__fail__", {"error": "Trigger failure"}, context_of("training"))
    assert cluster.state(1) == "lost"
    assert edited.execute(context_of("training", 2))["world_size"] == 2
    assert not layout.scheduled_job.exists()


def test_a_link_that_a_rank_plants_makes_the_triggerer_write_nowhere_else(
    scheduled, cluster, context_of, tmp_path
):
    started = StartedJob.load(deferred(scheduled, context_of("training")).trigger.job)
    (started.handle.record_dir / "watched").symlink_to(tmp_path / "elsewhere")
    started.mark_monitored()
    assert started.monitored and not (tmp_path / "elsewhere").exists()


def test_a_triggerer_that_cannot_see_the_job_leaves_it_to_the_next_try(
    scheduled, cluster, context_of
):
    wish = deferred(scheduled, context_of("training"))
    cluster.set(1, "running")
    StartedJob.load(wish.trigger.job).mark_monitored()
    event = {"job": wish.trigger.job, "unseen": "scontrol is not on PATH."}
    with pytest.raises(AirflowFailException, match="on PATH. fake-scheduler job 1 runs on"):
        scheduled.execute_complete(context_of("training"), event)
    again = deferred(scheduled, context_of("training", 2))
    assert again.trigger.job == wish.trigger.job
    assert cluster.state(1) == "running"


def test_a_secret_parameter_is_in_the_ranks_environment_and_nowhere_else(
    layout, train, run_task, monkeypatch, caplog
):
    monkeypatch.setenv("AIRFLOW_CONN_HUB", json.dumps({"conn_type": "http", "password": CANARY}))
    script = """
        import contextlib, glob, hashlib, os
        digest = hashlib.sha256(os.environ["PARAM_TOKEN"].encode()).hexdigest()
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                assert os.environ["PARAM_TOKEN"].encode() not in open(path, "rb").read()
        print(digest)
    """
    task = train(script, nodes=1, secrets={"token": "hub"})
    ended = run_task(task)
    assert ended.state == "success", ended.shown()
    log = (layout.logs / "rank-0.log").read_text()
    assert hashlib.sha256(CANARY.encode()).hexdigest() in log
    files = [path for path in layout.workspace.rglob("*") if path.is_file()]
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    assert CANARY not in ended.shown() + caplog.text


@pytest.mark.parametrize(
    ("connection", "said"),
    [(None, "'hub', which there is not"), ({"conn_type": "http"}, "has no password")],
)
def test_a_secret_that_is_not_there_is_said_before_anything_starts(
    layout, train, run_task, monkeypatch, connection, said
):
    if connection is not None:
        monkeypatch.setenv("AIRFLOW_CONN_HUB", json.dumps(connection))
    ended = run_task(train("", nodes=1, secrets={"token": "hub"}))
    # A connection that Airflow does not tell it may tell the next time.
    at_once = connection is not None
    assert (ended.state, isinstance(ended.error, AirflowFailException)) == ("failed", at_once)
    assert said in str(ended.error) and not (layout.logs / "rank-0.log").exists()


@pytest.mark.parametrize("gpu", [False, True])
def test_ranks_without_gpus_are_told_so(train, layout, context_of, gpu):
    env = job_of(train("1", gpu=gpu, slots=2), context_of("training")).env
    assert env.get("DDL_NO_GPU") == (None if gpu else "1")
    assert env["GPU_COUNT"] == ("2" if gpu else "0")  # of each learner
