"""The demo's own Airflow, over SQLite."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddl_airflow.demo.site import running
from ddl_airflow.launchers.processes import kill_marked, marked
from tests.demo_home import is_free
from tests.limits import PatientSite, until, within

pytestmark = pytest.mark.integration

MANIFEST = """\
model_definition:
  name: trains
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py
    compute_configuration: {name: cpu, nodes: 1}
training_data_reference: {type: fs, source: {path: ./data}}
training_results_reference: {type: fs, target: {path: ./published}}
"""


def test_many_may_write_at_once_and_a_scheduler_that_ends_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ddl_airflow.demo.site._TOO_SOON_S", 0.0)
    folder = tmp_path / "dags" / "trains"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "none.txt").touch()
    (folder / "manifest.yml").write_text(MANIFEST)
    (folder / "train.py").write_text("print('trained')")
    site = PatientSite(tmp_path / "home", tmp_path / "dags", port=18300)
    with running(site):
        guard = site.service("scheduler").pid
        (scheduler,) = Path(f"/proc/{guard}/task/{guard}/children").read_text().split()
        os.kill(int(scheduler), signal.SIGKILL)
        pools = [{"name": f"pool-{n}", "slots": 1, "include_deferred": False} for n in range(24)]
        with ThreadPoolExecutor(8) as people:
            made = people.map(lambda pool: site.call("POST", "/pools", json=pool), pools)
            assert [pool["name"] for pool in made] == [pool["name"] for pool in pools]
        deadline = time.monotonic() + within(30)
        while not (said := site.revive()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert said[0].startswith("scheduler ended with code ")
        site.wait_for_dag("trains")
        run_id = site.trigger("trains")
        assert site.wait_for_run("trains", run_id, 120) == "failed"  # there is no model
        assert site.task_instances("trains", run_id)["train"]["state"] == "success"
    assert (tmp_path / "home" / "airflow.db").exists()


DEMO = [sys.executable, "-m", "ddl_airflow", "demo"]


@pytest.fixture
def demo(tmp_path):
    """demo(home, *words): one that has been started as from a shell of its own, over no DAGs."""
    mark = f"{time.time()}-{os.getpid()}"
    (tmp_path / "dags").mkdir()
    started = []

    def start(home: str, *words: str) -> subprocess.Popen[str]:
        command = [*DEMO, "--home", str(tmp_path / home), "--dags", str(tmp_path / "dags"), *words]
        one = subprocess.Popen(
            command,
            env={**os.environ, "DDL_TEST_DEMO": mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(one)
        return one

    start.left = lambda: marked("DDL_TEST_DEMO", mark)
    yield start
    kill_marked("DDL_TEST_DEMO", mark)
    for one in started:
        one.communicate()


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C: the terminal tells all processes of the foreground group."""
    os.killpg(process.pid, signal.SIGINT)


def test_a_demo_says_that_another_one_runs_over_its_folder_or_port(demo, tmp_path):
    first = demo("home", "--keep")
    said = ""
    while "object store: http" not in said:  # it has begun to start things
        line = first.stdout.readline()
        assert line, said
        said += line
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    with taken:
        same_home, same_port = demo("home"), demo("elsewhere", "--port", port)
        for second, word, fix in (
            (same_home, f"a demo runs there (pid {first.pid})", "--home"),
            (same_port, f"port {port}", "--port"),
        ):
            output, _ = second.communicate(timeout=within(20))
            assert second.returncode == 2
            (line,) = output.splitlines()  # and no traceback
            assert word in line and fix in line
    assert not (tmp_path / "elsewhere" / "logs").exists()  # nothing was started
    first.kill()
    until(lambda: not demo.left(), 30)
    until(lambda: is_free(tmp_path / "home"), 30)


def test_ctrl_c_in_the_first_seconds_is_no_traceback_and_leaves_nothing(demo, tmp_path):
    """From the imports until Airflow's database is made; all at once, so that the test is short."""
    after_s = (0.0, 0.8, 3.0, 6.0)
    demos = []
    for at_s in after_s:
        demos.append(one := demo(f"home-{at_s}"))
        # Python itself starts, and shows what it likes.
        until(lambda one=one: interrupts_python(one), 30)
        lock = tmp_path / f"home-{at_s}" / "demo.lock"
        until(lambda one=one, lock=lock: not interrupts_python(one) or lock.exists(), 30)
    begun = time.monotonic()
    for at_s, one in zip(after_s, demos, strict=True):
        time.sleep(max(0.0, begun + at_s - time.monotonic()))
        assert one.poll() is None
        interrupt(one)
    for one in demos:
        output, _ = one.communicate(timeout=within(30))
        assert "Traceback" not in output
        assert one.returncode in (130, -signal.SIGINT)
    assert demo.left() == []


def interrupts_python(process: subprocess.Popen[str]) -> bool:
    """Whether it has a handler of SIGINT, as Python installs before it runs anything."""
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(caught, 16) & 1 << signal.SIGINT - 1)
