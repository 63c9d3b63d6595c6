"""Runs one job over ssh, as the train step does, and says how it ended: on a host of a test.

``python ssh_job.py ASKED.json``: the job's fields, the launcher's settings, and whether it only
looks at the hosts.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path

from ddl_airflow.core.errors import DdlError
from ddl_airflow.core.job import JobSpec
from ddl_airflow.launchers.ssh import SshLauncher
from ddl_airflow.steps.job import RunningJob


def main(asked: dict) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    folders = {name: Path(asked["root"], name) for name in ("folder", "record_dir", "log_dir")}
    job = JobSpec(python=asked["python"], **asked["job"], **folders)
    job.folder.mkdir(parents=True, exist_ok=True)
    for name, text in asked["files"].items():
        path = Path(asked["root"], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, text in asked["links"].items():
        path = Path(asked["root"], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(text)
    launcher, log = SshLauncher(**asked["launcher"]), logging.getLogger("job")
    running = RunningJob(launcher, log)
    signal.signal(signal.SIGTERM, lambda *_: running.cancel())
    try:
        if asked["only_looks"]:
            nodes = launcher.prepare(job, log).nodes
        else:
            nodes = running.run(job, job.record_dir.parent / "progress.jsonl").nodes
    except DdlError as error:
        print("ended:", json.dumps([type(error).__name__, str(error), error.retryable]))
    else:
        print("ended:", json.dumps(["", "", nodes]))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
