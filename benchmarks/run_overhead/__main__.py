"""Measures the overhead around a training: `python -m benchmarks.run_overhead`. See README.md."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks import report
from ddl_airflow.demo.site import AirflowSite, running

TRAINING, NO_OP = "overhead-training", "overhead-no-op"
_MANIFEST = f"""\
model_definition:
  name: {TRAINING}
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: python train.py; python transform.py
    compute_configuration: {{name: cpu, nodes: 1}}
training_data_reference: {{type: fs, source: {{path: ./data}}}}
training_results_reference: {{type: fs, target: {{path: ./results}}}}
"""
_SCRIPTS = {
    "train.py": "print('trained')\n",
    "transform.py": """\
import os
import tensorflow as tf
model = tf.Module()
model.twice = tf.function(lambda x: 2 * x, input_signature=[tf.TensorSpec([None], tf.float32)])
tf.saved_model.save(model, os.path.join(os.environ["RESULT_DIR"], "model"), model.twice)
""",
}
_NO_OP = f'''\
from datetime import datetime

from airflow.sdk import DAG, task

with DAG("{NO_OP}", schedule=None, start_date=datetime(2024, 1, 1), catchup=False):
    last = None
    for name in ("one", "two", "three", "four"):

        @task(task_id=name)
        def nothing():
            pass

        step = nothing()
        if last is not None:
            last >> step
        last = step
'''
# Airflow calls task_policy on each task that it makes, in the task's own process too.
_POLICY = """\
import json
import time
from pathlib import Path

NOTES = Path({notes})


def note(event):
    def hook(context, *_):
        ti = context["ti"]
        line = json.dumps([ti.run_id, ti.task_id, event, time.time()])
        with NOTES.open("a") as file:
            file.write(line + "\\n")

    return hook


def task_policy(task):
    task._pre_execute_hook = note("begins")
    task._post_execute_hook = note("ends")
"""


def make_site(home: Path) -> AirflowSite:
    """An Airflow with both DAGs, whose tasks note when their work begins and ends."""
    dags, plain = home / "dags", home / "plain"
    (dags / "data").mkdir(parents=True)
    (dags / "data" / "numbers.csv").write_text("1,2,3\n")
    (dags / "manifest.yml").write_text(_MANIFEST)
    for name, text in _SCRIPTS.items():
        (dags / name).write_text(text)
    plain.mkdir()
    (plain / "no_op.py").write_text(_NO_OP)
    config = home / "airflow" / "config"
    config.mkdir(parents=True)
    policy = _POLICY.format(notes=json.dumps(str(home / "notes")))
    (config / "airflow_local_settings.py").write_text(policy)
    bundle = {
        "name": "plain",
        "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
        "kwargs": {"path": str(plain)},
    }
    return AirflowSite(home / "airflow", dags, port=18180, bundles=[bundle])


def run_once(site: AirflowSite, notes: Path, dag_id: str) -> dict[str, float]:
    """One run: seconds in all, in its four tasks' work, and the rest.

    Raises RuntimeError if it fails.
    """
    run_id = site.trigger(dag_id)
    if site.wait_for_run(dag_id, run_id) != "success":
        tasks = site.task_instances(dag_id, run_id)
        (failed, *_) = [name for name, one in tasks.items() if one["state"] == "failed"]
        raise RuntimeError(f"{dag_id}, {failed}:\n{site.task_log(dag_id, run_id, failed)}")
    run = site.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")
    begin, end = (datetime.fromisoformat(run[key]) for key in ("start_date", "end_date"))
    wall = (end - begin).total_seconds()
    work = 0.0
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    events = [(event, at) for run_of, _, event, at in lines if run_of == run_id]
    if len(events) != 8:
        raise RuntimeError(f"{dag_id}: {len(events)} notes of four tasks, not 8")
    work = sum(at if event == "ends" else -at for event, at in events)
    return {"wall_s": wall, "work_s": work, "rest_s": wall - work}


def measure(rounds: int) -> dict[str, list[dict[str, float]]]:
    """Runs of both DAGs, in turns."""
    samples: dict[str, list[dict[str, float]]] = {TRAINING: [], NO_OP: []}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        site = make_site(home)
        with running(site):
            for dag_id in samples:
                site.wait_for_dag(dag_id)
            for number in range(rounds + 1):
                for dag_id in (TRAINING, NO_OP) if number % 2 else (NO_OP, TRAINING):
                    one = run_once(site, home / "notes", dag_id)
                    if number > 0:  # the first to warm up
                        samples[dag_id].append(one)
                    time.sleep(0.5)
    return samples


def table(samples: dict[str, list[dict[str, float]]]) -> str:
    """Medians, and the ratio of the rests, as Markdown."""
    lines = ["| DAG | wall | work in its tasks | the rest |", "|---|---|---|---|"]
    for dag_id, runs in samples.items():
        cells = [
            report.time_text(max(statistics.median(run[key] for run in runs), 1e-6))
            for key in ("wall_s", "work_s", "rest_s")
        ]
        lines.append(f"| {dag_id} | " + " | ".join(cells) + " |")
    rests = {dag_id: [run["rest_s"] for run in runs] for dag_id, runs in samples.items()}
    # The ratio of report.compare says how many times as fast; here it is how many times as long.
    compared: dict[str, Any] = report.compare(rests[NO_OP], rests[TRAINING])
    low, high = compared["ratio_quartiles"]
    ratio = statistics.median(rests[TRAINING]) / statistics.median(rests[NO_OP])
    rounds = f"within a round {compared['ratio']:.2f}, quartiles {low:.2f}–{high:.2f}"
    lines.append(f"\nThe rest, training : no-op = {ratio:.2f} of the medians; {rounds}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the overhead around a training.")
    parser.add_argument("--rounds", type=int, default=11, help="runs of each DAG")
    parser.add_argument("--json", type=Path, help="where to write every sample")
    arguments = parser.parse_args()
    about = report.about()
    print(report.about_text(about), flush=True)
    samples = measure(arguments.rounds)
    print(f"\n{table(samples)}")
    if arguments.json:
        arguments.json.write_text(json.dumps({**about, "samples": samples}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
