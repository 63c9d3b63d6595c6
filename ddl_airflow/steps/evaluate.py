"""evaluate: is the model good enough to be published."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddl_airflow.core import environment
from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.command import check_command
from ddl_airflow.core.errors import EvaluationInvalid, FileRefused, QualityTooLow
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.markdown import code, table
from ddl_airflow.core.metrics import (
    COMMAND,
    TRAINING,
    Measurement,
    deciding,
    finite,
    newest,
    shown,
)
from ddl_airflow.core.plan import EvaluateStep, smaller_is_better
from ddl_airflow.core.progress import LARGEST, MAX_FIELDS, is_text
from ddl_airflow.lineage.production import (
    PRODUCTION,
    Pointer,
    check_not_worse,
    read_pointer,
    reject,
    serving,
)
from ddl_airflow.lineage.record import (
    drop_part,
    fixed_run,
    let_pass,
    measured,
    read_part,
    take_back,
    write_part,
)
from ddl_airflow.steps.base import ScriptTry

_NAME = "evaluate"  # of the manifest's step, which is the only one
# Metrics in one message.
_MOST_NAMED = 20


class Evaluate(ScriptTry[EvaluateStep]):
    """Collects what is known of the model's quality, and fails where it is not good enough.

    That is, later ones before earlier: the last metrics of the training; ``accuracy``, as the
    reloaded SavedModel has it on the sample's rows, where the sample has labels; and what the
    command writes. What was measured on training batches decides only where that is asked for.
    """

    def rehearse(self) -> str:
        """What has to hold."""
        if self.step.command:
            self._check_command()
        if not self.step.metric:
            return "no bounds"
        bounds = wanted(self.step.minimum, self.step.maximum, not_worse=self.step.not_worse)
        return f"would ask that {self.step.metric} is {bounds}"

    def run(self) -> dict[str, Any]:
        """Returns the metrics, production's, and a table of both for people."""
        layout = self.layout
        gate = self.context.name or _NAME
        take_back(layout, gate)
        drop_part(layout, "evaluate")  # who refuses the model now takes back what was said before
        measurements = measured(layout)
        if self.step.command:
            measurements += self._measured()
        metrics = finite(measurements)
        now = read_pointer(
            self.site.open_store(self.step.results), self.context.run.dag_id, PRODUCTION
        )
        for one in newest(measurements).values():
            self.log.info("%s is %s (%s)", one.metric, shown(one.value), one.measured_on)
        decides = None
        if self.step.metric:
            decides = self._deciding(measurements)
            self.log.info("%s decides, as measured on %s", self.step.metric, decides.measured_on)
            try:
                self._decide(decides, now)
            except QualityTooLow as low:
                self._remember(low)
                raise
        evaluation = {
            "metric": self.step.metric or None,
            "measured": decides and decides.dump(),
            "minimum": self.step.minimum,
            "maximum": self.step.maximum,
            "production": now and now["training_id"],
        }
        facts = {
            "result": {
                "metrics": metrics,
                "measurements": [one.dump() for one in measurements],
                "evaluation": evaluation,
            },
            "tries": {"evaluate": self.context.tries},
        }
        write_part(layout, "evaluate", facts)
        let_pass(layout, gate, facts)
        production = now["metrics"] if now else None
        bound = wanted(self.step.minimum, self.step.maximum, not_worse=self.step.not_worse)
        shown_to_people = _table(measurements, now, decides, bound)
        return {"metrics": metrics, "production": production, "table": shown_to_people}

    def _check_command(self) -> None:
        check_command(self.step.command, self.layout.code, self.python, field="evaluation.command")

    def _measured(self) -> list[Measurement]:
        self._check_command()
        layout, name = self.layout, _NAME
        if (gate := self.context.name or name) != name:  # another may run at the same time
            name += f"-{hashlib.sha256(gate.encode()).hexdigest()[:16]}"
        path = layout.evaluation.with_name(f"evaluation{name.removeprefix(_NAME)}.json")
        path.unlink(missing_ok=True)  # of an earlier try
        self.run_once(
            f"{name}-{self.context.try_number}",
            self.step.command,
            layout.logs / name,
            self.environment() | environment.of_evaluation(layout, path),
        )
        measured = _read(path, layout.workspace, self.step.command)
        return [Measurement(name, value, COMMAND) for name, value in measured.items()]

    def _remember(self, low: QualityTooLow) -> None:
        """So that no schedule trains the same again."""
        if (begun := fixed_run(self.layout)) is not None:
            store = self.site.open_store(self.step.results)
            reject(
                store, self.context.run.dag_id, self.layout.training_id, begun["made_of"], str(low)
            )

    def _deciding(self, measurements: Sequence[Measurement]) -> Measurement:
        """The measurement that decides. Raises EvaluationInvalid if there is none that may."""
        metric = self.step.metric
        one = deciding(measurements, metric, self.step.source)
        if one is not None and one.source == TRAINING != self.step.source:
            raise EvaluationInvalid(
                f"evaluation.metric: {metric} is {shown(one.value, 4)} on training batches, which "
                f"the model has learnt: that decides nothing.{_before(one, measurements)} "
                f"{_cures(self.layout, metric, measurements)} evaluation.source: training takes it "
                "all the same."
            )
        if one is not None and not one.source:
            raise EvaluationInvalid(
                f"evaluation.metric: {metric} is of a training of an earlier version, which did "
                "not note what it was measured on. Clear train with downstream."
            )
        if one is not None:
            return one
        asked = f" by source {self.step.source}" if self.step.source else ""
        there = [f"{m.metric} ({m.measured_on})" for m in measurements[-_MOST_NAMED:]]
        raise EvaluationInvalid(
            f"evaluation.metric: nobody measured {metric!r}{asked}. There is: "
            f"{', '.join(sorted(there)) or 'nothing'}. {_cures(self.layout, metric, measurements)}"
        )

    def _decide(self, one: Measurement, production: Pointer | None) -> None:
        value, metric = one.value, self.step.metric
        rest = f"({one.measured_on}). Nothing was published: train longer, or set another "
        if not math.isfinite(value):
            raise QualityTooLow(
                f"{metric} is {shown(value)} ({one.measured_on}). Nothing was published: see at "
                "which step the training left the numbers."
            )
        if self.step.minimum is not None and value < self.step.minimum:
            short = f"{self.step.minimum - value:.4g} below the minimum {self.step.minimum:g}"
            raise QualityTooLow(f"{metric} is {value:.4g}, {short} {rest}evaluation.minimum.")
        if self.step.maximum is not None and value > self.step.maximum:
            beyond = f"{value - self.step.maximum:.4g} above the maximum {self.step.maximum:g}"
            raise QualityTooLow(f"{metric} is {value:.4g}, {beyond} {rest}evaluation.maximum.")
        if self.step.not_worse:
            small = smaller_is_better(self.step.minimum, self.step.maximum)
            try:
                if other := check_not_worse(one, production, small=small):
                    self.log.warning("%s", other)
            except QualityTooLow as worse:
                raise QualityTooLow(f"{worse} Nothing was published.") from None


