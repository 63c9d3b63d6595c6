"""Checkpoints become SavedModels that predict, or an error and nothing at all.

The models are tiny but real; each checkpoint has other weights, so a prediction shows which one
was taken. TensorFlow is imported once here and once in the one fresh process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ddl_ops import saved_model, serving_export

from tests.limits import within

ROWS, FEATURES, CLASSES = 11, 6, 3
STEPS = (5, 20, 100)  # as text they would sort in another order
PIXELS = ((np.arange(ROWS * FEATURES) * 37) % 256).astype(np.uint8).reshape(ROWS, 2, 3)
BIAS = np.float32([0.1, 0.2, 0.3])


def weights(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(FEATURES, CLASSES)).astype(np.float32)


def logits(step: int) -> np.ndarray:
    return PIXELS.reshape(ROWS, FEATURES).astype(np.float32) / 255 @ weights(step) + BIAS


def softmax(values: np.ndarray) -> np.ndarray:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture(scope="module")
def tf() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow

    return tensorflow


def save_graph(
    tf: Any,
    folder: Path,
    build: Callable[[Any], None],
    values: dict[int, dict[str, np.ndarray]],
    name: str = "m",
    before_export: Callable[[], None] = lambda: None,
) -> None:
    """What a TensorFlow 1 script leaves: base graph, then checkpoints with more in them."""
    v1 = tf.compat.v1
    folder.mkdir(parents=True, exist_ok=True)
    with tf.Graph().as_default():
        build(v1)
        before_export()
        v1.train.export_meta_graph(str(folder / f"{name}_basegraph.meta"), as_text=True)
        v1.get_variable("optimizer_slot", [2], use_resource=False)
        saver = v1.train.Saver(max_to_keep=None)
        with v1.Session(config=v1.ConfigProto(allow_soft_placement=True)) as session:
            session.run(v1.global_variables_initializer())
            for step, by_name in values.items():
                for variable in v1.global_variables():
                    if variable.op.name in by_name:
                        variable.load(by_name[variable.op.name], session)
                saver.save(session, str(folder / name), global_step=step)


@contextlib.contextmanager
def control_flow_of_tensorflow_1(tf: Any) -> Iterator[None]:
    """Inside, loops and branches are made as TensorFlow 1 mode makes them."""
    tf.compat.v1.disable_control_flow_v2()
    try:
        yield
    finally:
        tf.compat.v1.enable_control_flow_v2()


def classifier(v1: Any, *, end: str = "pRes", rows: int | None = None) -> Any:
    x = v1.placeholder(v1.float32, [rows, FEATURES], name="x")
    keep = v1.placeholder_with_default(1.0, [], name="keepprob")
    with v1.device("/gpu:0"):  # the machine that serves has none
        kernel = v1.get_variable("kernel", [FEATURES, CLASSES], use_resource=False)
        bias = v1.get_variable("bias", [CLASSES], use_resource=False)
        hidden = v1.nn.dropout(v1.matmul(x, kernel), rate=1 - keep)
    return v1.identity(hidden + bias, name=end)


CLASSIFIER_VALUES = {step: {"kernel": weights(step), "bias": BIAS} for step in STEPS}


@pytest.fixture(scope="module")
def originals(tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    save_graph(tf, folder / "graph", classifier, CLASSIFIER_VALUES)
    return folder


class Bench:
    """Folders of one transform."""

    def __init__(self, root: Path) -> None:
        self.result = root / "result"
        self.data = root / "data"
        self.model = self.result / "model"
        self.report_file = root / "ddl" / "transform.json"
        self.data.mkdir()

    def add_sample(self) -> None:
        (self.data / "t10k-images-idx3-ubyte").write_bytes(idx(PIXELS))

    def run(self, *more: str) -> tuple[int, dict[str, Any]]:
        code = saved_model.main(
            [
                *("--result-dir", str(self.result), "--data-dir", str(self.data)),
                *("--export-dir", str(self.model), "--report", str(self.report_file)),
                *more,
            ]
        )
        return code, json.loads(self.report_file.read_text())

    def succeed(self, *more: str) -> dict[str, Any]:
        code, report = self.run(*more)
        assert code == 0, report
        assert (self.model / "saved_model.pb").is_file()
        assert self.leftovers() == []
        return report

    def fail(self, kind: str, *more: str) -> str:
        """Runs into an error, with and without a model of a time before, and returns it."""
        code, report = self.run(*more)
        assert (code, report["kind"]) == (3, kind), report
        assert set(report) == {"error", "kind"}
        assert not self.model.exists()
        self.result.mkdir(exist_ok=True)
        self.model.mkdir()
        (self.model / "saved_model.pb").write_bytes(b"the one before")
        assert self.run(*more)[0] == 3
        assert [path.name for path in self.model.iterdir()] == ["saved_model.pb"]
        assert (self.model / "saved_model.pb").read_bytes() == b"the one before"
        assert self.leftovers() == []
        shutil.rmtree(self.model)
        return report["error"]

    def leftovers(self) -> list[str]:
        return [p.name for p in self.result.glob(".*")] if self.result.is_dir() else []


@pytest.fixture
def empty(tmp_path: Path, tf: Any) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def bench(empty: Bench, originals: Path) -> Iterator[Bench]:
    """The classifier with checkpoints at steps 5, 20 and 100, and sample images."""
    shutil.copytree(originals / "graph", empty.result)
    empty.add_sample()
    yield empty


# --- the road ----------------------------------------------------------------------------------


def test_latest_checkpoint_is_the_newest(bench: Bench) -> None:
    (bench.data / "t10k-labels-idx1-ubyte").write_bytes(
        idx(np.append(logits(100).argmax(axis=1)[:-1], 3).astype(np.uint8))
    )
    report = bench.succeed()
    assert report["framework"] == "tensorflow-graph"
    assert report["base_graph"] == "m_basegraph.meta"
    assert (report["checkpoint"], report["checkpoint_step"]) == ("m-100", 100)
    assert report["sample"] == "t10k-images-idx3-ubyte"
    assert report["rows"] == ROWS
    prediction = report["prediction"]
    np.testing.assert_allclose(prediction["logits"], logits(100)[:8], rtol=1e-4)
    np.testing.assert_allclose(prediction["scores"], softmax(logits(100))[:8], rtol=1e-4)
    assert prediction["class_index"] == logits(100).argmax(axis=1)[:8].tolist()
    assert report["labels"] == prediction["class_index"]
    assert report["accuracy"] == pytest.approx((ROWS - 1) / ROWS, abs=1e-6)
    assert report["warnings"] == []


def saved_last(bench: Bench, name: str) -> None:
    """The checkpoint of step 20 under this name, as if it had been saved last."""
    for path in list(bench.result.glob("m-20.*")):
        path.rename(bench.result / path.name.replace("m-20", name))
    index = bench.result / f"{name}.index"
    at = (bench.result / "m-100.index").stat().st_mtime + 100
    os.utime(index, (at, at))
    (bench.result / "checkpoint").write_text(f'model_checkpoint_path: "{name}"\n')


def test_the_last_checkpoint_may_have_no_step(bench: Bench) -> None:
    saved_last(bench, "m")
    report = bench.succeed()
    assert (report["checkpoint"], report["checkpoint_step"]) == ("m", None)
    np.testing.assert_allclose(report["prediction"]["logits"], logits(20)[:8], rtol=1e-4)
    assert report["warnings"] == []


def test_a_step_below_that_of_an_earlier_try_is_taken_with_a_warning(bench: Bench) -> None:
    saved_last(bench, "m-40")
    report = bench.succeed()
    assert (report["checkpoint"], report["checkpoint_step"]) == ("m-40", 40)
    (warning,) = report["warnings"]
    assert warning.startswith("m-40 was taken, the newest; 100 is a higher step")
    for meant in ("5", "40"):
        assert bench.succeed("--checkpoint", meant)["warnings"] == []


def test_signatures_are_those_that_servers_of_2018_know(bench: Bench, tf: Any) -> None:
    report = bench.succeed()
    images = {"dtype": "float32", "shape": [None, FEATURES]}
    classes = {"dtype": "int64", "shape": [None]}
    scores = {"dtype": "float32", "shape": [None, CLASSES]}
    assert report["signatures"] == {
        "predict_images": {
            "inputs": {"images": images},
            "outputs": {"class_index": classes, "scores": scores, "logits": scores},
        },
        "serving_default": {
            "inputs": {"inputs": images},
            "outputs": {"classes": classes, "scores": scores},
        },
    }
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(bench.model))
        methods = {name: s.method_name for name, s in meta.signature_def.items()}
        assert methods["predict_images"] == "tensorflow/serving/predict"
        assert methods["serving_default"] == "tensorflow/serving/classify"
        assert not {node.device for node in meta.graph_def.node} - {""}


def test_files_are_listed_with_their_digests(bench: Bench) -> None:
    listed = {file["path"]: file for file in bench.succeed()["files"]}
    found = [path for path in bench.model.rglob("*") if path.is_file()]
    assert {str(path.relative_to(bench.model)) for path in found} == set(listed)
    assert "variables/variables.index" in listed
    for path in found:
        entry = listed[str(path.relative_to(bench.model))]
        assert entry["size"] == path.stat().st_size
        assert entry["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_chosen_step_gives_that_steps_weights(bench: Bench) -> None:
    report = bench.succeed("--checkpoint", "20")
    assert report["checkpoint_step"] == 20
    np.testing.assert_allclose(report["prediction"]["logits"], logits(20)[:8], rtol=1e-4)


@pytest.mark.parametrize("left_by", ["a folder where each moves its own", "a try that could not"])
def test_a_model_of_another_user_that_is_not_to_be_moved_is_named(trainer, left_by: str) -> None:
    """As of tries before `run_ranks_as` was set: it was a traceback."""
    result = trainer.place / "result"
    model, partial = result / "model", result / ".model.partial"
    for folder in (result, model, result / ".model.old"):
        folder.mkdir()
        (folder / "saved_model.pb").touch()
    sticky = left_by == "a folder where each moves its own"
    result.chmod(0o1777 if sticky else 0o777)
    if sticky:
        shutil.rmtree(result / ".model.old")
    said = rf"{model} cannot be moved to .model.old.*user id 0.*user id {trainer.uid}\. Remove"
    with trainer.acting():
        partial.mkdir()
        with pytest.raises(saved_model.NotMoved, match=said):
            saved_model._publish(partial, model)
    assert (model / "saved_model.pb").exists()


def test_a_new_model_replaces_the_one_before_whole(bench: Bench) -> None:
    bench.succeed("--checkpoint", "5")
    (bench.model / "of_the_first").touch()
    report = bench.succeed("--checkpoint", "20")
    np.testing.assert_allclose(report["prediction"]["logits"], logits(20)[:8], rtol=1e-4)
    assert not (bench.model / "of_the_first").exists()


def test_what_a_killed_try_left_is_in_nobodys_way(bench: Bench) -> None:
    for name in (".model.partial", ".model.old"):
        (bench.result / name).mkdir()
        (bench.result / name / "saved_model.pb").touch()
    bench.succeed()


def test_names_of_the_manifest_are_names_of_the_signature(bench: Bench) -> None:
    report = bench.succeed("--input", "pixels=x", "--output", "votes=pRes:0")
    predict = report["signatures"]["predict_images"]
    assert set(predict["inputs"]) == {"pixels"}
    assert set(predict["outputs"]) == {"class_index", "scores", "votes"}
    assert set(report["signatures"]["serving_default"]["inputs"]) == {"inputs"}


# --- checkpoints -------------------------------------------------------------------------------


def test_missing_step_lists_those_there_are(bench: Bench) -> None:
    error = bench.fail("CheckpointMissing", "--checkpoint", "30")
    assert "no checkpoint at step 30; there are: 5, 20, 100" in error
    assert "transform.checkpoint" in error


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[10] ^= 0xFF
    path.write_bytes(content)


DAMAGES = [
    pytest.param("m-100.data-00000-of-00001", Path.unlink, id="no data"),
    pytest.param("m-100.data-00000-of-00001", cut_short, id="data cut short"),
    pytest.param("m-100.data-00000-of-00001", flip_a_byte, id="data damaged"),
    pytest.param("m-100.index", cut_short, id="index cut short"),
    pytest.param("m-100.index", lambda path: path.write_bytes(b""), id="index empty"),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_latest_falls_back_to_the_newest_that_is_whole(
    bench: Bench, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    damage(bench.result / name)
    report = bench.succeed()
    assert report["checkpoint_step"] == 20
    np.testing.assert_allclose(report["prediction"]["logits"], logits(20)[:8], rtol=1e-4)
    (warning,) = report["warnings"]
    assert warning.startswith("m-100 was skipped: ")
    assert warning.endswith("; used m-20")
    assert f"warning: {warning}" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_chosen_step_that_is_damaged_is_not_replaced_by_another(
    bench: Bench, name: str, damage: Callable[[Path], None]
) -> None:
    damage(bench.result / name)
    error = bench.fail("CheckpointMissing", "--checkpoint", "100")
    assert "no checkpoint can be read (m-100: " in error


def test_all_damaged_names_each(bench: Bench) -> None:
    for path in bench.result.glob("m-*.data-*"):
        cut_short(path)
    error = bench.fail("CheckpointMissing")
    assert all(f"m-{step}: " in error for step in STEPS)


def test_times_of_a_copy_are_warned_of(bench: Bench) -> None:
    (bench.result / "checkpoint").unlink(missing_ok=True)
    for number, step in enumerate((100, 20, 5)):
        os.utime(bench.result / f"m-{step}.index", (1000 + 10 * number,) * 2)
    report = bench.succeed()
    assert report["checkpoint_step"] == 100
    assert report["warnings"] == [
        "m-100 was taken, which has the highest step; m-5 has the latest time, but the times are "
        "not in the order of a training, as of files that were copied. Set transform.checkpoint to "
        "the step that is meant."
    ]
    for meant in ("5", "100"):
        assert bench.succeed("--checkpoint", meant)["warnings"] == []


def test_nothing_trained(empty: Bench) -> None:
    empty.result.mkdir()
    assert "no checkpoint; found nothing" in empty.fail("CheckpointMissing")


def test_checkpoint_of_another_model(bench: Bench, tf: Any) -> None:
    def wider(v1: Any) -> None:
        v1.get_variable("kernel", [FEATURES, CLASSES + 1], use_resource=False)

    save_graph(tf, bench.result / "other", wider, {100: {}})
    for path in bench.result.glob("m-*"):
        path.unlink()
    for path in (bench.result / "other").glob("m-100.*"):
        path.rename(bench.result / path.name)
    error = bench.fail("TransformError")
    assert "m-100 does not fit m_basegraph.meta" in error
    assert "kernel [6, 3] (there: [6, 4])" in error
    assert "bias [3] (there: missing)" in error


# --- finding input and output ------------------------------------------------------------------


def test_two_placeholders_are_listed(empty: Bench, tf: Any) -> None:
    def build(v1: Any) -> None:
        classifier(v1)
        v1.placeholder(v1.int64, [None], name="y")

    save_graph(tf, empty.result, build, CLASSIFIER_VALUES)
    error = empty.fail("TransformError")
    assert "candidates: x:0 [n, 6], y:0 [n]" in error
    assert 'transform.inputs: {images: "<tensor>:0"}' in error
    # Naming the output is enough: it does not depend on y.
    assert empty.succeed("--output", "logits=pRes:0")["checkpoint_step"] == 100


def test_two_ends_are_listed(empty: Bench, tf: Any) -> None:
    def build(v1: Any) -> None:
        v1.nn.softmax(classifier(v1, end="pRes") * 2.0, name="other")
        v1.identity(v1.get_default_graph().get_tensor_by_name("pRes:0"), name="wanted")

    save_graph(tf, empty.result, build, CLASSIFIER_VALUES)
    error = empty.fail("TransformError")
    assert "other:0 [n, 3]" in error
    assert "wanted:0 [n, 3]" in error
    assert 'transform.outputs: {logits: "<tensor>:0"}' in error


@pytest.mark.parametrize(
    ("shape", "listed"),
    [([-1, 2, 3, 1], "[n, 2, 3, 1]"), ([-1, 2, 3], "[n, 2, 3]")],
)
def test_an_end_beside_one_of_another_rank_is_not_taken_by_itself(
    empty: Bench, tf: Any, shape: list[int], listed: str
) -> None:
    """As of an autoencoder, whose pictures are meant and not the code that nothing reads."""

    def build(v1: Any) -> None:
        v1.reshape(v1.concat([classifier(v1, end="raw")] * 2, 1), shape, name="pRes")
        raw = v1.get_default_graph().get_tensor_by_name("raw:0")
        v1.identity(raw * 2.0, name="code")
        v1.reduce_mean(raw, name="mean")

    save_graph(tf, empty.result, build, CLASSIFIER_VALUES)
    error = empty.fail("TransformError")
    assert "2 float tensors at the end of the graph, candidates: " in error
    assert f"pRes:0 {listed}" in error and "code:0 [n, 3]" in error and "mean:0" not in error
    assert empty.succeed("--output", "images=pRes:0")["checkpoint_step"] == 100


def recurrent(v1: Any) -> tuple[Any, Any]:
    """Outputs [8, 2, 3] and last state [8, 3] of an RNN as dynamic_rnn() gives them."""

    class Cell:
        state_size = output_size = CLASSES
        zero_state = None  # asked for, and not called

        def __call__(self, row: Any, state: Any, scope: Any = None) -> tuple[Any, Any]:
            kernel = v1.get_variable("kernel", [FEATURES, CLASSES], use_resource=False)
            state = v1.tanh(v1.matmul(v1.concat([row, state], 1), kernel))
            return state, state

    rows = v1.reshape(v1.placeholder(v1.float32, [8, FEATURES], name="x"), [8, 2, 3])
    outputs, state = v1.nn.dynamic_rnn(Cell(), rows, initial_state=v1.zeros([8, CLASSES]))
    return outputs, state


def test_a_last_state_that_a_tagger_leaves_over_is_not_taken(empty: Bench, tf: Any) -> None:
    def build(v1: Any) -> None:
        outputs, _ = recurrent(v1)
        kernel = v1.get_variable("top", [CLASSES, CLASSES], use_resource=False)
        v1.tensordot(outputs, kernel, 1, name="pRes")

    with control_flow_of_tensorflow_1(tf):
        save_graph(tf, empty.result, build, {100: {}})
    error = empty.fail("TransformError")
    assert "2 float tensors at the end of the graph, candidates: " in error
    assert "pRes:0 [8, 2, 3], rnn/while/Exit_3:0 [8, 3]" in error


def of_an_rnn(v1: Any) -> Any:
    _, state = recurrent(v1)
    return v1.matmul(state, v1.get_variable("top", [CLASSES, CLASSES], use_resource=False))


def beside_a_resized_picture(v1: Any) -> Any:
    end = classifier(v1, end="raw")
    x = v1.get_default_graph().get_tensor_by_name("x:0")
    v1.image.resize_bilinear(v1.reshape(x, [-1, 2, 3, 1]), [4, 6])
    return end


def beside_features(v1: Any) -> Any:
    raw = classifier(v1, end="raw")
    v1.reshape(raw, [-1, 3, 1])
    return v1.matmul(raw, v1.get_variable("top", [CLASSES, CLASSES], use_resource=False))


def beside_what_python_computes(v1: Any) -> Any:
    raw = classifier(v1, end="raw")
    v1.py_func(np.sort, [raw], v1.float32)
    return raw


def beside_a_confidence(v1: Any) -> Any:
    scores = v1.nn.softmax(classifier(v1, end="raw"))
    v1.reduce_max(scores, 1)
    return scores


def as_scores_beside_a_map(v1: Any) -> Any:
    raw = classifier(v1, end="raw")
    v1.reshape(raw, [-1, 3, 1])
    return v1.nn.log_softmax(raw)


@pytest.mark.parametrize(
    "end",
    [
        of_an_rnn,
        beside_a_resized_picture,
        beside_features,
        beside_what_python_computes,
        beside_a_confidence,
        as_scores_beside_a_map,
    ],
)
def test_what_lies_on_the_way_to_a_classifier_or_aside_is_no_other_output(
    empty: Bench, tf: Any, end: Callable[[Any], Any]
) -> None:
    with control_flow_of_tensorflow_1(tf):
        save_graph(tf, empty.result, lambda v1: v1.identity(end(v1), name="pRes"), {100: {}})
    outputs = empty.succeed()["signatures"]["predict_images"]["outputs"]
    assert {"class_index", "scores"} <= set(outputs)


def test_what_layers_leave_over_is_no_end(empty: Bench, tf: Any) -> None:
    """A normalization's averages, and what a branch gets that is not taken."""

    def build(v1: Any) -> None:
        x = v1.placeholder(v1.float32, [None, FEATURES], name="x")
        training = v1.placeholder_with_default(False, [], name="training")
        kernel = v1.get_variable("kernel", [FEATURES, CLASSES], use_resource=False)
        mean = v1.get_variable("mean", [1], use_resource=False)
        rows = v1.reshape(x, [-1, 2, 3, 1])
        rows, now, _ = v1.nn.fused_batch_norm(rows, [1.0], [0.0], is_training=True)
        v1.assign_sub(mean, now)
        v1.assign_add(v1.get_variable("seen", [1, 6], use_resource=False), x[:1])
        rows = v1.cond(training, lambda: v1.nn.dropout(rows, rate=0.5), lambda: rows + 0.0)
        v1.matmul(v1.reshape(rows, [-1, FEATURES]), kernel, name="pRes")

    with control_flow_of_tensorflow_1(tf):
        save_graph(tf, empty.result, build, {100: {"kernel": weights(100)}})
    outputs = empty.succeed()["signatures"]["predict_images"]["outputs"]
    assert set(outputs) == {"class_index", "scores", "logits"}


