"""Checks a manifest's command as far as can be done without running it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

from ddl_airflow.core.beneath import read_beneath
from ddl_airflow.core.errors import CommandInvalid, FileRefused
from ddl_airflow.core.manifest.rule import nearest

_EXPANDED = re.compile(r"[$*?\[\]{}~`]")
# Compiling takes a hundred times as much memory.
_MOST_BYTES = 2**20
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")


def check_command(command: str, code: Path, python: str) -> None:
    """Raises when the command names a Python script that is not in the code, or is not Python.

    Args:
        command: one command of the manifest.
        code: the run's copy of the scripts; the command runs in it.
        python: the ranks' Python. What is valid Python is decided here only if it is this one;
            another may know a newer syntax.

    Raises:
        CommandInvalid: names the script, its line when it does not parse, and what is there.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise CommandInvalid(f"execution.command: {command!r}: {error}") from error
    script = _script(words)
    if script is None:
        return
    path = code / script
    if not path.is_file():
        there = sorted(p.relative_to(code).as_posix() for p in code.rglob("*.py"))
        near = nearest(script, there)
        hint = f"Did you mean {near!r}?" if near else f"There is: {', '.join(there) or 'no .py'}"
        raise CommandInvalid(
            f"execution.command: {command!r}: the script {script!r} is not in the manifest's "
            f"code folder. {hint}"
        )
    if python != sys.executable:
        return
    try:
        compile(read_beneath(path, code, _MOST_BYTES), script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        wrong = f"{script}:{line}: {getattr(error, 'msg', error)}. The script is not valid Python."
    except (FileRefused, RecursionError, MemoryError):
        return  # a link, huge or too deep: the ranks, who may have put it there, say what it is
    else:
        return
    # Out here it has no SyntaxError as its context, of which logs show the line of the script.
    raise CommandInvalid(wrong)


def _script(words: list[str]) -> str | None:
    """The .py file that a plain ``python [options] script.py …`` would run."""
    if not words or not _PYTHON.fullmatch(words[0]):
        return None
    for word in words[1:]:
        if word in ("-c", "-m"):
            return None
        if not word.startswith("-"):
            named = word.endswith(".py") and not word.startswith("/") and not _EXPANDED.search(word)
            return word if named else None
    return None
