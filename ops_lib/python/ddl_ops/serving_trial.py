"""Loads a SavedModel from disk as a server would, and makes it predict by both signatures.

One that a script wrote itself may have other signatures; those are listed, not asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddl_ops import samples
from ddl_ops.checkpoints import TransformError
from ddl_ops.serving_export import (
    CLASS_INDEX,
    CLASSES,
    PREDICT,
    SCORES,
    SERVE,
    SERVE_INPUT,
    foreign_ops,
)

_ROWS_SHOWN = 8
_BATCH_ROWS = 256


class ModelRejected(TransformError):
    """The SavedModel was written and reloaded, and does not predict."""


def run(
    folder: Path,
    sample: samples.Sample | None,
    *,
    sample_was_named: bool,
    steps: Sequence[int],
) -> tuple[dict[str, Any], list[str]]:
    """What the model is and what it predicts, for the report; and warnings.

    With labels in or beside the sample all its rows are predicted, for the accuracy; else the first
    8, and the report says why there is no accuracy.

    Args:
        folder: the SavedModel.
        sample: real input; None: zeros.
        sample_was_named: the manifest asked for this sample, so it has to fit.
        steps: steps of all checkpoints, to be named if this one is bad.

    Raises:
        ModelRejected: it cannot be loaded, fails, gives values that are not finite, or the
            signatures disagree.
        TransformError: the named sample does not fit.
    """
    import tensorflow as tf

    try:
        model = _load(folder)  # must outlive its signatures
    except (OSError, ValueError, tf.errors.OpError) as error:
        raise ModelRejected(f"{folder} cannot be loaded: {first_line(error)}") from error
    if not _has_both(model.signatures):
        report = _report({name: _described(s) for name, s in model.signatures.items()})
        listed = ", ".join(sorted(report["signatures"])) or "none"
        return report, [
            f"the model was loaded, but not asked: its signatures are {listed}; those that are "
            f"asked are {PREDICT} (one input) and {SERVE} (input {SERVE_INPUT})"
        ]
    predict, serve = model.signatures[PREDICT], model.signatures[SERVE]
    specs = predict.structured_input_signature[1]
    warnings: list[str] = []
    no_accuracy = "there is no sample"
    if sample is not None:
        sample = samples.with_labels(sample, specs)
    try:
        feeds = _feeds(sample, specs)
    except ValueError as error:
        assert sample is not None
        if sample_was_named:
            raise TransformError(
                f"sample {sample.path}: {error}. Set transform.sample to input of that shape."
            ) from error
        no_accuracy = f"{sample.path.name} does not fit the model: {error}"
        warnings.append(no_accuracy)
        sample, feeds = None, _feeds(None, specs)
    if sample is None:
        warnings.append(
            "no real input to try the model on, so it was given zeros; set transform.sample"
        )
    rows = min((len(feed) for feed in feeds.values() if feed.ndim), default=1)
    labels = None
    if sample is not None:
        try:
            labels, no_accuracy = _labels(sample, rows, predict.structured_outputs), ""
        except ValueError as why:
            no_accuracy = str(why)
            if sample.labels is not None:
                warnings.append(f"accuracy was not measured: {why}")
    tried = rows if labels is not None else min(rows, _ROWS_SHOWN)
    source = sample.path.name if sample else "zeros"
    outputs = _outputs(predict, serve, list(_batches(feeds, specs, tried)), source)
    predicted, served = (
        {name: result[:tried] if result.ndim else result for name, result in one} for one in outputs
    )
    _require_sound(predicted, served, steps)
    if sample is not None:
        warnings += _softmax_of_probabilities(predicted, source)

    report = _report({PREDICT: _described(predict), SERVE: _described(serve)})
    report |= {
        "sample": sample.path.name if sample else None,
        "rows": tried,
        "prediction": {
            name: (_text(result)[:_ROWS_SHOWN] if result.ndim else _text(result)).tolist()
            for name, result in predicted.items()
        },
    }
    if labels is not None:
        report["labels"] = labels[:_ROWS_SHOWN].tolist()
        report["accuracy"] = round(float(np.mean(predicted[CLASS_INDEX] == labels)), 6)
    report["no_accuracy"] = no_accuracy
    return report, warnings


def _labels(sample: samples.Sample, rows: int, outputs: Mapping[str, Any]) -> np.ndarray:
    """The class of each row, int64 [rows]. Raises ValueError if there is none to compare with."""
    if sample.labels is None:
        raise ValueError(f"sample {sample.path.name} has no labels")
    try:
        labels = samples.classes(sample.labels)
    except ValueError as error:
        raise ValueError(f"sample {sample.path.name}: {error}") from None
    if len(labels) != rows:
        raise ValueError(f"sample {sample.path.name} has {len(labels)} labels for {rows} rows")
    if CLASS_INDEX not in outputs or outputs[CLASS_INDEX].shape.rank not in (None, 1):
        raise ValueError(f"the model does not predict a class of each row, as {CLASS_INDEX} [n]")
    return labels


def _report(signatures: Mapping[str, Any]) -> dict[str, Any]:
    """The report of a model that was not asked."""
    return {
        "signatures": dict(signatures),
        "sample": None,
        "rows": 0,
        "prediction": {},
        "labels": None,
        "accuracy": None,
        "no_accuracy": "the model was not asked",
    }


def _load(folder: Path) -> Any:
    """The model as servers load it: with the tag "serve" where it has graphs for other uses too."""
    import tensorflow as tf
    from tensorflow.python.saved_model import loader_impl

    graphs = loader_impl.parse_saved_model(str(folder)).meta_graphs
    tags = [tf.saved_model.SERVING] if len(graphs) > 1 else None
    for graph in graphs:
        wanted = tags is None or tf.saved_model.SERVING in graph.meta_info_def.tags
        if wanted and (foreign := foreign_ops(graph.graph_def)):
            raise ModelRejected(
                f"{folder} holds ops that TensorFlow alone cannot run: {foreign}. "
                "tf.saved_model.save() takes each tf.function that is an attribute of what it is "
                "given, also one that trains: give it an object without that, or export a Keras "
                "model by model.export()."
            )
    return tf.saved_model.load(str(folder), tags=tags)


def _has_both(signatures: Mapping[str, Any]) -> bool:
    if not {PREDICT, SERVE} <= set(signatures):
        return False
    own, common = (signatures[name].structured_input_signature[1] for name in (PREDICT, SERVE))
    return set(common) == ({SERVE_INPUT} if len(own) == 1 else set(own))


def first_line(error: BaseException) -> str:
    """The part of a TensorFlow or system error that a person can use."""
    message = getattr(error, "message", None) or str(error) or type(error).__name__
    lines = [line for line in message.splitlines() if line.strip()]
    if lines and lines[0] == "Graph execution error:":
        # Where the node was made comes next, indented, and what is wrong with it last.
        lines = [one for one in lines[1:] if not one.startswith((" ", "\t", "Detected"))] or lines
    return (lines[0] if lines else message)[:300]


def _feeds(sample: samples.Sample | None, specs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """One array per input.

    Raises:
        ValueError: the sample does not fit the inputs.
    """
    feeds = {}
    for name, spec in specs.items():
        dtype = np.dtype(spec.dtype.as_numpy_dtype)
        if spec.shape.rank is None:
            raise TransformError(
                f"input {name}: nothing is known of its shape. Give the placeholder one, e.g. "
                f"[None, 784]."
            )
        if sample is None:
            feeds[name] = samples.zeros(spec.shape.as_list(), dtype)
            continue
        arrays = sample.arrays
        if name not in arrays and (len(specs) > 1 or len(arrays) > 1):
            raise ValueError(
                f"it holds {', '.join(filter(None, arrays)) or 'one array'}; no {name}"
            )
        array = arrays[name] if name in arrays else next(iter(arrays.values()))
        if dtype.kind == "O" and array.dtype.kind not in "SU":
            raise ValueError(f"it holds values of {array.dtype}, and {name} takes strings")
        feeds[name] = samples.fit(array, spec.shape.as_list(), dtype)
    return feeds


def _batches(
    feeds: Mapping[str, np.ndarray], specs: Mapping[str, Any], rows: int
) -> Iterator[dict[str, np.ndarray]]:
    """Feeds cut into batches. Inputs whose batch size is fixed get whole ones, with repeats."""
    fixed = {spec.shape[0] for spec in specs.values() if spec.shape.rank} - {None}
    size = min(fixed, default=_BATCH_ROWS)

    def cut(feed: np.ndarray, start: int) -> np.ndarray:
        if not feed.ndim:  # a scalar goes with every batch
            return feed
        part = feed[start : min(start + size, rows)]
        return np.resize(part, (size, *part.shape[1:])) if fixed else part

    for start in range(0, rows, size):
        yield {name: cut(feed, start) for name, feed in feeds.items()}


def _outputs(
    predict: Any, serve: Any, batches: Sequence[Mapping[str, np.ndarray]], source: str
) -> tuple[list[tuple[str, np.ndarray]], list[tuple[str, np.ndarray]]]:
    """Name and all rows of each output, of both signatures."""
    import tensorflow as tf

    found: tuple[dict[str, list[Any]], dict[str, list[Any]]] = ({}, {})
    for batch in batches:
        own = {name: tf.constant(array) for name, array in batch.items()}
        common = {SERVE_INPUT: next(iter(own.values()))} if len(own) == 1 else own
        try:
            results = predict(**own), serve(**common)
        except tf.errors.OpError as error:
            raise ModelRejected(
                f"the reloaded model fails on {source}: {first_line(error)}. Set transform.sample "
                f"to valid input, and check that the base graph holds all that a prediction needs."
            ) from error
        for collected, outputs in zip(found, results, strict=True):
            for name, tensor in outputs.items():
                if tensor.dtype.is_floating and np.dtype(tensor.dtype.as_numpy_dtype).kind != "f":
                    tensor = tf.cast(tensor, tf.float32)  # bfloat16, which is no number to NumPy
                collected.setdefault(name, []).append(tensor.numpy())
    predicted, served = (
        [
            (n, np.concatenate(p) if np.ndim(p[0]) else np.asarray(p[0]))
            for n, p in sorted(c.items())
        ]
        for c in found
    )
    return predicted, served


def _require_sound(
    predicted: Mapping[str, np.ndarray], served: Mapping[str, np.ndarray], steps: Sequence[int]
) -> None:
    """Raises ModelRejected unless all is finite and both signatures say the same."""
    for name, result in predicted.items():
        bad = int((~np.isfinite(result)).sum()) if result.dtype.kind == "f" else 0
        if bad:
            kept = f" (kept: {', '.join(map(str, steps))})" if steps else ""
            raise ModelRejected(
                f"{PREDICT}: {bad} of {result.size} values of {name} are not finite. The training "
                f"diverged, or the input is not scaled as in training. Lower the learning rate, or "
                f"set transform.checkpoint to an earlier step{kept}."
            )
    classifies = CLASSES in served and CLASS_INDEX in predicted
    pairs = [(CLASS_INDEX, CLASSES), (SCORES, SCORES)] if classifies else [(n, n) for n in served]
    for first, second in pairs:
        if first not in predicted or second not in served:
            continue  # a script's own model need not give scores
        one, other = predicted[first], served[second]
        agree = np.allclose if one.dtype.kind == "f" else np.array_equal
        if not agree(one, other):
            raise ModelRejected(
                f"{PREDICT} and {SERVE} disagree on {first}: the model gives another answer each "
                f"time. Make dropout and the like a tf.placeholder_with_default that is off."
            )


def _softmax_of_probabilities(predicted: Mapping[str, np.ndarray], source: str) -> list[str]:
    """A warning where scores are the softmax of what looks as if it were probabilities already."""
    scores = predicted.get(SCORES)
    for name, raw in predicted.items():
        if scores is None or raw.shape != scores.shape or raw.ndim != 2 or raw.dtype.kind != "f":
            continue
        rows = (raw >= 0).all() and np.allclose(raw.sum(axis=1, dtype=np.float64), 1.0, atol=1e-2)
        if rows and not np.allclose(raw, scores, atol=1e-2):
            return [
                f"{name} are probabilities in each row of {source}, it seems, and not {SCORES}, "
                f"which are their softmax: take {name} from {PREDICT}, or end the model in a "
                f"softmax or an average of such"
            ]
    return []


def _described(signature: Any) -> dict[str, Any]:
    def ports(specs: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: {"dtype": spec.dtype.name, "shape": _sizes(spec)}
            for name, spec in sorted(specs.items())
        }

    return {
        "inputs": ports(signature.structured_input_signature[1]),
        "outputs": ports(signature.structured_outputs),
    }


def _sizes(spec: Any) -> list[int | None] | None:
    return None if spec.shape.rank is None else spec.shape.as_list()


def _text(result: np.ndarray) -> np.ndarray:
    """Strings that JSON can carry; numbers stay."""
    if result.dtype.kind == "O":
        return np.vectorize(lambda value: value.decode("utf-8", "replace"))(result)
    return result
