from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from ddl_airflow.core.errors import FileRefused, SettingInvalid
from ddl_airflow.core.layout import REMOVING, RunLayout, is_experiment, training_id

RUN = "manual__2026-11-20T20:15:00.123456+00:00"


def test_training_id_is_the_same_for_every_try_and_begins_with_the_dag():
    assert training_id("mnist", RUN, "site") == training_id("mnist", RUN, "site")
    assert training_id("mnist", RUN, "site").startswith("mnist-manual-2026-11-20t20-15-00")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "r1", "s"), ("a", "r2", "s")),
        (("a", "r1", "s"), ("b", "r1", "s")),
        (("a", "r1", "s"), ("a", "r1", "t")),  # two Airflows, one bucket
        (("a", "r1", "s"), ("r1", "s", "a")),
        (("a-b", "c", "s"), ("a", "b-c", "s")),
        (("a", "x/y", "s"), ("a", "x-y", "s")),  # the same slug
        (("a", "R", "s"), ("a", "r", "s")),
        # differ where the slug is cut
        (("a", "x" * 100 + "1", "s"), ("a", "x" * 100 + "2", "s")),
    ],
)
def test_training_ids_of_two_runs_differ(one, other):
    assert training_id(*one) != training_id(*other)


@pytest.mark.parametrize("run_id", [RUN, "../../etc", "a b", "Übung", "測試", "x" * 250, "-", ""])
def test_training_id_is_one_folder_name(run_id):
    name = training_id("d" * 200, run_id, "site")
    assert len(training_id("ä" * 100, run_id, "site").encode()) <= 255
    assert re.fullmatch(r"[A-Za-z0-9_.-]+-[0-9a-f]{32}", name)  # 128 bits
    assert len(name) <= 255


def test_layout_keeps_all_but_the_cache_in_the_run(tmp_path):
    layout = RunLayout(tmp_path, "mnist", "mnist-1")
    assert layout.root == tmp_path / "runs" / "mnist" / "mnist-1"
    assert layout.cache == tmp_path / "cache"
    names = "code staged result checkpoints model logs state kept progress transform_report".split()
    places = [getattr(layout, name) for name in names] + [layout.records(1), layout.records(2)]
    assert all(layout.root in place.parents for place in places)
    assert len(set(places)) == len(places)


def test_create_makes_what_ranks_write_to_and_keeps_what_is_there(tmp_path):
    layout = RunLayout(tmp_path / "not yet", "mnist", "mnist-1")
    layout.create()
    (layout.checkpoints / "model-10").write_text("kept")
    layout.create()
    for folder in (layout.code, layout.result, layout.checkpoints, layout.logs, layout.state):
        assert folder.is_dir()
    assert not layout.staged.exists()  # staging renames a whole folder there
    assert (layout.checkpoints / "model-10").read_text() == "kept"


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_a_workspace_is_closed_to_others_unless_the_site_has_made_it(tmp_path, umask):
    before = os.umask(umask)
    try:
        RunLayout(tmp_path / "new" / "ddl", "mnist", "mnist-1").create()
        (tmp_path / "site").mkdir()
        (tmp_path / "site").chmod(0o750)
        RunLayout(tmp_path / "site", "mnist", "mnist-1").create()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("new/ddl", "site")]
    assert modes == [0o700, 0o750]


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a/b", "-a", "a b", "a\n", "x" * 201])
def test_what_is_no_folder_name_is_no_experiment(name):
    assert not is_experiment(name)
    assert is_experiment("A-1_b.c")


