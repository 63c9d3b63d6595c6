"""What a training spent on communication, from the statistics that the ops leave (docs/ops.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Below this share of a run, nobody need look for who waits for whom.
_WORTH_NAMING = 0.01


def communication_line(statistics: Mapping[str, Any]) -> str:
    """One line for a log: ``25% of 4.0 s on rank 0, 0% waiting for others``.

    Shares are of the run, for the rank that communicated longest. The straggler is named where
    waiting takes a percent of the run.

    Args:
        statistics: the object in ``ddl/stats.json``.

    Raises:
        KeyError: something is missing in it.
    """
    ranks = statistics["ranks"]
    longest = max(ranks, key=lambda rank: rank["comm_s"])
    run_s = max(rank["run_s"] for rank in ranks)
    if not run_s:
        return "none"
    line = (
        f"{longest['comm_s'] / run_s:.0%} of {run_s:.1f} s on rank {longest['rank']}, "
        f"{longest['wait_s'] / run_s:.0%} waiting for others"
    )
    straggler = statistics["straggler"]
    waited_s = max(rank["wait_s"] for rank in ranks)
    if straggler is None or waited_s < _WORTH_NAMING * run_s:
        return line
    who = ranks[straggler["rank"]]
    return (
        f"{line}; the others waited most for rank {who['rank']} on {who['host']}, "
        f"which itself waited {straggler['share']:.0%} less"
    )
