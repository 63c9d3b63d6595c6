"""What a training left in its results folder: base graph and checkpoints, or Keras models.

Standard library only: the answer, or the error, is there before TensorFlow is imported.

``python -m ddl_ops.checkpoints RESULT_DIR [STEP]`` prints, as JSON, which there are, by their paths
in RESULT_DIR and the newest first, and why none of them can be made a model, if that is so.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of the file system, for now; not of what is in the file.
_TROUBLE = frozenset(
    (
        errno.EIO,
        errno.ESTALE,
        errno.EACCES,
        errno.EPERM,
        errno.ETIMEDOUT,
        errno.ENOMEM,
        errno.EMFILE,
    )
)
_CHECKPOINT = re.compile(r"(.+)-(\d+)\.index")
_NOTED = re.compile(r'^model_checkpoint_path: "(.*)"', re.MULTILINE)
# Of what was written within this time the step tells which is the newer one: copies may have the
# times at which they were made, and some file systems keep whole seconds, or two.
_ONE_TIME_NS = 2 * 10**9
# In the name of a Keras file: what numbers count, and which of a model's files it is.
COUNTED = "epochs?|ep?|steps?|iter(?:ation)?|checkpoint|ckpt|weights|model"
_WHICH = "best|last|latest|newest|final|current|val|loss|acc|accuracy"
# A number by itself or after such a word, and not the decimals of a metric, as in
# model.01-0.16.keras. That of mobilenet_v2.keras or resnet50.keras belongs to the model.
_STEP = re.compile(rf"(?:^|[\W_])(?:{COUNTED})?(?<!\d\.)(\d+)$", re.IGNORECASE)
HDF5 = (".h5", ".hdf5")
# What Keras writes there of a whole model: without it the file has weights alone.
_WHOLE_IN_HDF5 = b"model_config"
# In the comment of a .keras file, which is an archive: Keras reads all entries, and no comment.
_EPOCHS_DONE = "ddl_epochs_done"
_BEST = "ddl_best"


class TransformError(RuntimeError):
    """A checkpoint could not be made a SavedModel."""


class CheckpointMissing(TransformError):
    """No checkpoint, none at the step asked for, or none that can be read."""


class CheckpointUnreadable(Exception):
    """This one checkpoint is incomplete or damaged; the one before may be whole."""


@dataclass(frozen=True)
class Checkpoint:
    """Saved weights.

    Attributes:
        path: the file of Keras, ``.keras`` or of HDF5, or TensorFlow's prefix: the path without
            ``.index``.
        step: the number in the name, of steps, or for Keras of epochs, unless the epochs are noted
            in the file; None when there is neither, as of a ``Saver``'s without ``global_step``.
    """

    path: Path
    step: int | None


@dataclass(frozen=True)
class Leftovers:
    """All that can be made a SavedModel.

    Attributes:
        base_graph: the meta graph that the weights go into; None for Keras, whose files hold both.
        checkpoints: newest first, never empty.
        models: of Keras, which models the files are of, by their names; of one model, one at most.
        doubted: what was written last, if that does not count since the times look like a copy's.
    """

    base_graph: Path | None
    checkpoints: tuple[Checkpoint, ...]
    models: tuple[str, ...] = ()
    doubted: Checkpoint | None = None

    @property
    def steps(self) -> list[int]:
        return sorted({c.step for c in self.checkpoints if c.step is not None})


def find(result_dir: Path) -> Leftovers:
    """What lies in ``result_dir`` and its folder ``checkpoints``.

    A base graph, ``<name>_basegraph.meta`` or else ``base*.meta``, comes first; then ``.keras``
    files; then models that Keras has saved as ``.h5`` or ``.hdf5``.

    Raises:
        CheckpointMissing: nothing to transform. The message says what was found instead.
        TransformError: several base graphs or families of checkpoints: no telling which is meant.
    """
    folders = [folder for folder in (result_dir, result_dir / "checkpoints") if folder.is_dir()]
    if not folders:
        raise CheckpointMissing(
            f"{result_dir}: no such folder. Training writes its checkpoints to $RESULT_DIR."
        )
    files = sorted(
        path
        for folder in folders
        for path in folder.iterdir()
        if path.is_file() and not path.name.startswith(".")
    )
    if graphs := _base_graphs(files):
        return _graph_and_checkpoints(result_dir, graphs, files)
    models = [path for path in files if path.suffix == ".keras"] or [
        path for path in files if path.suffix in HDF5 and _is_whole_model(path)
    ]
    if models:
        return Leftovers(None, tuple(_keras_newest_first(models)), _models_of(models))
    raise CheckpointMissing(f"{result_dir}: {_nothing_usable(files)}")


def choose(leftovers: Leftovers, wanted: str) -> Sequence[Checkpoint]:
    """The checkpoints to try, in order: all of them for ``latest``, else the one at that step.

    Raises:
        CheckpointMissing: none has that step. The message lists those there are.
    """
    if wanted == "latest":
        return leftovers.checkpoints
    found = [c for c in leftovers.checkpoints if c.step == int(wanted)]
    if not found:
        kept = ", ".join(map(str, leftovers.steps)) or "none with a number in its name"
        raise CheckpointMissing(
            f"{leftovers.checkpoints[0].path.parent}: no checkpoint at step {wanted}; there are: "
            f"{kept}. Set transform.checkpoint to one of them or to 'latest', or raise the "
            f"Saver's max_to_keep."
        )
    return found[:1]


def note_epochs(path: Path | str, epochs: int, best: Mapping[str, float] | None = None) -> None:
    """Notes in a ``.keras`` file how many epochs of its training are done, for newest_model().

    Args:
        path: the file.
        epochs: that are done.
        best: what it is the best model by, and how good it is; None: nothing is known.
    """
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = json.dumps({_EPOCHS_DONE: epochs, _BEST: dict(best or {})}).encode()


def noted_best(path: Path, metric: str) -> float | None:
    """How good the best model is that is in a ``.keras`` file; None if that is not noted there."""
    best = _noted(path).get(_BEST)
    value = best.get(metric) if isinstance(best, dict) else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def newest_best(folder: Path, metric: str) -> float | None:
    """As noted_best(), of the newest ``.keras`` file that has a note of that metric."""
    for found in _keras_newest_first(_keras_files(folder)):
        if (best := noted_best(found.path, metric)) is not None:
            return best
    return None


def newest_model(folder: Path) -> tuple[Checkpoint | None, list[Path]]:
    """The newest ``.keras`` file that tells how many epochs are done; None if there is none.

    By a note of note_epochs(), or as ``model-<epoch>.keras``: the number in another name may be of
    steps, or a part of a loss, and who took it for epochs would leave out some. Also returns the
    newer files that have such a number.

    By time of writing, as in find(). It is whole where a launcher of ours has started the ranks:
    ddl_ops.resume has put damaged ones aside.
    """
    passed_over: list[Path] = []
    for found in _keras_newest_first(_keras_files(folder)):
        name = found.path.name
        if _noted_epochs(found.path) is not None or re.fullmatch(r"model-\d+\.keras", name):
            return found, passed_over
        if re.search(r"\d\.keras$", name):
            passed_over.append(found.path)
    return None, passed_over


def _keras_files(folder: Path) -> list[Path]:
    # A link may lead to a model that was damaged, and has been moved, or that was removed.
    files = folder.glob("*.keras")
    return [path for path in files if not path.name.startswith(".") and path.is_file()]


def require_whole(checkpoint: Checkpoint) -> None:
    """Checks what can be checked without TensorFlow.

    Raises:
        CheckpointUnreadable: a file is missing, cut short or damaged.
        OSError: the file system does not give it, for another reason.
    """
    if checkpoint.path.suffix == ".keras":
        require_archive(checkpoint.path)
        return
    if checkpoint.path.suffix in HDF5:
        require_hdf5(checkpoint.path)
        return
    prefix = checkpoint.path.name
    # Path.glob() finds none in a folder that cannot be read now.
    shard = re.compile(re.escape(prefix) + r"\.data-\d+-of-(\d+)")
    shards = [
        match for name in os.listdir(checkpoint.path.parent) if (match := shard.fullmatch(name))
    ]
    counts = {match[1] for match in shards}
    if not shards or len(counts) > 1 or len(shards) != int(counts.pop()):
        raise CheckpointUnreadable(f"{prefix}.data-* files are missing")


def require_archive(path: Path) -> None:
    """Checks a zip archive against its checksums. Raises as require_whole()."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except OSError as error:
        if error.errno in _TROUBLE:
            raise
        raise CheckpointUnreadable(str(error)) from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        # The last two: methods and keys that a damaged header seems to ask for.
        raise CheckpointUnreadable(f"{type(error).__name__}: {error}") from error
    if damaged:
        raise CheckpointUnreadable(f"{damaged} in it is damaged")


