"""One rank of a peer: `python -m benchmarks.collectives.peer_rank ddl|horovod|gloo [pairs]`.

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
    period = len(expected)
    whole = len(flat) // period * period
    rows, rest = flat[:whole].reshape(-1, period), flat[whole:]
    alike = np.array_equal(rows, np.broadcast_to(expected, rows.shape)) and np.array_equal(
        rest, expected[: len(rest)]
    )
    # Where the number of ranks is no power of two, an average may be rounded in two ways.
    if not alike and not np.allclose(flat, np.resize(expected, len(flat)), rtol=1e-6, atol=0):
        raise RuntimeError(f"{what}: wrong result, beginning {flat[:4]}, not {expected[:4]}")


def elements(op: str, nbytes: int, ranks: int) -> int:
    """How many a rank brings to `op`: float32, and one for each rank where they are shared out."""
    count = nbytes // 4
    return count if op not in ("reducescatter", "alltoall") else max(1, count // ranks) * ranks


def result_of(op: str, count: int, members: list[int], rank: int) -> np.ndarray:
    """What rank `rank` gets of `op`, to which each of `members` brings values(count, member).

    A broadcast is from the first of them.
    """
    if op == "broadcast":
        return values(count, members[0])
    if op == "allgather":
        return np.concatenate([values(count, member) for member in members])
    share = count // len(members)
    mine = slice(members.index(rank) * share, (members.index(rank) + 1) * share)
    if op == "alltoall":
        return np.concatenate([values(count, member)[mine] for member in members])
    total = np.sum([values(count, member) for member in members], axis=0, dtype=np.float32)
    return total[mine] if op == "reducescatter" else total


class Once:
    """Makes each thing once and keeps it."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], Any] = {}

    def __call__(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


# op(tensor, name, process set) of a column.
Collective = Callable[[Any, str, Any], Any]


class TensorFlowRank:
    """Ways to do collectives in tf.functions."""

    def __init__(self, rank: int, size: int) -> None:
        import tensorflow as tf

        self.rank, self.size = rank, size
        self.one: dict[tuple[str, str], Collective] = {}  # by way and op; sums a tensor
        self.many: dict[str, Callable[[list[tf.Tensor]], list[tf.Tensor]]] = {}  # averages
        self.everyone: Any = None  # the process set of all ranks
        self.pair: Any = None  # that of this rank and its neighbour, where there are pairs
        self.versions = {"tensorflow": tf.__version__}
        self._once = Once()

    def add_pairs(self, add: Callable[[list[int]], Any]) -> None:
        """Process sets of ranks 0 and 1, 2 and 3, ...; `add` makes one, on all ranks."""
        for first in range(0, self.size, 2):
            pair = add([first, first + 1])
            if first == self.rank // 2 * 2:
                self.pair = pair

    def chain(self, way: str, op: str, nbytes: int, length: int, pairs: bool) -> Any:
        """A function of `length` collectives, one after the other.

        Sums and broadcasts are of the result of the one before, the others of the same tensor. It
        returns the last result, and the first element of each: TensorFlow leaves out an operation
        of no side effects, as Horovod's are, whose result nobody takes.
        """
        import tensorflow as tf

        process_set = self.pair if pairs else self.everyone
        name = f"{way}_{op}_{nbytes}_{length}_{self.rank // 2 if pairs else 'all'}"

        def run(tensor: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
            result, firsts = tensor, []
            for step in range(length):
                given = result if op in ("allreduce", "broadcast") else tensor
                with tf.control_dependencies([result]):
                    result = self.one[way, op](given, f"{name}_{step}", process_set)
                firsts.append(result[:1])
            return result, firsts

        return self._once((name,), lambda: tf.function(run))

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

        way, _ = next(iter(self.one))
        self.chain(way, "allreduce", 4, 1, False)(tf.constant([0.0]))

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
            op, nbytes, length = request["op"], request["nbytes"], request["chain"]
            first = self.rank // 2 * 2
            members = [first, first + 1] if request["pairs"] else list(range(self.size))
            count = elements(op, nbytes, len(members))
            tensors = tf.constant(values(count, self.rank))
            function = self.chain(way, op, nbytes, length, request["pairs"])
            if op == "allreduce":
                expected = chained(members, length)
            else:
                expected = result_of(op, count, members, self.rank)

            def check(results: tuple[tf.Tensor, list[tf.Tensor]]) -> None:
                got = results[0].numpy()
                if op != "allreduce" and len(got) != len(expected):
                    raise RuntimeError(f"{way}, {op}: {len(got)} elements, not {len(expected)}")
                require(got, expected, f"{way}, {op}, {nbytes} bytes")

        check(function(tensors))
        self.meet()
        start = time.perf_counter()
        for _ in range(calls):
            results = function(tensors)
        seconds = (time.perf_counter() - start) / calls
        check(results)
        return {"seconds": seconds}


def chained(members: list[int], length: int) -> np.ndarray:
    """What a chain of sums over `members` makes of their values."""
    total = len(members) * _PATTERN + np.float32(sum(members))
    return total * np.float32(float(len(members)) ** (length - 1))


def prepare_tensorflow() -> None:
    """One thread for each rank, and no advice about the many functions made here."""
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def ddl_rank(pairs: bool) -> TensorFlowRank:
    import ddl
    import tensorflow as tf
    from ddl_ops import collectives, process_sets
    from ddl_ops.gradients import reduce_gradients
    from ddl_ops.loader import operations

    prepare_tensorflow()
    ddl.init()
    rank = TensorFlowRank(ddl.rank(), ddl.size())
    rank.everyone = 0
    if pairs:
        rank.add_pairs(process_sets.add)

    def mpi(tensors: list[tf.Tensor], op: str) -> list[tf.Tensor]:
        return list(operations().all_reduce_n(tensors, op=op, mpi=True))

    def broadcast(tensor: tf.Tensor, name: str, members: int) -> tf.Tensor:
        root = process_sets.ranks(members)[0]
        return collectives.bcast(tensor, root=root, process_set=members)

    rank.one = {
        ("ddl", "allreduce"): lambda tensor, name, members: collectives.allreduce(
            tensor, average=False, process_set=members
        ),
        ("ddl", "allgather"): lambda tensor, name, members: collectives.allgather(
            tensor, process_set=members
        ),
        ("ddl", "reducescatter"): lambda tensor, name, members: collectives.reducescatter(
            tensor, "sum", process_set=members
        ),
        ("ddl", "alltoall"): lambda tensor, name, members: collectives.alltoall(
            tensor, process_set=members
        )[0],
        ("ddl", "broadcast"): broadcast,
        ("mpi", "allreduce"): lambda tensor, name, members: mpi([tensor], "sum")[0],
    }
    rank.many["ddl"] = reduce_gradients
    rank.many["mpi"] = lambda tensors: mpi(tensors, "avg")
    return rank


def horovod_rank(pairs: bool) -> TensorFlowRank:
    import horovod
    import horovod.tensorflow as hvd

    prepare_tensorflow()
    if pairs:
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.init()
    rank = TensorFlowRank(hvd.rank(), hvd.size())
    rank.everyone = hvd.global_process_set
    if pairs:
        rank.add_pairs(hvd.add_process_set)

    def root(members: Any) -> int:
        return 0 if members is hvd.global_process_set else hvd.rank() // 2 * 2

    rank.one = {
        ("horovod", "allreduce"): lambda tensor, name, members: hvd.allreduce(
            tensor, op=hvd.Sum, name=name, process_set=members
        ),
        ("horovod", "allgather"): lambda tensor, name, members: hvd.allgather(
            tensor, name=name, process_set=members
        ),
        ("horovod", "reducescatter"): lambda tensor, name, members: hvd.reducescatter(
            tensor, op=hvd.Sum, name=name, process_set=members
        ),
        ("horovod", "alltoall"): lambda tensor, name, members: hvd.alltoall(
            tensor, name=name, process_set=members
        ),
        ("horovod", "broadcast"): lambda tensor, name, members: hvd.broadcast(
            tensor, root(members), name=name, process_set=members
        ),
    }
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
                    else chained(list(range(self.size)), length)
                )
                if call in (0, request["calls"]):
                    require(result.numpy(), expected, f"gloo, {request}")
        return {"seconds": seconds / request["calls"]}


def main() -> None:
    peer, pairs = sys.argv[1], "pairs" in sys.argv[2:]
    make: dict[str, Callable[[], Any]] = {
        "ddl": lambda: ddl_rank(pairs),
        "horovod": lambda: horovod_rank(pairs),
        "gloo": GlooRank,
    }
    rank = make[peer]()
    serve(rank.rank, rank.versions, rank.answer)


if __name__ == "__main__":
    main()
