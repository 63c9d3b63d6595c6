"""Looks whether this host can run trainings, at some of the boundaries of SECURITY.md, and at what
of Airflow's settings the README has a site set.

It asks no other host: stores and connections are tried by ``airflow connections test``.
"""

from __future__ import annotations

import ast
import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from airflow import __version__ as airflow_version
from airflow.configuration import AIRFLOW_CONFIG, AIRFLOW_HOME, conf
from airflow.exceptions import AirflowConfigException

from ddl_airflow.airflow_internals import executors, slots_of_pools
from ddl_airflow.core.compute import Compute
from ddl_airflow.core.errors import DdlError, ManifestError, SettingInvalid
from ddl_airflow.core.manifest.rights import RightsTable
from ddl_airflow.core.manifest.rule import suggestion
from ddl_airflow.core.manifest.site import compute_table
from ddl_airflow.core.setting_commands import failed_command
from ddl_airflow.launchers import run_as
from ddl_airflow.launchers.loopback import confined
from ddl_airflow.launchers.mpirun import OpenMpi, find_mpirun, find_python, how_to_get_ops
from ddl_airflow.operators.base import rank_python, ranks_user
from ddl_airflow.site import workspace
from ddl_airflow.storage.cleaning import rules

_TIMEOUT_S = 60.0
_OUR_BUNDLE = "ddl_airflow.bundle.ManifestBundle"
_DAG_FOLDER_BUNDLE = "airflow.dag_processing.bundles.local.LocalDagBundle"
_OUR_IMPORTER = "ddl_airflow.importer.ManifestImporter"
_BUNDLES = "[dag_processor] dag_bundle_config_list"
_STORAGE = "[dag_processor] dag_bundle_storage_path"
_README = "README.md, “Install it beside your own Airflow”"
# Of a loader, which is short.
_MOST_BYTES = 4 << 20


class State(Enum):
    """What was found.

    All is well; trainings run, and something else may fail; a boundary is open; or trainings cannot
    run, or a setting cannot be used.
    """

    OK = "ok"
    RISK = "risk"
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
    for look in (
        *(_of_settings_file, _of_bundles, _of_jwt_secret, _of_workspace, _of_cleaning),
        *(_of_ranks, _of_user, _of_rights, _of_compute, _of_numbers),
    ):
        try:
            yield from look()
        except Exception as error:
            what = look.__name__.removeprefix("_of_")
            if (command := failed_command(error, os.environ)) is not None:
                yield Finding(State.WRONG, what, *command)
            elif isinstance(error, AirflowConfigException):
                said = " ".join(str(error).split())
                yield Finding(State.WRONG, what, said, f"Correct it in {AIRFLOW_CONFIG}.")
            elif isinstance(error, (DdlError, OSError, subprocess.SubprocessError)):
                yield Finding(State.WRONG, what, str(error))
            else:
                raise


def _of_settings_file() -> Iterator[Finding]:
    path = Path(AIRFLOW_CONFIG)
    if path.exists() and path.stat().st_mode & stat.S_IROTH:
        yield Finding(
            State.OPEN,
            "airflow.cfg",
            f"every user of this host reads {path}, and the keys in it",
            f"chmod o-r {path}.",
        )


def _of_workspace() -> Iterator[Finding]:
    folder = workspace()
    if hindrance := _cannot_be_made(folder, "[ddl] workspace"):
        yield Finding(State.WRONG, "workspace", *hindrance)
        return
    if not folder.is_dir():
        yield Finding(State.OK, "workspace", f"{folder} is not there yet: a first task makes it")
        return
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):
                fcntl.flock(file, how | fcntl.LOCK_NB)
        except OSError as error:
            fix = "Mount it with locks, or set [ddl] workspace to a file system that has them."
            yield Finding(State.WRONG, "workspace", f"{folder} has no locks: {error.strerror}", fix)
            return
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


