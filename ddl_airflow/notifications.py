"""The manifest's notifications as Airflow's notifiers.

Airflow calls them where the task ran; of a task whose worker was lost, in the DAG processor.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache
from typing import Any, Literal

from airflow.configuration import conf
from airflow.sdk.log import redact  # type: ignore[attr-defined]

from ddl_airflow.airflow_internals import notifiers_of_providers
from ddl_airflow.core.errors import WORKER_LOST, ManifestInvalid, ManifestIssue
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.rule import suggestion
from ddl_airflow.core.manifest.sections.notifications import SMTP_NOTIFIER, Notification
from ddl_airflow.core.manifest.templates import WITHOUT_DATES, dates_in, is_template

# Subject and body of a mail that says neither. `error` is ours, see `say_error`.
_RUN = '<p>DAG {{ dag.dag_id }}, <a href="%s">run {{ run_id | e }}</a></p>'
_MAILS = {
    "on_failure": (
        "{{ dag.dag_id }}: {{ ti.task_id }} failed",
        "<p>{{ error | default('', true) | e }}</p>",
    ),
    "on_success": (
        "{{ dag.dag_id }}: a new model was published",
        "<p>{{ ti.xcom_pull(task_ids='upload_results')['model'] | e }}</p>",
    ),
    "on_approval": (
        "{{ dag.dag_id }}: a model waits for approval",
        "<pre>{{ ti.xcom_pull(task_ids='evaluate')['table'] | e }}</pre>",
    ),
}


def notifiers(
    manifest: Manifest, event: Literal["on_failure", "on_success", "on_approval"]
) -> list[Callable[[Any], None]]:
    """What Airflow is to call when that happens; empty if nobody wants to know.

    Raises:
        ManifestInvalid: a notifier is not among those of the installed providers, or does not take
            its arguments.
    """
    entries: tuple[Notification, ...] = getattr(manifest.notifications, event)
    return [
        _notifier(manifest, one, event, f"notifications.{event}[{i}]")
        for i, one in enumerate(entries)
    ]


def default_connections(notifier: str) -> dict[str, str]:
    """Returns the connections that a notifier takes where it is given none, by argument.

    Empty for mail, which every manifest may send, and for what no provider has.

    Args:
        notifier: its class path.
    """
    if notifier == SMTP_NOTIFIER or notifier not in notifiers_of_providers():
        return {}
    taken = inspect.signature(_class_of(notifier)).parameters.values()
    return {
        one.name: str(one.default)
        for one in taken
        if one.name.endswith("conn_id") and one.default is not one.empty
    }


def _class_of(notifier: str) -> Any:
    module, _, name = notifier.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _notifier(manifest: Manifest, one: Notification, event: str, at: str) -> Any:
    installed = notifiers_of_providers()
    if one.notifier not in installed:
        message = f"no provider of this Airflow has the notifier {one.notifier}"
        raise _invalid(manifest, f"{at}.notifier", message, suggestion(one.notifier, installed))
    arguments: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in one.arguments.items()
    }
    if one.notifier == SMTP_NOTIFIER:
        subject, body = _MAILS[event]
        arguments.setdefault("subject", subject)
        arguments.setdefault("html_content", body + _RUN % _run_url())
    kind: Any = _filled_in_anew(_class_of(one.notifier))
    try:
        if one.notifier == SMTP_NOTIFIER:
            return _sent_anyway(kind)(event, at, arguments)
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        fix = f"Give arguments: as {one.notifier} documents them."
        raise _invalid(manifest, at, f"{type(error).__name__}: {error}", fix) from error


@cache
def _filled_in_anew(kind: type[Any]) -> type[Any]:
    """The notifier, filled in for each call: Airflow's own is so once, for good, and its DAG
    processor calls one and the same for each run that failed.
    """

    class Anew(kind):  # type: ignore[misc]
        def __call__(self, *args: Any) -> None:
            super(Anew, copy(self)).__call__(*args)

    Anew.__name__, Anew.__qualname__ = kind.__name__, kind.__qualname__
    return Anew


@cache
def _sent_anyway(kind: type[Any]) -> type[Any]:
    """The notifier of mails, which sends our own where the manifest's cannot be filled in: one that
    names a date was lost, in a run without a logical date.
    """

    class Mail(kind):  # type: ignore[misc]
        def __init__(self, event: str, at: str, arguments: Mapping[str, Any]) -> None:
            super().__init__(**arguments)
            self._event, self._at = event, at

        def render_template_fields(self, context: Any, jinja_env: Any = None) -> None:
            given = {name: getattr(self, name) for name in self.template_fields}
            try:
                super().render_template_fields(context, jinja_env)
            except Exception as error:
                context["not_filled_in"] = self._why(given, error, context)
                subject, body = _MAILS[self._event]
                body += _RUN % _run_url() + "<p>{{ not_filled_in | e }}</p>"
                # From the start: what is filled in is no template any more.
                for name, value in (given | {"subject": subject, "html_content": body}).items():
                    setattr(self, name, value)
                super().render_template_fields(context, jinja_env)

        def _why(self, given: Mapping[str, Any], error: Exception, context: Any) -> str:
            # The fields are filled in one after the other, until one cannot be.
            left = (name for name, text in given.items() if text and getattr(self, name) == text)
            name = next((name for name in left if is_template(str(given[name]))), "")
            text = given.get(name)
            dated = context.get("logical_date") is None and dates_in(str(text))
            return (
                f"This is not the mail that the manifest describes: {self._at}.arguments.{name}: "
                f"{text!r} cannot be filled in: {error}."
                f"{f' This run has no logical date. {WITHOUT_DATES}' if dated else ''}"
            )

    return Mail


def _run_url() -> str:
    base = conf.get("api", "base_url", fallback="/").rstrip("/")
    return base + "/dags/{{ dag.dag_id }}/runs/{{ run_id | urlencode }}"


def _invalid(manifest: Manifest, at: str, message: str, fix: str) -> ManifestInvalid:
    issue = ManifestIssue(manifest.line_of(at), at, message, fix)
    return ManifestInvalid(manifest.source, [issue])


def say_error(context: Any) -> None:
    """Adds ``error``, what the task failed with, without secrets, for the notifiers after it.

    Airflow knows of no error where the task itself could not tell it.
    """
    unsaid = f"the task {WORKER_LOST}, or it never got one"
    error = context.get("exception")
    context["error"] = str(redact(unsaid if error is None else str(error)))
