from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from functools import partial
from itertools import count

import pytest
from airflow.serialization.serialized_objects import DagSerialization

from ddl_airflow import cli
from ddl_airflow.commands import workspaces
from ddl_airflow.core.errors import AccessDenied, NoSuchModel, StagingError
from ddl_airflow.lineage.index import add, lost, read_index
from ddl_airflow.lineage.production import LATEST, PRODUCTION, point, promote, read_pointer
from ddl_airflow.lineage.retention import clean_results
from ddl_airflow.operators.clean import clean_dag
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.marker import sealed
from ddl_airflow.storage.publication import missing_from, publish, restore, retire
from tests.integration.disk import tiny_disk

DAY_S = 86400.0


class Killed(BaseException):
    pass


class Dying(FolderStore):
    """Kills whoever is about to change the store for the n-th time."""

    left = 10**9

    def at(self, prefix):
        return Dying(self.path, f"{self.prefix}/{prefix}")

    def _die(self):
        Dying.left -= 1
        if Dying.left < 0:
            raise Killed

    def put_bytes(self, key, body):
        self._die()
        return super().put_bytes(key, body)

    def delete(self, keys):
        for key in keys:
            self._die()
            super().delete([key])


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "results")


@pytest.fixture
def published(tmp_path, store):
    """published(number, keep=, dag_id=) -> a publication; the larger its number the newer."""

    def make(number, keep=2, dag_id="digits"):
        (tmp_path / "model").write_text(f"{dag_id} {number}")
        record = lineage_of(f"{dag_id}-{number}", dag_id)
        (tmp_path / "lineage").write_text(json.dumps(record))
        files = {"model/graph": tmp_path / "model", "lineage.json": tmp_path / "lineage"}
        marker = {"dag_id": dag_id, "keep": keep}
        done = publish(files, store, f"{dag_id}-{number}", marker=marker)
        name = f"{dag_id}-{number}/{done.name}"
        point(store, dag_id, LATEST, name, {})
        return name

    return make


def clean(store, days=0.0, *, dry_run=False):
    """What goes so many days later, by its place."""
    found = clean_results(store, dry_run=dry_run, now=lambda: time.time() + days * DAY_S)
    return [one.place.removeprefix(f"{store.uri}/") for one in found]


def there(store):
    """What is published, whole; and of what there are files."""
    keys = [obj.key for obj in store.list() if not obj.key.startswith("_lineage/")]
    names = {"/".join(key.split("/")[:2]) for key in keys if key.count("/") > 1}
    return {name for name in names if not missing_from(store.at(name))}, names


def test_a_full_disk_is_cleaned(tmp_path):
    """What may go is deleted before any marker is moved, which takes room."""
    with tiny_disk(tmp_path / "disk", 8 << 20) as disk:
        store = FolderStore(disk / "results")
        (tmp_path / "model").write_bytes(bytes(1 << 20))
        for number in range(3):
            marker = {"dag_id": "digits", "keep": 1}
            files = {"model/graph": tmp_path / "model"}
            done = publish(files, store, f"digits-{number}", marker=marker)
            point(store, "digits", LATEST, f"digits-{number}/{done.name}", {})
        assert len(clean(store)) == 2
        point(store, "digits", LATEST, f"digits-2/{done.name}", {})
        done = publish(files, store, "digits-3", marker=marker)
        point(store, "digits", LATEST, f"digits-3/{done.name}", {})
        with open(disk / "others", "ab", buffering=0) as others, suppress(OSError):
            while True:
                others.write(b"x" * 4096)
        removed = clean(store, days=3)
        assert [one.partition("/")[0] for one in removed] == ["digits-0", "digits-1", "digits-2"]
        assert len(there(store)[0]) == 1 and len(there(store)[1]) == 2


def test_the_newest_stay_and_what_a_pointer_or_its_history_names(published, store):
    names = [published(number) for number in range(7)]
    others = [published(number, keep=None, dag_id="others") for number in range(3)]
    for number in (1, 3):
        promote(store, "digits", names[number])
    everything = {*names, *others}
    kept = everything - (gone := {names[0], names[2], names[4]})
    assert set(clean(store, dry_run=True)) == gone
    assert there(store) == (everything, everything)
    assert set(clean(store)) == gone
    # Files stay two days longer than the marker, without which nobody promotes.
    assert there(store) == (kept, everything)
    with pytest.raises(NoSuchModel, match="is not there, or not as it was published"):
        promote(store, "digits", names[4])
    assert clean(store, days=1) == []
    assert set(clean(store, days=3)) == gone
    assert there(store) == (kept, kept)
    assert clean(store, days=9) == []


