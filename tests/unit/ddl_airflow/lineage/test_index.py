"""The index of a place of results: whole whoever writes."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddl_airflow.core.errors import AccessDenied, StagingError
from ddl_airflow.lineage import index
from ddl_airflow.lineage.index import add, begin, begun_key, lost, mark_removed, read_index
from ddl_airflow.lineage.production import LATEST, PRODUCTION, point
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import retire


def record(number, dag_id="digits"):
    return {
        "training_id": f"{dag_id}-{number}",
        "manifest": {"name": dag_id, "digest": "sha256:v2:m", "file": "m.yml"},
        "dataset": {"uri": "s3://b/d", "fingerprint": f"sha256:{number}", "files": 1, "bytes": 9},
        "code": {"digest": "sha256:c", "git_commit": None, "files": ["train.py"]},
        "run": {"dag_id": dag_id, "run_id": f"r{number}", "triggered_by": None, "parameters": {}},
        "environment": {"launcher": "local", "world_size": 2},
        "result": {"metrics": {"accuracy": number / 1e5}, "goodput": {"held_s": 3.0}, "files": []},
    }


def place(number, dag_id="digits"):
    return f"{dag_id}-{number}/{number:016x}-00000000"


def publish(store, number):
    """As an upload leaves it, without the index."""
    store.put_bytes(f"{place(number)}/lineage.json", json.dumps(record(number)).encode())
    store.put_bytes(f"{place(number)}/_SUCCESS", b"{}")


@pytest.fixture
def store(tmp_path):
    (tmp_path / "results").mkdir()
    return FolderStore(tmp_path / "results")


def known(store, **how):
    return [one["publication"] for one in read_index(store, **how)]


def new(store):
    return [obj.key for obj in store.list() if obj.key.startswith("_lineage/new/")]


def test_what_was_published_before_there_was_an_index_is_in_it(store):
    for number in range(3):
        publish(store, number)
    add(store, record(3), place(3))
    seen = []
    found = read_index(store, progress=lambda done, of: seen.append((done, of)))
    assert {one["publication"] for one in found} == {place(number) for number in range(4)}
    assert seen == [(1, 3), (2, 3), (3, 3)]
    # From here on no record is read.
    for number in range(3):
        store.delete([f"{place(number)}/lineage.json"])
    assert len(known(store)) == 4 and new(store) == []


def test_new_ones_are_merged_now_and_then_and_none_is_lost(store, monkeypatch):
    monkeypatch.setattr(index, "_MERGED_AT", 7)
    assert known(store) == []
    for number in range(40):
        add(store, record(number), place(number))
        assert len(new(store)) < 7
        assert len(known(store)) == number + 1


def test_many_write_and_read_at_once(store, monkeypatch):
    monkeypatch.setattr(index, "_MERGED_AT", 3)
    read_index(store)
    ended, missed = threading.Event(), []
    added: set[str] = set()

    def look():
        while not ended.is_set():
            before = set(added)
            missed.extend(before - set(known(store)))

    reader = threading.Thread(target=look)
    reader.start()

    def publish_one(number):
        add(store, record(number), place(number))
        added.add(place(number))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(publish_one, range(60)))
    ended.set()
    reader.join()
    assert missed == []
    assert set(known(store)) == {place(number) for number in range(60)}


def test_the_same_publication_again_keeps_its_time_and_its_place(store):
    add(store, record(1), place(1))
    (before,) = read_index(store)
    time.sleep(1.1)  # times are of whole seconds
    add(store, record(1), place(1))
    assert read_index(store) == [before]


def test_what_an_earlier_version_counted_by_a_link_as_well_counts_once(store):
    for number in range(3):
        publish(store, number)
    (store.path / "current").symlink_to("digits-1")
    (store.path / "best").symlink_to("digits-2")
    read_index(store)
    of_then, version = index._read_index(store)
    by_link = place(1).replace("digits-1", "current")
    of_then[by_link] = of_then[place(1)] | {"publication": by_link}
    by_link = place(2).replace("digits-2", "best")
    of_then[by_link] = of_then.pop(place(2)) | {"publication": by_link}
    store.delete([f"{place(0)}/{name}" for name in ("lineage.json", "_SUCCESS")])
    index._write(store, of_then, version, [])
    for _ in range(2):
        assert sorted(known(store)) == [place(number) for number in range(3)]
        assert list(lost(store).gone) == [place(0)]  # which is not forgotten by that
        assert sorted(index._read_index(store)[0]) == sorted(known(store))


def test_what_was_counted_by_a_link_that_was_turned_since_is_nowhere_else(store):
    for number in (1, 2):
        publish(store, number)
    (link := store.path / "current").symlink_to("digits-1")
    read_index(store)
    of_then, version = index._read_index(store)
    by_link = place(1).replace("digits-1", "current")
    of_then[by_link] = of_then[place(1)] | {"publication": by_link}
    index._write(store, of_then, version, [])
    link.unlink()
    link.symlink_to("digits-2")
    assert sorted(known(store)) == [place(1), place(2)]
    assert not lost(store).gone


def test_a_removed_one_is_known_as_that(store):
    publish(store, 1)
    read_index(store)
    mark_removed(store, place(1))
    (found,) = read_index(store)
    assert found["removed"] >= found["published"]
    mark_removed(store, "another/0000000000000000-00000000")  # nobody knows what it was
    assert len(known(store)) == 1


@pytest.mark.parametrize("body", [b"", b"\x1f\x8bnot", b'{"schema": "another"}'])
def test_a_damaged_index_is_made_again(store, body):
    publish(store, 1)
    assert known(store) == [place(1)]
    store.put_bytes("_lineage/index.json.gz", body)
    assert known(store) == [place(1)] == known(store)


def test_a_damaged_record_or_entry_hides_no_other(store):
    publish(store, 1)
    for number, text in ((2, b"{"), (3, b"[]"), (4, b'{"run": 3}')):
        store.put_bytes(f"{place(number)}/lineage.json", text)
        store.put_bytes(f"{place(number)}/_SUCCESS", b"{}")
        store.put_bytes(f"_lineage/new/{number}.json", text)
    removed = {"publication": place(5), "removed": "2026-11-30", "went_on_from": 5}
    store.put_bytes("_lineage/new/5.json", json.dumps(removed).encode())
    whole = index.summary(record(1), place(1), "2026-11-30T00:00:00+00:00")
    odd = {"dataset": whole["dataset"] | {"resolved_uri": []}}
    for number, wrong in ((6, {"experiment": []}), (7, odd)):
        one = whole | {"publication": place(number)} | wrong
        store.put_bytes(f"_lineage/new/{number}.json", json.dumps(one).encode())
    assert known(store) == [place(1)]


NAMES_ITS_RECORD = json.dumps({"files": [{"key": "lineage.json"}]}).encode()


@pytest.mark.parametrize("text", [b'{"run": ', b"[]", b'{"run": 3}', None])
@pytest.mark.parametrize("place_of_it", [place(2), "digits-manual-" + "0" * 8])
def test_a_publication_whose_record_cannot_be_read_is_named_until_it_can(store, text, place_of_it):
    publish(store, 1)
    if text is not None:
        store.put_bytes(f"{place_of_it}/lineage.json", text)
    store.put_bytes(f"{place_of_it}/_SUCCESS", NAMES_ITS_RECORD)
    unread: dict[str, str] = {}
    why = "its lineage.json is " + ("gone" if text is None else "damaged")
    for how in ({}, {}, {"rebuild": True}):  # the index is made, read, and made again
        unread.clear()
        assert known(store, unread=unread.__setitem__, **how) == [place(1)]
        assert unread == {place_of_it: why}
    assert lost(store).unread == {place_of_it: why}
    store.put_bytes(f"{place_of_it}/lineage.json", json.dumps(record(2)).encode())
    assert lost(store).unread == {}
    assert set(known(store, unread=pytest.fail)) == {place(1), place_of_it}
    store.delete([f"{place_of_it}/lineage.json"])  # it is in the index, as whole
    assert set(known(store, unread=pytest.fail)) == {place(1), place_of_it}


def test_of_a_training_that_publishes_again_the_record_that_cannot_be_read_is_known(store):
    read_index(store)
    begin(store, "digits-2")
    store.put_bytes(f"{place(2)}/lineage.json", b"{")
    store.put_bytes(f"{place(2)}/_SUCCESS", NAMES_ITS_RECORD)  # and the worker is killed
    again = f"digits-2/{7:016x}-00000000"
    publish_at(store, again)
    add(store, json.loads(store.read_bytes(f"{again}/lineage.json")), again)
    unread: dict[str, str] = {}
    assert known(store, unread=unread.__setitem__) == [again]
    assert list(unread) == [place(2)]
    mark_removed(store, place(2))  # of that nobody has to be told
    assert known(store, unread=pytest.fail) == [again]


def test_what_could_not_be_read_and_was_removed_by_hand_is_missed_by_nobody(store):
    publish(store, 1)
    store.put_bytes(f"{place(2)}/lineage.json", b"{")
    store.put_bytes(f"{place(2)}/_SUCCESS", NAMES_ITS_RECORD)
    unread: dict[str, str] = {}
    assert known(store, unread=unread.__setitem__) == [place(1)] and list(unread) == [place(2)]
    store.delete([f"{place(2)}/lineage.json", f"{place(2)}/_SUCCESS"])
    assert known(store, unread=pytest.fail) == [place(1)]


def test_a_marker_of_somebody_elses_need_not_be_readable(store, monkeypatch):
    """As of a job of Spark's, in the same bucket."""
    publish(store, 1)
    store.put_bytes("spark-12345678/_SUCCESS", b"")
    read = FolderStore.read_version

    def refused(self, key):
        if "spark" in self.uri:
            raise AccessDenied("spark-12345678/_SUCCESS: Permission denied")
        return read(self, key)

    monkeypatch.setattr(FolderStore, "read_version", refused)
    assert known(store, unread=pytest.fail) == [place(1)]


