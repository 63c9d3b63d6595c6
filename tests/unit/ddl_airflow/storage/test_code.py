from __future__ import annotations

import os
import re
import resource
import subprocess
from contextlib import contextmanager

import pytest

from ddl_airflow.core.errors import NoSpace, SourceMissing, StagingError
from ddl_airflow.storage import code
from ddl_airflow.storage.code import snapshot


@pytest.fixture
def source(tmp_path):
    """A folder with two scripts."""
    folder = tmp_path / "scripts"
    (folder / "lib").mkdir(parents=True)
    (folder / "train.py").write_text("import lib.net\n")
    (folder / "lib" / "net.py").write_text("SIZE = 3\n")
    return folder


def test_copy_has_the_scripts_and_nothing_else(source, tmp_path, literal_keys):
    text, keys = literal_keys
    for name in ("manifest.yml", "manifest-prod.yaml", "big.manifest.yml", "named-otherwise.yml"):
        (source / name).write_text(text)
    (source / "settings.yml").write_text("layers: 3\n")
    (source / "lib" / "manifest.yml").write_text(text)
    (source / ".env").write_text("SECRET=1")
    for folder in (".git", "__pycache__", "node_modules"):
        (source / folder).mkdir()
        (source / folder / "file.py").write_text("no")
    (source / "dangling.py").symlink_to(tmp_path / "nowhere")
    taken = snapshot(source, tmp_path / "run" / "code")
    assert taken.files == ("lib/net.py", "settings.yml", "train.py")
    there = [p for p in (tmp_path / "run" / "code").rglob("*") if p.is_file()]
    assert sorted(p.relative_to(tmp_path / "run/code").as_posix() for p in there) == [*taken.files]
    assert not [k for p in there for k in keys if k in p.read_text()]
    assert (tmp_path / "run/code/lib/net.py").read_text() == "SIZE = 3\n"


def test_executable_scripts_stay_executable(source, tmp_path):
    (source / "go.sh").write_text("#!/bin/sh\n")
    (source / "go.sh").chmod(0o755)
    snapshot(source, tmp_path / "code")
    assert os.access(tmp_path / "code" / "go.sh", os.X_OK)


def test_destination_is_replaced_as_a_whole(source, tmp_path):
    snapshot(source, tmp_path / "code")
    (source / "lib" / "net.py").unlink()
    (source / "other.py").write_text("1")
    snapshot(source, tmp_path / "code")
    there = sorted(p.name for p in (tmp_path / "code").rglob("*") if p.is_file())
    assert there == ["other.py", "train.py"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["code", "scripts"]  # no leftover


def test_digest_depends_on_names_and_contents_alone(source, tmp_path):
    first = snapshot(source, tmp_path / "code").digest
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", first)
    os.utime(source / "train.py", (1, 1))
    (source / "manifest.yml").write_text("model_definition:\n")
    assert snapshot(source, tmp_path / "elsewhere").digest == first
    (source / "lib" / "net.py").write_text("SIZE = 4\n")
    changed = snapshot(source, tmp_path / "code").digest
    (source / "lib" / "net.py").write_text("SIZE = 3\n")
    (source / "train.py").rename(source / "trained.py")
    renamed = snapshot(source, tmp_path / "code").digest
    assert len({first, changed, renamed}) == 3


def test_folder_that_is_a_link_is_copied_too(source, tmp_path):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "data.py").write_text("x = 1\n")
    (source / "common").symlink_to(tmp_path / "common")
    assert "common/data.py" in snapshot(source, tmp_path / "code").files


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.mkdir(), lambda p: p.write_text("")])
def test_no_folder_or_nothing_in_it_is_missing(tmp_path, make):
    make(tmp_path / "scripts")
    with pytest.raises(SourceMissing, match=r"code: .*scripts.*Set `code:`"):
        snapshot(tmp_path / "scripts", tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_data_among_the_scripts_is_refused_with_the_largest_named(source, tmp_path, monkeypatch):
    monkeypatch.setattr(code, "_MOST_BYTES", 2 * 2**20)
    (source / "weights.bin").write_bytes(b"\0" * (2 * 2**20))
    with pytest.raises(StagingError, match="weights.bin") as caught:
        snapshot(source, tmp_path / "code")
    assert caught.value.retryable is False
    assert not (tmp_path / "code").exists()


@contextmanager
def file_size_limit(nbytes):
    """The kernel refuses to let any file grow beyond ``nbytes``: a full disk, without root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_no_space_and_leaves_nothing(source, tmp_path):
    (source / "table.txt").write_bytes(b"x" * 300_000)
    with file_size_limit(100_000), pytest.raises(NoSpace):
        snapshot(source, tmp_path / "run" / "code")
    assert list((tmp_path / "run").iterdir()) == []


# --- git ------------------------------------------------------------------------------------


def git(folder, *words):
    settings = ["-c", "user.name=A Tester", "-c", "user.email=tester@example.com"]
    argv = ["git", "-C", str(folder), *settings, *words]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_no_git_is_no_commit(source, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    taken = snapshot(source, tmp_path / "code")
    assert (taken.commit, taken.modified) == ("", False)
    assert taken.record()["git_commit"] is None
    assert taken.record()["git_modified"] is None


def test_commit_and_whether_the_folder_differs_from_it(source, tmp_path):
    git(source.parent, "init", "-q", ".")
    git(source.parent, "add", "scripts")
    git(source.parent, "commit", "-qm", "first")
    head = git(source, "rev-parse", "HEAD")
    taken = snapshot(source, tmp_path / "code")
    assert (taken.commit, taken.modified) == (head, False)
    (tmp_path / "beside.txt").write_text("not among the scripts")
    assert snapshot(source, tmp_path / "code").modified is False
    (source / "train.py").write_text("changed\n")
    record = snapshot(source, tmp_path / "code").record()
    assert (record["git_commit"], record["git_modified"]) == (head, True)
    assert record["files"] == ["lib/net.py", "train.py"]


def test_git_that_is_not_installed_is_no_commit(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert snapshot(source, tmp_path / "code").commit == ""
