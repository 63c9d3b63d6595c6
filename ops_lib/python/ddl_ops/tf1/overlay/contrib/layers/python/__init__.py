"""tensorflow.contrib.layers.python: where scripts find what is public by now."""
