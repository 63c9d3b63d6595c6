from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml

from ddl_airflow import __version__, cli, commands
from ddl_airflow.commands import run as run_command
from ddl_airflow.core.cancellations import cancellation_file, note_cancellation
from ddl_airflow.core.job import StartedJob
from ddl_airflow.core.layout import cancellations
from ddl_airflow.core.manifest.load import load_manifest, looks_like_manifest
from ddl_airflow.core.plan import plan
from ddl_airflow.demo.site import free_port
from ddl_airflow.steps.base import StepSkipped
from ddl_airflow.storage.cache import Cache
from ddl_airflow.storage.code import snapshot
from ddl_airflow.storage.filesystem import FolderStore
from tests.limits import within

ROOT = Path(__file__).parents[3]


@pytest.fixture
def call(capsys):
    """call(*words) -> (exit code, stdout, stderr)."""

    def run(*words):
        capsys.readouterr()
        code = cli.main([str(word) for word in words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_good_manifest_is_said_to_be_good(call, tmp_path, write_manifest):
    path = write_manifest(tmp_path, "My model", "python train.py ; python a.py")
    (tmp_path / "a.py").touch()
    expected = f"{path}: good: DAG My-model, 2 ranks, 2 command(s)\n"
    assert call("validate", path) == (0, expected, "")


def test_every_issue_of_every_broken_manifest_is_said(call, tmp_path, write_manifest):
    good = write_manifest(tmp_path / "a", "good")
    bad = write_manifest(tmp_path / "b", "bad", more="shedule: '@daily'\nretries: {attempts: 0}\n")
    gone = tmp_path / "gone.yml"
    code, out, err = call("validate", bad, good, gone)
    assert code == 1
    assert out.startswith(f"{good}: good")
    lines = bad.read_text().splitlines()
    first = lines.index("shedule: '@daily'") + 1
    assert f"{bad}:{first}: shedule: unknown field. Did you mean schedule?" in err
    assert f"{bad}:{first + 1}: retries.attempts: is 0, wanted at least 1" in err
    assert f"{gone}: cannot be read" in err


def test_warning_is_said_and_is_no_error(call, tmp_path, literal_keys):
    (tmp_path / "train.py").touch()
    text, keys = literal_keys
    path = tmp_path / "m.yml"
    path.write_text(text)
    code, out, err = call("validate", path)
    assert code == 0
    assert re.search(rf"warning: {path}:\d+: .*a key is written out", err)
    assert not [key for key in keys if key in out + err]


def test_a_folder_stands_for_its_manifests_and_one_id_is_for_one_of_them(
    call, tmp_path, write_manifest
):
    a = write_manifest(tmp_path / "a", "same name")
    b = write_manifest(tmp_path / "deep" / "b", "same-name")
    c = write_manifest(tmp_path / "c", "other")
    (tmp_path / "compose.yml").write_text("services: {}\n")
    code, out, err = call("validate", tmp_path)
    assert code == 1
    assert out == f"{c}: good: DAG other, 2 ranks, 1 command(s)\n"
    assert err.splitlines() == [
        f"{one}:2: model_definition.name: the DAG id 'same-name' is also claimed by {other}. "
        "Give each manifest its own name."
        for one, other in ((a, b), (b, a))
    ]
    assert call("validate", a, a)[0] == 0  # the same file twice is one
    (tmp_path / "empty").mkdir()
    code, out, err = call("validate", tmp_path / "empty")
    assert (code, out) == (2, "") and "there is no manifest below" in err


@pytest.mark.parametrize(
    "words", [["validate"], ["run", "--dry-run"], ["plan"], ["plan", "--json"]], ids=" ".join
)
def test_each_command_knows_where_a_manifest_lies(
    call, tmp_path, write_manifest, monkeypatch, words
):
    monkeypatch.chdir(tmp_path)
    path = write_manifest(
        tmp_path, more=f"schedule: {{assets: ['file://{tmp_path}/data/small']}}\n"
    )
    path.write_text(path.read_text().replace("./results", f"{tmp_path}/data"))
    code, out, err = call(*words, path.name)
    assert code == 1
    wrong = "training_results_reference.target: the results are the same place as"
    assert f"{path.name}:12: {wrong}" in out + err
    assert "schedule.assets[0]: is this training's own model" in out + err
    assert not (tmp_path / ".ddl-run").exists()


def test_a_command_that_stage_data_would_refuse_is_an_error(
    call, tmp_path, write_manifest, monkeypatch
):
    monkeypatch.delenv("AIRFLOW__DDL__PYTHON", raising=False)  # another Python has other syntax
    missing = write_manifest(tmp_path / "a", "a", "python trian.py; pyhton train.py")
    broken = write_manifest(tmp_path / "b", "b", script="x = 1\ndef f(:\n")
    more = "evaluation: {metric: x, minimum: 1, command: ./score.sh}\n"
    scored = write_manifest(tmp_path / "c", "c", more=more)
    nowhere = write_manifest(tmp_path / "d", "d", more="code: ./src\n")
    code, out, err = call("validate", missing, broken, scored, nowhere)
    assert (code, out) == (1, "")
    at = "model_definition.execution.command"
    line = missing.read_text().splitlines().index("    command: python trian.py; pyhton train.py")
    assert err.splitlines() == [
        f"{missing}:{line + 1}: {at}: 'python trian.py': the script 'trian.py' is not in the "
        "manifest's code folder. Did you mean 'train.py'?",
        f"{missing}:{line + 1}: {at}: 'pyhton train.py': there is no 'pyhton'. "
        "Did you mean 'python'?",
        f"{broken}:{line + 1}: {at}: train.py:2: invalid syntax. "
        "Mend it: the script is not valid Python.",
        f"{scored}:{len(scored.read_text().splitlines())}: evaluation.command: './score.sh': the "
        "program './score.sh' is not in the manifest's code folder. Put it there.",
        f"{nowhere}:{len(nowhere.read_text().splitlines())}: code: {tmp_path}/d/src is no folder. "
        "Create it, or correct the path.",
    ]
    said = json.loads(call("validate", "--format", "json", missing)[1])["manifests"][0]
    assert [one["line"] for one in said["errors"]] == [line + 1] * 2
    github = call("validate", "--format", "github", missing)[1]
    assert f"::error file={missing},line={line + 1}::{at}: 'python trian.py'" in github


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python ../common/train.py", "it lies outside the code folder"),
        ("python ../scripts/train.py", "it lies outside the code folder"),
        ("python linked.py", "it lies outside the code folder"),
        ("python linked/train.py", "it lies outside the code folder"),
        ("../common/run.sh", "it lies outside the code folder"),
        ("python .src/train.py", "hidden files and caches such as .src are left out"),
        ("python lib/__pycache__/train.py", "hidden files and caches such as __pycache__ are left"),
        ("python node_modules/train.py", "hidden files and caches such as node_modules are left"),
        ("./.run.sh", "hidden files and caches such as .run.sh are left out"),
        ("python data/train.py", "it lies in the folder of the data or the results"),
        ("python ./lib/../train.py", None),
        ("python within.py", None),
        ("./run.sh", None),
    ],
)
def test_a_script_that_is_not_copied_is_an_error(call, tmp_path, write_manifest, command, why):
    """It was good, and each run failed in stage-data, which looks in the copy."""
    path = write_manifest(tmp_path / "scripts", command=command)
    for name in (
        *("../common/train.py", "../common/run.sh", ".src/train.py", "lib/__pycache__/train.py"),
        *("node_modules/train.py", ".run.sh", "run.sh", "data/train.py"),
    ):
        (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / name).touch()
    (path.parent / "linked.py").symlink_to("../common/train.py")
    (path.parent / "linked").symlink_to("../common")
    (path.parent / "within.py").symlink_to("train.py")
    code, out, err = call("validate", path)
    step = plan(load_manifest(path), path).stage_data
    copied = set(snapshot(step.code, tmp_path / "copy", step.not_code).files)
    assert (os.path.normpath(command.removeprefix("python ")) in copied) is (why is None)
    if why is None:
        assert code == 0, err
    else:
        assert code == 1 and f" is not copied to where it would run: {why}" in err
        assert "Put it among the scripts, or set code: " in err


