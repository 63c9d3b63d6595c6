"""Error mapping, and what only some services do.

Integrity and access are shown on a real service, in tests/integration/test_storage.py: moto
checks neither digests nor keys.
"""

from __future__ import annotations

import base64
import hashlib
import io
import random
import zlib
from contextlib import contextmanager
from functools import partial

import botocore.exceptions as aws
import pytest
from botocore.awsrequest import AWSResponse
from botocore.credentials import RefreshableCredentials
from botocore.stub import Stubber

from ddl_airflow.core.errors import (
    AccessDenied,
    ConnectionInvalid,
    NoSpace,
    ObjectArchived,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.storage import checksums
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.publication import missing_from, publish, unfinished_in
from ddl_airflow.storage.retries import Retries
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client, s3_config, s3_errors
from ddl_airflow.storage.staging import stage
from ddl_airflow.storage.store import PIECE, SUCCESS, StoredObject
from tests.integration.faulty_proxy import FaultyProxy

MIB = 1024 * 1024


def ignore(nbytes):
    pass


@pytest.fixture(scope="module")
def client(endpoint_url):
    client = s3_client(endpoint_url, "key", "secret", "us-east-1")
    client.create_bucket(Bucket="bucket")
    yield client
    client.close()


def upload_parts(client, key, parts):
    """A multipart upload by another program, with parts of any sizes."""
    upload = {"Bucket": "bucket", "Key": key}
    upload["UploadId"] = client.create_multipart_upload(**upload)["UploadId"]
    done = [
        {"PartNumber": n, "ETag": client.upload_part(PartNumber=n, Body=part, **upload)["ETag"]}
        for n, part in enumerate(parts, 1)
    ]
    client.complete_multipart_upload(MultipartUpload={"Parts": done}, **upload)


def test_names_are_what_keys_begin_with_over_all_pages(client, monkeypatch):
    keys = {f"trainings/t{n % 7} +é&/{n}" for n in range(30)} | {"trainings/file", "trainings2/x"}
    for key in keys:
        client.put_object(Bucket="bucket", Key=key, Body=b"")
    store, paginate = S3Store(client, "bucket", "trainings"), client.get_paginator
    monkeypatch.setattr(client, "get_paginator", lambda name: Pages(paginate(name)))
    assert store.names() == ["file", *(f"t{n} +é&" for n in range(7))]
    assert S3Store(client, "bucket", "nothing").names() == []
    with pytest.raises(SourceMissing):
        S3Store(client, "none").names()


class Pages:
    """Small ones."""

    def __init__(self, paginator):
        self.paginator = paginator

    def paginate(self, **how):
        return self.paginator.paginate(**how, PaginationConfig={"PageSize": 3})


def test_object_of_odd_parts_is_checked_where_the_service_tells_the_part_size(client, tmp_path):
    parts = [bytes([n]) * size for n, size in enumerate([7 * MIB, 7 * MIB, 5])]
    upload_parts(client, "odd/parts", parts)
    store = S3Store(client, "bucket", "odd")
    (obj,) = store.list()
    assert store.get(obj, tmp_path / "f.part", ignore).checked == "md5-of-parts"
    assert (tmp_path / "f.part").read_bytes() == b"".join(parts)


@pytest.mark.parametrize(
    ("sizes", "checked"),
    [
        ([8000, 6000, 4000], "md5-of-parts"),  # as many as there would be of 8000 each
        ([4000, 8000], "md5-of-parts"),
        ([7 * MIB, 6 * MIB, 5 * MIB, 5 * MIB], "md5-of-parts"),  # more than a piece
        ([8000, 8000, 8000, 8000, 10], "md5-of-parts"),
        ([8000, 6000, 10000, 4000], "size"),  # the last as if all others were of 8000
    ],
)
def test_object_whose_parts_differ_in_size_is_not_taken_for_damaged(
    client, tmp_path, monkeypatch, sizes, checked
):
    """s3fs writes such ones: a part for each flush."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    parts = [bytes([n]) * size for n, size in enumerate(sizes)]
    upload_parts(client, "unequal/parts", parts)
    store, read = S3Store(client, "bucket", "unequal"), []
    (obj,) = store.list()
    assert store.get(obj, tmp_path / "f.part", ignore).checked == checked
    assert (tmp_path / "f.part").read_bytes() == b"".join(parts)
    assert store.read(obj, read.append) == checked and b"".join(read) == b"".join(parts)
    if checked == "size":
        return
    with FaultyProxy(
        client.meta.endpoint_url,
        {None: "changed"},
        lambda method, path: method == "GET" and path.endswith("parts"),
    ) as proxy:
        damaging = s3_client(proxy.endpoint_url, "key", "secret", "us-east-1")
        store = S3Store(damaging, "bucket", "unequal")
        with pytest.raises(TransferCorrupt, match="unequal/parts at .*md5-of-parts is .* twice"):
            store.get(obj, tmp_path / "g.part", ignore)
        damaging.close()


def answers_parts_with(client, monkeypatch, status, times, first=1):
    """The service's answer where it is asked for a part's size, so often for each from the first
    on.
    """
    left, head = {}, client.head_object

    def answer(**name):
        number = name.get("PartNumber", 0)
        if number >= first and left.setdefault(number, times):
            left[number] -= 1
            said = {"Error": {"Code": str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise aws.ClientError(said, "HeadObject")
        return head(**name)

    monkeypatch.setattr(client, "head_object", answer)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_service_that_is_busy_for_a_moment_is_asked_for_part_sizes_again(
    client, tmp_path, monkeypatch, status
):
    """It counted as one that tells none: there was no proof, or good bytes counted as damaged."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    for kind, sizes, first, checked in (
        ("odd", [7 * MIB, 7 * MIB, 5], 1, "md5-of-parts"),
        ("unequal", [8000, 6000, 10000, 4000], 2, "size"),
    ):
        parts = [bytes([n]) * size for n, size in enumerate(sizes)]
        upload_parts(client, f"busy-{kind}/parts", parts)
        with monkeypatch.context() as busy:
            answers_parts_with(client, busy, status, 2, first)
            store = S3Store(client, "bucket", f"busy-{kind}")
            (obj,) = store.list()
            assert store.get(obj, tmp_path / f"{kind}.part", ignore).checked == checked
    answers_parts_with(client, monkeypatch, status, 1000)
    monkeypatch.setattr("ddl_airflow.storage.retries.TRIES", 2)
    with pytest.raises(StagingError, match=rf"busy-odd/parts.*\({status}\).*in 2 tries") as caught:
        store = S3Store(client, "bucket", "busy-odd")
        store.get(*store.list(), tmp_path / "g.part", ignore)
    assert caught.value.retryable


