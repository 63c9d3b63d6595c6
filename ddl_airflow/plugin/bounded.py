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
_HANGS = (
    "{} requests wait for the workspace, which is the most. Its file system may hang: look at "
    "[ddl] workspace on the api-server's host."
)
_STARTS = (
    "{} requests wait for a TensorBoard to start, which is the most. Ask again in a minute; if "
    "that does not help, the api-server's host is too busy, or the file system of [ddl] workspace "
    "hangs."
)
# What is said where there is no room, by how the path begins; each has room of its own. So what
# takes long keeps nobody from the page: a whole log is sent for as long as its reader takes.
_ROOMS = {"/log/": _HANGS, "/tensorboard-of/": _STARTS, "": _HANGS}


class Bounded:
    """An ASGI app of which only some requests at once reach the app within."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._rooms = {kind: asyncio.Semaphore(_AT_ONCE) for kind in _ROOMS}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))
        free = path == _FREE[0] or path.startswith(_FREE[1:])
        if scope["type"] != "http" or free:
            await self._app(scope, receive, send)
            return
        kind = next(kind for kind in _ROOMS if path.startswith(kind))
        room = self._rooms[kind]
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await room.acquire()
        except TimeoutError:
            words = {"detail": _ROOMS[kind].format(_AT_ONCE)}
            await JSONResponse(words, 503)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        finally:
            room.release()
