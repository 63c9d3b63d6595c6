"""A training that can be asked to end, in one of the ways; the same steps whenever it goes on.

Arguments: WAY (loop, joins, keras, gan or tf1) FOLDER STEPS [PLACE=STEP@RANK ...]. One rank appends
each step that it has done to FOLDER/steps, and rank 0 leaves FOLDER/final.npz at the end. At a
step, in the named place, a rank (or `all`) asks itself to end: see `ask`. `slowly=SECONDS` of a
step. `apart=yes`: ranks share no disk, and the others get what rank 0 had saved when they begin.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

WAY, FOLDER, STEPS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
WHEN = dict(word.split("=") for word in sys.argv[4:])
PER_EPOCH = 7
BATCH = 4
_RANK = os.environ["OMPI_COMM_WORLD_RANK"]
if "apart" in WHEN and _RANK != "0":
    brought, own = Path(os.environ["CHECKPOINT_DIR"]), FOLDER / f"disk-{_RANK}"
    shutil.rmtree(own, ignore_errors=True)
    if brought.exists():
        shutil.copytree(brought, own)
    os.environ["CHECKPOINT_DIR"] = str(own)


def ask(place: str, step: int, rank: int) -> None:
    """Sends the signal here, once in all tries, if that was asked for: PLACE=STEP@RANK."""
    at, _, who = WHEN.get(place, "").partition("@")
    once = FOLDER / f"asked-{place}-{rank}"
    if at == str(step) and who in ("all", str(rank)) and not once.exists():
        once.touch()
        parent = os.getppid() if place.startswith("shim") else os.getpid()
        os.kill(parent, signal.SIGTERM)
        if place.startswith("shim"):
            time.sleep(0.2)  # the shim passes it on


def done(step: int) -> None:
    time.sleep(float(WHEN.get("slowly", 0)))
    with (FOLDER / "steps").open("a") as file:
        file.write(f"{step}\n")


def rows(step: int, rank: int):
    import numpy as np

    generator = np.random.default_rng([step, rank])
    x = generator.normal(size=(BATCH, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


def loop(joins: bool) -> None:
    import ddl
    import numpy as np
    import tensorflow as tf

    weights = tf.Variable(tf.zeros([3, 1]))
    moment = tf.Variable(tf.zeros([3, 1]))
    place, first = FOLDER / "loop.npz", 0
    if place.exists():
        with np.load(place) as saved:
            weights.assign(saved["w"])
            moment.assign(saved["m"])
            first = int(saved["step"])

    def save(step: int) -> None:
        ask("saving", step, ddl.rank())
        with open(f"{place}.partial", "wb") as file:
            np.savez(file, w=weights.numpy(), m=moment.numpy(), step=step)
        os.replace(f"{place}.partial", place)

    ddl.on_preempt(save)
    # With joins, rank 0 has fewer steps than the others, and waits for them.
    mine = STEPS - 3 if joins and ddl.rank() == 0 else STEPS
    ask("start", 0, ddl.rank())
    for step in range(first, mine):
        x, y = rows(step, ddl.rank())
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(x, weights) - y) ** 2)
        ((gradient, _),) = ddl.grads_reduce([(tape.gradient(loss, weights), weights)])
        moment.assign(0.9 * moment + gradient)
        weights.assign_sub(0.05 * moment)
        if ddl.rank() == ddl.size() - 1:
            done(step + 1)
        ask("step", step + 1, ddl.rank())
        ask("shim", step + 1, ddl.rank())
        ddl.end_of_step(step + 1)
    if joins:
        last = ddl.join()
        weights.assign(ddl.bcast(weights, root=last))
        moment.assign(ddl.bcast(moment, root=last))
    ask("end", STEPS, ddl.rank())
    ddl.barrier("the end")
    if ddl.rank() == 0:
        np.savez(FOLDER / "final.npz", w=weights.numpy(), m=moment.numpy())


def gan():
    """As in Keras's examples: optimizers of its own, and nothing that calls it as a whole."""
    import ddl.keras
    import keras
    import tensorflow as tf

    class Gan(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5)]
            self.critic = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
            self.maker = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
            self.noise = keras.random.SeedGenerator(17)
            self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
            self.losses_seen = keras.metrics.Mean(name="both")

        def compile(self) -> None:
            super().compile()
            self.own = {
                part.name: ddl.keras.DistributedOptimizer(keras.optimizers.Adam(0.01))
                for part in (self.critic, self.maker)
            }

        @property
        def metrics(self):
            return [self.losses_seen]

        def made(self):
            return self.maker(keras.random.normal((BATCH, 2), seed=self.noise))

        def train(self, part, loss_now):
            with tf.GradientTape() as tape:
                loss = loss_now()
            variables = part.trainable_variables
            gradients = tape.gradient(loss, variables)
            self.own[part.name].apply_gradients(zip(gradients, variables, strict=True))
            self.losses_seen.update_state(loss)

        def train_step(self, data):
            real, _ = data
            halves = tf.repeat([[0.0], [1.0]], BATCH, 0)

            def told_apart():
                both = tf.concat([real, self.made()], 0)
                return self.loss_of(halves, self.critic(both, training=True))

            self.train(self.critic, told_apart)
            zeros = tf.zeros([BATCH, 1])
            self.train(self.maker, lambda: self.loss_of(zeros, self.critic(self.made())))
            return {"both": self.losses_seen.result()}

    model = Gan()
    model.compile()
    return model


