"""Handwritten digits, as a script for FfDL is written: its files come as arguments.

FfDL left it to the script to bring its learners together; `import ddl` does.
"""

import argparse
import gzip
import os

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
for name in ("images", "labels", "test-images", "test-labels"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--iterations", type=int, default=300)
args = parser.parse_args()
checkpoint = os.path.join(os.environ["RESULT_DIR"], "digits")
BATCH, SAVE_EVERY = 128, 100


def images(path):
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 784) / np.float32(255)


def labels(path):
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)


train, train_labels = images(args.images), labels(args.labels)
x = tf.placeholder(tf.float32, [None, 784], name="x")
w1 = tf.Variable(tf.truncated_normal([784, 64], stddev=0.05))
b1 = tf.Variable(tf.zeros([64]))
w2 = tf.Variable(tf.truncated_normal([64, 10], stddev=0.1))
b2 = tf.Variable(tf.zeros([10]))
logits = tf.add(tf.matmul(tf.nn.relu(tf.matmul(x, w1) + b1), w2), b2, name="pRes")

import ddl  # noqa: E402  # after the graph as it will be served, before the optimizer

learner, learners = ddl.rank(), ddl.size()
if learner == 0:
    tf.train.export_meta_graph(checkpoint + "_basegraph.meta", as_text=True)

y = tf.placeholder(tf.int64, [None], name="y")
loss = tf.losses.sparse_softmax_cross_entropy(labels=y, logits=logits)
step_now = tf.train.get_or_create_global_step()
step = tf.train.MomentumOptimizer(0.05, 0.9).minimize(loss, global_step=step_now)
accuracy = tf.reduce_mean(tf.to_float(tf.equal(tf.argmax(logits, 1), y)))
saver = tf.train.Saver(max_to_keep=None, save_relative_paths=True)

with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    newest = tf.train.latest_checkpoint(os.environ["RESULT_DIR"])
    if newest:  # this is a retry: go on where the last try stopped
        saver.restore(session, newest)
    for done in range(session.run(step_now) + 1, args.iterations + 1):
        # All learners draw the same batch, and each takes its own share.
        rows = np.random.RandomState(done).randint(len(train), size=BATCH)[learner::learners]
        _, loss_now = session.run([step, loss], {x: train[rows], y: train_labels[rows]})
        if learner == 0 and done % 10 == 0:
            print(f"Step {done} of {args.iterations}, loss= {loss_now:.4f}")
        if learner == 0 and done % SAVE_EVERY == 0:
            saver.save(session, checkpoint, global_step=done)
    test = {x: images(args.test_images), y: labels(args.test_labels)}
    test_accuracy = session.run(accuracy, test)
    if learner == 0:
        print(f"Test accuracy= {test_accuracy:.4f}")
