"""Text -> Manifest, or ManifestError with everything that is wrong, line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path, PurePath
from typing import Annotated, Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from ddl_airflow.core.errors import ManifestInvalid, ManifestIssue, ManifestSyntaxError
from ddl_airflow.core.manifest.document import (
    MAX_BYTES,
    Document,
    Plain,
    child,
    decode,
    mask_fields,
    read_document,
)
from ddl_airflow.core.manifest.model import REFERENCE, SECRET_FIELDS, Manifest
from ddl_airflow.core.manifest.rules import RULES, Finding, nearest, suggestion


def load_manifest(path: Path, *, source: str | None = None) -> Manifest:
    """Returns the manifest in a file.

    Args:
        path: the file.
        source: how messages name the file; its path by default.

    Raises:
        ManifestSyntaxError: the file cannot be read, or is not YAML.
        ManifestInvalid: fields are unknown, missing or wrong.
    """
    source = str(path) if source is None else source
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        issue = ManifestIssue(
            0, "", f"cannot be read: {error.strerror}", "Check the name and the rights of the file."
        )
        raise ManifestSyntaxError(source, [issue]) from error
    manifest = load_manifest_text(text, source)
    manifest._folder = path.absolute().parent
    return manifest


def load_manifest_text(text: str | bytes, source: str) -> Manifest:
    """Returns the manifest in a text.

    Args:
        text: YAML; bytes are UTF-8.
        source: how messages name the text.

    Raises:
        ManifestSyntaxError: not YAML.
        ManifestInvalid: fields are unknown, missing or wrong.
    """
    document = read_document(decode(text, source), source)
    issues, warnings = list(document.issues), list[ManifestIssue]()
    manifest: Manifest | None = None
    if isinstance(document.value, dict):
        try:
            manifest = Manifest.model_validate(document.value)
        except ValidationError as error:
            issues += _field_issues(error, document)
        for finding, warning in _findings(manifest, document.value):
            issue = ManifestIssue(document.lines.of(finding.field), *finding)
            (warnings if warning else issues).append(issue)
    else:
        fix = "Start with model_definition:, training_data_reference:, training_results_reference:."
        message = f"is {_shown(document.value, quote=False)}, wanted a mapping of fields"
        issues.append(ManifestIssue(document.lines.of(""), "", message, fix))
    if manifest is None or issues:
        raise ManifestInvalid(source, issues)
    manifest._source, manifest._lines = source, document.lines
    manifest._warnings = tuple(sorted(warnings))
    return manifest


def redacted_text(text: str) -> str:
    """Returns a manifest's text with ``***`` for every key that is written out, to be shown.

    Raises:
        ManifestSyntaxError: not YAML, so nobody knows where the keys are.
    """
    text = mask_fields(decode(text, "manifest"), "manifest", SECRET_FIELDS, keep=REFERENCE)
    # A field that was commented out is no longer YAML, but its value is no less secret.
    return re.sub(rf"(#.*?\b(?:{'|'.join(SECRET_FIELDS)})\W*?:).*", r"\1 '***'", text)


_SECTIONS = re.compile(
    r"^(model_definition|training_data_reference|training_results_reference):", re.MULTILINE
)
_FILE_NAME = re.compile(r"(manifest.*|.*\.manifest)\.ya?ml")


def looks_like_manifest(path_name: str, text: str) -> bool:
    """Returns whether a YAML file is meant as a manifest: by its name, or by its sections."""
    by_name = _FILE_NAME.fullmatch(PurePath(path_name).name)
    return by_name is not None or _SECTIONS.search(text) is not None


# --- rules ----------------------------------------------------------------------------------


def _findings(manifest: Manifest | None, value: dict[str, Any]) -> Iterator[tuple[Finding, bool]]:
    """Runs every rule whose fields are sound, from the manifest or else from the raw values."""
    for rule in RULES:
        paths = [field.split(".") for field in rule.fields]
        if manifest is not None:
            values = [reduce(getattr, path, manifest) for path in paths]
        else:
            try:
                values = [_part(value, path) for path in paths]
            except (ValidationError, KeyError):
                continue
        for finding in rule.check(rule.fields[-1], *values):
            yield finding, rule.warning


def _part(value: Any, path: list[str]) -> Any:
    """Returns one field of a manifest that is broken elsewhere.

    Raises:
        KeyError: it, or a section around it, is missing or no section.
        ValidationError: it is broken itself.
    """
    model: type[BaseModel] | None = Manifest
    for i, name in enumerate(path):
        if model is None or not isinstance(value, dict):
            raise KeyError(name)
        field = model.model_fields[name]
        if name not in value and not field.is_required():
            return reduce(getattr, path[i + 1 :], field.get_default())
        value, model = value[name], _model_of(field.annotation)
    kind: Any = Annotated[field.annotation, None, *field.metadata]  # None: there may be no other
    return TypeAdapter(kind).validate_python(value)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Returns the section in ``Section``, ``Section | None`` or ``tuple[Section, ...]``."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


# --- from pydantic's errors to ours ----------------------------------------------------------

_WANTED = {
    "model_type": "a mapping of fields",
    "dict_type": "a mapping of names",
    "tuple_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
}


def _field_issues(error: ValidationError, document: Document) -> Iterator[ManifestIssue]:
    errors = error.errors(include_url=False)
    misspelt = {_meant(one["loc"]) for one in errors if one["type"] == "extra_forbidden"}
    for one in errors:
        if one["type"] == "missing" and one["loc"] in misspelt:
            continue  # it is there, under the name that is reported as unknown
        path = reduce(child, one["loc"], "")
        message, fix = _words(one["type"], one["loc"], one["input"], one.get("ctx", {}))
        yield ManifestIssue(document.lines.of(path), path, message, fix)


def _meant(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Returns the place of the field that an unknown one probably is."""
    *around, last = loc
    section = _section_at(around)
    return (*around, nearest(str(last), section.model_fields if section else ()) or last)


