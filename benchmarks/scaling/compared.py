"""Measured cases beside the model: what it was fitted on, and how far off it is on the others."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import report
from benchmarks.scaling.model import Layout, Link, fitted, seconds, traffic

# Two hosts of one rank: their two smallest sizes give what a link is.
FITTED_ON = Layout(2, 1)
# One host of two ranks: its second smallest size gives what shared memory costs.
IN_HOST = Layout(1, 2)
ALONE = Layout(1, 1)


@dataclass(frozen=True)
class Case:
    """What was measured.

    Attributes:
        kind: allreduce or training.
        rate: of each host's link, as tc has it; none.
        nbytes: of the tensor, or of all gradients.
        samples_s: seconds of one call, or of one step.
        sent: bytes that left the busiest host for it, headers included.
        reduced_s: seconds of a step in reductions, when all ranks are there; median rank.
    """

    kind: str
    rate: str
    layout: Layout
    nbytes: int
    samples_s: list[float]
    sent: float
    reduced_s: float = 0.0

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples_s)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(found: Mapping[str, Any]) -> Case:
        return Case(**{**found, "layout": Layout(**found["layout"])})


@dataclass(frozen=True)
class Row:
    """A case, and what the model says of it.

    Attributes:
        predicted_s: seconds of the call; of a training, of a step's reductions.
        predicted_step_s: seconds of a training's step.
        predicted_sent: payload that leaves the busiest host.
        fitted: the model's numbers come from this case, so it checks nothing.
    """

    case: Case
    predicted_s: float
    predicted_step_s: float
    predicted_sent: float
    fitted: bool

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured; negative where it is too short."""
        training = self.case.kind == "training"
        return self.predicted_s / (self.case.reduced_s if training else self.case.seconds) - 1


def compare(cases: Sequence[Case], cores: int) -> tuple[list[Row], dict[str, Link]]:
    """A row for each case, and the link of each rate.

    Raises:
        ValueError: there are no cases to fit the model on.
    """
    reduced = [case for case in cases if case.kind == "allreduce"]
    links: dict[str, Link] = {}
    basis: list[Case] = []
    for rate in dict.fromkeys(case.rate for case in cases):
        of_rate = [case for case in reduced if (case.rate, case.layout) == (rate, FITTED_ON)]
        if len(of_rate) < 2:
            raise ValueError(f"{rate}: two sizes between two hosts of one rank are needed.")
        small, large = sorted(of_rate, key=lambda case: case.nbytes)[:2]
        points = [(case.nbytes, case.seconds) for case in (small, large)]
        links[rate] = fitted(*points, shared=rate == "none")
        basis += [small, large]
    in_host = 0.0
    if within := sorted(
        (case for case in reduced if case.layout == IN_HOST), key=lambda case: case.nbytes
    ):
        basis.append(within[min(1, len(within) - 1)])
        in_host = basis[-1].seconds / basis[-1].nbytes
    alone = [case for case in cases if case.kind == "training" and case.layout == ALONE]
    basis += alone
    rows = []
    for case in cases:
        # Ranks beyond the cores take turns, at computing and at adding.
        turns = max(1.0, case.layout.ranks / cores)
        predicted = seconds(case.layout, case.nbytes, links[case.rate], in_host * turns)
        step = alone[0].seconds * turns + predicted if case.kind == "training" else 0.0
        sent = traffic(case.layout, case.nbytes).sent
        rows.append(Row(case, predicted, step, sent, case in basis))
    return rows, links


def ranks_text(layout: Layout) -> str:
    """2 hosts of 2, flat."""
    hosts = "1 host" if layout.hosts == 1 else f"{layout.hosts} hosts"
    return f"{hosts} of {layout.slots}" + ("" if layout.hierarchical else ", flat")


def flat_ratio(rows: Sequence[Row], row: Row) -> str:
    """Time of the flat reduction over that of the hierarchical one, in the same round; nothing if
    there is none."""
    case = row.case
    for other in rows:
        at = other.case.layout
        if (
            (other.case.kind, other.case.rate, other.case.nbytes)
            == (case.kind, case.rate, case.nbytes)
            and (at.hosts, at.slots) == (case.layout.hosts, case.layout.slots)
            and case.layout.hierarchical
            and not at.hierarchical
        ):
            ratio = report.compare(case.samples_s, other.case.samples_s)["ratio"]
            return f"{ratio:.2f} ({other.predicted_s / row.predicted_s:.2f})"
    return ""


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown tables, one for each kind."""
    lines = [
        "| link | ranks | size | measured | model | error | left a host | model | flat / ours |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        case = row.case
        if case.kind != "allreduce":
            continue
        lines.append(
            f"| {case.rate} | {ranks_text(case.layout)} | {report.size_text(case.nbytes)} "
            f"| {report.time_text(case.seconds)} | {report.time_text(row.predicted_s)} "
            f"| {_error(row)} | {case.sent / case.nbytes:.2f} S "
            f"| {row.predicted_sent / case.nbytes:.2f} S | {flat_ratio(rows, row)} |"
        )
    trained = [row for row in rows if row.case.kind == "training"]
    if trained:
        lines += ["", *_trainings(trained)]
    return "\n".join(lines)


def _trainings(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| link | ranks | of a step reducing | model | error | left a host in a step | step "
        "| model | x one rank's steps |",
        "|---" * 9 + "|",
    ]
    first = rows[0].case.seconds
    for row in rows:
        case = row.case
        lines.append(
            f"| {case.rate} | {ranks_text(case.layout)} | {report.time_text(case.reduced_s)} "
            f"| {report.time_text(row.predicted_s)} | {_error(row)} "
            f"| {case.sent / case.nbytes:.2f} S ({row.predicted_sent / case.nbytes:.2f} S) "
            f"| {report.time_text(case.seconds)} | {report.time_text(row.predicted_step_s)} "
            f"| {case.layout.ranks * first / case.seconds:.2f} |"
        )
    return lines


def _error(row: Row) -> str:
    return "fitted" if row.fitted else f"{row.error:+.0%}"
