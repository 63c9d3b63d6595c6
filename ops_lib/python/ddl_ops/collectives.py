"""The collectives on tensors, in graphs, tf.functions and eagerly."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import tensorflow as tf  # noqa: TID253

import ddl_ops.function_order  # for its effect: tf.functions keep the order of the ops
import ddl_ops.op_gradients  # noqa: F401  for its effect: the ops get gradients
from ddl_ops import arrays, autograph, preemption, process_sets
from ddl_ops.environment import require_launched
from ddl_ops.equal_weights import note_join
from ddl_ops.lifecycle import initialised
from ddl_ops.loader import device_of_collectives, operations, runtime
from ddl_ops.program_order import keeps_order, stream

autograph.leave_alone("ddl", "ddl_ops", "dl_comm", "ml_comm", "mpi_collectives")


def _require_initialised(what: str) -> None:
    require_launched(what)
    if not initialised():
        raise RuntimeError(
            f"{what} before ddl.init(). Call ddl.init() first, or set DDL_OPTIONS and import ddl."
        )


def _program_keeps_order() -> bool:
    """Whether ops made here run in the order of the program, so that no rank need ask another.

    So it is in eager code and in tf.functions, but not in a TF1 graph, whose executor starts what
    is ready, nor in a tf.function that such a graph calls.
    """
    return bool(tf.compat.v1.executing_eagerly_outside_functions())


def _function_keeps_order() -> bool:
    """Whether TensorFlow orders what is made here in a tf.function (``ddl_ops.function_order``).

    It does not so in the gradient of one, where a custom gradient may have a collective, and so
    not among the functions that are called there.
    """
    graph = tf.compat.v1.get_default_graph()
    while hasattr(graph, "outer_graph"):  # a function's
        if graph.experimental_acd_manager is None:
            return False
        graph = graph.outer_graph
    return True


_naming = threading.local()


@contextlib.contextmanager
def without_scope() -> Iterator[None]:
    """Within it ranks know the ops of tf.functions by the names that they are given, and no more.

    For what is made in a scope of Keras's: a rank that has made more objects has other numbers.
    """
    _naming.without_scope = True
    try:
        yield
    finally:
        _naming.without_scope = False


def _identity(what: str, name: str | None, process_set: int = 0) -> dict[str, Any]:
    """The attributes by which the ranks know an op that is made here."""
    of_set: dict[str, Any] = {"name": name}
    if process_set:
        process_sets.ranks(process_set)  # is there one?
        of_set["process_set"] = process_set
    if not tf.executing_eagerly():
        if not _program_keeps_order():
            return of_set
        ordered = _function_keeps_order()
        if ordered and getattr(_naming, "without_scope", False):
            of_set["request"] = name
        return {**of_set, "ordered": ordered, "stream": stream(what)}
    if not keeps_order(name):
        return {**of_set, "request": name}
    return {**of_set, "request": name or "", "ordered": True, "stream": stream(what)}


# The names of eager collectives that are attributes of their ops. TensorFlow keeps a kernel, some
# 36 KB, for each value that an attribute has ever had, and a loop may have a name for each step: so
# further names wait elsewhere for their op, which takes some microseconds.
_attribute_names: set[str] = set()
_MOST_ATTRIBUTE_NAMES = 64


def _is_attribute(name: str) -> bool:
    if name in _attribute_names:
        return True
    if len(_attribute_names) >= _MOST_ATTRIBUTE_NAMES:
        return False
    _attribute_names.add(name)
    return True


def _made(
    operation: Callable[..., Any],
    *inputs: Any,
    what: str,
    name: str | None,
    process_set: int,
    **attributes: Any,
) -> Any:
    """What the op returns, which the ranks know by `name`."""
    attributes.update(_identity(what, name, process_set))
    request = attributes.get("request")
    # That of a function is run again and again.
    if not request or not tf.executing_eagerly() or _is_attribute(request):
        return operation(*inputs, **attributes)
    library = runtime()
    # C ends the name at a NUL, which an attribute has as a space.
    use = library.ddl_name_eager(tf.compat.as_bytes(request).replace(b"\0", b" "))
    if use < 0:
        return operation(*inputs, **attributes)
    attributes["request"] = f"\1{use & 0xFFFF}"
    try:
        return operation(*inputs, **attributes)
    except BaseException:
        library.ddl_unname_eager(use)
        raise


# Where ranks differ, the error is one of these: see allgather.
Mismatch = Literal["invalid_argument", "failed_precondition"]
# What becomes of the values of all ranks. "avg": the sum, divided by their number.
ReduceOp = Literal["sum", "avg", "min", "max", "prod", "adasum"]


def _one_dtype(what: str, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """As tensors. Raises ValueError unless they have one dtype."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    dtypes = sorted({tensor.dtype.name for tensor in tensors})
    if len(dtypes) > 1:
        raise ValueError(f"{what} got tensors of {', '.join(dtypes)}. Pass one dtype in each call.")
    return tensors


