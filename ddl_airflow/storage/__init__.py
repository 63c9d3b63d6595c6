"""Training data in, results out: stores, the staging cache, checked parallel transfer.

Imports neither Airflow nor, before a store is used, boto3.
"""
