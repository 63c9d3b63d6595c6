"""What runs in the pods of a job on Kubernetes; see ``ddl_airflow.launchers.kubernetes.objects``.

``pod.py worker`` is the first process of a worker's pod. It runs sshd, passes SIGTERM on to the
ranks in its pod, and ends when the launcher lets it go or does not answer any more: a pod without
its job would hold GPUs. ``pod.py session`` is what sshd runs for each connection: the command, with
the container's own environment, of which sshd passes on nothing. ``pod.py launcher -- WORD ...``
waits until each worker answers, runs the words (mpirun), and lets the workers go.

The job's ConfigMap brings this file, so it fits the launcher whatever image there is. Standard
library only. Why a pod ended is in its termination message, ``{"said": sentence, "pod": name}``.
"""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

GIVEN = Path("/etc/ddl")
# sshd and ssh take keys only from files of their own user that nobody else can read.
PRIVATE = Path("/tmp/ddl")  # noqa: S108
# Of this program; mpirun's own codes are passed on. Source: sysexits.h.
UNUSABLE, FULL, LOST = 69, 73, 75
# As on one host where ranks have a user of their own. sshd sets another.
_UMASK = 0o007
_SSHD_PATH = "/usr/sbin:/sbin:/usr/local/sbin"
_SHIM = b"ddl_ops.rank"
_POLL_S = 0.1
_RETRY_S = 0.5
# In which mpirun sees by itself that a host is gone; and in which workers end.
_NOTICES_S = 5.0
_ENDS_S = 12.0
_SAY_EVERY_S = 30.0
# Of ssh, where nobody answers what a name means, by glibc and by musl: another thing than a name
# that is not known, as that of a pod that waits for room.
_NO_DNS = ("Temporary failure in name resolution", "Try again")
# For a worker that has an address, to be reached there.
_REACHED_S = 600.0
# ssh connections that are being made at the same time.
_AT_ONCE = 64


def end(code: int, said: str, pod: str = "") -> NoReturn:
    """Ends this process, and says why to who asks Kubernetes."""
    print(f"ddl: {said}", file=sys.stderr, flush=True)
    with suppress(OSError):
        Path("/dev/termination-log").write_text(json.dumps({"said": said, "pod": pod}), "utf-8")
    sys.stdout.flush()
    os._exit(code)


def shims() -> list[int]:
    """The process numbers of the ranks in this pod."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if words[1:3] == [b"-m", _SHIM]:
                    found.append(int(folder.name))
    return found


def end_ranks() -> None:
    """SIGTERM to each rank of this pod: it says so to its script, which may save."""
    for pid in shims():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)


def take_private(*names: str) -> None:
    """Copies keys to where ssh takes them from."""
    PRIVATE.mkdir(0o700, exist_ok=True)
    for name in names:
        write_private(name, (GIVEN / name).read_bytes())


def write_private(name: str, said: bytes) -> None:
    """A file there that no other user reads or writes."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(os.open(PRIVATE / name, flags, 0o600), "wb") as file:
        file.write(said)


def need_workspace(record_dir: str) -> None:
    """Ends this process if this pod cannot write where it should."""
    try:
        probe = Path(record_dir) / f".probe-{os.uname().nodename}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        wrong = f"in pod {os.uname().nodename} {record_dir} cannot be written: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            end(FULL, f"{wrong}. Free space in the workspace, or raise its quota")
        end(
            UNUSABLE,
            f"{wrong}. launcher.volumes must bring the workspace into the pods, under the path "
            f"that Airflow has it at, and user {os.getuid()} must be able to write there",
        )


class Worker:
    """The first process of a worker's pod.

    Args:
        grace_s: for the ranks, between SIGTERM and the end of the pod.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._asked = False

    def run(self) -> NoReturn:
        """Until the pod is to end."""
        take_private("ssh_host_ed25519_key")
        need_workspace(os.environ["DDL_RECORD_DIR"])
        write_private("environment.json", json.dumps(dict(os.environ)).encode())
        sshd = shutil.which("sshd", path=f"{_SSHD_PATH}:{os.environ.get('PATH', os.defpath)}")
        if sshd is None:
            end(UNUSABLE, "the image has no sshd. Use one that has, such as docker/trainer builds")
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", 0o755, exist_ok=True)
        signal.signal(signal.SIGTERM, self._on_term)
        # By its whole path: sshd has not the PATH that the image sets.
        command = f"ForceCommand={sys.executable} {Path(__file__)} session"
        words = [sshd, "-D", "-e", "-f", str(GIVEN / "sshd_config"), "-o", command]
        server = subprocess.Popen(words)
        held = 0
        while True:
            code = self._reap(server.pid)
            if code is not None:
                end(UNUSABLE, f"sshd ended with code {code}; the pod's log says why")
            if self._asked:
                self._let_ranks_end()
                end(128 + signal.SIGTERM, "was asked to end")
            if (PRIVATE / "done").exists():
                self._let_ranks_end()  # those that mpirun did not wait for
                os._exit(0)
            with suppress(FileNotFoundError, ValueError):
                held = int((PRIVATE / "held").read_text())
            if held and not Path(f"/proc/{held}").exists() and not (PRIVATE / "done").exists():
                self._let_ranks_end()
                end(LOST, "the launcher's pod does not answer any more")
            time.sleep(_POLL_S)

    def _on_term(self, _signum: int, _frame: FrameType | None) -> None:
        self._asked = True

    def _let_ranks_end(self) -> None:
        end_ranks()
        deadline = time.monotonic() + self._grace_s
        while shims() and time.monotonic() < deadline:
            self._reap(0)
            time.sleep(_POLL_S)

    def _reap(self, server: int) -> int | None:
        """Takes the ended children, also those that others left; the server's code, if it has."""
        code = None
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == server:
                    code = os.waitstatus_to_exitcode(ended[1])
        return code


