"""Adds to pyproject.toml: that a build begins anew. ops_lib/setup.py compiles the ops."""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildAnew(build_py):
    """What setuptools has left of modules that are gone would be installed again."""

    def run(self) -> None:
        """Empties the folder, but where the sources themselves are what is installed."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


setup(cmdclass={"build_py": BuildAnew})
