"""Several hosts on this machine: each with its own network, host name, processes and sshd.

They are Linux namespaces, joined by a virtual Ethernet switch, so what they send each other can be
counted. They end with the process that made them, whatever way it ends.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tests.limits import within

PROGRAMS = ("ip", "nsenter", "setpriv", "ssh", "ssh-keygen", "sshd", "unshare")
HOW_TO_GET = "apt-get install -y --no-install-recommends iproute2 openssh-client openssh-server"
START_TIMEOUT_S = 30
NETWORK = "10.99.0"
# Of each host a file system of its own: process numbers repeat, and mpirun names files by them.
# Neither is memory shared between hosts.
TEMPORARY = "/mnt"

_NAMESPACES = ["--net", "--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]

_SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
MaxStartups 100
SetEnv TMPDIR={temporary}
"""

_SSH = """
Host host2.alias
  HostName 10.99.0.2
Host *
  User root
  IdentityFile {folder}/user_key
  UserKnownHostsFile {folder}/known_hosts
  BatchMode yes
  LogLevel ERROR
  ConnectTimeout 5
"""


def available() -> str:
    """Nothing if there can be hosts on this machine, else why not."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"No hosts in namespaces (no {', '.join(missing)}). Get it: {HOW_TO_GET}"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "ip", "link", "add", "a0", "type", "veth"],
        env=os.environ | {"PATH": _path()},
        capture_output=True,
        text=True,
        check=False,
    )
    return f"This machine forbids namespaces: {tried.stderr.strip()}" if tried.returncode else ""


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class Hosts:
    """`count` hosts, host1 to hostN. `folder` is theirs: keys, configuration, logs."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.addresses = [f"{NETWORK}.{i + 1}" for i in range(count)]
        self._switch: subprocess.Popen[bytes] | None = None
        self._hosts: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Hosts:
        self.folder.mkdir(parents=True, exist_ok=True)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own, where it drops its privileges
        for name in ("host_key", "user_key"):
            key = self.folder / name
            if not key.exists():
                self._run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
        host_key = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text(f"{NETWORK}.* {host_key}")
        self.ssh_config.write_text(_SSH.format(folder=self.folder))
        try:
            self._start()
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
        self.stop()

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    def stop(self) -> None:
        for process in [*self._hosts, self._switch]:
            if process is not None:
                process.kill()
                process.wait()
        self._hosts, self._switch = [], None

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host, counted from 0."""
        return [*self._inside(self._hosts[host].pid), "env", f"TMPDIR={TEMPORARY}", *command]

    def seen_on(self, host: int, path: str) -> Path:
        """Where this process finds the `path` that a host sees."""
        return Path(f"/proc/{self._hosts[host].pid}/root{path}")

    def left_in_memory(self) -> list[Path]:
        """What there is in the hosts' /dev/shm, each of which is the host's own."""
        seen = [self.seen_on(host, "/dev/shm") for host in range(len(self._hosts))]
        return [path for folder in seen for path in folder.iterdir()]

    def _inside(self, pid: int) -> list[str]:
        return [
            *("nsenter", "--target", str(pid), "--net", "--uts", "--mount"),
            *(f"--pid=/proc/{pid}/ns/pid_for_children", f"--wd={self.folder}"),
        ]

    def mpirun(
        self, slots: Sequence[int], command: Sequence[str], options: Sequence[str] = ()
    ) -> list[str]:
        """The command that runs `command` on slots[i] ranks of host i, from the first host on.

        Ranks are numbered host by host. Run it with `environment`.
        """
        lines = [f"{at} slots={n}\n" for at, n in zip(self.addresses, slots, strict=True) if n]
        hostfile = self.folder / "hostfile"
        hostfile.write_text("".join(lines))
        return self.on(
            0,
            [
                *(str(Path(sys.executable).parent / "mpirun"), "--hostfile", str(hostfile)),
                *("-np", str(sum(slots)), "--bind-to", "none"),
                *("--mca", "btl_tcp_if_include", f"{NETWORK}.0/24", *options, *command),
            ],
        )

    @property
    def environment(self) -> dict[str, str]:
        """What mpirun() needs beside PATH."""
        return {
            "PATH": _path(),
            "PRTE_MCA_plm_ssh_args": f"-F {self.ssh_config}",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def sent_bytes(self) -> list[int]:
        """Bytes that have left each host so far, all protocols and headers included."""
        return [
            json.loads(self._run(self.on(host, ["ip", "-j", "-s", "link", "show", "eth0"])))[0][
                "stats64"
            ]["tx"]["bytes"]
            for host in range(len(self._hosts))
        ]

    def limit(self, rate: str) -> None:
        """Each host sends at most so much, as in "1gbit"; again for another. Needs sch_tbf."""
        # With less of a burst than TCP's own pieces, 64 KiB, come to, half the rate is lost.
        limits = ["rate", rate, "burst", "512kb", "latency", "100ms"]
        for host in range(len(self._hosts)):
            add = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf"]
            self._run(self.on(host, [*add, *limits]))

    def cut(self, host: int) -> None:
        """Takes the cable of a host out."""
        self._run([*self._on_switch, "ip", "link", "set", f"host{host + 1}", "down"])

    def connect(self, host: int) -> None:
        """Puts it back."""
        self._run([*self._on_switch, "ip", "link", "set", f"host{host + 1}", "up"])

    def cut_power(self, host: int) -> None:
        """Ends a host at once, with all that runs there."""
        self._hosts[host].kill()
        self._hosts[host].wait()

    def start(self, host: int) -> None:
        """Starts it again, if it has ended."""
        if self._hosts[host].poll() is not None:
            self._hosts[host] = self._boot(host)
            self._await(self.folder / f"host{host + 1}.log", "Server listening", self._hosts[host])

    @property
    def _on_switch(self) -> list[str]:
        assert self._switch is not None
        return ["nsenter", "--target", str(self._switch.pid), "--net"]

    def _run(self, command: Sequence[str]) -> str:
        return subprocess.run(
            command,
            env=os.environ | {"PATH": _path()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    def _spawn(self, name: str, script: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *_NAMESPACES, "sh", "-euc", script],
                env=os.environ | {"PATH": _path()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._await(log, "ready", process)
        return process

    def _start(self) -> None:
        self._switch = self._spawn(
            "switch",
            "ip link add switch type bridge; ip link set switch up; echo ready; sleep infinity",
        )
        self._hosts = [self._boot(i) for i in range(len(self.addresses))]
        for i, host in enumerate(self._hosts):
            self._await(self.folder / f"host{i + 1}.log", "Server listening", host)

    def _boot(self, number: int) -> subprocess.Popen[bytes]:
        address, name = self.addresses[number], f"host{number + 1}"
        config = self.folder / f"{name}.sshd"
        config.write_text(_SSHD.format(address=address, folder=self.folder, temporary=TEMPORARY))
        host = self._spawn(
            name,
            f"mount -t tmpfs {name} {TEMPORARY}; mount -t tmpfs {name} /dev/shm;"
            f" hostname {name}; ip link set lo up;"
            # What this machine's user does at each login is nothing to the hosts.
            " [ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc;"
            " echo ready;"
            f" until ip addr show dev eth0 2>/dev/null | grep -q {address}/;"
            f" do sleep 0.02; done;"
            f" exec $(command -v sshd) -D -e -f {config}",
        )
        switch = [*self._on_switch, "ip", "link"]
        # The address of its card stays when it starts again: others remember it.
        card = ["name", "eth0", "address", f"02:00:00:00:00:{number + 1:02x}"]
        pair = ["add", name, "type", "veth", "peer", *card, "netns", str(host.pid)]
        self._run([*switch, *pair])
        self._run([*switch, "set", name, "master", "switch", "up"])
        own = self._inside(host.pid)
        self._run([*own, "ip", "link", "set", "eth0", "up"])
        self._run([*own, "ip", "addr", "add", f"{address}/24", "dev", "eth0"])
        return host

    def _await(self, log: Path, said: str, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + within(START_TIMEOUT_S)
        while said not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{log.stem} did not start: {log.read_text(errors='replace')}")
            time.sleep(0.02)
