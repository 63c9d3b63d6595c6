"""The Training tab in a real browser, in a page around it that answers as Airflow's API does."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from playwright.sync_api import expect, sync_playwright

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.lineage.record import write_part
from tests.limits import within

# Airflow's own import of Starlette's test client warns of the client's name.
pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# As Airflow 3.3 has it; its theme is a class of its document.
AROUND = """<!doctype html><html class="{theme}" style="background:{paper}">
<body style="margin:0"><div>
<iframe sandbox="allow-scripts allow-same-origin allow-forms allow-downloads"
 style="border:none; width:100%; height:100vh" src="/ddl/training?dag_id={dag}&run_id=run"></iframe>
"""
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
        self.layout = RunLayout(workspace, "digits", training_of("digits", "run"))
        self.layout.create()
        self.tasks = dict.fromkeys(ROAD, "success")
        self.url = ""

    def progress(self, *lines: dict) -> None:
        with self.layout.progress.open("a") as file:
            file.writelines(json.dumps({"source": "keras"} | line) + "\n" for line in lines)

    def app(self, plugin) -> FastAPI:
        app = FastAPI()
        app.mount("/ddl", plugin)

        @app.get("/around/{dag}", response_class=HTMLResponse)
        def around(dag: str, theme: str = "light") -> str:
            paper = {"light": "#fff", "dark": "oklch(0.2 0.02 260)"}[theme]
            return AROUND.format(theme=theme, paper=paper, dag=dag)

        @app.get("/api/v2/dags/{dag}/dagRuns/run/taskInstances")
        def task_instances(dag: str) -> dict:
            # By when they were queued, which is no order.
            found = [
                {"task_id": n, "task_display_name": n, "operator_name": ROAD[n], "state": s}
                for n, s in sorted(self.tasks.items())
            ]
            other = {"task_id": "a", "task_display_name": "a", "state": "success"}
            own = {**other, "task_id": "before", "task_display_name": "before"}
            found = [*found, own] if dag == "digits" else [other]
            return {"task_instances": [{"operator_name": "BashOperator"} | one for one in found]}

        @app.get("/api/v2/dags/{dag}/tasks")
        def tasks(dag: str) -> dict:
            names = ["before", *ROAD]
            after = [[name] for name in names[1:]] + [[]]
            pairs = sorted(zip(names, after, strict=True))
            return {"tasks": [{"task_id": n, "downstream_task_ids": a} for n, a in pairs]}

        return app


@pytest.fixture
def site(workspace, monkeypatch):
    from ddl_airflow.plugin import api
    from ddl_airflow.site import training_of

    monkeypatch.setattr(api, "readers_of_task_logs", lambda: lambda: None)
    made = Site(workspace, training_of)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(made.app(api.app()), log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        made.url = "http://{}:{}".format(*listening.getsockname())
        yield made
        server.should_exit = True
        thread.join()


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
    """tab(dag=, theme=) -> the page around, and the tab in it."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    said: list[str] = []
    page.on("pageerror", lambda error: said.append(str(error)))

    def show(dag="digits", theme="light"):
        page.goto(f"{site.url}/around/{dag}?theme={theme}")
        return page, page.frame_locator("iframe")

    yield show
    page.close()
    assert said == []


def shot(page, name):
    """Keeps a picture where DDL_SCREENSHOTS says, for people to look at."""
    if folder := os.environ.get("DDL_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png")


def value_of(frame, name):
    fact = frame.locator("#now > div", has=frame.locator("dt", has_text=re.compile(f"^{name}$")))
    return fact.locator("dd")


def diverged(site):
    for step in range(60):
        # A gap in the middle, and numbers no more from 50 on.
        lost = step in (20, 21) or step >= 50
        site.progress(
            {
                **{"t": 1000 + step / 4, "step": step, "steps": 400, "epoch": 1},
                "loss": "NaN" if lost else 144.7 / (step + 1),
                "val_accuracy": 0.5 + step / 200,
            }
        )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_training_that_diverged_and_failed(tab, site, theme):
    diverged(site)
    site.tasks |= {"train": "failed", "transform": None, "evaluate": None, "approve": None}
    site.tasks["upload_results"] = None
    failed = {"step": "train", "try": 3, "error": "JobFailed", "rank": 1}
    said = "rank 1 of 2 on <b>gpu02</b> raised ValueError: loss is NaN (train.py:33)."
    (site.layout.kept / "failure.json").write_text(json.dumps(failed | {"message": said}))
    for rank in (0, 1):
        (site.layout.logs / f"rank-{rank}.log").write_text(f"of rank {rank}\n")
    page, frame = tab(theme=theme)
    expect(value_of(frame, "loss")).to_have_text("NaN")
    expect(value_of(frame, "loss")).to_have_class("lost")
    red = {"light": "rgb(192, 39, 31)", "dark": "rgb(255, 128, 120)"}[theme]
    expect(value_of(frame, "loss")).to_have_css("color", red)
    expect(value_of(frame, "val_accuracy")).to_have_text("0.7950")
    expect(frame.locator("#now")).to_contain_text("training batches")
    expect(frame.locator("#now")).to_contain_text("validation data")
    loss = frame.locator("figure", has=frame.locator("figcaption", has_text=re.compile("^loss")))
    expect(loss.locator("polyline")).to_have_count(2)  # before the gap, and after it
    expect(loss.locator("line.lost")).to_have_count(2)
    expect(frame.locator("dl")).not_to_contain_text("left")
    expect(frame.locator("#failure")).to_have_text(f"train, try 3: JobFailed: {said} Log of rank 1")
    # Airflow's theme, and not the system's.
    paper = {"light": "rgb(255, 255, 255)", "dark": "oklch(0.2 0.02 260)"}[theme]
    expect(frame.locator("body")).to_have_css("background-color", paper)
    ink = {"light": "rgb(28, 39, 51)", "dark": "rgb(230, 235, 241)"}[theme]
    expect(frame.locator("body")).to_have_css("color", ink)
    shot(page, f"tab-{theme}")
    frame.get_by_role("link", name="Log of rank 1").click()
    expect(frame.locator("#log pre")).to_have_text("of rank 1\n")
    other = {"light": "dark", "dark": "light"}[theme]
    page.evaluate(f"document.documentElement.className = '{other}'")
    expect(frame.locator("body")).not_to_have_css("color", ink)


