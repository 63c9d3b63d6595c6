"""Questions about many models: `python -m benchmarks.lineage_answers [--models 10000]`.

Fills a folder, and a bucket of a Ceph where there is one, with the records of that many models of
20 DAGs, each trained on 25 states of its data in turn (`--states`), without an index. Then asks
each question as a person does, by `ddl-airflow lineage` in a process of its own: once, which makes
the index, and again, in turns. Says how long each took, and how much of a processor.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ddl_airflow.lineage.production import LATEST, PRODUCTION, point
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.store import SUCCESS, ObjectStore
from tests.integration.ceph import CephObjectStore, available

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests" / "fixtures" / "runs" / "mnist-tf1" / "airflow" / "lineage.json"
COMMAND = Path(sys.executable).with_name("ddl-airflow")
DAGS = 20
OBJECTS = 200  # of each dataset
WRITERS = 16
_SETTLES_S = 300.0
FILES = {"model/saved_model.pb": b"model", "code/train.py": b"import ddl\n"}
DATA = "s3://data"
Put = Callable[[str, bytes], None]


class Took(NamedTuple):
    """Seconds on the clock, and of a processor."""

    s: float
    cpu_s: float


class Results(NamedTuple):
    """A place of results, and how to put an object there."""

    store: ObjectStore
    put: Put
    uri: str
    environ: Mapping[str, str]


def place(number: int) -> str:
    """Where the publication of a model is, in the results."""
    return f"dag-{number % DAGS}-{number:06}/{number:016x}-00000000"


def record(kept: Mapping[str, Any], number: int, states: int) -> dict[str, Any]:
    """Of a model, made of that of a real training."""
    dag = number % DAGS
    listing = [
        {
            "key": f"part-{part:04}.tfrecord",
            "size": 1 << 20,
            "etag": f"{dag} {number // DAGS % states}",
        }
        for part in range(OBJECTS)
    ]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    dataset = {"uri": f"{DATA}/{dag}", "fingerprint": f"sha256:{digest}", "listing": listing}
    files = [
        {"key": key, "size": len(body), "sha256": hashlib.sha256(body).hexdigest()}
        for key, body in FILES.items()
    ]
    return {
        **kept,
        "training_id": place(number).partition("/")[0],
        "dataset": dataset | {"files": OBJECTS, "bytes": OBJECTS << 20},
        "run": kept["run"] | {"dag_id": f"dag-{dag}", "run_id": f"run-{number}"},
        "result": kept["result"] | {"files": files, "metrics": {"accuracy": number % 1000 / 1000}},
    }


def fill(store: ObjectStore, put: Put, models: int, states: int) -> None:
    """Publishes them, as uploads leave them that knew of no index."""
    kept = json.loads(RECORD.read_bytes())

    def publish(number: int) -> None:
        written = json.dumps(record(kept, number, states)).encode()
        for key, body in {**FILES, "lineage.json": written, SUCCESS: b"{}"}.items():
            put(f"{place(number)}/{key}", body)

    with ThreadPoolExecutor(WRITERS) as pool:
        for number, _ in enumerate(pool.map(publish, range(models)), 1):
            if number % 500 == 0:
                print(f"{number} of {models} models", end="\r", file=sys.stderr, flush=True)
    for number in range(models - DAGS, models):
        for name in (LATEST, PRODUCTION):
            point(store, f"dag-{number % DAGS}", name, place(number), {"accuracy": 0.5})


def questions(results: str, models: int) -> dict[str, list[str]]:
    """What is asked, by its name in the table."""
    one, other = (f"{results}/{place(models // 2 + number)}" for number in (0, DAGS))
    return {
        "list": ["list", results, "--limit", "20"],
        "list, filtered": ["list", results, "--where", "accuracy>=0.9", "--dag", "dag-3"],
        "list, in production": ["list", results, "--production"],
        "impact of a dataset": ["impact", f"{DATA}/7", results],
        "impact of an object": ["impact", f"{DATA}/7/part-0042.tfrecord", results],
        "the story of one": [one],
        "diff of two": ["diff", one, other],
    }


def ask(words: list[str], environ: Mapping[str, str]) -> Took:
    """How long it took to answer.

    Raises:
        RuntimeError: it failed.
    """
    began, before = time.monotonic(), cpu_s()
    done = subprocess.run(
        [COMMAND, *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
    )
    took = Took(time.monotonic() - began, cpu_s() - before)
    if done.returncode != 0 or not done.stdout:
        raise RuntimeError(f"{words}: {done.stderr}")
    return took


def cpu_s() -> float:
    """Seconds of a processor, of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def settle() -> None:
    """Waits until a store on this machine has tidied up what was written, or for five minutes.

    Ceph goes on for a while after tens of thousands of objects, on the processors that are to
    answer.
    """
    deadline = time.monotonic() + _SETTLES_S
    while time.monotonic() < deadline:
        before = _processor_ticks()
        time.sleep(3)
        idle, whole = (now - then for now, then in zip(_processor_ticks(), before, strict=True))
        if idle > 0.9 * whole:
            return


