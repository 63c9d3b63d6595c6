"""What the steps of a training share. No Airflow: it maps what it knows to this, and back.

A step keeps nothing in memory for the next: what later steps and tries need lies in the run
directory (``ddl_airflow.core.layout``).
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from ddl_airflow.core import environment
from ddl_airflow.core.beneath import check_folder
from ddl_airflow.core.connections import FindConnection, own_connection
from ddl_airflow.core.errors import DdlError, StagingError
from ddl_airflow.core.job import JobSpec, StartedJob
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import ScriptStep, Step, StoreReference
from ddl_airflow.lineage.record import Run, has_part, keep_so_far
from ddl_airflow.steps.job import RunningJob
from ddl_airflow.storage.experiments import claim
from ddl_airflow.storage.store import ObjectStore

_SAY_EVERY_S = 2.0

Asked = TypeVar("Asked", bound=Step)
AskedOfScripts = TypeVar("AskedOfScripts", bound=ScriptStep)


class StepSkipped(Exception):
    """There is nothing to do; the message says why. No error."""


class WaitForJob(Exception):
    """A scheduler runs the step's job: whoever waits calls ``Train.settle`` at its end."""

    def __init__(self, started: StartedJob) -> None:
        super().__init__(started.handle.job_id)
        self.started = started


class WaitForExperiment(Exception):
    """Another training works in the experiment: the step is to run again when it has ended."""

    def __init__(self, experiment: Path) -> None:
        super().__init__(str(experiment))
        self.experiment = experiment


@dataclass(frozen=True)
class Site:
    """What a step is given by the place it runs at.

    Attributes:
        python: that starts ranks, where the manifest names none.
        open_store: opens the store that a reference names; raises ConnectionInvalid.
        secret: the value that a connection, by its id, has; raises ConnectionInvalid.
        connection: finds a connection by its id; raises ConnectionInvalid.
        ranks_user: the user that ranks run as; empty for this process's.
        transfer_workers: threads that move data.
        most_preemptions: how often a training may have to make room before it fails.
        evidence: whether a model gets files that show how it was made.
        signing_key: of the site, as ``ddl_airflow.evidence.signature`` reads it; empty: none.
        cache_bytes: of the data that a host without the workspace keeps; None: without end.
    """

    python: str
    open_store: Callable[[StoreReference], ObjectStore]
    secret: Callable[[str], str]
    connection: FindConnection = own_connection
    ranks_user: str = ""
    transfer_workers: int = 8
    most_preemptions: int = 100
    evidence: bool = True
    signing_key: str = ""
    cache_bytes: int | None = None


@dataclass
class StepContext:
    """Where and when a step runs.

    Attributes:
        layout: the folder of the run.
        run: that the step belongs to.
        log: a logger; what it says is for people.
        site: the place.
        try_number: unique within the run, from 1.
        tries: which try this is, from 1, since somebody cleared the step.
        cleared: whether somebody has cleared it, or the run, since it was first tried.
        later: what the steps after this one are asked to do, by their names.
        unsure: names of those ``later`` of which this step cannot say what they need: they may not
            run, or run where other connections are known.
        name: the step's, as others name it.
        gates: for each later step that publishes, by its name: the names of the steps that have to
            let the model pass before, by their kind, ``evaluate`` or ``approve``; and those on
            ways that a branch chooses between, by their kind with ``OF_A_BRANCH``; and which steps
            are on other ways than such a one, by ``INSTEAD_OF`` with its name. None where there is
            at most one of each.
        published: called with places and facts about what was published.
        task: of Airflow, as ``Cancellation`` has it; None where no task runs it.
        job: what runs for the step now; see ``set_job``.
        cancelled: whether ``cancel`` was called.
    """

    layout: RunLayout
    run: Run
    log: Any
    site: Site
    try_number: int = 1
    tries: int = 1
    cleared: bool = False
    later: Mapping[str, Step] = field(default_factory=dict)
    unsure: Collection[str] = ()
    name: str = ""
    gates: Mapping[str, Mapping[str, Sequence[str]]] | None = None
    published: Callable[[Mapping[str, Any]], None] = lambda _facts: None
    task: Mapping[str, Any] | None = None
    job: RunningJob | None = None
    cancelled: bool = False

    def tell(self, state: str, step: str, **more: Any) -> None:
        """Has the run's record say how far it is; see ``keep_so_far``."""
        try:
            keep_so_far(self.layout, self.run, {"state": state, "step": step, **more})
        except (DdlError, OSError) as untold:  # no reason to fail, or to do the step again
            self.log.warning("the run's record does not say that it is %s: %s", state, untold)

    def begins(self, step: str) -> None:
        """Has it say that the step is at work, whatever became of an earlier try."""
        self.tell("running", step, **{"try": self.try_number, "at_work": True})

    def set_job(self, job: RunningJob) -> None:
        """Says what runs for the step from now on. If the step is cancelled already, so is that."""
        self.job = job
        if self.cancelled:
            job.cancel()

    def cancel(self) -> None:
        """Ends every process of the step; from a signal handler, or another thread."""
        self.cancelled = True
        if self.job is not None:
            self.job.cancel()


