"""Measures training while its data come: `python -m benchmarks.staging.stream`.

The store is held to bring the data in twice the time of an epoch from local files. Whole trainings
in turns, by the steps of `ddl-airflow run`: of data that were staged before, and of data that come.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from tests.integration.ceph import CephObjectStore, available
from tests.integration.faulty_proxy import FaultyProxy

BUCKET = "streaming"
FILES, ROWS = 64, 2048  # rows of each; ROW bytes of each row
ROW = 1024
SLOWER = 2.0  # staging, than an epoch
WORKERS = 8  # that fetch: each has a body of its own, and an eighth of the rate
_SCRIPT = Path(__file__).with_name("stream_rank.py")
_TAKES_S = 1800.0
_MANIFEST = """\
model_definition:
  name: {name}
  framework: {{name: tensorflow, version: "2.21"}}
  execution:
    command: python stream_rank.py
    compute_configuration: {{name: cpu, nodes: {ranks}}}
training_data_reference:
  type: s3
  connection:
    endpoint_url: ${{S3_ENDPOINT_URL}}
    access_key_id: ${{S3_ACCESS_KEY_ID}}
    secret_access_key: ${{S3_SECRET_ACCESS_KEY}}
  source: {{bucket: {bucket}}}
  stream: {stream}
training_results_reference: {{type: fs, target: {{path: ./results}}}}
"""
_TRAIN = """\
import sys
from pathlib import Path
from ddl_airflow.core.manifest import load_manifest
from ddl_airflow.local_run import Asked, run_manifest
manifest = Path(sys.argv[1])
run_manifest(load_manifest(manifest), manifest, Asked(manifest.parent / "runs", until="train"))
"""


def fill(store: S3Store) -> None:
    """Puts the files, of bytes that are numbers and labels."""
    chance = random.Random(0)  # noqa: S311  # nobody's secret
    # Small floats: the exponent is that of numbers below 1.
    block = b"".join(
        bytes((0, 0, 0, 0)) + b"".join(chance.randbytes(3) + b"\x3d" for _ in range(ROW // 4 - 1))
        for _ in range(64)
    )
    for number in range(FILES):
        store.put_bytes(f"{number:03}.bin", block * (ROWS // 64))


def train(
    home: Path, endpoint_url: str, keys: tuple[str, str], ranks: int, *, stream: bool
) -> dict[str, Any]:
    """One training, in a workspace with an empty cache; what its rank 0 has left."""
    name = "stream" if stream else "local"
    folder = home / name
    folder.mkdir()
    shutil.copy(_SCRIPT, folder)
    said = {"name": name, "ranks": ranks, "bucket": BUCKET, "stream": str(stream).lower()}
    (folder / "manifest.yml").write_text(_MANIFEST.format(**said))
    variables = {
        "S3_ENDPOINT_URL": endpoint_url,
        "S3_ACCESS_KEY_ID": keys[0],
        "S3_SECRET_ACCESS_KEY": keys[1],
    }
    done = subprocess.run(
        [sys.executable, "-c", _TRAIN, str(folder / "manifest.yml")],
        cwd=report.REPOSITORY,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=_TAKES_S,
    )
    if done.returncode:
        raise RuntimeError(f"{name} exited {done.returncode}: {done.stdout}{done.stderr}")
    (left,) = folder.glob("runs/runs/*/*/result/epochs.json")
    told: dict[str, Any] = json.loads(left.read_text())
    shutil.rmtree(folder)
    return told | {"load": os.getloadavg()[0]}


def run(home: Path, ranks: int, rounds: int) -> dict[str, Any]:
    """Measures and prints; returns every sample."""
    samples: dict[str, list[dict[str, Any]]] = {"local": [], "stream": []}
    with CephObjectStore(home / "store") as ceph:
        keys = ceph.add_user("owner")
        client = s3_client(ceph.endpoint_url, *keys)
        client.create_bucket(Bucket=BUCKET)
        fill(S3Store(client, BUCKET))
        client.close()
        epoch_s = _later(train(home, ceph.endpoint_url, keys, ranks, stream=False)["epochs_s"])
        print(f"an epoch takes {epoch_s:.1f} s: the data come in {SLOWER * epoch_s:.1f} s")
        for number in range(rounds):
            for name in ("local", "stream") if number % 2 else ("stream", "local"):
                if name == "local":
                    one = train(home, ceph.endpoint_url, keys, ranks, stream=False)
                else:
                    rate = FILES * ROWS * ROW / (SLOWER * epoch_s) / WORKERS
                    slow = FaultyProxy(ceph.endpoint_url, {}, lambda *_: True, bytes_per_s=rate)
                    with slow:
                        one = train(home, slow.endpoint_url, keys, ranks, stream=True)
                samples[name].append(one)
                print(f"round {number + 1}, {name}: {_text(one)}", flush=True)
            epoch_s = _later(samples["local"][-1]["epochs_s"])
    after = {name: [_later(one["epochs_s"]) for one in each] for name, each in samples.items()}
    cpu = {name: [_later(one["epochs_cpu_s"]) for one in each] for name, each in samples.items()}
    compared = report.compare(after["stream"], after["local"])
    low, high = compared["ratio_quartiles"]
    print(
        f"epochs after the first, of a stream: {compared['ratio']:.1%} ({low:.1%} to {high:.1%}) "
        f"of the speed from local files; {statistics.median(cpu['stream']):.2f} CPU seconds of a "
        f"rank, {statistics.median(cpu['local']):.2f} from local files"
    )
    return {"samples": samples, "compared": compared}


def _text(one: dict[str, Any]) -> str:
    epochs = ", ".join(f"{seconds:.2f}" for seconds in one["epochs_s"])
    return f"{epochs} s; the files in {one['came_s']:.1f} s; load {one['load']:.1f}"


def _later(epochs: Sequence[float]) -> float:
    """The median of all epochs but the first."""
    return statistics.median(epochs[1:])


def main() -> int:
    parser = report.argument_parser(__doc__ or "", 5, "way")
    arguments = parser.parse_args()
    if reason := available():
        print(reason)
        return 1
    about = report.about()
    print(report.about_text(about))
    with tempfile.TemporaryDirectory() as home:
        about |= run(Path(home), arguments.ranks, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