def require_hdf5(path: Path) -> None:
    """Checks that an HDF5 file is not cut short: it has no checksums. Raises as require_whole()."""
    import h5py

    try:
        h5py.File(path, "r").close()
    except OSError as error:
        if error.errno:  # not what is in it
            raise
        raise CheckpointUnreadable(str(error)) from error


def _is_whole_model(path: Path) -> bool:
    """Whether a file of HDF5 has more than weights, also where it is cut short behind that."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(_WHOLE_IN_HDF5) >= 0


def _base_graphs(files: Sequence[Path]) -> list[Path]:
    if named := [path for path in files if re.fullmatch(r".+_basegraph\.meta", path.name)]:
        return named
    families = {match[1] for path in files if (match := _CHECKPOINT.fullmatch(path.name))}
    graphs = [
        path
        for path in files
        if re.fullmatch(r"base.*\.meta", path.name)
        # What a Saver writes beside a checkpoint is the graph of the training.
        and not ((match := re.fullmatch(r"(.+)-\d+\.meta", path.name)) and match[1] in families)
    ]
    alone = [path for path in graphs if path.with_suffix(".index") not in files]
    return alone or graphs


def _graph_and_checkpoints(
    result_dir: Path, graphs: Sequence[Path], files: Sequence[Path]
) -> Leftovers:
    if len(graphs) > 1:
        raise TransformError(
            f"{result_dir}: {len(graphs)} base graphs ({', '.join(g.name for g in graphs)}), and "
            f"no telling which is meant. Let the training export one."
        )
    (graph,) = graphs
    families: dict[str, list[Checkpoint]] = {}
    unnumbered: dict[str, list[Checkpoint]] = {}
    for path in files:
        prefix = path.with_suffix("")
        if match := _CHECKPOINT.fullmatch(path.name):
            families.setdefault(match[1], []).append(Checkpoint(prefix, int(match[2])))
        # One with the graph of the training beside it is not what the base graph is for.
        elif path.suffix == ".index" and path.with_suffix(".meta") != graph:
            unnumbered.setdefault(prefix.name, []).append(Checkpoint(prefix, None))
    own = graph.name.removesuffix("_basegraph.meta")
    if own in families or own in unnumbered:
        families = {own: families.get(own, [])}
    families = families or {name: [] for name in unnumbered}
    if not families:
        raise CheckpointMissing(
            f"{result_dir}: {graph.name} is there, but no checkpoint {own}-<step>.index or "
            f"{own}.index. Call saver.save(session, RESULT_DIR + '/{own}', global_step=step) on "
            f"rank 0."
        )
    if len(families) > 1:
        raise TransformError(
            f"{result_dir}: checkpoints of {', '.join(sorted(families))}, and none named after "
            f"{graph.name}. Name the base graph <name>_basegraph.meta like its checkpoints."
        )
    ((name, checkpoints),) = families.items()
    found, doubted = _newest_first([*checkpoints, *unnumbered.get(name, [])])
    return Leftovers(graph, tuple(found), doubted=doubted)


def _newest_first(
    checkpoints: Sequence[Checkpoint],
) -> tuple[list[Checkpoint], Checkpoint | None]:
    """Those of one name by time of writing, and after the one that TensorFlow has noted.

    A try that began anew ends below the steps of the one before. What a Saver writes last may have
    no step. Where the times are those of a copy, by step. Also returns what was written last, where
    that is why it is not the first, and no note tells.
    """
    at = {
        one: one.path.with_name(f"{one.path.name}.index").stat().st_mtime_ns for one in checkpoints
    }
    found = by_time = _by_time(at)
    are_of_training = _are_of_training(at, by_time)
    if not are_of_training:
        found = sorted(at, key=lambda one: math.inf if one.step is None else one.step, reverse=True)
    first = found[0]
    notes = {folder: _noted_in(folder) for folder in {one.path.parent for one in found}}
    noted = next((one for one in found if one.path.name == notes[one.path.parent]), None)
    if noted is None:
        return found, (by_time[0] if first != by_time[0] else None)
    # What was saved with write_state=False is not noted; but copies may have other times. A Saver
    # writes its note after the checkpoint.
    note_at = (noted.path.parent / "checkpoint").stat().st_mtime_ns
    has_gone_on = (
        are_of_training
        and noted.step is not None
        and (first.step or 0) > noted.step
        and at[noted] - _ONE_TIME_NS <= note_at
        and at[first] - max(at[noted], note_at) > _ONE_TIME_NS
    )
    if not has_gone_on:
        found.remove(noted)
        found.insert(0, noted)
    return found, None


def _by_time(at: Mapping[Checkpoint, int]) -> list[Checkpoint]:
    """By time of writing, the newest first; of what was written at one time, by step."""

    def is_after(one: Checkpoint, other: Checkpoint) -> bool:
        if one.step is None or other.step is None:
            return (at[one], one.step is None) > (at[other], other.step is None)
        return one.step > other.step

    found: list[Checkpoint] = []
    left = sorted(at, key=at.__getitem__, reverse=True)
    while left:
        newest = left[0]
        for one in left:
            if at[left[0]] - at[one] > _ONE_TIME_NS:
                break
            if is_after(one, newest):
                newest = one
        found.append(newest)
        left.remove(newest)
    return found


def _are_of_training(at: Mapping[Checkpoint, int], by_time: Sequence[Checkpoint]) -> bool:
    """Whether the times may be those at which a training has saved: the steps rise with them.

    But for one break, where a try began anew; not if that order is the one of the names.
    """
    steps = [one.step for one in reversed(by_time) if one.step is not None]
    breaks = sum(after < before for before, after in zip(steps, steps[1:], strict=False))
    numbered = [one for one in at if one.step is not None]
    names = [one.path.name for one in sorted(numbered, key=lambda one: (at[one], one.path.name))]
    return breaks == 0 or (breaks == 1 and names != sorted(names))


def _noted_in(folder: Path) -> str | None:
    """The name of the checkpoint that TensorFlow has noted as the newest."""
    with suppress(OSError, ValueError):
        text = (folder / "checkpoint").read_text("latin-1")
        if match := _NOTED.search(text):
            # What is not ASCII, TensorFlow writes as octal numbers of its bytes.
            name = match[1].encode("latin-1").decode("unicode_escape").encode("latin-1").decode()
            return name.rpartition("/")[2]
    return None


def _keras_newest_first(models: Sequence[Path]) -> list[Checkpoint]:
    """By time of writing; the number in the name decides between files of one instant."""
    numbered = {path: step for path in models if (step := _step_of(path)) is not None}
    # The final model usually carries no number. Where its weights are, byte for byte, those of a
    # numbered checkpoint, that checkpoint's number is its number.
    number_of = {crc: numbered[path] for path in numbered if (crc := _weights_crc(path))}
    found = []
    for path in models:
        step = numbered.get(path)
        if step is None and (crc := _weights_crc(path)):
            step = number_of.get(crc)
        found.append((path.stat().st_mtime_ns, step or 0, path not in numbered, path, step))
    return [Checkpoint(path, step) for *_, path, step in sorted(found, reverse=True)]


def _step_of(path: Path) -> int | None:
    """The epochs that are noted in a Keras file, else the number in its name."""
    if (noted := _noted_epochs(path)) is not None:
        return noted
    match = _STEP.search(path.stem)
    return int(match[1]) if match else None


def _models_of(files: Sequence[Path]) -> tuple[str, ...]:
    """Which models Keras files are of, sorted.

    Weights that are those of another file, byte for byte, are the same model under another name.
    """
    names: dict[Any, str] = {}
    for path in sorted(files, key=lambda path: _step_of(path) is None):
        names.setdefault(_weights_crc(path) or path, _model_of(path))
    return tuple(sorted(set(names.values()) - {""}))


def _model_of(path: Path) -> str:
    """The name of a Keras file without what differs between files of one model; may be empty."""
    words = re.findall(r"[^\W_]+", path.stem.lower())
    rest = [word for word in words if not re.fullmatch(rf"(?:{COUNTED}|{_WHICH})?\d*", word)]
    generic = any(re.fullmatch(r"model\d*", word) for word in words)
    return "_".join(rest) or ("model" if generic else "")


def _noted_epochs(path: Path) -> int | None:
    return _noted(path).get(_EPOCHS_DONE)


def _noted(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            noted = json.loads(archive.comment)
    except (FileNotFoundError, zipfile.BadZipFile, EOFError, ValueError):
        return {}
    return noted if isinstance(noted, dict) else {}


def _weights_crc(path: Path) -> int | None:
    """The checksum that the archive itself keeps of the weights; None if it is no whole archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.getinfo("model.weights.h5").CRC
    except (zipfile.BadZipFile, KeyError, EOFError):
        return None


