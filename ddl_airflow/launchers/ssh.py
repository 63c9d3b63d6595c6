"""Ranks on hosts that are named, started over ssh by one mpirun, which runs beside the task.

What must be so: the task's host reaches every host by ssh, and they reach it and each other by TCP;
the ranks' Python, with ddl-ops, has the same path on all, and mpirun of the same Open MPI is beside
it, or on PATH, where tasks run.

The workspace may be a file system that all share. Where it is not, hosts are given what the run
needs before their ranks start, and what ranks leave is brought back while they run: see
``placement``.

mpirun ends with the task, as for ``local``, whose process it is. That of a host that was cut off
says 0 (prterun(1)); the ranks' records decide, and a host that does not answer is named.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddl_airflow.core.cluster import parameter_servers
from ddl_airflow.core.connections import FindConnection, own_connection
from ddl_airflow.core.environment import DEFAULT_OPTIONS
from ddl_airflow.core.errors import LaunchError, SubmitFailed
from ddl_airflow.core.hosts import Host, parse_host, parse_hostfile
from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus, Submission
from ddl_airflow.launchers import preflight, processes, session_directory
from ddl_airflow.launchers.local import LocalLauncher, make_folders, on_nodes, rank_environment
from ddl_airflow.launchers.mpirun import OpenMpi, find_mpirun, find_python
from ddl_airflow.launchers.placement import Placement
from ddl_airflow.launchers.records import is_consequence, ranks_status
from ddl_airflow.launchers.remote import Ssh, on_each
from ddl_airflow.launchers.ssh_connection import ConnectedSsh, hosts_of

# Of the task's host, not of others: sshd and the host's own account set theirs.
_NOT_THERE = frozenset(
    """
    PATH HOME USER LOGNAME SHELL TMPDIR VIRTUAL_ENV CUDA_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES
    """.split()
)
# mpirun's daemons talk to it over TCP of their own, beside ssh: a cut link is seen by both, and
# what runs on a host that was cut off ends there. Seconds; facts of tcp(7). It says nothing of a
# host that was just being sent something.
_KEEPALIVE = {
    "oob_tcp_keepalive_time": 4,
    "oob_tcp_keepalive_intvl": 1,
    "oob_tcp_keepalive_probes": 3,
}
# Of the connections by which it started them, which last as long as they do, and tell of such a
# host, too. More than of other connections: that would end a job of which a host is busy.
_ALIVE = ("-oServerAliveInterval=3", "-oServerAliveCountMax=3")
# Segments of ranks that share a host. Elsewhere there is no directory of the task's host.
SHARED_MEMORY = "/dev/shm"  # noqa: S108
# Far more than ssh takes to give up a host that is gone: one where a login takes long is none.
_ENDS_S = 60.0
# Ends of which all ranks have told: whether hosts answer then changes nothing. One that had to make
# room may be gone by now.
_SAID_ALL = (JobState.SUCCEEDED, JobState.PREEMPTED)
_LOOK_S = 5.0


@dataclass
class _Job:
    """What is known of a job of this process.

    Attributes:
        hosts: names, in the order of ranks.
        python: the ranks'.
        placement: of its files, where the hosts do not share the workspace.
        after: what is done once mpirun has ended: brings the rest, and asks who answers.
        silent: each host that did not answer then, and why; once that is known.
        error: why that could not be done.
        next_look: when to look next where the ranks are; that reads all their records.
    """

    hosts: tuple[str, ...]
    python: str
    placement: Placement | None
    after: threading.Thread | None = None
    silent: dict[str, str] | None = None
    error: Exception | None = None
    next_look: float = 0.0


class SshLauncher(LocalLauncher):
    """See ``ddl_airflow.launchers.base.Bringing``.

    Args:
        hosts: each ``name`` or ``name:slots``.
        hostfile: in place of them, a file with one a line.
        min_nodes: hosts that are enough where others are not well; None: all are needed.
        network: interfaces or networks for the ranks' own traffic; empty: all.
        ssh_config: ssh's configuration; empty: that of this user.
        connection: in place of it, the id of an Airflow connection, whose keys are in files while
            the job is there.
        preflight: whether a host must be well; False: it must answer.
    """

    kind = "ssh"

    def __init__(
        self,
        hosts: Sequence[str] = (),
        hostfile: str = "",
        min_nodes: int | None = None,
        network: str = "",
        ssh_config: str = "",
        connection: str = "",
        preflight: bool = True,
    ) -> None:
        super().__init__()
        self._named = tuple(hosts)
        self._hostfile = hostfile
        self._min_nodes = min_nodes
        self._network = network
        self._preflight = preflight
        self._ssh = Ssh(ssh_config)
        self._conn_id = connection
        self._find: FindConnection = own_connection
        self._connected: ConnectedSsh | None = None
        # Whether its files are there for a job that was prepared and is not there yet.
        self._prepared = False
        # Numbers of jobs that are there, and for which its files are.
        self._keeping: set[int] = set()
        self._jobs: dict[int, _Job] = {}
        self._placement: Placement | None = None
        self._look: Callable[[], None] = lambda: None

    def find_connections(self, find: FindConnection) -> None:
        """As ``ddl_airflow.launchers.base.Connecting``."""
        self._find = find

    def connection_of(self, handle: JobHandle) -> str:
        """The id of the connection by which a job is reached; empty for none."""
        return self._conn_id

    def look_at_brought(self, look: Callable[[], None]) -> None:
        """As ``ddl_airflow.launchers.base.Bringing``."""
        self._look = look

    def prepare(self, job: JobSpec, log: Any) -> JobSpec:
        """Looks at the hosts, chooses among them, and places files there if they must be.

        Raises:
            SubmitFailed: too few hosts are well. Says what ails which.
        """
        _refuse_user(job)
        if self._conn_id and self._connected is None:
            self._connected = ConnectedSsh(self._find(self._conn_id))
        if self._connected is not None:
            self._connected.hold()
            self._prepared = True
            self._ssh = Ssh(str(self._connected.config))
        try:
            return self._prepare(job, log)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """As ``base.Preparing``: files on hosts, and those of a connection."""
        placement, self._placement = self._placement, None
        prepared, self._prepared = self._prepared, False
        try:
            if placement is not None:
                placement.take_back()
        finally:
            if prepared and self._connected is not None:
                self._connected.release()

    def _prepare(self, job: JobSpec, log: Any) -> JobSpec:
        hosts = self._hosts(job)
        make_folders(job)
        marker = job.record_dir / "preflight"
        marker.touch()
        try:
            chosen, shared = self._well(job, hosts, marker, log)
        finally:
            marker.unlink(missing_ok=True)
        averages = job.averages and len(chosen) * job.slots > 1
        job = replace(job, nodes=len(chosen), hosts=chosen, averages=averages)
        if job.cluster is not None:
            job = replace(job, cluster=parameter_servers(job.nodes, job.slots))
            if not shared and job.nodes > 1:
                raise SubmitFailed(
                    "each parameter server writes its part of a checkpoint itself, and the hosts "
                    f"do not share the workspace: {marker.parent} is not there. Let it be on a "
                    "file system that all mount ([ddl] workspace), or use one node.",
                    retryable=False,
                )
        if job.data_comes and not shared:
            raise SubmitFailed(
                "training_data_reference.stream: the hosts do not share the workspace, and would "
                f"not see data come: {marker.parent} is not there. Let it be on a file system that "
                "all mount ([ddl] workspace), or delete stream.",
                retryable=False,
            )
        if not shared:
            self._placement = Placement(self._ssh, job, log)
            self._placement.send(self._look)
        return job

    def _hosts(self, job: JobSpec) -> list[str]:
        """Those with as many slots as a node has ranks."""
        try:
            if self._hostfile:
                text = Path(self._hostfile).read_text("utf-8-sig")
                named: Sequence[Host] = parse_hostfile(text, self._hostfile)
            else:
                # The connection's, if the manifest names none.
                names = self._named or (self._conn_id and hosts_of(self._find(self._conn_id)))
                named = [parse_host(one) for one in names]
        except UnicodeDecodeError as error:
            said = f"launcher.hostfile: {self._hostfile} is no text: {error.reason}"
            raise SubmitFailed(said, retryable=False) from error
        except OSError as error:
            raise SubmitFailed(f"launcher.hostfile: {error}", retryable=False) from error
        except ValueError as error:
            raise SubmitFailed(f"launcher: {error}.", retryable=False) from error
        hosts = [one.name for one in named if one.slots is None or one.slots >= job.slots]
        if len(hosts) < self._least(job):
            small = [str(one) for one in named if one.name not in hosts]
            why = f"; fewer slots have {', '.join(small)}" if small else ""
            raise SubmitFailed(
                f"{job.nodes} node(s) with {job.slots} rank(s) each are asked for, and the "
                f"launcher has {len(hosts)} such host(s){why}. Lower nodes or launcher.slots, or "
                "name more hosts.",
                retryable=False,
            )
        return hosts

    def _least(self, job: JobSpec) -> int:
        return min(job.nodes, self._min_nodes or job.nodes)

    def _well(
        self, job: JobSpec, hosts: Sequence[str], marker: Path, log: Any
    ) -> tuple[tuple[str, ...], bool]:
        """The hosts to use, and whether they share the workspace."""
        log.info("looking at %d host(s): %s", len(hosts), ", ".join(hosts))
        folders = {"the workspace": job.record_dir, "temporary files": Path("/tmp")}  # noqa: S108
        asked = preflight.Asked(_python(job), job.slots, marker, folders)
        looks = preflight.look_at(self._ssh, hosts, asked)
        if not self._preflight:  # all that answer are well
            looks = [replace(look, wrong=()) if look.facts else look for look in looks]
        wrong = {look.host: "; ".join(look.wrong) for look in looks if look.wrong}
        well = [look.host for look in looks if not look.wrong]
        speeds: preflight.Speeds = {}
        if self._preflight and len(well) > 1 and len(well) >= self._least(job):
            limit_s = preflight.patience_s(looks)
            speeds, at_fault = preflight.linked(well, partial(self._measured, job, limit_s))
            wrong |= at_fault
            well = [host for host in well if host not in wrong]
        for host, why in wrong.items():
            log.warning("%s is left out: %s", host, why)
        if len(well) < self._least(job):
            said = " ".join(f"{host}: {why}." for host, why in wrong.items())
            raise SubmitFailed(
                f"{len(well)} of {len(hosts)} host(s) are well, and {self._least(job)} are needed. "
                f"{said}"
            )
        chosen = tuple(well[: job.nodes])
        for line in preflight.slow_links({p: s for p, s in speeds.items() if {*p} <= {*chosen}}):
            log.warning("%s", line)
        fewer = f" in place of {job.nodes}" if len(chosen) < job.nodes else ""
        log.info("ranks go to %d host(s)%s: %s", len(chosen), fewer, ", ".join(chosen))
        return chosen, _shared(chosen, looks, marker)

    def _measured(
        self, job: JobSpec, limit_s: float, hosts: Sequence[str]
    ) -> tuple[dict[str, Any] | None, str]:
        """What ``ddl_ops.preflight`` says of the hosts, or why it says nothing."""
        env = self._environment(replace(job, env={}), len(hosts))  # no secrets
        command = [_python(job), "-m", "ddl_ops.preflight"]
        mpi = OpenMpi(find_mpirun(_python(job)))
        argv = mpi.argv(len(hosts), [*self._options(hosts, 1, env), *command], 1)
        said, why = preflight.run_mpirun(argv, len(hosts), env, limit_s)
        return preflight.reductions(said, len(hosts), why)

    def render(self, job: JobSpec) -> Submission:
        """``mpirun --host … -x … python -m ddl_ops.rank --command …``.

        Only names of variables are in it, and the command.
        """
        _refuse_user(job)
        hosts = job.hosts or tuple(self._hosts(job)[: job.nodes])
        env = self._environment(job, len(hosts))
        mpi = OpenMpi(find_mpirun(_python(job)))
        slots = job.slots if job.cluster is None else 1
        # By the name that hosts know: mpirun would take what the kernel calls it here.
        options = ["--wdir", str(job.folder), *self._options(hosts, slots, env)]
        argv = on_nodes(mpi, job, _python(job), options)
        return Submission(job, tuple(session_directory.argv(argv, sys.executable)), env)

    def _environment(self, job: JobSpec, hosts: int) -> dict[str, str]:
        env = {**OpenMpi("").environment(), **rank_environment(job)}
        if job.cluster is None:
            env.setdefault("DDL_OPTIONS", DEFAULT_OPTIONS)
        return {"OMPI_MCA_btl_sm_backing_directory": SHARED_MEMORY, **env} | mpi_settings(
            self._ssh, self._network, hosts
        )

    def _options(self, hosts: Sequence[str], slots: int, env: Mapping[str, str]) -> list[str]:
        """mpirun's own."""
        return mpi_options(env, dict.fromkeys(hosts, slots))

    def submit(self, submission: Submission) -> JobHandle:
        """Starts mpirun, tethered to this process."""
        handle = super().submit(submission)
        if self._prepared:
            self._keeping.add(handle.number)
            self._prepared = False
        placement, self._placement = self._placement, None
        job = submission.job
        self._jobs[handle.number] = _Job(job.hosts, _python(job), placement)
        if placement is not None:
            placement.start()
        return replace(handle, nodes=job.nodes)

    def status(self, handle: JobHandle) -> JobStatus:
        """As ``local``; at its end what is left is brought, and a host that is silent named."""
        job, now = self._jobs[handle.number], time.monotonic()
        looks = now >= job.next_look
        status = super().status(handle if looks else replace(handle, nodes=0))
        if looks:
            job.next_look = now + _LOOK_S
        if not status.ended:
            return status
        if status.permanent:  # mpirun may still run
            return status
        if job.after is None:
            job.after = threading.Thread(target=self._look_after, args=(handle, job), daemon=True)
            job.after.start()
        if job.after.is_alive():
            return JobStatus(JobState.RUNNING)
        status = ranks_status(handle, running=False)
        if job.error is not None:
            raise job.error
        # One that failed by itself did, also where a host is slow to answer afterwards.
        own = status.failure is not None and not is_consequence(status.failure)
        missing = job.placement.missing if job.placement is not None else ""
        if missing and status.state in _SAID_ALL:
            # What follows would take what came before for all of it.
            return JobStatus(JobState.LOST, reason=f"The ranks did their work. {missing}.")
        if status.state in _SAID_ALL or own or not job.silent:
            return status
        silent = " ".join(f"{host}: {why}." for host, why in job.silent.items())
        return JobStatus(
            JobState.LOST,
            reason=f"The ranks were ended, for a host is gone. {silent}",
        )

    def _look_after(self, handle: JobHandle, job: _Job) -> None:
        """Brings what is left, and asks each host whether it is there. Not in the caller's time."""
        silent: dict[str, str] = {}
        try:
            if not _all_done(handle):
                said = on_each(
                    job.hosts, lambda host: self._ssh.run(host, ["true"], timeout_s=_ENDS_S)
                )
                silent = {host: one.why for host, one in said.items() if one.code is None}
            if job.placement is not None:
                answering = [host for host in job.hosts if host not in silent]
                job.placement.finish(answering, lambda: _all_done(handle))
        except Exception as error:  # raised where somebody asks for the status
            job.error = error
        job.silent = silent

    def cancel(self, handle: JobHandle, grace_s: float = 3.0) -> None:
        """As ``local``, and on every host SIGKILL to what is left of the job.

        Raises:
            LaunchError: something there does not end.
        """
        if self._connected is None:
            self._cancel(handle, grace_s)
            return
        self._connected.hold()
        try:
            self._cancel(handle, grace_s)
        finally:
            self._connected.release()
            if handle.number in self._keeping:  # it may be called again
                self._keeping.remove(handle.number)
                self._connected.release()

    def _cancel(self, handle: JobHandle, grace_s: float) -> None:
        job = self._jobs.get(handle.number)
        super().cancel(handle, grace_s)
        if job is None:
            return
        program = Path(processes.__file__).read_text("utf-8")
        words = [job.python, "-SE", "-", "DDL_RECORD_DIR", str(handle.record_dir)]
        silent = job.silent or {}
        hosts = [host for host in job.hosts if host not in silent]
        said = on_each(hosts, lambda host: self._ssh.run(host, words, text=program, timeout_s=10.0))
        left = {host: one.why for host, one in said.items() if one.code != 0}
        # After the killing, for this process may be killed meanwhile.
        if job.placement is not None:
            job.placement.finish([host for host, one in said.items() if one.code is not None])
        if left:
            told = " ".join(f"{host}: {why}." for host, why in left.items())
            raise LaunchError(f"job {handle.job_id} may have left processes. {told}")