@pytest.mark.parametrize("status", [400, 403, 404, 416, 501])
def test_a_service_that_tells_no_part_sizes_leaves_the_size(client, tmp_path, monkeypatch, status):
    upload_parts(client, "untold/parts", [bytes(7 * MIB), bytes(7 * MIB), b"12345"])
    answers_parts_with(client, monkeypatch, status, 1000)
    store = S3Store(client, "bucket", "untold")
    (obj,) = store.list()
    assert store.get(obj, tmp_path / "f.part", ignore).checked == "size"


def test_object_encrypted_with_a_service_key_is_checked_by_size_or_our_digest(client, tmp_path):
    options = {"Bucket": "bucket", "ServerSideEncryption": "aws:kms", "Body": b"content"}
    client.put_object(Key="kms/foreign", **options)
    client.put_object(
        Key="kms/ours", Metadata={"ddl-sha256": hashlib.sha256(b"content").hexdigest()}, **options
    )
    store = S3Store(client, "bucket", "kms")
    checks = [store.get(obj, tmp_path / obj.key, ignore).checked for obj in store.list()]
    assert checks == ["size", "sha256"]


CHECKSUMS = ["crc64nvme", "crc32c", "crc32", "sha256", "sha1"]


def put_with_checksum(client, key, content, algorithm, **how):
    """As boto3 sends it."""
    how |= {"Body": content, "ChecksumAlgorithm": algorithm.upper()}
    client.put_object(Bucket="bucket", Key=key, **how)


@contextmanager
def through(client, faults, key, **how):
    """A store behind a proxy that puts faults at what is asked of one object."""
    counted = partial(is_asked_for, key)
    with FaultyProxy(client.meta.endpoint_url, faults, counted, **how) as proxy:
        near = s3_client(proxy.endpoint_url, "key", "secret", "us-east-1")
        yield S3Store(near, "bucket", key.partition("/")[0]), proxy
        near.close()


def is_asked_for(key, method, path):
    return method in ("GET", "HEAD") and path == f"/bucket/{key}"


@pytest.mark.parametrize("size", [9, PIECE + 9])
@pytest.mark.parametrize("algorithm", CHECKSUMS)
def test_an_object_whose_etag_is_no_md5_is_held_to_its_checksum(client, tmp_path, algorithm, size):
    content = random.Random(size).randbytes(size)
    kms = {"ServerSideEncryption": "aws:kms"}
    put_with_checksum(client, "summed/f", content, algorithm, **kms)
    first = 0 if size == 9 else 2  # the first request only looks at a large object
    with through(client, {first: "changed"}, "summed/f") as (store, proxy):
        (obj,) = store.list()
        assert store.get(obj, tmp_path / "f.part", ignore).checked == algorithm
        assert (tmp_path / "f.part").read_bytes() == content and proxy.placed == 1
        read = []
        assert store.read(obj, read.append) == algorithm and b"".join(read) == content
    refused = pytest.raises(TransferCorrupt, match=f"summed/f at .*{algorithm} is .* twice")
    with through(client, {None: "changed"}, "summed/f") as (store, _), refused:
        store.get(obj, tmp_path / "g.part", ignore)


