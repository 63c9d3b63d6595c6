"""Whose an experiment is: a run goes on with its own DAG's, and with those that manifests share."""

from __future__ import annotations

import json
import re
from pathlib import Path

from ddl_airflow.core.beneath import write_beneath
from ddl_airflow.core.errors import SettingInvalid
from ddl_airflow.core.layout import OWN_EXPERIMENT, experiments, owners_file, owners_of
from ddl_airflow.storage.filesystem import alone_in

_OTHERS_CLAIM_S = 10.0


def claim(workspace: Path, experiment: str, dag_id: str, *, in_manifest: bool) -> None:
    """Makes an experiment that nobody has the DAG's, and refuses another DAG's.

    Two DAGs share one if the manifest of each names it. That of one training, which is called as
    the training, is the training's DAG's. A folder that nobody is known to have is refused.

    Args:
        workspace: the site's.
        experiment: its name.
        dag_id: whose run asks for it.
        in_manifest: whether the DAG's manifest names it, and not only the run.

    Raises:
        SettingInvalid: it is another DAG's, or it is not known whose.
        StagingError: what is known of it cannot be read.
    """
    own = workspace / "runs" / dag_id / experiment
    if re.fullmatch(OWN_EXPERIMENT, experiment) and not own.is_dir():
        raise SettingInvalid(
            f"experiment_id: {experiment!r} is the name of the experiment of a training that is "
            f"not of {dag_id}, or no longer there. Choose another name."
        )
    folder = experiments(workspace) / experiment
    path = owners_file(workspace, experiment)
    path.parent.mkdir(parents=True, exist_ok=True)
    with alone_in(path, dag_id, _OTHERS_CLAIM_S):
        owners = owners_of(workspace, experiment)
        shared = in_manifest and all(owners.values())
        if owners and dag_id not in owners and not shared:
            raise SettingInvalid(
                f"experiment_id: {experiment!r} is an experiment of {', '.join(sorted(owners))}. "
                f"Choose another name; or write `experiment: {experiment}` in the manifests of "
                "all that share it."
            )
        if not owners and folder.exists() and not own.is_dir():
            raise SettingInvalid(
                f"experiment_id: {folder} is there, and it is not known whose it is. Choose "
                "another name; or, as the site's administrator, write "
                f"{json.dumps({dag_id: False})} into {path}"
            )
        now = owners | {dag_id: in_manifest}
        if now != owners:
            write_beneath(path, workspace, json.dumps(now).encode())
