"""A folder that would make a model again, of its record and what was published with it.

What a record says may be anybody's who may write to the results: nothing of it is written outside
the folder. Whoever trains with it runs their code.
"""

from __future__ import annotations

import copy
import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ddl_airflow.core.errors import DdlError, SourceMissing, TransferCorrupt
from ddl_airflow.core.layout import OWN_EXPERIMENT
from ddl_airflow.core.manifest.convert import rewritten
from ddl_airflow.core.manifest.digest import digest, earlier_digests
from ddl_airflow.core.manifest.sections.definition import split_commands
from ddl_airflow.core.selection import Selection
from ddl_airflow.lineage.compare import CODE
from ddl_airflow.storage import checksums
from ddl_airflow.storage.checksums import CRCS
from ddl_airflow.storage.code import digest_of
from ddl_airflow.storage.fingerprint import DigestOfParts, object_sha256
from ddl_airflow.storage.staging import dataset_of
from ddl_airflow.storage.store import ObjectStore, StoredObject, check_keys

Record = Mapping[str, Any]
MANIFEST = "manifest.yml"
DATA = "data"  # the folder's name, unless the scripts have one of that name
_FILE = "file://"
_MOST_NAMED = 5


@dataclass(frozen=True)
class DataChanges:
    """How data differ from what they were: keys, each sorted; and of which only the size is known
    to be what it was.
    """

    gone: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def refuse(self, uri: str) -> None:
        """Raises SourceMissing, which names what is not there any more, if anything is not."""
        said = []
        for what, keys in (("gone", self.gone), ("not what they were", self.changed)):
            if keys:
                more = f" and {len(keys) - _MOST_NAMED} more" * (len(keys) > _MOST_NAMED)
                said.append(f"{', '.join(keys[:_MOST_NAMED])}{more} (of the data: {what})")
        if said:
            raise SourceMissing(
                f"{uri}: {'; '.join(said)}. Give a folder that has the data as they were: "
                "--data DIR."
            )


def recorded_manifest(record: Record) -> dict[str, Any]:
    """What the record says of the manifest, as ``Manifest.said`` has it.

    Raises:
        SourceMissing: nothing, as of a version before, or of a DAG in Python.
        DdlError: it is not what the digest beside it is of.
    """
    manifest = record["manifest"]
    said = manifest.get("said")
    if not isinstance(said, dict):
        raise SourceMissing(
            "the record has no manifest: it was published by an earlier version, or by a DAG that "
            "is written in Python; or a command of it may have held a secret, such as "
            "HF_TOKEN=…, which is not published."
        )
    if manifest["digest"] not in (digest(said), *earlier_digests(said)):
        raise DdlError("the manifest in the record is not what the digest beside it is of.")
    return said


def manifest_text(record: Record, *, data: str = "", prove: bool = False) -> str:
    """The manifest that would make the model again: with the values of its run as the defaults.

    It has no schedule, and tells nobody; keys are ``${NAME}``.

    Args:
        record: of the model.
        data: a folder that has the data, in place of where they were.
        prove: whether digests of the weights are to be noted.

    Raises:
        DdlError: the record has none, or a damaged one.
    """
    fields: dict[str, Any] = copy.deepcopy(recorded_manifest(record))
    try:
        _with_values(fields, record)
        reference, uri = fields["training_data_reference"], record["dataset"]["uri"]
        if not data and uri.startswith(_FILE):
            # Where it was: the manifest lies elsewhere now, or the run was told of another folder.
            data = unquote(uri[len(_FILE) :])
        if data:
            reference |= {"type": "fs", "source": {"path": data}}
            reference.pop("connection", None)
        if prove:
            fields["lineage"] = {"prove": True}
        head = f"Of {record['training_id']}, by ddl-airflow rerun."
        return rewritten(fields, head)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise DdlError(f"the record has a damaged manifest ({error!r}).") from error


