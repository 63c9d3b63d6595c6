"""All that works in a healthy job, in one start of TensorFlow: runs each check, says how it went.

Inputs differ by rank and index, so that a wrong peer, root or offset shows.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tensorflow as tf
from speech import RANK, SIZE, say

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

import ddl  # noqa: E402
import ddl.keras  # noqa: E402
import keras  # noqa: E402
from ddl_ops import collectives  # noqa: E402
from ddl_ops.gradients import reduce_gradients  # noqa: E402
from ddl_ops.loader import operations  # noqa: E402

CHECKS: list[Callable[[], None]] = []
DTYPES = ["float32", "float64", "int32", "int64"]
HALVES = ["float16", "bfloat16"]
PLAIN = [
    *DTYPES,
    *HALVES,
    *"int8 uint8 int16 uint16 uint32 uint64 bool complex64 complex128".split(),
]
# Scalar, empty, one element, odd, more than the fusion limit, more than a piece.
SHAPES = [(), (0,), (3, 0), (1,), (7, 3), (70_001,), (1_100_003,)]


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def values(shape: tuple[int, ...], dtype: str, rank: int, salt: int = 0) -> np.ndarray:
    """index * SIZE + rank, small enough to be exact in float32 after a sum over ranks."""
    index = np.arange(int(np.prod(shape))) % 100_003
    return (index * SIZE + rank + 7 * salt).reshape(shape).astype(dtype)


def total(shape: tuple[int, ...], dtype: str, salt: int = 0) -> np.ndarray:
    return sum(values(shape, "float64", rank, salt) for rank in range(SIZE)).astype(dtype)


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


@check
def placement() -> None:
    assert (ddl.rank(), ddl.size(), ddl.num_hosts()) == (RANK, SIZE, 1)
    assert ddl.local_rank() == RANK
    found = [int(x) for x in operations().init(-1, mode="-mode p")]
    assert found == [RANK, SIZE, RANK, SIZE, RANK], found
    assert int(operations().init(5, mode="")[4]) == 5


@check
def second_init_is_refused() -> None:
    ddl.init("-mode p")  # the import has done it, and a script that asks for it is none the worse
    try:
        ddl.init("-mode p")
    except RuntimeError as error:
        assert "already initialised" in str(error)
    else:
        raise AssertionError("no error")


@check
def bcast_gives_rank_0s_values() -> None:
    for dtype in PLAIN:
        numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
        mine = (np.arange(15) * (RANK + 1) % 3).reshape(5, 3).astype(numpy_dtype)
        want = (np.arange(15) % 3).reshape(5, 3).astype(numpy_dtype)
        got = ddl.bcast(tf.constant(mine))
        assert got.dtype == tf.as_dtype(dtype)
        np.testing.assert_array_equal(got.numpy(), want)
    for shape in SHAPES:
        got = ddl.bcast(tf.constant(values(shape, "float32", RANK)))
        np.testing.assert_array_equal(got.numpy(), values(shape, "float32", 0))


@check
def allreduce_sums_and_averages() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            mine = tf.constant(values(shape, dtype, RANK))
            got = operations().all_reduce(mine, op="sum")
            np.testing.assert_array_equal(got.numpy(), total(shape, dtype))
            np.testing.assert_array_equal(mine.numpy(), values(shape, dtype, RANK))  # untouched
            mean = operations().all_reduce(mine, op="avg").numpy()
            want = total(shape, dtype)
            want = want // SIZE if dtype.startswith("int") else want / np.array(SIZE, dtype)
            np.testing.assert_array_equal(mean, want)


@check
def integer_averages_truncate_toward_zero() -> None:
    mine = np.array([-1 if RANK == 0 else 0, 1 if RANK == 0 else 0, -2 * SIZE - 1], np.int32)
    got = ddl.allreduce_n([mine])[0].numpy()
    want = [-1, 1, -3] if SIZE == 1 else [0, 0, -2 * SIZE - 1]
    np.testing.assert_array_equal(got, want)


def half_values(dtype: str, count: int, rank: int) -> np.ndarray:
    """Numbers of all bits that the type has, whose sums over ranks are exact in float32."""
    generator = np.random.RandomState(count + rank)
    bits, spread = (2047, 3) if dtype == "float16" else (255, 6)
    exponents = generator.randint(-spread, spread + 1, count)
    wide = generator.randint(-bits, bits + 1, count) * 2.0**exponents
    return wide.astype(tf.as_dtype(dtype).as_numpy_dtype)


@check
def halves_are_summed_as_float32_and_rounded_once() -> None:
    for dtype in HALVES:
        half = tf.as_dtype(dtype).as_numpy_dtype
        # From 32 Ki elements on in shares, which are not all equal; the last in two pieces.
        counts = (0, 1, 7, 32_768, 70_001, 2_100_003)
        mine = [half_values(dtype, count, RANK) for count in counts]
        sums = ddl.allreduce_n(mine, average=False)
        means = ddl.allreduce_n(mine)
        plain = operations().all_reduce_n(mine, op="avg", mpi=True, check=1e-3)
        for i, count in enumerate(counts):
            wide = [half_values(dtype, count, rank).astype("float32") for rank in range(SIZE)]
            total32 = np.sum(wide, axis=0)
            assert sums[i].dtype == tf.as_dtype(dtype)
            np.testing.assert_array_equal(sums[i].numpy(), total32.astype(half))
            mean = (total32 / np.float32(SIZE)).astype(half)
            np.testing.assert_array_equal(means[i].numpy(), mean)
            np.testing.assert_array_equal(plain[i].numpy(), mean)
            np.testing.assert_array_equal(ddl.allreduce(mine[i]).numpy(), mean)
    # The average of large numbers is there even where their sum is too large.
    large = tf.constant([40000.0], tf.float16)
    assert ddl.allreduce(large).numpy() == 40000.0
    assert ddl.allreduce(large, average=False).numpy() == (40000.0 if SIZE == 1 else np.inf)


@check
def gradients_may_travel_as_halves() -> None:
    # Magnitudes over four decades, and what float16 has no numbers for but 0.
    count = 50_000
    exponents = np.random.RandomState(4).uniform(-3, 1, count)
    parts = [np.random.RandomState(60 + r).randn(count) * 10.0**exponents for r in range(SIZE)]
    mean, magnitude = np.mean(parts, axis=0), np.mean(np.abs(parts), axis=0)
    whole = tf.constant([RANK, 7])
    for wire, u, step in (("float16", 2.0**-11, 2.0**-24), ("bfloat16", 2.0**-8, 0.0)):
        os.environ["DDL_WIRE_DTYPE"] = wire
        try:
            for dtype in (tf.float32, tf.float64):
                mine = [tf.constant(parts[RANK], dtype), tf.fill([3], tf.cast(1e-9, dtype)), whole]
                got, tiny, untouched = reduce_gradients(mine)
                assert got.dtype == tiny.dtype == dtype and untouched.dtype == tf.int32
                error = np.abs(got.numpy() - mean)
                assert (error <= 2 * u * magnitude * 1.01 + step).all(), (error / magnitude).max()
                assert error.max() > 0
                assert (tiny.numpy() == 0).all() == (wire == "float16")
                np.testing.assert_array_equal(untouched, [sum(range(SIZE)) // SIZE, 7])
                assert_same_everywhere([got.numpy()])
                if RANK == 0 and dtype == tf.float32:
                    relative = np.linalg.norm(error) / np.linalg.norm(mean)
                    say(f"{wire}: norm of the error / norm of the mean {relative:.2e}")
        finally:
            del os.environ["DDL_WIRE_DTYPE"]


@check
def ranks_are_known_to_graphs() -> None:
    def found() -> tf.Tensor:
        ops = [collectives.rank_op(), collectives.size_op(), collectives.local_rank_op()]
        assert all(op.dtype == tf.int32 and op.shape == () for op in ops)
        return tf.stack(ops)

    want = [RANK, SIZE, RANK]
    assert found().numpy().tolist() == want
    assert tf.function(found)().numpy().tolist() == want
    with tf.Graph().as_default(), v1.Session() as session:
        assert session.run(found()).tolist() == want


@check
def allgather_joins_in_the_order_of_the_ranks() -> None:
    def rows(rank: int, kind: int) -> int:
        return [2 * rank + 1, rank, SIZE - 1 - rank, 0, 40_000 + 17 * rank][kind]

    for dtype in PLAIN:
        numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
        modulus = 2 if dtype == "bool" else 100
        for kind in range(5):
            for rest in [(), (3,), (2, 0), (1, 2)]:
                parts = [
                    (values((rows(r, kind), *rest), "int64", r, kind) % modulus).astype(numpy_dtype)
                    for r in range(SIZE)
                ]
                got, sizes = operations().all_gather(parts[RANK])
                assert got.dtype == tf.as_dtype(dtype)
                np.testing.assert_array_equal(got.numpy(), np.concatenate(parts))
                assert sizes.numpy().tolist() == [rows(r, kind) for r in range(SIZE)]


@check
def allgather_in_graphs_knows_its_shape() -> None:
    mine = np.full((RANK + 1, 3), RANK, "float32")
    want = np.concatenate([np.full((rank + 1, 3), rank) for rank in range(SIZE)])

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def gather(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        both = ddl.allgather(x), ddl.allgather(-x)
        assert both[0].shape.as_list() == [None, 3]
        return both

    for sign, got in zip((1, -1), gather(mine), strict=True):
        np.testing.assert_array_equal(got, sign * want)
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32)
        gathered = [ddl.allgather(x * float(i)) for i in range(6)]
        for i, got in enumerate(session.run(gathered, {x: mine})):
            np.testing.assert_array_equal(got, i * want)
        try:
            ddl.allgather(tf.constant(1.0))
        except ValueError as error:
            assert "rank" in str(error)
        else:
            raise AssertionError("no error")


def slices_of(rank: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """rank + 1 slices: row 2 on every rank, and others."""
    indices = np.array([2, *range(rank)], np.int64)
    return values((rank + 1, 2), dtype, rank), indices


@check
def allreduce_of_slices_keeps_them() -> None:
    pairs = [slices_of(rank) for rank in range(SIZE)]
    all_values = np.concatenate([pair[0] for pair in pairs])
    all_indices = np.concatenate([pair[1] for pair in pairs])
    mine = tf.IndexedSlices(*map(tf.constant, slices_of(RANK)), tf.constant([9, 2]))

    def reduce(average: bool) -> tuple[tf.Tensor, tf.Tensor]:
        got = ddl.allreduce(mine, average=average)
        assert isinstance(got, tf.IndexedSlices)
        return got.values, got.indices

    for run in (reduce, tf.function(reduce)):
        for average, divisor in ((False, 1), (True, SIZE)):
            got_values, got_indices = run(average)
            # Not to the bit: in graphs TensorFlow multiplies by the reciprocal.
            np.testing.assert_allclose(got_values, all_values / divisor, rtol=1e-6)
            np.testing.assert_array_equal(got_indices, all_indices)
    whole = tf.IndexedSlices(*map(tf.constant, slices_of(RANK, "int32")), tf.constant([9, 2]))
    summed = ddl.allreduce(whole, average=False)
    np.testing.assert_array_equal(summed.values, all_values.astype("int32"))
    try:
        ddl.allreduce(whole)
    except TypeError as error:
        assert "cannot average IndexedSlices of int32" in str(error)
    else:
        raise AssertionError("no error")


def weighted(outputs: list[tf.Tensor]) -> tf.Tensor:
    """A loss in which each rank and element counts differently, and not linearly."""
    loss = tf.zeros([], tf.float64)
    for i, output in enumerate(outputs):
        count = tf.size(output)
        weights = tf.cast(tf.range(count), tf.float64) + tf.constant(RANK + 1.5 + i, tf.float64)
        loss += tf.reduce_sum(tf.square(tf.reshape(output, [-1])) * weights)
    return loss


LOSSES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "bcast": lambda x: weighted([ddl.bcast(x[:1])]),
    "sum": lambda x: weighted([ddl.allreduce(x[:1], average=False)]),
    "average": lambda x: weighted([ddl.allreduce(x[:1])]),
    "n": lambda x: weighted(ddl.allreduce_n([x[:1], x[0] * x[0]], average=False)),
    "n average, one unused": lambda x: weighted(ddl.allreduce_n([x[:1], x[0, :1] ** 3.0])[1:]),
    "gather": lambda x: weighted([ddl.allgather(x)]),
    "several": lambda x: weighted([ddl.bcast(x[0]), ddl.allgather(ddl.allreduce(x[:1]) * x)]),
}


def my_gradients(loss: Callable[[tf.Tensor], tf.Tensor], x: np.ndarray) -> dict[str, np.ndarray]:
    """Of this rank's x, in each of TensorFlow's ways."""

    def tape(function: Callable[[tf.Tensor], tf.Tensor], at: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as recorded:
            recorded.watch(at)
            found = function(at)
        return recorded.gradient(found, at)

    here = tf.constant(x)
    gradients = {
        "eager": tape(loss, here).numpy(),
        "around a function": tape(tf.function(loss), here).numpy(),
        "in a function": tf.function(lambda at: tape(loss, at))(here).numpy(),
    }
    with tf.Graph().as_default(), v1.Session() as session:
        at = v1.placeholder(tf.float64, x.shape)
        gradients["graph"] = session.run(tf.gradients(loss(at), at)[0], {at: x})
    return gradients


@check
def gradients_are_those_of_the_sum_of_all_losses() -> None:
    starts = [values((rank + 1, 2), "float64", rank) / 10 + 0.3 for rank in range(SIZE)]
    step = 1e-5
    for name, loss in LOSSES.items():

        def sum_of_losses(
            rank: int, index: int, move: float, loss: Callable[[tf.Tensor], tf.Tensor] = loss
        ) -> float:
            x = starts[RANK].copy()
            if rank == RANK:
                x.flat[index] += move
            return float(ddl.allreduce(loss(tf.constant(x)), average=False))

        want = np.zeros_like(starts[RANK])
        for rank in range(SIZE):
            for index in range(starts[rank].size):
                up, down = (sum_of_losses(rank, index, move) for move in (step, -step))
                if rank == RANK:
                    want.flat[index] = (up - down) / (2 * step)
        for way, got in my_gradients(loss, starts[RANK]).items():
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6, err_msg=f"{name} {way}")


@check
def gradients_of_independent_collectives_keep_one_order() -> None:
    def loss(x: tf.Tensor) -> tf.Tensor:
        parts = [ddl.allreduce(x * float(i), average=False) * float(i) for i in range(1, 16)]
        return tf.add_n([tf.reduce_sum(part) for part in parts])

    for _ in range(5):
        for way, got in my_gradients(lambda x: tf.cast(loss(x), tf.float64), np.ones([3])).items():
            np.testing.assert_allclose(got, [SIZE * sum(i * i for i in range(1, 16))] * 3), way


@check
def gradients_of_complex_and_half_tensors() -> None:
    mine = tf.constant([1 + 2j, 3 - 1j], tf.complex64) * (RANK + 1.0)
    with tf.GradientTape() as tape:
        tape.watch(mine)
        gathered = ddl.allgather(mine)
        loss = tf.reduce_sum(tf.math.real(gathered * tf.math.conj(gathered)))
    np.testing.assert_allclose(tape.gradient(loss, mine), 2 * SIZE * mine, rtol=1e-6)
    half = tf.Variable(tf.ones([3], tf.bfloat16))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(ddl.bcast(half)) * (RANK + 1.0)
    want = sum(range(1, SIZE + 1)) if RANK == 0 else 0
    assert tape.gradient(loss, half).numpy().tolist() == [want] * 3


@check
def xla_beside_is_not_disturbed() -> None:
    compiled = tf.function(lambda x: tf.tanh(x) * 2.0, jit_compile=True)
    beside = tf.function(lambda x: ddl.allreduce(compiled(x), average=False), jit_compile=False)
    mine = values((5,), "float32", RANK) / 10
    want = sum(2 * np.tanh(values((5,), "float32", rank) / 10) for rank in range(SIZE))
    np.testing.assert_allclose(beside(mine), want, rtol=1e-5)
    message = mismatch(
        lambda: tf.function(lambda x: ddl.allreduce(x) + 1.0, jit_compile=True)(mine)
    )
    assert "unsupported operations" in message and "AllReduce" in message, message
    assert "every_check.py" in message, message  # the line at which it was called
    np.testing.assert_allclose(beside(mine), want, rtol=1e-5)


@check
def allreduce_n_keeps_tensors_apart() -> None:
    for dtype in DTYPES:
        mine = [values(shape, dtype, RANK, salt) for salt, shape in enumerate(SHAPES)]
        got = ddl.allreduce_n(mine, average=False)
        assert len(got) == len(SHAPES)
        for salt, shape in enumerate(SHAPES):
            np.testing.assert_array_equal(got[salt].numpy(), total(shape, dtype, salt))
    assert ddl.allreduce_n([]) == []


@check
def allreduce_n_takes_many_tensors() -> None:
    shapes = [(i % 13,) for i in range(500)]
    got = ddl.allreduce_n([values(s, "float32", RANK, i) for i, s in enumerate(shapes)])
    for i, shape in enumerate(shapes):
        want = total(shape, "float32", i) / np.float32(SIZE)
        np.testing.assert_array_equal(got[i].numpy(), want)


@check
def baseline_and_check_attributes() -> None:
    mine = [np.random.RandomState(RANK).randn(n).astype("float32") for n in (3, 40_000, 1_200_000)]
    fused = operations().all_reduce_n(mine, op="avg", check=1e-5)
    plain = operations().all_reduce_n(mine, op="avg", mpi=True)
    both = operations().all_reduce_n(mine, op="sum", mpi=True, check=1e-5)
    for a, b, c in zip(fused, plain, both, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(c / SIZE, b, rtol=1e-5, atol=1e-6)
    try:
        operations().all_reduce_n(mine, op="avg", check=2.0)
    except tf.errors.InvalidArgumentError as error:
        assert "between 0 and 1" in error.message
    else:
        raise AssertionError("no error")


@check
def results_are_the_same_bits_on_all_ranks_and_in_every_run() -> None:
    # Sums that depend on their order: magnitudes over 16 decades.
    generator = np.random.RandomState(100 + RANK)
    for count in (1, 5, 1000, 100_000, 3_000_001):
        mine = generator.randn(count) * 10.0 ** generator.randint(-8, 8, count)
        first = ddl.allreduce_n([mine.astype("float32"), mine[:7].astype("float32")])
        again = ddl.allreduce_n([mine.astype("float32"), mine[:7].astype("float32")])
        for a, b in zip(first, again, strict=True):
            assert a.numpy().tobytes() == b.numpy().tobytes()
        assert_same_everywhere([tensor.numpy() for tensor in first])


@check
def collectives_in_a_function_keep_their_order() -> None:
    @tf.function
    def run(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        sums = [ddl.allreduce_n([x * float(i)], average=False)[0] for i in range(1, 9)]
        return ddl.bcast(x), *sums

    mine = tf.constant(values((4, 2), "float32", RANK))
    for _ in range(3):
        got = run(mine)
        np.testing.assert_array_equal(got[0].numpy(), values((4, 2), "float32", 0))
        for i in range(1, 9):
            np.testing.assert_array_equal(got[i].numpy(), total((4, 2), "float32") * i)


@check
def collectives_in_a_tf1_graph() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 2])
        roots = [ddl.bcast(x + float(i)) for i in range(12)]
        mean = ddl.allreduce_n([x, x[:1]])
        feed = {x: values((4, 2), "float32", RANK)}
        for i, got in reversed(list(enumerate(session.run(roots[::-1], feed)[::-1]))):
            np.testing.assert_array_equal(got, values((4, 2), "float32", 0) + i)
        got = session.run(mean, feed)
        np.testing.assert_array_equal(got[1], total((4, 2), "float32")[:1] / np.float32(SIZE))


class Delays:
    """Makes tensors of a TF1 graph ready after times that differ by rank, tensor and run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(1000 * seed + RANK)

    def __call__(self, value: tf.Tensor, longest_s: float = 0.003) -> tf.Tensor:
        def wait(x: np.ndarray) -> np.ndarray:
            time.sleep(self.random.random() * longest_s)
            return x

        late = v1.py_func(wait, [value], value.dtype)
        late.set_shape(value.shape)
        return late


