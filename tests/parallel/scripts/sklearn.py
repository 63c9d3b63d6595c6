"""In the place of scikit-learn, which Keras imports where it is installed: a rank starts sooner."""

raise ImportError("ranks of these tests do without scikit-learn")
