"""Stages or publishes once, for `benchmarks.staging`, and prints what that took as JSON."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.publication import publish
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.staging import stage


def cpu_s(who: int) -> float:
    """Seconds of all processors that this process has used, or those that it waited for."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def most_mib() -> int:
    """Of memory, so far. Not ru_maxrss, which a process begins with that of its parent."""
    said = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert said is not None
    return int(said[1]) // 1024


def down(store: S3Store, folder: Path) -> dict[str, Any]:
    """Brings all, through a cache in the folder."""
    done = stage(store, Cache(folder / "cache"), folder / "data")
    return {
        "fetched": done.fetched,
        "checked": sorted({file.checked for file in done.files}),
    }


def up(store: S3Store, folder: Path) -> dict[str, Any]:
    """Publishes all files of the folder, whose digests nobody knows yet."""
    found = (path for path in folder.rglob("*") if path.is_file())
    done = publish({path.relative_to(folder).as_posix(): path for path in found}, store)
    return {"sent": len(done.files)}


def main() -> None:
    way, bucket, prefix, folder = sys.argv[1:]
    s3_client("http://localhost", "", "").close()  # imports boto3, as every task has by then
    began, used = time.monotonic(), cpu_s(resource.RUSAGE_SELF)
    client = S3Store.client_of_environment()
    answer = {"up": up, "down": down}[way](S3Store(client, bucket, prefix, "key"), Path(folder))
    answer |= {
        "wall_s": time.monotonic() - began,
        "cpu_s": cpu_s(resource.RUSAGE_SELF) - used,
        "most_mib": most_mib(),
    }
    client.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
