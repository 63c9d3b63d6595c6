"""launcher: {kind: ssh}: ranks on hosts that are named, started over ssh."""

from __future__ import annotations

import re

from pydantic import Field

from ddl_airflow.core.hosts import named_twice, parse_host
from ddl_airflow.core.manifest.rule import Finding, Findings
from ddl_airflow.core.manifest.sections.launcher import Launcher, Preflight
from ddl_airflow.core.manifest.values import Text, Whole

_INTERFACES = re.compile(r"[A-Za-z0-9_.:/-]+(,[A-Za-z0-9_.:/-]+)*")


class Ssh(Launcher):
    """How the ranks start: on named hosts, over ssh."""

    kind_name = "ssh"
    runs_on = "hosts that are reached by ssh"
    implementation = "ddl_airflow.launchers.ssh:SshLauncher"
    can_run_parameter_servers = True
    can_stream = True
    connection_types = ("ssh", "sftp")

    hosts: tuple[Text, ...] | None = Field(
        default=None,
        min_length=1,
        description="The hosts, each name or name:slots; the first ones that are well are used.",
        examples=[["gpu1:4", "gpu2:4"]],
    )
    hostfile: Text | None = Field(
        default=None,
        description="In place of hosts: a file on the Airflow worker, a host a line, "
        "`name slots=4`.",
        examples=["/etc/ddl/hostfile"],
    )
    connection: Text | None = Field(
        default=None,
        description="Airflow connection of type ssh: user, port, private key and keys of hosts; "
        "and the hosts, with commas, if they are not named here.",
        examples=["gpu_hosts"],
    )
    min_nodes: Whole | None = Field(
        default=None,
        ge=1,
        description="Train with fewer nodes, though not fewer than these, where hosts are not "
        "well; by default all nodes are needed.",
        examples=[2],
    )
    network: Text | None = Field(
        default=None,
        description="Interfaces or networks that the ranks use between hosts; by default all.",
        examples=["10.1.0.0/16"],
    )
    ssh_config: Text | None = Field(
        default=None,
        description="ssh's configuration on the Airflow worker, with users, ports and keys; by "
        "default its user's own.",
        examples=["/etc/ddl/ssh_config"],
    )

    preflight: Preflight = None

    def findings(self, at: str) -> Findings:
        """Yields what names no hosts, or could not be told to ssh and mpirun."""
        named = (self.hosts is not None) + (self.hostfile is not None)
        if named > 1 or not (named or self.connection):
            wrong = "has hosts and a hostfile" if named else "names no hosts"
            fix = (
                "Write hosts: [name:slots, …], or the path of a file as hostfile, or an Airflow "
                "connection that has them."
            )
            yield Finding(at, wrong, fix)
        if self.connection is not None and self.ssh_config is not None:
            fix = "Keep one of them."
            yield Finding(f"{at}.ssh_config", "is given beside a connection", fix)
        hosts = []
        for i, text in enumerate(self.hosts or ()):
            try:
                hosts.append(parse_host(text))
            except ValueError as error:
                wrong, _, fix = str(error).partition(". ")
                yield Finding(f"{at}.hosts[{i}]", wrong, f"{fix}.")
        if twice := named_twice(hosts):
            yield Finding(f"{at}.hosts", f"names {twice} twice", "Give it all its slots at once.")
        for name in ("hostfile", "ssh_config"):
            path = getattr(self, name)
            # Open MPI splits what it passes on to ssh at spaces.
            if path is not None and not re.fullmatch(r"/[^\s\"'\\]+", path):
                fix = "Write a path from / on, without spaces and quotes."
                yield Finding(f"{at}.{name}", f"{path[:60]!r} is no such path", fix)
        if self.network is not None and not _INTERFACES.fullmatch(self.network):
            fix = "Write for example eth0, or 10.1.0.0/16; several with commas."
            yield Finding(f"{at}.network", f"{self.network[:60]!r} names no interfaces", fix)

    def findings_of_nodes(self, at: str, nodes: int) -> Findings:
        """Yields that there are fewer hosts, or that more are needed than are asked for."""
        if self.hosts is not None and nodes > len(self.hosts):
            fix = "Name more, or lower it."
            yield Finding(at, f"is {nodes}, and launcher.hosts names {len(self.hosts)}", fix)
        if self.min_nodes is not None and self.min_nodes > nodes:
            fix = "Lower that, or raise this."
            yield Finding(at, f"is {nodes}, and launcher.min_nodes {self.min_nodes}", fix)


KIND = Ssh
