"""What a script for Horovod may do: runs each check, says how it went.

Inputs differ by rank and index. What each rank has is compared by ddl's own means.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import horovod.keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import tensorflow as tf
from autograph import rewritten
from ddl_ops import averaging, lifecycle, preemption
from ddl_ops.gradients import _shapes as shapes_of_gradients
from horovod._keras.optimizer import make_variables
from horovod.common import elastic
from horovod.common.process_sets import ids_and_ranks
from speech import RANK, SIZE, say
from threads import in_threads

CHECKS: list[Callable[[], None]] = []
v1 = tf.compat.v1
MEAN = np.mean([rank + 1.0 for rank in range(SIZE)])


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def raised(kind: type[BaseException], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def alike(values) -> bool:
    """Whether all ranks have these."""
    everyone = hvd.allgather_object([np.asarray(value) for value in values])
    return all(
        np.array_equal(mine, theirs)
        for one in everyone
        for mine, theirs in zip(everyone[0], one, strict=True)
    )


def made_by(kind: str, graph: tf.Graph) -> list[str]:
    return [op.name for op in graph.get_operations() if op.type == kind]


@check
def importing_starts_nothing_and_init_does_and_may_be_repeated() -> None:
    assert not lifecycle.initialised() and not hvd.is_initialized()
    # By these words some scripts tell that they are alone.
    theirs = "Horovod has not been initialized; use hvd.init()."
    assert raised(ValueError, hvd.rank).startswith(theirs)
    assert theirs in raised(ValueError, lambda: hvd.allreduce(1.0))
    assert "comm=True" in raised(ValueError, lambda: hvd.init(True))
    hvd.init([])  # all ranks, as None
    hvd.init()
    assert lifecycle.initialised() and hvd.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (RANK, SIZE, RANK, SIZE)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.mpi_built() and hvd.mpi_enabled() and not hvd.gloo_built() and not hvd.nccl_built()
    hvd.shutdown()
    assert not hvd.is_initialized() and "hvd.init()" in raised(ValueError, hvd.size)
    hvd.init()
    assert "ddl" not in sys.modules  # which would hook the optimizers


@check
def mpi4py_may_be_used_beside_it() -> None:
    from mpi4py import MPI

    assert hvd.mpi_threads_supported()
    hvd.init(comm=MPI.COMM_WORLD)
    assert MPI.COMM_WORLD.allreduce(hvd.rank()) == sum(range(hvd.size()))
    assert float(hvd.allreduce(float(hvd.rank()), op=hvd.Sum)) == sum(range(hvd.size()))
    if hvd.size() > 1:
        assert "comm=" in raised(NotImplementedError, lambda: hvd.init(comm=MPI.COMM_SELF))


@check
def autograph_rewrites_the_scripts_functions_and_none_of_ours() -> None:
    weight = tf.Variable([1.0])

    def reduced(tensor: tf.Tensor) -> list[tf.Tensor]:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(weight * tensor)
        results = [hvd.allreduce(tensor), hvd.allgather(tensor), hvd.broadcast(tensor, 0)]
        return [*results, tape.gradient(loss, [weight])[0]]

    with rewritten() as modules:
        results = tf.function(reduced)(tf.constant([RANK + 1.0]))
    assert set(modules) == {__name__}, modules
    assert [float(result[0]) for result in results] == [MEAN, 1, 1, MEAN]


@check
def settings_of_horovod_reach_the_ops() -> None:
    """HOROVOD_FUSION_THRESHOLD of one float: each gradient travels alone."""
    assert os.environ["DDL_GROUP_SIZE"] == "1"

    @tf.function
    def gradients(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = x[0] * 2.0 + x[1]
        return hvd.DistributedGradientTape(tape).gradient(loss, x)

    graph = gradients.get_concrete_function([tf.TensorSpec([], tf.float32)] * 2).graph
    assert len(made_by("AllReduceN", graph)) == 2


@check
def allreduce_of_what_a_script_may_pass() -> None:
    mine = np.arange(4, dtype=np.float32) * SIZE + RANK
    total = sum(np.arange(4, dtype=np.float32) * SIZE + rank for rank in range(SIZE))
    assert np.allclose(hvd.allreduce(mine), total / SIZE)
    assert np.allclose(hvd.allreduce(mine, average=False), total)
    assert np.allclose(hvd.allreduce(tf.Variable(mine), op=hvd.Sum, name="mine"), total)
    assert "average=" in raised(ValueError, lambda: hvd.allreduce(mine, average=True, op=hvd.Sum))
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert np.allclose(scaled, 2 * total)
    # Integers are scaled in float64, and truncated before they are added.
    whole = hvd.allreduce(np.array([3, -3]), op=hvd.Sum, prescale_factor=0.5)
    assert whole.numpy().tolist() == [SIZE, -SIZE]
    # Averages do not wrap around, sums do.
    pixels = np.array([200 if RANK % 2 == 0 else 100, 255], np.uint8)
    halfway = [sum((200, 100)[rank % 2] for rank in range(SIZE)) // SIZE, 255]
    for reduced in (
        hvd.allreduce(pixels),
        hvd.grouped_allreduce([pixels, mine])[0],
        hvd.allreduce(pixels, compression=hvd.Compression.fp16),
    ):
        assert reduced.dtype == tf.uint8 and reduced.numpy().tolist() == halfway
    assert hvd.reducescatter(np.tile(pixels, SIZE)).numpy().tolist() == halfway
    assert hvd.allreduce(pixels, op=hvd.Sum).numpy()[1] == 255 * SIZE % 256
    small = hvd.allreduce(mine + 2.0**-14, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert small.dtype == tf.float32 and np.array_equal(small, np.float16(total))
    together = hvd.grouped_allreduce([mine, tf.ones(2, tf.int32), mine[:0]], op=hvd.Sum)
    assert [one.dtype for one in together] == [tf.float32, tf.int32, tf.float32]
    assert np.allclose(together[0], total) and together[1].numpy().tolist() == [SIZE, SIZE]
    slices = tf.IndexedSlices(tf.fill([RANK + 1, 2], 1.0 + RANK), tf.range(RANK + 1), [SIZE, 2])
    both = hvd.grouped_allreduce([slices, mine])
    for reduced in (hvd.allreduce(slices), both[0]):
        assert reduced.indices.numpy().tolist() == [i for r in range(SIZE) for i in range(r + 1)]
        expected = [(r + 1) / SIZE for r in range(SIZE) for _ in range(r + 1)]
        assert np.allclose(reduced.values, np.array(expected)[:, None] * np.ones(2))
        assert list(reduced.dense_shape) == [SIZE, 2]
    assert np.allclose(both[1], total / SIZE)
    for wrong in ({"op": hvd.Min}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}):
        assert "IndexedSlices" in raised(
            NotImplementedError, lambda wrong=wrong: hvd.allreduce(slices, **wrong)
        )


@check
def the_others_and_their_gradients() -> None:
    gathered = hvd.allgather(np.full([RANK + 1, 2], RANK))
    assert gathered.numpy()[:, 0].tolist() == [r for r in range(SIZE) for _ in range(r + 1)]
    variable = tf.Variable([float(RANK), 5.0])
    with tf.GradientTape() as tape:
        received = hvd.broadcast(variable, root_rank=SIZE - 1)
    assert received.numpy().tolist() == [SIZE - 1.0, 5.0]
    gradient = tape.gradient(received, variable)
    # Of the average of the ranks' losses, as Horovod's.
    assert gradient.numpy().tolist() == [1.0 if RANK == SIZE - 1 else 0.0] * 2
    (value,) = hvd.broadcast_([variable], 1)
    assert variable.numpy().tolist() == value.numpy().tolist() == [1.0, 5.0]
    assert hvd.broadcast_object({"rank": RANK, "f": len}, root_rank=1) == {"rank": 1, "f": len}
    assert hvd.allgather_object("x" * RANK) == ["x" * rank for rank in range(SIZE)]
    hvd.barrier()
    for different in (
        lambda: hvd.allreduce(tf.zeros([3 + RANK])),
        lambda: hvd.grouped_allreduce([tf.zeros([3 + RANK])]),
        lambda: hvd.allgather(tf.zeros([1, 3 + RANK])),
        lambda: hvd.broadcast(tf.zeros([1]), root_rank=RANK),
    ):
        raised(tf.errors.FailedPreconditionError, different)
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE


@check
def variables_of_keras_are_assigned_what_is_broadcast() -> None:
    variables = [keras.Variable([float(RANK)]), tf.Variable(RANK)]
    values = hvd.broadcast_(variables, 1)
    assert [np.ravel(one.numpy())[0] for one in (*variables, *values)] == [1.0] * 4


@check
def reductions_exchanges_and_scatters_with_horovods_gradients() -> None:
    values = np.array([[rank, 9 - rank, 3] for rank in range(SIZE)], np.uint8)
    mine = values[RANK]
    for op, reduce in ((hvd.Min, np.min), (hvd.Max, np.max), (hvd.Product, np.prod)):
        assert np.array_equal(hvd.allreduce(mine, op=op), reduce(values, axis=0))
        assert np.array_equal(hvd.grouped_allreduce([mine, mine], op=op)[1], reduce(values, axis=0))
    rows = tf.Variable(np.arange(2 * SIZE, dtype=np.float32) + 10 * RANK)
    with tf.GradientTape(persistent=True) as tape:
        exchanged = hvd.alltoall(rows)
        total = hvd.reducescatter(rows, op=hvd.Sum)
    theirs = [2.0 * RANK + i + 10 * r for r in range(SIZE) for i in range(2)]
    assert exchanged.numpy().tolist() == theirs
    assert tape.gradient(exchanged, rows).numpy().tolist() == [1.0] * 2 * SIZE
    assert np.allclose(total, [SIZE * (2 * RANK + i) + 10 * sum(range(SIZE)) for i in range(2)])
    # Horovod's is multiplied by the number of ranks.
    assert tape.gradient(total, rows).numpy().tolist() == [float(SIZE)] * 2 * SIZE
    received, counts = hvd.alltoall(tf.fill([SIZE], RANK), splits=[1] * SIZE)
    assert received.numpy().tolist() == list(range(SIZE)) and counts.numpy().tolist() == [1] * SIZE
    scattered = hvd.grouped_reducescatter([rows, tf.ones([SIZE + 1], tf.float64)])
    assert len(scattered[1]) == (2 if RANK == 0 else 1) and scattered[1].dtype == tf.float64


@check
def some_rows_of_what_was_exchanged_have_gradients() -> None:
    """tf.gather has IndexedSlices as gradient."""
    rows = tf.Variable(tf.ones([2 * SIZE, 2]))

    def gradients(exchange: Callable[[tf.Variable], tf.Tensor], row: int) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(exchange(rows), [row, row]))
        return tf.convert_to_tensor(tape.gradient(loss, rows))

    last = SIZE - 1
    for exchange, row, mine, expected in (
        (hvd.allgather, 2 * SIZE * last, last == RANK, 2.0),
        (lambda rows: hvd.grouped_allgather([rows])[0], 0, RANK == 0, 2.0),
        (lambda rows: hvd.broadcast(rows, last), 0, last == RANK, 2.0),
    ):
        for run in (gradients, tf.function(gradients)):
            found = run(exchange, row).numpy()
            assert np.allclose(found[0], expected * mine) and not found[1:].any(), (row, found)
    for run in (gradients, tf.function(gradients)):
        found = run(lambda rows: hvd.reducescatter(rows, op=hvd.Sum), 1).numpy()
        # Horovod's is multiplied by the number of ranks.
        assert np.allclose(found[1::2], 2.0 * SIZE) and not found[::2].any(), found


@check
def process_sets_come_go_and_take_what_all_take() -> None:
    sets = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    assert [one.process_set_id for one in sets] == list(range(1, SIZE + 1))
    mine, other = sets[RANK], sets[RANK - 1]
    assert (mine.size(), mine.rank(), mine.included(), other.included()) == (1, 0, True, False)
    assert [hvd.ProcessSet([rank]).included() for rank in range(SIZE)] == [
        rank == RANK for rank in range(SIZE)
    ]
    assert hvd.allreduce(RANK + 1.0, op=hvd.Sum, process_set=mine) == RANK + 1
    assert hvd.broadcast_object(RANK, root_rank=RANK, process_set=mine) == RANK
    assert hvd.allgather_object(RANK, process_set=mine) == [RANK]
    assert hvd.size_op(other.process_set_id) == 1 and hvd.size_op() == SIZE
    assert hvd.process_set_included_op(other.process_set_id) == 0

    def gradient_by(one: hvd.ProcessSet) -> tf.Tensor:
        x = tf.Variable(RANK + 1.0)
        with tf.GradientTape() as tape:
            loss = 2.0 * x
        return hvd.DistributedGradientTape(tape, process_set=one).gradient(loss, x)

    assert gradient_by(sets[0]) == 2.0  # whoever is not of the set keeps its own
    raised(tf.errors.InvalidArgumentError, lambda: hvd.allreduce(1.0, process_set=other))
    assert "already" in raised(ValueError, lambda: hvd.add_process_set(range(SIZE)))
    assert hvd.remove_process_set(sets[0]) and sets[0].process_set_id is None
    assert sets[0].included() == (RANK == 0) and sets[0].size() is None
    raised(ValueError, lambda: gradient_by(hvd.ProcessSet(range(SIZE))))
    raised(ValueError, lambda: gradient_by(sets[0]))
    assert not hvd.remove_process_set(hvd.global_process_set)
    raised(ValueError, lambda: hvd.allreduce(1.0, process_set=sets[0]))
    assert hvd.add_process_set(sets[0]).process_set_id == 1
    for one in sets:
        assert hvd.remove_process_set(one)
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE
    # After shutdown() there are none, and the same ones may come, as new objects or as they were.
    hvd.init(process_sets=sets)
    hvd.shutdown()
    assert sets[0].process_set_id is None
    hvd.init()
    assert ids_and_ranks() == {0: [*range(SIZE)]}
    hvd.shutdown()
    hvd.init(process_sets=(again := [hvd.ProcessSet([rank]) for rank in reversed(range(SIZE))]))
    assert [one.process_set_id for one in again] == list(range(1, SIZE + 1))
    assert hvd.allreduce(RANK + 1.0, op=hvd.Sum, process_set=again[-1 - RANK]) == RANK + 1
    assert "already" in raised(ValueError, lambda: hvd.add_process_set([RANK]))
    for one in again:
        assert hvd.remove_process_set(one)
    hvd.remove_process_set(hvd.add_process_set([0]))


@check
def a_number_as_multiplier_decays_the_learning_rate() -> None:
    schedule = hvd_keras.callbacks.LearningRateScheduleCallback(
        initial_lr=0.8, multiplier=0.5, start_epoch=1
    )
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.8)), "mse")
    seen = model.fit(np.ones((2, 1)), np.ones(2), epochs=4, verbose=0, callbacks=[schedule])
    assert np.allclose(seen.history["lr"], [0.8, 0.8, 0.4, 0.2]), seen.history


@check
def a_row_of_several_slices_is_updated_once() -> None:
    """By itself Keras 3 lets Adam square each of them, and adds up the squares."""

    def trained(sparse_as_dense: bool) -> np.ndarray:
        variable = keras.Variable(np.ones((4, 2)), dtype="float32")
        optimizer = hvd_keras.DistributedOptimizer(
            keras.optimizers.Adam(0.1), sparse_as_dense=sparse_as_dense
        )
        for step in range(3):
            values = np.arange(6, dtype=np.float32).reshape(3, 2) + RANK + step
            slices = tf.IndexedSlices(tf.constant(values), tf.constant([0, 2, 0]), [4, 2])
            optimizer.apply([slices], [variable])
        return variable.numpy()

    assert np.allclose(trained(False), trained(True), atol=1e-6)
    for kind in (
        "tape",
        "tape, local layer",
        "optimizer, local variable",
        "allreduce",
        "allreduce, clipped",
        "allreduce, optimizer",
        "grouped_allreduce",
    ):
        assert np.allclose(updated(kind, True), updated(kind, False), atol=1e-6), kind


def updated(kind: str, sparse: bool) -> np.ndarray:
    """A table after a step by gradients that are combined in one of the ways, if at all."""
    layer = keras.layers.Embedding(4, 1, embeddings_initializer="ones")
    layer.build((None,))
    optimizer = keras.optimizers.Adagrad(0.1)
    if "optimizer" in kind:
        optimizer = hvd_keras.DistributedOptimizer(optimizer)
    if "local variable" in kind:
        optimizer.register_local_var(layer.embeddings)
    with tf.GradientTape() as tape:
        rows = tf.constant([1, 1, 2, RANK])
        table = layer.embeddings.value
        found = tf.gather(table, rows) if sparse else tf.matmul(tf.one_hot(rows, 4), table)
        loss = (RANK + 1.0) * tf.reduce_sum(found)
    if "local layer" in kind:
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
    elif kind == "tape":
        tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, layer.trainable_variables)
    assert isinstance(gradients[0], tf.IndexedSlices) is sparse
    if kind == "grouped_allreduce":
        gradients = hvd.grouped_allreduce(gradients)
    elif "allreduce" in kind:
        gradients = [hvd.allreduce(one) for one in gradients]
    if "clipped" in kind:
        gradients, _ = tf.clip_by_global_norm(gradients, 1e9)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
    return layer.embeddings.numpy()


@check
def a_tape_averages_but_what_stays_local() -> None:
    shared, own, unused = tf.Variable(1.0), keras.Variable(1.0), tf.Variable(1.0)
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    layer.build([1, 1])

    @tf.function
    def gradients():
        with tf.GradientTape() as tape:
            loss = (RANK + 1.0) * (shared + 2.0 * own.value + 3.0 * layer(tf.ones([1, 1]))[0, 0])
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer)
        assert isinstance(tape, tf.GradientTape)
        tape.register_local_source(own)
        return tape.gradient(loss, {"a": shared, "b": own.value, "c": layer.kernel, "d": unused})

    found = gradients()
    assert found["a"] == MEAN and found["d"] is None
    assert np.isclose(found["b"], 2.0 * (RANK + 1) / SIZE)
    assert np.isclose(found["c"], 3.0 * (RANK + 1) / SIZE)
    with hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=2.0) as tape:
        loss = (RANK + 1.0) * shared
    assert np.isclose(tape.gradient(loss, shared), MEAN)
    embedded = tf.Variable(tf.ones([SIZE, 2]))
    for dense in (False, True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(embedded, [RANK]))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=dense, op=hvd.Sum)
        (gradient,) = tape.gradient(loss, [embedded])
        assert isinstance(gradient, tf.IndexedSlices) is not dense
        assert np.array_equal(tf.convert_to_tensor(gradient), np.ones([SIZE, 2]))


@check
def gradients_that_are_none_on_another_rank_are_an_error() -> None:
    """And never combined with those of another variable, which may have the same shape."""

    def by_a_tape() -> None:
        variables = [tf.Variable(1.0), tf.Variable(1.0)]
        with tf.GradientTape() as tape:
            loss = 2.0 * variables[RANK]
        hvd.DistributedGradientTape(tape).gradient(loss, variables)

    def by_keras(passes: int) -> None:
        optimizer = keras.optimizers.SGD(1.0)
        hvd_keras.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
        variables = [keras.Variable(1.0), keras.Variable(1.0)]
        mine = [tf.constant(1.0) if i == RANK else None for i in range(2)]
        for _ in range(passes):
            optimizer.apply(mine, variables)

    def in_a_graph(**options: object) -> None:
        with tf.Graph().as_default(), v1.Session() as session:
            variables = [v1.get_variable(name, initializer=1.0) for name in "ab"]
            optimizer = v1.train.GradientDescentOptimizer(1.0)
            train = hvd.DistributedOptimizer(optimizer, **options).minimize(
                2.0 * variables[RANK], var_list=variables
            )
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for _ in range(options.get("backward_passes_per_step", 1)):
                session.run(train)

    for combines in (
        by_a_tape,
        lambda: by_keras(1),
        lambda: by_keras(2),
        in_a_graph,
        lambda: in_a_graph(backward_passes_per_step=2),
        lambda: in_a_graph(op=hvd.Adasum),
    ):
        said = raised(tf.errors.FailedPreconditionError, combines)
        assert "rank 1 sent float32[0,0,2,0]" in said and "rank 0 float32[0,0,2,1]" in said, said


@check
def averages_are_over_the_ranks_that_have_not_joined() -> None:
    embedded, weight = tf.Variable(tf.zeros([3, 1])), tf.Variable(0.0)

    def gradients(**options) -> tuple[tf.IndexedSlices, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(embedded, [0, 1])) + weight
        return hvd.DistributedGradientTape(tape, **options).gradient(loss, [embedded, weight])

    in_a_graph = tf.function(gradients)
    for run in (gradients, in_a_graph):
        if RANK == 0:
            sparse, dense = run()
            assert tf.convert_to_tensor(sparse).numpy().ravel().tolist() == [1.0, 1.0, 0.0]
            assert dense == 1.0
            divided = run(sparse_as_dense=True, gradient_predivide_factor=4.0)
            assert divided[0].numpy().ravel().tolist() == [1.0, 1.0, 0.0] and divided[1] == 1.0
            slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([2]), tf.constant([3, 1]))
            reduced = [hvd.allreduce(slices), *hvd.grouped_allreduce([slices, slices, dense])]
            assert [tf.reduce_sum(one.values).numpy() for one in reduced[:3]] == [1.0] * 3
            assert reduced[3] == 1.0
        last = hvd.join()
        assert last.dtype == tf.int32 and last.numpy() in range(SIZE)
        given = hvd.broadcast_object(RANK, last), hvd.broadcast(RANK, last).numpy()
        assert given == (last.numpy(),) * 2


@check
def a_rank_joins_when_a_function_is_run_and_not_when_it_is_traced() -> None:
    join = tf.function(lambda: hvd.join() + 0).get_concrete_function()
    if RANK == 0:
        assert hvd.allreduce(3.0, op=hvd.Sum) == 3.0
    assert join().numpy() in range(SIZE)


@check
def gradients_of_a_scripts_own_optimizer_are_combined_by_horovods_function() -> None:
    # As in Horovod's first releases, and in its last.
    first = hvd._make_allreduce_grads_fn("Own", "", "", hvd.Compression.none, False)
    last = hvd._make_allreduce_grads_fn(
        *("Own", "", "", hvd.Compression.fp16, True, hvd.Sum, 1.0, None),
        process_set=hvd.global_process_set,
    )
    weight = tf.Variable([1.0, 2.0])
    gradient = tf.constant([RANK + 1.0, 0.0])
    averages = first([gradient, None])
    assert averages[1] is None
    np.testing.assert_allclose(averages[0], [MEAN, 0])
    np.testing.assert_allclose(last([gradient + 0.0], [weight])[0], [MEAN * SIZE, 0])
    # An optimizer that averages, too, leaves it as it is.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply_gradients([(averages[0] * 1.0, weight)])
    np.testing.assert_allclose(weight, [1 - MEAN, 2])


@check
def a_tape_combines_gradients_while_it_records() -> None:
    """As TensorFlow's own: it ends recording, if it is not persistent."""
    weight = tf.Variable(2.0)

    def inside(persistent: bool = False) -> tf.Tensor:
        with tf.GradientTape(persistent) as tape:
            loss = (RANK + 1.0) * weight * weight
            distributed = hvd.DistributedGradientTape(tape)
            gradient = distributed.gradient(loss, weight)
        assert not tape._recording and not distributed._recording
        return gradient

    def after(persistent: bool = False) -> tf.Tensor:
        with tf.GradientTape(persistent) as tape:
            tape = hvd.DistributedGradientTape(tape)
            with tape.stop_recording():
                factor = weight * 0.0 + RANK + 1.0
            loss = factor * weight * weight
        assert not tape._recording
        return tape.gradient(loss, weight)

    for compute in (inside, after):
        for run in (compute, tf.function(compute)):
            for persistent in (False, False, True):
                assert run(persistent) == 4.0 * MEAN
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = (RANK + 1.0) * weight
        assert tape.gradient(loss, weight) == MEAN


