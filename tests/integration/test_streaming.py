"""Ranks train while their data come from a real Ceph object store, whatever happens meanwhile."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from ddl_airflow.launchers.processes import marked
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.store import PIECE
from tests.integration.ceph import CephObjectStore, available
from tests.integration.disk import tiny_disk
from tests.integration.faulty_proxy import FaultyProxy
from tests.limits import until, within

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
# In the order of their listing.
SIZES = {"a": 300_000, "b/large": PIECE + 3 * MIB, "c": 2 * MIB, "d": 2 * MIB, "e": 0}
pytestmark = pytest.mark.integration
MANIFEST = """\
model_definition:
  name: {name}
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: python train.py ; python after.py
    compute_configuration: {{name: cpu, nodes: 2}}
training_data_reference:
  type: s3
  connection:
    endpoint_url: ${{S3_ENDPOINT_URL}}
    access_key_id: ${{S3_ACCESS_KEY_ID}}
    secret_access_key: ${{S3_SECRET_ACCESS_KEY}}
  source: {{bucket: {bucket}}}
  stream: {stream}
  exclude: [/left out/]
training_results_reference:
  type: fs
  target: {{path: ./results}}
distribution: independent
lineage: {{prove: true}}
"""
# Tells the digest of each file, in the order in which it came, and when it has the first.
TRAIN = """\
import hashlib, json, os, sys
from ddl_ops.data import files
rank = os.environ["OMPI_COMM_WORLD_RANK"]
folder, read = os.environ["DATA_DIR"], []
for path in files():
    with open(path, "rb") as file:
        read.append([os.path.relpath(path, folder), hashlib.sha256(file.read()).hexdigest()])
    open(os.path.join(os.environ["RESULT_DIR"], f"began-{rank}"), "w").close()
with open(os.path.join(os.environ["RESULT_DIR"], f"read-{rank}"), "w") as file:
    json.dump(read, file)
"""
# After the training: a model is saved; or nobody wants one.
SAVES = """\
import os
import tensorflow as tf
class Double(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def __call__(self, x):
        return 2 * x
tf.saved_model.save(Double(), os.path.join(os.environ["RESULT_DIR"], "model"))
"""
STOPS = "raise SystemExit('that is enough')\n"


@pytest.fixture(scope="module")
def ceph(tmp_path_factory):
    if reason := available():
        pytest.skip(reason)
    with CephObjectStore(tmp_path_factory.mktemp("ceph") / "store") as running:
        yield running


@pytest.fixture(scope="module")
def keys(ceph):
    return ceph.add_user("owner")


@pytest.fixture
def store(ceph, keys):
    """A bucket of its own, with an object of each size."""
    client = s3_client(ceph.endpoint_url, *keys)
    bucket = f"test-{uuid.uuid4()}"
    client.create_bucket(Bucket=bucket)
    made = S3Store(client, bucket)
    for key, size in SIZES.items():
        made.put_bytes(key, random.Random(key).randbytes(size))
    made.put_bytes("left out/+ ü", b"by the manifest")
    yield made
    client.close()


def of_objects(method, path):
    return method == "GET" and path.count("/") > 1


class Training:
    """`ddl-airflow run` of a manifest, in a folder of its own."""

    def __init__(self, home, store, keys, endpoint_url, *, after=STOPS, stream=True):
        self.home = home
        self._name = f"t{uuid.uuid4().hex[:8]}"
        self._folder = home / self._name
        self._folder.mkdir(parents=True)
        said = {"name": self._name, "bucket": store.bucket, "stream": str(stream).lower()}
        (self._folder / "manifest.yml").write_text(MANIFEST.format(**said))
        (self._folder / "train.py").write_text(TRAIN)
        (self._folder / "after.py").write_text(after)
        here = {n: v for n, v in os.environ.items() if not n.startswith(("OMPI_", "DDL_"))}
        self._environ = here | {
            "PYTHONPATH": f"{ROOT}:{ROOT}/ops_lib/python",
            "S3_ENDPOINT_URL": endpoint_url,
            "S3_ACCESS_KEY_ID": keys[0],
            "S3_SECRET_ACCESS_KEY": keys[1],
        }

    def start(self, *words):
        """Begins; `words` follow the manifest."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ddl_airflow", "run", f"{self._name}/manifest.yml", *words],
            cwd=self.home,
            env=self._environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self

    def require_trained(self, limit_s=120):
        """Waits for its end, after the training."""
        _, said = self.end(limit_s)
        assert "that is enough" in said or self.outcome()["step"] == "train", said
        assert "train failed" not in said, said

    def end(self, limit_s=120):
        """Its exit code, and what it has said."""
        said, _ = self.process.communicate(timeout=within(limit_s))
        return self.process.returncode, said

    @property
    def run(self):
        (found,) = (self.home / ".ddl-run" / "runs" / self._name).iterdir()
        return found

    def wait_until_ranks_read(self):
        """Until each has had a first file."""

        def begun():
            return self.process.poll() is not None or (
                len(list(self.home.glob(f".ddl-run/runs/{self._name}/*/result/began-*"))) == 2
            )

        until(begun, 60)
        assert self.process.poll() is None, self.end()

    def read(self):
        """What each rank has read."""
        return [json.loads((self.run / "result" / f"read-{rank}").read_text()) for rank in (0, 1)]

    def outcome(self):
        return json.loads((self.run / "airflow" / "record.json").read_text())["outcome"]

    def rank_processes(self):
        """Those of all tries."""
        tries = (self.run / "ddl").glob("try-*")
        return [pid for one in tries for pid in marked("DDL_RECORD_DIR", str(one))]


