from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from airflow.providers.standard.operators.python import BranchPythonOperator
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from ddl_airflow.core.errors import (
    JobLost,
    ManifestInvalid,
    SettingInvalid,
    SourceMissing,
    StagingError,
    TimedOut,
)
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.manifest.rights import Place, Rights
from ddl_airflow.core.plan import (
    StageDataStep,
    Step,
    StoreReference,
    TrainStep,
    TransformStep,
    UploadResultsStep,
)
from ddl_airflow.lineage.record import fixed_run, write_part
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.operators.base import StepOperator, layout_of, rank_python
from ddl_airflow.operators.stage import StageDataOperator
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.operators.upload import UploadResultsOperator
from ddl_airflow.site import training_of, workspace
from ddl_airflow.steps import base
from ddl_airflow.steps.base import StepTry, TransferLog
from tests.unit.ddl_airflow.conftest import RUN_ID


@dataclass(frozen=True, kw_only=True)
class Asked(Step):
    error: Exception | None = None


class Try(StepTry[Asked]):
    """Returns where it ran, or raises what it was given."""

    def rehearse(self):
        return "would run"

    def run(self):
        if self.step.error is not None:
            raise self.step.error
        assert self.layout.result.is_dir() and self.layout.state.is_dir()
        return {"root": str(self.layout.root)}


class Task(StepOperator):
    work = Try

    def __init__(self, *, error=None, **kwargs):
        super().__init__(step=Asked(error=error), **kwargs)


def test_workspace_is_the_sites_setting(monkeypatch, tmp_path):
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", str(tmp_path / "w"))
    assert workspace() == tmp_path / "w"
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", "~/w")
    assert workspace() == Path.home() / "w"


def test_workspace_is_never_a_name_with_braces(monkeypatch):
    monkeypatch.delenv("AIRFLOW__DDL__WORKSPACE", raising=False)
    found = workspace()
    assert found.name == "ddl"
    assert found.is_absolute()
    assert "{" not in str(found)


def test_rank_python_is_the_manifests_then_the_sites_then_this_one(monkeypatch):
    monkeypatch.delenv("AIRFLOW__DDL__PYTHON", raising=False)
    assert rank_python("") == sys.executable
    monkeypatch.setenv("AIRFLOW__DDL__PYTHON", "/site/python")
    assert rank_python("") == "/site/python"
    assert rank_python("/manifest/python") == "/manifest/python"


def test_every_try_of_a_run_has_the_same_folder(workspace, context_of):
    first = Task(task_id="t").execute(context_of("some-dag", 1))
    again = Task(task_id="t").execute(context_of("some-dag", 2))
    assert first == again
    run_id = context_of("some-dag")["dag_run"].run_id
    root = workspace / "runs" / "some-dag" / training_of("some-dag", run_id)
    assert first == {"root": str(root)}


def test_two_sites_publish_to_one_bucket_without_meeting(workspace, monkeypatch):
    here = training_of("d", "r")
    assert training_of("d", "r") == here
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", str(workspace / "of another"))
    there = training_of("d", "r")
    assert there != here
    monkeypatch.setenv("AIRFLOW__DDL__SITE_ID", "berlin")
    named = training_of("d", "r")
    assert named not in (here, there)
    # The id is the setting's from then on, wherever the workspace is.
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", str(workspace))
    assert training_of("d", "r") == named
    monkeypatch.delenv("AIRFLOW__DDL__SITE_ID")
    assert training_of("d", "r") == here


@pytest.mark.parametrize(
    ("error", "raised"),
    [(StagingError("x"), AirflowException), (SourceMissing("x"), AirflowFailException)],
)
def test_errors_are_airflows(workspace, context_of, error, raised):
    with pytest.raises(AirflowException) as caught:
        Task(task_id="t", error=error).execute(context_of("some-dag"))
    assert type(caught.value) is raised


def test_a_run_that_was_given_fewer_attempts_gives_up_earlier(workspace, context_of):
    step = Task(task_id="t", error=StagingError("x"))
    with pytest.raises(AirflowException) as caught:
        step.execute(context_of("some-dag", 1, attempts=2))
    assert type(caught.value) is AirflowException
    with pytest.raises(AirflowFailException, match="given no more attempts"):
        step.execute(context_of("some-dag", 2, attempts=2))