def test_who_was_promoted_in_the_moment_of_cleaning_is_whole_again(published, store):
    names = [published(number) for number in range(4)]
    pointer = promote(store, "digits", names[0])
    store.delete(["digits/production.json"])  # as if it was written a moment later
    assert names[0] in clean(store)
    store.put_bytes("digits/production.json", json.dumps(pointer).encode())
    assert clean(store) == [] and not missing_from(store.at(names[0])), "at once"
    assert (store.path / names[0] / "model" / "graph").read_text() == "digits 0"
    assert clean(store, days=3) == [names[1]]
    assert there(store)[0] == {names[0], *names[2:]}


def test_what_production_names_with_a_slash_too_many_stays(published, store):
    """As it was written for `promote --to <training>/<name>/`."""
    names = [published(number, keep=1) for number in range(3)]
    promote(store, "digits", names[0])
    path = store.path / "digits" / "production.json"
    path.write_text(path.read_text().replace(f'{names[0]}"', f'{names[0]}/"'))
    assert clean(store) == [names[1]]
    assert clean(store, days=3) == [names[1]]
    assert there(store)[0] == {names[0], names[2]}


def test_of_results_that_were_moved_those_stay_that_were_published_last(published, store, tmp_path):
    names = [published(number) for number in range(5)]
    store.delete(["digits/latest.json"])
    copy = shutil.copytree(store.path, tmp_path / "moved", copy_function=shutil.copyfile)
    for number, name in enumerate(names):  # whichever was copied last
        os.utime(copy / name / "_SUCCESS", (time.time() - number, time.time() - number))
    assert sorted(clean(FolderStore(copy))) == sorted(names[:3])


def test_what_a_link_names_a_second_time_is_one_publication(published, store, caplog):
    """A person has made it, for whoever loads the newest model by one path."""
    older, newest = published(1, keep=2), published(2, keep=2)
    serves = published(3, keep=2)
    promote(store, "digits", serves)
    training, _, name = serves.partition("/")
    (store.path / "current").symlink_to(training)
    (store.path / "by-name").mkdir()
    (store.path / "by-name" / name).symlink_to(f"../{serves}")
    for days in (0, 7):
        assert clean(store, days=days) == [older]
        for kept in (newest, serves):
            assert missing_from(store.at(kept)) == []
    said = f"{store.path}/current is passed over: it is a link to {store.path}/{training}, and"
    assert caplog.text.count(said) == 1
    assert [one["publication"] for one in read_index(store, rebuild=True)].count(serves) == 1
    assert f"current/{name}" not in {one["publication"] for one in read_index(store)}
    assert lost(store).gone == {}


def archived(store, place):
    """Moves a publication's training to `archive`, and leaves a link to it."""
    training = place.partition("/")[0]
    (store.path / "archive").mkdir(exist_ok=True)
    (store.path / training).rename(store.path / "archive" / training)
    (store.path / training).symlink_to(f"archive/{training}")


def test_a_training_in_a_deeper_folder_counts_by_the_link_to_it(published, store):
    """A person has moved it, and left a link where it was."""
    names = [published(number, keep=1) for number in range(4)]
    archived(store, names[0])
    archived(store, names[1])
    for target in (names[0], names[0].partition("/")[0]):
        assert promote(store, "digits", target)["publication"] == names[0]
    known = [one["publication"] for one in read_index(store, rebuild=True)]
    assert sorted(known) == names
    assert lost(store, dag_ids=["digits"]).gone == {}
    for days in (0, 7):
        assert sorted(clean(store, days=days)) == [names[1], names[2]]
    assert missing_from(store.at(names[0])) == []
    assert not (store.path / "archive" / names[1]).exists()
    assert clean(store, days=9) == [], "a link is left that leads nowhere"


def test_a_link_that_is_called_as_a_training_is_no_second_one(published, store):
    place = published(1)
    read_index(store, rebuild=True)
    (store.path / f"digits-{'0' * 32}").symlink_to("digits-1")
    assert [one["publication"] for one in read_index(store)] == [place]