@pytest.mark.parametrize(
    ("name", "made"),
    [("größe-ζ", "gr-e"), ("a (b)", None), ("My model", None), ("a.b_c-d", None)],
)
def test_a_name_that_becomes_another_is_warned_of(call, tmp_path, write_manifest, name, made):
    code, _, err = call("validate", write_manifest(tmp_path, name))
    assert code == 0
    said = f"model_definition.name: is {name!r}, of which the DAG id becomes {made!r}. Write it in "
    assert (said in err) == (made is not None)


@pytest.mark.parametrize("command", ["lineage", "production", "rollback", "promote", "clean"])
def test_an_unknown_scheme_is_no_path(call, command):
    uri = ["--results", "http://x/y"] if command == "clean" else ["http://x/y"]
    more = ["--to", "t"] if command == "promote" else []
    code, _, err = call(command, *uri, *more)
    assert code == 1
    assert "gs://bucket/prefix, s3://bucket/prefix or in a folder; http:// is neither" in err


@pytest.mark.parametrize("command", ["lineage", "verify", "production", "rollback"])
def test_a_scheme_alone_is_no_folder(call, command):
    assert call(command, "s3://")[2] == (
        "ddl-airflow: 's3://' names no store. Write s3://bucket/prefix\n"
    )
    assert "names no folder. Write file:///path" in call(command, "file://")[2]


