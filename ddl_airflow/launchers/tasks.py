"""Starts the tasks of a TF_CONFIG cluster on this host and ends them together: what mpirun is to
ranks.

``python -P -m ddl_airflow.launchers.tasks CLUSTER COMMAND …`` starts COMMAND, the rank shim
(``ddl_ops.rank``), once for each task. Each finds its ``TF_CONFIG``, and in ``DDL_TASK`` what the
shim wants to know. A Python that has ddl-ops alone does the same by
``python -P -m ddl_ops.tasks --here CLUSTER COMMAND …``.

A task that fails ends the others. Parameter servers wait for work for ever; when all others have
done theirs, they are released, and that is how they succeed. SIGTERM ends all tasks. SIGUSR1, and
SIGURG, which asks them to make room, go to their scripts.

A program of its own, so that the kernel can tether it to whoever starts it.

On several hosts mpirun starts one of them on each, by ``python -P -m ddl_ops.tasks``, with the
whole cluster. Each starts the tasks of its node, and beside them ``ddl_ops.rendezvous``, which
knows where the others are and when all are done. A task that fails ends this program, and so mpirun
the others.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddl_airflow.core.cluster import PARAMETER_SERVER, Cluster, Task, devices, tf_config

# Less than a launcher waits before it kills what is left, so that tasks end in order.
_GRACE_S = 2.5
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
# To a rank shim: its work is done, whatever its script says.
_RELEASE = signal.SIGUSR2
# By these mpirun and srun tell a process that it is a rank, which no task is.
_OF_A_RANK = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_PROCID", "DDL_MPIRUN")
_HOST_LOST = 1
# Of whose end the others are not told by TensorFlow.
_NEEDED = (PARAMETER_SERVER, "chief", "master")
# So much later than these, others are no longer about to end.
_TELLS_S = 5.0


def argv(cluster: Cluster, command: Sequence[str], python: str = "") -> list[str]:
    """The command line of this program.

    Args:
        cluster: all tasks, on this host.
        command: what each runs.
        python: one with ddl-ops; empty: this one, with ddl-airflow.
    """
    if python:
        return [python, "-P", "-m", "ddl_ops.tasks", "--here", str(cluster), *command]
    return [sys.executable, "-P", "-m", "ddl_airflow.launchers.tasks", str(cluster), *command]


def node_argv(cluster: Cluster, command: Sequence[str], python: str) -> list[str]:
    """The command line of it for mpirun, once on each node."""
    return [python, "-P", "-m", "ddl_ops.tasks", str(cluster), *command]


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
        # Those that are started here, by rank.
        self._tasks = dict(enumerate(cluster.tasks))
        self._command = list(command)
        self._running: dict[int, Task] = {}
        self._gone: list[Task] = []  # before the others, of those that these may need
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
        for number in (signal.SIGUSR1, signal.SIGURG):
            signal.signal(number, lambda signum, _frame: self._pass_on(signum))
        signal.signal(signal.SIGALRM, lambda *_: self._time_is_up())
        held = reserve(len(self._tasks))
        try:
            self._start(self._addresses([one.getsockname()[1] for one in held]))
            while self._waits():
                pid, status = os.waitpid(-1, 0)
                self._has_ended(pid, os.waitstatus_to_exitcode(status))
        finally:
            for one in held:
                one.close()
        return self._code

    def _addresses(self, ports: Sequence[int]) -> Mapping[str, Sequence[str]]:
        """Those of the whole cluster, of which the ports are this host's."""
        nodes = 1 + max(task.node for task in self._cluster.tasks)
        return self._cluster.addresses(["127.0.0.1"] * nodes, ports)

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    def _waits(self) -> bool:
        return bool(self._running)

    def _has_ended(self, pid: int, code: int) -> None:
        self._ended(self._running.pop(pid), code)

    def _start(self, addresses: Mapping[str, Sequence[str]]) -> None:
        gpus = _gpus()
        chosen = devices(list(self._tasks.values()), gpus) if gpus else []
        for number, (rank, task) in enumerate(self._tasks.items()):
            if self._ending:
                return
            place = {
                "task": str(task),
                "rank": rank,
                "size": self._cluster.size,
                "here": len(self._tasks),
                "learner": task.node + 1,
                "nodes": len(self._cluster.ranks_by_node()),
            }
            env = {
                **self._environment(),
                "TF_CONFIG": tf_config(task, addresses),
                "DDL_TASK": json.dumps(place),
                "no_grpc_proxy": _without_proxy(addresses),
            }
            if chosen:
                env["CUDA_VISIBLE_DEVICES"] = chosen[number]
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
        elif not self._ending and not self._released:
            if self._only_servers_are_left():
                self._work_is_done()
            elif task.job in _NEEDED:
                self._gone.append(task)
                signal.setitimer(signal.ITIMER_REAL, _TELLS_S)

    def _time_is_up(self) -> None:
        if self._ending:
            self._send(signal.SIGKILL)
        elif not self._released:
            self._tell_who_goes_on()

    def _tell_who_goes_on(self) -> None:
        """Nobody tells the others: they may wait for ever, or do what is left to do."""
        others = ", ".join(str(t) for t in self._running.values() if t.job != PARAMETER_SERVER)
        gone, self._gone = self._gone, []
        for ended in gone:
            cure = (
                "If they wait for it, let it call server.join()."
                if ended.job == PARAMETER_SERVER
                else "If they serve, as by server.join(), nobody ends them: let them be parameter "
                "servers, or end when the work is done."
            )
            print(f"{ended} has ended, and {others} not. {cure}", file=sys.stderr, flush=True)

    def _work_is_done(self) -> None:
        self._released = True
        self._send(_RELEASE)

    def _only_servers_are_left(self) -> bool:
        return all(task.job == PARAMETER_SERVER for task in self._running.values())

    def _end(self, code: int) -> None:
        signal.setitimer(signal.ITIMER_REAL, _GRACE_S)  # first: one that runs would kill now
        self._code = self._code or code
        self._ending = True
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for pid in list(self._running):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue  # it ended, and is about to be waited for


