from __future__ import annotations

import asyncio
import json

import pytest

# Airflow's own import of Starlette's test client warns of the client's name.
pytestmark = pytest.mark.filterwarnings("ignore:Using `httpx`")


@pytest.fixture
def read_progress():
    from ddl_airflow.plugin.api import read_progress

    return lambda path, offset: read_progress(path, path.parent, offset)


@pytest.fixture
def get():
    """get(path, token=) -> (status, text): asks the plugin's app where Airflow mounts it."""
    import httpx
    from fastapi import FastAPI

    from ddl_airflow.plugin.plugin import DdlPlugin

    site = FastAPI()
    for one in DdlPlugin.fastapi_apps:
        site.mount(one["url_prefix"], one["app"])

    async def ask(path, headers):
        transport = httpx.ASGITransport(app=site)
        async with httpx.AsyncClient(transport=transport, base_url="http://unit") as client:
            return await client.get(path, headers=headers)

    def call(path, token=""):
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = asyncio.run(ask(path, headers))
        return answer.status_code, answer.text

    return call


def line(step):
    return json.dumps({"t": float(step), "source": "ops", "step": step, "note": "ü"}) + "\n"


def test_nothing_yet(read_progress, tmp_path):
    assert read_progress(tmp_path / "progress.jsonl", 0) == {"lines": [], "offset": 0}
    assert read_progress(tmp_path / "progress.jsonl", 99) == {"lines": [], "offset": 0}


def test_each_answer_goes_on_where_the_last_one_ended(read_progress, tmp_path):
    path = tmp_path / "progress.jsonl"
    path.write_text(line(1) + line(2), "utf-8")
    first = read_progress(path, 0)
    assert [one["step"] for one in first["lines"]] == [1, 2]
    assert first["offset"] == path.stat().st_size
    assert read_progress(path, first["offset"]) == {"lines": [], "offset": first["offset"]}
    with path.open("a", encoding="utf-8") as file:
        file.write(line(3))
    second = read_progress(path, first["offset"])
    assert [one["step"] for one in second["lines"]] == [3]
    assert second["offset"] == path.stat().st_size


def test_a_line_that_is_still_being_written_waits(read_progress, tmp_path):
    path = tmp_path / "progress.jsonl"
    whole, cut = line(1).encode(), line(2).encode()
    for length in range(len(cut)):  # also within the two bytes of ü
        path.write_bytes(whole + cut[:length])
        assert read_progress(path, 0) == {
            "lines": [json.loads(whole)],
            "offset": len(whole),
        }
    path.write_bytes(whole + cut)
    assert read_progress(path, len(whole))["lines"] == [json.loads(cut)]


def test_a_long_file_comes_in_pieces(read_progress, tmp_path):
    path = tmp_path / "progress.jsonl"
    path.write_text("".join(line(n) for n in range(30_000)), "utf-8")
    assert path.stat().st_size > 1024 * 1024
    steps, offset, answers = [], 0, 0
    while True:
        answer = read_progress(path, offset)
        if not answer["lines"]:
            break
        steps += [one["step"] for one in answer["lines"]]
        offset, answers = answer["offset"], answers + 1
    assert steps == list(range(30_000))
    assert answers == path.stat().st_size // (1024 * 1024) + 1


@pytest.mark.parametrize("value", ["NaN", "Infinity", '"NaN"'])
def test_answer_is_json_whatever_a_script_wrote(read_progress, tmp_path, value):
    path = tmp_path / "progress.jsonl"
    path.write_text(f'{{"t": 1.0, "source": "script", "step": 1, "loss": {value}}}\n' + line(2))
    answer = read_progress(path, 0)
    assert [one["step"] for one in answer["lines"]] == [1, 2]
    assert answer["lines"][0]["loss"] == value.strip('"')
    json.dumps(answer, allow_nan=False)  # as the web framework does


def test_a_line_that_is_no_json_does_not_hide_the_others(read_progress, tmp_path):
    path = tmp_path / "progress.jsonl"
    path.write_text(line(1) + "not json\n" + line(2), "utf-8")
    assert [one["step"] for one in read_progress(path, 0)["lines"]] == [1, 2]


@pytest.mark.parametrize(
    "odd", ['{"note": "\\ud800"}', "[" * 100_000, '{"step": ' + "1" * 4000 + "}", "x" * 3_000_000]
)
def test_no_line_stops_the_answers_or_makes_one_that_cannot_be_sent(read_progress, tmp_path, odd):
    path = tmp_path / "progress.jsonl"
    path.write_text(f"{line(1)}{odd}\n{line(2)}", "utf-8")
    steps, offset = [], 0
    for _ in range(6):
        answer = read_progress(path, offset)
        json.dumps(answer, ensure_ascii=False).encode()  # as the web framework does
        steps += [one["step"] for one in answer["lines"]]
        offset = answer["offset"]
    assert (steps, offset) == ([1, 2], path.stat().st_size)


