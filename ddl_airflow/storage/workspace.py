"""Tells the workspace from the empty folder that is left where it is not mounted.

A file in the workspace says that it is one, and each host remembers where it has seen that. Where a
host has seen it and finds it gone, nothing is made: trainings would run on the host's own disk,
without what they have done so far, and publish from there.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from pathlib import Path

from ddl_airflow.core.errors import StagingError
from ddl_airflow.core.layout import BY_HAND, make_workspace
from ddl_airflow.storage.site import SITE_ID

MARK = ".ddl-workspace"
_log = logging.getLogger(__name__)


def check_mounted(workspace: Path, seen: Path) -> None:
    """Makes the workspace where this host has never seen it.

    Args:
        workspace: the folder.
        seen: the host's own folder, in which it remembers workspaces.

    Raises:
        StagingError: it was there before, and is not now; or there is something else.
        OSError: it cannot be looked at, or made.
    """
    name = hashlib.sha256(os.fsencode(workspace)).hexdigest()[:16]
    note, mark = seen / name, workspace / MARK
    if mark.exists():
        if not note.exists():
            _remember(note, workspace)
    elif note.exists():
        raise StagingError(
            f"{workspace} is not the workspace that was there on {socket.gethostname()}: {MARK} is "
            f"not in it. Mount it. If it is a new one, or was deleted on purpose, delete {note}."
        )
    else:
        try:
            make_workspace(workspace)
        except (FileExistsError, NotADirectoryError) as error:
            parents = (workspace, *workspace.parents)
            taken = next(one for one in parents if os.path.lexists(one) and not one.is_dir())
            raise StagingError(
                f"{taken} is no folder, and the workspace is to be {workspace}. Correct [ddl] "
                "workspace, or remove what is there.",
                retryable=False,
            ) from error
        mark.write_text("Trainings run here; without this file, nothing is written.\n", "utf-8")
        _remember(note, workspace)


def is_workspace(folder: Path) -> bool:
    """Whether trainings have run in a folder: of a DAG, by hand, or before there was the mark."""
    # ddl-run leaves neither file.
    ours = folder.resolve().name == BY_HAND
    return ours or any((folder / name).exists() for name in (MARK, SITE_ID))


def _remember(note: Path, workspace: Path) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{workspace}\n", "utf-8")
    except OSError as error:  # not worth a training
        _log.warning("%s: %s: if %s is unmounted, nobody will see", note, error.strerror, workspace)
