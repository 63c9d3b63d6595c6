"""retries and steps: how often each step is tried, and how long a try may take."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

from pydantic import Field

from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.outcome import Approval, Evaluation
from ddl_airflow.core.manifest.values import Duration, Whole

# The longest pause of Airflow's that doubles, unless its [core] max_task_retry_delay says another.
_MOST_DOUBLED = timedelta(hours=24)
RULES: list[Rule] = []
_rule = registering(RULES)


class Retries(Section):
    """What happens when a task fails and trying again can help."""

    attempts: Whole = Field(
        default=3, ge=1, le=100, description="Tries in all, the first included.", examples=[3]
    )
    delay: Duration = Field(
        default=timedelta(seconds=30), description="Pause before the next try.", examples=["30s"]
    )
    backoff: Literal["exponential", "fixed"] = Field(
        default="exponential",
        description="exponential doubles the pause each time.",
        examples=["fixed"],
    )


class Step(Section):
    """What holds for one step instead of ``retries``, and how long a try of it may take."""

    attempts: Whole | None = Field(
        default=None, ge=1, le=100, description="Tries in all, the first included.", examples=[5]
    )
    delay: Duration | None = Field(
        default=None, description="Pause before the next try.", examples=["1m"]
    )
    timeout: Duration | None = Field(
        default=None,
        description="Longest time that one try may take; by default there is no limit.",
        examples=["12h"],
    )


class Steps(Section):
    """Steps that are tried otherwise than ``retries`` says."""

    stage_data: Step = Field(
        default=Step(), description="Fetching the data.", examples=[{"timeout": "2h"}]
    )
    train: Step = Field(
        default=Step(), description="The training.", examples=[{"attempts": 5, "timeout": "2d"}]
    )
    transform: Step = Field(
        default=Step(), description="Making the SavedModel.", examples=[{"timeout": "1h"}]
    )
    evaluate: Step = Field(
        default=Step(), description="The evaluation.", examples=[{"attempts": 1}]
    )
    upload_results: Step = Field(
        default=Step(), description="Publishing.", examples=[{"attempts": 10, "delay": "1m"}]
    )


@_rule("evaluation", "approval", "steps")
def steps_are_there_and_have_time(
    at: str, evaluation: Evaluation | None, approval: Approval, steps: Steps
) -> Findings:
    if "evaluate" in steps.model_fields_set and evaluation is None and not approval.required:
        fix = "Delete it, or add evaluation:."
        yield Finding(f"{at}.evaluate", "is for a step that this training does not have", fix)
    for name, step in steps:
        if step.timeout is not None and step.timeout <= timedelta(0):
            fix = "Write for example 12h, or delete it for no limit."
            yield Finding(f"{at}.{name}.timeout", "leaves no time at all", fix)


@_rule("retries", "steps", warning=True)
def pauses_are_not_cut_short(at: str, retries: Retries, steps: Steps) -> Findings:
    if retries.backoff == "fixed":
        return
    given = {"retries.delay": retries.delay} | {f"{at}.{name}.delay": s.delay for name, s in steps}
    for field, delay in given.items():
        if delay is not None and delay > _MOST_DOUBLED:
            message = (
                "is more than 24 h, after which Airflow tries again where pauses double, unless "
                "its [core] max_task_retry_delay is longer"
            )
            yield Finding(field, message, "Write at most 24h, or retries.backoff: fixed.")
