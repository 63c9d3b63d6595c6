"""Archives of a dataset, unpacked into the cache: right, once, whole or not at all."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddl_airflow.core.errors import NoSpace, SourceMissing, StagingError
from ddl_airflow.storage import archives, unpacked
from ddl_airflow.storage.archives import SUFFIXES, ArchiveRefused, suffix_of
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.cleaning import Rules, clean_workspace
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.staging import list_dataset, stage
from ddl_airflow.storage.store import PIECE
from ddl_airflow.storage.unpacked import is_unpacked, unpack
from tests.limits import until, within

ROOT = Path(__file__).parents[4]
FILES = {
    "a.txt": b"small",
    "deep/er/ü 漢字 +&%41?": b"odd",
    "empty": b"",
    "some": bytes(range(256)) * 999,
}
LARGE = bytes(range(256)) * (PIECE // 256) + b"end"


def tar_of(files, mode="w", **more):
    """A tar archive; a value that is no bytes is the TarInfo's fields."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode=mode, **more) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                for field, value in content.items():
                    setattr(info, field, value)
                archive.addfile(info)
    return body.getvalue()


def zip_of(files, compression=zipfile.ZIP_DEFLATED):
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return body.getvalue()


def packed(suffix, files):
    how = {
        "gz": "w:gz",
        "tgz": "w:gz",
        "bz2": "w:bz2",
        "tbz2": "w:bz2",
        "xz": "w:xz",
        "txz": "w:xz",
    }
    if suffix == ".zip":
        return zip_of(files)
    return tar_of(files, how.get(suffix.rpartition(".")[2], "w"))


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".complete"
    }