class Ends(Try):
    """Its process is killed; or it is ended by Airflow, which calls on_kill."""

    task = None

    def run(self):
        if self.task is None:
            os.kill(os.getpid(), signal.SIGKILL)
        self.task.on_kill()
        raise JobLost("rank 0 was ended")


def killed(step, context):
    """As by the kernel, for want of memory: nothing of it says so."""
    if (pid := os.fork()) == 0:
        try:
            step.execute(context)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_worker_that_was_killed_has_used_an_attempt_of_the_run(workspace, context_of):
    step, dies = Task(task_id="t", retries=3), Task(task_id="t", retries=3)
    dies.work = Ends
    killed(dies, context_of("some-dag", 1, 3, attempts=2))
    killed(dies, context_of("some-dag", 2, 3, attempts=2))
    with pytest.raises(AirflowFailException, match="try 2 .*killed.*given no more attempts"):
        step.execute(context_of("some-dag", 3, 3, attempts=2))
    # Who clears it then gives it all its attempts; and a run that names none has the task's.
    step.execute(context_of("some-dag", 4, 6, attempts=2))
    killed(dies, context_of("some-dag", 5, 6, attempts=2))
    step.execute(context_of("some-dag", 6, 6, attempts=4))


def test_a_task_that_was_cleared_while_it_ran_is_tried_though_it_had_one_attempt(
    workspace, context_of
):
    """Airflow ends it, and starts another try without raising its limit."""
    step, ended = Task(task_id="t", retries=3), Task(task_id="t", retries=3)
    ended.work = type("Cleared", (Ends,), {"task": ended})
    with pytest.raises(AirflowFailException, match="rank 0 was ended"):
        ended.execute(context_of("some-dag", 1, 3, attempts=1))
    step.execute(context_of("some-dag", 2, 3, attempts=1))
    killed_last = Task(task_id="t", retries=1)
    killed_last.work = Ends
    killed(killed_last, context_of("some-dag", 2, 1, attempts=2))
    Task(task_id="t", retries=1).execute(context_of("some-dag", 3, 1, attempts=2))


def test_a_cleared_task_has_all_its_attempts_again(workspace, context_of):
    step = Task(task_id="t", error=StagingError("x"), retries=2)
    # Tried three times and cleared: Airflow counts on, and its limit with it.
    for number, last in ((4, False), (5, False), (6, True)):
        context = context_of("some-dag", number, max_tries=5, attempts=3)
        assert step.tries(context) == number - 3
        with pytest.raises(AirflowException) as caught:
            step.execute(context)
        assert (type(caught.value) is AirflowFailException) == last
    # The manifest has got more attempts since.
    assert step.tries(context_of("some-dag", 1, max_tries=0)) == 1
    assert Task(task_id="t", retries=0).tries(context_of("some-dag", 1, max_tries=9)) == 1