def _nothing_usable(files: Sequence[Path]) -> str:
    names = [path.name for path in files]
    if any(name.endswith(".index") for name in names):
        return (
            "checkpoints, but no base graph *_basegraph.meta. The .meta beside a checkpoint holds "
            "the training's communication ops and cannot be served. Call "
            "tf.train.export_meta_graph(RESULT_DIR + '/<name>_basegraph.meta') on rank 0, before "
            "`import ddl`."
        )
    if any(name.endswith(HDF5) for name in names):
        return (
            "weights (.h5) without the model they belong to. Save the whole model: "
            "model.save(RESULT_DIR + '/checkpoints/model-<epoch>.keras') on rank 0."
        )
    seen = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "") if names else "nothing"
    return (
        f"no checkpoint; found {seen}. Save to $RESULT_DIR on rank 0: with Keras model.keras (in "
        f"TensorFlow 1 mode model.h5), or model-<epoch>.keras by ddl.keras.CheckpointCallback(); "
        f"with TensorFlow 1 "
        f"<name>_basegraph.meta and <name>-<step> or <name>."
    )


def main(argv: Sequence[str]) -> int:
    """Prints what there is in a results folder. Returns 0."""
    result_dir, wanted = Path(argv[0]), argv[1] if len(argv) > 1 else "latest"
    there: list[str] = []
    error = ""
    try:
        leftovers = find(result_dir)
        there = [str(one.path.relative_to(result_dir)) for one in leftovers.checkpoints]
        choose(leftovers, wanted)
    except TransformError as problem:
        error = str(problem)
    print(json.dumps({"there": there, "error": error}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
