"""Stages data once, for `benchmarks.staging`, and prints what that took as JSON."""

from __future__ import annotations

import json
import re
import resource
import sys
import time
from pathlib import Path

from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.transfer import stage


def cpu_s(who: int) -> float:
    """Seconds of all processors that this process has used, or those that it waited for."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def most_mib() -> int:
    """Of memory, so far. Not ru_maxrss, which a process begins with that of its parent."""
    said = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert said is not None
    return int(said[1]) // 1024


def main() -> None:
    bucket, prefix, folder = sys.argv[1:]
    S3Store.client_of_environment().close()  # imports boto3, as every task has by then
    began, used = time.monotonic(), cpu_s(resource.RUSAGE_SELF)
    client = S3Store.client_of_environment()
    done = stage(
        S3Store(client, bucket, prefix, "key"), Cache(Path(folder, "cache")), Path(folder, "data")
    )
    answer = {
        "wall_s": time.monotonic() - began,
        "cpu_s": cpu_s(resource.RUSAGE_SELF) - used,
        "fetched": done.fetched,
        "checked": sorted({file.checked for file in done.files}),
        "most_mib": most_mib(),
    }
    client.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
