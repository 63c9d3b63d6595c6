"""Process sets: collectives of some ranks, at the same time as those of others."""

from __future__ import annotations

import time

import ddl
import numpy as np
import tensorflow as tf
from ddl_ops import collectives, process_sets
from speech import RANK, SIZE, SLOWNESS
from threads import in_threads

from checks import check, mismatch, v1, values


def refused(run: object, kind: type[Exception], text: str) -> None:
    try:
        run()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError("no error")


def all_members() -> list[list[int]]:
    return [[0], list(range(0, SIZE, 2)), list(range(1, SIZE))][: 3 if SIZE > 2 else 1]


@check(least=2)
def process_sets_have_collectives_of_their_own() -> None:
    sets = {process_sets.add(reversed(members)): members for members in all_members()}
    assert process_sets.all_sets().items() >= sets.items()
    for number, members in sets.items():
        ranks = [members.index(RANK)] if RANK in members else []
        for rank in ranks:
            in_set = {"process_set": number}
            parts = [values((7, 2), "float32", r) for r in members]
            mine = tf.constant(parts[rank])
            total = np.sum(parts, axis=0)
            mean = collectives.allreduce(mine, **in_set)
            np.testing.assert_array_equal(mean, total / np.float32(len(members)))
            for got in collectives.allreduce_n([mine, -mine], op="min", **in_set)[:1]:
                np.testing.assert_array_equal(got, np.min(parts, axis=0))
            root = members[-1]  # known by its number among all
            np.testing.assert_array_equal(collectives.bcast(mine, root=root, **in_set), parts[-1])
            pixels = [(255, 200, 100)[place % 3] for place in range(len(members))]
            got = collectives.allreduce(tf.constant([pixels[rank], 255], tf.uint8), **in_set)
            assert got.numpy().tolist() == [sum(pixels) // len(pixels), 255]
            rows = collectives.allgather(mine[: rank + 1], **in_set)
            np.testing.assert_array_equal(
                rows, np.concatenate([part[: i + 1] for i, part in enumerate(parts)])
            )
            scattered = collectives.reducescatter(mine, op="sum", **in_set)
            np.testing.assert_array_equal(scattered, np.array_split(total, len(members))[rank])
            sent, received = collectives.alltoall(mine[: len(members)], **in_set)
            np.testing.assert_array_equal(sent, [part[rank] for part in parts])
            assert received.numpy().tolist() == [1] * len(members)
            large = values((400_003,), "float32", RANK)
            total = np.sum([values((400_003,), "float32", r) for r in members], axis=0)
            got = collectives.allreduce(large, average=False, **in_set)
            np.testing.assert_array_equal(got, total)
            place = [collectives.rank_op(process_set=number), collectives.size_op(None, number)]
            assert [int(one) for one in place] == [rank, len(members)]
            with tf.Graph().as_default(), v1.Session() as session:
                x = tf.constant(parts[rank])
                ops = [collectives.allreduce(x * i, average=False, **in_set) for i in (1.0, 2.0)]
                for i, got in enumerate(session.run(ops[::-1])[::-1]):
                    np.testing.assert_array_equal(got, np.sum(parts, axis=0) * (i + 1))
        if not ranks:
            text = mismatch(lambda number=number: collectives.allreduce(1.0, process_set=number))
            assert f"this rank is not of process set {number}, which has ranks" in text, text
    assert float(ddl.allreduce(tf.constant(1.0), average=False)) == SIZE
    for number in sets:
        process_sets.remove(number)
    assert not sets.keys() & process_sets.all_sets().keys()
    refused(lambda: collectives.allreduce(1.0, process_set=number), ValueError, "no process set")


@check(least=3)
def process_sets_have_gradients() -> None:
    members = [0, SIZE - 1]
    number = process_sets.add(members)
    if RANK in members:
        rank = members.index(RANK)
        x = tf.constant(values((3, 2), "float64", RANK))
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = {
                name: tf.reduce_sum(made) * (rank + 1.0)
                for name, made in {
                    "sum": collectives.allreduce(x, average=False, process_set=number),
                    "bcast": collectives.bcast(x, root=SIZE - 1, process_set=number),
                    "gather": collectives.allgather(x, process_set=number),
                    "scatter": collectives.reducescatter(x, op="sum", process_set=number),
                    "exchange": collectives.alltoall(x, [1, 2], process_set=number)[0],
                }.items()
            }
        wanted = {
            "sum": np.full((3, 2), 3.0),
            "bcast": np.full((3, 2), 3.0 * rank),
            "gather": np.full((3, 2), 3.0),
            "scatter": [[1, 1], [1, 1], [2, 2]],
            "exchange": [[1, 1], [2, 2], [2, 2]],
        }
        for name, want in wanted.items():
            np.testing.assert_array_equal(tape.gradient(losses[name], x), want, name)
    process_sets.remove(number)


@check(least=2)
def process_sets_do_not_wait_for_others() -> None:
    early = list(range(SIZE - 1))  # the last rank comes late to what is of all
    number = process_sets.add(early)
    ended: dict[str, float] = {}

    def of_all() -> None:
        assert float(ddl.allreduce(tf.constant(1.0), average=False)) == SIZE
        ended["all"] = time.monotonic()

    def of_the_set() -> None:
        for step in range(20):
            got = collectives.allreduce(tf.constant(float(step)), process_set=number)
            assert float(got) == step
        ended["set"] = time.monotonic()

    if RANK in early:
        in_threads(of_all, of_the_set, names=("all", "set"))
        assert ended["set"] < ended["all"], ended
    else:
        time.sleep(1.0 * SLOWNESS)
        in_threads(of_all, lambda: None, names=("all", "set"))
    process_sets.remove(number)


@check
def process_sets_that_differ_are_an_error_on_every_rank() -> None:
    refused(lambda: process_sets.add(range(SIZE)), ValueError, "already: 0")
    refused(lambda: process_sets.add([]), ValueError, "needs ranks from 0")
    refused(lambda: process_sets.add([0, SIZE]), ValueError, "needs ranks from 0")
    refused(lambda: process_sets.remove(0), ValueError, "cannot be removed")
    refused(lambda: process_sets.remove(99), ValueError, "no process set 99")
    if SIZE == 1:
        return
    refused(lambda: process_sets.add([0, 0]), ValueError, "each rank once")
    odd = int(RANK == SIZE - 1)
    refused(lambda: process_sets.add([odd]), ValueError, f"rank {SIZE - 1} runs Barrier")
    number = process_sets.add([0, SIZE - 1] if SIZE > 2 else [1])
    members = process_sets.ranks(number)
    if RANK in members and len(members) == 2:
        shape = [2 + odd]
        text = mismatch(lambda: collectives.allreduce(tf.ones(shape), process_set=number))
        want = f'"AllReduce in process set {number}": rank 1 sent float32[3] as tensor 0, rank 0'
        assert want in text, text
        who = f"(Ranks here are those of process set {number}: 0 is rank 0, 1 is rank {SIZE - 1}"
        assert who in text, text
        assert float(collectives.allreduce(1.0, average=False, process_set=number)) == 2
    refused(
        lambda: collectives.bcast(1.0, root=0 if SIZE == 2 else 1, process_set=number),
        ValueError,
        "is not of process set",
    )
    # It stays: the end of the job ends it.
