"""``ddl-airflow demo``: the whole road on real handwriting, on this machine, in a few minutes."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.progress import Progress
from ddl_airflow.demo.digits import write_digits
from ddl_airflow.demo.site import (
    USER,
    AirflowSite,
    EmbeddedObjectStore,
    Taken,
    locked,
    reserved_port,
    running,
)
from ddl_airflow.launchers.loopback import confined
from ddl_airflow.launchers.mpirun import find_mpirun, find_python
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.stores import open_store

DATA_BUCKET = "mnist-training-data"
RESULTS_BUCKET = "mnist-training-models"
EXAMPLES = ("mnist-tf1", "mnist-keras")
_STEPS = ("stage_data", "train", "transform", "upload_results")
# Both: a shell that starts the demo in the background has SIGINT ignored.
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PORT = 8080
_STORE_PORT = 9000
_SAY_EVERY_S = 2.0
_MARKS = {"success": "✔", "running": "▶", "failed": "✘", "up_for_retry": "↻"}


class Clock:
    """Says what happens, with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Since the demo began."""
        return time.monotonic() - self._started

    def say(self, text: str) -> None:
        """One line, at once."""
        print(f"[{self.elapsed_s:6.1f} s] {text}", flush=True)


def connection_environment(store: EmbeddedObjectStore | Any) -> dict[str, str]:
    """The two ways in which the examples' manifests name their store, as variables.

    Args:
        store: has endpoint_url, access_key_id and secret_access_key.
    """
    connection = {
        "conn_type": "aws",
        "login": store.access_key_id,
        "password": store.secret_access_key,
        "extra": {"endpoint_url": store.endpoint_url, "region_name": "us-east-1"},
    }
    return {
        "AIRFLOW_CONN_DDL_OBJECT_STORE": json.dumps(connection),
        "S3_ENDPOINT_URL": store.endpoint_url,
        "S3_ACCESS_KEY_ID": store.access_key_id,
        "S3_SECRET_ACCESS_KEY": store.secret_access_key,
    }


def fill_buckets(store: EmbeddedObjectStore | Any) -> Any:
    """Makes both buckets and puts the digits into one. Returns the S3 client."""
    client = s3_client(
        store.endpoint_url, store.access_key_id, store.secret_access_key, "us-east-1"
    )
    for bucket in (DATA_BUCKET, RESULTS_BUCKET):
        client.create_bucket(Bucket=bucket)
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder))
        for path in sorted(Path(folder).iterdir()):
            client.upload_file(str(path), DATA_BUCKET, path.name)
    return client


def demo(home: Path, dags: Path, *, keep: bool, port: int | None) -> int:
    """Runs every example and prints what came out.

    Args:
        home: folder for Airflow and the workspace; kept between demos.
        dags: the folder with the examples.
        keep: leave the UI running until Ctrl-C.
        port: for the UI; None for 8080, or the next free one above.

    Returns:
        0 when every run succeeded, 1 when one did not, 2 when nothing was started because another
        demo has the folder or somebody the port, or the ranks' Python lacks ddl-ops, 130 after
        Ctrl-C.
    """
    clock = Clock()
    try:
        _end_on_signals()
        ask_directly()
        # Its trainings would say so as well, minutes later.
        python = find_python(os.environ.get("AIRFLOW__DDL__PYTHON") or sys.executable)
        find_mpirun(python)
        confined(python, os.environ, mpi=True)
        with (
            reserved_port(port or _PORT, exactly=port is not None) as ui_port,
            locked(home, f"http://127.0.0.1:{ui_port}") as lock,
            reserved_port(_STORE_PORT) as store_port,
        ):
            if port is None and ui_port != _PORT:
                clock.say(f"port {_PORT} is taken: the UI gets {ui_port}; --port asks for another")
            store = EmbeddedObjectStore(home / "logs" / "site", store_port, lock)
            environment = connection_environment(store)
            site = AirflowSite(home, dags, environment, ui_port, lock=lock)
            return _run(clock, store, site, keep=keep)
    except (Taken, SubmitFailed) as error:
        print(f"ddl-airflow: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        for number in _SIGNALS:  # it is over; another would be a traceback
            signal.signal(number, signal.SIG_IGN)
        clock.say("ended; every process of it was stopped")
        return 0 if keep else 130


def ask_directly() -> None:
    """Keeps a proxy that the site has from what is on this host: httpx and boto3 would ask it."""
    others = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    direct = ",".join(filter(None, [others, "127.0.0.1", "localhost"]))
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = direct


def _run(clock: Clock, store: EmbeddedObjectStore, site: AirflowSite, *, keep: bool) -> int:
    # Rank 0 of a training may be the largest of all processes; watch what the sum really is.
    with MemoryWatch() as memory:
        clock.say("object store: starting (embedded; yours may be any S3-compatible store)")
        with running(store):
            client = fill_buckets(store)
            clock.say(f"object store: {store.endpoint_url}, digits in s3://{DATA_BUCKET}")
            clock.say("Airflow: starting its database, api-server, scheduler and dag-processor")
            with running(site):
                clock.say(f"Airflow: {site.url}  user {USER}  password {site.password}")
                succeeded = all([_example(clock, site, client, name) for name in EXAMPLES])
                clock.say(
                    f"done: {'all runs succeeded' if succeeded else 'a run FAILED'}; "
                    f"{clock.elapsed_s:.0f} s, peak memory {memory.peak_bytes / 2**30:.1f} GiB "
                    "(all processes together)"
                )
                if not keep:
                    clock.say("the embedded store and its models end here; `make up` keeps them")
                if keep:
                    site.restart("triggerer")  # for what waits without a worker
                    clock.say(f"the UI stays: {site.url}  user {USER}  password {site.password}")
                    clock.say("Ctrl-C ends it")
                    while True:
                        time.sleep(_SAY_EVERY_S)
                        for said in site.revive():
                            clock.say(f"{said}\nstarted again")
        return 0 if succeeded else 1


def _end_on_signals() -> None:
    def end(_signum: int, _frame: FrameType | None) -> None:
        # Not by print, in whose midst this may be.
        with suppress(OSError):
            os.write(sys.stdout.fileno(), b"\nstopping; this takes a few seconds\n")
        raise KeyboardInterrupt

    for number in _SIGNALS:
        signal.signal(number, end)


def _example(clock: Clock, site: AirflowSite, client: Any, dag_id: str) -> bool:
    site.wait_for_dag(dag_id)
    if left := site.end_open_runs(dag_id):
        clock.say(f"{dag_id}: {left} run(s) that an earlier demo left open marked as failed")
    run_id = site.trigger(dag_id)
    clock.say(f"{dag_id}: dags/{dag_id}/manifest.yml is a DAG; triggered {run_id}")
    state = _follow(clock, site, site.layout(dag_id, run_id), dag_id, run_id)
    print(f"\n  run         {site.run_url(dag_id, run_id)}  ({state})")
    if state != "success":
        _show_failure(site, dag_id, run_id)
        return False
    places = site.xcom(dag_id, run_id, "upload_results")
    record = json.loads(open_store(places["training"], client).read_bytes("lineage.json"))
    _show_result(record, places)
    return True


def _follow(clock: Clock, site: AirflowSite, layout: RunLayout, dag_id: str, run_id: str) -> str:
    progress, offset, said = Progress(), 0, ""
    while True:
        state = site.run_state(dag_id, run_id)
        tasks = site.task_instances(dag_id, run_id)
        if layout.progress.exists():
            with layout.progress.open("rb") as file:
                file.seek(offset)
                new = file.read()
            offset += len(new)
            progress.feed(new.decode("utf-8", "replace"))
        steps = "  ".join(
            f"{_MARKS.get(tasks[s]['state'] or '', '·')} {tasks[s]['task_display_name']}"
            for s in _STEPS
            if s in tasks
        )
        training = tasks.get("train", {}).get("state") == "running"
        line = steps + (f"  | {progress.line()}" if training and progress.line() else "")
        if line != said:
            clock.say(f"{dag_id}: {line}")
            said = line
        if state in ("success", "failed"):
            return state
        time.sleep(_SAY_EVERY_S)


def _show_failure(site: AirflowSite, dag_id: str, run_id: str) -> None:
    for task_id, task in site.task_instances(dag_id, run_id).items():
        if task["state"] in ("failed", "up_for_retry"):
            log = site.task_log(dag_id, run_id, task_id, task["try_number"])
            print(f"  {task_id} failed; the end of its log:", file=sys.stderr)
            print("\n".join(log.splitlines()[-40:]), file=sys.stderr)


def _show_result(record: Mapping[str, Any], places: Mapping[str, str]) -> None:
    result = record["result"]
    accuracy = result["metrics"].get("test_accuracy")
    print(f"  accuracy    {accuracy:.4f} on held-out digits, as the script measured it")
    made_by = f"checkpoint {result['checkpoint']}" if "checkpoint" in result else "its own command"
    print(f"  model       {places['model']}  ({made_by})")
    pairs = zip(result["prediction"]["class_index"], result["labels"], strict=True)
    shown = " ".join(f"{got}" if got == label else f"{got}(is {label})" for got, label in pairs)
    print(f"  prediction  {shown}  by the reloaded SavedModel, on held-out digits")
    print(f"              {result['accuracy']:.4f} of all {result['rows']} right")
    print(f"  lineage     {places['lineage']}")
    print(
        f"              data {record['dataset']['fingerprint'][:19]}  "
        f"code {record['code']['digest'][:19]}  manifest {record['manifest']['digest'][:22]}\n",
        flush=True,
    )


class MemoryWatch(threading.Thread):
    """The largest sum of memory of this process and everything below it.

    Proportional set size: a page that ranks share counts once. The kernel walks all pages for it:
    each second that is a tenth of a processor. Source: proc(5), smaps_rollup.
    """

    def __init__(self, every_s: float = 3.0) -> None:
        super().__init__(daemon=True)
        self._every_s = every_s
        self._over = threading.Event()
        self.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def run(self) -> None:
        """Samples until the with statement ends."""
        while not self._over.wait(self._every_s):
            self.peak_bytes = max(self.peak_bytes, _memory_below(Path("/proc/self").resolve()))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def _memory_below(root: Path) -> int:
    parents: dict[str, list[Path]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
            except OSError:
                continue  # it ended meanwhile
            parents.setdefault(parent, []).append(folder)
    total, todo = 0, [root]
    while todo:
        folder = todo.pop()
        todo += parents.get(folder.name, [])
        try:
            lines = (folder / "smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total
