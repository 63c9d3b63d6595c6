"""``ddl-airflow lineage``: what made a model, why two differ, what data became, what there is."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ddl_airflow.commands.options import BY_ENVIRONMENT, Commands
from ddl_airflow.commands.results import absolute, open_place, place_in_results, without_model
from ddl_airflow.core.errors import (
    DAMAGED,
    DdlError,
    NoSuchModel,
    ObjectArchived,
    StagingError,
)
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.output import printable
from ddl_airflow.lineage.compare import compare
from ddl_airflow.lineage.index import (
    FOLDER,
    Summary,
    Trained,
    lost_of,
    read_index,
    tells_experiment,
    trained,
)
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    ReadPointer,
    pointers_of,
    read_pointer,
)
from ddl_airflow.lineage.record import (
    BY_HAND,
    IS_WHOLE,
    LINEAGE,
    SO_FAR,
    check_files,
    is_silent,
    last_sign,
)
from ddl_airflow.lineage.story import (
    described_difference,
    described_publications,
    described_run,
    described_training,
)
from ddl_airflow.storage.publication import (
    PUBLICATION,
    marker_of,
    own_name,
    publications,
    published_at,
    results_in,
)
from ddl_airflow.storage.store import (
    RETIRED,
    SUCCESS,
    ObjectStore,
    StoredObject,
    why_archived,
    why_archived_at,
)

# Trainings in one message.
_MOST_NAMED = 10
_READERS = 16
_CONDITION = re.compile(r"\s*([^<>=\s][^<>=]*?)\s*(<=|>=|<|>|=)\s*(\S+)\s*")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": float.__lt__,
    "<=": float.__le__,
    ">": float.__gt__,
    ">=": float.__ge__,
    "=": float.__eq__,
}


def add_to(commands: Commands) -> None:
    """Adds the commands of this file."""
    lineage = commands.add_parser(
        "lineage",
        help="which data, code, manifest and run made a model, and more questions of that kind",
        description="`ddl-airflow lineage URI` is short for `ddl-airflow lineage show URI`.",
        epilog=BY_ENVIRONMENT,
    )
    questions = lineage.add_subparsers(required=True, metavar="QUESTION")

    show = questions.add_parser(
        "show", help="what made a model; its files are checked against that"
    )
    show.add_argument(
        "uri",
        help="s3://bucket/training_id, or the folder; of a run that failed or works, its own one "
        "in the workspace",
    )
    show.set_defaults(run=_show)

    diff = questions.add_parser("diff", help="why two models differ")
    diff.add_argument("one", help="s3://bucket/training_id, or the folder")
    diff.add_argument("other", help="as ONE")
    diff.set_defaults(run=_diff)

    impact = questions.add_parser(
        "impact", help="the models that were made from some data, and which are in production"
    )
    impact.add_argument("data", help="the dataset's URI, or that of an object or folder in it")
    _takes_results(impact)
    impact.set_defaults(run=_impact)

    listing = questions.add_parser("list", help="what was published, the newest first")
    _takes_results(listing)
    listing.add_argument("--dag", default="", metavar="ID", help="of this DAG only")
    listing.add_argument(
        "--since",
        type=_since,
        metavar="TIME",
        help="published then or later: 2026-11-01, or 2026-11-01T20:15+01:00; without a zone UTC",
    )
    listing.add_argument("--code", default="", metavar="DIGEST", help="digest or commit begins so")
    listing.add_argument("--data", default="", metavar="DIGEST", help="fingerprint begins so")
    listing.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="CONDITION",
        type=_condition,
        help="a metric or parameter: 'accuracy>=0.98'; may be given several times",
    )
    listing.add_argument("--production", action="store_true", help="only what is in production now")
    listing.add_argument(
        "--limit", type=_number, default=0, metavar="N", help="the newest N; 0: all"
    )
    listing.set_defaults(run=_list)
    for question in (show, diff, impact, listing):
        question.add_argument("--json", action="store_true", help="for programs")


def with_question(argv: Sequence[str]) -> list[str]:
    """The arguments, with ``show`` where somebody asks for a model by its URI alone."""
    words = list(argv)
    known = ("show", "diff", "impact", "list", "-h", "--help")
    if words[:1] == ["lineage"] and len(words) > 1 and words[1] not in known:
        words.insert(1, "show")
    return words


def _takes_results(question: argparse.ArgumentParser) -> None:
    question.add_argument("results", help="where trainings are published: s3://bucket, or a folder")
    question.add_argument(
        "--rebuild",
        action="store_true",
        help="make the index of the results again, of their records",
    )


def _show(options: argparse.Namespace) -> int:
    place = Path(options.uri)
    so_far = place / "airflow" / SO_FAR
    # What was published has whatever files a training left.
    if so_far.is_file() and not any((one / LINEAGE).exists() for one in (place, place.parent)):
        return _show_run(place, so_far, as_json=options.json)
    store = publication_at(options.uri)
    record = read_record(store)
    problems = check_files(record, store)
    why_unknown = f"no {SUCCESS} beside it lists it"
    try:
        is_published = _is_as_published(store)
    except ObjectArchived:
        is_published, why_unknown = None, f"its {SUCCESS} is {why_archived_at(store, SUCCESS)}"
    if is_published is False:
        problems.append(f"{store.uri}/{LINEAGE} is not the file that was published")
    if options.json:
        print(json.dumps(record, indent=2))
    else:
        serves = _in_production(store, record)
        if serves is None and "://" not in options.uri:  # moved, with a link where it was
            serves = _in_production(publication_at(Path(absolute(options.uri)).as_uri()), record)
        try:
            story = described_training(record, store.uri, serves)
        except DAMAGED as error:
            raise _no_lineage(store, error) from error
        print(story)
    for metric, word in record["result"].get("not_finite", {}).items():
        said = f"warning: {metric!r} was {word} at the end of the training"
        print(printable(said), file=sys.stderr)
    for problem in problems:
        print(printable(f"ddl-airflow: {problem}"), file=sys.stderr)
    if is_published is None:
        print(f"note: whether {LINEAGE} was changed is not known: {why_unknown}", file=sys.stderr)
    if not problems:
        print(f"{len(record['result']['files'])} files are as recorded", file=sys.stderr)
    return 1 if problems else 0


def _is_as_published(store: ObjectStore) -> bool | None:
    """Whether the record is the one that the marker lists; None if no marker says which it was."""
    marker = marker_of(store) or marker_of(store, RETIRED)
    with suppress(*DAMAGED):
        listed = {file["key"]: file["sha256"] for file in marker["files"]}
        return hashlib.sha256(store.read_bytes(LINEAGE)).hexdigest() == str(listed[LINEAGE])
    return None


def _show_run(place: Path, so_far: Path, *, as_json: bool) -> int:
    """Of a run's folder in the workspace, whatever has become of it."""
    folder = place.resolve()
    layout = RunLayout(folder.parent.parent.parent, folder.parent.name, folder.name)
    try:
        record = json.loads(so_far.read_bytes())
        by_hand = record["run"]["type"] == BY_HAND
        silent = by_hand and folder == layout.root and is_silent(layout)
        since = datetime.fromtimestamp(last_sign(layout), UTC) if silent else None
        story = described_run(record, since)
    except DAMAGED as error:
        raise DdlError(f"{so_far} is damaged ({type(error).__name__}: {error}).") from error
    print(json.dumps(record, indent=2) if as_json else story)
    return 0


