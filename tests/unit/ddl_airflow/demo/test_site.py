"""What a site does when a part of it ends by itself, with processes that stand for Airflow's."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from ddl_airflow.demo.show import ask_directly
from ddl_airflow.demo.site import (
    AirflowSite,
    Service,
    Taken,
    answers,
    locked,
    reserved_port,
    running,
)
from tests.demo_home import is_free
from tests.limits import until, within


class Site(AirflowSite):
    """One without Airflow."""

    def start(self) -> None:
        for name in ("api-server", "scheduler"):
            self.restart(name)

    def also(self, *words, name="", environment=None) -> Service:
        argv = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
        return Service(words[0], argv, os.environ, self.home)


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path / "home", tmp_path / "dags")
    with running(site):
        yield site


def kill(service: Service) -> None:
    children = Path(f"/proc/{service.pid}/task/{service.pid}/children")
    deadline = time.monotonic() + within(30)
    while "up" not in service.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (child,) = children.read_text().split()
    os.kill(int(child), signal.SIGKILL)
    while not service.ended():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_ended_is_started_again_and_its_last_words_are_said(site, monkeypatch):
    monkeypatch.setattr("ddl_airflow.demo.site._TOO_SOON_S", 0.0)
    assert site.revive() == []
    scheduler, api_server = site.service("scheduler"), site.service("api-server")
    kill(scheduler)
    with pytest.raises(RuntimeError, match="^scheduler ended with code "):
        site.check()
    (said,) = site.revive()
    assert said.startswith("scheduler ended with code ")
    assert str(scheduler.log) in said
    assert said.endswith("\nup")
    assert site.service("scheduler").pid != scheduler.pid
    assert site.service("api-server") is api_server
    site.check()
    assert site.revive() == []


def test_what_ends_at_once_is_not_started_for_ever(site):
    kill(site.service("scheduler"))
    with pytest.raises(RuntimeError, match=r"(?s)^scheduler ended .* it is not started again$"):
        site.revive()


def test_a_port_is_one_demos_alone_before_anything_listens():
    with reserved_port(18600) as first, reserved_port(first) as second:
        assert first < second
        with pytest.raises(Taken, match=rf"port {first} .*already in use.* --port"):
            reserved_port(first, exactly=True).__enter__()
    with reserved_port(first, exactly=True) as again, socket.create_server(("", 0)) as server:
        assert again == first
        with pytest.raises(Taken, match="already in use"):
            reserved_port(server.getsockname()[1], exactly=True).__enter__()


def test_a_folder_is_one_demos_alone_until_the_last_of_its_processes_has_ended(tmp_path):
    """Also when it is killed: what it has started takes a while to end."""
    script = tmp_path / "demo.py"
    script.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from ddl_airflow.demo.site import Service, locked\n"
        "home = Path(sys.argv[1])\n"
        "deaf = 'import signal, time; signal.signal(15, 1); print(1, flush=True); time.sleep(60)'\n"
        "with locked(home, 'http://ui') as lock:\n"
        "    Service('deaf', [sys.executable, '-c', deaf], os.environ, home, lock)\n"
        "    time.sleep(60)\n"
    )
    demo = subprocess.Popen([sys.executable, str(script), str(tmp_path / "home")])
    log = tmp_path / "home" / "deaf.log"
    until(lambda: log.exists() and log.read_text(), 30)
    try:
        said = rf"a demo runs there \(pid {demo.pid}\), its UI at http://ui: .*/home.*--home"
        with pytest.raises(Taken, match=said):
            locked(tmp_path / "home", "").__enter__()
    finally:
        demo.kill()
        demo.wait()
    with pytest.raises(Taken, match="was killed is just ending there: .* Wait some seconds"):
        locked(tmp_path / "home", "").__enter__()
    until(lambda: is_free(tmp_path / "home"), 30)


def test_what_is_on_this_host_is_asked_directly_where_there_is_a_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9" if "http" in name.lower() else "a.example")
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        try:
            assert not answers(url)
            ask_directly()
            assert httpx.get(url).status_code == 501  # by the server, which knows no GET
            assert os.environ["no_proxy"] == "a.example,127.0.0.1,localhost"
        finally:
            server.shutdown()
