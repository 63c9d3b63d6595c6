"""What a TensorFlow 1 script gets for `import tensorflow`. Importing this imports TensorFlow."""

from __future__ import annotations

import dis
import functools
import importlib
import itertools
import numbers
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from absl import flags
from absl import logging as absl_logging
from tensorflow.compat import v1, v2  # noqa: TID253
from tensorflow.python.client import session as session_module  # noqa: TID253
from tensorflow.python.framework import (  # noqa: TID253
    indexed_slices,
    load_library,
    ops,
    tensor,
)
from tensorflow.python.layers import normalization  # noqa: TID253
from tensorflow.python.ops import (  # noqa: TID253
    array_ops,
    array_ops_stack,
    cond,
    control_flow_assert,
    control_flow_case,
    control_flow_ops,
    ref_variable,
    resource_variable_ops,
    variable_scope,
    variable_v1,
    variables,
    while_loop,
)
from tensorflow.python.util import deprecation, lazy_loader  # noqa: TID253

from ddl_ops import averaging
from ddl_ops.environment import PLACEMENT
from ddl_ops.tf1 import gone

OVERLAY = Path(__file__).parent / "overlay"
_OVERLAID = frozenset(
    path.stem for path in OVERLAY.iterdir() if path.suffix == ".py" or path.is_dir()
) - {"__init__", "__pycache__"}


class TensorFlow1(ModuleType):
    """tf.compat.v1, then what is in TensorFlow besides, then the overlay.

    Attributes:
        tensorflow_itself: the module that it stands in front of.
    """

    def __init__(self, itself: ModuleType) -> None:
        super().__init__("tensorflow", "The 1.x API on TensorFlow 2: TensorFlow 1 mode.")
        self.tensorflow_itself = itself
        self.__file__ = itself.__file__
        self.__loader__ = itself.__loader__
        self.__package__ = itself.__package__
        self.__spec__ = itself.__spec__
        # The folders of Keras come before that of compat.v1 itself, whose modules the finder gives.
        self.__path__ = [str(OVERLAY), *v1.__path__[:-1], *itself.__path__]
        self.__version__ = v1.__version__
        # compat.v1 has a compat of its own, of other modules: patches there would reach nobody.
        self.compat = itself.compat
        self.__all__ = [name for name in dir(v1) if not name.startswith("_")]
        with deprecation.silence():
            v1.disable_v2_behavior()
        _put_back_where_it_was()
        _leave_flags_to_the_script()
        _intercept_variables()
        _place_softly()
        _answer_for_ddl_mdr()
        _settle_keras(itself)

    def __getattr__(self, name: str) -> Any:
        # Not copied: what ddl_ops puts into compat.v1 later must be seen here.
        for module in (v1, self.tensorflow_itself):
            try:
                return getattr(module, name)
            except AttributeError:
                continue
        if name in _OVERLAID:
            try:
                return importlib.import_module(f"tensorflow.{name}")
            except ImportError as error:
                raise gone.LeftTensorFlow(str(error)) from error
        raise AttributeError(f"module 'tensorflow' has no attribute {name!r}", name=name, obj=self)

    def __dir__(self) -> list[str]:
        return sorted({*self.__all__, *self.__dict__, *_OVERLAID})


def _put_back_where_it_was() -> None:
    """What TensorFlow has moved to modules of its own since; tf_slim looks for it there, too."""
    ops.Tensor = tensor.Tensor
    ops.IndexedSlices = indexed_slices.IndexedSlices
    array_ops.stack = array_ops_stack.stack
    array_ops.unstack = array_ops_stack.unstack
    control_flow_ops.Assert = control_flow_assert.Assert
    control_flow_ops.case = control_flow_case.case
    control_flow_ops.cond = cond.cond
    control_flow_ops.while_loop = while_loop.while_loop
    variable_scope.variable = variable_v1.VariableV1


def _leave_flags_to_the_script() -> None:
    """TensorFlow imports absl.logging, whose flags, such as log_dir, scripts define themselves."""
    for flag in flags.FLAGS.flags_by_module_dict()[absl_logging.__name__]:
        flag.allow_override = True


def _intercept_variables() -> None:
    """A script's own tf.Variable.__init__ is called for every variable, whoever makes it.

    Scripts replace it to broadcast initial values. Today's tf.Variable(...) makes a RefVariable or
    a ResourceVariable, which start by their own __init__: send those through tf.Variable's.
    """
    base = variable_v1.VariableV1
    own: dict[type, Callable[..., None]] = {base: base.__init__}

    def by_class(self: Any, *args: Any, **kwargs: Any) -> None:
        kind = next(kind for kind in type(self).__mro__ if kind in own)
        own[kind](self, *args, **kwargs)

    for kind in (ref_variable.RefVariable, resource_variable_ops.ResourceVariable):
        own[kind] = kind.__init__

        @functools.wraps(own[kind])
        def through_base(self: Any, *args: Any, **kwargs: Any) -> None:
            # What would be settled later is settled here: scripts look whether it is trainable.
            if kwargs.get("trainable", False) is None:
                on_read = variables.VariableSynchronization.ON_READ
                kwargs["trainable"] = kwargs.get("synchronization") != on_read
            base.__init__(self, *args, **kwargs)

        kind.__init__ = through_base
    base.__init__ = by_class


