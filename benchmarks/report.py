"""What a benchmark says of its samples, and of the machine they come from."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]


def compare(seconds: Sequence[float], baseline: Sequence[float]) -> dict[str, Any]:
    """Median and best of `seconds`, and how many times as fast they are as `baseline`.

    A ratio is taken within each round, where both were measured close together: the median and
    quartiles of these. Round i is seconds[i] and baseline[i].
    """
    ratios = [b / s for s, b in zip(seconds, baseline, strict=True)]
    low, high = ratios * 2 if len(ratios) == 1 else _quartiles(ratios)
    return {
        "median_s": statistics.median(seconds),
        "best_s": min(seconds),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [low, high],
        "samples_s": list(seconds),
    }


def _quartiles(samples: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def argument_parser(description: str, rounds: int, of: str) -> argparse.ArgumentParser:
    """What all benchmarks ask: --ranks, --rounds (`rounds` samples `of` something), --json."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"samples of each {of}")
    parser.add_argument("--json", type=Path, help="where to write every sample")
    return parser


def size_text(nbytes: int) -> str:
    """4096 → "4 KiB"."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def time_text(seconds: float) -> str:
    """0.0123 → "12.3 ms"."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def about() -> dict[str, Any]:
    """Time, commit and machine. Load is what ran before the benchmark."""
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": done.stdout.strip(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def about_text(about: dict[str, Any]) -> str:
    """One line of about()."""
    return (
        f"{about['processor']}, {about['cores']} cores, load {about['load_before']:.1f}; "
        f"commit {about['commit']}"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
