"""Handwritten digits on as many ranks as the manifest starts, with tensorflow.contrib's MPI.

Every rank runs this file. It differs from a script for one process in five places, marked (1)-(5).
The manifest says version 1.13, so `import tensorflow` gives the API of then on today's TensorFlow.
"""

import os

import tensorflow as tf
from tensorflow.contrib import mpi_collectives as mpi
from tensorflow.examples.tutorials.mnist import input_data

STEPS = 300
BATCH = 128  # over all ranks together: more ranks, smaller shares, the same training
SAVE_EVERY = 100

data_dir, result_dir = os.environ["DATA_DIR"], os.environ["RESULT_DIR"]
checkpoint = os.path.join(result_dir, "digits")

# (1) Who am I? In a graph of its own, so that the model's holds nothing of it.
with tf.Graph().as_default(), mpi.Session() as session:
    rank, size = session.run([mpi.rank(), mpi.size()])

# One seed, so one order of the images on all ranks.
mnist = input_data.read_data_sets(data_dir, validation_size=0, seed=1)

x = tf.placeholder(tf.float32, [None, 784], name="x")
w1 = tf.Variable(tf.truncated_normal([784, 64], stddev=0.05))
b1 = tf.Variable(tf.zeros([64]))
w2 = tf.Variable(tf.truncated_normal([64, 10], stddev=0.1))
b2 = tf.Variable(tf.zeros([10]))
hidden = tf.nn.relu(tf.matmul(x, w1) + b1)
logits = tf.add(tf.matmul(hidden, w2), b2, name="pRes")

# The graph as it will be served, from x to pRes: before what trains. Only rank 0 writes files.
if rank == 0:
    tf.train.export_meta_graph(checkpoint + "_basegraph.meta", as_text=True)

y = tf.placeholder(tf.int64, [None], name="y")
loss = tf.losses.sparse_softmax_cross_entropy(labels=y, logits=logits)
global_step = tf.train.get_or_create_global_step()
# (2) Gradients are averaged over the ranks.
optimizer = mpi.DistributedOptimizer(tf.train.MomentumOptimizer(0.05, 0.9))
train = optimizer.minimize(loss, global_step=global_step)
# (3) The loss of the whole batch, to print: no gradient flows through it.
average_loss = mpi.allreduce(loss)
# (4) Each rank judges its share of the test images, and has the verdicts on all of them.
accuracy = tf.reduce_mean(mpi.allgather(tf.to_float(tf.equal(tf.argmax(logits, 1), y))))
saver = tf.train.Saver(max_to_keep=None, save_relative_paths=True)

with mpi.Session() as session:
    session.run(tf.global_variables_initializer())  # ends with rank 0's values
    newest = tf.train.latest_checkpoint(result_dir)
    if newest:  # this is a retry: go on where the last try stopped
        saver.restore(session, newest)
    for step in range(session.run(global_step) + 1, STEPS + 1):
        # (5) All ranks draw the same batch, and each takes its own share.
        images, labels = mnist.train.next_batch(BATCH)
        feed = {x: images[rank::size], y: labels[rank::size]}
        _, loss_now = session.run([train, average_loss], feed)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{STEPS} loss= {loss_now:.4f}")
        if rank == 0 and step % SAVE_EVERY == 0:
            saver.save(session, checkpoint, global_step=step)
    test = {x: mnist.test.images[rank::size], y: mnist.test.labels[rank::size]}
    test_accuracy = session.run(accuracy, test)
    if rank == 0:
        print(f"test accuracy= {test_accuracy:.4f}")
