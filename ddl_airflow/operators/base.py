"""What the four steps share: the run's folder, and errors that Airflow understands."""

from __future__ import annotations

import json
import pwd
import socket
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from airflow.configuration import AIRFLOW_HOME, conf
from airflow.sdk import BaseOperator, XComArg
from airflow.sdk.exceptions import AirflowSkipException, AirflowTaskTimeout, TaskDeferred
from airflow.sdk.log import redact  # type: ignore[attr-defined]

from ddl_airflow.airflow_internals import is_supervised, tries_before_cleared
from ddl_airflow.boundary import airflow_errors
from ddl_airflow.core.beneath import check_folder, write_beneath
from ddl_airflow.core.errors import (
    CommandInvalid,
    DdlError,
    SettingInvalid,
    StagingError,
    SubmitFailed,
    TimedOut,
)
from ddl_airflow.core.layout import RunLayout, is_experiment
from ddl_airflow.core.manifest.templates import ATTRIBUTES, VALUES, command_findings
from ddl_airflow.core.parameters import check_settings, word_of
from ddl_airflow.launchers.run_as import account
from ddl_airflow.lineage.record import fixed_run, has_part
from ddl_airflow.site import training_of, workspace
from ddl_airflow.storage.experiments import claim
from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.workspace import check_mounted

_SAY_EVERY_S = 2.0
_LONGEST_MESSAGE = 10_000
# In AIRFLOW_HOME, which is the host's own where the workspace is not.
_SEEN = "ddl-workspaces"


def layout_of(context: Any) -> RunLayout:
    """The folder of the run that a task belongs to.

    Raises:
        StagingError: the workspace is not mounted.
    """
    run, place = context["dag_run"], workspace()
    with os_errors(place):
        check_mounted(place, Path(AIRFLOW_HOME) / _SEEN)
    user = ranks_user()
    return RunLayout(
        place,
        run.dag_id,
        training_of(run.dag_id, run.run_id),
        context["params"].get("experiment_id") or "",
        pwd.getpwnam(user).pw_gid if user else None,
    )


def ranks_user() -> str:
    """The user that ranks run as: ``[ddl] run_ranks_as``; empty where that is this process's.

    Raises:
        SubmitFailed: this host has no such user.
    """
    user: str = conf.get("ddl", "run_ranks_as", fallback="").strip()
    try:
        return user if account(user) else ""
    except KeyError:
        raise SubmitFailed(
            f"this host has no user {user!r}. Create it, or correct [ddl] run_ranks_as in "
            "Airflow's configuration.",
            retryable=False,
        ) from None


def rank_python(configured: str) -> str:
    """The Python that starts ranks: the manifest's, the site's, or the one that runs Airflow."""
    return configured or conf.get("ddl", "python", fallback="") or sys.executable


def _end_with_supervisor() -> None:
    """A task whose supervisor was killed would go on, unseen, beside its next try."""
    from ddl_airflow.launchers.tether import end_with_parent

    # In `airflow dags test` there is no supervisor: the parent is the user's shell.
    if is_supervised():
        end_with_parent()


