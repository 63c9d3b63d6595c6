from __future__ import annotations

import asyncio
import json
import re

import pytest

from tests.limits import within


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


def test_ranks_with_logs_in_order(tmp_path):
    from ddl_airflow.plugin.logs import ranks_with_logs

    assert ranks_with_logs(tmp_path / "none") == []
    for name in ("rank-10.log", "rank-2.log", "rank-x.log", "launcher.log", "rank-1.txt"):
        (tmp_path / name).touch()
    for name in ("rank-².log", "rank-٣.log", f"rank-{'9' * 200}.log"):
        (tmp_path / name).touch()
    assert ranks_with_logs(tmp_path) == [2, 10]


def test_a_link_is_no_log(tmp_path):
    from ddl_airflow.plugin.logs import rank_log

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

    let_in(monkeypatch, api)
    other = RunLayout(workspace, "other", training_of("other", "run"))
    mine = RunLayout(workspace, "mine", training_of("mine", "run"))
    for layout in (other, mine):
        layout.create()
        layout.progress.write_text('{"step": 1, "of other": 1}\n')
        (layout.logs / "rank-0.log").write_text("secret of other")
    place = {"progress.jsonl": "ddl/progress.jsonl"}.get(planted, planted)
    path = mine.root / place
    path.unlink() if path.is_file() else shutil.rmtree(path)
    path.symlink_to(other.root / place)
    served = [text for one in ("curves", "log/0") for text in get_of(api, f"/{one}/mine/run")]
    hidden = {"progress.jsonl": 1, "ddl": 1, "logs": 1, ".": 2}[planted]
    assert sum("of other" in text for text in served) == 2 - hidden


def let_in(monkeypatch, api, dags=None):
    """Whoever asks may read those DAGs, by default all."""
    monkeypatch.setattr(api, "readers_of_task_logs", lambda: lambda: None)
    among = lambda: lambda: lambda asked: {one for one in asked if dags is None or one in dags}  # noqa: E731
    monkeypatch.setattr(api, "readers_among_dags", among)
    monkeypatch.setattr(api, "rights_over_dag", lambda: lambda: {"trigger": True, "approve": True})


def get_of(api, path):
    """The answer of the plugin's app by itself, to whoever asks."""
    from fastapi.testclient import TestClient

    yield TestClient(api.app()).get(path).text


def test_the_page_is_there(get):
    status, text = get("/ddl/training?dag_id=a&run_id=b")
    assert status == 200
    assert "<html" in text.lower()


@pytest.mark.parametrize(
    "path",
    [
        "/ddl/trainings",
        "/ddl/rights/mnist",
        "/ddl/about/mnist/run",
        "/ddl/about/mnist/a/b",
        "/ddl/about/%2e%2e/x",
        "/ddl/curves/mnist/run",
        "/ddl/graph/mnist/run",
        "/ddl/log-lines/0/mnist/run?words=x",
        "/ddl/log/0/mnist/run",
        "/ddl/log-part/0/mnist/run",
        "/ddl/log/0/%2e%2e/x",
    ],
)
def test_what_is_of_trainings_is_refused_without_a_login(get, path):
    status, text = get(path)
    assert status in (401, 403), text
    assert set(json.loads(text)) == {"detail"}


def test_who_may_not_read_a_dags_logs_sees_nothing_of_it(workspace, monkeypatch):
    """With Airflow's own checks, and somebody who may read one of two DAGs."""
    from airflow.api_fastapi import app as airflows
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.api_fastapi.core_api import security
    from airflow.models import DagModel
    from fastapi.testclient import TestClient

    from ddl_airflow.core.layout import RunLayout
    from ddl_airflow.lineage.record import fix_run
    from ddl_airflow.plugin import api
    from ddl_airflow.site import training_of

    class Manager:
        def is_authorized_dag(self, *, method, user, access_entity, details):
            assert user == "a reader"
            if access_entity is DagAccessEntity.TASK_LOGS:
                return method == "GET" and details.id == "mine"
            return access_entity is DagAccessEntity.RUN and details.id == "mine"

    for place in (airflows, security):
        monkeypatch.setattr(place, "get_auth_manager", Manager)
    # Of a database, which is not there.
    monkeypatch.setattr(DagModel, "get_team_name", lambda dag_id: None)
    monkeypatch.setattr(DagModel, "get_dag_id_to_team_name_mapping", lambda dag_ids: {})
    for dag_id in ("mine", "others"):
        layout = RunLayout(workspace, dag_id, training_of(dag_id, "run"))
        layout.create()
        fix_run(layout, "run", {}, {})
        (layout.logs / "rank-0.log").write_text("said")
    app = api.app()
    app.dependency_overrides[security.get_user] = lambda: "a reader"
    client = TestClient(app)
    paths = ("about/{}/run", "curves/{}/run", "graph/{}/run", "log/0/{}/run", "log-part/0/{}/run")
    for path in (*paths, "log-lines/0/{}/run?words=s"):
        assert client.get("/" + path.format("mine")).status_code == 200
        refused = client.get("/" + path.format("others"))
        assert (refused.status_code, refused.json()) == (403, {"detail": "Forbidden"})
    lines = client.get("/trainings").json()["trainings"]
    assert [line["dag_id"] for line in lines] == ["mine"]
    assert client.get("/rights/mine").json() == {"trigger": True, "approve": False}
    assert client.get("/rights/others").json() == {"trigger": False, "approve": False}


