"""experiment: which one the trainings go on with, and what the second of two at a time does."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ddl_airflow.core.layout import is_experiment
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.values import Text

RULES: list[Rule] = []
_rule = registering(RULES)


def _experiment(value: Any) -> Any:
    """``experiment: wide`` is short for ``experiment: {name: wide}``."""
    return {"name": value} if isinstance(value, str) else value


class Experiment(Section):
    """The experiment that all trainings of the manifest go on with."""

    name: Text = Field(
        description="EXPERIMENT_ID, and the name of its folder.", examples=["digits-wide"]
    )
    when_busy: Literal["wait", "skip"] = Field(
        default="wait",
        description="While another training works in it: wait for its end, without a worker, or "
        "skip this one.",
        examples=["skip"],
    )


ExperimentOrShort = Annotated[Experiment, BeforeValidator(_experiment)]


@_rule("experiment")
def experiment_is_a_folder_name(at: str, experiment: Experiment | None) -> Findings:
    if experiment is not None and not is_experiment(experiment.name):
        fix = "Use up to 200 of A-Z, a-z, 0-9, _, dot and dash, with a letter or digit first."
        yield Finding(at, f"{experiment.name[:40]!r} cannot be the name of a folder", fix)
