from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from airflow.configuration import AirflowConfigParser
from airflow.dag_processing.dagbag import BundleDagBag
from airflow.models.dagcode import DagCode
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowSkipException
from airflow.serialization.serialized_objects import DagSerialization

from ddl_airflow.bundle import ManifestBundle
from ddl_airflow.core.errors import ManifestInvalid
from ddl_airflow.core.manifest.load import load_manifest, load_manifest_text, without_keys
from ddl_airflow.dag import BrokenManifest, ManifestProblem, dags_from, manifests_in
from ddl_airflow.lineage.production import PRODUCTION, point
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import publish
from tests.pages import blocks

ROOT = Path(__file__).parents[3]
STEPS = ["stage_data", "train", "transform", "upload_results"]


def broken_in(dags: dict[str, DAG]) -> dict[str, BrokenManifest]:
    """The stand-ins, by the file that Airflow will name."""
    return {d.relative_fileloc: d for d in dags.values() if isinstance(d, BrokenManifest)}


def good_in(dags: dict[str, DAG]) -> list[str]:
    return sorted(name for name, dag in dags.items() if not isinstance(dag, BrokenManifest))


def said_by(dag: BrokenManifest) -> str:
    """What Airflow hears when it serialises the stand-in: our words, not wrapped in its own."""
    with pytest.raises(ManifestProblem) as caught:
        DagSerialization.to_dict(dag)
    assert caught.value.__cause__ is None
    return str(caught.value).removeprefix("\n")


# --- the DAG of one manifest ----------------------------------------------------------------


def shape(dag: DAG) -> dict:
    """What a person sees of a DAG: its tasks, their order, settings and retries."""
    return {
        "dag_id": dag.dag_id,
        "description": dag.description,
        "tags": sorted(dag.tags),
        "schedule": dag.schedule,
        "max_active_runs": dag.max_active_runs,
        "catchup": dag.catchup,
        "tasks": [
            {
                "task_id": task.task_id,
                "shown_as": task.task_display_name,
                "operator": type(task).__name__,
                "downstream": sorted(task.downstream_task_ids),
                "retries": task.retries,
                "retry_delay_s": task.retry_delay.total_seconds(),
                "timeout_s": task.execution_timeout and task.execution_timeout.total_seconds(),
                "fields": {name: getattr(task, name) for name in task.template_fields},
                "outlets": [asset.uri for asset in task.outlets],
            }
            for task in dag.topological_sort()
        ],
    }


@pytest.mark.parametrize(
    "example",
    [
        *("mnist-tf1", "mnist-keras", "mpi-collectives", "cray-dl-comm", "parameter-server"),
        "ffdl-digits",
    ],
)
def test_shape_of_the_examples(golden, example):
    path = ROOT / "dags" / example / "manifest.yml"
    text = json.dumps(shape(dag_from(load_manifest(path), path)), indent=2, sort_keys=True)
    golden(f"dag_{example}.json", text.replace(str(ROOT), "<repository>") + "\n")


def test_the_example_that_scores_takes_what_the_pointer_names(tmp_path):
    """Its scoring itself: tests/integration/test_examples.py."""
    example = runpy.run_path(str(ROOT / "dags" / "score_nightly.py"))
    DagSerialization.to_dict(example["dag"])
    place = tmp_path.as_uri()
    dag = example["score_dag"](place, "digits", "file:///nowhere")
    asset = dag.schedule.asset_condition
    assert asset.uri == f"{place}/digits"
    newest = dag.get_task("newest_in_production").python_callable
    with pytest.raises(AirflowSkipException, match="no digits is in production yet"):
        newest()
    published = publish({"model/x": Path(__file__)}, FolderStore(tmp_path), "digits-1")
    named = f"digits-1/{published.name}"
    point(FolderStore(tmp_path), "digits", PRODUCTION, named, {"accuracy": 0.9})
    serving = {
        **{"publication": named, "model": f"{published.uri}/model"},
        "metrics": {"accuracy": 0.9},
    }
    assert newest() == serving
    # A training whose model was published, and then one whose model serves.
    events = {asset: [SimpleNamespace(extra={"production": False})]}
    with pytest.raises(AirflowSkipException, match="not put into production"):
        newest(events)
    events[asset].append(SimpleNamespace(extra={"production": True}))
    assert newest(events) == serving


def dag_of(tmp_path: Path, write_manifest, more: str = "", **fields: str) -> DAG:
    path = write_manifest(tmp_path, more=more, **fields)
    return dag_from(load_manifest(path), path, path.read_text())


def test_the_documented_dag_of_ones_own_is_stored(tmp_path):
    """What its steps do: test_base.py, test_upload.py."""
    (block,) = (one for one in blocks(ROOT / "docs" / "python.md") if one.language == "python")
    (tmp_path / "own.py").write_text(block.text)
    dag = runpy.run_path(str(tmp_path / "own.py"))["dag"]
    assert json.loads(json.dumps(DagSerialization.to_dict(dag)))["dag"]["dag_id"] == dag.dag_id
    before = {task.task_id: sorted(task.upstream_task_ids) for task in dag.tasks}
    assert before.pop("stage_data") == ["export"]
    assert before.pop("train") == ["search", "stage_data"]
    assert (before.pop("transform"), before.pop("upload")) == (["train"], ["transform"])
    assert before == {"export": [], "search": [], "deploy": ["upload"]}


