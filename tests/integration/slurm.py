"""A real Slurm cluster of two nodes, both on this host; without accounting, as many are.

Its daemons end with the process that starts it, whatever way that ends.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ddl_airflow.demo.site import Service, free_port
from tests.limits import within

PROGRAMS = ("munged", "sbatch", "scancel", "scontrol", "slurmctld", "slurmd", "squeue", "srun")
HOW_TO_GET = "apt-get install -y --no-install-recommends munge slurm-wlm"
START_TIMEOUT_S = 30
NODES = ("n1", "n2")

# The nodes claim more cores than this host has, so that ranks need not wait for them. jobcomp.txt
# gets a line for each job that ends. Jobs of the partition "spare" make room for all others.
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobcomp.txt
ReturnToService=2
KillWait=5
MinJobAge=3600
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=cpu Nodes=n1,n2 Default=YES MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=spare Nodes=n1,n2 MaxTime=120 State=UP PriorityTier=1 GraceTime={grace_s}
"""


class SlurmCluster:
    """Started by ``with``. Slurm's commands find it by SLURM_CONF=<folder>/slurm.conf.

    Args:
        folder: for all its files; a short path.
        grace_s: in which jobs of the partition "spare" make room.
    """

    def __init__(self, folder: Path, grace_s: int = 60) -> None:
        self.folder = folder
        self._grace_s = grace_s
        self._daemons: list[Service] = []

    @staticmethod
    def missing() -> str:
        """Nothing if a cluster can run here, else why not."""
        absent = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
        return f"No Slurm (no {', '.join(absent)}). Get it: {HOW_TO_GET}" if absent else ""

    @property
    def environment(self) -> dict[str, str]:
        """What the commands need."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        folder = self.folder
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        text = CONF.format(
            folder=folder,
            host=socket.gethostname().partition(".")[0],
            user=getpass.getuser(),
            ports=[free_port() for _ in range(3)],
            grace_s=self._grace_s,
        )
        (folder / "slurm.conf").write_text(text)
        munge = {name: folder / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        files = [f"--{name}{'-file' * (name != 'socket')}={path}" for name, path in munge.items()]
        try:
            # --force: the folder's parents are this user's, not root's
            self._start("munged", "munged", "-F", "--force", f"--key-file={key}", *files)
            self._await(munge["socket"].exists)
            self._start("slurmctld", "slurmctld", "-D")
            for node in NODES:
                self._start(node, "slurmd", "-D", "-N", node)
            self.wait_for_nodes()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.ask("scancel", "--me", check=False)
            self._await(lambda: not self.ask("squeue", "-h", check=False))
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the daemons, and whatever they have started."""
        for daemon in self._daemons:
            daemon.terminate()
        for daemon in self._daemons:
            daemon.stop()
        self._daemons.clear()

    def ask(self, *argv: str, check: bool = True, timeout_s: float = 60) -> str:
        """What one of Slurm's commands says."""
        limit_s = within(timeout_s)
        done = subprocess.run(
            argv, env=self._env, capture_output=True, text=True, check=False, timeout=limit_s
        )
        if check and done.returncode:
            raise RuntimeError(f"{argv}: {done.stderr}")
        return done.stdout

    def fail_node(self) -> None:
        """Takes the second node down, as when it answers no more."""
        self.ask("scontrol", "update", f"NodeName={NODES[1]}", "State=DOWN", "Reason=test")

    def wait_for_nodes(self) -> None:
        """Until both nodes can take jobs; one that was down comes back by itself."""
        self._await(lambda: self.ask("sinfo", "-h", "-o", "%t", check=False).strip() == "idle")

    def take_all(self) -> None:
        """Has a job of the better partition take both nodes, for a moment; waits for its end."""
        words = ["--partition=cpu", "--exclusive", "--nodes=2", "--output=/dev/null"]
        number = int(self.ask("sbatch", "--parsable", "--job-name=better", *words, "--wrap=true"))
        deadline = time.monotonic() + within(300)
        while self.jobs("better")[number] != "COMPLETED":
            if time.monotonic() > deadline:
                raise RuntimeError(f"no room for job {number}: {self.ask('squeue')}")
            time.sleep(0.2)

    def end_time(self, name: str) -> None:
        """Lets the time limit of a job that runs be over now: a limit is a minute at least."""
        (number,) = self.jobs(name)
        self.ask("scontrol", "update", f"JobId={number}", "EndTime=now")

    def jobs(self, name: str) -> dict[int, str]:
        """The state of each job of that name that Slurm remembers, by its number."""
        said = self.ask("squeue", "-h", "--states=all", f"--name={name}", "--format=%i %T")
        return {int(number): state for number, state in map(str.split, said.splitlines())}

    @property
    def _env(self) -> dict[str, str]:
        return os.environ | self.environment | {"PATH": _path()}

    def _start(self, name: str, *argv: str) -> None:
        self._daemons.append(Service(name, argv, self._env, self.folder / "logs"))

    def _await(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + within(START_TIMEOUT_S)
        while not done():
            for daemon in self._daemons:
                daemon.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"Slurm is not ready. Logs: {self.folder}")
            time.sleep(0.05)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
