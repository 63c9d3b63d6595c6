"""A whole Airflow and an object store on this machine, for the demo and for tests.

Real parts, small settings: LocalExecutor, loopback, and SQLite unless told otherwise. Every process
has a guard, so that none outlives the one that starts the site.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from ddl_airflow.core.layout import RunLayout, training_id
from ddl_airflow.demo import guard, plugins
from ddl_airflow.storage.site import workspace_id

USER = "admin"
_BUNDLE = {"name": "trainings", "classpath": "ddl_airflow.bundle.ManifestBundle", "kwargs": {}}
_STOP_S = 5.0
_TOO_SOON_S = 20.0


def free_port(first: int = 0) -> int:
    """A TCP port that nobody listens on, the given one or the next above it (0: any)."""
    for port in range(first, first + 100) if first else (0,):
        with suppress(OSError):
            return _check_free(port)
    raise OSError(f"no free port from {first} to {first + 99}")


def _check_free(port: int) -> int:
    """Returns the port, or for 0 one that is free. Raises OSError if it cannot be had."""
    with socket.socket() as probe:
        # As servers do: a port that closed a minute ago is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return int(probe.getsockname()[1])


class Taken(RuntimeError):
    """What a demo needs is somebody else's; the message names it, and what to do."""


@contextmanager
def reserved_port(first: int, *, exactly: bool = False) -> Iterator[int]:
    """A free TCP port that no other demo of this host takes meanwhile.

    Args:
        first: tried first, then those above it.
        exactly: this one or none.

    Raises:
        Taken: there is none.
    """
    for port in range(first, first + (1 if exactly else 100)):
        # A server is long in starting. Until it listens, a name in Linux's abstract namespace, as
        # wide as that of ports and gone with its process, keeps others away: unix(7).
        with socket.socket(socket.AF_UNIX) as claim:
            try:
                claim.bind(f"\0ddl-airflow-port-{port}")
                _check_free(port)
            except OSError as error:
                why = error.strerror
                continue
            yield port
            return
    if exactly:
        raise Taken(f"port {first} cannot be had: {why}. Give another with --port.")
    raise Taken(f"no port from {first} to {first + 99} is free. Free one, or give --port.")


@contextmanager
def locked(home: Path, url: str) -> Iterator[int]:
    """Keeps other demos from a folder, until this process and what it started have ended.

    Args:
        home: made if missing.
        url: of the UI, told to whoever comes next.

    Returns:
        The lock's descriptor, for Services to keep: the kernel gives the lock free with the last
        of them, however they end. Source: flock(2).

    Raises:
        Taken: another demo has it.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / "demo.lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid, _, there = file.read().partition(" ")
            if pid.isdigit() and Path("/proc", pid).exists():
                said = f"a demo runs there (pid {pid}), its UI at {there}: {home}. End it first"
            else:
                said = f"a demo that was killed is just ending there: {home}. Wait some seconds"
            raise Taken(f"{said}, or give another folder with --home.") from None
        file.truncate(0)
        file.write(f"{os.getpid()} {url}")
        file.flush()
        yield file.fileno()


class Service:
    """One process of a site.

    Args:
        name: for its log, ``<logs>/<name>.log``.
        argv: what to run.
        env: its whole environment.
        logs: folder.
        lock: a descriptor that stays open until nothing of it is left.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        logs: Path,
        lock: int | None = None,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = logs / f"{name}.log"
        self.started = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-SE", guard.__file__, str(os.getpid()), str(_STOP_S), *argv],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # The guard's alone: it closes it to what it runs.
                pass_fds=() if lock is None else (lock,),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> str:
        """Nothing while it runs; then how it ended, where its log is, and its last words."""
        code = self._process.poll()
        if code is None:
            return ""
        last = "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-15:])
        return f"{self.name} ended with code {code}. Log: {self.log}\n{last}"

    def check(self) -> None:
        """Raises RuntimeError when it has ended."""
        if said := self.ended():
            raise RuntimeError(said)

    def wait(self) -> int:
        """Waits for its end and returns its exit code."""
        return self._process.wait()

    def terminate(self) -> None:
        """SIGTERM; does not wait."""
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """SIGTERM; its guard kills, after a grace, whatever is left of it."""
        self.terminate()
        self._process.wait()


class EmbeddedObjectStore:
    """moto's S3 server: enough for a demo. It checks no signature; not a store to rely on.

    Args:
        folder: for its log.
        port: or the next free one above.
        lock: as of a Service.
    """

    access_key_id = "demo"

    def __init__(self, folder: Path, port: int = 9000, lock: int | None = None) -> None:
        self.secret_access_key = secrets.token_hex(12)
        self.port = free_port(port)
        self._lock = lock
        self.endpoint_url = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._service: Service | None = None

    def start(self) -> None:
        """Starts the server and waits until it answers."""
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._service = Service("object-store", argv, os.environ, self._folder, self._lock)
        _wait(lambda: answers(self.endpoint_url + "/moto-api/"), [self._service], 60)

    def stop(self) -> None:
        """Ends it; its objects were in memory and are gone."""
        if self._service is not None:
            self._service.stop()