def test_an_output_that_only_argmax_reads_has_to_be_named(empty: Bench, tf: Any) -> None:
    save_graph(
        tf, empty.result, lambda v1: v1.argmax(classifier(v1), 1, name="best"), CLASSIFIER_VALUES
    )
    assert "no float [n, k] tensor at the end" in empty.fail("TransformError")
    empty.succeed("--output", "logits=pRes:0")


def test_a_name_that_is_not_there_comes_with_those_near_it(bench: Bench) -> None:
    error = bench.fail("TransformError", "--output", "logits=pres:0")
    assert "no tensor pres:0 (transform.outputs). Near it: pRes:0" in error
    assert "Placeholders: x:0" in bench.fail("TransformError", "--input", "images=x:1")


def test_an_input_that_nobody_would_feed(empty: Bench, tf: Any) -> None:
    def build(v1: Any) -> None:
        v1.identity(classifier(v1, end="raw") * v1.placeholder(v1.float32, [], name="t"), "pRes")

    save_graph(tf, empty.result, build, CLASSIFIER_VALUES)
    error = empty.fail("TransformError", "--input", "images=x:0")
    assert "pRes:0 also needs t:0" in error
    assert "tf.placeholder_with_default" in error


def test_an_end_in_softmax_is_scores_and_has_no_logits(empty: Bench, tf: Any) -> None:
    save_graph(tf, empty.result, lambda v1: v1.nn.softmax(classifier(v1)), CLASSIFIER_VALUES)
    empty.add_sample()
    report = empty.succeed()
    assert set(report["prediction"]) == {"class_index", "scores"}
    np.testing.assert_allclose(report["prediction"]["scores"], softmax(logits(100))[:8], rtol=1e-4)