def test_while_a_store_does_not_answer_no_record_is_taken_for_damaged(store, monkeypatch):
    publish(store, 1)
    store.put_bytes(f"{place(1)}/_SUCCESS", NAMES_ITS_RECORD)
    with monkeypatch.context() as away:

        def fail(*_):
            raise StagingError("the store does not answer")

        away.setattr(FolderStore, "read_bytes", fail)
        with pytest.raises(StagingError, match="does not answer"):
            read_index(store)
    assert known(store, unread=pytest.fail) == [place(1)]


def test_without_the_marker_nothing_is_published(store):
    publish(store, 1)
    store.put_bytes(f"{place(2)}/lineage.json", json.dumps(record(2)).encode())
    assert known(store) == [place(1)]


def test_who_may_only_read_is_answered_too(store, monkeypatch):
    publish(store, 1)

    def refused(*_):
        raise AccessDenied("you may not write")

    monkeypatch.setattr(FolderStore, "put_if", refused)
    assert known(store) == [place(1)] == known(store)


def test_a_publication_whose_upload_died_before_the_index_is_found(store):
    publish(store, 1)
    read_index(store)
    begin(store, "digits-2")
    publish(store, 2)  # and the worker is killed
    begin(store, "digits-3")  # and this one before it had published
    assert set(known(store)) == {place(1), place(2)}
    begin(store, "digits-4")
    publish(store, 4)
    add(store, record(4), place(4))
    assert set(known(store)) == {place(1), place(2), place(4)}
    store.delete([f"{place(2)}/lineage.json", f"{place(2)}/_SUCCESS"])
    assert set(known(store)) == {place(1), place(2), place(4)}  # it was put into the index
    # Nobody knows whether these go on; of one that is done that is known.
    left = {key for key in new(store) if "begun" in key}
    assert left == {begun_key("digits-2"), begun_key("digits-3")}