@pytest.mark.parametrize("teams", [True, False])
def test_with_teams_a_dag_that_is_deleted_is_nobodys(
    workspace, monkeypatch, airflow_database, teams
):
    """With Airflow's own checks over its database: of no DAG it takes no team for any team."""
    from airflow.api_fastapi import app as airflows
    from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from airflow.api_fastapi.core_api import security
    from airflow.models import DagModel
    from airflow.models.dag import clear_team_name_cache
    from airflow.models.dagbundle import DagBundleModel
    from airflow.models.team import Team
    from fastapi.testclient import TestClient
    from sqlalchemy import delete

    from ddl_airflow.core.layout import RunLayout
    from ddl_airflow.lineage.record import fix_run
    from ddl_airflow.plugin import api
    from ddl_airflow.site import training_of

    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", str(teams))
    monkeypatch.setenv("AIRFLOW__API__SECRET_KEY", "of this site")
    for place in (airflows, security):
        monkeypatch.setattr(place, "get_auth_manager", SimpleAuthManager)
    layout = RunLayout(workspace, "secret", training_of("secret", "run"))
    layout.create()
    fix_run(layout, "run", {}, {})
    (layout.logs / "rank-0.log").write_text("team a's words")
    with airflow_database() as session:
        bundle = DagBundleModel(name="of-a")
        bundle.teams = [Team(name="a")] if teams else []
        session.add_all([bundle, Team(name="b")])
        session.flush()
        session.add(DagModel(dag_id="secret", bundle_name="of-a", fileloc="x"))
    monkeypatch.setattr(api.TensorBoards, "start", lambda *_: None)
    app = api.app()
    client = TestClient(app)
    paths = ("about/{}", "curves/{}", "graph/{}", "log/0/{}", "log-part/0/{}", "tensorboard-of/{}")

    def shown_to(team):
        user = SimpleAuthManagerUser(username=f"of {team}", role="user", teams=[team])
        app.dependency_overrides[security.get_user] = lambda: user
        said = set()
        for path in (*paths, "log-lines/0/{}?words=s"):
            ask = client.post if path.startswith("tensorboard") else client.get
            said.add(ask("/" + path.format("secret/run")).status_code)
        listed = [line["dag_id"] for line in client.get("/trainings").json()["trainings"]]
        return said, listed, client.get("/rights/secret").json()["trigger"]

    assert shown_to("a") == ({200}, ["secret"], True)
    if teams:
        assert shown_to("b") == ({403}, [], False)
    with airflow_database() as session:
        session.execute(delete(DagModel))
    clear_team_name_cache()  # after half a minute
    for team in ("a", "b"):
        assert shown_to(team) == (({404}, [], False) if teams else ({200}, ["secret"], True))


def test_a_browser_runs_the_pages_own_script_only(workspace):
    from fastapi.testclient import TestClient

    from ddl_airflow.plugin import api

    client = TestClient(api.app())
    for path in ("/training", "/assets/page.js", "/log/0/a/b", "/none"):
        headers = client.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy and "*" not in policy
    page = client.get("/training").text
    assert re.findall(r"<script[^>]*>(.*?)</script>", page, re.S) == [""]
    assert "<style" not in page and " on" not in re.sub("<[^ >]*", "<", page).partition("<body")[2]
    for path in re.findall(r'(?:src|href)="\./([^"]+)"', page):
        assert client.get(f"/{path}").status_code == 200, path
    assert "://" not in page
    assert client.get("/assets/../api.py").status_code == 404
    assert client.get("/openapi.json").status_code == 404


