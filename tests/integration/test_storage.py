"""Storage against a real Ceph object store, damaged lines, and full disks."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from ddl_airflow.core.errors import (
    AccessDenied,
    NoSpace,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.core.selection import Selection
from ddl_airflow.lineage.production import PRODUCTION, point, read_pointer
from ddl_airflow.lineage.retention import clean_results
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import missing_from, publish
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import S3Settings, s3_client, with_settings
from ddl_airflow.storage.staging import list_dataset, stage
from ddl_airflow.storage.store import Unfinished
from ddl_airflow.storage.unpacked import unpack
from tests.integration.ceph import CephObjectStore, available
from tests.integration.disk import tiny_disk
from tests.limits import within

MIB = 1024 * 1024
ROOT = Path(__file__).parents[2]
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
def client(ceph, keys):
    client = s3_client(ceph.endpoint_url, *keys)
    yield client
    client.close()


@pytest.fixture
def store(client):
    bucket = f"test-{uuid.uuid4()}"
    client.create_bucket(Bucket=bucket)
    return S3Store(client, bucket, "a prefix")


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


class DamagingProxy:
    """Passes one service's bytes on, but changes or cuts them at the first ``pattern``.

    Only bytes in the direction given are looked at; ``damaged`` counts.
    """

    def __init__(self, endpoint_url, pattern, direction, cut=False):
        self._target = ("127.0.0.1", int(endpoint_url.rpartition(":")[2]))
        self._pattern, self._direction, self._cut = pattern, direction, cut
        self.damaged = 0

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            for source, sink, direction in ((near, far, "up"), (far, near, "down")):
                threading.Thread(
                    target=self._pass, args=(source, sink, direction), daemon=True
                ).start()

    def _pass(self, source, sink, direction):
        try:
            while block := source.recv(65536):
                if direction == self._direction and self._pattern in block:
                    self.damaged += 1
                    if self._cut:
                        break
                    block = block.replace(self._pattern, self._pattern[::-1], 1)
                sink.sendall(block)
        except OSError:
            pass  # the other direction closed both
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


PATTERN = b"<pattern not in any header>"


def files_below(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def write_files(folder, contents):
    files = {}
    for number, (key, content) in enumerate(contents.items()):
        files[key] = folder / str(number)
        folder.mkdir(exist_ok=True)
        files[key].write_bytes(content)
    return files


def test_round_trip_of_odd_keys_and_large_objects_and_reuse(store, cache, tmp_path):
    large = b"".join(bytes([n]) * MIB for n in range(35)) + b"end"  # three parts
    contents = {
        "a/b/c.txt": b"nested",
        "with space/ü 漢字/+&%41?#.bin": b"odd",
        "empty": b"",
        "large": large,
        "exactly one part": large[: 16 * MIB],
    }
    files = write_files(tmp_path / "results", contents)
    done = publish(files, store, marker={"training_id": "t"})
    store = store.at(done.name)
    staged = stage(store, cache, tmp_path / "data")
    found = files_below(tmp_path / "data")
    marker = json.loads(found.pop("_SUCCESS"))
    del found[".complete"]
    assert found == contents
    assert [f["key"] for f in marker["files"]] == sorted(contents) == [f.key for f in done.files]
    assert {f.key: f.checked for f in staged.files} == dict.fromkeys(
        [*contents, "_SUCCESS"], "sha256"
    )
    assert (staged.fetched, staged.reused) == (6, 0)
    assert next(f.etag for f in done.files if f.key == "large").endswith("-3")

    again = stage(store, cache, tmp_path / "other")
    assert (again.fetched, again.reused) == (0, 6)
    assert again.fingerprint == staged.fingerprint
    store.put_bytes("a/b/c.txt", b"changed")
    third = stage(store, cache, tmp_path / "third")
    assert (third.fetched, third.reused) == (1, 5)
    assert third.fingerprint != staged.fingerprint


def test_listing_of_more_than_one_page(store, cache, tmp_path):
    contents = {f"{number % 7}/{number:04}": str(number).encode() for number in range(1003)}
    published = publish(write_files(tmp_path / "results", contents), store)
    staged = stage(store.at(published.name), cache, tmp_path / "data")
    assert len(staged.files) == len(contents) + 1
    found = files_below(tmp_path / "data")
    assert found.items() >= contents.items()


def test_what_patterns_select_of_an_odd_bucket_is_staged(store, client, cache, tmp_path):
    """Keys that are files and folders, folders' own, one that no file can be, and many."""
    for key in ("of/+ %41 ü漢/a?.gz", "of/+ %41 ü漢/a?.tmp", "empty.gz", "folder", "folder/in.gz"):
        store.put_bytes(key, key.encode() * (key != "empty.gz"))
    client.put_object(Bucket=store.bucket, Key="a prefix/of/", Body=b"")
    client.put_object(Bucket=store.bucket, Key="a prefix/no//file", Body=b"1")
    listing = list_dataset(store, Selection(("*.gz",), ("/folder/",)))
    staged = stage(store, cache, tmp_path / "data", listing=listing)
    assert [one.key for one in staged.files] == ["empty.gz", "of/+ %41 ü漢/a?.gz"]
    # Of one place two may stage at once, each its own.
    with ThreadPoolExecutor(2) as pool:
        choices = [Selection(("folder",), ("/folder/*",)), Selection((), ("no/", "/folder/"))]
        with pytest.raises(SourceMissing, match=r"exclude: .* leave nothing of 2 objects"):
            list_dataset(store, Selection(("folder",), ("folder",)))
        with pytest.raises(StagingError, match="needs a folder where 'folder' is an object"):
            stage(store, cache, tmp_path / "x", listing=list_dataset(store, Selection(("folder",))))
        done = [
            pool.submit(
                stage, store, cache, tmp_path / str(number), listing=list_dataset(store, choice)
            )
            for number, choice in enumerate(choices)
        ]
        assert [one.key for one in done[0].result().files] == ["folder"]
        assert len(done[1].result().files) == 4
    assert len({listing.fingerprint, *(one.result().fingerprint for one in done)}) == 3


