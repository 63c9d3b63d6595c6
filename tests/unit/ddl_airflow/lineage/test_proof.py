"""Notes of weights: read whatever wrote them, and compared."""

from __future__ import annotations

import json
import math

import pytest

from ddl_airflow.core.errors import FileRefused
from ddl_airflow.lineage.proof import Divergence, divergence, read_notes, summary


def line(step, *values):
    return {"step": step, "digests": "".join(f"{value:016x}" for value in values)}


def body(*lines):
    return "".join(f"{json.dumps(one)}\n" for one in lines).encode()


def begun(step=0, *tensors, **more):
    return {"begun": step, "tensors": tensors or ("a", "b"), **more}


BEFORE = [begun(), line(0, 1, 2), line(1, 3, 4), line(2, 5, 6)]


@pytest.mark.parametrize(
    ("again", "found"),
    [
        (BEFORE, None),
        ([begun(), line(0, 1, 2), line(1, 3, 9), line(2, 8, 9)], Divergence(1, ("b",), "", 0)),
        ([begun(), line(0, 7, 8)], Divergence(0, ("a", "b"))),
        ([begun(0, "a", "c"), *BEFORE[1:]], Divergence(0, (), "the model has other tensors")),
        (
            BEFORE[:3],
            Divergence(1, (), "it ended after step 2 before, and after step 1 now", 1),
        ),
        (
            [*BEFORE[:3], line(4, 5, 6)],
            Divergence(2, (), "step 2 was noted before, and step 4 now", 1),
        ),
        ([*BEFORE[:3], {"step": 2, "all": "f" * 16}], Divergence(2, (), "", 1)),
        ([begun()], Divergence(0, (), "it ended after step 2 before, and after step 0 now")),
    ],
)
def test_the_first_difference_is_found(again, found):
    assert divergence(read_notes(body(*BEFORE)), read_notes(body(*again))) == found


def test_steps_that_a_later_process_did_again_count_once():
    """The first was killed after step 2, of which it had saved step 1."""
    goes_on = [begun(1, goes_on=True), line(1, 3, 4), line(2, 5, 6), line(3, 7, 8)]
    notes = read_notes(body(*BEFORE, *goes_on))
    assert notes == read_notes(body(*BEFORE, line(3, 7, 8)))
    assert summary(notes) == {"key": "logs/weights.jsonl", "notes": 4, "step": 3}
    # A second model of one process begins anew: what the first has noted stays.
    assert len(read_notes(body(*BEFORE, begun(0, "c"), line(0, 1), line(1, 2)))) == 5


def test_one_that_was_ended_and_went_on_is_compared_where_both_have_notes():
    whole = [begun(), *(line(step, step, step) for step in (0, 1, 128, 132, 136, 140))]
    went_on = [*whole[:4], begun(130, goes_on=True), line(130, 9, 9), *whole[4:]]
    assert divergence(read_notes(body(*whole)), read_notes(body(*went_on))) is None
    assert divergence(read_notes(body(*went_on)), read_notes(body(*whole))) is None
    other = [*went_on[:-2], line(136, 136, 1), went_on[-1]]
    found = divergence(read_notes(body(*whole)), read_notes(body(*other)))
    assert (found.step, found.tensors, found.same_until) == (136, ("b",), 132)


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xff\n",
        b"{\n",
        b"3\n",
        b"[" * 100_000,
        body(line(0, 1, 2)),
        body(begun(), line(0, 1)),
        body(begun(), {"step": "one", "digests": ""}),
        body(begun(), {"step": math.inf, "all": "f" * 16}),
        body(begun(math.inf)),
        body({"begun": 0}),
    ],
)
def test_what_is_none_of_ours_is_refused(damaged):
    with pytest.raises(FileRefused, match="holds no notes"):
        read_notes(damaged)