class StepOperator(BaseOperator):
    """One step of a training. Not for use by itself.

    A step keeps nothing in memory for the next: what later steps and tries need lies in the run
    directory (``ddl_airflow.core.layout``). XCom carries places and digests, never data.

    Args:
        settings: names of all that a run may set; None if whoever made the DAG decides.
        experiment: the experiment that the manifest names.
    """

    def __init__(
        self, *, settings: Sequence[str] | None = None, experiment: str = "", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.settings = None if settings is None else list(settings)
        self.experiment = experiment

    def execute(self, context: Any) -> dict[str, Any]:
        """Runs the step. Raises AirflowFailException when trying again cannot help."""
        return self.with_layout(context, self._rehearsed_or_run)

    def with_layout(
        self, context: Any, work: Callable[[RunLayout, Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Does the work, in the run's folder and with errors that Airflow understands."""
        _end_with_supervisor()
        attempts = context["params"].get("attempts", sys.maxsize)
        left = self.tries(context) < attempts
        with airflow_errors(attempts_left=left), self._noting_failure(context):
            try:
                layout = layout_of(context)
                layout.failure.unlink(missing_ok=True)  # the run goes on
                # Airflow takes any name in a run's conf, and makes a parameter of it.
                check_settings(context["dag_run"].conf or {}, self.settings)
                with os_errors(layout.root), self._timeout():
                    self._check_staged(layout)
                    if layout.experiment_id:
                        self._claim(layout)
                    layout.create()
                    for folder in layout.folders:
                        check_folder(folder, layout.workspace)
                    return work(layout, context)
            except DdlError as error:
                # In lines of its own: what follows in the log is Airflow's traceback.
                for line in f"{type(error).__name__}: {error}".splitlines():
                    self.log.error("%s", line)
                raise

    @contextmanager
    def _noting_failure(self, context: Any) -> Iterator[None]:
        """Leaves in the run's folder why the step failed."""
        try:
            yield
        except (AirflowSkipException, TaskDeferred):  # it did not
            raise
        except BaseException as error:
            try:
                self._note(layout_of(context), context, error)
            except (DdlError, OSError) as unnoted:  # the log has it all the same
                self.log.warning("the Training tab will not show why this failed: %s", unnoted)
            raise

    def _note(self, layout: RunLayout, context: Any, error: BaseException) -> None:
        if not self._follows_staging():
            layout.create()
        if not layout.kept.is_dir():
            return  # another host's disk, which the tab does not see
        failure = {
            "step": self.task_id,
            "try": context["ti"].try_number,
            "error": type(error).__name__,
            "message": str(redact(str(error)))[:_LONGEST_MESSAGE],
            "rank": getattr(error, "rank", None),
        }
        write_beneath(layout.failure, layout.workspace, json.dumps(failure).encode())

    def _follows_staging(self) -> bool:
        return any(s.task_id == "stage_data" for s in self.get_flat_relatives(upstream=True))

    def _check_staged(self, layout: RunLayout) -> None:
        """Whether this is where the run's data was staged, and no other host's own disk."""
        if has_part(layout, "stage_data") or not self._follows_staging():
            return
        raise StagingError(
            f"{layout.root}: nothing that stage_data left for this run is here, on "
            f"{socket.gethostname()}. Mount the same workspace on all hosts that run its tasks; if "
            "it was lost, or nothing was staged, clear stage_data."
        )

    def _claim(self, layout: RunLayout) -> None:
        name = layout.experiment_id
        if not is_experiment(name):
            raise SettingInvalid(
                f"experiment_id: {ascii(name[:60])} is no name. Use A-Z, a-z, 0-9, _, . and -."
            )
        in_manifest = name == self.experiment
        claim(layout.workspace, name, layout.dag_id, in_manifest=in_manifest)

    def _rehearsed_or_run(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        if context["params"].get("dry_run"):
            self._rehearse_from_here(layout, context)
        return self.run_step(layout, context)

    def tries(self, context: Any) -> int:
        """Which try this is, from 1, since the task was last cleared."""
        tries: int = context["ti"].try_number - self._tries_before(context)
        return max(1, tries)  # the manifest may have got other attempts since

    def was_cleared(self, context: Any) -> bool:
        """Whether somebody has cleared the task since it was first tried."""
        return self._tries_before(context) > 0

    def _tries_before(self, context: Any) -> int:
        return tries_before_cleared(context["ti"], self.retries or 0)

    @contextmanager
    def _timeout(self) -> Iterator[None]:
        try:
            yield
        except AirflowTaskTimeout as error:
            raise self.timed_out() from error

    def timed_out(self) -> TimedOut:
        """The error of a try that took longer than its ``execution_timeout``."""
        return TimedOut(
            f"{self.task_display_name} was ended after {self.execution_timeout}. If that was "
            f"too early, raise steps.{self.task_id}.timeout in the manifest."
        )

    # The fields in which Jinja is rendered; the other template_fields are only shown. A brace in
    # the regex of a metric is no template.
    templated: Sequence[str] = ()

    # Fields that the run's parameter of that name replaces, if there is one (``ddl_airflow.form``).
    settable: Sequence[str] = ()

    # Fields that a run keeps as they were when it staged its data.
    fixed: Sequence[str] = ()

    # Values that reach the command and the environment, by name.
    parameters: Mapping[str, Any] = MappingProxyType({})

    def render_template_fields(self, context: Any, jinja_env: Any = None) -> None:
        """Renders ``templated`` and takes the run's settings; Airflow shows ``template_fields``.

        What the manifest said when the run staged its data holds until its end: this task may have
        been made of one that was edited since.
        """
        environment = (jinja_env or self.get_template_env()).overlay(finalize=word_of)
        with airflow_errors(), self._noting_failure(context):
            self.take_fixed(context)
            # The rules of the manifest say so too; an operator may have been made without one.
            for name in self.templated:
                _check_templates(name, getattr(self, name))
            given: Any = _plain_values(context)
            self._do_render_template_fields(self, self.templated, given, environment, set())
        for name in self.template_fields:
            # Of an operator of a Python DAG: what an earlier task has returned.
            if isinstance(value := getattr(self, name), XComArg):
                setattr(self, name, value.resolve(context))
        params = context["params"]
        for name in self.settable:
            if name in params:
                setattr(self, name, params[name])
        self.parameters = {
            name: params.get(name, self.parameters[name]) for name in self.parameters
        }

    def take_fixed(self, context: Any) -> None:
        """Takes fields and parameters as the run began with them, if it has staged its data."""
        begun = fixed_run(layout_of(context))
        if begun is None:
            return
        context["params"] = begun["made_of"]["parameters"]
        for name, value in begun["steps"].get(self.task_id, {}).items():
            if name in self.fixed:
                setattr(self, name, value)

    def _rehearse_from_here(self, layout: RunLayout, context: Any) -> None:
        """Rehearses this step and those after it, and has them skipped."""
        later = [s for s in self.get_flat_relatives() if isinstance(s, StepOperator)]
        later.sort(key=lambda step: len(step.get_flat_relatives(upstream=True)))
        for step in [self, *later]:
            if step is not self:
                step.render_template_fields(context)
            self.log.info("dry run | %s: %s", step.task_display_name, step.rehearse(layout))
        raise AirflowSkipException("Dry run: nothing was fetched, trained or published.")

    @abstractmethod
    def rehearse(self, layout: RunLayout) -> str:
        """What the step would do, in a sentence, after checks that cost little; raises DdlError."""

    @abstractmethod
    def run_step(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        """The step's work. Returns what goes to XCom; raises DdlError."""


def _check_templates(name: str, value: str | Sequence[str]) -> None:
    for found in command_findings(name, [value] if isinstance(value, str) else value):
        raise CommandInvalid(f"{found.field}: {found.message}. {found.fix}")


def _plain_values(context: Any) -> dict[str, Any]:
    """What templates may name, and of Airflow's objects no more than they may ask for."""
    given: dict[str, Any] = {name: context[name] for name in VALUES if name in context}
    given["params"] = dict(context["params"])
    for name, attributes in ATTRIBUTES.items():
        if name in context:
            of = context[name]
            given[name] = {one: getattr(of, one) for one in attributes if hasattr(of, one)}
    return given


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
