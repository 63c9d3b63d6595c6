"""What ``compute_configuration.name`` stands for: how many ranks one node runs, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Place:
    """Where Airflow runs a task. Empty is Airflow's own default.

    Attributes:
        pool: of Airflow; limits what runs at the same time.
        queue: of workers; only some executors have queues.
        executor: one of those in Airflow's ``[core] executor``.
        priority_weight: above others that wait for the same slots.
    """

    pool: str = ""
    queue: str = ""
    executor: str = ""
    priority_weight: int = 1


@dataclass(frozen=True)
class Compute:
    """One kind of node.

    Attributes:
        name: as manifests write it, e.g. ``v100x2``.
        slots: ranks per node: one for each GPU, or for each CPU share.
        gpu: whether each rank expects a GPU of its own.
        nodes: how many the site has; None: nobody says.
        train: where the training runs. It takes a slot of the pool for each rank.
        other_steps: where all other steps of the run do.
    """

    name: str
    slots: int
    gpu: bool
    nodes: int | None = None
    train: Place = Place()
    other_steps: Place = Place()


def _gpu(model: str, *counts: int) -> dict[str, Compute]:
    names = {n: model if n == 1 else f"{model}x{n}" for n in counts}
    return {name: Compute(name, n, gpu=True) for n, name in names.items()}


def _cpu(*counts: int) -> dict[str, Compute]:
    names = {n: "cpu" if n == 1 else f"cpu{n}" for n in counts}
    return {name: Compute(name, n, gpu=False) for n, name in names.items()}


# The models are those that Watson Machine Learning published; cpu, cpu2, ... are ours, and so is
# gpu: a node of which only launcher.slots says how many GPUs it has, or one. A site changes and
# adds to them: ddl_airflow.core.manifest.site.
COMPUTE: Mapping[str, Compute] = MappingProxyType(
    _gpu("k80", 1, 2, 4)
    | _gpu("p100", 1, 2)
    | _gpu("v100", 1, 2, 4)
    | _gpu("gpu", 1)
    # So called before the models had names.
    | {name: Compute(name, n, gpu=True) for n, name in ((1, "small"), (2, "medium"), (4, "large"))}
    | _cpu(1, 2, 4, 8, 16)
)
