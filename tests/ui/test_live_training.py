"""A training looked at in the running Airflow while it runs, as it fails, and decided on there."""

from __future__ import annotations

import json
import re
import shutil
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from ddl_airflow.links import TAB
from tests.integration.test_approval import has_asked
from tests.limits import until, within
from tests.screenshots import picture

pytestmark = pytest.mark.integration

DAG = "live-training"
PRODUCTION_DAG = "live-training-production"
MANIFEST = """\
model_definition:
  name: live-training
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py ; python export.py
    compute_configuration: {name: cpu, nodes: 2}
training_data_reference: {type: fs, source: {path: ./data}}
training_results_reference: {type: fs, target: {path: ./published}}
distribution: independent
approval: {required: true}
retries: {attempts: 1}
parameters:
  fails: false
"""
# Steps are reported until the test says that it has seen enough.
SCRIPTS = {
    "train.py": """\
import json, os, time
rank, seen = int(os.environ["OMPI_COMM_WORLD_RANK"]), os.path.join(os.environ["LOG_DIR"], "seen")
step = 0
while not os.path.exists(seen):
    step += 1
    print(f"step {step} of rank {rank}", flush=True)
    if rank == 0:
        line = {"t": time.time(), "source": "script", "step": step, "steps": 4000, "loss": 8 / step}
        with open(os.environ["DDL_PROGRESS"], "a") as file:
            file.write(json.dumps(line) + "\\n")
    time.sleep(0.2)
if os.environ["PARAM_FAILS"].lower() == "true":
    if rank == 1:
        raise ValueError("sample 17 has 783 pixels")
    time.sleep(300)
""",
    "export.py": """\
import os, shutil
model = os.environ["RESULT_DIR"] + "/model"
shutil.copytree(os.environ["DATA_DIR"], model, dirs_exist_ok=True)
# Another one each time: to the same model nobody goes back.
os.makedirs(model + "/assets.extra", exist_ok=True)
with open(model + "/assets.extra/made_in", "w") as file:
    file.write(model)
""",
}


@pytest.fixture(scope="module")
def published(site, dags_folder, loader_folder, finished):
    """Where the manifest's models go; its data is the model that mnist-keras made."""
    folder = dags_folder / DAG
    run_id, _ = finished["mnist-keras"]
    shutil.copytree(site.layout("mnist-keras", run_id).model, folder / "data")
    for name, text in SCRIPTS.items():
        (folder / name).write_text(text)
    (folder / "manifest.yml").write_text(MANIFEST)
    results = folder / "published"
    (loader_folder / "live_training_production.py").write_text(
        "from ddl_airflow.operators.production import production_dag\n"
        f"dag = production_dag({results.as_uri()!r}, dag_id={PRODUCTION_DAG!r})\n"
    )
    for dag_id in (DAG, PRODUCTION_DAG):
        site.wait_for_dag(dag_id)
    return results


