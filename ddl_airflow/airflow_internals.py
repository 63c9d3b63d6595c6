"""What we use of Airflow that is not its public interface, all of it.

Each says in which version it was seen, 3.3 being 3.3.0 and 3.3.2, and what we lose without it: what
to go through when a new Airflow comes out. ``tests/unit/ddl_airflow/test_house.py`` holds the rest
of the package to the public interface, which Airflow's documentation names ("Public Interface for
Airflow").

Airflow's own modules are imported within the functions: most are needed in one kind of process
only, and a parse must stay small.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from airflow.configuration import conf
from airflow.exceptions import AirflowClusterPolicySkipDag
from airflow.sdk import DAG, Asset, BaseOperator
from airflow.sdk.definitions.param import ParamsDict

if TYPE_CHECKING:
    from airflow.dag_processing.dagbag import DagBag

_log = logging.getLogger(__name__)


# --- parsing ------------------------------------------------------------------------------------


class DagShownAs(DAG):
    """A DAG whose code, in Airflow's UI, is another file than the one that makes it.

    Airflow takes the code from ``fileloc``. It first sets that to the Python file, derives
    ``relative_fileloc`` from it, by which it finds the file again, and only then reads the code.

    Since 3.4 a ``DagBag`` takes along, as the code, what the importer of Python files says, which
    is the Python file; so there it is told what to take instead.

    Seen in 3.3 and 3.4.0b2: ``airflow/models/dagcode.py``, ``airflow/dag_processing/dagbag.py``, in
    which ``dag_source_codes`` is of 3.4. Without it the Code tab shows the stub or the loader.
    """

    shown_as_code: Path | None = None
    _fileloc = ""
    _relative_fileloc: str | None = None

    @property
    def fileloc(self) -> str:
        """The Python file until Airflow has noted it; then what is to be shown as code."""
        if self.shown_as_code is not None and self._relative_fileloc is not None:
            return str(self.shown_as_code)
        return self._fileloc

    @fileloc.setter
    def fileloc(self, value: str) -> None:
        self._fileloc = value

    @property
    def relative_fileloc(self) -> str | None:
        """The Python file, relative to its bundle."""
        return self._relative_fileloc

    @relative_fileloc.setter
    def relative_fileloc(self, value: str | None) -> None:
        self._relative_fileloc = value

    def __hash__(self) -> int:
        """Equal DAGs have one id. Airflow's goes through all that may differ, eight times a DAG."""
        return hash((type(self), self.dag_id))

    def validate(self) -> None:
        """Beside Airflow's own checks: has the ``DagBag`` that asks take the code along."""
        with _checked_before(self):
            super().validate()  # type: ignore[no-untyped-call]
        bag: Any = collecting()
        if self.shown_as_code is None or not hasattr(bag, "dag_source_codes"):
            return
        if not isinstance(bag.dag_source_codes, _Codes):
            bag.dag_source_codes = _Codes(bag.dag_source_codes)
        bag.dag_source_codes.shown_as[self.dag_id] = self.shown_as_code


@contextmanager
def _checked_before(dag: DAG) -> Iterator[None]:
    """Has Airflow check a cron expression once in a process: thousands of DAGs have some dozens.

    Only what it makes of a text is known by that text. Seen in 3.3 and 3.4.0b2: ``validate`` in
    ``airflow/sdk/definitions/dag.py`` and ``timetables/_cron.py``. Without it each DAG of a parse
    has croniter read the expression once more.
    """
    timetable, state = dag.timetable, vars(dag)
    kind = (type(timetable), dag.schedule)
    by_text = isinstance(dag.schedule, str) and state.get("timetable") is timetable
    if by_text and kind in _checked:
        state["timetable"] = _Checked(timetable)
    try:
        yield
    finally:
        if by_text:
            state["timetable"] = timetable
    if by_text and len(_checked) < _MOST_CHECKED:
        _checked.add(kind)


_checked: set[Hashable] = set()
_MOST_CHECKED = 1000


class _Checked:
    """A timetable, but for its check."""

    def __init__(self, timetable: Any) -> None:
        self._timetable = timetable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timetable, name)

    def validate(self) -> None:
        """It has passed."""


