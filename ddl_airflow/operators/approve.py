"""approve: a person decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk.exceptions import AirflowFailException

from ddl_airflow.airflow_internals import form_of
from ddl_airflow.boundary import airflow_errors
from ddl_airflow.core.errors import DdlError, FormOutdated
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.markdown import code, table
from ddl_airflow.core.plan import ApproveStep
from ddl_airflow.hooks.store import store_of
from ddl_airflow.lineage.production import reject
from ddl_airflow.lineage.record import (
    APPROVE,
    drop_part,
    fixed_run,
    keep_so_far,
    let_pass,
    take_back,
    write_part,
)
from ddl_airflow.operators.base import layout_of, openlineage_of, run_of
from ddl_airflow.storage.filesystem import os_errors


class ApproveOperator(ApprovalOperator):
    """Airflow's own form; who rejects skips the upload, and no schedule trains the same again.

    Its body is what the DAG gives it, and the parameters of the run.

    Args:
        step: how long to wait for a person, and what counts after that. Keys in it are never
            serialised nor rendered.
    """

    def __init__(self, *, step: ApproveStep, **kwargs: Any) -> None:
        if step.timeout_s is not None:
            answer = self.APPROVE if step.then == "approve" else self.REJECT
            timeout = timedelta(seconds=step.timeout_s)
            kwargs |= {"response_timeout": timeout, "defaults": answer}
        super().__init__(**kwargs)
        self.step = step

    def execute(self, context: Any) -> Any:
        """Asks, and has Airflow wait for the answer.

        Raises AirflowFailException where Airflow shows the form of an earlier try of another model.
        """
        with airflow_errors():
            layout = layout_of(context)
            begun = fixed_run(layout)
            with os_errors(layout.root):
                take_back(layout, self.task_id)
                drop_part(layout, APPROVE)  # who is asked again has not answered
        # What the run trained with, also where the DAG has other defaults by now.
        form = dict(context["params"])
        given = begun["made_of"]["parameters"] if begun is not None else form
        rows = [
            (code(name, in_table=True), code(_text(given[name]), in_table=True))
            for name in {**form, **given}  # as the form has them
            if name in given
        ]
        said = [self.body or "", table(("parameter", "this run"), rows) if rows else ""]
        self.body = "\n\n".join(filter(None, said))
        with airflow_errors():
            self._check_form(context)
        # Airflow's own operator fails with one that cannot be sent, and the next try drops what a
        # person has answered meanwhile.
        told = [partial(self._tell, one) for one in self.notifiers]
        self.notifiers = told  # type: ignore[assignment]
        return super().execute(context)

    def _tell(self, notifier: Callable[[Any], None], context: Any) -> None:
        try:
            notifier(context)
        except Exception:
            self.log.exception("this notification was not sent: %s", type(notifier).__name__)

    def _check_form(self, context: Any) -> None:
        """Raises FormOutdated where a person would be shown something else than this try asks."""
        names = ("options", "subject", "body", "defaults", "assigned_users")
        asked = {name: getattr(self, name) for name in names}
        body, defaults = form_of(context["ti"], {**asked, "params": self.serialized_params})
        still = "Airflow still shows the form of an earlier try, and has no way to change it"
        if body != self.body:
            raise FormOutdated(
                f"{still}: what it says of the model is not what is to be approved now. Trigger a "
                "new run."
            )
        if self.defaults and defaults != self.defaults:
            raise FormOutdated(
                f"{still}: {', '.join(defaults) or 'nothing'} counts there when nobody answers, "
                f"and {', '.join(self.defaults)} by approval.then of the manifest. Trigger a new "
                "run."
            )

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Called by Airflow with the answer, which counts: another try would ask again, and where
        nobody answers that, `then` of the manifest would.

        Raises AirflowFailException where an approval cannot be kept for `upload_results`.
        """
        if event.get("chosen_options") == [self.REJECT]:
            self._note_rejection(context, self._said(event, "rejected it"))
        answer = super().execute_complete(context=context, event=event)
        if event["chosen_options"] == [self.APPROVE]:
            try:
                self._keep_approval(context, _who(event))
            except Exception as error:  # else it would be asked for again
                raise AirflowFailException(
                    f"{self._said(event, 'approved it')}, which cannot be kept "
                    f"({type(error).__name__}: {error}). Nothing is published. Clear approve: it "
                    "asks again."
                ) from None
        return answer

    def _said(self, event: Mapping[str, Any], decision: str) -> str:
        if event.get("timedout"):
            return f"nobody answered within {self.response_timeout}"
        return f"{_who(event) or 'somebody'} {decision}"

    def _note_rejection(self, context: Any, why: str) -> None:
        """For the schedule, and in the run's record."""
        try:
            layout = layout_of(context)
            begun = fixed_run(layout)
            if begun is None:
                return
            self._keep(layout, context, why)
            store = store_of(self.step.results)
            reject(store, self.dag_id, layout.training_id, begun["made_of"], why)
        except Exception as error:  # the decision counts, whatever a client of the store raises
            said = "%s, which cannot be noted, so a schedule may train the same again: %s"
            self.log.warning(said, why, error)

    def _keep(self, layout: RunLayout, context: Any, why: str) -> None:
        """Says it in the run's record, in which nobody else does: what follows is skipped."""
        outcome = {"state": "rejected", "step": self.task_id, "message": why}
        try:
            keep_so_far(layout, run_of(context), outcome)
        except (DdlError, OSError) as error:  # nor does this hinder the rest
            self.log.warning("%s, which the run's record does not say: %s", why, error)

    def _keep_approval(self, context: Any, who: str | None) -> None:
        layout = layout_of(context)
        if fixed_run(layout) is not None:
            with os_errors(layout.root):
                write_part(layout, APPROVE, {"by": who})
                let_pass(layout, self.task_id)

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> Any:
        """What was decided about; called by Airflow's provider of OpenLineage."""
        return openlineage_of(self.step, self.dag_id, task_instance.get_template_context(), {})


def _who(event: Mapping[str, Any]) -> str | None:
    """Returns the name of the person who answered; None if nobody did."""
    return (event.get("responded_by_user") or {}).get("name")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
