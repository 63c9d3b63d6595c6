"""Models go up whole to a real Ceph object store, whatever happens on the way.

``TESTS_ALL_UPLOAD_FAULTS=1`` has each fault hit each write. Without it, of an object of several
parts, those are left out that differ in nothing from others.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
import uuid

import pytest

from ddl_airflow.core.errors import AccessDenied, FileChanged, StagingError, TransferCorrupt
from ddl_airflow.storage import s3_get, s3_http, s3_put
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.transfer import missing_from, publications, publish
from tests.integration.ceph import CephObjectStore, available
from tests.integration.faulty_proxy import FaultyProxy
from tests.limits import until, within

PART = 256 * 1024
SIZES = {"empty": 0, "small": 200_000, "large": 2 * PART + 100_000}
# Requests that store something, without the marker's: PUT; or begin, three parts, and end.
WRITES = {"empty": 1, "small": 1, "large": 5}
BEGIN, PARTS, END = 0, (1, 2, 3), 4
EVERY = bool(os.environ.get("TESTS_ALL_UPLOAD_FAULTS"))
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def ceph(tmp_path_factory):
    if reason := available():
        pytest.skip(reason)
    with CephObjectStore(tmp_path_factory.mktemp("ceph") / "store", PART) as running:
        yield running


@pytest.fixture(scope="module")
def keys(ceph):
    return ceph.add_user("owner")


@pytest.fixture(scope="module")
def client(ceph, keys):
    client = s3_client(ceph.endpoint_url, *keys)
    yield client
    client.close()


@pytest.fixture(scope="module")
def proxy(ceph):
    with FaultyProxy(ceph.endpoint_url, {}, of_writes) as running:
        yield running


@pytest.fixture(scope="module")
def near_client(proxy, keys):
    """Through the proxy, whose faults botocore does not hide."""
    client = s3_client(proxy.endpoint_url, *keys)
    client.meta.events.unregister("needs-retry.s3", unique_id="retry-config-s3")
    yield client
    client.close()


@pytest.fixture(scope="module")
def bucket(client):
    client.create_bucket(Bucket="models")
    return "models"


@pytest.fixture
def store(client, bucket):
    """Empty, as it is without faults."""
    return S3Store(client, bucket, uuid.uuid4().hex)


@pytest.fixture
def near(near_client, proxy, store):
    """near(faults) -> the same store, through the proxy with these faults from now on."""

    def opened(faults):
        until(lambda: not proxy.open, 10)
        proxy.begin(faults)
        return S3Store(near_client, store.bucket, store.prefix)

    yield opened
    until(lambda: not proxy.open, 10)


@pytest.fixture(scope="module")
def contents():
    return {name: random.Random(name).randbytes(size) for name, size in SIZES.items()}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What the program waits for is not as long here, and its parts not as large."""
    monkeypatch.setattr(s3_put, "PART_SIZE", PART)
    monkeypatch.setattr(s3_get, "_FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(s3_http, "SEND_S", 0.5)
    monkeypatch.setattr(s3_http, "ANSWER_S", 2.0)


def of_writes(method, path):
    return method in ("PUT", "POST")


def made(folder, content, name="f"):
    path = folder / name
    path.write_bytes(content)
    return path


def require_published(store, done, contents):
    """All is there as it was, and nothing that was begun."""
    target = store.at(done.uri.removeprefix(f"{store.uri}/"))
    assert missing_from(target) == []
    assert {f.key: f.sha256 for f in done.files} == {
        key: hashlib.sha256(content).hexdigest() for key, content in contents.items()
    }
    for obj in target.list():
        if obj.key in contents:
            read = []
            assert target.read(obj, read.append) == "sha256"
            assert b"".join(read) == contents[obj.key]
    assert [one.key for one in store.unfinished()] == []


def indices(size, fault):
    """Of the requests that get it, with the marker's."""
    if EVERY or size != "large":
        return range(WRITES[size] + 1)
    if fault.startswith("sent"):  # which have a body
        return PARTS[::2]
    return (BEGIN, PARTS[1], END)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "fault",
    [
        "500",
        "503",
        "reset",
        "cut",
        "half",
        "error as success",
        "sent reset",
        "sent cut",
        "sent changed",
        "sent stall 1",
        "done 500",
        "done reset",
        "done cut",
        "done stall 3",
    ],
)
def test_a_fault_at_any_write_costs_a_try_and_no_byte(
    proxy, near, store, contents, tmp_path, fault, size
):
    slow = "stall" in fault
    for index in indices(size, fault)[: 1 if slow and not EVERY else None]:
        files = {"f": made(tmp_path, contents[size])}
        theirs, began = near({index: fault}), time.monotonic()
        done = publish(files, theirs, f"{size}-{index}")
        assert time.monotonic() - began < within(10)
        until(lambda: not proxy.open, 10)
        require_published(store, done, {"f": contents[size]})
        assert len(publications(store.at(f"{size}-{index}"))) == 1
        # At most the one request again, and where its end is in doubt, another.
        assert WRITES[size] + 1 <= len(proxy.asked) <= WRITES[size] + 3


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("500", StagingError, r"InternalError \(500\).*6 tries"),
        ("503", StagingError, r"SlowDown \(503\).*6 tries"),
        ("sent reset", StagingError, "6 tries"),
        ("done cut", StagingError, "6 tries"),
        ("error as success", StagingError, "6 tries"),
        ("403", AccessDenied, "AccessDenied .*Check access_key_id"),
        ("expired", AccessDenied, "ExpiredToken .*Check access_key_id"),
        ("skewed", AccessDenied, "RequestTimeTooSkewed .*this host's clock"),
    ],
)
def test_a_fault_that_stays_is_named_with_its_object_and_nothing_is_left(
    proxy, near, store, contents, tmp_path, fault, error, said, size
):
    files = {"model/f": made(tmp_path, contents[size])}
    for index in range(WRITES[size]) if EVERY else (BEGIN, END)[: WRITES[size]]:
        faults = dict.fromkeys(range(index, 100), fault)
        place = f"{store.uri}/t/.*/(model/f|_SUCCESS) at http"
        with pytest.raises(StagingError, match=f"{place}.*{said}") as caught:
            publish(files, near(faults), "t")
        until(lambda: not proxy.open, 10)
        assert type(caught.value) is error
        assert store.list() == [] and list(store.unfinished()) == []
        if error is AccessDenied:
            assert len(proxy.asked) == index + 1 if index < 2 else len(proxy.asked) <= index + 3


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_line_that_damages_all_is_named_and_nothing_is_stored(
    near, store, contents, tmp_path, size
):
    files = {"f": made(tmp_path, contents[size])}
    with pytest.raises(TransferCorrupt, match="/f at http.*(BadDigest|stored with ETag)"):
        publish(files, near({None: "sent changed"}), "t")
    assert store.list() == [] and list(store.unfinished()) == []


