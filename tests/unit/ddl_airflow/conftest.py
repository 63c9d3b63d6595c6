"""An Airflow home of its own, real jobs of plain Python scripts, manifests, golden files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import hypothesis
import pytest

from ddl_airflow.core.job import JobHandle, JobSpec, JobState, JobStatus, Submission
from ddl_airflow.core.manifest.sections.launcher import Launcher
from ddl_airflow.core.manifest.sections.launchers import own_kinds
from ddl_airflow.launchers.local import LocalLauncher
from ddl_airflow.launchers.processes import kill_marked, marked
from tests.limits import within

# Nothing but what is asserted fails a test: another program may have the processor.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

GOLDEN = Path(__file__).parents[2] / "golden"
_WAIT_S = 20.0

MANIFEST = """\
model_definition:
  name: {name}
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: {command}
    compute_configuration: {{name: cpu, nodes: 2}}
training_data_reference:
  type: fs
  source: {{path: ./data}}
training_results_reference:
  type: fs
  target: {{path: ./results}}
distribution: independent
"""
LITERAL_KEYS = """\
model_definition:
  name: literal
  framework: {name: tensorflow, version: "2.21"}
  execution:
    command: python train.py
    compute_configuration: {name: cpu}
training_data_reference:
  type: s3
  connection: &store
    endpoint_url: http://127.0.0.1:9
    access_key_id: AKIDLITERALKEYOFTEST
    secret_access_key: literalSecretOfTest77
  source: {bucket: some-data}
training_results_reference:
  type: s3
  connection: *store
  target: {bucket: some-models}
"""
KEYS = ("AKIDLITERALKEYOFTEST", "literalSecretOfTest77")


def same_as_golden(name: str, text: str) -> None:
    """Compares with tests/golden/<name>; UPDATE_GOLDEN=1 rewrites it, and review reads the diff."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8")


