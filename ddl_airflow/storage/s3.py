"""Objects of any S3-compatible service.

Integrity rests on digests compared here, as ``s3_get`` finds them and ``s3_put`` sends them, not on
the checksum trailers that newer SDKs send by default: several compatible services refuse those
(Ceph 16 answers 411). S3's own checksums, in headers, are asked for where a store has them.
"""

from __future__ import annotations

import base64
import builtins
import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import (
    ConnectionInvalid,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.storage.checksums import hex_of
from ddl_airflow.storage.content_types import content_type
from ddl_airflow.storage.download import download, read_through
from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.retries import TRIES, Retries, wait
from ddl_airflow.storage.s3_client import client_by_connection, s3_errors
from ddl_airflow.storage.s3_get import S3Source, check_of_all
from ddl_airflow.storage.s3_http import ByBoto3, Connections, connections_of
from ddl_airflow.storage.s3_put import Earlier, S3Target
from ddl_airflow.storage.s3_sums import sums_of
from ddl_airflow.storage.store import (
    Access,
    Advance,
    Fetched,
    Left,
    StoredObject,
    Unfinished,
    once_for_an_environment,
)

_log = logging.getLogger(__name__)
_PROBE = ".conditions"  # an empty object beside one that is written on conditions
# (endpoint, bucket) -> the conditions that the service heeds; asked once in a process.
_heeds: dict[tuple[str, str], frozenset[str]] = {}


# Not GLACIER_IR, which is read at once. What moves by itself, INTELLIGENT_TIERING, does not say so.
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")
_LISTED = "ddl-airflow listed"  # in a page: its objects as they came
_this_thread = threading.local()


def _take_out(
    response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any
) -> None:
    """Keeps what a page lists from botocore, which takes 0.2 ms to make a dict of each object."""
    if not getattr(_this_thread, "takes_out", False) or response_dict["status_code"] != 200:
        return
    body, listed = response_dict["body"], b""
    for tag in (b"Contents", b"CommonPrefixes"):
        end = b"</%b>" % tag
        first, last = body.find(b"<%b>" % tag), body.rfind(end) + len(end)
        if first >= 0:
            listed += body[first:last]
            body = body[:first] + body[last:]
    customized_response_dict[_LISTED], response_dict["body"] = listed, body


@once_for_an_environment
def _client_of_environment(_environ: Mapping[str, str]) -> Any:
    return client_by_connection(AirflowConnection("", "aws"))  # one that leaves all to it


class S3Store:
    """Objects of one bucket under one prefix.

    The prefix is a folder: ``mnist`` holds ``mnist/a`` but not ``mnist2``. ETags are from listings,
    so an object replaced between listing and reading is an error, not a mixture. Does not read old
    versions.
    """

    def __init__(
        self, client: Any, bucket: str, prefix: str = "", access_key_id: str = "", said: str = ""
    ) -> None:
        """The objects of ``s3://bucket/prefix``.

        Args:
            client: a boto3 S3 client, made with ``s3_client``.
            bucket, prefix: the place.
            access_key_id: the client's, where that is known.
            said: what stands for the client's endpoint in messages, if it is not to be shown.
        """
        self._client = client
        self._said = said
        self._access_key_id = access_key_id
        self._retries = Retries()
        # Made when the first object comes or goes: the certificates of https take a while.
        self._connect = cache(partial(connections_of, client))
        # Once for a client, however often it is registered.
        client.meta.events.register(
            "before-parse.s3.ListObjectsV2", _take_out, unique_id="ddl-airflow"
        )
        self.bucket = bucket
        self.prefix = prefix.strip("/")
        self.endpoint: str = client.meta.endpoint_url
        self.uri = f"s3://{bucket}/{self.prefix}".rstrip("/")

    @classmethod
    def opened(cls, uri: str, access: Access) -> S3Store:
        """The objects of ``s3://bucket[/prefix]``.

        Raises:
            ConnectionInvalid: there is no bucket in it, or no client.
        """
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise ConnectionInvalid(f"{uri!r} names no store. Write s3://bucket/prefix")
        if access.client is None:
            raise ConnectionInvalid(f"{uri} needs a connection. Give its endpoint and keys.")
        return cls(access.client, bucket, prefix, access.access_key_id, access.said)

    @classmethod
    def client_of_environment(cls) -> Any:
        """Endpoint and keys as every AWS tool finds them; one client for all who ask."""
        return _client_of_environment()

    @classmethod
    def access_by(cls, connection: AirflowConnection) -> Access:
        """By endpoint and keys; without keys, one of Amazon's has those of every AWS tool."""
        return Access(client_by_connection(connection), connection.login)

    def at(self, prefix: str) -> S3Store:
        """The store of a longer prefix."""
        longer = f"{self.prefix}/{prefix}"
        store = S3Store(self._client, self.bucket, longer, self._access_key_id, self._said)
        store._connect = self._connect
        return store

    @property
    def resolved_uri(self) -> str:
        """The same: there are no links."""
        return self.uri

    @property
    def caller(self) -> str:
        """A digest of endpoint and access key, where that is known."""
        if not self._access_key_id:
            return ""
        return hashlib.sha256(f"{self.endpoint} {self._access_key_id}".encode()).hexdigest()[:32]

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key

    @contextmanager
    def _errors(self, key: str = "", needed: int = 0) -> Iterator[None]:
        with s3_errors(f"{self.uri}/{key}" if key else self.uri, self.endpoint, needed, self._said):
            yield

    def list(self) -> list[StoredObject]:
        """All objects under the prefix, sorted by key."""
        return self._objects(self._pages())

    def list_unless(self, digest: str) -> tuple[str, builtins.list[StoredObject] | None]:
        """All objects; the digest is of the pages as they came, which then need not be read."""
        pages, now = list(self._pages()), hashlib.sha256()
        for page in pages:
            if "Contents" in page:  # written in a way that only botocore reads
                return "", self._objects(pages)
            now.update(page[_LISTED])
        said = now.hexdigest()
        return said, None if said == digest else self._objects(pages)

    def names(self) -> builtins.list[str]:
        """What keys begin with, as the service puts them together."""
        start, found = len(self._key("")), set()
        for page in self._pages(Delimiter="/"):
            # Written in a way that only botocore reads.
            found |= {entry["Key"][start:] for entry in page.get("Contents", ())}
            found |= {entry["Prefix"][start:-1] for entry in page.get("CommonPrefixes", ())}
            with self._readable():
                names = (said.get("Prefix") or said["Key"] for said in _cut_out(page))
                found |= {name[start:].removesuffix("/") for name in names}
        return sorted(found)

    def _pages(self, **how: str) -> Iterator[dict[str, Any]]:
        """The pages of the listing, each with its objects as they came."""
        with self._errors():
            paginator = self._client.get_paginator("list_objects_v2")
            pages = iter(paginator.paginate(Bucket=self.bucket, Prefix=self._key(""), **how))
            while True:
                _this_thread.takes_out = True
                try:
                    page = next(pages, None)
                finally:
                    _this_thread.takes_out = False
                if page is None:
                    return
                self._check_listing(page)
                # Then boto3 takes this page for the last.
                if page.get("IsTruncated") and not page.get("NextContinuationToken"):
                    raise StagingError(
                        f"{self.uri} at {self._said or self.endpoint}: there are more objects, and "
                        "the store does not say how to ask for them: it, or a proxy, does not know "
                        "ListObjectsV2. Use one that does.",
                        retryable=False,
                    )
                yield page

    def _check_listing(self, page: Mapping[str, Any]) -> None:
        """Some proxy's page, in XHTML, is to botocore one that lists nothing."""
        if "Name" not in page and "IsTruncated" not in page:
            raise StagingError(
                f"{self.uri} at {self._said or self.endpoint}: the answer is no listing. See what "
                "the store, or a proxy, sends."
            )

    def _objects(self, pages: Iterable[dict[str, Any]]) -> builtins.list[StoredObject]:
        start, found = len(self._key("")), []
        for page in pages:
            for entry in page.get("Contents", ()):
                modified = entry["LastModified"].timestamp()
                etag = entry["ETag"].strip('"')
                archived = _archive(entry.get("StorageClass"))
                found.append(
                    StoredObject(entry["Key"][start:], entry["Size"], etag, modified, archived)
                )
            with self._readable():
                found += map(partial(_object, start), _cut_out(page))
        return sorted(found, key=attrgetter("key"))

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (ElementTree.ParseError, KeyError, ValueError) as error:
            raise StagingError(
                f"{self.uri} at {self._said or self.endpoint}: its listing cannot be read: "
                f"{type(error).__name__}: {error}. See what the store, or a proxy, sends."
            ) from error

    def identity(self, obj: StoredObject) -> str:
        """Endpoint, bucket, whole key, ETag and size."""
        return json.dumps([self.endpoint, self.bucket, self._key(obj.key), obj.etag, obj.size])

    def check_access(self, obj: StoredObject) -> None:
        """HEAD, which takes the right to read. Source: Amazon S3's API reference, HeadObject."""
        name = {"Bucket": self.bucket, "Key": self._key(obj.key), "IfMatch": f'"{obj.etag}"'}
        with self._errors(obj.key):
            self._client.head_object(**name)

    @property
    def resumes(self) -> bool:
        """What was fetched of a large object is kept."""
        return True

    def get(self, obj: StoredObject, path: Path, advance: Advance) -> Fetched:
        """Fetches it in ranges, tries those again that fail, and compares with what S3 says."""
        with os_errors(path, obj.size):
            return download(self._source(obj), obj.size, path, advance)

    def read(self, obj: StoredObject, take: Callable[[bytes], object]) -> str:
        """The same, one range after the other, and nothing is written."""
        return read_through(self._source(obj), obj.size, take)

    @property
    def _direct(self) -> Connections | None:
        return self._connect()

    def _source(self, obj: StoredObject) -> S3Source:
        return S3Source(
            self._client,
            self.bucket,
            self._key(obj.key),
            obj,
            self._where(obj.key),
            partial(self._errors, obj.key),
            self._retries,
            self._direct,
        )

    def _where(self, key: str) -> str:
        return f"{self.uri}/{key} at {self._said or self.endpoint}"

    def put(
        self, path: Path, key: str, sha256: str, advance: Advance, left: Sequence[Left] = ()
    ) -> StoredObject:
        """Uploads, in parts when large; the service checks a digest of each, and we its answer."""
        earlier = [
            Earlier(one.store._key(one.found.key), upload=one.found.token)
            if isinstance(one.found, Unfinished)
            else Earlier(one.store._key(one.found.key), etag=one.found.etag)
            for one in left
            if isinstance(one.store, S3Store) and one.store.bucket == self.bucket
        ]
        with os_errors(path):
            etag, size = self._target(key).put(path, sha256, advance, earlier)
        return StoredObject(key, size, etag)

    def put_bytes(self, key: str, body: bytes) -> StoredObject:
        """Stores a small object in one request; the service checks a digest of it."""
        return StoredObject(key, len(body), self._target(key).put_bytes(body))

    def _target(self, key: str) -> S3Target:
        return S3Target(
            self._client,
            self.bucket,
            self._key(key),
            self._where(key),
            partial(self._errors, key),
            self._retries,
            self._direct,
        )

    def read_bytes(self, key: str) -> bytes:
        """A small object's content."""
        with self._errors(key):
            return self._small(key)[0]

    def read_version(self, key: str) -> tuple[bytes, str] | None:
        """A small object's content and its ETag."""
        from botocore.exceptions import ClientError

        with self._errors(key):
            try:
                return self._small(key)
            except ClientError as error:
                if error.response["Error"]["Code"] == "NoSuchKey":
                    return None
                raise

    def _small(self, key: str) -> tuple[bytes, str]:
        """Content and ETag, to which the content is held where that is its MD5."""
        from botocore.exceptions import BotoCoreError
        from urllib3.exceptions import HTTPError

        for number in range(1, TRIES + 1):
            try:
                answer, body = sums_of(self._client, self.bucket).told(partial(self._answered, key))
                etag = str(answer.get("ETag", "")).strip('"')
                if not etag:  # an error, say, that some proxy sends as success
                    raise StagingError(
                        f"{self._where(key)}: the answer has no ETag, so it is no object"
                    )
                check = check_of_all(answer, etag)
                if check and (digest := hex_of(check.name, body)) != check.expected:
                    raise TransferCorrupt(
                        f"{self._where(key)}: of the {len(body):,} bytes that came {check.name} is "
                        f"{digest}, not {check.expected}. Read it again."
                    )
                return body, etag
            except (StagingError, BotoCoreError, HTTPError):
                # botocore asks again before an answer comes, and not once a body has begun.
                if number == TRIES:
                    raise
                wait(number, lambda _: None)
        raise AssertionError("no tries")

    def _answered(self, key: str, more: dict[str, str]) -> tuple[dict[str, Any], bytes]:
        """What a GET says, and the body. Over boto3 one takes some 5 ms of a processor."""
        from botocore.exceptions import ClientError

        if self._direct is not None:
            try:
                with self._direct.get(self.bucket, self._key(key), {}, more) as (answer, body):
                    return answer, body.read()
            except ByBoto3:
                pass
            except ClientError as error:
                if _status(error) == 404:
                    raise
        # boto3 knows which refusals are worth another try.
        answer = self._client.get_object(Bucket=self.bucket, Key=self._key(key), **more)
        return answer, answer["Body"].read()

    def put_if(self, key: str, body: bytes, version: str | None) -> bool:
        """Stores it with ``If-Match`` or ``If-None-Match``, where the service has them.

        Where it says that it has not, or heeds them not, a warning says what that means.
        """
        if version is None:
            return self._put_where(key, body, {"IfNoneMatch": "*"})
        if self._put_where(key, body, {"IfMatch": f'"{version}"'}):
            return True
        now = self.read_version(key)
        if now is None or now[1] != version:
            return False
        # Ceph 16 takes the ETag without quotes only, and any other for that of another version.
        return self._put_where(key, body, {"IfMatch": version})

    def _put_where(self, key: str, body: bytes, condition: dict[str, str]) -> bool:
        from botocore.exceptions import ClientError

        name = {
            "Bucket": self.bucket,
            "Key": self._key(key),
            "ContentType": content_type(key),
            **_with_md5(body),
        }
        with self._errors(key, len(body)):
            if not condition.keys() <= self._heeded(key):
                self._client.put_object(**name)
                return True
            try:
                self._client.put_object(**name, **condition)
            except ClientError as error:
                if _status(error) in (404, 409, 412):  # deleted, being changed, or has changed
                    return False
                raise
        return True

    def _heeded(self, key: str) -> frozenset[str]:
        """Asks once, for each condition: an object is put once more that is there, or has changed.

        Some have only one of them. Source: Swift's s3api, which answers 501 to ``If-Match``.
        """
        from botocore.exceptions import ClientError

        place = (self.endpoint, self.bucket)
        if place not in _heeds:
            name = {"Bucket": self.bucket, "Key": self._key(f"{key}{_PROBE}")}
            probe = name | _with_md5(b"")
            heeded = set()
            # The first may make it. No content has the last one's ETag.
            for condition, value in (*2 * [("IfNoneMatch", "*")], ("IfMatch", f'"{"0" * 32}"')):
                try:
                    self._client.put_object(**probe, **{condition: value})
                except ClientError as error:
                    if _status(error) in (409, 412):
                        heeded.add(condition)
                    elif _status(error) != 501:
                        raise
            if len(heeded) < 2:
                self._warn_of_no_conditions(key)
            _heeds[place] = frozenset(heeded)
        return _heeds[place]

    def _warn_of_no_conditions(self, key: str) -> None:
        _log.warning(
            "%s/%s at %s: this service does not write on all conditions: of two processes that "
            "change it at the same moment, one may be lost",
            *(self.uri, key, self._said or self.endpoint),
        )

    def exists(self, key: str) -> bool:
        """Whether there is such an object. By listing: HEAD cannot tell a missing bucket."""
        name = self._key(key)
        with self._errors(key):
            page = self._client.list_objects_v2(Bucket=self.bucket, Prefix=name, MaxKeys=1)
        self._check_listing(page)
        # Keys come sorted, so the name itself is the first with this prefix.
        return any(entry["Key"] == name for entry in page.get("Contents", ()))

    def delete(self, keys: Iterable[str]) -> None:
        """Removes one by one: services disagree on the digest that the batch request needs."""
        for key in keys:
            with self._errors(key):
                self._client.delete_object(Bucket=self.bucket, Key=self._key(key))

    def unfinished(self) -> Iterator[Unfinished]:
        """Multipart uploads that are neither complete nor aborted; their bytes are not told."""
        start = self._key("")
        with self._errors():
            pages = self._client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=self.bucket, Prefix=start):
                for one in page.get("Uploads", ()):
                    key, started = one["Key"][len(start) :], one["Initiated"].timestamp()
                    yield Unfinished(key, started, 0, one["UploadId"])

    def discard(self, one: Unfinished) -> None:
        """Aborts the upload."""
        with suppress(SourceMissing), self._errors(one.key):
            self._client.abort_multipart_upload(
                Bucket=self.bucket, Key=self._key(one.key), UploadId=one.token
            )