@check
def a_local_gradient_that_is_another_ones_too_marks_none() -> None:
    shared, own = tf.Variable(1.0), tf.Variable(1.0)
    rows = tf.Variable(tf.ones([2, 1]))
    with tf.GradientTape() as tape:
        loss = shared + own
    tape = hvd.DistributedGradientTape(tape, scale_local_gradients=False)
    tape.register_local_source(own)
    # The sum gives both the same tensor.
    upstream = tf.constant(RANK + 1.0)
    found = tape.gradient(loss, [own, shared], output_gradients=upstream)
    assert [float(one) for one in found] == [RANK + 1.0, MEAN]
    slices = tf.IndexedSlices(tf.fill([1, 1], RANK + 1.0), [0], [2, 1])
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(1.0), scale_local_gradients=False
    )
    optimizer.register_local_var(rows)
    kept, reduced = optimizer._allreduce([slices, slices], [rows, tf.Variable(tf.ones([2, 1]))])
    assert float(kept.values[0, 0]) == RANK + 1.0
    assert np.isclose(tf.reduce_sum(reduced.values), MEAN)


def model_of(optimizer) -> keras.Model:
    keras.utils.set_random_seed(RANK)
    model = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(3, activation="relu"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def rows() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.RandomState(RANK).rand(32, 4).astype(np.float32)
    return inputs, inputs.sum(1, keepdims=True)


@check
def keras_trains_one_model_with_every_callback() -> None:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    assert hvd_keras.DistributedOptimizer(optimizer) is optimizer
    first = float(optimizer.learning_rate)
    optimizer.learning_rate = 0.625
    with contextlib.redirect_stderr(io.StringIO()) as said:
        again = hvd.DistributedOptimizer(optimizer)
    assert again is not optimizer and float(again.learning_rate) == first
    assert ("by now it has 0.625. If you have set that" in said.getvalue()) == (RANK == 0)
    optimizer.learning_rate = first
    assert "already" in raised(ValueError, lambda: hvd.DistributedOptimizer(again))
    model = model_of(optimizer)
    folder = hvd.broadcast_object(tempfile.mkdtemp())
    os.environ["CHECKPOINT_DIR"] = folder
    callbacks = hvd_keras.callbacks
    history = model.fit(
        *rows(),
        batch_size=8,
        epochs=4,
        verbose=0,
        validation_data=rows(),
        callbacks=[
            callbacks.BroadcastGlobalVariablesCallback(0),
            callbacks.MetricAverageCallback(),
            callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2),
            callbacks.LearningRateScheduleCallback(0.08, lambda epoch: 0.5**epoch, start_epoch=2),
            callbacks.BestModelCheckpoint(),
        ],
    ).history
    assert history["loss"][-1] < history["loss"][0]
    assert np.allclose(history["lr"], [0.08 * (SIZE + 1) / 2 / SIZE, 0.08, 0.02, 0.01]), history
    assert alike([*model.get_weights(), history["loss"], history["val_mae"]])
    hvd.barrier()
    # Saved as an optimizer of Keras, and gone on with distributed.
    path = f"{folder}/model-best.keras"
    assert type(keras.models.load_model(path).optimizer) is keras.optimizers.SGD
    if RANK == 0:
        best_is_saved_whole(model, path)
    loaded = hvd_keras.load_model(path)
    assert loaded.optimizer.iterations.numpy() in (4, 8, 12, 16)
    loaded.train_on_batch(*rows())
    assert alike(loaded.get_weights())
    pickled = pickle.loads(pickle.dumps(optimizer))
    assert type(pickled) is keras.optimizers.SGD and float(pickled.momentum) == 0.5
    again = type(optimizer).from_config(optimizer.get_config())
    again.apply([tf.constant(RANK + 1.0)], [variable := keras.Variable(0.0)])
    assert np.isclose(variable, -float(again.learning_rate.numpy()) * MEAN)


