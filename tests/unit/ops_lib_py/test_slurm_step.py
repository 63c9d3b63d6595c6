"""What a Slurm job's own step does when Slurm asks the job to make room."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import until

TOLD = """
import signal, sys, time
times = []
signal.signal(signal.SIGURG, lambda *_: times.append(1) or print(len(times), flush=True))
print("up", flush=True)
while len(times) < 2:
    time.sleep(0.05)
"""


def step(*words: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "ddl_ops.slurm_step", *map(str, words)])


def blocks_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (blocked,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    return bool(int(blocked, 16) >> (signal.SIGTERM - 1) & 1)


def waits_for_it(pid: int) -> bool:
    # While it does, the signal is not blocked. Source: rt_sigtimedwait of x86-64 and of aarch64.
    return Path(f"/proc/{pid}/syscall").read_text().split()[0] in ("128", "137")


def test_it_tells_mpirun_again_and_again_and_leaves_a_note(tmp_path):
    note = tmp_path / "make-room"
    with subprocess.Popen([sys.executable, "-c", TOLD], stdout=subprocess.PIPE) as mpirun:
        assert mpirun.stdout is not None and mpirun.stdout.readline() == b"up\n"
        one = step("--tell", mpirun.pid, note)
        until(lambda: waits_for_it(one.pid), 10)
        assert not note.exists()
        one.terminate()
        assert mpirun.wait(60) == 0  # it was told twice
    assert one.wait(60) == 0
    assert note.exists()


def test_the_end_of_a_job_is_no_wish_for_its_place(tmp_path):
    # Slurm ends the step as it asks it, when mpirun has ended.
    ended = subprocess.Popen(["true"])
    ended.wait()
    one = step("--tell", ended.pid, tmp_path / "make-room")
    until(lambda: waits_for_it(one.pid), 10)
    one.terminate()
    assert one.wait(60) == 0
    assert not (tmp_path / "make-room").exists()


def test_a_daemon_of_mpirun_is_not_ended_by_it():
    daemon = step("sleep", "60")
    try:
        until(lambda: Path(f"/proc/{daemon.pid}/comm").read_text() == "sleep\n", 10)
        os.kill(daemon.pid, signal.SIGTERM)
        assert blocks_sigterm(daemon.pid)
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(0.3)
    finally:
        daemon.kill()
        daemon.wait()
