"""Where a Keras training was when it had to make room: whole, or nothing to go on from."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ddl_ops import mid_epoch


def save(folder: Path, step: int) -> Path:
    """As one rank of one."""
    variables = [SimpleNamespace(value=np.arange(4.0))]
    partial = mid_epoch.begin(folder, step)
    mid_epoch.write_model(partial, mid_epoch.Place(step, 1, 2, 1), variables, [])
    mid_epoch.write_own(partial, 0, 2, variables)
    mid_epoch.finish(partial, folder, step)
    return folder / f"preempted-{step}"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


# optimizers.json is missing in an earlier release's, and rank-<n>.npz of ranks on another host.
DAMAGES = [
    *((name, os.unlink) for name in ("place.json", "model.npz")),
    *(
        (name, damage)
        for name in ("place.json", "model.npz", "optimizers.json", "rank-0.npz")
        for damage in (cut, empty)
    ),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_one_is_passed_over(tmp_path, capfd, name, damage):
    """As after a power cut."""
    newer = save(tmp_path / "other", 9)
    older = save(tmp_path, 7)
    newer = newer.rename(tmp_path / newer.name)
    assert mid_epoch.newest(tmp_path) == (newer, mid_epoch.Place(9, 1, 2, 1))
    damage(newer / name)
    for _ in range(2):
        assert mid_epoch.newest(tmp_path) == (older, mid_epoch.Place(7, 1, 2, 1))
    told = f"ddl: {newer} is damaged or half written, and is passed over"
    assert capfd.readouterr().out.splitlines() == [told]
    assert save(tmp_path, 9) == newer  # in its place
    assert mid_epoch.newest(tmp_path) == (newer, mid_epoch.Place(9, 1, 2, 1))
    mid_epoch.remove(tmp_path)
    assert mid_epoch.newest(tmp_path) is None and os.listdir(tmp_path) == ["other"]


def test_a_rank_whose_own_state_is_not_there_says_so(tmp_path, capfd):
    place = mid_epoch.Place(7, 1, 2, 1)
    saved = save(tmp_path, 7)
    assert mid_epoch.read_batch(saved, 0, place) == 2 and capfd.readouterr().err == ""
    (saved / "rank-0.npz").unlink()
    assert mid_epoch.read_batch(saved, 0, place) == 2
    assert capfd.readouterr().err == (
        f"ddl: rank 0: {saved}/rank-0.npz is not there: random generators, metrics of the epoch "
        "and gradients that waited begin anew\n"
    )


def test_what_cannot_be_looked_at_is_not_taken_for_damaged(tmp_path, monkeypatch):
    """Other ranks may see it, and go on from it."""
    save(tmp_path, 7)

    def broken(*_args, **_options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(mid_epoch.zipfile, "ZipFile", broken)
    with pytest.raises(OSError, match="Input/output error"):
        mid_epoch.newest(tmp_path)


def test_who_is_killed_while_it_is_removed_leaves_none(tmp_path, monkeypatch):
    save(tmp_path, 7)
    monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_options: None)
    mid_epoch.remove(tmp_path)
    assert mid_epoch.newest(tmp_path) is None
    monkeypatch.undo()
    save(tmp_path, 7)
    mid_epoch.remove(tmp_path)
    assert not list(tmp_path.iterdir())


def test_it_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def noted(opened):
        done.append(Path(os.readlink(f"/proc/self/fd/{opened}")).name)
        fsync(opened)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", lambda *of: (done.append("named"), replace(*of)))
    save(tmp_path, 7)
    before, after = done[: done.index("named")], done[done.index("named") :]
    files = {"model.npz", "optimizers.json", "place.json", "rank-0.npz"}
    assert {*before} == {*files, ".partial-preempted-7"} and after == ["named", tmp_path.name]
