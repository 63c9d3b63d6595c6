"""The manifest as typed, frozen values: what may be written, what it means, what it defaults to.

The dialect is that of Watson Machine Learning's training definitions, plus the optional sections
schedule, retries, steps, launcher, distribution, experiment, metrics, transform, evaluation,
approval, notifications, parameters and code; ``ffdl`` translates another into it. Each field
carries its description and an example; error messages and the reference page are made from them.
What a single field cannot know is in ``rules.py``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
)

from ddl_airflow.core.cluster import parameter_servers
from ddl_airflow.core.compute import Compute
from ddl_airflow.core.errors import ConnectionInvalid, ManifestIssue
from ddl_airflow.core.manifest.document import Lines
from ddl_airflow.core.manifest.values import (
    AnyText,
    Argument,
    Checkpoint,
    Duration,
    Moment,
    Prefix,
    Secret,
    Text,
    Value,
    Whole,
    number,
    truth,
)

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
SMTP_NOTIFIER = "airflow.providers.smtp.notifications.smtp.SmtpNotifier"
SECRET_FIELDS = ("access_key_id", "secret_access_key")


def _schedule(value: Any) -> Any:
    """``schedule: "@daily"`` is short for ``schedule: {cron: "@daily"}``."""
    return {"cron": value} if isinstance(value, str) else value


def _notification(value: Any) -> Any:
    """An address alone is a mail to it; a class path alone is a notifier without arguments."""
    if not isinstance(value, str):
        return value
    return {"arguments": {"to": value}} if "@" in value else {"notifier": value}


def _parameter(value: Any) -> Any:
    """``name: 0.1`` is short for ``name: {default: 0.1}``."""
    return value if isinstance(value, (Mapping, BaseModel)) else {"default": value}


class Section(BaseModel):
    """Base of every section: frozen, and closed to fields that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True
    )


# --- model_definition -----------------------------------------------------------------------


class Author(Section):
    """Who wrote the model."""

    name: Text = Field(description="Name, kept in the lineage.", examples=["Your Name"])
    email: Text | None = Field(
        default=None, description="Address, kept in the lineage.", examples=["you@example.com"]
    )


class Runtimes(Section):
    """The language that the scripts are written in."""

    name: Literal["python"] = Field(description="Language of the scripts.", examples=["python"])
    version: Text | None = Field(
        default=None,
        description="Kept in the lineage only; `launcher.python` decides what runs.",
        examples=["3.11"],
    )


class Framework(Section):
    """What the scripts import."""

    name: Literal["tensorflow", "tensorflow-ddl"] = Field(
        description="Framework; both names mean TensorFlow with the DDL ops.",
        examples=["tensorflow-ddl"],
    )
    version: Text = Field(
        description="TensorFlow version that the scripts are written for; `-py3-ddl` may follow. "
        "Below 2, `import tensorflow` gives them the 1.x API.",
        examples=["2.21"],
    )
    runtimes: Runtimes | None = Field(
        default=None, description="Language of the scripts.", examples=[{"name": "python"}]
    )


class ComputeConfiguration(Section):
    """How many ranks the training runs: slots per node times nodes."""

    name: Text = Field(
        description="Kind of node; decides how many ranks run on each.", examples=["v100x2"]
    )
    nodes: Whole = Field(default=1, ge=1, le=4096, description="Number of nodes.", examples=[2])


class Execution(Section):
    """What runs, and on how many ranks."""

    command: Text = Field(
        description="The first command runs on all ranks; those after `;` run once, after it.",
        examples=["python train.py"],
    )
    compute_configuration: ComputeConfiguration = Field(
        description="Where and how often it runs.", examples=[{"name": "v100", "nodes": 2}]
    )


class ModelDefinition(Section):
    """The model: its name, framework and command."""

    name: Text = Field(
        description="Name of the model; the DAG id is made from it.", examples=["tf-mnist"]
    )
    author: Author | None = Field(
        default=None, description="Who wrote the model.", examples=[{"name": "Your Name"}]
    )
    description: AnyText = Field(
        default="", description="A sentence for the DAG list.", examples=["Digits, two layers"]
    )
    framework: Framework = Field(
        description="What the scripts import.",
        examples=[{"name": "tensorflow-ddl", "version": "2.21"}],
    )
    execution: Execution = Field(
        description="What runs, and on how many ranks.",
        examples=[{"command": "python train.py", "compute_configuration": {"name": "v100"}}],
    )


