"""Why two models differ: what their records, and the code published with them, say."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ddl_airflow.core.manifest.digest import earlier_digests
from ddl_airflow.core.metrics import Measurement

CODE = "code/"  # among what is published: the scripts that ran
_LONGEST = 2**20  # bytes of a script that is compared by its lines
# Of two scripts together: the work may grow with their square.
_MOST_LINES = 10_000

Record = Mapping[str, Any]
# Gives the text of a published file of one side.
Reader = Callable[[str], bytes]


def compare(one: Record, other: Record, read: tuple[Reader, Reader]) -> dict[str, Any]:
    """What is different between two trainings.

    Args:
        one, other: their records.
        read: gives published files of each, by key.

    Returns:
        ``data``: uri and fingerprint of both, and added, removed and changed keys of the listing.
        ``code``: digest and git_commit of both; added, removed and changed files; ``diff``, its
        lines in unified form, None where the scripts were not published.
        ``manifest``: digest of both. ``parameters`` and ``environment``: those that differ, by
        name, as a pair. ``metrics``: all, by name and source, as a pair; None where one has none.
        ``data``, ``code`` and ``manifest`` have ``same``.

    Raises:
        LookupError, TypeError: one is no record.
        StagingError: as ``read`` does.
    """
    return {
        "data": _data(one["dataset"], other["dataset"]),
        "code": _code(one, other, read),
        "manifest": _manifest(one["manifest"], other["manifest"]),
        "parameters": dict(_differing(one["run"]["parameters"], other["run"]["parameters"])),
        "environment": compared_environments(one["environment"], other["environment"]),
        "metrics": _metrics(one["result"], other["result"]),
    }


def compared_environments(one: Record, other: Record) -> dict[str, list[Any]]:
    """What is different between the environments of two trainings, as ``compare`` has it."""
    return dict(_differing(_flat(one), _flat(other)))


def _data(one: Record, other: Record) -> dict[str, Any]:
    listings = [
        {o["key"]: (o["size"], o["etag"]) for o in side["listing"]} for side in (one, other)
    ]
    pairs = _pairs(one, other, ("uri", "fingerprint", "files", "bytes"))
    return pairs | {"same": one["fingerprint"] == other["fingerprint"]} | _keys(*listings)


def _code(one: Record, other: Record, read: tuple[Reader, Reader]) -> dict[str, Any]:
    pairs = _pairs(one["code"], other["code"], ("digest", "git_commit"))
    pairs["same"] = one["code"]["digest"] == other["code"]["digest"]
    published = [
        {
            file["key"].removeprefix(CODE): file["sha256"]
            for file in side["result"]["files"]
            if file["key"].startswith(CODE) and file["key"].removeprefix(CODE) in staged
        }
        for side in (one, other)
        for staged in [set(side["code"]["files"])]
    ]
    if not all(published):
        names = [dict.fromkeys(side["code"]["files"]) for side in (one, other)]
        return pairs | _keys(*names) | {"diff": [] if pairs["same"] else None}
    changes = _keys(*published)
    lines: list[str] = []
    for name in sorted(set().union(*changes.values())):
        before, after = (
            _text(reader(CODE + name)) if name in there else []
            for reader, there in zip(read, published, strict=True)
        )
        if before is None or after is None or len(before) + len(after) > _MOST_LINES:
            lines.append(f"{name} differs; it is no text, or too long")
        else:
            lines += difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm="")
    return pairs | changes | {"diff": lines}


def _manifest(one: Record, other: Record) -> dict[str, Any]:
    pairs = _pairs(one, other, ("name", "digest"))
    # An earlier version of ours called the same manifest otherwise.
    known = [
        {side["digest"], *earlier_digests(side["said"])}
        if isinstance(side.get("said"), dict)
        else {side["digest"]}
        for side in (one, other)
    ]
    same = one["digest"] in known[1] or other["digest"] in known[0]
    return pairs | {"same": one.get("name") == other.get("name") and same}


def _text(body: bytes) -> list[str] | None:
    if len(body) > _LONGEST or b"\0" in body:
        return None
    return body.decode("utf-8", "replace").splitlines()


def _metrics(one: Record, other: Record) -> dict[str, dict[str, Any]]:
    told: dict[str, dict[str, Any]] = {}
    for place, side in enumerate((one, other)):
        known = side.get("measurements") or [
            Measurement(name, value).dump() for name, value in side["metrics"].items()
        ]
        for measured in known:
            name = measured["metric"]
            if source := measured.get("source"):
                name += f" ({source}{' ' + measured['file'] if measured.get('file') else ''})"
            told.setdefault(name, {"values": [None, None]})["values"][place] = measured["value"]
    return told


def _pairs(one: Record, other: Record, names: tuple[str, ...]) -> dict[str, Any]:
    pairs: dict[str, Any] = {name: [one.get(name), other.get(name)] for name in names}
    return pairs | {"same": all(first == second for first, second in pairs.values())}


def _keys(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[str]]:
    return {
        "added": sorted(other.keys() - one.keys()),
        "removed": sorted(one.keys() - other.keys()),
        "changed": sorted(key for key in one.keys() & other.keys() if one[key] != other[key]),
    }


def _differing(one: Record, other: Record) -> Iterator[tuple[str, list[Any]]]:
    for name in sorted(one.keys() | other.keys()):
        if one.get(name) != other.get(name):
            yield name, [one.get(name), other.get(name)]


def _flat(facts: Record, prefix: str = "") -> dict[str, Any]:
    """``{"versions": {"keras": 3}}`` as ``{"versions.keras": 3}``."""
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
