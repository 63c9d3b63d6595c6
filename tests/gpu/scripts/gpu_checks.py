"""gpu_checks.py DEVICE: runs each check, where results must lie on DEVICE, and says how it went.

Inputs differ by rank and index, so that a wrong peer, root or offset shows. What NCCL promises less
of than the host's path, halves and the last bit of averages, is compared with its own bounds.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable

import ddl
import ddl.keras
import keras
import numpy as np
import tensorflow as tf
from ddl_ops.loader import operations
from speech import RANK, SIZE, say

DEVICE = sys.argv[1]
CHECKS: list[Callable[[], None]] = []
MOVED = (
    "float32 float64 float16 bfloat16 int64 int8 uint8 int16 uint16 uint32 uint64 bool complex64 "
    "complex128"
).split()
# Scalar, empty, one element, odd, and large ones.
SHAPES = [(), (0,), (3, 0), (1,), (7, 3), (70_001,), (5_000_003,)]


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def values(shape: tuple[int, ...], dtype: str, rank: int) -> np.ndarray:
    """index * SIZE + rank, small enough to be exact in float32 after a sum over ranks."""
    index = np.arange(int(np.prod(shape))) % 100_003
    return (index * SIZE + rank).reshape(shape).astype(dtype)


def total(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return sum(values(shape, "float64", rank) for rank in range(SIZE)).astype(dtype)


def placed(tensor: tf.Tensor) -> np.ndarray:
    assert tensor.device.endswith(DEVICE), (tensor.device, DEVICE)
    return tensor.numpy()


def assert_same_everywhere(array: np.ndarray) -> None:
    mine = hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()
    rows = ddl.allgather(tf.constant([list(mine)], tf.int32)).numpy()
    assert (rows == rows[0]).all(), rows


@check
def sums_are_exact_and_averages_near() -> None:
    for dtype in ("float32", "float64"):
        for shape in SHAPES:
            mine = tf.constant(values(shape, dtype, RANK))
            np.testing.assert_array_equal(
                placed(ddl.allreduce(mine, average=False)), total(shape, dtype)
            )
            mean = placed(ddl.allreduce(mine))
            rtol = 1e-6 if dtype == "float32" else 1e-14
            np.testing.assert_allclose(mean, total(shape, dtype) / SIZE, rtol=rtol)
            np.testing.assert_array_equal(mine.numpy(), values(shape, dtype, RANK))  # untouched
            assert_same_everywhere(mean)


@check
def many_tensors_travel_in_one_group() -> None:
    shapes = [*SHAPES, *[(n,) for n in range(1, 120)]]
    sums = ddl.allreduce_n([values(shape, "float32", RANK) for shape in shapes], average=False)
    for shape, got in zip(shapes, sums, strict=True):
        np.testing.assert_array_equal(placed(got), total(shape, "float32"))


@check
def halves_are_within_the_bound_of_their_additions() -> None:
    for dtype, u in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
        half = tf.as_dtype(dtype).as_numpy_dtype
        parts = [np.random.RandomState(r).randn(70_001).astype(half) for r in range(SIZE)]
        wide = [part.astype("float64") for part in parts]
        bound = SIZE * u * np.sum(np.abs(wide), axis=0) + 2.0**-24
        error = np.abs(
            placed(ddl.allreduce(parts[RANK], average=False)).astype("float64") - sum(wide)
        )
        assert (error <= bound).all(), (dtype, (error / bound).max())


@check
def integers_are_added_on_the_host_exactly() -> None:
    for dtype in ("int32", "int64"):
        got = ddl.allreduce(tf.constant([-1 if RANK == 0 else 0, -2 * SIZE - 1], dtype)).numpy()
        assert got.tolist() == ([-1, -3] if SIZE == 1 else [0, -2 * SIZE - 1]), got


@check
def broadcast_gives_rank_0s_bytes() -> None:
    for dtype in MOVED:
        numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
        for count in (0, 1, 70_001):
            mine = (np.arange(count) * (RANK + 1) % 3).astype(numpy_dtype)
            got = placed(ddl.bcast(tf.constant(mine)))
            np.testing.assert_array_equal(got, (np.arange(count) % 3).astype(numpy_dtype))


@check
def gather_joins_different_first_dimensions() -> None:
    for dtype in MOVED:
        numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
        modulus = 2 if dtype == "bool" else 100
        for rows in (lambda r: 2 * r + 1, lambda r: r, lambda r: 0, lambda r: 40_000 + 17 * r):
            parts = [
                (values((rows(r), 3), "int64", r) % modulus).astype(numpy_dtype)
                for r in range(SIZE)
            ]
            got, sizes = operations().all_gather(parts[RANK])
            np.testing.assert_array_equal(got.numpy(), np.concatenate(parts))
            assert sizes.numpy().tolist() == [rows(r) for r in range(SIZE)]


@check
def collectives_come_after_what_makes_their_inputs() -> None:
    # Long kernels before, others at once after, and memory that changes hands all the time.
    @tf.function
    def step(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        x = tf.ones([1500, 1500]) * tf.cast(seed + RANK, tf.float32)
        for _ in range(6):
            x = tf.matmul(x, tf.eye(1500))
        summed = ddl.allreduce(x, average=False)
        gathered = ddl.allgather(tf.matmul(x, tf.eye(1500))[: RANK + 1])
        return summed * 2.0, gathered + 1.0, ddl.bcast(x * 3.0)

    for seed in range(40):
        summed, gathered, first = step(tf.constant(seed))
        want = float(sum(seed + r for r in range(SIZE)))
        assert (summed.numpy() == 2 * want).all(), seed
        rows = np.concatenate([np.full(r + 1, seed + r + 1.0) for r in range(SIZE)])
        assert (gathered.numpy() == rows[:, None]).all(), seed
        assert (first.numpy() == 3.0 * seed).all(), seed


@check
def mismatches_are_named_and_the_group_goes_on() -> None:
    if SIZE == 1:
        return
    try:
        ddl.allreduce_n([tf.ones([2 + (SIZE - 1 == RANK)])])
    except tf.errors.InvalidArgumentError as error:
        assert f"rank {SIZE - 1} sent float32[3]" in error.message, error.message
    else:
        raise AssertionError("no error")
    assert ddl.allreduce(tf.ones([3]), average=False).numpy().tolist() == [SIZE] * 3


@check
def training_ends_with_equal_weights() -> None:
    keras.utils.set_random_seed(RANK)
    layers = [keras.Input([5]), keras.layers.Dense(64, "relu"), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    generator = np.random.RandomState(RANK)
    x, y = generator.randn(256, 5), generator.randn(256, 3)
    model.fit(x, y, batch_size=32, epochs=3, verbose=0, callbacks=[ddl.keras.BroadcastCallback()])
    for weights in model.get_weights():
        assert_same_everywhere(weights)


def main() -> None:
    for function in CHECKS:
        try:
            function()
        except Exception:
            say(f"{function.__name__}: FAILED {traceback.format_exc()}")
        else:
            say(f"{function.__name__}: ok")


main()
