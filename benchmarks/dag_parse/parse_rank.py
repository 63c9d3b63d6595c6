"""Parses folders as Airflow does, in turns with the other ways: see __main__.py.

Imports what both environments have, Airflow and the standard library; the rest when it is used.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.turns import serve

# What a parse must not need: what trains, what reaches stores, what starts ranks.
HEAVY = (
    *("tensorflow", "keras", "mpi4py", "boto3", "botocore", "awscrt"),
    *("ddl_airflow.launchers.local", "ddl_airflow.launchers.mpirun"),
)


def dag_bag(folder: Path, file: Path | None = None) -> Any:
    """A DagBag of the folder, or of a file in it; raises RuntimeError for an import error."""
    from airflow.dag_processing.dagbag import BundleDagBag

    bag = BundleDagBag(
        dag_folder=str(file or folder),
        bundle_path=folder,
        bundle_name="measured",
        load_op_links=False,
    )
    if bag.import_errors:
        raise RuntimeError(f"{folder}: {bag.import_errors}")
    return bag


def shape_of(bag: Any) -> list[Any]:
    """What must be equal of the first DAG, whoever made it."""
    dag_id = min(bag.dags)
    dag = bag.dags[dag_id]
    shape = [dag_id, dag.description, dag.schedule, dag.catchup, dag.max_active_runs]
    tags = sorted(dag.tags - {"dagfactory"})  # which dag-factory adds
    shape += [str(dag.start_date), tags, bool(dag.doc_md)]
    shape.append(sorted(dag.params.dump().items()))
    for task in dag.topological_sort():
        shape.append([task.task_id, task.retries, float(task.retry_exponential_backoff)])
        shape.append([task.retry_delay.total_seconds(), task.max_retry_delay.total_seconds()])
        shape.append([asset.uri for asset in task.outlets])
    return shape


def whole(request: dict[str, Any]) -> dict[str, Any]:
    """Parses the whole folder; says how many DAGs there are, and what the first is."""
    folder = Path(request["folder"])
    bag, seconds, cpu_s = timed(lambda: dag_bag(folder))
    return {"seconds": seconds, "cpu_s": cpu_s, "dags": len(bag.dags), "shape": shape_of(bag)}


def own(request: dict[str, Any]) -> dict[str, Any]:
    """Builds the DAG of one task, as the process of a task does before it runs it."""
    folder, dag_id = Path(request["folder"]), request["dag_id"]
    # What airflow.sdk.get_parsing_context reads.
    os.environ["_AIRFLOW_PARSING_CONTEXT_DAG_ID"] = dag_id
    os.environ["_AIRFLOW_PARSING_CONTEXT_TASK_ID"] = "train"
    try:
        bag, seconds, cpu_s = timed(lambda: dag_bag(folder, folder / request["file"]))
    finally:
        del os.environ["_AIRFLOW_PARSING_CONTEXT_DAG_ID"]
        del os.environ["_AIRFLOW_PARSING_CONTEXT_TASK_ID"]
    if dag_id not in bag.dags:
        raise RuntimeError(f"{folder}: no DAG {dag_id}")
    return {"seconds": seconds, "cpu_s": cpu_s, "dags": len(bag.dags)}


def stubs(request: dict[str, Any]) -> dict[str, Any]:
    """Makes the folder of a bundle over manifests; the second of two times, nothing changed."""
    from ddl_airflow.bundle import ManifestBundle

    bundle = ManifestBundle(name=request["name"], path=request["folder"])
    _, first_s, _ = timed(bundle.initialize)
    time.sleep(2.5)  # until times of change tell something; see the bundle
    bundle.refresh()
    _, again_s, _ = timed(bundle.refresh)
    return {"folder": str(bundle.path), "first_s": first_s, "again_s": again_s}


def imported(request: dict[str, Any]) -> dict[str, Any]:
    """After all parses: serialises a DAG as well, and says what of HEAVY is imported."""
    from airflow.serialization.serialized_objects import DagSerialization

    for dag in dag_bag(Path(request["folder"])).dags.values():
        DagSerialization.to_dict(dag)
    return {"heavy": [name for name in HEAVY if name in sys.modules]}


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """What work returns, and its wall and CPU seconds."""
    gc.collect()
    started, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, time.perf_counter() - started, time.process_time() - cpu


ANSWERS = {"whole": whole, "own": own, "stubs": stubs, "imported": imported}


def main() -> None:
    warnings.simplefilter("ignore")
    import airflow.dag_processing.dagbag  # noqa: F401

    if sys.argv[1] == "dag-factory":
        import dagfactory  # noqa: F401
    else:
        import ddl_airflow.dag  # noqa: F401
    names = ["apache-airflow", *(["dag-factory"] if sys.argv[1] == "dag-factory" else [])]
    versions = {name: importlib.metadata.version(name) for name in names}
    serve(0, versions, lambda request: ANSWERS[request["do"]](request))


if __name__ == "__main__":
    main()