@check
def tf1_fetches_of_a_train_op_and_the_mean_loss_agree_on_their_order() -> None:
    os.environ["DDL_GROUP_SIZE"] = "8"
    try:
        with tf.Graph().as_default():
            v1.set_random_seed(3)
            inputs, targets = v1.placeholder(tf.float32, [None, 4]), v1.placeholder(tf.float32)
            w, b = v1.get_variable("w", [4, 3]), v1.get_variable("b", [3])
            loss = tf.reduce_mean(tf.square(tf.matmul(inputs, w) + b - targets))
            train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
            mean_loss = collectives.allreduce(loss, name="mean_loss")
            # A second model beside it, as in adversarial training.
            other = v1.get_variable("other", [3], initializer=v1.zeros_initializer())
            distance = tf.reduce_sum(tf.square(other - tf.reduce_mean(targets)))
            train_other = v1.train.AdamOptimizer(0.01).minimize(distance, var_list=[other])
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                own, means = [], []
                for step in range(40):
                    generator = np.random.RandomState(step * SIZE + RANK)
                    feed = {inputs: generator.randn(6, 4), targets: generator.randn(6, 3)}
                    fetches = [train, train_other, mean_loss, loss]
                    _, _, mean, mine = session.run(fetches, feed)
                    own.append(mine)
                    means.append(mean)
                weights = session.run([w, b, other])
    finally:
        del os.environ["DDL_GROUP_SIZE"]
    assert_same_everywhere(weights)
    np.testing.assert_array_equal(means, ddl.allreduce(np.array(own)))
    assert means[-1] < means[0]


