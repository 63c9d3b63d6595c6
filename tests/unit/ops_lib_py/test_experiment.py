"""What later steps find of an experiment that others go on with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ddl_ops.experiment import keep

PYTHON = Path(__file__).parents[3] / "ops_lib" / "python"


@pytest.fixture
def wide(tmp_path):
    """An experiment with a checkpoint, its note, a link and a pipe."""
    folder = tmp_path / "experiments" / "wide"
    (folder / "eval").mkdir(parents=True)
    (folder / "model.ckpt-7.index").write_text("seven")
    note = f'model_checkpoint_path: "{folder}/model.ckpt-7"\nall: "{folder}/model.ckpt-7"\n'
    (folder / "checkpoint").write_text(note)
    (folder / "eval" / "checkpoint").write_text('model_checkpoint_path: "best"\n')
    (folder / "newest").symlink_to("model.ckpt-7.index")
    os.mkfifo(folder / "pipe")
    (tmp_path / "run").mkdir()
    return folder


def test_the_copy_is_whole_and_names_its_own_checkpoints(wide, tmp_path):
    copy = tmp_path / "run" / "wide"
    keep(wide, copy)
    (wide / "model.ckpt-7.index").write_text("of another training")
    assert (copy / "newest").readlink() == Path("model.ckpt-7.index")
    assert (copy / "newest").read_text() == "seven"
    note = 'model_checkpoint_path: "model.ckpt-7"\nall: "model.ckpt-7"\n'
    assert (copy / "checkpoint").read_text() == note
    assert (copy / "eval" / "checkpoint").read_text() == 'model_checkpoint_path: "best"\n'
    assert not (copy / "pipe").exists()
    (wide / "eval" / "checkpoint").unlink()
    keep(wide, copy)
    assert not (copy / "eval" / "checkpoint").exists()
    assert [path.name for path in copy.parent.iterdir()] == ["wide"]


def test_an_experiment_that_no_script_made_is_empty(tmp_path):
    keep(tmp_path / "none", tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []


@pytest.mark.parametrize("code", [0, 3])
def test_a_job_keeps_it_before_it_lets_others_in(wide, tmp_path, code):
    copy, lock = tmp_path / "run" / "wide", tmp_path / ".wide.lock"
    script = (
        "import fcntl, sys\n"
        f"with open({str(lock)!r}) as lock:\n"
        "    try:\n"
        "        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except BlockingIOError:\n"
        f"        sys.exit({code})\n"
        "sys.exit(5)\n"
    )
    words = ["--keep", str(wide), str(copy), str(lock), "one/train-1", "--"]
    done = subprocess.run(
        [sys.executable, "-m", "ddl_ops.locked", *words, sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(PYTHON)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert copy.is_dir() == (code == 0)
    assert lock.read_text().startswith("one/train-1 on ")
