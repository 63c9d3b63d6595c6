"""A task whose job has its ranks on other hosts: on the first of the hosts in namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.integration.hosts import Hosts
from tests.limits import within

SCRIPT = Path(__file__).resolve().parent / "scripts" / "ssh_job.py"


def task_environment() -> dict[str, str]:
    """That of this process, without what it was told of jobs, and with these sources."""
    jobs = ("OMPI_", "PRTE_", "PMIX_", "SLURM_", "DDL_")
    found = {name: text for name, text in os.environ.items() if not name.startswith(jobs)}
    sources = [str(SCRIPT.parents[3]), str(SCRIPT.parents[3] / "ops_lib" / "python")]
    return found | {"PYTHONPATH": os.pathsep.join(sources)}


class SshTask:
    """Begins with a job on the first host; its ranks go to others.

    Args:
        hosts: the first has the task, and the next two the ranks, unless ``names`` says so.
        job_id: of the job.
        root: folder of the run; on /mnt nothing is shared.
        script: what ranks run.
        names: hosts of the launcher.
        slots, nodes, env: of the job.
        files: more files of the run, by their paths beneath its root, with their texts.
        links: symbolic links, with what they point to.
        only_looks: whether it ends before ranks start.
        python: the ranks'.
        settings: further ones of the launcher.
    """

    def __init__(
        self,
        hosts: Hosts,
        job_id: str,
        root: Path,
        script: str = "",
        *,
        names: list[str] | None = None,
        slots: int = 1,
        nodes: int = 2,
        env: dict[str, str] | None = None,
        files: dict[str, str] | None = None,
        links: dict[str, str] | None = None,
        only_looks: bool = False,
        python: str = sys.executable,
        **settings: Any,
    ) -> None:
        self.root = root
        asked = {
            "job": {
                "job_id": job_id,
                "command": "python main.py",
                "nodes": nodes,
                "slots": slots,
                "env": env or {},
            },
            "root": str(root),
            "launcher": {
                "hosts": hosts.addresses[1:3] if names is None else names,
                "network": "10.99.0.0/24",
                "ssh_config": str(hosts.ssh_config),
                **settings,
            },
            "files": {"folder/main.py": script, **(files or {})},
            "links": links or {},
            "only_looks": only_looks,
            "python": python,
        }
        self._said = hosts.folder / f"{job_id.replace('/', '-')}.said"
        question = self._said.with_suffix(".json")
        question.write_text(json.dumps(asked))
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                hosts.on(0, [sys.executable, str(SCRIPT), str(question)]),
                env=task_environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def until(self, words: str, count: int = 1) -> float:
        """Waits until it has said that; the seconds it took."""
        began = time.monotonic()
        while self.said().count(words) < count:
            waited = time.monotonic() - began
            assert waited < within(60) and self.process.poll() is None, self.said()
            time.sleep(0.05)
        return time.monotonic() - began

    def ended(self) -> list[Any]:
        """The error's name, its message, and whether it is tried again; or '', '' and the nodes."""
        self.process.wait(within(90))
        last = self.said().splitlines()[-1]
        assert last.startswith("ended: "), self.said()
        return json.loads(last.removeprefix("ended: "))