@check
def tf1_free_standing_collectives_are_known_by_name() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 2])
        delay = Delays(1)
        # Small ones travel with the agreement, large ones after it.
        inputs = [delay(tf.tile(x, [1 if i % 3 else 4000, 1]) + float(i)) for i in range(20)]
        makers = [lambda t: ddl.allreduce(t, average=False), ddl.allgather, ddl.bcast]
        outputs = [makers[i % 3](t) for i, t in enumerate(inputs)]
        for run in range(6):
            parts = [values((3, 2), "float32", rank, run) for rank in range(SIZE)]
            got = session.run(outputs, {x: parts[RANK]})
            for i, output in enumerate(got):
                mine = [np.tile(part, [1 if i % 3 else 4000, 1]) + i for part in parts]
                want = [sum(mine), np.concatenate(mine), mine[0]][i % 3]
                np.testing.assert_array_equal(output, want)


@check
def tf1_inputs_ready_in_opposite_order_on_the_ranks() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [])
        delay = Delays(2)
        inputs: dict[int, tf.Tensor] = {}
        for i in range(6) if RANK % 2 == 0 else reversed(range(6)):
            with tf.control_dependencies(list(inputs.values())):
                inputs[i] = delay(x * (i + 1.0))
        # Raw, as in scripts that load the library themselves; several tensors each.
        sums = [
            operations().all_reduce_n([inputs[i], -inputs[i]], op="sum", name=f"crossed_{i}")
            for i in range(6)
        ]
        for run in range(4):
            got = session.run(sums, {x: RANK + run})
            want = sum(range(SIZE)) + SIZE * run
            assert got == [[want * (i + 1), -want * (i + 1)] for i in range(6)], got