@check
def one_variable_may_stay_as_it_is_while_others_are_broadcast() -> None:
    for inner in (False, True):
        model = model_of(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        own = model.layers[0].kernel
        own.assign(tf.fill(own.shape, float(RANK)))
        callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(
            0, local_variables=own.value if inner else own
        )
        callback.set_model(model)
        callback.on_batch_end(0)
        kept, *others = model.get_weights()
        assert (kept == RANK).all() and alike(others)


def best_is_saved_whole(model: keras.Model, path: str) -> None:
    assert os.listdir(os.path.dirname(path)) == ["model-best.keras"]
    whole, save = Path(path).read_bytes(), model.save

    def save_half(to: str, **options: object) -> None:
        save(to, **options)
        os.truncate(to, 100)
        raise InterruptedError("as one that was killed")

    callback = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss", mode="min")
    callback.set_model(model)
    callback.on_epoch_begin(0)
    model.save = save_half
    try:
        callback.on_epoch_end(0, {"loss": 1.0})
    except InterruptedError:
        assert Path(path).read_bytes() == whole
    else:
        raise AssertionError("no end")
    finally:
        del model.save
    callback.on_epoch_end(1, {"loss": 2.0})  # which is no better, and saves nothing
    assert Path(path).read_bytes() == whole


@check
def a_thread_without_a_name_trains() -> None:
    def train() -> None:
        model = model_of(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(*rows(), batch_size=8, verbose=0, callbacks=[broadcast])
        weights.append(model.get_weights())

    weights: list[list[np.ndarray]] = []
    for _ in range(2):  # one after the other
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert alike(weights[0]) and alike(weights[1])

    both = threading.Barrier(2)
    refused: list[str] = []

    def add() -> None:
        both.wait()
        try:
            hvd.allreduce(tf.ones([1]), op=hvd.Sum)
        except RuntimeError as error:
            refused.append(str(error))
        both.wait()

    at_once = [threading.Thread(target=add) for _ in range(2)]
    for thread in at_once:
        thread.start()
    for thread in at_once:
        thread.join()
    assert len(refused) == 1 and "Name the thread" in refused[0], refused


@check
def batches_are_normalised_by_the_moments_of_all() -> None:
    everyone = np.stack([np.random.RandomState(rank).rand(8, 3) for rank in range(SIZE)])
    layer = hvd.SyncBatchNormalization(momentum=0.0)
    normalised = layer(tf.constant(everyone[RANK], tf.float32), training=True)
    rows = everyone.reshape(-1, 3)
    assert np.allclose(layer.moving_mean, rows.mean(0), atol=1e-6)
    assert np.allclose(layer.moving_variance, rows.var(0), atol=1e-6)
    expected = (everyone[RANK] - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-3)
    assert np.allclose(normalised, expected, atol=1e-5)
    # Raw features: the mean of the squares says nothing of their variance.
    large = (everyone + [0, 1000, 30000]).astype("float32")
    layer(tf.constant(large[RANK]), training=True)
    variances = large.reshape(-1, 3).astype("float64").var(0)
    assert np.allclose(layer.moving_variance, variances, rtol=1e-3), layer.moving_variance


def says_that_it_averages(run: Callable[[], object]) -> bool:
    """Whether this rank takes what is averaged for its gradients."""
    before = averaging._facts.copy()
    averaging._facts.update(averaged=False, explicit=False)
    run()
    said = averaging._facts["averaged"], averaging._facts["explicit"]
    averaging._facts.update(before)
    assert len({*said}) == 1, said
    return said[0]


@check
def moments_of_all_are_not_taken_for_gradients() -> None:
    """Else ranks would train apart unseen, for want of a DistributedOptimizer."""
    layer = hvd.SyncBatchNormalization()
    layer.build([None, 3])
    ones = tf.ones([8, 3])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ones) ** 2)
    tape.gradient(loss, layer.trainable_variables)  # as large as the moments
    assert not says_that_it_averages(lambda: layer(ones, training=True))
    assert not says_that_it_averages(lambda: tf.function(layer)(ones, training=True))


