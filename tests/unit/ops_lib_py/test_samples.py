"""Sample files, and how their rows become a model's input."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
from ddl_ops import samples
from ddl_ops.checkpoints import TransformError

PIXELS = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4) * 10


def idx(array: np.ndarray, kind: int = 0x08) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.tobytes()


def test_idx_plain_and_compressed_with_the_labels_beside(tmp_path):
    (tmp_path / "a-images-idx3-ubyte").write_bytes(idx(PIXELS))
    (tmp_path / "b-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(PIXELS)))
    (tmp_path / "b-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.uint8([7, 3]))))
    plain = samples.read(tmp_path / "a-images-idx3-ubyte")
    packed = samples.read(tmp_path / "b-images-idx3-ubyte.gz")
    np.testing.assert_array_equal(plain.arrays[""], PIXELS)
    np.testing.assert_array_equal(packed.arrays[""], PIXELS)
    assert plain.labels is None
    assert packed.labels is not None
    assert packed.labels.tolist() == [7, 3]


def test_idx_of_big_endian_floats(tmp_path):
    values = np.array([[1.5, -2.0]], ">f4")
    (tmp_path / "x").write_bytes(idx(values, 0x0D))
    np.testing.assert_array_equal(samples.read(tmp_path / "x").arrays[""], [[1.5, -2.0]])


def test_npy_and_npz(tmp_path):
    np.save(tmp_path / "x.npy", PIXELS)
    np.savez(tmp_path / "x.npz", left=PIXELS, right=PIXELS[::-1])
    np.testing.assert_array_equal(samples.read(tmp_path / "x.npy").arrays[""], PIXELS)
    np.testing.assert_array_equal(samples.read(tmp_path / "x.npz").arrays["right"], PIXELS[::-1])


def test_labels_beside_npy(tmp_path):
    np.save(tmp_path / "test-images.npy", PIXELS)
    assert samples.read(tmp_path / "test-images.npy").labels is None
    np.save(tmp_path / "test-labels.npy", np.int64([7, 3]))
    labels = samples.read(tmp_path / "test-images.npy").labels
    assert labels is not None and labels.tolist() == [7, 3]


NUMBERS, OTHERS = np.int64([7, 3]), np.int64([1, 2])


@pytest.mark.parametrize(
    ("arrays", "inputs", "rows", "labels"),
    [
        ({"x": PIXELS, "y": NUMBERS}, ["images"], ["x"], NUMBERS),
        ({"X": PIXELS, "labels": NUMBERS}, ["images"], ["X"], NUMBERS),
        ({"left": PIXELS, "right": PIXELS, "y": NUMBERS}, ["left", "right"], ["left", "right"], 1),
        # As Keras's own mnist.npz has them: nothing of what was trained on.
        (
            {"x_train": PIXELS, "y_train": OTHERS, "x_test": PIXELS, "y_test": NUMBERS},
            *(["images"], ["x_test"], NUMBERS),
        ),
        ({"x": PIXELS, "y_test": NUMBERS}, ["images"], ["x"], NUMBERS),
        ({"x": PIXELS, "y": NUMBERS}, ["x", "y"], ["x", "y"], None),  # both are inputs
        ({"labels": PIXELS, "y": NUMBERS}, ["labels"], ["labels"], NUMBERS),
        ({"y": PIXELS}, ["images"], ["y"], None),
        ({"x_train": PIXELS, "y_train": OTHERS}, ["images"], ["x_train", "y_train"], None),
    ],
)
def test_labels_in_npz(tmp_path, arrays, inputs, rows, labels):
    np.savez(tmp_path / "x.npz", **arrays)
    found = samples.with_labels(samples.read(tmp_path / "x.npz"), inputs)
    assert sorted(found.arrays) == sorted(rows)
    assert (found.labels is None) is (labels is None)
    if found.labels is not None:
        assert found.labels.tolist() == NUMBERS.tolist()


@pytest.mark.parametrize(
    "labels",
    [
        *(np.uint8([2, 0, 1]), np.int64([[2], [0], [1]]), np.float32([2, 0, 1])),
        *(np.eye(3)[[2, 0, 1]], np.eye(3, dtype=bool)[[2, 0, 1]]),
    ],
)
def test_classes_are_whole_numbers_or_one_of_k(labels):
    assert samples.classes(labels).tolist() == [2, 0, 1]


def test_truths_are_two_classes():
    assert samples.classes(np.array([True, False])).tolist() == [1, 0]


@pytest.mark.parametrize(
    "labels",
    [
        *(np.float32([0.5, 1.0]), np.float32([np.nan, 1.0]), np.float32([[0.5, 0.5]])),
        *(np.array(["a", "b"]), np.int64(3), np.zeros((2, 3, 4)), np.array([[1, 1], [0, 1]])),
    ],
)
def test_what_is_no_class(labels):
    with pytest.raises(ValueError, match="are neither whole numbers"):
        samples.classes(labels)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.npy", b"not numpy"),
        ("x.npz", b"PK\x03\x04 cut"),
        ("x-idx3-ubyte", b"\x00\x00"),
        ("x-idx3-ubyte", b"text, and not an idx file"),
        ("x-idx3-ubyte", idx(PIXELS)[:-1]),
        ("x-idx3-ubyte.gz", gzip.compress(idx(PIXELS), mtime=0)[:-12]),
        ("x-idx3-ubyte.gz", b"not gzip"),
    ],
)
def test_damaged_sample_names_the_file_and_the_formats(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TransformError, match=rf"{name}: cannot be read .* \.npy, \.npz or idx"):
        samples.read(tmp_path / name)


def test_find_searches_the_folders_in_order(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
    (second / "t10k-images-idx3-ubyte.gz").touch()
    folders = [first, second]
    assert samples.find(None, folders) == second / "t10k-images-idx3-ubyte.gz"
    (first / "sample.npy").touch()
    assert samples.find("sample.npy", folders) == first / "sample.npy"
    assert samples.find(None, [first]) == first / "sample.npy"
    assert samples.find(None, [tmp_path]) is None
    with pytest.raises(TransformError, match="sample absent.npy: not in .*transform.sample"):
        samples.find("absent.npy", folders)


F32 = np.dtype(np.float32)


@pytest.mark.parametrize(
    "shape", [[None, 12], [None, 3, 4], [None, 3, 4, 1], [None, 3, None], [None, None, None]]
)
def test_bytes_are_scaled_and_keep_their_order(shape):
    batch = samples.fit(PIXELS, shape, F32)
    assert batch.dtype == np.float32
    assert batch.ndim == len(shape)
    np.testing.assert_allclose(batch.ravel(), PIXELS.ravel() / 255, rtol=1e-6)


def test_whole_numbers_stay_for_an_input_of_whole_numbers():
    batch = samples.fit(PIXELS, [None, 12], np.dtype(np.int32))
    np.testing.assert_array_equal(batch.ravel(), PIXELS.ravel())


def test_floats_are_not_scaled():
    np.testing.assert_array_equal(samples.fit(np.array([[200.0, 3.0]]), [None, 2], F32), [[200, 3]])


def test_one_row_becomes_a_batch():
    assert samples.fit(PIXELS[0], [None, 12], F32).shape == (1, 12)


@pytest.mark.parametrize("shape", [[None, 13], [None, 2, 2], [None, 4, None], [None, None]])
def test_rows_that_do_not_fit(shape):
    with pytest.raises(ValueError, match=r"rows of shape \[3, 4\] for an input of \["):
        samples.fit(PIXELS, shape, F32)


def test_no_rows_do_not_fit():
    with pytest.raises(ValueError, match="rows of shape"):
        samples.fit(PIXELS[:0], [None, 12], F32)


def test_zeros_take_the_smallest_batch():
    assert samples.zeros([None, 3, None], F32).shape == (1, 3, 1)
    assert samples.zeros([5, 3], F32).shape == (5, 3)
    assert samples.zeros([], F32).shape == ()
    assert samples.zeros([None], np.dtype(object)).tolist() == [b""]