def _diff(options: argparse.Namespace) -> int:
    stores = [publication_at(uri) for uri in (options.one, options.other)]
    one, other = (read_record(store) for store in stores)
    try:
        found = compare(one, other, (stores[0].read_bytes, stores[1].read_bytes))
    except (LookupError, TypeError, AttributeError) as error:
        raise DdlError(f"one of the two is no whole lineage ({error!r})") from error
    print(json.dumps(found, indent=2) if options.json else described_difference(found))
    return 0


def _impact(options: argparse.Namespace) -> int:
    store, pointer, known, unreadable = _index(options, experiments=True)
    # Of models that are elsewhere it is not to say that none was made of the data.
    if not known and not unreadable:
        raise NoSuchModel(
            f"{store.uri}: nothing was published there. Give the data, then the place of results."
        )
    places = _Places(_names_of(options.data))
    # Whoever was trained on the same data has the same listing: one record answers for all of them.
    alike: dict[_Data, list[Summary]] = {}
    asked: dict[_Data, set[str]] = {}  # what may have had it: by what names
    for one in known:
        alike.setdefault(_data(one), []).append(one)
        for read in (one, *one.get("went_on_from", ())):
            if inside := places.inside(read["dataset"]):
                asked.setdefault(_data(read), set()).update(inside)
    had: dict[_Data, bool | None] = {}
    with ThreadPoolExecutor(_READERS) as pool:
        looks = pool.map(lambda data: _had(store, alike.get(data, ()), asked[data]), asked)
        for number, (data, found) in enumerate(zip(asked, looks, strict=True), 1):
            _say_progress(number, len(asked))
            had[data] = found

    def is_of_it(read: Mapping[str, Any]) -> bool | None:
        dataset = read["dataset"]
        if "uri" not in dataset:  # it was staged by an earlier version of ours
            return None
        if places.around(dataset):
            return True
        return had[_data(read)] if places.inside(dataset) else False

    answers: dict[Trained, bool | None] = {}
    went_on: dict[Trained, list[Trained]] = {}
    for one in known:
        answers[trained(one)] = is_of_it(one)
        for other in one.get("went_on_from", ()):
            answers[trained(other)] = is_of_it(other)
            went_on.setdefault(trained(other), []).append(trained(one))
    from_it = _led_to((read for read, answer in answers.items() if answer), went_on)
    from_unknown = _led_to((read for read, answer in answers.items() if answer is None), went_on)
    made: dict[str, Summary] = {}
    unread = dict(unreadable)
    for one in known:
        name, of_it = one["publication"], answers[trained(one)]
        before = [trained(other) for other in one.get("went_on_from", ())]
        went_on_from = list(dict.fromkeys(from_it[other] for other in before if other in from_it))
        if of_it or went_on_from:
            made[name] = one
        if of_it:
            continue
        if went_on_from:
            of = " and ".join(went_on_from[:_MOST_NAMED])
            said = f"{name} went on from what {of} had made of it"
            print(printable(f"note: {said}"), file=sys.stderr)
        elif of_it is None:
            removed = "removed" in one
            unread[name] = "it was removed" if removed else f"its {LINEAGE} cannot be read"
        elif unknown := [from_unknown[other] for other in before if other in from_unknown]:
            unread[name] = f"it went on from what {unknown[0]} left, and no record lists its data"
    of_dags: dict[str, set[str]] = {}
    for one in known:
        if one.get("experiment"):
            of_dags.setdefault(one["dag_id"], set()).add(one["experiment"])

    def experiments(one: Summary) -> set[str]:
        """Which it may have been in."""
        own = {one["training_id"]}
        if not tells_experiment(one):
            return own | of_dags.get(one["dag_id"], set())
        return {one["experiment"]} if one["experiment"] else own

    in_experiments = set().union(*map(experiments, made.values()))
    for one in known:
        tells = tells_experiment(one)
        whole = one.get(IS_WHOLE, tells and one["experiment"] is None)
        if one["publication"] not in made and not whole:
            for experiment in sorted(experiments(one) & in_experiments):
                where = f"{'was' if tells else 'may have been'} trained in experiment {experiment}"
                why = f"it {where} as well, and nobody noted after whom"
                unread.setdefault(one["publication"], why)
    its = [one for one in known if one["publication"] in made]
    unserved: dict[str, str] = {}
    _say(_with_production(store, pointer, its, unserved), options.json)
    for place, why in unserved.items():
        said = f"{place}: nobody knows what is in production: {why}"
        print(printable(f"ddl-airflow: {said}"), file=sys.stderr)
    if not made and not unread:  # nor is it known that there is such data
        said = f"note: no training that is known there read anything at {options.data}"
        print(printable(said), file=sys.stderr)
    for name, why in unread.items():
        said = f"{name}: nobody knows whether it was made from that: {why}"
        print(printable(f"ddl-airflow: {said}"), file=sys.stderr)
    return 1 if unread or unserved else 0