def test_what_a_training_published_before_its_upload_died_is_known_once_it_publishes_again(store):
    read_index(store)
    first, second = (f"{trained('a').partition('/')[0]}/{n:016x}-00000000" for n in (1, 2))
    begin(store, "digits-manual-" + "a" * 32)
    publish_at(store, first)  # and the worker is killed
    begin(store, "digits-manual-" + "a" * 32)
    publish_at(store, second)
    add(store, json.loads(store.read_bytes(f"{second}/lineage.json")), second)
    assert set(known(store)) == {first, second}
    assert not [key for key in new(store) if "begun" in key]
    store.delete([f"{first}/lineage.json"])
    assert set(known(store)) == {first, second}  # it is in the index


@pytest.fixture
def fails(monkeypatch):
    """fails(name, error): until it is called again, what is called so of a training does."""
    failing = {}

    def failed(name, do):
        def call(self, *words):
            # A call of the index's own is of no training.
            if name in failing and "a" * 32 in f"{self.uri}{words}":
                raise failing[name]
            return do(self, *words)

        return call

    for name in ("list", "put_bytes"):
        monkeypatch.setattr(FolderStore, name, failed(name, getattr(FolderStore, name)))

    def fail(name, error=None):
        failing.clear()
        if error is not None:
            failing[name] = error

    return fail