def test_one_number_per_row_is_no_classifier(empty: Bench, tf: Any) -> None:
    def build(v1: Any) -> None:
        x = v1.placeholder(v1.float32, [None, FEATURES], name="x")
        v1.matmul(x, v1.get_variable("kernel", [FEATURES, 1], use_resource=True))

    kernel = np.arange(FEATURES, dtype=np.float32)[:, None]
    save_graph(tf, empty.result, build, {1: {"kernel": kernel}})
    empty.add_sample()
    report = empty.succeed()
    for signature in report["signatures"].values():
        assert set(signature["outputs"]) == {"outputs"}
    expected = PIXELS.reshape(ROWS, FEATURES) / 255 @ kernel
    np.testing.assert_allclose(report["prediction"]["outputs"], expected[:8], rtol=1e-4)


def test_a_fixed_batch_is_filled(empty: Bench, tf: Any) -> None:
    save_graph(tf, empty.result, lambda v1: classifier(v1, rows=4), CLASSIFIER_VALUES)
    empty.add_sample()
    labels = logits(100).argmax(axis=1).astype(np.uint8)
    (empty.data / "t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    report = empty.succeed()
    assert (report["rows"], report["accuracy"]) == (ROWS, 1.0)
    np.testing.assert_allclose(report["prediction"]["logits"], logits(100)[:8], rtol=1e-4)


# --- files that the graph reads ----------------------------------------------------------------


def reads_words(path: str, computed: bool = False) -> Callable[[Any], None]:
    """A graph that looks words up in a file of one word a line, with one row of weights each."""

    def build(v1: Any) -> None:
        name = v1.strings.join([path]) if computed else path
        words = v1.placeholder(v1.string, [None], name="words")
        initializer = v1.lookup.TextFileInitializer(
            *(name, v1.string, v1.lookup.TextFileIndex.WHOLE_LINE),
            *(v1.int64, v1.lookup.TextFileIndex.LINE_NUMBER),
        )
        rows = v1.lookup.StaticVocabularyTable(initializer, 1).lookup(words)
        kernel = v1.get_variable("kernel", [FEATURES, CLASSES], use_resource=False)
        v1.gather(kernel, rows, name="pRes")

    return build


WORDS = ("cat", "dog", "cow", "hen", "pig")


def write_words(path: Path) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(WORDS) + "\n")
    return path.read_bytes()


def assert_knows_words(tf: Any, bench: Bench) -> None:
    """Elsewhere, where neither data nor results of the training are."""
    elsewhere = bench.result.parent / "elsewhere"
    bench.model.rename(elsewhere)
    shutil.rmtree(bench.data)
    shutil.rmtree(bench.result)
    served = tf.saved_model.load(str(elsewhere)).signatures["predict_images"]
    found = served(images=tf.constant(["unheard", *WORDS]))["logits"].numpy()
    np.testing.assert_allclose(found, weights(100)[[5, 0, 1, 2, 3, 4]])


def test_a_vocabulary_goes_with_the_model(empty: Bench, tf: Any) -> None:
    vocabulary = empty.data / "en" / "words.txt"
    content = write_words(empty.data / "of_the_cache")
    vocabulary.parent.mkdir()
    vocabulary.symlink_to("../of_the_cache")  # as staged data is
    save_graph(tf, empty.result, reads_words(str(vocabulary)), CLASSIFIER_VALUES)
    np.save(empty.data / "sample.npy", np.array(["dog", "unheard"]))
    report = empty.succeed()
    assert report["warnings"] == []
    np.testing.assert_allclose(report["prediction"]["logits"], weights(100)[[1, 5]])
    listed = {file["path"]: file["sha256"] for file in report["files"]}
    assert listed["assets/words.txt"] == hashlib.sha256(content).hexdigest()
    assert not (empty.model / "assets" / "words.txt").is_symlink()
    assert_knows_words(tf, empty)


def test_two_vocabularies_of_one_name_go_with_the_model(empty: Bench, tf: Any) -> None:
    write_words(empty.data / "en" / "words.txt")
    (empty.data / "de").mkdir()
    (empty.data / "de" / "words.txt").write_text("Kuh\n")

    def build(v1: Any) -> None:
        reads_words(str(empty.data / "en" / "words.txt"))(v1)
        with v1.variable_scope("other"):
            reads_words(str(empty.data / "de" / "words.txt"))(v1)

    save_graph(tf, empty.result, build, CLASSIFIER_VALUES)
    report = empty.succeed("--output", "logits=pRes:0")
    assert sum(file["path"].startswith("assets/") for file in report["files"]) == 2
    assert_knows_words(tf, empty)


