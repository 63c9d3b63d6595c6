"""Where the files of one training live.

::

    <workspace>/
      site-id                     of this Airflow (ddl_airflow.storage.site)
      cache/                      staged objects, by content (ddl_airflow.storage.cache)
      experiments/<experiment>/   checkpoints and event files of one or more trainings
                                                                                EXPERIMENT_DIR
      experiments/.owners/, .trainings/   whose one with a name is, and which were in it
      cancellations/              jobs still to be cancelled (ddl_airflow.core.cancellations)
      runs/<dag_id>/<training_id>/
        code/                     the scripts as they were
        experiment/<experiment>/  what of a named experiment the training has left, for later steps
        data/                     links into the cache                        DATA_DIR
        result/                   what the training leaves                    RESULT_DIR
          checkpoints/                                                        CHECKPOINT_DIR
          model/                  the SavedModel
        logs/rank-<n>.log                                                     LOG_DIR
        damaged/                  checkpoints that could not be read, in experiment/ those of
                                  EXPERIMENT_DIR; in result-<try>/ newer ones that were beside one
        replaced/                 what a finished training left, once it is trained again; and what
                                  tries told that left nothing to go on from
        ddl/                      progress.jsonl, stats.json, transform.json, evaluation.json,
                                  try-<k>/rank-<n>.json           JOB_STATE_DIR
        .worker                   of hosts that ssh reaches those see it that share the workspace
        airflow/                  what tasks keep for each other, and no rank is told of: run.json,
                                  training.json, job.json, failure.json, lineage/, record.json,
                                  lineage.json, evidence/

All tries of all tasks of a DAG run see the same folder: ``training_id`` comes from
the site and the run alone.
The experiment is the training itself, unless the manifest or the run names one; then it goes on
where the last training in it stopped.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import uuid
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ddl_airflow.core.beneath import make_folder, read_object, share_folder, write_beneath
from ddl_airflow.core.errors import SettingInvalid
from ddl_airflow.core.removal import remove_tree


def training_id(dag_id: str, run_id: str, site: str) -> str:
    """A name for the training of a DAG run: fit for a folder, an object key and a job name.

    It begins with the DAG's id, so that a results bucket may serve several manifests and all
    trainings of one share a key prefix, and ends with 128 bits of a digest of all three.

    Args:
        dag_id: the DAG, at most 200 bytes of UTF-8.
        run_id: Airflow's, for example ``manual__2026-11-20T20:15:00+00:00``.
        site: id of the Airflow, so that several may publish to one bucket.
    """
    digest = hashlib.sha256("\0".join((site, dag_id, run_id)).encode()).hexdigest()[:32]
    room = max(0, min(40, _LONGEST_NAME - len(dag_id.encode()) - len(digest) - 2))
    slug = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-")[:room].strip("-")
    return f"{dag_id}-{slug}-{digest}"


_OURS, _OPEN, _PASSAGE = 0o700, 0o710, 0o711
_TRY = "try-"
_LONGEST_NAME = 255  # of a file, in bytes
REMOVING = ".removing-"  # begins the name of what is to be deleted, by cleaning at the latest
_MOVING = "moving"  # in ``restart_requested``, once the first folder may have been moved

CACHE = "cache"
# The workspace of ``ddl-run`` and ``ddl-airflow run``. Hidden: what is in it is no script and no
# manifest of the folder around it.
BY_HAND = ".ddl-run"
HEARTBEAT_S = 15.0  # so often a run without Airflow says that it is at work
OWN_EXPERIMENT = r".*-[0-9a-f]{32}"  # of one training: its id
EXPERIMENT = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}"


def is_experiment(name: object) -> bool:
    """Whether an experiment may be called so: it is the name of a folder."""
    return isinstance(name, str) and re.fullmatch(EXPERIMENT, name) is not None


def experiments(workspace: Path) -> Path:
    """The folder of all experiments."""
    return workspace / "experiments"


def cancellations(workspace: Path) -> Path:
    """The folder in which it is noted which jobs of schedulers are to be cancelled."""
    return workspace / "cancellations"


def owners_file(workspace: Path, experiment: str) -> Path:
    """Where it is noted whose an experiment is (ddl_airflow.storage.experiments)."""
    return experiments(workspace) / ".owners" / f"{experiment}.json"


def trainings_file(workspace: Path, experiment: str) -> Path:
    """Where it is noted which trainings were in an experiment (ddl_airflow.storage.experiments).

    Beside the experiment and not in it: where ranks have a user of their own, they cannot write it.
    """
    return experiments(workspace) / ".trainings" / f"{experiment}.json"


def owners_of(workspace: Path, experiment: str) -> dict[str, bool]:
    """The DAGs whose an experiment is, each with whether its manifest names it.

    Raises:
        FileRefused, OSError: what is known of it cannot be read.
    """
    try:
        return read_object(owners_file(workspace, experiment), workspace)
    except FileNotFoundError:
        return {}


def names_in(folder: Path, most: int | None = None) -> list[str]:
    """Names in a folder, in no order; none if it cannot be listed.

    Args:
        folder: in which ranks may have made any number of files.
        most: how many of them are looked at; by default all.
    """
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in islice(entries, most)]
    except OSError:
        return []


def make_workspace(folder: Path) -> None:
    """Makes the workspace, closed to other users; one that the site has made keeps its rights."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(_OURS, exist_ok=True)