# --- training_data_reference, training_results_reference ------------------------------------


@dataclass(frozen=True)
class Credentials:
    """What opens an object store. The keys are text here, but never part of a repr."""

    endpoint_url: str
    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    region_name: str | None = None


class Connection(Section):
    """Access to an object store: an Airflow connection, or an endpoint and keys.

    Each of endpoint_url, access_key_id, secret_access_key and region_name may be ``${NAME}``: the
    environment variable of the machine that runs the task, read when it runs.
    """

    conn_id: Text | None = Field(
        default=None, description="Airflow connection; nothing else then.", examples=["my_s3"]
    )
    endpoint_url: Text | None = Field(
        default=None,
        description="Address of the object store.",
        examples=["https://s3.example.com"],
    )
    access_key_id: Secret | None = Field(
        default=None, description="Access key.", examples=["${S3_ACCESS_KEY_ID}"]
    )
    secret_access_key: Secret | None = Field(
        default=None, description="Secret key.", examples=["${S3_SECRET_ACCESS_KEY}"]
    )
    region_name: Text | None = Field(
        default=None, description="Region, where the store asks for it.", examples=["eu-de"]
    )

    def references(self) -> dict[str, str]:
        """Returns the fields as written, to be stored. Raises ValueError if a key is among them."""
        values: dict[str, str] = {}
        for name, value in self:
            text = value.get_secret_value() if isinstance(value, SecretStr) else value
            if isinstance(value, SecretStr) and not REFERENCE.fullmatch(str(text)):
                raise ValueError(f"{name} is written out")
            if text is not None:
                values[name] = text
        return values

    def resolve(self, environ: Mapping[str, str]) -> Credentials:
        """Returns the values themselves, with every ``${NAME}`` replaced from environ.

        Raises:
            ConnectionInvalid: variables that are not set, or empty (all of them are named); or a
                connection by conn_id, which only Airflow can look up.
        """
        if self.conn_id is not None:
            raise ConnectionInvalid(f"conn_id: {self.conn_id}: only Airflow knows its values.")
        values: dict[str, str] = {}
        missing: list[str] = []
        for name, value in self:
            text = value.get_secret_value() if isinstance(value, SecretStr) else value or ""
            if reference := REFERENCE.fullmatch(text):
                text = environ.get(reference[1], "").strip()
                if not text:
                    missing.append(f"{name}: environment variable {reference[1]} is not set")
            values[name] = text
        if missing:
            fix = "Set what is missing where the task runs, or use conn_id."
            raise ConnectionInvalid(f"{'; '.join(missing)}. {fix}")
        return Credentials(
            values["endpoint_url"],
            values["access_key_id"],
            values["secret_access_key"],
            values["region_name"] or None,
        )


class Location(Section):
    """A place in an object store (bucket, prefix), or in the file system (path)."""

    bucket: Text | None = Field(
        default=None, description="Bucket, for type s3.", examples=["mnist-training"]
    )
    prefix: Prefix = Field(
        default="", description="Folder in the bucket; all of it by default.", examples=["mnist/v1"]
    )
    path: Text | None = Field(
        default=None,
        description="Folder, for type fs; absolute, or relative to the manifest.",
        examples=["./data"],
    )


class _Reference(Section):
    """What data and results have in common."""

    name: AnyText = Field(default="", description="A title for people.", examples=["MNIST images"])
    connection: Connection | None = Field(
        default=None,
        description="Access to the object store, for type s3.",
        examples=[{"conn_id": "my_s3"}],
    )
    type: Literal["s3", "fs"] = Field(
        description="s3: an object store; fs: a folder.", examples=["s3"]
    )


class DataReference(_Reference):
    """Where the training data is."""

    source: Location = Field(
        description="Where the data is.", examples=[{"bucket": "mnist-training-data"}]
    )

    @property
    def place(self) -> Location:
        """Where: the same name for data and results."""
        return self.source


class ResultsReference(_Reference):
    """Where the results go."""

    target: Location = Field(
        description="Where the results go.", examples=[{"bucket": "mnist-training-models"}]
    )

    @property
    def place(self) -> Location:
        """Where: the same name for data and results."""
        return self.target


