"""evaluate as a task."""

from __future__ import annotations

from ddl_airflow.core.plan import EvaluateStep
from ddl_airflow.operators.base import StepOperator, fields_of
from ddl_airflow.steps.evaluate import Evaluate


class EvaluateOperator(StepOperator):
    """Decides whether the model is published: ``ddl_airflow.steps.evaluate.Evaluate``.

    Args:
        step: an ``EvaluateStep``.
    """

    work = Evaluate
    step_type = EvaluateStep
    template_fields = fields_of(step_type)
    template_fields_renderers = {"command": "bash", "parameters": "json", "secrets": "json"}
    ui_color = "#f3e9c9"

    command: str

    def _runs_as_ranks(self) -> str:
        return "evaluate runs on this host" if self.command else ""
