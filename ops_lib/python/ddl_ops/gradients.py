"""Averaging of gradients over the ranks, in groups."""

from __future__ import annotations

import functools
import math
import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf  # noqa: TID253
from tensorflow.python.eager import backprop  # noqa: TID253
from tensorflow.python.framework import ops  # noqa: TID253
from tensorflow.python.ops import gradients_util  # noqa: TID253

from ddl_ops import averaging
from ddl_ops.collectives import allreduce, allreduce_n, require_real
from ddl_ops.environment import PLACEMENT, group_size, wire_dtype
from ddl_ops.environment import sparse_as_dense as default_sparse_as_dense
from ddl_ops.program_order import keeps_order

# What DDL_WIRE_DTYPE makes smaller.
_COMPRESSED = (tf.float32, tf.float64)
# The ranks over which something is reduced, where these are all that there are.
ALL_RANKS: tuple[int, ...] = ()
# The attribute of a gradient that was reduced: over which ranks.
_REDUCED = "_ddl_reduced"
# The attribute of a variable whose gradient tapes have computed: a _Computed.
_COMPUTED = "_ddl_computed_by_tapes"
# The attribute of a class of tapes that combine what they compute.
COMBINES = "_ddl_combines"
# More elements than metrics that are averaged in one tensor.
_FEW = 8
# More gradients that are None than these are compared by a checksum.
_NAMED = 20
# Of the gradients that were computed; None is one whose rank nobody knows.
_shapes: set[tuple[int | None, ...] | None] = set()
# Graphs in which the script itself has averaged gradients, and by what.
_explicit: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


@functools.cache
def note_gradients() -> None:
    """From here on this rank tells whoever started the job whether it computes gradients.

    All go this way: of tapes, in tf.functions too, and of TensorFlow 1 graphs; Keras's fit(), and
    whatever optimizer applies them.
    """
    tape: Any = backprop.GradientTape
    tape.gradient = _of_tape(_noted(tape.gradient))
    gradients_util._GradientsHelper = _of_graph(_noted(gradients_util._GradientsHelper))
    # Asking for a graph makes one, and then tf.enable_eager_execution() is refused.
    if ops.has_default_graph() or ops._default_graph_stack._global_default_graph is not None:
        graph = tf.compat.v1.get_default_graph()
        if graph.get_collection(tf.compat.v1.GraphKeys.TRAIN_OP):  # made before
            averaging.computed_gradients()


def _noted(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def noted(*args: Any, **kwargs: Any) -> Any:
        averaging.computed_gradients()
        computed = compute(*args, **kwargs)
        for gradient in tf.nest.flatten(computed):
            if isinstance(gradient, tf.Tensor):
                _shapes.add(_dimensions(gradient.shape))
        return computed

    return noted


def _of_tape(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, COMBINES):
            note_combined(sources, None)
        return compute(self, target, sources, *args, **kwargs)

    return gradient


def _of_graph(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def gradients(ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        note_combined(xs, None)
        return compute(ys, xs, *args, **kwargs)

    return gradients


class _Computed:
    """How tapes have computed a variable's gradient: over which ranks combined, None if not.

    Attributes:
        eagerly: of the last one outside tf.functions, in a list; empty if there was none.
        traced: of the last one in the graph of each tf.function, which runs again without a note;
            and whether it is applied there, so that nothing else can be given it.
        local: whether one has left it to its rank, as combined.
    """

    def __init__(self) -> None:
        self.eagerly: list[tuple[int, ...] | None] = []
        self.traced: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...] | None, bool]] = (
            weakref.WeakKeyDictionary()
        )
        self.local = False


def note_combined(sources: Any, ranks: tuple[int, ...] | None, local: bool = False) -> None:
    """A tape has computed gradients of these, in whatever structure, and combined them or not.

    Over ALL_RANKS, or these; None: it has not. With `local` it has left them to their rank, and
    they are to be applied as they are.
    """
    for source in map(_within, tf.nest.flatten(sources)):
        if not isinstance(source, tf.Variable):
            continue
        if not hasattr(source, _COMPUTED):
            setattr(source, _COMPUTED, _Computed())
        computed = getattr(source, _COMPUTED)
        computed.local |= local
        if tf.executing_eagerly():
            computed.eagerly = [ranks]
        else:
            computed.traced[tf.compat.v1.get_default_graph()] = ranks, False


