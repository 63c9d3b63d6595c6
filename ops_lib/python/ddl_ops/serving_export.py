"""Weights to a SavedModel on disk: a TensorFlow 1 base graph with a checkpoint, or a Keras model.

Both get the same two signatures. A classifier (one output [n, k > 1] of floats) is served as

* ``predict_images``: ``images`` -> ``class_index`` int64 [n], ``scores`` [n, k], ``logits`` [n, k]
* ``serving_default``: ``inputs`` -> ``classes`` int64 [n], ``scores`` [n, k]

``scores`` are the output itself where it ends in a softmax, in sigmoids or in an average of such
(there are no ``logits`` then), else its softmax. Any other model gives its outputs under their own
names in both.

TensorFlow is imported inside the functions: importing this module costs nothing.
"""

from __future__ import annotations

import difflib
import importlib
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddl_ops.checkpoints import (
    HDF5,
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
    """What went into the model.

    Attributes:
        checkpoint: whose weights.
        skipped: newer ones that could not be read, with why.
        warnings: for whoever trains.
    """

    checkpoint: Checkpoint
    skipped: tuple[tuple[Checkpoint, str], ...]
    warnings: tuple[str, ...] = ()


def export(
    leftovers: Leftovers,
    checkpoints: Sequence[Checkpoint],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    folder: Path,
    among: Sequence[Path],
) -> Exported:
    """Writes the SavedModel.

    Args:
        leftovers: what the training left.
        checkpoints: to try in this order, until one can be read.
        inputs: name in the signature to tensor of the graph (Keras: to input of the model).
            Empty: the graph's only placeholder without a default, served as ``images``.
        outputs: the same for outputs (Keras: names of layers; of a layer with several outputs,
            ``name``, ``name_1`` and so on). Empty: the only float [n, k] at the end of the graph,
            if no float of more dimensions is there that may be meant.
        folder: where to; must not exist.
        among: folders in which a file that the graph reads is looked for, such as a vocabulary, if
            it is not where the training had it.

    Raises:
        CheckpointMissing: none of the checkpoints can be read.
        TransformError: the graph or the names do not allow it.
    """
    if leftovers.base_graph is None:
        return _export_keras(checkpoints, inputs, outputs, folder)
    return _export_graph(leftovers.base_graph, checkpoints, inputs, outputs, folder, among)


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


def _heads(outputs: Mapping[str, Any], named: bool) -> tuple[dict[str, Any], dict[str, Any], bool]:
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
    ends_in_probabilities = _is_probability(tensor)
    classes = tf.argmax(tensor, axis=1, output_type=tf.int64)
    scores = tensor if ends_in_probabilities else tf.nn.softmax(tensor)
    predicted = {CLASS_INDEX: classes, SCORES: scores}
    if named or not ends_in_probabilities:
        predicted[name] = tensor
    return predicted, {CLASSES: classes, SCORES: scores}, True


def _is_probability(tensor: Any) -> bool:
    """Whether each row of a graph's tensor [n, k] is a softmax, or its values are sigmoids.

    Or an average of such, as of an ensemble.
    """
    row = tensor.shape[-1:]
    known: dict[tuple[str, bool], float | None] = {}

    def weight(one: Any, rows: bool = True) -> float | None:
        """The sum of the positive factors of the probabilities that were added up to a tensor.

        None where it is anything else. Rows of a softmax count as such where `rows` is true.
        """
        key = one.name, rows
        if key not in known:
            known[key] = _weight(one, row if rows else None, weight)
        return known[key]

    try:
        total = weight(tensor)
    except RecursionError:  # a sum of hundreds of terms, one after the other
        return False
    return total is not None and abs(total - 1.0) < 1e-2  # thirds, as bfloat16


def _weight(tensor: Any, row: Any, of: Callable[..., float | None]) -> float | None:
    import tensorflow as tf

    op = tensor.op
    inputs = list(op.inputs)
    rows = row is not None
    match op.type:
        case "Sigmoid":
            return 1.0
        case "Softmax":
            # Reshaped rows are the same rows where their size is the same.
            return 1.0 if rows and tensor.shape[-1:] == row else None
        case "Const":  # an offset
            return 0.0 if _are_zeros(tf.get_static_value(tensor)) else None
        case "Identity" | "Cast" | "Reshape" | "Squeeze":
            return of(inputs[0], rows)
        case "SelectV2" if _are_zeros(tf.get_static_value(inputs[2])):
            return of(inputs[1], rows)  # a softmax with a mask
        case "Add" | "AddV2" | "AddN":
            return _sum_of([of(one, rows) for one in inputs])
        case "Mul" | "RealDiv":
            factor = _positive_number(inputs[1])
            if factor is None and op.type == "Mul":
                inputs.reverse()
                factor = _positive_number(inputs[1])
            weight = None if factor is None else of(inputs[0], rows)
            if factor is None or weight is None:
                return None
            return weight * factor if op.type == "Mul" else weight / factor
        case "Mean" if (parts := _stacked(inputs[0], inputs[1])) is not None:
            total = _sum_of([of(one, rows) for one in parts])
            return None if total is None else total / len(parts)
        case "ConcatV2":  # several heads of sigmoids
            (first, *others) = (of(one, False) for one in inputs[:-1])
            return first if all(one == first for one in others) else None
    return None


def _sum_of(weights: Sequence[float | None]) -> float | None:
    return None if None in weights else sum(filter(None, weights))


def _stacked(tensor: Any, axes: Any) -> Sequence[Any] | None:
    """The tensors that were stacked along these axes, if it is one axis; else None."""
    import tensorflow as tf

    axis, rank = tf.get_static_value(axes), tensor.shape.rank
    if tensor.op.type != "Pack" or axis is None or axis.size != 1 or not rank:
        return None
    same = (axis.item() - tensor.op.get_attr("axis")) % rank == 0
    return list(tensor.op.inputs) if same else None


def _positive_number(tensor: Any) -> float | None:
    import tensorflow as tf

    value = tf.get_static_value(tensor)
    if (
        value is None
        or value.size != 1
        or not (tensor.dtype.is_floating or tensor.dtype.is_integer)
    ):
        return None
    return float(value.item()) if value > 0 else None


def _are_zeros(value: Any) -> bool:
    return value is not None and not value.any()


def _default_output_name(tensor: Any) -> str:
    return "logits" if tensor.shape.rank == 2 and (tensor.shape[1] or 0) > 1 else "outputs"


# --- TensorFlow 1: base graph and checkpoint ---------------------------------------------------


def _export_graph(
    path: Path,
    checkpoints: Sequence[Checkpoint],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    folder: Path,
    among: Sequence[Path],
) -> Exported:
    import tensorflow as tf

    v1 = tf.compat.v1
    meta = _read_meta_graph(path)
    assets, warnings = _find_assets(meta, path, among)
    with tf.Graph().as_default() as graph:
        restorer = v1.train.import_meta_graph(meta, clear_devices=True)
        if restorer is None:
            raise TransformError(f"{path}: the graph has no variables, so there is nothing to load")
        feeds, fetches = _ports(graph, path, inputs, outputs)
        predicted, served, is_classifier = _heads(fetches, bool(outputs))

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
            try:
                builder.add_meta_graph_and_variables(
                    session,
                    [constants.SERVING],
                    signature_def_map=signatures,
                    assets_collection=[graph.get_tensor_by_name(f"{name}:0") for name in assets],
                    main_op=v1.tables_initializer(),
                    clear_devices=True,
                    strip_default_attrs=True,
                )
            except tf.errors.FailedPreconditionError as error:
                names = session.run(v1.report_uninitialized_variables(v1.global_variables()))
                if not names.size:
                    raise
                listed = ", ".join(sorted(name.decode() for name in names)[:5])
                raise TransformError(
                    f"{path}: {exported.checkpoint.path.name} gives no value to {listed}: the base "
                    f"graph was exported by a Saver that saves only some of its variables. Export "
                    f"it by tf.train.export_meta_graph, and save all of its variables."
                ) from error
            builder.save()
    return replace(exported, warnings=tuple(warnings))


def _read_meta_graph(path: Path) -> Any:
    """The MetaGraphDef in a file, binary or text, that holds no op but TensorFlow's own."""
    import tensorflow as tf
    from google.protobuf import message, text_format

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
    if foreign := foreign_ops(meta.graph_def):
        raise TransformError(
            f"{path}: holds ops that TensorFlow alone cannot run: {foreign}. Export the base graph "
            f"before `import ddl` and before the optimizer is made."
        )
    return meta


def foreign_ops(graph: Any) -> str:
    """The ops of a GraphDef that are not TensorFlow's own, each with a node; empty without any."""
    from tensorflow.python.framework import op_def_registry

    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    own_functions = {function.signature.name for function in graph.library.function}
    foreign = {
        node.op: node.name
        for node in nodes
        if node.op not in own_functions and op_def_registry.get(node.op) is None
    }
    return ", ".join(f"{op} ({name})" for op, name in sorted(foreign.items()))


def _find_assets(
    meta: Any, path: Path, among: Sequence[Path]
) -> tuple[Sequence[str], Sequence[str]]:
    """Nodes of the graph that name files which it reads when it is loaded, and warnings.

    A file that is not where the training had it is looked for in the folders ``among``; the node is
    set to what is found there.
    """
    import tensorflow as tf

    nodes = {node.name: node for node in meta.graph_def.node}
    # Not by the collection alone: who exports a graph may leave it out.
    listed = meta.collection_def.get(tf.compat.v1.GraphKeys.ASSET_FILEPATHS)
    tensors = list(listed.node_list.value) if listed else []
    tensors += [
        node.input[1]
        for node in nodes.values()
        if node.op in ("InitializeTableFromTextFile", "InitializeTableFromTextFileV2")
    ]
    found, warnings = [], []
    for name in dict.fromkeys(tensor.partition(":")[0] for tensor in tensors):
        node = nodes[name]
        while node.op == "Identity":
            node = nodes[node.input[0].partition(":")[0]]
        if node.op != "Const":
            raise TransformError(
                f"{path}: {node.op} computes the name of a file that the graph reads, so the file "
                f"cannot go with the model. Give its path as a Python string."
            )
        (file,) = node.attr["value"].tensor.string_val
        there = file.decode("utf-8", "surrogateescape")
        if not tf.io.gfile.exists(there):
            here = _same_file(there, among)
            if here is None:
                raise TransformError(
                    f"{path}: reads {there}, which is not here, so it cannot go with the model. "
                    f"Let the script read it from $DATA_DIR or $RESULT_DIR when it exports the "
                    f"base graph."
                )
            node.attr["value"].tensor.string_val[0] = str(here).encode("utf-8", "surrogateescape")
            warnings.append(
                f"{path.name} reads {there}, which is not here: took {here} in its place"
            )
        found.append(node.name)
    return list(dict.fromkeys(found)), warnings


def _same_file(there: str, among: Sequence[Path]) -> Path | None:
    """The file in one of the folders whose path has the longest end in common with ``there``."""
    parts = Path(there).parts
    ends = (Path(*parts[start:]) for start in range(len(parts)))
    found = (folder / end for end in ends for folder in among)
    return next((path for path in found if path.is_file()), None)


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
        kind = "float [n, k] tensor"
        if len(matrices) == 1 and (others := _rivals(matrices[0], ends)):
            matrices, kind = [*others, *matrices], "float tensor"
        found = _the_only(matrices, path, "outputs", "logits", kind, ends)
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
    several = "s" if len(found) > 1 else ""
    where = " at the end of the graph" if field == "outputs" else ""
    raise TransformError(
        f"{path}: {len(found) or 'no'} {what}{several}{where}"
        f"{f', candidates: {candidates}' if candidates else ''}. Name the one that is meant in the "
        f'manifest, transform.{field}: {{{name}: "<tensor>:0"}}.'
    )


def _rivals(found: Any, ends: Sequence[Any]) -> list[Any]:
    """Other ends that may be the model's output, and the one that is found something left over.

    Those of three dimensions and more. None where the one found ends in probabilities. Nor an end
    that depends on fewer of the model's variables: it lies on the way, as the outputs of an RNN
    whose last state is classified, or aside, as a picture that was resized. Nor what an op gives
    beside its output, as a batch normalization does.
    """
    if _is_probability(found) or _is_log_softmax(found):
        return []
    own = _variables(found)
    return [
        tensor
        for tensor in ends
        if (tensor.shape.rank or 0) > 2 and tensor.value_index == 0 and not _variables(tensor) < own
    ]


def _is_log_softmax(tensor: Any) -> bool:
    op = tensor.op
    while op.type == "Identity":
        op = op.inputs[0].op
    return bool(op.type == "LogSoftmax")


def _variables(tensor: Any) -> set[str]:
    """The names of the variables that a tensor depends on."""
    kinds = ("VarHandleOp", "Variable", "VariableV2")
    return {op.name for op in _ancestors([tensor]) if op.type in kinds}


def _float_ends(feeds: Iterable[Any]) -> list[Any]:
    """Float tensors that depend on the feeds and that no other op reads.

    Variables that were assigned to are none, nor what a branch gets that is not taken.
    """
    reached: list[Any] = []
    seen = set()
    waiting = list(feeds)
    while waiting:
        tensor = waiting.pop(0)
        if tensor.name in seen:
            continue
        seen.add(tensor.name)
        readers = tensor.consumers()
        is_value = tensor.op.type != "Switch" and not tensor.dtype._is_ref_dtype
        if not readers and tensor.dtype.is_floating and is_value:
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


# --- Keras -------------------------------------------------------------------------------------


def _export_keras(
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
    layer_names = list(getattr(model, "output_names", None) or [model.layers[-1].name])
    output_names = _numbered(layer_names)
    for name in outputs.values():
        if layer_names.count(name) > 1 and [*outputs.values()].count(name) > 1:
            raise TransformError(
                f"{path}: transform.outputs names {name} more than once; the model has "
                f"{', '.join(output_names)}. Name these."
            )
    feeds = _renamed(path, "inputs", inputs, input_names, "images")
    fetches = _renamed(path, "outputs", outputs, output_names, None)

    def call(tensors: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        # Several may be a dict.
        given = tf.nest.pack_sequence_as(model.input, tensors) if len(tensors) > 1 else tensors[0]
        results = model(given, training=False)
        by_name = dict(zip(output_names, tf.nest.flatten(results), strict=True))
        found = {name or _default_output_name(by_name[own]): by_name[own] for name, own in fetches}
        predicted, served, _ = _heads(found, bool(outputs))
        return predicted, served

    def specs(names: Sequence[str]) -> list[Any]:
        return [
            tf.TensorSpec(tensor.shape, tensor.dtype, name=name)
            for name, tensor in zip(names, model.inputs, strict=True)
        ]

    signature_name = {own: name or own for name, own in feeds}
    names = [signature_name[own] for own in input_names]
    # Without AutoGraph: errors are what was raised, and Keras needs none of it.
    predict = tf.function(lambda *tensors: call(tensors)[0], autograph=False)
    serve = tf.function(lambda *tensors: call(tensors)[1], autograph=False)
    try:
        signatures = {
            PREDICT: predict.get_concrete_function(*specs(names)),
            SERVE: serve.get_concrete_function(*specs([SERVE_INPUT] if len(names) == 1 else names)),
        }
        holder = tf.Module()
        holder.resources = _resources(path, model, signatures.values())
        tf.saved_model.save(holder, str(folder), signatures=signatures)
    except (TransformError, OSError, tf.errors.OpError):
        raise
    except Exception as error:  # whatever a layer raises that no graph can call, or save
        raise TransformError(
            f"{path}: TensorFlow cannot make a SavedModel of it ({_reason(error)}). Build the "
            f"model from Keras' own layers, or write the SavedModel to $RESULT_DIR/model by a "
            f"second command in execution.command."
        ) from error
    return exported


def _resources(path: Path, model: Any, functions: Iterable[Any]) -> list[Any]:
    """The variables and lookup tables of the model that the functions use."""
    import tensorflow as tf

    kinds = (tf.Variable, tf.saved_model.experimental.TrackableResource)
    own = [
        found for found in tf.train.TrackableView(model).descendants() if isinstance(found, kinds)
    ]
    # Those of Keras 3 are none of TensorFlow's, but have one.
    own += [one.value for one in model.variables if not isinstance(one, tf.Variable)]
    by_handle = {
        id(one.handle if isinstance(one, tf.Variable) else one.resource_handle): one for one in own
    }
    used = {}
    for function in functions:
        for outside, inside in function.graph.captures:
            if outside.dtype != tf.resource:
                continue
            if id(outside) not in by_handle:
                raise TransformError(
                    f"{path}: layer {_layer_of(model, inside)} uses a table or variable that is no "
                    f"attribute of it, so it cannot go with the model. Set it as an attribute of "
                    f"the layer."
                )
            used[id(outside)] = by_handle[id(outside)]
    return list(used.values())


def _layer_of(model: Any, tensor: Any) -> str:
    """The name of the innermost layer that reads the tensor."""
    names = set()
    waiting = [model]
    while waiting:
        layer = waiting.pop()
        names.add(layer.name)
        waiting.extend(getattr(layer, "layers", ()))
    scopes = tensor.consumers()[0].name.split("/")
    # Keras opens a layer's scope more than once, and TensorFlow then adds a number to its name.
    found = (re.sub(r"_\d+$", "", scope) for scope in reversed(scopes))
    return next((name for name in found if name in names), "/".join(scopes))


def _reason(error: Exception) -> str:
    """An error of Keras in a line: which layer it came from, and why, without colours."""
    lines = re.sub("\x1b\\[[0-9;]*m", "", str(error)).splitlines()
    return " ".join([line for line in lines if line.strip()][:2])[:300] or type(error).__name__


def _load_keras(checkpoint: Checkpoint) -> Any:
    keras = _keras_of(checkpoint.path)
    # Horovod's, which is only another one while it trains. By its name its weights are found.
    kind = type("SyncBatchNormalization", (keras.layers.BatchNormalization,), {})
    # Of HDF5 files not each Keras heeds the argument: a Lambda in them is code that is run.
    safe = importlib.import_module(f"{keras.__name__}.src.saving.serialization_lib").SafeModeScope
    try:
        # Without the optimizer: it may be one that only the training script knows.
        with safe(True):
            return keras.models.load_model(
                str(checkpoint.path), {kind.__name__: kind}, compile=False, safe_mode=True
            )
    except Exception as error:  # Keras lets through whatever a layer's own constructor raises
        raise TransformError(
            f"{checkpoint.path}: Keras cannot load it without the training script "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}). Build the "
            f"model from Keras' own layers, without Lambda and classes of the script."
        ) from error


def _keras_of(path: Path) -> Any:
    """The Keras that reads the file: 2 and 3 do not read what the other one saved."""
    import keras

    if not _keras_version(path).startswith("2."):
        return keras
    try:
        import tf_keras
    except ImportError:
        raise CheckpointUnreadable(
            "it was saved by Keras 2: where models are made, pip install './ops_lib[legacy]' "
            "in the sources of ddl-airflow, or write the SavedModel to $RESULT_DIR/model"
        ) from None
    return tf_keras


def _keras_version(path: Path) -> str:
    """What the file says of it; empty if nothing."""
    if path.suffix in HDF5:
        import h5py

        with h5py.File(path, "r") as file:
            return str(file.attrs.get("keras_version", ""))
    with suppress(KeyError, ValueError), zipfile.ZipFile(path) as archive:
        return str(json.loads(archive.read("metadata.json")).get("keras_version", ""))
    return ""


def _numbered(names: Sequence[str]) -> list[str]:
    """The names of layers, and with a number where one has several outputs, as in Keras 2."""
    found: list[str] = []
    for name in names:
        number, one = 0, name
        while one in found or (number and one in names):
            number += 1
            one = f"{name}_{number}"
        found.append(one)
    return found


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
