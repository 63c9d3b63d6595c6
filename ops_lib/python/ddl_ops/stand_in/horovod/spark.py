"""Horovod for Spark, which is not here: importing this raises ImportError."""

raise ImportError(
    "ddl stands in for Horovod with TensorFlow and Keras, and has no horovod.spark. Export "
    "the data frames to files, and train from a manifest or with ddl-run (docs/coming-from- "
    "horovod.md); or install Horovod itself."
)
