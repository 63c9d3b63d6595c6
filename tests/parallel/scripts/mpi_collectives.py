"""What a script for tensorflow.contrib.mpi_collectives may do: runs each check, says how it went.

It has the name of the module, as a script may. Inputs differ by rank and index.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable

import numpy as np
import tensorflow as tf
import tensorflow.contrib.mpi_collectives as mpi
from ddl_ops import lifecycle
from speech import RANK, SIZE, say

CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def rows_of(rank: int, count: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """A rank's share of a linear regression, [count, 20] and [count, 1]."""
    random = np.random.RandomState(rank)
    inputs = random.randn(count, 20).astype(np.float32)
    return inputs, inputs @ np.arange(20, dtype=np.float32)[:, None] / 10 + 3


def everyone(value) -> list:
    """Every rank's value, to compare."""
    with tf.Graph().as_default(), mpi.Session() as session:
        gathered = session.run(mpi.allgather(tf.constant(np.asarray(value)[None])))
    return list(gathered)


@check
def importing_starts_nothing_and_rank_does() -> None:
    assert not lifecycle.initialised()
    rank, size, local_rank = mpi.rank(), mpi.size(), mpi.local_rank(name="mine")
    assert lifecycle.initialised()
    assert rank.dtype == size.dtype == local_rank.dtype == tf.int32
    assert local_rank.op.name == "mine"
    with tf.Session() as session:
        assert session.run([rank, size, local_rank]) == [RANK, SIZE, RANK]
        assert session.run(mpi.init()) is None


@check
def every_way_to_import_it() -> None:
    import tensorflow.contrib
    from tensorflow.contrib import mpi as older
    from tensorflow.contrib import mpi_collectives
    from tensorflow.contrib.mpi_collectives import Session, allreduce
    from tensorflow.contrib.mpi_collectives.python.ops import mpi_ops
    from tensorflow.contrib.mpi_collectives.python.ops.mpi_ops import _allreduce

    import tensorflow.contrib.mpi  # isort: skip

    assert mpi is mpi_collectives is tf.contrib.mpi_collectives
    assert older is tf.contrib.mpi is tensorflow.contrib.mpi
    assert older.allreduce is mpi.allreduce is allreduce
    assert Session is mpi.Session and issubclass(older.Session, Session)
    for name in ("init", "size", "rank", "local_rank", "allgather", "_allreduce"):
        assert getattr(mpi_ops, name) is getattr(mpi, name)
    assert _allreduce is mpi._allreduce
    assert mpi.__file__ != __file__
    with older.Session(0) as session:  # which GPU, if there are any
        assert session.run(older.size()) == SIZE


@check
def a_linear_regression_learns_and_prints_the_average_loss() -> None:
    with tf.Graph().as_default():
        tf.set_random_seed(RANK)  # so ranks would start apart
        weights = tf.get_variable("weights", [20, 1])
        bias = tf.get_variable("bias", [1, 1])
        inputs = tf.placeholder(tf.float32, [None, 20])
        outputs = tf.placeholder(tf.float32, [None, 1])
        loss = tf.nn.l2_loss(tf.matmul(inputs, weights) + bias - outputs)
        train = mpi.DistributedOptimizer(tf.train.AdamOptimizer(0.1)).minimize(loss)
        average = mpi.allreduce(loss)
        feed = dict(zip((inputs, outputs), rows_of(RANK), strict=True))
        with mpi.Session() as session:
            session.run(tf.global_variables_initializer())
            starts = everyone(session.run(weights))
            before, mine = session.run([average, loss], feed)
            for _ in range(150):
                session.run([train, average], feed)
            after, ends = session.run([average, weights], feed)
    assert all(np.array_equal(start, starts[0]) for start in starts)
    assert np.isclose(before, np.mean(everyone(mine)))
    assert after < 0.02 * before, (before, after)
    assert all(np.array_equal(end, ends) for end in everyone(ends))


@check
def a_plain_optimizer_stays_each_ranks_own() -> None:
    """DDL_OPTIONS is set, but nobody imports ddl."""
    assert "DDL_OPTIONS" in os.environ and "ddl" not in sys.modules
    with tf.Graph().as_default():
        variable = tf.Variable(1.0)
        train = tf.train.GradientDescentOptimizer(1.0).minimize((RANK + 1) * variable)
        assert not [op for op in train.graph.get_operations() if op.type.startswith("AllReduce")]
        with mpi.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            assert session.run(variable) == -RANK


