"""What the service of a bucket does with S3's checksums, as it is found out once in a process.

Source: Amazon S3's user guide, Checking object integrity.
"""

from __future__ import annotations

import base64
import binascii
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ddl_airflow.storage.checksums import DIGITS, OF_S3
from ddl_airflow.storage.s3_client import refuses, refuses_sums

T = TypeVar("T")
_ASKED = {"ChecksumMode": "ENABLED"}
_log = logging.getLogger(__name__)


class SumsRefused(Exception):
    """The service takes no checksum with what is sent: it is to be sent with its MD5."""


@dataclass
class Sums:
    """Of one bucket.

    Attributes:
        tells: whether it answers who asks for checksums; None: nobody has asked.
        checks: whether it refuses bytes that do not have the checksum that comes with them; None:
            nobody has tried.
        trying: held by who does.
    """

    bucket: str
    tells: bool | None = None
    checks: bool | None = None
    trying: threading.RLock = field(default_factory=threading.RLock)

    def told(self, ask: Callable[[dict[str, str]], T]) -> T:
        """An answer with the checksums of an object; without, of a service that refuses to tell.

        Args:
            ask: has more parameters of boto3's method.
        """
        from botocore.exceptions import ClientError

        if self.tells is False:
            return ask({})
        try:
            answer = ask(_ASKED)
        except ClientError as error:
            if self.tells or not refuses(error):
                raise
            answer = ask({})  # else it is refused for what it is
            _log.info("s3://%s: the store refuses to tell checksums", self.bucket)
            self.tells = False
        else:
            self.tells = True
        return answer

    @contextmanager
    def taken(self, *, sent: bool) -> Iterator[None]:
        """Raises SumsRefused where botocore says so of what was ``sent`` with a checksum."""
        from botocore.exceptions import ClientError

        try:
            yield
        except ClientError as error:
            if not sent or not refuses_sums(error):
                raise
            self.refused()
            raise SumsRefused from error

    def refused(self) -> None:
        """Has the rest go with its MD5."""
        _log.info("s3://%s: the store takes no checksums: MD5 goes with what is sent", self.bucket)
        self.checks = False


_sums: dict[tuple[str, str], Sums] = {}


def sums_of(client: Any, bucket: str) -> Sums:
    """What is known of a bucket, by all who ask."""
    return _sums.setdefault((client.meta.endpoint_url, bucket), Sums(bucket))


def told_sums(answer: Mapping[str, Any]) -> dict[str, str]:
    """The checksums of an answer, by their algorithms, best first: in hex; of those of parts with a
    hyphen and the number of parts. What is none, or may be either, is left out.
    """
    if "ContentRange" in answer:  # of a part, if any
        return {}
    found = {}
    parts = str(answer.get("ETag", "")).strip('"').partition("-")[2]
    for algorithm in OF_S3:
        said, _, count = str(answer.get(f"Checksum{algorithm.upper()}", "")).partition("-")
        if not said:
            continue
        try:
            value = base64.b64decode(said, validate=True).hex()
        except (binascii.Error, ValueError):
            continue
        if len(value) != DIGITS[algorithm]:
            continue
        kind = answer.get("ChecksumType", "COMPOSITE" if count else "")
        if kind == "COMPOSITE":
            if (count := count or parts).isdigit():
                found[algorithm] = f"{value}-{count}"
        elif kind == "FULL_OBJECT" or not parts or algorithm == "crc64nvme":  # of all, always
            found[algorithm] = value
    return found
