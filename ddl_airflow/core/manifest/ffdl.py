"""Fabric for Deep Learning's manifests: what they may say, and what that is in our dialect.

Each field that FfDL reads is mapped, refused with the reason, or set aside with a warning; none is
passed over. ``docs/coming-from-ffdl.md`` is the table. Source: github.com/IBM/FfDL, the user guide
and the fields that its REST API reads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from ddl_airflow.core.manifest.document import Plain, child
from ddl_airflow.core.manifest.model import AnyText, Secret, Section, Text, Whole, split_commands
from ddl_airflow.core.manifest.rules import Finding, Findings, Rule, registering

OBJECT_STORES = ("mount_cos", "s3_datastore")
SECRET_FIELDS = ("user_name", "password")
OUR_FIELDS = {"model_definition", "training_data_reference", "training_results_reference"}
FFDL_FIELDS = {"data_stores", "framework", "learners", "gpus"}
# What an object store's connection is called: ours, FfDL's.
_CONNECTION = {
    "conn_id": "conn_id",
    "endpoint_url": "auth_url",
    "access_key_id": "user_name",
    "secret_access_key": "password",
    "region_name": "region",
}
_SWIFT = ("domain_name", "project_id")
_HOST_MOUNT = ("name", "path")
# A point on FfDL's time axes -> the metric that sets our progress.
_PROGRESS = {"iteration": "step", "step": "step", "epoch": "epoch"}


def _number(value: Any) -> Any:
    if isinstance(value, Plain) and re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
        return float(value)
    raise ValueError("is not a number")


def _size(text: str) -> str:
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?\s*([kmgt](i?b?)?)?", text, re.IGNORECASE):
        return text
    raise ValueError("is not an amount of memory")


Number = Annotated[float, BeforeValidator(_number)]
Size = Annotated[Text, AfterValidator(_size)]


# --- what may be written --------------------------------------------------------------------


class Container(Section):
    """A bucket, or a folder of the mounted volume."""

    container: Text = Field(description="Bucket, or folder.", examples=["mnist-training-data"])


class StoreConnection(Section):
    """Access to a data store; which fields, its type decides."""

    type: Literal["mount_cos", "s3_datastore", "host_mount"] | None = Field(
        default=None, description="The store's type again.", examples=["mount_cos"]
    )
    conn_id: Text | None = Field(
        default=None,
        description="Our addition: an Airflow connection; nothing else then.",
        examples=["my_s3"],
    )
    auth_url: Text | None = Field(
        default=None, description="Address of the store.", examples=["https://s3.example.com"]
    )
    user_name: Secret | None = Field(
        default=None, description="Access key.", examples=["${S3_ACCESS_KEY_ID}"]
    )
    password: Secret | None = Field(
        default=None, description="Secret key.", examples=["${S3_SECRET_ACCESS_KEY}"]
    )
    region: Text | None = Field(default=None, description="Region.", examples=["eu-de"])
    domain_name: Text | None = Field(default=None, description="Swift's.", examples=["1234"])
    project_id: Text | None = Field(default=None, description="Swift's.", examples=["1234"])
    name: Text | None = Field(default=None, description="The volume's.", examples=["host-mount"])
    path: Text | None = Field(
        default=None, description="Folder of the host, for mount_volume.", examples=["/srv/data"]
    )


class DataStore(Section):
    """Where data comes from and results go."""

    id: AnyText = Field(default="", description="A name for it.", examples=["my-store"])
    type: Literal["mount_cos", "s3_datastore", "mount_volume", "swift_datastore"] = Field(
        description="Kind of store.", examples=["mount_cos"]
    )
    training_data: Container = Field(
        description="Where the data is.", examples=[{"container": "mnist-training-data"}]
    )
    training_results: Container = Field(
        description="Where the results go.", examples=[{"container": "mnist-training-models"}]
    )
    connection: StoreConnection = Field(
        description="Access to it.",
        examples=[
            {
                "auth_url": "https://s3.example.com",
                "user_name": "${S3_ACCESS_KEY_ID}",
                "password": "${S3_SECRET_ACCESS_KEY}",
            }
        ],
    )


class FfdlFramework(Section):
    """What runs."""

    name: Text = Field(description="Framework.", examples=["tensorflow"])
    version: Text = Field(description="Its version.", examples=["2.21"])
    image_tag: Text | None = Field(default=None, description="Image.", examples=["latest"])
    command: Text = Field(
        description="Runs on every learner.", examples=["python train.py --data ${DATA_DIR}"]
    )


class Value(Section):
    """A typed value: a constant, or ``$name`` of a group of the regex."""

    type: Literal["INT", "FLOAT", "STRING", "JSONSTRING"] | None = Field(
        default=None, description="Type.", examples=["FLOAT"]
    )
    value: Text = Field(description="Named group of the regex.", examples=["$loss"])


class Meta(Section):
    """Time and sub-series of a value."""

    time: Text | None = Field(default=None, description="Time.", examples=["$timestamp"])
    subid: Text | None = Field(default=None, description="Sub-series.", examples=["train"])


class Group(Section):
    """A regex and the values in its match."""

    regex: Text = Field(
        description="Matched from the start of a line.", examples=["loss=(?P<loss>[0-9.]+)"]
    )
    meta: Meta | None = Field(default=None, description="Time.", examples=[{"time": "$time"}])
    scalars: Mapping[str, Value] = Field(
        default={}, description="Metrics.", examples=[{"loss": {"type": "FLOAT", "value": "$l"}}]
    )
    etimes: Mapping[str, Value] = Field(
        default={}, description="Time axes.", examples=[{"iteration": {"value": "$step"}}]
    )


class EvaluationMetrics(Section):
    """Where numbers about the training come from."""

    type: Literal["regex_extractor", "regex", "tensorboard", "emetrics_file"] = Field(
        description="Kind of extractor.", examples=["regex_extractor"]
    )
    image_tag: Text | None = Field(default=None, description="Its image.", examples=["latest"])
    in_: Text | None = Field(
        default=None, alias="in", description="File or folder read.", examples=["$LOG_DIR"]
    )
    line_lookahead: Whole | None = Field(
        default=None, ge=1, description="Lines matched at once.", examples=[1]
    )
    eventTypes: tuple[Text, ...] = Field(
        default=(), description="TensorBoard events.", examples=[["scalars"]]
    )
    groups: Mapping[str, Group] = Field(
        default={}, description="By name.", examples=[{"train": {"regex": "(?P<loss>[0-9.]+)"}}]
    )


class FfdlManifest(Section):
    """One training, as FfDL takes it."""

    name: Text = Field(description="Name of the model.", examples=["tf-mnist"])
    description: AnyText = Field(default="", description="For people.", examples=["Digits"])
    version: Text | None = Field(default=None, description="Not used.", examples=["1.0"])
    learners: Whole = Field(default=1, ge=1, le=4096, description="Nodes.", examples=[2])
    gpus: Whole = Field(default=0, ge=0, le=4096, description="GPUs per learner.", examples=[1])
    cpus: Number | None = Field(default=None, description="CPUs per learner.", examples=[4])
    memory: Size | None = Field(default=None, description="Per learner.", examples=["8Gb"])
    storage: Size | None = Field(default=None, description="Per learner.", examples=["20Gb"])
    data_stores: tuple[DataStore, ...] = Field(
        min_length=1,
        description="Where data comes from and results go; one.",
        examples=[[{"id": "my-store", "type": "mount_cos"}]],
    )
    framework: FfdlFramework = Field(
        description="What runs.",
        examples=[{"name": "tensorflow", "version": "2.21", "command": "python train.py"}],
    )
    evaluation_metrics: EvaluationMetrics | None = Field(
        default=None, description="Metrics.", examples=[{"type": "tensorboard"}]
    )


def is_ffdl(value: Mapping[str, Any]) -> bool:
    """Returns whether the fields of a document are FfDL's, and not those of our dialect."""
    return OUR_FIELDS.isdisjoint(value) and not FFDL_FIELDS.isdisjoint(value)