def test_schedules(tmp_path, write_manifest):
    assert dag_of(tmp_path, write_manifest).schedule is None
    assert dag_of(tmp_path, write_manifest, "schedule: '@daily'\n").schedule == "@daily"
    assert dag_of(tmp_path, write_manifest, "schedule: {cron: '@daily'}\n").schedule == "@daily"
    dag = dag_of(tmp_path, write_manifest, "schedule: {on_data_change: true}\n")
    (watcher,) = dag.schedule.watchers
    assert watcher.trigger.uri == (tmp_path / "data").as_uri()
    assert (
        watcher.trigger.serialize()[1]["dag_id"] == dag.dag_id
    )  # another one than its neighbour's
    both = dag_of(tmp_path, write_manifest, "schedule: {cron: '@daily', on_data_change: true}\n")
    assert type(both.schedule).__name__ == "AssetOrTimeSchedule"
    DagSerialization.to_dict(both)


@pytest.mark.parametrize("seconds", ["0", "-5", "nan", "inf", "1e12"])
def test_an_interval_that_would_never_let_the_triggerer_sleep_is_refused(
    tmp_path, write_manifest, monkeypatch, seconds
):
    monkeypatch.setenv("AIRFLOW__DDL__DATA_POLL_INTERVAL", seconds)
    refused = r"schedule.on_data_change: \[ddl\] data_poll_interval is .*Correct that in Airflow"
    with pytest.raises(ManifestInvalid, match=refused):
        dag_of(tmp_path, write_manifest, "schedule: {on_data_change: true}\n")
    assert dag_of(tmp_path, write_manifest).schedule is None  # which looks at nothing


def stored(dag: DAG) -> dict:
    return DagSerialization.to_dict(dag)["dag"]


def test_overlap_start_and_time_zone(tmp_path, write_manifest):
    dag = dag_of(tmp_path, write_manifest, "schedule: '@daily'\n")
    assert (dag.catchup, dag.max_active_runs, dag.timezone.name) == (False, 1, "UTC")
    asked = "cron: 0 3 * * *, timezone: Europe/Berlin, start: 2026-07-01, catchup: true"
    dag = dag_of(tmp_path, write_manifest, f"schedule: {{{asked}, max_active_runs: 2}}\n")
    assert (dag.catchup, dag.max_active_runs, dag.timezone.name) == (True, 2, "Europe/Berlin")
    assert dag.start_date.isoformat() == "2026-06-30T22:00:00+00:00"
    assert stored(dag)["timetable"]["__var"]["timezone"] == "Europe/Berlin"
    both = dag_of(tmp_path, write_manifest, f"schedule: {{{asked}, on_data_change: true}}\n")
    assert both.schedule.timetable.timezone == "Europe/Berlin"
    # Airflow holds back no run that an event starts.
    assert both.get_task("stage_data").not_before == "2026-07-01T00:00:00+02:00"
    assert dag.get_task("stage_data").not_before == "2026-07-01T00:00:00+02:00"


def test_assets_of_others_are_referred_to_by_uri_or_name(tmp_path, write_manifest):
    asked = "assets: [s3://models/digits/, features]"
    dag = dag_of(tmp_path, write_manifest, f"schedule: {{{asked}}}\n")
    uri, name = dag.schedule.objects
    assert (type(dag.schedule).__name__, uri.uri, name.name) == (
        "AssetAll",
        "s3://models/digits",
        "features",
    )
    stored(dag)
    either = dag_of(tmp_path, write_manifest, f"schedule: {{{asked}, on_data_change: true}}\n")
    assert [type(one).__name__ for one in either.schedule.objects] == ["Asset", "AssetAll"]
    assert stored(either)["timetable"]
    # Else a run would start the next by staging the data that it waits for.
    assert dag.get_task("stage_data").outlets == []


def test_an_asset_of_another_provider_is_written_as_its_producer_writes_it(
    tmp_path, write_manifest, monkeypatch
):
    from airflow.sdk import Asset
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

    table = "redshift://cluster/db/public/digits"
    dag = dag_of(tmp_path, write_manifest, f"schedule: {{assets: ['{table}']}}\n")
    (asset,) = dag.schedule.objects
    assert asset.uri == Asset(table).uri == table.replace("cluster", "cluster:5439")

    path = write_manifest(tmp_path, more="schedule:\n  assets:\n    - x\n    - redshift://c/db\n")
    said = said_by(broken_in(dags_from(tmp_path))["manifest.yml"])
    line = path.read_text().count("\n")
    assert f"manifest.yml:{line}: schedule.assets[1]: 'redshift://c/db' is no asset" in said
    assert "must contain database, schema, and table names" in said

    # Whoever names none of a provider's does not load the providers.
    monkeypatch.setattr(
        ProvidersManagerTaskRuntime, "asset_uri_handlers", property(lambda _: 1 / 0)
    )
    dag_of(tmp_path, write_manifest, "schedule: {assets: ['s3://a/b', 'gs://a/b', x, 'x-y://z']}\n")


