"""A rank that is asked to end, alone: what it tells of that, and where it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddl_ops import preemption

SCRIPT = """
import os, signal, sys
from ddl_ops import preemption

preemption.on_preempt(lambda step: print("saved", step))
if sys.argv[1:]:
    os.mkdir(sys.argv[1])
os.kill(os.getpid(), signal.SIGTERM)
preemption.end_of_step(STEP)
print("goes on")
"""
ENDS = "saved 4\nddl: asked to make room: saved after step 4, all ranks end\n"


def asked(records: Path, *folder: Path, step: str = "4") -> subprocess.CompletedProcess[str]:
    """How a script ends that is asked to after its fourth step; it makes a folder before."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("STEP", step), *map(str, folder)],
        env=os.environ
        | {
            "PYTHONPATH": str(Path(preemption.__file__).parents[1]),
            "DDL_RECORD_DIR": str(records),
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("before", [None, '{"listens": fal', "[]", '{"listens": false, "step": 2}'])
def test_it_tells_whoever_started_it_whatever_is_there(tmp_path: Path, before: str | None):
    told = tmp_path / "rank-0.preemption.json"
    if before is not None:
        told.write_text(before)
    done = asked(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, ENDS, "")
    assert json.loads(told.read_text()) == {"listens": True, "step": 4}


def test_what_an_earlier_program_of_the_command_saved_is_no_word_on_this_one(tmp_path: Path):
    told = tmp_path / "rank-0.preemption.json"
    told.write_text('{"listens": true, "step": 2}')
    script = "from ddl_ops import preemption; preemption.listen()"
    given = {"PYTHONPATH": str(Path(preemption.__file__).parents[1])}
    given |= {"DDL_RECORD_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=os.environ | given, check=True)
    assert json.loads(told.read_text()) == {"listens": True}


def test_it_ends_well_where_the_disk_is_full_by_then(tmp_path: Path):
    # In the way of the file that is to take the place of the one before.
    done = asked(tmp_path, tmp_path / "rank-0.preemption.json.partial")
    assert (done.returncode, done.stdout, done.stderr) == (0, ENDS, "")
    told = (tmp_path / "rank-0.preemption.json").read_text()
    assert json.loads(told) == {"listens": True, "step": 4}


def test_it_saves_and_does_not_end_well_where_nobody_would_know_that_it_is_not_done(tmp_path: Path):
    (tmp_path / "rank-0.preemption.json.partial").mkdir()
    done = asked(tmp_path)
    assert (done.returncode, done.stdout) == (1, ENDS)
    place = f"{tmp_path}/rank-0.preemption.json: Is a directory"
    assert done.stderr.splitlines() == [
        f'ddl: rank 0: cannot note {{"listens": true}} in {place}',
        f'ddl: rank 0: cannot note {{"step": 4}} in {place}',
    ]


@pytest.mark.parametrize("kind", ["int64", "int32", "uint8", "array"])
def test_a_step_may_be_a_number_of_numpy(tmp_path: Path, kind: str):
    done = asked(tmp_path, step=f"__import__('numpy').{kind}(4)")
    assert (done.returncode, done.stdout, done.stderr) == (0, ENDS, "")
    assert json.loads((tmp_path / "rank-0.preemption.json").read_text())["step"] == 4


@pytest.mark.parametrize("step", ["4.0", "True", "None"])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path: Path, step: str):
    done = asked(tmp_path, step=step)
    assert done.returncode == 1 and done.stdout == ""
    told = f"TypeError: ddl.end_of_step({step}): give it the number of steps done, a whole number"
    assert told in done.stderr, done.stderr
