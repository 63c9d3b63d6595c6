"""A script for Horovod with an elastic state, as `python -m tests.soak.elastic` trains it.

Arguments: FOLDER STEPS. Rank 0 appends to FOLDER/told: `begin N` where it goes on after N steps,
`step N`, `commit N` when that has returned. After the commits that FOLDER/stops names all ranks
fail. Each rank leaves FOLDER/pid-<rank>, and at the end FOLDER/final-<rank>, a digest of weights,
optimizer and attributes.
"""

import hashlib
import os
import sys
from pathlib import Path

FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
(FOLDER / f"pid-{os.environ['OMPI_COMM_WORLD_RANK']}").write_text(str(os.getpid()))

# It may be killed from here on.
import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

PER_COMMIT = 3
STOPS = (FOLDER / "stops").read_text().split() if (FOLDER / "stops").exists() else []
tf.config.threading.set_intra_op_parallelism_threads(1)  # so that the bits are the same
hvd.init()


def tell(line):
    if hvd.rank() == 0:
        with (FOLDER / "told").open("a") as file:
            file.write(f"{line}\n")


keras.utils.set_random_seed(hvd.rank())  # what they begin with is rank 0's
layers = [keras.layers.Dense(700, "relu"), keras.layers.Dense(700, "relu"), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((8,)), *layers])
optimizer = keras.optimizers.Adam(0.001)
state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0, done=0, seen=[])


@hvd.elastic.run
def train(state):
    tell(f"begin {state.done}")
    while state.done < STEPS:
        generator = np.random.default_rng([state.epoch, state.batch, hvd.rank()])
        x = generator.normal(size=(4, 8)).astype("float32")
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x.sum(1, keepdims=True)) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        state.batch += 1
        state.done += 1
        state.seen.append(float(hvd.allreduce(loss)))
        tell(f"step {state.done}")
        if state.batch == 7:
            state.epoch, state.batch = state.epoch + 1, 0
        if state.done % PER_COMMIT == 0:
            state.commit()
            tell(f"commit {state.done}")
            if str(state.done) in STOPS:
                sys.exit(f"ends after commit {state.done}, as it was told")


train(state)
assert state.done == STEPS == len(state.seen)
digest = hashlib.sha256(repr((state.epoch, state.batch, state.done, state.seen)).encode())
for variable in [*model.weights, *optimizer.variables]:
    digest.update(variable.numpy().tobytes())
(FOLDER / f"final-{hvd.rank()}").write_text(digest.hexdigest())
