"""Events of Airflow's provider of OpenLineage, from the real task runner, and the graph of them.

Events are held to the official schemas (``tests.schemas``).
"""

from __future__ import annotations

import json
import os
import signal
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip(
    "airflow.providers.openlineage", reason="no provider of OpenLineage in this environment"
)

from airflow.providers.openlineage.plugins.listener import get_openlineage_listener
from airflow.sdk import DAG
from airflow.sdk.listener import get_listener_manager

from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.plan import ApproveStep, StoreReference
from ddl_airflow.lineage.flow import dataset_at
from ddl_airflow.lineage.production import PRODUCTION, read_pointer
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.operators.approve import ApproveOperator
from ddl_airflow.operators.production import production_dag
from ddl_airflow.steps.transform import Transform
from ddl_airflow.storage.filesystem import FolderStore
from tests.limits import within
from tests.schemas import check_events

SECRET = "plantedopenlineage5d1f"
TRAIN = """
    import os
    assert os.environ["PARAM_TOKEN"]
    open(os.environ["CHECKPOINT_DIR"] + "/model-7", "w").write("weights")
    print("loss= 0.25")
"""
EXPORT = """
    import os
    model = os.environ["RESULT_DIR"] + "/model"
    os.makedirs(model, exist_ok=True)
    open(model + "/saved_model.pb", "w").write("graph")
"""
EVALUATE = """
    import json, os
    json.dump({"quality": 0.75}, open(os.environ["EVALUATION"], "w"))
"""
MORE = """\
metrics:
  - {name: loss, regex: 'loss= (\\S+)'}
parameters:
  token: {secret: true, conn_id: planted_hub}
evaluation: {command: python evaluate.py, metric: quality, minimum: 0.5}
"""
# As ddl_ops.saved_model writes it.
PORT = {"dtype": "float32", "shape": [None, 784]}
REPORT = {
    "checkpoint": "model-7",
    "checkpoint_step": 7,
    "signatures": {"predict": {"inputs": {"images": PORT}, "outputs": {"y": PORT}}},
}
STEPS = ("stage_data", "train", "transform", "evaluate", "upload_results")


@pytest.fixture
def told(tmp_path, monkeypatch):
    """told() -> all events so far; from now on they are written to a file."""
    path = tmp_path / "events.jsonl"
    transport = {"type": "file", "log_file_path": str(path), "append": True}
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__TRANSPORT", json.dumps(transport))
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__EXECUTE_IN_THREAD", "True")
    get_openlineage_listener.cache_clear()
    manager, listener = get_listener_manager(), get_openlineage_listener()
    manager.add_listener(listener)
    yield lambda: [json.loads(line) for line in path.read_text().splitlines()]
    manager.pm.unregister(listener)
    get_openlineage_listener.cache_clear()


@pytest.fixture
def dag_of(tmp_path, workspace, write_manifest, monkeypatch):
    """dag_of(script) -> a DAG over folders, with a secret that its script gets."""

    def make(script=TRAIN):
        hub = {"conn_type": "http", "password": SECRET}
        monkeypatch.setenv("AIRFLOW_CONN_PLANTED_HUB", json.dumps(hub))
        command = "python train.py ; python export.py"
        path = write_manifest(
            tmp_path / "dags", "road", command, more=MORE, script=textwrap.dedent(script)
        )
        text = path.read_text().replace("  name: road\n", "  name: road\n  author: {name: A B}\n")
        path.write_text(text)
        (path.parent / "export.py").write_text(textwrap.dedent(EXPORT))
        (path.parent / "evaluate.py").write_text(textwrap.dedent(EVALUATE))
        (path.parent / "data").mkdir()
        (path.parent / "data" / "numbers.txt").write_text("25 75\n")
        monkeypatch.setattr(Transform, "_saved_model", lambda *words: dict(REPORT))
        return dag_from(load_manifest(path), path)

    return make


