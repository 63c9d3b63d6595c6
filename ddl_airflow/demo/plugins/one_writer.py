"""Airflow's API server over SQLite: one writing request at a time.

SQLite has one writer. Airflow's API server keeps its audit log in the event loop, so a request
that waits there for the writer also keeps the event loop from ending the request that is the
writer: both stand still until SQLite gives up, and one answers 500, "database is locked". In turn
they never meet. Seen in Airflow 3.3: ``airflow/api_fastapi/logging/decorators.py``,
``log_action``. PostgreSQL, with a writer for each row, needs none of this.
"""

from __future__ import annotations

import asyncio
from typing import Any

from airflow.plugins_manager import AirflowPlugin

_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class OneWriter:
    """ASGI middleware: a request that may write waits for the end of the one before it.

    Args:
        app: what answers.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] in _READS:
            await self._app(scope, receive, send)
            return
        async with self._turn:
            await self._app(scope, receive, send)


class OneWriterPlugin(AirflowPlugin):
    """Puts it before all of the API server's applications."""

    name = "ddl_one_writer"
    fastapi_root_middlewares = [{"name": "one writer", "middleware": OneWriter}]
