"""From a training's results folder to a SavedModel that has been seen to predict.

``python -m ddl_ops.saved_model --result-dir R --data-dir D --export-dir R/model --report FILE``

The model is written beside ``--export-dir``, loaded again from disk, given real input, and only
then moved to its place. With ``--written`` it is there already, from the manifest's own command,
and is only loaded and asked.

The report, JSON, says what was done, or ``{"error": ..., "kind": ...}``. Exit code 0: the model is
there; 3: it is not, and what stood there before is untouched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddl_ops import checkpoints, samples, serving_export, serving_trial
from ddl_ops.checkpoints import TransformError

FAILED = 3
_SAVED_MODEL = "saved_model.pb"


class NotMoved(TransformError):
    """What stands in the place of the model is another user's, and is not to be moved."""


def transform(arguments: argparse.Namespace) -> dict[str, Any]:
    """Does the work of the command line and returns the report.

    Raises:
        CheckpointMissing: no checkpoint, none at that step, or none that can be read.
        ModelRejected: the written model does not predict.
        TransformError: all else.
    """
    export_dir = arguments.export_dir
    written = _written_in(export_dir) if arguments.may_be_written else None
    may_take_written = written is not None and arguments.checkpoint == "latest"
    try:
        leftovers = checkpoints.find(arguments.result_dir)
    except checkpoints.CheckpointMissing as missing:
        if may_take_written:
            return try_written(arguments)
        if others := _others_than_a_model(export_dir):
            raise checkpoints.CheckpointMissing(
                f"{missing} {export_dir} has no {_SAVED_MODEL}, but {others}."
            ) from missing
        raise
    if may_take_written and leftovers.checkpoints[0].path.suffix in checkpoints.HDF5:
        return try_written(arguments)  # where Keras 2 saves so, scripts write what is to be served
    try:
        report = _transformed(arguments, leftovers)
    except (serving_trial.ModelRejected, NotMoved):
        raise
    except TransformError as unusable:
        if not may_take_written:
            raise
        report = try_written(arguments)
        report["warnings"].insert(0, f"took the model that the training wrote itself: {unusable}")
    else:
        if written is not None:
            which = "" if written == export_dir else f", {export_dir.name}/{written.name},"
            report["warnings"].insert(
                0,
                f"the model that the training wrote itself{which} was replaced by one made of "
                f"{report['checkpoint']}",
            )
    return report


