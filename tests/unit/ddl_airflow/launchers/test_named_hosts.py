from __future__ import annotations

import json

from ddl_airflow.launchers.named_hosts import NamedHosts
from ddl_airflow.launchers.remote import Said


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
