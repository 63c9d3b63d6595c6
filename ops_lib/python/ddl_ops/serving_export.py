"""Weights to a SavedModel on disk: a TensorFlow 1 base graph with a checkpoint, or a Keras model.

Both get the same two signatures. A classifier (one output [n, k > 1] of floats) is served as

* ``predict_images``: ``images`` -> ``class_index`` int64 [n], ``scores`` [n, k], ``logits`` [n, k]
* ``serving_default``: ``inputs`` -> ``classes`` int64 [n], ``scores`` [n, k]

``scores`` are the output itself where it ends in a softmax or sigmoid (there are no ``logits``
then), else its softmax. Any other model gives its outputs under their own names in both.

TensorFlow is imported inside the functions: importing this module costs nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddl_ops.checkpoints import (
    Checkpoint,
    CheckpointMissing,
    CheckpointUnreadable,
    Leftovers,
    TransformError,
    require_whole,
)

PREDICT = "predict_images"
SERVE = "serving_default"
CLASS_INDEX = "class_index"
CLASSES = "classes"
SCORES = "scores"
SERVE_INPUT = "inputs"


@dataclass(frozen=True)
class Exported:
    """Which checkpoint went into the model, and which newer ones could not be read, with why."""

    checkpoint: Checkpoint
    skipped: tuple[tuple[Checkpoint, str], ...]


def export(
    leftovers: Leftovers,
    checkpoints: Sequence[Checkpoint],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    folder: Path,
) -> Exported:
    """Writes the SavedModel.

    Args:
        leftovers: what the training left.
        checkpoints: to try in this order, until one can be read.
        inputs: name in the signature to tensor of the graph (Keras: to input of the model).
            Empty: the graph's only placeholder without a default, served as ``images``.
        outputs: the same for outputs (Keras: names of layers). Empty: the only float [n, k] at
            the end of the graph.
        folder: where to; must not exist.

    Raises:
        CheckpointMissing: none of the checkpoints can be read.
        TransformError: the graph or the names do not allow it.
    """
    write = _export_keras if leftovers.base_graph is None else _export_graph
    return write(leftovers, checkpoints, inputs, outputs, folder)


def _first_readable(
    checkpoints: Sequence[Checkpoint], load: Callable[[Checkpoint], Any]
) -> tuple[Any, Exported]:
    skipped: list[tuple[Checkpoint, str]] = []
    for checkpoint in checkpoints:
        try:
            require_whole(checkpoint)
            return load(checkpoint), Exported(checkpoint, tuple(skipped))
        except CheckpointUnreadable as error:
            skipped.append((checkpoint, str(error)))
    reasons = "; ".join(f"{checkpoint.path.name}: {why}" for checkpoint, why in skipped)
    raise CheckpointMissing(
        f"{checkpoints[0].path.parent}: no checkpoint can be read ({reasons}). Train again, or "
        f"set transform.checkpoint to another step."
    )


def _heads(
    outputs: Mapping[str, Any], named: bool, ends_in_probabilities: bool
) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Outputs of the two signatures, and whether this is a classifier."""
    import tensorflow as tf

    ((name, tensor), *more) = outputs.items()
    shape = tensor.shape
    is_classifier = (
        not more and tensor.dtype.is_floating and shape.rank == 2 and (shape[1] or 0) > 1
    )
    if not is_classifier:
        return dict(outputs), dict(outputs), False
    if named and name == CLASS_INDEX:
        raise TransformError(
            f"transform.outputs: {CLASS_INDEX} is the name of the class that the model predicts. "
            f"Call the output logits."
        )
    classes = tf.argmax(tensor, axis=1, output_type=tf.int64)
    scores = tensor if ends_in_probabilities else tf.nn.softmax(tensor)
    predicted = {CLASS_INDEX: classes, SCORES: scores}
    if named or not ends_in_probabilities:
        predicted[name] = tensor
    return predicted, {CLASSES: classes, SCORES: scores}, True


def _default_output_name(tensor: Any) -> str:
    return "logits" if tensor.shape.rank == 2 and (tensor.shape[1] or 0) > 1 else "outputs"


