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


@_rule("checkpoints")
def uploads_take_time(at: str, checkpoints: Checkpoints | None) -> Findings:
    if checkpoints is not None and checkpoints.upload_every < _LEAST:
        yield Finding(f"{at}.upload_every", "is less than a second", "Write for example 5m.")
