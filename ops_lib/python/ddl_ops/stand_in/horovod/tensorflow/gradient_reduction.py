"""What DistributedOptimizer and DistributedGradientTape do with gradients before they are applied.

Gradients of a step travel together, and rounded to DDL_WIRE_DTYPE where that is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from ddl_ops import averaging
from ddl_ops.environment import PLACEMENT
from ddl_ops.gradients import (
    is_reduced,
    mark_as,
    mark_reduced,
    name_in_order,
    reduce_gradients,
    update_rows_once,
)

from horovod.common.basics import Average, require_initialized
from horovod.common.process_sets import number_of
from horovod.tensorflow import mpi_ops
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set
from horovod.tensorflow.reductions import allreduce_slices, ranks_of, require_plain
from horovod.tensorflow.util import key_of, keys_of


@dataclass(frozen=True)
class Reduction:
    """How gradients are combined: the arguments of DistributedOptimizer that say so.

    Attributes:
        name: of the ops.
        groups: checked, and without effect: all gradients of one dtype travel together.
    """

    name: str = "DistributedGradients"
    compression: Any = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    gradient_predivide_factor: float = 1.0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for what does not go together."""
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError(
                "gradient_predivide_factor is part of an average: pass op=hvd.Average."
            )
        check_groups(self.groups)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Over which gradients are combined, or ALL_RANKS."""
        return ranks_of(self.process_set)

    def local(self, gradient: Any) -> Any:
        """What a gradient that stays on its rank is applied as."""
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            values = self._of_own(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return self._of_own(gradient)

    def _of_own(self, values: tf.Tensor) -> tf.Tensor:
        # Always a new tensor, for it is marked: one that another variable has, too, is not.
        if not self.scale_local_gradients:
            return tf.identity(values)
        return values / tf.cast(self.process_set.size() or 1, values.dtype)

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any] = (),
        local: frozenset[Any] = frozenset(),
    ) -> list[Any]:
        """Gradients combined over the ranks, in order.

        Args:
            gradients: None stays None, and must be None on every rank, else it is
                FailedPreconditionError; one that was reduced before, over the same ranks or all,
                stays what it is.
            variables: whose they are; only needed with `local`.
            local: keys (key_of) of variables whose gradients stay on their ranks.

        Raises ValueError before init(), for a process set that is not there, and as allreduce for
        IndexedSlices.
        """
        require_initialized()
        number_of(self.process_set)
        reduced = list(gradients)
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
            if not self.sparse_as_dense:
                require_plain(self.op, self.gradient_predivide_factor)
            update_rows_once()
        at_home = (
            [i for i, variable in enumerate(variables) if key_of(variable) in local]
            if local
            else []
        )
        for i in at_home:
            if not is_reduced(reduced[i]):
                reduced[i] = self.local(reduced[i])
                mark_reduced(reduced[i])
        if not PLACEMENT.launched or not self.process_set.included():
            return reduced
        ranks = self.ranks
        others = [i for i in range(len(reduced)) if i not in at_home]
        sparse = [
            i
            for i in others
            if isinstance(reduced[i], tf.IndexedSlices)
            and not self.sparse_as_dense
            and not is_reduced(reduced[i], ranks)
        ]
        dense = [i for i in others if i not in sparse]
        combined = reduce_gradients(
            [reduced[i] for i in dense],
            average=self.op == Average,
            name=self.name,
            sparse_as_dense=True,
            reduce_n=self._reduce_n,
            ranks=ranks,
        )
        for i, one in zip(dense, combined, strict=True):
            reduced[i] = one
        for number, i in enumerate(sparse):
            averaging.averaged()
            name = name_in_order(f"{self.name}_sparse_{number}")
            reduced[i] = allreduce_slices(reduced[i], self.op, name, self.process_set, False)
            mark_reduced(reduced[i], ranks)
        return reduced

    def _reduce_n(self, tensors: Sequence[tf.Tensor], average: bool, name: str | None) -> list[Any]:
        del average  # is in op
        after = self.gradient_predivide_factor
        before = 1.0 / after
        pairs = [self.compression.compress(tensor) for tensor in tensors]
        # The ops divide by the number of ranks: by those that have not joined.
        together = mpi_ops._grouped_allreduce(
            [small for small, _ in pairs],
            name,
            self.op,
            before,
            after,
            process_set=self.process_set,
        )
        return [
            self.compression.decompress(one, context)
            for one, (_, context) in zip(together, pairs, strict=True)
        ]


def make_allreduce_grads_fn(
    name: str,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[..., list[Any]]:
    """What combines a list of gradients, for optimizers and tapes of the script's own.

    No part of Horovod's interface, but public scripts call it, with the arguments of several
    releases. The function may be given the variables as well.
    """
    del device_dense, device_sparse
    reduction = Reduction(
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
    )

    def allreduce_grads(grads: Sequence[Any], vars: Any = None) -> list[Any]:
        del vars
        note_tape()
        return reduction(list(grads))

    return allreduce_grads


def check_groups(groups: Any) -> None:
    """Raises ValueError unless it is None, a number, or a list of lists of variables."""
    if groups is None or (isinstance(groups, int) and groups >= 0):
        return
    if isinstance(groups, list) and all(isinstance(one, list) for one in groups):
        return
    raise ValueError(f"groups={groups!r}. Pass a number from 0, or a list of lists of variables.")


def groups_of(num_groups: int, groups: Any) -> Any:
    """The newer argument, of the two by which groups are given."""
    return num_groups if num_groups else groups


class DistributedGradients:
    """A Reduction with the variables that stay on their ranks."""

    def __init__(self, reduction: Reduction) -> None:
        self.reduction = reduction
        self._local: set[Any] = set()

    def register_local(self, variable: Any) -> None:
        """From here on its gradient stays on its rank, divided by the number of ranks."""
        self._local |= keys_of([variable])

    @property
    def has_local(self) -> bool:
        """Whether any was registered."""
        return bool(self._local)

    def is_local(self, variable: Any) -> bool:
        """Whether it was registered."""
        return key_of(variable) in self._local

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """See Reduction."""
        return self.reduction(gradients, variables, frozenset(self._local))

    def overflowing_alike(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """As a call, for loss scaling: where a local gradient overflows, those of all ranks do.

        A rank that skipped the step alone would go on with another scale than the others. One more
        scalar is reduced for that, also by a rank whose local gradients are None.
        """
        if not self.has_local:
            return self(gradients, variables)
        pairs = zip(gradients, variables, strict=True)
        mine = _zero_or_nan([one for one, variable in pairs if self.is_local(variable)])
        *combined, all_ranks = self([*gradients, mine], [*variables, None])
        return [_plus(one, all_ranks) for one in combined]


def _zero_or_nan(gradients: Sequence[Any]) -> tf.Tensor:
    """0 if all elements are finite, else NaN, which stays NaN in whatever it is reduced with."""
    dense = [one.values if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    finite = [tf.reduce_all(tf.math.is_finite(one)) for one in dense if one is not None]
    return tf.where(tf.reduce_all(finite), 0.0, float("nan")) if finite else tf.constant(0.0)


def _plus(gradient: Any, number: tf.Tensor) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values + tf.cast(number, gradient.values.dtype)
        total = tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    else:
        total = gradient + tf.cast(number, gradient.dtype)
    mark_as(total, gradient)
    return total


def note_tape() -> None:
    """The script averages by a tape: what it applies then may be clipped, and still averages."""
    averaging.averaged_by_script()
