"""What horovod.keras and horovod.tensorflow.keras share: of Keras 3, and of Keras 2 (tf_keras)."""
