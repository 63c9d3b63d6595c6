"""Horovod for Ray, which is not here: importing this raises ImportError."""

raise ImportError(
    "ddl stands in for Horovod with TensorFlow and Keras, and has no horovod.ray. Start the "
    "ranks with ddl-run or from a manifest (docs/coming-from-horovod.md), which need no "
    "cluster of Ray; or install Horovod itself."
)