@pytest.mark.parametrize(
    ("source", "target", "more", "said"),
    [
        (
            "./data",
            "{here}/results",
            "schedule: {assets: ['file://{here}/results/small/']}\n",
            r"manifest.yml:\d+: schedule.assets\[0\]: is this training's own model. Delete it",
        ),
        (
            "{here}/data",
            "./data/out",
            "schedule: {on_data_change: true}\n",
            r"manifest.yml:\d+: .*reference.target: the results lie inside the training data",
        ),
        ("{here}", ".", "", "reference.target: the results are the same place as the training"),
        ("./link", "./data/out", "", "reference.target: the results lie inside the training data"),
        # Beside the models, <results>/<dag id> names the newest.
        ("./out/small", "./out", "", r"reference.target: .*, out/small, lie in the training data"),
        ("./out/small", "{here}/out", "", "reference.target: .*, out/small, lie in the training"),
    ],
)
def test_folders_are_compared_where_the_manifest_lies(
    tmp_path, write_manifest, source, target, more, said
):
    (tmp_path / "link").symlink_to("data")
    path = write_manifest(tmp_path, more=more)
    text = path.read_text().replace("./data", source, 1).replace("./results", target)
    path.write_text(text.replace("{here}", str(tmp_path)))
    with pytest.raises(ManifestInvalid, match=said):
        dag_from(load_manifest(path, source=path.name), path)


@pytest.mark.parametrize(
    ("prefix", "more", "is_data"),
    [
        ("small", "", True),
        ("small", "  exclude: ['latest.json*']\n", True),
        ("small", "  exclude: ['*.json', '*.conditions']\n", False),
        ("small", "  include: ['*.tfrecord']\n", False),
        ("small/raw", "", False),
        ("smaller", "", False),
    ],
)
def test_pointers_to_models_are_no_data(tmp_path, write_manifest, prefix, more, is_data):
    """Else every publication changes the data, which are trained on once more."""
    path = write_manifest(tmp_path)
    text = path.read_text().replace("type: fs", "type: s3\n  connection: {conn_id: a}")
    text = text.replace("target: {path: ./results}", "target: {bucket: lake}")
    source = f"source: {{bucket: lake, prefix: {prefix}}}\n{more}"
    path.write_text(text.replace("source: {path: ./data}\n", source))
    if not is_data:
        assert dag_from(load_manifest(path), path).dag_id == "small"
        return
    said = (
        r"manifest.yml:\d+: training_results_reference.target: .*, lake/small, lie in the training"
    )
    with pytest.raises(ManifestInvalid, match=said):
        dag_from(load_manifest(path, source=path.name), path)


def test_results_elsewhere_are_not_inside_the_manifests_folder(tmp_path, write_manifest):
    path = write_manifest(tmp_path / "digits")
    text = path.read_text().replace("./data", ".").replace("./results", f"{tmp_path}/results")
    path.write_text(text)
    assert dag_from(load_manifest(path), path).dag_id == "small"


def test_a_secret_in_a_command_in_flow_style_costs_no_dag(tmp_path, write_manifest):
    flow = "{command: python train.py --password=abc, compute_configuration: {name: cpu}}"
    path = write_manifest(tmp_path)
    head, _, rest = path.read_text().partition("  execution:\n")
    _, _, rest = rest.partition("training_data_reference:")
    path.write_text(f"{head}  execution: {flow}\ntraining_data_reference:{rest}")
    with pytest.warns(UserWarning, match="may hold a secret"):
        dags = dags_from(tmp_path)
    assert good_in(dags) == ["small"]
    shown = without_keys(path.read_bytes()).decode()
    for text in (shown, dags["small"].doc_md):
        assert "***" in text and "compute_configuration" in text and "abc" not in text


def test_a_timetable_is_one_that_a_plugin_registers(tmp_path, write_manifest, monkeypatch):
    from airflow import plugins_manager
    from airflow.timetables.simple import NullTimetable

    path = write_manifest(tmp_path, more="schedule: {timetable: site_calendar.AfterWorkday}\n")
    said = said_by(broken_in(dags_from(tmp_path))["manifest.yml"])
    line = path.read_text().count("\n")
    assert f"manifest.yml:{line}: schedule.timetable: no plugin of this Airflow registers" in said
    known = {"site_calendar.AfterWorkday": NullTimetable}
    monkeypatch.setattr(plugins_manager, "get_timetables_plugins", lambda: known)
    assert type(dag_of(tmp_path, write_manifest, path.read_text().splitlines()[-1]).schedule) is (
        NullTimetable
    )
    path.write_text(path.read_text().replace("AfterWorkday", "AfterWorkdays"))
    said = said_by(broken_in(dags_from(tmp_path))["manifest.yml"])
    assert "Did you mean site_calendar.AfterWorkday?" in said


COMPUTE = {
    "gpu4": {
        "slots": 4,
        "pool": "gpus",
        "queue": "gpu",
        "executor": "LocalExecutor",
        "priority_weight": 7,
        "other_steps": {"queue": "io", "pool": "transfers"},
    }
}


def test_the_sites_table_says_where_each_step_runs(tmp_path, write_manifest, monkeypatch):
    path = write_manifest(tmp_path, more="approval: {required: true}\n")
    path.write_text(path.read_text().replace("name: cpu,", "name: gpu4,"))
    monkeypatch.setenv("AIRFLOW__DDL__COMPUTE", json.dumps({"compute": COMPUTE}))
    (dag,) = dags_from(tmp_path).values()
    stored = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    tasks = {t["__var"]["task_id"]: t["__var"] for t in stored["dag"]["tasks"]}
    train = tasks.pop("train")
    where = (train["pool"], train["pool_slots"], train["queue"], train["executor"])
    assert where == ("gpus", 8, "gpu", "LocalExecutor")
    assert train["priority_weight"] == 7
    assert set(tasks) == {"stage_data", "transform", "evaluate", "approve", "upload_results"}
    for task in tasks.values():
        where = (task["pool"], task.get("pool_slots", 1), task["queue"], task["executor"])
        assert where == ("transfers", 1, "io", "LocalExecutor")


