from __future__ import annotations

import errno
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddl_airflow.core import progress as progress_module
from ddl_airflow.core.metrics import Measurement
from ddl_airflow.core.progress import Progress, Tail, everything_told


def lines(*values: dict) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def step(t: float, n: int, source: str = "ops", **more: float | None) -> dict:
    return {"t": t, "source": source, "step": n, **more}


def test_nothing_is_known_at_first():
    progress = Progress()
    assert (progress.step, progress.steps_per_s, progress.eta_s) == (None, None, None)
    assert progress.line() == ""
    assert progress.feed("") is False


def test_a_long_file_is_read_in_pieces_of_whole_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "_PIECE", 8)
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.read()) == []
    path.write_text("a ü\nb\nlonger than one\nhalf")
    assert list(tail.read()) == ["a ü\nb\n", "longer t", "han one\n"]
    assert list(tail.read()) == []
    with path.open("a") as file:
        file.write(" done\nno end")
    assert list(tail.read()) == ["half don", "e\n"]
    assert list(tail.read(ended=True)) == ["no end"]
    assert list(tail.read(ended=True)) == []


def test_a_call_reads_no_more_than_its_part_of_a_file_that_says_it_is_huge(tmp_path):
    path = tmp_path / "progress.jsonl"
    path.write_text("first\n")
    os.truncate(path, 2**42)
    with path.open("a") as file:
        file.write("\nlast")
    tail = Tail(path, 0)
    assert "".join(tail.read()).startswith("first\n")
    assert sum(map(len, tail.read())) == progress_module._MOST
    assert "".join(tail.read(ended=True)).endswith("\nlast")
    assert list(tail.read(ended=True)) == []


def test_what_is_too_much_for_one_call_comes_in_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_module, "_PIECE", 8)
    monkeypatch.setattr(progress_module, "_MOST", 16)
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(6)))
    tail = Tail(path, 0)
    said = ["".join(tail.read()) for _ in range(6)]
    assert "".join(said) == path.read_text()
    assert max(map(len, said)) <= 16
    assert "".join(Tail(path, 0).read(ended=True)) == path.read_text()[-16:]