def _led_to(
    begun_with: Iterable[Trained], went_on: Mapping[Trained, Iterable[Trained]]
) -> dict[Trained, str]:
    """What came of trainings, by way of others too: each with the id of one that it came of.

    Args:
        begun_with: the trainings; each came of itself.
        went_on: who went on from whose weights.
    """
    came = {one: one[0] for one in begun_with}
    waiting = deque(came)
    while waiting:
        one = waiting.popleft()
        for later in went_on.get(one, ()):
            if later not in came:
                came[later] = came[one]
                waiting.append(later)
    return came


# What tells data apart: where they were, and their fingerprint.
_Data = tuple[str, str]


def _data(read: Mapping[str, Any]) -> _Data:
    return read["dataset"].get("uri", ""), read["dataset"]["fingerprint"]


@dataclass(frozen=True)
class _Places:
    """What a person asks for, and how datasets lie to that."""

    wanted: Collection[str]

    def around(self, dataset: Mapping[str, Any]) -> bool:
        """Whether it is the dataset, or a folder around it."""
        uris = _uris(dataset)
        return any(f"{uri}/".startswith(f"{name}/") for uri in uris for name in self.wanted)

    def inside(self, dataset: Mapping[str, Any]) -> set[str]:
        """By what keys it would be an object or a folder in the dataset."""
        if self.around(dataset):
            return set()
        return {
            name.removeprefix(f"{uri}/")
            for uri in _uris(dataset)
            for name in self.wanted
            if name.startswith(f"{uri}/")
        }


