"""What faults on the way do to data: `python -m benchmarks.staging.faults`.

A proxy before a Ceph object store puts each fault at each request, on the way down and on the way
up, of ours and of its peers; what came is compared with what was sent, byte by byte.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks import environments, report
from benchmarks.staging.__main__ import CAPACITY, OURS, variables
from ddl_airflow.storage.s3 import S3Store
from ddl_airflow.storage.s3_client import s3_client
from ddl_airflow.storage.store import PIECE, SUCCESS
from tests.integration.ceph import CephObjectStore, available
from tests.integration.faulty_proxy import Asked, FaultyProxy

PAGE = report.REPOSITORY / "docs" / "data-faults.md"
TOOLS = (OURS, "s5cmd", "aws-cli", "rclone")
BUCKET = "faults"
BOUND_S = 240.0  # who takes longer hangs
AT_ONCE = 6
STALL_S = 30
SIZES = {"small.bin": 300_000, "large.bin": PIECE + 100_000}  # one request, two parts
MANY = 10_001
# The most that one request may send or copy. Source: Amazon S3 user guide, uploading objects.
BORDER = 5 * 2**30
# Keys that a folder can hold, and that programs get wrong.
ODD = (
    "empty",
    "folder/empty",
    "a b+c%20d%41.bin",
    "ü-composed-\u00fc.bin",
    "u-decomposed-u\u0308.bin",
    "日本語/データ.bin",
    "🙂/👩‍👩‍👧.bin",
    "&<>'\"$`;!#?=,@:*[]{}|^~\\.bin",
    "-dash",
    " space at both ends ",
    "dots../...bin",
    "\u202eright to left",
    "x" * 200,
)

# Fault -> what the text of an error must say of its cause, if it does. The way down.
_BROKEN = r"reset|broken|closed|EOF|connection|timed? ?out|incomplete|bytes|size|length|truncated"
DOWN = {
    "500": r"500|InternalError|Internal Server",
    "503": r"503|SlowDown|Slow ?Down|Unavailable",
    "reset": _BROKEN,
    "cut": _BROKEN,
    "half": _BROKEN,
    "changed": r"sha256|md5|checksum|hash|digest|ETag|corrupt|differ|XML|pars|syntax|read|412",
    "error as success": r"XML|ETag|InternalError|size|length|bytes|range|answer|pars|hash|md5",
    f"stall {STALL_S}": _BROKEN,
    "expired": r"ExpiredToken|expired",
    "skewed": r"RequestTimeTooSkewed|skew|clock",
}
UP = {
    "500": DOWN["500"],
    "503": DOWN["503"],
    "error as success": DOWN["error as success"],
    "sent reset": _BROKEN,
    "sent cut": _BROKEN,
    "sent changed": r"BadDigest|SHA256Mismatch|md5|checksum|hash|digest|ETag|corrupt|differ",
    f"sent stall {STALL_S}": _BROKEN,
    "done 500": DOWN["500"],
    "done reset": _BROKEN,
    "done cut": _BROKEN + "|malformed|header|answer",
    f"done stall {STALL_S}": _BROKEN,
    "expired": DOWN["expired"],
    "skewed": DOWN["skewed"],
}
STAY = ("expired", "skewed")  # from that request on: keys and clocks do not mend themselves
REPLACED = r"412|Precondition|changed|ETag|modified|mismatch|differ|corrupt|hash|md5|size"

# What faults are called on the page.
_NAMES = {
    "500": "500",
    "503": "503 SlowDown",
    "reset": "reset in the middle of the body",
    "cut": "end in the middle of the body",
    "half": "half a body, answered as all of it",
    "changed": "one byte of the body changed",
    "error as success": "200 with an error in it",
    f"stall {STALL_S}": f"{STALL_S} s without a byte, then the end",
    "expired": "expired credentials, from there on",
    "skewed": "clock skew, from there on",
    "sent reset": "reset while the body is sent",
    "sent cut": "end while the body is sent",
    "sent changed": "one byte changed on the way to the store",
    f"sent stall {STALL_S}": f"{STALL_S} s in which nothing is taken, then the end",
    "done 500": "done, and answered with 500",
    "done reset": "done, and reset",
    "done cut": "done, and the answer cut off",
    f"done stall {STALL_S}": f"done, and answered after {STALL_S} s",
    "replaced": "replaced by another object between two requests",
    "odd": f"{len(ODD)} odd names, two of them of 0 bytes",
    "many": f"{MANY:,} objects",
    "border": "an object of 5 GiB less a byte, of 5 GiB, and of a byte more",
}


@dataclass(frozen=True)
class Outcome:
    """What came of one run.

    Attributes:
        tool, way, fault: of what.
        index: of the request that got the fault.
        end: "right": every byte; "clear": failed, and named object and cause; "unclear": failed,
            and did not; "silent": ended well, with wrong bytes or without some; "hung".
        left: whether a failed one left wrong bytes under the object's own name.
        orphan: whether an upload in parts was left.
        took_s: seconds.
        said: its last words.
    """

    tool: str
    way: str
    fault: str
    index: int
    end: str
    left: bool
    orphan: bool
    took_s: float
    said: str


class Tool:
    """A program that copies objects."""

    def __init__(self, name: str, folder: Path, keys: tuple[str, str]) -> None:
        self.name, self._keys = name, keys
        peers, mine = environments.staging().python.parent, environments.ours()
        programs = {"s5cmd": "s5cmd", "aws-cli": "aws", "rclone": "rclone"}
        self._command = [str(peers / programs.get(name, ""))]
        self._more = {"AWS_CONFIG_FILE": str(folder / "aws-config")}
        if name == OURS:
            self._command = [str(mine.python), "-m", "benchmarks.staging.ours"]
            self._more = mine.variables()
        # So that all of them send and fetch the large object in the same parts.
        (folder / "aws-config").write_text(
            "[default]\ns3 =\n"
            f"    multipart_threshold = {PIECE}\n    multipart_chunksize = {PIECE}\n"
        )

    def run(self, arguments: Sequence[str], endpoint_url: str) -> tuple[int | None, str]:
        """Its exit code, None if it hangs, and what it said."""
        try:
            done = subprocess.run(
                [*self._command, *arguments],
                env=os.environ | variables(endpoint_url, *self._keys) | self._more,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=BOUND_S,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            return None, ""
        return done.returncode, done.stdout + done.stderr

    @property
    def version(self) -> str:
        """As it says itself."""
        if self.name == OURS:
            commit = subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"],
                cwd=report.REPOSITORY,
                capture_output=True,
                text=True,
                check=False,
            )
            return f"commit {commit.stdout.strip()}"
        said = self.run(["--version" if self.name == "aws-cli" else "version"], "http://none")[1]
        return said.split()[1 if self.name == "rclone" else 0].removeprefix("aws-cli/")

    def down(self, prefix: str, folder: Path) -> list[str]:
        """Arguments that bring what is under a prefix to a folder."""
        part = str(PIECE // 2**20)
        place = f"s3://{BUCKET}/{prefix}/"
        return {
            OURS: ["down", BUCKET, prefix, str(folder)],
            "s5cmd": ["cp", "--part-size", part, f"{place}*", f"{folder}/"],
            "aws-cli": ["s3", "cp", "--recursive", "--no-progress", place, str(folder)],
            "rclone": ["copy", *_RCLONE, f"peer:{BUCKET}/{prefix}", str(folder)],
        }[self.name]

    def up(self, prefix: str, folder: Path) -> list[str]:
        """Arguments that bring what is in a folder to a prefix."""
        part = str(PIECE // 2**20)
        place = f"s3://{BUCKET}/{prefix}/"
        return {
            OURS: ["up", BUCKET, prefix, str(folder)],
            "s5cmd": ["cp", "--part-size", part, f"{folder}/", place],
            "aws-cli": ["s3", "cp", "--recursive", "--no-progress", str(folder), place],
            "rclone": ["copy", *_RCLONE, str(folder), f"peer:{BUCKET}/{prefix}"],
        }[self.name]


_RCLONE = [
    *("--multi-thread-cutoff", f"{PIECE}B", "--multi-thread-chunk-size", f"{PIECE}B"),
    *("--s3-upload-cutoff", f"{PIECE}B", "--s3-chunk-size", f"{PIECE}B"),
]


class Bench:
    """A store, files, and what becomes of them on the way."""

    def __init__(self, home: Path, ceph: CephObjectStore) -> None:
        self.home, self.endpoint_url = home, ceph.endpoint_url
        self.keys = ceph.add_user("owner")
        self.client = s3_client(self.endpoint_url, *self.keys)
        self.client.create_bucket(Bucket=BUCKET)
        self.tools = {name: Tool(name, home, self.keys) for name in TOOLS}
        self._gone = threading.Lock()

    def store(self, prefix: str) -> S3Store:
        """What is under it, without faults."""
        return S3Store(self.client, BUCKET, prefix)

    def put(self, prefix: str, files: Mapping[str, bytes]) -> None:
        """As another program would: nothing of ours is with the objects."""
        if len(files) < MANY:
            for key, body in files.items():
                self.client.put_object(Bucket=BUCKET, Key=f"{prefix}/{key}", Body=body)
            return
        folder = self.home / f"put-{prefix}"
        _write(folder, files)
        self._by_s5cmd("cp", f"{folder}/", f"s3://{BUCKET}/{prefix}/")
        shutil.rmtree(folder)

    def _by_s5cmd(self, *arguments: str) -> None:
        code, said = self.tools["s5cmd"].run(["--log", "error", *arguments], self.endpoint_url)
        if code:
            raise RuntimeError(f"s5cmd {' '.join(arguments)}: {said}")

    def requests(self, tool: str, way: str, files: Mapping[str, bytes]) -> list[Asked]:
        """Those of a run without a fault. Raises RuntimeError if that ends badly."""
        asked: list[Asked] = []
        done = self.tried(tool, way, "none", 0, files, {}, "", asked)
        if done.end != "right":
            raise RuntimeError(f"{tool} {way} without a fault: {done.end}: {done.said}")
        return asked

    def tried(
        self,
        tool: str,
        way: str,
        fault: str,
        index: int,
        files: Mapping[str, bytes],
        faults: Mapping[int | None, str],
        cause: str,
        asked: list[Asked] | None = None,
        place: str = "",
        before: Callable[[str], None] | None = None,
        others: Mapping[str, bytes] | None = None,
    ) -> Outcome:
        """One run.

        Args:
            tool, way, fault, index: as ``Outcome`` has them.
            files: what is brought, by their keys.
            faults: as ``FaultyProxy`` has them.
            cause: a regular expression for what an error must say.
            asked: gets the requests.
            place: what it must name, too; empty: one of the files.
            before: called with the path of each request before it is passed on.
            others: what files may be instead, each altogether.
        """
        prefix = f"{way}-{uuid.uuid4().hex[:8]}"
        folder = self.home / prefix
        lock = threading.Lock()

        def counted(_method: str, path: str) -> bool:
            if before is not None:
                with lock:
                    before(f"{prefix}{path.partition(prefix)[2]}")
            return True

        if way == "down":
            self.put(prefix, files)
        else:
            _write(folder, files)
        try:
            with FaultyProxy(self.endpoint_url, faults, counted) as proxy:
                program, began = self.tools[tool], time.monotonic()
                arguments = (program.down if way == "down" else program.up)(prefix, folder)
                code, said = program.run(arguments, proxy.endpoint_url)
                took_s = time.monotonic() - began
                proxy.wait()
                if asked is not None:
                    asked += proxy.asked
            came = self._came(tool, way, prefix, folder)
            orphan = way == "up" and any(self.store(prefix).unfinished())
            return self._judged(
                Outcome(tool, way, fault, index, "", False, orphan, took_s, said.strip()[-600:]),
                *(code, said, files, others or {}, came, cause, place),
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._clear(prefix)

    def border(self, tool: str, way: str, index: int) -> Outcome:
        """A run with one object of ``BORDER`` bytes, less a byte at index 0, a byte more at 2."""
        prefix, key = f"border-{way}-{uuid.uuid4().hex[:8]}", f"border-{index}"
        program, home = self.tools[tool], self.home / prefix
        source, came = home / "made" / key, home / "came"
        source.parent.mkdir(parents=True), came.mkdir()
        _write_sparse(source, BORDER - 1 + index)
        try:
            if way == "down":
                self._by_s5cmd("cp", str(source), f"s3://{BUCKET}/{prefix}/")
                arguments = program.down(prefix, came)
            else:
                arguments = program.up(prefix, source.parent)
            began = time.monotonic()
            code, said = program.run(arguments, self.endpoint_url)
            took_s = time.monotonic() - began
            if way == "down":
                found = [*came.rglob(key)]
                right = bool(found) and filecmp.cmp(found[0], source, shallow=False)
            else:
                right = self._is_there(prefix, source)
            end = "hung" if code is None else "unclear" if code else "right" if right else "silent"
            orphan = way == "up" and any(self.store(prefix).unfinished())
            return Outcome(
                *(tool, way, "border", index, end, False, orphan, took_s, said.strip()[-600:])
            )
        finally:
            shutil.rmtree(home, ignore_errors=True)
            self._clear(prefix)

    def _is_there(self, prefix: str, source: Path) -> bool:
        """Whether an object under the prefix has the name and the bytes of a file."""
        store = self.store(prefix)
        found = [obj for obj in store.list() if obj.key.rpartition("/")[2] == source.name]
        if [obj.size for obj in found] != [source.stat().st_size]:
            return False
        key = f"{prefix}/{found[0].key}"
        body = self.client.get_object(Bucket=BUCKET, Key=key)["Body"]
        with open(source, "rb") as file:
            return all(block == file.read(len(block)) for block in body.iter_chunks(PIECE))

    def _came(self, tool: str, way: str, prefix: str, folder: Path) -> Mapping[str, bytes]:
        """What is there afterwards under the names of the files."""
        if way == "down":
            folder = folder / "data" if tool == OURS else folder
            found = (path for path in folder.rglob("*") if path.is_file())
            return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
        store = self.store(prefix)
        listed = [obj.key for obj in store.list()]
        if tool == OURS:  # whose readers look for the marker
            names = [key.partition("/")[0] for key in listed if key.endswith(f"/{SUCCESS}")]
            store = store.at(names[0]) if names else store
            listed = [obj.key for obj in store.list() if obj.key != SUCCESS] if names else []
        with ThreadPoolExecutor(8) as pool:
            return dict(zip(listed, pool.map(store.read_bytes, listed), strict=True))

    @staticmethod
    def _judged(
        run: Outcome,
        code: int | None,
        said: str,
        files: Mapping[str, bytes],
        others: Mapping[str, bytes],
        came: Mapping[str, bytes],
        cause: str,
        place: str,
    ) -> Outcome:
        def is_right(key: str) -> bool:
            body = came.get(key)
            return body is not None and (
                body == files[key] or (key in others and body == others[key])
            )

        left = any(key in came and not is_right(key) for key in files)
        if code is None:
            end = "hung"
        elif code == 0:
            end = "right" if all(map(is_right, files)) else "silent"
        else:
            names = [place] if place else [key.rpartition("/")[2] for key in (*files, SUCCESS)]
            named = any(name in said for name in names)
            end = "clear" if named and re.search(cause, said, re.IGNORECASE) else "unclear"
        return Outcome(**{**asdict(run), "end": end, "left": left and end != "silent"})

    def _clear(self, prefix: str) -> None:
        with self._gone:
            store = self.store(prefix)
            for one in store.unfinished():
                store.discard(one)
            keys = [obj.key for obj in store.list()]
            if len(keys) < MANY:
                store.delete(keys)
            else:
                self._by_s5cmd("rm", f"s3://{BUCKET}/{prefix}/*")


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for key, body in files.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


def _write_sparse(path: Path, nbytes: int) -> None:
    """A file with random bytes at both ends and at the border of 32 bits, and none between."""
    with open(path, "wb") as file:
        file.truncate(nbytes)
        for start in (0, 2**32 - 2**19, nbytes - 2**20):
            file.seek(start)
            file.write(random.Random(start).randbytes(2**20))  # noqa: S311


def contents(sizes: Mapping[str, int]) -> dict[str, bytes]:
    """Bytes of those sizes, by key."""
    return {key: random.Random(key).randbytes(size) for key, size in sizes.items()}  # noqa: S311


def suits(fault: str, one: Asked) -> bool:
    """Whether a fault can be put at such a request."""
    if fault.startswith("sent "):
        return one.took > 0
    if fault.startswith("done "):
        return one.method in ("PUT", "POST", "DELETE")
    if fault in ("reset", "cut", "half", "changed") or fault.startswith("stall"):
        return one.method == "GET"
    return True


def jobs(
    bench: Bench, tools: Sequence[str], ways: Sequence[str], chosen: Sequence[str]
) -> list[Callable[[], Outcome]]:
    """Every fault at every request, as a run each."""
    files = contents(SIZES)
    planned: list[Callable[[], Outcome]] = []
    for way in ways:
        for tool in tools:
            asked = bench.requests(tool, way, files)
            print(f"{tool} {way}: {', '.join(f'{a.method} {a.took or a.sent}' for a in asked)}")
            for fault, cause in (DOWN if way == "down" else UP).items():
                if chosen and fault not in chosen:
                    continue
                for index, one in enumerate(asked):
                    if not suits(fault, one):
                        continue
                    stays = fault in STAY
                    faults = dict.fromkeys(range(index, 1000 if stays else index + 1), fault)
                    of_object = one.path.rpartition("/")[2] in (*files, SUCCESS)
                    place = "" if of_object else BUCKET

                    def run(
                        arguments: tuple[Any, ...] = (
                            *(tool, way, fault, index, files, faults, cause, None, place),
                        ),
                    ) -> Outcome:
                        return bench.tried(*arguments)

                    planned.append(run)
            if way == "down" and (not chosen or "replaced" in chosen):
                gets = sum(one.method == "GET" and one.path.endswith("large.bin") for one in asked)
                planned += [_replaced(bench, tool, number, files) for number in range(gets + 1)]
    return planned


def _replaced(
    bench: Bench, tool: str, number: int, files: Mapping[str, bytes]
) -> Callable[[], Outcome]:
    """Another object of the same name and size comes just before one of its requests."""
    other = random.Random("other").randbytes(len(files["large.bin"]))  # noqa: S311
    seen = []

    def before(path: str) -> None:
        if path.endswith("large.bin"):
            seen.append(path)
            if len(seen) == number + 1:
                bench.client.put_object(Bucket=BUCKET, Key=path, Body=other)

    def run() -> Outcome:
        others = {"large.bin": other}
        return bench.tried(
            *(tool, "down", "replaced", number, files, {}, REPLACED, None, "", before, others)
        )

    return run


def alone(
    bench: Bench, tools: Sequence[str], ways: Sequence[str], chosen: Sequence[str]
) -> list[Callable[[], Outcome]]:
    """What needs no fault to go wrong."""
    odd = {key: b"" if key.endswith("empty") else key.encode() for key in ODD}
    many = {f"{number:05}": b"%d" % number for number in range(MANY)}
    planned = []
    for name, files in (("odd", odd), ("many", many)):
        if chosen and name not in chosen:
            continue
        for way in ways:
            for tool in tools:

                def run(
                    arguments: tuple[Any, ...] = (tool, way, name, 0, files, {}, "."),
                ) -> Outcome:
                    return bench.tried(*arguments)

                planned.append(run)
    return planned


def at_border(
    bench: Bench, tools: Sequence[str], ways: Sequence[str], chosen: Sequence[str]
) -> list[Callable[[], Outcome]]:
    """Objects as large as one request may send: runs that come one after the other."""
    if chosen and "border" not in chosen:
        return []
    return [
        partial(bench.border, tool, way, index)
        for index in range(3)
        for way in ways
        for tool in tools
    ]


def cell(runs: Sequence[Outcome]) -> str:
    """What came of the runs of one tool under one fault."""
    if not runs:
        return ""
    count = Counter(one.end for one in runs)
    words = {
        "right": "right",
        "clear": "clear failure",
        "unclear": "failure that does not say it",
        "silent": "silent damage",
        "hung": "hung",
    }
    said = [
        f"**{count[end]} {word}**" if end in ("silent", "hung") else f"{count[end]} {word}"
        for end, word in words.items()
        if count[end]
    ]
    for what, which in (("wrong file left", "left"), ("upload left", "orphan")):
        if number := sum(getattr(one, which) for one in runs):
            said.append(f"**{number} {what}**")
    return ", ".join(said)


def tables(outcomes: Sequence[Outcome], tools: Sequence[str]) -> str:
    """Markdown: a table for each way, a row for each fault."""
    text = []
    for way, title in (("down", "The way down"), ("up", "The way up")):
        rows = [one for one in outcomes if one.way == way]
        if not rows:
            continue
        text += [f"### {title}", "", f"| | {' | '.join(tools)} |", "|---" * (len(tools) + 1) + "|"]
        faults = [name for name in _NAMES if any(one.fault == name for one in rows)]
        for fault in faults:
            of_fault = [one for one in rows if one.fault == fault]
            cells = [cell([one for one in of_fault if one.tool == tool]) for tool in tools]
            text.append(f"| {_NAMES[fault]} | {' | '.join(cells)} |")
        cells = [cell([one for one in rows if one.tool == tool]) for tool in tools]
        text += [f"| **all** | {' | '.join(cells)} |", ""]
        slowest = {
            tool: max(
                (one.took_s for one in rows if one.tool == tool and "stall" in one.fault),
                default=0.0,
            )
            for tool in tools
        }
        said = ", ".join(f"{tool} {took_s:.0f} s" for tool, took_s in slowest.items() if took_s)
        text += [f"The longest run with a stall of {STALL_S} s: {said}.", ""] if said else []
    return "\n".join(text).rstrip()


_PROSE = f"""# What faults do to data

