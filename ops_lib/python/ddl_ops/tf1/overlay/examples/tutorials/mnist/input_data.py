"""tensorflow.examples.tutorials.mnist.input_data: MNIST's four files as batches.

Unlike the original it downloads nothing: a training reads what was staged into DATA_DIR.
Signatures, defaults and what the batches hold are TensorFlow 1.15's.
"""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import numpy as np
import tensorflow as tf

from ddl_ops.samples import DAMAGE, read_idx

TRAIN_IMAGES = "train-images-idx3-ubyte.gz"
TRAIN_LABELS = "train-labels-idx1-ubyte.gz"
TEST_IMAGES = "t10k-images-idx3-ubyte.gz"
TEST_LABELS = "t10k-labels-idx1-ubyte.gz"

Datasets = namedtuple("Datasets", ["train", "validation", "test"])


class DataSet:
    """Images and labels, dealt out in batches.

    Args:
        images: uint8 [n, height, width, 1].
        labels: [n], or [n, classes] if one_hot.
        fake_data: refused.
        one_hot: as the labels are; kept in the signature.
        dtype: tf.float32 scales images to 0..1, tf.uint8 leaves them as they are.
        reshape: whether images become [n, height * width].
        seed: of NumPy's global generator, which shuffles. None: TensorFlow's graph seed, if set.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        fake_data: bool = False,
        one_hot: bool = False,
        dtype: tf.DType = tf.float32,
        reshape: bool = True,
        seed: int | None = None,
    ) -> None:
        _refuse_fake_data(fake_data)
        graph_seed, op_seed = tf.get_seed(seed)
        np.random.seed(graph_seed if seed is None else op_seed)
        dtype = tf.as_dtype(dtype).base_dtype
        if dtype not in (tf.uint8, tf.float32):
            raise TypeError(f"dtype is {dtype.name}; give tf.float32 or tf.uint8.")
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images, but {len(labels)} labels.")
        if reshape:
            images = images.reshape(len(images), int(np.prod(images.shape[1:])))
        if dtype == tf.float32:
            images = images.astype(np.float32) * np.float32(1 / 255)
        self._images = images
        self._labels = labels
        self._epochs_completed = 0
        self._index_in_epoch = 0

    @property
    def images(self) -> np.ndarray:
        return self._images

    @property
    def labels(self) -> np.ndarray:
        return self._labels

    @property
    def num_examples(self) -> int:
        return len(self._images)

    @property
    def epochs_completed(self) -> int:
        return self._epochs_completed

    def next_batch(
        self, batch_size: int, fake_data: bool = False, shuffle: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """The next `batch_size` examples; each epoch in an order of its own if `shuffle`.

        A batch goes over the end of an epoch into the next one.
        """
        _refuse_fake_data(fake_data)
        if not self.num_examples:
            raise ValueError(
                "this part of the data has no images. Give read_data_sets another validation_size."
            )
        if shuffle and self._index_in_epoch == self._epochs_completed == 0:
            self._shuffle()
        parts = []
        wanted = batch_size
        while True:
            start = self._index_in_epoch
            self._index_in_epoch = end = min(start + wanted, self.num_examples)
            parts.append((self._images[start:end], self._labels[start:end]))
            wanted -= end - start
            if wanted == 0:
                break
            self._epochs_completed += 1
            self._index_in_epoch = 0
            if shuffle:
                self._shuffle()
        images, labels = zip(*parts, strict=True)
        return np.concatenate(images), np.concatenate(labels)

    def _shuffle(self) -> None:
        order = np.random.permutation(self.num_examples)
        self._images, self._labels = self._images[order], self._labels[order]


def read_data_sets(
    train_dir: str,
    fake_data: bool = False,
    one_hot: bool = False,
    dtype: tf.DType = tf.float32,
    reshape: bool = True,
    validation_size: int = 5000,
    seed: int | None = None,
    source_url: str = "",
) -> Datasets:
    """The datasets train, validation (the first of the training images) and test.

    Args:
        train_dir: folder with the four .gz files.
        fake_data: refused.
        one_hot: whether labels become rows [classes] of zeros and a one.
        dtype, reshape, seed: as in DataSet.
        validation_size: images taken from the training ones.
        source_url: not used: nothing is downloaded.

    Raises:
        FileNotFoundError: names the file that is missing.
        ValueError: a file is damaged, or validation_size is above the number of training images.
    """
    _refuse_fake_data(fake_data)
    del source_url
    train_images, train_labels = _part(train_dir, TRAIN_IMAGES, TRAIN_LABELS, one_hot)
    test_images, test_labels = _part(train_dir, TEST_IMAGES, TEST_LABELS, one_hot)
    if not 0 <= validation_size <= len(train_images):
        raise ValueError(
            f"validation_size is {validation_size}, but {train_dir} has {len(train_images)} "
            f"training images. Give read_data_sets(..., validation_size=) a number from 0 to that."
        )
    cut = validation_size

    def dataset(images: np.ndarray, labels: np.ndarray) -> DataSet:
        return DataSet(images, labels, dtype=dtype, reshape=reshape, seed=seed)

    return Datasets(
        train=dataset(train_images[cut:], train_labels[cut:]),
        validation=dataset(train_images[:cut], train_labels[:cut]),
        test=dataset(test_images, test_labels),
    )


def _part(
    folder: str, images_name: str, labels_name: str, one_hot: bool
) -> tuple[np.ndarray, np.ndarray]:
    images, labels = (_read(Path(folder), name) for name in (images_name, labels_name))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise ValueError(
            f"{folder}: {images_name} holds {list(images.shape)} and {labels_name} "
            f"{list(labels.shape)}; wanted [n, height, width] and [n]."
        )
    return images[..., None], np.eye(10)[labels] if one_hot else labels


def _read(folder: Path, name: str) -> np.ndarray:
    path = folder / name
    if not path.is_file():
        there = ", ".join(sorted(p.name for p in folder.glob("*"))[:8]) or "nothing"
        raise FileNotFoundError(
            f"{path} does not exist; in that folder is {there}. Nothing is downloaded: put MNIST's "
            "four .gz files into the training data."
        )
    try:
        return read_idx(path)
    except DAMAGE as error:
        raise ValueError(f"{path} is damaged, or no idx file: {error}") from error


def _refuse_fake_data(fake_data: bool) -> None:
    if fake_data:
        raise ValueError("fake_data=True is not supported. Give a DATA_DIR with a few real images.")
