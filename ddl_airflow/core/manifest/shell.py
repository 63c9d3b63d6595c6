"""Where a template may put a value into a command, so that it is a word of it, or part of one.

Values are quoted for a shell when they are put in (``ddl_airflow.core.parameters.word_of``). That
holds only where quotes mean what they should, so a template may not stand inside quotes, after a
backslash or ``$``, or in a comment.

Nor may a value be what runs: it is an argument of a script that is written out, or of a command
that is known to run none of its arguments. Of any other command, as of torchrun, timeout and trap,
nobody knows here which words it runs: there a value is only the rest of ``--option=``.

Source: POSIX.1-2017, Shell Command Language, 2.2 Quoting, 2.3 Token Recognition, 2.10 Grammar;
``python --help``, and sh and bash, OPTIONS.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jinja2 import nodes

# After these the name of a command follows, or the variables that export sets.
_PREFIXES = frozenset(
    """
    ! { if then else elif while until do exec env export command nohup nice time timeout sudo xargs
    """.split()
)
# What such words may have before it: options, numbers, durations.
_OF_A_PREFIX = re.compile(r"-.*|[0-9.]+[smhd]?", re.DOTALL)
# They run none of their arguments, whatever these are.
_HARMLESS = frozenset("case cat cd cp echo ls mkdir mv rm sleep tee touch".split())
_SCRIPT = re.compile(r"\./.+|.+\.(py|sh)", re.DOTALL)
_PYTHON = re.compile(r"(.*/)?python[0-9.]*")
_SHELL = re.compile(r"(.*/)?(ba|da|k|z)?sh")
# Modules that run what they are given, besides many of Python's own.
_RUNNERS = sys.stdlib_module_names | {
    "accelerate",
    "coverage",
    "debugpy",
    "horovod",
    "pip",
    "torch",
}
# They read their words a second time, or as arithmetic, in which bash runs what $( ) holds.
_READ_AGAIN = frozenset(("eval", "let", "declare", "typeset", "[["))
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
# Variables from which a shell, the loader or Python takes what runs.
_DECIDES = re.compile(r"(PATH|ENV|IFS|PS\d|BASH_\w+|LD_\w+|PYTHON(?!HASHSEED=)\w+)=")
_OPTION = re.compile(r"--\w[\w.-]*=")
_OPEN_NAME = re.compile(r"(\$\w*|~)\Z")
# ${NAME} is part of a word; what else may stand in these braces is a language of its own.
_VARIABLE = re.compile(r"\$\{\w+\}")
_VALUE = "\0"
_EXPANDED = "\1"
# Unless something stands beside them, there is no word where the variables are empty.
_MAY_VANISH = re.compile(rf"({_EXPANDED}|\$\w+)+")
# Branches of a template that end differently; people write two or three.
_MAX_STATES = 32


class _Next(Enum):
    """What the next word of a command is."""

    COMMAND = auto()
    PYTHON = auto()  # an option of Python, or the script
    SHELL = auto()  # an option of a shell, or the script
    OF_PYTHON = auto()  # the value of an option of Python's
    OF_SHELL = auto()
    CODE = auto()  # after python -c
    MODULE = auto()  # after python -m
    ARGUMENT = auto()  # of what is known to take it as no more
    ANYTHING = auto()


_WITHOUT_SCRIPT = frozenset(_Next) - {_Next.COMMAND, _Next.ARGUMENT, _Next.ANYTHING}


class _State(NamedTuple):
    """Where in a command a shell's reading has come to.

    Attributes:
        quote: the quote that is open, or ``#`` in a comment.
        escaped: whether the next character follows a backslash.
        obscure: whether there was something that is read by rules of its own, which may not have
            ended: a substitution, a here-document, arithmetic, eval.
        piped: whether the command reads what another one writes.
        redirects: whether the next word is the target of a redirection.
        next: what the next word is, where it is no such target.
        word: what has been read of the word.
    """

    quote: str = ""
    escaped: bool = False
    obscure: bool = False
    piped: bool = False
    redirects: bool = False
    next: _Next = _Next.COMMAND
    word: str | None = None


def misplaced_values(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with where a command's templates stand, and how to mend it."""
    states, wrong = _read(tree.body, {_State()})
    for state in states:
        _after_command(_ended(state), wrong)
    yield from dict.fromkeys(wrong)


def _read(
    body: Iterable[nodes.Node], states: set[_State]
) -> tuple[set[_State], list[tuple[str, str]]]:
    """Returns in which states the reading may end, and what is wrong on the way."""
    from jinja2 import nodes

    wrong: list[tuple[str, str]] = []
    for node in body:
        if isinstance(node, nodes.Output):
            for part in node.nodes:
                if isinstance(part, nodes.TemplateData):
                    states = {_after_text(state, part.data, wrong) for state in states}
                else:
                    states = {_after_value(state, wrong) for state in states}
        elif isinstance(node, nodes.If):
            ends = set()
            for branch in (node.body, *(one.body for one in node.elif_), node.else_):
                after, found = _read(branch, states)
                ends |= after
                wrong += found
            states = ends
        elif isinstance(node, nodes.For):
            seen, fresh = set(states), set(states)
            while fresh and len(seen) <= _MAX_STATES:
                after, found = _read(node.body, fresh)
                wrong += found
                fresh = after - seen
                seen |= after
            after, found = _read(node.else_, states)
            states, wrong = seen | after, wrong + found
        if len(states) > _MAX_STATES:
            fix = "Write fewer branches, or decide in the script."
            return states, [("has a template whose branches end in too many ways", fix)]
    return states, list(dict.fromkeys(wrong))


def _after_text(state: _State, text: str, wrong: list[tuple[str, str]]) -> _State:
    i = 0
    while i < len(text):
        variable = _VARIABLE.match(text, i)
        if variable and not state.escaped and state.quote in ("", '"'):
            state, i = state._replace(word=_grown(state.word, _EXPANDED)), variable.end()
        else:
            state = _after_char(state, text[i], text[i + 1 : i + 2], wrong)
            i += 1
    return state


def _after_char(state: _State, char: str, following: str, wrong: list[tuple[str, str]]) -> _State:
    word = state.word
    if state.escaped:
        return state._replace(escaped=False, word=_grown(word, "x"))
    if state.quote == "#":
        return _after_command(state, wrong) if char == "\n" else state
    if char == "\\" and state.quote != "'":
        return state._replace(escaped=True, word=word or "")
    if char == "`" and state.quote != "'":
        return state._replace(obscure=True)
    if state.quote:
        if char == state.quote:
            return state._replace(quote="")
        obscure = state.quote == '"' and (word or "").endswith("$") and char in "({"
        return state._replace(obscure=state.obscure or obscure, word=_grown(word, char))
    if char in "'\"":
        # $'…' and $"…" have rules of their own in some shells.
        obscure = state.obscure or (word or "").endswith("$")
        return state._replace(quote=char, word=word or "", obscure=obscure)
    if char == "#" and word is None:
        return state._replace(quote="#")
    if char in "<>":
        if word is not None and _VALUE in word:
            fix = "Put a space between them."
            wrong.append(("has a template right before < or >", fix))
        here = char == "<" and following == "<"
        return _ended(state)._replace(redirects=True, obscure=state.obscure or here)
    if char == "&" and state.redirects and word is None:
        return state  # 2>&1
    if char in ";\n|&()":
        if char == "(" and (word or "").endswith("$"):
            return state._replace(obscure=True)
        if char == "(" and following == "(":
            state = state._replace(obscure=True)
        state = _after_command(_ended(state), wrong)
        return state._replace(piped=state.piped or char == "|")
    if char.isspace():
        return _ended(state)
    if char == "{" and (word or "").endswith("$"):
        return state._replace(obscure=True, word=_grown(word, char))
    return state._replace(word=_grown(word, char))


def _grown(word: str | None, char: str) -> str:
    word = (word or "") + char
    if _VALUE not in word:
        return word
    # Of a word with a value in it only this matters, so loops come to an end.
    begin = "A=" if _ASSIGNMENT.match(word) else "--a=" if _OPTION.match(word) else ""
    open_name = _OPEN_NAME.search(word)
    return f"{begin}{_VALUE}{open_name[0] if open_name else ''}"


def _ended(state: _State) -> _State:
    """Returns the state after the end of a word, if there was one."""
    word = state.word
    if word is None:
        return state
    state = state._replace(word=None)
    if state.redirects:
        return state._replace(redirects=False)
    after = _after_word(state.next, word)
    again = state.next is _Next.COMMAND and word in _READ_AGAIN
    return state._replace(next=after, obscure=state.obscure or again)


def _after_word(this: _Next, word: str) -> _Next:
    """Returns what follows a word, of which is known what it is."""
    if this is _Next.COMMAND:
        if word in _PREFIXES or _OF_A_PREFIX.fullmatch(word) or _ASSIGNMENT.match(word):
            return this
        if _PYTHON.fullmatch(word):
            return _Next.PYTHON
        if _SHELL.fullmatch(word):
            return _Next.SHELL
        known = word in _HARMLESS or _SCRIPT.fullmatch(word)
        return _Next.ARGUMENT if known else _Next.ANYTHING
    if this is _Next.OF_PYTHON:
        return _Next.PYTHON
    if this is _Next.OF_SHELL:
        return _Next.SHELL
    if this in (_Next.ARGUMENT, _Next.ANYTHING):
        return this
    if _MAY_VANISH.fullmatch(word):
        return _Next.ANYTHING
    if this is _Next.CODE:
        return _Next.ARGUMENT
    if this is _Next.MODULE:
        return _Next.ANYTHING if word.partition(".")[0] in _RUNNERS else _Next.ARGUMENT
    if word == "-":  # the script is what it reads
        return this
    if not word.startswith(("-", "+")):
        return _Next.ARGUMENT
    if this is _Next.PYTHON:
        return _after_option_of_python(word)
    if re.fullmatch(r"[-+][acefilnsuvx]*[oO]", word):
        return _Next.OF_SHELL
    return this if re.fullmatch(r"[-+][acefilnsuvx]+", word) else _Next.ANYTHING


def _after_option_of_python(word: str) -> _Next:
    option = re.fullmatch(r"-[bBdEiIOPqsSuvx]*([cmWX]?)(.*)", word, re.DOTALL)
    if option is None:
        return _Next.ANYTHING
    last, rest = option.groups()
    if not rest:
        with_value = {
            "c": _Next.CODE,
            "m": _Next.MODULE,
            "W": _Next.OF_PYTHON,
            "X": _Next.OF_PYTHON,
        }
        return with_value.get(last, _Next.PYTHON)
    return _Next.PYTHON if last in ("W", "X") else _Next.ANYTHING


def _after_command(state: _State, wrong: list[tuple[str, str]]) -> _State:
    """Returns the state after a command, of which the last word has ended."""
    if state.piped and state.next in _WITHOUT_SCRIPT:
        fix = "Write out the script; it may read its input."
        wrong.append(("has a template, and runs what it reads from another command", fix))
    # What is read after | and a line's end, or after | (, is still what the other one writes.
    return _State(obscure=state.obscure, piped=state.piped and state.next is _Next.COMMAND)


def _after_value(state: _State, wrong: list[tuple[str, str]]) -> _State:
    word = state.word or ""
    script = "Write out what runs; a value may be an argument of it."
    if state.quote in ("'", '"'):
        fix = "Take away the quotes around it: a value is put in as one word, whatever it has."
        wrong.append(("has a template inside quotes", fix))
    elif state.quote == "#":
        wrong.append(("has a template in a comment", "Delete the comment."))
    elif state.escaped:
        wrong.append(("has a template after a backslash", "Delete the backslash."))
    elif state.obscure:
        fix = "Put the template before it, or give the script the environment's PARAM_<NAME>."
        where = "` `, $( ), ${ }, <<, (( )), [[ ]], let, declare or eval"
        wrong.append((f"has a template in or after {where}", fix))
    elif _OPEN_NAME.search(word):
        fix = "Put a space between them, or write ${NAME} with braces."
        wrong.append(("has a template right after $ or ~", fix))
    elif state.next in _WITHOUT_SCRIPT:
        wrong.append(("has a template where the script or the program is named", script))
    elif state.redirects:
        if state.next is _Next.COMMAND:
            fix = "Put the redirection behind the command."
            wrong.append(("has a template in a redirection before the command", fix))
    elif state.next is _Next.COMMAND:
        if not _ASSIGNMENT.match(word):
            wrong.append(("has a template where the command is named", script))
        elif _DECIDES.match(word):
            fix = "Write it out; a value may be in a variable that the script alone reads."
            wrong.append(("has a template in a variable that decides what runs", fix))
    elif state.next is _Next.ANYTHING and not _OPTION.match(word):
        fix = "Write --option={{ … }}, or a script: python x.py {{ … }}, sh x.sh {{ … }}."
        wrong.append(("has a template as a word of a command that might run it", fix))
    return state._replace(word=_grown(state.word, _VALUE))