@check
def gradients_that_a_script_averages_in_any_way_are_known() -> None:
    """Else ranks that train one model would fail at the end, as trained apart."""
    ones, few = tf.ones([8, 3]), tf.ones([SIZE])
    shapes = shapes_of_gradients.copy()
    shapes_of_gradients.clear()
    shapes_of_gradients.add((99, 3))  # as of a variable
    for does in (
        lambda: hvd.allreduce(ones),
        lambda: hvd.grouped_allreduce([few, ones]),
        lambda: hvd.reducescatter(ones),
        lambda: hvd.grouped_reducescatter([few, ones]),
        lambda: hvd_keras.reducescatter(ones),
    ):
        assert says_that_it_averages(does), does
    for does_not in (
        lambda: hvd.allreduce(few),
        lambda: hvd.reducescatter(few),  # losses and metrics
        lambda: hvd.grouped_reducescatter([few, few]),
        lambda: hvd.allgather(ones),
    ):
        assert not says_that_it_averages(does_not), does_not
    shapes_of_gradients.clear()
    shapes_of_gradients.update(shapes)


@check
def models_with_the_layer_of_all_moments_load_in_a_rank() -> None:
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model = keras.Sequential([keras.Input([4]), hvd.SyncBatchNormalization()])
    model.compile(optimizer, "mse")
    model.train_on_batch(rows()[0], rows()[0])
    path = f"{tempfile.mkdtemp()}/model.keras"
    model.save(path)
    for front_end in (horovod.keras, hvd_keras):
        loaded = front_end.load_model(path)
        assert type(loaded.layers[0]) is hvd.SyncBatchNormalization
        assert alike(loaded.get_weights())


@check
def models_with_a_registered_optimizer_load_anywhere() -> None:
    kinds = [keras]
    if importlib.util.find_spec("tf_keras") is not None:  # pip install -r requirements/legacy.txt
        import tf_keras

        kinds.append(tf_keras)
    for kind in kinds:

        @kind.saving.register_keras_serializable("script")
        class Slow(kind.optimizers.SGD):
            pass

        optimizer = hvd_keras.DistributedOptimizer(Slow(0.1))
        model = kind.Sequential([kind.Input([4]), kind.layers.Dense(1)])
        model.compile(optimizer, kind.losses.MeanSquaredError())
        model.train_on_batch(*rows())
        for end in ("keras", "h5"):
            path = f"{tempfile.mkdtemp()}/model.{end}"
            model.save(path)
            assert type(kind.models.load_model(path).optimizer) is Slow, (kind, end)


@check
def a_model_without_an_optimizer_is_loaded_as_it_is() -> None:
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    path = f"{tempfile.mkdtemp()}/model.keras"
    model.save(path)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        loaded = hvd_keras.load_model(path)
    assert np.array_equal(loaded.predict(rows()[0], verbose=0), model.predict(rows()[0], verbose=0))
    assert ("saved without its optimizer. To train" in said.getvalue()) == (RANK == 0)


@check
def a_model_that_was_loaded_goes_on_with_the_state_of_its_optimizer() -> None:
    folder = hvd.broadcast_object(tempfile.mkdtemp())
    for end in ("keras", "h5"):
        optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
        model.compile(optimizer, keras.losses.MeanSquaredError())
        broadcast = horovod.keras.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(*rows(), verbose=0, callbacks=[broadcast])
        if RANK == 0:
            model.save(f"{folder}/model.{end}")
        hvd.barrier()
        loaded = hvd_keras.load_model(f"{folder}/model.{end}")
        state = [one.numpy() for one in model.optimizer.variables]
        assert len(state) > 2, state
        for mine, theirs in zip(state, loaded.optimizer.variables, strict=True):
            assert np.allclose(mine, theirs.numpy()), (end, mine, theirs)
        for one in (model, loaded):
            one.fit(*rows(), shuffle=False, verbose=0)
        for mine, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
            assert np.allclose(mine, theirs), (end, mine, theirs)
        assert alike(loaded.get_weights())


@check
def a_model_that_was_saved_before_it_was_trained_is_loaded_and_trains() -> None:
    folder = hvd.broadcast_object(tempfile.mkdtemp())
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, keras.losses.MeanSquaredError())
    if RANK == 0:
        model.save(f"{folder}/model.h5")
    hvd.barrier()
    loaded = hvd_keras.load_model(f"{folder}/model.h5")
    loaded.fit(*rows(), verbose=0)
    assert alike(loaded.get_weights())


@check
def a_schedule_without_a_rate_begins_with_the_optimizers() -> None:
    """As before Horovod 0.20, for which many scripts were written."""
    begun = model_of(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    callbacks = [
        hvd_keras.callbacks.LearningRateWarmupCallback(warmup_epochs=1),
        hvd_keras.callbacks.LearningRateScheduleCallback(
            start_epoch=1, multiplier=lambda epoch: 0.1**epoch
        ),
    ]
    for _ in range(2):  # a second training begins with the rate that it finds
        first = float(begun.optimizer.learning_rate)
        rates = begun.fit(*rows(), epochs=3, verbose=0, callbacks=callbacks).history["lr"]
        assert np.allclose(rates, [first, 0.1 * first, 0.01 * first]), (first, rates)
    only = raised(
        ValueError, lambda: hvd_keras.callbacks.LearningRateScheduleCallback(lambda epoch: 0.1)
    )
    assert "multiplier=" in only, only


@check
def the_end_of_the_warm_up_is_said_on_rank_0() -> None:
    model = model_of(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    warm_up = hvd_keras.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=2, verbose=1)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.fit(*rows(), epochs=3, verbose=0, callbacks=[warm_up])
    expected = "\nEpoch 2: finished gradual learning rate warmup to 0.1.\n"
    assert said.getvalue() == ("" if RANK else expected), said.getvalue()


@check
def gradients_of_several_passes_are_added_up_first() -> None:
    for average in (False, True):
        seen, iterations = five_passes(average)
        divisor = 2 if average else 1
        mean, mine = MEAN / divisor, (RANK + 1) / SIZE / divisor
        expected = [(-total * mean, -total * mine) for total in (0, 3, 3, 10, 10)]
        assert np.allclose(seen, expected), (seen, expected)
        assert iterations == 5


def five_passes(average: bool) -> tuple[list[tuple[float, float]], int]:
    optimizer = horovod.keras.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )
    shared, local = keras.Variable(0.0), keras.Variable(0.0)
    optimizer.register_local_var(local)

    @tf.function
    def step(factor):
        optimizer.apply([factor * (RANK + 1.0), factor * (RANK + 1.0)], [shared, local])

    seen = []
    for factor in (1.0, 2.0, 3.0, 4.0, 5.0):
        step(tf.constant(factor))
        seen.append((float(shared.numpy()), float(local.numpy())))
    return seen, int(optimizer.iterations.numpy())


