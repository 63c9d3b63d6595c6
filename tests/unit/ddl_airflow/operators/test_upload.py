"""The last step, after the three before it: plain scripts, folders as stores, real ranks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import re
import shutil
import tarfile
import textwrap
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from airflow.providers.standard.operators.python import BranchPythonOperator
from airflow.sdk import DAG, TaskGroup
from airflow.sdk.api.datamodels._generated import AssetProfile
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    DownstreamTasksSkipped,
    ParamValidationError,
)
from airflow.sdk.execution_time.comms import InactiveAssetsResult
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ddl_airflow import cli
from ddl_airflow.core.errors import StagingError
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.core.plan import UploadResultsStep, plan
from ddl_airflow.lineage.index import begun_key, read_index
from ddl_airflow.lineage.production import (
    LATEST,
    PRODUCTION,
    made_of,
    point,
    read_pointer,
    rollback,
)
from ddl_airflow.lineage.record import INSTEAD_OF, drop_part, fixed_run, take_back, write_part
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.operators.evaluate import EvaluateOperator
from ddl_airflow.operators.stage import StageDataOperator
from ddl_airflow.operators.train import TrainOperator
from ddl_airflow.operators.upload import UploadResultsOperator
from ddl_airflow.site import training_of
from ddl_airflow.steps.transform import Transform
from ddl_airflow.storage.filesystem import FolderStore
from ddl_airflow.storage.publication import publish
from tests.schemas import check_lineage_schema
from tests.unit.ddl_airflow.conftest import RUN_ID

TRAIN = """
    import os
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    data = open(os.environ["DATA_DIR"] + "/numbers.txt").read().split()
    print("loss= 0." + data[int(rank)])
    if rank == "0":
        open(os.environ["CHECKPOINT_DIR"] + "/model-7", "w").write(data[0])
"""
SECRET = "hf_0123456789"
MORE = "metrics:\n  - {name: loss, regex: 'loss= (\\S+)'}\n"


@pytest.fixture
def trained(request, tmp_path, workspace, context_of, write_manifest):
    """The DAG, its context and its run's folder, with all but the last task done."""
    command = getattr(request, "param", "python train.py ; python export.py")
    path = write_manifest(
        tmp_path / "dags", "road", command, more=MORE, script=textwrap.dedent(TRAIN)
    )
    (path.parent / "export.py").write_text("")
    (path.parent / "data").mkdir()
    (path.parent / "data" / "numbers.txt").write_text("25 75\n")
    dag = dag_from(load_manifest(path), path)
    context = context_of("road", try_number=2, epochs=3)
    for name in ("stage_data", "train"):
        dag.get_task(name).execute(context)
    layout = RunLayout(workspace, "road", training_of("road", context["dag_run"].run_id))
    # Instead of the transform, whose model would have to be a real one.
    (layout.model / "variables").mkdir(parents=True)
    (layout.model / "saved_model.pb").write_text("graph")
    (layout.model / "variables" / "v").write_text("weights")
    layout.experiment.mkdir(parents=True)
    (layout.experiment / "checkpoint").write_text("model.ckpt-7")
    write_part(layout, "transform", {"result": {}, "tries": {"transform": 2}})
    return dag, context, layout


@pytest.mark.parametrize("step", ["train", "transform"])
def test_what_a_step_that_somebody_marked_success_lacks_is_said(trained, tmp_path, step):
    dag, context, layout = trained
    drop_part(layout, step)
    said = f"{step} has left nothing in .* marked it success. Clear {step}"
    with pytest.raises(AirflowFailException, match=said):
        dag.get_task("upload_results").execute(context)
    assert not list((tmp_path / "dags" / "results").rglob("model*"))


def test_a_python_dag_publishes_without_a_manifest(trained, tmp_path, context_of):
    """What its steps say takes the manifest's place: it is asked for once it has trained."""
    made, _, _ = trained
    digests = []
    for command in ("python train.py", "python train.py", "python train.py --wide"):
        with DAG("own", schedule=None):
            of = {name: made.get_task(name).step for name in ("stage_data", "train")}
            stage = StageDataOperator(task_id="stage", step=replace(of["stage_data"], manifest={}))
            train = TrainOperator(task_id="train", step=replace(of["train"], command=command))
            results = made.get_task("upload_results").step.results
            upload = UploadResultsOperator(task_id="up", step=UploadResultsStep(results=results))
            stage >> train >> upload
        context = context_of("own", epochs=3)
        layout = RunLayout(tmp_path / "workspace", "own", training_of("own", RUN_ID))
        for task in (stage, train):
            task.execute(context)
        (layout.model).mkdir(parents=True, exist_ok=True)
        (layout.model / "saved_model.pb").write_text("graph")
        write_part(layout, "transform", {"result": {}, "tries": {"transform": 1}})
        published = Path(urlsplit(upload.execute(context)["training"]).path)
        record = json.loads((published / "lineage.json").read_text())
        assert record["manifest"].keys() == {"name", "dialect", "digest"}
        assert (record["manifest"]["name"], record["manifest"]["dialect"]) == ("own", "python")
        assert (published / "evidence" / "model-card.md").exists()
        assert fixed_run(layout)["made_of"] == made_of(record)
        digests.append(record["manifest"]["digest"])
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("trained", [f"HF_TOKEN={SECRET} python train.py"], indirect=True)
def test_a_secret_that_a_command_sets_is_not_published(trained, tmp_path):
    dag, context, _ = trained
    dag.get_task("upload_results").execute(context)
    published = [path for path in (tmp_path / "dags" / "results").rglob("*") if path.is_file()]
    assert "lineage.json" in {path.name for path in published}
    assert [path for path in published if SECRET.encode() in path.read_bytes()] == []


def test_a_dry_run_says_what_all_steps_would_do_and_does_nothing(
    tmp_path, workspace, context_of, write_manifest, capsys
):
    path = write_manifest(tmp_path / "dags", "dry", more=MORE, script=textwrap.dedent(TRAIN))
    (path.parent / "data").mkdir()
    (path.parent / "data" / "numbers.txt").write_text("25 75\n")
    dag = dag_from(load_manifest(path), path)
    context = context_of("dry", dry_run=True, nodes=3, checkpoint="7")
    with pytest.raises(AirflowSkipException):
        dag.get_task("stage_data").execute(context)
    lines = [line for line in capsys.readouterr().out.splitlines() if "dry run |" in line]
    for line, words in zip(
        lines,
        [
            ("stage-data", "1 files, 0.0 MiB; would fetch 1 of them"),
            ("train", "would start 3 rank(s)", "python train.py"),
            ("transform", "would make a SavedModel of checkpoint 7"),
            ("upload-results", f"would publish to {(path.parent / 'results').as_uri()}/dry-"),
        ],
        strict=True,
    ):
        assert all(word in line for word in words), line
    layout = RunLayout(workspace, "dry", training_of("dry", context["dag_run"].run_id))
    assert not layout.staged.exists() and not layout.cache.exists()
    assert list(layout.logs.iterdir()) == [] and not (path.parent / "results").exists()
    assert context["outlet_events"] == {}


