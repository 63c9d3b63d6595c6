"""Manifest -> text in the current dialect: the same training, with comments and without keys."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, get_args

import yaml
from pydantic import SecretStr

from ddl_airflow.core.manifest.document import child
from ddl_airflow.core.manifest.ffdl import SECRET_FIELDS as FFDL_SECRET_FIELDS
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.sections.base import Section
from ddl_airflow.core.manifest.sections.launcher import Launcher
from ddl_airflow.core.manifest.sections.launchers import launcher_kind
from ddl_airflow.core.manifest.sections.places import REFERENCE, SECRET_FIELDS
from ddl_airflow.core.manifest.sections.tries import Retries, Step

_DIALECTS = {"ffdl": "Fabric for Deep Learning", "wml": "Watson Machine Learning"}
_REFERENCES = ("training_data_reference", "training_results_reference")
# What YAML reads as a number, a date, a truth or nothing, in any of its versions, gets quotes.
_BARE = re.compile(r"(?!\.[0-9])[A-Za-z./$][\w./${}=-]*( [\w./${}=-]+)*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def converted(manifest: Manifest) -> str:
    """Returns YAML that loads as the same training; the plan is the same but for the keys.

    Keys that are written out are replaced by ``${NAME}``; values that are the default are left
    out; comments say where each field comes from and what was not taken over.
    """
    fields = manifest.model_dump(exclude_defaults=True, exclude_none=True)
    fields["model_definition"]["execution"]["compute_configuration"].setdefault("nodes", 1)
    for timed in fields.keys() & {"retries", "launcher", "approval", "checkpoints"}:
        _with_units(getattr(manifest, timed), fields[timed])
    for step, of_step in manifest.steps:
        _with_units(of_step, fields.get("steps", {}).get(step, {}))
    comments = {
        path: f"was {name}" for path in _leaves(fields, "") if (name := manifest.original(path))
    }
    for section, variables in zip(_REFERENCES, _variables(manifest), strict=True):
        connection = fields[section].get("connection", {})
        for name in SECRET_FIELDS:
            secret: SecretStr | None = connection.get(name)
            if secret is None:
                continue
            connection[name] = secret.get_secret_value()
            if not REFERENCE.fullmatch(connection[name]):
                connection[name] = f"${{{variables[name]}}}"
                comments[f"{section}.connection.{name}"] = (
                    f"set {variables[name]} where tasks run; it was written out"
                )
                comments[f"{section}.connection"] = "better: conn_id: my_s3, and nothing else here"
    if manifest.launcher.slots:
        comments.setdefault("launcher.slots", "ranks per node")
    return "\n".join([*_head(manifest), *_mapping(fields, "", 0, comments)]) + "\n"


def rewritten(said: Mapping[str, Any], head: str) -> str:
    """Returns YAML of what ``Manifest.said`` kept of a manifest, with ``${NAME}`` for its keys.

    Args:
        said: as it was, or with other values.
        head: a comment above it, of one line.

    Raises:
        LookupError, TypeError, AttributeError: it is no manifest.
    """
    fields: dict[str, Any] = copy.deepcopy(dict(said))
    kind = launcher_kind(fields.get("launcher", {}).get("kind", "local"))
    timed: list[tuple[type[Section], dict[str, Any]]]
    timed = [(Retries, fields.get("retries", {})), (kind or Launcher, fields.get("launcher", {}))]
    timed += [(Step, of_step) for of_step in fields.get("steps", {}).values()]
    for section, given in timed:
        for name in given.keys() & _durations(section):
            given[name] = f"{float(given[name])!r}s".replace(".0s", "s")
    for name in _REFERENCES:
        connection = fields[name].get("connection")
        if connection is not None and "conn_id" not in connection:
            connection |= {key: f"${{S3_{key.upper()}}}" for key in SECRET_FIELDS}
    return "\n".join([f"# {_one_line(head)}", *_mapping(fields, "", 0, {})]) + "\n"


def _durations(section: type[Section]) -> set[str]:
    """Names of the fields that are dumped in seconds."""

    def in_it(annotation: Any) -> bool:
        return annotation is timedelta or any(map(in_it, get_args(annotation)))

    return {name for name, field in section.model_fields.items() if in_it(field.annotation)}


def _with_units(section: Section, fields: dict[str, Any]) -> None:
    """Writes durations, which are dumped in seconds, as a manifest has them."""
    for name, value in section:
        if isinstance(value, timedelta) and name in fields:
            fields[name] = f"{fields[name]!r}s".replace(".0s", "s")


def _head(manifest: Manifest) -> Iterator[str]:
    name = _one_line(manifest.source.rsplit("/", 1)[-1])
    yield f"# Converted from {name}, a manifest as of {_DIALECTS[manifest.dialect]}."
    yield "# Put it in the place of the old file: two of one name are one DAG too many."
    for issue in manifest.warnings:
        if issue.field.rsplit(".", 1)[-1] not in (*SECRET_FIELDS, *FFDL_SECRET_FIELDS):
            yield f"# Not taken over, line {issue.line}: {_one_line(issue.field)}: {issue.message}."


def _variables(manifest: Manifest) -> tuple[dict[str, str], dict[str, str]]:
    """Returns names of environment variables for the keys to data and results."""
    data, results = (getattr(manifest, name).connection for name in _REFERENCES)
    same = data is None or results is None
    same = same or all(getattr(data, n) == getattr(results, n) for n in SECRET_FIELDS)
    prefixes = ("S3", "S3") if same else ("S3_DATA", "S3_RESULTS")
    first, second = ({n: f"{prefix}_{n.upper()}" for n in SECRET_FIELDS} for prefix in prefixes)
    return first, second


def _leaves(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, child(path, key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _leaves(item, child(path, i))
    else:
        yield path


def _mapping(
    value: Mapping[str, Any], path: str, depth: int, comments: Mapping[str, str]
) -> Iterator[str]:
    indent = "  " * depth
    for key, item in value.items():
        at = child(path, key)
        name = f"{indent}{_scalar(key)}:"
        note = f"  # {_one_line(comments[at])}" if at in comments else ""
        if isinstance(item, Mapping):
            if item:
                yield f"{name}{note}"
                yield from _mapping(item, at, depth + 1, comments)
            else:
                yield f"{name} {{}}{note}"
        elif isinstance(item, (list, tuple)):
            yield f"{name}{note}"
            for i, entry in enumerate(item):
                if not isinstance(entry, Mapping):
                    yield f"{indent}  - {_scalar(entry)}"
                    continue
                first, *rest = _mapping(entry, child(at, i), depth + 2, comments)
                yield f"{indent}  - {first.lstrip()}"
                yield from rest
        else:
            yield f"{name} {_scalar(item)}{note}"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    text = str(value)
    if _BARE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # Wide enough never to be folded.
    quoted: str = yaml.safe_dump(text, default_style='"', allow_unicode=True, width=len(text) * 12)
    return quoted.strip()


def _one_line(text: str) -> str:
    """Returns a comment's text: nothing in it may end the line, or be no character of YAML."""
    return "".join(char if char.isprintable() else " " for char in text)
