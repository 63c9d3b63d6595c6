"""Runs one job as the train step does, and says how it ended: as a process of its own.

``python launched_job.py ASKED.json``: the launcher and its settings, the job's fields, and whether
the hosts are only looked at. Where there is a scheduler, it goes on with a job that an earlier
process has submitted.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path

from ddl_airflow.core.cluster import parameter_servers
from ddl_airflow.core.errors import DdlError, JobPreempted
from ddl_airflow.core.job import JobHandle, JobSpec
from ddl_airflow.launchers.base import Launcher, Preparing, Scheduler
from ddl_airflow.launchers.registry import launcher
from ddl_airflow.steps.job import RunningJob, ScheduledJob

_log = logging.getLogger("job")


def run(asked: dict) -> JobHandle:
    root = Path(asked["root"])
    about = asked["job"]
    job = JobSpec(
        python=asked["python"],
        folder=root / "code",
        record_dir=root / "ddl" / "try-1",
        log_dir=root / "logs",
        cluster=parameter_servers(about["nodes"], about["slots"]) if asked["servers"] else None,
        cache=root.parents[1] / "cache",
        **about,
    )
    for name, text in asked["files"].items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, text in asked["links"].items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(text)
    chosen: Launcher = launcher(asked["kind"], asked["settings"])
    if asked["only_looks"]:
        assert isinstance(chosen, Preparing)
        job = chosen.prepare(job, _log)
        return job.handle(asked["kind"], 0, job.nodes)
    progress = root / "ddl" / "progress.jsonl"
    if not isinstance(chosen, Scheduler):
        running = RunningJob(chosen, _log)
        signal.signal(signal.SIGTERM, lambda *_: running.cancel())
        return running.run(job, progress)
    (root / "airflow").mkdir(exist_ok=True)
    kept = root / "airflow"
    scheduled = ScheduledJob(chosen, _log, kept / "job.json", kept / "cancellations")
    signal.signal(signal.SIGTERM, lambda *_: scheduled.cancel())
    try:
        started = scheduled.adopt() or scheduled.submit(job, progress)
        scheduled.finish(started, None)
    except JobPreempted:  # of the next try, whose own job goes on, as in the step
        scheduled.drop_note()
        raise
    scheduled.drop_note()
    return started.handle


def main(asked: dict) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        handle = run(asked)
    except JobPreempted as error:
        print("ended:", json.dumps([type(error).__name__, str(error), error.step]))
    except DdlError as error:
        print("ended:", json.dumps([type(error).__name__, str(error), error.retryable]))
    else:
        print("ended:", json.dumps(["", "", handle.nodes]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
