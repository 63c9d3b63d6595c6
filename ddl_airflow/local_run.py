"""``ddl-airflow run``: all steps of a manifest's training, on this host and without Airflow.

The steps are those of the DAG (``ddl_airflow.steps``), one after the other, in a workspace below
the current folder. What differs is who asks and who is told: settings come from the command line,
connections from the environment, progress goes to the terminal, and what is published goes into a
folder of the workspace unless the manifest's own place is asked for.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ddl_airflow.core.beneath import open_beneath, read_object, write_beneath
from ddl_airflow.core.connections import connection_of_environment
from ddl_airflow.core.errors import ConnectionInvalid, DdlError, SettingInvalid, SourceMissing
from ddl_airflow.core.job import StartedJob
from ddl_airflow.core.layout import HEARTBEAT_S, RunLayout, training_id
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.core.manifest.sections.launchers import launcher_kind
from ddl_airflow.core.manifest.sections.parameters import RUN_SETTINGS, values_of
from ddl_airflow.core.manifest.sections.places import MANIFEST_VARIABLES
from ddl_airflow.core.manifest.templates import is_template
from ddl_airflow.core.manifest.values import CHECKPOINT
from ddl_airflow.core.output import printable
from ddl_airflow.core.parameters import check_settings, filled_in, without_marks
from ddl_airflow.core.plan import (
    EvaluateStep,
    Plan,
    ScriptStep,
    Step,
    StoreReference,
    TrainStep,
    plan,
)
from ddl_airflow.core.removal import remove_tree
from ddl_airflow.lineage.record import BY_HAND, Run, fixed_run, has_part, keep_so_far
from ddl_airflow.steps.base import (
    Site,
    StepContext,
    StepSkipped,
    StepTry,
    WaitForExperiment,
    WaitForJob,
    prepared,
)
from ddl_airflow.steps.evaluate import Evaluate
from ddl_airflow.steps.stage import StageData
from ddl_airflow.steps.train import Train
from ddl_airflow.steps.transform import Transform
from ddl_airflow.steps.upload import UploadResults
from ddl_airflow.storage.connections import open_by_connection, open_by_keys
from ddl_airflow.storage.filesystem import os_errors
from ddl_airflow.storage.site import workspace_id
from ddl_airflow.storage.store import ObjectStore
from ddl_airflow.storage.stores import open_store

_NOTE = "by-hand.json"
_WORK: Mapping[str, type[StepTry[Any]]] = {
    "stage_data": StageData,
    "train": Train,
    "transform": Transform,
    "evaluate": Evaluate,
    "upload_results": UploadResults,
}
STEPS = tuple(name.replace("_", "-") for name in _WORK)
# What a command line may set of a run, beside the manifest's parameters.
_SETTABLE = ("nodes", "launcher", "checkpoint", "experiment_id")
_log = logging.getLogger("ddl-airflow run")


@dataclass(frozen=True)
class Asked:
    """What the command line says.

    Attributes:
        steps: names of those to do in the newest run there is; empty: all, in a new run.
        until: the last step to do; empty: all.
        settings: of the run, by name, as text.
        data: folder that has the data, in place of the manifest's.
        publish: whether what is published goes where the manifest says.
        dry_run: whether the steps only say what they would do.
        compute: the site's table of compute, where it is not that of the environment.
    """

    workspace: Path
    steps: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    data: Path | None = None
    publish: bool = False
    dry_run: bool = False
    until: str = ""
    compute: str = ""

    def again(self, manifest: Path, steps: Sequence[str]) -> str:
        """The command that does steps in the run of this one; of its settings the run knows."""
        places = [*(["--data", str(self.data)] if self.data else []), *["--publish"] * self.publish]
        compute = ["--compute", self.compute] if self.compute else []
        those = [word for step in steps for word in ("--step", step)]
        return shlex.join(["ddl-airflow", "run", str(manifest), *places, *compute, *those])


@dataclass
class _LocalRun:
    """A run, and how often each of its steps was tried: what Airflow's database has of others."""

    layout: RunLayout
    run_id: str
    started: datetime
    tries: dict[str, int]
    # The manifest's file, from the workspace: a folder that has both may be moved.
    manifest: str = ""
    # What the command line has set.
    conf: dict[str, Any] = field(default_factory=dict)

    def keep(self) -> None:
        said = {
            "run_id": self.run_id,
            "started": self.started.isoformat(),
            "tries": self.tries,
            "experiment": self.layout.experiment_id,
            "manifest": self.manifest,
            "conf": self.conf,
        }
        self.layout.kept.mkdir(parents=True, exist_ok=True)
        path = self.layout.kept / _NOTE
        write_beneath(path, self.layout.workspace, json.dumps(said).encode())

    def described(self, dag_id: str, parameters: Mapping[str, Any]) -> Run:
        """What a run is to the steps, with its parameters."""
        return Run(
            dag_id=dag_id,
            run_id=self.run_id,
            type=BY_HAND,
            due=self.started,
            by_a_person=True,
            logical_date=self.started,
            started=self.started,
            parameters=parameters,
        )


