"""tensorflow.contrib: the modules beside this file; for all others an error says where they went.

A module is added by putting its file here.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ddl_ops.tf1.gone import LeftTensorFlow


def __getattr__(name: str) -> ModuleType:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ImportError as error:
        raise LeftTensorFlow(str(error)) from error