@check
def dense_sums_and_averages_of_every_dtype() -> None:
    numbers = np.arange(-5, 6)
    own = numbers * SIZE + RANK
    total = sum(numbers * SIZE + rank for rank in range(SIZE))
    with tf.Graph().as_default(), mpi.Session() as session:
        for dtype in (tf.int32, tf.int64, tf.float32, tf.float64, tf.float16):
            tensor = tf.constant(own, dtype)
            average, added = mpi.allreduce(tensor), mpi.allreduce(tensor, average=False)
            assert average.dtype == added.dtype == dtype and added.shape == [11]
            got, got_sum = session.run([average, added])
            assert got_sum.tolist() == total.tolist(), dtype
            expected = total // SIZE if dtype.is_integer else total / SIZE
            assert got.tolist() == expected.tolist(), dtype
        for dtype in (tf.int32, tf.int64):  # of numbers whose sum is none of the type
            extremes = [dtype.min, dtype.max, dtype.min + RANK, dtype.max - RANK]
            below, above = sum(range(SIZE)) // SIZE, -(-sum(range(SIZE)) // SIZE)
            got = session.run(mpi.allreduce(tf.constant(extremes, dtype)))
            assert got.dtype == dtype.as_numpy_dtype
            expected = [dtype.min, dtype.max, dtype.min + below, dtype.max - above]
            assert got.tolist() == expected, dtype
        variable = tf.Variable(2.0)
        session.run(variable.initializer)
        assert session.run(mpi.allreduce(variable, average=False)) == 2 * SIZE


@check
def gathers_of_rows_that_differ_in_number() -> None:
    expected = [[rank, row] for rank in range(SIZE) for row in range(rank + 2)]
    own = [row for row in expected if row[0] == RANK]
    with tf.Graph().as_default(), mpi.Session() as session:
        for dtype in (tf.int32, tf.int64, tf.float32):
            gathered = mpi.allgather(tf.constant(own, dtype), name=f"of_{dtype.name}")
            assert gathered.dtype == dtype
            assert session.run(gathered).tolist() == expected


@check
def slices_of_all_ranks() -> None:
    with tf.Graph().as_default(), mpi.Session() as session:
        for dtype in (tf.int32, tf.int64, tf.float32):
            values = tf.constant([[10 * RANK + 3]] * (RANK + 1), dtype)
            indices = tf.constant([7] * (RANK + 1), tf.int64)
            slices = tf.IndexedSlices(values, indices, tf.constant([9, 1], tf.int64))
            average, added = mpi.allreduce(slices), mpi.allreduce(slices, average=False)
            assert isinstance(average, tf.IndexedSlices) and average.dtype == dtype
            got, got_sum = session.run([average, added])
            expected = np.array([[10 * r + 3] for r in range(SIZE) for _ in range(r + 1)])
            assert got_sum.values.tolist() == expected.tolist()
            divided = expected // SIZE if dtype.is_integer else expected / SIZE
            assert got.values.tolist() == divided.tolist()
            assert got.indices.tolist() == [7] * len(expected)
            assert got.dense_shape.tolist() == [9, 1]


@check
def no_gradient_flows_through() -> None:
    with tf.Graph().as_default():
        x = tf.Variable([1.0, 2.0])
        for value in (mpi.allreduce(x), mpi.allreduce(x, average=False), mpi.allgather(x)):
            assert tf.gradients(value, x) == [None]
        with mpi.Session() as session:  # and beside it, the gradient of the rest
            (gradient,) = tf.gradients(3 * x * mpi.allreduce(x, average=False), x)
            session.run(x.initializer)
            assert session.run(gradient).tolist() == [3.0 * SIZE, 6.0 * SIZE]


