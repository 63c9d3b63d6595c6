"""tensorflow.contrib.mpi_collectives.python.ops.mpi_ops: where the ops were defined."""

from tensorflow.contrib.mpi_collectives import (
    _allreduce,
    allgather,
    init,
    local_rank,
    rank,
    size,
)

__all__ = ["_allreduce", "allgather", "init", "local_rank", "rank", "size"]
