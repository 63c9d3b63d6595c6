"""Collectives on NumPy arrays, with a library that stands for ours."""

from __future__ import annotations

import numpy as np
import pytest
from ddl_ops import arrays

ABORTED = 5


class Library:
    """Ends each collective with an error."""

    def __init__(self, messages_under_way: bool) -> None:
        self._messages_under_way = messages_under_way

    def ddl_dtype(self, name: bytes) -> int:
        return 0

    def ddl_all_reduce(self, *arguments: object) -> int:
        return ABORTED

    def ddl_broadcast(self, *arguments: object) -> int:
        return ABORTED

    def ddl_has_abandoned_messages(self) -> int:
        return int(self._messages_under_way)


@pytest.mark.parametrize("under_way", [True, False])
def test_what_messages_may_still_be_written_to_is_kept(monkeypatch, under_way):
    kept: list[np.ndarray] = []
    monkeypatch.setattr(arrays, "runtime", lambda: Library(under_way))
    monkeypatch.setattr(arrays, "_abandoned", kept)
    mine = np.arange(3.0)
    with pytest.raises(RuntimeError):
        arrays.average(mine)
    with pytest.raises(RuntimeError):
        arrays.broadcast([mine], 0)
    assert [array.tolist() for array in kept] == ([[0.0, 1.0, 2.0]] * 2 if under_way else [])
    assert mine.tolist() == [0.0, 1.0, 2.0], "what the caller has is not what is reduced"