class StepTry(ABC, Generic[Asked]):
    """One try of a step.

    Args:
        step: what is asked.
        context: where and when.
    """

    # Whether it starts processes of the manifest.
    runs_scripts: ClassVar[bool] = False

    def __init__(self, step: Asked, context: StepContext) -> None:
        self.step = step
        self.context = context
        self.layout = context.layout
        self.log = context.log
        self.site = context.site

    @abstractmethod
    def rehearse(self) -> str:
        """What the step would do, in a sentence, after checks that cost little; raises DdlError."""

    @abstractmethod
    def run(self) -> dict[str, Any]:
        """The step's work. Returns places and digests, never data.

        Raises:
            DdlError: it failed.
            StepSkipped: there is nothing to do.
            WaitForJob, WaitForExperiment: it goes on later.
        """

    def became(self, done: Mapping[str, Any]) -> dict[str, Any]:
        """What a step that returned ``done`` makes of the training, for the run's record: its
        ``state``, and what ``keep_so_far`` keeps besides.
        """
        return {"state": "running"}


class ScriptTry(StepTry[AskedOfScripts]):
    """One try of a step that starts processes in the ranks' Python."""

    runs_scripts = True

    @property
    def python(self) -> str:
        """The manifest's, or the site's."""
        return self.step.python or self.site.python

    def environment(self, *, trained: bool = True) -> dict[str, str]:
        """What the manifest's own commands find in their environment, once it has ``trained``.

        Raises:
            ConnectionInvalid: there is no connection for a secret parameter, or no password in it.
        """
        secrets = {name: self.site.secret(conn) for name, conn in self.step.secrets.items()}
        return {
            **environment.of_run(self.layout, self.context.run.dag_id, trained=trained),
            **environment.of_script(self.step, secrets),
        }

    def run_once(self, name: str, command: str, log_dir: Path, env: Mapping[str, str]) -> None:
        """Runs one process in the run's copy of the code, and waits for its end.

        Args:
            name: of the job, within the run; with the number of the try.
            command: as in a manifest.
            log_dir: where its output goes.
            env: what it gets besides what every rank inherits from the worker.

        Raises:
            JobFailed: it failed.
            JobLost: it was cancelled.
        """
        job = JobSpec(
            job_id=f"{self.layout.training_id}/{name}",
            command=command,
            nodes=1,
            slots=1,
            python=self.python,
            folder=self.layout.code,
            record_dir=self.layout.state / name,
            log_dir=log_dir,
            env=dict(env),
            user=self.site.ranks_user,
        )
        # Not at the top: a DAG that is parsed starts nothing.
        from ddl_airflow.launchers.local import OnceLauncher

        once = RunningJob(OnceLauncher(), self.log)
        self.context.set_job(once)
        once.run(job)


@contextmanager
def prepared(layout: RunLayout, *, staged: bool, experiment: str, scripts: bool) -> Iterator[None]:
    """The run's folder, as a step needs it.

    Args:
        layout: the run's.
        staged: whether the step comes after stage_data.
        experiment: the one that the manifest names; empty for none.
        scripts: whether the step starts processes of the manifest, which then may write there.

    Raises:
        StagingError: this is another host's disk.
        SettingInvalid: the run's experiment is another DAG's.
    """
    layout.failure.unlink(missing_ok=True)  # the run goes on
    if staged:
        _check_staged(layout)
    if name := layout.experiment_id:
        claim(layout.workspace, name, layout.dag_id, in_manifest=name == experiment)
    layout.create()
    for folder in layout.folders:
        check_folder(folder, layout.workspace)
    if not scripts:
        yield
        return
    layout.open_to_ranks()
    try:
        yield
    except (WaitForJob, WaitForExperiment):  # its job goes on; or it has none, and closes by itself
        raise
    except BaseException:
        if not layout.scheduled_job.exists():  # else its job may run, and its ranks may save
            layout.close_to_ranks()
        raise
    layout.close_to_ranks()


def _check_staged(layout: RunLayout) -> None:
    """Whether this is where the run's data was staged, and no other host's own disk."""
    if not has_part(layout, "stage_data"):
        raise StagingError(
            f"{layout.root}: nothing that stage_data left for this run is here, on "
            f"{socket.gethostname()}. Mount the same workspace on all hosts that run its tasks; if "
            "it was lost, or nothing was staged, clear stage_data."
        )


class TransferLog:
    """Says how a transfer goes, not more often than a person would look.

    Args:
        log: a logger.
        verb: for example ``staged``.
    """

    def __init__(self, log: Any, verb: str) -> None:
        self._log = log
        self._verb = verb
        self._started = time.monotonic()
        self._said = self._started

    def __call__(self, done_bytes: int, total_bytes: int, done: int, total: int) -> None:
        """The storage layer's progress callback."""
        now = time.monotonic()
        if now - self._said < _SAY_EVERY_S:
            return
        self._said = now
        speed = done_bytes / max(now - self._started, 1e-9)
        left = (total_bytes - done_bytes) / speed if speed else 0.0
        self._log.info(
            "%s %d/%d files · %.1f/%.1f MiB · %.1f MiB/s · ETA %.0f s",
            *(
                self._verb,
                done,
                total,
                done_bytes / 2**20,
                total_bytes / 2**20,
                speed / 2**20,
                left,
            ),
        )