def _uris(dataset: Mapping[str, Any]) -> set[str]:
    return {_plain(dataset[name]) for name in ("uri", "resolved_uri") if name in dataset}


def _names_of(data: str) -> set[str]:
    """What a dataset may be called that a person names: a folder also as what its links lead to."""
    if "://" in data and not data.startswith("file://"):
        return {_plain(data)}
    path = Path(_plain(data).removeprefix("file://")) if "://" in data else Path(data)
    return {f"file://{os.path.abspath(path)}", f"file://{path.resolve()}"}


def _plain(uri: str) -> str:
    """A place, as the keys in it are written: a folder's URI has %20 where its name has a space."""
    return (unquote(uri) if uri.startswith("file://") else uri).rstrip("/")


def _had(store: ObjectStore, alike: Sequence[Summary], keys: Collection[str]) -> bool | None:
    """Whether data had one of the objects, or something in such a folder.

    None: none of the records of those trained on it can be read.
    """
    folders = tuple(f"{key}/" for key in keys)
    for one in alike:
        with suppress(DdlError, LookupError, TypeError):
            listing = read_record(store.at(one["publication"]))["dataset"]["listing"]
            listed = [obj["key"] for obj in listing]
            return any(key in keys or key.startswith(folders) for key in listed)
    return None


def _list(options: argparse.Namespace) -> int:
    store, pointer, known, unreadable = _index(options)
    found = [
        one
        for one in known
        if options.dag in ("", one["dag_id"])
        and (options.since is None or _time_of(one["published"]) >= options.since)
        and _begins(options.code, one["code"]["digest"], one["code"]["git_commit"])
        and _begins(options.data, one["dataset"]["fingerprint"])
        and all(condition(one) for condition in options.where)
    ]
    unserved: dict[str, str] = {}
    shown = _with_production(store, pointer, found, unserved)
    if options.production:
        shown = [one for one in shown if one["production"]]
    _say(shown[: options.limit or None], options.json)
    _note_lost(store, {one["dag_id"] for one in found}, pointer)
    for place, why in unserved.items():
        said = f"{place}: nobody knows what is in production: {why}"
        print(printable(f"ddl-airflow: {said}"), file=sys.stderr)
    # A training's id begins with its DAG's.
    of_dag = (f"{options.dag}-", f"{FOLDER}/") if options.dag else ""
    unknown = {name: why for name, why in unreadable.items() if name.startswith(of_dag)}
    for name, why in unknown.items():
        said = f"{name}: nobody knows whether it belongs there: {why}"
        print(printable(f"ddl-airflow: {said}"), file=sys.stderr)
    return 1 if unknown or unserved else 0


def _note_lost(store: ObjectStore, dag_ids: Collection[str], pointer: ReadPointer) -> None:
    try:
        lost = lost_of(store, dag_ids, pointer, lambda _place, _why: None)
    except DdlError as error:  # a pointer that is damaged hides no line of the list
        print(printable(f"note: whether any is gone is not known: {error}"), file=sys.stderr)
        return
    for name, who in lost.items():
        names = "name it" if who[1:] else "names it"
        said = f"note: {name} is gone: {' and '.join(who)} {names}"
        print(printable(said), file=sys.stderr)


def _begins(wanted: str, *digests: str | None) -> bool:
    return not wanted or any(
        digest.startswith(wanted) or digest.removeprefix("sha256:").startswith(wanted)
        for digest in digests
        if digest is not None
    )


def _since(text: str) -> datetime:
    whole = {4: f"{text}-01-01", 7: f"{text}-01"}.get(len(text), text)  # a year, or a month
    try:
        return _time_of(whole)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; for example 2026-11-01") from None


