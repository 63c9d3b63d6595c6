"""approve: a person decides."""

from __future__ import annotations

from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator

from ddl_airflow.boundary import airflow_errors
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import store_of
from ddl_airflow.lineage.production import reject
from ddl_airflow.lineage.record import fixed_run
from ddl_airflow.operators.base import layout_of


class ApproveOperator(ApprovalOperator):
    """Airflow's own form; who rejects skips the upload, and no schedule trains the same again.

    Args:
        results: where rejections are remembered. Its keys are never serialised nor rendered.
    """

    def __init__(self, *, results: StoreReference, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._reference = results

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Called by Airflow with the answer."""
        with airflow_errors():
            layout = layout_of(context)
            begun = fixed_run(layout)
            if event.get("chosen_options") == [self.REJECT] and begun is not None:
                who = (event.get("responded_by_user") or {}).get("name") or "somebody"
                reject(
                    store_of(self._reference),
                    self.dag_id,
                    layout.training_id,
                    begun["made_of"],
                    f"{who} rejected it",
                )
        return super().execute_complete(context=context, event=event)
