from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ddl_airflow.demo import guard
from tests.limits import until

# Starts a child that hides as Airflow's workers do: own session, empty environment, deaf to TERM.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
hidden = subprocess.Popen(
    [sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(60)"],
    env={}, start_new_session=True,
)
with open(sys.argv[1] + ".partial", "w") as file:
    file.write(f"{os.getpid()} {hidden.pid}")
os.rename(sys.argv[1] + ".partial", sys.argv[1])
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-SE", guard.__file__, str(os.getpid()), "0.3", *command]
    )


@pytest.fixture
def stubborn(tmp_path):
    script = tmp_path / "stubborn.py"
    script.write_text(STUBBORN)
    return [sys.executable, str(script), str(tmp_path / "pids")], tmp_path / "pids"


def test_exit_code_is_the_commands():
    assert start(sys.executable, "-c", "raise SystemExit(7)").wait(10) == 7
    killed = "import os; os.kill(os.getpid(), 9)"
    assert start(sys.executable, "-c", killed).wait(10) == 137


def test_the_command_ends_when_its_guard_is_killed(tmp_path):
    file = tmp_path / "pid"
    script = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))"
    process = start(sys.executable, "-c", f"{script}; time.sleep(60)", str(file))
    until(lambda: file.exists() and file.read_text(), 10)
    process.kill()
    process.wait(10)
    until(lambda: not alive(int(file.read_text())), 10)


def test_sigterm_ends_everything_after_the_grace(stubborn):
    command, pids = stubborn
    process = start(*command)
    until(pids.exists, 10)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 137
    assert [pid for pid in map(int, pids.read_text().split()) if alive(pid)] == []


def test_death_of_the_parent_ends_everything(stubborn):
    command, pids = stubborn
    script = f"""
        import os, subprocess, sys, time
        subprocess.Popen([sys.executable, "-SE", {guard.__file__!r}, str(os.getpid()), "0.3",
                          *{command!r}])
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
    until(pids.exists, 10)
    parent.kill()
    parent.wait()
    until(lambda: not any(alive(pid) for pid in map(int, pids.read_text().split())), 10)
