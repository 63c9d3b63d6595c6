"""As Horovod's older examples: `import keras`, a session of its own, a distributed optimizer.

Each rank makes weights of its own and says what they are after a broadcast, and after a training
that begins with others.
"""

import os
import shutil
import tempfile

import horovod.keras as hvd
import horovod.tensorflow as hvd_tf
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import tensorflow as tf
from horovod.common import elastic
from keras import backend as K
from speech import say

hvd.init()
K.set_session(tf.Session(config=tf.ConfigProto()))
np.random.seed(hvd.rank())
layers = [keras.layers.Dense(4, activation="relu", input_shape=(3,)), keras.layers.Dense(1)]
model = keras.models.Sequential(layers)


def say_weights(when: str) -> None:
    digits = [f"{one:.6f}" for array in model.get_weights() for one in array.flatten()]
    say(f"{when}: {keras.__version__} {' '.join(digits)}")


for number, front_end in enumerate((hvd, hvd_keras)):
    if number:
        model.set_weights([np.random.normal(size=one.shape) for one in model.get_weights()])
    # At first nothing has initialised the weights.
    front_end.broadcast_global_variables(0)
    say_weights("broadcast")
mean = hvd.allreduce(float(hvd.rank()))
say(f"allreduce: {type(mean).__module__} {mean}")
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
say_weights("trained")


def a_state_of_the_model_is_kept_and_shared() -> None:
    fresh = keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,))])
    fresh.compile(loss="mse", optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)))
    state = hvd.elastic.KerasState(fresh, batch=hvd.rank(), epoch=3)
    start = fresh.get_weights()
    fresh.fit(x, x.sum(1), batch_size=8, verbose=0)
    state.batch = 7
    state.restore()
    assert state.batch == hvd.rank()
    assert all(np.array_equal(*pair) for pair in zip(start, fresh.get_weights(), strict=True))
    fresh.set_weights([np.full(one.shape, hvd.rank() + 1.0) for one in start])
    state.sync()
    assert (state.batch, state.epoch) == (0, 3)
    assert all((one == 1.0).all() for one in fresh.get_weights())
    fresh.fit(x, x.sum(1), batch_size=8, verbose=0)
    state.save()
    saved, slots = fresh.get_weights(), fresh.optimizer.get_weights()
    fresh.fit(x, x.sum(1), batch_size=8, verbose=0)
    state.restore()
    assert all(np.array_equal(*pair) for pair in zip(saved, fresh.get_weights(), strict=True))
    restored = fresh.optimizer.get_weights()
    assert all(np.array_equal(*pair) for pair in zip(slots, restored, strict=True))


def gradients_of_several_passes_are_added_up_first() -> None:
    factor, total = hvd.rank() + 1.0, sum(range(1, hvd.size() + 1))
    for width, op in ((1, hvd.Sum), (2, hvd.Average)):
        layers = [keras.layers.Dense(1, use_bias=width > 1, input_shape=(1,))]
        several = keras.models.Sequential(layers)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), op=op, backward_passes_per_step=2
        )
        several.compile(loss=lambda target, got: factor * got, optimizer=optimizer)
        several.set_weights([np.zeros(one.shape) for one in several.get_weights()])
        # Two steps of two passes, and one that waits for another.
        several.fit(np.ones([5, 1]), np.ones([5, 1]), batch_size=1, verbose=0)
        expected = -4 * total / (1 if op == hvd.Sum else hvd.size())
        assert all(np.allclose(one, expected) for one in several.get_weights())
        assert K.get_value(several.optimizer.iterations) == 5

    weight = tf.Variable(0.0, use_resource=True)
    step = tf.train.get_or_create_global_step()
    descent = hvd_tf.DistributedOptimizer(
        tf.train.GradientDescentOptimizer(1.0), op=hvd.Sum, backward_passes_per_step=2
    )
    train = descent.minimize(factor * weight, step, [weight])
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        for _ in range(5):
            session.run(train)
        assert session.run([weight, step]) == [-4 * total, 5]


def variables_of_no_layer_and_of_optimizers_of_tf_train_are_broadcast() -> None:
    scale, alone = (tf.Variable(hvd.rank() + 1.0, trainable=False) for _ in range(2))
    scaled = keras.layers.Lambda(lambda value: value * scale)
    own = keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,)), scaled])
    optimizer = hvd_tf.DistributedOptimizer(tf.train.AdamOptimizer(0.1))
    own.compile(loss="mse", optimizer=optimizer)
    K.get_session().run([scale.initializer, alone.initializer])
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=alone)
    own.fit(x, x.sum(1), batch_size=8, verbose=0, callbacks=[broadcast])
    assert K.get_session().run([scale, alone]) == [1.0, hvd.rank() + 1.0]
    moments = [optimizer.get_slot(own.layers[0].kernel, name) for name in ("m", "v")]
    of_all = hvd_tf.allgather(tf.stack([*moments, own.layers[0].kernel]))
    first, second = np.split(K.get_session().run(of_all), 2)
    assert np.array_equal(first, second) and first.any()


