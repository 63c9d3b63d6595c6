"""Adds to pyproject.toml: compiling the ops, and the copy of what ``ddl-run`` is made of."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))
from build import build  # build.py is not installed, only used here

LAUNCHING = Path(__file__).resolve().parents[1] / "ddl_airflow"
# What ddl_airflow/run.py may import of its package: none of it imports Airflow. A test holds that
# it is all of it: tests/unit/ddl_airflow/test_house.py.
LAUNCHING_PARTS = ("__init__.py", "run.py", "summary.py", "core", "launchers")

if not LAUNCHING.is_dir():
    # An archive of this folder alone would make a wheel whose ddl-run starts nothing.
    sys.exit(f"ddl-ops is built in the repository: {LAUNCHING} is not there.")

_BUILD_OPS = os.environ.get("DDL_BUILD_OPS", "1") != "0"
_VERSION = re.search(r'^__version__ = "(.+)"$', (LAUNCHING / "__init__.py").read_text(), re.M)


class BuildOps(build_ext):
    """Compiles cc/ with the TensorFlow and Open MPI of this environment."""

    def get_ext_filename(self, fullname: str) -> str:
        """A plain library, not a Python extension: TensorFlow loads it by path."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """One extension: ddl_ops._ddl_ops."""
        build(Path(self.get_ext_fullpath(ext.name)), on_terminal=True)


class BuildWithLaunching(build_py):
    """Puts ddl-run's modules into a folder of our own: ddl-airflow, another wheel, owns theirs."""

    def run(self) -> None:
        """Copies them, but where the sources themselves are what is installed."""
        if self.editable_mode:
            super().run()
            return
        # What setuptools has left of modules that are gone would be installed again.
        for top in {name.partition(".")[0] for name in self.packages}:
            shutil.rmtree(Path(self.build_lib, top), ignore_errors=True)
        super().run()
        target = Path(self.build_lib, "ddl_ops", "launch", "ddl_airflow")
        for part in LAUNCHING_PARTS:
            source = LAUNCHING / part
            for path in [source] if source.is_file() else sorted(source.rglob("*.py")):
                copy = target / path.relative_to(LAUNCHING)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)


class AnyPython(bdist_wheel):
    """One wheel for every CPython: the libraries are loaded by path and call none of it."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python 3, no ABI of it, and this platform."""
        return "py3", "none", super().get_tag()[2]


class OpsDistribution(Distribution):
    """The wheel holds compiled libraries, though no extension module of Python's ABI."""

    def has_ext_modules(self) -> bool:
        return _BUILD_OPS


setup(
    version=_VERSION[1],
    # 0: built by make, beside an editable install.
    ext_modules=[Extension("ddl_ops._ddl_ops", sources=[])] if _BUILD_OPS else [],
    cmdclass={"build_ext": BuildOps, "build_py": BuildWithLaunching, "bdist_wheel": AnyPython},
    distclass=OpsDistribution,
)
