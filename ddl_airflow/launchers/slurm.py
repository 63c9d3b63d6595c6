"""Ranks on the nodes of a Slurm cluster: one batch job that runs mpirun inside its allocation.

What must be so: ``sbatch``, ``scontrol``, ``squeue`` and ``scancel`` are where tasks and triggerer
run; and the workspace, the ranks' Python and the scripts have the same paths on all nodes.

Slurm is asked by the commands that every version has. It forgets an ended job after MinJobAge
(300 s by default): then the accounting says why it ended, where there is one, and how the ranks
ended is on disk all the same. Nothing is ever requeued: that would be a second layer of retries,
under the same number.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

from ddl_airflow.core.environment import DEFAULT_OPTIONS
from ddl_airflow.core.errors import LaunchError, SubmitFailed
from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus, Submission
from ddl_airflow.launchers import job_preflight, run_as
from ddl_airflow.launchers.base import Told
from ddl_airflow.launchers.local import make_folders, on_nodes, rank_environment, share_lock
from ddl_airflow.launchers.mpirun import OpenMpi
from ddl_airflow.launchers.records import is_consequence, ranks_status, run_folder

_log = logging.getLogger(__name__)

# The commands give up by themselves well before, also where the controller is away (18 s).
_TIMEOUT_S = 60.0
# But for sbatch, which asks again for two minutes where the controller can take no job now.
_SUBMIT_S = 180.0
# So long after sbatch has ended a busy controller may still take what it was asked for.
_TAKEN_LATE_S = 60.0
# Accounting is only asked why jobs ended; that they did is known.
_ACCOUNTING_S = 10.0
# Of squeue, for each job. A reason, a name or a path may have anything in it, but for the two
# characters that ASCII has to stand between fields, and behind records.
_FIELD_ENDS, _RECORD_ENDS = "\x1f", "\x1e"
_FIELDS = {
    "JobId": "%i",
    "JobState": "%T",
    "Reason": "%r",
    "NodeList": "%N",
    "SubmitTime": "%V",
    "StartTime": "%S",
    "RunTime": "%M",
    "Partition": "%P",
    "NumNodes": "%D",
    "NumCPUs": "%C",
    "JobName": "%j",
    "WorkDir": "%Z",
}
# Of sacct.
_ACCOUNTED = ("JobIDRaw", "State", "WorkDir", "JobName")
# Of sbatch's words in an error: so many lines, and characters in each.
_MOST_LINES, _LONGEST = 8, 300
# For so long it is looked at where its ranks are.
_EARLY_S = 600.0
_NO_SUCH_JOB = "Invalid job id specified"
# Of this host, not of the nodes; Slurm sets there what it has given to the job.
_NOT_THERE = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "TMPDIR")

# Slurm tells the steps of a job that it is to make room, by SIGTERM, and neither the batch script
# nor mpirun in it: a step of ours passes that on. Open MPI starts its daemons on the other nodes as
# a step, which are told as well and would end their ranks at once: SIGTERM is blocked for them.
_TOLD = (
    "export PRTE_MCA_prte_launch_agent='{python} -m ddl_ops.slurm_step prted'",
    '[ -z "$SLURMD_NODENAME" ] || srun --overlap --nodes=1 --ntasks=1 '
    '--nodelist="$SLURMD_NODENAME" --mpi=none {python} -m ddl_ops.slurm_step --tell $$ {note} &',
)

# In the folder of the ranks' records: Slurm has told the job, by SIGTERM to its steps.
MAKE_ROOM = "make-room"

# Job states, squeue(1). Unknown ones count as running: a job is only ended if Slurm says so.
_PENDING = frozenset(
    ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")
)
# As usual; of a job in another state, such as SUSPENDED, that is said.
_RUNS = frozenset(("RUNNING", "COMPLETING"))
# What the end of a job means that its ranks know nothing of.
_ENDINGS = {
    "BOOT_FAIL": "a node did not boot",
    "CANCELLED": "somebody cancelled it, with scancel or the like",
    "DEADLINE": "it could not end before its deadline",
    "NODE_FAIL": "a node failed",
    "OUT_OF_MEMORY": "it used more memory than it had asked for. Ask for more, for example "
    "launcher.options: [--mem=16G]",
    "PREEMPTED": "it had to make room for another job",
    "REVOKED": "it was moved to another cluster",
    "TIMEOUT": "it took longer than its time limit. Raise launcher.time_limit; or let it be "
    "tried again, if the script goes on from its checkpoints",
}
# Ends of a job for which its ranks were asked to end as well, by a person or a limit.
_NO_ROOM_MADE = frozenset(("BOOT_FAIL", "CANCELLED", "DEADLINE", "NODE_FAIL", "TIMEOUT"))
_ENDED = frozenset(("COMPLETED", "FAILED", *_ENDINGS))
_BY_SLURM = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
# Reasons of pending jobs that waiting does not mend; Slurm accepts such a job all the same, unless
# EnforcePartLimits is set.
_NEVER = {
    "PartitionTimeLimit": "launcher.time_limit is longer than the partition allows",
    "BadConstraints": "no node is what launcher.options ask for",
    "InvalidAccount": "the account may not be used. Choose another launcher.account",
    "AccountNotAllowed": "the partition is not for this account. Choose another launcher.account "
    "or launcher.partition",
    "InvalidQOS": "the QOS may not be used. Correct launcher.options",
    "QOSNotAllowed": "the partition is not for this QOS. Correct launcher.options",
    "DependencyNeverSatisfied": "what it depends on has failed",
    "ReservationDeleted": "its reservation is gone. Correct launcher.options",
}
# The same for what one job may have of an account or a QOS, such as QOSMaxWallDurationPerJobLimit.
# Limits of what a user or an account may have at a time pass.
_NEVER_A_JOB = re.compile(r"(?:Assoc|QOS)Max(?!.*Minutes)\w+PerJob(?:Limit)?")
_TOO_MUCH_FOR_A_JOB = (
    "one job may not have so much. Lower nodes, launcher.slots or launcher.time_limit, or correct "
    "launcher.options; `sacctmgr show qos` and `sacctmgr show assoc` list what is allowed"
)
# Those of a partition: of a job for several, Slurm gives the reason of the one it looked at last.
_OF_PARTITION = frozenset(("PartitionTimeLimit", "AccountNotAllowed", "QOSNotAllowed"))
# Reasons that may also mean nodes which are down now; then the partition's size decides.
_TOO_MUCH = frozenset(("PartitionConfig", "PartitionNodeLimit"))
# How sbatch ends with what the controller said, and those of the texts that are sbatch's own, of a
# controller that did not answer. Source: slurm/slurm_errno.h
_WHY_REFUSED = re.compile(r"Batch job submission failed: (.*)")
_NO_ANSWER = re.compile(
    r"contact|communicat|connect|timed out|temporarily|unavailable|bytes were transmitted|"
    r"unexpected message|input/output",
    re.IGNORECASE,
)
# What sbatch says when the same job would be refused again, and what to change. It says nothing
# else, and exits with 1 whatever it is. Source: slurm/slurm_errno.h; the texts are Slurm's own.
_REFUSALS = {
    "invalid partition": "Choose another launcher.partition; `sinfo` lists them.",
    "invalid account": "Choose another launcher.account.",
    "requested time limit": "Lower launcher.time_limit.",
    "invalid --time": "Correct launcher.time_limit.",
    "node configuration is not available": "Lower nodes or launcher.slots, or choose another "
    "launcher.partition.",
    "node count": "Lower nodes, or choose another launcher.partition.",
    "more processors requested": "Lower launcher.slots.",
    "invalid generic resource": "The cluster knows no GPUs (gres/gpu). Choose a cpu for "
    "compute_configuration.name, or another cluster.",
    "group not permitted": "Choose another launcher.partition, or ask for access.",
    "access/permission denied": "Ask the cluster's administrators for access.",
    "invalid qos": "Correct launcher.options.",
    "invalid feature": "Correct launcher.options.",
    "reservation is invalid": "Correct launcher.options.",
    "unrecognized option": "Correct launcher.options.",
    "ambiguous": "Correct launcher.options.",
    "requires an argument": "Correct launcher.options.",
    "invalid --": "Correct launcher.options.",
    "invalid numeric": "Correct launcher.options.",
}


class SlurmLauncher:
    """See ``ddl_airflow.launchers.base.Scheduler``. Keeps nothing: any instance knows any job.

    Args:
        partition, account: where the job queues, and who pays; empty for the user's default.
        time_limit_s: seconds after which Slurm ends the job, in whole minutes upwards; None for
            the partition's default.
        options: further options of sbatch, each ``--name`` or ``--name=value``.
        preflight: whether the nodes are looked at before ranks start, where there are several.
    """

    kind = "slurm"

    def __init__(
        self,
        partition: str = "",
        account: str = "",
        time_limit_s: float | None = None,
        options: Sequence[str] = (),
        preflight: bool = True,
    ) -> None:
        self._partition = partition
        self._account = account
        self._time_limit_s = time_limit_s
        self._options = tuple(options)
        self._preflight = preflight

    def render(self, job: JobSpec) -> Submission:
        """``sbatch``, and the script that it reads. Only names of files are in it, and the command.

        mpirun is the one beside the ranks' Python, else the one that the node's PATH has. It is
        told how many ranks each node runs, so an mpirun that does not see the allocation fails
        instead of starting all ranks on one node.
        """
        mpi = OpenMpi("mpirun")
        env = {**mpi.environment(), **rank_environment(job)}
        if job.cluster is None:
            env.setdefault("DDL_OPTIONS", DEFAULT_OPTIONS)
        for name in _NOT_THERE:
            env.pop(name, None)
        argv = on_nodes(mpi, job, job.python)
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in self._asked_for(job))]
        if os.path.isabs(job.python):
            lines.append(f'export PATH={shlex.quote(str(Path(job.python).parent))}:"$PATH"')
        lines.append(f"cd -- {shlex.quote(str(job.folder))} || exit")
        if job.lock is not None:
            # Not by the shell, whose >> follows a link that a training has put there.
            keep = ["--keep", *map(str, job.keep)] if job.keep else []
            locked = [job.python, "-m", "ddl_ops.locked", *keep, str(job.lock), job.job_id, "--"]
            argv = [*locked, *argv]
        if self._preflight and job.nodes > 1:
            argv = [*job_preflight.words(job.python, job.record_dir, job.slots), *argv]
        python = Path(job.python).name if os.path.isabs(job.python) else job.python
        note = shlex.quote(str(job.record_dir / MAKE_ROOM))
        lines += [line.format(python=shlex.quote(python), note=note) for line in _TOLD]
        lines.append(f"exec {shlex.join(argv)}")
        script = "\n".join(lines) + "\n"
        return Submission(job, ("sbatch", "--parsable", "--no-requeue"), env, script)

    def _asked_for(self, job: JobSpec) -> list[str]:
        output = str(job.log_dir / "launcher.log").replace("%", "%%")  # else a pattern
        options = {
            "job-name": job.job_id,
            "nodes": job.nodes,
            "ntasks-per-node": job.slots,
            "gres": f"gpu:{job.slots}" if job.gpu else "",
            "partition": self._partition,
            "account": self._account,
            "time": math.ceil(self._time_limit_s / 60) if self._time_limit_s else "",
            # Which is this job's alone: it tells it from others, whatever somebody calls it.
            "chdir": job.record_dir,
            "output": output,
            "open-mode": "append",
            "begin": f"now+{math.ceil(job.delay_s)}" if job.delay_s else "",
        }
        asked = [f"--{name}={value}" for name, value in options.items() if value != ""]
        return [_quoted(option) for option in (*asked, *self._options)]

    def expected(self, job: JobSpec) -> JobHandle:
        """Its name at Slurm is the ``job_id``."""
        return replace(job.handle(self.kind, 0, job.nodes), submit_s=_SUBMIT_S + _TAKEN_LATE_S)

    def submit(self, submission: Submission) -> JobHandle:
        """Puts the job into Slurm's queue. The environment travels with it, and is in no file.

        sbatch ends with this process, or by itself: the next try looks for the job that it may
        have submitted, and not for ever.

        Raises:
            SubmitFailed: Slurm refuses it, cannot be reached, or is not installed.
            LaunchError: it gave no answer.
        """
        job = submission.job
        make_folders(job)
        share_lock(job)
        try:
            said = _slurm(
                submission.argv, submission.script, submission.env, job.user, _SUBMIT_S, bound=True
            )
            if said.returncode:
                raise _refused(said.stderr)
            number, cluster = _submitted(said.stdout)
        except LaunchError as error:
            # Slurm may have taken the job though its answer came too late, or not at all: nobody
            # would look after it.
            with suppress(LaunchError):
                if error.retryable and (taken := self.find(self.expected(job))).number:
                    return taken
            raise
        for line in _said_lines(said.stderr):  # a warning, or what a site's plug-in says
            _log.info("sbatch: %s", line[:_LONGEST])
        if cluster:  # which need not be the one that is asked here
            return replace(self.expected(job), number=number, place=cluster)
        return _found(self.expected(job), number)

    def find(self, handle: JobHandle) -> JobHandle:
        """Asks for the job by its name, if its number is not known. The newest one of that name.

        Else for one that works in the folder of its records: it may have another name by now.

        Raises:
            LaunchError: Slurm does not answer.
        """
        if handle.number:
            return handle
        # Also in partitions that are hidden from who asks for no job by its number.
        mine = ["--me", "--all"]
        jobs = list(_queue([*mine, f"--name={handle.job_id}"], handle.user))
        if not jobs:
            told = _queue(mine, handle.user, skip=True)
            place = str(handle.record_dir)
            jobs = [number for number, one in told.items() if one["WorkDir"] == place]
        return _found(handle, max(jobs)) if jobs else handle

    def ask(self, handles: Sequence[JobHandle]) -> list[Told]:
        """One ``squeue`` for all; one ``sacct`` for those that the controller has forgotten.

        For each user whose jobs there are among them.

        Raises:
            LaunchError: Slurm does not answer, what it says cannot be read, or it is another
                cluster. The jobs may run on.
        """
        found = [self.find(handle) for handle in handles]
        known: dict[int, dict[str, str]] = {}
        for user in dict.fromkeys(handle.user for handle in found):
            numbers = [h.number for h in found if h.number and h.user == user]
            known |= _queue_of(numbers, user)
            if gone := [number for number in numbers if number not in known]:
                known |= _accounted(gone, user)
        unknown = [h for h in found if h.number and not _is(known.get(h.number, {}), h)]
        _check_cluster(unknown)
        partitions: dict[str, dict[str, str]] = {}
        told = [known.get(handle.number, {}) for handle in found]
        for handle, one in zip(found, told, strict=True):
            name = one.get("Partition", "")
            sized = one.get("Reason") in _TOO_MUCH and not _is_several(name)
            if sized and name not in partitions:
                partitions[name] = _partition(name, handle.user)
        return [
            _with_partition(one, partitions) if _is(one, handle) else {}
            for handle, one in zip(found, told, strict=True)
        ]

    def conclude(self, handle: JobHandle, told: Told) -> JobStatus:
        """What Slurm says while it lives; then what the ranks' records say."""
        state = told.get("JobState", "")
        if not told or state in _ENDED:
            return _ended(handle, state, told.get("Reason", ""))
        if state not in _PENDING:
            # What mpirun makes of the allocation shows soon; reading all records takes its time.
            if _running_s(told) < _EARLY_S and (early := ranks_status(handle, running=True)).ended:
                return early
            return JobStatus(JobState.RUNNING, reason=_where(told))
        reason = told.get("Reason", "None")
        too_much = _too_much(told) if reason in _TOO_MUCH else ""
        one_of_several = reason in _OF_PARTITION and _is_several(told.get("Partition", ""))
        if _NEVER_A_JOB.fullmatch(reason):
            too_much = _TOO_MUCH_FOR_A_JOB
        if (never := _NEVER.get(reason) or too_much) and not one_of_several:
            why = f"Slurm will never start job {told['JobId']} ({reason}): {never}."
            return JobStatus(JobState.FAILED, reason=why, permanent=True)
        return JobStatus(JobState.PENDING, reason=f"in Slurm's queue ({reason})")

    def status(self, handle: JobHandle) -> JobStatus:
        """As ``ask`` and ``conclude`` say. Waits for Slurm's answer.

        Raises:
            LaunchError: Slurm does not answer. The job may run on.
        """
        return self.conclude(handle, self.ask([handle])[0])

    def cancel(self, handle: JobHandle, grace_s: float = 0.0) -> None:
        """Has Slurm end the job: SIGTERM, and SIGKILL after the cluster's own KillWait.

        Does not wait for it, so the grace is Slurm's. Nothing for a job that has ended.

        Raises:
            LaunchError: Slurm does not answer, what it says cannot be read, or it is another
                cluster.
        """
        handle = self.find(handle)
        if not handle.number:
            return
        known = _queue_of([handle.number], handle.user).get(handle.number, {})
        if _is(known, handle):
            _answered(["scancel", str(handle.number)], handle.user)
        else:
            _check_cluster([handle])

    def log(self, handle: JobHandle, rank: int) -> Path:
        """The rank's own file."""
        return handle.log_dir / f"rank-{rank}.log"


