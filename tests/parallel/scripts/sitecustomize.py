"""Ranks that mpirun starts import TensorFlow as those of ddl-run do, which halves what it costs."""

import sys

from ddl_ops.startup.ddl_tensorflow_finder import TensorFlowFinder

sys.meta_path.insert(0, TensorFlowFinder())
