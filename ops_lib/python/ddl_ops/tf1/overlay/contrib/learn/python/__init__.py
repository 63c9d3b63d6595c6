"""tensorflow.contrib.learn.python: where scripts find what contrib.learn has."""
