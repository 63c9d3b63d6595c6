"""Fires when the objects of a dataset have changed: a DAG with ``on_data_change`` runs then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from ddl_airflow.core.errors import StagingError
from ddl_airflow.core.manifest import Connection
from ddl_airflow.core.plan import StoreReference

_STATE = "fingerprint"  # of what fired last


class DataChangeTrigger(BaseEventTrigger):
    """Lists a dataset now and then, and compares its fingerprint with the one that fired last.

    It fires once a change has settled: when two listings one interval apart are the same, so that
    an upload of many files is one event. What fired is kept in Airflow's state of the asset, so a
    triggerer that starts again misses nothing and repeats nothing. A dataset that cannot be listed
    is said in the triggerer's log and looked at again.

    Args:
        uri: of the dataset.
        connection: ``conn_id``, or endpoint_url and keys as ``${NAME}``: Airflow keeps this in its
            database, so no key may be in it. None for a folder.
        interval_s: between two listings.
    """

    def __init__(
        self, uri: str, connection: dict[str, str] | None = None, interval_s: float = 60.0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uri = uri
        self.connection = connection
        self.interval_s = interval_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        arguments = {
            "uri": self.uri,
            "connection": self.connection,
            "interval_s": self.interval_s,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields uri, fingerprint, files and bytes of each settled change."""
        fired = await self._fired_before()
        before: dict[str, Any] | None = None
        while True:
            try:
                now = await asyncio.to_thread(self._look)
            except StagingError as error:
                self.log.warning("%s: %s", type(error).__name__, error)
                now = None
            if now is not None and now == before and now["fingerprint"] != fired:
                fired = now["fingerprint"]
                if self.asset_state_store is not None:
                    await asyncio.to_thread(self.asset_state_store.set, _STATE, fired)
                yield TriggerEvent({"uri": self.uri, **now})  # type: ignore[no-untyped-call]
            before = now
            await asyncio.sleep(self.interval_s)

    async def _fired_before(self) -> str | None:
        if self.asset_state_store is None:
            return None
        # In a thread: aget and aset are there from Airflow 3.3.2 on.
        return cast(str | None, await asyncio.to_thread(self.asset_state_store.get, _STATE))

    def _look(self) -> dict[str, Any] | None:
        """Returns None where there is nothing to train on."""
        from ddl_airflow.hooks.store import store_of
        from ddl_airflow.storage.transfer import list_dataset

        connection = Connection.model_validate(self.connection) if self.connection else None
        found = list_dataset(store_of(StoreReference(self.uri, connection)))
        nbytes = sum(obj.size for obj in found.objects)
        return {"fingerprint": found.fingerprint, "files": len(found.objects), "bytes": nbytes}
