"""Starts the tasks of a TF_CONFIG cluster on this host and ends them together: what mpirun is to
ranks.

``python -P -m ddl_airflow.launchers.tasks CLUSTER COMMAND …`` starts COMMAND, the rank shim
(``ddl_ops.rank``), once for each task. Each finds its ``TF_CONFIG``, and in ``DDL_TASK`` what the
shim wants to know.

A task that fails ends the others. Parameter servers wait for work for ever; when all others have
done theirs, they are released, and that is how they succeed. SIGTERM ends all tasks.

A program of its own, so that the kernel can tether it to whoever starts it, and so that one that is
started on each of several hosts can be given the addresses that somebody else has chosen.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddl_airflow.core.cluster import PARAMETER_SERVER, Cluster, Task, devices, tf_config

# Less than a launcher waits before it kills what is left, so that tasks end in order.
_GRACE_S = 2.5
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
# To a rank shim: its work is done, whatever its script says.
_RELEASE = signal.SIGUSR2


def argv(cluster: Cluster, command: Sequence[str], python: str = sys.executable) -> list[str]:
    """The command line of this program; ``command`` is what each task runs."""
    return [python, "-P", "-m", "ddl_airflow.launchers.tasks", str(cluster), *command]


def reserve(count: int) -> list[socket.socket]:
    """Sockets that hold free ports for servers which will bind them themselves.

    A port that is bound but not listened on is given to nobody who asks for any port. Whoever asks
    for this very port with SO_REUSEADDR, as TensorFlow's servers do, may bind it too and listen.
    Source: socket(7), ip(7); ``inet_csk_bind_conflict`` in Linux.
    """
    sockets = []
    for _ in range(count):
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # All addresses, as TensorFlow's servers: else another's port on one of them may be chosen.
        held.bind(("0.0.0.0", 0))  # noqa: S104
        sockets.append(held)
    return sockets


class Tasks:
    """The processes of a cluster, from their start to their end.

    Args:
        cluster: the tasks, all on this host.
        command: what each runs.
    """

    def __init__(self, cluster: Cluster, command: Sequence[str]) -> None:
        self._cluster = cluster
        self._command = list(command)
        self._running: dict[int, Task] = {}
        self._ending = False
        self._released = False
        self._code = 0

    def run(self) -> int:
        """Runs all tasks to their end.

        Returns:
            0; or the exit code of the first task that failed, 128 + signal for a signal.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda signum, _frame: self._end(128 + signum))
        signal.signal(signal.SIGALRM, lambda *_: self._send(signal.SIGKILL))
        held = reserve(self._cluster.size)
        try:
            self._start([one.getsockname()[1] for one in held])
            while self._running:
                pid, status = os.waitpid(-1, 0)
                self._ended(self._running.pop(pid), os.waitstatus_to_exitcode(status))
        finally:
            for one in held:
                one.close()
        return self._code

    def _start(self, ports: Sequence[int]) -> None:
        cluster = self._cluster
        nodes = 1 + max(task.node for task in cluster.tasks)
        addresses = cluster.addresses(["127.0.0.1"] * nodes, ports)
        gpus = _gpus()
        chosen = devices(cluster, gpus) if gpus else []
        for rank, task in enumerate(cluster.tasks):
            if self._ending:
                return
            place = {
                "task": str(task),
                "rank": rank,
                "size": cluster.size,
                "learner": task.node + 1,
            }
            env = {
                **os.environ,
                "TF_CONFIG": tf_config(task, addresses),
                "DDL_TASK": json.dumps(place),
            }
            if chosen:
                env["CUDA_VISIBLE_DEVICES"] = chosen[rank]
                # Several tasks may share a GPU: none takes all of its memory at once.
                env.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
            process = subprocess.Popen(
                self._command,
                env=env,
                preexec_fn=_in_child,  # safe: this process has one thread
            )
            self._running[process.pid] = task
            process.returncode = 0  # waited for here, by number, whichever is the first to end

    def _ended(self, task: Task, code: int) -> None:
        if code and not self._ending:
            code = code if code > 0 else 128 - code
            print(f"{task} ended with exit code {code}; the others are ended", file=sys.stderr)
            self._end(code)
        elif not self._ending and not self._released and self._only_servers_are_left():
            self._released = True
            self._send(_RELEASE)

    def _only_servers_are_left(self) -> bool:
        return all(task.job == PARAMETER_SERVER for task in self._running.values())

    def _end(self, code: int) -> None:
        self._code = self._code or code
        self._ending = True
        self._send(signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, _GRACE_S)

    def _send(self, number: int) -> None:
        for pid in list(self._running):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it ended, and is about to be waited for


def _in_child() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Kept back until the shim is ready for it: all others may be done before this one has begun.
    signal.pthread_sigmask(signal.SIG_BLOCK, {_RELEASE})


def _gpus() -> list[str]:
    """The GPUs that tasks may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [word.strip() for word in visible.split(",") if word.strip()]
    driver = Path("/proc/driver/nvidia/gpus")
    return [str(number) for number, _ in enumerate(driver.glob("*"))]


if __name__ == "__main__":
    sys.exit(Tasks(Cluster.parse(sys.argv[1]), sys.argv[2:]).run())
