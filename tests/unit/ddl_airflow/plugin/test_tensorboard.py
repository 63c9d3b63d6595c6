"""TensorBoard on demand: who gets one, what its page can do in a browser, and when it ends."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import re
import signal
import socket
import socketserver
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from ddl_airflow.core.errors import TensorBoardRefused
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.storage.experiments import claim
from tests.event_files import losses, write_events
from tests.limits import until, within
from tests.screenshots import shot


@pytest.fixture
def layout(workspace):
    """A training that has left an event file."""
    return trained(workspace, "digits")


def trained(workspace, dag_id):
    from ddl_airflow.site import training_of

    made = RunLayout(workspace, dag_id, training_of(dag_id, "run"))
    made.create()
    write_events(made.logs / "train", losses())
    return made


@pytest.fixture
def boards(tmp_path):
    """boards(workspace, idle_s=, most=) -> those of an api-server's worker; ended with the test."""
    from ddl_airflow.plugin.tensorboard import TensorBoards

    made = []

    def make(workspace, idle_s=60.0, most=2):
        made.append(TensorBoards(workspace, idle_s=idle_s, most=most, folder=tmp_path / "sockets"))
        return made[-1]

    yield make
    for one in made:
        one.close()


def processes(folder):
    """The ids of those that run over the sockets of a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            own = b"ddl_airflow.plugin.tensorboard_process" in (process / "cmdline").read_bytes()
            if own and (process / "cwd").resolve() == folder:
                found.append(int(process.name))
        except OSError:  # it has ended
            continue
    return found


def listened(process):
    """The addresses of TCP on which a process listens: of proc(5)."""
    own = set()
    for one in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            own.add(os.readlink(one))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                found.add(local)
    return found


def ask(socket, path):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=within(20)) as client:
        return client.get(f"http://tensorboard/{path}")


def runs(socket):
    """What it shows, once it has read what there is."""
    until(lambda: ask(socket, "data/runs").json(), 20)
    return ask(socket, "data/runs").json()


def test_one_process_serves_all_who_ask(boards, layout):
    first, second = boards(layout.workspace), boards(layout.workspace)
    at = first.start(layout)
    assert second.start(layout) == first.start(layout) == at
    (process,) = processes(at.parent)
    assert runs(at) == ["logs/train"]
    tags = ask(at, "data/plugin/timeseries/tags").json()["scalars"]["runTagInfo"]
    assert tags == {"logs/train": ["loss"]}
    assert at.stat().st_mode & 0o077 == 0 and at.parent.stat().st_mode & 0o077 == 0
    # No port, which would be open to all users of the host, and no settings of Airflow's.
    assert listened(process) == set()
    environment = Path(f"/proc/{process}/environ").read_bytes()
    assert b"AIRFLOW" not in environment
    assert "libtensorflow" not in Path(f"/proc/{process}/maps").read_text()
    assert Path(f"/proc/{process}/oom_score_adj").read_text().strip() == "1000"
    first.close()
    until(lambda: not processes(at.parent), 5)
    assert not at.exists()


def test_who_listens_on_a_port_is_seen():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listened(os.getpid()) == {f"0100007F:{server.getsockname()[1]:04X}"}


def test_nobody_asks_and_it_ends(boards, layout):
    at = boards(layout.workspace, idle_s=2.0).start(layout)
    began = time.monotonic()
    while time.monotonic() < began + 3:
        assert ask(at, "data/environment").status_code == 200
        time.sleep(0.2)
    until(lambda: not processes(at.parent), 10)
    assert not at.exists()


def test_the_one_that_was_not_used_for_longest_makes_room(boards, layout):
    mine = boards(layout.workspace, most=2)
    others = [trained(layout.workspace, name) for name in ("second", "third")]
    first, second = mine.start(layout), mine.start(others[0])
    with pytest.raises(TensorBoardRefused, match="All 2 TensorBoards .* are in use"):
        mine.start(others[1])
    before = processes(first.parent)
    # Another worker of the host finds them as well.
    for path, ago in ((first, 100), (second, 200)):
        os.utime(path, (time.time() - ago,) * 2)
    third = boards(layout.workspace, most=2).start(others[1])
    assert first.exists() and third.exists() and not second.exists()
    after = processes(first.parent)
    assert len(after) == 2 and len(set(before) & set(after)) == 1


def test_what_was_killed_leaves_no_place_taken(boards, layout):
    from ddl_airflow.plugin.tensorboard import answers

    mine = boards(layout.workspace, most=1)
    at = mine.start(layout)
    (process,) = processes(at.parent)
    os.kill(process, signal.SIGKILL)
    until(lambda: not answers(at), 5)
    assert at.exists()
    mine.start(trained(layout.workspace, "second"))
    assert not at.exists()
    assert at != mine.start(trained(layout.workspace, "second"))


def test_links_of_a_training_lead_nowhere(boards, layout):
    others = trained(layout.workspace, "others")
    (layout.logs / "linked").symlink_to(others.logs)
    (layout.result / "linked").mkdir(parents=True)
    (layout.result / "linked" / "events.out.tfevents.1").symlink_to(
        others.logs / "train" / "events.out.tfevents.1"
    )
    os.mkfifo(layout.result / "events.out.tfevents.2")
    write_events(layout.result / "seen", losses())
    at = boards(layout.workspace).start(layout)
    until(lambda: len(runs(at)) >= 2, 20)
    time.sleep(1)
    shown = ask(at, "data/plugin/timeseries/tags").json()["scalars"]["runTagInfo"]
    assert shown == {"logs/train": ["loss"], "result/seen": ["loss"]}


@pytest.mark.parametrize("name", ["a link", "with, a comma: and a colon"])
def test_the_workspace_may_have_any_name(boards, layout, tmp_path, name):
    place = tmp_path / name
    if name == "a link":
        place.symlink_to(layout.workspace)
    else:
        layout.workspace.rename(place)
    moved = replace(layout, workspace=place)
    assert runs(boards(place).start(moved)) == ["logs/train"]


def test_a_record_that_lies_about_its_length_is_left_alone(boards, layout):
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    length = struct.pack("<Q", 2**62)
    (layout.result / "liar").mkdir()
    with (layout.result / "liar" / "events.out.tfevents.1").open("wb") as file:
        file.write(length + struct.pack("<I", masked_crc32c(length)))
        file.truncate(2**40)
    at = boards(layout.workspace).start(layout)
    assert "logs/train" in runs(at)
    (process,) = processes(at.parent)
    status = Path(f"/proc/{process}/status").read_text()
    assert int(re.search(r"VmHWM:\s+(\d+)", status)[1]) < 2**20  # KiB


def test_a_named_experiment_is_shown(boards, layout):
    (layout.kept / "record.json").write_text(json.dumps({"run": {"experiment": "shared"}}))
    claim(layout.workspace, "shared", layout.dag_id, in_manifest=True)
    write_events(layout.workspace / "experiments" / "shared" / "eval", losses())
    at = boards(layout.workspace).start(layout)
    until(lambda: len(runs(at)) == 2, 20)
    assert runs(at) == ["experiment/eval", "logs/train"]


def test_why_there_is_none(boards, layout, monkeypatch, tmp_path):
    with pytest.raises(TensorBoardRefused, match="tensorboards is 0"):
        boards(layout.workspace, most=0).start(layout)
    none = RunLayout(layout.workspace, "none", "none-1")
    none.create()
    with pytest.raises(TensorBoardRefused, match="no event files so far.*LOG_DIR"):
        boards(layout.workspace).start(none)
    open_to_all = tmp_path / "sockets"
    open_to_all.chmod(0o755)
    with pytest.raises(TensorBoardRefused, match="no folder of the api-server's user alone"):
        boards(layout.workspace).start(layout)
    open_to_all.rename(tmp_path / "elsewhere")
    open_to_all.symlink_to(tmp_path)
    with pytest.raises(TensorBoardRefused, match="no folder of the api-server's user alone"):
        boards(layout.workspace).start(layout)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(TensorBoardRefused, match="pip install tensorboard"):
        boards(layout.workspace).start(layout)


def test_tokens_lead_to_one_training_for_some_hours(monkeypatch):
    from ddl_airflow.plugin.tensorboard import Tokens

    tokens = Tokens("a secret")
    token = tokens.make("digits", "a/b c")
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", token)
    assert Tokens("a secret").read(token) == ("digits", "a/b c")
    assert Tokens("another").read(token) is None
    words, _, mac = token.partition(".")
    others = tokens.make("others", "run").partition(".")[0]
    for forged in ("", ".", token[:-1], f"{others}.{mac}", f"{words}.", f"{words}.é", mac):
        assert tokens.read(forged) is None
    later = time.time() + 12 * 3600 + 2
    monkeypatch.setattr(time, "time", lambda: later)
    assert tokens.read(token) is None
    with pytest.raises(TensorBoardRefused, match="secret_key nor .* jwt_secret is set"):
        Tokens("")


class Told(http.server.BaseHTTPRequestHandler):
    """What listens in TensorBoard's place, keeps what it is asked with, and answers with more."""

    asked: list[tuple[str, dict[str, str], bytes]]

    def do_GET(self):
        length = int(self.headers.get("Content-Length", 0))
        said = {name.lower(): value for name, value in self.headers.items()}
        self.asked.append((self.path, said, self.rfile.read(length)))
        moved = self.path == "/moved"
        self.send_response(302 if moved else 200)
        for name, value in (
            *(("Content-Type", "text/html"), ("Set-Cookie", "_token=other; Path=/")),
            *(("Location", "https://example.com/"), ("Access-Control-Allow-Origin", "*")),
            *(("Content-Security-Policy", ""), ("Clear-Site-Data", '"*"'), ("Refresh", "0; /")),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"<html><head></head></html>")

    do_POST = do_GET

    def address_string(self):
        return "here"

    def log_message(self, *_):
        pass