def was_combined(variable: Any, ranks: tuple[int, ...] = ALL_RANKS) -> bool | None:
    """Whether a tape has combined the gradient of this variable that is applied now.

    Over all ranks, or over `ranks`. What the script has made of it since, by clipping say, is
    combined too, but bears no mark. None: nobody knows, for tapes have computed it in both ways,
    one of them in a tf.function that may have run again.
    """
    computed = getattr(_within(variable), _COMPUTED, None)
    if computed is None:
        return False
    # A branch or a loop is a graph within that of its function.
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        if graph in computed.traced:
            by_tape, _ = computed.traced[graph]
            computed.traced[graph] = by_tape, True
            return by_tape in (ALL_RANKS, ranks)
        graph = getattr(graph, "outer_graph", None)
    from_functions = [by_tape for by_tape, applied in computed.traced.values() if not applied]
    ways = {by_tape in (ALL_RANKS, ranks) for by_tape in [*computed.eagerly, *from_functions]}
    return None if len(ways) > 1 else True in ways


def was_left_local(variable: Any) -> bool:
    """Whether a tape has ever left the gradient of this variable to its rank."""
    computed = getattr(_within(variable), _COMPUTED, None)
    return computed is not None and computed.local


def _within(variable: Any) -> Any:
    """TensorFlow's variable within one of Keras 3."""
    value = getattr(variable, "value", None)
    return value if isinstance(value, tf.Variable) else variable


def note_averaged(tensors: Iterable[Any]) -> None:
    """The script has averaged these by a call of its own; notes it if they may be gradients.

    Or weights. Single numbers are not, unless all variables are, nor are a few numbers of which no
    variable has the shape: losses and metrics, to be shown.
    """
    tensors = list(tensors)
    if any(map(_may_be_gradient, tensors)):
        averaging.averaged_by_script()
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        update_rows_once()


def _may_be_gradient(tensor: Any) -> bool:
    if isinstance(tensor, tf.IndexedSlices):
        return True
    shape = getattr(tensor, "shape", None)
    dimensions = _dimensions(np.shape(tensor) if shape is None else shape)
    if dimensions == ():
        return _shapes == {()}
    if dimensions is None or None in dimensions or not _shapes or dimensions in _shapes:
        return True
    return math.prod(d for d in dimensions if d is not None) > _FEW


def _dimensions(shape: Any) -> tuple[int | None, ...] | None:
    """As numbers, also under TensorFlow 1, which has objects for them; None: nobody knows."""
    known = tf.TensorShape(shape)
    return None if known.rank is None else tuple(known.as_list())


def mark_reduced(gradient: Any, ranks: tuple[int, ...] = ALL_RANKS) -> None:
    """Lets reduce_gradients leave this gradient as it is: to reduce twice is only work.

    That over all ranks and, where it was reduced over `ranks` alone, that over these.
    """
    if gradient is not None:
        setattr(gradient, _REDUCED, ranks)


def is_reduced(gradient: Any, ranks: tuple[int, ...] = ALL_RANKS) -> bool:
    """Whether it is marked as reduced over all ranks, or over `ranks`.

    What is computed from one that is, is not.
    """
    return getattr(gradient, _REDUCED, None) in (ALL_RANKS, ranks)


def was_reduced(gradient: Any) -> bool:
    """Whether it is marked as reduced over whatever ranks."""
    return hasattr(gradient, _REDUCED)


def mark_as(gradient: Any, other: Any) -> None:
    """Marks a gradient as reduced if another is, over the same ranks."""
    if was_reduced(other):
        mark_reduced(gradient, getattr(other, _REDUCED))


