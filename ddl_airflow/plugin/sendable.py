"""What files of trainings say, as JSON can have it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddl_airflow.core.metrics import spelled

_LARGEST = 2**53 - 1


def sendable(said: Any) -> Any:
    """The same as JavaScript's JSON has it: no NaN, no infinity, no half of a character.

    A whole number of more than 53 bits is a text, for a browser would round it.
    """
    if isinstance(said, str):
        return said.encode("utf-8", "replace").decode("utf-8")
    if isinstance(said, float) and not math.isfinite(said):
        return spelled(said)
    if isinstance(said, int) and abs(said) > _LARGEST:
        return str(said)
    if isinstance(said, Mapping):
        return {sendable(str(name)): sendable(one) for name, one in said.items()}
    if isinstance(said, list | tuple):
        return [sendable(one) for one in said]
    return said
