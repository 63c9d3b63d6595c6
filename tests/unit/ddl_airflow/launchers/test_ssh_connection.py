"""What becomes of an Airflow connection of type ssh: files that ssh itself reads."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ddl_airflow.core.connections import AirflowConnection, connection_of_environment
from ddl_airflow.core.errors import ConnectionInvalid
from ddl_airflow.launchers.ssh_connection import ConnectedSsh, hosts_of
from tests.limits import until

HOST_KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIF7ZQ2uV0x0mzpJ9zS2t1cT6d6m8m0c2yq3f0X7m1i5B"


def key(folder: Path) -> str:
    path = folder / "key"
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(words, check=True)
    return path.read_text()


def connection(**fields) -> AirflowConnection:
    return AirflowConnection("gpu", **({"conn_type": "ssh"} | fields))


def settings(config: Path, host: str = "gpu1") -> dict[str, str]:
    """What ssh makes of it."""
    words = ["ssh", "-G", "-F", str(config), host]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ", 1) for line in said.splitlines())


def test_ssh_finds_user_port_key_and_the_keys_of_hosts(tmp_path):
    text = key(tmp_path)
    extra = {"private_key": text, "host_key": f"ssh-ed25519 {HOST_KEY}"}
    one = ConnectedSsh(connection(login="trainer", port=2022, extra=extra))
    one.hold()
    said = settings(one.config)
    assert (said["user"], said["port"], said["identitiesonly"]) == ("trainer", "2022", "yes")
    file = Path(said["identityfile"])
    assert file.read_text() == text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert Path(said["userknownhostsfile"]).read_text() == f"* ssh-ed25519 {HOST_KEY}\n"
    one.release()


def test_its_files_are_there_while_somebody_holds_them(tmp_path):
    one = ConnectedSsh(connection(extra={"private_key": key(tmp_path)}))
    one.hold()
    one.hold()
    one.release()
    assert one.config.exists()
    folder = one.config.parent
    one.release()
    assert list(folder.iterdir()) == []
    one.hold()  # a second try of the same task
    assert one.config.exists()
    one.release()


def test_nothing_is_left_of_them_when_the_process_is_killed(tmp_path):
    code = (
        "import os, signal, sys; from ddl_airflow.core.connections import own_connection;"
        "from ddl_airflow.launchers.ssh_connection import ConnectedSsh;"
        "one = ConnectedSsh(own_connection('gpu')); one.hold(); print(one.config, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    told = json.dumps({"conn_type": "ssh", "extra": {"private_key": key(tmp_path)}})
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"AIRFLOW_CONN_GPU": told, "PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = Path(done.stdout.strip()).parent
    assert folder.is_absolute()
    until(lambda: not folder.exists(), 10)


def test_a_key_in_a_file_stays_there(tmp_path):
    key(tmp_path)
    one = ConnectedSsh(connection(extra={"key_file": str(tmp_path / "key")}))
    one.hold()
    assert settings(one.config)["identityfile"] == str(tmp_path / "key")
    assert [path.name for path in one.config.parent.iterdir()] == ["config"]
    one.release()


def test_host_keys_are_those_of_each_host_or_of_all():
    lines = f"gpu1 ssh-ed25519 {HOST_KEY}\\ngpu2,gpu3 ssh-ed25519 {HOST_KEY} a remark"
    one = ConnectedSsh(connection(extra={"host_key": lines}))
    one.hold()
    known = (one.config.parent / "known_hosts").read_text()
    assert known == lines.replace("\\n", "\n") + "\n"
    one.release()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"conn_type": "aws"}, "is of type 'aws', and launcher.connection wants"),
        ({"password": "p4ss"}, "has a password, and nobody is there to type it"),
        ({"extra": {"no_host_key_check": "true"}}, "has no_host_key_check, and keys of hosts are"),
        ({"extra": {"allow_host_key_change": True}}, "has allow_host_key_change, and"),
        ({"extra": {"host_proxy_cmd": "nc p4ss"}}, "has host_proxy_cmd, and"),
        ({"extra": {"key_file": "/no/where"}}, "its key_file is no file"),
        ({"extra": {"host_key": "one two three; four"}}, "its host_key is none"),
        ({"login": "a\n  ProxyCommand p4ss"}, "no login that a user could have"),
        ({"extra": {"private_key_passphrase": "p4ss"}}, "has private_key_passphrase, and nobody"),
    ],
)
def test_what_cannot_be_used_says_which_field_and_shows_no_secret(fields, words):
    with pytest.raises(ConnectionInvalid) as caught:
        ConnectedSsh(connection(**fields))
    assert words in str(caught.value) and "p4ss" not in str(caught.value)


def test_the_provider_default_of_no_host_key_check_is_not_ours():
    ConnectedSsh(connection(extra={"no_host_key_check": "false"}))


def test_hosts_of_a_connection():
    told = {"AIRFLOW_CONN_GPU": json.dumps({"conn_type": "ssh", "host": "gpu1:4, gpu2:4"})}
    assert hosts_of(connection_of_environment("gpu", told)) == ["gpu1:4", "gpu2:4"]