def test_a_large_object_with_a_crc_needs_no_other_digest(client, tmp_path, monkeypatch):
    content = random.Random("crc").randbytes(3 * PIECE + 5)
    put_with_checksum(client, "fast/f", content, "crc64nvme")
    slow, new = [], hashlib.new
    for name in ("md5", "sha256"):
        monkeypatch.setattr(hashlib, name, lambda *a, name=name, **_: slow.append(a) or new(name))
    store = S3Store(client, "bucket", "fast")
    (obj,) = store.list()
    done = store.get(obj, tmp_path / "f.part", ignore)
    assert max((len(a[0]) for a in slow if a), default=0) < 10_000  # what requests are signed by
    assert (done.checked, done.algorithm, done.piece_size) == ("crc64nvme", "crc64nvme", PIECE)
    crc = checksums.new("crc64nvme")
    crc.update(content)
    assert done.proved == {"crc64nvme": crc.hexdigest()}
    assert (tmp_path / "f.part").read_bytes() == content


@pytest.mark.parametrize("algorithm", ["crc32", "crc32c", "sha256"])
def test_parts_of_an_encrypted_object_are_held_to_the_checksum_of_their_checksums(
    client, tmp_path, algorithm
):
    parts = [bytes([n]) * size for n, size in enumerate([7 * MIB, 7 * MIB, 7 * MIB])]
    name = {"Bucket": "bucket", "Key": "composed/f"}
    upload = name | {
        "UploadId": client.create_multipart_upload(
            **name, ChecksumAlgorithm=algorithm.upper(), ServerSideEncryption="aws:kms"
        )["UploadId"]
    }
    done = []
    for number, part in enumerate(parts, 1):
        sent = client.upload_part(
            PartNumber=number, Body=part, ChecksumAlgorithm=algorithm.upper(), **upload
        )
        done.append({"PartNumber": number, "ETag": sent["ETag"]})
    client.complete_multipart_upload(MultipartUpload={"Parts": done}, **upload)
    of_parts = []
    for part in parts:
        of_parts.append(checksums.new(algorithm))
        of_parts[-1].update(part)
    of_all = checksums.new(algorithm)
    of_all.update(b"".join(one.digest() for one in of_parts))

    def as_amazon(parsed, **_):
        """moto's HEAD says neither the type nor how many parts; nor has it a CRC32C of its own."""
        value = base64.b64encode(of_all.digest()).decode()
        parsed |= {f"Checksum{algorithm.upper()}": f"{value}-3", "ChecksumType": "COMPOSITE"}

    with through(client, {None: ""}, "composed/f") as (store, _):
        store._client.meta.events.register("after-call.s3.HeadObject", as_amazon)
        (obj,) = store.list()
        got = store.get(obj, tmp_path / "f.part", ignore)
        assert (got.checked, got.algorithm) == (f"{algorithm}-of-parts", algorithm)
        assert (tmp_path / "f.part").read_bytes() == b"".join(parts)
    with through(client, {None: "changed"}, "composed/f") as (store, _):
        store._client.meta.events.register("after-call.s3.HeadObject", as_amazon)
        with pytest.raises(TransferCorrupt, match=f"{algorithm}-of-parts is .*-3, not .*-3.*twice"):
            store.get(obj, tmp_path / "g.part", ignore)


@pytest.mark.parametrize("size", [9, PIECE + 9])
@pytest.mark.parametrize("fault", ["400", "403", "501"])
def test_a_store_that_refuses_to_tell_checksums_is_asked_without_once(
    client, tmp_path, fault, size
):
    content = bytes(size)
    put_with_checksum(client, "refuses/f", content, "crc64nvme")
    refuse = {"x-amz-checksum-mode": fault}
    with through(client, {}, "refuses/f", with_header=refuse) as (store, proxy):
        (obj,) = store.list()
        for number in range(3):
            path = tmp_path / f"{number}.part"
            assert store.get(obj, path, ignore).checked == "md5"
            assert path.read_bytes() == content
            assert store.at("").read_bytes("f") == content
        assert proxy.placed <= 2  # by boto3, too, where a signed URL is refused


def test_a_checksum_of_which_nobody_knows_what_it_is_of_does_not_decide(client, tmp_path):
    """Of parts, or of all: the service does not say; or it is none."""
    content = bytes(PIECE + 9)
    upload_parts(client, "unclear/f", [content])
    for said in ({"ChecksumCRC32": "AAAAAA=="}, {"ChecksumCRC64NVME": "?"}, {"ChecksumSHA1": "AA"}):
        with through(client, {}, "unclear/f") as (store, _):
            store._client.meta.events.register(
                "after-call.s3.HeadObject", lambda parsed, said=said, **_: parsed.update(said)
            )
            (obj,) = store.list()
            assert store.get(obj, tmp_path / "f.part", ignore).checked == "md5-of-parts"
            (tmp_path / "f.part").unlink()


