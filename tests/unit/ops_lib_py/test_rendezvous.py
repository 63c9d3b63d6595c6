"""Where nodes of a cluster are: which addresses a host has, and at which all others reach it."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from ddl_ops.rendezvous import addresses_of_all, own_addresses, reached


class Nodes:
    """As MPI's communicator: each of several threads gets what all have brought."""

    def __init__(self, count: int) -> None:
        self._met = threading.Barrier(count)
        self._brought: list[Any] = [None] * count

    def of(self, number: int) -> Nodes.One:
        return self.One(self, number)

    class One:
        def __init__(self, nodes: Nodes, number: int) -> None:
            self._nodes, self._number = nodes, number

        def allgather(self, what: Any) -> list[Any]:
            nodes = self._nodes
            nodes._met.wait(10)
            nodes._brought[self._number] = what
            nodes._met.wait(10)
            return list(nodes._brought)


def together(addresses: Sequence[Sequence[str]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each node, in a thread, is told; or its error."""
    nodes, told = Nodes(len(addresses)), [None] * len(addresses)
    own = threading.local()
    monkeypatch.setattr("ddl_ops.rendezvous.own_addresses", lambda _network: own.addresses)

    def run(number: int) -> None:
        own.addresses = list(addresses[number])
        try:
            told[number] = addresses_of_all(nodes.of(number))
        except RuntimeError as error:
            told[number] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(addresses))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return told


def test_the_first_address_that_all_reach_is_taken(monkeypatch) -> None:
    # Of 203.0.113.0/24 nobody ever is (RFC 5737).
    told = together([["127.0.0.1"], ["203.0.113.1", "127.0.0.2", "127.0.0.1"]], monkeypatch)
    assert told == [["127.0.0.1", "127.0.0.2"]] * 2


def test_a_node_that_nobody_reaches_is_named_to_all(monkeypatch) -> None:
    told = together([["127.0.0.1"], ["203.0.113.1"]], monkeypatch)
    name = socket.gethostname()
    for one in told:
        assert f"{name} has no address at which all nodes reach it. It has 203.0.113.1" in str(one)
        assert "Look at firewalls, and at launcher.network" in str(one)


def test_another_host_at_the_same_address_is_none_of_the_nodes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            with other.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-OpenSSH_")

        answering = threading.Thread(target=answer)
        answering.start()
        assert not reached("127.0.0.1", other.getsockname()[1], secrets.token_bytes(16))
        answering.join()


def test_a_network_is_named_by_interface_or_by_its_numbers() -> None:
    assert own_addresses()[-1] == "127.0.0.1"
    assert own_addresses("lo") == ["127.0.0.1"]
    assert own_addresses("none0,127.0.0.0/8") == ["127.0.0.1"]
    assert own_addresses("203.0.113.0/24") == []
