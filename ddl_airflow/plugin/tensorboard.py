"""TensorBoard on demand: a process for a training, on this host, for as long as somebody looks.

What event files hold was written by ranks, and TensorBoard's page is a program of others. In
Airflow's origin it could do whatever its reader may do there. So its page has an origin of its own,
which is nobody's (``Content-Security-Policy: sandbox`` without ``allow-same-origin``): it reads
nothing of Airflow's and is sent no cookies. It shows who it is by its address instead, which holds
a signed token for one training. Airflow's rights are asked when that is given out.

Each host of api-servers runs its own. All workers of a host share a folder in which each
TensorBoard has a socket: the time of its file is when it was used last, and who removes the file
ends the process. So nobody needs to know which worker began one; and since any worker can check a
token, one that has ended is started again where the next request arrives.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import importlib.util
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddl_airflow.core.beneath import check_folder
from ddl_airflow.core.errors import FileRefused, TensorBoardRefused
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.plugin.tensorboard_process import Served
from ddl_airflow.plugin.training import experiment_of, read_record

# Who has looked at one within that time keeps it, whoever else wants one.
_IN_USE_S = 60.0
_START_S = 60.0
_END_S = 5.0
_LOOK_S = 0.05
_MOST_ENTRIES = 20_000
_LONGEST_PATH = 107  # of a socket: unix(7)
# How long an address leads to a training; who may still read it gets another one by the button.
_ADDRESS_S = 12 * 3600.0
# Of the environment, which may hold Airflow's keys, what a Python needs.
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


class Tokens:
    """Signed words that lead to one training, for some hours.

    Args:
        key: a secret that all api-servers share.
    """

    def __init__(self, key: str) -> None:
        if not key:
            raise TensorBoardRefused(
                "Neither [api] secret_key nor [api_auth] jwt_secret is set, by which api-servers "
                "know each other's addresses. Set [api] secret_key, the same for all of them."
            )
        self._key = hmac.digest(key.encode(), b"ddl-airflow: TensorBoard", "sha256")

    def make(self, dag_id: str, training_id: str) -> str:
        """A token for a training, fit for a path."""
        said = json.dumps([dag_id, training_id, round(time.time() + _ADDRESS_S)]).encode()
        return f"{_text(said)}.{_text(self._mac(said))}"

    def read(self, token: str) -> tuple[str, str] | None:
        """DAG and training of a token; None if it is none of ours, or too old."""
        if not self.signed(token):
            return None
        dag_id, training_id, until = json.loads(_bytes(token.partition(".")[0]))
        return (dag_id, training_id) if time.time() < until else None

    def signed(self, token: str) -> bool:
        """Whether it is one of ours, however old."""
        words, _, mac = token.partition(".")
        try:
            said, told = _bytes(words), _bytes(mac)
        except ValueError:
            return False
        return hmac.compare_digest(self._mac(said), told)

    def _mac(self, said: bytes) -> bytes:
        return hmac.digest(self._key, said, "sha256")


def _text(said: bytes) -> str:
    return base64.urlsafe_b64encode(said).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))


def folders_of(layout: RunLayout) -> dict[str, Path]:
    """Where a training may leave event files, by what they are called in TensorBoard."""
    experiment = experiment_of(layout, read_record(layout))
    return {"logs": layout.logs, "result": layout.result, "experiment": experiment}


def has_events(layout: RunLayout, folders: dict[str, Path]) -> bool:
    """Whether there is an event file among the first files of the folders."""
    seen = 0
    for top in folders.values():
        with suppress(FileRefused, OSError):
            check_folder(top, layout.workspace)
            for _, names, files in os.walk(top):
                if any("tfevents" in name for name in files):
                    return True
                seen += len(names) + len(files)
                if seen > _MOST_ENTRIES:
                    return True  # TensorBoard will see
    return False


class TensorBoards:
    """Those of this host.

    Args:
        idle_s: after how many seconds without a request one ends.
        most: how many there may be at once.
        folder: of their sockets; by default one of this user and workspace among temporary files.
    """

    def __init__(
        self, workspace: Path, *, idle_s: float, most: int, folder: Path | None = None
    ) -> None:
        self._workspace, self._idle_s, self._most = workspace, idle_s, most
        name = hashlib.sha256(os.fsencode(workspace)).hexdigest()[:8]
        self._folder = folder or Path(
            tempfile.gettempdir(), f"ddl-tensorboard-{os.getuid()}-{name}"
        )
        # Each ends with the pipe that its entry holds.
        self._started: list[subprocess.Popen[str]] = []

    def socket(self, layout: RunLayout) -> Path:
        """Where the one of a training listens, if it runs."""
        name = hashlib.sha256(layout.training_id.encode()).hexdigest()[:16]
        return self._folder / f"{name}.socket"

    def start(self, layout: RunLayout) -> Path:
        """Starts the one of a training, if it does not run.

        Returns:
            Where it listens.

        Raises:
            TensorBoardRefused: why it cannot be started.
        """
        if not self._most:
            raise TensorBoardRefused("[ddl] tensorboards is 0: this site starts none.")
        if importlib.util.find_spec("tensorboard") is None:
            raise TensorBoardRefused(
                "TensorBoard is not installed where Airflow's api-server runs. Run there "
                "pip install '.[tensorboard]' in ddl-airflow's sources, or pip install tensorboard."
            )
        at = self.socket(layout)
        self._make_folder()
        with _alone(self._folder / "lock"):
            over = [one for one in self._started if one.poll() is not None]
            _close(over)
            self._started = [one for one in self._started if one not in over]
            if answers(at):
                return at
            folders = folders_of(layout)
            if not has_events(layout, folders):
                raise TensorBoardRefused(
                    "The training has left no event files so far. Have its script write them below "
                    "$LOG_DIR, $RESULT_DIR or $EXPERIMENT_DIR, such as by "
                    'keras.callbacks.TensorBoard(os.environ["LOG_DIR"]).'
                )
            self._make_room(at)
            self._start(Served(layout.workspace, folders, at, self._idle_s))
        return at

    def close(self) -> None:
        """Ends those that this process has started."""
        _close(self._started)
        self._started = []

    def _make_folder(self) -> None:
        with suppress(FileExistsError):
            self._folder.mkdir(0o700)
        found = self._folder.lstat()
        if not (stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()) or (
            stat.S_IMODE(found.st_mode) & 0o077
        ):
            raise TensorBoardRefused(
                f"{self._folder} is no folder of the api-server's user alone, so that others could "
                "listen in TensorBoard's place. Remove it, or set TMPDIR of the api-server."
            )
        if len(os.fsencode(self._folder)) > _LONGEST_PATH - 24:
            raise TensorBoardRefused(
                f"{self._folder} is too long for a socket. Set TMPDIR of the api-server."
            )

    def _make_room(self, wanted: Path) -> None:
        """Ends those that nobody has used for longest, until there is room for one more."""
        running = []
        for path in self._folder.glob("*.socket"):
            with suppress(FileNotFoundError):
                used = path.stat().st_mtime
                if path != wanted and answers(path):
                    running.append((used, path))
                else:  # of one that was killed
                    path.unlink()
        running.sort()
        while len(running) >= self._most:
            used, path = running.pop(0)
            if time.time() - used < _IN_USE_S:
                raise TensorBoardRefused(
                    f"All {self._most} TensorBoards that run at once on this host "
                    "([ddl] tensorboards) are in use. Try again in a minute."
                )
            _end(path)

    def _start(self, served: Served) -> None:
        said = served.socket.with_suffix(".log")
        argv = [sys.executable, "-P", "-m", "ddl_airflow.plugin.tensorboard_process"]
        with said.open("w") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                cwd=self._folder,
                env={name: os.environ[name] for name in _INHERITED if name in os.environ}
                | {"TMPDIR": str(self._folder), "HOME": str(self._folder)},
                start_new_session=True,
            )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(served.dump())
            process.stdin.flush()
        until = time.monotonic() + _START_S
        while not answers(served.socket):
            if process.poll() is None and time.monotonic() < until:
                time.sleep(_LOOK_S)
                continue
            process.kill()
            _close([process])
            words = said.read_text("utf-8", "replace").strip().splitlines()[-1:]
            raise TensorBoardRefused(
                f"TensorBoard did not start: {' '.join(words)[:500] or 'it said nothing'}. Its "
                f"words are in {said} on the api-server's host."
            )
        self._started.append(process)


def _close(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Ends their input, and so them."""
    for process in processes:
        with suppress(BrokenPipeError):
            process.communicate()


def answers(path: Path) -> bool:
    """Whether somebody listens on a socket."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(_END_S)
        try:
            asked.connect(str(path))
        except OSError:
            return False
    return True


def _end(path: Path) -> None:
    """Ends the one that listens there, and waits until it has."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(_END_S)
        with suppress(OSError):
            asked.connect(str(path))
            path.unlink(missing_ok=True)
            asked.recv(1)  # what has a connection open ends it with itself
    path.unlink(missing_ok=True)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits for whoever starts one now: another thread, or another worker of this host."""
    until = time.monotonic() + _START_S + _END_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TensorBoardRefused(
                        "Others are being started. Try again in a minute."
                    ) from None
                time.sleep(_LOOK_S)
            else:
                break
        yield
