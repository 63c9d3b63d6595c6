"""Preempts a Slurm job of two ranks again and again: what is repeated, lost and waited for.

    python -m benchmarks.preemptions [--times 50] [--way loop|keras] [--folder FOLDER]

A real Slurm cluster of two nodes on this host (tests/integration/slurm.py). The training runs in
its partition "spare", as `ddl-airflow run` starts it; whenever it has done some steps, a job in the
better partition takes both nodes. Prints steps repeated, tries used, whether the weights are, bit
for bit, those of the same training that nobody interrupted, and what a preemption took.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.integration.preempted_training import PreemptedTraining, weights_of
from tests.integration.slurm import SlurmCluster


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preemptions", description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--way", choices=("loop", "keras"), default="loop")
    parser.add_argument("--folder", type=Path, help="default: a new one, removed at the end")
    options = parser.parse_args()
    if missing := SlurmCluster.missing():
        parser.error(missing)
    with tempfile.TemporaryDirectory(prefix="preempt-") as own:
        folder = options.folder or Path(own)
        print(json.dumps(measure(folder, options.times, options.way), indent=2))
    return 0


def measure(folder: Path, times: int, way: str) -> dict[str, object]:
    """Both trainings, and how they compare. Times are in seconds."""
    steps = 7 * (times + 2)
    with SlurmCluster(folder / "slurm") as slurm:
        undisturbed = PreemptedTraining(folder / "undisturbed", slurm, way, steps, "cpu")
        undisturbed.start().wait()
        disturbed = PreemptedTraining(folder / "disturbed", slurm, way, steps, "spare")
        disturbed.start()
        took = [disturbed.preempt() for _ in range(times)]
        disturbed.wait()
    done = Counter(disturbed.steps())
    train = disturbed.train_part()
    return {
        "way": way,
        "preemptions": train["result"]["goodput"]["preemptions"],
        "steps": steps,
        "steps_repeated": sum(done.values()) - len(done),
        "steps_missing": len(set(range(1, steps + 1)) - set(done)),
        "tries": train["tries"]["train"],
        "weights_equal": weights_of(disturbed) == weights_of(undisturbed),
        "room_made_after_s": _spread([one.room_s for one in took]),
        "next_step_after_s": _spread([one.next_step_s for one in took]),
        "goodput": train["result"]["goodput"],
        "goodput_undisturbed": undisturbed.train_part()["result"]["goodput"],
    }


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "least": round(min(values), 2),
        "median": round(statistics.median(values), 2),
        "most": round(max(values), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