@pytest.mark.parametrize("other", ["alias", "zeta", "by-name"])
def test_of_several_links_to_a_deeper_folder_one_counts(published, store, other):
    names = [published(number, keep=1) for number in range(3)]
    archived(store, names[0])
    training, _, name = names[0].partition("/")
    if other == "by-name":
        (store.path / other).mkdir()
        (store.path / other / name).symlink_to(f"../{training}/{name}")
    else:
        (store.path / other).symlink_to(training)
    assert promote(store, "digits", f"{other}/{name}")["publication"] == names[0]
    assert sorted(one["publication"] for one in read_index(store, rebuild=True)) == names
    # As an earlier version of ours has named it.
    key = "digits/production.json"
    pointer = store.read_bytes(key).decode()
    store.put_bytes(key, pointer.replace(f"{training}/", f"{other}/").encode())
    for days in (0, 7):
        assert clean(store, days=days) == [names[1]]
    assert missing_from(store.at(names[0])) == []


def test_of_links_by_other_names_the_first_counts(published, store):
    names = [published(number, keep=3) for number in range(2)]
    training, _, name = names[0].partition("/")
    archived(store, names[0])
    (store.path / training).unlink()
    deep = f"archive/{training}"
    for link in ("b", "a", "c"):
        (store.path / link).symlink_to(deep)
    (store.path / "0-by-name").mkdir()
    (store.path / "0-by-name" / name).symlink_to(f"../{deep}/{name}")
    known = [one["publication"] for one in read_index(store, rebuild=True)]
    assert sorted(known) == [f"a/{name}", names[1]]
    for link in ("a", "b", "0-by-name"):
        assert promote(store, "digits", f"{link}/{name}")["publication"] == f"a/{name}"


def test_a_pointer_to_what_no_listing_has_does_not_make_the_index_anew(
    published, store, monkeypatch
):
    serves = published(1)
    training, _, name = serves.partition("/")
    key = "digits/latest.json"
    store.put_bytes(key, store.read_bytes(key).replace(name.encode(), b"by-hand"))
    (store.path / training / "by-hand").mkdir()
    for file in ("lineage.json", "_SUCCESS"):
        shutil.copy(store.path / serves / file, store.path / training / "by-hand" / file)
    read_index(store, rebuild=True)
    read = []
    read_index(store, progress=lambda *numbers: read.append(numbers))
    assert read == []


def test_what_production_names_by_a_link_stays(published, store):
    names = [published(number, keep=1) for number in range(3)]
    (store.path / "current").symlink_to("digits-0")
    (store.path / "before").symlink_to("digits-1")
    assert promote(store, "digits", "before")["publication"] == names[1]
    # As an earlier version of ours has named it.
    key = "digits/production.json"
    pointer = store.read_bytes(key).decode()
    store.put_bytes(key, pointer.replace("digits-1/", "before/").encode())
    assert clean(store) == [names[0]] == clean(store, days=7)
    assert missing_from(store.at(names[1])) == []
    assert lost(store, dag_ids=["digits"]).gone == {}


def test_nothing_is_removed_through_a_link_in_what_goes(published, store):
    """Of a publication without a marker, and of saved checkpoints."""
    kept = published(1)
    left = f"digits-{'0' * 32}/{'a' * 16}-{'b' * 8}"
    store.put_bytes(f"{left}/lineage.json", b"{}")
    store.put_bytes("lost/_checkpoints/try.json", b"1")
    for folder in (left, "lost/_checkpoints"):
        (store.path / folder / "chunks").symlink_to(store.path / kept / "model")
    assert clean(store, days=40) == [left, "lost/_checkpoints"]
    assert missing_from(store.at(kept)) == []
    assert not (store.path / left / "lineage.json").exists()


class Behind(FolderStore):
    """Its listing lacks what ends so: of a bucket that is replicated, for a while."""

    lacks = ()

    def at(self, prefix):
        return Behind(self.path, f"{self.prefix}/{prefix}")

    def list(self):
        return [obj for obj in super().list() if not obj.key.endswith(Behind.lacks)]


def test_what_has_a_marker_that_is_not_listed_stays(published, store, monkeypatch, caplog):
    names = [published(number) for number in range(2)]
    monkeypatch.setattr(Behind, "lacks", (f"{names[0]}/_SUCCESS",))
    for dry_run in (True, False):
        assert clean(Behind(store.path), days=3, dry_run=dry_run) == []
    assert missing_from(store.at(names[0])) == []
    said = f"{store.uri}/{names[0]} is left: it has a _SUCCESS, which the listing does not show"
    assert said in caplog.text


def test_what_a_pointer_names_that_is_not_listed_gets_its_marker_back(
    published, store, monkeypatch
):
    names = [published(number, keep=1) for number in range(2)]
    pointer = json.dumps(promote(store, "digits", names[0]))
    store.delete(["digits/production.json"])  # as if it was written a moment later
    assert clean(store) == [names[0]]
    store.put_bytes("digits/production.json", pointer.encode())
    monkeypatch.setattr(Behind, "lacks", ("digits/production.json", "digits/latest.json"))
    assert clean(Behind(store.path), days=3) == []
    assert missing_from(store.at(names[0])) == []