def session() -> NoReturn:
    """Becomes what the other end of this connection asked for."""
    environ = json.loads((PRIVATE / "environment.json").read_text())
    command = os.environ.get("SSH_ORIGINAL_COMMAND", "")
    if command == "hold":
        hold()
    os.chdir("/")
    os.execve("/bin/sh", ["sh", "-c", command], environ)


def hold() -> NoReturn:
    """Stands for the launcher in this pod, while the connection lasts."""
    held = PRIVATE / "held.new"
    held.write_text(str(os.getpid()))
    held.rename(PRIVATE / "held")
    # The address at which the launcher has reached it.
    print("up", *os.environ.get("SSH_CONNECTION", "").split()[2:3], flush=True)
    done = False
    for line in sys.stdin:
        if line == "end\n":
            end_ranks()
        if line == "done\n":
            done = True
            print("bye", flush=True)
    # Not before the launcher has heard it: the pod's end would cut the answer off.
    if done:
        (PRIVATE / "done").touch()
        signal.pause()  # the pod's end ends this
    sys.exit(0)


class Held:
    """The launcher's connection to one worker.

    Args:
        pod: the worker's name.
    """

    def __init__(self, pod: str) -> None:
        self.pod = pod
        self.up = False
        self.heard = False
        self.address = ""
        self.said = ""
        # Since when it cannot be reached, or nobody can say what its address is. A pod that waits
        # for room has none.
        self.unreached: float | None = None
        self._ssh: subprocess.Popen[bytes] | None = None
        self._next = 0.0

    @property
    def trying(self) -> bool:
        return self._ssh is not None

    @property
    def last_words(self) -> str:
        """What ssh said last, on one line."""
        return self.said.splitlines()[-1] if self.said else ""

    @property
    def lost(self) -> bool:
        """Whether it was up and is not any more."""
        return self.up and self._ssh is not None and self._ssh.poll() is not None

    def look(self) -> None:
        """Takes the next step towards a worker that answers."""
        if self._ssh is None:
            if time.monotonic() >= self._next:
                words = ["ssh", "-F", str(GIVEN / "ssh_config"), self.pod, "hold"]
                pipe = subprocess.PIPE
                self._ssh = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe)
                assert self._ssh.stdout is not None
                os.set_blocking(self._ssh.stdout.fileno(), False)
            return
        assert self._ssh.stdout is not None and self._ssh.stderr is not None
        said = self._ssh.stdout.readline()
        word, *where = said.decode("utf-8", "replace").split() or [""]
        if word == "up":
            self.up, self.address = True, "".join(where)
        elif self._ssh.poll() is not None:
            self.said = (said or self._ssh.stderr.read()).decode("utf-8", "replace").strip()
            with suppress(OSError), self._ssh:
                pass  # its pipes are closed
            now = time.monotonic()
            self._ssh, self._next = None, now + _RETRY_S
            if "Could not resolve" in self.said and not self.said.endswith(_NO_DNS):
                self.unreached = None
            elif self.unreached is None:
                self.unreached = now

    def tell(self, word: str) -> None:
        with suppress(OSError):
            if self._ssh is not None and self._ssh.stdin is not None:
                self._ssh.stdin.write(f"{word}\n".encode())
                self._ssh.stdin.flush()

    def let_go(self) -> bool:
        """Takes the next step towards the end of the worker's pod; whether that has ended."""
        if self._ssh is None:
            return True
        assert self._ssh.stdin is not None and self._ssh.stdout is not None
        ended = self._ssh.poll() is not None
        if not self.heard and b"bye\n" in (self._ssh.stdout.read() or b""):
            self.heard = True
            with suppress(OSError):
                self._ssh.stdin.close()
        return ended


