from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ddl_airflow.launchers import tether
from tests.limits import within


def gone(pid: int, limit_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within(limit_s)
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # ended; whoever adopted it has not looked yet
            return True
        time.sleep(0.02)
    return False


def test_tethered_program_replaces_the_tether_and_keeps_its_exit_code():
    script = "import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(5)"
    argv = [sys.executable, "-c", script, "a b", "--x"]
    tethered = [sys.executable, "-SE", tether.__file__, str(os.getpid()), *argv]
    process = subprocess.Popen(tethered, stdout=subprocess.PIPE)
    said, _ = process.communicate(timeout=within(20))
    assert said.decode().strip() == f"{process.pid} ['a b', '--x']"
    assert process.returncode == 5


def test_tethered_program_ends_when_its_starter_is_killed():
    starter = (
        "import os, subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(60)']\n"
        f"argv = [sys.executable, '-SE', {tether.__file__!r}, str(os.getpid()), *sleep]\n"
        "p = subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True)\n"
        "p.stdout.readline()\n"
        "print(p.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        os.kill(pid, 0)
        process.send_signal(signal.SIGKILL)
    assert gone(pid)


def test_nothing_starts_when_the_starter_is_gone_already(tmp_path):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    mark = tmp_path / "started"
    argv = [sys.executable, "-SE", tether.__file__, str(ended.pid), "/bin/touch", str(mark)]
    done = subprocess.run(argv, stderr=subprocess.PIPE, check=False)
    assert done.returncode != 0
    assert f"process {ended.pid}" in done.stderr.decode()
    assert not mark.exists()
