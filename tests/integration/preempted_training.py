"""A training of two ranks on a real Slurm cluster that has to make room, by `ddl-airflow run`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.integration.slurm import SlurmCluster
from tests.limits import until

SCRIPT = Path(__file__).parents[1] / "parallel" / "scripts" / "preempted.py"
MANIFEST = """\
model_definition:
  name: makes-room
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: python preempted.py {way} {told} {steps} slowly={pause_s}
    compute_configuration: {{name: cpu, nodes: 2}}
training_data_reference: {{type: fs, source: {{path: ./data}}}}
training_results_reference: {{type: fs, target: {{path: ./published}}}}
launcher: {{kind: slurm, partition: {partition}, time_limit: 60m}}
"""
_START_S = 120.0


@dataclass(frozen=True)
class Took:
    """Seconds from the submission of the better job to its end, and to the training's next step."""

    room_s: float
    next_step_s: float


class PreemptedTraining:
    """One run of the manifest, in a process of its own.

    Args:
        folder: new; for the manifest and all that comes of it.
        slurm: the cluster.
        way: of tests/parallel/scripts/preempted.py.
        steps: of the training.
        partition: "spare" makes room for others.
    """

    def __init__(
        self, folder: Path, slurm: SlurmCluster, way: str, steps: int, partition: str
    ) -> None:
        self.told = folder / "told"
        for one in (self.told, folder / "data"):
            one.mkdir(parents=True)
        (folder / "data" / "rows").touch()
        shutil.copy(SCRIPT, folder)
        (folder / "manifest.yml").write_text(
            MANIFEST.format(way=way, told=self.told, steps=steps, partition=partition, pause_s=0.3)
        )
        self._folder = folder
        self._slurm = slurm
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> PreemptedTraining:
        """Runs its steps. That after the training fails where the script leaves no model."""
        call = "import sys; from ddl_airflow.cli import main; sys.exit(main())"
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", call, "run", "manifest.yml"],
                cwd=self._folder,
                env=os.environ | self._slurm.environment | {"TF_CPP_MIN_LOG_LEVEL": "3"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def steps(self) -> list[int]:
        """Each step that was done, in the order of time."""
        path = self.told / "steps"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def preempt(self) -> Took:
        """Lets it do some steps; then has a better job take all nodes."""
        self._until_after(len(self.steps()) + 2)
        began = time.monotonic()
        self._slurm.take_all()
        room_s = time.monotonic() - began
        self._until_after(len(self.steps()) + 1)
        return Took(room_s, time.monotonic() - began)

    def wait(self) -> None:
        """Until it has ended; raises if the training did not end well."""
        assert self._process is not None
        until(lambda: self._process.poll() is not None, 600, self.log)
        assert (self.told / "final.npz").exists(), self.log()

    def log(self) -> str:
        """What `ddl-airflow run` said."""
        return (self._folder / "log").read_text(errors="replace")

    def train_part(self) -> dict[str, Any]:
        """What train knows of the training, for the lineage record."""
        (part,) = self._folder.glob(".ddl-run/**/airflow/lineage/train.json")
        told: dict[str, Any] = json.loads(part.read_text())
        return told

    def _until_after(self, steps: int) -> None:
        def there() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self.log()
            return len(self.steps()) >= steps

        until(there, _START_S, self.log)


def weights_of(training: PreemptedTraining) -> dict[str, bytes]:
    """The bytes of each weight at the end, with the optimizer's."""
    with np.load(training.told / "final.npz") as arrays:
        return {name: arrays[name].tobytes() for name in arrays.files}
