"""allreduce and its like, for whatever a script passes: dense, sparse, compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from ddl_ops.gradients import ALL_RANKS, mark_reduced, note_averaged

from horovod.common.basics import Average, Sum, resolve_op
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set, set_of


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces a tensor over the ranks.

    Args:
        tensor: of one shape and dtype on all ranks; or IndexedSlices, whose slices may differ in
            number and place: the result has those of all ranks, for Average each divided by the
            number of ranks that have not joined.
        average: what op was before.
        device_dense: has no effect, nor has device_sparse: collectives are placed where they run.
        device_sparse: see above.
        compression: Compression.fp16 sends floating-point tensors as float16.
        op: hvd.Average (the default) or another of them.
        prescale_factor: of the tensor before, postscale_factor after; not for IndexedSlices.
        postscale_factor: see above.
        name: of the op.
        process_set: the ranks that take part.
        ignore_name_scope: the name has no name scope in front.

    Raises NotImplementedError for what IndexedSlices cannot do; FailedPreconditionError on every
    rank where ranks differ.
    """
    del device_dense, device_sparse
    op = resolve_op(op, average)
    note_averaged([tensor])
    if isinstance(tensor, tf.IndexedSlices):
        require_plain(op, prescale_factor, postscale_factor)
        slices = allreduce_slices(tensor, op, name, process_set, ignore_name_scope)
        mark_reduced(slices, ranks_of(process_set))
        return slices
    small, context = compression.compress(tf.convert_to_tensor(tensor))
    reduced = mpi_ops._allreduce(
        small, name, op, prescale_factor, postscale_factor, ignore_name_scope, process_set
    )
    result = compression.decompress(reduced, context)
    # An optimizer shall not combine it once more.
    mark_reduced(result, ranks_of(process_set))
    return result


def ranks_of(process_set: ProcessSet | int | None) -> tuple[int, ...]:
    """As gradients are marked that are reduced over a set: its ranks, or ALL_RANKS."""
    one = set_of(process_set) if isinstance(process_set, int) else process_set
    if one is None or one.process_set_id == 0:
        return ALL_RANKS
    return tuple(one.ranks or ())


def require_plain(op: int, prescale_factor: float, postscale_factor: float = 1.0) -> None:
    """Raises NotImplementedError for what IndexedSlices cannot do."""
    if op not in (Average, Sum):
        raise NotImplementedError(
            "IndexedSlices can be summed and averaged only: their slices are gathered. Make them "
            "dense first: tf.convert_to_tensor(slices)."
        )
    if (prescale_factor, postscale_factor) != (1.0, 1.0):
        raise NotImplementedError(
            "IndexedSlices cannot be scaled by prescale_factor and postscale_factor: scale their "
            "values."
        )


def allreduce_slices(
    slices: tf.IndexedSlices,
    op: int,
    name: str | None,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> tf.IndexedSlices:
    """The slices of all ranks, for Average each divided by the number that have not joined."""
    values = mpi_ops.allgather(
        slices.values, f"{name}_values" if name else None, ignore_name_scope, process_set
    )
    with tf.control_dependencies([values]):
        indices = mpi_ops.allgather(
            slices.indices, f"{name}_indices" if name else None, ignore_name_scope, process_set
        )
    if op == Average:
        counted = f"{name}_contributors" if name else None
        with tf.control_dependencies([indices]):
            count = mpi_ops._allreduce(
                tf.constant(1.0),
                counted,
                ignore_name_scope=ignore_name_scope,
                process_set=process_set,
            )
        values /= tf.cast(count, values.dtype)
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """allreduce of each, in order; dense ones travel together."""
    del device_dense, device_sparse
    if not tensors:
        return []
    op = resolve_op(op, average)
    note_averaged(tensors)
    sparse = [i for i, one in enumerate(tensors) if isinstance(one, tf.IndexedSlices)]
    if sparse:
        require_plain(op, prescale_factor, postscale_factor)
    dense = [i for i in range(len(tensors)) if i not in sparse]
    reduced = list(tensors)
    pairs = [compression.compress(tf.convert_to_tensor(tensors[i])) for i in dense]
    together = mpi_ops._grouped_allreduce(
        [small for small, _ in pairs],
        name,
        op,
        prescale_factor,
        postscale_factor,
        ignore_name_scope,
        process_set,
    )
    previous: list[tf.Tensor] = []
    for i, one, (_, context) in zip(dense, together, pairs, strict=True):
        reduced[i] = compression.decompress(one, context)
        previous = [one]
    for i in sparse:
        own = f"{name}_{i}" if name else None
        with tf.control_dependencies(previous):
            reduced[i] = allreduce_slices(tensors[i], op, own, process_set, ignore_name_scope)
        previous = [reduced[i].indices, reduced[i].values]
    for one in reduced:
        mark_reduced(one, ranks_of(process_set))
    return reduced


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces a tensor over the ranks, and returns this rank's rows of the result.

    The first dimension is divided: the first ranks have a row more where it does not come out even.
    Arguments and errors as allreduce; see ddl_ops.collectives.reducescatter.
    """
    del device_dense
    given = tf.convert_to_tensor(tensor)
    note_averaged([given])
    small, context = compression.compress(given)
    mine = mpi_ops._reducescatter(
        small, name, op, ignore_name_scope, process_set, prescale_factor, postscale_factor
    )
    return compression.decompress(mine, context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """reducescatter of each, in order; those of one dtype travel together."""
    del device_dense
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    note_averaged(given)
    pairs = [compression.compress(one) for one in given]
    together = mpi_ops._grouped_reducescatter(
        [small for small, _ in pairs],
        None,
        op,
        False,
        process_set,
        prescale_factor,
        postscale_factor,
    )
    return [
        compression.decompress(one, context)
        for one, (_, context) in zip(together, pairs, strict=True)
    ]