def mpi_settings(ssh: Ssh, network: str, hosts: int) -> dict[str, str]:
    """What lets mpirun start ranks on other hosts.

    Args:
        ssh: how they are reached.
        network: see SshLauncher.
        hosts: how many there are.
    """
    settings = {
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_args": " ".join([*_ALIVE, *ssh.options]),  # the first value holds
        # It would wait for connections to end before it opens more: for ever.
        "PRTE_MCA_plm_ssh_num_concurrent": str(hosts),
        # This host's keys start them all: hosts need none for each other.
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        # Else a name ends at its first dot: gpu1.lab would be this host, if that is gpu1.
        "PRTE_MCA_prte_keep_fqdn_hostnames": "1",
        # The hosts are those that are named, also in a shell of a scheduler with its own.
        "PRTE_MCA_ras": "^slurm,pbs",
    }
    return settings | ({"OMPI_MCA_btl_tcp_if_include": network} if network else {})


def mpi_options(env: Mapping[str, str], slots: Mapping[str, int]) -> list[str]:
    """mpirun's own: which variables go along, by their names alone, and where ranks are.

    Args:
        env: of the ranks.
        slots: of each host, in their order.
    """
    ours = [name for name in env if name not in _NOT_THERE and not _is_mpis(name)]
    options = [word for name in sorted(ours) for word in ("-x", name)]
    for name, value in _KEEPALIVE.items():
        options += ["--prtemca", name, str(value)]
    return [*options, "--host", ",".join(f"{host}:{number}" for host, number in slots.items())]


