from __future__ import annotations

import json

import pytest

from ddl_airflow import cli
from ddl_airflow.core.errors import NoSuchModel
from ddl_airflow.lineage.production import LATEST, PRODUCTION, point, read_pointer, rollback
from ddl_airflow.storage.filesystem import FolderStore


@pytest.fixture
def results(tmp_path):
    """Three published trainings, in production one after the other."""
    store = FolderStore(tmp_path / "results")
    for number in (1, 2, 3):
        store.put_bytes(f"digits-{number}/_SUCCESS", b"{}")
        point(store, "digits", PRODUCTION, f"digits-{number}", {"accuracy": 0.9 + number / 100})
    return store


def test_nothing_is_named_before_something_is_published(tmp_path):
    store = FolderStore(tmp_path)
    assert read_pointer(store, "digits", LATEST) is None
    with pytest.raises(NoSuchModel, match="was ever in production"):
        rollback(store, "digits")


def test_the_newest_is_named_and_those_before_are_kept(results):
    now = read_pointer(results, "digits", PRODUCTION)
    assert now["training_id"] == "digits-3"
    assert now["model"] == f"{results.uri}/digits-3/model"
    assert now["metrics"] == {"accuracy": 0.93}
    assert [one["training_id"] for one in now["before"]] == ["digits-2", "digits-1"]
    assert point(results, "digits", PRODUCTION, "digits-3", {"accuracy": 0.93}) == now
    assert read_pointer(results, "digits", LATEST) is None
    assert read_pointer(results, "other", PRODUCTION) is None


def test_what_is_published_again_takes_its_place_back_only_if_it_was_trained_again(results):
    now = rollback(results, "digits")
    assert point(results, "digits", PRODUCTION, "digits-3", {"accuracy": 0.93}) == now
    assert point(results, "digits", PRODUCTION, "digits-1", {"accuracy": 0.91}) == now
    now = point(results, "digits", PRODUCTION, "digits-2", {"accuracy": 0.99})
    assert (now["training_id"], now["metrics"]) == ("digits-2", {"accuracy": 0.99})
    assert [one["training_id"] for one in now["before"]] == ["digits-3", "digits-1"]
    now = point(results, "digits", PRODUCTION, "digits-1", {"accuracy": 0.95})
    assert now["training_id"] == "digits-1"


def test_going_back_goes_on_going_back(results):
    assert rollback(results, "digits")["training_id"] == "digits-2"
    now = rollback(results, "digits")
    assert (now["training_id"], now["metrics"]) == ("digits-1", {"accuracy": 0.91})
    with pytest.raises(NoSuchModel, match="no other training was.*There is: digits-2, digits-3"):
        rollback(results, "digits")
    assert rollback(results, "digits", "digits-3")["training_id"] == "digits-3"


def test_what_is_gone_is_not_put_into_production(results):
    results.delete(["digits-2/_SUCCESS"])
    with pytest.raises(NoSuchModel, match="digits-2 is no longer there"):
        rollback(results, "digits")
    with pytest.raises(NoSuchModel, match="digits-9 was not in production"):
        rollback(results, "digits", "digits-9")
    assert read_pointer(results, "digits", PRODUCTION)["training_id"] == "digits-3"


def test_many_are_kept_but_not_all(results):
    for number in range(4, 40):
        point(results, "digits", PRODUCTION, f"digits-{number}", {})
    before = read_pointer(results, "digits", PRODUCTION)["before"]
    assert [one["training_id"] for one in before] == [f"digits-{n}" for n in range(38, 18, -1)]


def test_commands(results, capsys):
    place = f"{results.uri}/digits"
    assert cli.main(["production", place]) == 0
    assert json.loads(capsys.readouterr().out)["training_id"] == "digits-3"
    assert cli.main(["rollback", place]) == 0
    assert capsys.readouterr().out == f"in production again: {results.uri}/digits-2/model\n"
    assert cli.main(["rollback", place, "--to", "digits-9"]) == 1
    assert "digits-9 was not in production" in capsys.readouterr().err
    assert cli.main(["production", f"{results.uri}/other"]) == 1
