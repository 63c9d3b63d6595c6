"""Catches the import of tensorflow, in a process that runs a TensorFlow 1 script.

Standard library only: it is there before the script's first line.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ddl_ops.tf1 import gone


def install() -> None:
    """From here on `import tensorflow` gives the 1.x API. Raises RuntimeError if it comes late."""
    if "tensorflow" in sys.modules:
        raise RuntimeError("tensorflow is already imported: its 1.x API must be asked for before.")
    sys.meta_path.insert(0, _Finder())


@contextmanager
def tensorflow_2() -> Iterator[None]:
    """Inside, `import tensorflow` gives TensorFlow itself: for packages that expect it."""
    facade = sys.modules["tensorflow"]
    sys.modules["tensorflow"] = facade.tensorflow_itself
    try:
        yield
    finally:
        sys.modules["tensorflow"] = facade


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "keras" and gone.has_legacy():  # it meant Keras 2 then
            return importlib.util.spec_from_loader(name, _Known("tf_keras.api._v1.keras"))
        if name == "learn_runner" and PathFinder.find_spec(name, path, target) is None:
            # Scripts for Experiments had it beside them, or in TensorFlow.
            known = _Known("tensorflow.contrib.learn.python.learn.learn_runner")
            return importlib.util.spec_from_loader(name, known)
        if name == "tensorflow":
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
            return spec
        facade = sys.modules.get("tensorflow")
        # While TensorFlow itself is being imported, its modules are what they are.
        if name.startswith("tensorflow.") and hasattr(facade, "tensorflow_itself"):
            return _find_in_facade(name, path)
        return None


def _find_in_facade(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Where the module is, if not where Python would look. Raises ImportError if it is gone."""
    found = PathFinder.find_spec(name, path)
    reason = None if gone.has_legacy() else gone.needs_legacy(name)
    if found is None:
        reason = reason or gone.left(name)
    if reason is not None:
        raise ImportError(reason, name=name)
    own = f"tensorflow._api.v2.compat.v1.{name.removeprefix('tensorflow.')}"
    if own in sys.modules and (found is None or "/_api/v2/" in (found.origin or "")):
        return importlib.util.spec_from_loader(name, _Known(own))
    return found


class _Loader(Loader):
    """Loads TensorFlow as ever, and then puts its 1.x face into sys.modules."""

    def __init__(self, real: Loader) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _choosing_keras_2():
            self._real.exec_module(module)
            from ddl_ops.tf1.facade import TensorFlow1

            sys.modules["tensorflow"] = TensorFlow1(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


@contextmanager
def _choosing_keras_2() -> Iterator[None]:
    """TensorFlow asks the environment for its Keras, while it is imported; children must not."""
    before = os.environ.get("TF_USE_LEGACY_KERAS")
    if gone.has_legacy():
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    try:
        yield
    finally:
        os.environ.pop("TF_USE_LEGACY_KERAS", None)
        if before is not None:
            os.environ["TF_USE_LEGACY_KERAS"] = before


class _Known(Loader):
    """Gives a module that goes by another name. Its submodules follow, through its __path__."""

    def __init__(self, other: str) -> None:
        self._other = other

    def exec_module(self, module: ModuleType) -> None:
        importlib.import_module("tensorflow")  # which imports Keras, and not the other way round
        sys.modules[module.__name__] = importlib.import_module(self._other)
