"""Scripts of TensorFlow 1 on two ranks, started as a person starts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import wml_document

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


@pytest.mark.parametrize("own_ddl", [False, True], ids=["our ddl", "its own ddl.py"])
def test_the_documents_scripts_run_as_printed(own_ddl, ddl_run, tmp_path, monkeypatch):
    """WML's document, byte for byte: training on two ranks, the transform, then a server."""
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
