"""Adds to pyproject.toml: that a build begins anew. ops_lib/setup.py compiles the ops."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildAnew(build_py):
    """What setuptools has left of modules that are gone would be installed again."""

    def run(self) -> None:
        """Removes what was built before, but where the sources are what is installed."""
        if not self.editable_mode:
            for top in {name.partition(".")[0] for name in self.packages}:
                shutil.rmtree(Path(self.build_lib, top), ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": BuildAnew})
