"""Whether the ranks' optimizers have the same settings: others train the same weights apart."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddl_ops import arrays
from ddl_ops.environment import PLACEMENT

_CLASS = "class"
# What has a rank's own value with good reason.
_OWN = ("seed", "name")
# Where a number is that of a variable, which the ranks compare as such.
_RATE = "learning_rate"
_NUMBER = "a number"
# Of classes that are Keras's. Others are the script's: a rank's own numbers may be within.
_OF_KERAS = ("keras.", "tf_keras.")
# As are these, of what the script has written.
_CODE = ("function", "__lambda__", "builtin")
# Processors of two kinds may compute a setting this part apart.
_SAME = 1e-6

Setting = float | str | None


class SettingsDifferError(ValueError):
    """The ranks are to train with one optimizer, and have made different ones."""


def settings_of(optimizer: Any) -> dict[str, Setting]:
    """The numbers of its get_config(), by their paths, and the classes of what has numbers within.

    No texts: names, paths and the like are a rank's own. Nothing of classes of a script's own.
    """
    found: dict[str, Setting] = {_CLASS: type(optimizer).__name__}
    if not type(optimizer).__module__.startswith(_OF_KERAS):
        return found
    try:
        with warnings.catch_warnings(action="ignore"):  # of lambdas, which nobody saves here
            config = optimizer.get_config()
    except Exception:  # whatever a script's own class raises: it trains all the same
        return found
    _collect(config, "", found)
    return found


def _collect(value: Any, path: str, found: dict[str, Setting]) -> None:
    if isinstance(value, dict):
        if "class_name" in value:  # of an object, as Keras writes it
            found[path or _CLASS] = str(value["class_name"])
            keras = str(value.get("module")).startswith(_OF_KERAS)
            known = keras and value["class_name"] not in _CODE
            config = value.get("config") if known else {}
            _collect(config if isinstance(config, dict) else {}, path, found)
            return
        for key, one in value.items():
            if key not in _OWN:
                _collect(one, f"{path}.{key}" if path else str(key), found)
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            _collect(one, f"{path}[{number}]", found)
    elif isinstance(value, (bool, int, float, np.number)):
        is_rate = path.rpartition(".")[2] == _RATE
        found[path] = _NUMBER if is_rate else float(value)
    elif value is None:
        found[path] = None


def require_equal_settings(optimizers: Sequence[Any]) -> None:
    """Collective: the ranks compare the settings of these; those that have joined are left out.

    Raises:
        SettingsDifferError: on every rank, where they differ.
    """
    if PLACEMENT.size == 1:
        return
    mine = json.dumps([settings_of(one) for one in optimizers], sort_keys=True).encode()
    here = np.zeros(PLACEMENT.size, np.int64)
    here[PLACEMENT.rank] = len(mine)
    digest = arrays.digests([np.frombuffer(mine, np.uint8)])[0]
    total = np.concatenate([here, digest])
    arrays.add("the settings of optimizers", total)
    lengths, digests = np.split(total, [PLACEMENT.size])
    ranks = np.flatnonzero(lengths)
    if (digests == len(ranks) * digest).all():
        return
    texts = np.zeros((PLACEMENT.size, lengths.max()), np.int32)
    texts[PLACEMENT.rank, : len(mine)] = np.frombuffer(mine, np.uint8)
    arrays.add("different settings of optimizers", texts)
    of_ranks = [json.loads(texts[r, : lengths[r]].astype(np.uint8).tobytes()) for r in ranks]
    for rank, theirs in zip(ranks[1:], of_ranks[1:], strict=True):
        if said := _difference(rank, theirs, ranks[0], of_ranks[0]):
            raise SettingsDifferError(
                f"The ranks' optimizers have different settings: {said}. Make them alike on all "
                "ranks: what a rank works out from its own part of the data, as a number of "
                "steps, has to come from all of it."
            )


def _difference(
    rank: int, theirs: list[dict[str, Setting]], other: int, ours: list[dict[str, Setting]]
) -> str:
    """The first one, in words; empty if there is none."""
    if len(theirs) != len(ours):
        return f"rank {rank} has {len(theirs)} optimizers, rank {other} {len(ours)}"
    for one, another in zip(theirs, ours, strict=True):
        for path in (_CLASS, *sorted({*one, *another} - {_CLASS})):
            a, b = one.get(path), another.get(path)
            if _same(a, b) and (path in one) == (path in another):
                continue
            if path == _CLASS:
                return f"rank {rank} has {a}, rank {other} {b}"
            return (
                f"rank {rank}'s {one[_CLASS]} has {path} = {_text(one, path)}, rank {other}'s has "
                f"{_text(another, path)}"
            )
    return ""


def _same(a: Setting, b: Setting) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_SAME) or (math.isnan(a) and math.isnan(b))
    return a == b


def _text(settings: dict[str, Setting], path: str) -> str:
    value = settings.get(path, "none of that name")
    return f"{value:g}" if isinstance(value, float) else str(value)
