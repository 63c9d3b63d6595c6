"""How many requests may wait for the workspace at once.

It may be on a file system of the network, and that may hang: whoever reads then waits in the
kernel, for hours, and nothing ends that. Each who waits has one of the threads in which the
api-server also answers for Airflow. So only some may, and others are told.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi.responses import JSONResponse

_AT_ONCE = 8
_PATIENCE_S = 5.0
# Of them no thread looks into the workspace; `/tensorboard/` counts for itself.
_FREE = ("/training", "/assets/", "/rights/", "/tensorboard/")
# A whole log is sent for as long as its reader takes: that keeps nobody from the page.
_LONG = "/log/"


class Bounded:
    """An ASGI app of which only some requests at once reach the app within."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._room, self._room_of_long = asyncio.Semaphore(_AT_ONCE), asyncio.Semaphore(_AT_ONCE)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        free = path == _FREE[0] or path.startswith(_FREE[1:])
        if scope["type"] != "http" or free:
            await self._app(scope, receive, send)
            return
        room = self._room_of_long if path.startswith(_LONG) else self._room
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await room.acquire()
        except TimeoutError:
            words = (
                f"{_AT_ONCE} requests wait for the workspace, which is the most. Its file system "
                "may hang: look at [ddl] workspace on the api-server's host."
            )
            await JSONResponse({"detail": words}, 503)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            room.release()