def test_what_a_pointer_names_and_has_no_marker_is_warned_of_and_stays(published, store, caplog):
    name = published(1)
    store.delete([f"{name}/_SUCCESS"])
    assert clean(store, days=9) == []
    assert f"{store.at(name).uri} has no _SUCCESS, though a pointer names it" in caplog.text
    assert store.read_bytes(f"{name}/model/graph")


def test_what_is_being_moved_or_restored_is_left(published, store, tmp_path):
    """Copies that keep the times of their files: `cp -a`, `rsync -a`."""
    name, _ = published(1), published(2)
    left = f"digits-{'0' * 32}/{'a' * 16}-{'b' * 8}"
    store.put_bytes(f"{left}/model/graph", b"1")
    for number in (2, 3):  # of a training that is published, and of one that is lost
        store.put_bytes(f"digits-{number}/_checkpoints/try.json", b"1")
    for path in store.path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    copy = FolderStore(shutil.copytree(store.path, tmp_path / "copy"))
    (copy.path / name / "_SUCCESS").unlink()  # not there yet
    assert clean(copy) == clean(copy, days=1) == []
    assert sorted(clean(copy, days=3)) == sorted([left, name, "digits-2/_checkpoints"])
    assert clean(copy, days=40) == ["digits-3/_checkpoints"]


def test_what_is_being_moved_away_is_left(published, store, monkeypatch):
    """File by file: `rsync --remove-source-files`. The rest is as old as it ever was."""
    name, _ = published(1), published(2)
    for path in store.path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    times = FolderStore.last_change

    def of_old(self, key):
        found = os.stat(self.path / self.prefix / key)
        return found.st_mtime if key else times(self, key)

    monkeypatch.setattr(FolderStore, "last_change", of_old)
    (store.path / name / "_SUCCESS").unlink()
    assert clean(store) == clean(store, days=1) == []
    assert clean(store, days=3) == [name]


class Overtaken:
    """A store whose user calls ``turn`` before each operation."""

    def __init__(self, store, turn):
        self._store, self._turn = store, turn

    def at(self, prefix):
        return Overtaken(self._store.at(prefix), self._turn)

    def __getattr__(self, name):
        found = getattr(self._store, name)
        if callable(found):
            self._turn()
        return found


def promoted(store):
    with suppress(NoSuchModel):  # it has begun to go
        promote(store, "digits", "digits-0")


@pytest.mark.parametrize(("slow", "fast"), [(clean, promoted), (promoted, clean)])
def test_what_is_promoted_while_others_clean_has_its_marker(published, store, tmp_path, slow, fast):
    """The fast one runs at some moment of the slow one, at each in turn."""
    for number in range(4):
        published(number)
    done = {True: 0, False: 0}
    for moment in count():
        here = FolderStore(shutil.copytree(store.path, tmp_path / f"moment {moment}"))
        turns, came = count(), []

        def turn(here=here, moment=moment, turns=turns, came=came):
            if next(turns) == moment:
                came.append(fast(here))

        slow(Overtaken(here, turn))
        if not came:
            break
        pointer = read_pointer(here, "digits", PRODUCTION)
        done[pointer is not None] += 1
        assert pointer is None or not missing_from(here.at(pointer["publication"])), moment
    assert done[True] >= 5 and done[False] >= 1


def test_whoever_is_killed_while_cleaning_loses_nothing_that_is_kept(published, store):
    names = [published(number) for number in range(5)]
    promote(store, "digits", names[0])
    kept, dying = {names[0], *names[3:]}, Dying(store.path)
    kills = 0
    for killed_at in range(12):
        # Markers, or files; whatever those that were killed before have left.
        for days in (0, 3):
            Dying.left = killed_at
            try:
                clean(dying, days)
            except Killed:
                kills += 1
            assert kept <= there(store)[0]
            assert all("model/graph" in (o.key for o in store.at(n).list()) for n in kept)
        Dying.left = 10**9
        for days in (0, 3):
            clean(dying, days)
        assert there(store) == (kept, kept)
        for number in (1, 2):  # again, older than those that stay
            published(number)
        for name in (names[0], *names[3:]):
            marker = json.loads(store.read_bytes(f"{name}/_SUCCESS"))
            store.put_bytes(f"{name}/_SUCCESS", sealed(marker | {"marked": time.time()}))
    assert kills >= 10  # at each change of the store


