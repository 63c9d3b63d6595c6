"""Compiles the C++ tests beside the other tests, from the session's start, at the lowest priority.

They are minutes of work for the compiler, and many other tests wait more than they compute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "ops_lib" / "cc"
# What needs neither TensorFlow nor MPI.
TESTED = [
    *(
        path
        for layer in ("core", "transport", "algorithms")
        for path in sorted((SOURCES / layer).glob("*.cc"))
        if not path.name.startswith("mpi_")
    ),
    *sorted((SOURCES / "comm").glob("nccl_*.cc")),
    *(
        SOURCES / "comm" / f"{name}.cc"
        for name in (
            *("adasum", "dissemination_barrier", "host_memory", "hosts_communicator"),
            "shm_communicator",
        )
    ),
    *(
        SOURCES / "runtime" / f"{name}.cc"
        for name in (
            *("agreement", "cancelled_run", "description", "engine", "fused_allreduce", "gather"),
            *("graph_runs", "inline_request", "process_sets", "progress", "proposal", "recorder"),
            *("request_queue", "statistics", "teams", "timeline"),
        )
    ),
    *sorted(HERE.glob("*.cc")),
]
# What depends on the processor.
PORTABLE = [
    path
    for path in TESTED
    if path.parent.name in ("core", "transport", "algorithms")
    or path.stem
    in (
        *("main", "thread_test", "vector_test", "pieces_test", "host_barrier_test"),
        "between_hosts_test",
    )
]


class Variant(NamedTuple):
    """One program of the tests.

    Attributes:
        flags: for compiling and linking.
        sources: of the program.
        compiler: its name.
    """

    flags: list[str]
    sources: list[Path] = TESTED
    compiler: str = "g++"


# As low an optimisation as pays: AddressSanitizer takes longer to optimise the code than to run it;
# what ThreadSanitizer runs waits for other threads, the longer the slower each is.
SANITIZERS = {
    "address-undefined": Variant(
        ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    ),
    "thread": Variant(["-O1", "-fsanitize=thread"]),
}
# Static, so that the emulator needs no libraries of that processor.
AARCH64 = Variant(["-O1", "-static"], PORTABLE, "aarch64-linux-gnu-g++")
VARIANTS = SANITIZERS | {"aarch64": AARCH64}
# Read once for all files of a variant: most of a compiler's time for a file of tests is theirs.
STANDARD = (
    *("algorithm", "atomic", "chrono", "cmath", "cstdint", "cstring", "deque", "fstream"),
    *("functional", "memory", "mutex", "numeric", "random", "string", "thread", "vector"),
)
WORDS = ["-std=c++17", "-g1", "-Wall", "-Wextra", "-Werror", "-Winvalid-pch"]


class Compiler:
    """Compiles on all cores, one object at a time on each; the first to be asked for come first."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="cc-"))
        # It works beside other tests, some of which change theirs for a while.
        self._environment = dict(os.environ)
        self._pool = ThreadPoolExecutor(os.cpu_count() or 1)
        self._headers: dict[str, Future[Path]] = {}
        self._objects: dict[str, list[Future[Path]]] = {}
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._awaited = self._ended = False

    def can(self, variant: str) -> bool:
        """Whether the variant's compiler is installed."""
        return shutil.which(VARIANTS[variant].compiler) is not None

    def start(self, variant: str) -> None:
        """Begins with a variant's objects; returns at once."""
        if self.can(variant) and variant not in self._objects:
            self._headers[variant] = self._pool.submit(self._compile_header, variant)
            self._objects[variant] = [
                self._pool.submit(self._compile, variant, source)
                for source in VARIANTS[variant].sources
            ]

    def program(self, variant: str) -> Path:
        """The tests, linked. Raises AssertionError with what the compiler said."""
        self.start(variant)
        self._awaited = True
        program = self._folder / variant / "tests"
        objects = [compiled.result() for compiled in self._objects[variant]]
        self._run(variant, ["-o", program, *objects])
        return program

    def end(self) -> None:
        """Leaves nothing running, and no files."""
        with self._lock:
            self._ended = True
            for process in self._running:
                process.kill()
        self._pool.shutdown(cancel_futures=True)
        # What g++ had started may go on for a moment, and write there.
        shutil.rmtree(self._folder, ignore_errors=True)

    def _compile_header(self, variant: str) -> Path:
        header = self._folder / variant / "standard.h"
        header.parent.mkdir()
        header.write_text("".join(f"#include <{name}>\n" for name in STANDARD))
        self._run(variant, [*WORDS, "-x", "c++-header", "-o", f"{header}.gch", header])
        return header

    def _compile(self, variant: str, source: Path) -> Path:
        header = self._headers[variant].result()
        target = header.with_name(f"{source.parent.name}-{source.stem}.o")
        folders = (f"-I{SOURCES}", f"-I{HERE}")
        self._run(variant, [*WORDS, "-include", header, *folders, "-c", "-o", target, source])
        return target

    def _run(self, variant: str, words: list[str | Path]) -> None:
        compiler, flags = VARIANTS[variant].compiler, VARIANTS[variant].flags
        # Until a test waits for it. Beside others that are busy it would hardly get on.
        behind = () if self._awaited else ("nice", "-n", "19")
        with self._lock:
            assert not self._ended
            process = subprocess.Popen(
                [*behind, compiler, "-pthread", *flags, *words],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=self._environment,
                cwd=self._folder,
            )
            self._running.add(process)
        said, _ = process.communicate()
        with self._lock:
            self._running.remove(process)
        assert process.returncode == 0, said


_COMPILER = pytest.StashKey[Compiler]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Starts what the collected tests will ask for."""
    variants = [
        item.callspec.params["variant"]
        for item in session.items
        if "compiler" in getattr(item, "fixturenames", ())
    ]
    if variants and not session.config.option.collectonly:
        compiler = session.config.stash[_COMPILER] = Compiler()
        for variant in variants:
            compiler.start(variant)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Ends what nobody waits for any more."""
    if compiler := session.config.stash.get(_COMPILER, None):
        compiler.end()


@pytest.fixture(scope="session")
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """The compiler, at work since the collection."""
    return request.config.stash[_COMPILER]