def contents():
    """As the ranks tell it, in the order of the listing."""

    def digest(key):
        return hashlib.sha256(random.Random(key).randbytes(SIZES[key])).hexdigest()

    return [[key, digest(key)] for key in SIZES]


def test_a_model_of_data_that_came_meanwhile_is_published_as_of_staged_data(
    ceph, keys, store, tmp_path
):
    with FaultyProxy(ceph.endpoint_url, {}, of_objects, bytes_per_s=4 * MIB) as proxy:
        training = Training(tmp_path, store, keys, proxy.endpoint_url, after=SAVES)
        training.start()
        training.wait_until_ranks_read()
        assert not (training.run / "data" / "b" / "large").exists()
        code, said = training.end(240)
    assert code == 0, said
    assert training.read() == [contents()] * 2
    (marker,) = (tmp_path / ".ddl-run" / "results").glob("*/*/_SUCCESS")
    lineage = json.loads(marker.with_name("lineage.json").read_text())
    staged = Training(tmp_path / "staged", store, keys, ceph.endpoint_url, stream=False)
    staged.start().require_trained()
    told: dict[str, object] = {}
    for step in ("stage_data", "train"):
        part = json.loads((staged.run / "airflow" / "lineage" / f"{step}.json").read_text())
        told |= part.get("dataset", {})
    assert lineage["dataset"] == told
    assert [(o["key"], o["sha256"]) for o in lineage["dataset"]["listing"]] == [
        tuple(one) for one in contents()
    ]
    # As for the digest of the manifest, whether its data come is no part of the training.
    assert "stream" not in lineage["manifest"]["said"]["training_data_reference"]


def test_a_try_that_is_killed_at_any_moment_is_gone_on_with(ceph, keys, store, tmp_path):
    """Its ranks end with it, and nothing that came whole comes again."""
    chance = random.Random(5)
    with FaultyProxy(ceph.endpoint_url, {}, of_objects, bytes_per_s=4 * MIB) as proxy:
        training = Training(tmp_path, store, keys, proxy.endpoint_url)
        training.start()
        whole, fetched = set(), 0
        for number in range(2):
            training.wait_until_ranks_read()
            time.sleep(chance.uniform(0.0, 1.5))
            os.kill(training.process.pid, signal.SIGKILL)
            training.end()
            until(lambda: not training.rank_processes(), 30)
            asked = [one.path.split("/", 2)[2] for one in proxy.asked[fetched:]]
            assert whole.isdisjoint(asked), (number, asked)
            fetched = len(proxy.asked)
            whole = {
                str(path.relative_to(training.run / "data"))
                for path in (training.run / "data").rglob("*")
                if path.is_file() and path.name[0] != "."
            }
            assert whole  # the first, at least
            for began in (training.run / "result").glob("began-*"):
                began.unlink()
            training.start("--step", "train")
        training.require_trained()
        asked = [one.path.split("/", 2)[2] for one in proxy.asked[fetched:]]
        assert whole.isdisjoint(asked)
    assert training.read() == [contents()] * 2
    assert list((tmp_path / ".ddl-run" / "cache").rglob("*.part")) == []


