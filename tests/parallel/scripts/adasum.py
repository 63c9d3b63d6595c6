"""Adasum of ranks of one host, or of several that are in fact one: all compared with NumPy's.

Argument: how many ranks a host has, the last one perhaps fewer.
"""

from __future__ import annotations

import os
import sys

rank_here = int(os.environ["OMPI_COMM_WORLD_RANK"])
os.environ["DDL_HOSTID"] = f"host-{rank_here // int(sys.argv[1])}"

import ddl_ops.collectives as collectives  # noqa: E402
import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from speech import RANK, SIZE, say  # noqa: E402

v1 = tf.compat.v1
hvd.init()


def pair(a, b):
    ab, aa, bb = (np.vdot(x, y) for x, y in ((a, b), (a, a), (b, b)))
    return (1 - (ab / aa / 2 if aa else 0)) * a + (1 - (ab / bb / 2 if bb else 0)) * b


def adasum(vectors):
    vectors = [np.asarray(vector, np.float64) for vector in vectors]
    while len(vectors) > 1:
        vectors = [pair(*two) for two in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def vector(rank, seed, shape=(3, 50)):
    return np.random.default_rng([rank, seed]).normal(0.3, 1, shape)


def of_all(seed, ranks=range(SIZE), dtype=tf.float64):
    # As the ranks have them, rounded.
    given = [tf.cast(vector(rank, seed), dtype) for rank in ranks]
    return adasum([tf.cast(one, tf.float64).numpy() for one in given])


def check_close(got, expected, tolerance=1e-5):
    got = np.asarray(got).astype(np.float64)
    assert np.allclose(got, expected, tolerance, tolerance), (got, expected)


def raised(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
group = pairs[RANK // 2]
for dtype, tolerance in (
    (tf.float16, 1e-3),
    (tf.bfloat16, 8e-3),
    (tf.float32, 1e-6),
    (tf.float64, 1e-13),
):
    mine = tf.cast(vector(RANK, 1), dtype)
    reduced = hvd.allreduce(mine, op=hvd.Adasum)
    assert reduced.dtype == dtype
    check_close(reduced, of_all(1, dtype=dtype), tolerance)
    everyone = hvd.allgather_object(reduced.numpy().tobytes())
    assert len(set(everyone)) == 1, "other bits"
    reduced = hvd.allreduce(mine, op=hvd.Adasum, process_set=group)
    check_close(reduced, of_all(1, group.ranks, dtype), tolerance)

# Each for itself; what is the same everywhere is averaged, what is orthogonal added.
same, own = np.arange(5.0, dtype=np.float32), np.eye(SIZE, dtype=np.float32)[RANK]
zero = np.ones(4, np.float32) * (RANK == 0)
given = [vector(RANK, 2), same, own, zero, vector(RANK, 3)]
results = hvd.grouped_allreduce(given, op=hvd.Adasum)
for result, expected in zip(
    results, [of_all(2), same, np.ones(SIZE), np.ones(4), of_all(3)], strict=True
):
    check_close(result, expected)


@tf.function
def in_a_function(x):
    return hvd.allreduce(2 * x, op=hvd.Adasum, prescale_factor=0.5, postscale_factor=3.0)


check_close(in_a_function(tf.constant(vector(RANK, 4))), 3 * of_all(4))

variable = tf.Variable(tf.zeros([3, 50]))
weights = tf.constant(vector(RANK, 5), tf.float32)
with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Adasum) as tape:
    loss = tf.reduce_sum(variable * weights)
check_close(tape.gradient(loss, variable), of_all(5))

by_keras = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Adasum)
kept = keras.Variable(np.zeros([3, 50], np.float32))
by_keras.apply([weights], [kept])
check_close(kept.value, -of_all(5))

# By what the updates have made of the variables: with momentum that is not their gradients.
for passes in (1, 2):
    of_ranks = []
    for rank in range(SIZE):
        moved, moment = np.zeros([3, 50]), np.zeros([3, 50])
        for step in range(passes):
            moment = 0.5 * moment + vector(rank, 6 + step)
            moved -= moment
        of_ranks.append(moved)
    first = adasum(of_ranks)

    def updated(start, passes=passes):
        """The variable, and an update of it by what is fed."""
        optimizer = hvd.DistributedOptimizer(
            v1.train.MomentumOptimizer(1.0, 0.5), op=hvd.Adasum, backward_passes_per_step=passes
        )
        return optimizer, v1.get_variable(f"start{passes}", initializer=start)

    with tf.Graph().as_default(), v1.Session() as session:
        optimizer, started = updated(tf.ones([3, 50]))
        fed = v1.placeholder(tf.float32, [3, 50])
        train = optimizer.minimize(tf.reduce_sum(started * fed), var_list=[started])
        session.run(v1.global_variables_initializer())
        for step in range(passes):
            session.run(train, {fed: vector(RANK, 6 + step)})
        check_close(session.run(started), 1 + first)

    optimizer, started = updated(tf.ones([3, 50]))
    for step in range(passes):
        optimizer.apply_gradients([(tf.constant(vector(RANK, 6 + step), tf.float32), started)])
    check_close(started, 1 + first)

assert "average" in raised(
    ValueError,
    lambda: hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), op=hvd.Adasum, average_aggregated_gradients=True
    ),
)
with tf.GradientTape() as tape:
    reduced = hvd.allreduce(variable, op=hvd.Adasum)
assert "tf.stop_gradient" in raised(LookupError, lambda: tape.gradient(reduced, variable))
said = raised(tf.errors.OpError, lambda: hvd.allreduce(tf.ones(3, tf.int32), op=hvd.Adasum))
assert "floating-point" in said, said
assert "as in Horovod" in raised(
    NotImplementedError, lambda: hvd.reducescatter(np.ones(4), op=hvd.Adasum)
)

three = [0, 2, 3]
reduced = hvd.allreduce(vector(RANK, 9), op=hvd.Adasum, process_set=group)
check_close(reduced, of_all(9, group.ranks))
odd = hvd.add_process_set(three)
if RANK in three:
    said = raised(NotImplementedError, lambda: hvd.allreduce(same, op=hvd.Adasum, process_set=odd))
    assert "power of two, and is 3" in said, said
    said = raised(
        tf.errors.InvalidArgumentError,
        lambda: collectives.allreduce(
            tf.constant(same), op="adasum", process_set=odd.process_set_id
        ),
    )
    assert "power of two, and is 3" in said, said
check_close(hvd.allreduce(vector(RANK, 1), op=hvd.Adasum), of_all(1))
say("all as NumPy has it")
