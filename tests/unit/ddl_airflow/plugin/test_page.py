"""The page in a real browser, in a page around it that answers as Airflow's API does."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from ddl_airflow.lineage.production import PRODUCTION, point
from ddl_airflow.lineage.record import write_part
from ddl_airflow.storage.stores import open_store
from tests.limits import until, within
from tests.screenshots import shot
from tests.unit.ddl_airflow.plugin.conftest import BELOW
from tests.unit.ddl_airflow.plugin.test_training import write_nonsense

NOV_2023 = 1_700_000_000
HIDE = """hidden => {
    Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
    document.dispatchEvent(new Event("visibilitychange"));
}"""


def without_fault(page):
    """axe-core finds nothing in the frame."""
    found = Axe().run(page.frames[1])
    assert [(one["id"], one["nodes"][0]["html"]) for one in found.response["violations"]] == []
    assert len(found.response["passes"]) > 10


def busy_at(number):
    """A route whose answer of that number is that too many wait; the others are the server's."""
    asked = itertools.count(1)

    def answer(route):
        if next(asked) == number:
            route.fulfill(status=503, json={"detail": "8 requests wait"})
        else:
            route.continue_()

    return answer


def value_of(frame, name):
    fact = frame.locator("#now > div", has=frame.locator("dt", has_text=re.compile(f"^{name}$")))
    return fact.locator("dd").first


def rank_record(layout, folder, rank, **said):
    (layout.state / folder).mkdir(exist_ok=True)
    path = layout.state / folder / f"rank-{rank}.json"
    path.write_text(json.dumps({"rank": rank, "host": f"gpu0{rank + 1}", "cpu": "EPYC"} | said))


def diverged(site):
    """Two tries: the second goes on at step 30, loses its numbers, and fails."""
    for begun, steps, name in ((1000, range(45), "try-1"), (1100, range(30, 60), "try-2")):
        lost = {20, 21} | set(range(50, 60))
        for step in steps:
            ops = {"source": "ops", "step": step - steps[0], "t": begun + step / 4}
            site.progress(ops | {"comm_s": step / 20, "wait_s": step / 40})
            site.progress(
                {
                    **{"t": begun + step / 4, "step": step, "steps": 400, "epoch": 1},
                    "loss": "NaN" if step in lost else 144.7 / (step + 1),
                    "val_accuracy": 0.5 + step / 200,
                    "examples_per_s": 12_345.6,
                }
            )
        raised = {"type": "ValueError", "message": "loss is NaN", "file": "train.py", "line": 33}
        for rank in (0, 1):
            told = {"started": begun - 1.0 + rank / 10, "ended": begun + 50.0}
            end = {"exit_code": 143, "asked_to_end": begun + 49.9}
            if rank:
                end = {"exit_code": 1, "exception": raised | {"t": begun + 49.0}}
            rank_record(site.layout, name, rank, **told, **end)
    spent = [{"rank": r, "host": f"gpu0{r + 1}", "run_s": 50.0, "comm_s": 12.0} for r in (0, 1)]
    spent = [one | {"wait_s": 10.0 - 9 * one["rank"]} for one in spent]
    site.layout.statistics.write_text(json.dumps({"straggler": {"rank": 1}, "ranks": spent}))
    (site.layout.checkpoints / "model-30.keras").write_bytes(b"x" * 2048)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_training_that_diverged_and_failed(tab, site, theme):
    diverged(site)
    site.tasks |= {"train": "failed", "transform": None, "evaluate": None, "approve": None}
    site.tasks["upload_results"] = None
    cause = "rank 1 of 2 on <b>gpu02</b> raised ValueError at train.py:33: loss is NaN."
    fix = "Give each rank a smaller batch."
    site.fail(f"{cause} {fix} All ranks were ended. Its whole log: /w/logs/rank-1.log", 1)
    for rank in (0, 1):
        (site.layout.logs / f"rank-{rank}.log").write_text(f"<i>of rank {rank}</i>\n")
    page, frame = tab(theme=theme)
    expect(frame.locator("#failure > p").first).to_have_text(cause)
    expect(frame.locator("#failure")).to_contain_text(f"What to do: {fix}")
    expect(frame.locator("#failure code")).to_have_text("train.py:33")
    expect(value_of(frame, "loss")).to_have_text("⚠ NaN")
    red = {"light": "rgb(179, 35, 28)", "dark": "rgb(255, 143, 135)"}[theme]
    expect(value_of(frame, "loss")).to_have_css("color", red)
    expect(value_of(frame, "val_accuracy")).to_have_text("0.7950")
    expect(value_of(frame, "examples/s")).to_have_text("12,350")
    expect(frame.locator("#now")).to_contain_text("validation data")
    expect(value_of(frame, "left")).to_have_count(0)
    loss = frame.locator("figure", has=frame.locator("h3", has_text=re.compile("^loss$")))
    expect(loss.locator("canvas")).to_have_count(1)
    expect(loss.locator(".lost")).to_have_text("⚠ NaN from step 20 to 21, NaN from step 50 to 59")
    loss.locator("summary").click()
    expect(loss.locator("thead th")).to_have_text(["step", "try 1", "try 2"])
    expect(loss.locator("tbody tr", has_text=re.compile("^30"))).to_have_text("304.6684.668")
    expect(frame.locator("#tries li")).to_have_count(2)
    said = "on gpu01, gpu02: rank 1 on gpu02 raised ValueError at train.py:33: loss is NaN"
    expect(frame.locator("#tries li").first).to_contain_text(f"try 1 {said}")
    expect(frame.locator("#lanes tbody tr").nth(1)).to_contain_text("1 on gpu02 (slowest)")
    expect(frame.locator("#lanes tbody tr").first).to_contain_text("76%")
    expect(frame.locator("table", has_text="model-30.keras")).to_contain_text("2 KiB")
    # Airflow's theme, and not the system's.
    paper = {"light": "rgb(255, 255, 255)", "dark": "oklch(0.2 0.02 260)"}[theme]
    expect(frame.locator("body")).to_have_css("background-color", paper)
    ink = {"light": "rgb(28, 39, 51)", "dark": "rgb(230, 235, 241)"}[theme]
    expect(frame.locator("body")).to_have_css("color", ink)
    without_fault(page)
    shot(page, f"training-failed-{theme}")
    frame.locator("#failure").get_by_role("button", name="Log of rank 1").click()
    expect(frame.locator("#logs pre")).to_have_text("<i>of rank 1</i>\n")
    expect(frame.locator("#logs select")).to_be_focused()
    shot(page, f"training-log-{theme}")
    other = {"light": "dark", "dark": "light"}[theme]
    page.evaluate(f"document.documentElement.className = '{other}'")
    expect(frame.locator("body")).not_to_have_css("color", ink)


def test_numbers_move_while_it_trains_and_nothing_else_does(tab, site):
    site.tasks |= dict.fromkeys(list(site.tasks)[1:])
    site.tasks["train"] = "running"
    now = time.time()
    points = [
        {"t": now + n, "step": 10 * n, "steps": 600, "loss": 1 / n, "examples_per_s": 9.5}
        for n in (1, 2, 3)
    ]
    site.progress(*points[:2])
    records = site.layout.state / "try-1"
    records.mkdir()
    usage = {"t": now, "cores": 1.92, "cpu_s": 7.5, "memory": 2 << 30, "peak": 5 << 29}
    usage |= {"gpu": 97.4, "gpu_average": 88.1, "gpu_memory": 7 << 30, "gpu_peak": 15 << 29}
    for rank in (0, 1):
        (site.layout.logs / f"rank-{rank}.log").write_text("begun\n")
        told = {"rank": rank, "host": "gpu01", "cpu": "AMD EPYC", "started": now - 10}
        (records / f"rank-{rank}.json").write_text(json.dumps(told))
        spent = {"t": now, "run_s": 10.0, "comm_s": 4.0, "wait_s": 3.0 - 2 * rank}
        (records / f"rank-{rank}.communication").write_text(json.dumps(spent))
    (records / "rank-0.usage").write_text(json.dumps(usage))
    page, frame = tab(locale="de-DE")
    lanes = frame.locator("section", has=frame.locator("#lanes"))
    expect(lanes).to_contain_text("so far. The others waited most for rank 1.")
    expect(lanes.locator("tbody tr").nth(1)).to_contain_text("1 on gpu01 (slowest)")
    expect(lanes.locator("tbody tr").first).to_contain_text("60 %")
    lanes.scroll_into_view_if_needed()
    shot(page, "lanes-live")
    taken = frame.locator("table", has=frame.locator("th", has_text="cores used")).locator("tr")
    expect(taken.nth(1)).to_contain_text("1,92 GiB, at most 2,5 GiB97 %7 GiB, at most 7,5 GiB")
    expect(taken.nth(2)).to_contain_text("AMD EPYC–––––at work")
    taken.first.scroll_into_view_if_needed()
    shot(page, "where-it-runs")
    expect(value_of(frame, "left")).to_have_text("58 s")
    expect(value_of(frame, "loss")).to_have_text("0,5000")
    expect(frame.locator("progress")).to_have_attribute("value", str(20 / 600))
    loss = frame.locator("figure", has=frame.locator("h3", has_text="loss"))
    slider = frame.get_by_label("Smoothing")
    slider.focus()
    page.keyboard.press("End")
    expect(slider).to_have_value("0.98")
    loss.locator("summary").click()
    places = [loss.bounding_box(), frame.locator("#logs").bounding_box()]
    asked: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    site.progress(points[2])
    with (site.layout.logs / "rank-0.log").open("a") as file:
        file.write("what was added\n")
    ended = {"ended": now, "exit_code": 0, "rank": 0, "host": "gpu01", "started": now - 10}
    (records / "rank-0.json").write_text(json.dumps(ended))
    expect(value_of(frame, "loss")).to_have_text("0,3333")
    expect(taken.nth(1)).to_contain_text("0,8at most 2,5 GiB88 %at most 7,5 GiB")
    expect(frame.locator("#logs pre")).to_contain_text("what was added")
    expect(loss.locator("summary")).to_be_focused()
    expect(loss.locator("details")).to_have_attribute("open", "")
    grown = loss.bounding_box()
    assert grown["y"] == places[0]["y"] and grown["x"] == places[0]["x"]
    # What comes is what is new; and nobody is asked while nobody looks.
    assert any(re.search(r"curves/digits/run\?.*cursor=[1-9]", url) for url in asked)
    inner = page.frames[1]
    inner.evaluate(HIDE, True)
    page.wait_for_load_state("networkidle")
    asked.clear()
    site.progress({"t": now + 4, "step": 40, "loss": 0.25})
    page.wait_for_timeout(3500)
    assert asked == []
    inner.evaluate(HIDE, False)
    expect(value_of(frame, "loss")).to_have_text("0,2500")


