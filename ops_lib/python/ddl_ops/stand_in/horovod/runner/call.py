"""What each rank of horovod.run() runs: the function, whose result it leaves."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import cloudpickle
from ddl_ops.environment import PLACEMENT

folder = Path(sys.argv[1])
func, args, kwargs = pickle.loads((folder / "function").read_bytes())  # noqa: S301  our own
# sys.argv tells elastic states apart: this folder, another in each call, must not be in it.
del sys.argv[1]
result = func(*args, **kwargs)
(folder / f"result-{PLACEMENT.rank}").write_bytes(cloudpickle.dumps(result))
if PLACEMENT.rank == 0:
    (folder / "ranks").write_text(str(PLACEMENT.size))  # of this start, the last one