def lineage_of(training, dag_id="digits"):
    run = {"dag_id": dag_id, "run_id": "r", "triggered_by": None, "parameters": {}}
    data = {"uri": "s3://d", "fingerprint": "d", "files": 1, "bytes": 1, "listing": []}
    return {
        "training_id": training,
        "run": run,
        "dataset": data,
        "code": {"digest": "c", "files": [], "git_commit": None},
        "manifest": {"name": "digits", "digest": "m"},
        "environment": {},
        "result": {"metrics": {}, "files": []},
    }


def test_what_is_removed_is_noted_however_often_who_removes_is_killed(tmp_path, store):
    """Else `verify` would miss it for ever."""
    digits = f"digits-{'0' * 32}", f"digits-{'1' * 32}"
    for kills in count(1):
        shutil.rmtree(store.path, ignore_errors=True)
        for number, training in enumerate(digits):
            record = lineage_of(training)
            files = {"lineage.json": json.dumps(record), "model/graph": training}
            for key, text in files.items():
                (tmp_path / "new" / key).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "new" / key).write_text(text)
            marker = {"dag_id": "digits", "training_id": training, "keep": 1}
            found = {key: tmp_path / "new" / key for key in files}
            done = publish(found, store, training, marker=marker)
            add(store, record, f"{training}/{done.name}")
            marked = store.path / training / done.name / "_SUCCESS"
            os.utime(marked, (number * DAY_S, number * DAY_S))
        clean(store)
        Dying.left = kills
        with suppress(Killed):
            clean(Dying(store.path), days=3)
        survived, Dying.left = Dying.left >= 0, 10**9
        clean(store, days=3)
        assert lost(store).gone == {}
        assert [one["training_id"] for one in read_index(store) if "removed" in one] == [digits[0]]
        if survived:
            break
    assert kills >= 4


def test_what_killed_uploads_left_goes_after_two_days(published, store):
    name = published(1)
    training = f"digits-2-{'0' * 32}"
    left = f"{training}/{'a' * 16}-{'b' * 8}"
    store.put_bytes(f"{left}/model/graph", b"half")
    part = f"{left}/.ddl-part-{'c' * 32}"
    (store.path / part).write_bytes(b"of a file")
    (store.path / training / "notes.txt").write_text("a person's")
    assert clean(store, days=1) == []
    assert clean(store, days=3) == [left, part]
    assert there(store) == ({name}, {name})
    assert [path.name for path in (store.path / training).iterdir()] == ["notes.txt"]


def test_what_a_killed_upload_left_never_was_a_model(store):
    left = f"digits-{'0' * 32}/{'a' * 16}-{'b' * 8}"
    store.put_bytes(f"{left}/lineage.json", json.dumps(lineage_of("digits-0")).encode())
    assert clean(store, days=3) == [left]
    assert read_index(store) == []


@pytest.mark.parametrize("error", [AccessDenied("denied"), StagingError("slow down")])
def test_what_cannot_be_noted_as_removed_stays(store, error):
    """Else `verify` would miss it for ever."""

    class Refuses(FolderStore):
        def at(self, prefix):
            return Refuses(self.path, f"{self.prefix}/{prefix}")

        def put_bytes(self, key, body):
            raise error

    left = f"digits-{'0' * 32}/{'a' * 16}-{'b' * 8}"
    for key in ("lineage.json", "_RETIRED"):
        store.put_bytes(f"{left}/{key}", b"{}")
    other = f"digits-{'1' * 32}/{'a' * 16}-{'b' * 8}"  # of which nobody knows
    store.put_bytes(f"{other}/model/graph", b"half")
    with pytest.raises(type(error)):
        clean(Refuses(store.path), days=3)
    assert {obj.key for obj in store.list()} == {f"{left}/lineage.json", f"{left}/_RETIRED"}


def test_what_is_anothers_in_a_place_that_is_shared_stays(published, store, caplog):
    """Names alone tell nothing: a table of Spark's, a cache that is called by digests."""
    name = published(1)
    theirs = [
        "events/_checkpoints/offsets/0",
        "events/_checkpoints/try.json",
        "numbered/_checkpoints/00000001.json",
        f"cache/{'a' * 16}-{'b' * 8}/model/graph",
        f"cache/{'a' * 16}-{'b' * 8}/.part",
    ]
    for key in theirs:
        store.put_bytes(key, b"1")
    ours = [f"cache/{'c' * 16}-{'d' * 8}/{key}" for key in ("lineage.json", "evidence/card.md")]
    for key in ours:
        store.put_bytes(key, b"1")
    assert clean(store, days=40) == [ours[0].removesuffix("/lineage.json")]
    keys = {obj.key for obj in store.list()}
    assert keys >= {*theirs} and keys.isdisjoint(ours)
    assert there(store)[0] == {name}
    assert f"{store.uri}/events/_checkpoints is left: offsets/0 is not ours" in caplog.text
    assert f"{store.uri}/numbered/_checkpoints is left: it has no try.json" in caplog.text


