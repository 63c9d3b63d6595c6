"""What a workspace need not keep: old runs, old experiments, what of the cache is in nobody's use.

Whoever is killed while cleaning has lost nothing: a folder is first renamed, in one step, to a name
that only this module looks at, and then deleted.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.errors import FileRefused, PlaceTaken, SettingInvalid, StagingError
from ddl_airflow.core.eviction import Blob, evictable
from ddl_airflow.core.layout import OWN_EXPERIMENT, REMOVING, RunLayout, experiments, is_experiment
from ddl_airflow.core.removal import mounted_in, remove_tree, walk_mount
from ddl_airflow.core.units import parse_duration, parse_size
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.experiments import forget_trainings
from ddl_airflow.storage.filesystem import alone_in, holder_of, lock_of, os_errors
from ddl_airflow.storage.store import PART_PREFIX

# What no step that still runs can have left lying for so long without touching it.
LEFT_S = 2 * 86400.0
# For whoever stages to end, before the cache is left as it is, with an error.
_STAGED_S = 600.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    """What to keep.

    Attributes:
        runs: folders of trainings, so long after the last change in them; None: for ever.
        experiments: the same for experiments with a name; None: for ever.
        cache_bytes: of the cache's blobs; None: without end.
    """

    runs: timedelta | None = None
    experiments: timedelta | None = None
    cache_bytes: int | None = None


def rules(runs: str, experiments: str, cache: str) -> Rules:
    """What the settings ``keep_runs``, ``keep_experiments`` and ``cache_size`` say; empty: all.

    Raises:
        SettingInvalid: one says something else, or less than two days.
    """

    def kept(name: str, text: str) -> timedelta | None:
        try:
            kept = parse_duration(text) if text.strip() else None
        except ValueError as error:
            raise SettingInvalid(f"[ddl] {name}: {error}") from None
        if kept is not None and kept.total_seconds() < LEFT_S:
            raise SettingInvalid(
                f"[ddl] {name}: {text} is less than two days. Write for example 30d."
            )
        return kept

    try:
        nbytes = parse_size(cache) if cache.strip() else None
    except ValueError as error:
        raise SettingInvalid(f"[ddl] cache_size: {error}") from None
    return Rules(kept("keep_runs", runs), kept("keep_experiments", experiments), nbytes)


@dataclass(frozen=True)
class Removed:
    """One thing that was removed, or would be.

    Attributes:
        what: a kind of things, for people.
        place: of it.
        nbytes: that it takes.
    """

    what: str
    place: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.what}: {self.place}, {self.nbytes / 2**20:,.1f} MiB"


def clean_workspace(
    workspace: Path,
    rules: Rules,
    is_open: Callable[[str, str], bool] = lambda _dag_id, _run_id: False,
    may_run: Callable[[Path], bool] = lambda _note: True,
    *,
    dry_run: bool = False,
) -> Iterator[Removed]:
    """Removes what the rules do not keep, and yields it.

    A run stays, whatever its age, while a process works in it, a scheduler has its job, or
    ``is_open``; with it stay its own experiment, and the blobs that its data are links to. It stays
    as long for another run that goes on with its own experiment. An experiment with a name stays
    while a training works in it, and while a run that is to go on with it is in a scheduler's hands
    or open.

    Args:
        workspace: the site's.
        rules: what to keep.
        is_open: whether Airflow has not ended the run of a DAG id and a run id.
        may_run: whether the job that is noted in a file may wait or run, as its scheduler says. It
            is asked where the rules do not keep the run: the note of a job that was cancelled may
            stay.
        dry_run: to remove nothing.

    Raises:
        StagingError: what is there cannot be read or removed.
    """
    with os_errors(workspace):
        use = _Use(is_open, may_run)
        yield from _runs(workspace, rules.runs, use, dry_run)
        yield from _experiments(workspace, rules, use, dry_run)
        yield from _cache(workspace, rules.cache_bytes, dry_run)


@dataclass(frozen=True)
class _Use:
    """Who is asked what is in use: as ``clean_workspace`` has them."""

    is_open: Callable[[str, str], bool]
    may_run: Callable[[Path], bool]

    def run_is_open(self, run: Mapping[str, Any], layout: RunLayout) -> bool:
        run_id = run.get("run_id")
        return isinstance(run_id, str) and self.is_open(layout.dag_id, run_id)

    def has_job(self, layout: RunLayout, keep: timedelta | None) -> bool:
        """Whether a scheduler has a job of the run, or may have."""
        note = layout.scheduled_job
        if not note.exists():
            return False
        return not _is_older(layout, keep) or self.may_run(note)


def _is_older(layout: RunLayout, keep: timedelta | None) -> bool:
    age_s = time.time() - _last_change(layout)
    return keep is not None and age_s >= max(keep.total_seconds(), LEFT_S)


def _runs(
    workspace: Path,
    keep: timedelta | None,
    use: _Use,
    dry_run: bool,
) -> Iterator[Removed]:
    # Others may go on with the experiment of a run, which has the run's name.
    wanted = _wanted(workspace, keep, use) if keep is not None else ()
    for dag in _folders(workspace / "runs"):
        yield from _half_removed(dag, dry_run)
        for root in _folders(dag):
            layout = RunLayout(workspace, dag.name, root.name)
            age_s = time.time() - _last_change(layout)
            if age_s < LEFT_S or root.name in wanted or _in_use(layout, keep, use):
                continue
            if keep is None or age_s < keep.total_seconds():
                yield from _left_in(root, dry_run)
                continue
            # The run first: an experiment that is one's own goes too if there is no run any more.
            folders = [one for one in (root, layout.experiment) if one.is_dir()]
            yield from _removed("run", folders, layout.experiment, dry_run)


def _in_use(layout: RunLayout, keep: timedelta | None, use: _Use) -> bool:
    for place in (layout.experiment, layout.earlier_kept_alone):
        try:
            if holder_of(place):
                return True
        except FileNotFoundError:  # nobody ever worked there
            pass
        except FileRefused as error:  # of another user, whom it does not tell
            _log.warning("%s is kept: %s", layout.root, error)
            return True
    with suppress(FileNotFoundError, FileRefused):
        run = _run_of(layout)
        if _works_in(str(run.get("experiment") or ""), layout) or use.run_is_open(run, layout):
            return True
    return use.has_job(layout, keep)  # last: others need not be asked


def _run_of(layout: RunLayout) -> dict[str, Any]:
    """The run's id and its experiment with a name: what ``stage_data`` leaves at its end; until
    then as the record so far has them.

    Raises:
        FileNotFoundError, FileRefused: as ``read_object``.
    """
    with suppress(FileNotFoundError):
        return read_object(layout.kept / "run.json", layout.workspace)
    run = read_object(layout.kept / "record.json", layout.workspace).get("run")
    if not isinstance(run, dict):
        return {}
    own = run.get("experiment") == layout.training_id
    return {"run_id": run.get("run_id"), "experiment": None if own else run.get("experiment")}


def _works_in(experiment: str, layout: RunLayout) -> bool:
    """Whether a process of the training keeps others out of an experiment with a name."""
    if not is_experiment(experiment):
        return False
    with suppress(FileNotFoundError):  # nobody ever worked there
        place = replace(layout, experiment_id=experiment).experiment
        return holder_of(place).startswith(f"{layout.training_id}/")
    return False


def _left_in(root: Path, dry_run: bool) -> Iterator[Removed]:
    """Copies of code, and folders of links, that were half made when somebody was killed; and what
    was there of a training before the last, as far as it could not be deleted then.
    """
    inside = (root, root / "experiment")
    for path in (one for folder in inside for one in _folders(folder, hidden=True)):
        if path.name.startswith((".code-", PART_PREFIX, REMOVING)) and not _has_mount(path):
            yield Removed("left by a killed task", str(path), _size(path))
            if not dry_run:
                _delete(path)


def _experiments(workspace: Path, rules: Rules, use: _Use, dry_run: bool) -> Iterator[Removed]:
    folder = experiments(workspace)
    yield from _half_removed(folder, dry_run)
    named = rules.experiments
    wanted = _wanted(workspace, named, use) if named is not None else ()
    for experiment in _folders(folder):
        if experiment.name in wanted:
            continue
        own = re.fullmatch(OWN_EXPERIMENT, experiment.name) is not None
        if own and any(workspace.glob(f"runs/*/{experiment.name}")):
            continue  # it goes with its run
        keep = rules.runs if own else rules.experiments
        age_s = time.time() - _newest(experiment)
        if keep is not None and age_s >= max(keep.total_seconds(), LEFT_S):
            yield from _removed("experiment", [experiment], experiment, dry_run)
    yield from _locks_left(workspace, dry_run)


def _locks_left(workspace: Path, dry_run: bool) -> Iterator[Removed]:
    """Those of trainings' own experiments: whoever removed these was killed before the lock."""
    folder = experiments(workspace)
    for lock in sorted({*folder.glob(".*.lock")} - _locks_in_use(workspace)):
        name = lock.name.removeprefix(".").removesuffix(".lock")  # or the end of a long one
        if not re.fullmatch(OWN_EXPERIMENT, name):  # others may come to that
            continue
        with suppress(FileNotFoundError, FileRefused):
            left = Removed("half removed", str(lock), lock.lstat().st_size)
            if dry_run:
                if not holder_of(folder / name):
                    yield left
                continue
            try:
                with alone_in(folder / name, "cleaning", makes_room=True):
                    if lock in _locks_in_use(workspace):  # it has been made again meanwhile
                        continue
                    forget_trainings(workspace, name)
                    lock.unlink()
            except PlaceTaken:
                continue
            yield left


