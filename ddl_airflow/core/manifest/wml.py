"""Watson Machine Learning's documents: its manifests of 2017, and what is no manifest.

Sources: its documentation of November 2017, "Create a training run", and of February 2018,
"Create a Training definition" and "Working with experiments".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ddl_airflow.core.manifest.document import Document, Lines
from ddl_airflow.core.manifest.rule import Finding

# Fields of today, what they were called before, and the place in them.
_REFERENCES = (
    ("training_data_reference", "training_data", "source"),
    ("training_results_reference", "training_results", "target"),
)
_REFERENCES_OF_NOW = "training_data_reference and training_results_reference"


def other_document(value: Mapping[str, Any]) -> Finding | None:
    """What to say of a document of Watson Machine Learning's that trains nothing by itself."""
    if "training_references" in value:
        return Finding(
            "training_references",
            "is of an experiment of Watson Machine Learning, which starts trainings that it stores",
            "Write a manifest for each, with model_definition: as its training definition and "
            f"command say, {_REFERENCES_OF_NOW}. Its hyper-parameters become parameters:, and its "
            "name experiment:.",
        )
    # A manifest of FfDL has a framework too, and may have its command in the wrong place.
    others = {"model_definition", "data_stores", "learners", "gpus"}
    if {"framework", "command"} <= value.keys() and others.isdisjoint(value):
        return Finding(
            "command",
            "is of a training definition of Watson Machine Learning, which says not where it runs",
            "Write name and framework below model_definition:, command below its execution: with "
            f"compute_configuration:, and {_REFERENCES_OF_NOW} beside.",
        )
    return None


def in_swift(value: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields each place in Bluemix's Swift: what else is wrong at that place comes from that."""
    for name, _, place in _REFERENCES:
        reference = value.get(name)
        if isinstance(reference, dict) and reference.get("type") == "bluemix_objectstore":
            move = "Copy the data into an S3 bucket" if place == "source" else "Name an S3 bucket"
            fix = f"{move}, and write type: s3 with its connection."
            yield Finding(f"{name}.type", "is bluemix_objectstore, Swift that is gone", fix)


def as_of_now(document: Document) -> Document:
    """A manifest of 2017 with the fields of 2018, on their lines; another one as it is.

    Then data and results had shorter names and a store's type within, data was a list of one, and
    `resource: small` was what became compute_configuration.
    """
    value, lines = dict(document.value), dict(document.lines)
    for name, before, place in _REFERENCES:
        if before in value and name not in value:
            value[name] = value.pop(before)
            _move(lines, before, name)
        if isinstance(value.get(name), list) and len(value[name]) == 1:
            value[name] = value[name][0]
            _move(lines, f"{name}[0]", name)
        reference = value.get(name)
        if not isinstance(reference, dict) or "type" in reference:
            continue
        within = reference.get(place)
        if isinstance(within, dict) and "type" in within:
            rest = {field: one for field, one in within.items() if field != "type"}
            value[name] = {**reference, place: rest, "type": within["type"]}
            _move(lines, f"{name}.{place}.type", f"{name}.type")
    definition = value.get("model_definition")
    if isinstance(definition, dict) and isinstance(definition.get("execution"), dict):
        execution = dict(definition["execution"])
        if "resource" in execution and "compute_configuration" not in execution:
            execution["compute_configuration"] = {"name": execution.pop("resource")}
            value["model_definition"] = {**definition, "execution": execution}
            at = "model_definition.execution"
            _move(lines, f"{at}.resource", f"{at}.compute_configuration")
    return Document(value, Lines(lines), document.issues)


def _move(lines: dict[str, int], before: str, name: str) -> None:
    """Has the lines of a field, and of all below it, under another name as well."""
    for path, line in list(lines.items()):
        if path == before or path.startswith((f"{before}.", f"{before}[")):
            lines[name + path.removeprefix(before)] = line
