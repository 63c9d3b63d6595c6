"""Cleans by the site's rules, at night or when a person asks.

::

    # clean.py, in Airflow's DAG folder
    from ddl_airflow.operators.clean import clean_dag

    dag = clean_dag("@daily", results={"s3://results": "my_s3"})
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from airflow.configuration import conf
from airflow.sdk import DAG, BaseOperator, Param

from ddl_airflow.airflow_internals import run_is_open
from ddl_airflow.boundary import airflow_errors
from ddl_airflow.core.errors import DdlError
from ddl_airflow.core.layout import cancellations
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import connection_of, store_of
from ddl_airflow.site import workspace


class CleanOperator(BaseOperator):
    """Removes what ``[ddl] keep_runs``, ``keep_experiments`` and ``cache_size`` do not keep.

    The folder of a run that Airflow has not ended stays, however old it is; so does one with a
    job of which the scheduler does not say that it has ended. Jobs that are to be cancelled, and of
    which nobody came to do so, are cancelled.

    Args:
        results: places where trainings are published, in which the manifests' ``keep`` holds.
    """

    def __init__(self, *, results: tuple[StoreReference, ...] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._results = results

    def execute(self, context: Any) -> dict[str, int]:
        """Returns how many things were removed, and their bytes.

        A place that cannot be cleaned keeps no other one from being so, and then fails the task.
        """
        # No parse needs these.
        from ddl_airflow.lineage.retention import clean_results
        from ddl_airflow.steps.job import cancel_all_noted, may_run
        from ddl_airflow.storage.cleaning import clean_workspace, rules

        dry_run = bool(context["params"].get("dry_run"))
        count, nbytes = 0, 0
        failed: list[DdlError] = []
        with airflow_errors():
            kept = rules(
                conf.get("ddl", "keep_runs", fallback=""),
                conf.get("ddl", "keep_experiments", fallback=""),
                conf.get("ddl", "cache_size", fallback=""),
            )
            for place in (None, *self._results):
                try:
                    if place is None:
                        noted = cancellations(workspace())
                        for job in cancel_all_noted(
                            noted, run_is_open, connection_of, dry_run=dry_run
                        ):
                            self.log.info("%s %s", "would cancel" if dry_run else "cancelled", job)
                        has_job = partial(may_run, connections=connection_of)
                        removed = clean_workspace(
                            workspace(), kept, run_is_open, has_job, dry_run=dry_run
                        )
                    else:
                        removed = clean_results(store_of(place), dry_run=dry_run)
                    for one in removed:
                        self.log.info("%s %s", "would remove" if dry_run else "removed", one)
                        count, nbytes = count + 1, nbytes + one.nbytes
                except DdlError as error:
                    where = "the workspace" if place is None else place.uri
                    self.log.error("%s is not cleaned: %s: %s", where, type(error).__name__, error)
                    failed.append(error)
            if failed:
                raise failed[0]
        return {"removed": count, "bytes": nbytes}


def clean_dag(
    schedule: str | None = "@daily",
    results: Mapping[str, str] | None = None,
    dag_id: str = "ddl-clean",
) -> DAG:
    """A DAG that cleans the workspace and the results; triggered by hand, it may only say what.

    Args:
        schedule: cron expression or preset; None for no schedule.
        results: ``s3://bucket[/prefix]`` or ``file:///folder``, as in the manifests, to the
            connection of the store; empty for a folder.
        dag_id: its own.
    """
    places = tuple(
        # Nothing elsewhere is removed over a link that somebody puts into the results.
        StoreReference(uri, Connection(conn_id=conn_id) if conn_id else None, within=())
        for uri, conn_id in (results or {}).items()
    )
    with DAG(
        dag_id,
        description="Remove old runs, and what nobody uses of the cache and of the results",
        schedule=schedule,
        catchup=False,
        max_active_runs=1,
        params={"dry_run": Param(False, type="boolean", title="Only say what would be removed")},
        tags={"ddl"},
    ) as dag:
        CleanOperator(task_id="clean", results=places)
    return dag