def test_a_vocabulary_is_found_where_the_data_is_now(empty: Bench, tf: Any) -> None:
    there = "/of/another/host/data/en/words.txt"
    save_graph(tf, empty.result, reads_words(there), CLASSIFIER_VALUES)
    (empty.data / "words.txt").write_text("of another language\n")
    write_words(empty.data / "en" / "words.txt")
    report = empty.succeed()
    assert report["warnings"][0] == (
        f"m_basegraph.meta reads {there}, which is not here: took "
        f"{empty.data / 'en' / 'words.txt'} in its place"
    )
    assert_knows_words(tf, empty)


def test_a_vocabulary_that_is_gone_is_named(empty: Bench, tf: Any) -> None:
    gone = "/of/another/host/data/en/words.txt"
    save_graph(tf, empty.result, reads_words(gone), CLASSIFIER_VALUES)
    error = empty.fail("TransformError")
    assert f"m_basegraph.meta: reads {gone}, which is not here" in error
    assert "$DATA_DIR or $RESULT_DIR" in error


def test_a_vocabulary_whose_name_is_computed_is_refused(empty: Bench, tf: Any) -> None:
    path = empty.data / "words.txt"
    write_words(path)
    save_graph(tf, empty.result, reads_words(str(path), computed=True), CLASSIFIER_VALUES)
    error = empty.fail("TransformError")
    assert "m_basegraph.meta: StringJoin computes the name of a file" in error
    assert "as a Python string" in error


def test_a_vocabulary_that_no_collection_lists_goes_with_the_model(empty: Bench, tf: Any) -> None:
    write_words(empty.data / "words.txt")
    save_graph(tf, empty.result, reads_words(str(empty.data / "words.txt")), CLASSIFIER_VALUES)
    meta = empty.result / "m_basegraph.meta"
    text = meta.read_text()
    assert 'key: "asset_filepaths"' in text
    meta.write_text(text.replace('key: "asset_filepaths"', 'key: "of_no_use"'))
    empty.succeed()
    assert_knows_words(tf, empty)


# --- models that must not be published ---------------------------------------------------------


def test_nan_is_rejected(empty: Bench, tf: Any) -> None:
    broken = weights(2)
    broken[0, 1] = np.nan
    values = {1: {"kernel": weights(1), "bias": BIAS}, 2: {"kernel": broken, "bias": BIAS}}
    save_graph(tf, empty.result, classifier, values)
    empty.add_sample()
    error = empty.fail("ModelRejected")
    assert "values of logits are not finite" in error
    assert "earlier step (kept: 1, 2)" in error
    assert empty.succeed("--checkpoint", "1")["checkpoint_step"] == 1


def test_a_model_that_answers_differently_each_time_is_rejected(empty: Bench, tf: Any) -> None:
    def build(v1: Any) -> None:
        scores = classifier(v1, end="raw")
        v1.identity(scores + v1.random_normal([CLASSES]), name="pRes")

    save_graph(tf, empty.result, build, CLASSIFIER_VALUES)
    empty.add_sample()
    assert "predict_images and serving_default disagree" in empty.fail("ModelRejected")


def test_a_model_that_fails_on_the_sample_is_rejected(empty: Bench, tf: Any) -> None:
    def build(v1: Any) -> None:
        scores = classifier(v1, end="raw")
        with v1.control_dependencies([v1.debugging.Assert(scores[0, 0] > 1e9, ["too small"])]):
            v1.identity(scores, name="pRes")

    save_graph(tf, empty.result, build, CLASSIFIER_VALUES)
    empty.add_sample()
    error = empty.fail("ModelRejected")
    assert "the reloaded model fails on t10k-images-idx3-ubyte: assertion failed: [too sm" in error


def test_a_file_that_is_no_meta_graph(bench: Bench) -> None:
    (bench.result / "m_basegraph.meta").write_bytes(b"\xff\x00 not a graph")
    assert "m_basegraph.meta: not a meta graph" in bench.fail("TransformError")


def test_a_variable_that_a_partial_saver_leaves_out_is_named(bench: Bench, tf: Any) -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        classifier(v1)
        v1.get_variable("scale", [2], use_resource=True)
        some = [one for one in v1.global_variables() if one.op.name == "kernel"]
        saver = v1.train.Saver(some)
        saver.export_meta_graph(str(bench.result / "m_basegraph.meta"))
    error = bench.fail("TransformError")
    assert "m_basegraph.meta: m-100 gives no value to bias, scale" in error
    assert "tf.train.export_meta_graph" in error and "MiB" not in error


def test_a_full_disk_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_model.serving_export, "export", full)
    error = bench.fail("TransformError")
    assert "no model was written ([Errno 28] No space left on device)" in error
    assert "MiB are free" in error


# --- samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "accuracy", "why"),
    [
        (logits(100).argmax(axis=1), 1.0, ""),
        (np.eye(CLASSES)[(logits(100).argmax(axis=1) + 1) % CLASSES], 0.0, ""),
        (np.zeros(ROWS - 1), None, "sample digits.npz has 10 labels for 11 rows"),
        (
            np.full(ROWS, 0.5),
            None,
            r"sample digits.npz: labels of float64 \[11\] are neither whole",
        ),
    ],
)
def test_a_sample_has_its_labels_with_it(
    bench: Bench, labels: Any, accuracy: Any, why: str
) -> None:
    """As Keras's mnist.npz has them; what was trained on is not asked."""
    trained_on = {"x_train": PIXELS[:1], "y_train": np.uint8([0])}
    np.savez(bench.data / "digits.npz", x_test=PIXELS, y_test=labels, **trained_on)
    report = bench.succeed("--sample", "digits.npz")
    assert (report["accuracy"], report["sample"]) == (accuracy, "digits.npz")
    assert re.match(why, report["no_accuracy"]) and bool(why) is (accuracy is None)
    assert [w for w in report["warnings"] if "accuracy was not measured: " in w] == (
        [f"accuracy was not measured: {report['no_accuracy']}"] if why else []
    )
    assert report["rows"] == (8 if why else ROWS)


def test_without_a_sample_zeros_and_a_warning(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.data / "t10k-images-idx3-ubyte").unlink()
    report = bench.succeed()
    assert report["sample"] is None
    np.testing.assert_allclose(report["prediction"]["logits"], [BIAS], rtol=1e-5)
    assert "no real input to try the model on" in report["warnings"][0]
    assert "warning: no real input" in capsys.readouterr().out


def test_a_usual_file_of_another_shape_is_not_taken(bench: Bench) -> None:
    (bench.data / "t10k-images-idx3-ubyte").write_bytes(idx(PIXELS[:, :, :2]))
    report = bench.succeed()
    assert report["sample"] is None
    assert "rows of shape [2, 2] for an input of [6]" in report["warnings"][0]


def test_a_named_sample_has_to_be_there_and_to_fit(bench: Bench) -> None:
    assert "sample absent.npy: not in " in bench.fail("TransformError", "--sample", "absent.npy")
    np.save(bench.data / "wide.npy", np.zeros((4, 7), np.float32))
    error = bench.fail("TransformError", "--sample", "wide.npy")
    assert "rows of shape [7] for an input of [6]" in error


def test_a_named_sample_may_lie_with_the_results(bench: Bench) -> None:
    rows = np.linspace(-1, 1, 3 * FEATURES, dtype=np.float32).reshape(3, FEATURES)
    np.savez(bench.result / "held_out.npz", images=rows, other=rows * 0)
    report = bench.succeed("--sample", "held_out.npz")
    assert report["sample"] == "held_out.npz"
    np.testing.assert_allclose(
        report["prediction"]["logits"], rows @ weights(100) + BIAS, rtol=1e-4, atol=1e-6
    )


# --- Keras -------------------------------------------------------------------------------------


def keras_model(seed: int, activation: str | None = "softmax") -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.Input((2, 3, 1), name="pixels"),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES, activation=activation, name="last"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    model.set_weights([weights(seed), BIAS])
    return model


