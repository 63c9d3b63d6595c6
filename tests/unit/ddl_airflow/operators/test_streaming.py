"""stage_data and train where the data come while the ranks train."""

from __future__ import annotations

import json
import os
import textwrap
import threading
import time
from datetime import timedelta

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import StageDataStep, StoreReference, TrainStep
from ddl_airflow.launchers.processes import marked
from ddl_airflow.lineage.record import read_part
from ddl_airflow.operators.stage import StageDataOperator
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.site import training_of
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.staging import stage as stage_files
from tests.limits import until

# Each rank says what it reads.
READS = """
    import os
    from ddl_ops.data import files
    for epoch in range(2):
        for path in files():
            with open(path) as file:
                print(epoch, os.path.basename(path), file.read(), flush=True)
"""
LISTS = """
    import os
    print(sorted(one for one in os.listdir(os.environ["DATA_DIR"]) if one[0] != "."))
    found = os.environ["CHECKPOINT_DIR"] + "/found"
    print("goes on" if os.path.exists(found) else "starts")
    open(found, "w").close()
"""
NAMES = ("a", "b", "c")
READ = "".join(f"{epoch} {name} of {name}\n" for epoch in range(2) for name in NAMES)


@pytest.fixture
def gate(monkeypatch):
    """Keeps all objects but the first from coming until it is open."""
    opened, get = threading.Event(), FolderStore.get

    def gated(store, obj, path, advance):
        while obj.key != "a" and not opened.wait(0.01):
            advance(0)
        # As of a bucket.
        return get(store, obj, path, advance)._replace(proved={"etag_is": "md5"})

    monkeypatch.setattr(FolderStore, "get", gated)
    yield opened
    opened.set()


@pytest.fixture
def layout(workspace, context_of):
    run = context_of("streaming")["dag_run"]
    return RunLayout(workspace, "streaming", training_of("streaming", run.run_id))


@pytest.fixture
def tasks(tmp_path):
    """tasks(script, **of the train step) -> stage_data and train."""
    for name in NAMES:
        (tmp_path / "input").mkdir(exist_ok=True)
        (tmp_path / "input" / name).write_text(f"of {name}")
    (tmp_path / "scripts").mkdir()
    dataset = StoreReference((tmp_path / "input").as_uri())

    def make(script, *, prove=False, exclude=(), **more):
        (tmp_path / "scripts" / "train.py").write_text(textwrap.dedent(script))
        usual = {"command": "python train.py", "nodes": 2, "distribution": "independent"}
        usual |= {"stream": True, "dataset": dataset, "prove": prove}
        with DAG("streaming", schedule=None):
            stage = StageDataOperator(
                task_id="stage_data",
                step=StageDataStep(
                    dataset=dataset,
                    code=tmp_path / "scripts",
                    commands=["python train.py"],
                    prove=prove,
                    exclude=exclude,
                ),
            )
            train = TrainOperator(task_id="train", step=TrainStep(**usual | more))
        stage >> train
        return stage, train

    return make


def log(layout, rank=0):
    path = layout.logs / f"rank-{rank}.log"
    return path.read_text() if path.exists() else ""


def fetching():
    """Threads that bring data; the page's, of other tests, may be there as well."""
    names = ("ddl-stream", "ddl-transfer")
    return [each for each in threading.enumerate() if each.name.startswith(names)]


def in_background(task, context):
    """Runs the task; what it raises is in the list."""
    raised = []

    def run():
        try:
            task.execute(context)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def wait_until_begun(layout, thread, raised):
    """Until the logs say that both ranks have read the first file."""
    until(lambda: not thread.is_alive() or all("\n" in log(layout, rank) for rank in range(2)), 60)
    assert thread.is_alive(), raised


