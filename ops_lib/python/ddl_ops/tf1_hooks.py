"""Makes an unchanged TF1-style script train on all ranks: optimizers, initialisers, sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf  # noqa: TID253
from tensorflow.python.client import session as session_module  # noqa: TID253
from tensorflow.python.ops import variables as variables_module  # noqa: TID253
from tensorflow.python.training import optimizer as optimizer_module  # noqa: TID253

from ddl_ops.collectives import broadcast_op
from ddl_ops.environment import PLACEMENT
from ddl_ops.gradients import grads_reduce

_installed = False


def install() -> None:
    """Puts the hooks in place, once. ddl must be initialised."""
    global _installed
    if _installed:
        return
    _installed = True
    _hook_optimizers()
    hook_initialisers()
    use_one_gpu()


def _hook_optimizers() -> None:
    # All optimizers of tf.compat.v1.train end here; those that wrap another call the inner one.
    base = optimizer_module.Optimizer
    apply_gradients = base.apply_gradients

    @functools.wraps(apply_gradients)
    def apply_reduced(
        self: Any, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None
    ) -> Any:
        return apply_gradients(self, grads_reduce(grads_and_vars), global_step, name)

    base.apply_gradients = apply_reduced


def hook_initialisers() -> None:
    """Lets every variables initializer end with rank 0's values."""
    # global_variables_initializer() looks variables_initializer up in its module when it runs, and
    # so does MonitoredSession's Scaffold; the aliases of the public modules are patched besides.
    original = variables_module.variables_initializer
    hooked = equal_starts(original)
    variables_module.variables_initializer = hooked
    # Keras 2 has the one within compat.v2.
    for v1 in (tf.compat.v1, tf.compat.v2.compat.v1):
        v1.variables_initializer = hooked
        v1.initializers.variables = hooked


def equal_starts(variables_initializer: Callable[..., Any]) -> Callable[..., Any]:
    """variables_initializer whose op also gives every variable rank 0's value.

    Local variables keep their own. String variables do too: they hold no weights.
    """

    @functools.wraps(variables_initializer)
    def initialise(var_list: Iterable[Any], name: str = "init") -> Any:
        variables = list(var_list)
        if not variables or tf.executing_eagerly():
            return variables_initializer(variables, name)
        own = variables_initializer(variables, f"{name}_own")
        local = {id(v) for v in tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.LOCAL_VARIABLES)}
        shared = [v for v in variables if id(v) not in local and v.dtype.base_dtype != tf.string]
        # A chain, so that they run in this order on every rank; of this initialiser alone: through
        # a chain over all of them, a late one would run the early ones again and undo the training.
        chain: list[tf.Operation] = [own]
        for v in shared:
            with tf.control_dependencies(chain[-1:]):
                value = broadcast_op(v.read_value(), f"ddl_bcast/{v.op.name}")
                chain.append(v.assign(value, read_value=False))
        return tf.group(*chain, name=name)

    return initialise


def use_one_gpu() -> None:
    """Gives this rank the GPU of its local rank, if the host has GPUs, in TF1 sessions and TF2.

    Several ranks share a GPU if there are fewer GPUs than ranks. Memory is taken as it is needed,
    so that they can.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return
    index = PLACEMENT.local_rank % len(gpus)
    tf.config.set_visible_devices(gpus[index], "GPU")
    tf.config.experimental.set_memory_growth(gpus[index], True)
    base = session_module.BaseSession
    original = base.__init__

    @functools.wraps(original)
    def init(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        original(self, target, graph, session_config(config, index))

    base.__init__ = init


def session_config(config: Any, gpu: int) -> Any:
    """A copy of the ConfigProto `config` (or a new one) that shows only `gpu`.

    A choice that the script made itself stays.
    """
    chosen = tf.compat.v1.ConfigProto()
    if config is not None:
        chosen.CopyFrom(config)
    chosen.gpu_options.allow_growth = True
    if not chosen.gpu_options.visible_device_list:
        chosen.gpu_options.visible_device_list = str(gpu)
    return chosen
