from __future__ import annotations

import hashlib

import pytest

from ddl_airflow.storage.fingerprint import DigestOfParts, file_sha256, fingerprint
from ddl_airflow.storage.store import StoredObject

LISTING = [StoredObject("a", 1, "e1", 10.0), StoredObject("b/c", 2, "e2", 20.0)]


def test_fingerprint_is_of_the_sorted_listing_and_not_of_times():
    lines = b'["a", 1, "e1"]\n["b/c", 2, "e2"]\n'
    expected = "sha256:" + hashlib.sha256(lines).hexdigest()
    assert fingerprint(LISTING) == expected
    assert fingerprint(reversed(LISTING)) == expected
    assert fingerprint([LISTING[0], StoredObject("b/c", 2, "e2", 99.0)]) == expected


@pytest.mark.parametrize(
    "other",
    [
        LISTING[:1],
        [*LISTING, StoredObject("d", 0, "e")],
        [LISTING[0], StoredObject("b/C", 2, "e2")],
        [LISTING[0], StoredObject("b/c", 3, "e2")],
        [LISTING[0], StoredObject("b/c", 2, "e3")],
    ],
)
def test_fingerprint_changes_with_any_object(other):
    assert fingerprint(other) != fingerprint(LISTING)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("count", [1, 4, 8, 9])
def test_parts_md5_joins_the_digests_of_parts(count, chunk_size):
    content = bytes(range(1, count + 1))
    digest = DigestOfParts(4)
    for at in range(0, count, chunk_size):
        digest.update(content[at : at + chunk_size])
    parts = [hashlib.md5(content[at : at + 4]).digest() for at in range(0, count, 4)]
    assert digest.hexdigest() == f"{hashlib.md5(b''.join(parts)).hexdigest()}-{len(parts)}"


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
def test_parts_md5_is_of_parts_of_several_sizes(chunk_size):
    sizes, content = [3, 1, 4, 2], bytes(range(10))
    digest, parts, start = DigestOfParts(sizes), [], 0
    for at in range(0, len(content), chunk_size):
        digest.update(content[at : at + chunk_size])
    for size in sizes:
        parts.append(hashlib.md5(content[start : start + size]).digest())
        start += size
    assert digest.hexdigest() == f"{hashlib.md5(b''.join(parts)).hexdigest()}-4"


def test_file_sha256_gives_digest_and_size(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    # Source: FIPS 180-4, example SHA-256 of "abc".
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_sha256(tmp_path / "f") == (digest, 3)