def _quoted(option: str) -> str:
    # sbatch splits these lines at spaces, and knows quotes and backslashes.
    if not re.search(r"[\s\"'\\#]", option):
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _ended(handle: JobHandle, state: str, reason: str) -> JobStatus:
    status = ranks_status(handle, running=False)
    failure = status.failure
    # What a rank did by itself says more than that Slurm then ended the rest. A signal is Slurm's:
    # a script may have ended by it before its shim had heard of it.
    known = status.state is JobState.SUCCEEDED or status.apart
    by_itself = failure is not None and failure.exit_code not in (None, *_BY_SLURM)
    if known or (status.state is JobState.PREEMPTED and state not in _NO_ROOM_MADE):
        return status
    # Ranks that did not listen, or not yet, ended within the grace: then Slurm says COMPLETED.
    told = state in ("COMPLETED", "FAILED") and (handle.record_dir / MAKE_ROOM).exists()
    for_it = failure is None or not by_itself or is_consequence(failure)
    if state == "PREEMPTED" or (told and for_it):
        why = f"Slurm ended job {handle.number} (PREEMPTED): {_ENDINGS['PREEMPTED']}."
        return JobStatus(JobState.PREEMPTED, reason=why)
    # Where Slurm ended the job, a code alone may be the script's answer to its signal.
    says_why = state not in _ENDINGS or (by_itself and failure and failure.exception)
    if failure and failure.exit_code and says_why:
        return status
    if state in _ENDINGS:
        why = f"Slurm ended job {handle.number} ({state}): {_ENDINGS[state]}."
        return JobStatus(JobState.LOST, reason=why)
    if reason == "JobLaunchFailure":
        why = (
            f"Slurm could not start the script of job {handle.number} on a node. Is "
            f"{handle.log_dir} there too? The workspace must be a file system that all nodes share."
        )
        return JobStatus(JobState.LOST, reason=why)
    return status


