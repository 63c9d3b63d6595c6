"""Jobs that a process of its own launches and follows, as a task of Airflow does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.hosts import Hosts
from tests.limits import within

SCRIPT = Path(__file__).resolve().parent / "scripts" / "launched_job.py"


def task_environment() -> dict[str, str]:
    """That of this process, without what it was told of jobs, and with these sources."""
    jobs = ("OMPI_", "PRTE_", "PMIX_", "SLURM_", "DDL_")
    found = {name: text for name, text in os.environ.items() if not name.startswith(jobs)}
    sources = [str(SCRIPT.parents[3]), str(SCRIPT.parents[3] / "ops_lib" / "python")]
    return found | {"PYTHONPATH": os.pathsep.join(sources)}


class LaunchedJob:
    """A job that a process of its own has launched, and follows, as a task does.

    Args:
        around: put in front of the command of that process, which may run elsewhere.
        folder: for what the process is asked and says; it sees it too.
        job_id: of the job.
        root: folder of the run.
        kind: the launcher's.
        script: what ranks run.
        slots, nodes, env: of the job.
        files: more files of the run, by their paths beneath its root, with their texts.
        links: symbolic links, with what they point to.
        only_looks: whether it ends before ranks start.
        python: the ranks'.
        settings: of the launcher.
        servers: whether it is a cluster of parameter servers and workers.
        cache_bytes: of the job; its cache is beside the folder of the runs.
    """

    def __init__(
        self,
        around: Callable[[list[str]], list[str]],
        folder: Path,
        job_id: str,
        root: Path,
        kind: str,
        script: str = "",
        *,
        slots: int = 1,
        nodes: int = 2,
        env: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
        links: dict[str, str] | None = None,
        only_looks: bool = False,
        python: str = sys.executable,
        settings: dict[str, Any] | None = None,
        servers: bool = False,
        cache_bytes: int | None = None,
    ) -> None:
        self.root = root
        self.job_id = job_id
        asked = {
            "kind": kind,
            "settings": settings or {},
            "job": {
                "job_id": job_id,
                "command": "python main.py",
                "nodes": nodes,
                "slots": slots,
                "env": env or {},
                "cache_bytes": cache_bytes,
            },
            "root": str(root),
            "files": {"code/main.py": script, **(files or {})},
            "links": links or {},
            "only_looks": only_looks,
            "python": python,
            "servers": servers,
        }
        self._said = folder / f"{job_id.replace('/', '-')}.said"
        question = self._said.with_suffix(".json")
        question.write_text(json.dumps(asked))
        self._command = around([sys.executable, str(SCRIPT), str(question)])
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._said.open("ab") as said:
            return subprocess.Popen(
                self._command,
                env=task_environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def start_again(self) -> None:
        """The same process once more, as a next try."""
        self.process = self._start()

    def said(self) -> str:
        """What the process has said so far."""
        return self._said.read_text(errors="replace")

    def until(self, words: str, count: int = 1) -> None:
        """Waits until it has said that."""
        began = time.monotonic()
        while self.said().count(words) < count:
            waited = time.monotonic() - began
            assert waited < within(60) and self.process.poll() is None, self.said()
            time.sleep(0.05)

    def ended(self) -> list[Any]:
        """The error's name, its message, and whether it is tried again; or '', '' and the nodes.

        Of a job that was preempted, in place of whether it is tried again, the step that was saved.
        """
        try:
            self.process.wait(limit_s := within(90))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not within {limit_s:.0f} s: {self.said()}") from None
        last = self.said().splitlines()[-1]
        assert last.startswith("ended: "), self.said()
        return json.loads(last.removeprefix("ended: "))


def over_ssh(
    lab: Hosts,
    job_id: str,
    root: Path,
    script: str = "",
    *,
    settings: dict[str, Any] | None = None,
    **asked: Any,
) -> LaunchedJob:
    """One whose process is on the first host, and whose ranks are on the next two."""
    usual = {
        "hosts": lab.addresses[1:3],
        "network": "10.99.0.0/24",
        "ssh_config": str(lab.ssh_config),
    }
    return LaunchedJob(
        lambda command: lab.on(0, command),
        *(lab.folder, job_id, root, "ssh", script),
        settings={**usual, **(settings or {})},
        **asked,
    )
