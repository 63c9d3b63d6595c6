"""tensorflow.contrib.layers: tf_slim.layers, and the feature columns, which are in tf now."""

from tensorflow.contrib.layers.python.layers.feature_column import *
from tf_slim.layers import *
