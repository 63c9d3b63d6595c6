"""Looks whether this host can run trainings, and at some of the boundaries of SECURITY.md.

It asks no other host: stores and connections are tried by ``airflow connections test``.
"""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from airflow import __version__ as airflow_version
from airflow.configuration import AIRFLOW_HOME, conf

from ddl_airflow.core.errors import DdlError
from ddl_airflow.launchers import run_as
from ddl_airflow.launchers.loopback import confined
from ddl_airflow.launchers.mpirun import find_mpirun, find_python
from ddl_airflow.operators.base import rank_python, ranks_user
from ddl_airflow.site import workspace

_TIMEOUT_S = 60.0


class State(Enum):
    """What was found: all is well, a boundary is open, or trainings cannot run."""

    OK = "ok"
    OPEN = "open"
    WRONG = "wrong"


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        what: in a word or two.
        said: how it is.
        fix: what to do, a sentence; empty where nothing is to be done.
    """

    state: State
    what: str
    said: str
    fix: str = ""


def examine() -> Iterator[Finding]:
    """Looks at one thing after the other. What cannot be looked at is ``WRONG``."""
    yield Finding(State.OK, "Airflow", f"{airflow_version}, in {AIRFLOW_HOME}")
    for look in (_of_settings_file, _of_workspace, _of_ranks, _of_user, _of_rights):
        try:
            yield from look()
        except (DdlError, OSError, subprocess.SubprocessError) as error:
            yield Finding(State.WRONG, look.__name__.removeprefix("_of_"), str(error))


def _of_settings_file() -> Iterator[Finding]:
    path = Path(AIRFLOW_HOME, "airflow.cfg")
    if path.exists() and path.stat().st_mode & stat.S_IROTH:
        yield Finding(
            State.OPEN,
            "airflow.cfg",
            f"every user of this host reads {path}, and the keys in it",
            f"chmod o-r {path}.",
        )


def _of_workspace() -> Iterator[Finding]:
    folder = workspace()
    if not folder.is_dir():
        yield Finding(State.OK, "workspace", f"{folder} is not there yet: a first task makes it")
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o066:
        yield Finding(
            State.OPEN,
            "workspace",
            f"other users read or write in {folder} (mode {mode:o})",
            f"chmod go-rw {folder}, where no other user's api-server or tasks need it.",
        )
    else:
        yield Finding(State.OK, "workspace", f"{folder}, mode {mode:o}, with locks")


def _of_ranks() -> Iterator[Finding]:
    python = find_python(rank_python(""))
    mpirun = find_mpirun(python)
    said = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    yield Finding(State.OK, "mpirun", f"{mpirun}: {said.stdout.splitlines()[0]}")
    preloaded = confined(python, os.environ, mpi=True, user=ranks_user()).get("LD_PRELOAD", "")
    if not preloaded:
        yield Finding(
            State.OPEN,
            "ops",
            f"{python} has no compiled ops: import ddl fails, and MPI listens on all addresses",
            "Install this project into the ranks' Python with a C++ compiler there.",
        )
    else:
        yield Finding(State.OK, "ops", str(Path(preloaded.split()[0]).parent))


def _of_user() -> Iterator[Finding]:
    user = ranks_user()
    if not user:
        yield Finding(
            State.OPEN,
            "ranks' user",
            "ranks run as Airflow's own user and can read what it can: other processes' "
            "environments, keys, other trainings",
            "Set [ddl] run_ranks_as; see SECURITY.md.",
        )
        return
    tried = run_as.run(user, sys.executable, ["id", "-un"], env={"PATH": os.defpath}, timeout_s=60)
    if tried.returncode:
        fix = "Run Airflow's tasks as root, or give their user the rule of sudo in SECURITY.md."
        yield Finding(State.WRONG, "ranks' user", f"{user}: {tried.stderr.strip()}", fix)
    else:
        yield Finding(State.OK, "ranks' user", tried.stdout.strip())


def _of_rights() -> Iterator[Finding]:
    if conf.get("ddl", "manifest_rights", fallback="").strip():
        yield Finding(State.OK, "manifests", "name what [ddl] manifest_rights lists")
    else:
        yield Finding(
            State.OPEN,
            "manifests",
            "any manifest may name any connection and any folder that Airflow reads",
            "Set [ddl] manifest_rights, if not all authors may use them all.",
        )
