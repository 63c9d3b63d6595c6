"""``ddl-airflow run`` as a person calls it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowSkipException

from ddl_airflow import local_run
from ddl_airflow.core.connections import connection_of_environment
from ddl_airflow.core.errors import ConnectionInvalid, SettingInvalid
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.launchers.processes import marked
from ddl_airflow.local_run import Asked, run_manifest, where_it_is
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.plugin.training import SILENT, read_record, read_state
from ddl_airflow.storage.s3_client import client_by_connection
from tests.limits import until, within

# At its end it tells what of Airflow has been loaded.
CALL = [
    *(sys.executable, "-c"),
    "import sys; from ddl_airflow.cli import main; code = main(); "
    "print('airflow', [m for m in sys.modules if m.partition('.')[0] == 'airflow']); "
    "sys.exit(code)",
]
# Two dense layers of numbers that are always the same, and a model of them.
DETERMINISTIC = """\
import os
import sys

import keras
import numpy as np

import ddl
import ddl.keras

keras.utils.set_random_seed(1)
x = np.linspace(-1, 1, 64, dtype="float32").reshape(16, 4)
y = x.sum(axis=1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
model.compile(ddl.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
part = slice(ddl.rank(), None, ddl.size())
model.fit(x[part], y[part], batch_size=2, epochs=2, shuffle=False, verbose=0,
          callbacks=[ddl.keras.BroadcastCallback()])
if ddl.rank() == 0:
    model.save(os.path.join(os.environ["CHECKPOINT_DIR"], "model.keras"))
"""


def environment(**more):
    here = os.environ.items()
    own = ("AIRFLOW_CONN_", "AIRFLOW__DDL__", "DDL_", "OMPI_", "PARAM_")
    return {name: value for name, value in here if not name.startswith(own)} | more


@pytest.fixture
def call(tmp_path):
    """call(*words, **environment): the command, in a folder of its own."""

    def run(*words, **more):
        return subprocess.run(
            [*CALL, "run", *map(str, words)],
            cwd=tmp_path,
            env=environment(**more),
            capture_output=True,
            text=True,
            timeout=within(120),
            check=False,
        )

    return run


@pytest.fixture
def manifest(tmp_path, write_manifest):
    """manifest(script, command=, more=) -> the file, with data beside it."""

    def make(script: str, command: str = "python train.py", more: str = "") -> Path:
        path = write_manifest(
            tmp_path / "dags", "small", command, more, script=textwrap.dedent(script)
        )
        (path.parent / "data").mkdir(exist_ok=True)
        (path.parent / "data" / "numbers").write_text("1 2 3")
        return path

    return make


def run_folder(tmp_path) -> Path:
    (found,) = (tmp_path / ".ddl-run" / "runs" / "small").iterdir()
    return found


def told(folder):
    """What `lineage` says of a run's folder."""
    words = [*CALL, "lineage", folder]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_a_run_that_failed_goes_on_when_it_is_mended(call, manifest, tmp_path):
    path = manifest(
        """
        import os, sys, time
        assert open(os.environ["DATA_DIR"] + "/numbers").read() == "1 2 3"
        rank = os.environ["OMPI_COMM_WORLD_RANK"]
        kept = os.environ["CHECKPOINT_DIR"] + "/kept-"
        print("goes on" if os.path.exists(kept + rank) else "starts", os.environ["PARAM_RATE"])
        sys.stdout.flush()
        open(kept + rank, "w").close()
        while not os.path.exists(kept + "0"):  # the first one to fail ends the other
            time.sleep(0.1)
        raise SystemExit("no idea")
    """,
        more="parameters: {rate: 0.5}\n",
    )
    failed = call(path, "--set", "rate=0.25")
    assert failed.returncode == 1 and "train | rank 0 | starts 0.25" in failed.stderr
    *_, hint, sentence = failed.stderr.splitlines()
    steps = "--step train --step transform --step upload-results"
    assert hint == f"to go on with this run: ddl-airflow run dags/manifest.yml {steps}"
    assert sentence.startswith("ddl-airflow: rank ") and "no idea" in sentence
    assert failed.stdout == "airflow []\n"
    story = told(run_folder(tmp_path))
    assert "state       failed, train failed" in story
    assert "why         JobFailed in try 1, rank " in story and "no idea" in story
    assert "data " in story and "rate=0.25" in story
    text = path.with_name("train.py").read_text()
    path.with_name("train.py").write_text(text.replace("raise", "#"))
    again = call(path, "--step", "stage-data", "--step", "train")
    assert again.returncode == 0, again.stderr
    # Its parameters are asked for anew where its data is staged.
    assert "train | rank 0 | goes on 0.5" in again.stderr
    records = sorted(one.name for one in (run_folder(tmp_path) / "ddl").glob("try-*"))
    assert records == ["try-1", "try-2"]
    assert "state       running, train done" in told(run_folder(tmp_path))
    assert (tmp_path / again.stdout.splitlines()[1].removeprefix("logs: ")).is_dir()


def test_how_to_go_on_says_all_that_a_step_is_told_again(call, manifest, tmp_path):
    """Of its settings the run knows itself; where data and results are, it is told each time."""
    path = manifest("raise SystemExit(3)", more="parameters: {rate: 0.5}\n")
    (path.parent / "data").rename(tmp_path / "my data")
    (tmp_path / "kinds").write_text("compute: {cpu: {slots: 1}}\n")
    options = ["--data", "my data", "--publish"]
    failed = call(path, *options, "--compute", "kinds", "--set", "rate=0.25")
    hint = failed.stderr.splitlines()[-2]
    begun, steps = hint.split(" --step ", 1)
    assert steps == "train --step transform --step upload-results", failed.stderr
    assert begun.endswith("run dags/manifest.yml --data 'my data' --publish --compute kinds")
    again = call(*shlex.split(begun.partition(" run ")[2]), "--step", "train")
    assert "code 3" in again.stderr.splitlines()[-1], again.stderr
    # What the environment says, it says to whoever goes on.
    failed = call(path, *options, AIRFLOW__DDL__COMPUTE="kinds")
    assert "dags/manifest.yml --data 'my data' --publish --step train" in failed.stderr


def test_a_training_that_is_skipped_says_so(call, manifest, tmp_path):
    """Another one works in its experiment."""
    path = manifest(
        """
        import os, time
        open(os.environ["RESULT_DIR"] + "/up", "w").close()
        time.sleep(600)
        """,
        more="experiment: {name: wide, when_busy: skip}\n",
    )
    process = subprocess.Popen(
        [*CALL, "run", path], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: any(tmp_path.glob(".ddl-run/runs/small/*/result/up")), 60)
        first = run_folder(tmp_path)
        skipped = call(path)
        assert skipped.returncode == 0, skipped.stderr
        assert "Skipped, as experiment.when_busy says" in skipped.stderr
        (second,) = {*first.parent.iterdir()} - {first}
        assert "state       skipped, train" in told(second)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=within(60))


def test_ctrl_c_ends_the_ranks(manifest, tmp_path):
    path = manifest("""
        import os, time
        open(os.environ["RESULT_DIR"] + "/up-" + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
        time.sleep(600)
    """)
    process = subprocess.Popen(
        [*CALL, "run", path], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + within(60)
    while len(list(tmp_path.glob(".ddl-run/runs/small/*/result/up-*"))) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=within(60))
    assert process.returncode == -signal.SIGINT, said
    assert "state       cancelled, train cancelled" in told(run_folder(tmp_path))
    assert "Traceback" not in said and "--step train" in said
    record = run_folder(tmp_path) / "ddl" / "try-1"
    assert marked("DDL_RECORD_DIR", str(record)) == []


def test_a_run_that_is_killed_is_known_to_be_silent(manifest, tmp_path):
    """Nobody notes its end, so that its record says that it runs."""
    path = manifest("""
        import os, time
        open(os.environ["RESULT_DIR"] + "/up-" + os.environ["OMPI_COMM_WORLD_RANK"], "w").close()
        time.sleep(600)
    """)
    words = [*CALL, "run", path]
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=subprocess.DEVNULL) as run:
        until(lambda: len(list(tmp_path.glob(".ddl-run/runs/small/*/result/up-*"))) == 2, 60)
        run.kill()
    folder = run_folder(tmp_path)
    until(lambda: not marked("DDL_RECORD_DIR", str(folder / "ddl" / "try-1")), 60)
    layout = RunLayout(tmp_path / ".ddl-run", "small", folder.name)

    def state():
        return read_state(layout, read_record(layout))["state"]

    assert state() == "running"
    assert "state       running, train at work" in told(folder)
    assert set(layout.kept.glob("*beat*")) == {layout.heartbeat}
    for file in (layout.kept / "record.json", layout.heartbeat):
        os.utime(file, (time.time() - 86_400,) * 2)
    assert state() == SILENT
    assert re.search("state       no sign of life since .*, train at work", told(folder))
    # Through a step in which nothing else is written.
    os.utime(layout.heartbeat)
    assert state() == "running"
    assert "state       running, train at work" in told(folder)