def _too_much(told: Told) -> str:
    """Why the partition could not run the job even if it were empty; nothing if it could."""
    name = told["Partition"]
    limits = (
        ("NumNodes", "nodes", "TotalNodes", "has"),
        ("NumNodes", "nodes", "MaxNodes", "allows"),
        ("NumCPUs", "cores", "TotalCPUs", "has"),
    )
    for asked, unit, limit, verb in limits:
        wanted, most = told.get(asked, "0").partition("-")[0], told.get(limit, "")
        if wanted.isdigit() and most.isdigit() and int(wanted) > int(most):
            return (
                f"it asks for {wanted} {unit}, and partition {name} {verb} {most}. Lower nodes or "
                "launcher.slots, or choose another launcher.partition"
            )
    return ""


def _where(told: Told) -> str:
    state = told.get("JobState", "RUNNING")
    also = "" if state in _RUNS else f"{state.lower()}, "
    place = f"{also}on {told.get('NodeList') or 'no node'}"
    try:
        start, asked = (datetime.fromisoformat(told[n]) for n in ("StartTime", "SubmitTime"))
    except (KeyError, ValueError):  # not known yet
        return place
    return f"{place}, after {start - asked} in Slurm's queue"


def _running_s(told: Told) -> float:
    """Seconds that it has run, as Slurm counts them; 0 where that is not known.

    Slurm's times are of another clock than this host's, and of a time zone that they do not name.
    Source: squeue(1), ``%M``: days-hours:minutes:seconds, the former two only as needed.
    """
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", told.get("RunTime", ""))
    if found is None:
        return 0.0
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()


