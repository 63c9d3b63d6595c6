"""Keras by Cray's plugin: an optimizer that is wrapped as published scripts do it.

With the argument `as published` its name comes twice, since Keras 2 has it in get_config().
"""

from __future__ import annotations

import sys

import keras
import ml_comm as mc
import numpy as np
import tensorflow as tf
from keras import backend
from speech import say

PUBLISHED = sys.argv[1:] == ["as published"]


class _Distributed(keras.optimizers.Optimizer):
    def __init__(self, name, **kwargs):
        self._name = name or f"Distributed{type(self).__base__.__name__}"
        super(type(self), self).__init__(**kwargs)

    def get_gradients(self, loss, params):
        return mc.gradients(super(type(self), self).get_gradients(loss, params), 0)


def distributed(optimizer, name=None):
    base = type(optimizer)
    kind = type(base.__name__, (base,), dict(_Distributed.__dict__))
    config = optimizer.get_config()
    if not PUBLISHED:
        config.pop("name", None)
    return kind(name, **config)


class Start(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        variables = tf.trainable_variables()
        mc.init(1, 1, 100, "tensorflow")
        mc.config_team(0, 0, 100, 100, 0, 100)
        new = mc.broadcast(variables, 0)
        assigned = [tf.assign(old, one) for old, one in zip(variables, new, strict=True)]
        backend.get_session().run(assigned)


mc.init_mpi()
model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(4,))])
model.compile(distributed(keras.optimizers.Adam(0.01)), "mse")
rows = np.random.RandomState(mc.get_rank()).randn(64, 4)
model.fit(rows, rows.sum(1), epochs=2, batch_size=32, verbose=0, callbacks=[Start()])
say(f"weights: {model.get_weights()[0].ravel().tolist()}")
