"""tensorflow.examples.tutorials.mnist."""

from tensorflow.examples.tutorials.mnist import input_data

__all__ = ["input_data"]