def _is(told: Told, handle: JobHandle) -> bool:
    """Whether that is the job, and no other one that has its number by now: when the cluster's own
    state is lost, it counts anew. An administrator may give a job another name, and not let it work
    elsewhere than in the folder of its run.
    """
    if told.get("JobName") == handle.job_id:
        return True
    folder = told.get("WorkDir", "")
    return bool(folder) and Path(folder).is_relative_to(run_folder(handle))


def _queue_of(numbers: Sequence[int], user: str) -> dict[int, dict[str, str]]:
    """What the controller says of these jobs, those that ended lately among them."""
    if not numbers:
        return {}
    return _queue(["--all", f"--jobs={','.join(map(str, numbers))}"], user)


def _queue(wanted: Sequence[str], user: str, *, skip: bool = False) -> dict[int, dict[str, str]]:
    """What the controller says of the jobs that these options of squeue choose, by number.

    Args:
        wanted: the options.
        user: as in the JobSpec.
        skip: whether to pass over what cannot be read: jobs that are not ours may be arrays, or
            have any name.

    Raises:
        LaunchError: it does not answer, or what it says cannot be read: no job has ended by that.
    """
    form = f"--format={_FIELD_ENDS.join(_FIELDS.values())}{_RECORD_ENDS}"
    said = _slurm(["squeue", "--states=all", form, *wanted], user=user)
    if said.returncode and _NO_SUCH_JOB in said.stderr:
        return {}
    if said.returncode:
        raise _silent("squeue", said)
    *records, rest = said.stdout.split(_RECORD_ENDS)
    read = [record.split(_FIELD_ENDS) for record in records]
    # The first one is the header: it is there without a job, too. A site may say something before.
    numbers = [fields[0].rpartition("\n")[2] for fields in read[1:]]
    whole = {len(_FIELDS)} == {len(fields) for fields in read} and _FIELD_ENDS not in rest
    if not (skip or (whole and all(map(str.isdecimal, numbers)))):
        raise _unreadable("squeue", said.stdout)
    jobs = [
        (number, fields)
        for number, fields in zip(numbers, read[1:], strict=True)
        if number.isdecimal() and len(fields) == len(_FIELDS)
    ]
    return {int(n): dict(zip(_FIELDS, (n, *fields[1:]), strict=True)) for n, fields in jobs}


