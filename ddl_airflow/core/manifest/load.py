"""Text -> Manifest, or ManifestError with everything that is wrong, line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, reduce
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ddl_airflow.core.compute import COMPUTE, Compute
from ddl_airflow.core.errors import (
    ManifestError,
    ManifestInvalid,
    ManifestIssue,
    ManifestSyntaxError,
)
from ddl_airflow.core.manifest import wml
from ddl_airflow.core.manifest.document import (
    MAX_BYTES,
    Document,
    Lines,
    Plain,
    child,
    decode,
    mask_fields,
    read_document,
)
from ddl_airflow.core.manifest.ffdl import SECRET_FIELDS as FFDL_SECRET_FIELDS
from ddl_airflow.core.manifest.ffdl import is_ffdl
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.rule import Finding, Rule, nearest, suggestion
from ddl_airflow.core.manifest.rules import OWN_RULES, RULES
from ddl_airflow.core.manifest.sections.base import ByKind, Section
from ddl_airflow.core.manifest.sections.launcher import compute_rules
from ddl_airflow.core.manifest.sections.parameters import old_truths
from ddl_airflow.core.manifest.sections.places import (
    REFERENCE,
    SECRET_FIELDS,
    WRITTEN_SECRET_FIELDS,
)
from ddl_airflow.core.manifest.values import without_written_secrets

if TYPE_CHECKING:
    from ddl_airflow.core.manifest.ffdl.translate import Translation


def load_manifest(
    path: Path, *, source: str | None = None, compute: Mapping[str, Compute] = COMPUTE
) -> Manifest:
    """Returns the manifest in a file.

    Args:
        path: the file.
        source: how messages name the file; its path by default.
        compute: the kinds of node that it may name.

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
    manifest = load_manifest_text(text, source, compute)
    manifest._folder = path.absolute().parent
    return manifest


def load_manifest_text(
    text: str | bytes, source: str, compute: Mapping[str, Compute] = COMPUTE
) -> Manifest:
    """Returns the manifest in a text.

    Args:
        text: YAML; bytes are UTF-8.
        source: how messages name the text.
        compute: the kinds of node that it may name.

    Raises:
        ManifestSyntaxError: not YAML.
        ManifestInvalid: fields are unknown, missing or wrong.
    """
    document = read_document(decode(text, source), source)
    found = _Found(document)
    rules = [*RULES, *compute_rules(compute)]
    manifest: Manifest | None = None
    names: dict[str, str] = {}
    if not isinstance(document.value, dict):
        fix = "Start with model_definition:, training_data_reference:, training_results_reference:."
        message = f"is {_shown(document.value, quote=False)}, wanted a mapping of fields"
        found.add(Finding("", message, fix))
    elif (finding := wml.other_document(document.value)) is not None:
        found.add(finding)
    elif is_ffdl(document.value):
        from ddl_airflow.core.manifest.ffdl.model import FfdlManifest
        from ddl_airflow.core.manifest.ffdl.rules import RULES as FFDL_RULES
        from ddl_airflow.core.manifest.ffdl.translate import translated

        original = found.read(FfdlManifest, document.value, FFDL_RULES)
        translation = translated(_parts(FfdlManifest, original, document.value), compute)
        manifest = found.read(Manifest, translation.value, rules, translation)
        names = translation.names
    else:
        found.document = document = wml.as_of_now(document)
        manifest = found.read(Manifest, document.value, [*rules, *OWN_RULES])
        for finding in old_truths(document.value.get("parameters")):
            found.add(finding, warning=True)
        for finding in wml.in_swift(document.value):
            found.drop(finding.field.rpartition(".")[0])
            found.add(finding)
    if manifest is None or found.issues:
        raise ManifestInvalid(source, list(found.issues))
    manifest._source, manifest._names = source, names
    manifest._lines = document.lines if not names else _lines(document.lines, names)
    manifest._warnings = tuple(sorted(found.warnings))
    name = manifest.model_definition.execution.compute_configuration.name
    manifest._compute = compute.get(name) or Compute(name, manifest.launcher.slots or 0, gpu=False)
    return manifest


_Root = TypeVar("_Root", bound=BaseModel)


def read_fields(root: type[_Root], text: bytes, source: str, rules: Sequence[Rule]) -> _Root:
    """Returns what a text that is no manifest says, held to its fields and rules as one is.

    Raises:
        ManifestSyntaxError: not YAML.
        ManifestInvalid: fields are unknown, missing or wrong.
    """
    document = read_document(decode(text, source), source)
    found = _Found(document)
    value = document.value if isinstance(document.value, dict) else {}
    fields = found.read(root, value, rules)
    if fields is None or found.issues:
        raise ManifestInvalid(source, list(found.issues))
    return fields


