"""The rules of all sections, and those for the fields that are no section.

What depends on the site is in ``compute_rules`` of the launcher.
"""

from __future__ import annotations

from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections import (
    definition,
    experiment,
    launcher,
    notifications,
    outcome,
    parameters,
    places,
    schedule,
    tries,
)
from ddl_airflow.core.manifest.sections.places import leaves_its_folder

RULES: list[Rule] = [
    *definition.RULES,
    *places.RULES,
    *schedule.RULES,
    *tries.RULES,
    *launcher.RULES,
    *experiment.RULES,
    *outcome.RULES,
    *notifications.RULES,
    *parameters.RULES,
]
_rule = registering(RULES)


@_rule("code")
def code_is_beside_the_manifest(at: str, code: str) -> Findings:
    if leaves_its_folder(code):
        fix = "Write a folder beside or below the manifest, such as ./src."
        yield Finding(at, "is outside the manifest's folder", fix)