def test_a_store_without_keys_names_the_variables_that_have_them(call, monkeypatch, tmp_path):
    """Not a connection: a command has none."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    code, _, err = call("production", "s3://models/digits")
    assert code == 1
    assert "Unable to locate credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in err
    assert "AWS_ENDPOINT_URL" in err


def test_the_place_of_several_dags_results_names_them(call, tmp_path):
    for name in ("one", "two"):
        (tmp_path / "results" / name).mkdir(parents=True)
        (tmp_path / "results" / name / "latest.json").write_text("{}")
    for words in (["production"], ["rollback"], ["promote", "--to", "t"]):
        code, _, err = call(words[0], tmp_path / "results", *words[1:])
        assert code == 1
        assert err == (
            f"ddl-airflow: {tmp_path}/results is no DAG's. Name one, as {tmp_path}/results/one; "
            "there is: one, two\n"
        )
    (tmp_path / "empty").mkdir()
    assert call("production", tmp_path / "empty")[2].endswith("nothing is in production\n")


@pytest.mark.parametrize("uri", ["file:///srv", "/srv"])
def test_a_folder_of_the_root_is_looked_at_there(call, uri, tmp_path, monkeypatch):
    if not Path("/srv").is_dir():
        pytest.skip("needs the folder /srv")
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv" / "production.json").write_text("damaged")
    monkeypatch.chdir(tmp_path)
    code, _, err = call("production", uri)
    assert code == 1 and err == f"ddl-airflow: {uri}: nothing is in production\n"


@pytest.mark.parametrize(
    "words",
    [
        ["clean", "--results", "file://"],
        ["clean", "--results", "file://results"],
        ["lineage", "file://results"],
        ["production", "file://results"],
    ],
)
def test_a_uri_of_no_folder_is_said_to_be_none(call, words):
    code, _, err = call(*words)
    assert code == 1 and f"{words[-1]}: names no folder. Write file:///path" in err


@pytest.mark.parametrize(
    "words",
    [("lineage", "list"), ("lineage",), ("production",), ("verify",), ("clean", "--results")],
)
def test_an_empty_place_is_not_the_current_folder(call, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*words, "")
    assert (code, out) == (1, "")
    assert "the place is empty. Write s3://bucket/prefix, or a folder; . is the current one" in err


def test_the_results_of_a_dag_in_the_current_folder(call, tmp_path, monkeypatch):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "production.json").write_text("damaged")
    monkeypatch.chdir(tmp_path)
    for words in (["production"], ["lineage"]):
        code, _, err = call(*words, "digits")
        assert code == 1 and f"{tmp_path.as_uri()}/digits/production.json is damaged" in err


def test_reports_for_programs(call, tmp_path, write_manifest, literal_keys):
    bad = write_manifest(tmp_path / "a,b: 100%", "bad", more="shedule: '@daily'\n")
    literal = tmp_path / "literal.yml"
    literal.write_text(literal_keys[0])
    (tmp_path / "train.py").touch()
    line = bad.read_text().splitlines().index("shedule: '@daily'") + 1
    code, out, err = call("validate", "--format", "json", bad, literal)
    first, second = json.loads(out)["manifests"]
    assert (code, err) == (1, "")
    assert first == {
        "file": str(bad),
        "good": False,
        "dag_id": None,
        "errors": [
            {
                "line": line,
                "field": "shedule",
                "message": "unknown field",
                "fix": "Did you mean schedule?",
            }
        ],
        "warnings": [],
    }
    assert (second["good"], second["dag_id"]) == (True, "literal")
    assert len(second["warnings"]) == 2
    code, out, err = call("validate", "--format", "github", bad, literal)
    assert (code, err) == (1, "")
    file = str(bad).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    assert out.splitlines()[0] == (
        f"::error file={file},line={line}::shedule: unknown field. Did you mean schedule?"
    )
    assert out.splitlines()[1].startswith(f"::warning file={literal},line=")
    assert call("validate", literal)[0] == 0
    code, out, err = call("validate", "--strict", literal)
    assert (code, out) == (1, "") and "a key is written out" in err


def test_schema_is_printed(call):
    code, out, err = call("schema")
    assert (code, err) == (0, "")
    assert out == (ROOT / "docs" / "manifest.schema.json").read_text()


def test_hook_for_pre_commit_calls_what_is_there(call, write_manifest, tmp_path):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    program, *words = hook["entry"].split()
    assert program in {p.name for p in metadata.entry_points(group="console_scripts")}
    assert call(*words, write_manifest(tmp_path))[0] == 0
    for name, meant in (
        ("manifest.yml", True),
        ("a/manifest-2.yaml", True),
        ("a/weekly.manifest.yml", True),
        ("a/my-manifest.yml", False),
        ("manifest.yml.py", False),
        ("manifests/compose.yml", False),
    ):
        assert bool(re.search(hook["files"], name)) is meant, name
        assert looks_like_manifest(name, "") is meant


def test_each_command_is_in_the_file_that_the_table_names():
    files = {path.stem for path in Path(commands.__file__).parent.glob("[a-z]*.py")}
    assert set(cli.FILES) == files - {"options"}
    for file, names in cli.FILES.items():
        (added,) = (one for one in cli._parser([file])._actions if isinstance(one.choices, dict))
        assert tuple(added.choices) == names


@pytest.mark.parametrize("words", [("lineage", "list"), ("production",)])
def test_questions_about_models_import_neither_manifests_nor_clients_of_stores(words, tmp_path):
    """They are most of a second; the answer is a tenth."""
    code = (
        "import sys; from ddl_airflow.cli import main; code = main(sys.argv[1:]);"
        "print(*sorted({'pydantic', 'yaml', 'boto3', 'airflow'} & set(sys.modules)), code)"
    )
    (tmp_path / "results").mkdir()
    argv = [sys.executable, "-c", code, *words, str(tmp_path / "results")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] in ("0", "1"), ended


def test_plan_shows_every_step_and_no_key(call, tmp_path, literal_keys):
    text, keys = literal_keys
    path = tmp_path / "m.yml"
    path.write_text(text)
    code, out, err = call("plan", "--json", path)
    assert (code, err) == (0, "")
    assert not [key for key in keys if key in out]
    steps = json.loads(out)
    assert steps["stage_data"]["dataset"] == {
        "uri": "s3://some-data",
        "endpoint_url": "http://127.0.0.1:9",
        "access_key_id": "***",
        "secret_access_key": "***",
    }
    assert steps["train"]["command"] == "python train.py"


def test_steps_of_every_run_have_no_settings_of_one(call, tmp_path, write_manifest):
    path = write_manifest(tmp_path)
    code, out, err = call("plan", "--json", path, "--set", "nodes=4", "--set", "nosuch=1")
    assert (code, out) == (2, "")
    assert "--set nodes, nosuch is for one run, and --json prints the steps of every" in err


def test_convert_prints_a_manifest_without_keys(call, tmp_path, literal_keys):
    text, keys = literal_keys
    path = tmp_path / "m.yml"
    path.write_text(text)
    code, out, err = call("convert", path)
    assert (code, err) == (0, "")
    assert not [key for key in keys if key in out]
    path.write_text(out)
    (tmp_path / "train.py").touch()
    assert call("validate", path)[0] == 0
    path.write_text("learners: 0")
    code, out, err = call("convert", path)
    assert (code, out) == (1, "") and f"{path}:1: learners: is 0, wanted at least 1" in err


def test_ranks_that_will_train_apart_are_warned_of(call, tmp_path, write_manifest):
    path = write_manifest(tmp_path, "small", script="import tensorflow")
    assert "warning" not in call("validate", path)[2]
    path.write_text(path.read_text().replace("distribution: independent", "distribution: mpi"))
    code, out, err = call("validate", path)
    assert (code, out.count("good")) == (0, 1)
    assert "manifest.yml:4: model_definition.execution: no .py file of the code folder" in err
    assert "the 2 ranks will train apart, each a model of its own, and train will fail" in err
    assert call("validate", "--strict", path)[0] == 1
    (path.parent / "train.py").write_text("import ddl")
    assert "warning" not in call("validate", path)[2]
    (path.parent / "train.py").write_text("import horovod.torch as hvd")
    err = call("validate", path)[2]
    assert "execution: train.py imports torch, and no .py file of the code folder" in err
    assert err.count("warning") == 1 and "import ddl" not in err


@pytest.mark.parametrize(
    "example",
    [
        *("mnist-tf1", "mnist-keras", "mpi-collectives", "cray-dl-comm", "parameter-server"),
        "ffdl-digits",
    ],
)
def test_plans_of_the_examples(call, golden, example):
    code, out, _ = call("plan", "--json", ROOT / "dags" / example / "manifest.yml")
    assert code == 0
    golden(f"plan_{example}.json", out.replace(str(ROOT), "<repository>"))


SUBMITTED = """\
# launcher {kind}: 2 node(s) with 1 rank(s) each, in {folder}/runs/"""


