"""The manifest: one YAML file that says what to train, where the data is, where the model goes."""
