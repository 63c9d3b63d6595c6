"""upload_results as a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    step_type = UploadResultsStep
    template_fields = fields_of(step_type)
    template_fields_renderers = {"manifest": "json"}
    ui_color = "#d9efd5"
    operator_extra_links = (ResultsLink(),)
    _withheld: Sequence[Any] = ()

    @classmethod
    def own_state(cls, dag_id: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """Besides, the asset."""
        uri = own["step"].results.uri
        if not isinstance(uri, str):
            raise ValueError(
                "the place of results is needed when the DAG is parsed: the asset is called by it. "
                "Write its URI; what an earlier task returns is not known then"
            )
        outlets = [asset_of(f"{uri}/{dag_id}")]
        return {**super().own_state(dag_id, own), "outlets": outlets}

    def render_template_fields(self, context: Any, jinja_env: Any = None) -> None:
        """Besides, keeps the outlet from Airflow until the task runs.

        Airflow lets no task begin whose outlet no DAG has any more, as where the manifest has got
        another place for its results while this run trained. Once it has ended, Airflow only warns
        of that, and tells nobody of the model.
        """
        super().render_template_fields(context, jinja_env)
        if self.outlets:
            self._withheld, self.outlets = self.outlets, []

    def execute(self, context: Any) -> dict[str, Any]:
        """Runs the step, with its outlet again."""
        if self._withheld:
            self.outlets, self._withheld = [*self._withheld], ()
        return super().execute(context)