# --- TensorFlow 1: base graph and checkpoint ---------------------------------------------------


def _export_graph(
    leftovers: Leftovers,
    checkpoints: Sequence[Checkpoint],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    folder: Path,
) -> Exported:
    import tensorflow as tf

    v1 = tf.compat.v1
    path = leftovers.base_graph
    assert path is not None
    meta = _read_meta_graph(path)
    with tf.Graph().as_default() as graph:
        restorer = v1.train.import_meta_graph(meta, clear_devices=True)
        if restorer is None:
            raise TransformError(f"{path}: the graph has no variables, so there is nothing to load")
        feeds, fetches = _ports(graph, path, inputs, outputs)
        (last, *_) = fetches.values()
        predicted, served, is_classifier = _heads(fetches, bool(outputs), _is_probability(last.op))

        constants = tf.saved_model
        serve_feeds = {SERVE_INPUT: next(iter(feeds.values()))} if len(feeds) == 1 else feeds
        signatures = {
            PREDICT: _signature(feeds, predicted, constants.PREDICT_METHOD_NAME),
            SERVE: _signature(
                serve_feeds,
                served,
                constants.CLASSIFY_METHOD_NAME if is_classifier else constants.PREDICT_METHOD_NAME,
            ),
        }
        with v1.Session(graph=graph) as session:
            _, exported = _first_readable(
                checkpoints, lambda checkpoint: _restore(restorer, session, checkpoint, path)
            )
            builder = v1.saved_model.Builder(str(folder))
            builder.add_meta_graph_and_variables(
                session,
                [constants.SERVING],
                signature_def_map=signatures,
                main_op=v1.tables_initializer(),
                clear_devices=True,
                strip_default_attrs=True,
            )
            builder.save()
    return exported


def _read_meta_graph(path: Path) -> Any:
    """The MetaGraphDef in a file, binary or text, that holds no op but TensorFlow's own."""
    import tensorflow as tf
    from google.protobuf import message, text_format
    from tensorflow.python.framework import op_def_registry

    content = path.read_bytes()
    meta = tf.compat.v1.MetaGraphDef()
    try:
        meta.ParseFromString(content)
    except message.DecodeError:
        try:
            text_format.Parse(content, meta)
        except (text_format.ParseError, UnicodeDecodeError) as error:
            raise TransformError(
                f"{path}: not a meta graph ({error}). Write it with tf.train.export_meta_graph."
            ) from error
    graph = meta.graph_def
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    own_functions = {function.signature.name for function in graph.library.function}
    foreign = {
        node.op: node.name
        for node in nodes
        if node.op not in own_functions and op_def_registry.get(node.op) is None
    }
    if foreign:
        listed = ", ".join(f"{op} ({name})" for op, name in sorted(foreign.items()))
        raise TransformError(
            f"{path}: holds ops that TensorFlow alone cannot run: {listed}. Export the base graph "
            f"before `import ddl` and before the optimizer is made."
        )
    return meta


def _restore(restorer: Any, session: Any, checkpoint: Checkpoint, base_graph: Path) -> None:
    import tensorflow as tf

    prefix = str(checkpoint.path)
    try:
        restorer.restore(session, prefix)
    except (tf.errors.DataLossError, tf.errors.OutOfRangeError) as error:
        raise CheckpointUnreadable(
            "damaged or cut short: its checksums or lengths do not fit"
        ) from error
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError) as error:
        saved = tf.train.load_checkpoint(prefix).get_variable_to_shape_map()
        wrong = [
            f"{v.op.name} {v.shape.as_list()} (there: {saved.get(v.op.name, 'missing')})"
            for v in tf.compat.v1.global_variables()
            if saved.get(v.op.name) != v.shape.as_list()
        ]
        raise TransformError(
            f"{checkpoint.path.name} does not fit {base_graph.name}: "
            f"{', '.join(wrong[:5]) or error.message.splitlines()[0]}. Both must come from the "
            f"same script; empty RESULT_DIR after changing the model."
        ) from error


