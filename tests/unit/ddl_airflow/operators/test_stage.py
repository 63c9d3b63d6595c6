from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.providers.standard.operators.python import BranchPythonOperator
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from moto.server import ThreadedMotoServer

from ddl_airflow.core.errors import StagingError
from ddl_airflow.core.job import StartedJob
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.manifest.sections.places import Connection
from ddl_airflow.core.plan import (
    ApproveStep,
    EvaluateStep,
    StageDataStep,
    StoreReference,
    TrainStep,
    TransformStep,
    UploadResultsStep,
    plan,
)
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    point,
    read_pointer,
    reject,
    rollback,
)
from ddl_airflow.lineage.record import fix_run, fixed_run, read_part, write_part
from ddl_airflow.operators.approve import ApproveOperator
from ddl_airflow.operators.evaluate import EvaluateOperator
from ddl_airflow.operators.stage import StageDataOperator
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.operators.transform import TransformOperator
from ddl_airflow.operators.upload import UploadResultsOperator
from ddl_airflow.site import training_of
from ddl_airflow.steps.stage import longest_listed
from ddl_airflow.storage.download import Check
from ddl_airflow.storage.filesystem import FolderStore, alone_in
from ddl_airflow.storage.publication import publish
from ddl_airflow.storage.s3_client import s3_client
from tests.integration.faulty_proxy import FaultyProxy
from tests.schemas import check_lineage_schema


def published_to(task, folder):
    """The task, with results in the folder and a manifest of that digest."""
    step = replace(task.step, results=StoreReference(folder.as_uri()), manifest={"digest": "m1"})
    task.step, task.manifest = step, step.manifest
    return task


@pytest.fixture
def stage(tmp_path):
    """stage(commands) -> the operator, over a folder of three files and one script."""
    data, code = tmp_path / "input", tmp_path / "scripts"
    (data / "sub").mkdir(parents=True)
    for index, name in enumerate(("a.bin", "b.bin", "sub/c.bin"), start=1):
        (data / name).write_bytes(bytes(range(index)) * 100)
    code.mkdir()
    (code / "train.py").write_text("print(1)\n")

    def make(
        *commands: str,
        uri: str = data.as_uri(),
        settings: list[str] | None = None,
        evaluation: str = "",
    ) -> StageDataOperator:
        with DAG("staging", schedule=None):
            return StageDataOperator(
                task_id="stage_data",
                settings=settings,
                step=StageDataStep(
                    dataset=StoreReference(uri),
                    code=code,
                    commands=list(commands) or ["python train.py"],
                    evaluation=evaluation,
                ),
            )

    return make


@pytest.mark.parametrize(
    ("data", "results", "selection", "said"),
    [
        ("digits", "digits", {}, "digits is among the data"),
        ("", "models", {}, "models is among the data"),
        ("", "models", {"exclude": ["/models/"]}, ""),
        ("", "", {"include": ["/sub/"]}, ""),
        ("staging", "", {}, "staging/latest.json is among the data"),
        ("staging", "", {"exclude": ["*.json", "*.conditions"]}, ""),
        ("digits", "digits-of-others", {}, ""),
        ("digits/raw", "digits", {}, ""),
    ],
)
def test_results_among_the_data_are_refused_whatever_opens_them(
    stage, layout, tmp_path, context_of, data, results, selection, said
):
    """By two names or connections: each publication would be new data, to be trained on."""
    (tmp_path / "ml" / data / "sub").mkdir(parents=True)
    (tmp_path / "ml" / data / "sub" / "a").write_text("1")
    (tmp_path / "link").symlink_to("ml")
    task = stage(uri=(tmp_path / "link" / data).as_uri())
    task.step = replace(task.step, **selection)
    for name, patterns in selection.items():
        setattr(task, name, patterns)
    published_to(task, tmp_path / "ml" / results)
    if not said:
        task.execute(context_of("staging"))
        return
    with pytest.raises(AirflowFailException, match=f"training_results_reference: .*{said}"):
        task.execute(context_of("staging"))
    assert not layout.staged.exists()


@pytest.fixture
def layout(workspace, context_of):
    run = context_of("staging")["dag_run"]
    return RunLayout(workspace, "staging", training_of("staging", run.run_id))