def test_who_looks_at_a_part_of_a_curve_goes_on_looking_there(tab, site):
    lines = [{"t": 1.0 + n, "step": 10 * n, "loss": 1 / n} for n in range(1, 61)]
    site.progress(*lines[:40])
    page, frame = tab()
    place = frame.locator("figure", has=frame.locator("h3", has_text="loss")).locator(".u-over")
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    middle = box["y"] + box["height"] / 2

    def pointed_at(part):
        page.mouse.move(box["x"] + part * box["width"], middle)
        return frame.locator(".under span", has_text="step").first.text_content()

    whole = pointed_at(0.95)
    pointed_at(0.25)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, middle, steps=4)
    page.mouse.up()
    closer = pointed_at(0.95)
    assert closer != whole
    site.progress(*lines[40:])
    expect(value_of(frame, "loss")).to_have_text("0.01667")
    pointed_at(0.5)
    assert pointed_at(0.95) == closer


# Lines as they are drawn: the width of each, and the least, greatest and last height in it.
LINES = """() => {
    const found = [], context = CanvasRenderingContext2D.prototype, path = Path2D.prototype;
    const { stroke } = context, { lineTo } = path;
    path.lineTo = function (x, y) {
        (this.heights ??= []).push(y);
        lineTo.call(this, x, y);
    };
    context.stroke = function (line) {
        const all = line?.heights ?? [], ends = [Math.min(...all), Math.max(...all), all.at(-1)];
        if (all.length > 50) found.push([this.lineWidth, ...ends]);
        stroke.apply(this, arguments);
    };
    dispatchEvent(new Event("theme"));  // draws all anew
    return new Promise((done) => setTimeout(() => done(found), 500));
}"""


@pytest.mark.parametrize("compared", [False, True])
def test_a_long_curve_is_smoothed_by_its_means(tab, published, compared):
    """Of each stretch the extremes are drawn; a spike of one step in 50 is no half of the curve."""
    path = published.layout.progress
    values = [100.0 if step % 50 == 0 else 1.0 for step in range(10_000)]
    path.unlink()
    published.progress(*({"t": 1.0, "step": n, "loss": v} for n, v in enumerate(values)))
    page, frame = tab("" if compared else "dag_id=digits&run_id=run")
    if compared:
        for one in ("digits/run", "mnist-tf1/lost"):
            frame.get_by_label(f"Compare {one}").check()
        published.recorded("lost").progress.write_text("")
        frame.get_by_role("link", name="Compare the two").click()
    loss = frame.locator("figure", has=frame.locator("h3", has_text=re.compile("^loss$")))
    expect(loss.locator(".plot")).to_have_attribute("aria-label", re.compile("to step 9,999,"))
    slider = frame.get_by_label("Smoothing")
    slider.focus()
    page.keyboard.press("End")
    expect(slider).to_have_value("0.98")
    (faint, top, bottom, _), (strong, *smooth) = page.frames[1].evaluate(LINES)[-2:]
    assert (faint, strong) == (1, 2)
    shown = [1 + 99 * (bottom - height) / (bottom - top) for height in smooth]
    assert 2 < min(shown) <= max(shown) < 5, shown
    # What comes later is drawn point by point, and counts for its steps alone.
    published.progress(*({"t": 2.0, "step": n, "loss": 1.0} for n in range(10_000, 10_050)))
    look_again(page)
    shot(page, f"smoothed-{compared}")
    if not compared:
        expect(value_of(frame, "step")).to_have_text("10,049")
        (_, top, bottom, _), (_, *_, last) = page.frames[1].evaluate(LINES)[-2:]
        assert 2 < 1 + 99 * (bottom - last) / (bottom - top) < 4


def test_a_long_training_is_read_to_its_end_once(tab, site):
    """Its numbers come in several answers, which are no growth of what is shown."""
    site.progress({"t": 1.0, "step": 1, "loss": 1.0})
    asked = []

    def answer(route):
        asked.append(re.search("cursor=([0-9]*)", route.request.url)[1])
        first = 30_000 * len(asked)
        part = {"job": 0, "steps": [*range(first - 30_000, first)], "values": [0.5] * 30_000}
        curves = [{"name": "loss", "measured_on": "", "parts": [part | {"gaps": []}]}]
        told = {"curves": curves if len(asked) < 5 else [], "cursor": str(len(asked))}
        route.fulfill(json=told | {"more": len(asked) < 4, "again": False})

    page, frame = tab("dag_id=others&run_id=run")
    page.route("**/ddl/curves/digits/**", answer)  # the page of others may still ask for its own
    page.goto(page.url.replace("others", "digits"))
    loss = frame.locator("figure", has=frame.locator("h3", has_text="loss"))
    expect(loss.locator(".plot")).to_have_attribute("aria-label", re.compile("to step 119,999,"))
    assert asked[:4] == ["", "1", "2", "3"] and "" not in asked[1:]


def test_what_stopped_early_and_ended_well_is_whole(tab, site):
    site.progress(*({"t": 1.0 + n, "step": 10 * n, "steps": 1500} for n in range(1, 52)))
    measured = {"metric": "accuracy", "value": 0.75, "source": "script"}
    site.tasks["train"] = "success"
    write_part(site.layout, "train", {"result": {"metrics": {}, "measurements": [measured]}})
    write_part(site.layout, "transform", {"result": {"accuracy": 0.5, "sample": "x", "rows": 9}})
    _, frame = tab()
    expect(frame.locator(".progress")).to_have_text("100%, stopped early")
    expect(frame.locator("progress")).to_have_attribute("value", "1")
    expect(value_of(frame, "step")).to_have_text("510 / 1,500")
    expect(value_of(frame, "left")).to_have_count(0)
    expect(value_of(frame, "accuracy")).to_have_text("0.5000")
    expect(frame.locator("#now")).to_contain_text("sample x, 9 rows")
    # Cleared, and trained again from the start.
    (site.layout.kept / "lineage" / "train.json").unlink()
    site.tasks["train"] = "running"
    site.layout.progress.write_text('{"t": 9, "step": 3, "source": "keras"}\n')
    expect(value_of(frame, "step")).to_have_text("3")


def test_steps_stand_in_the_order_of_the_road(tab, site):
    site.tasks |= {"approve": "awaiting_input", "upload_results": None}
    _, frame = tab()
    names = ["before", *site.tasks]
    states = ["✓ {}: success"] * 5 + ["○ {}: awaiting input", "○ {}: waiting"]
    chips = [said.format(name) for name, said in zip(names, states, strict=True)]
    expect(frame.locator("#tasks li")).to_have_text(chips)


