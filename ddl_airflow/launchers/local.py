"""Ranks on this host, under mpirun or with TF_CONFIG. ``nodes: 2`` runs both nodes' here."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from ddl_airflow.core.beneath import make_folder, open_beneath, share_file
from ddl_airflow.core.environment import DEFAULT_OPTIONS, of_job
from ddl_airflow.core.errors import LaunchError, NoSpace, SubmitFailed
from ddl_airflow.core.job import JobHandle, JobSpec, JobStatus, Submission
from ddl_airflow.launchers import processes, run_as, session_directory, tasks
from ddl_airflow.launchers.base import END_S
from ddl_airflow.launchers.loopback import confined
from ddl_airflow.launchers.mpirun import OpenMpi, find_mpirun, find_python
from ddl_airflow.launchers.processes import kill_marked, ranks_of, said_of
from ddl_airflow.launchers.records import no_room, over_since, ranks_status
from ddl_airflow.launchers.tether import tethered

# What a rank inherits from the caller, by name: Airflow's own environment holds connections and
# keys, and what begins as a library's setting may be somebody's token (TF_TOKEN_*, of Terraform).
# A command may set any other: ``command: TF_DUMP_GRAPH_PREFIX=/tmp/graphs python train.py``.
_INHERITED = frozenset(
    """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR LD_LIBRARY_PATH PYTHONPATH VIRTUAL_ENV
    LC_ALL LC_ADDRESS LC_COLLATE LC_CTYPE LC_IDENTIFICATION LC_MEASUREMENT LC_MESSAGES LC_MONETARY
    LC_NAME LC_NUMERIC LC_PAPER LC_TELEPHONE LC_TIME
    DDL_GROUP_SIZE DDL_SPARSE_AS_DENSE DDL_WIRE_DTYPE DDL_STALL_TIMEOUT DDL_LOG
    DDL_TRANSPORT DDL_HOSTID DDL_THREADS DDL_GPU
    CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_HOME CUDA_PATH CUDA_CACHE_PATH CUDA_CACHE_DISABLE
    CUDA_CACHE_MAXSIZE CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING CUDA_DEVICE_MAX_CONNECTIONS
    CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE
    NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES NVIDIA_TF32_OVERRIDE
    OMP_NUM_THREADS OMP_SCHEDULE OMP_DYNAMIC OMP_PROC_BIND OMP_PLACES OMP_STACKSIZE OMP_WAIT_POLICY
    OMP_MAX_ACTIVE_LEVELS OMP_THREAD_LIMIT OMP_DISPLAY_ENV
    XLA_FLAGS KERAS_BACKEND KERAS_HOME
    TF_CPP_MIN_LOG_LEVEL TF_CPP_MAX_VLOG_LEVEL TF_CPP_VMODULE TF_NUM_INTRAOP_THREADS
    TF_NUM_INTEROP_THREADS TF_GPU_ALLOCATOR TF_GPU_THREAD_MODE TF_GPU_THREAD_COUNT
    TF_GPU_HOST_MEM_LIMIT_IN_MB TF_FORCE_GPU_ALLOW_GROWTH TF_PER_DEVICE_MEMORY_LIMIT_MB
    TF_MIN_GPU_MULTIPROCESSOR_COUNT TF_XLA_FLAGS TF_ENABLE_ONEDNN_OPTS
    TF_ENABLE_AUTO_MIXED_PRECISION TF_ENABLE_CUDNN_TENSOR_OP_MATH_FP32
    TF_ENABLE_CUBLAS_TENSOR_OP_MATH_FP32
    TF_DISABLE_SEGMENT_REDUCTION_OP_DETERMINISM_EXCEPTIONS TF_DISABLE_PROFILING TF_DUMP_GRAPH_PREFIX
    TF_CUDNN_USE_AUTOTUNE TF_CUDNN_USE_FRONTEND TF_CUDNN_DETERMINISTIC TF_CUDNN_RNN_USE_AUTOTUNE
    TF_CUDNN_RNN_USE_V2 TF_CUDA_HOST_MEM_LIMIT_IN_MB TF_DETERMINISTIC_OPS TF_USE_LEGACY_KERAS
    TF_USE_CUBLASLT TF_AUTOTUNE_THRESHOLD TF_MATMUL_AUTOTUNE_ENABLE
    TF_DATA_EXPERIMENT_OPT_IN TF_DATA_EXPERIMENT_OPT_OUT
    """.split()
)
# Each the whole of one library's settings, whose names its plugins add to.
_INHERITED_PREFIXES = ("NCCL_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
# Places and names of Airflow's own user.
_OF_USER = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR")
_SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE", re.IGNORECASE)
_POLL_S = 0.05
_LOOK_S = 5.0
# In which mpirun ends ranks that have not ended by themselves, and removes what is its own.
_MPIRUN_S = 1.0
# In which what was killed ends, but for a busy host or a large memory; and in which it ends at all.
_SOON_S = 1.0
_KILLED_S = 30.0
_log = logging.getLogger(__name__)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of the caller's environment that a training may see."""
    return {
        name: value
        for name, value in environ.items()
        if name in _INHERITED or (name.startswith(_INHERITED_PREFIXES) and not _SECRET.search(name))
    }


