"""Measures training while its data come: `python -m benchmarks.staging.stream`.

The store is held to bring the data until twice the time of an epoch from local files has passed
since the first one began: processes need long to start, and the data come meanwhile. Two whole
trainings, by the steps of `ddl-airflow run`: one of data that were staged before, and one of data
that come. Each has its first epoch for itself; from the second on they take turns, epoch by epoch.
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
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from tests.integration.ceph import CephObjectStore, available
from tests.integration.faulty_proxy import FaultyProxy

BUCKET = "streaming"
FILES, ROWS = 64, 1024  # rows of each; ROW bytes of each row
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
parameters: {{turns: {turns}, side: {side}, epochs: {epochs}}}
"""
_TRAIN = """\
import sys
from pathlib import Path
from ddl_airflow.core.manifest.load import load_manifest
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


class Training:
    """One training, in a workspace with an empty cache.

    Args:
        home: for its folder.
        endpoint_url, keys: of the store.
        ranks: how many.
        epochs: how many.
        stream: whether its data come while it trains.
    """

    def __init__(
        self,
        home: Path,
        endpoint_url: str,
        keys: tuple[str, str],
        ranks: int,
        epochs: int,
        *,
        stream: bool,
    ) -> None:
        self._name = "stream" if stream else "local"
        self._folder = home / self._name
        self._folder.mkdir()
        shutil.copy(_SCRIPT, self._folder)
        self._turns = home / "turns"
        self._turns.mkdir(exist_ok=True)
        said = _MANIFEST.format(
            name=self._name,
            ranks=ranks,
            bucket=BUCKET,
            stream=str(stream).lower(),
            turns=self._turns,
            side=int(stream),
            epochs=epochs,
        )
        (self._folder / "manifest.yml").write_text(said)
        variables = {
            "S3_ENDPOINT_URL": endpoint_url,
            "S3_ACCESS_KEY_ID": keys[0],
            "S3_SECRET_ACCESS_KEY": keys[1],
        }
        with open(self._folder / "log", "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _TRAIN, str(self._folder / "manifest.yml")],
                cwd=report.REPOSITORY,
                env=os.environ | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for_first_epoch(self) -> None:
        """Until it waits for its turn."""
        while not list(self._turns.glob(f"{int(self._name == 'stream')}-0")):
            if self._process.poll() is not None:
                self.end()
            time.sleep(0.1)

    def end(self) -> dict[str, Any]:
        """What its rank 0 has left. Raises RuntimeError if it failed."""
        if self._process.wait(_TAKES_S):
            raise RuntimeError(f"{self._name} failed: {(self._folder / 'log').read_text()}")
        (left,) = self._folder.glob("runs/runs/*/*/result/epochs.json")
        told: dict[str, Any] = json.loads(left.read_text())
        shutil.rmtree(self._folder)
        return told

    def kill(self) -> None:
        """Whatever it does; its ranks end with it."""
        self._process.kill()
        self._process.wait()


def run(home: Path, ranks: int, rounds: int) -> dict[str, Any]:
    """Measures and prints; returns every sample. ``rounds``: of an epoch of each."""
    with CephObjectStore(home / "store") as ceph:
        keys = ceph.add_user("owner")
        client = s3_client(ceph.endpoint_url, *keys)
        client.create_bucket(Bucket=BUCKET)
        fill(S3Store(client, BUCKET))
        client.close()
        started_at = time.time()
        alone = Training(home, ceph.endpoint_url, keys, ranks, 1, stream=False).end()
        shutil.rmtree(home / "turns")
        start_s, epoch_s = alone["began_at"] - started_at, alone["epochs_s"][0]
        staging_s = start_s + SLOWER * epoch_s
        print(
            f"an epoch takes {epoch_s:.1f} s, and begins after {start_s:.1f} s: the data come in "
            f"{staging_s:.1f} s",
            flush=True,
        )
        rate = FILES * ROWS * ROW / staging_s / WORKERS
        with FaultyProxy(ceph.endpoint_url, {}, lambda *_: True, bytes_per_s=rate) as slow:
            both = []
            try:
                for stream, url in ((True, slow.endpoint_url), (False, ceph.endpoint_url)):
                    one = Training(home, url, keys, ranks, 1 + rounds, stream=stream)
                    both.append(one)
                    one.wait_for_first_epoch()
                said = {
                    name: one.end() for name, one in zip(("stream", "local"), both, strict=True)
                }
            except BaseException:
                for one in both:
                    one.kill()
                raise
    stream, local = said["stream"], said["local"]
    print(f"stream: {_text(stream)}\nlocal: {_text(local)}")
    compared = report.compare(stream["epochs_s"][1:], local["epochs_s"][1:])
    cpu = {name: statistics.median(one["epochs_cpu_s"][1:]) for name, one in said.items()}
    low, high = compared["ratio_quartiles"]
    print(
        f"epochs after the first, of a stream: {compared['ratio']:.1%} ({low:.1%} to {high:.1%}) "
        f"of the speed from local files; CPU seconds of rank 0: {cpu['stream']:.2f}, "
        f"{cpu['local']:.2f} from local files; load {os.getloadavg()[0]:.1f}"
    )
    return {"alone": alone, "samples": said, "compared": compared}


def _text(one: dict[str, Any]) -> str:
    epochs = ", ".join(f"{seconds:.2f}" for seconds in one["epochs_s"])
    return f"{epochs} s; the files of the first in {one['came_s']:.1f} s"


def main() -> int:
    parser = report.argument_parser(__doc__ or "", 12, "way, an epoch,")
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
