"""tensorflow.contrib.layers: tf_slim.layers, and the feature columns, which are in tf now."""

from typing import NoReturn

from tensorflow.contrib.layers.python.layers.feature_column import *
from tf_slim.layers import *

from ddl_ops.tf1 import gone


def __getattr__(name: str) -> NoReturn:
    raise gone.no_attribute(__name__, name)
