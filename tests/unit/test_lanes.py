"""`make test` runs tests side by side, and a few that failed again, alone: scripts/test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.limits import within

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "test"
# Of each lane, a test that fails the first so many times.
TEST = """
from pathlib import Path
import pytest

@pytest.mark.parametrize("one", range({tests}))
{mark}
def test_it(one):
    before = Path(f"{place}-{{one}}")
    times = len(before.read_text()) if before.exists() else 0
    before.write_text("x" * (times + 1))
    assert times >= {failures}
"""


@pytest.fixture
def lanes(tmp_path):
    """lanes(failures, tests=1) -> what scripts/test ended with where the tests of a lane fail so
    many times: failures is by lane.
    """
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  kubernetes\n  site\n  cc\n")
    places = {
        "ops": "parallel/test_ops.py",
        "hosts": "integration/test_hosts.py",
        "preflight": "integration/test_preflight.py",
        "contract": "integration/test_launcher_contract.py",
        "py": "unit/ops_lib_py/test_py.py",
        "cc": "unit/ops_lib_cc/test_cc.py",
        "others": "unit/test_others.py",
        "ssh": "integration/test_ssh_launcher.py",
        "named": "integration/test_named_hosts.py",
        "slurm": "integration/test_slurm_launcher.py",
        "kubernetes": "integration/test_pods.py",
        "site": "integration/test_site.py",
    }

    def run(failures, tests=1):
        for lane, place in places.items():
            path = tmp_path / "tests" / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                TEST.format(
                    tests=tests if lane in failures else 1,
                    failures=failures.get(lane, 0),
                    mark=f"@pytest.mark.{lane}" if lane in ("kubernetes", "site", "cc") else "",
                    place=f"{tmp_path}/{lane}",
                )
            )
        words = ["sh", SCRIPT, Path(sys.executable).parent]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)

    return run


def times(tmp_path):
    """How often the first test of each lane ran."""
    return {one.name[:-2]: len(one.read_text()) for one in tmp_path.glob("*-0")}


def test_what_fails_once_is_run_again_and_named(lanes, tmp_path):
    ended = lanes({"ops": 1, "site": 1})
    assert ended.returncode == 0, ended.stdout
    _, _, told = ended.stdout.partition("and passed three times alone:\n")
    assert told.splitlines()[:2] == [
        "tests/integration/test_site.py::test_it[0]",
        "tests/parallel/test_ops.py::test_it[0]",
    ]
    assert "\nFAILED tests/parallel/test_ops.py::test_it[0]" in told  # and why, at the end
    ran = times(tmp_path)
    assert ran.pop("ops") == ran.pop("site") == 4
    assert len(ran) == 10 and set(ran.values()) == {1}


@pytest.mark.parametrize("lane", ["others", "kubernetes"])
def test_what_fails_again_fails_the_run(lanes, lane):
    ended = lanes({lane: 2})
    assert ended.returncode == 1 and "passed three times alone" not in ended.stdout


def test_many_that_fail_are_not_run_again(lanes, tmp_path):
    ended = lanes({"ssh": 1}, tests=6)
    assert ended.returncode == 1 and times(tmp_path)["ssh"] == 1


def test_a_lane_without_its_report_fails_the_run(lanes, tmp_path):
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "conftest.py").write_text("this is not Python\n")
    assert lanes({"ops": 1}).returncode == 1


def terminated(folder, *moments):
    """The exit code of a session of the folder's tests that gets SIGTERM at each of the moments.

    Args:
        folder: has the tests.
        moments: names of files that they make there.
    """
    words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--rootdir", folder]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    with subprocess.Popen([*words, folder], cwd=folder, env=env) as running:
        for name in moments:
            deadline = time.monotonic() + within(60)
            while not (folder / name).exists():
                assert running.poll() is None and time.monotonic() < deadline, name
                time.sleep(0.02)
            running.terminate()
    return running.returncode


def test_a_second_sigterm_cuts_off_no_teardown(tmp_path):
    """Who ends all of a group ends each pytest, and so does scripts/test, which is told as well."""
    (tmp_path / "test_it.py").write_text(
        f"""
import time
from pathlib import Path
import pytest

@pytest.fixture
def cluster():
    yield
    Path({str(tmp_path)!r}, "ending").touch()
    time.sleep(1)
    Path({str(tmp_path)!r}, "ended").touch()

def test_it(cluster):
    Path({str(tmp_path)!r}, "up").touch()
    time.sleep(60)
"""
    )
    assert terminated(tmp_path, "up", "ending") == 128 + signal.SIGTERM
    assert (tmp_path / "ended").exists()


def test_a_sigterm_that_a_test_has_caught_ends_the_session(tmp_path):
    """What is tested handles errors of any kind, and so takes the one by which pytest exits."""
    (tmp_path / "test_it.py").write_text(
        f"""
import time
from pathlib import Path

def test_it():
    Path({str(tmp_path)!r}, "up").touch()
    try:
        time.sleep(60)
    except Exception:
        Path({str(tmp_path)!r}, "caught").touch()

def test_next():
    Path({str(tmp_path)!r}, "went on").touch()
"""
    )
    assert terminated(tmp_path, "up") == pytest.ExitCode.INTERRUPTED
    assert (tmp_path / "caught").exists()
    assert not (tmp_path / "went on").exists()


def test_a_handler_that_a_test_leaves_does_not_keep_the_session_from_its_end(tmp_path):
    """What is tested in this process may replace it, and not put it back."""
    (tmp_path / "test_it.py").write_text(
        f"""
import signal
import time
from pathlib import Path

def test_it():
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)

def test_next():
    Path({str(tmp_path)!r}, "up").touch()
    deadline = time.monotonic() + {within(20)}
    while time.monotonic() < deadline:
        time.sleep(0.1)
"""
    )
    assert terminated(tmp_path, "up") == 128 + signal.SIGTERM
