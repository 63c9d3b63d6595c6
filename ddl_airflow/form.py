"""What a person may set for one run: the form in which Airflow triggers a DAG of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import Param

from ddl_airflow.core.layout import EXPERIMENT
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.sections.launcher import Launcher
from ddl_airflow.core.manifest.sections.launchers import launcher_kind, offered_kinds
from ddl_airflow.core.manifest.values import CHECKPOINT, LEAST_WHOLE, MOST_WHOLE
from ddl_airflow.core.plan import Plan

_RUN = "This run"
# Of a pattern: browsers end there, and Python also before a last newline.
_END = r"$(?!\n)"


def form(manifest: Manifest, steps: Plan, launchers: Sequence[str] = ()) -> dict[str, Param]:
    """The fields of the trigger form, by name, with the manifest's values as defaults.

    Airflow holds what is entered, or sent as ``conf``, to them and refuses the rest (status 400).

    Args:
        manifest: as loaded.
        steps: its plan.
        launchers: kinds that the site leaves to runs, besides the manifest's own.
    """
    given = manifest.parameters
    fields = {name: _parameter(one) for name, one in given.items() if not one.secret}
    fields["nodes"] = Param(
        steps.train.nodes,
        title="Nodes",
        description=_nodes(manifest, steps),
        section=_RUN,
        type="integer",
        minimum=1,
        # What a task takes of a pool is fixed before anybody fills in the form.
        maximum=_most_nodes(manifest, steps),
    )
    servers = manifest.distribution == "parameter_server"
    kinds = _launchers(manifest, launchers)
    if not servers or len(kinds) > 1:
        fields["launcher"] = Param(
            manifest.launcher.kind,
            title="Launcher",
            description=f"{_where(manifest.launcher, kinds)} The manifest's, or one that the site "
            "leaves to runs ([ddl] manifest_rights).",
            section=_RUN,
            type="string",
            enum=list(kinds),
        )
    if len(manifest.commands) == 1:  # commands of its own choose by themselves
        fields["checkpoint"] = Param(
            str(manifest.transform.checkpoint),
            title="Checkpoint",
            description="Which one becomes the model: latest, or a step.",
            section=_RUN,
            type="string",
            pattern=f"^{CHECKPOINT}{_END}",
        )
    most = max(tries.attempts for tries in steps.tries.values())
    fields["attempts"] = Param(
        most,
        title="Attempts",
        description="Tries of each task in all; at most what the manifest allows.",
        section=_RUN,
        type="integer",
        minimum=1,
        maximum=most,
    )
    if steps.experiments:
        fields["experiment_id"] = Param(
            steps.experiment or None,
            title="Experiment",
            description="EXPERIMENT_ID. One that was used before goes on from its checkpoints; "
            "none: an experiment of this run's own.",
            section=_RUN,
            type=["null", "string"],
            pattern=f"^{EXPERIMENT}{_END}",
        )
    fields["dry_run"] = Param(
        False,
        title="Dry run",
        description="Check scripts, data and places, and say what would be done. Nothing is "
        "fetched, trained or published.",
        section=_RUN,
        type="boolean",
    )
    return fields


def _launchers(manifest: Manifest, launchers: Sequence[str]) -> dict[str, type[Launcher]]:
    """The kinds to choose from, by name."""
    own = manifest.launcher.kind
    names = dict.fromkeys((*offered_kinds(), *launchers, own))
    kinds = {name: launcher_kind(name) for name in names if name == own or name in launchers}
    servers = manifest.distribution == "parameter_server"
    return {
        name: kind
        for name, kind in kinds.items()
        if kind and (kind.can_run_parameter_servers or not servers)
    }


def _where(own: Launcher, kinds: Mapping[str, type[Launcher]]) -> str:
    asked = ", with what the manifest's launcher asks for" if own.settings() else ""
    return " ".join(
        f"{name}: {kind.runs_on}{asked if name == own.kind else ''}."
        for name, kind in kinds.items()
    )


def _most_nodes(manifest: Manifest, steps: Plan) -> int:
    """The manifest's; or as many as the site has, where it says so and none were set aside."""
    if steps.train_on.pool or manifest.compute.nodes is None:
        return steps.train.nodes
    return manifest.compute.nodes


def _nodes(manifest: Manifest, steps: Plan) -> str:
    each = f"Each runs {manifest.slots} rank(s)."
    if manifest.distribution == "parameter_server":
        each = (
            "The first runs a master, two workers and a parameter server; each other "
            f"{manifest.slots} worker(s) and a parameter server."
        )
    pool = steps.train_on.pool
    if pool:
        taken = f"{steps.pool_slots} slot(s) of the pool {pool}"
        return f"{each} At most the manifest's: the training takes {taken} whatever is entered."
    if manifest.compute.nodes is None:
        return f"{each} At most the manifest's: the site does not say how many it has."
    return each


def _parameter(one: Any) -> Param:
    bounds = {"minimum": one.minimum, "maximum": one.maximum}
    schema: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    if one.type == "integer" and not one.choices:
        # Airflow's processes can give each other no others: the task would get no parameters.
        schema = {"minimum": LEAST_WHOLE, "maximum": MOST_WHOLE} | schema
    if one.choices:
        schema["enum"] = list(one.choices)
    # Airflow's form takes what is empty for null, and no field without a value that wants one.
    empty = one.default == ""
    if empty and one.choices:
        schema["enum"].append(None)
    return Param(
        one.default,
        description=one.description or None,
        type=["null", one.type] if empty else one.type,
        **schema,
    )