class _Found:
    """What is wrong in a document, each thing once, with its line."""

    def __init__(self, document: Document) -> None:
        self.document = document
        # As dicts: what FfDL writes once may be wrong in two of our fields.
        self.issues: dict[ManifestIssue, None] = dict.fromkeys(document.issues)
        self.warnings: dict[ManifestIssue, None] = {}

    def add(self, finding: Finding, *, warning: bool = False) -> None:
        issue = ManifestIssue(self.document.lines.of(finding.field), *finding)
        (self.warnings if warning else self.issues)[issue] = None

    def drop(self, field: str) -> None:
        """Forgets what is wrong in a field and below it."""
        below = (f"{field}.", f"{field}[")
        self.issues = {
            one: None
            for one in self.issues
            if one.field != field and not one.field.startswith(below)
        }

    def read(
        self,
        root: type[_Root],
        value: dict[str, Any],
        rules: Sequence[Rule],
        translation: Translation | None = None,
    ) -> _Root | None:
        """Returns the fields as root, None if they are not; and adds what is wrong with them.

        Args:
            translation: where value comes from, if nobody wrote it as it is.
        """
        manifest = None
        try:
            manifest = root.model_validate(value)
        except ValidationError as error:
            # Most of what has no right shape in a translation had none before, and is said already.
            if translation is None or not self.issues:
                for finding in _field_findings(error, root, value):
                    self.add(translation.finding(finding) if translation else finding)
        for finding, warning in _findings(root, rules, manifest, value):
            self.add(translation.finding(finding) if translation else finding, warning=warning)
        return manifest


def _lines(lines: Lines, names: Mapping[str, str]) -> Lines:
    """Returns the lines of a translation's fields."""
    return Lines({"": lines.of("")} | {path: lines.of(name) for path, name in names.items()})


def redacted_text(text: str) -> str:
    """Returns a manifest's text with ``***`` for every key that is written out, to be shown.

    Raises:
        ManifestSyntaxError: not YAML, so nobody knows where the keys are.
    """
    names = (*WRITTEN_SECRET_FIELDS, *FFDL_SECRET_FIELDS)
    # Without a \ a name can be written in one way only.
    if "\\" in text or any(name in text for name in names):
        text = mask_fields(decode(text, "manifest"), "manifest", names, keep=REFERENCE)
    # Then: the end of a secret may be the flow style's, and what is left is no YAML.
    if "#" in text and _may_name_key(text):
        text = _without_keys_in_comments(text)
    return without_written_secrets(text)


def without_keys(content: bytes) -> bytes:
    """Returns a manifest's bytes as they may be shown; nothing where nobody knows the keys."""
    try:
        return redacted_text(content.decode()).encode()
    except (ManifestError, UnicodeError):
        return b""


# After a field whose value stands below it, perhaps as a block, with a name or both.
_BELOW = re.compile(r"\s*(&\S+\s*)?([|>][-+0-9]*\s*)?(#.*)?")


# What holds a key, however its name begins: a comment is not held to the fields of a manifest.
_KEY_NAMES = (
    *(*SECRET_FIELDS, *FFDL_SECRET_FIELDS, "session_token", "auth_token", "sas_token"),
    *("client_secret", "api_key", "private_key", "account_key", "integration_key", "routing_key"),
)
# A "username" is written of people, too.
_KEY = "|".join(
    name if name in FFDL_SECRET_FIELDS else name.replace("_", "[_-]?") for name in _KEY_NAMES
)
_KEY_IS = re.compile(rf"(?:{_KEY})[^\w\n]*?[:=]", re.IGNORECASE)


def _may_name_key(text: str) -> bool:
    """Quickly, for all manifests are asked; most have a comment."""
    plain = text.lower().replace("_", "").replace("-", "")
    return any(name.replace("_", "") in plain for name in _KEY_NAMES)


def _without_keys_in_comments(text: str) -> str:
    """Masks what follows a field in a comment: it is no YAML any more, but no less secret.

    Reads each line once: a line may be all that a manifest is, and all of one character.
    """
    lines = text.split("\n")
    follows = False  # a value that stands below its field
    for i, line in enumerate(lines):
        value, mark, comment = line.partition("#")
        if follows and value.strip():
            # The value of a field that alone was commented out.
            if ":" not in value:
                indent = value[: -len(value.lstrip())]
                lines[i] = line = f"{indent}'***'" + (f" #{comment}" if mark else "")
            follows = False
        start = line.find("#")
        if start < 0:
            continue
        found = _KEY_IS.search(line, start)
        if found is not None:
            follows = _BELOW.fullmatch(line, found.end()) is not None
            lines[i] = line if follows else f"{line[: found.end()]} '***'"
        elif line[start:].strip("# \t"):
            lines[i] = f"{line[:start]}# '***'" if follows else line
            follows = False
    return "\n".join(lines)