def save_keras(path: Path, model: Any, written: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(path)
    os.utime(path, (written, written))


def test_keras_newest_file_wins_and_knows_its_epoch(empty: Bench) -> None:
    for epoch in (1, 2):
        model = keras_model(epoch)
        save_keras(empty.result / "checkpoints" / f"model-{epoch}.keras", model, 1000 + epoch)
    save_keras(empty.result / "model.keras", model, 2000)
    empty.add_sample()
    report = empty.succeed()
    assert report["framework"] == "keras"
    assert report["base_graph"] is None
    assert (report["checkpoint"], report["checkpoint_step"]) == ("model.keras", 2)
    assert report["signatures"] == {
        "predict_images": {
            "inputs": {"images": {"dtype": "float32", "shape": [None, 2, 3, 1]}},
            "outputs": {
                "class_index": {"dtype": "int64", "shape": [None]},
                "scores": {"dtype": "float32", "shape": [None, CLASSES]},
            },
        },
        "serving_default": {
            "inputs": {"inputs": {"dtype": "float32", "shape": [None, 2, 3, 1]}},
            "outputs": {
                "classes": {"dtype": "int64", "shape": [None]},
                "scores": {"dtype": "float32", "shape": [None, CLASSES]},
            },
        },
    }
    np.testing.assert_allclose(report["prediction"]["scores"], softmax(logits(2))[:8], rtol=1e-4)

    earlier = empty.succeed("--checkpoint", "1")
    assert earlier["checkpoint"] == "checkpoints/model-1.keras"
    np.testing.assert_allclose(earlier["prediction"]["scores"], softmax(logits(1))[:8], rtol=1e-4)


def test_keras_files_of_several_models_are_warned_of(empty: Bench) -> None:
    save_keras(empty.result / "generator.keras", keras_model(1), 1000)
    save_keras(empty.result / "discriminator.keras", keras_model(2), 2000)
    report = empty.succeed()
    assert report["checkpoint"] == "discriminator.keras"
    warning = report["warnings"][0]
    assert "discriminator, generator" in warning and "took discriminator.keras" in warning


def test_keras_file_cut_short_is_skipped(empty: Bench) -> None:
    for epoch in (1, 2):
        path = empty.result / f"model-{epoch}.keras"
        save_keras(path, keras_model(epoch, activation=None), 1000 + epoch)
    path.write_bytes(path.read_bytes()[:-100])
    os.utime(path, (5000, 5000))
    empty.add_sample()
    report = empty.succeed()
    assert report["checkpoint_step"] == 1
    assert report["warnings"][0].startswith("model-2.keras was skipped: ")
    np.testing.assert_allclose(report["prediction"]["logits"], logits(1)[:8], rtol=1e-4)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_keras_models_that_diverged_are_rejected(empty: Bench, policy: str, value: float) -> None:
    import keras

    last = keras.layers.Dense(CLASSES, activation=None, dtype=policy)
    model = keras.Sequential([keras.Input((2, 3, 1)), keras.layers.Flatten(), last])
    model.set_weights([np.full_like(weights(1), value), BIAS])
    save_keras(empty.result / "model-1.keras", model, 1000)
    assert "are not finite. The training diverged" in empty.fail("ModelRejected")


def test_keras_models_in_bfloat16_predict(empty: Bench) -> None:
    import keras

    last = keras.layers.Dense(CLASSES, activation=None, dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((2, 3, 1)), keras.layers.Flatten(), last])
    save_keras(empty.result / "model-1.keras", model, 1000)
    empty.add_sample()
    report = empty.succeed()
    outputs = report["signatures"]["predict_images"]["outputs"]
    assert outputs["scores"]["dtype"] == "bfloat16"


def test_keras_names_of_the_manifest(empty: Bench) -> None:
    save_keras(empty.result / "model-1.keras", keras_model(1), 1000)
    report = empty.succeed("--input", "digits=pixels", "--output", "chances=last")
    predict = report["signatures"]["predict_images"]
    assert set(predict["inputs"]) == {"digits"}
    assert set(predict["outputs"]) == {"class_index", "scores", "chances"}
    shutil.rmtree(empty.model)
    error = empty.fail("TransformError", "--input", "digits=x:0")
    assert "transform.inputs names x:0; the model has pixels" in error


def siamese() -> Any:
    """Two outputs of one layer, and one of another layer that is called as the second would be."""
    import keras

    rows = keras.Input((2, 3, 1), name="pixels")
    head = keras.layers.Dense(CLASSES, name="head")
    flat = keras.layers.Flatten()(rows)
    other = keras.layers.Dense(2, name="head_1")
    model = keras.Model(rows, [head(flat), head(-flat), other(flat)])
    model.layers[-2].set_weights([weights(1), BIAS])
    return model


def states() -> Any:
    import keras

    rows = keras.Input((2, 3, 1), name="pixels")
    steps = keras.layers.Reshape((2, 3))(rows)
    return keras.Model(rows, keras.layers.LSTM(3, return_state=True, name="lstm")(steps))