@pytest.fixture
def app(workspace, monkeypatch, tmp_path):
    """The plugin's app as Airflow mounts it, with its log of what was asked; and its own state."""
    from airflow.api_fastapi.common.http_access_log import HttpAccessLogMiddleware
    from fastapi import FastAPI

    from ddl_airflow.plugin import api

    monkeypatch.setattr(api, "readers_of_task_logs", lambda: lambda: None)
    monkeypatch.setenv("AIRFLOW__API__SECRET_KEY", "of this site")
    site = FastAPI()
    plugin = api.app()
    site.mount("/ddl", plugin)
    site.add_middleware(HttpAccessLogMiddleware)
    site.state.boards = plugin.state.tensorboards
    yield site
    site.state.boards().close()


@pytest.fixture
def board(app, layout):
    """Where the app has the board of a training, in whose place Told listens."""
    from ddl_airflow.plugin.tensorboard import Tokens

    boards = app.state.boards()
    boards._make_folder()
    Told.asked = []
    at = boards.socket(layout)
    with socketserver.ThreadingUnixStreamServer(str(at), Told) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"/ddl/tensorboard/{Tokens('of this site').make('digits', layout.training_id)}"
        server.shutdown()
    at.unlink()


def test_over_a_unix_socket_no_certificates_are_read(app, board, monkeypatch):
    """It takes tens of milliseconds, in which the api-server answers nobody."""
    from fastapi.testclient import TestClient

    def read(*_, **__):
        raise AssertionError("certificates are read")

    monkeypatch.setattr(ssl, "create_default_context", read)
    assert TestClient(app).get(f"{board}/data/runs").status_code == 200


