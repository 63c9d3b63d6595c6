"""tensorflow.contrib.mpi: what mpi_collectives was before it became part of TensorFlow.

Source: baidu-research/tensorflow-allreduce.
"""

from tensorflow import ConfigProto, Graph
from tensorflow.contrib import mpi_collectives
from tensorflow.contrib.mpi_collectives import (
    DistributedOptimizer,
    allgather,
    allreduce,
    init,
    local_rank,
    rank,
    size,
)


class Session(mpi_collectives.Session):
    """mpi_collectives.Session that is told its GPU first: mpi.Session(local_rank)."""

    def __init__(
        self,
        gpu: int | None = None,
        target: str = "",
        graph: Graph | None = None,
        config: ConfigProto | None = None,
    ) -> None:
        """As mpi_collectives.Session; `gpu` is the index of the GPU to use."""
        chosen = ConfigProto()
        if config is not None:
            chosen.CopyFrom(config)
        if gpu is not None:
            chosen.gpu_options.visible_device_list = str(gpu)
        super().__init__(target, graph, chosen)
