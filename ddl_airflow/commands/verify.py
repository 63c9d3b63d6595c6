"""``ddl-airflow verify``: whether a publication is what was published, and what shows it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddl_airflow.commands.lineage import publication_at
from ddl_airflow.commands.options import BY_ENVIRONMENT, Commands
from ddl_airflow.commands.results import open_place, place_in_results, without_model
from ddl_airflow.core.errors import DAMAGED, DdlError, NoSuchModel, ObjectArchived, SourceMissing
from ddl_airflow.core.output import printable
from ddl_airflow.evidence.verification import Verdict, verify
from ddl_airflow.lineage.index import FOLDER, lost
from ddl_airflow.lineage.production import dags_among
from ddl_airflow.lineage.record import LINEAGE
from ddl_airflow.storage.publication import PUBLICATION, marker_of, published_at, results_in
from ddl_airflow.storage.store import RETIRED, SUCCESS, ObjectStore


def add_to(commands: Commands) -> None:
    """Adds the command of this file."""
    parser = commands.add_parser(
        "verify",
        help="whether each byte of a published model, and its evidence, is what was published",
        epilog=BY_ENVIRONMENT,
    )
    parser.add_argument(
        "uri",
        help="s3://bucket/training_id, or the folder; of s3://bucket, where trainings are "
        "published, whether all that is known is there",
    )
    parser.add_argument(
        "--key", type=Path, metavar="FILE", help="public key, PEM, of whoever must have signed it"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    uri = without_model(options.uri)
    place = open_place(uri)
    if _is_results(place):
        return _verify_results(place, options)
    store, note = _publication(uri)
    found = verify(store, options.key)
    if store.uri != place.uri and (why := _add_lost(place.uri, store, found)):
        found.notes.append(why)
    found.notes += [note] if note else []
    wrong = found.problems or found.gone
    if options.json:
        print(json.dumps(_dumped(store.uri, found), indent=2))
    else:
        for line in _said(store.uri, found):
            print(printable(line), file=sys.stderr if wrong else sys.stdout)
    return 1 if wrong else 0


def _is_results(place: ObjectStore) -> bool:
    """Whether it is where several trainings are published.

    In a publication, and so below a training, ranks have what files they like.
    """
    if any(place.exists(key) for key in (SUCCESS, RETIRED, LINEAGE)):
        return False
    keys = [obj.key for obj in results_in(place)]
    names = {key.partition("/")[0] for key in keys}
    if any(re.fullmatch(PUBLICATION, name) for name in (*names, place.uri.rpartition("/")[2])):
        return False
    return FOLDER in names or bool(dags_among(keys))


def _verify_results(place: ObjectStore, options: argparse.Namespace) -> int:
    """Says what is missing of a place of results; what is there is not read."""
    if options.key is not None:
        said = f"--key: no signature is looked at for all of {place.uri}. Name one training"
        print(f"ddl-airflow: {said}", file=sys.stderr)
        return 2
    found = lost(place)
    wrong = {name: _gone(who) for name, who in found.gone.items()} | found.unread
    if options.json:
        problems = [{"file": name, "problem": problem} for name, problem in wrong.items()]
        whole = {"uri": place.uri, "whole": not problems, "publications": found.known}
        print(json.dumps(whole | {"problems": problems, "notes": found.notes}, indent=2))
    elif wrong:
        for name, problem in wrong.items():
            print(printable(f"ddl-airflow: {place.uri}/{name}: {problem}"), file=sys.stderr)
    else:
        print(f"{place.uri}: {found.known} publications that are known are there")
        print("note: what is in them was not read: verify each by its own place")
        for note in found.notes:
            print(printable(f"note: {note}"))
    return 1 if wrong else 0


def _add_lost(training: str, newest: ObjectStore, found: Verdict) -> str:
    """Adds what is known of a training and not there. Returns why that cannot be told, if so.

    Args:
        training: its place.
        newest: its newest publication of those that are there.
        found: what to add it to.
    """
    results, training_id = place_in_results(training)
    try:
        record = json.loads(newest.read_bytes(LINEAGE))
        dag_ids = [str(record["run"]["dag_id"])]
    except (DdlError, *DAMAGED):
        dag_ids = []  # of what is wrong with it others speak
    try:
        known = lost(open_place(results), training_id, dag_ids)
        for name, who in known.gone.items():
            found.gone[f"{training}/{name.partition('/')[2]}"] = _gone(who)
        for place, why in known.unread.items():
            if not place.startswith(f"{training_id}/"):  # the index, or a pointer
                return f"whether it has published a newer one is not known: {place}: {why}"
    except DdlError as error:
        return f"whether it has published a newer one is not known: {error}"
    return ""


def _gone(who: Sequence[str]) -> str:
    return f"it is gone as a whole: {' and '.join(who)} " + ("know it" if who[1:] else "knows it")


def _publication(uri: str) -> tuple[ObjectStore, str]:
    """The place, also of one that lacks what others are known by; and what to note of that."""
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
    for obj in results_in(place):
        name, _, key = obj.key.partition("/")
        if re.fullmatch(PUBLICATION, name):
            found[name][key] = obj.modified
    marked = {}
    for name, keys in found.items():
        if SUCCESS in keys:
            marker = {}
            with suppress(ObjectArchived):  # then a listing says when it was put there
                marker = marker_of(place.at(name))
            marked[name] = published_at(marker, keys[SUCCESS])
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
        "whole": not found.problems and not found.gone,
        "files": found.files,
        "gone": found.gone,
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
    lines += [f"ddl-airflow: {place}: {problem}" for place, problem in found.gone.items()]
    if not found.problems and not found.gone:
        signed = ", and signed with that key" if found.signed else ""
        lines.append(f"{uri}: {found.files} files are as they were published{signed}")
        lines += [f"not made: {key}: {why}" for key, why in sorted(found.not_made.items())]
    return [*lines, *(f"note: {note}" for note in found.notes)]