@check
def optimizers_that_add_up_passes_take_turns_as_the_script_says() -> None:
    """As of a GAN: what is ready first differs from rank to rank."""
    weights = [keras.Variable(0.0), keras.Variable(0.0)]
    optimizers = [
        hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        for _ in weights
    ]
    for optimizer, weight in zip(optimizers, weights, strict=True):
        optimizer.build([weight])

    def gradient(of: int) -> tf.Tensor:
        seconds = 0.3 if of == RANK % 2 else 0.0
        mine = tf.numpy_function(
            lambda: time.sleep(seconds) or np.float32(RANK + 1), [], "float32", stateful=False
        )
        mine.set_shape([])
        return mine * (of + 1)

    @tf.function
    def step() -> None:
        gradients = [gradient(0), gradient(1)]
        for optimizer, *pair in zip(optimizers, gradients, weights, strict=True):
            optimizer.apply_gradients([pair])

    for _ in range(4):
        step()
    assert np.allclose([float(weight) for weight in weights], [-4 * MEAN, -8 * MEAN])


@check
def passes_of_other_variables_are_not_added_up_with_them() -> None:
    """As of two networks with one optimizer, or where layers are frozen, and others no more."""
    for graph in (False, True):
        optimizer = hvd_keras.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=2
        )
        one, other = keras.Variable([0.0]), keras.Variable([0.0])
        wide = keras.Variable([0.0, 0.0])
        optimizer.build([one, other, wide])

        for gradients, variables in [
            ([[1.0], [1.0, 1.0]], [one, wide]),
            ([[0.0]], [other]),
            ([[RANK + 2.0], [3.0, 3.0]], [other, wide]),
            ([[1.0]], [other]),
            ([[0.0], [0.0, 0.0]], [other, wide]),
        ]:
            # A variable that tf.function is given, also as a default, would come as its value.
            apply = applying(optimizer, variables)
            apply = tf.function(apply) if graph else apply
            apply([tf.constant(gradient) for gradient in gradients])
        assert np.allclose(one.numpy(), 0.0) and np.allclose(wide.numpy(), -3.0)
        assert np.allclose(other.numpy(), -MEAN - 2.0), (graph, other.numpy())
        refused = ""
        try:
            optimizer.apply([tf.constant([1.0]), None], [other, wide])
        except ValueError as error:
            refused = str(error)
        assert "in some passes and none in others" in refused, refused


def applying(optimizer, variables):
    return lambda gradients: optimizer.apply(gradients, variables)


@check
def an_optimizer_of_the_scripts_own_is_built_once() -> None:
    """Its build() need not ask whether it was called before: Keras asks."""

    class Momentum(keras.optimizers.Optimizer):
        def build(self, variables):
            super().build(variables)
            self.momenta = [self.add_variable_from_reference(one, "momentum") for one in variables]

        def update_step(self, gradient, variable, learning_rate):
            momentum = self.momenta[self._get_variable_index(variable)]
            momentum.assign(0.5 * momentum + gradient)
            variable.assign_sub(learning_rate * momentum)

    for graph in (False, True):
        optimizer = hvd_keras.DistributedOptimizer(Momentum(1.0), backward_passes_per_step=2)
        weight = keras.Variable([0.0])
        apply = applying(optimizer, [weight])
        apply = tf.function(apply) if graph else apply
        for _ in range(6):
            apply([tf.constant([(RANK + 1.0) / 2])])
        assert np.allclose(weight.numpy(), -4.25 * MEAN), (graph, weight.numpy())
        assert len(optimizer.variables) == 3, (graph, optimizer.variables)


@check
def averages_of_weights_begin_at_the_first_update() -> None:
    """Passes before it have counted, too; Keras 3 would begin at 0 then."""

    def averaged(passes: int, graph: bool) -> float:
        optimizer = hvd_keras.DistributedOptimizer(
            keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5),
            backward_passes_per_step=passes,
        )
        weight = keras.Variable(1.0)

        def step(gradient):
            optimizer.apply([gradient], [weight])

        run = tf.function(step) if graph else step
        for number in range(3 * passes):
            run(tf.constant(float(number // passes + 1) / passes))
        optimizer.finalize_variable_values([weight])
        return float(weight.numpy())

    # Of 0.9, 0.7 and 0.4.
    assert np.isclose(averaged(1, False), 0.6)
    for passes in (2, 3):
        for graph in (False, True):
            assert np.isclose(averaged(passes, graph), 0.6), (passes, graph)


@check
def optimizers_of_keras_2_add_up_several_passes() -> None:
    if importlib.util.find_spec("tf_keras") is None:  # pip install -r requirements/legacy.txt
        return
    import tf_keras

    for kinds in (tf_keras.optimizers, tf_keras.optimizers.legacy):
        optimizer = hvd_keras.DistributedOptimizer(kinds.SGD(1.0), backward_passes_per_step=2)
        layer = tf_keras.layers.Dense(1, use_bias=False, input_shape=(1,))
        model = tf_keras.Sequential([layer])
        model.compile(optimizer, lambda target, got: (RANK + 1.0) * got)
        model.set_weights([np.zeros([1, 1])])
        # Two steps of two passes, and one that waits for another.
        model.fit(np.ones([5, 1]), np.ones([5, 1]), batch_size=1, verbose=0)
        assert np.isclose(model.get_weights()[0][0, 0], -4.0 * MEAN), kinds
        assert int(optimizer.iterations) == 5
        assert int(optimizer._agg_helper.counter) == 1  # as scripts of Horovod's ask for it


@check
def weights_that_are_a_ranks_own_may_differ_when_fit_ends() -> None:
    layers = [keras.layers.Dense(1), keras.layers.Dense(1)]
    model = keras.Sequential([keras.layers.Input([1]), *layers])
    shared, own = (layer.kernel for layer in layers)
    optimizer = horovod.keras.DistributedOptimizer(keras.optimizers.SGD(0.01))
    optimizer.register_local_var(own)
    model.compile(optimizer, "mse")
    start = horovod.keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[own])
    own.assign([[RANK + 1.0]])
    data = np.full([4, 1], RANK + 1.0)
    model.fit(data, data, batch_size=2, verbose=0, callbacks=[start])
    assert np.allclose(hvd.allgather(shared)[:, 0], shared), "what is shared has trained apart"
    assert np.ptp(hvd.allgather(own)) > 0.5 or SIZE == 1


@check
def two_networks_of_one_optimizer_add_up_each_its_own_passes() -> None:
    """Also where gradients of both are computed before those of one are applied."""
    with tf.Graph().as_default(), v1.Session() as session:
        generator, critic, idle = (v1.get_variable(name, initializer=0.0) for name in "gci")
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
        )
        computed = [
            optimizer.compute_gradients((RANK + 1.0) * one, var_list=[one, idle])
            for one in (generator, critic)
        ]
        given = [[pair for pair in pairs if pair[0] is not None] for pairs in computed]
        train = dict(
            zip("gc", map(optimizer.apply_gradients, (given[0], computed[1])), strict=True)
        )
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        done = dict.fromkeys("gc", 0)
        for which in "gcgccgcc":
            session.run(train[which])
            done[which] += 1
            expected = [-2 * MEAN * (passes // 2) for passes in done.values()]
            found = session.run([generator, critic])
            assert np.allclose(found, expected), (done, found, expected)
        # Both are due by now.
        both = optimizer.apply_gradients([*computed[0], *given[1]])
        session.run(both)
        assert np.allclose(session.run([generator, critic]), [-4 * MEAN, -6 * MEAN])
        session.run(train["c"])
        said = raised(tf.errors.InvalidArgumentError, lambda: session.run(both))
        assert "Apply each set by itself" in said, said
    if importlib.util.find_spec("tf_keras") is None:  # pip install -r requirements/legacy.txt
        return
    import tf_keras

    for kinds, name in (
        (tf_keras.optimizers, "compute_gradients"),
        (tf_keras.optimizers.legacy, "_compute_gradients"),
    ):
        optimizer = hvd_keras.DistributedOptimizer(kinds.SGD(1.0), backward_passes_per_step=2)
        weights = [tf.Variable(0.0), tf.Variable(0.0)]
        make_variables(optimizer, weights)

        def compute(weight, optimizer=optimizer, name=name):
            return getattr(optimizer, name)(lambda: weight * (RANK + 1.0), [weight])

        for done in range(1, 5):
            of_generator, of_critic = map(compute, weights)
            optimizer.apply_gradients(of_critic)
            of_critic = compute(weights[1])
            optimizer.apply_gradients(of_generator)
            optimizer.apply_gradients(of_critic)
            found, expected = [*map(float, weights)], [-2 * MEAN * (done // 2), -2 * MEAN * done]
            assert np.allclose(found, expected), (kinds, done, found, expected)


@check
def what_a_tape_has_combined_is_applied_at_each_pass_after_a_fit_too() -> None:
    """Which has left the sum of one pass; that waits for the next pass of a fit."""
    modules = [(keras, keras.optimizers.SGD)]
    if importlib.util.find_spec("tf_keras") is not None:  # pip install -r requirements/legacy.txt
        import tf_keras

        kinds = (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD)
        modules += [(tf_keras, kind) for kind in kinds]
    for (module, kind), clip, graph in itertools.product(modules, (False, True), (False, True)):
        optimizer = hvd_keras.DistributedOptimizer(kind(1.0), backward_passes_per_step=2)
        dense = module.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = module.Sequential([module.layers.Input((1,)), dense])
        model.compile(optimizer, lambda target, got: (RANK + 1.0) * got)

        def fit(batches: int, model=model) -> None:
            model.fit(np.ones([batches, 1]), np.ones([batches, 1]), batch_size=1, verbose=0)

        def step(model=model, optimizer=optimizer, clip=clip) -> None:
            weights = model.trainable_variables
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = (RANK + 1.0) * tf.reduce_sum(model(tf.ones([1, 1])))
            gradients = tape.gradient(loss, weights)
            if clip:
                gradients, _ = tf.clip_by_global_norm(gradients, 1e9)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))

        what = kind, clip, graph
        fit(5)
        run = tf.function(step) if graph else step
        for done in range(1, 4):
            run()
            weight = model.get_weights()[0][0, 0]
            assert np.isclose(weight, -(4 + done) * MEAN), (what, done, weight)
        fit(1)
        weight = model.get_weights()[0][0, 0]
        assert np.isclose(weight, -9 * MEAN), (what, weight)
        assert int(optimizer.iterations) == 9, (what, optimizer.iterations)
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("weight", initializer=0.0)
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
        )
        loss = (RANK + 1.0) * weight
        added_up = optimizer.minimize(loss)
        combined = [(hvd.allreduce(one), weight) for one in tf.gradients(loss, [weight])]
        at_once = optimizer.apply_gradients(combined)
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for train, moved in ((added_up, 0), (at_once, 1), (at_once, 2), (added_up, 4)):
            session.run(train)
            found = session.run(weight)
            assert np.isclose(found, -moved * MEAN), (moved, found)


@check
def slices_are_clipped_as_they_were_gathered() -> None:
    table = tf.Variable(tf.ones([4, 1]))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [0]))  # the same row on all ranks
    gradient = hvd.DistributedGradientTape(tape).gradient(loss, table)
    (clipped,), norm = tf.clip_by_global_norm([gradient], 0.5)
    assert gradient.values.shape == [SIZE, 1]
    np.testing.assert_allclose(norm, SIZE**-0.5)
    keras.optimizers.SGD(1.0).apply_gradients([(clipped, table)])
    np.testing.assert_allclose(table[0], 1 - 0.5 * SIZE**0.5, rtol=1e-6)


