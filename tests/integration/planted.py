"""Secrets that the running Airflow has, each found nowhere else: what is looked for afterwards."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

_WHERE = (
    # As the name of a variable may have it, ranks inherit others of that beginning.
    "environment",
    "registry",
    # Of connections: a store's, which takes it not; a script's parameter; and a mail server's.
    "connection",
    "parameter",
    "notification",
    # Of Airflow, as its variables are; here one that the environment has.
    "airflow_variable",
    # Which a manifest takes by ${NAME}: as a key, and as an address that nobody answers at.
    "variable",
    "address",
    # Written into a manifest: as a comment, and in one that is refused.
    "comment",
    "refused",
)
PLANTED = {where: f"planted{where}{secrets.token_hex(6)}" for where in _WHERE}


def environment(endpoint_url: str, mail_port: int) -> dict[str, str]:
    """What plants them, as variables of Airflow's processes."""
    store = {"conn_type": "aws", "login": "nobody", "password": PLANTED["connection"]}
    mail = {
        "conn_type": "smtp",
        "host": "127.0.0.1",
        "port": mail_port,
        "login": "nobody",
        "password": PLANTED["notification"],
        "extra": {"from_email": "a@example.com", "disable_ssl": True, "disable_tls": True},
    }
    return {
        "COMPANY_LICENCE": PLANTED["environment"],
        "NVIDIA_API_KEY": PLANTED["registry"],
        "TF_TOKEN_registry_example_com": PLANTED["registry"],
        "LC_PLANTED": PLANTED["registry"],
        "AIRFLOW_CONN_PLANTED_STORE": json.dumps(
            store | {"extra": {"endpoint_url": endpoint_url, "region_name": "us-east-1"}}
        ),
        "AIRFLOW_CONN_PLANTED_HUB": json.dumps(
            {"conn_type": "http", "password": PLANTED["parameter"]}
        ),
        "AIRFLOW_CONN_PLANTED_MAIL": json.dumps(mail),
        "AIRFLOW_VAR_PLANTED": PLANTED["airflow_variable"],
        "DDL_PLANTED": PLANTED["variable"],
        "DDL_PLANTED_URL": f"http://127.0.0.1:9/{PLANTED['address']}",
    }


class Search:
    """Looks for secrets, and keeps where it did.

    Args:
        sought: by what they are called.

    Attributes:
        searched: place to how many things, and how many bytes.
        found: place and name of each that was there.
    """

    def __init__(self, sought: dict[str, str]) -> None:
        self._sought = {name: text.encode() for name, text in sought.items()}
        self.searched: dict[str, tuple[int, int]] = {}
        self.found: set[tuple[str, str]] = set()

    def look(self, place: str, content: bytes | str, label: str = "") -> set[str]:
        """Returns the names of what is there, after noting it."""
        content = content.encode() if isinstance(content, str) else content
        count, size = self.searched.get(place, (0, 0))
        self.searched[place] = (count + 1, size + len(content))
        names = {name for name, text in self._sought.items() if text in content}
        self.found |= {(f"{place} {label}".strip(), name) for name in names}
        return names

    def look_in(self, place: str, folder: Path, but: Sequence[Path] = ()) -> None:
        """All regular files below a folder, and their names."""
        for path in _files(folder):
            if not any(path.is_relative_to(one) for one in but):
                self.look(place, str(path).encode() + path.read_bytes(), str(path))

    def report(self) -> str:
        """What was searched, a line for each place."""
        lines = [
            f"{place:24} {count:7,} things {size:13,} bytes"
            for place, (count, size) in self.searched.items()
        ]
        total = sum(size for _, size in self.searched.values())
        return "\n".join([*lines, f"{'in all':24} {'':7}        {total:13,} bytes"])


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            yield path
