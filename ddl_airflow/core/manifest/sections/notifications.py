"""notifications: who hears of a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from ddl_airflow.core.manifest.document import child
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.outcome import Approval
from ddl_airflow.core.manifest.templates import OF_A_NOTIFICATION, template_findings
from ddl_airflow.core.manifest.values import Argument, Text

SMTP_NOTIFIER = "airflow.providers.smtp.notifications.smtp.SmtpNotifier"
_SECRET_NAME = re.compile(
    r"passw|pwd|secret|token|(?:api|private|account|integration|routing)_?key|credential|webhook_url",
    re.I,
)
_PASSWORD_IN_URL = re.compile(r"://[^\s/:@]{0,200}:[^\s/@]{1,200}@")
# Arguments that a notifier takes for a path, which it opens as Airflow: SmtpNotifier's and
# SesNotifier's files, SmtpNotifier's template, AppriseNotifier's attach.
_FILE_NAME = re.compile(r"file|path|attach|template", re.I)
# Those that say where to, in the place of the connection: SlackNotifier's base_url and proxy,
# HttpNotifier's endpoint. Pictures and a queue of SQS are none.
_PLACE_NAME = re.compile(
    r"(?:^|_)(?<!icon_)(?<!queue_)(?<!avatar_)(?:url|proxy|host|endpoint)$", re.I
)
RULES: list[Rule] = []
_rule = registering(RULES)


def _notification(value: Any) -> Any:
    """An address alone is a mail to it; a class path alone is a notifier without arguments."""
    if not isinstance(value, str):
        return value
    return {"arguments": {"to": value}} if "@" in value else {"notifier": value}


def _has_password(value: Any) -> bool:
    """Whether an argument is, or has among its items, an address with user and password."""
    texts = value if isinstance(value, tuple) else (value,)
    return any(isinstance(text, str) and _PASSWORD_IN_URL.search(text) for text in texts)


def says_where_to(argument: str) -> bool:
    """Whether an argument of a notifier, by its name, says where it sends to."""
    return _PLACE_NAME.search(argument) is not None


class Notification(Section):
    """One message, by a notifier that a provider of this Airflow brings."""

    notifier: Text = Field(
        default=SMTP_NOTIFIER,
        description="Its class path; mail by default. `airflow providers notifications` lists all.",
        examples=["airflow.providers.smtp.notifications.smtp.SmtpNotifier"],
    )
    arguments: Mapping[str, Argument] = Field(
        default={},
        description="What it is made with; secrets belong in the connection that it uses.",
        examples=[{"to": ["ml@example.com"], "smtp_conn_id": "mail"}],
    )


NotificationOrShort = Annotated[Notification, BeforeValidator(_notification)]


class Notifications(Section):
    """Who hears of a run, by Airflow's notifiers. An address alone is a mail to it."""

    on_failure: tuple[NotificationOrShort, ...] = Field(
        default=(),
        description="When a task has failed and is not tried again.",
        examples=[["ml@example.com"]],
    )
    on_success: tuple[NotificationOrShort, ...] = Field(
        default=(),
        description="When a model was published.",
        examples=[["ml@example.com"]],
    )
    on_approval: tuple[NotificationOrShort, ...] = Field(
        default=(),
        description="When the run waits for a person.",
        examples=[["ml@example.com"]],
    )


@_rule("approval", "notifications")
def notifications_have_a_reason_and_no_secret(
    at: str, approval: Approval, notifications: Notifications
) -> Findings:
    if notifications.on_approval and not approval.required:
        fix = "Add approval: {required: true}, or delete it."
        yield Finding(f"{at}.on_approval", "is given, and nobody is asked for approval", fix)
    for event, entries in notifications:
        for i, one in enumerate(entries):
            field = f"{at}.{event}[{i}]"
            if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", one.notifier):
                fix = "Write a mail address, or module and class of a notifier."
                message = f"{one.notifier[:60]!r} is neither a mail address nor a class path"
                yield Finding(f"{field}.notifier", message, fix)
            for name in one.arguments:
                if _SECRET_NAME.search(name) or _has_password(one.arguments[name]):
                    fix = "Put it into an Airflow connection, and give the notifier its id."
                    yield Finding(child(f"{field}.arguments", name), "may hold a secret", fix)
                elif _FILE_NAME.search(name):
                    fix = "Write into the manifest what it is to say."
                    message = "names a file, which would be read as Airflow"
                    yield Finding(child(f"{field}.arguments", name), message, fix)


@_rule("notifications")
def notifications_name_what_templates_may(at: str, notifications: Notifications) -> Findings:
    for field, text in texts_of(at, notifications):
        yield from template_findings(field, text, OF_A_NOTIFICATION)


def texts_of(at: str, notifications: Notifications) -> Iterator[tuple[str, str]]:
    """The field and the text of each argument that may be a template."""
    for event, entries in notifications:
        for i, one in enumerate(entries):
            for name, value in one.arguments.items():
                field = child(f"{at}.{event}[{i}].arguments", name)
                for text in value if isinstance(value, tuple) else (value,):
                    if isinstance(text, str):
                        yield field, text
