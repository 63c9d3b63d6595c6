"""Which steps are noted, and what is left of it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ddl_ops import weight_notes
from ddl_ops.weight_notes import WeightNotes, is_due


def noted(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_notes_grow_by_the_logarithm_of_the_steps() -> None:
    due = [step for step in range(1, 1_000_001) if is_due(step, step - 1)]
    assert due[:66] == [*range(1, 65), 66, 68]
    assert [step for step in due if 128 <= step <= 140] == [128, 132, 136, 140]
    assert len(due) < 530
    # Of a script whose steps are seen ten at a time.
    assert [step for step in range(10, 200, 10) if is_due(step, step - 10)] == [*range(10, 200, 10)]


def test_a_changed_bit_shows_in_its_tensor_alone(tmp_path) -> None:
    weights = [np.zeros((2, 3), "float32"), np.float64(1), np.zeros(0, "int8"), np.ones(2, "e")]
    names = ["a", "b", "c", "d"]
    notes = WeightNotes(tmp_path / "weights.jsonl")
    notes.note(0, names, weights)
    weights[0][1, 2] = -0.0
    notes.note(1, names, weights)
    notes.note(1, names, weights)  # at the end, once more
    begun, first, second = noted(tmp_path / "weights.jsonl")
    assert begun == {"begun": 0, "tensors": names}
    one, other = (
        [d[i : i + 16] for i in range(0, 64, 16)] for d in (first["digests"], second["digests"])
    )
    assert [a == b for a, b in zip(one, other, strict=True)] == [False, True, True, True]


def test_who_goes_on_adds_to_what_is_there_and_who_begins_replaces_it(tmp_path) -> None:
    path = tmp_path / "weights.jsonl"
    for step in (0, 7, 0):
        notes = WeightNotes(path)
        notes.note(step, ["a"], [np.ones(1)])
        assert len(noted(path)) == {0: 2, 7: 4}[step]


def test_the_file_of_a_long_training_of_many_tensors_has_an_end(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(weight_notes, "_LARGE", 4000)
    notes, names = WeightNotes(tmp_path / "f"), [f"tensor-{n}" for n in range(50)]
    for step in range(20):
        notes.note(step, names, [np.full(1, step)] * 50)
    assert (tmp_path / "f").stat().st_size < 7000
    assert [set(one) for one in noted(tmp_path / "f")[-2:]] == [{"step", "all"}] * 2


class Variable:
    def __init__(self, name: str) -> None:
        self.name = name

    def numpy(self):
        return np.ones(3)


def test_a_loop_of_the_scripts_own_notes_as_it_goes(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOG_DIR", str(tmp_path))
    variables = [Variable("dense/kernel:0"), Variable("dense/bias:0")]
    weight_notes.note_weights(0, variables)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("DDL_PROVE", "1")
    for step in range(70):
        weight_notes.note_weights(step, variables)
    begun, *notes = noted(tmp_path / "weights.jsonl")
    assert begun["tensors"] == ["dense/kernel", "dense/bias"]
    assert [one["step"] for one in notes] == [*range(65), 66, 68]


class Step:
    """As a variable of TensorFlow or Keras."""

    def numpy(self):
        return np.array(3)


def test_a_step_may_be_any_whole_number(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("LOG_DIR", str(tmp_path))
    monkeypatch.setenv("DDL_PROVE", "1")
    for step in (np.int64(1), np.int32(2), Step()):
        weight_notes.note_weights(step, [Variable("bias")])
    assert [one["step"] for one in noted(tmp_path / "weights.jsonl")[1:]] == [1, 2, 3]
    with pytest.raises(TypeError, match=r"^ddl\.note_weights\(1\.5\): give it the number of steps"):
        weight_notes.note_weights(1.5, [])


def test_a_full_disk_ends_the_notes_and_not_the_training(tmp_path, capsys) -> None:
    notes = WeightNotes(tmp_path / "nowhere" / "f")
    notes.note(0, ["a"], [np.ones(1)])
    notes.note(1, ["a"], [np.ones(1)])
    assert capsys.readouterr().err.count("no more digests") == 1


def test_weights_that_cannot_be_read_end_the_notes_and_not_the_training(tmp_path, capsys) -> None:
    """The other ranks wait for this one."""

    def uninitialised():
        raise RuntimeError("Attempting to use uninitialized value head/kernel\nand much more")
        yield

    notes = WeightNotes(tmp_path / "f")
    notes.note(0, ["a"], uninitialised())
    notes.note(1, ["a"], [np.array(["text", None], dtype=object)])
    said = capsys.readouterr().err
    assert "uninitialized value head/kernel: no more digests" in said and "much" not in said
    assert said.count("no more digests") == 1 and not (tmp_path / "f").exists()