def test_two_trainings_at_once_fetch_the_data_once(ceph, keys, store, tmp_path):
    with FaultyProxy(ceph.endpoint_url, {}, of_objects, bytes_per_s=8 * MIB) as proxy:
        both = [Training(tmp_path, store, keys, proxy.endpoint_url) for _ in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.require_trained()
        ranges = [(one.path, one.range) for one in proxy.asked]
    assert len(ranges) == len(set(ranges)) == len(SIZES) + 1  # the large one in two parts
    assert [one.read() for one in both] == [[contents()] * 2] * 2


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("expired", "AccessDenied", "ExpiredToken"),
        ("reset", "StagingError", "6 tries"),
        ("changed", "TransferCorrupt", "fetched twice"),
    ],
)
def test_what_the_store_does_wrong_for_good_ends_the_training_and_is_named(
    ceph, keys, store, tmp_path, fault, error, said
):
    """All but the first file, which the ranks have by then."""

    def of_others(method, path):
        return of_objects(method, path) and not path.endswith("/a")

    with FaultyProxy(ceph.endpoint_url, {None: fault}, of_others) as proxy:
        training = Training(tmp_path, store, keys, proxy.endpoint_url)
        began = time.monotonic()
        code, log = training.start().end(180)
        took = time.monotonic() - began
    assert code == 1, log
    outcome = training.outcome()
    assert (outcome["state"], outcome["step"], outcome["error"]) == ("failed", "train", error), log
    assert said in outcome["message"] and f"s3://{store.bucket}/" in outcome["message"]
    assert took < within(120)
    assert training.rank_processes() == []
    assert not (training.run / "data" / ".complete").exists()
    assert not list((training.run / "result").glob("read-*"))


def test_an_object_that_is_replaced_meanwhile_ends_the_training(ceph, keys, store, tmp_path):
    first = threading.Lock()

    def replaced(method, path):
        if of_objects(method, path) and path.endswith("/d") and first.acquire(blocking=False):
            store.put_bytes("d", b"another")
        return of_objects(method, path)

    with FaultyProxy(ceph.endpoint_url, {}, replaced, bytes_per_s=8 * MIB) as proxy:
        training = Training(tmp_path, store, keys, proxy.endpoint_url)
        code, log = training.start().end()
    assert code == 1, log
    outcome = training.outcome()
    assert outcome["error"] == "TransferCorrupt"
    assert "d changed, or went, after stage_data had listed" in outcome["message"]
    assert training.rank_processes() == []


def test_a_disk_that_gets_full_meanwhile_ends_the_training(ceph, keys, store, tmp_path):
    with (
        tiny_disk(tmp_path / "disk", 48 * MIB) as home,
        FaultyProxy(ceph.endpoint_url, {}, of_objects, bytes_per_s=2 * MIB) as proxy,
    ):
        training = Training(home, store, keys, proxy.endpoint_url)
        training.start()
        training.wait_until_ranks_read()
        full = home / "of-somebody-else"
        with pytest.raises(OSError, match="No space left"), open(full, "wb", 0) as file:
            while True:
                file.write(bytes(4096))
        code, log = training.end()
        assert code == 1 and "No space left on device" in log.splitlines()[-1], log
        assert training.rank_processes() == []
        full.unlink()
        training.start("--step", "train").require_trained()
        assert training.read() == [contents()] * 2


def test_ctrl_c_ends_ranks_and_data(ceph, keys, store, tmp_path):
    with FaultyProxy(ceph.endpoint_url, {}, of_objects, bytes_per_s=2 * MIB) as proxy:
        training = Training(tmp_path, store, keys, proxy.endpoint_url)
        training.start()
        training.wait_until_ranks_read()
        training.process.send_signal(signal.SIGINT)
        code, log = training.end(60)
        proxy.wait()
    assert code == -signal.SIGINT, log
    assert training.outcome()["state"] == "cancelled"
    assert training.rank_processes() == [] and "Traceback" not in log