def run_manifest(manifest: Manifest, path: Path, asked: Asked) -> dict[str, Any]:
    """Does the steps, and says on the log how they go.

    Args:
        manifest: as loaded.
        path: its file.
        asked: the command line's.

    Returns:
        What each step that was done returns, by its name; ``layout``, the run's, and ``folder``, as
        a person would find it.

    Raises:
        DdlError: a step failed; the log says which.
        StepSkipped: there was nothing to do.
    """
    parameters = _parameters(manifest, asked.settings)
    steps = _here(plan(manifest, path), manifest, asked)
    run = _newest(steps, asked, path) if asked.steps else _new(steps, asked, path, parameters)
    wanted = [name.replace("-", "_") for name in asked.steps]
    doing = [name for name in _of(steps) if not wanted or name in wanted]
    if asked.until:
        doing = doing[: doing.index(asked.until.replace("-", "_")) + 1]
    _log.info("this training's folder is %s", _near(run.layout.root))
    anew = "stage_data" in doing  # that is where a run takes its settings
    if asked.steps:
        parameters = _of_that_run(run, parameters, asked.settings, anew=anew)
    run.conf |= {name: parameters[name] for name in asked.settings}
    if not asked.steps:  # now, and not after a training
        for name in doing:
            _filled_in(_of(steps)[name], parameters, run)
    site = _site(steps)
    done: dict[str, Any] = {"folder": str(_near(run.layout.root)), "layout": run.layout}
    try:
        for number, name in enumerate(doing):
            try:
                with nullcontext() if asked.dry_run else _heartbeat(run.layout):
                    done[name] = _do(
                        name, steps, run, site, parameters, anew=anew, dry_run=asked.dry_run
                    )
            except (DdlError, KeyboardInterrupt) as error:
                how = "failed" if isinstance(error, DdlError) else "was interrupted, and has ended"
                _log.error("%s %s", name.replace("_", "-"), how)
                if number and not asked.dry_run:
                    rest = [one.replace("_", "-") for one in doing[number:]]
                    _log.info("to go on with this run: %s", asked.again(path, rest))
                raise
    finally:
        if asked.dry_run and not asked.steps:
            with suppress(OSError):
                remove_tree(run.layout.root)
    return done


@contextmanager
def _heartbeat(layout: RunLayout) -> Iterator[None]:
    """Has the time of a file say that this process is at work, for as long as it is.

    Airflow notices when a task is killed. When this process is, nobody does, and the run's record
    goes on saying that it runs.
    """
    over = threading.Event()

    def beat() -> None:
        said = False
        while True:
            try:
                flags = os.O_WRONLY | os.O_CREAT
                descriptor = open_beneath(layout.heartbeat, layout.workspace, flags)
                try:
                    os.utime(descriptor)
                finally:
                    os.close(descriptor)
            except (DdlError, OSError) as error:  # the next one may be seen
                if not said:
                    _log.warning("nobody sees that this run is at work: %s", error)
                said = True
            if over.wait(HEARTBEAT_S):
                return

    with os_errors(layout.root):
        layout.kept.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def data_of(manifest: Manifest, path: Path) -> ObjectStore:
    """The store of a manifest's data, opened as its steps would be here.

    Raises:
        ConnectionInvalid: what opens it is not in the environment.
    """
    steps = plan(manifest, path)
    return _site(steps).open_store(steps.stage_data.dataset)


