"""A worker is lost with its disk, and the training goes on from what is in the store."""

from __future__ import annotations

import logging
import shutil
import sys
import textwrap
import threading
import uuid
from datetime import UTC, datetime

import pytest

from ddl_airflow.core.errors import AccessDenied, JobFailed, JobLost, StagingError, SubmitFailed
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import StageDataStep, StoreReference, TrainStep
from ddl_airflow.lineage.record import Run, has_part
from ddl_airflow.steps.base import Site, StepContext, prepared
from ddl_airflow.steps.checkpoints import drop_published, place_of
from ddl_airflow.steps.stage import StageData
from ddl_airflow.steps.train import Train
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from tests.integration.ceph import CephObjectStore, available
from tests.integration.faulty_proxy import FaultyProxy
from tests.limits import until, within

DAG = "digits"
RUN = Run(dag_id=DAG, run_id="manual__1", type="manual", due=datetime(2026, 11, 20, tzinfo=UTC))
LOG = logging.getLogger("unit.checkpoints")
NBYTES = 20 * 2**20  # of a checkpoint: three chunks, of which a step changes one
pytestmark = pytest.mark.integration

# Goes on from the newest checkpoint, makes one more, and then waits to be told how to end.
SCRIPT = f"""
    import glob, os, re, sys, time
    folder, told = os.environ["CHECKPOINT_DIR"], sys.argv[1]
    found = glob.glob(folder + "/m-*.ckpt")
    steps = [int(re.search(r"m-(\\d+)[.]ckpt", path)[1]) for path in found]
    step = max(steps, default=0)
    body = bytearray({NBYTES})
    if step:
        with open(folder + f"/m-{{step}}.ckpt", "rb") as file:
            body[:] = file.read()
        assert body[0] == step and len(body) == {NBYTES}, body[:1]
    print("goes on from", step, flush=True)
    body[0] = step + 1
    with open(folder + "/new", "wb") as file:
        file.write(body)
    os.replace(folder + "/new", folder + f"/m-{{step + 1}}.ckpt")
    if step:
        os.unlink(folder + f"/m-{{step}}.ckpt")
    while not os.path.exists(told):
        time.sleep(0.05)
    sys.exit(open(told).read() != "ends")
"""


@pytest.fixture(scope="module")
def ceph(tmp_path_factory):
    if reason := available():
        pytest.skip(reason)
    with CephObjectStore(tmp_path_factory.mktemp("ceph") / "store") as running:
        yield running, running.add_user("owner")


class Training:
    """One run, on a worker with a disk of its own."""

    def __init__(self, home, store):
        self.home, self.store, self.tries = home, store, 0
        self.layout = RunLayout(home / "worker", DAG, f"{DAG}-{uuid.uuid4().hex}")
        self.told = home / "told"
        for name in ("code", "data", "worker"):
            (home / name).mkdir()
        (home / "data" / "a").write_text("of a")
        (home / "code" / "train.py").write_text(textwrap.dedent(SCRIPT))
        self.train = None

    def context(self, **more):
        site = Site(python=sys.executable, open_store=self.opened, secret=lambda _: "")
        return StepContext(self.layout, RUN, LOG, site, try_number=self.tries, **more)

    def opened(self, reference):
        return self.store if reference.uri == "results:" else FolderStore(self.home / "data")

    def stage(self, *, cleared=True):
        data = StoreReference((self.home / "data").as_uri())
        step = StageDataStep(dataset=data, code=self.home / "code", commands=["python train.py x"])
        with prepared(self.layout, staged=False, experiment="", scripts=False):
            StageData(step, self.context(cleared=cleared)).run()

    def run(self, ends="", tries=2, **more):
        """A try of train, which is told at once how to end; or is left running."""
        self.tries += 1
        self.told.unlink(missing_ok=True)
        if ends:
            self.told.write_text(ends)
        asked = {"command": f"python train.py {self.told}", "distribution": "independent"}
        asked |= {"upload_every_s": 0.2, "results": StoreReference("results:")} | more
        self.train = Train(TrainStep(**asked), self.context(tries=tries))
        with prepared(self.layout, staged=True, experiment="", scripts=True):
            return self.train.run()

    def snapshots(self):
        keys = [obj.key for obj in place_of(self.store, self.layout.training_id).list()]
        return [key for key in keys if key.startswith("0") and key.endswith(".json")]

    def said(self):
        return (self.layout.logs / "rank-0.log").read_text()


@pytest.fixture(params=["ceph", "folder"])
def training(request, tmp_path):
    if request.param == "folder":
        yield Training(tmp_path, FolderStore(tmp_path / "results"))
        return
    running, keys = request.getfixturevalue("ceph")
    client = s3_client(running.endpoint_url, *keys)
    bucket = f"test-{uuid.uuid4()}"
    client.create_bucket(Bucket=bucket)
    yield Training(tmp_path, S3Store(client, bucket, "results"))
    client.close()


