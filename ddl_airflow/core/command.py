"""Checks a manifest's command as far as can be done without running it."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ddl_airflow.core.beneath import read_beneath
from ddl_airflow.core.errors import CommandInvalid, FileRefused
from ddl_airflow.core.manifest.rule import Finding, nearest
from ddl_airflow.core.manifest.sections.definition import split_commands

_EXPANDED = re.compile(r"[$*?\[\]{}~`]")
# Compiling takes a hundred times as much memory.
_MOST_BYTES = 2**20
# What starts ranks, as the train task does; the others may start theirs within a single one.
_LAUNCHERS = frozenset(("mpirun", "mpiexec", "orterun", "prun", "srun"))
_OTHER_LAUNCHERS = frozenset(("ddlrun", "horovodrun", "torchrun"))
# How alike names of files are, of which one is probably a misspelling of the other.
_NEAR = 0.75
# An & that no quotes and no backslash are around, at the end.
_IN_BACKGROUND = re.compile(r"""\A(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|[^'"\\])*?&\s*\Z""", re.DOTALL)
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# What comes before the training and puts no script into the folder, as git, unzip or cp may.
_PREPARES = re.compile(
    r"""\s* (?:
        (?:sudo\s+)? (?:pip[0-9.]*|conda|mamba|apt|apt-get|apk|dnf|yum) \s+ (?:-\S+\s+)*
            (?:install|add|update|list|activate)
        |python[0-9.]* \s+ -m \s+ pip
        |export|set|ulimit|echo|nvidia-smi|date|hostname|pwd|ls|printenv|true
        |env(?:\s+[A-Za-z_]\w*=\S*)*\s*\Z
        |(?:[A-Za-z_]\w*=\S*(?:\s+|\Z))+ \Z
    ) (?![\w.-]) [^|;&<>()`\n]* \Z""",
    re.VERBOSE,
)

# ... but for this, which may put one there: another program's output, or pip where it is told to.
_MAY_BRING = re.compile(
    r"""\$\(|`|\bpip[0-9.]*\s.*\s["']?(?:-\w*[te]|--(?:target|prefix|root|src|editable)(?![\w-]))""",
    re.DOTALL,
)
# What has the shell find another Python.
_OTHER_PYTHON = re.compile(r"\b(?:activate|conda|mamba)\b|\bPATH=")


def check_command(
    command: str, code: Path, python: str, ranks: int = 0, *, field: str = "execution.command"
) -> None:
    """Raises when ``command_finding`` finds something.

    Args:
        command, code, python, ranks, field: as ``command_finding`` has them.

    Raises:
        CommandInvalid: names the script, its line when it does not parse, and what is there.
    """
    # Out here it has no SyntaxError as its context, of which logs show the line of the script.
    found = command_finding(field, command, code, python, ranks)
    if found is not None:
        raise CommandInvalid(f"{found.field and f'{found.field}: '}{found.message}. {found.fix}")


def command_finding(
    field: str,
    command: str,
    code: Path,
    python: str,
    ranks: int = 0,
    left_out: Callable[[str], str] = lambda _: "",
) -> Finding | None:
    """What is wrong with a command that names a script or program that is not there, or no Python.

    Args:
        field: of the manifest, that the command stands in.
        command: one command of the manifest.
        code: folder of the scripts; the command runs in it, or in a copy.
        python: the ranks' Python. What is valid Python is decided here only if it is this one,
            and the command takes no other: that may know a newer syntax.
        ranks: that each run it; 0: it runs once, by itself.
        left_out: why a file of the folder does not come into the copy in which the command runs;
            empty if it does.

    Returns:
        None if nothing is; without a field if it is wrong in the script.
    """
    with suppress(ValueError):  # said below
        command = "\n".join(split_commands(command))  # without comments
    try:
        shlex.split(command)
        start = _start_of_training(command)
        words = shlex.split(command[start:])
    except ValueError as error:
        return Finding(field, f"{command!r}: {error}", "Close the quotes.")
    before = command[:start]
    while words[1:] and _ASSIGNMENT.match(words[0]):
        before += f" {words.pop(0)}"
    name = words[0].rpartition("/")[2] if words else ""
    if (ranks and name in _LAUNCHERS) or (ranks > 1 and name in _OTHER_LAUNCHERS):
        message = f"{command!r}: {words[0]} would start ranks of its own in each rank"
        return Finding(field, message, "Write python and the script alone.")
    if _IN_BACKGROUND.search(command):
        fix = "Leave the & out: the rank ends when its command does."
        return Finding(field, f"{command!r} goes on in the background", fix)
    script = _script(words)
    if script is None:
        return _program_finding(field, command, words, code, left_out)
    path = code / script
    if not path.is_file():
        there = sorted(p.relative_to(code).as_posix() for p in code.rglob("*.py"))
        near = _near_script(script, there)
        fix = f"Did you mean {near!r}?" if near else f"There is: {', '.join(there) or 'no .py'}."
        message = f"{command!r}: the script {script!r} is not in the manifest's code folder"
        return Finding(field, message, fix)
    if why := left_out(script):
        return _not_copied(field, command, f"the script {script!r}", why)
    if python != sys.executable or _OTHER_PYTHON.search(before):
        return None
    try:
        compile(read_beneath(path, code, _MOST_BYTES), script, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        message = f"{script}:{line}: {getattr(error, 'msg', error)}"
        return Finding("", message, "Mend it: the script is not valid Python.")
    except (FileRefused, RecursionError, MemoryError):
        pass  # a link, huge or too deep: the ranks, who may have put it there, say what it is
    return None


def _start_of_training(command: str) -> int:
    """Where the command goes on after what prepares: ``pip install x && python train.py``."""
    rest = 0
    # Quotes keep their length, and have no operators.
    bare = _QUOTED.sub(lambda found: "x" * len(found[0]), command)
    for joined in re.finditer("&&", bare):
        prepares = _PREPARES.match(bare, rest, joined.start())
        if not prepares or _MAY_BRING.search(command, rest, joined.start()):
            break
        rest = joined.end()
    return rest


def _near_script(script: str, there: Sequence[str]) -> str | None:
    # Without their ends, by which main.py and train.py are alike.
    stems = {path.removesuffix(".py"): path for path in there}
    given = script.removesuffix(".py")
    near = nearest(given, stems, _NEAR)
    if near is None:  # it may lie in another folder
        last = given.rpartition("/")[2]
        near = next((stem for stem in stems if stem.rpartition("/")[2] == last), None)
    return None if near is None else stems[near]


def _not_copied(field: str, command: str, what: str, why: str) -> Finding:
    fix = "Put it among the scripts, or set code: to a folder, beside the manifest, that has it."
    return Finding(field, f"{command!r}: {what} is not copied to where it would run: {why}", fix)


def _program_finding(
    field: str, command: str, words: list[str], code: Path, left_out: Callable[[str], str]
) -> Finding | None:
    program = words[0] if words else ""
    if not program or "=" in program or _EXPANDED.search(program) or _PYTHON.fullmatch(program):
        return None
    if "/" in program:
        if program.startswith("/"):
            return None
        if (code / program).is_file():
            why = left_out(program)
            return _not_copied(field, command, f"the program {program!r}", why) if why else None
        near = nearest(program.removeprefix("./"), sorted(_files(code)), _NEAR)
        fix = f"Did you mean './{near}'?" if near else "Put it there."
        message = f"{command!r}: the program {program!r} is not in the manifest's code folder"
        return Finding(field, message, fix)
    if program.endswith(".py") and (code / program).is_file():
        message = f"{command!r}: {program} is no program"
        return Finding(field, message, f"Write python {program}.")
    # Others may be where the ranks run, and not here.
    if _is_misspelt_python(program) and shutil.which(program) is None:
        return Finding(field, f"{command!r}: there is no {program!r}", "Did you mean 'python'?")
    return None


def _is_misspelt_python(program: str) -> bool:
    """By its own letters, one too few or too many, or one other; jython is another program."""
    letters = program.rstrip("0123456789.")
    if len(letters) == 6 and letters[0] == "p":
        wrong = sum(one != right for one, right in zip(letters, "python", strict=True))
        if wrong == 1:
            return True
    return set(letters) <= set("python") and len(letters) in (5, 6, 7)


def _files(code: Path) -> Iterator[str]:
    return (path.relative_to(code).as_posix() for path in code.rglob("*") if path.is_file())


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
