from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from ddl_ops.gradients import split_into_groups


def test_without_a_limit_all_go_together_last_first() -> None:
    assert split_into_groups([5, 1, 9], None) == [[2, 1, 0]]


def test_groups_keep_the_limit() -> None:
    assert split_into_groups([4, 3, 3, 5, 5], 10) == [[4, 3], [2, 1, 0]]
    assert split_into_groups([4, 3, 4, 5, 5], 10) == [[4, 3], [2, 1], [0]]


def test_large_one_stands_alone() -> None:
    assert split_into_groups([2, 100, 3, 4], 10) == [[3, 2], [1], [0]]


def test_scalars_and_empty_ones_count_what_they_hold() -> None:
    assert split_into_groups([0, 1, 0, 1], 1) == [[3, 2], [1, 0]]


def test_nothing_gives_no_group() -> None:
    assert split_into_groups([], 10) == []
