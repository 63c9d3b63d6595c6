"""transform as a task."""

from __future__ import annotations

from ddl_airflow.core.plan import TransformStep
from ddl_airflow.operators.base import StepOperator, fields_of
from ddl_airflow.steps.transform import Transform


class TransformOperator(StepOperator):
    """Makes the SavedModel: ``ddl_airflow.steps.transform.Transform``.

    Args:
        step: a ``TransformStep``.
    """

    work = Transform
    step_type = TransformStep
    template_fields = fields_of(step_type)
    template_fields_renderers = {
        "inputs": "json",
        "outputs": "json",
        "parameters": "json",
        "secrets": "json",
    }
    ui_color = "#e4dcf1"

    def _runs_as_ranks(self) -> str:
        return "transform runs on this host"
