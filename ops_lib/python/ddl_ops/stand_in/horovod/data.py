"""Horovod's data loaders, which are not here: importing this raises ImportError."""

raise ImportError(
    "ddl stands in for Horovod with TensorFlow and Keras, and has no horovod.data. Read by "
    "tf.data, which loads ahead of the training (prefetch), and give each rank its part: "
    "dataset.shard(hvd.size(), hvd.rank()); or install Horovod itself."
)