def attention() -> Any:
    import keras

    rows = keras.Input((2, 3, 1), name="pixels")
    steps = keras.layers.Reshape((2, 3))(rows)
    layer = keras.layers.MultiHeadAttention(1, 3, name="attention")
    return keras.Model(rows, layer(steps, steps, return_attention_scores=True))


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (siamese, ["head", "head_2", "head_1"]),
        (states, ["lstm", "lstm_1", "lstm_2"]),
        (attention, ["attention", "attention_1"]),
    ],
)
def test_keras_outputs_of_one_layer_are_all_served(
    empty: Bench, build: Callable[[], Any], names: list[str]
) -> None:
    model = build()
    save_keras(empty.result / "model-1.keras", model, 1000)
    rows = np.random.default_rng(5).normal(size=(8, 2, 3, 1)).astype(np.float32)
    np.savez(empty.result / "held_out.npz", images=rows)
    report = empty.succeed("--sample", "held_out.npz")
    expected = dict(zip(names, model(rows, training=False), strict=True))
    assert set(report["prediction"]) == set(names)
    for name in names:
        np.testing.assert_allclose(
            report["prediction"][name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name
        )


def test_one_name_for_two_outputs_of_a_layer_is_refused(empty: Bench) -> None:
    save_keras(empty.result / "model-1.keras", siamese(), 1000)
    error = empty.fail("TransformError", "--output", "left=head", "--output", "right=head")
    assert "the model has head, head_2, head_1" in error
    report = empty.succeed("--output", "left=head", "--output", "right=head_2")
    assert set(report["signatures"]["predict_images"]["outputs"]) == {"left", "right"}


def test_keras_inputs_that_are_a_dict_go_where_they_belong(empty: Bench, tf: Any) -> None:
    import keras

    last, first = (keras.Input((CLASSES,), name=name) for name in ("z", "a"))
    ends = keras.layers.Subtract(name="difference")([last, first])
    model = keras.Model({"z": last, "a": first}, ends)
    model.compile("adam", "mse")
    save_keras(empty.result / "model-1.keras", model, 1000)
    empty.succeed()
    serve = tf.saved_model.load(str(empty.model)).signatures["predict_images"]
    found = serve(z=tf.ones([2, CLASSES]), a=tf.zeros([2, CLASSES]))
    np.testing.assert_allclose(found["logits"], np.ones([2, CLASSES]))


def test_keras_batch_normalization_of_horovods_name(empty: Bench, tf: Any) -> None:
    """It synchronises while it trains alone, and its module is not where models are served."""
    import keras

    kind = type("SyncBatchNormalization", (keras.layers.BatchNormalization,), {})
    kind.__module__ = "horovod.tensorflow.sync_batch_norm"
    ends = keras.layers.Dense(CLASSES, activation=None)
    model = keras.Sequential([keras.Input((2, 3, 1)), kind(), keras.layers.Flatten(), ends])
    model.layers[0].set_weights([np.full([1], value) for value in (2.0, 0.5, 0.25, 4.0)])
    save_keras(empty.result / "model-1.keras", model, 1000)
    empty.succeed()
    serve = tf.saved_model.load(str(empty.model)).signatures["predict_images"]
    images = np.random.default_rng(1).normal(size=(4, 2, 3, 1)).astype(np.float32)
    expected = model.predict(images, verbose=0)
    np.testing.assert_allclose(serve(images=tf.constant(images))["logits"], expected, rtol=1e-4)


@pytest.mark.parametrize("functional", [False, True])
def test_keras_files_of_keras_2(empty: Bench, tf: Any, functional: bool) -> None:
    """As scripts for Horovod write them where TF_USE_LEGACY_KERAS is set."""
    keras = pytest.importorskip("tf_keras", reason="pip install -r requirements/legacy.txt")
    first, middle, last = (
        keras.Input((2, 3, 1), name="pixels"),
        [keras.layers.BatchNormalization(), keras.layers.Flatten()],
        keras.layers.Dense(CLASSES, activation="softmax", name="last"),
    )
    model = keras.Sequential([first, *middle, last])
    if functional:
        model = keras.Model(first, last(middle[1](middle[0](first))))
    model.compile("adam", "sparse_categorical_crossentropy")
    last.set_weights([weights(1), BIAS])
    save_keras(empty.result / "model-1.keras", model, 1000)
    report = empty.succeed()
    assert report["framework"] == "keras"
    serve = tf.saved_model.load(str(empty.model)).signatures["predict_images"]
    images = np.random.default_rng(1).normal(size=(4, 2, 3, 1)).astype(np.float32)
    expected = model.predict(images, verbose=0)
    np.testing.assert_allclose(serve(images=tf.constant(images))["scores"], expected, rtol=1e-4)


def whole_in_hdf5(path: Path, name: str, lambda_layer: bool = False) -> Any:
    """A model of Keras 2 or 3, saved with its weights in HDF5; and its weights alone, later."""
    keras = pytest.importorskip(name, reason="pip install -r requirements/legacy.txt")
    more = [keras.layers.Lambda(lambda x: x * 1.0)] if lambda_layer else []
    last = keras.layers.Dense(CLASSES, activation="softmax", name="last")
    first = keras.Input((2, 3, 1), name="pixels")
    model = keras.Sequential([first, keras.layers.Flatten(), *more, last])
    model.compile("adam", "sparse_categorical_crossentropy")
    last.set_weights([weights(1), BIAS])
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():  # Keras would rather have a .keras file
        warnings.simplefilter("ignore")
        model.save(path)
    os.utime(path, (1000, 1000))
    model.save_weights(path.with_name("only.weights.h5"))
    return model


@pytest.mark.parametrize("keras", ["tf_keras", "keras"])
@pytest.mark.parametrize("name", ["model.h5", "mnist_cnn.hdf5"])
def test_keras_models_in_hdf5(empty: Bench, keras: str, name: str) -> None:
    """As scripts of Keras 2 save them, whose TensorFlow 1 mode cannot write .keras files."""
    model = whole_in_hdf5(empty.result / name, keras)
    empty.add_sample()
    report = empty.succeed()
    assert (report["framework"], report["checkpoint"]) == ("keras", name)
    rows = PIXELS[:8].reshape(8, 2, 3, 1).astype(np.float32) / 255
    expected = model.predict(rows, verbose=0)
    np.testing.assert_allclose(report["prediction"]["scores"], expected, rtol=1e-4)
    shutil.rmtree(empty.model)
    os.truncate(empty.result / name, 4000)
    assert f"no checkpoint can be read ({name}: " in empty.fail("CheckpointMissing")


def test_models_in_hdf5_of_several_are_named_so(empty: Bench) -> None:
    for name in ("generator.h5", "critic.h5"):
        whole_in_hdf5(empty.result / name, "keras")
    first, *_ = empty.succeed()["warnings"]
    assert " has .h5 files of several models (critic, generator); took " in first


@pytest.mark.parametrize("keras", ["tf_keras", "keras"])
def test_keras_models_in_hdf5_run_no_code_of_the_file(empty: Bench, keras: str) -> None:
    whole_in_hdf5(empty.result / "model.h5", keras, lambda_layer=True)
    error = empty.fail("TransformError")
    assert "model.h5: Keras cannot load it without the training script" in error
    assert "Lambda" in error and "safe_mode" in error


def test_keras_files_of_a_keras_2_that_is_not_installed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.succeed("--checkpoint", "20")  # writes a model
    shutil.rmtree(bench.result / "checkpoints", ignore_errors=True)
    for file in bench.result.iterdir():
        if file != bench.model and file.is_file():
            file.unlink()
    path = bench.result / "model-1.keras"
    save_keras(path, keras_model(1), 1000)
    other = path.with_name("other.zip")
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(other, "w") as after:
        for name in before.namelist():
            known = {"metadata.json": b'{"keras_version": "2.21.0"}'}
            after.writestr(name, known.get(name) or before.read(name))
    other.replace(path)
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    _, said = bench.run()
    assert said["kind"] == "CheckpointMissing"
    assert "it was saved by Keras 2: where models are made, pip install" in said["error"]
    report = bench.succeed("--may-be-written")
    assert report["warnings"][0].startswith("took the model that the training wrote itself: ")


def ends_of_keras_models() -> list[Any]:
    """Functions from logits [n, 3] to a model's end, and which of its values are its scores: all of
    them as they are, or their softmax.
    """
    as_they_are, softmax_of_them = True, False

    def layers(make: Callable[[Any], list[Any]]) -> Callable[[Any, Any], Any]:
        def end(keras: Any, x: Any) -> Any:
            for layer in make(keras):
                x = layer(x)
            return x

        return end

    def ensemble(keras: Any, x: Any, kind: str = "softmax") -> list[Any]:
        return [keras.layers.Activation(kind)(one) for one in (x, x * 2.0, -x)]

    def nested(keras: Any, x: Any) -> Any:
        inner = keras.Sequential([keras.Input([CLASSES]), keras.layers.Softmax()])
        return keras.Sequential([keras.Input([CLASSES]), keras.layers.Dropout(0.5), inner])(x)

    return [
        pytest.param(end, kept, id=name)
        for name, kept, end in (
            ("nested", as_they_are, nested),
            ("op", as_they_are, lambda keras, x: keras.ops.softmax(x)),
            ("op of sigmoid", as_they_are, lambda keras, x: keras.ops.sigmoid(x)),
            ("Softmax", as_they_are, layers(lambda k: [k.layers.Softmax()])),
            (
                "masked",
                as_they_are,
                lambda keras, x: keras.layers.Softmax()(x, mask=x > keras.ops.min(x, 1, True)),
            ),
            ("softmax", as_they_are, layers(lambda k: [k.layers.Activation("softmax")])),
            ("sigmoid", as_they_are, layers(lambda k: [k.layers.Activation("sigmoid")])),
            (
                "float16",
                as_they_are,
                layers(
                    lambda k: [
                        k.layers.Activation("softmax", dtype="float16"),
                        k.layers.Activation("linear", dtype="float32"),
                    ]
                ),
            ),
            (
                "reshaped",
                as_they_are,
                layers(
                    lambda k: [
                        k.layers.Reshape([1, CLASSES]),
                        k.layers.Softmax(),
                        k.layers.Dropout(0.5),
                        k.layers.Reshape([CLASSES]),
                    ]
                ),
            ),
            (
                "of other rows",
                softmax_of_them,
                layers(
                    lambda k: [
                        k.layers.RepeatVector(2),
                        k.layers.Softmax(),
                        k.layers.Flatten(),
                    ]
                ),
            ),
            ("average", as_they_are, lambda keras, x: keras.layers.Average()(ensemble(keras, x))),
            (
                "average of sigmoids",
                as_they_are,
                lambda keras, x: keras.layers.Average()(ensemble(keras, x, "sigmoid")),
            ),
            (
                "mean of a stack",
                as_they_are,
                lambda keras, x: keras.ops.mean(keras.ops.stack(ensemble(keras, x)), axis=0),
            ),
            (
                "mean of a stack of columns",
                as_they_are,
                lambda keras, x: keras.ops.mean(keras.ops.stack(ensemble(keras, x), -1), axis=-1),
            ),
            (
                "weighted",
                as_they_are,
                lambda keras, x: 0.3 * keras.ops.softmax(x) + keras.ops.softmax(-x) * 0.7,
            ),
            (
                "scaled by one",
                as_they_are,
                layers(lambda k: [k.layers.Softmax(), k.layers.Rescaling(1.0)]),
            ),
            (
                "sigmoids",
                as_they_are,
                lambda keras, x: keras.layers.Concatenate()(
                    [keras.ops.sigmoid(x[:, :1]), keras.ops.sigmoid(x[:, 1:])]
                ),
            ),
            (
                "softmax and sigmoid",
                softmax_of_them,
                lambda keras, x: keras.layers.Concatenate()(
                    [keras.ops.softmax(x[:, :2]), keras.ops.sigmoid(x[:, 2:])]
                ),
            ),
            ("sum", softmax_of_them, lambda keras, x: keras.layers.Add()(ensemble(keras, x))),
            (
                "difference",
                softmax_of_them,
                lambda keras, x: 2.0 * keras.ops.softmax(x) + -1.0 * keras.ops.softmax(-x),
            ),
            (
                "mean of classes",
                softmax_of_them,
                lambda keras, x: keras.ops.mean(keras.ops.stack([x, -x, x], 1), axis=2),
            ),
            ("over rows", softmax_of_them, layers(lambda k: [k.layers.Softmax(axis=0)])),
            ("op after softmax", softmax_of_them, lambda keras, x: keras.ops.softmax(x) * 9.0),
            ("nothing", softmax_of_them, lambda keras, x: x),
        )
    ]


@pytest.mark.parametrize(("end", "as_they_are"), ends_of_keras_models())
def test_scores_of_keras_models_are_a_softmax_once(
    empty: Bench, end: Callable[[Any, Any], Any], as_they_are: bool
) -> None:
    import keras

    x = keras.Input([FEATURES])
    model = keras.Model(x, end(keras, keras.layers.Dense(CLASSES)(x)))
    model.set_weights([weights(1), BIAS])
    save_keras(empty.result / "model-1.keras", model, 1000)
    empty.add_sample()
    report = empty.succeed()
    prediction = report["prediction"]
    values = model.predict(PIXELS.reshape(ROWS, FEATURES).astype(np.float32)[:8] / 255, verbose=0)
    expected = values if as_they_are else softmax(values)
    np.testing.assert_allclose(prediction["scores"], expected, rtol=1e-3)
    assert set(prediction) - {"class_index", "scores"} == (set() if as_they_are else {"logits"})
    assert report["warnings"] == []


def test_outputs_of_many_terms_are_looked_at_in_time() -> None:
    """Hundreds in a row; and each twice, level by level."""
    import tensorflow as tf

    def added(x: Any) -> Any:
        return functools.reduce(lambda total, n: total + float(n) * x, range(1, 600), x)

    def doubled(x: Any) -> Any:
        return functools.reduce(lambda one, _: (one + one) * 0.5, range(60), tf.nn.softmax(x))

    for output, expected in ((added, False), (doubled, True)):
        graph = tf.function(output).get_concrete_function(tf.TensorSpec([None, 3]))
        assert serving_export._is_probability(graph.outputs[0]) is expected


def test_probabilities_of_which_scores_are_a_softmax_are_warned_of(empty: Bench) -> None:
    import keras

    x = keras.Input([FEATURES])
    end = keras.ops.exp(keras.ops.log_softmax(keras.layers.Dense(CLASSES)(x)))
    model = keras.Model(x, end)
    model.set_weights([weights(1), BIAS])
    save_keras(empty.result / "model-1.keras", model, 1000)
    empty.add_sample()
    report = empty.succeed()
    (warning,) = report["warnings"]
    assert warning.startswith("logits are probabilities in each row of ")
    assert "scores, which are their softmax" in warning
    np.testing.assert_allclose(report["prediction"]["logits"], softmax(logits(1))[:8], rtol=1e-4)
    # Nothing is known of zeros: one row may come out so.
    shutil.rmtree(empty.data)
    empty.data.mkdir()
    assert not any("softmax" in warning for warning in empty.succeed()["warnings"])


def test_scores_are_those_of_the_output_that_the_manifest_names(empty: Bench) -> None:
    import keras

    x = keras.Input([FEATURES])
    votes = keras.layers.Dense(CLASSES, name="votes")
    chances = keras.layers.Dense(CLASSES, "softmax", name="chances")
    model = keras.Model(x, [votes(x), chances(x)])
    model.set_weights([weights(1), BIAS, weights(2), BIAS])
    save_keras(empty.result / "model-1.keras", model, 1000)
    empty.add_sample()
    prediction = empty.succeed("--output", "raw=votes")["prediction"]
    np.testing.assert_allclose(prediction["raw"], logits(1)[:8], rtol=1e-4)
    np.testing.assert_allclose(prediction["scores"], softmax(logits(1))[:8], rtol=1e-4)
    prediction = empty.succeed("--output", "own=chances")["prediction"]
    np.testing.assert_allclose(prediction["own"], softmax(logits(2))[:8], rtol=1e-4)
    np.testing.assert_allclose(prediction["scores"], softmax(logits(2))[:8], rtol=1e-4)
    assert set(empty.succeed()["prediction"]) == {"votes", "chances"}


WORDS_FRESH = """
import json
import sys
import tensorflow as tf

model = tf.saved_model.load(sys.argv[1])
words = tf.constant(json.loads(sys.argv[2]))
images = model.signatures["predict_images"](images=words)
inputs = model.signatures["serving_default"](inputs=words)
(name,) = set(images) & {"scores", "outputs"}
values = [signature[name].numpy() for signature in (images, inputs)]
print(json.dumps([(v.astype(str) if v.dtype == object else v).tolist() for v in values]))
"""


def of_lookup(keras: Any, vocabulary: Path) -> Any:
    """Inside another model, with the words in a file that is gone when the model serves."""
    lookup = keras.layers.StringLookup(vocabulary=str(vocabulary), output_mode="one_hot")
    inner = keras.Sequential([keras.Input([1], dtype="string"), lookup])
    words = keras.Input([1], dtype="string", name="words")
    return keras.Model(words, keras.layers.Dense(CLASSES, "softmax")(inner(words)))


def of_text(keras: Any, vocabulary: Path) -> Any:
    text = keras.layers.TextVectorization(output_mode="tf_idf")
    text.adapt(vocabulary.read_text().splitlines())
    layers = [keras.Input([1], dtype="string"), text, keras.layers.Dense(CLASSES, "softmax")]
    return keras.Sequential(layers)


def of_numbers(keras: Any, _vocabulary: Path) -> Any:
    """Words to their numbers, and back."""
    words = keras.Input([1], dtype="string", name="words")
    numbers = keras.layers.StringLookup(vocabulary=list(WORDS))(words)
    back = keras.layers.StringLookup(vocabulary=list(WORDS), invert=True)(numbers)
    return keras.Model(words, back)


@pytest.mark.parametrize("build", [of_lookup, of_text, of_numbers])
def test_keras_layers_that_look_words_up(empty: Bench, build: Callable[[Any, Path], Any]) -> None:
    import keras
    import tensorflow as tf

    write_words(vocabulary := empty.data / "words.txt")
    model = build(keras, vocabulary)
    save_keras(empty.result / "model-1.keras", model, 1000)
    rows = ["dog", "unheard", "pig"]
    expected = model(tf.constant([[row] for row in rows])).numpy()
    expected = expected.astype(str) if expected.dtype.kind == "O" else expected
    np.save(empty.data / "sample.npy", np.array(rows))
    report = empty.succeed()
    assert (report["sample"], report["rows"], report["warnings"]) == ("sample.npy", 3, [])
    name = "scores" if "scores" in report["prediction"] else "outputs"
    assert_same(report["prediction"][name], expected)

    elsewhere = empty.result.parent / "elsewhere"
    empty.model.rename(elsewhere)
    shutil.rmtree(empty.data)
    shutil.rmtree(empty.result)
    done = subprocess.run(
        [sys.executable, "-c", WORDS_FRESH, elsewhere, json.dumps([[row] for row in rows])],
        capture_output=True,
        text=True,
        timeout=within(120),
    )
    assert done.returncode == 0, done.stderr
    for served in json.loads(done.stdout):
        assert_same(served, expected)


def test_numbers_are_no_sample_of_words(empty: Bench) -> None:
    import keras

    write_words(vocabulary := empty.data / "words.txt")
    save_keras(empty.result / "model-1.keras", of_lookup(keras, vocabulary), 1000)
    np.save(empty.data / "sample.npy", np.arange(3.0))
    report = empty.succeed()
    assert report["sample"] is None
    assert "holds values of float64, and images takes strings" in report["warnings"][0]


def assert_same(found: Any, expected: np.ndarray) -> None:
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, rtol=1e-4)
    else:
        np.testing.assert_array_equal(found, expected)