def planned(manifest: Manifest, path: Path, asked: Asked) -> list[str]:
    """What a run of the manifest would submit to train, in lines; nothing is written or started.

    Secrets are not looked up: ``***`` stands for each. The training has an id that no run has.

    Raises:
        DdlError: a setting is wrong, or nothing could be started.
    """
    parameters = _parameters(manifest, asked.settings)
    steps = plan(manifest, path)
    workspace = asked.workspace.resolve()
    name = training_id(steps.dag_id, "planned", "")
    layout = RunLayout(workspace, steps.dag_id, name, parameters["experiment_id"] or "")
    conf = {name: parameters[name] for name in asked.settings}
    run = _LocalRun(layout, "planned", datetime.now(UTC), {}, conf=conf)
    site = replace(_site(steps), secret=lambda _: "***")
    log = logging.LoggerAdapter(_log, {"step": "train"})
    step = _filled_in(steps.train, parameters, run)
    assert isinstance(step, TrainStep)
    context = StepContext(layout, run.described(steps.dag_id, parameters), log, site)
    submission = Train(step, context).submission()
    own = {n: text for n, text in submission.env.items() if os.environ.get(n) != text}
    job = submission.job
    return [
        f"# launcher {step.launcher}: {job.nodes} node(s) with {job.slots} rank(s) each, in "
        f"{job.folder}",
        "# environment, besides what is passed on from this one: "
        + " ".join(sorted(submission.env.keys() - own.keys())),
        *(f"{name}={shlex.quote(own[name])}" for name in sorted(own)),
        "# submitted",
        str(submission),
    ]


def where_it_is(results: Mapping[str, Any]) -> list[str]:
    """Lines that say where everything is, of what ``run_manifest`` returns."""
    lines = []
    if trained := results.get("train"):
        numbers = ", ".join(f"{name} {value:g}" for name, value in trained["metrics"].items())
        lines.append(f"trained on {trained['world_size']} rank(s){numbers and f': {numbers}'}")
    if evaluated := results.get("evaluate"):
        known = evaluated["metrics"].items()
        lines.append(f"evaluated: {', '.join(f'{name} {value:g}' for name, value in known)}")
    if places := results.get("upload_results"):
        lines += [f"model: {_path(places['model'])}", f"lineage: {_path(places['lineage'])}"]
    elif formed := results.get("transform"):
        lines.append(f"model: {_near(Path(formed['model']))}")
    return [*lines, f"logs: {results['folder']}/logs"]


def _path(uri: str) -> str:
    if not uri.startswith("file://"):
        return uri
    return str(_near(Path(unquote(uri.removeprefix("file://")))))


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _of(steps: Plan) -> dict[str, Step]:
    """The steps that are done here, in their order."""
    asked = {name: getattr(steps, name) for name in _WORK}
    return {name: step for name, step in asked.items() if step is not None}


def _parameters(manifest: Manifest, given: Mapping[str, str]) -> dict[str, Any]:
    """The run's parameters, as a trigger form would give them.

    Raises:
        SettingUnknown, SettingInvalid: as ``values_of``.
    """
    check_settings(given, [*manifest.parameters, *_SETTABLE])
    own = {name: text for name, text in given.items() if name not in _SETTABLE}
    values: dict[str, Any] = values_of(manifest.parameters, own)
    nodes = given.get("nodes", str(manifest.model_definition.execution.compute_configuration.nodes))
    if not re.fullmatch("[0-9]{1,9}", nodes) or int(nodes) < 1:
        given_as = ascii(nodes[:60])
        raise SettingInvalid(f"nodes is {given_as}, wanted a whole number of at least 1.")
    launcher = given.get("launcher", manifest.launcher.kind)
    if launcher_kind(launcher) is None:
        raise SettingInvalid(f"launcher is {launcher!r}, which there is not. Use launcher=local.")
    checkpoint = given.get("checkpoint", str(manifest.transform.checkpoint))
    if not re.fullmatch(CHECKPOINT, checkpoint):
        given_as = ascii(checkpoint[:60])
        raise SettingInvalid(f"checkpoint is {given_as}, wanted latest or a step, from 0.")
    if "checkpoint" in given and len(manifest.commands) > 1:
        raise SettingInvalid(
            "checkpoint is for the built-in transform, and the manifest's command after ; takes "
            "its place. Leave it out."
        )
    set_here = {
        "nodes": int(nodes),
        "launcher": launcher,
        "checkpoint": checkpoint,
        "experiment_id": given.get("experiment_id")
        or (manifest.experiment.name if manifest.experiment else None),
        "attempts": 1,
        "dry_run": False,
    }
    assert set_here.keys() == set(RUN_SETTINGS)
    return values | set_here


