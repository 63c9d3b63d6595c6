"""Airflow plugin: a page on trainings, in the navigation and on each DAG, run and task."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from airflow.configuration import conf
from airflow.plugins_manager import AirflowPlugin

from ddl_airflow.links import TAB

# Airflow's UI loads it as it is, also where a proxy has Airflow below a path.
_PAGE = urlsplit(conf.get("api", "base_url", fallback="")).path.rstrip("/") + "/ddl/training"


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
            "name": "Trainings",
            "destination": "nav",
            "href": _PAGE,
            "url_route": "ddl-trainings",
        },
        {
            "name": "Trainings",
            "destination": "dag",
            "href": f"{_PAGE}?dag_id={{DAG_ID}}",
            "url_route": "ddl-dag",
        },
        {
            "name": "Training",
            "destination": "dag_run",
            "href": f"{_PAGE}?dag_id={{DAG_ID}}&run_id={{RUN_ID}}",
            "url_route": TAB,
        },
        {
            "name": "Training",
            "destination": "task_instance",
            "href": f"{_PAGE}?dag_id={{DAG_ID}}&run_id={{RUN_ID}}",
            "url_route": "ddl-task",
        },
    ]
