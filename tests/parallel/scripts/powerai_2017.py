"""A script as of the first PowerAI: Init takes a number of GPUs, and gives three values.

And one as later scripts have it, which unpack five values of it.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from speech import SIZE, say

ddl = tf.load_op_library("/opt/DL/ddl-tensorflow/lib/ddl_MDR.so")
config = tf.ConfigProto()
config.gpu_options.allow_growth = True
with tf.Session(config=config) as session, tf.device("/cpu:0"):
    rank, size, gpuid = session.run(ddl.init(4, mode="-mode r:4 -dump_iter 100"))
    say(f"init: {[int(value) for value in (rank, size, gpuid)]}")
    # How many GPUs each host uses, as some gave it that was then the GPU of a rank.
    five = session.run(ddl.init(SIZE, mode="-mode r:4"))
    rank, size, local_rank, local_size, gpuid = five
    say(f"later: {[int(value) for value in (rank, size, local_rank, local_size, gpuid)]}")
    first, *others = session.run(ddl.init(0, "-mode r:4"))
    say(f"its own: {len(others)} {five.local_size} {session.run(ddl.init(0, mode='').local_gpuid)}")

with tf.device(f"/gpu:{gpuid}"):
    w = tf.Variable(ddl.bcast(tf.random_normal([4, 1], seed=int(rank))))
    x = tf.constant(np.full([3, 4], rank + 1, np.float32))
    optimizer = tf.train.GradientDescentOptimizer(0.01)
    grads, variables = zip(*optimizer.compute_gradients(tf.reduce_mean(x @ w)), strict=True)
    train = optimizer.apply_gradients(
        zip(ddl.all_reduce_n(grads, op="avg"), variables, strict=True)
    )
with tf.Session(config=config) as session:
    session.run(tf.global_variables_initializer())
    for _ in range(3):
        session.run(train)
    say(f"trained: {session.run(w).ravel().tolist()}")