# --- what is refused or set aside -----------------------------------------------------------

RULES: list[Rule] = []
_rule = registering(RULES)

_ELSEWHERE = {
    "horovod": "Average with `import ddl`, one line, and write name: tensorflow.",
    "custom": "Install what the image has beside TensorFlow, and write name: tensorflow.",
}


@_rule("framework.name")
def framework_is_tensorflow(at: str, name: str) -> Findings:
    if name not in ("tensorflow", "tensorflow-ddl"):
        fix = _ELSEWHERE.get(name, "Write name: tensorflow, with a script for it.")
        yield Finding(at, f"is {name[:40]!r}, and what trains here is TensorFlow", fix)


@_rule("framework.command")
def command_is_one(at: str, command: str) -> Findings:
    try:
        count = len(split_commands(command))
    except ValueError:
        return  # a rule of our dialect says so
    if count > 1:
        yield Finding(
            at,
            f"has {count} commands; FfDL runs all on each learner, and here only the first would",
            "Join them with &&.",
        )


@_rule("data_stores")
def one_store(at: str, stores: tuple[DataStore, ...]) -> Findings:
    for i in range(1, len(stores)):
        fix = "Delete it; if it is the one for the results, use training_results_reference."
        yield Finding(child(at, i), "is one store too many; FfDL, too, reads only the first", fix)


