"""Models go up whole to a real Ceph object store, whatever happens on the way.

``TESTS_ALL_UPLOAD_FAULTS=1`` has each fault hit each write. Without it, of an object of several
parts, those are left out that differ in nothing from others.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest
from botocore.exceptions import ClientError

from ddl_airflow.core.errors import AccessDenied, FileChanged, StagingError, TransferCorrupt
from ddl_airflow.storage import retries, s3_http, s3_put
from ddl_airflow.storage.publication import missing_from, publications, publish
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.store import PIECE
from tests.integration.ceph import CephObjectStore, available
from tests.integration.faulty_proxy import FaultyProxy
from tests.limits import within

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
        proxy.begin(faults)
        return S3Store(near_client, store.bucket, store.prefix)

    yield opened
    proxy.wait()


@pytest.fixture(scope="module")
def contents():
    return {name: random.Random(name).randbytes(size) for name, size in SIZES.items()}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What the program waits for is not as long here, and its parts not as large."""
    monkeypatch.setattr(s3_put, "PART_SIZE", PART)
    monkeypatch.setattr(retries, "_FIRST_WAIT_S", 0.01)
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


# In the body of an answer, which only beginning and ending an upload have.
OF_ANSWERS = ["reset", "cut", "half"]
FAULTS = [
    "500",
    "503",
    "error as success",
    "sent reset",
    "sent cut",
    "sent changed",
    "sent stall 100",
    "done 500",
    "done reset",
    "done cut",
    "done stall 100",
]


def indices(size, fault):
    """Of the requests that get it, with the marker's."""
    if fault in OF_ANSWERS:
        return (BEGIN, END)
    if fault == "sent changed" and size != "small":  # what begins, and what is empty, has no byte
        return range(1, WRITES[size] + 1) if EVERY or size == "empty" else PARTS[::2]
    if size == "large" and fault == "done stall 100":  # the others wait for botocore's minute
        return PARTS if EVERY else PARTS[1:2]
    if EVERY or size != "large":
        return range(WRITES[size] + 1)
    if fault.startswith("sent"):  # which have a body
        return PARTS[::2]
    return (BEGIN, PARTS[1], END)


