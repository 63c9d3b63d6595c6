"""SIGKILL of a rank at a random moment: the others end soon, with an error and no wrong number."""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.driver import clean_environment, mpirun_command

LIMIT_S = 10.0
PHASES = ("start", "middle", "end")

# Keeps what mpirun watches alive after the rank has died, so that nobody but the ranks themselves
# ends the ranks. Leaves the exit code of the rank in $1/exit-<rank>, and stays until $1/release.
_SHIELD = """
folder=$1; shift
"$@" &
wait $!
echo $? > "$folder/exit-$OMPI_COMM_WORLD_RANK"
while [ ! -e "$folder/release" ]; do sleep 0.05; done
"""


@dataclass
class Killed:
    """One kill: what was tried, how long the others took to end, and what went wrong."""

    ranks: int
    transport: str
    phase: str
    alone: bool
    victim: int
    seconds: dict[int, float] = field(default_factory=dict)  # to the end of each other rank
    ends: dict[int, str] = field(default_factory=dict)  # "error 5", "ended by mpirun", "finished"
    faults: list[str] = field(default_factory=list)


class Journal:
    """What one rank has written. A rank that is killed leaves whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def lines(self) -> list[str]:
        return self._path.read_text().splitlines() if self._path.exists() else []

    def first(self, word: str) -> str | None:
        return next((line for line in self.lines() if line.split()[0] == word), None)

    def results(self) -> dict[int, str]:
        """Index of a collective to the hash of its result."""
        words = [line.split() for line in self.lines()]
        return {int(pair[0]): pair[1] for pair in words if len(pair) == 2 and pair[0].isdigit()}


def _wait_for(what: Callable[[], bool], limit_s: float) -> bool:
    until = time.monotonic() + limit_s
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def _marked(mark: str) -> list[int]:
    """Processes with this text in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


@contextlib.contextmanager
def _opened(pids: dict[int, int]) -> Iterator[dict[int, int]]:
    """Rank to pidfd, which stays this process's whatever becomes of its id."""
    opened: dict[int, int] = {}
    try:
        for rank, pid in pids.items():
            with contextlib.suppress(ProcessLookupError):
                opened[rank] = os.pidfd_open(pid)
        yield opened
    finally:
        for file in opened.values():
            os.close(file)


