"""The site, as its settings say: where its workspace is, and what its trainings are called."""

from __future__ import annotations

import os
from pathlib import Path

from airflow.configuration import AIRFLOW_HOME, conf

from ddl_airflow.core.errors import SettingInvalid
from ddl_airflow.core.layout import training_id
from ddl_airflow.storage.site import workspace_id


def workspace() -> Path:
    """The site's workspace: ``[ddl] workspace``.

    Raises:
        SettingInvalid: it is relative, and ranks have another working directory than Airflow.
    """
    configured = conf.get("ddl", "workspace", fallback="")
    if not configured:
        return Path(AIRFLOW_HOME) / "ddl"
    folder = Path(os.path.expanduser(configured))  # of ~nobody, Path's raises
    if not folder.is_absolute():
        raise SettingInvalid(
            f"[ddl] workspace is {configured}, which is relative. Write an absolute path."
        )
    return folder


def training_of(dag_id: str, run_id: str, *, make: bool = True) -> str:
    """The id of a run's training at this site: ``[ddl] site_id``, by default the workspace's own.

    Args:
        dag_id: the DAG.
        run_id: Airflow's.
        make: whether a workspace without an id gets one; no training can be in it yet.
    """
    configured = conf.get("ddl", "site_id", fallback="").strip()
    return training_id(dag_id, run_id, configured or workspace_id(workspace(), make=make))
