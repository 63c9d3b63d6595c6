"""Data comes down whole from a real Ceph object store, whatever happens on the way."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
import uuid
from functools import partial
from pathlib import Path

import pytest

from ddl_airflow.core.errors import AccessDenied, StagingError, TransferCorrupt
from ddl_airflow.storage import cache, download, lanes, retries, s3_get
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.staging import stage
from ddl_airflow.storage.store import PIECE
from tests.integration.ceph import CephObjectStore, available
from tests.integration.faulty_proxy import FaultyProxy
from tests.limits import until, within

MIB = 1024 * 1024
ROOT = Path(__file__).parents[2]
PART = MIB  # of this process; who is killed has the program's own
SIZES = {"small": 300_000, "large": 2 * PART + 100_000}  # one part, three parts
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ceph(tmp_path_factory):
    if reason := available():
        pytest.skip(reason)
    with CephObjectStore(tmp_path_factory.mktemp("ceph") / "store") as running:
        yield running


@pytest.fixture(scope="module")
def keys(ceph):
    return ceph.add_user("owner")


@pytest.fixture(scope="module")
def store(ceph, keys):
    client = s3_client(ceph.endpoint_url, *keys)
    bucket = f"test-{uuid.uuid4()}"
    client.create_bucket(Bucket=bucket)
    yield S3Store(client, bucket)
    client.close()


@pytest.fixture(scope="module")
def contents(store, tmp_path_factory):
    """An object under a prefix of its own, of each size."""
    made = {}
    for name, size in SIZES.items():
        made[name] = random.Random(name).randbytes(size)
        put(store, f"{name}/f", made[name], tmp_path_factory.mktemp("made"))
    return made


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What the program waits for is not as long here, and its parts not as large."""
    for module in (download, cache, lanes):
        monkeypatch.setattr(module, "PIECE", PART)
    monkeypatch.setattr(retries, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(s3_get, "STALL_S", 0.5)


def put(store, key, content, folder):
    path = folder / uuid.uuid4().hex
    path.write_bytes(content)
    return store.put(path, key, hashlib.sha256(content).hexdigest(), lambda nbytes: None)


@pytest.fixture
def near(keys, store):
    """near(proxy, prefix) -> the store through a proxy, whose faults botocore does not hide."""
    clients = []

    def opened(proxy, prefix):
        client = s3_client(proxy.endpoint_url, *keys)
        client.meta.events.unregister("needs-retry.s3", unique_id="retry-config-s3")
        clients.append(client)
        return S3Store(client, store.bucket, prefix)

    yield opened
    for client in clients:
        client.close()


def of_objects(method, path):
    return method == "GET" and path.endswith("/f")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "fault", ["500", "503", "reset", "cut", "half", "changed", "error as success", "stall 1"]
)
def test_a_fault_at_any_request_costs_a_try_and_no_byte(
    ceph, near, store, contents, tmp_path, fault, size
):
    parts = -(-SIZES[size] // PART)
    for index in range(parts):
        with FaultyProxy(ceph.endpoint_url, {index: fault}, of_objects) as proxy:
            stage(near(proxy, size), Cache(tmp_path / str(index)), tmp_path / "data")
        assert (tmp_path / "data" / "f").read_bytes() == contents[size]
        # What is wrong in one part is found at the end, and no store says in which.
        most = 2 * parts if fault == "changed" else parts + (4 if fault == "500" else 2)
        assert parts < len(proxy.asked) <= most
        (tmp_path / "data" / ".complete").unlink()
        (tmp_path / "data" / "f").unlink()


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("500", StagingError, r"InternalError \(500\).*0 of .* bytes came from byte \d.*6 tries"),
        ("503", StagingError, r"SlowDown \(503\).*6 tries"),
        ("reset", StagingError, "bytes came from byte"),
        ("half", StagingError, "bytes came from byte"),
        ("changed", TransferCorrupt, "sha256 is .* not .* fetched twice"),
        ("stall 1", StagingError, "imeout.*bytes came from byte"),
        ("403", AccessDenied, "AccessDenied .*Check access_key_id"),
    ],
)
def test_a_fault_that_stays_is_named_with_its_object(
    ceph, near, store, contents, tmp_path, fault, error, said
):
    with FaultyProxy(ceph.endpoint_url, {None: fault}, of_objects) as proxy:
        refused = pytest.raises(StagingError, match=f"s3://{store.bucket}/small/f at http.*{said}")
        with refused as caught:
            stage(near(proxy, "small"), Cache(tmp_path / "cache"), tmp_path / "data")
    assert type(caught.value) is error
    assert not (tmp_path / "data").exists()
    assert [p for p in (tmp_path / "cache" / "blobs").rglob("*") if p.is_file()] == []
    if fault == "403":
        # Once more by boto3, which may be let in where a URL is not; and without checksums.
        assert len(proxy.asked) == 3