def _here(steps: Plan, manifest: Manifest, asked: Asked) -> Plan:
    """The plan, with places that are here."""
    staged = steps.stage_data
    if asked.data is not None:
        if not asked.data.is_dir():
            raise SourceMissing(f"--data {asked.data} is no folder")
        dataset = StoreReference(asked.data.resolve().as_uri())
        staged = replace(staged, dataset=dataset)
        steps = replace(steps, train=replace(steps.train, dataset=steps.train.dataset and dataset))
    if asked.publish:
        if manifest.approval.required:
            raise SettingInvalid(
                "--publish: the manifest has a person approve each model, which only Airflow asks. "
                "Trigger its DAG."
            )
        return replace(steps, stage_data=staged)
    results = StoreReference((asked.workspace / "results").resolve().as_uri())
    return replace(
        steps,
        stage_data=replace(staged, results=results),
        train=replace(steps.train, results=steps.train.results and results),
        evaluate=steps.evaluate and replace(steps.evaluate, results=results),
        upload_results=replace(steps.upload_results, results=results),
    )


def _new(steps: Plan, asked: Asked, path: Path, parameters: Mapping[str, Any]) -> _LocalRun:
    started = datetime.now(UTC)
    run_id = f"by-hand-{started:%Y-%m-%dT%H-%M-%S}-{secrets.token_hex(2)}"
    workspace = asked.workspace.resolve()
    layout = RunLayout(
        workspace,
        steps.dag_id,
        training_id(steps.dag_id, run_id, workspace_id(workspace, make=True)),
        parameters["experiment_id"] or "",
    )
    return _LocalRun(layout, run_id, started, {}, _from_workspace(path, workspace))


def _newest(steps: Plan, asked: Asked, path: Path) -> _LocalRun:
    """The run of the manifest that was begun, or went on, last.

    Raises:
        SourceMissing: there is none.
    """
    workspace = asked.workspace.resolve()
    notes = (workspace / "runs" / steps.dag_id).glob(f"*/airflow/{_NOTE}")
    manifest, others = _from_workspace(path, workspace), set()
    for note in sorted(notes, key=lambda note: note.stat().st_mtime_ns, reverse=True):
        said = read_object(note, workspace)
        # An earlier version of ours did not note whose it is.
        if (whose := said.get("manifest", manifest)) != manifest:
            others.add(str(_near((workspace / whose).resolve())))
            continue
        layout = RunLayout(workspace, steps.dag_id, note.parent.parent.name, said["experiment"])
        started = datetime.fromisoformat(said["started"])
        conf = dict(said.get("conf", {}))
        return _LocalRun(layout, said["run_id"], started, dict(said["tries"]), manifest, conf)
    of_others = f": its runs of {steps.dag_id} are of {', '.join(sorted(others))}" if others else ""
    raise SourceMissing(
        f"{_near(workspace)} has no run of {steps.dag_id} to go on with{of_others}. Run all steps "
        "first: without --step."
    )


def _from_workspace(path: Path, workspace: Path) -> str:
    return os.path.relpath(path.resolve(), workspace)


def _of_that_run(
    run: _LocalRun, parameters: Mapping[str, Any], given: Mapping[str, str], *, anew: bool
) -> dict[str, Any]:
    """The parameters of a run that goes on; its experiment stays what it was.

    Args:
        run: that goes on.
        parameters: as the manifest and the command line have them now.
        given: those of them that the command line names, as text.
        anew: whether the run stages its data again, and takes its other settings then.

    Raises:
        SettingInvalid: it would not have what it is given.
    """
    before = {"experiment_id": run.layout.experiment_id or None}
    begun = None if anew else fixed_run(run.layout)
    if begun is not None:
        before = begun["made_of"]["parameters"] | before
    for name, text in given.items():
        if (name in before or begun is not None) and before.get(name) != parameters[name]:
            cure = "begin a new run, without --step"
            if name != "experiment_id":
                cure = f"stage anew, --step stage-data and the steps after it; or {cure}"
            raise SettingInvalid(
                f"--set {name}={text}: the run that goes on began with {name}={before.get(name)}, "
                f"which holds to its end. Leave it out; or {cure}."
            )
    return {**parameters, **before}


