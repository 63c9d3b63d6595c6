"""A short look at the links between hosts: ``mpirun … python -m ddl_ops.preflight``, one rank each.

Every two ranks sum something, several pairs at a time, and rank 0 says how fast it went: a line of
JSON with ``hosts`` (names by rank), ``pairs`` ([rank, rank, bytes per second] each), ``wrong``
(pairs whose sum was not right) and ``clocks`` (by how many seconds each is ahead of that of rank
0). mpi4py alone: TensorFlow would take longer to start than this.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

BYTES = 4 << 20
# Of a slow pair fewer: this is to be short.
_TIMES = 5
_LONGEST_S = 1.0


def rounds(size: int) -> Iterator[list[tuple[int, int]]]:
    """Every pair of ranks once, in rounds in which each rank has one partner at most.

    The circle method of round-robin tournaments: one stays, the others move on.
    """
    ranks: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    for _ in range(len(ranks) - 1):
        half = len(ranks) // 2
        met = zip(ranks[:half], reversed(ranks[half:]), strict=True)
        yield [
            (min(one, other), max(one, other))
            for one, other in met
            if one is not None and other is not None
        ]
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]


def measure(pair: Any, rank: int) -> tuple[float, bool]:
    """Sums with one other rank.

    Args:
        pair: a communicator of the two.
        rank: this one's number among all.

    Returns:
        Bytes per second of the fastest sum, and whether every sum was right.
    """
    mine = np.full(BYTES // 4, rank + 1, np.float32)
    total = np.empty_like(mine)
    best, right, since = 0.0, True, time.monotonic()
    for _ in range(_TIMES):
        pair.Barrier()
        began = time.monotonic()
        pair.Allreduce(mine, total)
        took = max(time.monotonic() - began, 1e-9)
        best = max(best, BYTES / took)
        other = pair.allgather(rank)
        right = right and bool((total == np.float32(sum(other) + 2)).all())
        # Both leave at the same time.
        if pair.bcast(time.monotonic() - since > _LONGEST_S):
            break
    return best, right


def clock_of(world: Any, rank: int) -> float:
    """Seconds by which a rank's clock is ahead of that of rank 0; 0 within what asking takes.

    Collective of the two.
    """
    if world.Get_rank() == rank:
        world.recv(source=0)
        world.send(time.time(), dest=0)
        return 0.0
    began = time.time()
    world.send(None, dest=rank)
    moment = world.recv(source=rank)
    return float(min(0.0, moment - began) + max(0.0, moment - time.time()))


def host_name() -> str:
    """Of Slurm the node's name: several may share a host, in a cluster to try things on."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def main() -> int:
    """Prints the line on rank 0; 0 if every sum was right."""
    from mpi4py import MPI  # starts MPI

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    clocks = {}
    for other in range(1, size):
        if rank in (0, other):
            clocks[other] = clock_of(world, other)
    found: list[tuple[int, int, float, bool]] = []
    for met in rounds(size):
        mine = next((pair for pair in met if rank in pair), None)
        if mine is not None:
            pair = world.Create_group(world.Get_group().Incl(list(mine)))
            speed, right = measure(pair, rank)
            pair.Free()
            if rank == mine[0]:
                found.append((*mine, speed, right))
        world.Barrier()
    told = world.gather((host_name(), found))
    if told is None:
        return 0
    pairs = [one for _, of_rank in told for one in of_rank]
    said = {
        "hosts": [host for host, _ in told],
        "pairs": [[one, other, speed] for one, other, speed, _ in pairs],
        "wrong": [[one, other] for one, other, _, right in pairs if not right],
        "clocks": [clocks.get(number, 0.0) for number in range(size)],
    }
    print(json.dumps(said), flush=True)
    return 1 if said["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