def _unreadable(program: str, said: str) -> LaunchError:
    shown = said.strip().replace(_FIELD_ENDS, "|")[-_LONGEST:]
    return LaunchError(
        f"{program}: its answer cannot be read: {shown!r}. Does a script of the site's stand in "
        "its place on PATH?"
    )


def _found(handle: JobHandle, number: int) -> JobHandle:
    """The handle of a job that Slurm has just told, with the cluster that has it."""
    try:
        place = _cluster(handle.user)
    except LaunchError as error:  # only a check is lost
        _log.debug("the cluster of job %d is not known: %s", number, error)
        place = ""
    return replace(handle, number=number, place=place)


def _cluster(user: str) -> str:
    """The name of the cluster that the commands ask."""
    said = _answered(["scontrol", "show", "config"], user)
    found = re.search(r"^ClusterName\s*=\s*(\S+)", said, re.MULTILINE)
    if found is None:
        raise _unreadable("scontrol", said[:_LONGEST])
    return found[1]


def _check_cluster(handles: Sequence[JobHandle]) -> None:
    """Raises LaunchError if the cluster that does not know these jobs never had them."""
    # By an earlier version of ours none is named.
    named = [handle for handle in handles if handle.place]
    for user in dict.fromkeys(handle.user for handle in named):
        cluster = _cluster(user)
        for handle in named:
            if handle.user == user and handle.place != cluster:
                raise LaunchError(
                    f"Slurm's commands ask cluster {cluster} here, and job {handle.number} was "
                    f"submitted to {handle.place}. It may run on there. Correct SLURM_CONF of "
                    "Airflow's workers and its triggerer."
                )


