"""What we publish, held to the schemas that we publish for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from ddl_airflow.lineage.record import facets_schema, lineage_schema


def check_lineage_schema(record: Mapping[str, Any], part: str = "") -> None:
    """Of a record, or of a part of one. Raises jsonschema's ValidationError, or SchemaError of the
    schema itself.
    """
    schema = lineage_schema()
    Draft202012Validator.check_schema(schema)
    if part:
        schema = schema["properties"][part]
    formats = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(schema, format_checker=formats).validate(record)


def _facets(event: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for place in (event["run"], event["job"], *event.get("inputs", ()), *event.get("outputs", ())):
        for group in ("facets", "inputFacets", "outputFacets"):
            yield from place.get(group, {}).items()


def _classes() -> dict[str, Any]:
    from openlineage.client import facet_v2  # of an extra

    modules = [one for one in vars(facet_v2).values() if hasattr(one, "__file__")]
    found = {}
    for one in (kind for module in modules for kind in vars(module).values()):
        if isinstance(one, type) and attrs.has(one) and hasattr(one, "_get_schema"):
            found[one._get_schema()] = one
    return found


def check_events(events: Sequence[Mapping[str, Any]]) -> None:
    """Holds events of OpenLineage to the official schemas, and what is ours in them to ours.

    Each facet has the fields of its class in OpenLineage's client, which is made of its schema.
    With TESTS_OPENLINEAGE, the folder ``spec`` of OpenLineage's sources, all is held to those.
    """
    classes, ours = _classes(), facets_schema()
    for event in events:
        for name, facet in _facets(event):
            place = facet["_schemaURL"]
            if name.startswith("ddl_"):
                definition = ours["$defs"][place.rpartition("/")[2]]["allOf"][1]
                Draft202012Validator(definition).validate(facet)
                assert set(facet) - {"_producer", "_schemaURL"} <= set(definition["properties"])
            elif "/facets/" in place:
                fields = {one.name: one for one in attrs.fields(classes[place])}
                needed = {n for n, one in fields.items() if one.default is attrs.NOTHING}
                assert needed <= set(facet) <= set(fields), (name, facet)
    if folder := os.environ.get("TESTS_OPENLINEAGE"):
        _check_officially(Path(folder), events)


def _check_officially(folder: Path, events: Sequence[Mapping[str, Any]]) -> None:
    schemas = [json.loads(path.read_text()) for path in folder.rglob("*.json")] + [facets_schema()]
    known = Registry().with_resources(
        [(one["$id"], Resource.from_contents(one)) for one in schemas if "$id" in one]
    )
    ids = {one["$id"] for one in schemas if "$id" in one}
    formats = Draft202012Validator.FORMAT_CHECKER
    checked = set()
    for event in events:
        parts = [({"$ref": event["schemaURL"]}, event)]
        for _, facet in _facets(event):
            if facet["_schemaURL"].partition("#")[0] in ids:
                parts.append(({"$ref": facet["_schemaURL"]}, facet))
        for schema, part in parts:
            Draft202012Validator(schema, registry=known, format_checker=formats).validate(part)
            checked.add(schema["$ref"].rpartition("/")[2])
    assert {"RunEvent"} <= checked
    print(f"\nofficially valid: {len(events)} events; {', '.join(sorted(checked))}")
