"""A worker is lost with its disk, and the training goes on from what is in the store."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import textwrap
import threading
import time
import uuid
import zipfile
from datetime import UTC, datetime

import pytest

from ddl_airflow.core.errors import (
    AccessDenied,
    JobFailed,
    JobLost,
    SourceMissing,
    StagingError,
    SubmitFailed,
)
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import StageDataStep, StoreReference, TrainStep
from ddl_airflow.lineage.record import Run, begun_with, fixed_run, has_part
from ddl_airflow.steps.base import Site, StepContext, prepared
from ddl_airflow.steps.checkpoints import drop_published, place_of
from ddl_airflow.steps.stage import StageData
from ddl_airflow.steps.train import Train
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.snapshots import Snapshots
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

# As with keras.callbacks.ModelCheckpoint("model.keras"): every checkpoint has the same name; and a
# log beside them is newer. A rank that tears is killed while it writes the next one.
TEARING = """
    import os, signal, sys, time, zipfile
    folder, told = os.environ["CHECKPOINT_DIR"], sys.argv[1]
    name = "model.KIND"
    path, log = f"{folder}/{name}", f"{folder}/history.csv"

    def write(step):
        new = f"{os.environ['LOG_DIR']}/{name}"  # never saved before it is whole
        if "KIND" == "h5":
            import h5py, numpy
            with h5py.File(new, "w") as file:
                file["step"] = step
                file["weights"] = numpy.zeros(200000, "u1")
        else:
            with zipfile.ZipFile(new, "w") as file:
                file.writestr("step", str(step))
                file.writestr("weights", bytes(200000))
        os.replace(new, path)

    def read():
        if "KIND" == "h5":
            import h5py
            with h5py.File(path, "r") as file:
                return int(file["step"][()])
        with zipfile.ZipFile(path) as file:
            return int(file.read("step"))

    step = read() if os.path.exists(path) else 0
    print("goes on from", step, flush=True)
    write(step + 1)
    while not os.path.exists(told):
        time.sleep(0.05)
    end = open(told).read()
    if end == "tears":
        os.truncate(path, 100000)
        with open(log, "a") as file:
            file.write(str(step))
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(end != "ends")
"""


@pytest.fixture(scope="module")
def ceph(tmp_path_factory):
    if reason := available():
        pytest.skip(reason)
    with CephObjectStore(tmp_path_factory.mktemp("ceph") / "store") as running:
        yield running, running.add_user("owner")


class Training:
    """One run, on a worker with a disk of its own."""

    def __init__(self, home, store, trainer=None):
        self.home, self.store, self.tries, self.trainer = home, store, 0, trainer
        group = trainer.gid if trainer else None
        training_id = f"{DAG}-{uuid.uuid4().hex}"
        self.layout = RunLayout(home / "worker", DAG, training_id, ranks_group=group)
        self.told = home / "told"
        for name in ("code", "data", "worker"):
            (home / name).mkdir()
        (home / "data" / "a").write_text("of a")
        (home / "code" / "train.py").write_text(textwrap.dedent(SCRIPT))
        self.train = None

    def context(self, **more):
        user = {"ranks_user": self.trainer.name} if self.trainer else {}
        python = self.trainer.python if self.trainer else sys.executable
        site = Site(python=python, open_store=self.opened, secret=lambda _: "", **user)
        return StepContext(self.layout, RUN, LOG, site, try_number=self.tries, **more)

    def opened(self, reference):
        return self.store if reference.uri == "results:" else FolderStore(self.home / "data")

    def stage(self, *, cleared=True):
        data = StoreReference((self.home / "data").as_uri())
        step = StageDataStep(dataset=data, code=self.home / "code", commands=["python train.py x"])
        with prepared(self.layout, staged=False, experiment="", scripts=False):
            StageData(step, self.context(cleared=cleared)).run()

    def tell(self, ends):
        """The try that runs how to end, as a whole: it may look at any moment."""
        written = self.told.with_suffix(".new")
        written.write_text(ends)
        written.replace(self.told)

    def run(self, ends="", tries=2, **more):
        """A try of train, which is told at once how to end; or is left running."""
        self.tries += 1
        self.told.unlink(missing_ok=True)
        if ends:
            self.tell(ends)
        asked = {"command": f"python train.py {self.told}", "distribution": "independent"}
        asked |= {"upload_every_s": 0.2, "results": StoreReference("results:")} | more
        self.train = Train(TrainStep(**asked), self.context(tries=tries))
        with prepared(self.layout, staged=True, experiment="", scripts=True):
            return self.train.run()

    def snapshots(self):
        try:
            keys = [obj.key for obj in place_of(self.store, self.layout.training_id).list()]
        except SourceMissing:  # a folder, which goes with what is in it
            return []
        return [key for key in keys if key.startswith("0") and key.endswith(".json")]

    def has_saved(self, caplog):
        """Not so what a try of another test says late, whose store was slow."""
        return re.search(f"checkpoints saved: .*{self.layout.training_id}", caplog.text)

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
    until(lambda: training.has_saved(caplog) or not thread.is_alive(), 60)
    assert not raised
    training.tell("fails")
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


@pytest.fixture(params=["keras", "h5", "keras of another user"])
def tearing(request, tmp_path):
    kind, *user = request.param.split(" of ")
    trainer = request.getfixturevalue("trainer") if user else None
    home = trainer.place / "home" if trainer else tmp_path / "home"
    home.mkdir(mode=0o755)
    made = Training(home, FolderStore(tmp_path / "results"), trainer)
    script = textwrap.dedent(TEARING).replace("KIND", kind)
    (home / "code" / "train.py").write_text(script)
    made.stage(cleared=False)
    return made


def tear(training, caplog, **more):
    """A try that is killed while it writes, after a whole checkpoint was saved."""
    caplog.clear()
    thread, raised = in_background(lambda: training.run(**more))
    until(lambda: training.has_saved(caplog) or not thread.is_alive(), 60)
    training.tell("tears")
    thread.join()
    assert type(raised[0]) is JobFailed


def test_a_checkpoint_that_a_killed_rank_left_half_written_hides_none_in_the_store(tearing, caplog):
    caplog.set_level("INFO")
    tear(tearing, caplog)
    tear(tearing, caplog)
    assert tearing.said().endswith("goes on from 1\n")
    assert "of try 1, saved" in caplog.text and "damaged here: " in caplog.text
    assert "checkpoints.upload_every: checkpoints/model." in caplog.text


def test_a_half_written_one_is_nothing_to_go_on_from_where_the_store_does_not_answer(
    tearing, caplog, monkeypatch
):
    caplog.set_level("INFO")
    tear(tearing, caplog)
    with monkeypatch.context() as patch:
        for name in ("read_version", "list"):
            patch.setattr(FolderStore, name, refuse)
        for _ in range(2):
            with pytest.raises(StagingError, match="no route"):
                tearing.run("ends")
    tearing.run("ends")
    assert tearing.said().endswith("goes on from 1\n")


def refuse(*_):
    raise StagingError("no route to host.")


@pytest.mark.parametrize("named", [True, False])
def test_a_damaged_one_elsewhere_ends_no_try_that_has_a_whole_one(
    tmp_path, caplog, monkeypatch, named
):
    """In EXPERIMENT_DIR, or of another name, where the store does not answer."""
    training = Training(tmp_path, FolderStore(tmp_path / "results"))
    training.stage(cleared=False)
    with zipfile.ZipFile(training.layout.checkpoints / "model.keras", "w") as archive:
        archive.writestr("model.weights.h5", bytes(1000))
    where = training.layout.checkpoints if named else training.layout.experiment
    where.mkdir(parents=True, exist_ok=True)
    (where / "interrupted.keras").write_bytes(b"PK\3\4")
    for name in ("read_version", "list"):
        monkeypatch.setattr(FolderStore, name, refuse)
    training.tries = 1  # the first one removes what is in the store
    for _ in range(2):
        with pytest.raises(JobFailed):
            training.run("fails")
    assert "goes on from the checkpoints that are here: no route to host." in caplog.text
    aside = training.layout.damaged / ("checkpoints" if named else "experiment")
    assert (aside / "interrupted.keras").exists()


def test_what_was_brought_is_gone_on_from_where_the_store_breaks_off_then(
    tmp_path, caplog, monkeypatch
):
    """Of two names the newest snapshot has one whole, and the one before does not come."""
    training = Training(tmp_path, FolderStore(tmp_path / "results"))
    training.stage(cleared=False)
    layout = training.layout
    place = place_of(training.store, layout.training_id)
    facts = {"dataset": fixed_run(layout)["made_of"]["dataset"]}
    saving = Snapshots(place, layout.result, layout.workspace, facts, 1, now=time.time)
    for step in range(2):
        for name in ("model.keras", "best.keras"):
            with zipfile.ZipFile(layout.checkpoints / name, "w") as archive:
                archive.writestr("model.weights.h5", bytes([step]) * 1000)
        if step:
            os.truncate(layout.checkpoints / "best.keras", 100)
        saving.save()
    shutil.rmtree(layout.workspace)
    training.stage()
    read = FolderStore.read_version

    def breaks_off(self, key):
        return refuse() if key == "00000001.json" else read(self, key)

    monkeypatch.setattr(FolderStore, "read_version", breaks_off)
    training.tries = 1
    with pytest.raises(JobFailed):
        training.run("fails", upload_every_s=60.0)
    assert (layout.checkpoints / "model.keras").exists()
    assert "goes on from the checkpoints that are here: no route to host." in caplog.text


def test_it_is_known_what_made_the_checkpoints_that_came_to_another_worker(tmp_path):
    """Each worker is lost with what it knew, and the script is mended before the next one."""
    training = Training(tmp_path, FolderStore(tmp_path / "results"))
    script, codes = tmp_path / "code" / "train.py", []
    for number in range(4):
        if number:
            shutil.rmtree(training.layout.workspace)
        if number < 3:  # the last one goes on with the same scripts
            script.write_text(textwrap.dedent(SCRIPT) + f"# {number}\n")
        training.stage(cleared=number > 0)
        codes.append(fixed_run(training.layout)["made_of"]["code"])
        with pytest.raises(JobFailed):
            training.run("fails", upload_every_s=60.0)
        assert training.said() == f"goes on from {number}\n"
        earlier = [one["code"] for one in begun_with(training.layout)["went_on_from"]]
        assert earlier == codes[: min(number, 2)]


def test_it_is_said_when_the_last_checkpoints_took_too_long(training, caplog, monkeypatch):
    training.stage(cleared=False)
    ended, put = threading.Event(), type(training.store).put_bytes

    def slow(*words):
        if not words[0].uri.endswith("/chunks"):
            return put(*words)
        training.tell("fails")
        assert ended.wait(within(60.0))
        return put(*words)

    monkeypatch.setattr(type(training.store), "put_bytes", slow)
    monkeypatch.setattr("ddl_airflow.steps.checkpoints._ENDS_S", 0.5)
    with pytest.raises(JobFailed):
        training.run()
    ended.set()
    assert "checkpoints.upload_every: the last checkpoints are not in the store" in caplog.text


def test_a_half_written_checkpoint_that_was_saved_gives_way_to_the_one_before(
    tearing, caplog, monkeypatch
):
    """And the one that a try went on from stays until a later one was read."""
    caplog.set_level("INFO")
    for step in (0, 1):
        tear(tearing, caplog)
        assert tearing.said() == f"goes on from {step}\n"
        shutil.rmtree(tearing.layout.workspace)
        tearing.stage()
    # Nor is it lost where nobody sees what is wrong with those that are saved then.
    with pytest.raises(JobFailed):
        tearing.run("fails")
    assert tearing.said() == "goes on from 2\n"
    monkeypatch.setattr("ddl_airflow.storage.snapshots.is_half", lambda *_: False)
    workspace = tearing.layout.workspace
    place = place_of(tearing.store, tearing.layout.training_id)
    facts = {"dataset": fixed_run(tearing.layout)["made_of"]["dataset"]}
    saving = Snapshots(place, tearing.layout.result, workspace, facts, 3, now=time.time)
    saving.restore()
    (model,) = tearing.layout.checkpoints.glob("model.*")
    for size in (100000, 90000, 80000):
        os.truncate(model, size)
        assert saving.save() is not None
    shutil.rmtree(workspace)
    tearing.stage()
    tearing.run("ends")
    assert tearing.said() == "goes on from 3\n"


def test_what_is_here_is_not_fetched(training, caplog):
    caplog.set_level("INFO")
    training.stage(cleared=False)
    with pytest.raises(JobFailed):
        training.run("fails", upload_every_s=60.0)
    assert training.snapshots() == ["00000001.json"]  # at the end of the try
    training.run("ends")
    assert training.said().endswith("goes on from 1\n") and "in the store, " not in caplog.text


def test_a_training_that_is_wanted_once_more_begins_from_its_start(training):
    training.stage(cleared=False)
    training.run("ends")
    assert has_part(training.layout, "train") and training.snapshots()
    (training.layout.damaged / "model.keras").mkdir(parents=True)
    training.run("ends", tries=1)
    assert training.said().endswith("goes on from 0\n")
    assert not training.layout.damaged.exists()
    assert (training.layout.replaced / "damaged" / "model.keras").exists()
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