def test_keras_model_that_needs_the_script(empty: Bench, tf: Any) -> None:
    import keras

    class OfTheScript(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return inputs * 2

    model = keras.Sequential([keras.Input((2,)), OfTheScript()])
    save_keras(empty.result / "model-1.keras", model, 1000)
    error = empty.fail("TransformError")
    assert "model-1.keras: Keras cannot load it without the training script" in error


@pytest.fixture
def registered(tf: Any) -> Iterator[Callable[..., Any]]:
    """registered(**methods) -> a layer "mine", of a class that Keras finds when it loads one."""
    import keras

    def make(**methods: Callable[[Any, Any], Any]) -> Any:
        of_a_package = type("OfAPackage", (keras.layers.Layer,), methods)
        keras.saving.register_keras_serializable("test")(of_a_package)
        return of_a_package(name="mine")

    yield make
    keras.saving.get_custom_objects().pop("test>OfAPackage")


def test_a_layer_that_hides_its_table_is_named(
    empty: Bench, tf: Any, registered: Callable[..., Any]
) -> None:
    import keras

    content = tf.lookup.KeyValueTensorInitializer(["cat"], [1.0])
    table = tf.lookup.StaticHashTable(content, 0.0)
    layer = registered(call=lambda _self, words: table.lookup(words))
    inner = keras.Sequential([keras.Input([1], dtype="string"), layer])
    model = keras.Sequential([keras.Input([1], dtype="string"), inner])
    save_keras(empty.result / "model-1.keras", model, 1000)
    error = empty.fail("TransformError")
    assert "model-1.keras: layer mine uses a table or variable that is no attribute of it" in error


def test_a_layer_that_no_graph_can_call_is_named(
    empty: Bench, tf: Any, registered: Callable[..., Any]
) -> None:
    import keras

    layer = registered(
        call=lambda _self, x: tf.constant(x.numpy()),
        compute_output_shape=lambda _self, shape: shape,
    )
    model = keras.Sequential([keras.Input([2]), layer])
    save_keras(empty.result / "model-1.keras", model, 1000)
    error = empty.fail("TransformError")
    assert (
        "model-1.keras: TensorFlow cannot make a SavedModel of it (Exception encountered" in error
    )
    assert "calling OfAPackage.call(). " in error and "numpy" in error
    assert "\x1b" not in error and "$RESULT_DIR/model" in error


# --- models that a script wrote itself -----------------------------------------------------------


def test_a_written_model_is_asked_where_it_is(bench: Bench) -> None:
    made = bench.succeed("--checkpoint", "20")
    shutil.rmtree(bench.result / "checkpoints", ignore_errors=True)
    report = bench.succeed("--written")
    for name in ("prediction", "signatures", "sample", "files"):
        assert report[name] == made[name]
    assert "checkpoint" not in report and report["warnings"] == []


def test_a_written_model_is_taken_if_there_is_no_checkpoint(bench: Bench) -> None:
    bench.succeed()
    report = bench.succeed("--may-be-written")
    assert report["checkpoint_step"] == 100
    said = "the model that the training wrote itself was replaced by one made of m-100"
    assert report["warnings"] == [said]
    shutil.rmtree(bench.result / "checkpoints", ignore_errors=True)
    for path in bench.result.iterdir():
        if path != bench.model and path.is_file():
            path.unlink()
    assert bench.run("--may-be-written", "--checkpoint", "20")[1]["kind"] == "CheckpointMissing"
    assert bench.run()[1]["kind"] == "CheckpointMissing"
    assert "checkpoint" not in bench.succeed("--may-be-written")


def test_a_written_model_is_taken_beside_a_model_in_hdf5(bench: Bench) -> None:
    bench.succeed()
    without_checkpoints(bench)
    whole_in_hdf5(bench.result / "model.h5", "keras")
    assert "checkpoint" not in bench.succeed("--may-be-written")
    assert bench.succeed()["checkpoint"] == "model.h5"


def test_a_written_model_is_taken_if_no_checkpoint_can_be_read(bench: Bench) -> None:
    bench.succeed("--checkpoint", "20")
    for path in bench.result.rglob("*.index"):
        if path.parent != bench.model / "variables":
            path.write_bytes(b"of weights only")
    assert bench.run()[1]["kind"] == "CheckpointMissing"
    report = bench.succeed("--may-be-written")
    assert "checkpoint" not in report
    assert report["warnings"][0].startswith("took the model that the training wrote itself: ")


def test_a_written_model_is_taken_if_keras_cannot_load_the_checkpoint(bench: Bench) -> None:
    """A layer of the script's own is known to the script alone."""
    import keras

    class Doubled(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * 2

    bench.succeed("--checkpoint", "20")
    written = (bench.model / "saved_model.pb").read_bytes()
    for path in bench.result.iterdir():
        if path.is_file():
            path.unlink()
    model = keras.Sequential([keras.Input([2]), Doubled()])
    save_keras(bench.result / "model-1.keras", model, 1000)
    assert bench.run()[1]["kind"] == "TransformError"
    report = bench.succeed("--may-be-written")
    assert "checkpoint" not in report
    said = report["warnings"][0]
    assert said.startswith("took the model that the training wrote itself: ")
    assert "model-1.keras" in said
    assert (bench.model / "saved_model.pb").read_bytes() == written


def as_an_estimator_writes(bench: Bench, name: str = "1525000000") -> Path:
    """The model of step 20 in a folder that is called by the time, and no checkpoints."""
    bench.succeed("--checkpoint", "20")
    partial = bench.model.rename(bench.result / "made")
    bench.model.mkdir()
    return partial.rename(bench.model / name)


def without_checkpoints(bench: Bench) -> None:
    for path in bench.result.iterdir():
        if path.is_file():
            path.unlink()


def test_a_model_as_an_estimator_writes_it_is_taken(bench: Bench) -> None:
    as_an_estimator_writes(bench)
    without_checkpoints(bench)
    error = bench.run()[1]["error"]
    assert "no checkpoint; found nothing" in error
    assert error.endswith(f"{bench.model} has no saved_model.pb, but 1525000000.")
    for option in ("--written", "--may-be-written"):
        report = bench.succeed(option)
        np.testing.assert_allclose(report["prediction"]["logits"], logits(20)[:8], rtol=1e-4)
        assert report["warnings"] == ["took model/1525000000, which is model now"]
        assert "saved_model.pb" in {file["path"] for file in report["files"]}
        assert [path.name for path in bench.result.iterdir()] == ["model"]
        bench.model.rename(bench.result / "made")
        bench.model.mkdir()
        (bench.result / "made").rename(bench.model / "1525000000")


def test_of_several_models_of_an_estimator_none_is_taken(bench: Bench) -> None:
    shutil.copytree(as_an_estimator_writes(bench), bench.model / "1525000001")
    without_checkpoints(bench)
    for option in ("--written", "--may-be-written"):
        error = bench.run(option)[1]["error"]
        assert "model has no saved_model.pb, but 1525000000, 1525000001." in error
    assert len(list(bench.model.glob("*/saved_model.pb"))) == 2


def test_what_is_no_model_is_not_lost_where_one_takes_its_place(bench: Bench) -> None:
    as_an_estimator_writes(bench)
    (bench.model / "logs").mkdir()
    (bench.model / "logs" / "events").write_text("curves")
    report = bench.succeed("--may-be-written")
    assert report["checkpoint_step"] == 100
    kept = bench.result / "model.of-training"
    assert (kept / "logs" / "events").read_text() == "curves"
    assert (kept / "1525000000" / "saved_model.pb").is_file()
    assert report["warnings"] == [
        "the model that the training wrote itself, model/1525000000, was replaced by one made of "
        "m-100",
        "model had no saved_model.pb, but 1525000000, logs: now in model.of-training",
    ]
    # And once more, with what a later try has written.
    shutil.rmtree(bench.model)
    (bench.model / "logs").mkdir(parents=True)
    said = bench.succeed()["warnings"]
    assert said == ["model had no saved_model.pb, but logs: now in model.of-training-2"]
    shutil.rmtree(bench.model)
    bench.model.mkdir()
    assert bench.succeed()["warnings"] == []


def test_a_written_model_need_not_give_scores(bench: Bench, tf: Any) -> None:
    kernel = tf.Variable(weights(20))
    own = tf.Module()
    own.kernel = kernel
    spec = tf.TensorSpec([None, FEATURES], tf.float32)

    def classify(name: str, output: str) -> Any:
        return tf.function(
            lambda **feeds: {output: tf.argmax(feeds[name] @ kernel + BIAS, 1)}
        ).get_concrete_function(**{name: spec})

    signatures = {
        "predict_images": classify("images", "class_index"),
        "serving_default": classify("inputs", "classes"),
    }
    tf.saved_model.save(own, str(bench.model), signatures)
    report = bench.succeed("--written")
    assert report["prediction"] == {"class_index": logits(20).argmax(axis=1)[:8].tolist()}


def test_a_written_model_of_other_signatures_is_loaded_and_listed(bench: Bench, tf: Any) -> None:
    own = tf.Module()
    score = tf.function(lambda x: {"y": x * 2}).get_concrete_function(
        x=tf.TensorSpec([None], tf.float32)
    )
    tf.saved_model.save(own, str(bench.model), {"score": score})
    report = bench.succeed("--written")
    assert set(report["signatures"]) == {"score"}
    assert (report["rows"], report["prediction"], report["accuracy"]) == (0, {}, None)
    (warning,) = report["warnings"]
    assert "not asked: its signatures are score" in warning


def test_a_written_model_may_have_a_graph_for_training_too(bench: Bench, tf: Any) -> None:
    v1 = tf.compat.v1
    builder = v1.saved_model.Builder(str(bench.model))
    for number, tag in enumerate(("train", "serve")):
        with v1.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None], "x")
            signature = v1.saved_model.predict_signature_def({"x": x}, {"y": x * 2.0})
            if number == 0:
                builder.add_meta_graph_and_variables(session, [tag])
            else:
                builder.add_meta_graph([tag], {"score": signature})
    builder.save()
    assert set(bench.succeed("--written")["signatures"]) == {"score"}


