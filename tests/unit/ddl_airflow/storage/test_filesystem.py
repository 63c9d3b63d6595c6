from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import resource
import stat
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ddl_airflow.core.errors import (
    AccessDenied,
    NoSpace,
    SourceMissing,
    StagingError,
    TransferCorrupt,
)
from ddl_airflow.core.selection import Selection
from ddl_airflow.storage import filesystem
from ddl_airflow.storage.filesystem import (
    FolderStore,
    _unlink_lock,
    alone_in,
    lock_of,
    os_errors,
    paths_below,
)
from ddl_airflow.storage.store import PART_PREFIX
from tests.limits import within


def ignore(nbytes):
    pass


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@contextmanager
def file_size_limit(nbytes):
    """The kernel refuses to let any file grow beyond ``nbytes``: a full disk, without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_links_lead_to_no_other_folders_than_may_be_read(tmp_path):
    data, shared, other = (tmp_path / name for name in ("data", "shared", "other"))
    for folder in (data, shared, other):
        folder.mkdir()
        (folder / "a").write_text(folder.name)
    (data / "b").symlink_to(shared / "a")
    (data / "c").symlink_to(shared)
    store = FolderStore(data, within=[data, shared])
    assert [obj.key for obj in store.list()] == ["a", "b", "c/a"]
    for name, place in (("file", other / "a"), ("folder", other)):
        (data / name).symlink_to(place)
        with pytest.raises(StagingError, match=rf"data/{name} leads to .*/other"):
            store.list()
        (data / name).unlink()
    # Changed since it was listed.
    (found, *_) = store.list()
    (data / "a").unlink()
    (data / "a").symlink_to(other / "a")
    with pytest.raises(StagingError, match="data/a leads to"):
        store.get(found, tmp_path / "copy", lambda count: None)


def swaps(monkeypatch, swap):
    """An author who changes the folder just after it was looked at, once."""
    check = FolderStore._check_within
    left = [swap]

    def check_and_swap(*words):
        check(*words)
        if left:
            left.pop()()

    monkeypatch.setattr(FolderStore, "_check_within", check_and_swap)


def link_instead(path, to):
    path.rename(path.with_name("before"))
    path.symlink_to(to)


def test_a_link_that_is_put_there_after_the_look_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("key")
    FolderStore(tmp_path / "data").put_bytes("a", b"own")
    store = FolderStore(tmp_path / "data", within=[tmp_path / "data"])
    (found,) = store.list()
    swaps(monkeypatch, lambda: link_instead(tmp_path / "data/a", tmp_path / "secret"))
    store.get(found, tmp_path / "copy", ignore)
    assert (tmp_path / "copy").read_text() == "own"
    for read in (lambda: store.read_bytes("a"), lambda: store.read_version("a")):
        with pytest.raises(StagingError, match="data/a leads to .*/secret"):
            read()
    with pytest.raises(StagingError, match="data/a leads to"):
        store.check_access(found)


def test_nothing_is_written_nor_removed_over_a_link_that_leads_out(tmp_path):
    dags, results = tmp_path / "dags", tmp_path / "results"
    for folder in (dags, results):
        folder.mkdir()
    (dags / "theirs.py").write_text("dag")
    (tmp_path / "f").write_bytes(b"x")
    for link in ("run", "road"):
        (results / link).symlink_to(dags)
    store = FolderStore(results, within=[results])
    for change in (
        lambda: store.at("run").put_bytes("new/x.py", b"x"),
        lambda: store.put(tmp_path / "f", "run/x.py", sha256(b"x"), ignore),
        lambda: store.put_if("road/latest.json", b"x", None),
        lambda: store.delete(["run/theirs.py"]),
    ):
        with pytest.raises(StagingError, match=r"results/(run|road).* leads to .*dags"):
            change()
    assert [path.name for path in dags.iterdir()] == ["theirs.py"]


def test_nothing_is_written_over_a_link_that_is_put_there_after_the_look(tmp_path, monkeypatch):
    dags, results = tmp_path / "dags", tmp_path / "results"
    (results / "run").mkdir(parents=True)
    dags.mkdir()
    swaps(monkeypatch, lambda: link_instead(results / "run", dags))
    FolderStore(results, within=[results]).put_bytes("run/x.py", b"x")
    assert list(dags.iterdir()) == []
    assert (results / "before/x.py").read_bytes() == b"x"


def test_a_lock_that_is_a_link_makes_no_file_elsewhere(tmp_path):
    store = FolderStore(tmp_path / "results")
    assert store.put_if("latest.json", b"1", None)
    lock = tmp_path / "results/.ddl-part-lock-latest.json"
    lock.symlink_to(tmp_path / "made")
    with pytest.raises(StagingError, match=r"latest\.json"):
        store.put_if("latest.json", b"2", store.read_version("latest.json")[1])
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("links", [True, False])
def test_of_many_who_put_one_that_is_new_one_does(tmp_path, monkeypatch, links):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:  # as on a disk with a file system of Windows
        monkeypatch.setattr(os, "link", refuse)
    store = FolderStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda n: store.put_if("a/x.json", b"%d" % n, None), range(32)))
    assert done.count(True) == 1
    assert store.read_bytes("a/x.json") == b"%d" % done.index(True)
    store.delete(["a/x.json"])
    assert not (tmp_path / "a").exists()


def test_each_change_follows_the_one_before_though_the_file_is_removed_meanwhile(tmp_path):
    store, wanted = FolderStore(tmp_path), 200

    def change(_):
        while True:
            body, version = store.read_version("x.json") or (b"0", None)
            if store.put_if("x.json", b"%d" % (int(body) + 1), version):
                return

    over = threading.Event()

    def remove_locks():
        while not over.is_set():
            _unlink_lock(".ddl-part-lock-x.json", folder)

    folder = os.open(tmp_path, os.O_RDONLY)
    with ThreadPoolExecutor(5) as pool:
        removing = pool.submit(remove_locks)
        list(pool.map(change, range(wanted), timeout=within(60)))
        over.set()
        removing.result()
    os.close(folder)
    assert store.read_bytes("x.json") == b"%d" % wanted
    assert not [
        path for path in tmp_path.iterdir() if path.name not in ("x.json", ".ddl-part-lock-x.json")
    ]


def test_a_lock_that_others_remove_and_make_again_is_not_removed_by_its_name(tmp_path, monkeypatch):
    store, took, held = FolderStore(tmp_path), filesystem._took_lock, ExitStack()
    store.put_if("x", b"1", None)
    store.put_if("x", b"2", store.read_version("x")[1])
    name, folder = ".ddl-part-lock-x", os.open(tmp_path, os.O_RDONLY)

    def meanwhile(lock, how=fcntl.LOCK_EX):
        monkeypatch.setattr(filesystem, "_took_lock", took)
        _unlink_lock(name, folder)
        held.enter_context(store._replacing(tmp_path / "x"))
        return took(lock, how)

    monkeypatch.setattr(filesystem, "_took_lock", meanwhile)
    _unlink_lock(name, folder)
    os.close(folder)
    with held, (tmp_path / name).open("rb") as lock:
        assert not took(lock.fileno())


@pytest.mark.parametrize(
    ("number", "error"), [(errno.EIO, StagingError), (errno.EBADF, AccessDenied)]
)
def test_a_lock_that_cannot_be_had_is_said(tmp_path, monkeypatch, number, error):
    store = FolderStore(tmp_path)
    store.put_if("x", b"1", None)

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(error, match=r"\.ddl-part-lock-x: "):
        store.put_if("x", b"2", store.read_version("x")[1])


def test_a_link_to_nowhere_is_replaced(tmp_path):
    (tmp_path / "x").symlink_to("nowhere")
    store = FolderStore(tmp_path)
    assert store.read_version("x") is None and store.put_if("x", b"1", None)
    assert store.read_bytes("x") == b"1"


def test_who_may_replace_a_file_may_lock_it(tmp_path, monkeypatch):
    """Of a folder that a group shares, whose members have the umask 022."""
    (results := tmp_path / "results").mkdir()
    results.chmod(0o2775)
    store, lock = FolderStore(results), results / ".ddl-part-lock-x.json"
    version = None
    for body in (b"1", b"2"):
        assert store.put_if("x.json", body, version)
        version = store.read_version("x.json")[1]
    assert stat.S_IMODE(lock.stat().st_mode) == 0o664
    # One of an earlier version of ours.
    opened = os.open

    def as_another(path, flags, *words, **named):
        if path == lock.name and flags & os.O_WRONLY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opened(path, flags, *words, **named)

    monkeypatch.setattr(os, "open", as_another)
    assert store.put_if("x.json", b"3", version)


@contextmanager
def umask(mask):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_what_replaces_a_file_may_be_read_by_those_who_could_before(tmp_path):
    """Somebody rolls back with the umask 077."""
    store, pointer = FolderStore(tmp_path), tmp_path / "production.json"
    with umask(0o022):
        assert store.put_if("production.json", b"1", None)
    pointer.chmod(0o664)
    with umask(0o077):
        assert store.put_if("production.json", b"2", store.read_version("production.json")[1])
        assert stat.S_IMODE(pointer.stat().st_mode) == 0o664
        store.put_bytes("production.json", b"3")
    assert stat.S_IMODE(pointer.stat().st_mode) == 0o664
    assert pointer.read_bytes() == b"3"


def test_a_new_file_may_be_read_by_those_who_may_replace_it(tmp_path):
    tmp_path.chmod(0o2775)
    store = FolderStore(tmp_path)
    with umask(0o077):
        assert store.put_if("latest.json", b"1", None)
        store.put_bytes("index", b"1")
    for name in ("latest.json", "index"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o660


@pytest.mark.parametrize(
    ("above", "mask", "folders", "file"),
    [
        (0o2775, 0o077, 0o2775, 0o660),
        (0o2770, 0o027, 0o2770, 0o660),
        (0o755, 0o077, 0o755, 0o600),
        (0o1777, 0o077, 0o755, 0o600),  # there each may remove no more than what is their own
        (0o700, 0o022, 0o755, 0o644),
    ],
)
def test_new_folders_are_open_to_those_to_whom_the_one_above_is(
    tmp_path, above, mask, folders, file
):
    (results := tmp_path / "results").mkdir()
    results.chmod(above)
    with umask(mask):
        FolderStore(results).at("training/publication").put_bytes("model/graph", b"1")
    made = [one for one in results.rglob("*") if one.is_dir()]
    assert len(made) == 3 and {stat.S_IMODE(one.stat().st_mode) for one in made} == {folders}
    assert stat.S_IMODE((made[-1] / "graph").stat().st_mode) == file
    assert sorted(one.name for one in results.rglob("*")) == [
        *("graph", "model", "publication", "training")
    ]


def test_the_place_itself_is_made_as_the_umask_has_it(tmp_path):
    tmp_path.chmod(0o755)
    with umask(0o077):
        FolderStore(tmp_path / "made" / "results").put_bytes("x", b"1")
    for made in (tmp_path / "made", tmp_path / "made" / "results"):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_files_of_all_threads_are_shared_by_a_group(tmp_path):
    """A folder is seen once it has its rights, from which its files have theirs."""
    tmp_path.chmod(0o2775)
    store = FolderStore(tmp_path)
    keys = [f"{number}/{file}" for number in range(60) for file in range(8)]
    with umask(0o077), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put_bytes(key, b"1"), keys))
    assert [one.key for one in store.list()] == sorted(keys)
    assert {stat.S_IMODE((tmp_path / key).stat().st_mode) for key in keys} == {0o660}


def test_a_folder_that_was_being_made_is_unfinished(tmp_path):
    left = tmp_path / "training" / f"{PART_PREFIX}{'0' * 32}"
    left.mkdir(parents=True)
    store = FolderStore(tmp_path)
    (one,) = store.unfinished()
    store.discard(one)
    assert not left.parent.exists()


def test_what_root_publishes_locks_nobody_out(trainer):
    """``sudo ddl-airflow run --publish``, where each root has the umask 077."""
    (results := trainer.place / "results").mkdir()
    os.chown(results, trainer.uid, trainer.gid)
    results.chmod(0o770)
    with umask(0o077):
        FolderStore(results).at("training").put_bytes("model/graph", b"1")
    for one in results.rglob("*"):
        found = one.stat()
        assert (found.st_uid, found.st_gid) == (trainer.uid, trainer.gid)
        assert stat.S_IMODE(found.st_mode) == (0o770 if one.is_dir() else 0o660)
    with trainer.acting():
        store = FolderStore(results)
        assert store.read_bytes("training/model/graph") == b"1"
        store.delete(["training/model/graph"])
    assert not list(results.iterdir())


@pytest.mark.parametrize(("above", "folder"), [(0o777, 0o777), (0o707, 0o777), (0o1777, 0o755)])
def test_what_a_folders_group_may_is_not_given_to_another_group(trainer, above, folder):
    """Who publishes is not in the group of the place, and so cannot give it anything."""
    (results := trainer.place / "results").mkdir()
    results.chmod(above)
    with trainer.acting(), umask(0o077):
        FolderStore(results).put_bytes("made/x", b"1")
    found = (results / "made").stat()
    assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (trainer.gid, folder)


def test_roots_rollback_locks_nobody_out(trainer):
    """``sudo ddl-airflow rollback``, where each root has the umask 077."""
    (results := trainer.place / "results").mkdir()
    os.chown(results, trainer.uid, trainer.gid)
    store = FolderStore(results)
    with trainer.acting():
        assert store.put_if("latest.json", b"1", None)
    with umask(0o077):
        assert store.put_if("latest.json", b"2", store.read_version("latest.json")[1])
        assert store.put_if("production.json", b"2", None)
    with trainer.acting():
        for name in ("latest.json", "production.json"):
            assert store.put_if(name, b"3", store.read_version(name)[1])


def test_a_file_is_replaced_also_where_its_owner_and_mode_cannot_be_kept(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuse)
    monkeypatch.setattr(os, "fchmod", refuse)
    store = FolderStore(tmp_path)
    assert store.put_if("x", b"1", None)
    assert store.put_if("x", b"2", store.read_version("x")[1])


def test_links_of_the_sites_own_go_on_working(tmp_path):
    """The folder itself is a link, and one in it leads to another disk that is allowed."""
    disk, other = tmp_path / "disk", tmp_path / "other"
    for folder in (disk, other):
        folder.mkdir()
    (tmp_path / "results").symlink_to(disk)
    (disk / "road").symlink_to(other)
    (disk / "b").symlink_to("a")
    for places in ([disk, other], None):
        store = FolderStore(tmp_path / "results", within=places)
        store.put_bytes("a", b"1")
        store.at("run").put_bytes("deep/er/c", b"2")
        assert store.put_if("road/latest.json", b"3", None)
        assert store.put_if("road/latest.json", b"4", store.read_version("road/latest.json")[1])
        assert [obj.key for obj in store.list()] == ["a", "b", "road/latest.json", "run/deep/er/c"]
        assert store.read_bytes("b") == b"1" and (other / "latest.json").read_bytes() == b"4"
        store.delete(["run/deep/er/c", "road/latest.json"])
        assert not (disk / "run").exists() and (disk / "road").is_symlink()
    # One that is allowed and not there is made.
    FolderStore(tmp_path / "new/out", within=[tmp_path / "new"]).put_bytes("a", b"1")


def test_list_gives_nested_files_sorted_and_follows_links(tmp_path):
    store = FolderStore(tmp_path / "data")
    for index, key in enumerate(["b/x ü", "a", "b/c/d"]):
        store.put_bytes(key, b"z" * index)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "data" / "b" / "c")
    (tmp_path / "data" / "empty").mkdir()
    assert [(o.key, o.size) for o in store.list()] == [
        ("a", 1),
        ("b/c/d", 2),
        ("b/x ü", 0),
        ("link/d", 2),
    ]
    assert [o.key for o in store.at("b").list()] == ["c/d", "x ü"]


def test_list_refuses_a_link_to_a_parent(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    with pytest.raises(StagingError, match="links to a folder above itself"):
        FolderStore(tmp_path).list()


def test_list_refuses_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StagingError, match="pipe is no file.*training_data_reference.exclude"):
        FolderStore(tmp_path).list()


def test_a_link_that_leads_nowhere_is_named_with_where_it_leads(tmp_path):
    (tmp_path / "lost").symlink_to("nowhere")
    said = f"{tmp_path}/lost is a link to nowhere, which is not there. Remove it."
    with pytest.raises(SourceMissing, match=f"{said}.*training_data_reference.exclude"):
        FolderStore(tmp_path).list()


@pytest.mark.parametrize("kind", ["missing", "file"])
def test_list_of_no_folder_is_source_missing(tmp_path, kind):
    if kind == "file":
        (tmp_path / "x").write_bytes(b"")
    with pytest.raises(SourceMissing, match=str(tmp_path / "x")) as caught:
        FolderStore(tmp_path / "x").list()
    assert "correct the path" in str(caught.value)


def test_identity_changes_with_the_file(tmp_path):
    store = FolderStore(tmp_path)
    first = store.put_bytes("a", b"one")
    assert store.identity(store.list()[0]) == store.identity(first)
    os.utime(tmp_path / "a", ns=(1, 1))
    assert store.identity(store.list()[0]) != store.identity(first)


def test_get_copies_and_shares_nothing_with_the_source(tmp_path):
    store = FolderStore(tmp_path / "data")
    obj = store.put_bytes("a", b"one")
    assert store.get(obj, tmp_path / "copy", ignore).checked == "size"
    (tmp_path / "data" / "a").write_bytes(b"two")
    assert (tmp_path / "copy").read_bytes() == b"one"


def test_get_of_a_file_that_changed_since_listing_is_corrupt(tmp_path):
    store = FolderStore(tmp_path / "data")
    obj = store.put_bytes("a", b"one")
    (tmp_path / "data" / "a").write_bytes(b"longer")
    with pytest.raises(TransferCorrupt, match="changed while it was read"):
        store.get(obj, tmp_path / "copy", ignore)


def test_get_of_a_file_that_another_host_writes_to_is_corrupt(tmp_path, monkeypatch):
    """NFS tells whoever opens a file; who has it open goes on with what it was told then."""
    store, fstat, told = FolderStore(tmp_path / "data"), os.fstat, {}
    obj = store.put_bytes("a", b"one")

    def write(nbytes):
        with open(tmp_path / "data" / "a", "r+b") as file:
            file.write(b"two")

    def when_it_was_opened(descriptor):
        return told.setdefault(descriptor, fstat(descriptor))

    monkeypatch.setattr(os, "fstat", when_it_was_opened)
    with pytest.raises(TransferCorrupt, match="changed while it was read"):
        store.get(obj, tmp_path / "copy", write)


def test_a_rename_of_which_the_answer_was_lost_is_done(tmp_path, monkeypatch):
    """NFS asks again, and hears that there is no such file."""
    store, replace = FolderStore(tmp_path / "out"), os.replace
    (tmp_path / "f").write_bytes(b"now")

    def asked_twice(*names, **folders):
        replace(*names, **folders)
        replace(*names, **folders)

    monkeypatch.setattr(os, "replace", asked_twice)
    store.put_bytes("a", b"before")
    stored = store.put(tmp_path / "f", "a", sha256(b"now"), ignore)
    assert store.list() == [stored] and store.read_bytes("a") == b"now"

    def in_vain(part, name, *, src_dir_fd, dst_dir_fd):
        os.unlink(part, dir_fd=src_dir_fd)
        replace(part, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "replace", in_vain)  # another one stands there, or none
    for key in ("a", "b"):
        with pytest.raises(SourceMissing):
            store.put_bytes(key, b"lost")
    assert store.list() == [stored]


def test_put_of_a_file_with_another_digest_leaves_nothing(tmp_path):
    (tmp_path / "f").write_bytes(b"now")
    store = FolderStore(tmp_path / "out")
    with pytest.raises(TransferCorrupt, match="changed"):
        store.put(tmp_path / "f", "a/f", sha256(b"before"), ignore)
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == []


def test_put_beyond_the_size_limit_is_no_space_and_leaves_no_file(tmp_path):
    content = b"x" * 300_000
    (tmp_path / "f").write_bytes(content)
    store = FolderStore(tmp_path / "out")
    with file_size_limit(100_000), pytest.raises(NoSpace, match="300,000 bytes to write") as caught:
        store.put(tmp_path / "f", "big", sha256(content), ignore)
    assert "free" in str(caught.value) and str(tmp_path / "out") in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert list((tmp_path / "out").iterdir()) == []


def test_keys_cannot_leave_the_folder(tmp_path):
    store = FolderStore(tmp_path / "in")
    with pytest.raises(StagingError, match="is no path"):
        store.put_bytes("../out", b"")
    with pytest.raises(StagingError, match="is no path"):
        FolderStore(tmp_path, "../up")


def test_delete_removes_folders_that_become_empty_but_not_the_store(tmp_path):
    store = FolderStore(tmp_path / "out")
    for key in ("a/b/c", "a/d"):
        store.at("run").put_bytes(key, b"1")
    store.at("run").delete(["a/b/c", "a/never/was"])
    assert [o.key for o in store.list()] == ["run/a/d"]
    assert not (tmp_path / "out/run/a/b").exists()
    store.at("run").delete(["a/d"])
    assert list((tmp_path / "out").iterdir()) == []


def test_read_and_exists(tmp_path):
    store = FolderStore(tmp_path)
    store.put_bytes("a/b", b"1")
    assert store.read_bytes("a/b") == b"1"
    assert store.exists("a/b") and not store.exists("a") and not store.exists("c")
    with pytest.raises(SourceMissing):
        store.read_bytes("c")


@pytest.mark.parametrize(
    ("raised", "mapped", "retryable"),
    [
        (OSError(28, "No space left on device"), NoSpace, True),
        (OSError(122, "Disk quota exceeded"), NoSpace, True),
        (PermissionError(13, "Permission denied", "/p"), AccessDenied, False),
        (OSError(30, "Read-only file system"), AccessDenied, False),
        (OSError(5, "Input/output error"), StagingError, True),
    ],
)
def test_os_errors_maps_by_number_and_keeps_the_cause(tmp_path, raised, mapped, retryable):
    with pytest.raises(StagingError) as caught, os_errors(tmp_path, 7):
        raise raised
    assert type(caught.value) is mapped
    assert caught.value.retryable is retryable
    assert caught.value.__cause__ is raised
    assert (raised.filename or str(tmp_path)) in str(caught.value)


def test_who_is_alone_in_a_folder_is_named_to_others(tmp_path):
    with alone_in(tmp_path / "a", "one"):
        asked = alone_in(tmp_path / "a", "two")
        with pytest.raises(StagingError, match="works there now: one on ") as caught, asked:
            pass
        assert caught.value.retryable
        with alone_in(tmp_path / "b", "two"):
            pass
    with alone_in(tmp_path / "a", "two"):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_said_and_not_tried_again(tmp_path, monkeypatch, number):
    def flock(*words):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    words = rf"\.a\.lock: {os.strerror(number)}\. .*Mount the workspace with locks"
    with pytest.raises(StagingError, match=words) as caught, alone_in(tmp_path / "a", "one"):
        pass
    assert caught.value.retryable is False


def test_who_may_wait_comes_in_when_the_other_leaves(tmp_path):
    leave = threading.Event()
    inside = threading.Event()

    def stay():
        with alone_in(tmp_path / "a", "one"):
            inside.set()
            leave.wait(10)

    one = threading.Thread(target=stay)
    one.start()
    assert inside.wait(10)
    threading.Timer(0.2, leave.set).start()
    with alone_in(tmp_path / "a", "two", wait_s=10):
        assert leave.is_set()
    one.join()


def test_a_process_that_inherits_it_keeps_others_out_after_its_starter_left(tmp_path):
    with alone_in(tmp_path / "a", "one") as lock:
        heir = subprocess.Popen(["sleep", "60"], pass_fds=(lock,))
    try:
        with pytest.raises(StagingError, match="one on "), alone_in(tmp_path / "a", "two"):
            pass
    finally:
        heir.kill()
        heir.wait()
    with alone_in(tmp_path / "a", "two"):
        pass


def test_a_file_is_replaced_only_in_the_version_that_was_read(tmp_path):
    store = FolderStore(tmp_path / "not there yet")
    assert store.read_version("a/p") is None
    assert store.put_if("a/p", b"1", None) and not store.put_if("a/p", b"2", None)
    body, version = store.read_version("a/p")
    assert body == b"1" and store.put_if("a/p", b"3", version)
    assert not store.put_if("a/p", b"4", version)
    assert [(obj.key, obj.size) for obj in store.list()] == [("a/p", 1)]


def test_a_file_system_without_locks_is_said_and_written_to(tmp_path, monkeypatch, caplog):
    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    store = FolderStore(tmp_path)
    assert store.put_if("p", b"1", None)
    assert store.put_if("p", b"2", store.read_version("p")[1])
    assert "locks no files for this host: of two processes" in caplog.text


def test_a_link_in_place_of_the_lock_has_nothing_truncated(tmp_path):
    (tmp_path / "victim").write_text("kept")
    lock_of(tmp_path / "state").symlink_to(tmp_path / "victim")
    with pytest.raises(StagingError, match="is a link"), alone_in(tmp_path / "state", "one"):
        pass
    assert (tmp_path / "victim").read_text() == "kept"


def test_a_full_disk_is_named_by_what_was_to_be_written(tmp_path):
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    with pytest.raises(NoSpace) as caught, os_errors(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device", str(source), None, str(target))
    assert str(caught.value).startswith(f"{target}: No space left on device: ")
    assert "0 bytes to write" not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "left", "said"),
    [(errno.ENOSPC, 0, True), (errno.ENOSPC, 1, False), (errno.EFBIG, 0, False)],
)
def test_a_disk_that_has_room_and_no_inodes_is_named_as_that(
    tmp_path, monkeypatch, number, left, said
):
    real = list(os.statvfs(tmp_path))
    real[5], real[7] = 1000, left  # f_files, f_favail
    monkeypatch.setattr("os.statvfs", lambda _: os.statvfs_result(real))
    with pytest.raises(NoSpace) as caught, os_errors(tmp_path / "deep" / "file", 10):
        raise OSError(number, "No space left on device")
    assert ("no more names (inodes) are free" in str(caught.value)) == said
    assert ("bytes free" in str(caught.value)) == (not said)
    real[4] = 0  # f_bavail: ZFS has no inodes left then, either
    with pytest.raises(NoSpace, match="bytes free"), os_errors(tmp_path / "file", 10):
        raise OSError(number, "No space left on device")


def test_a_folder_that_can_neither_be_used_nor_made_is_told_beforehand(tmp_path):
    (tmp_path / "file").write_text("")
    FolderStore(tmp_path / "not" / "there").check_writable()
    FolderStore(tmp_path).check_writable()
    for path in ("file", "file/results"):
        with pytest.raises(AccessDenied, match="file is no folder. Move it away"):
            FolderStore(tmp_path / path).check_writable()


def test_a_listing_does_without_what_goes_meanwhile(tmp_path, monkeypatch):
    """As others clean, or merge an index; it was a listing of nothing at all."""
    store = FolderStore(tmp_path)
    for number in range(4):
        store.put_bytes(f"folder-{number}/file", b"x")
    stat = Path.stat

    def slow(path, **how):
        if path.name == "file":  # found in its folder, and another process removes it
            path.unlink()
            path.parent.rmdir()
        return stat(path, **how)

    kept = tmp_path / "kept"
    kept.write_bytes(b"y")
    monkeypatch.setattr(Path, "stat", slow)
    assert [obj.key for obj in store.list()] == ["kept"]


def test_a_folder_that_may_not_be_read_is_not_left_out(tmp_path, monkeypatch):
    """As ranks of another user leave one that tempfile made."""
    for name in ("a/one", "b/two", "c/three"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    scandir = os.scandir

    def refuse(path):
        if os.path.basename(path) == "b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    below = paths_below(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in below] == ["a/one", "b", "c/three"]


def test_a_link_that_leads_nowhere_is_said(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(SourceMissing, match="link"):
        FolderStore(tmp_path).list()


def test_a_folder_that_others_empty_is_written_to_all_the_same(tmp_path):
    """Who removes the last file removes the folder, while another is about to write there."""
    store = FolderStore(tmp_path)
    ended = threading.Event()

    def come_and_go():
        while not ended.is_set():
            store.put_bytes("deep/new/other", b"")
            store.delete(["deep/new/other"])

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        for number in range(100):
            store.put_bytes("deep/new/mine", str(number).encode())
            assert store.put_if("deep/lock/mine", str(number).encode(), None)
            store.delete(["deep/new/mine", "deep/lock/mine", "deep/lock/.ddl-part-lock-mine"])
    finally:
        ended.set()
        other.join()


def test_a_link_to_itself_may_be_left_out(tmp_path):
    (tmp_path / "a").write_text("x")
    (tmp_path / "circle").symlink_to("circle")
    store = FolderStore(tmp_path, "", [tmp_path]).selecting(Selection(exclude=("circle",)))
    assert [one.key for one in store.list()] == ["a"]
