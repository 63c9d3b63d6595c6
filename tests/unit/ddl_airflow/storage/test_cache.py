from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ddl_airflow.core.errors import AccessDenied, NoSpace, StagingError
from ddl_airflow.storage import cache as module
from ddl_airflow.storage import checksums, lanes
from ddl_airflow.storage import download as of_download
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.download import Check, download
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.staging import stage


def ignore(nbytes):
    pass


class SlowFolder(FolderStore):
    """Counts its transfers and takes its time over each."""

    def __init__(self, path):
        super().__init__(path)
        self.transfers = 0

    def get(self, obj, path, advance):
        self.transfers += 1
        time.sleep(0.1)
        return super().get(obj, path, advance)


class CutFolder(FolderStore):
    """Breaks off in the middle of each file."""

    def get(self, obj, path, advance):
        path.write_bytes(b"half")
        raise StagingError("connection lost")


def files_below(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_fetch_once_then_cached(tmp_path):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    assert not cache.holds(store, obj)
    assert cache.fetch(store, obj, ignore) == "size"
    assert cache.holds(store, obj)
    assert cache.fetch(store, obj, ignore) == "cache"
    blob = cache.path(store, obj)
    assert blob.read_bytes() == b"content"
    assert blob.stat().st_mode & 0o777 == 0o444
    assert blob.parent.name == blob.name[:2]
    assert files_below(tmp_path / "cache" / "blobs") == [blob]


def test_fetch_again_when_the_blob_has_a_wrong_size(tmp_path):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    cache.fetch(store, obj, ignore)
    blob = cache.path(store, obj)
    blob.chmod(0o644)
    blob.write_bytes(b"cont")
    assert cache.fetch(store, obj, ignore) == "size"
    assert blob.read_bytes() == b"content"


def test_concurrent_fetches_transfer_once(tmp_path):
    store, cache = SlowFolder(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    with ThreadPoolExecutor(6) as pool:
        checks = list(pool.map(lambda _: cache.fetch(store, obj, ignore), range(6)))
    assert store.transfers == 1
    assert sorted(checks) == ["cache"] * 5 + ["size"]


def test_failed_fetch_leaves_no_file_and_a_killed_one_is_cleared(tmp_path):
    good, cut = FolderStore(tmp_path / "data"), CutFolder(tmp_path / "data")
    cache = Cache(tmp_path / "cache")
    obj = good.put_bytes("a", b"content")
    with pytest.raises(StagingError, match="connection lost"):
        cache.fetch(cut, obj, ignore)
    assert files_below(tmp_path / "cache" / "blobs") == []
    blob = cache.path(good, obj)
    blob.with_name(blob.name + ".0123.part").write_bytes(b"left by a killed process")
    cache.fetch(good, obj, ignore)
    assert files_below(tmp_path / "cache" / "blobs") == [blob]


def test_waiting_for_another_stager_ends_when_told_to_stop(tmp_path):
    store, cache = SlowFolder(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    holding, release = threading.Event(), threading.Event()

    def hold(nbytes):
        holding.set()
        release.wait(10)

    def stop(nbytes):
        raise StagingError("told to stop")

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(cache.fetch, store, obj, hold)
        assert holding.wait(10)
        with pytest.raises(StagingError, match="told to stop"):
            cache.fetch(store, obj, stop)
        release.set()
        assert other.result() == "size"


def test_waiting_for_who_cleans_is_said_and_has_an_end(tmp_path, caplog):
    cache = Cache(tmp_path / "cache")
    cache.root.mkdir()
    with cache.alone() as alone, caplog.at_level("INFO"):
        assert alone
        refused = pytest.raises(StagingError, match="in-use: somebody has been cleaning this cache")
        with refused, cache.in_use(wait_s=0.2):
            pass
    assert caplog.text.count(f"{cache.root} is being cleaned: waiting") == 1
    with cache.in_use(wait_s=0):
        pass


def test_data_are_staged_on_nfs_version_4(tmp_path, monkeypatch):
    """Its client lets nobody share a lock on a file that is not open for reading.

    Source: nfs4_proc_lock in Linux's fs/nfs/nfs4proc.c.
    """
    flock, refused = fcntl.flock, {fcntl.LOCK_SH: os.O_WRONLY, fcntl.LOCK_EX: os.O_RDONLY}

    def of_nfs(file, how):
        access = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if access == refused.get(how & ~fcntl.LOCK_NB):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", of_nfs)
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    store.put_bytes("a", b"content")
    assert stage(store, cache, tmp_path / "run").fetched == 1
    with cache.in_use(), cache.alone() as alone:
        assert not alone
    with cache.alone() as alone:
        assert alone


def test_what_another_worker_sent_or_a_run_reads_is_used(tmp_path):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    obj, weeks_ago, now = store.put_bytes("a", b"content"), time.time() - 4e6, time.time()
    cache.fetch(store, obj, ignore)
    blob = cache.path(store, obj)
    facts = Path(cache._facts_of(blob))
    for path in (blob, facts):
        os.utime(path, (weeks_ago, weeks_ago))
    assert cache.used(blob) == pytest.approx(weeks_ago, abs=1)
    os.utime(blob, (now, weeks_ago))  # by ``make_room`` of the other worker
    assert cache.used(blob) == pytest.approx(now, abs=1)
    facts.unlink()  # as rsync leaves one that it has just sent
    assert cache.used(blob) == pytest.approx(now, abs=1)


def test_to_compare_a_blob_with_its_digest_is_no_use_of_it(tmp_path):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    obj, weeks_ago = store.put_bytes("a", b"content"), time.time() - 4e6
    cache.fetch(store, obj, ignore)
    blob = cache.path(store, obj)
    mtime = blob.stat().st_mtime_ns
    os.utime(blob, ns=(int(weeks_ago * 1e9), mtime))
    os.utime(cache._facts_of(blob), (weeks_ago, weeks_ago))
    assert list(cache.verify()) == []
    assert cache.used(blob) == pytest.approx(weeks_ago, abs=1)


class Shared(FolderStore):
    """Whose objects one caller may read, and another may only list."""

    def __init__(self, path, caller, *, may_read):
        super().__init__(path)
        self.asked, self._caller, self._may_read = 0, caller, may_read

    @property
    def caller(self):
        return self._caller

    def check_access(self, obj):
        self.asked += 1
        if not self._may_read:
            raise AccessDenied(f"{self.uri}/{obj.key}: the keys may not read it")

    def get(self, obj, path, advance):
        self.check_access(obj)
        return super().get(obj, path, advance)


def test_who_may_only_list_does_not_get_what_another_one_fetched(tmp_path):
    cache, place = Cache(tmp_path / "cache"), tmp_path / "data"
    owner, other = Shared(place, "a", may_read=True), Shared(place, "b", may_read=False)
    unknown = Shared(place, "", may_read=False)
    obj = owner.put_bytes("a", b"content")
    stage(owner, cache, tmp_path / "of-a")
    for store in (other, unknown):
        with pytest.raises(AccessDenied):
            cache.fetch(store, obj, ignore)
        with pytest.raises(AccessDenied):
            stage(store, cache, tmp_path / "of-b")
    assert not (tmp_path / "of-b").exists()


def test_a_caller_asks_once_and_one_that_nobody_knows_each_time(tmp_path):
    cache, place = Cache(tmp_path / "cache"), tmp_path / "data"
    one, other = Shared(place, "a", may_read=True), Shared(place, "b", may_read=True)
    unknown = Shared(place, "", may_read=True)
    one.put_bytes("a", b"content")
    for number in range(3):
        for store in (one, other, unknown):
            stage(store, cache, tmp_path / f"{number}{store.caller}")
    assert (one.asked, other.asked, unknown.asked) == (1, 1, 3)


def rewrite(blob, content, *, hide):
    """Changes a blob where it is, as its owner can; and its time of change back."""
    found = blob.stat()
    blob.chmod(0o644)
    blob.write_bytes(content)
    if hide:
        os.utime(blob, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("hide", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_blob_that_was_changed_where_it_is_is_fetched_again(tmp_path, hide, again):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    found = [store.put_bytes(name, name.encode() * 100) for name in "abc"]
    stage(store, cache, tmp_path / "first")
    rewrite(cache.path(store, found[1]), b"x" * 100, hide=hide)
    done = stage(store, cache, tmp_path / ("first" if again else "second"))
    assert (done.fetched, done.reused) == (1, 2)
    for folder in ("first", "second")[: 1 if again else 2]:
        assert (tmp_path / folder / "b").read_bytes() == b"b" * 100


def crashed(monkeypatch, cache, blob, content):
    """The host has started again, and of a blob that is what was on disk."""
    found = blob.stat()
    monkeypatch.setattr(module, "boot_id", lambda: f"after {cache._boot}")
    blob.chmod(0o644)
    blob.write_bytes(content)
    os.utime(blob, ns=(found.st_atime_ns, found.st_mtime_ns))
    return Cache(cache.root)


@pytest.fixture
def one_host(monkeypatch):
    """The cache is on a disk of this host's own, whatever the tests' folder is on."""
    monkeypatch.setattr(module, "is_of_this_host", lambda folder: True)


def test_what_was_not_on_disk_when_the_host_went_down_is_found_out(tmp_path, monkeypatch, one_host):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    lost, whole = store.put_bytes("lost", b"x" * 100), store.put_bytes("whole", b"y" * 100)
    stage(store, cache, tmp_path / "first")
    again = crashed(monkeypatch, cache, cache.path(store, lost), bytes(100))
    assert not again.holds(store, lost) and again.holds(store, whole)
    assert stage(store, again, tmp_path / "first").fetched == 1
    assert (tmp_path / "first" / "lost").read_bytes() == b"x" * 100
    # What was read back was on disk, and is not read once more.
    read = []
    monkeypatch.setattr(module, "_is", lambda *about: read.append(about) or True)
    assert Cache(cache.root).holds(store, whole) and not read


def test_what_was_flushed_is_not_read_after_the_host_went_down(tmp_path, monkeypatch, one_host):
    monkeypatch.setattr(module, "_TICK_NS", 0)
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    stage(store, cache, tmp_path / "data-1")
    time.sleep(0.01)
    cache.flush()
    read = []
    monkeypatch.setattr(module, "_is", lambda *about: read.append(about) or True)
    again = crashed(monkeypatch, cache, cache.path(store, obj), b"content")
    assert again.holds(store, obj) and not read
    assert again.holds(store, obj)


def test_what_other_hosts_may_read_is_flushed_at_once(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(module, "is_of_this_host", lambda folder: False)
    monkeypatch.setattr(module, "_fsync", lambda path: flushed.append(path.stat().st_size))
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    for name in ("a", "b"):
        store.put_bytes(name, name.encode() * 7)
    stage(store, cache, tmp_path / "first")
    assert flushed == [7, 7]
    monkeypatch.setattr(module, "boot_id", lambda: "of another host")
    assert stage(store, Cache(cache.root), tmp_path / "second").reused == 2


def test_a_disk_of_this_host_is_told_from_one_that_others_have(tmp_path, monkeypatch):
    device = os.stat(tmp_path).st_dev
    line = f"9 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - %s where rw\n"
    for kind, own in (("ext4", True), ("xfs", True), ("nfs4", False), ("fuse.s3fs", False)):
        with monkeypatch.context() as patched:
            text = "8 1 0:5 / /other rw - tmpfs none rw\n" + line % kind
            patched.setattr(module.Path, "read_text", lambda *_, text=text: text)
            assert module.is_of_this_host(tmp_path) is own


@pytest.fixture
def one_folder(monkeypatch):
    """All blobs have one folder, as with many thousands of them."""

    def path(self, store, obj):
        return self.root / "blobs" / "ab" / f"ab{obj.key}-{obj.etag}"

    monkeypatch.setattr(Cache, "path", path)


def test_small_objects_of_one_folder_come_once_for_all_stagers(tmp_path, one_folder):
    store, cache = SlowFolder(tmp_path / "data"), Cache(tmp_path / "cache")
    for number in range(5):
        store.put_bytes(f"{number}", b"x" * number)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda n: stage(store, cache, tmp_path / f"{n}"), range(3)))
    assert store.transfers == 5
    assert sorted(one.fetched for one in done) == [0, 0, 5]
    for number in range(3):
        assert (tmp_path / f"{number}" / "4").read_bytes() == b"xxxx"


@pytest.mark.parametrize("fails", [3, 4])
def test_small_objects_that_came_before_one_failed_are_kept(tmp_path, one_folder, fails):
    class Breaks(SlowFolder):
        breaks = True

        def get(self, obj, path, advance):
            if self.breaks and obj.key == str(fails):
                path.write_bytes(b"half")
                raise StagingError("connection lost")
            return super().get(obj, path, advance)

    store, cache = Breaks(tmp_path / "data"), Cache(tmp_path / "cache")
    for number in range(5):
        store.put_bytes(f"{number}", b"x" * number)
    with pytest.raises(StagingError, match="connection lost"):
        stage(store, cache, tmp_path / "first")
    blobs = cache.root / "blobs" / "ab"
    assert len(list(blobs.iterdir())) == fails
    (blobs / "small.0123.part").write_bytes(b"left by a killed process")
    store.breaks = False
    assert stage(store, cache, tmp_path / "first").fetched == 5 - fails
    assert len(list(blobs.iterdir())) == 5


def test_facts_that_were_cut_off_have_the_object_fetched_again(tmp_path):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    stage(store, cache, tmp_path / "first")
    facts = Path(cache._facts_of(cache.path(store, obj)))
    facts.write_bytes(facts.read_bytes()[:20])
    assert stage(store, cache, tmp_path / "first").fetched == 1
    assert stage(store, cache, tmp_path / "first").reused == 1


@pytest.mark.parametrize("algorithm", ["sha256", "md5", *checksums.CRCS])
def test_what_is_kept_is_held_to_the_digests_that_it_came_with(tmp_path, algorithm):
    """Also what an earlier version has fetched."""

    class Store(FolderStore):
        def get(self, obj, path, advance):
            fetched = super().get(obj, path, advance)
            pieces = [checksums.hex_of(algorithm, path.read_bytes())]
            return fetched._replace(pieces=pieces, algorithm=algorithm)

    store, cache = Store(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    cache.fetch(store, obj, ignore)
    assert list(cache.verify()) == [] and cache.drop_damaged(store, [obj]) == []
    rewrite(cache.path(store, obj), b"c0ntent", hide=True)
    assert cache.drop_damaged(store, [obj]) == [obj] and not cache.holds(store, obj)


def test_verify_reads_all_of_it_and_removes_what_is_not_what_was_fetched(tmp_path):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    large = store.put_bytes("large", bytes(33 * 2**20))
    found = [large, store.put_bytes("empty", b""), store.put_bytes("small", b"1")]
    for obj in found:
        cache.fetch(store, obj, ignore)
    assert list(cache.verify()) == []
    blob = cache.path(store, large)
    rewrite(blob, bytes(33 * 2**20 - 1) + b"x", hide=True)  # in its last piece
    assert list(cache.verify()) == [blob] and not blob.exists()
    assert list(cache.verify()) == []
    assert [cache.holds(store, obj) for obj in found] == [False, True, True]


class Ranges:
    """A file in ranges: ``download.Source``."""

    def __init__(self, path):
        self._path, self.asked = path, 0

    def read(self, start, into, advance):
        self.asked += 1
        with open(self._path, "rb") as file:
            file.seek(start)
            file.readinto(into)
        advance(len(into))

    def check(self):
        return Check("size")


class Resuming(FolderStore):
    """Goes on with what an earlier fetch left, as a bucket does."""

    def __init__(self, path):
        super().__init__(path)
        self.source = Ranges(self.path / "a")

    @property
    def resumes(self):
        return True

    def get(self, obj, path, advance):
        return download(self.source, obj.size, path, advance)


@pytest.fixture
def pieces(monkeypatch):
    """Smaller ones than the program's, which take less time."""
    for where in (module, of_download, lanes):
        monkeypatch.setattr(where, "PIECE", 64 * 1024)


def test_who_is_killed_at_the_very_end_keeps_nobody_but_root_from_going_on(
    pieces, trainer, monkeypatch
):
    (place := trainer.place / "of-trainer").mkdir()
    os.chown(place, trainer.uid, trainer.gid)
    replace, content = os.replace, os.urandom(200_000)

    def killed(source, target):
        if str(source).endswith(".bytes.part"):
            raise KeyboardInterrupt
        replace(source, target)

    with trainer.acting():
        store, cache = Resuming(place / "data"), Cache(place / "cache")
        obj = store.put_bytes("a", content)
        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.fetch(store, obj, ignore)
        monkeypatch.setattr(os, "replace", replace)
        asked = store.source.asked
        cache.fetch(store, obj, ignore)
    assert cache.path(store, obj).read_bytes() == content and store.source.asked == asked
    assert files_below(place / "cache" / "blobs") == [cache.path(store, obj)]


def test_what_a_killed_stager_left_keeps_no_other_user_of_the_cache_from_the_object(
    pieces, trainer, monkeypatch
):
    """Workers of two queues, whose users have a group that the cache is theirs by."""
    (place := trainer.place / "shared").mkdir()
    os.chown(place, -1, trainer.gid)
    place.chmod(0o2775)

    def killed(source):
        raise KeyboardInterrupt

    umask, content = os.umask(0o002), os.urandom(200_000)
    try:
        store, cache = Resuming(place / "data"), Cache(place / "cache")
        obj = store.put_bytes("a", content)
        with monkeypatch.context() as patched:
            patched.setattr(Ranges, "check", killed)
            with pytest.raises(KeyboardInterrupt):
                cache.fetch(store, obj, ignore)
        assert len(files_below(place / "cache" / "blobs")) == 2
        with trainer.acting():
            cache.fetch(store, obj, ignore)
    finally:
        os.umask(umask)
    assert files_below(place / "cache" / "blobs") == [cache.path(store, obj)]
    assert cache.path(store, obj).read_bytes() == content
    assert cache.path(store, obj).stat().st_uid == trainer.uid


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT])
def test_what_does_not_fit_when_it_is_flushed_does_not_stay(pieces, tmp_path, monkeypatch, full):
    """Over NFS a full disk, or a quota, is told at the end."""
    store, cache = Resuming(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", os.urandom(200_000))
    monkeypatch.setattr(module, "is_of_this_host", lambda folder: False)

    def fsync(descriptor):
        raise OSError(full, os.strerror(full))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(NoSpace):
        cache.fetch(store, obj, ignore)
    assert files_below(tmp_path / "cache" / "blobs") == []
