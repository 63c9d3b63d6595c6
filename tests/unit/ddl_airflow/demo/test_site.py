"""What a site does when a part of it ends by itself, with processes that stand for Airflow's."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ddl_airflow.demo.site import AirflowSite, Service, running


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
    deadline = time.monotonic() + 30
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
