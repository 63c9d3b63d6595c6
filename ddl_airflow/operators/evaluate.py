"""evaluate: is the model good enough to be published."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ddl_airflow.core.beneath import read_object
from ddl_airflow.core.errors import EvaluationInvalid, FileRefused, QualityTooLow
from ddl_airflow.core.layout import RunLayout
from ddl_airflow.core.plan import StoreReference
from ddl_airflow.hooks.store import store_of
from ddl_airflow.lineage.production import (
    PRODUCTION,
    Pointer,
    check_not_worse,
    read_pointer,
    reject,
)
from ddl_airflow.lineage.record import fixed_run, read_part, write_part
from ddl_airflow.operators.base import rank_python
from ddl_airflow.operators.command import check_command
from ddl_airflow.operators.job import JobOperator


class EvaluateOperator(JobOperator):
    """Collects what is known of the model's quality, and fails where it is not good enough.

    That is, later ones before earlier: the last metrics of the training; ``accuracy``, as the
    reloaded SavedModel has it on the sample's rows, where the sample has labels; and what the
    command writes.

    Args:
        results: where production's metrics are. Its keys are never serialised nor rendered.
        command: run once; writes a JSON object of numbers to ``$EVALUATION``. Empty: none.
        metric: the one that decides; empty: none does.
        minimum, maximum: that it must reach, may not exceed.
        not_worse: whether it must be at least as good as that of the model in production.
        python, tf1, parameters, secrets: as ``JobOperator`` has them.
    """

    template_fields = (
        "command",
        "metric",
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
        minimum: float | None = None,
        maximum: float | None = None,
        not_worse: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._reference = results
        self.command = command
        self.metric = metric
        self.minimum = minimum
        self.maximum = maximum
        self.not_worse = not_worse

    def rehearse(self, layout: RunLayout) -> str:
        """What has to hold."""
        if self.command:
            check_command(self.command, layout.code, rank_python(self.python))
        bounds = {"at least": self.minimum, "at most": self.maximum}
        wanted = [f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None]
        if self.not_worse:
            wanted.append("no worse than production")
        return f"would ask that {self.metric} is {' and '.join(wanted)}" if wanted else "no bounds"

    def run_step(self, layout: RunLayout, context: Any) -> dict[str, Any]:
        """Returns the metrics, production's, and a table of both for people."""
        try_number = context["ti"].try_number
        metrics = dict(read_part(layout, "train")["result"]["metrics"])
        accuracy = read_part(layout, "transform")["result"].get("accuracy")
        if accuracy is not None:
            metrics["accuracy"] = accuracy
        if self.command:
            metrics |= self._measured(layout, try_number)
        for name in [name for name, value in metrics.items() if not math.isfinite(value)]:
            if name == self.metric:
                continue  # it decides, below
            # JSON has no such numbers: Airflow refuses them, and so do those who read the record.
            self.log.warning("metric %s is %s and is left out", name, metrics.pop(name))
        now = read_pointer(store_of(self._reference), self.dag_id, PRODUCTION)
        production = now["metrics"] if now else None
        table = _table(metrics, production)
        for line in table.splitlines():
            self.log.info("%s", line)
        if self.metric:
            try:
                self._decide(metrics, now)
            except QualityTooLow as low:
                self._remember(layout, low)
                raise
        evaluation = {
            "metric": self.metric or None,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "production": now and now["training_id"],
        }
        write_part(
            layout,
            "evaluate",
            {
                "result": {"metrics": metrics, "evaluation": evaluation},
                "tries": {"evaluate": self.tries(context)},
            },
        )
        return {"metrics": metrics, "production": production, "table": table}

    def _measured(self, layout: RunLayout, try_number: int) -> dict[str, float]:
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
        return _read(layout, self.command)

    def _remember(self, layout: RunLayout, low: QualityTooLow) -> None:
        """So that no schedule trains the same again."""
        if (begun := fixed_run(layout)) is not None:
            store = store_of(self._reference)
            reject(store, self.dag_id, layout.training_id, begun["made_of"], str(low))

    def _decide(self, metrics: Mapping[str, float], production: Pointer | None) -> None:
        if self.metric not in metrics:
            raise EvaluationInvalid(
                f"evaluation.metric: nobody measured {self.metric!r}. There is: "
                f"{', '.join(sorted(metrics)) or 'nothing'}. Report it in training, or write it in "
                "evaluation.command."
            )
        value, nothing = metrics[self.metric], "Nothing was published."
        if not math.isfinite(value):
            raise QualityTooLow(f"{self.metric} is {value}. {nothing}")
        if self.minimum is not None and value < self.minimum:
            short = f"{self.minimum - value:.4g} below the minimum {self.minimum:g}"
            raise QualityTooLow(f"{self.metric} is {value:.4g}, {short}. {nothing}")
        if self.maximum is not None and value > self.maximum:
            beyond = f"{value - self.maximum:.4g} above the maximum {self.maximum:g}"
            raise QualityTooLow(f"{self.metric} is {value:.4g}, {beyond}. {nothing}")
        if self.not_worse:
            small = smaller_is_better(self.minimum, self.maximum)
            try:
                check_not_worse(metrics, production, self.metric, small=small)
            except QualityTooLow as worse:
                raise QualityTooLow(f"{worse} {nothing}") from None


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


def _table(metrics: Mapping[str, float], production: Mapping[str, float] | None) -> str:
    lines = ["| metric | this model | production |", "|---|---|---|"]
    for name in sorted(metrics):
        serves = (production or {}).get(name)
        lines.append(
            f"| {name} | {metrics[name]:.5g} | {'' if serves is None else f'{serves:.5g}'} |"
        )
    if production is None:
        lines += ["", "No model is in production yet."]
    return "\n".join(lines)