class Counting(FolderStore):
    """Notes the keys that are fetched, and asked for."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.fetched, self.asked = [], []

    def get(self, obj, path, advance):
        self.fetched.append(obj.key)
        return super().get(obj, path, advance)

    def check_access(self, obj):
        self.asked.append(obj.key)
        super().check_access(obj)


@pytest.fixture
def store(tmp_path):
    return Counting(tmp_path / "source")


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "workspace" / "cache")


def staged(store, cache, destination, **named):
    """As the step stages."""
    listing = list_dataset(store)
    with cache.in_use():
        source, inside = unpack(store, cache, listing)
        dataset = stage(source, cache, destination, listing=inside, **named)
    assert dataset.fingerprint == listing.fingerprint
    return dataset


@pytest.mark.parametrize(
    ("suffix", "closed"),
    [*((suffix, False) for suffix in SUFFIXES), (".TAR.GZ", False), (".tar", True), (".zip", True)],
)
def test_what_is_in_archives_is_there_in_folders_of_their_names(
    store, cache, tmp_path, suffix, closed
):
    files = {**FILES, "large": LARGE} if suffix in (".tar", ".zip") else FILES
    store.put_bytes(f"train/of day+1{suffix}", packed(suffix.lower(), files))
    store.put_bytes("train/labels", b"plain")
    dataset = staged(store, cache, tmp_path / "data", closed_cache=closed)
    want = {f"train/of day+1/{name}": body for name, body in files.items()}
    assert contents(tmp_path / "data") == want | {"train/labels": b"plain"}
    assert {file.key for file in dataset.files} == {*want, "train/labels"}
    store.fetched.clear(), store.asked.clear()
    again = staged(store, cache, tmp_path / "other", closed_cache=closed)
    assert (again.fetched, store.fetched) == (0, [])
    # Whoever asks asks once for an archive, however much is in it.
    assert sorted(store.asked) == ["train/labels", f"train/of day+1{suffix}"]
    assert not list((cache.root / "archives" / "blobs").glob("??/*"))  # nothing is kept twice


def test_only_the_disk_of_the_cache_is_flushed(store, cache, tmp_path, monkeypatch):
    """Another one of the host, say over NFS, may take minutes, or hang."""
    flushed = []

    def flush(of):
        flushed.append((of.root, [*of.root.glob("archives/??/*.json")]))

    monkeypatch.setattr(os, "sync", lambda: pytest.fail("all disks of the host are flushed"))
    monkeypatch.setattr(Cache, "flush", flush)
    store.put_bytes("a.tar", packed(".tar", FILES))
    staged(store, cache, tmp_path / "data")
    assert flushed == [(cache.root, [])]  # before the list says that all is there


def test_what_is_no_archive_stays_as_it_is(store, cache, tmp_path):
    assert [suffix_of(key) for key in ("a.gz", "b.npz", "tar", "c.tar.part", "x.Tar")] == [
        *("", "", "", ""),
        ".Tar",
    ]
    store.put_bytes("a.gz", gzip.compress(b"1"))
    with pytest.raises(SourceMissing, match=r"unpack: none of the 1 objects is an archive"):
        staged(store, cache, tmp_path / "data")


def link(kind, to):
    return {"type": kind, "linkname": to}


EVIL = {
    "climbing": ("x.tar", tar_of({"good": b"1", "../evil": b"2"}), r"'\.\./evil' leads out"),
    "inside": ("x.tar", tar_of({"a/../../evil": b"2"}), "leads out of the folder"),
    "absolute": ("x.tar.gz", tar_of({"/etc/evil": b"2"}, "w:gz"), "'/etc/evil' is an absolute"),
    "folder": ("x.tar", tar_of({"../evil": {"type": tarfile.DIRTYPE}}), "leads out of the folder"),
    "link": ("x.tar", tar_of({"a": link(tarfile.SYMTYPE, "/etc/passwd")}), "'a' is a link"),
    "hard link": ("x.tar", tar_of({"a": b"1", "b": link(tarfile.LNKTYPE, "a")}), "'b' is a link"),
    "device": ("x.tar", tar_of({"a": {"type": tarfile.CHRTYPE}}), "'a' is no regular file"),
    "fifo": ("x.tar", tar_of({"a": {"type": tarfile.FIFOTYPE}}), "'a' is no regular file"),
    "twice": ("x.tar", tar_of({"a": b"1", "./a": b"2"}), "'a' is there twice"),
    "file in a file": ("x.tar", tar_of({"a": b"1", "a/b": b"2"}), "'x/a/b' needs a folder"),
    "name": ("x.tar", tar_of({"a" * 300: b"1"}), "over 255 bytes"),
    "latin": ("x.tar", tar_of({"\xe4": b"1"}, encoding="latin-1", format=0), "no text in UTF-8"),
    "zip climbing": ("x.zip", zip_of({"../evil": b"1"}), r"'\.\./evil' leads out"),
    "zip absolute": ("x.zip", zip_of({"/evil": b"1"}), "'/evil' is an absolute path"),
    "no name": ("a/.zip", zip_of({"a": b"1"}), "it has no name"),
    "empty": ("x.zip", zip_of({}), "there is no file in it"),
    "no archive": ("x.zip", b"not one", "File is not a zip file"),
    "no tar": ("x.tar", b"not one" * 1000, "invalid header"),
    "empty file": ("x.tar", b"", "empty file"),
    "no gzip": ("x.tar.gz", b"not one", "Not a gzipped file"),
    "cut off": ("x.tar.gz", packed(".tgz", {"a": os.urandom(9999)})[:-20], "end-of-stream"),
    "cut off tar": ("x.tar", tar_of({"a": b"1" * 9999})[:5000], "'a': unexpected end of data"),
    "damaged": ("x.tar", tar_of({"a": b"1", "b": b"2"}).replace(b"b\0", b"c\0", 1), "middle"),
    "joined": ("x.tar", tar_of({"a": b"1"}) + tar_of({"b": b"2"}), "or is several in one"),
    # As of a tar that was killed: its records have 10 KiB, and here begin with a header.
    "cut off between": ("x.tar", tar_of(dict.fromkeys("abcdefghij", b"1" * 512))[:5120], "its end"),
    "cut off inside": ("x.tgz", gzip.compress(tar_of({"a": b"1", "b": b"2"})[:1024]), "its end"),
    "zips": ("x.zip", zip_of({"a": b"1"}) + zip_of({"b": b"2"}), "before its first file"),
    "zip and more": ("x.zip", zip_of({"a": b"1"}) + b"more", "goes on after its end"),
    "zst": ("x.tar.zst", b"", "archives of this kind cannot be unpacked"),
    "headers": (
        "x.tar.gz",
        tar_of({"a": b"1"}, "w:gz", format=tarfile.PAX_FORMAT, pax_headers={"k": "v" * (20 << 20)}),
        "more than 16 MiB between two files",
    ),
    "zeros": ("x.tar.gz", gzip.compress(tar_of({"a": b"1"}) + bytes(40 << 20)), "goes on after"),
}


@pytest.mark.parametrize("name", EVIL)
def test_what_may_not_be_unpacked_is_named_and_nothing_of_it_is_there(store, cache, tmp_path, name):
    key, body, said = EVIL[name]
    store.put_bytes(key, body)
    before = {*tmp_path.rglob("*evil*")}
    with pytest.raises(StagingError, match=said) as told:
        staged(store, cache, tmp_path / "data")
    assert not told.value.retryable
    assert store.uri in str(told.value)
    assert {*tmp_path.rglob("*evil*")} == before and not (tmp_path / "data").exists()
    assert not list((cache.root / "archives").glob("??/*.json"))
    assert not [one for one in (cache.root / "archives").glob("*/??/*") if one.is_file()]


def test_what_a_tar_says_beside_names_need_be_no_text(store, cache, tmp_path):
    """As the tar of macOS writes attributes of files."""

    def record(value: bytes) -> bytes:
        body = b" SCHILY.xattr.com.apple.provenance=" + value + b"\n"
        return str(len(body) + len(str(len(body)))).encode() + body

    said = record(b"\1\2\0\xfe\xd2\xe1")
    head = tarfile.TarInfo("PaxHeader/a.txt")
    head.type, head.size = tarfile.XHDTYPE, len(said)
    body = head.tobuf(tarfile.USTAR_FORMAT) + said.ljust(512, b"\0")
    store.put_bytes("x.tar", body + tar_of({"a.txt": b"text"}))
    staged(store, cache, tmp_path / "data")
    assert (tmp_path / "data" / "x" / "a.txt").read_bytes() == b"text"


def test_a_link_a_device_and_a_secret_of_a_zip_are_refused(store, cache, tmp_path):
    for mode, flags, said in (
        (0o120777, 0, "'a' is a link"),
        (0o020666, 0, "'a' is no regular file"),
        (0o100644, 1, "'a' is encrypted"),
    ):
        body = io.BytesIO()
        with zipfile.ZipFile(body, "w") as archive:
            info = zipfile.ZipInfo("a")
            info.external_attr = mode << 16
            archive.writestr(info, b"/etc/passwd")
        raw = bytearray(body.getvalue())
        at = raw.index(b"PK\1\2")
        raw[at + 8] |= flags
        store.put_bytes("x.zip", bytes(raw))
        with pytest.raises(ArchiveRefused, match=said):
            staged(store, cache, tmp_path / "data")


def test_a_zip_whose_content_is_not_what_it_says_is_refused(store, cache, tmp_path):
    body = bytearray(zip_of({"a": b"x" * 5000}, zipfile.ZIP_STORED))
    body[body.index(b"xxxx")] ^= 1
    store.put_bytes("x.zip", bytes(body))
    with pytest.raises(ArchiveRefused, match="'a': Bad CRC-32"):
        staged(store, cache, tmp_path / "data")


def test_bombs_are_refused_before_they_are_on_the_disk(store, cache, tmp_path, monkeypatch):
    for key, body in {
        "x.tar.gz": gzip.compress(bomb := tar_of({"a": bytes(1 << 20), "b": bytes(3 << 20)})),
        "x.tar.bz2": bz2.compress(bomb),
        "x.tar.xz": lzma.compress(bomb),
        "x.zip": zip_of({"a": bytes(1 << 20), "b": bytes(3 << 20)}),
    }.items():
        store.put_bytes(key, body)
        with monkeypatch.context() as patch:
            patch.setattr(unpacked, "_SMALL", 2 << 20)
            patch.setattr(unpacked, "_MOST_TIMES", 2)
            with pytest.raises(ArchiveRefused, match=rf"{key}.*'b': with it, 4,194,304 bytes come"):
                staged(store, cache, tmp_path / "data")
        with monkeypatch.context() as patch:
            # As on a disk that has no more than the archive and its first file.
            patch.setattr(unpacked, "_LEFT_FREE", _free(tmp_path) - (2 << 20))
            with pytest.raises(NoSpace, match=rf"{key}.*'b', after 1 files, is 3,145,728 bytes"):
                staged(store, cache, tmp_path / "data")
        with monkeypatch.context() as patch:
            patch.setattr(unpacked, "_MOST_FILES", 1)
            with pytest.raises(ArchiveRefused, match="'b' is one file more than 1"):
                staged(store, cache, tmp_path / "data")
        store.delete([key])


GIB_AND_A_HALF = 37  # a dictionary of so much, as the header of an LZMA2 stream writes it


def with_large_dictionary(stream):
    """An xz stream whose header asks for more memory than its content needs.

    Source: The .xz File Format 1.2.1, 3.1 Block Header and 5.3.1 LZMA2.
    """
    head = bytearray(stream[12 : 12 + 4 * (stream[12] + 1)])
    assert head[2] == 0x21  # LZMA2, and nothing before it
    head[4] = GIB_AND_A_HALF
    head[-4:] = zlib.crc32(head[:-4]).to_bytes(4, "little")
    return stream[:12] + bytes(head) + stream[12 + len(head) :]


def test_an_archive_that_asks_for_more_memory_than_a_worker_has_to_spare_is_refused(
    store, cache, tmp_path
):
    """Two at once were the end of a worker, by the kernel."""
    tar = tar_of({"a": bytes(range(256)) * 40})
    zipped = bytearray(zip_of({"a": bytes(5000)}, zipfile.ZIP_LZMA))
    sizes = zipped.index(b"a", 30) + 1 + 5  # name, version and size of what follows, lc lp pb
    zipped[sizes : sizes + 4] = (3 << 29).to_bytes(4, "little")
    for key, body in {
        "x.tar.xz": with_large_dictionary(lzma.compress(tar)),
        "x.txz": lzma.compress(tar[:5120]) + with_large_dictionary(lzma.compress(tar[5120:])),
        "x.zip": bytes(zipped),
    }.items():
        store.put_bytes(key, body)
        with pytest.raises(ArchiveRefused, match=rf"{key}.* 256 MiB of memory.* dictionary"):
            staged(store, cache, tmp_path / "data")
        store.delete([key])


def test_xz_in_several_streams_is_one_archive(store, cache, tmp_path):
    """As ``xz`` writes what is packed in turns; Source: The .xz File Format, 2.2 Stream Padding."""
    files = {"a": bytes(range(256)) * 9000, "b": b"text"}
    tar = tar_of(files)
    parts = [lzma.compress(tar[at : at + 999_999]) for at in range(0, len(tar), 999_999)]
    store.put_bytes("x.tar.xz", bytes(8).join(parts) + bytes(4))
    store.put_bytes("y.txz", lzma.compress(tar, preset=9))
    store.put_bytes("z.zip", zip_of(files, zipfile.ZIP_LZMA))
    staged(store, cache, tmp_path / "data")
    assert contents(tmp_path / "data") == {
        f"{folder}/{name}": content for folder in "xyz" for name, content in files.items()
    }
    store.put_bytes("x.tar.xz", parts[0] + b"no stream at all")
    with pytest.raises(ArchiveRefused, match=r"x\.tar\.xz.*: cannot be unpacked"):
        staged(store, cache, tmp_path / "data")
    store.put_bytes("x.tar.xz", b"".join(parts)[:-9])
    with pytest.raises(ArchiveRefused, match=r"x\.tar\.xz.*: cannot be unpacked.*cut off"):
        staged(store, cache, tmp_path / "data")


def _free(path):
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_two_archives_that_would_be_one_folder_are_refused(store, cache, tmp_path):
    store.put_bytes("x.tar", tar_of({"a": b"1"}))
    store.put_bytes("x.zip", zip_of({"a": b"2"}))
    with pytest.raises(ArchiveRefused, match="'x/a' is there twice"):
        staged(store, cache, tmp_path / "data")
    store.delete(["x.zip"])
    store.put_bytes("x/b", b"3")
    staged(store, cache, tmp_path / "data")
    assert contents(tmp_path / "data") == {"x/a": b"1", "x/b": b"3"}


def test_an_archive_that_changes_is_unpacked_anew(store, cache, tmp_path):
    store.put_bytes("x.tar", tar_of({"a": b"1", "b": b"2"}))
    staged(store, cache, tmp_path / "data")
    store.put_bytes("x.tar", tar_of({"a": b"one", "c": b"3"}))
    staged(store, cache, tmp_path / "data")
    assert contents(tmp_path / "data") == {"x/a": b"one", "x/c": b"3"}


def test_the_archive_that_others_have_as_it_is_stays(store, cache, tmp_path):
    store.put_bytes("x.tar", tar_of({"a": b"1"}))
    stage(store, cache, tmp_path / "packed")
    staged(store, cache, tmp_path / "data")
    assert store.fetched == ["x.tar"]  # once
    assert contents(tmp_path / "packed").keys() == {"x.tar"}
    assert contents(tmp_path / "data") == {"x/a": b"1"}


def test_what_is_lost_or_damaged_in_the_cache_comes_again(store, cache, tmp_path):
    store.put_bytes("x.tgz", packed(".tgz", FILES))
    staged(store, cache, tmp_path / "data")
    (archive,) = list_dataset(store).objects
    assert is_unpacked(store, cache, archive)
    blobs = [p.resolve() for p in (tmp_path / "data").rglob("*") if p.is_file()]
    a = next(path for path in blobs if path.read_bytes() == b"small")
    before = a.stat()
    a.chmod(0o644)
    a.write_bytes(b"SMALL")
    os.utime(a, ns=(before.st_atime_ns, before.st_mtime_ns))
    staged(store, cache, tmp_path / "data")
    assert (tmp_path / "data" / "x" / "a.txt").read_bytes() == b"small"
    (tmp_path / "data" / "x" / "empty").resolve().unlink()
    assert not is_unpacked(store, cache, archive)
    staged(store, cache, tmp_path / "data")
    assert contents(tmp_path / "data") == {f"x/{name}": body for name, body in FILES.items()}


def test_an_archive_that_is_damaged_in_the_cache_is_fetched_before_it_is_unpacked(
    store, cache, tmp_path
):
    """For a tar has no checksum: what is in it would be taken for what was fetched."""
    store.put_bytes("x.tar", tar_of({"a": LARGE}))
    stage(store, cache, tmp_path / "packed")
    blob = (tmp_path / "packed" / "x.tar").resolve()
    before = blob.stat()
    blob.chmod(0o644)
    with blob.open("r+b") as file:
        file.seek(PIECE)
        file.write(b"ROT")
    os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))
    staged(store, cache, tmp_path / "data")
    assert (tmp_path / "data" / "x" / "a").read_bytes() == LARGE
    assert store.fetched == ["x.tar", "x.tar"]


def test_many_at_once_unpack_it_once(store, cache, tmp_path):
    store.put_bytes("x.tar", tar_of({f"{n:04}": bytes([n % 256]) * n for n in range(100)}))
    with ThreadPoolExecutor(6) as pool:
        each = [pool.submit(staged, store, cache, tmp_path / f"{n}") for n in range(6)]
        assert all(len(one.result().files) == 100 for one in each)
    assert store.fetched == ["x.tar"]
    assert len({(tmp_path / f"{n}/x/0099").resolve() for n in range(6)}) == 1


KILLED = """
import sys, time
from pathlib import Path
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.staging import list_dataset, stage
from ddl_airflow.storage.unpacked import unpack
store, cache = FolderStore(sys.argv[1]), Cache(sys.argv[2])
print("ready", flush=True)
with cache.in_use():
    source, inside = unpack(store, cache, list_dataset(store))
    stage(source, cache, Path(sys.argv[3]), listing=inside)
