"""What progress lines cost a training: `python -m benchmarks.progress_lines [--ranks 2]`.

Each rank trains a small model, with `ProgressCallback` and without in turns, 200 steps each. Says
what the callback's methods took of the time of the steps; what it takes of it to write again, to
the same disk, the operations' lines and what a rank says of its communication; and how long a step
with the callback is beside one without: Keras itself does more where something looks at each batch.
The model is one of steps as short as there are, and one of longer steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WIDTHS = (16, 1024)
_BATCH, _STEPS = 64, 200


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.progress_lines")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60, help="of each training")
    parser.add_argument("--width", type=int, help=argparse.SUPPRESS)  # in a rank
    options = parser.parse_args()
    if options.width:
        _train(options.width, options.seconds)
        return 0
    print("| hidden units | step | lines a second | callback | operations | with : without |")
    print("|---|---|---|---|---|---|")
    for width in WIDTHS:
        with tempfile.TemporaryDirectory(prefix="ddl-progress-") as folder:
            print(_measured(Path(folder), options.ranks, options.seconds, width), flush=True)
    return 0


def _measured(folder: Path, ranks: int, seconds: float, width: int) -> str:
    """A row of the table.

    Raises subprocess.CalledProcessError if the training fails; it has said why.
    """
    progress, answer = folder / "progress.jsonl", folder / "answer.json"
    environment = {
        **os.environ,
        "DDL_PROGRESS": str(progress),
        "PROGRESS_ANSWER": str(answer),
        "PYTHONPATH": str(ROOT),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    command = [sys.executable, "-m", "benchmarks.progress_lines"]
    command += ["--width", str(width), "--seconds", str(seconds)]
    run = Path(sys.executable).with_name("ddl-run")
    subprocess.run([run, "--np", str(ranks), *command], env=environment, check=True)
    said = json.loads(answer.read_text())
    lines = progress.read_text().splitlines(keepends=True)
    of_ops = [line for line in lines if json.loads(line)["source"] == "ops"]
    if not of_ops or len(of_ops) == len(lines):
        raise RuntimeError(f"lines of one source only: {lines[:3]}")
    written_s = _write_again(folder, of_ops)
    both_s = said["seconds"] * (1 + 1 / statistics.mean(said["ratios"]))
    low, ratio, high = statistics.quantiles(said["ratios"], n=4)
    return (
        f"| {width:,} | {1e3 * said['seconds'] / said['steps']:.2f} ms "
        f"| {(len(lines) - len(of_ops)) / said['seconds'] + len(of_ops) / both_s:.1f} "
        f"| {100 * said['callback_s'] / said['seconds']:.3f} % "
        f"| {100 * written_s / both_s:.4f} % | {ratio:.3f} ({low:.3f}–{high:.3f}) |"
    )


def _write_again(folder: Path, lines: Sequence[str]) -> float:
    """Seconds for the lines, and for as many files that are replaced: more than a rank does."""
    partial = folder / "rank-0.communication-partial"
    begun = time.perf_counter()
    with (folder / "again.jsonl").open("a", buffering=1) as file:
        for line in lines:
            file.write(line)
            partial.write_text(line)
            partial.replace(folder / "rank-0.communication")
    return time.perf_counter() - begun


def _train(width: int, seconds: float) -> None:
    """One rank's training; rank 0 says what its callback has taken."""
    import ddl
    import ddl.keras
    import keras
    import numpy as np
    from ddl_ops.keras_callbacks import ProgressCallback

    class Timed(ProgressCallback):
        took_s = 0.0

        def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
            begun = time.perf_counter()
            super().on_train_batch_end(batch, logs)
            self.took_s += time.perf_counter() - begun

        def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
            begun = time.perf_counter()
            super().on_epoch_end(epoch, logs)
            self.took_s += time.perf_counter() - begun

    ddl.init()
    layers = [keras.layers.Dense(width, activation="relu"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((784,)), *layers])
    optimizer = ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    dice = np.random.default_rng(ddl.rank())
    data = dice.random((_BATCH * _STEPS, 784), np.float32)
    labels = dice.integers(0, 10, len(data))
    callback = Timed(batch_size=_BATCH)

    def fit(*callbacks: keras.callbacks.Callback) -> float:
        begun = time.perf_counter()
        model.fit(data, labels, batch_size=_BATCH, verbose=0, callbacks=[*callbacks])
        return time.perf_counter() - begun

    fit()  # compiles
    fit(callback)
    callback.took_s = with_s = 0.0
    ratios: list[float] = []
    # The average, so that all end together.
    while len(ratios) < 4 or ddl.allreduce(np.float64(with_s), average=True) < seconds / 2:
        turn = (fit(callback), fit()) if len(ratios) % 2 else (fit(), fit(callback))[::-1]
        with_s += turn[0]
        ratios.append(turn[0] / turn[1])
    if ddl.rank() == 0:
        said = {"seconds": with_s, "steps": _STEPS * len(ratios), "ratios": ratios}
        said["callback_s"] = callback.took_s
        Path(os.environ["PROGRESS_ANSWER"]).write_text(json.dumps(said))


if __name__ == "__main__":
    sys.exit(main())