def _with_values(fields: dict[str, Any], record: Record) -> None:
    values = record["run"]["parameters"]
    for name, one in fields.get("parameters", {}).items():
        if name in values and not one.get("secret"):
            one["default"] = values[name]
    compute = fields["model_definition"]["execution"]["compute_configuration"]
    compute["nodes"] = values.get("nodes", compute.get("nodes", 1))
    own = fields.get("launcher", {}).get("kind", "local")
    if values.get("launcher", own) != own:
        fields["launcher"] = {"kind": values["launcher"]}
    environment = record.get("environment", {})
    if environment.get("launcher") == own and "image" in fields.get("launcher", {}):
        # A tag may mean another image by now. It is pulled from where the manifest says, as before:
        # a node may name a mirror of its own.
        found = environment.get("images") or []
        by_digest = [re.fullmatch(r"[^\s@]+(@sha256:[0-9a-f]{64})", str(one)) for one in found]
        digests = {one and one[1] for one in by_digest}
        if len(digests) == 1 and (only := digests.pop()):
            place = re.sub(r"(:[\w.-]+)?(@[^@]*)?$", "", fields["launcher"]["image"])
            fields["launcher"]["image"] = f"{place}{only}"
    slots = environment.get("slots") if environment.get("distribution") == "mpi" else None
    if isinstance(slots, int) and slots > 0:
        # As many ranks on a node as there were, whatever this site's table of devices says.
        fields.setdefault("launcher", {"kind": "local"}).setdefault("slots", slots)
    built_in = len(split_commands(fields["model_definition"]["execution"]["command"])) == 1
    if built_in and "checkpoint" in values:
        checkpoint = str(values["checkpoint"])
        fields.setdefault("transform", {})["checkpoint"] = (
            int(checkpoint) if checkpoint.isdecimal() else checkpoint
        )
    experiment = values.get("experiment_id") or ""
    if re.fullmatch(OWN_EXPERIMENT, experiment):  # elsewhere there is no such training
        fields.pop("experiment", None)
    elif experiment:
        fields["experiment"] = experiment


def fetch_code(record: Record, store: ObjectStore, folder: Path) -> None:
    """Fetches the scripts that ran, and holds them to the record.

    Args:
        record: of the model.
        store: of the publication.
        folder: where they go; it need not exist.

    Raises:
        SourceMissing: they were not published, or some are gone.
        TransferCorrupt: they are not what was published.
    """
    names = list(map(str, record["code"]["files"]))
    check_keys(names, store.uri)
    published = {file["key"]: file["sha256"] for file in record["result"]["files"]}
    if missing := [name for name in names if CODE + name not in published]:
        raise SourceMissing(
            f"{store.uri}: the scripts were not published with the model ({missing[0]} was not). "
            f"They were of git commit {record['code'].get('git_commit') or 'unknown'}."
        )
    for name in names:
        body = store.read_bytes(CODE + name)
        if hashlib.sha256(body).hexdigest() != published[CODE + name]:
            raise TransferCorrupt(f"{store.uri}/{CODE}{name} is not the file that was published.")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        if body.startswith(b"#!"):  # the record has no modes
            path.chmod(path.stat().st_mode | 0o100)
    if digest_of({name: folder / name for name in names}) != record["code"]["digest"]:
        raise TransferCorrupt(f"{store.uri}/{CODE} is not the code that the record is of.")


def data_folder(record: Record) -> str:
    """A name for the data beside the manifest that none of the scripts has."""
    paths = (posixpath.join(code_folder(record), name) for name in record["code"]["files"])
    taken = {posixpath.normpath(path).partition("/")[0] for path in paths}
    names = chain([DATA], (f"{DATA}-{number}" for number in count(2)))
    return next(name for name in names if name not in taken)


def code_folder(record: Record) -> str:
    """Where the scripts lie beside the manifest: what it calls ``code``."""
    return str(recorded_manifest(record).get("code", "./"))


