"""Commands on what serves: production, rollback, promote."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ddl_airflow.commands.options import BY_ENVIRONMENT, Commands
from ddl_airflow.core.errors import (
    ConnectionInvalid,
    NoSuchModel,
    SourceMissing,
    StagingError,
)
from ddl_airflow.core.manifest.sections.stores import kind_of_uri, store_kinds
from ddl_airflow.core.output import printable
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    dags_in,
    passed_over,
    promote,
    read_pointer,
    rollback,
)
from ddl_airflow.lineage.record import LINEAGE
from ddl_airflow.storage.publication import PUBLICATION
from ddl_airflow.storage.store import RETIRED, SUCCESS, ObjectStore
from ddl_airflow.storage.stores import open_by_environment


def add_to(commands: Commands) -> None:
    """Adds the commands of this file."""
    production = commands.add_parser(
        "production",
        help="print which training of a DAG is in production, and those before",
        epilog=BY_ENVIRONMENT,
    )
    production.add_argument(
        "uri", help="s3://bucket/dag_id, or the folder: the results and the DAG"
    )
    production.set_defaults(run=_production)

    back = commands.add_parser(
        "rollback",
        help="put the training before into production again",
        epilog=BY_ENVIRONMENT,
    )
    back.add_argument("uri", help="s3://bucket/dag_id, or the folder: the results and the DAG")
    back.add_argument("--to", default="", metavar="TRAINING", help="one that was there before")
    back.add_argument("--reason", default="", help="why, for the history")
    back.set_defaults(run=_rollback)

    choose = commands.add_parser(
        "promote",
        help="put a published training into production, whatever is there now",
        epilog=BY_ENVIRONMENT,
    )
    choose.add_argument("uri", help="s3://bucket/dag_id, or the folder: the results and the DAG")
    choose.add_argument(
        "--to", required=True, metavar="TRAINING", help="its id, or its place in the results"
    )
    choose.add_argument("--reason", default="", help="why, for the history")
    choose.set_defaults(run=_promote)


def _production(options: argparse.Namespace) -> int:
    store, dag_id = _results_of(options.uri)
    pointer = read_pointer(store, dag_id, PRODUCTION)
    if pointer is None:
        print(f"ddl-airflow: {options.uri}: nothing is in production", file=sys.stderr)
        return 1
    print(json.dumps(pointer, indent=2))
    return 0


def _rollback(options: argparse.Namespace) -> int:
    store, dag_id = _results_of(options.uri)
    pointer = rollback(store, dag_id, options.to, by=_who(), reason=options.reason)
    for place, why in passed_over(pointer).items():
        print(printable(f"note: {place} is passed over: it holds {why}"), file=sys.stderr)
    print(printable(f"in production again: {pointer['model']}"))
    return 0


def _promote(options: argparse.Namespace) -> int:
    store, dag_id = _results_of(options.uri)
    pointer = promote(store, dag_id, options.to, by=_who(), reason=options.reason)
    print(printable(f"in production: {pointer['model']}"))
    return 0


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as in a container whose user has no name
        return f"user id {os.getuid()}"


def _results_of(uri: str) -> tuple[ObjectStore, str]:
    """Splits the place of a DAG's results.

    Raises:
        NoSuchModel: it is the place of the results of DAGs; the message names them.
    """
    uri = uri.rstrip("/")
    place = open_place(uri)
    results, slash, dag_id = absolute(uri).rpartition("/")
    if uri.startswith("file:"):  # as place_in_results
        dag_id = unquote(dag_id)
    if slash and results in ("", "file://"):  # a folder of the root
        results += "/"
    if not results.endswith(":/"):
        store = open_place(results)
        if any(read_pointer(store, dag_id, name) is not None for name in (LATEST, PRODUCTION)):
            return store, dag_id
    below = dags_in(place)
    if below or results.endswith(":/"):
        raise NoSuchModel(
            f"{uri} is no DAG's. Name one, as {uri}/{below[0] if below else '<dag_id>'}; there is: "
            f"{', '.join(below) or 'none'}"
        )
    return store, dag_id


def absolute(uri: str) -> str:
    """An URI as it is, and a folder by its absolute path: in `.` nobody reads what it is in."""
    return uri if "://" in uri else os.path.abspath(uri)


def place_in_results(uri: str) -> tuple[str, str]:
    """Splits the URI of a publication, or of a training.

    Returns:
        The URI of the results; and the place there, as pointers and the index have it.
    """
    results, _, place = uri.rpartition("/")
    if re.fullmatch(PUBLICATION, place):
        results, _, training = results.rpartition("/")
        place = f"{training}/{place}"
    # The URI of a folder has what is not ASCII as %C3%A4.
    return results, unquote(place) if uri.startswith("file:") else place


def without_model(uri: str) -> str:
    """The URI of a publication, or of what else is asked about, where somebody has given that of
    its model or its record.

    Results, or a DAG, may be called ``model`` as well. So may a file of a training's be in its
    folder of that name, and then it is none of them.
    """
    uri = uri.rstrip("/").removesuffix(f"/{LINEAGE}").rstrip("/")
    above, slash, name = uri.rpartition("/")
    if name != "model" or not slash or not above or above.endswith(":/"):
        return uri
    if re.fullmatch(PUBLICATION, above.rpartition("/")[2]):
        return above
    with suppress(StagingError):  # who asks may have no rights there
        place = open_place(above)
        if any(place.exists(key) for key in (LINEAGE, SUCCESS, RETIRED)):
            return above
    try:
        return uri if open_place(uri).names() else above
    except SourceMissing:
        return above


def open_place(uri: str, within: Sequence[Path] | None = None) -> ObjectStore:
    """The store at an URI or in a folder, with endpoint and keys from the environment.

    Raises:
        ConnectionInvalid: it is neither, or names none.
        SourceMissing: there is no such folder.
    """
    if not uri:  # an unset variable's value; as a path it is the current folder
        raise ConnectionInvalid(
            "the place is empty. Write s3://bucket/prefix, or a folder; . is the current one"
        )
    if uri.endswith(":") and kind_of_uri(f"{uri}//"):  # a scheme, whose slashes were taken
        uri += "//"
    scheme, separator, _rest = uri.partition("://")
    kind = kind_of_uri(uri) if separator else None
    if separator and kind is None:
        forms = ", ".join(kind.form for kind in store_kinds().values() if kind.has_buckets)
        raise ConnectionInvalid(
            f"{uri}: results are at {forms} or in a folder; {scheme}:// is neither"
        )
    if kind is not None and kind.has_buckets:
        return open_by_environment(uri, within)
    folder = Path(unquote(urlsplit(uri).path)) if separator else Path(uri).resolve()
    if not folder.is_absolute():
        raise ConnectionInvalid(f"{uri}: names no folder. Write file:///path")
    if not folder.is_dir():
        raise SourceMissing(
            f"{uri}: there is no such folder. Give the one in which results were published, or "
            "s3://bucket/prefix."
        )
    return open_by_environment(folder.as_uri(), within)
