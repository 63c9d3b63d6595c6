"""Processes that a rank starts. argv: the front-end, then how they are started."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

from speech import RANK, say

FRONT_END, HOW = sys.argv[1:3]

# As scripts do: children that are spawned run this again.
if FRONT_END == "ddl":
    import ddl as front
    import tensorflow as tf

    rank_and_size = front.rank, front.size

    def together() -> list[float]:
        return front.allreduce_n([tf.constant([1.0, RANK])], average=False)[0].numpy().tolist()
else:
    import dl_comm as front
    import numpy as np

    rank_and_size = front.get_rank, front.get_nranks

    def together() -> list[float]:
        array = np.array([1.0, RANK], np.float32)
        front.average(array)
        return (2 * array).tolist()


def refused() -> str:
    try:
        together()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "no error"


def load(number: int) -> str:
    """What a worker that loads data does, and what it must not."""
    if number == 1:
        raise LookupError(f"no sample {number}")
    return f"sample {number} for rank {rank_and_size[0]()} of {rank_and_size[1]()}, {refused()}"


def main() -> None:
    if FRONT_END == "dl_comm":
        front.init_mpi()
    say(f"total {together()}")
    if HOW == "os.fork":
        child = os.fork()
        if child == 0:
            say(f"child: {refused()}")
            raise LookupError("the child has had enough")
        say(f"child ended with {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    elif HOW == "subprocess":
        code = "import dl_comm; print(dl_comm.get_rank()); dl_comm.init_mpi()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        say(f"child: {done.returncode} {done.stdout} {done.stderr.splitlines()[-1]}")
    elif FRONT_END != "ddl" or RANK == 1:  # one child with TensorFlow is enough
        with multiprocessing.get_context(HOW).Pool(1) as pool:
            say(pool.apply(load, (0,)))
            try:
                pool.apply(load, (1,))
            except LookupError as error:
                say(f"LookupError: {error}")
            say(pool.apply(load, (2,)))
    say(f"total {together()}")
    say("end of script")


if __name__ == "__main__":
    main()
