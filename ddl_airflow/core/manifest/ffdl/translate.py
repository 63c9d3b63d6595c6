"""What an FfDL manifest is in our dialect."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ddl_airflow.core.compute import Compute
from ddl_airflow.core.manifest.document import child
from ddl_airflow.core.manifest.ffdl.model import (
    CONNECTION,
    DEFAULT_RESULTS,
    IMAGE,
    PROGRESS,
    Container,
    DataStore,
    EvaluationMetrics,
    FfdlFramework,
)
from ddl_airflow.core.manifest.ffdl.rules import group_findings, has_commands, in_one_line
from ddl_airflow.core.manifest.rule import Finding


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
            re.sub(r"\b[a-z_]+\b", lambda word: CONNECTION.get(word[0], word[0]), text)
            for text in finding[1:]
        )
        return Finding(self.original(finding.field), message, fix)


def translated(parts: Mapping[str, Any], table: Mapping[str, Compute]) -> Translation:
    """Returns an FfDL manifest in our dialect.

    Args:
        parts: the sound ones of FfdlManifest's fields, typed. What is missing stays missing.
        table: the site's kinds of node.
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
        name = "tensorflow" if framework.name == "horovod" else framework.name
        model["framework"] = {"name": name, "version": _version(framework)}
        model["execution"] = {"command": _command(framework.command)}
        names["model_definition.framework"] = "framework"
        for name in ("name", "version"):
            names[f"model_definition.framework.{name}"] = f"framework.{name}"
        names[f"{execution}.command"] = "framework.command"
    if "learners" in parts and "gpus" in parts:
        gpus: int = parts["gpus"]
        kind, slots = "gpu" if gpus else "cpu", max(gpus, 1)
        compute = {"name": kind, "nodes": parts["learners"]}
        model.setdefault("execution", {})["compute_configuration"] = compute
        names[f"{execution}.compute_configuration.name"] = "gpus"
        names[f"{execution}.compute_configuration.nodes"] = "learners"
        # A 1 that the table says anyway would only change the manifest's digest.
        if slots > 1 or (kind in table and table[kind].slots > 1):
            value["launcher"] = {"slots": slots}
            names["launcher.slots"] = "gpus"
    if "data_stores" in parts:
        store: DataStore = parts["data_stores"][0]
        for ours, theirs, place in (
            ("training_data_reference", "training_data", "source"),
            ("training_results_reference", "training_results", "target"),
        ):
            container = getattr(store, theirs) or Container(container=DEFAULT_RESULTS)
            value[ours] = _reference(store, container, place)
            names[ours] = "data_stores[0]"
            names[f"{ours}.name"] = "data_stores[0].id"
            names[f"{ours}.type"] = "data_stores[0].type"
            names[f"{ours}.connection"] = "data_stores[0].connection"
            for field, name in CONNECTION.items():
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
    if parts.get("distribution"):
        value["distribution"] = parts["distribution"]
    return Translation(value, names)


def _version(framework: FfdlFramework) -> str:
    """TensorFlow's. A tag of Horovod's images has it within: 0.13.10-tf1.9.0-torch0.4.0-py2.7."""
    if framework.name == "horovod":
        found = re.search(r"\btf(\d+(\.\d+)*)", framework.version)
        return found[1] if found else "2"
    return "2" if re.fullmatch(IMAGE, framework.version) else framework.version


def _command(text: str) -> str:
    """Returns one command: FfDL had bash read the whole text on each learner."""
    line = in_one_line(text)
    return f"bash -c {shlex.quote(line)}" if has_commands(text) > 1 else line


def _reference(store: DataStore, container: Container, place: str) -> dict[str, Any]:
    connection = store.connection
    if store.type == "mount_volume":
        path = f"{(connection.path or '').rstrip('/')}/{container.container}"
        return {"name": store.id, "type": "fs", place: {"path": path}}
    given = {ours: getattr(connection, theirs) for ours, theirs in CONNECTION.items()}
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
        if any(group_findings(around, group)):
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
            progress = PROGRESS.get(name)
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