Reference: TypeAlias = DataReference | ResultsReference


# --- the optional sections ------------------------------------------------------------------


class Schedule(Section):
    """When the training runs by itself."""

    cron: Text | None = Field(
        default=None, description="Cron expression or preset.", examples=["0 3 * * 0"]
    )
    timetable: Text | None = Field(
        default=None,
        description="Class path of a timetable that a plugin of the site registers; instead of "
        "cron.",
        examples=["site_calendar.AfterWorkday"],
    )
    timezone: Text | None = Field(
        default=None,
        description="Time zone of cron and start; UTC by default.",
        examples=["Europe/Berlin"],
    )
    start: Moment | None = Field(
        default=None,
        description="Nothing is due before it; a date, or date and time.",
        examples=["2026-01-31"],
    )
    catchup: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False,
        description="Whether every time since start is made up for, not only the last one.",
        examples=[True],
    )
    on_data_change: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False,
        description="Whether it runs when the training data has changed.",
        examples=[True],
    )
    assets: tuple[Text, ...] = Field(
        default=(),
        description="URIs or names of assets of other DAGs; it runs once all of them were updated.",
        examples=[["s3://mnist-training-models/mnist-keras"]],
    )
    max_active_runs: Whole = Field(
        default=1,
        ge=1,
        le=16,
        description="Runs at the same time; what is due meanwhile waits.",
        examples=[1],
    )


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


class Metric(Section):
    """A number to be read from the output of rank 0."""

    name: Text = Field(
        description="Name of the metric; step, steps and epoch set the progress itself.",
        examples=["loss"],
    )
    regex: Annotated[str, Field(min_length=1)] = Field(
        description="Searched in each line; its one group is the number.",
        examples=["Loss= ([0-9.]+)"],
    )


class Transform(Section):
    """How the checkpoint becomes a SavedModel."""

    checkpoint: Checkpoint = Field(
        default="latest", description="Checkpoint to export: latest, or a step.", examples=[1000]
    )
    inputs: Mapping[str, Text] = Field(
        default={}, description="Name in the signature -> tensor.", examples=[{"images": "x:0"}]
    )
    outputs: Mapping[str, Text] = Field(
        default={}, description="Name in the signature -> tensor.", examples=[{"scores": "y:0"}]
    )
    sample: Text | None = Field(
        default=None,
        description="File in DATA_DIR or RESULT_DIR for the prediction that checks the model.",
        examples=["t10k-images-idx3-ubyte.gz"],
    )


class Evaluation(Section):
    """What a model must be worth to be published."""

    metric: Text = Field(
        description="Name of the number that decides: accuracy of the reloaded model, a metric of "
        "the training, or one that the command writes.",
        examples=["accuracy"],
    )
    minimum: Annotated[float, BeforeValidator(number)] | None = Field(
        default=None, description="Below it nothing is published.", examples=[0.95]
    )
    maximum: Annotated[float, BeforeValidator(number)] | None = Field(
        default=None, description="Above it nothing is published.", examples=[0.2]
    )
    not_worse_than_production: Annotated[bool, BeforeValidator(truth)] = Field(
        default=False,
        description="Whether it must be as good as that of the model in production.",
        examples=[True],
    )
    command: Text | None = Field(
        default=None,
        description="Runs once, and writes a JSON object of numbers to $EVALUATION.",
        examples=["python evaluate.py"],
    )


class Approval(Section):
    """Whether a person decides over publishing."""

    required: Annotated[bool, BeforeValidator(truth)] = Field(
        default=True, description="Whether the run waits for a person.", examples=[True]
    )


class Notification(Section):
    """One message, by a notifier that a provider of this Airflow brings."""

    notifier: Text = Field(
        default=SMTP_NOTIFIER,
        description="Its class path; mail by default. `airflow providers notifications` lists all.",
        examples=["airflow.providers.smtp.notifications.smtp.SmtpNotifier"],
    )
    arguments: Mapping[str, Argument] = Field(
        default={},
        description="What it is made with; secrets belong into the connection that it uses.",
        examples=[{"to": ["ml@example.com"], "smtp_conn_id": "mail"}],
    )


NotificationOrShort = Annotated[Notification, BeforeValidator(_notification)]


