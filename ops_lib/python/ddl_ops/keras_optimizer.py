"""Keras 3 optimizers that average gradients over the ranks."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras  # noqa: TID253

from ddl_ops.environment import PLACEMENT
from ddl_ops.gradients import reduce_gradients
from ddl_ops.lifecycle import initialised

_MARK = "_ddl_original_apply"


def distribute(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Makes `optimizer` average gradients over the ranks before each update, and returns it.

    It stays an object of its own class, so a model that is saved with it loads where ddl is not
    installed (and trains alone there). Works in fit(), in tf.functions and eagerly. With
    gradient_accumulation_steps every step is reduced. Outside mpirun it changes nothing.

    Raises ValueError if it is distributed already, TypeError if it is no Keras optimizer,
    RuntimeError under mpirun before ddl.init().
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer wraps a Keras 3 optimizer, not {type(optimizer).__name__}. "
            "Optimizers of tf.compat.v1.train need no wrapping: import ddl with DDL_OPTIONS set."
        )
    if is_distributed(optimizer):
        raise ValueError(
            f"The optimizer {optimizer.name!r} is distributed already: wrap it once, or gradients "
            "would be averaged twice."
        )
    if PLACEMENT.launched and not initialised():
        raise RuntimeError("DistributedOptimizer before ddl.init(): call ddl.init() first.")
    _redirect_apply(optimizer)
    _hook_compile()
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Whether `optimizer` averages its gradients over the ranks."""
    return hasattr(optimizer, _MARK)


def _redirect_apply(optimizer: Any) -> None:
    # On the object, not in a subclass: Keras writes an optimizer's class into saved models.
    apply = optimizer.apply

    @functools.wraps(apply)
    def apply_reduced(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return apply(reduce_gradients(list(grads)), trainable_variables)

    setattr(optimizer, _MARK, apply)
    optimizer.apply = apply_reduced


def _restore_apply(optimizer: Any) -> None:
    del optimizer.apply
    delattr(optimizer, _MARK)


@functools.cache
def _hook_compile() -> None:
    # Where it is defined: Keras takes a compile() that a class overrides for the user's own, and
    # then does not compile models that it loads.
    owner = next(base for base in keras.Model.__mro__ if "compile" in vars(base))
    compile_original: Callable[..., Any] = owner.compile

    @functools.wraps(compile_original)
    def compile_distributed(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = compile_original(self, *args, **kwargs)
        optimizer = getattr(self, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", None)
        if is_distributed(inner):
            # compile() put loss scaling around our optimizer, which skips an update whose gradients
            # overflow: ranks must decide that on the sum, or some would wait for the others.
            _restore_apply(inner)
            _redirect_apply(optimizer)
        if is_distributed(optimizer) and self.jit_compile:
            if kwargs.get("jit_compile") is True:
                warnings.warn(
                    "jit_compile=True is turned off: XLA cannot compile the reduction of gradients "
                    "over ranks. Compile the layers instead: tf.function(jit_compile=True).",
                    stacklevel=2,
                )
            self.jit_compile = False  # "auto" turns it on where there is a GPU
        return compiled

    owner.compile = compile_distributed
