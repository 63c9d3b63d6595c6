"""Whether the ranks have the same weights: when they begin to train, and when they end."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf  # noqa: TID253
from tensorflow.python.framework import ops  # noqa: TID253

from ddl_ops import arrays
from ddl_ops.environment import PLACEMENT
from ddl_ops.lifecycle import initialised
from ddl_ops.own_errors import BUILD_ALIKE, sizes_differ

# On a variable that all ranks had the same value of: when they were given it, or since then when
# they began to train it.
_EQUAL = "_ddl_started_equal"
_GIVEN, _BEGUN = "given", "begun"
_NUMBER = "_ddl_number"  # on a variable: which TensorFlow has given it
# The number that TensorFlow had given last when the ranks joined: those of variables rise, too.
_last_before_join = 0
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
    _mark(variables, _GIVEN)


def _mark(variables: Sequence[Any], what: str) -> None:
    for variable in variables:
        with contextlib.suppress(AttributeError):  # of a kind that keeps no attributes
            setattr(variable, _EQUAL, what)


def note_join() -> None:
    """All ranks have just joined: none has trained the variables that are made from here on."""
    global _last_before_join
    _last_before_join = ops.uid()


def start_equal(
    variables: Sequence[Any],
    *,
    anew: bool = False,
    begun: bool = False,
    since_join: bool = False,
    what: str = "weights",
    compare_first: Callable[[], None] = lambda: None,
) -> bool:
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
            data before may begin alone, and whoever let it join has given it weights: only those
            that were made since are compared.
        since_join: their optimizer was made since the ranks have joined last: as anew, and no rank
            has newer ones by that.
        what: they are.
        compare_first: what else the ranks compare where they are together.

    Returns whether they are equal now, as far as it can be known; False: they have no values yet.

    Raises:
        ModelsDifferError: on every rank, where their numbers or shapes differ.
    """
    anew = anew or since_join
    if PLACEMENT.size == 1 or not initialised():
        return True
    if arrays.have_joined() and not anew:
        unknown = (one for one in variables if begun or not hasattr(one, _EQUAL))
        variables, since_join = [one for one in unknown if _made_since_join(one)], True
    with tf.init_scope():
        if not tf.executing_eagerly():
            return True  # a TensorFlow 1 graph: its initialisers have seen to it
        variables = [one for one in variables if hasattr(one, "assign")]
        equal = (_GIVEN,) if begun else (_GIVEN, _BEGUN)
        new = [one for one in variables if anew or getattr(one, _EQUAL, None) not in equal]
        values = [_value(variable) for variable in new]
        shapes = [tf.TensorShape(variable.shape) for variable in new]
        if not all(one.is_compatible_with(v.shape) for one, v in zip(shapes, values, strict=True)):
            return False
        if not new:
            _mark(variables, _BEGUN)
            return True
        compare_first()
        mine = f"rank {PLACEMENT.rank} has {len(new)} {what}, others have more or fewer"
        digests, absent = _digests_of(values, len(values))
        root, indices = _differing(
            digests, absent, f"the {what} at the start", mine, newest=not since_join
        )
        for index in indices:
            new[index].assign(_taken(values[index], path_of(new[index]), root))
    _mark(variables, _BEGUN)
    if indices and PLACEMENT.rank == root:
        arrays.say(
            f"{_began_apart([path_of(new[index]) for index in indices], root, what)} "
            "ddl.keras.BroadcastCallback, or ddl.keras.broadcast_variables before the first step, "
            "does that for what is not trained, too."
        )
    return True


def start_equal_in_session(
    trained: Sequence[Any],
    others: Sequence[Any],
    read: Callable[[Sequence[Any]], Iterable[np.ndarray[Any, Any] | None]],
    assign: Callable[[Any, np.ndarray[Any, Any]], None],
) -> None:
    """The same for variables of a TensorFlow 1 graph, before a step of a session. Collective.

    Where they differ, the ranks take what is not trained from that rank, too, as the optimizer's
    slots and the global step: whoever has restored the weights has restored these.

    Args:
        trained: the variables that the step trains.
        others: those that a checkpoint has besides.
        read: gives the values of variables, one after the other; None of those that have none yet.
        assign: sets the value of one.
    """
    if arrays.have_joined():
        return  # as in start_equal

    def follow(
        variables: Sequence[Any], what: str, root: int | None = None
    ) -> tuple[int, list[str]]:
        mine = f"rank {PLACEMENT.rank} has {len(variables)} variables, others have more or fewer"
        digests, absent = _digests_of(read(variables), len(variables))
        root, indices = _differing(digests, absent, what, mine, root)
        for variable in (variables[index] for index in indices):
            value = next(iter(read([variable])))
            assert value is not None
            assign(variable, _taken(value, path_of(variable), root))
        return root, [path_of(variables[index]) for index in indices]

    root, taken = follow(trained, "the weights at the start of a session")
    if not taken:
        return
    follow(others, "what else there is at the start of a session", root)
    if PLACEMENT.rank == root:
        arrays.say(
            f"{_began_apart(taken, root)} Let all ranks restore the checkpoint: a number of steps "
            "that the script has worked out from it is that of one rank."
        )


