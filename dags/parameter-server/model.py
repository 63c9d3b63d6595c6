"""The model, for training, evaluation and serving."""

import os

import tensorflow as tf


def model_fn(features, labels, mode):
    """Two layers over images of 784 pixels in 0..1."""
    hidden = tf.layers.dense(features["inputs"], 64, tf.nn.relu)
    logits = tf.layers.dense(hidden, 10)
    classes = tf.argmax(logits, 1)
    scores = tf.nn.softmax(logits)
    if mode == tf.estimator.ModeKeys.PREDICT:
        output = tf.estimator.export.PredictOutput
        images = {"class_index": classes, "scores": scores}
        return tf.estimator.EstimatorSpec(
            mode,
            predictions=images,
            export_outputs={
                "predict_images": output(images),
                "serving_default": output({"classes": classes, "scores": scores}),
            },
        )
    loss = tf.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
    optimizer = tf.train.AdagradOptimizer(0.05)
    return tf.estimator.EstimatorSpec(
        mode,
        loss=loss,
        train_op=optimizer.minimize(loss, global_step=tf.train.get_global_step()),
        eval_metric_ops={"accuracy": tf.metrics.accuracy(labels, classes)},
    )


def estimator(config=None):
    """Goes on from the checkpoints in EXPERIMENT_DIR, if there are any."""
    return tf.estimator.Estimator(model_fn, os.environ["EXPERIMENT_DIR"], config)