def graph(events):
    """Edges from what was read to what was written; by its own word, where an output has one."""
    edges = set()
    for event in events:
        if event["eventType"] != "COMPLETE":
            continue
        for output in event["outputs"]:
            said = output["facets"].get("lineage", {}).get("inputs", event["inputs"])
            edges |= {((i["namespace"], i["name"]), (output["namespace"], output["name"]))
                      for i in said}  # fmt: skip
    return edges


def below(edges, node):
    found, more = set(), {node}
    while more:
        found |= more
        more = {to for one, to in edges if one in more} - found
    return found


def test_events_of_a_whole_training_are_valid_and_lead_from_the_data_to_the_pointer(
    dag_of, told, run_task, tmp_path
):
    dag = dag_of()
    for name in STEPS:
        ended = run_task(dag.get_task(name), told=True)
        assert ended.state == "success", ended.error
    events = told()
    check_events(events)
    assert SECRET not in json.dumps(events)
    kinds = [(one["job"]["name"], one["eventType"]) for one in events]
    assert kinds == [(f"road.{name}", k) for name in STEPS for k in ("START", "COMPLETE")]
    assert len({one["run"]["runId"] for one in events}) == len(STEPS)
    datasets = [one for event in events for one in (*event["inputs"], *event["outputs"])]
    assert datasets and not [one for one in datasets if one["name"].endswith("/")]

    results = FolderStore(tmp_path / "dags" / "results")
    pointer = read_pointer(results, "road", PRODUCTION)
    data = dataset_at((tmp_path / "dags" / "data").as_uri())
    model = dataset_at(pointer["model"])
    places = {n: dataset_at(f"{results.uri}/road/{n}.json") for n in ("latest", "production")}
    asset = dataset_at(f"{results.uri}/road")
    edges = graph(events)

    def node(one):
        return (one.namespace, one.name)

    assert node(model) in below(edges, node(data))
    reached = {to for one, to in edges if one == node(model)}
    assert reached == {*map(node, places.values()), node(asset)}
    # No pointer is said to be made of what the upload read.
    for place in (*places.values(), asset):
        assert {one for one, to in edges if to == node(place)} == {node(model)}

    complete = {e["job"]["name"][5:]: e for e in events if e["eventType"] == "COMPLETE"}
    (source,) = complete["stage_data"]["inputs"]
    assert source["facets"]["version"]["datasetVersion"] == pointer["made_of"]["dataset"]
    assert source["facets"]["storage"]["storageLayer"] == "file"
    assert source["inputFacets"]["inputStatistics"]["fileCount"] == 1
    published = next(o for o in complete["upload_results"]["outputs"] if o["name"] == model.name)
    facets = published["facets"]
    assert facets["ownership"]["owners"] == [{"name": "A B"}]
    assert [one["name"] for one in facets["schema"]["fields"]] == [
        "predict.inputs.images",
        "predict.outputs.y",
    ]
    said = facets["ddl_model"]
    assert (said["checkpoint_step"], said["metrics"]["quality"]) == (7, 0.75)
    trained = complete["train"]["run"]["facets"]["ddl_training"]
    assert (trained["world_size"], trained["metrics"]) == (2, {"loss": 0.25})
    named = complete["train"]["job"]["facets"]["ddl_manifest"]
    assert (named["name"], named["digest"]) == ("road", pointer["made_of"]["manifest"])

    # Those who wait for the asset are told the same.
    (event,) = ended.message("SucceedTask").outlet_events
    extra = event["extra"]
    assert extra["training_id"] == said["training_id"] and extra["digest"] == said["digest"]
    assert extra["metrics"]["quality"] == 0.75
    assert dataset_at(extra["pointers"]["production"]) == places["production"]

    # And a person, who puts it there once more.
    task = production_dag(results.uri).get_task("set_production")
    for name, value in {"model": "road", "action": "promote", "to": said["publication"]}.items():
        task.params[name] = task.dag.params[name] = value
    ended = run_task(task, told=True)
    assert ended.state == "success", ended.error
    moved = told()[len(events) :]
    check_events(moved)
    assert graph(moved) == {(node(model), node(places["production"]))}
    (event,) = ended.message("SucceedTask").outlet_events
    assert event["extra"]["digest"] == said["digest"]