def test_what_steps_say_of_a_rank_is_not_obeyed_by_a_terminal():
    raised = "rank 1 raised\n\tError: \x1b]0;title\x07 \u202e \0"
    said = logging.makeLogRecord({"levelno": logging.INFO, "msg": raised})
    assert local_run.Lines().format(said) == (
        "rank 1 raised\n\tError: \\x1b]0;title\\x07 \\u202e \\x00"
    )


def test_the_heart_of_a_run_beats_until_it_ends(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(local_run, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(local_run._log, "propagate", True)
    layout = RunLayout(tmp_path, "small", "small-1")
    with local_run._heartbeat(layout):
        until(layout.heartbeat.exists, 20)
        for _ in range(2):
            os.utime(layout.heartbeat, (1, 1))
            until(lambda: layout.heartbeat.stat().st_mtime > 1, 20)
        # Of a link, nobody's file gets another time; and what was wrong may pass.
        layout.heartbeat.unlink()
        layout.heartbeat.symlink_to(tmp_path / "other")
        until(lambda: "nobody sees that this run is at work" in caplog.text, 20)
        layout.heartbeat.unlink()
        until(layout.heartbeat.exists, 20)
    assert not (tmp_path / "other").exists()
    assert caplog.text.count("nobody sees") == 1
    until(lambda: "heartbeat" not in {thread.name for thread in threading.enumerate()}, 20)


def test_two_at_once_have_runs_of_their_own(manifest, tmp_path):
    path = manifest(
        "import os; print('training', os.environ['TRAINING_ID'])",
        more="",
    )
    both = [
        subprocess.Popen(
            [*CALL, "run", path], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [one.communicate(timeout=within(120))[1] for one in both]
    found = {text.split("rank 0 | training ")[1].split()[0] for text in said}
    assert len(found) == 2
    # Neither left a checkpoint, which transform says.
    assert all("no checkpoint" in text.splitlines()[-1] for text in said), said


def test_a_dry_run_leaves_no_run(call, manifest, tmp_path):
    path = manifest("print(1)", more="")
    done = call(path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "train | dry run | would start 2 rank(s)" in done.stderr
    assert list((tmp_path / ".ddl-run" / "runs").rglob("train.py")) == []
    path.with_name("train.py").rename(path.with_name("trian.py"))
    done = call(path, "--dry-run")
    assert done.returncode == 1 and "train.py" in done.stderr.splitlines()[-1]


def test_places_are_said_as_a_shell_and_a_person_take_them(tmp_path, monkeypatch):
    """In a folder with a space, where URIs have %20."""
    (tmp_path / "my own").mkdir()
    monkeypatch.chdir(tmp_path / "my own")
    place = (tmp_path / "my own" / ".ddl-run" / "résults").as_uri()
    assert "%20" in place
    done = {"upload_results": {"model": f"{place}/model", "lineage": "s3://b/a%20b"}, "folder": "f"}
    assert where_it_is(done) == [
        "model: .ddl-run/résults/model",
        "lineage: s3://b/a%20b",
        "logs: f/logs",
    ]


SAYS = "import os; print('by one', os.environ['PARAM_RATE'])"


def test_a_dry_run_of_steps_changes_nothing_of_the_run(call, manifest, tmp_path):
    """Else what ranks ran, and what the lineage names, would be two things."""
    path = manifest(SAYS, more="parameters: {rate: 0.5}\n")
    call(path)
    folder = run_folder(tmp_path)
    before = {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    path.with_name("train.py").write_text("print('by another')")
    every = [word for one in ("stage-data", "train") for word in ("--step", one)]
    done = call(path, "--dry-run", *every, "--set", "rate=0.75", "--set", "nodes=3")
    assert done.returncode == 0, done.stderr
    assert "would start 3 rank(s)" in done.stderr
    path.with_name("train.py").write_text("syntax error")
    done = call(path, "--dry-run", "--step", "stage-data")
    assert done.returncode == 1 and "train.py" in done.stderr.splitlines()[-1]
    assert {one: one.read_bytes() for one in folder.rglob("*") if one.is_file()} == before


def test_a_run_that_goes_on_has_the_settings_that_are_given_or_says_so(call, manifest, tmp_path):
    path = manifest(SAYS, more="parameters: {rate: 0.5}\n")
    call(path, "--set", "rate=0.25")
    done = call(path, "--step", "train", "--set", "rate=0.75")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "ddl-airflow: --set rate=0.75: the run that goes on began with rate=0.25"
    )
    done = call(path, "--step", "train", "--set", "rate=0.25", "--set", "nodes=2")
    assert "rank 0 | by one 0.25" in done.stderr, done.stderr
    anew = call(path, "--step", "stage-data", "--step", "train", "--set", "rate=0.75")
    assert "rank 0 | by one 0.75" in anew.stderr, anew.stderr
    other = call(path, "--step", "stage-data", "--set", "experiment_id=wide")
    assert other.returncode == 1
    assert "the run that goes on began with experiment_id=None" in other.stderr.splitlines()[-1]


def test_dates_are_those_of_the_start_however_a_template_asks(call, manifest, tmp_path):
    names = "{{ dag_run.run_after | ds }} {{ ds }} {{ logical_date | ts_nodash_with_tz }}"
    script = "import sys; print('dates', *sys.argv[1:])"
    done = call(manifest(script, f"'python train.py {names} {{{{ ts_nodash_with_tz }}}}'"))
    found = re.search("rank 0 \\| dates (.*)", done.stderr)
    assert found, done.stderr
    dates = found[1].split()
    assert dates[0] == dates[1] and dates[2] == dates[3] and dates[2].endswith("+0000")


def test_templates_have_here_what_a_run_in_airflow_gives_them(call, manifest):
    templates = (
        "{{ dag_run.dag_id }}",
        "{{ dag_run.conf.get('rate') }} {{ dag_run.conf.get('epochs', 'none') }}",
        "{{ dag_run.data_interval_end | ds }}",
        "{{ data_interval_start.add(days=1).to_date_string() }}",
        "{{ macros.ds_add(ds, 1) }} {{ macros.ds_format(ds, '%Y-%m-%d', '%Y') }}",
        "{{ (logical_date + macros.timedelta(days=1)) | ds }}",
    )
    command = f"python train.py {' '.join(templates)}".replace("'", "''")
    script = "import sys; print('has', *sys.argv[1:])"
    path = manifest(script, f"'{command}'", "parameters: {rate: 0.5, epochs: 3}\n")
    day = r"\d{4}-\d\d-\d\d"
    for words in (["--set", "rate=0.25"], ["--step", "train"]):
        done = call(path, *words)
        found = re.search("rank 0 \\| has (.*)", done.stderr)
        assert found, done.stderr
        pattern = rf"small 0.25 none {day} ({day}) \1 \d{{4}} \1"
        assert re.fullmatch(pattern, found[1]), found[1]


def test_a_template_that_airflow_alone_fills_in_is_named_with_its_field(call, manifest, tmp_path):
    command = "python train.py {{ macros.ds_format_locale(ds, '%Y-%m-%d', 'EEEE') }}"
    more = f'evaluation: {{metric: f1, minimum: 1, command: "{command}"}}\n'
    done = call(manifest("print('trained')", more=more))
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and "Give the command itself" not in said
    assert f"evaluation.command {command!r} cannot be filled in outside Airflow: " in said
    assert said.endswith("Trigger the DAG, or name another value.")
    assert "rank 0" not in done.stderr  # it is said before a training


def test_a_run_of_another_manifest_with_that_name_is_not_gone_on_with(
    call, manifest, tmp_path, write_manifest
):
    path = manifest(SAYS, more="parameters: {rate: 0.5}\n")
    call(path)
    other = write_manifest(tmp_path / "copy", "small", script="print('by another')")
    refused = call(other, "--step", "train")
    assert refused.returncode == 1
    assert "its runs of small are of dags/manifest.yml" in refused.stderr.splitlines()[-1]
    # The folder around all may be moved; and earlier versions did not note whose a run is.
    (note,) = tmp_path.glob(".ddl-run/runs/small/*/airflow/by-hand.json")
    said = json.loads(note.read_text())
    assert not Path(said.pop("manifest")).is_absolute()
    assert "rank 0 | by one" in call(path, "--step", "train").stderr
    note.write_text(json.dumps(said))
    assert "rank 0 | by one" in call(path, "--step", "train").stderr


def test_secrets_come_from_the_environment_and_are_nowhere_else(call, manifest, tmp_path):
    path = manifest(
        "import os; print(len(os.environ['PARAM_TOKEN']), 'characters')",
        more="parameters: {token: {secret: true, conn_id: hub}}\n",
    )
    lacks = call(path, "--step", "train")
    assert "has no run of small to go on with" in lacks.stderr
    assert not (tmp_path / ".ddl-run").exists()
    lacks = call(path)
    assert lacks.returncode == 1 and "set PARAM_TOKEN in the environment" in lacks.stderr
    said = call(path, "--set", "token=x")
    assert said.returncode == 1 and "Set PARAM_TOKEN in the environment" in said.stderr
    shutil.rmtree(tmp_path / ".ddl-run")
    canary = "canary7secretOfARun"
    given = {"PARAM_TOKEN": canary}, {"AIRFLOW_CONN_HUB": json.dumps({"password": canary})}
    for one in given:
        done = call(path, **one)
        assert "rank 0 | 19 characters" in done.stderr
        assert canary not in done.stdout + done.stderr
    kept = [one.read_bytes() for one in (tmp_path / ".ddl-run").rglob("*") if one.is_file()]
    assert len(kept) > 10 and not [text for text in kept if canary.encode() in text]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "epochs=0"], "epochs is 0, beyond the minimum 1."),
        (["--set", "epoch=2"], "Did you mean epochs?"),
        (["--set", "node=2"], "Did you mean nodes?"),
        (
            ["--set", "x=2"],
            "There is: checkpoint, epochs, experiment_id, launcher, name, nodes, rate.",
        ),
        (["--set", "name=\udcff"], "name is '\\udcff': it has the character U+DCFF, which no"),
        (["--set", f"epochs={2**64}"], f"epochs is {2**64}, wanted a whole number of at most 64"),
        (["--set", f"rate={-(2**64)}"], f"rate is {-(2**64)}, wanted a number; a whole one of at"),
        (["--set", "rate=1_0.5"], "rate is '1_0.5', wanted a number."),
        (["--set", "rate=٣.5"], "rate is '\\u0663.5', wanted a number."),
        (["--set", "rate=inf"], "rate is 'inf', wanted a number."),
        (["--set", "nodes=none"], "nodes is 'none', wanted a whole number"),
        (["--set", "nodes=²"], "nodes is '\\xb2', wanted a whole number"),
        (["--set", "checkpoint=lastest"], "checkpoint is 'lastest', wanted latest or a step"),
        (["--set", "checkpoint=05"], "checkpoint is '05', wanted latest or a step"),
        (["--set", "launcher=cluster"], "Use launcher=local."),
        (["--data", "nowhere"], "--data nowhere is no folder"),
        (["--publish"], "has a person approve each model, which only Airflow asks"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(call, manifest, tmp_path, words, said):
    more = "parameters: {epochs: {default: 2, minimum: 1}, rate: 0.1, name: a}\n"
    more += "approval: {required: true}\n"
    done = call(manifest("print(1)", more=more), *words)
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / ".ddl-run").exists()


@pytest.mark.parametrize("checkpoint", ["5", "latest"])
def test_no_checkpoint_is_chosen_for_a_transform_of_its_own(manifest, tmp_path, checkpoint):
    """Nothing would read it; Airflow's form does not have it there."""
    path = manifest("print(1)", command="python train.py ; python train.py")
    asked = Asked(tmp_path / "w", settings={"checkpoint": checkpoint})
    with pytest.raises(SettingInvalid, match=r"checkpoint is for the built-in transform.*Leave it"):
        run_manifest(load_manifest(path), path, asked)
    assert not (tmp_path / "w").exists()


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="ranks get this Python, without it")
def test_what_was_published_here_is_not_trained_again_by_a_schedule(
    call, manifest, workspace, context_of
):
    """A run by hand has settings that the trigger form leaves out, and another number of tries."""
    script = """
        import os, sys
        if sys.argv[1:]:
            import tensorflow as tf
            model = tf.Module()
            model.same = tf.function(lambda x: {"y": x}, [tf.TensorSpec([None, 1])])
            folder = os.environ["RESULT_DIR"] + "/model"
            tf.saved_model.save(model, folder, signatures=model.same)
    """
    path = manifest(script, "python train.py; python train.py export")
    done = call(path, "--publish")
    assert done.returncode == 0, done.stderr
    task = dag_from(load_manifest(path), path).get_task("stage_data")
    context = context_of("small", **task.dag.params.dump())
    context["dag_run"].run_type.value = "scheduled"
    task.render_template_fields(context)
    with pytest.raises(AirflowSkipException, match="those of small-by-hand-.* is nothing new"):
        task.execute(context)


def test_ranks_find_what_is_selected_and_unpacked(call, manifest, tmp_path):
    """And the lineage names what lies in the place: the archive, with its digest."""
    path = manifest("", more="lineage: {prove: true}\n")
    place = "source: {path: ./data}"
    text = path.read_text()
    assert place in text
    wanted = "include: ['*.zip', numbers, labels/]\n  exclude: ['*.tmp', '*.bak']\n  unpack: true"
    path.write_text(text.replace(place, f"{place}\n  {wanted}"))
    data = path.parent / "data"
    with zipfile.ZipFile(data / "of day 1.zip", "w") as archive:
        archive.writestr("a/b+ü", "4 5 6")
    (data / "numbers.tmp").write_text("half")
    staged = call(path)
    assert staged.returncode == 1
    assert "include: 'labels/' matches none of its 3 objects" in staged.stderr
    path.write_text(path.read_text().replace(", labels/", ""))
    rehearsed = call(path, "--dry-run")
    assert "has 2 files" in rehearsed.stderr and "would fetch 2" in rehearsed.stderr
    staged = call(path, "--step", "stage-data")
    assert staged.returncode == 0, staged.stderr
    assert "exclude: '*.bak' matches none" in staged.stderr
    there = {
        one.relative_to(run_folder(tmp_path) / "data").as_posix(): one.read_text()
        for one in (run_folder(tmp_path) / "data").rglob("*")
        if one.is_file() and one.name != ".complete"
    }
    assert there == {"numbers": "1 2 3", "of day 1/a/b+ü": "4 5 6"}
    part = next((tmp_path / ".ddl-run").rglob("lineage/stage_data.json"))
    listing = json.loads(part.read_text())["dataset"]["listing"]
    digest = hashlib.sha256((data / "of day 1.zip").read_bytes()).hexdigest()
    assert {one["key"]: one["sha256"] for one in listing}["of day 1.zip"] == digest
    assert len(listing) == 2
    rehearsed = call(path, "--dry-run")
    assert "would fetch 0 of them" in rehearsed.stderr


def test_a_connection_that_is_not_here_is_named(call, tmp_path, write_manifest):
    path = write_manifest(tmp_path / "dags")
    bucket = "type: s3\n  connection: {conn_id: my_s3}\n  source: {bucket: some-data}"
    text = path.read_text().replace("type: fs\n  source: {path: ./data}", bucket)
    assert "my_s3" in text
    path.write_text(text)
    done = call(path)
    assert done.returncode == 1 and "Set AIRFLOW_CONN_MY_S3" in done.stderr.splitlines()[-1]
    done = call(path, AIRFLOW_CONN_MY_S3="{canary7secret")
    assert done.returncode == 1 and "AIRFLOW_CONN_MY_S3 is no connection" in done.stderr
    assert "canary7secret" not in done.stderr


def test_connections_are_read_as_airflow_writes_them():
    said = {
        "conn_type": "ddlstore",
        "host": "http://127.0.0.1",
        "port": 9000,
        "login": "a/key",
        "password": "p@ss:word",
        "extra": {"region_name": "eu-de"},
    }
    uri = "ddlstore://a%2Fkey:p%40ss%3Aword@http%3A%2F%2F127.0.0.1:9000/?region_name=eu-de"
    told = {"AIRFLOW_CONN_J": json.dumps(said), "AIRFLOW_CONN_U": uri}
    by_json, by_uri = (connection_of_environment(one, told) for one in ("j", "u"))
    for one in (by_json, by_uri):
        assert (one.host, one.port, one.login, one.password) == (
            *("http://127.0.0.1", 9000),
            *("a/key", "p@ss:word"),
        )
        assert one.extra == {"region_name": "eu-de"} and "p@ss" not in repr(one)
        assert client_by_connection(one).meta.endpoint_url == "http://127.0.0.1:9000"
    written = Connection(conn_id="w", **{**said, "extra": json.dumps(said["extra"] | {"x": ""})})
    by_airflow = connection_of_environment("w", {"AIRFLOW_CONN_W": written.get_uri()})
    assert (by_airflow.conn_type, by_airflow.host, by_airflow.port) == (
        *("ddlstore", "http://127.0.0.1", 9000),
    )
    assert (by_airflow.login, by_airflow.password) == ("a/key", "p@ss:word")
    assert by_airflow.extra == {"region_name": "eu-de", "x": ""}
    plain = "aws://key:secret@/?endpoint_url=http://127.0.0.1:9000"
    by_hand = connection_of_environment("h", {"AIRFLOW_CONN_H": plain})
    assert (by_hand.login, by_hand.password) == ("key", "secret")
    assert by_hand.extra == {"endpoint_url": "http://127.0.0.1:9000"}
    assert connection_of_environment("k", told) is None
    with pytest.raises(ConnectionInvalid, match="AIRFLOW_CONN_K is no connection"):
        connection_of_environment("k", {"AIRFLOW_CONN_K": "nothing"})


@pytest.mark.skipif(find_spec("keras") is None, reason="ranks get this Python; it has no Keras")
def test_it_makes_the_same_model_as_the_dag(call, manifest, tmp_path, workspace, context_of):
    """Byte for byte, of a script that does the same each time."""
    path = manifest(DETERMINISTIC)
    done = call(path)
    assert done.returncode == 0, done.stderr
    *_, model, lineage, logs, loaded = done.stdout.splitlines()
    assert loaded == "airflow []"
    dag = dag_from(load_manifest(path), path)
    for task in dag.topological_sort():
        context = context_of("small")
        task.render_template_fields(context)
        places = task.execute(context)
    by_hand = tmp_path / model.removeprefix("model: ")
    by_airflow = Path(places["model"].removeprefix("file://"))
    files = sorted(p.relative_to(by_hand) for p in by_hand.rglob("*") if p.is_file())
    assert len(files) >= 3
    for name in files:
        # TensorFlow's fingerprint has a random number in it.
        if name.name != "fingerprint.pb":
            assert (by_hand / name).read_bytes() == (by_airflow / name).read_bytes(), name
    record = json.loads((tmp_path / lineage.removeprefix("lineage: ")).read_text())
    assert record["run"]["type"] == "by_hand"
    assert "apache-airflow" not in record["environment"]["versions"]
    assert (tmp_path / logs.removeprefix("logs: ") / "rank-1.log").exists()
