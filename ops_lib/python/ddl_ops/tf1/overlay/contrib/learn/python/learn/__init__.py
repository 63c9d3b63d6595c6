"""What is public in tensorflow.contrib.learn."""

from tensorflow.contrib.learn.python.learn import experiment, learn_runner
from tensorflow.contrib.learn.python.learn.estimators import (
    DNNClassifier,
    DNNRegressor,
    RunConfig,
)
from tensorflow.contrib.learn.python.learn.experiment import Experiment

__all__ = [
    "DNNClassifier",
    "DNNRegressor",
    "Experiment",
    "RunConfig",
    "experiment",
    "learn_runner",
]
