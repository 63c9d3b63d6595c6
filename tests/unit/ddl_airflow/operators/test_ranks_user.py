"""A whole run whose commands run as another user than Airflow's."""

from __future__ import annotations

import json
import os
import stat
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowFailException

from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.manifest.load import load_manifest
from ddl_airflow.lineage.record import has_part, write_part
from ddl_airflow.manifest_dag import dag_from
from ddl_airflow.operators.base import layout_of
from ddl_airflow.site import training_of
from ddl_airflow.steps.transform import Transform
from ddl_airflow.storage.filesystem import FolderStore

LOOK = """
    import json, os, sys
    def tried(work, path):
        try:
            return work(path) and "done"
        except OSError as error:
            return type(error).__name__
    def write(path):
        with open(path, "a") as file:
            return file.write("by a rank")
    def read(path):
        with open(path, "rb") as file:
            return file.read() or True
    data = os.environ["DATA_DIR"]
    told = json.loads(open(data + "/look.json").read())
    own = [os.environ[name] for name in ("RESULT_DIR", "CHECKPOINT_DIR", "EXPERIMENT_DIR",
                                         "LOG_DIR", "JOB_STATE_DIR", "MODEL_DIR")]
    root = os.path.dirname(os.environ["RESULT_DIR"])
    experiments, name = os.path.split(os.environ["EXPERIMENT_DIR"])
    seen = {
        "uid": os.getuid(),
        "data": tried(read, data + "/look.json"),
        "read": {path: tried(os.listdir if os.path.isdir(path) else read, path)
                 for path in [*told["read"], root + "/airflow", root]},
        "write": {path: tried(write, path)
                  for path in [data + "/look.json", data + "/new", root + "/new",
                               root + "/airflow/run.json", f"{experiments}/.{name}.lock"]},
        "own": {path: tried(write, path + "/written-" + sys.argv[1]) for path in own},
    }
    with open(os.environ["RESULT_DIR"] + "/seen-" + sys.argv[1], "w") as file:
        json.dump(seen, file)
"""
EVALUATE = """
    import json, os
    with open(os.environ["EVALUATION"], "w") as file:
        json.dump({"accuracy": 0.5}, file)
"""
EXPORT = """
    import os
    os.makedirs(os.environ["RESULT_DIR"] + "/model")
    open(os.environ["RESULT_DIR"] + "/model/saved_model.pb", "w").close()
"""
MORE = "evaluation: {command: python evaluate.py, metric: accuracy, minimum: 0.25}\n"


@pytest.fixture
def run(request, trainer, tmp_path, monkeypatch, write_manifest, context_of):
    """The DAG of a manifest, its context and its run's folder; its ranks run as that user."""
    workspace = trainer.place / "site" / "workspace"
    monkeypatch.setenv("AIRFLOW__DDL__WORKSPACE", str(workspace))
    monkeypatch.setenv("AIRFLOW__DDL__PYTHON", trainer.python)
    monkeypatch.setenv("AIRFLOW__DDL__RUN_RANKS_AS", trainer.name)
    umask = os.umask(getattr(request, "param", 0o022))
    trainer.place.joinpath("site").mkdir(mode=0o711)
    trainer.place.joinpath("site").chmod(0o711)
    path = write_manifest(
        tmp_path / "dags",
        "road",
        "python look.py 0 ; python export.py",
        more=MORE,
    )
    for name, script in (("look", LOOK), ("export", EXPORT), ("evaluate", EVALUATE)):
        file = path.parent / f"{name}.py"
        file.write_text(textwrap.dedent(script))
        file.chmod(0o600)
    (path.parent / "data").mkdir()
    other = RunLayout(workspace, "other", "other-1").result
    other.mkdir(parents=True)  # before ranks had a user of their own
    look = {"read": [str(other), str(workspace / "cache"), str(workspace / "runs")]}
    (path.parent / "data" / "look.json").write_text(json.dumps(look))
    monkeypatch.setattr(Transform, "_saved_model", lambda *words: {})
    context = context_of("road")
    layout = RunLayout(workspace, "road", training_of("road", context["dag_run"].run_id))
    yield dag_from(load_manifest(path), path), context, layout
    os.umask(umask)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("run", [0o022, 0o000, 0o077], indirect=True)
