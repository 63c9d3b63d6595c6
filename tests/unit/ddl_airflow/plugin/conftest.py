"""The plugin's app in a page around it that answers as Airflow's API does, and a browser."""

from __future__ import annotations

import json
import shutil
import socket
import threading
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import uvicorn
from airflow.api_fastapi.core_api.datamodels.dag_run import DAGRunsBatchBody
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse
from playwright.sync_api import expect, sync_playwright

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.lineage.record import Run, fix_run, keep_so_far, write_part
from tests.limits import within

RECORDED = Path(__file__).parents[3] / "fixtures" / "runs" / "mnist-tf1"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# As Airflow 3.3 has it; its theme is a class of its document.
AROUND = """<!doctype html><html class="{theme}" lang="en" style="background:{paper}">
<title>Airflow</title><body style="margin:0"><main>
<iframe title="Training" sandbox="allow-scripts allow-same-origin allow-forms allow-downloads"
 style="border:none; width:100%; height:100vh" src="{prefix}/ddl/training?{query}"></iframe></main>
"""
# Where it is, too, as with a path in [api] base_url.
BELOW = "/airflow"
ROAD = {
    "stage_data": "StageDataOperator",
    "train": "TrainOperator",
    "transform": "TransformOperator",
    "evaluate": "EvaluateOperator",
    "approve": "ApproveOperator",
    "upload_results": "UploadResultsOperator",
}


class Site:
    """What surrounds the plugin's app: its state is the test's to set."""

    def __init__(self, workspace: Path, training_of) -> None:
        self.workspace, self._training_of = workspace, training_of
        self.layout = self.run("digits", "run")
        self.tasks = dict.fromkeys(ROAD, "success")
        # Of their task instances: a new one at each clear.
        self.ids = {name: str(uuid4()) for name in ROAD}
        self.tried = 1  # times that train was
        self.others = 0  # tasks of the DAG that are none of ours, before them by name
        self.url = ""
        self.sent: list[tuple[str, dict]] = []
        self.refused = 0
        self.production: list[Any] = []
        self.paused = False
        # Airflow's own, the oldest first.
        self.runs: list[dict[str, str]] = []

    def run(self, dag_id: str, run_id: str) -> RunLayout:
        layout = RunLayout(self.workspace, dag_id, self._training_of(dag_id, run_id))
        layout.create()
        fix_run(layout, run_id, {}, {})
        return layout

    def recorded(self, run_id: str, type: str = "", **outcome: object) -> RunLayout:
        """A run as it was recorded, of the DAG mnist-tf1; with another ``type`` than Airflow's if
        that is given.
        """
        layout = self.run("mnist-tf1", run_id)
        shutil.copytree(RECORDED / "ddl", layout.state, dirs_exist_ok=True)
        record = json.loads((RECORDED / "airflow" / "lineage.json").read_bytes())
        record["run"]["run_id"] = run_id
        (layout.kept / "lineage.json").write_text(json.dumps(record))
        result = record["result"]
        known = [one for one in result["measurements"] if one["source"] != "sample"]
        trained = {"steps": result["steps"], "goodput": result["goodput"], "measurements": known}
        trained["metrics"] = {one["metric"]: one["value"] for one in known}
        formed = {name: result[name] for name in ("accuracy", "sample", "rows")}
        staged = {name: record[name] for name in ("dataset", "code", "manifest")}
        write_part(layout, "stage_data", staged)
        write_part(layout, "train", {"environment": record["environment"], "result": trained})
        write_part(layout, "transform", {"result": formed})
        of = record["run"]
        at = {name: datetime.fromisoformat(of[name]) for name in ("due", "started")}
        said = {name: of[name] for name in ("dag_id", "run_id", "parameters")}
        said["type"] = type or of["type"]
        keep_so_far(layout, Run(**said, **at), outcome)
        for rank in (0, 1):
            (layout.logs / f"rank-{rank}.log").write_text(f"of rank {rank}\n")
        return layout

    def progress(self, *lines: dict) -> None:
        with self.layout.progress.open("a") as file:
            file.writelines(json.dumps({"source": "keras"} | line) + "\n" for line in lines)

    def fail(self, message: str, rank: int | None, tried: int = 3) -> None:
        said = {"step": "train", "try": tried, "error": "JobFailed", "rank": rank}
        self.layout.failure.write_text(json.dumps(said | {"message": message}))

    def app(self, plugin) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def sometimes(request: Request, call_next):
            if self.refused and "/ddl/about" in request.url.path:
                return HTMLResponse('{"detail": "Forbidden"}', self.refused)
            return await call_next(request)

        app.mount("/ddl", plugin)

        @app.get("/around", response_class=HTMLResponse)
        def around(request: Request, query: str, theme: str = "light") -> str:
            paper = {"light": "#fff", "dark": "oklch(0.2 0.02 260)"}[theme]
            prefix = request.scope["root_path"]
            return AROUND.format(theme=theme, paper=paper, query=query, prefix=prefix)

        @app.get("/api/v2/dags/{dag}/dagRuns/{run}/taskInstances")
        def task_instances(dag: str, run: str, limit: int = 50, offset: int = 0) -> dict:
            # By when they were queued, which is no order.
            found = [
                {
                    **{"id": self.ids[name], "task_id": name, "task_display_name": name},
                    **{"operator_name": ROAD[name], "state": state, "try_number": self.tried},
                }
                for name, state in sorted(self.tasks.items())
            ]
            other = {"task_id": "a", "task_display_name": "a", "state": "success"}
            other["try_number"] = 1
            own = {**other, "task_id": "before", "task_display_name": "before"}
            found = [other] if dag == "others" else [*found, own]
            more = [other | {"task_id": f"a-{number}"} for number in range(self.others)]
            told = [{"operator_name": "BashOperator"} | one for one in [*more, *found]]
            page = told[offset : offset + min(limit, 100)]
            return {"task_instances": page, "total_entries": len(told)}

        @app.get("/api/v2/dags/{dag}/dagRuns/{run}/taskInstances/{task}")
        def task_instance(dag: str, run: str, task: str) -> dict:
            told = task_instances(dag, run, 100)["task_instances"]
            return next(one for one in told if one["task_id"] == task)

        @app.get("/api/v2/dags/{dag}/tasks")
        def tasks(dag: str) -> dict:
            if dag in {one.dag_id for one in self.production}:
                return {"tasks": [{"task_id": "x", "operator_name": "SetProductionOperator"}]}
            names = ["before", *ROAD]
            after = [[name] for name in names[1:]] + [[]]
            pairs = sorted(zip(names, after, strict=True))
            return {"tasks": [{"task_id": n, "downstream_task_ids": a} for n, a in pairs]}

        @app.get("/api/v2/dags/{dag}")
        def dag(dag: str) -> dict:
            return {"dag_id": dag, "is_paused": self.paused}

        @app.get("/api/v2/dags")
        def dags(limit: int, offset: int = 0) -> dict:
            told = [
                (f"a-{number}", "Training from manifest.yml", {"ddl", "tensorflow"})
                for number in range(120)
            ]
            told += [(dag.dag_id, dag.description, dag.tags) for dag in self.production]
            names = ("dag_id", "description", "tags")
            named = [
                dict(zip(names, (*one[:2], [{"name": t} for t in one[2]]), strict=True))
                for one in told
            ]
            # As Airflow, whose [api] maximum_page_limit is 100 by default.
            page = named[offset : offset + min(limit, 100)]
            return {"dags": page, "total_entries": len(named)}

        @app.post("/api/v2/dags/~/dagRuns/list")
        async def runs(request: Request) -> dict:
            asked = DAGRunsBatchBody.model_validate_json(await request.body())
            told = [
                run
                for run in self.runs
                if run["dag_id"] in asked.dag_ids and run["state"] in asked.states
            ]
            if asked.order_by == "-run_after":
                told.reverse()
            page = told[asked.page_offset :][: asked.page_limit]
            return {"dag_runs": page, "total_entries": len(told)}

        @app.post("/api/v2/dags/{dag}/dagRuns")
        async def trigger(dag: str, request: Request) -> dict:
            self.sent.append((dag, await request.json()))
            return {"dag_run_id": "manual__1"}

        @app.patch("/api/v2/dags/{dag}/dagRuns/{run}/taskInstances/{task}/-1/hitlDetails")
        async def answer(dag: str, run: str, task: str, request: Request) -> dict:
            self.sent.append((task, await request.json()))
            return {}

        @app.get("/outside", response_class=HTMLResponse)
        def outside() -> str:
            return "<h1>outside</h1>"

        whole = FastAPI()
        whole.mount(BELOW, app)
        whole.mount("", app)
        return whole