def test_ranks_train_while_the_data_come(tasks, layout, context_of, gate, tmp_path):
    stage, train = tasks(READS, prove=True)
    said = stage.execute(context_of("streaming"))
    assert (said["files"], said["bytes"]) == (3, 12) and not layout.staged.exists()
    thread, raised = in_background(train, context_of("streaming"))
    wait_until_begun(layout, thread, raised)
    assert log(layout) == "0 a of a\n" and not (layout.staged / "b").exists()
    gate.set()
    thread.join()
    assert not raised
    assert log(layout, 0) == log(layout, 1) == READ
    assert (layout.staged / ".complete").exists()
    # Together they say what stage_data alone says of data that were all there before.
    streamed = read_part(layout, "stage_data")["dataset"] | read_part(layout, "train")["dataset"]
    stage, train = tasks(READS, prove=True, stream=False, dataset=None)
    stage.execute(context_of("streaming", try_number=2))
    assert read_part(layout, "stage_data")["dataset"] == streamed
    assert all(len(file["sha256"]) == 64 for file in streamed["listing"])
    assert all(file["etag_is"] == "md5" for file in streamed["listing"])


def test_what_ends_the_data_ends_the_ranks_and_is_the_cause(
    tasks, layout, context_of, gate, tmp_path
):
    """The ranks wait for a file then; its object is another one by now."""
    os.mkfifo(tmp_path / "input" / "pipe.old")  # only the selection makes the place listable
    stage, train = tasks(READS, exclude=["*.old"])
    stage.execute(context_of("streaming"))
    thread, raised = in_background(train, context_of("streaming"))
    wait_until_begun(layout, thread, raised)
    (tmp_path / "input" / "b").write_text("another b")
    gate.set()
    thread.join()
    (error,) = raised
    assert isinstance(error, AirflowFailException)  # no retry would do better
    cause = r"TransferCorrupt: .*input/b.*changed, or went, after stage_data.*Clear stage_data"
    with pytest.raises(AirflowFailException, match=cause):
        raise error
    failure = json.loads(layout.failure.read_text())
    assert failure["error"] == "TransferCorrupt" and "input/b" in failure["message"]
    assert marked("DDL_JOB_ID", f"{layout.training_id}/train-1") == []
    assert not (layout.staged / ".complete").exists()
    for rank in range(2):
        last = log(layout, rank).splitlines()[-1]
        assert last.startswith(("0 a of a", "ddl_ops.data.StagingFailed: ")), last
    # With the data as they are.
    stage.execute(context_of("streaming", try_number=2))
    train.execute(context_of("streaming", try_number=2))
    assert "1 b another b\n" in log(layout)


def test_a_retry_goes_on_with_what_has_come(tasks, layout, context_of, gate, monkeypatch):
    stage, train = tasks("import sys; sys.exit(3)")
    stage.execute(context_of("streaming"))
    with pytest.raises(AirflowException, match="code 3"):
        train.execute(context_of("streaming"))
    # Nothing of the first try fetches any more.
    assert fetching() == []
    asked, get = [], FolderStore.get

    def noting(store, obj, path, advance):
        asked.append(obj.key)
        return get(store, obj, path, advance)

    monkeypatch.setattr(FolderStore, "get", noting)
    gate.set()
    (layout.code / "train.py").write_text(textwrap.dedent(READS))
    train.execute(context_of("streaming", try_number=2))
    assert sorted(asked) == ["b", "c"]


def test_a_script_that_only_looks_into_the_folder_fails(tasks, layout, context_of, gate, tmp_path):
    stage, train = tasks(LISTS, nodes=1)
    stage.execute(context_of("streaming"))
    with pytest.raises(AirflowFailException, match=r"none has read it to its end.*1 of 3 files"):
        train.execute(context_of("streaming"))
    assert log(layout) == "['a']\nstarts\n"
    # When all is there, it is as if it had been staged; what came of a part is not gone on with.
    gate.set()
    stage_files(FolderStore(tmp_path / "input"), Cache(layout.cache), tmp_path / "elsewhere")
    train.execute(context_of("streaming", try_number=2))
    assert log(layout).splitlines()[-2:] == ["['a', 'b', 'c']", "starts"]


