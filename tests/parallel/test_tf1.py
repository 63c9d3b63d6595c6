"""Scripts of TensorFlow 1 on two ranks, started as a person starts them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from tests.documents import experiment_document, wml_document

SCRIPTS = Path(__file__).resolve().parent / "scripts"
MPI_COLLECTIVES = re.findall(
    r"^@check\ndef (\w+)", (SCRIPTS / "mpi_collectives.py").read_text(), re.MULTILINE
)


def test_a_script_that_loads_the_library_by_its_old_name(ddl_run):
    ended = ddl_run("--tf1", "--np", "2", "python", SCRIPTS / "own_ops.py", DDL_STALL_TIMEOUT="60")
    first, second = ended.lines_of(0), ended.lines_of(1)
    assert first[0] == "init: [0, 2, 0, 2, 0]", ended.output
    assert second[0] == "init: [1, 2, 1, 2, 1]"
    assert first[1].startswith("starts: ") and first[1] == second[1]
    assert (first[2], second[2]) == ("local: 0.0", "local: 1.0")
    assert first[3] == second[3] == "reduced: ([0.5, 0.5, 0.5], [3.0, 3.0, 3.0])"
    assert first[4].startswith("keras: ") and first[4] == second[4]  # Keras starts its own
    # Not a wait of rank 0 for a rank that will never come: its exception ends both.
    assert ended.returncode != 0
    assert "LookupError: rank 1 ends here" in ended.output
    assert "DeadlineExceeded" not in ended.output


def test_a_script_of_the_first_powerai_gets_three_values_of_init(ddl_run):
    script = SCRIPTS / "powerai_2017.py"
    ended = ddl_run("--tf1", "--np", "2", "python", script, DDL_STALL_TIMEOUT="60")
    assert ended.returncode == 0, ended.output[-5000:]
    first, second = ended.lines_of(0), ended.lines_of(1)
    assert first[:3] == ["init: [0, 2, 0]", "later: [0, 2, 0, 2, 0]", "its own: 4 2 0"]
    assert second[:3] == ["init: [1, 2, 1]", "later: [1, 2, 1, 2, 1]", "its own: 4 2 0"]
    assert first[3].startswith("trained: ") and first[3] == second[3]


@pytest.mark.parametrize("built_by", ["threads", "main"])
def test_models_in_threads_whose_ops_have_the_same_names_are_refused(built_by, ddl_run):
    """They would be averaged with each other: another one is ready first on each rank."""
    script = SCRIPTS / "tf1_ensemble.py"
    ended = ddl_run("--np", "2", "python", script, built_by, DDL_STALL_TIMEOUT="60")
    for rank in range(2):
        for name, said in zip("ab", ended.lines_of(rank), strict=True):
            assert said.startswith(f"{name}: "), ended.output
            assert "two sessions of rank " in said, ended.output
            assert "Make each graph in a variable scope of its own" in said, ended.output


@pytest.fixture
def lines_by_keras_2(ddl_run):
    """lines_by_keras_2(script): what each of two ranks prints, where Keras 2 is."""

    def run(script):
        if importlib.util.find_spec("tf_keras") is None:
            pytest.skip("tf_keras not installed: pip install -r requirements/legacy.txt")
        words = ("--tf1", "--np", "2", "python", SCRIPTS / script)
        ended = ddl_run(*words, DDL_STALL_TIMEOUT="60")
        assert ended.returncode == 0, ended.output[-5000:]
        return [ended.lines_of(rank) for rank in range(2)]

    return run


def test_keras_of_those_days_trains_one_model_by_horovods_interface(lines_by_keras_2):
    first, second = lines_by_keras_2("horovod_tf1_keras.py")
    said = ["broadcast: 2.", "broadcast: 2.", "allreduce: numpy 0.5", "trained: 2."]
    assert [line[: len(start)] for line, start in zip(first, said, strict=True)] == said
    assert first == second and first[0] != first[1]


def test_keras_of_those_days_trains_one_model_by_ibms_examples(lines_by_keras_2):
    first, second = lines_by_keras_2("ibm_keras.py")
    own = ["tf.train", "callbacks", "loss", *["own"] * 4, "own again"]
    assert [line.partition(":")[0] for line in first] == [*own, *own, "loop"]
    assert first == second


@pytest.fixture(scope="module")
def mpi_collectives(mpirun, ddl_run):
    script = SCRIPTS / "mpi_collectives.py"
    return ddl_run("--tf1", "--np", "2", "python", script, DDL_STALL_TIMEOUT="60")


@pytest.mark.parametrize("name", MPI_COLLECTIVES)
def test_check_of_mpi_collectives_passes_on_every_rank(mpi_collectives, name):
    said = [line for rank in range(2) for line in mpi_collectives.lines_of(rank)]
    assert [line for line in said if line.startswith(f"{name}:")] == [f"{name}: ok"] * 2, (
        mpi_collectives.output
    )


def test_the_documents_experiment_trains_on_a_parameter_server(ddl_run, tmp_path, monkeypatch):
    """Document [003], as printed but for where it writes."""
    if importlib.util.find_spec("tensorflow_estimator") is None:
        pytest.skip("tensorflow_estimator not installed: pip install -r requirements/legacy.txt")
    (tmp_path / "experiment.py").write_text(experiment_document(tmp_path / "output"), "utf-8")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "output" / "irises"
    ended = ddl_run(
        *("--tf1", "--tf-config", "master=1,ps=1,worker=2", "python", "experiment.py"),
        EXPERIMENT_ID="irises",
    )
    assert ended.returncode == 0, ended.output[-5000:]
    import tensorflow as tf

    newest = tf.train.latest_checkpoint(str(folder))
    # Of all three together; each may have been in the middle of a step when it was reached.
    assert 1000 <= int(newest.rpartition("-")[2]) <= 1003
    state = [(path, path.stat().st_mtime_ns) for path in sorted(folder.glob("model.ckpt*"))]
    # A used EXPERIMENT_ID: what is there is gone on with, and it was done.
    ended = ddl_run("--tf1", "python", "experiment.py", EXPERIMENT_ID="irises")
    assert ended.returncode == 0, ended.output[-5000:]
    assert state == [(p, p.stat().st_mtime_ns) for p in sorted(folder.glob("model.ckpt*"))]
    values = {
        value.tag: value.simple_value
        for file in sorted((folder / "eval").glob("events*"))
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
    }
    # 0.5 is what not learning gives; its net of twice three units may do no better than 0.25.
    assert values["average_loss"] < 0.3, values


@pytest.mark.parametrize("own_ddl", [False, True], ids=["our ddl", "its own ddl.py"])
def test_the_documents_scripts_run_as_printed(own_ddl, ddl_run, tmp_path, monkeypatch):
    """WML's document, byte for byte: training on two ranks, the transform, then a server.

    What is transformed does not depend on whose ddl.py has trained it.
    """
    document = wml_document()
    from ddl_airflow.demo.digits import write_digits

    folders = {"DATA_DIR": tmp_path / "data", "RESULT_DIR": tmp_path / "result"}
    write_digits(folders["DATA_DIR"])
    folders["RESULT_DIR"].mkdir()
    (tmp_path / "mnist-train-ddl.py").write_text(document.train, "utf-8")
    (tmp_path / "transform.py").write_text(document.transform, "utf-8")
    if own_ddl:
        (tmp_path / "ddl.py").write_text(document.ddl, "utf-8")
    monkeypatch.chdir(tmp_path)
    environment = {name: str(folder) for name, folder in folders.items()}

    ended = ddl_run("--tf1", "--np", "2", "python", "mnist-train-ddl.py", **environment)
    assert ended.returncode == 0, ended.output
    assert ("DDL: module 0 initialized." in ended.output) == own_ddl
    accuracy = re.findall(r"DDL (\d)\] Testing Accuracy: ([0-9.]+)", ended.output)
    assert sorted(rank for rank, _ in accuracy) == ["0", "1"], ended.output
    assert accuracy[0][1] == accuracy[1][1]  # one model on both ranks
    # It learns. Its script has no seed and 24 steps, so how well it ends differs from run to run.
    for rank in (0, 1):
        losses = re.findall(rf"DDL {rank}\] Iter \d+, Minibatch Loss= ([0-9.]+)", ended.output)
        losses = [float(loss) for loss in losses]
        assert len(losses) == 24 and sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses
    assert {p.name for p in folders["RESULT_DIR"].glob("*.index")} == {
        "mnist-10.index",
        "mnist-20.index",
    }
    if own_ddl:
        return

    ended = ddl_run("--tf1", "python", "transform.py", **environment)
    assert ended.returncode == 0, ended.output
    import tensorflow as tf
    from ddl_ops import samples, serving_trial

    sample = samples.read(folders["DATA_DIR"] / "t10k-images-idx3-ubyte.gz")
    model = folders["RESULT_DIR"] / "model"
    report, warnings = serving_trial.run(model, sample, sample_was_named=True, steps=())
    assert warnings == []
    assert set(report["signatures"]) == {"predict_images", "serving_default"}
    assert report["rows"] > 300
    chosen = tf.train.load_checkpoint(str(folders["RESULT_DIR"] / "mnist-20"))
    served = tf.train.load_checkpoint(str(model / "variables" / "variables"))
    assert len(served.get_variable_to_shape_map()) == 8
    for name in served.get_variable_to_shape_map():
        assert (served.get_tensor(name) == chosen.get_tensor(name)).all(), name


def test_runs_of_sessions_that_reduce_note_the_weights(ddl_run, tmp_path) -> None:
    script = SCRIPTS / "weight_notes_tf1.py"
    environment = {"DDL_PROVE": "1", "LOG_DIR": str(tmp_path), "DDL_STALL_TIMEOUT": "60"}
    ended = ddl_run("--tf1", "--np", "2", "python", script, **environment)
    assert ended.returncode == 0, ended.output
    lines = [json.loads(line) for line in (tmp_path / "weights.jsonl").read_text().splitlines()]
    told = [line.get("tensors", line.get("step")) for line in lines]
    assert told == [["counted"], 0, 1, 2, 3, ["by_itself"], 0, 1, 2, ["monitored"], 0, 1, 2]
    notes = [line["digests"] for line in lines if "step" in line]
    # All begin at zero and take the same steps: what is averaged is 1.5 of each element.
    assert notes == [*notes[:4], *notes[:3], *notes[:3]] and len(set(notes)) == 4


def test_what_rank_0_alone_has_restored_all_ranks_begin_with(ddl_run):
    if importlib.util.find_spec("tf_keras") is None:
        pytest.skip("tf_keras not installed: pip install -r requirements/legacy.txt")
    words = ("--tf1", "--np", "2", "python", SCRIPTS / "restored_by_one.py")
    ended = ddl_run(*words, DDL_STALL_TIMEOUT="60")
    assert ended.returncode == 0, ended.output[-5000:]
    first, second = ended.lines_of(0), ended.lines_of(1)
    ways = [
        "saved",
        "before",
        "alone",
        "run",
        "callable",
        "weights alone",
        "monitored",
        "partly",
        *["fit", "again"] * 2,
    ]
    assert [line.partition(":")[0] for line in first] == ways
    assert first == second, ended.output
    told = dict(line.split(": ", 1) for line in first)
    saved = json.loads(told["saved"])
    gone_on = [json.loads(told[way]) for way in ("alone", "run", "callable", "monitored")]
    assert saved[1] == 3 and all(values[1] == 4 for values in gone_on)  # with the global step
    assert gone_on == [gone_on[0]] * 4
    said = "ddl: rank 0: the ranks began with different weights"
    assert ended.output.count(said) == 5 + 4  # and none where they were the same