def test_whoever_is_killed_while_it_starts_again_loses_nothing(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    for killed_at in range(4):
        layout = RunLayout(tmp_path / str(killed_at), "mnist", "mnist-1")
        layout.create()
        layout.experiment.mkdir(parents=True)
        for path in (layout.checkpoints / "model-10", layout.progress, layout.experiment / "event"):
            path.write_text("of the training before")
        layout.restart_requested.touch()
        moves, replace = iter(range(100)), Path.replace

        def moved(self, target):
            if next(moves) == killed_at:  # noqa: B023
                raise Killed
            return replace(self, target)  # noqa: B023

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", moved)
            try:
                layout.restart()
            except Killed:
                layout.create()  # the next try
                layout.restart()
        kept = {p.relative_to(layout.replaced).as_posix() for p in layout.replaced.rglob("*")}
        assert {"result/checkpoints/model-10", "progress.jsonl", "mnist-1/event"} <= kept
        assert not layout.progress.exists() and list(layout.checkpoints.iterdir()) == []


def test_that_a_training_has_begun_to_start_again_is_on_disk_before_anything_moves(
    tmp_path, monkeypatch
):
    """A host that crashes then leaves no empty note, by which the moved results would go."""
    layout = RunLayout(tmp_path / "w", "mnist", "mnist-1")
    layout.create()
    layout.restart_requested.touch()
    done, fsync, replace = [], os.fsync, Path.replace

    def synced(descriptor):
        done.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def moved(self, target):
        done.append("moved")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", moved)
    layout.restart()
    assert "moved" in done
    note, folder = done[: done.index("moved")]
    assert Path(note).parent == Path(folder) == layout.restart_requested.parent


def test_a_training_starts_again_though_its_ranks_left_what_nobody_else_may_delete(trainer):
    """Ranks of a user of their own, and an Airflow that is not root: here with changed parts."""
    (trainer.place / "w").mkdir()
    os.chown(trainer.place / "w", trainer.uid, trainer.gid)
    layout = RunLayout(trainer.place / "w", "mnist", "mnist-1")
    with trainer.acting():
        layout.create()
        for number in range(3):
            (layout.result / f"step-{number}").touch()
            layout.restart_requested.touch()
            layout.restart()
            layout.restart_requested.unlink()
            kept = layout.replaced / "result"
            assert (kept / f"step-{number}").exists()
            os.seteuid(0)
            (kept / "private").mkdir(mode=0o700)
            (kept / "private" / "file").touch()
            os.seteuid(trainer.uid)
        left = [path.name for path in layout.root.glob(".*")]
    assert len(left) == 2 and all(name.startswith(REMOVING) for name in left)


def test_ranks_of_another_user_go_through_a_workspace_that_is_not_airflows_own(trainer):
    """An administrator has made it, with the rights that they need."""
    workspace = trainer.place / "w"
    workspace.mkdir()
    os.chown(workspace, 0, trainer.gid)
    layout = RunLayout(workspace, "mnist", "mnist-1", ranks_group=trainer.gid)
    workspace.chmod(0o2770)
    with trainer.acting(), pytest.raises(SettingInvalid, match=f"chmod o\\+x {workspace}"):
        layout.create()
    workspace.chmod(0o2771)
    with trainer.acting():
        layout.create()
    assert layout.result.is_dir() and stat.S_IMODE(workspace.stat().st_mode) == 0o2771


@pytest.fixture
def given(trainer):
    """A run's layout whose ranks are that user's, and what a step has put into its folder."""
    layout = RunLayout(trainer.place / "w", "mnist", "mnist-1", ranks_group=trainer.gid)
    layout.create()
    layout.open_to_ranks()
    folder = layout.root / "fresh"
    (folder / "lib").mkdir(parents=True)
    for name in ("train.py", "lib/net.py"):
        (folder / name).touch(mode=0o640)
    return layout, folder


def test_what_is_given_to_ranks_is_theirs_by_its_group(given, trainer):
    layout, folder = given
    (folder / "train.py").chmod(0o755)
    layout.give_to_ranks(folder)
    found = {path.name: path.stat() for path in (folder, *folder.rglob("*"))}
    assert {one.st_gid for one in found.values()} == {trainer.gid}
    modes = {name: stat.S_IMODE(one.st_mode) for name, one in found.items()}
    assert modes == {"fresh": 0o2770, "lib": 0o2770, "train.py": 0o770, "net.py": 0o660}


@pytest.mark.parametrize("plant", [os.symlink, os.link])
@pytest.mark.parametrize("name", ["train.py", "lib/net.py"])
def test_what_ranks_put_where_a_file_was_is_not_given_to_them(given, trainer, plant, name):
    layout, folder = given
    victim = trainer.place / "airflow.cfg"
    victim.touch(mode=0o600)
    before = victim.stat()
    layout.give_to_ranks(folder)
    with trainer.acting():  # a process that an ended step has left
        (folder / name).unlink()
        if plant is os.symlink:
            plant(victim, folder / name)
    if plant is os.link:  # nobody else may, where the kernel protects hard links
        plant(victim, folder / name)
    with pytest.raises(FileRefused, match=name):
        layout.give_to_ranks(folder)
    after = victim.stat()
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)


def test_nothing_of_a_folder_is_open_to_ranks_before_all_in_it_has_its_rights(given, monkeypatch):
    layout, folder = given
    order, chmod = [], os.fchmod

    def noted(opened, mode):
        order.append(Path(os.readlink(f"/proc/self/fd/{opened}")).name)
        chmod(opened, mode)

    monkeypatch.setattr(os, "fchmod", noted)
    layout.give_to_ranks(folder)
    assert order == ["net.py", "lib", "train.py", "fresh"]
