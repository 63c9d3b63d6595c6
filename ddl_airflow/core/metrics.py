"""What is known of a model's quality: numbers, and what each of them was measured on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# What a metric was measured on, or by whom: docs/manifests.md, "What decides".
SAMPLE = "sample"
COMMAND = "command"
VALIDATION = "validation"
SCRIPT = "script"
OUTPUT = "output"
TRAINING = "training"
_SAID = {
    COMMAND: "evaluation.command",
    VALIDATION: "validation data",
    SCRIPT: "the script",
    OUTPUT: "the output",
    TRAINING: "training batches",
}

# JSON has none of these numbers, and Airflow refuses them: so they travel.
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Measurement:
    """One number of a model.

    Attributes:
        metric: its name.
        value: perhaps NaN or infinite.
        source: what it was measured on, or by whom; empty if nobody noted that.
        file: of a sample, its name.
        rows: of a sample, how many.
    """

    metric: str
    value: float
    source: str = ""
    file: str = ""
    rows: int = 0

    @property
    def measured_on(self) -> str:
        """For people: ``sample digits.npz, 100 rows``."""
        if self.source == SAMPLE:
            return f"sample {self.file}, {self.rows} rows"
        return _SAID.get(self.source, "unknown")

    def like(self, other: Measurement) -> bool:
        """Whether both were measured on the same, as far as is known."""
        unknown = not (self.source and other.source)
        return unknown or (self.source, self.file) == (other.source, other.file)

    def dump(self) -> dict[str, Any]:
        """JSON of it."""
        told = {"metric": self.metric, "value": spelled(self.value), "source": self.source}
        return told | ({"file": self.file, "rows": self.rows} if self.source == SAMPLE else {})

    @classmethod
    def load(cls, told: Mapping[str, Any]) -> Measurement:
        """What ``dump`` wrote."""
        return cls(**{**told, "value": number_of(told["value"])})


def source_of(metric: str, writer: str | None) -> str:
    """What a metric in a progress line was measured on.

    Args:
        metric: its name.
        writer: ``source`` of the line, who wrote it. Whoever is not known is the script.
    """
    if writer == "keras":
        return VALIDATION if metric.startswith("val_") else TRAINING
    return {"metrics": OUTPUT, "ops": TRAINING}.get(writer or "", SCRIPT)


def spelled(value: float) -> float | str:
    """The number as JSON can have it: NaN and infinities become words."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def is_word(value: object) -> bool:
    """Whether it stands for NaN or an infinity."""
    return isinstance(value, str) and value in _WORDS


def number_of(value: float | str) -> float:
    """What ``spelled`` was given. Raises KeyError for other texts.

    A whole number stays one: as a float it would lose what is beyond 53 bits.
    """
    if isinstance(value, str):
        return _WORDS[value]
    return value if type(value) is int else float(value)


def shown(value: float, digits: int = 5) -> str:
    """The number for people."""
    return f"{value:.{digits}g}" if math.isfinite(value) else str(spelled(value))


def diverged(one: Measurement) -> str:
    """What to say of a number that is NaN or infinite when the training has ended."""
    return (
        f"{one.metric} is {shown(one.value)} at the end of the training ({one.measured_on}): it "
        "diverged, or was fed such values. Lower the learning rate, clip gradients, or look for "
        "them in the data."
    )


def newest(measurements: Iterable[Measurement]) -> dict[str, Measurement]:
    """The last of each metric, by its name."""
    return {one.metric: one for one in measurements}


def deciding(measurements: Iterable[Measurement], metric: str, source: str) -> Measurement | None:
    """The last of a metric, of all sources or of one; None if nobody measured it."""
    found = (one for one in measurements if one.metric == metric)
    return newest(one for one in found if source in ("", one.source)).get(metric)


def finite(measurements: Iterable[Measurement]) -> dict[str, float]:
    """The last value of each metric where that is a number: for whoever reads JSON."""
    last = newest(measurements)
    return {name: one.value for name, one in last.items() if math.isfinite(one.value)}