def test_archives_in_the_store_are_unpacked_once(store, ceph, cache, tmp_path):
    body, random = io.BytesIO(), os.urandom(20 * MIB)
    with tarfile.open(fileobj=body, mode="w:gz", compresslevel=1) as archive:
        for name, content in {"a/ü +": random, "b": b""}.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    (tmp_path / "x").write_bytes(body.getvalue())
    digest = hashlib.sha256(body.getvalue()).hexdigest()
    store.put(tmp_path / "x", "train set.tar.gz", digest, lambda _: None)
    for folder in ("data", "again"):
        with cache.in_use():
            source, inside = unpack(store, cache, list_dataset(store))
            staged = stage(source, cache, tmp_path / folder, listing=inside)
        assert files_below(tmp_path / folder).items() >= {
            ("train set/a/ü +", random),
            ("train set/b", b""),
        }
        assert source.sha256 == {"train set.tar.gz": digest}
    assert staged.reused == 2
    # Others' keys: who may not have the archive gets nothing of it from the cache.
    stranger = S3Store(s3_client(ceph.endpoint_url, *ceph.add_user("packed")), store.bucket)
    with cache.in_use():
        source, inside = unpack(stranger.at("a prefix"), cache, list_dataset(store))
        with pytest.raises(AccessDenied):
            stage(source, cache, tmp_path / "stolen", listing=inside)


def test_a_bucket_whose_readers_pay_is_read_by_who_says_so(store, ceph, client, cache, tmp_path):
    (tmp_path / "large").write_bytes(os.urandom(17 * MIB))
    publish({"large": tmp_path / "large"}, store)
    rights = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"AWS": ["arn:aws:iam:::user/payer"]},
                "Action": ["s3:ListBucket", "s3:GetObject"],
                "Resource": [f"arn:aws:s3:::{store.bucket}", f"arn:aws:s3:::{store.bucket}/*"],
            }
        ],
    }
    payer = s3_client(ceph.endpoint_url, *ceph.add_user("payer"))
    client.put_bucket_policy(Bucket=store.bucket, Policy=json.dumps(rights))
    client.put_bucket_request_payment(
        Bucket=store.bucket, RequestPaymentConfiguration={"Payer": "Requester"}
    )
    with pytest.raises(AccessDenied):
        stage(S3Store(payer, store.bucket, "a prefix"), cache, tmp_path / "data")
    with_settings(payer, S3Settings(requester_pays=True))
    staged = stage(S3Store(payer, store.bucket, "a prefix"), cache, tmp_path / "data")
    assert staged.fetched == 2 and staged.nbytes > 17 * MIB