@check
def clipped_gradients_of_keras_2_are_combined_once() -> None:
    """Those of compute_gradients, which a script changes before it applies them."""
    if importlib.util.find_spec("tf_keras") is None:  # pip install -r requirements/legacy.txt
        return
    import tf_keras

    total = SIZE * MEAN
    for kinds, compute in (
        (tf_keras.optimizers, "compute_gradients"),
        (tf_keras.optimizers.legacy, "_compute_gradients"),
    ):
        for op, passes, of_update in (
            (hvd.Sum, 1, total),
            (hvd.Average, 2, 2 * MEAN),
            (hvd.Sum, 3, 3 * total),
        ):
            for wrap in (lambda function: function, tf.function):
                optimizer = hvd_keras.DistributedOptimizer(
                    kinds.SGD(1.0), op=op, backward_passes_per_step=passes
                )
                weight = tf.Variable(0.0)

                def step(optimizer=optimizer, weight=weight, compute=compute) -> None:
                    with tf.GradientTape() as tape:
                        loss = weight * (RANK + 1.0)
                    ((gradient, _),) = getattr(optimizer, compute)(loss, [weight], tape=tape)
                    clipped, _ = tf.clip_by_global_norm([gradient], 1e3)
                    optimizer.apply_gradients(zip(clipped, [weight], strict=True))

                run = wrap(step)
                for done in range(1, 2 * passes + 1):
                    run()
                    expected = -of_update * (done // passes)
                    assert np.isclose(weight, expected), (kinds, op, passes, done, weight)


@check
def one_optimizer_is_distributed_for_each_of_several_models() -> None:
    modules = [keras]
    if importlib.util.find_spec("tf_keras") is not None:  # pip install -r requirements/legacy.txt
        modules.append(importlib.import_module("tf_keras"))
    x, y = np.full((8, 3), RANK + 1.0, np.float32), np.ones((8, 1), np.float32)
    for module in modules:
        base = module.optimizers.Adam(0.1)
        scaled = module.mixed_precision.LossScaleOptimizer(module.optimizers.SGD(0.5))
        for given in (base, scaled):
            ended = []
            for _ in range(2):  # the first one trains with the object that was given
                dense = module.layers.Dense(1, kernel_initializer="ones")
                model = module.Sequential([module.layers.Input((3,)), dense])
                model.compile(hvd_keras.DistributedOptimizer(given), "mse")
                model.fit(x, y, epochs=2, verbose=0)
                ended.append(model.get_weights())
                rate = model.optimizer.learning_rate
                rate.assign(0.0)  # as a callback may
            assert all(map(np.array_equal, *ended)), (module, ended)
            assert not np.allclose(ended[0][0], 1.0) and alike(ended[1])


@check
def what_a_tape_has_combined_is_applied_as_it_is() -> None:
    """Clipped or not, and at each pass, as by Horovod's apply_gradients."""
    distributed = functools.partial(hvd_keras.DistributedOptimizer, op=hvd.Sum)
    kinds = [keras.optimizers.SGD]
    made = {"scaled": lambda: keras.optimizers.LossScaleOptimizer(distributed(kinds[0](1.0)))}
    if importlib.util.find_spec("tf_keras") is not None:  # pip install -r requirements/legacy.txt
        import tf_keras

        kinds += [tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD]
    for kind in kinds:
        for passes in (1, 2):
            made[f"{kind.__module__}, {passes} passes"] = lambda kind=kind, passes=passes: (
                distributed(kind(1.0), backward_passes_per_step=passes)
            )
    changes = (
        lambda gradients: gradients,
        lambda gradients: tf.clip_by_global_norm(gradients, 1e9)[0],
        lambda gradients: [tf.Variable(one) for one in gradients],
        lambda gradients: [one.numpy() for one in gradients],
    )
    for name, make in made.items():
        for number, change in enumerate(changes):
            for graphs in ("none", "one", "of the tape") if number < 2 else ("none",):
                optimizer, weight = make(), tf.Variable(0.0)
                make_variables(optimizer, [weight])

                def compute(optimizer=optimizer, weight=weight, change=change) -> list:
                    with tf.GradientTape() as tape:
                        loss = weight * (RANK + 1.0)
                        if hasattr(optimizer, "scale_loss"):
                            loss = optimizer.scale_loss(loss)
                    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
                    gradients = tape.gradient(loss, [weight])
                    return change(gradients)

                def step(compute, optimizer=optimizer, weight=weight) -> None:
                    optimizer.apply_gradients(zip(compute(), [weight], strict=True))

                run = tf.function(step) if graphs == "one" else step
                computed = tf.function(compute) if graphs == "of the tape" else compute
                for done in range(1, 4):
                    run(computed)
                    expected = -done * SIZE * MEAN
                    assert np.isclose(weight, expected), (name, number, graphs, done, weight)


@check
def gradients_that_a_script_has_reduced_are_applied_as_they_are() -> None:
    def one_by_one(gradients: list) -> list:
        return [hvd.allreduce(gradient, op=hvd.Sum) for gradient in gradients]

    kinds = [keras.optimizers.SGD]
    if importlib.util.find_spec("tf_keras") is not None:
        import tf_keras

        kinds += [tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD]
    for kind in kinds:
        for reduce in (one_by_one, functools.partial(hvd.grouped_allreduce, op=hvd.Sum)):
            for graph in (False, True):
                optimizer = hvd_keras.DistributedOptimizer(kind(1.0), op=hvd.Sum)
                weight, rows = tf.Variable(0.0), tf.Variable(tf.zeros([2, 1]))
                make_variables(optimizer, [weight, rows])

                def step(optimizer=optimizer, weight=weight, rows=rows, reduce=reduce) -> None:
                    with tf.GradientTape() as tape:
                        row = tf.reduce_sum(tf.gather(rows, [1]))
                        loss = (weight + row) * (RANK + 1.0)
                    gradients = reduce(tape.gradient(loss, [weight, rows]))
                    optimizer.apply_gradients(zip(gradients, [weight, rows], strict=True))

                run = tf.function(step) if graph else step
                for done in range(1, 3):
                    run()
                    expected = -done * SIZE * MEAN
                    assert np.isclose(weight, expected), (kind, reduce, graph, done, weight)
                    assert np.allclose(rows, [[0.0], [expected]]), (kind, reduce, graph, rows)


@check
def gradients_reduced_over_a_set_are_combined_over_all_ranks() -> None:
    """As on each host first, and then by the optimizer; its own set and all ranks are enough."""
    sets = [hvd.add_process_set([rank]) for rank in range(SIZE)]
    mine = sets[RANK]

    def by_allreduce(tape, loss, weights, process_set):
        return [hvd.allreduce(one, process_set=process_set) for one in tape.gradient(loss, weights)]

    def by_grouped_allreduce(tape, loss, weights, process_set):
        return hvd.grouped_allreduce(tape.gradient(loss, weights), process_set=process_set)

    def by_tape(tape, loss, weights, process_set):
        tape = hvd.DistributedGradientTape(tape, process_set=process_set)
        return tape.gradient(loss, weights)

    def by_tape_clipped(*args):
        return tf.clip_by_global_norm(by_tape(*args), 1e9)[0]

    def by_rank_0_alone(tape, loss, weights, process_set):
        return (by_allreduce if RANK == 0 else by_nobody)(tape, loss, weights, process_set)

    def by_nobody(tape, loss, weights, process_set):
        return tape.gradient(loss, weights)

    kinds = [keras.optimizers.SGD]
    if importlib.util.find_spec("tf_keras") is not None:  # pip install -r requirements/legacy.txt
        import tf_keras

        kinds += [tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD]
    everyone, total = hvd.global_process_set, SIZE * MEAN
    for kind in kinds:
        for first, of_optimizer, expected, ways in (
            (mine, everyone, total, (by_rank_0_alone,)),
            (mine, everyone, total, (by_allreduce, by_grouped_allreduce, by_tape, by_tape_clipped)),
            (mine, mine, RANK + 1.0, (by_allreduce, by_tape, by_tape_clipped)),
            (everyone, mine, MEAN, (by_allreduce, by_tape, by_tape_clipped)),
        ):
            for by in ways:
                optimizer = hvd_keras.DistributedOptimizer(
                    kind(1.0), op=hvd.Sum, process_set=of_optimizer
                )
                weight = tf.Variable(0.0)
                with tf.GradientTape() as tape:
                    loss = weight * (RANK + 1.0)
                gradients = by(tape, loss, [weight], first)
                optimizer.apply_gradients(zip(gradients, [weight], strict=True))
                assert np.isclose(weight, -expected), (kind, by, weight)
    for one in sets:
        assert hvd.remove_process_set(one)


@check
def ranks_outside_of_the_set_of_an_adasum_optimizer_apply_what_they_have() -> None:
    first = hvd.add_process_set([0])
    for passes in (1, 2):
        optimizer = functools.partial(
            hvd.DistributedOptimizer,
            op=hvd.Adasum,
            backward_passes_per_step=passes,
            process_set=first,
        )
        weight, eager = tf.Variable(0.0), optimizer(v1.train.GradientDescentOptimizer(1.0))
        for done in range(1, 5):
            eager.apply_gradients([(tf.constant(RANK + 1.0), weight)])
            assert np.isclose(weight, -done * (RANK + 1.0)), (passes, done, weight)
        with tf.Graph().as_default(), v1.Session() as session:
            weight = v1.get_variable("weight", initializer=0.0)
            train = optimizer(v1.train.GradientDescentOptimizer(1.0)).minimize(
                (RANK + 1.0) * weight
            )
            session.run(v1.global_variables_initializer())
            for done in range(1, 5):
                session.run(train)
                found = session.run(weight)
                assert np.isclose(found, -done * (RANK + 1.0)), (passes, done, found)
    assert hvd.remove_process_set(first)
    gone = hvd.DistributedOptimizer(
        v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum, process_set=first
    )
    raised(ValueError, lambda: gone.apply_gradients([(tf.constant(1.0), tf.Variable(0.0))]))


@check
def what_another_tape_computes_after_a_distributed_one_is_combined() -> None:
    model = model_of(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), op=hvd.Sum))
    hvd.broadcast_variables(model.variables, 0)
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(rows()[0]))
    hvd.DistributedGradientTape(tape).gradient(loss, variables)
    model.fit(*rows(), batch_size=8, verbose=0)
    assert alike(model.get_weights())