def test_more_objects_than_a_record_can_list_are_refused_before_they_are_fetched(
    stage, layout, tmp_path, context_of, monkeypatch
):
    """Else the whole training would come before it."""
    for number in range(50):
        (tmp_path / "input" / f"{number}.bin").write_bytes(b"x")
    monkeypatch.setattr("ddl_airflow.lineage.record.MOST_BYTES", 2_000)
    said = r"53 objects.* larger than 1,875 bytes.*[Pp]ack the data into archives"
    with pytest.raises(AirflowFailException, match=said):
        stage().execute(context_of("staging"))
    assert not layout.cache.exists() and not layout.staged.exists()
    assert not (layout.kept / "lineage" / "stage_data.json").exists()


@pytest.mark.parametrize("more", [{}, {"prove": True}, {"unpack": True}], ids=str)
def test_objects_are_counted_with_the_digests_that_a_record_will_have_of_them(
    stage, layout, tmp_path, context_of, monkeypatch, more
):
    """Else what is too long is refused when all of it has been fetched."""
    for number in range(50):
        (tmp_path / "input" / f"{number}.{'zip' if 'unpack' in more else 'bin'}").write_bytes(b"x")
    monkeypatch.setattr("ddl_airflow.lineage.record.MOST_BYTES", 10_000)
    task = stage()
    task.step = replace(task.step, **more)
    for name, value in more.items():
        setattr(task, name, value)
    if not more:  # of a folder nothing else is found out
        task.execute(context_of("staging"))
        return
    with pytest.raises(AirflowFailException, match="53 objects.* larger than 9,375 bytes"):
        task.execute(context_of("staging"))
    assert not layout.cache.exists() and not layout.staged.exists()


@pytest.mark.parametrize("prove", [True, False])
def test_no_object_of_a_bucket_is_listed_longer_than_it_is_counted(prove):
    """As ``Check.proved`` has it, with or without the digest of what lies there."""
    check = Check("md5-of-parts", part_size=5 * 2**40)
    found = [check.proved(name) for name in ("md5", "md5-of-parts")]
    found += [replace(check, expected="f" * 64).proved("sha256")]
    found += [replace(check, expected="f" * 16).proved("crc64nvme")]
    (counted,) = longest_listed([{"key": "a"}], in_folder=False, prove=prove, unpack=False)
    for one in found:
        listed = {"key": "a"} | one | ({"sha256": "f" * 64} if prove else {})
        assert len(json.dumps(listed, indent=2)) <= len(json.dumps(counted, indent=2))


@pytest.mark.parametrize(
    ("settings", "run", "ranks"),
    [
        ({"nodes": 2}, {}, 2),
        ({"nodes": 2}, {"nodes": 1}, 0),
        ({"nodes": 1, "slots": 4}, {}, 4),
        ({"nodes": 2, "distribution": "independent"}, {}, 0),
    ],
)
def test_ranks_that_will_train_apart_are_warned_of(stage, context_of, capsys, settings, run, ranks):
    task = stage()
    task >> TrainOperator(
        task_id="train", dag=task.dag, step=TrainStep(command="python train.py", **settings)
    )
    task.execute(context_of("staging", **run))
    said = f"the {ranks} ranks will train apart, each a model of its own, and train will fail"
    assert (said in capsys.readouterr().out) is bool(ranks)


def test_data_and_code_are_where_ranks_find_them(stage, layout, context_of):
    context = context_of("staging")
    result = stage().execute(context)
    assert result["files"] == 3
    assert result["bytes"] == 600
    assert (layout.staged / "sub" / "c.bin").read_bytes() == bytes(range(3)) * 100
    assert (layout.code / "train.py").read_text() == "print(1)\n"
    part = json.loads((layout.kept / "lineage" / "stage_data.json").read_text())
    assert part["dataset"]["fingerprint"] == result["fingerprint"]
    assert [o["key"] for o in part["dataset"]["listing"]] == ["a.bin", "b.bin", "sub/c.bin"]
    assert part["code"]["digest"] == result["code"]
    assert part["tries"] == {"stage_data": 1}
    assert context["outlet_events"] == {}  # it reads the data
    assert "resolved_uri" not in part["dataset"]


