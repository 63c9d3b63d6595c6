"""What the product means: plain values and their rules. No Airflow, TensorFlow or network."""
