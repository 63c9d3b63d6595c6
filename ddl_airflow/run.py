"""``ddl-run``: start N ranks by hand, as the train task does.

    ddl-run --np 2 python train.py --epochs 3
    ddl-run --manifest manifest.yml --set epochs=3
    ddl-run --tf-config master=1,ps=1,worker=2 python train.py

The ranks keep the caller's environment and folder; ``DDL_OPTIONS`` is set unless it already is, so
``import ddl`` initialises and hooks. Each line that one of several ranks prints has the rank in
front; one that is alone has the terminal to itself. The last line says which rank failed, and why.

The second line gives the ranks what the train task would: the variables of
docs/process-contract.md, with folders of this training alone in ``.ddl-run`` below the current
folder. What it does not give takes the manifest's word: the command, ranks, parameters, TensorFlow
1 mode and metrics. Data of ``type: fs`` is read in place.

The third line starts a process for each task of a cluster instead, with a TF_CONFIG of its own and
without MPI, and ends when all but the parameter servers have ended. ``--tf1`` gives the ranks the
1.x API of TensorFlow; ``--timeline FILE`` records what they communicate (docs/ops.md, "Seeing what
the ranks do").
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from ddl_airflow.core.cluster import Cluster, counted, parameter_servers
from ddl_airflow.core.environment import DEFAULT_OPTIONS, of_run, of_script, of_training
from ddl_airflow.core.errors import DdlError, SettingInvalid, SourceMissing
from ddl_airflow.core.job import JobHandle, JobState, JobStatus, RankFailure
from ddl_airflow.core.layout import RunLayout, make_workspace, training_id
from ddl_airflow.core.output import ended_by_its_reader
from ddl_airflow.core.parameters import filled_in
from ddl_airflow.launchers import session_directory, tasks, terminal
from ddl_airflow.launchers.local import rank_argv
from ddl_airflow.launchers.loopback import confined
from ddl_airflow.launchers.mpirun import OpenMpi, find_mpirun, find_python
from ddl_airflow.launchers.records import explained, ranks_status, read_records, written_by_several
from ddl_airflow.summary import Road, summary

# Hidden: what is in it is no script, and no manifest, of the folder around it.
_FOLDER = ".ddl-run"
_PYTHON = re.compile(r"python[0-9.]*")
# What only the train task, or a manifest, sets. Source: ddl_airflow.core.environment.
_OF_A_RUN = frozenset(
    """
    DATA_DIR RESULT_DIR MODEL_DIR CHECKPOINT_DIR LOG_DIR JOB_STATE_DIR TRAINING_ID JOB_NAME
    EXPERIMENT_ID EXPERIMENT_DIR
    """.split()
)


@dataclass(frozen=True)
class _Training:
    """What is to run.

    Attributes:
        command: an argv, or a command as a manifest has it.
        size: number of ranks.
        cluster: the tasks, of a job with TF_CONFIG; None under MPI.
        environment: what the ranks get besides the caller's.
        folder: where they run.
        python: that starts them.
        averages: whether the ranks must train one model, as the manifest says.
        road: what would follow in the manifest's DAG; None without a manifest.
    """

    command: str | Sequence[str]
    size: int
    cluster: Cluster | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    python: str = field(default_factory=lambda: sys.executable)
    averages: bool = False
    road: Road | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ranks. Returns the exit code of the one that failed first, 0 if none did."""
    terminal.open_standard_streams()
    return ended_by_its_reader(lambda: _called(argv))