def test_objects_of_other_programs_are_checked_as_far_as_can_be(store, client, cache, tmp_path):
    def parts(key, *sizes):
        upload = {"Bucket": store.bucket, "Key": f"a prefix/{key}"}
        upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
        etags = []
        for number, size in enumerate(sizes, 1):
            body = bytes([number]) * size
            etag = client.upload_part(PartNumber=number, Body=body, **upload)["ETag"]
            etags.append({"PartNumber": number, "ETag": etag})
        client.complete_multipart_upload(MultipartUpload={"Parts": etags}, **upload)

    parts("parts of 8 MiB", 8 * MIB, 8 * MIB, 77)
    parts("odd parts", 7 * MIB, 7 * MIB, 77)
    client.put_object(Bucket=store.bucket, Key="a prefix/plain", Body=b"plain")
    client.put_object(Bucket=store.bucket, Key="a prefix/folder/", Body=b"")
    staged = stage(store, cache, tmp_path / "data")
    assert {f.key: f.checked for f in staged.files} == {
        "parts of 8 MiB": "md5-of-parts",
        "odd parts": "size",
        "plain": "md5",
    }


@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_wrong_key_is_access_denied_and_shows_no_secret(ceph, keys, store, wrong):
    key, secret = keys
    pair = ("NOSUCHKEY", secret) if wrong == "key" else (key, "not-" + secret)
    other = S3Store(s3_client(ceph.endpoint_url, *pair), store.bucket)
    with pytest.raises(
        AccessDenied, match=f"s3://{store.bucket} at http.*Check access_key_id"
    ) as c:
        other.list()
    assert secret not in str(c.value)
    assert not c.value.retryable


def test_missing_bucket_is_source_missing_for_each_call(client, cache, tmp_path):
    store = S3Store(client, "no-such-bucket")
    files = write_files(tmp_path / "results", {"a": b"1"})
    for call in (
        lambda: stage(store, cache, tmp_path / "data"),
        lambda: publish(files, store, "p"),
        lambda: store.put_bytes("a", b"1"),
        lambda: store.exists("a"),
    ):
        with pytest.raises(SourceMissing, match="s3://no-such-bucket.* at http.*no such bucket"):
            call()


def test_empty_prefix_and_missing_object_are_source_missing(store, cache, tmp_path):
    with pytest.raises(SourceMissing, match="holds no objects"):
        stage(store, cache, tmp_path / "data")
    with pytest.raises(SourceMissing, match="a prefix/nothing"):
        store.read_bytes("nothing")