def rank_argv(python: str, command: str | Sequence[str]) -> list[str]:
    """The command that mpirun starts for each rank; see ``ddl_ops.rank``."""
    shim = [python, "-m", "ddl_ops.rank"]
    return [*shim, "--command", command] if isinstance(command, str) else [*shim, "--", *command]


def on_nodes(mpi: OpenMpi, job: JobSpec, python: str, options: Sequence[str] = ()) -> list[str]:
    """mpirun's line for a job on several nodes.

    It starts each rank; of a cluster of parameter servers on each node what starts its tasks.

    Args:
        mpi, job: those.
        python: the ranks'.
        options: further ones of mpirun.
    """
    ranks = rank_argv(python, job.command)
    if job.cluster is None:
        return mpi.argv(job.world_size, [*options, *ranks], job.slots)
    return mpi.argv(job.nodes, [*options, *tasks.node_argv(job.cluster, ranks, python)], 1)


def rank_environment(job: JobSpec) -> dict[str, str]:
    """What every rank of the job finds, whatever starts it."""
    own = inherited(os.environ)
    if job.user:
        own = {name: value for name, value in own.items() if name not in _OF_USER}
        own |= run_as.environment(job.user)
    return {**own, **of_job(job)}


def make_folders(job: JobSpec) -> None:
    """Makes those for records and logs, which the ranks write.

    Raises:
        FileRefused: a part of the path is a link, or no folder.
    """
    root = Path(os.path.commonpath([job.record_dir, job.log_dir]))
    root.mkdir(parents=True, exist_ok=True)
    of = run_as.account(job.user)
    for folder in (job.record_dir, job.log_dir):
        make_folder(folder, root, of and of.pw_gid)


def share_lock(job: JobSpec) -> None:
    """Lets the ranks' user take the lock: of a job that holds it itself, when it comes to run."""
    if job.lock is not None and (of := run_as.account(job.user)) is not None:
        share_file(job.lock, job.lock.parent, of.pw_gid)