def test_a_manifest_that_names_what_is_not_its_own_is_an_error_of_its_own(
    tmp_path, write_manifest, monkeypatch
):
    ours = write_manifest(tmp_path / "ours", "ours")
    theirs = write_manifest(tmp_path / "theirs", "theirs")
    for path in (ours, theirs):
        path.write_text(path.read_text().replace("{path: ./data}", "{path: /srv/ours/mnist}"))
    rights = {"rights": {str(ours.parent): {"paths": ["/srv/ours"], "launchers": ["slurm"]}}}
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    more = "launcher: {kind: slurm}\nschedule: {on_data_change: true}\n"
    ours.write_text(ours.read_text() + more)
    dags = dags_from(tmp_path)
    assert len(dags) == 2
    within = (ours.parent, Path("/srv/ours"))
    stage_data = dags["ours"].get_task("stage_data")
    upload = dags["ours"].get_task("upload_results")
    for reference in (stage_data.step.dataset, stage_data.step.results, upload.step.results):
        assert reference.within == within
    (watcher,) = dags["ours"].timetable.asset_condition.watchers
    assert watcher.trigger.within == [str(folder) for folder in within]
    assert dags["ours"].params.get_param("launcher").schema["enum"] == ["slurm"]
    with pytest.raises(ManifestProblem, match="theirs/manifest.yml:9: .*source.path: /srv/ours"):
        DagSerialization.to_dict(next(dag for name, dag in dags.items() if name != "ours"))


def test_a_broken_table_is_one_import_error_that_names_it(tmp_path, write_manifest, monkeypatch):
    for name in ("a", "b"):
        write_manifest(tmp_path / name, name)
    table = tmp_path / "compute.txt"
    table.write_text("compute: {cpu: {slot: 1}}\n")
    monkeypatch.setenv("AIRFLOW__DDL__COMPUTE", str(table))
    dags = dags_from(tmp_path)
    assert good_in(dags) == []
    (said,) = map(said_by, broken_in(dags).values())
    assert said == f"{table}:1: compute.cpu.slot: unknown field. Did you mean slots?"


def test_an_executor_that_is_not_there_breaks_only_who_asks_for_it(
    tmp_path, write_manifest, monkeypatch
):
    table = json.dumps({"compute": {"gpu4": {"slots": 4, "executor": "LocalExekutor"}}})
    monkeypatch.setenv("AIRFLOW__DDL__COMPUTE", table)
    write_manifest(tmp_path / "good", "good")
    path = write_manifest(tmp_path / "bad", "bad")
    path.write_text(path.read_text().replace("name: cpu,", "name: gpu4,"))
    dags = dags_from(tmp_path)
    assert good_in(dags) == ["good"]
    (said,) = map(said_by, broken_in(dags).values())
    assert "has executor LocalExekutor in [ddl] compute; this Airflow has not" in said
    assert "Did you mean LocalExecutor?" in said


def test_what_leads_to_connections_is_in_no_template(tmp_path, write_manifest):
    write_manifest(tmp_path, command="python train.py {{ conn.mydb.password }}")
    (said,) = map(said_by, broken_in(dags_from(tmp_path)).values())
    assert "execution.command: names 'conn' in a template" in said
    more = "notifications: {on_failure: [{arguments: {to: a@b.c, subject: '{{ var.value.x }}'}}]}\n"
    write_manifest(tmp_path, more=more)
    (said,) = map(said_by, broken_in(dags_from(tmp_path)).values())
    assert "arguments.subject: names 'var' in a template" in said


def test_a_manifest_that_none_of_our_rules_foresaw_takes_no_other_along(
    tmp_path, write_manifest, monkeypatch
):
    write_manifest(tmp_path / "good", "good")
    path = write_manifest(tmp_path / "deep", "deep", command="python x {{ " + "(" * 500 + " }}")
    assert good_in(dags_from(tmp_path)) == ["good"]
    write_manifest(tmp_path / "deep", "deep")

    def reading(content, source, compute):
        if "deep" in source:
            raise RecursionError("maximum recursion depth exceeded")
        return load_manifest_text(content, source, compute)

    monkeypatch.setattr("ddl_airflow.manifest_file.load_manifest_text", reading)
    dags = dags_from(tmp_path)
    assert good_in(dags) == ["good"]
    assert "RecursionError: maximum" in said_by(broken_in(dags)[f"{path.parent.name}/{path.name}"])


def test_names_that_are_no_text_take_no_other_along(tmp_path, write_manifest):
    """All DAGs of a loader are in one message, which is UTF-8."""
    write_manifest(tmp_path / "good", "good")
    odd = write_manifest(tmp_path / "file", "odd")
    odd.rename(odd.with_name(os.fsdecode(b"manifest-\xff.yml")))
    write_manifest(tmp_path / os.fsdecode(b"folder-\xff"), "in-odd")
    write_manifest(tmp_path / "linked", "linked")
    (tmp_path / "linked" / "data").symlink_to(tmp_path / os.fsdecode(b"folder-\xff"))
    dags = dags_from(tmp_path)
    assert good_in(dags) == ["good", "odd"]
    for dag_id in ("good", "odd"):
        msgspec.msgpack.encode(DagSerialization.to_dict(dags[dag_id]))
    broken = broken_in(dags)
    assert sorted(broken) == [r"folder-\udcff/manifest.yml", "linked/manifest.yml"]
    for name, dag in broken.items():
        said = f"{name}: works with a folder whose name is not UTF-8: {tmp_path}/folder-\\udcff"
        assert said_by(dag) == f"{said}. Rename it."


