"""Hosts that a person names to ``ddl-run`` or ``horovodrun``, and a job's records on them.

What must be so is what ``ssh.py`` asks for; and the current folder, with the script, is there on
all hosts. Nothing is copied to them. What ranks print comes through mpirun at once, and each leaves
its record on its own host, from which they are brought at the end: mpirun's exit code says little.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.core.hosts import Host, named_twice
from ddl_airflow.launchers import preflight, probe, processes
from ddl_airflow.launchers.mpirun import OpenMpi, find_mpirun
from ddl_airflow.launchers.remote import Ssh, objects, on_each
from ddl_airflow.launchers.ssh import SHARED_MEMORY, mpi_options, mpi_settings

# Of the folder's name. On other hosts nobody has a lock of it: to a job that begins there one with
# the prefix of session directories would be stale.
RECORDS_PREFIX = "ddl-records-"
_LOOPBACK = frozenset(("localhost", "127.0.0.1", "::1"))
_COMES_S = 0.2
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
# A host that is gone is given up by ssh, long before. A busy one may take as long to let people in.
_MOST_S = 60.0
# Prints the files of a folder that are named, as an object; of each no more than a record takes.
_READ = """
import json, pathlib, sys
folder, *names = sys.argv[1:]
there = [path for name in names if (path := pathlib.Path(folder, name)).is_file()]
print(json.dumps({p.name: p.open("rb").read(16 << 20).decode("utf-8", "replace") for p in there}))
"""


def is_here(name: str) -> bool:
    """Whether this host is meant."""
    if name in _LOOPBACK or name == socket.gethostname():
        return True
    with suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as asked, suppress(OSError):
                asked.bind(address)
                # Where net.ipv4.ip_nonlocal_bind is set any address can be. What is sent to our own
                # comes back here.
                asked.connect(asked.getsockname())
                asked.send(b".")
                if select.select([asked], [], [], _COMES_S)[0]:
                    return True
    return False


def filled(hosts: Sequence[Host], ranks: int | None) -> dict[str, int]:
    """How many ranks run on which host: the first ones are filled first.

    Args:
        hosts: as they are named; one without slots takes one rank.
        ranks: in all; None: as many as there are slots.

    Raises:
        SubmitFailed: there are fewer slots, or a host is named twice.
    """
    if twice := named_twice(hosts):
        raise SubmitFailed(f"{twice} is named twice. Name it once, with all its slots.")
    slots = {host.name: host.slots or 1 for host in hosts}
    if ranks is not None and ranks > sum(slots.values()):
        said = ", ".join(map(str, hosts))
        raise SubmitFailed(
            f"{ranks} ranks are asked for, and there are {sum(slots.values())} slots: {said}. Ask "
            "for fewer, or name more hosts."
        )
    left = sum(slots.values()) if ranks is None else ranks
    taken = {}
    for name, number in slots.items():
        if left:
            taken[name] = min(number, left)
            left -= taken[name]
    return taken


class NamedHosts:
    """The hosts of one job.

    Args:
        slots: ranks on each, in their order.
        folder: where they run.
        records: a folder of the job alone, on this host; one of the same path is made on the others
            and removed.
        network: interfaces or networks for the ranks' own traffic; empty: all.
        ssh: how they are reached.

    Attributes:
        left: a few words on the processes of each host that could not be ended.
    """

    def __init__(
        self, slots: Mapping[str, int], folder: Path, records: Path, network: str, ssh: Ssh
    ) -> None:
        self._slots = dict(slots)
        self._folder = folder
        self._records = records
        self._network = network
        self._ssh = ssh
        self._others = [name for name in slots if not is_here(name)]
        self.left: list[str] = []

    def look(self) -> None:
        """Looks at the hosts, and makes the folder for records on them.

        Raises:
            SubmitFailed: one is not well, or has not the folder. Names each, and the cure.
        """
        looks = _looks(self._ssh, self._slots, self._folder)
        wrong = {
            look.host: f"it has no {self._folder}, where the ranks are to run. Let the folder be "
            "there, with the script"
            for look in looks
            if look.facts and not look.facts["sees_marker"]
        }
        wrong = wrong or {look.host: "; ".join(look.wrong) for look in looks if look.wrong}
        if wrong:
            raise SubmitFailed(f"not all hosts are well. {_each(wrong)}")
        self.make_room()

    def make_room(self) -> None:
        """Makes the folder for records on hosts that are known to be well.

        Raises:
            SubmitFailed: it cannot be made. Names each host.
        """
        made = self._on_others(["mkdir", "-p", "-m", "700", "--", str(self._records)])
        if wrong := {host: one.why for host, one in made.items() if one.code != 0}:
            raise SubmitFailed(f"not all hosts are well. {_each(wrong)}")

    def _on_others(self, words: Sequence[str], text: str = "") -> Mapping[str, Any]:
        return on_each(
            self._others,
            lambda host: self._ssh.run(host, words, text=text, timeout_s=_MOST_S),
        )

    def argv(self, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """mpirun's line; only names of variables are in it, and the command."""
        env = {name: value for name, value in environ.items() if _VARIABLE.fullmatch(name)}
        mpi = OpenMpi(find_mpirun(sys.executable))
        words = [*mpi_options(env, self._slots), *command]
        return mpi.on_hosts(sum(self._slots.values()), words)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Of mpirun and ranks: what there is, and what lets them be on these hosts."""
        return {
            "OMPI_MCA_btl_sm_backing_directory": SHARED_MEMORY,
            **environ,
            **OpenMpi("").environment(),
            **mpi_settings(self._ssh, self._network, len(self._slots)),
            "DDL_RECORD_DIR": str(self._records),
            "DDL_OUTPUT": "-",
            "DDL_SLOTS": ",".join(map(str, self._slots.values())),
        }

    def finish(self) -> dict[str, str]:
        """Ends what is left on the hosts, and brings their records; ``left`` is what does not end.

        Returns:
            Each host that did not answer, and why.
        """
        program = Path(processes.__file__).read_text("utf-8")
        start = [sys.executable, "-SE", "-"]
        killed = self._on_others([*start, "DDL_RECORD_DIR", str(self._records)], program)
        silent = {host: one.why for host, one in killed.items() if one.code is None}
        self.left = [f"on {host} {one.why}" for host, one in killed.items() if one.code]
        self._others = [host for host in self._others if host not in silent]
        names = [f"rank-{rank}.json" for rank in range(sum(self._slots.values()))]
        said = self._on_others([*start, str(self._records), *names], _READ)
        self._on_others(["rm", "-rf", "--", str(self._records)])
        self._records.mkdir(mode=0o700, exist_ok=True)  # where hosts share even that
        for host, one in said.items():
            try:
                found = objects(one.text)[-1]
                texts = {name: str(found[name]) for name in names if name in found}
            except (LookupError, TypeError):
                silent[host] = one.why or "its ranks' records cannot be read"
                continue
            for name, text in texts.items():
                (self._records / name).write_text(text, "utf-8")
        return silent


def ailing(ssh: Ssh, slots: Mapping[str, int], shared: Path) -> dict[str, str]:
    """Which hosts are not well for ranks that go on from what others have left, and why.

    Args:
        ssh: how they are reached.
        slots: ranks on each.
        shared: a file that all of them must see.
    """
    looks = _looks(ssh, slots, shared)
    wrong = {look.host: "; ".join(look.wrong) for look in looks if look.wrong}
    for look in looks:
        if look.facts and not look.facts["sees_marker"]:
            wrong[look.host] = (
                f"it does not see {shared.parent}, where this host has what is committed. Let the "
                "current folder be on a file system that all hosts share, or CHECKPOINT_DIR name "
                "one that is"
            )
    return {host: why.rstrip(".") for host, why in wrong.items()}


def _looks(ssh: Ssh, slots: Mapping[str, int], marker: Path) -> list[preflight.Look]:
    """At the others of these hosts, which must be as this one is, if it has ranks, and see a file.

    Its clock is what theirs are judged by. Its packets tell nothing: it may reach them otherwise
    than whoever reaches it.
    """
    where = {"temporary files": Path("/tmp")}  # noqa: S108
    asked = preflight.Asked(sys.executable, max(slots.values()), marker, where, shared=True)
    others = [name for name in slots if not is_here(name)]
    here = _this_host(asked) if others and len(others) < len(slots) else None
    return preflight.look_at(ssh, others, asked, here)


def _this_host(asked: preflight.Asked) -> dict[str, Any] | None:
    """What it is like, as others are asked; None where that cannot be known."""
    # Where others are asked no variable says what Python finds.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    argv = [sys.executable, "-SE", probe.__file__, asked.question]
    try:
        said = subprocess.run(
            argv, env=environ, stdout=subprocess.PIPE, text=True, timeout=_MOST_S, check=True
        ).stdout
        return {**json.loads(said), "mtu": 0, "clock_s": 0.0}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _each(wrong: Mapping[str, str]) -> str:
    return " ".join(f"{host}: {why.rstrip('.')}." for host, why in wrong.items())
