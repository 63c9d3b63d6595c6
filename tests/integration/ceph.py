"""A real Ceph object store on free ports of this machine, for tests of anything that speaks S3.

One monitor, one OSD in memory, one gateway, no manager: about 150 MB and two seconds. What it holds
is lost at the end.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.limits import within

PROGRAMS = (
    "ceph",
    "ceph-authtool",
    "ceph-mon",
    "ceph-osd",
    "monmaptool",
    "radosgw",
    "radosgw-admin",
    "setpriv",
)
HOW_TO_GET = "apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
START_TIMEOUT_S = 60

# cephx and msgr2 as in production. Pools of one copy, and a monitor that agrees at once, because
# there is one of each; a full host disk must not stop it, as it holds nothing there. Deleted
# data goes within seconds: the default of two hours fills the OSD and then PUTs hang.
CONF = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{mon_port}]
public network = 127.0.0.0/8
ms bind msgr2 = true
ms bind msgr1 = false
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {folder}/keyring
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
crash dir = {folder}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
[mon]
mon data = {folder}/mon
mon initial members = a
mon data avail warn = 1
mon data avail crit = 0
paxos propose interval = 0.02
paxos min wait = 0.01
[osd]
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = {capacity}
osd class load list = *
osd class default list = *
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw run sync thread = false
rgw enable usage log = false
rgw enable ops log = false
rgw gc obj min wait = 1
rgw gc processor period = 2
rgw gc processor max time = 60
rgw multipart min part size = {least_part}
"""
LEAST_PART = 5 * 1024 * 1024  # as Amazon S3 has it


def available() -> str:
    """Nothing if every program is there, else what is missing and how to get it."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not missing:
        return ""
    return f"Ceph is not installed (no {', '.join(missing)}). Get it: {HOW_TO_GET}"


class CephObjectStore:
    """Runs while its context lasts. ``endpoint_url`` is where; users start with ``add_user``."""

    def __init__(
        self, folder: Path, least_part: int = LEAST_PART, capacity: int = 4 * 2**30
    ) -> None:
        """Starts nothing yet.

        Args:
            folder: for its files; made, and removed at the end.
            least_part: bytes that each part of an upload must have, but for the last.
            capacity: bytes of memory that objects may take; of a full one requests hang.
        """
        self.folder, self._least_part, self._capacity = folder.resolve(), least_part, capacity
        self._conf = self.folder / "ceph.conf"
        self._processes: list[subprocess.Popen[bytes]] = []
        self.endpoint_url = ""

    def __enter__(self) -> CephObjectStore:
        if reason := available():
            raise RuntimeError(reason)
        try:
            self._start()
        except BaseException as exc:
            tail = self._logs()
            self.__exit__(None, None, None)
            if isinstance(exc, Exception):
                raise RuntimeError(f"Ceph did not start: {exc}\n{tail}") from exc
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # SIGKILL: an orderly end takes many seconds, and there is nothing to save.
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._processes.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        (self.folder / "mon").mkdir(parents=True)
        (self.folder / "osd").mkdir()
        fsid, osd_uuid = str(uuid.uuid4()), str(uuid.uuid4())
        mon_port, port = _free_ports(2)
        self._conf.write_text(
            CONF.format(
                fsid=fsid,
                folder=self.folder,
                mon_port=mon_port,
                port=port,
                least_part=self._least_part,
                capacity=self._capacity,
            )
        )
        keyring, monmap = str(self.folder / "keyring"), str(self.folder / "monmap")
        every = ("mon", "allow *", "osd", "allow *", "mgr", "allow *")
        self._key(keyring, "mon.", "mon", "allow *", create=True)
        self._key(keyring, "client.admin", *every)
        self._key(keyring, "osd.0", "mon", "allow profile osd", "osd", "allow *")
        self._key(keyring, "client.rgw.a", *every)
        address = f"[v2:127.0.0.1:{mon_port}]"
        self._run("monmaptool", "--create", "--addv", "a", address, "--fsid", fsid, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
        self._spawn("ceph-mon", "-i", "a")
        self._run("ceph", "osd", "new", osd_uuid)
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd_uuid)
        self._spawn("ceph-osd", "-i", "0")
        self._spawn("radosgw", "-n", "client.rgw.a")
        self.endpoint_url = f"http://127.0.0.1:{port}"
        self._await_answer()

    @staticmethod
    def _key(keyring: str, name: str, *caps: str, create: bool = False) -> None:
        command = ["ceph-authtool", keyring, "--gen-key", "-n", name]
        command += ["--create-keyring"] * create
        for service, right in zip(caps[::2], caps[1::2], strict=True):
            command += ["--cap", service, right]
        subprocess.run(command, check=True, capture_output=True, timeout=within(START_TIMEOUT_S))

    def _run(self, program: str, *arguments: str) -> str:
        command = [program, "-c", str(self._conf), *arguments]
        if program == "monmaptool":  # takes no configuration
            del command[1:3]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=within(START_TIMEOUT_S)
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} exited {done.returncode}: {done.stderr}")
        return done.stdout

    def _spawn(self, program: str, *arguments: str) -> None:
        # Killed with the tests, should these be killed before they can end it.
        command = ["setpriv", "--pdeathsig", "KILL", program, "-c", str(self._conf), "-f"]
        with open(self.folder / f"{program}.out", "wb") as out:
            self._processes.append(
                subprocess.Popen(
                    [*command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    def _await_answer(self) -> None:
        deadline = time.monotonic() + within(START_TIMEOUT_S)
        while True:
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args} exited {process.returncode}")
            try:
                with urllib.request.urlopen(self.endpoint_url, timeout=within(5)):
                    return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def _logs(self) -> str:
        found = sorted(self.folder.glob("*.out")) + sorted(self.folder.glob("*.log"))
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-600:]}" for path in found
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """Of its running processes."""
        return tuple(process.pid for process in self._processes)

    def version(self) -> tuple[int, ...]:
        """That of the gateway, such as (16, 2, 15)."""
        said = subprocess.run(
            ["radosgw", "--version"], capture_output=True, text=True, timeout=within(30), check=True
        ).stdout
        found = re.match(r"ceph version (\d+)\.(\d+)\.(\d+)", said)
        assert found is not None, said
        return tuple(map(int, found.groups()))

    def admin(self, *arguments: str) -> Any:
        """What ``radosgw-admin`` answers, parsed."""
        answer = self._run("radosgw-admin", *arguments)
        return json.loads(answer) if answer.strip() else None

    def add_user(self, name: str) -> tuple[str, str]:
        """Makes a user. Returns access key id and secret access key."""
        made = self.admin("user", "create", f"--uid={name}", f"--display-name={name}")
        return made["keys"][0]["access_key"], made["keys"][0]["secret_key"]

    def limit_objects(self, name: str, count: int) -> None:
        """Each bucket of the user takes at most ``count`` objects; more is QuotaExceeded."""
        self.admin(
            "quota", "set", "--quota-scope=bucket", f"--uid={name}", f"--max-objects={count}"
        )
        self.admin("quota", "enable", "--quota-scope=bucket", f"--uid={name}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
