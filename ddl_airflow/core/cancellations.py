"""Jobs of schedulers that are to be cancelled, noted in the workspace.

Who is to cancel a job may be ended before its scheduler answers. So that is noted first, in a file
for each job, below ``<workspace>/cancellations``; and whoever comes next does it: a trigger, which
may wait for another job, the next try, or the cleaning. From before it is submitted until its end
was dealt with, a job of a task of Airflow is noted to be cancelled if that task has ended: nobody
tells a task that is deferred while no triggerer runs, nor one whose process was killed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from ddl_airflow.core.beneath import make_folder, read_object, write_beneath
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.core.job import JobHandle, StartedJob

# So long nobody must have waited for the job of a task that Airflow does not know, or no more. Of
# two Airflows with one workspace each knows its own tasks alone, and nothing sure tells them apart:
# one's triggerer may be away over a weekend, while its jobs run.
UNKNOWN_S = 7 * 86400.0
# For so long it is tried.
_TRIED_S = 30 * 86400.0
# Different words, why a job cannot be cancelled.
_MOST_SAID = 5
_SAID = ".said"
_OURS = 0o700
_log = logging.getLogger(__name__)
# Where that cannot be kept beside the notes.
_said_here: set[Path] = set()


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

    @property
    def unattended(self) -> bool:
        """Whether nobody has waited for the job lately: see ``keep_waiting``."""
        with suppress(OSError):
            path = self.started.cancellation
            return path is not None and time.time() - path.stat().st_mtime > UNKNOWN_S
        return False


def name_of(handle: JobHandle) -> str:
    """A job, for people."""
    return f"{handle.kind} job {handle.number} ({handle.job_id})"


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
        rights = _open_as_workspace(path.parent, workspace)
        write_beneath(path, workspace, json.dumps(said).encode(), rights)
    except (FileRefused, OSError) as error:
        _log.warning(
            "%s: that the job is to be cancelled, if so, cannot be noted: %s. The folder is to "
            "have the workspace's group, and its mode 2770 where that may write there: have its "
            "owner see to it",
            *(path, error),
        )


def keep_waiting(started: StartedJob) -> None:
    """Somebody waits for the job: it is not to be cancelled for its task being unknown."""
    if started.cancellation is not None:
        with suppress(OSError):  # there is no note; or it is another user's, who says so
            os.utime(started.cancellation)
            for mark in _said_of(started.cancellation):  # from which 30 days would count
                mark.unlink(missing_ok=True)


def cancellation_of(started: StartedJob) -> Cancellation | None:
    """What is noted of the job."""
    return None if started.cancellation is None else _read(started.cancellation)


def cancellations_in(folder: Path, *, dry_run: bool = False) -> list[Cancellation]:
    """All that are noted; each that cannot be read is only said.

    Args:
        folder: with the notes.
        dry_run: to leave everything as it is there.
    """
    try:
        # Not glob, which finds nothing where it may not look.
        paths = sorted(folder / name for name in os.listdir(folder) if name.endswith(".json"))
        if paths and folder.stat().st_mode & stat.S_IWOTH:
            # As by an earlier version, where the umask was 0: ranks may have written there.
            if _says_first(folder / "folder", "open", dry_run):
                _log.warning("%s is open to others, so no job is cancelled: chmod o-w", folder)
            return []
    except FileNotFoundError:  # nobody has noted anything yet
        return []
    except OSError as error:
        if _says_first(folder / "folder", str(error), dry_run):
            _log.warning("%s cannot be listed: which jobs are to be cancelled? %s", folder, error)
        return []
    return [one for path in paths if (one := _read(path, dry_run)) is not None]


def drop_cancellation(started: StartedJob) -> None:
    """It was done, or nobody wants it any more."""
    if (path := started.cancellation) is None:
        return
    try:
        _drop(path)
    except OSError as error:  # a job that has ended is cancelled once more, which does nothing
        _log.warning("%s: that the job was cancelled cannot be noted: %s", path, error)


def drop_conditional(started: StartedJob) -> None:
    """The job is to go on though its task ends."""
    if (noted := cancellation_of(started)) is not None and noted.task is not None:
        drop_cancellation(started)


def say_undone(noted: Cancellation, why: str, log: Any, *, dry_run: bool = False) -> None:
    """Says that a job could not be cancelled: once, whoever else tries; and after 30 days for a
    last time: then the note goes. In a dry run it is said, and nothing else.
    """
    path = noted.started.cancellation
    assert path is not None
    name = name_of(noted.started.handle)
    if not dry_run and _is_tried_for_long(path):
        log.error(
            "%s could not be cancelled for 30 days, and nobody tries any more: %s. If it is still "
            "there, cancel it by hand.",
            *(name, why),
        )
        drop_cancellation(noted.started)
    elif _says_first(path, why, dry_run):
        log.warning(
            "%s cannot be cancelled yet, as %s notes: %s. It is tried again for 30 days. If the "
            "job is gone for good, remove that file.",
            *(name, path, why),
        )


def _read(path: Path, dry_run: bool = False) -> Cancellation | None:
    try:
        # Beneath the folder itself: where several users write in it, it is one user's.
        said = read_object(path, path.parent)
        return Cancellation(StartedJob.load(said["job"]), said["task"])
    except FileNotFoundError:
        return None
    except OSError as error:
        if _says_first(path, str(error), dry_run):
            _log.warning("%s cannot be read: which job is to be cancelled? %s", path, error)
    except (FileRefused, KeyError, TypeError, ValueError, AttributeError) as error:
        _say_unreadable(path, error, dry_run)
    return None


def _say_unreadable(path: Path, error: Exception, dry_run: bool) -> None:
    if not dry_run and _is_tried_for_long(path):
        _log.error("%s could not be read for 30 days, and is removed", path)
        with suppress(OSError):
            _drop(path)
    elif _says_first(path, "unreadable", dry_run):
        _log.warning(
            "%s does not say which job is to be cancelled: %s. %s, and remove the file; after 30 "
            "days that is done.",
            *(path, error, _whose(path)),
        )


def _whose(path: Path) -> str:
    """What is to be done with the job of a note that cannot be read, in words."""
    for kept in path.parent.parent.glob("runs/*/*/airflow/job.json"):
        with suppress(FileRefused, OSError, KeyError, TypeError, ValueError):
            started = StartedJob.load(read_object(kept, kept.parent.parent))
            if started.cancellation == path:
                return f"It is of {name_of(started.handle)}: cancel that, if nobody waits for it"
    return "No run has a job that is noted there: see whether one of a run that is gone runs on"


def _open_as_workspace(folder: Path, workspace: Path) -> int:
    """Makes the folder, whatever the umask: for all who may write in the workspace itself, and for
    nobody else. Ranks of another user may not, so they have no job cancelled.

    Returns:
        The rights of a file in it.
    """
    site = workspace.stat()
    make_folder(folder, workspace)
    found = folder.stat()
    ours = found.st_uid == os.geteuid()
    if site.st_mode & stat.S_IWGRP:
        try:
            make_folder(folder, workspace, site.st_gid)
            return 0o660
        except PermissionError:  # this user is not in that group
            if not ours:
                raise
    if ours and stat.S_IMODE(found.st_mode) != _OURS:
        folder.chmod(_OURS)
    return 0o600


def _is_tried_for_long(path: Path) -> bool:
    with suppress(OSError):
        first = min((one.stat().st_mtime for one in _said_of(path)), default=time.time())
        return time.time() - first > _TRIED_S
    return False


def _says_first(path: Path, words: str, dry_run: bool = False) -> bool:
    """Whether nobody has said that of a note yet, be it in another process; from now on somebody
    has. A dry run says all, and that does not count.
    """
    if dry_run:
        return True
    mark = path.with_name(f"{path.stem}.{hashlib.sha256(words.encode()).hexdigest()[:8]}{_SAID}")
    try:
        if mark.exists() or len(_said_of(path)) >= _MOST_SAID:
            return False
        mark.touch(0o660, exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # they are another user's
        if mark in _said_here:
            return False
        _said_here.add(mark)
    return True


def _said_of(path: Path) -> list[Path]:
    return list(path.parent.glob(f"{escape(path.stem)}.*{_SAID}"))


def _drop(path: Path) -> None:
    for one in (*_said_of(path), path):
        one.unlink(missing_ok=True)
