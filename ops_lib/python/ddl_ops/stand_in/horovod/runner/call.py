"""What each rank of horovod.run() runs: the function, whose result it leaves."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from ddl_ops.environment import PLACEMENT

folder = Path(sys.argv[1])
func, args, kwargs = pickle.loads((folder / "function").read_bytes())  # noqa: S301  our own
result = func(*args, **kwargs)
try:
    import cloudpickle as pickler
except ImportError:
    pickler = pickle
(folder / f"result-{PLACEMENT.rank}").write_bytes(pickler.dumps(result))
if PLACEMENT.rank == 0:
    (folder / "ranks").write_text(str(PLACEMENT.size))  # of this start, the last one
