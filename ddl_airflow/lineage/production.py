"""Which of a DAG's trainings is the newest, and which one serves: pointers beside them.

``<results>/<dag id>/latest.json`` and ``production.json`` are small objects, each written by one
request, so a reader finds the one before or the one after, never half of one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ddl_airflow.core.errors import NoSuchModel
from ddl_airflow.storage.store import SUCCESS, ObjectStore

LATEST = "latest"
PRODUCTION = "production"
SCHEMA = "ddl-airflow/pointer/1"
_KEPT = 20  # earlier ones to go back to


def read_pointer(store: ObjectStore, dag_id: str, name: str) -> dict[str, Any] | None:
    """The pointer, None if nothing was published or promoted yet.

    Args:
        store: of the results.
        dag_id: whose trainings.
        name: ``latest`` or ``production``.

    Returns:
        training_id, model (its URI), metrics, made_of, set (time, ISO 8601) and before: the same
        of earlier trainings, the newest first, and whether each was withdrawn.
    """
    key = _key(dag_id, name)
    if not store.exists(key):
        return None
    pointer: dict[str, Any] = json.loads(store.read_bytes(key))
    return pointer


def point(
    store: ObjectStore,
    dag_id: str,
    name: str,
    training_id: str,
    metrics: Mapping[str, float],
    *,
    made_of: Mapping[str, Any] | None = None,
    withdraw: bool = False,
) -> dict[str, Any]:
    """Lets the pointer name a published training, and returns it.

    To name again what was named before changes nothing, unless it was trained again meanwhile: to
    go back there is ``rollback``.

    Args:
        metrics: of its model.
        made_of: dataset (fingerprint), code and manifest (digests) and parameters.
        withdraw: whether the one named so far is not to be gone back to.
    """
    now = read_pointer(store, dag_id, name)
    said = {"metrics": dict(metrics), "made_of": dict(made_of or {})}
    if now is not None and any(
        one["training_id"] == training_id and said == {field: one[field] for field in said}
        for one in (now, *(() if withdraw else now["before"]))
    ):
        return now
    before = [] if now is None else [_entry(now, withdraw), *now["before"]]
    pointer = {
        "schema": SCHEMA,
        "training_id": training_id,
        "model": f"{store.uri}/{training_id}/model",
        **said,
        "set": datetime.now(UTC).isoformat(timespec="seconds"),
        "before": [one for one in before if one["training_id"] != training_id][:_KEPT],
    }
    body = json.dumps(pointer, indent=2, sort_keys=True) + "\n"
    store.put_bytes(_key(dag_id, name), body.encode())
    return pointer


def rollback(store: ObjectStore, dag_id: str, to: str = "") -> dict[str, Any]:
    """Lets production name the training before, and returns the pointer.

    Args:
        to: another one that was in production; empty: the newest that was not withdrawn by going
            back from it.

    Raises:
        NoSuchModel: there is none before, it was never in production, or it is no longer there.
    """
    now = read_pointer(store, dag_id, PRODUCTION)
    if now is None:
        raise NoSuchModel(f"{store.uri}/{dag_id}: no training of this DAG was ever in production.")
    known = {one["training_id"]: one for one in now["before"]}
    wanted = to or next((name for name, one in known.items() if not one["withdrawn"]), "")
    if wanted not in known:
        listed = ", ".join(known) or "none"
        asked = f"{wanted} was not" if wanted else "no other training was"
        raise NoSuchModel(
            f"{store.uri}/{dag_id}: {asked} in production before. There is: {listed}."
        )
    if not store.at(wanted).exists(SUCCESS):
        raise NoSuchModel(f"{store.uri}/{wanted} is no longer there. Choose another with --to.")
    one = known[wanted]
    return point(
        store,
        dag_id,
        PRODUCTION,
        wanted,
        one["metrics"],
        made_of=one["made_of"],
        withdraw=True,
    )


def _key(dag_id: str, name: str) -> str:
    return f"{dag_id}/{name}.json"


def _entry(pointer: Mapping[str, Any], withdrawn: bool) -> dict[str, Any]:
    kept = {name: pointer[name] for name in ("training_id", "model", "metrics", "made_of", "set")}
    return kept | {"withdrawn": withdrawn}
