"""The collectives on tensors, in graphs, tf.functions and eagerly."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf  # noqa: TID253

from ddl_ops.environment import require_launched
from ddl_ops.lifecycle import initialised
from ddl_ops.loader import operations

# The last broadcast of each TF1 graph; see bcast.
_last_bcast: weakref.WeakKeyDictionary[tf.Graph, tf.Operation] = weakref.WeakKeyDictionary()


def _require_initialised(what: str) -> None:
    require_launched(what)
    if not initialised():
        raise RuntimeError(
            f"{what} before ddl.init(). Call ddl.init() first, or set DDL_OPTIONS and import ddl."
        )


def _in_plain_graph() -> bool:
    # Eager code and tf.functions keep the order of a program by themselves.
    return not tf.executing_eagerly() and not isinstance(
        tf.compat.v1.get_default_graph(), tf.__internal__.FuncGraph
    )


def bcast(value: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """Returns rank 0's `value` on every rank: any shape, any numeric or bool dtype.

    In a TF1 graph each call waits for the one before it, so that all ranks broadcast in the order
    of the program. Raises InvalidArgumentError on every rank if shapes or dtypes differ,
    FailedPreconditionError if a rank has left, DeadlineExceededError if one does not come within
    DDL_STALL_TIMEOUT; RuntimeError before init().
    """
    _require_initialised("ddl.bcast()")
    if not _in_plain_graph():
        return broadcast_op(value, name)
    value = tf.convert_to_tensor(value)
    graph = value.graph
    previous = _last_bcast.get(graph)
    with tf.control_dependencies([previous] if previous is not None else []):
        received = broadcast_op(value, name)
    _last_bcast[graph] = received.op
    return received


def broadcast_op(value: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """The Bcast op by itself, for callers that keep the order among ranks. Errors as bcast."""
    with tf.device("/CPU:0"):
        return operations().bcast(value, name=name)


def allreduce_n(
    tensors: Sequence[tf.Tensor], average: bool = True, name: str | None = None
) -> list[tf.Tensor]:
    """Averages (or sums) each tensor over the ranks; returns them in order.

    All ranks get the same bits. Tensors are float32, float64, int32 or int64, all of one dtype, of
    any shapes. Integer averages truncate toward zero. All tensors travel together, so many small
    ones cost little more than one. Errors as bcast; ValueError if dtypes are mixed.
    """
    _require_initialised("ddl.allreduce_n()")
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not tensors:
        return []
    dtypes = sorted({tensor.dtype.name for tensor in tensors})
    if len(dtypes) > 1:
        raise ValueError(
            f"ddl.allreduce_n() got tensors of {', '.join(dtypes)}. Pass one dtype in each call."
        )
    with tf.device("/CPU:0"):
        return list(operations().all_reduce_n(tensors, op="avg" if average else "sum", name=name))
