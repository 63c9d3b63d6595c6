"""tensorflow.contrib.mpi_collectives of TensorFlow 1, over the ops of ddl.

For graphs and sessions: in TensorFlow 1 mode under the name that it had, elsewhere as
`import mpi_collectives` beside `tensorflow.compat.v1`. The first call of anything here starts
communication, and is collective; from there on the initialisers of variables end with rank 0's
value, which the original left to the script. A process that no launcher started is one rank alone.

As in the original, no gradient flows through a collective. Source: the module's own description,
and its ops' registrations, in TensorFlow's repository.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import tensorflow as tf
from ddl_ops import collectives, gradients, session_starts, tf1_hooks
from ddl_ops.environment import PLACEMENT

v1 = tf.compat.v1

# The error that the original raised where ranks differ.
_MISMATCH: Final = "failed_precondition"

__all__ = [
    "DistributedOptimizer",
    "Session",
    "allgather",
    "allreduce",
    "init",
    "local_rank",
    "rank",
    "size",
]


def init(name: str | None = None) -> tf.Operation:
    """An op that does nothing more: communication has started when this returns."""
    tf1_hooks.join()
    return tf.no_op(name=name)


def size(name: str | None = None) -> tf.Tensor:
    """Number of ranks, an int32 scalar."""
    tf1_hooks.join()
    if not PLACEMENT.launched:
        return tf.constant(PLACEMENT.size, name=name)
    return collectives.size_op(name)


def rank(name: str | None = None) -> tf.Tensor:
    """This process's number among all ranks, from 0, an int32 scalar."""
    tf1_hooks.join()
    if not PLACEMENT.launched:
        return tf.constant(PLACEMENT.rank, name=name)
    return collectives.rank_op(name)


def local_rank(name: str | None = None) -> tf.Tensor:
    """This process's number among the ranks of its host, from 0, an int32 scalar."""
    tf1_hooks.join()
    if not PLACEMENT.launched:
        return tf.constant(PLACEMENT.local_rank, name=name)
    return collectives.local_rank_op(name)


def allgather(tensor: Any, name: str | None = None) -> tf.Tensor:
    """Joins the ranks' tensors along the first dimension.

    Args:
        tensor: [n_r, d...]; n_r may differ by rank, d and dtype may not.
        name: of the op, by which the ranks know it; alike on all of them.

    Returns [sum n_r, d...] in the order of the ranks. Raises FailedPreconditionError on every rank
    where ranks differ, else as ddl_ops.collectives.allgather; the ranks can go on.
    """
    tf1_hooks.join()
    tensor = tf.stop_gradient(tensor)
    if not PLACEMENT.launched:
        return tf.identity(tensor, name)
    return collectives.allgather(tensor, name, mismatch=_MISMATCH)


def _allreduce(tensor: Any, name: str | None = None) -> tf.Tensor:
    """The sum over the ranks of tensors of one shape and dtype."""
    tf1_hooks.join()
    tensor = tf.stop_gradient(tensor)
    if not PLACEMENT.launched:
        return tf.identity(tensor, name)
    return collectives.allreduce(tensor, average=False, name=name, mismatch=_MISMATCH)


def allreduce(
    tensor: tf.Tensor | tf.Variable | tf.IndexedSlices, average: bool = True
) -> tf.Tensor | tf.IndexedSlices:
    """Averages (or sums) a tensor over the ranks.

    Args:
        tensor: dense, of one shape on all ranks: int32, int64, float32, and besides the original's
            float16, bfloat16 and float64. Or IndexedSlices, whose slices may differ in number and
            place; the result has the slices of all ranks.
        average: integers are rounded down, slices each for itself. Sums of integers wrap around,
            averages do not.

    Errors as ddl_ops.collectives.allreduce.
    """
    gradients.note_averaged([tensor])
    if isinstance(tensor, tf.IndexedSlices):
        values, indices = allgather(tensor.values), allgather(tensor.indices)
        return tf.IndexedSlices(_divided(values, average), indices, tensor.dense_shape)
    tensor = tf.convert_to_tensor(tensor)
    if average and tensor.dtype.is_integer and PLACEMENT.launched:
        return _floored(tensor)
    return _divided(_allreduce(tensor), average)


def _floored(tensor: tf.Tensor) -> tf.Tensor:
    """The average, rounded down, also where the sum is too large for the dtype."""
    tf1_hooks.join()
    tensor = tf.stop_gradient(tensor)
    count = tf.cast(size(), tensor.dtype)
    parts = [tensor // count, tensor % count]
    quotients, rests = collectives.allreduce_n(parts, average=False, mismatch=_MISMATCH)
    return quotients + rests // count


def _divided(total: tf.Tensor, average: bool) -> tf.Tensor:
    if not average:
        return total
    count = tf.cast(size(), total.dtype)
    return total // count if total.dtype.is_integer else total / count


class DistributedOptimizer(v1.train.Optimizer):
    """An optimizer of tf.train whose gradients are averages over the ranks.

    The optimizer within computes, applies and keeps its slots, so that variables and checkpoints
    have the names that it gives them.
    """

    def __init__(
        self, optimizer: v1.train.Optimizer, name: str | None = None, use_locking: bool = False
    ) -> None:
        """Wraps `optimizer`; `name`, of the op that applies, is by default Distributed<class>."""
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer = optimizer

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """As the optimizer within, and averages. A None must be None on all ranks.

        IndexedSlices stay so, with the slices of all ranks. Dense gradients travel together:
        DDL_GROUP_SIZE and DDL_WIRE_DTYPE apply. Errors as ddl_ops.gradients.reduce_gradients.
        """
        tf1_hooks.join()
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients.note_explicit_averages("mpi_collectives.DistributedOptimizer")
        reduced = gradients.grads_reduce(pairs, sparse_as_dense=False)
        session_starts.note_trained(reduced)
        return reduced

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], global_step: Any = None, name: str | None = None
    ) -> tf.Operation:
        """As the optimizer within, which does not average, even if ddl hooks it."""
        pairs = list(grads_and_vars)
        for gradient, _ in pairs:
            gradients.mark_reduced(gradient)
        return self._optimizer.apply_gradients(pairs, global_step, name or self.get_name())

    def get_slot(self, var: Any, name: str) -> Any:
        """As the optimizer within."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> list[str]:
        """As the optimizer within."""
        return self._optimizer.get_slot_names()

    def variables(self) -> list[Any]:
        """As the optimizer within."""
        return self._optimizer.variables()


class Session(v1.Session):
    """A tf.Session that has started communication, on the GPU of its local rank if there are any.

    A choice of GPU in `config` stays.
    """

    def __init__(self, target: str = "", graph: tf.Graph | None = None, config: Any = None) -> None:
        """As tf.Session."""
        tf1_hooks.join()
        gpu = tf1_hooks.own_gpu()
        if gpu is not None:
            config = tf1_hooks.session_config(config, gpu)
        super().__init__(target, graph, config)