def test_a_small_object_that_is_read_is_held_to_its_checksum(client):
    """A pointer in a bucket that a key service encrypts: its ETag says nothing of it."""
    kms = {"ServerSideEncryption": "aws:kms"}
    put_with_checksum(client, "pointer/f", b"content", "crc64nvme", **kms)
    with through(client, {0: "changed"}, "pointer/f") as (store, proxy):
        assert store.read_bytes("f") == b"content" and proxy.placed == 1
    refused = pytest.raises(TransferCorrupt, match="pointer/f at .*crc64nvme is ")
    with through(client, {None: "changed"}, "pointer/f") as (store, _), refused:
        store.read_bytes("f")


def test_what_an_etag_was_found_to_be_is_known_of_what_comes_and_of_what_is_cached(
    client, tmp_path
):
    def put(key, body=b"content", **how):
        client.put_object(Bucket="bucket", Key=f"proved/{key}", Body=body, **how)

    put("plain")
    put("large", bytes(PIECE + 1))
    put("kms", ServerSideEncryption="aws:kms")
    digest = hashlib.sha256(b"content").hexdigest()
    put("ours", Metadata={"ddl-sha256": digest})
    put("summed", ServerSideEncryption="aws:kms", ChecksumAlgorithm="CRC32")
    upload_parts(client, "proved/parts", [bytes(7 * MIB), bytes(7 * MIB), bytes(7 * MIB)])
    upload_parts(client, "proved/small", [bytes(6 * MIB), b"end"])
    upload_parts(client, "proved/unequal", [bytes(6 * MIB), bytes(7 * MIB), b"end"])
    known = {
        "kms": {},
        "large": {"etag_is": "md5"},
        "ours": {"sha256": digest},
        "parts": {"etag_is": "md5", "part_size": 7 * MIB},
        "plain": {"etag_is": "md5"},
        "small": {"etag_is": "md5", "part_size": 6 * MIB},
        "summed": {"crc32": f"{zlib.crc32(b'content'):08x}"},
        "unequal": {},
    }
    store, cache = S3Store(client, "bucket", "proved"), Cache(tmp_path / "cache")
    for name, fetched in (("first", len(known)), ("again", 0)):
        staged = stage(store, cache, tmp_path / name)
        assert staged.fetched == fetched
        assert {file.key: file.proved for file in staged.files} == known


def test_content_other_than_its_digest_is_corrupt(client, tmp_path):
    client.put_object(
        Bucket="bucket", Key="wrong/digest", Body=b"x", Metadata={"ddl-sha256": "0" * 64}
    )
    store = S3Store(client, "bucket", "wrong")
    with pytest.raises(TransferCorrupt, match="s3://bucket/wrong/digest at http.*sha256 is 2d711"):
        store.get(store.list()[0], tmp_path / "f", ignore)


@pytest.mark.parametrize("size", [9, 17 * MIB])
def test_upload_that_the_service_took_damaged_is_corrupt(client, tmp_path, size):
    """moto compares no MD5 with what comes."""
    content = bytes(size)
    (tmp_path / "f").write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    with FaultyProxy(
        client.meta.endpoint_url, {None: "sent changed"}, lambda method, path: method == "PUT"
    ) as proxy:
        damaging = s3_client(proxy.endpoint_url, "key", "secret", "us-east-1")
        store = S3Store(damaging, "bucket", "damaged")
        with pytest.raises(TransferCorrupt, match="s3://bucket/damaged/f at .*stored with ETag"):
            store.put(tmp_path / "f", "f", sha256, ignore)
        damaging.close()
    # One to see what the store makes of checksums; of each of two parts, once more.
    assert 2 <= len(proxy.asked) <= 5
    assert list(S3Store(client, "bucket", "damaged").unfinished()) == []
    S3Store(client, "bucket", "damaged").put(tmp_path / "f", "f", sha256, ignore)


def to_archive(client, key, storage_class="GLACIER"):
    """What a rule of the bucket does with what is old."""
    client.copy_object(
        Bucket="bucket", Key=key, CopySource=f"bucket/{key}", StorageClass=storage_class
    )


@pytest.mark.parametrize("storage_class", ["GLACIER", "DEEP_ARCHIVE"])
def test_a_model_in_an_archive_is_not_whole_until_it_is_restored(client, tmp_path, storage_class):
    """Size and ETag were compared, which it keeps: what nobody could read went into production."""
    (tmp_path / "f").write_bytes(b"variables")
    files = dict.fromkeys(["model/graph", "model/variables"], tmp_path / "f")
    store = S3Store(client, "bucket", f"archive-{storage_class}")
    done = publish(files, store)
    place, key = store.at(done.name), f"archive-{storage_class}/{done.name}/model/variables"
    to_archive(client, key, "GLACIER_IR")  # which is read at once
    assert missing_from(place) == []
    to_archive(client, key, storage_class)
    assert missing_from(place) == ["model/variables"]
    again = publish(files, store)
    assert again.name != done.name and missing_from(store.at(again.name)) == []
    client.restore_object(Bucket="bucket", Key=key, RestoreRequest={"Days": 1})
    assert missing_from(place) == []
    to_archive(client, f"archive-{storage_class}/{done.name}/{SUCCESS}", storage_class)
    assert missing_from(place) == [SUCCESS]
    # Nor does that keep anybody from publishing once more.
    to_archive(client, f"archive-{storage_class}/{again.name}/{SUCCESS}", storage_class)
    third = publish(files, store)
    assert third.name not in (done.name, again.name) and publish(files, store) == third


