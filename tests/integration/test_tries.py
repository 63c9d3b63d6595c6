"""What becomes of a training whose tasks fail, are cleared or are cancelled, in a real Airflow."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from ddl_airflow.launchers.processes import marked
from tests.limits import within

pytestmark = pytest.mark.integration

SCRIPTS = Path(__file__).parent / "scripts"
MANIFEST = """\
model_definition:
  name: {name}
  framework: {{name: tensorflow, version: "{version}"}}
  execution: {{command: {command}, compute_configuration: {{name: cpu, nodes: 2}}}}
training_data_reference: {{type: fs, source: {{path: ./data}}}}
training_results_reference: {{type: fs, target: {{path: ./published}}}}
distribution: independent
retries: {{attempts: {attempts}, delay: 1s, backoff: fixed}}
"""


@pytest.fixture(scope="module")
def training(site, dags_folder):
    """training(name, script, ...) -> the manifest's folder, once Airflow has its DAG."""

    def make(name, script, attempts=2, command="python train.py", version="2.21", more=""):
        folder = dags_folder / "tries" / name
        (folder / "data").mkdir(parents=True)
        (folder / "data" / "numbers").write_text("1 2 3")
        (folder / "train.py").write_text(script)
        manifest = MANIFEST.format(name=name, attempts=attempts, command=command, version=version)
        (folder / "manifest.yml").write_text(manifest + more)
        return folder

    return make


class Run:
    """One run of a DAG."""

    def __init__(self, site, dag_id):
        self.site, self.dag_id = site, dag_id
        site.wait_for_dag(dag_id)
        self.run_id = site.trigger(dag_id)
        self.path = f"/dags/{dag_id}/dagRuns/{self.run_id}"
        self.layout = site.layout(dag_id, self.run_id)

    def task(self, name):
        return self.site.task_instances(self.dag_id, self.run_id)[name]

    def log(self, name, try_number):
        return self.site.task_log(self.dag_id, self.run_id, name, try_number)

    def ends(self):
        return self.site.wait_for_run(self.dag_id, self.run_id, 120)

    def clear(self, name, downstream=False):
        """As the UI's button does."""
        body = {"dry_run": False, "only_failed": False, "dag_run_id": self.run_id}
        body |= {"task_ids": [name], "include_downstream": downstream}
        self.site.call("POST", f"/dags/{self.dag_id}/clearTaskInstances", json=body)

    def mark(self, state, task=""):
        if task:
            body = {"new_state": state}
            self.site.call("PATCH", f"{self.path}/taskInstances/{task}", json=body)
        else:
            self.site.call("PATCH", self.path, json={"state": state})

    def processes(self, try_number):
        return marked("DDL_JOB_ID", f"{self.layout.training_id}/train-{try_number}")

    def is_up(self, try_number):
        return len(self.processes(try_number)) == 5  # mpirun, two shims, two scripts

    def task_process(self, try_number):
        """The process of the task that started the ranks, and the worker's above it."""
        ranks = set(self.processes(try_number))
        (task,) = {_parent(pid) for pid in ranks} - ranks
        return task, _parent(task)


def _parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _wait(done, timeout_s=60):
    deadline = time.monotonic() + within(timeout_s)
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.1)


def test_an_interrupted_training_ends_with_the_weights_of_an_uninterrupted_one(site, training):
    """Also where the newest checkpoint was damaged: with those of the one before."""
    names = {"saver": ("1.13", "model-20", 10), "keras": ("2.21", "model-3.keras", 2)}
    for name, (version, _, _) in names.items():
        script = (SCRIPTS / f"resume_{name}.py").read_text()
        training(f"resumed-{name}", script, version=version)
    runs = {name: Run(site, f"resumed-{name}") for name in names}
    for name, run in runs.items():
        _, damaged, begins_at = names[name]
        _wait(lambda run=run: run.task("train")["state"] in ("success", "failed"), 150)
        second = run.log("train", 2)
        assert run.task("train")["state"] == "success", second
        assert "rank 1 of 2" in run.log("train", 1) and "SIGKILL" in run.log("train", 1)
        assert f"{damaged} is damaged or half written" in second
        for rank in (0, 1):
            said = (run.layout.logs / f"rank-{rank}.log").read_text().splitlines()
            said = [line for line in said if line.startswith(("begins", "the same"))]
            assert said[:2] == ["begins at 0", "begins at 0"]  # uninterrupted, interrupted
            assert said[2] == f"begins at {begins_at}"
            assert said[3].startswith("the same weights: ") and said[3].endswith(" True")
        assert [path.name for path in run.layout.damaged.rglob(f"{damaged}*")]
        run.mark("failed")  # what comes after the training is not looked at here


TRAINS = """\
import os, sys
folder = os.environ["CHECKPOINT_DIR"]
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    steps = len(os.listdir(folder))
    print("found", steps)
    open(f"{folder}/step-{steps}", "w").close()
    mended = os.environ["JOB_STATE_DIR"] + "/mended"
    if not os.path.exists(mended):
        open(mended, "w").close()
        sys.exit(1)
"""
EXPORTS = """\
import os, shutil
shutil.copytree(os.environ["MODEL_DIR"] + "/exported", os.environ["RESULT_DIR"] + "/model")
"""


