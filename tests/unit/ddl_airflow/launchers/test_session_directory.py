from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddl_airflow.launchers import session_directory
from ddl_airflow.launchers.named_hosts import RECORDS_PREFIX


def test_records_on_other_hosts_which_nobody_locks_are_not_stale(tmp_path: Path) -> None:
    (tmp_path / f"{RECORDS_PREFIX}7-0123abcd").mkdir()
    session_directory.remove_stale(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_next_run_removes_what_nobody_was_left_to_remove(tmp_path: Path) -> None:
    stale, alive, foreign = (
        tmp_path / name for name in ("ddl-mpi-1-aa", "ddl-mpi-2-bb", "other-3-cc")
    )
    for one in (stale, alive, foreign):
        (one / "ompi.1").mkdir(parents=True)
    holder = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDONLY);"
        "fcntl.flock(fd, fcntl.LOCK_SH); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(alive)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        session_directory.remove_stale(tmp_path)
        assert sorted(tmp_path.iterdir()) == [alive, foreign]
        process.stdin.close()
    session_directory.remove_stale(tmp_path)
    assert sorted(tmp_path.iterdir()) == [foreign]


def test_another_run_may_take_it_for_stale_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that began at once: one failed with `No such file or directory`."""
    mkdir, made = Path.mkdir, []

    def mkdir_and_lose(path: Path, *args: object, **options: object) -> None:
        mkdir(path, *args, **options)
        made.append(path)
        if len(made) == 1:
            session_directory.remove_stale(tmp_path)

    monkeypatch.setattr(Path, "mkdir", mkdir_and_lose)
    directory = session_directory.create(tmp_path)
    assert len(made) == 2 and directory == made[1] and not made[0].exists()
    session_directory.remove_stale(tmp_path)
    assert directory.exists()


def test_settings_of_a_site_stay() -> None:
    place = Path("/there")
    assert session_directory.settings(place, {}) == {
        "PRTE_MCA_prte_local_tmpdir_base": "/there",
        "OMPI_MCA_btl_sm_backing_directory": "/there",
    }
    site = {"OMPI_MCA_btl_vader_backing_directory": "/fast"}
    assert session_directory.settings(place, site) == {"PRTE_MCA_prte_local_tmpdir_base": "/there"}
    site = {"OMPI_MCA_btl_sm_backing_directory": "/fast", "PRTE_MCA_prte_tmpdir_base": "/big"}
    assert session_directory.settings(place, site) == {}
