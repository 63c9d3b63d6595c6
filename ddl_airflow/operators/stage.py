"""stage_data as a task."""

from __future__ import annotations

from typing import Any

from ddl_airflow.core.plan import StageDataStep
from ddl_airflow.operators.base import StepOperator, fields_of
from ddl_airflow.steps.stage import StageData


class StageDataOperator(StepOperator):
    """Stages data and code: ``ddl_airflow.steps.stage.StageData``.

    The dataset is no asset of this task: as an outlet it would start whoever waits for it, this
    training perhaps; as an inlet it would need the name that its maker gives it.

    Args:
        step: a ``StageDataStep``.
    """

    work = StageData
    template_fields = fields_of(StageDataStep)
    template_fields_renderers = {"manifest": "json"}
    ui_color = "#d8ecf3"

    def take_fixed(self, context: Any) -> None:
        """Takes nothing: this is the step that fixes what the run trains with."""