def test_data_that_are_all_in_the_cache_are_there_before_the_ranks(tasks, layout, context_of):
    stage, train = tasks(LISTS, nodes=1, stream=False, dataset=None)
    stage.execute(context_of("streaming"))
    stage, train = tasks(LISTS, nodes=1)
    stage.execute(context_of("streaming", try_number=2))
    train.execute(context_of("streaming", try_number=2))
    assert log(layout) == "['a', 'b', 'c']\nstarts\n"


def test_cancelling_ends_ranks_and_data(tasks, layout, context_of, gate):
    stage, train = tasks(READS)
    stage.execute(context_of("streaming"))
    thread, raised = in_background(train, context_of("streaming"))
    wait_until_begun(layout, thread, raised)
    train.on_kill()
    thread.join(30)
    assert not thread.is_alive() and "cancelled" in str(raised[0])
    assert fetching() == []
    assert marked("DDL_JOB_ID", f"{layout.training_id}/train-1") == []


def test_a_try_that_takes_too_long_is_ended_while_data_come(tasks, run_task, workspace, gate):
    """As Airflow's own task runner ends it; the next one goes on."""
    stage, train = tasks(READS)
    assert run_task(stage).state == "success"
    train.execution_timeout, train.retries = timedelta(seconds=2), 1
    ended = run_task(train)
    assert ended.state == "up_for_retry" and "train was ended after 0:00:02" in str(ended.error)
    assert fetching() == []
    (folder,) = (workspace / "runs" / "streaming").iterdir()
    assert marked("DDL_JOB_ID", f"{folder.name}/train-1") == []
    gate.set()
    train.execution_timeout = None
    assert run_task(train, 2).state == "success"
    assert (folder / "logs" / "rank-1.log").read_text().endswith(READ)


def test_cancelling_before_the_first_file_starts_no_rank(tasks, layout, context_of, gate, tmp_path):
    (tmp_path / "input" / "a").rename(tmp_path / "input" / "aa")
    stage, train = tasks(READS)
    stage.execute(context_of("streaming"))
    thread, raised = in_background(train, context_of("streaming"))
    until(lambda: (layout.staged / ".ddl-listing").exists(), 30)
    time.sleep(0.3)
    train.on_kill()
    thread.join(30)
    assert "cancelled before it started" in str(raised[0])
    assert list(layout.logs.glob("rank-*")) == []


@pytest.mark.parametrize("at", ["stage_data", "train"])
def test_a_launcher_that_a_run_chooses_and_that_cannot_is_refused(tasks, context_of, at):
    stage, train = tasks(READS)
    chosen = context_of("streaming", launcher="slurm")
    if at == "stage_data":
        task = stage
    else:
        stage.execute(context_of("streaming"))
        task, train.launcher = train, "slurm"
    with pytest.raises(AirflowFailException, match=r"training_data_reference\.stream: data cannot"):
        task.execute(chosen)


def test_a_manifest_whose_data_are_elsewhere_now_is_refused(tasks, context_of, tmp_path):
    stage, _ = tasks(READS)
    stage.execute(context_of("streaming"))
    for dataset, now in (
        (StoreReference(tmp_path.as_uri()), f"now: {tmp_path.as_uri()}"),
        (None, "is not in the manifest any more"),
    ):
        _, train = tasks(READS, dataset=dataset)
        with pytest.raises(AirflowFailException, match=f"{now}.*Clear stage_data"):
            train.execute(context_of("streaming"))


def test_room_is_looked_for_before_the_training(tasks, layout, context_of, monkeypatch):
    monkeypatch.setattr("ddl_airflow.storage.staging.free_bytes", lambda _: 11)
    stage, _ = tasks(READS)
    with pytest.raises(AirflowException, match="needs 12 bytes, 11 are free"):
        stage.execute(context_of("streaming"))
