"""The script that `benchmarks.staging.stream` trains: rows of $DATA_DIR, as they come.

The first epoch begins at once. From the second on two trainings take turns, so that both have the
same neighbours on the machine: $PARAM_SIDE is ``0`` or ``1``, and $PARAM_TURNS a folder in which
who has ended epoch k makes the file ``<side>-<k>``. Each begins in every other epoch.

Rank 0 leaves ``$RESULT_DIR/epochs.json``: seconds of each epoch, of the clock and of processors,
and how long the files of the first came.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import ddl
import tensorflow as tf  # noqa: TID253

INPUTS, HIDDEN, OUTPUTS = 255, 512, 10
ROW = 4 * (INPUTS + 1)  # bytes: the inputs and a label, each a float32
BATCH = 256
_LOOK_S = 0.02


def _names(came: list[float]) -> Iterator[str]:
    for path in ddl.data.files("*.bin", by_rank=True):
        came.append(time.monotonic())
        yield path


def _wait_for_turn(epoch: int) -> None:
    """Until the other one has ended its epoch before, or, where that one begins, this one."""
    mine = int(os.environ["PARAM_SIDE"])
    begins = (epoch + mine) % 2
    path = os.path.join(os.environ["PARAM_TURNS"], f"{1 - mine}-{epoch - 1 if begins else epoch}")
    while not os.path.exists(path):
        time.sleep(_LOOK_S)


def _rows(came: list[float]) -> Any:
    names = tf.data.Dataset.from_generator(
        lambda: _names(came), output_signature=tf.TensorSpec((), tf.string)
    )
    rows = names.interleave(lambda name: tf.data.FixedLengthRecordDataset(name, ROW), 1)
    batches = rows.batch(BATCH, drop_remainder=True)
    return batches.map(lambda batch: tf.io.decode_raw(batch, tf.float32)).prefetch(2)


def main() -> None:
    start = tf.random.Generator.from_seed(ddl.rank())
    shapes = ((INPUTS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, OUTPUTS))
    weights = [tf.Variable(0.05 * start.normal(shape)) for shape in shapes]

    @tf.function
    def step(batch: Any) -> Any:
        labels = tf.cast(batch[:, 0], tf.int32)
        with tf.GradientTape() as tape:
            hidden = batch[:, 1:]
            for one in weights[:-1]:
                hidden = tf.nn.relu(hidden @ one)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden @ weights[-1])
            )
        pairs = zip(tape.gradient(loss, weights), weights, strict=True)
        for gradient, one in ddl.grads_reduce(pairs):
            one.assign_sub(0.01 * gradient)
        return loss

    came: list[float] = []
    batches = _rows(came)
    step(tf.zeros((BATCH, INPUTS + 1)))  # what it costs to trace is no epoch's
    seconds, cpu = [], []
    ddl.barrier("the beginning")
    first, began_at = time.monotonic(), time.time()
    for epoch in range(int(os.environ["PARAM_EPOCHS"])):
        if epoch:
            _wait_for_turn(epoch)
            ddl.barrier(f"the beginning of epoch {epoch + 1}")
        began, used = time.monotonic(), time.process_time()
        for batch in batches:
            step(batch)
        ddl.barrier(f"the end of epoch {epoch + 1}")
        seconds.append(time.monotonic() - began)
        cpu.append(time.process_time() - used)
        if ddl.rank() == 0:
            turn = f"{os.environ['PARAM_SIDE']}-{epoch}"
            open(os.path.join(os.environ["PARAM_TURNS"], turn), "w").close()
        if not epoch:
            last = came[-1]
    if ddl.rank() == 0:
        said = {"epochs_s": seconds, "epochs_cpu_s": cpu, "came_s": last - first}
        said["began_at"] = began_at
        with open(os.path.join(os.environ["RESULT_DIR"], "epochs.json"), "w") as file:
            json.dump(said, file)


if __name__ == "__main__":
    main()