def test_evaluation_and_approval_stand_before_the_upload(tmp_path, write_manifest):
    dag = dag_of(tmp_path, write_manifest, "evaluation: {metric: accuracy, minimum: 0.9}\n")
    assert [task.task_id for task in dag.topological_sort()] == [*STEPS[:3], "evaluate", STEPS[3]]
    assert dag.get_task("upload_results").promote
    dag = dag_of(tmp_path, write_manifest, "approval: {required: true}\n")
    names = [task.task_id for task in dag.topological_sort()]
    assert names == [*STEPS[:3], "evaluate", "approve", STEPS[3]]
    assert dag.get_task("approve").downstream_task_ids == {"upload_results"}
    assert dag.get_task("approve").response_timeout is None
    dag = dag_of(tmp_path, write_manifest, "approval: {timeout: 7d, then: approve}\n")
    approve = dag.get_task("approve")
    assert (approve.response_timeout, approve.defaults) == (timedelta(days=7), ["Approve"])
    assert not dag_of(tmp_path, write_manifest).get_task("upload_results").promote


def test_steps_run_one_after_another(tmp_path, write_manifest):
    dag = dag_of(tmp_path, write_manifest, "schedule: '0 3 * * 0'\n", name="My model (v2)")
    assert dag.dag_id == "My-model-v2"
    assert [task.task_id for task in dag.topological_sort()] == STEPS
    for step, after in zip(STEPS, [*STEPS[1:], None], strict=True):
        assert dag.get_task(step).downstream_task_ids == ({after} if after else set())
    assert dag.schedule == "0 3 * * 0"
    DagSerialization.to_dict(dag)


def test_all_commands_are_checked_and_each_goes_to_its_step(tmp_path, write_manifest):
    commands = "python train.py ; python a.py ; python b.py"
    evaluation = "evaluation: {metric: a, minimum: 1, command: python e.py}\n"
    dag = dag_of(tmp_path, write_manifest, command=commands, more=evaluation)
    assert dag.get_task("stage_data").commands == [
        "python train.py",
        "python a.py",
        "python b.py",
    ]
    assert dag.get_task("stage_data").evaluation == "python e.py"
    assert dag.get_task("train").command == "python train.py"
    assert dag.get_task("transform").commands == ["python a.py", "python b.py"]


@pytest.mark.parametrize(
    ("retries", "count", "delay", "factor"),
    [
        ("", 2, timedelta(seconds=30), 2.0),
        ("retries: {attempts: 1}\n", 0, timedelta(seconds=30), 2.0),
        ("retries: {attempts: 5, delay: 2m, backoff: fixed}\n", 4, timedelta(minutes=2), 0),
    ],
)
def test_attempts_are_tries_in_all(tmp_path, write_manifest, retries, count, delay, factor):
    for task in dag_of(tmp_path, write_manifest, retries).tasks:
        assert (task.retries, task.retry_delay) == (count, delay)
        assert task.retry_exponential_backoff == factor


def test_a_long_delay_is_not_cut_short(tmp_path, write_manifest):
    dag = dag_of(tmp_path, write_manifest, "retries: {delay: 2h, backoff: exponential}\n")
    for task in dag.tasks:
        assert task.max_retry_delay >= task.retry_delay


def test_literal_keys_appear_nowhere(tmp_path, literal_keys):
    text, keys = literal_keys
    path = tmp_path / "manifest.yml"
    path.write_text(text)
    with pytest.warns(UserWarning, match="a key is written out") as warned:
        dags = dags_from(tmp_path)
    dag = dags["literal"]
    fields = [getattr(task, name) for task in dag.tasks for name in task.template_fields]
    places = {
        "serialised": json.dumps(DagSerialization.to_dict(dag)),
        "doc_md": dag.doc_md,
        "fields": repr(fields),
        "repr": repr([dag, *dag.tasks, vars(dag), *map(vars, dag.tasks)]),
        "warnings": " ".join(str(one.message) for one in warned),
    }
    for where, shown in places.items():
        assert not [key for key in keys if key in shown], where
    assert "some-data" in places["serialised"] and "some-data" in places["doc_md"]
    assert "access_key_id: '***'" in places["doc_md"]
    assert "⚠ manifest.yml:" in places["doc_md"]


def test_keys_that_come_during_a_parse_are_not_shown_as_code(tmp_path, literal_keys):
    text, keys = literal_keys
    path, loader = tmp_path / "a" / "manifest.yml", tmp_path / "load_manifests.py"
    path.parent.mkdir()
    path.write_text(text.replace(keys[0], "${A}").replace(keys[1], "${B}"))
    loader.write_text("# the loader")
    dag = dags_from(tmp_path)["literal"]
    dag.fileloc, dag.relative_fileloc = str(loader), loader.name  # as Airflow does
    path.write_text(text)
    assert DagCode.get_code_from_file(dag.fileloc) == "# the loader"
    assert "access_key_id: ${A}" in dag.doc_md