def test_a_failed_step_says_what_it_read_and_which_rank_failed(dag_of, told, run_task):
    dag = dag_of("import os, time\nassert os.environ['OMPI_COMM_WORLD_RANK'] == '0'\n")
    assert run_task(dag.get_task("stage_data"), told=True).state == "success"
    assert run_task(dag.get_task("train"), told=True).state != "success"
    started, failed = told()[2:]
    check_events(told())
    assert (started["eventType"], failed["eventType"]) == ("START", "FAIL")
    assert started["run"]["runId"] == failed["run"]["runId"]
    assert failed["inputs"] == started["inputs"] != [] and failed["outputs"] == []
    why = failed["run"]["facets"]["ddl_training"]["failure"]
    assert (why["step"], why["rank"]) == ("train", 1)
    assert SECRET not in json.dumps(told())


def test_a_step_that_fails_says_where_its_data_is_though_there_is_none(
    dag_of, told, run_task, tmp_path
):
    dag = dag_of()
    (tmp_path / "dags" / "data" / "numbers.txt").unlink()
    (tmp_path / "dags" / "data").rmdir()
    assert run_task(dag.get_task("stage_data"), told=True).state != "success"
    assert [one["eventType"] for one in told()] == ["START", "FAIL"]
    for one in told():
        assert [i["name"] for i in one["inputs"]] == [str(tmp_path / "dags" / "data")]


def test_a_step_that_somebody_ends_is_aborted_and_has_not_failed(dag_of, told, run_task, tmp_path):
    dag = dag_of("import time\nopen('up', 'w').close()\ntime.sleep(60)\n")
    assert run_task(dag.get_task("stage_data"), told=True).state == "success"
    before = signal.getsignal(signal.SIGTERM)

    def end():
        deadline = time.monotonic() + within(20)
        while time.monotonic() < deadline:
            if list((tmp_path / "workspace").glob("runs/road/*/code/up")):
                os.kill(os.getpid(), signal.SIGTERM)  # as Airflow's supervisor does
                return
            time.sleep(0.05)

    ender = threading.Thread(target=end)
    ender.start()
    try:
        assert run_task(dag.get_task("train"), told=True).state != "success"
    finally:
        signal.signal(signal.SIGTERM, before)
        ender.join()
    started, aborted = told()[2:]
    check_events(told())
    assert (started["eventType"], aborted["eventType"]) == ("START", "ABORT")
    assert started["run"]["runId"] == aborted["run"]["runId"]
    assert started["job"]["name"] == aborted["job"]["name"]
    assert aborted["inputs"] == started["inputs"] and aborted["outputs"] == []


def test_who_approves_is_said_to_have_looked_at_the_model(tmp_path, workspace, context_of):
    step = ApproveStep(results=StoreReference((tmp_path / "results").as_uri()))
    with DAG("road"):
        task = ApproveOperator(task_id="approve", subject="Publish?", step=step)
    instance = SimpleNamespace(get_template_context=lambda: context_of("road"))
    found = task.get_openlineage_facets_on_complete(instance)
    (model,) = found.inputs
    assert model.name.startswith(f"{workspace}/runs/road/") and model.name.endswith("/model")
    assert found.outputs == []


@pytest.mark.parametrize(
    ("uri", "namespace", "name"),
    [
        ("s3://data/digits/train/", "s3://data", "digits/train"),
        ("s3://data/a#b?c", "s3://data", "a#b?c"),
        ("s3://data", "s3://data", "/"),
        ("file:///srv/a%20b/", "file", "/srv/a b"),
    ],
)
def test_places_have_the_names_that_openlineage_gives_them(uri, namespace, name):
    one = dataset_at(uri)
    assert (one.namespace, one.name) == (namespace, name)