@check
def tf1_iterations_of_a_loop_are_told_apart() -> None:
    def outputs() -> tf.Tensor:
        delay = Delays(4)

        def body(i: tf.Tensor, found: tf.TensorArray) -> tuple[tf.Tensor, tf.TensorArray]:
            mine = delay(tf.cast(10 * i + RANK, tf.float32))
            both = ddl.allreduce(mine, average=False), ddl.allgather([delay(mine)])
            return i + 1, found.write(i, tf.concat([both[0][tf.newaxis], both[1]], 0))

        found = tf.TensorArray(tf.float32, 8, element_shape=[None])
        return tf.while_loop(lambda i, _: i < 8, body, (0, found), parallel_iterations=4)[1].stack()

    want = [
        [10 * i * SIZE + sum(range(SIZE)), *(10 * i + rank for rank in range(SIZE))]
        for i in range(8)
    ]
    for version in (1, 2):
        (v1.disable_control_flow_v2 if version == 1 else v1.enable_control_flow_v2)()
        try:
            with tf.Graph().as_default(), v1.Session() as session:
                got = outputs()
                for _ in range(3):
                    np.testing.assert_array_equal(session.run(got), want)
        finally:
            v1.enable_control_flow_v2()


@check
def tf1_threads_may_run_one_collective_at_a_time_each() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        delay = Delays(5)
        total_op = ddl.allreduce(delay(tf.constant([1.0, RANK])), average=False)
        other_op = ddl.allgather(delay(tf.constant([RANK])))
        want = [[SIZE, sum(range(SIZE))], list(range(SIZE))]
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(session.run, [total_op, other_op]) for _ in range(12)]
            for run in runs:
                assert [part.tolist() for part in run.result()] == want