def test_airflow_below_a_path(tab, published):
    """As ``[api] base_url`` may have one."""
    _, frame = tab("", below=BELOW)
    expect(frame.locator("tr", has_text="lost")).to_contain_text("failed")
    frame.locator("tr", has_text="second").get_by_role("link", name=re.compile("^mnist")).click()
    expect(frame.locator("#tasks li").first).to_have_text("✓ before: success")
    published.tasks["approve"] = "awaiting_input"
    frame.get_by_role("link", name="Lineage, with all digests").click()
    frame.get_by_role("button", name="Approve").click()
    expect(frame.get_by_text("Approve: said.")).to_be_visible()
    frame.get_by_role("button", name="Go back to an earlier model …").click()
    frame.get_by_role("dialog").get_by_role("button", name="Go back").click()
    expect(frame.get_by_text("Asked for: run manual__1 of ddl-production.")).to_be_visible()


def test_a_failure_that_a_later_try_made_good_is_not_shown(tab, site):
    site.fail("gone", None, tried=1)
    site.tasks["train"] = "running"
    _, frame = tab()
    expect(frame.locator("#failure")).to_contain_text("gone")
    site.tasks["train"] = "success"
    expect(frame.locator("#failure")).to_have_count(0)


def test_the_end_of_a_log_comes_first_and_one_finds_what_is_before(tab, site):
    log = site.layout.logs / "rank-0.log"
    lines = [f"line {number} of the training\n" for number in range(300_000)]
    log.write_text("".join(lines))
    assert log.stat().st_size > 7 * 2**20
    page, frame = tab()
    got: list[tuple[str, int]] = []
    page.on("response", lambda a: "/ddl/log-part" in a.url and got.append((a.url, len(a.body()))))
    pre = frame.locator("#logs pre")
    expect(pre).to_contain_text("line 299999 of the training")
    assert len(pre.text_content()) <= 64 * 1024
    assert pre.text_content().startswith("line 29")
    assert [size for _, size in got if size > 80_000] == []
    expect(frame.locator("#shown")).to_have_text(re.compile(r"6[34].* KiB of 7.* MiB"))
    with log.open("a") as file:
        file.write("what was added\n")
    expect(pre).to_contain_text("what was added")
    before = pre.text_content()
    frame.get_by_role("button", name="Earlier lines").click()
    expect(frame.locator("#shown")).to_have_text(re.compile(r"12[78].* KiB"))
    assert pre.text_content().endswith(before) and len(pre.text_content()) > 120_000
    frame.get_by_label("Search").fill("LINE 123456 ")
    page.keyboard.press("Enter")
    expect(frame.get_by_role("status").filter(has_text="1 lines")).to_be_visible()
    frame.locator(".found button").click()
    expect(pre).to_have_text(re.compile("line 123456 of the training\n$"))
    frame.get_by_role("button", name="Follow its end again").click()
    expect(pre).to_contain_text("what was added")
    with page.expect_download() as whole:
        frame.get_by_role("link", name="Whole log").click()
    assert whole.value.suggested_filename == "digits-rank-0.log"
    assert Path(whole.value.path()).read_text() == "".join([*lines, "what was added\n"])


def test_a_search_that_ends_before_all_of_a_log_says_so(tab, site, monkeypatch):
    from ddl_airflow.plugin import logs

    (site.layout.logs / "rank-0.log").write_text("here\n" * 4096)
    _, frame = tab()
    search, status = frame.get_by_label("Search"), frame.locator("#logs").get_by_role("status")
    search.fill("here")
    search.press("Enter")
    expect(status).to_have_text("4,096 lines with “here”, the newest 200 here")
    monkeypatch.setattr(logs, "_MOST_SEARCHED", 5 * 1024)
    search.press("Enter")
    expect(status).to_have_text("1,024 lines with “here” in the last 5 KiB, the newest 200 here")
    search.fill("nowhere")
    search.press("Enter")
    expect(status).to_have_text("No line with “nowhere” in the last 5 KiB")


def test_who_comes_back_to_a_log_is_shown_its_end(tab, site):
    log = site.layout.logs / "rank-0.log"
    log.write_text("begun\n")
    page, frame = tab()
    pre = frame.locator("#logs pre")
    expect(pre).to_contain_text("begun")
    page.frames[1].evaluate(HIDE, True)
    with log.open("a") as file:
        file.writelines(f"line {number} of the night\n" for number in range(150_000))
    page.frames[1].evaluate(HIDE, False)
    # Not by expect, which would print all of it.
    until(lambda: "line 149999 of the night" in pre.text_content(), 15)


def test_a_log_is_shown_as_a_terminal_would(tab, site):
    bar = "\x1b[1m1/10\x1b[0m \x1b[32m━━\x1b[0m\r\x1b[1m2/10\x1b[0m\r3/10\nended\r\n"
    (site.layout.logs / "rank-0.log").write_text(f"{bar}last 7%\rlast 8%\r", newline="")
    _, frame = tab()
    expect(frame.locator("#logs pre")).to_have_text("3/10 ended last 8%")
    (site.layout.logs / "rank-1.log").write_text("")
    frame.locator("#logs select").select_option("1")
    expect(frame.locator("#logs pre")).to_have_text("")
    expect(frame.locator("#shown")).to_have_text("all 0 B")


def test_a_log_of_nothing_but_beginnings_of_lines_freezes_nobody(tab, site):
    (site.layout.logs / "rank-0.log").write_text("\r" * 2**20 + "\n", newline="")
    _, frame = tab()
    shown = frame.locator("#shown")
    for size in range(64, 577, 64):
        expect(shown).to_have_text(f"{size} KiB of 1 MiB", timeout=within(10_000))
        frame.get_by_role("button", name="Earlier lines").click()


def test_without_a_workspace_the_page_says_so(tab, site):
    site.workspace.rename(site.workspace.with_name("elsewhere"))
    try:
        _, frame = tab()
        expect(frame.locator("#empty")).to_contain_text("[ddl] workspace")
        _, frame = tab("")
        expect(frame.locator("#empty")).to_contain_text("[ddl] workspace")
    finally:
        site.workspace.with_name("elsewhere").rename(site.workspace)


def test_a_list_that_is_cut_says_so(tab, published, monkeypatch):
    from ddl_airflow.plugin import trainings

    monkeypatch.setattr(trainings, "_MOST", 3)
    _, frame = tab("")
    expect(frame.locator("#trainings tbody tr")).to_have_count(3)
    expect(frame.locator("#left-out")).to_contain_text("1 older")
    # Of one DAG all that fit are there.
    _, frame = tab("dag_id=mnist-tf1")
    expect(frame.locator("#trainings tbody tr")).to_have_count(3)
    expect(frame.locator("#left-out")).to_have_count(0)


def test_a_list_that_has_not_changed_is_not_sent_to_a_browser_again(tab, published):
    page, frame = tab("")
    rows = frame.locator("#trainings tbody tr")
    expect(rows.filter(has_text="★")).to_have_count(1)

    def told():
        with page.expect_response("**/ddl/trainings") as answer:
            look_again(page)
        return answer.value.json()["trainings"]

    until(lambda: told() == [], 20)
    for number in range(40):
        published.recorded(f"r{number}", state="failed", step="train")
    until(lambda: told() == [], 20)
    expect(rows).to_have_count(44)
    published.recorded("new", state="failed", step="train")
    assert 1 <= len(told()) < 20
    expect(rows).to_have_count(45)
    shutil.rmtree(published.run("mnist-tf1", "r7").root)
    assert len(told()) < 20
    expect(rows).to_have_count(44)


def test_a_training_whose_folder_is_gone_says_so(tab, site):
    site.tasks |= {"train": "running", "upload_results": None}
    _, frame = tab("dag_id=digits&run_id=cleaned")
    expect(frame.locator("#empty")).to_contain_text("No progress yet")
    site.tasks |= dict.fromkeys(site.tasks, "success")
    expect(frame.locator("#empty")).to_contain_text("Its folder is not in the workspace")
    site.tasks["train"] = "failed"
    (site.layout.state / "try-1").mkdir()
    _, frame = tab()
    expect(frame.locator("#empty")).to_have_text("It has reported no progress.")


@pytest.mark.parametrize(("first", "each"), [(10_000, 0.01), (0, 8e7), (0.5, 1e-5), (-1e-9, 1e-12)])
def test_the_numbers_beside_a_curve_differ_and_fit(tab, site, first, each):
    steps = range(101)
    site.progress(*({"t": 1.0 + n, "step": n, "loss": first + n * each} for n in steps))
    page, frame = tab()
    expect(frame.locator("figure canvas")).to_have_count(1)
    drawn = """() => {
        const said = [], context = CanvasRenderingContext2D.prototype, draw = context.fillText;
        context.fillText = function (text, ...at) {
            said.push(text);
            draw.call(this, text, ...at);
        };
        dispatchEvent(new Event("theme"));  // draws all anew
        return new Promise((done) => setTimeout(() => done(said), 500));
    }"""
    said = [text for text in page.frames[1].evaluate(drawn) if text]
    beside = [text for text in said if text not in {str(step) for step in steps}]
    assert len(beside) >= 3 and len(set(beside)) == len(beside), said
    assert max(map(len, beside)) <= 9, said


