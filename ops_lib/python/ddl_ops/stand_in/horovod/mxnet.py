"""Horovod for MXNet, which is not here: importing this raises ImportError."""

raise ImportError(
    "ddl stands in for Horovod with TensorFlow and Keras, and has no horovod.mxnet. MXNet is "
    "retired. Install Horovod itself, which then is what ranks import."
)