def test_a_run_of_an_event_before_the_schedules_start_is_skipped(stage, context_of):
    task, context = stage(), context_of("staging")
    run = context["dag_run"]
    task.step = replace(task.step, not_before="2026-11-20T22:00:00+01:00")
    task.not_before = task.step.not_before
    run.run_type.value, run.logical_date = "asset_triggered", None
    with pytest.raises(AirflowSkipException, match="Nothing is due before 2026-11-20T22:00:00"):
        task.execute(context)
    run.run_after += timedelta(minutes=45)
    assert task.execute(context)["files"] == 3
    run.run_after -= timedelta(minutes=45)
    run.run_type.value = "manual"
    assert task.execute(context)["files"] == 3


def test_where_a_link_led_is_recorded(stage, layout, context_of, tmp_path):
    (tmp_path / "current").symlink_to(tmp_path / "input")
    stage(uri=(tmp_path / "current").as_uri()).execute(context_of("staging"))
    part = json.loads((layout.kept / "lineage" / "stage_data.json").read_text())
    assert part["dataset"]["uri"] == (tmp_path / "current").as_uri()
    assert part["dataset"]["resolved_uri"] == (tmp_path / "input").as_uri()


def test_a_setting_that_the_form_does_not_have_fails_before_anything_is_done(
    stage, layout, context_of
):
    context = context_of("staging", epochs=3)
    context["dag_run"].conf = {"epoch": 7}
    with pytest.raises(AirflowFailException, match="'epoch' is not known. Did you mean epochs?"):
        stage(settings=["epochs", "nodes"]).execute(context)
    left = {path for path in layout.root.rglob("*") if path.is_file()}
    assert left == {layout.failure, layout.kept / "record.json"}
    context["dag_run"].conf = {"epochs": 7}
    assert stage(settings=["epochs", "nodes"]).execute(context)["files"] == 3


def test_a_run_that_nobody_triggered_does_nothing_twice(stage, layout, context_of, tmp_path):
    task = published_to(stage(), tmp_path / "out")
    results = FolderStore(tmp_path / "out")
    context = context_of("staging", epochs=3)
    context["dag_run"].run_type.value = "asset_triggered"
    said = task.execute(context)  # nothing was published yet
    made_of = {
        "dataset": said["fingerprint"],
        "code": said["code"],
        "manifest": "m1",
        "parameters": {"epochs": 3},
    }
    (tmp_path / "model").write_text("m")
    done = publish({"model": tmp_path / "model"}, results, "staging-1")
    point(results, "staging", LATEST, f"staging-1/{done.name}", {}, made_of=made_of)
    with pytest.raises(AirflowSkipException, match="are those of staging-1: there is nothing new"):
        task.execute(context)
    # Cleared: a person wants it all the same.
    context["ti"].max_tries = context["ti"].try_number + task.retries
    assert task.execute(context) == said
    context["ti"].max_tries = task.retries
    task.commands = ["python train.py --until {{ ds }}"]
    assert task.execute(context) == said
    task.commands = ["python train.py"]
    task.evaluation = "python train.py --until {{ ds }}"
    assert task.execute(context) == said
    task.evaluation = ""
    for by_a_person in ("manual", "backfill", "asset_materialization"):
        context["dag_run"].run_type.value = by_a_person
        assert task.execute(context) == said
    context["dag_run"].run_type.value = "scheduled"
    for name, value in (("parameters", {}), ("manifest", "m2"), ("code", "c"), ("dataset", "d")):
        point(results, "staging", LATEST, f"by {name}", {}, made_of={**made_of, name: value})
        assert task.execute(context) == said, name
    # What was published is not there any more: it is worth training.
    (tmp_path / "model").write_text("another")
    done = publish({"model": tmp_path / "model"}, results, "staging-2")
    point(results, "staging", LATEST, f"staging-2/{done.name}", {}, made_of=made_of)
    with pytest.raises(AirflowSkipException, match="are those of staging-2"):
        task.execute(context)
    results.delete([f"staging-2/{done.name}/model"])
    assert task.execute(context) == said


