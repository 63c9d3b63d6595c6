"""Adds one thing to pyproject.toml: compiling the TensorFlow ops."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).parent / "ops_lib"))
from build import build  # ops_lib/build.py is not installed, only used here

_BUILD_OPS = os.environ.get("DDL_BUILD_OPS", "1") != "0"


class BuildOps(build_ext):
    """Compiles ops_lib/cc with the TensorFlow and Open MPI of this environment."""

    def get_ext_filename(self, fullname: str) -> str:
        """A plain library, not a Python extension: TensorFlow loads it by path."""
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        """One extension: ddl_ops._ddl_ops."""
        build(Path(self.get_ext_fullpath(ext.name)), on_terminal=True)


class OpsDistribution(Distribution):
    """The wheel holds a compiled library, though no extension module of Python's ABI."""

    def has_ext_modules(self) -> bool:
        return _BUILD_OPS


setup(
    # 0: Airflow alone, on a machine whose ranks live in another environment; or built by make.
    ext_modules=[Extension("ddl_ops._ddl_ops", sources=[])] if _BUILD_OPS else [],
    cmdclass={"build_ext": BuildOps},
    distclass=OpsDistribution,
)
