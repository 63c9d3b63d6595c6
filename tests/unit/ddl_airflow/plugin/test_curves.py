"""Progress lines as curves: what is drawn, and what never is."""

from __future__ import annotations

import json
import math
import random

import pytest

from ddl_airflow.core.curves import averaged, downsampled
from ddl_airflow.plugin import curves
from ddl_airflow.plugin.curves import Cursor, read_curves


@pytest.fixture
def told(tmp_path):
    """told(line, …) appends lines to the progress; told.read(cursor=…) -> the answer."""

    class Told:
        path = tmp_path / "progress.jsonl"

        def __call__(self, *lines):
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

        def read(self, **asked):
            answer = read_curves(self.path, tmp_path, **asked)
            json.dumps(answer, allow_nan=False)  # as the web framework does
            return answer

    return Told()


def parts(answer, name):
    (curve,) = [one for one in answer["curves"] if one["name"] == name]
    return [(p["job"], list(zip(p["steps"], p["values"], strict=True))) for p in curve["parts"]]


def test_a_step_that_was_reported_twice_has_its_last_value_and_no_curve_goes_back(told):
    for step in (1, 2, 3):
        told({"t": 10 + step, "source": "keras", "step": step, "loss": 1 / step})
    # The epoch's end reports the step again, and the output is read late.
    told({"t": 14, "source": "keras", "step": 3, "loss": 0.4})
    told({"t": 15, "source": "metrics", "step": 2, "loss": 0.6})
    assert parts(told.read(), "loss") == [(0, [(1, 1.0), (2, 0.6), (3, 0.4)])]


def test_each_try_has_its_part_on_the_same_axis(told):
    for step in (0, 100):
        told({"t": 10 + step, "source": "ops", "step": step, "comm_s": 0.0, "wait_s": 0.0})
        told({"t": 10 + step, "source": "keras", "step": step, "loss": 1000.0 - step})
    # Went on at step 50, where it had saved; the ops count from 0.
    told({"t": 200, "source": "ops", "step": 0, "comm_s": 0.0, "wait_s": 0.0})
    told({"t": 201, "source": "keras", "step": 60, "loss": 900.0})
    told({"t": 202, "source": "keras", "step": 110, "loss": 800.0})
    said = [(0, [(0, 1000.0), (100, 900.0)]), (1, [(60, 900.0), (110, 800.0)])]
    assert parts(told.read(), "loss") == said
    # As when each began is known; a job that reported nothing has its place all the same.
    assert [job for job, _ in parts(told.read(started=[9.0, 150.0, 199.8]), "loss")] == [0, 2]


def test_each_answer_goes_on_where_the_last_one_ended(told):
    told({"t": 1, "source": "keras", "step": 1, "loss": 1.0})
    first = told.read()
    assert parts(first, "loss") == [(0, [(1, 1.0)])]
    assert told.read(cursor=first["cursor"])["curves"] == []
    told({"t": 2, "source": "keras", "step": 2, "loss": 0.5})
    with told.path.open("a") as file:
        file.write('{"t": 3, "source": "keras", "st')
    second = told.read(cursor=first["cursor"])
    assert parts(second, "loss") == [(0, [(2, 0.5)])] and not second["again"]
    with told.path.open("a") as file:
        file.write('ep": 3, "loss": 0.25}\n')
    # A metric without a step is of the last one.
    told({"t": 4, "source": "metrics", "test_accuracy": 0.75})
    third = told.read(cursor=second["cursor"])
    assert parts(third, "loss") == [(0, [(3, 0.25)])]
    assert parts(third, "test_accuracy") == [(0, [(3, 0.75)])]


def test_a_try_that_begins_between_two_answers_is_told(told):
    told({"t": 1, "source": "ops", "step": 7, "comm_s": 1.0, "wait_s": 0.5})
    told({"t": 1, "source": "keras", "step": 7, "loss": 1.0})
    first = told.read()
    told({"t": 9, "source": "ops", "step": 0, "comm_s": 0.0, "wait_s": 0.0})
    told({"t": 9, "source": "keras", "step": 6, "loss": 2.0})
    assert parts(told.read(cursor=first["cursor"]), "loss") == [(1, [(6, 2.0)])]


def test_more_than_fits_into_one_answer_is_said_to_be_more(told, monkeypatch):
    monkeypatch.setattr(curves, "_MOST_BYTES", 4096)
    told(*({"t": n, "source": "keras", "step": n, "loss": n} for n in range(200)))
    with told.path.open("a") as file:
        file.write('{"t": 201, "so')  # is being written
    cursor, seen, more = "", [], True
    while more:
        answer = told.read(cursor=cursor)
        cursor, more = answer["cursor"], answer["more"]
        seen += [step for _, part in parts(answer, "loss") for step, _ in part]
    assert seen == list(range(200))