@pytest.mark.parametrize("first", [1, 2**53 - 2])
def test_steps_however_far_are_drawn(tab, site, first):
    """A script may count as it likes: with marks at parts of such a step a browser never ended."""
    for step in (first, 2**53 - 1, 2**53, 10**18):
        site.progress({"t": 1.0, "step": step, "loss": 0.5})
    _, frame = tab()
    expect(frame.locator("figure canvas")).to_have_count(1)
    expect(value_of(frame, "step")).to_have_text("9,007,199,254,740,991")


def test_a_dag_that_is_not_ours_has_one_line(tab):
    _, frame = tab("dag_id=others&run_id=run")
    expect(frame.locator("#none")).to_contain_text("This DAG has no training")
    expect(frame.locator("#tasks")).to_have_count(0)


def test_who_lost_the_right_reads_why_and_comes_back(tab, site):
    site.progress({"t": 1.0, "step": 1, "steps": 2, "loss": 1.0})
    site.refused = 403
    _, frame = tab()
    expect(frame.get_by_role("status")).to_contain_text("no right to read this")
    site.refused = 0
    expect(value_of(frame, "step")).to_have_text("1 / 2")
    expect(frame.get_by_text("no right to read this")).to_have_count(0)


def test_links_out_of_the_frame_lead_the_page_around_it(tab, site):
    page, frame = tab()
    frame.get_by_role("link", name="TensorBoard").click()
    expect(page.locator("h1")).to_have_text("outside")


@pytest.fixture
def published(site, tmp_path):
    """Two published trainings, of which the first is in production, and one that failed."""
    results = tmp_path / "results"
    store, place = open_store(results.as_uri()), {"uri": results.as_uri()}
    from ddl_airflow.operators.production import production_dag

    others = production_dag("s3://others", "my_s3", "of-others")
    site.production = [others, production_dag(results.as_uri())]
    for run in ("first", "second"):
        name = f"t-{run}/{'0' * 16}-{'1' * 8}"
        (results / name).mkdir(parents=True)
        (results / name / "_SUCCESS").write_text("{}")
        outcome = {"state": "published", "step": "upload_results", "results": place}
        layout = site.recorded(run, **outcome, publication=f"{results.as_uri()}/{name}")
        point(store, "mnist-tf1", PRODUCTION, name, {"loss": 1.0})
        if run == "second":
            record = json.loads((layout.kept / "record.json").read_bytes())
            record["result"]["metrics"]["test_accuracy"] = 0.75
            record["run"]["parameters"]["nodes"] = 7
            (layout.kept / "record.json").write_text(json.dumps(record))
    site.progress({"t": 1.0, "step": 1, "steps": 2, "loss": 1.0})
    site.fail("rank 1 on gpu02 raised ValueError at train.py:5: no.", 1)
    record = {"outcome": {"state": "failed", "step": "train"}, "run": {"run_id": "run"}}
    (site.layout.kept / "record.json").write_text(json.dumps(record))
    # Its task was killed without a word.
    site.recorded("lost", state="running", step="stage_data")
    site.runs.append({"dag_id": "mnist-tf1", "dag_run_id": "lost", "state": "failed"})
    return site


@pytest.mark.parametrize(("theme", "width"), [("light", 1200), ("dark", 1200), ("light", 390)])
def test_all_trainings_in_a_table(tab, published, theme, width):
    page, frame = tab("", theme, width)
    rows = frame.locator("#trainings tbody tr")
    expect(rows).to_have_count(4)
    expect(frame.locator("tr", has_text="lost")).to_contain_text("failed")
    expect(frame.locator("tr", has_text="digits")).to_contain_text("failed")
    expect(frame.locator("tr", has_text="second")).to_contain_text("★ in production")
    expect(frame.locator("tr", has_text="first")).not_to_contain_text("production")
    without_fault(page)
    shot(page, f"trainings-{theme}-{width}")
    frame.get_by_label("Metric").select_option("test_accuracy")
    frame.get_by_role("button", name="test_accuracy").click()
    expect(rows.locator("td.number:nth-of-type(3)")).to_have_text(
        ["0.9868", "0.9868", "0.7500", "–"]
    )
    frame.get_by_role("button", name="test_accuracy").click()
    expect(rows.locator("td.number:nth-of-type(3)")).to_have_text(
        ["0.7500", "0.9868", "0.9868", "–"]
    )
    frame.get_by_label("Filter").fill("valueerror")
    expect(rows).to_have_count(1)
    frame.get_by_label("Filter").fill("")
    frame.get_by_label("State").select_option("published")
    expect(rows).to_have_count(2)
    frame.get_by_label("in production").check()
    expect(rows).to_have_count(1)
    frame.get_by_label("in production").uncheck()
    for one in ("first", "second"):
        frame.get_by_label(f"Compare mnist-tf1/{one}").check()
    frame.get_by_role("link", name="Compare the two").click()
    expect(frame.locator("#charts canvas")).to_have_count(2)
    changed = frame.locator("#differences tr", has_text="run.parameters.nodes")
    expect(changed.locator("td")).to_have_text(["2", "7"])
    expect(frame.locator("#differences")).not_to_contain_text("fingerprint")
    without_fault(page)
    shot(page, f"compare-{theme}-{width}")
    frame.get_by_role("link", name="← Trainings").click()
    expect(rows).to_have_count(2)
    frame.get_by_label("State").select_option("any")
    expect(rows).to_have_count(4)
    published.tasks["train"] = "failed"
    frame.get_by_role("link", name=re.compile("digits")).click()
    expect(frame.locator("#failure")).to_contain_text("no.")


def test_what_was_killed_long_ago_does_not_run(tab, published):
    """Many have failed since, and many are open."""
    for name in ("open", "deleted"):
        published.recorded(name, state="running", step="train")
    # Of none of Airflow's runs.
    for name in ("at work", "killed"):
        mine = {"type": "by_hand", "state": "running", "step": "train", "at_work": True}
        by_hand = published.recorded(name, **mine)
    rank_record(by_hand, "try-1", 0, started=time.time() - 90_000)
    (by_hand.kept / "lineage" / "train.json").unlink()
    for path in (by_hand.kept / "record.json", by_hand.progress):
        os.utime(path, (NOV_2023, NOV_2023))

    def runs(name, state, number):
        named = {"dag_id": "mnist-tf1", "state": state}
        return [named | {"dag_run_id": f"{name}-{n}"} for n in range(number)]

    published.runs.append({"dag_id": "mnist-tf1", "dag_run_id": "open", "state": "running"})
    published.runs += [*runs("later", "failed", 100), *runs("waiting", "queued", 150)]
    page, frame = tab("")
    for name, state in {
        "lost": "ended",
        "deleted": "ended",
        "open": "running",
        "at work": "running",
        "killed": "no sign of life",
    }.items():
        row = frame.locator("tr", has=frame.get_by_text(name, exact=True))
        expect(row.locator(".state")).to_contain_text(state)
    expect(row).to_contain_text("since 14 Nov 2023, 22:13")
    without_fault(page)
    shot(page, "trainings-ended")
    frame.get_by_label("State").select_option("no sign of life")
    expect(frame.locator("#trainings tbody tr")).to_have_count(1)
    published.tasks = {}
    page.route("**/taskInstances?*", lambda route: route.fulfill(status=404, json={}))
    row.get_by_role("link", name=re.compile("^mnist")).click()
    expect(frame.locator("#tasks")).to_contain_text("no sign of life since 14/11/2023, 22:13:20")
    expect(frame.locator("#silent")).to_contain_text("goes on with it")
    expect(frame.locator("#tries li")).to_contain_text("say no more")
    expect(frame.get_by_text("at work")).to_have_count(0)
    without_fault(page)
    shot(page, "training-silent")


def test_what_is_not_known_of_two_is_not_said_to_be_the_same(tab, published):
    again = published.run("digits", "again")
    record = {"outcome": {"state": "running", "step": "train"}, "run": {"run_id": "again"}}
    (again.kept / "record.json").write_text(json.dumps(record))
    measured = {"metric": "accuracy", "value": 0.5, "source": "training"}
    for layout, formed in (
        (published.layout, {}),
        (again, {"accuracy": 0.75, "sample": "a.npz", "rows": 9}),
    ):
        write_part(layout, "train", {"result": {"metrics": {}, "measurements": [measured]}})
        write_part(layout, "transform", {"result": formed})
    _, frame = tab("")
    for one in ("run", "again"):
        frame.get_by_label(f"Compare digits/{one}").check()
    frame.get_by_role("link", name="Compare the two").click()
    expect(frame.get_by_role("status")).to_have_text("Nothing is known yet of what made A and B.")
    expect(frame.locator("body")).not_to_contain_text("are the same")
    values = frame.locator("#differences tr", has_text="accuracy").locator("td")
    expect(values).to_have_text(["0.5000 (training batches)", "0.7500 (sample a.npz, 9 rows)"])