class NodeTasks(Tasks):
    """The processes of one node, which mpirun has started on each.

    Args:
        cluster: all tasks, on all nodes.
        command: what each runs.
        node: this one's number.
    """

    def __init__(self, cluster: Cluster, command: Sequence[str], node: int) -> None:
        super().__init__(cluster, command)
        self._tasks = {rank: task for rank, task in self._tasks.items() if task.node == node}
        self._node = node
        self._others: subprocess.Popen[str] | None = None
        self._parent = os.getppid()

    def run(self) -> int:
        """As ``Tasks``; ends as well when its mpirun does, or its daemon here."""
        # The kernel also tells of the end of the thread that started this process.
        signal.signal(
            signal.SIGHUP,
            lambda *_: None if os.getppid() == self._parent else self._end(128 + signal.SIGHUP),
        )
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
        return super().run()

    def _addresses(self, ports: Sequence[int]) -> Mapping[str, Sequence[str]]:
        self._others = others = subprocess.Popen(
            [sys.executable, "-P", "-m", "ddl_ops.rendezvous"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_in_child,  # as below
        )
        assert others.stdin is not None and others.stdout is not None
        others.stdin.write(f"{json.dumps(ports)}\n")
        others.stdin.flush()
        if not (line := others.stdout.readline()):
            self._end(self._code or _HOST_LOST)  # it has said why
            return {}
        said = json.loads(line)
        by_node = self._cluster.ranks_by_node()
        if [len(one) for one in said["ports"]] != [len(ranks) for ranks in by_node]:
            print(
                f"mpirun has started {len(said['ports'])} node(s) of a cluster of {len(by_node)}",
                file=sys.stderr,
            )
            self._end(_HOST_LOST)
            return {}
        port_of = {
            rank: port
            for ranks, own in zip(by_node, said["ports"], strict=True)
            for rank, port in zip(ranks, own, strict=True)
        }
        return self._cluster.addresses(said["hosts"], [port_of[rank] for rank in sorted(port_of)])

    def _environment(self) -> dict[str, str]:
        return {n: text for n, text in os.environ.items() if not n.startswith(_OF_A_RANK)}

    def _start(self, addresses: Mapping[str, Sequence[str]]) -> None:
        super()._start(addresses)
        if not self._ending and self._only_servers_are_left():
            self._work_is_done()

    def _waits(self) -> bool:
        return bool(self._running) or self._others is not None

    def _has_ended(self, pid: int, code: int) -> None:
        if self._others is None or pid != self._others.pid:
            super()._has_ended(pid, code)
            return
        self._others.returncode = 0  # waited for
        self._others = None
        if code == 0 and self._released:
            self._send(_RELEASE)
        elif not self._ending:
            print("the other nodes are gone; the tasks of this one are ended", file=sys.stderr)
            self._end(_HOST_LOST)

    def _work_is_done(self) -> None:
        """On this node. When it is on all, the rendezvous ends."""
        self._released = True
        assert self._others is not None and self._others.stdin is not None
        self._others.stdin.close()

    def _send(self, number: int) -> None:
        super()._send(number)
        if self._others is not None and number != _RELEASE:
            os.kill(self._others.pid, signal.SIGKILL)  # there until it is waited for


def _without_proxy(addresses: Mapping[str, Sequence[str]]) -> str:
    """The value of ``no_grpc_proxy``: gRPC takes http_proxy for the tasks' addresses, too.

    It is asked in place of no_proxy. Source: environment_variables.md of gRPC.
    """
    hosts = {one.rpartition(":")[0] for each in addresses.values() for one in each}
    given = os.environ.get("no_grpc_proxy", os.environ.get("no_proxy", ""))  # noqa: SIM112
    return ",".join([*filter(None, [given]), *sorted(hosts)])


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