@pytest.mark.parametrize("far", [2**53 - 1, 2**53, 10**18, 2**63, -(2**63), 1e18, 1e300])
def test_however_far_a_step_is_the_next_answer_goes_on(told, monkeypatch, far):
    monkeypatch.setattr(curves, "_MOST_BYTES", 4096)
    told({"t": 0, "source": "ops", "step": far, "comm_s": 0.0})
    told(*({"t": n, "source": "keras", "step": far, "loss": n} for n in range(200)))
    cursor = ""
    for _ in range(100):
        answer = told.read(cursor=cursor)
        drawn = [part for curve in answer["curves"] for part in curve["parts"]]
        assert all(step < 2**53 for part in drawn for step in part["steps"])
        assert str(Cursor.read(answer["cursor"])) == answer["cursor"]
        cursor = answer["cursor"]
        if not answer["more"]:
            break
    assert Cursor.read(cursor).offset == told.path.stat().st_size
    assert told.read(cursor=cursor)["curves"] == []


def test_no_answer_takes_much_of_the_memory_that_all_requests_share(told):
    """Of 500,000 points it was 45 MB, and eight may be made at once."""
    numbers = {f"m{number}": 0.5 + number for number in range(50)}
    told(*({"t": n, "source": "keras", "step": n} | numbers for n in range(10_000)))
    first = told.read()
    assert first["more"]
    second = told.read(cursor=first["cursor"])
    assert not second["more"] and parts(second, "m49")[0][1][-1] == (9_999, 49.5)


def test_of_short_lines_no_more_points_are_read_at_once_than_that(told, monkeypatch):
    monkeypatch.setattr(curves, "_MOST_POINTS_READ", 100)
    told(*({"t": n, "source": "keras", "step": n, "a": n, "b": n} for n in range(110)))
    cursor, seen, more = "", [], True
    while more:
        answer = told.read(cursor=cursor)
        cursor, more = answer["cursor"], answer["more"]
        seen.append([step for _, part in parts(answer, "b") for step, _ in part])
    assert [len(steps) for steps in seen] == [50, 50, 10]
    assert sum(seen, []) == list(range(110))


def test_of_lines_that_say_nothing_no_more_are_read_at_once_either(told, monkeypatch):
    monkeypatch.setattr(curves, "_MOST_POINTS_READ", 100)
    told.path.write_text("\n" * 250 + '{"t": 1, "source": "keras", "step": 1, "a": 1}\n')
    cursor, answers, more = "", [], True
    while more:
        answers.append(answer := told.read(cursor=cursor))
        cursor, more = answer["cursor"], answer["more"]
    assert [len(one["curves"]) for one in answers] == [0, 0, 1]


def test_a_file_that_was_begun_again_is_told_whole(told):
    told(*({"t": n, "source": "keras", "step": n, "loss": n} for n in range(9)))
    cursor = told.read()["cursor"]
    told.path.write_text('{"t": 1, "source": "keras", "step": 1, "loss": 5}\n')
    answer = told.read(cursor=cursor)
    assert answer["again"] and parts(answer, "loss") == [(0, [(1, 5.0)])]
    told.path.unlink()
    assert told.read(cursor=answer["cursor"])["again"]


def test_what_is_no_number_is_a_gap_with_its_word(told):
    for step, loss in enumerate((1.0, "NaN", "NaN", 0.5, "Infinity")):
        told({"t": step, "source": "keras", "step": step, "loss": loss})
    answer = told.read()
    values = [1.0, None, None, 0.5, None]
    assert parts(answer, "loss") == [(0, list(enumerate(values)))]
    assert answer["curves"][0]["parts"][0]["gaps"] == [[1, 2, "NaN"], [4, 4, "Infinity"]]


def test_where_values_come_from_is_said(told):
    told({"t": 1, "source": "keras", "step": 1, "loss": 1, "val_loss": 2, "examples_per_s": 99.5})
    said = {one["name"]: one["measured_on"] for one in told.read()["curves"]}
    assert said == {"loss": "training batches", "val_loss": "validation data", "examples_per_s": ""}


@pytest.mark.parametrize(
    "odd",
    [
        "not json",
        "[" * 100_000,
        "x" * 3_000_000,
        '{"note": "\\ud800", "loss": 3}',
        '{"step": "far", "t": "late", "source": 5, "source_": 1}',
        '{"step": -5, "t": 1e18, "loss": 1}',
        '{"source": "ops", "step": 5, "t": 1, "comm_s": "x", "wait_s": null}',
    ],
)
def test_whatever_a_rank_writes_there_is_an_answer(told, odd):
    told({"t": 1, "source": "keras", "step": 1, "accuracy": 0.5})
    with told.path.open("a") as file:
        file.write(odd + "\n")
    told({"t": 2, "source": "keras", "step": 2, "accuracy": 0.75})
    answer = told.read(started=[0.0, 1.5])
    assert [p for _, part in parts(answer, "accuracy") for p in part] == [(1, 0.5), (2, 0.75)]
    assert Cursor.read(answer["cursor"]).offset == told.path.stat().st_size