def test_dead_endpoint_is_retryable(cache, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = S3Store(s3_client(f"http://127.0.0.1:{port}", "k", "s"), "bucket")
    with pytest.raises(StagingError, match="Check that the service runs") as caught:
        stage(store, cache, tmp_path / "data")
    assert type(caught.value) is StagingError and caught.value.retryable


@pytest.mark.parametrize("size", [40_000, 17 * MIB])
def test_damaged_download_is_detected_and_nothing_of_it_stays(ceph, keys, store, tmp_path, size):
    content = (PATTERN + bytes(size))[:size]
    publish(write_files(tmp_path / "results", {"f": content}), store)
    cache = Cache(tmp_path / "cache")
    with DamagingProxy(ceph.endpoint_url, PATTERN, "down") as proxy:
        near = S3Store(s3_client(proxy.endpoint_url, *keys), store.bucket, "a prefix")
        with pytest.raises(TransferCorrupt, match="a prefix/.*f at http.* sha256 is "):
            stage(near, cache, tmp_path / "data")
    assert proxy.damaged == 2
    assert not (tmp_path / "data").exists()
    assert not any(content[:9] in blob for blob in files_below(tmp_path / "cache").values())


def test_cut_download_is_retryable_and_leaves_no_part(
    ceph, keys, store, cache, tmp_path, monkeypatch
):
    monkeypatch.setattr("ddl_airflow.storage.retries._FIRST_WAIT_S", 0.01)
    store.put_bytes("f", bytes(200_000) + PATTERN + bytes(200_000))
    with DamagingProxy(ceph.endpoint_url, PATTERN, "down", cut=True) as proxy:
        near = S3Store(s3_client(proxy.endpoint_url, *keys), store.bucket, "a prefix")
        with pytest.raises(StagingError, match="a prefix/.*f at http") as caught:
            stage(near, cache, tmp_path / "data")
    assert caught.value.retryable and proxy.damaged
    assert files_below(tmp_path / "cache" / "blobs") == {}


@pytest.mark.parametrize("size", [40_000, 17 * MIB])
def test_damaged_upload_is_detected_and_withdrawn(ceph, keys, store, tmp_path, size):
    files = write_files(tmp_path / "results", {"f": (PATTERN + bytes(size))[:size], "g": b"g"})
    with DamagingProxy(ceph.endpoint_url, PATTERN, "up") as proxy:
        near = S3Store(s3_client(proxy.endpoint_url, *keys), store.bucket, "a prefix")
        with pytest.raises(TransferCorrupt, match="a prefix/.*/f at http"):
            publish(files, near)
    assert proxy.damaged
    assert store.list() == []


def test_object_replaced_after_listing_is_not_mixed(store, tmp_path):
    store.put_bytes("f", b"one")
    (obj,) = store.list()
    store.put_bytes("f", b"two")
    with pytest.raises(TransferCorrupt, match="changed since it was listed"):
        store.get(obj, tmp_path / "f", lambda nbytes: None)


def test_publish_twice_sends_once_and_changed_content_goes_elsewhere(store, client, tmp_path):
    files = write_files(tmp_path / "results", {"a": b"1", "b/c": bytes(17 * MIB)})
    first = publish(files, store, "m")
    before = {o.key: o.modified for o in store.list()}
    assert publish(files, store, "m") == first
    assert {o.key: o.modified for o in store.list()} == before
    files = write_files(tmp_path / "results", {"a": b"2", "d": b"3"})
    second = publish(files, store, "m")
    assert [o.key for o in store.at(f"m/{second.name}").list()] == ["_SUCCESS", "a", "d"]
    assert missing_from(store.at(f"m/{first.name}")) == []


def test_unfinished_uploads_of_ours_are_cleaned_and_no_others(store, client, tmp_path):
    ours = f"digits-{'0' * 32}/{'a' * 16}-{'b' * 8}/model/graph"
    begun = {}
    for key in (ours, "of another program", "digits-1/notes"):
        name = {"Bucket": store.bucket, "Key": f"{store.prefix}/{key}"}
        name["UploadId"] = client.create_multipart_upload(**name)["UploadId"]
        client.upload_part(PartNumber=1, Body=bytes(5 * MIB), **name)
        begun[key] = name["UploadId"]
    assert {one.key: one.token for one in store.unfinished()} == begun
    assert list(clean_results(store)) == []  # they may be under way
    (gone,) = clean_results(store, now=lambda: time.time() + 3 * 86400)
    assert (gone.what, gone.place) == ("unfinished upload", f"{store.uri}/{ours}")
    assert begun.pop(ours)
    assert {one.key: one.token for one in store.unfinished()} == begun
    store.discard(Unfinished(ours, 0.0, 0, "not there any more"))


def test_pointers_are_replaced_on_conditions(store, client):
    """In whichever form the gateway takes the ETag."""
    assert store.read_version("p.json") is None
    assert store.put_if("p.json", b"1", None)
    assert not store.put_if("p.json", b"2", None)
    body, version = store.read_version("p.json")
    assert body == b"1" and store.put_if("p.json", b"3", version)
    assert not store.put_if("p.json", b"4", version)

    def pointed(n):
        point(store, "many", PRODUCTION, f"many-{n}/{n}-0", {})

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(pointed, range(20)))
    history = read_pointer(store, "many", PRODUCTION)["history"]
    assert len({event["training_id"] for event in history}) == len(history) == 20


def test_a_pointer_names_a_whole_model_while_processes_are_killed(ceph):
    """Some of the 200 kills of `python -m tests.soak.publications`: tests/soak/README.md."""
    command = [sys.executable, "-m", "tests.soak.publications", "--kills", "5", "--seed", "7"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=within(300))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "; 0 faults" in ran.stdout


def test_publish_beyond_the_quota_leaves_no_object(ceph, tmp_path):
    client = s3_client(ceph.endpoint_url, *ceph.add_user("limited"))
    client.create_bucket(Bucket="limited")
    ceph.limit_objects("limited", 3)
    store = S3Store(client, "limited")
    files = write_files(tmp_path / "results", {f"f{n}": bytes([n]) * 1000 for n in range(8)})
    with pytest.raises(NoSpace, match=r"s3://limited/m/.*/f\d at http.*1,000 bytes to store"):
        publish(files, store, "m", workers=2)
    assert store.list() == []


def test_publish_by_a_reader_is_denied_and_changes_nothing(ceph, client, store, tmp_path):
    reader = s3_client(ceph.endpoint_url, *ceph.add_user("reader"))
    store.put_bytes("theirs", b"1")
    rights = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"AWS": ["arn:aws:iam:::user/reader"]},
                "Action": ["s3:ListBucket", "s3:GetObject"],
                "Resource": [f"arn:aws:s3:::{store.bucket}", f"arn:aws:s3:::{store.bucket}/*"],
            }
        ],
    }
    client.put_bucket_policy(Bucket=store.bucket, Policy=json.dumps(rights))
    theirs = S3Store(reader, store.bucket, "a prefix")
    assert theirs.read_bytes("theirs") == b"1"
    files = write_files(tmp_path / "results", {"a": b"1", "b": bytes(17 * MIB)})
    with pytest.raises(AccessDenied, match="for results write and delete") as caught:
        publish(files, theirs)
    assert "Could not remove" not in str(caught.value)
    assert [o.key for o in store.list()] == ["theirs"]


