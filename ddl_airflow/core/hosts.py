"""Hosts that a person names: in a manifest, or in a hostfile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

# As ssh and mpirun take them. No user and no port: those belong in ssh's configuration.
_HOST = re.compile(r"([A-Za-z0-9_]([A-Za-z0-9_.-]{0,252}[A-Za-z0-9_])?)(?::([0-9]{1,4}))?")
# ``name slots=4`` of Open MPI, ``name:4`` of others.
_SLOTS = re.compile(r"slots\s*=\s*([0-9]{1,4})")


@dataclass(frozen=True)
class Host:
    """A host, by a name or address that ssh knows.

    Attributes:
        slots: ranks that it takes; None: as many as are asked for.
    """

    name: str
    slots: int | None = None

    def __str__(self) -> str:
        return self.name if self.slots is None else f"{self.name}:{self.slots}"


def parse_host(text: str) -> Host:
    """``name`` or ``name:slots``.

    Raises:
        ValueError: it is neither; says what is wrong.
    """
    found = _HOST.fullmatch(text.strip())
    if found is None:
        more = "@" in text or text.count(":") > 1
        where = "; users, ports and IPv6 addresses belong in ssh's configuration" if more else ""
        wrong = f"{text[:60]!r} is no host"
        raise ValueError(f"{wrong}. Write name or name:slots, for example gpu1:4{where}")
    if found[3] is not None and int(found[3]) == 0:
        raise ValueError(f"{text[:60]!r} has no slots. Leave the host out")
    return Host(found[1], int(found[3]) if found[3] else None)


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """The hosts of a hostfile as Open MPI has them: a line each, ``name``, ``name slots=N``.

    Args:
        text: its content. What follows ``#`` is a remark.
        name: of the file, for messages.

    Raises:
        ValueError: a line is no host, a host is there twice, or there is none.
    """
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split(None, 1)
        if not words:
            continue
        # What the line says is not shown: the file may be another one, with secrets in it.
        try:
            slots = _SLOTS.fullmatch(words[1].strip()) if len(words) == 2 else None
            if len(words) == 2 and slots is None:
                raise ValueError
            host = parse_host(f"{words[0]}:{slots[1]}" if slots else words[0])
        except ValueError:
            raise ValueError(
                f"{name}, line {number} is not understood. Write name, or name slots=N with N from "
                "1 on"
            ) from None
        if host.name in hosts:
            raise ValueError(f"{name}, line {number} names a host for the second time")
        hosts[host.name] = host
    if not hosts:
        raise ValueError(f"{name} names no host")
    return tuple(hosts.values())


def named_twice(hosts: Sequence[Host]) -> str:
    """The first name that comes again; empty if none does."""
    names = [host.name for host in hosts]
    return next((name for name in names if names.count(name) > 1), "")
