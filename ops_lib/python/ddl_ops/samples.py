"""Real input for a model's first prediction: .npy, .npz or MNIST's idx files. NumPy only.

With labels it tells the model's accuracy as well: docs/manifests.md, "What a sample may be".
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ddl_ops.checkpoints import TransformError

# Looked for in this order when the manifest names no sample.
_USUAL = ("t10k-images-idx3-ubyte", "t10k-images.idx3-ubyte", "sample.npy", "sample.npz")
# Arrays of an .npz file that are labels, as people and Keras's own files call them.
_LABELS = ("labels", "y_test", "y")
# What reading a damaged file raises.
DAMAGE = (ValueError, EOFError, OSError, struct.error, zipfile.BadZipFile, zlib.error)
_IDX_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class Sample:
    """Rows for one or several inputs.

    Attributes:
        path: the file.
        arrays: by the name in the file; the only key is "" where the format has no names.
        labels: as they are in the file, or in that of labels beside it; None if there are none.
    """

    path: Path
    arrays: dict[str, np.ndarray]
    labels: np.ndarray | None


def find(name: str | None, folders: Sequence[Path]) -> Path | None:
    """The file called ``name``, or without a name the usual one if there is one.

    Raises:
        TransformError: a named file is in none of the folders.
    """
    for candidate in [name] if name else [n + end for n in _USUAL for end in ("", ".gz")]:
        for folder in folders:
            if (folder / candidate).is_file():
                return folder / candidate
    if name:
        searched = ", ".join(map(str, folders))
        raise TransformError(
            f"sample {name}: not in {searched}. Set transform.sample to a file of DATA_DIR or "
            f"RESULT_DIR."
        )
    return None


def read(path: Path) -> Sample:
    """The file's arrays.

    Raises:
        TransformError: the file is damaged or of another format.
    """
    try:
        if path.name.endswith(".npy"):
            return Sample(path, {"": _load(path)}, _labels_beside(path, _load))
        if path.name.endswith(".npz"):
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                return Sample(path, dict(archive), None)
        return Sample(path, {"": read_idx(path)}, _labels_beside(path, read_idx))
    except DAMAGE as error:
        raise TransformError(
            f"sample {path}: cannot be read ({error}). It must be .npy, .npz or idx-ubyte[.gz]."
        ) from error


def with_labels(sample: Sample, inputs: Collection[str]) -> Sample:
    """The sample with the labels that an .npz file holds apart from its rows.

    They are its array ``labels``, ``y_test`` or ``y``, if the model has no input of that name. With
    ``y_test`` rows are in arrays whose names end in ``_test`` alone, as in Keras's mnist.npz.

    Args:
        sample: as read.
        inputs: names of the model's inputs.
    """
    arrays = sample.arrays
    for name in _LABELS:
        if sample.labels is None and len(arrays) > 1 and name in arrays and name not in inputs:
            rows = {other: array for other, array in arrays.items() if other != name}
            held_out = {other: rows[other] for other in rows if other.endswith("_test")}
            rows = held_out or rows if name == "y_test" else rows
            return replace(sample, arrays=rows, labels=arrays[name])
    return sample


def classes(labels: np.ndarray) -> np.ndarray:
    """The class of each row, int64 [n].

    Args:
        labels: whole numbers [n] or [n, 1], from 0; or [n, k] with one 1 in each row.

    Raises:
        ValueError: they are something else.
    """
    if labels.dtype.kind in "biuf":
        labels = labels * 1  # truths are numbers
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.ndim == 2 and ((labels == 0) | (labels == 1)).all():
            if (labels.sum(axis=1) == 1).all():
                return labels.argmax(axis=1)
        elif labels.ndim == 1 and (labels == np.floor(labels)).all():
            return labels.astype(np.int64)
    raise ValueError(
        f"labels of {labels.dtype} {list(labels.shape)} are neither whole numbers [n], one class "
        "for each row, nor [n, k] with one 1 in each row"
    )


def fit(array: np.ndarray, shape: Sequence[int | None], dtype: np.dtype) -> np.ndarray:
    """The array as a batch for an input.

    Bytes become 0..1 for an input of floats, as pictures are fed. Rows are reshaped when they
    hold as many values as the input wants.

    Args:
        array: [n, ...] or one row [...].
        shape: the input's, batch first; None for a size that is free.
        dtype: the input's.

    Raises:
        ValueError: rows of this shape do not fit.
    """
    row = tuple(shape[1:])
    if array.dtype == np.uint8 and np.issubdtype(dtype, np.floating):
        array = array.astype(dtype) / np.asarray(255, dtype)
    array = array.astype(dtype, copy=False)
    sizes = [size for size in row if size is not None]
    if len(sizes) == len(row):
        if array.ndim and array[:1].size == math.prod(sizes):
            return array.reshape(len(array), *sizes)
        if array.size == math.prod(sizes):  # one row, without a batch dimension
            return array.reshape(1, *sizes)
    elif len(row) + 1 == array.ndim and all(
        want in (None, have) for want, have in zip(row, array.shape[1:], strict=True)
    ):
        return array
    raise ValueError(f"rows of shape {list(array.shape[1:])} for an input of {_text(row)}")


def zeros(shape: Sequence[int | None], dtype: np.dtype) -> np.ndarray:
    """Zeros, or empty strings, in the smallest batch that the shape allows."""
    return np.full([size or 1 for size in shape], b"" if dtype.kind == "O" else 0, dtype)


def read_idx(path: Path) -> np.ndarray:
    """The array in an idx file, gzipped if its name says so. Raises one of DAMAGE."""
    content = path.read_bytes()
    if path.name.endswith(".gz"):
        content = gzip.decompress(content)
    zero, kind, rank = struct.unpack(">HBB", content[:4])
    if zero or kind not in _IDX_DTYPES:
        raise ValueError("no idx header")
    shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    return np.frombuffer(content, _IDX_DTYPES[kind], offset=4 + 4 * rank).reshape(shape)


def _load(path: Path) -> np.ndarray:
    array: np.ndarray = np.load(path, allow_pickle=False)
    return array


def _labels_beside(path: Path, read: Callable[[Path], np.ndarray]) -> np.ndarray | None:
    name = path.name.replace("images", "labels").replace("idx3", "idx1")
    labels = path.with_name(name)
    return read(labels) if name != path.name and labels.is_file() else None


def _text(row: Sequence[int | None]) -> str:
    return "[" + ", ".join("any" if size is None else str(size) for size in row) + "]"
