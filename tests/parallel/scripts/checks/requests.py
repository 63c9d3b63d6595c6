"""Requests: an error is one request's, threads are told apart, a step that is cancelled, joins."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ddl
import numpy as np
import tensorflow as tf
from ddl_ops import arrays, collectives
from speech import RANK, SIZE, SLOWNESS
from threads import in_threads

from checks import check, mismatch, v1


def late(value: object, seconds: float) -> tf.Tensor:
    """A tensor of a TF1 graph that is ready after so long."""

    def wait(x: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return x

    tensor = tf.constant(value)
    delayed = tf.numpy_function(wait, [tensor], tensor.dtype)
    delayed.set_shape(tensor.shape)
    return delayed


@check
def named_threads_are_told_apart() -> None:
    def sums(base: float) -> list[float]:
        return [
            float(ddl.allreduce(tf.constant(base + step), average=False)) / SIZE
            for step in range(5)
        ]

    first, second = in_threads(lambda: sums(1), lambda: sums(101), names=("one", "two"))
    assert first == [1, 2, 3, 4, 5], first
    assert second == [101, 102, 103, 104, 105], second


@check
def named_collectives_of_a_pool_are_told_apart() -> None:
    def total(task: int) -> float:
        value = tf.constant(float(task))
        return float(ddl.allreduce(value, average=False, name=f"task {task}")) / SIZE

    tasks = list(range(12))
    order = tasks if RANK % 2 == 0 else tasks[::-1]
    with ThreadPoolExecutor(12) as pool:  # as many threads as tasks: each waits for its own
        assert list(pool.map(total, order)) == order


@check
def a_name_for_each_step_costs_no_memory() -> None:
    def resident_mib() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def reduce(names: Iterable[str]) -> None:
        for name in names:
            ddl.allreduce(tf.constant([1.0]), name=name)
            ddl.allreduce_n([tf.constant([1.0])], name=name)

    def refused(dtype: str, name: str) -> None:
        try:
            ddl.allreduce(tf.constant([1], dtype), name=name)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            return
        raise AssertionError("no error")

    reduce(f"before_{step}" for step in range(100))
    before = resident_mib()
    reduce(f"loss_{step}" for step in range(3000))
    for step in range(100):
        refused("bool", f"flag_{step}")  # fails before there is a kernel to take the name
    grown = resident_mib() - before
    assert grown < 30, f"{grown:.0f} MiB for 3000 names"
    with ThreadPoolExecutor(20) as pool:  # whose threads run them in any order
        values = pool.map(lambda n: float(ddl.allreduce(float(n), name=f"x\0{n}")), range(20))
        assert list(values) == list(range(20))
    if SIZE > 1:
        other = mismatch(lambda: ddl.allreduce(tf.constant([1.0]), name=f"from {RANK}"))
        assert 'AllReduce "from 0"' in other and 'AllReduce "from 1"' in other, other
        none = mismatch(lambda: ddl.allreduce(tf.zeros([RANK])))
        assert 'AllReduce "AllReduce"' in none, none


@check
def threads_that_cannot_be_told_apart_are_refused_not_mixed() -> None:
    def total(value: float) -> float:
        return float(ddl.allreduce(tf.constant(value), average=False))

    for refused in in_threads(lambda: total(1.0), lambda: total(100.0)):
        assert isinstance(refused, RuntimeError) and "Name the thread" in str(refused), refused
    with ThreadPoolExecutor(2, thread_name_prefix="model") as pool:
        for task in [pool.submit(total, value) for value in (1.0, 100.0)]:
            assert "in a pool, each collective" in str(task.exception()), task


@check(least=2)
def threads_of_one_name_are_refused_not_mixed() -> None:
    def total(value: float) -> float:
        if value == 1:
            time.sleep(0.3)  # until both are there
        return float(ddl.allreduce(tf.constant(value), average=False))

    names = ("same", "same")
    if RANK % 2 == 0:
        got, refused = in_threads(
            lambda: total(1.0), lambda: time.sleep(0.6) or total(100.0), names=names
        )
    else:
        refused, got = in_threads(
            lambda: time.sleep(0.9) or total(100.0), lambda: total(1.0), names=names
        )
    assert got == SIZE, got
    assert isinstance(refused, RuntimeError) and "two threads have this name" in str(refused)
    # One after the other's end is the same one.
    (again,) = in_threads(lambda: total(1.0), names=("same",))
    assert again == SIZE, again


def second_is_refused(
    first: tf.types.experimental.GenericFunction, second: tf.types.experimental.GenericFunction
) -> None:
    """Of two sums that the main thread has traced, where another thread runs one meanwhile."""
    for one in (first, second):
        one(tf.constant(0.0))  # which has the main thread's stream from then on
    if RANK > 0:
        time.sleep(1.0)
        assert float(first(tf.constant(1.0))) == SIZE
        return

    def later() -> None:
        time.sleep(0.3)
        second(tf.constant(100.0))

    got, refused = in_threads(lambda: float(first(tf.constant(1.0))), later, names=("a", "b"))
    assert got == SIZE, got
    assert isinstance(refused, tf.errors.FailedPreconditionError), refused
    assert "two threads run collectives of one thread at once" in refused.message, refused


@check(least=2)
def functions_of_one_thread_that_two_threads_run_at_once_are_refused_not_mixed() -> None:
    total, other = (
        tf.function(lambda value: ddl.allreduce(value, average=False)) for _ in range(2)
    )
    second_is_refused(total, total)
    second_is_refused(total, other)


@check
def gradients_of_collectives_in_threads_are_told_apart() -> None:
    def gradients(weight: float) -> list[float]:
        @tf.function
        def gradient(x: tf.Tensor, wait: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = weight * ddl.allreduce(x, average=False)
            upstream = tf.numpy_function(
                lambda s: time.sleep(s) or np.float32(1), [wait], "float32"
            )
            upstream.set_shape([])
            return tape.gradient(loss, x, output_gradients=upstream)

        # The two threads of a rank come to their gradients in an order that the ranks do not share.
        late_one = (weight == 1) == (RANK % 2 == 0)
        wait = tf.constant(0.2 if late_one else 0.0, tf.float64)
        return [float(gradient(tf.constant(1.0), wait)) / SIZE for _ in range(3)]

    first, second = in_threads(lambda: gradients(1), lambda: gradients(101), names=("one", "two"))
    assert first == [1, 1, 1], first
    assert second == [101, 101, 101], second


@check(least=2)
def errors_of_eager_collectives_have_the_name_that_was_given() -> None:
    value = tf.zeros([2 + min(RANK, 1)])
    message = mismatch(lambda: collectives.allreduce(value, name="accuracy"))
    assert 'AllReduce "accuracy"' in message, message
    name = f"rank {min(RANK, 1)}"
    message = mismatch(lambda: collectives.allreduce(tf.zeros([2]), name=name))
    assert 'AllReduce "rank 0"' in message and 'AllReduce "rank 1"' in message, message


@check
def roots_that_differ_are_named_and_every_rank_can_be_one() -> None:
    for root in range(SIZE):
        got = collectives.bcast(tf.constant([RANK, 7]), root=root)
        np.testing.assert_array_equal(got.numpy(), [root, 7])
        array = np.arange(5.0) * (RANK + 1)
        arrays.broadcast([array], root)
        np.testing.assert_array_equal(array, np.arange(5.0) * (root + 1))
    if SIZE > 1:
        message = mismatch(lambda: collectives.bcast(tf.constant(1.0), root=min(RANK, 1)))
        assert "rank 1 asks for root=1, rank 0 for root=0" in message, message
        message = mismatch(lambda: collectives.bcast(tf.constant(1.0), root=SIZE))
        assert f"there is no rank {SIZE} among {SIZE} ranks" in message, message


@check
def steps_that_differ_are_an_error_and_not_an_average() -> None:
    for step in range(3):
        (got,) = collectives.allreduce_n(
            [tf.constant([1.0 + RANK])], step=tf.constant(step, "int64")
        )
        np.testing.assert_allclose(got.numpy(), [(SIZE + 1) / 2])
    if SIZE == 1:
        return
    slipped = tf.constant(7 + min(RANK, 1), "int64")
    message = mismatch(lambda: collectives.allreduce_n([tf.constant([1.0])], step=slipped))
    assert "rank 1 is at step 8, rank 0 at step 7" in message, message


@check
def learning_rates_that_differ_are_an_error_on_every_rank() -> None:
    def reduce(rate: float | None, step: int = 3) -> list[tf.Tensor]:
        given = None if rate is None else tf.constant(rate)
        step = tf.constant(step, "int64")
        return collectives.allreduce_n([tf.constant([1.0 + RANK])], step=step, rate=given)

    last = RANK == SIZE - 1
    nan = -float("nan") if last else float("nan")
    nearly = np.nextafter(np.float32(0.1), np.float32(1)) if last else np.float32(0.1)
    for rate in (None, 0.1, 0.0, -0.0 if last else 0.0, nan, float("inf"), nearly):
        np.testing.assert_allclose(reduce(rate)[0].numpy(), [(SIZE + 1) / 2])
    if SIZE == 1:
        return
    who = SIZE - 1
    for theirs, ours, said in (
        (1e-4, 1e-3, f"rank {who} has a learning rate of 0.0001, rank 0 one of 0.001. "),
        (0.1001, 0.1, f"rank {who} has a learning rate of 0.1001, rank 0 one of 0.1. "),
        (0.0, 1e-12, f"rank {who} has a learning rate of 0, rank 0 one of 1e-12. "),
        (None, 0.1, f"rank {who} has no learning rate, rank 0 one of 0.1. "),
        (0.1, None, f"rank {who} has a learning rate of 0.1, rank 0 none. "),
        (nan, 0.1, f"rank {who} has a learning rate of nan, rank 0 one of 0.1. "),
    ):
        message = mismatch(lambda rate=theirs if last else ours: reduce(rate))
        assert said in message and "MetricAverageCallback" in message, message
    # Where the steps differ as well, that is the reason.
    message = mismatch(lambda: reduce(0.1 * (1 + last), step=7 + last))
    assert f"rank {who} is at step 8, rank 0 at step 7" in message, message
    np.testing.assert_allclose(reduce(0.1)[0].numpy(), [(SIZE + 1) / 2])


@check
def barriers_name_what_each_rank_is_at() -> None:
    collectives.barrier("all here")
    if SIZE == 1:
        return
    end = f"the end of epoch 1 after {10 + min(RANK, 1)} steps"
    message = mismatch(lambda: collectives.barrier(end, "Give each rank the same number of steps."))
    assert "after 10 steps" in message and "after 11 steps" in message, message
    assert message.rstrip().endswith("Give each rank the same number of steps."), message


@check
def tf1_a_mismatch_fails_its_run_alone() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        wrong = collectives.allreduce(tf.zeros([2 + min(RANK, 1)]), name="wrong")
        beside = [
            collectives.allreduce(late(float(i), 0.002 * i * RANK), name=f"beside_{i}")
            for i in range(4)
        ]
        right = collectives.allreduce(tf.constant(RANK + 1.0), average=False, name="right")
        for _ in range(5):
            if SIZE > 1:
                message = mismatch(lambda: session.run([wrong, *beside]))
                assert 'AllReduce "wrong": rank 1 sent float32[3]' in message, message
            assert session.run([right, *beside]) == [SIZE * (SIZE + 1) / 2, 0.0, 1.0, 2.0, 3.0]


@check(least=2)
def tf1_a_step_that_fails_on_one_rank_ends_it_everywhere() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        good = v1.placeholder(tf.float32, [])
        loss = tf.debugging.check_numerics(late(1.0, 0.3) / good, "loss")
        # Rank 1 comes to the collective long after rank 0 has failed.
        pending = collectives.allreduce(
            late(1.0, 0.0 if RANK == 0 else 1.2 * SLOWNESS), name="pending"
        )
        behind = collectives.allreduce(pending + 1.0, name="behind")
        for _ in range(2):
            start = time.monotonic()
            try:
                session.run([behind, loss], {good: 0.0 if RANK == 0 else 1.0})
            except tf.errors.InvalidArgumentError as error:
                assert RANK == 0 and "loss" in error.message, error
                assert time.monotonic() - start < 1.1 * SLOWNESS, "it waited for rank 1"
            except tf.errors.FailedPreconditionError as error:
                assert RANK > 0, error
                assert "rank 0 has cancelled AllReduce" in error.message, error
                assert time.monotonic() - start < 20 * SLOWNESS, "it waited for the limit"
            else:
                raise AssertionError("no error")
            assert session.run([behind, loss], {good: 1.0}) == [2.0, 1.0]


@check(least=2)
def tf1_a_step_that_times_out_is_given_up_everywhere() -> None:
    options = v1.RunOptions(timeout_in_ms=300 if RANK == 0 else 60_000)
    with tf.Graph().as_default(), v1.Session() as session:
        slow = collectives.allreduce(late(1.0, 0.0 if RANK == 0 else 1.0 * SLOWNESS), name="slow")
        try:
            session.run(slow, options=options)
        except (tf.errors.DeadlineExceededError, tf.errors.CancelledError):
            assert RANK == 0
        except tf.errors.FailedPreconditionError as error:
            assert "rank 0 has cancelled AllReduce" in error.message, error
        else:
            raise AssertionError("no error")
        assert session.run(collectives.allreduce(1.0 + RANK, average=False)) == (
            SIZE * (SIZE + 1) / 2
        )


def _broken(seconds: np.ndarray) -> np.float32:
    """Takes so long; fails if it is negative."""
    time.sleep(abs(float(seconds)))
    if seconds < 0:
        raise ValueError("bad record")
    return np.float32(0)


@check
def a_step_that_fails_while_it_is_reduced_does_not_shift_those_after_it() -> None:
    @tf.function
    def step(value: tf.Tensor, seconds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        beside = tf.numpy_function(_broken, [seconds], tf.float32, stateful=False)
        return collectives.allreduce(value, average=False), beside

    def total(number: int, seconds: float) -> float | None:
        value = tf.fill([8_000_000], float(2**number))
        try:
            return float(step(value, tf.constant(seconds))[0][0])
        except tf.errors.OpError:
            return None

    total(0, 0.0)
    ddl.barrier("all have traced it")
    begin = time.monotonic()
    total(0, 0.0)
    took_s = float(ddl.allreduce(tf.constant(time.monotonic() - begin), name="took"))
    for number in range(12):
        # On rank 0 every other one fails: before, while, or after it is reduced.
        fails = RANK == 0 and number % 2 == 1
        seconds = -took_s * (0.2 + number / 10) if fails else 0.0
        got = total(number, seconds)
        assert got in (None, SIZE * 2.0**number), f"{number}: {got}"
        assert got is None or not fails, number
        assert got is not None or number % 2 == 1, f"{number}: nothing failed in it"
    assert float(ddl.allreduce(tf.constant(3.0), average=False)) == 3 * SIZE


@check
def a_step_that_a_thread_cancels_leaves_the_other_threads_alone() -> None:
    def generator() -> list[float | None]:
        @tf.function
        def step(value: tf.Tensor, seconds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            beside = tf.numpy_function(_broken, [seconds], tf.float32, stateful=False)
            return collectives.allreduce(value, average=False), beside

        got: list[float | None] = []
        for number in range(4):
            time.sleep(0.4 * SLOWNESS if RANK == 0 else 0.0)  # it comes when the others wait
            fails = RANK == SIZE - 1 and number == 1 and SIZE > 1
            try:
                seconds = tf.constant(-0.1 if fails else 0.0)
                got.append(float(step(tf.constant(float(number)), seconds)[0]))
            except tf.errors.OpError:
                got.append(None)
        return got

    def discriminator() -> list[float]:
        @tf.function
        def step(value: tf.Tensor) -> tf.Tensor:
            return collectives.allreduce(value, average=False)

        return [float(step(tf.constant(float(number)))) for number in range(200)]

    generated, discriminated = in_threads(generator, discriminator, names=("gen", "disc"))
    failed = [None] if SIZE > 1 else [1.0]
    assert generated == [0.0, *failed, 2.0 * SIZE, 3.0 * SIZE], generated
    assert discriminated == [float(number * SIZE) for number in range(200)]


@check
def ranks_without_data_join_and_averages_are_of_the_others() -> None:
    def steps_of(rank: int, epoch: int) -> int:
        return 2 + (rank + epoch) % SIZE

    for epoch in range(3):
        for step in range(steps_of(RANK, epoch)):
            working = [rank for rank in range(SIZE) if step < steps_of(rank, epoch)]
            want = sum(10 * rank + step for rank in working) / len(working)
            large = tf.fill([300_001], 10.0 * RANK + step)
            got = ddl.allreduce_n([large[:3], large])
            assert float(got[0][0]) == np.float32(want) and float(got[1][-1]) == np.float32(want)
            rows = ddl.allgather(tf.fill([RANK + 1, 2], RANK))
            assert len(rows) == sum(rank + 1 for rank in working), len(rows)
            total = ddl.allreduce(tf.constant(3, tf.int32), average=False)
            assert int(total) == 3 * len(working)
            row = tf.IndexedSlices(tf.fill([1, 2], 10.0 * RANK + step), [0], [1, 2])
            sparse = ddl.allreduce(row)
            np.testing.assert_allclose(tf.convert_to_tensor(sparse), [[want, want]], rtol=1e-6)
        last = collectives.join()
        most = max(steps_of(rank, epoch) for rank in range(SIZE))
        assert steps_of(last, epoch) == most, last
        weights = collectives.bcast(tf.constant(float(RANK)), root=last)
        assert float(weights) == last


@check(least=2)
def a_thread_does_not_join_for_others_that_still_reduce() -> None:
    has_joined = threading.Event()

    def trains() -> int:
        if RANK > 0:
            for _ in range(10):
                time.sleep(0.2 * SLOWNESS)
                assert float(ddl.allreduce(tf.constant(1.0))) == 1.0
        has_joined.set()
        return ddl.join()

    def evaluates() -> float:
        has_joined.wait()
        time.sleep(0.5 * SLOWNESS)
        return float(ddl.allreduce(tf.constant(1.0)))

    if RANK > 0:
        (last,) = in_threads(trains, names=("training",))
        assert last in range(1, SIZE), last
        return
    last, refused = in_threads(trains, evaluates, names=("training", "evaluation"))
    assert last in range(1, SIZE), last
    assert isinstance(refused, tf.errors.FailedPreconditionError), refused
    assert "another thread of this rank has joined" in refused.message, refused