def _time_of(text: str) -> datetime:
    at = datetime.fromisoformat(text)
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of trainings")
    return int(text)


def _condition(text: str) -> Callable[[Summary], bool]:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 'accuracy>=0.98'")
    name, operator, value = match.groups()
    try:
        number: float | None = float(value)
    except ValueError:
        number = None
        if operator != "=":
            raise argparse.ArgumentTypeError(f"{text!r}: {value!r} is no number") from None

    def holds(one: Summary) -> bool:
        for known in (one["metrics"], one["parameters"]):
            if name in known:
                found = known[name]
                if number is None or isinstance(found, str | bool):
                    return operator == "=" and str(found).lower() == value.lower()
                if isinstance(found, int | float):
                    return _OPERATORS[operator](float(found), number)
        return False

    return holds


def _index(
    options: argparse.Namespace, *, experiments: bool = False
) -> tuple[ObjectStore, ReadPointer, list[Summary], dict[str, str]]:
    """Also why the index could not be made of the record of a publication, by its place."""
    store = open_place(options.results.rstrip("/"))
    pointer = pointers_of(store)
    unreadable: dict[str, str] = {}
    known = read_index(
        store,
        rebuild=options.rebuild,
        progress=_say_progress,
        pointer=pointer,
        unread=unreadable.__setitem__,
        experiments=experiments,
    )
    of_one = re.compile(rf"{PUBLICATION}|{re.escape(LINEAGE)}")
    if not known and any(map(of_one.fullmatch, store.names())):
        raise NoSuchModel(f"{store.uri} is one training. Give the place of results that it is in.")
    return store, pointer, known, unreadable


def _say_progress(done: int, of: int) -> None:
    if sys.stderr.isatty() or done == of:
        end = "\n" if done == of else "\r"
        print(f"reading records: {done} of {of}", end=end, file=sys.stderr)


def _with_production(
    store: ObjectStore, pointer: ReadPointer, found: Sequence[Summary], unread: dict[str, str]
) -> list[Summary]:
    """Whether each is in production, too; None where the pointer cannot be read, with why that is
    put into ``unread``.
    """

    def serving_of(dag_id: str) -> set[str] | None:
        try:
            said = pointer(dag_id, PRODUCTION)
        except StagingError as error:
            if error.retryable:
                raise
            unread[f"{dag_id}/{PRODUCTION}.json"] = str(error)
            return None
        # An earlier version of ours may have named a link, and an index of then knows it so.
        return {said["publication"], own_name(store, said["publication"])} if said else set()

    dag_ids = sorted({one["dag_id"] for one in found})
    with ThreadPoolExecutor(_READERS) as pool:
        serving = dict(zip(dag_ids, pool.map(serving_of, dag_ids), strict=True))

    def serves(one: Summary) -> bool | None:
        its = serving[one["dag_id"]]
        return None if its is None else one["publication"] in its

    return [one | {"production": serves(one)} for one in found]


