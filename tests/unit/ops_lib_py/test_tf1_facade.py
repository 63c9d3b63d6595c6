"""What scripts of the first PowerAI give to Init."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow")

from ddl_ops.environment import Placement
from ddl_ops.tf1 import facade


@pytest.mark.parametrize(
    ("ranks", "gpus", "given", "wish"),
    [
        (4, 4, 4, -1),  # how many each host uses, as in 2017
        (2, 4, 2, -1),
        (1, 1, 1, -1),
        (1, 0, 1, -1),
        (1, 4, 1, 1),  # the GPU that the rank would like, as since 2018
        (4, 4, 3, 3),
        (4, 4, -1, -1),
    ],
)
def test_a_number_of_gpus_is_told_from_a_gpu(monkeypatch, ranks, gpus, given, wish):
    monkeypatch.setattr(facade, "PLACEMENT", Placement(0, ranks, 0, ranks, launched=True))
    devices = [f"gpu{i}" for i in range(gpus)]
    monkeypatch.setattr(facade.v2.config, "list_physical_devices", lambda kind: devices)
    asked = []

    def op(gpu, **_):
        asked.append(gpu)
        return range(5)

    facade._initialising(op)(given, mode="")
    assert asked == [wish]
