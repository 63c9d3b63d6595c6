"""Measures how manifests become DAGs: `python -m benchmarks.dag_parse`. See README.md."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import environments, report, turns
from benchmarks.dag_parse import folders, processor

OURS, FACTORY = "ddl-airflow", "dag-factory"
WAYS = ("loader", "bundle", FACTORY)
PARTS = ("parse", "processor")
_HOURLY_S, _DEFAULT_S = 3600, 30
_MOST_FOR_FACTORY = 10_000  # above, it takes minutes for each parse
_ANSWER_S = 1800.0  # and those take some on a busy machine


def make_jobs(home: Path) -> dict[str, turns.Job]:
    """A process of ours and one of dag-factory, each in its environment."""
    jobs = {}
    for name, where in ((OURS, environments.ours()), (FACTORY, environments.dag_factory())):
        variables = where.variables() | {
            "AIRFLOW_HOME": str(home / name),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGBAG_IMPORT_TIMEOUT": "0",
            "AIRFLOW__DAG_FACTORY__ENABLE_TELEMETRY": "False",
            "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_STORAGE_PATH": str(home / "bundles"),
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "ERROR",
        }
        command = [str(where.python), "-m", "benchmarks.dag_parse.parse_rank", name]
        jobs[name] = turns.Job(name, [command], 1, [variables], _ANSWER_S)
    return jobs


def measure(jobs: dict[str, turns.Job], home: Path, count: int, rounds: int) -> dict[str, Any]:
    """Samples of every way over `count` manifests, in turns.

    Returns per way its samples of a whole parse and of one task's own DAG, and what the bundle
    takes to be made and to find nothing new.
    """
    ours, factory = home / f"manifests-{count}", home / f"factory-{count}"
    folders.write_manifests(ours, count)
    folders.write_factory(factory, count)
    (made,) = jobs[OURS].ask({"do": "stubs", "name": f"b{count}", "folder": str(ours)})
    places = {
        "loader": (OURS, str(ours), folders.LOADER),
        "bundle": (OURS, made["folder"], f"{count // 2:05d}/manifest.yml.py"),
        FACTORY: (FACTORY, str(factory), folders.LOADER),
    }
    wanted = folders.dag_id(count // 2)
    ways = WAYS if count <= _MOST_FOR_FACTORY else WAYS[:-1]
    samples: dict[str, Any] = {way: {"whole": [], "own": []} for way in ways}
    for number in range(rounds + 1):
        first = number % len(ways)  # nobody always follows the same one
        shapes = {}
        for way in ways[first:] + ways[:first]:
            job, folder, file = places[way]
            (whole,) = jobs[job].ask({"do": "whole", "folder": folder})
            request = {"do": "own", "folder": folder, "file": file, "dag_id": wanted}
            (own,) = jobs[job].ask(request)
            if whole["dags"] != count:
                raise RuntimeError(f"{way}: {whole['dags']} DAGs of {count}.")
            shapes[way] = whole.pop("shape")
            if number > 0:  # the first to warm up
                samples[way]["whole"].append(whole)
                samples[way]["own"].append(own)
        if len({json.dumps(one) for one in shapes.values()}) > 1:
            raise RuntimeError(f"The DAGs are not equal: {shapes}")
    return {"count": count, "ways": samples, "made": made}


def make_rows(measured: list[dict[str, Any]], clock: str = "seconds") -> list[dict[str, Any]]:
    """A row for each number of manifests and way, against dag-factory of the same round.

    Args:
        measured: what `measure` returns.
        clock: `seconds`, or `cpu_s`.
    """
    rows = []
    for one in measured:
        for what in ("whole", "own"):
            times = {w: [s[clock] for s in one["ways"][w][what]] for w in one["ways"]}
            for way, seconds in times.items():
                compared = report.compare(seconds, times.get(FACTORY, seconds))
                rows.append({"count": one["count"], "way": way, "what": what, **compared})
    return rows


def table(rows: list[dict[str, Any]], what: str) -> str:
    """The rows of a whole parse, or of a task's own DAG, as a Markdown table."""
    counts = sorted({row["count"] for row in rows})
    by = {(row["way"], row["count"]): row for row in rows if row["what"] == what}
    lines = [
        "| manifests | " + " | ".join(f"{count:,}" for count in counts) + " |",
        "|---|" + "---|" * len(counts),
    ]
    for way in WAYS:
        cells = [
            report.time_text(by[way, count]["median_s"]) if (way, count) in by else ""
            for count in counts
        ]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    for way in WAYS[:-1]:
        cells = []
        for count in counts:
            low, high = by[way, count]["ratio_quartiles"]
            ratio = f"{by[way, count]['ratio']:.1f} ({low:.1f}–{high:.1f})"
            cells.append(ratio if (FACTORY, count) in by else "")
        lines.append(f"| {way} × {FACTORY} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse(home: Path, counts: list[int], rounds: int, clock: str) -> dict[str, Any]:
    """Whole folders and single tasks, by that clock; prints and returns what came out."""
    jobs = make_jobs(home)
    with turns.started(list(jobs.values())):
        measured = [measure(jobs, home, count, rounds) for count in counts]
        (heavy,) = jobs[OURS].ask({"do": "imported", "folder": measured[-1]["made"]["folder"]})
        versions = {name: job.greetings[0]["versions"] for name, job in jobs.items()}
    rows = make_rows(measured, clock)
    print(f"\nThe whole folder, {versions[FACTORY]}\n\n{table(rows, 'whole')}")
    print(f"\nThe DAG of one task, in the task's process\n\n{table(rows, 'own')}")
    owns = {r["count"]: r["median_s"] for r in rows if (r["way"], r["what"]) == ("bundle", "own")}
    if len(owns) > 1:
        few, many = min(owns), max(owns)
        print(
            f"\nbundle: at {many:,} manifests {owns[many] / owns[few]:.2f} of the time at {few:,}"
        )
    for one in measured:
        made = {key: report.time_text(one["made"][key]) for key in ("first_s", "again_s")}
        print(f"bundle, {one['count']:,}: made in {made['first_s']}, no change: {made['again_s']}")
    print(f"imported by parsing and serialising, of what must not be: {heavy['heavy']}")
    return {"versions": versions, "clock": clock, "rows": rows, **heavy}


def watch(home: Path, count: int, window_s: float) -> dict[str, Any]:
    """What the DAG processor takes, with the bundle and with the loader; prints and returns it."""
    folder = home / "unchanged"
    folders.write_manifests(folder, count)
    bundle = {"classpath": "ddl_airflow.bundle.ManifestBundle", "kwargs": {"path": str(folder)}}
    loader = {
        "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle",
        "kwargs": {"path": str(folder)},
    }
    found = {}
    print(f"\nThe DAG processor, {count:,} manifests that nobody changes\n")
    print("| | CPU until all are stored | CPU per minute then |\n|---|---|---|")
    for name, entry, interval_s in (
        (f"bundle, min_file_process_interval {_HOURLY_S}", bundle, _HOURLY_S),
        (f"loader, min_file_process_interval {_DEFAULT_S} (default)", loader, _DEFAULT_S),
    ):
        place = home / f"processor-{len(found)}"
        entry = {"name": "measured", **entry}
        one = processor.measure(place, entry, count, interval_s, window_s)
        print(f"| {name} | {one['first_cpu_s']:.0f} s | {one['minute_cpu_s']:.1f} s |", flush=True)
        found[name] = one
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures how manifests become DAGs.")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 100, 1000])
    parser.add_argument("--large", action="store_true", help="10,000 as well: an hour")
    parser.add_argument("--rounds", type=int, default=5, help="samples of each way")
    parser.add_argument("--cpu", action="store_true", help="compare CPU seconds: on a busy machine")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--watched", type=int, default=1000, help="manifests of the DAG processor")
    parser.add_argument("--window", type=float, default=60, help="seconds to watch it")
    parser.add_argument("--json", type=Path, help="where to write every sample")
    arguments = parser.parse_args()
    about = report.about()
    print(report.about_text(about))
    counts = sorted({*arguments.counts, *([10_000] if arguments.large else [])})
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if "parse" in arguments.parts:
            clock = "cpu_s" if arguments.cpu else "seconds"
            about["parse"] = parse(home, counts, arguments.rounds, clock)
        if "processor" in arguments.parts:
            about["processor"] = watch(home, arguments.watched, arguments.window)
    if arguments.json:
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