ODD = """\
parameters:
  epochs: {default: 4, minimum: 1, maximum: 50, description: "| [x](http://y) <b>data"}
  rate: {default: 0.5, minimum: 0}
  note: "it's `odd` | ``` here"
  kind: {default: adam, choices: [adam, "s*g*d"]}
  token: {secret: true, conn_id: hub}
schedule: {cron: "0 3 * * 0", timezone: Europe/Berlin, on_data_change: true, assets: [x`y]}
evaluation: {metric: "f1_*x*", maximum: 0.5, not_worse_than_production: true, source: script}
approval: {required: true}
"""


def test_documentation_says_how_to_train_again_and_where_models_are(tmp_path, write_manifest):
    path = write_manifest(tmp_path, more=ODD, name="digits")
    said = dag_from(load_manifest(path), path, path.read_text(), path).doc_md
    lines = said.splitlines()
    results = (tmp_path / "results").as_uri()
    for line in (
        r"| `epochs` | `4` | a whole number from 1 to 50 | \| \[x\]\(http://y\) \<b\>data |",
        "| `rate` | `0.5` | a number, at least 0 |  |",
        r"| `note` | ````it's `odd` \| ``` here```` | text |  |",
        r"| `kind` | `adam` | adam, s\*g\*d |  |",
        "| `token` |  | secret: the password of connection `hub` |  |",
        f"- data: `{(tmp_path / 'data').as_uri()}`",
        f"- which is in production: `{results}/digits/production.json`",
        f"- each model, with its lineage: `{results}/<training id>/<name>/`",
        f"ddl-airflow rollback {results}/digits",
        r"A model goes to production if f1\_\*x\*, of source script, is at most 0.5 and no worse "
        "than production, and a person approves it; else nothing is published.",
    ):
        assert line in lines, said
    assert "By itself, at `0 3 * * 0` (Europe/Berlin); when its data changes; when " in said
    assert "when ``x`y`` were updated. A run that nobody" in said
    (command,) = [line for line in lines if line.startswith("airflow dags trigger")]
    words = shlex.split(command)
    given = {"epochs": 4, "rate": 0.5, "note": "it's `odd` | ``` here"}
    assert (words[3], json.loads(words[5])) == ("digits", given)
    assert "```yaml" not in said and "framework:" not in said  # the Code tab has it


def test_documentation_has_warnings_first_and_no_empty_parts(tmp_path, write_manifest):
    path = write_manifest(tmp_path, more="parameters: {api_key: 'x'}\n")
    said = dag_from(load_manifest(path), path, path.read_text(), path).doc_md
    assert said.startswith("- ⚠ manifest.yml:") and "api_key" in said.splitlines()[0]
    plain = dag_of(tmp_path / "plain", write_manifest).doc_md
    assert plain.startswith("### Train again\n")
    assert "Only when somebody triggers it." in plain
    assert "rollback" not in plain and "production.json" not in plain
    # Where nothing else shows the manifest, as with keys and the loader.
    assert "### Manifest\n\n```yaml\nmodel_definition:" in plain


# --- a folder of manifests ------------------------------------------------------------------


def test_good_and_broken_lie_beside_each_other(tmp_path, write_manifest):
    write_manifest(tmp_path / "one", "first")
    write_manifest(tmp_path / "deep" / "two", "second")
    broken = write_manifest(tmp_path / "bad", "third")
    broken.write_text(broken.read_text().replace("command:", "comand:"))
    line = broken.read_text()[: broken.read_text().index("comand")].count("\n") + 1
    dags = dags_from(tmp_path)
    assert good_in(dags) == ["first", "second"]
    ((file, stand_in),) = broken_in(dags).items()
    assert file == "bad/manifest.yml"
    said = said_by(stand_in)
    assert f"bad/manifest.yml:{line}: model_definition.execution.comand: unknown field" in said
    assert "comand: unknown field. Did you mean command?" in said
    for name in ("first", "second"):
        DagSerialization.to_dict(dags[name])


def test_stand_in_keeps_its_file_whatever_airflow_sets(tmp_path):
    (tmp_path / "manifest.yml").write_text("model_definition: [\n")
    ((_, stand_in),) = broken_in(dags_from(tmp_path)).items()
    stand_in.relative_fileloc = "load_manifests.py"
    stand_in.fileloc = "/dags/load_manifests.py"
    assert stand_in.relative_fileloc == "manifest.yml"
    assert "manifest.yml:2" in said_by(stand_in)
    assert said_by(stand_in) == said_by(stand_in)  # again at each parse


def test_one_dag_id_in_two_files_breaks_both_and_names_the_other(tmp_path, write_manifest):
    write_manifest(tmp_path / "a", "same name")
    write_manifest(tmp_path / "b", "same-name")
    write_manifest(tmp_path / "c", "another")
    dags = dags_from(tmp_path)
    assert good_in(dags) == ["another"]
    stand_ins = broken_in(dags)
    assert sorted(stand_ins) == ["a/manifest.yml", "b/manifest.yml"]
    assert "a/manifest.yml:2: model_definition.name" in said_by(stand_ins["a/manifest.yml"])
    assert "also claimed by b/manifest.yml" in said_by(stand_ins["a/manifest.yml"])
    assert "also claimed by a/manifest.yml" in said_by(stand_ins["b/manifest.yml"])