def train_tf1(variables: list[tf.Variable], loss: tf.Tensor, x: tf.Tensor) -> list[np.ndarray]:
    step = v1.train.get_or_create_global_step()
    train = v1.train.AdamOptimizer(0.05).minimize(loss, step)
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        starts = session.run(variables)
        assert_same_everywhere(starts)
        for i in range(8):
            session.run(train, {x: np.random.RandomState(50 * i + RANK).randn(6, 5)})
        ends = session.run(variables)
        assert session.run(step) == 8
    assert digest(starts) != digest(ends)
    assert_same_everywhere(ends)
    return ends


@check
def tf1_ranks_end_with_equal_weights() -> None:
    with tf.Graph().as_default():
        v1.set_random_seed(RANK + 77)
        x = v1.placeholder(tf.float32, [None, 5])
        w = v1.get_variable("w", [5, 3], use_resource=True)
        b = v1.get_variable("b", [3], initializer=v1.random_normal_initializer())
        unused = v1.get_variable("unused", [2], initializer=v1.random_normal_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w) + b - 1.0))
        train_tf1([w, b, unused], loss, x)


@check
def tf1_variables_made_before_import_start_equal() -> None:
    with EARLY_GRAPH.as_default():
        x = v1.placeholder(tf.float32, [None, 5])
        late = v1.get_variable("late", [3], initializer=v1.random_normal_initializer())
        loss = tf.reduce_mean(tf.square(tf.matmul(x, EARLY) + late - 1.0))
        train_tf1([EARLY, late], loss, x)
        with v1.Session() as session:  # a local variable is each rank's own
            session.run(v1.local_variables_initializer())
            assert session.run(EARLY_LOCAL) == float(RANK)


@check
def tf1_late_initialiser_leaves_trained_variables_alone() -> None:
    with tf.Graph().as_default():
        v1.set_random_seed(RANK + 7)
        w = v1.get_variable("w", [4], initializer=v1.random_normal_initializer())
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            session.run(v1.assign_add(w, tf.ones([4])))
            trained = session.run(w)
            late = v1.get_variable("late", [2], initializer=v1.random_normal_initializer())
            session.run(v1.variables_initializer([late]))
            assert_same_everywhere([session.run(late)])
            np.testing.assert_array_equal(session.run(w), trained)


@check
def tf1_single_initialisers_start_equal() -> None:
    def random_variable(name: str, **options: object) -> tf.Variable:
        return v1.get_variable(name, [3], initializer=v1.random_normal_initializer(), **options)

    for kind in (False, True):
        with tf.Graph().as_default(), v1.Session() as session:
            v1.set_random_seed(RANK + 9)
            first, second, third = (random_variable(n, use_resource=kind) for n in "abc")
            session.run(first.initializer)
            # From rank to rank in another order, which a run of several does not have.
            rest = [second.initializer, third.initializer]
            session.run(rest if RANK % 2 == 0 else rest[::-1])
            starts = session.run([first, second, third])
            assert_same_everywhere(starts)
            assert first.initializer is first.initializer
            local = random_variable("d", collections=[v1.GraphKeys.LOCAL_VARIABLES])
            session.run(local.initializer)
            if SIZE > 1:
                assert len(set(on_all_ranks(digest([session.run(local)])[:60]))) == SIZE
            # One rank alone: a variable's load() is no start.
            if RANK == 0:
                first.load([7.0, 8.0, 9.0], session)
            want = [7, 8, 9] if RANK == 0 else starts[0]
            np.testing.assert_array_equal(session.run(first), want)


