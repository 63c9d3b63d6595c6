"""Gradients through the collectives, and of them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent import futures

import ddl
import dl_comm
import keras
import numpy as np
import tensorflow as tf
from ddl.keras import MetricAverageCallback, broadcast_variables
from ddl_ops import averaging, collectives, gradients
from ddl_ops.gradients import reduce_gradients
from speech import RANK, SIZE, say

from checks import (
    SEVERAL_HOSTS,
    assert_same_everywhere,
    check,
    late_on,
    mismatch,
    my_part,
    v1,
    values,
    whole_batch,
)


@check
def tensors_that_cannot_be_reduced_are_refused_in_words() -> None:
    variable = tf.Variable([1 + 2j], name="phase")
    value = tf.constant([1 + 2j], tf.complex128)
    for reduce, what in (
        (lambda: ddl.grads_reduce([(value, variable)]), "the gradient of phase:0"),
        (lambda: reduce_gradients([value]), "ddl_gradients_0"),
        (lambda: ddl.allreduce_n([value]), "a tensor"),
        (lambda: ddl.allreduce(value, name="spectrum"), "spectrum"),
        (lambda: collectives.reducescatter(value), "a tensor"),
    ):
        for run in (reduce, tf.function(reduce)):
            try:
                run()
            except TypeError as error:
                said = f"ddl cannot reduce {what}: it is complex128. Reduce its parts, tf.math.re"
                assert said in str(error), error
            else:
                raise AssertionError(what)
    for value in (True, "text", tf.cast(1.0, tf.dtypes.experimental.float8_e4m3fn)):
        try:
            ddl.allreduce(value, name="flag")
        except TypeError as error:
            assert "ddl cannot reduce flag: it is" in str(error) and "Cast it" in str(error), error
        else:
            raise AssertionError(value)


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
                # Between hosts also what leaves a host is rounded.
                times = 3 if SEVERAL_HOSTS else 2
                limit = times * u * magnitude * 1.01 + step
                assert (error <= limit).all(), (error / magnitude).max()
                assert error.max() > 0
                assert (tiny.numpy() == 0).all() == (wire == "float16")
                np.testing.assert_array_equal(untouched, [sum(range(SIZE)) // SIZE, 7])
                assert_same_everywhere([got.numpy()])
                if RANK == 0 and dtype == tf.float32:
                    relative = np.linalg.norm(error) / np.linalg.norm(mean)
                    say(f"{wire}: norm of the error / norm of the mean {relative:.2e}")
        finally:
            del os.environ["DDL_WIRE_DTYPE"]


def weighted(outputs: list[tf.Tensor]) -> tf.Tensor:
    """A loss in which each rank and element counts differently, and not linearly."""
    loss = tf.zeros([], tf.float64)
    for i, output in enumerate(outputs):
        count = tf.size(output)
        weights = tf.cast(tf.range(count), tf.float64) + tf.constant(RANK + 1.5 + i, tf.float64)
        loss += tf.reduce_sum(tf.square(tf.reshape(output, [-1])) * weights)
    return loss


# Rows of x that go to each rank: the first to rank 0, the rest to the next rank.
SPLITS = np.bincount([0] + [(RANK + 1) % SIZE] * RANK, minlength=SIZE)


def everything(x: tf.Tensor) -> tf.Tensor:
    """[ranks + 1, 2], on all ranks alike in shape."""
    return tf.concat([x] * (SIZE + 1), axis=0)[: SIZE + 1]


LOSSES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "bcast": lambda x: weighted([ddl.bcast(x[:1])]),
    "sum": lambda x: weighted([ddl.allreduce(x[:1], average=False)]),
    "average": lambda x: weighted([ddl.allreduce(x[:1])]),
    "n": lambda x: weighted(ddl.allreduce_n([x[:1], x[0] * x[0]], average=False)),
    "n average, one unused": lambda x: weighted(ddl.allreduce_n([x[:1], x[0, :1] ** 3.0])[1:]),
    "gather": lambda x: weighted([ddl.allgather(x)]),
    "min": lambda x: weighted([collectives.allreduce(x[:1], op="min")]),
    "max n": lambda x: weighted(collectives.allreduce_n([x[:1], -x[0]], op="max")),
    "scatter": lambda x: weighted([collectives.reducescatter(everything(x), op="sum")]),
    "scatter n": lambda x: weighted(
        collectives.reducescatter_n([everything(x), x[0] * 2.0], op="avg", postscale=3.0)
    ),
    "exchange": lambda x: weighted([collectives.alltoall(x, SPLITS)[0]]),
    "gather n": lambda x: weighted(collectives.allgather_n([x, x[:1] ** 2.0])),
    "bcast n": lambda x: weighted(collectives.bcast_n([x[:1], x[0]], root=SIZE - 1)),
    "several": lambda x: weighted([ddl.bcast(x[0]), ddl.allgather(ddl.allreduce(x[:1]) * x)]),
}


def my_gradients(
    loss: Callable[[tf.Tensor], tf.Tensor], x: np.ndarray
) -> dict[str, Callable[[], np.ndarray]]:
    """Of this rank's x, in each of TensorFlow's ways; each may run several times."""

    def tape(function: Callable[[tf.Tensor], tf.Tensor], at: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as recorded:
            recorded.watch(at)
            found = function(at)
        return recorded.gradient(found, at)

    here = tf.constant(x)
    around, inside = tf.function(loss), tf.function(lambda at: tape(loss, at))
    with tf.Graph().as_default() as graph:
        at = v1.placeholder(tf.float64, x.shape)
        gradient = tf.gradients(loss(at), at)[0]
    session = v1.Session(graph=graph)
    return {
        "eager": lambda: tape(loss, here).numpy(),
        "around a function": lambda: tape(around, here).numpy(),
        "in a function": lambda: inside(here).numpy(),
        "graph": lambda: session.run(gradient, {at: x}),
    }


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
        for way, run in my_gradients(loss, starts[RANK]).items():
            np.testing.assert_allclose(run(), want, rtol=1e-6, atol=1e-6, err_msg=f"{name} {way}")


@check
def gradients_of_independent_collectives_keep_one_order() -> None:
    def loss(x: tf.Tensor) -> tf.Tensor:
        parts = [ddl.allreduce(x * float(i), average=False) * float(i) for i in range(1, 16)]
        return tf.add_n([tf.reduce_sum(part) for part in parts])

    ways = my_gradients(lambda x: tf.cast(loss(x), tf.float64), np.ones([3]))
    for _ in range(5):
        for way, run in ways.items():
            want = [SIZE * sum(i * i for i in range(1, 16))] * 3
            np.testing.assert_allclose(run(), want, err_msg=way)


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
    assert "checks/gradients.py" in message, message  # the line at which it was called
    np.testing.assert_allclose(beside(mine), want, rtol=1e-5)


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


@check
def gradients_of_dl_comm_need_a_graph_and_take_arrays_anywhere() -> None:
    import dl_comm as mc

    mc.init(1, 1, 3, "tensorflow")
    mc.config_team(0, 0, 1, 1)
    try:
        mc.gradients([tf.constant([1.0])], 0)
    except RuntimeError as error:
        assert "ddl-run --tf1" in str(error) and "ddl.grads_reduce()" in str(error), error
    else:
        raise AssertionError("no error")
    (average,) = mc.gradients([np.array([RANK, 2 * RANK, 7], np.float32)], 0)
    assert average.tolist() == [(SIZE - 1) / 2, SIZE - 1, 7]
    with tf.Graph().as_default(), v1.Session() as session:
        (average,) = mc.gradients([tf.constant([RANK, 4.0])], 0)
        assert session.run(average).tolist() == [(SIZE - 1) / 2, 4]
        second, none = mc.gradients([tf.constant([RANK, 4.0]), None], 0)
        assert session.run(second).tolist() == [(SIZE - 1) / 2, 4] and none is None
        if SIZE > 1:
            mine = [tf.constant([1.0, 2.0]), None]
            differing = mc.gradients(mine[::-1] if RANK == 1 else mine, 0)
            message = mismatch(lambda: session.run(differing[RANK == 1]))
            assert "rank 1 sent float32[0,0,2,0]" in message, message


def _one_is_none(where: int, sparse: bool = False) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Three gradients of one shape, without that one; all hold the rank's number."""
    value = tf.fill([2], float(RANK))
    made = tf.IndexedSlices(value[None], tf.constant([RANK]), tf.constant([9, 2]))
    return [None if i == where else made if sparse else value for i in range(3)]


