"""``ddl-airflow rerun``: what would make a model again, and the proof that it does."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddl_airflow import __version__
from ddl_airflow.commands.lineage import publication_at, read_record
from ddl_airflow.commands.options import Commands, takes_compute
from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.errors import (
    ConnectionInvalid,
    DdlError,
    SettingInvalid,
    SourceMissing,
    TransferCorrupt,
)
from ddl_airflow.core.layout import BY_HAND
from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.core.output import printable
from ddl_airflow.lineage.compare import compared_environments
from ddl_airflow.lineage.proof import KEY, Divergence, Note, divergence, read_notes, read_notes_of
from ddl_airflow.lineage.record import IS_WHOLE, MOST_BYTES
from ddl_airflow.lineage.rerun import (
    MANIFEST,
    DataChanges,
    code_folder,
    data_changes,
    data_folder,
    fetch_code,
    manifest_text,
    objects_of,
    other_content,
    recorded_manifest,
)
from ddl_airflow.lineage.story import described_beginnings
from ddl_airflow.local_run import Asked, data_of, log_to_terminal, run_manifest
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.fingerprint import fingerprint
from ddl_airflow.storage.staging import COMPLETE, Listing, readable, stage
from ddl_airflow.storage.store import ObjectStore

# Of a recorded environment, what a rank inherits and how it computes depends on.
_SETTINGS = (
    *("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
    *("TF_DETERMINISTIC_OPS", "TF_CUDNN_DETERMINISTIC", "TF_ENABLE_ONEDNN_OPTS"),
    *("NVIDIA_TF32_OVERRIDE", "DDL_GROUP_SIZE", "DDL_SPARSE_AS_DENSE", "DDL_WIRE_DTYPE"),
)
_MOST_TENSORS = 5


def add_to(commands: Commands) -> None:
    """Adds the commands of this file."""
    rerun = commands.add_parser(
        "rerun",
        help="make the folder that would make a model again; with --prove, train and compare",
        epilog="The folder has the manifest, with the values of the model's run, and the scripts "
        "that ran: for `ddl-airflow run`, or for Airflow's folder of DAGs. --prove runs them here. "
        "s3:// as for lineage, the data as for run. Ends with 1 where something is gone, or the "
        "model comes out another.",
    )
    rerun.add_argument("uri", help="s3://bucket/training_id, or the folder")
    rerun.add_argument(
        "--to", type=Path, metavar="DIR", help="the folder to make; default: rerun-<training_id>"
    )
    rerun.add_argument(
        "--data", type=Path, metavar="DIR", help="a folder that has the data as they were"
    )
    rerun.add_argument(
        "--prove",
        action="store_true",
        help="train again on the recorded data, and say whether the weights come out the same, or "
        "from which step and tensor on they do not",
    )
    rerun.add_argument("--json", action="store_true", help="for programs")
    takes_compute(rerun)
    rerun.set_defaults(run=_rerun)


def _rerun(options: argparse.Namespace) -> int:
    store = publication_at(options.uri)
    record = read_record(store)
    try:
        recorded_manifest(record)
        before = _notes_of(record, store) if options.prove else []
        folder = options.to or Path(f"rerun-{Path(record['training_id']).name}")
        if folder.exists() and any(folder.iterdir()):
            raise SettingInvalid(f"{folder} is there, and is not empty. Give another: --to DIR.")
        with _whole_or_removed(folder):
            path = _made(record, store, folder, options)
        if not options.prove:
            known = bool(_went_on_from(record).get("went_on_from"))
            would = f"begins without the checkpoints that it {'' if known else 'may have '}"
            would += "went on from" if known else "gone on from"
            lines = _began(record)
            said = f"{path} {would if lines else 'would make it again'}"
            _say(
                options.json,
                {"folder": str(folder), "manifest": str(path), **_went_on_from(record)},
                [f"{said}: ddl-airflow run {shlex.quote(str(path))}", *lines],
            )
            return 0
        with _kept_to_look_at(folder):
            return _prove(record, before, path, options)
    except (LookupError, TypeError, AttributeError) as error:
        raise DdlError(f"{store.uri} has no whole lineage ({error!r})") from error


@contextmanager
def _whole_or_removed(folder: Path) -> Iterator[None]:
    """Removes what was made of a folder that could not be made whole, for it would be taken for
    what makes the model again; and the folder, if it was not there.
    """
    made = [] if folder.exists() else [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        yield
    except BaseException:  # also Ctrl-C
        for path in [*folder.iterdir()] if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def _kept_to_look_at(folder: Path) -> Iterator[None]:
    """Says that the folder stays: whoever asks why there is no proof looks at the training's logs,
    or does the rest by hand.
    """
    try:
        yield
    except BaseException:
        print(
            f"ddl-airflow: {folder} stays, to be looked at: its manifest and scripts are whole, "
            f"and what was done with them is in {folder / BY_HAND}. Remove it when you are done.",
            file=sys.stderr,
        )
        raise


def _notes_of(record: Mapping[str, Any], store: ObjectStore) -> list[Note]:
    """What the training noted of its weights.

    Raises:
        SourceMissing: nothing, or it is gone.
        TransferCorrupt: it is not what was published.
        SettingInvalid: the training did not begin from its own start.
    """
    if "proof" not in record["result"]:
        raise SourceMissing(
            f"{store.uri}: the training noted no digests of its weights, to compare with. Have "
            "`lineage: {prove: true}` in its manifest, and train."
        )
    if record["run"]["experiment"] != record["training_id"]:
        raise SettingInvalid(
            f"it went on with experiment {record['run']['experiment']}, which has changed since: "
            "nobody can train it again from there. Without --prove the folder is made."
        )
    body = store.read_bytes(KEY)
    digests = {file["key"]: file["sha256"] for file in record["result"]["files"]}
    if hashlib.sha256(body).hexdigest() != digests.get(KEY):
        raise TransferCorrupt(f"{store.uri}/{KEY} is not the file that was published.")
    notes = read_notes(body)
    if not notes:
        raise SourceMissing(f"{store.uri}/{KEY} is empty.")
    return notes


def _made(
    record: Mapping[str, Any], store: ObjectStore, folder: Path, options: argparse.Namespace
) -> Path:
    """Makes the folder.

    Returns:
        The manifest's path.

    Raises:
        DdlError: something that it needs is not there any more, or is another.
    """
    prove, uri = "proof" in record["result"], record["dataset"]["uri"]
    instead = options.data.resolve() if options.data is not None else None
    if instead is not None and not instead.is_dir():
        raise SourceMissing(f"--data {instead} is no folder")
    text = manifest_text(record, data=str(instead or ""), prove=prove)
    path = folder / (MANIFEST if MANIFEST not in record["code"]["files"] else f"rerun-{MANIFEST}")
    compute = compute_table(options.compute)
    manifest = load_manifest_text(text, str(path), compute)
    try:
        selection = manifest.training_data_reference.selection
        data = readable(data_of(manifest, path), selection)
        changes = data_changes(record, data, selection, copied=instead is not None)
    except ConnectionInvalid as error:
        if options.prove:
            raise
        print(f"ddl-airflow: the data was not looked at: {error}", file=sys.stderr)
        changes = DataChanges()
    changes.refuse(instead.as_uri() if instead else uri)
    if changes.unknown:
        many = f"{len(changes.unknown)} file{'s' * (len(changes.unknown) != 1)}"
        said = f"of {many} of the data, such as {changes.unknown[0]}, only the size was compared"
        print(f"ddl-airflow: {said}: the record has no digest of what was in it", file=sys.stderr)
    with os_errors(folder):
        fetch_code(record, store, folder / code_folder(record))
        if changes.added:
            # No manifest leaves out what has come since: a copy of the others is for this alone.
            many = f"{len(changes.added)} file{'s' * (len(changes.added) != 1)}"
            print(f"ddl-airflow: left out: {many} of the data, come since", file=sys.stderr)
            beside = data_folder(record)
            _fetch_data(record, data, folder, beside)
            text = manifest_text(record, data=f"./{beside}", prove=prove)
        path.write_text(text, encoding="utf-8")
    load_manifest(path, compute=compute)
    return path


def _fetch_data(record: Mapping[str, Any], data: ObjectStore, folder: Path, name: str) -> None:
    """Copies the record's data, and no other, to a folder in the folder."""
    objects = objects_of(record, data)
    listing = Listing(objects, fingerprint(objects))
    cache = folder.resolve() / BY_HAND / "fetched"
    stage(data, Cache(cache), folder / name, listing=listing, closed_cache=True)
    (folder / name / COMPLETE).unlink()
    shutil.rmtree(cache)


