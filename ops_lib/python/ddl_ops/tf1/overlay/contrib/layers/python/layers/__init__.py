"""tensorflow.contrib.layers.python.layers: tf_slim.layers, whose modules are found here, too."""

from tensorflow.contrib.layers.python.layers.feature_column import *
from tf_slim.layers import *