@check
def tf1_exported_graphs_are_made_after_the_graph_is_finalised() -> None:
    with tf.Graph().as_default() as graph, v1.Session() as session:
        w = v1.get_variable("w", [2])
        session.run(v1.global_variables_initializer())
        late = v1.get_variable("late", [2])
        graph.finalize()
        saved = v1.train.export_meta_graph()
        names = {node.name for node in saved.graph_def.node}
        assert {w.initializer.name, late.initializer.name} <= names


@check
def tf1_monitored_session_starts_equal() -> None:
    with tf.Graph().as_default():
        v1.set_random_seed(RANK + 5)
        w = v1.get_variable("w", [4], initializer=v1.random_normal_initializer())
        v1.train.get_or_create_global_step()
        with v1.train.MonitoredTrainingSession() as session:
            assert_same_everywhere([session.run(w)])


@check
def tf1_groups_sparse_and_missing_gradients() -> None:
    os.environ["DDL_GROUP_SIZE"] = "10"
    try:
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(RANK)
            table = v1.get_variable("table", [6, 2])
            rest = [v1.get_variable(f"w{i}", [2 + i], dtype=tf.float32) for i in range(4)]
            half = v1.get_variable("half", [3], dtype=tf.float16)
            rows = tf.gather(table, [RANK % 6, 2])  # other rows on each rank
            loss = tf.reduce_sum(rows) + tf.reduce_sum(tf.cast(half, tf.float32))
            loss += tf.add_n([tf.reduce_sum(w) * (i + 1.0) for i, w in enumerate(rest)])
            idle = v1.get_variable("idle", [2])
            optimizer = v1.train.GradientDescentOptimizer(1.0)
            pairs = optimizer.compute_gradients(loss, [table, *rest, half, idle])
            assert pairs[-1][0] is None
            train = optimizer.apply_gradients(pairs)
            nodes = [op.name for op in graph.get_operations() if op.type == "AllReduceN"]
            # From the end: 5 and 4 elements; 3 and 2; the table's 12 alone; half's 3, by dtype.
            assert len(nodes) == 4, nodes
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                before = session.run([table, *rest, half, idle])
                session.run(train)
                after = session.run([table, *rest, half, idle])
        moved = before[0] - after[0]
        want = np.zeros((6, 2))
        for rank in range(SIZE):
            want[rank % 6] += 1 / SIZE
            want[2] += 1 / SIZE
        np.testing.assert_allclose(moved, want, atol=1e-6)
        for i in range(4):
            np.testing.assert_allclose(before[1 + i] - after[1 + i], i + 1.0, rtol=1e-5)
        np.testing.assert_array_equal(before[-1], after[-1])
        assert_same_everywhere(after)
    finally:
        del os.environ["DDL_GROUP_SIZE"]


@check
def tf1_groups_need_only_their_own_gradients() -> None:
    def ancestors(op: tf.Operation) -> set[str]:
        seen: set[str] = set()
        ops = [op]
        while ops:
            for before in {t.op for t in ops[-1].inputs} | set(ops.pop().control_inputs):
                if before.name not in seen:
                    seen.add(before.name)
                    ops.append(before)
        return seen

    os.environ["DDL_GROUP_SIZE"] = "9"
    try:
        with tf.Graph().as_default() as graph:
            layer = tf.ones([2, 3])
            for i in range(3):
                layer = tf.tanh(tf.matmul(layer, v1.get_variable(f"w{i}", [3, 3])))
            optimizer = v1.train.GradientDescentOptimizer(1.0)
            pairs = optimizer.compute_gradients(tf.reduce_sum(layer))
            optimizer.apply_gradients(pairs)
            groups = [op for op in graph.get_operations() if op.type == "AllReduceN"]
    finally:
        del os.environ["DDL_GROUP_SIZE"]
    assert len(groups) == 3
    # The last layer's first: while it is reduced, the other gradients are still being computed.
    for number, group in enumerate(groups):
        needed = [gradient.op.name in ancestors(group) for gradient, _ in pairs]
        assert needed == [i >= 2 - number for i in range(3)], needed