def test_a_cleared_task_does_what_a_person_means(site, training):
    import tensorflow as tf

    command = "python train.py ; python export.py"
    folder = training("cleared", TRAINS, attempts=1, command=command)
    (folder / "export.py").write_text(EXPORTS)
    model = tf.Module()
    model.serve = tf.function(
        lambda x: {"y": x + 1.0}, input_signature=[tf.TensorSpec([None], tf.float32)]
    )
    tf.saved_model.save(model, str(folder / "exported"), model.serve)
    run = Run(site, "cleared")
    assert run.ends() == "failed"
    # Failed: it goes on.
    run.clear("train", downstream=True)
    assert run.ends() == "success", run.log("transform", 1)
    assert "found 1" in run.log("train", 2)
    training = folder / "published" / run.layout.training_id
    (published,) = training.iterdir()
    found = {path.name for path in (published / "checkpoints").iterdir()}
    assert found == {"step-0", "step-1"}
    # Published again: the same.
    before = {path: path.stat().st_mtime_ns for path in published.rglob("*")}
    run.clear("upload_results")
    assert run.ends() == "success"
    assert run.task("upload_results")["try_number"] == 2
    assert before == {path: path.stat().st_mtime_ns for path in published.rglob("*")}
    # Succeeded: another training, another model, published instead.
    run.clear("train", downstream=True)
    assert run.ends() == "success", run.log("transform", 2)
    assert "found 0" in run.log("train", 3)
    assert before == {path: path.stat().st_mtime_ns for path in published.rglob("*")}
    (fresh,) = {*training.iterdir()} - {published}
    assert [path.name for path in (fresh / "checkpoints").iterdir()] == ["step-0"]
    pointer = json.loads((folder / "published" / "cleared" / "latest.json").read_text())
    assert pointer["model"] == (fresh / "model").as_uri()
    assert len(list((run.layout.replaced / "result" / "checkpoints").iterdir())) == 2
    assert run.task("transform")["try_number"] == 2


def test_whatever_cancels_a_training_ends_every_rank(site, training):
    sleeps = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
    names = ("marked", "restarted", "deleted", "shut-down")
    for name in names:
        training(f"endless-{name}", sleeps)
    marked_failed, restarted, deleted, shut_down = runs = [
        Run(site, f"endless-{name}") for name in names
    ]
    for run in runs:
        _wait(lambda run=run: run.is_up(1))
    marked_failed.mark("failed", "train")
    restarted.clear("train")
    # Airflow deletes no run that is running.
    deleted.mark("failed")
    site.call("DELETE", deleted.path)
    for pid in shut_down.task_process(1):  # as an init system ends a worker
        os.kill(pid, signal.SIGTERM)
    for run in runs:
        _wait(lambda run=run: not run.processes(1), 20)
    assert marked_failed.ends() == "failed"
    # Cleared while it ran, and ended by another than a person: tried again.
    for run in (restarted, shut_down):
        _wait(lambda run=run: run.is_up(2))
        assert run.processes(1) == []
    restarted.mark("failed")
    for pid in shut_down.task_process(2):  # no time for anything
        os.kill(pid, signal.SIGKILL)
    for run in (restarted, shut_down):
        _wait(lambda run=run: not run.processes(2), 20)
    shut_down.mark("failed")


GOES_ON = """
import os, time
folder = os.environ["EXPERIMENT_DIR"]
os.makedirs(folder, exist_ok=True)
open(f"{folder}/up-{os.environ['JOB_NAME']}", "w").close()
while not os.path.exists(folder + "/go"):
    time.sleep(0.05)
"""


@pytest.fixture
def triggerer(site):
    running = site.also("triggerer")
    yield
    running.stop()


def test_the_second_training_of_an_experiment_waits_deferred(site, training, triggerer):
    for name in ("shares-one", "shares-other"):
        training(name, GOES_ON, attempts=1, more="experiment: shared\n")
    experiment = site.workspace / "experiments" / "shared"
    first = Run(site, "shares-one")
    _wait((experiment / "up-shares-one").exists, 120)
    second = Run(site, "shares-other")
    _wait(lambda: second.task("train")["state"] == "deferred", 120)
    # Airflow 3.3 takes what comes in the second before its scheduler has seen the deferring process
    # end for the end of a killed task: ``process_executor_events``.
    seen = re.compile(
        f"Received executor event .*task_id='train', run_id='{re.escape(second.run_id)}'"
    )
    _wait(lambda: seen.search(site.service("scheduler").log.read_text("utf-8", "replace")), 120)
    assert not (experiment / "up-shares-other").exists()
    (experiment / "go").touch()
    deadline = time.monotonic() + within(180)
    for run in (first, second):
        while (state := run.task("train")["state"]) not in ("success", "failed"):
            assert time.monotonic() < deadline, (run.dag_id, state, run.log("train", 1))
            time.sleep(0.2)
        assert state == "success", run.log("train", 1)
    assert second.task("train")["try_number"] == 1
