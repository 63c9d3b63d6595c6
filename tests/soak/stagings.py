"""`python -m tests.soak.stagings`: datasets that are staged by real processes, killed.

Each dataset, of one object of several parts and of small ones, is staged until that comes to its
end: in every other one as data that come while a training reads them. SIGKILL comes at a random
moment of each try. All the while a reader looks at the folder.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddl_airflow.storage import cache as cache_module
from ddl_airflow.storage import download, lanes, staging
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.staging import list_dataset, stage
from ddl_airflow.storage.stream import Stream
from tests.integration.ceph import CephObjectStore, available
from tests.integration.faulty_proxy import Asked, FaultyProxy
from tests.soak.publications import forked

PART = 1 << 20
PARTS, SMALL = 9, 8
LARGE = "b/large"
_BYTES_PER_S = 1.5 * PART  # of each part


@dataclass
class Fetched:
    """What came of datasets whose staging was killed, and tried again until it ended.

    Attributes:
        killed: processes that ended by SIGKILL.
        datasets: that were whole in the end.
        parts: of large objects, that were asked for, of all tries.
        found: parts and objects that a later try found, and did not ask for.
        looks: of the reader at a file or a whole folder.
        nbytes: that it compared.
        faults: what must not be; empty.
    """

    killed: int = 0
    datasets: int = 0
    parts: int = 0
    found: int = 0
    looks: int = 0
    nbytes: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.killed} SIGKILLs among stagings of {self.datasets} datasets; {self.parts} "
            f"parts asked for, {self.found} parts and objects found and not asked for again; "
            f"{self.looks} looks of the reader, {self.nbytes:,} bytes compared; "
            f"{len(self.faults)} faults"
        )


def bring(store: S3Store, cache: Cache, folder: Path, *, streams: bool) -> None:
    """One try."""
    if not streams:
        stage(store, cache, folder)
        return
    with Stream(store, cache, folder, list_dataset(store)) as coming:
        coming.finish()


def look(folder: Path, digests: Mapping[str, str], told: Path, *, streams: bool) -> None:
    """Looks into a folder until there is a file ``stop``: what is in it is whole, and right."""
    looks, nbytes, faults, known = 0, 0, [], set()
    while True:
        stop = (told / "stop").exists()
        complete = (folder / ".complete").exists()
        there = [key for key in digests if (folder / key).exists()]
        if complete or (there and not streams):
            there = list(digests)  # all or nothing
        if there != list(digests)[: len(there)]:
            faults.append(f"{there} came in another order than they are listed")
        for key in there if stop else [one for one in there if one not in known]:
            looks += 1
            known.add(key)
            try:
                content = (folder / key).read_bytes()
            except FileNotFoundError:
                # The folder is replaced by one with what is in the cache, in two steps.
                if (folder / ".complete").exists():
                    faults.append(f"{key} is not there")
                known.discard(key)
                continue
            nbytes += len(content)
            if hashlib.sha256(content).hexdigest() != digests[key]:
                faults.append(f"{key} is another file")
        if stop:
            break
        time.sleep(0.005)
    (told / "looked.json").write_text(json.dumps([looks, nbytes, faults]))


def soak(
    make_store: Callable[[str, str], S3Store], endpoint_url: str, home: Path, kills: int, seed: int
) -> Fetched:
    """Kills so many stagings, tries each again until it ends, and looks at what is fetched.

    Args:
        make_store: a store of one's own, by its endpoint and prefix.
        endpoint_url: of the service.
        home: for files; empty.
        kills: how many to kill.
        seed: of what happens when.
    """
    chance, figures = random.Random(seed), Fetched()
    for module in (download, cache_module, lanes, staging):
        vars(module)["PIECE"] = PART  # the processes are forked
    longest = {True: 0.0, False: 0.0}

    def of_objects(method: str, path: str) -> bool:
        return method == "GET" and path.count("/") > 2

    # Slow enough for most moments to be among the transfers.
    with FaultyProxy(endpoint_url, {}, of_objects, bytes_per_s=_BYTES_PER_S) as proxy:
        while figures.killed < kills or not all(longest.values()):
            number = figures.datasets = figures.datasets + 1
            streams, prefix, place = number % 2 == 0, f"data-{number}", home / str(number)
            place.mkdir()
            store = make_store(endpoint_url, prefix)
            digests = {}
            for key in sorted([LARGE, *(f"{'ac'[n % 2]}/{n}" for n in range(SMALL))]):
                size = PARTS * PART - 1000 if key == LARGE else chance.randrange(200_000)
                content = random.Random(f"{prefix} {key}").randbytes(size)
                store.put_bytes(key, content)
                digests[key] = hashlib.sha256(content).hexdigest()
            cache, folder = Cache(place / "cache"), place / "data"
            reader = forked(functools.partial(look, folder, digests, place, streams=streams))
            ended = False
            while not ended:
                parts, whole = there_of(store, cache)
                before = len(proxy.asked)
                theirs = functools.partial(make_store, proxy.endpoint_url, prefix)
                pid = forked(
                    lambda: bring(theirs(), cache, folder, streams=streams)  # noqa: B023
                )
                began = time.monotonic()
                if longest[streams] and figures.killed < kills:
                    time.sleep(chance.uniform(0, 1.3 * longest[streams]))
                    os.kill(pid, signal.SIGKILL)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                figures.killed += code == -signal.SIGKILL
                ended = code == 0
                longest[streams] = longest[streams] or time.monotonic() - began
                if code not in (0, -signal.SIGKILL):
                    figures.faults.append(f"a process ended with exit code {code}")
                    break
                check_asked(proxy.asked[before:], parts, whole, figures)
            (place / "stop").touch()
            os.waitpid(reader, 0)
            looks, nbytes, faults = json.loads((place / "looked.json").read_text())
            figures.looks, figures.nbytes = figures.looks + looks, figures.nbytes + nbytes
            figures.faults += [f"{prefix}: {fault}" for fault in faults]
            if not (folder / ".complete").exists():
                figures.faults.append(f"{prefix} is not complete")
            left = [path.name for path in (place / "cache").rglob("*.part")]
            figures.faults += [f"{prefix}: {name} is left" for name in left]
    return figures


def there_of(store: S3Store, cache: Cache) -> tuple[set[int], set[str]]:
    """Numbers of the parts, from 0, of the large object, and keys of what is whole."""
    objects = store.list()
    whole = {obj.key for obj in objects if cache.holds(store, obj)}
    parts: set[int] = set()
    for journal in cache.root.glob("blobs/*/*.done.part"):
        for line in journal.read_bytes().split(b"\n")[:-1]:
            parts.add(json.loads(line)[0])
    return parts, whole


def check_asked(asked: list[Asked], parts: set[int], whole: set[str], figures: Fetched) -> None:
    """Adds what a try has asked for, though it was there."""
    for one in asked:
        if any(one.path.endswith(f"/{key}") for key in whole):
            figures.faults.append(f"{one.path} was asked for again")
        elif one.path.endswith(f"/{LARGE}"):
            figures.parts += 1
            first = int(one.range.split("=")[1].split("-")[0])
            if first // PART in parts and first % PART == 0:
                figures.faults.append(f"part {first // PART} was asked for again")
    figures.found += len(parts) + len(whole)


def main() -> int:
    """Against a Ceph of its own. Returns the number of faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.stagings")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=time.time_ns())
    options = parser.parse_args()
    if reason := available():
        sys.exit(reason)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as place, CephObjectStore(Path(place, "ceph")) as ceph:
        home = Path(place, "files")
        home.mkdir()
        keys = ceph.add_user("soak")
        bucket = f"soak-{uuid.uuid4()}"
        client = s3_client(ceph.endpoint_url, *keys)
        client.create_bucket(Bucket=bucket)
        client.close()

        def make_store(endpoint_url: str, prefix: str) -> S3Store:
            return S3Store(s3_client(endpoint_url, *keys), bucket, prefix)

        started = time.monotonic()
        figures = soak(make_store, ceph.endpoint_url, home, options.kills, options.seed)
    print(f"{figures}; {time.monotonic() - started:.0f} s", flush=True)
    for fault in figures.faults:
        print(f"  {fault}")
    return len(figures.faults)


if __name__ == "__main__":
    sys.exit(main())
