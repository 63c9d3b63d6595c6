"""tensorflow.contrib.layers: tf_slim.layers, and the feature columns, which are in tf now."""

from tensorflow.feature_column import *
from tf_slim.layers import *
