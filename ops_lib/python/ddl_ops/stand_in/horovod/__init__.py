"""Horovod's scripts on the ops of ddl: the stand-in that ranks find where no Horovod is installed.

``horovod.tensorflow``, ``horovod.tensorflow.keras`` and ``horovod.keras`` have the names, arguments
and defaults of Horovod 0.28.1; what is not here raises an error that names the way across. See
docs/coming-from-horovod.md.

Source: Horovod's documentation and tests, by their text; the code is ours.
"""

from __future__ import annotations

from horovod.runner import run

__all__ = ["run"]

# What scripts compare with: the release whose interface this is.
__version__ = "0.28.1"
