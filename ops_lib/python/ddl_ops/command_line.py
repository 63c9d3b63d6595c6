"""How a manifest's command is run: the argv, with a shell around it only where it needs one.

Standard library only, as the shim.
Source: POSIX.1-2017, Shell Command Language; bash(1), PIPESTATUS and POSIX mode.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ddl_ops.environment import SHELL

# Of a shell, for a script that makes room: after that it is to run no more.
KEEPS_ID = f"export {SHELL}=$$"
# A shell without a trap ends at once, and what it runs is killed while it still saves.
_WAITS = f"trap 'exit $?' TERM INT; trap : USR1; {KEEPS_ID}"
# Characters for which a shell must stay around, or must be asked at all.
_COMPOUND = re.compile(r"[;&|<>()`\n]")
_SHELL = re.compile(r"[$*?\[\]{}~#!\\]")
# Of a command's text, what is no operator; and a pipe whose failure no || comes to see.
_WORDS = re.compile(r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)
_PIPE = re.compile(r"(?<![|>])\|(?!\|)(?!.*\|\|)", re.DOTALL)
# In the last of several commands, for the others' ends do not count.
_UNSEEN = re.compile(r"(?:\|[^;]*&&|(?<!\$)\([^)]*\|)[^;]*\Z")
# Both outputs to a file. To another shell it is an & and a file that stays empty: the command would
# go on in the background, and end well at once.
_BOTH_OUTPUTS = re.compile(r"&>|(?<!\d)>&\s*[^\s\d$-]")
# What other shells do not know, and take for a command that is not there or for an error.
_ONLY_BASH = re.compile(
    r"""
    (?:^|[;&|({!\n]|\b(?:if|then|elif|else|while|until|do)\s) \s*  # where a command begins
    (?:
        (?:source|\[\[|function|declare|typeset|let|shopt|pushd|popd|mapfile|readarray)\s
        |set\s (?:-\w+\s+)* -\w*o\s+pipefail
        |\w+=\(
    )
    |(?<![\w)])[<>]\( |<<<
    """,
    re.VERBOSE,
)
# Fails with the last of a pipe's parts that failed, as `pipefail`. That itself would also decide
# which commands run, and take for a failure that a part had more to say than was read (SIGPIPE).
# Nor has one failed that SIGTERM to the whole group ended while the last part saved.
_LOOK = 'ddl_end $? "${PIPESTATUS[@]}"'
_OF_EACH_PART = f"""ddl_end() {{
    (($1 == 0)) || exit "$1"
    local code end=0
    for code in "${{@:2:$# - 2}}"; do
        ((code == 0 || code == 128 + 13 || code == ddl_term)) || end=$code
    done
    exit "$end"
}}
ddl_term=0
trap 'ddl_term=143 {_LOOK}' TERM INT; trap : USR1; {KEEPS_ID}
"""
_ASSIGNMENT = re.compile(r"\s*[A-Za-z_]\w*=")
# Without a program. Given no more, env prints the environment, secrets too, and ends well.
_ONLY_ASSIGNS = re.compile(
    r"""\s* (?:[A-Za-z_]\w*= (?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^\s'"\\])* (?:\s+|\Z))+ (?:\#.*)?""",
    re.VERBOSE | re.DOTALL,
)
# A Python at the start of a command, after assignments without quotes.
_PYTHON = re.compile(r"\s*((?:[A-Za-z_]\w*=[^\s'\"\\]*\s+)*)python3?(?=\s|$)")
# What every Python of a rank finds first: sitecustomize.py, which sets up TensorFlow 1 and the name
# `horovod`, and notes what a script ends with. A command that sets its own path would do without.
STARTUP = str(Path(__file__).parent / "startup")
_OWN_PATH = re.compile(r"(?<![\w$])PYTHONPATH=(?!\S*\$\{?PYTHONPATH\b)(?P<more>(?=[^\s;&|]))?")


def command_argv(command: str) -> list[str]:
    """The argv that runs the manifest's command.

    A plain command runs without a shell. One that needs expansion runs under ``sh`` and replaces
    it, so that a signal to the child is a signal to the script. Only a compound command keeps
    the shell, which when asked to end waits for what it runs, and runs no more. Of a pipe each part
    must end well, which bash can tell; where it is not installed, the last part alone decides. Bash
    runs what only bash knows, too, such as ``&>``, ``source`` and ``[[``.

    ``python`` or ``python3`` at its start is the Python that runs this, under whatever names that
    is installed. A ``PYTHONPATH`` that a command sets keeps STARTUP in front.

    Several commands as one, ``bash -c '…; …'``, are run as that text: bash by itself would not wait
    when asked to end, nor look at each part of a pipe.

    Args:
        command: the text of ``execution.command``, one command.
    """
    command, only_bash = _unwrapped(command)
    if (python := _PYTHON.match(command)) is not None:
        own = python[1] + shlex.quote(sys.executable)
        command = own + command[python.end() :]
    if shlex.quote(STARTUP) == STARTUP:  # it may come to stand within quotes
        command = _OWN_PATH.sub(_with_startup, command)
    operators, pipe = _operators(command), _has_pipe(command)
    only_bash = only_bash or _ONLY_BASH.search(operators) is not None
    bash = shutil.which("bash") if pipe or only_bash or _BOTH_OUTPUTS.search(operators) else None
    if bash is not None:
        text = f"{_OF_EACH_PART}{command}\n{_LOOK}" if pipe else f"{_WAITS}\n{command}"
        if only_bash:
            return [bash, "-c", text]
        # Words are to be what they are without the pipe.
        braces = "" if Path("/bin/sh").resolve().name == "bash" else "set +B\n"
        return [bash, "--posix", "-c", braces + text]
    if is_compound(command):
        return ["/bin/sh", "-c", f"{_WAITS}\n{command}"]
    if _SHELL.search(command) or _ASSIGNMENT.match(command):
        runs = _ASSIGNMENT.match(command) and not _ONLY_ASSIGNS.fullmatch(command)
        return ["/bin/sh", "-c", f"exec {'env ' if runs else ''}{command}"]
    return shlex.split(command)


def _unwrapped(command: str) -> tuple[str, bool]:
    """The text that bash is given, if there are no more words to it; else the command itself.

    Returns:
        That, and whether it is such a text.
    """
    if not command.startswith("bash -c ") or shutil.which("bash") is None:
        return command, False
    try:
        text = shlex.split(command)[-1]
    except ValueError:
        return command, False
    # In these quotes nothing is expanded before; and no shell has to stay for a single program.
    wrapped = is_compound(text) and command == f"bash -c {shlex.quote(text)}"
    return (text, True) if wrapped else (command, False)


def _with_startup(found: re.Match[str]) -> str:
    return f"PYTHONPATH={STARTUP}{'' if found['more'] is None else ':'}"


def is_compound(command: str) -> bool:
    """Whether a shell stays around what the command runs."""
    return _COMPOUND.search(command) is not None


def may_hide_an_exception(command: str, argv: Sequence[str]) -> bool:
    """Whether argv, which runs the command, may end well after a part of a pipe has failed.

    Bash sees all parts but those of a pipe that further commands follow, or that is in parentheses.
    """
    command, _ = _unwrapped(command)
    operators = _operators(command)
    unseen = argv[0] == "/bin/sh" or _UNSEEN.search(operators)
    return _has_pipe(command) and "||" not in operators and bool(unseen)


def _has_pipe(command: str) -> bool:
    """Whether the last part of a pipe may end the command well though another part failed."""
    return _PIPE.search(_operators(command)) is not None


def _operators(command: str) -> str:
    return _WORDS.sub("", command)