@check
def tf1_sparse_gradients_may_stay_sparse() -> None:
    def train(**options: bool) -> tuple[list[np.ndarray], list[str], list[bool]]:
        with tf.Graph().as_default() as graph:
            v1.set_random_seed(5)
            table = v1.get_variable("table", [7, 2])
            second = v1.get_variable("second", [5, 1])
            bias = v1.get_variable("bias", [2])
            loss = tf.reduce_sum(tf.square(tf.gather(table, [2] * (RANK + 1) + [RANK % 7]) + bias))
            loss += tf.reduce_sum(tf.square(tf.gather(second, [RANK % 5, 3])))
            optimizer = v1.train.GradientDescentOptimizer(0.1)
            pairs = optimizer.compute_gradients(loss, [table, second, bias])
            reduced = ddl.grads_reduce(pairs, **options)
            updates = [v.assign_sub(0.1 * tf.convert_to_tensor(g)) for g, v in reduced]
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(updates)
                ends = session.run([table, second, bias])
            ops = [op.type for op in graph.get_operations()]
            return ends, ops, [isinstance(g, tf.IndexedSlices) for g, _ in reduced]

    dense, ops, stayed = train()
    assert "AllGather" not in ops and not any(stayed)
    sparse, ops, stayed = train(sparse_as_dense=False)
    assert ops.count("AllGather") == 4 and ops.count("AllReduceN") == 1
    assert stayed == [True, True, False]
    os.environ["DDL_SPARSE_AS_DENSE"] = "0"
    try:
        by_setting, ops, _ = train()
        assert ops.count("AllGather") == 4
        _, ops, _ = train(sparse_as_dense=True)
        assert "AllGather" not in ops
    finally:
        del os.environ["DDL_SPARSE_AS_DENSE"]
    for a, b, c in zip(dense, sparse, by_setting, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        np.testing.assert_array_equal(b, c)
    assert_same_everywhere(sparse)


@check
def tf1_optimizers_and_keras_take_sparse_gradients() -> None:
    def tf1_adam() -> list[np.ndarray]:
        with tf.Graph().as_default():
            v1.set_random_seed(11)
            table = v1.get_variable("table", [6, 2])
            loss = tf.reduce_sum(tf.square(tf.gather(table, [RANK % 6, 2]) - 1.0))
            train = v1.train.AdamOptimizer(0.05).minimize(loss)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(3):
                    session.run(train)
                return [session.run(table)]

    def keras_embedding() -> list[np.ndarray]:
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [keras.Input((2,), dtype="int32"), keras.layers.Embedding(6, 3), keras.layers.Flatten()]
        )
        model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
        for _ in range(3):
            model.train_on_batch(np.array([[RANK % 6, 2]]), np.ones((1, 6)))
        return model.get_weights()

    for train in (tf1_adam, keras_embedding):
        dense = train()
        os.environ["DDL_SPARSE_AS_DENSE"] = "0"
        try:
            sparse = train()
        finally:
            del os.environ["DDL_SPARSE_AS_DENSE"]
        assert_same_everywhere(sparse)
        np.testing.assert_allclose(sparse[0], dense[0], rtol=1e-4, atol=1e-6)


def whole_batch() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.RandomState(9)
    return generator.randn(12, 5).astype("float32"), generator.randn(12, 3).astype("float32")


def my_part(batch: np.ndarray) -> np.ndarray:
    return np.split(batch, SIZE)[RANK]


@check
def parts_of_a_batch_give_the_gradients_of_the_whole() -> None:
    x, y = whole_batch()
    w = tf.Variable(np.random.RandomState(3).randn(5, 3).astype("float32"))

    def gradient(inputs: np.ndarray, targets: np.ndarray) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(inputs @ w) - targets))
        return tape.gradient(loss, w)

    (mean,) = reduce_gradients([gradient(my_part(x), my_part(y))])
    np.testing.assert_allclose(mean, gradient(x, y), rtol=0, atol=1e-6)
    (pair,) = ddl.grads_reduce([(gradient(my_part(x), my_part(y)), w)])
    np.testing.assert_array_equal(pair[0], mean)
    assert pair[1] is w


def keras_model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((5,)), keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential(layers)


@check
def keras_parts_of_a_batch_train_as_the_whole() -> None:
    x, y = whole_batch()
    together, alone = keras_model(1), keras_model(1)
    together.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.5)), "mse")
    alone.compile(keras.optimizers.SGD(0.5), "mse")
    for eagerly in (False, True):
        together.run_eagerly = alone.run_eagerly = eagerly
        together.make_train_function(force=True)
        alone.make_train_function(force=True)
        together.train_on_batch(my_part(x), my_part(y))
        alone.train_on_batch(x, y)
        for mine, want in zip(together.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, want, rtol=0, atol=1e-6)


@check
def keras_fit_ends_with_equal_weights_and_reports() -> None:
    model = keras_model(RANK + 1)
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", metrics=["mae"])
    generator = np.random.RandomState(RANK)
    x, y = generator.randn(40, 5), generator.randn(40, 3)
    progress = Path(os.environ["DDL_PROGRESS"])
    before = progress.read_text().count('"keras"') if RANK == 0 else 0
    callbacks = [
        ddl.keras.BroadcastCallback(),
        ddl.keras.MetricAverageCallback(),
        ddl.keras.ProgressCallback(every=0.0, batch_size=8),
    ]
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    assert_same_everywhere(model.get_weights())
    assert_same_everywhere([np.asarray(v) for v in optimizer.variables])
    assert_same_everywhere([np.array(history.history[name]) for name in ("loss", "mae")])
    if RANK == 0:
        lines = [json.loads(line) for line in progress.read_text().splitlines()]
        mine = [line for line in lines if line["source"] == "keras"][before:]
        assert [line["step"] for line in mine] == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10, 10]
        assert {line["steps"] for line in mine} == {10}
        assert [line["epoch"] for line in mine] == [1] * 6 + [2] * 6
        assert all(line["loss"] > 0 and line["mae"] > 0 for line in mine)
        assert mine[0]["examples_per_s"] > 0


@check
def keras_custom_loop_ends_with_equal_weights() -> None:
    model = keras_model(RANK + 3)
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    ddl.keras.broadcast_variables(model.weights)

    @tf.function
    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        optimizer.apply_gradients(
            zip(
                tape.gradient(loss, model.trainable_variables),
                model.trainable_variables,
                strict=True,
            )
        )

    for i in range(4):
        step(tf.constant(np.random.RandomState(10 * i + RANK).randn(4, 5), tf.float32))
    assert_same_everywhere(model.get_weights())


