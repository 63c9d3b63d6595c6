"""score.py MODEL DATA SCORES: each picture in a folder, by a SavedModel, as lines of a table.

Runs in the environment that trains, by ../score_nightly.py or by hand.
"""

import csv
import gzip
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

BATCH = 1024
model, data, scores = map(Path, sys.argv[1:])
# What each model has that was published: inputs -> classes, scores.
serve = tf.saved_model.load(str(model)).signatures["serving_default"]
with scores.open("w", newline="") as file:
    table = csv.writer(file)
    table.writerow(["file", "picture", "digit", "score"])
    for path in sorted(data.glob("*-images-idx3-ubyte.gz")):
        body = gzip.decompress(path.read_bytes())
        pictures = np.frombuffer(body, np.uint8, offset=16).reshape(-1, 28, 28, 1)
        for start in range(0, len(pictures), BATCH):
            batch = pictures[start : start + BATCH].astype(np.float32) / 255
            found = serve(inputs=tf.constant(batch))
            sure = found["scores"].numpy().max(axis=1)
            for number, digit in enumerate(found["classes"].numpy()):
                table.writerow([path.name, start + number, digit, f"{sure[number]:.4f}"])
