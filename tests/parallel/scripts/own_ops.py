"""What a script with a `ddl.py` of its own does: 2018's library by name, TensorFlow 1's API.

Its variables are there before the library is. The ranks seed differently, so equal starts are the
compatibility layer's doing. At the end rank 1 raises.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import tensorflow as tf
from ddl_ops import averaging
from speech import RANK, SIZE, say

tf.set_random_seed(RANK + 1)
early = tf.get_variable("early", [5, 3], initializer=tf.random_normal_initializer())
early_local = tf.Variable(float(RANK), collections=[tf.GraphKeys.LOCAL_VARIABLES])

ddl_mdr = tf.load_op_library("ddl_MDR.so")
with tf.Session() as session:
    topology = session.run(ddl_mdr.init(RANK, mode="-mode p"))
say(f"init: {[int(value) for value in topology]}")

original = tf.Variable.__init__
broadcast = []


def with_broadcast(self, *args, **kwargs):
    if kwargs.get("trainable"):
        with tf.control_dependencies(broadcast[-1:]), tf.device("/gpu:0"):
            kwargs["initial_value"] = ddl_mdr.bcast(kwargs["initial_value"])
        broadcast.append(kwargs["initial_value"])
    original(self, *args, **kwargs)


tf.Variable.__init__ = with_broadcast
late = tf.Variable(tf.random_normal([4]))
tf.Variable.__init__ = original
assert len(broadcast) == 1

with tf.Session() as session:
    session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
    say(f"starts: {np.concatenate([v.ravel() for v in session.run([early, late])]).tolist()}")
    say(f"local: {session.run(early_local)}")
    rows = tf.fill([3], float(RANK))
    (average,) = session.run(ddl_mdr.all_reduce_n([rows], op="avg"))
    (total,) = session.run(ddl_mdr.all_reduce_n([rows + 1], op="sum"))
    say(f"reduced: {(average.tolist(), total.tolist())}")
    assert averaging._facts["averaged"]
    if importlib.util.find_spec("tf_keras"):
        model = tf.keras.Sequential([tf.keras.layers.Dense(3, input_shape=(2,))])
        say(f"keras: {model.get_weights()[0].tolist()}")
    else:
        say("keras: not installed")
    assert total[0] == SIZE * (SIZE + 1) / 2
    if RANK == 1:
        raise LookupError("rank 1 ends here")
    session.run(ddl_mdr.all_reduce_n([rows], op="avg"))  # for which nobody else comes