class LocalLauncher:
    """See ``ddl_airflow.launchers.base.Launcher``.

    One instance watches the jobs that it submitted itself; it holds their process objects.
    """

    kind = "local"

    def __init__(self) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._next_look = 0.0
        # Where a job runs as another user: what holds it.
        self._held: dict[int, socket.socket] = {}

    def render(self, job: JobSpec) -> Submission:
        """``mpirun … python -m ddl_ops.rank --command …``; for a cluster ``tasks`` starts that.

        Raises:
            SubmitFailed: no such Python, or no mpirun.
        """
        python = find_python(job.python)
        # Another user need not be able to run Airflow's own.
        theirs = python if job.user else ""
        if job.cluster is not None:
            argv = tasks.argv(job.cluster, rank_argv(python, job.command), theirs)
            env = rank_environment(job)
            env |= confined(python, env, mpi=False, user=job.user)
            return Submission(job, self._for_user(job, argv), env)
        mpi = OpenMpi(find_mpirun(python))
        env = {**mpi.environment(), **rank_environment(job)}
        env.setdefault("DDL_OPTIONS", DEFAULT_OPTIONS)
        env |= confined(python, env, mpi=True, user=job.user)
        argv = mpi.argv(job.world_size, rank_argv(python, job.command))
        argv = session_directory.argv(argv, theirs or sys.executable)
        return Submission(job, self._for_user(job, argv), env)

    def _for_user(self, job: JobSpec, argv: list[str]) -> tuple[str, ...]:
        return tuple(run_as.argv(job.user, find_python(job.python), argv) if job.user else argv)

    def submit(self, submission: Submission) -> JobHandle:
        """Starts mpirun, tethered to this process; what it says goes to ``launcher.log``."""
        job = submission.job
        make_folders(job)
        try:
            root = Path(os.path.commonpath([job.record_dir, job.log_dir]))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            with open(open_beneath(job.log_dir / "launcher.log", root, flags), "ab") as log:
                process = self._start(submission, log)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise NoSpace(f"{error.filename or job.log_dir}: {no_room(error)}") from error
            user = f" as user {job.user}" if job.user else ""
            raise SubmitFailed(
                f"cannot start ranks in {job.folder}{user}: {error.strerror}"
            ) from error
        self._started[process.pid] = process
        return job.handle(self.kind, process.pid)

    def _start(self, submission: Submission, log: IO[bytes]) -> subprocess.Popen[bytes]:
        job = submission.job
        if job.user:
            process, holder = run_as.start(
                job.user,
                submission.argv,
                env=submission.env,
                folder=job.folder,
                output=log,
                inherits=job.inherits,
            )
            self._held[process.pid] = holder
            return process
        return subprocess.Popen(
            tethered(submission.argv),
            cwd=job.folder,
            env=dict(submission.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=job.inherits,
            start_new_session=True,  # Airflow signals the task's group; cancel() is ours
        )

    def status(self, handle: JobHandle) -> JobStatus:
        """Running while mpirun lives; then what the ranks' records say.

        Mpirun waits for all ranks, also for one that cannot end. It is not waited for when its
        ranks say that the job has long been over.
        """
        running = self._started[handle.number].poll() is None
        return ranks_status(handle, running=running and not self._long_over(handle))

    def _long_over(self, handle: JobHandle) -> bool:
        if time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_S
        with suppress(LaunchError):  # of a record that is none: said at the end
            since = over_since(handle)
            return since is not None and time.time() - since > END_S
        return False

    def cancel(self, handle: JobHandle, grace_s: float = 3.0) -> None:
        """SIGTERM to the ranks, and to mpirun; after the grace SIGKILL to whatever is left.

        Mpirun would kill the ranks a quarter of a second after their SIGTERM, so it gets its own
        only when it is to end them. On several hosts it is what asks all of them at once.

        Raises:
            LaunchError: something does not end even then: a process in uninterruptible sleep.
        """
        process = self._started.get(handle.number)
        held = self._held.pop(handle.number, None)
        if held is not None:
            held.close()
        if process is not None and process.poll() is None:
            deadline = time.monotonic() + grace_s
            if held is None:
                ranks = ranks_of(process.pid) if self.kind == LocalLauncher.kind else []
                for rank in ranks:
                    with suppress(ProcessLookupError):
                        os.kill(rank, signal.SIGTERM)
                if ranks:
                    _wait(process, deadline - _MPIRUN_S)
                process.send_signal(signal.SIGTERM)
            _wait(process, deadline)
        # Not the job's id: another Airflow on this host may run a DAG of that name, at that time.
        mark, host = ("DDL_RECORD_DIR", str(handle.record_dir)), socket.gethostname()
        if left := kill_marked(*mark, _SOON_S):
            # At once, for this task may be killed before the rest of the wait is over.
            _log.warning("still there after SIGKILL, on %s: %s", host, ", ".join(left))
            left = kill_marked(*mark, _KILLED_S)
        if held is not None:
            left = left or _left_of_user(handle.user, mark)
        if process is not None:
            try:
                # Without its mark it is past all that may hold it, and ends; on a busy host, later.
                process.wait(_SOON_S if left else _KILLED_S)
            except subprocess.TimeoutExpired:
                left = left or [said_of(process.pid)]
        if left:
            raise LaunchError(
                f"on {host} {', '.join(left)} of job {handle.job_id} did not end within "
                f"{_KILLED_S:.0f} s of SIGKILL. Mend what it waits for, a file system or a device, "
                "or restart that host; until it has ended no other try begins."
            )

    def log(self, handle: JobHandle, rank: int) -> Path:
        """The rank's own file."""
        return handle.log_dir / f"rank-{rank}.log"


def _wait(process: subprocess.Popen[bytes], until: float) -> None:
    while process.poll() is None and time.monotonic() < until:
        time.sleep(_POLL_S)


def _left_of_user(user: str, mark: tuple[str, str]) -> list[str]:
    """Has the user kill what carries the mark; a few words on each that is still there.

    Others may not see a mark, in a container not even root (CAP_SYS_PTRACE).
    """
    # Not the ranks' Python, which a manifest names, and which may do nothing. Root starts it, where
    # this is root's, for the user need not be able to run Airflow's.
    starter = "root" if os.geteuid() == 0 else user
    words = [sys.executable, "-SE", processes.__file__, *mark, user]
    try:
        ended = run_as.run(starter, sys.executable, words, env={}, timeout_s=_KILLED_S)
    except subprocess.TimeoutExpired:
        return [f"what {user} runs, of which no end was seen,"]
    return ended.stderr.splitlines()


class OnceLauncher(LocalLauncher):
    """One process, without MPI: the transform, and a manifest's further commands."""

    kind = "once"

    def render(self, job: JobSpec) -> Submission:
        """``python -m ddl_ops.rank --command …``: recorded and logged as a rank is."""
        argv = rank_argv(find_python(job.python), job.command)
        return Submission(job, self._for_user(job, argv), rank_environment(job))
