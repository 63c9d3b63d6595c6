"""The rules of all sections, and those for the fields that are no section.

What depends on the site is in ``compute_rules`` of the launcher.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddl_airflow.core.errors import ManifestIssue
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering
from ddl_airflow.core.manifest.sections import (
    checkpoints,
    definition,
    experiment,
    launchers,
    notifications,
    outcome,
    parameters,
    places,
    schedule,
    tries,
)
from ddl_airflow.core.manifest.sections.definition import FINDS_SERVERS, Execution
from ddl_airflow.core.manifest.sections.experiment import Experiment
from ddl_airflow.core.manifest.sections.notifications import Notifications, texts_of
from ddl_airflow.core.manifest.sections.outcome import Evaluation
from ddl_airflow.core.manifest.sections.places import leaves_its_folder
from ddl_airflow.core.manifest.sections.schedule import Schedule
from ddl_airflow.core.manifest.templates import WITHOUT_DATES, dates_in

if TYPE_CHECKING:
    from ddl_airflow.core.manifest.model import Manifest

RULES: list[Rule] = [
    *definition.RULES,
    *places.RULES,
    *schedule.RULES,
    *tries.RULES,
    *launchers.RULES,
    *experiment.RULES,
    *checkpoints.RULES,
    *outcome.RULES,
    *notifications.RULES,
    *parameters.RULES,
]
_rule = registering(RULES)
# Of manifests that are written in our dialect; FfDL's has its own.
OWN_RULES: list[Rule] = []
_own_rule = registering(OWN_RULES)


def findings_beside(manifest: Manifest, folder: Path) -> Findings:
    """Yields what is wrong where the manifest lies, as its text alone does not say.

    Args:
        manifest: as loaded.
        folder: where it lies.
    """
    data, results = manifest.training_data_reference, manifest.training_results_reference
    yield from places.folders_differ(data, results, folder)
    yield from places.pointers_are_no_data(data, results, manifest.dag_id, folder)
    if manifest.schedule is not None and manifest.schedule.assets:
        models = f"{results.store.uri(results.place, folder)}/{manifest.dag_id}"
        yield from schedule.assets_are_of_others(manifest.schedule, models)


def issues_beside(manifest: Manifest, folder: Path) -> list[ManifestIssue]:
    """``findings_beside`` with their lines, for all who look at a manifest's file."""
    found = findings_beside(manifest, folder)
    return [ManifestIssue(manifest.line_of(one.field), *one) for one in found]


@_rule("code")
def code_is_beside_the_manifest(at: str, code: str) -> Findings:
    if leaves_its_folder(code):
        fix = "Write a folder beside or below the manifest, such as ./src."
        yield Finding(at, "is outside the manifest's folder", fix)


@_own_rule("distribution", "model_definition.execution", warning=True)
def servers_are_found_by_tf_config(at: str, distribution: str, execution: Execution) -> Findings:
    several = execution.compute_configuration.nodes > 1
    if several and distribution == "mpi" and FINDS_SERVERS.search(execution.command):
        message = "is for parameter servers that find each other by the names of the service's pods"
        fix = "Write distribution: parameter_server, and read TF_CONFIG."
        yield Finding(f"{at}.command", message, fix)


@_rule("schedule", "experiment", warning=True)
def changes_of_data_are_waited_for(
    at: str, given: Schedule | None, in_experiment: Experiment | None
) -> Findings:
    busy = in_experiment.when_busy if in_experiment else "wait"
    if given is not None and given.on_data_change and busy == "skip":
        message = "loses a change of the data that comes while another training works there"
        fix = "Delete it, and the run waits; or look by a cron expression too."
        yield Finding(f"{at}.when_busy", message, fix)


@_rule("schedule", "model_definition.execution.command", warning=True)
def command_has_dates_in_each_run(at: str, given: Schedule | None, command: str) -> Findings:
    yield from _dates_of_no_run(at, given, command)


@_rule("schedule", "evaluation", warning=True)
def evaluation_has_dates_in_each_run(
    at: str, given: Schedule | None, evaluation: Evaluation | None
) -> Findings:
    if evaluation is not None and evaluation.command:
        yield from _dates_of_no_run(f"{at}.command", given, evaluation.command)


@_rule("schedule", "notifications", warning=True)
def notifications_have_dates_in_each_run(
    at: str, given: Schedule | None, to: Notifications
) -> Findings:
    for field, text in texts_of(at, to):
        yield from _dates_of_no_run(field, given, text, "does not send it")


def _dates_of_no_run(at: str, given: Schedule | None, text: str, then: str = "fails") -> Findings:
    if given is None or not (given.on_data_change or given.assets):
        return
    if dates := dates_in(text):
        starts = "changed data start" if given.on_data_change else "assets start"
        message = f"names {', '.join(dates)}; a run that {starts} has no logical date, and {then}"
        yield Finding(at, message, WITHOUT_DATES)
