"""Waits until nobody works in an experiment, in place of the task that is to go on with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from ddl_airflow.core.errors import StagingError
from ddl_airflow.triggers.interval import usable
from ddl_airflow.triggers.monitor import answered, in_workspace


class ExperimentTrigger(BaseTrigger):
    """Looks at an experiment now and then, and fires when no training works in it.

    Of several that wait, the first to come then goes on; the others find it taken and wait again.
    The triggerer must see the workspace. One that does not fires at once, and says so.

    Args:
        folder: of the experiment.
        interval_s: between two looks.
    """

    def __init__(self, folder: str, interval_s: float = 5.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.folder = folder
        self.interval_s = usable(interval_s)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        arguments = {"folder": self.folder, "interval_s": self.interval_s}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yields once: nothing, or why the experiment cannot be seen from here."""
        event, said = {}, ""
        while True:
            try:
                holder = await answered(in_workspace(self._look), self.folder, self.log)
            except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
                event = {
                    "unseen": f"{error.filename}: {error.strerror}. The triggerer must see the "
                    "workspace of the tasks: a file system that both share."
                }
                break
            except StagingError as error:
                event = {"unseen": str(error)}
                break
            except OSError as error:  # the file system is away for a while
                holder = f"not known yet: {error}"
            if not holder:
                break
            if holder != said:
                self.log.info("%s: waiting for %s", self.folder, holder)
                said = holder
            await asyncio.sleep(self.interval_s)
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    def _look(self) -> str:
        from ddl_airflow.storage.filesystem import holder_of

        return holder_of(Path(self.folder))