@_rule("data_stores")
def store_is_reachable(at: str, stores: tuple[DataStore, ...]) -> Findings:
    store, at = stores[0], child(at, 0)
    given = {name for name, value in store.connection if value is not None} - {"type"}
    kind, connection = store.connection.type, f"{at}.connection"
    if store.type == "swift_datastore":
        fix = "Copy the data into an S3 bucket, and use type: mount_cos."
        yield Finding(f"{at}.type", "is swift_datastore, and Swift cannot be reached", fix)
        return
    if store.type == "mount_volume":
        wrong, why = given - {*_HOST_MOUNT}, "is not for type mount_volume"
        kinds: tuple[str, ...] = ("host_mount",)
        if not (store.connection.path or "").startswith("/"):
            message = "is not absolute" if store.connection.path else "is missing"
            yield Finding(f"{connection}.path", message, "Write the host's folder: /srv/data.")
    else:
        wrong, why, kinds = (
            given - {*_CONNECTION.values()},
            "is not for object stores",
            OBJECT_STORES,
        )
    for name in sorted(wrong):
        reason = "is Swift's, which cannot be reached" if name in _SWIFT else why
        yield Finding(f"{connection}.{name}", reason, "Delete it.")
    if kind is not None and kind not in kinds:
        fix = "Delete it: the store's type decides."
        yield Finding(f"{connection}.type", f"is {kind}, but the store is {store.type}", fix)


@_rule("evaluation_metrics")
def metrics_can_be_read(at: str, metrics: EvaluationMetrics | None) -> Findings:
    if metrics is None or metrics.type not in ("regex_extractor", "regex"):
        return
    if not metrics.groups:
        yield Finding(f"{at}.groups", "is missing, a regex needs it", "Add groups, or delete all.")
    for name, group in metrics.groups.items():
        yield from _group_findings(f"{child(f'{at}.groups', name)}", group)


def _group_findings(at: str, group: Group) -> Findings:
    where, regex = f"{at}.regex", group.regex
    if found := re.search(r"%\{\w+(:\w+)?\}", regex):
        fix = "Write the expression itself, such as (?P<loss>[0-9.]+)."
        yield Finding(where, f"uses FfDL's pattern {found[0][:40]}, which is not here", fix)
        return
    if "\n" in regex or re.search(r"(?<!\\)(\\\\)*\\n", regex):
        fix = "Match one line."
        yield Finding(where, "spans lines, and each line is searched alone", fix)
    if re.search(r"\(\?P=|\(\?\(|(?<!\\)(\\\\)*\\[1-9]", regex):
        yield Finding(where, "refers back to a group", "Write out what the group matches.")
    try:
        known = re.compile(regex).groupindex
    except (re.error, OverflowError, RecursionError) as error:
        yield Finding(where, f"is not a regular expression: {error}", "Escape ( [ { + * ? .")
        return
    for section, values in (("scalars", group.scalars), ("etimes", group.etimes)):
        for name, value in values.items():
            if section == "etimes" and name not in _PROGRESS:
                continue
            field = child(f"{at}.{section}", name)
            if value.type in ("STRING", "JSONSTRING"):
                yield Finding(f"{field}.type", f"is {value.type}, no number", "Delete the value.")
            elif not value.value.startswith("$"):
                yield Finding(f"{field}.value", "is a constant, nothing to read", "Delete it.")
            elif value.value[1:] not in known:
                fix = "Name a group of the regex, as in (?P<loss>[0-9.]+) and $loss."
                yield Finding(f"{field}.value", "names no group of the regex", fix)


@_rule("version", warning=True)
def version_is_unused(at: str, version: str | None) -> Findings:
    if version is not None:
        yield Finding(at, "is not used, nor was it by FfDL", "Delete it.")


@_rule("cpus", warning=True)
def cpus_are_not_reserved(at: str, cpus: float | None) -> Findings:
    if cpus is not None:
        fix = "Delete it; OMP_NUM_THREADS says otherwise where it has to."
        yield Finding(at, "is not reserved: the ranks of a host share its cores evenly", fix)


