"""What works in a healthy job, by subject; here what the subjects share.

Inputs differ by rank and index, so that a wrong peer, root or offset shows.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from speech import RANK, SIZE

v1 = tf.compat.v1

# Made before ddl is imported, with a seed of its own on each rank.
EARLY_GRAPH = tf.Graph()
with EARLY_GRAPH.as_default():
    v1.disable_resource_variables()
    v1.set_random_seed(RANK + 1)
    EARLY = v1.get_variable("early", [5, 3], initializer=v1.random_normal_initializer())
    EARLY_LOCAL = v1.Variable(
        float(RANK), collections=[v1.GraphKeys.LOCAL_VARIABLES], name="early_local"
    )
v1.enable_resource_variables()


class EarlyOptimizer(v1.train.Optimizer):
    """Applies gradients by itself, as that of BERT does: w - gradient."""

    def __init__(self) -> None:
        super().__init__(use_locking=False, name="EarlyOptimizer")

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        updates = [w.assign(w - g) for g, w in grads_and_vars if g is not None]
        return tf.group(*updates, name=name)


import ddl  # noqa: E402

# Whether ranks of one host play several, as tests/parallel/test_transports.py has them.
SEVERAL_HOSTS = "DDL_HOSTID" in os.environ

# With the number of ranks that it needs at least.
CHECKS: list[tuple[Callable[[], None], int]] = []
DTYPES = ["float32", "float64", "int32", "int64"]
HALVES = ["float16", "bfloat16"]
PLAIN = [
    *DTYPES,
    *HALVES,
    *"int8 uint8 int16 uint16 uint32 uint64 bool complex64 complex128".split(),
]
# Scalar, empty, one element, odd, more than the fusion limit, more than a piece.
SHAPES = [(), (0,), (3, 0), (1,), (7, 3), (70_001,), (1_100_003,)]


def check(function: Callable[[], None] | None = None, *, least: int = 1) -> Callable:
    if function is None:
        return functools.partial(check, least=least)
    CHECKS.append((function, least))
    return function


def values(shape: tuple[int, ...], dtype: str, rank: int, salt: int = 0) -> np.ndarray:
    """index * SIZE + rank, small enough to be exact in float32 after a sum over ranks."""
    index = np.arange(int(np.prod(shape))) % 100_003
    return (index * SIZE + rank + 7 * salt).reshape(shape).astype(dtype)


def total(shape: tuple[int, ...], dtype: str, salt: int = 0) -> np.ndarray:
    return sum(values(shape, "float64", rank, salt) for rank in range(SIZE)).astype(dtype)


def late_on(ranks: bool, value: tf.Tensor) -> tf.Tensor:
    """In a function: `value`, later on the ranks for which this is so."""
    wait = tf.numpy_function(lambda: time.sleep(0.3 * ranks) or np.float32(0), [], tf.float32)
    wait.set_shape([])
    return value + wait


def on_all_ranks(text: str) -> list[str]:
    """`text` of every rank, through the collectives: a length, then bytes."""
    encoded = np.zeros((SIZE, 64), np.int32)
    encoded[RANK, : len(text)] = list(text.encode())
    # In a graph of its own, whatever the check has open.
    with tf.Graph().as_default(), v1.Session() as session:
        rows = session.run(ddl.allreduce_n([encoded], average=False)[0])
    return [bytes(row[row > 0].tolist()).decode() for row in rows]


def digest(arrays: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def assert_same_everywhere(arrays: list[np.ndarray]) -> None:
    digests = on_all_ranks(digest(arrays)[:60])
    assert len(set(digests)) == 1, digests


def whole_batch() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.RandomState(9)
    return generator.randn(12, 5).astype("float32"), generator.randn(12, 3).astype("float32")


def my_part(batch: np.ndarray) -> np.ndarray:
    return np.split(batch, SIZE)[RANK]


def mismatch(run: Callable[[], object]) -> str:
    try:
        run()
    except tf.errors.InvalidArgumentError as error:
        return error.message
    raise AssertionError("no error")
