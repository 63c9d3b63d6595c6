"""tensorflow.contrib.slim: the package tf_slim, which it became."""

import sys

import tf_slim

sys.modules[__name__] = tf_slim