_SECTIONS = re.compile(
    r"^(model_definition|training_data_reference|training_results_reference|data_stores):",
    re.MULTILINE,
)
_FILE_NAME = re.compile(r"(manifest.*|.*\.manifest)\.ya?ml", re.DOTALL)


def looks_like_manifest(path_name: str, text: str) -> bool:
    """Returns whether a YAML file is meant as a manifest: by its name, or by its sections."""
    by_name = _FILE_NAME.fullmatch(PurePath(path_name).name)
    return by_name is not None or _SECTIONS.search(text) is not None


# --- rules ----------------------------------------------------------------------------------


def _findings(
    root: type[BaseModel],
    rules: Sequence[Rule],
    manifest: BaseModel | None,
    value: dict[str, Any],
) -> Iterator[tuple[Finding, bool]]:
    """Runs every rule whose fields are sound, from the manifest or else from the raw values."""
    for rule in rules:
        values: Sequence[Any]
        if manifest is not None:
            values = rule.values(manifest)
        else:
            try:
                values = [_part(root, value, field.split(".")) for field in rule.fields]
            except (ValidationError, KeyError):
                continue
        for finding in rule.check(rule.fields[-1], *values):
            yield finding, rule.warning


def _parts(
    root: type[BaseModel], manifest: BaseModel | None, value: dict[str, Any]
) -> dict[str, Any]:
    """Returns the sound ones of the outermost fields."""
    parts = {}
    for name in root.model_fields:
        try:
            parts[name] = getattr(manifest, name) if manifest else _part(root, value, [name])
        except (ValidationError, KeyError):
            continue
    return parts


def _part(root: type[BaseModel], value: Any, path: list[str]) -> Any:
    """Returns one field of a manifest that is broken elsewhere.

    Raises:
        KeyError: it, or a section around it, is missing or no section.
        ValidationError: it is broken itself.
    """
    model: type[BaseModel] | None = root
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
    """Returns the section in ``Section | None``, ``tuple[Section, ...]`` or the like."""
    inner = get_args(annotation)
    for candidate in (annotation, *inner, *(get_args(one)[0] for one in inner if get_args(one))):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


# --- from pydantic's errors to ours ----------------------------------------------------------

# How alike a word must be to one of its own section to be that, whatever others have.
_SURELY = 0.8
_WANTED = {
    "model_type": "a mapping of fields",
    "dict_type": "a mapping of names",
    "tuple_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
}


def _field_findings(
    error: ValidationError, root: type[BaseModel], value: dict[str, Any]
) -> Iterator[Finding]:
    errors = error.errors(include_url=False)
    unknown = [one["loc"] for one in errors if one["type"] == "extra_forbidden"]
    misspelt = {_meant(_around(root, value, loc), loc) for loc in unknown}
    for one in errors:
        if one["type"] == "missing" and one["loc"] in misspelt:
            continue  # it is there, under the name that is reported as unknown
        if one["type"] == "too_short" and isinstance(one["input"], list) and one["input"]:
            continue  # it has items, and they are what is wrong
        path = reduce(child, one["loc"], "")
        around = _around(root, value, one["loc"])
        if one["type"] == "extra_forbidden":
            message, fix = "unknown field", _fix_of_unknown(root, str(one["loc"][-1]), around)
        else:
            message, fix = _words(around, one["type"], one["loc"], one["input"], one.get("ctx", {}))
        yield Finding(path, message, fix)


class _Around(NamedTuple):
    """The section around a field that is wrong, and how it came to be that class of section."""

    section: type[BaseModel] | None
    by_kind: ByKind | None = None


