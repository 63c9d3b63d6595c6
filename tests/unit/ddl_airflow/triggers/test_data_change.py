from __future__ import annotations

import asyncio
from importlib import import_module

import pytest

from ddl_airflow.triggers.data_change import DataChangeTrigger


class State:
    """Airflow's state of one asset."""

    def __init__(self):
        self.kept = {}

    def get(self, key, default=None):
        return self.kept.get(key, default)

    def set(self, key, value):
        self.kept[key] = value


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a").write_text("1")
    return folder


def fired(data, state, changes, polls=12):
    """What the trigger yields in so many looks; changes[n]() comes before look n."""
    trigger = DataChangeTrigger(data.as_uri(), interval_s=0)
    trigger.asset_state_store = state
    looks = 0
    look = trigger._look

    def counted():
        nonlocal looks
        changes.get(looks, lambda: None)()
        looks += 1
        if looks > polls:
            raise EOFError
        return look()

    trigger._look = counted

    async def collect():
        events = []
        with pytest.raises(EOFError):
            async for event in trigger.run():
                events.append(event.payload)
        return events

    return asyncio.run(collect())


def test_it_fires_once_for_what_is_there_and_once_for_each_change(data):
    def change():
        (data / "b").write_text("22")

    state = State()
    first, second = fired(data, state, {6: change})
    assert (first["files"], first["bytes"]) == (1, 1)
    assert (second["files"], second["bytes"], second["uri"]) == (2, 3, data.as_uri())
    assert first["fingerprint"] != second["fingerprint"]
    assert fired(data, state, {}) == [], "a triggerer that starts again"


def test_an_upload_of_many_files_is_one_event(data):
    changes = {n: (lambda n=n: (data / f"f{n}").write_text("x")) for n in range(8)}
    (event,) = fired(data, State(), changes)
    assert event["files"] == 9


def test_a_dataset_that_is_away_is_looked_at_again(data):
    back = data.with_name("elsewhere")
    changes = {0: lambda: data.rename(back), 6: lambda: back.rename(data)}
    (event,) = fired(data, State(), changes)
    assert event["files"] == 1


def test_it_comes_out_of_airflows_database_as_it_went_in():
    connection = {"conn_id": "my_s3"}
    path, arguments = DataChangeTrigger("s3://b/p", connection, 5.0).serialize()
    module, _, name = path.rpartition(".")
    again = getattr(import_module(module), name)(**arguments)
    assert (again.uri, again.connection, again.interval_s) == ("s3://b/p", connection, 5.0)
