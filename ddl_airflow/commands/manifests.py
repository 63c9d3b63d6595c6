"""Commands that look at manifests: validate, schema, convert."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from ddl_airflow.commands.options import Commands, takes_compute
from ddl_airflow.core.command import command_finding
from ddl_airflow.core.compute import Compute
from ddl_airflow.core.errors import (
    ManifestError,
    ManifestIssue,
)
from ddl_airflow.core.manifest.convert import converted
from ddl_airflow.core.manifest.folder import manifests_in, shared_dag_id
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.rules import issues_beside
from ddl_airflow.core.manifest.schema import json_schema
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.core.plan import plan
from ddl_airflow.core.scripts import CURE, TORCH_CURE, of_torch, will_train_apart
from ddl_airflow.lineage.record import facets_schema, lineage_schema
from ddl_airflow.storage.code import why_not_copied


def add_to(commands: Commands) -> None:
    """Adds the commands of this file."""
    validate = commands.add_parser(
        "validate",
        help="say everything that is wrong in manifests",
        epilog="Ends with 0 when all are good, 1 when one is not, 2 when there is none to look at.",
    )
    validate.add_argument(
        "manifest", nargs="+", type=Path, help="a file, or a folder with all that are below it"
    )
    validate.add_argument(
        "--format",
        choices=_REPORTS,
        default="text",
        help="text for people, json for programs, github for its annotations (default: text)",
    )
    validate.add_argument("--strict", action="store_true", help="count a warning as an error")
    takes_compute(validate)
    validate.set_defaults(run=_validate)

    schema = commands.add_parser(
        "schema",
        help="print the JSON Schema of manifests, for editors; or that of lineage.json, or of what "
        "OpenLineage's events have of ours",
    )
    schema.add_argument("of", nargs="?", choices=_SCHEMAS, default="manifest")
    schema.set_defaults(run=_schema)

    convert = commands.add_parser(
        "convert",
        help="print a manifest, FfDL's too, in the current dialect, with comments and no keys",
    )
    convert.add_argument("manifest", type=Path)
    takes_compute(convert)
    convert.set_defaults(run=_convert)


def _validate(options: argparse.Namespace) -> int:
    files = list(_files(options.manifest))
    if not files:
        folders = ", ".join(map(str, options.manifest))
        print(f"ddl-airflow: there is no manifest below {folders}", file=sys.stderr)
        return 2
    compute = compute_table(options.compute)
    looks = [_look(path, compute) for path in files]
    _find_shared_ids(looks)
    if options.strict:
        for look in looks:
            look.errors, look.warnings = [*look.errors, *look.warnings], []
    _REPORTS[options.format](looks)
    return 1 if any(look.errors for look in looks) else 0


@dataclasses.dataclass
class _Look:
    """A look at one file; manifest is None if it is none."""

    file: str
    manifest: Manifest | None
    errors: list[ManifestIssue]
    warnings: list[ManifestIssue]


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from (found for found, _ in manifests_in(path))
        else:
            yield path


def _look(path: Path, compute: Mapping[str, Compute]) -> _Look:
    try:
        manifest = load_manifest(path, compute=compute)
    except ManifestError as error:
        return _Look(str(path), None, list(error.issues), [])
    errors = [*issues_beside(manifest, path.absolute().parent), *_in_commands(manifest, path)]
    return _Look(str(path), manifest, errors, [*manifest.warnings, *_apart(manifest)])


def _in_commands(manifest: Manifest, path: Path) -> Iterator[ManifestIssue]:
    """What stage-data would say of the commands; a syntax error where the ranks' Python is this."""
    code = (manifest.folder or Path()) / manifest.code
    if not code.is_dir():
        fix = "Create it, or correct the path."
        yield ManifestIssue(manifest.line_of("code"), "code", f"{code} is no folder", fix)
        return
    left_out = partial(
        why_not_copied, code, leave_out=plan(manifest, path.absolute()).stage_data.not_code
    )
    site = os.environ.get("AIRFLOW__DDL__PYTHON", "")
    python = manifest.launcher.python or site or sys.executable
    first, *others = manifest.commands
    at = "model_definition.execution.command"
    commands = [(at, first, manifest.world_size), *((at, one, 0) for one in others)]
    if manifest.evaluation is not None and manifest.evaluation.command:
        commands.append(("evaluation.command", manifest.evaluation.command, 0))
    for field, command, ranks in commands:
        found = command_finding(field, command, code, python, ranks, left_out)
        if found is not None:
            yield ManifestIssue(manifest.line_of(field), field, found.message, found.fix)


def _apart(manifest: Manifest) -> Iterator[ManifestIssue]:
    if manifest.folder is None:
        return
    code = manifest.folder / manifest.code
    field = "model_definition.execution"
    if said := of_torch(code, manifest.distribution, manifest.world_size):
        yield ManifestIssue(manifest.line_of(field), field, said, TORCH_CURE)
    elif said := will_train_apart(code, manifest.distribution, manifest.world_size):
        yield ManifestIssue(manifest.line_of(field), field, said, CURE)


def _find_shared_ids(looks: Sequence[_Look]) -> None:
    claims: dict[str, list[_Look]] = {}
    for look in looks:
        if look.manifest is not None:
            claims.setdefault(look.manifest.dag_id, []).append(look)
    for sharing in claims.values():
        for look in sharing:
            if others := [other.file for other in sharing if other.file != look.file]:
                look.errors.append(shared_dag_id(cast(Manifest, look.manifest), others))


def _report_text(looks: Sequence[_Look]) -> None:
    for look in looks:
        for issue in look.errors:
            print(issue.render(look.file), file=sys.stderr)
        for issue in look.warnings:
            print(f"warning: {issue.render(look.file)}", file=sys.stderr)
        if look.manifest is not None and not look.errors:
            print(
                f"{look.file}: good: DAG {look.manifest.dag_id}, {look.manifest.world_size} ranks, "
                f"{len(look.manifest.commands)} command(s)"
            )


def _report_json(looks: Sequence[_Look]) -> None:
    def entry(look: _Look) -> dict[str, Any]:
        good = look.manifest is not None and not look.errors
        return {
            "file": look.file,
            "good": good,
            "dag_id": look.manifest.dag_id if look.manifest else None,
            "errors": [dataclasses.asdict(issue) for issue in look.errors],
            "warnings": [dataclasses.asdict(issue) for issue in look.warnings],
        }

    print(json.dumps({"manifests": [entry(look) for look in looks]}, indent=2))


def _report_github(looks: Sequence[_Look]) -> None:
    """Workflow commands: GitHub shows each at its line of the change."""

    def escaped(text: str, *more: str) -> str:
        for char in ("%", "\r", "\n", *more):
            text = text.replace(char, f"%{ord(char):02X}")
        return text

    for look in looks:
        for kind, issues in (("error", look.errors), ("warning", look.warnings)):
            for issue in issues:
                place = f"file={escaped(look.file, ':', ',')},line={issue.line or 1}"
                said = f"{issue.field}: " if issue.field else ""
                print(f"::{kind} {place}::{escaped(f'{said}{issue.message}. {issue.fix}')}")


_REPORTS = {"text": _report_text, "json": _report_json, "github": _report_github}


_SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "manifest": json_schema,
    "lineage": lineage_schema,
    "openlineage": facets_schema,
}


def _schema(options: argparse.Namespace) -> int:
    print(json.dumps(_SCHEMAS[options.of](), indent=2))
    return 0


def _convert(options: argparse.Namespace) -> int:
    manifest = load_manifest(options.manifest, compute=compute_table(options.compute))
    print(converted(manifest), end="")
    return 0
