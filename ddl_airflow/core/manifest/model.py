"""The manifest as typed, frozen values: what may be written, what it means, what it defaults to.

The dialect is that of Watson Machine Learning's training definitions, plus the optional sections
schedule, retries, steps, launcher, distribution, experiment, checkpoints, metrics, transform,
evaluation, approval, lineage, keep, notifications, parameters and code; ``ffdl`` translates another
into it.
Each field carries its description and an example; error messages and the reference page are made
from them. What a single field cannot know is in the rules: beside each section, or in ``rules.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from ddl_airflow.core.cluster import parameter_servers
from ddl_airflow.core.compute import Compute
from ddl_airflow.core.errors import ManifestIssue
from ddl_airflow.core.manifest.digest import digest, earlier_digests
from ddl_airflow.core.manifest.document import Lines
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.checkpoints import Checkpoints
from ddl_airflow.core.manifest.sections.definition import ModelDefinition, slug, split_commands
from ddl_airflow.core.manifest.sections.experiment import ExperimentOrShort
from ddl_airflow.core.manifest.sections.launchers import LauncherOfKind, own_kinds
from ddl_airflow.core.manifest.sections.lineage import Lineage
from ddl_airflow.core.manifest.sections.notifications import Notifications
from ddl_airflow.core.manifest.sections.outcome import Approval, Evaluation, Metric, Transform
from ddl_airflow.core.manifest.sections.parameters import ParameterOrShort
from ddl_airflow.core.manifest.sections.places import (
    SECRET_FIELDS,
    DataReference,
    ResultsReference,
)
from ddl_airflow.core.manifest.sections.schedule import ScheduleOrShort
from ddl_airflow.core.manifest.sections.tries import Retries, Steps
from ddl_airflow.core.manifest.values import Text, Whole

# Of a manifest that was not loaded.
_UNKNOWN = Compute("", 0, gpu=False)


class Manifest(Section):
    """One training: from data in a store to a model in a store."""

    model_definition: ModelDefinition = Field(
        description="The model and how it trains.",
        examples=[
            {
                "name": "tf-mnist",
                "framework": {"name": "tensorflow-ddl", "version": "2.21"},
                "execution": {
                    "command": "python train.py",
                    "compute_configuration": {"name": "v100", "nodes": 2},
                },
            }
        ],
    )
    training_data_reference: DataReference = Field(
        description="Where the training data is.",
        examples=[
            {
                "connection": {"conn_id": "my_s3"},
                "source": {"bucket": "mnist-training-data"},
                "type": "s3",
            }
        ],
    )
    training_results_reference: ResultsReference = Field(
        description="Where the results go.",
        examples=[
            {
                "connection": {"conn_id": "my_s3"},
                "target": {"bucket": "mnist-training-models"},
                "type": "s3",
            }
        ],
    )
    schedule: ScheduleOrShort | None = Field(
        default=None,
        description="Cron expression or preset, or a section; without it, only people start the "
        "training.",
        examples=["0 3 * * 0"],
    )
    retries: Retries = Field(
        default=Retries(), description="What happens on failure.", examples=[{"attempts": 3}]
    )
    steps: Steps = Field(
        default=Steps(),
        description="Attempts and timeouts of single steps.",
        examples=[{"train": {"attempts": 5, "timeout": "2d"}}],
    )
    launcher: LauncherOfKind = Field(
        default=own_kinds()["local"](),
        description="How the ranks start.",
        examples=[{"kind": "local"}],
    )
    distribution: Literal["mpi", "independent", "parameter_server"] = Field(
        default="mpi",
        description="How the ranks work together: mpi: they average gradients, and a training of "
        "several that have not has failed; independent: MPI starts them, and they need not; "
        "parameter_server: a TF_CONFIG cluster of a master, workers and parameter servers.",
        examples=["parameter_server"],
    )
    experiment: ExperimentOrShort | None = Field(
        default=None,
        description="Name of the experiment, which goes on where its last training stopped, or a "
        "section; by default each training is an experiment of its own.",
        examples=["digits-wide"],
    )
    checkpoints: Checkpoints | None = Field(
        default=None,
        description="What becomes of checkpoints while the training runs; by default they stay in "
        "the workspace until they are published.",
        examples=[{"upload_every": "5m"}],
    )
    metrics: tuple[Metric, ...] = Field(
        default=(),
        description="Numbers to read from the output.",
        examples=[[{"name": "loss", "regex": "Loss= ([0-9.]+)"}]],
    )
    transform: Transform = Field(
        default=Transform(),
        description="How the checkpoint becomes a SavedModel.",
        examples=[{"checkpoint": "latest"}],
    )
    evaluation: Evaluation | None = Field(
        default=None,
        description="What a model must be worth to be published.",
        examples=[{"metric": "accuracy", "minimum": 0.95}],
    )
    approval: Approval = Field(
        default=Approval(required=False),
        description="Whether a person decides over publishing.",
        examples=[{"timeout": "7d", "then": "reject"}],
    )
    lineage: Lineage = Field(
        default=Lineage(),
        description="What is kept of how the model came to be.",
        examples=[{"prove": True}],
    )
    keep: Whole | None = Field(
        default=None,
        ge=1,
        description="How many publications stay when `ddl-airflow clean` runs, the newest; besides "
        "what a pointer names. By default all.",
        examples=[10],
    )
    notifications: Notifications = Field(
        default=Notifications(),
        description="Who hears of a run.",
        examples=[{"on_failure": ["ml@example.com"]}],
    )
    parameters: Mapping[str, ParameterOrShort] = Field(
        default={},
        description="Values that a run may change, by name; a value alone is its default.",
        examples=[{"learning_rate": 0.001}],
    )
    code: Text = Field(
        default="./",
        description="Folder of the scripts, relative to the manifest.",
        examples=["./src"],
    )

    _source: str = PrivateAttr(default="")
    _folder: Path | None = PrivateAttr(default=None)
    _warnings: tuple[ManifestIssue, ...] = PrivateAttr(default=())
    _lines: Lines = PrivateAttr(default_factory=Lines)
    _names: Mapping[str, str] = PrivateAttr(default={})
    _compute: Compute = PrivateAttr(default_factory=lambda: _UNKNOWN)

    @property
    def source(self) -> str:
        """The file as messages name it."""
        return self._source

    @property
    def folder(self) -> Path | None:
        """Absolute folder of the file; relative paths start here. None for a bare text."""
        return self._folder

    @property
    def warnings(self) -> tuple[ManifestIssue, ...]:
        """What works, but should be written otherwise."""
        return self._warnings

    def line_of(self, path: str) -> int:
        """Returns the line of a field such as ``metrics[0].regex``, or of its nearest parent."""
        return self._lines.of(path)

    def original(self, path: str) -> str | None:
        """Returns what its dialect calls a field, None where it is called as it is here."""
        return self._names.get(path)

    @property
    def dialect(self) -> str:
        """Which of the known ways to write a manifest this one follows: wml, or ffdl."""
        return "ffdl" if self._names else "wml"

    @property
    def dag_id(self) -> str:
        """The model's name as Airflow, file systems and buckets accept it."""
        return slug(self.model_definition.name)

    @property
    def commands(self) -> tuple[str, ...]:
        """The first is the training, on all ranks; the others run once, after it."""
        return split_commands(self.model_definition.execution.command)

    @property
    def tf1(self) -> bool:
        """Whether the scripts are written for TensorFlow 1."""
        version = self.model_definition.framework.version
        return re.match(r"1(?![0-9])", version) is not None

    @property
    def slots(self) -> int:
        """Ranks per node."""
        return self.launcher.slots or self._compute.slots

    @property
    def compute(self) -> Compute:
        """The kind of node that it names; of one that nobody knows, its slots only."""
        return self._compute

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        nodes = self.model_definition.execution.compute_configuration.nodes
        if self.distribution == "parameter_server":
            return parameter_servers(nodes, self.slots).size
        return self.slots * nodes

    @property
    def said(self) -> dict[str, Any]:
        """All that decides the training, and is not left to defaults; it is stored nowhere.

        Key order, comments, spelled-out defaults, the file's name, the keys to the stores, when it
        runs, who hears of it, how long it is kept and what is kept beside it are not in it, nor
        whether it waits, its data come or its checkpoints go while it trains.
        """
        keys: Any = {"connection": set(SECRET_FIELDS)}
        content = self.model_dump(
            mode="json",
            exclude_none=True,
            exclude_defaults=True,
            exclude={
                "training_data_reference": keys | {"stream": True},
                "training_results_reference": keys,
                "schedule": True,
                "checkpoints": True,
                "keep": True,
                "lineage": True,
                "approval": True,
                "notifications": True,
            },
        )
        if self.approval.required:
            content["approval"] = {"required": True}
        if self.experiment is not None:
            content["experiment"] = self.experiment.name
        return content

    @property
    def digest(self) -> str:
        """The digest of what the manifest says, with its version: ``sha256:v2:…``."""
        return digest(self.said)

    @property
    def earlier_digests(self) -> tuple[str, ...]:
        """Its digests as earlier versions of ours made them: a model of one is of this manifest."""
        return earlier_digests(self.said)