@pytest.mark.parametrize("direct", [True, False])
def test_data_in_an_archive_is_named_with_what_to_do(client, tmp_path, monkeypatch, direct):
    """It was a lack of rights, of keys that have them."""
    if not direct:
        monkeypatch.setattr(S3Store, "_direct", None)
    client.put_object(Bucket="bucket", Key=f"cold-{direct}/a", Body=b"1", StorageClass="GLACIER")
    store = S3Store(client, "bucket", f"cold-{direct}")
    with pytest.raises(ObjectArchived, match=r"/a at .*archived.*Restore it") as caught:
        stage(store, Cache(tmp_path / "cache"), tmp_path / "data")
    assert not caught.value.retryable
    with pytest.raises(ObjectArchived, match=r"/a at .*archived"):
        store.read_bytes("a")
    client.restore_object(Bucket="bucket", Key=f"cold-{direct}/a", RestoreRequest={"Days": 1})
    assert stage(store, Cache(tmp_path / "cache"), tmp_path / "data").fetched == 1


def test_of_what_is_in_an_archive_the_class_is_named_where_the_store_says_it():
    said = {"Code": "InvalidObjectState", "StorageClass": "DEEP_ARCHIVE"}
    answer = {"Error": said, "ResponseMetadata": {"HTTPStatusCode": 403}}
    with (
        pytest.raises(ObjectArchived, match=r"^s3://b/k at .* archived, in storage class DEEP_ARC"),
        s3_errors("s3://b/k", "http://host", 9),
    ):
        raise aws.ClientError(answer, "GetObject")


def test_prefix_is_a_folder_and_not_the_start_of_a_name(client):
    for key in ("mnist/a", "mnist2/b", "mnist"):
        client.put_object(Bucket="bucket", Key=key, Body=b"1")
    assert [o.key for o in S3Store(client, "bucket", "/mnist/").list()] == ["a"]
    store = S3Store(client, "bucket")
    assert store.exists("mnist") and not store.exists("mni") and not store.exists("mnist/")


@pytest.mark.parametrize(
    ("code", "status", "mapped", "retryable"),
    [
        ("NoSuchBucket", 404, SourceMissing, False),
        ("NoSuchKey", 404, SourceMissing, False),
        ("404", 404, SourceMissing, False),
        ("InvalidAccessKeyId", 403, AccessDenied, False),
        ("SignatureDoesNotMatch", 403, AccessDenied, False),
        ("RequestTimeTooSkewed", 403, AccessDenied, False),
        ("QuotaExceeded", 403, NoSpace, True),
        ("InvalidObjectState", 403, ObjectArchived, False),
        ("BadDigest", 400, TransferCorrupt, True),
        ("PreconditionFailed", 412, TransferCorrupt, True),
        ("PermanentRedirect", 301, ConnectionInvalid, False),
        ("SlowDown", 503, StagingError, True),
        ("InternalError", 500, StagingError, True),
        ("MethodNotAllowed", 405, StagingError, False),
    ],
)
def test_service_errors_are_mapped_with_where_and_cause(code, status, mapped, retryable):
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    cause = aws.ClientError(answer, "GetObject")
    with pytest.raises(StagingError) as caught, s3_errors("s3://b/k", "http://host", 9):
        raise cause
    assert type(caught.value) is mapped
    assert caught.value.retryable is retryable
    assert caught.value.__cause__ is cause
    assert str(caught.value).startswith(f"s3://b/k at http://host: {code} ({status})")


@pytest.mark.parametrize(
    ("cause", "mapped", "retryable"),
    [
        (aws.EndpointConnectionError(endpoint_url="http://h"), StagingError, True),
        (aws.ReadTimeoutError(endpoint_url="http://h"), StagingError, True),
        (aws.IncompleteReadError(actual_bytes=1, expected_bytes=2), StagingError, True),
        (aws.ResponseStreamingError(error="reset"), StagingError, True),
        (aws.FlexibleChecksumError(error_msg="crc"), TransferCorrupt, True),
        (aws.NoCredentialsError(), ConnectionInvalid, False),
        (aws.CredentialRetrievalError(provider="p", error_msg="timed out"), StagingError, True),
        (aws.MetadataRetrievalError(error_msg="timed out"), StagingError, True),
        (aws.TokenRetrievalError(provider="p", error_msg="timed out"), StagingError, True),
        (aws.ParamValidationError(report="bucket"), ConnectionInvalid, False),
    ],
)
def test_errors_without_an_answer_are_mapped(cause, mapped, retryable):
    with pytest.raises(StagingError) as caught, s3_errors("s3://b/k", "http://host"):
        raise cause
    assert type(caught.value) is mapped
    assert caught.value.retryable is retryable