def test_workspace_that_cannot_be_made_is_an_error_of_ours(context_of, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    for place in ("file", "file/w", "file/w/x"):
        monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", str(tmp_path / place))
        said = rf"StagingError: {tmp_path}/file is no folder, .*Correct \[ddl\] workspace"
        with pytest.raises(AirflowFailException, match=said):
            Task(task_id="t").execute(context_of("some-dag"))


def test_transfer_log_speaks_now_and_then(monkeypatch, caplog):
    now = [100.0]
    monkeypatch.setattr(base.time, "monotonic", lambda: now[0])
    with caplog.at_level(logging.INFO):
        say = TransferLog(logging.getLogger("unit"), "staged")
        for second, done in ((1.0, 1), (2.5, 2), (3.0, 3), (5.0, 4)):
            now[0] = 100.0 + second
            say(done * 2**20, 10 * 2**20, done, 10)
    assert [record.getMessage() for record in caplog.records] == [
        "staged 2/10 files · 2.0/10.0 MiB · 0.8 MiB/s · ETA 10 s",
        "staged 4/10 files · 4.0/10.0 MiB · 0.8 MiB/s · ETA 8 s",
    ]


def test_conf_that_the_form_does_not_know_is_refused_by_every_step(workspace, context_of):
    context = context_of("some-dag", experiment_id="of-another")
    context["dag_run"].conf = {"experiment_id": "of-another"}
    with pytest.raises(
        AirflowFailException, match="SettingUnknown: .*'experiment_id' is not known"
    ):
        Task(task_id="t", settings=["nodes"]).execute(context)
    assert not (workspace / "experiments").exists()
    Task(task_id="t", settings=["nodes", "experiment_id"]).execute(context)


def test_a_run_goes_on_with_no_experiment_of_another_dag(workspace, context_of):
    Task(task_id="t").execute(context_of("one", experiment_id="wide"))
    with pytest.raises(AirflowFailException, match="'wide' is an experiment of one"):
        Task(task_id="t", experiment="wide").execute(context_of("two", experiment_id="wide"))
    # Nor does anybody look there for what the run has left.
    assert noted_experiment(context_of("two")) == layout_of(context_of("two")).training_id
    with pytest.raises(AirflowException, match="x"):
        Task(task_id="t", error=StagingError("x")).execute(context_of("one", experiment_id="wide"))
    assert noted_experiment(context_of("one")) == "wide"


def noted_experiment(context):
    layout = layout_of(context)
    assert json.loads(layout.failure.read_text())["step"] == "t"
    return json.loads((layout.kept / "record.json").read_text())["run"]["experiment"]


def test_whose_an_experiment_is_cannot_be_read_and_the_run_says_so(workspace, context_of):
    context = context_of("one", experiment_id="wide")
    Task(task_id="t").execute(context)
    (workspace / "experiments" / ".owners" / "wide.json").write_text("no JSON")
    with pytest.raises(AirflowFailException, match="wide.json holds no JSON"):
        Task(task_id="t").execute(context)
    assert noted_experiment(context_of("one")) == layout_of(context_of("one")).training_id


@pytest.mark.parametrize("name", ["../../outside/two", "{tmp_path}/outside/two", "two\n", 5, False])
@pytest.mark.parametrize("settings", [None, ["nodes"]])
def test_what_is_no_name_of_an_experiment_makes_no_folder(
    workspace, context_of, tmp_path, settings, name
):
    name = name.format(tmp_path=tmp_path) if isinstance(name, str) else name
    context = context_of("two", experiment_id=name)
    context["dag_run"].conf = {"experiment_id": name}
    with pytest.raises(AirflowFailException, match=r"SettingInvalid: experiment_id: .* is no name"):
        Task(task_id="t", settings=settings).execute(context)
    made = {path.name for path in tmp_path.rglob("*")}
    assert not made & {"outside", "two\n", "5", "False"} and "experiment" not in made
    # Why is in the run's folder, as for any other failure.
    failure = json.loads(layout_of(context_of("two")).failure.read_text())
    assert failure["error"] == "SettingInvalid"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused(workspace, context_of, value):
    """JSON Schema finds it within any bounds, and Python's JSON reads and writes it."""
    context = context_of("some-dag", rate=value)
    context["dag_run"].conf = {"rate": value}
    with pytest.raises(AirflowFailException, match=f"rate is {value}, wanted a number"):
        Task(task_id="t", settings=["rate"]).execute(context)


def test_an_unmounted_workspace_is_not_built_anew(workspace, context_of, tmp_path):
    Task(task_id="t").execute(context_of("some-dag"))
    workspace.rename(tmp_path / "away")
    with pytest.raises(
        AirflowException, match="is not the workspace that was there.*Mount it"
    ) as e:
        Task(task_id="t").execute(context_of("some-dag"))
    assert not isinstance(e.value, AirflowFailException)
    assert not workspace.exists()


def test_a_host_without_what_the_run_has_staged_does_not_go_on(workspace, context_of):
    with DAG("some-dag", schedule=None):
        first, second = Task(task_id="stage_data"), Task(task_id="train")
        first >> second
    root = Path(first.execute(context_of("some-dag"))["root"])
    with pytest.raises(AirflowException, match="nothing that stage_data left for this run is here"):
        second.execute(context_of("some-dag"))
    write_part(RunLayout(workspace, "some-dag", root.name), "stage_data", {})
    assert second.execute(context_of("some-dag"))["root"] == str(root)


def test_a_run_is_one_training(workspace, context_of):
    """Two would work in one folder, and each publish what the other has left there."""
    context = context_of("some-dag")
    context["ti"].map_index = 1
    with pytest.raises(AirflowFailException, match="this task is mapped. Start a run for each"):
        Task(task_id="t").execute(context)
    with DAG("some-dag", schedule=None):
        for name in ("first", "second"):
            train = TrainOperator(task_id=name, step=TrainStep(command="python train.py"))
        other = Task(task_id="other")
    for task in (train, other):  # a stage, too, before it fetches data for hours
        with pytest.raises(AirflowFailException, match="some-dag has 2 of a kind: first, second"):
            task.execute(context_of("some-dag"))


def test_of_trainings_behind_a_branch_one_runs(workspace, context_of):
    with DAG("some-dag", schedule=None):
        chosen = BranchPythonOperator(task_id="which", python_callable=lambda: "gpu")
        trains = [
            TrainOperator(task_id=name, step=TrainStep(command="python train.py"))
            for name in ("gpu", "cpu")
        ]
        chosen >> trains
    trains[0]._check_one_training(context_of("some-dag"))
    with pytest.raises(SettingInvalid, match="2 of a kind: also, cpu, gpu"), chosen.dag:
        also = TrainOperator(task_id="also", step=TrainStep(command="python train.py"))
        also._check_one_training(context_of("some-dag"))


def test_what_an_earlier_task_returned_is_taken(workspace, context_of):
    with DAG("some-dag", schedule=None):
        first = Task(task_id="count")
        train = TrainOperator(
            task_id="train", step=TrainStep(command="python train.py", nodes=first.output)
        )
    context = context_of("some-dag")
    asked = {}
    context["ti"].task = train
    context["ti"].xcom_pull = lambda **words: asked.update(words) or 3
    train.render_template_fields(context)
    assert (train.nodes, asked["task_ids"]) == (3, "count")


@pytest.mark.parametrize("whole", [False, True])
def test_what_earlier_tasks_returned_is_taken_also_within_a_field(
    workspace, context_of, tmp_path, whole
):
    """The rate that a search has found, and the place that a query has written to."""
    with DAG("some-dag", schedule=None):
        search, query = Task(task_id="search"), Task(task_id="query")
        stage = StageDataOperator(
            task_id="stage",
            step=StageDataStep(
                dataset=StoreReference(query.output), code=tmp_path, commands=["python train.py"]
            ),
        )
        within = {"rate": search.output["rate"], "epochs": 2}
        train = TrainOperator(
            task_id="train",
            step=TrainStep(
                command="python train.py",
                parameters=search.output["all"] if whole else within,
                metrics=[{"name": "loss", "regex": search.output["regex"]}],
            ),
        )
        stage >> train
    assert stage.upstream_task_ids == {"query"}
    assert train.upstream_task_ids == {"search", "stage"}
    assert "parameters" not in train.step.fixed() and "slots" in train.step.fixed()
    returned = {"rate": 0.1, "regex": "loss=(.*)", "return_value": "file:///data/"}
    returned["all"] = {"rate": 0.1, "epochs": 2}
    context = context_of("some-dag")
    context["ti"].xcom_pull = lambda key, **_: returned[key]
    for task in (stage, train):
        context["ti"].task = task
        task.render_template_fields(context)
    assert train.asked().parameters == {"rate": 0.1, "epochs": 2}
    assert list(train.asked().metrics) == [{"name": "loss", "regex": "loss=(.*)"}]
    assert stage.asked().dataset.uri == stage.dataset["uri"] == "file:///data"
    returned["return_value"] = None
    context["ti"].task = stage
    stage.step = replace(stage.step, dataset=StoreReference(query.output))
    stage.dataset = {"uri": query.output}
    with pytest.raises(AirflowFailException, match="SettingInvalid: dataset: .* returned None"):
        stage.render_template_fields(context)


def test_an_operator_says_what_it_is_to_be_given(tmp_path):
    """A line of Airflow's, or of ours, is all that an import error shows of the traceback."""
    with DAG("some-dag", schedule=None):
        for step in (TransformStep(), {"command": "python train.py"}, None):
            with pytest.raises(TypeError) as said:
                TrainOperator(task_id="train", step=step)
            assert str(said.value) == (
                f"train: step is of type {type(step).__name__}, and TrainOperator wants a "
                "TrainStep of ddl_airflow.core.plan"
            )
        search = Task(task_id="search")
        for command, why in (
            (["python", "train.py"], r"train: command is \['python', 'train.py'\], wanted text"),
            (search.output, "an earlier task returns.*Give values as parameters"),
            (f"python train.py {search.output}", "an earlier task returns.*Give values as param"),
        ):
            with pytest.raises(TypeError, match=why):
                TrainOperator(task_id="train", step=TrainStep(command=command))
        data = StoreReference(tmp_path.as_uri())
        with pytest.raises(TypeError, match="commands is 'python train.py', wanted a list of text"):
            StageDataOperator(
                task_id="stage",
                step=StageDataStep(dataset=data, code=tmp_path, commands="python train.py"),
            )
        results = StoreReference(Task(task_id="query").output)
        with pytest.raises(ValueError, match="the place of results is needed"):
            UploadResultsOperator(
                task_id="upload", step=UploadResultsStep(results=results, manifest={})
            )


def with_data(manifest):
    (manifest.parent / "data").mkdir()
    (manifest.parent / "data" / "numbers").write_text("1")
    return manifest


@pytest.mark.parametrize(
    ("value", "said"),
    [("x" * 131_062, "note has 131,062 bytes.* Put it into a file"), ("a\0b", "note is 'a.x00b'")],
)
def test_a_value_that_no_script_can_be_given_fails_before_data_are_fetched(
    tmp_path, workspace, write_manifest, run_task, value, said
):
    """Linux says of the first: Argument list too long."""
    more = "parameters: {note: {default: none}}\n"
    path = with_data(write_manifest(tmp_path / "dags", "noted", more=more))
    dag = dag_from(load_manifest(path), path)
    done = run_task(dag.get_task("stage_data"), conf={"note": value})
    assert done.state == "failed" and isinstance(done.error, AirflowFailException)
    assert re.match(f"SettingInvalid: {said}", str(done.error)), str(done.error)
    assert not (workspace / "cache").exists()


@pytest.mark.parametrize("field", ["command", "commands", "evaluation"])
def test_a_command_with_dates_in_a_run_without_any_fails_before_data_are_fetched(
    tmp_path, workspace, write_manifest, run_task, field
):
    """As in each run that changed data have started."""
    date, more = "--until {{ ds }}", ""
    commands = {"command": f"python train.py {date}", "commands": "python train.py"}
    if field == "commands":
        commands["commands"] += f" ; python train.py {date}"
    if field == "evaluation":
        more = f"evaluation: {{metric: f1, minimum: 1, command: 'python train.py {date}'}}\n"
    command = commands.get(field, "python train.py")
    path = with_data(write_manifest(tmp_path / "dags", "dated", f"'{command}'", more=more))
    dag = dag_from(load_manifest(path), path)
    done = run_task(dag.get_task("stage_data"))
    assert done.state == "failed" and isinstance(done.error, AirflowFailException)
    assert "SettingInvalid: command" in str(done.error)
    assert "names ds, and this run has no logical date" in str(done.error)
    assert "python train.py --until {{ ds }}" in str(done.error)
    assert not (workspace / "cache").exists()
    # What each run has, or what is taken without it, is fine.
    for other in ("{{ dag_run.run_after | ds }}", "{{ ds | default(run_id) }}"):
        path.write_text(path.read_text().replace("{{ ds }}", other))
        dag = dag_from(load_manifest(path), path)
        assert run_task(dag.get_task("stage_data")).state == "success"
        path.write_text(path.read_text().replace(other, "{{ ds }}"))


def test_scripts_of_a_folder_that_became_a_link_after_the_parse_are_not_copied(
    tmp_path, workspace, write_manifest, run_task, monkeypatch
):
    """What the manifest may read was decided of the folder that was there then."""
    vision, guest, data = (
        tmp_path / "dags" / "vision",
        tmp_path / "dags" / "guest",
        tmp_path / "d",
    )
    entry = {"paths": [str(data)]}
    rights = {"rights": {str(vision): {}, str(guest): entry}}
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    write_manifest(vision, "vision")
    (vision / "secret.py").write_text("key = 1\n")
    path = write_manifest(guest, "guest")
    path.write_text(path.read_text().replace("./", f"{data}/"))
    (data / "data").mkdir(parents=True)
    (data / "data" / "a").write_text("1")
    task = dag_from(load_manifest(path), path).get_task("stage_data")
    assert task.step.dataset.within == (guest, data)
    # Not the folder of another moment, where somebody has looked already.
    place = Place(guest, Rights())
    other = dag_from(
        load_manifest(path), vision / path.name, place=Place(vision, Rights((), (data,)))
    )
    assert other.get_task("stage_data").step.dataset.within == (vision, data)
    with pytest.raises(ManifestInvalid, match="is not a folder for manifests in"):
        dag_from(load_manifest(path), path, place=place)
    guest.rename(tmp_path / "before")
    guest.symlink_to("vision")
    done = run_task(task)
    assert done.state == "up_for_retry"  # git-sync may have turned a link just then
    assert f"code: {guest} leads to {vision}, out of {guest}, {data}. Put the scripts" in str(
        done.error
    )
    assert not list(workspace.rglob("secret.py"))


def test_a_date_of_dag_run_is_no_word_of_a_command_where_the_run_has_none(
    tmp_path, workspace, write_manifest, run_task
):
    """The training would have the word None."""
    command = "python train.py --until {{ dag_run.logical_date | ds }}"
    path = write_manifest(tmp_path / "dags", "dated", f"'{command}'")
    done = run_task(dag_from(load_manifest(path), path).get_task("stage_data"))
    assert done.state == "failed" and isinstance(done.error, AirflowFailException)
    assert "names dag_run.logical_date, and this run has no logical date" in str(done.error)


@pytest.mark.parametrize("field", ["command", "commands", "evaluation"])
@pytest.mark.parametrize(
    "template", ["{{ dag_run.conf.get(''day'') }}", "{{ params.experiment_id }}"]
)
def test_none_is_no_word_of_a_command(
    tmp_path, workspace, write_manifest, run_task, field, template
):
    """The training would have the word None, and nobody would see it."""
    given, more = f"--of {{{{ run_id }}}} --until {template}", ""
    commands = {"command": f"python train.py {given}"}
    commands["commands"] = f"python train.py ; {commands['command']}"
    if field == "evaluation":
        more = f"evaluation: {{metric: f1, minimum: 1, command: '{commands['command']}'}}\n"
    command = commands.get(field, "python train.py")
    path = with_data(write_manifest(tmp_path / "dags", "dated", f"'{command}'", more=more))
    # Of these a trigger form asks for an experiment, and none is fine.
    text = path.read_text().replace("independent", "parameter_server")
    path.write_text(text)
    shown = template.replace("''", "'")
    dag = dag_from(load_manifest(path), path)
    done = run_task(dag.get_task("stage_data"))
    assert done.state == "failed" and isinstance(done.error, AirflowFailException)
    named = "commands" if field == "commands" else "command"
    assert f"SettingInvalid: {named}: " in str(done.error)
    assert f": {shown} has no value in this run" in str(done.error)
    assert not (workspace / "cache").exists()
    # What is taken without one, or made of None on purpose, is fine.
    inside = template.removeprefix("{{").removesuffix("}}").strip()
    for other in (
        f"{{{{ {inside} or ''all'' }}}}",
        f"{{{{ ''until-'' ~ {inside} }}}}",
        f"{{{{ {inside} | string }}}}",
        f"{{% if {inside} %}}{template}{{% endif %}}",
    ):
        path.write_text(text.replace(template, other))
        dag = dag_from(load_manifest(path), path)
        assert run_task(dag.get_task("stage_data")).state == "success"


def test_values_are_taken_as_the_form_means_them(tmp_path, workspace, write_manifest, run_task):
    """JSON Schema, and so Airflow, takes 4.0 for an integer, also where it is sent as ``conf``; and
    its form sends null for a text that is left empty.
    """
    command = "python train.py --epochs {{ params.epochs }} --rate {{ params.rate }}"
    more = "parameters: {epochs: {default: 3, minimum: 1}, rate: 0.5, note: ''}\n"
    script = (
        "import os, sys\n"
        "print(os.environ['PARAM_EPOCHS'], repr(os.environ['PARAM_NOTE']), *sys.argv[1:])\n"
    )
    path = with_data(
        write_manifest(tmp_path / "dags", "whole", f"'{command}'", more=more, script=script)
    )
    dag = dag_from(load_manifest(path), path)
    conf = {"nodes": 2.0, "epochs": 4.0, "rate": 2.0, "attempts": 1.0, "note": None}
    for task_id in ("stage_data", "train"):
        done = run_task(dag.get_task(task_id), conf=conf)
        assert done.state == "success", done.error
    layout = RunLayout(workspace, "whole", training_of("whole", RUN_ID))
    for rank in (0, 1):
        assert (layout.logs / f"rank-{rank}.log").read_text() == "4 '' --epochs 4 --rate 2.0\n"
    kept = fixed_run(layout)["made_of"]["parameters"]
    assert {name: repr(kept[name]) for name in conf} == {
        **{"nodes": "2", "epochs": "4", "rate": "2.0", "attempts": "1", "note": "''"}
    }


def test_what_airflow_itself_puts_into_conf_is_no_setting(
    tmp_path, workspace, write_manifest, run_task
):
    """TriggerDagRunOperator does where there is OpenLineage, with other ids each time."""
    conf = {"openlineage": {"parentRunId": "0198"}, "airflow/task_span_detail_level": 2}
    path = with_data(write_manifest(tmp_path / "dags", "asked", "python train.py"))
    dag = dag_from(load_manifest(path), path)
    done = run_task(dag.get_task("stage_data"), conf=conf)
    assert done.state == "success", done.error
    layout = RunLayout(workspace, "asked", training_of("asked", RUN_ID))
    assert not conf.keys() & fixed_run(layout)["made_of"]["parameters"].keys()


def test_what_airflow_itself_puts_into_conf_is_no_parameter_of_a_dag_of_ones_own(context_of):
    with DAG("own", schedule=None, params={"until": 3}):
        task = Task(task_id="t")
    context = context_of("own", until=3, openlineage={"parentRunId": "0198"}, other=1)
    task.render_template_fields(context)
    assert dict(context["params"]) == {"until": 3, "other": 1}
    with DAG("asks", schedule=None, params={"openlineage": 3}):
        task = Task(task_id="t")
    context = context_of("asks", openlineage=4)
    task.render_template_fields(context)
    assert dict(context["params"]) == {"openlineage": 4}


def test_a_run_without_an_experiment_has_none_in_each_task(
    tmp_path, write_manifest, context_of, monkeypatch
):
    """Tasks after stage_data have no form's schema, and took null for an empty text."""
    path = with_data(write_manifest(tmp_path / "dags", "alone", more="parameters: {note: ''}\n"))
    independent, servers = "distribution: independent", "distribution: parameter_server"
    path.write_text(path.read_text("utf-8").replace(independent, servers), "utf-8")
    for task_id in ("stage_data", "train"):
        monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_TASK_ID", task_id)
        task = dag_from(load_manifest(path), path).get_task(task_id)
        context = context_of("alone", experiment_id=None, note=None)
        task.render_template_fields(context)
        assert dict(context["params"]) == {"experiment_id": None, "note": ""}


def test_what_has_no_value_in_a_dag_of_ones_own_is_no_empty_text(run_task, workspace):
    with DAG("own", schedule=None, params={"until": None}):
        train = TrainOperator(
            task_id="train", step=TrainStep(command="python train.py {{ params.until }}")
        )
    done = run_task(train)
    assert done.state == "failed" and "has no value in this run" in str(done.error)


def test_a_template_that_cannot_be_filled_in_is_not_tried_again(run_task, workspace):
    with DAG("dated", schedule=None):
        train = TrainOperator(
            task_id="train",
            retries=2,
            step=TrainStep(command="python train.py {{ params.none }} {{ ds }}"),
        )
    done = run_task(train)
    assert done.state == "failed"
    assert "SettingInvalid: command: 'python train.py {{ params.none }}" in str(done.error)


def outcome_of(workspace):
    (path,) = workspace.glob("runs/*/*/airflow/record.json")
    return json.loads(path.read_text("utf-8"))["outcome"]


class Looks(Try):
    """Keeps what the run's record says while it works."""

    seen: ClassVar[list] = []

    def run(self):
        Looks.seen.append(outcome_of(self.layout.workspace))
        return super().run()


class Looking(Task):
    work = Looks


def test_the_record_says_that_a_retry_is_at_work(workspace, context_of):
    with pytest.raises(AirflowException):
        Task(task_id="train", error=StagingError("x")).execute(context_of("some-dag", 1))
    assert outcome_of(workspace)["state"] == "failed"
    Looking(task_id="train").execute(context_of("some-dag", 2))
    assert Looks.seen == [{"state": "running", "step": "train", "try": 2, "at_work": True}]
    assert outcome_of(workspace) == {"state": "running", "step": "train"}


def test_a_task_that_was_ended_by_airflow_is_said_to_be_cancelled(workspace, context_of):
    """As by a person who marks it failed: it calls on_kill, and what the step works with ends."""

    class Killed(Try):
        def run(self):
            task.on_kill()
            raise self.step.error

    for error, state in (
        (JobLost("rank 0 was ended"), "cancelled"),
        (TimedOut("it took too long"), "failed"),
    ):
        task = Task(task_id="train", error=error)
        task.work = Killed
        with pytest.raises(AirflowException):
            task.execute(context_of("some-dag", 1))
        assert outcome_of(workspace)["state"] == state
