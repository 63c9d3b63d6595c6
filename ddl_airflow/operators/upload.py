"""upload_results as a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddl_airflow.airflow_internals import asset_of
from ddl_airflow.core.plan import UploadResultsStep
from ddl_airflow.links import ResultsLink
from ddl_airflow.operators.base import StepOperator, fields_of
from ddl_airflow.steps.upload import UploadResults


class UploadResultsOperator(StepOperator):
    """Publishes the model: ``ddl_airflow.steps.upload.UploadResults``.

    Its outlet is the asset ``<results>/<dag id>``, below which all trainings of the DAG are.

    Args:
        step: an ``UploadResultsStep``.
    """

    work = UploadResults
    template_fields = fields_of(UploadResultsStep)
    template_fields_renderers = {"manifest": "json"}
    ui_color = "#d9efd5"
    operator_extra_links = (ResultsLink(),)

    @classmethod
    def own_state(cls, dag_id: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Besides, the asset."""
        outlets = [asset_of(f"{own['step'].results.uri}/{dag_id}")]
        return {**super().own_state(dag_id, own), "outlets": outlets}
