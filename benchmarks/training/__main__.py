"""Measures training on several ranks: `python -m benchmarks.training`. See README.md."""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from benchmarks import environments, report, turns

BATCHES = {"mnist": 100, "deep": 16, "wide": 32}  # images for each rank and step
WAYS = ["ddl", "horovod", "apart", "alone", "ddl, TF 2.21", "alone, TF 2.21"]
TEAMS = ["blocking, TF 2.21", "pipelined, TF 2.21"]  # of dl_comm
_IN_GROUPS = "ddl, DDL_GROUP_SIZE="
# What counts as ideal for each way: its ranks, each as fast as this one is by itself.
_IDEAL = {name: "alone, TF 2.21" for name in ("ddl, TF 2.21", *TEAMS)}


def make_job(name: str, ranks: int, model: str, group_size: int | None) -> turns.Job:
    """The job of one of WAYS or TEAMS, or of ddl with DDL_GROUP_SIZE."""
    newest = name.endswith("TF 2.21")
    where = environments.ours() if newest else environments.horovod()
    way = name.split(",")[0]
    alone = way in ("alone", "apart")
    program = [str(where.python), "-m", "benchmarks.training.train_rank"]
    program += ["alone" if alone else way, model, str(BATCHES[model])]
    variables = where.variables()
    if alone:
        count = 1 if way == "alone" else ranks
        environs = [variables | {"RANK": str(rank)} for rank in range(count)]
        return turns.Job(name, [program] * count, count, environs)
    variables |= turns.MPI_ENVIRONMENT | {"DDL_OPTIONS": ""}
    if group_size is not None:
        variables["DDL_GROUP_SIZE"] = str(group_size)
    command = [*turns.mpirun(where.python, ranks), *program]
    return turns.Job(name, [command], ranks, [variables])


def check(answers: dict[str, list[dict[str, Any]]], ranks: int) -> None:
    """Raises RuntimeError unless the ranks of a job have the same weights.

    And, on two ranks, where a sum has only one order: unless ddl and Horovod have the same.
    """
    for name, ours in answers.items():
        if name != "apart" and len({answer["weights"] for answer in ours}) > 1:
            raise RuntimeError(f"{name}: the ranks' weights differ.")
    both = [answers[name][0]["weights"] for name in ("ddl", "horovod") if name in answers]
    if ranks == 2 and len(set(both)) > 1:
        raise RuntimeError("ddl and horovod: their weights differ after the same steps.")


def measure(
    jobs: dict[str, turns.Job], ranks: int, steps: int, rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """For each job its samples: seconds a step of the slowest rank, and what else it said."""
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in jobs}
    names = list(jobs)
    for number in range(rounds + 1):
        first = number % len(names)  # nobody always follows the same one
        turn = names[first:] + names[:first]
        answers = {name: jobs[name].ask({"steps": steps}) for name in turn}
        check(answers, ranks)
        if number == 0:
            continue  # to warm up
        for name in names:
            samples[name].append(
                {
                    "step_s": max(answer["seconds"] for answer in answers[name]) / steps,
                    "cpu_s": statistics.mean(answer["cpu_s"] for answer in answers[name]) / steps,
                    "weights": answers[name][0]["weights"],
                    "loss": answers[name][0]["loss"],
                }
            )
    return samples


def make_rows(
    samples: dict[str, list[dict[str, Any]]], ranks: dict[str, int], batch: int
) -> list[dict[str, Any]]:
    """A row for each job: its speed, and that as a share of the ideal and against Horovod's."""
    times = {name: [one["step_s"] for one in many] for name, many in samples.items()}
    rows = []
    for name, many in samples.items():
        ideal = next((i for start, i in _IDEAL.items() if name.startswith(start)), "alone")
        row: dict[str, Any] = {"name": name, "samples": many}
        row["images_per_s"] = ranks[name] * batch / statistics.median(times[name])
        row["step_s"] = statistics.median(times[name])
        row["cpu_s"] = statistics.median(one["cpu_s"] for one in many)
        if ideal in times and name in times:
            row["of_ideal"] = report.compare(times[name], times[ideal])
        if "horovod" in times and ranks[name] == ranks["horovod"]:
            row["x_horovod"] = report.compare(times[name], times["horovod"])
        if name in TEAMS and TEAMS[0] in times:
            row["x_blocking"] = report.compare(times[name], times[TEAMS[0]])
        if name.startswith(_IN_GROUPS) and "ddl" in times:
            row["x_all_in_one"] = report.compare(times[name], times["ddl"])
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""

    def ratio(row: dict[str, Any], key: str) -> str:
        if key not in row:
            return ""
        low, high = row[key]["ratio_quartiles"]
        return f"{row[key]['ratio']:.2f} ({low:.2f}–{high:.2f})"

    lines = [
        "| | images/s | step | CPU time, a rank and step | of ideal | × horovod |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['images_per_s']:.0f} | {report.time_text(row['step_s'])} "
            f"| {report.time_text(row['cpu_s'])} | {ratio(row, 'of_ideal')} "
            f"| {ratio(row, 'x_horovod')} |"
        )
    for row in rows:
        if row["name"] == TEAMS[1] and "x_blocking" in row:
            lines.append(f"\npipelined × blocking: {ratio(row, 'x_blocking')}")
        if "x_all_in_one" in row:
            lines.append(f"\n{row['name']} × all in one: {ratio(row, 'x_all_in_one')}")
    return "\n".join(lines)


def main() -> int:
    parser = report.argument_parser("Measures training on several ranks.", 9, "way")
    parser.add_argument("--steps", type=int, default=20, help="of training in a sample")
    parser.add_argument("--model", choices=BATCHES, default="mnist")
    parser.add_argument("--ways", nargs="+", choices=WAYS + TEAMS, default=WAYS)
    parser.add_argument(
        "--group-sizes",
        type=int,
        nargs="+",
        default=[],
        help="also ddl with each of these as DDL_GROUP_SIZE",
    )
    arguments = parser.parse_args()
    about = report.about()
    ranks, model = arguments.ranks, arguments.model
    jobs = {name: make_job(name, ranks, model, None) for name in arguments.ways}
    for size in arguments.group_sizes:
        name = f"{_IN_GROUPS}{size}"
        jobs[name] = make_job(name, ranks, model, size)
    with turns.started(list(jobs.values())):
        samples = measure(jobs, ranks, arguments.steps, arguments.rounds)
    numbers = {name: 1 if name.startswith("alone") else ranks for name in jobs}
    rows = make_rows(samples, numbers, BATCHES[model])
    versions = {name: job.greetings[0]["versions"] for name, job in jobs.items()}
    print(report.about_text(about))
    print(
        f"{model}, {BATCHES[model]} images for each of {ranks} ranks, 1 thread a rank, "
        f"{arguments.rounds} rounds of {arguments.steps} steps"
    )
    print(table(rows))
    if arguments.json:
        about |= {
            "model": model,
            "ranks": ranks,
            "steps": arguments.steps,
            "versions": versions,
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
