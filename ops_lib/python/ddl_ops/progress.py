"""Progress lines for whoever started the job: JSON, appended by rank 0 to the file DDL_PROGRESS."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import time
from collections.abc import Mapping
from typing import Any

from ddl_ops.environment import read_placement

_COUNTS = frozenset({"step", "steps", "epoch"})


def whole_steps(step: Any, of: str) -> int:
    """The number of steps that a script has given, which may be NumPy's or TensorFlow's.

    Args:
        step: given.
        of: what it was given, as "ddl.end_of_step".

    Raises TypeError unless it is a whole number.
    """
    value = step.numpy() if hasattr(step, "numpy") else step
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{of}({step!r}): give it the number of steps done, a whole number.")


def append(values: Mapping[str, float | None], *, source: str) -> None:
    """Appends one line {"t": unix seconds, "source": source, values...}.

    Args:
        values: numbers or 0-d arrays by name; None is left out. `step`, `steps` (the total) and
            `epoch` become integers, all else floats. NaN and infinities, which JSON has not, become
            "NaN", "Infinity" and "-Infinity".
        source: who writes: ops, keras, metrics or script.

    Does nothing on ranks above 0 or without DDL_PROGRESS. Raises OSError if the file cannot be
    written, TypeError or ValueError if a value is not a number.
    """
    path = os.environ.get("DDL_PROGRESS")
    if not path or read_placement().rank != 0:
        return
    line: dict[str, str | int | float | None] = {"t": round(time.time(), 3), "source": source}
    for name, value in values.items():
        if value is None:
            continue
        if name in _COUNTS:
            line[name] = int(value) if math.isfinite(value) else None
        else:
            line[name] = float(value) if math.isfinite(value) else _word(value)
    # Several writers append to this file: one write each keeps lines whole.
    encoded = (json.dumps(line) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, encoded)
    finally:
        os.close(descriptor)


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
