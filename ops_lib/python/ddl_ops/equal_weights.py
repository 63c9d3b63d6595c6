"""Whether the ranks have the same weights: when they begin to train, and when they end."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf  # noqa: TID253

from ddl_ops import arrays
from ddl_ops.environment import PLACEMENT
from ddl_ops.lifecycle import initialised
from ddl_ops.own_errors import BUILD_ALIKE, sizes_differ

# On a variable that all ranks had the same value of, when they began to train it.
_EQUAL = "_ddl_started_equal"
# Hosts with other processors may round the same update otherwise. So ranks may be apart by this
# part of a variable's norm, by some units in the last place of its type, or by this much for each
# element on average, where a variable is about zero.
_RELATIVE = 1e-4
_UNITS = 8
_ABSOLUTE = 1e-6


class ModelsDifferError(ValueError):
    """The ranks are to train one model, and have built different ones."""


class WeightsDifferError(RuntimeError):
    """The ranks have trained, and have not the same weights."""


def mark_equal(variables: Sequence[Any]) -> None:
    """The ranks have just been given the same values of these."""
    for variable in variables:
        with contextlib.suppress(AttributeError):  # of a kind that keeps no attributes
            setattr(variable, _EQUAL, True)


def start_equal(variables: Sequence[Any], *, anew: bool = False) -> bool:
    """Before their first gradients are reduced: ranks with other values get those of the first one.

    Collective where not all are known to be equal, and then at a place where all ranks are: each
    reduces the gradients of these next. Ranks without data, which have joined, are left out. In a
    tf.function it happens when that is traced, so before its first step; in eager code the first
    gradients have been computed. A tf.function that makes the variables is traced twice, and only
    the second time have they values.

    Args:
        variables: of Keras or TensorFlow, built; others, and None, are left as they are.
        anew: where a fit() begins, on all ranks: also those known to have been equal before, which
            the script may have changed since. Else, once all ranks have joined, a rank that had no
            data before may begin alone, and whoever let it join has given it weights.

    Returns whether they are equal now, as far as it can be known; False: they have no values yet.

    Raises:
        ModelsDifferError: on every rank, where their numbers or shapes differ.
    """
    if PLACEMENT.size == 1 or not initialised() or (arrays.have_joined() and not anew):
        return True
    with tf.init_scope():
        if not tf.executing_eagerly():
            return True  # a TensorFlow 1 graph: its initialisers have seen to it
        new = [v for v in variables if hasattr(v, "assign") and (anew or not hasattr(v, _EQUAL))]
        values = [_value(variable) for variable in new]
        shapes = [tf.TensorShape(variable.shape) for variable in new]
        if not all(one.is_compatible_with(v.shape) for one, v in zip(shapes, values, strict=True)):
            return False
        if not new:
            return True
        # Which ranks take part, then the digests: zeros of those that have joined.
        here = np.zeros(PLACEMENT.size, np.int64)
        here[PLACEMENT.rank] = 1
        digests = arrays.digests(values)
        total = np.concatenate([here, digests.ravel()])
        mine = f"rank {PLACEMENT.rank} has {len(new)} variables, others have more or fewer"
        _add("the weights at the start", total, mine)
        ranks, sums = total[: PLACEMENT.size], total[PLACEMENT.size :].reshape(digests.shape)
        last = arrays.last_to_join()  # whose weights are the newest
        root = last if last is not None and ranks[last] else int(np.argmax(ranks))
        differing = np.flatnonzero((sums != ranks.sum() * digests).any(axis=1)).tolist()
        for index in differing:
            bits = np.frombuffer(_padded(values[index]), np.int32).copy()
            if PLACEMENT.rank != root:
                bits[:] = 0
            shape = ",".join(map(str, values[index].shape))
            mine = (
                f"{_path(new[index])} is {values[index].dtype}[{shape}] on rank {PLACEMENT.rank}, "
                "and has another shape or type elsewhere"
            )
            _add(f"the start of {_path(new[index])}", bits, mine)
            received = np.frombuffer(bits.tobytes(), values[index].dtype, values[index].size)
            new[index].assign(received.reshape(values[index].shape))
    mark_equal(new)
    if differing and PLACEMENT.rank == root:
        print(
            f"ddl: rank {root}: the ranks began with different weights, as "
            f"{_named(new, differing)}. All go on with those of rank {root}. "
            "ddl.keras.BroadcastCallback, or ddl.keras.broadcast_variables before the first step, "
            "does that for what is not trained, too.",
            file=sys.stderr,
            flush=True,
        )
    return True


def _add(name: str, array: np.ndarray[Any, Any], mine: str) -> None:
    """As ``arrays.add``; where the ranks have other numbers of values, says what that means."""
    try:
        arrays.add(name, array)
    except ValueError as error:
        if not sizes_differ(str(error)):
            raise
        raise ModelsDifferError(
            f"The ranks built different models: {mine}. {BUILD_ALIKE}"
        ) from None


def require_equal(variables: Sequence[Any]) -> None:
    """After training. Collective: all ranks compare their values of these.

    Costs a digest of the values; only what differs is sent, and its distance measured.

    Raises:
        WeightsDifferError: on every rank, where some are farther apart than rounding takes them.
    """
    values = [_value(variable) for variable in variables]
    digests = arrays.digests(values)
    total = digests.copy()
    arrays.add("the weights at the end", total)
    differing = np.flatnonzero((total != PLACEMENT.size * digests).any(axis=1)).tolist()
    if not differing:
        return
    distances = np.zeros((len(differing), PLACEMENT.size))
    for row, index in enumerate(differing):
        theirs = values[index].copy()
        arrays.broadcast([theirs], root=0)
        distances[row, PLACEMENT.rank] = _distance(values[index], theirs)
    arrays.add("the distances at the end", distances)
    apart = [row for row in range(len(differing)) if distances[row].max() > 1.0]
    if not apart:
        return
    worst = max(apart, key=lambda row: distances[row].max())
    ranks = np.flatnonzero(distances[worst] > 1.0).tolist()
    names = _named(
        variables, [differing[row] for row in (worst, *(r for r in apart if r != worst))]
    )
    verb = "has" if len(ranks) == 1 else "have"
    raise WeightsDifferError(
        f"The ranks have ended fit() with different weights: rank{'s' * (len(ranks) > 1)} "
        f"{', '.join(map(str, ranks))} {verb} other values than rank 0 of {names}. "
        "Their learning rates may have differed, or what a callback loaded or set: put "
        "ddl.keras.MetricAverageCallback before ReduceLROnPlateau and "
        "EarlyStopping(restore_best_weights=True), and let other callbacks do the same on all "
        "ranks."
    )


def _distance(mine: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> float:
    """How far apart they are, in units of what is allowed. Where both are NaN they are alike."""
    unit = float(ml_dtypes.finfo(mine.dtype).eps)
    a, b = mine.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
    apart = float(np.linalg.norm(a[differ] - b[differ]))
    if not math.isfinite(apart):
        return sys.float_info.max  # which can be added
    scale = float(np.linalg.norm(b[np.isfinite(b)]))
    allowed = max(_RELATIVE, _UNITS * unit) * scale + _ABSOLUTE * math.sqrt(mine.size)
    return apart / allowed


def _value(variable: Any) -> np.ndarray[Any, Any]:
    value = getattr(variable, "value", variable)
    return np.asarray(value() if callable(value) else value)


def _padded(values: np.ndarray[Any, Any]) -> bytes:
    data = values.tobytes()
    return data + bytes(-len(data) % 4)


def _path(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name)).removesuffix(":0")


def _named(variables: Sequence[Any], indices: Sequence[int]) -> str:
    more = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
    return f"{_path(variables[indices[0]])!r}{more}"
