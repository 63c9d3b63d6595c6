from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import subprocess
from contextlib import contextmanager

import pytest

from ddl_airflow.core.errors import AccessDenied, NoSpace, SourceMissing, StagingError
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


def test_links_to_what_is_in_the_folder_are_followed(source, tmp_path):
    (source / "common").symlink_to(source / "lib")
    (source / "same.py").symlink_to("train.py")
    (tmp_path / "site").symlink_to(source)  # as where the folder is reached by one
    taken = snapshot(tmp_path / "site", tmp_path / "code")
    assert {"same.py", "train.py"} < set(taken.files) and taken.left_out == ()
    assert {"lib/net.py", "common/net.py"} < set(taken.files)
    assert (tmp_path / "code" / "same.py").read_text() == "import lib.net\n"


def test_a_link_to_a_folder_above_itself_ends_there(source, tmp_path):
    (source / "lib" / "all").symlink_to("..")
    (source / "lib" / "self").symlink_to(".")
    taken = snapshot(source, tmp_path / "code")
    assert taken.files == ("lib/net.py", "train.py") and taken.left_out == ()


def test_links_that_lead_out_of_the_folder_are_not_followed(source, tmp_path):
    others = tmp_path / "others"
    others.mkdir()
    (others / "airflow.cfg").write_text("fernet_key = secret")
    (others / "manifest.yml").write_text("model_definition:\n")
    for name, place in (("folder", others), ("a.cfg", others / "airflow.cfg")):
        (source / name).symlink_to(place)
    (source / "m.yml").symlink_to(others / "manifest.yml")
    (source / "folder2").symlink_to("folder")
    (source / "all").symlink_to("/")
    taken = snapshot(source, tmp_path / "code")
    assert taken.files == ("lib/net.py", "train.py")
    assert taken.left_out == ("a.cfg", "all", "folder", "folder2", "m.yml")
    for script in (source / "train.py", source / "lib" / "net.py"):
        script.unlink()
    with pytest.raises(SourceMissing, match="but links that lead out of it .a.cfg, all, folder"):
        snapshot(source, tmp_path / "code")


@pytest.mark.parametrize("swapped", ["train.py", "lib"])
def test_a_link_that_is_put_there_after_the_look_is_not_followed(
    source, tmp_path, monkeypatch, swapped
):
    others = tmp_path / "others"
    others.mkdir()
    for name in ("train.py", "net.py"):
        (others / name).write_text("fernet_key = secret")
    copy = code._copy

    def swap_and_copy(*words):
        (source / swapped).rename(source / "before")
        (source / swapped).symlink_to(others / "train.py" if "." in swapped else others)
        return copy(*words)

    monkeypatch.setattr(code, "_copy", swap_and_copy)
    with pytest.raises(StagingError, match="leads to .*/others/.*put the file itself there"):
        snapshot(source, tmp_path / "code")
    assert not (tmp_path / "code").exists()


def test_a_folder_that_has_become_a_link_is_held_to_the_manifests_own(source, tmp_path):
    """As of a manifest with rights: what it may read was decided when it was parsed."""
    within = [tmp_path / "data", source]
    assert snapshot(source, tmp_path / "code", within=within).files == ("lib/net.py", "train.py")
    source.rename(tmp_path / "others")
    source.symlink_to("others")
    said = f"{source} leads to {tmp_path}/others, out of {tmp_path}/data, {source}. Put the scripts"
    with pytest.raises(StagingError, match=said):
        snapshot(source, tmp_path / "copy", within=within)
    assert not (tmp_path / "copy").exists()
    assert snapshot(source, tmp_path / "code").files == ("lib/net.py", "train.py")


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


def test_a_folder_that_cannot_be_read_is_not_left_out(source, tmp_path, monkeypatch):
    scandir = os.scandir

    def failing(path):
        if os.fspath(path) == str(source / "lib"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(AccessDenied, match="scripts/lib: Permission denied. Let user id"):
        snapshot(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"caf\xe9/a.txt"])