class Notifications(Section):
    """Who hears of a run, by Airflow's notifiers. An address alone is a mail to it."""

    on_failure: tuple[NotificationOrShort, ...] = Field(
        default=(),
        description="When a task has failed and is not tried again.",
        examples=[["ml@example.com"]],
    )
    on_success: tuple[NotificationOrShort, ...] = Field(
        default=(),
        description="When a model was published.",
        examples=[["ml@example.com"]],
    )
    on_approval: tuple[NotificationOrShort, ...] = Field(
        default=(),
        description="When the run waits for a person.",
        examples=[["ml@example.com"]],
    )


class Parameter(Section):
    """A value that a run may change: in the trigger form, in the command, in the environment.

    Whatever is given for a run has the type of the default.
    """

    default: Value = Field(description="Without another word this is it.", examples=[0.001])
    description: AnyText = Field(
        default="", description="Shown in the trigger form.", examples=["Of the optimizer"]
    )
    minimum: Value | None = Field(
        default=None, description="Least number, itself allowed.", examples=[0]
    )
    maximum: Value | None = Field(
        default=None, description="Largest number, itself allowed.", examples=[1]
    )
    choices: tuple[Value, ...] = Field(
        default=(), description="The only values there are.", examples=[["adam", "sgd"]]
    )

    @property
    def type(self) -> str:
        """``boolean``, ``integer``, ``number`` or ``string``, as JSON Schema has them.

        A whole default is a number if a bound or a choice is none.
        """
        given = [self.default, *self.choices, self.minimum, self.maximum]
        if isinstance(self.default, int) and any(isinstance(one, float) for one in given):
            return "boolean" if isinstance(self.default, bool) else "number"
        return TYPES[type(self.default)]


# Names in the trigger form that are ours.
RUN_SETTINGS = ("nodes", "launcher", "checkpoint", "attempts", "experiment_id", "dry_run")
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


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
    schedule: Annotated[Schedule, BeforeValidator(_schedule)] | None = Field(
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
    launcher: Launcher = Field(
        default=Launcher(), description="How the ranks start.", examples=[{"kind": "local"}]
    )
    distribution: Literal["mpi", "parameter_server"] = Field(
        default="mpi",
        description="How the ranks work together: by MPI, or as a TF_CONFIG cluster of a master, "
        "workers and parameter servers.",
        examples=["parameter_server"],
    )
    experiment: Text | None = Field(
        default=None,
        description="EXPERIMENT_ID, and the folder of the experiment, which goes on where its last "
        "training stopped; by default each training is an experiment of its own.",
        examples=["digits-wide"],
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
        examples=[{"required": True}],
    )
    notifications: Notifications = Field(
        default=Notifications(),
        description="Who hears of a run.",
        examples=[{"on_failure": ["ml@example.com"]}],
    )
    parameters: Mapping[str, Annotated[Parameter, BeforeValidator(_parameter)]] = Field(
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
    _compute: Compute = PrivateAttr(default=Compute("", 0, gpu=False))

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
    def digest(self) -> str:
        """SHA-256, in hex, of all that decides the training.

        Key order, comments, spelled-out defaults, the file's name, the keys to the stores, when it
        runs and who hears of it do not change it.
        """
        keys: Any = {"connection": set(SECRET_FIELDS)}
        content = self.model_dump(
            mode="json",
            exclude_none=True,
            exclude={
                "training_data_reference": keys,
                "training_results_reference": keys,
                "schedule": True,
                "notifications": True,
            },
        )
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


# --- what names and commands mean -----------------------------------------------------------


def slug(name: str) -> str:
    """Returns the name with what is outside A-Z a-z 0-9 _ . - as one ``-``; may be empty.

    It never starts or ends with a dot or a dash: it names a folder, and ``..`` is no name.
    """
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")


def split_commands(text: str) -> tuple[str, ...]:
    """Returns the commands in a text; ``;`` and line ends outside quotes separate them.

    Quotes and backslashes mean what they mean in a POSIX shell.

    Raises:
        ValueError: quotes that do not close, or a backslash at the end.
    """
    pieces, quote, escaped = [""], "", False
    for char in text.replace("\\\n", " "):
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in ";\n":
            pieces.append("")
            continue
        pieces[-1] += char
    if quote or escaped:
        raise ValueError("ends in a backslash" if escaped else f"has a {quote} that never closes")
    return tuple(piece.strip() for piece in pieces if piece.strip())