def test_what_an_earlier_version_of_ours_published_is_not_trained_again(
    scheduled, layout, tmp_path
):
    """An upgrade makes another digest of the same manifest: pointers and runs have the old one."""
    task, context, said = scheduled
    path = Path(__file__).parents[3] / "fixtures" / "manifests" / "valid" / "folders.yml"
    task.manifest = plan(load_manifest(path), path).stage_data.manifest
    of_old = "faa1144b46e7e167e1f8354f9f2f8856573ee874eff9871d19a51921d1840359"
    assert task.manifest["digest"] != of_old
    made_of = {"dataset": said["fingerprint"], "code": said["code"], "parameters": {}}
    # Ranks had trained when this came in; then stage_data was cleared alone.
    fix_run(layout, context["dag_run"].run_id, {**made_of, "manifest": of_old}, {})
    write_part(layout, "train", {"tries": {}})
    assert task.execute(context) == said
    assert read_part(layout, "train") == {"tries": {}}
    task.manifest = task.manifest | {"earlier_digests": []}
    assert task.execute(context) == said
    with pytest.raises(StagingError, match="train worked with another manifest"):
        read_part(layout, "train")
    results = FolderStore(tmp_path / "out")
    (tmp_path / "model").write_text("m")
    done = publish({"model": tmp_path / "model"}, results, "staging-1")
    place = f"staging-1/{done.name}"
    point(results, "staging", LATEST, place, {}, made_of={**made_of, "manifest": of_old})
    assert task.execute(context) == said
    task.manifest = task.manifest | {"earlier_digests": [of_old]}
    with pytest.raises(AirflowSkipException, match="are those of staging-1: there is nothing new"):
        task.execute(context)
    reject(results, "staging", "staging-0", {**made_of, "manifest": of_old}, "by the boss")
    point(results, "staging", LATEST, "staging-2/x", {}, made_of={**made_of, "dataset": "d"})
    with pytest.raises(AirflowSkipException, match="rejected: staging-0, by the boss"):
        task.execute(context)
    task.manifest = task.manifest | {"earlier_digests": []}
    assert task.execute(context) == said


@pytest.mark.parametrize(
    ("of_the_model", "of_the_run", "new"),
    [
        ({"attempts": 1, "dry_run": False}, {"attempts": 3}, False),
        ({"experiment_id": None}, {}, False),
        ({"experiment_id": "wide"}, {"experiment_id": None}, True),
        ({"epochs": 3, "attempts": 1}, {"epochs": 4, "attempts": 1}, True),
        # What the form leaves out is as the manifest has it.
        ({"nodes": 2, "launcher": "local", "checkpoint": "latest"}, {}, False),
        ({}, {"nodes": 2, "launcher": "local", "checkpoint": "latest"}, False),
        ({"nodes": 1}, {"nodes": 2}, True),
        ({"launcher": "slurm"}, {}, True),
        ({"checkpoint": "100"}, {}, True),
    ],
)
def test_settings_of_which_no_model_comes_are_nothing_new(
    stage, layout, context_of, tmp_path, of_the_model, of_the_run, new
):
    task = published_to(stage(), tmp_path / "out")
    train = TrainOperator(
        task_id="train", dag=task.dag, step=TrainStep(command="python train.py", nodes=2)
    )
    task >> train >> TransformOperator(task_id="transform", dag=task.dag, step=TransformStep())
    context = context_of("staging", **of_the_run)
    context["dag_run"].run_type.value = "scheduled"
    said = task.execute(context)
    made_of = {"dataset": said["fingerprint"], "code": said["code"], "manifest": "m1"}
    made_of |= {"parameters": of_the_model}
    results = FolderStore(tmp_path / "out")

    def check(why: str) -> None:
        if new:
            assert task.execute(context) == said
        else:
            with pytest.raises(AirflowSkipException, match=f"are those of {why}"):
                task.execute(context)

    reject(results, "staging", "staging-0", made_of, "by the boss")
    check("a model that was rejected: staging-0, by the boss")
    (tmp_path / "model").write_text("m")
    done = publish({"model": tmp_path / "model"}, results, "staging-1")
    point(results, "staging", LATEST, f"staging-1/{done.name}", {}, made_of=made_of)
    check("staging-1")
    assert read_pointer(results, "staging", LATEST)["made_of"] == made_of


@pytest.fixture
def scheduled(stage, workspace, context_of, tmp_path):
    """A task that a schedule has run once, its context, and what it answered."""
    task = published_to(stage(), tmp_path / "out")
    context = context_of("staging")
    context["dag_run"].run_type.value = "scheduled"
    return task, context, task.execute(context)