def _locks_in_use(workspace: Path) -> set[Path]:
    """Those of the runs and experiments that are there."""
    places = (*workspace.glob("experiments/*"), *workspace.glob("runs/*/*"))
    return {lock_of(experiments(workspace) / place.name) for place in places}


def _wanted(workspace: Path, keep: timedelta, use: _Use) -> set[str]:
    """The experiments with a name that runs which have not ended are to go on with."""
    wanted = set()
    for dag in _folders(workspace / "runs"):
        for root in _folders(dag):
            layout = RunLayout(workspace, dag.name, root.name)
            with suppress(FileNotFoundError, FileRefused):
                run = _run_of(layout)
                experiment = str(run.get("experiment") or "")
                if is_experiment(experiment) and (
                    use.run_is_open(run, layout) or use.has_job(layout, keep)
                ):
                    wanted.add(experiment)
    return wanted


def _removed(
    what: str, folders: Sequence[Path], experiment: Path, dry_run: bool
) -> Iterator[Removed]:
    """Removes folders unless a training works in the experiment, or something is mounted there."""
    if any(map(_has_mount, folders)):
        return
    seen: set[tuple[int, int]] = set()
    removed = [Removed(what, str(folder), _size(folder, seen)) for folder in folders]
    aside = [folder.with_name(REMOVING + uuid.uuid4().hex) for folder in folders]
    if dry_run:
        with suppress(FileNotFoundError):  # nobody ever worked there
            if holder_of(experiment):
                return
    else:
        try:
            with alone_in(experiment, "cleaning", makes_room=True):
                for folder, where in zip(folders, aside, strict=True):
                    folder.rename(where)
                    if folder.parent == experiments(folder.parent.parent):
                        forget_trainings(folder.parent.parent, folder.name)
                if re.fullmatch(OWN_EXPERIMENT, experiment.name):
                    # Nobody comes to it any more: it was a training's, which is removed.
                    lock_of(experiment).unlink()
        except PlaceTaken:
            return
        for where in aside:
            _delete(where)
    yield from removed


