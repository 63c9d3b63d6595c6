from __future__ import annotations

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
