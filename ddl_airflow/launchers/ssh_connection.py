"""How hosts are reached by what an Airflow connection of type ``ssh`` says, for the time of a job.

ssh reads keys from files. They are in a folder of this process alone, in memory where there is
some, of which nothing is left when the job has ended, or the process has, however it does. The
fields are those of Airflow's ssh provider, which need not be installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ddl_airflow.core.connections import AirflowConnection
from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.launchers import session_directory

CONN_TYPE = "ssh"
_USER = re.compile(r"[\w.@+\\-]+")
_PATH = re.compile(r"/[^\s\"'\\%]+")
_KEY_LINE = re.compile(r"\S+ [a-z0-9@.-]+ AAAA[A-Za-z0-9+/=]+( .*)?", re.ASCII)
_FILES = ("key", "known_hosts", "config")
# Of the provider's extras those that would have to be done otherwise than it does, or not at all.
_REFUSED = {
    "no_host_key_check": "keys of hosts are checked. Take it out, and enter host_key, or have "
    "the hosts in known_hosts",
    "allow_host_key_change": "keys of hosts are checked. Take it out",
    "private_key_passphrase": "nobody is there to type it. Take it off, by ssh-keygen -p, and "
    "enter the key anew",
    "host_proxy_cmd": "a command is none of a connection's here. Write it into ssh's "
    "configuration, and name that as launcher.ssh_config in place of the connection",
}


class ConnectedSsh:
    """The files of one connection, while somebody holds them.

    Args:
        connection: of type ``ssh``.

    Raises:
        ConnectionInvalid: hosts could not be reached by it. Says which field, and what to enter.
    """

    def __init__(self, connection: AirflowConnection) -> None:
        self._texts = _files_of(connection)
        self._folder: Path | None = None
        self._held = 0

    @property
    def config(self) -> Path:
        """ssh's configuration; there while it is held."""
        assert self._folder is not None
        return self._folder / "config"

    def hold(self) -> None:
        """Has the files be there until as many ``release`` as ``hold`` were called."""
        if self._folder is None:
            self._folder = session_directory.create(session_directory.usual_base())
        self._held += 1
        if self._held > 1:
            return
        for name in _FILES:
            if name in self._texts:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                text = self._texts[name].replace("{folder}", str(self._folder))
                with open(
                    os.open(self._folder / name, flags, 0o600), "w", encoding="utf-8"
                ) as file:
                    file.write(text)

    def release(self) -> None:
        """As many calls as of ``hold`` remove them."""
        self._held -= 1
        if self._held == 0 and self._folder is not None:
            for name in _FILES:
                (self._folder / name).unlink(missing_ok=True)


def hosts_of(connection: AirflowConnection) -> list[str]:
    """The hosts that it names, with commas between them."""
    return [one.strip() for one in connection.host.split(",") if one.strip()]


def _files_of(connection: AirflowConnection) -> dict[str, str]:
    name = f"connection {connection.conn_id!r}"
    if connection.conn_type not in (CONN_TYPE, "sftp"):
        raise ConnectionInvalid(
            f"{name} is of type {connection.conn_type!r}, and launcher.connection wants one of "
            f"type {CONN_TYPE}."
        )
    for extra, fix in _REFUSED.items():
        is_text = extra in ("host_proxy_cmd", "private_key_passphrase")
        if connection.text(extra) if is_text else connection.is_set(extra):
            raise ConnectionInvalid(f"{name} has {extra}, and {fix}.")
    key, key_file = _private_key(connection), connection.text("key_file")
    if connection.password and not (key or key_file):
        raise ConnectionInvalid(
            f"{name} has a password, and nobody is there to type it. Enter a private_key, or the "
            "path of a key_file."
        )
    said = ["Host *"]
    if connection.login:
        if not _USER.fullmatch(connection.login):
            raise ConnectionInvalid(f"{name} has no login that a user could have.")
        said.append(f"  User {connection.login}")
    if connection.port:
        said.append(f"  Port {connection.port}")
    files = {}
    if key:
        files["key"] = key
        said += ["  IdentityFile {folder}/key", "  IdentitiesOnly yes"]
    elif key_file:
        if not _PATH.fullmatch(key_file) or not os.access(key_file, os.R_OK):
            raise ConnectionInvalid(f"{name}: its key_file is no file that can be read here.")
        said += [f"  IdentityFile {key_file}", "  IdentitiesOnly yes"]
    if known := _known_hosts(connection, name):
        files["known_hosts"] = known
        said += ["  UserKnownHostsFile {folder}/known_hosts", "  GlobalKnownHostsFile none"]
    return {**files, "config": "\n".join(said) + "\n"}


def _private_key(connection: AirflowConnection) -> str:
    text = connection.text("private_key").replace("\\n", "\n").replace("\r\n", "\n")
    return f"{text}\n" if text else ""


def _known_hosts(connection: AirflowConnection, name: str) -> str:
    """As ssh has them: a key alone is that of each host, as the provider has it."""
    lines = []
    for line in connection.text("host_key").replace("\\n", "\n").splitlines():
        words = line.split()
        if not words:
            continue
        if len(words) == 1:  # without its type it is of this one to the provider
            words = ["ssh-rsa", *words]
        if len(words) == 2:
            words = ["*", *words]
        if not _KEY_LINE.fullmatch(" ".join(words)):
            raise ConnectionInvalid(
                f"{name}: its host_key is none. Enter what ssh-keyscan prints, or type and key."
            )
        lines.append(" ".join(words))
    return "".join(f"{line}\n" for line in lines)