def test_what_was_told_long_before_the_end_is_known(tmp_path):
    """As of a validation that came once, and 17 MiB of steps after it."""
    path = tmp_path / "progress.jsonl"
    notes = {f"note {number}": "x" * 200 for number in range(60)}  # fewer lines, and so quicker
    text = lines(*(step(1.0, number, "script", loss=0.5) | notes for number in range(1000)))
    before = lines(step(1.0, 0, "script", val_accuracy=0.97))
    path.write_text(before + text * (17 * 2**20 // len(text) + 1))
    told = everything_told(path, tmp_path)
    assert told.metrics == {"val_accuracy": 0.97, "loss": 0.5}
    assert (told.step, told.wrong) == (999, 0)


@pytest.mark.parametrize("times", [1, 3, 4])
def test_a_file_whose_handle_is_stale_is_opened_again(tmp_path, monkeypatch, times):
    """As NFS says it of a file that was open while its server was replaced."""
    path = tmp_path / "progress.jsonl"
    path.write_text(lines(step(1.0, 1, "script", loss=0.5)))
    stale = [OSError(errno.ESTALE, "Stale file handle")] * times
    opened = progress_module.open_beneath

    def open_now(*args):
        if stale:
            raise stale.pop()
        return opened(*args)

    monkeypatch.setattr(progress_module, "open_beneath", open_now)
    if times > 3:
        with pytest.raises(OSError, match="Stale"):
            everything_told(path, tmp_path)
    else:
        assert everything_told(path, tmp_path).metrics == {"loss": 0.5}
    with pytest.raises(IsADirectoryError):  # which another look does not mend
        monkeypatch.setattr(progress_module, "open_beneath", lambda *_: path.parent.open())
        everything_told(path, tmp_path)


def test_rate_and_eta_come_from_the_recent_steps():
    progress = Progress()
    assert progress.feed(lines(step(100.0, 10, steps=100), step(104.0, 30))) is True
    assert progress.steps_per_s == pytest.approx(5.0)
    assert progress.eta_s == pytest.approx(70 / 5.0)
    assert progress.line() == "step 30/100 · 5.0 steps/s · ETA 0:14"


def test_rate_forgets_what_is_older_than_half_a_minute():
    progress = Progress()
    progress.feed(lines(step(0.0, 0), step(60.0, 6), step(80.0, 206)))
    assert progress.steps_per_s == pytest.approx(10.0)  # 206 steps in 80 s would be 2.6


def test_one_step_or_steps_at_the_same_time_have_no_rate():
    progress = Progress()
    progress.feed(lines(step(5.0, 1, steps=10), step(5.0, 2)))
    assert progress.steps_per_s is None
    assert progress.eta_s is None


def test_eta_is_never_negative_and_not_shown_at_the_end():
    progress = Progress()
    progress.feed(lines(step(0.0, 10, steps=20), step(1.0, 25)))
    assert progress.eta_s == 0.0
    assert "ETA" not in progress.line()


def test_a_training_that_stopped_early_has_nothing_left():
    progress = Progress()
    progress.feed(lines(step(0.0, 10, steps=600), step(1.0, 20)))
    assert progress.line().endswith("ETA 0:58")
    assert progress.line(ended=True) == "step 20/600 · 10.0 steps/s"


def test_eta_over_a_minute_is_minutes_and_seconds():
    progress = Progress()
    progress.feed(lines(step(0.0, 0, steps=126), step(1.0, 1)))
    assert progress.line().endswith("ETA 2:05")


def test_steps_of_the_script_count_and_those_of_the_ops_no_longer():
    progress = Progress()
    progress.feed(lines(step(0.0, 3), step(1.0, 4)))
    assert progress.step == 4
    # Resumed at 200: the script knows, the ops count this try's reductions.
    progress.feed(lines(step(2.0, 200, "script"), step(2.5, 5, comm_s=0.25)))
    assert progress.step == 200
    assert progress.steps_per_s is None  # one step of the script is no speed
    assert progress.comm_s == 0.25
    progress.feed(lines(step(4.0, 210, "metrics"), step(4.5, 15)))
    assert progress.step == 210
    assert progress.steps_per_s == pytest.approx(5.0)


def test_steps_that_start_again_give_no_negative_rate():
    progress = Progress()
    progress.feed(lines(step(0.0, 90, "script"), step(1.0, 0, "script", steps=100)))
    assert (progress.step, progress.steps_per_s, progress.eta_s) == (0, None, None)


def test_a_line_cut_in_two_is_taken_when_it_is_whole():
    progress = Progress()
    text = lines(step(0.0, 7), {"t": 1.0, "source": "script", "loss": 0.5})
    whole = text.index("\n") + 1
    assert progress.feed(text[: whole - 9]) is False
    assert progress.step is None
    assert progress.feed(text[whole - 9 : whole + 4]) is True
    assert (progress.step, progress.metrics) == (7, {})
    assert progress.feed(text[whole + 4 :]) is True
    assert progress.metrics == {"loss": 0.5}


def test_newest_of_each_metric_stays_and_null_is_no_value():
    progress = Progress()
    progress.feed(
        lines(
            {"t": 1.0, "source": "metrics", "loss": 0.9, "accuracy": 0.1},
            {"t": 2.0, "source": "metrics", "loss": 0.5, "epoch": 2},
            {"t": 3.0, "source": "metrics", "loss": None},
            {"t": 3.0, "source": "ops", "examples_per_s": 812.4, "wait_s": 0.5},
        )
    )
    assert progress.metrics == {"loss": 0.5, "accuracy": 0.1}
    assert progress.line() == "epoch 2 · 812 examples/s · loss 0.5 · accuracy 0.1"


ODD = [
    *("half a line", "3", "[1, 2]", '"text"', "null", "[" * 100_000, '{"a":' * 20_000),
    *('{"step": [1]}', '{"step": {"a": 1}}', '{"step": "one"}', '{"t": "now", "step": 1}'),
    '{"step": ' + "1" * 4000 + "}",
    '{"loss": ' + "1" * 5000 + "}",
    '{"loss": 1e400, "step": ' + "9" * 30 + "}",
    '{"step": 9007199254740992}',
    '{"step": 1e18, "loss": 1}',
    '{"epoch": 1, "steps": 1000000000000000000}',
    '{"note": "\\ud800"}',
    '{"\\ud800": 1}',
    json.dumps({f"metric{n}": n for n in range(200)}),
    "x" * 100_000,
]


@pytest.mark.parametrize("bad", ODD, ids=lambda bad: bad[:20])
def test_a_line_that_is_no_progress_is_counted_and_the_others_are_taken(bad):
    progress = Progress()
    text = lines(step(1.0, 1)) + f"{bad}\n" + lines(step(2.0, 2)) + f"{bad}\n"
    for i in range(0, len(text), 7000):
        progress.feed(text[i : i + 7000])
    assert (progress.step, progress.wrong) == (2, 2)
    assert progress.first_wrong[1:9] == ascii(bad)[1:9]
    assert progress.line() == "step 2 · 1.0 steps/s"


@settings(
    max_examples=int(os.environ.get("DDL_GENERATED", "300")),
    deadline=None,
    derandomize="DDL_GENERATED" not in os.environ,
)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(ODD),
            st.dictionaries(
                st.sampled_from(["t", "source", "step", "steps", "epoch", "loss", "comm_s", "x"]),
                st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
            ).map(json.dumps),
            st.text(),
        ),
        max_size=20,
    ).map("\n".join),
    st.integers(500, 5000),
)
def test_whatever_a_script_writes_the_reader_goes_on(text, size):
    progress = Progress()
    for i in range(0, len(text), size):
        progress.feed(text[i : i + size])
    progress.feed("\n" + lines(step(9e9, 77, "script", loss=0.5)))
    assert (progress.step, progress.metrics["loss"]) == (77, 0.5)
    json.dumps([progress.line(), [one.dump() for one in progress.measurements]]).encode()
    json.dumps([one.dump() for one in progress.measurements], allow_nan=False)