def test_all_of_two_long_trainings_is_compared(tab, published, monkeypatch):
    """Whose progress does not come in one answer."""
    from ddl_airflow.plugin import curves

    monkeypatch.setattr(curves, "_MOST_BYTES", 8192)
    steps = range(1, 401)
    published.progress(*({"t": 1.0 + n, "step": 10 * n, "loss": 1.0 / n} for n in steps))
    assert published.layout.progress.stat().st_size > 2 * 8192
    _, frame = tab("")
    for one in ("digits/run", "mnist-tf1/first"):
        frame.get_by_label(f"Compare {one}").check()
    frame.get_by_role("link", name="Compare the two").click()
    loss = frame.locator("figure", has=frame.locator("h3", has_text=re.compile("^loss$")))
    loss.locator("summary").click()
    expect(loss.locator("tbody tr").last).to_contain_text(re.compile("^4,000"))


def test_a_comparison_of_what_never_ends_is_shown_and_asks_no_more(tab, published):
    """The server, or a proxy before it, always says that there is more."""
    page, frame = tab("")
    for one in ("digits/run", "mnist-tf1/first"):
        frame.get_by_label(f"Compare {one}").check()
    asked = []

    def answer(route):
        asked.append(time.monotonic())
        part = {"job": 0, "steps": [1, 2], "values": [0.5, 0.25], "gaps": []}
        told = {"curves": [{"name": "loss", "measured_on": "", "parts": [part]}], "again": False}
        route.fulfill(json=told | {"cursor": "0.0.0.2.0.7", "more": True})

    page.route("**/ddl/curves/digits/**", answer)
    frame.get_by_role("link", name="Compare the two").click()
    expect(frame.locator("figure", has=frame.locator("h3", has_text="loss"))).to_have_count(1)
    page.wait_for_timeout(500)
    assert len(asked) == 2
    assert asked[1] - asked[0] > 0.1  # others are served in between


def test_a_comparison_that_one_leaves_is_read_no_further(tab, published):
    """A long one costs the server much for as long as it is read."""
    page, frame = tab("")
    for one in ("digits/run", "mnist-tf1/first"):
        frame.get_by_label(f"Compare {one}").check()
    page.route("**/ddl/curves/digits/**", lambda route: None)  # it takes its time
    with page.expect_request("**/ddl/curves/digits/**"):
        frame.get_by_role("link", name="Compare the two").click()
    with page.expect_event("requestfailed", lambda request: "/curves/digits/" in request.url):
        frame.get_by_role("link", name="← Trainings").click()
    expect(frame.locator("#trainings tbody tr")).to_have_count(4)


@pytest.mark.parametrize("value", ["7", "null", '["x"]', '{"toString": 1, "valueOf": 2}'])
def test_a_record_that_says_nonsense_breaks_no_page(tab, published, value):
    for number, what in enumerate(("a section", "a field", "what is in a field")):
        layout = published.recorded(f"odd{number}", state="failed", step="train")
        write_nonsense(layout, what, value, run_id=f"odd{number}")
        rank_record(layout, "try-1", 0, started=1.0)
    page, frame = tab("")
    rows = frame.locator("#trainings tbody tr")
    expect(rows).to_have_count(7)
    for head in ("training", "state", "data", "started", "steps/s"):
        frame.get_by_role("button", name=head).click()
    frame.get_by_label("Filter").fill("odd")
    expect(rows).to_have_count(3)
    shot(page, f"nonsense-{value[:3]}")
    for number in range(3):
        rows.nth(number).get_by_role("link").first.click()
        expect(frame.locator("#tries li")).to_have_count(1)
        frame.get_by_role("link", name="Lineage", exact=True).click()
        expect(frame.locator("#node-title")).to_be_visible()
        frame.get_by_role("link", name="← Trainings").click()
    for number in (0, 1):
        frame.get_by_label(f"Compare mnist-tf1/odd{number}").check()
    frame.get_by_role("link", name="Compare the two").click()
    expect(frame.locator("#differences")).to_be_visible()


def test_a_metric_of_any_name_is_that_of_those_who_have_it(tab, published):
    layout = published.run("mnist-tf1", "second")
    record = json.loads((layout.kept / "record.json").read_bytes())
    record["result"]["metrics"] = {"constructor": 0.25}
    (layout.kept / "record.json").write_text(json.dumps(record))
    _, frame = tab("")
    frame.get_by_label("Metric").select_option("constructor")
    values = frame.locator("#trainings tbody td:nth-of-type(3)")
    expect(values.filter(has_text="0.2500")).to_have_count(1)
    expect(values.filter(has_text="–")).to_have_count(3)


def test_a_try_that_went_back_is_compared_by_its_own_numbers(tab, published):
    """Where points are left out, the try before it has others."""
    page, frame = tab("")
    for one in ("digits/run", "mnist-tf1/first"):
        frame.get_by_label(f"Compare {one}").check()
    first = {"job": 0, "steps": [0, 2, 5, 7, 9], "values": [1.0, 1.0, 90.0, 95.0, 99.0], "gaps": []}
    second = {"job": 1, "steps": [4, 6, 8, 10], "values": [1.0, 1.0, 1.0, 1.0], "gaps": []}
    curve = {"name": "loss", "measured_on": "", "parts": [first, second]}
    told = {"curves": [curve], "cursor": "", "more": False, "again": False}
    page.route("**/ddl/curves/**", lambda route: route.fulfill(json=told))
    frame.get_by_role("link", name="Compare the two").click()
    loss = frame.locator("figure", has=frame.locator("h3", has_text="loss"))
    loss.locator("summary").click()
    expect(loss.locator("tbody th")).to_have_text(["0", "2", "4", "6", "8", "10"])


def test_trainings_of_a_dag(tab, published):
    _, frame = tab("dag_id=digits&run_id={RUN_ID}")
    expect(frame.locator("#trainings tbody tr")).to_have_count(1)
    frame.get_by_role("link", name="see all").click()
    expect(frame.locator("#trainings tbody tr")).to_have_count(4)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_lineage_of_a_model(tab, published, theme):
    published.paused = theme == "dark"
    page, frame = tab("", theme)
    frame.locator("tr", has_text="second").get_by_role("link", name="Lineage").click()
    kinds = ["data", "code", "manifest", "run", "model", "pointer ★"]
    expect(frame.locator(".node > .source")).to_have_text(kinds)
    expect(frame.locator(".graph path")).to_have_count(5)
    expect(frame.get_by_role("group", name="Files of the model")).to_contain_text("model/")
    frame.get_by_role("button", name=re.compile("^data")).click()
    expect(frame.locator(".facts")).to_contain_text("sha256:9bd4b8e733c7")
    without_fault(page)
    shot(page, f"lineage-{theme}")
    frame.get_by_role("button", name="Go back to an earlier model …").click()
    frame.get_by_label("Why, for the history").fill("it is worse at night")
    without_fault(page)
    frame.get_by_role("dialog").get_by_role("button", name="Go back").click()
    told = frame.get_by_text("Asked for: run manual__1 of ddl-production.")
    expect(told).to_be_visible()
    assert ("that DAG is paused" in told.text_content()) == published.paused
    conf = {
        "model": "mnist-tf1",
        "action": "rollback",
        "to": None,  # the one before, whichever that is
        "instead_of": "t-second/0000000000000000-11111111",
        "reason": "it is worse at night",
    }
    assert published.sent == [("ddl-production", {"logical_date": None, "conf": conf})]


def test_a_promotion_says_what_served_when_it_was_decided(tab, published):
    _, frame = tab("")
    frame.locator("tr", has_text="first").get_by_role("link", name="Lineage").click()
    frame.get_by_role("button", name="Put this model into production …").click()
    frame.get_by_role("dialog").get_by_role("button", name="Put this model").click()
    expect(frame.get_by_text("Asked for: run manual__1 of ddl-production.")).to_be_visible()
    ((_, asked),) = published.sent
    conf = asked["conf"]
    assert (conf["action"], conf["to"]) == ("promote", "t-first/0000000000000000-11111111")
    assert conf["instead_of"] == "t-second/0000000000000000-11111111"


