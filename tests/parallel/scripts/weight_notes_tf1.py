"""Three ways in which a script of TensorFlow 1 takes steps; rank 0 notes the weights of each."""

import ddl
import tensorflow as tf


def steps(name, counted):
    """One variable that grows by what ranks average, and its training op."""
    weights = tf.get_variable(name, [2], initializer=tf.zeros_initializer())
    loss = tf.reduce_sum(weights) * (ddl.rank() + 1.0)
    counter = tf.train.get_or_create_global_step() if counted else None
    optimizer = tf.train.GradientDescentOptimizer(0.5)
    return loss, optimizer.minimize(loss, global_step=counter)


with tf.Graph().as_default(), tf.Session() as session:
    loss, train = steps("counted", True)
    session.run(tf.global_variables_initializer())
    for _ in range(3):
        session.run({"trained": train, "more": [loss]})
        session.run(loss)
with tf.Graph().as_default(), tf.Session() as session:
    _, train = steps("by_itself", False)
    session.run(tf.global_variables_initializer())
    session.run(train)
    session.run("GradientDescent")
with tf.Graph().as_default():
    _, train = steps("monitored", True)
    stop = tf.train.StopAtStepHook(last_step=2)
    said = tf.train.LoggingTensorHook(["monitored"], every_n_iter=10)
    with tf.train.MonitoredTrainingSession(hooks=[ddl.EpochHook(), said, stop]) as session:
        while not session.should_stop():
            session.run(train)
