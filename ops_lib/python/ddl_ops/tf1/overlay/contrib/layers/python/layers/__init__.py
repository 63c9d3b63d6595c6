"""tensorflow.contrib.layers.python.layers: its feature columns; for layers use contrib.layers."""
