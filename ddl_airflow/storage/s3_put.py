"""Stores one file in S3: in one request, or in parts, several at once.

Each byte is read once. While it is in memory it is digested twice: for the service, which compares
that with what came and answers with what it stored; and by SHA-256 for the file as a whole, which
must be the one that the record has. So what is stored is the file that was meant, or nothing.

The service gets an MD5; or a CRC, which takes far less time, once it has shown that it compares it,
and has refused bytes with a wrong one: who only answers what was sent has compared nothing. That is
found out at the first upload in parts of a process. It is
CRC64NVME, which Amazon keeps of every object, and makes of those of parts.

What a killed process left of the same file is taken. A part that is there is not sent; of a whole
object the service copies the parts itself. Each is held to the digest of our own bytes. An upload
that somebody else ends, who goes on with it or cleans, is begun again.
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
from ddl_airflow.storage import checksums, lanes
from ddl_airflow.storage.content_types import content_type
from ddl_airflow.storage.fingerprint import of_parts
from ddl_airflow.storage.lanes import Lanes
from ddl_airflow.storage.retries import TRIES, Retries, wait
from ddl_airflow.storage.s3_client import code_of
from ddl_airflow.storage.s3_get import SHA256_FIELD, etag_is_md5
from ddl_airflow.storage.s3_http import ByBoto3, Connections
from ddl_airflow.storage.s3_sums import SumsRefused, sums_of, told_sums
from ddl_airflow.storage.store import CHUNK, PIECE, Advance

PART_SIZE = PIECE  # a file of this size or more goes up in parts
MAX_PARTS = 10_000  # of one object; Source: Amazon S3 multipart upload limits
PARTS_AT_ONCE = 4  # of one file; more only wait for each other

_BEGINNINGS = 4  # of one object, which others end
_MOST_LOOKED_AT = 10  # whole objects of the same key and size, the newest
_LEAST_COPY = 64 * 1024  # bytes; what is smaller is sent as fast
_MD5, _CRC = "md5", "crc64nvme"
_CRC_SAID = f"Checksum{_CRC.upper()}"
_DIFFERS = ("BadDigest", "XAmzContentChecksumMismatch")  # a service's words for a wrong one
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
        by: the digest that goes with parts.
        there: parts that came earlier, by their numbers from 0: the ETag of each and, as
            ``_written``, its digest; empty: the service does not say it.
        etags: of all parts, as the service said them.
        digests: of our bytes.
    """

    key: str
    id: str
    by: str = _MD5
    there: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    etags: dict[int, str] = field(default_factory=dict)
    digests: dict[int, bytes] = field(default_factory=dict)

    @property
    def etag(self) -> str:
        """That the whole gets; empty: those of the parts are no MD5s. Source: the ETag of an upload
        in parts, as Amazon S3 and Ceph.
        """
        try:
            return of_parts(_MD5, [bytes.fromhex(self.etags[each]) for each in sorted(self.etags)])
        except ValueError:
            return ""

    def crc(self, size: int, part_size: int) -> bytes:
        """That of the whole, of so many bytes."""
        sizes = [min(part_size, size - at) for at in range(0, size, part_size)]
        return checksums.joined(_CRC, [self.digests[each] for each in range(len(sizes))], sizes)


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
        self._sums = sums_of(client, bucket)
        self._size = 0
        self._doubtful = False  # whether there may be an upload whose id never came

    def put_bytes(self, body: bytes) -> str:
        """Stores a small object. Returns its ETag."""
        self._size = len(body)
        return self._put(memoryview(body), hashlib.sha256(body).hexdigest(), _nothing)

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
                etag = self._copied_whole(left, body, sha256, advance)
                etag = etag or self._put(body, sha256, advance)
            advance(self._size)
            return etag, self._size

    def _put(self, body: memoryview, sha256: str, advance: Advance) -> str:
        if self._sums.checks:
            with suppress(SumsRefused):
                return self._put_by(_CRC, body, sha256, advance)
        return self._put_by(_MD5, body, sha256, advance)

    def _put_by(self, by: str, body: memoryview, sha256: str, advance: Advance) -> str:
        digest = _digest(by, body)

        def send() -> str:
            more = {"Metadata": {SHA256_FIELD: sha256}, "ContentType": content_type(self._key)}
            return self._right(
                self._sent("put_object", body, by, digest, advance, **more), by, digest
            )

        return self._tried(send, "it was not stored", advance)

    def _copied_whole(
        self, left: Sequence[Earlier], body: memoryview, sha256: str, advance: Advance
    ) -> str:
        """The ETag of what the service copied; empty if it has nothing to copy."""
        whole = [one for one in left if one.etag]
        if self._size < _LEAST_COPY or not whole:
            return ""
        md5 = _digest(_MD5, body)
        for one in whole:
            if one.etag == md5.hex():
                with suppress(StagingError):
                    copy = partial(self._copy, one, md5, sha256)
                    return self._tried(copy, "it was not copied", advance)
        return ""

    def _copy(self, one: Earlier, md5: bytes, sha256: str) -> str:
        with self._errors(self._size):
            answer = self._client.copy_object(
                **self._name,
                CopySource={"Bucket": self._bucket, "Key": one.key},
                CopySourceIfMatch=one.etag,
                Metadata={SHA256_FIELD: sha256},
                ContentType=content_type(self._key),
                MetadataDirective="REPLACE",
            )
        return self._right(answer.get("CopyObjectResult", {}) | _encryption(answer), _MD5, md5)

    def _sent(
        self,
        operation: str,
        body: memoryview,
        by: str,
        digest: bytes,
        advance: Advance,
        **more: Any,
    ) -> dict[str, Any]:
        """One request with a body and its digest, and its answer."""
        parameters = self._name | _said(by, digest) | more
        with self._errors(self._size), self._sums.taken(sent=by == _CRC):
            if self._direct is not None:
                with suppress(ByBoto3):
                    return self._direct.put(operation, parameters, body, advance)
            answer: dict[str, Any] = getattr(self._client, operation)(
                **parameters, Body=bytes(body)
            )
            return answer

    def _right(self, answer: Mapping[str, Any], by: str, digest: bytes) -> str:
        """The ETag of an answer, which must have the digest of our bytes: as a CRC, or as the ETag
        where that is of the bytes.
        """
        if "ETag" not in answer:  # an error, say, that some proxy sends as success
            raise StagingError(f"{self._where}: the answer has no ETag, so nothing was stored")
        etag = str(answer["ETag"]).strip('"')
        if by == _CRC and _CRC_SAID not in answer:  # of an older one of its servers, perhaps
            self._sums.refused()
            raise SumsRefused
        found = str(answer[_CRC_SAID]) if by == _CRC else etag
        if (by == _CRC or etag_is_md5(answer)) and found != _written(by, digest):
            name = _CRC if by == _CRC else "ETag"
            raise TransferCorrupt(
                f"{self._where}: stored with {name} {found}, not {_written(by, digest)}. Transfer "
                "it again."
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
                taken = None if source else self._taken(left, part_size, sha256)
                if taken is None:
                    # What is copied is held to its ETag.
                    begun = self._begin(sha256, by=_MD5 if source else _CRC)
                    return self._bring(path, file, begun, source, part_size, sha256, counted)
                # Ended where it was begun, and the service makes ours of it.
                self._bring(path, file, taken, None, part_size, sha256, counted)
                left = self._found(taken.key)
            except _Gone as gone:
                left = self._found(gone.key)
            except SumsRefused:
                pass  # begun again, with MD5s
            finally:
                self._sweep()
            counted = uncounted
        raise StagingError(
            f"{self._where}: somebody else has ended its upload, {_BEGINNINGS} times. See who "
            "publishes or cleans the same."
        )

    def _begin(self, sha256: str, by: str) -> _Begun:
        """Begins an upload, by a CRC only where the service compares it."""
        if by == _CRC and self._sums.checks is not False:
            with suppress(SumsRefused):
                begun = self._begin_by(_CRC, sha256)
                if begun.by == _MD5:  # it knows of no other digest
                    self._sums.refused()
                    return begun
                with self._sums.trying:
                    if self._sums.checks is None:
                        self._sums.checks = self._compares(begun)
                if self._sums.checks:
                    return begun
                self._abort(begun)
        return self._begin_by(_MD5, sha256)

    def _compares(self, begun: _Begun) -> bool:
        """Whether the service refuses bytes with a wrong CRC, and those alone. If not, the upload
        is spoilt; else its first part is to come again.
        """
        body = b"wrong"
        right = _digest(_CRC, memoryview(body))

        def send(crc: bytes) -> Any:
            with self._errors(0):
                return self._client.upload_part(
                    **self._name,
                    UploadId=begun.id,
                    PartNumber=1,
                    Body=body,
                    **_said(_CRC, crc),
                )

        with suppress(StagingError):
            try:
                send(bytes(len(right)))
            except TransferCorrupt as error:
                if code_of(error) in _DIFFERS:
                    return bool(send(right).get(_CRC_SAID) == _written(_CRC, right))
        return False

    def _try_sums(self, sha256: str) -> None:
        """Finds out whether the service compares CRCs, by an upload that comes to nothing. Others
        wait: what they have to send depends on it.
        """
        with self._sums.trying:
            if self._sums.checks is not None:
                return
            try:
                self._abort(self._begin(sha256, by=_CRC))
            except StagingError as error:
                _log.info("%s MD5 goes with what is sent", error)
                self._sums.checks = False
            finally:
                self._sweep()

    def _begin_by(self, by: str, sha256: str) -> _Begun:
        more = {"ChecksumAlgorithm": _CRC.upper(), "ChecksumType": "FULL_OBJECT"}

        def begin() -> _Begun:
            try:
                with self._errors(self._size), self._sums.taken(sent=by == _CRC):
                    answer = self._client.create_multipart_upload(
                        **self._name,
                        Metadata={SHA256_FIELD: sha256},
                        ContentType=content_type(self._key),
                        **(more if by == _CRC else {}),
                    )
            except StagingError:
                self._doubtful = True
                raise
            if answer["ResponseMetadata"].get("RetryAttempts"):
                self._doubtful = True  # botocore's own first try may have begun one
            if "UploadId" not in answer:
                self._doubtful = True
                raise StagingError(f"{self._where}: the answer names no upload")
            takes = answer.get("ChecksumAlgorithm") == _CRC.upper()
            return _Begun(self._key, str(answer["UploadId"]), _CRC if takes else _MD5)

        return self._tried(begin, "no upload was begun", _nothing)

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
        sha256_of_all = hashlib.sha256()
        count = -(-self._size // part_size)

        def bring(number: int, part: memoryview, proceed: Advance) -> None:
            if not _fill(file, number * part_size, part):
                raise self._changed(path)
            begun.digests[number] = digest = _digest(begun.by, part)
            etag, there = begun.there.get(number, ("", ""))
            if there:
                if there != _written(begun.by, digest):  # another file's
                    raise _Gone
                begun.etags[number] = etag
            else:
                start = number * part_size
                begun.etags[number] = (
                    self._copied(begun, source, number, start, part, proceed) if source else ""
                ) or self._send_part(begun, number, count, part, proceed)
            proceed(len(part))

        try:
            Lanes(self._size, part_size, bring, sha256_of_all, advance, PARTS_AT_ONCE).run()
            if sha256_of_all.hexdigest() != sha256:
                raise self._changed(path)
            return self._end(begun, part_size)
        except BaseException:
            if begun.key == self._key:
                self._abort(begun)
            raise

    def _send_part(
        self, begun: _Begun, number: int, count: int, part: memoryview, advance: Advance
    ) -> str:
        by, digest = begun.by, begun.digests[number]
        name = {"Key": begun.key, "UploadId": begun.id, "PartNumber": number + 1}

        def send() -> str:
            answer = self._sent("upload_part", part, by, digest, advance, **name)
            return self._right(answer, by, digest)

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
        md5 = begun.digests[number]

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
            return self._right(answer.get("CopyPartResult", {}) | _encryption(answer), _MD5, md5)

        with suppress(StagingError), _gone_if_so(begun):
            return self._tried(copy, f"part {number + 1} was not copied", advance)
        return ""

    def _end(self, begun: _Begun, part_size: int) -> str:
        """Makes an object of the parts. Returns its ETag."""
        by_crc = begun.by == _CRC
        parts: list[dict[str, Any]] = [
            {"PartNumber": number + 1, "ETag": begun.etags[number]}
            for number in sorted(begun.etags)
        ]
        name = {"Bucket": self._bucket, "Key": begun.key}
        more: dict[str, str] = {}
        crc = begun.crc(self._size, part_size) if by_crc else b""
        if by_crc:
            more = {"ChecksumType": "FULL_OBJECT", _CRC_SAID: _written(_CRC, crc)}
            for part in parts:
                part[_CRC_SAID] = _written(_CRC, begun.digests[part["PartNumber"] - 1])

        def end() -> None:
            with self._errors(self._size), self._sums.taken(sent=by_crc):
                self._client.complete_multipart_upload(
                    **name, UploadId=begun.id, MultipartUpload={"Parts": parts}, **more
                )

        def look() -> dict[str, Any]:
            return self._head(**name, **({"ChecksumMode": "ENABLED"} if by_crc else {}))

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
        if by_crc and (told := told_sums(answer).get(_CRC)):
            same = told == crc.hex()
        else:
            same = not etag_is_md5(answer) or etag == begun.etag
        # Ceph 16 answers success for an upload that is gone where there is another object.
        if answer["ContentLength"] != self._size or not same:
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

    def _taken(self, left: Sequence[Earlier], part_size: int, sha256: str) -> _Begun | None:
        """The upload of somebody who was killed that has most of the parts."""
        found = []
        for one in left:
            if one.upload:
                with suppress(StagingError):
                    begun = self._begun(one, part_size)
                    if begun.by == _CRC:
                        self._try_sums(sha256)
                    if begun.there and (begun.by == _MD5 or self._sums.checks):
                        found.append(begun)
        return max(found, key=lambda one: len(one.there), default=None)

    def _begun(self, one: Earlier, part_size: int) -> _Begun:
        """An upload that has not ended, with its parts; without, if they are other parts."""
        there: dict[int, tuple[str, str]] = {}
        by = _MD5
        with self._errors(0):
            pages = self._client.get_paginator("list_parts")
            for page in pages.paginate(Bucket=self._bucket, Key=one.key, UploadId=one.upload):
                if page.get("ChecksumAlgorithm") == _CRC.upper():
                    by = _CRC
                for part in page.get("Parts", ()):
                    number = part["PartNumber"] - 1
                    size = min(part_size, self._size - number * part_size)
                    if part["Size"] != size:
                        return _Begun(one.key, one.upload, by)
                    etag = part["ETag"].strip('"')
                    there[number] = etag, part.get(_CRC_SAID, "") if by == _CRC else etag
        return _Begun(one.key, one.upload, by, there)

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


def _digest(by: str, body: memoryview) -> bytes:
    digest = checksums.new(by)
    digest.update(body)
    return digest.digest()


def _written(by: str, digest: bytes) -> str:
    """As the service answers it: an MD5 as the ETag."""
    return base64.b64encode(digest).decode() if by == _CRC else digest.hex()


def _said(by: str, digest: bytes) -> dict[str, str]:
    """What goes with the bytes."""
    if by == _MD5:
        return {"ContentMD5": base64.b64encode(digest).decode()}
    # Ceph 20 passes over a checksum whose algorithm is not named beside it.
    return {"ChecksumAlgorithm": _CRC.upper(), _CRC_SAID: _written(_CRC, digest)}


def _nothing(_: int) -> None:
    """Nobody stops it, and nobody counts."""
