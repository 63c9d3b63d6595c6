"""launcher: how and where the ranks start. What all kinds have; each kind is in ``launchers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from pydantic import BeforeValidator, Field, PrivateAttr

from ddl_airflow.core.compute import Compute
from ddl_airflow.core.manifest.rule import Finding, Findings, Rule, suggestion
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.values import Text, Whole, truth

# Of kinds that start ranks on several hosts.
Preflight: TypeAlias = Annotated[
    bool | None,
    BeforeValidator(lambda value: None if value is None else truth(value)),
    Field(
        description="Whether several hosts are looked at, by themselves and in pairs, before ranks "
        "start; by default they are.",
        examples=[False],
    ),
]


class Launcher(Section):
    """How the ranks start.

    A kind of launcher is a subclass: its further fields, the rules between them, and what the rest
    of the code asks of a kind. Further fields are None where nothing is given, also lists: what is
    not there is not among the ``settings``.

    Attributes:
        kind_name: what manifests write as ``kind``.
        runs_on: where its ranks run, for people.
        implementation: ``module:class`` of its ``ddl_airflow.launchers.base.Launcher``, imported
            when a job needs it; empty: planned, and not available yet.
        in_manifests: whether manifests may name it.
        can_run_parameter_servers: whether it starts jobs with ``JobSpec.cluster``.
        can_stream: whether a process of the step is there as long as its jobs, so that it can fetch
            data meanwhile, and their hosts may see them come.
        connection_types: of Airflow's connections that its ``connection`` names, looked up
            before data are fetched; empty: none is.
        has_image: whether ranks run in an image, so that ``python`` is none of Airflow's hosts.
        not_here: for fields of other kinds that people may expect of this one, what to do.
    """

    kind_name: ClassVar[str]
    runs_on: ClassVar[str] = ""
    implementation: ClassVar[str] = ""
    in_manifests: ClassVar[bool] = True
    can_run_parameter_servers: ClassVar[bool] = False
    can_stream: ClassVar[bool] = False
    connection_types: ClassVar[tuple[str, ...]] = ()
    has_image: ClassVar[bool] = False
    not_here: ClassVar[Mapping[str, str]] = {}

    kind: Text = Field(
        default="local",
        description="Where the ranks run.",
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
        description="Interpreter that `python` in the command means; by default that of [ddl] "
        "python, else Airflow's own. On Kubernetes the image's, for the training alone.",
        examples=["/opt/train/bin/python"],
    )

    # What only other kinds have. No error of the section's: rules on the rest of it still run.
    _misplaced: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def own_fields(cls) -> set[str]:
        """The fields that not every kind has."""
        return cls.model_fields.keys() - Launcher.model_fields.keys()

    def findings(self, at: str) -> Findings:
        """Yields what is wrong between or with fields, beyond their types."""
        yield from ()

    def findings_of_nodes(self, at: str, nodes: int) -> Findings:
        """Yields why it could not run on so many nodes."""
        yield from ()

    def settings(self) -> dict[str, Any]:
        """The arguments that the launcher's class is called with: what the own fields say.

        They are stored with the DAG: text, numbers, lists and mappings of them.
        """
        return self.model_dump(mode="json", exclude_none=True, include=self.own_fields())


def compute_rules(table: Mapping[str, Compute]) -> tuple[Rule, ...]:
    """Returns the rules that depend on which kinds of node there are."""

    def compute_is_known(at: str, launcher: Launcher, name: str) -> Findings:
        if launcher.slots is None and name not in table:
            fix = (
                f"{suggestion(name, table)} Or write name: gpu, or cpu, and set launcher.slots to "
                "the ranks per node."
            )
            yield Finding(at, f"{name[:40]!r} is not known", fix)

    def its_gpus_are_known(at: str, launcher: Launcher, name: str) -> Findings:
        if launcher.slots is not None and name not in table:
            yield Finding(
                at,
                f"{name[:40]!r} is not known, so its ranks get no GPU",
                "Write name: gpu if each rank needs one, or name: cpu; "
                "launcher.slots says how many ranks a node has.",
            )

    def there_are_as_many(at: str, name: str, nodes: int) -> Findings:
        there_are = table[name].nodes if name in table else None
        if there_are and nodes > there_are:
            yield Finding(at, f"is {nodes}, and this site has {there_are} of {name}", "Lower it.")

    asked = "model_definition.execution.compute_configuration"
    return (
        Rule(("launcher", f"{asked}.name"), compute_is_known, warning=False),
        Rule(("launcher", f"{asked}.name"), its_gpus_are_known, warning=True),
        Rule((f"{asked}.name", f"{asked}.nodes"), there_are_as_many, warning=False),
    )