def test_what_a_store_without_conditions_has_beside_checkpoints_goes_with_them(store):
    for key in ("try.json", "try.json.conditions", "00000001.json.conditions"):
        store.put_bytes(f"lost/_checkpoints/{key}", b"")
    assert clean(store, days=40) == ["lost/_checkpoints"]
    assert store.list() == []


def test_the_command_says_what_it_does(published, store, tmp_path, capsys, monkeypatch):
    names = [published(number) for number in range(3)]
    monkeypatch.delenv("AIRFLOW__DDL__WORKSPACE", raising=False)
    assert cli.main(["clean"]) == 2
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "site-id").touch()
    argv = ["clean", "--results", str(store.path), "--workspace", str(tmp_path / "workspace")]
    for option, word in (("--dry-run", "would remove"), ("--keep-runs=30d", "removed")):
        capsys.readouterr()
        assert cli.main([*argv, option]) == 0
        said = capsys.readouterr()
        assert said.out == f"publication: {store.uri}/{names[0]}, 0.0 MiB\n"
        assert said.err == f"{word} 1, 0.0 MiB\n"
    assert cli.main([*argv, "--keep-runs", "soon"]) == 1
    assert "keep_runs: 'soon' is not a duration" in capsys.readouterr().err


def test_the_command_cleans_each_place_that_it_can(published, store, tmp_path, capsys, monkeypatch):
    names = [published(number) for number in range(3)]
    monkeypatch.delenv("AIRFLOW__DDL__WORKSPACE", raising=False)
    damaged, nowhere = tmp_path / "damaged", tmp_path / "nowhere"
    shutil.copytree(store.path, damaged)
    (damaged / "digits" / "latest.json").write_text("{")
    results = [f"--results={place}" for place in (damaged, nowhere, store.path)]
    assert cli.main(["clean", *results]) == 1
    said = capsys.readouterr()
    assert said.out == f"publication: {store.uri}/{names[0]}, 0.0 MiB\n"
    first, second, done = said.err.splitlines()
    assert first.startswith(f"ddl-airflow: {damaged.as_uri()}/digits/latest.json is damaged")
    assert second.startswith(f"ddl-airflow: {nowhere}: there is no such folder")
    assert done == "removed 1, 0.0 MiB"


def test_the_dag_cleans_and_asks_airflow_which_runs_are_open(
    published, store, workspace, run_task, monkeypatch
):
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    names = [published(number) for number in range(3)]
    for name in ("open", "ended"):
        state = workspace / "runs" / "digits" / name / "airflow"
        state.mkdir(parents=True)
        (state / "run.json").write_text(json.dumps({"run_id": name}))
        for path in (state / "run.json", state):
            os.utime(path, (time.time() - 40 * DAY_S,) * 2)
    monkeypatch.setenv("AIRFLOW__DDL__KEEP_RUNS", "30d")

    def count(dag_id, run_ids, states):
        assert (dag_id, states) == ("digits", ["queued", "running"])
        return int(run_ids == ["open"])

    monkeypatch.setattr(RuntimeTaskInstance, "get_dr_count", staticmethod(count))
    dag = clean_dag(results={store.uri: ""})
    task = dag.get_task("clean")
    for dry_run, left in ((True, ["ended", "open"]), (False, ["open"])):
        task.params["dry_run"] = dag.params["dry_run"] = dry_run
        ended = run_task(task)
        assert ended.state == "success", ended.error
        assert sorted(path.name for path in workspace.glob("runs/*/[!.]*")) == left
    assert there(store)[0] == set(names[1:])
    # An author's link: to what is no result of this folder.
    theirs = FolderStore(workspace / "theirs")
    old = theirs.put_bytes("0123456789abcdef-01234567/model", b"1")
    os.utime(workspace / "theirs" / old.key, (1, 1))
    (store.path / "run").symlink_to(workspace / "theirs")
    ended = run_task(task)
    assert ended.state == "failed" and "results/run leads to" in str(ended.error)
    assert theirs.exists(old.key)


def test_airflow_stores_the_dag():
    shown = DagSerialization.to_dict(clean_dag(results={"s3://results": "my_s3"}))
    assert "CleanOperator" in json.dumps(shown)