@dataclass(frozen=True)
class RunLayout:
    """The folder of one training.

    Attributes:
        experiment_id: the experiment that it belongs to; empty: one of its own.
        ranks_group: id of the group of the user that ranks run as, where that is another than
            Airflow's. Then they write in the folders that are theirs, and see of the workspace no
            more than their run, while one of its steps runs.

    Raises:
        SettingInvalid: no experiment can be called so.
    """

    workspace: Path
    dag_id: str
    training_id: str
    experiment_id: str = ""
    ranks_group: int | None = None

    def __post_init__(self) -> None:
        if self.experiment_id != "" and not is_experiment(self.experiment_id):
            raise SettingInvalid(
                f"experiment_id: {ascii(self.experiment_id)[:60]} is no name. Use A-Z, a-z, 0-9, "
                "_, . and -."
            )

    @property
    def root(self) -> Path:
        return self.workspace / "runs" / self.dag_id / self.training_id

    @property
    def cache(self) -> Path:
        return self.workspace / CACHE

    @property
    def experiment(self) -> Path:
        """Outlives the training; made by the script that uses it.

        While its ranks run, a training keeps others out of it: other trainings of the experiment;
        and an earlier try, whose ranks may live a moment longer than the task that started them, or
        on a host that was given up.
        """
        return experiments(self.workspace) / (self.experiment_id or self.training_id)

    @property
    def experiment_copy(self) -> Path:
        """As the training left it: of one with a name a copy, for others go on with that."""
        return (
            self.root / "experiment" / self.experiment_id if self.experiment_id else self.experiment
        )

    @property
    def earlier_kept_alone(self) -> Path:
        """What earlier versions of ours kept others out of, while a training was in its own
        experiment.
        """
        return self.root.with_name(self.experiment_id or self.training_id) / self.state.name

    @property
    def code(self) -> Path:
        return self.root / "code"

    @property
    def staged(self) -> Path:
        return self.root / "data"

    @property
    def result(self) -> Path:
        return self.root / "result"

    @property
    def checkpoints(self) -> Path:
        return self.result / "checkpoints"

    @property
    def model(self) -> Path:
        return self.result / "model"

    @property
    def has_written_model(self) -> bool:
        """Whether a SavedModel is in ``model``, or one alone in a folder there that is called by a
        time, as Estimators export. ``ddl_ops.saved_model`` knows both.
        """
        if (self.model / "saved_model.pb").is_file():
            return True
        found = [path.parent.name for path in self.model.glob("*/saved_model.pb")]
        return sum(map(str.isdigit, found)) == 1

    @property
    def has_any_model(self) -> bool:
        """Whether a SavedModel is in ``model``, or any in folders there.

        Raises PermissionError where nobody but the ranks' user may look.
        """
        if not self.model.is_dir():
            return False
        folders = (self.model, *self.model.iterdir())
        return any((folder / "saved_model.pb").is_file() for folder in folders)

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def state(self) -> Path:
        return self.root / "ddl"

    @property
    def kept(self) -> Path:
        """What tasks keep for each other: no rank has any business there."""
        return self.root / "airflow"

    @property
    def progress(self) -> Path:
        return self.state / "progress.jsonl"

    @property
    def statistics(self) -> Path:
        return self.state / "stats.json"

    @property
    def transform_report(self) -> Path:
        return self.state / "transform.json"

    @property
    def evaluation(self) -> Path:
        """Where the manifest's evaluation leaves its metrics."""
        return self.state / "evaluation.json"

    @property
    def damaged(self) -> Path:
        return self.root / "damaged"

    @property
    def replaced(self) -> Path:
        return self.root / "replaced"

    def records(self, try_number: int, preempted: int = 0) -> Path:
        """Where the ranks of one job leave their records.

        Args:
            try_number: Airflow's.
            preempted: how many jobs of that try had to make room before this one.
        """
        return self.state / f"{_TRY}{try_number}{f'.{preempted}' if preempted else ''}"

    def all_records(self, most_entries: int | None = None) -> list[Path]:
        """Those that are there, in the order of their jobs.

        Args:
            most_entries: how many names are looked at, of which ranks may make any number.
        """
        found = []
        for name in names_in(self.state, most_entries):
            if match := re.fullmatch(rf"{_TRY}(\d+)(?:\.(\d+))?", name):
                found.append((int(match[1]), int(match[2] or 0), self.state / name))
        return [path for *_, path in sorted(found)]

    @property
    def restart_requested(self) -> Path:
        """Is there until a training that somebody wants once more has begun from the start."""
        return self.kept / "start-again"

    @property
    def trained_in(self) -> Path:
        """Airflow's number of the try that the training last ended in; by which a task that was
        cleared after that is told from one whose worker died then.
        """
        return self.kept / "trained-in"

    @property
    def scheduled_job(self) -> Path:
        """What is known of the job that a scheduler runs for the training."""
        return self.kept / "job.json"

    @property
    def preemptions(self) -> Path:
        """Which jobs of the training had to make room, since it last began from its start."""
        return self.kept / "preemptions.json"

    @property
    def heartbeat(self) -> Path:
        """Its time says when ``ddl-airflow run`` was last at work; see ``HEARTBEAT_S``."""
        return self.kept / "heartbeat"

    @property
    def failure(self) -> Path:
        """Why a step failed last, while none has begun since; for who looks at the run.

        An object of ``step`` (the task's id), ``try`` (Airflow's number), ``error`` (its type),
        ``message`` (without secrets) and ``rank`` (the one that failed first, or null).
        """
        return self.kept / "failure.json"

    @property
    def folders(self) -> tuple[Path, ...]:
        """Those that are made before the steps begin."""
        named = (self.experiment_copy.parent,) if self.experiment_id else ()
        return (self.code, self.result, self.checkpoints, self.logs, self.state, self.kept, *named)

    def create(self) -> None:
        """Makes the folders of the run, and gives them their rights.

        Raises:
            SettingInvalid: ranks of another user cannot come to them.
        """
        make_workspace(self.workspace)
        if self.ranks_group is None:
            for folder in self.folders:
                folder.mkdir(parents=True, exist_ok=True)
            return
        self._let_others_through()
        self.cache.mkdir(exist_ok=True)
        self.cache.chmod(_OURS)
        runs, shared = self.root.parent.parent, experiments(self.workspace)
        for folder in (runs, shared):
            folder.mkdir(exist_ok=True)
            if stat.S_IMODE(folder.stat().st_mode) != _PASSAGE:
                # What is there is of a time when ranks had no user of their own.
                for one in folder.glob("*/*" if folder == runs else "*"):
                    if one.is_dir() and not one.is_symlink():
                        one.chmod(_OURS)
                folder.chmod(_PASSAGE)
        self.root.parent.mkdir(exist_ok=True)
        self.root.parent.chmod(_PASSAGE)
        if not self.root.exists():
            self.root.mkdir(_OURS)
        for folder in (self.kept, self.replaced):
            folder.mkdir(exist_ok=True)
            folder.chmod(_OURS)
        theirs = (self.code, self.result, self.checkpoints, self.logs, self.state, self.damaged)
        for folder in theirs:
            make_folder(folder, self.workspace, self.ranks_group)
        if self.experiment_id:
            make_folder(self.experiment_copy.parent, self.workspace, self.ranks_group)
            # Others may be at work in it.
            make_folder(self.experiment, self.workspace, self.ranks_group)
        else:
            self.experiment.mkdir(_OURS, exist_ok=True)

    def _let_others_through(self) -> None:
        """Through the workspace, also where the site made it; beneath it, they may not even list.

        Raises:
            SettingInvalid: they may not, and it is another user's.
        """
        found = self.workspace.stat()
        if found.st_mode & stat.S_IXOTH:
            return
        try:
            self.workspace.chmod(stat.S_IMODE(found.st_mode) | stat.S_IXOTH)
        except PermissionError:
            raise SettingInvalid(
                f"[ddl] run_ranks_as: {self.workspace} belongs to user id {found.st_uid}, and is "
                "not open to others, of whom the ranks' user is one. As its owner: chmod o+x "
                f"{self.workspace}"
            ) from None

    def open_to_ranks(self) -> None:
        """Lets the user that ranks run as into the run's folders, if it is another."""
        if self.ranks_group is not None:
            os.chown(self.root, -1, self.ranks_group)
            self.root.chmod(_OPEN)
            make_folder(self.experiment, self.workspace, self.ranks_group)

    def close_to_ranks(self) -> None:
        """And out again: what a training left is not for the next one to read."""
        if self.ranks_group is not None:
            self.root.chmod(_OURS)
            if not self._may_be_claimed():
                self.experiment.chmod(_OURS | stat.S_ISGID)  # what is in it stays the ranks'

    def _may_be_claimed(self) -> bool:
        """Whether the run, or another, has named the experiment: it has before it opens that.

        Who is to train there notes it later (ddl_airflow.storage.experiments.may_have_others).
        """
        if self.experiment_id:
            return True
        # An id that is no such name, for it is too long, may be too long for that file's, too.
        named = owners_file(self.workspace, self.training_id)
        return is_experiment(self.training_id) and named.exists()

    def give_to_ranks(self, folder: Path) -> None:
        """Makes what Airflow has put into a folder that of the ranks, if they have another user.

        Only for a folder in which no rank has written yet, and before it is where ranks look.

        Raises:
            FileRefused, OSError: as ``share_folder``.
        """
        if self.ranks_group is not None:
            share_folder(folder, self.workspace, self.ranks_group)

    def drop_experiment_copy(self) -> None:
        """Removes the copy of a named experiment, whatever it is."""
        if self.experiment_id and os.path.lexists(self.experiment_copy):
            _put_away(self.experiment_copy)

    def restart(self) -> None:
        """Moves what a training has left to ``replaced``, in place of what was there before.

        An experiment that the manifest or the run names stays: it is there to be gone on with.
        While ``restart_requested`` is there, who comes after a process that was killed half-way
        moves the rest.
        """
        if not self.restart_requested.exists() or self.restart_requested.read_text() != _MOVING:
            if self.replaced.exists():
                _put_away(self.replaced)
            self.replaced.mkdir(_OURS, parents=True)
            write_beneath(self.restart_requested, self.workspace, _MOVING.encode())
        own = () if self.experiment_id else (self.experiment,)
        tries = self.state.glob(f"{_TRY}*")
        self.preemptions.unlink(missing_ok=True)
        for path in (self.result, self.damaged, self.progress, *tries, *own):
            if (self.replaced / path.name).exists():  # moved before; this is an empty folder
                with suppress(OSError):
                    remove_tree(path)
            elif path.exists():
                path.replace(self.replaced / path.name)
        self.create()
        self.open_to_ranks()

    def put_progress_away(self, try_number: int) -> None:
        """Moves what earlier tries told to ``replaced``, where they left nothing to go on from:
        none of it is said of what is trained from here on.

        Args:
            try_number: Airflow's, of the one that begins.
        """
        if os.path.lexists(self.progress):
            self.replaced.mkdir(_OURS, exist_ok=True)
            # What a finished training left may be there, too.
            aside = self.replaced / f"progress-before-{_TRY}{try_number}.jsonl"
            self.progress.replace(aside)


def _put_away(path: Path) -> None:
    """Removes a folder or a link; the ranks' user may have left what only that one may delete."""
    aside = path.rename(path.with_name(f"{REMOVING}{uuid.uuid4().hex}"))
    if aside.is_symlink() or not aside.is_dir():
        aside.unlink()
    with suppress(OSError):
        remove_tree(aside)
