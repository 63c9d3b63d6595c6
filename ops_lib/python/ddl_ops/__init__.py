"""Collectives for TensorFlow over MPI: the one implementation behind the front-end `ddl`.

Importing this package imports nothing else; TensorFlow comes in with the modules that need it.
"""