`python -m benchmarks.staging.faults --page` writes this page. A proxy before a Ceph object store
on the same machine puts each fault at each request of a program, one at a time, also where it
lists or looks; each program sends and fetches an object of one request and one of two parts, with
the number of tries that it has by itself. Then every byte is compared with what was sent, and the
store is asked for uploads in parts that were left.

- **right**: it ended well, and every byte is right; for ours: what `_SUCCESS` lists.
- **clear failure**: it failed, and said of which object, and why; of a request for none: of which
  bucket.
- **failure that does not say it**: it failed, and one of both is missing.
- **silent damage**: it ended well, and bytes are wrong or missing. **Wrong file left**: it
  failed, and there is something else under the object's name. **Upload left**: parts that nobody
  sees, and pays for.
- **hung**: it took longer than {BOUND_S:.0f} s.

Requests are plain http, signed with a digest of what is sent. Over https that is left out by
most, and a byte that changes is TLS's to find.

With expired keys, or a clock that is wrong, nobody can end an upload any more. Those that ours
leaves then are ended by the next try, or by [`ddl-airflow clean`](cleaning.md).

<!-- measured -->
<!-- /measured -->
"""


def write_page(text: str) -> None:
    """Puts the tables between the marks of the page; makes one that is not there."""
    page = PAGE.read_text("utf-8") if PAGE.exists() else _PROSE
    marked = r"(<!-- measured -->\n).*(<!-- /measured -->)"
    if not re.search(marked, page, re.DOTALL):
        raise RuntimeError(f"{PAGE} has no marks")
    PAGE.write_text(
        re.sub(marked, lambda found: f"{found[1]}\n{text}\n\n{found[2]}", page, flags=re.DOTALL),
        "utf-8",
    )


def run(arguments: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Runs all, and prints; returns every outcome."""
    tools, outcomes = arguments.tools, []
    with CephObjectStore(home / "store", capacity=CAPACITY) as ceph:
        bench = Bench(home, ceph)
        versions = {name: bench.tools[name].version for name in tools}
        planned = jobs(bench, tools, arguments.ways, arguments.faults)
        planned += alone(bench, tools, arguments.ways, arguments.faults)
        random.Random(17).shuffle(planned)  # noqa: S311  # who stops it early has some of each
        large = at_border(bench, tools, arguments.ways, arguments.faults)
        print(f"{len(planned) + len(large)} runs", flush=True)
        began = time.monotonic()
        about = report.about() | {"versions": versions}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for outcome in chain(
                (done.result() for done in as_completed([pool.submit(one) for one in planned])),
                (one() for one in large),
            ):
                outcomes.append(outcome)
                if outcome.end not in ("right", "clear") or outcome.orphan or outcome.left:
                    print(f"{outcome}", flush=True)
                if arguments.json:
                    known = {"outcomes": [asdict(one) for one in outcomes]}
                    arguments.json.write_text(json.dumps(about | known, indent=1) + "\n")
                if len(outcomes) % 20 == 0:
                    took_s = time.monotonic() - began
                    print(
                        f"… {len(outcomes)}/{len(planned) + len(large)}, {took_s:.0f} s", flush=True
                    )
        bench.client.close()
    return {"versions": versions, "outcomes": [asdict(one) for one in outcomes]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Shows what faults on the way do to data.")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--ways", nargs="+", choices=("down", "up"), default=("down", "up"))
    parser.add_argument("--faults", nargs="+", choices=tuple(_NAMES), default=())
    parser.add_argument("--folder", type=Path, help="for files; some GiB")
    parser.add_argument("--json", type=Path, help="where to write every outcome")
    parser.add_argument("--page", action="store_true", help=f"write {PAGE.name}, too")
    parser.add_argument(
        "--from", dest="known", type=Path, nargs="+", help="of earlier runs' --json"
    )
    arguments = parser.parse_args()
    if reason := available():
        print(reason)
        return 1
    if arguments.known:
        every = [json.loads(path.read_text()) for path in arguments.known]
        about = every[0]
        for other in every[1:]:  # which has run again what it has
            again = {(one["tool"], one["way"], one["fault"]) for one in other["outcomes"]}
            about["outcomes"] = [
                one
                for one in about["outcomes"]
                if (one["tool"], one["way"], one["fault"]) not in again
            ] + other["outcomes"]
            about["versions"] |= other["versions"]
    else:
        about = report.about()
        print(report.about_text(about))
        with tempfile.TemporaryDirectory(dir=arguments.folder) as home:
            about |= run(arguments, Path(home))
    tools = [name for name in TOOLS if name in about["versions"]]
    outcomes = [Outcome(**one) for one in about["outcomes"]]
    versions = ", ".join(f"{name}: {version}" for name, version in about["versions"].items())
    text = f"{time.strftime('%B %Y')}; {versions}; {len(outcomes):,} runs.\n\n"
    text += tables(outcomes, tools)
    print(f"\n{text}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    if arguments.page:
        write_page(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
