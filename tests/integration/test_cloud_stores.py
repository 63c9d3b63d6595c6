"""Data and models in Azure Blob Storage and Google Cloud Storage, by emulators that others make."""

from __future__ import annotations

import gc
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
import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import (
    AccessDenied,
    ConnectionInvalid,
    FileChanged,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.storage import azure, cache, cloud, download, gcs, lanes, retries
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.connections import open_by_connection
from ddl_airflow.storage.publication import missing_from, publications, publish
from ddl_airflow.storage.staging import list_dataset, stage
from ddl_airflow.storage.store import Left
from tests.integration import clouds
from tests.integration.faulty_proxy import FaultyProxy
from tests.limits import until, within

ROOT = Path(__file__).parents[2]
MIB = 1024 * 1024
PART = MIB  # of this process; who is killed has the program's own
SIZES = {"empty": 0, "small": 300_000, "large": 2 * PART + 100_000}
ODD = ["a b", "a+b", "a%20b", "ü 漢字/+&%41?#.bin", "nested/'\"<>", "~*()!", "=;:@,$", ".hidden"]
pytestmark = pytest.mark.integration


@dataclass
class Cloud:
    """An emulator.

    Attributes:
        scheme: of its URIs.
        endpoint: its address.
        connection: the fields of one that opens it, but for the endpoint.
        conditions: whether it heeds those on which is written.
    """

    scheme: str
    endpoint: str
    connection: dict
    conditions: bool = True
    clients: list = field(default_factory=list)

    def opened(self, uri, endpoint=""):
        store = open_by_connection(uri, AirflowConnection("my_cloud", **self.at(endpoint)))
        self.clients.append(store._client if self.scheme == "abfs" else store._client.library)
        return store

    def close(self):
        while self.clients:
            self.clients.pop().close()

    def at(self, endpoint=""):
        """The connection's fields, for a proxy's address too."""
        here = endpoint or self.endpoint
        if self.scheme == "abfs":
            path = self.endpoint.split("/", 3)[3]
            return {**self.connection, "host": here if endpoint == "" else f"{here}/{path}"}
        return {**self.connection, "extra": {**self.connection["extra"], "api_endpoint": here}}

    def make(self, bucket):
        library = self.opened(f"{self.scheme}://{bucket}")._client
        if self.scheme == "abfs":
            library.create_container(bucket)
        else:
            library.library.create_bucket(bucket)


@pytest.fixture(scope="module", params=["azure", "gcs"])
def cloud_of(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "azure":
        if reason := clouds.azurite_missing():
            pytest.skip(reason)
        with clouds.azurite(folder) as (url, key):
            said = {"conn_type": "wasb", "login": clouds.ACCOUNT, "password": key}
            yield Cloud("abfs", url, said)
    else:
        with clouds.google(folder) as url:
            said = {"conn_type": "google_cloud_platform", "extra": {"is_anonymous": True}}
            yield Cloud("gs", url, said, conditions=clouds.GOOGLE in os.environ)


@pytest.fixture(scope="module")
def bucket(cloud_of):
    name = f"test-{uuid.uuid4()}"
    cloud_of.make(name)
    yield name
    cloud_of.close()


@pytest.fixture
def store(cloud_of, bucket):
    yield cloud_of.opened(f"{cloud_of.scheme}://{bucket}/{uuid.uuid4().hex}/a prefix")
    cloud_of.close()
    # Microsoft's library leaves the connection of an answer that breaks off to the collector.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def near(cloud_of, store):
    """near(proxy) -> the store through a proxy."""
    return lambda proxy: cloud_of.opened(store.uri, proxy.endpoint_url)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What the program waits for is not as long here, and its parts not as large."""
    for module in (azure, cache, cloud, download, lanes):
        monkeypatch.setattr(module, "PIECE", PART)
    monkeypatch.setattr(gcs, "_CHUNK", PART)
    soon = {"initial_backoff": 0, "increment_base": 0, "random_jitter_range": 0}
    monkeypatch.setattr(azure, "_TRIES", azure._TRIES | soon)
    for module in (azure, gcs):
        monkeypatch.setattr(module, "_PAGE", 10)
        monkeypatch.setattr(module, "TIMEOUT", (5.0, 2.0))
    monkeypatch.setattr(retries, "_FIRST_WAIT_S", 0.01)


def content_of(name, size):
    return random.Random(name).randbytes(size)


def made(folder, content, name=""):
    path = folder / (name or uuid.uuid4().hex)
    path.write_bytes(content)
    return path


def put(store, key, content, folder, left=()):
    digest = hashlib.sha256(content).hexdigest()
    return store.put(made(folder, content), key, digest, lambda nbytes: None, left)


def of_objects(method, path):
    return method == "GET" and path.endswith("/f")


def of_writes(method, path):
    return method in ("PUT", "POST")


def require_published(store, done, contents):
    target = store.at(done.uri.removeprefix(f"{store.uri}/"))
    assert missing_from(target) == []
    for obj in target.list():
        if obj.key in contents:
            read = []
            assert target.read(obj, read.append) == "md5"
            assert b"".join(read) == contents[obj.key]
    assert {file.key for file in done.files} == set(contents)


def test_odd_keys_and_all_sizes_go_up_and_come_down(store, tmp_path):
    contents = {name: content_of(name, size) for name, size in SIZES.items()}
    contents |= {name: name.encode() for name in ODD}
    files = {key: made(tmp_path, content) for key, content in contents.items()}
    done = publish(files, store, "t")
    require_published(store, done, contents)
    target = store.at(done.uri.removeprefix(f"{store.uri}/"))
    for again, fetched in ((False, len(contents) + 1), (True, 0)):
        staged = stage(target, Cache(tmp_path / "cache"), tmp_path / f"data{again}")
        assert staged.fetched == fetched
        for key, content in contents.items():
            assert (tmp_path / f"data{again}" / key).read_bytes() == content
    # What is there is not sent again.
    assert publish(files, store, "t").uri == done.uri
    assert len(publications(store.at("t"))) == 1


def test_a_prefix_is_a_folder_and_a_listing_has_pages(store, cloud_of, tmp_path):
    for key in ("x", "y/x"):
        store.put_bytes(key, b"1")
    beside = cloud_of.opened(f"{store.uri}2")
    beside.put_bytes("other", b"2")
    assert [obj.key for obj in store.list()] == ["x", "y/x"]
    assert [obj.key for obj in store.at("y").list()] == ["x"]
    assert store.at("nothing").list() == store.at("nothing").names() == []
    assert store.names() == ["x", "y"] and store.at("y").names() == ["x"]
    with pytest.raises(SourceMissing, match="nothing"):
        list_dataset(store.at("nothing"))
    pages = store.at("pages")
    many = {f"{number:05}" for number in range(25)}
    for key in many:
        pages.put_bytes(key, b"")
    assert [obj.key for obj in pages.list()] == sorted(many)


def test_small_objects_are_replaced_read_and_removed(store):
    assert store.read_version("pointer") is None
    assert not store.exists("pointer")
    one = store.put_bytes("pointer", b"one")
    assert [one] == store.list() and store.exists("pointer") and not store.exists("pointe")
    body, version = store.read_version("pointer")
    assert body == b"one" and version
    assert store.put_if("pointer", b"two", version)
    assert store.read_bytes("pointer") == b"two"
    store.check_access(store.list()[0])
    store.delete(["pointer", "never"])
    assert store.list() == []
    with pytest.raises(SourceMissing, match="pointer at http"):
        store.read_bytes("pointer")


def test_conditions_go_with_what_is_written_on_them(store, cloud_of, near):
    with FaultyProxy(cloud_of.endpoint, {}, of_writes) as proxy:
        theirs = near(proxy)
        assert theirs.put_if("pointer", b"one", None)
        _, version = theirs.read_version("pointer")
        assert theirs.put_if("pointer", b"two", version)
        asked = [one.query for one in proxy.asked]
    if cloud_of.scheme == "gs":
        assert "ifGenerationMatch=0" in asked[0]
        assert f"ifGenerationMatch={version}" in asked[1]
    if not cloud_of.conditions:
        pytest.skip(f"this emulator heeds no conditions: give another one as {clouds.GOOGLE}")
    assert not store.put_if("pointer", b"three", version)
    assert not store.put_if("pointer", b"three", None)
    assert store.read_bytes("pointer") == b"two"
    store.delete(["pointer"])
    assert not store.put_if("pointer", b"three", version)
    assert store.put_if("pointer", b"three", None)


def test_of_many_who_change_a_pointer_one_at_a_time_does(store, cloud_of):
    if not cloud_of.conditions:
        pytest.skip(f"this emulator heeds no conditions: give another one as {clouds.GOOGLE}")
    store.put_bytes("count", b"0")

    def add():
        for _ in range(10):
            while True:
                body, version = store.read_version("count")
                if store.put_if("count", b"%d" % (int(body) + 1), version):
                    break

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read_bytes("count") == b"40"


def test_a_missing_bucket_is_said_by_each_call(cloud_of, tmp_path):
    store = cloud_of.opened(f"{cloud_of.scheme}://no-such-bucket-here/a")
    calls = [store.list, partial(store.read_bytes, "f"), partial(store.read_version, "f")]
    calls += [partial(store.put_bytes, "f", b"1"), partial(put, store, "f", b"1", tmp_path)]
    calls += [partial(store.exists, "f")]
    for call in calls:
        with pytest.raises(SourceMissing, match=f"{cloud_of.scheme}://no-such-bucket-here/a"):
            call()


def test_an_endpoint_that_nobody_serves_is_worth_another_try(cloud_of, monkeypatch):
    monkeypatch.setattr(gcs, "_LARGEST_WAIT_S", 0.5)
    store = cloud_of.opened(f"{cloud_of.scheme}://some-bucket", "http://127.0.0.1:9")
    with pytest.raises(StagingError, match="some-bucket at http://127.0.0.1:9.*reaches") as caught:
        store.list()
    assert caught.value.retryable


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("fault", ["500", "reset", "cut", "half", "changed", "stall 100"])
def test_a_fault_at_any_read_costs_a_try_and_no_byte(cloud_of, store, near, tmp_path, fault, size):
    content = content_of(size, SIZES[size])
    put(store, "f", content, tmp_path)
    parts = -(-len(content) // PART)
    for index in range(1 if fault.startswith("stall") else parts):
        with FaultyProxy(cloud_of.endpoint, {index: fault}, of_objects) as proxy:
            began = time.monotonic()
            stage(near(proxy), Cache(tmp_path / str(index)), tmp_path / f"data{index}")
            assert time.monotonic() - began < within(10)
            assert proxy.placed == 1
            assert len(proxy.asked) > parts
        assert (tmp_path / f"data{index}" / "f").read_bytes() == content


def test_what_came_of_a_part_is_not_fetched_again(cloud_of, store, near, tmp_path):
    if cloud_of.scheme == "abfs":
        pytest.skip("its library gives away only whole answers, of a few MiB each")
    content = content_of("f", PART)
    put(store, "f", content, tmp_path)
    with FaultyProxy(cloud_of.endpoint, {0: "cut"}, of_objects) as proxy:
        stage(near(proxy), Cache(tmp_path / "cache"), tmp_path / "data")
        first, second = proxy.asked
    assert first.range == f"bytes=0-{PART - 1}"
    assert PART // 4 < int(second.range.removeprefix("bytes=").partition("-")[0]) < PART
    assert (tmp_path / "data/f").read_bytes() == content


def test_who_answers_in_place_of_the_service_is_found_before_training(
    cloud_of, store, near, tmp_path
):
    put(store, "f", content_of("f", SIZES["small"]), tmp_path)
    (obj,) = store.list()
    said = f"{store.uri}/f at http.*(Content-Range|more came)"
    with (
        FaultyProxy(cloud_of.endpoint, {None: "error as success"}, of_objects) as proxy,
        pytest.raises(StagingError, match=said),
    ):
        near(proxy).check_access(obj)


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("500", StagingError, r"\(500\).*0 of .* bytes came from byte \d.*6 tries"),
        ("reset", StagingError, "bytes came from byte"),
        ("changed", TransferCorrupt, "md5 is .* not .* fetched twice"),
        ("error as success", StagingError, "too early|Content-Range.*answer nothing"),
        ("403", AccessDenied, r"\(403\).*rights"),
    ],
)
def test_a_fault_that_stays_is_named_with_its_object(
    cloud_of, store, near, tmp_path, fault, error, said
):
    put(store, "f", content_of("small", SIZES["small"]), tmp_path)
    with FaultyProxy(cloud_of.endpoint, {None: fault}, of_objects) as proxy:
        with pytest.raises(error, match=f"{store.uri}/f at http.*{said}"):
            stage(near(proxy), Cache(tmp_path / "cache"), tmp_path / "data")
        if fault == "403":
            assert len(proxy.asked) == 1
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "fault",
    ["500", "sent reset", "sent cut", "sent changed", "done 500", "done reset", "done cut"],
)
def test_a_fault_at_any_write_costs_a_try_and_no_byte(cloud_of, store, near, tmp_path, fault, size):
    if fault == "sent changed" and not SIZES[size]:
        pytest.skip("nothing of it that could change")
    content = content_of(size, SIZES[size])
    files = {"f": made(tmp_path, content)}
    with FaultyProxy(cloud_of.endpoint, {}, of_writes) as proxy:
        publish(files, near(proxy), "none")
        writes = len(proxy.asked)
    for index in range(writes):
        with FaultyProxy(cloud_of.endpoint, {index: fault}, of_writes) as proxy:
            done = publish(files, near(proxy), f"t{index}")
            # A query of how much came of it is none of the writes that were counted.
            # And a block that came though nobody heard of it is not sent again.
            assert proxy.placed == 1
            # Half a head that says 200 may be an answer.
            again = fault != "done cut"
            assert writes + again <= len(proxy.asked) <= writes + 5
        require_published(store, done, {"f": content})
        assert len(publications(store.at(f"t{index}"))) == 1


@pytest.mark.parametrize(
    "fault",
    ["500", "sent reset", "sent cut", "sent changed", "done 500", "done reset", "done cut"],
)
def test_a_fault_while_a_pointer_is_changed_costs_a_try_and_no_change(cloud_of, store, near, fault):
    version = None
    for body in (b"one", b"two"):
        with FaultyProxy(cloud_of.endpoint, {0: fault}, of_writes) as proxy:
            assert near(proxy).put_if("pointer", body, version)
            assert proxy.placed == 1
        found, version = store.read_version("pointer")
        assert found == body


def test_a_line_that_damages_all_is_told_and_nothing_is_stored(cloud_of, store, near, tmp_path):
    files = {"f": made(tmp_path, content_of("small", SIZES["small"]))}
    refused = pytest.raises(TransferCorrupt, match="/f at http.*(match|Md5Mismatch|validation)")
    with FaultyProxy(cloud_of.endpoint, {None: "sent changed"}, of_writes) as proxy, refused:
        publish(files, near(proxy), "t")
    assert store.list() == []


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_file_that_is_another_one_by_now_is_not_stored(store, tmp_path, size):
    content = content_of(size, SIZES[size])
    path = made(tmp_path, content[:-5] + b"other")
    with pytest.raises(FileChanged, match=f"{path} changed while it was uploaded"):
        store.put(path, "f", hashlib.sha256(content).hexdigest(), lambda nbytes: None)
    path.write_bytes(content[:-5])
    with pytest.raises(FileChanged, match=f"{path} changed while it was uploaded"):
        store.put(path, "f", hashlib.sha256(content).hexdigest(), lambda nbytes: None)
    assert store.list() == []


def test_what_the_store_has_is_copied_there(cloud_of, store, near, tmp_path):
    content = content_of("large", SIZES["large"])
    there = put(store, "old/f", content, tmp_path)
    other = put(store, "older/f", content[::-1], tmp_path)
    with FaultyProxy(cloud_of.endpoint, {}, of_writes) as proxy:
        theirs = near(proxy)
        left = [Left(theirs, other), Left(theirs, there)]
        assert put(theirs, "new/f", content, tmp_path, left) in store.list()
        assert sum(one.took for one in proxy.asked) < 10_000
        again = put(theirs, "newer/f", content[1:], tmp_path, left)
        if clouds.GOOGLE not in os.environ:  # which may send the client elsewhere with the bytes
            assert sum(one.took for one in proxy.asked) > len(content) - 10
    assert again in store.list()


def test_an_object_that_is_replaced_while_it_comes_is_not_mixed(cloud_of, store, near, tmp_path):
    contents = [bytes([number]) * (3 * PART) for number in range(2)]
    put(store, "f", contents[0], tmp_path)
    lock, count = threading.Lock(), []

    def replaced(method, path):
        if is_one := of_objects(method, path):
            with lock:
                count.append(path)
                if len(count) == 2:
                    put(store, "f", contents[1], tmp_path)
        return is_one

    with FaultyProxy(cloud_of.endpoint, {}, replaced) as proxy:
        theirs = near(proxy)
        with pytest.raises(TransferCorrupt, match="f at http.*fetched twice"):
            stage(theirs, Cache(tmp_path / "cache"), tmp_path / "data")
        stage(theirs, Cache(tmp_path / "cache"), tmp_path / "data")
    assert (tmp_path / "data" / "f").read_bytes() == contents[1]


def test_objects_of_other_programs_are_held_to_what_there_is(cloud_of, store, tmp_path):
    """Without an MD5: blocks that were put together, objects that were composed."""
    content, name = content_of("other", SIZES["large"]), store._name("f")
    if cloud_of.scheme == "abfs":
        from azure.storage.blob import BlobBlock

        blob = store._blob(name)
        blob.stage_block("1", content)
        blob.commit_block_list([BlobBlock("1")])
        checked = ["size"]
    elif cloud_of.conditions:
        whole = [store._bucket.blob(f"{name}-{number}") for number in range(2)]
        for number, blob in enumerate(whole):
            blob.upload_from_string(content[number * PART : [PART, None][number]])
        store._bucket.blob(name).compose(whole)
        for blob in whole:
            blob.delete()
        checked = ["crc32c", "md5"]  # Google's own test bench has both
    else:
        pytest.skip(f"this emulator composes nothing: give another one as {clouds.GOOGLE}")
    (obj,) = store.list()
    staged = stage(store, Cache(tmp_path / "cache"), tmp_path / "data")
    assert (tmp_path / "data" / "f").read_bytes() == content
    assert [file.checked in checked for file in staged.files] == [True]
    # Azure's own ETag is asked for, so what was replaced is not read as what was listed.
    put(store, "f", content[::-1], tmp_path)
    with pytest.raises(TransferCorrupt, match="f at http"):
        store.read(obj, lambda chunk: None)


STAGE_ALONE = """
import json, sys
from pathlib import Path
from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.connections import open_by_connection
from ddl_airflow.storage.staging import stage
uri, connection, cache, destination = sys.argv[1:]
store = open_by_connection(uri, AirflowConnection("c", **json.loads(connection)))
stage(store, Cache(cache), Path(destination))
"""


def test_what_has_a_crc32c_alone_is_held_to_it(cloud_of, store, tmp_path):
    if cloud_of.scheme != "gs":
        pytest.skip("Azure has none")
    import google_crc32c

    content = content_of("composed", SIZES["large"])
    put(store, "f", content, tmp_path)
    (listed,) = store.list()
    value = google_crc32c.value(content)
    for wrong in (0, 1):
        obj = replace(listed, etag=f"crc32c-{value ^ wrong:08x}")
        part = tmp_path / f"f{wrong}.part"
        if wrong:
            with pytest.raises(TransferCorrupt, match="crc32c is .* fetched twice"):
                store.get(obj, part, lambda nbytes: None)
        else:
            assert store.get(obj, part, lambda nbytes: None).checked == "crc32c"
            assert part.read_bytes() == content


def test_a_stager_that_is_killed_fetches_no_finished_part_again(cloud_of, store, near, tmp_path):
    piece = 16 * MIB
    content = b"".join(random.Random(n).randbytes(piece) for n in range(6))
    put(store, "f", content, tmp_path)
    with FaultyProxy(cloud_of.endpoint, {}, of_objects, bytes_per_s=25 * MIB) as proxy:
        words = [store.uri, json.dumps(cloud_of.at(proxy.endpoint_url))]
        words += [str(tmp_path / "cache"), str(tmp_path / "data")]
        command = [sys.executable, "-c", STAGE_ALONE, *words]
        running = subprocess.Popen(command, cwd=ROOT)

        def finished():
            journals = (tmp_path / "cache").glob("blobs/*/*.done.part")
            return sum(journal.read_bytes().count(b"\n") for journal in journals)

        until(lambda: finished() >= 2, 60)
        running.send_signal(signal.SIGKILL)
        running.wait()
        kept = finished()
        proxy.begin({})
        subprocess.run(command, cwd=ROOT, check=True, timeout=within(60))
        assert sum(one.sent for one in proxy.asked) <= len(content) - kept * piece
    assert (tmp_path / "data" / "f").read_bytes() == content


def test_blocks_that_are_there_are_not_sent_again(cloud_of, store, near, tmp_path):
    if cloud_of.scheme != "abfs":
        pytest.skip("Google's library sends a large object in its order, from the start")
    content = content_of("blocks", 6 * PART)
    # Its last request, which puts the blocks together, is refused for good.
    with FaultyProxy(cloud_of.endpoint, {}, of_writes) as proxy:
        faults = dict.fromkeys(range(6, 200), "403")
        proxy.begin(faults)
        with pytest.raises(AccessDenied):
            put(near(proxy), "f", content, tmp_path)
        assert store.list() == []  # no part of it shows
        proxy.begin({})
        put(near(proxy), "f", content, tmp_path)
        assert sum(one.took for one in proxy.asked) < PART
    (obj,) = store.list()
    read = []
    assert store.read(obj, read.append) == "md5" and b"".join(read) == content


def test_two_who_store_the_same_key_at_once_leave_one_of_the_two(store, tmp_path):
    contents = [content_of(name, 5 * PART) for name in ("one", "two")]
    for _ in range(3):
        threads = [
            threading.Thread(target=put, args=(store, "f", content, tmp_path))
            for content in contents
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (obj,) = store.list()
        read = []
        store.read(obj, read.append)
        assert b"".join(read) in contents


def test_a_wrong_key_is_denied_and_shows_nothing_of_it(cloud_of, bucket):
    if cloud_of.scheme != "abfs":
        pytest.skip("Google's emulator asks for no key")
    wrong = {**cloud_of.at(), "password": "cGxhbnRlZCBrZXkgdGhhdCBpcyB3cm9uZw=="}
    store = open_by_connection(f"abfs://{bucket}/a", AirflowConnection("c", **wrong))
    with pytest.raises(AccessDenied, match="AuthorizationFailure|AuthenticationFailed") as caught:
        store.list()
    assert "cGxhbnRl" not in str(caught.value)


def test_a_connection_of_another_type_is_refused(cloud_of):
    other = AirflowConnection("mine", "aws", login="AKID", password="secret")
    with pytest.raises(ConnectionInvalid, match="'mine' is of type 'aws'"):
        open_by_connection(f"{cloud_of.scheme}://bucket/a", other)


TRAIN = """
import os
from pathlib import Path
import keras
numbers = Path(os.environ["DATA_DIR"], "numbers").read_text().split()
keras.utils.set_random_seed(len(numbers))
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.save(os.path.join(os.environ["CHECKPOINT_DIR"], "model.keras"))
"""
MANIFEST = """\
model_definition:
  name: in-the-cloud
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: python train.py
    compute_configuration: {{name: cpu, nodes: 1}}
training_data_reference:
  type: {kind}
  connection: {{conn_id: my_cloud}}
  source: {{bucket: {bucket}, prefix: {prefix}/data}}
training_results_reference:
  type: {kind}
  connection: {{conn_id: my_cloud}}
  target: {{bucket: {bucket}, prefix: {prefix}/results}}
"""


def test_a_training_has_its_data_there(cloud_of, bucket, store, tmp_path):
    kind = {"abfs": "azure", "gs": "gcs"}[cloud_of.scheme]
    prefix = store.prefix.partition("/")[0]
    data = cloud_of.opened(f"{cloud_of.scheme}://{bucket}/{prefix}/data")
    data.put_bytes("numbers", b"1 2 3")
    dags = tmp_path / "dags" / "cloud"
    dags.mkdir(parents=True)
    made(dags, TRAIN.encode(), "train.py")
    text = MANIFEST.format(kind=kind, bucket=bucket, prefix=prefix)
    manifest = made(dags, text.encode(), "manifest.yml")
    env = {**os.environ, "AIRFLOW_CONN_MY_CLOUD": json.dumps(cloud_of.at())}
    command = [sys.executable, "-m", "ddl_airflow", "run", str(manifest)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=within(180)
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    (lineage,) = tmp_path.glob(".ddl-run/results/*/*/lineage.json")
    facts = lineage.read_text()
    assert json.loads(facts)["dataset"]["uri"] == data.uri
    key = cloud_of.connection.get("password")
    assert not key or key not in said + facts


def test_airflow_trains_on_what_is_there_and_publishes_there(
    site, dags_folder, cloud_of, bucket, store
):
    kind = {"abfs": "azure", "gs": "gcs"}[cloud_of.scheme]
    prefix, name = store.prefix.partition("/")[0], f"cloud-{kind}"
    place = cloud_of.opened(f"{cloud_of.scheme}://{bucket}/{prefix}")
    place.put_bytes("data/numbers", b"1 2 3")
    said = cloud_of.at()
    said["extra"] = json.dumps(said.get("extra", {}))
    site.call("POST", "/connections", json={"connection_id": f"my_{kind}", **said})
    folder = dags_folder / name
    folder.mkdir()
    made(folder, TRAIN.encode(), "train.py")
    text = MANIFEST.format(kind=kind, bucket=bucket, prefix=prefix)
    text = text.replace("in-the-cloud", name).replace("my_cloud", f"my_{kind}")
    made(folder, text.encode(), "manifest.yml")
    site.wait_for_dag(name)
    run = site.trigger(name)
    assert site.wait_for_run(name, run, 180) == "success", site.task_instances(name, run)
    staged = site.xcom(name, run, "stage_data")
    assert staged["uri"] == place.at("data").uri and staged["files"] == 1
    published = [obj.key for obj in place.at("results").list()]
    assert any(key.endswith("/model/saved_model.pb") for key in published), published
    (lineage,) = [key for key in published if key.endswith("/lineage.json")]
    facts = json.loads(place.at("results").read_bytes(lineage))
    assert facts["dataset"]["uri"] == place.at("data").uri
    pointer = json.loads(place.at("results").read_bytes(f"{name}/latest.json"))
    assert pointer["publication"] in lineage