def test_what_ranks_of_another_user_reach(run, trainer, capsys):
    dag, context, layout = run
    for name in ("stage_data", "train", "transform", "evaluate"):
        dag.get_task(name).execute(context)
    assert "own user" not in capsys.readouterr().out
    seen = json.loads((layout.result / "seen-0").read_text())
    assert (seen["uid"], seen["data"]) == (trainer.uid, "done")
    assert set(seen["read"].values()) == {"PermissionError"}, seen
    assert set(seen["write"].values()) == {"PermissionError"}, seen
    assert set(seen["own"].values()) == {"done"}, seen
    assert (layout.result / "model" / "saved_model.pb").stat().st_uid == trainer.uid
    assert layout.evaluation.stat().st_uid == trainer.uid
    # Nobody but Airflow is let in when no step of it runs.
    assert mode(layout.root) == 0o700 and mode(layout.cache) == 0o700
    assert mode(layout.experiment) == 0o2700
    assert mode(layout.workspace) & 0o001 and mode(layout.kept) == 0o700
    (layout.workspace / "secret").write_text("of Airflow")
    os.link(layout.workspace / "secret", layout.result / "linked")
    places = dag.get_task("upload_results").execute(context)
    published = Path(places["training"].removeprefix("file://"))
    assert not (published / "linked").exists()
    assert (published / "seen-0").is_file() and (published / "experiment/written-0").is_file()


def test_the_end_of_a_step_closes_no_experiment_that_another_run_has_named(run, context_of):
    """Its ranks may be at work in it."""
    dag, context, layout = run
    for name in ("stage_data", "train"):
        dag.get_task(name).execute(context)
    other = context_of("road", experiment_id=layout.training_id)
    other["dag_run"].run_id = "other"
    dag.get_task("stage_data").execute(other)
    dag.get_task("train").execute(other)
    assert mode(layout.experiment) == 0o2770
    dag.get_task("transform").execute(context)
    assert mode(layout.experiment) == 0o2770


def test_a_run_that_is_tried_and_cleared_again_goes_on(run, context_of):
    dag, context, layout = run
    train = dag.get_task("train")
    (Path(dag.get_task("stage_data").code) / "look.py").write_text(
        "import os, sys\n"
        "for name in ('CHECKPOINT_DIR', 'EXPERIMENT_DIR'):\n"
        "    open(os.environ[name] + '/own', 'w').close()\n"
        "assert os.path.exists(os.environ['CHECKPOINT_DIR'] + '/before')\n"
    )
    dag.get_task("stage_data").execute(context)
    with pytest.raises(AirflowFailException, match="AssertionError"):
        train.execute(context_of("road", max_tries=train.retries, attempts=1))
    assert mode(layout.root) == 0o700
    (layout.checkpoints / "before").write_text("")
    train.execute(context_of("road", 2, max_tries=train.retries))
    assert has_part(layout, "train")
    with pytest.raises(AirflowFailException, match="AssertionError"):  # cleared: from its start
        train.execute(context_of("road", 3, max_tries=train.retries + 2, attempts=1))
    assert (layout.replaced / "result/checkpoints/before").exists()
    assert (layout.checkpoints / "own").exists()


@pytest.mark.parametrize("run", [0o022, 0o077], indirect=True)
def test_scripts_have_their_rights_before_ranks_that_were_left_can_reach_them(run, monkeypatch):
    """A killed train task leaves the run's folder open, and its ranks may live on."""
    dag, context, layout = run
    layout.create()
    layout.open_to_ranks()
    victim = layout.workspace / "airflow.cfg"
    victim.touch(mode=0o600)
    before, modes, replace = victim.stat(), [], Path.replace

    def swapped(path, target):
        moved = replace(path, target)
        if target == layout.code:  # what a rank would do in it as soon as it may
            modes.append(mode(layout.root))
            target.chmod(0o2770)
            (target / "evaluate.py").unlink()
            (target / "evaluate.py").symlink_to(victim)
        return moved

    monkeypatch.setattr(Path, "replace", swapped)
    with suppress(AirflowFailException):  # the script is a link by now
        dag.get_task("stage_data").execute(context)
    after = victim.stat()
    assert (after.st_mode, after.st_gid) == (before.st_mode, before.st_gid)
    assert modes == [0o700]


