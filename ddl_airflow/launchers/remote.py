"""Hosts reached by ssh: commands on them, and files to them and back.

Host keys are checked, nothing is asked, no agent and no port is passed on, and a link that is cut
ends what uses it within seconds. What is written there for people at a terminal (a terminal, a
command of their own, a connection that outlives the task) is left out. The rest is as ssh's
configuration says: users, ports, keys.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ddl_airflow.launchers.tether import tethered

_MOST_AT_ONCE = 32
_CONNECT_S = 5
_ALIVE_S = 2
_ALIVE_COUNT = 2
_SSH_FAILED = 255
# Of rsync(1): an exit code, what it says of a folder that is not there, seconds without a byte, and
# what it copies.
_VANISHED = 24
_NO_FOLDER = re.compile(r"change_dir .* failed: .*\(2\)")
_SILENT_S = 30
# Where it has files until all are whole, in each folder.
_PARTIAL_FOLDER = ".~tmp~"
# For logs and records. Data and results may be of any size: of those silence alone is a failure.
_MOST_S = 3600.0
_KINDS = ("--recursive", "--times")
_OPTIONS = {
    "BatchMode": "yes",
    "ClearAllForwardings": "yes",
    "ConnectTimeout": str(_CONNECT_S),
    "ControlMaster": "no",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "RequestTTY": "no",
    "ServerAliveCountMax": str(_ALIVE_COUNT),
    "ServerAliveInterval": str(_ALIVE_S),
    "StrictHostKeyChecking": "yes",
}
# What ssh says, and what to do. Source: ssh(1); the texts are OpenSSH's own.
_CURES = {
    r"Host key verification failed|REMOTE HOST IDENTIFICATION": "its key is not the one in "
    "known_hosts, or not in it. Compare it with the host's own, and add it: ssh-keyscan {host}",
    r"Permission denied": "it lets nobody in with the keys of this user. Add the public key to "
    "authorized_keys there, or name user and key in ssh's configuration",
    r"Could not resolve": "its name is not known here. Correct it, or DNS",
    r"Connection refused": "nobody listens on its ssh port. Start sshd there, or name the port in "
    "ssh's configuration",
    r"timed out|No route|unreachable|not responding": "it does not answer. Is it up, and its "
    "network?",
}
T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """How a command on a host ended.

    Attributes:
        code: its exit code; None where ssh itself failed, or it took too long.
        text: its standard output.
        why: what was wrong, in words, where it failed; for a person.
    """

    code: int | None
    text: str = ""
    why: str = ""


class Ssh:
    """How hosts are reached.

    Args:
        config: path of ssh's configuration; empty for that of this user.
        more: further options of ssh, without spaces.
    """

    def __init__(self, config: str = "", more: Sequence[str] = ()) -> None:
        self._config = [*(["-F", config] if config else []), *more]

    @property
    def options(self) -> list[str]:
        """Of ssh, before the host's name. None has a space in it."""
        return [*self._config, *(f"-o{name}={value}" for name, value in _OPTIONS.items())]

    def run(
        self, host: str, command: Sequence[str], *, text: str = "", timeout_s: float = 30.0
    ) -> Said:
        """Runs a command there, and waits for its end.

        Args:
            host: its name.
            command: words; the shell there is given them quoted.
            text: for its standard input.
            timeout_s: after which it is given up.
        """
        argv = ["ssh", *self.options, "--", host, shlex.join(command)]
        try:
            ended = _ended(argv, text, timeout_s)
        except FileNotFoundError:
            return Said(None, why="ssh is not installed here. apt-get install openssh-client")
        except subprocess.TimeoutExpired:
            return Said(None, why=f"it does not answer within {timeout_s:.0f} s")
        if ended.returncode == _SSH_FAILED:
            return Said(None, why=_why(host, ended.stderr))
        return Said(ended.returncode, ended.stdout, _last(ended.stderr) if ended.returncode else "")

    def make_folders(self, host: str, *folders: Path) -> Said:
        """Makes folders there, and what is missing above them: closed to others, as a workspace."""
        words = ["sh", "-c", 'umask 077 && exec mkdir -p -- "$@"', "mkdir", *map(str, folders)]
        return self.run(host, words)

    def has_files(self, host: str, folder: Path) -> bool:
        """Whether files are known to be in a folder there, or below it."""
        said = self.run(host, ["find", f"{folder}/", "-type", "f", "-print", "-quit"])
        return said.code == 0 and bool(said.text.strip())

    def copy_to(self, host: str, folder: Path, *, links: bool = False) -> str:
        """Makes a folder there what it is here; only what differs is sent. What it is in is there.

        Args:
            host: its name.
            folder: its path, here and there.
            links: whether symbolic links stay links; else they become what they point to.

        Returns:
            What was wrong; empty if nothing was.
        """
        kind = "--links" if links else "--copy-links"
        words = [*_KINDS, "--perms", kind, "--delete"]
        return self._rsync([*words, "--", f"{folder}/", f"{host}:{folder}/"])

    def add_to(self, host: str, files: Sequence[Path]) -> str:
        """Sends files to the paths that they have here; those that are there, and as long, stay.

        One that is shorter there came but in part: who loses power may keep a name without bytes.
        Folders that are missing there are made.

        Returns:
            What was wrong; empty if nothing was.
        """
        if not files:
            return ""
        listed = "\0".join(str(path).lstrip("/") for path in files)
        words = ["--times", "--perms", "--size-only", "--from0", "--files-from=-"]
        words.append("--no-implied-dirs")  # folders above, which may be root's, stay as they are
        return self._rsync([*words, "--", "/", f"{host}:/"], listed)

    def copy_from(
        self,
        host: str,
        folder: Path,
        *,
        only: Sequence[str] = (),
        grow: bool = False,
        incoming: Path | None = None,
        may_be_gone: bool = True,
        delete: bool = False,
    ) -> str:
        """Brings what a folder has there. No link is followed or made.

        What is there was written by ranks: only plain files and folders come.

        Args:
            host: its name.
            folder: its path, there and here.
            only: patterns of files in it; empty: all there is.
            grow: whether files here grow as those there do; else each is replaced when it is whole,
                and a reader finds the old one or the new one.
            incoming: a folder of the same file system, in which files are until they are whole; by
                default each is beside what it replaces.
            may_be_gone: whether it is well that there is no such folder.
            delete: whether what is not there is deleted here, once all has come; nothing where
                something could not be read.

        Returns:
            What was wrong; empty if nothing was.
        """
        words = [
            *_KINDS,
            "--no-links",
            "--no-devices",
            "--no-specials",
            "--chmod=Du=rwx,Fu=rw,go-w",
        ]
        if only:
            words += [*(f"--include=/{one}" for one in only), "--exclude=*"]
        else:
            words.append("--delay-updates")
        if incoming is not None:
            words.append(f"--temp-dir={incoming}")
        if grow:
            words.append("--inplace")
        if delete:
            words.append("--delete-delay")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)  # rsync makes the last one alone
        except OSError as error:
            return f"{folder.parent}: {error.strerror}"
        limit = _MOST_S if only else None
        why = self._rsync([*words, "--", f"{host}:{folder}/", f"{folder}/"], timeout_s=limit)
        return "" if may_be_gone and _NO_FOLDER.search(why) else why

    def _rsync(self, words: Sequence[str], text: str = "", timeout_s: float | None = None) -> str:
        shell = shlex.join(["ssh", *self.options])
        # -s: no shell there reads paths. Its long name, and --mkpath, are not known before 3.2.
        argv = ["rsync", "--rsh", shell, "-s", f"--timeout={_SILENT_S}", *words]
        if shutil.which("rsync") is None:
            return "rsync is not installed here. apt-get install rsync"
        try:
            # Tethered: else a large copy would go on without the task.
            ended = _ended(tethered(argv), text, timeout_s)
        except subprocess.TimeoutExpired as expired:
            return f"rsync: it was not done within {expired.timeout:.0f} s"
        if ended.returncode in (0, _VANISHED):
            return ""
        if "command not found" in ended.stderr:
            return "rsync is not installed there. apt-get install rsync"
        if "is your shell clean" in ended.stderr:
            return (
                "rsync finds words of the shell there before its own. Let ~/.bashrc and the like "
                "write nothing where the shell is not interactive"
            )
        return f"rsync: {_first(ended.stderr)}"