@pytest.fixture
def mounted() -> Iterator[Callable[[Path, Path], None]]:
    """mounted(source, place): a bind mount, which has the device number of its source."""
    places: list[Path] = []

    def mount(source: Path, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        words = ["mount", "--bind", str(source), str(place)]
        if shutil.which("mount") is None or subprocess.run(words, capture_output=True).returncode:
            pytest.skip("a bind mount takes root with CAP_SYS_ADMIN")
        places.append(place)

    yield mount
    for place in reversed(places):
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """golden(name, text): the text is that of the golden file."""
    return same_as_golden


@pytest.fixture
def literal_keys() -> tuple[str, tuple[str, ...]]:
    """A manifest with keys written out, and these keys."""
    return LITERAL_KEYS, KEYS


@pytest.fixture
def write_manifest() -> Callable[..., Path]:
    """write_manifest(folder, name=, command=, more=, script=) -> the manifest's path."""

    def write(
        folder: Path,
        name: str = "small",
        command: str = "python train.py",
        more: str = "",
        script: str = "print('trained')\n",
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(script, "utf-8")
        path = folder / "manifest.yml"
        path.write_text(MANIFEST.format(name=name, command=command) + more, "utf-8")
        return path

    return write


class Job:
    """One job of a launcher, over scripts written into its folder."""

    def __init__(self, launcher: Any, spec: JobSpec) -> None:
        self.launcher = launcher
        self.spec = spec
        self.handle: JobHandle | None = None

    def start(self) -> Job:
        self.handle = self.launcher.submit(self.launcher.render(self.spec))
        return self

    def status(self) -> JobStatus:
        return self.launcher.status(self.handle)

    def wait(self, limit_s: float = _WAIT_S) -> JobStatus:
        deadline = time.monotonic() + within(limit_s)
        while (status := self.status()).state is JobState.RUNNING:
            assert time.monotonic() < deadline, f"still running after {limit_s} s:\n{self.said()}"
            time.sleep(0.02)
        return status

    def wait_for(self, path: Path, limit_s: float = _WAIT_S) -> str:
        """The text of a file, as soon as there is some."""
        deadline = time.monotonic() + within(limit_s)
        while not (path.exists() and path.read_text("utf-8")):
            assert time.monotonic() < deadline, f"no {path.name}:\n{self.said()}"
            time.sleep(0.02)
        return path.read_text("utf-8")

    def record(self, rank: int) -> dict[str, Any]:
        return json.loads((self.spec.record_dir / f"rank-{rank}.json").read_text("utf-8"))

    def log(self, rank: int) -> str:
        return (self.spec.log_dir / f"rank-{rank}.log").read_text("utf-8")

    def said(self) -> str:
        logs = sorted(self.spec.log_dir.glob("*.log"))
        return "\n".join(f"{p.name}: {p.read_text('utf-8', 'replace')}" for p in logs)

    def processes(self) -> list[int]:
        return marked("DDL_RECORD_DIR", str(self.spec.record_dir))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """job(command, scripts, nodes=, slots=, env=, launcher=, python=, averages=) -> Job.

    Not yet started.
    Afterwards each is cancelled, as the operators do, and must have left no process.
    """
    made: list[Job] = []

    def make(
        command: str = "python main.py",
        script: str = "",
        *,
        nodes: int = 2,
        slots: int = 1,
        env: dict[str, str] | None = None,
        launcher: Any = None,
        python: str = sys.executable,
        averages: bool = False,
    ) -> Job:
        root = tmp_path / f"job-{len(made)}"
        code = root / "code"
        code.mkdir(parents=True)
        (code / "main.py").write_text(script, "utf-8")
        spec = JobSpec(
            job_id="unit/train-1",  # as in another Airflow on this host
            command=command,
            nodes=nodes,
            slots=slots,
            python=python,
            folder=code,
            record_dir=root / "records",
            log_dir=root / "logs",
            env=env or {},
            averages=averages,
        )
        made.append(Job(launcher or LocalLauncher(), spec))
        return made[-1]

    yield make
    left = {}
    for one in made:
        if one.handle is not None:
            one.launcher.cancel(one.handle, 3.0)
        if pids := one.processes():
            left[one.spec.record_dir] = pids
            kill_marked("DDL_RECORD_DIR", str(one.spec.record_dir))
    assert left == {}


class Freezer:
    """Puts processes into uninterruptible sleep, from which SIGKILL wakes nobody.

    Source: the kernel's cgroup-v1/freezer-subsystem.rst.
    """

    ROOT = Path("/sys/fs/cgroup/freezer")

    def __init__(self) -> None:
        self._group = self.ROOT / f"ddl-unit-{os.getpid()}"
        self._group.mkdir()

    def freeze(self, pid: int) -> None:
        (self._group / "cgroup.procs").write_text(str(pid))
        (self._group / "freezer.state").write_text("FROZEN")
        deadline = time.monotonic() + within(_WAIT_S)
        while (self._group / "freezer.state").read_text().strip() != "FROZEN":
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def thaw(self) -> None:
        (self._group / "freezer.state").write_text("THAWED")

    def close(self) -> None:
        self.thaw()
        for pid in (self._group / "cgroup.procs").read_text().split():
            (self.ROOT / "cgroup.procs").write_text(pid)
        self._group.rmdir()


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    """freeze(pid) and thaw()."""
    try:
        made = Freezer()
    except OSError as error:
        pytest.skip(f"no process can be put into uninterruptible sleep here: {error}")
    yield made
    made.close()


class FakeScheduler:
    """A queue in a folder, in which every job waits until it is told how it goes.

    All instances over the folder see the same jobs, as processes that ask one scheduler do.

    Args:
        folder: made if missing.
    """

    kind = "fake-scheduler"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def render(self, job: JobSpec) -> Submission:
        """A submission whose argv is the command's words."""
        return Submission(job, tuple(job.command.split()), dict(job.env))

    def expected(self, job: JobSpec) -> JobHandle:
        """The handle without its number."""
        return job.handle(self.kind, 0)

    def submit(self, submission: Submission) -> JobHandle:
        """Puts the job into the queue."""
        submission.job.record_dir.mkdir(parents=True, exist_ok=True)
        submission.job.log_dir.mkdir(parents=True, exist_ok=True)
        number = max(self.numbers(), default=0) + 1
        handle = replace(self.expected(submission.job), number=number)
        told = {"handle": asdict(handle), "state": "pending", "reason": ""}
        told["delay_s"] = submission.job.delay_s
        self._write(number, told)
        return handle

    def numbers(self) -> list[int]:
        """Of all jobs that were ever submitted."""
        return sorted(int(path.stem) for path in self.folder.glob("*.json"))

    def delays(self) -> list[float]:
        """For how long each job was to wait before it starts, in seconds."""
        return [float(self._read(number)["delay_s"]) for number in self.numbers()]

    def state(self, number: int) -> str:
        """How a job goes: a value of JobState."""
        return str(self._read(number)["state"])

    def set(
        self,
        number: int,
        state: str,
        reason: str = "",
        output: str = "",
        step: int | None = None,
        images: Sequence[str] = (),
    ) -> None:
        """Says how a job goes from now on: a value of JobState; when it succeeds, ranks say so."""
        told = self._read(number) | {"state": state, "reason": reason, "step": step}
        told["images"] = list(images)
        self._write(number, told)
        if state == JobState.SUCCEEDED.value:
            handle = told["handle"]
            for rank in range(handle["world_size"]):
                Path(handle["log_dir"], f"rank-{rank}.log").write_text(output, "utf-8")
                record = {"rank": rank, "host": "fake", "ended": float(rank), "exit_code": 0}
                path = Path(handle["record_dir"], f"rank-{rank}.json")
                path.write_text(json.dumps(record), "utf-8")

    def find(self, handle: JobHandle) -> JobHandle:
        """By its id, where its number is not known."""
        named = [n for n in self.numbers() if self._read(n)["handle"]["job_id"] == handle.job_id]
        return handle if handle.number else replace(handle, number=max(named, default=0))

    def status(self, handle: JobHandle) -> JobStatus:
        """What ``set`` said."""
        if not (number := self.find(handle).number):
            return JobStatus(JobState.LOST)
        told = self._read(number)
        return JobStatus(
            JobState(told["state"]),
            reason=told["reason"],
            step=told.get("step"),
            images=tuple(told.get("images", ())),
        )

    def ask(self, handles: Sequence[JobHandle]) -> list[dict[str, str]]:
        """Nothing: ``status`` knows."""
        return [{} for _ in handles]

    def conclude(self, handle: JobHandle, told: Mapping[str, str]) -> JobStatus:
        """What ``status`` says."""
        return self.status(handle)

    def cancel(self, handle: JobHandle, grace_s: float = 0.0) -> None:
        """Ends a job that has not ended."""
        if not self.status(handle).ended:
            self.set(self.find(handle).number, JobState.LOST.value, "cancelled")

    def log(self, handle: JobHandle, rank: int) -> Path:
        """The rank's own file."""
        return handle.log_dir / f"rank-{rank}.log"

    def _read(self, number: int) -> dict[str, Any]:
        told: dict[str, Any] = json.loads((self.folder / f"{number}.json").read_text("utf-8"))
        return told

    def _write(self, number: int, told: dict[str, Any]) -> None:
        path = self.folder / f"{number}.json"
        path.with_suffix(".new").write_text(json.dumps(told, default=str), "utf-8")
        path.with_suffix(".new").replace(path)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeScheduler:
    """A scheduler with an empty queue; ``launcher("fake-scheduler")`` asks the same one."""
    queue = FakeScheduler(tmp_path / "cluster")
    module = ModuleType("of_this_test")
    module.made = lambda: FakeScheduler(queue.folder)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = type(
        "Kind", (Launcher,), {"kind_name": queue.kind, "implementation": "of_this_test:made"}
    )
    monkeypatch.setitem(own_kinds(), queue.kind, kind)  # type: ignore[arg-type]
    return queue


RUN_ID = "manual__2026-11-20T20:15:00+00:00"


class _Events(dict):
    """Airflow's outlet events: one for each asset, made when asked for."""

    def __missing__(self, asset: Any) -> Any:
        self[asset] = SimpleNamespace(extra={})
        return self[asset]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The site's workspace, an empty folder."""
    folder = tmp_path / "workspace"
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", str(folder))
    return folder


@pytest.fixture
def context_of() -> Callable[..., dict[str, Any]]:
    """context_of(dag_id, try_number=, **params): what a task of ours takes from Airflow."""

    def make(dag_id: str, try_number: int = 1, max_tries: int = 0, **params: Any) -> dict[str, Any]:
        run = SimpleNamespace(
            dag_id=dag_id,
            run_id=RUN_ID,
            run_type=SimpleNamespace(value="manual"),
            triggering_user_name="a tester",
            conf={},
            logical_date=datetime(2026, 11, 20, 20, 15, tzinfo=UTC),
            data_interval_end=None,
            run_after=datetime(2026, 11, 20, 20, 15, tzinfo=UTC),
            start_date=datetime(2026, 11, 20, 20, 16, tzinfo=UTC),
            clear_number=0,
        )
        ti = SimpleNamespace(try_number=try_number, max_tries=max_tries)
        return {"dag_run": run, "ti": ti, "params": params, "outlet_events": _Events()}

    return make


class TaskRun:
    """How Airflow's task runner ended a task, and everything that it sent out meanwhile."""

    def __init__(self, state: Any, error: BaseException | None, sent: list[Any]) -> None:
        self.state = str(getattr(state, "value", state))
        self.error = error
        self.sent = sent

    def message(self, kind: str) -> Any:
        """The only message of that type."""
        (found,) = [message for message in self.sent if type(message).__name__ == kind]
        return found

    def shown(self) -> str:
        """All messages that people may see: not those that name the secrets to be masked."""
        kept = [m for m in self.sent if type(m).__name__ != "MaskSecret"]
        return "\n".join([*map(repr, kept), str(self.error)])


class _Supervisor:
    """The other end of the task runner, without a database behind it."""

    def __init__(self, answers: Mapping[str, Callable[[Any], Any]]) -> None:
        self.sent: list[Any] = []
        self._answers = answers

    def send(self, msg: Any) -> Any:
        from airflow.sdk.execution_time.comms import HITLDetailRequestResult, InactiveAssetsResult

        self.sent.append(msg)
        kind = type(msg).__name__
        if kind in self._answers:
            return self._answers[kind](msg)
        if kind == "ValidateInletsAndOutlets":
            return InactiveAssetsResult(inactive_assets=[])
        if kind == "CreateHITLDetailPayload":  # the first for this task
            return HITLDetailRequestResult(**msg.model_dump(exclude={"type"}))
        return None


@pytest.fixture
def airflow_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Airflow's database with its tables, as good as empty; its ``create_session``."""
    import airflow.models
    from airflow.models.base import Base
    from airflow.models.dag import clear_team_name_cache
    from airflow.utils.db import synchronize_log_template
    from airflow.utils.orm_event_handlers import setup_event_handlers
    from airflow.utils.session import create_session
    from sqlalchemy import create_engine
    from sqlalchemy.orm import scoped_session, sessionmaker

    airflow.models.import_all_models()
    engine = create_engine(f"sqlite:///{tmp_path / 'airflow-with-tables.db'}")
    setup_event_handlers(engine)
    Base.metadata.create_all(engine)
    maker = sessionmaker(engine, autoflush=False, expire_on_commit=False)
    scoped = scoped_session(maker)
    monkeypatch.setattr("airflow.settings.NonScopedSession", maker)
    monkeypatch.setattr("airflow.settings.Session", scoped)
    clear_team_name_cache()
    synchronize_log_template()  # which a run has
    yield create_session
    scoped.remove()
    engine.dispose()
    clear_team_name_cache()


@pytest.fixture
def run_task(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TaskRun]:
    """run_task(task, try_number=, told=, conf=, answers=, ti_id=): Airflow's task runner runs it.

    Without a database. ``told``: and tells its listeners how that ended. ``conf``: what the run was
    triggered with. ``answers``: what answers a message, by its type.
    """
    import structlog
    from airflow.sdk.api.datamodels._generated import DagRun, TIRunContext
    from airflow.sdk.execution_time import task_runner

    def run(
        task: Any,
        try_number: int = 1,
        told: bool = False,
        conf: Mapping[str, Any] = MappingProxyType({}),
        answers: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
        ti_id: UUID | None = None,
    ) -> TaskRun:
        now = datetime.now(UTC)
        dag_run = DagRun.model_construct(
            dag_id=task.dag_id,
            run_id=RUN_ID,
            run_type="manual",
            state="running",
            logical_date=None,
            data_interval_start=None,
            data_interval_end=None,
            start_date=now,
            run_after=now,
            conf=dict(conf),
            clear_number=0,
            consumed_asset_events=[],
            partition_key=None,
            triggering_user_name="a tester",
        )
        server = TIRunContext.model_construct(
            dag_run=dag_run,
            max_tries=task.retries,
            should_retry=try_number <= task.retries,
            task_reschedule_count=0,
            variables=[],
            connections=[],
            xcom_keys_to_clear=[],
            upstream_map_indexes={},
        )
        instance = task_runner.RuntimeTaskInstance.model_construct(
            id=ti_id or uuid4(),
            task=task,
            task_id=task.task_id,
            dag_id=task.dag_id,
            run_id=RUN_ID,
            try_number=try_number,
            map_index=-1,
            max_tries=task.retries,
            dag_version_id=uuid4(),
            start_date=now,
            bundle_instance=SimpleNamespace(name="unit", version=None),
            _ti_context_from_server=server,
        )
        supervisor = _Supervisor(answers)
        monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", supervisor, raising=False)
        context, log = instance.get_template_context(), structlog.get_logger()
        state, _, error = task_runner.run(instance, context, log)
        if told:
            task_runner.finalize(instance, state, context, log, error)
        monkeypatch.delattr(task_runner, "SUPERVISOR_COMMS", raising=False)
        return TaskRun(state, error, supervisor.sent)

    return run
