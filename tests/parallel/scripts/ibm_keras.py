"""As IBM's examples of 2018: Keras 2 with `import ddl`, its callbacks, and optimizers of Keras.

Each rank has data of its own. Says the weights of each model, which are to be the same.
"""

import horovod.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python import keras as keras_in_tensorflow
from tensorflow.python.keras import optimizer_v1

import ddl  # isort: skip
from speech import RANK, SIZE, say

np.random.seed(RANK)
x = np.random.normal(size=(32, 4)).astype("float32")
y = x.sum(1, keepdims=True)


def model_of(kind, optimizer):
    layers = [kind.layers.Dense(3, input_shape=(4,)), kind.layers.Dense(1)]
    model = kind.models.Sequential(layers)
    model.compile(loss="mse", optimizer=optimizer)
    return model


def fitted(what, model, **options):
    history = model.fit(x, y, epochs=2, batch_size=8, verbose=0, **options).history
    say_weights(what, model)
    return history


def say_weights(what, model):
    digits = [f"{one:.6f}" for array in model.get_weights() for one in array.flatten()]
    say(f"{what}: {' '.join(digits)}")


def reductions():
    return sum(op.type == "AllReduceN" for op in tf.get_default_graph().get_operations())


for kind in (keras, keras_in_tensorflow):
    model = model_of(kind, tf.train.GradientDescentOptimizer(0.01))
    fitted("tf.train", model)
    # As load_weights() of rank 0 alone.
    model.set_weights([one + RANK for one in model.get_weights()])
    callbacks = [ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback()]
    say(f"loss: {fitted('callbacks', model, callbacks=callbacks)['loss']}")
    before = reductions()
    descent = {"learning_rate": 0.01, "momentum": 0.9, "clipnorm": 1.0}
    for optimizer in (
        "sgd",
        "rmsprop",
        kind.optimizers.deserialize({"class_name": "SGD", "config": descent}),
        (keras.optimizers.Adam if kind is keras else optimizer_v1.Adam)(lr=0.01),
    ):
        fitted("own", model_of(kind, optimizer))
    callbacks = [ddl.DDLGlobalVariablesCallback()]
    fitted("own again", model_of(kind, "adam"), callbacks=callbacks)
    assert reductions() == before + 5, "each gradient once"

# A loop of the script's own.
model = keras.models.Sequential([keras.layers.Dense(1, input_shape=(4,))])
loss = tf.reduce_mean((model(tf.constant(x)) - y) ** 2)
optimizer = keras.optimizers.SGD(0.01)
weights = model.trainable_weights
pairs = list(zip(tf.gradients(loss, weights), weights, strict=True))
train = optimizer.apply_gradients(pairs)
session = keras.backend.get_session()
for _ in range(3):
    session.run(train)
say_weights("loop", model)

# Horovod's interface beside it: what that distributes is combined as it says, and once.
hvd.init()
layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", input_shape=(1,))]
model = keras.models.Sequential(layers)
summed = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
model.compile(loss=lambda target, got: (RANK + 1.0) * got, optimizer=summed)
model.fit(np.ones([1, 1]), np.ones([1, 1]), verbose=0)
assert model.get_weights()[0] == -sum(range(1, SIZE + 1)), model.get_weights()