def test_ranks_with_logs_in_order(tmp_path):
    from ddl_airflow.plugin.api import ranks_with_logs

    assert ranks_with_logs(tmp_path / "none") == []
    for name in ("rank-10.log", "rank-2.log", "rank-x.log", "launcher.log", "rank-1.txt"):
        (tmp_path / name).touch()
    for name in ("rank-².log", "rank-٣.log", f"rank-{'9' * 200}.log"):
        (tmp_path / name).touch()
    assert ranks_with_logs(tmp_path) == [2, 10]


def test_a_link_is_no_log(tmp_path):
    from ddl_airflow.plugin.api import rank_log

    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-0.log").write_text("said")
    (tmp_path / "secret").write_text("not the script's")
    (logs / "rank-1.log").symlink_to(tmp_path / "secret")
    (tmp_path / "other").symlink_to(logs)
    with rank_log(logs, tmp_path, 0) as file:
        assert file.read() == b"said"
    assert rank_log(logs, tmp_path, 1) is rank_log(logs, tmp_path, 2) is None
    assert rank_log(tmp_path / "other", tmp_path, 0) is None


@pytest.mark.parametrize("planted", ["progress.jsonl", "ddl", ".", "logs"])
def test_what_a_training_links_to_is_not_served(get, workspace, monkeypatch, planted):
    """Another's files, in place of the run's progress, its folders, or all of it."""
    import shutil

    from ddl_airflow.core.layout import RunLayout
    from ddl_airflow.plugin import api
    from ddl_airflow.site import training_of

    monkeypatch.setattr(api, "readers_of_task_logs", lambda: lambda: None)
    other = RunLayout(workspace, "other", training_of("other", "run"))
    mine = RunLayout(workspace, "mine", training_of("mine", "run"))
    for layout in (other, mine):
        layout.create()
        layout.progress.write_text('{"step": 1, "secret": "of other"}\n')
        (layout.logs / "rank-0.log").write_text("secret of other")
    place = {"progress.jsonl": "ddl/progress.jsonl"}.get(planted, planted)
    path = mine.root / place
    path.unlink() if path.is_file() else shutil.rmtree(path)
    path.symlink_to(other.root / place)
    served = [text for one in ("progress", "log/0") for text in get_of(api, f"/{one}/mine/run")]
    hidden = {"progress.jsonl": 1, "ddl": 1, "logs": 1, ".": 2}[planted]
    assert sum("of other" in text for text in served) == 2 - hidden


def get_of(api, path):
    """The answer of the plugin's app by itself, to whoever asks."""
    from fastapi.testclient import TestClient

    yield TestClient(api.app()).get(path).text


def test_the_page_is_there(get):
    status, text = get("/ddl/training?dag_id=a&run_id=b")
    assert status == 200
    assert "<html" in text.lower()
    assert 'id="tensorboard" hidden' in text  # until the site says where it is


@pytest.mark.parametrize(
    "path",
    [
        "/ddl/progress/mnist/run",
        "/ddl/progress/mnist/a/b",
        "/ddl/progress/%2e%2e/x",
        "/ddl/log/0/mnist/run",
        "/ddl/log-part/0/mnist/run",
        "/ddl/log/0/%2e%2e/x",
    ],
)
def test_progress_and_logs_are_refused_without_a_login(get, path):
    status, text = get(path)
    assert status in (401, 403), text
    assert "lines" not in text


def test_a_browser_runs_the_pages_own_script_only(workspace):
    from fastapi.testclient import TestClient

    from ddl_airflow.plugin import api

    client = TestClient(api.app())
    for path in ("/training", "/log/0/a/b", "/none"):
        headers = client.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'sha256-" in policy
    page = client.get("/training").text
    assert page.count("<script") == 1 and "onclick" not in page
    assert client.get("/openapi.json").status_code == 404


def test_there_is_no_other_route(get):
    for path in ("/ddl/docs", "/ddl/redoc", "/ddl/", "/ddl/progress"):
        assert get(path)[0] == 404


def test_a_progress_file_that_was_begun_again_is_read_from_its_start(read_progress, tmp_path):
    path = tmp_path / "progress.jsonl"
    path.write_text(line(1) + line(2))
    offset = read_progress(path, 0)["offset"]
    path.write_text(line(7))
    answer = read_progress(path, offset)
    assert ([one["step"] for one in answer["lines"]], answer["offset"]) == ([7], len(line(7)))


def test_what_each_metric_was_measured_on():
    from ddl_airflow.plugin.api import sources_in

    lines = [
        {"t": 1.0, "source": "keras", "step": 1, "loss": 0.5, "val_loss": "NaN"},
        {"t": 2.0, "source": "script", "epoch": 1, "loss": 0.25},
    ]
    assert sources_in(lines) == {"loss": "the script", "val_loss": "validation data"}


