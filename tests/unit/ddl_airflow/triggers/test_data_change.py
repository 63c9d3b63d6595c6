from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest

from ddl_airflow.core.errors import SourceMissing, StagingError
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.triggers.data_change import DataChangeTrigger
from ddl_airflow.triggers.experiment import ExperimentTrigger
from tests.limits import within


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


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), 1e9])
def test_an_interval_that_is_none_is_refused(data, seconds):
    """By what the triggerer takes for one trigger's fault: any other error would end them all."""
    with pytest.raises(TypeError, match="interval_s is .* seconds between two looks, from 0.001"):
        DataChangeTrigger(data.as_uri(), interval_s=seconds)


def fired(data, state, changes, polls=12, trigger_id=1):
    """What the trigger yields in so many looks; changes[n]() comes before look n."""
    trigger = DataChangeTrigger(data.as_uri(), interval_s=0.001)
    trigger.asset_state_store, trigger.trigger_id = state, trigger_id
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


def test_what_changed_while_the_dag_was_paused_is_told_when_it_goes_on(data):
    """Airflow starts nothing for the event, and makes another trigger when the DAG goes on."""
    state = State()
    assert len(fired(data, state, {6: lambda: (data / "b").write_text("22")})) == 2
    (event,) = fired(data, state, {}, trigger_id=2)
    assert event["files"] == 2
    assert fired(data, state, {}, trigger_id=2) == [], "a triggerer that starts again"


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
    # Two of one dataset are two to Airflow, which hashes the arguments.
    other = DataChangeTrigger("s3://b/p", connection, 5.0, "other").serialize()
    assert other[1] != arguments
    # To Airflow it is the trigger that it was before there were patterns.
    assert "include" not in arguments
    some = DataChangeTrigger("s3://b/p", connection, 5.0, exclude=["*.tmp"]).serialize()
    assert DataChangeTrigger(**some[1]).exclude == ["*.tmp"]


class Killed(BaseException):
    """SIGKILL of the triggerer."""


class Triggerer:
    """Airflow's, killed at one of its operations; None: it runs on until there was time for all.

    What it has got from a trigger is in the database one interval later.
    """

    def __init__(self, data, state, kill_at):
        self.state, self.kill_at, self.count = state, kill_at, 0
        self.queued, self.sent = [], []
        self.trigger = DataChangeTrigger(data.as_uri(), interval_s=0.001)
        self.trigger.asset_state_store = self
        look = self.trigger._look
        self.trigger._look = lambda: self.does(look)

    def does(self, operation):
        if self.count == (12 if self.kill_at is None else self.kill_at):
            raise Killed
        self.count += 1
        return operation()

    def get(self, key, default=None):
        return self.does(lambda: self.state.get(key, default))

    def set(self, key, value):
        self.does(lambda: self.state.set(key, value))

    async def runs(self):
        try:
            async for event in self.trigger.run():
                self.does(lambda: None)
                self.queued.append(event.payload["fingerprint"])
                looks = self.trigger._look
                self.trigger._look = lambda looks=looks: (self.does(self.send), looks())[1]
        except Killed:
            pass

    def send(self):
        self.sent += self.queued
        self.queued.clear()


def test_a_change_is_not_lost_wherever_the_triggerer_is_killed(data):
    for kill_at in range(12):
        state, sent = State(), []
        for at in (kill_at, None):
            triggerer = Triggerer(data, state, at)
            asyncio.run(triggerer.runs())
            sent += triggerer.sent
        assert len(set(sent)) == 1, kill_at
        assert set(sent) == {said.rpartition(" ")[2] for said in state.kept.values()}, kill_at


def test_fifty_over_one_dataset_list_it_once_each_interval(data):
    looks = []

    async def fires(trigger):
        look = trigger._look
        trigger._look = lambda: (looks.append(1), look())[1]
        trigger.asset_state_store = State()
        async for event in trigger.run():
            return event.payload["files"]

    async def all_fire():
        triggers = [DataChangeTrigger(data.as_uri(), None, 0.5, f"dag-{n}") for n in range(50)]
        return await asyncio.gather(*map(fires, triggers))

    assert asyncio.run(all_fire()) == [1] * 50
    assert 2 <= len(looks) <= 10