@pytest.fixture
def overtaken(scheduled, tmp_path):
    """overtaken(**settings of upload_results) -> task, context, results.

    Tuesday's model is in production. Then Monday's run, which had failed, was cleared and trained
    on the data of today: that is published, and its run was due too early for production.
    """
    task, context, said = scheduled
    results = FolderStore(tmp_path / "out")
    made_of = {"dataset": said["fingerprint"], "code": said["code"], "manifest": "m1"}
    made_of |= {"parameters": {}}
    places = {}
    for day in ("tuesday", "monday"):
        (tmp_path / "model").write_text(day)
        done = publish({"lineage.json": tmp_path / "model"}, results, f"staging-{day}")
        places[day] = f"staging-{day}/{done.name}"
    due = context["dag_run"].logical_date - timedelta(days=1)
    point(results, "staging", PRODUCTION, places["tuesday"], {"f1": 0.75}, due=due)
    metrics, earlier = {"f1": 0.5}, due - timedelta(days=1)
    point(results, "staging", PRODUCTION, places["monday"], metrics, due=earlier)
    point(results, "staging", LATEST, places["monday"], metrics, made_of=made_of)

    def make(**settings):
        task >> UploadResultsOperator(
            task_id="upload_results",
            dag=task.dag,
            step=UploadResultsStep(results=task.step.results, manifest=task.manifest, **settings),
        )
        return task, context, results

    return make


def production_of(results):
    return read_pointer(results, "staging", PRODUCTION)["training_id"]


def test_what_was_due_too_early_for_production_is_put_there_by_the_next_run(overtaken):
    task, context, results = overtaken(promote=True)
    assert production_of(results) == "staging-tuesday"
    with pytest.raises(AirflowSkipException, match="those of staging-monday: there is nothing new"):
        task.execute(context)
    pointer = read_pointer(results, "staging", PRODUCTION)
    assert pointer["training_id"] == "staging-monday" and pointer["metrics"] == {"f1": 0.5}
    assert pointer["due"] == context["dag_run"].logical_date.isoformat()
    assert pointer["history"][0]["by"] == f"a tester, run {context['dag_run'].run_id}"
    # A person thinks otherwise, and that holds for the runs to come.
    assert rollback(results, "staging")["training_id"] == "staging-tuesday"
    context["dag_run"].logical_date += timedelta(days=1)
    with pytest.raises(AirflowSkipException):
        task.execute(context)
    assert production_of(results) == "staging-tuesday"


def test_what_is_worse_or_not_for_production_stays_out_of_it(overtaken, capsys):
    task, context, results = overtaken(promote=True, not_worse_in="f1")
    with pytest.raises(AirflowSkipException, match="nothing new"):
        task.execute(context)
    assert production_of(results) == "staging-tuesday"
    assert "f1 is 0.5, 0.25 worse than the 0.75" in capsys.readouterr().out
    (upload,) = task.downstream_list
    upload.promote, upload.not_worse_in = False, ""
    with pytest.raises(AirflowSkipException, match="nothing new"):
        task.execute(context)
    assert production_of(results) == "staging-tuesday"


def test_what_was_rejected_is_not_trained_again_by_a_schedule(scheduled, layout):
    task, context, said = scheduled
    measured = [{"metric": "f1", "value": 0.25, "source": "script"}]
    result = {"metrics": {"f1": 0.25}, "measurements": measured}
    write_part(layout, "train", {"result": result, "tries": {}})
    write_part(layout, "transform", {"result": {}, "tries": {}})
    with DAG("staging", schedule=None):
        gate = EvaluateOperator(
            task_id="evaluate",
            step=EvaluateStep(results=task.step.results, metric="f1", minimum=0.5),
        )
    with pytest.raises(AirflowFailException, match="0.25 below the minimum"):
        gate.execute(context)
    with pytest.raises(AirflowSkipException, match="that was rejected: staging-.*f1 is 0.25, 0.25"):
        task.execute(context)
    context["dag_run"].run_type.value = "manual"
    assert task.execute(context) == said
    # Other bounds are another manifest.
    context["dag_run"].run_type.value, task.manifest = "scheduled", {"digest": "m2"}
    assert task.execute(context) == said
    # Now a person.
    with DAG("staging", schedule=None):
        approve = ApproveOperator(
            task_id="approve", subject="?", step=ApproveStep(results=task.step.results)
        )
    context["ti"], context["task"] = (
        SimpleNamespace(map_index=-1, try_number=1, max_tries=0),
        approve,
    )
    answer = {"params_input": {}, "responded_at": datetime.now(UTC), "timedout": False}
    answer["responded_by_user"] = {"id": "1", "name": "the boss"}
    for option in ("Approve", "Reject"):
        task.execute(context)
        approve.execute_complete(context, answer | {"chosen_options": [option]})
    with pytest.raises(AirflowSkipException, match="staging-.*, the boss rejected it"):
        task.execute(context)


