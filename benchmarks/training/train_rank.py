"""One rank of a training: `python -m benchmarks.training.train_rank WAY MODEL BATCH`.

WAY: ddl, horovod, alone, or blocking or pipelined by dl_comm.

A TensorFlow 1 graph, as in the script of 2018 whose CNN it trains, on random images.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf  # noqa: TID253

from benchmarks.turns import serve

v1 = tf.compat.v1
_BATCHES = 8


def _weights(*shape: int) -> Any:
    number = len(v1.trainable_variables())
    fan_in = np.prod(shape[:-1])
    initial = v1.truncated_normal(shape, stddev=(2 / fan_in) ** 0.5, seed=number + 1)
    return v1.Variable(initial)


def _offsets(count: int) -> Any:
    return v1.Variable(tf.constant(0.1, shape=[count]))


def _convolution(layer: Any, size: int, outputs: int) -> Any:
    kernel = _weights(size, size, layer.shape.as_list()[-1], outputs)
    summed = tf.nn.conv2d(layer, kernel, strides=[1, 1, 1, 1], padding="SAME")
    return tf.nn.relu(summed + _offsets(outputs))


def _pool(layer: Any) -> Any:
    return v1.nn.max_pool(layer, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")


def _dense(layer: Any, outputs: int) -> Any:
    return tf.matmul(layer, _weights(layer.shape.as_list()[-1], outputs)) + _offsets(outputs)


def mnist(images: Any, seed: int) -> Any:
    """The CNN of TensorFlow's deep_mnist tutorial: 3.3 M weights, nearly all in one layer."""
    layer = tf.reshape(images, [-1, 28, 28, 1])
    layer = _pool(_convolution(layer, 5, 32))
    layer = _pool(_convolution(layer, 5, 64))
    layer = tf.nn.relu(_dense(tf.reshape(layer, [-1, 7 * 7 * 64]), 1024))
    return _dense(tf.nn.dropout(layer, rate=0.25, seed=seed), 10)


def deep(images: Any, seed: int) -> Any:
    """Six convolutions of 3 x 3: much to compute, 1.1 M weights in 14 tensors."""
    layer = tf.reshape(images, [-1, 28, 28, 1])
    for outputs in (64, 128, 256):
        layer = _pool(_convolution(_convolution(layer, 3, outputs), 3, outputs))
    return _dense(tf.reduce_mean(layer, [1, 2]), 10)


def wide(images: Any, seed: int) -> Any:
    """Four dense layers of 2048: little to compute for 14.2 M weights."""
    layer = images
    for _ in range(4):
        layer = tf.nn.relu(_dense(layer, 2048))
    return _dense(layer, 10)


MODELS: dict[str, Callable[[Any, int], Any]] = {"mnist": mnist, "deep": deep, "wide": wide}


class Training:
    """A model, its data and a session."""

    def __init__(
        self,
        model: str,
        batch: int,
        rank: int,
        distribute: Callable[[Any], Any],
        after_start: Callable[[], Any] | None,
        average: Callable[[list[Any]], list[Any]] = list,
    ) -> None:
        random = np.random.default_rng(rank)
        self._images = random.random((_BATCHES, batch, 784), np.float32)
        self._labels = random.integers(0, 10, (_BATCHES, batch))
        self._x = v1.placeholder(tf.float32, [None, 784])
        self._y = v1.placeholder(tf.int64, [None])
        logits = MODELS[model](self._x, rank + 1)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=self._y, logits=logits)
        self._loss = tf.reduce_mean(losses)
        optimizer = distribute(v1.train.AdamOptimizer(0.001))
        pairs = [pair for pair in optimizer.compute_gradients(self._loss) if pair[0] is not None]
        self._train = optimizer.apply_gradients(average(pairs))
        config = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
        start = v1.global_variables_initializer()
        then = after_start() if after_start else None
        self._session = v1.Session(config=config)
        self._session.run(start)
        if then is not None:
            self._session.run(then)
        self._steps = 0

    def _step(self, fetches: Any) -> Any:
        number = self._steps % _BATCHES
        self._steps += 1
        feed = {self._x: self._images[number], self._y: self._labels[number]}
        return self._session.run(fetches, feed)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Trains one step that is not timed, and `steps` that are."""
        self._step(self._train)
        start = time.perf_counter()
        cpu = time.process_time()
        for _ in range(request["steps"]):
            self._step(self._train)
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
        weights = hashlib.sha256()
        for array in self._session.run(v1.trainable_variables()):
            weights.update(array.tobytes())
        loss = self._session.run(self._loss, {self._x: self._images[0], self._y: self._labels[0]})
        return {
            "seconds": seconds,
            "cpu_s": cpu,
            "weights": weights.hexdigest(),
            "loss": float(loss),
        }


def _first(pairs: list[Any]) -> list[Any]:
    return [gradient for gradient, _ in pairs]


def _equal_start() -> Any:
    import dl_comm as mc

    variables = v1.trainable_variables()
    return tf.group(*map(v1.assign, variables, mc.broadcast(variables, 0)))


def main() -> None:
    way, model, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
    tf.get_logger().setLevel("ERROR")
    v1.disable_v2_behavior()
    v1.set_random_seed(1)
    versions = {"tensorflow": tf.__version__}
    if way == "alone":
        rank = int(os.environ.get("RANK", "0"))
        training = Training(model, batch, rank, lambda optimizer: optimizer, None)
    elif way == "ddl":
        import ddl  # DDL_OPTIONS is set: hooks the optimizers and the initialisers

        rank = ddl.rank()
        training = Training(model, batch, rank, lambda optimizer: optimizer, None)
    elif way in ("blocking", "pipelined"):
        import dl_comm as mc

        rank = mc.get_rank()
        mc.init(1, 1, 100_000_000, "tensorflow")
        mc.config_team(0, 0, 1 if way == "blocking" else 0, 1)
        training = Training(
            *(model, batch, rank, lambda optimizer: optimizer, _equal_start),
            average=lambda pairs: [
                (gradient, variable)
                for gradient, (_, variable) in zip(
                    mc.gradients(_first(pairs), 0), pairs, strict=True
                )
            ],
        )
    else:
        import horovod.tensorflow as hvd

        hvd.init()
        rank = hvd.rank()
        training = Training(
            model, batch, rank, hvd.DistributedOptimizer, lambda: hvd.broadcast_global_variables(0)
        )
    serve(rank, versions, training.answer)


if __name__ == "__main__":
    main()
