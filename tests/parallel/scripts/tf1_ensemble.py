"""Two models of TensorFlow 1, trained in a thread each: how it went, as a program says it."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

import ddl  # noqa: F401  for its effect
import tensorflow as tf
from speech import RANK, say
from threads import in_threads

v1 = tf.compat.v1


def train_in_threads(built_by_threads: bool, scoped: bool) -> list[object]:
    """Of each thread the weights that are not what its steps should have given, or its error."""

    def build(name: str, scale: float) -> tuple[float, tf.Graph, dict[str, Any]]:
        graph = tf.Graph()
        with graph.as_default(), v1.variable_scope(name) if scoped else contextlib.nullcontext():
            # Rank 0's, once it is initialised.
            w = v1.get_variable("w", initializer=scale * (RANK + 1), use_resource=True)
            step = v1.train.GradientDescentOptimizer(1.0).minimize(w * scale)
            return scale, graph, {"w": w, "step": step, "init": v1.global_variables_initializer()}

    def train(scale: float, graph: tf.Graph, ops: dict[str, Any]) -> list[float]:
        with v1.Session(graph=graph) as session:
            session.run(ops["init"])
            seen = [session.run(ops["w"])]
            for step in range(25):
                # As if the models took turns at being the faster one, another one on each rank.
                time.sleep(0.002 * ((step * 7 + (RANK * 5 if scale == 1 else 0)) % 4))
                session.run(ops["step"])
                seen.append(session.run(ops["w"]))
        return [value for step, value in enumerate(seen) if value != scale * (1 - step)]

    models = [("a", 1.0), ("b", 1000.0)]
    if built_by_threads:
        return in_threads(*(lambda m=m: train(*build(*m)) for m in models), names=("a", "b"))
    built = [build(*model) for model in models]
    return in_threads(*(lambda one=one: train(*one) for one in built), names=("a", "b"))


if __name__ == "__main__":
    for name, ended in zip("ab", train_in_threads(sys.argv[1] == "threads", False), strict=True):
        say(f"{name}: {ended.message if isinstance(ended, tf.errors.OpError) else ended}")