def _meant(around: _Around, loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Returns the place of the field that an unknown one probably is."""
    return (*loc[:-1], nearest(str(loc[-1]), _fields(around.section)) or loc[-1])


def _words(
    around: _Around, kind: str, loc: tuple[str | int, ...], value: Any, ctx: Any
) -> tuple[str, str]:
    """Returns message and fix for one of pydantic's error types."""
    name, fields = str(loc[-1]), _fields(around.section)
    field = fields.get(name)
    example = (
        f"{name}: {_flow(field.examples[0])}"
        if field and field.examples
        else f"{child('', name)}: text"
    )
    for_example = f"Write for example {example}."
    shown = _shown(value, quote="connection" not in loc)
    if kind == "missing":
        section = around.section
        if section is not None and issubclass(section, Section):
            better = section.example(name, value)
            example = f"{name}: {_flow(better)}" if better else example
        return "is missing", f"Add it: {example}."
    if value is None or kind in ("string_too_short", "too_short"):
        optional = field is not None and not field.is_required()
        return "is empty", f"Write {example}{', or delete the line' if optional else ''}."
    if kind == "literal_error":
        known = _literals(field.annotation) if field else ()
        return f"is {shown}, wanted {' or '.join(known)}", for_example
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {ctx['ge']}" if "ge" in ctx else f"at most {ctx['le']}"
        return f"is {shown}, wanted {bound}", for_example
    if kind == "value_error":
        return str(ctx["error"]), getattr(ctx["error"], "fix", for_example)
    return f"is {shown}, wanted {_WANTED.get(kind, kind)}", for_example


# As Airflow's DAGs and operators have it.
_OF_AIRFLOW = {
    "dag_id": "The DAG is called by model_definition.name.",
    "start_date": "Write schedule: {start: 2026-01-31}.",
    "retry_delay": "Write retries: {delay: 30s}.",
    "execution_timeout": "Write steps: {train: {timeout: 12h}}.",
    **dict.fromkeys(
        ("pool", "queue", "executor", "priority_weight"),
        "Where tasks run is said by the site's table of compute_configuration.name: [ddl] compute.",
    ),
}
_MOST_PLACES = 8


def _fix_of_unknown(root: type[BaseModel], name: str, around: _Around) -> str:
    """Returns the fix for a field that the section around it does not have."""
    if name == "<<":
        return "Merge keys are not read. Write the fields out; or an alias for all of a section."
    fields = _fields(around.section)
    others = around.by_kind.others() if around.by_kind else {}
    near = nearest(name, {*fields, *others}, _SURELY)
    # A word of another section is written there more often than it is another one misspelt.
    if near is None and name in _OF_AIRFLOW:
        return _OF_AIRFLOW[name]
    if near is None and 0 < len(places := _places(root).get(name, ())) <= _MOST_PLACES:
        return f"It belongs in {' or '.join(filter(None, (', '.join(places[:-1]), places[-1])))}."
    near = near or nearest(name, {*fields, *others})
    if near and near not in fields:
        return f"Did you mean {near}, for kind {others[near]}?"
    return suggestion(name, fields)


@cache
def _places(root: type[BaseModel]) -> Mapping[str, tuple[str, ...]]:
    """The sections that have a field of a name, as dotted paths; none of lists."""
    found: dict[str, list[str]] = {}

    def walk(section: type[BaseModel], path: str) -> None:
        for name, field in _fields(section).items():
            if path:
                found.setdefault(name, []).append(path)
            origin, inner = get_origin(field.annotation), _model_of(field.annotation)
            if inner is not None and origin is not tuple and origin is not Mapping:
                walk(inner, child(path, name))
            for one in field.metadata:
                for other in one.others() if isinstance(one, ByKind) else ():
                    found.setdefault(other, []).append(child(path, name))

    walk(root, "")
    return {name: tuple(paths) for name, paths in found.items()}


def _literals(annotation: Any) -> tuple[Any, ...]:
    """Returns the words in ``Literal[...]`` or ``Literal[...] | None``."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(word for one in get_args(annotation) for word in _literals(one))


def _around(root: type[BaseModel], value: Any, loc: tuple[str | int, ...]) -> _Around:
    """Returns what is around the place of an error; value: what was written at the root."""
    around = _Around(root)
    named = False  # the next name is one that people chose
    for name in loc[:-1]:
        if isinstance(value, list):
            value = dict(enumerate(value))
        value = value.get(name) if isinstance(value, dict) else None
        if named or isinstance(name, int):
            named = False
            continue
        field = _fields(around.section).get(name)
        if field is None:
            return _Around(None)
        by_kind = next((one for one in field.metadata if isinstance(one, ByKind)), None)
        if by_kind is not None and isinstance(value, dict):
            around = _Around(by_kind.section(value), by_kind)
        else:
            around = _Around(_model_of(field.annotation))
        named = get_origin(field.annotation) is Mapping
    return around


def _fields(section: type[BaseModel] | None) -> dict[str, FieldInfo]:
    """Returns the fields of a section by the names that people write."""
    if section is None:
        return {}
    return {field.alias or name: field for name, field in section.model_fields.items()}


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
