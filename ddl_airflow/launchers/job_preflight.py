"""The look at the nodes of a scheduler's job, in it and before its ranks start.

``python -m ddl_ops.nodes --job … -- WORD ...`` runs where mpirun is to run, under the
ranks' Python, and becomes the words if all nodes are well. Else it ends with ``UNWELL``, and what
ails which node is in the job's log, and for who explains the job's end in a file beside the
records of its ranks.

One mpirun starts a process on each node, which says what that is like (``probe.py``), and then
reduces with each other one (``ddl_ops.preflight``). Where a node said nothing, because mpirun gave
up on all of them, it is asked alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.errors import FileRefused
from ddl_airflow.launchers import preflight
from ddl_airflow.launchers.mpirun import OpenMpi
from ddl_airflow.launchers.remote import on_each

# Of this program; mpirun's own codes are others. Source: sysexits.h, EX_OSERR.
UNWELL = 71
_FILE = "preflight.json"
# Under this name, which no host has, what is no node's fault.
_ELSEWHERE = ""
_NAMES_S = 30.0
# Nodes that nobody has used today read their Python from a slow file system, all at once.
_START_S = 120.0
_LONGEST = 1000


def words(python: str, record_dir: Path, slots: int, hostfile: str = "") -> list[str]:
    """The command line, to be followed by what is to run then.

    Args:
        python: the ranks'.
        record_dir: of the job.
        slots: ranks on each node.
        hostfile: mpirun's; empty: the nodes are those that Slurm has given to the job.
    """
    given = ["--hostfile", hostfile] if hostfile else []
    asked = ["--python", python, "--slots", str(slots), "--records", str(record_dir), *given]
    return [python, "-m", "ddl_ops.nodes", "--job", *asked, "--"]


def unwell(record_dir: Path, root: Path, on: Mapping[str, str] | None = None) -> str:
    """Why a job has started no rank, as far as the look at its nodes knows; empty: it does not.

    Args:
        record_dir: of the job.
        root: folder beneath which no link is followed.
        on: what a person is told of a node, by its name.
    """
    try:
        told = read_object(record_dir / _FILE, root)
    except (OSError, ValueError, FileRefused):
        return ""
    if elsewhere := str(told.pop(_ELSEWHERE, ""))[:_LONGEST]:
        if any(record_dir.glob("rank-*.json")):
            return ""
        return (
            f"No rank has started: {elsewhere}. What starts them has not used the hosts that it "
            "was given; logs/launcher.log has its words."
        )
    wrong = [f"{(on or {}).get(host, host)}: {str(why)[:_LONGEST]}." for host, why in told.items()]
    return f"No rank was started, for not all nodes are well. {' '.join(wrong)}" if wrong else ""


class JobPreflight:
    """One look.

    Args:
        python, records, slots, hostfile: as ``words`` has them.
    """

    def __init__(self, python: str, records: Path, slots: int, hostfile: str) -> None:
        self._options = ["--hostfile", hostfile] if hostfile else []
        self._hosts = _of_file(hostfile) if hostfile else _of_slurm()
        self._asked = preflight.Asked(
            python,
            slots,
            records,
            {"the workspace": records, "temporary files": Path("/tmp")},  # noqa: S108
            clock=f"that of {self._hosts[0]}",
        )

    def wrong(self) -> dict[str, str]:
        """What ails which node, or under no name all of them; empty: all are well. Says it, too."""
        began = time.monotonic()
        hosts = self._hosts
        said, why = self._run(hosts)
        found = {one["look"]["host"]: one["look"] for one in said if "look" in one}
        if elsewhere := found.keys() - {*hosts}:
            # No other nodes would mend it. Ranks are tried all the same, for the two may only
            # call a node by different names: where ranks run decides.
            why = f"mpirun uses {', '.join(sorted(elsewhere))}, and not {_few(hosts)}"
            _say(why)
            return {_ELSEWHERE: why}
        clocks = dict.fromkeys(hosts, 0.0)
        for one in said:
            clocks |= zip(one.get("hosts", ()), one.get("clocks", ()), strict=False)
        silent = [host for host in hosts if host not in found]
        alone = on_each(silent, lambda host: self._run([host])) if silent else {}
        for of_one, _ in alone.values():
            found |= {one["look"]["host"]: one["look"] for one in of_one if "look" in one}
        looks = [
            preflight.Look(host, {**found[host], "clock_s": clocks[host]})
            if host in found
            else preflight.Look(host, wrong=(f"does not answer: {alone[host][1]}",))
            for host in hosts
        ]
        wrong = {
            look.host: "; ".join(look.wrong)
            for look in preflight.judged(looks, self._asked)
            if look.wrong
        }
        speeds: preflight.Speeds = {}
        if not wrong:
            first = [preflight.reductions(said, len(hosts), why)]

            def measure(some: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
                if first and len(some) == len(hosts):
                    return _numbered(some, *first.pop())
                again, why = self._run(some)
                return _numbered(some, *preflight.reductions(again, len(some), why))

            speeds, wrong = preflight.linked(hosts, measure)
        for host, what in wrong.items():
            _say(f"{host} is not well: {what}")
        for line in preflight.slow_links(speeds):
            _say(line)
        took_s = time.monotonic() - began
        _say(f"looked at {len(hosts)} nodes in {took_s:.1f} s{_slowest(speeds)}")
        return wrong

    def _run(self, hosts: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
        """A process on each of these nodes."""
        program = [self._asked.python, "-m", "ddl_ops.nodes", "--look", self._asked.question]
        mpirun, *rest = OpenMpi("mpirun").argv(len(hosts), program, 1)
        some = ["--host", ",".join(hosts)] if len(hosts) < len(self._hosts) else []
        return preflight.run_mpirun(
            [mpirun, *self._options, *some, *rest], len(hosts), start_s=_START_S
        )


def _numbered(
    hosts: Sequence[str], said: dict[str, Any] | None, why: str
) -> tuple[dict[str, Any] | None, str]:
    """With the numbers of hosts in place of those of ranks."""
    if said is None or set(said["hosts"]) != set(hosts):
        return None, why or f"mpirun used {', '.join(said['hosts']) if said else 'no host'}"
    at = [hosts.index(name) for name in said["hosts"]]
    pairs = [[at[one], at[other], speed] for one, other, speed in said["pairs"]]
    return {"pairs": pairs, "wrong": [[at[one], at[other]] for one, other in said["wrong"]]}, ""


def _of_file(hostfile: str) -> list[str]:
    lines = Path(hostfile).read_text("utf-8").splitlines()
    return [line.split()[0] for line in lines if line.strip()]


def _of_slurm() -> list[str]:
    said = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
        capture_output=True,
        text=True,
        check=True,
        timeout=_NAMES_S,
    )
    return said.stdout.split()


def _slowest(speeds: preflight.Speeds) -> str:
    if not speeds:
        return ""
    (one, other), speed = min(speeds.items(), key=lambda pair: pair[1])
    return f"; {one} and {other} reduce {speed / 2**20:.0f} MiB a second, and no two less"


def _few(hosts: Sequence[str]) -> str:
    more = f" and {len(hosts) - 3} more" if len(hosts) > 3 else ""
    return ", ".join(hosts[:3]) + more


def _say(line: str) -> None:
    print(f"ddl: before the ranks start: {line}", flush=True)


def main(argv: Sequence[str]) -> int:
    """Becomes the words after ``--``, or returns UNWELL."""
    parser = argparse.ArgumentParser(prog="python -m ddl_ops.nodes --job")
    parser.add_argument("--python", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--hostfile", default="")
    parser.add_argument("program", nargs="+")
    given = parser.parse_args(argv)
    try:
        look = JobPreflight(given.python, given.records, given.slots, given.hostfile)
        if wrong := look.wrong():
            (given.records / _FILE).write_text(json.dumps(wrong), "utf-8")
            if _ELSEWHERE not in wrong:
                return UNWELL
    except (OSError, LookupError, ValueError, subprocess.SubprocessError) as error:
        # Such as a node without scontrol: it is no look that makes ranks run.
        _say(f"nodes could not be looked at: {type(error).__name__}: {error}")
    os.execvp(given.program[0], given.program)
