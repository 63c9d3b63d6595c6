"""Another user of this host, for trainings that run as one."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Trainer:
    """Another user of this host, with a folder and a Python that this one can reach.

    Attributes:
        place: what is below it may be entered, and no more.
        python: as ``launcher.python``, with an mpirun beside it.
    """

    name = "nobody"

    def __init__(self, place: Path) -> None:
        entry = pwd.getpwnam(self.name)
        self.uid, self.gid = entry.pw_uid, entry.pw_gid
        self.place = place
        (place / "bin").mkdir()
        mpirun = f'#!/bin/sh\nexec {Path(sys.executable).parent}/mpirun "$@"\n'
        (place / "bin" / "mpirun").write_text(mpirun, "utf-8")
        (place / "bin" / "mpirun").chmod(0o755)
        self.python = str(place / "bin" / "python")
        Path(self.python).symlink_to(self._python())

    @contextmanager
    def acting(self) -> Iterator[None]:
        """This process, which is root's, has its user and group meanwhile."""
        os.setegid(self.gid)
        os.seteuid(self.uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(0)

    def _python(self) -> str:
        # This one may be in a home that nobody else sees; the system's finds the same packages.
        for python in (sys.executable, "/usr/bin/python3"):
            argv = [python, "-c", "import ddl_ops, sys; print(sys.version_info[:2])"]
            try:
                said = subprocess.check_output(
                    argv,
                    text=True,
                    user=self.uid,
                    group=self.gid,
                    stderr=subprocess.DEVNULL,
                )
            except (OSError, subprocess.CalledProcessError):
                continue
            if said.strip() == str(sys.version_info[:2]):
                return python
        pytest.skip(
            f"user {self.name} can run no Python {sys.version_info[:2]} with what is in {ROOT}: "
            "nothing runs so. Let others through the folders above it: chmod o+x"
        )


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    """Another user, that ranks run as; skipped, with the reason, where it cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("needs root: ranks of another user are not tried here")
    packages = [path for path in sys.path if path.endswith("-packages")]
    own = [str(ROOT), str(ROOT / "ops_lib" / "python")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*own, *packages]))
    # Not in the tests' own folder, into which nobody else may go.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o711)
        yield Trainer(Path(folder))