@pytest.fixture
def mine(workspace, monkeypatch):
    """A run's layout, and get(path) -> the JSON that the plugin's app answers whoever asks."""
    from fastapi.testclient import TestClient

    from ddl_airflow.core.layout import RunLayout
    from ddl_airflow.plugin import api
    from ddl_airflow.site import training_of

    monkeypatch.setattr(api, "readers_of_task_logs", lambda: lambda: None)
    layout = RunLayout(workspace, "mine", training_of("mine", "run"))
    layout.create()
    client = TestClient(api.app())
    return layout, lambda path: client.get(path).json()


def test_measurements_are_those_of_the_steps_that_have_ended(mine):
    from ddl_airflow.lineage.record import drop_parts, write_part

    layout, get = mine
    assert get("/progress/mine/run")["measurements"] == []
    loss = {"metric": "loss", "value": "NaN", "source": "training"}
    write_part(layout, "train", {"result": {"metrics": {}, "measurements": [loss]}})
    write_part(layout, "transform", {"result": {"accuracy": 0.5, "sample": "x.npz", "rows": 8}})
    loss["measured_on"] = "training batches"
    accuracy = {"metric": "accuracy", "value": 0.5, "source": "sample", "file": "x.npz", "rows": 8}
    accuracy["measured_on"] = "sample x.npz, 8 rows"
    assert get("/progress/mine/run")["measurements"] == [loss, accuracy]
    own = {"metric": "accuracy", "value": 0.75, "source": "command"}
    write_part(layout, "evaluate", {"result": {"measurements": [own]}})
    own["measured_on"] = "evaluation.command"
    assert get("/progress/mine/run")["measurements"] == [own]
    write_part(layout, "evaluate", {"result": {"measurements": [{"metric": 1}]}})
    assert get("/progress/mine/run")["measurements"] == []
    drop_parts(layout, "train")
    assert get("/progress/mine/run")["measurements"] == []


FAILED = {"step": "train", "try": 2, "error": "JobFailed", "message": "rank 1 …", "rank": 1}


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (FAILED, FAILED),
        (FAILED | {"rank": None, "more": 1}, FAILED | {"rank": None}),
        (FAILED | {"message": "x" * 20_000}, FAILED | {"message": "x" * 10_000}),
        (FAILED | {"rank": "1"}, None),
        (FAILED | {"try": True}, None),
        (FAILED | {"message": ["x"]}, None),
        ({"step": "train"}, None),
        ([FAILED], None),
    ],
)
def test_the_failure_is_what_the_failed_step_wrote(mine, said, shown):
    layout, get = mine
    assert get("/progress/mine/run")["failure"] is None
    (layout.kept / "failure.json").write_text(json.dumps(said))
    assert get("/progress/mine/run")["failure"] == shown


def test_a_failure_behind_a_link_is_none(mine, tmp_path):
    layout, get = mine
    (tmp_path / "secret").write_text(json.dumps(FAILED))
    (layout.kept / "failure.json").symlink_to(tmp_path / "secret")
    assert get("/progress/mine/run")["failure"] is None


def test_a_log_comes_from_its_end_in_pieces_that_fit_together(mine):
    layout, get = mine
    lines = [f"line {number} über\n" for number in range(20_000)]
    whole = "".join(lines).encode()
    (layout.logs / "rank-3.log").write_bytes(whole)
    ask = "/log-part/3/mine/run"
    last = get(ask)
    assert (last["end"], last["size"]) == (len(whole), len(whole))
    assert len(whole) - last["start"] <= 64 * 1024 and last["text"].startswith("line ")
    text, start = last["text"], last["start"]
    while start:
        part = get(f"{ask}?before={start}")
        assert part["end"] == start
        text, start = part["text"] + text, part["start"]
    assert text.encode() == whole
    # What is added meanwhile, also half a character.
    with (layout.logs / "rank-3.log").open("ab") as file:
        file.write("new ü".encode()[:-1])
        file.flush()
        part = get(f"{ask}?after={len(whole)}")
        assert (part["text"], part["end"]) == ("new ", len(whole) + 4)
        file.write("ü\n".encode()[1:])
    assert get(f"{ask}?after={part['end']}")["text"] == "ü\n"
    assert get(f"{ask}?after={10**30}")["start"] > 0
    assert get(f"{ask}?before=-5")["text"] == ""


def test_a_log_without_lines_comes_all_the_same(mine):
    layout, get = mine
    (layout.logs / "rank-0.log").write_text("x" * 200_000)
    part = get("/log-part/0/mine/run")
    assert (len(part["text"]), part["end"]) == (64 * 1024, 200_000)
    assert get("/log-part/7/mine/run") == {"detail": "rank 7 has no log"}
