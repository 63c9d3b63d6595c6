"""What Open MPI puts into /dev/shm and $TMPDIR is gone after a job, whoever was killed and when."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ddl_airflow.launchers.processes import kill_marked, marked
from tests.limits import within
from tests.soak.driver import clean_environment

SHARED_MEMORY = Path("/dev/shm")
SOON_S = 15.0
# With shared memory of ours and, by a script's own hand, of Open MPI's.
SCRIPT = """
    import os, time
    from pathlib import Path
    from mpi4py import MPI
    MPI.COMM_WORLD.allreduce(1)
    Path(os.environ["PLACE"], f"up-{MPI.COMM_WORLD.rank}").write_text(str(os.getpid()))
    time.sleep(60)
"""


def wait_for(what: Callable[[], object]) -> bool:
    deadline = time.monotonic() + within(SOON_S)
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Job:
    """`ddl-run` with two ranks. `place` is for the script's files, `temporary` its $TMPDIR."""

    def __init__(self, folder: Path) -> None:
        self.place, self.temporary = folder / "place", folder / "temporary"
        self.place.mkdir()
        self.temporary.mkdir()
        script = folder / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        self.mark = uuid.uuid4().hex
        self._seen: set[int] = set()  # the ids of all its processes
        call = "import sys; from ddl_airflow.run import main; sys.exit(main())"
        environment = clean_environment(
            TMPDIR=str(self.temporary), PLACE=str(self.place), DDL_TEST_JOB=self.mark
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", call, "--np", "2", sys.executable, str(script)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait_until_up(self) -> list[int]:
        """The ids of the ranks' scripts."""
        files = [self.place / f"up-{rank}" for rank in range(2)]
        assert wait_for(lambda: all(one.exists() and one.read_text() for one in files))
        return [int(one.read_text()) for one in files]

    def running(self) -> list[int]:
        """The ids of its processes."""
        pids = marked("DDL_TEST_JOB", self.mark)
        self._seen |= set(pids)
        return pids

    def files(self) -> set[Path]:
        """What the job has put into shared memory or its temporary folder, and is there now."""
        found = set(self.temporary.iterdir())
        running = self.running()
        for pid in self._seen:  # also those that have ended
            found |= set(SHARED_MEMORY.glob(f"ddl-mpi-{pid}-*"))
        for pid in running:
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                paths = [Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line]
                found |= {path for path in paths if path.exists()}
        return found

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ended(self) -> bool:
        return self.process.poll() is not None and not self.running()


@pytest.fixture
def job(mpirun: str, tmp_path: Path) -> Iterator[Job]:
    one = Job(tmp_path)
    yield one
    kill_marked("DDL_TEST_JOB", one.mark)
    one.process.wait()


@pytest.mark.parametrize(
    "who", ["one rank", "both ranks", "mpirun", "ddl-run", "all of it", "nobody"]
)
def test_nothing_is_left_whoever_is_killed(job: Job, who: str) -> None:
    ranks = job.wait_until_up()
    files = job.files()
    assert files  # so the test looks at the right places
    if who == "nobody":
        job.process.terminate()
    elif who == "all of it":
        kill_marked("DDL_TEST_JOB", job.mark)
    else:
        mpirun = [
            pid
            for pid in marked("DDL_TEST_JOB", job.mark)
            if "-n\0002\0" in Path(f"/proc/{pid}/cmdline").read_text()
        ]
        whom = {"one rank": ranks[:1], "both ranks": ranks, "mpirun": mpirun}
        job.kill(whom.get(who, [job.process.pid]))
    assert wait_for(job.ended)
    assert wait_for(lambda: not job.files() and not any(map(Path.exists, files))), files


@pytest.mark.parametrize("who", ["ddl-run", "all of it"])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_is_left_when_it_is_killed_while_it_starts(job: Job, seed: int, who: str) -> None:
    chance = random.Random(seed)
    assert wait_for(job.files)
    time.sleep(chance.uniform(0.0, 3.0))  # the ranks begin two to three seconds after that
    files = job.files()
    if who == "all of it":
        kill_marked("DDL_TEST_JOB", job.mark)
    else:  # as by `kill -9`; its ranks see it
        job.kill([job.process.pid])
    assert wait_for(job.ended)
    assert wait_for(lambda: not job.files() and not any(map(Path.exists, files))), files
