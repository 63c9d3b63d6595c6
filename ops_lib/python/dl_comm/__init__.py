"""Cray's deep learning plugin (dl_comm, until 2018 ml_comm), over the ops of ddl.

    import dl_comm as mc

    mc.init(1, 1, elements_of_the_model, "tensorflow")
    mc.config_team(0, 0, warm_up_steps, steps, 1, 100)
    new = mc.broadcast(tf.trainable_variables(), 0)      # tensors: to assign to the variables
    grads = mc.gradients([g for g, _ in pairs], 0)       # tensors: averages
    mc.finalize()

What is passed decides: tensors and variables make ops of a TensorFlow 1 graph, NumPy arrays are
communicated at once. Importing this imports no TensorFlow. A process that no launcher started is
one rank alone, whose averages are what it passes.

Source: the plugin's porting guide, and the calls of public scripts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsInt

import numpy as np
from ddl_ops import arrays, lifecycle
from ddl_ops.environment import PLACEMENT, require_launched

__all__ = [
    "average",
    "barrier",
    "broadcast",
    "check_buffers_match",
    "config_team",
    "finalize",
    "get_local_rank",
    "get_nranks",
    "get_rank",
    "gradients",
    "init",
    "init_mpi",
]


def init_mpi() -> None:
    """Starts communication alone, for scripts that want to know their rank early. Collective."""
    if PLACEMENT.launched and not lifecycle.initialised():
        lifecycle.init("dl_comm.init_mpi()", by_import=True)


def init(nthread_per_team: int, nteams: int, msglen: int, framework: str | None = None) -> None:
    """Starts communication, and says what is to come. Collective; may be repeated.

    Args:
        nthread_per_team: at least 1; it has no effect, because one thread does all communication.
        nteams: how many teams config_team may configure, numbered from 0.
        msglen: elements that one call of gradients has at most: those of the model.
        framework: "tensorflow", or None for NumPy arrays. It only loads TensorFlow's ops early.
    """
    threads = _whole("init(): nthread_per_team", nthread_per_team, at_least=1)
    del threads
    count = _whole("init(): nteams", nteams, at_least=1)
    elements = _whole(
        "init(): msglen",
        msglen,
        at_least=1,
        hint=" It is the number of elements of the model: "
        "sum(numpy.prod(v.shape.as_list()) for v in tf.trainable_variables()).",
    )
    if framework not in (None, "tensorflow"):
        raise ValueError(
            f'dl_comm.init(): there is no framework {framework!r}. Pass "tensorflow", or nothing '
            "for NumPy arrays."
        )
    init_mpi()
    if PLACEMENT.launched:
        arrays.prepare_teams(count, elements)
        if framework == "tensorflow":
            from ddl_ops.loader import operations

            operations()


def get_rank() -> int:
    """This process's number among all ranks, from 0. Known before init."""
    return PLACEMENT.rank


def get_nranks() -> int:
    """Number of ranks."""
    return PLACEMENT.size


def get_local_rank() -> int:
    """This process's number among the ranks of its host, from 0: the GPU it uses."""
    return PLACEMENT.local_rank


def barrier() -> None:
    """Waits until all ranks have called it: at the end of each epoch, for one.

    Raises ValueError on every rank where some are at something else, as at another step.
    """
    if _together("barrier"):
        arrays.barrier("dl_comm.barrier", "Give all ranks the same number of steps in each epoch.")


def config_team(
    team: int,
    alg: int,
    ksteps: SupportsInt,
    max_steps: SupportsInt,
    verbosity: int = 0,
    perf_freq: int = 0,
) -> None:
    """Plans the phases of a team, whose steps count from 1 again.

    In a blocking step gradients() gives the averages of what it is passed; in a pipelined one those
    of the step before, while its own are communicated behind the computation of the next.

    Args:
        team: from 0.
        alg: how one phase follows the other: 0 at once, 1 smoothly, by means of both over 10 steps.
        ksteps: not negative: so many blocking steps (warm-up), then pipelined ones; max_steps or
            more: all are blocking. Negative: -ksteps pipelined steps, then blocking ones
            (cool-down).
        max_steps: of the training.
        verbosity: 0: no reports.
        perf_freq: rank 0 reports every so many steps; 0: never.
    """
    number = _whole("config_team(): team", team, at_least=0)
    if alg not in (0, 1):
        raise ValueError(
            f"dl_comm.config_team(): alg is {alg!r}. Pass 0 (abrupt) or 1 (smooth transition)."
        )
    plan: dict[str, Any] = {
        "smooth": alg == 1,
        "ksteps": int(ksteps),
        "max_steps": _whole("config_team(): max_steps", max_steps, at_least=1),
        "report_every": max(0, int(perf_freq)) if verbosity else 0,
    }
    if _together("config_team"):
        arrays.configure_team(number, **plan)


