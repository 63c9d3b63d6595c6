"""Whether this rank trains with the others: what it tells whoever started the job.

Ranks that end well have not trained one model if they never averaged a gradient. So a rank leaves
``$DDL_RECORD_DIR/rank-<n>.ddl.json``, which the rank shim puts into its record:

    {"averaged": whether it has averaged gradients, "gradients": whether it has computed any,
     "alone": whether it ran a fit() in which nothing averaged, "applied": whether an optimizer
     updated weights with gradients that were no averages, "explicit": whether the script itself
     has averaged tensors, so that those weights may be averages}

It is there as soon as the rank has started ddl, and is written again when one of them becomes true,
so it is right however the process ends. Of graphs it is told when the op is made, not when it runs:
a step that a graph holds costs nothing more, and a training that is found done has run none.

Standard library only: who averages NumPy arrays does without TensorFlow.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from ddl_ops.environment import PLACEMENT, child_of_rank

_writing = threading.Lock()
_path: Path | None = None
_times = 0
_applied = 0
_facts = dict.fromkeys(("averaged", "gradients", "alone", "applied", "explicit"), False)


def file_of(directory: Path, rank: int) -> Path:
    """Where a rank leaves it."""
    return directory / f"rank-{rank}.ddl.json"


def started() -> None:
    """This rank has started ddl, and can average."""
    global _path
    if not (directory := os.environ.get("DDL_RECORD_DIR")):
        return
    _path = file_of(Path(directory), PLACEMENT.rank)
    try:
        # A command may run several programs one after the other in the place of one rank.
        before = json.loads(_path.read_bytes())
    except (OSError, ValueError):  # it is not there, or no longer whole
        before = {}
    for name in _facts:
        _facts[name] |= isinstance(before, dict) and before.get(name) is True
    _write()


def averaged() -> None:
    """This rank has averaged gradients with the others, or made the op that does."""
    global _times
    _times += 1
    _note("averaged")


def averaged_by_script() -> None:
    """This rank has averaged tensors by a call of the script: its gradients, or its weights."""
    averaged()
    _note("explicit")


def times_averaged() -> int:
    """How often this process has averaged gradients, or made an op that does."""
    return _times


def computed_gradients() -> None:
    """This rank has computed gradients, or made the ops that do."""
    _note("gradients")


def fitted_alone() -> None:
    """This rank ran a fit() in which nothing averaged."""
    _note("alone")


def applied_alone(optimizers: int) -> None:
    """So many more, or fewer, have updated weights with gradients that nobody here averaged."""
    global _applied
    _applied += optimizers
    if _facts["applied"] != (_applied > 0) and not child_of_rank():
        _facts["applied"] = _applied > 0
        _write()


def stands_alone() -> bool:
    """Whether the script averages nothing by itself."""
    return not _facts["explicit"]


def _note(name: str) -> None:
    if not _facts[name] and not child_of_rank():
        _facts[name] = True
        _write()


def _write() -> None:
    if _path is None:
        return
    with _writing:
        try:
            partial = Path(f"{_path}.partial")
            partial.write_text(json.dumps(_facts), "utf-8")
            partial.replace(_path)
        except OSError as error:  # a full disk: the training itself may go on
            print(
                f"ddl: rank {PLACEMENT.rank}: cannot note in {_path} that it trains with the "
                f"others: {error.strerror}",
                file=sys.stderr,
            )
