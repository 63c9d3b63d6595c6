"""Handwritten digits on as many ranks as the manifest starts, with Cray's deep learning plugin.

Every rank runs this file. It differs from a script for one process in six places, marked (1)-(6).
The manifest says version 1.13, so `import tensorflow` gives the API of then on today's TensorFlow.
"""

import os

import dl_comm as mc
import numpy as np
import tensorflow as tf
from tensorflow.examples.tutorials.mnist import input_data

STEPS = 500
BATCH = 128  # over all ranks together: more ranks, smaller shares, the same training
SAVE_EVERY = 100


def build_model():
    """Digits in, logits out: the graph as it will be served, from x to pRes."""
    x = tf.placeholder(tf.float32, [None, 784], name="x")
    w1 = tf.Variable(tf.truncated_normal([784, 64], stddev=0.05))
    b1 = tf.Variable(tf.zeros([64]))
    w2 = tf.Variable(tf.truncated_normal([64, 10], stddev=0.1))
    b2 = tf.Variable(tf.zeros([10]))
    hidden = tf.nn.relu(tf.matmul(x, w1) + b1)
    return x, tf.add(tf.matmul(hidden, w2), b2, name="pRes")


def averaged(value):
    """(5) A number, averaged over the ranks."""
    array = np.array([value], np.float32)
    mc.average(array)
    return array[0]


def main():
    data_dir, result_dir = os.environ["DATA_DIR"], os.environ["RESULT_DIR"]
    checkpoint = os.path.join(result_dir, "digits")
    x, logits = build_model()

    # (1) One team, and how large the model is.
    elements = sum(int(np.prod(v.get_shape().as_list())) for v in tf.trainable_variables())
    mc.init(1, 1, elements, "tensorflow")
    rank, size = mc.get_rank(), mc.get_nranks()
    # (2) A tenth of the steps wait for their gradients. Then, by a smooth transition, each applies
    # the gradients of the step before, whose communication hides behind the computation.
    mc.config_team(0, 1, STEPS // 10, STEPS, 1, 100)

    if rank == 0:  # only rank 0 writes files
        tf.train.export_meta_graph(checkpoint + "_basegraph.meta", as_text=True)

    y = tf.placeholder(tf.int64, [None], name="y")
    loss = tf.losses.sparse_softmax_cross_entropy(labels=y, logits=logits)
    accuracy = tf.reduce_mean(tf.to_float(tf.equal(tf.argmax(logits, 1), y)))
    global_step = tf.train.get_or_create_global_step()
    # Gradients of the step before need smaller steps: 0.05 will do where all are blocking. At 0.02
    # a start in 25 still ends below 0.9.
    optimizer = tf.train.MomentumOptimizer(0.01, 0.9)
    # (3) minimize() in two parts, with the communication between them.
    grads_and_vars = optimizer.compute_gradients(loss)
    grads = mc.gradients([gradient for gradient, _ in grads_and_vars], 0)
    train = optimizer.apply_gradients(
        [
            (gradient, variable)
            for gradient, (_, variable) in zip(grads, grads_and_vars, strict=True)
        ],
        global_step=global_step,
    )
    # (4) All ranks start from rank 0's values.
    new_vars = mc.broadcast(tf.global_variables(), 0)
    start = tf.group(*[tf.assign(v, new_vars[k]) for k, v in enumerate(tf.global_variables())])
    saver = tf.train.Saver(max_to_keep=None, save_relative_paths=True)
    # One seed, so one order of the images on all ranks.
    mnist = input_data.read_data_sets(data_dir, validation_size=0, seed=1)

    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        newest = tf.train.latest_checkpoint(result_dir)
        if newest and rank == 0:  # this is a retry: go on where the last try stopped
            saver.restore(session, newest)
        session.run(start)
        for step in range(session.run(global_step) + 1, STEPS + 1):
            # All ranks draw the same batch, and each takes its own share.
            images, labels = mnist.train.next_batch(BATCH)
            feed = {x: images[rank::size], y: labels[rank::size]}
            _, loss_now = session.run([train, loss], feed)
            if step % 10 == 0:
                loss_now = averaged(loss_now)
                if rank == 0:
                    print(f"step {step}/{STEPS} loss= {loss_now:.4f}")
            if rank == 0 and step % SAVE_EVERY == 0:
                saver.save(session, checkpoint, global_step=step)
        images, labels = mnist.test.images, mnist.test.labels
        count = len(images) // size * size  # each rank judges as many
        test = {x: images[rank:count:size], y: labels[rank:count:size]}
        test_accuracy = averaged(session.run(accuracy, test))
        if rank == 0:
            print(f"test accuracy= {test_accuracy:.4f}")
    # (6) All ranks end together.
    mc.finalize()


if __name__ == "__main__":
    main()