def test_plan_says_what_would_be_submitted_and_does_nothing(
    call, tmp_path, write_manifest, monkeypatch
):
    path = write_manifest(tmp_path)
    path.write_text(path.read_text() + "parameters:\n  key: {secret: true, conn_id: a_key}\n")
    monkeypatch.setenv("PARAM_KEY", "a mark of this test")
    place = tmp_path / "place"
    image = ", image: 'trainer:1'"
    for launcher, others, words in (
        ("local", "", "mpirun -n 2"),
        ("slurm", "", "sbatch --parsable --no-requeue <<'END'\n#!/bin/bash\n#SBATCH --job-name="),
        ("ssh", ", hosts: [gpu1:4, gpu2:4]", "gpu1:1,gpu2:1"),
        ("kubernetes", image, "kubectl create -f - <<'END'\napiVersion: batch/v1\nkind: Job\n"),
        ("kubernetes", f"{image}, operator: mpi", "\nkind: MPIJob\n"),
        ("kubernetes", f"{image}, operator: trainer", "\nkind: TrainJob\n"),
    ):
        asked = tmp_path / "asked.yml"
        asked.write_text(path.read_text() + f"launcher: {{kind: {launcher}{others}}}\n")
        code, out, err = call("plan", asked, "--workspace", place)
        assert (code, err) == (0, "")
        assert out.startswith(SUBMITTED.format(kind=launcher, folder=place))
        assert words in out
        assert "\nPARAM_KEY='***'\n" in out and "a mark of this test" not in out
    assert not place.exists()
    code, _, err = call("plan", path, "--set", "nodes=none")
    assert (code, err) == (
        1,
        "ddl-airflow: nodes is 'none', wanted a whole number of at least 1.\n",
    )