def test_checkpoints_that_nobody_goes_on_with_are_removed(store, published):
    publication = published(1)
    training = publication.partition("/")[0]
    for place in (training, "lost"):
        for key in ("chunks/" + "a" * 64, "00000001.json", "try.json"):
            store.at(f"{place}/_checkpoints").put_bytes(key, b"1")

    def removed(days, **more):
        later = time.time() + days * DAY_S
        every = clean_results(store, now=lambda: later, **more)
        return [one.place for one in every if one.what == "saved checkpoints"]

    of_published, of_lost = (f"{store.uri}/{place}/_checkpoints" for place in (training, "lost"))
    assert removed(1) == []
    assert removed(3, dry_run=True) == removed(3) == [of_published]
    assert removed(29) == []
    assert removed(31) == [of_lost]
    assert not [obj for obj in store.list() if "_checkpoints" in obj.key]
    assert missing_from(store.at(publication)) == []


@pytest.mark.parametrize("text", ['{"version": 3}', "{}"])
def test_a_file_that_only_has_the_name_of_a_pointer_is_in_nobodys_way(published, store, text):
    names = [published(number, keep=1) for number in range(2)]
    store.put_bytes("nightly/latest.json", text.encode())
    assert clean(store) == [names[0]] == clean(store, days=3)
    assert cli.main(["clean", "--results", str(store.path)]) == 0


@pytest.mark.parametrize("text", ["{}", '{"training_id": "digits-0", "before": 3}', '{"schema"'])
def test_what_a_damaged_pointer_may_name_stays(published, store, text):
    """Nobody knows what it named: that may be what serves."""
    names = [published(number, keep=1) for number in range(3)]
    promote(store, "digits", names[0])
    assert clean(store) == [names[1]]
    store.put_bytes("digits/production.json", text.encode())
    for days in (0, 3):
        with pytest.raises(StagingError, match="digits/production.json is damaged"):
            clean(store, days=days)
    assert there(store)[1] == {*names}


def test_an_archived_marker_keeps_its_own_publication_and_no_other(published, store, archives):
    """A bucket's rule has moved it; which DAG and what rule it is of, nobody can tell."""
    names = [published(number, keep=1) for number in range(3)]
    others = [published(number, keep=1, dag_id="letters") for number in range(3)]
    archives(store, f"{names[1]}/_SUCCESS")
    for dry_run in (True, False):
        said = []
        with pytest.raises(StagingError, match=f"{names[1]}/_SUCCESS: it is archived"):
            for one in clean_results(store, dry_run=dry_run):
                said.append(one.place.removeprefix(f"{store.uri}/"))
        assert {*said} == {names[0], *others[:2]}
    archives(store, f"{names[0]}/_RETIRED")  # once it has been withdrawn
    with pytest.raises(StagingError, match=f"{names[0]}/_RETIRED: it is archived"):
        clean(store, days=3)
    assert there(store)[1] == {*names} - {names[1]} | {names[1], others[2]}
    archives(store)
    assert clean(store, days=3) == [names[0], names[1]]


def test_a_newest_marker_that_cannot_be_read_may_say_that_more_is_kept(published, store, archives):
    names = [published(number, keep=1) for number in range(3)]
    names.append(published(3, keep=10))
    later = time.time() + 1
    os.utime(store.path / names[3] / "_SUCCESS", (later, later))
    archives(store, f"{names[3]}/_SUCCESS")
    with pytest.raises(StagingError, match="it is archived"):
        clean(store)
    archives(store)
    assert there(store)[0] == {*names}


def test_of_several_dags_those_are_cleaned_whose_pointers_can_be_read(store, tmp_path, archives):
    def training(number, dag_id):
        name = f"{dag_id}-{number:032x}"
        (tmp_path / "model").write_text(f"{dag_id} {number}")
        files = {"model/graph": tmp_path / "model"}
        done = publish(files, store, name, marker={"dag_id": dag_id, "keep": 1})
        place = f"{name}/{done.name}"
        point(store, dag_id, LATEST, place, {})
        if not number:
            point(store, dag_id, PRODUCTION, place, {})
        return place

    names = [training(number, "digits") for number in range(3)]
    others = [training(number, "letters") for number in range(3)]
    archives(store, "digits/production.json")
    for days in (0, 3):
        with pytest.raises(StagingError, match="digits/production.json: it is archived"):
            clean(store, days=days)
    assert there(store)[1] == {*names, others[0], others[2]}
    archives(store)
    assert there(store)[0] == {*names, others[0], others[2]}