def _before(one: Measurement, measurements: Sequence[Measurement]) -> str:
    """What another source said of the metric before, and how to take that."""
    others = [m for m in measurements if m.metric == one.metric and m.source != one.source]
    if not others:
        return ""
    last = others[-1]
    return (
        f" Before it, {shown(last.value, 4)} came from {last.measured_on}: evaluation.source: "
        f"{last.source} takes that."
    )


def _cures(layout: RunLayout, metric: str, measurements: Sequence[Measurement]) -> str:
    """How the metric is measured on what the model has not learnt."""
    cures = []
    if metric == "accuracy":
        why = read_part(layout, "transform")["result"].get("no_accuracy") or "there is no sample"
        cures.append(f"name a sample with labels in transform.sample ({why[:300]})")
    cures.append("write it in evaluation.command")
    validated = newest(measurements).get(f"val_{metric}")
    if validated is not None:
        cures.append(
            f"take metric: {validated.metric}, which is {shown(validated.value, 4)} on "
            f"{validated.measured_on}"
        )
    else:
        cures.append(f"report it from held-out data (ddl.report, or fit() for val_{metric})")
    said = f"{', '.join(cures[:-1])}, or {cures[-1]}."
    return said[0].upper() + said[1:]


def wanted(minimum: float | None, maximum: float | None, *, not_worse: bool) -> str:
    """The bounds of what decides, for people."""
    bounds = {"at least": minimum, "at most": maximum}
    said = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]
    if not_worse:
        said.append("no worse than production")
    return " and ".join(said)


def _read(path: Path, workspace: Path, command: str) -> dict[str, float]:
    try:
        said = read_object(path, workspace)
        # All of them go into pointers, events and the form.
        if len(said) > MAX_FIELDS:
            raise ValueError(f"it has {len(said):,}, and at most {MAX_FIELDS} are kept")
        if long := [name for name in said if not is_text(name)]:
            raise ValueError(f"{long[0][:50]!r}... is too long for a name, or is no UTF-8")
        return {name: _exact(value) for name, value in said.items()}
    except FileNotFoundError:
        problem = "wrote no $EVALUATION"
    except (ValueError, TypeError, OverflowError, FileRefused) as error:
        problem = f"wrote no JSON object of numbers to $EVALUATION: {error}"
    raise EvaluationInvalid(
        f'evaluation.command {command!r} {problem}. Write {{"accuracy": 0.97}}.'
    )


def _exact(value: Any) -> float:
    """The number; a whole one keeps its digits, as long as XCom, too, can have it as one."""
    number = float(value)  # raises, if it is none
    return value if type(value) is int and abs(value) <= LARGEST else number


def _table(
    measurements: Sequence[Measurement],
    now: Pointer | None,
    decides: Measurement | None,
    bound: str,
) -> str:
    """All metrics beside production's, for the form of who approves; what decides is first."""
    known = dict(sorted(newest(measurements).items()))
    if decides is not None:
        known = {decides.metric: decides} | known | {decides.metric: decides}
    rows = []
    for name, one in known.items():
        serves = ""
        for other in serving(now, name)[-1:]:
            serves = shown(other.value)
            if not one.like(other):
                serves += f" ({code(other.measured_on, in_table=True)})"
        asked = bound if one is decides else ""
        # As code, of which nothing is a link: names are the training's.
        told, on = (code(text, in_table=True) for text in (name, one.measured_on))
        rows.append((told, shown(one.value), serves, on, asked))
    said = table(("metric", "this model", "production", "measured on", "asked for"), rows)
    return said if now is not None else f"{said}\n\nNo model is in production yet."
