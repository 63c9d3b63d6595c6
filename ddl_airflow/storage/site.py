"""Which Airflow a workspace is of: in the ids of its trainings, which may share a bucket."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from ddl_airflow.core.beneath import read_beneath, write_beneath
from ddl_airflow.core.errors import StagingError
from ddl_airflow.core.layout import make_workspace
from ddl_airflow.storage.filesystem import alone_in, os_errors

SITE_ID = "site-id"
_OTHERS_WRITE_S = 10.0


def workspace_id(workspace: Path, *, make: bool) -> str:
    """The random id that a workspace gets once and keeps, in its file ``site-id``.

    Args:
        workspace: the site's.
        make: whether it gets one now if it has none; else the answer is empty.

    Raises:
        StagingError: the file cannot be read or written, or holds no id.
    """
    path = workspace / SITE_ID
    if (known := _read(path)) is None and make:
        with os_errors(path):
            make_workspace(workspace)
            with alone_in(path, "a task that names the site", _OTHERS_WRITE_S):
                if (known := _read(path)) is None:
                    known = uuid.uuid4().hex
                    write_beneath(path, workspace, f"{known}\n".encode())
    return known or ""


def _read(path: Path) -> str | None:
    try:
        known = read_beneath(path, path.parent).decode("ascii", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not re.fullmatch("[0-9a-f]{32}", known):
        raise StagingError(
            f"{path} holds no site id. Restore it, or set [ddl] site_id: by another id no run "
            "finds what its earlier tasks have left.",
            retryable=False,
        )
    return known
