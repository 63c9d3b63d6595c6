"""tensorflow.contrib.framework.python: where scripts find what is public by now."""
