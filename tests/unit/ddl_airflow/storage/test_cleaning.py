from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest

from ddl_airflow.core import removal
from ddl_airflow.core.errors import NoSpace, SettingInvalid, StagingError
from ddl_airflow.core.layout import RunLayout, training_id, trainings_file
from ddl_airflow.core.removal import remove_tree
from ddl_airflow.lineage.record import Run, fix_run, keep_so_far
from ddl_airflow.storage import cleaning
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.cleaning import Rules, clean_workspace, rules
from ddl_airflow.storage.filesystem import FolderStore, alone_in, lock_of
from ddl_airflow.storage.staging import stage
from tests.integration.disk import tiny_disk
from tests.limits import until, within

KEEP = Rules(runs=timedelta(days=30))


def age(path, days):
    """Makes all in a folder, and itself, look as if it was last changed then."""
    then = time.time() - days * 86400
    for one in [*path.rglob("*"), path]:
        os.utime(one, (then, then), follow_symlinks=False)


@pytest.fixture
def run(tmp_path):
    """run(name, days=) -> its layout: a run that ended so many days ago."""

    def make(name, days=40.0, dag_id="digits"):
        layout = RunLayout(tmp_path, dag_id, training_id(dag_id, name, "site"))
        layout.create()
        layout.experiment.mkdir(parents=True)
        (layout.experiment / "checkpoint").write_text("7")
        (layout.checkpoints / "model-7").write_text("weights")
        (layout.kept / "run.json").write_text(json.dumps({"run_id": name}))
        for folder in (layout.root, layout.experiment):
            age(folder, days)
        return layout

    return make


def left(tmp_path):
    """The runs and experiments that are there, in words of the tests."""
    folders = (*tmp_path.glob("runs/*/*"), *tmp_path.glob("experiments/[!.]*-*"))
    return sorted(path.name.split("-")[-2] for path in folders)


def test_an_old_run_goes_with_its_own_experiment_and_a_newer_one_stays(run, tmp_path):
    run("old"), run("new", days=20)
    wide = tmp_path / "experiments" / "wide"
    wide.mkdir()
    age(wide, 400)
    assert list(clean_workspace(tmp_path, Rules())) == []
    would = list(clean_workspace(tmp_path, KEEP, dry_run=True))
    assert [one.what for one in would] == ["run", "run"]
    assert left(tmp_path) == ["new", "new", "old", "old"]
    assert list(clean_workspace(tmp_path, KEEP)) == would
    assert list(clean_workspace(tmp_path, KEEP)) == []
    assert left(tmp_path) == ["new", "new"]
    assert not [*tmp_path.glob("experiments/.*.lock")]  # each training has one
    assert wide.is_dir()  # it has a name, there to be gone on with
    notes = [trainings_file(tmp_path, name) for name in ("wide", "narrow")]
    notes[0].parent.mkdir()
    for note in notes:
        note.write_text("{}")
    (removed,) = clean_workspace(tmp_path, Rules(experiments=timedelta(days=90)))
    assert (removed.what, removed.place) == ("experiment", str(wide))
    # Who trained in it before is of no further interest.
    assert [note.exists() for note in notes] == [False, True]


def test_a_file_of_several_names_takes_its_room_once(run, tmp_path):
    """As scripts link the best checkpoint."""
    layout = run("old")
    before = sum(one.nbytes for one in clean_workspace(tmp_path, KEEP, dry_run=True))
    weights = layout.result / "weights"
    weights.write_bytes(bytes(5000))
    os.link(weights, layout.result / "best")
    os.link(weights, layout.experiment / "kept")
    age(layout.root, 40), age(layout.experiment, 40)
    found = list(clean_workspace(tmp_path, KEEP, dry_run=True))
    assert sum(one.nbytes for one in found) - before == 5000, found


