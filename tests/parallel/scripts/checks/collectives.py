"""Each collective, alone, in groups, in functions and graphs; and calls that do not fit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import ddl
import numpy as np
import tensorflow as tf
from autograph import rewritten
from ddl_ops import collectives
from ddl_ops.loader import operations
from speech import RANK, SIZE

from checks import (
    DTYPES,
    HALVES,
    PLAIN,
    SEVERAL_HOSTS,
    SHAPES,
    assert_same_everywhere,
    check,
    late_on,
    mismatch,
    total,
    v1,
    values,
)


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
            mean = (total32 / np.float32(SIZE)).astype(half)
            np.testing.assert_array_equal(plain[i].numpy(), mean)
            if SEVERAL_HOSTS:  # also once when the part of a host leaves it
                unit = 2.0**-11 if dtype == "float16" else 2.0**-8
                limit = 2 * unit * np.sum(np.abs(wide), axis=0)
                assert (np.abs(sums[i].numpy().astype("float32") - total32) <= limit).all()
                for got in (means[i], ddl.allreduce(mine[i])):
                    error = np.abs(got.numpy().astype("float32") - total32 / np.float32(SIZE))
                    assert (error <= limit / SIZE + 2.0**-24).all()
                continue
            np.testing.assert_array_equal(sums[i].numpy(), total32.astype(half))
            np.testing.assert_array_equal(means[i].numpy(), mean)
            np.testing.assert_array_equal(ddl.allreduce(mine[i]).numpy(), mean)
    # The average of large numbers is there even where their sum is too large.
    large = tf.constant([40000.0], tf.float16)
    assert ddl.allreduce(large).numpy() == 40000.0
    assert ddl.allreduce(large, average=False).numpy() == (40000.0 if SIZE == 1 else np.inf)


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


@check(least=2)
def collectives_of_nested_functions_keep_their_order() -> None:
    """Also of those that use variables of their own, as two networks do."""

    def part(weight: float, late: bool) -> Callable[[tf.Tensor], tf.Tensor]:
        own = tf.Variable(0.0)

        @tf.function
        def run(x: tf.Tensor) -> tf.Tensor:
            own.assign_add(1.0)
            return ddl.allreduce(late_on(late, weight * x), average=False)

        return run

    one, two = part(1.0, RANK % 2 == 0), part(101.0, RANK % 2 == 1)
    both = tf.function(lambda x: (one(x), two(x)))
    for _ in range(3):
        assert [float(v) for v in both(tf.constant(1.0))] == [SIZE, 101 * SIZE]


@check(least=2)
def collectives_of_branches_and_loops_keep_their_order() -> None:
    own = tf.Variable(0.0)

    def add() -> tf.Tensor:
        return own.assign_add(ddl.allreduce(late_on(RANK % 2 == 0, tf.ones([])), average=False))

    def skip() -> tf.Tensor:
        return own.read_value()

    def in_a_function() -> tf.Tensor:
        return tf.function(add)()

    for maybe in (
        lambda n: tf.cond(n > 0, add, skip),
        lambda n: tf.cond(n > 0, in_a_function, skip),
        lambda n: tf.switch_case(n, [skip, add]),
        lambda n: tf.while_loop(lambda i: i < n, lambda i: (add(), i + 1)[1:], [0]),
    ):

        @tf.function
        def run(n: tf.Tensor, maybe: Callable = maybe) -> tf.Tensor:
            maybe(n)
            return ddl.allreduce(late_on(RANK % 2 == 1, tf.constant(101.0)), average=False)

        own.assign(0.0)
        assert [float(run(tf.constant(n))) for n in (1, 0, 1)] == [101 * SIZE] * 3
        assert float(own) == 2 * SIZE


@check(least=2)
def collectives_of_datasets_keep_their_order() -> None:
    """As of a loop over one, which AutoGraph makes another one of, with the steps in it."""
    own, others = tf.Variable(0.0), tf.Variable(0.0)
    batches = tf.data.Dataset.range(2)

    def add() -> None:
        own.assign_add(ddl.allreduce(late_on(RANK % 2 == 0, tf.ones([])), average=False))

    def loop() -> None:
        for _ in batches:
            add()

    def loop_with_an_end() -> None:
        for number in batches.repeat():
            add()
            if number > 0:
                break

    def reduce() -> None:
        batches.reduce(0, lambda done, _: (add(), done + 1)[1])

    def two_loops() -> None:
        loop()
        for _ in batches:
            late = late_on(RANK % 2 == 1, tf.fill([2], 7.0))
            others.assign_add(ddl.allreduce(late, average=False)[0])

    for some in (loop, loop_with_an_end, reduce, two_loops):

        @tf.function
        def run(some: Callable = some) -> tf.Tensor:
            some()
            return ddl.allreduce(late_on(RANK % 2 == 1, tf.constant(101.0)), average=False)

        own.assign(0.0)
        assert [float(run()) for _ in range(2)] == [101 * SIZE] * 2
        assert float(own) == 4 * SIZE
    assert float(others) == 4 * 7 * SIZE


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


@check(least=2)
def mismatches_name_tensor_and_rank_on_every_rank() -> None:
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


@check
def autograph_rewrites_the_scripts_functions_and_none_of_ours() -> None:
    """Ours are none that it need read, and it warns of those that it cannot."""
    weight = tf.Variable([0.0])

    def reduced(tensor: tf.Tensor) -> list[tf.Tensor]:
        pair = ddl.grads_reduce([(tensor, weight)])[0]
        return [ddl.allreduce(tensor), ddl.allgather(tensor), ddl.bcast(tensor), pair[0]]

    with rewritten() as modules:
        results = tf.function(reduced)(tf.constant([float(RANK)]))
    assert set(modules) == {__name__}, modules
    assert [float(result[0]) for result in results] == [(SIZE - 1) / 2, 0, 0, (SIZE - 1) / 2]
