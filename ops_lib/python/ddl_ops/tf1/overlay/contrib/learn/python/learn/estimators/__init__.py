"""tensorflow.contrib.learn.python.learn.estimators: those that Experiments were written with."""

from tensorflow.contrib.learn.python.learn.estimators.dnn import DNNClassifier, DNNRegressor
from tensorflow.contrib.learn.python.learn.estimators.run_config import RunConfig