def _digests_of(
    values: Iterable[np.ndarray[Any, Any] | None], count: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Those of ``arrays.digests``, and int64 [count]: 1 where there is no value."""
    absent = np.zeros(count, np.int64)
    digests = arrays.digests([np.zeros(0)] * count)
    for index, value in enumerate(values):
        absent[index] = value is None
        if value is not None:
            digests[index] = arrays.digests([value])[0]
    return digests, absent


def _differing(
    digests: np.ndarray[Any, Any],
    absent: np.ndarray[Any, Any],
    what: str,
    mine: str,
    root: int | None = None,
    *,
    newest: bool = True,
) -> tuple[int, list[int]]:
    """Which rank the others follow, and the indices of what differs. Collective.

    Args:
        digests: of the values of variables.
        absent: 1 where there is none: such a variable is left out on all ranks.
        what: the collective's name.
        mine: what this rank has, for an error.
        root: the rank to follow. None: the first of those that have not joined.
        newest: or that with the newest weights, so the last one to join.

    Raises:
        ModelsDifferError: on every rank, where their numbers differ.
    """
    here = np.zeros(PLACEMENT.size, np.int64)
    here[PLACEMENT.rank] = 1  # zeros add those that have joined
    total = np.concatenate([here, absent, digests.ravel()])
    _add(what, total, mine)
    ranks, absent, sums = np.split(total, [PLACEMENT.size, PLACEMENT.size + len(absent)])
    if root is None:
        last = arrays.last_to_join() if newest else None
        root = last if last is not None and ranks[last] else int(np.argmax(ranks))
    apart = (sums.reshape(digests.shape) != ranks.sum() * digests).any(axis=1) & (absent == 0)
    return root, np.flatnonzero(apart).tolist()


def _taken(value: np.ndarray[Any, Any], name: str, root: int) -> np.ndarray[Any, Any]:
    """What rank `root` has in the place of this value. Collective.

    Raises:
        ModelsDifferError: on every rank, where the shapes differ.
    """
    bits = np.frombuffer(_padded(value), np.int32).copy()
    if PLACEMENT.rank != root:
        bits[:] = 0
    mine = (
        f"{name} is {value.dtype}[{','.join(map(str, value.shape))}] on rank {PLACEMENT.rank}, "
        "and has another shape or type elsewhere"
    )
    _add(f"the start of {common_path(name)}", bits, mine)
    return np.frombuffer(bits.tobytes(), value.dtype, value.size).reshape(value.shape)


def _began_apart(names: Sequence[str], root: int, what: str = "weights") -> str:
    return (
        f"the ranks began with different {what}, as {_named(names)}. All go on with those of rank "
        f"{root}."
    )


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


def require_equal_adapted(layers: Sequence[str], learnt: Sequence[Any]) -> None:
    """Before training. Collective: what adapt() of such layers has learnt.

    Args:
        layers: their names; none on a rank without any.
        learnt: of each, numbers or words.

    Raises:
        ModelsDifferError: on every rank, where it differs, or the number of layers does.
    """
    texts = [np.frombuffer(json.dumps(one, default=str).encode(), np.uint8) for one in learnt]
    digests = arrays.digests([np.zeros(0, np.uint8), *texts])
    total = digests.copy()
    mine = f"rank {PLACEMENT.rank} has {len(layers)} layers with vocabularies"
    _add("vocabularies of layers", total, mine)
    digests, total = digests[1:], total[1:]
    differing = np.flatnonzero((total != PLACEMENT.size * digests).any(axis=1))
    if differing.size:
        raise ModelsDifferError(
            f"The layer {layers[differing[0]]!r} has adapted to other data on other ranks: its "
            "vocabulary, or its bin boundaries, differ. Let all ranks adapt() it to the same data, "
            "or give all the same vocabulary= or bin_boundaries=."
        )


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
    rows = (worst, *(row for row in apart if row != worst))
    names = _named([path_of(variables[differing[row]]) for row in rows])
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


def _made_since_join(variable: Any) -> bool:
    """Whether a variable of eager code was made after the ranks had joined last."""
    number = getattr(variable, _NUMBER, None)
    if number is None:
        value = getattr(variable, "value", None)
        within = value if isinstance(value, tf.Variable) else variable  # Keras 3 has one of its own
        found = re.search(r"_(\d+)$", str(getattr(within, "_unique_id", "")))
        number = int(found[1]) if found else 0
        with contextlib.suppress(AttributeError):  # each step asks
            setattr(variable, _NUMBER, number)
    return bool(number > _last_before_join)


def _padded(values: np.ndarray[Any, Any]) -> bytes:
    data = values.tobytes()
    return data + bytes(-len(data) % 4)


def path_of(variable: Any) -> str:
    """What Keras or TensorFlow calls a variable."""
    return str(getattr(variable, "path", variable.name)).removesuffix(":0")


def common_path(path: str) -> str:
    """A variable's path without the numbers that Keras has given to layers of one kind.

    Its counters are a process's: a rank that has made another model before has other numbers. Those
    of names that the script has given stay.
    """
    state = sys.modules.get("keras.src.backend.common.global_state")  # where Keras counts them
    counted = state.get_global_attribute("object_name_uids") if state is not None else None
    if not counted:
        return path
    kinds = "|".join(map(re.escape, sorted(counted, key=len, reverse=True)))
    return re.sub(rf"(?<![^/_])({kinds})_\d+(?=[/_]|$)", r"\1", path)


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"
