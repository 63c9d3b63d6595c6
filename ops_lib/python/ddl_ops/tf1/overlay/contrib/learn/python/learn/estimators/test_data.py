"""The data that contrib.learn's own tests trained on: Fisher's irises.

Source: R. A. Fisher, The use of multiple measurements in taxonomic problems, 1936. ``iris.csv`` has
sepal length and width, petal length and width, in cm, and the species: 0 setosa, 1 versicolor, 2
virginica.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

_FILE = Path(__file__).with_name("iris.csv")


def iris_input_logistic_fn() -> tuple[dict[str, Any], Any]:
    """The first two species, 100 flowers: ``{"feature": [100, 4]}`` float32, ``[100, 1]`` int32."""
    return _input(2)


def iris_input_multiclass_fn() -> tuple[dict[str, Any], Any]:
    """All three species, 150 flowers: ``{"feature": [150, 4]}`` float32, ``[150, 1]`` int32."""
    return _input(3)


def _input(species: int) -> tuple[dict[str, Any], Any]:
    rows = np.loadtxt(_FILE, np.float32, delimiter=",")
    rows = rows[rows[:, 4] < species]
    return {"feature": tf.constant(rows[:, :4])}, tf.constant(rows[:, 4:].astype(np.int32))