def test_a_written_model_that_cannot_be_loaded_is_rejected(bench: Bench) -> None:
    bench.model.mkdir()
    (bench.model / "saved_model.pb").write_bytes(b"no model")
    code, report = bench.run("--written")
    assert (code, report["kind"]) == (3, "ModelRejected")
    assert "cannot be loaded" in report["error"]


def test_a_written_model_with_a_step_of_the_training_in_it_is_rejected(
    bench: Bench, tf: Any
) -> None:
    """As of a tf.Module whose tf.function trains: TensorFlow saves that, too, and no server has
    its ops.
    """
    from tensorflow.core.protobuf import saved_model_pb2

    own = tf.Module()
    one = tf.TensorSpec([None], tf.float32)
    own.train = tf.function(lambda x: tf.math.erfinv(x), input_signature=[one])
    score = tf.function(lambda x: {"y": x * 2}).get_concrete_function(x=one)
    tf.saved_model.save(own, str(bench.model), {"score": score})
    file = bench.model / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    for function in saved.meta_graphs[0].graph_def.library.function:
        for node in function.node_def:
            node.op = "AllReduceOfTraining" if node.op == "Erfinv" else node.op
    file.write_bytes(saved.SerializeToString())
    code, report = bench.run("--written")
    assert (code, report["kind"]) == (3, "ModelRejected")
    assert "AllReduceOfTraining" in report["error"]
    assert "tf.function" in report["error"]


# --- the command -------------------------------------------------------------------------------

FRESH = """
import sys
import numpy as np
from ddl_ops import saved_model

bad = saved_model.main(sys.argv[2:])
assert bad == 3, bad

import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
rows = tf.constant(np.load(sys.argv[1] + ".npy"))
print(model.signatures["predict_images"](images=rows)["class_index"].numpy().tolist())
print(model.signatures["serving_default"](inputs=rows)["classes"].numpy().tolist())
assert not [name for name in sys.modules if name == "ddl" or name.startswith("mpi4py")]
"""


def test_a_fresh_process_serves_the_model_and_refuses_a_graph_with_communication(
    bench: Bench, tmp_path: Path
) -> None:
    bench.succeed()
    served = tmp_path / "served"
    bench.model.rename(served)
    np.save(f"{served}.npy", PIXELS.reshape(ROWS, FEATURES).astype(np.float32) / 255)
    meta = bench.result / "m_basegraph.meta"
    node = 'node { name: "reduce" op: "AllReduceN" attr { key: "N" value { i: 1 } } }'
    meta.write_text(meta.read_text().replace("graph_def {", "graph_def {\n" + node, 1))

    arguments = ["--result-dir", bench.result, "--export-dir", bench.model]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, served, *arguments, "--report", bench.report_file],
        capture_output=True,
        text=True,
        timeout=within(120),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    classes = str(logits(100).argmax(axis=1).tolist())
    assert done.stdout.splitlines() == [classes, classes]
    report = json.loads(bench.report_file.read_text())
    assert report["kind"] == "TransformError"
    assert "ops that TensorFlow alone cannot run: AllReduceN (reduce)" in report["error"]
    assert "before `import ddl`" in report["error"]
    assert f"TransformError: {report['error']}" in done.stderr
    assert not bench.model.exists()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--checkpoint", "newest"],
        ["--checkpoint", "-1"],
        ["--input", "x:0"],
        ["--output", "=pRes:0"],
    ],
)
def test_arguments_that_make_no_sense(tmp_path: Path, wrong: list[str]) -> None:
    common = ["--result-dir", "r", "--export-dir", "r/model", "--report", str(tmp_path / "x.json")]
    with pytest.raises(SystemExit) as stopped:
        saved_model.main([*common, *wrong])
    assert stopped.value.code == 2


def test_a_missing_checkpoint_is_told_before_tensorflow_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys; from ddl_ops import saved_model; code = saved_model.main(sys.argv[1:]);"
        "assert 'tensorflow' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "--result-dir", tmp_path / "none"),
            *("--export-dir", tmp_path / "none" / "model", "--report", tmp_path / "report.json"),
        ],
        capture_output=True,
        text=True,
        timeout=within(60),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 3, done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["kind"] == "CheckpointMissing"
