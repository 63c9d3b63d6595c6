"""What is made past Airflow's constructors is what they make."""

from __future__ import annotations

import copy
import itertools
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG, BaseOperator, CronTriggerTimetable, TaskGroup
from airflow.sdk.exceptions import AirflowTimetableInvalid, DuplicateTaskIdFound
from airflow.serialization.serialized_objects import DagSerialization

from ddl_airflow import airflow_internals
from ddl_airflow.airflow_internals import PrototypedOperator, made_task
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.manifest.model import Manifest
from ddl_airflow.manifest_dag import dag_from

ROOT = Path(__file__).parents[3]
MANIFESTS = [
    *sorted((ROOT / "tests/fixtures/manifests/valid").glob("*.yml")),
    *sorted((ROOT / "dags").glob("*/manifest.yml")),
]
KWARGS = "_BaseOperator__init_kwargs"


@pytest.fixture
def prototypes(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """Those of this test alone; ``clear`` to begin anew."""
    of_this_test: dict[Any, Any] = {}
    monkeypatch.setattr(airflow_internals, "_prototypes", of_this_test)
    return of_this_test


def in_full(value: Any, dag: DAG) -> Any:
    """A value, so that those of two equal DAGs are equal, and of the same types."""
    if value is dag or value is dag.task_group:
        return "the DAG" if value is dag else "its group"
    if isinstance(value, dict):
        return type(value), [(name, in_full(one, dag)) for name, one in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [in_full(one, dag) for one in value]
    return type(value), value


def tasks_in_full(dag: DAG) -> list[Any]:
    """Every attribute of every task, in order, and where the DAG and its group have the task."""
    assert list(dag.task_group.children.items()) == list(dag.task_dict.items())
    assert dag.task_group.used_group_ids == {*dag.task_dict}
    return [
        [type(task), task.task_id, *((name, in_full(v, dag)) for name, v in vars(task).items())]
        for task in dag.tasks
    ]


def both_ways(manifest: Manifest, path: Path, prototypes: dict[Any, Any]) -> tuple[DAG, DAG]:
    """A DAG as Airflow's constructor makes its tasks, and one of copies where there are some."""
    prototypes.clear()
    normal = dag_from(manifest, path)
    dag_from(manifest, path)  # which is compared
    return normal, dag_from(manifest, path)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_copied_tasks_are_those_of_airflows_constructor(path, prototypes):
    # Of those notifiers not every site has every provider; and they are left to Airflow anyway.
    nobody = {"notifications": Manifest.model_fields["notifications"].default}
    manifest = load_manifest(path).model_copy(update=nobody)
    normal, quick = both_ways(manifest, path, prototypes)
    assert tasks_in_full(quick) == tasks_in_full(normal)
    assert DagSerialization.to_dict(quick) == DagSerialization.to_dict(normal)
    assert quick == normal and hash(quick) == hash(normal)
    for one, other in zip(quick.tasks, normal.tasks, strict=True):
        assert one == other and hash(one) == hash(other)
        assert one.dag is quick and one.task_group is quick.task_group
        assert list(one.template_fields) == list(other.template_fields)
        assert one.get_serialized_fields() == other.get_serialized_fields()
        assert repr(one) == repr(other)


def test_the_tasks_of_a_manifest_are_copies(prototypes):
    """Else all of the above compares Airflow with itself."""
    path = ROOT / "dags/mnist-keras/manifest.yml"
    both_ways(load_manifest(path), path, prototypes)
    assert [prototype.fits for prototype in prototypes.values()] == [True] * len(prototypes)
    assert {kind[0].__name__ for kind in prototypes} >= {
        *("StageDataOperator", "TrainOperator", "TransformOperator", "UploadResultsOperator")
    }


def test_copied_tasks_share_nothing_that_can_be_changed(prototypes):
    path = ROOT / "dags/mnist-keras/manifest.yml"
    manifest = load_manifest(path)
    both_ways(manifest, path, prototypes)
    one, other = (dag_from(manifest, path) for _ in range(2))
    for task, twin in zip(one.tasks, other.tasks, strict=True):
        state, of_twin = vars(task), vars(twin)
        shared = [
            name
            for name, value in state.items()
            if value is of_twin[name] and isinstance(value, (list, dict, set))
        ]
        assert shared == [] and state[KWARGS] is not of_twin[KWARGS]
        assert task.params is not twin.params


def test_copied_tasks_can_be_changed_and_copied(prototypes):
    """As a site's task_policy and Airflow's task runner do."""
    path = ROOT / "dags/mnist-keras/manifest.yml"
    normal, quick = both_ways(load_manifest(path), path, prototypes)
    for dag in (normal, quick):
        task = dag.get_task("train")
        task.retries, task.retry_delay, task.queue = "7", 11, "gpu"
        task.command = "python other.py"
        task.add_outlets([])
    assert tasks_in_full(quick) == tasks_in_full(normal)
    assert quick.get_task("train").retry_delay == timedelta(seconds=11)
    assert vars(quick.get_task("train"))[KWARGS]["retries"] == 7
    ready = quick.get_task("train").prepare_for_execution()
    ready.command = "python one-more.py"
    assert quick.get_task("train").command == "python other.py"
    again = copy.deepcopy(quick)
    assert DagSerialization.to_dict(again) == DagSerialization.to_dict(quick)


class Plain(PrototypedOperator):
    """Has one argument of its own."""

    template_fields = ("said",)

    def __init__(self, *, said: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        vars(self).update(self.own_state(self.dag_id, {"said": said}))

    @classmethod
    def own_state(cls, dag_id: str, own: Any) -> dict[str, Any]:
        return {"said": f"{dag_id}: {own['said']}"}


def made(operator: type[Any] = Plain, times: int = 3, **airflows: Any) -> list[Any]:
    """A task in each of some DAGs."""
    tasks = []
    for number in range(times):
        with DAG(f"dag-{number}") as dag:
            own = {"said": f"{number}"}
            tasks.append(made_task(operator, dag, {"task_id": "a", **airflows}, own))
    return tasks


def test_each_kind_of_arguments_has_its_prototype(prototypes):
    assert [task.said for task in made()] == [f"dag-{n}: {n}" for n in range(3)]
    assert [task.retries for task in made(retries=4)] == [4] * 3
    # 1 == 1.0 == True, and a prototype of one is none of the other.
    kinds = [made(retry_exponential_backoff=value)[-1] for value in (1, 1.0, True)]
    found = [task.retry_exponential_backoff for task in kinds]
    assert [type(value) for value in found] == [int, float, bool]
    assert len(prototypes) == 5 and all(prototype.fits for prototype in prototypes.values())


def test_an_operator_that_does_more_when_it_is_made_is_always_made(prototypes):
    numbers = itertools.count()

    class Counted(Plain):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.number = next(numbers)

    assert [task.number for task in made(Counted, 5)] == [0, 1, 2, 3, 4]


def test_what_nobody_knows_how_to_copy_is_always_made(prototypes):
    class WithLock(Plain):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.kept: list[Any] = [object()]

    assert len({id(task.kept[0]) for task in made(WithLock, 5)}) == 5


def test_an_airflow_that_keeps_a_tasks_arguments_elsewhere_is_left_to_its_constructor(
    prototypes, monkeypatch
):
    monkeypatch.setattr(airflow_internals, "_KWARGS", "_arguments")
    tasks = made(times=4)
    assert [prototype.fits for prototype in prototypes.values()] == [False]
    assert [vars(task)[KWARGS]["said"] for task in tasks] == ["0", "1", "2", "3"]
    assert [task.dag.dag_id for task in tasks] == [f"dag-{n}" for n in range(4)]


def test_an_airflow_without_groups_in_their_context_is_left_to_its_constructor(
    prototypes, monkeypatch
):
    from airflow.sdk.definitions._internal import contextmanager

    made(times=2)
    monkeypatch.setattr(airflow_internals, "_CONTEXTS", f"{contextmanager.__name__}_of_old")
    assert [task.said for task in made()] == [f"dag-{n}: {n}" for n in range(3)]


@pytest.mark.parametrize("places", [("dag.task_dict",), ("dag.task_dict", "group.x", "group.y")])
def test_an_airflow_whose_dags_have_tasks_elsewhere_is_left_to_its_constructor(
    prototypes, monkeypatch, places
):
    monkeypatch.setattr(airflow_internals, "_PLACES", places)
    for task in made(times=4):
        assert task.dag.task_dict == task.task_group.children == {"a": task}
    assert [prototype.fits for prototype in prototypes.values()] == [False]


def test_an_airflow_that_does_more_to_a_dag_is_left_to_its_constructor(prototypes, monkeypatch):
    real = DAG.add_task

    def add_task(self: DAG, task: Any) -> None:
        self.edge_info.setdefault(task.task_id, {})
        real(self, task)

    monkeypatch.setattr(DAG, "add_task", add_task)
    assert all("a" in task.dag.edge_info for task in made(times=4))
    assert [prototype.fits for prototype in prototypes.values()] == [False]


def test_two_tasks_of_one_id_are_refused(prototypes):
    made()
    with DAG("twice") as dag:
        made_task(Plain, dag, {"task_id": "a"}, {"said": ""})
        with pytest.raises(DuplicateTaskIdFound):
            made_task(Plain, dag, {"task_id": "a"}, {"said": ""})


def test_groups_defaults_and_callbacks_are_left_to_airflows_constructor(prototypes):
    assert [task.queue for task in made(queue="a")] == ["a"] * 3

    def hears(context: Any) -> None:
        """Of a failure."""

    for number in range(3):
        with DAG(f"of-{number}", default_args={"queue": "b"}) as dag:
            assert made_task(Plain, dag, {"task_id": "a"}, {"said": ""}).queue == "b"
        with DAG(f"told-{number}", default_args={"on_failure_callback": [hears]}) as dag:
            told = made_task(Plain, dag, {"task_id": "a"}, {"said": ""})
            assert told.on_failure_callback == [hears]
        with DAG(f"in-{number}", params={"x": 1}) as dag, TaskGroup("group"):
            inside = made_task(Plain, dag, {"task_id": "a"}, {"said": ""})
            assert (inside.task_id, inside.params["x"]) == ("group.a", 1)
            assert inside.task_group.group_id == "group"


def test_manifests_with_any_tries_leave_so_many_prototypes(prototypes, monkeypatch):
    monkeypatch.setattr(airflow_internals, "_MOST_PROTOTYPES", 2)
    for retries in range(5):
        assert [task.retries for task in made(retries=retries)] == [retries] * 3
    assert len(prototypes) == 2


# --- the check of a DAG -------------------------------------------------------------------------


def dag_with(schedule: Any, dag_id: str = "a") -> airflow_internals.DagShownAs:
    return airflow_internals.DagShownAs(dag_id, schedule=schedule)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The cron expressions that Airflow has checked, in order."""
    monkeypatch.setattr(airflow_internals, "_checked", set())
    found: list[str] = []
    real = CronTriggerTimetable.validate

    def validate(self: CronTriggerTimetable) -> None:
        found.append(self.expression)
        real(self)

    monkeypatch.setattr(CronTriggerTimetable, "validate", validate)
    return found


def test_a_cron_expression_is_checked_once(checks):
    dags = [dag_with(schedule) for schedule in ("0 3 * * *", "@daily", "0 3 * * *", "@daily")]
    before = [dag.timetable for dag in dags]
    for dag in dags:
        dag.validate()
    assert checks == ["0 3 * * *", "0 0 * * *"]
    assert all(dag.timetable is timetable for dag, timetable in zip(dags, before, strict=True))


def test_one_that_is_wrong_is_checked_each_time(checks):
    for _ in range(2):
        dag = dag_with("61 3 * * *")
        with pytest.raises(AirflowTimetableInvalid):
            dag.validate()
        assert isinstance(dag.timetable, CronTriggerTimetable)
    assert len(checks) == 2


def test_a_timetable_of_a_site_is_checked_each_time(checks):
    for _ in range(2):
        dag_with(CronTriggerTimetable("0 3 * * *", timezone="UTC")).validate()
    assert len(checks) == 2


def test_the_rest_of_a_dag_is_checked_each_time(checks):
    dag_with("@daily").validate()
    dag = dag_with("@daily")
    dag.owner_links["someone"] = "no address"
    with pytest.raises(ValueError, match="no address"):
        dag.validate()


def test_dags_are_hashed_by_what_is_equal_of_equal_ones():
    one, same, other = dag_with("@daily"), dag_with("@daily"), dag_with("@daily", "b")
    assert one == same and hash(one) == hash(same)
    assert len({one, same, other}) == 2
    with one:
        BaseOperator(task_id="a")  # which Airflow's hash is of
    assert one != same and one in {one}
