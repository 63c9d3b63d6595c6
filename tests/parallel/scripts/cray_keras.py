"""Keras by Cray's plugin: an optimizer of a class of the script's own averages gradients.

With the argument `as published` its name comes twice, as in published scripts, which are of before
Keras 2 had it in get_config().
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


def averaging(plain):
    """A Keras optimizer as `plain`, but that its gradients are the means over the ranks."""
    kind = type(plain)

    class OfRanks(kind):
        def __init__(self, name, **settings):
            kind.__init__(self, name=f"{name}OfRanks", **settings)

        def get_gradients(self, loss, params):
            own = kind.get_gradients(self, loss, params)
            return mc.gradients(own, 0)

    settings = plain.get_config()
    name = settings["name"] if PUBLISHED else settings.pop("name")
    return OfRanks(name, **settings)


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
model.compile(averaging(keras.optimizers.Adam(0.01)), "mse")
rows = np.random.RandomState(mc.get_rank()).randn(64, 4)
model.fit(rows, rows.sum(1), epochs=2, batch_size=32, verbose=0, callbacks=[Start()])
say(f"weights: {model.get_weights()[0].ravel().tolist()}")
