from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ddl_airflow.core.errors import FileRefused, StagingError
from ddl_airflow.storage.site import workspace_id


def test_a_workspace_gets_one_id_whoever_comes_first(tmp_path):
    workspace = tmp_path / "not yet"
    assert workspace_id(workspace, make=False) == ""
    assert not workspace.exists()
    with ThreadPoolExecutor(16) as pool:
        ids = set(pool.map(lambda _: workspace_id(workspace, make=True), range(64)))
    assert len(ids) == 1 and ids != {""}
    assert ids == {workspace_id(workspace, make=False)}
    assert ids != {workspace_id(tmp_path / "another", make=True)}


def test_a_damaged_id_is_not_replaced_by_another(tmp_path):
    workspace_id(tmp_path, make=True)
    (tmp_path / "site-id").write_text("")
    with pytest.raises(StagingError, match=r"holds no site id. Restore it, or set .ddl. site_id"):
        workspace_id(tmp_path, make=True)
    (tmp_path / "site-id").unlink()
    (tmp_path / "site-id").symlink_to("/etc/hostname")
    with pytest.raises(FileRefused):
        workspace_id(tmp_path, make=True)