def test_steps_stand_in_the_order_of_the_road(tab, site):
    site.tasks |= {"approve": "awaiting_input", "upload_results": None}
    _, frame = tab()
    names = ["before", *ROAD]
    states = ["success"] * 5 + ["awaiting input", "waiting"]
    chips = [f"{name}: {state}" for name, state in zip(names, states, strict=True)]
    expect(frame.locator("#tasks span")).to_have_text(chips)


def test_what_is_left_is_nothing_once_the_training_has_ended(tab, site):
    site.progress(*({"t": 1.0 + n, "step": 10 * n, "steps": 600, "loss": 1 / n} for n in (1, 2)))
    measured = {"metric": "accuracy", "value": 0.75, "source": "script"}
    site.tasks["train"] = "running"
    _, frame = tab()
    expect(value_of(frame, "left")).to_have_text("58 s")
    site.tasks["train"] = "success"
    write_part(site.layout, "train", {"result": {"metrics": {}, "measurements": [measured]}})
    write_part(site.layout, "transform", {"result": {"accuracy": 0.5, "sample": "x", "rows": 9}})
    expect(value_of(frame, "left")).to_have_text("stopped early")
    expect(value_of(frame, "accuracy")).to_have_text("0.5000")
    expect(frame.locator("#now")).to_contain_text("sample x, 9 rows")
    site.progress({"t": 4.0, "step": 600, "loss": 0.25})
    expect(value_of(frame, "step")).to_have_text("600 / 600")
    expect(value_of(frame, "left")).to_have_count(0)
    # Cleared, and trained again from the start.
    site.layout.progress.write_text('{"t": 9, "step": 3, "source": "keras"}\n')
    expect(value_of(frame, "step")).to_have_text("3")
    expect(value_of(frame, "loss")).to_have_count(0)


def test_a_failure_that_a_later_try_made_good_is_not_shown(tab, site):
    failed = {"step": "train", "try": 1, "error": "JobLost", "message": "gone", "rank": None}
    (site.layout.kept / "failure.json").write_text(json.dumps(failed))
    site.tasks["train"] = "running"
    _, frame = tab()
    expect(frame.locator("#failure")).to_have_text("train, try 1: JobLost: gone ")
    site.tasks["train"] = "success"
    expect(frame.locator("#failure")).to_be_hidden()


def test_the_end_of_a_log_comes_first_and_one_gets_back(tab, site):
    log = site.layout.logs / "rank-0.log"
    lines = [f"line {number} of the training\n" for number in range(300_000)]
    log.write_text("".join(lines))
    assert log.stat().st_size > 7 * 2**20
    page, frame = tab()
    got: list[tuple[str, int]] = []
    page.on("response", lambda a: "/ddl/log" in a.url and got.append((a.url, len(a.body()))))
    began = time.monotonic()
    frame.get_by_role("link", name="0", exact=True).click()
    pre = frame.locator("#log pre")
    expect(pre).to_contain_text("line 299999 of the training")
    assert time.monotonic() - began < within(5)
    assert len(pre.text_content()) <= 64 * 1024
    assert pre.text_content().startswith("line 29")
    assert [size for _, size in got if size > 80_000] == []
    expect(frame.locator("#shown")).to_have_text(re.compile("the last 6[34].. KiB of 7.. MiB"))
    expect(frame.locator("#back")).to_be_in_viewport()  # though the log was scrolled to its end
    shot(page, "tab-log")
    with log.open("a") as file:
        file.write("what was added\n")
    expect(pre).to_contain_text("what was added")
    before = pre.text_content()
    frame.get_by_role("link", name="Earlier lines").click()
    expect(frame.locator("#shown")).to_have_text(re.compile("the last 12[78].. KiB"))
    assert pre.text_content().endswith(before) and len(pre.text_content()) > 120_000
    with page.expect_download() as whole:
        frame.get_by_role("link", name="Whole log").click()
    assert whole.value.suggested_filename == "digits-rank-0.log"
    assert Path(whole.value.path()).read_text() == "".join([*lines, "what was added\n"])
    frame.get_by_role("link", name="← Training").click()
    expect(frame.locator("#tasks span").first).to_be_visible()
    expect(frame.locator("#log")).to_be_hidden()


def test_a_dag_that_is_not_ours_has_one_line(tab):
    page, frame = tab("others")
    expect(frame.locator("#none")).to_be_visible()
    expect(frame.locator("#none")).to_contain_text("This DAG has no training")
    expect(frame.locator("#training")).to_be_hidden()
    shot(page, "tab-none")
