"""What ``compute_configuration.name`` stands for: how many ranks one node runs, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Compute:
    """One kind of node.

    Attributes:
        name: as manifests write it, e.g. ``v100x2``.
        slots: ranks per node: one for each GPU, or for each CPU share.
        gpu: whether each rank expects a GPU of its own.
    """

    name: str
    slots: int
    gpu: bool


def _gpu(model: str, *counts: int) -> dict[str, Compute]:
    names = {n: model if n == 1 else f"{model}x{n}" for n in counts}
    return {name: Compute(name, n, gpu=True) for n, name in names.items()}


def _cpu(*counts: int) -> dict[str, Compute]:
    names = {n: "cpu" if n == 1 else f"cpu{n}" for n in counts}
    return {name: Compute(name, n, gpu=False) for n, name in names.items()}


# The models are those that Watson Machine Learning published; cpu, cpu2, ... are ours, and so is
# gpu: a node of which only launcher.slots says how many GPUs it has, or one.
COMPUTE: Mapping[str, Compute] = MappingProxyType(
    _gpu("k80", 1, 2, 4)
    | _gpu("p100", 1, 2)
    | _gpu("v100", 1, 2, 4)
    | _gpu("gpu", 1)
    | _cpu(1, 2, 4, 8, 16)
)
