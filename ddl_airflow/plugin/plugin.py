"""Airflow plugin: a tab on each DAG run that draws how its training goes."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from ddl_airflow.links import TAB


class LazyApp:
    """An ASGI app that is built when the first request comes.

    Every Airflow process loads plugins; only the api-server needs FastAPI and the routes.
    """

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            from ddl_airflow.plugin.api import app

            self._app = app()
        await self._app(scope, receive, send)


class DdlPlugin(AirflowPlugin):
    """See the module."""

    name = "ddl"
    fastapi_apps = [{"app": LazyApp(), "url_prefix": "/ddl", "name": "ddl"}]
    external_views = [
        {
            "name": "Training",
            "href": "/ddl/training?dag_id={DAG_ID}&run_id={RUN_ID}",
            "destination": "dag_run",
            "url_route": TAB,
        }
    ]