def test_odd_keys_and_many_objects_go_up_over_a_bad_line(near, store, contents, tmp_path):
    names = ["a b", "a+b", "a%20b", "ü 漢字/+&%41?#.bin", "nested/'\"<>", "~*()!", "=;:@,$"]
    every = {f"model/{name}": name.encode() for name in names}
    every |= {"empty": b"", "large": contents["large"]}
    files = {
        key: made(tmp_path, content, str(number))
        for number, (key, content) in enumerate(every.items())
    }
    kinds = ["500", "sent reset", "done reset", "sent changed", "done 500", "503"]
    faults = {number: kinds[number // 3 % len(kinds)] for number in range(0, 60, 3)}
    require_published(store, publish(files, near(faults), "t"), every)


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_file_that_changes_while_it_goes_up_is_told_and_not_published(
    near, store, contents, tmp_path, monkeypatch, size
):
    path = made(tmp_path, contents[size])
    known = {"f": (hashlib.sha256(contents[size]).hexdigest(), SIZES[size])}
    monkeypatch.setattr(s3_put, "PARTS_AT_ONCE", 1)
    theirs = near({})
    writes = []

    def change(params, **_):
        writes.append(params)
        if len(writes) == 2:  # one part is there, and the last is not
            with open(path, "r+b") as file:
                file.seek(-5, os.SEEK_END)
                file.write(b"other")

    if size == "small":
        path.write_bytes(contents[size][:-5] + b"other")
    theirs._client.meta.events.register("provide-client-params.s3.UploadPart", change)
    try:
        with pytest.raises(FileChanged, match=f"{path} changed while it was uploaded to s3://"):
            publish({"f": path}, theirs, "t", known=known)
    finally:
        theirs._client.meta.events.unregister("provide-client-params.s3.UploadPart", change)
    assert len(writes) == (3 if size == "large" else 0)
    assert store.list() == [] and list(store.unfinished()) == []
