"""Trainings on Slurm: real Airflow, real triggerer, real Slurm. Whatever is killed, the training is
neither lost nor started twice; and when a person ends it, it ends.

All trainings run at the same time. Each waits, as soon as its ranks are up, for a file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.demo.site import AirflowSite, Service
from ddl_airflow.launchers.processes import marked
from tests.integration.slurm import SlurmCluster
from tests.limits import within

pytestmark = pytest.mark.integration

MANIFEST = """\
model_definition:
  name: {name}
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: python train.py
    compute_configuration: {{name: cpu, nodes: 2}}
training_data_reference: {{type: fs, source: {{path: ./data}}}}
training_results_reference: {{type: fs, target: {{path: ./published}}}}
distribution: {distribution}
launcher: {{kind: slurm, partition: {partition}, time_limit: 30m}}
retries: {{attempts: 2, delay: 1s, backoff: fixed}}
metrics: [{{name: step, regex: "step ([0-9]+)"}}]
transform: {{sample: rows.npy}}
"""
WAITS = """\
import os, time
here = os.environ["LOG_DIR"]
print("step 1 of", os.environ["SLURMD_NODENAME"], flush=True)
open(f"{here}/up-{os.environ['OMPI_COMM_WORLD_RANK']}", "w").close()
while not os.path.exists(f"{here}/go"):
    time.sleep(0.05)
print("step 2", flush=True)
"""
TRAINS = """
import ddl, ddl.keras, keras, numpy
rows = numpy.arange(8, dtype="float32").reshape(4, 2) + ddl.rank()
model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
model.fit(rows, rows.sum(1), epochs=2, verbose=0, callbacks=[ddl.keras.BroadcastCallback()])
if ddl.rank() == 0:
    model.save(os.environ["RESULT_DIR"] + "/model.keras")
"""
STEPS = 60
MAKES_ROOM = f"""\
import os, time
import ddl, keras, numpy, tensorflow as tf
here, kept = os.environ["LOG_DIR"], os.environ["CHECKPOINT_DIR"] + "/state.npz"
weights, first = tf.Variable(tf.zeros([2, 1])), 0
if os.path.exists(kept):
    with numpy.load(kept) as state:
        weights.assign(state["weights"])
        first = int(state["step"])
def save(step):
    with open(kept + ".partial", "wb") as file:
        numpy.savez(file, weights=weights.numpy(), step=step)
    os.replace(kept + ".partial", kept)
ddl.on_preempt(save)
for step in range(first, {STEPS}):
    rows = tf.fill([4, 2], 1.0 + (step + ddl.rank()) % 3)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((rows @ weights - 1.0) ** 2)
    ((gradient, _),) = ddl.grads_reduce([(tape.gradient(loss, weights), weights)])
    weights.assign_sub(0.01 * gradient)
    if ddl.rank() == 0:
        print("step", step + 1, flush=True)
        with open(here + "/steps", "a") as file:
            file.write(f"{{step + 1}}\\n")
    if not os.path.exists(here + "/go"):
        time.sleep(0.5)
    ddl.end_of_step(step + 1)
if ddl.rank() == 0:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([weights.numpy()])
    model.save(os.environ["RESULT_DIR"] + "/model.keras")