def test_a_folder_that_becomes_a_link_while_others_are_read_gives_no_other_rights(
    tmp_path, write_manifest, monkeypatch
):
    entry = {"connections": ["vision_s3"]}
    rights = {"rights": {str(tmp_path / "vision"): entry}}
    monkeypatch.setenv("AIRFLOW__DDL__MANIFEST_RIGHTS", json.dumps(rights))
    secret = "parameters: {key: {secret: true, conn_id: vision_s3}}\n"
    for name in ("guest", "vision"):
        write_manifest(tmp_path / name, name, more=secret)

    def swapped(folder):
        yield from manifests_in(folder)
        (tmp_path / "guest").rename(tmp_path / ".before")
        (tmp_path / "guest").symlink_to("vision")

    monkeypatch.setattr("ddl_airflow.dag.manifests_in", swapped)
    dags = dags_from(tmp_path)
    assert good_in(dags) == ["vision"]
    said = said_by(broken_in(dags)["guest/manifest.yml"])
    assert "'vision_s3' is not a connection for this manifest" in said


def test_yaml_of_others_and_hidden_files_are_left_alone(tmp_path, write_manifest):
    write_manifest(tmp_path / "one", "first")
    (tmp_path / "docker-compose.yml").write_text("services: {db: {image: x}}\n")
    (tmp_path / "broken.yml").write_text("a: [\n")
    (tmp_path / "latin.yaml").write_bytes("name: Müller\n".encode("latin-1"))
    (tmp_path / "manifest.txt").write_text("model_definition: [\n")
    write_manifest(tmp_path / ".hidden", "hidden")
    write_manifest(tmp_path / "__pycache__", "cached")
    (tmp_path / ".manifest.yml").write_text("model_definition: [\n")
    (tmp_path / "dangling.yml").symlink_to(tmp_path / "nowhere")
    dags = dags_from(tmp_path)
    assert sorted(dags) == ["first"]
    assert [path.parent.name for path, _ in manifests_in(tmp_path)] == ["one"]


def test_a_manifest_may_have_another_file_name(tmp_path, write_manifest):
    path = write_manifest(tmp_path, "renamed")
    path.rename(tmp_path / "weekly training.yaml")
    assert good_in(dags_from(tmp_path)) == ["renamed"]


def test_manifest_that_is_not_utf8_is_broken_with_its_line(tmp_path, write_manifest):
    path = write_manifest(tmp_path / "bad", "Muller")
    path.write_bytes(path.read_bytes().replace(b"Muller", "Müller".encode("latin-1")))
    write_manifest(tmp_path / "good", "first")
    dags = dags_from(tmp_path)
    assert good_in(dags) == ["first"]
    assert "bad/manifest.yml:2: is not UTF-8" in said_by(broken_in(dags)["bad/manifest.yml"])


def test_manifest_with_a_byte_order_mark_is_good(tmp_path, write_manifest):
    path = write_manifest(tmp_path, "marked")
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    dags = dags_from(tmp_path)
    assert good_in(dags) == ["marked"]
    assert "airflow dags trigger marked\n" in dags["marked"].doc_md


def test_a_file_far_too_large_is_broken_and_not_read_whole(tmp_path, write_manifest):
    path = write_manifest(tmp_path, "large")
    with path.open("a") as file:
        file.write("# " + "x" * (2 * 1024 * 1024))
    dags = dags_from(tmp_path)
    assert good_in(dags) == []
    assert "larger than" in said_by(broken_in(dags)["manifest.yml"])


def test_a_file_that_cannot_be_read_leaves_the_others_alive(tmp_path, write_manifest):
    write_manifest(tmp_path / "good", "first")
    (tmp_path / "bad").mkdir()
    # Opens, and fails to be read: also for root, whom no permission stops.
    (tmp_path / "bad" / "manifest.yml").symlink_to("/proc/self/mem")
    dags = dags_from(tmp_path)
    assert good_in(dags) == ["first"]
    assert "bad/manifest.yml: cannot be read" in said_by(broken_in(dags)["bad/manifest.yml"])


def test_manifests_behind_links_count_once(tmp_path, write_manifest):
    elsewhere = tmp_path / "elsewhere"
    write_manifest(elsewhere, "linked")
    folder = tmp_path / "dags"
    write_manifest(folder / "one", "first")
    (folder / "shared").symlink_to(elsewhere)
    dags = dags_from(folder)
    assert sorted(dags) == ["first", "linked"]


def test_a_link_to_a_folder_above_is_followed_once(tmp_path, write_manifest):
    write_manifest(tmp_path / "one", "first")
    (tmp_path / "one" / "up").symlink_to(tmp_path)
    assert sorted(dags_from(tmp_path)) == ["first"]


def test_whatever_a_manifest_says_nothing_is_raised(tmp_path, write_manifest, literal_keys):
    write_manifest(tmp_path / "good", "first")
    text, _ = literal_keys
    odd = text.replace("{bucket: some-models}", "{bucket: some-models, prefix: " + "p" * 1600 + "}")
    assert odd != text
    (tmp_path / "odd.manifest.yml").write_text(
        odd.replace("AKIDLITERALKEYOFTEST", "${A}").replace("literalSecretOfTest77", "${B}")
    )
    dags = dags_from(tmp_path)
    assert "first" in dags
    assert len(dags) == 2


def test_empty_folder_has_no_dags(tmp_path):
    assert dags_from(tmp_path) == {}


# --- a task's process -----------------------------------------------------------------------


