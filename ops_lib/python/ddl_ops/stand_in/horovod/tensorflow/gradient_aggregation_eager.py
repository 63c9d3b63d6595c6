"""Horovod's sums of gradients in eager code: importing this raises ImportError."""

from horovod.tensorflow.gradient_aggregation import HELPER_IS_NOT_HERE

raise ImportError(HELPER_IS_NOT_HERE.format(name="LocalGradientAggregationHelperEager"))
