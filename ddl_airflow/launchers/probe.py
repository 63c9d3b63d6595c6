"""What a host is like, asked before ranks start there: ``ssh HOST PYTHON -SE - ARGUMENT``.

The program travels through standard input, so the host needs a Python and nothing else. Standard
library only, and none of this package. In a job ``ddl_ops.nodes`` calls it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from typing import Any

_SIOCGIFADDR, _SIOCGIFMTU = 0x8915, 0x8921  # netdevice(7)
# Of distributions that are there, as the ranks' Python finds them.
_VERSIONS = """\
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        if said := version(name):
            found[name] = said
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


# Of what a container may take: its limit, what it has taken, and what of that can be given back.
_OF_CONTAINER = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def _memory_bytes() -> int:
    """What is free; of a container's own, where that is less."""
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = dict(line.split(":") for line in file)
    free = int(sizes["MemAvailable"].split()[0]) * 1024
    for limit, taken, cache in _OF_CONTAINER:
        try:
            most, used = (int(_of_cgroup(name)) for name in (limit, taken))
            stat = dict(
                line.split(" ") for line in _of_cgroup(_beside(limit, "memory.stat")).splitlines()
            )
        except (OSError, ValueError):  # other cgroups, or no limit
            continue
        free = min(free, most - used + int(stat.get(cache, 0)))
    return free


def _of_cgroup(name: str) -> str:
    with open(f"/sys/fs/cgroup/{name}", encoding="ascii") as file:
        return file.read().strip()


def _beside(name: str, other: str) -> str:
    return os.path.join(os.path.dirname(name), other)


def _there(path: str) -> str:
    """The path, or the folder above it that is there, in which it will be made."""
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _versions(names: list[str]) -> dict[str, str]:
    words = [sys.executable, "-c", _VERSIONS, *names]  # with site-packages, unlike this process
    said = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=30, check=True).stdout
    found: dict[str, str] = json.loads(said)
    return found


def _address() -> str:
    """Of the interface through which the question came; in a job, of that of the default route."""
    if by_ssh := os.environ.get("SSH_CONNECTION"):
        return by_ssh.split(" ")[2]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # of nobody (RFC 5737), and nothing is sent
        except OSError:
            return ""
        return str(asking.getsockname()[0])


def _mtu() -> int:
    """Of that interface, in bytes; 0 where it is not known."""
    address = _address()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, request)
            except OSError:
                continue  # it has no address of version 4
            if socket.inet_ntoa(answer[20:24]) == address:
                answer = fcntl.ioctl(asking, _SIOCGIFMTU, request)
                return int(struct.unpack_from("i", answer, 16)[0])
    return 0


def look(asked: dict[str, Any]) -> dict[str, Any]:
    """What the host says.

    Args:
        asked: ``marker``, a file of the run, or null; ``folders``, by what they are for; and
            ``packages``, whose versions count.
    """
    marker = asked["marker"]
    folders = {name: _there(path) for name, path in asked["folders"].items()}
    return {
        # Of Slurm the node's name: see ddl_ops.rank_record.
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _memory_bytes(),
        "free": {name: shutil.disk_usage(path).free for name, path in folders.items()},
        "writable": {name: os.access(path, os.W_OK | os.X_OK) for name, path in folders.items()},
        "sees_marker": bool(marker) and os.path.exists(marker),
        "versions": _versions(asked["packages"]),
        "mtu": _mtu(),
        "rsync": shutil.which("rsync") is not None,
        "shell": os.path.basename(os.environ.get("SHELL", "")),
        "time": time.time(),  # last: the asker compares it with when the answer came
    }


if __name__ == "__main__":
    print(json.dumps(look(json.loads(sys.argv[1]))))
