"""The lineage of one training as a graph: data, code and manifest to run, to model, to pointers."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from itertools import islice
from typing import Any

from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import store_of
from ddl_airflow.lineage.production import LATEST, PRODUCTION, Pointer, read_pointer
from ddl_airflow.lineage.record import LINEAGE
from ddl_airflow.plugin.training import (
    fact,
    finite,
    mapping,
    read_record,
    read_state,
    word,
)
from ddl_airflow.plugin.unchanged import Unchanged

_FRESH_S = 15.0
# While a store is asked again, what it said before is told: for so long.
_STALE_S = 60.0
_PATIENCE_S = 1.5  # of who waits for an answer; the next one may have it
# Of one store, which may be away and hold them for long; and of all.
_READERS_OF_ONE = 2
_READERS = 16
_MOST_FILES = 500
_MOST_NAMED = 20
_MOST_METRICS = 100
_LONGEST_URI = 5000
_DEEPEST = 4  # of a fact
# Bytes of a record, which lists each object of the data: some 400,000.
_MOST_OF_LINEAGE = 64 * 2**20
# What nodes have of a record, beside files, metrics and the outcome.
_DRAWN = {
    "dataset": ("uri", "fingerprint", "files", "bytes"),
    "code": ("digest", "git_commit"),
    "manifest": ("name", "digest", "dialect", "file"),
    "run": ("run_id", "started", "triggered_by"),
}

# What is asked: where results are, and by which connection; of which DAG.
_Place = tuple[str, str, str]


class Pointers:
    """What ``production.json`` and ``latest.json`` of a DAG name, as stores said it lately.

    A store may be slow, or away: nobody waits for it longer than a moment, and what is asked of
    others does not wait behind it.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_READERS, "ddl-pointers")
        # By store: what nobody has begun to read, and how many read.
        self._waiting: dict[str, deque[tuple[_Place, Future[dict[str, Any]]]]] = defaultdict(deque)
        self._readers: Counter[str] = Counter()
        self._asked: dict[_Place, tuple[float, Future[dict[str, Any]]]] = {}
        self._said: dict[_Place, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def read(
        self, results: object, dag_id: str, *, patience_s: float = _PATIENCE_S
    ) -> dict[str, Any]:
        """``production`` and ``latest``, as ``read_pointer`` has them or null; or ``unknown``, why.

        Args:
            results: ``uri`` and perhaps ``conn_id``, as a record has them.
            dag_id: whose trainings.
            patience_s: how long to wait for the store.
        """
        if not isinstance(results, Mapping) or not isinstance(results.get("uri"), str):
            return {"unknown": "nothing has been published since this was noted"}
        if "endpoint_url" in results:
            return {"unknown": "the manifest itself has the keys; with conn_id it is known here"}
        place = (results["uri"], str(results.get("conn_id") or ""), dag_id)
        with self._lock:
            at, asked = self._asked.get(place, (0.0, None))
            if asked is None or (asked.done() and time.monotonic() - at > _FRESH_S):
                if asked is not None:
                    self._said[place] = asked.result()
                at, asked = time.monotonic(), self._ask(place)
                self._asked[place] = (at, asked)
            before = self._said.get(place) if time.monotonic() - at < _STALE_S else None
        try:
            return asked.result(patience_s)
        except NotYet:
            return before or {"unknown": "the store has not answered yet", "pending": True}

    def _ask(self, place: _Place) -> Future[dict[str, Any]]:
        store, answer = _store_of(*place[:2]), Future[dict[str, Any]]()
        self._waiting[store].append((place, answer))
        if self._readers[store] < _READERS_OF_ONE:
            self._readers[store] += 1
            self._pool.submit(self._read_all, store)
        return answer

    def _read_all(self, store: str) -> None:
        """Answers what is asked of a store, until nothing is."""
        while True:
            with self._lock:
                if not self._waiting[store]:
                    self._readers[store] -= 1
                    return
                place, answer = self._waiting[store].popleft()
            answer.set_result(_read(*place))

    def forget(self, dag_id: str) -> None:
        """The next question about a DAG asks its store again."""
        with self._lock:
            for place in [one for one in self._asked if one[2] == dag_id]:
                del self._asked[place]
                self._said.pop(place, None)
            for store, waiting in self._waiting.items():
                self._waiting[store] = deque(one for one in waiting if one[0][2] != dag_id)


def _store_of(uri: str, conn_id: str) -> str:
    """What is away as a whole: a bucket, or the upper folders, where file systems are mounted."""
    scheme, _, place = uri.partition("://")
    upper = 3 if scheme == "file" else 1
    return f"{conn_id} {scheme} {'/'.join(place.split('/')[:upper])}"


def _read(uri: str, conn_id: str, dag_id: str) -> dict[str, Any]:
    try:
        connection = Connection(conn_id=conn_id) if conn_id else None
        store = store_of(StoreReference(uri, connection))
        return {name: _short(read_pointer(store, dag_id, name)) for name in (PRODUCTION, LATEST)}
    except Exception as error:
        # A provider's client may raise what it likes; the words may have an address, never keys.
        return {"unknown": f"the store does not say: {type(error).__name__}"}


def _short(pointer: Pointer | None) -> dict[str, Any] | None:
    if pointer is None:
        return None
    names = ("publication", "training_id", "model", "set")
    return {name: pointer.get(name) for name in names} | {
        "before": [{name: one.get(name) for name in names} for one in pointer["before"]],
        "history": pointer["history"][:20],
    }


def read_graph(
    layout: RunLayout, pointers: Pointers, files: Unchanged | None = None
) -> dict[str, Any]:
    """The graph of a training, as far as it has come.

    Args:
        layout: the run's.
        pointers: what stores say.
        files: what was read of them before.

    Returns:
        ``nodes``: each ``id``, ``kind`` (data, code, manifest, run, model or pointer), ``title``
        and ``facts``: pairs of a name and a text; of a model also ``files`` with their digests; of
        a pointer ``names`` (whether it names this model). ``edges``: pairs of ids. ``unknown``:
        why the pointers are not known, or empty; ``pending``: whether they may be soon.
        ``production``: the pointer, or null. ``results``: where its DAG publishes, or empty.
    """
    files = files or Unchanged()
    record = read_record(layout, files)
    too_large = False
    with suppress(FileRefused, OSError):
        lineage = layout.kept / LINEAGE
        too_large = lineage.lstat().st_size > _MOST_OF_LINEAGE
        published = files.read(lineage, layout.workspace, _drawn, most_bytes=_MOST_OF_LINEAGE)
        if _made_of(published) == _made_of(record):  # else it has been cleared, and trains anew
            record = {**published, **_outcome(record)}
    outcome = mapping(record.get("outcome"))
    nodes = _inputs(record)
    state = read_state(layout, record)["state"]
    run = mapping(record.get("run"))
    told = [("training", layout.training_id), ("state", state), ("started", run.get("started"))]
    told += [("asked for by", run.get("triggered_by"))]
    nodes.append(_node("run", "run", word(run.get("run_id")) or layout.training_id, told))
    edges = [(node["id"], "run") for node in nodes if node["id"] != "run"]
    publication = outcome.get("publication")
    if not isinstance(publication, str):
        of_none = {"unknown": "", "pending": False, "production": None, "results": ""}
        return {"nodes": nodes, "edges": edges} | of_none
    result = mapping(record.get("result"))
    metrics = islice(mapping(result.get("metrics")).items(), _MOST_METRICS)
    told = [("place", publication), *((name, value) for name, value in metrics)]
    if too_large:
        limit = f"larger than {_MOST_OF_LINEAGE >> 20} MiB"
        told.append(("files", f"not shown here: {LINEAGE}, which is in the place, too, is {limit}"))
    model = _node("model", "model", publication.rpartition("/")[2], told)
    model["files"] = _files(result)
    nodes.append(model)
    edges.append(("run", "model"))
    known = pointers.read(outcome.get("results"), layout.dag_id)
    for name in (PRODUCTION, LATEST):
        pointer = known.get(name)
        if pointer is None:
            continue
        names = publication.endswith(f"/{pointer['publication']}")
        told = [("names", pointer["publication"]), ("since", pointer["set"])]
        nodes.append(_node(name, "pointer", name, told) | {"names": names})
        if names:
            edges.append(("model", name))
    why = str(known.get("unknown", ""))
    return {
        "nodes": nodes,
        "edges": edges,
        "unknown": why,
        "pending": bool(known.get("pending")),
        "production": known.get(PRODUCTION),
        "results": word(mapping(outcome.get("results")).get("uri"), _LONGEST_URI),
    }


def _drawn(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a training's record what the graph has of it, without the objects of its data."""
    told: dict[str, Any] = {
        section: {name: of[name] for name in names if name in of}
        for section, names in _DRAWN.items()
        if (of := mapping(record.get(section)))
    }
    if "outcome" in record:
        told["outcome"] = record["outcome"]
    if isinstance(code_files := mapping(record.get("code")).get("files"), list):
        told["code"]["files"] = code_files[:_MOST_NAMED]
    result = mapping(record.get("result"))
    told["result"] = {"metrics": result.get("metrics"), "files": _files(result)}
    return told


def _files(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of a model, with their digests, as many as are shown."""
    told = result.get("files")
    known = [one for one in told if isinstance(one, Mapping)] if isinstance(told, list) else []
    return [
        {"key": word(one.get("key"), _LONGEST_URI), "size": finite(one.get("size"))}
        | {"sha256": word(one.get("sha256"))}
        for one in known[:_MOST_FILES]
    ]


def _made_of(record: Mapping[str, Any]) -> list[Any]:
    data, code, manifest = (mapping(record.get(name)) for name in ("dataset", "code", "manifest"))
    return [data.get("fingerprint"), code.get("digest"), manifest.get("digest")]


def _outcome(record: Mapping[str, Any]) -> dict[str, Any]:
    return {"outcome": record["outcome"]} if "outcome" in record else {}


def _inputs(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    nodes = []
    if data := mapping(record.get("dataset")):
        told = [(name, data.get(name)) for name in ("fingerprint", "files", "bytes")]
        nodes.append(_node("data", "data", word(data.get("uri"), _LONGEST_URI) or "data", told))
    if code := mapping(record.get("code")):
        files = code.get("files")
        names = [word(one) for one in files[:_MOST_NAMED]] if isinstance(files, list) else []
        told = [("digest", code.get("digest")), ("commit", code.get("git_commit"))]
        nodes.append(_node("code", "code", ", ".join(filter(None, names)) or "code", told))
    if manifest := mapping(record.get("manifest")):
        told = [(name, manifest.get(name)) for name in ("digest", "dialect", "file")]
        nodes.append(_node("manifest", "manifest", word(manifest.get("name")) or "manifest", told))
    return nodes


def _node(node_id: str, kind: str, title: str, told: list[tuple[str, Any]]) -> dict[str, Any]:
    known = [(word(name), fact(value, _DEEPEST)) for name, value in told if value is not None]
    return {"id": node_id, "kind": kind, "title": title, "facts": known}