def _prove(
    record: Mapping[str, Any], before: Sequence[Note], path: Path, options: argparse.Namespace
) -> int:
    manifest = load_manifest(path, compute=compute_table(options.compute))
    settings = record["environment"].get("settings", {})
    for name in _SETTINGS:  # as they were, and not as they are for who asks
        os.environ.pop(name, None)
        if name in settings:
            os.environ[name] = str(settings[name])
    log_to_terminal()
    asked = Asked(path.parent / BY_HAND, until="stage-data")
    layout = run_manifest(manifest, path, asked)["layout"]
    staged = read_object(layout.kept / "lineage" / "stage_data.json", layout.workspace, MOST_BYTES)
    other_content(record, staged).refuse(record["dataset"]["uri"])
    run_manifest(manifest, path, Asked(path.parent / BY_HAND, ["train"]))
    trained = read_object(layout.kept / "lineage" / "train.json", layout.workspace, MOST_BYTES)
    again = read_notes_of(layout)
    found = divergence(before, again)
    # What the upload adds to a record; Airflow computes nothing.
    trained["environment"]["versions"]["ddl-airflow"] = __version__
    others = compared_environments(record["environment"], trained["environment"])
    others.pop("versions.apache-airflow", None)
    told = {
        "identical": found is None,
        "notes": len(before),
        "step": before[-1].step,
        "diverged": found and asdict(found),
        "environment": others,
        "tries": record["run"]["tries"].get("train"),
        **_went_on_from(record),
        "folder": str(path.parent),
    }
    _say(options.json, told, [*_described(before, found, others, told["tries"]), *_began(record)])
    return 0 if found is None else 1