def _accounted(numbers: Sequence[int], user: str) -> dict[int, dict[str, str]]:
    """What the accounting says of jobs that have ended; nothing where there is none."""
    words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--delimiter={_FIELD_ENDS}"]
    try:
        asked = [f"--format={','.join(_ACCOUNTED)}", f"--jobs={','.join(map(str, numbers))}"]
        said = _slurm([*words, *asked], user=user, timeout_s=_ACCOUNTING_S)
    except LaunchError:  # not installed, or its database does not answer
        return {}
    jobs = {}
    for line in said.stdout.split("\n") if not said.returncode else ():
        fields = line.split(_FIELD_ENDS)
        if len(fields) != len(_ACCOUNTED):
            continue
        number, state, folder, name = fields
        words_of_state = state.split()  # CANCELLED by 1000
        if number.isdecimal() and words_of_state and words_of_state[0] in _ENDED:
            told = {"JobState": words_of_state[0], "WorkDir": folder, "JobName": name}
            jobs[int(number)] = {"JobId": number, **told}
    return jobs


def _is_several(partition: str) -> bool:
    return "," in partition


def _partition(name: str, user: str) -> dict[str, str]:
    """What Slurm says of a partition; nothing where it does not: it only tells why a job waits."""
    try:
        said = _answered(["scontrol", "--all", "--oneliner", "show", "partition", name], user)
    except LaunchError as error:
        _log.debug("the limits of partition %s are not known: %s", name, error)
        return {}
    # A value with a space is cut there; none that is read has one.
    return dict(re.findall(r"(?:^| )([A-Za-z]+)=(\S*)", said))