def keyed_by(monkeypatch, tmp_path, then):
    """The key comes of a command that does this, too. The file in which each call is a line."""
    calls, command = tmp_path / "calls", tmp_path / "key.sh"
    command.write_text(f"#!/bin/sh\necho call >> {calls}\n{then}\n")
    command.chmod(0o755)
    monkeypatch.delenv("AIRFLOW__API__SECRET_KEY")
    monkeypatch.setenv("AIRFLOW__API__SECRET_KEY_CMD", str(command))
    return calls


def test_nobodys_requests_run_the_command_of_the_key_once(app, monkeypatch, tmp_path):
    """Nor does anything else wait for it."""
    calls = keyed_by(monkeypatch, tmp_path, "sleep 1; echo of this site")

    async def asked():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://unit") as client:
            waiting = [asyncio.create_task(client.get("/ddl/tensorboard/x/")) for _ in range(5)]
            await asyncio.sleep(0.1)
            page = await client.get("/ddl/training")
            assert page.status_code == 200 and not any(one.done() for one in waiting)
            return await asyncio.gather(*waiting)

    assert [one.status_code for one in asyncio.run(asked())] == [403] * 5
    assert calls.read_text().splitlines() == ["call"]


def test_a_command_that_gives_no_key_is_named(app, layout, monkeypatch, tmp_path):
    from fastapi.testclient import TestClient

    keyed_by(monkeypatch, tmp_path, "echo half of a key; exit 3")
    client = TestClient(app)
    for answer in (
        client.get("/ddl/tensorboard/x/"),
        client.post("/ddl/tensorboard-of/digits/run"),
    ):
        assert answer.status_code == 503 and "[api] secret_key cannot be read" in answer.text
        assert "half of a key" not in answer.text


