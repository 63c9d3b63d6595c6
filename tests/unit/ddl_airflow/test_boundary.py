"""How our errors end a task, seen through Airflow's own task runner."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from airflow.sdk.log import mask_secret

from ddl_airflow.boundary import airflow_errors
from ddl_airflow.core.errors import AccessDenied, JobFailed, NoSpace, StagingError
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import StageDataStep, Step, StoreReference, TrainStep
from ddl_airflow.operators.base import StepOperator
from ddl_airflow.operators.stage import StageDataOperator
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.steps.base import StepTry
from ddl_airflow.storage.filesystem import os_errors


def caught(error):
    with pytest.raises(Exception) as found, airflow_errors():
        raise error
    return found.value


@pytest.mark.parametrize(
    "error", [AccessDenied("s3://b: refused"), JobFailed("rank 1", retryable=False)]
)
def test_permanent_error_is_one_that_airflow_does_not_retry(error):
    raised = caught(error)
    assert type(raised) is AirflowFailException
    assert str(raised).startswith(f"{type(error).__name__}: {error}")
    assert "Not retried" in str(raised)
    assert raised.__cause__ is None and raised.__suppress_context__


@pytest.mark.parametrize("error", [NoSpace("disk full"), JobFailed("rank 1")])
def test_retryable_error_is_one_that_airflow_retries(error):
    raised = caught(error)
    assert type(raised) is AirflowException
    assert str(raised) == f"{type(error).__name__}: {error}"
    assert raised.__cause__ is None and raised.__suppress_context__


def test_what_caused_an_error_is_in_the_log_before_it(caplog):
    """Airflow's log shows causes after what they caused, so that theirs would be its last words."""
    try:
        try:
            raise OSError("the disk")
        except OSError as cause:
            raise NoSpace("disk full") from cause
    except NoSpace as error:
        raised = caught(error)
    assert raised.__cause__ is None and raised.__suppress_context__
    first, *said = [record.getMessage() for record in caplog.records]
    assert first == "::group::what caused NoSpace"
    assert said[0] == "Traceback (most recent call last):" and "OSError: the disk" in said
    assert said[-1] == "::endgroup::"


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()])
def test_what_is_not_ours_passes_unchanged(error):
    with pytest.raises(type(error)) as found, airflow_errors():
        raise error
    assert found.value is error


def test_no_error_is_none():
    with airflow_errors():
        pass


@dataclass(frozen=True, kw_only=True)
class Asked(Step):
    error: Exception | None


class Fails(StepTry[Asked]):
    """A step that fails as it is told."""

    def rehearse(self):
        return "would fail"

    def run(self):
        if self.step.error is not None:
            raise self.step.error
        return {}


class Failing(StepOperator):
    work = Fails

    def __init__(self, *, error, **kwargs):
        super().__init__(step=Asked(error=error), **kwargs)


@pytest.mark.parametrize(
    ("error", "try_number", "state"),
    [
        (AccessDenied("refused"), 1, "failed"),
        (StagingError("hiccup"), 1, "up_for_retry"),
        (StagingError("hiccup"), 3, "failed"),
        (StagingError("never", retryable=False), 1, "failed"),
        (ValueError("a bug"), 1, "up_for_retry"),
    ],
)
def test_state_of_the_task(run_task, workspace, error, try_number, state):
    with DAG("boundary", schedule=None):
        task = Failing(task_id="t", error=error, retries=2)
    ended = run_task(task, try_number)
    assert ended.state == state
    assert str(error) in str(ended.error)


def failure_of(workspace):
    (path,) = workspace.glob("runs/*/*/airflow/failure.json")
    return json.loads(path.read_text("utf-8"))


def test_why_a_step_failed_is_in_the_runs_folder_until_one_begins(run_task, workspace):
    # With no secret of another test in it: of these Airflow would mask whichever is first.
    mask_secret("k4Zt8RbNy3")
    error = JobFailed("rank 1 of 2 raised k4Zt8RbNy3", rank=1)
    with DAG("noted", schedule=None):
        train = Failing(task_id="train", error=error, retries=2)
    run_task(train, 2)
    noted = {"step": "train", "try": 2, "error": "JobFailed", "rank": 1}
    assert failure_of(workspace) == noted | {"message": "rank 1 of 2 raised ***"}
    (path,) = workspace.glob("runs/*/*/airflow/record.json")
    assert "a-secret" not in path.read_text("utf-8")
    train.step = Asked(error=ValueError("a bug"))
    run_task(train, 3)
    noted = {"step": "train", "try": 3, "error": "ValueError", "rank": None}
    assert failure_of(workspace) == noted | {"message": "a bug"}
    (path,) = workspace.glob("runs/*/*/airflow/record.json")
    record = json.loads(path.read_text("utf-8"))
    assert record["outcome"] == {"state": "failed", **noted, "message": "a bug"}
    assert record["run"]["dag_id"] == "noted"
    for ended in (AirflowSkipException("nothing to do"), None):
        train.step = Asked(error=ended)
        run_task(train, 4)
        assert list(workspace.glob("runs/*/*/airflow/*failure.json*")) == []