PASSING = (StagingError("the store does not answer"), AccessDenied("the keys have expired"))


@pytest.mark.parametrize("error", PASSING, ids=["away", "refused"])
def test_the_note_of_an_upload_that_died_stays_while_nobody_can_look(store, fails, error):
    training = "digits-manual-" + "a" * 32
    first, second = (f"{training}/{n:016x}-00000000" for n in (1, 2))
    read_index(store)
    begin(store, training)
    publish_at(store, first)  # and the worker is killed
    publish_at(store, second)
    fails("list", error)
    with pytest.raises(type(error)):
        add(store, json.loads(store.read_bytes(f"{second}/lineage.json")), second)
    assert begun_key(training) in new(store)
    fails("list")
    assert set(known(store)) == {first, second}


@pytest.mark.parametrize("error", PASSING, ids=["away", "refused"])
@pytest.mark.parametrize("name", ["list", "put_bytes"])
def test_an_old_note_stays_while_nobody_can_look_or_write(store, fails, name, error):
    training = "digits-manual-" + "a" * 32
    first, second = (f"{training}/{n:016x}-00000000" for n in (1, 2))
    publish_at(store, first)
    assert known(store) == [first]
    body = json.dumps({"begun": training, "at": time.time() - 8 * 86400}).encode()
    store.put_bytes(begun_key(training), body)
    none = {"begun": "../x", "at": time.time() - 8 * 86400}
    store.put_bytes("_lineage/new/none-begun.json", json.dumps(none).encode())
    publish_at(store, second)
    fails(name, error)
    assert set(known(store)) <= {first, second}
    assert new(store) == [begun_key(training)]
    fails(name)
    assert set(known(store)) == {first, second}
    assert begun_key(training) not in new(store)
    assert set(known(store)) == {first, second}


def test_who_may_only_read_finds_such_a_publication_too(store, monkeypatch):
    read_index(store)
    begin(store, "digits-2")
    publish(store, 2)

    def refused(*_):
        raise AccessDenied("you may not write")

    for name in ("put_if", "put_bytes", "delete"):
        monkeypatch.setattr(FolderStore, name, refused)
    assert known(store) == [place(2)] == known(store)


def test_an_upload_that_never_came_to_its_end_is_looked_for_no_longer_than_a_few_days(
    store, monkeypatch
):
    read_index(store)
    begin(store, "digits-1")
    body = json.dumps({"begun": "digits-2", "at": time.time() - 8 * 86400})
    store.put_bytes(begun_key("digits-2"), body.encode())
    store.put_bytes("_lineage/new/damaged-begun.json", b"[]")
    store.put_bytes(
        "_lineage/new/huge-begun.json", b'{"begun": "digits-3", "at": 1%s}' % (b"0" * 400)
    )
    assert known(store) == []
    assert new(store) == [begun_key("digits-1")]


def test_what_uploads_could_not_put_into_the_index_is_noticed(store):
    """Nothing of them is in it: neither that they began, nor what they published."""
    publish(store, 1)
    read_index(store)
    for number in (2, 3):
        publish(store, number)
    point(store, "digits", LATEST, place(3), {})
    assert set(known(store)) == {place(number) for number in (1, 2, 3)}
    store.delete([f"{place(2)}/lineage.json"])
    assert len(known(store)) == 3  # they are in the index now
    point(store, "digits", LATEST, place(4), {})  # and this is nowhere
    assert len(known(store)) == 3
    for damaged in (b"{", b"[]", b'{"schema": "ddl-airflow/pointer/1", "publication": "../x"}'):
        store.put_bytes("digits/latest.json", damaged)
        assert len(known(store)) == 3


def trained(letter, dag_id="digits"):
    """A training's publication, named as trainings are, published where the index does not know."""
    return f"{dag_id}-manual-{letter * 32}/{ord(letter):016x}-00000000"


def publish_at(store, publication, dag_id="digits"):
    body = record(1, dag_id) | {"training_id": publication.partition("/")[0]}
    store.put_bytes(f"{publication}/lineage.json", json.dumps(body).encode())
    store.put_bytes(f"{publication}/_SUCCESS", b"{}")


