"""tensorflow.contrib.mpi_collectives.python.ops."""
