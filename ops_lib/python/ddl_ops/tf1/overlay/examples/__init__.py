"""tensorflow.examples."""