@check
def gradients_of_traced_functions_are_not_taken_for_those_of_another_tape() -> None:
    """Of what a function computes that was traced before, the tape that ran last tells nothing."""

    def clipped(weight: tf.Variable, combining: bool, op: int, local: bool) -> list:
        tape = tf.GradientTape()
        if combining:
            tape = hvd.DistributedGradientTape(tape, op=op)
            if local:
                tape.register_local_source(weight)
        with tape:
            loss = weight * (RANK + 1.0)
        return tf.clip_by_global_norm(tape.gradient(loss, [weight]), 1e9)[0]

    def step(optimizer, weight: tf.Variable, compute: Callable[[], list]) -> None:
        optimizer.apply_gradients(zip(compute(), [weight], strict=True))

    kinds = [keras.optimizers.SGD]
    if importlib.util.find_spec("tf_keras") is not None:  # pip install -r requirements/legacy.txt
        kinds.append(importlib.import_module("tf_keras").optimizers.SGD)
    for kind, combining, (op, passes, local) in itertools.product(
        kinds,
        (False, True),
        (
            (hvd.Average, 1, False),
            (hvd.Sum, 1, False),
            (hvd.Average, 2, False),
            (hvd.Average, 1, True),
        ),
    ):
        what = kind, combining, op, passes, local
        distributed = functools.partial(hvd_keras.DistributedOptimizer, op=op)
        optimizer, weight = (
            distributed(kind(1.0), backward_passes_per_step=passes),
            tf.Variable(0.0),
        )
        make_variables(optimizer, [weight])
        compute = functools.partial(clipped, weight, combining, op, local)
        computed = tf.function(compute)
        step(optimizer, weight, computed)
        first = weight.numpy()
        clipped(weight, not combining, op, local)  # as to show its norm
        if (op, passes, local) == (hvd.Average, 1, False):
            step(optimizer, weight, computed)
            assert np.isclose(weight, -2 * MEAN), (what, weight)
        else:
            said = raised(ValueError, functools.partial(step, optimizer, weight, computed))
            assert "in one tf.function" in said and weight.numpy() == first, (what, said, weight)
        # Where it is applied in the function that computes it, it is known.
        weight.assign(0.0)
        optimizer = distributed(kind(1.0))
        make_variables(optimizer, [weight])
        tf.function(functools.partial(step, optimizer, weight, compute))()
        of_all = MEAN * SIZE if op == hvd.Sum else MEAN
        expected = -(RANK + 1.0) / SIZE if combining and local else -of_all
        assert np.isclose(weight, expected), (what, weight)


@check
def loss_scaling_of_keras_2_reduces_once() -> None:
    if importlib.util.find_spec("tf_keras") is None:  # pip install -r requirements/legacy.txt
        return
    import tf_keras

    def model_with(optimizer: object) -> tf_keras.Model:
        layer = tf_keras.layers.Dense(1, use_bias=False, input_shape=(1,))
        model = tf_keras.Sequential([layer])
        model.compile(optimizer, lambda target, got: (RANK + 1.0) / 8 * got)
        model.set_weights([np.zeros([1, 1])])
        return model

    scaled, one = tf_keras.mixed_precision.LossScaleOptimizer, np.ones([1, 1])
    total = SIZE * MEAN / 8
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for kinds in (tf_keras.optimizers, tf_keras.optimizers.legacy):
            optimizer = hvd_keras.DistributedOptimizer(kinds.SGD(1.0), op=hvd.Sum)
            model = model_with(optimizer)  # which scales around it
            assert isinstance(model.optimizer, scaled)
            model.fit(one, one, verbose=0)
            assert np.isclose(model.get_weights()[0], -total), (kinds, model.get_weights())
            (weight,) = model.trainable_variables

            def loss(model=model) -> tf.Tensor:
                return (RANK + 1.0) / 8 * tf.cast(model(one)[0, 0], tf.float32)

            model.optimizer.minimize(loss, [weight])
            assert np.isclose(weight, -2 * total), (kinds, weight)
            # By hand: what a tape has reduced, and what nobody has.
            for tape in (
                hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum),
                tf.GradientTape(),
            ):
                before = weight.numpy()
                with tape:
                    large = model.optimizer.get_scaled_loss(loss())
                gradients = tape.gradient(large, [weight])
                gradients = model.optimizer.get_unscaled_gradients(gradients)
                model.optimizer.apply_gradients(zip(gradients, [weight], strict=True))
                assert np.isclose(weight, before - total), (kinds, tape, weight)
            # What overflows on one rank is skipped on all.
            before, iterations = weight.numpy(), int(model.optimizer.iterations)
            infinite = tf.constant([[np.inf if RANK else 1.0]])
            model.optimizer.apply_gradients([(infinite, weight)])
            assert np.array_equal(weight, before) and alike([model.optimizer.loss_scale])
            assert int(model.optimizer.iterations) == iterations + 1
            around = hvd_keras.DistributedOptimizer(
                scaled(kinds.SGD(1.0)), backward_passes_per_step=2
            )
            refused = model_with(around)
            said = raised(ValueError, lambda refused=refused: refused.fit(one, one, verbose=0))
            assert "backward_passes_per_step" in said and "mixed_bfloat16" in said
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")


@check
def variables_stay_local_within_loss_scaling_and_clipping() -> None:
    scaled = [(keras, keras.optimizers.LossScaleOptimizer, keras.optimizers.SGD)]
    if importlib.util.find_spec("tf_keras") is not None:  # pip install -r requirements/legacy.txt
        import tf_keras

        kinds = (tf_keras.optimizers.SGD, tf_keras.optimizers.legacy.SGD)
        scaled += [(tf_keras, tf_keras.mixed_precision.LossScaleOptimizer, one) for one in kinds]
    for kind, around, within in scaled:
        layer = kind.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        layer.build([1, 1])
        optimizer = hvd_keras.PartialDistributedOptimizer(
            around(within(1.0), initial_scale=1.0), local_layers=layer
        )
        variables = [tf.Variable([[0.0]]), layer.kernel]
        gradients = [tf.constant([[RANK + 1.0]])] * 2
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        shared, local = (float(one.numpy()[0, 0]) for one in variables)
        assert np.isclose(shared, -MEAN), (within, shared)
        assert np.isclose(local, -(RANK + 1.0) / SIZE), (within, local)
        # What overflows in a rank's local gradient, of which another may have none, is skipped on
        # all ranks: one with a scale of its own would add what is scaled otherwise.
        for there in (True, RANK == SIZE - 1):
            layer = kind.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
            layer.build([1, 1])
            scaling = around(within(1.0), initial_scale=4.0)
            optimizer = hvd_keras.PartialDistributedOptimizer(scaling, local_layers=layer)
            variables = [tf.Variable([[0.0]]), layer.kernel]
            infinite = tf.constant([[np.inf if RANK == SIZE - 1 else 1.0]])
            gradients = [tf.constant([[1.0]]), infinite if there else None]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            assert [float(one.numpy()[0, 0]) for one in variables] == [0.0, 0.0], (within, there)
            scale = scaling.dynamic_scale if kind is keras else scaling.loss_scale
            assert float(scale) == 2.0, (within, there, scale)
        clipping = within(1.0, global_clipnorm=1.0)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            hvd_keras.PartialDistributedOptimizer(clipping, local_layers=[layer, layer])
        assert said.getvalue().count("Take clipnorm") == (RANK == 0), (within, said.getvalue())