def test_a_dry_run_finds_what_would_fail_later(tmp_path, workspace, context_of, write_manifest):
    path = write_manifest(tmp_path / "dags", "dry", "python train.py ; python export.py")
    (path.parent / "data").mkdir()
    dag = dag_from(load_manifest(path), path)
    with pytest.raises(AirflowFailException, match="'export.py' is not in the manifest's"):
        dag.get_task("stage_data").execute(context_of("dry", dry_run=True))


IN_EXPERIMENT = """
    import os
    folder = os.environ["EXPERIMENT_DIR"]
    os.makedirs(folder, exist_ok=True)
    with open(folder + "/weights", "a") as file:
        file.write(os.environ["PARAM_BY"])
"""
EXPORTS = """
    import os, shutil
    model = os.environ["RESULT_DIR"] + "/model"
    os.makedirs(model, exist_ok=True)
    shutil.copy(os.environ["EXPERIMENT_DIR"] + "/weights", model + "/saved_model.pb")
"""
EVALUATES = """
    import json, os
    same = [open(f"{os.environ[name]}/{file}").read()
            for name, file in (("EXPERIMENT_DIR", "weights"), ("MODEL", "saved_model.pb"))]
    json.dump({"same": same[0] == same[1]}, open(os.environ["EVALUATION"], "w"))
"""


def test_a_model_is_of_its_own_training_though_another_goes_on_with_the_experiment(
    tmp_path, workspace, context_of, write_manifest, monkeypatch
):
    """The other one begins when this one's ranks have ended, and writes while it is published."""
    more = (
        "experiment: wide\nparameters: {by: one}\n"
        "evaluation: {command: python evaluate.py, metric: same, minimum: 1}\n"
    )
    path = write_manifest(
        tmp_path / "dags",
        "road",
        "python train.py ; python export.py",
        more=more,
        script=textwrap.dedent(IN_EXPERIMENT),
    )
    (path.parent / "export.py").write_text(textwrap.dedent(EXPORTS))
    (path.parent / "evaluate.py").write_text(textwrap.dedent(EVALUATES))
    (path.parent / "data").mkdir()
    (path.parent / "data" / "numbers.txt").write_text("1")
    dag = dag_from(load_manifest(path), path)
    monkeypatch.setattr(Transform, "_saved_model", lambda *words: {})
    context = context_of("road", experiment_id="wide", nodes=1)
    dag.get_task("train").nodes = 1
    for name in ("stage_data", "train"):
        dag.get_task(name).execute(context)
    live = workspace / "experiments" / "wide"
    (live / "weights").write_text("of another training")
    (live / "checkpoint").write_text("of another training")
    for name in ("transform", "evaluate"):
        dag.get_task(name).execute(context)
    places = dag.get_task("upload_results").execute(context)
    published = Path(places["training"].removeprefix("file://"))
    assert (published / "model" / "saved_model.pb").read_text() == "one"
    assert (published / "experiment" / "weights").read_text() == "one"
    assert not (published / "experiment" / "checkpoint").exists()
    # A training that is done again goes on with what is there now.
    dag.get_task("train").execute(context)
    assert (live / "weights").read_text() == "of another trainingone"
    # What transform's script may put there is not followed.
    (copy,) = (workspace / "runs" / "road").glob("*/experiment/wide")
    copy.rename(copy.with_name("aside"))
    copy.symlink_to(tmp_path)
    _model(RunLayout(workspace, "road", copy.parents[1].name))
    with pytest.raises(AirflowFailException, match="FileRefused: .*wide/file is a link"):
        dag.get_task("upload_results").execute(context)


def test_everything_is_published_with_its_lineage_and_the_marker(trained, tmp_path, capsys):
    dag, context, layout = trained
    places = dag.get_task("upload_results").execute(context)
    results = tmp_path / "dags" / "results"
    (training,) = (results / layout.training_id).iterdir()
    assert places == {
        "training": training.as_uri(),
        "model": training.as_uri() + "/model",
        "lineage": training.as_uri() + "/lineage.json",
    }
    there = {o.key for o in FolderStore(training).list()}
    assert {
        "_SUCCESS",
        "experiment/checkpoint",
        "lineage.json",
        "checkpoints/model-7",
        "model/saved_model.pb",
        "model/variables/v",
        "logs/rank-0.log",
        "logs/rank-1.log",
    } <= there
    # The scripts as they ran, and no manifest, which may hold keys.
    scripts = {key for key in there if key.startswith("code/")}
    assert {"code/train.py", "code/export.py"} <= scripts
    assert not [key for key in there if key.endswith((".yml", ".yaml"))]
    assert (training / "code" / "train.py").read_bytes() == (layout.code / "train.py").read_bytes()

    record = json.loads((training / "lineage.json").read_text())
    check_lineage_schema(record)
    assert record["dataset"]["uri"] == (tmp_path / "dags" / "data").as_uri()
    assert {"export.py", "train.py"} <= set(record["code"]["files"])
    assert record["manifest"]["name"] == "road"
    assert record["environment"]["world_size"] == 2
    assert {"apache-airflow", "ddl-airflow", "python"} <= set(record["environment"]["versions"])
    assert record["result"]["metrics"] == {"loss": 0.25}
    assert record["run"]["triggered_by"] == "a tester"
    assert record["run"]["parameters"] == {"epochs": 3}
    steps = ("stage_data", "train", "transform", "upload_results")
    assert record["run"]["tries"] == dict.fromkeys(steps, 2)
    published = {file["key"]: file for file in record["result"]["files"]}
    assert set(published) == there - {"_SUCCESS", "lineage.json"}
    assert published["model/variables/v"] == {
        "key": "model/variables/v",
        "size": 7,
        "sha256": hashlib.sha256(b"weights").hexdigest(),
    }
    ((asset, event),) = [
        (a, e) for a, e in context["outlet_events"].items() if "training_id" in e.extra
    ]
    assert asset.uri == results.as_uri() + "/road"
    assert event.extra["model"] == places["model"]
    assert event.extra["dataset"] == record["dataset"]["fingerprint"]

    # What the command line says about it, before and after somebody changed a file.
    capsys.readouterr()
    whole = str(training.parent)  # of which it is the newest
    for uri in (str(training), places["lineage"], places["model"], training.as_uri() + "/", whole):
        assert cli.main(["lineage", "--json", uri]) == 0
        printed = capsys.readouterr()
        assert json.loads(printed.out) == record
        assert f"{len(published)} files are as recorded" in printed.err
    (training / "model" / "variables" / "v").write_text("WEIGHTS")
    (training / "model" / "saved_model.pb").unlink()
    assert cli.main(["lineage", "--json", str(training)]) == 1
    said = capsys.readouterr().err
    assert "model/variables/v is not the file that was published" in said
    assert "model/saved_model.pb is gone" in said


