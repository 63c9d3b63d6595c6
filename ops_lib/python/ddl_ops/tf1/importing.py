"""Catches the import of tensorflow, in a process that runs a TensorFlow 1 script.

Standard library only: it is there before the script's first line.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from ddl_ops.tf1 import gone, numpy_names

# Modules that scripts import by where they were, and what has it all now.
_ELSEWHERE = {
    f"tensorflow.contrib.{there}.{name}": f"tf_slim.{here}.{name}"
    for there, here, names in (
        ("framework.python.ops", "ops", "arg_scope framework_ops variables"),
        (
            "layers.python.layers",
            "layers",
            "initializers layers normalization optimizers regularizers summaries utils",
        ),
    )
    for name in names.split()
}
_SLIM = re.compile(r"tensorflow\.contrib\.slim\.python(?:\.slim)?(?P<rest>(?:\..+)?)")
_KERAS_LAYERS = (
    "advanced_activations convolutional convolutional_recurrent core cudnn_recurrent embeddings "
    "local merge noise normalization pooling recurrent wrappers"
)
_KERAS_ENGINE = ("", ".base_layer", ".input_layer", ".network", ".topology", ".training")
_KERAS_ELSEWHERE = {
    "keras.backend.tensorflow_backend": "keras.backend",
    "keras.engine.saving": "keras.models",
    "keras.objectives": "keras.losses",
    **{f"keras.layers.{name}": "keras.layers" for name in _KERAS_LAYERS.split()},
    **{f"keras.engine{name}": "ddl_ops.tf1.keras_engine" for name in _KERAS_ENGINE},
    **{
        f"keras.utils.{name}": f"tf_keras.src.utils.{name}"
        for name in "conv_utils data_utils generic_utils io_utils np_utils vis_utils".split()
    },
}


def install() -> None:
    """From here on `import tensorflow` gives the 1.x API. Raises RuntimeError if it comes late."""
    if "tensorflow" in sys.modules:
        raise RuntimeError("tensorflow is already imported: its 1.x API must be asked for before.")
    sys.meta_path.insert(0, _Finder())
    if "numpy" in sys.modules:
        numpy_names.put_back(sys.modules["numpy"])


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
        if name.startswith("keras.") and gone.has_legacy():
            # Python asks by _find_spec(), whose caller tells an import from
            # importlib.util.find_spec(), which only asks.
            is_import = sys._getframe(2).f_code.co_name == "_find_and_load_unlocked"
            return _find_in_keras(name, path, is_import)
        if name == "learn_runner" and PathFinder.find_spec(name, path, target) is None:
            # Scripts for Experiments had it beside them, or in TensorFlow.
            known = _Known("tensorflow.contrib.learn.python.learn.learn_runner")
            return importlib.util.spec_from_loader(name, known)
        if name in _THEN:
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, _THEN[name])
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
    if reason is None and (other := _elsewhere(name)):
        return importlib.util.spec_from_loader(name, _Known(other))
    if found is None:
        reason = reason or gone.left(name)
    if reason is not None:
        raise ImportError(reason, name=name)
    own = f"tensorflow._api.v2.compat.v1.{name.removeprefix('tensorflow.')}"
    if own in sys.modules and (found is None or "/_api/v2/" in (found.origin or "")):
        return importlib.util.spec_from_loader(name, _Known(own))
    return found


def _elsewhere(name: str) -> str | None:
    """What has all of a module of TensorFlow 1 now; None: it is found, or gone."""
    other = _ELSEWHERE.get(name)
    if match := _SLIM.fullmatch(name):
        other = f"tf_slim{match['rest']}"
    return other if other and importlib.util.find_spec(other) is not None else None


def _find_in_keras(name: str, path: Sequence[str] | None, is_import: bool) -> ModuleSpec | None:
    """Where a module of Keras 2 is. Raises ModuleNotFoundError if an import looks for one that is
    gone, with where to look.
    """
    if other := _KERAS_ELSEWHERE.get(name):
        return importlib.util.spec_from_loader(name, _Known(other))
    found = PathFinder.find_spec(name, path)
    if found is None and is_import:
        reason = f"No module named {name!r}: it is gone from the Keras 2 of today"
        if name.startswith("keras.layers."):
            reason += (
                ". Import what you need from keras.layers itself, as in `from keras.layers import "
                "Dense`."
            )
        raise ModuleNotFoundError(reason, name=name)
    return found


class _Loader(Loader):
    """Loads a module as ever, and then does something more."""

    def __init__(self, real: Loader, then: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _choosing_keras_2():
            self._real.exec_module(module)
            self._then(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


def _put_face_on(module: ModuleType) -> None:
    from ddl_ops.tf1.facade import TensorFlow1

    sys.modules["tensorflow"] = TensorFlow1(module)


_THEN = {"numpy": numpy_names.put_back, "tensorflow": _put_face_on}


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
