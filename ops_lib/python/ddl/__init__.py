"""Data-parallel training with TensorFlow: import it, and the script trains on all ranks.

With DDL_OPTIONS in the environment (ddl-run sets it), `import ddl` starts communication and hooks
the optimizers of tf.compat.v1.train, those of Keras 2 in TensorFlow 1 mode and the variable
initialisers. Without it, a script calls ddl.init() and the functions here. Either way each rank
sees a GPU of its own, unless DDL_GPUS=all.
Outside mpirun there is one rank, and what needs others raises RuntimeError. For Keras 3 see
ddl.keras, for files of data that still come ddl.data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
from ddl_ops import (
    averaging,
    collectives,
    equal_weights,
    gradients,
    lifecycle,
    preemption,
    progress,
    tf1_hooks,
    tf1_keras,
    weight_notes,
)
from ddl_ops.environment import PLACEMENT, child_of_rank, require_launched
from ddl_ops.training_watch import look_after_training

from ddl import data

__all__ = [
    "DDLCallback",
    "DDLGlobalVariablesCallback",
    "EpochHook",
    "PreemptionHook",
    "allgather",
    "allreduce",
    "allreduce_n",
    "barrier",
    "bcast",
    "data",
    "end_of_step",
    "grads_reduce",
    "init",
    "join",
    "local_rank",
    "note_weights",
    "num_hosts",
    "on_preempt",
    "rank",
    "report",
    "size",
]

DDLCallback = tf1_keras.DDLCallback
DDLGlobalVariablesCallback = tf1_keras.DDLGlobalVariablesCallback
EpochHook = tf1_hooks.EpochHook
PreemptionHook = tf1_hooks.PreemptionHook


def rank() -> int:
    """This process's number among all ranks, from 0."""
    return PLACEMENT.rank


def size() -> int:
    """Number of ranks."""
    return PLACEMENT.size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0: the GPU it uses."""
    return PLACEMENT.local_rank


def num_hosts() -> int:
    """Number of hosts."""
    return PLACEMENT.num_hosts


def init(options: str = "") -> None:
    """Starts communication among the ranks, for scripts that call the functions below themselves.

    `options` is free text, as DDL_OPTIONS: MPI chooses how to communicate. Collective. Raises
    RuntimeError outside mpirun, on a second call, and if MPI does not start. Where `import ddl` has
    initialised, the first call does nothing.
    """
    del options  # kept in the signature: scripts pass it
    lifecycle.init()
    look_after_training()


def bcast(init_val: tf.Tensor, name: str | None = None, root: int = 0) -> tf.Tensor:
    """Rank `root`'s value, on every rank. Any shape; see ddl_ops.collectives.bcast for errors."""
    return collectives.bcast(init_val, name, root)


def barrier(name: str = "barrier", hint: str = "") -> None:
    """Waits until all ranks are at the barrier of that name, as "the end of epoch 3".

    See ddl_ops.collectives.barrier for errors, which end with `hint`.
    """
    collectives.barrier(name, hint)


def join() -> int:
    """For a rank that has no more data, while others have: returns when all have called it.

    Until then it contributes zeros to what the others reduce, and averages are over the ranks that
    have not joined. Returns the last rank to join, whose weights are the newest. See
    ddl_ops.collectives.join for errors.
    """
    return collectives.join()


def on_preempt(save: Callable[[int], None], *, every_rank: bool = False) -> None:
    """From here on SIGTERM does not end this rank: all ranks save at the end of one step, and end.

    For a loop of the script's own, which calls end_of_step(); before it begins, on every rank and
    in the main thread. A handler of SIGTERM that the script itself installs, before or after, goes
    before: then only SIGURG asks.

    Args:
        save: called with the number of steps done, when all ranks are to end; what it has saved is
            what the next start of the script has to go on from.
        every_rank: whether all ranks call it; else rank 0 does, or, where it has joined, one that
            has not.
    """
    preemption.on_preempt(save, every_rank=every_rank)


