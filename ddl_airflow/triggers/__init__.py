"""What the triggerer waits for, so that no worker has to."""
