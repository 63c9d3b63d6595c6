from __future__ import annotations

import hashlib
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from ddl_airflow import cli
from ddl_airflow.core.errors import (
    AccessDenied,
    NoSuchModel,
    ObjectArchived,
    QualityTooLow,
    StagingError,
)
from ddl_airflow.core.metrics import Measurement
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    check_not_worse,
    point,
    promote,
    read_pointer,
    rollback,
    why_stays,
)
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import publish
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client


def published(store, tmp_path, training_id, dag_id="digits"):
    """A whole publication of a training; returns its place in the store."""
    facts = {
        "dataset": {"fingerprint": "d"},
        "code": {"digest": "c"},
        "manifest": {"digest": "m"},
        "run": {"dag_id": dag_id, "parameters": {}, "due": "2026-11-20T20:15:00+00:00"},
        "result": {"metrics": {"accuracy": 0.5}},
    }
    record = tmp_path / f"{training_id}.json"
    record.write_text(json.dumps(facts))
    return f"{training_id}/{publish({'lineage.json': record}, store, training_id).name}"


@pytest.fixture
def results(tmp_path):
    """Three published trainings, in production one after the other."""
    store = FolderStore(tmp_path / "results")
    for number in (1, 2, 3):
        place = published(store, tmp_path, f"digits-{number}")
        point(store, "digits", PRODUCTION, place, {"accuracy": 0.9 + number / 100})
    return store


def test_nothing_is_named_before_something_is_published(tmp_path):
    store = FolderStore(tmp_path)
    assert read_pointer(store, "digits", LATEST) is None
    with pytest.raises(NoSuchModel, match="was ever in production"):
        rollback(store, "digits")


def test_the_newest_is_named_and_those_before_are_kept(results):
    now = read_pointer(results, "digits", PRODUCTION)
    assert now["training_id"] == "digits-3"
    place = now["publication"]
    assert now["model"] == f"{results.uri}/{place}/model" and place.startswith("digits-3/")
    assert now["metrics"] == {"accuracy": 0.93}
    assert [one["training_id"] for one in now["before"]] == ["digits-2", "digits-1"]
    assert point(results, "digits", PRODUCTION, place, {"accuracy": 0.93}) == now
    assert read_pointer(results, "digits", LATEST) is None
    assert read_pointer(results, "other", PRODUCTION) is None


def test_what_is_published_again_takes_its_place_back_only_if_it_was_trained_again(results):
    third, second = (
        read_pointer(results, "digits", PRODUCTION)["publication"],
        rollback(results, "digits")["publication"],
    )
    now = read_pointer(results, "digits", PRODUCTION)
    assert point(results, "digits", PRODUCTION, third, {"accuracy": 0.93}) == now
    # The same files under another name, as two uploads at the same moment would leave them.
    assert point(results, "digits", PRODUCTION, f"{third[:-8]}00000000", {}) == now
    now = point(results, "digits", PRODUCTION, "digits-3/another-content", {"accuracy": 0.99})
    assert (now["training_id"], now["metrics"]) == ("digits-3", {"accuracy": 0.99})
    assert [one["publication"] for one in now["before"]][:2] == [second, third]


def test_a_model_that_was_damaged_gives_way_to_the_same_one(results, tmp_path):
    place = read_pointer(results, "digits", PRODUCTION)["publication"]
    results.put_bytes(f"{place}/lineage.json", b"damaged")
    whole = published(results, tmp_path, "digits-3")
    assert whole != place and whole[:-8] == place[:-8]
    assert point(results, "digits", PRODUCTION, whole, {})["publication"] == whole


def test_a_run_that_was_due_before_does_not_overtake(results):
    def due(day):
        return datetime(2026, 11, day, tzinfo=UTC)

    now = point(results, "digits", PRODUCTION, "digits-5/a-1", {}, due=due(5))
    assert point(results, "digits", PRODUCTION, "digits-4/b-1", {}, due=due(4)) == now
    now = point(results, "digits", PRODUCTION, "digits-6/c-1", {}, due=due(6))
    assert now["training_id"] == "digits-6"


def test_a_check_sees_the_pointer_as_it_is_when_it_changes(results, monkeypatch):
    """Both beat .93; the one that is worse looks first, and writes last."""
    metrics, mine = {"accuracy": 0.94}, Measurement("accuracy", 0.94, "sample", "digits.npz", 9)
    put_if = FolderStore.put_if

    def overtaken(self, key, body, version):
        monkeypatch.undo()
        point(results, "digits", PRODUCTION, "digits-5/b-1", {"accuracy": 0.97})
        return put_if(self, key, body, version)

    monkeypatch.setattr(FolderStore, "put_if", overtaken)
    with pytest.raises(QualityTooLow, match="0.03 worse than the 0.97 .* production, digits-5"):
        point(
            *(results, "digits", PRODUCTION, "digits-4/a-1", metrics),
            check=lambda now: check_not_worse(mine, now, small=False),
        )
    assert read_pointer(results, "digits", PRODUCTION)["training_id"] == "digits-5"


