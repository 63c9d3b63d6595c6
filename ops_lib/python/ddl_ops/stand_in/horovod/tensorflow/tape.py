"""GradientTapes whose gradients are combined over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from ddl_ops.gradients import ALL_RANKS, COMBINES, note_combined

from horovod.common.basics import Average
from horovod.tensorflow.compression import Compression
from horovod.tensorflow.gradient_reduction import (
    DistributedGradients,
    Reduction,
    groups_of,
    note_tape,
)
from horovod.tensorflow.mpi_ops import ProcessSet, global_process_set


class _DistributedGradientTape(tf.GradientTape):
    """What a tape becomes; it has recorded what that one has, and does if that does."""

    _hvd: DistributedGradients
    _of: tf.GradientTape

    @property
    def _recording(self) -> bool:
        # TensorFlow crashes where a record is ended twice: the two tapes end it as one.
        return self._of._recording if self._shares_record() else self._records

    @_recording.setter
    def _recording(self, recording: bool) -> None:
        if self._shares_record():
            self._of._recording = recording
        else:
            self._records = recording

    def _shares_record(self) -> bool:
        """Whether this tape was made while that one recorded, or after it had."""
        return self._tape is not None and self._tape is self._of._tape

    def register_local_source(self, source: Any) -> None:
        """From here on the gradient of this variable stays on its rank."""
        self._hvd.register_local(source)

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **options: Any,
    ) -> Any:
        """As that of a tape, combined over the ranks. A None must be None on all of them."""
        del use_generic_names
        gradients = super().gradient(target, sources, output_gradients, **options)
        note_tape()
        variables = tf.nest.flatten(sources)
        for variable in variables:  # a local one's stays as it is
            local = self._hvd.is_local(variable)
            ranks = ALL_RANKS if local else self._hvd.reduction.ranks
            note_combined(variable, ranks, local)
        reduced = self._hvd(tf.nest.flatten(gradients), variables)
        return tf.nest.pack_sequence_as(gradients, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """(variable, gradient) pairs of those that stay on their ranks, and of the others."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(gradients), strict=True))
        local = [pair for pair in pairs if self._hvd.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._hvd.is_local(pair[0])]


setattr(_DistributedGradientTape, COMBINES, True)


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """A tape that combines over the ranks what `gradtape` computes.

    Args:
        gradtape: may have recorded already, or still do; it stays what it is.
        device_dense: has no effect, nor has device_sparse.
        device_sparse: see above.
        compression: Compression.fp16 sends gradients as float16.
        sparse_as_dense: whether IndexedSlices are made dense before.
        op: hvd.Average, or another.
        gradient_predivide_factor: see DistributedOptimizer.
        num_groups: checked, and without effect, as groups.
        groups: see above.
        process_set: the ranks that take part; others apply what they have.
        scale_local_gradients: whether those that stay on their ranks are divided by their number.
    """
    del device_dense, device_sparse
    tape = copy.copy(gradtape)
    kind = type(gradtape)
    if not issubclass(kind, _DistributedGradientTape):
        tape.__class__ = type(kind.__name__, (_DistributedGradientTape, kind), {})
    tape._of, tape._records = gradtape, False
    tape._hvd = DistributedGradients(
        Reduction(
            name="DistributedGradientTape",
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups_of(num_groups, groups),
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    )
    return tape


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """DistributedGradientTape; gradients of `local_layers`, one or several, stay on their ranks."""
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in weights_of(local_layers):
        tape.register_local_source(variable)
    return tape


def weights_of(layers: Any) -> list[Any]:
    """The trainable weights of one or several layers; of None, none."""
    if layers is None:
        return []
    several = layers if isinstance(layers, Iterable) else [layers]
    return [weight for layer in several for weight in layer.trainable_weights]
