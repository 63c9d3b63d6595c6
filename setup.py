"""Distribution ddl-airflow: all of it is in pyproject.toml. ops_lib/setup.py compiles the ops."""

from setuptools import setup

setup()
