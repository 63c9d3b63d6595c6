"""The newest checkpoint of the experiment becomes a SavedModel. Runs once, after the training."""

import os
import shutil

import tensorflow as tf
from model import estimator

result_dir = os.environ["RESULT_DIR"]
model_dir = os.path.join(result_dir, "model")


def receiver():
    """What is asked: images as they are in the files, scaled to 0..1."""
    images = tf.placeholder(tf.float32, [None, 784])
    return tf.estimator.export.ServingInputReceiver({"inputs": images}, {"inputs": images})


exported = estimator().export_savedmodel(os.path.join(result_dir, "exports"), receiver)
shutil.rmtree(model_dir, ignore_errors=True)  # of a try before this one
shutil.move(exported.decode(), model_dir)  # the Estimator names it after the time
shutil.rmtree(os.path.join(result_dir, "exports"))
print(f"{tf.train.latest_checkpoint(os.environ['EXPERIMENT_DIR'])} is the SavedModel {model_dir}")