def test_who_does_not_answer_in_time_has_rejected(scheduled):
    """What Airflow's scheduler sends then: the answer that was chosen, of no user."""
    task, context, said = scheduled
    answer = {"params_input": {}, "responded_at": datetime.now(UTC), "timedout": True}
    for then in ("approve", "reject"):
        with DAG("staging", schedule=None):
            approve = ApproveOperator(
                task_id="approve",
                subject="?",
                step=ApproveStep(results=task.step.results, timeout_s=7 * 86400.0, then=then),
            )
        assert approve.response_timeout == timedelta(days=7)
        context["task"] = approve
        assert task.execute(context) == said  # not rejected so far
        event = answer | {"chosen_options": approve.defaults, "responded_by_user": None}
        approve.execute_complete(context, event)
    with pytest.raises(AirflowSkipException, match="staging-.*, nobody answered within 7 days"):
        task.execute(context)


def test_staging_again_gives_the_same_and_changed_code_another_digest(
    stage, layout, context_of, tmp_path
):
    first = stage().execute(context_of("staging", 1))
    again = stage().execute(context_of("staging", 2))
    assert first == again
    (tmp_path / "scripts" / "train.py").write_text("print(2)\n")
    changed = stage().execute(context_of("staging", 3))
    assert changed["fingerprint"] == first["fingerprint"]
    assert changed["code"] != first["code"]
    assert (layout.code / "train.py").read_text() == "print(2)\n"


@pytest.mark.parametrize("commands", [["python trian.py"], ["python train.py", "python expor.py"]])
def test_missing_script_fails_before_any_data_moves(stage, layout, context_of, commands):
    with pytest.raises(AirflowFailException, match="CommandInvalid"):
        stage(*commands).execute(context_of("staging"))
    assert not layout.staged.exists()
    assert not layout.cache.exists()


def test_what_the_evaluation_lacks_is_said_of_its_own_field(stage, layout, context_of):
    with pytest.raises(AirflowFailException, match=r"\bevaluation\.command: 'python trani\.py'"):
        stage(evaluation="python trani.py").execute(context_of("staging"))
    assert not layout.cache.exists()


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_data_that_is_not_there_fails_at_once(stage, layout, context_of, tmp_path, folder):
    (tmp_path / "empty").mkdir()
    uri = (tmp_path / folder).as_uri()
    with pytest.raises(AirflowFailException, match=f"SourceMissing: .*{folder}"):
        stage(uri=uri).execute(context_of("staging"))
    assert not layout.staged.exists()