def _cannot_be_made(folder: Path, setting: str) -> tuple[str, str] | None:
    """What keeps this user from making a folder, or from writing in it, and the fix.

    What is made for that is gone again.
    """
    there = folder
    while not (there.exists() or there.is_symlink()):
        there = there.parent
    if not there.is_dir():
        return f"{folder}: {there} is no folder", f"Make one, or correct {setting}."
    try:
        with tempfile.TemporaryDirectory(prefix=".ddl-doctor-", dir=there):
            return None
    except OSError as error:
        said = "cannot be written to" if there == folder else f"it cannot be made in {there}"
        said = f"{folder}{' ' if there == folder else ': '}{said}: {error.strerror}"
        return said, f"Let user id {os.geteuid()} write there, or correct {setting}."


def _of_bundles() -> Iterator[Finding]:
    try:
        entries = conf.getjson("dag_processor", "dag_bundle_config_list")
    except AirflowConfigException as error:
        said = " ".join(str(error).split())
        yield Finding(State.WRONG, "bundles", said, f"Write it as in {_README}.")
        return
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        said = f"{_BUNDLES} is no list of bundles"
        yield Finding(State.WRONG, "bundles", said, f"Write it as in {_README}.")
        return
    dag_folder = Path(os.path.expanduser(conf.get("core", "dags_folder")))
    ours = [one for one in entries if one.get("classpath") == _OUR_BUNDLE]
    for one in ours:
        path = Path(os.path.expanduser(_arguments(one).get("path") or dag_folder))
        name = f"bundle {str(one.get('name', ''))!r}"
        if not path.is_dir():
            fix = f"Make it, or correct path in {_BUNDLES}."
            yield Finding(State.WRONG, "manifests' DAGs", f"{name}: {path} is no folder", fix)
        elif not os.access(path, os.R_OK | os.X_OK):
            fix = f"Let user id {os.geteuid()} read it, or correct path in {_BUNDLES}."
            yield Finding(State.WRONG, "manifests' DAGs", f"{name}: {path} cannot be read", fix)
        else:
            yield Finding(State.OK, "manifests' DAGs", f"{name} makes them of {path}")
    importing = _importing(entries)
    if importing and find_spec("airflow.sdk.importers") is None:
        said = f"{importing} has an importer, and Airflow {airflow_version} has none before 3.4"
        yield Finding(State.WRONG, "manifests' DAGs", said, f"Take a ManifestBundle: {_README}.")
    elif importing:
        yield Finding(State.OK, "manifests' DAGs", f"{importing} imports them")
    if ours:
        yield from _of_other_dags(entries, dag_folder)
        yield _of_versions()
    elif importing:
        yield from _of_other_dags(entries, dag_folder)
    elif (loader := _loader_in(dag_folder)) is not None:
        yield Finding(State.OK, "manifests' DAGs", f"{loader} loads them")
    else:
        yield Finding(
            State.RISK,
            "manifests' DAGs",
            "no bundle makes DAGs of manifests",
            f"Add a ManifestBundle to {_BUNDLES}, or copy dags/load_manifests.py to {dag_folder}: "
            f"{_README}.",
        )


def _importing(entries: Sequence[Mapping[str, Any]]) -> str:
    """Where our importer is in use; empty if nowhere."""
    try:
        if _names_importer(conf.getjson("dag_processor", "dag_importer_configs", fallback=None)):
            return "every bundle"
    except AirflowConfigException:
        pass  # Airflow says so
    for one in entries:
        if _names_importer(one.get("importers")):
            return f"bundle {str(one.get('name', ''))!r}"
    return ""


def _names_importer(configured: Any) -> bool:
    named = configured if isinstance(configured, list) else []
    return any(
        (one.get("classpath") if isinstance(one, dict) else one) == _OUR_IMPORTER for one in named
    )


def _of_other_dags(entries: Sequence[Mapping[str, Any]], dag_folder: Path) -> Iterator[Finding]:
    """Whether the DAG folder's bundle was lost when ours came into the list."""
    for one in entries:
        path = _arguments(one).get("path")
        if one.get("classpath") == _DAG_FOLDER_BUNDLE and (
            path is None or Path(os.path.expanduser(path)) == dag_folder
        ):
            return
    if next(dag_folder.rglob("*.py"), None) is not None:
        yield Finding(
            State.RISK,
            "DAG folder",
            f"no bundle has {dag_folder}, so its DAGs are deactivated",
            f'Add {{"name": "dags-folder", "classpath": "{_DAG_FOLDER_BUNDLE}", "kwargs": {{}}}} '
            f"to {_BUNDLES}.",
        )


