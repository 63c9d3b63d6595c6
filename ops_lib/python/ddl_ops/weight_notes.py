"""Digests of the weights as they become, so that a training can be compared with one of before.

Rank 0 appends lines of JSON to ``$LOG_DIR/weights.jsonl`` where ``DDL_PROVE`` is 1:
``{"begun": step, "tensors": [names]}`` when a process begins, or goes on with other tensors, with
``"goes_on"`` where it does from a checkpoint of an earlier process;
``{"step": step, "digests": "..."}``, of each tensor 16 hexadecimal digits, in that order; and
``"all"`` in place of ``"digests"``, of all together, once the file is large.

The first 64 steps are noted, of the next 64 every other, of the 128 after that every fourth, and so
on: a training of a million steps has 500 notes, and two of the same training have the same ones.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddl_ops.environment import PLACEMENT, child_of_rank
from ddl_ops.progress import whole_steps

FILE = "weights.jsonl"
_AT_FIRST = 64  # steps, each of which is noted
_LARGE = 4 * 2**20  # bytes
_DIGEST_BYTES = 8


def place() -> Path | None:
    """Where this process leaves its notes; None if it leaves none."""
    folder = os.environ.get("LOG_DIR")
    if os.environ.get("DDL_PROVE") != "1" or not folder or PLACEMENT.rank != 0 or child_of_rank():
        return None
    return Path(folder, FILE)


def is_due(step: int, last: int) -> bool:
    """Whether there is something to note at a step, `last` being the one that was seen before."""
    every = 1 << (max(step - 1, 0) // _AT_FIRST).bit_length()
    return step // every > last // every


class WeightNotes:
    """The notes of one process.

    Args:
        path: the file. What is there is of an earlier process: it stays if this one goes on from a
            later step than 0.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[str] | None = None
        self._noted = -1  # the step
        self._failed = False

    @property
    def begun(self) -> bool:
        """Whether this process has noted anything."""
        return self._names is not None

    def note(self, step: int, names: Sequence[str], values: Iterable[Any]) -> None:
        """Notes the weights after a step; the same step again is not noted.

        What cannot be noted is said, and nothing is noted from then on: the training goes on.

        Args:
            step: done; 0: none yet.
            names: of the tensors.
            values: arrays, in their order; taken one after the other.
        """
        if self._failed or (step == self._noted and self._names == list(names)):
            return
        try:
            digests = [_digest(value) for value in values]
        except Exception as error:  # of a script's own variables: the other ranks wait for this one
            self.give_up(f"the weights after step {step} cannot be read: {error}")
            return
        lines: list[dict[str, Any]] = []
        first = self._names is None
        if self._names != list(names):
            self._names = list(names)
            goes_on = {"goes_on": True} if first and step > 0 else {}
            lines.append({"begun": step, **goes_on, "tensors": self._names})
        whole = not first and self._path.exists() and self._path.stat().st_size > _LARGE
        together = "".join(digests)
        if whole:
            digest = hashlib.blake2b(together.encode(), digest_size=_DIGEST_BYTES).hexdigest()
            lines.append({"step": step, "all": digest})
        else:
            lines.append({"step": step, "digests": together})
        self._noted = step
        self._append(lines, anew=first and step == 0)

    def _append(self, lines: list[dict[str, Any]], *, anew: bool) -> None:
        try:
            with self._path.open("w" if anew else "a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(line)}\n" for line in lines)
        except OSError as error:  # a full disk, which the training itself may bear
            self.give_up(f"{self._path}: {error.strerror}")

    def give_up(self, why: str) -> None:
        """Says why nothing is noted any more."""
        self._failed = True
        said = f"{why.splitlines()[0][:300]}: no more digests of the weights are noted"
        print(f"ddl: rank 0: {said}", file=sys.stderr, flush=True)


def _digest(value: Any) -> str:
    array = np.ascontiguousarray(value)
    digest = hashlib.blake2b(f"{array.dtype}{array.shape}".encode(), digest_size=_DIGEST_BYTES)
    digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


@functools.cache
def _of_script(path: Path) -> tuple[WeightNotes, list[int]]:
    return WeightNotes(path), []  # and the step that was seen last


def note_weights(step: int, variables: Sequence[Any]) -> None:
    """See ``ddl.note_weights``."""
    path = place()
    if path is None:
        return
    step = whole_steps(step, "ddl.note_weights")
    notes, seen = _of_script(path)
    if not seen or is_due(step, seen[0]):
        names = [str(getattr(one, "path", one.name)).removesuffix(":0") for one in variables]
        notes.note(step, names, (one.numpy() for one in variables))
    seen[:] = [step]