def test_a_tasks_process_builds_its_dag_alone(tmp_path, write_manifest, monkeypatch):
    for name in ("first", "second"):
        write_manifest(tmp_path / name, name)
    (tmp_path / "manifest.yml").write_text("model_definition: [\n")
    for name in ("twice-a", "twice-b"):
        write_manifest(tmp_path / name, "twice")
    monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_DAG_ID", "second")
    monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_TASK_ID", "train")
    assert sorted(dags_from(tmp_path)) == ["second"]


# --- parsing is light -----------------------------------------------------------------------


def test_parsing_imports_no_tensorflow_starts_no_process_and_asks_nobody(tmp_path):
    """The example folder, in a process of its own where the network and processes are forbidden."""
    folder = tmp_path / "dags"
    shutil.copytree(ROOT / "dags", folder, ignore=shutil.ignore_patterns("__pycache__"))
    code = """
import runpy, sys
import ddl_airflow.dag

def forbid(event, args):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", "socket.connect",
                 "socket.getaddrinfo"):
        raise RuntimeError(f"{event} while a manifest is parsed: {args}")

sys.addaudithook(forbid)
found = runpy.run_path(sys.argv[1])
print(sorted(name for name, value in found.items() if type(value).__name__ == "ManifestDag"))
heavy = ("tensorflow", "keras", "mpi4py", "ddl_ops", "moto", "boto3", "botocore", "awscrt",
         "ddl_airflow.launchers.local", "ddl_airflow.launchers.mpirun", "openlineage",
         "ddl_airflow.operators.openlineage")
print([m for m in heavy if m in sys.modules])
"""
    argv = [sys.executable, "-c", code, str(folder / "load_manifests.py")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['cray-dl-comm', 'ffdl-digits', 'horovod-keras', 'mnist-keras', 'mnist-tf1', "
        "'mpi-collectives', 'parameter-server']",
        "[]",
    ]


# --- what is read once for all manifests of a parse -----------------------------------------------


def test_settings_are_read_once_for_all_manifests_and_at_each_parse(
    tmp_path, write_manifest, monkeypatch
):
    for name in ("a", "b", "c"):
        write_manifest(tmp_path / name, name=name)
    asked = Counter()
    real = AirflowConfigParser.get

    def get(self, section, key, *args, **kwargs):
        asked[section, key] += 1
        return real(self, section, key, *args, **kwargs)

    monkeypatch.setattr(AirflowConfigParser, "get", get)
    assert good_in(dags_from(tmp_path)) == ["a", "b", "c"]
    assert asked["ddl", "compute"] == asked["ddl", "manifest_rights"] == 1
    # A change of them is seen by the next parse.
    table = {"compute": {"cpu": {"slots": 5}}}
    monkeypatch.setenv("AIRFLOW__DDL__COMPUTE", json.dumps(table))
    monkeypatch.setenv("AIRFLOW__CORE__MAX_ACTIVE_TASKS_PER_DAG", "7")
    for dag in dags_from(tmp_path).values():
        assert dag.get_task("train").slots == 5
        assert dag.max_active_tasks == 7


def test_stubs_that_one_bag_collects_read_settings_once(tmp_path, write_manifest, monkeypatch):
    """The DAG processor collects one in each process; `airflow dags reserialize` all in one."""
    for name in ("a", "b", "c", "d"):
        write_manifest(tmp_path / "manifests" / name, name=name)
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH", str(tmp_path / "bundles"))
    bundle = ManifestBundle(name="of-this-test", path=str(tmp_path / "manifests"))
    bundle.initialize()
    asked = Counter()
    real = AirflowConfigParser.get

    def get(self, section, key, *args, **kwargs):
        asked[section, key] += 1
        return real(self, section, key, *args, **kwargs)

    monkeypatch.setattr(AirflowConfigParser, "get", get)

    def collected() -> dict[str, DAG]:
        found = BundleDagBag(bundle.path, bundle_path=bundle.path, bundle_name=bundle.name)
        assert found.import_errors == {}
        return found.dags

    assert sorted(collected()) == ["a", "b", "c", "d"]
    assert asked["ddl", "compute"] == asked["ddl", "manifest_rights"] == 2  # by the first two
    monkeypatch.setenv("AIRFLOW__DDL__COMPUTE", json.dumps({"compute": {"cpu": {"slots": 5}}}))
    monkeypatch.setenv("AIRFLOW__CORE__MAX_ACTIVE_TASKS_PER_DAG", "7")
    for dag in collected().values():
        assert (dag.get_task("train").slots, dag.max_active_tasks) == (5, 7)


def test_dags_of_a_folder_are_those_of_their_manifests_alone(tmp_path, write_manifest):
    """What a DAG looks up of Airflow's settings is looked up once for a folder's."""
    paths = [write_manifest(tmp_path / name, name=name) for name in ("a", "b")]
    for path, dag in zip(paths, dags_from(tmp_path).values(), strict=True):
        alone = dag_from(load_manifest(path), path, path.read_text())
        dag.also_claimed_by = None
        dag.fileloc = alone.fileloc
        assert stored(dag) == stored(alone)
        ours, its = vars(dag).copy(), vars(alone).copy()
        for one in (ours, its):
            for name in ("task_dict", "task_group", "also_claimed_by", "params"):
                one.pop(name, None)
            one["timetable"] = type(one["timetable"])
        assert ours == its and [*map(type, ours.values())] == [*map(type, its.values())]
