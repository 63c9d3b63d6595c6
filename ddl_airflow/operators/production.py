"""Which model serves, decided by a person in Airflow's UI: back to an earlier one or on.

::

    # production.py, in Airflow's DAG folder
    from ddl_airflow.operators.production import production_dag

    dag = production_dag("s3://results", conn_id="my_s3")
"""

from __future__ import annotations

import json
from typing import Any

from airflow.sdk import DAG, AssetAlias, BaseOperator, Param

from ddl_airflow.airflow_internals import asset_of
from ddl_airflow.boundary import airflow_errors
from ddl_airflow.core.errors import DdlError, NoSuchModel
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import store_of
from ddl_airflow.lineage.flow import Flow, flow_of_pointer
from ddl_airflow.lineage.production import PRODUCTION, Pointer, passed_over, promote, rollback
from ddl_airflow.lineage.record import LINEAGE, model_digest
from ddl_airflow.storage.store import ObjectStore

_ROLLBACK, _PROMOTE = "rollback", "promote"


class SetProductionOperator(BaseOperator):
    """Moves ``production.json`` as the run's parameters say, and tells who waits for the model.

    The parameters are ``model`` (the id of the DAG that trains it), ``action``, ``to``,
    ``instead_of`` and ``reason``. The event is one of the asset that a training updates,
    ``<results>/<dag id>``; its extra has the event of the pointer's history, and the model's
    metrics and digest.

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
        self._moved: tuple[str, Pointer, str | None] | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        """Returns the event of the pointer's history."""
        asked, run = context["params"], context["dag_run"]
        by = f"{run.triggering_user_name or 'nobody'}, run {run.run_id} of {run.dag_id}"
        with airflow_errors():
            to, reason = asked["to"] or "", asked["reason"] or ""
            if asked["action"] == _PROMOTE and not to:
                raise NoSuchModel("to: which one? Enter a training's id or its place.")
            move = promote if asked["action"] == _PROMOTE else rollback
            store = store_of(self._reference)
            pointer = move(
                store,
                asked["model"],
                to,
                by=by,
                reason=reason,
                mark=f"{run.dag_id} {run.run_id}",
                instead_of=asked["instead_of"] or "",
            )
            digest = _digest(store.at(pointer["publication"]))
        for place, why in passed_over(pointer).items():
            self.log.info("%s is passed over: it holds %s", place, why)
        self.log.info("in production: %s", pointer["model"])
        event: dict[str, Any] = pointer["history"][0]
        asset = f"{self._reference.uri}/{asked['model']}"
        extra = {
            "model": pointer["model"],
            "production": True,
            "pointers": {PRODUCTION: f"{asset}/{PRODUCTION}.json"},
            "metrics": pointer["metrics"],
            "digest": digest,
        }
        context["outlet_events"][self.outlets[0]].add(asset_of(asset), extra | event)
        self._moved = asked["model"], pointer, digest
        return event

    def get_openlineage_facets_on_complete(self, _task_instance: Any) -> Any:
        """Called by Airflow's provider of OpenLineage: the model, and the pointer to it."""
        from ddl_airflow.operators.openlineage import operator_lineage  # only who tells it

        if self._moved is None:
            return operator_lineage(Flow())
        return operator_lineage(flow_of_pointer(self._reference.uri, *self._moved))


def _digest(publication: ObjectStore) -> str | None:
    """The model's; None if the record cannot be read, for the pointer has been moved."""
    try:
        return model_digest(json.loads(publication.read_bytes(LINEAGE)))
    except (DdlError, ValueError, KeyError, TypeError):
        return None


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
        # Nothing starts it but a person, who would else wait for a model that never comes back.
        is_paused_upon_creation=False,
        params={
            "model": Param("", type="string", minLength=1, title="DAG that trains the model"),
            "action": Param(_ROLLBACK, enum=[_ROLLBACK, _PROMOTE]),
            # Without null Airflow's form wants something in them.
            "to": Param(
                None,
                type=["null", "string"],
                title="To",
                description="Training or publication; to go back, empty for the one before",
            ),
            "instead_of": Param(
                None,
                type=["null", "string"],
                title="Instead of",
                description="What serves now: if another does by then, nothing changes",
            ),
            "reason": Param(None, type=["null", "string"], title="Why, for the history"),
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