def test_what_is_mounted_in_a_run_is_kept_with_the_run(run, mounted, tmp_path, caplog):
    """A person has mounted other data where the training looked for it."""
    of_others = tmp_path / "of others"
    (of_others / "deep").mkdir(parents=True)
    (of_others / "deep" / "only copy").write_text("1")
    layout, young, gone = run("old"), run("young"), run("gone")
    named = tmp_path / "experiments" / "wide"
    half = layout.root.with_name(".removing-0123")  # of a cleaning that was killed
    inside = layout.result / "in a run"
    for place in (inside, named / "data", half / "a", young.root / ".code-x"):
        mounted(of_others, place)
    age(young.root, 20), age(layout.root, 40), age(named, 400)  # of_others, too
    kept = replace(KEEP, experiments=timedelta(days=90))
    assert {one.what for one in clean_workspace(tmp_path, kept, dry_run=True)} == {"run"}
    removed = list(clean_workspace(tmp_path, kept))
    assert {one.place for one in removed} == {str(gone.root), str(gone.experiment)}
    assert (of_others / "deep" / "only copy").read_text() == "1"
    assert layout.experiment.is_dir() and named.is_dir() and young.root.is_dir()
    said = " ".join(caplog.messages)
    assert f"{layout.root} is kept: something is mounted at {inside}. Unmount it" in said


def test_what_is_mounted_while_it_is_removed_is_not_emptied(mounted, tmp_path):
    """Whatever was looked at before."""
    of_others = tmp_path / "others"
    of_others.mkdir()
    (of_others / "only copy").write_text("1")
    for place in (tmp_path / "a", tmp_path / "b" / "c" / "d"):
        mounted(of_others, place)
    (tmp_path / "b" / "c" / "file").write_text("")
    (tmp_path / "b" / "e").mkdir()
    for folder in (tmp_path / "a", tmp_path / "b"):
        with pytest.raises(OSError, match="something is mounted there: unmount it"):
            remove_tree(folder)
    assert (of_others / "only copy").exists()
    left = [path.relative_to(tmp_path).as_posix() for path in (tmp_path / "b").rglob("*")]
    assert sorted(left) == ["b/c", "b/c/d", "b/c/d/only copy"]


def test_another_file_system_is_told_from_a_bind_mount_by_the_kernel(tmp_path, monkeypatch):
    """Where nothing may be mounted to try it: by the id of the mount alone."""
    (tmp_path / "run" / "mounted").mkdir(parents=True)
    (tmp_path / "run" / "mounted" / "only copy").write_text("1")
    real = removal._mount_of

    def another(opened):
        device, mount = real(opened)
        assert mount.isdecimal()
        path = os.readlink(f"/proc/self/fd/{opened}")
        return device, f"{mount}1" if path.endswith("mounted") else mount

    monkeypatch.setattr(removal, "_mount_of", another)
    with pytest.raises(OSError, match="unmount it"):
        remove_tree(tmp_path / "run")
    assert (tmp_path / "run" / "mounted" / "only copy").exists()


def test_a_folder_that_may_be_read_and_not_entered_keeps_no_other_from_being_removed(trainer):
    top = trainer.place / "own" / "run"
    for name in "abcdefgh":
        (top / name).mkdir(parents=True)
        (top / name / "file").write_text("")
    for path in (top.parent, top, *top.rglob("*")):
        os.chown(path, trainer.uid, trainer.gid)
    (top / "d").chmod(0o444)
    with trainer.acting(), pytest.raises(PermissionError, match="/d'"):
        remove_tree(top)
    assert [path.name for path in top.iterdir()] == ["d"]


def test_folders_deeper_than_a_path_may_be_are_removed(run, tmp_path):
    """A script that makes them would else end each cleaning of the site."""
    deep, other = run("deep"), run("other")
    folder = os.open(deep.result, os.O_RDONLY)
    for _ in range(2500):
        os.mkdir("d", dir_fd=folder)
        inside = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inside
    os.close(folder)
    for one in (deep.result, deep.result / "d"):
        os.utime(one, (0, time.time() - 40 * 86400))
    try:
        list(clean_workspace(tmp_path, KEEP))
        assert not deep.root.exists() and not other.root.exists()
    finally:  # pytest could not remove them either
        subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


def test_the_longest_names_keep_nothing_from_being_removed(run, tmp_path):
    """Of a folder as long as a name may be, that of its lock would be longer."""
    of_long, of_short = run("manual__2026-11-20T20:15:00", dag_id="a" * 200), run("old")
    assert len(of_long.training_id) > 250
    assert list(clean_workspace(tmp_path, KEEP, dry_run=True)) != []
    list(clean_workspace(tmp_path, KEEP))
    assert not of_long.root.exists() and not of_short.root.exists()


