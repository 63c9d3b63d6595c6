"""Starting ranks: horovod.run, and the command horovodrun (``launch``)."""

from __future__ import annotations

import hashlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: Any = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Calls a function on ranks, and returns what it returns on each.

    Args:
        func: what cloudpickle can take, as functions of the main script. Modules that it imports
            are found in the current folder, and where this process's environment says.
        args: of the function.
        kwargs: of the function.
        num_proc: number of ranks.
        min_num_proc: as horovodrun's --min-np, and the next ones as its --max-np, --slots-per-host,
            --reset-limit and --blacklist-cooldown-range. What is returned is that of the last
            start's ranks.
        max_num_proc, slots, reset_limit, cooldown_range: see above.
        hosts: as horovodrun's. They share the current folder, where the function and what it
            returns are meanwhile.
        hostfile: as horovodrun's, as are the next ones.
        host_discovery_script, ssh_port, ssh_identity_file, output_filename: see above.
        start_timeout: has no effect, nor have the next ones.
        disable_cache, verbose, use_gloo, use_mpi, mpi_args: see above.
        network_interface: older form of network_interfaces, with commas between them.
        network_interfaces: as horovodrun's --network-interfaces.
        executable: the Python of the ranks; by default this one.
        np: older name of num_proc, as min_np and max_np are of min_num_proc and max_num_proc.
        min_np, max_np: see above.
        env: environment of the ranks; by default this process's.

    Raises RuntimeError if a rank fails, whose output has been printed.
    """
    del start_timeout, disable_cache, verbose, use_gloo, use_mpi, mpi_args
    import cloudpickle  # not for horovodrun

    flags = ["-np", str(np or num_proc)]
    for flag, value in (
        ("-H", hosts),
        ("--hostfile", hostfile),
        ("--min-np", min_np or min_num_proc),
        ("--max-np", max_np or max_num_proc),
        ("--slots-per-host", slots),
        ("--reset-limit", reset_limit),
        ("--blacklist-cooldown-range", cooldown_range),
        ("--host-discovery-script", host_discovery_script),
        ("--output-filename", output_filename),
        ("-p", ssh_port),
        ("-i", ssh_identity_file),
        ("--network-interfaces", network_interface or ",".join(network_interfaces or ()) or None),
    ):
        if value is not None:
            flags += [flag, *map(str, value if isinstance(value, list | tuple) else [value])]
    place = Path.cwd() if hosts or hostfile or host_discovery_script else None
    with tempfile.TemporaryDirectory(prefix=".horovod-run-", dir=place) as folder:
        arguments = (tuple(args), dict(kwargs or {}))
        Path(folder, "function").write_bytes(cloudpickle.dumps((func, *arguments)))
        # In sys.argv, which tells elastic states apart. Made once: ranks may pickle what they
        # unpickled to other bytes.
        key = hashlib.sha256(cloudpickle.dumps(arguments)).hexdigest()
        # As a module: so imports search the current folder, and not this one.
        command = [executable or sys.executable, "-m", "horovod.runner.call", folder, key]
        packages = str(Path(__file__).parents[2])
        environment = dict(os.environ if env is None else env)
        done = subprocess.run(
            [sys.executable, "-m", "horovod.runner.launch", *flags, *command],
            env=environment | {"PYTHONPATH": _in_front(packages, environment)},
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"horovod.run() has failed: exit code {done.returncode}; the output above says why."
            )
        count = int(Path(folder, "ranks").read_text())
        return [
            pickle.loads(Path(folder, f"result-{rank}").read_bytes())  # noqa: S301  our own
            for rank in range(count)
        ]


def _in_front(folder: str, environment: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, (folder, environment.get("PYTHONPATH"))))
