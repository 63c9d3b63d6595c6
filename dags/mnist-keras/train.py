"""Handwritten digits with Keras 3, on as many ranks as the manifest starts.

Every rank runs this file. It differs from a script for one process in four places, marked (1)-(4).
"""

import gzip
import os
import re
import sys

import ddl
import ddl.keras
import keras
import numpy as np

# What was entered when the run was triggered: `parameters` of the manifest.
EPOCHS = int(os.environ.get("PARAM_EPOCHS", "4"))
LEARNING_RATE = float(os.environ.get("PARAM_LEARNING_RATE", "0.002"))
BATCH = 128  # over all ranks together: more ranks, smaller shares, the same training


def folder(variable):
    path = os.environ.get(variable, "")
    if not os.path.isdir(path):
        sys.exit(f"{variable} is {path!r}, not a folder. The launcher sets it; by hand, export it.")
    return path


def read(data_dir, name, header):
    with gzip.open(os.path.join(data_dir, name)) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def read_part(data_dir, part):
    """Images as float32 [n, 28, 28, 1] from 0 to 1, labels as uint8 [n]."""
    images = read(data_dir, f"{part}-images-idx3-ubyte.gz", header=16).reshape(-1, 28, 28, 1)
    return images.astype(np.float32) / 255, read(data_dir, f"{part}-labels-idx1-ubyte.gz", header=8)


class SaveEachEpoch(keras.callbacks.Callback):
    """Leaves model-<epoch>.keras; renamed when whole, so a killed try leaves no half of one."""

    def on_epoch_end(self, epoch, logs=None):
        partial = os.path.join(checkpoints, ".partial.keras")
        self.model.save(partial)
        os.replace(partial, os.path.join(checkpoints, f"model-{epoch + 1}.keras"))


data_dir, result_dir = folder("DATA_DIR"), folder("RESULT_DIR")
checkpoints = os.path.join(result_dir, "checkpoints")
os.makedirs(checkpoints, exist_ok=True)
train_images, train_labels = read_part(data_dir, "train")
test_images, test_labels = read_part(data_dir, "t10k")

# (1) Each rank trains on its own share; shares are equal, so that all ranks take the same steps.
length = len(train_images) // ddl.size() * ddl.size()
mine = slice(ddl.rank(), length, ddl.size())

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
# (2) The optimizer averages its gradients over all ranks.
optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam(LEARNING_RATE))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])

# A retry goes on where the last try stopped.
saved = [re.fullmatch(r"model-(\d+)\.keras", name) for name in os.listdir(checkpoints)]
done = max((int(match[1]) for match in saved if match), default=0)
if done:
    optimizer.build(model.trainable_variables)
    model.load_weights(os.path.join(checkpoints, f"model-{done}.keras"))
    if ddl.rank() == 0:
        print(f"goes on from epoch {done}", flush=True)

# (3) All ranks begin with rank 0's weights. (4) Rank 0 speaks and saves for all ranks.
batch = BATCH // ddl.size()
callbacks = [ddl.keras.BroadcastCallback(), ddl.keras.ProgressCallback(batch_size=batch)]
if ddl.rank() == 0:
    callbacks.append(SaveEachEpoch())
model.fit(
    train_images[mine],
    train_labels[mine],
    batch_size=batch,
    epochs=EPOCHS,
    initial_epoch=done,
    callbacks=callbacks,
    verbose=2 if ddl.rank() == 0 else 0,
)
if ddl.rank() == 0:
    model.save(os.path.join(result_dir, "model.keras"))
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"test accuracy= {accuracy:.4f}")
    ddl.report(test_accuracy=accuracy)