def test_what_one_decides_is_what_one_saw(tab, published, tmp_path):
    """Somebody else puts the model into production while the dialog is open: it is no way back."""
    page, frame = tab("")
    frame.locator("tr", has_text="first").get_by_role("link", name="Lineage").click()
    frame.get_by_role("button", name="Put this model into production …").click()
    pointer, serves = frame.locator(".node.pointer"), tmp_path / "results/mnist-tf1/production.json"
    expect(pointer).to_contain_text("to another model")
    one = f"t-first/{'0' * 16}-{'1' * 8}"
    said = json.loads(serves.read_text())
    serves.write_text(json.dumps(said | {"training_id": "t-first", "publication": one}))
    look_again(page)
    expect(pointer).not_to_contain_text("to another model")
    expect(frame.get_by_role("dialog").locator("h2")).to_have_text("Put this model into production")
    frame.get_by_label("Why, for the history").press("Enter")
    told = "Nothing was sent: what is in production has changed meanwhile."
    expect(frame.get_by_role("status").filter(has_text=told)).to_be_visible()
    assert published.sent == []
    without_fault(page)
    # What is offered now is what can be done now.
    expect(frame.get_by_role("button", name="Go back to an earlier model …")).to_be_visible()


def test_where_none_serves_the_promotion_says_so(tab, published, tmp_path):
    """Else the second of two who promote at once takes the first one's away."""
    (tmp_path / "results" / "mnist-tf1" / "production.json").unlink()
    page, frame = tab("")
    frame.locator("tr", has_text="first").get_by_role("link", name="Lineage").click()
    frame.get_by_role("button", name="Put this model into production …").click()
    page.route("**/dagRuns", busy_at(1))
    put = frame.get_by_role("dialog").get_by_role("button", name="Put this model")
    put.click()
    # In the dialog: what is behind it is not read out, and hardly seen.
    said = frame.get_by_role("dialog").get_by_role("alert")
    expect(said).to_contain_text("Airflow did not take it:")
    without_fault(page)
    put.click()
    expect(frame.get_by_text("Asked for: run manual__1 of ddl-production.")).to_be_visible()
    ((_, asked),) = published.sent
    assert asked["conf"]["instead_of"] == "nothing"


def test_a_model_that_waits_for_approval_gets_it(tab, published):
    published.tasks["approve"] = "awaiting_input"
    page, frame = tab("dag_id=mnist-tf1&run_id=first")
    expect(value_of(frame, "test_accuracy")).to_have_text("0.9868")
    expect(frame.locator("#lanes tbody tr")).to_have_count(2)
    without_fault(page)
    shot(page, "training-light")
    page.set_viewport_size({"width": 390, "height": 900})
    without_fault(page)
    assert page.frames[1].evaluate("document.documentElement.scrollWidth") <= 390
    shot(page, "training-light-390")
    frame.get_by_role("link", name="Lineage, with all digests").click()
    frame.get_by_role("button", name="Approve").click()
    expect(frame.get_by_text("Approve: said.")).to_be_visible()
    assert published.sent == [("approve", {"chosen_options": ["Approve"], "params_input": {}})]


@pytest.mark.parametrize(
    ("state", "why"),
    [("awaiting_input", "another model waits"), (None, "no longer waits for approval")],
)
def test_a_model_that_was_not_shown_gets_no_approval(tab, published, state, why):
    """Somebody clears the run while the page is open."""
    published.tasks["approve"] = "awaiting_input"
    page, frame = tab("dag_id=mnist-tf1&run_id=first")
    frame.get_by_role("link", name="Lineage, with all digests").click()
    approve = frame.get_by_role("button", name="Approve")
    expect(approve).to_be_visible()
    published.ids["approve"] = "of another try"
    published.tasks["approve"] = state
    approve.click()
    expect(frame.get_by_role("status").filter(has_text=why)).to_be_visible()
    expect(approve).to_have_count(1 if state else 0)
    assert published.sent == []
    without_fault(page)
    shot(page, f"approve-{state}")
    if state:
        # What is shown now is what waits.
        approve.click()
        expect(frame.get_by_text("Approve: said.")).to_be_visible()
        assert [task for task, _ in published.sent] == ["approve"]


def test_a_store_that_is_slow_is_asked_again(tab, published, monkeypatch):
    from ddl_airflow.plugin import graph

    def slowly(*place):
        time.sleep(2.5)
        return read(*place)

    read = graph._read
    monkeypatch.setattr(graph, "_read", slowly)
    page, frame = tab("dag_id=mnist-tf1&run_id=first")
    page.route("**/ddl/graph/**", busy_at(2))
    frame.get_by_role("link", name="Lineage, with all digests").click()
    expect(frame.get_by_text("the store has not answered yet")).to_be_visible()
    # Nor does one answer that fails take away what is there.
    expect(frame.get_by_role("alert")).to_contain_text("8 requests wait")
    expect(frame.locator(".node")).not_to_have_count(0)
    expect(frame.locator(".node.pointer")).to_contain_text("production")
    expect(frame.get_by_role("alert")).to_have_count(0)


def look_again(page):
    """What is asked every few seconds is asked now."""
    page.frames[1].evaluate(HIDE, False)


def test_what_comes_late_of_one_rank_is_not_shown_of_another(tab, site):
    for rank in (0, 1):
        (site.layout.logs / f"rank-{rank}.log").write_text(f"of rank {rank}\n")
    page, frame = tab()
    pre = frame.locator("#logs pre")
    expect(pre).to_have_text("of rank 0\n")
    held = []
    page.route("**/ddl/log-*/0/**", lambda route: held.append(route))
    with page.expect_request("**/ddl/log-lines/0/**"):
        frame.get_by_label("Search").fill("rank")
        frame.get_by_role("button", name="Find lines").click()
    with page.expect_request("**/ddl/log-part/0/**"):
        look_again(page)
    frame.locator("#logs select").select_option("1")
    expect(pre).to_have_text("of rank 1\n")
    lines, part = sorted(held, key=lambda route: route.request.url)
    found = [{"text": "late of rank 0", "end": 5}]
    lines.fulfill(json={"found": found, "more": 0, "searched": 5, "size": 5})
    part.fulfill(json={"text": "late of rank 0\n", "start": 0, "end": 15, "size": 15})
    page.wait_for_timeout(500)
    assert pre.text_content() == "of rank 1\n"
    expect(frame.locator(".found")).to_have_count(0)
    with (site.layout.logs / "rank-1.log").open("a") as file:
        file.write("more\n")
    expect(pre).to_have_text("of rank 1\nmore\n")


def test_earlier_lines_begin_where_what_is_shown_of_a_long_log_does(tab, site):
    """Of one that was followed for hours, whose beginning is no longer held."""
    (site.layout.logs / "rank-0.log").write_text("")
    parts = ["ü" * 63 + "\n"] * 2**15, ["ü" * 63 + "\n"] * 2**14
    first, more = ("".join(lines) for lines in parts)
    sizes = [len(text.encode()) for text in (first, more)]
    asked = []

    def answer(route):
        if "after=" not in (url := route.request.url):
            route.fulfill(json={"text": first, "start": 0, "end": sizes[0], "size": sizes[0]})
        elif url.endswith(f"after={sizes[0]}"):
            end = sum(sizes)
            route.fulfill(json={"text": more, "start": sizes[0], "end": end, "size": end})
        else:
            end = sum(sizes)
            route.fulfill(json={"text": "", "start": end, "end": end, "size": end})

    page, frame = tab("dag_id=others&run_id=run")
    page.route("**/ddl/log-part/0/**", answer)
    page.goto(page.url.replace("others", "digits"))
    expect(frame.locator("#shown")).to_contain_text("MiB of 6 MiB")
    page.on("request", lambda one: "before=" in one.url and asked.append(one.url))
    with page.expect_request("**before=*"):
        frame.get_by_role("button", name="Earlier lines").click()
    assert asked[0].endswith(f"before={sizes[1]}")  # so many bytes were dropped


def test_what_one_asks_of_a_log_in_vain_says_why(tab, site):
    lines = "".join(f"line {number}\n" for number in range(20_000))
    (site.layout.logs / "rank-0.log").write_text(lines)
    page, frame = tab()
    pre, status = frame.locator("#logs pre"), frame.locator("#logs").get_by_role("status")
    expect(pre).to_contain_text("line 19999")
    page.frames[1].evaluate("""() => {
        const later = window.setTimeout;
        const polls = (ms) => ms >= 1000; // the short ones are Preact's
        window.setTimeout = (work, ms) =>
            later(() => polls(ms) && window.asksNoMore || work(), ms);
    }""")
    search = frame.get_by_role("button", name="Find lines")
    frame.get_by_label("Search").fill("line 7777")
    search.click()
    expect(status).to_contain_text("1 lines")
    busy = {"status": 503, "json": {"detail": "8 requests wait"}}
    for place, button in (
        ("**/ddl/log-lines/**", search),
        ("**/ddl/log-part/**before=**", frame.get_by_role("button", name="Earlier lines")),
        ("**/ddl/log-part/**before=**", frame.locator(".found button")),
    ):
        page.route(place, lambda route: route.fulfill(**busy))
        button.click()
        expect(status).to_contain_text("8 requests wait")
        with page.expect_response("**/ddl/log-part/**after=**"):
            look_again(page)
        page.wait_for_timeout(300)
        expect(status).to_contain_text("8 requests wait")  # until one asks again
        page.unroute(place)
        search.click()
        expect(status).not_to_contain_text("8 requests wait")
    expect(pre).to_contain_text("line 19999")
    frame.locator(".found button").click()
    expect(pre).to_have_text(re.compile("line 7777\n$"))
    # Its end comes at once, and not when it would have been asked for again.
    page.frames[1].evaluate("window.asksNoMore = true")
    frame.get_by_role("button", name="Follow its end again").click()
    expect(pre).to_contain_text("line 19999")
    expect(frame.locator(".found button")).to_have_count(1)


