"""The scaling model, and that the pages have what it and the kept measurements say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import report
from benchmarks.scaling import page
from benchmarks.scaling.chart import draw
from benchmarks.scaling.compared import Case, compare, table
from benchmarks.scaling.model import KIB, MIB, Layout, Link, fitted, seconds, traffic
from tests.integration.hosts import available
from tests.limits import within

NBYTES = 64 * MIB
SIZES = (64 * KIB, MIB, 16 * MIB)


@pytest.mark.parametrize("slots", [1, 2, 8])
@pytest.mark.parametrize("hosts", [2, 3, 4, 125])
def test_each_host_sends_two_h_minus_one_over_h_whatever_its_ranks(hosts: int, slots: int) -> None:
    found = traffic(Layout(hosts, slots), 128 * NBYTES)
    assert found.sent == pytest.approx(2 * (hosts - 1) / hosts * 128 * NBYTES)
    assert found.on_path == pytest.approx(found.sent)
    assert found.of_all == pytest.approx(hosts * found.sent)


def test_a_flat_ring_sends_as_many_bytes_as_if_each_rank_were_a_host() -> None:
    flat = traffic(Layout(2, 8, hierarchical=False), NBYTES)
    assert flat.sent == pytest.approx(2 * 15 / 16 * NBYTES)
    assert flat.messages == 30


@pytest.mark.parametrize(
    ("hosts", "nbytes", "messages", "on_path"),
    [
        (2, 16 * KIB, 1, 1),  # doubling
        (4, 16 * KIB, 2, 2),
        (2, MIB, 2, 1),  # halving and doubling
        (4, MIB, 4, 1.5),
        (3, MIB, 4, 3),  # one hands its values to a neighbour first
        (3, 16 * MIB, 4, 4 / 3),  # a ring
    ],
)
def test_messages_and_bytes_on_the_way(
    hosts: int, nbytes: int, messages: int, on_path: float
) -> None:
    found = traffic(Layout(hosts, 1), nbytes)
    assert (found.messages, found.on_path / nbytes) == (messages, pytest.approx(on_path))


def test_one_host_sends_nothing() -> None:
    assert seconds(Layout(1, 2), NBYTES, Link(1.0, 1.0), 1e-9) == pytest.approx(NBYTES * 1e-9)
    assert seconds(Layout(1, 1), NBYTES, Link(1.0, 1.0), 1e-9) == 0


def made(rate: str, layout: Layout, nbytes: int, took_s: float, kind: str = "allreduce") -> Case:
    return Case(kind, rate, layout, nbytes, [took_s], traffic(layout, nbytes).sent)


def by_model(rate: str, link: Link) -> list[Case]:
    layouts = (Layout(2, 1), Layout(3, 1), Layout(2, 2), Layout(2, 2, hierarchical=False))
    return [
        made(rate, layout, size, seconds(layout, size, link))
        for layout in layouts
        for size in SIZES
    ]


@pytest.mark.parametrize("rate", ["none", "1gbit"])
def test_a_network_that_obeys_the_model_is_found_again(rate: str) -> None:
    link = Link(1e-4, 1e8, shared=rate == "none")
    rows, links = compare(by_model(rate, link), cores=2)
    assert links[rate].message_s == pytest.approx(1e-4)
    assert links[rate].bytes_per_s == pytest.approx(1e8)
    assert all(row.error == pytest.approx(0, abs=1e-9) for row in rows)
    assert sum(row.fitted for row in rows) == 2


def test_an_error_is_of_what_was_measured_and_no_fitted_case_counts() -> None:
    link = Link(0, 1e8)
    cases = by_model("1gbit", link)
    slower = made("1gbit", Layout(3, 2), 16 * MIB, 2 * seconds(Layout(3, 2), 16 * MIB, link))
    rows, _ = compare([*cases, slower], cores=2)
    assert rows[-1].error == pytest.approx(-0.5)
    lines = table(rows).splitlines()
    assert "| -50% |" in lines[-1]
    assert "| fitted |" in lines[2]
    # Flat ring of 4 against 2: 1.5 S over S, measured and by the model.
    both = next(line for line in lines if "| 2 hosts of 2 | 16 MiB" in line)
    assert both.endswith("| 1.50 (1.50) |")


def test_a_training_is_checked_by_its_reductions_and_ranks_beyond_the_cores_take_turns() -> None:
    link = Link(0, 1e8, shared=True)
    reduces = seconds(Layout(3, 1), MIB, link)
    alone = Case("training", "none", Layout(1, 1), MIB, [0.1], 0, 1e-6)
    three = Case("training", "none", Layout(3, 1), MIB, [0.4], 2.0 * MIB, 2 * reduces)
    rows, _ = compare([*by_model("none", link), alone, three], cores=2)
    assert rows[-1].error == pytest.approx(-0.5)
    assert rows[-1].predicted_step_s == pytest.approx(0.15 + reduces)
    assert table(rows).splitlines()[-1].endswith("| 0.75 |")  # three ranks, a quarter the speed


def test_a_time_that_no_message_explains_is_no_negative_one() -> None:
    link = fitted((64 * KIB, 1e-5), (MIB, 1e-2), shared=False)
    assert link.message_s == 0
    assert link.bytes_per_s == pytest.approx(MIB / 1e-2)


def test_without_what_it_is_fitted_on_there_is_no_model() -> None:
    with pytest.raises(ValueError, match="1gbit: two sizes between two hosts"):
        compare([made("1gbit", Layout(3, 1), MIB, 1.0)], cores=2)


def test_what_obeys_the_model_lies_on_its_line() -> None:
    rows, _ = compare(by_model("1gbit", Link(1e-4, 1e8)), cores=2)
    svg = ElementTree.fromstring(draw(rows))
    name = "{http://www.w3.org/2000/svg}"
    points = [one for one in svg.iter(f"{name}circle") if one.find(f"{name}title") is not None]
    assert len(points) == len(rows)
    path = next(p.get("d") for p in svg.iter(f"{name}path") if "L" in str(p.get("d")))
    (x0, y0), (x1, y1) = (map(float, pair.split()) for pair in path.lstrip("M").split("L"))
    for point in points:
        x, y = float(point.get("cx")), float(point.get("cy"))
        assert y == pytest.approx(y0 + (x - x0) * (y1 - y0) / (x1 - x0), abs=0.2)


@pytest.mark.parametrize("path", page.PAGES, ids=lambda path: path.parent.name)
def test_pages_have_the_tables_that_are_made_now(path) -> None:
    text = path.read_text("utf-8")
    assert page.with_tables(text, page.tables()) == text, "python -m benchmarks.scaling.page"


def test_the_picture_is_that_of_the_measurements() -> None:
    assert page.CHART.read_text("utf-8") == draw(page.measured()[1])


def test_predictions_are_those_of_the_formula() -> None:
    # BERT-Large on 16 GPUs, two hosts: S bytes at 94 % of 100 Gbit/s, and 50 us a message.
    nbytes = 4 * 340e6
    expected = nbytes / (100e9 / 8 * page.PAYLOAD)
    assert page.overhead_s(340e6, 16, 100) == pytest.approx(expected, rel=0.15)
    assert page.overhead_s(340e6, 16, 100) > expected
    assert page.overhead_s(340e6, 8, 100) == 0


def test_hosts_send_the_bytes_that_the_model_says(tmp_path: Path) -> None:
    """The benchmark itself, in short: counted on real links."""
    if reason := available():
        pytest.skip(reason)
    out = tmp_path / "out.json"
    sizes = (16 * KIB, 256 * KIB, 8 * MIB)  # doubling, halving, a ring
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.scaling", "--rates", "none", "--rounds", "1"),
            *("--sizes", *map(str, sizes), "--steps", "0", "--json", str(out)),
        ],
        env=os.environ | {"PYTHONPATH": str(report.REPOSITORY)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within(300),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    rows, _ = compare([Case.of(one) for one in json.loads(out.read_text())["cases"]], cores=2)
    between = [row for row in rows if row.case.layout.hosts > 1]
    assert {row.case.nbytes for row in between} == {*sizes}
    for row in between:
        # Headers, and barriers beside.
        assert 0.99 < row.case.sent / row.predicted_sent < 1.2, row
