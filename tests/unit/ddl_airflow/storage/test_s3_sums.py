"""What goes with the bytes that are sent: an MD5, or a CRC where the service compares it.

moto, which compares neither, stands behind a proxy that does. What Ceph does is in
tests/integration/test_upload_faults.py.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from botocore.exceptions import ClientError
from botocore.httpchecksum import CrtCrc64NvmeChecksum

from ddl_airflow.core.errors import ConnectionInvalid, TransferCorrupt
from ddl_airflow.storage import checksums, s3_put
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.s3_put import Earlier
from ddl_airflow.storage.s3_sums import told_sums
from tests.integration.faulty_proxy import FaultyProxy

MIB = 2**20
CRC, MD5 = "x-amz-checksum-crc64nvme", "content-md5"
SIZES = {"small": MIB + 7, "large": 2 * MIB + 7}  # in one request; in three parts


@pytest.fixture(autouse=True)
def in_small_parts(monkeypatch, request):
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr("ddl_airflow.storage.retries._FIRST_WAIT_S", 0.01)


@contextmanager
def through(endpoint_url, faults, monkeypatch, size, **how):
    """A store behind a proxy, of which nobody knows anything."""
    monkeypatch.setattr(s3_put, "PART_SIZE", MIB if size == "large" else 16 * MIB)

    def of_writes(method, path):
        return method in ("PUT", "POST") and path.startswith("/bucket/")

    with FaultyProxy(endpoint_url, faults, of_writes, **how) as proxy:
        client = s3_client(proxy.endpoint_url, "key", "secret", "us-east-1")
        client.create_bucket(Bucket="bucket")
        yield S3Store(client, "bucket", "p"), proxy
        client.close()


def content_of(size, seed=0):
    return random.Random(f"{size} {seed}").randbytes(SIZES[size])


def put(store, folder, key, content):
    path = folder / "file"
    path.write_bytes(content)
    return store.put(path, key, hashlib.sha256(content).hexdigest(), lambda nbytes: None)


def shown(store, folder, monkeypatch):
    """Has the service show what it does, by a first upload in parts."""
    with monkeypatch.context() as parts:
        parts.setattr(s3_put, "PART_SIZE", MIB)
        put(store, folder, "shown", content_of("large"))


def two_go_up_and_down(store, folder, size):
    for number in range(2):
        content = content_of(size, number)
        obj = put(store, folder, f"{size}{number}", content)
        read = []
        store.read(obj, read.append)
        assert b"".join(read) == content


def told(store, key):
    """By moto, of what it has."""
    head = store._client.head_object(Bucket="bucket", Key=f"p/{key}", ChecksumMode="ENABLED")
    return head["ChecksumCRC64NVME"]


@pytest.mark.parametrize("size", SIZES)
def test_a_service_that_compares_crcs_gets_no_md5(endpoint_url, tmp_path, monkeypatch, size):
    with through(endpoint_url, {}, monkeypatch, size, compares=True) as (store, proxy):
        shown(store, tmp_path, monkeypatch)
        # With few bytes it has to show that it refuses a wrong one and takes the right one, once.
        took = [one.took for one in proxy.asked if one.method == "PUT"]
        assert took.count(len(b"wrong")) == 2 and len(took) == 2 + 3
        proxy.begin({})
        for number in range(2):
            content = content_of(size, number)
            with monkeypatch.context() as slow:
                slow.setattr(s3_put, "_digest", no_md5(s3_put._digest))
                obj = put(store, tmp_path, f"{size}{number}", content)
            assert obj in store.list()
            assert told(store, f"{size}{number}") == CrtCrc64NvmeChecksum().handle(content)
            read = []
            store.read(obj, read.append)
            assert b"".join(read) == content
        sent = [one for one in proxy.asked if one.method == "PUT"]
        assert list(store.unfinished()) == []
    assert len(sent) == (2 if size == "small" else 6)
    assert all(CRC in one.headers and MD5 not in one.headers for one in sent)


def no_md5(digest):
    def checked(by, body):
        assert by != "md5"
        return digest(by, body)

    return checked


@pytest.mark.parametrize("size", SIZES)
def test_a_service_that_only_answers_what_was_sent_gets_md5s(
    endpoint_url, tmp_path, monkeypatch, size
):
    """Its answer has the checksum of bytes that it has not looked at."""
    with through(endpoint_url, {}, monkeypatch, size) as (store, proxy):
        shown(store, tmp_path, monkeypatch)
        for number in range(2):
            put(store, tmp_path, f"{size}{number}", content_of(size, number))
        sent = [one for one in proxy.asked if one.method == "PUT"]
        assert sent.pop(0).took == len(b"wrong")
        assert all(MD5 in one.headers and CRC not in one.headers for one in sent)
        assert list(store.unfinished()) == []
        proxy.begin({None: "sent changed"})
        with pytest.raises(TransferCorrupt, match=f"p/{size}2 at http.*stored with ETag"):
            put(store, tmp_path, f"{size}2", content_of(size, 2))
        assert list(store.unfinished()) == []


@pytest.mark.parametrize("size", SIZES)
def test_bytes_that_are_changed_on_the_way_to_a_service_that_compares_crcs_are_sent_once_more(
    endpoint_url, tmp_path, monkeypatch, size
):
    with through(endpoint_url, {}, monkeypatch, size, compares=True) as (store, proxy):
        shown(store, tmp_path, monkeypatch)
        writes = 1 if size == "small" else 5
        for index in range(writes):
            if size == "large" and index in (0, 4):  # which have no bytes of the file
                continue
            proxy.begin({index: "sent changed"})
            obj = put(store, tmp_path, f"{size}{index}", content_of(size, index))
            assert proxy.placed == 1 and len(proxy.asked) >= writes + (index < 4)
            assert told(store, f"{size}{index}") == CrtCrc64NvmeChecksum().handle(
                content_of(size, index)
            )
            assert obj in store.list()
        proxy.begin({None: "sent changed"})
        with pytest.raises(TransferCorrupt, match="p/wrong at http.*BadDigest"):
            put(store, tmp_path, "wrong", content_of(size))
        assert not store.exists("wrong") and list(store.unfinished()) == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("header", ["x-amz-checksum-algorithm", CRC])
@pytest.mark.parametrize("fault", ["400", "501"])
def test_a_service_that_refuses_checksums_gets_md5s(
    endpoint_url, tmp_path, monkeypatch, size, header, fault
):
    refuse = {"compares": True, "with_header": {header: fault}}
    with through(endpoint_url, {}, monkeypatch, size, **refuse) as (store, proxy):
        shown(store, tmp_path, monkeypatch)
        two_go_up_and_down(store, tmp_path, size)
        assert proxy.placed == 1 and list(store.unfinished()) == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", ["400", "501"])
def test_a_service_that_refuses_checksums_later_gets_md5s(
    endpoint_url, tmp_path, monkeypatch, size, fault
):
    """Of a bucket, say, that wants MD5s; or by an older one of its servers."""
    with through(endpoint_url, {}, monkeypatch, size, compares=True) as (store, proxy):
        shown(store, tmp_path, monkeypatch)
        proxy._with_header = {CRC: fault}
        two_go_up_and_down(store, tmp_path, size)
        assert list(store.unfinished()) == []


@pytest.mark.parametrize("told", ["right", "wrong", "nothing"])
def test_parts_that_came_earlier_are_held_to_their_crcs(endpoint_url, tmp_path, monkeypatch, told):
    """Those of which nothing is told are sent again; an upload of another file is left alone."""
    content = content_of("large")
    parts = [content[:MIB], content[MIB : 2 * MIB], content[2 * MIB :]]

    def as_amazon(parsed, **_):
        parsed["ChecksumAlgorithm"] = "CRC64NVME"
        for part in parsed.get("Parts", ()):
            body = parts[part["PartNumber"] - 1] if told == "right" else b"other"
            if told != "nothing":
                part["ChecksumCRC64NVME"] = CrtCrc64NvmeChecksum().handle(body)

    with through(endpoint_url, {}, monkeypatch, "large", compares=True) as (store, proxy):
        sha256, client = hashlib.sha256(content).hexdigest(), store._client
        name = {"Bucket": "bucket", "Key": f"p/left-{told}"}
        name["UploadId"] = client.create_multipart_upload(
            **name, ChecksumAlgorithm="CRC64NVME", Metadata={"ddl-sha256": sha256}
        )["UploadId"]
        for number in (1, 2):
            client.upload_part(
                **name, PartNumber=number, Body=parts[number - 1], ChecksumAlgorithm="CRC64NVME"
            )
        client.meta.events.register("after-call.s3.ListParts", as_amazon)
        (path := tmp_path / "file").write_bytes(content)
        proxy.begin({})
        left = [Earlier(name["Key"], upload=name["UploadId"])]
        store._target(f"p/{told}").put(path, sha256, lambda nbytes: None, left)
        read = []
        store.read(next(one for one in store.list() if one.key == f"p/{told}"), read.append)
        assert b"".join(read) == content
        sent = [one for one in proxy.asked if one.method == "PUT" and not one.source]
        took = sorted(one.took for one in sent)
        if told == "wrong":  # some may have gone to the other upload by then
            assert took[-2:] == [MIB, MIB]
        else:  # by a few bytes the service shows first that it compares them
            again = [7] if told == "right" else [7, MIB, MIB]
            assert took == [len(b"wrong")] * 2 + again
        assert all(CRC in one.headers for one in sent)


def test_a_service_that_takes_no_crc_of_ours_gets_md5s(endpoint_url, tmp_path, monkeypatch):
    """Say, of another polynomial: it refuses what is right as well."""
    with through(endpoint_url, {}, monkeypatch, "large", compares=True) as (store, proxy):
        written = s3_put._said

        def other(by, digest):
            return written(by, bytes([digest[0] ^ 1]) + digest[1:] if by != "md5" else digest)

        monkeypatch.setattr(s3_put, "_said", other)
        obj = put(store, tmp_path, "large", content_of("large"))
        read = []
        store.read(obj, read.append)
        assert b"".join(read) == content_of("large")
        assert not [one for one in store.unfinished() if one.key == "large"]


def test_an_end_whose_answer_was_lost_is_looked_at_and_not_sent_again(
    endpoint_url, tmp_path, monkeypatch
):
    with through(endpoint_url, {}, monkeypatch, "large", compares=True) as (store, proxy):
        shown(store, tmp_path, monkeypatch)
        end = store._client.complete_multipart_upload

        def lost(**parameters):
            end(**parameters)
            answer = {"Error": {"Code": "InvalidPart"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
            raise ClientError(answer, "CompleteMultipartUpload")

        monkeypatch.setattr(store._client, "complete_multipart_upload", lost)
        proxy.begin({})
        put(store, tmp_path, "large", content_of("large"))
        sent = [one for one in proxy.asked if one.method == "PUT"]
        assert len(sent) == 3 and all(CRC in one.headers for one in sent)


def test_who_goes_on_with_a_file_waits_until_it_is_known_what_the_service_does(
    endpoint_url, tmp_path, monkeypatch
):
    with through(endpoint_url, {}, monkeypatch, "large", compares=True) as (store, proxy):
        compares, at_once = s3_put.S3Target._compares, []

        def slow(target, begun):
            at_once.append(begun.key)
            time.sleep(0.3)
            return compares(target, begun)

        monkeypatch.setattr(s3_put.S3Target, "_compares", slow)
        targets = [store._target(f"p/{number}") for number in range(4)]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda one: one._try_sums("0" * 64), targets))
        assert len(at_once) == 1 and targets[3]._sums.checks is True
        assert not {one.key for one in store.unfinished()} & {f"p/{number}" for number in range(4)}


def test_without_the_library_data_without_such_checksums_are_read(monkeypatch):
    monkeypatch.setitem(sys.modules, "awscrt", None)
    assert told_sums({"ETag": '"x"'}) == {}
    with pytest.raises(ConnectionInvalid, match="need the package awscrt.*pip install awscrt"):
        checksums.new("crc64nvme")
