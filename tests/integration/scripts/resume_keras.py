"""For Keras: trains to the end, and once more with an interruption; the weights must agree.

In the first try rank 1 is killed in the fourth epoch, and the checkpoint of the third is damaged.
"""

import os
import re
import signal

import ddl
import ddl.keras
import keras
import numpy as np

EPOCHS, KILLED_IN, BATCH = 5, 3, 8
rank = ddl.rank()
reference = os.path.join(os.environ["RESULT_DIR"], f"uninterrupted-{rank}.npz")
rows = np.random.RandomState(0).rand(64, 6).astype("float32")[rank :: ddl.size()]


class Save(keras.callbacks.Callback):
    """As most scripts do: straight to the file."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def on_epoch_end(self, epoch, logs=None):
        self.model.save(os.path.join(self.folder, f"model-{epoch + 1}.keras"))


class KilledOnce(keras.callbacks.Callback):
    """Ends this rank in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and self.params["epoch"] == KILLED_IN:
            damaged = os.path.join(os.environ["CHECKPOINT_DIR"], f"model-{KILLED_IN}.keras")
            os.truncate(damaged, os.path.getsize(damaged) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_begin(self, epoch, logs=None):
        self.params["epoch"] = epoch


def train(folder, killed):
    """The weights in the end, and the optimizer's variables."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.1))
    model.compile(optimizer, "mse")
    os.makedirs(folder, exist_ok=True)
    saved = [re.fullmatch(r"model-(\d+)\.keras", name) for name in os.listdir(folder)]
    done = max((int(match[1]) for match in saved if match), default=0)
    print("begins at", done)
    if done:
        optimizer.build(model.trainable_variables)
        model.load_weights(os.path.join(folder, f"model-{done}.keras"))
    callbacks = [ddl.keras.BroadcastCallback()]
    if rank == 0:
        callbacks.append(Save(folder))
    if killed and rank == 1:
        callbacks.append(KilledOnce())
    model.fit(
        rows[:, :4],
        rows[:, 4:],
        batch_size=BATCH,
        epochs=EPOCHS,
        initial_epoch=done,
        shuffle=False,
        callbacks=callbacks,
        verbose=0,
    )
    return [variable.numpy() for variable in (*model.weights, *optimizer.variables)]


first_try = not os.path.exists(reference)
if first_try:
    other = os.path.join(os.environ["JOB_STATE_DIR"], "uninterrupted")
    np.savez(reference, *train(other, killed=False))
ended = train(os.environ["CHECKPOINT_DIR"], killed=first_try)
expected = np.load(reference)
same = [np.array_equal(expected[f"arr_{n}"], value) for n, value in enumerate(ended)]
print("the same weights:", len(same), all(same))