def drop_partial(folder: Path) -> None:
    """Removes what a copy of a whole folder that did not come to its end has left in it."""
    for left in folder.rglob(_PARTIAL_FOLDER):
        if left.is_dir() and not left.is_symlink():
            shutil.rmtree(left, ignore_errors=True)


def objects(said: str) -> list[dict[str, Any]]:
    """Each line of JSON, and nothing of what shells and programs say before and between them."""
    found = []
    for line in said.splitlines():
        try:
            one = json.loads(line)
        except ValueError:
            continue
        found += [one] if isinstance(one, dict) else []
    return found


def _ended(
    argv: Sequence[str], text: str, timeout_s: float | None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        input=text,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def _first(text: str) -> str:
    # What follows is where in rsync's source it was noticed.
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "no reason")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"


def _why(host: str, said: str) -> str:
    for pattern, cure in _CURES.items():
        if re.search(pattern, said):
            return f"{cure.format(host=host)} ({_last(said)})"
    return f"ssh failed: {_last(said)}"


def on_each(
    hosts: Sequence[str], do: Callable[[str], T], at_once: int = _MOST_AT_ONCE
) -> Mapping[str, T]:
    """What ``do`` returns for each host, many at once; in their order."""
    if not hosts:
        return {}
    with ThreadPoolExecutor(min(at_once, len(hosts)), "ddl-hosts") as pool:
        return dict(zip(hosts, pool.map(do, hosts), strict=True))