def test_a_failure_that_cannot_be_noted_is_still_the_tasks(run_task, workspace, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddl_airflow.operators.base.write_beneath", full)
    with DAG("noted", schedule=None):
        task = Failing(task_id="train", error=StagingError("hiccup", retryable=False))
    assert "hiccup" in str(run_task(task).error)


def test_the_log_says_the_sentence_first_and_once_more_at_its_end(run_task, workspace, capsys):
    with DAG("shown", schedule=None):
        task = Failing(task_id="train", error=JobFailed("rank 1 of 2 raised it", retryable=False))
    run_task(task)
    logged = capsys.readouterr().out + capsys.readouterr().err
    said = [line for line in logged.splitlines() if "rank 1 of 2 raised it" in line]
    assert len(said) == 2, logged


def test_the_log_ends_with_the_sentence_also_where_something_caused_it(
    run_task, workspace, capsys, caplog
):
    class Reads(Fails):
        def run(self):
            with os_errors(self.layout.result):
                raise OSError(5, "Input/output error")

    class Unreadable(Failing):
        work = Reads

    with DAG("shown", schedule=None):
        task = Unreadable(task_id="t", error=None)
    ended = run_task(task)
    assert ended.error.__cause__ is None and ended.error.__suppress_context__
    assert "OSError: [Errno 5] Input/output error" in caplog.messages  # by the boundary, before
    logged = capsys.readouterr().out  # by Airflow
    assert "Input/output error" in logged[logged.rindex("StagingError: ") :]
    assert "OSError" not in logged


def test_no_message_of_a_failing_task_holds_a_key(run_task, workspace, tmp_path):
    (tmp_path / "train.py").write_text("1\n")
    keys = ("AKIDBOUNDARYTEST", "boundarySecretOfTest")
    with DAG("secrets", schedule=None):
        task = StageDataOperator(
            task_id="stage_data",
            retries=2,
            step=StageDataStep(
                dataset=StoreReference(
                    "s3://some-bucket",
                    Connection(
                        endpoint_url="ftp://127.0.0.1:9",
                        access_key_id=keys[0],
                        secret_access_key=keys[1],
                    ),
                ),
                code=tmp_path,
                commands=["python train.py"],
            ),
        )
    ended = run_task(task)
    assert ended.state == "failed"
    assert "ConnectionInvalid" in str(ended.error)
    assert not [key for key in keys if key in ended.shown()]
    rendered = ended.message("SetRenderedFields").rendered_fields
    assert rendered["dataset"]["uri"] == "s3://some-bucket"
    assert rendered["dataset"]["secret_access_key"] == "***"
    masked = {m.value for m in ended.sent if type(m).__name__ == "MaskSecret"}
    assert masked >= set(keys)  # so that the supervisor keeps them out of the log


def test_folder_is_staged_and_the_data_is_no_event(run_task, workspace, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("1\n")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.bin").write_bytes(b"abc")
    uri = (tmp_path / "data").as_uri()
    with DAG("good", schedule=None):
        task = StageDataOperator(
            task_id="stage_data",
            step=StageDataStep(
                dataset=StoreReference(uri), code=tmp_path / "code", commands=["python train.py"]
            ),
        )
    ended = run_task(task)
    assert (ended.state, ended.error) == ("success", None)
    assert ended.message("SucceedTask").outlet_events == []


def test_settings_of_the_training_are_rendered_fields(run_task, workspace):
    with DAG("shown", schedule=None):
        task = TrainOperator(
            task_id="train",
            step=TrainStep(
                command="python train.py --run {{ run_id }}",
                nodes=2,
                slots=3,
                launcher="fake",
                metrics=[{"name": "loss", "regex": "l=(.*)"}],
            ),
        )
    fields = run_task(task).message("SetRenderedFields").rendered_fields
    assert fields["command"].startswith("python train.py --run manual__2026")
    assert (fields["nodes"], fields["slots"], fields["launcher"]) == (2, 3, "fake")
    assert fields["metrics"] == [{"name": "loss", "regex": "l=(.*)"}]
