"""Tells of files that C code writes for Python, as Python itself does of those that it opens.

ddl_ops.startup listens, to find files that several ranks write.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from tensorflow.python.training import saver as saver_module  # noqa: TID253


@functools.cache
def tell_of_c_code() -> None:
    """Keras writes .h5 and .weights.h5 by h5py, TensorFlow 1 its checkpoints by a Saver."""
    saver: Any = saver_module.Saver
    saver.save = _tells(saver.save, _saved)
    if (h5py := sys.modules.get("h5py")) is not None:
        h5py.File.__init__ = _tells(h5py.File.__init__, _opened)


def _tells(function: Callable[..., Any], written: Callable[..., str]) -> Callable[..., Any]:
    @functools.wraps(function)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        if path := written(*args, **kwargs):
            sys.audit("open", path, "w", os.O_WRONLY)
        return function(self, *args, **kwargs)

    return telling


def _saved(sess: Any, save_path: Any, *_args: Any, **_kwargs: Any) -> str:
    del sess
    return os.fspath(save_path)


def _opened(name: Any, mode: str | None = "r", *_args: Any, **_kwargs: Any) -> str:
    in_a_file = isinstance(name, (str, bytes, os.PathLike)) and mode not in ("r", None)
    return os.fsdecode(name) if in_a_file else ""
