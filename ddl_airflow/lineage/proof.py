"""Whether two trainings were the same, by the digests of the weights that each noted.

Rank 0 notes them as ``ddl_ops.weight_notes`` says. It is a training's script that writes there:
what is read may be anything.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddl_airflow.core.beneath import read_beneath
from ddl_airflow.core.errors import DAMAGED, FileRefused
from ddl_airflow.core.layout import RunLayout

FILE = "weights.jsonl"
KEY = f"logs/{FILE}"  # among what is published
_DIGITS = 16  # of a tensor's digest
_MOST_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Note:
    """The weights after a step.

    Attributes:
        tensors: their names.
        digests: of each; or one of all together.
    """

    step: int
    tensors: tuple[str, ...]
    digests: tuple[str, ...]


@dataclass(frozen=True)
class Divergence:
    """Where two trainings are first seen to differ.

    Attributes:
        step: after which; 0: before the first.
        tensors: whose values do; empty where only all together are known.
        why: a sentence, where it is not the values.
        same_until: the last step before it after which they were the same; None: there is none.
    """

    step: int
    tensors: tuple[str, ...] = ()
    why: str = ""
    same_until: int | None = None


def read_notes(body: bytes) -> list[Note]:
    """The notes of a training, in the order of its steps.

    What a process noted that was killed, and the next one did again, counts once.

    Raises:
        FileRefused: these are no notes.
    """
    notes: list[Note] = []
    tensors: tuple[str, ...] = ()
    first = True
    try:
        for line in body.decode().splitlines():
            said = json.loads(line)
            if "begun" in said:
                tensors, begun = tuple(map(str, said["tensors"])), int(said["begun"])
                while not first and said.get("goes_on") and notes and notes[-1].step >= begun:
                    notes.pop()
                first = False
            else:
                notes.append(Note(int(said["step"]), tensors, _digests(said, len(tensors))))
    except DAMAGED as error:
        raise FileRefused(f"{FILE} holds no notes ({type(error).__name__}: {error}).") from None
    return notes


def _digests(said: Any, tensors: int) -> tuple[str, ...]:
    if "all" in said:
        return (str(said["all"]),)
    text = str(said["digests"])
    if len(text) != tensors * _DIGITS:
        raise ValueError(f"{len(text)} digits for {tensors} tensors")
    return tuple(text[at : at + _DIGITS] for at in range(0, len(text), _DIGITS))


def read_notes_of(layout: RunLayout) -> list[Note]:
    """The notes of a run; none where its script left none.

    Raises:
        FileRefused: as ``read_notes``.
    """
    try:
        return read_notes(read_beneath(layout.logs / FILE, layout.workspace, _MOST_BYTES))
    except FileNotFoundError:
        return []


def _counts_on(notes: Sequence[Note]) -> bool:
    return all(one.step < other.step for one, other in itertools.pairwise(notes))


def summary(notes: Sequence[Note]) -> dict[str, Any]:
    """What the record says of them."""
    return {"key": KEY, "notes": len(notes), "step": notes[-1].step}


def divergence(before: Sequence[Note], again: Sequence[Note]) -> Divergence | None:
    """Where a training first differs from the one before; None if it never does.

    One that was ended and went on notes where it did, besides: of a training of one model the steps
    that both have noted are compared, and the last.
    """
    ended_alike = before and again and before[-1].step == again[-1].step
    if ended_alike and _counts_on(before) and _counts_on(again):
        both = {one.step for one in before} & {one.step for one in again}
        before = [one for one in before if one.step in both]
        again = [one for one in again if one.step in both]
    same: int | None = None
    for one, other in zip(before, again, strict=False):
        step = min(one.step, other.step)
        if one.step != other.step:
            why = f"step {one.step} was noted before, and step {other.step} now"
            return Divergence(step, (), why, same)
        if one.tensors != other.tensors:
            return Divergence(step, (), "the model has other tensors", same)
        if one.digests != other.digests:
            if {len(one.digests), len(other.digests)} != {len(one.tensors)}:
                return Divergence(step, (), "", same)
            pairs = zip(one.tensors, one.digests, other.digests, strict=True)
            return Divergence(step, tuple(name for name, a, b in pairs if a != b), "", same)
        same = step
    if len(before) != len(again):
        ends = [notes[-1].step if notes else 0 for notes in (before, again)]
        why = f"it ended after step {ends[0]} before, and after step {ends[1]} now"
        return Divergence(min(ends), (), why, same)
    return None
