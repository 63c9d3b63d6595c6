"""`python -m tests.soak.publications`: uploads and promotions through real processes, killed.

Each round two processes at the same time publish a model and put it into production, or go back,
or promote another; SIGKILL comes at a random moment to one or both. Then, as Airflow would, what
was killed may be tried again. All the while a reader looks at the pointers: what they name is
whole, and its bytes are those that were published. At the end the history has every promotion once.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ddl_airflow.core.errors import DdlError, NoSuchModel
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    point,
    promote,
    read_pointer,
    rollback,
)
from ddl_airflow.storage import s3_put
from ddl_airflow.storage.publication import missing_from, publications, publish
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from tests.integration.ceph import CephObjectStore, available
from tests.integration.faulty_proxy import Asked, FaultyProxy

DAG = "digits"
RECORD = {
    "dataset": {"fingerprint": "d"},
    "code": {"digest": "c"},
    "manifest": {"digest": "m"},
    "run": {"dag_id": DAG, "parameters": {}},
    "result": {"metrics": {}},
}


@dataclass
class Figures:
    """What was tried and seen.

    Attributes:
        killed: processes that ended by SIGKILL.
        ended: that came to their end.
        events: of the history of production.
        promoted: of these, trainings that were put into production by their upload.
        looks: of the reader at a pointer.
        nbytes: that it read and compared.
        faults: what must not be; empty.
    """

    killed: int = 0
    ended: int = 0
    events: int = 0
    promoted: int = 0
    looks: int = 0
    nbytes: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.killed} SIGKILLs, {self.ended} processes to their end; {self.events} events "
            f"in the history, {self.promoted} of them promotions by uploads; {self.looks} looks of "
            f"the reader, {self.nbytes:,} bytes compared; {len(self.faults)} faults"
        )


def forked(work: Callable[[], None]) -> int:
    """The id of a process that does the work: 0 is its exit code then, 3 for an error of ours."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        work()
        code = 0
    except DdlError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        code = 0 if isinstance(error, NoSuchModel) else 3
    finally:
        os._exit(code)


def upload(store: S3Store, folder: Path, number: int, size: int) -> None:
    """A model of a training of that number, with a file of that many bytes."""
    training, files = f"{DAG}-{number}", {}
    for key, body in (
        ("lineage.json", json.dumps(RECORD).encode()),
        ("model/saved_model.pb", f"graph {number}".encode()),
        ("model/variables", random.Random(number).randbytes(size)),
    ):
        files[key] = folder / f"{number}-{os.path.basename(key)}"
        files[key].write_bytes(body)
    done = publish(files, store, training, marker={"training_id": training})
    for name in (LATEST, PRODUCTION):
        point(store, DAG, name, f"{training}/{done.name}", {}, by=f"upload {number}")


def read(store: S3Store, told: Path) -> None:
    """Looks at the pointers until the folder has a file ``stop``; leaves what it saw."""
    looks, nbytes, faults = 0, 0, []
    while not (stop := (told / "stop").exists()) or not looks:
        for name in (LATEST, PRODUCTION):
            if (pointer := read_pointer(store, DAG, name)) is None:
                continue
            looks += 1
            target = store.at(pointer["publication"])
            if gone := missing_from(target):
                faults.append(f"{name} names {pointer['publication']}, of which {gone} is missing")
                continue
            if looks % 4 and not stop:
                continue
            for entry in json.loads(target.read_bytes("_SUCCESS"))["files"]:
                body = target.read_bytes(entry["key"])
                nbytes += len(body)
                if hashlib.sha256(body).hexdigest() != entry["sha256"]:
                    faults.append(f"{name}: {target.uri}/{entry['key']} is another file")
    seen = {"looks": looks, "nbytes": nbytes, "faults": faults}
    (told / "seen.json").write_text(json.dumps(seen))


