"""``ddl-run``: start N ranks by hand, as the train task does.

    ddl-run --np 2 python train.py --epochs 3
    ddl-run --manifest manifest.yml --set epochs=3
    ddl-run --tf-config master=1,ps=1,worker=2 python train.py
    ddl-run --hosts gpu1:2,gpu2:2 python train.py

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

The fourth line starts ranks on hosts that ssh reaches, and which have the current folder. With
``--min-np N`` ranks that are lost start again, on the hosts that are left.
"""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NoReturn

from ddl_airflow.core.cluster import Cluster, counted, parameter_servers
from ddl_airflow.core.environment import DEFAULT_OPTIONS, of_run, of_script, of_training
from ddl_airflow.core.errors import DdlError, SettingInvalid, SourceMissing, SubmitFailed
from ddl_airflow.core.hosts import Host, parse_host, parse_hostfile
from ddl_airflow.core.job import JobHandle, JobState, JobStatus, RankFailure
from ddl_airflow.core.layout import BY_HAND, RunLayout, make_workspace, training_id
from ddl_airflow.core.output import (
    EndedBySignal,
    ended_by_its_reader,
    ended_by_its_signal,
    handling,
)
from ddl_airflow.core.parameters import filled_in
from ddl_airflow.launchers import session_directory, tasks, terminal
from ddl_airflow.launchers.elastic import Bounds, Pool, commit_folder, discovered
from ddl_airflow.launchers.local import rank_argv
from ddl_airflow.launchers.loopback import confined
from ddl_airflow.launchers.mpirun import OpenMpi, find_mpirun, find_python
from ddl_airflow.launchers.named_hosts import RECORDS_PREFIX, NamedHosts, ailing, filled, is_here
from ddl_airflow.launchers.records import (
    explained,
    hidden_exception,
    is_consequence,
    ranks_status,
    read_records,
    written_by_several,
)
from ddl_airflow.launchers.remote import Ssh
from ddl_airflow.summary import Road, summary