def test_there_is_no_other_route(get):
    for path in ("/ddl/docs", "/ddl/redoc", "/ddl/", "/ddl/curves", "/ddl/progress/a/b"):
        assert get(path)[0] == 404


@pytest.fixture
def mine(workspace, monkeypatch):
    """A run's layout, and get(path) -> the JSON that the plugin's app answers whoever asks."""
    from fastapi.testclient import TestClient

    from ddl_airflow.core.layout import RunLayout
    from ddl_airflow.plugin import api
    from ddl_airflow.site import training_of

    let_in(monkeypatch, api)
    layout = RunLayout(workspace, "mine", training_of("mine", "run"))
    layout.create()
    client = TestClient(api.app())
    return layout, lambda path: client.get(path).json()


def test_measurements_are_those_of_the_steps_that_have_ended(mine):
    from ddl_airflow.lineage.record import drop_parts, write_part

    layout, get = mine
    assert get("/about/mine/run")["measurements"] == []
    loss = {"metric": "loss", "value": "NaN", "source": "training"}
    write_part(layout, "train", {"result": {"metrics": {}, "measurements": [loss]}})
    write_part(layout, "transform", {"result": {"accuracy": 0.5, "sample": "x.npz", "rows": 8}})
    loss["measured_on"] = "training batches"
    accuracy = {"metric": "accuracy", "value": 0.5, "source": "sample", "file": "x.npz", "rows": 8}
    accuracy["measured_on"] = "sample x.npz, 8 rows"
    assert get("/about/mine/run")["measurements"] == [loss, accuracy]
    own = {"metric": "accuracy", "value": 0.75, "source": "command"}
    write_part(layout, "evaluate", {"result": {"measurements": [own]}})
    own["measured_on"] = "evaluation.command"
    assert get("/about/mine/run")["measurements"] == [own]
    for odd in ({"metric": 1}, {"metric": "loss", "value": 10**400}):
        write_part(layout, "evaluate", {"result": {"measurements": [odd]}})
        assert get("/about/mine/run")["measurements"] == []
    drop_parts(layout, "train")
    assert get("/about/mine/run")["measurements"] == []


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
    assert get("/about/mine/run")["failure"] is None
    (layout.kept / "failure.json").write_text(json.dumps(said))
    failure = get("/about/mine/run")["failure"]
    assert (failure and {name: failure[name] for name in shown}) == shown


def test_a_failure_behind_a_link_is_none(mine, tmp_path):
    layout, get = mine
    (tmp_path / "secret").write_text(json.dumps(FAILED))
    (layout.kept / "failure.json").symlink_to(tmp_path / "secret")
    assert get("/about/mine/run")["failure"] is None


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


def test_lines_of_a_log_are_found_by_their_words(mine):
    layout, get = mine
    lines = [f"line {number} über\n" for number in range(20_000)]
    (layout.logs / "rank-3.log").write_text("".join([*lines, "Epoch Lost", "x" * 200_000]))
    said = get("/log-lines/3/mine/run?words=ÜBER")
    assert len(said["found"]) == 200 and said["more"] == 19_800
    last = said["found"][-1]
    assert last["text"] == "line 19999 über"
    part = get(f"/log-part/3/mine/run?before={last['end']}")
    assert part["text"].endswith("line 19999 über\n")
    (lost,) = get("/log-lines/3/mine/run?words=epoch+lost")["found"]
    assert lost["text"].startswith("Epoch Lostxxx") and len(lost["text"]) == 1000
    assert get("/log-lines/3/mine/run?words=nowhere")["found"] == []
    for words in ("", "x" * 201):
        assert "characters" in get(f"/log-lines/3/mine/run?words={words}")["detail"]


def test_lines_are_found_through_their_colours(mine):
    layout, get = mine
    (layout.logs / "rank-0.log").write_text("none\n\x1b[1m1/10\x1b[0m \x1b[32mloss\x1b[0m: 0.5\n")
    (line,) = get("/log-lines/0/mine/run?words=1/10+loss:")["found"]
    assert line["text"] == "1/10 loss: 0.5"
    assert line["end"] == (layout.logs / "rank-0.log").stat().st_size
    assert get("/log-lines/0/mine/run?words=[32m")["found"] == []


