"""The manifest as a JSON Schema, for editors: completion, descriptions, and errors while typing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from ddl_airflow.core.manifest.ffdl import FFDL_FIELDS, OUR_FIELDS
from ddl_airflow.core.manifest.ffdl.model import FfdlManifest
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.sections.launchers import offered_kinds, own_kinds
from ddl_airflow.core.manifest.sections.places import OF_AWS
from ddl_airflow.core.manifest.sections.stores import store_kinds

# Editors know this one best.
_DIALECT = "http://json-schema.org/draft-07/schema#"
# `version: 2.10` is text to us; to a JSON Schema it is what YAML makes of it.
_ANY_SCALAR = ["string", "number", "boolean"]


def _within(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: schema}, "required": [name]}


# What Watson Machine Learning's manifests had then: ddl_airflow.core.manifest.wml.
_OF_2017: dict[str, Any] = {
    **_within("model_definition", {"type": "object"}),
    "anyOf": [
        {"required": ["training_data"]},
        {"required": ["training_results"]},
        _within("training_data_reference", {"type": "array"}),
        _within("model_definition", _within("execution", _within("resource", {}))),
    ],
}


def json_schema() -> dict[str, Any]:
    """Returns the schema of both dialects, made from the models that manifests are read with.

    It cannot know what depends on several fields, such as whether a bucket is needed: a manifest
    that it accepts may still be wrong, and ``ddl-airflow validate`` says so.
    """
    launchers = {name: own_kinds()[name] for name in offered_kinds()}
    roots: list[type[BaseModel]] = [Manifest, FfdlManifest, *launchers.values()]
    _, schema = models_json_schema(
        [(root, "validation") for root in roots], title="ddl-airflow manifest"
    )
    sections = _plain(schema["$defs"])
    for name, place in (("DataReference", "source"), ("ResultsReference", "target")):
        sections[name]["allOf"] = list(_what_each_type_needs(place))
    fields = sections["Manifest"]["properties"]
    # What may be written short.
    fields["schedule"]["anyOf"].append({"type": "string"})
    fields["experiment"]["anyOf"].append({"type": _ANY_SCALAR, "minLength": 1})
    _as_of_then(sections)
    for event in sections["Notifications"]["properties"].values():
        event["items"] = {"anyOf": [event["items"], {"type": "string"}]}
    whole = fields["parameters"]["additionalProperties"]
    fields["parameters"]["additionalProperties"] = {"anyOf": [whole, {"type": _ANY_SCALAR}]}
    for section in (sections[kind.__name__] for kind in launchers.values()):
        where = "; ".join(f"{name}: {kind.runs_on}" for name, kind in launchers.items())
        section["properties"]["kind"]["description"] = f"{where}."
    del sections["Launcher"], fields["launcher"]["$ref"]
    fields["launcher"] |= _launcher_by_kind(launchers)
    return {
        "$schema": _DIALECT,
        "title": schema["title"],
        "if": {"allOf": [_any_of(FFDL_FIELDS), {"not": _any_of(OUR_FIELDS)}]},
        "then": {"$ref": "#/$defs/FfdlManifest"},
        # Of those of 2017, which `ddl-airflow convert` brings up to date, editors are told nothing.
        "else": {"if": _OF_2017, "else": {"$ref": "#/$defs/Manifest"}},
        "$defs": sections,
    }


def _as_of_then(sections: dict[str, Any]) -> None:
    """Has what Watson Machine Learning's documents write otherwise, and is read."""
    keys = sections["Connection"]["properties"]
    keys |= {written: keys[own] for written, own in OF_AWS.items()}
    author = sections["ModelDefinition"]["properties"]["author"]
    author["anyOf"].append({"type": "string"})
    for one in sections["Author"]["properties"]["email"]["anyOf"]:
        one.pop("minLength", None)
    of_framework = sections["Framework"]["properties"]["runtimes"]
    one_of_them = {"type": "array", "minItems": 1, "maxItems": 1}
    of_framework["anyOf"].append(one_of_them | {"items": {"$ref": "#/$defs/Runtimes"}})


def _any_of(names: Iterable[str]) -> dict[str, Any]:
    return {"anyOf": [{"required": [name]} for name in sorted(names)]}


def _what_each_type_needs(place: str) -> Iterator[dict[str, Any]]:
    for name, kind in store_kinds().items():
        needs: dict[str, Any] = {"properties": {place: {"required": list(kind.required)}}}
        if kind.needs_connection:
            needs["required"] = ["connection"]
        if kind.needs_connection and not kind.has_keys:
            needs["properties"]["connection"] = {"required": ["conn_id"]}
        is_it = {"properties": {"type": {"const": name}}, "required": ["type"]}
        yield {"if": is_it, "then": needs}


def _launcher_by_kind(kinds: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Each kind has its own section; of a kind that a site has brought nothing is known here."""
    kind_of_site = {"properties": {"kind": {"type": _ANY_SCALAR, "minLength": 1}}}
    chosen: dict[str, Any] = {"type": "object", **kind_of_site}
    for name, kind in kinds.items():
        is_it: dict[str, Any] = {"properties": {"kind": {"const": name}}}
        if name != Manifest.model_fields["launcher"].default.kind:
            is_it["required"] = ["kind"]
        chosen = {"if": is_it, "then": {"$ref": f"#/$defs/{kind.__name__}"}, "else": chosen}
    return chosen


def _plain(value: Any) -> Any:
    """Returns the schema without what no editor shows, and with any scalar where text is meant."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {
        # Below "properties" are names of fields, which may be those of a schema.
        name: {field: _plain(one) for field, one in item.items()}
        if name in ("properties", "$defs")
        else _plain(item)
        for name, item in value.items()
        if not (name == "title" and isinstance(item, str))
        and not (name == "default" and ("pattern" in value or not isinstance(item, (str, int))))
    }
    if kept.get("type") == "string" and not {"enum", "const", "pattern"} & set(kept):
        kept["type"] = _ANY_SCALAR
    return kept
