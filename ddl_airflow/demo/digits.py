"""Real handwriting for the examples, in MNIST's file format and under MNIST's file names.

``python -m ddl_airflow.demo.digits FOLDER`` writes the four files there. The pictures are the 1797
of digits.txt (8x8, 17 grey levels), so nothing is downloaded. Put the real MNIST files in their
place and everything that reads them goes on working.

Source: UCI "Optical Recognition of Handwritten Digits"; file format by the MNIST page of LeCun,
Cortes and Burges ("the IDX file format").
"""

from __future__ import annotations

import argparse
import gzip
import json
import struct
from pathlib import Path

import numpy as np

TRAIN_IMAGES = "train-images-idx3-ubyte.gz"
TRAIN_LABELS = "train-labels-idx1-ubyte.gz"
HELD_OUT_IMAGES = "t10k-images-idx3-ubyte.gz"
HELD_OUT_LABELS = "t10k-labels-idx1-ubyte.gz"

SIDE = 28
BOX = 20  # MNIST draws each digit in a 20x20 box in the middle of its 28x28 picture
HELD_OUT_EVERY = 4  # of the pictures of each digit, every fourth is held out: 25 %
# Nine places for each training digit. More than 5000 pictures are needed: the reader that came
# with TensorFlow 1 sets the first 5000 aside for validation.
SHIFTS = tuple((down, right) for down in (-1, 0, 1) for right in (-1, 0, 1))
_IDX_UINT8 = 0x08


def write_digits(folder: str | Path) -> dict[str, int]:
    """Write the four files and return how many pictures each part holds.

    The bytes written depend on nothing but digits.txt and the installed zlib.

    Args:
        folder: made if it is not there; files of these names are replaced.

    Returns:
        ``{"train": count, "held_out": count}``.
    """
    pictures, labels = _handwriting()
    held_out = _held_out(labels)
    train_pictures, train_labels = _shifted_copies(pictures[~held_out], labels[~held_out])

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in (
        (TRAIN_IMAGES, train_pictures),
        (TRAIN_LABELS, train_labels),
        (HELD_OUT_IMAGES, pictures[held_out]),
        (HELD_OUT_LABELS, labels[held_out]),
    ):
        (folder / name).write_bytes(gzip.compress(_idx(array), compresslevel=9, mtime=0))
    return {"train": len(train_labels), "held_out": int(held_out.sum())}


def _handwriting() -> tuple[np.ndarray, np.ndarray]:
    """All digits as uint8 [1797, 28, 28], 0 (paper) to 255 (ink), and their labels uint8 [1797]."""
    small, labels = _digits()
    weights, scale = _bilinear_weights(small.shape[1], BOX)
    # Whole numbers throughout: the bytes are the same whatever the machine's floating point does.
    ink = np.einsum("ij,njk,lk->nil", weights, small, weights) * 255
    full_ink = scale * scale * int(small.max())
    large = np.zeros((len(small), SIDE, SIDE), np.uint8)
    edge = (SIDE - BOX) // 2
    large[:, edge : edge + BOX, edge : edge + BOX] = (ink + full_ink // 2) // full_ink
    return large, labels


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """The pictures as they are in digits.txt, int64 [1797, 8, 8], and their labels uint8 [1797]."""
    text = Path(__file__).with_name("digits.txt").read_text("utf-8")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    pixels = [[int(pixel, 17) for pixel in picture] for _, picture in lines]
    labels = [int(label) for label, _ in lines]
    return np.array(pixels, np.int64).reshape(-1, 8, 8), np.array(labels, np.uint8)


def _bilinear_weights(small: int, large: int) -> tuple[np.ndarray, int]:
    """Matrix int64 [large, small] that stretches a row of pixels, and what its rows add up to."""
    scale = 2 * large
    weights = np.zeros((large, small), np.int64)
    for place in range(large):
        # The middle of a large pixel, measured in small pixels, times scale.
        middle = (2 * place + 1) * small - large
        left, offset = divmod(middle, scale)
        weights[place, max(left, 0)] += scale - offset
        weights[place, min(left + 1, small - 1)] += offset
    return weights, scale


def _held_out(labels: np.ndarray) -> np.ndarray:
    """Mask bool [n]: the same share of every digit, spread over the whole collection."""
    mask = np.zeros(len(labels), bool)
    for digit in np.unique(labels):
        mask[np.flatnonzero(labels == digit)[::HELD_OUT_EVERY]] = True
    return mask


def _shifted_copies(pictures: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every picture at every place of SHIFTS, in a fixed mixed order."""
    # The empty border is wider than any shift, so nothing rolls over the edge.
    copies = np.concatenate([np.roll(pictures, shift, axis=(1, 2)) for shift in SHIFTS])
    # RandomState's stream is frozen by NumPy's promise; that of default_rng may change.
    order = np.random.RandomState(0).permutation(len(copies))
    return copies[order], np.tile(labels, len(SHIFTS))[order]


def _idx(array: np.ndarray) -> bytes:
    """A uint8 array in the IDX format: type, rank, big-endian sizes, then the values."""
    header = struct.pack(f">HBB{array.ndim}I", 0, _IDX_UINT8, array.ndim, *array.shape)
    return header + array.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m ddl_airflow.demo.digits",
        description="Write handwritten digits as the four files of MNIST.",
    )
    parser.add_argument("folder", type=Path)
    print(json.dumps(write_digits(parser.parse_args().folder)))


if __name__ == "__main__":
    main()