class AirflowSite:
    """Airflow's api-server, scheduler and dag-processor over one folder of DAGs.

    Args:
        home: AIRFLOW_HOME; made if missing, and kept.
        dags: the folder with manifests.
        environment: further variables for Airflow, such as connections.
        port: for the UI, or the next free one above.
        bundles: DAG bundles beside that of the manifests.
        database: URL for SQLAlchemy; by default SQLite in ``home``.
        lock: as of a Service.
    """

    def __init__(
        self,
        home: Path,
        dags: Path,
        environment: Mapping[str, str] | None = None,
        port: int = 8080,
        bundles: Sequence[Mapping[str, Any]] = (),
        database: str = "",
        lock: int | None = None,
    ) -> None:
        self.home = home
        self._lock = lock
        self.workspace = home / "ddl"
        self.url = f"http://127.0.0.1:{free_port(port)}"
        self.password = secrets.token_urlsafe(9)
        self._services: dict[str, Service] = {}
        settings = self._settings(dags, bundles) | self._database(database)
        self._env = {**os.environ, **settings, **(environment or {})}
        self._client: httpx.Client | None = None

    def layout(self, dag_id: str, run_id: str) -> RunLayout:
        """The folder of a run's training."""
        site = workspace_id(self.workspace, make=True)
        return RunLayout(self.workspace, dag_id, training_id(dag_id, run_id, site))

    def _settings(self, dags: Path, bundles: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        home = self.home
        port = self.url.rsplit(":", 1)[1]
        return {
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST": json.dumps([_BUNDLE, *bundles]),
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH": str(home / "bundles"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__FERNET_KEY": "",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": port,
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__SECRET_KEY": secrets.token_hex(16),
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.1",
            # What changed is parsed at once, whatever the interval.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "3600",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "2",
            "AIRFLOW__DAG_PROCESSOR__BUNDLE_REFRESH_CHECK_INTERVAL": "1",
            "AIRFLOW__CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL": "0",
            "AIRFLOW__CORE__DAGBAG_IMPORT_ERROR_TRACEBACK_DEPTH": "1",
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
            "AIRFLOW__DDL__WORKSPACE": str(self.workspace),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }

    def _database(self, url: str) -> dict[str, str]:
        if url:
            return {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url}
        # The writer may be another process, on a busy machine: SQLite's own 5 s are soon over.
        url = f"sqlite:///{self.home / 'airflow.db'}?timeout=60"
        return {
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url,
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(Path(plugins.__file__).parent),
        }

    def start(self) -> None:
        """Makes the database, starts the three processes, waits until the API answers."""
        self.home.mkdir(parents=True, exist_ok=True)
        passwords = self.home / "passwords.json"
        passwords.touch(mode=0o600)
        passwords.chmod(0o600)  # also one that was there
        passwords.write_text(json.dumps({USER: self.password}), "utf-8")
        migrate = self.also("db", "migrate", name="db-migrate")
        try:
            if migrate.wait():
                raise RuntimeError(migrate.ended())
        finally:
            migrate.stop()
        for name in ("dag-processor", "api-server", "scheduler"):
            self.restart(name)
        self._wait(lambda: answers(f"{self.url}/api/v2/version"), 120)
        # The first execution API call of a worker would otherwise wait for its imports.
        self._wait(lambda: answers(f"{self.url}/execution/health"), 60)
        token = httpx.post(
            f"{self.url}/auth/token", json={"username": USER, "password": self.password}, timeout=60
        )
        token.raise_for_status()
        self._client = httpx.Client(
            base_url=f"{self.url}/api/v2",
            headers={"Authorization": f"Bearer {token.json()['access_token']}"},
            timeout=60,
        )

    def restart(self, name: str) -> None:
        """Starts ``dag-processor``, ``api-server``, ``scheduler`` or ``triggerer``.

        Ends the one before. ``start`` starts no triggerer: the examples do without.
        """
        if name in self._services:
            self._services.pop(name).stop()
        words = [name, "--skip-serve-logs"] if name in ("scheduler", "triggerer") else [name]
        self._services[name] = self.also(*words)

    def check(self) -> None:
        """Raises RuntimeError when one that ``restart`` started has ended by itself."""
        for service in self._services.values():
            service.check()

    def revive(self) -> list[str]:
        """Starts again what has ended by itself, and says of each how it ended.

        Airflow's scheduler ends over SQLite, which locks no rows, when a person deletes a run that
        it looks at: ``get_running_dag_runs_to_examine`` in ``airflow/models/dagrun.py``.

        Raises:
            RuntimeError: it ended so soon after its start that the next one would, too.
        """
        dead = {name: said for name, one in self._services.items() if (said := one.ended())}
        for name, said in dead.items():
            if time.monotonic() - self._services[name].started < _TOO_SOON_S:
                raise RuntimeError(f"{said}\nso soon after its start it is not started again")
            del self._services[name]
            self.restart(name)
        return list(dead.values())

    def service(self, name: str) -> Service:
        """One that ``restart`` has started."""
        return self._services[name]

    def also(
        self, *words: str, name: str = "", environment: Mapping[str, str] | None = None
    ) -> Service:
        """One process more, such as a second ``triggerer``, for the caller to stop.

        Args:
            words: Airflow's command.
            name: for its log; the command's first word by default.
            environment: further variables for it alone.
        """
        env = {**self._env, **(environment or {})}
        logs = self.home / "logs" / "site"
        return Service(name or words[0], _airflow(*words), env, logs, self._lock)

    def stop(self) -> None:
        """Ends every process of the site, and of the tasks that it was running."""
        if self._client is not None:
            self._client.close()
        for service in self._services.values():
            service.terminate()
        for service in self._services.values():
            service.stop()
        self._services.clear()

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """One call of the REST API, ``/api/v2`` + path.

        Raises:
            httpx.HTTPStatusError: with what the server answered, and where its log is.
        """
        assert self._client is not None, "start() first"
        answer = self._client.request(method, path, **kwargs)
        for _ in range(3):
            # Of two transactions that wait for each other the database ends one: ours, or the
            # scheduler's. Nothing of it has happened.
            if answer.status_code != 500 or "Database error" not in answer.text:
                break
            time.sleep(0.5)
            answer = self._client.request(method, path, **kwargs)
        if answer.is_error:
            said = f"{method} {answer.url}: {answer.status_code}: {answer.text[:1000]}"
            log = self.home / "logs" / "site" / "api-server.log"
            raise httpx.HTTPStatusError(
                f"{said}\nThe server's log: {log}", request=answer.request, response=answer
            )
        return answer.json() if answer.content else None

    def wait_for_dag(self, dag_id: str, timeout_s: float = 90) -> None:
        """Waits until the DAG processor has stored the DAG. Raises RuntimeError."""

        def stored() -> bool:
            found = self.call("GET", "/dags", params={"dag_id_pattern": dag_id, "limit": 1000})
            return any(d["dag_id"] == dag_id for d in found["dags"])

        self._wait(stored, timeout_s)

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Starts a run and returns its id."""
        body = {"logical_date": None, "conf": dict(conf or {})}
        return str(self.call("POST", f"/dags/{dag_id}/dagRuns", json=body)["dag_run_id"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        """queued, running, success or failed."""
        return str(self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}")["state"])

    def task_instances(self, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
        """Task id to task instance, as the REST API gives it."""
        found = self.call("GET", f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances")
        return {t["task_id"]: t for t in found["task_instances"]}

    def xcom(self, dag_id: str, run_id: str, task_id: str) -> Any:
        """What the task returned."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/return_value"
        return self.call("GET", path, params={"deserialize": True})["value"]

    def task_log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """One try's log as text."""
        path = f"/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{try_number}"
        lines = self.call("GET", path, params={"full_content": True})["content"]
        return "\n".join(
            line if isinstance(line, str) else str(line.get("event", "")) for line in lines
        ) + "".join(_error_text(line) for line in lines)

    def end_open_runs(self, dag_id: str) -> int:
        """Marks runs failed that an earlier site left open, and says how many there were."""
        path = f"/dags/{dag_id}/dagRuns"
        states = {"state": ["queued", "running"]}
        runs = self.call("GET", path, params=states)["dag_runs"]
        for run in runs:
            self.call("PATCH", f"{path}/{run['dag_run_id']}", json={"state": "failed"})
        return len(runs)

    def wait_for_run(self, dag_id: str, run_id: str, timeout_s: float = 300) -> str:
        """Waits for the run's end and returns its state. Raises RuntimeError after the time."""
        self._wait(lambda: self.run_state(dag_id, run_id) in ("success", "failed"), timeout_s)
        return self.run_state(dag_id, run_id)

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        _wait(done, list(self._services.values()), timeout_s)

    def run_url(self, dag_id: str, run_id: str) -> str:
        """The run's page in the UI."""
        return f"{self.url}/dags/{dag_id}/runs/{run_id}"


def _error_text(line: Any) -> str:
    details = line.get("error_detail") if isinstance(line, dict) else None
    return "".join(f"\n{d.get('exc_type')}: {d.get('exc_value')}" for d in details or ())


def _airflow(*words: str) -> list[str]:
    return [sys.executable, "-m", "airflow", *words]


def answers(url: str) -> bool:
    """Returns whether a server answers there, and not with an error of its own."""
    try:
        return httpx.get(url, timeout=30).status_code < 500
    except httpx.TransportError:
        return False


def _wait(done: Callable[[], bool], services: Sequence[Service], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        for service in services:
            service.check()
        if time.monotonic() > deadline:
            logs = ", ".join(str(service.log) for service in services)
            raise RuntimeError(f"not ready after {timeout_s:.0f} s. Logs: {logs}")
        time.sleep(0.25)


@contextmanager
def running(*parts: Any) -> Iterator[None]:
    """Starts the parts in order and stops them in reverse, whatever happens."""
    started = []
    try:
        for part in parts:
            started.append(part)
            part.start()
        yield
    finally:
        with _undisturbed():
            for part in reversed(started):
                part.stop()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C, from somebody who thinks the first was not heard, must not leave half."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