class Launcher:
    """The one process of the launcher's pod.

    Args:
        pods: the workers' names.
        grace_s: for the ranks, between SIGTERM and SIGKILL.
        log: what mpirun says goes there, too.
        patience_s: for a worker that has an address, as far as is known, and cannot be reached.
    """

    def __init__(
        self, pods: Sequence[str], grace_s: float, log: Path, patience_s: float = _REACHED_S
    ) -> None:
        self._held = [Held(pod) for pod in pods]
        self._grace_s = grace_s
        self._log = log
        self._patience_s = patience_s
        self._asked = 0.0

    def run(self, argv: Sequence[str]) -> NoReturn:
        """Until mpirun has ended, or a worker does not answer any more."""
        signal.signal(signal.SIGTERM, self._on_term)
        take_private("id_ed25519")
        need_workspace(os.environ["DDL_RECORD_DIR"])
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        with open(os.open(self._log, flags, 0o660), "ab") as log:
            unreached = self._wait_for_workers(log)
            self._keep_addresses()
            code, lost = (LOST, "") if unreached else self._mpirun(argv, log)
        # Longer than ssh takes to see that a link is cut.
        until = time.monotonic() + _ENDS_S + self._grace_s
        for one in self._held:
            one.tell("done")
        while not all([one.let_go() for one in self._held]) and time.monotonic() < until:
            time.sleep(_POLL_S)
        if unreached:
            end(LOST, unreached)
        # mpirun may not say that a host is gone: its code is then 0.
        lost = lost or next((one.pod for one in self._held if not one.heard), "")
        if lost:
            end(code or LOST, f"pod {lost} does not answer any more", lost)
        if self._asked:
            end(128 + signal.SIGTERM, "was asked to end")
        if code:
            end(code, f"mpirun ended with code {code}")
        os._exit(0)

    def _on_term(self, _signum: int, _frame: FrameType | None) -> None:
        self._asked = self._asked or time.monotonic()

    def _wait_for_workers(self, log: IO[bytes]) -> str:
        """Returns why it is waited for no longer; empty if all are up."""
        next_word = time.monotonic() + _SAY_EVERY_S
        while missing := [one for one in self._held if not one.up]:
            if self._asked:
                end(128 + signal.SIGTERM, "was asked to end")
            trying = sum(one.trying for one in missing)
            for one in missing:
                if one.trying or trying < _AT_ONCE:
                    trying += not one.trying
                    one.look()
            now = time.monotonic()
            for one in missing:
                if one.unreached is not None and now - one.unreached > self._patience_s:
                    return (
                        f"{one.pod} could not be reached for {self._patience_s:.0f} s: "
                        f"{one.last_words}. Pods of a job must reach each other, workers on port "
                        "2222, and the cluster's DNS; see that, and the namespace's NetworkPolicies"
                    )
            if now > next_word:
                next_word += _SAY_EVERY_S
                why = next((one.last_words for one in missing if one.said), "")
                word = f"ddl: waiting for {len(missing)} pods, such as {missing[0].pod}: {why}\n"
                log.write(word.encode())
                log.flush()
            time.sleep(_POLL_S)
        return ""

    def _keep_addresses(self) -> None:
        """For ssh_config: mpirun connects also while the cluster's DNS does not know a worker."""
        found = []
        for one in self._held:
            with suppress(ValueError):  # it has said none
                address = ipaddress.ip_address(one.address)
                # As of a proxy in its pod: of no use elsewhere.
                if not (address.is_loopback or address.is_link_local):
                    found.append(f"Host {one.pod}\n  HostName {one.address}\n")
        with suppress(OSError):  # then it goes by names
            write_private("addresses", "".join(found).encode())

    def _mpirun(self, argv: Sequence[str], log: IO[bytes]) -> tuple[int, str]:
        """Returns its exit code, and the worker that was lost before."""
        environ = dict(os.environ)
        beside = str(Path(sys.executable).parent)
        environ["PATH"] = os.pathsep.join([beside, environ.get("PATH", os.defpath)])
        try:
            mpirun = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        except OSError as error:
            end(UNUSABLE, f"cannot run {argv[0]}: {error.strerror}. The image must have Open MPI 5")
        lost, told, deadline = "", False, 0.0
        while mpirun.poll() is None:
            if self._asked and not told:
                for one in self._held:
                    one.tell("end")
                told, deadline = True, self._asked + self._grace_s
            gone = next((one.pod for one in self._held if one.lost), "")
            if gone and not lost:
                lost = gone
                for one in self._held:
                    one.tell("end")
                deadline = deadline or time.monotonic() + _NOTICES_S
            if deadline and time.monotonic() > deadline:
                mpirun.terminate()
                try:
                    mpirun.wait(_NOTICES_S)
                except subprocess.TimeoutExpired:
                    mpirun.kill()
            time.sleep(_POLL_S)
        lost = lost or next((one.pod for one in self._held if one.lost), "")
        return mpirun.wait() % 256, lost


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="pod.py")
    parser.add_argument("role", choices=("worker", "session", "launcher"))
    parser.add_argument("--grace", type=float, default=30.0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--prefix", default="")
    parser.add_argument("--log", type=Path, default=Path("/dev/null"))
    parser.add_argument("--patience", type=float, default=_REACHED_S)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    given = parser.parse_args(words[:cut])
    os.umask(_UMASK)
    if given.role == "session":
        session()
    if given.role == "worker":
        Worker(given.grace).run()
    pods = [f"{given.prefix}{number}" for number in range(given.workers)]
    Launcher(pods, given.grace, given.log, given.patience).run(words[cut + 1 :])


if __name__ == "__main__":
    main()
