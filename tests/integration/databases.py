"""PostgreSQL and Redis on free ports of this machine, as Airflow's CeleryExecutor wants them."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddl_airflow.demo.site import Service, free_port
from tests.limits import within

HOW_TO_GET = "apt-get install -y --no-install-recommends postgresql util-linux"
HOW_TO_GET_REDIS = "apt-get install -y --no-install-recommends redis-server"
START_TIMEOUT_S = 60.0
_POLL_S = 0.05


def _programs() -> Path | None:
    """PostgreSQL's own folder; Debian keeps only its client on PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    beside = shutil.which("postgres")
    return found[-1].parent if found else Path(beside).parent if beside else None


class PostgreSql:
    """A server with a database and a user ``airflow``. What it holds ends with it.

    Args:
        folder: for its log. Its data is elsewhere, where its user may go.
        address: at which it listens. Beside this machine's own: to whoever comes.
        there: words before each of its commands, which bring it to where that address is.
    """

    def __init__(self, folder: Path, address: str = "127.0.0.1", there: Sequence[str] = ()) -> None:
        self._logs = folder
        self._address = address
        self._there = there
        self._programs = _programs() or Path()
        self.port = free_port()
        self._folder = Path()
        self._service: Service | None = None

    @staticmethod
    def missing() -> str:
        """Nothing if it can run here, else why not."""
        absent = [] if _programs() else ["postgres"]
        absent += [] if shutil.which("setpriv") else ["setpriv"]
        return f"no {', '.join(absent)}. Get it: {HOW_TO_GET}" if absent else ""

    @property
    def url(self) -> str:
        """For SQLAlchemy."""
        return f"postgresql+psycopg2://airflow@{self._address}:{self.port}/airflow"

    def start(self) -> None:
        """Makes the database and waits until it answers."""
        # Other users may pass through the tests' folder, to what is theirs.
        folder = Path(tempfile.gettempdir())
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o011)
        self._folder = Path(tempfile.mkdtemp(prefix="postgresql-"))
        if os.geteuid() == 0:
            shutil.chown(self._folder, "postgres", "postgres")
        made = ["initdb", "-D", str(self._folder / "data"), "-A", "trust", "-U", "airflow"]
        self._run(*made, "--no-sync", "-E", "UTF8", "--locale=C.UTF-8")
        with (self._folder / "data" / "pg_hba.conf").open("a") as file:
            file.write("host all all 0.0.0.0/0 trust\n")
        self._serve()
        self._run("createdb", "-h", self._address, "-p", str(self.port), "-U", "airflow", "airflow")

    @contextmanager
    def away(self) -> Iterator[None]:
        """Ends every connection at once, and comes back with the same data."""
        self._end("fast")
        try:
            yield
        finally:
            self._serve()

    def stop(self) -> None:
        """Ends it and removes its data."""
        if self._service is not None:
            self._end("immediate")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self, how: str) -> None:
        assert self._service is not None, "start() first"
        self._run("pg_ctl", "-D", str(self._folder / "data"), "-m", how, "-w", "stop")
        self._service.stop()

    def _serve(self) -> None:
        # Fast rather than lasting: the tests keep nothing.
        settings = {
            "listen_addresses": self._address,
            "port": self.port,
            "unix_socket_directories": self._folder,
            "fsync": "off",
            "synchronous_commit": "off",
            "full_page_writes": "off",
            "max_connections": 200,
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        argv = self._as_user("postgres", "-D", str(self._folder / "data"), *words)
        self._service = Service("postgresql", argv, os.environ, self._logs)
        ready = self._as_user("pg_isready", "-h", self._address, "-p", str(self.port))
        deadline = time.monotonic() + within(START_TIMEOUT_S)
        while subprocess.run(ready, capture_output=True).returncode:
            self._service.check()
            assert time.monotonic() < deadline, self._service.log.read_text()
            time.sleep(_POLL_S)

    def _as_user(self, program: str, *words: str) -> list[str]:
        command = [str(self._programs / program), *words]
        if os.geteuid() != 0:
            return [*self._there, *command]
        # It refuses to be root.
        who = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
        return [*self._there, *who, *command]

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run(
            self._as_user(program, *words),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=within(START_TIMEOUT_S),
        )
        if done.returncode:
            raise RuntimeError(f"{program} exited {done.returncode}: {done.stdout}{done.stderr}")


class Redis:
    """A server that writes nothing to disk.

    Args:
        folder: for its log.
    """

    def __init__(self, folder: Path) -> None:
        self._logs = folder
        self.port = free_port()
        self._service: Service | None = None

    @staticmethod
    def missing() -> str:
        """Nothing if it can run here, else why not."""
        found = shutil.which("redis-server")
        return "" if found else f"no redis-server. Get it: {HOW_TO_GET_REDIS}"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Waits until it takes connections."""
        argv = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        self._service = Service("redis", [*argv, "--appendonly", "no"], os.environ, self._logs)
        deadline = time.monotonic() + within(START_TIMEOUT_S)
        while True:
            self._service.check()
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=within(5)).close()
            except OSError:
                assert time.monotonic() < deadline, self._service.log.read_text()
                time.sleep(_POLL_S)
            else:
                return

    def stop(self) -> None:
        """Ends it."""
        if self._service is not None:
            self._service.stop()