def _has_mount(folder: Path) -> bool:
    """Whether something is mounted there, which says that a person still uses the folder."""
    if place := mounted_in(folder):
        _log.warning("%s is kept: something is mounted at %s. Unmount it", folder, place)
    return bool(place)


def _delete(folder: Path) -> None:
    try:
        remove_tree(folder)
    except OSError as error:  # others need not stay for it; the next time it is tried again
        _log.warning("%s is not removed: %s", error.filename or folder, error.strerror)


def _half_removed(folder: Path, dry_run: bool) -> Iterator[Removed]:
    for path in _folders(folder, hidden=True):
        if path.name.startswith(REMOVING) and not _has_mount(path):
            yield Removed("half removed", str(path), _size(path))
            if not dry_run:
                _delete(path)


def _cache(workspace: Path, budget: int | None, dry_run: bool) -> list[Removed]:
    """What killed stagers left; and down to the budget, if there is one, blobs that no run links
    to, those first that were used least lately.

    A list, since whoever stages waits until it is complete: it must not hang on who reads it.
    """
    cache = Cache(workspace / "cache")
    if not cache.root.is_dir():
        return []
    with cache.alone() as alone:
        if alone:
            return _removed_of(cache, workspace, budget, dry_run)
    # Somebody stages, whose links are not there yet. Only what is to go is worth a wait.
    going = [*_evictable(cache, workspace, budget)]
    if dry_run or not going:
        return [Removed("cached object", blob.path, blob.nbytes) for blob in going]
    if alone is None:
        _log.warning(
            "%s: nothing is removed: the file system has no locks that tell who stages", cache.root
        )
        return []
    _log.warning("%s: data are being staged: waiting until that has ended", cache.root)
    with cache.alone(_STAGED_S) as alone:
        if alone:
            return _removed_of(cache, workspace, budget, dry_run)
    raise StagingError(
        f"{cache.root}: data are being staged, and were for {_STAGED_S:.0f} s, so none of "
        f"{sum(blob.nbytes for blob in going):,} bytes that are to go was removed. Clean again "
        "when no stage_data runs, and no training with stream: true is in its first epoch."
    )


