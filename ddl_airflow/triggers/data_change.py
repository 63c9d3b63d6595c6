"""Fires when the objects of a dataset have changed: a DAG with ``on_data_change`` runs then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from ddl_airflow.core.errors import StagingError
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.core.selection import Selection
from ddl_airflow.triggers.interval import problem_of
from ddl_airflow.triggers.monitor import answered, at_dataset

_STATE = "fingerprint"  # of what fired last, after the id of the trigger that did


@dataclass(frozen=True)
class _Listing:
    """One look at a dataset, of all triggers of the process that want to know.

    Attributes:
        began: when, by the clock of the event loop.
        found: what it finds.
    """

    began: float
    found: asyncio.Task[dict[str, Any] | None]


# By dataset and connection. Triggers of a process run in one event loop.
_listings: dict[str, _Listing] = {}
# What the last look at each found, and the digest of its listing.
_known: dict[str, tuple[str, dict[str, Any] | None]] = {}


class DataChangeTrigger(BaseEventTrigger):
    """Lists a dataset now and then, and compares its fingerprint with the one that fired last.

    It fires once a change has settled: when two listings one interval apart are the same, so that
    an upload of many files is one event. What fired is kept in Airflow's state of the asset, an
    interval after: a triggerer that is killed meanwhile fires again, and a run that finds nothing
    new does nothing. So no change is lost. For a paused DAG Airflow takes events and starts no run;
    at its next parse it deletes the trigger, and makes another when the DAG goes on: a trigger that
    has never fired does so for what is there. Only a pause that is over before that parse loses a
    change that settles in it. A dataset that cannot be listed is said in the
    triggerer's log and looked at again. Of several triggers over one dataset one lists it.

    Args:
        uri: of the dataset.
        connection: ``conn_id``, or endpoint_url and keys as ``${NAME}``: Airflow keeps this in its
            database, so no key may be in it. None for a folder.
        interval_s: between two listings.
        dag_id: whose run starts. Airflow makes one of two triggers with equal arguments, and has
            no state for one that fires for two assets.
        within: folders out of which no link of a folder may lead; None: it may.
        include, exclude: which of its objects, as ``Selection`` has them.

    Raises:
        TypeError: interval_s is less than a millisecond, more than a week, or no number.
    """

    def __init__(
        self,
        uri: str,
        connection: dict[str, str] | None = None,
        interval_s: float = 60.0,
        dag_id: str = "",
        within: list[str] | None = None,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uri = uri
        self.connection = connection
        if problem := problem_of(interval_s):
            # A triggerer that has one stored goes on with the others only after a TypeError.
            raise TypeError(f"interval_s {problem}")
        self.interval_s = interval_s
        self.dag_id = dag_id
        self.within = within
        self.include, self.exclude = include or [], exclude or []

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        arguments: dict[str, Any] = {
            "uri": self.uri,
            "connection": self.connection,
            "interval_s": self.interval_s,
            "dag_id": self.dag_id,
            "within": self.within,
        }
        # Without them it is, to Airflow, the trigger that earlier versions made.
        if self.include or self.exclude:
            arguments |= {"include": self.include, "exclude": self.exclude}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields uri, fingerprint, files and bytes of each settled change."""
        kept = fired = await self._fired_before()
        before: dict[str, Any] | None = None
        listing = None
        while True:
            last, listing = listing, self._listing()
            now = await self._found(listing)
            if fired != kept:
                # The event has left this process since: Airflow sends them off every second.
                if self.asset_state_store is not None:
                    said = f"{self.trigger_id} {fired}"
                    await asyncio.to_thread(self.asset_state_store.set, _STATE, said)
                kept = fired
            if listing is not last:
                if now is not None and now == before and now["fingerprint"] != fired:
                    fired = now["fingerprint"]
                    yield TriggerEvent({"uri": self.uri, **now})  # type: ignore[no-untyped-call]
                before = now
            await asyncio.sleep(self.interval_s)

    async def _fired_before(self) -> str | None:
        """What this trigger has fired for, in whichever triggerer it was."""
        if self.asset_state_store is None:
            return None
        # In a thread: aget and aset are there from Airflow 3.3.2 on.
        said = cast(str | None, await asyncio.to_thread(self.asset_state_store.get, _STATE))
        trigger, _, fired = (said or "").partition(" ")
        return fired if trigger == str(self.trigger_id) else None

    @property
    def _key(self) -> str:
        place = [self.uri, self.connection, self.within]
        return json.dumps([*place, self.include, self.exclude], sort_keys=True)

    def _listing(self) -> _Listing:
        """A new look at the dataset, or one that somebody else began a moment ago."""
        key = self._key
        loop = asyncio.get_running_loop()
        there = _listings.get(key)
        if (
            there is None
            or there.found.get_loop() is not loop
            # One that hangs keeps one thread, however many wait for it.
            or (there.found.done() and loop.time() - there.began >= 0.9 * self.interval_s)
        ):
            looking = loop.create_task(at_dataset(self.uri, self._look))
            there = _listings[key] = _Listing(loop.time(), looking)
        return there

    async def _found(self, listing: _Listing) -> dict[str, Any] | None:
        try:
            return await answered(listing.found, self.uri, self.log)
        except StagingError as error:
            self.log.warning("%s: %s", type(error).__name__, error)
            return None

    def _look(self) -> dict[str, Any] | None:
        """Returns None where there is nothing to train on."""
        from ddl_airflow.hooks.store import store_of
        from ddl_airflow.storage.staging import dataset_of, readable

        connection = Connection.model_validate(self.connection) if self.connection else None
        within = None if self.within is None else tuple(map(Path, self.within))
        store = store_of(StoreReference(self.uri, connection, within))
        digest, known = _known.get(self._key, ("", None))
        selection = Selection(tuple(self.include), tuple(self.exclude))
        digest, listed = readable(store, selection).list_unless(digest)
        if listed is not None:
            found = dataset_of(store, listed, selection)
            nbytes = sum(obj.size for obj in found.objects)
            known = {"fingerprint": found.fingerprint, "files": len(found.objects), "bytes": nbytes}
            _known[self._key] = (digest, known)
        return known
