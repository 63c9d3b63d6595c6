"""The base graph and the newest checkpoint become a SavedModel. Runs once, after the training.

Without this command in the manifest the built-in transform would do the same.
"""

import os
import shutil

import tensorflow as tf

result_dir = os.environ["RESULT_DIR"]
export_dir = os.path.join(result_dir, "model")
constants = tf.saved_model.signature_constants

restorer = tf.train.import_meta_graph(os.path.join(result_dir, "mnist_basegraph.meta"))
graph = tf.get_default_graph()
images, logits = graph.get_tensor_by_name("x:0"), graph.get_tensor_by_name("pRes:0")
classes = tf.argmax(logits, 1)


def signature(images_name, classes_name, method):
    info = tf.saved_model.utils.build_tensor_info
    return tf.saved_model.signature_def_utils.build_signature_def(
        inputs={images_name: info(images)},
        outputs={classes_name: info(classes), "scores": info(tf.nn.softmax(logits))},
        method_name=method,
    )


shutil.rmtree(export_dir, ignore_errors=True)  # of a try before this one
with tf.Session() as session:
    checkpoint = tf.train.latest_checkpoint(result_dir)
    restorer.restore(session, checkpoint)
    builder = tf.saved_model.builder.SavedModelBuilder(export_dir)
    builder.add_meta_graph_and_variables(
        session,
        [tf.saved_model.tag_constants.SERVING],
        signature_def_map={
            "predict_images": signature("images", "class_index", constants.PREDICT_METHOD_NAME),
            constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY: signature(
                constants.CLASSIFY_INPUTS,
                constants.CLASSIFY_OUTPUT_CLASSES,
                constants.CLASSIFY_METHOD_NAME,
            ),
        },
        clear_devices=True,
    )
    builder.save()
print(f"{os.path.basename(checkpoint)} is the SavedModel in {export_dir}")
