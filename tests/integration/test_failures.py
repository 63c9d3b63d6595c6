"""What goes wrong ends in a clear error in the task's log, at once, and leaves nothing behind.

The scripts are plain Python: how a task fails does not depend on TensorFlow, and starting it
would cost ten seconds for each case.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from urllib.parse import quote

import pytest

from ddl_airflow.demo.show import RESULTS_BUCKET
from ddl_airflow.launchers.processes import marked
from tests.integration.disk import tiny_disk
from tests.integration.mail import body

pytestmark = pytest.mark.integration

MANIFEST = """\
model_definition:
  name: {name}
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: {command}
    compute_configuration: {{name: cpu, nodes: 2}}
training_data_reference:
  type: s3
  connection: {connection}
  source: {{bucket: {bucket}}}
training_results_reference: {results}
distribution: independent
retries: {{attempts: 2, delay: 1s, backoff: fixed}}
{more}
"""
BUCKET = (
    "{type: s3, connection: {conn_id: ddl_object_store}, target: {bucket: mnist-training-models}}"
)
GOOD_SCRIPT = "print('trained nothing')\n"
RAISES_ON_RANK_1 = """\
import os, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    raise ValueError("sample 17 has 783 pixels")
time.sleep(300)
"""


@dataclass(frozen=True)
class Case:
    """A manifest that must fail.

    Attributes:
        task: the task that fails.
        tries: how many times it is tried.
        words: what its log must say.
    """

    task: str
    tries: int
    words: tuple[str, ...]
    command: str = "python train.py"
    script: str = GOOD_SCRIPT
    results: str = BUCKET
    connection: str = "{conn_id: ddl_object_store}"
    bucket: str = "mnist-training-data"
    more: str = ""
    needs_real_store: bool = False
    absent: tuple[str, ...] = field(default=())


CASES = {
    "missing-bucket": Case(
        "stage_data", 1, ("SourceMissing", "no-such-bucket"), bucket="no-such-bucket"
    ),
    "wrong-key": Case(
        "stage_data",
        1,
        ("AccessDenied",),
        connection="{endpoint_url: ENDPOINT, access_key_id: AKIAWRONG, "
        "secret_access_key: notthekey0123}",
        needs_real_store=True,
        absent=("notthekey0123",),
    ),
    "raises": Case(
        "train",
        2,
        ("JobFailed", "rank 1 of 2", "ValueError", "sample 17 has 783 pixels", "train.py:3"),
        script=RAISES_ON_RANK_1,
        more="notifications: {on_failure: [ml@example.com]}",
    ),
    "no-checkpoint": Case("transform", 1, ("CheckpointMissing",)),
    "no-model": Case(
        "transform",
        1,
        ("TransformError", "saved nothing", "$RESULT_DIR/model"),
        command="python train.py ; echo saved nothing",
    ),
}


@pytest.fixture(scope="module")
def failed(site, object_store, dags_folder):
    """All cases, run at the same time: case to run id."""
    for name, case in CASES.items():
        folder = dags_folder / "failures" / name
        folder.mkdir(parents=True)
        (folder / "train.py").write_text(case.script)
        manifest = MANIFEST.format(
            name=f"fails-{name}",
            command=case.command,
            connection=case.connection.replace("ENDPOINT", object_store.endpoint_url),
            bucket=case.bucket,
            results=case.results,
            more=case.more,
        )
        (folder / "manifest.yml").write_text(manifest)
    runs = {}
    for name in CASES:
        site.wait_for_dag(f"fails-{name}")
        runs[name] = site.trigger(f"fails-{name}")
    for name, run_id in runs.items():
        assert site.wait_for_run(f"fails-{name}", run_id, 300) == "failed"
    return runs


@pytest.mark.parametrize("name", CASES)
def test_failure_names_cause_and_leaves_nothing(site, object_store, failed, name):
    case = CASES[name]
    if case.needs_real_store and not object_store.real:
        pytest.skip("the embedded store checks no keys; install Ceph (see the warning above)")
    dag_id, run_id = f"fails-{name}", failed[name]
    tasks = site.task_instances(dag_id, run_id)
    assert tasks[case.task]["state"] == "failed"
    first = site.task_log(dag_id, run_id, case.task, 1)
    assert tasks[case.task]["try_number"] == case.tries, first
    log = site.task_log(dag_id, run_id, case.task, case.tries)
    for word in case.words:
        assert word in log
    for word in case.absent:
        assert word not in log
    layout = site.layout(dag_id, run_id)
    noted = json.loads(layout.failure.read_text("utf-8"))
    assert (noted["step"], noted["try"]) == (case.task, case.tries)
    assert noted["message"].splitlines()[0] in log
    assert noted["rank"] == (1 if name == "raises" else None)
    for number in range(1, case.tries + 1):
        assert marked("DDL_JOB_ID", f"{layout.training_id}/train-{number}") == []
    published = object_store.client.list_objects_v2(
        Bucket=RESULTS_BUCKET, Prefix=layout.training_id
    )
    assert published["KeyCount"] == 0
    assert not layout.model.exists()


def test_a_failure_is_mailed_once_and_after_the_last_try(site, mailbox, failed):
    (mail,) = mailbox.about("fails-raises")
    assert (mail["Subject"], mail["To"]) == ("fails-raises: train failed", "ml@example.com")
    text = body(mail)
    assert "rank 1 of 2" in text and "sample 17 has 783 pixels" in text
    run_id = quote(failed["raises"], safe="/")
    assert f'<a href="{site.url}/dags/fails-raises/runs/{run_id}">' in text


def test_full_disk_ends_in_its_name_and_publishes_nothing(site, dags_folder, tmp_path):
    folder = dags_folder / "full-disk"
    folder.mkdir()
    # Of 1 MiB, and one that can be loaded: transform asks it.
    (folder / "train.py").write_text(
        "import os\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '0':\n"
        "    import tensorflow as tf\n"
        "    model = tf.Module()\n"
        "    model.weights = tf.Variable(tf.zeros([1 << 18]))\n"
        "    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])\n"
        "    def serve(x):\n"
        "        return {'y': x + model.weights[0]}\n"
        "    model.serve = serve\n"
        "    tf.saved_model.save(model, os.environ['RESULT_DIR'] + '/model', serve)\n"
    )
    with tiny_disk(tmp_path / "disk", 256 * 1024) as disk:
        manifest = MANIFEST.format(
            name="full-disk",
            command="python train.py ; echo the model is there",
            connection="{conn_id: ddl_object_store}",
            bucket="mnist-training-data",
            results=f"{{type: fs, target: {{path: {disk}/results}}}}",
            more="",
        )
        (folder / "manifest.yml").write_text(manifest)
        site.wait_for_dag("full-disk")
        run_id = site.trigger("full-disk")
        assert site.wait_for_run("full-disk", run_id, 120) == "failed"
        tasks = site.task_instances("full-disk", run_id)
        assert tasks["upload_results"]["state"] == "failed"
        assert tasks["upload_results"]["try_number"] == 2  # somebody may have made room
        log = site.task_log("full-disk", run_id, "upload_results", 2)
        assert "NoSpace" in log and str(disk) in log
        # But the note that an upload began, for who asks the index meanwhile.
        left = [p.relative_to(disk) for p in disk.rglob("*") if p.is_file()]
        assert [str(p.parent) for p in left] == ["results/_lineage/new"] * len(left)
