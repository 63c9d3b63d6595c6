"""What is secret on a site stays where it is, while a whole DAG runs and fails at each step."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path

import httpx
import pytest
import sqlalchemy

from ddl_airflow.demo.show import RESULTS_BUCKET
from ddl_airflow.demo.site import USER
from tests.conftest import events_of
from tests.integration.mail import body
from tests.integration.planted import PLANTED, Search
from tests.limits import within
from tests.schemas import check_events

pytestmark = pytest.mark.integration

# The keys are the store's own, written out: with others it would not run to its end.
MANIFEST = """\
model_definition:
  name: planted
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py --note={{ params.note }} ; python export.py
    compute_configuration: {name: cpu}
training_data_reference:
  type: s3
  connection: &store   # before: secret_access_key: COMMENT
    endpoint_url: ENDPOINT
    access_key_id: KEY_ID
    secret_access_key: SECRET
  source: {bucket: planted-data}
training_results_reference: {type: s3, connection: *store, target: {bucket: RESULTS}}
parameters:
  note: a note
  token: {secret: true, conn_id: planted_hub}
evaluation: {metric: quality, minimum: 0.5, command: python evaluate.py}
retries: {attempts: 2, delay: 1s, backoff: fixed}
notifications:
  on_failure:
  - {arguments: {to: ml@example.com, smtp_conn_id: planted_mail}}
  - ml@example.com
  on_success: [ml@example.com]
"""
# Each finds the secret, says nothing of it, and fails in its first try.
_FAILS_ONCE = """\
import os, pathlib, sys, time
assert len(os.environ["PARAM_TOKEN"]) > 20
mark = pathlib.Path(os.environ["JOB_STATE_DIR"], "failed-" + os.path.basename(__file__))
time.sleep(0.5)
if not mark.exists():
    mark.touch()
    raise ValueError("fails once, in " + __file__)
result = pathlib.Path(os.environ["RESULT_DIR"])
"""
SCRIPTS = {
    "train.py": """
import tensorflow as tf
model = tf.Module()
model.weights = tf.Variable([1.0])
@tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
def serve(x):
    return {"y": x + model.weights[0]}
model.serve = serve
tf.saved_model.save(model, str(result / "made"), serve)
""",
    "export.py": """
import shutil
shutil.copytree(result / "made", result / "model", dirs_exist_ok=True)
""",
    # So that the upload fails, too.
    "evaluate.py": """
pathlib.Path(os.environ["EVALUATION"]).write_text('{"quality": 0.75}')
(result / "model" / "saved_model.pb").rename(result / "put-aside")
""",
}
FAILING = """\
model_definition:
  name: NAME
  framework: {name: tensorflow, version: "2.21"}
  execution: {command: python train.py, compute_configuration: {name: cpu}}