def _transformed(arguments: argparse.Namespace, leftovers: checkpoints.Leftovers) -> dict[str, Any]:
    began = time.monotonic()
    chosen = checkpoints.choose(leftovers, arguments.checkpoint)
    sample = _sample(arguments)
    tf = _tensorflow()
    partial = arguments.export_dir.with_name(f".{arguments.export_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a try that was killed
    try:
        try:
            exported = serving_export.export(
                leftovers,
                chosen,
                dict(arguments.input),
                dict(arguments.output),
                partial,
                _folders(arguments),
            )
        except (OSError, tf.errors.OpError) as error:
            free = ""
            if isinstance(error, (OSError, tf.errors.ResourceExhaustedError)):
                free = f"; {shutil.disk_usage(partial.parent).free >> 20} MiB are free there"
            raise TransformError(
                f"{partial.parent}: no model was written ({serving_trial.first_line(error)}){free}."
            ) from error
        warnings = [
            f"{checkpoint.path.name} was skipped: {why}; used {exported.checkpoint.path.name}"
            for checkpoint, why in exported.skipped
        ]
        newest, last = exported.checkpoint, max(leftovers.steps, default=0)
        is_first = arguments.checkpoint == "latest" and newest == leftovers.checkpoints[0]
        if leftovers.base_graph and is_first and (newest.step or last) < last:
            warnings.append(
                f"{newest.path.name} was taken, the newest; {last} is a higher step, and was saved "
                f"before it, as by an earlier try. Set transform.checkpoint to {last} if that is "
                f"meant."
            )
        if (doubted := leftovers.doubted) and is_first:
            why = "has no step" if newest.step is None else "has the highest step"
            warnings.append(
                f"{newest.path.name} was taken, which {why}; {doubted.path.name} has the latest "
                f"time, but the times are not in the order of a training, as of files that were "
                f"copied. Set transform.checkpoint to the step that is meant."
            )
        if len(leftovers.models) > 1:
            warnings.append(
                f"{arguments.result_dir} has {newest.path.suffix} files of several models "
                f"({', '.join(leftovers.models)}); took {exported.checkpoint.path.name}. Let the "
                f"training save those that are not to be served in a folder of their own, such as "
                f"$RESULT_DIR/others."
            )
        warnings += exported.warnings
        seen, found_wanting = serving_trial.run(
            partial, sample, sample_was_named=bool(arguments.sample), steps=leftovers.steps
        )
        warnings += found_wanting
        files = _files(partial)
        if others := _others_than_a_model(arguments.export_dir):
            aside = _aside(arguments.export_dir)
            _move(arguments.export_dir, aside)
            warnings.append(
                f"{arguments.export_dir.name} had no {_SAVED_MODEL}, but {others}: now in "
                f"{aside.name}"
            )
        _publish(partial, arguments.export_dir)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return {
        "framework": "keras" if leftovers.base_graph is None else "tensorflow-graph",
        "tensorflow": tf.__version__,
        "base_graph": leftovers.base_graph.name if leftovers.base_graph else None,
        "checkpoint": str(exported.checkpoint.path.relative_to(arguments.result_dir)),
        "checkpoint_step": exported.checkpoint.step,
        **seen,
        "warnings": warnings,
        "files": files,
        "seconds": round(time.monotonic() - began, 2),
    }


def try_written(arguments: argparse.Namespace) -> dict[str, Any]:
    """Loads the model that is there, asks it, and returns the report.

    One that is in a folder of the time, as Estimators export it, is moved to where it belongs.

    Raises:
        ModelRejected: it cannot be loaded, or does not predict.
        TransformError: the named sample is missing or does not fit, or there is no model.
    """
    began = time.monotonic()
    export_dir = arguments.export_dir
    written = _written_in(export_dir) or export_dir
    if written == export_dir and (others := _others_than_a_model(export_dir)):
        raise TransformError(
            f"{export_dir} has no {_SAVED_MODEL}, but {others}. Write the SavedModel to "
            f"$RESULT_DIR/model itself, or one alone to $RESULT_DIR/model/<time>."
        )
    sample = _sample(arguments)
    tf = _tensorflow()
    seen, warnings = serving_trial.run(
        written, sample, sample_was_named=bool(arguments.sample), steps=()
    )
    if written != export_dir:
        aside = _aside(export_dir)
        _move(export_dir, aside)
        _move(aside / written.name, export_dir)
        with suppress(OSError):  # something else is in it, too
            aside.rmdir()
        rest = f"; what was beside it is in {aside.name}" if aside.exists() else ""
        name = export_dir.name
        warnings.append(f"took {name}/{written.name}, which is {name} now{rest}")
    return {
        "tensorflow": tf.__version__,
        **seen,
        "warnings": warnings,
        "files": _files(export_dir),
        "seconds": round(time.monotonic() - began, 2),
    }


def _written_in(folder: Path) -> Path | None:
    """Where a script has written its SavedModel: the folder, or the only one in it that is called
    by a time, as Estimators export.
    """
    if (folder / _SAVED_MODEL).is_file():
        return folder
    found = [path.parent for path in folder.glob(f"*/{_SAVED_MODEL}")]
    found = [path for path in found if path.name.isdigit()]
    return found[0] if len(found) == 1 else None


def _others_than_a_model(folder: Path) -> str:
    """The names of what is in a folder that is no SavedModel; empty if nothing would be lost."""
    if (folder / _SAVED_MODEL).is_file() or not folder.exists():
        return ""
    names = sorted(os.listdir(folder)) if folder.is_dir() else [f"the file {folder.name}"]
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def _aside(folder: Path) -> Path:
    """A free name beside a folder, for what is in it and no model; it is published, too."""
    aside, number = folder.with_name(f"{folder.name}.of-training"), 1
    while os.path.lexists(aside):
        number += 1
        aside = folder.with_name(f"{folder.name}.of-training-{number}")
    return aside


def _folders(arguments: argparse.Namespace) -> list[Path]:
    """Where files of the training may lie."""
    return [folder for folder in (arguments.data_dir, arguments.result_dir) if folder]


def _sample(arguments: argparse.Namespace) -> samples.Sample | None:
    path = samples.find(arguments.sample, _folders(arguments))
    return samples.read(path) if path else None


def _tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    # Other trainings may be on this GPU: take what is needed, not all there is.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    import tensorflow as tf

    # It warns, several times over, of each variable of a TensorFlow 1 graph; they are all expected.
    tf.get_logger().setLevel("ERROR")
    return tf


def _files(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            "path": str(path.relative_to(folder)),
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]


def _publish(partial: Path, export_dir: Path) -> None:
    """Puts a whole model in place of the one before, if any. There is never a part of one."""
    old = export_dir.with_name(f".{export_dir.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if export_dir.exists():
        _move(export_dir, old)
    try:
        partial.replace(export_dir)
    except OSError:
        if old.exists():
            old.replace(export_dir)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """As of another user, for whom an earlier try ran, it may have to stay where it is.

    Raises:
        NotMoved: it does.
    """
    try:
        source.replace(target)
    except OSError as error:
        in_the_way = f", where {target} is" if os.path.lexists(target) else ""
        raise NotMoved(
            f"{source} cannot be moved to {target.name}{in_the_way} ({error.strerror}). It is of "
            f"user id {source.lstat().st_uid}, its folder of user id "
            f"{source.parent.stat().st_uid}, and transform runs as user id {os.geteuid()}. Remove "
            "what an earlier try made there as its owner, and clear transform."
        ) from error


def _port(text: str) -> tuple[str, str]:
    name, separator, tensor = text.partition("=")
    if not (name and separator and tensor):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=TENSOR, e.g. images=x:0")
    return name, tensor


def _step(text: str) -> str:
    if text != "latest" and not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: write 'latest' or a step")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddl_ops.saved_model",
        description="Make a training's checkpoint a SavedModel, and try it on real input.",
    )
    parser.add_argument("--result-dir", type=Path, required=True, help="what the training left")
    parser.add_argument("--data-dir", type=Path, help="training data, where the sample may lie")
    parser.add_argument("--export-dir", type=Path, required=True, help="where the model goes")
    parser.add_argument("--checkpoint", type=_step, default="latest", metavar="latest|STEP")
    for kind, example in (("input", "images=x:0"), ("output", "logits=pRes:0")):
        parser.add_argument(
            f"--{kind}",
            type=_port,
            action="append",
            default=[],
            metavar="NAME=TENSOR",
            help=f"name in the signature and tensor of the graph, e.g. {example}; default: found",
        )
    parser.add_argument("--sample", help=".npy, .npz or idx-ubyte[.gz] in either folder")
    parser.add_argument(
        "--written", action="store_true", help="the model is in --export-dir: load it and ask it"
    )
    parser.add_argument(
        "--may-be-written", action="store_true", help="so it may be, if there is no checkpoint"
    )
    parser.add_argument("--report", type=Path, required=True, help="JSON file to write")
    return parser


def _write_report(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(report) + "\n", "utf-8")
    partial.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    arguments.report.unlink(missing_ok=True)  # of a try before this one
    try:
        report = try_written(arguments) if arguments.written else transform(arguments)
    except TransformError as error:
        _write_report(arguments.report, {"error": str(error), "kind": type(error).__name__})
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    for warning in report["warnings"]:
        print(f"warning: {warning}")
    _write_report(arguments.report, report)
    accuracy = report["accuracy"]
    of = f" of {report['checkpoint']}" if "checkpoint" in report else ""
    print(
        f"{arguments.export_dir}: SavedModel{of}, tried on {report['rows']} "
        f"rows of {report['sample'] or 'zeros'}"
        + (f", accuracy {accuracy:.4f}" if accuracy is not None else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
