"""Published trainings: which of them need not be kept, and how they go.

``keep`` of a manifest says how many of its publications stay, the newest; the rule stands in the
marker of each. Besides stays what ``latest.json`` names, and what ``production.json`` or its
history names. Nobody can be hurt half-way: a publication first gives up its marker, so that nobody
puts it into production any more, and only two days later its files, after another look at the
pointers. If one names it after all, it gets the marker back.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from ddl_airflow.lineage.production import LATEST, PRODUCTION, read_pointer
from ddl_airflow.storage.cleaning import LEFT_S, Removed
from ddl_airflow.storage.store import SUCCESS, ObjectStore, StoredObject

_RETIRED = "_RETIRED"  # a marker that was given up
# <training id>/<content>-<token>/..., as ``ddl_airflow.storage.transfer.publish`` names it.
_PUBLISHED = re.compile(r"([^/]+/[0-9a-f]{16}-[0-9a-f]{8})/.+")


def clean_results(
    store: ObjectStore, *, dry_run: bool = False, now: Callable[[], float] = time.time
) -> Iterator[Removed]:
    """Removes what the manifests' ``keep`` does not keep, and what killed uploads left.

    Args:
        store: of the results, of all DAGs that publish there.
        dry_run: to remove nothing.
        now: seconds since 1970.

    Yields:
        What was removed; a publication that gives up its marker counts as removed then.

    Raises:
        StagingError: as ``ObjectStore`` does.
    """
    listed = store.list()
    found: dict[str, dict[str, StoredObject]] = defaultdict(dict)
    for obj in listed:
        if match := _PUBLISHED.fullmatch(obj.key):
            found[match[1]][obj.key[match.end(1) + 1 :]] = obj
    yield from _retire(store, listed, found, dry_run)
    named = _named(store, listed)
    for publication, objects in found.items():
        settled = now() - max(obj.modified for obj in objects.values()) > LEFT_S
        if SUCCESS in objects or not settled:
            continue
        target = store.at(publication)
        if publication in named:
            if _RETIRED in objects and not dry_run:
                target.put_bytes(SUCCESS, target.read_bytes(_RETIRED))
                target.delete([_RETIRED])
            continue
        nbytes = sum(obj.size for obj in objects.values())
        yield Removed("publication without a marker", target.uri, nbytes)
        if not dry_run:
            # Its former marker last: who is killed meanwhile leaves what can be told from others'.
            target.delete(sorted(objects, key=lambda key: key == _RETIRED))
    for part in list(store.unfinished()):
        if now() - part.started > LEFT_S and _PUBLISHED.fullmatch(part.key):
            yield Removed("unfinished upload", f"{store.uri}/{part.key}", part.nbytes)
            if not dry_run:
                store.discard(part)


def _retire(
    store: ObjectStore,
    listed: list[StoredObject],
    found: dict[str, dict[str, StoredObject]],
    dry_run: bool,
) -> Iterator[Removed]:
    """Takes the markers of those that are too many."""
    of_dag: dict[str, list[tuple[float, str, Any]]] = defaultdict(list)
    for publication, objects in found.items():
        if SUCCESS in objects:
            marker = _marker(store.at(publication).read_bytes(SUCCESS))
            if isinstance(dag_id := marker.get("dag_id"), str):
                entry = (objects[SUCCESS].modified, publication, marker.get("keep"))
                of_dag[dag_id].append(entry)
    named = _named(store, listed)
    for published in of_dag.values():
        published.sort(reverse=True)
        keep = published[0][2]  # as the manifest says now
        if not isinstance(keep, int) or keep < 1:
            continue
        for _, publication, _ in published[keep:]:
            if publication in named:
                continue
            target = store.at(publication)
            nbytes = sum(obj.size for obj in found[publication].values())
            yield Removed("publication", target.uri, nbytes)
            if not dry_run:
                target.put_bytes(_RETIRED, target.read_bytes(SUCCESS))
                target.delete([SUCCESS])


def _named(store: ObjectStore, listed: list[StoredObject]) -> set[str]:
    """The publications that are named by a pointer of any DAG, as the pointers are now."""
    named: set[str] = set()
    for obj in listed:
        dag_id, _, name = obj.key.partition("/")
        if name == f"{LATEST}.json" and (pointer := read_pointer(store, dag_id, LATEST)):
            named.add(pointer["publication"])
        if name == f"{PRODUCTION}.json" and (pointer := read_pointer(store, dag_id, PRODUCTION)):
            every = (pointer, *pointer["before"], *pointer["history"])
            named |= {one["publication"] for one in every}
    return named


def _marker(body: bytes) -> dict[str, Any]:
    try:
        marker = json.loads(body)
    except ValueError:
        return {}
    return marker if isinstance(marker, dict) else {}