def test_a_script_cannot_keep_a_run_by_a_time_that_is_to_come(run, tmp_path, monkeypatch):
    """Of what it wrote, or of a folder: 40 days later that is as old as it is."""
    for number, name in enumerate(("checkpoints", "experiment", "code")):
        layout = run(f"odd{number}", days=0)
        place = getattr(layout, name)
        place = next(place.iterdir(), place)
        os.utime(place, (time.time() + 4000 * 86400,) * 2)
    assert list(clean_workspace(tmp_path, KEEP)) == []
    later = time.time() + 40 * 86400
    monkeypatch.setattr(cleaning.time, "time", lambda: later)
    list(clean_workspace(tmp_path, KEEP))
    assert left(tmp_path) == []


def test_a_run_in_use_stays_however_old_it_is(run, tmp_path):
    works, waits, open_run, reported = (run(name) for name in ("works", "waits", "open", "told"))
    waits.scheduled_job.write_text("{}")  # for a scheduler, or for days in its queue
    (reported.logs / "rank-0.log").write_text("a step")
    age(waits.root, 40)

    def is_open(dag_id, run_id):
        assert dag_id == "digits"
        return run_id == "open"

    for place in (works.experiment, works.earlier_kept_alone):
        with alone_in(place, "a try that works"):
            assert list(clean_workspace(tmp_path, KEEP, is_open, dry_run=True)) == []
            assert list(clean_workspace(tmp_path, KEEP, is_open)) == []
    assert left(tmp_path) == sorted(2 * ["works", "waits", "open", "told"])
    list(clean_workspace(tmp_path, KEEP))  # the work is done, and the run is no more
    assert not works.root.exists() and not open_run.root.exists()


def test_a_run_whose_job_was_cancelled_goes_once_its_scheduler_says_so(run, tmp_path):
    """Nobody takes the note of that job away: its task was ended, and none came after."""
    names = ("gone", "waits", "open", "young")
    gone, waits, open_run, young = (run(name, 40.0 if name != "young" else 20) for name in names)
    for layout in (gone, waits, open_run, young):
        layout.scheduled_job.write_text("{}")
        age(layout.root, 20 if layout is young else 40)
    asked = []

    def may_run(note):
        asked.append(note)
        return note == waits.scheduled_job

    def is_open(dag_id, run_id):
        return run_id == "open"

    for dry_run in (True, False):
        removed = clean_workspace(tmp_path, KEEP, is_open, may_run, dry_run=dry_run)
        assert {one.place for one in removed} == {str(gone.root), str(gone.experiment)}
    assert left(tmp_path) == sorted(2 * ["open", "waits", "young"])
    # A run that stays is nobody's business.
    assert {*asked} == {gone.scheduled_job, waits.scheduled_job}


def test_a_named_experiment_stays_for_a_job_until_its_scheduler_says_that_it_has_ended(
    run, tmp_path
):
    rules = Rules(experiments=timedelta(days=30))
    for name in ("gone", "waits", "young"):
        layout = run(name, 40.0 if name != "young" else 20)
        named = replace(layout, experiment_id=f"of-{name}")
        fix_run(named, name, {}, {})
        layout.scheduled_job.write_text("{}")
        named.experiment.mkdir()
        for folder in (layout.root, named.experiment):
            age(folder, 20 if folder == layout.root and name == "young" else 40)
    (gone,) = clean_workspace(tmp_path, rules, may_run=lambda note: "waits" in str(note))
    assert gone.place == str(tmp_path / "experiments" / "of-gone")


def test_a_run_of_a_named_experiment_stays_while_its_process_works(run, tmp_path):
    works, ended = run("works"), run("ended")
    wide = replace(works, experiment_id="wide")
    for layout in (works, ended):
        fix_run(replace(layout, experiment_id="wide"), "run", {}, {})
        age(layout.root, 40)
    with alone_in(wide.experiment, f"{works.training_id}/1"):
        would = list(clean_workspace(tmp_path, KEEP, dry_run=True))
        assert [one.place for one in would][:1] == [str(ended.root)]
        list(clean_workspace(tmp_path, KEEP))
        assert works.root.is_dir() and not ended.root.exists()
    wide.experiment.mkdir()
    list(clean_workspace(tmp_path, KEEP))
    assert not works.root.exists() and wide.experiment.is_dir()


