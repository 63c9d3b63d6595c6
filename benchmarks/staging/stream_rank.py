"""The script that `benchmarks.staging.stream` trains: rows of $DATA_DIR, as they come.

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

INPUTS, HIDDEN, OUTPUTS = 255, 768, 10
ROW = 4 * (INPUTS + 1)  # bytes: the inputs and a label, each a float32
EPOCHS = 5
BATCH = 256


def _names(came: list[float]) -> Iterator[str]:
    for path in ddl.data.files("*.bin", by_rank=True):
        came.append(time.monotonic())
        yield path


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
    first = time.monotonic()
    for epoch in range(EPOCHS):
        began, used = time.monotonic(), time.process_time()
        for batch in batches:
            step(batch)
        ddl.barrier(f"the end of epoch {epoch + 1}")
        seconds.append(time.monotonic() - began)
        cpu.append(time.process_time() - used)
        if not epoch:
            last = came[-1]
    if ddl.rank() == 0:
        said = {"epochs_s": seconds, "epochs_cpu_s": cpu, "came_s": last - first}
        with open(os.path.join(os.environ["RESULT_DIR"], "epochs.json"), "w") as file:
            json.dump(said, file)


if __name__ == "__main__":
    main()