def _removed_of(cache: Cache, workspace: Path, budget: int | None, dry_run: bool) -> list[Removed]:
    """What is removed of a cache that nobody uses."""
    removed = [*_left_of_archives(cache.root, dry_run)]
    for path in (cache.root / "blobs").glob("*/*.part"):
        found = path.stat()
        if time.time() - found.st_mtime < LEFT_S:
            continue  # nobody stages, but who tries again goes on with it
        removed.append(Removed("left by a killed task", str(path), found.st_size))
        if not dry_run:
            path.unlink()
    for blob in _evictable(cache, workspace, budget):
        removed.append(Removed("cached object", blob.path, blob.nbytes))
        if not dry_run:
            cache.evict(Path(blob.path))
    return removed


def _evictable(cache: Cache, workspace: Path, budget: int | None) -> Iterator[Blob]:
    if budget is None:
        return iter(())
    blobs = []
    for path in (cache.root / "blobs").glob("*/*"):
        if path.name.endswith(".part"):
            continue
        with suppress(FileNotFoundError):  # removed as damaged meanwhile, by who stages
            found = path.stat()
            blobs.append(Blob(cache.used(path), str(path), found.st_size, found.st_nlink))
    excess = sum(blob.nbytes for blob in blobs) - budget
    return evictable(blobs, excess, str(workspace / "runs"))


def _left_of_archives(root: Path, dry_run: bool) -> Iterator[Removed]:
    """Archives that were being unpacked when somebody was killed, and lists of what is gone."""
    folder = root / "archives"
    for path in [*folder.glob("blobs/??/*"), *folder.glob("unpacking/*")]:
        found = path.stat()
        if time.time() - found.st_mtime < LEFT_S:
            continue  # who tries again goes on with it
        yield Removed("left by a killed task", str(path), found.st_size)
        if not dry_run:
            path.unlink()
    for path in folder.glob("??/*.json"):
        blob = ""
        with suppress(ValueError, LookupError, TypeError):
            blob = str(json.loads(path.read_bytes())["blob"])
        if not (root / "blobs" / blob[:2] / blob).is_file():
            yield Removed("list of an archive", str(path), path.stat().st_size)
            if not dry_run:
                path.unlink()


def _folders(folder: Path, *, hidden: bool = False) -> list[Path]:
    """Those in a folder; with a dot before their names, or without."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.name.startswith(".") == hidden)
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def _last_change(layout: RunLayout) -> float:
    # Not the run's own folder: to remove what killed tasks left in it changes that.
    looked_at = (layout.kept, layout.state, layout.logs, layout.result, layout.checkpoints)
    changes = [_newest(folder, depth=1) for folder in looked_at if folder.is_dir()]
    changes += [_changed(one.stat()) for one in (layout.code, layout.staged) if one.is_dir()]
    if layout.experiment.is_dir():
        changes.append(_newest(layout.experiment))
    return max(changes, default=_changed(layout.root.stat()))


def _changed(found: os.stat_result) -> float:
    # A script may give its files a time that is to come (utime); not so that of their inodes.
    return min(found.st_mtime, found.st_ctime)


def _newest(folder: Path, depth: int = 99) -> float:
    newest = _changed(folder.stat())
    # It may be the ranks' user's alone.
    with suppress(PermissionError, FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            # Gone meanwhile; or a rank has closed it, or made it deeper than a path may be long.
            with suppress(OSError):
                newest = max(newest, _changed(entry.stat(follow_symlinks=False)))
                if depth > 1 and entry.is_dir(follow_symlinks=False):
                    newest = max(newest, _newest(Path(entry), depth - 1))
    return newest


def _size(folder: Path, seen: set[tuple[int, int]] | None = None) -> int:
    """What a folder takes: a file with several names once.

    Args:
        folder: to look through.
        seen: devices and inodes of what has been counted; those found are added.
    """
    seen = set() if seen is None else seen
    nbytes = 0
    for one in walk_mount(folder, lambda _error: None):
        for name in one.others:
            with suppress(OSError):
                found = os.lstat(name, dir_fd=one.opened)
                if (key := (found.st_dev, found.st_ino)) not in seen:
                    seen.add(key)
                    nbytes += found.st_size
    return nbytes