def test_who_may_list_and_not_read_gets_nothing_from_the_cache(
    ceph, client, store, cache, tmp_path
):
    store.put_bytes("theirs", b"1")
    stage(store, cache, tmp_path / "of-the-owner")
    pair = ceph.add_user("lister")
    rights = {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Principal": {"AWS": ["arn:aws:iam:::user/lister"]},
                "Action": ["s3:ListBucket"],
                "Resource": [f"arn:aws:s3:::{store.bucket}"],
            }
        ],
    }
    client.put_bucket_policy(Bucket=store.bucket, Policy=json.dumps(rights))
    keys = s3_client(ceph.endpoint_url, *pair)
    for theirs in (
        S3Store(keys, store.bucket, "a prefix"),
        S3Store(keys, store.bucket, "a prefix", pair[0]),
    ):
        assert [obj.key for obj in theirs.list()] == ["theirs"]
        with pytest.raises(AccessDenied):
            stage(theirs, cache, tmp_path / "of-the-lister")
    assert not (tmp_path / "of-the-lister").exists()
    assert stage(store, cache, tmp_path / "of-the-owner-again").reused == 1


def test_publish_that_a_signal_ends_stops_soon_and_leaves_nothing(store, client, tmp_path):
    class Killed(BaseException):
        pass

    def end(number, frame):
        raise Killed

    def kill_when_under_way(done, nbytes, done_files, files):
        if done > 10 * MIB:
            os.kill(os.getpid(), signal.SIGUSR1)

    files = write_files(tmp_path / "results", {"a": b"1", "big": bytes(200 * MIB)})
    before = signal.signal(signal.SIGUSR1, end)
    try:
        with pytest.raises(Killed):
            publish(files, store, "m", progress=kill_when_under_way)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert store.list() == []
    assert "Uploads" not in client.list_multipart_uploads(Bucket=store.bucket)
    assert not any(thread.name.startswith("ddl-transfer") for thread in threading.enumerate())


def test_stage_onto_a_small_disk_fails_before_it_fetches(store, tmp_path):
    store.put_bytes("f", bytes(3 * MIB))
    with tiny_disk(tmp_path / "disk", 2 * MIB) as disk:
        with pytest.raises(NoSpace, match=r"needs 3,145,728 bytes, 2,\d+,\d+ are free"):
            stage(store, Cache(disk / "cache"), tmp_path / "data")
        assert files_below(disk) == {"cache/.in-use": b""}


def test_disk_that_fills_up_while_writing_is_no_space_and_leaves_no_part(store, tmp_path):
    obj = store.put_bytes("f", bytes(3 * MIB))
    with tiny_disk(tmp_path / "disk", 2 * MIB) as disk:
        cache = Cache(disk / "cache")
        with pytest.raises(NoSpace, match="3,145,728 bytes to write"):
            cache.fetch(store, obj, lambda nbytes: None)
        assert list((disk / "cache" / "blobs").rglob("*.part")) == []
        files = write_files(tmp_path / "results", {"a": b"1", "b": bytes(3 * MIB)})
        with pytest.raises(NoSpace, match="disk/out"):
            publish(files, FolderStore(disk / "out"), "m")
        assert list((disk / "out").iterdir()) == []


STAGE_ALONE = """
import sys
from pathlib import Path
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.staging import stage
endpoint, key, secret, bucket, cache, destination = sys.argv[1:]
store = S3Store(s3_client(endpoint, key, secret), bucket, "a prefix")
print(stage(store, Cache(cache), Path(destination)).fetched)
"""


def test_processes_share_a_cache_and_fetch_each_object_once(ceph, keys, store, tmp_path):
    for number in range(30):
        store.put_bytes(f"{number}", os.urandom(MIB // 4))
    command = [sys.executable, "-c", STAGE_ALONE, ceph.endpoint_url, *keys, store.bucket]
    runs = [
        subprocess.Popen(
            [*command, str(tmp_path / "cache"), str(tmp_path / f"data{n}")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(3)
    ]
    fetched = [int(run.communicate(timeout=within(60))[0]) for run in runs]
    assert sum(fetched) == 30
    assert files_below(tmp_path / "data0") == files_below(tmp_path / "data2")


def test_ceph_leaves_no_process_and_no_file(tmp_path):
    if reason := available():
        pytest.skip(reason)
    with CephObjectStore(tmp_path / "store") as ceph:
        pids = ceph.pids
        assert len(pids) == 3 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not (tmp_path / "store").exists()
