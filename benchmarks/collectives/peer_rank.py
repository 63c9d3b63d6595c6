"""One rank of a peer: `python -m benchmarks.collectives.peer_rank ddl|horovod|gloo`.

Runs in the environment of the peer, so it imports nothing of others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.collectives.gradient_sets import GRADIENT_SETS
from benchmarks.turns import serve

# A prime, so that a result that is shifted by a piece or a share is seen.
_PERIOD = 1021
_PATTERN = (np.arange(_PERIOD) % 8 + 1).astype(np.float32)


def values(count: int, offset: float) -> np.ndarray:
    """`count` small integers plus `offset`."""
    return np.resize(_PATTERN + np.float32(offset), count)


def require(result: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Raises RuntimeError unless each element of `result` is as `expected`, which repeats."""
    flat = result.reshape(-1)
    whole = len(flat) // _PERIOD * _PERIOD
    rows, rest = flat[:whole].reshape(-1, _PERIOD), flat[whole:]
    alike = np.array_equal(rows, np.broadcast_to(expected, rows.shape)) and np.array_equal(
        rest, expected[: len(rest)]
    )
    # Where the number of ranks is no power of two, an average may be rounded in two ways.
    if not alike and not np.allclose(flat, np.resize(expected, len(flat)), rtol=1e-6, atol=0):
        raise RuntimeError(f"{what}: wrong result, beginning {flat[:4]}, not {expected[:4]}")


