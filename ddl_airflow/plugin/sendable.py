"""What files of trainings say, as JSON can have it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddl_airflow.core.metrics import spelled


def sendable(said: Any) -> Any:
    """The same as JSON has it: no NaN, no infinity, no half of a character."""
    if isinstance(said, str):
        return said.encode("utf-8", "replace").decode("utf-8")
    if isinstance(said, float) and not math.isfinite(said):
        return spelled(said)
    if isinstance(said, Mapping):
        return {sendable(str(name)): sendable(one) for name, one in said.items()}
    if isinstance(said, list | tuple):
        return [sendable(one) for one in said]
    return said