@_rule("memory", warning=True)
@_rule("storage", warning=True)
def sizes_are_not_reserved(at: str, size: str | None) -> Findings:
    if size is not None:
        yield Finding(at, "is not reserved: ranks take what their host has", "Delete it.")


@_rule("framework.image_tag", warning=True)
def image_is_not_started(at: str, tag: str | None) -> Findings:
    if tag is not None:
        fix = "Delete it; launcher.python of our dialect names another Python."
        yield Finding(at, "is not used: no container is started", fix)


@_rule("data_stores", warning=True)
def volume_name_is_unused(at: str, stores: tuple[DataStore, ...]) -> Findings:
    if stores[0].type == "mount_volume" and stores[0].connection.name is not None:
        field = f"{child(at, 0)}.connection.name"
        yield Finding(field, "is not used: the path says where the volume is", "Delete it.")


@_rule("evaluation_metrics", warning=True)
def metrics_are_read_from_the_output(at: str, metrics: EvaluationMetrics | None) -> Findings:
    if metrics is None:
        return
    output = "is not used: numbers are read from rank 0's output"
    delete = "Delete it."
    if metrics.type in ("tensorboard", "emetrics_file"):
        fix = "Print the numbers and use type: regex_extractor, or call ddl.report."
        yield Finding(f"{at}.type", f"is {metrics.type}, whose files are not read", fix)
    if metrics.image_tag is not None:
        yield Finding(f"{at}.image_tag", "is not used: no container is started", delete)
    if metrics.in_ is not None:
        yield Finding(f"{at}.in", output, delete)
    if metrics.line_lookahead is not None:
        message = "is not used: each line is searched alone"
        yield Finding(f"{at}.line_lookahead", message, delete)
    if metrics.eventTypes:
        yield Finding(f"{at}.eventTypes", output, delete)
    if metrics.type in ("tensorboard", "emetrics_file"):
        if metrics.groups:
            yield Finding(f"{at}.groups", f"is not for type {metrics.type}", delete)
        return
    given: set[str] = set()
    for name, group in metrics.groups.items():
        field = child(f"{at}.groups", name)
        if group.meta is not None:
            message = "is not used: a value has the time at which its line came"
            yield Finding(f"{field}.meta", message, delete)
        for axis in group.etimes:
            progress = _PROGRESS.get(axis)
            if progress is None:
                fix = f"Delete it; known: {', '.join(_PROGRESS)}."
                yield Finding(child(f"{field}.etimes", axis), "is no time axis here", fix)
            elif progress in given:
                message = f"is not used: {progress} is read in a group above"
                yield Finding(child(f"{field}.etimes", axis), message, delete)
            given.add(progress or "")


# --- what it is in our dialect --------------------------------------------------------------


class Translation(NamedTuple):
    """A manifest in our dialect.

    Attributes:
        value: its fields, as a document has them.
        names: dotted path of a field there -> FfDL's name of it.
    """

    value: dict[str, Any]
    names: dict[str, str]

    def original(self, path: str) -> str:
        """Returns FfDL's name for a field of ours, or for the nearest parent that has one."""
        around = path
        while around and around not in self.names:
            around = around[: max(around.rfind("."), around.rfind("["), 0)]
        return self.names.get(around, path)

    def finding(self, finding: Finding) -> Finding:
        """Returns what a rule of our dialect found, in FfDL's words."""
        message, fix = (
            re.sub(r"\b[a-z_]+\b", lambda word: _CONNECTION.get(word[0], word[0]), text)
            for text in finding[1:]
        )
        return Finding(self.original(finding.field), message, fix)