def by_keras(of_several: bool) -> None:
    import ddl
    import ddl.keras
    import keras
    import numpy as np

    class Rows(keras.utils.PyDataset):
        def __init__(self) -> None:
            super().__init__()
            self.epoch = 0

        def __len__(self) -> int:
            return PER_EPOCH

        def __getitem__(self, index):
            return rows(self.epoch * PER_EPOCH + index, ddl.rank())

        def on_epoch_begin(self) -> None:
            pass

    class Watch(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            data.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            self.before = int(optimizers[0]._iterations)

        def on_train_batch_end(self, batch, logs=None):
            step = int(optimizers[0]._iterations)
            assert logs["both" if of_several else "loss"] > 0, logs  # also where it is passed over
            if step != self.before and ddl.rank() == 0:
                done(step)
            ask("step", step, ddl.rank())
            ask("shim", step, ddl.rank())

        def on_epoch_end(self, epoch, logs=None):
            if ddl.rank() == 0:
                with (FOLDER / "logs").open("a") as file:
                    file.write(f"{epoch} {sorted(logs.items())}\n")

    keras.utils.set_random_seed(5 + ddl.rank())
    data = Rows()
    path, epoch = ddl.keras.newest_checkpoint()
    if of_several:
        model = gan()
        optimizers = list(model.own.values())
    else:
        if path:
            model = keras.models.load_model(path)
            optimizer = model.optimizer
        else:
            layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5)]
            model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
            # Between two steps it keeps what each rank has added up by itself.
            optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        optimizers = [ddl.keras.DistributedOptimizer(optimizer)]
        model.compile(*optimizers, "mse", metrics=["mae"])
    callbacks = [
        ddl.keras.BroadcastCallback(),
        ddl.keras.MetricAverageCallback(),
        Watch(),
        *([] if of_several else [ddl.keras.CheckpointCallback()]),
        ddl.keras.PreemptionCallback(),
    ]
    epochs = STEPS // PER_EPOCH
    fitted = {"epochs": epochs, "initial_epoch": epoch, "callbacks": callbacks, "verbose": 0}
    model.fit(data, shuffle=False, **fitted)
    if ddl.rank() == 0:
        states = [variable for optimizer in optimizers for variable in optimizer.variables]
        np.savez(FOLDER / "final.npz", *map(np.asarray, [*model.weights, *states]))


def by_hook() -> None:
    import ddl
    import numpy as np
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    x, y = tf.placeholder(tf.float32, [None, 3]), tf.placeholder(tf.float32, [None, 1])
    weights = tf.get_variable("w", [3, 1], initializer=tf.zeros_initializer())
    step = tf.train.get_or_create_global_step()
    loss = tf.reduce_mean((tf.matmul(x, weights) - y) ** 2)
    train = tf.train.AdamOptimizer(0.01).minimize(loss, global_step=step)
    folder = os.environ["CHECKPOINT_DIR"]
    found = tf.train.latest_checkpoint(folder)
    saver = tf.train.Saver()
    restore = tf.train.Scaffold(init_fn=lambda _s, session: found and saver.restore(session, found))

    class Watch(tf.train.SessionRunHook):
        def after_run(self, run_context, run_values):
            now = int(run_context.session.run(step))
            if ddl.rank() == 0:
                done(now)
            ask("step", now, ddl.rank())

    hooks = [ddl.EpochHook(), Watch(), ddl.PreemptionHook()]
    with tf.train.MonitoredTrainingSession(scaffold=restore, hooks=hooks) as session:
        now = session.run_step_fn(lambda step_context: step_context.session.run(step))
        while now < STEPS:
            rows_x, rows_y = rows(now, ddl.rank())
            session.run(train, {x: rows_x, y: rows_y})
            now = session.run_step_fn(lambda step_context: step_context.session.run(step))
        final = session.run_step_fn(
            lambda step_context: step_context.session.run(tf.trainable_variables())
        )
    if ddl.rank() == 0:
        np.savez(FOLDER / "final.npz", *final)


{
    "loop": lambda: loop(False),
    "joins": lambda: loop(True),
    "keras": lambda: by_keras(False),
    "gan": lambda: by_keras(True),
    "tf1": by_hook,
}[WAY]()
