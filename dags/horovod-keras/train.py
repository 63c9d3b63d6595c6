"""Handwritten digits with Keras on as many ranks as the manifest starts, by Horovod's interface.

Every rank runs this file, in which nothing is of ddl but where data and results are. It differs
from a script for one process in five places, marked (1)-(5).
"""

import gzip
import os
import re

import horovod.tensorflow.keras as hvd
import keras
import numpy as np

EPOCHS = 4
BATCH = 64

hvd.init()  # (1)
data_dir, checkpoints = os.environ["DATA_DIR"], os.environ["CHECKPOINT_DIR"]


def read(name, header):
    with gzip.open(os.path.join(data_dir, name)) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def read_part(part):
    """Images as float32 [n, 28, 28, 1] from 0 to 1, labels as uint8 [n]."""
    images = read(f"{part}-images-idx3-ubyte.gz", header=16).reshape(-1, 28, 28, 1)
    return images.astype(np.float32) / 255, read(f"{part}-labels-idx1-ubyte.gz", header=8)


images, labels = read_part("train")
# (2) Each rank trains on its own share; shares are equal, so that all ranks take the same steps.
length = len(images) // hvd.size() * hvd.size()
mine = slice(hvd.rank(), length, hvd.size())

saved = [re.fullmatch(r"model-(\d+)\.keras", name) for name in os.listdir(checkpoints)]
done = max((int(match[1]) for match in saved if match), default=0)
if done:  # a retry goes on where the last try stopped, with a distributed optimizer
    model = hvd.load_model(os.path.join(checkpoints, f"model-{done}.keras"))
else:
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 5, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(16, 5, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.25),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    # (3) The optimizer averages its gradients; the rate grows with the ranks.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

callbacks = [
    # (4) All ranks train rank 0's model, and know the averages of their metrics.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.001 * hvd.size(), warmup_epochs=2),
]
if hvd.rank() == 0:  # (5) One rank speaks and saves for all.
    callbacks.append(keras.callbacks.ModelCheckpoint(f"{checkpoints}/model-{{epoch}}.keras"))
model.fit(
    images[mine],
    labels[mine],
    batch_size=BATCH,
    epochs=EPOCHS,
    initial_epoch=done,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,
)
if hvd.rank() == 0:
    _, accuracy = model.evaluate(*read_part("t10k"), verbose=0)
    print(f"test accuracy= {accuracy:.4f}")