def _words(kind: str, loc: tuple[str | int, ...], value: Any, ctx: Any) -> tuple[str, str]:
    """Returns message and fix for one of pydantic's error types."""
    *around, last = loc
    name, section = str(last), _section_at(around)
    if kind == "extra_forbidden":
        return "unknown field", suggestion(name, section.model_fields if section else ())
    field = section.model_fields.get(name) if section else None
    example = f"{name}: {_flow(field.examples[0])}" if field and field.examples else f"{name}: text"
    for_example = f"Write for example {example}."
    shown = _shown(value, quote="connection" not in loc)
    if kind == "missing":
        if name in ("source", "target") and value.get("type") == "fs":
            example = f"{name}: {{path: ./{'data' if name == 'source' else 'results'}}}"
        return "is missing", f"Add it: {example}."
    if value is None or kind in ("string_too_short", "too_short"):
        optional = field is not None and not field.is_required()
        return "is empty", f"Write {example}{', or delete the line' if optional else ''}."
    if kind == "literal_error":
        known = get_args(field.annotation) if field else ()
        return f"is {shown}, wanted {' or '.join(known)}", for_example
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {ctx['ge']}" if "ge" in ctx else f"at most {ctx['le']}"
        return f"is {shown}, wanted {bound}", for_example
    if kind == "value_error":
        return str(ctx["error"]), for_example
    return f"is {shown}, wanted {_WANTED.get(kind, kind)}", for_example


def _section_at(loc: list[str | int]) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Manifest
    for name in loc:
        if isinstance(name, str):
            field = section.model_fields.get(name) if section else None
            section = _model_of(field.annotation) if field else None
    return section


def _flow(value: Any) -> str:
    """Returns a value as YAML on one line; quoted only where it has to be."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and re.fullmatch(r"(https://)?[A-Za-z./][\w./@ -]*", value):
        return value
    return json.dumps(value)


def _shown(value: Any, *, quote: bool) -> str:
    """Returns what was written, for a message; never a value that may be a secret."""
    if value is None:
        return "empty"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if not quote:
        return "text"
    text = str(value)
    if re.fullmatch(r"[+-]?[0-9.]{1,40}", text) and (isinstance(value, (Plain, int))):
        return text
    return f"text {text[:40]!r}{'...' if len(text) > 40 else ''}"