_PYTHON = re.compile(r"python[0-9.]*")
# Starts in a row after which no other follows: that have committed nothing; and, without
# --reset-limit, that have failed in the same way, whatever they committed.
_MOST_IDLE = 3
_MOST_ALIKE = 3
# In a shell that a scheduler has given several nodes to, mpirun would take these. Source: PRRTE's
# frameworks plm and ras.
_ON_THIS_HOST = {"PRTE_MCA_plm": "^slurm", "PRTE_MCA_ras": "^slurm,pbs"}
# What only the train task, or a manifest, sets. Source: ddl_airflow.core.environment.
_OF_A_RUN = frozenset(
    """
    DATA_DIR RESULT_DIR MODEL_DIR CHECKPOINT_DIR LOG_DIR JOB_STATE_DIR TRAINING_ID JOB_NAME
    EXPERIMENT_ID EXPERIMENT_DIR GPU_COUNT DLAAS_JOB_ID
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
        slots: ranks of each host, where others than this one are named; empty: all run here.
        looked_at: whether those hosts are known to be well.
    """

    command: str | Sequence[str]
    size: int
    cluster: Cluster | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path = Path()
    python: str = field(default_factory=lambda: sys.executable)
    averages: bool = False
    road: Road | None = None
    slots: Mapping[str, int] = field(default_factory=dict)
    looked_at: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ranks. Returns the exit code of the one that failed first, 0 if none did.

    Where a signal has ended it, and ``argv`` is this process's own, so does this process end.
    """
    terminal.open_standard_streams()
    return ended_by_its_signal(
        lambda: ended_by_its_reader(lambda: _called(argv)), alone=argv is None
    )


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
    named = options.hosts or options.hostfile or options.host_discovery_script
    if named and (options.manifest is not None or options.tf_config is not None):
        parser.error("--hosts: a manifest names its hosts in launcher, and those of --tf-config")
    elastic = options.min_np is not None or options.host_discovery_script is not None
    if elastic and (options.manifest is not None or options.tf_config is not None):
        parser.error("--min-np: a manifest has retries, and launcher.min_nodes over ssh")
    files = terminal.OutputFiles(options.output_dir) if options.output_dir else None
    try:
        if elastic:
            return _run_elastic(options, files)
        training = _training(options)
        if options.timeline is not None and training.cluster is not None:
            parser.error("--timeline records MPI's ranks; there are none with TF_CONFIG")
        return _conclude(*_run(training, options, files), training, options)
    except DdlError as error:
        parser.exit(2, f"ddl-run: {error}\n")
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        parser.exit(1, f"ddl-run: {place}{error.strerror}\n")
    except KeyboardInterrupt:  # while no ranks run
        line = "\n" if os.isatty(2) else ""  # after ^C
        _say(f"{line}ddl-run: ended by SIGINT.\n")
        raise EndedBySignal(signal.SIGINT) from None
    finally:
        if files is not None:
            files.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ddl-run",
        usage="ddl-run [--np N | --tf-config TASKS] [--manifest FILE [--set NAME=VALUE] "
        "[--data DIR]] [--hosts HOSTS] [--min-np N] [--tf1] [--timeline FILE] [COMMAND ...]",
        description="Run COMMAND as N ranks, on this host unless others are named, as the train "
        "task of a manifest does.",
        allow_abbrev=False,  # else a flag of COMMAND's that begins like several of ours fails
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
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="hosts that ssh reaches, with the ranks that each takes, in the current folder there",
    )
    where.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help="lines of HOST slots=SLOTS, in place of --hosts",
    )
    parser.add_argument(
        "--network",
        default="",
        metavar="NETWORKS",
        help="interfaces or networks for what ranks send each other; by default all",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="what each rank prints, in rank.N/stdout and stderr of DIR as well",
    )
    where.add_argument(
        "--host-discovery-script",
        metavar="COMMAND",
        help="a command that prints lines of HOST:SLOTS, in place of --hosts; asked again while "
        "ranks run",
    )
    elastic = parser.add_argument_group(
        "elastic training", "where ranks are lost they start again, from what was committed"
    )
    elastic.add_argument(
        "--min-np", type=_ranks, metavar="N", help="start again on the hosts that are left for N"
    )
    elastic.add_argument("--max-np", type=_ranks, metavar="N", help="at most; default: --np")
    elastic.add_argument(
        "--reset-limit",
        type=_whole,
        metavar="TIMES",
        help="at most so many restarts; default: while progress is made, and until the "
        "same is raised at the same place in three starts in a row",
    )
    elastic.add_argument(
        "--elastic-timeout", type=_whole, default=600, metavar="S", help="wait for hosts; 600"
    )
    elastic.add_argument(
        "--blacklist-cooldown-range",
        type=_whole,
        nargs=2,
        metavar=("S", "S"),
        help="how long a host is left out on which a rank has failed, at first and at most",
    )
    elastic.add_argument(
        "--slots-per-host", type=_ranks, default=1, metavar="N", help="where the script names none"
    )
    parser.add_argument("--ssh-port", type=int, metavar="PORT", help="of all hosts")
    parser.add_argument("--ssh-identity-file", metavar="FILE", help="the key for all hosts")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    return parser


def _training(options: argparse.Namespace) -> _Training:
    if options.manifest is not None:
        return _of_manifest(options)
    if hosts := _hosts(options):
        slots = filled(hosts, options.np)
        if not all(map(is_here, slots)):
            return _Training(options.command, sum(slots.values()), slots=slots)
        return _Training(options.command, sum(slots.values()))
    cluster: Cluster | None = options.tf_config
    size = cluster.size if cluster else options.np or 1
    return _Training(options.command, size, cluster)


def _hosts(options: argparse.Namespace) -> Sequence[Host]:
    """Those that are named. Raises SettingInvalid for what names none, or cannot be read."""
    try:
        if options.hostfile is not None:
            return parse_hostfile(options.hostfile.read_text("utf-8-sig"), str(options.hostfile))
        return [parse_host(one) for one in options.hosts.split(",")] if options.hosts else []
    except UnicodeDecodeError:
        raise SettingInvalid(f"{options.hostfile} is no text.") from None
    except ValueError as error:
        raise SettingInvalid(f"{error}.") from None


def _of_manifest(options: argparse.Namespace) -> _Training:
    """What the manifest says, and the folders of one more training.

    Raises:
        DdlError: it is no manifest, its data is not here, or a parameter has no value.
    """
    # Only who gives a manifest needs what reads one.
    from ddl_airflow.core.manifest.load import load_manifest
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
                f"{options.manifest}: the data is of type {reference.type}, which ddl-run does not "
                "fetch. Use `ddl-airflow run`, or give a folder that has it: --data DIR"
            )
        if staged := [one for one in ("unpack", "include", "exclude") if getattr(reference, one)]:
            raise SettingInvalid(
                f"{options.manifest}: ddl-run reads data in place, without "
                f"training_data_reference.{staged[0]}. Use `ddl-airflow run`, or give a folder "
                "that has it as it is staged: --data DIR"
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
        Path.cwd() / BY_HAND,
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


def _ssh(options: argparse.Namespace) -> Ssh:
    more = ["-p", str(options.ssh_port)] if options.ssh_port else []
    if key := options.ssh_identity_file:
        if len(key.split()) != 1:  # mpirun takes its options apart at spaces
            raise SettingInvalid(f"--ssh-identity-file: {key!r} has a space in it.")
        more += ["-i", os.path.abspath(key)]
    return Ssh(more=more)


def _run_on_hosts(
    training: _Training,
    options: argparse.Namespace,
    files: terminal.OutputFiles | None,
    asks: Callable[[], bool],
) -> tuple[terminal.Ended, JobStatus]:
    """As _run, on hosts that ssh reaches."""
    base = session_directory.usual_base()
    with session_directory.created(base, RECORDS_PREFIX) as records:
        hosts = NamedHosts(training.slots, Path.cwd(), records, options.network, _ssh(options))
        if training.looked_at:
            hosts.make_room()
        else:
            hosts.look()
        own = {**os.environ, **training.environment}
        environment = hosts.environment({"DDL_OPTIONS": DEFAULT_OPTIONS, **own})
        environment |= _asked(options)
        argv = hosts.argv(rank_argv(training.python, training.command), environment)
        try:
            line = session_directory.argv(argv)
            ended = terminal.run(
                line, environment, training.size, Path(), relayed=True, files=files, asks=asks
            )
        finally:
            # No signal ends this process, nor what it starts meanwhile; but SIGKILL.
            with handling(terminal.ending_signals(), signal.SIG_IGN):
                silent = hosts.finish()
        ended = replace(ended, left=(*ended.left, *hosts.left))
        status = _status(training, records)
        failed = status.failure is not None and not is_consequence(status.failure)
        if silent and not failed and status.state is not JobState.SUCCEEDED:
            why = " ".join(f"{host}: {why.rstrip('.')}." for host, why in silent.items())
            status = JobStatus(JobState.LOST, reason=f"A host is gone. {why}")
        return ended, status


def _asked(options: argparse.Namespace) -> dict[str, str]:
    """What options say to the ranks."""
    said = {"DDL_TF1": "1"} if options.tf1 else {}
    if options.timeline is not None:
        said["DDL_TIMELINE"] = os.path.abspath(options.timeline)
    return said


def _never() -> bool:
    return False


def _run(
    training: _Training,
    options: argparse.Namespace,
    files: terminal.OutputFiles | None,
    asks: Callable[[], bool] = _never,
) -> tuple[terminal.Ended, JobStatus]:
    """Runs the ranks once, to their end.

    Args:
        training: what runs.
        options: of the command.
        files: what the ranks print goes there as well.
        asks: whether they are to be asked to make room.
    """
    if training.slots:
        return _run_on_hosts(training, options, files, asks)
    # As the session directory of mpirun: it is gone with this process, however that ends.
    with session_directory.created(session_directory.usual_base()) as records:
        environment = {**os.environ, **training.environment, "DDL_RECORD_DIR": str(records)}
        rank = rank_argv(training.python, training.command)
        if training.cluster is not None:
            line = tasks.argv(training.cluster, rank, sys.executable)
        else:
            mpi = OpenMpi(find_mpirun(training.python))
            usual = {"DDL_OPTIONS": DEFAULT_OPTIONS, **_ON_THIS_HOST}
            environment = {**usual, **environment, **mpi.environment()}
            line = session_directory.argv(mpi.argv(training.size, rank))
        environment |= confined(training.python, environment, mpi=training.cluster is None)
        environment |= _asked(options)
        ended = terminal.run(
            line, environment, training.size, training.folder, files=files, asks=asks
        )
        return ended, _status(training, records)


def _run_elastic(options: argparse.Namespace, files: terminal.OutputFiles | None) -> int:
    """As _run, again and again where ranks are lost; returns the exit code of the last start."""
    bounds, find, ssh = _bounds(options), _find_hosts(options), _ssh(options)
    between_starts = set(terminal.ending_signals()) - {signal.SIGINT}
    with (
        handling(between_starts, _end_by),
        commit_folder(Path.cwd() / BY_HAND, _say_line) as commits,
        tempfile.NamedTemporaryFile(prefix=".hosts-", dir=commits.folder) as marker,
    ):
        look = partial(ailing, ssh, shared=Path(marker.name))
        pool = Pool(bounds, find, look, _say_line)
        starts = 0  # after the first
        idle = missed = 0  # in a row
        alike, last = 0, ""  # in a row
        while True:
            slots = pool.choose()
            size = sum(slots.values())
            if starts or bounds.least != size:
                _say_line(f"{_counted(size)} on {', '.join(map(_of_slots, slots.items()))}.")
            before = commits.state()
            training = _Training(
                options.command,
                size,
                environment=commits.environment,
                slots={} if all(map(is_here, slots)) else slots,
                looked_at=True,
            )
            watched = pool.watched() if options.host_discovery_script else nullcontext(_never)
            try:
                with watched as changed:
                    ended, status = _run(training, options, files, changed)
                    moved = changed() and status.state is JobState.PREEMPTED
            except SubmitFailed as error:  # as of a host that has gone since it was looked at
                missed += 1
                if not error.retryable or missed >= _MOST_IDLE:
                    raise
                _say_line(f"{str(error).rstrip('.')}. The hosts are looked at again.")
                continue
            missed = 0
            idle = 0 if commits.state() - before else idle + 1
            by_itself = _by_itself(status)
            alike = (alike + 1 if by_itself == last else 1) if by_itself else 0
            last, why_not = by_itself, ""
            if status.state is JobState.SUCCEEDED or status.apart or ended.signal:
                commits.done = not ended.signal
            elif _permanent(status):
                why_not = "It would end in the same way again."
            elif bounds.resets is not None and starts >= bounds.resets:
                why_not = f"It has started again as often as --reset-limit {bounds.resets} allows."
            elif idle >= _MOST_IDLE:
                why_not = f"{idle} starts in a row have committed nothing."
            elif bounds.resets is None and alike >= _MOST_ALIKE:
                why_not = (
                    f"{alike} starts in a row have failed in this way, which only --reset-limit "
                    "TIMES allows."
                )
            else:
                starts += 1
                if status.failure is not None and not is_consequence(status.failure):
                    pool.failed_on(status.failure.rank)
                why = f"{_why_again(status, size, moved)}{_not_ended(ended)}"
                _say_line(f"{why} Starts again ({starts}).")
                continue
            code = _conclude(ended, status, training, options)
            if why_not:
                _say_line(f"{why_not} Not started again.")
            return code


def _end_by(number: int, _frame: object) -> NoReturn:
    raise EndedBySignal(number)


def _not_ended(ended: terminal.Ended) -> str:
    return f" These did not end: {', '.join(ended.left)}." if ended.left else ""


def _why_again(status: JobStatus, size: int, moved: bool) -> str:
    if moved:
        return "Hosts have come or gone; all ranks have committed."
    if status.failure is not None:
        return explained(status.failure, size)
    return f"{(status.reason or 'not every rank did its work').rstrip('.')}."


def _by_itself(status: JobStatus) -> str:
    """What a rank has raised by itself, and where, not what ended another; else empty."""
    failure = status.failure
    if failure is None or not failure.exception or is_consequence(failure):
        return ""
    return failure.reason


def _permanent(status: JobStatus) -> bool:
    return status.permanent or (status.failure is not None and status.failure.permanent)


def _of_slots(host: tuple[str, int]) -> str:
    return f"{host[0]}:{host[1]}"


def _counted(number: int) -> str:
    """So many ranks, in words."""
    return "1 rank" if number == 1 else f"{number} ranks"


def _say_line(sentence: str) -> None:
    _say(f"ddl-run: {sentence}\n")


def _find_hosts(options: argparse.Namespace) -> Callable[[], Sequence[Host]]:
    """What tells the hosts of an elastic job, at each start. Raises as _hosts, and SubmitFailed."""
    if script := options.host_discovery_script:
        return partial(discovered, script, options.slots_per_host)
    hosts = _hosts(options) or [Host("localhost", options.np or options.max_np or options.min_np)]
    filled(hosts, options.np or options.min_np)
    return lambda: hosts


def _bounds(options: argparse.Namespace) -> Bounds:
    """Raises SettingInvalid if they exclude each other."""
    least = options.min_np or options.np or 1
    most = options.max_np or options.np
    for name, other in (("--np", options.np), ("--max-np", options.max_np)):
        if other is not None and other < least:
            raise SettingInvalid(f"--min-np {least} is more than {name} {other}.")
    if options.np is not None and most < options.np:
        raise SettingInvalid(f"--np {options.np} is more than --max-np {most}.")
    cooldown = options.blacklist_cooldown_range
    return Bounds(
        least,
        most,
        options.reset_limit,
        options.elastic_timeout,
        (cooldown[0], cooldown[1]) if cooldown else None,
    )


def _status(training: _Training, records: Path) -> JobStatus:
    """What the ranks have recorded; says what they have written together, and what is hidden."""
    several = training.cluster is None and training.size > 1
    handle = JobHandle("local", "ddl-run", 0, training.size, records, records, averages=several)
    records_of = read_records(handle)
    for name, ranks in written_by_several(records_of).items():
        _say(
            f"ddl-run: {ranks} each wrote {name}, which may be damaged: save on rank 0 only "
            "(ddl.keras.CheckpointCallback).\n"
        )
    status = ranks_status(handle, running=False)
    succeeded = status.state is JobState.SUCCEEDED or status.apart
    if succeeded and (hidden := hidden_exception(records_of)) is not None:
        _say(
            f"ddl-run: {explained(hidden, training.size)} Its command ended with exit code 0 all "
            "the same: where a pipe is why, `set -o pipefail` in bash shows it.\n"
        )
    return status


def _conclude(
    ended: terminal.Ended, status: JobStatus, training: _Training, options: argparse.Namespace
) -> int:
    """Says how it ended, and returns the exit code. Raises EndedBySignal if that ended it."""
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
        was_ended = _not_ended(ended).strip()
    if ended.signal:
        by = signal.Signals(ended.signal).name
        if os.isatty(2):
            _say("\n")  # after ^C
        said, code = [f"ended by {by}.", was_ended], 0
    elif failure is None:
        _say(ended.said)
        gone = status.reason if training.slots or status.state is JobState.PREEMPTED else ""
        said = [
            gone
            or "not every rank did its work, and none says why; what its launcher says is above."
        ]
        code = ended.exit_code or 1
    else:
        said = [explained(failure, training.size), was_ended, _hint(failure, options)]
        code = failure.exit_code or 128 + signal.SIGKILL
    _say(f"ddl-run: {' '.join(filter(None, said))}\n")
    if ended.signal:
        raise EndedBySignal(ended.signal)
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


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; give 0 or more")
    return int(text)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE; for example epochs=3")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