@pytest.fixture(scope="module")
def bucket():
    """Keys of a service that has one bucket, results; and what it was asked for."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = s3_client(f"http://{host}:{port}", "key", "secret", "us-east-1")
    client.create_bucket(Bucket="results")
    client.close()
    with FaultyProxy(f"http://{host}:{port}", {}) as proxy:
        keys = {"access_key_id": "key", "secret_access_key": "secret", "region_name": "us-east-1"}
        yield Connection(endpoint_url=proxy.endpoint_url, **keys), proxy
    server.stop()


def test_a_bucket_of_results_that_is_not_there_is_found_before_anything_is_trained(
    stage, layout, context_of, bucket
):
    """Also by a run that a person triggers, which looks for no earlier training."""
    task, (connection, proxy) = stage(), bucket
    task.step = replace(task.step, results=StoreReference("s3://reslts/digits", connection))
    with pytest.raises(
        AirflowFailException,
        match="SourceMissing: training_results_reference: s3://reslts/digits.*no such bucket",
    ):
        task.execute(context_of("staging"))
    assert not layout.staged.exists()
    asked = len(proxy.asked)
    task.step = replace(task.step, results=StoreReference("s3://results/digits", connection))
    task.execute(context_of("staging"))
    assert len(proxy.asked) == asked + 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"secrets": {"token": "hub"}}, "parameters.token: .*connection 'hub'"),
        (
            {"launcher": "ssh", "scheduler": {"connection": "gpus"}},
            "launcher.connection: Airflow has no connection 'gpus'",
        ),
        (
            {"launcher": "kubernetes", "scheduler": {"image": "i", "connection": "of_mail"}},
            "launcher.connection: connection 'of_mail' is of type 'smtp', wanted kubernetes",
        ),
        (
            {"results": StoreReference("s3://results/a", Connection(conn_id="saved"))},
            "training_results_reference.connection: .*no connection 'saved'",
        ),
        ({"dataset": StoreReference("s3://results/a", Connection(conn_id="of_data"))}, "streamed"),
    ],
)
def test_a_connection_that_a_later_step_lacks_is_said_before_any_data_moves(
    stage, layout, context_of, monkeypatch, asked, said
):
    """It was said by train, an hour of staging later."""
    monkeypatch.setenv("AIRFLOW_CONN_OF_MAIL", '{"conn_type": "smtp"}')
    if said == "streamed":
        said = "training_data_reference.connection: .*no connection 'of_data'"
    task = stage()
    with task.dag:
        task >> TrainOperator(task_id="train", step=TrainStep(command="python train.py", **asked))
    with pytest.raises(AirflowException, match=f"ConnectionInvalid: {said}"):
        task.execute(context_of("staging"))
    assert not layout.staged.exists()
    with pytest.raises(AirflowException, match=f"ConnectionInvalid: {said}"):
        task.execute(context_of("staging", dry_run=True))


@pytest.mark.parametrize("elsewhere", ["another queue", "one way of a branch"])
def test_what_a_step_may_find_elsewhere_or_not_need_is_only_warned_of(
    stage, layout, context_of, capsys, elsewhere
):
    task = stage()
    with task.dag:
        queue = "gpus" if elsewhere == "another queue" else task.queue
        asked = TrainStep(command="python train.py", secrets={"token": "hub"})
        train = TrainOperator(task_id="train", step=asked, queue=queue)
        if elsewhere == "another queue":
            task >> train
        else:
            chosen = BranchPythonOperator(task_id="chosen", python_callable=lambda: "train")
            task >> chosen >> train
    task.execute(context_of("staging"))
    assert layout.staged.exists()
    said = "train may fail, if it runs and finds no more than this task: parameters.token"
    assert said in capsys.readouterr().out


def test_a_run_by_another_launcher_needs_no_connection_of_the_manifests(stage, layout, context_of):
    task = stage()
    scheduler = {"connection": "gpus"}
    step = TrainStep(command="python train.py", launcher="ssh", scheduler=scheduler)
    with task.dag:
        task >> TrainOperator(task_id="train", step=step)
    task.execute(context_of("staging", launcher="local"))
    assert layout.staged.exists()


def test_a_place_of_results_that_only_the_upload_names_is_looked_at_before_any_data_moves(
    stage, layout, context_of, bucket
):
    """The operators of a Python DAG have one each."""
    task, (connection, _) = stage(), bucket
    with task.dag:
        results = StoreReference("s3://reslts/digits", connection)
        task >> UploadResultsOperator(task_id="upload", step=UploadResultsStep(results=results))
    said = "SourceMissing: training_results_reference: s3://reslts/digits.*no such bucket"
    with pytest.raises(AirflowFailException, match=said):
        task.execute(context_of("staging"))
    assert not layout.staged.exists()


def test_what_an_etag_was_found_to_be_is_in_the_lineage(stage, layout, context_of, bucket):
    task, (connection, proxy) = stage(), bucket
    client = s3_client(proxy.endpoint_url, "key", "secret", "us-east-1")
    client.put_object(Bucket="results", Key="data/a", Body=b"1")
    client.close()
    task.step = replace(task.step, dataset=StoreReference("s3://results/data", connection))
    task.execute(context_of("staging"))
    dataset = read_part(layout, "stage_data")["dataset"]
    (file,) = dataset["listing"]
    assert file == {"key": "a", "size": 1, "etag": file["etag"], "etag_is": "md5"}
    file["part_size"] = 5 << 20  # as of one that came in parts
    file["crc64nvme"], file["crc32"] = "0" * 16, "f" * 8  # as of those of which the store has it
    check_lineage_schema(dataset, "dataset")


def test_operator_shows_the_place_and_never_the_keys(tmp_path):
    connection = Connection(
        endpoint_url="http://127.0.0.1:9",
        access_key_id="AKIDSTAGETEST",
        secret_access_key="stageSecretOfTest",
    )
    with DAG("masked", schedule=None):
        task = StageDataOperator(
            task_id="stage_data",
            step=StageDataStep(
                dataset=StoreReference("s3://some-bucket/a", connection), code=tmp_path, commands=[]
            ),
        )
    assert task.dataset["uri"] == "s3://some-bucket/a"
    shown = " ".join([repr(task), *(repr(getattr(task, n)) for n in task.template_fields)])
    shown += repr(vars(task))
    assert "AKIDSTAGETEST" not in shown and "stageSecretOfTest" not in shown


@pytest.mark.parametrize("experiment", ["", "wide"])
def test_what_ranks_work_with_is_not_replaced_under_them(
    stage, layout, context_of, monkeypatch, experiment
):
    """As when somebody clears stage_data alone while train runs."""
    monkeypatch.setattr("ddl_airflow.steps.stage._ENDS_S", 0.2)
    monkeypatch.setattr("ddl_airflow.steps.stage._LOOK_S", 0.05)
    params = {"experiment_id": experiment} if experiment else {}
    layout = replace(layout, experiment_id=experiment)
    task = stage()
    task.execute(context_of("staging", **params))
    (layout.code / "of the ranks").touch()
    Path(task.code, "train.py").write_text("print(2)\n")
    context = context_of("staging", 2, 1, **params)
    of_this_run = alone_in(layout.experiment, f"{layout.training_id}/train-1")
    refused = pytest.raises(AirflowException, match="train-1 on .* works with what is staged in")
    with of_this_run, refused:
        task.execute(context)
    assert (layout.code / "of the ranks").exists()
    with alone_in(layout.experiment, "another-1a2b/train-1"):
        if experiment:  # another training of the experiment has its own folders
            task.execute(context)
    task.execute(context)
    assert (layout.code / "train.py").read_text() == "print(2)\n"


def test_what_a_scheduler_will_start_keeps_what_it_was_submitted_with(
    stage, layout, context_of, monkeypatch, cluster, job
):
    monkeypatch.setattr("ddl_airflow.steps.stage._ENDS_S", 0.2)
    task = stage()
    task.execute(context_of("staging"))
    started = StartedJob(cluster.submit(cluster.render(job().spec)), time.time(), {}, None)
    layout.scheduled_job.write_text(json.dumps(started.dump()))
    with pytest.raises(AirflowException, match="fake-scheduler job 1 works with what is staged"):
        task.execute(context_of("staging", 2, 1))
    cluster.set(1, "failed")
    task.execute(context_of("staging", 3, 1))


def test_what_an_earlier_task_returns_is_not_fixed_before_it_is_known(stage, layout, context_of):
    """As in a Python DAG: ``TrainOperator(nodes=counts.output)``."""
    task = stage()
    counts = BaseOperator(task_id="counts", dag=task.dag)
    task >> TrainOperator(
        task_id="train",
        dag=task.dag,
        step=TrainStep(command="python train.py", nodes=counts.output, slots=2),
    )
    task.execute(context_of("staging"))
    fixed = fixed_run(layout)["steps"]["train"]
    assert (fixed["command"], fixed["slots"]) == ("python train.py", 2)
    assert "nodes" not in fixed


@pytest.mark.parametrize("before", [True, False])
def test_it_is_kept_whether_a_person_is_asked_before_the_model_is_published(
    stage, layout, context_of, tmp_path, before
):
    """In a Python DAG somebody may be asked afterwards, whatever that is about."""
    task = stage()
    results = StoreReference((tmp_path / "results").as_uri())
    asks = ApproveOperator(
        task_id="boss", dag=task.dag, subject="?", step=ApproveStep(results=results)
    )
    upload = UploadResultsOperator(
        task_id="upload_results",
        dag=task.dag,
        step=UploadResultsStep(results=results, manifest={}),
    )
    first, second = (asks, upload) if before else (upload, asks)
    task >> first >> second
    task.execute(context_of("staging"))
    assert ("approve" in fixed_run(layout)["steps"]) is before
