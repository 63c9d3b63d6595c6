"""Tells the nodes of a cluster of parameter servers where the others are, and when all are done.

``ddl_airflow.launchers.tasks`` starts ``python -m ddl_ops.rendezvous`` beside a node's tasks. It
reads the ports of those, a line of JSON, and writes a line with the ports of each node's, and with
an address of each node that all nodes reach. Then it waits: for the end of its input, which says
that this node's work is done, and for all others' to be. Its exit code is 0 then.

MPI finds the others, whatever has started them, and ends with them; TensorFlow's servers themselves
talk by addresses and ports alone. mpi4py only: TensorFlow would take longer to start than this.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

_SIOCGIFADDR = 0x8915  # netdevice(7)
_LOOK_S = 0.1
_CONNECT_S = 3.0
_MOST_AT_ONCE = 64
_TOKEN_BYTES = 16
# Which interfaces or networks ranks may use; of launcher.network, or the site's own.
_NETWORK = "OMPI_MCA_btl_tcp_if_include"


def own_addresses(network: str = "") -> list[str]:
    """This host's addresses of IP version 4, that of the loopback last.

    Args:
        network: interfaces or networks, with commas; empty: all.
    """
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no such address
            address = socket.inet_ntoa(answer[20:24])
            if not network or any(_matches(name, address, one) for one in network.split(",")):
                found.append(address)
    return sorted(found, key=lambda address: ipaddress.ip_address(address).is_loopback)


def _matches(name: str, address: str, wanted: str) -> bool:
    if "/" not in wanted:
        return name == wanted
    return ipaddress.ip_address(address) in ipaddress.ip_network(wanted, strict=False)


def reached(address: str, port: int, token: bytes) -> bool:
    """Whether the one with that token answers there. Another host may have the same address."""
    try:
        with socket.create_connection((address, port), _CONNECT_S) as peer:
            return peer.recv(_TOKEN_BYTES, socket.MSG_WAITALL) == token
    except OSError:
        return False


def addresses_of_all(comm: Any) -> list[str]:
    """For each node the first of its addresses at which all of them reach it.

    Raises:
        RuntimeError: there is none. Says of which node, and who does not reach it.
    """
    own = own_addresses(os.environ.get(_NETWORK, ""))
    token = secrets.token_bytes(_TOKEN_BYTES)
    with socket.create_server(("", 0), backlog=1024) as listening:
        threading.Thread(target=_answer, args=(listening, token), daemon=True).start()
        about = (socket.gethostname(), own, listening.getsockname()[1], token)
        nodes = comm.allgather(about)
        asked = [(at, node) for node in nodes for at in node[1]]
        with ThreadPoolExecutor(min(_MOST_AT_ONCE, len(asked) or 1)) as pool:
            answers = pool.map(lambda one: reached(one[0], one[1][2], one[1][3]), asked)
            seen = {(at, node[3]) for (at, node), yes in zip(asked, answers, strict=True) if yes}
        everyone = comm.allgather(seen)
        listening.shutdown(socket.SHUT_RDWR)  # ends the thread
    return [_reached_by_all(node, nodes, everyone) for node in nodes]


def _reached_by_all(
    node: tuple[str, list[str], int, bytes],
    nodes: Sequence[tuple[str, list[str], int, bytes]],
    everyone: Sequence[set[tuple[str, bytes]]],
) -> str:
    name, addresses, _, token = node
    for address in addresses:
        if all((address, token) in seen for seen in everyone):
            return address
    without = [
        other[0]
        for other, seen in zip(nodes, everyone, strict=True)
        if not any((address, token) in seen for address in addresses)
    ]
    raise RuntimeError(
        f"{name} has no address at which all nodes reach it. It has "
        f"{', '.join(addresses) or 'none'}, and {', '.join(without) or 'no two nodes'} "
        "reach it there at none. Look at firewalls, and at launcher.network."
    )


def _answer(listening: socket.socket, token: bytes) -> None:
    while True:
        try:
            peer, _ = listening.accept()
        except OSError:
            return  # all have been asked
        with peer, suppress(OSError):
            peer.sendall(token)


def main() -> int:
    """Returns 0 when the work of all nodes is done."""
    ports = json.loads(sys.stdin.readline())
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    try:
        hosts = addresses_of_all(comm)
        print(json.dumps({"hosts": hosts, "ports": comm.allgather(ports)}), flush=True)
        sys.stdin.read()
        done = comm.Ibarrier()
        while not done.Test():
            time.sleep(_LOOK_S)
    except BaseException:
        traceback.print_exc()
        comm.Abort(1)  # else the others would wait
    return 0


if __name__ == "__main__":
    sys.exit(main())