def test_keys_that_were_fetched_and_are_old_ones_may_be_new_ones_soon():
    old = {
        "access_key": "a",
        "secret_key": "b",
        "token": "c",
        "expiry_time": "2020-01-01T00:00:00Z",
    }
    known = RefreshableCredentials.create_from_metadata(old, lambda: old, "a metadata service")
    with (
        pytest.raises(StagingError, match="still expired.*could not be fetched") as caught,
        s3_errors("s3://b/k", "http://host"),
    ):
        known.get_frozen_credentials()
    assert caught.value.retryable
    with pytest.raises(RuntimeError, match="ours"), s3_errors("s3://b/k", "http://host"):
        raise RuntimeError("a mistake of ours")


@pytest.mark.parametrize("url", ["localhost:9000", "ftp://h", "http://", "http://h:99999", ""])
def test_client_refuses_an_endpoint_that_is_no_url(url):
    with pytest.raises(ConnectionInvalid, match="Write https://host"):
        s3_client(url, "key", "secret")


def test_client_does_not_show_credentials_written_into_the_endpoint():
    with pytest.raises(ConnectionInvalid, match="holds credentials") as caught:
        s3_client("https://key:hunter2@host", "key", "secret")
    assert "hunter2" not in str(caught.value) and caught.value.__cause__ is None


def test_config_fits_services_other_than_amazons():
    config = s3_config("http://host")
    assert config.s3["addressing_style"] == "path"
    assert config.request_checksum_calculation == "when_required"
    assert config.response_checksum_validation == "when_required"
    assert s3_config(None).s3["addressing_style"] == "auto"


def test_an_object_is_replaced_only_in_the_version_that_was_read(client):
    store = S3Store(client, "bucket", "conditions")
    assert store.read_version("p") is None
    assert store.put_if("p", b"1", None) and not store.put_if("p", b"2", None)
    body, version = store.read_version("p")
    assert body == b"1" and store.put_if("p", b"3", version)
    assert not store.put_if("p", b"4", version)
    assert store.read_bytes("p") == b"3"


class Empty(io.BytesIO):
    """A body as botocore reads it."""

    def stream(self, **_):
        yield self.read()


@pytest.mark.parametrize("kind", ["ignores", "refuses"])
def test_a_service_without_conditions_is_said_and_written_to(client, monkeypatch, caplog, kind):
    monkeypatch.setattr("ddl_airflow.storage.s3._heeds", {})

    def without(params, **_):
        for name in ("If-None-Match", "If-Match"):
            if params["headers"].pop(name, None) and kind == "refuses":
                params["headers"]["x-amz-copy-source-if-match"] = "nonsense"

    def refuse(request, **_):
        if "x-amz-copy-source-if-match" in request.headers:
            return AWSResponse(request.url, 501, {}, Empty())
        return None

    client.meta.events.register("before-call.s3.PutObject", without)
    client.meta.events.register("before-send.s3.PutObject", refuse)
    try:
        store = S3Store(client, "bucket", f"no-conditions-{kind}")
        assert store.put_if("p", b"1", None)
        assert store.put_if("p", b"2", "of long ago")
    finally:
        client.meta.events.unregister("before-call.s3.PutObject", without)
        client.meta.events.unregister("before-send.s3.PutObject", refuse)
    assert store.read_bytes("p") == b"2"
    assert "does not write on all conditions: of two processes" in caplog.text


def test_a_service_that_heeds_one_condition_alone_is_found_out(client, monkeypatch, caplog):
    monkeypatch.setattr("ddl_airflow.storage.s3._heeds", {})

    def without(params, **_):
        params["headers"].pop("If-Match", None)

    client.meta.events.register("before-call.s3.PutObject", without)
    try:
        store = S3Store(client, "bucket", "one-condition")
        assert store.put_if("p", b"1", None) and not store.put_if("p", b"2", None)
        assert store.put_if("p", b"3", "of long ago")
    finally:
        client.meta.events.unregister("before-call.s3.PutObject", without)
    assert store.read_bytes("p") == b"3"
    assert caplog.text.count("does not write on all conditions: of two processes") == 1