def moving_averages_follow_in_a_loop_of_the_scripts_own() -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        layer = hvd.SyncBatchNormalization(momentum=0.5)
        for once in (True, False):
            batch = tf.constant([[1.0 + hvd.rank()], [3.0 + hvd.rank()]])
            normalised = layer(batch, training=True)
            updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)
            assert len(updates) == (2 if once else 4), updates
        with tf.control_dependencies(updates):
            step = tf.reduce_sum(normalised)
        session.run(tf.global_variables_initializer())
        for _ in range(20):
            session.run(step)
        mean = 2.0 + (hvd.size() - 1) / 2
        assert np.isclose(session.run(layer.moving_mean), mean, atol=1e-3)


def a_rank_joins_when_the_op_is_run() -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        joined, reduced = hvd_tf.join(), hvd_tf.allreduce(tf.constant(2.0), op=hvd_tf.Sum)
        if hvd.rank() == 0:
            assert session.run(reduced) == 2.0
        last = session.run(joined)
        assert last.dtype == np.int32 and last in range(hvd.size())
        # What follows knows that all have.
        assert session.run(reduced) == 2.0 * hvd.size()


def variables_that_are_not_alike_on_all_ranks_stay_as_they_are() -> None:
    tf.train.get_or_create_global_step()  # which nobody initialises
    beside = tf.Variable(hvd.rank() + 1.0, name="beside")
    K.get_session().run(beside.initializer)
    if hvd.rank() == 0:  # to evaluate; its names are those of the others' next model
        keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,))]).predict(x)
    for wrapped in (False, True):
        own = keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,))])
        optimizer = keras.optimizers.Adam(0.1)
        if wrapped:
            optimizer = hvd_tf.DistributedOptimizer(tf.train.AdamOptimizer(0.1))
        own.compile(loss="mse", optimizer=optimizer)
        own.set_weights([one + hvd.rank() for one in own.get_weights()])
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        own.fit(x[:8], x[:8].sum(1), batch_size=8, verbose=0, callbacks=[broadcast])
        variables = [*own.weights, *optimizer.variables()]
        assert len(variables) > 4
        flat = tf.concat([tf.reshape(tf.cast(one, tf.float32), [-1]) for one in variables], 0)
        of_all = K.get_session().run(hvd_tf.allgather(flat, name=f"alike_{wrapped}"))
        assert np.array_equal(*np.split(of_all, 2)), of_all
    assert K.get_session().run(beside) == 1.0


def a_state_with_an_optimizer_of_tf_train_goes_on(*, given: bool) -> None:
    os.environ["CHECKPOINT_DIR"] = hvd_tf.broadcast_object(tempfile.mkdtemp(), 0, K.get_session())
    found = []
    for again in (False, True):
        elastic._Script.states = 0  # another start of the job
        elastic._Script.times.clear()
        own = keras.models.Sequential([keras.layers.Dense(1, input_shape=(3,))])
        optimizer = hvd_tf.DistributedOptimizer(tf.train.AdamOptimizer(0.1))
        own.compile(loss="mse", optimizer=optimizer)
        # Without the step that Keras counts, where the optimizer of tf.train is given itself.
        state = hvd_tf.elastic.TensorFlowKerasState(own, optimizer if given else None, batch=0)

        @hvd_tf.elastic.run
        def train(state, again=again, own=own):
            assert state.batch == again
            if not again:
                own.fit(x[:8], x[:8].sum(1), batch_size=8, verbose=0)
                state.batch = 1
                state.commit()

        train(state)
        variables = state._variables()  # those of the optimizer have other names
        assert len(variables) == (8 if given else 9), variables
        found.append(K.get_session().run(variables))
        own.fit(x[:8], x[:8].sum(1), batch_size=8, verbose=0)  # by those variables
        assert len(optimizer.variables()) == 6
    if hvd.rank() == 0:  # whose state it is
        assert all(map(np.array_equal, *found)), found
    shutil.rmtree(os.environ.pop("CHECKPOINT_DIR"), ignore_errors=True)


variables_of_no_layer_and_of_optimizers_of_tf_train_are_broadcast()
a_state_with_an_optimizer_of_tf_train_goes_on(given=False)
a_state_with_an_optimizer_of_tf_train_goes_on(given=True)
variables_that_are_not_alike_on_all_ranks_stay_as_they_are()
moving_averages_follow_in_a_loop_of_the_scripts_own()
a_rank_joins_when_the_op_is_run()
a_state_of_the_model_is_kept_and_shared()
gradients_of_several_passes_are_added_up_first()