"""


def test_killed_at_any_moment_nothing_is_taken_for_whole(store, cache, tmp_path):
    files = {f"{n:05}": os.urandom(n % 700) for n in range(1500)}
    store.put_bytes("x.tar.gz", tar_of(files, "w:gz"))
    folders = [tmp_path / "source", cache.root, tmp_path / "data"]
    left = 0
    for number in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, *map(str, folders)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        process.stdout.readline()
        time.sleep(number * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        left += any((cache.root / "blobs").glob("??/*"))
        if (tmp_path / "data").exists():
            assert len(contents(tmp_path / "data")) == 1500
    staged(store, cache, tmp_path / "data")
    assert contents(tmp_path / "data") == {f"x/{name}": body for name, body in files.items()}
    assert not [*(cache.root / "archives" / "unpacking").iterdir()]
    assert left  # else none was killed while it unpacked


def test_a_step_that_is_ended_leaves_nobody_at_work(store, cache, tmp_path):
    """The progress raises, as it does when Airflow ends the try."""
    store.put_bytes("x.tar", tar_of({f"{n}": bytes(2000) for n in range(5000)}))
    listing, before = list_dataset(store), threading.active_count()

    def end(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), cache.in_use():
        unpack(store, cache, listing, progress=end)
    until(lambda: threading.active_count() == before, within(5))


def test_cleaning_takes_what_killed_ones_left_and_lists_of_what_is_gone(store, cache, tmp_path):
    workspace = cache.root.parent
    store.put_bytes("x.tar", tar_of({"a": b"1"}))
    data = workspace / "runs" / "dag" / "run" / "data"
    staged(store, cache, data)
    old = cache.root / "archives" / "unpacking" / "left"
    old.write_bytes(b"half")
    rules = Rules(cache_bytes=0)
    assert not list(clean_workspace(workspace, rules))  # in use, or not old
    os.utime(old, (0, 0))
    assert [one.place for one in clean_workspace(workspace, rules)] == [str(old)]
    (data / "x" / "a").unlink()
    assert [one.what for one in clean_workspace(workspace, rules)] == ["cached object"]
    assert [one.what for one in clean_workspace(workspace, rules)] == ["list of an archive"]
    assert not list(clean_workspace(workspace, rules))


def test_no_more_of_a_member_is_read_than_it_says(tmp_path):
    """A member whose content would go on; and one that says less than nothing."""
    body = tar_of({"a": {"size": 0, "type": tarfile.REGTYPE}})
    (tmp_path / "x.tar").write_bytes(body)
    (member,) = archives.members(tmp_path / "x.tar", "x", ".tar")
    assert member.size == 0 and b"".join(member.chunks) == b""


def test_an_archive_that_has_come_is_not_fetched_again_by_the_next_try(
    store, cache, tmp_path, monkeypatch
):
    """Of a step that was ended while it unpacked."""
    store.put_bytes("x.tar", tar_of({"a": b"1", "b": b"2"}))

    def end(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(unpacked._Archive, "_check_room", end)
        with pytest.raises(KeyboardInterrupt):
            staged(store, cache, tmp_path / "data")
    staged(store, cache, tmp_path / "data")
    assert store.fetched == ["x.tar"]
    assert contents(tmp_path / "data") == {"x/a": b"1", "x/b": b"2"}