def soak(make_store: Callable[[], S3Store], folder: Path, kills: int, seed: int) -> Figures:
    """Kills so many processes, and checks.

    Args:
        make_store: a store of one's own for each process; of an empty prefix.
        folder: for files; empty.
        kills: how many to kill.
        seed: of what happens when.
    """
    chance, figures = random.Random(seed), Figures()
    reader = forked(lambda: read(make_store(), folder))
    number, longest = 0, 0.0
    ends: dict[int, bool] = {}

    def begin(what: str) -> tuple[int, int]:
        """The process, and the number of its training; 0: none."""
        nonlocal number
        if what == "upload":
            number += 1
            return forked(tried_upload(number)), number
        if what == "rollback":
            return forked(lambda: rollback(make_store(), DAG, by="a person") and None), 0
        earlier = f"{DAG}-{chance.randint(1, max(number, 1))}"
        return forked(lambda: promote(make_store(), DAG, earlier, by="a person") and None), 0

    def tried_upload(number: int) -> Callable[[], None]:
        size = s3_put.PART_SIZE + 1000 if number % 15 == 0 else 100_000
        return lambda: upload(make_store(), folder, number, size)

    def end(pid: int) -> bool:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        figures.killed += code == -signal.SIGKILL
        figures.ended += code == 0
        if code not in (0, -signal.SIGKILL):
            figures.faults.append(f"a process ended with exit code {code}")
        return code == 0

    started = time.monotonic()
    assert end(begin("upload")[0])
    ends[1], longest = True, time.monotonic() - started
    while figures.killed < kills:
        running = [begin("upload"), begin(chance.choice(["upload", "rollback", "promote"]))]
        doomed = chance.sample(running, chance.choice([1, 1, 2]))
        moments = sorted((chance.uniform(0, 1.3 * longest), one[0]) for one in doomed)
        started = time.monotonic()
        for moment, pid in moments:
            time.sleep(max(0.0, started + moment - time.monotonic()))
            os.kill(pid, signal.SIGKILL)  # it may have ended, and is not waited for yet
        for pid, training in running:
            ended = end(pid)
            if training:
                ends[training] = ended
                if not ended and chance.random() < 0.5:
                    ends[training] = end(forked(tried_upload(training)))
    (folder / "stop").touch()
    if not end(reader):
        figures.faults.append("the reader did not come to its end")
        return figures
    figures.ended -= 1
    seen: dict[str, Any] = json.loads((folder / "seen.json").read_text())
    figures.looks, figures.nbytes = seen["looks"], seen["nbytes"]
    figures.faults += seen["faults"]
    _check_history(make_store(), ends, figures)
    return figures


def _check_history(store: S3Store, ends: dict[int, bool], figures: Figures) -> None:
    pointer = read_pointer(store, DAG, PRODUCTION)
    assert pointer is not None
    history = pointer["history"]
    figures.events = len(history)
    if [event["number"] for event in history] != list(range(len(history), 0, -1)):
        figures.faults.append("the history's numbers are not in one order without gaps")
    promoted = Counter(
        event["training_id"] for event in history if event["by"].startswith("upload")
    )
    figures.promoted = sum(promoted.values())
    for number, ended in ends.items():
        times = promoted[f"{DAG}-{number}"]
        if times > 1 or (ended and not times):
            figures.faults.append(f"training {number} is in the history {times} times")
    for publication in {event["publication"] for event in history}:
        if missing_from(store.at(publication)):
            figures.faults.append(f"{publication} is in the history, and not whole")


@dataclass
class Sent:
    """What came of uploads of several parts that were killed, and tried again until they ended.

    Attributes:
        killed: processes that ended by SIGKILL.
        trainings: that were published in the end.
        parts: that were sent, of all tries.
        found: parts and objects that a later try found, and did not send.
        looks: of the reader at what is published.
        nbytes: that were compared in the end.
        faults: what must not be; empty.
    """

    killed: int = 0
    trainings: int = 0
    parts: int = 0
    found: int = 0
    looks: int = 0
    nbytes: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.killed} SIGKILLs among uploads of {self.trainings} trainings of several parts; "
            f"{self.parts} parts sent, {self.found} parts and objects found and not sent again; "
            f"{self.looks} looks of the reader, {self.nbytes:,} bytes compared; "
            f"{len(self.faults)} faults"
        )


def look(store: S3Store, told: Path) -> None:
    """Looks at what is published until there is a file ``stop``: all that has a marker is whole."""
    looks, faults = 0, []
    while not (told / "stop").exists():
        for marker in [obj for obj in store.list() if obj.key.endswith("/_SUCCESS")]:
            looks += 1
            if gone := missing_from(store.at(marker.key.removesuffix("/_SUCCESS"))):
                faults.append(f"{marker.key} is there, and {gone} is not")
    (told / "looked.json").write_text(json.dumps({"looks": looks, "faults": faults}))


def there_of(store: S3Store, training: str) -> tuple[set[int], set[str]]:
    """Numbers of the parts, from 1, and keys of the objects that are there of a training."""
    parts: set[int] = set()
    for one in store.at(training).unfinished():
        name = {"Bucket": store.bucket, "Key": f"{store.prefix}/{training}/{one.key}"}
        listed = store._client.list_parts(**name, UploadId=one.token)
        parts |= {part["PartNumber"] for part in listed.get("Parts", ())}
    whole = {obj.key.partition("/")[2] for obj in store.at(training).list()}
    return parts, whole