def test_keys_of_the_person_go_no_further(app, board, capsys):
    from fastapi.testclient import TestClient

    client = TestClient(app, cookies={"_token": "secret"}, follow_redirects=False)
    headers = {"Authorization": "Bearer secret", "X-Any": "secret", "Accept": "text/html"}
    answers = {}
    for path in ("", "data/runs?run=a%20b&tag=%2F", "moved"):
        answers[path] = client.get(f"{board}/{path}", headers=headers)
    client.post(f"{board}/data/x", content=b"a=b", headers=headers)
    long = client.post(f"{board}/data/x", content=b"x" * 2_000_000)
    assert [(path, sent) for path, _, sent in Told.asked] == [
        *(("/", b""), ("/data/runs?run=a%20b&tag=%2F", b""), ("/moved", b""), ("/data/x", b"a=b"))
    ]
    assert "secret" not in json.dumps([said for _, said, _ in Told.asked])
    assert Told.asked[0][1]["accept"] == "text/html"
    assert (long.status_code, answers["moved"].status_code) == (413, 404)
    for answer in answers.values():
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("sandbox allow-scripts allow-downloads; default-src 'none'; ")
        assert "same-origin" not in policy and "unsafe-eval" not in policy
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        told = {"set-cookie", "location", "clear-site-data", "refresh"}
        assert not told & {name.lower() for name in answer.headers}
        assert answer.headers.get_list("Access-Control-Allow-Origin") == ["null"]
    assert "in-a-sandbox.js" in answers[""].text
    # What opens it is in no log of the server.
    said = [line for line in capsys.readouterr().out.splitlines() if "http.access" in line]
    assert "/ddl/tensorboard/.../data/runs" in said[1] and board.rpartition("/")[2] not in "".join(
        said
    )


@pytest.mark.parametrize("how", ["GET", "HEAD"])
@pytest.mark.parametrize("place", ["{}", "{}/", "{}/data/runs", "/{}/data", "{}%2Fdata"])
def test_no_request_brings_an_address_into_the_log(app, layout, capsys, how, place):
    from fastapi.testclient import TestClient

    from ddl_airflow.plugin.tensorboard import Tokens

    token = Tokens("another").make("digits", layout.training_id)
    TestClient(app, follow_redirects=False).request(how, f"/ddl/tensorboard/{place.format(token)}")
    said = [line for line in capsys.readouterr().out.splitlines() if "http.access" in line]
    assert len(said) == 1 and "/ddl/tensorboard/..." in said[0] and token not in said[0]


KEYS = ("AIRFLOW__API__SECRET_KEY", "AIRFLOW__API_AUTH__JWT_SECRET")


@pytest.mark.parametrize("configured", KEYS)
def test_workers_know_each_others_addresses(configured):
    """Without [api] secret_key each process of Airflow has another one."""
    code = (
        "import sys; from ddl_airflow.plugin.api import _tokens\n"
        "print(_tokens().read(sys.argv[1]) if sys.argv[1:] else _tokens().make('digits', 'one'))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in KEYS}
    token = ""
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code, *filter(None, [token])],
            capture_output=True,
            text=True,
            check=True,
            env=environment | {configured: "of this site"},
        )
        token = token or done.stdout.split()[-1]
    assert done.stdout.splitlines()[-1] == "('digits', 'one')"


def test_an_experiment_of_another_dag_is_not_shown(layout):
    """Which a run may have asked for, and been refused."""
    from ddl_airflow.plugin.tensorboard import folders_of

    (layout.kept / "record.json").write_text(json.dumps({"run": {"experiment": "others"}}))
    claim(layout.workspace, "others", "another", in_manifest=True)
    assert folders_of(layout)["experiment"] == layout.experiment
    # Nor one of which is not known whose it is.
    (layout.workspace / "experiments" / ".owners" / "others.json").write_text("no JSON")
    assert folders_of(layout)["experiment"] == layout.experiment


def test_where_no_key_is_set_the_setting_is_named(monkeypatch, app, layout):
    """Rather than a key that the next process does not know."""
    from airflow.configuration import conf
    from fastapi.testclient import TestClient

    monkeypatch.delenv("AIRFLOW__API__SECRET_KEY")
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "")
    assert conf.get("api", "secret_key")
    answer = TestClient(app).post("/ddl/tensorboard-of/digits/run")
    assert answer.status_code == 503 and "[api] secret_key" in answer.json()["detail"]