def translated(parts: Mapping[str, Any]) -> Translation:
    """Returns an FfDL manifest in our dialect.

    Args:
        parts: the sound ones of FfdlManifest's fields, typed. What is missing stays missing.
    """
    names: dict[str, str] = {}
    model: dict[str, Any] = {}
    value: dict[str, Any] = {"model_definition": model}
    for name in ("name", "description"):
        if name in parts:
            model[name] = parts[name]
            names[f"model_definition.{name}"] = name
    execution = "model_definition.execution"
    if "framework" in parts:
        framework: FfdlFramework = parts["framework"]
        model["framework"] = {"name": framework.name, "version": framework.version}
        model["execution"] = {"command": framework.command}
        names["model_definition.framework"] = "framework"
        for name in ("name", "version"):
            names[f"model_definition.framework.{name}"] = f"framework.{name}"
        names[f"{execution}.command"] = "framework.command"
    if "learners" in parts and "gpus" in parts:
        gpus: int = parts["gpus"]
        compute = {"name": "gpu" if gpus else "cpu", "nodes": parts["learners"]}
        model.setdefault("execution", {})["compute_configuration"] = compute
        names[f"{execution}.compute_configuration.name"] = "gpus"
        names[f"{execution}.compute_configuration.nodes"] = "learners"
        if gpus > 1:
            value["launcher"] = {"slots": gpus}
            names["launcher.slots"] = "gpus"
    if "data_stores" in parts:
        store: DataStore = parts["data_stores"][0]
        for ours, theirs, place in (
            ("training_data_reference", "training_data", "source"),
            ("training_results_reference", "training_results", "target"),
        ):
            value[ours] = _reference(store, getattr(store, theirs), place)
            names[ours] = "data_stores[0]"
            names[f"{ours}.name"] = "data_stores[0].id"
            names[f"{ours}.type"] = "data_stores[0].type"
            names[f"{ours}.connection"] = "data_stores[0].connection"
            for field, name in _CONNECTION.items():
                names[f"{ours}.connection.{field}"] = f"data_stores[0].connection.{name}"
            names[f"{ours}.{place}"] = f"data_stores[0].{theirs}"
            for field in ("bucket", "path"):
                names[f"{ours}.{place}.{field}"] = f"data_stores[0].{theirs}.container"
    metrics: EvaluationMetrics | None = parts.get("evaluation_metrics")
    if metrics is not None and metrics.type in ("regex_extractor", "regex"):
        value["metrics"] = []
        for i, (metric, group, field) in enumerate(_metrics(metrics)):
            value["metrics"].append(metric)
            names[f"metrics[{i}]"] = names[f"metrics[{i}].name"] = field
            names[f"metrics[{i}].regex"] = f"{group}.regex"
    return Translation(value, names)


def _reference(store: DataStore, container: Container, place: str) -> dict[str, Any]:
    connection = store.connection
    if store.type == "mount_volume":
        path = f"{(connection.path or '').rstrip('/')}/{container.container}"
        return {"name": store.id, "type": "fs", place: {"path": path}}
    given = {ours: getattr(connection, theirs) for ours, theirs in _CONNECTION.items()}
    return {
        "name": store.id,
        "type": "s3",
        "connection": {name: value for name, value in given.items() if value is not None},
        place: {"bucket": container.container},
    }


def _metrics(metrics: EvaluationMetrics) -> Iterator[tuple[dict[str, str], str, str]]:
    """Yields each metric, and FfDL's names of the group and of the value that it reads."""
    uses = Counter(name for group in metrics.groups.values() for name in group.scalars)
    taken = {name for name, number in uses.items() if number == 1}
    for label, group in metrics.groups.items():
        around = child("evaluation_metrics.groups", label)
        if any(_group_findings(around, group)):
            continue
        for name, one in group.scalars.items():
            title = f"{label}_{name}" if uses[name] > 1 else name
            while uses[name] > 1 and title in taken:
                title += "_"
            taken.add(title)
            yield (
                {"name": title, "regex": _one_group(group.regex, one.value[1:])},
                around,
                child(f"{around}.scalars", name),
            )
        for name, one in group.etimes.items():
            progress = _PROGRESS.get(name)
            if progress and progress not in taken:
                taken.add(progress)
                yield (
                    {"name": progress, "regex": _one_group(group.regex, one.value[1:])},
                    around,
                    child(f"{around}.etimes", name),
                )


_REGEX_PIECE = re.compile(
    r"""\\. | \[\^?\]?(?:\\.|[^\]\\])*\] | \(\?P<(?P<name>\w+)> | \(\?. | (?P<plain>\() | .""",
    re.VERBOSE | re.DOTALL,
)


def _one_group(regex: str, name: str) -> str:
    """Returns the regex with the named group as its only one, from the start of the line."""

    def piece(match: re.Match[str]) -> str:
        if match["name"]:
            return "(" if match["name"] == name else "(?:"
        return "(?:" if match["plain"] else match[0]

    text = _REGEX_PIECE.sub(piece, regex)
    start = re.search(r"^(?:\(\?[aiLmsux]+\))*", text)
    flags = start[0] if start else ""  # they must come first
    return f"{flags}^(?:{text[len(flags) :]})"
