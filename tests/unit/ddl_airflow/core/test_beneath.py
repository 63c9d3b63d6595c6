from __future__ import annotations

import errno
import os
import socket
import stat

import pytest

from ddl_airflow.core.beneath import (
    check_folder,
    open_beneath,
    read_beneath,
    read_object,
    write_beneath,
)
from ddl_airflow.core.errors import FileRefused


@pytest.fixture
def run(tmp_path):
    """A run's folder with a file, beside one that is not its own."""
    root = tmp_path / "run"
    (root / "logs").mkdir(parents=True)
    (root / "logs" / "a.log").write_text("said")
    (tmp_path / "victim").write_text("secret")
    return root


def test_regular_files_are_read_also_where_the_root_is_reached_by_a_link(run, tmp_path):
    assert read_beneath(run / "logs" / "a.log", run) == b"said"
    (tmp_path / "site").symlink_to(tmp_path)
    assert read_beneath(tmp_path / "site/run/logs/a.log", tmp_path / "site") == b"said"
    with pytest.raises(FileNotFoundError, match="logs/none"):
        read_beneath(run / "logs" / "none", run)


def _link(path, victim):
    path.symlink_to(victim)


def _fifo(path, _victim):
    os.mkfifo(path)


def _socket(path, _victim):
    os.chdir(path.parent)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path.name)  # the whole path is too long for one


def _folder(path, _victim):
    path.mkdir()


@pytest.mark.parametrize("plant", [_link, _fifo, _socket, _folder])
def test_nothing_but_regular_files_is_opened_and_nothing_waits(run, tmp_path, plant, monkeypatch):
    monkeypatch.chdir(run)
    plant(run / "odd", tmp_path / "victim")
    with pytest.raises(FileRefused, match="run/odd"):
        read_beneath(run / "odd", run)
    with pytest.raises(FileRefused):
        open_beneath(run / "odd", run, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    assert (tmp_path / "victim").read_text() == "secret"


def test_no_folder_on_the_way_is_a_link(run, tmp_path):
    (run / "there").symlink_to(run / "logs")
    for path in (run / "there" / "a.log", run / "logs" / ".." / "logs" / "a.log", tmp_path / "x"):
        with pytest.raises(FileRefused):
            read_beneath(path, run)
    check_folder(run / "logs", run)
    with pytest.raises(FileRefused, match="No link beneath"):
        check_folder(run / "there", run)


def test_a_file_of_another_user_is_not_read(run):
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    os.chown(run / "logs" / "a.log", 12345, -1)
    with pytest.raises(FileRefused, match="belongs to user id 12345"):
        read_beneath(run / "logs" / "a.log", run)
    for folder in (run, run / "logs"):
        os.chown(folder, 12345, -1)
        assert read_beneath(run / "logs" / "a.log", run) == b"said"
        os.chown(folder, 0, -1)


def test_writing_replaces_a_link_and_does_not_follow_it(run, tmp_path):
    (run / "state").symlink_to(tmp_path / "victim")
    (run / ".state.new").symlink_to(tmp_path / "victim")
    write_beneath(run / "state", run, b"new")
    assert (run / "state").read_text() == "new" and not (run / "state").is_symlink()
    assert (tmp_path / "victim").read_text() == "secret"


def test_what_is_written_is_on_disk_before_it_takes_its_place(run, monkeypatch):
    """A host that crashes just after leaves no empty file, and not the one before."""
    done = []

    def fsync(descriptor):
        found = os.fstat(descriptor)
        folder = os.path.samestat(found, os.stat(run))
        assert folder or found.st_size == 3  # not in a buffer of Python's
        done.append("fsync of the folder" if folder else "fsync")

    replace = os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *a, **k: [done.append("replace"), replace(*a, **k)])
    write_beneath(run / "state", run, b"new")
    assert done == ["fsync", "replace", "fsync of the folder"]
    assert (run / "state").read_text() == "new"


def test_a_file_system_that_flushes_no_folders_is_written_to(run, monkeypatch):
    """As that of VirtualBox's shared folders."""
    fsync = os.fsync

    def of_files(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    write_beneath(run / "state", run, b"new")
    assert (run / "state").read_text() == "new"


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 5000, "[1]", "{", "\xff", "x" * 100])
def test_what_is_no_json_object_is_refused_by_name(run, content):
    (run / "odd.json").write_text(content, "latin-1")
    with pytest.raises(FileRefused, match=r"odd\.json"):
        read_object(run / "odd.json", run)


def test_a_large_file_is_refused(run):
    with pytest.raises(FileRefused, match="larger than 3 bytes"):
        read_beneath(run / "logs" / "a.log", run, 3)
