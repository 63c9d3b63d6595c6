"""Broadcasts of variables, and of objects that pickle can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from ddl_ops.equal_weights import mark_equal

from horovod.common.util import pickled, unpickled
from horovod.tensorflow.mpi_ops import (
    ProcessSet,
    allgather,
    broadcast,
    broadcast_,
    global_process_set,
    rank,
)

v1 = tf.compat.v1


def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Gives every rank the values that `root_rank`'s variables have.

    Args:
        variables: of TensorFlow or Keras, the same on all ranks.
        root_rank: whose values.
        process_set: the ranks that take part.
        inplace: has no effect: they are assigned what was received, without a copy, anyway.

    Returns an op, None in eager code.
    """
    del inplace
    values = broadcast_(variables, root_rank, process_set=process_set)
    if not tf.executing_eagerly():
        return tf.group(*values)
    mark_equal(variables)
    return None


def _session_of(session: Any) -> Any:
    found = session or v1.get_default_session()
    if found is None:
        raise RuntimeError(
            "A session is needed to communicate objects in a graph: pass session=, or call it "
            "within one."
        )
    return found


def _from_bytes(data: Any) -> Any:
    return unpickled(np.asarray(data).tobytes())


def _to_bytes(obj: Any) -> np.ndarray[Any, Any]:
    return np.frombuffer(pickled(obj), np.uint8)


def _runs(session: Any) -> Callable[[Any], Any]:
    """How a tensor gets its value here."""
    if tf.executing_eagerly():
        return lambda tensor: tensor.numpy()
    return _session_of(session).run


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Rank `root_rank`'s object, on every rank; what others pass is not looked at.

    Args:
        obj: what pickle or cloudpickle can take.
        root_rank: whose.
        session: in a TF1 graph; by default the one around the call.
        name: of the collectives.
        process_set: the ranks that take part.
    """
    run = _runs(session)
    mine = rank() == root_rank
    data = _to_bytes(obj) if mine else np.zeros(0, np.uint8)
    count = run(
        broadcast(
            tf.constant([data.size], tf.int64),
            root_rank,
            f"{name}_size" if name else None,
            process_set=process_set,
        )
    )
    if not mine:
        data = np.zeros(int(count[0]), np.uint8)
    received = run(broadcast(tf.constant(data), root_rank, name, process_set=process_set))
    return obj if mine else _from_bytes(received)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """broadcast_object with its arguments, for a TF1 graph that is to be finalized.

    The graph is added to here, and not when the function is called.
    """
    data_in = v1.placeholder(tf.uint8, [None])
    size_in = v1.placeholder(tf.int64, [1])
    size_out = broadcast(size_in, root_rank, process_set=process_set)
    data_out = broadcast(data_in, root_rank, name, process_set=process_set)

    def run(obj: Any) -> Any:
        mine = rank() == root_rank
        data = _to_bytes(obj) if mine else np.zeros(0, np.uint8)
        within = _session_of(session)
        (count,) = within.run(size_out, {size_in: [data.size]})
        if not mine:
            data = np.zeros(int(count), np.uint8)
        received = within.run(data_out, {data_in: data})
        return obj if mine else _from_bytes(received)

    return run


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Every rank's object, in the order of the ranks; else as broadcast_object."""
    run = _runs(session)
    data = _to_bytes(obj)
    sizes = run(
        allgather(
            tf.constant([data.size], tf.int64),
            f"{name}_size" if name else None,
            process_set=process_set,
        )
    )
    gathered = run(allgather(tf.constant(data), name, process_set=process_set))
    ends = np.cumsum(sizes)
    return [
        _from_bytes(gathered[end - count : end]) for end, count in zip(ends, sizes, strict=True)
    ]
