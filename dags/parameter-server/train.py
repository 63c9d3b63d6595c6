"""Handwritten digits, trained by a master and workers whose variables are on parameter servers.

Every task runs this file. TF_CONFIG says which one it is: the parameter server waits to be asked,
master and workers train, each at its own pace, and the master evaluates when they are done.
"""

import os

import tensorflow as tf
from model import estimator
from tensorflow.contrib.learn.python.learn import Experiment, RunConfig, learn_runner
from tensorflow.examples.tutorials.mnist import input_data

STEPS = 1500  # of all tasks together
BATCH = 64

tf.logging.set_verbosity(tf.logging.INFO)  # the Estimator says its loss every 100 steps


mnist = input_data.read_data_sets(os.environ["DATA_DIR"], validation_size=0)


def batches(digits, epochs):
    """An input_fn over the training or the test images, so many times; None: without end."""
    return tf.estimator.inputs.numpy_input_fn(
        {"inputs": digits.images},
        digits.labels.astype("int64"),
        batch_size=BATCH,
        num_epochs=epochs,
        shuffle=epochs is None,
    )


def experiment(output_dir):
    """What learn_runner asks for; the estimator keeps its checkpoints there by itself."""
    config = RunConfig(save_checkpoints_steps=300)
    print(f"{config.task_type} {config.task_id}: train to step {STEPS} in {output_dir}", flush=True)
    return Experiment(
        estimator(config),
        train_input_fn=batches(mnist.train, None),
        eval_input_fn=batches(mnist.test, 1),
        train_steps=STEPS,
        eval_steps=None,  # all test images
    )


result = learn_runner.run(experiment, os.environ["EXPERIMENT_DIR"])
if isinstance(result, tuple):  # the master's: metrics, and exports of which there are none
    print(f"test accuracy= {result[0]['accuracy']:.4f}")
