"""What the benchmarks make of their samples. The samples come from real runs only."""

from __future__ import annotations

from benchmarks.collectives.__main__ import SIZES, summarise, table

LINES = [
    "# stream-copy together 8e9",
    *("shm 1024 1e-6", "mpi 1024 4e-6", "MPI_Allreduce 1024 2e-6"),
    *("shm 1024 2e-6", "mpi 1024 4e-6", "MPI_Allreduce 1024 8e-6"),
    *("shm 1024 9e-6", "mpi 1024 4e-6", "MPI_Allreduce 1024 9e-6"),
    *("shm 134217728 0.016777216", "mpi 134217728 0.1", "MPI_Allreduce 134217728 0.1"),
]


def test_ratios_are_taken_within_rounds() -> None:
    machine, (small, large) = summarise(LINES)
    assert machine == {"stream-copy together": 8e9}
    assert small["shm"]["ratio"] == 2  # of 2, 4 and 1; the medians' would be 4
    assert small["shm"]["median_s"] == 2e-6
    assert small["shm"]["ratio_quartiles"] == [1, 4]
    assert round(large["shm"]["algbw"]) == 8e9


def test_table_has_bus_bandwidth_and_share_of_the_bound() -> None:
    machine, rows = summarise(LINES)
    _, small, large = table(rows, ranks=4, machine=machine).splitlines()
    assert "%" not in small  # in the caches
    assert large.split()[:2] == ["128", "MiB"]
    assert large.split()[5:8] == ["8.00", "12.00", "100%"]


def test_sizes_are_those_of_the_docs() -> None:
    assert (SIZES[0], SIZES[-1]) == (4, 256 << 20)