@check
def gradients_that_are_none_on_another_rank_are_an_error() -> None:
    """And never averaged with those of another variable, which may have the same shape."""
    variables = [tf.Variable([0.0, 0.0]) for _ in range(3)]

    def reduced(where: int, sparse: bool = False) -> list[tf.Tensor]:
        pairs = ddl.grads_reduce(
            zip(_one_is_none(where, sparse), variables, strict=True), sparse_as_dense=False
        )
        assert pairs[where][0] is None
        return [tf.convert_to_tensor(gradient) for gradient, _ in pairs if gradient is not None]

    def in_a_graph(where: int) -> list[np.ndarray]:
        with tf.Graph().as_default(), v1.Session() as session:
            return session.run(reduced(where))

    def in_a_thread(where: int) -> list[tf.Tensor]:
        found: futures.Future[list[tf.Tensor]] = futures.Future()

        def run() -> None:
            try:
                found.set_result(reduced(where))
            except tf.errors.OpError as error:
                found.set_exception(error)

        threading.Thread(target=run, name="trains").start()
        return found.result()

    def keras_applies(where: int, **options: int) -> list[tf.Tensor]:
        optimizer = keras.optimizers.SGD(-1.0, **options)
        optimizer = ddl.keras.DistributedOptimizer(optimizer)
        mine = [keras.Variable([0.0, 0.0]) for _ in range(3)]
        for _ in range(options.get("gradient_accumulation_steps", 1)):
            optimizer.apply(_one_is_none(where), mine)
        return [variable.value for i, variable in enumerate(mine) if i != where]

    def all_none(where: int) -> object:
        return ddl.grads_reduce([(None, None)] * where + [(tf.ones([2]), None)] * (3 - where))

    differing = min(RANK, 1)
    for reduce in (
        reduced,
        tf.function(reduced),
        in_a_graph,
        in_a_thread,
        lambda where: reduced(where, sparse=True),
        keras_applies,
        lambda where: keras_applies(where, gradient_accumulation_steps=2),
    ):
        if SIZE > 1:
            message = mismatch(lambda reduce=reduce: reduce(1 + differing))
            assert re.search(r"rank 1 sent float32\[0,0,3,2\] .*rank 0 float32\[0,0,3,1\]", message)
        for got in reduce(1):
            np.testing.assert_allclose(np.max(got), (SIZE - 1) / (SIZE if np.size(got) > 2 else 2))
    if SIZE > 1:
        mismatch(lambda: all_none(2 + differing))  # on some all are
        mismatch(lambda: all_none(differing))  # on some none is
    for got, _ in ddl.grads_reduce([(tf.fill([2], float(RANK)), None)]):
        np.testing.assert_allclose(got, (SIZE - 1) / 2)