def test_plan_takes_the_sites_table(call, tmp_path, write_manifest):
    path = write_manifest(tmp_path)
    table = tmp_path / "compute.yml"
    table.write_text("compute: {cpu: {pool: cores, queue: big, nodes: 2}}\n")
    code, out, _ = call("plan", "--json", path, "--compute", table)
    shown = json.loads(out)
    assert code == 0 and shown["pool_slots"] == 2
    place = {"pool": "cores", "queue": "big", "executor": "", "priority_weight": 1}
    assert shown["train_on"] == place
    assert shown["other_steps"] == {**place, "pool": ""}
    table.write_text("compute: {cpu: {nodes: 1}}\n")
    code, _, err = call("validate", path, "--compute", table)
    assert code == 1 and "nodes: is 2, and this site has 1 of cpu. Lower it." in err
    table.write_text("compute: {cpu: {nods: 1}}\n")
    code, _, err = call("validate", path, "--compute", table)
    assert (code, err) == (
        1,
        f"ddl-airflow: {table}:1: compute.cpu.nods: unknown field. Did you mean nodes?\n",
    )


def test_plan_of_a_broken_manifest_says_what_is_wrong(call, tmp_path):
    (tmp_path / "m.yml").write_text("model_definition: [\n")
    code, out, err = call("plan", tmp_path / "m.yml")
    assert (code, out) == (1, "")
    assert "m.yml:2" in err


RECORD = {
    "training_id": "digits-1",
    "manifest": {"file": "digits.yml", "name": "digits", "digest": "sha256:v2:m"},
    "dataset": {"uri": "s3://b/digits", "fingerprint": "sha256:d", "files": 4, "bytes": 2**20},
    "code": {"digest": "sha256:c", "files": ["train.py"], "git_commit": None},
    "run": {"dag_id": "digits", "run_id": "r", "type": "manual", "parameters": {"epochs": 3}},
    "environment": {"launcher": "local", "world_size": 2, "hosts": ["a"], "versions": {}},
    "result": {"files": [], "metrics": {}},
}


@pytest.mark.parametrize("kind", ["folder", "empty"])
def test_lineage_of_what_is_not_there_says_so(call, tmp_path, kind):
    (tmp_path / "empty").mkdir()
    code, out, err = call("lineage", tmp_path / kind)
    assert (code, out) == (1, "")
    assert err.startswith("ddl-airflow: ") and str(tmp_path / kind) in err


def test_lineage_checks_the_files_of_a_folder(call, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "saved_model.pb").write_bytes(b"graph")
    digest = "8e4d54dbc6b1e3d6ec7cef6a7a4b0c46ee0bd1aa17ed1bd9e1f6b0a6d1ee1f00"
    file = {"key": "model/saved_model.pb", "size": 5, "sha256": digest}
    result = {"files": [file], "not_finite": {"loss": "NaN"}}
    (tmp_path / "lineage.json").write_text(json.dumps(RECORD | {"result": result}))
    code, out, err = call("lineage", "--json", tmp_path)
    assert code == 1
    assert json.loads(out)["result"]["files"] == [file]
    assert "model/saved_model.pb is not the file that was published" in err
    assert "warning: 'loss' was NaN at the end of the training" in err


