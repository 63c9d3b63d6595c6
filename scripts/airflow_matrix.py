"""The matrix of Airflow's versions in docs/provider.md, from what `make test-airflow` leaves.

``versions`` prints them, ``write`` makes the matrix of their results.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "provider.md"
BEGIN, END = "<!-- made by make test-airflow -->", "<!-- end -->"
WAYS = ("bundle", "loader", "importer")
_UNIT = {"test_bundle": "bundle", "test_dag": "loader", "test_importer": "importer"}


def versions(root: Path = ROOT) -> list[str]:
    """The versions that are tested: those that are locked, oldest first, and the environment's."""
    locked = {
        path.stem.removeprefix("airflow-") for path in root.glob("requirements/airflow-*.txt")
    }
    text = (root / "requirements" / "lock.in").read_text()
    (own,) = re.findall(r"^apache-airflow==(\S+)", text, re.M)
    return sorted(locked | {own}, key=lambda one: [int(part) for part in re.findall(r"\d+", one)])


def _way(module: str, test: str) -> str:
    """What a test is about: a way to DAGs, or nothing of those."""
    file = module.rpartition(".")[2]
    if file == "test_manifests":
        return next((way for way in WAYS if way in test.partition("_does_without")[0]), "bundle")
    return "schedules" if file == "test_data_change" else _UNIT.get(file, "")


def _counts(results: Path, of: Callable[[str], bool]) -> str:
    """``12 passed, 1 skipped``, of the tests that are about something."""
    found: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):  # noqa: S314  pytest wrote it
        if of(_way(case.get("classname", ""), case.get("name", ""))):
            tags = {child.tag for child in case}
            failed = tags & {"failure", "error"}
            found["failed" if failed else "skipped" if "skipped" in tags else "passed"] += 1
    order = ("passed", "skipped", "failed")
    return ", ".join(f"{found[one]} {one}" for one in order if found[one]) or "–"


def matrix(build: Path, names: list[str]) -> str:
    """Markdown's table of the results below a folder, a row for each version and way."""
    rows = [
        "| Airflow | way | unit tests | in a running Airflow | schedules | both examples |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        results = build / f"airflow-{name}" / "results"
        unit, running = results / "unit.xml", results / "running.xml"
        for way in WAYS:
            by_bundle = way == "bundle"
            demo = "trained" if (results / "demo").exists() else "failed"
            cells = [
                name,
                way,
                _counts(unit, way.__eq__),
                _counts(running, way.__eq__),
                _counts(running, "schedules".__eq__) if by_bundle else "",
                demo if by_bundle else "",
            ]
            rows.append(f"| {' | '.join(cells)} |")
        rows.append(f"| {name} | all | {_counts(unit, lambda _: True)} | | | |")
    return "\n".join(rows)


def write(page: Path = PAGE) -> None:
    """Puts the matrix between its marks."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    table = matrix(ROOT / "build", versions())
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["versions"]:
        print(*versions())
    elif sys.argv[1:] == ["write"]:
        write()
    else:
        sys.exit("airflow_matrix: versions or write")