class Once:
    """Makes each thing once and keeps it."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class TensorFlowRank:
    """Ways to reduce in tf.functions."""

    def __init__(self, rank: int, size: int) -> None:
        import tensorflow as tf

        self.rank, self.size = rank, size
        self.one: dict[str, Callable[[tf.Tensor, str], tf.Tensor]] = {}  # sums a tensor
        self.many: dict[str, Callable[[list[tf.Tensor]], list[tf.Tensor]]] = {}  # averages
        self.versions = {"tensorflow": tf.__version__}
        self._once = Once()

    def chain(self, way: str, nbytes: int, length: int) -> Any:
        """A function of `length` sums, each of the result of the one before."""
        import tensorflow as tf

        def run(tensor: tf.Tensor) -> tf.Tensor:
            for step in range(length):
                tensor = self.one[way](tensor, f"{way}_{nbytes}_{length}_{step}")
            return tensor

        return self._once((way, nbytes, length), lambda: tf.function(run))

    def averages(self, way: str, name: str) -> Any:
        """A function that averages a list of gradients."""
        import tensorflow as tf

        return self._once((way, name), lambda: tf.function(lambda t: self.many[way](t)))

    def gradients(self, name: str) -> list[Any]:
        import tensorflow as tf

        def make() -> list[tf.Tensor]:
            return [
                tf.constant(values(int(np.prod(shape)), self.rank + i % 4).reshape(shape))
                for i, shape in enumerate(GRADIENT_SETS[name]())
            ]

        return self._once((name,), make)

    def meet(self) -> None:
        import tensorflow as tf

        self.chain(next(iter(self.one)), 4, 1)(tf.constant([0.0]))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        import tensorflow as tf

        way, calls = request["way"], request["calls"]
        if "set" in request:
            tensors = self.gradients(request["set"])
            function = self.averages(way, request["set"])

            def check(results: list[tf.Tensor]) -> None:
                for i, result in enumerate(results):
                    expected = _PATTERN + np.float32(i % 4 + (self.size - 1) / 2)
                    require(result.numpy(), expected, f"{way}, tensor {i} of {request['set']}")
        else:
            nbytes, length = request["nbytes"], request["chain"]
            tensors = tf.constant(values(nbytes // 4, self.rank))
            function = self.chain(way, nbytes, length)
            expected = chained(self.size, length)

            def check(results: tf.Tensor) -> None:
                require(results.numpy(), expected, f"{way}, {nbytes} bytes")

        check(function(tensors))
        self.meet()
        start = time.perf_counter()
        for _ in range(calls):
            results = function(tensors)
        seconds = (time.perf_counter() - start) / calls
        check(results)
        return {"seconds": seconds}


def chained(size: int, length: int) -> np.ndarray:
    """What a chain of sums over `size` ranks makes of their values."""
    total = size * _PATTERN + np.float32(size * (size - 1) / 2)
    return total * np.float32(float(size) ** (length - 1))


def prepare_tensorflow() -> None:
    """One thread for each rank, and no advice about the many functions made here."""
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def ddl_rank() -> TensorFlowRank:
    import ddl
    import tensorflow as tf
    from ddl_ops.gradients import reduce_gradients
    from ddl_ops.loader import operations

    prepare_tensorflow()
    ddl.init()
    rank = TensorFlowRank(ddl.rank(), ddl.size())

    def mpi(tensors: list[tf.Tensor], op: str) -> list[tf.Tensor]:
        return list(operations().all_reduce_n(tensors, op=op, mpi=True))

    rank.one["ddl"] = lambda tensor, name: ddl.allreduce(tensor, average=False)
    rank.one["mpi"] = lambda tensor, name: mpi([tensor], "sum")[0]
    rank.many["ddl"] = reduce_gradients
    rank.many["mpi"] = lambda tensors: mpi(tensors, "avg")
    return rank


def horovod_rank() -> TensorFlowRank:
    import horovod
    import horovod.tensorflow as hvd

    prepare_tensorflow()
    hvd.init()
    rank = TensorFlowRank(hvd.rank(), hvd.size())
    rank.one["horovod"] = lambda tensor, name: hvd.allreduce(tensor, op=hvd.Sum, name=name)
    # As DistributedOptimizer does: one for each, which Horovod then fuses.
    rank.many["horovod"] = lambda tensors: [
        hvd.allreduce(tensor, op=hvd.Average, name=f"gradient_{len(tensors)}_{i}")
        for i, tensor in enumerate(tensors)
    ]
    rank.many["horovod_grouped"] = lambda tensors: hvd.grouped_allreduce(
        tensors, op=hvd.Average, name=f"gradients_{len(tensors)}"
    )
    rank.versions["horovod"] = horovod.__version__
    return rank


class GlooRank:
    """torch.distributed reduces in place, so each call begins with a copy, which is not timed."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(
            "gloo",
            init_method=f"file://{os.environ['GLOO_FILE']}",
            rank=self.rank,
            world_size=self.size,
        )
        self.versions = {"torch": torch.__version__}
        self._once = Once()

    def gradients(self, name: str) -> list[Any]:
        import torch

        def make() -> list[torch.Tensor]:
            return [
                torch.from_numpy(values(int(np.prod(shape)), self.rank + i % 4))
                for i, shape in enumerate(GRADIENT_SETS[name]())
            ]

        return self._once((name,), make)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        seconds = 0.0
        for call in range(request["calls"] + 1):
            if "set" in request:
                parts = self.gradients(request["set"])
                results = [torch.empty_like(part) for part in parts]
                length = 1
            else:
                parts = [torch.from_numpy(values(request["nbytes"] // 4, self.rank))]
                results = [part.clone() for part in parts]
                length = request["chain"]
            dist.barrier()
            start = time.perf_counter()
            if "set" in request:
                # One flat tensor, as DistributedDataParallel makes, and back.
                flat = torch.cat(parts)
                dist.all_reduce(flat)
                flat /= self.size
                torch.split_with_sizes_copy(flat, [len(part) for part in parts], out=results)
            else:
                for _ in range(length):
                    dist.all_reduce(results[0])
            if call > 0:  # the first is to warm up
                seconds += time.perf_counter() - start
            for i, result in enumerate(results):
                expected = (
                    _PATTERN + np.float32(i % 4 + (self.size - 1) / 2)
                    if "set" in request
                    else chained(self.size, length)
                )
                if call in (0, request["calls"]):
                    require(result.numpy(), expected, f"gloo, {request}")
        return {"seconds": seconds / request["calls"]}


def main() -> None:
    make = {"ddl": ddl_rank, "horovod": horovod_rank, "gloo": GlooRank}[sys.argv[1]]
    rank = make()
    serve(rank.rank, rank.versions, rank.answer)


if __name__ == "__main__":
    main()