def test_what_has_come_is_kept_when_the_store_goes_away(ceph, near, contents, tmp_path):
    faults = dict.fromkeys(range(1, 100), "reset")
    folder = tmp_path / "cache"
    with FaultyProxy(ceph.endpoint_url, faults, of_objects) as proxy:
        theirs = near(proxy, "large")
        with pytest.raises(StagingError, match="large/f at http"):
            stage(theirs, Cache(folder), tmp_path / "data")
        (journal,) = folder.glob("blobs/*/*.done.part")
        kept = journal.read_bytes().count(b"\n")
        faults.clear()
        before = len(proxy.asked)
        stage(theirs, Cache(folder), tmp_path / "data")
        assert kept and len(proxy.asked) - before == 3 - kept
    assert (tmp_path / "data" / "f").read_bytes() == contents["large"]
    assert list(folder.glob("blobs/*/*.part")) == []


@pytest.mark.parametrize("size", SIZES)
def test_a_store_that_ignores_ranges_is_read_as_a_whole_and_held_to_its_digest(
    ceph, near, store, contents, tmp_path, caplog, size
):
    """Also where that breaks off: it begins again."""
    breaks = (0,) if size == "small" else (2, 3, 5)
    faults = {None: "whole", **dict.fromkeys(breaks, "reset")}
    with FaultyProxy(ceph.endpoint_url, faults, of_objects) as proxy:
        theirs = near(proxy, size)
        stage(theirs, Cache(tmp_path / "cache"), tmp_path / "data")
        (obj,) = theirs.list()
        read = []
        assert theirs.read(obj, read.append) == "sha256"
    assert (tmp_path / "data" / "f").read_bytes() == contents[size] == b"".join(read)
    said = f"large/f at {proxy.endpoint_url}: the store, or a proxy, ignores ranges"
    assert (said in caplog.text) == (size == "large")


