"""One rank of a training: `python -m benchmarks.scaling.train_rank MODEL BATCH STEPS ROUNDS`.

Rank 0 prints `step SECONDS GRADIENT_BYTES` for each round, the step of the slowest rank.
"""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf  # noqa: TID253
from mpi4py import MPI  # noqa: TID253

from benchmarks.training.train_rank import Training

v1 = tf.compat.v1


def main() -> None:
    model, batch, steps, rounds = sys.argv[1], *map(int, sys.argv[2:5])
    tf.get_logger().setLevel("ERROR")
    v1.disable_v2_behavior()
    v1.set_random_seed(1)
    import ddl  # DDL_OPTIONS is set: hooks the optimizers and the initialisers

    training = Training(model, batch, ddl.rank(), lambda optimizer: optimizer, None)
    nbytes = sum(4 * int(np.prod(one.shape.as_list())) for one in v1.trainable_variables())
    digests = set()
    for number in range(rounds + 1):
        answer = training.answer({"steps": steps})
        slowest = MPI.COMM_WORLD.allreduce(answer["seconds"], MPI.MAX)
        digests = set(MPI.COMM_WORLD.allgather(answer["weights"]))
        if len(digests) > 1:
            raise RuntimeError("the ranks' weights differ")
        if ddl.rank() == 0 and number:  # the first one warms up
            print("step", slowest / steps, nbytes, flush=True)


if __name__ == "__main__":
    main()