def test_a_dag_whose_uploads_can_never_write_the_index_is_known(store):
    """As where each team may write below its own names alone."""
    publish(store, 1)
    read_index(store)
    serves = trained("a", "others")
    publish_at(store, serves, "others")
    point(store, "others", PRODUCTION, serves, {})
    assert set(known(store)) == {place(1), serves}
    store.delete([f"{serves}/lineage.json"])
    assert set(known(store)) == {place(1), serves}  # it is in the index now


def test_an_upload_that_could_not_write_is_noticed_after_the_next_that_could(store):
    publish(store, 1)
    read_index(store)
    publish_at(store, trained("a"))
    point(store, "digits", LATEST, trained("a"), {})
    publish_at(store, trained("b"))
    add(store, record(2) | {"training_id": trained("b").partition("/")[0]}, trained("b"))
    point(store, "digits", LATEST, trained("b"), {})
    assert set(known(store)) == {place(1), trained("a"), trained("b")}


def test_what_serves_and_was_published_again_is_known(store):
    """The training is known, by what it had published before."""
    publish(store, 1)
    read_index(store)
    again = f"digits-1/{7:016x}-00000000"
    publish_at(store, again)
    point(store, "digits", LATEST, place(1), {})
    point(store, "digits", PRODUCTION, again, {})
    assert set(known(store)) == {place(1), again}


def test_what_is_no_publication_is_looked_at_in_vain_and_no_other_name(store, monkeypatch):
    publish(store, 1)
    read_index(store)
    store.put_bytes(f"digits-manual-{'c' * 32}/_checkpoints/try.json", b"{}")
    store.put_bytes("theirs/2026/report", b"1")
    listed = []
    at = FolderStore.at
    monkeypatch.setattr(FolderStore, "at", lambda self, name: listed.append(name) or at(self, name))
    assert known(store) == [place(1)]
    assert {name for name in listed if not name.startswith("_")} == {f"digits-manual-{'c' * 32}"}


def test_while_it_is_withdrawn_a_publication_stays_in_an_index_that_is_made_again(store):
    publish(store, 1)
    retire(store.at(place(1)), 1e9)
    assert known(store) == [place(1)] == known(store, rebuild=True)
    (one,) = read_index(store)
    assert one["published"].startswith("2001-09-09")
    mark_removed(store, place(1))
    store.delete([obj.key for obj in store.list() if obj.key.startswith("digits-1/")])
    (one,) = read_index(store, rebuild=True)
    assert one["removed"] and one["dag_id"] == "digits"


def test_what_is_removed_and_was_never_in_the_index_is_known_as_removed(store):
    read_index(store)
    publish_at(store, trained("a"))
    mark_removed(store, trained("a"))
    store.delete([f"{trained('a')}/lineage.json", f"{trained('a')}/_SUCCESS"])
    (one,) = read_index(store)
    assert one["removed"] and one["dag_id"] == "digits"


def test_a_question_writes_nothing_where_nothing_was_published(store):
    """A slip of who asks: it may be data, which would have changed, or a publication."""
    store.put_bytes("train.csv", b"1,2")
    assert known(store) == [] == known(store, rebuild=True)
    assert [obj.key for obj in store.list()] == ["train.csv"]


@pytest.mark.parametrize("digest", ["0" * 8, "0" * 32])
def test_a_model_of_the_early_layout_is_known_and_its_record_read_once(store, digest):
    """Its files lie in the training's folder."""
    early = f"digits-manual-{digest}"
    for name in (early, "a-copy-of-theirs"):
        store.put_bytes(f"{name}/lineage.json", json.dumps(record(0)).encode())
        store.put_bytes(f"{name}/_SUCCESS", b"{}")
    point(store, "digits", PRODUCTION, early, {})
    publish(store, 1)
    assert set(known(store)) == {early, place(1)}
    assert set(known(store, progress=pytest.fail)) == {early, place(1)}


def test_the_index_of_results_that_were_moved_says_when_they_were_published(store):
    store.put_bytes(f"{place(1)}/lineage.json", json.dumps(record(1)).encode())
    store.put_bytes(f"{place(1)}/_SUCCESS", b'{"marked": 1000000000.5}')
    (one,) = read_index(store)
    assert one["published"] == "2001-09-09T01:46:40+00:00"


