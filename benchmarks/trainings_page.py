"""The page on trainings over many of them: `python -m benchmarks.trainings_page [--trainings 200]`.

Makes a workspace of trainings of 10,000 points on 8 ranks each, and says what the plugin's server
takes for its answers, and a browser from the address to what it draws. Airflow is left out: its
rights and its list of tasks are answered at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from playwright.sync_api import sync_playwright

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.lineage.record import fix_run

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "fixtures" / "runs" / "mnist-tf1" / "airflow" / "lineage.json"
DAGS = 20


def fill(workspace: Path, trainings: int, points: int, ranks: int) -> None:
    """Writes what that many trainings would have left."""
    from ddl_airflow.site import training_of

    dice = random.Random(1)  # noqa: S311
    lines: list[str] = []
    for step in range(points):
        at = {"t": 1000 + step / 10, "step": step}
        values = {"loss": math.exp(-step / 3000) + dice.random() / 20, "examples_per_s": 1000.5}
        values["accuracy"] = 1 - math.exp(-step / 2000)
        lines.append(json.dumps(at | {"source": "keras", "steps": points} | values))
        if step % 10 == 0:
            spent = {"comm_s": step / 50, "wait_s": step / 90, "bytes_reduced": step}
            lines.append(json.dumps(at | {"source": "ops"} | spent))
    text = "\n".join(lines) + "\n"
    record = json.loads(RECORD.read_bytes())
    end = {"host": "gpu01", "started": 999.0, "ended": 2001.0, "exit_code": 0}
    for number in range(trainings):
        dag_id, run_id = f"dag-{number % DAGS}", f"run-{number}"
        layout = RunLayout(workspace, dag_id, training_of(dag_id, run_id))
        layout.create()
        fix_run(layout, run_id, {}, {})
        layout.progress.write_text(text)
        job = layout.records(1)
        job.mkdir()
        for rank in range(ranks):
            (job / f"rank-{rank}.json").write_text(json.dumps({"rank": rank} | end).ljust(8192))
            (layout.logs / f"rank-{rank}.log").write_text("a line of the log\n" * 10_000)
        run = record["run"] | {"run_id": run_id, "dag_id": dag_id}
        kept = record | {"run": run, "outcome": {"state": "published", "step": "upload_results"}}
        (layout.kept / "record.json").write_text(json.dumps(kept))


def site() -> FastAPI:
    """The plugin's app, to which everybody may come, and what the page asks of Airflow."""
    from ddl_airflow.plugin import api

    api.readers_of_task_logs = lambda: lambda: None
    api.readers_among_dags = lambda: lambda: lambda asked: set(asked)
    api.rights_over_dag = lambda: lambda: {"trigger": False, "approve": False}
    app = FastAPI()
    app.mount("/ddl", api.app())

    @app.get("/api/v2/dags/{dag}/dagRuns/{run}/taskInstances")
    def task_instances(dag: str, run: str) -> dict[str, object]:
        named = {"task_id": "train", "task_display_name": "train", "state": "success"}
        return {"task_instances": [named | {"operator_name": "TrainOperator"}]}

    @app.get("/api/v2/dags/{dag}/tasks")
    def tasks(dag: str) -> dict[str, object]:
        return {"tasks": [{"task_id": "train", "downstream_task_ids": []}]}

    return app


def main() -> None:
    """Prints one line for each answer and each view."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainings", type=int, default=200)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    workspace = Path(tempfile.mkdtemp())
    os.environ["AIRFLOW__DDL__WORKSPACE"] = str(workspace)
    try:
        fill(workspace, options.trainings, options.points, options.ranks)
        listening = socket.create_server(("127.0.0.1", 0))
        url = "http://{}:{}/ddl".format(*listening.getsockname())
        server = uvicorn.Server(uvicorn.Config(site(), log_level="error"))
        serving = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        serving.start()
        print(f"load of the machine: {os.getloadavg()[0]:.1f}")
        answers = ("training", "trainings", "trainings", "curves/dag-1/run-1", "about/dag-1/run-1")
        for path in answers:
            began = time.monotonic()
            size = len(httpx.get(f"{url}/{path}", timeout=120).content)
            print(f"{path:28} {time.monotonic() - began:6.2f} s {size / 1024:8.0f} KiB")
        one = "figure:nth-of-type(3) canvas"
        with sync_playwright() as playwright:
            path = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for name, query, ready in (
                ("all trainings", "", "#trainings tbody tr"),
                ("all trainings, again", "", "#trainings tbody tr"),
                ("one training", "?dag_id=dag-2&run_id=run-2", one),
                ("one training, again", "?dag_id=dag-2&run_id=run-2", one),
            ):
                page = browser.new_page()
                began = time.monotonic()
                page.goto(f"{url}/training{query}")
                page.locator(ready).first.wait_for()
                print(f"{name:28} {time.monotonic() - began:6.2f} s until it is drawn")
                page.close()
            browser.close()
        server.should_exit = True
        serving.join()
    finally:
        shutil.rmtree(workspace)


if __name__ == "__main__":
    main()
