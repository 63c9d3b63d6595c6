"""Compares weights with Horovod's: `python -m benchmarks.horovod_weights`. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import environments, report, turns

SCRIPT = Path(__file__).with_name("script.py")
LIMIT = 1e-6
# Of float16: a gradient is rounded at each step.
FP16_LIMIT = 1e-3
WAYS = ("Keras 3", "Keras 2")
_OURS = "from ddl_ops.horovodrun import main; raise SystemExit(main())"


@dataclass(frozen=True)
class Trained:
    """The weights of a case, by rank and then by variable, of any shapes."""

    begin: list[list[Any]]
    end: list[list[Any]]


def run(
    command: Sequence[str], variables: Mapping[str, str], folder: Path, cases: Sequence[str]
) -> None:
    """Runs one of the jobs; no cases are all of them.

    Raises RuntimeError with what it said if it fails.
    """
    done = subprocess.run(
        [*command, str(SCRIPT), str(folder), *cases],
        env=os.environ | {**variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=turns.die_with_parent,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} of {' '.join(command)}\n{done.stdout}")


def run_ours(way: str, ranks: int, folder: Path, cases: Sequence[str]) -> None:
    """By horovodrun of this repository, with TensorFlow 2.21."""
    where = environments.ours()
    variables = where.variables() | {"TF_USE_LEGACY_KERAS": "1" if way == "Keras 2" else "0"}
    python = str(where.python)
    run([python, "-c", _OURS, "-np", str(ranks), python], variables, folder, cases)


def run_horovod(ranks: int, folder: Path, cases: Sequence[str]) -> None:
    """By Horovod 0.28.1, with TensorFlow 2.15 and its Keras 2."""
    where = environments.horovod_alone()
    command = [*turns.mpirun(where.python, ranks), str(where.python)]
    run(command, where.variables() | turns.MPI_ENVIRONMENT, folder, cases)


def read(folder: Path, ranks: int) -> dict[str, Trained]:
    """What the ranks of a job have left, by case. All of them must have left the same cases."""
    names = sorted(path.name.removesuffix("-0.npz") for path in folder.glob("*-0.npz"))
    found = {}
    for name in names:
        begin, end = [], []
        for rank in range(ranks):
            with np.load(folder / f"{name}-{rank}.npz") as arrays:
                count = len(arrays.files) // 2
                begin.append([arrays[f"begin{i}"] for i in range(count)])
                end.append([arrays[f"end{i}"] for i in range(count)])
        found[name] = Trained(begin, end)
    return found


def farthest(some: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> float:
    """The largest difference of any weight of any rank; infinite where one is no number."""
    differences = [
        float(np.max(np.abs(np.float64(one) - np.float64(other)), initial=0.0))
        for mine, theirs in zip(some, others, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    ]
    return max(d if np.isfinite(d) else float("inf") for d in differences)


def compare(theirs: Mapping[str, Trained], ours: Mapping[str, Mapping[str, Trained]]) -> list[Any]:
    """A row for each case: how far weights have moved, and how far ours are from theirs."""
    return [
        {
            "name": name,
            "moved": farthest(trained.begin, trained.end),
            **{
                way: farthest(trained.end, of[name].end) if name in of else None
                for way, of in ours.items()
            },
        }
        for name, trained in theirs.items()
    ]


def above(row: Mapping[str, Any], way: str) -> bool:
    """Whether a case differs by more than it may, or has not run."""
    limit = FP16_LIMIT if "fp16" in row["name"] else LIMIT
    return row[way] is None or row[way] > limit


def table(rows: Mapping[int, list[Any]], ways: Sequence[str]) -> str:
    """By number of ranks, as Markdown."""
    columns = [(ranks, way) for ranks in rows for way in ways]
    by_name: dict[str, dict[int, Any]] = {}
    for ranks, some in rows.items():
        for row in some:
            by_name.setdefault(row["name"], {})[ranks] = row
    heads = [f"{way}, {ranks} ranks" for ranks, way in columns]
    lines = [
        f"| case | {' | '.join(heads)} | moved |",
        f"|---|{'---|' * len(columns)}---|",
    ]
    for name, of in by_name.items():
        cells = [_text(of[ranks][way]) if ranks in of else "" for ranks, way in columns]
        moved = max(row["moved"] for row in of.values())
        lines.append(f"| {name} | {' | '.join(cells)} | {moved:.1g} |")
    return "\n".join(lines)


def _text(difference: float | None) -> str:
    if difference is None:
        return "not run"
    return "0" if difference == 0 else f"{difference:.0e}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compares weights with Horovod's.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--cases", nargs="+", default=[], help="of the script; by default all")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    about = report.about()
    rows: dict[int, list[Any]] = {}
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as place:
            folders = {name: Path(place, name) for name in ("Horovod", *arguments.ways)}
            for folder in folders.values():
                folder.mkdir()
            run_horovod(ranks, folders["Horovod"], arguments.cases)
            for way in arguments.ways:
                run_ours(way, ranks, folders[way], arguments.cases)
            of = {name: read(folder, ranks) for name, folder in folders.items()}
        rows[ranks] = compare(of.pop("Horovod"), of)
    print(report.about_text(about))
    print(table(rows, arguments.ways))
    wrong = [
        f"{row['name']}, {way}, {ranks} ranks"
        for ranks, some in rows.items()
        for row in some
        for way in arguments.ways
        if above(row, way)
    ]
    for one in wrong:
        print(f"differs: {one}")
    if arguments.json:
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
