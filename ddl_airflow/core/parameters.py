"""How the parameters of a run reach its script: as words of the command, and as variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from ddl_airflow.core.errors import SettingUnknown


def check_settings(given: Iterable[str], known: Iterable[str] | None) -> None:
    """Raises SettingUnknown, with the nearest name, for what is not in the trigger form.

    Args:
        given: names in the run's ``conf``.
        known: names in the form; None if nobody says what there is.
    """
    if known is None:
        return
    known = sorted(known)
    for name in sorted(set(given) - set(known)):
        import difflib  # slow to import, and rarely needed

        near = difflib.get_close_matches(name[:60], known, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"There is: {', '.join(known)}."
        raise SettingUnknown(f"the run's setting {name[:60]!r} is not known. {fix}")


def differs_by_run(command: str) -> bool:
    """Whether a template in it is more than a parameter, as ``{{ ds }}`` is."""
    rest = re.sub(r"\{\{\s*params(\.\w+|\[\s*(['\"])\w+\2\s*\])\s*\}\}", "", command)
    return "{{" in rest or "{%" in rest


def text_of(value: Any) -> str:
    """A parameter's value as a script reads it: ``true`` and ``false``, numbers, text as it is."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def word_of(value: Any) -> str:
    """What ``{{ params.x }}`` puts into a command: one word of it, whatever characters it has.

    Who may trigger a run may choose values, not commands.
    """
    return shlex.quote(text_of(value))


def parameter_environment(parameters: Mapping[str, Any]) -> dict[str, str]:
    """``PARAM_LEARNING_RATE`` for ``learning_rate``, and so on."""
    return {f"PARAM_{name.upper()}": text_of(value) for name, value in parameters.items()}