_INTEGERS = (tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64)
_REDUCED = (*_INTEGERS, tf.float16, tf.bfloat16, tf.float32, tf.float64)


def require_real(dtype: tf.DType, what: str) -> None:
    """Raises TypeError, which names `what` is to be reduced, if it is complex or no number."""
    if dtype.is_complex:
        raise TypeError(
            f"ddl cannot reduce {what}: it is {dtype.name}. Reduce its parts, tf.math.real() and "
            "tf.math.imag(), or train them as variables of their own, and put them together: "
            "tf.complex(real, imag)."
        )
    if dtype.base_dtype not in _REDUCED:
        raise TypeError(
            f"ddl cannot reduce {what}: it is {dtype.name}. Cast it (tf.cast) to integers, or to "
            "float16, bfloat16, float32 or float64."
        )


def _scaled(value: tf.Tensor, factor: float) -> tf.Tensor:
    """`value` times `factor`, of its dtype: integers by way of float64, halves of float32."""
    if factor == 1.0:
        return value
    wide = value.dtype
    if wide.is_integer:
        wide = tf.float64
    elif wide in (tf.float16, tf.bfloat16):
        wide = tf.float32
    return tf.cast(tf.cast(value, wide) * tf.constant(factor, wide), value.dtype)


_broadcasts = False


def has_broadcast() -> bool:
    """Whether this rank has broadcast anything to or from the others, or made the op that does."""
    return _broadcasts


def bcast(
    value: tf.Tensor,
    name: str | None = None,
    root: int = 0,
    mismatch: Mismatch = "invalid_argument",
    process_set: int = 0,
) -> tf.Tensor:
    """Returns rank `root`'s `value` on every rank: any shape, any numeric or bool dtype.

    In a TF1 graph the ranks know bcast, allreduce and all that follow by the names of the ops and
    agree on their order; elsewhere the program has one, each of its threads for itself: threads
    need names, or their collectives do (see ddl_ops.program_order). The gradient is the sum over
    the ranks on `root` and zeros elsewhere. `mismatch`: see allgather.

    `process_set`, here and in all others: the number of the set of ranks that take part (see
    ddl_ops.process_sets), 0 for all. "All ranks" are those then; but a root is a number among all.

    Raises InvalidArgumentError on every rank if shapes, dtypes or roots differ, and on a rank that
    is not of the process set; FailedPreconditionError if a rank has left, or has given up the step
    that this is part of; DeadlineExceededError if one does not come within DDL_STALL_TIMEOUT;
    ValueError if there is no such process set, or the root is not of it; RuntimeError before
    init().
    """
    global _broadcasts
    _require_initialised("ddl.bcast()")
    _broadcasts = True
    with device_of_collectives(process_set):
        return _made(
            operations().bcast,
            tf.convert_to_tensor(value),
            root=process_sets.rank_within(process_set, root),
            mismatch=mismatch,
            what="ddl.bcast()",
            name=name,
            process_set=process_set,
        )


def bcast_n(
    tensors: Sequence[tf.Tensor],
    name: str | None = None,
    root: int = 0,
    mismatch: Mismatch = "invalid_argument",
    process_set: int = 0,
) -> list[tf.Tensor]:
    """Returns rank `root`'s tensors, all of one dtype, on every rank; in one go. Else as bcast."""
    global _broadcasts
    _require_initialised("ddl.bcast_n()")
    _broadcasts = True
    tensors = _one_dtype("ddl.bcast_n()", tensors)
    if not tensors:
        return []
    with device_of_collectives(process_set):
        return list(
            _made(
                operations().bcast_n,
                tensors,
                root=process_sets.rank_within(process_set, root),
                mismatch=mismatch,
                what="ddl.bcast_n()",
                name=name,
                process_set=process_set,
            )
        )