@pytest.mark.parametrize(
    ("fault", "size"),
    [*((f, size) for f in FAULTS for size in SIZES), *((f, "large") for f in OF_ANSWERS)],
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
        require_published(store, done, {"f": contents[size]})
        assert len(publications(store.at(f"{size}-{index}"))) == 1
        assert proxy.placed == 1
        # The one request again, and where its end is in doubt, another. Half a head that says 200
        # may be an answer to botocore: what ends an upload then is followed by a look at it.
        again = (fault, index) != ("done cut", END)
        assert WRITES[size] + 1 + again <= len(proxy.asked) <= WRITES[size] + 3


def test_a_service_that_stops_to_read_costs_a_try_and_no_byte(
    proxy, near, store, tmp_path, monkeypatch
):
    content = bytes(PIECE - 1)  # half of it is more than kernels keep of what nobody reads
    monkeypatch.setattr(s3_put, "PART_SIZE", PIECE)
    monkeypatch.setattr(s3_http, "SEND_S", within(0.5))
    monkeypatch.setattr(s3_http, "ANSWER_S", 100.0)
    stalled_s = within(5)  # the end of the connection is behind what is not read
    theirs, began = near({0: f"sent stall {stalled_s}"}), time.monotonic()
    done = publish({"f": made(tmp_path, content)}, theirs, "t")
    assert time.monotonic() - began < stalled_s
    require_published(store, done, {"f": content})
    assert proxy.placed == 1


@pytest.mark.parametrize("fault", ["done 500", "done reset"])
def test_an_upload_that_botocore_begins_twice_leaves_none(
    ceph, keys, store, contents, tmp_path, fault
):
    """Its own tries, which nothing here hears of, are on."""

    def begins(method, path):
        return method == "POST"

    with FaultyProxy(ceph.endpoint_url, {0: fault}, begins) as proxy:
        theirs = s3_client(proxy.endpoint_url, *keys)
        near = S3Store(theirs, store.bucket, store.prefix)
        done = publish({"f": made(tmp_path, contents["large"])}, near, "t")
        theirs.close()
    require_published(store, done, {"f": contents["large"]})


def test_an_error_as_success_where_an_object_is_looked_at_costs_no_byte(
    ceph, keys, store, contents, tmp_path
):
    """After its parts were put together, and of one that may be the same."""

    def looks(method, path):
        return method == "HEAD"

    for index in range(3):
        with FaultyProxy(ceph.endpoint_url, {index: "error as success"}, looks) as proxy:
            theirs = s3_client(proxy.endpoint_url, *keys)
            near = S3Store(theirs, store.bucket, store.prefix)
            files = {
                "f": made(tmp_path, contents["large"]),
                "n": made(tmp_path, b"%d" % index, "n"),
            }
            done = publish(files, near, "t")
            theirs.close()
        require_published(store, done, {"f": contents["large"], "n": b"%d" % index})


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
def test_a_fault_that_stays_is_named_with_its_object_and_leaves_nothing_or_all(
    proxy, near, store, contents, tmp_path, fault, error, said, size
):
    files = {"model/f": made(tmp_path, contents[size])}
    for index in range(WRITES[size]) if EVERY else (BEGIN, END)[: WRITES[size]]:
        faults = dict.fromkeys(range(index, 100), fault)
        place = f"{store.uri}/t/.*/(model/f|_SUCCESS) at http"
        with pytest.raises(StagingError, match=f"{place}.*{said}") as caught:
            publish(files, near(faults), "t")
        assert type(caught.value) is error
        assert list(store.unfinished()) == []
        if "published all the same" in str(caught.value):  # only the marker's answers were lost
            assert fault == "done cut" and index == WRITES[size] - 1
            (name,) = publications(store.at("t"))
            assert missing_from(store.at(f"t/{name}")) == []
            store.delete([obj.key for obj in store.list()])
        assert store.list() == []
        if error is AccessDenied:
            at_once = len(PARTS) if index in PARTS else 1
            tries = 2 if fault == "403" else 1  # boto3 may be let in where a URL is not
            assert index < len(proxy.asked) <= index + at_once * tries


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


# What earlier ones left.

LEFT = f"t/{'a' * 16}-{'b' * 8}"  # as a killed process names what it publishes


def begin(store, client, key, content, parts):
    """An upload of that content that has these parts of it, from 1."""
    name = {"Bucket": store.bucket, "Key": f"{store.prefix}/{key}"}
    said = {"ddl-sha256": hashlib.sha256(content).hexdigest()}
    name["UploadId"] = client.create_multipart_upload(**name, Metadata=said)["UploadId"]
    for number in parts:
        body = content[(number - 1) * PART : number * PART]
        client.upload_part(PartNumber=number, Body=body, **name)
    return name


def put(store, key, content, folder):
    path = made(folder, content, uuid.uuid4().hex)
    store.put(path, key, hashlib.sha256(content).hexdigest(), lambda nbytes: None)


def sent(proxy):
    """Of what was sent, and not copied: the numbers of the parts, and the keys of whole objects."""
    parts, whole = [], []
    for one in proxy.asked:
        query = dict(pair.partition("=")[::2] for pair in one.query.split("&"))
        if one.method == "PUT" and not one.source:
            if "partNumber" in query:
                parts.append(int(query["partNumber"]))
            else:
                whole.append(one.path.rpartition("/")[2])
    return sorted(parts), sorted(whole)


@pytest.mark.parametrize("there", [(1, 3), (1, 2, 3), ()])
def test_no_part_that_a_killed_one_has_sent_goes_up_again(
    proxy, near, store, client, contents, tmp_path, there
):
    begin(store, client, f"{LEFT}/f", contents["large"], there)
    begin(store, client, f"{LEFT}/gone", b"of a file that is no more", (1,))
    # As large, and of an earlier training.
    put(store, f"t/{'c' * 16}-{'d' * 8}/f", contents["large"][::-1], tmp_path)
    begin(store, client, "t/of another program", b"not ours", (1,))
    done = publish({"f": made(tmp_path, contents["large"])}, near({}), "t")
    assert sent(proxy) == (sorted({1, 2, 3} - {*there}), ["_SUCCESS"])
    assert [one.key for one in store.unfinished()] == ["t/of another program"]
    store.discard(next(iter(store.unfinished())))
    require_published(store, done, {"f": contents["large"]})


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("marked", [False, True])
def test_no_object_that_is_there_goes_up_again(
    proxy, near, store, contents, tmp_path, size, marked
):
    # Ceph 16 finds no object with a percent sign to copy a part of: that would be sent.
    key = "model/ü %41" if size == "small" else "model/ü x"
    every = {key: contents[size], "other": b"other"}
    if marked:
        files = {key: made(tmp_path, body, str(len(body))) for key, body in every.items()}
        first = publish(files, store, "t")
        every["other"] = b"changed"
    else:
        put(store, f"{LEFT}/{key}", contents[size], tmp_path)
    files = {key: made(tmp_path, body, str(len(body))) for key, body in every.items()}
    done = publish(files, near({}), "t")
    assert sent(proxy) == ([], ["_SUCCESS", "other"])
    require_published(store, done, every)
    if marked:
        assert first.name != done.name and missing_from(store.at(f"t/{first.name}")) == []


@pytest.mark.parametrize("size", ["small", "large"])
def test_what_only_looks_the_same_is_not_taken(
    proxy, near, store, client, contents, tmp_path, size
):
    other = contents[size][:-1] + bytes([contents[size][-1] ^ 1])
    put(store, f"{LEFT}/f", other, tmp_path)
    done = publish({"f": made(tmp_path, contents[size])}, near({}), "t")
    assert sent(proxy)[0] == ([1, 2, 3] if size == "large" else [])
    require_published(store, done, {"f": contents[size]})


def test_an_upload_of_another_file_is_not_gone_on_with(
    proxy, near, store, client, contents, tmp_path
):
    other = contents["large"][:PART] + bytes(len(contents["large"]) - PART)
    name = begin(store, client, f"{LEFT}/f", other, (1, 2))
    done = publish({"f": made(tmp_path, contents["large"])}, near({}), "t")
    require_published(store, done, {"f": contents["large"]})
    with pytest.raises(ClientError):  # Ceph 16 says NoSuchKey
        client.list_parts(**name)


@pytest.mark.parametrize("size", ["small", "large"])
def test_what_the_service_does_not_copy_is_sent(proxy, near, store, contents, tmp_path, size):
    put(store, f"{LEFT}/f", contents[size], tmp_path)
    theirs = near({})

    def refuse(request, **_):
        request.headers["x-amz-copy-source"] = f"{store.bucket}/not-there"

    events = theirs._client.meta.events
    for name in ("CopyObject", "UploadPartCopy"):
        events.register(f"before-sign.s3.{name}", refuse)
    try:
        done = publish({"f": made(tmp_path, contents[size])}, theirs, "t")
    finally:
        for name in ("CopyObject", "UploadPartCopy"):
            events.unregister(f"before-sign.s3.{name}", refuse)
    assert sent(proxy) == (
        ([1, 2, 3], ["_SUCCESS"]) if size == "large" else ([], ["_SUCCESS", "f"])
    )
    require_published(store, done, {"f": contents[size]})


@pytest.mark.parametrize("fault", ["500", "done 500", "error as success", "cut", "done reset"])
def test_a_fault_while_the_service_copies_costs_no_byte(
    proxy, near, store, client, contents, tmp_path, fault
):
    put(store, f"{LEFT}/small", contents["small"], tmp_path)
    put(store, f"{LEFT}/large", contents["large"], tmp_path)
    files = {name: made(tmp_path, contents[name], name) for name in ("small", "large")}
    done = publish(files, near({1: fault, 3: fault}), "t", workers=1)
    assert sent(proxy)[0] == []
    require_published(store, done, {name: contents[name] for name in files})


def test_who_may_not_list_uploads_publishes_all_the_same(near, store, contents, tmp_path, caplog):
    theirs = near({})

    def refuse(**_):
        raise AccessDenied("no right to list uploads.")

    caplog.set_level("INFO")
    theirs._client.meta.events.register("before-call.s3.ListMultipartUploads", refuse)
    try:
        done = publish({"f": made(tmp_path, contents["large"])}, theirs, "t")
    finally:
        theirs._client.meta.events.unregister("before-call.s3.ListMultipartUploads", refuse)
    require_published(store, done, {"f": contents["large"]})
    assert "no right to list uploads. What was left unfinished is not looked for" in caplog.text


def test_an_upload_that_somebody_ends_is_begun_again(near, store, contents, tmp_path):
    theirs, ended, lock = near({}), set(), threading.Lock()

    def end(params, **_):
        with lock:
            if len(ended) < 2 and params["UploadId"] not in ended:
                (one,) = store.unfinished()
                ended.add(one.token)
                store.discard(one)

    theirs._client.meta.events.register("provide-client-params.s3.UploadPart", end)
    theirs._client.meta.events.register("provide-client-params.s3.CompleteMultipartUpload", end)
    try:
        done = publish({"f": made(tmp_path, contents["large"])}, theirs, "t")
    finally:
        for name in ("UploadPart", "CompleteMultipartUpload"):
            theirs._client.meta.events.unregister(f"provide-client-params.s3.{name}", end)
    assert len(ended) == 2
    require_published(store, done, {"f": contents["large"]})


def test_uploads_of_one_training_at_once_are_all_published(near, store, contents, tmp_path):
    """Each takes, and ends, what another has begun; and goes on."""
    theirs = near({})
    every = [
        {"f": contents["large"], "g": contents["small"], "n": str(number // 2).encode()}
        for number in range(6)
    ]

    def upload(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        files = {key: made(folder, body, key) for key, body in every[number].items()}
        return publish(files, theirs, "t")

    with ThreadPoolExecutor(len(every)) as pool:
        published = list(pool.map(upload, range(len(every))))
    for done, expected in zip(published, every, strict=True):
        require_published(store, done, expected)