training_data_reference: {type: s3, connection: CONNECTION, source: {bucket: no-bucket-there}}
training_results_reference: {type: fs, target: {path: ./published}}
MORE
"""
FAILED = {
    "planted-store": "{conn_id: planted_store}",
    # Nobody listens there; what is no address; and keys that are refused.
    "planted-nobody": '{endpoint_url: "${DDL_PLANTED_URL}", access_key_id: k, '
    "secret_access_key: s}",
    "planted-address": '{endpoint_url: "${DDL_PLANTED}", access_key_id: k, secret_access_key: s}',
    "planted-keys": '{endpoint_url: ENDPOINT, access_key_id: "${DDL_PLANTED}", '
    'secret_access_key: "${DDL_PLANTED}"}',
    "planted-missing": "{conn_id: nobody}",
}
REFUSED = {
    "url": "notifications: {on_failure: [{arguments: {url: 'https://me:REFUSED@example.com'}}]}",
    "default": "parameters: {token: {secret: true, default: REFUSED}}",
    "yaml": "parameters: {token: {secret: true, default: [REFUSED",
}


class _Watch(threading.Thread):
    """Looks at what every process was started with, and at the variables of ranks."""

    def __init__(self, search: Search, workspace: Path) -> None:
        super().__init__(daemon=True)
        self._search, self._workspace = search, f"DDL_RECORD_DIR={workspace}".encode()
        self._end = threading.Event()
        self.ranks: set[str] = set()

    def run(self) -> None:
        seen: dict[str, bytes] = {}
        while not self._end.wait(0.05):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    words = (process / "cmdline").read_bytes()
                    variables = (process / "environ").read_bytes()
                except OSError:  # it has ended
                    continue
                if seen.get(process.name) != words:
                    seen[process.name] = words
                    self._search.look("command lines", words, words.decode(errors="replace"))
                    if self._workspace in variables:
                        self._look_at(words, variables)

    def _look_at(self, words: bytes, variables: bytes) -> None:
        command = words.replace(b"\0", b" ").decode(errors="replace")
        self.ranks.add(command)
        for variable in variables.split(b"\0"):
            name = variable.partition(b"=")[0].decode()
            if name == "PARAM_TOKEN" and "ddl_ops.saved_model" not in command:
                continue  # where it belongs
            self._search.look("variables of ranks", variable, f"{name} of {command}")

    def end(self) -> None:
        self._end.set()
        self.join()


@pytest.fixture(scope="module")
def sought(object_store):
    return {**PLANTED, "key in a manifest": object_store.secret_access_key}


def _write(folder: Path, manifest: str) -> None:
    folder.mkdir(parents=True)
    for name, script in SCRIPTS.items():
        (folder / name).write_text(_FAILS_ONCE + script)
    (folder / "manifest.yml").touch(mode=0o600)  # its copies are not to be more open
    (folder / "manifest.yml").write_text(manifest)


def _run_all(site, object_store, dags_folder) -> dict[str, str]:
    """Writes the manifests, runs their DAGs; the one that may, to its end. Returns DAG to run."""
    folder = dags_folder / "planted"
    object_store.client.create_bucket(Bucket="planted-data")
    object_store.client.put_object(Bucket="planted-data", Key="a.txt", Body=b"1")
    for name, connection in FAILED.items():
        connection = connection.replace("ENDPOINT", object_store.endpoint_url)
        text = FAILING.replace("NAME", name).replace("CONNECTION", connection)
        _write(folder / name, text.replace("MORE", "retries: {attempts: 1}"))
    for name, more in REFUSED.items():
        text = FAILING.replace("NAME", f"planted-{name}").replace("CONNECTION", "{conn_id: x}")
        _write(folder / name, text.replace("MORE", more.replace("REFUSED", PLANTED["refused"])))
    values = {
        "COMMENT": PLANTED["comment"],
        "ENDPOINT": object_store.endpoint_url,
        "KEY_ID": object_store.access_key_id,
        "SECRET": object_store.secret_access_key,
        "RESULTS": RESULTS_BUCKET,
    }
    text = MANIFEST
    for word, value in values.items():
        text = text.replace(word, value)
    _write(folder / "planted", text)
    runs = {}
    for dag_id in ("planted", *FAILED):
        site.wait_for_dag(dag_id)
        runs[dag_id] = site.trigger(dag_id)
    for dag_id, run_id in runs.items():
        assert site.wait_for_run(dag_id, run_id, 300) == "failed"
    run_id = runs["planted"]
    states = {name: one["state"] for name, one in site.task_instances("planted", run_id).items()}
    assert states.pop("upload_results") == "failed" and set(states.values()) == {"success"}, states
    layout = site.layout("planted", run_id)
    (layout.result / "put-aside").rename(layout.model / "saved_model.pb")
    clear = {"dry_run": False, "only_failed": False, "task_ids": ["upload_results"]}
    clear["dag_run_id"] = run_id
    site.call("POST", "/dags/planted/clearTaskInstances", json=clear)
    assert site.wait_for_run("planted", run_id, 120) == "success"
    return runs


def _answers(site, runs):
    """All that the API says of the runs, and the pages."""
    paths = ["/dags", "/importErrors", "/eventLogs", "/assets", "/assets/events", "/dagWarnings"]
    paths += ["/variables", "/providers", "/plugins", "/jobs", "/pools"]
    for dag_id, run_id in runs.items():
        dag, run = f"/dags/{dag_id}", f"/dags/{dag_id}/dagRuns/{run_id}"
        paths += [f"{dag}/details", f"{dag}/tasks", f"{dag}/dagVersions", f"/dagSources/{dag_id}"]
        paths += [run, f"{run}/taskInstances", f"{dag}/dagRuns"]
        for task_id, one in site.task_instances(dag_id, run_id).items():
            task = f"{run}/taskInstances/{task_id}"
            paths += [
                f"{task}/tries",
                f"{task}/xcomEntries",
                f"{task}/links",
                f"{task}/state-store",
            ]
            if one["state"] == "success":
                paths.append(f"{task}/xcomEntries/return_value")
            tries = one["try_number"] or 0
            paths += [f"{task}/logs/{number}?full_content=true" for number in range(1, tries + 1)]
    for path in paths:
        yield path, json.dumps(site.call("GET", path))


def _copies(bundles: Path) -> list[Path]:
    """The texts themselves, as Airflow needs them; others, such as what is shown, are beside."""
    texts = [path for path in bundles.glob("*/manifests/*")]
    return [*texts, *bundles.rglob("manifest.yml")]


@pytest.fixture(scope="module")
def search(sought):
    return Search(sought)


@pytest.fixture(scope="module")
def runs(site, object_store, dags_folder, search):
    """DAG to run: what was triggered, and has ended."""
    watch = _Watch(search, site.workspace)
    watch.start()
    try:
        triggered = _run_all(site, object_store, dags_folder)
    finally:
        watch.end()
    for part in ("train.py", "export.py", "evaluate.py", "ddl_ops.saved_model"):
        assert any(part in command for command in watch.ranks), watch.ranks
    return triggered


def test_openlineage_is_told_of_each_try_and_of_no_secret(runs, site, dags_folder, search):
    """Each script fails in its first try, and upload-results until it is cleared."""
    pytest.importorskip("airflow.providers.openlineage", reason="no provider of OpenLineage here")
    failed = ["START", "FAIL", "START", "COMPLETE"]
    expected = {
        "planted.stage_data": ["START", "COMPLETE"],
        **{f"planted.{n}": failed for n in ("train", "transform", "evaluate", "upload_results")},
        # Where nobody can read the data.
        **{f"{dag_id}.stage_data": ["START", "FAIL"] for dag_id in FAILED},
    }
    told: dict[str, list[dict]] = {}
    deadline = time.monotonic() + within(20)
    while (kinds := {n: [e["eventType"] for e in told[n]] for n in told}) != expected:
        assert time.monotonic() < deadline, kinds
        time.sleep(0.5)  # a task tells of its end after it has ended
        said, _, _ = events_of(dags_folder).read_text().rpartition("\n")  # whole lines
        events = [json.loads(line) for line in said.splitlines()]
        events.sort(key=lambda event: event["eventTime"])
        told = {name: [e for e in events if e["job"]["name"] == name] for name in expected}
    assert search.look("OpenLineage's events", said) == set()
    check_events([event for of in told.values() for event in of])
    for name, of in told.items():
        dag_id, _, step = name.partition(".")
        for begun, ended in zip(of[::2], of[1::2], strict=True):
            assert begun["run"]["runId"] == ended["run"]["runId"]
            assert ended["job"]["facets"]["ddl_manifest"]["name"] == dag_id
            training = ended["run"]["facets"]["ddl_training"]
            assert training["training_id"] == site.layout(dag_id, runs[dag_id]).training_id
            why = training.get("failure", {})
            assert why.get("step") == (step if ended["eventType"] == "FAIL" else None)
    data, model = told["planted.stage_data"][-1], told["planted.upload_results"][-1]
    assert [(i["namespace"], i["name"]) for i in data["inputs"]] == [("s3://planted-data", "/")]
    published, *named = model["outputs"]
    training = site.layout("planted", runs["planted"]).training_id
    assert re.fullmatch(f"{training}/[^/]+/model", published["name"])
    assert {one["name"] for one in named} == {
        "planted",
        "planted/latest.json",
        "planted/production.json",
    }
    assert published["facets"]["ddl_model"]["metrics"] == {"quality": 0.75}


def test_no_secret_is_found_where_it_does_not_belong(
    runs, site, object_store, dags_folder, database, mailbox, sought, search
):
    for path, answer in _answers(site, runs):
        search.look("API", answer, path)
    run_id = runs["planted"]
    login = {"username": USER, "password": site.password}
    token = httpx.post(f"{site.url}/auth/token", json=login, timeout=within(60)).json()[
        "access_token"
    ]
    told = [f"{what}/planted/{run_id}" for what in ("about", "curves", "graph", "log/0")]
    for path in ("training", "trainings", *told):
        answer = httpx.get(
            f"{site.url}/ddl/{path}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=within(60),
        )
        assert answer.status_code == 200, answer.text
        search.look("Training tab", answer.content, path)

    engine = sqlalchemy.create_engine(database or f"sqlite:///{site.home / 'airflow.db'}")
    with engine.connect() as connection:
        for table in sqlalchemy.inspect(engine).get_table_names():
            for row in connection.execute(sqlalchemy.text(f'SELECT * FROM "{table}"')):
                search.look("database", repr(tuple(row)), table)
    engine.dispose()

    logs, bundles = site.home / "logs", site.home / "bundles"
    search.look_in("logs", logs)
    search.look_in("workspace", site.workspace)
    search.look_in("Airflow's other files", site.home, [logs, site.workspace, bundles])
    # Airflow needs manifests as they are: their copies have the keys, and the same mode.
    for path in bundles.rglob("*"):
        if path.is_file():
            there = Search(sought).look("", path.read_bytes())
            if (there & {"key in a manifest", "comment"}) and path.stat().st_mode & 0o077:
                search.found.add((f"others may read {path}", "key in a manifest"))
            search.found |= {
                (str(path), name) for name in there - {"key in a manifest", "comment", "refused"}
            }
    search.look_in("what Airflow shows of manifests", bundles, [*_copies(bundles)])

    prefix = f"{site.layout('planted', run_id).training_id}/"
    for start in (prefix, "planted/"):
        listed = object_store.client.list_objects_v2(Bucket=RESULTS_BUCKET, Prefix=start)
        assert listed["KeyCount"]
        for one in listed["Contents"]:
            got = object_store.client.get_object(Bucket=RESULTS_BUCKET, Key=one["Key"])
            search.look("bucket", one["Key"].encode() + got["Body"].read(), one["Key"])
    mails = mailbox.about("planted: upload_results failed") + mailbox.about("planted: a new model")
    for mail in mails:
        search.look("mails", f"{mail} {body(mail)}")
    print(f"\n{search.report()}")
    assert search.found == set()