def all_in_one_order(store, writers):
    with ThreadPoolExecutor(writers) as pool:
        list(
            pool.map(
                lambda n: point(store, "many", PRODUCTION, f"many-{n}/{n}-0", {}), range(writers)
            )
        )
    history = read_pointer(store, "many", PRODUCTION)["history"]
    assert {event["training_id"] for event in history} == {f"many-{n}" for n in range(writers)}
    assert [event["number"] for event in history] == [*range(writers, 0, -1)]


def test_of_a_hundred_who_write_at_the_same_time_each_is_in_the_history(tmp_path):
    all_in_one_order(FolderStore(tmp_path), 100)


def test_so_it_is_in_an_object_store():
    # One request at a time: moto looks at If-Match, and stores, in two steps.
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=False)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        client = s3_client(f"http://127.0.0.1:{server.port}", "k", "s")
        client.create_bucket(Bucket="pointers")
        all_in_one_order(S3Store(client, "pointers"), 25)
        client.close()
    finally:
        server.shutdown()
        serving.join()
        server.server_close()


def test_a_pointer_of_before_is_read_and_gone_back_from(results, tmp_path):
    """As written when each training was published in one place."""
    old = {"metrics": {}, "made_of": {}, "set": "2026-11-01T00:00:00+00:00"}
    body = {
        "schema": "ddl-airflow/pointer/1",
        **{"training_id": "old-2", "model": f"{results.uri}/old-2/model", **old},
        "before": [
            {"training_id": "old-1", "model": f"{results.uri}/old-1/model", "withdrawn": False}
            | old
        ],
    }
    results.put_bytes("old/production.json", json.dumps(body).encode())
    file = {"key": "model/x", "size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    etag = results.put_bytes("old-1/model/x", b"x").etag
    results.put_bytes("old-1/_SUCCESS", json.dumps({"files": [file | {"etag": etag}]}).encode())
    assert read_pointer(results, "old", PRODUCTION)["publication"] == "old-2"
    now = rollback(results, "old", by="me", reason="worse in the afternoon")
    assert now["model"] == f"{results.uri}/old-1/model"
    assert [(e["number"], e["event"], e["training_id"]) for e in now["history"]] == [
        (3, "rolled back", "old-1"),
        (2, "promoted", "old-2"),
        (1, "promoted", "old-1"),
    ]
    assert (now["history"][0]["by"], now["history"][0]["reason"]) == (
        "me",
        "worse in the afternoon",
    )


def test_going_back_goes_on_going_back(results):
    assert rollback(results, "digits")["training_id"] == "digits-2"
    now = rollback(results, "digits")
    assert (now["training_id"], now["metrics"]) == ("digits-1", {"accuracy": 0.91})
    with pytest.raises(
        NoSuchModel, match="no other training was.*There is: digits-2/.*, digits-3/"
    ):
        rollback(results, "digits")
    assert rollback(results, "digits", "digits-3")["training_id"] == "digits-3"


def test_going_back_further_does_not_come_back_to_what_was_passed_over(results, tmp_path):
    fourth = published(results, tmp_path, "digits-4")
    point(results, "digits", PRODUCTION, fourth, {"accuracy": 0.94})
    now = rollback(results, "digits", "digits-2")
    assert [(one["training_id"], one["withdrawn"]) for one in now["before"]] == [
        ("digits-4", True),
        ("digits-3", True),
        ("digits-1", False),
    ]
    assert rollback(results, "digits")["training_id"] == "digits-1"


@pytest.mark.parametrize("decide", [rollback, promote])
def test_who_has_not_seen_what_serves_changes_nothing(results, tmp_path, decide):
    """A page was open while somebody else put another model there."""
    third = read_pointer(results, "digits", PRODUCTION)["publication"]
    fourth = published(results, tmp_path, "digits-4")
    point(results, "digits", PRODUCTION, fourth, {"accuracy": 0.94})
    words = f"{fourth} is in production now, not {third}: .* decide again"
    with pytest.raises(NoSuchModel, match=words):
        decide(results, "digits", "digits-2", instead_of=third)
    assert read_pointer(results, "digits", PRODUCTION)["publication"] == fourth
    now = decide(results, "digits", "digits-2", instead_of=f"{fourth}/", mark="once")
    assert now["training_id"] == "digits-2"
    # Decided once: what serves since is no reason to fail.
    assert decide(results, "digits", "digits-2", instead_of=fourth, mark="once") == now


def test_what_serves_is_looked_at_as_it_is_when_it_changes(results, tmp_path, monkeypatch):
    third = read_pointer(results, "digits", PRODUCTION)["publication"]
    put_if = FolderStore.put_if

    def overtaken(self, key, body, version):
        monkeypatch.undo()
        point(results, "digits", PRODUCTION, "digits-4/a-1", {})
        return put_if(self, key, body, version)

    monkeypatch.setattr(FolderStore, "put_if", overtaken)
    with pytest.raises(NoSuchModel, match="digits-4/a-1 is in production now, not digits-3/"):
        rollback(results, "digits", "digits-2", instead_of=third)
    assert read_pointer(results, "digits", PRODUCTION)["training_id"] == "digits-4"


def test_one_that_only_the_history_still_has_is_gone_back_to(results, tmp_path):
    """Twenty earlier ones are kept whole; the history goes further back."""
    for number in range(4, 25):
        place = published(results, tmp_path, f"digits-{number}")
        point(results, "digits", PRODUCTION, place, {"accuracy": 0.95})
    now = read_pointer(results, "digits", PRODUCTION)
    assert "digits-1" not in {one["training_id"] for one in now["before"]}
    assert "digits-1" in {event["training_id"] for event in now["history"]}
    now = rollback(results, "digits", "digits-1", by="me", reason="it was better")
    assert (now["training_id"], now["metrics"]) == ("digits-1", {"accuracy": 0.5})
    assert now["due"] == "2026-11-20T20:15:00+00:00" and now["made_of"]["dataset"] == "d"
    assert (now["history"][0]["event"], now["history"][0]["reason"]) == (
        "rolled back",
        "it was better",
    )
    left = now["before"][0]
    assert (left["training_id"], left["withdrawn"]) == ("digits-24", True)
    with pytest.raises(NoSuchModel, match="no other training was in production before"):
        rollback(results, "digits")  # all that are known are newer
    with pytest.raises(NoSuchModel, match="digits-1 is in production now"):
        rollback(results, "digits", "digits-1")
    published(results, tmp_path, "digits-99")
    with pytest.raises(NoSuchModel, match="digits-99 was not in .*`ddl-airflow promote --to`"):
        rollback(results, "digits", "digits-99")


def test_results_that_were_moved_are_gone_back_from_and_promoted_as_before(results, tmp_path):
    copy = shutil.copytree(results.path, tmp_path / "moved", copy_function=shutil.copyfile)
    moved = FolderStore(copy)
    now = rollback(moved, "digits")
    assert now["training_id"] == "digits-2" and now["model"].startswith(moved.uri)
    assert promote(moved, "digits", "digits-3")["training_id"] == "digits-3"


def test_what_is_gone_is_not_put_into_production(results):
    (second,) = [
        one["publication"]
        for one in read_pointer(results, "digits", PRODUCTION)["before"]
        if one["training_id"] == "digits-2"
    ]
    results.delete([f"{second}/lineage.json"])
    with pytest.raises(NoSuchModel, match=f"{second} is no longer there"):
        rollback(results, "digits")
    with pytest.raises(NoSuchModel, match=f"{second} is not there"):
        promote(results, "digits", second)
    with pytest.raises(NoSuchModel, match="digits-9 was not in production"):
        rollback(results, "digits", "digits-9")
    with pytest.raises(NoSuchModel, match="is a model of digits, not of others"):
        promote(results, "others", "digits-1")
    assert read_pointer(results, "digits", PRODUCTION)["training_id"] == "digits-3"


def test_a_place_with_a_slash_too_many_is_that_place(results, capsys):
    """As a shell completes the name of a folder."""
    first = read_pointer(results, "digits", PRODUCTION)["before"][-1]["publication"]
    assert cli.main(["promote", f"{results.uri}/digits", "--to", f"{first}/"]) == 0
    now = read_pointer(results, "digits", PRODUCTION)
    assert now["publication"] == first and now["training_id"] == "digits-1"
    assert now["model"] == f"{results.uri}/{first}/model"
    assert rollback(results, "digits", "digits-2/")["training_id"] == "digits-2"
    written = (results.path / "digits" / "production.json").read_bytes()
    for to in (f"{first}/model", f"{results.uri}/{first}", f"{first}/..", "digits-1/model"):
        with pytest.raises(NoSuchModel, match="is neither a training's id nor"):
            promote(results, "digits", to)
    with pytest.raises(NoSuchModel, match="is no place of a publication"):
        point(results, "digits", PRODUCTION, "digits-9/a-1/", {})
    assert (results.path / "digits" / "production.json").read_bytes() == written
    # What an earlier version of ours wrote for it.
    (results.path / "digits" / "production.json").write_text(
        written.decode().replace(f'{first}"', f'{first}/"').replace(f"{first}/m", f"{first}//m")
    )
    (one,) = [
        one
        for one in read_pointer(results, "digits", PRODUCTION)["before"]
        if one["training_id"] == "digits-1"
    ]
    assert (one["publication"], one["model"]) == (first, f"{results.uri}/{first}/model")


@pytest.mark.parametrize("body", [b'{"publication": "digi', b"\xff", b"[]", b""])
def test_a_damaged_pointer_is_named(results, capsys, body):
    place = results.path / "digits" / "production.json"
    place.write_bytes(body)
    for change in (read_pointer, point):
        more = ("digits-4/a-1", {}) if change is point else ()
        with pytest.raises(
            StagingError, match="^file://.*digits/production.json is damaged: .* or"
        ):
            change(results, "digits", PRODUCTION, *more)
    assert cli.main(["rollback", f"{results.uri}/digits"]) == 1
    assert "production.json is damaged" in capsys.readouterr().err
    assert place.read_bytes() == body


def test_many_are_kept_but_not_all(results):
    for number in range(4, 40):
        point(results, "digits", PRODUCTION, f"digits-{number}/a-1", {})
    now = read_pointer(results, "digits", PRODUCTION)
    kept = [one["training_id"] for one in now["before"]]
    assert kept == [f"digits-{n}" for n in range(38, 18, -1)]
    assert len(now["history"]) == 39


@pytest.mark.parametrize("name", [LATEST, PRODUCTION])
def test_what_only_the_history_still_has_takes_no_place_back(results, name):
    """An old upload is cleared: its model was named before, or somebody has gone back from it."""
    due = datetime(2026, 11, 20, tzinfo=UTC)
    for number in range(4, 40):
        place = f"digits-{number}/a-1"
        point(results, "digits", name, place, {}, due=due if name == PRODUCTION else None)
    now = read_pointer(results, "digits", name)
    for place in ("digits-4/a-1", "digits-4/a-2"):  # the second: the same content again
        later = due + timedelta(days=1) if name == PRODUCTION else None
        assert point(results, "digits", name, place, {}, due=later) == now
    assert point(results, "digits", name, "digits-4/b-1", {})["publication"] == "digits-4/b-1"


def test_a_withdrawn_model_that_only_the_history_still_has_stays_away(results, tmp_path):
    bad, due = published(results, tmp_path, "digits-4"), datetime(2026, 11, 20, tzinfo=UTC)
    point(results, "digits", PRODUCTION, bad, {})
    rollback(results, "digits", reason="it is bad")
    for number in range(5, 30):
        point(results, "digits", PRODUCTION, f"digits-{number}/a-1", {}, due=due)
    now = read_pointer(results, "digits", PRODUCTION)
    assert bad not in [one["publication"] for one in now["before"]]
    later = due + timedelta(days=1)
    assert point(results, "digits", PRODUCTION, bad, {}, due=later) == now
    assert promote(results, "digits", bad)["publication"] == bad  # a person may


@pytest.mark.parametrize("fails_in", ["put_if", "restore"])
def test_after_an_error_that_may_have_come_too_late_nobody_goes_back_twice(
    results, capsys, monkeypatch, fails_in
):
    """Whoever repeats the command would go one further back, from a good model."""

    def fails(*_):
        raise StagingError("the answer was lost.")

    put_if = FolderStore.put_if

    def loses_the_answer(*asked):
        put_if(*asked)
        fails()

    with monkeypatch.context() as patched:
        if fails_in == "put_if":
            patched.setattr(FolderStore, "put_if", loses_the_answer)
        else:
            patched.setattr("ddl_airflow.lineage.production.restore", fails)
        place = f"{results.uri}/digits"
        assert cli.main(["rollback", place]) == 1
    assert read_pointer(results, "digits", PRODUCTION)["training_id"] == "digits-2"
    said = capsys.readouterr().err
    changed = {"put_if": "may have changed", "restore": "has changed"}[fails_in]
    assert f"ddl-airflow: the answer was lost. Production {changed} all the same" in said
    assert said.endswith(
        f"Look what serves before you go back again: ddl-airflow production {place}\n"
    )


@pytest.mark.parametrize("fails_in", ["read_version", "put_if"])
def test_an_error_that_came_in_time_says_nothing_of_a_change(
    results, capsys, monkeypatch, fails_in
):
    """Others were faster, and then the store cannot be read."""

    def fails(*_):
        raise StagingError("it is away.")

    def is_late(*_):
        monkeypatch.setattr("ddl_airflow.lineage.production.missing_from", fails)
        return False

    place = f"{results.uri}/digits"
    monkeypatch.setattr(FolderStore, "put_if", is_late)
    if fails_in == "read_version":
        monkeypatch.setattr("ddl_airflow.lineage.production._read", fails)
    assert cli.main(["rollback", place]) == 1
    assert capsys.readouterr().err == "ddl-airflow: it is away.\n"
    # That one may be asked for again and again.
    monkeypatch.setattr(FolderStore, "put_if", fails)
    assert cli.main(["rollback", place, "--to", "digits-2"]) == 1
    assert capsys.readouterr().err == "ddl-airflow: it is away.\n"


def test_in_the_dags_folder_the_commands_take_a_point(results, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path / "results" / "digits")
    for place in (".", "./", "../digits", "../../results/digits/."):
        assert cli.main(["production", place]) == 0, place
        assert json.loads(capsys.readouterr().out)["training_id"] == "digits-3"
    assert cli.main(["rollback", "."]) == 0
    assert f"in production again: {results.uri}/digits-2/" in capsys.readouterr().out
    assert cli.main(["promote", ".", "--to", "digits-1"]) == 0
    monkeypatch.chdir(tmp_path / "results")
    assert cli.main(["production", "."]) == 1
    assert ". is no DAG's. Name one, as ./digits; " in capsys.readouterr().err


def test_the_uri_of_a_folder_may_name_a_dag_that_is_not_ascii(results, capsys, tmp_path):
    (tmp_path / "results" / "digits").rename(tmp_path / "results" / "zähler")
    assert cli.main(["production", (tmp_path / "results" / "zähler").as_uri()]) == 0
    assert json.loads(capsys.readouterr().out)["training_id"] == "digits-3"


def test_commands(results, capsys):
    place = f"{results.uri}/digits"
    assert cli.main(["production", place]) == 0
    assert json.loads(capsys.readouterr().out)["training_id"] == "digits-3"
    assert cli.main(["rollback", place, "--reason", "too slow"]) == 0
    assert f"in production again: {results.uri}/digits-2/" in capsys.readouterr().out
    event = read_pointer(results, "digits", PRODUCTION)["history"][0]
    assert (event["event"], event["reason"]) == ("rolled back", "too slow") and event["by"]
    assert cli.main(["rollback", place, "--to", "digits-9"]) == 1
    assert "digits-9 was not in production" in capsys.readouterr().err
    # What was never in production, or is there no longer, or was due before: a person may.
    assert cli.main(["promote", place, "--to", "digits-1", "--reason", "best of all"]) == 0
    assert f"in production: {results.uri}/digits-1/" in capsys.readouterr().out
    now = read_pointer(results, "digits", PRODUCTION)
    assert (now["metrics"], now["made_of"]["dataset"]) == ({"accuracy": 0.5}, "d")
    assert cli.main(["production", f"{results.uri}/other"]) == 1


def published_model(store, tmp_path, training_id, weights, record="", dag_id="digits"):
    """A publication with a model, and what a record has beside it; returns its place."""
    folder = tmp_path / f"{training_id}-{weights}-{record}"
    folder.mkdir(exist_ok=True)
    made = {"dataset": {"fingerprint": "d"}, "code": {"digest": "c"}, "manifest": {"digest": "m"}}
    made |= {"run": {"dag_id": dag_id, "parameters": {}}, "result": {"metrics": {"note": 1}}}
    (folder / "model").write_text(weights)
    (folder / "lineage.json").write_text(json.dumps(made | {"of": record}))
    files = {"model/saved_model.pb": folder / "model", "lineage.json": folder / "lineage.json"}
    return f"{training_id}/{publish(files, store, training_id).name}"


def without_digests(store, name=PRODUCTION):
    """The pointer as an earlier version of ours has written it."""
    body = json.loads(store.read_bytes(f"digits/{name}.json"))
    for one in (body, *body["before"], *body["history"]):
        one.pop("digest", None)
    for event in body["history"]:
        event.pop("withdrawn", None)
    store.put_bytes(f"digits/{name}.json", json.dumps(body).encode())


@pytest.fixture
def again(tmp_path):
    """In production: a good model, then a bad one three times: its upload was cleared when Airflow
    was another, and another run trained the same. Returns the store and the places.
    """
    store = FolderStore(tmp_path / "results")
    places = [
        published_model(store, tmp_path, *made)
        for made in (
            ("digits-1", "good"),
            ("digits-2", "bad", "first"),
            ("digits-2", "bad", "second"),
            ("digits-3", "bad", "third"),
        )
    ]
    for place in places:
        point(store, "digits", PRODUCTION, place, {"accuracy": 0.9})
    assert len(set(places)) == 4
    assert read_pointer(store, "digits", PRODUCTION)["publication"] == places[-1]
    return store, places


@pytest.mark.parametrize("written_before", [False, True])
def test_going_back_does_not_end_at_the_same_weights(again, capsys, written_before):
    store, places = again
    if written_before:
        without_digests(store)
    assert cli.main(["rollback", f"{store.uri}/digits"]) == 0
    now = read_pointer(store, "digits", PRODUCTION)
    assert now["publication"] == places[0] and now["metrics"] == {"accuracy": 0.9}
    said = capsys.readouterr()
    for place in places[1:3]:
        assert f"{place} is passed over: it holds the very model that is in production" in said.err
    assert list(now["history"][0]["passed_over"]) == [places[2], places[1]]
    assert [one["withdrawn"] for one in now["before"]] == [True] * 3
    assert cli.main(["rollback", f"{store.uri}/digits"]) == 1
    assert "no other training was in production before" in capsys.readouterr().err


def test_where_all_before_are_the_same_weights_that_is_said(tmp_path):
    store = FolderStore(tmp_path / "results")
    places = [published_model(store, tmp_path, f"digits-{n}", "bad", str(n)) for n in (1, 2)]
    for place in places:
        point(store, "digits", PRODUCTION, place, {})
    written = store.read_bytes("digits/production.json")
    with pytest.raises(NoSuchModel, match=f"{places[0]} holds the very model that is in product"):
        rollback(store, "digits")
    with pytest.raises(NoSuchModel, match="digits-1 holds the very model .* changes nothing.*prom"):
        rollback(store, "digits", "digits-1")
    assert store.read_bytes("digits/production.json") == written
    now = promote(store, "digits", "digits-1")  # a person may
    assert now["publication"] == places[0]


def test_of_a_training_that_is_named_the_other_weights_are_gone_back_to(again, tmp_path):
    store, _ = again
    other = published_model(store, tmp_path, "digits-2", "better")
    bad = published_model(store, tmp_path, "digits-2", "bad", "fourth")
    for place in (other, bad):
        promote(store, "digits", place)
    assert rollback(store, "digits", "digits-2")["publication"] == other


@pytest.mark.parametrize("written_before", [False, True])
@pytest.mark.parametrize("training_id", ["digits-2", "digits-3"])
def test_a_withdrawn_model_does_not_come_back_with_another_record(
    tmp_path, written_before, training_id
):
    """Its upload is cleared, with newer versions in the record; or a rerun made the same bytes."""
    store = FolderStore(tmp_path / "results")
    good = published_model(store, tmp_path, "digits-1", "good")
    bad = published_model(store, tmp_path, "digits-2", "bad", "first")
    for place in (good, bad):
        point(store, "digits", PRODUCTION, place, {})
    rollback(store, "digits", reason="it is bad")
    for number in range(4, 29):  # so that only the history knows the bad one
        place = published_model(store, tmp_path, f"digits-{number}", f"model {number}")
        point(store, "digits", PRODUCTION, place, {})
    if written_before:
        without_digests(store)
    again = published_model(store, tmp_path, training_id, "bad", "second")
    assert again != bad
    now = read_pointer(store, "digits", PRODUCTION)
    assert point(store, "digits", PRODUCTION, again, {}) == now
    why = why_stays(store, "digits", now, again)
    assert f"this very model before, as {bad}, and somebody went back from it" in why
    assert f"`ddl-airflow promote {store.uri}/digits --to {again}`" in why
    assert point(store, "digits", LATEST, again, {})["publication"] == again
    # Who thinks otherwise may; and from then on it is a model as any other.
    assert promote(store, "digits", again)["publication"] == again
    place = published_model(store, tmp_path, "digits-30", "model 30")
    point(store, "digits", PRODUCTION, place, {})
    third = published_model(store, tmp_path, "digits-31", "bad", "third")
    assert point(store, "digits", PRODUCTION, third, {})["publication"] == third


def test_a_withdrawn_model_that_was_deleted_does_not_come_back_either(again, tmp_path):
    store, places = again
    rollback(store, "digits")
    for place in places[1:]:
        shutil.rmtree(store.path / place)
    back = published_model(store, tmp_path, "digits-3", "bad", "once more")
    assert point(store, "digits", PRODUCTION, back, {})["publication"] == places[0]


def test_a_model_that_was_passed_over_does_not_come_back_either(again, tmp_path):
    store, places = again
    best = published_model(store, tmp_path, "digits-4", "best")
    point(store, "digits", PRODUCTION, best, {})
    assert rollback(store, "digits", "digits-1")["publication"] == places[0]
    for number in range(5, 30):
        place = published_model(store, tmp_path, f"digits-{number}", f"model {number}")
        point(store, "digits", PRODUCTION, place, {})
    for weights in ("bad", "best"):
        back = published_model(store, tmp_path, "digits-40", weights, "again")
        assert point(store, "digits", PRODUCTION, back, {})["publication"] == place


@pytest.mark.parametrize("name", [LATEST, PRODUCTION])
def test_an_old_upload_that_is_cleared_brings_its_model_back_with_no_record(tmp_path, name):
    """As after an upgrade: the record has other versions in it."""
    store = FolderStore(tmp_path / "results")
    first = published_model(store, tmp_path, "digits-1", "one", "first")
    newer = published_model(store, tmp_path, "digits-2", "two")
    for place in (first, newer):
        point(store, "digits", name, place, {})
    cleared = published_model(store, tmp_path, "digits-1", "one", "second")
    assert point(store, "digits", name, cleared, {})["publication"] == newer
    signed = published_model(store, tmp_path, "digits-2", "two", "signed")
    assert point(store, "digits", name, signed, {})["publication"] == signed


def test_of_two_uploads_and_one_who_goes_back_at_once_the_model_is_gone(
    again, tmp_path, monkeypatch
):
    """The other upload comes between what the first has read and what it writes."""
    store, places = again
    fourth = published_model(store, tmp_path, "digits-4", "bad", "fourth")
    put_if = FolderStore.put_if

    def overtaken(self, key, body, version):
        monkeypatch.undo()
        assert rollback(store, "digits")["publication"] == places[0]
        return put_if(self, key, body, version)

    monkeypatch.setattr(FolderStore, "put_if", overtaken)
    assert point(store, "digits", PRODUCTION, fourth, {})["publication"] == places[0]

    best = published_model(store, tmp_path, "digits-5", "best")
    point(store, "digits", PRODUCTION, best, {})
    again_best = published_model(store, tmp_path, "digits-6", "best", "again")

    def overtakes(self, key, body, version):
        monkeypatch.undo()
        assert point(store, "digits", PRODUCTION, again_best, {})["publication"] == again_best
        return put_if(self, key, body, version)

    monkeypatch.setattr(FolderStore, "put_if", overtakes)
    now = rollback(store, "digits")
    assert now["publication"] == places[0] and set(now["history"][0]["withdrawn"]) >= {
        best,
        again_best,
    }


def test_who_may_not_write_changes_nothing_and_is_told(again, tmp_path, monkeypatch):
    store, _ = again
    written = store.read_bytes("digits/production.json")
    place = published_model(store, tmp_path, "digits-9", "new")

    def refused(*_):
        raise AccessDenied("digits/production.json: you may not write")

    monkeypatch.setattr(FolderStore, "put_if", refused)
    for change in (
        lambda: rollback(store, "digits"),
        lambda: promote(store, "digits", place),
        lambda: point(store, "digits", PRODUCTION, place, {}),
    ):
        with pytest.raises(AccessDenied, match="you may not write"):
            change()
    assert store.read_bytes("digits/production.json") == written


def test_whose_marker_may_not_be_read_hinders_no_other(again, tmp_path, monkeypatch):
    store, places = again
    rollback(store, "digits")
    without_digests(store)
    read = FolderStore.read_version

    def refused(self, key):
        if any(place in self.uri for place in places[1:]):
            raise AccessDenied(f"{key}: it is archived")
        return read(self, key)

    monkeypatch.setattr(FolderStore, "read_version", refused)
    place = published_model(store, tmp_path, "digits-9", "new")
    assert point(store, "digits", PRODUCTION, place, {})["publication"] == place


def test_a_history_without_digests_is_read_by_one_upload_and_not_by_each(tmp_path, monkeypatch):
    """After 30 goings back with an earlier version of ours."""
    store = FolderStore(tmp_path / "results")
    place = published_model(store, tmp_path, "digits-0", "good")
    point(store, "digits", PRODUCTION, place, {})
    for number in range(1, 31):
        place = published_model(store, tmp_path, f"digits-{number}", f"bad {number}")
        point(store, "digits", PRODUCTION, place, {})
        rollback(store, "digits")
    without_digests(store)
    read, markers = FolderStore.read_version, []

    def counted(self, key):
        markers.extend([self.uri] * (key == "_SUCCESS"))
        return read(self, key)

    monkeypatch.setattr(FolderStore, "read_version", counted)
    many = []
    for number in (31, 32):
        place = published_model(store, tmp_path, f"digits-{number}", f"new {number}")
        markers.clear()
        assert point(store, "digits", PRODUCTION, place, {})["publication"] == place
        many.append(len(markers))
    assert many[0] >= 30 and many[1] < 5, many
    # What somebody went back from stays out, of whatever version the event is.
    for number in (7, 30):
        place = published_model(store, tmp_path, f"digits-again-{number}", f"bad {number}")
        assert point(store, "digits", PRODUCTION, place, {})["publication"] != place


def test_what_a_newer_version_says_of_a_model_goes_along_with_it(again):
    store, places = again
    body = json.loads(store.read_bytes("digits/production.json"))
    for one in (body, *body["before"]):
        one["fairness"] = one["publication"]
    store.put_bytes("digits/production.json", json.dumps(body).encode())
    now = rollback(store, "digits")
    assert now["fairness"] == places[0]
    assert [one["fairness"] for one in now["before"]] == places[:0:-1]
    with pytest.raises(TypeError, match="fairness"):
        point(store, "digits", PRODUCTION, "digits-9/a-1", {}, fairness=1)


@pytest.mark.parametrize("put_back", [promote, rollback])
def test_a_model_that_was_put_back_by_hand_before_digests_comes_again(tmp_path, put_back):
    store = FolderStore(tmp_path / "results")
    good, bad, new, again = (
        published_model(store, tmp_path, *made)
        for made in (
            ("digits-1", "good"),
            ("digits-2", "bad"),
            ("digits-3", "new"),
            ("digits-4", "bad", "second"),
        )
    )
    point(store, "digits", PRODUCTION, good, {})
    point(store, "digits", PRODUCTION, bad, {})
    rollback(store, "digits")
    put_back(store, "digits", bad)
    point(store, "digits", PRODUCTION, new, {})
    without_digests(store)
    assert point(store, "digits", PRODUCTION, again, {})["publication"] == again


@pytest.mark.parametrize("name", [PRODUCTION, LATEST])
def test_a_training_that_serves_is_trained_again_as_it_was_before(tmp_path, name):
    store = FolderStore(tmp_path / "results")
    for words in (("old",), ("new",), ("old", "another record")):
        place = published_model(store, tmp_path, "digits-1", *words)
        assert point(store, "digits", name, place, {})["publication"] == place


def test_a_place_that_cannot_be_looked_at_hinders_no_other(again, tmp_path, monkeypatch):
    store, places = again
    rollback(store, "digits")
    without_digests(store)
    body = json.loads(store.read_bytes("digits/production.json"))
    odd = ["..", "a\0b", "x" * 300, "file/abc"]
    (tmp_path / "results" / "file").write_text("of somebody")
    for number, place in enumerate(odd):
        body["before"].append(body["before"][0] | {"publication": place})
        body["history"].append(body["history"][0] | {"publication": place, "number": -number})
    store.put_bytes("digits/production.json", json.dumps(body).encode())
    read = FolderStore.read_version

    def refused(self, key):
        if any(place in self.uri for place in places[1:]):
            raise StagingError("KMS.DisabledException: the key is disabled", retryable=False)
        return read(self, key)

    monkeypatch.setattr(FolderStore, "read_version", refused)
    place = published_model(store, tmp_path, "digits-9", "new")
    assert point(store, "digits", PRODUCTION, place, {})["publication"] == place


def test_a_store_that_is_away_for_a_moment_is_asked_again(again, tmp_path, monkeypatch):
    store, places = again
    rollback(store, "digits")
    without_digests(store)
    place = published_model(store, tmp_path, "digits-9", "bad", "fifth")
    read = FolderStore.read_version

    def away(self, key):
        if any(place in self.uri for place in places[1:]):
            raise StagingError("SlowDown", retryable=True)
        return read(self, key)

    with monkeypatch.context() as patched, pytest.raises(StagingError, match="SlowDown"):
        patched.setattr(FolderStore, "read_version", away)
        point(store, "digits", PRODUCTION, place, {})
    assert point(store, "digits", PRODUCTION, place, {})["publication"] == places[0]


def test_from_a_damaged_model_a_whole_copy_of_it_is_gone_back_to(tmp_path):
    store = FolderStore(tmp_path / "results")
    whole, damaged = (published_model(store, tmp_path, f"digits-{n}", "same", n) for n in "12")
    for place in (whole, damaged):
        point(store, "digits", PRODUCTION, place, {})
    shutil.rmtree(tmp_path / "results" / damaged / "model")
    assert rollback(store, "digits", whole)["publication"] == whole


def test_which_publication_is_the_newest_an_archived_marker_does_not_say(tmp_path, monkeypatch):
    store = FolderStore(tmp_path / "results")
    published_model(store, tmp_path, "digits-1", "old")
    newest = published_model(store, tmp_path, "digits-1", "new")
    listed = FolderStore.list

    def archived(self, *words):
        return [
            replace(one, archived="GLACIER") if f"{self.uri}/{one.key}".endswith(name) else one
            for one in listed(self, *words)
        ]

    name = f"{newest}/_SUCCESS"
    monkeypatch.setattr(FolderStore, "list", archived)
    with pytest.raises(ObjectArchived, match=r"GLACIER.*say which one, digits-1/<name>"):
        promote(store, "digits", "digits-1")