def _do(
    name: str,
    steps: Plan,
    run: _LocalRun,
    site: Site,
    parameters: Mapping[str, Any],
    *,
    anew: bool,
    dry_run: bool,
) -> dict[str, Any]:
    layout, names = run.layout, list(_of(steps))
    cleared = has_part(layout, name)  # done before, and asked for again
    run.tries[name] = run.tries.get(name, 0) + 1
    if not dry_run:
        with os_errors(layout.root):
            run.keep()
    # What the run began with holds until its end, but where its data is staged again.
    begun = None if name == "stage_data" or (anew and dry_run) else fixed_run(layout)
    values = begun["made_of"]["parameters"] if begun else parameters
    kept = begun["steps"].get(name, {}) if begun else {}
    later = names[names.index(name) + 1 :]
    context = StepContext(
        layout,
        run.described(steps.dag_id, values),
        logging.LoggerAdapter(_log, {"step": name.replace("_", "-")}),
        site,
        try_number=run.tries[name],
        tries=1 if cleared else run.tries[name],
        cleared=cleared or run.tries[name] > 1,
        later={one: _of(steps)[one] for one in later},
        name=name,
    )
    step = _filled_in(replace(_of(steps)[name], **kept), values, run)
    ready = prepared(
        layout,
        staged=name != "stage_data" and not dry_run,
        experiment=steps.experiment,
        scripts=_WORK[name].runs_scripts,
    )
    work = _WORK[name](step, context)
    if dry_run:  # nothing of it is in the run's record
        with os_errors(layout.root), ready:
            context.log.info("dry run | %s", work.rehearse())
            return {}
    try:
        with os_errors(layout.root), ready:
            context.begins(name)
            done = _waited_for(work)
            context.tell(step=name, **work.became(done))
            return done
    except KeyboardInterrupt as error:
        context.cancel()
        _keep_failure(context, step, name, error)
        raise
    except DdlError as error:
        _keep_failure(context, step, name, error)
        raise
    except StepSkipped:
        context.tell("skipped", name)
        raise


def _keep_failure(context: StepContext, step: Step, name: str, error: BaseException) -> None:
    if not context.layout.kept.is_dir():
        return
    message = str(error)
    for conn in step.secrets.values() if isinstance(step, ScriptStep) else ():
        with suppress(ConnectionInvalid):
            message = message.replace(context.site.secret(conn), "***")
    outcome = {
        "state": "cancelled" if isinstance(error, KeyboardInterrupt) else "failed",
        "step": name,
        "try": context.try_number,
        "error": type(error).__name__,
        "message": message,
        "rank": getattr(error, "rank", None),
    }
    with suppress(DdlError, OSError):  # what it failed of is said all the same
        keep_so_far(context.layout, context.run, outcome)


def _waited_for(work: StepTry[Any]) -> dict[str, Any]:
    started: StartedJob | None = None
    try:
        while True:
            try:
                if started is None:
                    return work.run()
                assert isinstance(work, Train)
                return work.settle(started, None)
            except WaitForJob as waits:  # once more, if the job had to make room
                started = waits.started
    except WaitForExperiment:
        raise SettingInvalid(
            f"another training works in experiment {work.layout.experiment.name}. Try again when "
            f"it has ended: --step {', --step '.join(STEPS[1:])}"
        ) from None


def _filled_in(step: Step, values: Mapping[str, Any], run: _LocalRun) -> Step:
    """The step with the run's values, as Airflow renders and sets them."""

    def filled(value: Any) -> Any:
        if isinstance(value, str):
            return value and filled_in(
                value,
                values,
                _named_in_templates(run) if is_template(value) else {},
                field=f"{'evaluation' if isinstance(step, EvaluateStep) else 'execution'}.command",
                fix="Trigger the DAG, or name another value.",
            )
        return tuple(map(filled, value))

    changed = {name: filled(getattr(step, name)) for name in step.templated}
    changed |= {name: values[name] for name in step.settable if name in values}
    if isinstance(step, TrainStep) and changed["launcher"] != step.launcher:
        changed["scheduler"] = {}
    if isinstance(step, ScriptStep):
        own = {name: values.get(name, value) for name, value in step.parameters.items()}
        changed["parameters"] = own
    return replace(step, **changed)