def _processor_ticks() -> tuple[int, int]:
    """Of all processors since the start: idle, and in all. Source: proc(5), /proc/stat."""
    first = Path("/proc/stat").read_text().splitlines()[0]
    ticks = [int(word) for word in first.split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def measure(results: str, environ: Mapping[str, str], models: int, rounds: int) -> None:
    """Prints a line for each question."""
    asked = {
        name: ["lineage", *words, "--json"] for name, words in questions(results, models).items()
    }
    print(_line("the first, which makes the index", [ask(asked["list"], environ)]))
    settle()
    asked["no question: lineage --help"] = ["lineage", "--help"]
    took: dict[str, list[Took]] = {name: [] for name in asked}
    for _ in range(rounds):
        for name, words in asked.items():
            took[name].append(ask(words, environ))
    for name, seconds in took.items():
        print(_line(name, seconds), flush=True)


def _line(name: str, took: Sequence[Took]) -> str:
    median = statistics.median(one.s for one in took)
    cpu = statistics.median(one.cpu_s for one in took)
    return f"{name:34} {median:6.2f} s, at most {max(took).s:.2f} s; processor {cpu:.2f} s"


@contextmanager
def folder() -> Iterator[Results]:
    path = Path(tempfile.mkdtemp(prefix="ddl-lineage-"))

    def put(key: str, body: bytes) -> None:
        (path / key).parent.mkdir(parents=True, exist_ok=True)
        (path / key).write_bytes(body)

    try:
        yield Results(FolderStore(path), put, str(path), {})
    finally:
        shutil.rmtree(path)


@contextmanager
def ceph() -> Iterator[Results]:
    path = Path(tempfile.mkdtemp(prefix="ddl-lineage-"))
    try:
        with CephObjectStore(path / "ceph") as store:
            keys = store.add_user("lineage")
            names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
            environ = dict(zip(names, (store.endpoint_url, *keys), strict=True))
            with closing(s3_client(store.endpoint_url, *keys)) as client:
                client.create_bucket(Bucket="models")
                models = S3Store(client, "models")
                yield Results(models, models.put_bytes, "s3://models", environ)
    finally:
        shutil.rmtree(path)


def main() -> None:
    """Prints a table for each store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--states", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    stores = [("a folder", folder)]
    if reason := available():
        print(f"no Ceph: {reason}")
    else:
        stores.append(("Ceph", ceph))
    for name, opened in stores:
        with opened() as results:
            fill(results.store, results.put, options.models, options.states)
            settle()
            print(f"{name}, {options.models} models; load {os.getloadavg()[0]:.1f}", flush=True)
            measure(results.uri, results.environ, options.models, options.rounds)


if __name__ == "__main__":
    main()