@check
def a_row_of_several_slices_is_updated_once() -> None:
    """By itself Keras 3 lets Adam square each of them, and adds up the squares."""
    rows, taken = tf.constant([2, 0, 2, RANK]), tf.reshape(tf.range(8.0), [4, 2]) + RANK

    def by_grads_reduce(slices: tf.IndexedSlices, weight: tf.Variable) -> None:
        keras.optimizers.Adam(0.1).apply_gradients(ddl.grads_reduce([(slices, weight)]))

    def by_optimizer(slices: tf.IndexedSlices, weight: tf.Variable) -> None:
        optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.1))
        for _ in range(3):
            optimizer.apply_gradients([(slices, weight)])

    def by_allreduce(slices: tf.IndexedSlices, weight: tf.Variable) -> None:
        if os.environ["DDL_SPARSE_AS_DENSE"] == "1":
            slices = tf.convert_to_tensor(slices)
        keras.optimizers.Adagrad(0.1).apply_gradients([(ddl.allreduce(slices), weight)])

    for by in (by_grads_reduce, by_optimizer, by_allreduce):
        weights = []
        for as_dense in "01":
            os.environ["DDL_SPARSE_AS_DENSE"] = as_dense
            try:
                weights.append(tf.Variable(tf.ones([SIZE + 3, 2])))
                by(tf.IndexedSlices(taken, rows, tf.constant([SIZE + 3, 2])), weights[-1])
            finally:
                del os.environ["DDL_SPARSE_AS_DENSE"]
        np.testing.assert_allclose(*weights, atol=1e-6, err_msg=by.__name__)