def test_an_index_that_a_question_makes_again_knows_what_was_lost(store):
    """What serves could not be put into the index; what was lost before is known to it alone."""
    for number in (1, 2, 3):
        publish(store, number)
        store.put_bytes(f"{place(number)}/_SUCCESS", NAMES_ITS_RECORD)
    read_index(store)
    store.delete([f"{place(1)}/{name}" for name in ("lineage.json", "_SUCCESS")])
    store.put_bytes(f"{place(2)}/lineage.json", b"{")
    again = f"digits-3/{7:016x}-00000000"
    publish_at(store, again)
    point(store, "digits", PRODUCTION, again, {})
    every = {*map(place, (1, 2, 3)), again}
    for _ in range(2):
        assert set(known(store, unread=pytest.fail)) == every
        assert list(lost(store).gone) == [place(1)]
    # Who asks for it has the records alone count.
    unread: dict[str, str] = {}
    assert set(known(store, rebuild=True, unread=unread.__setitem__)) == {place(3), again}
    assert list(unread) == [place(2)] and not lost(store).gone


def test_a_question_merges_what_has_gathered(store, monkeypatch):
    """As cleaning does, which merges nothing: else each question reads each note once more."""
    monkeypatch.setattr(index, "_MERGED_AT", 5)
    for number in range(8):
        publish(store, number)
    read_index(store)
    for number in range(4):
        mark_removed(store, place(number))
    assert len(new(store)) == 4 == len([one for one in read_index(store) if "removed" in one])
    assert len(new(store)) == 4  # few are read faster than an index is written
    mark_removed(store, place(4))
    for _ in range(2):
        assert len([one for one in read_index(store) if "removed" in one]) == 5
        assert new(store) == []


@pytest.fixture
def noted(store, monkeypatch):
    """A note beside the index, which the next question merges."""
    monkeypatch.setattr(index, "_MERGED_AT", 1)
    publish(store, 1)
    read_index(store)
    mark_removed(store, place(1))
    return store


def refused(*_):
    raise AccessDenied("you may not do that")


def test_who_may_not_merge_is_answered_all_the_same(noted, monkeypatch):
    for name in ("put_if", "put_bytes", "delete"):
        monkeypatch.setattr(FolderStore, name, refused)
    (one,) = read_index(noted)
    assert one["removed"] and len(new(noted)) == 1


def test_who_may_not_delete_notes_writes_the_index_once(noted, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "delete", refused)
        read_index(noted)
        written = noted.read_bytes(index._INDEX)
        (one,) = read_index(noted)
    assert one["removed"] and noted.read_bytes(index._INDEX) == written
    read_index(noted)
    assert not new(noted)


def test_who_is_killed_while_a_question_merges_loses_nothing(store, monkeypatch):
    monkeypatch.setattr(index, "_MERGED_AT", 1)
    publish(store, 1)
    read_index(store)
    add(store, record(2), place(2))
    put = index._put
    put(store, index.summary(record(3), place(3), "2026-11-30T00:00:00+00:00"))

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "delete", killed)
        with pytest.raises(Killed):
            read_index(store)
    assert new(store)
    assert set(known(store)) == {place(1), place(2), place(3)} and new(store) == []


ODD = ["a/b", "..", ".", "", "a\0b", "\ud800", "x" * 300, "/abs", "../results/digits", "a//b"]


@pytest.mark.parametrize("dag_id", ODD, ids=ascii)
def test_an_entry_of_no_dag_that_may_be_hides_no_other(store, dag_id):
    """Others may write there: each question ended with an error about a key."""
    publish(store, 1)
    read_index(store)
    point(store, "digits", PRODUCTION, place(1), {})
    odd = index.summary(record(2), place(2), "2026-11-30T00:00:00+00:00") | {"dag_id": dag_id}
    index._put(store, odd)
    assert known(store) == [place(1)]
    assert lost(store).gone == {} and lost(store).known == 1
    of_then, version = index._read_index(store)
    index._write(store, of_then | {place(2): odd}, version, [])
    assert known(store) == [place(1)]
    assert lost(store).gone == {} and lost(store).known == 1