def test_data_that_come_meanwhile_are_there_for_the_other_user(run, context_of, monkeypatch):
    folder = Path(run[0].get_task("stage_data").code)
    path, place = folder / "manifest.yml", "source: {path: ./data}\n"
    text = path.read_text()
    assert place in text
    path.write_text(text.replace(place, f"{place}  stream: true\n"))
    dag, _, layout = dag_from(load_manifest(path), path), *run[1:]
    (folder / "data" / "sub").mkdir()
    (folder / "data" / "sub" / "more").write_text("more")
    (folder / "look.py").write_text(
        "import json, os\n"
        "from ddl_ops.data import files\n"
        "read = [open(path).read() for path in files()]\n"
        "def tried(name):\n"
        "    try:\n"
        "        open(os.path.join(os.environ['DATA_DIR'], name), 'w')\n"
        "    except OSError as error:\n"
        "        return type(error).__name__\n"
        "told = [read[1], *map(tried, ('.ddl-listing', 'sub/more', 'sub/new'))]\n"
        "open(os.environ['RESULT_DIR'] + '/told', 'w').write(json.dumps(told))\n"
    )
    get, looked = FolderStore.get, []

    def late(store, obj, path, advance):
        while obj.key != "look.json" and not list(layout.logs.glob("rank-*.log")):
            advance(0)
            time.sleep(0.01)
        looked.append(obj.key)
        return get(store, obj, path, advance)

    monkeypatch.setattr(FolderStore, "get", late)
    for name in ("stage_data", "train"):
        dag.get_task(name).execute(context_of("road"))
    refused = ["PermissionError"] * 3
    assert json.loads((layout.result / "told").read_text()) == ["more", *refused]
    assert looked == ["look.json", "sub/more"]


def test_a_user_that_is_not_there_is_named(run, monkeypatch):
    monkeypatch.setenv("AIRFLOW__DDL__RUN_RANKS_AS", "no-such-user")
    dag, context, _ = run
    with pytest.raises(AirflowFailException, match=r"no user 'no-such-user'.*run_ranks_as"):
        dag.get_task("stage_data").execute(context)


def test_files_that_neither_user_may_move_back_are_named_with_their_folder(run, monkeypatch):
    """As of Airflow's user before, in a folder where each moves its own (sticky)."""
    dag, context, layout = run
    for name in ("stage_data", "train"):
        dag.get_task(name).execute(context)
    said = {"wrote_model": True, "wrote_saved_model": False, "metrics": {}, "measurements": []}
    write_part(layout, "train", {"result": said})
    moved = layout.result / "model.of-training"
    moved.mkdir()
    os.chown(layout.result, 1, -1)
    layout.result.chmod(0o3770)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(Path, "rename", refuse)
    words = rf"{moved}, .* cannot be moved to model.* user id 0, .* user id 1 .*3770.* clear trans"
    with pytest.raises(AirflowFailException, match=f"TransformError: {words}"):
        dag.get_task("transform").execute(context)
    assert moved.is_dir()


def test_later_steps_read_the_copy_of_a_named_experiment(run, trainer, context_of):
    dag, _, _ = run
    context = context_of("road", experiment_id="wide")
    stage = dag.get_task("stage_data")
    (Path(stage.code) / "look.py").write_text(
        "import os\nopen(os.environ['EXPERIMENT_DIR'] + '/weights', 'w').close()\n"
    )
    (Path(stage.code) / "export.py").write_text(
        "import os\nassert os.listdir(os.environ['EXPERIMENT_DIR']) == ['weights']\n"
        + textwrap.dedent(EXPORT)
    )
    for name in ("stage_data", "train", "transform", "evaluate"):
        dag.get_task(name).execute(context)
    left = layout_of(context).experiment_copy
    assert (left / "weights").stat().st_uid == trainer.uid
    places = dag.get_task("upload_results").execute(context)
    assert Path(places["training"].removeprefix("file://"), "experiment/weights").exists()
