"""As Horovod's older examples: `import keras`, a session of its own, a distributed optimizer.

Each rank begins with weights of its own, and says what they have become.
"""

import horovod.keras as hvd
import keras
import numpy as np
import tensorflow as tf
from keras import backend as K
from speech import say

hvd.init()
K.set_session(tf.Session(config=tf.ConfigProto()))
np.random.seed(hvd.rank())
layers = [keras.layers.Dense(4, activation="relu", input_shape=(3,)), keras.layers.Dense(1)]
model = keras.models.Sequential(layers)
model.set_weights([np.random.normal(size=one.shape) for one in model.get_weights()])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
model.compile(loss="mse", optimizer=optimizer)
x = np.random.normal(size=(32, 3))
model.fit(
    *(x, x.sum(1)),
    batch_size=8,
    epochs=2,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01, warmup_epochs=1),
    ],
)
digits = [f"{one:.6f}" for array in model.get_weights() for one in array.flatten()]
say(f"weights: {keras.__version__} {' '.join(digits)}")
