"""Reads one object of S3 in ranges, and finds what its bytes can be checked by."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import Any

from ddl_airflow.core.errors import StagingError, TransferCorrupt
from ddl_airflow.storage import checksums
from ddl_airflow.storage.checksums import CRCS
from ddl_airflow.storage.download import Check, RangesIgnored
from ddl_airflow.storage.fingerprint import DigestOfParts
from ddl_airflow.storage.retries import Retries
from ddl_airflow.storage.s3_http import ByBoto3, Connections
from ddl_airflow.storage.s3_sums import sums_of, told_sums
from ddl_airflow.storage.store import CHUNK, PIECE, Advance, StoredObject

SHA256_FIELD = "ddl-sha256"  # user metadata of what we upload: checks any object, also encrypted
# Of common uploaders, in bytes, most common first: 8 MiB is boto3's and the AWS command's.
USUAL_PART_SIZES = tuple(mib * CHUNK for mib in (8, 16, 5, 15, 64, 50, 10, 32, 100, 128, 256, 512))
_OF_CONTENT = re.compile(r"[0-9a-f]{32}(-\d+)?")  # an ETag that other bytes do not have
STALL_S = 15.0  # without a byte of a body: it is asked for again

_BLOCK = CHUNK  # what is lost of a body that stands still


class S3Source:
    """One object, in the version that was listed: ``download.PartsSource``.

    All that is read has the listed ETag, and the one that the first answer had.

    Args:
        client: a boto3 S3 client.
        bucket, key: of the object; the key with its prefix.
        obj: as it is listed.
        where: the object and the store, for messages.
        errors: makes errors of boto3 ours, which begin with ``where``.
        retries: of the store.
        direct: connections of the store; None: boto3 makes all requests.
    """

    def __init__(
        self,
        client: Any,
        bucket: str,
        key: str,
        obj: StoredObject,
        where: str,
        errors: Callable[[], AbstractContextManager[None]],
        retries: Retries,
        direct: Connections | None,
    ) -> None:
        self._client, self._obj, self._direct = client, obj, direct
        self._where, self._errors, self._retries = where, errors, retries
        self._name = {"Bucket": bucket, "Key": key, "IfMatch": f'"{obj.etag}"'}
        self._sums = sums_of(client, bucket)
        self._first: Any = None  # answer

    def corrupt(self, why: str) -> TransferCorrupt:
        """The error that names the object."""
        return TransferCorrupt(f"{self._where}: {why}. Transfer it again.")

    def read(self, start: int, into: memoryview, advance: Advance) -> None:
        """Fills ``into``. What came before a failure is kept, and the rest asked for."""
        at = 0

        def took(nbytes: int) -> None:
            nonlocal at
            at += nbytes
            advance(nbytes)

        def once() -> None:
            nonlocal at
            try:
                self._read_once(start + at, into[at:], took)
            except RangesIgnored:
                if len(into) != self._obj.size:
                    raise
                at = 0  # the rest cannot be had alone
                self._read_once(0, into, lambda _: advance(0))

        self._retries.tried(
            once, advance, lambda: f"{at:,} of {len(into):,} bytes came from byte {start:,} on"
        )

    def read_blocks(
        self,
        start: int,
        count: int,
        block: memoryview,
        take: Callable[[memoryview], None],
        advance: Advance,
    ) -> None:
        """Gives ``take`` the bytes. What came before a failure is kept, but for its last block."""
        at = 0

        def once() -> None:
            nonlocal at
            left = count - at
            byte_range = f"bytes={start + at}-{start + count - 1}"
            whole = left == self._obj.size
            with self._errors(), self._asked(None if whole else byte_range) as (answer, body):
                self._check_answer(answer, None if whole else start + at, left)
                body.set_socket_timeout(STALL_S)
                while at < count:
                    part = block[: count - at]
                    self._fill(body, part, lambda _: advance(0))
                    take(part)
                    at += len(part)
                    advance(len(part))

        self._retries.tried(
            once, advance, lambda: f"{at:,} of {count:,} bytes came from byte {start:,} on"
        )

    def read_in_order(
        self, into: memoryview, take: Callable[[int, memoryview], None], advance: Advance
    ) -> None:
        """Reads all by one request; begins again with what breaks off."""
        size, came = self._obj.size, 0

        def once() -> None:
            nonlocal came
            with self._errors(), self._asked(None) as (answer, body):
                self._check_answer(answer, None, size)
                body.set_socket_timeout(STALL_S)
                for came in range(0, size, len(into)):
                    part = into[: size - came]
                    self._fill(body, part, advance)
                    take(came // len(into), part)

        self._retries.tried(once, advance, lambda: f"{came:,} of {size:,} bytes came")

    def _read_once(self, start: int, into: memoryview, took: Advance) -> None:
        whole = len(into) == self._obj.size
        byte_range = f"bytes={start}-{start + len(into) - 1}"
        with self._errors(), self._asked(None if whole else byte_range) as (answer, body):
            self._check_answer(answer, None if whole else start, len(into))
            body.set_socket_timeout(STALL_S)
            self._fill(body, into, took)

    def _fill(self, body: Any, into: memoryview, took: Advance) -> None:
        at = 0
        while at < len(into) and (count := body.readinto(into[at : at + _BLOCK])):
            at += count
            took(count)
        if at < len(into):
            raise StagingError(
                f"{self._where}: the answer ended {len(into) - at:,} bytes too early"
            )

    @contextmanager
    def _asked(self, byte_range: str | None) -> Iterator[tuple[dict[str, Any], Any]]:
        """Yields what S3 answers, and the body. Without a range: all of the object."""
        with ExitStack() as stack:

            def ask(more: dict[str, str]) -> tuple[dict[str, Any], Any]:
                return stack.enter_context(self._answered(byte_range, more))

            # None is told of a range.
            yield ask({}) if byte_range else self._sums.told(ask)

    @contextmanager
    def _answered(
        self, byte_range: str | None, more: dict[str, str]
    ) -> Iterator[tuple[dict[str, Any], Any]]:
        if self._direct is not None:
            headers = {"If-Match": self._name["IfMatch"]}
            if byte_range:
                headers["Range"] = byte_range
            bucket, key = self._name["Bucket"], self._name["Key"]
            try:
                with self._direct.get(bucket, key, headers, more) as both:
                    yield both
                    return
            except ByBoto3:
                pass
        name = self._name | ({"Range": byte_range} if byte_range else {})
        answer = self._client.get_object(**name, **more)
        with closing(answer["Body"]) as body:
            yield answer, body

    def _check_answer(self, answer: Any, start: int | None, wanted: int) -> None:
        """Whether the body is of this object, and begins where it was asked to.

        Args:
            start: of the range that was asked for; None: all of it was.
        """
        if "ETag" not in answer:  # an error, say, that some proxy sends as success
            raise StagingError(f"{self._where}: the answer has no ETag, so it is no object")
        self._check_etag(answer)
        if self._first is None:
            self._first = answer
        elif answer["ETag"] != self._first["ETag"]:
            raise self.corrupt("changed since it was listed")
        # What comes in chunks does not say how long it is.
        length = answer.get("ContentLength", wanted if start is None else self._obj.size)
        if start is None:
            if length > wanted:
                raise self.corrupt(f"{length:,} bytes came, {wanted:,} are listed")
            return
        said = answer.get("ContentRange", "")
        if not said and length == self._obj.size:
            raise RangesIgnored(f"{self._where}: the store, or a proxy, ignores ranges of bytes.")
        if not re.fullmatch(rf"bytes {start}-\d+/({self._obj.size}|\*)", said):
            raise self.corrupt(f"asked for bytes from {start:,} on, the store sent {said or 'all'}")

    def check(self) -> Check:
        """The best that the store allows; HEAD where nothing was read."""
        if self._first is None:
            self._retries.tried(self._look, lambda _: None, lambda: "Nothing of it was asked for")
        answer, obj = self._first, self._obj
        if check := check_of_all(answer, obj.etag):
            return check
        if etag_is_md5(answer):
            return self._check_by_parts("md5", obj.etag)
        for algorithm, value in told_sums(answer).items():
            if "-" in value:
                return self._check_by_parts(algorithm, value)
        return Check("size")

    def _check_by_parts(self, algorithm: str, expected: str) -> Check:
        """By the sizes that the service says its parts have; else by one that they may have."""
        size, count, name = (
            self._obj.size,
            int(expected.rpartition("-")[2]),
            f"{algorithm}-of-parts",
        )
        first = self._part_size(1)
        last = rest = size - (count - 1) * first  # where all but the last are as large
        if count > 2 and 0 < first < size:
            last = self._part_size(count)
        if 0 < last == rest <= first:

            def equal() -> bool:
                """Some between may be larger, and others smaller; they may be thousands."""
                return all(self._part_size(number) in (first, 0) for number in range(2, count))

            digest = DigestOfParts(first, algorithm)
            return Check(name, digest, expected, part_size=first, sure=equal)
        if 0 < first < size and last:
            sizes = [first, *map(self._part_size, range(2, count)), last]
            if all(sizes) and sum(sizes) == size:
                return Check(name, DigestOfParts(sizes, algorithm), expected)
        for guess in USUAL_PART_SIZES:
            if -(-size // guess) == count:
                digest = DigestOfParts(guess, algorithm)
                return Check(name, digest, expected, proof=False, part_size=guess)
        return Check("size")

    def _look(self) -> None:
        with self._errors():
            answer = self._sums.told(lambda more: self._client.head_object(**self._name, **more))
        if "ETag" not in answer:
            raise StagingError(f"{self._where}: the answer has no ETag, so it is no object")
        self._check_etag(answer)
        self._first = answer

    def _check_etag(self, answer: Any) -> None:
        """For services that ignore If-Match, as some gateways and proxies do."""
        said, listed = answer["ETag"].strip('"'), self._obj.etag
        # Of other forms a service, or what it compresses for, may have several of one content.
        if said != listed and all(map(_OF_CONTENT.fullmatch, (said, listed))):
            raise self.corrupt("changed since it was listed")

    def _part_size(self, number: int) -> int:
        """Bytes; of all where the service ignores PartNumber (Ceph 16), 0 if refused.

        Args:
            number: of the part, from 1.

        Raises:
            StagingError: the service fails, in as many tries as may help.
        """
        from botocore.exceptions import ClientError

        name = {"Bucket": self._name["Bucket"], "Key": self._name["Key"]}
        found = 0

        def look() -> None:
            nonlocal found
            with self._errors():
                try:
                    answer = self._client.head_object(**name, PartNumber=number)
                except ClientError as error:
                    if not _refuses(error.response):
                        raise
                    return
            found = int(answer.get("ContentLength", 0))

        # What passes is no refusal: with 0 for some of the parts, good bytes may look damaged.
        self._retries.tried(
            look, lambda _: None, lambda: f"The size of part {number:,} did not come"
        )
        return found


def _refuses(answer: Any) -> bool:
    """Whether an error says that the service does not do it, and not that it cannot now."""
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return status == 501 or (400 <= status < 500 and status not in (408, 429))


def etag_is_md5(answer: Any) -> bool:
    """Whether an answer's ETag is an MD5 of the content: not with keys of a key service or ours.

    Source: Amazon S3 API reference, Object, ETag.
    """
    if answer.get("ServerSideEncryption", "AES256") != "AES256":
        return False
    plain = re.fullmatch(r'"?[0-9a-f]{32}(-\d+)?"?', answer["ETag"])
    return plain is not None and "SSECustomerAlgorithm" not in answer


def check_of_all(answer: Any, etag: str) -> Check | None:
    """By what an answer says of all bytes; None: nothing.

    A CRC goes before an ETag that is the MD5: it costs far less, and tells damage as surely.

    Args:
        answer: to a GET of all, or to HEAD.
        etag: of the object, without quotes.
    """
    told = {name: value for name, value in told_sums(answer).items() if "-" not in value}
    if sha256 := answer.get("Metadata", {}).get(SHA256_FIELD):
        told = {"sha256": sha256}
    elif not told.keys() & {"sha256", *CRCS} and etag_is_md5(answer):
        if "-" in etag:
            return None
        told = {"md5": etag}
    for name, value in told.items():
        part_size = PIECE if name in CRCS else 0
        return Check(name, checksums.new(name), value, part_size=part_size)
    return None
