"""What scripts with elastic states and without a framework share.

Their first argument is a folder: rank 0 appends to `told` in it.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
from ddl_ops import arrays
from ddl_ops.environment import PLACEMENT

FOLDER = Path(sys.argv[1])
RANK, SIZE = PLACEMENT.rank, PLACEMENT.size


def of_rank_0(value):
    """As hvd.broadcast_object; rank 0 keeps its own object."""
    data = np.zeros(4096, np.uint8)
    if RANK == 0:
        said = pickle.dumps(value)
        data[: len(said)] = np.frombuffer(said, np.uint8)
    if SIZE > 1:
        arrays.broadcast([data], 0)
    return value if RANK == 0 else pickle.loads(data.tobytes())


def tell(*words: object) -> None:
    if RANK == 0:
        with (FOLDER / "told").open("a") as file:
            print(*words, file=file)