def _with_partition(told: Told, partitions: Mapping[str, Mapping[str, str]]) -> Told:
    limits = partitions.get(told.get("Partition", ""), {})
    return {
        **{n: limits[n] for n in ("TotalNodes", "MaxNodes", "TotalCPUs") if n in limits},
        **told,
    }


def _answered(argv: Sequence[str], user: str) -> str:
    said = _slurm(argv, user=user)
    if said.returncode and _NO_SUCH_JOB not in said.stderr:
        raise _silent(argv[0], said)
    return said.stdout


def _silent(program: str, said: subprocess.CompletedProcess[str]) -> LaunchError:
    return LaunchError(f"{program}: {_last_line(said.stderr)}. Is Slurm's controller up?")


def _refused(said: str) -> SubmitFailed:
    fixes = [fix for words, fix in _REFUSALS.items() if words in said.lower()]
    message = " ".join([f"Slurm does not take the job: {_lines(said)}.", *fixes[:1]])
    why = _WHY_REFUSED.search(said)
    refused = why is not None and not _NO_ANSWER.search(why[1])
    return SubmitFailed(message, retryable=not fixes, refused=refused)


def _submitted(said: str) -> tuple[int, str]:
    """The number of the job that sbatch has submitted, and its cluster if that is named.

    Raises:
        LaunchError: it does not say so.
    """
    # A site's plug-in may say something before, and a script of its own behind.
    found = re.findall(r"^(\d+)(?:;(\S+))?\s*$", said, re.MULTILINE)
    if not found:
        raise _unreadable("sbatch", said)
    number, cluster = found[-1]
    return int(number), cluster


