"""stage_data as a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddl_airflow.boundary import airflow_errors
from ddl_airflow.core.manifest.templates import dates_in
from ddl_airflow.core.parameters import parameter_environment
from ddl_airflow.core.plan import ScriptStep, StageDataStep
from ddl_airflow.operators.base import StepOperator, fields_of, no_logical_date
from ddl_airflow.steps.stage import StageData


class StageDataOperator(StepOperator):
    """Stages data and code: ``ddl_airflow.steps.stage.StageData``.

    The dataset is no asset of this task: as an outlet it would start whoever waits for it, this
    training perhaps; as an inlet it would need the name that its maker gives it.

    Args:
        step: a ``StageDataStep``.
    """

    work = StageData
    step_type = StageDataStep
    template_fields = fields_of(step_type)
    template_fields_renderers = {"manifest": "json"}
    ui_color = "#d8ecf3"

    def render_template_fields(self, context: Any, jinja_env: Any = None) -> None:
        """Fails of what later steps would fail of, once the data are there: templates for which
        the run has no value, such as dates of a run that has none; values that no script can be
        given.
        """
        super().render_template_fields(context, jinja_env)
        with airflow_errors(), self._noting_failure(context):
            for step in self._later():
                if context.get("logical_date") is None:
                    _check_dates(step)
                # What an earlier task is still to return may be a field whole.
                if isinstance(step.step, ScriptStep) and isinstance(step.parameters, Mapping):
                    parameter_environment(step.given(context["params"]))
                step.filled_in(context)

    def take_fixed(self, context: Any) -> None:
        """Takes nothing: this is the step that fixes what the run trains with."""


def _check_dates(step: StepOperator) -> None:
    for name in step.step.templated:
        value = getattr(step, name)
        for text in [value] if isinstance(value, str) else value:
            for date in dates_in(text):
                raise no_logical_date(name, text, date)