def test_what_is_published_is_signed_with_the_sites_key(trained, tmp_path, monkeypatch, capsys):
    """Of a connection: it is asked for then, and no log has it."""
    dag, context, layout = trained
    private = ec.generate_private_key(ec.SECP256R1())
    as_pem, public = serialization.Encoding.PEM, tmp_path / "site.pub"
    pem = private.private_bytes(
        as_pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    public.write_bytes(
        private.public_key().public_bytes(as_pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    monkeypatch.setenv("AIRFLOW__DDL__SIGNING_KEY", "site_key")
    monkeypatch.setenv("AIRFLOW_CONN_SITE_KEY", json.dumps({"conn_type": "x", "password": pem}))
    places = dag.get_task("upload_results").execute(context)
    said = capsys.readouterr()
    assert pem.splitlines()[1] not in said.out + said.err
    record = json.loads(Path(places["lineage"].removeprefix("file://")).read_text())
    check_lineage_schema(record)
    assert {"evidence/model.sig", "evidence/model-card.md"} <= set(record["evidence"]["made"])
    assert cli.main(["verify", places["training"], "--key", str(public)]) == 0
    assert "and signed with that key" in capsys.readouterr().out
    monkeypatch.setenv("AIRFLOW__DDL__EVIDENCE", "False")
    monkeypatch.delenv("AIRFLOW__DDL__SIGNING_KEY")
    bare = dag.get_task("upload_results").execute(context)["training"]
    assert "evidence" not in {path.name for path in Path(bare.removeprefix("file://")).iterdir()}


def test_data_that_are_there_only_unpacked_are_described_as_archives(
    trained, tmp_path, context_of, monkeypatch
):
    dag, context, layout = trained
    data = tmp_path / "dags" / "data"
    with tarfile.open(data / "more.tar.gz", "w:gz") as archive:
        archive.add(data / "numbers.txt", "numbers.txt")
    stage = dag.get_task("stage_data")
    stage.unpack = True
    stage.step = replace(stage.step, unpack=True)
    context["dag_run"].clear_number = 1
    stage.execute(context)
    assert not (layout.staged / "more.tar.gz").exists()
    dag.get_task("train").execute(context)
    _model(layout)
    places = dag.get_task("upload_results").execute(context)
    evidence = Path(places["training"].removeprefix("file://")) / "evidence"
    described = json.loads((evidence / "dataset.croissant.json").read_text())
    digests = {one["name"]: one["sha256"] for one in described["distribution"]}
    assert digests == {
        name: hashlib.sha256((data / name).read_bytes()).hexdigest()
        for name in ("more.tar.gz", "numbers.txt")
    }


def test_links_out_of_the_training_are_not_published(trained, tmp_path, capsys):
    dag, context, layout = trained
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("s3cret")
    (layout.result / "stolen").symlink_to(secret / "key")
    (layout.result / "folder").symlink_to(secret)
    (layout.result / "gone").symlink_to(layout.result / "nowhere")
    (layout.experiment / "up").symlink_to("../../../../../secret/key")
    (layout.result / "latest").symlink_to("model/saved_model.pb")
    os.mkfifo(layout.result / "pipe")
    dag.get_task("upload_results").execute(context)
    published = [path for path in (tmp_path / "dags" / "results").rglob("*") if path.is_file()]
    assert [path.read_text() for path in published if path.name == "latest"] == ["graph"]
    assert not {path.name for path in published} & {"stolen", "key", "gone", "up", "pipe"}
    assert b"s3cret" not in b"".join(path.read_bytes() for path in published)
    assert capsys.readouterr().out.count("is not published: it leads out") == 5


def _export(layout):
    """The model where a script wrote it, which is not where it belongs."""
    (layout.result / "export").mkdir()
    return layout.model.rename(layout.result / "export" / "1")


def _whole_by_link(layout):
    layout.model.symlink_to(_export(layout))
    return layout.model


def _variables_by_link(layout):
    (layout.model / "variables").rename(layout.result / "variables")
    (layout.model / "variables").symlink_to("../variables")
    return layout.model / "variables"


def _graph_by_link(layout):
    graph = layout.model / "saved_model.pb"
    graph.symlink_to(graph.rename(layout.workspace / "saved_model.pb"))
    return graph


def _checkpoint_by_link(layout):
    (layout.workspace / "elsewhere.h5").write_text("weights")
    (layout.result / "best.h5").symlink_to(layout.workspace / "elsewhere.h5")
    return layout.result / "best.h5"


def _checkpoint_on_a_disk_that_is_not_here(layout):
    (layout.result / "best.h5").symlink_to(layout.workspace / "scratch" / "best.h5")
    return layout.result / "best.h5"


def _name_of_no_object(layout):
    (layout.model / "variables" / "v\n").write_text("weights")
    return layout.model / "variables" / "v\n"


@pytest.mark.parametrize(
    "leave",
    [
        *(_whole_by_link, _variables_by_link, _graph_by_link, _checkpoint_by_link),
        *(_checkpoint_on_a_disk_that_is_not_here, _name_of_no_object),
    ],
)
def test_no_model_is_published_without_what_a_link_or_its_name_keeps_from_it(
    trained, tmp_path, leave
):
    dag, context, layout = trained
    path = leave(layout)
    fix = "Rename it" if leave is _name_of_no_object else "Copy what is there in place of it"
    said = f"FileRefused: {re.escape(ascii(str(path)))} .*{fix}.*Not retried"
    with pytest.raises(AirflowFailException, match=said):
        dag.get_task("upload_results").execute(context)
    assert not (tmp_path / "dags" / "results").exists()


@pytest.mark.parametrize("latest", ["step-7", "step-3"])  # which the script has removed since
def test_a_link_among_checkpoints_by_which_none_is_missed_is_no_reason_to_fail(
    trained, tmp_path, capsys, latest
):
    dag, context, layout = trained
    (layout.checkpoints / "step-7").mkdir()
    (layout.checkpoints / "step-7" / "weights").write_text("weights")
    (layout.checkpoints / "latest").symlink_to(latest)
    dag.get_task("upload_results").execute(context)
    assert list((tmp_path / "dags" / "results").glob("road-*/*/checkpoints/step-7/weights"))
    assert "checkpoints/latest' is not published" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["logs/rank-0.log", "logs", "experiment/events", "experiment", "code", "evidence"]
)
def test_results_that_are_called_as_something_of_ours_are_said_not_to_be_published(
    trained, tmp_path, capsys, name
):
    dag, context, layout = trained
    layout.logs.mkdir(exist_ok=True)
    (layout.logs / "rank-0.log").write_text("ours")
    (layout.experiment / "events").write_text("ours")
    own = layout.result / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("the script's")
    (layout.result / "logs-of-mine").write_text("published")
    dag.get_task("upload_results").execute(context)
    published = [path for path in (tmp_path / "dags" / "results").rglob("*") if path.is_file()]
    assert "the script's" not in {path.read_text(errors="replace") for path in published}
    assert {"rank-0.log", "events", "logs-of-mine"} <= {path.name for path in published}
    assert re.search(f"{name}' is not published: .* of ours of that name", capsys.readouterr().out)


def test_what_is_beside_published_results_may_be_copied_among_those(trained, tmp_path, capsys):
    dag, context, layout = trained
    place = FolderStore(tmp_path / "beside")
    place.put_if("production.json", b"{}", None)
    place.put_if("production.json", b"[]", place.read_version("production.json")[1])
    shutil.copytree(tmp_path / "beside", layout.result / "before")
    (lock,) = (layout.result / "before").glob(".*")  # of who moves the pointer
    dag.get_task("upload_results").execute(context)
    names = {path.name for path in (tmp_path / "dags" / "results").rglob("*")}
    assert "production.json" in names
    assert f"{lock.name}' is not published: " in capsys.readouterr().out


def test_what_the_ranks_user_keeps_private_is_named_and_what_may_be_of_the_model_not_left_out(
    trained, tmp_path, monkeypatch, capsys
):
    """As ranks that run as another user leave what Python's tempfile made."""
    dag, context, layout = trained
    upload, private = dag.get_task("upload_results"), layout.result / "nothing"

    def refusing(work):
        def refuse(path, *words, **named):
            if os.path.basename(path) == private.name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
            return work(path, *words, **named)

        return refuse

    for name in ("open", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    only = f"only user {pwd.getpwuid(os.geteuid()).pw_name} may read it. Let its group read it"
    for name in ("checkpoints/model-9", "best.keras", "model/variables/more", "folder/"):
        private = layout.result / name
        private.mkdir() if name[-1] == "/" else private.write_text("weights")
        right = "chmod g+rx" if name[-1] == "/" else "chmod g+r"
        said = re.escape(f"AccessDenied: '{private}': {only} ({right}), or remove it. (Not retried")
        with pytest.raises(AirflowFailException, match=said):
            upload.execute(context)
        private.rmdir() if name[-1] == "/" else private.unlink()
    private = layout.result / "tmpk3x9"
    private.write_text("half")
    places = upload.execute(context)
    said = capsys.readouterr().out
    assert f"tmpk3x9' is not published: {only} (chmod g+r), or remove it." in said
    published = {path.name for path in Path(places["training"].removeprefix("file://")).iterdir()}
    assert {"model", "_SUCCESS"} <= published and "tmpk3x9" not in published


def test_nothing_is_published_without_a_model(trained, tmp_path):
    dag, context, layout = trained
    (layout.model / "saved_model.pb").unlink()
    with pytest.raises(AirflowFailException, match="TransformError: there is no SavedModel"):
        dag.get_task("upload_results").execute(context)
    assert not (tmp_path / "dags" / "results").exists()


def test_half_published_results_have_no_marker(trained, tmp_path):
    dag, context, layout = trained
    results = tmp_path / "dags" / "results"
    results.mkdir()
    # A file stands where a folder has to be: nothing can be published.
    (results / layout.training_id).write_text("in the way")
    with pytest.raises(AirflowException):
        dag.get_task("upload_results").execute(context)
    left = {obj.key.partition("/")[0] for obj in FolderStore(results).list()}
    assert left == {"_lineage", layout.training_id}  # that something was about to be published


def test_what_is_published_is_in_the_index_though_no_pointer_could_be_written(
    trained, tmp_path, monkeypatch
):
    dag, context, layout = trained

    def away(*_, **__):
        raise StagingError("the store is away")

    monkeypatch.setattr("ddl_airflow.steps.upload.point", away)
    with pytest.raises(AirflowException, match="the store is away"):
        dag.get_task("upload_results").execute(context)
    store = FolderStore(tmp_path / "dags" / "results")
    assert not store.exists(begun_key(layout.training_id))
    (one,) = read_index(store)
    assert one["training_id"] == layout.training_id


def test_published_again_is_the_same(trained, tmp_path, context_of):
    dag, context, layout = trained
    task = dag.get_task("upload_results")
    places = task.execute(context)
    store = FolderStore(tmp_path / "dags" / "results")
    there = store.list()
    # Cleared: another try to Airflow, of a run that starts another time.
    again = context_of("road", try_number=3, max_tries=4, epochs=3)
    again["dag_run"].start_date += timedelta(hours=1)
    assert task.execute(again) == places
    assert store.list() == there
    # Trained and transformed again: what is published follows, and nothing old stays.
    dag.get_task("train").execute(context_of("road", try_number=3, max_tries=4, epochs=3))
    _model(layout, "another graph")
    fresh = task.execute(again)
    assert fresh["model"] != places["model"]
    assert [obj for obj in store.list() if "/_" not in obj.key] != there
    assert {obj for obj in there if not obj.key.startswith("road/")} <= set(store.list())
    training = Path(fresh["training"].removeprefix("file://"))
    assert (training / "model" / "saved_model.pb").read_text() == "another graph"
    assert not (training / "model" / "variables" / "v").exists()
    pointer = read_pointer(store, "road", LATEST)
    assert pointer["model"] == fresh["model"]
    assert [one["model"] for one in pointer["before"]] == [places["model"]]
    record = json.loads((training / "lineage.json").read_text())
    assert record["run"]["tries"] == {
        **{"stage_data": 2, "train": 1, "transform": 1, "upload_results": 1},
    }
    assert record["run"]["started"] == again["dag_run"].start_date.isoformat()


def test_a_run_keeps_the_manifest_that_it_began_with(tmp_path, workspace, write_manifest, run_task):
    """Edited between two of its steps, as a loader's DAG, or a bundle's newest version, has it."""
    more = "evaluation: {metric: loss, maximum: 1}\nparameters: {epochs: 3}\n" + MORE
    script = textwrap.dedent(TRAIN)
    path = write_manifest(tmp_path / "dags", "road", more=more, script=script)
    (path.parent / "data").mkdir()
    (path.parent / "data" / "numbers.txt").write_text("25 75\n")
    began = load_manifest(path)
    assert run_task(dag_from(began, path).get_task("stage_data")).state == "success"

    text = path.read_text().replace("python train.py", "python none.py")
    path.write_text(text.replace("epochs: 3", "epochs: 4").replace("maximum: 1", "maximum: 0.125"))
    edited = load_manifest(path)
    assert edited.digest != began.digest
    dag = dag_from(edited, path)
    assert run_task(dag.get_task("train")).state == "success"
    (layout,) = (RunLayout(workspace, "road", p.name) for p in (workspace / "runs/road").iterdir())
    layout.model.mkdir()
    (layout.model / "saved_model.pb").write_text("graph")
    write_part(layout, "transform", {"result": {}, "tries": {"transform": 1}})
    assert run_task(dag.get_task("evaluate")).state == "success"
    assert run_task(dag.get_task("upload_results")).state == "success"
    pointer = read_pointer(FolderStore(tmp_path / "dags" / "results"), "road", LATEST)
    assert pointer["made_of"]["manifest"] == began.digest
    assert pointer["made_of"]["parameters"]["epochs"] == 3
    # So the edited one is news; and who clears stage_data gets it in this run.
    again = run_task(dag.get_task("stage_data"))
    assert again.state == "failed" and "none.py" in str(again.error)


def test_a_run_keeps_what_it_was_triggered_with(
    tmp_path, workspace, write_manifest, run_task, monkeypatch
):
    """Edited between two of its steps, so that the form would refuse the run's settings."""
    path = write_manifest(
        tmp_path / "dags",
        "road",
        more="parameters: {epochs: {default: 3, maximum: 9}, note: a}\n" + MORE,
        script=textwrap.dedent(TRAIN) + "assert os.environ['PARAM_EPOCHS'] == '7'\n",
    )
    (path.parent / "data").mkdir()
    (path.parent / "data" / "numbers.txt").write_text("25 75\n")
    conf = {"epochs": 7, "note": "b", "nodes": 2}

    def run(task_id):
        """In a process of the task's own, as Airflow has it."""
        monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_DAG_ID", "road")
        monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_TASK_ID", task_id)
        task = dag_from(load_manifest(path), path).get_task(task_id)
        return run_task(task, conf=conf)

    assert run("stage_data").state == "success"
    text = path.read_text().replace("nodes: 2", "nodes: 1").replace("maximum: 9", "maximum: 5")
    path.write_text(text.replace(", note: a", ""))
    assert run("train").state == "success"
    # Who clears stage_data has the run begin with the edited one, whose form does not have these.
    with pytest.raises(ParamValidationError, match="7 is greater than the maximum of 5"):
        run("stage_data")
    conf |= {"epochs": 4, "nodes": 1}
    again = run("stage_data")
    assert again.state == "failed" and "'note' is not known" in str(again.error)


def test_production_is_asked_again_when_it_changes(trained, tmp_path):
    dag, context, layout = trained
    task, store = dag.get_task("upload_results"), FolderStore(tmp_path / "dags" / "results")
    task.promote, task.not_worse_in, task.small = True, "loss", True
    # As set while this one was evaluated, or a person thought about it.
    point(store, "road", PRODUCTION, "road-9/a-1", {"loss": 0.125})
    with pytest.raises(AirflowFailException, match="0.125 worse than the 0.125 .* road-9.* is pub"):
        task.execute(context)
    latest = read_pointer(store, "road", LATEST)
    assert latest["training_id"] == layout.training_id
    assert read_pointer(store, "road", PRODUCTION)["training_id"] == "road-9"
    assert latest["measurements"] == [{"metric": "loss", "value": 0.25, "source": "output"}]
    event = read_pointer(store, "road", LATEST)["history"][0]
    assert event["by"] == f"a tester, run {context['dag_run'].run_id}"


def test_production_of_another_source_is_not_compared_with(trained, tmp_path, capsys):
    dag, context, layout = trained
    task, store = dag.get_task("upload_results"), FolderStore(tmp_path / "dags" / "results")
    task.promote, task.not_worse_in, task.small = True, "loss", True
    other = {"metric": "loss", "value": 0.125, "source": "validation"}
    point(store, "road", PRODUCTION, "road-9/a-1", {"loss": 0.125}, measurements=[other])
    task.execute(context)
    pointer = read_pointer(store, "road", PRODUCTION)
    assert pointer["training_id"] == layout.training_id
    assert pointer["before"][0]["measurements"] == [other]
    said = "here it is of the output, there of validation data"
    assert f"loss is not compared with that of the model in production: {said}" in (
        capsys.readouterr().out
    )


def test_a_backfill_does_not_overtake(trained, tmp_path, capsys):
    dag, context, _ = trained
    task, store = dag.get_task("upload_results"), FolderStore(tmp_path / "dags" / "results")
    task.promote = True
    later = context["dag_run"].logical_date + timedelta(days=1)
    point(store, "road", PRODUCTION, "road-9/a-1", {}, due=later)
    task.execute(context)
    assert read_pointer(store, "road", PRODUCTION)["training_id"] == "road-9"
    assert context["outlet_events"][task.outlets[0]].extra["production"] is False
    assert "production.json goes on naming road-9/a-1: the run of that was due later" in (
        capsys.readouterr().out
    )
    context["dag_run"].logical_date = later
    task.execute(context)
    assert context["outlet_events"][task.outlets[0]].extra["production"] is True


def test_why_a_pointer_stays_is_said(trained, tmp_path, capsys):
    dag, context, _ = trained
    task, store = dag.get_task("upload_results"), FolderStore(tmp_path / "dags" / "results")
    task.promote = True
    first = f"road-8/{publish({'a': tmp_path / 'dags' / 'train.py'}, store, 'road-8').name}"
    point(store, "road", PRODUCTION, first, {})
    task.execute(context)
    # Another run is published after it, and somebody goes back from this one; then it is cleared.
    for number in range(10, 40):  # so many that only the history still has this one
        point(store, "road", LATEST, f"road-{number}/a-1", {})
    rollback(store, "road")
    capsys.readouterr()
    task.execute(context)
    said = capsys.readouterr().out
    assert "latest.json goes on naming road-39/a-1: it named this one before " in said
    why = "it named this one before, and somebody went back from it"
    assert f"production.json goes on naming {first}: {why}" in said


def test_a_withdrawn_model_stays_away_when_its_upload_is_cleared_after_an_upgrade(
    trained, tmp_path, capsys, monkeypatch
):
    """Then its record has other versions, so that it is another publication."""
    dag, context, layout = trained
    task, store = dag.get_task("upload_results"), FolderStore(tmp_path / "dags" / "results")
    task.promote = True
    good = f"road-8/{publish({'a': tmp_path / 'dags' / 'train.py'}, store, 'road-8').name}"
    point(store, "road", PRODUCTION, good, {})
    task.execute(context)
    bad = read_pointer(store, "road", PRODUCTION)["publication"]
    rollback(store, "road", reason="it is bad")
    capsys.readouterr()
    monkeypatch.setattr("ddl_airflow.lineage.record.__version__", "99")
    task.execute(context)
    assert read_pointer(store, "road", PRODUCTION)["publication"] == good
    again = read_pointer(store, "road", LATEST)["publication"]
    assert again != bad and again.startswith(f"{layout.training_id}/")
    assert context["outlet_events"][task.outlets[0]].extra["production"] is False
    why = f"it named this very model before, as {bad}, and somebody went back from it. "
    what_to_do = f"`ddl-airflow promote {store.uri}/road --to {again}` puts it there all the same"
    said = capsys.readouterr().out
    assert f"production.json goes on naming {good}: {why}{what_to_do}" in said


@pytest.mark.parametrize("edited", [False, True])
def test_a_model_is_published_also_where_the_manifest_has_another_place_by_now(
    trained, run_task, edited
):
    """Then nothing that Airflow knows has this run's outlet any more, and it is not active."""
    dag, _, layout = trained
    task = dag.get_task("upload_results")
    (outlet,) = task.outlets
    gone = [AssetProfile(name=outlet.name, uri=outlet.uri, type="Asset")] if edited else []
    answers = {"ValidateInletsAndOutlets": lambda _: InactiveAssetsResult(inactive_assets=gone)}
    done = run_task(task, answers=answers)
    assert done.state == "success", done.error
    told = done.message("SucceedTask")
    assert [one.uri for one in told.task_outlets] == [outlet.uri]
    (event,) = told.outlet_events
    assert event["extra"]["training_id"] == layout.training_id
    assert task.outlets == [outlet]


def test_data_and_results_beside_the_scripts_are_no_code(trained):
    dag, context, _ = trained
    context["dag_run"].clear_number = 1
    before = dag.get_task("stage_data").execute(context)["code"]
    dag.get_task("upload_results").execute(context)
    record = context["outlet_events"][dag.get_task("upload_results").outlets[0]].extra
    # The next run, with the same scripts: the results of this one are not among them.
    again = dag.get_task("stage_data").execute(context)["code"]
    assert again == before == record["code"]


def _model(layout, graph="graph"):
    """Instead of the transform, whose model would have to be a real one."""
    layout.model.mkdir(exist_ok=True)
    (layout.model / "saved_model.pb").write_text(graph)
    write_part(layout, "transform", {"result": {}, "tries": {"transform": 1}})


def test_a_model_is_not_published_as_made_of_what_was_staged_after_it(trained, tmp_path):
    """A finished run whose stage_data was cleared alone, when the data had changed."""
    dag, context, layout = trained
    context["dag_run"].clear_number = 1
    tasks = [dag.get_task(name) for name in ("stage_data", "train", "upload_results")]
    stage, train, upload_results = tasks
    first = stage.execute(context)["fingerprint"]  # the same data again takes nothing away
    upload_results.execute(context)
    (tmp_path / "dags" / "data" / "numbers.txt").write_text("50 75\n")
    second = stage.execute(context)["fingerprint"]
    with pytest.raises(AirflowFailException, match="train worked with another dataset .*Clear tr"):
        upload_results.execute(context)
    pointer = read_pointer(FolderStore(tmp_path / "dags" / "results"), "road", LATEST)
    assert pointer["made_of"]["dataset"] == first
    train.execute(context)
    assert not layout.model.exists()
    with pytest.raises(AirflowFailException, match="there is no SavedModel"):
        upload_results.execute(context)
    _model(layout)
    upload_results.execute(context)
    pointer = read_pointer(FolderStore(tmp_path / "dags" / "results"), "road", LATEST)
    assert pointer["made_of"]["dataset"] == second
    assert (layout.checkpoints / "model-7").read_text() == "50"


def test_an_evaluation_of_an_earlier_model_is_not_published_with_this_one(trained):
    """As when the manifest no longer asks for one, and the training is done again."""
    dag, context, layout = trained
    old = {"metrics": {"loss": 0.0}, "evaluation": {"metric": "loss"}}
    write_part(layout, "evaluate", {"result": old, "tries": {"evaluate": 1}})
    dag.get_task("train").execute(context)
    _model(layout)
    places = dag.get_task("upload_results").execute(context)
    record = json.loads(Path(places["lineage"].removeprefix("file://")).read_text())
    assert record["result"]["metrics"] == {"loss": 0.25}
    assert "evaluation" not in record["result"] and "evaluate" not in record["run"]["tries"]


GATE = """
    import json, os, sys
    told = float(open(os.environ["DATA_DIR"] + "/../../../../accuracy").read())
    measured = dict.fromkeys(["accuracy", *sys.argv[1:]], told)
    json.dump(measured, open(os.environ["EVALUATION"], "w"))
"""


@pytest.fixture
def gated(tmp_path, workspace, context_of, write_manifest):
    """gated(accuracy): has evaluate measure that. And the DAG, with a model that is to pass it."""
    more = "evaluation: {metric: accuracy, minimum: 0.95, command: python gate.py}\n"
    path = write_manifest(tmp_path / "dags", "gate", more=more)
    (path.parent / "gate.py").write_text(textwrap.dedent(GATE))
    (path.parent / "data").mkdir()
    (path.parent / "data" / "numbers.txt").write_text("1")
    dag, context = dag_from(load_manifest(path), path), context_of("gate")
    for name in ("stage_data", "train"):
        dag.get_task(name).execute(context)
    _model(RunLayout(workspace, "gate", training_of("gate", context["dag_run"].run_id)))

    def evaluate(accuracy: float) -> None:
        (workspace / "accuracy").write_text(str(accuracy))
        dag.get_task("evaluate").execute(context)

    return evaluate, dag.get_task("upload_results"), context


@pytest.mark.parametrize("before", [[], [0.97]])
def test_a_model_that_evaluate_has_refused_last_is_not_published(gated, tmp_path, before):
    """As where evaluate is cleared while a person is asked, who then approves."""
    evaluate, upload_results, context = gated
    for accuracy in before:
        evaluate(accuracy)
    with pytest.raises(AirflowFailException, match="QualityTooLow"):
        evaluate(0.5)
    with pytest.raises(AirflowFailException, match="EvaluationInvalid: .*Clear evaluate"):
        upload_results.execute(context)
    store = FolderStore(tmp_path / "dags" / "results")
    assert read_pointer(store, "gate", PRODUCTION) is read_pointer(store, "gate", LATEST) is None
    evaluate(0.96)
    upload_results.execute(context)
    assert read_pointer(store, "gate", PRODUCTION)["metrics"] == {"accuracy": 0.96}


def test_a_model_that_nobody_has_evaluated_is_not_published(gated, tmp_path):
    """As where a person marks evaluate as success."""
    _, upload_results, context = gated
    with pytest.raises(AirflowFailException, match="marked success.* Clear evaluate"):
        upload_results.execute(context)
    assert not list((tmp_path / "dags" / "results").glob("**/saved_model.pb"))


def test_a_model_that_nobody_has_evaluated_is_not_published_whatever_the_tasks_are_called(
    gated, tmp_path, workspace, context_of
):
    """As in a DAG of one's own, of a task group: their ids begin with its name."""
    path = tmp_path / "dags" / "manifest.yml"
    steps, context = plan(load_manifest(path), path), context_of("own")
    with DAG("own", schedule=None) as dag, TaskGroup("digits"):
        road = [
            StageDataOperator(task_id="stage_data", step=steps.stage_data),
            TrainOperator(task_id="train", step=steps.train),
            EvaluateOperator(task_id="evaluate", step=steps.evaluate),
            UploadResultsOperator(task_id="upload_results", step=steps.upload_results),
        ]
        for before, after in pairwise(road):
            before >> after
    for name in ("digits.stage_data", "digits.train"):
        dag.get_task(name).execute(context)
    layout = RunLayout(workspace, "own", training_of("own", context["dag_run"].run_id))
    _model(layout)
    with pytest.raises(AirflowFailException, match="marked success.* Clear digits.evaluate"):
        road[-1].execute(context)
    (workspace / "accuracy").write_text("0.97")
    road[-2].execute(context)
    road[-1].execute(context)
    # Nor does a later step begin where nothing was staged, as on another host.
    (layout.kept / "lineage" / "stage_data.json").unlink()
    with pytest.raises(AirflowException, match="nothing that stage_data left for this run"):
        road[-2].execute(context)


@pytest.mark.parametrize("marked", ["quick", "thorough"])
def test_each_evaluation_has_to_pass_the_model(gated, tmp_path, workspace, context_of, marked):
    """Two before one upload, of which a person marks one as success: the other had hidden it."""
    path = tmp_path / "dags" / "manifest.yml"
    steps, context = plan(load_manifest(path), path), context_of("own")
    with DAG("own", schedule=None) as dag:
        stage = StageDataOperator(task_id="stage_data", step=steps.stage_data)
        train = TrainOperator(task_id="train", step=steps.train)
        both = [
            EvaluateOperator(
                task_id=name, step=replace(steps.evaluate, command=f"python gate.py {name}")
            )
            for name in ("quick", "thorough")
        ]
        upload = UploadResultsOperator(task_id="upload_results", step=steps.upload_results)
        # Of a model that no evaluation comes before, beside it, nothing is asked.
        beside = UploadResultsOperator(task_id="beside", step=steps.upload_results)
        stage >> train >> both >> upload
        train >> beside
    for task in (stage, train):
        dag.get_task(task.task_id).execute(context)
    _model(RunLayout(workspace, "own", training_of("own", context["dag_run"].run_id)))
    (workspace / "accuracy").write_text("0.97")
    by_name = {task.task_id: task for task in both}
    of_marked = by_name.pop(marked)
    for task in by_name.values():
        task.execute(context)
    with pytest.raises(AirflowFailException, match=f"{marked} has not passed .* Clear {marked} "):
        upload.execute(context)
    beside.execute(context)
    of_marked.execute(context)
    upload.execute(context)
    # What each has measured is there to hold the next model against.
    pointer = read_pointer(FolderStore(tmp_path / "dags" / "results"), "own", PRODUCTION)
    assert pointer["metrics"] == dict.fromkeys(["accuracy", "quick", "thorough"], 0.97)
    # Who refuses it later takes that back, and the other has still passed it.
    (workspace / "accuracy").write_text("0.5")
    with pytest.raises(AirflowFailException, match="QualityTooLow"):
        of_marked.execute(context)
    with pytest.raises(AirflowFailException, match=f"Invalid: {marked} has not passed"):
        upload.execute(context)


def _around_a_branch(steps):
    """Of a Python DAG the tasks before a branch, in a row, and the upload after it."""
    stage = StageDataOperator(task_id="stage_data", step=steps.stage_data)
    train = TrainOperator(task_id="train", step=steps.train)
    stage >> train
    upload = UploadResultsOperator(
        **{"task_id": "upload_results", "step": steps.upload_results},
        trigger_rule="none_failed_min_one_success",
    )
    return stage, train, upload


def test_of_evaluations_on_ways_that_a_branch_chooses_between_one_has_to_pass_the_model(
    gated, tmp_path, workspace, context_of
):
    """What was not chosen is skipped, as it should be: nothing could be published any more."""
    path = tmp_path / "dags" / "manifest.yml"
    steps, context = plan(load_manifest(path), path), context_of("own")
    with DAG("own", schedule=None):
        stage, train, upload = _around_a_branch(steps)
        first, quick, thorough, last = (
            EvaluateOperator(task_id=name, step=steps.evaluate)
            for name in ("first", "quick", "thorough", "last")
        )
        chosen = BranchPythonOperator(task_id="chosen", python_callable=lambda: "quick")
        train >> first >> chosen >> [quick, thorough] >> last >> upload
    for task in (stage, train):
        task.execute(context)
    _model(RunLayout(workspace, "own", training_of("own", context["dag_run"].run_id)))
    (workspace / "accuracy").write_text("0.97")
    for passed, missed in (
        (first, "last and quick or thorough"),
        (thorough, "last"),
    ):
        passed.execute(context)
        with pytest.raises(AirflowFailException, match=f"Invalid: {missed} has not passed"):
            upload.execute(context)
    last.execute(context)
    upload.execute(context)
    (workspace / "accuracy").write_text("0.5")
    with pytest.raises(AirflowFailException, match="QualityTooLow"):
        first.execute(context)
    with pytest.raises(AirflowFailException, match="Invalid: first has not passed"):
        upload.execute(context)


def test_all_evaluations_on_the_way_that_a_branch_chose_have_to_pass_the_model(
    gated, tmp_path, workspace, context_of
):
    """One of two in a row, or beside each other, was enough; another branch may follow."""
    path = tmp_path / "dags" / "manifest.yml"
    steps, context = plan(load_manifest(path), path), context_of("own")
    with DAG("own", schedule=None):
        stage, train, upload = _around_a_branch(steps)
        quick, beside, thorough, slow, last = (
            EvaluateOperator(task_id=name, step=steps.evaluate)
            for name in ("quick", "beside", "thorough", "slow", "last")
        )
        chosen, again = (
            BranchPythonOperator(task_id=name, python_callable=lambda: "quick")
            for name in ("chosen", "again")
        )
        train >> chosen >> [quick, thorough]
        quick >> [beside, again]
        again >> [slow, last]
        [beside, slow, last, thorough] >> upload
    for task in (stage, train):
        task.execute(context)
    layout = RunLayout(workspace, "own", training_of("own", context["dag_run"].run_id))
    _model(layout)
    (workspace / "accuracy").write_text("0.97")
    for passed, missed in (
        (None, "beside or last or quick or slow or thorough"),
        (quick, "beside and last or slow"),
        (last, "beside"),
    ):
        if passed:
            passed.execute(context)
        with pytest.raises(AirflowFailException, match=f"Invalid: {missed} has not passed"):
            upload.execute(context)
    beside.execute(context)
    upload.execute(context)
    for task in (quick, beside, last):
        take_back(layout, task.task_id)
    thorough.execute(context)  # the other way
    upload.execute(context)
    # Of a run that began with an earlier version of ours, which noted names alone.
    run = json.loads((layout.kept / "run.json").read_text())
    gates = run["gates"]["upload_results"]
    run["gates"]["upload_results"] = {
        name: one for name, one in gates.items() if not name.startswith(INSTEAD_OF)
    }
    (layout.kept / "run.json").write_text(json.dumps(run))
    upload.execute(context)


@pytest.fixture
def asking(tmp_path, workspace, context_of, write_manifest, run_task):
    """asking(…): runs those tasks of the manifest as it is by then. A person is to approve of its
    model, which has passed evaluate. asking.answer(option): what they answer.
    """
    path = write_manifest(tmp_path / "dags", "asks", more="approval: {required: true}\n")
    (path.parent / "data").mkdir()
    (path.parent / "data" / "numbers.txt").write_text("1")
    context = context_of("asks")
    approve = dag_from(load_manifest(path), path).get_task("approve")

    class Asking:
        manifest = path
        layout = RunLayout(workspace, "asks", training_of("asks", context["dag_run"].run_id))
        results = FolderStore(path.parent / "results")

        def __call__(self, *names):
            (*_, ended) = (
                run_task(dag_from(load_manifest(path), path).get_task(name)) for name in names
            )
            return ended

        def answer(self, option):
            said = {"chosen_options": [option], "params_input": {}, "timedout": False}
            said |= {"responded_at": datetime.now(UTC), "responded_by_user": {"name": "ada"}}
            context["ti"].map_index, context["ti"].xcom_push = -1, lambda **_: None
            context["task"] = approve
            approve.execute_complete(context, said)

        def ask_again(self):
            approve.body = "the numbers"
            return run_task(approve).state

    asking = Asking()
    assert asking("stage_data", "train").state == "success"
    _model(asking.layout)
    assert asking("evaluate").state == "success"
    return asking


def test_who_no_longer_asks_a_person_publishes_no_model_that_waits_for_one(asking):
    """`approval` is taken out of the manifest while the form is open."""
    text = asking.manifest.read_text()
    asking.manifest.write_text(text.replace("approval: {required: true}\n", ""))
    ended = asking("upload_results")
    assert ended.state == "failed" and "Put approval back" in str(ended.error)
    assert not (asking.manifest.parent / "results").exists()
    asking.answer("Approve")  # in the tab that was open
    assert asking("upload_results").state == "success"
    approved = read_pointer(asking.results, "asks", PRODUCTION)
    assert approved is not None
    # Who clears stage_data takes the manifest as it is now.
    assert asking("stage_data", "train").state == "success"
    _model(asking.layout, "another")
    assert asking("upload_results").state == "success"
    assert read_pointer(asking.results, "asks", LATEST)["model"] != approved["model"]
    assert read_pointer(asking.results, "asks", PRODUCTION) == approved


def test_a_model_that_a_person_approved_is_published_and_no_other_one(asking):
    asking.answer("Approve")
    assert asking("upload_results").state == "success"
    assert read_pointer(asking.results, "asks", PRODUCTION) is not None
    # Asked again, or about another model, they have not answered yet.
    assert asking.ask_again() == "awaiting_input"
    assert "has not approved" in str(asking("upload_results").error)
    asking.answer("Approve")
    assert asking("train").state == "success"
    _model(asking.layout)
    assert asking("evaluate").state == "success"
    assert "has not approved" in str(asking("upload_results").error)
    # As of a run that began before answers were kept.
    run = json.loads((asking.layout.kept / "run.json").read_text())
    assert run["steps"].pop("approve") == {}
    assert run.pop("gates")["upload_results"] == {
        **{"evaluate": ["evaluate"], "approve": ["approve"]}
    }
    (asking.layout.kept / "run.json").write_text(json.dumps(run))
    assert asking("upload_results").state == "success"


def test_a_model_that_was_rejected_is_not_published(asking):
    """By who marks upload_results to run all the same."""
    with pytest.raises(DownstreamTasksSkipped):
        asking.answer("Reject")
    assert "has not approved" in str(asking("upload_results").error)


def test_why_scripts_are_not_published_is_said(trained, capsys):
    """Which one is gone, and not that one was changed."""
    dag, context, layout = trained
    (layout.code / "train.py").unlink()
    dag.get_task("upload_results").execute(context)
    said = capsys.readouterr().out
    assert "are not published: train.py is there no more" in said and "changed there" not in said


def test_scripts_are_not_published_where_the_manifest_says_so(trained, tmp_path):
    dag, context, layout = trained
    task = dag.get_task("upload_results")
    task.step = replace(task.step, with_code=False)
    task.with_code = False
    task.execute(context)
    there = {obj.key for obj in FolderStore(tmp_path / "dags" / "results").list()}
    assert not [key for key in there if "/code/" in key]
    assert [key for key in there if key.endswith("/lineage.json")]
