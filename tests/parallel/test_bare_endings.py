"""Endings of Python scripts, without TensorFlow: each is over soon and says what happened."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.limits import within
from tests.soak.driver import clean_environment, mpirun_command

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).resolve().parent / "scripts" / "bare_ends.py"
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "mpi"])
TOTAL = "total [2.0, 1.0]"


def job(driver: Path, how: str, *shim: str, ranks: int = 2) -> list[str]:
    library = driver.with_name("libengine.so")
    return mpirun_command(ranks, *shim, sys.executable, str(SCRIPT), str(library), how)


@TRANSPORTS
@pytest.mark.parametrize(
    "how",
    [
        *("sys.exit", "in a thread", "in a daemon thread", "fork", "mpi4py first", "mpi4py second"),
        "caught and kept",
    ],
)
def test_job_ends_well(driver: Path, run_command: Callable, how: str, transport: str) -> None:
    ended = run_command(job(driver, how), {"DDL_TRANSPORT": transport}, 30)
    assert ended.returncode == 0, ended.output
    for rank in range(2):
        said = ended.lines_of(rank)
        first = f"mpi4py: rank {rank} of 2"
        assert said[: 2 if how == "mpi4py first" else 1] == (
            [first, TOTAL] if how == "mpi4py first" else [TOTAL]
        )
        if how == "fork":
            assert said[1:] == ["child 7", TOTAL, "end of script"]
        elif how == "mpi4py second":
            assert said[1:] == ["mpi4py: True 1", "end of script"]
        elif how == "mpi4py first":
            assert said[2:] == ["finalized by mpi4py", "end of script"]
        elif how != "sys.exit":
            assert "end of script" in said
    if how == "in a thread":
        left = [line for line in ended.lines_of(0) if line.startswith("error")]
        assert len(left) == 1 and "rank 1 has already ended its script" in left[0], ended.output


def test_exception_that_the_scripts_own_hook_shows_ends_all(
    driver: Path, ddl_run: Callable
) -> None:
    how = "raise past a hook of the script's own"
    ended = ddl_run("--np", 2, "python", SCRIPT, driver.with_name("libengine.so"), how)
    assert ended.returncode != 0
    assert ended.lines_of(1) == [TOTAL, "ValueError: no space left"], ended.output
    assert ended.lines_of(0) == [TOTAL], ended.output  # within its sleep
    assert re.search(
        r"rank 1 of 2 on \S+ raised ValueError at \S*bare_ends.py:\d+: no space", ended.output
    )


@TRANSPORTS
def test_uncaught_exception_ends_all_with_its_traceback(
    driver: Path, run_command: Callable, transport: str, tmp_path: Path
) -> None:
    # mpirun may drop what a rank wrote just before it aborted.
    kept = tmp_path / "stderr"
    keep = f'if [ "$PMIX_RANK" = 1 ]; then exec "$@" 2>{shlex.quote(str(kept))}; fi; exec "$@"'
    command = job(driver, "raise", "sh", "-c", keep, "sh")
    ended = run_command(command, {"DDL_TRANSPORT": transport}, 30)
    assert ended.returncode != 0
    assert "end of script" not in ended.output
    said = kept.read_text()
    traceback = said.index("ValueError: this rank has had enough")
    assert said.index("Traceback (most recent call last)") < traceback
    assert "MPI_ABORT was invoked" in ended.output + said


@TRANSPORTS
def test_rank_that_vanishes_is_a_failure(
    driver: Path, run_command: Callable, transport: str
) -> None:
    ended = run_command(job(driver, "os._exit"), {"DDL_TRANSPORT": transport}, 30)
    assert ended.returncode != 0, ended.output
    assert ended.lines_of(1) == [TOTAL, "gone"]
    assert "end of script" not in ended.output


def test_rank_that_exits_fails_the_others(driver: Path, run_command: Callable) -> None:
    ended = run_command(job(driver, "exit 3"), {}, 30)
    assert ended.returncode != 0
    assert ended.seconds_since("exiting") < within(10)
    assert 'AllReduceN "total": rank 1 has already ended its script' in ended.output


def test_exit_code_of_all_ranks_is_kept(driver: Path, run_command: Callable) -> None:
    ended = run_command(job(driver, "exit 3 together"), {}, 30)
    assert ended.returncode == 3, ended.output


def test_missing_root_is_named_on_every_rank(driver: Path, run_command: Callable) -> None:
    limit = f"{within(3):.1f}"
    ended = run_command(job(driver, "missing root"), {"DDL_STALL_TIMEOUT": limit}, 60)
    said = f"{{}} for rank 0 so far (limit {limit} s)"
    ended.require_warned(f'ddl: rank 1: AllReduceN "total": {said}', limit)
    first, second = ended.lines_of(0), ended.lines_of(1)
    assert len(first) == len(second) == 4, ended.output
    assert first[1].startswith("error 3: ") and second[1].startswith("error 3: "), ended.output
    assert f"rank 1 waited longer than {limit} s for rank 0 and gave up" in first[1]
    assert f"rank 0 did not come within {limit} s" in second[1]
    assert ended.returncode == 0, ended.output


def test_limit_counts_from_the_arrival_of_rank_0(driver: Path, run_command: Callable) -> None:
    ended = run_command(job(driver, "slow member", ranks=3), {"DDL_STALL_TIMEOUT": "5"}, 60)
    assert ended.returncode == 0, ended.output
    for rank in range(3):
        assert ended.lines_of(rank) == ["total [3.0, 3.0]"] * 2 + ["end of script"]


def test_ranks_wait_for_a_late_one_at_the_end(driver: Path, run_command: Callable) -> None:
    stall = f"{within(0.5):.2f}"
    ended = run_command(job(driver, "late end", ranks=3), {"DDL_STALL_TIMEOUT": stall}, 60)
    assert ended.returncode == 0, ended.output
    assert "so far" not in ended.output
    for rank in range(3):
        assert ended.lines_of(rank) == ["total [3.0, 3.0]", "end of script"]


# Keeps a rank connected to its host's PMIx server for a while when MPI_Finalize has all but ended.
SLOW_SHUTDOWN = r"""
#include <dlfcn.h>
#include <unistd.h>