def test_a_store_that_ignores_ranges_and_damages_is_found_out(
    ceph, near, store, contents, tmp_path
):
    faults = dict.fromkeys(range(3), "whole") | {None: "changed"}
    said = "large/f at http.*sha256 is .* not .* twice"
    with FaultyProxy(ceph.endpoint_url, faults, of_objects) as proxy:
        theirs = near(proxy, "large")
        with pytest.raises(TransferCorrupt, match=said):
            stage(theirs, Cache(tmp_path / "cache"), tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_an_object_that_is_replaced_while_it_comes_is_not_mixed(ceph, near, store, tmp_path):
    made = [bytes([n]) * (3 * PART) for n in range(2)]
    put(store, "replaced/f", made[0], tmp_path)
    lock, count = threading.Lock(), []

    def replaced(method, path):
        if of_objects(method, path):
            with lock:
                count.append(path)
                if len(count) == 2:
                    put(store, "replaced/f", made[1], tmp_path)
        return of_objects(method, path)

    with FaultyProxy(ceph.endpoint_url, {}, replaced) as proxy:
        theirs = near(proxy, "replaced")
        with pytest.raises(TransferCorrupt, match="replaced/f at http.*changed since it was list"):
            stage(theirs, Cache(tmp_path / "cache"), tmp_path / "data")
        stage(theirs, Cache(tmp_path / "cache"), tmp_path / "data")
    assert (tmp_path / "data" / "f").read_bytes() == made[1]


def test_an_error_as_success_where_an_object_is_only_looked_at_costs_a_try(
    ceph, near, store, tmp_path
):
    """Of a large object without a SHA-256 of ours it is asked first how it can be checked."""
    content = random.Random("looked at").randbytes(SIZES["large"])
    store._client.put_object(Bucket=store.bucket, Key="looked/f", Body=content)

    def looks(method, path):
        return method == "HEAD"

    faults = {0: "error as success"}
    with FaultyProxy(ceph.endpoint_url, faults, looks) as proxy:
        stage(near(proxy, "looked"), Cache(tmp_path / "cache"), tmp_path / "data")
        faults[None] = "error as success"
        with pytest.raises(StagingError, match="looked/f at http.*no ETag, so it is no object"):
            stage(near(proxy, "looked"), Cache(tmp_path / "other"), tmp_path / "more")
    assert (tmp_path / "data" / "f").read_bytes() == content


@pytest.mark.parametrize(
    "fault", ["500", "503", "reset", "cut", "half", "changed", "error as success"]
)
def test_a_small_object_that_is_read_is_whole_or_none(ceph, near, store, fault):
    """A pointer, a marker, a record, a chunk of a checkpoint."""
    body = json.dumps({"publication": "p" * 500}).encode()
    store.put_bytes("read/f", body)
    with FaultyProxy(ceph.endpoint_url, {0: fault, 2: fault}, of_objects) as proxy:
        theirs = near(proxy, "read")
        assert theirs.read_bytes("f") == body
        assert theirs.read_version("f") == store.at("read").read_version("f")
        assert len(proxy.asked) == 4
    with FaultyProxy(ceph.endpoint_url, {None: fault}, of_objects) as proxy:
        for read in (near(proxy, "read").read_bytes, near(proxy, "read").read_version):
            with pytest.raises(StagingError, match="read/f at http"):
                read("f")


STAGE_ALONE = """
import re, sys
from pathlib import Path
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.staging import stage
endpoint, key, secret, bucket, cache, destination = sys.argv[1:]
store = S3Store(s3_client(endpoint, key, secret), bucket, "killed")
print(stage(store, Cache(cache), Path(destination)).fetched)
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024)
"""


def test_a_stager_that_is_killed_fetches_no_finished_part_again(ceph, keys, store, tmp_path):
    content = b"".join(random.Random(n).randbytes(PIECE) for n in range(20))  # 320 MiB
    put(store, "killed/f", content, tmp_path)
    store.put_bytes("killed/other", b"small")
    folder = tmp_path / "cache"
    chance = random.Random(17)

    def finished():
        found = set()
        for journal in folder.glob("blobs/*/*.done.part"):
            for line in journal.read_bytes().split(b"\n")[:-1]:
                found.add(json.loads(line)[0])
        return found

    with FaultyProxy(ceph.endpoint_url, {}, of_objects, bytes_per_s=25 * MIB) as proxy:
        command = [sys.executable, "-c", STAGE_ALONE, proxy.endpoint_url, *keys, store.bucket]
        command += [str(folder), str(tmp_path / "data")]
        there, fetched = set(), 0
        for number in range(4):
            running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            if number < 3:
                most = len(there) + chance.randrange(1, 5)
                until(partial(lambda count: len(finished()) >= count, most), 60)
                running.send_signal(signal.SIGKILL)
            out, _ = running.communicate(timeout=within(60))
            asked = [int(one.range.split("=")[1].split("-")[0]) // PIECE for one in proxy.asked]
            assert there.isdisjoint(asked[fetched:])
            there, fetched = finished(), len(asked)
    assert running.returncode == 0
    assert fetched > 20  # some were under way when it was killed
    assert (tmp_path / "data" / "f").read_bytes() == content
    count, most_mib = map(int, out.split())
    assert count in (1, 2) and most_mib < 256
    assert list(folder.glob("blobs/*/*.part")) == []
