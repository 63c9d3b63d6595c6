"""Makes an Airflow DAG of every manifest in this folder and the folders below it."""

from pathlib import Path

from ddl_airflow.dag import dags_from

globals().update(dags_from(Path(__file__).parent))
