"""Jobs of schedulers that are to be cancelled, noted in the workspace.

Who is to cancel a job may be ended before its scheduler answers. So that is noted first, in a file
for each job, below ``<workspace>/cancellations``; and whoever comes next does it: a trigger, which
may wait for another job, the next try, or the cleaning.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddl_airflow.core.beneath import make_folder, read_object, write_beneath
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.job import StartedJob

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Cancellation:
    """A note that a job is to be cancelled.

    Attributes:
        started: the job.
        task: of Airflow, by ``dag_id``, ``task_id``, ``run_id`` and ``map_index``: the job is to be
            cancelled only if that has ended; None: in any case.
    """

    started: StartedJob
    task: Mapping[str, Any] | None = None


def cancellation_file(folder: Path, job_id: str) -> Path:
    """Where it is noted that a job is to be cancelled; a job's id may be no name of a file."""
    return folder / f"{hashlib.sha256(job_id.encode()).hexdigest()[:32]}.json"


def note_cancellation(started: StartedJob, task: Mapping[str, Any] | None = None) -> None:
    """Notes that a job is to be cancelled, the arguments as ``Cancellation`` has them.

    What keeps it from being noted keeps nobody from cancelling it, and is only said.
    """
    if (path := started.cancellation) is None:
        return
    workspace = path.parent.parent
    said = {"job": started.dump(), "task": dict(task) if task is not None else None}
    try:
        make_folder(path.parent, workspace)
        write_beneath(path, workspace, json.dumps(said).encode())
    except (FileRefused, OSError) as error:
        _log.warning("%s: that the job is to be cancelled cannot be noted: %s", path, error)


def cancellation_of(started: StartedJob) -> Cancellation | None:
    """What is noted of the job."""
    return None if started.cancellation is None else _read(started.cancellation)


def cancellations_in(folder: Path) -> list[Cancellation]:
    """All that are noted; each that cannot be read is only said."""
    try:
        paths = sorted(folder.glob("*.json"))
    except OSError as error:
        _log.warning("%s cannot be listed: which jobs are to be cancelled? %s", folder, error)
        return []
    return [one for one in map(_read, paths) if one is not None]


def drop_cancellation(started: StartedJob) -> None:
    """It was done, or nobody wants it any more."""
    if (path := started.cancellation) is None:
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:  # a job that has ended is cancelled once more, which does nothing
        _log.warning("%s: that the job was cancelled cannot be noted: %s", path, error)


def drop_conditional(started: StartedJob) -> None:
    """Somebody has begun to wait for the job, who cancels it if its task ends."""
    if (noted := cancellation_of(started)) is not None and noted.task is not None:
        drop_cancellation(started)


def _read(path: Path) -> Cancellation | None:
    try:
        said = read_object(path, path.parent.parent)
        return Cancellation(StartedJob.load(said["job"]), said["task"])
    except FileNotFoundError:
        return None
    except (FileRefused, OSError, KeyError, TypeError, ValueError) as error:
        _log.warning("%s does not say which job is to be cancelled: %s. Remove it.", path, error)
        return None
