"""Whose an experiment is: a run goes on with its own DAG's, and with those that manifests share."""

from __future__ import annotations

import json
from pathlib import Path

from ddl_airflow.core.beneath import read_object, write_beneath
from ddl_airflow.core.errors import SettingInvalid
from ddl_airflow.core.layout import experiments
from ddl_airflow.storage.filesystem import alone_in

_OTHERS_CLAIM_S = 10.0


def claim(workspace: Path, experiment: str, dag_id: str, *, in_manifest: bool) -> None:
    """Makes an experiment that nobody has the DAG's, and refuses another DAG's.

    Two DAGs share one if the manifest of each names it.

    Args:
        workspace: the site's.
        experiment: its name.
        dag_id: whose run asks for it.
        in_manifest: whether the DAG's manifest names it, and not only the run.

    Raises:
        SettingInvalid: it is another DAG's.
        StagingError: what is known of it cannot be read.
    """
    path = experiments(workspace) / ".owners" / f"{experiment}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(path, dag_id, _OTHERS_CLAIM_S):
        try:
            owners = read_object(path, workspace)
        except FileNotFoundError:
            owners = {}
        shared = in_manifest and all(owners.values())
        if owners and dag_id not in owners and not shared:
            raise SettingInvalid(
                f"experiment_id: {experiment!r} is an experiment of {', '.join(sorted(owners))}. "
                f"Choose another name; or write `experiment: {experiment}` in the manifests of "
                "all that share it."
            )
        now = owners | {dag_id: in_manifest}
        if now != owners:
            write_beneath(path, workspace, json.dumps(now).encode())
