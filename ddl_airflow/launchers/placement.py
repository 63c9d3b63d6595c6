"""A run's files on hosts that do not share the workspace: sent before ranks start, brought back.

Everything keeps its path. Hosts get the scripts, the data (each keeps its own cache, and is sent
what it lacks) and what earlier tries left; while ranks run, logs and records come from all hosts,
and what the training saves from the first one, whose rank 0 is the one that saves. So a next try
may go on elsewhere, when that host is gone for good. At the end hosts keep the cache alone; but
while what was saved there has not been brought, it stays, and the next try brings it first; one
that cannot, and runs elsewhere, leaves it to those after it until its own ranks have started.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ddl_airflow.core import eviction
from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.core.job import JobSpec
from ddl_airflow.launchers.remote import Ssh, drop_partial, objects, on_each

# Of the first host, whose log and progress people follow; of the others; and of what is saved.
_LOGS_S = 2.0
_OTHERS_S = 10.0
_RESULTS_S = 30.0
_LATE_S = 60.0
# Of variables whose folders ranks write what is to be kept in.
_RESULTS = ("RESULT_DIR", "EXPERIMENT_DIR")
# Beside a try's records: the host that has what its ranks save, until all of it has been brought.
PLACED = "placed"
# In the run's folder, and never sent: a host that sees it has mounted the workspace.
_WORKERS = ".worker"
# Looked at where and when it removes: the file server may have come up after the host, and its
# file system be mounted while ranks run.
_REMOVE = (
    'if [ -e "$1" ]; then echo "it has mounted the workspace since: it sees $1" >&2; exit 1; fi; '
    'shift; exec rm -rf -- "$@"'
)


class Placement:
    """The files of one job.

    Args:
        ssh: how hosts are reached.
        job: whose ranks are on ``job.hosts``.
        log: a logger.
    """

    def __init__(self, ssh: Ssh, job: JobSpec, log: Any) -> None:
        self._ssh = ssh
        self._job = job
        self._log = log
        self._state = job.record_dir.parent
        # In the same workspace as what is saved, and no part of it.
        self._incoming = self._state / "incoming"
        self._placed = job.record_dir / PLACED
        self._workers = self._state.parent / _WORKERS
        # Notes of hosts that could not be asked for what they have.
        self._earlier: list[Path] = []
        self._results = [Path(job.env[name]) for name in _RESULTS if job.env.get(name)]
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._sends = False
        #: Once all has ended: why what ranks left to keep could not be brought; empty if it was.
        self.missing = ""

    def send(self, look: Callable[[], None] = lambda: None) -> None:
        """Gives each host what its ranks need.

        Args:
            look: called where something of an earlier try was brought, before any of it is sent.

        Raises:
            SubmitFailed: one could not be given it.
        """
        began = time.monotonic()
        self._workers.touch()
        self._drop_partial()  # of a try that was killed
        if self._bring_what_is_left():
            look()  # its ranks may have been killed while they wrote it
        wrong = self._beside_each_other()
        self._sends = not wrong
        wrong = wrong or {
            h: why for h, why in on_each(self._job.hosts, self._send_to).items() if why
        }
        if wrong:
            said = " ".join(f"{host}: {why}." for host, why in wrong.items())
            raise SubmitFailed(f"the run's files could not be placed. {said}")
        took = time.monotonic() - began
        count = len(self._job.hosts)
        self._log.info("placed the run's files on %d host(s) in %.1f s", count, took)

    def _bring_what_is_left(self) -> bool:
        """Brings what an earlier try saved on a host and nobody brought: it is the only copy.

        Returns:
            Whether there was such a try.

        Raises:
            SubmitFailed: it cannot be brought from a host where this job would replace it.
        """
        notes = list(self._state.glob(f"*/{PLACED}"))
        self._earlier = []
        for note in sorted(notes, key=lambda note: note.stat().st_mtime_ns):  # what is newer wins
            host = note.read_text("utf-8").strip()
            why = self._bring_results(host, may_be_gone=True)
            if why and host in self._job.hosts:
                raise SubmitFailed(
                    f"{host} still has what an earlier try saved, and it could not be brought: "
                    f"{why}. To go on without it, remove {note}."
                )
            if why:
                self._log.warning(
                    "%s: what was saved there since could not be brought: %s", host, why
                )
                self._earlier.append(note)  # the host may be back before any ranks start
            else:
                note.unlink()
        return bool(notes)

    def _beside_each_other(self) -> dict[str, str]:
        """Each host that could not be asked whether others have its folders; with the reason.

        Raises:
            SubmitFailed: some have: what is sent to one, and removed there, would be another's.
        """
        hosts, marks = self._job.hosts, self._job.record_dir / "hosts"
        try:
            # Each makes its own, and looks for others.
            made = on_each(hosts, lambda host: self._ssh.make_folders(host, marks / host))
            seen = on_each(hosts, lambda host: self._ssh.run(host, ["ls", f"{marks}"]))
        finally:
            on_each(hosts, lambda host: self._ssh.run(host, ["rm", "-rf", "--", f"{marks}"]))
        for one in seen.values():
            if len(names := [host for host in hosts if host in one.text.split()]) > 1:
                raise SubmitFailed(
                    f"{' and '.join(names)} share {self._state} with each other, and not with the "
                    "Airflow worker. Mount that file system there too, or let [ddl] workspace be "
                    "a folder that each host has for itself.",
                    retryable=False,
                )
        each = (*made.items(), *seen.items())
        return {host: one.why for host, one in reversed(each) if one.code != 0}

    def _send_to(self, host: str) -> str:
        job = self._job
        folders = [job.folder, self._state, job.log_dir, *filter(Path.is_dir, self._results)]
        data = job.env.get("DATA_DIR")
        # A training from its start is not to find there what one of before has saved.
        gone = [folder for folder in self._results if not folder.is_dir()]
        if gone and (why := self._remove(host, *gone)):
            return why
        # rsync makes the last part of a path alone.
        needed = [*folders, *self._results, job.record_dir, *([Path(data)] if data else [])]
        said = self._ssh.make_folders(host, *needed)
        if said.code != 0:
            return said.why
        if data:
            self._make_room(host)
            why = self._ssh.add_to(host, self._blobs)
            if why := why or self._ssh.copy_to(host, Path(data), links=True):
                return why
        for folder in folders:
            if why := self._ssh.copy_to(host, folder):
                return why
        return ""

    @cached_property
    def _blobs(self) -> list[Path]:
        """What the data are links to: the cache has each content once for all runs, there too."""
        links = (path for path in Path(self._job.env["DATA_DIR"]).rglob("*") if path.is_symlink())
        return sorted(set(map(_led_to, links)))

    @cached_property
    def _program(self) -> str:
        """A program that makes room for the data on a host; empty: it may keep all."""
        job = self._job
        if job.cache is None or job.cache_bytes is None:
            return ""
        cache = job.cache
        if not any(blob.is_relative_to(cache) for blob in self._blobs):  # itself a link
            cache = Path(os.path.realpath(cache))
        needed = {
            str(blob.relative_to(cache)): blob.stat().st_size
            for blob in self._blobs
            if blob.is_relative_to(cache) and blob.is_file()
        }
        asked = [str(cache), str(job.cache.parent / "runs"), needed, job.cache_bytes]
        call = f"make_room(*json.loads({json.dumps(asked)!r}))"  # longer than words may be
        program = Path(eviction.__file__).read_text("utf-8")
        return f"{program}\nimport json\nprint(json.dumps({call}))\n"

    def _make_room(self, host: str) -> None:
        """Keeps the host's cache to its size, if it has one; a failure is worth no training."""
        if not self._program:
            return
        words = [self._job.python, "-SE", "-"]
        said = self._ssh.run(host, words, text=self._program, timeout_s=_LATE_S)
        found = [one for one in objects(said.text) if "removed" in one]
        if said.code != 0 or not found:
            why = said.why or said.text
            self._log.warning(
                "%s: its cache was not cleaned, and may outgrow [ddl] cache_size: %s", host, why
            )
        elif number := found[-1]["removed"]:
            self._log.info("%s: removed %d unused object(s) of its cache", host, number)

    def take_back(self) -> None:
        """Removes from the hosts what was sent, where no ranks start."""
        if self._sends:
            self._remove_all(self._job.hosts)

    def start(self) -> None:
        """Begins to bring what ranks leave, until ``finish``."""
        self._placed.write_text(f"{self._job.hosts[0]}\n", "utf-8")
        self._thread = threading.Thread(target=self._follow, daemon=True, name="ddl-placement")
        self._thread.start()

    def _follow(self) -> None:
        first, *others = self._job.hosts
        results = logs = time.monotonic()
        said = failed = ""
        while not self._ending.wait(_LOGS_S):
            try:
                self._bring_logs(first)
                self._drop_earlier()
                if time.monotonic() - logs > _OTHERS_S:
                    on_each(others, self._bring_logs)
                    logs = time.monotonic()
                if time.monotonic() - results > _RESULTS_S:
                    why = self._bring_results(first)
                    if why != said and why:
                        self._log.warning(
                            "%s: what is saved there cannot be brought, and would be lost with it: "
                            "%s",
                            first,
                            why,
                        )
                    said, results = why, time.monotonic()
                failed = ""
            except Exception as error:  # as where no process can be started just now
                if str(error) != failed:
                    failed = str(error)
                    self._log.warning("nothing is brought from the hosts for now: %s", error)

    def finish(self, hosts: Sequence[str], all_done: Callable[[], bool] = lambda: False) -> None:
        """Brings the rest from the hosts that answer, once all has ended. May come twice.

        Args:
            hosts: those that answer.
            all_done: whether the ranks' records, which have been brought by then, say that each has
                done its work: then what they have removed is removed here as well.
        """
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread is not None:
            self._thread.join()  # what it brings is needed; a host that is silent ends it
        kept = set()
        for host, why in on_each(hosts, self._bring_logs).items():
            if why:
                kept.add(host)
                self._log.warning("%s: its logs could not be brought: %s", host, why)
        self._drop_earlier()
        first = self._job.hosts[0]
        if first in hosts:
            why = self._bring_results(first, removed=all_done())
        else:
            why = "it does not answer" if self._placed.exists() else ""  # else all was brought
        if why:
            kept.add(first)
            self.missing = f"{first}: what was saved there could not be brought: {why}"
            self._log.warning("%s", self.missing)
        else:
            self._placed.unlink(missing_ok=True)
        self._remove_all([host for host in hosts if host not in kept])

    def _drop_earlier(self) -> None:
        """Once ranks have started, what they save is newer than what no host was asked for."""
        if self._earlier and any(self._job.record_dir.glob("rank-*")):
            for note in self._earlier:
                note.unlink(missing_ok=True)
            self._earlier = []

    def _remove_all(self, hosts: Sequence[str]) -> None:
        job = self._job
        theirs = [job.folder, self._state, job.log_dir, *self._results]
        if data := job.env.get("DATA_DIR"):
            theirs.append(Path(data))  # links; what they lead to stays for the next run
        for host, why in on_each(hosts, lambda host: self._remove(host, *theirs)).items():
            if why:
                self._log.warning("%s: the run's files stay there: %s", host, why)

    def _remove(self, host: str, *paths: Path) -> str:
        """Returns why it could not; empty if it could."""
        words = ["sh", "-c", _REMOVE, "rm", *map(str, (self._workers, *paths))]
        return self._ssh.run(host, words, timeout_s=_LATE_S).why

    def _bring_logs(self, host: str) -> str:
        """Each host knows its own ranks; of others it has what it was sent."""
        at = self._job.hosts.index(host)
        ranks = self._job.ranks_of(at)
        logs = [f"rank-{rank}.log" for rank in ranks]
        folder = self._job.record_dir.name
        records = [f"{folder}/", *(f"{folder}/rank-{rank}.*" for rank in ranks)]
        if at == 0:
            records += ["progress.jsonl", "stats.json"]
        why = self._ssh.copy_from(host, self._job.log_dir, only=logs, grow=True)
        return why or self._ssh.copy_from(host, self._state, only=records)

    def _bring_results(self, host: str, *, may_be_gone: bool = False, removed: bool = False) -> str:
        """Returns why it could not; empty if it could.

        Args:
            host: that has them.
            may_be_gone: whether the folders may have been removed there.
            removed: whether what is not there is removed here. Ranks that were ended may have
                removed what was whole, and not have come to write the next.
        """
        incoming = self._incoming
        try:
            incoming.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"{incoming}: {error.strerror}"
        each = (
            self._ssh.copy_from(
                host,
                one,
                incoming=incoming,
                # The script may have removed what else it was given.
                may_be_gone=may_be_gone or at > 0,
                # An empty folder may be that of another disk.
                delete=removed and self._ssh.has_files(host, one),
            )
            for at, one in enumerate(self._results)
        )
        why = next(filter(None, each), "")
        if why:
            self._drop_partial()
        return why

    def _drop_partial(self) -> None:
        """Half of a file is not to be taken for what was saved, nor to fill the disk."""
        shutil.rmtree(self._incoming, ignore_errors=True)
        for folder in self._results:
            drop_partial(folder)


def _led_to(link: Path) -> Path:
    """What a link leads to, by the path at which a host will look for it.

    A workspace that is a link here, as to a larger disk, is a folder there.
    """
    path = Path(os.path.normpath(link.parent / os.readlink(link)))
    return path if path.exists() else Path(os.path.realpath(link))