def with_each_row_once(gradient: Any) -> Any:
    """IndexedSlices with the sum of each row's slices, marked as these; anything else as it is.

    Optimizers of Keras 2 and TensorFlow 1 add them up themselves. In Keras 3, Adam and the like
    would square each slice.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, where = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, where, tf.size(rows))
    merged = tf.IndexedSlices(values, rows, gradient.dense_shape)
    mark_as(merged, gradient)
    return merged


def update_rows_once() -> None:
    """From here on optimizers of Keras 3 add up the slices of a row, of which each rank has some.

    They stay apart until then, so that clipping comes out as in one process with all of them.
    """
    keras: Any = sys.modules.get("keras")
    if getattr(keras, "__version__", "").startswith("3."):
        _hook_apply(keras.optimizers.Optimizer)


@functools.cache
def _hook_apply(optimizer: Any) -> None:
    owner: Any = next(one for one in optimizer.__mro__ if "apply" in vars(one))
    apply: Callable[..., Any] = owner.apply

    @functools.wraps(apply)
    def apply_added_up(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        return apply(self, [with_each_row_once(grad) for grad in grads], trainable_variables)

    owner.apply = apply_added_up


def keeping_marks(change: Callable[..., Any]) -> Callable[..., Any]:
    """A method that makes other gradients of a list of them, as loss scaling does: as marked."""

    @functools.wraps(change)
    def changed(self: Any, grads: Iterable[Any]) -> list[Any]:
        before = list(grads)
        after = list(change(self, before))
        for one, other in zip(before, after, strict=True):
            if other is not None:
                mark_as(other, one)
        return after

    return changed


def note_explicit_averages(what: str) -> None:
    """The script averages gradients of the current graph by calling `what`."""
    averaging.averaged_by_script()
    _explicit[tf.compat.v1.get_default_graph()] = what


def averaged_by_both(gradients: Iterable[Any]) -> str | None:
    """What else averages in this graph, if reduce_gradients would reduce some of `gradients`.

    A mark is lost where a gradient is clipped, so these may be averages of averages.
    """
    what = _explicit.get(tf.compat.v1.get_default_graph())
    if any(g is not None and not is_reduced(g) for g in gradients):
        return what
    return None


def name_in_order(name: str) -> str | None:
    """`name` for an op of ours, or None where a name would take it out of its thread's order.

    Eagerly, beside the main thread, ranks know a named collective by its name alone, and ours has
    the same name in all threads.
    """
    return name if not tf.executing_eagerly() or keeps_order(name) else None


def split_into_groups(counts: Sequence[int], limit: int | None) -> list[list[int]]:
    """Cuts the indices of `counts` (elements) into runs of at most `limit` elements together.

    From the last to the first: the gradients of the last layers are ready first. An index above
    the limit is a group of its own. None: one group.
    """
    groups: list[list[int]] = []
    room = 0
    for index in reversed(range(len(counts))):
        if not groups or (limit is not None and counts[index] > room):
            groups.append([])
            room = limit or 0
        groups[-1].append(index)
        room -= counts[index]
    return groups


def which_are_none(gradients: Sequence[Any], dtype: tf.DType) -> tf.Tensor:
    """An empty tensor that ranks compare by its shape: [0, 0, gradients, numbers of the None].

    To be reduced with the others, at no cost: else those of two variables of one shape would be
    averaged where ranks have None for different ones. ddl_ops.own_errors reads it.
    """
    numbers = [i for i, gradient in enumerate(gradients) if gradient is None]
    if len(numbers) > _NAMED:
        numbers[_NAMED:] = [zlib.crc32(repr(numbers).encode())]
    return tf.zeros([0, 0, len(gradients), *numbers], dtype)


def reduce_gradients(
    gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
    average: bool = True,
    name: str = "ddl_gradients",
    sparse_as_dense: bool | None = None,
    reduce_n: Callable[..., list[tf.Tensor]] = allreduce_n,
    step: tf.Tensor | None = None,
    rate: tf.Tensor | None = None,
    ranks: tuple[int, ...] = ALL_RANKS,
) -> list[tf.Tensor | tf.IndexedSlices | None]:
    """Averages (or sums) gradients over the ranks; returns them in order.

    Args:
        gradients: None stays None, and must be None on every rank (else InvalidArgumentError).
        average: over the ranks, else the sum.
        name: of the ops, with a number after it.
        sparse_as_dense: whether IndexedSlices become dense tensors before they are reduced, or stay
            IndexedSlices, with the slices of all ranks: less to send as long as these are fewer
            than the rows of the variable. None: as DDL_SPARSE_AS_DENSE says.
        reduce_n: reduces dense tensors of one dtype, given with `average` and a name.
        step: of the training, an int64 scalar: an error where ranks are at different ones.
        rate: with `step`: the learning rate, a float32 scalar: an error where ranks have others.
        ranks: over which `reduce_n` reduces, if these are not all.

    A gradient that this function has returned before, or that is marked as reduced over these ranks
    or all, stays as it is.

    With DDL_WIRE_DTYPE, dense float32 and float64 gradients are rounded to that type before they
    are reduced, and the result to it again: half the bytes or less to send, and an error of at most
    2 u times the average magnitude over the ranks (3 u where several hosts have several ranks
    each), u = 2^-11 for float16 (whose smallest step is 2^-24, and which ends at 65504) and 2^-8
    for bfloat16.

    Gradients of one dtype are reduced by one AllReduceN, or by several of about DDL_GROUP_SIZE
    elements, each after the one before it; then the sparse ones. Errors as allreduce_n and
    allreduce.
    """
    if PLACEMENT.size == 1 and not PLACEMENT.launched:
        return list(gradients)
    if sparse_as_dense is None:
        sparse_as_dense = default_sparse_as_dense()
    if step is not None:
        reduce_n = functools.partial(reduce_n, step=step, rate=rate)
    reduced = list(gradients)
    present = [
        i
        for i, gradient in enumerate(gradients)
        if gradient is not None and not is_reduced(gradient, ranks)
    ]
    sparse = [
        i for i in present if not sparse_as_dense and isinstance(gradients[i], tf.IndexedSlices)
    ]
    dense = {i: tf.convert_to_tensor(gradients[i]) for i in present if i not in sparse}
    own_dtypes = {i: gradient.dtype for i, gradient in dense.items()}
    if wire := wire_dtype():
        dense = {
            i: tf.cast(gradient, wire) if own_dtypes[i] in _COMPRESSED else gradient
            for i, gradient in dense.items()
        }
    by_dtype: dict[tf.DType, list[int]] = {}
    for i in dense:
        by_dtype.setdefault(dense[i].dtype, []).append(i)
    if present:
        averaging.averaged()
    absent = sum(gradient is None for gradient in gradients)
    # Where all others were reduced before, these were compared then.
    compares = absent > 0 and (bool(present) or absent == len(gradients))
    if compares and not by_dtype:
        by_dtype[tf.float32] = []
    previous: list[tf.Tensor] = []
    number = 0
    for dtype, members in by_dtype.items():
        counts = [dense[i].shape.num_elements() or 0 for i in members]
        for group in split_into_groups(counts, group_size()) or [[]]:
            indices = [members[position] for position in group]
            tensors = [dense[i] for i in indices]
            if compares and number == 0:
                tensors.append(which_are_none(gradients, dtype))
            with tf.control_dependencies(previous):
                place = name_in_order(f"{name}_{number}")
                sums = reduce_n(tensors, average, place)
            previous = sums[:1]
            number += 1
            for i, total in zip(indices, sums, strict=False):
                reduced[i] = tf.cast(total, own_dtypes[i])
    for i in sparse:
        with tf.control_dependencies(previous):
            gathered = allreduce(gradients[i], average, name_in_order(f"{name}_{number}"))
        previous = [gathered.values]
        number += 1
        reduced[i] = gathered
    if sparse:
        update_rows_once()
    for i in present:
        mark_reduced(reduced[i], ranks)
    return reduced


def grads_reduce(
    grads_and_vars: Iterable[tuple[Any, Any]],
    average: bool = True,
    sparse_as_dense: bool | None = None,
) -> list[tuple[Any, Any]]:
    """reduce_gradients for (gradient, variable) pairs, as optimizers compute and apply them."""
    pairs = list(grads_and_vars)
    for gradient, variable in pairs if PLACEMENT.launched else ():
        if isinstance(gradient, tf.Tensor):
            require_real(gradient.dtype, f"the gradient of {getattr(variable, 'name', variable)}")
    reduced = reduce_gradients(
        [gradient for gradient, _ in pairs], average, sparse_as_dense=sparse_as_dense
    )
    return [(gradient, variable) for gradient, (_, variable) in zip(reduced, pairs, strict=True)]