def test_while_airflow_does_not_say_the_steps_the_last_ones_stay(tab, site):
    site.fail("gone", None, tried=1)
    page, frame = tab()
    steps = frame.locator("#tasks li")
    expect(steps.nth(2)).to_have_text("✓ train: success")
    expect(frame.locator(".progress")).to_have_text("100%")
    page.route(
        "**/taskInstances*", lambda route: route.fulfill(status=503, json={"detail": "busy"})
    )
    look_again(page)
    expect(frame.get_by_role("status").first).to_have_text("Cannot read the training: busy")
    expect(frame.locator("#failure")).to_have_count(0)
    expect(steps).to_have_count(7)
    expect(frame.locator(".progress")).to_have_text("100%")
    page.unroute("**/taskInstances*")
    look_again(page)
    expect(frame.get_by_role("status").first).to_have_text("")


def test_the_order_of_steps_is_asked_for_until_it_is_known(tab, site):
    site.tasks["approve"] = "awaiting_input"
    page, frame = tab("dag_id=others&run_id=run")
    page.route("**/api/v2/dags/digits/tasks", busy_at(1))
    page.goto(page.url.replace("others", "digits"))
    expect(frame.locator("#tasks li").first).to_have_text("○ approve: awaiting input")
    site.tasks["train"] = "running"
    look_again(page)
    expect(frame.locator("#tasks li").first).to_have_text("✓ before: success")


def test_a_dag_of_many_tasks_is_read_to_its_end(tab, site):
    """Airflow tells 50 at a time, and of more no more than 100."""
    site.others = 230
    _, frame = tab()
    expect(frame.locator("#tasks li")).to_have_count(237)
    expect(frame.locator("#none")).to_have_count(0)


@pytest.mark.parametrize("state", ["failed", "up_for_retry", "running"])
def test_a_rank_that_was_killed_is_at_work_no_more(tab, site, state):
    """With its worker, which then says nothing of the end either: Airflow finds out."""
    site.tasks["train"] = "running"
    site.progress(*({"t": 1.0 + n, "step": n, "steps": 100} for n in range(3)))
    rank_record(site.layout, "try-1", 0, started=100.0)
    usage = {"t": 110.0, "cores": 2.5, "cpu_s": 9.0, "memory": 2 << 30, "peak": 3 << 30}
    (site.layout.state / "try-1" / "rank-0.usage").write_text(json.dumps(usage))
    page, frame = tab()
    row = frame.locator("section", has_text="Where it runs").locator("tbody tr")
    expect(row).to_contain_text("2.52 GiB, at most 3 GiBat work")
    expect(frame.locator("#tries li")).to_contain_text("1 rank at work")
    expect(value_of(frame, "left")).to_have_text("98 s")
    # Of a scheduler's job nobody waits in a worker.
    for waits in ("deferred", "queued"):
        site.tasks["train"] = waits
        look_again(page)
        expect(frame.locator("#tasks")).to_contain_text(f"train: {waits}")
        expect(row).to_contain_text("at work")
    site.tasks["train"] = state
    site.tried += state == "running"
    look_again(page)
    expect(row).to_contain_text("EPYC––at most 3 GiBsaid no more")
    expect(frame.locator("#tries li")).to_contain_text("was ended, and its ranks said no more")
    expect(value_of(frame, "left")).to_have_count(0)
    shot(page, f"killed-{state}")
    site.fail("the job was ended.", None)
    look_again(page)
    expect(row).to_contain_text("0.9at most 3 GiBsaid no more")


def test_one_stretch_without_numbers_is_one(tab, site):
    """In however many answers it came; and it is none once there are numbers."""
    for rank_of in (1, 2):
        rank_record(site.layout, f"try-{rank_of}", 0, started=1000.0 * rank_of)
    steps = [{"t": 1000.0 + step, "step": step} for step in range(60)]
    site.progress(*(one | {"loss": 1.0} for one in steps[:20]))
    page, frame = tab()
    loss = frame.locator("figure", has=frame.locator("h3", has_text="loss"))
    lost = loss.locator("p.lost")
    for begin, end in ((20, 30), (30, 40), (40, 50)):
        site.progress(*(one | {"loss": "NaN"} for one in steps[begin:end]))
        look_again(page)
        expect(value_of(frame, "step")).to_have_text(str(end - 1))
        expect(lost).to_have_text(f"⚠ NaN from step 20 to {end - 1}")
    # The script goes on from its checkpoint in the same job.
    site.progress(*(one | {"t": 1100.0, "loss": 0.5} for one in steps[15:35]))
    look_again(page)
    expect(lost).to_have_text("⚠ NaN from step 35 to 49")
    site.progress(*(one | {"t": 1200.0, "loss": 0.5} for one in steps[35:]))
    look_again(page)
    expect(lost).to_have_count(0)


def test_what_a_later_try_made_good_is_no_gap_in_a_comparison(tab, published):
    for number, values in ((1, ["NaN"] * 20), (2, [0.5] * 15)):
        rank_record(published.layout, f"try-{number}", 0, started=1000.0 * number)
        published.progress(
            *(
                {"t": 1000.0 * number + step, "step": 10 + step, "loss": value}
                for step, value in enumerate(values)
            )
        )
    _, frame = tab("")
    for one in ("digits/run", "mnist-tf1/first"):
        frame.get_by_label(f"Compare {one}").check()
    frame.get_by_role("link", name="Compare the two").click()
    loss = frame.locator("figure", has=frame.locator("h3", has_text=re.compile("^loss$")))
    expect(loss.locator("p.lost")).to_have_text("⚠ NaN from step 25 to 29")


def test_two_that_differ_in_little_are_not_the_same(tab, published):
    for run, parameters in (
        ("first", {"nodes": 2, "rate": 0.123456, "names": ["a, b"]}),
        ("second", {"nodes": 2, "rate": 0.123457, "names": ["a", "b"]}),
    ):
        layout = published.run("mnist-tf1", run)
        record = json.loads((layout.kept / "record.json").read_bytes())
        record["run"]["parameters"] = parameters
        (layout.kept / "record.json").write_text(json.dumps(record))
    _, frame = tab("")
    for one in ("first", "second"):
        frame.get_by_label(f"Compare mnist-tf1/{one}").check()
    frame.get_by_role("link", name="Compare the two").click()
    rows = frame.locator("#differences tr", has_text="run.parameters")
    expect(rows.nth(1).locator("td")).to_have_text(["0.123456", "0.123457"])
    expect(rows.first.locator("td")).to_have_text(['["a, b"]', '["a","b"]'])
    expect(frame.locator("body")).not_to_contain_text("are the same")
    # Of their tables one is open at a time.
    for number in (0, 1, 0):
        table = frame.locator("figure").nth(number)
        table.locator("summary").click()
        expect(table.locator("tbody tr")).not_to_have_count(0)
        expect(frame.locator("figure details[open]")).to_have_count(1)


def test_whole_numbers_and_parameters_are_shown_as_they_are(tab, published):
    """JavaScript's numbers have 53 bits, and a metric is shown in four digits."""
    for run, seed in (("first", 2**53 + 1), ("second", 2**53)):
        layout = published.run("mnist-tf1", run)
        record = json.loads((layout.kept / "record.json").read_bytes())
        record["run"]["parameters"] = {"seed": seed, "rate": 0.000123456, "rows": 123456}
        told = {"metric": "seen", "value": seed, "source": "command"}
        rows = {"metric": "rows", "value": 60_001, "source": "command"}
        loss = {"metric": "loss", "value": 0.0440012, "source": "command"}
        record["result"]["metrics"] = {"seen": seed, "rows": 60_001, "loss": 0.0440012}
        for name in ("record.json", "lineage.json"):
            (layout.kept / name).write_text(json.dumps(record))
        write_part(layout, "evaluate", {"result": {"measurements": [told, rows, loss]}})
    page, frame = tab("")
    frame.get_by_label("Metric").select_option("seen")
    row = frame.locator("#trainings tr", has=frame.get_by_text("first", exact=True))
    expect(row.locator("td.number").first).to_have_text("9,007,199,254,740,993")
    for one in ("first", "second"):
        frame.get_by_label(f"Compare mnist-tf1/{one}").check()
    row.get_by_role("link", name=re.compile("^mnist")).click()
    expect(value_of(frame, "seen")).to_have_text("9,007,199,254,740,993")
    expect(value_of(frame, "rows")).to_have_text("60,001")
    expect(value_of(frame, "loss")).to_have_text("0.04400")
    made = frame.locator(".facts > div", has_text="parameters").locator("dd")
    expect(made).to_have_text("seed 9007199254740993, rate 0.000123456, rows 123456")
    shot(page, "whole-numbers")
    frame.get_by_role("link", name="Lineage, with all digests").click()
    facts = frame.locator(".facts > div")
    expect(facts.filter(has_text="seen")).to_have_text("seen9007199254740993")
    expect(facts.filter(has_text="loss")).to_have_text("loss0.04400")
    frame.get_by_role("link", name="← Trainings").click()
    frame.get_by_role("link", name="Compare the two").click()
    seeds = frame.locator("#differences tr", has_text="run.parameters.seed").locator("td")
    expect(seeds).to_have_text(["9007199254740993", "9007199254740992"])
    seen = frame.locator("#differences tr", has_text="seen").locator("td")
    expect(seen).to_have_text(["9,007,199,254,740,993", "9,007,199,254,740,992"])


