"""This process's place, from its environment."""

from __future__ import annotations

from ddl_ops.environment import PLACEMENT


def get_env_rank_and_size() -> tuple[int, int]:
    """Number among all ranks, and their number, before hvd.init(); 0 and 1 outside a job."""
    return PLACEMENT.rank, PLACEMENT.size