def bcast_variables(
    variables: Sequence[tf.Variable],
    name: str | None = None,
    root: int = 0,
    mismatch: Mismatch = "invalid_argument",
    process_set: int = 0,
) -> list[tf.Tensor]:
    """Gives the variables rank `root`'s values; returns those, known when they are assigned.

    What was received becomes the variable's memory, without a copy, and the root keeps its own. Of
    each dtype in one go; `name` is that of the first. In graphs the assignments run with what is
    returned. Errors as bcast.
    """
    found: dict[int, tf.Tensor] = {}
    by_dtype: dict[tf.DType, list[int]] = {}
    for index, variable in enumerate(variables):
        by_dtype.setdefault(variable.dtype.base_dtype, []).append(index)
    for number, members in enumerate(by_dtype.values()):
        one = f"{name}_{number}" if name and number else name
        received = bcast_n(
            [tf.convert_to_tensor(variables[i]) for i in members], one, root, mismatch, process_set
        )
        for i, value in zip(members, received, strict=True):
            found[i] = _assigned(variables[i], value)
    return [found[index] for index in range(len(variables))]


def _assigned(variable: tf.Variable, value: tf.Tensor) -> tf.Tensor:
    done = variable.assign(value, read_value=False)
    if tf.executing_eagerly():
        return value
    with tf.control_dependencies([done]):
        return tf.identity(value)


def allgather(
    value: tf.Tensor,
    name: str | None = None,
    mismatch: Mismatch = "invalid_argument",
    process_set: int = 0,
) -> tf.Tensor:
    """Joins the ranks' tensors along the first dimension.

    Args:
        value: [n_r, d...], any numeric or bool dtype; n_r may differ by rank and may be 0, d and
            dtype may not.
        name: of the op.
        mismatch: "failed_precondition": the error is that, instead of InvalidArgumentError.

    Returns [sum n_r, d...] in the order of the ranks, on every rank. Its gradient is this rank's
    rows of the sum over the ranks. Raises InvalidArgumentError on every rank for scalars (in graphs
    ValueError), else as bcast. Source: MPI-4.1 section 6.7, MPI_Allgatherv.
    """
    _require_initialised("ddl.allgather()")
    with device_of_collectives(process_set):
        return _made(
            operations().all_gather,
            tf.convert_to_tensor(value),
            mismatch=mismatch,
            what="ddl.allgather()",
            name=name,
            process_set=process_set,
        ).output


def allgather_n(
    tensors: Sequence[tf.Tensor],
    name: str | None = None,
    mismatch: Mismatch = "invalid_argument",
    process_set: int = 0,
) -> list[tf.Tensor]:
    """Joins each of many tensors as allgather does, all in one go.

    They have one dtype (else ValueError); first dimensions may differ by tensor too.
    """
    _require_initialised("ddl.allgather_n()")
    tensors = _one_dtype("ddl.allgather_n()", tensors)
    if not tensors:
        return []
    with device_of_collectives(process_set):
        return list(
            _made(
                operations().all_gather_n,
                tensors,
                mismatch=mismatch,
                what="ddl.allgather_n()",
                name=name,
                process_set=process_set,
            ).output
        )