@pytest.mark.parametrize("heeds", [True, False])
def test_a_bucket_that_retains_its_objects_takes_pointers(client, monkeypatch, heeds):
    """With Object Lock each body has to come with its digest."""
    monkeypatch.setattr("ddl_airflow.storage.s3._heeds", {})
    bucket = f"retained-{heeds}".lower()
    client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}
    client.put_object_lock_configuration(
        Bucket=bucket,
        ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": rule},
    )

    def ignore_conditions(params, **_):
        for name in ("If-None-Match", "If-Match"):
            params["headers"].pop(name, None)

    if not heeds:
        client.meta.events.register("before-call.s3.PutObject", ignore_conditions)
    try:
        store = S3Store(client, bucket, "results")
        assert store.put_if("p", b"1", None)
        assert store.put_if("p", b"2", store.read_version("p")[1])
    finally:
        client.meta.events.unregister("before-call.s3.PutObject", ignore_conditions)
    assert store.read_bytes("p") == b"2"


def test_access_is_asked_for_with_the_callers_keys(client):
    client.put_object(Bucket="bucket", Key="access/a", Body=b"content")
    store = S3Store(client, "bucket", "access", "K")
    (obj,) = store.list()
    store.check_access(obj)
    with Stubber(client) as stub:
        stub.add_client_error("head_object", "403", http_status_code=403)
        with pytest.raises(AccessDenied, match="access/a"):
            store.check_access(obj)
    assert store.caller == store.at("b").caller != S3Store(client, "bucket", "access", "L").caller
    assert S3Store(client, "bucket", "access").caller == ""


def test_a_listing_is_read_as_botocore_reads_it_and_not_at_all_where_nothing_has_changed(client):
    store = S3Store(client, "bucket", "listed")
    assert store.list() == []
    assert store.list_unless("")[1] == []
    keys = ["a b", "a&b<c>", "a%2Fb", "a+b", "nested/ü", "z" * 200]
    for key in keys:
        store.put_bytes(key, key.encode())
    answer = client.list_objects_v2(Bucket="bucket", Prefix="listed/")  # by somebody else
    expected = sorted(
        StoredObject(
            entry["Key"].removeprefix("listed/"),
            entry["Size"],
            entry["ETag"].strip('"'),
        )
        for entry in answer["Contents"]
    )
    assert [obj.key for obj in expected] == sorted(keys)
    assert store.list() == expected
    times = {entry["Key"]: entry["LastModified"].timestamp() for entry in answer["Contents"]}
    assert {f"listed/{obj.key}": obj.modified for obj in store.list()} == times
    digest, listed = store.list_unless("")
    assert listed == expected and digest
    assert store.list_unless(digest) == (digest, None)
    assert store.exists("a b") and not store.exists("a")
    store.put_bytes("a b", b"other")
    changed, listed = store.list_unless(digest)
    assert changed != digest and listed == store.list() != expected


def test_a_space_is_one_also_where_a_listing_writes_it_as_plus(client, tmp_path):
    """As Amazon does; Source: its API reference, ListObjectsV2, EncodingType."""

    def as_amazon(response_dict, **_):
        response_dict["body"] = response_dict["body"].replace(b"%20", b"+")

    (tmp_path / "f").write_bytes(b"content")
    files = dict.fromkeys(["a b.csv", "a+b.csv", "a%20b.csv"], tmp_path / "f")
    event = "before-parse.s3.ListObjectsV2"
    client.meta.events.register_first(event, as_amazon)
    try:
        store = S3Store(client, "bucket", "spaces")
        done = publish(files, store)
        listed = {obj.key: obj for obj in store.at(done.name).list()}
        assert listed.keys() == {*files, SUCCESS}
        store.at(done.name).get(listed["a b.csv"], tmp_path / "fetched", ignore)
    finally:
        client.meta.events.unregister(event, as_amazon)
    assert (tmp_path / "fetched").read_bytes() == b"content"


@pytest.mark.parametrize(
    ("sent", "damaged"),
    [(b"<Size>", b"<Size>x"), (b"<ETag>", b"<Etag>"), (b"Key>", b"Kay>")],
)
def test_a_listing_that_cannot_be_read_is_named(client, sent, damaged):
    store = S3Store(client, "bucket", "unreadable")
    store.put_bytes("a", b"1")

    def damage(response_dict, **_):
        response_dict["body"] = response_dict["body"].replace(sent, damaged)

    event = "before-parse.s3.ListObjectsV2"
    client.meta.events.register_first(event, damage)
    try:
        with pytest.raises(StagingError, match="^s3://bucket/unreadable at http.*cannot be read: "):
            store.list()
    finally:
        client.meta.events.unregister(event, damage)


@contextmanager
def answers(client, operation, body):
    """A proxy between here and the service, which answers itself, and says success."""

    def answer(response_dict, **_):
        response_dict["body"], response_dict["status_code"] = body(response_dict["body"]), 200

    event = f"before-parse.s3.{operation}"
    client.meta.events.register_first(event, answer)
    try:
        yield
    finally:
        client.meta.events.unregister(event, answer)


PAGE = b"<html><head><meta charset=utf-8></head><body>Please log in" + 9999 * b" now" + b"</html>"


