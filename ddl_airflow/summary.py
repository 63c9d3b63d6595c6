"""What a training that ``ddl-run`` started has left, and what would come after it."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.metrics import diverged, newest, shown
from ddl_airflow.core.progress import everything_told

_MOST_NAMED = 5
_LOOK_S = 30.0


@dataclass(frozen=True)
class Road:
    """What follows a training, as its manifest says.

    Attributes:
        layout: where the training's files are.
        python: of the ranks; it knows what can be made a model.
        commands: that run once after the training, in place of the built-in transform.
        checkpoint: ``latest`` or a step, for the built-in one.
        steps: names of the further steps, in words.
    """

    layout: RunLayout
    python: str
    commands: tuple[str, ...]
    checkpoint: str
    steps: tuple[str, ...]


def summary(road: Road) -> Iterator[str]:
    """Lines about a training that ended well: what it left, what was not done, what to heed."""
    layout = road.layout
    found = _checkpoints(road)
    written = layout.has_written_model
    measured = list(
        newest(everything_told(layout.progress, layout.workspace).measurements).values()
    )
    numbers = ", ".join(f"{m.metric} {shown(m.value)} ({m.measured_on})" for m in measured)
    left = "; ".join(
        filter(None, (_named(layout, found.get("there", ()), written=written), numbers))
    )
    yield f"results are in {_near(layout.result)}: {left}"
    steps = (*(road.commands or ("transform",)), *road.steps)
    yield f"`ddl-airflow run`, or the DAG, goes on with: {', '.join(steps)}."
    for one in measured:
        if not math.isfinite(one.value):
            yield f"warning: {diverged(one)}"
    lacking = str(found.get("error", ""))
    if lacking and not road.commands and not (written and road.checkpoint == "latest"):
        yield f"warning: transform would fail: {lacking.replace(f'{Path.cwd()}/', '')}"


def _named(layout: RunLayout, checkpoints: Sequence[str], *, written: bool) -> str:
    named = [layout.model.name] if written else []
    if len(checkpoints) > 1:
        named.append(f"{len(checkpoints)} checkpoints, the newest {checkpoints[0]}")
    elif checkpoints:
        named.append(f"checkpoint {checkpoints[0]}")
    if named:
        return ", ".join(named)
    files = (path for path in sorted(layout.result.rglob("*")) if path.is_file())
    others = [str(path.relative_to(layout.result)) for path in files]
    return ", ".join(others[:_MOST_NAMED] + ["…"] * (len(others) > _MOST_NAMED)) or "nothing"


def _checkpoints(road: Road) -> dict[str, Any]:
    """What ``ddl_ops.checkpoints`` says; nothing where the ranks' Python does not have it."""
    words = [road.python, "-m", "ddl_ops.checkpoints", str(road.layout.result), road.checkpoint]
    # In a folder of ours: a script's own modules are not to be in the way of Python's.
    with suppress(OSError, ValueError, subprocess.TimeoutExpired):
        done = subprocess.run(words, cwd=road.layout.root, capture_output=True, timeout=_LOOK_S)
        if done.returncode == 0 and isinstance(said := json.loads(done.stdout), dict):
            return said
    return {}


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
