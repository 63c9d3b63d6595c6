"""Which model serves, decided by a person in Airflow's UI: back to an earlier one or on.

::

    # production.py, in Airflow's DAG folder
    from ddl_airflow.operators.production import production_dag

    dag = production_dag("s3://results", conn_id="my_s3")
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, AssetAlias, BaseOperator, Param

from ddl_airflow.airflow_internals import asset_of
from ddl_airflow.boundary import airflow_errors
from ddl_airflow.core.errors import NoSuchModel
from ddl_airflow.core.manifest import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import store_of
from ddl_airflow.lineage.production import promote, rollback

_ROLLBACK, _PROMOTE = "rollback", "promote"


class SetProductionOperator(BaseOperator):
    """Moves ``production.json`` as the run's parameters say, and tells who waits for the model.

    The parameters are ``model`` (the id of the DAG that trains it), ``action``, ``to`` and
    ``reason``. The event is one of the asset that a training updates, ``<results>/<dag id>``; its
    extra has the event of the pointer's history.

    A run decides once: who clears it, or starts its task again, changes nothing if it has decided.

    Args:
        results: where the trainings are published. Its keys are never serialised nor rendered.
    """

    template_fields = ("results",)

    def __init__(self, *, results: StoreReference, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._reference = results
        self.results = results.view()
        # Which asset it is, the run says.
        self.outlets = [AssetAlias(f"production of {results.uri}")]

    def execute(self, context: Any) -> dict[str, Any]:
        """Returns the event of the pointer's history."""
        asked, run = context["params"], context["dag_run"]
        by = f"{run.triggering_user_name or 'nobody'}, run {run.run_id} of {run.dag_id}"
        with airflow_errors():
            if asked["action"] == _PROMOTE and not asked["to"]:
                raise NoSuchModel("to: which one? Enter a training's id or its place.")
            move = promote if asked["action"] == _PROMOTE else rollback
            pointer = move(
                store_of(self._reference),
                asked["model"],
                asked["to"],
                by=by,
                reason=asked["reason"],
                mark=f"{run.dag_id} {run.run_id}",
            )
        self.log.info("in production: %s", pointer["model"])
        event: dict[str, Any] = pointer["history"][0]
        context["outlet_events"][self.outlets[0]].add(
            asset_of(f"{self._reference.uri}/{asked['model']}"),
            {"model": pointer["model"], "production": True, **event},
        )
        return event


def production_dag(results: str, conn_id: str = "", dag_id: str = "ddl-production") -> DAG:
    """A DAG that has no schedule: whoever may trigger it decides what serves.

    Args:
        results: ``s3://bucket[/prefix]`` or ``file:///folder``, as in the manifests.
        conn_id: of the store; empty for a folder.
        dag_id: its own.
    """
    connection = Connection(conn_id=conn_id) if conn_id else None
    with DAG(
        dag_id,
        description=f"Go back to an earlier model in {results}, or on to another",
        schedule=None,
        params={
            "model": Param("", type="string", minLength=1, title="DAG that trains the model"),
            "action": Param(_ROLLBACK, enum=[_ROLLBACK, _PROMOTE]),
            "to": Param(
                "",
                type="string",
                title="To",
                description="Training or publication; to go back, empty for the one before",
            ),
            "reason": Param("", type="string", title="Why, for the history"),
        },
        tags={"ddl"},
    ) as dag:
        SetProductionOperator(
            task_id="set_production",
            results=StoreReference(results, connection),
            # Whoever decided has seen what served then; later it may be another.
            retries=0,
        )
    return dag