def _place_softly() -> None:
    """`/gpu:0` on a machine without one: beneath what a script does to tf.Session.__init__."""
    base = session_module.BaseSession
    original = base.__init__

    @functools.wraps(original)
    def init(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        softly = v1.ConfigProto()
        if config is not None:
            softly.CopyFrom(config)
        softly.allow_soft_placement = True
        original(self, target, graph, softly)

    base.__init__ = init


def _answer_for_ddl_mdr() -> None:
    """tf.load_op_library('ddl_MDR.so') gives our ops, which have the signatures of IBM's."""
    original = load_library.load_op_library

    @functools.wraps(original)
    def load_op_library(library_filename: str) -> Any:
        if Path(library_filename).name == "ddl_MDR.so":
            return _ddl_mdr()
        return original(library_filename)

    for module in (load_library, v1, v2):
        module.load_op_library = load_op_library


@functools.cache
def _ddl_mdr() -> ModuleType:
    # Here and not above: not each script that is in this mode uses the ops.
    from ddl_ops import tf1_hooks
    from ddl_ops.loader import operations

    ops = ModuleType("ddl_MDR")
    vars(ops).update(vars(operations()))
    for name in ("all_reduce", "all_reduce_n"):
        setattr(ops, name, _averaging(getattr(ops, name)))
    ops.init = _initialising(ops.init)  # type: ignore[attr-defined]
    # Whoever loads the ops talks to the other ranks by himself, and hooks his optimizers. But
    # variables that he made before would start with another value on each rank, and an exception on
    # one rank would leave the others waiting.
    tf1_hooks.join()
    return ops


def _averaging(op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def averaging_op(*args: Any, **kwargs: Any) -> Any:
        averaging.averaged_by_script()
        return op(*args, **kwargs)

    return averaging_op


def _initialising(op: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(op)
    def init(user_gpuid: Any, mode: str, pci: bool = True, name: str | None = None) -> Topology:
        # Scripts of 2017, and some later ones, say how many GPUs each host uses; since 2018 it is
        # the GPU that this rank would like. One of several ranks has its own among as many GPUs as
        # there are ranks; a rank alone may like any that is there.
        alike = isinstance(user_gpuid, numbers.Integral) and user_gpuid == PLACEMENT.local_size
        if alike and (user_gpuid > 1 or len(v2.config.list_physical_devices("GPU")) <= user_gpuid):
            user_gpuid = -1
        return Topology(*op(user_gpuid, mode=mode, pci=pci, name=name))

    return init


class _Outputs(NamedTuple):
    rank: Any
    size: Any
    local_rank: Any
    local_size: Any
    local_gpuid: Any


class Topology(_Outputs):
    """What Init gives. A session that runs it makes another one, of values.

    Init of 2017 had three outputs, `rank, size, gpuid = session.run(ddl.init(4, mode=...))`, and
    since 2018 it has five. Scripts unpack what theirs had: who takes three apart gets three.
    """

    def __iter__(self) -> Iterator[Any]:
        wanted = 3 if _takes_three_apart(sys._getframe(1)) else len(self)
        return itertools.islice(super().__iter__(), wanted)


def _takes_three_apart(frame: FrameType) -> bool:
    """Whether the frame is at the assignment of something to three names."""
    return any(
        (one.offset, one.opname, one.arg) == (frame.f_lasti, "UNPACK_SEQUENCE", 3)
        for one in dis.get_instructions(frame.f_code)
    )


def _settle_keras(itself: ModuleType) -> None:
    """Keras 2 for tf.keras, tf.layers and tf.nn.rnn_cell now; or a word on how to get it."""
    if gone.has_legacy():
        # They ask the environment which Keras to take, when first used: make them ask now.
        for module in (v1, v1.nn, v2, itself):
            for value in list(vars(module).values()):
                if isinstance(value, lazy_loader.KerasLazyLoader):
                    value._initialize()
        # `import keras` gives v1.keras, and scripts ask for its version.
        keras_2 = importlib.import_module("tf_keras")
        # TensorFlow looks for these outside its `src`.
        layers = importlib.import_module("tf_keras.src.legacy_tf_layers.normalization")
        normalization.normalization = layers
        vars(importlib.import_module("tf_keras.api._v1.keras"))["__version__"] = keras_2.__version__
        return
    v1.keras = _Missing("tensorflow.keras")
    v1.layers = _Missing("tensorflow.layers")
    v1.nn.rnn_cell = _Missing("tensorflow.nn.rnn_cell")


class _Missing(ModuleType):
    """Refuses every attribute, with the reason."""

    def __getattr__(self, name: str) -> Any:
        raise gone.LeftTensorFlow(gone.needs_legacy(self.__name__), name=name, obj=self)
