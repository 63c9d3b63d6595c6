"""checkpoints: how often they go to the place of results while a training runs."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field

from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.values import Duration

RULES: list[Rule] = []
_rule = registering(RULES)
_LEAST = timedelta(seconds=1)


class Checkpoints(Section):
    """What becomes of checkpoints while the training runs."""

    upload_every: Duration = Field(
        description="How often what has changed of them is saved in the place of results, for a "
        "worker that is lost with its disk.",
        examples=["5m"],
    )


@_rule("checkpoints.upload_every")
def uploads_take_time(at: str, upload_every: timedelta) -> Findings:
    if upload_every < _LEAST:
        yield Finding(at, "is less than a second", "Write for example 5m.")