def data_changes(
    record: Record, store: ObjectStore, selection: Selection, *, copied: bool = False
) -> DataChanges:
    """How the data in a store differ from those of the record.

    One that has another ETag, as in a copy, is read, where the record has its digest: one of its
    own, its CRC, or as the ETag that a bucket gave it. An ETag need not be one: with keys of a key
    service it is none, and of parts it is only known where their size is. What was found out of
    that when the data were staged is in the record, too.

    Args:
        record: of the model.
        store: where the data are.
        selection: which of what is there would be trained with.
        copied: whether somebody says that they are a copy: then of what has another ETag, and no
            digest, it is not known whether it has changed; else it is taken to have.

    Raises:
        StagingError: as ``ObjectStore`` does.
    """
    before = {str(one["key"]): one for one in record["dataset"]["listing"]}
    try:
        now = {obj.key: obj for obj in dataset_of(store, store.list()).objects}
    except SourceMissing:
        return DataChanges(gone=tuple(sorted(before)))
    others = {key: _is_changed(one, now[key], store) for key, one in before.items() if key in now}
    unknown = [key for key, is_another in others.items() if is_another is None and copied]
    changed = [key for key, is_another in others.items() if is_another is not False]
    try:
        selected = {obj.key for obj in selection.of(now.values(), store.uri)}
    except SourceMissing:  # what a pattern has matched is gone
        selected = set()
    return DataChanges(
        tuple(sorted(before.keys() - now.keys())),
        tuple(sorted({*changed} - {*unknown})),
        tuple(sorted(selected - before.keys())),
        tuple(sorted(unknown)),
    )


def _is_changed(before: Record, now: StoredObject, store: ObjectStore) -> bool | None:
    """None: it has the size that it had, and nothing tells more."""
    etag = str(before["etag"])
    if (before["size"], etag) == (now.size, now.etag):
        return False
    if before["size"] != now.size:
        return True
    if "sha256" in before:
        return object_sha256(store, now) != str(before["sha256"])
    for name in CRCS:
        if name in before:
            crc = checksums.new(name)
            store.read(now, crc.update)
            return crc.hexdigest() != str(before[name])
    digests, known = _digests_of(before, now.size)
    if not digests:
        return None

    def take(chunk: bytes | memoryview) -> None:
        for one in digests:
            one.update(chunk)

    store.read(now, take)
    if etag in {one.hexdigest() for one in digests}:
        return False
    return True if known else None


def _digests_of(before: Record, size: int) -> tuple[list[Any], bool]:
    """What an object's ETag may be: the MD5 of its content, or that of parts of some size; and
    whether it is known to be that. None of them: it is no digest.
    """
    from ddl_airflow.storage.s3_get import USUAL_PART_SIZES  # only who compares needs it

    match = re.fullmatch(r"[0-9a-f]{32}(?:-(\d{1,5}))?", str(before["etag"]))
    if match is None:
        return [], False
    known, part_size = before.get("etag_is") == "md5", before.get("part_size")
    if match[1] is None:
        return [hashlib.md5(usedforsecurity=False)], known
    known = known and isinstance(part_size, int) and part_size > 0
    sizes: tuple[Any, ...] = (part_size,) if known else USUAL_PART_SIZES
    parts = int(match[1])
    return [DigestOfParts(each) for each in sizes if -(-size // each) == parts], known


def objects_of(record: Record, store: ObjectStore) -> list[StoredObject]:
    """The objects of a store that are among the record's data."""
    known = {str(one["key"]) for one in record["dataset"]["listing"]}
    return [obj for obj in dataset_of(store, store.list()).objects if obj.key in known]


def other_content(record: Record, staged: Record) -> DataChanges:
    """Which files have other content than the record says, as they were staged now.

    Args:
        record: of the model.
        staged: of the run that staged them, with their digests.
    """
    now = {one["key"]: one.get("sha256") for one in staged["dataset"]["listing"]}
    changed = [
        str(one["key"])
        for one in record["dataset"]["listing"]
        if "sha256" in one and now.get(one["key"]) not in (None, one["sha256"])
    ]
    return DataChanges(changed=tuple(sorted(changed)))