def _say(found: Sequence[Summary], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
    elif found:
        print(described_publications(found))
    else:
        print("none", file=sys.stderr)


def _in_production(store: ObjectStore, record: Mapping[str, Any]) -> bool | None:
    """Whether production names the publication; None if nobody knows."""
    results, publication = place_in_results(store.uri)
    try:
        place = open_place(results)
        pointer = read_pointer(place, record["run"]["dag_id"], PRODUCTION)
    except (DdlError, LookupError, TypeError):  # a copy of it, beside which there is nothing
        return None
    if pointer is None:
        return None
    return own_name(place, pointer["publication"]) == own_name(place, publication)


def read_record(store: ObjectStore) -> dict[str, Any]:
    """The record of a publication.

    Raises:
        ObjectArchived: it is in an archive; the message says in which storage class.
        DdlError: it is damaged, or another file.
    """
    try:
        record: dict[str, Any] = json.loads(store.read_bytes(LINEAGE))
        _ = [file["key"] for file in record["result"]["files"]]
    except ObjectArchived as error:
        why = why_archived_at(store, LINEAGE)
        raise ObjectArchived(f"{store.uri}/{LINEAGE} is {why}") from error
    except DAMAGED as error:
        raise _no_lineage(store, error) from error
    return record


def _no_lineage(store: ObjectStore, error: Exception) -> DdlError:
    return DdlError(
        f"{store.uri}/{LINEAGE} is no lineage: it is damaged, or another file of that name "
        f"({type(error).__name__}: {error})."
    )


def _notes_on_others(
    store: ObjectStore, listed: Iterable[StoredObject], there: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """What to say of a training's publications beside the one that is taken.

    Args:
        store: the training's place.
        listed: its objects.
        there: its publications with a marker, the newest first, which is taken.
    """
    newest, *others = there
    training_id = unquote(store.uri.rpartition("/")[2])
    if others:
        more = f" and {len(others) - _MOST_NAMED} more" * (len(others) > _MOST_NAMED)
        yield (
            f"{training_id} has {len(others) + 1} publications, and this is the newest, {newest}. "
            f"The others: {', '.join(others[:_MOST_NAMED])}{more}"
        )
    changed: dict[str, float] = {}
    marked = 0.0
    withdrawn = set()
    for obj in listed:
        name, _, key = obj.key.partition("/")
        changed[name] = max(changed.get(name, 0.0), obj.modified)
        if obj.key == f"{newest}/{SUCCESS}":
            marked = published_at(there[newest], obj.modified)
        if key == RETIRED:
            withdrawn.add(name)
    for name in sorted(changed.keys() - there.keys() - withdrawn):
        if re.fullmatch(PUBLICATION, name) and changed[name] > marked:
            yield (
                f"{training_id}/{name} is newer than this one, {newest}, and has no whole "
                f"{SUCCESS}: it is being published, its upload was cut off, or the file was lost "
                f"or archived. `ddl-airflow verify {store.uri}/{name}` says more"
            )


def publication_at(uri: str) -> ObjectStore:
    """Where a training's lineage is: at the place itself, or in its newest publication; then it is
    said on stderr if there are others.

    Raises:
        ObjectArchived: of what was published there each marker is in an archive.
        NoSuchModel: it is the place of a DAG, or of several trainings; the message names them.
    """
    uri = without_model(uri)
    store = open_place(uri)
    if store.exists(LINEAGE):
        return store
    listed = results_in(store)  # it may be the whole place, at the top of a disk
    if there := publications(store, listed):
        for note in _notes_on_others(store, listed, there):
            print(printable(f"note: {note}"), file=sys.stderr)
        return store.at(next(iter(there)))
    for one in listed:
        if one.archived and re.fullmatch(rf"{PUBLICATION}/{SUCCESS}", one.key):
            raise ObjectArchived(f"{uri}/{one.key} is {why_archived(one.archived)}")
    pointers = {f"{name}.json": name for name in (LATEST, PRODUCTION)}
    results, _, dag_id = absolute(uri).rpartition("/")
    found = [name for key, name in pointers.items() if any(one.key == key for one in listed)]
    if found and not results.endswith(":/"):
        named = []
        for name in found:
            pointer = read_pointer(open_place(results or "/"), dag_id, name)
            if pointer is not None:
                named.append(f"{results}/{pointer['publication']} ({name})")
        raise NoSuchModel(f"{uri} is of a DAG. Name one of its trainings: {', '.join(named)}")
    marked = sorted(
        (one for one in listed if re.fullmatch(rf"[^/]+/[^/]+/{SUCCESS}", one.key)),
        key=lambda one: one.modified,
        reverse=True,
    )
    trainings = list(dict.fromkeys(one.key.partition("/")[0] for one in marked))
    if trainings:
        more = f" and {len(trainings) - _MOST_NAMED} more" * (len(trainings) > _MOST_NAMED)
        raise NoSuchModel(
            f"{uri} is of several trainings. Name one, as {uri}/{trainings[0]}; there is, the "
            f"newest first: {', '.join(trainings[:_MOST_NAMED])}{more}"
        )
    for one in listed:
        if record := re.fullmatch(rf"((?:[^/]+/)?{PUBLICATION})/{re.escape(LINEAGE)}", one.key):
            place = f"{uri}/{record[1]}"
            if any(other.key == f"{record[1]}/{RETIRED}" for other in listed):
                raise NoSuchModel(f"{place}: cleaning has withdrawn it, and removes it soon")
            raise NoSuchModel(
                f"{place} has no whole {SUCCESS}: it is being published, its upload was cut off, "
                f"or the file was lost or changed. `ddl-airflow verify {place}` says more"
            )
    raise NoSuchModel(f"{uri}: nothing was published there: it has no {LINEAGE}")