def _all_done(handle: JobHandle) -> bool:
    """Whether the ranks' records say so; one that cannot be read says nothing."""
    try:
        return ranks_status(handle, running=False).state in _SAID_ALL
    except LaunchError:  # raised by status() as well
        return False


def _python(job: JobSpec) -> str:
    """By its path, which need not be there on the task's host."""
    return job.python if os.path.isabs(job.python) else find_python(job.python)


def _refuse_user(job: JobSpec) -> None:
    if job.user:
        raise SubmitFailed(
            f"[ddl] run_ranks_as is {job.user}, and ranks that start over ssh run as the user "
            "that ssh's configuration names. Use another launcher for this manifest, or take "
            "the setting out.",
            retryable=False,
        )


def _shared(chosen: Sequence[str], looks: Sequence[preflight.Look], marker: Path) -> bool:
    """Whether the hosts share the workspace. Where some did, the end would remove files from it."""
    sees = {look.host: look.facts["sees_marker"] for look in looks if look.host in chosen}
    if len({*sees.values()}) > 1:
        some = ", ".join(host for host in chosen if sees[host])
        others = ", ".join(host for host in chosen if not sees[host])
        raise SubmitFailed(
            f"{some} shares the workspace, and {others} does not: {marker.parent}. Mount the same "
            "file system on all, or on none."
        )
    return bool(sees[chosen[0]])


def _is_mpis(name: str) -> bool:
    """mpirun hands these on by itself."""
    return name.startswith(("OMPI_", "PRTE_", "PMIX_"))