def test_an_address_that_is_too_old_is_not_one_of_another_key(app, layout, monkeypatch):
    from fastapi.testclient import TestClient

    from ddl_airflow.plugin.tensorboard import Tokens

    client = TestClient(app)
    others = Tokens("another").make("digits", layout.training_id)
    refused = client.get(f"/ddl/tensorboard/{others}/")
    assert refused.status_code == 403 and "another [api] secret_key" in refused.text
    own = Tokens("of this site").make("digits", layout.training_id)
    later = time.time() + 12 * 3600 + 2
    monkeypatch.setattr(time, "time", lambda: later)
    refused = client.get(f"/ddl/tensorboard/{own}/")
    assert refused.status_code == 403 and "too old" in refused.text


def test_an_address_starts_it_again(app, layout):
    from fastapi.testclient import TestClient

    from ddl_airflow.plugin.tensorboard import answers

    client = TestClient(app)
    path = client.post("/ddl/tensorboard-of/digits/run").json()["path"]
    at = app.state.boards().socket(layout)
    (first,) = processes(at.parent)
    os.kill(first, signal.SIGKILL)
    until(lambda: not answers(at), 5)
    assert client.get(f"/ddl/{path}data/environment").json()["version"]
    (second,) = processes(at.parent)
    assert first != second
    refused = client.get(f"/ddl/{path[:-2]}/data/environment")
    assert refused.status_code == 403 and "not whole" in refused.text
    client.post("/ddl/tensorboard-of/none/run").json()["detail"].index("no event files so far")


def test_boards_that_take_long_to_start_keep_nobody_from_the_page(app, monkeypatch):
    from ddl_airflow.plugin import bounded
    from ddl_airflow.plugin.tensorboard import TensorBoards

    hangs, inside = threading.Event(), []

    def starts(*_):
        inside.append(None)
        hangs.wait()

    monkeypatch.setattr(TensorBoards, "start", starts)
    monkeypatch.setattr(bounded, "_PATIENCE_S", 0.5)

    async def asked():
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://unit") as client:
            start = "/ddl/tensorboard-of/digits/run"
            waiting = [asyncio.create_task(client.post(start)) for _ in range(8)]
            while len(inside) < 8:
                await asyncio.sleep(0.05)
            told = await client.get("/ddl/about/digits/run")
            one_more = await client.post(start)
            hangs.set()
            return told, one_more, await asyncio.gather(*waiting)

    try:
        told, one_more, started = asyncio.run(asyncio.wait_for(asked(), within(30)))
    finally:
        hangs.set()
    assert told.status_code == 200
    assert {one.status_code for one in started} == {200}
    assert one_more.status_code == 503
    assert "8 requests wait for a TensorBoard to start" in one_more.json()["detail"]


def test_who_may_not_read_the_logs_starts_none(workspace, layout):
    from fastapi.testclient import TestClient

    from ddl_airflow.plugin import api

    plugin = api.app()
    refused = TestClient(plugin).post("/tensorboard-of/digits/run")
    assert refused.status_code in (401, 403)
    assert TestClient(plugin).get("/tensorboard-of/digits/run").status_code in (404, 405)
    assert not plugin.state.tensorboards().socket(layout).exists()


SERVED = """\
import os, time
from fastapi import FastAPI
from ddl_airflow.plugin import api
api.readers_of_task_logs = lambda: lambda: None
app = FastAPI()
app.mount("/ddl", api.app())
@app.get("/worker")
async def worker() -> int:
    time.sleep(0.05)  # whoever asks next finds the other one
    return os.getpid()
"""


def test_two_workers_share_one_and_none_is_left(workspace, layout, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "served.py").write_text(SERVED)
    short = Path(tempfile.mkdtemp())  # for sockets, which have short names only
    environment = os.environ | {
        "AIRFLOW__API__SECRET_KEY": "of this site",
        "AIRFLOW__DDL__WORKSPACE": str(workspace),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
        "TMPDIR": str(short),
    }
    command = [sys.executable, "-m", "uvicorn", "served:app", f"--port={port}", "--workers=2"]
    # A worker that imports for long on a busy machine is not to be replaced.
    command += ["--timeout-worker-healthcheck=300", "--log-level=error"]
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"

    def each(work, *asked):
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(work, [*asked, *asked] * (4 // len(asked))))

    def workers():
        with suppress(httpx.TransportError):
            return set(each(lambda one: httpx.get(one).json(), f"{url}/worker"))
        return set()

    try:
        until(lambda: len(workers()) == 2, 60)
        answers = each(
            lambda one: httpx.post(one, timeout=within(60)), f"{url}/ddl/tensorboard-of/digits/run"
        )
        assert [answer.status_code for answer in answers] == [200] * 8, answers[0].text
        (folder,) = short.glob("ddl-tensorboard-*")
        (process,) = processes(folder)
        paths = [f"{url}/ddl/{answer.json()['path']}data/environment" for answer in answers]
        assert {_status(path) for path in paths} == {200}
        # The worker that started it is killed: it ends, and the other one starts another.
        parent = int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[1])
        assert parent in workers()
        path = paths[0]
        os.kill(parent, signal.SIGKILL)
        until(lambda: process not in processes(folder), 5)
        until(lambda: _status(path) == 200, 20)
        assert len(processes(folder)) == 1
        # All at once, without a chance to clean up.
        os.killpg(server.pid, signal.SIGKILL)
        until(lambda: not processes(folder), 5)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _status(url):
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=within(20)).status_code
    return None