@pytest.fixture
def site(workspace, monkeypatch):
    from ddl_airflow.plugin import api
    from ddl_airflow.site import training_of

    monkeypatch.setattr(api, "readers_of_task_logs", lambda: lambda: None)
    monkeypatch.setattr(api, "readers_among_dags", lambda: lambda: lambda asked: set(asked))
    monkeypatch.setattr(api, "rights_over_dag", lambda: lambda: {"trigger": True, "approve": True})
    monkeypatch.setattr(api, "tensorboard", lambda: f"{made.url}/outside")
    monkeypatch.setenv("AIRFLOW__API__SECRET_KEY", "of this site")
    made = Site(workspace, training_of)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        plugin = api.app()
        config = uvicorn.Config(made.app(plugin), log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        made.url = "http://{}:{}".format(*listening.getsockname())
        yield made
        server.should_exit = True
        thread.join()
        plugin.state.tensorboards().close()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install -y chromium")
    with sync_playwright() as playwright:
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def tab(browser, site):
    """tab(query, theme=, width=, locale=, below=) -> the page around, and the frame in it.

    Whatever is shown asks no other host, nothing beside the path that it is below, and breaks
    neither its script nor its policy.
    """
    said: list[str] = []
    beside: list[str] = []
    opened = []

    def show(query="dag_id=digits&run_id=run", theme="light", width=1200, locale="en-GB", below=""):
        def asked(request):
            if not request.url.startswith((f"{site.url}{below}/", "data:")):
                beside.append(request.url)

        page = browser.new_page(viewport={"width": width, "height": 900}, locale=locale)
        opened.append(page)
        page.set_default_timeout(within(15_000))
        expect.set_options(timeout=within(15_000))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda one: one.type == "error" and said.append(one.text))
        page.on("request", asked)
        page.goto(f"{site.url}{below}/around?theme={theme}&query={query.replace('&', '%26')}")
        return page, page.frame_locator("iframe")

    yield show
    for page in opened:
        page.close()
    expected = ("favicon", "403", "404", "503")
    assert [one for one in said if not any(word in one for word in expected)] == []
    assert beside == []
