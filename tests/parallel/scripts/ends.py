"""Ways in which a job can end, one for each name."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import ddl
import tensorflow as tf
from ddl_ops import collectives
from speech import RANK, SLOWNESS, say

HOW = sys.argv[1]


def total() -> list[float]:
    return ddl.allreduce_n([tf.constant([1.0, float(RANK)])], average=False)[0].numpy().tolist()


def fails(kind: type[Exception]) -> None:
    start = time.monotonic()
    try:
        total()
    except kind as error:
        say(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error}")


def fails_in_a_tf1_graph(kind: type[Exception], sizes: dict[str, int]) -> None:
    """Runs a free-standing allreduce for each name at once, of so many elements; says the error."""
    start = time.monotonic()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        sums = [collectives.allreduce(tf.ones([size]), name=name) for name, size in sizes.items()]
        try:
            session.run(sums)
        except kind as error:
            say(f"{type(error).__name__} after {time.monotonic() - start:.1f} s: {error.message}")


def refused(what: object, *arguments: object) -> None:
    try:
        what(*arguments)
    except RuntimeError as error:
        say(f"RuntimeError: {error}")


@tf.custom_gradient
def summed_behind(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    return value + 0.0, lambda up: ddl.allreduce(up, average=False)


def say_gradient(function: Callable[[tf.Tensor], tf.Tensor], weight: float) -> None:
    value = tf.constant(1.0)
    try:
        with tf.GradientTape() as tape:
            tape.watch(value)
            result = weight * function(value)
        say(f"gradient {float(tape.gradient(result, value))}")
    except tf.errors.FailedPreconditionError as error:
        say(f"FailedPreconditionError: {error.message}")


if HOW == "explicit":
    say(f"placement {ddl.rank()} {ddl.size()} {ddl.local_rank()} {ddl.num_hosts()}")
    refused(ddl.bcast, tf.ones([]))
    refused(ddl.allreduce_n, [tf.ones([])])
    refused(ddl.allreduce, tf.ones([]))
    refused(ddl.allgather, tf.ones([1]))
    try:
        collectives.rank_op()
    except tf.errors.FailedPreconditionError as error:
        say(f"FailedPreconditionError: {error.message}")
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    own = tf.Variable(5.0)
    optimizer.apply_gradients([(tf.constant(float(RANK)), own)])
    say(f"not reduced {own.numpy()}")
    ddl.init("-mode p")
    refused(ddl.init, "-mode p")
    say(f"total {total()}")
elif HOW == "alone":
    say(f"placement {ddl.rank()} {ddl.size()} {ddl.local_rank()} {ddl.num_hosts()}")
    refused(ddl.init, "-mode p")
    refused(ddl.bcast, tf.ones([]))
    refused(ddl.allreduce_n, [tf.ones([])])
    refused(ddl.allreduce, tf.ones([]))
    refused(ddl.allgather, tf.ones([1]))
    refused(ddl.grads_reduce, [(tf.ones([]), tf.Variable(0.0))])
    refused(ddl.barrier)
    refused(ddl.join)
    ddl.report(step=1)
    import ddl.keras
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    callbacks = [
        ddl.keras.BroadcastCallback(),
        ddl.keras.JoinCallback(),
        ddl.keras.MetricAverageCallback(),
        ddl.keras.ProgressCallback(),
    ]
    model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=1, verbose=0, callbacks=callbacks)
    say("trained alone")
else:
    say(f"total {total()}")

if HOW == "early end":
    if RANK == 0:
        say(f"ending at {time.time()}")
        sys.exit()
    fails(tf.errors.FailedPreconditionError)
    fails(tf.errors.FailedPreconditionError)
elif HOW == "missing member":
    if RANK == 1:
        time.sleep(2.4 * float(os.environ["DDL_STALL_TIMEOUT"]))
    fails(tf.errors.DeadlineExceededError)
    fails(tf.errors.DeadlineExceededError)
elif HOW == "free-standing mismatch":
    fails_in_a_tf1_graph(tf.errors.InvalidArgumentError, {"a": 2, "b": 2 + RANK, "c": 2})
    say(f"total {total()}")
elif HOW == "free-standing missing":
    fails_in_a_tf1_graph(tf.errors.DeadlineExceededError, {"b": 2} if RANK == 1 else {"a": 2})
    fails(tf.errors.DeadlineExceededError)
elif HOW == "gradients of two threads":
    summed = tf.function(lambda value: summed_behind(value))
    say_gradient(summed, 1.0)  # traced here, so both threads run it in this one's stream
    if RANK == 0:
        threads = [threading.Thread(target=say_gradient, args=(summed, w)) for w in (1.0, 100.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        time.sleep(2.0 * SLOWNESS)  # until rank 0 has asked for both
        say_gradient(summed, 1.0)
elif HOW == "free-standing left":
    if RANK == 1:
        # Its end waits until what was asked for is done, which never comes.
        with tf.Graph().as_default():
            other = collectives.allreduce(tf.ones([2]), name="b")
            session = tf.compat.v1.Session()
            threading.Thread(target=lambda: refused(session.run, other), daemon=True).start()
            time.sleep(0.5)
        say(f"ending at {time.time()}")
        sys.exit()
    fails_in_a_tf1_graph(tf.errors.FailedPreconditionError, {"a": 2})
say("end of script")
