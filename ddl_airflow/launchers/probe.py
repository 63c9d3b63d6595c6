"""What a host is like, asked before ranks start there: ``ssh HOST PYTHON -SE - ARGUMENT``.

The program travels through standard input, so the host needs a Python and nothing else. Standard
library only, and none of this package.
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


def _memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        sizes = dict(line.split(":") for line in file)
    return int(sizes["MemAvailable"].split()[0]) * 1024


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


def _mtu() -> int:
    """Of the interface through which the question came, in bytes; 0 where it is not known."""
    address = os.environ.get("SSH_CONNECTION", "   ").split(" ")[2]
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
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _memory_bytes(),
        "free": {name: shutil.disk_usage(path).free for name, path in folders.items()},
        "writable": {name: os.access(path, os.W_OK | os.X_OK) for name, path in folders.items()},
        "sees_marker": bool(marker) and os.path.exists(marker),
        "versions": _versions(asked["packages"]),
        "mtu": _mtu(),
        "rsync": shutil.which("rsync") is not None,
        "time": time.time(),  # last: the asker compares it with when the answer came
    }


if __name__ == "__main__":
    print(json.dumps(look(json.loads(sys.argv[1]))))
