from __future__ import annotations

import pytest

from ddl_airflow.core.communication import communication_line


def rank(number, comm_s, wait_s, run_s=10.0):
    return {
        "rank": number,
        "host": f"h{number}",
        "comm_s": comm_s,
        "wait_s": wait_s,
        "run_s": run_s,
    }


def test_share_of_the_run_and_who_is_waited_for():
    statistics = {
        "straggler": {"rank": 1, "share": 0.95},
        "ranks": [rank(0, 3.1, 2.0), rank(1, 1.2, 0.1)],
    }
    assert communication_line(statistics) == (
        "31% of 10.0 s on rank 0, 20% waiting for others; "
        "the others waited most for rank 1 on h1, which itself waited 95% less"
    )


def test_ranks_that_hardly_wait_have_no_straggler():
    statistics = {
        "straggler": {"rank": 1, "share": 1.0},
        "ranks": [rank(0, 3.0, 0.09), rank(1, 2.0, 0.0)],
    }
    assert communication_line(statistics) == "30% of 10.0 s on rank 0, 1% waiting for others"


def test_one_rank_waits_for_nobody():
    statistics = {"straggler": None, "ranks": [rank(0, 0.5, 0.2)]}
    assert communication_line(statistics) == "5% of 10.0 s on rank 0, 2% waiting for others"


def test_no_collective_is_no_communication():
    statistics = {"straggler": None, "ranks": [rank(0, 0.0, 0.0, 0.0)]}
    assert communication_line(statistics) == "none"


def test_what_is_no_statistics_is_an_error():
    with pytest.raises(KeyError):
        communication_line({"ranks": [{"rank": 0}]})