@check
def keras_saved_model_is_free_of_ddl() -> None:
    model = keras_model(4)
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.train_on_batch(np.ones((2, 5)), np.ones((2, 3)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert type(model.optimizer) is keras.optimizers.Adam
    assert int(loaded.optimizer.iterations) == 1
    assert "ddl" not in json.dumps(loaded.get_compile_config())
    loaded.train_on_batch(np.ones((2, 5)), np.ones((2, 3)))  # alone: no other rank is asked


@check
def keras_wraps_once_and_turns_xla_off() -> None:
    import warnings

    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam())
    try:
        ddl.keras.DistributedOptimizer(optimizer)
    except ValueError as error:
        assert "distributed already" in str(error)
    else:
        raise AssertionError("wrapped twice")
    model = keras_model(6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.compile(optimizer, "mse", jit_compile=True)
    assert any("XLA cannot compile" in str(w.message) for w in caught), caught
    assert model.jit_compile is False
    free = keras_model(6)
    free.compile(keras.optimizers.Adam(), "mse", jit_compile=True)
    assert free.jit_compile is True


@check
def keras_loss_scaling_reduces_before_it_decides() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras_model(8)
        model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    overflow = np.full((2, 5), np.inf if RANK == 0 else 1.0, "float32")
    model.train_on_batch(overflow, np.ones((2, 3)))
    model.train_on_batch(np.ones((2, 5)) * (RANK + 1), np.ones((2, 3)))
    assert_same_everywhere(model.get_weights())
    assert all(np.isfinite(w).all() for w in model.get_weights())


def mismatch(run: Callable[[], object]) -> str:
    try:
        run()
    except tf.errors.InvalidArgumentError as error:
        return error.message
    raise AssertionError("no error")


@check
def mismatches_name_tensor_and_rank_on_every_rank() -> None:
    if SIZE == 1:
        return
    last = SIZE - 1
    odd = last == RANK
    three = [tf.ones([2]), tf.ones([4, 3]), tf.ones([])]

    def sums(tensors: list[tf.Tensor], **attributes: object) -> Callable[[], object]:
        arguments = {"op": "sum", "ordered": True} | attributes
        # A function of its own keeps the op's name, which eager mode drops.
        return tf.function(lambda: operations().all_reduce_n(tensors, name="my_grads", **arguments))

    shape = mismatch(sums([tf.ones([2]), tf.ones([4, 3 + odd]), tf.ones([])]))
    want = f'AllReduceN "my_grads": rank {last} sent float32[4,4] as tensor 1, rank 0 float32[4,3].'
    assert want in shape, shape
    count = mismatch(sums(three[: 2 if odd else 3]))
    assert f'"my_grads": rank {last} sent 2 tensors, rank 0 3.' in count, count
    dtype = mismatch(sums([tf.cast(t, tf.float64 if odd else tf.float32) for t in three]))
    assert f"rank {last} sent float64[2] as tensor 0, rank 0 float32[2]." in dtype, dtype
    op = mismatch(sums(three, op="avg" if odd else "sum"))
    assert f"rank {last} asks for op=avg, rank 0 for op=sum." in op, op
    kind = mismatch(
        (lambda: ddl.bcast(tf.ones([2]))) if odd else (lambda: ddl.allreduce_n([tf.ones([2])]))
    )
    assert f'rank {last} runs Bcast "Bcast", rank 0 runs AllReduceN "AllReduceN".' in kind, kind
    rows = mismatch(lambda: ddl.allgather(tf.ones([RANK + 2, 4 if odd else 3])))
    want = f'"AllGather": rank {last} sent float32[{last + 2},4] as tensor 0, rank 0 float32[2,3].'
    assert want + " All dimensions but the first" in rows, rows
    depth = mismatch(lambda: ddl.allgather(tf.ones([2] if odd else [2, 3])))
    assert f"rank {last} sent float32[2] as tensor 0, rank 0 float32[2,3]." in depth, depth
    scalar = mismatch(lambda: ddl.allgather(tf.ones([] if odd else [2])))
    assert f"rank {last} sent float32[] as tensor 0, rank 0 float32[2]." in scalar, scalar
    kinds = mismatch(lambda: ddl.allgather(tf.ones([2], tf.int32 if odd else tf.int64)))
    assert f"rank {last} sent int32[2] as tensor 0, rank 0 int64[2]." in kinds, kinds
    scalars = mismatch(lambda: ddl.allgather(tf.ones([])))
    assert "all ranks sent scalars" in scalars, scalars
    # The group goes on.
    np.testing.assert_array_equal(ddl.allreduce_n([tf.ones([3])], average=False)[0], [SIZE] * 3)


@check
def keras_models_that_differ_are_named() -> None:
    if SIZE == 1:
        return
    variable = keras.Variable(np.zeros(2 + RANK), dtype="float32", name="kernel")
    message = mismatch(lambda: ddl.keras.broadcast_variables([variable]))
    assert "kernel" in message, message
    assert "rank 1 sent float32[3] as tensor 0, rank 0 float32[2]." in message, message


@check
def mpi4py_works_beside() -> None:
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    mine = np.full(1000, float(RANK))
    for _ in range(5):
        got = np.empty_like(mine)
        MPI.COMM_WORLD.Allreduce(mine, got)
        np.testing.assert_array_equal(got, sum(range(SIZE)))
        np.testing.assert_array_equal(ddl.allreduce_n([mine], average=False)[0], got)


@check
def report_writes_lines_of_rank_0() -> None:
    ddl.report(step=3, steps=9, loss=np.float32(0.5))
    if RANK == 0:
        lines = [json.loads(x) for x in Path(os.environ["DDL_PROGRESS"]).read_text().splitlines()]
        line = next(line for line in lines if line["source"] == "script")
        assert line | {"t": 0} == {"t": 0, "source": "script", "step": 3, "steps": 9, "loss": 0.5}


def main() -> None:
    wanted = sys.argv[1:]  # names; all without
    for function in CHECKS:
        if wanted and function.__name__ not in wanted:
            continue
        try:
            function()
        except Exception:
            say(f"{function.__name__}: FAILED {traceback.format_exc()}")
        else:
            say(f"{function.__name__}: ok")


main()
