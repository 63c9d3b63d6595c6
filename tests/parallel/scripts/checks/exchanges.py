"""Reductions beside sums, and collectives of which each rank gets something else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import ddl
import numpy as np
import tensorflow as tf
from ddl_ops import collectives
from ddl_ops.loader import operations
from speech import RANK, SIZE

from checks import HALVES, PLAIN, SEVERAL_HOSTS, assert_same_everywhere, check, mismatch, v1, values

INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NUMBERS = [*INTEGERS, *HALVES, "float32", "float64"]
FOLDS = {"sum": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply}


def numbers(count: int, dtype: str, rank: int) -> np.ndarray:
    """Of all the bits that an integer has, so that sums and products wrap around."""
    generator = np.random.RandomState(31 * count + rank)
    if "int" in dtype:
        bits = generator.bytes(count * np.dtype(dtype).itemsize)
        return np.frombuffer(bits, dtype).copy()
    # Exact in a half: products of small powers of two, and sums.
    wide = generator.choice([-4.0, -2.0, -1.0, 1.0, 2.0, 4.0], count)
    return wide.astype(tf.as_dtype(dtype).as_numpy_dtype)


def folded(op: str, parts: list[np.ndarray]) -> np.ndarray:
    with np.errstate(over="ignore"):
        total = parts[0]
        for part in parts[1:]:
            total = FOLDS[op](total, part)
        return total


def averaged(parts: list[np.ndarray]) -> np.ndarray:
    """The sum divided by the number of parts, of integers toward zero. That of 64 bits wraps."""
    dtype = parts[0].dtype
    if dtype.kind not in "iu":
        return (folded("sum", parts).astype("float64") / len(parts)).astype(dtype)
    total = folded("sum", [part.astype(f"{dtype.kind}8") for part in parts])
    quotient = np.abs(total.astype(object)) // len(parts)
    return (quotient * np.where(total < 0, -1, 1)).astype(dtype)


@check
def every_number_is_reduced_in_every_way() -> None:
    for dtype in NUMBERS:
        # Of all sizes: with the agreement, in pieces, and over vectors and what is left of them.
        for count in (0, 1, 37, 70_001):
            parts = [numbers(count, dtype, rank) for rank in range(SIZE)]
            for op in FOLDS:
                got = collectives.allreduce(parts[RANK], op=op)
                assert got.dtype == tf.as_dtype(dtype)
                np.testing.assert_array_equal(got, folded(op, parts), err_msg=f"{dtype} {op}")
            mean = collectives.allreduce(parts[RANK], op="avg").numpy()
            if "int" in dtype or SIZE in (1, 2, 4):
                np.testing.assert_array_equal(mean, averaged(parts), dtype)
        shapes = [(), (3, 5), (0,), (1000,)]
        mine = [numbers(int(np.prod(s)), dtype, RANK).reshape(s) for s in shapes]
        for op in FOLDS:
            for shape, got in zip(shapes, collectives.allreduce_n(mine, op=op), strict=True):
                parts = [numbers(int(np.prod(shape)), dtype, rank) for rank in range(SIZE)]
                want = np.reshape(folded(op, parts), shape)
                np.testing.assert_array_equal(np.asarray(got.numpy()), want)


@check
def averages_of_integers_of_up_to_32_bits_do_not_wrap_around() -> None:
    for dtype in (one for one in INTEGERS if "64" not in one):
        limits = np.iinfo(dtype)
        # As the whole way has it, in one piece and in several; 5 go with the agreement.
        for count in (5, 1001, 70_001):
            parts = [numbers(count, dtype, rank) for rank in range(SIZE)]
            for rank, part in enumerate(parts):
                part[:5] = limits.min, limits.max, limits.max - rank, limits.min + rank, 100
            want = averaged(parts)
            assert want[0] == limits.min and want[1] == limits.max
            mine = tf.constant(parts[RANK])
            shares = np.array_split(want, SIZE)
            for got, expected in (
                (collectives.allreduce(mine), want),
                (collectives.allreduce_n([mine, mine[:3]])[0], want),
                (collectives.reducescatter(mine), shares[RANK]),
                (collectives.reducescatter_n([mine[:2], mine])[1], shares[RANK]),
            ):
                assert got.dtype == mine.dtype
                np.testing.assert_array_equal(got, expected, f"{dtype} {count}")
            np.testing.assert_array_equal(mine, parts[RANK])
    # What TensorFlow lets an op overwrite, and MPI's own sum.
    in_place = tf.function(lambda x: ddl.allreduce(x + np.int32(1)))
    largest = tf.fill([40_000], np.iinfo("int32").max - 1)
    assert int(in_place(largest)[-1]) == np.iinfo("int32").max
    plain = operations().all_reduce_n([largest], op="avg", mpi=True, check=1e-9, ordered=True)
    np.testing.assert_array_equal(plain[0], largest)
    checked = operations().all_reduce_n([largest], op="avg", check=1e-9, ordered=True)
    np.testing.assert_array_equal(checked[0], largest)
    # Factors are as those of any tensor: before the sum and after the division.
    whole = tf.constant([200, 100, 255], tf.uint8)
    halves = collectives.allreduce(whole, prescale=0.5)
    assert halves.numpy().tolist() == [100, 50, 127]
    assert collectives.allreduce(whole, postscale=0.5).numpy().tolist() == [100, 50, 127]


@check(least=2)
def averages_of_integers_know_the_types_that_ranks_gave() -> None:
    """Though they are added in 64 bits."""
    last, odd = SIZE - 1, RANK == SIZE - 1
    for dtype in ("int64", "uint32", "int8"):
        mine = tf.ones([3], dtype if odd else "int32")
        text = mismatch(lambda mine=mine: collectives.allreduce(mine))
        assert f"rank {last} sent {dtype}[3] as tensor 0, rank 0 int32[3]." in text, text
        text = mismatch(lambda mine=mine: collectives.reducescatter(mine))
        assert f"rank {last} sent {dtype}[3] as tensor 0, rank 0 int32[3]." in text, text


@check
def a_nan_of_a_rank_is_the_smallest_and_the_largest() -> None:
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for count in (SIZE + 1, 50_000):
            mine = np.full(count, 3.0)
            mine[RANK] = np.nan
            for op in ("min", "max"):
                got = collectives.allreduce(tf.cast(mine, dtype), op=op)
                found = tf.cast(got, tf.float64).numpy()
                assert np.isnan(found[:SIZE]).all() and (found[SIZE:] == 3).all(), (dtype, op)
                assert_same_everywhere([got.numpy().view(np.uint8)])


@check
def factors_scale_before_and_after() -> None:
    for dtype in NUMBERS:
        wide = "float64" if "int" in dtype else "float32" if dtype in HALVES else dtype
        small = np.arange(40).astype(tf.as_dtype(dtype).as_numpy_dtype)
        factor = np.array(0.37, wide)

        def scaled(x: np.ndarray, factor: np.ndarray = factor, wide: str = wide) -> np.ndarray:
            return (x.astype(wide) * factor).astype(x.dtype)

        before = collectives.allreduce(small, op="sum", prescale=0.37)
        np.testing.assert_array_equal(before, folded("sum", [scaled(small)] * SIZE), dtype)
        after = collectives.allreduce_n([small], op="sum", postscale=0.37)[0]
        np.testing.assert_array_equal(after, scaled(folded("sum", [small] * SIZE)), dtype)
        rows = collectives.reducescatter(small, op="max", prescale=0.37, postscale=2.0)
        want = np.array_split(scaled(small) * 2, SIZE)[RANK]
        np.testing.assert_array_equal(rows, want.astype(small.dtype), dtype)


@check
def reducescatter_gives_each_rank_its_rows() -> None:
    for dtype in NUMBERS:
        for shape in [(0,), (1,), (SIZE,), (2 * SIZE + 1, 3), (5, 0), (4 * SIZE - 1, 2, 9_001)]:
            count = int(np.prod(shape))
            parts = [numbers(count, dtype, rank).reshape(shape) for rank in range(SIZE)]
            mine = tf.constant(parts[RANK])
            for op in ("sum", "max") if count > 1000 else FOLDS:
                want = np.array_split(folded(op, parts), SIZE)[RANK]
                got = collectives.reducescatter(mine, op=op)
                assert got.dtype == tf.as_dtype(dtype)
                np.testing.assert_array_equal(got, want, err_msg=f"{dtype} {shape} {op}")
    parts = [values((3 * SIZE + 1,), "float32", rank) for rank in range(SIZE)]
    mean = np.sum(parts, axis=0, dtype="float32") / np.float32(SIZE)
    got = collectives.reducescatter(parts[RANK])
    np.testing.assert_array_equal(got, np.array_split(mean, SIZE)[RANK])


@check
def grouped_rows_are_reduced_in_one_go() -> None:
    shapes = [(7, 3), (0, 2), (SIZE, 70_001), (1,), (2 * SIZE + 1,)]
    for dtype in ("int32", "float64", "bfloat16"):
        parts = [
            [numbers(int(np.prod(s)), dtype, rank + i).reshape(s) for i, s in enumerate(shapes)]
            for rank in range(SIZE)
        ]
        for got, *ranks in zip(
            collectives.reducescatter_n(parts[RANK], op="sum"), *parts, strict=True
        ):
            np.testing.assert_array_equal(got, np.array_split(folded("sum", ranks), SIZE)[RANK])
    assert collectives.reducescatter_n([]) == []


@check
def rows_of_sums_have_the_bits_of_sums() -> None:
    # Sums that depend on their order: magnitudes over 16 decades.
    for dtype in ("float32", "float16", "bfloat16"):
        generator = np.random.RandomState(100 + RANK)
        spread = 8 if dtype == "float32" else 3
        count = SIZE * 60_000
        mine = generator.randn(count) * 10.0 ** generator.randint(-spread, spread, count)
        mine = tf.cast(mine, dtype)
        first = collectives.reducescatter(mine, op="sum").numpy()
        assert first.tobytes() == collectives.reducescatter(mine, op="sum").numpy().tobytes()
        if not SEVERAL_HOSTS:  # there each has an order of its own, the same in every run
            whole = collectives.allreduce(mine, op="sum").numpy()
            assert first.tobytes() == np.array_split(whole, SIZE)[RANK].tobytes(), dtype


@check
def grouped_gathers_join_each_tensor() -> None:
    for dtype in PLAIN:
        numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
        modulus = 2 if dtype == "bool" else 100

        def part(
            rank: int, i: int, modulus: int = modulus, as_type: type = numpy_dtype
        ) -> np.ndarray:
            shape = [(2 * rank + 1, 3), (rank,), (0, 2), (SIZE - rank, 2, 4_001)][i]
            return (values(shape, "int64", rank, i) % modulus).astype(as_type)

        got = collectives.allgather_n([part(RANK, i) for i in range(4)])
        for i in range(4):
            assert got[i].dtype == tf.as_dtype(dtype)
            want = np.concatenate([part(rank, i) for rank in range(SIZE)])
            np.testing.assert_array_equal(got[i], want)
    assert collectives.allgather_n([]) == []


def splits_of(rank: int, kind: int) -> list[int]:
    """How many rows `rank` sends to each rank."""
    return [
        [rank + 1] * SIZE,
        [(3 * rank + to) % 4 for to in range(SIZE)],
        [0] * SIZE if rank == 0 else list(range(SIZE)),  # a rank that sends nothing
        [0 if to == SIZE - 1 else rank + 2 for to in range(SIZE)],  # one that gets nothing
        [0] * SIZE,
        [20_000 + 7 * rank + to for to in range(SIZE)],
    ][kind]


def rows_from(sender: int, kind: int, rest: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """What `sender` sends, by receiver."""
    splits = splits_of(sender, kind)
    whole = values((sum(splits), *rest), "int64", sender, kind) % (2 if dtype == "bool" else 100)
    whole = whole.astype(tf.as_dtype(dtype).as_numpy_dtype)
    return np.split(whole, np.cumsum(splits)[:-1])


@check
def alltoall_sends_rows_to_each_rank() -> None:
    for dtype in PLAIN:
        for kind in range(6):
            for rest in [(), (3,)] if kind < 5 else [(2,)]:
                mine = np.concatenate(rows_from(RANK, kind, rest, dtype))
                got, received = collectives.alltoall(mine, splits_of(RANK, kind))
                blocks = [rows_from(rank, kind, rest, dtype)[RANK] for rank in range(SIZE)]
                assert got.dtype == tf.as_dtype(dtype) and received.dtype == tf.int32
                np.testing.assert_array_equal(got, np.concatenate(blocks))
                assert received.numpy().tolist() == [len(block) for block in blocks]
    mine = values((2 * SIZE, 2), "float32", RANK)
    got, received = collectives.alltoall(mine)  # equally many
    blocks = [np.split(values((2 * SIZE, 2), "float32", r), SIZE)[RANK] for r in range(SIZE)]
    np.testing.assert_array_equal(got, np.concatenate(blocks))
    assert received.numpy().tolist() == [2] * SIZE
    empty, received = collectives.alltoall(tf.zeros([0, 3]), tf.zeros([SIZE], tf.int64))
    assert empty.shape == (0, 3) and received.dtype == tf.int64


@check
def large_rows_go_to_one_rank_alone() -> None:
    # 6 MB from each to rank 0, nothing to the others: over pieces, and threads where there are any.
    splits = [1_500_001] + [0] * (SIZE - 1)
    got, received = collectives.alltoall(values((1_500_001,), "float32", RANK), splits)
    if RANK > 0:
        assert got.shape == (0,)
        return
    for rank, block in enumerate(np.split(got.numpy(), SIZE)):
        np.testing.assert_array_equal(block, values((1_500_001,), "float32", rank))
    assert received.numpy().tolist() == [1_500_001] * SIZE


@check
def exchanges_in_functions_and_graphs_know_their_shapes() -> None:
    mine = np.concatenate(rows_from(RANK, 1, (2,), "float32"))
    blocks = [rows_from(rank, 1, (2,), "float32")[RANK] for rank in range(SIZE)]
    whole = [values((5, 2), "float32", rank) for rank in range(SIZE)]

    def run(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, ...]:
        rows, received = collectives.alltoall(x, splits_of(RANK, 1))
        assert rows.shape.as_list() == [None, 2] and received.shape.rank == 1
        part = collectives.reducescatter(y, op="sum")
        assert part.shape.as_list() == [None, 2]
        parts = collectives.reducescatter_n([y, -y], op="sum")
        gathered = collectives.allgather_n([x, y])
        assert gathered[1].shape.as_list() == [None, 2]
        return rows, received, part, parts[1], gathered[0]

    def check_result(got: tuple[object, ...]) -> None:
        np.testing.assert_array_equal(got[0], np.concatenate(blocks))
        np.testing.assert_array_equal(got[1], [len(block) for block in blocks])
        want = np.array_split(sum(whole), SIZE)[RANK]
        np.testing.assert_array_equal(got[2], want)
        np.testing.assert_array_equal(got[3], -want)
        everything = [np.concatenate(rows_from(r, 1, (2,), "float32")) for r in range(SIZE)]
        np.testing.assert_array_equal(got[4], np.concatenate(everything))

    spec = tf.TensorSpec([None, 2])
    check_result(tf.function(run, input_signature=[spec, spec])(mine, whole[RANK]))
    with tf.Graph().as_default(), v1.Session() as session:
        x, y = v1.placeholder(tf.float32, [None, 2]), v1.placeholder(tf.float32, [None, 2])
        check_result(session.run(run(x, y), {x: mine, y: whole[RANK]}))
        for scalar in (collectives.alltoall, collectives.reducescatter):
            try:
                scalar(tf.constant(1.0))
            except ValueError as error:
                assert "rank" in str(error)
            else:
                raise AssertionError("no error")


@check
def variables_get_the_values_of_any_root() -> None:
    for root in {0, SIZE // 2, SIZE - 1}:

        def starts(rank: int) -> list[np.ndarray]:
            return [
                values((4, 3), "float32", rank),
                np.array(rank % 2 == 0),
                values((), "int64", rank),
                values((70_001,), "float32", rank, 1),
            ]

        variables = [tf.Variable(start) for start in starts(RANK)]
        told = collectives.bcast_variables(variables, root=root)
        for variable, value, want in zip(variables, told, starts(root), strict=True):
            np.testing.assert_array_equal(variable.numpy(), want)
            np.testing.assert_array_equal(value.numpy(), want)
        for resource in (False, True):
            with tf.Graph().as_default(), v1.Session() as session:
                graph_variables = [
                    v1.Variable(start, use_resource=resource) for start in starts(RANK)
                ]
                told = collectives.bcast_variables(graph_variables, root=root)
                session.run([variable.initializer for variable in graph_variables])
                for variable, start in zip(graph_variables, starts(RANK), strict=True):
                    session.run(variable.assign(start).op)  # else all begin alike
                for value, want in zip(session.run(told), starts(root), strict=True):
                    np.testing.assert_array_equal(value, want)
                for value, want in zip(session.run(graph_variables), starts(root), strict=True):
                    np.testing.assert_array_equal(value, want)


def errors(run: Callable[[], object], *parts: str) -> None:
    """Fails on every rank, and says so; and the ranks go on."""
    message = mismatch(run)
    assert all(part in message for part in parts), message
    assert float(collectives.allreduce(tf.constant(1.0), op="sum")) == SIZE


@check
def exchanges_that_do_not_fit_name_tensor_and_rank_on_every_rank() -> None:
    last, odd = SIZE - 1, RANK == SIZE - 1
    rows = tf.ones([4, 3])
    errors(
        lambda: collectives.alltoall(tf.ones([SIZE + 1]), [1] * SIZE),
        'DdlAllToAll "DdlAllToAll": rank 0 gave splits [1',
        f"of {SIZE + 1} rows. They must add up to its first dimension.",
    )
    errors(lambda: collectives.alltoall(tf.constant(1.0)), "scalars")
    errors(lambda: collectives.reducescatter(tf.constant(1.0)), "scalars")
    if SIZE == 1:
        return
    bad = [-1, *[0] * (SIZE - 2), 5] if odd else [4, *[0] * (SIZE - 1)]
    errors(lambda: collectives.alltoall(rows, bad), f"rank {last} gave splits [-1", "negative")
    short = [4] if odd else [4, *[0] * (SIZE - 1)]
    errors(lambda: collectives.alltoall(rows, short), f"rank {last} gave 1 splits for {SIZE} ranks")
    errors(
        lambda: collectives.alltoall(tf.ones([SIZE + (1 if odd else 0)])),
        f"rank {last} sent {SIZE + 1} rows, which are no multiple of {SIZE} ranks",
    )
    wide = tf.ones([SIZE, 4 if odd else 3])
    errors(
        lambda: collectives.alltoall(wide),
        f'"DdlAllToAll": rank {last} sent float32[{SIZE},4] as tensor 0, rank 0 float32[{SIZE},3].',
    )
    typed = tf.ones([SIZE], tf.int32 if odd else tf.float32)
    errors(lambda: collectives.alltoall(typed), f"rank {last} sent int32[{SIZE}]")
    errors(
        lambda: collectives.reducescatter(tf.ones([4 + odd, 3]), op="sum"),
        f'"ReduceScatterN": rank {last} sent float32[5,3] as tensor 0, rank 0 float32[4,3].',
    )
    errors(
        lambda: collectives.reducescatter(rows, op="min" if odd else "sum"),
        f"rank {last} asks for scattered op=min, rank 0 for scattered op=sum.",
    )
    errors(
        lambda: collectives.allreduce(rows, op="prod" if odd else "max"),
        f"rank {last} asks for op=prod, rank 0 for op=max.",
    )
    errors(
        lambda: collectives.allgather_n([rows, wide]),
        f'"AllGatherN": rank {last} sent float32[{SIZE},4] as tensor 1, rank 0',
    )
    errors(
        lambda: collectives.bcast_n([rows, rows], root=1 if odd else 0),
        f"rank {last} asks for root=1, rank 0 for root=0.",
    )
    for run in (
        lambda: collectives.alltoall(wide, mismatch="failed_precondition"),
        lambda: collectives.bcast(rows, root=1 if odd else 0, mismatch="failed_precondition"),
    ):
        try:
            run()
        except tf.errors.FailedPreconditionError as error:
            assert f"rank {last}" in error.message
        else:
            raise AssertionError("no error")


@check(least=2)
def a_rank_that_has_joined_changes_no_reduction() -> None:
    working = range(SIZE - 1)
    for dtype in ("int8", "uint16", "float16", "float32"):
        if RANK < SIZE - 1:
            for count in (5, 30_000):
                parts = [numbers(count, dtype, rank) for rank in working]
                for op in FOLDS:
                    got = collectives.allreduce(parts[RANK], op=op)
                    np.testing.assert_array_equal(got, folded(op, parts), f"{dtype} {op}")
                    rows = collectives.reducescatter(parts[RANK], op=op)
                    want = np.array_split(folded(op, parts), SIZE)[RANK]
                    np.testing.assert_array_equal(rows, want, f"{dtype} {op}")
                if "int" in dtype:  # over those that have not joined
                    got = collectives.allreduce(parts[RANK])
                    np.testing.assert_array_equal(got, averaged(parts), dtype)
                    rows = collectives.reducescatter(parts[RANK])
                    np.testing.assert_array_equal(
                        rows, np.array_split(averaged(parts), SIZE)[RANK], dtype
                    )
            gathered = collectives.allgather_n([tf.fill([RANK + 1, 2], RANK), tf.fill([3], RANK)])
            assert [len(one) for one in gathered] == [sum(r + 1 for r in working), 3 * len(working)]
            checked = operations().all_reduce_n(
                [tf.ones([30_000])], op="sum", check=1e-7, ordered=True
            )
            assert float(checked[0][-1]) == len(working)
        collectives.join()
    # Nobody knows what a rank that has joined would send, or keep.
    if RANK == SIZE - 1:
        try:
            collectives.join()
        except ValueError as error:
            message = str(error)
    else:
        message = mismatch(lambda: collectives.alltoall(tf.ones([SIZE])))
    assert f"rank {SIZE - 1} has joined, and has no rows" in message, message


def asks_for_huge_pages(tensor: tf.Tensor) -> bool:
    """Whether the middle of the tensor is in memory that shall have them, as the kernel says."""
    array = tensor.numpy()
    middle = array.ctypes.data + array.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= middle < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"{middle:x} is in no mapping")


@check
def large_results_ask_for_huge_pages() -> None:
    """Their first touch in small ones takes longer than the collective."""
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        return
    given = tf.ones([SIZE * (2 << 20)])  # 8 MiB for each rank
    results = {
        "allreduce": collectives.allreduce(given),
        "allgather": collectives.allgather(given),
        "reducescatter": collectives.reducescatter(given, "sum"),
        "alltoall": collectives.alltoall(given)[0],
    }
    if RANK != 0:  # which sends what it has
        results["bcast"] = collectives.bcast(given, root=0)
    else:
        collectives.bcast(given, root=0)
    for op, result in results.items():
        assert asks_for_huge_pages(result), op