def _ports(
    graph: Any, path: Path, inputs: Mapping[str, str], outputs: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors by signature name: what is fed and what is fetched."""
    feeds = {name: _tensor(graph, path, "inputs", text) for name, text in inputs.items()}
    fetches = {name: _tensor(graph, path, "outputs", text) for name, text in outputs.items()}
    if not feeds:
        among = _ancestors(fetches.values()) if fetches else graph.get_operations()
        candidates = [op.outputs[0] for op in among if op.type == "Placeholder"]
        feeds = {"images": _the_only(candidates, path, "inputs", "images", "placeholder")}
    if not fetches:
        ends = _float_ends(feeds.values())
        matrices = [tensor for tensor in ends if tensor.shape.rank == 2]
        found = _the_only(
            matrices, path, "outputs", "logits", "float [n, k] tensor at the end of the graph", ends
        )
        fetches = {_default_output_name(found): found}
    fed = {tensor.op.name for tensor in feeds.values()}
    unfed = [
        op.outputs[0].name
        for op in _ancestors(fetches.values())
        if op.type == "Placeholder" and op.name not in fed
    ]
    if unfed:
        raise TransformError(
            f"{path}: {', '.join(t.name for t in fetches.values())} also needs {', '.join(unfed)}. "
            f"Add it to transform.inputs, or make it a tf.placeholder_with_default."
        )
    return feeds, fetches


def _tensor(graph: Any, path: Path, field: str, text: str) -> Any:
    name, _, index = text.partition(":")
    operations = {op.name: op for op in graph.get_operations()}
    if name in operations and (index or "0").isdigit():
        results = operations[name].outputs
        if int(index or 0) < len(results):
            return results[int(index or 0)]
    near = difflib.get_close_matches(name, operations, n=3)
    placeholders = [op.name for op in operations.values() if op.type == "Placeholder"]
    hint = f"Near it: {', '.join(f'{n}:0' for n in near)}. " if near else ""
    raise TransformError(
        f"{path}: no tensor {text} (transform.{field}). {hint}Placeholders: "
        f"{', '.join(f'{n}:0' for n in placeholders) or 'none'}. Give tensors a name in the "
        f"script, e.g. tf.identity(logits, name='pRes'), before the base graph is exported."
    )


def _the_only(
    found: Sequence[Any],
    path: Path,
    field: str,
    name: str,
    what: str,
    others: Sequence[Any] = (),
) -> Any:
    if len(found) == 1:
        return found[0]
    candidates = ", ".join(f"{t.name} {_shape_text(t)}" for t in (found or others)[-8:])
    raise TransformError(
        f"{path}: {len(found) or 'no'} {what}{'' if len(found) == 1 else 's'}"
        f"{f', candidates: {candidates}' if candidates else ''}. Name the one that is meant in the "
        f'manifest, transform.{field}: {{{name}: "<tensor>:0"}}.'
    )


def _float_ends(feeds: Iterable[Any]) -> list[Any]:
    """Float tensors that depend on the feeds and that no other op reads."""
    reached: list[Any] = []
    seen = set()
    waiting = list(feeds)
    while waiting:
        tensor = waiting.pop(0)
        if tensor.name in seen:
            continue
        seen.add(tensor.name)
        readers = tensor.consumers()
        if not readers and tensor.dtype.is_floating:
            reached.append(tensor)
        waiting.extend(output for op in readers for output in op.outputs)
    return reached


def _ancestors(tensors: Iterable[Any]) -> list[Any]:
    """Operations that the tensors depend on, their own included."""
    found: dict[str, Any] = {}
    waiting = [tensor.op for tensor in tensors]
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found[op.name] = op
            waiting.extend(tensor.op for tensor in op.inputs)
            waiting.extend(op.control_inputs)
    return list(found.values())


def _is_probability(op: Any) -> bool:
    while op.type == "Identity":
        op = op.inputs[0].op
    return op.type in ("Softmax", "Sigmoid")


def _shape_text(tensor: Any) -> str:
    if tensor.shape.rank is None:
        return "[unknown]"
    return "[" + ", ".join("n" if size is None else str(size) for size in tensor.shape) + "]"


def _signature(inputs: Mapping[str, Any], outputs: Mapping[str, Any], method: str) -> Any:
    import tensorflow as tf

    v1 = tf.compat.v1.saved_model
    return v1.build_signature_def(
        inputs={name: v1.build_tensor_info(tensor) for name, tensor in inputs.items()},
        outputs={name: v1.build_tensor_info(tensor) for name, tensor in outputs.items()},
        method_name=method,
    )


# --- Keras 3 -----------------------------------------------------------------------------------


def _export_keras(
    _leftovers: Leftovers,
    checkpoints: Sequence[Checkpoint],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    folder: Path,
) -> Exported:
    import tensorflow as tf

    model, exported = _first_readable(checkpoints, _load_keras)
    path = exported.checkpoint.path
    if not getattr(model, "inputs", None):
        raise TransformError(
            f"{path}: the model does not know the shape of its input. Begin it with keras.Input."
        )
    input_names = [tensor.name for tensor in model.inputs]
    output_names = list(getattr(model, "output_names", None) or [model.layers[-1].name])
    feeds = _renamed(path, "inputs", inputs, input_names, "images")
    fetches = _renamed(path, "outputs", outputs, output_names, None)
    ends_in_probabilities = _ends_in_probabilities(model)

    def call(tensors: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        results = model(list(tensors) if len(tensors) > 1 else tensors[0], training=False)
        by_name = dict(zip(output_names, tf.nest.flatten(results), strict=True))
        found = {name or _default_output_name(by_name[own]): by_name[own] for name, own in fetches}
        predicted, served, _ = _heads(found, bool(outputs), ends_in_probabilities)
        return predicted, served

    def specs(names: Sequence[str]) -> list[Any]:
        return [
            tf.TensorSpec(tensor.shape, tensor.dtype, name=name)
            for name, tensor in zip(names, model.inputs, strict=True)
        ]

    signature_name = {own: name or own for name, own in feeds}
    names = [signature_name[own] for own in input_names]
    predict = tf.function(lambda *tensors: call(tensors)[0])
    serve = tf.function(lambda *tensors: call(tensors)[1])
    holder = tf.Module()
    holder.weights = [variable.value for variable in model.variables]
    tf.saved_model.save(
        holder,
        str(folder),
        signatures={
            PREDICT: predict.get_concrete_function(*specs(names)),
            SERVE: serve.get_concrete_function(*specs([SERVE_INPUT] if len(names) == 1 else names)),
        },
    )
    return exported


def _load_keras(checkpoint: Checkpoint) -> Any:
    import keras

    try:
        # Without the optimizer: it may be one that only the training script knows.
        return keras.models.load_model(checkpoint.path, compile=False, safe_mode=True)
    except Exception as error:  # Keras lets through whatever a layer's own constructor raises
        raise TransformError(
            f"{checkpoint.path}: Keras cannot load it without the training script "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}). Build the "
            f"model from Keras' own layers, without Lambda and classes of the script."
        ) from error


def _renamed(
    path: Path, field: str, wanted: Mapping[str, str], own: Sequence[str], single: str | None
) -> list[tuple[str | None, str]]:
    """Pairs of signature name (None: by what it turns out to be) and the model's own name."""
    if not wanted:
        return [(single, own[0])] if len(own) == 1 else [(name, name) for name in own]
    unknown = sorted(set(wanted.values()) - set(own))
    unnamed = sorted(set(own) - set(wanted.values())) if field == "inputs" else []
    if unknown or unnamed:
        raise TransformError(
            f"{path}: transform.{field} names {', '.join(wanted.values())}; the model has "
            f"{', '.join(own)}. Leave transform.{field} out, or name these."
        )
    return list(wanted.items())


def _ends_in_probabilities(model: Any) -> bool:
    import keras

    last = model.layers[-1]
    activations = (keras.activations.softmax, keras.activations.sigmoid)
    return isinstance(last, keras.layers.Softmax) or (
        getattr(last, "activation", None) in activations
    )
