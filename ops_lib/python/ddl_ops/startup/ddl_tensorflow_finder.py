"""Imports TensorFlow in less time. A module beside sitecustomize, whose folder is on the path."""

from __future__ import annotations

import gc
import importlib.util
import io
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class TensorFlowFinder(MetaPathFinder):
    """Finds tensorflow where the others do, once, and has it imported without the collector.

    The import makes half a million objects that stay. To look through them again and again takes
    0.6 s of its 2.7 s, and a second when the process ends.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _UncollectedLoader(spec.loader)
        return spec


class _UncollectedLoader(Loader):
    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        module.__loader__ = self._real
        if not gc.isenabled():  # the script has its own idea
            self._real.exec_module(module)
            return
        # Frozen, a file of the script's that is part of a cycle would not be flushed at the end.
        freeze = not any(_is_written(it) for it in gc.get_objects())
        gc.disable()
        try:
            self._real.exec_module(module)
            if freeze:
                gc.freeze()
        finally:
            gc.enable()


def _is_written(it: object) -> bool:
    # Of the type alone: a proxy, as weakref has them, would be asked for what it stands for.
    if not issubclass(type(it), io.IOBase):
        return False
    try:
        return it.writable() and it.fileno() > 2  # type: ignore[attr-defined]
    except Exception:  # closed, no file, or a class of the script's own
        return False
