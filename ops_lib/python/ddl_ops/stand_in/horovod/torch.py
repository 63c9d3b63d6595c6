"""Horovod for PyTorch, which is not here: importing this raises ImportError."""

raise ImportError(
    "ddl stands in for Horovod with TensorFlow and Keras, and has no horovod.torch. Start "
    "PyTorch's DistributedDataParallel with torchrun, or install Horovod itself."
)