EVIL = "<img src=x onerror=fetch('/stolen')><script>fetch('/stolen')</script>"
# What a script of an event file would try, if one ran there after all.
TRIED = """async () => {
  const said = {origin: self.origin};
  const attempt = async (name, work) => {
    try { said[name] = String(await work()); } catch (error) { said[name] = error.name; }
  };
  const read = (how) => async () => (await fetch("/api/v2/dags", how)).text();
  await attempt("read", read({}));
  await attempt("read with cookies", read({credentials: "include"}));
  await attempt("read the page", async () => (await fetch("../../about/digits/run")).text());
  await attempt("trigger", () => fetch("/api/v2/dags/digits/dagRuns", {
    method: "POST", credentials: "include", body: "{}",
    headers: {"Content-Type": "application/json"}}));
  await attempt("send away", () => fetch("http://127.0.0.2:9/"));
  await attempt("frame", () => new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.src = "/around?query=x";
    frame.onload = () => done(frame.contentDocument);
    document.body.append(frame);
  }));
  await attempt("window", () => window.open("/around?query=x"));
  await attempt("worker", () => new ServiceWorkerContainer());
  await attempt("register", () => navigator.serviceWorker.register("in-a-sandbox.js"));
  const cookie = Object.getOwnPropertyDescriptor(Document.prototype, "cookie");
  await attempt("cookie", () => cookie.get.call(document));
  return said;
}"""


def test_scalars_are_seen_and_nothing_of_airflow_is_within_reach(browser, site):
    write_events(site.layout.logs / "train", losses())
    write_events(site.layout.logs / "<img src=x onerror=alert(1)>", losses(tag=EVIL))
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    try:
        context.add_cookies([{"name": "_token", "value": "of the person", "url": site.url}])
        page = context.new_page()
        page.set_default_timeout(within(30_000))
        expect.set_options(timeout=within(30_000))
        said, asked = [], []
        page.on("dialog", lambda one: (said.append(one.message), one.dismiss()))
        page.on("pageerror", lambda error: said.append(str(error)))
        error = lambda one: one.type == "error" and "favicon" not in one.location["url"]  # noqa: E731
        page.on("console", lambda one: error(one) and said.append(one.text))
        page.goto(f"{site.url}/around?query=dag_id=digits%26run_id=run")
        button = page.frame_locator("iframe").get_by_role("button", name="TensorBoard")
        button.click()
        page.wait_for_url(re.compile("/ddl/tensorboard/"))
        page.on("request", lambda one: asked.append(one))
        page.reload()
        card = page.locator("scalar-card").filter(has=page.get_by_text("loss", exact=True)).first
        expect(card.locator("line-chart canvas").first).to_be_visible()
        expect(card).to_contain_text("logs/train")
        expect(card).to_contain_text("0.04")  # the last loss
        # What ranks wrote is shown, as text.
        expect(page.get_by_text("onerror=fetch").first).to_be_visible()
        assert said == []
        hosts = [
            one.url
            for one in asked
            if not one.url.startswith((f"{site.url}/ddl/tensorboard/", "data:"))
        ]
        assert hosts == []
        # The address is asked with what the person's browser has; what the page asks for is not.
        navigations = [one for one in asked if one.is_navigation_request()]
        assert [one for one in asked if "cookie" in one.all_headers()] == navigations
        shot(page, "tensorboard")

        tried = page.evaluate(TRIED)
    finally:
        context.close()
    assert tried.pop("origin") == "null"
    assert set(tried.values()) <= {"TypeError", "SecurityError", "null"}
