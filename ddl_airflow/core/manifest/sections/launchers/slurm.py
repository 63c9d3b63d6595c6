"""launcher: {kind: slurm}: ranks in a job of a Slurm cluster."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from ddl_airflow.core.manifest.rule import Finding, Findings
from ddl_airflow.core.manifest.sections.launcher import Launcher, Preflight
from ddl_airflow.core.manifest.values import Duration, Text

# Set by ours, or what would make of one job another: several, one that waits, one that repeats.
RESERVED_OPTIONS = frozenset(
    """
    account array batch chdir clusters error export export-file get-user-env help hold input
    job-name kill-on-invalid-dep no-kill nodefile nodes no-requeue ntasks ntasks-per-node open-mode
    output parsable partition quiet requeue tasks-per-node test-only time uid usage version wait
    wrap
    """.split()
)


class Slurm(Launcher):
    """How the ranks start: in a job of a Slurm cluster."""

    kind_name = "slurm"
    runs_on = "a job of a Slurm cluster"
    implementation = "ddl_airflow.launchers.slurm:SlurmLauncher"
    can_run_parameter_servers = True
    not_here = {
        "min_nodes": "Delete it: a scheduler gives all nodes or none. A try that finds one not to "
        "be well ends before its ranks start, and the next one may get others."
    }

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

    preflight: Preflight = None

    def findings(self, at: str) -> Findings:
        """Yields what Slurm would refuse, or would make something else of."""
        # What sbatch reads line by line cannot hold the end of one.
        for name in ("partition", "account"):
            if re.search(r"[^!-~]", getattr(self, name) or ""):
                yield Finding(f"{at}.{name}", "is no name that Slurm could have", "Correct it.")
        if self.time_limit is not None and not self.time_limit:
            yield Finding(f"{at}.time_limit", "is no time at all", "Write for example 12h.")
        for i, option in enumerate(self.options or ()):
            found = re.fullmatch(r"--([a-z][a-z0-9-]*)(=[ -~]*)?", option)
            if found is None:
                fix = "Write --name or --name=value, for example --qos=high."
                yield Finding(f"{at}.options[{i}]", f"{option[:40]!r} is no option of sbatch", fix)
            # sbatch takes any beginning of a name that is only one's.
            elif any(name.startswith(found[1]) for name in RESERVED_OPTIONS):
                fix = (
                    "Delete it; partition, account, time_limit and nodes have fields of their own."
                )
                yield Finding(f"{at}.options[{i}]", f"{found[1]} cannot be set here", fix)

    def settings(self) -> dict[str, Any]:
        """The arguments of ``SlurmLauncher``."""
        said = {
            "partition": self.partition,
            "account": self.account,
            "time_limit_s": self.time_limit and self.time_limit.total_seconds(),
            "options": self.options and list(self.options),
        }
        chosen = {} if self.preflight is None else {"preflight": self.preflight}
        return {name: value for name, value in said.items() if value} | chosen


KIND = Slurm
