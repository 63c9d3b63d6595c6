"""tensorflow.contrib.mpi_collectives.python."""