"""
# What a task finds in place of sbatch: it dies when Slurm has the job and it has no answer; or has
# to wait for that.
DEADLY = """\
#!/bin/sh
answer=$(PATH=${{PATH#*:}} sbatch "$@") || exit
if [ -e {folder}/kill-submitter ]; then
    rm {folder}/kill-submitter
    # What holds sbatch for it is in between.
    kill -9 "$(sed 's/.*) . \\([0-9]*\\) .*/\\1/' /proc/$PPID/stat)"
fi
while [ -e {folder}/hold-answer ]; do
    touch {folder}/held
    sleep 0.05
done
echo "$answer"
"""
_WAIT_S = 120.0


@dataclass
class Training:
    """One run of a DAG on Slurm."""

    site: AirflowSite
    slurm: SlurmCluster
    dag_id: str
    run_id: str

    @property
    def layout(self) -> RunLayout:
        return self.site.layout(self.dag_id, self.run_id)

    def jobs(self, try_number: int = 1) -> dict[int, str]:
        """State of each job that Slurm was ever given for the try, by number."""
        return self.slurm.jobs(f"{self.layout.training_id}/train-{try_number}")

    def task(self) -> dict[str, object]:
        return self.site.task_instances(self.dag_id, self.run_id)["train"]

    def until(self, done: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + within(_WAIT_S)
        while not done():
            self.site.check()
            if time.monotonic() > deadline:
                pytest.fail(f"{self.dag_id}: not {what}: {self.task()}\n{self.log()}")
            time.sleep(0.2)

    def log(self, try_number: int = 1) -> str:
        return self.site.task_log(self.dag_id, self.run_id, "train", try_number)

    def wait_deferred(self, try_number: int = 1) -> None:
        """Until both ranks run, and a trigger waits for them."""
        ups = [self.layout.logs / f"up-{rank}" for rank in (0, 1)]
        self.until(lambda: all(up.exists() for up in ups), "up")
        watched = self.layout.kept / f"try-{try_number}.watched"
        self.until(lambda: self.task()["state"] == "deferred" and watched.exists(), "deferred")

    def go(self) -> None:
        (self.layout.logs / "go").touch()

    def set_state(self, state: str) -> None:
        path = f"/dags/{self.dag_id}/dagRuns/{self.run_id}/taskInstances/train"
        self.site.call("PATCH", path, json={"new_state": state})

    def gone(self, try_number: int) -> bool:
        job_id = f"{self.layout.training_id}/train-{try_number}"
        states = set(self.jobs(try_number).values())
        return states == {"CANCELLED"} and not marked("DDL_JOB_ID", job_id)


def add_dag(dags_folder: Path, name: str, script: str, partition: str) -> Path:
    """A DAG ``slurm-<name>``; its folder."""
    folder = dags_folder / "slurm" / name
    (folder / "data").mkdir(parents=True)
    numpy.save(folder / "data" / "rows.npy", numpy.ones((3, 2), "float32"))
    (folder / "train.py").write_text(script)
    distribution = "mpi" if "ddl" in script else "independent"
    manifest = MANIFEST.format(name=f"slurm-{name}", partition=partition, distribution=distribution)
    (folder / "manifest.yml").write_text(manifest)
    return folder


@pytest.fixture(scope="module")
def trainings(
    site: AirflowSite, slurm: SlurmCluster, dags_folder: Path
) -> Iterator[dict[str, Training]]:
    """A training of each name, started; the task of "reconnects" dies in the act of submitting."""
    scripts = {
        "succeeds": WAITS + TRAINS,
        **dict.fromkeys(("reconnects", "is-failed", "is-cleared", "is-deleted"), WAITS),
        "is-ended-unseen": WAITS,
        "is-refused": WAITS,
    }
    deadly = slurm.folder / "bin" / "sbatch"
    deadly.parent.mkdir()
    deadly.write_text(DEADLY.format(folder=slurm.folder))
    deadly.chmod(0o755)
    for name, script in scripts.items():
        add_dag(dags_folder, name, script, "nosuch" if name == "is-refused" else "cpu")
    started = {}
    for name in scripts:
        site.wait_for_dag(f"slurm-{name}")
    kill = slurm.folder / "kill-submitter"
    kill.touch()
    for name in ("reconnects", *(name for name in scripts if name != "reconnects")):
        dag_id = f"slurm-{name}"
        started[name] = Training(site, slurm, dag_id, site.trigger(dag_id))
        if name == "reconnects":
            started[name].until(lambda: not kill.exists(), "killed")
    yield started
    shutil.rmtree(deadly.parent)


@pytest.fixture(scope="module")
def triggerer(site: AirflowSite) -> Iterator[list[Service]]:
    """The running triggerer; a test may replace it."""
    running = [site.also("triggerer")]
    yield running
    for one in running:
        one.stop()


def test_a_person_ends_a_deferred_task_and_its_job(trainings, triggerer):
    """Failing, clearing and deleting at the same time."""
    failed, cleared = trainings["is-failed"], trainings["is-cleared"]
    deleted = trainings["is-deleted"]
    for one in (failed, cleared, deleted):
        one.wait_deferred()
    failed.set_state("failed")
    body = {"dry_run": False, "only_failed": False, "task_ids": ["train"]}
    body |= {"dag_run_id": cleared.run_id}
    for up in cleared.layout.logs.glob("up-*"):
        up.unlink()
    cleared.site.call("POST", f"/dags/{cleared.dag_id}/clearTaskInstances", json=body)
    job_id = f"{deleted.layout.training_id}/train-1"
    path = f"/dags/{deleted.dag_id}/dagRuns/{deleted.run_id}"
    deleted.site.call("PATCH", path, json={"state": "failed"})
    deleted.site.call("DELETE", path)
    failed.until(lambda: failed.gone(1), "cancelled")
    cleared.until(lambda: set(cleared.jobs(1).values()) == {"CANCELLED"}, "cancelled")
    states = lambda: set(deleted.slurm.jobs(job_id).values())  # noqa: E731
    failed.until(lambda: states() == {"CANCELLED"} and not marked("DDL_JOB_ID", job_id), "gone")
    assert failed.task()["try_number"] == 1
    # The cleared one trains again, in a job of its own.
    cleared.wait_deferred(try_number=2)
    assert list(cleared.jobs(2).values()) == ["RUNNING"]
    cleared.go()
    cleared.until(lambda: cleared.task()["state"] == "success", "done")
    assert (len(cleared.jobs(1)), len(cleared.jobs(2))) == (1, 1)


def test_a_task_that_is_killed_in_the_act_of_submitting_starts_no_second_job(trainings, triggerer):
    one = trainings["reconnects"]
    one.until(lambda: one.task()["try_number"] == 2, "tried again")
    one.wait_deferred()  # the records are still those of the first try
    (number,) = one.jobs(1)
    log = one.log(2)
    assert f"going on with slurm job {number}" in log
    one.go()
    one.until(lambda: one.task()["state"] == "success", "done")
    assert one.jobs(1) == {number: "COMPLETED"}
    assert one.jobs(2) == {}
    assert "rank 0 | step 2" in one.log(2)


def test_it_trains_while_triggerers_come_and_go_and_holds_no_slot(trainings, triggerer):
    """And what a person ends while none runs is ended by the next one."""
    one, ended = trainings["succeeds"], trainings["is-ended-unseen"]
    one.wait_deferred()
    ended.wait_deferred()
    (number,) = one.jobs()
    pool = one.site.call("GET", "/pools/default_pool")
    assert pool["deferred_slots"] >= 1
    others = [t["state"] for t in one.site.task_instances(one.dag_id, one.run_id).values()]
    assert "running" not in others
    killed = triggerer.pop()
    (child,) = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    killed.stop()
    ended.set_state("failed")
    assert one.jobs() == {number: "RUNNING"}
    shown = one.site.call("GET", f"{one.site.url}/ddl/about/{one.dag_id}/{one.run_id}")
    assert shown["pace"]["step"] == 1  # the Training tab
    one.go()
    one.until(lambda: one.jobs() == {number: "COMPLETED"}, "trained")
    assert one.task()["state"] == "deferred"  # nobody is there to see it
    assert list(ended.jobs().values()) == ["RUNNING"]
    triggerer.append(one.site.also("triggerer"))
    assert one.site.wait_for_run(one.dag_id, one.run_id, _WAIT_S) == "success", one.log()
    assert one.jobs() == {number: "COMPLETED"}
    assert one.task()["try_number"] == 1
    log = one.log()
    assert f"submitted as slurm job {number}" in log
    assert "#SBATCH --partition=cpu" in log
    assert f"slurm job {number}: on n[1-2]" in log  # said by the trigger
    assert "rank 0 | step 2" in log and "communication | " in log
    result = one.site.xcom(one.dag_id, one.run_id, "train")
    assert result["world_size"] == 2
    assert not one.layout.scheduled_job.exists()
    ended.until(lambda: ended.gone(1), "cancelled")


def test_what_slurm_refuses_fails_at_once(trainings):
    one = trainings["is-refused"]
    assert one.site.wait_for_run(one.dag_id, one.run_id, _WAIT_S) == "failed"
    assert one.task()["try_number"] == 1
    log = one.log()
    assert "Invalid partition name specified. Choose another launcher.partition" in log
    assert "Not retried" in log


def test_a_person_ends_a_task_just_before_it_defers(site, trainings, triggerer, slurm, dags_folder):
    """Airflow refuses to defer it, and the job ran on."""
    add_dag(dags_folder, "ends-early", WAITS, "cpu")
    site.wait_for_dag("slurm-ends-early")
    hold = slurm.folder / "hold-answer"
    hold.touch()
    try:
        one = Training(site, slurm, "slurm-ends-early", site.trigger("slurm-ends-early"))
        one.until((slurm.folder / "held").exists, "submitted")
        one.set_state("failed")
    finally:
        hold.unlink()
    one.until(lambda: one.gone(1), "cancelled")
    assert one.task()["state"] == "failed"


def test_a_training_that_slurm_preempts_goes_on_in_the_same_try(
    site, slurm, triggerer, dags_folder
):
    """The last one: the better job needs all that the others have had."""
    folder = add_dag(dags_folder, "makes-room", MAKES_ROOM, "spare")
    site.wait_for_dag("slurm-makes-room")
    one = Training(site, slurm, "slurm-makes-room", site.trigger("slurm-makes-room"))
    path = one.layout.logs / "steps"
    steps = lambda: path.read_text().split() if path.exists() else []  # noqa: E731
    one.until(lambda: len(steps()) >= 2, "training")
    slurm.take_all()
    (one.layout.logs / "go").touch()
    assert site.wait_for_run(one.dag_id, one.run_id, _WAIT_S) == "success", one.log()
    assert [int(step) for step in steps()] == [*range(1, STEPS + 1)]
    assert one.task()["try_number"] == 1
    job_id = f"{one.layout.training_id}/train-1"
    assert (len(slurm.jobs(job_id)), len(slurm.jobs(f"{job_id}.1"))) == (1, 1)
    assert "preempted, for the 1. time" in one.log() and "this is no attempt" in one.log()
    (record,) = (folder / "published").rglob("lineage.json")
    told = json.loads(record.read_text())
    used = told["result"]["goodput"]
    assert (used["steps"], used["preemptions"], told["result"]["steps"]) == (STEPS, 1, STEPS)
    assert used["held_s"] > 0 and used["between_s"] > 0
    assert told["run"]["tries"]["train"] == 1
