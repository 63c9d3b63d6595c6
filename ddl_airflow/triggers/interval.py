"""How often triggers look."""

from __future__ import annotations

# A triggerer that never sleeps serves nobody else; and one that sleeps for longer sees nothing.
_LEAST_S, _MOST_S = 0.001, 7 * 86400.0
DATA_S, JOB_S = 60.0, 5.0  # between two looks, where nobody says anything else


def problem_of(seconds: float) -> str:
    """What is wrong with an interval, to be said after its name; empty: nothing is."""
    if _LEAST_S <= seconds <= _MOST_S:  # not so NaN
        return ""
    return f"is {seconds:g}; it is seconds between two looks, from {_LEAST_S:g} to {_MOST_S:.0f}"


def usable(seconds: float) -> float:
    """The interval of who waits for a job; the usual one, where an earlier version of ours has
    stored what is none: a trigger that raised for that would leave its job to nobody.
    """
    return JOB_S if problem_of(seconds) else seconds
