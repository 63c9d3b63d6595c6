"""Scores data each night with the newest model in production, and at once when that changes.

An ordinary DAG file: copy it to Airflow's folder of DAGs, with the folder score-nightly beside it.
"""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from airflow.sdk import DAG, Asset, AssetOrTimeSchedule, CronTriggerTimetable, task
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

SCRIPT = Path(__file__).parent / "score-nightly" / "score.py"


def score_dag(
    results: str, model: str, data: str, conn_id: str = "", dag_id: str = "score-nightly"
) -> DAG:
    """A DAG that leaves <results>/<dag_id>/<time>.csv.

    Args:
        results: where the model is published, as its manifest says: s3://bucket or file:///folder.
        model: the name in that manifest.
        data: what is to be scored, of the same kind.
        conn_id: of both stores; empty for folders.
        dag_id: its own.
    """

    def store(uri: str) -> Any:
        # Here and below: no parse needs it.
        from ddl_airflow.core.manifest.sections.places import Connection
        from ddl_airflow.core.plan import StoreReference
        from ddl_airflow.hooks.store import store_of

        return store_of(StoreReference(uri, Connection(conn_id=conn_id) if conn_id else None))

    # A training updates it, and so does whoever goes back to an earlier model in Airflow's UI.
    published = Asset(f"{results}/{model}")
    with DAG(
        dag_id,
        description=f"Score {data} with the newest {model} in production",
        schedule=AssetOrTimeSchedule(
            timetable=CronTriggerTimetable("0 2 * * *", timezone="UTC"), assets=published
        ),
        catchup=False,
        max_active_runs=1,
        tags={"ddl"},
    ) as dag:

        @task
        def newest_in_production(triggering_asset_events: Any = None) -> dict[str, Any]:
            """What the pointer names now, and goes on naming for the whole run."""
            from ddl_airflow.lineage.production import PRODUCTION, read_pointer

            events = [one for of in (triggering_asset_events or {}).values() for one in of]
            if events and not any(one.extra.get("production") for one in events):
                raise AirflowSkipException("a model was published, and not put into production")
            pointer = read_pointer(store(results), model, PRODUCTION)
            if pointer is None:
                raise AirflowSkipException(f"no {model} is in production yet")
            return {name: pointer[name] for name in ("publication", "model", "metrics")}

        @task
        def score(serving: dict[str, Any], dag_run: Any = None) -> str:
            """The place of the scores."""
            from ddl_airflow.evidence.verification import verify
            from ddl_airflow.operators.base import rank_python
            from ddl_airflow.storage.cache import Cache
            from ddl_airflow.storage.staging import stage

            publication = store(results).at(serving["publication"])
            if problems := verify(publication).problems:
                raise AirflowFailException(f"{publication.uri} has changed since: {problems}")
            with TemporaryDirectory() as folder:
                fetched = {name: Path(folder, name) for name in ("model", "data")}
                cache, found = Cache(Path(folder, "cache")), Path(folder, "scores.csv")
                stage(publication.at("model"), cache, fetched["model"])
                stage(store(data), cache, fetched["data"])
                # TensorFlow may not be where Airflow is: the Python that trains has it. The script
                # needs none of Airflow's connections.
                words = [rank_python(""), SCRIPT, *fetched.values(), found]
                own = {k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW")}
                subprocess.run([*map(str, words)], env=own, check=True)
                kept = store(results).at(dag_id)
                name = f"{dag_run.run_after:%Y-%m-%dT%H%M%S}.csv"
                kept.put_bytes(name, found.read_bytes())
            print(f"scored with {serving['model']}, {serving['metrics']}: {kept.uri}/{name}")
            return f"{kept.uri}/{name}"

        score(newest_in_production())
    return dag


dag = score_dag(
    "s3://mnist-training-models", "mnist-keras", "s3://mnist-training-data", "ddl_object_store"
)
