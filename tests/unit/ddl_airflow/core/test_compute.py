from __future__ import annotations

import pytest

from ddl_airflow.core.compute import COMPUTE


@pytest.mark.parametrize(
    ("name", "slots", "gpu"),
    [
        ("k80", 1, True),
        ("k80x2", 2, True),
        ("k80x4", 4, True),
        ("p100", 1, True),
        ("p100x2", 2, True),
        ("v100", 1, True),
        ("v100x2", 2, True),
        ("v100x4", 4, True),
        ("gpu", 1, True),
        ("cpu", 1, False),
        ("cpu2", 2, False),
        ("cpu16", 16, False),
    ],
)
def test_names_of_nodes(name: str, slots: int, gpu: bool) -> None:
    compute = COMPUTE[name]
    assert (compute.name, compute.slots, compute.gpu) == (name, slots, gpu)
