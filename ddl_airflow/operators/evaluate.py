"""evaluate: is the model good enough to be published."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.command import check_command
from ddl_airflow.core.errors import EvaluationInvalid, FileRefused, QualityTooLow
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.markdown import escaped, table
from ddl_airflow.core.metrics import (
    COMMAND,
    TRAINING,
    Measurement,
    deciding,
    finite,
    newest,
    shown,
)
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import store_of
from ddl_airflow.lineage.production import (
    PRODUCTION,
    Pointer,
    check_not_worse,
    read_pointer,
    reject,
    serving,
)
from ddl_airflow.lineage.record import fixed_run, measured, read_part, write_part
from ddl_airflow.operators.base import rank_python
from ddl_airflow.operators.job import JobOperator

# Metrics in one message.
_MOST_NAMED = 20


class EvaluateOperator(JobOperator):
    """Collects what is known of the model's quality, and fails where it is not good enough.

    That is, later ones before earlier: the last metrics of the training; ``accuracy``, as the
    reloaded SavedModel has it on the sample's rows, where the sample has labels; and what the
    command writes. What was measured on training batches decides only where that is asked for.

    Args:
        results: where production's metrics are. Its keys are never serialised nor rendered.
        command: run once; writes a JSON object of numbers to ``$EVALUATION``. Empty: none.
        metric: the one that decides; empty: none does.
        source: what it must be measured on (``ddl_airflow.core.metrics``); empty: anything but
            training batches.
        minimum, maximum: that it must reach, may not exceed.
        not_worse: whether it must be at least as good as that of the model in production.
        python, tf1, parameters, secrets: as ``JobOperator`` has them.
    """

    template_fields = (
        "command",
        "metric",
        "source",
        "minimum",
        "maximum",
        "not_worse",
        "python",
        "parameters",
        "secrets",
    )
    templated = ("command",)
    fixed = template_fields
    template_fields_renderers = {"command": "bash", "parameters": "json", "secrets": "json"}
    ui_color = "#f3e9c9"

    def __init__(
        self,
        *,
        results: StoreReference,
        command: str = "",
        metric: str = "",
        source: str = "",
        minimum: float | None = None,
        maximum: float | None = None,
        not_worse: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._reference = results
        self.command = command
        self.metric = metric
        self.source = source
        self.minimum = minimum
        self.maximum = maximum
        self.not_worse = not_worse

    def rehearse(self, layout: RunLayout) -> str:
        """What has to hold."""
        if self.command:
            check_command(self.command, layout.code, rank_python(self.python))
        if not self.metric:
            return "no bounds"
        bounds = wanted(self.minimum, self.maximum, not_worse=self.not_worse)
        return f"would ask that {self.metric} is {bounds}"

    def run_step(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        """Returns the metrics, production's, and a table of both for people."""
        try_number = context["ti"].try_number
        measurements = measured(layout)
        if self.command:
            measurements += self._measured(layout, try_number)
        metrics = finite(measurements)
        now = read_pointer(store_of(self._reference), self.dag_id, PRODUCTION)
        for one in newest(measurements).values():
            self.log.info("%s is %s (%s)", one.metric, shown(one.value), one.measured_on)
        decides = None
        if self.metric:
            decides = self._deciding(layout, measurements)
            self.log.info("%s decides, as measured on %s", self.metric, decides.measured_on)
            try:
                self._decide(decides, now)
            except QualityTooLow as low:
                self._remember(layout, low)
                raise
        evaluation = {
            "metric": self.metric or None,
            "measured": decides and decides.dump(),
            "minimum": self.minimum,
            "maximum": self.maximum,
            "production": now and now["training_id"],
        }
        write_part(
            layout,
            "evaluate",
            {
                "result": {
                    "metrics": metrics,
                    "measurements": [one.dump() for one in measurements],
                    "evaluation": evaluation,
                },
                "tries": {"evaluate": self.tries(context)},
            },
        )
        production = now["metrics"] if now else None
        bound = wanted(self.minimum, self.maximum, not_worse=self.not_worse)
        shown_to_people = _table(measurements, now, decides, bound)
        return {"metrics": metrics, "production": production, "table": shown_to_people}

    def _measured(self, layout: RunLayout, try_number: int) -> list[Measurement]:
        check_command(self.command, layout.code, rank_python(self.python))
        layout.evaluation.unlink(missing_ok=True)  # of an earlier try
        env = {"MODEL": str(layout.model), "EVALUATION": str(layout.evaluation)}
        self.run_once(
            layout,
            f"evaluate-{try_number}",
            self.command,
            layout.logs / "evaluate",
            self.environment(layout) | env,
        )
        measured = _read(layout, self.command)
        return [Measurement(name, value, COMMAND) for name, value in measured.items()]

    def _remember(self, layout: RunLayout, low: QualityTooLow) -> None:
        """So that no schedule trains the same again."""
        if (begun := fixed_run(layout)) is not None:
            store = store_of(self._reference)
            reject(store, self.dag_id, layout.training_id, begun["made_of"], str(low))

    def _deciding(self, layout: RunLayout, measurements: Sequence[Measurement]) -> Measurement:
        """The measurement that decides. Raises EvaluationInvalid if there is none that may."""
        metric = self.metric
        one = deciding(measurements, metric, self.source)
        if one is not None and one.source == TRAINING != self.source:
            raise EvaluationInvalid(
                f"evaluation.metric: {metric} is {shown(one.value, 4)} on training batches, which "
                f"the model has learnt: that decides nothing.{_before(one, measurements)} "
                f"{_cures(layout, metric, measurements)} evaluation.source: training takes it all "
                "the same."
            )
        if one is not None and not one.source:
            raise EvaluationInvalid(
                f"evaluation.metric: {metric} is of a training of an earlier version, which did "
                "not note what it was measured on. Clear train with downstream."
            )
        if one is not None:
            return one
        asked = f" by source {self.source}" if self.source else ""
        there = [f"{m.metric} ({m.measured_on})" for m in measurements[-_MOST_NAMED:]]
        raise EvaluationInvalid(
            f"evaluation.metric: nobody measured {metric!r}{asked}. There is: "
            f"{', '.join(sorted(there)) or 'nothing'}. {_cures(layout, metric, measurements)}"
        )

    def _decide(self, one: Measurement, production: Pointer | None) -> None:
        value, metric = one.value, self.metric
        rest = f"({one.measured_on}). Nothing was published."
        if not math.isfinite(value):
            raise QualityTooLow(f"{metric} is {shown(value)} {rest}")
        if self.minimum is not None and value < self.minimum:
            short = f"{self.minimum - value:.4g} below the minimum {self.minimum:g}"
            raise QualityTooLow(f"{metric} is {value:.4g}, {short} {rest}")
        if self.maximum is not None and value > self.maximum:
            beyond = f"{value - self.maximum:.4g} above the maximum {self.maximum:g}"
            raise QualityTooLow(f"{metric} is {value:.4g}, {beyond} {rest}")
        if self.not_worse:
            small = smaller_is_better(self.minimum, self.maximum)
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


def smaller_is_better(minimum: float | None, maximum: float | None) -> bool:
    """Whoever bounds a metric from above alone wants it small."""
    return minimum is None and maximum is not None


def _read(layout: RunLayout, command: str) -> dict[str, float]:
    try:
        said = read_object(layout.evaluation, layout.workspace)
        return {str(name): float(value) for name, value in said.items()}
    except FileNotFoundError:
        problem = "wrote no $EVALUATION"
    except (ValueError, TypeError, OverflowError, FileRefused) as error:
        problem = f"wrote no JSON object of numbers to $EVALUATION: {error}"
    raise EvaluationInvalid(
        f'evaluation.command {command!r} {problem}. Write {{"accuracy": 0.97}}.'
    )


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
                serves += f" ({escaped(other.measured_on)})"
        asked = bound if one is decides else ""
        rows.append((escaped(name), shown(one.value), serves, escaped(one.measured_on), asked))
    said = table(("metric", "this model", "production", "measured on", "asked for"), rows)
    return said if now is not None else f"{said}\n\nNo model is in production yet."