@pytest.fixture
def look(page, site, published):
    """Opens the page of a run; no request of the browser leaves this host meanwhile."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    def opened(run_id):
        page.goto(f"{site.run_url(DAG, run_id)}/plugin/{TAB}")
        return page.frame_locator("iframe")

    yield opened
    hosts = {urlsplit(url).hostname for url in asked if not url.startswith(("data:", "blob:"))}
    assert hosts == {urlsplit(site.url).hostname}


def _fact(frame, name):
    found = frame.locator("#now > div", has=frame.locator("dt", has_text=re.compile(f"^{name}$")))
    return found.locator("dd").first


def _step(frame):
    return int(re.match(r"[\d,]+", _fact(frame, "step").text_content())[0].replace(",", ""))


def _seen(site, run_id):
    (site.layout(DAG, run_id).logs / "seen").touch()


def _production(published):
    return json.loads((published / DAG / "production.json").read_text())["training_id"]


def _approve(site, run_id, frame):
    """Presses the button, once Airflow takes an answer for one."""
    until(lambda: has_asked(site, DAG, run_id), 180)
    frame.get_by_role("link", name="Lineage, with all digests").click()
    frame.get_by_role("button", name="Approve").click()
    expect(frame.get_by_role("status").filter(has_text="Approve: said.")).to_be_visible()
    assert site.wait_for_run(DAG, run_id, 120) == "success"


def test_a_training_is_watched_approved_and_rolled_back(page, site, published, look):
    first = site.trigger(DAG)
    frame = look(first)
    expect(_fact(frame, "step")).to_be_visible(timeout=within(120_000))
    # Nobody loads anything again, and the numbers go on.
    page.evaluate("window.loadedOnce = true")
    for _ in range(3):
        before, loss = _step(frame), _fact(frame, "loss").text_content()
        until(lambda: _step(frame) > before, 30)  # noqa: B023  # asked in this round
        expect(_fact(frame, "loss")).not_to_have_text(loss)
    assert page.evaluate("window.loadedOnce")
    lanes = frame.locator("table", has=frame.locator("th", has_text="cores used")).locator("tr")
    for rank in (1, 2):
        expect(lanes.nth(rank)).to_contain_text("at most")
    expect(frame.locator("#logs pre")).to_contain_text(re.compile(r"step \d+ of rank 0"))
    # What axe-core says of Airflow's own page around it is Airflow's.
    assert [one["id"] for one in Axe().run(page.frames[1]).response["violations"]] == []
    picture(page, "training-live")
    _seen(site, first)
    expect(frame.locator(".progress")).to_have_text("100%, stopped early", timeout=within(60_000))
    _approve(site, first, frame)
    layout = site.layout(DAG, first)
    frame = look(first)
    (kept,) = published.glob(f"{layout.training_id}/*/lineage.json")
    record = json.loads(kept.read_text())
    loss = record["result"]["metrics"]["loss"]
    last = json.loads(layout.progress.read_text().splitlines()[-1])
    assert last["loss"] == loss
    expect(_fact(frame, "loss")).to_have_text(f"{loss:#.4g}")
    expect(_fact(frame, "step")).to_have_text(f"{last['step']} / 4,000")

    second = site.trigger(DAG)
    until(lambda: site.layout(DAG, second).progress.exists(), 120)
    _seen(site, second)
    _approve(site, second, look(second))
    assert _production(published) == site.layout(DAG, second).training_id
    # The model that serves is no good: back to the one before, from its own picture.
    frame = look(second)
    frame.get_by_role("link", name="Lineage, with all digests").click()
    expect(frame.locator(".node.pointer", has_text="production")).to_be_visible()
    picture(page, "lineage")
    frame.get_by_role("button", name="Go back to an earlier model …").click()
    frame.get_by_label("Why, for the history").fill("it mistakes 4 for 9")
    frame.get_by_role("button", name="Go back to an earlier model", exact=True).click()
    expect(frame.get_by_role("status").filter(has_text=PRODUCTION_DAG)).to_be_visible()
    until(lambda: _production(published) == layout.training_id, 120)
    history = json.loads((published / DAG / "production.json").read_text())
    assert "it mistakes 4 for 9" in json.dumps(history)


def test_a_training_that_fails_says_which_rank_and_why(page, site, published, look):
    run_id = site.trigger(DAG, {"fails": True})
    frame = look(run_id)
    expect(_fact(frame, "step")).to_be_visible(timeout=within(120_000))
    _seen(site, run_id)
    # Without a look at anything else: on top of the page that is open.
    failure = frame.locator("#failure")
    expect(failure.locator("p").first).to_contain_text(
        re.compile(
            r"rank 1 of 2 on \S+ raised ValueError at train.py:\d+: sample 17 has 783 pixels"
        ),
        timeout=within(120_000),
    )
    picture(page, "training-failed")
    failure.get_by_role("button", name="Log of rank 1").click()
    expect(frame.locator("#logs pre")).to_contain_text("ValueError: sample 17 has 783 pixels")
    site.wait_for_run(DAG, run_id, 120)
