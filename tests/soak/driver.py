"""Compiles and starts the engine without TensorFlow, tests/parallel/scripts/engine_driver.cc."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.environments import load_build

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "ops_lib" / "cc"
SCRIPTS = REPOSITORY / "tests" / "parallel" / "scripts"
LAYERS = ("core", "transport", "algorithms", "comm", "runtime")


def compile_driver(folder: Path) -> Path:
    """Links the library's objects below tf/ to folder/libengine.so, which Python can load, and to
    folder/engine_driver. Returns the latter.
    """
    build = load_build()
    tools = build.find_toolchain()
    objects = build.compile_objects(tools, layers=LAYERS)
    libraries = [flag[2:] for flag in tools.mpi_link_flags if flag.startswith("-L")]
    library, program = folder / "libengine.so", folder / "engine_driver"
    for out, names, more in [
        (library, ["engine_for_python.cc"], ["-shared", "-fPIC"]),
        (program, ["engine_driver.cc", "soak.cc"], []),
    ]:
        subprocess.run(
            [
                *(*tools.compiler, "-std=c++17", "-O2", "-pthread", f"-I{SOURCES}", f"-I{SCRIPTS}"),
                *(*tools.mpi_flags, *more),
                *(str(SCRIPTS / name) for name in names),
                *map(str, objects),
                *(*tools.mpi_link_flags, *(f"-Wl,-rpath,{place}" for place in libraries)),
                *("-ldl", "-o", str(out)),
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
