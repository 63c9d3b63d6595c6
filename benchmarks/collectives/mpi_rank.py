"""One rank of a job of mpis.py: `python -m benchmarks.collectives.mpi_rank LIBRARY`."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from benchmarks import turns

_ROOM = 512


def main() -> None:
    """Answers {"op", "ours", "nbytes", "calls", "buffers"} with {"seconds"}, until the end."""
    library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
    numbers = [ctypes.c_int, ctypes.c_int64, ctypes.c_int, ctypes.c_int]
    library.BenchMeasure.argtypes = [ctypes.c_char_p, *numbers]
    library.BenchMeasure.restype = ctypes.c_double
    version = ctypes.create_string_buffer(_ROOM)
    rank = library.BenchStart(version, _ROOM)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        words = (request[name] for name in ("ours", "nbytes", "calls", "buffers"))
        return {"seconds": library.BenchMeasure(request["op"].encode(), *words)}

    first_line = version.value.decode().splitlines()[0]
    turns.serve(rank, {"MPI": first_line}, answer)
    library.BenchEnd()


if __name__ == "__main__":
    main()
