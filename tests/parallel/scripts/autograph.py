"""Which functions AutoGraph rewrites."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorflow.python.autograph.impl import api


@contextmanager
def rewritten() -> Iterator[list[str]]:
    """The modules of the functions that AutoGraph has rewritten within, one for each function."""
    modules: list[str] = []
    convert = api._convert_actual

    def noted(entity: Any, context: Any) -> Any:
        modules.append(entity.__module__)
        return convert(entity, context)

    api._convert_actual = noted
    try:
        yield modules
    finally:
        api._convert_actual = convert
