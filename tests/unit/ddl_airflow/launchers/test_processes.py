from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from ddl_airflow.launchers.processes import kill_marked, marked
from tests.limits import within

MARK = "DDL_UNIT_MARK"


@pytest.fixture
def value(tmp_path):
    chosen = tmp_path.name
    yield chosen
    for name in (chosen, chosen + "0"):
        kill_marked(MARK, name)


def start(value: str, script: str = "import time; time.sleep(60)") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {MARK: value}, stdout=subprocess.PIPE
    )


def wait_for(count: int, value: str) -> list[int]:
    deadline = time.monotonic() + within(10)
    while len(pids := marked(MARK, value)) != count:
        assert time.monotonic() < deadline, pids
        time.sleep(0.02)
    return pids


def test_marked_finds_the_exact_value_only(value):
    with start(value) as one, start(value + "0") as other:
        assert wait_for(1, value) == [one.pid]
        assert wait_for(1, value + "0") == [other.pid]
        assert marked(MARK, value[:-1]) == []
        one.kill()
        other.kill()


def test_marked_leaves_out_this_process():
    code = (
        "import os; from ddl_airflow.launchers.processes import marked;"
        f"print(marked('{MARK}', 'self'))"
    )
    env = os.environ | {MARK: "self"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    assert done.stdout.split() == [b"[]"]


def test_marked_counts_no_zombie(value):
    process = start(value, "pass")
    wait_for(0, value)
    assert process.poll() in (None, 0)
    process.communicate()


def test_what_sleeps_uninterruptibly_is_not_waited_for_for_ever(value, freezer):
    process = start(value)
    wait_for(1, value)
    freezer.freeze(process.pid)
    (said,) = kill_marked(MARK, value, within_s=0.5)
    assert re.fullmatch(
        rf"process {process.pid} \(python.*, in uninterruptible sleep in \S+\)", said
    )
    freezer.thaw()
    assert kill_marked(MARK, value) == []
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def test_a_look_that_does_not_come_back_is_not_taken_for_nothing_left(value, monkeypatch):
    """As at /proc/<pid>/environ of one that holds its memory's lock in the kernel."""
    over = threading.Event()
    monkeypatch.setattr("ddl_airflow.launchers.processes.marked", lambda *_: over.wait() and [])
    (said,) = kill_marked(MARK, value, within_s=0.2)
    assert said == "processes that cannot be seen (/proc did not answer within 0.2 s)"
    over.set()


def test_kill_marked_finds_a_grandchild_in_a_session_of_its_own(value):
    grandchild = (
        "import subprocess, sys;"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True, stdout=subprocess.DEVNULL)"
    )
    start(value, grandchild).communicate()  # the parent ends, the grandchild stays
    (pid,) = wait_for(1, value)
    assert os.getsid(pid) != os.getsid(0)
    kill_marked(MARK, value)
    assert marked(MARK, value) == []
    kill_marked(MARK, value)  # again is fine
