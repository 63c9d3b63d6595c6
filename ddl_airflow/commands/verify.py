"""``ddl-airflow verify``: whether a publication is what was published, and what shows it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

from ddl_airflow.commands.lineage import publication_at
from ddl_airflow.commands.options import Commands
from ddl_airflow.commands.results import open_place
from ddl_airflow.core.errors import NoSuchModel, SourceMissing
from ddl_airflow.evidence.verification import Verdict, verify
from ddl_airflow.lineage.record import LINEAGE
from ddl_airflow.lineage.story import printable
from ddl_airflow.storage.store import RETIRED, SUCCESS, ObjectStore
from ddl_airflow.storage.transfer import PUBLICATION


def add_to(commands: Commands) -> None:
    """Adds the command of this file."""
    parser = commands.add_parser(
        "verify",
        help="whether each byte of a published model, and its evidence, is what was published",
        epilog="s3:// uses the usual AWS_* variables, AWS_ENDPOINT_URL among them.",
    )
    parser.add_argument("uri", help="s3://bucket/training_id, or the folder")
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="public key, PEM, of whoever must have signed it"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    store, note = _publication(options.uri)
    found = verify(store, options.key)
    found.notes += [note] if note else []
    if options.json:
        print(json.dumps(_dumped(store.uri, found), indent=2))
    else:
        for line in _said(store.uri, found):
            print(printable(line), file=sys.stderr if found.problems else sys.stdout)
    return 1 if found.problems else 0


def _publication(uri: str) -> tuple[ObjectStore, str]:
    """The place, also of one that lacks what others are known by; and what to note of that."""
    uri = uri.rstrip("/").removesuffix(f"/{LINEAGE}").removesuffix("/model").rstrip("/")
    place = open_place(uri)
    try:
        if any(place.exists(key) for key in (SUCCESS, RETIRED, LINEAGE)):
            return place, ""
        newest, whole = _newest(place)
    except SourceMissing as error:
        raise NoSuchModel(str(error)) from error
    if not newest:
        return publication_at(uri), ""
    note = ""
    if newest != whole:
        before = f" The newest with a marker is {whole}." if whole else ""
        note = f"an upload to {newest} that was cut off, or is at work, looks the same.{before}"
    return place.at(newest), note


def _newest(place: ObjectStore) -> tuple[str, str]:
    """The newest publication of a training, with its marker or without; and the newest with it.

    What cleaning has withdrawn is none. Empty: there is none.
    """
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for obj in place.list():
        name, _, key = obj.key.partition("/")
        if re.fullmatch(PUBLICATION, name):
            found[name][key] = obj.modified
    marked = {name: keys[SUCCESS] for name, keys in found.items() if SUCCESS in keys}
    lost = {
        name: max(keys.values())
        for name, keys in found.items()
        if not keys.keys() & {SUCCESS, RETIRED}
    }
    times = marked | lost
    newest = max(times, key=times.__getitem__, default="")
    return newest, max(marked, key=marked.__getitem__, default="")


def _dumped(uri: str, found: Verdict) -> dict[str, object]:
    return {
        "uri": uri,
        "whole": not found.problems,
        "files": found.files,
        "problems": [
            {"file": key, "problem": problem}
            for key, problems in sorted(found.problems.items())
            for problem in problems
        ],
        "signed": found.signed,
        "signer": found.signer,
        "not_made": found.not_made,
        "notes": found.notes,
    }


def _said(uri: str, found: Verdict) -> list[str]:
    lines = [
        f"ddl-airflow: {uri}/{key}: {problem}"
        for key, problems in sorted(found.problems.items())
        for problem in problems
    ]
    if not found.problems:
        signed = ", and signed with that key" if found.signed else ""
        lines.append(f"{uri}: {found.files} files are as they were published{signed}")
        lines += [f"not made: {key}: {why}" for key, why in sorted(found.not_made.items())]
    return [*lines, *(f"note: {note}" for note in found.notes)]