def broadcast(values: Sequence[Any], root: int = 0) -> Any:
    """Gives all ranks the values of rank `root`.

    Args:
        values: variables or tensors: returns tensors in their order, to be assigned. Or NumPy
            arrays, which are filled in place, and returned: any dtype without Python objects.
        root: a rank.

    Raises ValueError on every rank if an array's shape or dtype differs between ranks.
    """
    if not 0 <= root < PLACEMENT.size:
        raise ValueError(
            f"dl_comm.broadcast(): there is no rank {root!r} among {PLACEMENT.size} ranks."
        )
    if not _are_arrays("broadcast", values):
        from ddl_ops import team_tensors

        return team_tensors.broadcast(values, root) if _together("broadcast") else list(values)
    for value in values:
        _require_array("broadcast", value)
    if _together("broadcast"):
        arrays.broadcast(values, root)
    return list(values)


def gradients(grads: Sequence[Any], team: int = 0) -> list[Any]:
    """The averages over the ranks that this step applies: see config_team.

    Args:
        grads: tensors, IndexedSlices or variables, and then tensors are returned; the call may
            come before init. Or NumPy arrays: new arrays are returned. In the same order; None
            stays None, and must be None on every rank.
        team: whose phases apply. Each call counts its own steps, by the name of its op.
    """
    number = _whole("gradients(): team", team, at_least=0)
    if not _are_arrays("gradients", grads):
        from ddl_ops import team_tensors

        return team_tensors.gradients(grads, number)
    values = [None if value is None else np.asarray(value) for value in grads]
    if not _together("gradients"):
        return [None if value is None else value.copy() for value in values]
    return list(arrays.gradients(values, number))


def average(array: np.ndarray[Any, Any]) -> None:
    """Averages a NumPy array of floating-point numbers over the ranks, in place. Collective."""
    _require_array("average", array)
    if not np.issubdtype(array.dtype, np.floating):
        raise TypeError(
            f"dl_comm.average() got an array of {array.dtype}, which cannot hold an average. "
            "Convert it: array.astype(numpy.float32)."
        )
    if _together("average"):
        arrays.average(array)


def check_buffers_match(buffers: Sequence[Any], flag: int = 0) -> int:
    """0 if NumPy arrays (or scalars) have the same bits on all ranks, else 1. Collective.

    With `flag` rank 0 says which differ. -1, with a line that says so, if rank 0 calls it and
    others do not: nothing was compared, and the ranks go on. Any other rank that calls it alone
    waits for DDL_STALL_TIMEOUT, and all fail.
    """
    if not _are_arrays("check_buffers_match", buffers) or any(b is None for b in buffers):
        raise TypeError(
            "dl_comm.check_buffers_match() compares NumPy arrays. Pass values: session.run(v)."
        )
    if not _together("check_buffers_match"):
        return 0
    try:
        differing = arrays.differing([np.asarray(buffer) for buffer in buffers])
    except arrays.NotTogetherError as error:
        arrays.say(f"{error} Nothing was compared: call it on all ranks.")
        return -1
    if differing and flag and PLACEMENT.rank == 0:
        shown = ", ".join(map(str, differing[:10])) + (", ..." if len(differing) > 10 else "")
        arrays.say(
            f"dl_comm.check_buffers_match(): of {len(buffers)} buffers {len(differing)} differ "
            f"between the ranks: {shown}"
        )
    return 1 if differing else 0


def finalize() -> None:
    """Ends communication, when all ranks have come. Further calls do nothing."""
    lifecycle.shutdown()


def _together(what: str) -> bool:
    """Whether there are ranks to talk to; RuntimeError if nobody has called init or init_mpi."""
    if PLACEMENT.launched and not lifecycle.initialised():
        require_launched(f"dl_comm.{what}()")
        raise RuntimeError(f"dl_comm.{what}() before dl_comm.init(). Call init first.")
    return PLACEMENT.launched


def _are_arrays(what: str, values: Sequence[Any]) -> bool:
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"dl_comm.{what}() takes a list, not {type(values).__name__}: pass [value]."
        )
    return all(value is None or isinstance(value, (np.ndarray, np.generic)) for value in values)


def _require_array(what: str, value: Any) -> None:
    if not isinstance(value, np.ndarray) or not value.flags.writeable:
        raise TypeError(
            f"dl_comm.{what}() works in place, on writeable NumPy arrays, not on "
            f"{type(value).__name__}. Pass numpy.array([value], numpy.float32)."
        )
    if value.dtype.hasobject:
        raise TypeError(
            f"dl_comm.{what}() got an array of Python objects (dtype {value.dtype}), which no "
            "other rank can read. Convert it to numbers, or to text of one width on all ranks: "
            "array.astype('U80')."
        )


def _whole(what: str, value: Any, *, at_least: int, hint: str = "") -> int:
    try:
        number = int(value)  # numpy's integers, tf.Dimension, and quotients of Python 3
    except (TypeError, ValueError):
        raise TypeError(f"dl_comm.{what} is {type(value).__name__}, not a number.{hint}") from None
    if number < at_least:
        raise ValueError(f"dl_comm.{what} is {number}. Pass {at_least} or more.{hint}")
    return number
