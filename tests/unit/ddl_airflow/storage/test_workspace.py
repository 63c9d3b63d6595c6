from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ddl_airflow.core.errors import StagingError
from ddl_airflow.storage.workspace import check_mounted


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    return tmp_path / "host-a" / "seen"


@pytest.mark.parametrize("mount_point_stays", [True, False])
def test_an_unmounted_workspace_is_not_built_anew(tmp_path, seen, mount_point_stays):
    workspace = tmp_path / "mnt" / "ddl"
    check_mounted(workspace, seen)
    (workspace / "runs").mkdir()
    workspace.rename(tmp_path / "away")
    if mount_point_stays:
        workspace.mkdir()
    for _ in range(2):
        with pytest.raises(
            StagingError, match="is not the workspace that was there.*Mount it"
        ) as e:
            check_mounted(workspace, seen)
        assert e.value.retryable
    assert not workspace.exists() or not any(workspace.iterdir())
    shutil.rmtree(workspace, ignore_errors=True)
    (tmp_path / "away").rename(workspace)
    check_mounted(workspace, seen)
    assert (workspace / "runs").is_dir()


def test_a_host_that_sees_it_for_the_first_time_remembers_it_too(tmp_path, seen):
    workspace = tmp_path / "ddl"
    check_mounted(workspace, seen)
    other = tmp_path / "host-b" / "seen"
    check_mounted(workspace, other)
    shutil.rmtree(workspace)
    with pytest.raises(StagingError):
        check_mounted(workspace, other)


def test_a_new_one_is_made_where_the_old_one_is_forgotten(tmp_path, seen):
    workspace = tmp_path / "ddl"
    check_mounted(workspace, seen)
    shutil.rmtree(workspace)
    with pytest.raises(StagingError) as error:
        check_mounted(workspace, seen)
    (note,) = seen.iterdir()
    assert f"delete {note}." in str(error.value)
    assert note.read_text() == f"{workspace}\n"
    note.unlink()
    check_mounted(workspace, seen)
    assert workspace.is_dir()


def test_one_of_before_there_was_a_mark_goes_on(tmp_path, seen):
    (tmp_path / "ddl" / "runs").mkdir(parents=True)
    check_mounted(tmp_path / "ddl", seen)
    check_mounted(tmp_path / "ddl", seen)


def test_a_host_that_cannot_remember_says_so_and_works(tmp_path, seen, caplog):
    seen.parent.mkdir()
    seen.write_text("no folder")
    check_mounted(tmp_path / "ddl", seen)
    check_mounted(tmp_path / "ddl", seen)
    assert "nobody will see" in caplog.text
