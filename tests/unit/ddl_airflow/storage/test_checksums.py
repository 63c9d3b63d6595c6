from __future__ import annotations

import base64
import hashlib
import random

import pytest
from botocore import httpchecksum

from ddl_airflow.storage import checksums


@pytest.mark.parametrize(
    ("algorithm", "check"),
    [
        # Sources: the catalogue of parametrised CRC algorithms, "check" of each, CRC-32/ISO-HDLC,
        # CRC-32/ISCSI and CRC-64/NVME; FIPS 180-4 and RFC 1321 by hashlib.
        ("crc32", "cbf43926"),
        ("crc32c", "e3069283"),
        ("crc64nvme", "ae8b14860a799888"),
        ("sha256", hashlib.sha256(b"123456789").hexdigest()),
        ("sha1", hashlib.sha1(b"123456789").hexdigest()),
        ("md5", hashlib.md5(b"123456789").hexdigest()),
    ],
)
def test_a_checksum_is_the_published_one_however_the_bytes_come(algorithm, check):
    found = checksums.new(algorithm)
    for chunk in (b"1234", b"", memoryview(b"56"), bytearray(b"789")):
        found.update(chunk)
    assert found.hexdigest() == check and found.digest() == bytes.fromhex(check)
    assert checksums.hex_of(algorithm, b"123456789") == check


@pytest.mark.parametrize("algorithm", checksums.OF_S3)
def test_a_checksum_is_what_botocore_sends(algorithm):
    content = random.Random(algorithm).randbytes(100_001)
    reference = httpchecksum._CHECKSUM_CLS[algorithm]()
    reference.update(content)
    said = base64.b64encode(bytes.fromhex(checksums.hex_of(algorithm, content))).decode()
    assert said == reference.b64digest()


@pytest.mark.parametrize("algorithm", checksums.CRCS)
def test_the_crc_of_all_is_made_of_those_of_parts(algorithm):
    content = random.Random(algorithm).randbytes(10_007)
    for sizes in ([10_007], [1, 10_006], [4096, 4096, 1815], [0, 10_007, 0]):
        parts, at = [], 0
        for size in sizes:
            crc = checksums.new(algorithm)
            crc.update(content[at : at + size])
            parts.append(crc.digest())
            at += size
        assert checksums.joined(algorithm, parts, sizes).hex() == checksums.hex_of(
            algorithm, content
        )
