"""Keeps collectives of functions and branches within a tf.function in the order of the program.

TensorFlow orders the stateful ops of a function, collectives too, but a call or a branch that uses
a variable only among those that use the same one; and so a loop over a dataset, of which AutoGraph
makes a dataset with the steps in it. Then it starts what is within as soon as that is ready, and
what is ready first differs from rank to rank. Here such ops join the order of the others. Imported
for its effect, once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from tensorflow.python.framework import auto_control_deps, dtypes  # noqa: TID253

from ddl_ops.loader import COLLECTIVES

# The stateful ops that run functions, and the attributes that name these.
_CALLS = {
    "StatefulPartitionedCall": ("f",),
    "If": ("then_branch", "else_branch"),
    "Case": ("branches",),
    "While": ("cond", "body"),
}
# Those that run a dataset: functions of their own, and of the datasets that it is made of.
_DATASETS = ("ReduceDataset", "DatasetToSingleElement", "DatasetToTFRecord")
# Stands for what an op changes that changes no variable: TensorFlow has None in place of a
# resource's number there.
_ORDER = SimpleNamespace(_id=None, op=SimpleNamespace(type="", inputs=()))
# Of functions, whether they run collectives in the order of the program.
_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


@auto_control_deps.register_acd_resource_resolver
def ddl_calls_of_collectives(op: Any, reads: Any, writes: Any) -> bool:
    """Adds the order to what `op` writes, if it runs collectives. Whether it has added anything."""
    if not (reads or writes) or _ORDER in writes:
        return False  # in order already
    if not any(map(_is_ordered, _functions(op))):
        return False
    writes.add(_ORDER)
    return True


def _functions(op: Any) -> Iterator[Any]:
    """Those that `op` may run, and those that they may."""
    for name in _names(op):
        function = op.graph._get_function(name)
        if function is not None:
            yield function
            yield from getattr(function, "children", ())


def _names(op: Any) -> Iterator[str]:
    """Of the functions that `op` may run itself."""
    for attribute in _CALLS.get(op.type, ()):
        named = op.get_attr(attribute)
        yield from (one.name for one in (named if isinstance(named, list) else [named]))
    if op.type in _DATASETS:
        for one in _with_datasets_of(op):
            for value in one.node_def.attr.values():
                yield from (named.name for named in (value.func, *value.list.func) if named.name)


def _with_datasets_of(op: Any) -> Iterator[Any]:
    """`op`, and those that make the datasets that it is given."""
    waiting, seen = [op], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        yield one
        waiting += [given.op for given in one.inputs if given.dtype == dtypes.variant]


def _is_ordered(function: Any) -> bool:
    if function not in _known:
        _known[function] = any(
            node.op in COLLECTIVES and node.attr["ordered"].b
            for node in function.definition.node_def
        )
    return _known[function]