def in_background(call):
    raised = []

    def run():
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_a_training_whose_worker_is_lost_goes_on_from_the_store(training, caplog):
    caplog.set_level("INFO")
    training.stage(cleared=False)
    thread, raised = in_background(training.run)
    until(lambda: "checkpoints saved" in caplog.text or not thread.is_alive(), 60)
    assert not raised
    training.told.write_text("fails")
    thread.join()
    assert type(raised[0]) is JobFailed
    for step in (1, 2):
        # Everything of the worker is gone; another one takes over.
        shutil.rmtree(training.layout.workspace)
        caplog.clear()
        training.stage()
        with pytest.raises(JobFailed):
            training.run("fails", upload_every_s=60.0)
        assert training.said().startswith(f"goes on from {step}\n")
        assert f"lost here: 1 files, 20.0 MiB of try {step}" in caplog.text
        # Of the three chunks of a checkpoint one changes.
        assert "sent 8.0 MiB in 1 chunks" in caplog.text
    assert len(training.snapshots()) == 2
    # On a disk that was not lost, but is behind.
    kept = training.home / "kept"
    shutil.copytree(training.layout.workspace, kept, symlinks=True)
    with pytest.raises(JobFailed):
        training.run("fails")
    shutil.rmtree(training.layout.workspace)
    kept.rename(training.layout.workspace)
    caplog.clear()
    assert training.run("ends")["world_size"] == 1
    assert training.said().rstrip().endswith("goes on from 4")
    assert "newer than those here" in caplog.text
    drop_published(training.store, training.layout.training_id, LOG)
    assert training.snapshots() == []


def test_what_is_here_is_not_fetched(training, caplog):
    caplog.set_level("INFO")
    training.stage(cleared=False)
    with pytest.raises(JobFailed):
        training.run("fails")
    assert training.snapshots() == ["00000001.json"]  # at the end of the try
    training.run("ends")
    assert training.said().endswith("goes on from 1\n") and "in the store, " not in caplog.text


def test_a_training_that_is_wanted_once_more_begins_from_its_start(training):
    training.stage(cleared=False)
    training.run("ends")
    assert has_part(training.layout, "train") and training.snapshots()
    training.run("ends", tries=1)
    assert training.said().endswith("goes on from 0\n")
    shutil.rmtree(training.layout.workspace)
    training.stage()
    training.run("ends")
    assert training.said() == "goes on from 1\n"


def test_a_run_made_again_under_its_id_begins_from_its_start(training):
    """What its id has in the store is of the one that was deleted, and its workspace is gone."""
    training.stage(cleared=False)
    for _ in range(2):
        with pytest.raises(JobFailed):
            training.run("fails")
    shutil.rmtree(training.layout.workspace)
    training.tries = 0
    training.stage(cleared=False)
    training.run("ends")
    assert training.said() == "goes on from 0\n"


def test_checkpoints_of_other_data_are_nothing_to_go_on_from(training):
    training.stage(cleared=False)
    with pytest.raises(JobFailed):
        training.run("fails")
    shutil.rmtree(training.layout.workspace)
    (training.home / "data" / "a").write_text("of another")
    training.stage()
    training.run("ends")
    assert training.said() == "goes on from 0\n"


def test_a_store_that_takes_nothing_costs_a_warning(training, caplog, monkeypatch):
    training.stage(cleared=False)

    def refuse(*_):
        raise AccessDenied("AccessDenied. Check the keys.")

    for name in ("put_bytes", "put_if"):
        monkeypatch.setattr(type(training.store), name, refuse)
    training.run("ends")
    for said in ("will not be saved in the store: ", "are not saved in the store: AccessDenied: "):
        assert f"checkpoints {said}AccessDenied. Check the keys." in caplog.text


def test_a_store_that_does_not_say_what_it_has_ends_a_try_that_has_none(
    training, monkeypatch, caplog
):
    training.stage(cleared=False)

    def refuse(*_):
        raise StagingError("no route to host.")

    for name in ("read_version", "list"):
        monkeypatch.setattr(type(place_of(training.store, "")), name, refuse)
    with pytest.raises(StagingError, match="no route"):
        training.run("ends")
    (training.layout.checkpoints / "m-7.ckpt").write_bytes(b"\7" + bytes(NBYTES - 1))
    training.run("ends")
    assert "goes on from the checkpoints that are here: no route to host." in caplog.text
    assert training.said().endswith("goes on from 7\n")


def test_who_is_cancelled_saves_nothing_more(training, caplog):
    training.stage(cleared=False)
    thread, raised = in_background(lambda: training.run(upload_every_s=60.0))
    until(lambda: (training.layout.checkpoints / "m-1.ckpt").exists() or raised, 60)
    training.train.context.cancel()
    thread.join()
    assert type(raised[0]) is JobLost and training.snapshots() == []


def test_a_launcher_whose_jobs_outlive_the_step_is_refused(training):
    training.stage(cleared=False)
    with pytest.raises(
        SubmitFailed, match=r"checkpoints\.upload_every: .*launcher slurm.*outlives"
    ):
        training.run("ends", launcher="slurm")


@pytest.mark.parametrize("fault", ["500", "done reset", "sent cut", "error as success"])
def test_a_fault_at_any_request_of_a_save_costs_a_try_and_no_byte(ceph, tmp_path, fault):
    """Then the training goes on from what was saved."""
    running, keys = ceph
    client = s3_client(running.endpoint_url, *keys)
    bucket = f"test-{uuid.uuid4()}"
    client.create_bucket(Bucket=bucket)

    def puts(method, path):
        return method == "PUT"

    with FaultyProxy(running.endpoint_url, {1: fault, 3: fault, 5: fault}, puts) as proxy:
        near = s3_client(proxy.endpoint_url, *keys)
        training = Training(tmp_path, S3Store(near, bucket, "results"))
        training.stage(cleared=False)
        with pytest.raises(JobFailed):
            training.run("fails", upload_every_s=within(60.0))
        near.close()
    training.store = S3Store(client, bucket, "results")
    shutil.rmtree(training.layout.workspace)
    training.stage()
    training.run("ends")
    assert training.said() == "goes on from 1\n"
    client.close()
