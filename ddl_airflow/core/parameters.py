"""How the parameters of a run reach its script: as words of the command, and as variables."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any

from ddl_airflow.core.errors import SettingInvalid, SettingUnknown

# What is Airflow's own in a run's ``conf``, and so among its parameters: the parent run, which
# TriggerDagRunOperator puts there where there is OpenLineage; and how finely tasks are traced.
OF_AIRFLOW = frozenset({"openlineage", "airflow/task_span_detail_level"})
# Of a variable with its name, and a NUL behind it: MAX_ARG_STRLEN in execve(2).
_MOST_BYTES = 128 * 1024


def check_settings(given: Mapping[str, Any], known: Iterable[str] | None) -> None:
    """Refuses what the trigger form does not have, or cannot hold to its bounds.

    Args:
        given: the run's ``conf``.
        known: names in the form; None if nobody says what there is.

    Raises:
        SettingUnknown: a name is not in the form; with the nearest that is.
        SettingInvalid: a number is NaN or infinite. In JSON Schema it is within any bounds.
    """
    if known is None:
        return
    known = sorted(known)
    for name in sorted(set(given) - set(known)):
        import difflib  # slow to import, and rarely needed

        near = difflib.get_close_matches(name[:60], known, n=1)
        there = f"There is: {', '.join(known)}." if known else "The manifest has no parameters."
        fix = f"Did you mean {near[0]}?" if near else there
        raise SettingUnknown(f"the run's setting {name[:60]!r} is not known. {fix}")
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingInvalid(f"{name} is {value}, wanted a number.")


def text_of(value: Any, name: str = "a setting of the run") -> str:
    """A parameter's value as a script reads it: ``true`` and ``false``, numbers, text as it is.

    Args:
        value: of the parameter.
        name: its, for the error.

    Raises:
        SettingInvalid: it has a character that no process can be given.
    """
    text = str(value).lower() if isinstance(value, bool) else str(value)
    odd = re.search("[\0\ud800-\udfff]", text)
    if odd is not None:
        raise SettingInvalid(
            f"{name} is {ascii(text[:60])}: it has the character U+{ord(odd[0]):04X}, which no "
            "command and no environment can hold. Leave it out."
        )
    return text


class NoValue(ValueError):
    """A template gives None, which a command would have as the word None."""


def word_of(value: Any) -> str:
    """What ``{{ params.x }}`` puts into a command: one word of it, whatever characters it has.

    Who may trigger a run may choose values, not commands: where a word may stand is decided when
    the manifest is read (``ddl_airflow.core.manifest.shell``). A value that begins with ``-`` is a
    word that the script may take for an option.

    Raises:
        NoValue: it is None.
        SettingInvalid: as ``text_of``.
    """
    if value is None:
        raise NoValue
    text = text_of(value)
    # shlex.quote leaves more bare: but shells read NAME=text, and some expand {a,b}.
    if re.fullmatch(r"[\w@%+:./-]+", text, re.ASCII):
        return text
    return "'" + text.replace("'", "'\"'\"'") + "'"


def parameter_environment(parameters: Mapping[str, Any]) -> dict[str, str]:
    """``PARAM_LEARNING_RATE`` for ``learning_rate``, and so on.

    Raises:
        SettingInvalid: as ``text_of``; or a value is longer than Linux takes.
    """
    variables = {}
    for name, value in parameters.items():
        variable, text = f"PARAM_{name.upper()}", text_of(value, name)
        size = len(text.encode())
        if len(variable) + size + 2 > _MOST_BYTES:
            raise SettingInvalid(
                f"{name} has {size:,} bytes, which is more than a variable of a process holds. Put "
                "it into a file, and give its place."
            )
        variables[variable] = text
    return variables


def without_marks(date: datetime) -> str:
    """A date and time as Airflow's ``ts_nodash_with_tz`` has it."""
    return date.isoformat().replace("-", "").replace(":", "")


def no_value(field: str, text: str, render: Callable[[str], object]) -> SettingInvalid:
    """The error of a text in which a template gives None.

    Args:
        field: of the step, that has the text.
        text: the templates.
        render: fills in a template, as the text was; to find the one that it is.
    """
    which = "a template of it"
    for one in re.findall(r"\{\{.*?\}\}", text, re.DOTALL):
        try:
            render(one)
        except NoValue:
            which = one
            break
        except Exception:  # noqa: S112  # alone it cannot be filled in: it may name a loop's variable
            continue
    return SettingInvalid(
        f"{field}: {text!r}: {which} has no value in this run, and the command would have the word "
        "None. Say what to take then: {{ … or 'all' }}. A parameter of the manifest always has a "
        "value, {{ params.name }}; dag_run.conf only what the run was triggered with."
    )


# As Airflow has them.
_FILTERS: Mapping[str, Callable[[datetime], str]] = {
    "ds": lambda date: f"{date:%Y-%m-%d}",
    "ds_nodash": lambda date: f"{date:%Y%m%d}",
    "ts": lambda date: date.isoformat(),
    "ts_nodash": lambda date: f"{date:%Y%m%dT%H%M%S}",
    "ts_nodash_with_tz": without_marks,
}


def filled_in(
    command: str,
    values: Mapping[str, Any],
    given: Mapping[str, Any] = MappingProxyType({}),
    *,
    field: str = "execution.command",
    fix: str = "Give the command itself.",
) -> str:
    """A command with the parameters in it, as a run would have it, without Airflow.

    Args:
        command: one command of a manifest; its templates have been checked.
        values: what ``params`` has.
        given: what else a template may name here.
        field: of the manifest, that has the command.
        fix: what to do where it names something that only a run in Airflow has.

    Raises:
        SettingInvalid: it does, as with ``ds``; or there is no value for what it names.
    """
    from jinja2 import StrictUndefined, TemplateError  # slow to import, and rarely needed
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, finalize=word_of)
    environment.filters.update(_FILTERS)

    def rendered(text: str) -> str:
        return environment.from_string(text).render(given, params=dict(values))

    try:
        return rendered(command)
    except NoValue:
        raise no_value(field, command, rendered) from None
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise SettingInvalid(
            f"{field} {command!r} cannot be filled in outside Airflow: {error}. {fix}"
        ) from None
