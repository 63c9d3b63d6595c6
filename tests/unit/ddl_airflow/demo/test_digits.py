"""The example's files: MNIST's format, an honest split, the same bytes each time."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest

from ddl_airflow.demo import digits

NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def read_idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes())
    zero, kind, rank = struct.unpack(">HBB", raw[:4])
    assert (zero, kind) == (0, 8)
    shape = struct.unpack(f">{rank}I", raw[4 : 4 + 4 * rank])
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "made" / "here"
    digits.write_digits(folder)
    return folder


@pytest.fixture(scope="module")
def parts(folder: Path) -> list[np.ndarray]:
    return [read_idx(folder / name) for name in NAMES]


def test_the_collection_is_whole():
    """As UCI publishes it: so many of each digit; the digest is that of scikit-learn's copy."""
    pictures, labels = digits._digits()
    assert list(np.bincount(labels)) == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    rows = np.column_stack([pictures.reshape(-1, 64), labels]).astype(np.uint8)
    assert hashlib.sha256(rows.tobytes()).hexdigest() == (
        "68aea062d35a127749050fa0e52dca09d6569ac08092c925610e0954e172dde2"
    )


def test_files_are_mnists_and_no_others(folder, parts):
    assert {path.name for path in folder.iterdir()} == set(NAMES)
    train, train_labels, held_out, held_out_labels = parts
    assert train.shape == (len(train_labels), 28, 28)
    assert held_out.shape == (len(held_out_labels), 28, 28)
    assert len(train) > 5000


def test_write_returns_the_counts(tmp_path, parts):
    assert digits.write_digits(tmp_path) == {"train": len(parts[0]), "held_out": len(parts[2])}


def test_bytes_are_the_same_each_time(folder, tmp_path):
    digits.write_digits(tmp_path)
    for name in NAMES:
        first, second = ((f / name).read_bytes() for f in (folder, tmp_path))
        assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest(), name


def test_every_digit_is_held_out_in_the_same_share(parts):
    bundled = np.bincount(digits._digits()[1])
    held_out = np.bincount(parts[3])
    assert held_out.sum() + len(parts[1]) // 9 == bundled.sum() == 1797
    share = held_out / bundled
    assert share.min() >= 0.20
    assert share.max() <= 0.27


def test_no_held_out_digit_is_in_training_at_any_shift(parts):
    training = {picture.tobytes() for picture in parts[0]}
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            for picture in np.roll(parts[2], (down, right), axis=(1, 2)):
                assert picture.tobytes() not in training


def test_pictures_look_like_mnists(parts):
    for pictures in (parts[0], parts[2]):
        assert pictures.min() == 0
        assert pictures.max() == 255
    held_out = parts[2]
    assert not held_out[:, :4].any()
    assert not held_out[:, -4:].any()
    assert not held_out[:, :, :4].any()
    assert not held_out[:, :, -4:].any()


def test_a_picture_keeps_its_own_label_and_place(parts):
    """Shrunk back to 8x8, a held-out picture is one of the collection with that label."""
    pictures, labels = digits._digits()
    box = parts[2][:, 4:24, 4:24].astype(float)
    # Small pixel i has its middle at 2.5 i + 1.25 of the 20 pixels: look into the pixel there.
    places = np.floor(np.arange(8) * 2.5 + 1.25).astype(int)
    small = box[:, places][:, :, places] / 255 * 16
    flat = pictures.reshape(len(pictures), -1)
    for picture, label in zip(small[:40], parts[3][:40], strict=True):
        nearest = int(np.argmin(((flat - picture.reshape(-1)) ** 2).sum(axis=1)))
        assert labels[nearest] == label


def test_training_holds_each_picture_at_nine_places(parts):
    centred = 0
    keys = {picture.tobytes() for picture in parts[0]}
    for picture in parts[0][:500]:
        rows = np.flatnonzero(picture.any(axis=1))
        columns = np.flatnonzero(picture.any(axis=0))
        assert rows.min() >= 3
        assert rows.max() <= 24
        assert columns.min() >= 3
        assert columns.max() <= 24
        around = sum(
            np.roll(picture, (down, right), axis=(0, 1)).tobytes() in keys
            for down in (-1, 0, 1)
            for right in (-1, 0, 1)
        )
        centred += around == 9
    # One place in nine is the middle one, the only one with all its neighbours in the set.
    assert 20 < centred < 100


def test_command_line_writes_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["digits", str(tmp_path / "out")])
    digits.main()
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(NAMES)
    assert '"held_out": ' in capsys.readouterr().out
