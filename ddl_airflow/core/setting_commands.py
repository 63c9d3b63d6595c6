"""Settings that Airflow takes from what a command prints, and which of them has none that works.

Airflow runs some of these commands while it is imported, and raises what became of them as it is:
with what they printed, which may be the secret itself.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping


def failed_command(error: Exception, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """What is wrong with a setting's command, without what it printed, and the fix.

    Args:
        error: what Airflow raised.
        environ: variables, of which ``AIRFLOW__<SECTION>__<KEY>_CMD`` are such commands.

    Returns:
        None if the error is of something else.
    """
    # Source: run_command in airflow/_shared/configuration/parser.py, Airflow 3.3.
    failed = re.match(r"Cannot execute (.*?)\. Error code is: (-?\d+)\.", str(error), re.DOTALL)
    given = {
        name: command
        for name, command in environ.items()
        if re.fullmatch(r"AIRFLOW__\w+?__\w+_CMD", name)
    }
    if failed is not None:
        said = f"its command ended with {failed[2]}"
        names = [name for name, command in given.items() if command == failed[1]]
    elif isinstance(error, OSError):
        said = f"its command cannot be started: {error.strerror}"
        names = [name for name, one in given.items() if (_words(one) or [""])[0] == error.filename]
    elif isinstance(error, ValueError):
        said = f"its command cannot be understood: {error}"
        names = [name for name, command in given.items() if _words(command) is None]
    else:
        return None
    if not names and failed is None:
        return None
    name = " or ".join(names) or "a setting that ends in _cmd"
    return f"{name}: {said}", f"Correct {name}: it must print the value, and end with 0."


def _words(command: str) -> list[str] | None:
    try:
        return shlex.split(command)
    except ValueError:
        return None