def test_tensorboard_serves_all_experiments_of_a_workspace(tmp_path):
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("TensorBoard is not installed: pip install tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for name in ("narrow", "wide"):
        writer = EventFileWriter(str(tmp_path / "experiments" / name))
        loss = Summary(value=[Summary.Value(tag="loss", simple_value=0.5)])
        writer.add_event(Event(wall_time=1.0, step=1, summary=loss))
        writer.close()
    port = free_port()
    argv = [sys.executable, "-m", "ddl_airflow.cli", "tensorboard", "--port", str(port)]
    # It does without TensorFlow, and is there ten seconds earlier.
    (tmp_path / "tensorflow.py").write_text("raise ImportError('not here')\n")
    environment = os.environ | {
        "AIRFLOW__DDL__WORKSPACE": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
    }
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            deadline, found = time.monotonic() + within(60), []
            while found != ["narrow", "wide"]:
                assert time.monotonic() < deadline and server.poll() is None, found
                try:
                    with urlopen(f"http://localhost:{port}/data/runs") as answer:
                        found = sorted(json.load(answer))
                except OSError:
                    time.sleep(0.1)
        finally:
            server.kill()  # TensorBoard's own end, by SystemExit of a handler, may be swallowed


def test_tensorboard_says_what_it_needs(call, tmp_path, monkeypatch):
    monkeypatch.delenv("AIRFLOW__DDL__WORKSPACE", raising=False)
    assert call("tensorboard")[0] == 2
    code, _, err = call("tensorboard", "--workspace", tmp_path)
    if importlib.util.find_spec("tensorboard") is not None:
        assert code == 1 and f"{tmp_path}/experiments: no training has left" in err
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    code, _, err = call("tensorboard", "--workspace", tmp_path)
    assert code == 2 and "pip install '.[tensorboard]' in the sources" in err


def test_verify_cache_removes_what_was_changed(call, tmp_path):
    store, cache = FolderStore(tmp_path / "data"), Cache(tmp_path / "cache")
    obj = store.put_bytes("a", b"content")
    cache.fetch(store, obj, lambda count: None)
    assert call("verify-cache", "--workspace", tmp_path) == (0, "", "")
    blob = cache.path(store, obj)
    blob.unlink()
    blob.write_bytes(b"another")
    code, out, _ = call("verify-cache", "--workspace", tmp_path)
    assert code == 1 and f"removed {blob}" in out and not blob.exists()
    assert call("verify-cache", "--workspace", tmp_path) == (0, "", "")


@pytest.fixture
def old_folders(tmp_path):
    """A folder that has a workspace's names and is none, last changed sixty days ago."""
    for name in ("runs/exp1/Nov01_host", "experiments/mine"):
        (tmp_path / name).mkdir(parents=True)
        os.utime(tmp_path / name, (time.time() - 60 * 86400,) * 2)
    return tmp_path


OF_30_DAYS = ("--keep-runs", "30d", "--keep-experiments", "30d")


def test_an_empty_workspace_is_not_the_current_folder(call, old_folders, monkeypatch, capsys):
    monkeypatch.chdir(old_folders)
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", "")
    code, out, err = call("clean", *OF_30_DAYS)
    assert (code, out) == (2, "") and "clean what? Give --workspace DIR" in err
    for command in ("clean", "verify-cache", "tensorboard"):
        with pytest.raises(SystemExit) as caught:
            call(command, "--workspace", "")
        assert caught.value.code == 2
        assert (
            "--workspace: is empty. Name a folder; . is the current one" in capsys.readouterr().err
        )
    assert {path.name for path in old_folders.glob("*/*")} == {"exp1", "mine"}
    assert (old_folders / "runs/exp1/Nov01_host").is_dir()


def test_only_a_workspace_is_cleaned(call, old_folders, tmp_path):
    code, out, err = call("clean", "--workspace", old_folders, *OF_30_DAYS)
    assert (code, out) == (2, "")
    assert f"--workspace {old_folders} is no workspace: it has neither .ddl-workspace nor " in err
    assert (old_folders / "runs/exp1/Nov01_host").is_dir()


def test_results_are_cleaned_where_nothing_has_trained_in_the_sites_workspace(
    call, tmp_path, monkeypatch
):
    for name in ("workspace", "results"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", str(tmp_path / "workspace"))
    code, _, err = call("clean", "--dry-run", "--results", tmp_path / "results")
    assert code == 0 and "would remove 0" in err and "is no workspace" in err


@pytest.mark.parametrize("of", [".ddl-workspace", "site-id", "ddl-run"])
def test_each_workspace_is_cleaned(call, old_folders, of, monkeypatch):
    """One of Airflow, one of before or of ``ddl-airflow run``, one of ``ddl-run``."""
    place = old_folders / ".ddl-run"
    place.mkdir()
    for name in ("runs", "experiments"):
        (old_folders / name).rename(place / name)
    if of != "ddl-run":
        place = place.rename(old_folders / "workspace")
        (place / of).touch()
    monkeypatch.chdir(place)  # which may be given as .
    code, out, _ = call("clean", "--workspace", ".", *OF_30_DAYS)
    assert code == 0 and out.startswith("run: ") and "\nexperiment: " in out
    assert not [*place.glob("runs/*/*"), *place.glob("experiments/[!.]*")]


@pytest.mark.parametrize("dry_run", [True, False])
def test_cleaning_cancels_the_jobs_that_are_to_be(call, tmp_path, cluster, job, dry_run):
    """As the DAG does; but for those of which only Airflow knows whether their task has ended."""
    (tmp_path / ".ddl-workspace").touch()
    task = {"dag_id": "digits", "task_id": "train", "run_id": "r1", "map_index": -1}
    for number, of_task in ((1, None), (2, task)):
        spec = replace(job().spec, job_id=f"unit/train-{number}")
        path = cancellation_file(cancellations(tmp_path), spec.job_id)
        handle = cluster.submit(cluster.render(spec))
        note_cancellation(StartedJob(handle, time.time(), cancellation=path), of_task)
        os.utime(path, (0, 0))
    gone = replace(handle, kind="gone")  # a launcher of a package that is there no more
    path = cancellation_file(cancellations(tmp_path), "gone")
    note_cancellation(StartedJob(gone, time.time(), cancellation=path))
    path.with_name("odd.json").write_text("{}")
    words = ["--dry-run"] if dry_run else []
    code, out, err = call("clean", "--workspace", tmp_path, *words)
    assert code == 0, err
    marks = {one.name.partition(".")[0] for one in path.parent.glob("*.said")}
    assert marks == (set() if dry_run else {"odd", path.stem})
    done = "would cancel" if dry_run else "cancelled"
    assert out == f"{done} fake-scheduler job 1 (unit/train-1)\n"
    assert "nobody waits for the job of run r1 of digits. If Airflow has ended that" in err
    assert [cluster.state(number) for number in (1, 2)] == (
        ["pending" if dry_run else "lost", "pending"]
    )


@pytest.mark.parametrize("interrupted", [False, True])
def test_who_calls_run_in_its_own_process_keeps_its_handlers_of_signals(
    monkeypatch, tmp_path, write_manifest, interrupted
):
    def train(*_):
        if interrupted:
            signal.raise_signal(signal.SIGTERM)
        raise StepSkipped("nothing is new")

    numbers = (signal.SIGINT, signal.SIGTERM)
    monkeypatch.setattr(run_command, "run_manifest", train)
    monkeypatch.setattr(run_command, "log_to_terminal", lambda: None)
    before = [signal.getsignal(number) for number in numbers]
    code = cli.main(["run", str(write_manifest(tmp_path))])
    assert code == (128 + signal.SIGTERM if interrupted else 0)
    assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("words", [[], ["train"], ["validate"], ["plan", "a", "b"]])
def test_wrong_call_is_2(words):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2


def test_demo_without_its_folder_is_2(call, tmp_path):
    code, _, err = call("demo", "--dags", tmp_path / "nowhere")
    assert code == 2
    assert "is no folder" in err


def test_command_starts_without_airflow_and_tensorflow(tmp_path, write_manifest):
    path = write_manifest(tmp_path, "small")
    code = (
        "import sys; from ddl_airflow.cli import main; code = main(sys.argv[1:]);"
        "print([m for m in ('airflow', 'tensorflow', 'boto3') if m in sys.modules]);"
        "sys.exit(code)"
    )
    argv = [sys.executable, "-c", code, "validate", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{__version__}\n"


def published(results, training, name="p-1"):
    """What upload-results leaves of a training."""
    place = results / training / name
    place.mkdir(parents=True)
    body = json.dumps(RECORD)
    (place / "lineage.json").write_text(body)
    sha256 = hashlib.sha256(body.encode()).hexdigest()
    file = {"key": "lineage.json", "size": len(body), "sha256": sha256, "etag": ""}
    (place / "_SUCCESS").write_text(json.dumps({"files": [file]}))
    return place


def test_lineage_of_what_holds_several_trainings_names_them(call, tmp_path, monkeypatch):
    results = tmp_path / "results"
    for number, training in enumerate(("one-1", "one-2", "two-1")):
        place = published(results, training)
        os.utime(place / "_SUCCESS", (1000 + number, 1000 + number))
    code, out, err = call("lineage", results)
    assert (code, out) == (1, "")
    assert err == (
        f"ddl-airflow: {results} is of several trainings. Name one, as {results}/two-1; there is, "
        "the newest first: two-1, one-2, one-1\n"
    )
    (results / "one").mkdir()
    pointer = {"publication": "one-2/p-1", "training_id": "one-2", "model": "", "metrics": {}}
    pointer |= {"before": [], "history": []}
    (results / "one" / "latest.json").write_text(json.dumps(pointer))
    code, out, err = call("lineage", results / "one")
    assert (code, out) == (1, "")
    assert err == (
        f"ddl-airflow: {results}/one is of a DAG. Name one of its trainings: {results}/one-2/p-1 "
        "(latest)\n"
    )
    pointer |= {"publication": "one-1/p-1", "training_id": "one-1"}
    (results / "one" / "production.json").write_text(json.dumps(pointer))
    said = f"{results}/one-2/p-1 (latest), {results}/one-1/p-1 (production)\n"
    assert call("lineage", results / "one")[2].endswith(said)
    assert call("lineage", results / "one-2")[0] == 0
    for folder, name in ((results, "one"), (results / "one", ".")):  # relative to where one is
        monkeypatch.chdir(folder)
        assert call("lineage", name)[2].endswith(said)


@pytest.mark.parametrize("marker", [None, "{", "{}"])
@pytest.mark.parametrize("of", ["one-1", "."])
def test_what_has_a_record_and_no_whole_marker_is_not_said_to_have_none(call, tmp_path, marker, of):
    name = f"{'c' * 16}-{'d' * 8}"
    marked = published(tmp_path, "one-1", name) / "_SUCCESS"
    marked.unlink()
    if marker is not None:
        marked.write_text(marker)
    code, out, err = call("lineage", tmp_path / of)
    assert (code, out) == (1, "") and "nothing was published" not in err
    if of == "one-1":
        assert err == (
            f"ddl-airflow: {tmp_path}/one-1/{name} has no whole _SUCCESS: it is being published, "
            "its upload was cut off, or the file was lost or changed. "
            f"`ddl-airflow verify {tmp_path}/one-1/{name}` says more\n"
        )


def test_what_cleaning_has_withdrawn_is_told_as_that(call, tmp_path):
    marked = published(tmp_path, "one-1", f"{'c' * 16}-{'d' * 8}") / "_SUCCESS"
    marked.rename(marked.with_name("_RETIRED"))
    code, _, err = call("lineage", tmp_path / "one-1")
    assert code == 1 and "cleaning has withdrawn it, and removes it soon" in err


@pytest.mark.parametrize(
    "words",
    [
        ("lineage", "none"),
        ("lineage", "file"),
        ("production", "none/x"),
        ("rollback", "none/x"),
        ("promote", "none/x", "--to", "t"),
        ("clean", "--results", "none"),
    ],
)
def test_a_place_of_results_that_is_not_there_is_no_manifests(call, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    place = next(word for word in words if "none" in word or word == "file")
    assert call(*words) == (
        1,
        "",
        f"ddl-airflow: {place}: there is no such folder. Give the one in which results were "
        "published, or s3://bucket/prefix.\n",
    )


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"result": {"files": []}}', "deep"])
def test_a_lineage_that_is_none_is_said_to_be(call, tmp_path, text):
    (tmp_path / "lineage.json").write_text("[" * 100_000 if text == "deep" else text)
    said = f"ddl-airflow: file://{tmp_path}/lineage.json is no lineage: it is damaged, or another "
    code, out, err = call("lineage", tmp_path)
    assert (code, out) == (1, "") and err.startswith(said)


def test_a_workspace_to_verify_has_to_be_there(call, tmp_path):
    said = f"ddl-airflow: --workspace {tmp_path}/w is no folder\n"
    assert call("verify-cache", "--workspace", tmp_path / "w") == (2, "", said)


def test_a_home_of_the_demo_that_is_a_file_is_explained(call, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "dags").mkdir()
    words = ("demo", "--dags", tmp_path / "dags", "--home")
    said = f"ddl-airflow: {tmp_path}/file is no folder. Give another with --home.\n"
    assert call(*words, tmp_path / "file") == (2, "", said)
    said = f"ddl-airflow: {tmp_path}/file/home: Not a directory\n"
    assert call(*words, tmp_path / "file" / "home") == (1, "", said)


def test_a_demo_whose_ranks_have_no_ops_starts_nothing(call, tmp_path, monkeypatch):
    (tmp_path / "dags").mkdir()
    (tmp_path / "mpirun").touch()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho None\n")
    python.chmod(0o755)
    monkeypatch.setenv("AIRFLOW__DDL__PYTHON", str(python))
    home = tmp_path / "home"
    code, out, err = call("demo", "--dags", tmp_path / "dags", "--home", home)
    assert (code, out) == (2, "") and not home.exists()
    assert f"{python} has no module ddl_ops. Install ddl-ops there" in err


CALLED = "import sys; from ddl_airflow.{} import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("__main__", ["schema"]),
        ("__main__", ["plan", "--json", "manifest.yml"]),
        ("__main__", ["validate", "manifest.yml"]),
        ("__main__", ["--help"]),
        ("run", ["--help"]),
    ],
)
def test_a_reader_that_goes_away_is_no_traceback(tmp_path, write_manifest, module, words):
    write_manifest(tmp_path, "piped")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as nobody:
        done = subprocess.run(
            [sys.executable, "-c", CALLED.format(module), *words],
            cwd=tmp_path,
            # argparse passes over what it cannot write: held back, it is written later.
            env={**os.environ, "PYTHONUNBUFFERED": ""},
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            timeout=within(30),
        )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