def kill_once(
    program: Path, *, ranks: int, transport: str, phase: str, alone: bool, chance: random.Random
) -> Killed | None:
    """Starts a job and kills a random rank of it. None if that rank had ended before.

    Args:
        phase: "start": from its first instruction on, before and while MPI starts; "middle": among
            its collectives; "end": after its last one, while it leaves.
        alone: mpirun does not learn of the death, and no rank tells another: each has to find out.
    """
    tried = Killed(ranks, transport, phase, alone, victim=chance.randrange(ranks))
    mark = f"ddl-soak-{uuid.uuid4().hex}"
    folder = Path(tempfile.mkdtemp(prefix="ddl-soak-"))
    (folder / "segments").mkdir()
    (folder / "sessions").mkdir()
    words = [
        *(str(program), "soak", f"folder={folder}", f"seed={chance.randrange(10**6)}"),
        f"collectives={60 if phase == 'end' else 10**7}",
        *(f"bytes={256 << 10}", f"alone={int(alone)}"),
    ]
    if alone:
        words = ["/bin/sh", "-c", _SHIELD, "shield", str(folder), *words]
    environment = clean_environment(
        DDL_TRANSPORT=transport,
        DDL_SOAK_JOB=mark,
        TMPDIR=str(folder / "sessions"),
        # Else segments of other jobs on this machine would be in the same folder.
        OMPI_MCA_btl_sm_backing_directory=str(folder / "segments"),
    )
    journals = {rank: Journal(folder / f"rank-{rank}") for rank in range(ranks)}
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(
            mpirun_command(ranks, *words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return _kill_and_watch(tried, job, journals, folder, mark, chance)
    finally:
        (folder / "release").touch()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        for pid in _marked(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _kill_and_watch(
    tried: Killed,
    job: subprocess.Popen[bytes],
    journals: dict[int, Journal],
    folder: Path,
    mark: str,
    chance: random.Random,
) -> Killed | None:
    mine = journals[tried.victim]
    word, longest_s = {"start": ("pid", 0.4), "middle": ("started", 1.0), "end": ("done", 0.02)}[
        tried.phase
    ]
    everybody = journals.values() if tried.alone else [mine]
    if not _wait_for(lambda: all(one.first(word) for one in everybody), 60):
        tried.faults.append(f"the job did not start: {(folder / 'output').read_text()}")
        return tried
    time.sleep(chance.random() * longest_s)

    said = {rank: one.first("pid") for rank, one in journals.items()}
    pids = {rank: int(line.split()[1]) for rank, line in said.items() if line}
    with _opened(pids) as processes:
        if tried.victim not in processes:
            return None
        try:
            signal.pidfd_send_signal(processes[tried.victim], signal.SIGKILL)
        except ProcessLookupError:
            return None
        killed_at = time.monotonic()
        left = mine.first("left") is not None
        others = {file: rank for rank, file in processes.items() if rank != tried.victim}
        poll = select.poll()
        for file in others:
            poll.register(file, select.POLLIN)
        while others and time.monotonic() < killed_at + LIMIT_S:
            for file, _ in poll.poll(100):
                tried.seconds[others.pop(file)] = time.monotonic() - killed_at
                poll.unregister(file)
        for rank in others.values():
            tried.faults.append(f"rank {rank} still runs {LIMIT_S:.0f} s after the kill")
    (folder / "release").touch()
    try:
        code = job.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        tried.faults.append(f"mpirun still runs {LIMIT_S:.0f} s after the ranks' end")
        return tried
    if left and code == 0:
        return None  # it had ended well, all but the exit itself
    if code == 0 and not tried.alone:
        tried.faults.append("mpirun's exit code is 0")
    _look_at_what_is_left(tried, journals, folder, mark)
    return tried


def _look_at_what_is_left(
    tried: Killed,
    journals: dict[int, Journal],
    folder: Path,
    mark: str,
) -> None:
    all_done = journals[tried.victim].first("done") is not None
    agreed: dict[int, str] = {}
    for rank, journal in journals.items():
        for index, hashed in journal.results().items():
            if agreed.setdefault(index, hashed) != hashed:
                tried.faults.append(f"rank {rank} has another result of collective {index}")
        if wrong := journal.first("WRONG"):
            tried.faults.append(wrong)
        if rank == tried.victim:
            continue
        error = journal.first("error")
        finished = journal.first("left") is not None
        if finished and not all_done:
            tried.faults.append(f"rank {rank} ended as if nothing had happened")
        if error:
            tried.ends[rank] = f"error {error.split()[1]}"
        else:
            tried.ends[rank] = "finished" if finished else "ended by mpirun"
        if tried.alone and not all_done:
            exited = folder / f"exit-{rank}"
            if error is None or not exited.exists() or exited.read_text().strip() == "0":
                tried.faults.append(f"rank {rank} did not end with an error of its own")
    # mpirun may need a moment to bury its children.
    if not _wait_for(lambda: not _marked(mark), LIMIT_S):
        tried.faults.append(f"processes are left: {_marked(mark)}")
    for path in (folder / "segments").iterdir():
        tried.faults.append(f"a segment of Open MPI is left: {path.name}")


def kills(program: Path, number: int, seed: int) -> Iterator[Killed]:
    """`number` kills over 2 to 4 ranks, both transports, all phases, with and without mpirun."""
    chance = random.Random(seed)
    ways = [("shm", False), ("shm", True), ("mpi", False)]
    done = too_late = 0
    while done < number:
        if too_late > 20 * number:
            raise RuntimeError(f"{too_late} jobs had ended before their kill came; {done} had not")
        transport, alone = ways[done % 3]
        phases = ("middle",) if alone else PHASES
        tried = kill_once(
            program,
            ranks=2 + done % 7 % 3,
            transport=transport,
            phase=phases[done // 3 % len(phases)],
            alone=alone,
            chance=chance,
        )
        if tried is None:
            too_late += 1
            continue
        done += 1
        yield tried
