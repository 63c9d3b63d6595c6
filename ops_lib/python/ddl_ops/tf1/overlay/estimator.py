"""tensorflow.estimator: the package tensorflow_estimator, which TensorFlow no longer contains.

It was written for an older TensorFlow: what has left since, for TPUs and distribution strategies,
is stood for by modules that refuse to be used.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from ddl_ops.tf1.gone import LeftTensorFlow
from ddl_ops.tf1.importing import tensorflow_2


class _Left(ModuleType):
    """A module whose every name is a class that cannot be used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

        def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise LeftTensorFlow(
                f"{self.__name__}.{name} has left TensorFlow: Estimators run without TPUs and "
                "distribution strategies. Use ddl, or TF_CONFIG with parameter servers."
            )

        return type(name, (), {"__init__": refuse})


def _stand_for(name: str, **present: Any) -> None:
    """Makes `name` importable, with `present` in it and refusing all else."""
    module = sys.modules.setdefault(name, _Left(name))
    vars(module).update(present)
    package, _, own = name.rpartition(".")
    if package in sys.modules:
        setattr(sys.modules[package], own, module)


_stand_for(
    "tensorflow.python.distribute.estimator_training",
    should_run_distribute_coordinator=lambda _config: False,  # train_and_evaluate asks always
)
for _name in ("tpu_embedding", "session_support", "tpu_embedding_gradient"):
    _stand_for(f"tensorflow.python.tpu.{_name}")
# Its own would write names into a registry that is gone, and warn at each use.
_stand_for(
    "tensorflow_estimator.python.estimator.estimator_export",
    estimator_export=lambda *_names, **_v1_names: lambda symbol: symbol,
)

with tensorflow_2():
    from tensorflow_estimator.python.estimator.api._v1 import estimator

sys.modules[__name__] = estimator