def _of_versions() -> Finding:
    configured = conf.get("dag_processor", "dag_bundle_storage_path", fallback=None)
    temporary = Path(tempfile.gettempdir())
    # Source: get_bundle_storage_root_path in airflow/dag_processing/bundles/base.py, Airflow 3.3.
    folder = Path(configured) if configured else temporary / "airflow" / "dag_bundles"
    if not folder.is_absolute():
        said, fix = f"{_STORAGE} is {configured}, which is relative", "Write an absolute path."
        return Finding(State.WRONG, "versions", said, fix)
    if hindrance := _cannot_be_made(folder, _STORAGE):
        return Finding(State.WRONG, "versions", *hindrance)
    if folder.is_relative_to(temporary):
        return Finding(
            State.RISK,
            "versions",
            f"of manifests are kept in {folder}, below the temporary folder: when that is emptied, "
            "runs that go on with an older version of their manifest fail",
            f"Set {_STORAGE} to a folder that stays.",
        )
    return Finding(State.OK, "versions", f"of manifests are kept in {folder}")


def _arguments(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = entry.get("kwargs")
    return arguments if isinstance(arguments, dict) else {}


def _loader_in(folder: Path) -> Path | None:
    """A Python file of the DAG folder that calls ``dags_from``."""
    for path in sorted(folder.glob("*.py")):
        if not path.is_file():
            continue
        # Python itself gives up on what is nested too deeply.
        unreadable = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
        with suppress(*unreadable), path.open("rb") as file:
            if _calls_dags_from(ast.parse(file.read(_MOST_BYTES))):
                return path
    return None


def _calls_dags_from(module: ast.Module) -> bool:
    """Whether it imports the function, or the module that has it, and calls it by that name."""
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                imported = f"{node.module}.{one.name}"
                if imported == "ddl_airflow.dag.dags_from":
                    names.add(one.asname or one.name)
                elif imported == "ddl_airflow.dag":
                    names.add(f"{one.asname or one.name}.dags_from")
        elif isinstance(node, ast.Import):
            for one in node.names:
                if one.name == "ddl_airflow.dag":
                    names.add(f"{one.asname or one.name}.dags_from")
    calls = (node.func for node in ast.walk(module) if isinstance(node, ast.Call))
    return any(_dotted(called) in names for called in calls)


def _dotted(called: ast.expr) -> str:
    """``a.b.c`` of names and attributes; empty of anything else."""
    parts = []
    while isinstance(called, ast.Attribute):
        parts.append(called.attr)
        called = called.value
    return ".".join([called.id, *reversed(parts)]) if isinstance(called, ast.Name) else ""


def _of_jwt_secret() -> Iterator[Finding]:
    for name in ("jwt_secret", "jwt_private_key_path"):
        if conf.get("api_auth", name, fallback=""):
            yield Finding(State.OK, "jwt_secret", f"[api_auth] {name} is set")
            return
    yield Finding(
        State.RISK,
        "jwt_secret",
        "[api_auth] jwt_secret is not set: without it an api-server does not start, and refuses "
        "tasks of a host with another",
        "Set it, the same on all hosts, to what `openssl rand -hex 32` prints.",
    )


def _of_cleaning() -> Iterator[Finding]:
    names = ("keep_runs", "keep_experiments", "cache_size")
    for index, name in enumerate(names):
        told = ["", "", ""]
        told[index] = conf.get("ddl", name, fallback="")
        try:
            rules(*told)
        except SettingInvalid as error:
            said, _, fix = str(error).partition(". ")
            fix = fix or f"Write for example {'500Gi' if name == 'cache_size' else '30d'}."
            yield Finding(State.WRONG, "cleaning", said, fix)


def _of_ranks() -> Iterator[Finding]:
    python = find_python(rank_python(""))
    mpirun = find_mpirun(python)
    asked = subprocess.run(
        [mpirun, "--version"],
        env={**os.environ, **OpenMpi(mpirun).environment()},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if asked.returncode:
        why = (asked.stderr.splitlines() or [f"--version ended with {asked.returncode}"])[-1]
        yield Finding(State.WRONG, "mpirun", f"{mpirun}: {why}", how_to_get_ops(python))
    else:
        yield Finding(State.OK, "mpirun", f"{mpirun}: {asked.stdout.splitlines()[0]}")
    preloaded = confined(python, os.environ, mpi=True, user=ranks_user()).get("LD_PRELOAD", "")
    if not preloaded:
        yield Finding(
            State.OPEN,
            "ops",
            f"{python} has no compiled ops: import ddl fails, and MPI listens on all addresses",
            "Run `make ops` in the sources, or install the wheel of ddl-ops there.",
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
            "environments, keys, other trainings; with a remote launcher, such as slurm, "
            "transform and evaluation run on this host as that user all the same",
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
    setting = conf.get("ddl", "manifest_rights", fallback="").strip()
    if setting:
        try:
            RightsTable.read(setting)
        except ManifestError as error:
            yield from _of_table("manifests", error)
        else:
            yield Finding(State.OK, "manifests", "name what [ddl] manifest_rights lists")
    else:
        yield Finding(
            State.OPEN,
            "manifests",
            "any manifest may name any connection, any folder that Airflow reads, and any "
            "variable that [ddl] manifest_variables lists",
            "Set [ddl] manifest_rights, if not all authors may use them all.",
        )


def _of_table(what: str, error: ManifestError) -> Iterator[Finding]:
    for one in error.issues:
        said = one.render(error.source).removesuffix(f". {one.fix}")
        yield Finding(State.WRONG, what, said, one.fix)


def _of_compute() -> Iterator[Finding]:
    try:
        table = compute_table(conf.get("ddl", "compute", fallback=""))
    except ManifestError as error:
        yield from _of_table("compute", error)
        return
    asked = [
        (name, place.executor)
        for name, one in table.items()
        for place in (one.train, one.other_steps)
        if place.executor
    ]
    there = executors() if asked else set()
    for name, executor in dict.fromkeys(asked):
        if executor not in there:
            said = f"{name} has executor {executor} in [ddl] compute; this Airflow has not"
            yield Finding(State.WRONG, "compute", said, suggestion(executor, sorted(there)))
    yield from _of_pools(table.values())


def _of_pools(kinds: Iterable[Compute]) -> Iterator[Finding]:
    """A task whose pool is not there, or is too small, stays scheduled: nothing fails."""
    asked: dict[tuple[str, str], int] = {}
    for one in kinds:
        # A training takes one for each rank of its nodes, every other step one.
        for pool, slots in ((one.train.pool, one.slots), (one.other_steps.pool, 1)):
            if pool:
                asked[one.name, pool] = max(slots, asked.get((one.name, pool), 0))
    if not asked:
        return
    there = slots_of_pools()
    if there is None:
        said = "not looked for: Airflow's database is not reached from here"
        yield Finding(State.OK, "pools", said)
        return
    for (name, pool), slots in asked.items():
        has = there.get(pool, 0)
        if has == -1 or has >= slots:
            continue
        said = f"has {has} slots" if pool in there else "is not there"
        yield Finding(
            State.WRONG,
            "pools",
            f"{name} has pool {pool} in [ddl] compute, and that {said}: tasks that take {slots} of "
            "it stay scheduled, and nothing says why but the scheduler's log",
            f"Set it, with a slot for each rank that may run: airflow pools set {pool} SLOTS "
            "DESCRIPTION --include-deferred.",
        )


def _of_numbers() -> Iterator[Finding]:
    """Those of ``[ddl]``: the step that reads one that is none fails, or the page does."""
    read: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
        (conf.getint, ("transfer_workers", "preemptions", "tensorboards")),
        (conf.getboolean, ("evidence",)),
        (conf.getfloat, ("data_poll_interval", "job_poll_interval", "tensorboard_idle_minutes")),
    )
    for get, names in read:
        for name in names:
            try:
                value = get("ddl", name, fallback=1)
            except AirflowConfigException as error:
                said = " ".join(str(error).split())
                yield Finding(State.WRONG, "settings", said, f"Correct it in {AIRFLOW_CONFIG}.")
                continue
            if name.endswith("_interval") and not value > 0:
                said = f"[ddl] {name} is {value:g}, and a pause is more than 0 seconds"
                yield Finding(State.WRONG, "settings", said, f"Correct it in {AIRFLOW_CONFIG}.")
