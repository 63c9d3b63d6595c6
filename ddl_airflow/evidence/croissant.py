"""The dataset as Croissant 1.0 describes it (docs.mlcommons.org/croissant): JSON-LD.

Written here, and held against ``mlcroissant`` in the tests: that library asks for pandas, scipy and
rdflib, 200 MB, to write a page of JSON.
"""

from __future__ import annotations

import hashlib
import mimetypes
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ddl_airflow.core.beneath import open_beneath
from ddl_airflow.core.errors import StagingError
from ddl_airflow.evidence.names import hexadecimal

VERSION = "http://mlcommons.org/croissant/1.0"
# Bytes that are read once more for their digests, at most: of objects whose SHA-256 nobody made
# when they were staged, and other digests Croissant does not take.
_MOST_BYTES = 4 * 2**30
_MOST_OBJECTS = 10_000
_CR = "cr:"
_OWN = (
    *("citeAs", "column", "extract", "field", "fileProperty", "fileObject", "fileSet", "format"),
    *("includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet"),
    *("references", "regex", "repeated", "replace", "samplingRate", "separator", "source"),
    *("subField", "transform", "equivalentProperty"),
)
# Their standard one: the validator says so of any other.
_CONTEXT: Mapping[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{name: _CR + name for name in _OWN},
}


def described(record: Mapping[str, Any], staged: Path, cache: Path) -> dict[str, Any]:
    """The description of what a training was given.

    Args:
        record: as ``lineage.json`` has it.
        staged: the folder with the data.
        cache: the folder into which links in that lead, and nowhere else.

    Raises:
        StagingError: it is too much to be read again, or not there any more as it was staged.
    """
    roots = [Path(os.path.realpath(root)) for root in (staged, cache)]
    data = record["dataset"]
    listing = data.get("listing", ())
    unknown = [one for one in listing if "sha256" not in one]
    nbytes = sum(one["size"] for one in unknown)
    if nbytes > _MOST_BYTES or len(unknown) > _MOST_OBJECTS:
        raise StagingError(
            f"{len(unknown)} objects of {nbytes / 2**30:.1f} GiB would be read again for their "
            f"SHA-256; at most {_MOST_OBJECTS} of {_MOST_BYTES // 2**30} GiB are"
        )
    name = record["manifest"].get("name") or record["run"]["dag_id"]
    return {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": VERSION,
        "name": f"Data of {name}",
        "description": (
            f"What training {record['training_id']} was given. Digest of its listing: "
            f"{data['fingerprint']}"
        ),
        "url": data["uri"],
        "version": f"0.0.0+{hexadecimal(data['fingerprint'])}",
        # Keys can be what no identifier may.
        "distribution": [
            {"@id": f"object-{number}", **_object(one, data["uri"], staged, roots)}
            for number, one in enumerate(listing)
        ],
    }


def problems_of(described: Mapping[str, Any], record: Mapping[str, Any]) -> list[str]:
    """What a description is not, of what ``described`` writes for a record."""
    found = []
    if described.get("conformsTo") != VERSION or described.get("@type") != "sc:Dataset":
        found.append(f"it is no description by {VERSION}")
    if described.get("url") != record["dataset"]["uri"]:
        found.append("it is of another dataset than lineage.json")
    wanted = sorted(_entry(one) for one in record["dataset"].get("listing", ()))
    there = described.get("distribution", ())
    if sorted((one.get("name"), one.get("contentSize")) for one in there) != wanted:
        found.append("its files are not those of lineage.json")
    return found


def _entry(obj: Mapping[str, Any]) -> tuple[str, str]:
    return obj["key"], f"{obj['size']} B"


def _object(
    obj: Mapping[str, Any], uri: str, staged: Path, roots: Iterable[Path]
) -> dict[str, Any]:
    key, size = _entry(obj)
    return {
        "@type": "cr:FileObject",
        "name": key,
        "contentUrl": f"{uri}/{quote(key)}",
        "contentSize": size,
        "encodingFormat": mimetypes.guess_type(key)[0] or "application/octet-stream",
        "sha256": obj.get("sha256") or _digest(staged / key, obj, roots),
    }


def _digest(path: Path, obj: Mapping[str, Any], roots: Iterable[Path]) -> str:
    with open(_opened(path, obj["key"], roots), "rb") as file:
        if os.fstat(file.fileno()).st_size != obj["size"]:
            raise StagingError(f"{obj['key']} was changed since it was staged")
        return hashlib.file_digest(file, "sha256").hexdigest()


def _opened(path: Path, key: str, roots: Iterable[Path]) -> int:
    """A script may have put a link there: to what Airflow can read, and the script cannot."""
    target = Path(os.path.realpath(path))
    root = next((one for one in roots if target.is_relative_to(one)), None)
    if root is None:
        raise StagingError(f"{key} leads out of the staged data")
    try:
        return open_beneath(target, root)
    except FileNotFoundError:
        raise StagingError(f"{key} is not there any more") from None