class _Codes(dict[str, Any]):
    """The code of a bag's DAGs: that of the file which shows a DAG, if it has one."""

    def __init__(self, codes: Mapping[str, Any]) -> None:
        super().__init__(codes)
        self.shown_as: dict[str, Path] = {}

    def __setitem__(self, dag_id: str, code: Any) -> None:
        if dag_id in self.shown_as:
            text = self.shown_as[dag_id].read_text("utf-8")
            code = type(code)(source_code=text, language="yaml")
        super().__setitem__(dag_id, code)


class DagThatIsNotStored(DAG):
    """A DAG that is made only to tell Airflow what is wrong in its place.

    Whoever collects DAGs (a ``DagBag``: that of the DAG processor, of ``airflow dags reserialize``,
    of a site's own tests) has each validated before it is kept. There this one files its words
    among the import errors and is left out, so that who serialises what was collected, which may
    be all of a site at once, does not meet it.

    Seen in 3.3 and 3.4.0b2: ``airflow/dag_processing/dagbag.py``, ``process_file`` and
    ``airflow/serialization/serialized_objects.py``. Without it a broken manifest takes all DAGs of
    its file along, or is shown nowhere.

    Args:
        dag_id: of its own; never stored.
        problem: what is wrong; a ``SerializationError``, since Airflow wraps any other that rises
            while it serialises a DAG, and shows both.
        filed_under: path under which Airflow files the error; by default the file it parses.
    """

    _problem: Exception | None = None
    _filed_under: str | None = None
    _filed = False

    def __init__(self, dag_id: str, problem: Exception, filed_under: str | None = None) -> None:
        super().__init__(dag_id, schedule=None)
        self._filed_under, self._filed = filed_under, filed_under is not None
        self._problem = problem

    @property
    def relative_fileloc(self) -> str | None:
        """The path under which the error is filed."""
        return self._filed_under

    @relative_fileloc.setter
    def relative_fileloc(self, value: str | None) -> None:
        """Airflow sets the path of the file that it parses; one that was given stays."""
        if not self._filed:
            self._filed_under = value

    def validate(self) -> None:
        """Files the error with the ``DagBag`` that asks, and has that leave this DAG out.

        Raises:
            AirflowClusterPolicySkipDag: it is filed.
            SerializationError: the problem; no ``DagBag`` asks.
        """
        bag = collecting()
        if bag is None or self._filed_under is None:
            raise self._raised()
        leave_out(bag, self._filed_under, str(self._problem).strip())

    @property
    def tags(self) -> Any:
        """Read by the serialisation: who has not validated it must not store it."""
        if self._problem is not None:
            raise self._raised() from None
        return set()

    @tags.setter
    def tags(self, value: Any) -> None:
        """It has none."""

    def _raised(self) -> Exception:
        # A new one each time: a traceback that was raised before would grow.
        assert self._problem is not None
        return type(self._problem)(*self._problem.args)


def collecting() -> DagBag | None:
    """Returns the ``DagBag`` that has called, if one has: it tells a DAG no other way who it is.

    Seen in 3.3 and 3.4.0b2: ``DagBag.process_file``, in 3.4 ``_import_sdk_definition``, calls
    ``dag.validate()``. Without it see ``DagThatIsNotStored``.
    """
    from airflow.dag_processing.dagbag import DagBag

    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, DagBag):
            return caller
        frame = frame.f_back
    return None


def leave_out(bag: DagBag, filed_under: str, error: str) -> NoReturn:
    """Ends the ``validate`` of a DAG: the error is filed under a path, and the DAG is not kept.

    Whatever else it raised, Airflow would file under the Python file, and make all DAGs of that
    stale. Seen in 3.3 and 3.4.0b2: ``airflow/dag_processing/dagbag.py``, ``process_file``.

    Raises:
        AirflowClusterPolicySkipDag: always; it is how a site's policy leaves a DAG out.
    """
    _log.error("%s", error)
    bag.import_errors[filed_under] = error
    raise AirflowClusterPolicySkipDag(error)


