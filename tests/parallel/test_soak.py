"""A minute's worth of `make soak`, in seconds: tests/soak/README.md."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.soak.collectives import soak
from tests.soak.kills import kill_once


@pytest.mark.parametrize(
    ("ranks", "transport", "collectives", "most_bytes", "shuffle"),
    [
        (2, "shm", 400, 4 << 20, False),
        (3, "shm", 200, 1 << 20, True),
        (3, "mpi", 200, 1 << 20, True),
        (8, "shm", 100, 256 << 10, False),
    ],
)
def test_random_collectives_are_exact(
    driver: Path, ranks: int, transport: str, collectives: int, most_bytes: int, shuffle: bool
) -> None:
    soaked = soak(
        driver,
        ranks=ranks,
        transport=transport,
        collectives=collectives,
        seed=2026,
        most_bytes=most_bytes,
        shuffle=shuffle,
        timeout_s=120,
    )
    assert soaked.faults(ranks) == []
    assert {one.collectives for one in soaked.ranks} == {collectives}
    assert len({one.elements for one in soaked.ranks}) == 1
    assert soaked.ranks[0].elements > 1_000_000


@pytest.mark.parametrize(
    ("ranks", "transport", "shuffle"),
    [(2, "shm", False), (3, "shm", True), (3, "mpi", False)],
)
def test_what_is_wrong_on_purpose_is_an_error_on_every_rank_and_nothing_else_is(
    driver: Path, ranks: int, transport: str, shuffle: bool
) -> None:
    soaked = soak(
        driver,
        ranks=ranks,
        transport=transport,
        collectives=500,
        seed=2026,
        most_bytes=64 << 10,
        shuffle=shuffle,
        wrong=5,
        timeout_s=120,
    )
    assert soaked.faults(ranks) == []
    assert {one.collectives for one in soaked.ranks} == {500}
    assert {one.mistakes for one in soaked.ranks} == {soaked.ranks[0].mistakes}
    assert soaked.ranks[0].mistakes > 50


@pytest.mark.parametrize(
    ("ranks", "transport", "phase", "alone"),
    [
        (2, "shm", "middle", True),
        (4, "shm", "middle", True),
        (3, "shm", "start", False),
        (2, "mpi", "middle", False),
        (3, "shm", "end", False),
    ],
)
def test_killed_rank_ends_the_others_and_leaves_nothing(
    driver: Path, ranks: int, transport: str, phase: str, alone: bool
) -> None:
    chance = random.Random(4)
    tried = None
    while tried is None:  # None: the rank had ended before the kill
        tried = kill_once(
            driver, ranks=ranks, transport=transport, phase=phase, alone=alone, chance=chance
        )
    assert tried.faults == []
    if alone:  # 5: Aborted
        assert set(tried.ends.values()) == {"error 5"}