def test_a_table_is_as_one_left_it(tab, published):
    page, frame = tab("dag_id=mnist-tf1&run_id={RUN_ID}")
    rows = frame.locator("#trainings tbody tr")
    expect(rows).to_have_count(3)
    frame.get_by_label("Filter").fill("mnist")
    frame.get_by_label("State").select_option("published")
    frame.get_by_role("button", name="training").click()
    frame.get_by_label("Compare mnist-tf1/first").check()
    frame.locator("tr", has_text="second").get_by_role("link", name=re.compile("^mnist")).click()
    expect(frame.locator("#tasks")).to_be_visible()
    frame.get_by_role("link", name="← Trainings").click()
    # And of the DAG in whose tab it is.
    expect(frame.locator("h1")).to_contain_text("of mnist-tf1")
    expect(rows).to_have_count(2)
    expect(frame.get_by_label("Filter")).to_have_value("mnist")
    expect(frame.get_by_role("columnheader", name="training")).to_have_attribute(
        "aria-sort", "descending"
    )
    expect(frame.get_by_label("Compare mnist-tf1/first")).to_be_checked()
    frame.get_by_role("link", name="see all").click()
    expect(rows).to_have_count(4)
    expect(frame.get_by_label("Filter")).to_have_value("")


def test_who_follows_links_by_the_keyboard_goes_on_behind_them(tab, published):
    """Also a training whose names are as long as they may be fits a narrow page."""
    run_id = f"manual__{'y' * 200}"
    published.recorded(run_id, state="failed", step="train")
    page, frame = tab("", width=390)
    frame.get_by_role("link", name=re.compile("yyy")).focus()
    page.keyboard.press("Enter")
    expect(frame.locator("main")).to_be_focused()
    frame.get_by_role("link", name="Lineage", exact=True).focus()
    page.keyboard.press("Enter")
    expect(frame.locator("main")).to_be_focused()
    expect(frame.locator("main")).to_have_attribute("aria-label", "Lineage")
    expect(frame.locator("#node-title")).to_contain_text(re.compile("mnist|yyy"))
    frame.get_by_role("button", name=re.compile("^run")).press("Enter")
    expect(frame.locator("#node-title")).to_contain_text("yyy")
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.frames[1].evaluate(wider) == 0
    without_fault(page)
    shot(page, "lineage-long-390")


def test_times_are_in_the_zone_that_was_chosen_in_airflow(tab, published):
    path = published.layout.checkpoints / "model-1.keras"
    path.write_bytes(b"x")
    os.utime(path, (1_700_000_000, 1_700_000_000))
    page, frame = tab()
    page.evaluate("""localStorage.setItem("timezone", '"Asia/Tokyo"')""")
    page.reload()
    written = frame.locator("tr", has_text="model-1.keras").locator("td").last
    expect(written).to_have_text("15/11/2023, 07:13:20")
    expect(written).to_have_attribute("title", "Asia/Tokyo")
    page, frame = tab("dag_id=mnist-tf1&run_id=first")
    page.evaluate("""localStorage.setItem("timezone", '"Asia/Tokyo"')""")
    page.reload()
    frame.get_by_role("link", name="Lineage, with all digests").click()
    frame.get_by_role("button", name=re.compile("^run")).click()
    started = frame.locator(".facts > div", has_text="started").locator("dd")
    expect(started).to_have_text(re.compile(r"^\d\d/\d\d/\d{4}, \d\d:\d\d:\d\d$"))
    page.evaluate("""localStorage.setItem("timezone", "nowhere")""")
    page.reload()
    expect(frame.locator("h1")).to_be_visible()


@pytest.mark.parametrize(
    ("moment", "seconds"),
    [
        ("+300000-01-01T00:00:00Z", 9.4e12),
        ("9999999-12-31", 1e300),
        ("nonsense", -1e300),
        ("0001-01-01T00:00:00Z", -5.0),
        (["soon"], "NaN"),
        (1e300, 8.64e12),
    ],
)
def test_a_time_that_is_none_ends_no_page(tab, published, moment, seconds):
    """Ranks write most of what says one, and their clocks, too, may say what they like."""
    layout = published.run("mnist-tf1", "first")
    record = json.loads((layout.kept / "record.json").read_bytes())
    record["run"]["started"] = moment
    record["result"]["goodput"] = {"held_s": seconds}
    for name in ("record.json", "lineage.json"):
        (layout.kept / name).write_text(json.dumps(record))
    for number in (1, 2):
        told = {"started": seconds, "ended": 1e300 / number, "exit_code": 0}
        rank_record(layout, f"try-{number}", 0, **told)
    spent = {"rank": 0, "run_s": seconds, "comm_s": seconds, "wait_s": seconds}
    layout.statistics.write_text(json.dumps({"ranks": [spent]}))
    lines = [{"t": t, "step": n, "steps": 2**53 - 1} for n, t in enumerate((0.0, 1e18))]
    layout.progress.write_text("".join(json.dumps(one) + "\n" for one in lines))
    page, frame = tab("dag_id=mnist-tf1&run_id={RUN_ID}")
    row = frame.locator("#trainings tr", has=frame.get_by_text("first", exact=True))
    expect(row.locator("td").last).to_have_text("–")
    expect(row.locator("td.number").nth(1)).to_have_text("–")
    row.get_by_role("link", name=re.compile("^mnist")).click()
    expect(frame.locator("#tries li")).to_have_count(2)
    expect(frame.locator("#tries li").last).not_to_have_text(re.compile(r"\d{5}|-\d"))
    shot(page, f"times-{seconds}")
    frame.get_by_role("link", name="Lineage, with all digests").click()
    frame.get_by_role("button", name=re.compile("^run")).click()
    started = frame.locator(".facts > div", has_text="started").locator("dd")
    expect(started).to_have_text(re.compile(r"\d{5}|soon|nonsense|0001-01-01|1e\+300"))


def test_a_lineage_that_does_not_come_at_first_comes_later(tab, published):
    page, frame = tab("dag_id=mnist-tf1&run_id=first")
    page.route("**/ddl/graph/**", busy_at(1))
    frame.get_by_role("link", name="Lineage, with all digests").click()
    expect(frame.get_by_role("alert")).to_contain_text("8 requests wait")
    expect(frame.locator(".node.pointer")).to_contain_text("production")
    expect(frame.get_by_role("alert")).to_have_count(0)


def test_a_lineage_follows_what_becomes_of_a_decision(tab, published, tmp_path):
    page, frame = tab("dag_id=mnist-tf1&run_id=second")
    frame.get_by_role("link", name="Lineage, with all digests").click()
    frame.get_by_role("button", name="Go back to an earlier model …").click()
    frame.get_by_role("dialog").get_by_role("button", name="Go back").click()
    expect(frame.get_by_text("Asked for: run manual__1")).to_be_visible()
    page.wait_for_timeout(6000)  # until Airflow has run it
    store = open_store((tmp_path / "results").as_uri())
    third = f"t-third/{'0' * 16}-{'1' * 8}"
    (tmp_path / "results" / third).mkdir(parents=True)
    (tmp_path / "results" / third / "_SUCCESS").write_text("{}")
    point(store, "mnist-tf1", PRODUCTION, third, {"loss": 1.0})
    expect(frame.locator(".node.pointer")).to_contain_text("to another model")
    expect(frame.get_by_role("button", name="Put this model into production")).to_be_visible()
    # And a model that is to be approved meanwhile can be.
    published.tasks["approve"] = "awaiting_input"
    look_again(page)
    frame.get_by_role("button", name="Approve").click()
    published.tasks["approve"] = "success"
    expect(frame.get_by_role("button", name="Approve")).to_have_count(0)
