"""A training that harms whom it can: in each folder that it may write, and by what it leaves alive.

``python hostile.py HOST KIND …``: HOST is a folder with files that are none of its business; KIND
is one of those below, perhaps with ``-in-model`` or ``-in-checkpoints``, where nothing may be left
out. It ends well, as far as anybody can see.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from pathlib import Path

HOST = Path(sys.argv[1]).absolute()
RESULT, CHECKPOINTS, EXPERIMENT, LOGS, STATE = (
    Path(os.environ[name])
    for name in ("RESULT_DIR", "CHECKPOINT_DIR", "EXPERIMENT_DIR", "LOG_DIR", "JOB_STATE_DIR")
)
DEEP = "[" * 100_000
NUMBERS = ('{"step": [1]}', '{"loss": "\\ud800"}', f'{{"step": {"9" * 5000}}}', '{"step": NaN}')


def links(folder: Path) -> None:
    """To files, folders, devices, nowhere, themselves, and up."""
    targets = {
        "file": HOST / "secret.txt",
        "folder": HOST / "private",
        "environment": Path("/proc/self/environ"),
        "device": Path("/dev/zero"),
        "nowhere": HOST / "none",
        "itself": folder / "link-itself",
        "up": folder.parent,
    }
    for name, target in targets.items():
        (folder / f"link-{name}").symlink_to(target)
    os.link(HOST / "hard.txt", folder / "hard.txt")  # no link that anybody can tell


def specials(folder: Path) -> None:
    """What blocks whoever opens it, or is nothing to read."""
    os.mkfifo(folder / "fifo")
    os.chdir(folder)  # their paths are short
    socket.socket(socket.AF_UNIX).bind("socket")
    os.chdir(os.environ["MODEL_DIR"])


def names(folder: Path) -> None:
    """That no one expects, or that are ours."""
    odd = (b"line\nbreak", b"\xff\xfe", b"-rf", b"..hidden", b"x" * 255, "\u202eright".encode())
    odd += (
        b"\x1b[2J",
        b"%2e%2e",
        b"_SUCCESS",
        b"lineage.json",
        b" ",
        b"{{ ds }}",
        b"a\tb",
        b"a\\b",
    )
    for name in odd:
        Path(os.fsdecode(os.path.join(os.fsencode(folder), name))).write_text("odd")
    deep = folder
    for _ in range(60):
        deep = deep / ("d" * 60)
    os.makedirs(deep)
    (deep / "f").write_text("deep")


def reports() -> None:
    """Lines that are no progress, and a long one on the output."""
    with open(os.environ["DDL_PROGRESS"], "a") as file:
        for line in (DEEP, *NUMBERS, "x" * (4 << 20), '{"step": 5}'):
            file.write(line + "\n")
    sys.stdout.buffer.write(b"y" * (8 << 20) + b"\n\x1b]0;title\x07\x00\xff\n")
    (STATE / "stats.json").write_text(DEEP)


def replaced() -> None:
    """Airflow's own files by links to those of the host."""
    for path in (STATE / "progress.jsonl", STATE / "stats.json", LOGS / "launcher.log"):
        path.unlink(missing_ok=True)
        path.symlink_to(HOST / "secret.txt")
    (LOGS / "rank-1.log").symlink_to(HOST / "secret.txt")
    shutil.rmtree(STATE / "lineage", ignore_errors=True)
    (STATE / "lineage").symlink_to(HOST / "private")


def records() -> None:
    """That which says how this rank ends, by what cannot be replaced."""
    path = Path(os.environ["DDL_RECORD_DIR"]) / "rank-0.json"
    path.unlink()
    path.mkdir()
    (path / "link").symlink_to(HOST / "record.json")


def many() -> None:
    """Files, as many as are asked for."""
    folder = RESULT / "many"
    folder.mkdir()
    for number in range(int(os.environ.get("PARAM_MANY", "2000"))):
        (folder / str(number)).touch()


def daemons() -> None:
    """Each out of its session, its parent and its group; the last without its environment."""
    for number, environment in enumerate((dict(os.environ), {}, {"PATH": os.defpath})):
        if os.fork():
            os.wait()
            continue
        os.setsid()
        if os.fork():
            os._exit(0)
        code = (
            "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "signal.signal(signal.SIGHUP, signal.SIG_IGN); "
            f"open({str(HOST / 'pid-')!r} + {str(number)!r}, 'w').write(str(os.getpid())); "
            "time.sleep(600)"
        )
        for descriptor in range(3, 64):
            try:
                os.close(descriptor)
            except OSError:
                continue
        os.execve(sys.executable, [sys.executable, "-c", code], environment)
    while len(list(HOST.glob("pid-*"))) < 3 or not all(p.read_text() for p in HOST.glob("pid-*")):
        time.sleep(0.02)


def main() -> None:
    model = RESULT / "model"
    model.mkdir(exist_ok=True)
    (model / "saved_model.pb").write_bytes(b"a model")
    EXPERIMENT.mkdir(parents=True, exist_ok=True)
    print(json.dumps(sys.argv))
    for kind in sys.argv[2:]:
        if kind in ("links", "specials", "names"):
            for folder in (RESULT, EXPERIMENT, LOGS, STATE, Path.cwd()):
                globals()[kind](folder)
        elif kind.endswith("-in-checkpoints"):
            globals()[kind.removesuffix("-in-checkpoints")](CHECKPOINTS)
        elif kind.endswith("-in-model"):
            globals()[kind.removesuffix("-in-model")](model)
        else:
            globals()[kind]()


main()