def end_of_step(step: int) -> None:
    """Ends all ranks here, once all is saved, if any of them has been asked to end. Collective.

    To be called by all ranks after each step. Costs a reduction of 32 bytes. Rank 0 also reports
    the step, at most once in a second.

    Args:
        step: so many steps are done, the same on all ranks.

    Raises SystemExit where the ranks end; RuntimeError before on_preempt(), and on ranks that are
    to end and are at different steps; as barrier() if a rank does not come.
    """
    preemption.end_of_step(step)


def allgather(tensor: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """All ranks' tensors joined along the first dimension; see ddl_ops.collectives.allgather."""
    return collectives.allgather(tensor, name)


def allreduce(
    tensor: tf.Tensor | tf.IndexedSlices, average: bool = True, name: str | None = None
) -> tf.Tensor | tf.IndexedSlices:
    """A tensor averaged (or summed) over the ranks; IndexedSlices stay what they are.

    See ddl_ops.collectives.allreduce.
    """
    reduced = collectives.allreduce(tensor, average, name)
    gradients.note_averaged([tensor])
    return reduced


def allreduce_n(
    grads: Sequence[tf.Tensor], average: bool = True, name: str | None = None
) -> list[tf.Tensor]:
    """Each tensor averaged (or summed) over the ranks; see ddl_ops.collectives.allreduce_n."""
    reduced = collectives.allreduce_n(grads, average, name)
    gradients.note_averaged(grads)
    return reduced


def grads_reduce(
    grads_and_vars: Iterable[tuple[Any, Any]],
    average: bool = True,
    sparse_as_dense: bool | None = None,
) -> list[tuple[Any, Any]]:
    """(gradient, variable) pairs with the gradients averaged (or summed) over the ranks.

    Variables that ranks have never trained together before begin with the first rank's values. None
    stays None; IndexedSlices become dense unless `sparse_as_dense` (or, where that is None,
    DDL_SPARSE_AS_DENSE) says otherwise; see ddl_ops.gradients.reduce_gradients.
    """
    require_launched("ddl.grads_reduce()")
    pairs = list(grads_and_vars)
    if any(gradient is not None for gradient, _ in pairs):
        averaging.averaged_by_script()
    equal_weights.start_equal([variable for _, variable in pairs])
    return gradients.grads_reduce(pairs, average, sparse_as_dense)


def report(
    *,
    step: int | None = None,
    steps: int | None = None,
    epoch: int | None = None,
    **metrics: float,
) -> None:
    """Shows progress to whoever started the job: rank 0 appends a line to DDL_PROGRESS.

    Nothing happens on other ranks or without DDL_PROGRESS. Example:
    ddl.report(step=10, steps=250, loss=0.31). See ddl_ops.progress.append.
    """
    progress.append({"step": step, "steps": steps, "epoch": epoch, **metrics}, source="script")


def note_weights(step: int, variables: Sequence[Any]) -> None:
    """Notes digests of weights, so that `ddl-airflow rerun --prove` can compare them.

    For a loop of the script's own, before the first step and after each: fit() and sessions do so
    themselves. Rank 0 notes those of the steps that are compared, and only with `lineage: {prove:
    true}` in the manifest; else nothing happens.

    Args:
        step: so many are done; 0 before the first.
        variables: of TensorFlow or Keras, in the same order each time.
    """
    weight_notes.note_weights(step, variables)


if PLACEMENT.launched:
    if child_of_rank() or os.environ.get("DDL_OPTIONS") is None:
        # A child, which is no rank, has that of its rank. A script that calls init() itself has no
        # other moment: what it does before that may open all GPUs of the host.
        tf1_hooks.use_one_gpu()
    else:
        if not lifecycle.initialised():
            lifecycle.init(by_import=True)
        look_after_training()
        tf1_hooks.install()