def _named_in_templates(run: _LocalRun) -> dict[str, Any]:
    """What templates may name, of ``ddl_airflow.core.manifest.templates``, as Airflow has it."""
    import pendulum  # its dates have methods; no other run needs it

    date = run.started
    dates = ("logical_date", "data_interval_start", "data_interval_end")
    return {
        "run_id": run.run_id,
        **dict.fromkeys(dates, pendulum.instance(date)),
        "ds": f"{date:%Y-%m-%d}",
        "ds_nodash": f"{date:%Y%m%d}",
        "ts": date.isoformat(),
        "ts_nodash": f"{date:%Y%m%dT%H%M%S}",
        "ts_nodash_with_tz": without_marks(date),
        "dag_run": {
            **{"run_id": run.run_id, "dag_id": run.layout.dag_id},
            **{"run_type": BY_HAND, "conf": run.conf},
            **dict.fromkeys(("run_after", "start_date", *dates), date),
        },
        "macros": {
            "datetime": datetime,
            "timedelta": timedelta,
            "ds_add": lambda ds, days: f"{datetime.fromisoformat(ds) + timedelta(days):%Y-%m-%d}",
            "ds_format": lambda ds, of, to: datetime.strptime(ds, of).strftime(to),
        },
    }


def _site(steps: Plan) -> Site:
    names = {conn: name for name, conn in steps.train.secrets.items()}

    def open_here(reference: StoreReference) -> ObjectStore:
        connection = reference.connection
        if connection is None:
            return open_store(reference.uri, within=reference.within)
        if not connection.conn_id:
            return open_by_keys(reference, connection, os.environ, MANIFEST_VARIABLES)
        return _open_by_connection(reference, connection.conn_id)

    def secret(conn_id: str) -> str:
        name = names.get(conn_id)  # None: it is the site's own, such as its signing key
        variable = f"PARAM_{name.upper()}" if name else f"AIRFLOW_CONN_{conn_id.upper()}"
        if name and (value := os.environ.get(variable, "")):
            return value
        known = connection_of_environment(conn_id, os.environ)
        if known is None or not known.password:
            what = f"parameter {name} is secret" if name else f"connection {conn_id} is not here"
            raise ConnectionInvalid(f"{what}: set {variable} in the environment")
        return known.password

    return Site(
        os.environ.get("AIRFLOW__DDL__PYTHON", "") or sys.executable,
        open_here,
        secret,
        signing_key=os.environ.get("AIRFLOW__DDL__SIGNING_KEY", ""),
    )


def _open_by_connection(reference: StoreReference, conn_id: str) -> ObjectStore:
    known = connection_of_environment(conn_id, os.environ)
    if known is None:
        raise ConnectionInvalid(
            f"conn_id: {conn_id} is a connection of Airflow, which is not asked here. Set "
            f"AIRFLOW_CONN_{conn_id.upper()} to it, as Airflow reads it too; or give a folder that "
            "has the data: --data DIR."
        )
    return open_by_connection(reference.uri, known)


def as_seen_from_here(text: str) -> str:
    """A text, with paths below the current folder relative to it."""
    return re.sub(rf"(?<![/\w]){re.escape(str(Path.cwd()))}/", "", text)


class Lines(logging.Formatter):
    """What the steps say, a line each, with the step in front."""

    def format(self, record: logging.LogRecord) -> str:
        """Without the marks by which Airflow folds lines, and with places as seen from here."""
        said = as_seen_from_here(record.getMessage().removeprefix("::group::"))
        step = f"{getattr(record, 'step', '')} | " if hasattr(record, "step") else ""
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return printable(f"{step}{level}{said}", keep="\t\n")


def log_to_terminal() -> None:
    """Has all that is said by steps and launchers go to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    handler.addFilter(lambda record: record.getMessage() != "::endgroup::")
    _log.propagate = False
    for logger in (_log, logging.getLogger("ddl_airflow")):
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
