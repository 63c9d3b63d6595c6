"""Hosts that a person names."""

from __future__ import annotations

import pytest

from ddl_airflow.core.hosts import Host, parse_host, parse_hostfile


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu1", Host("gpu1")),
        (" gpu1:4 ", Host("gpu1", 4)),
        ("10.0.0.1:64", Host("10.0.0.1", 64)),
        ("a_b.example.com", Host("a_b.example.com")),
    ],
)
def test_a_host_has_a_name_and_perhaps_slots(text: str, host: Host) -> None:
    assert parse_host(text) == host
    assert str(host) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "-oProxyCommand=x", "a b", "user@a", "a:0", "a:-1", "a:b", "a:12345", "a;b", "a.", "é"],
)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\. (Write|Leave)"):
        parse_host(text)


@pytest.mark.parametrize("text", ["user@a", "user@a:4", "fe80::1", "[fe80::2]:4", "a:22:4"])
def test_what_belongs_into_sshs_configuration_is_sent_there(text: str) -> None:
    with pytest.raises(ValueError, match="users, ports and IPv6 addresses belong in ssh's"):
        parse_host(text)


def test_a_hostfile_is_read_as_open_mpi_reads_it() -> None:
    text = "# of the lab\n\ngpu1 slots=4\n  gpu2   slots = 2  # half of it\ngpu3\ngpu4:8\n"
    text += "gpu5\tslots=1\n"
    hosts = (
        Host("gpu1", 4),
        Host("gpu2", 2),
        Host("gpu3"),
        Host("gpu4", 8),
        Host("gpu5", 1),
    )
    assert parse_hostfile(text, "hosts") == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\nb max_slots=4\n", "hosts, line 2 is not understood. Write name, or name slots=N"),
        ("a slots=0\n", "hosts, line 1 is not understood"),
        ("-----BEGIN\n", "hosts, line 1 is not understood"),
        ("a\n\na slots=2\n", "hosts, line 3 names a host for the second time"),
        ("# none\n", "hosts names no host"),
    ],
)
def test_what_is_wrong_in_a_hostfile_is_said_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_hostfile(text, "hosts")
    assert said in str(caught.value)


@pytest.mark.parametrize("line", ["s3cr3t:key", "s3cr3t of=all", "s3cr3t\ns3cr3t", "s3cr3t:0"])
def test_what_a_file_says_that_is_no_hostfile_is_not_shown(line: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_hostfile(line, "hosts")
    assert "s3cr3t" not in str(caught.value)