def _cut_out(page: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The fields of each object, or prefix, that was kept from botocore."""
    # What was cut out has no document type, and so no entities.
    root = ElementTree.fromstring(b"<all>%b</all>" % page.get(_LISTED, b""))  # noqa: S314
    encoded = page.get("EncodingType") == "url"
    for entry in root:
        said = {field.tag: field.text or "" for field in entry}
        if encoded:  # Amazon writes a space as "+", and a plus as "%2B".
            for field in said.keys() & {"Key", "Prefix"}:
                said[field] = unquote_plus(said[field])
        yield said


def _object(start: int, said: Mapping[str, str]) -> StoredObject:
    """What is listed of an object, but for the first characters of its key."""
    modified = datetime.fromisoformat(said["LastModified"]).timestamp()
    size, etag = int(said["Size"]), said["ETag"].strip('"')
    archived = _archive(said.get("StorageClass"))
    return StoredObject(said["Key"][start:], size, etag, modified, archived)


def _archive(storage_class: str | None) -> str:
    """The class, if it is an archive; else empty."""
    return storage_class if storage_class in _ARCHIVES else ""


def _with_md5(body: bytes) -> dict[str, Any]:
    """A body, and the digest of it that buckets with Object Lock ask for: the one that compatible
    services know as well. Source: Amazon S3 API reference, PutObject, Content-MD5.
    """
    md5 = hashlib.md5(body, usedforsecurity=False).digest()
    return {"Body": body, "ContentMD5": base64.b64encode(md5).decode()}


def _status(error: Any) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