def soak_parts(
    make_store: Callable[[str], S3Store], endpoint_url: str, folder: Path, kills: int, seed: int
) -> Sent:
    """Kills so many uploads, tries each again until it ends, and looks at what is sent.

    Args:
        make_store: a store of one's own, by its endpoint; of an empty prefix.
        endpoint_url: of the service.
        folder: for files; empty.
        kills: how many to kill.
        seed: of what happens when.
    """
    chance, figures = random.Random(seed), Sent()
    s3_put.PART_SIZE = 5 * 1024 * 1024  # the least; the processes are forked
    store = make_store(endpoint_url)
    store.put_bytes("begun", b"")  # so that there is something to list
    reader = forked(lambda: look(make_store(endpoint_url), folder))
    longest = 0.0
    with FaultyProxy(endpoint_url, {}, lambda method, _: method == "PUT") as proxy:
        while figures.killed < kills or longest == 0.0:
            figures.trainings += 1
            training = f"parts-{figures.trainings}"
            bodies = {"model/variables": random.Random(training).randbytes(9 * s3_put.PART_SIZE)}
            for number in range(8):
                bodies[f"model/{number}"] = random.Random(f"{training} {number}").randbytes(200_000)
            files = {key: folder / os.path.basename(key) for key in bodies}
            for key, body in bodies.items():
                files[key].write_bytes(body)
            ended = False
            while not ended:
                # As a retry's: what is about the try itself is another one each time.
                files["lineage.json"] = folder / "lineage.json"
                files["lineage.json"].write_text(json.dumps(RECORD | {"try": time.time_ns()}))
                parts, whole = there_of(store, training)
                before = len(proxy.asked)
                theirs = functools.partial(make_store, proxy.endpoint_url)
                pid = forked(lambda: publish(files, theirs(), training) and None)  # noqa: B023
                began = time.monotonic()
                if longest and figures.killed < kills:
                    time.sleep(chance.uniform(0, 1.3 * longest))
                    os.kill(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                figures.killed += code == -signal.SIGKILL
                ended = code == 0
                longest = longest or time.monotonic() - began
                if code not in (0, -signal.SIGKILL):
                    figures.faults.append(f"a process ended with exit code {code}")
                    break
                _check_sent(proxy.asked[before:], parts, whole & bodies.keys(), figures)
            _check_bytes(store.at(training), bodies, figures)
    (folder / "stop").touch()
    if code := os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]):
        figures.faults.append(f"the reader ended with exit code {code}")
        return figures
    seen = json.loads((folder / "looked.json").read_text())
    figures.looks = seen["looks"]
    figures.faults += seen["faults"]
    return figures


def _check_sent(asked: list[Asked], parts: set[int], whole: set[str], figures: Sent) -> None:
    sent = [one for one in asked if not one.source]
    numbers = [parse_qs(one.query).get("partNumber") for one in sent]
    again = [int(number[0]) for number in numbers if number]
    figures.parts += len(again)
    if "model/variables" in whole:
        figures.faults += [f"part {number} of a whole object was sent" for number in again]
    figures.faults += [f"part {number} was sent again" for number in parts.intersection(again)]
    for one, number in zip(sent, numbers, strict=True):
        if not number and any(one.path.endswith(f"/{key}") for key in whole):
            figures.faults.append(f"{one.path} was sent again")
    figures.found += len(parts) + len(whole)


def _check_bytes(training: S3Store, bodies: dict[str, bytes], figures: Sent) -> None:
    done = publications(training)
    # Two, and both whole, where a marker arrived after its sender's death and the next try's look.
    if not 0 < len(done) <= 2:
        figures.faults.append(f"{training.uri} has {len(done)} publications")
    for name in done:
        target = training.at(name)
        for obj in target.list():
            if obj.key in bodies:
                digest = hashlib.sha256()
                target.read(obj, digest.update)
                figures.nbytes += obj.size
                if digest.digest() != hashlib.sha256(bodies[obj.key]).digest():
                    figures.faults.append(f"{target.uri}/{obj.key} is another file")
    figures.faults += [f"{training.uri}/{one.key} is unfinished" for one in training.unfinished()]


def main() -> int:
    """Against a Ceph of its own. Returns the number of faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.publications")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--parts", type=int, default=0, help="kills of uploads of several parts")
    parser.add_argument("--seed", type=int, default=time.time_ns())
    options = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "files")
        folder.mkdir()
        with CephObjectStore(Path(place, "ceph")) as ceph:
            keys = ceph.add_user("soak")
            bucket = f"soak-{uuid.uuid4()}"
            client = s3_client(ceph.endpoint_url, *keys)
            client.create_bucket(Bucket=bucket)
            client.close()

            def make_store(
                endpoint_url: str = ceph.endpoint_url, prefix: str = "results"
            ) -> S3Store:
                return S3Store(s3_client(endpoint_url, *keys), bucket, prefix)

            faults = 0
            if options.kills:
                started = time.monotonic()
                figures = soak(make_store, folder, options.kills, options.seed)
                faults += _said(figures, started)
            if options.parts:
                started = time.monotonic()
                of_parts = functools.partial(make_store, prefix="parts")
                (folder / "parts").mkdir()
                sent = soak_parts(
                    of_parts, ceph.endpoint_url, folder / "parts", options.parts, options.seed
                )
                faults += _said(sent, started)
    return min(faults, 100)


def _said(figures: Figures | Sent, started: float) -> int:
    """Prints them. Returns the number of faults."""
    print(f"{figures}; {time.monotonic() - started:.0f} s", flush=True)
    for fault in figures.faults:
        print(f"  FAULT: {fault}")
    return len(figures.faults)


if __name__ == "__main__":
    sys.exit(main())