def test_of_two_who_clean_at_once_neither_fails(published, store):
    """Whatever of it the other has done between two looks of the slow one."""
    for moment in count():
        names = [published(number, keep=1) for number in range(3)]
        turns, came = count(), []

        def turn(moment=moment, turns=turns, came=came):
            if next(turns) == moment:
                came.append(clean(store))

        clean(Overtaken(store, turn))
        assert there(store)[0] == {names[2]}
        shutil.rmtree(store.path)
        if not came:
            break
    assert moment > 10


def test_what_two_clean_while_it_is_promoted_keeps_its_marker(published, store):
    """The one gives it back, and removes what the other has kept of it; then that one takes it."""
    name = published(0)
    (marked,) = (obj.modified for obj in store.list() if obj.key == f"{name}/_SUCCESS")
    other = store.at(name)
    taken = []

    class Overtaken(FolderStore):
        def put_bytes(self, key, body):
            if key == "_RETIRED":
                taken.append(retire(other, marked))
            return super().put_bytes(key, body)

        def delete(self, keys):
            if keys == ["_SUCCESS"]:
                restore(other, taken[0])
            super().delete(keys)

    here = Overtaken(store.path, name)
    own = retire(here, marked)
    assert not other.exists("_SUCCESS") and not other.exists("_RETIRED")
    restore(here, own)  # somebody has promoted it
    assert missing_from(other) == []


def test_where_unfinished_uploads_may_not_be_listed_the_rest_is_cleaned(
    published, store, monkeypatch, caplog
):
    names = [published(number, keep=1) for number in range(2)]

    def refused(self):
        raise AccessDenied(f"{self.uri}: you may not list uploads")

    monkeypatch.setattr(FolderStore, "unfinished", refused)
    assert clean(store) == [names[0]]
    assert "you may not list uploads" in caplog.text


LEFT = f"digits-{'0' * 32}/{'1' * 16}-{'2' * 8}"  # by an upload that was killed long ago


@pytest.fixture
def disk(trainer, published, store, tmp_path, monkeypatch):
    """A place of results that another user has, at the top of a disk: with a folder of root's."""
    published(1)
    store.put_bytes(f"{LEFT}/model/graph", b"")
    later = partial(clean_results, now=lambda: time.time() + 3 * DAY_S)
    monkeypatch.setattr(workspaces, "clean_results", later)
    place = trainer.place / "results"
    shutil.copytree(tmp_path / "results", place)
    for path in (place, *place.rglob("*")):
        os.chown(path, trainer.uid, trainer.gid)
    (place / "lost+found").mkdir(mode=0o700)
    return place


def test_a_private_folder_beside_the_trainings_is_passed_over_and_named(
    disk, trainer, capsys, caplog
):
    with trainer.acting():
        for words in (["lineage", "list", "--rebuild"], ["verify"]):
            assert cli.main([*words, str(disk)]) == 0, capsys.readouterr().err
        cli.main(["production", str(disk)])
        assert "Name one, as" in capsys.readouterr().err
        for words in (["lineage"], ["lineage", "diff", str(disk)], ["rerun"]):
            assert cli.main([*words, disk.as_uri()]) == 1
            assert "is of several trainings. Name one, as" in capsys.readouterr().err
        assert cli.main(["clean", "--results", disk.as_uri()]) == 0, capsys.readouterr().err
    assert not (disk / LEFT).exists()
    (said,) = (one.getMessage() for one in caplog.records if "lost+found" in one.getMessage())
    assert said.startswith(f"{disk.as_uri()}/lost+found is passed over: it may not be read")


def test_nothing_but_a_private_folder_is_no_publication(trainer, capsys):
    place = trainer.place / "results"
    (place / "lost+found").mkdir(mode=0o700, parents=True)
    with trainer.acting():
        for word in ("lineage", "verify"):
            assert cli.main([word, place.as_uri()]) == 1
            assert "nothing was published there" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["digits", "_lineage", os.path.dirname(LEFT), f"{LEFT}/model"])
def test_a_private_folder_of_a_training_or_of_pointers_is_an_error(disk, trainer, capsys, name):
    """What is not seen there might be taken for gone, and what it names might be removed."""
    (disk / name).mkdir(exist_ok=True)
    (disk / name).chmod(0o000)
    os.chown(disk / name, 0, 0)
    with trainer.acting():
        assert cli.main(["clean", "--results", disk.as_uri()]) == 1
        assert f"{disk / name}: Permission denied" in capsys.readouterr().err
    assert (disk / LEFT).exists()
