"""What keeps the servers of a training on one host from listening to other hosts.

TensorFlow's servers, mpirun and Open MPI's ranks listen on all addresses, whatever they are told,
and TensorFlow's ask nobody who they are. A library that is loaded before others gives them the
loopback address instead (``ops_lib/cc/loopback``). A network namespace would as well, and take away
every other connection of a script.

A script that means to be reached from outside starts its server with ``env -u LD_PRELOAD``.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from ddl_airflow.core.errors import SubmitFailed
from ddl_airflow.launchers import run_as
from ddl_airflow.launchers.mpirun import how_to_get_ops

_TIMEOUT_S = 60.0
_NEEDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
_NAME = "_loopback.so"
_LOOKUP = (
    "import importlib.util as util; spec = util.find_spec('ddl_ops'); print(spec and spec.origin)"
)
# Else ranks would look for each other where nobody listens, should they have no shared memory.
_BTL = "OMPI_MCA_btl_tcp_if_include"
_BTL_ALSO = "OMPI_MCA_btl_tcp_if_exclude"


def confined(
    python: str, environ: Mapping[str, str], *, mpi: bool, user: str = ""
) -> dict[str, str]:
    """The variables that confine what is started with them, and all that this starts.

    Args:
        python: the ranks' Python, which has the library; nothing is confined where it was not
            compiled.
        environ: what else is set; ``LD_PRELOAD`` is added to, and a site's network for Open MPI
            stays.
        mpi: whether Open MPI starts it.
        user: whom the ranks run as; empty for this process's.

    Raises:
        SubmitFailed: the ranks' Python does not answer, or does not have ddl-ops at all.
    """
    library = _library(python, tuple((n, environ[n]) for n in _NEEDED if n in environ), user)
    if library is None:
        return {}
    before = environ.get("LD_PRELOAD", "")
    settings = {"LD_PRELOAD": f"{library} {before}".strip()}
    if mpi and _BTL not in environ and _BTL_ALSO not in environ:
        settings[_BTL] = "127.0.0.0/8"
    return settings


@cache
def _library(python: str, needed: tuple[tuple[str, str], ...], user: str) -> Path | None:
    if python == sys.executable:
        spec = importlib.util.find_spec("ddl_ops")
        origin = spec.origin if spec else None
    else:
        # A manifest names it: it gets no more of Airflow than the ranks do.
        asked, env = [python, "-c", _LOOKUP], dict(needed)
        try:
            if user:
                said = run_as.run(user, python, asked, env=env, timeout_s=_TIMEOUT_S)
            else:
                said = subprocess.run(
                    asked, env=env, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
                )
        except subprocess.TimeoutExpired as error:
            raise SubmitFailed(
                f"the ranks' Python {python} gives no answer within {_TIMEOUT_S:.0f} s. Correct "
                "launcher.python in the manifest, or [ddl] python."
            ) from error
        if said.returncode:
            why = (said.stderr.strip().splitlines() or [f"exit code {said.returncode}"])[-1]
            raise SubmitFailed(f"the ranks' Python {python} does not run: {why}", retryable=False)
        origin = said.stdout.strip().removesuffix("None")
    if not origin:
        raise SubmitFailed(
            f"the ranks' Python {python} has no module ddl_ops. {how_to_get_ops(python)}",
            retryable=False,
        )
    library = Path(origin).with_name(_NAME)
    # The loader splits at these, and has no quotes.
    usable = library.is_file() and not set(" :") & set(str(library))
    return library if usable else None