def test_a_training_that_began_anew_is_read_from_its_beginning_however_long_it_is(told):
    told(*({"t": 1.0 + step, "source": "keras", "step": step, "loss": 1.0} for step in (1, 2)))
    cursor = told.read()["cursor"]
    told.path.unlink()
    told(*({"t": 50.0 + step, "source": "keras", "step": step, "loss": 9.0} for step in range(5)))
    answer = told.read(cursor=cursor)
    assert answer["again"]
    assert parts(answer, "loss") == [(0, [(step, 9.0) for step in range(5)])]
    assert not told.read(cursor=answer["cursor"])["again"]


@pytest.mark.parametrize("cursor", ["", "x", "1.2", "-1.0.0.0.0", "9" * 40, "0.0.0.0.7", "²....."])
def test_a_cursor_of_somebody_elses_is_the_beginning(told, cursor):
    told({"t": 1, "source": "keras", "step": 1, "loss": 1.0})
    assert parts(told.read(cursor=cursor), "loss") == [(0, [(1, 1.0)])]


def test_a_curve_of_whole_numbers_is_one_of_numbers(told):
    """Which JavaScript can draw, however large they are."""
    told(*({"t": n, "step": n, "seen": 2**53 + 1} for n in range(2)))
    ((_, part),) = parts(told.read(), "seen")
    assert [type(value) for _, value in part] == [float, float]


def test_too_many_metrics_are_left_out(told):
    for first in range(0, 300, 50):
        told({f"m{number}": 1 for number in range(first, first + 50)} | {"t": 1, "step": 1})
    assert len(told.read()["curves"]) == 100


def test_a_long_training_is_a_short_answer(told):
    told(*({"t": n, "source": "keras", "step": n, "loss": n % 97 / 7} for n in range(10_000)))
    answer = told.read(points=800)
    assert len(json.dumps(answer)) < 32 * 1024
    assert 400 < len(answer["curves"][0]["parts"][0]["steps"]) <= 800


@pytest.mark.parametrize("count", [1, 799, 800, 801, 10_000, 123_457])
def test_fewer_points_keep_ends_spikes_and_order(count):
    dice = random.Random(count)
    values = [math.sin(n / 500) + dice.random() / 10 for n in range(count)]
    if count > 1000:
        values[count // 3], values[count // 2], values[count // 5] = 9.0, -9.0, math.nan
    points = list(enumerate(values))
    drawn = downsampled(points, 800)
    assert len(drawn) <= max(800, 0)
    steps = [step for step, _ in drawn]
    assert steps == sorted(set(steps))
    assert drawn[0] == points[0] and drawn[-1] == points[-1]
    assert set(map(str, drawn)) <= set(map(str, points))
    if count > 1000:
        told = [value for _, value in drawn]
        assert {9.0, -9.0} <= set(told) and any(map(math.isnan, told))


def test_means_of_a_long_curve_are_those_of_all_its_points(told):
    """The least and the greatest of each stretch are drawn, whose mean is another."""
    values = [100.0 if step % 50 == 0 else 1.0 for step in range(10_000)]
    told(*({"t": n, "source": "keras", "step": n, "loss": v} for n, v in enumerate(values)))
    answer = told.read(points=800)
    (part,) = answer["curves"][0]["parts"]
    assert sum(part["values"]) / len(part["values"]) > 20
    means = part["means"]["values"]
    assert len(means) == 160 and sum(means) / len(means) == pytest.approx(2.98, rel=0.01)
    # Each at a step that is drawn, for that is what a pointer finds.
    assert set(part["means"]["steps"]) <= set(part["steps"])
    assert part["means"]["steps"][-1] == 9999
    assert len(json.dumps(answer)) < 32 * 1024
    # Where each point is drawn there is nothing to make good.
    told({"t": 1e5, "source": "keras", "step": 10_000, "loss": 1.0})
    (part,) = told.read(cursor=answer["cursor"])["curves"][0]["parts"]
    assert part["means"] is None


@pytest.mark.parametrize(
    ("values", "means"),
    [
        ([1.0, math.nan, 3.0, math.inf], [2.0]),
        ([math.nan, -math.inf], [math.nan]),
        ([1.7e308] * 3, [1.7e308]),
        ([-1.7e308, 1.7e308], [0.0]),
        ([2**62, 2**62], [2.0**62]),
    ],
)
def test_a_mean_is_of_what_are_numbers(values, means):
    ((step, mean),) = averaged(list(enumerate(values)), 1)
    assert step == len(values) - 1
    assert mean == pytest.approx(means[0], nan_ok=True)