@pytest.mark.parametrize(
    "body",
    [lambda body: body[: len(body) // 3], lambda body: PAGE],
    ids=["half", "page"],
)
@pytest.mark.parametrize(
    ("operation", "ask"),
    [
        ("ListObjectsV2", lambda store, path: store.list()),
        ("ListObjectsV2", lambda store, path: store.names()),
        ("ListObjectsV2", lambda store, path: store.exists("a")),
        ("ListMultipartUploads", lambda store, path: list(store.unfinished())),
        ("CreateMultipartUpload", lambda store, path: put_large(store, path)),
        ("CompleteMultipartUpload", lambda store, path: put_large(store, path)),
    ],
    ids=["list", "names", "exists", "unfinished", "begin", "end"],
)
def test_an_answer_that_is_no_xml_is_the_stores_error(
    client, tmp_path, monkeypatch, operation, ask, body
):
    """It passed every handler of the store's errors."""
    monkeypatch.setattr("ddl_airflow.storage.retries._FIRST_WAIT_S", 0.0)
    store = S3Store(client, "bucket", "no-xml")
    store.put_bytes("a", b"1")
    with answers(client, operation, body):
        with pytest.raises(StagingError, match="^s3://bucket/no-xml.*cannot be read: ") as caught:
            ask(store, tmp_path / "large")
        assert caught.value.retryable and len(str(caught.value)) < 500
        if operation == "ListMultipartUploads":
            assert unfinished_in(store) == []


def put_large(store, path):
    path.write_bytes(content := bytes(PIECE))
    store.put(path, "large", hashlib.sha256(content).hexdigest(), ignore)


@pytest.mark.parametrize("ask", [S3Store.list, S3Store.names, lambda store: store.exists("a")])
def test_a_page_that_is_no_listing_is_not_an_empty_one(client, ask):
    """As proxies write them in XHTML: a dataset was gone, for good."""
    store = S3Store(client, "bucket", "no-listing")
    store.put_bytes("a", b"1")
    with answers(client, "ListObjectsV2", lambda body: b"<html><body>Log in</body></html>"):
        with pytest.raises(
            StagingError, match="no-listing.* at .*: the answer is no listing"
        ) as caught:
            ask(store)
        assert caught.value.retryable


def test_a_listing_that_is_cut_off_is_not_taken_for_whole(client):
    """As of a gateway that knows only the first version of the call."""
    store = S3Store(client, "bucket", "cut")
    for key in ("a", "b/c"):
        store.put_bytes(key, b"1")

    def cut(response_dict, **_):
        body = response_dict["body"].replace(
            b"<IsTruncated>false</IsTruncated>", b"<IsTruncated>true</IsTruncated>"
        )
        assert body != response_dict["body"]
        response_dict["body"] = body

    client.meta.events.register_first("before-parse.s3.ListObjectsV2", cut)
    try:
        for ask in (store.list, store.names, lambda: store.list_unless("")):
            with pytest.raises(StagingError, match="there are more objects.*ListObjectsV2") as one:
                ask()
            assert not one.value.retryable
    finally:
        client.meta.events.unregister("before-parse.s3.ListObjectsV2", cut)


def test_an_object_that_is_another_one_now_is_not_taken_where_if_match_is_ignored(
    client, tmp_path, monkeypatch
):
    store = S3Store(client, "bucket", "ignored")
    store.put_bytes("f", b"one")
    (listed,) = store.list()
    store.put_bytes("f", b"two")

    def forget(params, **_):
        params["headers"].pop("If-Match", None)

    monkeypatch.setattr(S3Store, "_direct", None)  # all is asked by boto3
    for call in ("GetObject", "HeadObject"):
        client.meta.events.register(f"before-call.s3.{call}", forget)
    try:
        with pytest.raises(TransferCorrupt, match="changed since it was listed"):
            store.get(listed, tmp_path / "f.part", lambda nbytes: None)
    finally:
        for call in ("GetObject", "HeadObject"):
            client.meta.events.unregister(f"before-call.s3.{call}", forget)


def test_a_listing_of_many_pages_is_one(client, monkeypatch):
    store = S3Store(client, "bucket", "pages")
    for number in range(25):
        store.put_bytes(f"{number:02}", b"x")
    paginate = client.get_paginator

    class SmallPages:
        def __init__(self, name):
            self._pages = paginate(name)

        def paginate(self, **asked):
            return self._pages.paginate(**asked, PaginationConfig={"PageSize": 10})

    monkeypatch.setattr(client, "get_paginator", SmallPages)
    assert [obj.key for obj in store.list()] == [f"{number:02}" for number in range(25)]
    digest, listed = store.list_unless("")
    assert len(listed) == 25 and store.list_unless(digest)[1] is None


def test_a_store_that_mostly_fails_is_not_tried_for_ever():
    retries = Retries(3)
    assert [retries.take() for _ in range(4)] == [True, True, True, False]
    retries.came()
    assert [retries.take() for _ in range(2)] == [True, False]
    for _ in range(10):
        retries.came()
    assert [retries.take() for _ in range(4)] == [True, True, True, False]