def trained(optimizer, share: slice, resource: bool, clip: bool, average=list):
    """Weights after 20 steps, names in the checkpoint, slots; on `share` of every rank's rows.

    `average` makes averages of gradients, where the optimizer does not.
    """
    batch = [rows_of(rank) for rank in range(SIZE)]
    inputs, outputs = (np.concatenate(parts)[share] for parts in zip(*batch, strict=True))
    words = (np.arange(16 * SIZE) ** 2 % 7)[share]
    with tf.Graph().as_default():
        with tf.variable_scope("model", use_resource=resource):
            weights = tf.get_variable("weights", initializer=np.ones([20, 1], np.float32))
            table = tf.get_variable("table", initializer=np.ones([7, 1], np.float32))
            tf.get_variable("unused", initializer=0.0)
        found = tf.nn.embedding_lookup(table, words)
        loss = tf.reduce_mean((tf.matmul(inputs, weights) + found - outputs) ** 2)
        pairs = optimizer.compute_gradients(loss)
        assert [gradient is None for gradient, _ in pairs] == [False, False, True]
        assert isinstance(pairs[1][0], tf.IndexedSlices)
        grads, variables = zip(*pairs, strict=True)
        grads = average(list(grads))
        if clip:
            grads, _ = tf.clip_by_global_norm(grads, 1.0)
        pairs = list(zip(grads, variables, strict=True))
        step = tf.train.get_or_create_global_step()
        train = optimizer.apply_gradients(pairs, global_step=step)
        slots = [optimizer.get_slot(weights, name) for name in optimizer.get_slot_names()]
        assert slots and all(slot in optimizer.variables() for slot in slots)
        saver = tf.train.Saver()
        kinds = ("AllReduceN", "AllGather", "TeamGradients")
        reductions = sorted(op.type for op in train.graph.get_operations() if op.type in kinds)
        with mpi.Session() as session, tempfile.TemporaryDirectory() as folder:
            session.run(tf.global_variables_initializer())
            for _ in range(20):
                session.run(train)
            path = saver.save(session, os.path.join(folder, "model"))
            names = tf.train.list_variables(path)
            values = session.run([weights, table, step, *slots])
    return values, names, train.name, reductions


# Each gradient once: a group of dense ones, indices and values of a sparse one.
ONCE = ["AllGather", "AllGather", "AllReduceN"]


@check
def as_one_process_with_the_whole_batch() -> None:
    own = slice(16 * RANK, 16 * RANK + 16)
    for make, resource, clip in (
        (lambda: tf.train.AdamOptimizer(0.05), False, False),
        (lambda: tf.train.AdamOptimizer(0.05), True, True),
        (lambda: tf.train.MomentumOptimizer(0.05, 0.9), False, True),
        (lambda: tf.train.MomentumOptimizer(0.05, 0.9, use_nesterov=True), True, False),
    ):
        alone, names_alone, _, none = trained(make(), slice(None), resource, clip)
        values, names, name, reductions = trained(
            mpi.DistributedOptimizer(make()), own, resource, clip
        )
        for expected, value in zip(alone, values, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
        assert names == names_alone
        assert name == f"Distributed{type(make()).__name__}"
        assert none == []
        assert reductions == ONCE


@check
def every_front_end_as_one_process_with_the_whole_batch() -> None:
    """Also all of them in one process: then each gradient is averaged once."""
    import dl_comm as mc

    def by_team(grads: list) -> list:
        mc.config_team(0, 0, 20, 20)  # all steps are blocking
        return mc.gradients(grads, 0)

    own = slice(16 * RANK, 16 * RANK + 16)
    mc.init(1, 1, 28, "tensorflow")
    for resource in (False, True):
        alone, names, _, _ = trained(tf.train.AdamOptimizer(0.05), slice(None), resource, False)
        ways = [
            (mpi.DistributedOptimizer, list, ONCE),
            (lambda optimizer: optimizer, by_team, ["TeamGradients"]),
        ]
        if resource:
            import ddl  # noqa: F401  for its effect: from here on it hooks the optimizers

            ways.append((lambda optimizer: optimizer, list, ["AllReduceN"]))
        for wrap, average, reductions in ways:
            optimizer = wrap(tf.train.AdamOptimizer(0.05))
            values, ours, _, made = trained(optimizer, own, resource, False, average)
            for expected, value in zip(alone, values, strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
            assert ours == names and made == reductions, (made, reductions)
    clipping = mpi.DistributedOptimizer(tf.train.AdamOptimizer(0.05))
    assert trained(clipping, own, False, True)[3] == ONCE


@check
def an_exported_graph_holds_nothing_of_it() -> None:
    for resource in (False, True):
        with tf.Graph().as_default() as graph, tf.variable_scope("", use_resource=resource):
            variable = tf.get_variable("v", initializer=float(RANK))
            meta = tf.train.export_meta_graph()
            assert variable.initializer is not None
            assert [op for op in graph.get_operations() if op.type == "Bcast"]
        assert not [node for node in meta.graph_def.node if node.op == "Bcast"]
        with tf.Graph().as_default(), mpi.Session() as session:
            tf.train.import_meta_graph(meta)
            session.run(tf.global_variables_initializer())
            assert session.run(tf.global_variables()) == [0.0]  # rank 0's, here too


@check
def a_mismatch_is_an_error_on_every_rank_and_the_next_one_runs() -> None:
    with tf.Graph().as_default(), mpi.Session() as session:
        different = mpi.allreduce(tf.zeros([3 + RANK]))
        sparse = mpi.allgather(tf.zeros([2, 3 + RANK]))
        alike = mpi.allreduce(tf.constant(RANK + 1.0), average=False)
        for _ in range(3):
            for wrong in (different, sparse):
                try:
                    # The one that matches fails with its run, and is not matched with the next one.
                    session.run([wrong, alike])
                except tf.errors.FailedPreconditionError as error:
                    assert "3]" in str(error) and "4]" in str(error), error
                else:
                    raise AssertionError("no error")
                assert session.run(alike) == SIZE * (SIZE + 1) / 2


@check
def what_rank_0_alone_has_restored_all_ranks_begin_with() -> None:
    with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder:
        w, v = (tf.get_variable(name, initializer=[1.0, 2.0]) for name in "wv")
        optimizer = mpi.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.5))
        train = optimizer.minimize(tf.reduce_sum(w + v) * (2.0 * RANK))
        saver = tf.train.Saver([w])
        with mpi.Session() as session:
            session.run(tf.global_variables_initializer())
            if RANK == 0:
                w.load([5.0, 6.0], session)
                saver.restore(session, saver.save(session, f"{folder}/w"))
            session.run(train)
            step = 0.5 * (SIZE - 1)
            assert session.run(w).tolist() == [5.0 - step, 6.0 - step], session.run(w)
            assert session.run(v).tolist() == [1.0 - step, 2.0 - step], session.run(v)


