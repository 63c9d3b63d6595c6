"""For TensorFlow 1: trains to the end, and once more with an interruption; the weights must agree.

In the first try rank 1 is killed after the second checkpoint, which then is damaged as well.
"""

import os
import signal

import ddl
import numpy as np
import tensorflow as tf

STEPS, SAVE_EVERY, KILLED_AFTER = 30, 10, 25
rank, result_dir = ddl.rank(), os.environ["RESULT_DIR"]
reference = os.path.join(result_dir, f"uninterrupted-{rank}.npz")


def train(folder, killed):
    """The values of all variables in the end, those of the optimizer among them."""
    with tf.Graph().as_default():
        tf.set_random_seed(7)
        x = tf.placeholder(tf.float32, [None, 4])
        y = tf.placeholder(tf.float32, [None, 2])
        weights = tf.Variable(tf.truncated_normal([4, 2]))
        loss = tf.reduce_mean(tf.square(tf.matmul(x, weights) - y))
        global_step = tf.train.get_or_create_global_step()
        step = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=global_step)
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            newest = tf.train.latest_checkpoint(folder)
            if newest:
                saver.restore(session, newest)
            print("begins at", session.run(global_step))
            for done in range(session.run(global_step) + 1, STEPS + 1):
                rows = np.random.RandomState(done).rand(8, 6)[rank :: ddl.size()]
                session.run(step, {x: rows[:, :4], y: rows[:, 4:]})
                if rank == 0 and done % SAVE_EVERY == 0:
                    saver.save(session, os.path.join(folder, "model"), global_step=done)
                if killed and rank == 1 and done == KILLED_AFTER:
                    damaged = os.path.join(folder, "model-20.data-00000-of-00001")
                    os.truncate(damaged, os.path.getsize(damaged) // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
            return session.run(tf.global_variables())


first_try = not os.path.exists(reference)
if first_try:
    other = os.path.join(os.environ["JOB_STATE_DIR"], "uninterrupted")
    os.makedirs(other, exist_ok=True)
    np.savez(reference, *train(other, killed=False))
ended = train(result_dir, killed=first_try)
expected = np.load(reference)
same = [np.array_equal(expected[f"arr_{n}"], value) for n, value in enumerate(ended)]
print("the same weights:", len(same), all(same))
