"""Compiles and starts the engine without TensorFlow, tests/parallel/scripts/engine_driver.cc."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "ops_lib" / "cc"
SCRIPTS = REPOSITORY / "tests" / "parallel" / "scripts"
LAYERS = ("core", "transport", "algorithms", "comm", "runtime")


def _load_build() -> Any:
    spec = importlib.util.spec_from_file_location(
        "ddl_build_for_driver", REPOSITORY / "ops_lib" / "build.py"
    )
    assert spec is not None and spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = build  # dataclasses look their module up
    spec.loader.exec_module(build)
    return build


def compile_driver(folder: Path) -> Path:
    """Compiles the layers below tf/ to folder/libengine.so, which Python can load too, and
    folder/engine_driver over it. Returns the latter.
    """
    tools = _load_build().find_toolchain()
    libraries = [flag[2:] for flag in tools.mpi_link_flags if flag.startswith("-L")]
    layers = [path for layer in LAYERS for path in sorted((SOURCES / layer).glob("*.cc"))]
    library, program = folder / "libengine.so", folder / "engine_driver"
    for out, sources, more in [
        (library, [*layers, SCRIPTS / "engine_for_python.cc"], ["-shared", "-fPIC"]),
        (program, [SCRIPTS / "engine_driver.cc", SCRIPTS / "soak.cc", library], []),
    ]:
        subprocess.run(
            [
                *(tools.compiler, "-std=c++17", "-O3", "-pthread", f"-I{SOURCES}", f"-I{SCRIPTS}"),
                *('-DDDL_TF_VERSION="none"', *tools.mpi_flags, *more),
                *map(str, sources),
                *(*tools.mpi_link_flags, *(f"-Wl,-rpath,{place}" for place in libraries)),
                *("-Wl,-rpath,$ORIGIN", "-o", str(out)),
            ],
            check=True,
        )
    return program


def mpirun_command(ranks: int, *words: str) -> list[str]:
    """What starts so many ranks here, more than there are cores if need be."""
    mpirun = Path(sys.executable).parent / "mpirun"
    placement = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    return [str(mpirun), "-np", str(ranks), *placement, *words]


def clean_environment(**more: str) -> dict[str, str]:
    """Nothing of a job around this one may reach the ranks."""
    prefixes = ("OMPI_", "PMI", "PRTE_", "SLURM_", "DDL_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | root | more
