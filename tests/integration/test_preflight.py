"""The look at hosts before ranks start: faults that are planted in one of four are all named."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.integration.hosts import TEMPORARY, Hosts, available
from tests.integration.launched import LaunchedJob, over_ssh

pytestmark = pytest.mark.integration
# Host 0 has the task.
RANKS = (1, 2, 3, 4)
# How many to plant, one after the other, and how many healthy starts: 100 and 20 take 15 minutes.
MANY = int(os.environ.get("TESTS_FAULTS", "0"))
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t which, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(which, now);
  if (code == 0 && which == CLOCK_REALTIME) now->tv_sec += 90;
  return code;
}
"""
_numbers = itertools.count()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := available():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("preflight"), 5) as five:
        yield five


@pytest.fixture(scope="module")
def wrong_clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with which a process is 90 s ahead, and the file that preloads it."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("no gcc: apt-get install gcc")
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(_CLOCK)
    library = folder / "clock.so"
    words = [compiler, "-shared", "-fPIC", "-o", str(library), str(folder / "clock.c"), "-ldl"]
    subprocess.run(words, check=True)
    (folder / "ld.so.preload").write_text(f"{library}\n")
    return folder / "ld.so.preload"


class Fault:
    """One that can be planted in a host, and taken away.

    Args:
        hosts: all.
        at: the host's number.
    """

    def __init__(self, hosts: Hosts, at: int) -> None:
        self._hosts = hosts
        self._at = at

    def _do(self, *words: str) -> None:
        subprocess.run(self._hosts.on(self._at, words), check=True, stdout=subprocess.DEVNULL)

    @contextmanager
    def _over(self, path: Path, by: Path) -> Iterator[None]:
        """There another file, or folder, is at the path."""
        self._do("mount", "--bind", str(by), str(path))
        try:
            yield
        finally:
            self._do("umount", str(path))

    @contextmanager
    def slow_link(self) -> Iterator[str]:
        limit = ("rate", "20mbit", "burst", "64kb", "latency", "400ms")
        self._do("tc", "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        try:
            yield "it reduces at most"
        finally:
            self._do("tc", "qdisc", "del", "dev", "eth0", "root")

    @contextmanager
    def full_disk(self) -> Iterator[str]:
        self._do("mount", "-o", "remount,size=1m", TEMPORARY)
        try:
            yield "are free for the workspace"
        finally:
            self._do("mount", "-o", "remount,size=1g", TEMPORARY)

    @contextmanager
    def wrong_version(self) -> Iterator[str]:
        folder = self._hosts.folder / "other-version"
        folder.mkdir(exist_ok=True)
        at = Path(str(distribution("mpi4py")._path)) / "METADATA"
        other = folder / "METADATA"
        lines = at.read_text().splitlines()
        other.write_text(
            "\n".join("Version: 3.0.0" if one.startswith("Version:") else one for one in lines)
        )
        with self._over(at, other):
            yield "mpi4py is 3.0.0, and"

    @contextmanager
    def missing_package(self) -> Iterator[str]:
        empty = self._hosts.folder / "empty"
        empty.mkdir(exist_ok=True)
        with self._over(Path(str(distribution("mpi4py")._path)), empty):
            yield "there has no mpi4py"

    @contextmanager
    def missing_key(self) -> Iterator[str]:
        with self._over(self._hosts.folder / "user_key.pub", Path("/dev/null")):
            yield "it lets nobody in with the keys of this user"

    @contextmanager
    def no_python(self) -> Iterator[str]:
        empty = self._hosts.folder / "empty"
        empty.mkdir(exist_ok=True)
        with self._over(Path(sys.executable).parent, empty):
            yield "that runs. Install it there"

    @contextmanager
    def cut_link(self) -> Iterator[str]:
        self._hosts.cut(self._at)
        try:
            yield "it does not answer"
        finally:
            self._hosts.connect(self._at)

    @contextmanager
    def other_mtu(self) -> Iterator[str]:
        self._do("ip", "link", "set", "eth0", "mtu", "1400")
        try:
            yield "its network takes packets of 1400 bytes"
        finally:
            self._do("ip", "link", "set", "eth0", "mtu", "1500")

    @contextmanager
    def read_only(self) -> Iterator[str]:
        self._do("mount", "-o", "remount,ro", TEMPORARY)
        try:
            yield "cannot be written"
        finally:
            self._do("mount", "-o", "remount,rw", TEMPORARY)

    @contextmanager
    def clock(self, preloads: Path) -> Iterator[str]:
        Path("/etc/ld.so.preload").touch()
        with self._over(Path("/etc/ld.so.preload"), preloads):
            yield "its clock is 90 s ahead of this host's"

    @contextmanager
    def firewall(self) -> Iterator[str]:
        """ssh alone gets through."""
        drop = ("-p", "tcp", "!", "--sport", "22", "-j", "DROP")
        self._do("iptables", "-A", "OUTPUT", *drop)
        try:
            yield "no reduction with"
        finally:
            self._do("iptables", "-D", "OUTPUT", *drop)


FAULTS = tuple(name for name in vars(Fault) if name != "clock" and not name.startswith("_"))


def _look(hosts: Hosts) -> LaunchedJob:
    """Workspaces are hosts' own: what ails one is not what ails all."""
    number = next(_numbers)
    root = Path(TEMPORARY, f"run-{number}")
    names = [hosts.addresses[at] for at in RANKS]
    return over_ssh(
        hosts,
        f"look/{number}",
        root,
        nodes=4,
        only_looks=True,
        settings={"hosts": names, "min_nodes": 3},
    )


def _is_named(hosts: Hosts, at: int, said: str, words: str) -> None:
    left_out = [line for line in said.splitlines() if " is left out: " in line]
    assert [line.partition(" ")[0] for line in left_out] == [hosts.addresses[at]], said
    assert words in left_out[0]
    assert "ranks go to 3 host(s) in place of 4" in said


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_host_and_the_others_are_used(hosts: Hosts, name: str) -> None:
    if name == "firewall" and shutil.which("iptables") is None:
        pytest.skip("no iptables: apt-get install iptables")
    at = RANKS[FAULTS.index(name) % len(RANKS)]
    with getattr(Fault(hosts, at), name)() as words:
        look = _look(hosts)
        assert look.ended() == ["", "", 3], look.said()
    _is_named(hosts, at, look.said(), words)


def test_a_clock_that_is_off_is_named(hosts: Hosts, wrong_clock: Path) -> None:
    with Fault(hosts, 2).clock(wrong_clock) as words:
        look = _look(hosts)
        assert look.ended() == ["", "", 3], look.said()
    _is_named(hosts, 2, look.said(), words)


def test_a_healthy_start_raises_no_alarm(hosts: Hosts) -> None:
    look = _look(hosts)
    assert look.ended() == ["", "", 4], look.said()
    assert "left out" not in look.said()


@pytest.mark.skipif(not MANY, reason="takes long: TESTS_FAULTS=100")
def test_many_faults_and_healthy_starts(hosts: Hosts, wrong_clock: Path) -> None:
    """The same faults, and the clock, in any of the hosts and any order."""
    chosen = random.Random(14)
    for number in range(MANY):
        at, name = chosen.choice(RANKS), chosen.choice([*FAULTS, "clock"])
        fault = Fault(hosts, at)
        planted = fault.clock(wrong_clock) if name == "clock" else getattr(fault, name)()
        with planted as words:
            look = _look(hosts)
            assert look.ended() == ["", "", 3], look.said()
        _is_named(hosts, at, look.said(), words)
        print(f"fault {number + 1}: {name} of {hosts.addresses[at]}: named")
    for number in range(MANY // 5):
        began = time.monotonic()
        test_a_healthy_start_raises_no_alarm(hosts)
        print(f"healthy start {number + 1}: no alarm, {time.monotonic() - began:.1f} s")
