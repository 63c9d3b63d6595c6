"""What a rank takes of its host, as the shim notes it of a script that is started for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ddl_ops import resource_usage
from ddl_ops.resource_usage import ResourceUsage, usage_file

from tests.limits import until
from tests.unit.ops_lib_py.test_rank import Shim, environment

# A child, started by a thread, holds the memory and uses a core for about two seconds.
SCRIPT = """\
import subprocess, sys, threading, time
hold = (
    "import os, time; kept = bytearray(150 << 20); kept[::4096] = b'x' * len(kept[::4096])\\n"
    "while sum(os.times()[:2]) < 2: pass\\n"
    "open('held', 'w').close()\\n"
    "while not os.path.exists('go'): time.sleep(0.05)"
)
threading.Thread(target=lambda: subprocess.run([sys.executable, "-c", hold])).start()
"""


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(resource_usage, "_FIRST_S", 0.0)
    monkeypatch.setattr(resource_usage, "_EACH_S", 0.0)


def test_what_a_script_and_its_children_take_is_told(tmp_path: Path, often: None) -> None:
    script = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=tmp_path)
    path = usage_file(tmp_path, 3)
    usage = ResourceUsage(path, script.pid)
    until((tmp_path / "held").exists, 60)
    usage.look()
    told = json.loads(path.read_text())
    assert told["memory"] == told["peak"] > 150 << 20
    assert 2 <= told["cpu_s"] < 10
    assert told["cores"] > 0
    (tmp_path / "go").touch()
    script.wait()
    usage.look()  # of processes that are gone
    after = json.loads(path.read_text())
    assert (after["memory"], after["peak"], after["cores"]) == (0, told["peak"], 0)
    assert after["cpu_s"] == told["cpu_s"]


def test_a_full_disk_or_a_folder_that_is_gone_ends_nothing(tmp_path: Path, often: None) -> None:
    ResourceUsage(tmp_path / "none" / "rank-0.usage", 1).look()
    assert not list(tmp_path.iterdir())


def test_the_shim_notes_it_of_its_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    shim = Shim(tmp_path, ["--command", "python train.py"], environment(tmp_path, rank=1, size=2))
    until((tmp_path / "rank-1.usage").exists, 60)
    (tmp_path / "go").touch()
    assert shim.end().code == 0, shim.log(1)
    told = json.loads((tmp_path / "rank-1.usage").read_text())
    assert set(told) == {"t", "cores", "cpu_s", "memory", "peak"}
    assert told["peak"] > 0
