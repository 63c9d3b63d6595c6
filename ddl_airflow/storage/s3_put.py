"""Stores one file in S3: in one request, or in parts, several at once.

Each byte is read once. While it is in memory it is digested twice: by MD5, which the service
compares with what came and answers with what it stored; and by SHA-256 for the file as a whole,
which must be the one that the record has. So what is stored is the file that was meant, or nothing.

What a killed process left of the same file is taken. A part that is there is not sent; of a whole
object the service copies the parts itself. Each is held to the MD5 of our own bytes. An upload that
somebody else ends, who goes on with it or cleans, is begun again.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from ddl_airflow.core.errors import (
    FileChanged,
    NoSpace,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.storage import lanes
from ddl_airflow.storage.content_types import content_type
from ddl_airflow.storage.lanes import Lanes
from ddl_airflow.storage.retries import TRIES, Retries, wait
from ddl_airflow.storage.s3_client import code_of
from ddl_airflow.storage.s3_get import SHA256_FIELD, etag_is_md5
from ddl_airflow.storage.s3_http import ByBoto3, Connections
from ddl_airflow.storage.store import CHUNK, PIECE, Advance

PART_SIZE = PIECE  # a file of this size or more goes up in parts
MAX_PARTS = 10_000  # of one object; Source: Amazon S3 multipart upload limits
PARTS_AT_ONCE = 4  # of one file; more only wait for each other

_BEGINNINGS = 4  # of one object, which others end
_MOST_LOOKED_AT = 10  # whole objects of the same key and size, the newest
_LEAST_COPY = 64 * 1024  # bytes; what is smaller is sent as fast
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Earlier(NamedTuple):
    """What an earlier process left of a file, or published.

    Attributes:
        key: of the object, with its prefix.
        etag: of a whole object; empty: it is an upload that has not ended.
        upload: its id; empty: it is a whole object.
    """

    key: str
    etag: str = ""
    upload: str = ""


class _Gone(Exception):
    """Somebody else has ended the upload, or its parts are another file's.

    Attributes:
        key: where there may be the object now; empty: nowhere.
    """

    def __init__(self, key: str = "") -> None:
        super().__init__(key)
        self.key = key


@dataclass
class _Begun:
    """An upload in parts.

    Attributes:
        key: of the object.
        id: as the service knows it.
        there: MD5s in hex of parts that came earlier, by their numbers from 0.
        etags: of all parts, as the service said them.
        md5s: of our bytes.
    """

    key: str
    id: str
    there: Mapping[int, str] = field(default_factory=dict)
    etags: dict[int, str] = field(default_factory=dict)
    md5s: dict[int, bytes] = field(default_factory=dict)

    @property
    def etag(self) -> str:
        """That the whole gets. Source: the ETag of an upload in parts, as Amazon S3 and Ceph."""
        md5s = b"".join(self.md5s[number] for number in sorted(self.md5s))
        return f"{_md5(md5s).hex()}-{len(self.md5s)}"


class S3Target:
    """An object that is to be.

    Args:
        client: a boto3 S3 client.
        bucket, key: of the object; the key with its prefix.
        where: the object and the store, for messages.
        errors: makes errors of boto3 ours, which begin with ``where``; given the bytes to store.
        retries: of the store.
        direct: connections of the store; None: boto3 makes all requests.
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
        key: str,
        where: str,
        errors: Callable[[int], AbstractContextManager[None]],
        retries: Retries,
        direct: Connections | None,
    ) -> None:
        self._client, self._bucket, self._key = client, bucket, key
        self._where, self._errors, self._retries, self._direct = where, errors, retries, direct
        self._name = {"Bucket": bucket, "Key": key}
        self._size = 0
        self._doubtful = False  # whether there may be an upload whose id never came

    def put_bytes(self, body: bytes) -> str:
        """Stores a small object. Returns its ETag."""
        self._size = len(body)
        whole = memoryview(body)
        return self._put(whole, _md5(whole), hashlib.sha256(body).hexdigest(), _nothing)

    def put(
        self, path: Path, sha256: str, advance: Advance, left: Sequence[Earlier]
    ) -> tuple[str, int]:
        """Stores a file. Returns the object's ETag and bytes.

        Args:
            path: of the file.
            sha256: in hex, that it must have.
            advance: as for ``ObjectStore.put``.
            left: what there may be of it already.

        Raises:
            FileChanged: it has another one. Nothing was stored.
            StagingError: also after as many tries as may help. No upload in parts is left, if the
                service still answers.
            OSError: of the file.
        """
        with open(path, "rb", buffering=0) as file:
            self._size = os.fstat(file.fileno()).st_size
            if self._size >= PART_SIZE:
                return self._put_in_parts(path, file, sha256, advance, left), self._size
            with lanes.buffers.one(self._size, advance) as body:
                if not _fill(file, 0, body) or hashlib.sha256(body).hexdigest() != sha256:
                    raise self._changed(path)
                md5 = _md5(body)
                etag = self._copied_whole(left, md5.hex(), sha256, advance)
                etag = etag or self._put(body, md5, sha256, advance)
            advance(self._size)
            return etag, self._size

    def _put(self, body: memoryview, md5: bytes, sha256: str, advance: Advance) -> str:
        def send() -> str:
            more = {"Metadata": {SHA256_FIELD: sha256}, "ContentType": content_type(self._key)}
            answer = self._sent("put_object", body, md5, advance, **more)
            return self._right(answer, md5.hex())

        return self._tried(send, "it was not stored", advance)

    def _copied_whole(
        self, left: Sequence[Earlier], md5: str, sha256: str, advance: Advance
    ) -> str:
        """The ETag of what the service copied; empty if it has nothing to copy."""
        if self._size < _LEAST_COPY:
            return ""
        for one in left:
            if one.etag == md5:
                with suppress(StagingError):
                    copy = partial(self._copy, one, md5, sha256)
                    return self._tried(copy, "it was not copied", advance)
        return ""

    def _copy(self, one: Earlier, md5: str, sha256: str) -> str:
        with self._errors(self._size):
            answer = self._client.copy_object(
                **self._name,
                CopySource={"Bucket": self._bucket, "Key": one.key},
                CopySourceIfMatch=one.etag,
                Metadata={SHA256_FIELD: sha256},
                ContentType=content_type(self._key),
                MetadataDirective="REPLACE",
            )
        return self._right(answer.get("CopyObjectResult", {}) | _encryption(answer), md5)

    def _sent(
        self, operation: str, body: memoryview, md5: bytes, advance: Advance, **more: Any
    ) -> dict[str, Any]:
        """One request with a body, and its answer."""
        parameters = self._name | {"ContentMD5": base64.b64encode(md5).decode()} | more
        with self._errors(self._size):
            if self._direct is not None:
                with suppress(ByBoto3):
                    return self._direct.put(operation, parameters, body, advance)
            answer: dict[str, Any] = getattr(self._client, operation)(
                **parameters, Body=bytes(body)
            )
            return answer

    def _right(self, answer: Mapping[str, Any], md5: str) -> str:
        """The ETag of an answer, which must be the one of our bytes where it is of the bytes."""
        if "ETag" not in answer:  # an error, say, that some proxy sends as success
            raise StagingError(f"{self._where}: the answer has no ETag, so nothing was stored")
        etag = str(answer["ETag"]).strip('"')
        if etag_is_md5(answer) and etag != md5:
            raise TransferCorrupt(
                f"{self._where}: stored with ETag {etag}, not {md5}. Transfer it again."
            )
        return etag

    def _tried(self, call: Callable[[], T], said: str, advance: Advance, tries: int = TRIES) -> T:
        """What the call returns, in as many tries as may help; once more for wrong bytes."""
        damaged = False
        for number in range(1, tries + 1):
            try:
                result = call()
            except StagingError as error:
                advance(0)  # raises if this was no failure, but somebody's wish to stop
                if not error.retryable or isinstance(error, (NoSpace, FileChanged)):
                    raise
                if isinstance(error, TransferCorrupt):
                    if damaged:
                        raise
                    damaged = True
                    _log.warning("%s Sent once more", error)
                if number == tries or not self._retries.take():
                    raise StagingError(
                        f"{str(error).rstrip('.')}: {said}, in {number} tries."
                    ) from error
                wait(number, advance)
            else:
                self._retries.came()
                return result
        raise AssertionError("no tries")

    def _changed(self, path: Path) -> FileChanged:
        return FileChanged(f"{path} changed while it was uploaded to {self._where}")

    # An upload in parts.

    def _put_in_parts(
        self, path: Path, file: BinaryIO, sha256: str, advance: Advance, left: Sequence[Earlier]
    ) -> str:
        part_size = PART_SIZE
        while self._size > part_size * MAX_PARTS:
            part_size *= 2

        def uncounted(_: int) -> None:
            advance(0)

        counted = advance
        for _ in range(_BEGINNINGS):
            try:
                source = self._source(left, sha256)
                taken = None if source else self._taken(left, part_size)
                if taken is None:
                    return self._bring(
                        path, file, self._begin(sha256), source, part_size, sha256, counted
                    )
                # Ended where it was begun, and the service makes ours of it.
                self._bring(path, file, taken, None, part_size, sha256, counted)
                left = self._found(taken.key)
            except _Gone as gone:
                left = self._found(gone.key)
            finally:
                self._sweep()
            counted = uncounted
        raise StagingError(
            f"{self._where}: somebody else has ended its upload, {_BEGINNINGS} times. See who "
            "publishes or cleans the same."
        )

    def _begin(self, sha256: str) -> _Begun:
        def begin() -> str:
            try:
                with self._errors(self._size):
                    answer = self._client.create_multipart_upload(
                        **self._name,
                        Metadata={SHA256_FIELD: sha256},
                        ContentType=content_type(self._key),
                    )
            except StagingError:
                self._doubtful = True
                raise
            if answer["ResponseMetadata"].get("RetryAttempts"):
                self._doubtful = True  # botocore's own first try may have begun one
            if "UploadId" not in answer:
                self._doubtful = True
                raise StagingError(f"{self._where}: the answer names no upload")
            return str(answer["UploadId"])

        return _Begun(self._key, self._tried(begin, "no upload was begun", _nothing))

    def _bring(
        self,
        path: Path,
        file: BinaryIO,
        begun: _Begun,
        source: Earlier | None,
        part_size: int,
        sha256: str,
        advance: Advance,
    ) -> str:
        """Sends what is not there and ends the upload. Returns the ETag of the object."""
        digest = hashlib.sha256()
        count = -(-self._size // part_size)

        def bring(number: int, part: memoryview, proceed: Advance) -> None:
            if not _fill(file, number * part_size, part):
                raise self._changed(path)
            begun.md5s[number] = md5 = _md5(part)
            if (there := begun.there.get(number)) is not None:
                if there != md5.hex():  # another file's
                    raise _Gone
                begun.etags[number] = there
            else:
                start = number * part_size
                begun.etags[number] = (
                    self._copied(begun, source, number, start, part, proceed) if source else ""
                ) or self._send_part(begun, number, count, part, proceed)
            proceed(len(part))

        try:
            Lanes(self._size, part_size, bring, digest, advance, PARTS_AT_ONCE).run()
            if digest.hexdigest() != sha256:
                raise self._changed(path)
            return self._end(begun)
        except BaseException:
            if begun.key == self._key:
                self._abort(begun)
            raise

    def _send_part(
        self, begun: _Begun, number: int, count: int, part: memoryview, advance: Advance
    ) -> str:
        md5 = begun.md5s[number]
        name = {"Key": begun.key, "UploadId": begun.id, "PartNumber": number + 1}

        def send() -> str:
            return self._right(self._sent("upload_part", part, md5, advance, **name), md5.hex())

        with _gone_if_so(begun):
            said = f"part {number + 1} of {count} was not stored"
            return self._tried(send, said, advance)

    def _copied(
        self,
        begun: _Begun,
        source: Earlier,
        number: int,
        start: int,
        part: memoryview,
        advance: Advance,
    ) -> str:
        """The ETag of a part that the service copied; empty if it is other bytes, or refuses."""
        md5 = begun.md5s[number].hex()

        def copy() -> str:
            with self._errors(self._size):
                answer = self._client.upload_part_copy(
                    Bucket=self._bucket,
                    Key=begun.key,
                    UploadId=begun.id,
                    PartNumber=number + 1,
                    CopySource={"Bucket": self._bucket, "Key": source.key},
                    CopySourceIfMatch=source.etag,
                    CopySourceRange=f"bytes={start}-{start + len(part) - 1}",
                )
            return self._right(answer.get("CopyPartResult", {}) | _encryption(answer), md5)

        with suppress(StagingError), _gone_if_so(begun):
            return self._tried(copy, f"part {number + 1} was not copied", advance)
        return ""

    def _end(self, begun: _Begun) -> str:
        """Makes an object of the parts. Returns its ETag."""
        parts = [
            {"PartNumber": number + 1, "ETag": begun.etags[number]}
            for number in sorted(begun.etags)
        ]
        name = {"Bucket": self._bucket, "Key": begun.key}

        def end() -> None:
            with self._errors(self._size):
                self._client.complete_multipart_upload(
                    **name, UploadId=begun.id, MultipartUpload={"Parts": parts}
                )

        def look() -> dict[str, Any]:
            return self._head(**name)

        doubt: StagingError | None = None
        try:
            self._tried(end, "its parts were not put together", _nothing)
        except StagingError as error:
            # It may have been done in a try whose answer was lost, or by who goes on with it.
            if code_of(error) not in ("NoSuchUpload", "InvalidPart"):
                raise
            doubt = error
        try:
            answer = self._tried(look, "it was not looked at", _nothing)
        except SourceMissing:
            raise _Gone from doubt
        etag = str(answer["ETag"]).strip('"')
        # Ceph 16 answers success for an upload that is gone where there is another object.
        if answer["ContentLength"] != self._size or (etag_is_md5(answer) and etag != begun.etag):
            raise _Gone(begun.key) from doubt
        return etag

    def _abort(self, begun: _Begun) -> None:
        def abort() -> None:
            with self._errors(0):
                self._client.abort_multipart_upload(
                    Bucket=self._bucket, Key=begun.key, UploadId=begun.id
                )

        try:
            self._tried(abort, "its upload was not ended", _nothing, tries=3)
        except SourceMissing:
            pass
        except StagingError as error:
            _log.warning("%s The next try, or `ddl-airflow clean`, ends it", error)

    def _sweep(self) -> None:
        """Ends uploads of this object whose ids were lost on the way."""
        if not self._doubtful:
            return
        try:
            with self._errors(0):
                pages = self._client.get_paginator("list_multipart_uploads")
                for page in pages.paginate(Bucket=self._bucket, Prefix=self._key):
                    for one in page.get("Uploads", ()):
                        if one["Key"] == self._key:
                            self._abort(_Begun(self._key, one["UploadId"]))
        except StagingError as error:
            _log.warning("%s An upload of it may be left", error)
        self._doubtful = False

    # What there is of it already.

    def _taken(self, left: Sequence[Earlier], part_size: int) -> _Begun | None:
        """The upload of somebody who was killed that has most of the parts."""
        found = []
        for one in left:
            if one.upload:
                with suppress(StagingError):
                    if there := self._parts(one, part_size):
                        found.append(_Begun(one.key, one.upload, there))
        return max(found, key=lambda one: len(one.there), default=None)

    def _parts(self, one: Earlier, part_size: int) -> dict[int, str]:
        """MD5s of the parts of an upload that has not ended; none, if they are other parts."""
        there: dict[int, str] = {}
        with self._errors(0):
            pages = self._client.get_paginator("list_parts")
            for page in pages.paginate(Bucket=self._bucket, Key=one.key, UploadId=one.upload):
                for part in page.get("Parts", ()):
                    number = part["PartNumber"] - 1
                    size = min(part_size, self._size - number * part_size)
                    if part["Size"] != size:
                        return {}
                    there[number] = part["ETag"].strip('"')
        return there

    def _source(self, left: Sequence[Earlier], sha256: str) -> Earlier | None:
        """A whole object that says to be the same."""
        for one in [one for one in left if one.etag][:_MOST_LOOKED_AT]:
            with suppress(StagingError):
                answer = self._head(Bucket=self._bucket, Key=one.key, IfMatch=f'"{one.etag}"')
                if (answer["ContentLength"], answer["Metadata"].get(SHA256_FIELD)) == (
                    self._size,
                    sha256,
                ):
                    return one
        return None

    def _head(self, **name: str) -> dict[str, Any]:
        with self._errors(0):
            answer: dict[str, Any] = self._client.head_object(**name)
        if "ETag" not in answer or "ContentLength" not in answer:
            raise StagingError(f"{self._where}: the answer has no ETag, so it is no object")
        return answer

    def _found(self, key: str) -> list[Earlier]:
        """The whole object of that key, if there is one."""
        if not key:
            return []
        with suppress(StagingError):
            answer = self._head(Bucket=self._bucket, Key=key)
            return [Earlier(key, answer["ETag"].strip('"'))]
        return []


@contextmanager
def _gone_if_so(begun: _Begun) -> Iterator[None]:
    """Tells by ``_Gone`` that the upload is not there any more."""
    try:
        yield
    except SourceMissing as error:
        if code_of(error) == "NoSuchUpload":
            raise _Gone(begun.key) from error
        raise


def _encryption(answer: Mapping[str, Any]) -> dict[str, Any]:
    names = ("ServerSideEncryption", "SSECustomerAlgorithm")
    return {name: answer[name] for name in names if name in answer}


def _fill(file: BinaryIO, start: int, into: memoryview) -> bool:
    """Reads the bytes from ``start`` on. Whether there were so many."""
    at = 0
    while at < len(into):
        count = os.preadv(file.fileno(), [into[at : at + CHUNK]], start + at)
        if not count:
            return False
        at += count
    return True


def _md5(body: memoryview | bytes) -> bytes:
    return hashlib.md5(body, usedforsecurity=False).digest()


def _nothing(_: int) -> None:
    """Nobody stops it, and nobody counts."""