def test_a_run_stays_while_another_is_to_go_on_with_its_experiment(run, tmp_path):
    """Somebody has triggered that with its name: it stages, waits, or has saved nothing yet."""
    old, young, ended = run("old"), run("young", days=0.1), run("ended")
    fix_run(replace(young, experiment_id=old.training_id), "young", {}, {})

    def is_open(dag_id, run_id):
        return run_id == "young"

    would = list(clean_workspace(tmp_path, KEEP, is_open, dry_run=True))
    assert {one.place for one in would} == {str(ended.root), str(ended.experiment)}
    assert list(clean_workspace(tmp_path, KEEP, is_open)) == would
    assert old.root.is_dir() and old.experiment.is_dir()
    list(clean_workspace(tmp_path, KEEP))
    assert not old.root.exists() and not old.experiment.exists()


def test_a_run_stays_while_another_works_in_its_experiment(run, tmp_path):
    """By hand, of which no Airflow says that it is open."""
    old, young = run("old"), run("young", days=0.1)
    with alone_in(old.experiment, f"{young.training_id}/train-1"):
        for dry_run in (True, False):
            assert list(clean_workspace(tmp_path, KEEP, dry_run=dry_run)) == []
    assert old.root.is_dir() and old.experiment.is_dir()
    list(clean_workspace(tmp_path, KEEP))
    assert not old.root.exists() and not old.experiment.exists()


def test_a_named_experiment_stays_while_a_run_is_to_go_on_with_it(run, tmp_path):
    """Its training is in a queue, or waits for a pool, and works nowhere yet."""
    for name in ("queued", "open", "ended", "failed"):
        layout = run(name, days=0.1 if name != "ended" else 3)
        named = replace(layout, experiment_id=f"of-{name}")
        fix_run(named, name, {}, {})
        named.experiment.mkdir()
        age(named.experiment, 40)
        if name == "queued":
            layout.scheduled_job.write_text("{}")
    rules = Rules(experiments=timedelta(days=30))

    def is_open(dag_id, run_id):
        return run_id == "open"

    for dry_run in (True, False):
        gone = clean_workspace(tmp_path, rules, is_open, dry_run=dry_run)
        places = sorted(os.path.basename(one.place) for one in gone)
        assert places == ["of-ended", "of-failed"]
    assert (tmp_path / "experiments" / "of-queued").is_dir()


def test_a_run_stays_while_it_stages_for_longer_than_runs_are_kept(run, tmp_path):
    """``run.json`` comes with the data; until then the record so far says whose run it is."""
    due = datetime(2026, 11, 20, tzinfo=UTC)
    for name in ("stages", "ended"):
        layout = run(name)
        (layout.kept / "run.json").unlink()
        named = replace(layout, experiment_id=f"of-{name}")
        named.experiment.mkdir()
        told = {"state": "running", "step": "stage_data", "try": 1, "at_work": True}
        keep_so_far(named, Run(dag_id="digits", run_id=name, type="manual", due=due), told)
        for folder in (layout.root, named.experiment):
            age(folder, 40)
    own = run("own")
    (own.kept / "run.json").unlink()
    keep_so_far(own, Run(dag_id="digits", run_id="own", type="manual", due=due), told)
    age(own.root, 40)

    def is_open(dag_id, run_id):
        return dag_id == "digits" and run_id in ("stages", "own")

    rules = Rules(runs=timedelta(days=30), experiments=timedelta(days=30))
    list(clean_workspace(tmp_path, rules, is_open))
    there = {path.name for path in (tmp_path / "experiments").iterdir()}
    assert {name for name in there if not name.startswith(".")} == {
        *("of-stages", own.training_id, training_id("digits", "stages", "site"))
    }
    runs = {path.name for path in tmp_path.glob("runs/*/*")}
    assert runs == {own.training_id, training_id("digits", "stages", "site")}