def test_a_whole_number_keeps_all_its_digits():
    progress = Progress()
    progress.feed(lines({"t": 1.0, "step": 1, "seen": 2**53 + 1, "loss": 2.5}))
    assert [one.dump()["value"] for one in progress.measurements] == [2**53 + 1, 2.5]
    assert [Measurement.load(one.dump()) for one in progress.measurements][0].value == 2**53 + 1


def test_metrics_of_a_thousand_names_are_not_all_kept():
    progress = Progress()
    progress.feed(lines(*({f"metric{n}": n} for n in range(1000))))
    assert len(progress.metrics) == 100


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *(("NaN", "nan"), ('"NaN"', "nan"), ("Infinity", "inf"), ("-Infinity", "-inf")),
        *(('"-Infinity"', "-inf"), ("1e400", "inf"), ("1e30", "1e+30"), ("null", "144.7")),
    ],
)
def test_a_loss_that_left_the_numbers_is_what_it_is(value, shown):
    # json.dumps of a script writes the bare words; ours writes them as texts.
    progress = Progress()
    progress.feed(lines(step(1.0, 2, "script", loss=144.7)))
    progress.feed(f'{{"t": 1.0, "source": "script", "step": 3, "loss": {value}, "steps": {value}}}')
    progress.feed("\n")
    assert (progress.line(), progress.wrong) == (f"step 3 · loss {shown}", 0)
    (one,) = progress.measurements
    assert Measurement.load(json.loads(json.dumps(one.dump(), allow_nan=False))).metric == "loss"


def test_each_metric_is_known_by_its_source():
    progress = Progress()
    progress.feed(
        lines(
            step(1.0, 1, "script", accuracy=0.5, f1=0.25),
            step(2.0, 2, "keras", accuracy=0.75, val_accuracy=0.625),
            step(3.0, 3, "metrics", loss=1.0),
            step(4.0, 4, "of its own", accuracy=0.875),
            {"t": 5.0, "loss": 2.0},
        )
    )
    assert [(one.metric, one.value, one.source) for one in progress.measurements] == [
        ("f1", 0.25, "script"),
        ("accuracy", 0.75, "training"),
        ("val_accuracy", 0.625, "validation"),
        ("loss", 1.0, "output"),
        ("accuracy", 0.875, "script"),
        ("loss", 2.0, "script"),
    ]
    assert progress.metrics == {"accuracy": 0.875, "f1": 0.25, "val_accuracy": 0.625, "loss": 2.0}
