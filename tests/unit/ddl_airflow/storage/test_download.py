"""Parts, their journal, and their order; against a source in memory that fails as it is told to."""

from __future__ import annotations

import hashlib
import random
import threading
import time

import pytest

from ddl_airflow.core.errors import StagingError, TransferCorrupt
from ddl_airflow.storage import checksums, lanes
from ddl_airflow.storage import download as module
from ddl_airflow.storage.download import Check, download, journal_of, read_through
from ddl_airflow.storage.fingerprint import DigestOfParts

PIECE = 64 * 1024
SIZE = 5 * PIECE + 77


@pytest.fixture
def content(monkeypatch):
    """In smaller parts than the program's, which take less time."""
    monkeypatch.setattr(module, "PIECE", PIECE)
    monkeypatch.setattr(lanes, "PIECE", PIECE)
    monkeypatch.setattr(lanes, "_SMALL", 1000)
    return random.Random(17).randbytes(SIZE)


def ignore(nbytes):
    pass


def digests(content, algorithm="crc64nvme", size=PIECE):
    pieces = [content[at : at + size] for at in range(0, max(1, len(content)), size)]
    return [checksums.hex_of(algorithm, piece) for piece in pieces]


class Memory:
    """Gives parts in any order; so often ``wrong`` bytes; an error instead of ``lost`` parts.

    With ``part_size`` it knows the MD5s of such parts; or, with the name of a CRC, that of all.
    """

    def __init__(self, content, name="sha256", wrong=0, lost=(), part_size=0, proof=True):
        self._content, self._name, self._wrong, self._lost = content, name, wrong, set(lost)
        self._part_size, self._proof = part_size, proof
        self._lock = threading.Lock()
        self.asked = []
        self.at_once, self.most_at_once = 0, 0

    def read(self, start, into, advance):
        with self._lock:
            self.asked.append(start // PIECE)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        lost = start // PIECE in self._lost
        time.sleep(0.5 if lost else random.random() / 50)  # others come before it is
        advance(0)
        if lost:
            raise StagingError("lost")
        into[:] = self._content[start : start + len(into)]
        with self._lock:
            self.at_once -= 1
            if self._wrong and start == (PIECE if len(self._content) > PIECE else 0):
                self._wrong -= 1
                into[-1] ^= 1
        advance(len(into))

    def read_blocks(self, start, count, block, take, advance):
        for at in range(0, count, len(block)):
            part = block[: count - at]
            self.read(start + at, part, advance)
            take(part)

    def check(self):
        if self._name in checksums.CRCS:
            whole = checksums.hex_of(self._name, self._content)
            return Check(self._name, checksums.new(self._name), whole, part_size=self._part_size)
        if self._part_size:
            known = DigestOfParts(self._part_size)
            known.update(self._content)
            etag, size = known.hexdigest(), self._part_size
            return Check("md5-of-parts", DigestOfParts(size), etag, self._proof, part_size=size)
        if self._name == "size":
            return Check("size")
        new = getattr(hashlib, self._name)
        return Check(self._name, new(), new(self._content).hexdigest())

    def corrupt(self, why):
        return TransferCorrupt(f"memory: {why}")


@pytest.mark.parametrize("name", ["sha256", "md5", "size"])
@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 3 * PIECE, SIZE])
def test_all_bytes_are_there_and_digested(content, tmp_path, size, name):
    source, counted = Memory(content[:size], name), []
    done = download(source, size, tmp_path / "f.part", counted.append)
    assert (tmp_path / "f.part").read_bytes() == content[:size]
    assert done.checked == name
    assert done.algorithm == (name if size <= PIECE and name != "size" else "crc64nvme")
    assert done.pieces == digests(content[:size], done.algorithm)
    assert sum(counted) == size
    assert sorted(source.asked) == list(range(max(1, -(-size // PIECE))))


@pytest.mark.parametrize("part_size", [PIECE // 2, PIECE, PIECE + 1, 3 * PIECE, SIZE - 1, SIZE])
def test_parts_of_the_store_are_digested_each_by_itself(content, tmp_path, monkeypatch, part_size):
    monkeypatch.setattr(module, "_BLOCK", PIECE // 4 + 5)
    source, counted = Memory(content, part_size=part_size), []
    done = download(source, SIZE, tmp_path / "f.part", counted.append)
    assert (tmp_path / "f.part").read_bytes() == content and sum(counted) == SIZE
    assert (done.checked, done.algorithm, done.piece_size) == ("md5-of-parts", "md5", part_size)
    assert done.pieces == digests(content, "md5", part_size)
    again = Memory(content, part_size=part_size)
    assert download(again, SIZE, tmp_path / "f.part", ignore) == done and again.asked == []
    with open(tmp_path / "f.part", "r+b") as file:
        file.seek(SIZE - 1)
        file.write(bytes([content[-1] ^ 1]))
    once = Memory(content, part_size=part_size)
    assert download(once, SIZE, tmp_path / "f.part", ignore) == done
    assert (tmp_path / "f.part").read_bytes() == content
    assert len(once.asked) < len(source.asked) or part_size == SIZE


@pytest.mark.parametrize("algorithm", checksums.CRCS)
@pytest.mark.parametrize("size", [0, 1, PIECE, PIECE + 1, 2 * PIECE, SIZE])
def test_the_crc_of_all_is_made_of_those_of_pieces(content, tmp_path, monkeypatch, size, algorithm):
    monkeypatch.setattr(module, "_BLOCK", PIECE // 4 + 5)
    source = Memory(content[:size], algorithm, part_size=PIECE)
    done = download(source, size, tmp_path / "f.part", ignore)
    assert (tmp_path / "f.part").read_bytes() == content[:size]
    assert (done.checked, done.algorithm) == (algorithm, algorithm)
    assert done.pieces == digests(content[:size], algorithm)
    assert done.proved == {algorithm: checksums.hex_of(algorithm, content[:size])}
    if size > PIECE:
        again = Memory(content[:size], algorithm, part_size=PIECE)
        assert download(again, size, tmp_path / "f.part", ignore) == done and again.asked == []
    with pytest.raises(TransferCorrupt, match=f"memory: {algorithm} is .* fetched twice"):
        wrong = Memory(content[: max(1, size)], algorithm, wrong=2, part_size=PIECE)
        monkeypatch.setattr(module, "_BLOCK", PIECE)
        download(wrong, max(1, size), tmp_path / "w.part", ignore)


def test_wrong_parts_are_fetched_again_once_unless_their_size_is_a_guess(
    content, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(module, "_BLOCK", PIECE)
    size = 2 * PIECE
    done = download(Memory(content, wrong=1, part_size=size), SIZE, tmp_path / "a.part", ignore)
    assert (tmp_path / "a.part").read_bytes() == content
    assert done.pieces == digests(content, "md5", size) and "md5-of-parts is" in caplog.text
    with pytest.raises(TransferCorrupt, match="md5-of-parts is .*fetched twice, the same bytes"):
        download(Memory(content, wrong=2, part_size=size), SIZE, tmp_path / "b.part", ignore)
    guessed = Memory(content, wrong=1, part_size=size, proof=False)
    assert download(guessed, SIZE, tmp_path / "c.part", ignore).checked == "size"


def test_no_more_parts_are_in_memory_than_there_may_be_whatever_comes_at_once(
    content, tmp_path, monkeypatch
):
    monkeypatch.setattr(lanes, "buffers", lanes.Buffers(3))
    sources = [Memory(content) for _ in range(4)]
    most, count = 0, threading.Lock()

    def look(nbytes):
        nonlocal most
        with count:
            most = max(most, sum(source.at_once for source in sources))

    threads = [
        threading.Thread(target=download, args=(source, SIZE, tmp_path / f"{n}.part", look))
        for n, source in enumerate(sources)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert 1 < most <= 3
    for n in range(4):
        assert (tmp_path / f"{n}.part").read_bytes() == content
    assert lanes.buffers._free == []


def test_who_goes_on_fetches_what_is_not_there(content, tmp_path):
    path = tmp_path / "f.part"
    with pytest.raises(StagingError, match="lost"):
        download(Memory(content, lost=[5]), SIZE, path, ignore)
    noted = journal_of(path).read_bytes().count(b"\n")
    assert 0 < noted < 6
    source, counted = Memory(content), []
    done = download(source, SIZE, path, counted.append)
    assert path.read_bytes() == content and done.pieces == digests(content)
    assert len(source.asked) == 6 - noted and 5 in source.asked
    assert sum(counted) == SIZE
    again = Memory(content)
    assert download(again, SIZE, path, ignore) == done and again.asked == []


@pytest.mark.parametrize("what", ["changed", "cut", "gone", "journal"])
def test_parts_that_are_not_what_they_were_are_fetched_again(content, tmp_path, what):
    path = tmp_path / "f.part"
    download(Memory(content), SIZE, path, ignore)
    if what == "gone":
        path.unlink()
    elif what == "cut":
        with open(path, "r+b") as file:
            file.truncate(2 * PIECE - 1)
    elif what == "changed":
        with open(path, "r+b") as file:
            file.seek(3 * PIECE)
            file.write(b"other")
    else:
        lines = journal_of(path).read_bytes().splitlines(keepends=True)
        journal_of(path).write_bytes(b"".join(lines[:4]) + lines[4][:20])
    source = Memory(content)
    done = download(source, SIZE, path, ignore)
    assert path.read_bytes() == content and done.pieces == digests(content)
    many = {"changed": 1, "cut": 5, "gone": 6, "journal": 2}
    assert len(source.asked) == many[what]


@pytest.mark.parametrize("size", [100, SIZE])
def test_wrong_bytes_are_fetched_again_once_and_then_named(content, tmp_path, size, caplog):
    counted = []
    source = Memory(content[:size], wrong=1)
    done = download(source, size, tmp_path / "a.part", counted.append)
    assert (tmp_path / "a.part").read_bytes() == content[:size]
    assert done.pieces == digests(content[:size], done.algorithm) and sum(counted) == size
    assert "memory: sha256 is" in caplog.text and "fetched once more" in caplog.text
    refused = pytest.raises(
        TransferCorrupt, match="memory: sha256 is .*fetched twice, the same bytes"
    )
    with refused:
        download(Memory(content[:size], wrong=2), size, tmp_path / "b.part", ignore)


def test_parts_that_came_wrong_before_are_found_and_fetched_again(content, tmp_path):
    path = tmp_path / "f.part"
    with pytest.raises(StagingError, match="lost"):
        download(Memory(content, wrong=1, lost=[5]), SIZE, path, ignore)
    source = Memory(content)
    download(source, SIZE, path, ignore)
    assert path.read_bytes() == content
    assert source.asked.count(5) == 2


def test_who_is_told_to_stop_leaves_no_thread_and_what_has_come(content, tmp_path):
    def stop(nbytes):
        if nbytes and (tmp_path / "f.part").stat().st_blocks:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(Memory(content), SIZE, tmp_path / "f.part", stop)
    assert not any(one.name.startswith("ddl-transfer") for one in threading.enumerate())
    assert lanes.buffers._taken == 0


@pytest.mark.parametrize("size", [0, 1, PIECE, SIZE])
def test_what_is_only_read_comes_in_its_order_and_is_checked(content, size):
    taken = []
    assert read_through(Memory(content[:size]), size, taken.append) == "sha256"
    assert b"".join(taken) == content[:size]
    if size:
        with pytest.raises(TransferCorrupt, match="memory: sha256 is .*, not "):
            read_through(Memory(content[:size], wrong=1), size, taken.append)
    assert lanes.buffers._taken == 0
