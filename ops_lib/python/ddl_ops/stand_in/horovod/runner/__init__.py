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

_CALLED = Path(__file__).with_name("call.py")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    hosts: str | None = None,
    hostfile: str | None = None,
    env: Mapping[str, str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    verbose: Any = None,
    use_mpi: bool | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    host_discovery_script: str | None = None,
    output_filename: str | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    **unknown: Any,
) -> list[Any]:
    """Calls a function on ranks, and returns what it returns on each.

    Args:
        func: what cloudpickle can take, as functions of the main script.
        args: of the function.
        kwargs: of the function.
        num_proc: number of ranks.
        hosts: as horovodrun's. They share the current folder, where the function and what it
            returns are meanwhile.
        hostfile: as horovodrun's.
        env: environment of the ranks; by default this process's.
        executable: the Python of the ranks; by default this one.
        np: older name of num_proc.
        verbose: has no effect, nor has use_mpi.
        use_mpi: see above.
        min_num_proc: as horovodrun's --min-np, and the next ones as its --max-np, --slots-per-host,
            --reset-limit, --blacklist-cooldown-range, --host-discovery-script and
            --output-filename. What is returned is that of the last start's ranks.
        max_num_proc, slots, reset_limit, cooldown_range: see above.
        host_discovery_script, output_filename: see above.
        min_np: older name of min_num_proc, as max_np is of max_num_proc.
        max_np: see above.
        unknown: other arguments of Horovod's: TypeError where they are not None.

    Raises RuntimeError if a rank fails, whose output has been printed.
    """
    del verbose, use_mpi
    import cloudpickle  # not for horovodrun

    if given := sorted(name for name, value in unknown.items() if value is not None):
        raise TypeError(f"horovod.run({', '.join(given)}=): not here: docs/coming-from-horovod.md")
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
        command = [executable or sys.executable, str(_CALLED), folder, key]
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
