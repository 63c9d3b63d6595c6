"""Whether what lies in a place of results is what was published there, and what its evidence says.

Each byte of a publication is under a digest: files under ``lineage.json`` and the marker's list,
the record and the signature under the marker's, the marker under its own, and what that lists under
the name of the place. Whoever changes all of them is found by the signature, if there is one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

from ddl_airflow.core.errors import DAMAGED, ObjectArchived, SourceMissing, TransferCorrupt
from ddl_airflow.core.layout import OWN_EXPERIMENT
from ddl_airflow.evidence import bom, croissant, provenance
from ddl_airflow.evidence.names import BOM, CURVES, DATASET, EVIDENCE, PROVENANCE, SIGNATURE
from ddl_airflow.evidence.signature import UNSIGNED, check, signer
from ddl_airflow.lineage.record import LINEAGE
from ddl_airflow.storage.marker import is_as_sealed
from ddl_airflow.storage.publication import PUBLICATION, content_of
from ddl_airflow.storage.store import RETIRED, SUCCESS, ObjectStore, StoredObject, why_archived

# Of the marker that uploads write. Another name is a changed one.
_OF_MARKER = {"dag_id", "training_id", "manifest", "keep", "files", "marked", "digest"}


_LARGEST = 2**30  # bytes of a file of ours that is held in memory


@dataclass
class Verdict:
    """What was found.

    Attributes:
        problems: sentences on each file that is not as it was published, by its key.
        notes: what could not be looked at, and why.
        files: how many were read.
        archived: keys of those that nobody can read before they are restored; problems, too.
        not_made: evidence that the publication never had, and why, by its key.
        gone: what else the training has published and is not there as a whole, and who knows of it,
            by its place.
        signed: whether the signature was verified, with the key that was given.
        signer: SHA-256 of the public key that the signature says to be for; empty: none.
    """

    problems: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    archived: set[str] = field(default_factory=set)
    not_made: dict[str, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)
    signed: bool = False
    signer: str = ""

    def add(self, key: str, problem: str) -> None:
        """Notes a problem of a file."""
        self.problems.setdefault(key, []).append(problem)


@dataclass(frozen=True)
class _Read:
    """An object that was read: its SHA-256 in hex; and of files of ours, if small, the content."""

    sha256: str
    body: bytes = b""


_CORRUPT, _COLD = _Read("corrupt"), _Read("archived")


def verify(
    publication: ObjectStore, public_key: Path | None = None, *, readers: int = 8
) -> Verdict:
    """Reads every object of a publication, and holds it against all that is said of it.

    Args:
        publication: its place; nothing else may lie there.
        public_key: PEM, of whoever is to have signed it; None: no signature is asked for.
        readers: objects that are read at once. Nothing is written to disk.

    Raises:
        StagingError: the store cannot be read.
        OSError: the key cannot.
    """
    found = Verdict()
    listed = publication.list()
    there = _read_all(publication, listed, found, readers)
    found.files = len(there)
    marked = _marked(there, found)
    record = _record(there.get(LINEAGE), marked, found)
    recorded = (
        None if record is None else {f["key"]: f["sha256"] for f in record["result"]["files"]}
    )
    if record is not None and marked is not None:
        _compare(record, marked, found)
    expected = marked[0] if marked is not None else recorded
    if expected is not None:
        ours = {SUCCESS if SUCCESS in there else RETIRED}
        if SUCCESS in there and RETIRED in there and there[SUCCESS] == there[RETIRED]:
            found.notes.append(
                f"{RETIRED} is beside {SUCCESS}: cleaning, or its undoing, was cut off"
            )
            ours.add(RETIRED)
        ours |= {LINEAGE, SIGNATURE} if marked is None else set()
        for key in sorted({obj.key for obj in listed} - expected.keys() - ours):
            found.add(key, "it was not published with the rest")
        for key, sha256 in sorted(expected.items()):
            if key in there and there[key].sha256 != sha256:
                found.add(key, "it is not the file that was published")
            elif key not in there and key not in found.problems:
                found.add(key, "it is gone")
    elif LINEAGE not in there and LINEAGE not in found.problems:
        found.add(LINEAGE, "it is gone")
    _check_place(publication.uri, marked, record, found)
    if record is not None:
        _check_evidence(record, there, found)
    _check_signature(there, public_key, found)
    return found


def _read_all(
    publication: ObjectStore, listed: Sequence[StoredObject], found: Verdict, readers: int
) -> dict[str, _Read]:
    def read(obj: StoredObject) -> _Read | None:
        """None: it was removed since it was listed."""
        ours = obj.key in (SUCCESS, RETIRED, LINEAGE) or obj.key.startswith(EVIDENCE)
        kept = bytearray() if ours and obj.size <= _LARGEST else None
        digest = hashlib.sha256()

        def take(chunk: bytes) -> None:
            digest.update(chunk)
            if kept is not None:
                kept.extend(chunk)

        try:
            publication.read(obj, take)
        except TransferCorrupt:
            return _CORRUPT
        except ObjectArchived:
            return _COLD
        except SourceMissing:
            return None
        return _Read(digest.hexdigest(), bytes(kept or b""))

    there = {}
    with ThreadPoolExecutor(max(1, readers)) as pool:
        reading = [pool.submit(read, obj) for obj in listed]
        try:
            for obj, one in zip(listed, reading, strict=True):
                if (was := one.result()) is _CORRUPT:
                    found.add(obj.key, "what is read is not what its store lists")
                elif was is _COLD:
                    found.add(obj.key, f"it is {why_archived(obj.archived)}")
                    found.archived.add(obj.key)
                elif was is not None:
                    there[obj.key] = was
        except BaseException:  # the store cannot be read: nobody waits for the rest of it
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return there


def _marked(there: Mapping[str, _Read], found: Verdict) -> tuple[dict[str, str], Any] | None:
    """SHA-256 by key, as the marker says, and all that it says; None: it cannot be believed."""
    key = SUCCESS
    if SUCCESS not in there:
        if SUCCESS not in found.problems:
            withdrawn = "it is gone: cleaning has withdrawn what was published here"
            found.add(SUCCESS, withdrawn if RETIRED in there else "it is gone")
        key = RETIRED
    if key not in there:
        return None
    try:
        whole = is_as_sealed(there[key].body)
        marker = json.loads(there[key].body)
        digests = {str(file["key"]): str(file["sha256"]) for file in marker["files"]}
        if whole is False or marker.keys() - _OF_MARKER:
            raise ValueError("it was changed since")
    except DAMAGED as error:
        found.add(key, f"it is not as it was written ({type(error).__name__}: {error})")
        return None
    if whole is None:
        found.notes.append(f"{key} has no digest of its own: an earlier version wrote it")
    return digests, marker


def _record(
    read: _Read | None, marked: tuple[dict[str, str], Any] | None, found: Verdict
) -> dict[str, Any] | None:
    if read is None or (marked is not None and marked[0].get(LINEAGE) != read.sha256):
        return None  # which is said with the other files
    try:
        record: dict[str, Any] = json.loads(read.body)
        _ = {str(file["key"]): str(file["sha256"]) for file in record["result"]["files"]}
        _ = record["training_id"], record["run"]["dag_id"], record["manifest"]["digest"]
        _ = record["dataset"]["uri"]
    except DAMAGED as error:
        found.add(LINEAGE, f"it is no lineage ({type(error).__name__}: {error})")
        return None
    return record


def _compare(record: Mapping[str, Any], marked: tuple[dict[str, str], Any], found: Verdict) -> None:
    """Both are whole, and have to say the same."""
    digests, marker = marked
    listed = {key: sha256 for key, sha256 in digests.items() if key not in (LINEAGE, SIGNATURE)}
    if listed != {file["key"]: file["sha256"] for file in record["result"]["files"]}:
        found.add(LINEAGE, f"its files are not those of {SUCCESS}")
    for name, said in (
        ("training_id", record["training_id"]),
        ("dag_id", record["run"]["dag_id"]),
        ("manifest", record["manifest"]["digest"]),
    ):
        if marker.get(name, said) != said:
            found.add(SUCCESS, f"its {name} is not that of {LINEAGE}")


def _check_place(
    uri: str,
    marked: tuple[dict[str, str], Any] | None,
    record: Mapping[str, Any] | None,
    found: Verdict,
) -> None:
    """Whose publication lies there: ``<training id>/<digest of its content>-<token>``. One that is
    whole, but another's, is not what was asked for.
    """
    *_, above, name = ("", *unquote(uri).split("/"))
    named = re.fullmatch(PUBLICATION, name)
    if named and marked is not None:
        try:
            files = marked[1]["files"]
            content = content_of({f["key"]: (f["sha256"], f["size"]) for f in files})
        except (LookupError, TypeError):
            content = ""
        if content != named["content"]:
            key = SUCCESS if SUCCESS not in found.problems else RETIRED
            found.add(key, f"it lists other content than that after which {name} is named")
    if record is None:
        return
    owner = str(record["training_id"])
    if owner in (above, name):
        return
    if re.fullmatch(OWN_EXPERIMENT, above):  # as trainings are named
        found.add(LINEAGE, f"it is of training {owner}, and not of {above}")
    else:
        found.notes.append(
            f"nothing but what lies here says that it is of training {owner}: the place is not "
            "named so"
        )


def _check_evidence(record: Mapping[str, Any], there: Mapping[str, _Read], found: Verdict) -> None:
    """Holds each file against its schema, and against the record."""
    evidence = record.get("evidence")
    if evidence is None:
        found.notes.append("no evidence was published: an earlier version of ours did not make it")
        return
    try:
        made, found.not_made = list(map(str, evidence["made"])), dict(evidence["not_made"])
    except DAMAGED as error:
        found.add(LINEAGE, f"what it says of evidence cannot be read ({type(error).__name__})")
        return
    for key in made:
        if key not in there:
            if key not in found.problems:
                found.add(key, f"{LINEAGE} says that it was made, and it is not there")
            continue
        if key in found.problems:
            continue
        try:
            for problem in _wrong_in(key, there[key].body.decode(), record):
                found.add(key, problem)
        except ModuleNotFoundError as error:
            why = f"there is no module {error.name!r}. Install the extra `evidence`"
            found.notes.append(f"{key} was not held against its schema: {why}")
        except DAMAGED as error:
            found.add(key, f"it cannot be read ({type(error).__name__}: {error})")


def _wrong_in(key: str, text: str, record: Mapping[str, Any]) -> list[str]:
    if key == BOM:
        return bom.problems_of(text)
    if key == PROVENANCE:
        return provenance.problems_of(text, record)
    if key == DATASET:
        return croissant.problems_of(json.loads(text), record)
    if key == CURVES:
        if "<!" in text:  # entities, which could grow without an end
            return ["it declares what no picture of ours does"]
        try:
            ElementTree.fromstring(text)  # noqa: S314
        except ElementTree.ParseError as error:
            return [f"it is no SVG: {error}"]
    return []


def _check_signature(there: Mapping[str, _Read], public_key: Path | None, found: Verdict) -> None:
    signature = there.get(SIGNATURE)
    if signature is not None:
        found.signer = signer(signature.body)
    if public_key is None:
        if signature is not None:
            found.notes.append("it is signed, and nobody said whose key to expect: give --key")
        return
    if signature is None:
        if SIGNATURE not in found.problems:
            found.add(SIGNATURE, "nobody signed what was published")
        return
    unsigned = {*UNSIGNED, RETIRED}
    digests = {key: read.sha256 for key, read in there.items() if key not in unsigned}
    try:
        wrong = check(signature.body, digests, public_key)
    except ModuleNotFoundError as error:
        why = f"there is no module {error.name!r}. Install the extra `evidence`"
        wrong = {SIGNATURE: f"it cannot be verified here: {why}"}
    for key, problem in wrong.items():
        if key not in found.archived:  # its signature cannot be held against it, either
            found.add(key, problem)
    found.signed = not wrong and not found.problems.keys() - {SUCCESS}