def test_a_full_disk_is_cleaned(tmp_path):
    """Whoever cleans leaves a name where others look for it, if there is room."""
    with tiny_disk(tmp_path / "disk", 8 << 20) as disk:
        layouts = [RunLayout(disk, "digits", training_id("digits", n, "site")) for n in "ab"]
        for layout in layouts:
            layout.create()
            (layout.kept / "run.json").write_text("{}")
            age(layout.root, 40)
        with open(disk / "others", "ab", buffering=0) as others, suppress(OSError):
            while True:
                others.write(b"x" * 4096)
        # Who trains needs the name: cleaning tells by it who works in an experiment.
        with pytest.raises(NoSpace), alone_in(disk / "place", "a training"):
            pass
        assert len(list(clean_workspace(disk, KEEP))) == 2
        assert not any(layout.root.exists() for layout in layouts)


def test_folders_that_no_path_reaches_stop_nobodys_cleaning(run, tmp_path):
    """As a rank makes them, with ``cd``, deeper than a path may be long."""
    deep = run("a-deep").experiment
    run("b-next")
    here = os.open(deep, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=here)
        deeper = os.open("d" * 250, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    then = time.time() - 40 * 86400
    for path in (deep / ("d" * 250), deep):
        os.utime(path, (then, then))
    wide = tmp_path / "experiments" / "wide"
    wide.mkdir()
    age(wide, 400)
    keep = Rules(runs=KEEP.runs, experiments=KEEP.runs)
    removed = [one.what for one in clean_workspace(tmp_path, keep)]
    assert "run" in removed and "experiment" in removed
    assert not wide.exists() and "next" not in left(tmp_path)


def test_folders_that_ranks_keep_private_stop_nobodys_cleaning(run, tmp_path, monkeypatch):
    """Ranks of another user may have put one of their own in place of ``checkpoints``."""
    private = run("a-private").checkpoints
    run("b-next")
    scandir = os.scandir

    def refusing(path="."):
        if not isinstance(path, int) and os.fspath(path) == str(private):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    list(clean_workspace(tmp_path, KEEP))
    assert left(tmp_path) == []


LEFT = (".code-abc", ".ddl-part-abc", ".removing-abc", "experiment/.removing-def")


def test_what_killed_tasks_left_goes_and_what_is_being_made_stays(run, tmp_path):
    killed, works = run("killed"), run("works", days=0)
    for layout in (killed, works):
        (layout.root / ".code-abc").mkdir()
        (layout.root / ".ddl-part-abc").mkdir()
        (layout.root / ".removing-abc").mkdir()
        (layout.root / "experiment" / ".removing-def").mkdir(parents=True)
    age(killed.root, 3)
    for keep in (Rules(), KEEP):
        found = [one.place for one in clean_workspace(tmp_path, keep, dry_run=True)]
        assert found == [str(killed.root / name) for name in LEFT]
    list(clean_workspace(tmp_path, Rules()))
    assert list(clean_workspace(tmp_path, Rules())) == []
    assert killed.checkpoints.is_dir()


def test_whoever_is_killed_while_cleaning_leaves_runs_whole_or_for_the_next(
    run, tmp_path, monkeypatch
):
    class Killed(BaseException):
        pass

    def files(layout):
        return {path.name for path in layout.root.rglob("*") if path.is_file()}

    whole = run("whole", days=1)
    expected = files(whole)
    with alone_in(whole.experiment, "a try"):
        pass
    trainings_file(tmp_path, whole.training_id).parent.mkdir()
    for killed_at in range(9):
        # The name of a lock is the end of the training's, where that is long.
        layout = run(f"old{killed_at}", dag_id="digits" if killed_at % 2 else "a" * 200)
        note = trainings_file(tmp_path, layout.training_id)
        if killed_at % 2:
            note.write_text("{}")
        done = iter(range(100))

        def dying(operation, *args, **kwargs):
            if next(done) == killed_at:  # noqa: B023
                raise Killed
            operation(*args, **kwargs)

        with monkeypatch.context() as patched:
            for name in ("unlink", "rename"):
                patched.setattr(cleaning.os, name, partial(dying, getattr(os, name)))
            try:
                list(clean_workspace(tmp_path, KEEP))
            except Killed:
                assert files(layout) in (set(), expected)
        list(clean_workspace(tmp_path, KEEP))
        assert left(tmp_path) == ["whole", "whole"]
        assert not list(tmp_path.rglob(".removing-*"))
        assert [*tmp_path.glob("experiments/.*.lock")] == [lock_of(whole.experiment)]
        assert not note.exists()


def test_the_cache_keeps_to_its_budget_and_what_runs_use(run, tmp_path, monkeypatch):
    store, cache = FolderStore(tmp_path / "input"), Cache(tmp_path / "cache")
    for number in range(5):
        store.put_bytes(f"{number}", bytes(1000))
    objects = {obj.key: obj for obj in store.list()}
    stage(store, cache, tmp_path / "elsewhere")  # by no run of this workspace
    layout = run("uses", days=1)
    store.delete(["3", "4"])
    stage(store, cache, layout.staged)
    for number in range(5):  # 4 was used last
        when = time.time() - (50 - number) * 86400
        blob = cache.path(store, objects[f"{number}"])
        os.utime(cache._facts_of(blob), (when, when))
        os.utime(blob, ns=(int(when * 1e9), blob.stat().st_mtime_ns))

    def held():
        return {key for key, obj in objects.items() if cache.path(store, obj).exists()}

    def clean(nbytes):
        return list(clean_workspace(tmp_path, Rules(cache_bytes=nbytes)))

    assert clean(5000) == []
    monkeypatch.setattr(cleaning, "_STAGED_S", 0.2)
    with cache.in_use():  # somebody stages: what is there may be needed in a moment
        assert clean(5000) == []
        with pytest.raises(StagingError, match=r"cache: data are being staged.*2,000 bytes"):
            clean(0)
        dry = clean_workspace(tmp_path, Rules(cache_bytes=0), dry_run=True)
        assert [one.nbytes for one in dry] == [1000, 1000]
    assert held() == {"0", "1", "2", "3", "4"}
    assert [one.nbytes for one in clean(4500)] == [1000]
    assert held() == {"0", "1", "2", "4"}
    clean(0)
    assert held() == {"0", "1", "2"}
    with cache.in_use():  # nothing could go anyway: nobody waits, and nothing fails
        assert clean(0) == []
    for obj in objects.values():
        cache.holds(store, obj)
    for key in held():  # who looks for it uses it
        assert time.time() - cache.used(cache.path(store, objects[key])) < 100


def test_cleaning_waits_for_the_end_of_a_staging(tmp_path, caplog):
    store, cache = FolderStore(tmp_path / "input"), Cache(tmp_path / "cache")
    store.put_bytes("a", bytes(1000))
    stage(store, cache, tmp_path / "elsewhere")
    with ThreadPoolExecutor(1) as pool:
        with cache.in_use():
            cleaned = pool.submit(lambda: list(clean_workspace(tmp_path, Rules(cache_bytes=0))))
            until(lambda: "data are being staged" in caplog.text, 10)
        assert [one.nbytes for one in cleaned.result(within(10))] == [1000]
    assert caplog.text.count("data are being staged: waiting") == 1


def test_what_another_worker_has_just_sent_goes_last(tmp_path):
    """Its job has no links yet; rsync gives it the time of change that the sender's has."""
    store, cache = FolderStore(tmp_path / "input"), Cache(tmp_path / "cache")
    staged, sent = store.put_bytes("staged", bytes(1000)), store.put_bytes("sent", bytes(1000))
    cache.fetch(store, staged, lambda nbytes: None)
    days_ago, weeks_ago = time.time() - 3 * 86400, time.time() - 30 * 86400
    for path in (cache.path(store, staged), cache._facts_of(cache.path(store, staged))):
        os.utime(path, (days_ago, days_ago))
    blob = cache.path(store, sent)
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(bytes(1000))
    os.utime(blob, (time.time(), weeks_ago))
    (gone,) = clean_workspace(tmp_path, Rules(cache_bytes=1000))
    assert gone.place == str(cache.path(store, staged)) and blob.exists()


def test_parts_of_an_object_stay_for_the_next_try_and_not_for_ever(tmp_path):
    store, cache = FolderStore(tmp_path / "input"), Cache(tmp_path / "cache")
    blob = cache.path(store, store.put_bytes("large", b"1"))
    blob.parent.mkdir(parents=True)
    parts = [blob.with_name(f"{blob.name}.{name}.part") for name in ("bytes", "bytes.done")]
    for part in parts:
        part.write_bytes(b"1")
    assert list(clean_workspace(tmp_path, Rules(cache_bytes=0))) == []
    age(blob.parent, 3)
    gone = list(clean_workspace(tmp_path, Rules(cache_bytes=0)))
    assert {one.place for one in gone} == {str(part) for part in parts}
    assert not any(part.exists() for part in parts)


def test_what_killed_stagers_left_in_the_cache_goes_without_a_rule(tmp_path):
    """And whole blobs stay; and all does while somebody stages."""
    store, cache = FolderStore(tmp_path / "input"), Cache(tmp_path / "cache")
    blob = cache.path(store, store.put_bytes("a", b"1"))
    left = [blob.with_name(f"{blob.name}.bytes.part")]
    left += [cache.root / "archives" / name for name in ("blobs/ab/abc", "unpacking/abc-def")]
    for path in (blob, *left):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")
    assert list(clean_workspace(tmp_path, Rules())) == []
    age(cache.root, 3)
    with cache.in_use():
        assert list(clean_workspace(tmp_path, Rules())) == []
    for dry_run in (True, False):
        gone = list(clean_workspace(tmp_path, Rules(), dry_run=dry_run))
        assert {one.place for one in gone} == {str(path) for path in left}
    assert blob.exists() and not any(path.exists() for path in left)


@pytest.mark.parametrize("what", ["folder", "link"])
def test_nothing_is_evicted_where_it_cannot_be_seen_who_uses_it(run, tmp_path, monkeypatch, what):
    """As on a network file system whose server has been replaced."""
    store, cache = FolderStore(tmp_path / "input"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a/b", bytes(1000))
    layout = run("uses", days=1)
    stage(store, cache, layout.staged)
    stale = {"folder": layout.staged / "a", "link": layout.staged / "a" / "b"}[what]

    def of(call):
        def failing(path, *args, **kwargs):
            if not isinstance(path, int) and os.fspath(path) == str(stale):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return call(path, *args, **kwargs)

        return failing

    with monkeypatch.context() as patched:
        for name in ("scandir", "lstat", "readlink"):
            patched.setattr(os, name, of(getattr(os, name)))
        with pytest.raises(StagingError, match=f"{stale}: Stale file handle"):
            list(clean_workspace(tmp_path, Rules(cache_bytes=0)))
    assert cache.path(store, obj).exists()
    (layout.staged / "circle").symlink_to("circle")
    (layout.staged / "nowhere").symlink_to("none")
    assert list(clean_workspace(tmp_path, Rules(cache_bytes=0))) == []
    assert cache.path(store, obj).exists()


def test_staging_does_not_wait_for_who_reads_what_was_cleaned(tmp_path):
    """As `ddl-airflow clean | less`, which is left open on the first page."""
    store, cache = FolderStore(tmp_path / "input"), Cache(tmp_path / "cache")
    for number in range(3):
        store.put_bytes(f"{number}", bytes(1000))
    stage(store, cache, tmp_path / "elsewhere")
    page = clean_workspace(tmp_path, Rules(cache_bytes=0))
    assert next(page).what == "cached object"
    with cache.in_use(wait_s=0):
        assert len(list(page)) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("30", "", ""), r"\[ddl\] keep_runs: '30' is not a duration"),
        (("1h", "", ""), r"keep_runs: 1h is less than two days"),
        (("", "x", ""), r"keep_experiments: 'x' is not a dur"),
        (("", "", "500GB"), r"cache_size: '500GB' is not a size"),
    ],
)
def test_a_rule_that_cannot_be_read_is_named_and_nothing_cleaned(given, words):
    with pytest.raises(SettingInvalid, match=words):
        rules(*given)
    assert rules("", " ", "") == Rules()
    assert rules("30d", "365d", "1Ki") == Rules(timedelta(days=30), timedelta(days=365), 1024)