@check
def sessions_that_rank_0_alone_restores_are_refused() -> None:
    with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder:
        step = tf.train.get_or_create_global_step()
        optimizer = mpi.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.5))
        train = optimizer.minimize(tf.get_variable("w", initializer=1.0) * 2.0, step)
        place = folder if RANK == 0 else None
        for begun in ("anew", "from a checkpoint"):
            try:
                with tf.train.MonitoredTrainingSession(checkpoint_dir=place) as session:
                    session.run(train)
            except tf.errors.InvalidArgumentError as error:
                assert "Give all ranks the same `checkpoint_dir`" in str(error), error
                assert begun == "from a checkpoint"
            else:
                assert begun == "anew"


@check
def summaries_of_averages_in_the_supervisors_thread_are_refused() -> None:
    def slowly(value: np.ndarray) -> np.ndarray:
        time.sleep(0.01)
        return value

    with tf.Graph().as_default(), tempfile.TemporaryDirectory() as folder:
        w = tf.get_variable("w", [4])
        optimizer = mpi.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.01))
        pairs = optimizer.compute_gradients(
            tf.reduce_sum(w) * tf.py_func(slowly, [1.0], tf.float32)
        )
        tf.summary.histogram("gradients", pairs[0][0])  # what all ranks have averaged
        step = tf.train.get_or_create_global_step()
        train = optimizer.apply_gradients(pairs, step)
        supervisor = tf.train.Supervisor(logdir=folder, save_summaries_secs=0.1)
        try:
            with supervisor.managed_session() as session:
                for _ in range(300):
                    session.run(train)
        except tf.errors.OpError as error:
            # That of the others, where a rank has ended already.
            assert "summary_op=None" in str(error) or "already ended" in str(error), error
        else:
            raise AssertionError("no error")


if __name__ == "__main__":
    for function in CHECKS:
        try:
            function()
        except Exception:
            say(f"{function.__name__}: failed")
            traceback.print_exc()
            sys.exit(1)
        say(f"{function.__name__}: ok")