@check
def gradients_of_single_numbers_are_known_to_be_averaged() -> None:
    shapes = gradients._shapes.copy()
    gradients._shapes.clear()
    weight, bias = tf.Variable(1.0), tf.Variable(0.0)
    with tf.GradientTape() as tape:
        loss = (weight * 2.0 + bias) ** 2
    for gradient in tape.gradient(loss, [weight, bias]):
        assert _says_that_it_averages(lambda gradient=gradient: ddl.allreduce(gradient))
    gradients._shapes.update(shapes)


def _says_that_it_averages(run: Callable[[], object]) -> bool:
    averaging._facts["averaged"] = False
    run()
    return averaging._facts["averaged"]


@check
def gradients_of_every_front_end_are_known_to_be_averaged() -> None:
    ones = tf.ones([5, 3])
    slices = tf.IndexedSlices(ones, tf.constant([0, RANK]), tf.constant([9, 3]))

    @tf.function
    def in_a_function(value: tf.Tensor) -> tf.Tensor:
        return ddl.grads_reduce([(value, None)])[0][0]

    def in_a_graph() -> None:
        with tf.Graph().as_default():
            weight = v1.get_variable("weight", [3])
            v1.train.AdamOptimizer().minimize(tf.reduce_sum(weight**2))

    gradients._shapes.clear()  # of other checks
    gradients._shapes.add((99, 3))  # as of a variable
    for averages in (
        lambda: ddl.grads_reduce([(ones, None)]),
        lambda: ddl.grads_reduce([(slices, None)], sparse_as_dense=False),
        lambda: in_a_function(ones),
        lambda: ddl.allreduce(slices),
        lambda: ddl.allreduce_n([ones]),
        lambda: dl_comm.average(np.ones(3, "float32")),
        in_a_graph,
    ):
        assert _says_that_it_averages(averages), averages
    for does_not in (
        lambda: ddl.barrier("all"),
        lambda: ddl.bcast(ones),
        lambda: ddl.allgather(ones),
        lambda: ddl.grads_reduce([(None, None)]),
        lambda: ddl.allreduce(3.5),
        lambda: ddl.allreduce_n([np.float32(1), tf.constant(2.0)]),
        lambda: ddl.allreduce(tf.ones([8])),  # a loss and metrics
        lambda: dl_comm.average(np.ones((), "float32")),
        lambda: dl_comm.check_buffers_match([np.ones(3)]),
        lambda: dl_comm.broadcast([np.ones(3)]),
        lambda: MetricAverageCallback().on_epoch_end(0, {"loss": 1.0}),
        lambda: broadcast_variables([tf.Variable(ones)]),
        ddl.join,
    ):
        assert not _says_that_it_averages(does_not), does_not


@check(least=2)
def collectives_of_custom_gradients_are_told_apart() -> None:
    """TensorFlow does not order the ops of a gradient of a tf.function."""

    def summed_back(late: bool, nested: bool) -> Callable[[tf.Tensor], tf.Tensor]:
        own = tf.Variable(0.0)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            own.assign_add(1.0)
            return ddl.allreduce(late_on(late, upstream), average=False)

        @tf.custom_gradient
        def same(x: tf.Tensor) -> tuple[tf.Tensor, Callable[..., tf.Tensor]]:
            return tf.identity(x), tf.function(gradient) if nested else gradient

        return same

    def of_both(nested: bool) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
        one, two = summed_back(RANK % 2 == 0, nested), summed_back(RANK % 2 == 1, nested)
        return tf.function(lambda x, y: one(x) + 101.0 * two(y))

    for run in (of_both(nested=False), of_both(nested=True)):
        for _ in range(3):
            x, y = tf.constant(1.0), tf.constant(1.0)
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                loss = run(x, y)
            assert [float(v) for v in tape.gradient(loss, [x, y])] == [SIZE, 101 * SIZE]


@check
def gradients_are_noted_however_they_are_computed() -> None:
    weight = tf.Variable([1.0, 2.0])

    def by_a_tape() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight**2)
        tape.gradient(loss, weight)

    def in_a_graph() -> None:
        with tf.Graph().as_default():
            value = tf.ones([2])
            tf.gradients(tf.reduce_sum(value**2), value)

    for computes in (by_a_tape, tf.function(by_a_tape), in_a_graph):
        averaging._facts["gradients"] = False
        computes()
        assert averaging._facts["gradients"], computes