def test_folders_that_hang_keep_nobody_else_waiting(data, tmp_path, monkeypatch, capsys):
    """As on an NFS whose server is away: no call on it comes back."""
    monkeypatch.setattr("ddl_airflow.triggers.monitor._SILENT_S", 0.05, raising=False)
    server = threading.Event()

    def trigger_of(uri, look):
        trigger = DataChangeTrigger(uri, interval_s=0.01)
        trigger._look = look
        return trigger

    async def look():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))  # as on a host with few cores
        away = [trigger_of(f"file:///away/{n % 8}", server.wait) for n in range(24)]
        waiting = [asyncio.create_task(anext(trigger.run())) for trigger in away]
        waiting.append(asyncio.create_task(anext(ExperimentTrigger("/away/wide").run())))
        await asyncio.sleep(0.1)
        found = {"fingerprint": "f", "files": 1, "bytes": 1}
        for uri in ("s3://bucket/data", data.as_uri()):
            event = await anext(trigger_of(uri, lambda: found).run())
            assert event.payload["fingerprint"] == "f"
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()

    async def look_for_a_while():
        try:
            await asyncio.wait_for(look(), within(10))
        finally:  # else nobody joins these threads
            server.set()

    monkeypatch.setattr(ExperimentTrigger, "_look", lambda self: server.wait() and "")
    asyncio.run(look_for_a_while())
    said = capsys.readouterr().out
    for place in ("file:///away/3", "/away/wide"):
        assert f"{place}: no answer for" in said


def test_a_listing_that_is_the_same_is_not_read_again(data, monkeypatch):
    """What the store sends is compared; only what has changed is made objects of."""
    folder, asked = FolderStore(data), []

    class Store:
        uri = folder.uri

        def list_unless(self, digest):
            asked.append(digest)
            now = repr(folder.list())
            return now, None if now == digest else folder.list()

    monkeypatch.setattr("ddl_airflow.hooks.store.store_of", lambda reference: Store())
    (data / "a").write_text("1")
    trigger = DataChangeTrigger(data.as_uri() + "/same")
    first = trigger._look()
    assert trigger._look() == first and first["files"] >= 1
    (data / "b").write_text("2")
    assert trigger._look()["files"] == first["files"] + 1
    assert asked[0] == "" and asked[1] == asked[2] != ""


def test_only_a_change_of_what_the_patterns_select_fires(data):
    """Two over one place, with different patterns, each see their own."""
    (data / "a.tmp").write_text("1")
    whole = DataChangeTrigger(data.as_uri())
    some = DataChangeTrigger(data.as_uri(), include=["a*"], exclude=["*.tmp"])
    assert whole._key != some._key
    first, all_there = some._look(), whole._look()
    assert (first["files"], all_there["files"]) == (1, 2)
    (data / "b").write_text("2")
    (data / "a.tmp").write_text("22")
    assert some._look() == first
    assert whole._look()["files"] == 3
    (data / "a").write_text("another")
    assert some._look()["fingerprint"] != first["fingerprint"]
    (data / "a").unlink()
    with pytest.raises(SourceMissing, match="exclude: .*tmp leave nothing"):
        some._look()


def test_a_link_out_of_the_folders_that_the_manifest_may_name_is_not_listed(data):
    (data / "b").symlink_to(data.parent)
    open_to_all = DataChangeTrigger(data.as_uri())
    held = DataChangeTrigger(data.as_uri(), within=[str(data)])
    assert open_to_all._key != held._key
    again = DataChangeTrigger(**held.serialize()[1])
    with pytest.raises(StagingError, match="data/b leads to"):
        again._look()


def test_what_may_not_be_read_need_not_be_where_it_is_left_out(trainer):
    data = trainer.place / "data"
    (data / "lost+found").mkdir(mode=0o700, parents=True)
    (data / "a").write_text("1")
    os.seteuid(trainer.uid)
    try:
        assert DataChangeTrigger(data.as_uri(), exclude=["lost+found/"])._look()["files"] == 1
        with pytest.raises(StagingError, match="lost.found: Permission denied"):
            DataChangeTrigger(data.as_uri())._look()
    finally:
        os.seteuid(0)