def test_a_name_that_is_no_text_is_said(source, tmp_path, name):
    path = os.path.join(os.fsencode(source), name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb"):
        pass
    with pytest.raises(StagingError, match=r"scripts: the name 'caf\\udce9.*' is no") as caught:
        snapshot(source, tmp_path / "copy")
    assert not caught.value.retryable and str(caught.value).encode()
    assert not (tmp_path / "copy").exists()


def test_no_git_is_no_commit(source, tmp_path):
    taken = snapshot(source, tmp_path / "code")
    assert taken.commit == ""
    assert taken.record()["git_commit"] is None


def test_the_commit_is_read_from_branches_packed_references_worktrees_and_alone(source, tmp_path):
    top = source.parent
    git(top, "init", "-q", ".")
    git(top, "add", "scripts")
    git(top, "commit", "-qm", "first")
    head = git(source, "rev-parse", "HEAD")
    assert snapshot(source, tmp_path / "code").commit == head
    git(top, "pack-refs", "--all")
    assert not any((top / ".git" / "refs" / "heads").iterdir())
    assert snapshot(source, tmp_path / "code").commit == head
    git(top, "worktree", "add", "-q", "-b", "a/b", str(tmp_path / "tree"))
    assert (tmp_path / "tree" / ".git").is_file()
    assert snapshot(tmp_path / "tree" / "scripts", tmp_path / "code").commit == head
    git(top, "checkout", "-q", "--detach")
    assert snapshot(source, tmp_path / "code").record()["git_commit"] == head


def test_nothing_that_a_repository_names_is_run(source, tmp_path):
    git(source, "init", "-q", ".")
    git(source, "add", ".")
    git(source, "commit", "-qm", "first")
    head = git(source, "rev-parse", "HEAD")
    (tmp_path / "monitor").write_text(f"#!/bin/sh\nenv > {tmp_path}/ran\n")
    (tmp_path / "monitor").chmod(0o755)
    git(source, "config", "core.fsmonitor", str(tmp_path / "monitor"))
    # Also where the folder itself looks like a repository without a work tree.
    bare = tmp_path / "bare"
    (source / ".git").rename(bare)
    (bare / "train.py").write_text("")
    assert snapshot(bare, tmp_path / "code").commit == ""
    bare.rename(source / ".git")
    assert snapshot(source, tmp_path / "code").commit == head
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("link", ["HEAD", "refs", "packed-refs"])
def test_a_link_out_of_the_repository_tells_nothing_of_what_it_leads_to(source, tmp_path, link):
    secret = "0123456789abcdef" * 4
    (tmp_path / "token").write_text(f"{secret} refs/token" if link == "packed-refs" else secret)
    (source / ".git").mkdir()
    (source / ".git/HEAD").write_text("ref: refs/token")
    (source / ".git" / link).unlink(missing_ok=True)
    (source / ".git" / link).symlink_to(tmp_path / ("" if link == "refs" else "token"))
    assert snapshot(source, tmp_path / "code").commit == ""


@pytest.mark.parametrize(
    "head", ["", "ref: ../../secret", "ref: refs/../../x", "ref: refs/heads/x"]
)
def test_a_head_that_names_no_commit_is_none(source, tmp_path, head):
    (source / ".git").mkdir()
    (source / ".git" / "HEAD").write_text(head)
    (source / "secret").write_text("a" * 40)
    (tmp_path / "secret").write_text("a" * 40)
    assert snapshot(source, tmp_path / "code").commit == ""


def test_scripts_are_taken_again_though_ranks_left_what_nobody_else_may_delete(source, trainer):
    """Ranks of a user of their own, and an Airflow that is not root: here with changed parts."""
    source = shutil.copytree(source, trainer.place / "scripts")
    run = trainer.place / "run"
    run.mkdir()
    os.chown(run, trainer.uid, trainer.gid)
    with trainer.acting():
        snapshot(source, run / "code")
        os.seteuid(0)
        (run / "code" / "private").mkdir(mode=0o700)
        (run / "code" / "private" / "file").touch()
        (source / "train.py").write_text("mended\n")
        os.seteuid(trainer.uid)
        taken = snapshot(source, run / "code")
    assert taken.files == ("lib/net.py", "train.py")
    assert (run / "code" / "train.py").read_text() == "mended\n"
    assert not (run / "code" / "private").exists()