def files_not_ignored(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder that no ``.airflowignore`` has Airflow pass over, one by one.

    Airflow's own ``find_file_dag_definitions`` makes a list of them first, however long it takes.
    Links to folders are followed; one that leads into a circle is a RuntimeError. Seen in 3.4.0b2,
    and not in 3.3: ``airflow/sdk/_shared/module_loading/file_discovery.py``. Without it listing has
    no time limit until that list is made.
    """
    from airflow.sdk._shared.module_loading.file_discovery import find_path_from_directory

    syntax = conf.get("core", "dag_ignore_file_syntax", fallback="glob")
    yield from map(Path, find_path_from_directory(folder, ".airflowignore", syntax))


def yaml_importer() -> Any | None:
    """Airflow's own importer of YAML, if it has one: the ending has one importer, and it is ours.

    It takes files that name Airflow's schema, or all if ``dag_discovery_safe_mode`` is off. Seen in
    3.4.0b2: ``airflow/sdk/importers/yaml_importer``. Without it Airflow's own YAML makes no DAG
    where manifests do.
    """
    try:
        from airflow.sdk.importers.yaml_importer import YamlDagImporter
    except ImportError:
        return None
    return YamlDagImporter()


_LOOKED_UP = ("max_active_tasks", "max_consecutive_failed_dag_runs", "disable_bundle_versioning")


def looked_up_by_dags() -> dict[str, Any]:
    """The arguments that a DAG looks up in Airflow's configuration where it is not given them.

    They are asked of one that is given nothing, so whatever Airflow does to them was done. Seen in
    3.3 and 3.4.0b2: ``airflow/sdk/definitions/dag.py``. Without it each DAG looks them up.
    """
    sample = DAG("sample")
    arguments = inspect.signature(DAG).parameters
    return {name: getattr(sample, name) for name in _LOOKED_UP if name in arguments}


class PrototypedOperator(BaseOperator):
    """An operator of which ``made_task`` makes many that are alike."""

    @classmethod
    def own_state(cls, dag_id: str, own: Mapping[str, Any]) -> dict[str, Any]:
        """The attributes that are not Airflow's, or that are not as Airflow sets them.

        Args:
            dag_id: whose task it becomes.
            own: the arguments that are not Airflow's.
        """
        raise NotImplementedError


_Task = TypeVar("_Task", bound=PrototypedOperator)
# By class, arguments and their types. Manifests may give their tasks any tries and places.
_prototypes: dict[Hashable, _Prototype] = {}
_MOST_PROTOTYPES = 256
# What nobody can change, so that tasks may share it; and what each needs its own of.
_SHARED = (type(None), bool, int, float, str, bytes, datetime, timedelta, Enum)
_OWN = (list, dict, set, ParamsDict)
_KWARGS = "_BaseOperator__init_kwargs"
_CONTEXTS = "airflow.sdk.definitions._internal.contextmanager"
_OF_THE_DAG = ("_dag", "task_group", "start_date", "end_date", _KWARGS)


def made_task(
    operator: type[_Task], dag: DAG, airflows: Mapping[str, Any], own: Mapping[str, Any]
) -> _Task:
    """The task ``operator(**airflows, **own)``, made of what such tasks have had in common before.

    Airflow's constructor is a quarter of a parse: a wrapper for each class, and a ``__setattr__``
    that looks for a converter for each of fifty attributes, which come out the same in every DAG.
    So the first task of a kind leaves a prototype. The second is made by the constructor as well;
    only if a copy of the prototype is all the same as that, attribute by attribute, are the next
    ones copies. Where an Airflow does anything else, its constructor makes all of them.

    Seen in 3.3 and 3.4.0b2: ``airflow/sdk/bases/operator.py``. Without it DAGs are parsed more
    slowly: ``operator(**airflows, **own)``.

    Args:
        operator: its class.
        dag: the current one, as a context manager.
        airflows: arguments of ``BaseOperator``, without dag, group, dates, params and defaults.
        own: the operator's own, in which no other task is referred to.
    """

    def normally() -> _Task:
        return operator(**airflows, **own)

    if not _is_alone(dag):
        return normally()
    try:
        given = (*airflows.items(), *dag.default_args.items())
        kind = (operator, given, tuple(type(value) for _, value in given))
        prototype = _prototypes.get(kind)
    except TypeError:  # callbacks, which are those of one manifest
        return normally()
    if (
        prototype is not None
        and prototype.fits
        and airflows["task_id"] not in dag.task_group.children
    ):
        return prototype.task(operator, dag, own)
    before = _places(dag) if prototype is not None else {}
    task = normally()
    if prototype is not None:
        prototype.check(task, dag, own, before)
    elif len(_prototypes) < _MOST_PROTOTYPES:
        _prototypes[kind] = _Prototype(task, own)
    return task


def _is_alone(dag: DAG) -> bool:
    """Whether the DAG's tasks get nothing of it but their place."""
    try:
        current = _groups(_CONTEXTS).get_current(dag)
    except (ImportError, AttributeError):
        return False
    group = dag.task_group
    return current is group and not group.default_args and not dag.params


@cache
def _groups(module: str) -> Any:
    return importlib.import_module(module).TaskGroupContext


class _Prototype:
    """What the tasks of a kind have in common.

    Attributes:
        fits: whether copies are known to be what Airflow's constructor makes.
    """

    def __init__(self, task: PrototypedOperator, own: Mapping[str, Any]) -> None:
        """Takes it off a task, to which nothing has been done since it was made."""
        self.fits = False
        self._checked = False
        state = vars(task)
        names = {*task.own_state(task.dag_id, own), *_OF_THE_DAG}
        common = {name: None if name in names else value for name, value in state.items()}
        self._empty: list[tuple[str, Callable[[], Any]]]
        self._empty = [(n, type(v)) for n, v in common.items() if type(v) in _OWN and not v]
        self._common = common | {name: None for name, _ in self._empty}
        kwargs = state.get(_KWARGS, {})
        self._kwargs = {n: None if n in own else value for n, value in kwargs.items()}
        self._kwargs |= {"dag": None, "task_group": None}
        values = (*self._common.values(), *self._kwargs.values())
        self._all_known = all(isinstance(value, _SHARED) for value in values)

    def check(
        self,
        task: PrototypedOperator,
        dag: DAG,
        own: Mapping[str, Any],
        before: Mapping[str, Any],
    ) -> None:
        """Compares what a copy would be with a task that Airflow's constructor has just made.

        Args:
            task: the task.
            dag: its DAG.
            own: the arguments that are not Airflow's.
            before: ``_places`` of the DAG before the task was made; it is put there.
        """
        if self._checked or not self._all_known:
            return
        self._checked = True
        places: list[Any] = [before.get(name) for name in _PLACES]
        if [*map(type, places)] != [dict, dict, set]:
            return
        _put(task, *places)
        would_be = self._state(type(task), dag, own)
        self.fits = (
            _same(vars(task), would_be)
            and _same(vars(task)[_KWARGS], would_be[_KWARGS])
            and _same(_places(dag), before)
        )

    def _state(
        self, operator: type[PrototypedOperator], dag: DAG, own: Mapping[str, Any]
    ) -> dict[str, Any]:
        state = self._common.copy()
        for name, kind in self._empty:
            state[name] = kind()
        state.update(operator.own_state(dag.dag_id, own))
        kwargs = self._kwargs.copy()
        kwargs.update(own, dag=dag, task_group=dag.task_group)
        state["_dag"], state["task_group"], state[_KWARGS] = dag, dag.task_group, kwargs
        state["start_date"], state["end_date"] = dag.start_date, dag.end_date
        return state

    def task(self, operator: type[_Task], dag: DAG, own: Mapping[str, Any]) -> _Task:
        """A copy, which belongs to the DAG."""
        task = operator.__new__(operator)
        vars(task).update(self._state(operator, dag, own))
        _put(task, dag.task_dict, dag.task_group.children, dag.task_group.used_group_ids)
        return task


# Where a DAG of no other groups has its tasks.
_PLACES = ("dag.task_dict", "group.children", "group.used_group_ids")


def _put(
    task: PrototypedOperator, tasks: dict[str, Any], children: dict[str, Any], ids: set[str]
) -> None:
    tasks[task.task_id] = children[task.task_id] = task
    ids.add(task.task_id)


def _places(dag: DAG) -> dict[str, Any]:
    """Everything that a DAG and its group have, with copies of what a new task may be put into."""
    group = dag.task_group
    found = {f"dag.{name}": value for name, value in vars(dag).items()}
    names = [one.name for one in getattr(type(group), "__attrs_attrs__", ())]
    found |= {f"group.{name}": getattr(group, name) for name in names}
    return {
        name: value.copy() if isinstance(value, (dict, list, set)) else value
        for name, value in found.items()
    }


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two tasks have the same attributes, in the same order, of the same types."""
    if list(one) != list(other):
        return False
    pairs = ((one[name], other[name]) for name in one if name != _KWARGS)
    return all(a is b or (type(a) is type(b) and a == b) for a, b in pairs)


def set_params(dag: DAG, fields: Mapping[str, Any]) -> None:
    """Gives a DAG its parameters past attrs' validator.

    That has jsonschema look at every schema: a third of a parse, for what the rules of the manifest
    hold already. Seen in 3.3 and 3.4.0b2: ``airflow/sdk/definitions/dag.py``. Without it DAGs are
    parsed more slowly: ``dag.params = ParamsDict(fields)``.
    """
    object.__setattr__(dag, "params", ParamsDict(dict(fields)))


def asset_of(uri: str) -> Asset:
    """The asset ``Asset(uri)``, made without loading the provider that owns the URI's scheme.

    For an ``s3://`` URI Airflow would import boto3 at each parse, only to see whether there is a
    bucket. So the URI is made regular as a ``file://`` one, which no provider owns. Seen in 3.3
    and 3.4.0b2: ``airflow/sdk/definitions/asset/__init__.py``. Without it: ``Asset(uri)``.
    """
    scheme, _, place = uri.partition("://")
    asset = Asset(name=uri, uri=f"file://{place}")
    # Past attrs' converter, which is what loads the provider.
    object.__setattr__(asset, "uri", scheme + asset.uri.removeprefix("file"))
    return asset


def executors() -> set[str]:
    """The executors that this Airflow has, by alias, by class and by the path of the class.

    Seen in 3.3 and 3.4.0b2: ``airflow/executors/executor_loader.py``. Without it an executor that
    is not there is an import error of the whole file.
    """
    from airflow.executors.executor_loader import ExecutorLoader

    there: set[str] = set()
    for one in ExecutorLoader.get_executor_names(validate_teams=False):
        path = one.module_path or ""
        there |= {one.alias or "", path, path.rpartition(".")[2]} - {""}
    return there


def slots_of_pools() -> dict[str, int] | None:
    """The slots of Airflow's pools, by name; -1 for one without end. None: nobody can be asked.

    For who reaches the database: nothing tells a task of pools. Seen in 3.3.2:
    ``airflow/models/pool.py``. Without it nobody says that a training waits for a pool which is not
    there, but the scheduler's log.
    """
    from airflow.models import Pool
    from airflow.utils.session import create_session
    from sqlalchemy import select
    from sqlalchemy.exc import SQLAlchemyError

    try:
        with create_session(scoped=False) as session:
            found = session.execute(select(Pool.pool, Pool.slots))
            return {name: slots for name, slots in found if name}
    except (SQLAlchemyError, RuntimeError):  # away; or this host is one of tasks alone
        return None


def notifiers_of_providers() -> list[str]:
    """The notifiers of the installed providers, by the paths of their classes, sorted.

    Seen in 3.3 and 3.4.0b2: ``airflow/providers_manager.py``. Without it a notifier that is not
    there is an error when the manifest's DAG first fails.
    """
    from airflow.providers_manager import ProvidersManager  # most manifests notify nobody

    return sorted(
        path
        for provider in ProvidersManager().providers.values()  # type: ignore[no-untyped-call]
        for path in provider.data.get("notifications", ())
    )


def with_open_runs(dag_ids: Collection[str]) -> set[str]:
    """Returns those of the DAGs that have runs which are queued or running; all if nobody knows.

    For the DAG processor, which may ask the database. Seen in 3.3 and 3.4.0b2:
    ``airflow/models/dagrun.py``. Without it, runs of a manifest that is renamed meanwhile stop.
    """
    from airflow.models import DagRun
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from sqlalchemy import select
    from sqlalchemy.exc import SQLAlchemyError

    open_runs = select(DagRun.dag_id).where(
        DagRun.dag_id.in_(list(dag_ids)),
        DagRun.state.in_([DagRunState.QUEUED, DagRunState.RUNNING]),
    )
    try:
        with create_session(scoped=False) as session:
            return set(session.scalars(open_runs.distinct()))
    except (SQLAlchemyError, RuntimeError) as error:  # away; or a task's process, which may not ask
        _log.warning("cannot ask which runs are open, so no DAG goes: %s", type(error).__name__)
        return set(dag_ids)


# A DAG processor refreshes each of its bundles every few minutes, if it is not told otherwise.
_REFRESHED_WITHIN = timedelta(days=1)


def dags_of_other_bundles(bundle: str) -> dict[str, tuple[str, str]] | None:
    """Returns the DAGs that Airflow has of other bundles: file and bundle, by DAG id.

    None if nobody knows. Airflow gives a DAG to the bundle that was parsed last, without a word.
    For the DAG processor, which may ask the database. Seen in 3.3.2: ``airflow/models/dag.py``,
    ``airflow/dag_processing/collection.py``. Without it a manifest takes the DAG of another bundle.

    Args:
        bundle: the name of the one that asks.
    """
    from airflow.models import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.utils.session import create_session
    from sqlalchemy import or_, select
    from sqlalchemy.exc import SQLAlchemyError

    seen = DagBundleModel.last_refreshed
    others = (
        select(DagModel.dag_id, DagModel.bundle_name, DagModel.relative_fileloc)
        .join(DagBundleModel, DagBundleModel.name == DagModel.bundle_name)
        .where(
            DagModel.bundle_name != bundle,
            DagModel.is_stale.is_(False),
            # One that is configured no more has none. A DAG processor of one bundle alone leaves
            # those of before active.
            DagBundleModel.active.is_not(False),
            or_(seen.is_(None), seen > datetime.now(UTC) - _REFRESHED_WITHIN),
        )
    )
    try:
        with create_session(scoped=False) as session:
            found = session.execute(others)
            return {dag_id: (file or "a file", name) for dag_id, name, file in found}
    except (SQLAlchemyError, RuntimeError):  # the next refresh asks again
        return None


def held_back(bundle: str) -> set[str]:
    """Returns the files of a bundle's DAGs that Airflow starts no run of, though it could.

    A DAG with ``max_active_runs`` open runs has a flag. The DAG processor counts the runs while it
    parses and writes the flag at the end; where the last run ended in between, it stays set, and
    also after runs that a person or an operator started for an asset or another DAG. No schedule
    and no event starts a run then until the file is parsed again, by default after 30 s, which
    users of the bundle make an hour. For the DAG processor, which may ask the database.

    Seen in 3.3.2: ``exceeds_max_non_backfill`` in ``airflow/models/dag.py``,
    ``airflow/dag_processing/collection.py`` and ``airflow/jobs/scheduler_job_runner.py``. Without
    it such a DAG stands still for that hour.

    Args:
        bundle: its name.
    """
    from airflow.models import DagModel, DagRun
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from airflow.utils.types import DagRunType
    from sqlalchemy import func, select
    from sqlalchemy.exc import SQLAlchemyError

    open_runs = (
        select(func.count())
        .where(
            DagRun.dag_id == DagModel.dag_id,
            DagRun.state.in_([DagRunState.QUEUED, DagRunState.RUNNING]),
            DagRun.run_type != DagRunType.BACKFILL_JOB,
        )
        .scalar_subquery()
    )
    held = select(DagModel.relative_fileloc).where(
        DagModel.bundle_name == bundle,
        DagModel.is_stale.is_(False),
        DagModel.exceeds_max_non_backfill.is_(True),
        open_runs < DagModel.max_active_runs,
    )
    try:
        with create_session(scoped=False) as session:
            return {name for name in session.scalars(held) if name}
    except (SQLAlchemyError, RuntimeError):  # the next refresh asks again
        return set()


def wrongly_watched(bundle: str, assets: str) -> set[str]:
    """Returns the files of a bundle's DAGs whose assets lack watchers, or have them for nobody.

    Airflow gives an asset its watchers, or takes them, while it parses a file that schedules by it:
    an active one has them while any of its DAGs is not paused. To pause or unpause a DAG changes
    nothing of that until its file is parsed again, by default after 30 s, which users of the bundle
    make an hour. It takes the events of a DAG that is paused and forgets them. For the DAG
    processor, which may ask the database.

    Seen in 3.3.2: ``add_asset_trigger_references`` and ``_find_active_assets`` in
    ``airflow/dag_processing/collection.py``. Without it a DAG that is unpaused is started by no
    change for that hour, nor by one of an hour in which it was paused.

    Args:
        bundle: its name.
        assets: what the URIs of assets with watchers begin with.
    """
    from airflow.models import DagModel
    from airflow.models.asset import AssetModel, DagScheduleAssetReference
    from airflow.utils.session import create_session
    from sqlalchemy import select
    from sqlalchemy.exc import SQLAlchemyError

    # As Airflow decides it, so that a parse puts it right.
    waits = DagScheduleAssetReference.dag.has(~DagModel.is_stale & ~DagModel.is_paused)
    wanted = AssetModel.active.has() & AssetModel.scheduled_dags.any(waits)
    watched = AssetModel.watchers.any()
    wrong = (
        select(DagModel.relative_fileloc)
        .join(DagModel.schedule_asset_references)
        .join(DagScheduleAssetReference.asset)
        .where(
            DagModel.bundle_name == bundle,
            DagModel.is_stale.is_(False),
            DagModel.has_import_errors.is_(False),  # a parse puts nothing right
            AssetModel.uri.startswith(assets),
            (wanted & ~watched) | (~wanted & watched),
        )
    )
    try:
        with create_session(scoped=False) as session:
            return {name for name in session.scalars(wrong) if name}
    except (SQLAlchemyError, RuntimeError):  # the next refresh asks again
        return set()


# --- tasks and triggers ---------------------------------------------------------------------------


def is_supervised() -> bool:
    """Whether this task's parent is Airflow's supervisor: in ``airflow dags test`` there is none.

    Seen in 3.3 and 3.4.0b2: ``airflow/sdk/execution_time/task_runner.py``. Without it a task whose
    supervisor was killed goes on, unseen, beside its next try.
    """
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import CommsDecoder

    return isinstance(getattr(task_runner, "SUPERVISOR_COMMS", None), CommsDecoder)


def tries_before_cleared(task_instance: Any, retries: int) -> int:
    """How many tries a task had before somebody cleared it; 0 if nobody has.

    Airflow goes on counting when somebody clears a task, and raises ``max_tries`` to match. Seen in
    3.3 and 3.4.0b2: ``airflow/models/taskinstance.py``, ``clear_task_instances``. Without it a task
    that is cleared after its end finds its training done.

    Args:
        task_instance: Airflow's.
        retries: the task's, as its DAG says.
    """
    before: int = task_instance.max_tries - retries
    return max(0, before)


def run_is_open(dag_id: str, run_id: str) -> bool:
    """Whether a run is queued or running, asked by a task.

    Seen in 3.3 and 3.4.0b2: ``airflow/sdk/execution_time/task_runner.py``. Without it cleaning must
    go by the age of files alone.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = ["queued", "running"]
    return RuntimeTaskInstance.get_dr_count(dag_id=dag_id, run_ids=[run_id], states=states) > 0


def form_of(task_instance: Any, asked: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Has Airflow make the form of a task that asks a person, and says what it shows then.

    A task that is cleared or tried again keeps the form of its first try, without the answer, and
    nobody can change the text in it: ``upsert_hitl_detail`` in
    ``airflow/api_fastapi/execution_api/routes/hitl.py`` leaves it as it is and returns it, which
    ``airflow/sdk/execution_time/hitl.py`` drops. Seen in 3.3.2; in 3.4.0b2 the form is made anew.
    Without it a person may approve what they were shown nothing of.

    Args:
        task_instance: of this task.
        asked: what it asks for: ``options``, ``subject``, ``body``, ``defaults``, ``params``,
            ``assigned_users``. Airflow keeps these of the first try.

    Returns:
        The text, and what counts when nobody answers.
    """
    from airflow.sdk.api.datamodels._generated import HITLUser
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import CreateHITLDetailPayload

    users = [HITLUser(**user) for user in asked["assigned_users"] or ()]
    told = {**asked, "assigned_users": users}
    payload = CreateHITLDetailPayload(ti_id=task_instance.id, **told)
    shown: Any = task_runner.SUPERVISOR_COMMS.send(payload)
    return shown.body or "", shown.defaults or []


async def state_of_task(task: Any) -> str | None:
    """The state of a trigger's task instance in the database; None if its run was deleted.

    Seen in 3.3 and 3.4.0b2: ``airflow/sdk/execution_time/task_runner.py``. Without it a triggerer
    that loses its place cancels the job that the next one waits for.
    """
    from asgiref.sync import sync_to_async

    # Airflow's own way back to its event loop, which asks: not asyncio.to_thread.
    return await sync_to_async(state_of_own_task)(task)


def state_of_own_task(task: Any) -> str | None:
    """The same, asked by a task.

    Seen in 3.3 and 3.4.0b2: ``airflow/sdk/execution_time/task_runner.py``. Without it the job of a
    task that a person ends just before it defers is cancelled later, by a trigger or the cleaning.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    states = RuntimeTaskInstance.get_task_states(
        dag_id=task.dag_id,
        task_ids=[task.task_id],
        run_ids=[task.run_id],
        map_index=task.map_index,
    )
    state: str | None = states.get(task.run_id, {}).get(task.task_id)
    return state


# --- the api-server -------------------------------------------------------------------------------


def _nobodys(dag_ids: Iterable[str]) -> set[str]:
    """Which of the DAGs are no team's that anybody knows: with teams, those that are deleted.

    Airflow asks in whose bundle a DAG is, and takes one that it does not have for one of no team,
    which all teams may read. What it left here may be another team's. Seen in 3.3.2:
    ``get_team_name`` in ``airflow/models/dag.py``. Without it every team reads the trainings of a
    DAG that is deleted.
    """
    from airflow.models import DagModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    asked = set(dag_ids)
    if not asked or not conf.getboolean("core", "multi_team", fallback=False):
        return set()
    with create_session() as session:
        there = select(DagModel.dag_id).where(DagModel.dag_id.in_(asked))
        return asked - set(session.scalars(there))


def readers_of_task_logs() -> Any:
    """What FastAPI's ``Depends`` lets in: users who may read the task logs of ``{dag_id}``.

    With teams nobody may read those of a DAG that is deleted: 404.

    Seen in 3.3 and 3.4.0b2: ``airflow/api_fastapi/core_api/security.py``. Without it the Training
    tab would be open to all, so it must be left out.
    """
    from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
    from airflow.api_fastapi.core_api.security import requires_access_dag
    from fastapi import Depends, HTTPException

    allowed = Depends(requires_access_dag("GET", DagAccessEntity.TASK_LOGS))

    def may_read(dag_id: str, _: None = allowed) -> None:
        if _nobodys([dag_id]):
            raise HTTPException(404, f"there is no DAG {dag_id!r}, so nobody knows whose it was")

    return may_read


def readers_among_dags() -> Any:
    """What FastAPI's ``Depends`` gives who is logged in: ``may_read(dag_ids)``, which returns those
    of the DAGs whose task logs the user may read.

    Seen in 3.3 and 3.4.0b2: as above. Without it the page has no list of trainings.
    """
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import (
        DagAccessEntity,
        DagDetails,
    )
    from airflow.api_fastapi.core_api.security import get_user
    from airflow.models import DagModel
    from fastapi import Depends

    def among(user: Any = Depends(get_user)) -> Callable[[Iterable[str]], set[str]]:  # noqa: B008
        def may_read(dag_ids: Iterable[str]) -> set[str]:
            there = set(dag_ids)
            asked = list(there - _nobodys(there))
            teams = DagModel.get_dag_id_to_team_name_mapping(asked) if asked else {}
            return {
                dag_id
                for dag_id in asked
                if get_auth_manager().is_authorized_dag(
                    method="GET",
                    access_entity=DagAccessEntity.TASK_LOGS,
                    details=DagDetails(id=dag_id, team_name=teams.get(dag_id)),
                    user=user,
                )
            }

        return may_read

    return among


def rights_over_dag() -> Any:
    """What FastAPI's ``Depends`` gives who is logged in: whether the user may ``trigger`` runs of
    ``{dag_id}``, and ``approve`` what its tasks ask people.

    Seen in 3.3 and 3.4.0b2: as above. Without it the page offers what Airflow then refuses.
    """
    from airflow.api_fastapi.app import get_auth_manager
    from airflow.api_fastapi.auth.managers.models.resource_details import (
        DagAccessEntity,
        DagDetails,
    )
    from airflow.api_fastapi.core_api.security import get_user
    from airflow.models import DagModel
    from fastapi import Depends

    def rights(dag_id: str, user: Any = Depends(get_user)) -> dict[str, bool]:  # noqa: B008
        if _nobodys([dag_id]):
            return {"trigger": False, "approve": False}
        details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id))
        manager = get_auth_manager()
        trigger = manager.is_authorized_dag(
            method="POST", access_entity=DagAccessEntity.RUN, details=details, user=user
        )
        approve = manager.is_authorized_dag(
            method="PUT", access_entity=DagAccessEntity.HITL_DETAIL, details=details, user=user
        )
        return {"trigger": trigger, "approve": approve}

    return rights