@pytest.mark.parametrize("odd", ["", "../x", "a//b", "a\0b", "\ud800", "/a", "x" * 300], ids=ascii)
def test_an_entry_of_no_place_that_may_be_hides_no_other(store, odd):
    publish(store, 1)
    read_index(store)
    one = index.summary(record(2), place(2), "2026-11-30T00:00:00+00:00") | {"publication": odd}
    for number, entry in enumerate((one, {"publication": odd, "removed": "2026-11-30"})):
        store.put_bytes(f"_lineage/new/{number}.json", json.dumps(entry).encode())
    assert known(store) == [place(1)] and lost(store).known == 1


def test_a_record_of_no_dag_that_may_be_is_named(store):
    publish(store, 1)
    body = json.dumps(record(2) | {"run": record(2)["run"] | {"dag_id": "../others"}})
    store.put_bytes(f"{place(2)}/lineage.json", body.encode())
    store.put_bytes(f"{place(2)}/_SUCCESS", NAMES_ITS_RECORD)
    unread: dict[str, str] = {}
    assert known(store, unread=unread.__setitem__) == [place(1)]
    assert unread == {place(2): "its lineage.json is damaged"}


def test_a_record_in_an_archive_is_named_with_its_class_until_it_is_restored(store, archives):
    for number in (1, 2):
        publish(store, number)
        store.put_bytes(f"{place(number)}/_SUCCESS", NAMES_ITS_RECORD)
    for keys, why in (
        ([f"{place(2)}/lineage.json"], "its lineage.json is archived, in storage class GLACIER"),
        (
            [f"{place(2)}/lineage.json", f"{place(2)}/_SUCCESS"],
            "its lineage.json is archived, in storage class GLACIER",
        ),
    ):
        store.delete(["_lineage/index.json.gz"])
        archives(store, *keys)
        for how in ({"rebuild": True}, {}):
            unread: dict[str, str] = {}
            assert known(store, unread=unread.__setitem__, **how) == [place(1)]
            assert list(unread) == [place(2)] and unread[place(2)].startswith(why)
            assert list(lost(store).unread) == [place(2)]
        archives(store)
        assert set(known(store, unread=pytest.fail)) == {place(1), place(2)}
    # What the index knows it knows, also if it is made again meanwhile.
    archives(store, f"{place(2)}/lineage.json", f"{place(2)}/_SUCCESS")
    assert set(known(store, rebuild=True, unread=pytest.fail)) == {place(1), place(2)}
    archives(store, f"{place(2)}/_SUCCESS")
    assert set(known(store, rebuild=True, unread=pytest.fail)) == {place(1), place(2)}
    (store.path / "_lineage" / "index.json.gz").unlink()
    assert set(known(store, unread=pytest.fail)) == {place(1), place(2)}  # when it was put there


def test_what_is_archived_of_the_index_is_named_and_stays(store, archives, monkeypatch):
    for number in (1, 2):
        publish(store, number)
    assert len(known(store)) == 2
    index_of, there = store.path / "_lineage" / "index.json.gz", "_lineage/index.json.gz"
    body = index_of.read_bytes()
    for number in (3, 4):
        publish(store, number)
        add(store, record(number), place(number))
    begin(store, "digits-5")
    publish(store, 5)
    entry, note = new(store)[0], begun_key("digits-5")
    archives(store, there, entry, note)
    unread: dict[str, str] = {}
    assert set(known(store, unread=unread.__setitem__)) == {*map(place, range(1, 6))}
    assert set(unread) == {there, entry, note}
    assert there in lost(store).unread
    monkeypatch.setattr(index, "_MERGED_AT", 1)
    publish(store, 6)
    add(store, record(6), place(6))
    assert index_of.read_bytes() == body and entry in new(store)  # nothing was merged into another
    # It alone knows what was removed.
    assert set(known(store, rebuild=True, unread=lambda *_: None)) == {*map(place, range(1, 7))}
    assert index_of.read_bytes() == body
    archives(store)
    assert set(known(store, unread=pytest.fail)) == {*map(place, range(1, 7))}


def test_where_nothing_may_be_deleted_an_upload_is_known(store, monkeypatch):
    """By the policy of a bucket: it was said that only --rebuild finds the training."""

    def refused(self, keys):
        raise AccessDenied("no right to delete")

    monkeypatch.setattr(FolderStore, "delete", refused)
    monkeypatch.setattr(index, "_MERGED_AT", 2)
    known(store)
    for number in range(4):
        begin(store, f"digits-{number}")
        publish(store, number)
        add(store, record(number), place(number))
        assert len(known(store)) == number + 1
