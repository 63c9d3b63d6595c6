"""Rank 0 alone takes weights from a checkpoint; says, for each way to train, what ranks end with.

As scripts do that were written for one process, and look for a checkpoint in a folder of rank 0's.
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python import keras as keras_in_tensorflow

import ddl  # isort: skip  # noqa: F401
from ddl_ops import collectives, process_sets
from speech import RANK, say

SAVED = Path(tempfile.mkdtemp(), "model.ckpt")


def built():
    """Weights and a head, whose gradients are those of the rank's data, and what trains them."""
    weights = tf.get_variable("weights", [2], initializer=tf.zeros_initializer())
    spare = tf.get_variable("spare", [2], initializer=tf.zeros_initializer())
    step = tf.train.get_or_create_global_step()
    head = tf.get_variable("head", [2], initializer=tf.zeros_initializer())
    loss = tf.reduce_sum(weights**2 + weights * (RANK + 1.0) + head * RANK)
    optimizer = tf.train.MomentumOptimizer(0.1, 0.9)
    train = optimizer.minimize(loss, step, var_list=[weights, head])
    return train, [weights, step, optimizer.get_slot(weights, "momentum"), head, spare]


def saved():
    """A checkpoint after three steps, from other weights than initialisers give."""
    with tf.Graph().as_default(), tf.Session() as session:
        train, variables = built()
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            session.run(train)
        tf.train.Saver().save(session, str(SAVED))
        say(f"saved: {told(session, variables)}")


def told(session, variables):
    return [np.asarray(session.run(one)).tolist() for one in variables]


def restore(session, variables=None):
    if RANK == 0:
        tf.train.Saver(variables or tf.global_variables()).restore(session, str(SAVED))


class Restoring(tf.train.SessionRunHook):
    def begin(self):
        self.saver = tf.train.Saver()

    def after_create_session(self, session, coord):
        if RANK == 0:
            self.saver.restore(session, str(SAVED))


def alone():
    """What some ranks may do alone, and what is each rank's own, beside the steps."""
    with tf.Graph().as_default(), tf.Session() as session:
        own = tf.Variable([RANK + 1.0] * (RANK + 1), collections=[tf.GraphKeys.LOCAL_VARIABLES])
        train, variables = built()
        number = process_sets.add([0])
        set_sum = collectives.allreduce(variables[0], process_set=number)
        training = tf.placeholder(tf.bool)
        statistics = tf.cond(
            training, lambda: collectives.allreduce(variables[0]), lambda: variables[0] + 1
        )
        all_ranks = collectives.allreduce(tf.constant(1.0), name="ranks")
        say(f"before: {session.run(all_ranks)}")
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        restore(session)
        if RANK == 0:
            session.run(set_sum)
            session.run(statistics, {training: False})
        session.run(train)
        assert session.run(own).tolist() == [RANK + 1.0] * (RANK + 1)
        say(f"alone: {told(session, variables)}")


saved()
alone()
with tf.Graph().as_default(), tf.Session() as session:
    train, variables = built()
    session.run(tf.global_variables_initializer())
    restore(session)
    session.run(train)
    say(f"run: {told(session, variables)}")
with tf.Graph().as_default(), tf.Session() as session:
    train, variables = built()
    session.run(tf.global_variables_initializer())
    restore(session)
    session.make_callable(train)()
    say(f"callable: {told(session, variables)}")
with tf.Graph().as_default(), tf.Session() as session:
    train, variables = built()
    session.run(tf.global_variables_initializer())
    restore(session, variables[:1])
    session.run(train)
    say(f"weights alone: {told(session, variables)}")
with tf.Graph().as_default():
    train, variables = built()
    with tf.train.MonitoredTrainingSession(hooks=[Restoring()]) as session:
        session.run(train)
        say(f"monitored: {told(session, variables)}")
with tf.Graph().as_default(), tf.Session() as session:  # what is trained has a value, not the rest
    train, variables = built()
    session.run(
        tf.variables_initializer([one for one in tf.global_variables() if "spare" not in one.name])
    )
    session.run(train)
    say(f"partly: {told(session, variables[:4])}")
for kind in (keras, keras_in_tensorflow):
    model = kind.models.Sequential([kind.layers.Dense(1, input_shape=(2,))])
    model.compile(loss="mse", optimizer="sgd")
    for what in ("fit", "again"):
        if RANK == 0:
            model.set_weights([one + 1 for one in model.get_weights()])
        sys.stderr.write(f"ddl: rank {RANK}: {what}\n")
        model.fit(np.ones([8, 2]) * (RANK + 1), np.zeros([8, 1]), verbose=0)
        say(f"{what}: {[one.tolist() for one in model.get_weights()]}")
    model.fit(np.ones([8, 2]) * (RANK + 1), np.zeros([8, 1]), verbose=0)
