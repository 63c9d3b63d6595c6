"""What an allreduce between hosts costs: each step a message and its bytes on the busiest link.

    seconds = messages * message_s + bytes on the link / bytes_per_s + bytes * in_host_s_per_byte

Messages and bytes follow from the steps of the ops' own algorithms (docs/ops.md), which are written
down here a second time: who sends which part of the tensor to whom.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20

# Of ops_lib/cc/algorithms/network_allreduce.cc, halving_doubling.cc, comm/hosts_communicator.cc.
_DOUBLING_BYTES = 32 * KIB
_RING_BYTES = 8 * MIB
_PIECE_BYTES = 4 * MIB
_FRAGMENT_BYTES, _FRAGMENT_BYTES_OF_HOST = MIB, 256 * KIB

# What happens at the same time: (from, to, part of the tensor).
Step = list[tuple[int, int, float]]


@dataclass(frozen=True)
class Layout:
    """Ranks on hosts, numbered host by host.

    Attributes:
        hierarchical: shared memory within a host, messages between hosts; else messages alone.
    """

    hosts: int
    slots: int
    hierarchical: bool = True

    @property
    def ranks(self) -> int:
        return self.hosts * self.slots


@dataclass(frozen=True)
class Link:
    """What joins each host to the others.

    Attributes:
        message_s: seconds that a message takes beside its bytes.
        bytes_per_s: payload that a host sends, and receives, at most.
        shared: all hosts together send no more than that, as on one machine without a limit, where
            its cores move the bytes.
    """

    message_s: float
    bytes_per_s: float
    shared: bool = False


@dataclass(frozen=True)
class Traffic:
    """What one allreduce puts on the links.

    Attributes:
        messages: that wait for each other.
        on_path: bytes on the busiest link, summed over the steps.
        sent: bytes that leave the busiest host.
        of_all: bytes that leave all hosts together.
    """

    messages: int
    on_path: float
    sent: float
    of_all: float


def _ring(ranks: int) -> Iterator[Step]:
    for _ in range(2 * (ranks - 1)):
        yield [(rank, (rank + 1) % ranks, 1 / ranks) for rank in range(ranks)]


def _by_powers_of_two(ranks: int, halving: bool) -> Iterator[Step]:
    power = 1 << (ranks.bit_length() - 1)
    extra = ranks - power
    acting = [2 * i + 1 for i in range(extra)] + [i + extra for i in range(extra, power)]
    if extra:
        yield [(2 * i, 2 * i + 1, 1.0) for i in range(extra)]
    distances = [1 << i for i in range(power.bit_length() - 1)]
    if halving:
        # Half of all to the farthest first, and back in reverse.
        there = [(at, at / power) for at in reversed(distances)]
        schedule = [*there, *reversed(there)]
    else:
        schedule = [(at, 1.0) for at in distances]
    for distance, part in schedule:
        yield [(acting[i], acting[i ^ distance], part) for i in range(power)]
    if extra:
        yield [(2 * i + 1, 2 * i, 1.0) for i in range(extra)]


def algorithm(ranks: int, nbytes: float) -> tuple[str, list[Step]]:
    """Name and steps of what the ops choose for float32 tensors among `ranks`."""
    if nbytes < _DOUBLING_BYTES:
        return "doubling", list(_by_powers_of_two(ranks, halving=False))
    if nbytes < _RING_BYTES:
        return "halving and doubling", list(_by_powers_of_two(ranks, halving=True))
    return "ring", list(_ring(ranks))


def _rounds(name: str, hosts: int, nbytes: float, fragments: bool) -> int:
    """How often the steps are gone through, a part of the tensor each time."""
    piece = _PIECE_BYTES if name != "ring" else math.inf
    if fragments:
        piece = min(piece, max(_FRAGMENT_BYTES, _FRAGMENT_BYTES_OF_HOST * hosts))
    return max(1, math.ceil(nbytes / piece))


def traffic(layout: Layout, nbytes: float) -> Traffic:
    """What an allreduce of so many bytes puts on the links between hosts."""
    if layout.hosts == 1:
        return Traffic(0, 0.0, 0.0, 0.0)
    one_each = layout.hierarchical or layout.slots == 1
    # Of the ranks of a host each reduces its share, all at once over the host's link.
    group = layout.hosts if one_each else layout.ranks
    slots = 1 if one_each else layout.slots
    share = nbytes / layout.slots if one_each else nbytes
    name, steps = algorithm(group, share)
    messages, on_path = 0, 0.0
    leaves: dict[int, float] = defaultdict(float)
    for step in steps:
        out: dict[int, float] = defaultdict(float)
        into: dict[int, float] = defaultdict(float)
        for source, target, part in step:
            if source // slots != target // slots:
                out[source // slots] += part * nbytes
                into[target // slots] += part * nbytes
        if not out:
            continue
        messages += 1
        on_path += max(*out.values(), *into.values())
        for host, sent in out.items():
            leaves[host] += sent
    rounds = _rounds(name, layout.hosts, share, one_each and layout.slots > 1)
    return Traffic(messages * rounds, on_path, max(leaves.values()), sum(leaves.values()))


def seconds(layout: Layout, nbytes: float, link: Link, in_host_s_per_byte: float = 0.0) -> float:
    """Predicted seconds of one allreduce of so many bytes of float32."""
    found = traffic(layout, nbytes)
    # Where all share one medium, what all of them send is in each other's way.
    moved = found.of_all if link.shared else found.on_path
    within = nbytes * in_host_s_per_byte if layout.slots > 1 else 0.0
    return found.messages * link.message_s + moved / link.bytes_per_s + within


def fitted(small: tuple[float, float], large: tuple[float, float], shared: bool) -> Link:
    """A link by two measured cases between two hosts of one rank: (bytes, seconds) each."""
    layout = Layout(2, 1)
    (bytes_1, s_1), (bytes_2, s_2) = small, large
    one, two = traffic(layout, bytes_1), traffic(layout, bytes_2)
    moved_1, moved_2 = (one.of_all, two.of_all) if shared else (one.on_path, two.on_path)
    # s = messages * m + moved * b, for both.
    determinant = one.messages * moved_2 - two.messages * moved_1
    message_s = max(0.0, (s_1 * moved_2 - s_2 * moved_1) / determinant)
    per_byte = (s_2 - two.messages * message_s) / moved_2
    return Link(message_s, 1 / per_byte, shared)