def alltoall(
    value: tf.Tensor,
    splits: tf.Tensor | None = None,
    name: str | None = None,
    mismatch: Mismatch = "invalid_argument",
    process_set: int = 0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sends rows of a tensor to each rank.

    Args:
        value: [n_r, d...], any numeric or bool dtype; n_r may differ by rank and may be 0, d and
            dtype may not.
        splits: [ranks], integers: how many rows, from the first on, go to each rank; they add up
            to n_r. None: equally many, on this rank.
        name: of the op.
        mismatch: see allgather; of splits it is an InvalidArgumentError always.

    Returns [sum received, d...], the rows from all ranks in their order, and received, [ranks]: how
    many come from each, of the dtype of `splits`, else int32. The gradient sends them back. Raises
    InvalidArgumentError on every rank, which names the rank, where splits do not fit; else as
    bcast. Source: MPI-4.1 section 6.8, MPI_Alltoallv.
    """
    _require_initialised("ddl.alltoall()")
    if splits is None:
        given, dtype = tf.zeros([0], tf.int64), tf.int32
    else:
        given = tf.convert_to_tensor(splits)
        given, dtype = tf.cast(given, tf.int64), given.dtype
    with device_of_collectives(process_set):
        received = _made(
            operations().ddl_all_to_all,
            tf.convert_to_tensor(value),
            given,
            mismatch=mismatch,
            what="ddl.alltoall()",
            name=name,
            process_set=process_set,
        )
    return received.output, tf.cast(received.received_splits, dtype)


def reducescatter(
    value: tf.Tensor,
    op: ReduceOp = "avg",
    name: str | None = None,
    mismatch: Mismatch = "invalid_argument",
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
) -> tf.Tensor:
    """Reduces a tensor over the ranks and gives each rank its rows of the result.

    Args:
        value: [n, d...], of one shape on all ranks, and a dtype of allreduce.
        op: see ReduceOp.
        name: of the op.
        mismatch: see allgather.
        prescale: see allreduce.
        postscale: see allreduce.

    Returns [n // ranks, d...], with one row more on each of the first n % ranks ranks: in the order
    of the ranks the rows of what allreduce would return. The gradient of a sum or average is its
    transpose. Errors as bcast, of scalars always InvalidArgumentError (in graphs ValueError).
    Source: MPI-4.1 section 6.10, MPI_Reduce_scatter.
    """
    return reducescatter_n([value], op, name, mismatch, prescale, postscale, process_set)[0]


def reducescatter_n(
    tensors: Sequence[tf.Tensor],
    op: ReduceOp = "avg",
    name: str | None = None,
    mismatch: Mismatch = "invalid_argument",
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
) -> list[tf.Tensor]:
    """As reducescatter, of many tensors of one dtype (else ValueError) in one go."""
    _require_initialised("ddl.reducescatter()")
    tensors = _one_dtype("ddl.reducescatter_n()", tensors)
    if not tensors:
        return []
    require_real(tensors[0].dtype, name or "a tensor")
    with device_of_collectives(process_set):
        reduced = _made(
            operations().reduce_scatter_n,
            [_scaled(tensor, prescale) for tensor in tensors],
            op=op,
            mismatch=mismatch,
            what="ddl.reducescatter()",
            name=name,
            process_set=process_set,
        )
    return [_scaled(tensor, postscale) for tensor in reduced]


def allreduce(
    value: tf.Tensor | tf.IndexedSlices,
    average: bool = True,
    name: str | None = None,
    mismatch: Mismatch = "invalid_argument",
    op: ReduceOp | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
) -> tf.Tensor | tf.IndexedSlices:
    """Averages a tensor over the ranks, or reduces it in another way.

    Args:
        value: dense: any integer dtype, float16, bfloat16, float32 or float64, of one shape on all
            ranks. Or IndexedSlices, whose slices may differ in number and place; the result is
            IndexedSlices too, with the slices of all ranks in their order, divided by their number
            for an average.
        average: or sum; integers wrap around, and truncate toward zero where divided. Averages of
            up to 32 bits are added in 64, and do not wrap around.
        name: of the op.
        mismatch: of a dense tensor, see allgather.
        op: see ReduceOp, in place of `average`. The smallest and largest are NaN where a rank has a
            NaN. "adasum": gradients of different directions are added, those of the same averaged
            (Maleki et al., 2020); of floating-point tensors, each for itself, on a number of ranks
            that is a power of two, else InvalidArgumentError on every rank.
        prescale: a factor of `value`; integers are multiplied as float64 and truncated, halves as
            float32.
        postscale: a factor of the result, alike.

    All ranks get the same bits. Errors as bcast; TypeError for an average of integer IndexedSlices,
    which would be wrong where slices meet: they are added after the division, and for complex dense
    tensors; ValueError for IndexedSlices with another op or a factor. Sums and averages have a
    gradient, and so have the smallest and largest, in equal parts to the ranks that have it;
    products and adasum have none.
    """
    _require_initialised("ddl.allreduce()")
    how: ReduceOp = op or ("avg" if average else "sum")
    if isinstance(value, tf.IndexedSlices):
        if how not in ("sum", "avg") or (prescale, postscale) != (1.0, 1.0):
            raise ValueError(
                f"ddl.allreduce() of IndexedSlices with op={how}, prescale={prescale}, "
                f"postscale={postscale}: only sums and averages can be had. Convert them to a "
                "tensor: tf.convert_to_tensor(slices)."
            )
        return _allreduce_slices(value, how == "avg", name, process_set)
    tensor = tf.convert_to_tensor(value)
    require_real(tensor.dtype, name or "a tensor")
    with _device_of(how, process_set):
        reduced = _made(
            operations().all_reduce,
            _scaled(tensor, prescale),
            op=how,
            mismatch=mismatch,
            what="ddl.allreduce()",
            name=name,
            process_set=process_set,
        )
    return _scaled(reduced, postscale)


def _device_of(how: ReduceOp, process_set: int) -> contextlib.AbstractContextManager[object]:
    """Where a reduction is made: NCCL has no adasum."""
    return tf.device("/CPU:0") if how == "adasum" else device_of_collectives(process_set)


def _allreduce_slices(
    slices: tf.IndexedSlices, average: bool, name: str | None, process_set: int
) -> tf.IndexedSlices:
    if average and not (slices.dtype.is_floating or slices.dtype.is_complex):
        raise TypeError(
            f"ddl cannot average IndexedSlices of {slices.dtype.name}. Pass average=False, or cast "
            "the values to a floating-point type."
        )
    group = process_set
    indices = allgather(slices.indices, f"{name}_indices" if name else None, process_set=group)
    with tf.control_dependencies([indices]):
        values = allgather(slices.values, f"{name}_values" if name else None, process_set=group)
    if average:
        with tf.control_dependencies([values]):
            count = contributors(f"{name}_contributors" if name else None, group)
            values /= tf.cast(count, values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def contributors(name: str | None = None, process_set: int = 0) -> tf.Tensor:
    """How many ranks have not joined, a float32 scalar. Collective: joined ranks add zeros."""
    total = allreduce(tf.constant(1.0), average=False, name=name, process_set=process_set)
    assert isinstance(total, tf.Tensor)
    return total


def size_op(name: str | None = None, process_set: int = 0) -> tf.Tensor:
    """Number of ranks, int32 scalar, known when it runs. FailedPreconditionError before init().

    InvalidArgumentError on a rank that is not of the process set.
    """
    with tf.device("/CPU:0"):
        return operations().ddl_size(name=name, process_set=process_set)


def rank_op(name: str | None = None, process_set: int = 0) -> tf.Tensor:
    """This process's number among all ranks, or those of a process set, as size_op."""
    with tf.device("/CPU:0"):
        return operations().ddl_rank(name=name, process_set=process_set)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number among the ranks of its host, as size_op."""
    with tf.device("/CPU:0"):
        return operations().ddl_local_rank(name=name)


def allreduce_n(
    tensors: Sequence[tf.Tensor],
    average: bool = True,
    name: str | None = None,
    step: tf.Tensor | None = None,
    mismatch: Mismatch = "invalid_argument",
    op: ReduceOp | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: int = 0,
    rate: tf.Tensor | None = None,
) -> list[tf.Tensor]:
    """Averages each tensor over the ranks, or reduces it in another way; returns them in order.

    Args:
        tensors: see below.
        average: or sum, as in allreduce; so are mismatch, op, prescale and postscale.
        name: of the op.
        step: of the training, an int64 scalar from 0. Ranks that are at different ones get an
            InvalidArgumentError instead of an average of different steps.
        mismatch: as in allreduce.
        op: as in allreduce.
        prescale: as in allreduce.
        postscale: as in allreduce.
        rate: with `step`: the learning rate, a float32 scalar. Ranks with others, or without one,
            get an InvalidArgumentError, too; the last bits may differ.

    All ranks get the same bits. The tensors have a dtype of allreduce, all the same one, and any
    shapes. The halves are added as float32 and rounded once, or twice where several hosts have
    several ranks each. All tensors travel together, so many small ones cost little more than one.
    Errors as bcast; ValueError if dtypes are mixed.
    """
    _require_initialised("ddl.allreduce_n()")
    tensors = _one_dtype("ddl.allreduce_n()", tensors)
    if not tensors:
        return []
    require_real(tensors[0].dtype, name or "a tensor")
    how: ReduceOp = op or ("avg" if average else "sum")
    with _device_of(how, process_set):
        scaled = [_scaled(tensor, prescale) for tensor in tensors]
        at_step = step is not None
        reduced = _made(
            operations().all_reduce_at_step if at_step else operations().all_reduce_n,
            *([step, [] if rate is None else [rate], scaled] if at_step else [scaled]),
            op=how,
            mismatch=mismatch,
            what="ddl.allreduce_n()",
            name=name,
            process_set=process_set,
        )
    return [_scaled(tensor, postscale) for tensor in reduced]


def barrier(name: str, hint: str = "", process_set: int = 0) -> None:
    """Waits until all ranks are at the barrier of that name. Not for graphs.

    Args:
        name: what all ranks must have in common here, as "the end of epoch 3 after 100 steps".
        hint: a sentence on what to do where a rank is at something else. Of all ranks alone.
        process_set: the ranks that wait for each other.

    Raises InvalidArgumentError on every rank, which names both, if ranks are at different things;
    RuntimeError before init(), or if a rank has left or does not come.
    """
    _require_initialised("ddl.barrier()")
    if process_set:
        with tf.init_scope():
            allreduce(tf.zeros([], tf.int32), average=False, name=name, process_set=process_set)
        return
    try:
        arrays.barrier(name, hint)
    except ValueError as error:
        raise tf.errors.InvalidArgumentError(None, None, str(error)) from None


def join() -> int:
    """For a rank without data: contributes zeros until all ranks have joined. Not for graphs.

    See ddl_ops.arrays.join, whose result and errors these are. Raises SystemExit where the others
    were asked to end meanwhile (ddl_ops.preemption).
    """
    _require_initialised("ddl.join()")
    last = arrays.join()
    note_join()
    preemption.after_join(last)
    return last