@pytest.mark.parametrize("at_once", [1, 7, 1 << 20])
def test_lines_are_found_wherever_a_log_is_cut(tmp_path, monkeypatch, at_once):
    from ddl_airflow.plugin import logs

    monkeypatch.setattr(logs, "_AT_ONCE", at_once)
    text = "\n\nnone\nSTRASSE 1\n\n" + "x" * 30 + "Straße 2\nstra\nsse\n" + "Straße 3"
    (tmp_path / "rank-0.log").write_text(text)
    with logs.rank_log(tmp_path, tmp_path, 0) as file:
        said = logs.lines_with(file, "straße")
    assert [line["text"] for line in said["found"]] == [
        "STRASSE 1",
        "x" * 30 + "Straße 2",
        "Straße 3",
    ]
    whole = text.encode()
    ends = [whole.index(b"1\n") + 2, whole.index(b"2\n") + 2, len(whole)]
    assert [line["end"] for line in said["found"]] == ends
    assert (said["more"], said["searched"], said["size"]) == (0, len(whole), len(whole))


def test_a_log_of_empty_lines_is_not_read_line_by_line(tmp_path, monkeypatch):
    from ddl_airflow.plugin import logs

    monkeypatch.setattr(logs, "_MOST_LINES", 1000)
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"here\n" + b"\n" * 3_000_000)
    with path.open("rb") as file:
        said = logs.lines_with(file, "HERE")
    assert said == {
        "found": [{"text": "here", "end": 5}],
        **{"more": 0, "searched": 3_000_005, "size": 3_000_005},
    }


def test_lines_without_the_words_are_not_looked_at(tmp_path, monkeypatch):
    from ddl_airflow.plugin import logs

    shown, looked = logs._shown, []
    monkeypatch.setattr(logs, "_shown", lambda piece: looked.append(piece) or shown(piece))
    path = tmp_path / "rank-0.log"
    path.write_text("".join(f"line {number}\n" for number in range(20_000)))
    with path.open("rb") as file:
        said = logs.lines_with(file, "LINE 19")
        # No line has two lines in it.
        assert logs.lines_with(file, "9\nline")["found"] == []
    assert len(said["found"]) + said["more"] == 1111
    assert len(looked) < 250


def test_of_very_many_lines_with_the_words_the_newest_are_looked_at(tmp_path):
    """A search is over in a second, and says how far it came."""
    from ddl_airflow.plugin import logs

    path = tmp_path / "rank-0.log"
    path.write_bytes(b"here\n" * 2_000_000)
    with path.open("rb") as file:
        said = logs.lines_with(file, "here")
    assert [line["end"] for line in said["found"]] == [
        10_000_000 - 5 * n for n in reversed(range(200))
    ]
    # Each line of what was searched, and no more than a MiB beyond the limit.
    assert 5 * (200 + said["more"]) == said["searched"]
    assert 1_000_000 <= 200 + said["more"] < 1_300_000 and said["size"] == 10_000_000


def test_a_workspace_that_hangs_takes_some_threads_only(workspace, monkeypatch):
    """Of the 40 in which the api-server answers for Airflow as well."""
    import threading

    import httpx
    from fastapi import FastAPI

    from ddl_airflow.plugin import api, bounded

    let_in(monkeypatch, api)
    hangs, inside = threading.Event(), []

    def hang():
        inside.append(threading.get_ident())
        hangs.wait()
        return workspace

    monkeypatch.setattr(api, "workspace", hang)
    monkeypatch.setattr(bounded, "_PATIENCE_S", 0.5)
    site = FastAPI()
    site.mount("/ddl", api.app())

    @site.get("/airflows")
    def airflows() -> str:
        return "answers"

    async def asked():
        transport = httpx.ASGITransport(app=site)
        async with httpx.AsyncClient(transport=transport, base_url="http://unit") as client:
            paths = ["/ddl/about/mnist/run", "/ddl/curves/mnist/run", "/ddl/trainings"] * 20
            waiting = [asyncio.create_task(client.get(path)) for path in paths]
            done, _ = await asyncio.wait(waiting, timeout=within(30), return_when="FIRST_COMPLETED")
            while len(done) < 60 - 8:
                done, _ = await asyncio.wait(waiting, timeout=0.1)
            told = [await client.get(path) for path in ("/airflows", "/ddl/training")]
            refused = [one.result() for one in done]
            hangs.set()
            return told, refused, await asyncio.gather(*waiting)

    try:
        told, refused, all_of_them = asyncio.run(asked())
    finally:
        hangs.set()
    assert [one.status_code for one in told] == [200, 200]
    assert len(inside) == 8 and len(refused) == 52
    assert {one.status_code for one in refused} == {503}
    assert "Its file system may hang" in refused[0].json()["detail"]
    assert [one.status_code for one in all_of_them].count(503) == 52