def _said_lines(said: str) -> list[str]:
    lines = [line for line in said.strip().splitlines() if not line.startswith("Try ")]
    return [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines]


def _last_line(said: str) -> str:
    return ["no answer", *_said_lines(said)][-1]


def _lines(said: str) -> str:
    # A site's plug-in says what it misses, and then Slurm that the job was refused.
    lines = list(dict.fromkeys(line.strip(" .") for line in _said_lines(said) if line.strip(" .")))
    return "; ".join(line[:_LONGEST] for line in lines[-_MOST_LINES:]) or "no answer"


def _slurm(
    argv: Sequence[str],
    given: str = "",
    env: Mapping[str, str] | None = None,
    user: str = "",
    timeout_s: float = _TIMEOUT_S,
    *,
    bound: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's commands, as the user whose job it is.

    Args:
        argv, given, env: the command, its standard input, and its environment.
        user: as in the JobSpec.
        timeout_s: for so long.
        bound: whether it is to end, too, where this process is killed or stands still.

    Raises:
        SubmitFailed: it is not installed.
        LaunchError: it does not end, or nobody knows the user.
    """
    # Not the caller's own settings of Slurm, which change what is asked for and how it is said.
    own = {name: os.environ[name] for name in ("PATH", "HOME", "SLURM_CONF") if name in os.environ}
    try:
        other = run_as.account(user)
    except KeyError:
        raise LaunchError(
            f"no user {user} is known on this host, whose job it is. Does the directory of users "
            f"answer? See: getent passwd {user}"
        ) from None
    if other is not None:
        own |= run_as.environment(user)
    # Not seen any more where another program starts it.
    if shutil.which(argv[0], path=own.get("PATH")) is None:
        raise SubmitFailed(
            f"{argv[0]} is not on PATH of this host. Install Slurm's client commands where "
            "Airflow's workers and its triggerer run.",
            retryable=False,
        )
    wanted = {**(env or {}), **own}
    try:
        if bound or other is not None:
            return run_as.run(
                user if other is not None else "",
                sys.executable,
                argv,
                env=wanted,
                given=given,
                timeout_s=timeout_s,
                bound=bound,
            )
        return subprocess.run(
            argv,
            input=given,
            env=wanted,
            capture_output=True,
            text=True,
            errors="replace",  # a job's name may be in any encoding
            timeout=timeout_s,
            check=False,
            start_new_session=True,  # a signal to the task must not cut a submission in two
        )
    except (FileNotFoundError, PermissionError) as error:  # what starts it: sudo, timeout
        raise SubmitFailed(
            f"{error.filename}: {error.strerror}. Install it on this host; {argv[0]} is run by it.",
            retryable=False,
        ) from error
    except subprocess.TimeoutExpired as error:
        said = error.stderr or ""
        if isinstance(said, bytes):  # whatever was asked for
            said = said.decode("utf-8", "replace")
        words = f": {_lines(said)}" if said.strip() else ""
        raise LaunchError(f"{argv[0]} gave no answer in {timeout_s:.0f} s{words}") from error