extern "C" int shutdown(int file, int how) {
  static const bool waited = (sleep(2), true);
  return waited ? reinterpret_cast<int (*)(int, int)>(dlsym(RTLD_NEXT, "shutdown"))(file, how) : -1;
}
"""

# Lets that server hear of it a while after the rank has disconnected, as a busy kernel may.
LATE_SHUTDOWN = r"""
#include <dlfcn.h>
#include <unistd.h>

extern "C" int shutdown(int file, int how) {
  static auto* shut = reinterpret_cast<int (*)(int, int)>(dlsym(RTLD_NEXT, "shutdown"));
  static bool first = true;
  if (!first) return shut(file, how);
  first = false;
  if (fork() != 0) return 0;
  sleep(2);
  _exit(shut(file, how));
}
"""


# Keeps mpirun's thread a while between its answer to PMIx_Finalize, which it leaves to PMIx's
# thread, and the mark that this rank is finalized.
SLOW_ANSWER = r"""
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

static thread_local bool left = false;

extern "C" ssize_t write(int file, const void* text, size_t size) {
  static auto* next = reinterpret_cast<decltype(&write)>(dlsym(RTLD_NEXT, "write"));
  static const bool in_mpirun = strcmp(program_invocation_short_name, "prterun") == 0;
  left = in_mpirun && gettid() == getpid() && size == 8;  // wakes the other thread: eventfd(2)
  return next(file, text, size);
}

extern "C" int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  static auto* next =
      reinterpret_cast<int (*)(pthread_mutex_t*)>(dlsym(RTLD_NEXT, "pthread_mutex_unlock"));
  const int code = next(mutex);
  if (left) {
    left = false;
    usleep(20000);
  }
  return code;
}
"""


@pytest.mark.parametrize(
    "slow, of",
    [(SLOW_SHUTDOWN, "rank"), (LATE_SHUTDOWN, "rank"), (SLOW_ANSWER, "mpirun")],
    ids=["slow", "late", "answer"],
)
def test_no_program_of_a_command_meets_the_one_before(
    driver: Path, run_command: Callable, tmp_path: Path, slow: str, of: str
) -> None:
    """Open MPI 5.0.11 gave it the addresses of that one, and the job hung: PMIx's issue 4113."""
    source, library = tmp_path / "slow.cc", tmp_path / "slow.so"
    source.write_text(slow)
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library, "-ldl"], check=True)
    is_0 = '[ "$OMPI_COMM_WORLD_RANK" = 0 ]'
    program = f"{driver} 'nobody is missing'"
    # The second program of rank 1 is in MPI_Init when its first one is seen to disconnect.
    first = f"{is_0} || export LD_PRELOAD={library}" if of == "rank" else ":"
    command = ("sh", "-c", f"({first}; {program}) && ({is_0} && sleep 3; {program})")
    preload = {"LD_PRELOAD": str(library)} if of == "mpirun" else {}
    ended = run_command(mpirun_command(2, *command), preload, 30)
    assert ended.returncode == 0, ended.output
    assert ended.lines_of(0) == ended.lines_of(1) == ["0 201"] * 2 * 51


@pytest.mark.parametrize("how", ["mpi4py funneled", "mpi4py funneled on one"])
def test_lower_thread_level_is_refused_and_says_the_fix(
    driver: Path, run_command: Callable, how: str
) -> None:
    ended = run_command(job(driver, how), {}, 30)
    assert ended.returncode != 0
    assert "end of script" not in ended.output
    assert "RuntimeError: ddl could not start: MPI was initialised before ddl" in ended.output
    assert "mpi4py.rc.thread_level = 'multiple'" in ended.output


@TRANSPORTS
@pytest.mark.parametrize("target", ["rank", "shim", "mpirun"])
def test_sigterm_ends_the_job(driver: Path, target: str, transport: str) -> None:
    shim = [sys.executable, "-m", "ddl_ops.rank", "--"] if target == "shim" else []
    paths = [REPOSITORY / "ops_lib" / "python", SCRIPT.parent]
    process = subprocess.Popen(
        job(driver, "SIGTERM", *shim),
        env=clean_environment(DDL_TRANSPORT=transport, PYTHONPATH=os.pathsep.join(map(str, paths))),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    pids: list[int] = []
    heard = ""
    try:
        assert process.stdout is not None
        while len(pids) < 2:
            line = process.stdout.readline()
            assert line, heard
            heard += line
            pids = [int(pid) for pid in re.findall(r"> pid (\d+)\n", heard)]
        parent = int(Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        start = time.monotonic()
        os.kill({"rank": pids[0], "shim": parent, "mpirun": process.pid}[target], signal.SIGTERM)
        heard += process.communicate(timeout=within(30))[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode != 0, heard
    assert "end of script" not in heard
    # mpirun ends before the last of its ranks is gone.
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() - start < within(10), heard
        time.sleep(0.05)
