"""Handwritten digits with a script of TensorFlow 1, on as many ranks as the manifest starts.

Every rank runs this file. It differs from a script for one process in four places, marked (1)-(4).
The manifest says version 1.13, so `import tensorflow` gives the API of then on today's TensorFlow.
"""

import os
import sys

import numpy as np
import tensorflow as tf
from tensorflow.examples.tutorials.mnist import input_data

STEPS = 400
BATCH = 128  # over all ranks together: more ranks, smaller shares, the same training
SAVE_EVERY = 50
LEARNING_RATE = 0.002
KEEP = 0.75  # share of the units that dropout keeps


def folder(variable):
    path = os.environ.get(variable, "")
    if not os.path.isdir(path):
        sys.exit(f"{variable} is {path!r}, not a folder. The launcher sets it; by hand, export it.")
    return path


def weights(*shape):
    deviation = (2 / np.prod(shape[:-1])) ** 0.5
    return tf.Variable(tf.truncated_normal(shape, stddev=deviation))


def convolution(images, inputs, outputs):
    """5x5, then halved in height and width."""
    kernel, bias = weights(5, 5, inputs, outputs), tf.Variable(tf.zeros([outputs]))
    features = tf.nn.relu(tf.nn.conv2d(images, kernel, [1, 1, 1, 1], "SAME") + bias)
    return tf.nn.max_pool(features, [1, 2, 2, 1], [1, 2, 2, 1], "SAME")


def network(images, keep):
    """Logits [n, 10] for images [n, 784]."""
    features = convolution(tf.reshape(images, [-1, 28, 28, 1]), 1, 8)
    features = convolution(features, 8, 16)
    flat = tf.reshape(features, [-1, 7 * 7 * 16])
    hidden = tf.nn.relu(tf.matmul(flat, weights(7 * 7 * 16, 64)) + tf.Variable(tf.zeros([64])))
    hidden = tf.nn.dropout(hidden, keep)
    return tf.matmul(hidden, weights(64, 10)) + tf.Variable(tf.zeros([10]))


data_dir, result_dir = folder("DATA_DIR"), folder("RESULT_DIR")
checkpoint = os.path.join(result_dir, "mnist")
# One seed, so one order of the images on all ranks.
mnist = input_data.read_data_sets(data_dir, validation_size=0, seed=1)

x = tf.placeholder(tf.float32, [None, 784], name="x")
keepprob = tf.placeholder_with_default(1.0, [], name="keepprob")
pRes = tf.identity(network(x, keepprob), name="pRes")

# (1) The graph as it will be served, from x to pRes: written before `import ddl`, so without the
# training and without the ops by which ranks talk. Only rank 0 writes files.
if os.environ.get("OMPI_COMM_WORLD_RANK", "0") == "0":
    tf.train.export_meta_graph(checkpoint + "_basegraph.meta", as_text=True)

# (2) From here on optimizers average their gradients over all ranks.
import ddl  # noqa: E402

y = tf.placeholder(tf.int64, [None], name="y")
loss = tf.losses.sparse_softmax_cross_entropy(labels=y, logits=pRes)
accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(pRes, 1), y), tf.float32))
global_step = tf.train.get_or_create_global_step()
train = tf.train.AdamOptimizer(LEARNING_RATE).minimize(loss, global_step=global_step)
saver = tf.train.Saver(max_to_keep=None, save_relative_paths=True)

with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    newest = tf.train.latest_checkpoint(result_dir)
    if newest:  # this is a retry: go on where the last try stopped
        saver.restore(session, newest)
        if ddl.rank() == 0:
            print(f"goes on from step {session.run(global_step)}", flush=True)
    for step in range(session.run(global_step) + 1, STEPS + 1):
        # (3) All ranks draw the same batch, and each takes its own share.
        images, labels = mnist.train.next_batch(BATCH)
        share = slice(ddl.rank(), None, ddl.size())
        feed = {x: images[share], y: labels[share], keepprob: KEEP}
        _, loss_now, accuracy_now = session.run([train, loss, accuracy], feed)
        # (4) Rank 0 speaks and saves for all.
        if ddl.rank() == 0 and step % 10 == 0:
            print(f"step {step}/{STEPS} loss= {loss_now:.4f} accuracy= {accuracy_now:.4f}")
        if ddl.rank() == 0 and (step % SAVE_EVERY == 0 or step == STEPS):
            saver.save(session, checkpoint, global_step=step)
    if ddl.rank() == 0:
        result = session.run(accuracy, {x: mnist.test.images, y: mnist.test.labels})
        print(f"test accuracy= {result:.4f}")
