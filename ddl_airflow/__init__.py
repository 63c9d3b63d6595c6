"""Distributed TensorFlow training from a manifest, on Apache Airflow.

Importing this package imports neither Airflow nor TensorFlow.
"""

__version__ = "0.1.0"