def _began(record: Mapping[str, Any]) -> list[str]:
    return [f"It {line}" for line in described_beginnings(record)]


def _went_on_from(record: Mapping[str, Any]) -> dict[str, Any]:
    """The same for programs."""
    result = record["result"]
    return {"went_on_from": result.get("went_on_from", []), IS_WHOLE: result.get(IS_WHOLE, True)}


def _described(
    before: Sequence[Note],
    found: Divergence | None,
    others: Mapping[str, Sequence[Any]],
    tries: int | None,
) -> list[str]:
    last = before[-1]
    if found is None:
        of = f"{len(before)} notes of {len(last.tensors)} tensors, to step {last.step}"
        return [f"bit-identical: {of}, are the same"]
    if found.why:
        lines = [f"diverged at step {found.step}: {found.why}"]
    else:
        named = ", ".join(found.tensors[:_MOST_TENSORS]) or "some tensor"
        more = len(found.tensors) - _MOST_TENSORS
        when = f"after step {found.step}" if found.step else "before the first step"
        lines = [f"diverged: {when} {named}{f' and {more} more' * (more > 0)} differ"]
    if found.same_until is not None:
        lines.append(f"the same until step {found.same_until}")
    elif not found.why and found.step == 0:
        lines.append("Does the script set the seed that its weights begin with?")
    lines += [f"another {name}: {one} -> {other}" for name, (one, other) in others.items()]
    if tries and tries > 1:
        lines.append(f"It was tried {tries} times: who goes on from a checkpoint may differ.")
    return lines


def _say(as_json: bool, told: Mapping[str, Any], lines: Sequence[str]) -> None:
    print(json.dumps(told, indent=2) if as_json else "\n".join(map(printable, lines)))
