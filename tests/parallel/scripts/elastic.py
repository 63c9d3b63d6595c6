"""A script for Horovod with elastic states, which is lost, asked to end, and started again.

Arguments: WAY FOLDER. WAY is `phases`: a loop of its own with one state, then fit() with another;
`session`: a state of TensorFlow 1, alone; `optimizers`: of other variables than all weights in
their order, alone; `ahead`: where rank 0 alone has an optimizer with variables; or `joins-session`,
`joins-inline` (a session that runs its ops in the main thread), `joins-function` and
`joins-eagerly`: rank 0 has fewer steps, and joins in an op there. Rank 0, or rank 1 where that
joins, appends each step that it has done to FOLDER/steps. What is to happen is at the places that
call `once`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from pathlib import Path

import numpy as np

WAY, FOLDER = sys.argv[1], Path(sys.argv[2])
EPOCHS, BATCHES = 2, 4


def once(what: str) -> bool:
    """Whether this is the first time in all starts of the job."""
    if (path := FOLDER / what).exists():
        return False
    path.touch()
    return True


def rows(step: int, rank: int):
    generator = np.random.default_rng([step, rank])
    x = generator.normal(size=(4, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


def phases() -> None:
    import horovod.tensorflow as hvd
    import horovod.tensorflow.keras as hvd_keras
    import keras
    import tensorflow as tf

    hvd.init()
    rank = hvd.rank()

    def done(step: int) -> None:
        if rank == 0:
            with (FOLDER / "steps").open("a") as file:
                file.write(f"{step}\n")

    def model_of(seed: int):
        keras.utils.set_random_seed(seed)  # by rank: what they begin with is rank 0's
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,)), *layers])

    def step_of(model, optimizer, step: int) -> None:
        x, y = rows(step, rank)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    # The optimizer has no variables before its first step, in no start of the job.
    model, optimizer = model_of(rank), keras.optimizers.Adam(0.01)
    start = [np.array(one) for one in hvd.broadcast_object(model.get_weights())]
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0, seen=[])
    resets = []
    state.register_reset_callbacks([lambda: resets.append((state.epoch, state.batch))])

    @hvd.elastic.run
    def train(state, batches):
        while state.epoch < EPOCHS:
            while state.batch < batches:
                step = state.epoch * batches + state.batch + 1
                step_of(state.model, state.optimizer, step)
                state.batch += 1
                state.seen.append({"step": step})
                done(step)
                # Between two commits, and of one rank.
                if step == 5 and rank == 1 and once("asked"):
                    os.kill(os.getpid(), signal.SIGTERM)
                if state.batch % 2 == 0:
                    state.commit()
            state.batch, state.epoch = 0, state.epoch + 1
            state.commit()
        return state

    assert train(state, BATCHES) is state
    steps = EPOCHS * BATCHES
    assert [one["step"] for one in state.seen] == list(range(1, steps + 1)), state.seen
    # The first start was asked to end after step 6; the third one finds this phase done.
    lost = (FOLDER / "lost").exists()
    assert resets == ([(2, 0)] if lost else [(1, 2)]), resets

    second = model_of(9)
    second.compile(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    fitted = hvd_keras.elastic.KerasState(second, epoch=0, batch=0)
    x, y = (np.concatenate(part) for part in zip(*(rows(n, rank) for n in range(3)), strict=True))

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done(100 + int(self.model.optimizer.iterations))
            if fitted.epoch == 1 and batch == 1 and rank == 0 and once("lost"):
                os.kill(os.getpid(), signal.SIGKILL)

    @hvd_keras.elastic.run
    def fit(state):
        elastic = hvd_keras.elastic
        callbacks = [
            elastic.UpdateEpochStateCallback(state),
            elastic.UpdateBatchStateCallback(state),
            elastic.CommitStateCallback(state, batches_per_commit=0),
            Watch(),
        ]
        epochs = 3 - state.epoch
        state.model.fit(x, y, 4, epochs, verbose=0, shuffle=False, callbacks=callbacks)

    fit(fitted)
    assert fitted.epoch == 3

    # The same without any state, by ranks that nobody interrupts.
    plain, optimizer = model_of(rank), keras.optimizers.Adam(0.01)
    plain.set_weights(start)
    for step in range(1, steps + 1):
        step_of(plain, optimizer, step)
    of_state = state.model.weights + state.optimizer.variables
    pairs = zip(plain.weights + optimizer.variables, of_state, strict=True)
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)
    plain = model_of(9)
    plain.compile(hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    plain.fit(x, y, 4, 3, verbose=0, shuffle=False)
    pairs = zip(plain.weights, second.weights, strict=True)
    assert all(np.array_equal(a.numpy(), b.numpy()) for a, b in pairs)
    print(f"rank {rank}: the weights are the same", flush=True)


def session() -> None:
    import horovod.tensorflow as hvd
    import tensorflow.compat.v1 as tf
    from horovod.common import elastic

    hvd.init()
    for again in (False, True):
        elastic._Script.states = 0  # another start of the job
        elastic._Script.times.clear()
        with tf.Graph().as_default(), tf.Session() as at:
            number = tf.get_variable("number", initializer=1.5)
            words = tf.get_variable("words", initializer=tf.constant(["a", "bc"]))
            at.run(tf.global_variables_initializer())
            state = hvd.elastic.TensorFlowState([number, words], at, batch=0)

            @hvd.elastic.run
            def train(state, again=again, at=at, number=number, words=words):
                assert state.batch == (7 if again else 0)
                values = at.run([number, words])
                assert values[0] == (2.5 if again else 1.5), values
                assert values[1].tolist() == ([b"x", b""] if again else [b"a", b"bc"]), values
                number.load(2.5, at)
                words.load(["x", ""], at)
                state.batch = 7
                state.commit()

            train(state)
    print("gone on", flush=True)


def optimizers() -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf
    from horovod.common import elastic
    from horovod.tensorflow.util import tensorflow_variable

    keras = tf.keras  # Keras 3, or 2
    hvd.init()

    def trained(kind, chosen, folder: str, batches: int, built=False) -> list[np.ndarray]:
        """As in a process of its own."""
        os.environ["CHECKPOINT_DIR"] = str(FOLDER / folder)
        elastic._Script.states = 0
        elastic._Script.times.clear()
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(3, use_bias=False) for _ in range(2)]
        model, optimizer = keras.Sequential([keras.Input((3,)), *layers]), kind(0.1)
        variables = chosen(model)
        if built:
            optimizer.build(variables)
        state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

        @hvd.elastic.run
        def train(state) -> None:
            while state.batch < batches:
                x, y = rows(state.batch, 0)
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((model(x) - y) ** 2)
                    loss += tf.add_n([tf.reduce_sum(one**2) for one in variables])
                gradients = tape.gradient(loss, variables)
                # Those of tf.train take no variables of Keras 3.
                inner = [tensorflow_variable(one) for one in variables]
                optimizer.apply_gradients(zip(gradients, inner, strict=True))
                state.batch += 1
                state.commit()

        train(state)
        slots = optimizer.variables
        slots = slots() if callable(slots) else slots
        return [np.array(one) for one in (*model.weights, *slots)]

    kinds = [keras.optimizers.Adam, tf.compat.v1.train.AdamOptimizer]
    if keras.__name__.startswith("tf_keras"):
        kinds.append(keras.optimizers.legacy.Adam)
    choices = {
        "last": lambda model: model.layers[-1].trainable_variables,
        "reversed": lambda model: model.trainable_variables[::-1],
    }
    for number, kind in enumerate(kinds):
        for name, chosen in choices.items():
            folder = f"{name}-{number}"
            trained(kind, chosen, folder, 1)
            gone_on = trained(kind, chosen, folder, 3)
            whole = trained(kind, chosen, f"{folder}-whole", 3)
            assert all(map(np.array_equal, gone_on, whole)), (kind, name)
    factor = tf.Variable(1.0) if len(kinds) > 2 else keras.Variable(1.0)

    def beside(model):
        return [factor, *model.trainable_variables]

    trained(kinds[0], beside, "beside", 1)
    try:
        trained(kinds[0], beside, "beside", 2)
    except ValueError as error:
        print(error, flush=True)
    trained(kinds[0], beside, "built", 1, built=True)
    trained(kinds[0], beside, "built", 2, built=True)


def ahead() -> None:
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf
    from horovod.common import elastic

    hvd.init()
    for again in (False, True):
        elastic._Script.states = 0  # another start of the job
        elastic._Script.times.clear()
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(0.1)
        if again and hvd.rank() == 0:  # as one that is loaded
            optimizer.build(model.trainable_variables)
        state = hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0)

        @hvd.elastic.run
        def train(state, again=again, model=model, optimizer=optimizer) -> None:
            if again:
                momenta = [one.numpy().ravel() for one in optimizer.variables[2:]]
                first, second = np.split(hvd.allgather(tf.concat(momenta, 0)).numpy(), 2)
                assert state.batch == 1 and first.any() and np.array_equal(first, second)
                print("gone on", flush=True)
                return
            gradients = [tf.ones_like(one.value) for one in model.trainable_variables]
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            state.batch = 1
            state.commit()

        train(state)


def joins(where: str) -> None:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    v1 = tf.compat.v1
    hvd.init()
    with contextlib.ExitStack() as stack:
        session = None
        if where in ("session", "inline"):
            stack.enter_context(tf.Graph().as_default())
            config = v1.ConfigProto(inter_op_parallelism_threads=-1 if where == "inline" else 0)
            session = stack.enter_context(v1.Session(config=config))
        weight = v1.get_variable("weight", initializer=0.0, use_resource=True)

        def step():
            return weight.assign_add(hvd.allreduce(tf.constant(1.0), op=hvd.Sum))

        if session:
            session.run(weight.initializer)
            step, join = (functools.partial(session.run, one) for one in (step(), hvd.join()))
        elif where == "function":
            join = tf.function(lambda: hvd.join() + 0)
        else:
            join = functools.partial(tf.py_function, hvd.join, [], tf.int32)
        state = hvd.elastic.TensorFlowState([weight], session, batch=0)

        @hvd.elastic.run
        def train(state) -> None:
            batches = 2 if hvd.rank() == 0 else 6
            while state.batch < batches:
                step()
                state.batch += 1
                if hvd.rank() == 1:
                    with (FOLDER / "steps").open("a") as file:
                        file.write(f"{state.batch}\n")
                    if state.batch == 4 and once("asked"):
                        os.kill(os.getpid(), signal.SIGTERM)
                state.commit()
            try:
                last = join()
            except Exception as error:  # as of a script that tries again
                print(f"the op has failed: {error}", flush=True)
                raise
            assert last == 1

        train(state)


{
    "phases": phases,
    "session": session,
    "optimizers": optimizers,
    "ahead": ahead,
    **{
        f"joins-{where}": functools.partial(joins, where)
        for where in ("session", "inline", "function", "eagerly")
    },
}[WAY]()