def _called(argv: Sequence[str] | None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.command[:1] == ["--"]:
        del options.command[0]
    if options.manifest is None:
        if not options.command:
            parser.error("no COMMAND given; for example: ddl-run --np 2 python train.py")
        for name in ("set", "data"):
            if getattr(options, name):
                parser.error(f"--{name} is for a training of --manifest FILE")
    try:
        training = _training(options)
        if options.timeline is not None and training.cluster is not None:
            parser.error("--timeline records MPI's ranks; there are none with TF_CONFIG")
        return _run(training, options)
    except DdlError as error:
        parser.exit(2, f"ddl-run: {error}\n")
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        parser.exit(1, f"ddl-run: {place}{error.strerror}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddl-run",
        usage="ddl-run [--np N | --tf-config TASKS] [--manifest FILE [--set NAME=VALUE] "
        "[--data DIR]] [--tf1] [--timeline FILE] [COMMAND ...]",
        description="Run COMMAND as N ranks on this host, as the train task of a manifest does.",
        epilog="examples: ddl-run --np 2 python train.py; ddl-run --manifest manifest.yml",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--np", type=_ranks, metavar="N", help="ranks; default 1, or the manifest's")
    how.add_argument(
        "--tf-config",
        type=_tasks,
        metavar="TASKS",
        help="a process with a TF_CONFIG of its own for each task: master=1,ps=1,worker=2",
    )
    parser.add_argument(
        "--manifest",
        type=Path,
        metavar="FILE",
        help="a training's: sets DATA_DIR, RESULT_DIR, PARAM_* and the like, and says what "
        "COMMAND and N are if they are not given",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="NAME=VALUE",
        help="one of the manifest's parameters; may be given again",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="DATA_DIR, in place of the manifest's data"
    )
    parser.add_argument(
        "--tf1", action="store_true", help="a TensorFlow 1 script: `import tensorflow` gives 1.x"
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="a Chrome trace of the ranks' communication; sets DDL_TIMELINE",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser


def _training(options: argparse.Namespace) -> _Training:
    if options.manifest is not None:
        return _of_manifest(options)
    cluster: Cluster | None = options.tf_config
    size = cluster.size if cluster else options.np or 1
    return _Training(options.command, size, cluster)


def _of_manifest(options: argparse.Namespace) -> _Training:
    """What the manifest says, and the folders of one more training.

    Raises:
        DdlError: it is no manifest, its data is not here, or a parameter has no value.
    """
    # Only who gives a manifest needs what reads one.
    from ddl_airflow.core.manifest import load_manifest
    from ddl_airflow.core.manifest.sections.parameters import values_of
    from ddl_airflow.core.manifest.site import compute_table
    from ddl_airflow.core.plan import plan

    compute = compute_table(os.environ.get("AIRFLOW__DDL__COMPUTE", ""))
    manifest = load_manifest(options.manifest, compute=compute)
    beside = manifest.folder or Path()
    steps = plan(manifest, beside / options.manifest.name)
    values = values_of(manifest.parameters, dict(options.set))
    train = replace(steps.train, parameters=values)
    for name in train.secrets:
        variable = f"PARAM_{name.upper()}"
        if variable not in os.environ:
            raise SettingInvalid(f"parameter {name} is secret: set {variable} in the environment")
    python = find_python(train.python) if train.python else sys.executable
    code = steps.stage_data.code
    results = manifest.training_results_reference.place
    data = options.data
    if data is None:
        reference = manifest.training_data_reference
        data = reference.store.folder(reference.place, beside)
    if data is None:
        raise SourceMissing(
            f"{options.manifest}: the data is of type {reference.type}, which only Airflow "
            "fetches. Give a folder that has it: --data DIR"
        )
    if not data.is_dir():
        raise SourceMissing(f"the training data {data} is no folder. Give one: --data DIR")
    command = options.command or filled_in(
        train.command,
        {
            **values,
            **{"nodes": train.nodes, "launcher": train.launcher, "attempts": 1, "dry_run": False},
            **{"checkpoint": steps.transform.checkpoint, "experiment_id": steps.experiment},
        },
    )
    cluster: Cluster | None = options.tf_config
    if cluster is None and options.np is None and train.distribution == "parameter_server":
        cluster = parameter_servers(train.nodes, train.slots)
    run_id = f"by-hand-{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}"
    layout = RunLayout(
        Path.cwd() / _FOLDER,
        steps.dag_id,
        training_id(steps.dag_id, run_id, secrets.token_hex()),
        steps.experiment,
    )
    make_workspace(layout.workspace)
    for folder in (layout.checkpoints, layout.logs, layout.state):
        folder.mkdir(parents=True)
    _say(f"ddl-run: this training's folder is {layout.root.relative_to(Path.cwd())}\n")
    return _Training(
        command,
        cluster.size if cluster else options.np or manifest.world_size,
        cluster,
        {
            **of_run(layout, steps.dag_id),
            **of_script(train, {}),
            **of_training(train),
            "DATA_DIR": str(data.resolve()),
            "MODEL_DIR": str(code),
            "DDL_JOB_ID": f"{layout.training_id}/train-1",
            "DDL_SLOTS": str(train.slots),
        },
        Path() if options.command else code,
        python,
        train.distribution == "mpi",
        Road(
            layout,
            python,
            tuple(steps.transform.commands),
            steps.transform.checkpoint,
            (
                *(["evaluation"] if manifest.evaluation else []),
                *(["approval"] if manifest.approval.required else []),
                f"upload to {results.path or results.bucket}",
            ),
        ),
    )


def _run(training: _Training, options: argparse.Namespace) -> int:
    # As the session directory of mpirun: it is gone with this process, however that ends.
    records = session_directory.create(session_directory.usual_base())
    try:
        environment = {**os.environ, **training.environment, "DDL_RECORD_DIR": str(records)}
        rank = rank_argv(training.python, training.command)
        if training.cluster is not None:
            line = tasks.argv(training.cluster, rank)
        else:
            mpi = OpenMpi(find_mpirun(training.python))
            environment = {"DDL_OPTIONS": DEFAULT_OPTIONS, **environment, **mpi.environment()}
            line = session_directory.argv(mpi.argv(training.size, rank))
        environment |= confined(training.python, environment, mpi=training.cluster is None)
        if options.tf1:
            environment["DDL_TF1"] = "1"
        if options.timeline is not None:
            environment["DDL_TIMELINE"] = os.path.abspath(options.timeline)
        ended = terminal.run(line, environment, training.size, training.folder)
        several = training.cluster is None and training.size > 1
        handle = JobHandle("local", "ddl-run", 0, training.size, records, records, averages=several)
        for name, ranks in written_by_several(read_records(handle)).items():
            _say(
                f"ddl-run: {ranks} each wrote {name}, which may be damaged: save on rank 0 only "
                "(ddl.keras.CheckpointCallback).\n"
            )
        return _conclude(ended, ranks_status(handle, running=False), training, options)
    finally:
        shutil.rmtree(records, ignore_errors=True)


def _conclude(
    ended: terminal.Ended, status: JobStatus, training: _Training, options: argparse.Namespace
) -> int:
    """Says how it ended, and returns the exit code."""
    failure = status.failure
    if ended.signal == signal.SIGPIPE:
        return 128 + ended.signal  # nobody is there to be told
    if (status.state is JobState.SUCCEEDED or status.apart) and not ended.signal:
        _say(ended.said)
        # Without a manifest they need not train: a note, and not for every `ddl-run hostname`.
        by_hand = options.manifest is None and _PYTHON.fullmatch(Path(training.command[0]).name)
        if status.apart and (training.averages or by_hand):
            _say(f"ddl-run: {status.reason}\n")
        if status.apart and training.averages:
            return 1
        if training.road is not None:
            for line in summary(training.road):
                _say(f"ddl-run: {line}\n")
        return 0
    was_ended = "All ranks were ended." if training.size > 1 else ""
    if ended.left:
        was_ended = f"These did not end: {', '.join(ended.left)}."
    if ended.signal:
        by = signal.Signals(ended.signal).name
        if os.isatty(2):
            _say("\n")  # after ^C
        said, code = [f"ended by {by}.", was_ended], 128 + ended.signal
    elif failure is None:
        _say(ended.said)
        said = ["not every rank did its work, and none says why; what its launcher says is above."]
        code = ended.exit_code or 1
    else:
        said = [explained(failure, training.size), was_ended, _hint(failure, options)]
        code = failure.exit_code or 128 + signal.SIGKILL
    _say(f"ddl-run: {' '.join(filter(None, said))}\n")
    return code


def _say(text: str) -> None:
    """After what the ranks have printed, as it is."""
    with suppress(OSError):  # nobody reads it, or its disk is full: the exit code still tells
        os.write(2, text.encode("utf-8", "replace"))


def _hint(failure: RankFailure, options: argparse.Namespace) -> str:
    missing = re.search(r"KeyError\b[^']*'(\w+)'", failure.reason)
    if missing is None or options.manifest is not None:
        return ""
    name = missing[1]
    if name not in _OF_A_RUN and not name.startswith("PARAM_"):
        return ""
    return f"{name} is given to a manifest's training: ddl-run --manifest manifest.yml"


def _tasks(text: str) -> Cluster:
    try:
        return counted(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; for example master=1,ps=1,worker=2") from None


def _ranks(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; give 1 or more")
    return int(text)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE; for example epochs=3")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
