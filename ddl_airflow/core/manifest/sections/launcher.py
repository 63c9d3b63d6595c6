"""launcher: how and where the ranks start."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field

from ddl_airflow.core.compute import Compute
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, registering, suggestion
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.values import Duration, Text, Whole

LAUNCHER_KINDS = ("local", "slurm")
PLANNED_LAUNCHER_KINDS = ("ssh", "kubernetes")
SLURM_FIELDS = ("partition", "account", "time_limit", "options")
# Set by ours, or what would make of one job another: several, one that waits, one that repeats.
RESERVED_OPTIONS = frozenset(
    """
    account array batch chdir clusters error export export-file get-user-env help hold input
    job-name kill-on-invalid-dep no-kill nodefile nodes no-requeue ntasks ntasks-per-node open-mode
    output parsable partition quiet requeue tasks-per-node test-only time uid usage version wait
    wrap
    """.split()
)
RULES: list[Rule] = []
_rule = registering(RULES)


class Launcher(Section):
    """How the ranks start."""

    kind: Text = Field(
        default="local",
        description="local: on the host of the Airflow worker; slurm: a job of a Slurm cluster.",
        examples=["slurm"],
    )
    slots: Whole | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Ranks per node; by default what compute_configuration.name stands for.",
        examples=[2],
    )
    python: Text | None = Field(
        default=None,
        description="Interpreter that `python` in the command means; by default Airflow's own.",
        examples=["/opt/train/bin/python"],
    )
    # None where nothing is given, also for the list: what is not there is not in the digest.
    partition: Text | None = Field(
        default=None,
        description="Slurm's partition; by default the cluster's own.",
        examples=["gpu"],
    )
    account: Text | None = Field(
        default=None, description="Slurm's account; by default the user's own.", examples=["vision"]
    )
    time_limit: Duration | None = Field(
        default=None,
        description="After it Slurm ends the job, a try; by default the partition's.",
        examples=["12h"],
    )
    options: tuple[Text, ...] | None = Field(
        default=None,
        description="Further options of sbatch, each --name or --name=value.",
        examples=[["--qos=high", "--mem=64G"]],
    )


def compute_rules(table: Mapping[str, Compute]) -> tuple[Rule, ...]:
    """Returns the rules that depend on which kinds of node there are."""

    def compute_is_known(at: str, launcher: Launcher, name: str) -> Findings:
        if launcher.slots is None and name not in table:
            fix = f"{suggestion(name, table)} Or set launcher.slots to the ranks per node."
            yield Finding(at, f"{name[:40]!r} is not known", fix)

    def there_are_as_many(at: str, name: str, nodes: int) -> Findings:
        there_are = table[name].nodes if name in table else None
        if there_are and nodes > there_are:
            yield Finding(at, f"is {nodes}, and this site has {there_are} of {name}", "Lower it.")

    asked = "model_definition.execution.compute_configuration"
    return (
        Rule(("launcher", f"{asked}.name"), compute_is_known, warning=False),
        Rule((f"{asked}.name", f"{asked}.nodes"), there_are_as_many, warning=False),
    )


@_rule("launcher.kind")
def launcher_is_available(at: str, kind: str) -> Findings:
    if kind in PLANNED_LAUNCHER_KINDS:
        fix = f"Use {' or '.join(LAUNCHER_KINDS)}."
        yield Finding(at, f"{kind} is not available in this release", fix)
    elif kind not in LAUNCHER_KINDS:
        known, planned = " or ".join(LAUNCHER_KINDS), ", ".join(PLANNED_LAUNCHER_KINDS)
        fix = f"Use {known}. Not available yet: {planned}."
        yield Finding(at, f"{kind[:40]!r} is not known", fix)


@_rule("launcher")
def slurm_alone_is_asked_for_more(at: str, launcher: Launcher) -> Findings:
    other = launcher.kind in LAUNCHER_KINDS and launcher.kind != "slurm"
    for name in SLURM_FIELDS:
        if other and getattr(launcher, name) is not None:
            yield Finding(f"{at}.{name}", "is for kind slurm only", "Delete it, or set the kind.")
    # What sbatch reads line by line cannot hold the end of one.
    for name in ("partition", "account"):
        if re.search(r"[^!-~]", getattr(launcher, name) or ""):
            yield Finding(f"{at}.{name}", "is no name that Slurm could have", "Correct it.")
    if launcher.time_limit is not None and not launcher.time_limit:
        yield Finding(f"{at}.time_limit", "is no time at all", "Write for example 12h.")
    for i, option in enumerate(launcher.options or ()):
        found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[ -~]*)?", option)
        if found is None:
            fix = "Write --name or --name=value, for example --qos=high."
            yield Finding(f"{at}.options[{i}]", f"{option[:40]!r} is no option of sbatch", fix)
        # sbatch takes any beginning of a name that is only one's.
        elif any(name.startswith(found[1]) for name in RESERVED_OPTIONS):
            fix = "Delete it; partition, account, time_limit and nodes have fields of their own."
            yield Finding(f"{at}.options[{i}]", f"{found[1]} cannot be set here", fix)


@_rule("launcher", "distribution")
def parameter_servers_are_local(at: str, launcher: Launcher, distribution: str) -> Findings:
    if launcher.kind == "slurm" and distribution == "parameter_server":
        fix = "Set launcher.kind: local, or distribution: mpi."
        yield Finding("distribution", "parameter_server does not run on slurm", fix)
