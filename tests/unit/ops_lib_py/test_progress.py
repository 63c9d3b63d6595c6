from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ddl_ops import progress


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "progress.jsonl"
    for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DDL_PROGRESS", str(path))
    return lambda: [json.loads(line) for line in path.read_text().splitlines()]


def test_values_become_one_line(lines) -> None:
    progress.append({"step": 3.0, "steps": 9, "epoch": None, "loss": 0.25}, source="metrics")
    progress.append({"accuracy": 1}, source="script")
    first, second = lines()
    assert first.pop("t") > 1.7e9
    assert first == {"source": "metrics", "step": 3, "steps": 9, "loss": 0.25}
    assert type(first["step"]) is int
    assert second["accuracy"] == 1.0 and second["source"] == "script"


def test_other_ranks_write_nothing(lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    progress.append({"step": 1}, source="script")
    assert list(tmp_path.iterdir()) == []


def test_without_a_file_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DDL_PROGRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    progress.append({"step": 1}, source="script")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_is_missing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DDL_PROGRESS", str(tmp_path / "none" / "progress.jsonl"))
    with pytest.raises(FileNotFoundError):
        progress.append({"step": 1}, source="script")


def test_value_that_is_no_number_is_an_error(lines) -> None:
    with pytest.raises(TypeError):
        progress.append({"loss": "low"}, source="script")


def test_what_json_has_no_number_for_is_a_word(lines) -> None:
    values = {"loss": float("nan"), "a": float("inf"), "b": np.float32("-inf"), "c": 1e300}
    progress.append({"step": float("nan"), **values}, source="keras")
    (line,) = lines()
    assert line.pop("t") > 0
    words = {"loss": "NaN", "a": "Infinity", "b": "-Infinity", "c": 1e300}
    assert line == {"source": "keras", "step": None, **words}