@check
def optimizers_and_hooks_of_tensorflow_1() -> None:
    with tf.Graph().as_default():
        v1.set_random_seed(RANK)
        step = v1.train.get_or_create_global_step()
        weights = v1.get_variable("weights", [4, 1])
        inputs, outputs = (tf.constant(one) for one in rows())
        loss = tf.reduce_mean((inputs @ weights - outputs) ** 2)
        optimizer = hvd.DistributedOptimizer(
            v1.train.AdamOptimizer(0.1), backward_passes_per_step=2
        )
        train = optimizer.minimize(loss, step)
        hook = hvd.BroadcastGlobalVariablesHook(0)
        with v1.train.MonitoredTrainingSession(hooks=[hook]) as session:
            assert alike_in_session(session, weights)
            before = session.run(loss)
            for _ in range(41):
                session.run(train)
            assert session.run(loss) < 0.1 * before
            assert alike_in_session(session, weights) and session.run(step) == 41
        saved = [variable.op.name for variable in v1.global_variables()]
        assert not [name for name in saved if "aggregation" in name]


@check
def an_optimizer_of_the_scripts_own_takes_what_it_takes_in_tensorflow_1_too() -> None:
    class Own(v1.train.Optimizer):
        def __init__(self) -> None:
            super().__init__(False, "Own")

        def apply_gradients(self, pairs, global_step=None, name=None, rate=1.0):
            return tf.group(*[variable.assign_sub(rate * one) for one, variable in pairs])

    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("weight", [], initializer=v1.zeros_initializer())
        optimizer = hvd.DistributedOptimizer(Own())
        pairs = optimizer.compute_gradients(weight * (RANK + 1.0), [weight])
        train = optimizer.apply_gradients(pairs, rate=2.0)
        session.run(v1.global_variables_initializer())
        session.run(train)
        assert np.isclose(session.run(weight), -2.0 * MEAN)


def alike_in_session(session, variable) -> bool:
    mine = session.run(variable)
    with tf.init_scope(), tf.Graph().as_default(), v1.Session() as other:
        everyone = other.run(hvd.allgather(tf.constant(mine)[None]))
    return all(np.array_equal(one, mine) for one in everyone)


@check
def state_is_synchronised_committed_and_restored() -> None:
    model = model_of(hvd_keras.DistributedOptimizer(keras.optimizers.Adam()))
    state = hvd_keras.elastic.KerasState(model, batch=RANK, epoch=3)
    trained = []

    @hvd_keras.elastic.run
    def train(state, more):
        trained.append((state.batch, more))
        assert alike(model.get_weights())

    train(state, "x")
    assert trained == [(0, "x")]
    start = model.get_weights()
    model.train_on_batch(*rows())
    state.batch = 7
    state.restore()
    assert state.batch == 0
    assert all(np.array_equal(*pair) for pair in zip(start, model.get_weights(), strict=True))
    model.train_on_batch(*rows())
    state.batch = 8
    state.commit()
    committed = model.get_weights()
    model.train_on_batch(*rows())
    state.restore()
    assert state.batch == 8
    assert all(np.array_equal(*pair) for pair in zip(committed, model.get_weights(), strict=True))


@check
def a_state_of_the_scripts_own_may_do_more_when_it_saves() -> None:
    class Counted(hvd.elastic.TensorFlowState):
        def __init__(self, variables, **attributes) -> None:
            super().__init__(variables, **attributes)
            self.saves = 0

        def save(self) -> None:
            super().save()
            self.saves += 1

    weight = tf.Variable(1.0)
    state = Counted([weight], batch=0)
    weight.assign(2.0)
    state.restore()
    assert (weight.numpy(), state.saves) == (1.0, 0)
    state.commit()
    assert state.saves == 1
    for front_end in (horovod.keras, hvd_keras):
        assert front_end.elastic.TensorFlowKerasState is hvd.elastic.TensorFlowKerasState


@check
def states_are_committed_where_ranks_have_joined() -> None:
    preemption._forget()  # of other checks: no rank listens
    records = os.environ.pop("DDL_RECORD_DIR", "")  # this job itself does not make room
    os.environ["CHECKPOINT_DIR"] = hvd.broadcast_object(tempfile.mkdtemp())
    weight = tf.Variable(0.0)

    def start(train: Callable[..., None]) -> None:
        """As in a process of its own."""
        elastic._Script.states = elastic._Script.checks = 0
        elastic._Script.commits.clear()
        elastic._Script.known.clear()
        elastic._Script.times.clear()
        weight.assign(0.0)
        state = hvd.elastic.TensorFlowState([weight], batch=0)

        @hvd.elastic.run
        def run(state) -> None:  # one function in all of them
            train(state)

        run(state)

    def steps(state, mine: int) -> None:
        for _ in range(mine):
            weight.assign_add(hvd.allreduce(1.0))
            state.batch += 1
            state.commit()

    def train_alike(state) -> None:
        weight.assign(hvd.broadcast(weight, hvd.join()))

    def train_first(state) -> None:
        # Only rank 0 commits before the first join.
        steps(state, 2 if RANK == 0 else 0)
        train_alike(state)
        assert weight == 2.0
        state.batch = 2
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGURG)
        steps(state, 1)

    def train_again(state) -> None:
        assert (state.batch, weight.numpy()) == (3, 3.0)
        # Rank 0, which writes what is committed else, has joined.
        if RANK == SIZE - 1:
            steps(state, 1)
            os.kill(os.getpid(), signal.SIGURG)
            steps(state, 1)
        train_alike(state)

    def train_last(state) -> None:
        assert (state.batch, weight.numpy()) == (5, 5.0)

    for train in (train_first, train_again):
        ended: list[object] = []
        try:
            start(train)
        except SystemExit as end:
            ended.append(end.code)
        assert ended == [0], ended
        preemption._forget()
    start(train_last)
    assert hvd.allreduce(1.0, op=hvd.Sum) == SIZE
    os.environ["DDL_RECORD_DIR"] = records


@check
def keras_front_ends_return_tensors() -> None:
    for front_end in (horovod.keras, hvd_keras):
        results = [
            front_end.allreduce(RANK + 1.0),
            front_end.allgather([RANK]),
            front_end.broadcast([RANK], 1),
            front_end.reducescatter(tf.range(SIZE) + RANK, op=hvd.Sum),
        ]
        assert all(isinstance(one, tf.Tensor) for one in results), results
        assert [one.numpy().tolist() for one in results] == [
            MEAN,
            list(range(SIZE)),
            [1],
            [SIZE * RANK + sum(range(SIZE))],
        ]


@check
def metrics_of_several_values_are_averaged() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    metric = keras.metrics.F1Score(average=None)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, "categorical_crossentropy", metrics=[metric])
    mine = []
    history = model.fit(
        np.random.RandomState(RANK).rand(16, 4),
        np.eye(3)[np.random.RandomState(RANK).randint(3, size=16)],
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: mine.append(dict(logs))
            ),
            hvd_keras.callbacks.MetricAverageCallback(),
        ],
    ).history
    everyone = hvd.allgather_object(mine[0])
    for name in ("loss", "f1_score"):
        assert np.allclose(history[name][0], np.mean([one[name] for one in everyone], axis=0))
    assert type(history["loss"][0]) is float and np.shape(history["f1_score"][0]) == (3,)


@check
def models_in_threads_have_their_own_metrics_and_moments() -> None:
    def averages(factor: float) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        logs = {"loss": factor * (RANK + 1.0)}
        hvd_keras.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
        layer = hvd.SyncBatchNormalization(momentum=0.0)
        layer(tf.fill([2, 1], factor * (RANK + 1.0)), training=True)
        optimizer = v1.train.GradientDescentOptimizer(1.0)
        optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
        weight = tf.Variable(0.0)
        optimizer.apply_gradients([(tf.constant(factor), weight)])
        return logs, layer.moving_mean.numpy(), weight.numpy()

    factors = {"generator": 1.0, "critic": -10.0}
    trained = [functools.partial(averages, factor) for factor in factors.values()]
    found = in_threads(*trained, names=list(factors), apart_s=0.1)
    for factor, (logs, mean, weight) in zip(factors.values(), found, strict=True):
        assert np.isclose(logs["loss"], factor * MEAN), (factor, found)
        assert np.isclose(mean, factor * MEAN), (factor, found)
        assert np.isclose(weight, -factor), (factor, found)


@check
def a_forked_process_knows_its_rank_and_takes_no_part() -> None:
    tensor = tf.ones([1])
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            here = (hvd.is_initialized(), hvd_keras.rank(), hvd.size(), hvd.local_rank())
            said = f"{here} {raised(RuntimeError, lambda: hvd.allreduce(tensor))}"
        except BaseException as error:
            said = repr(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        said = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert said.startswith(f"(True, {RANK}, {SIZE}, {RANK}) "), said
    assert f"this process is a child of rank {RANK}, and no rank itself" in said, said


@check
def whoever_started_the_job_knows_that_they_averaged() -> None:
    facts = averaging._facts
    assert facts["averaged"] and facts["explicit"] and not facts["alone"], facts


if __name__ == "__main__":
    for function in CHECKS:
        try:
            function()
        except Exception:
            say(f"{function.__name__}: failed")
            traceback.print_exc()
            sys.exit(1)
        say(f"{function.__name__}: ok")
