"""Where a template may put a value into a command, so that it is a word of it, or part of one.

Values are quoted for a shell when they are put in (``ddl_airflow.core.parameters.word_of``). That
holds only where quotes mean what they should, so a template may not stand inside quotes, after a
backslash or ``$``, in a comment, or where the value would be the name of what runs.

Source: POSIX.1-2017, Shell Command Language, 2.2 Quoting, 2.3 Token Recognition, 2.10 Grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jinja2 import nodes

# After these the name of a command follows.
_PREFIXES = frozenset(
    """
    ! { if then else elif while until do exec env command nohup nice time timeout sudo xargs
    """.split()
)
# What such words may have before it: options, numbers, durations.
_OF_A_PREFIX = re.compile(r"-.*|[0-9.]+[smhd]?", re.DOTALL)
_INTERPRETERS = re.compile(r"(.*/)?((ba|da|k|z)?sh|python[0-9.]*|perl|ruby|awk)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_OPEN_NAME = re.compile(r"(\$\w*|~)\Z")
# ${NAME} is part of a word; what else may stand in these braces is a language of its own.
_VARIABLE = re.compile(r"\$\{\w+\}")
_VALUE = "\0"
# Branches of a template that end differently; people write two or three.
_MAX_STATES = 32


class _State(NamedTuple):
    """Where in a command a shell's reading has come to.

    Attributes:
        quote: the quote that is open, or ``#`` in a comment.
        escaped: whether the next character follows a backslash.
        obscure: whether there was a substitution or a here-document, which may not have ended.
        named: whether the command has its name.
        redirects: whether the next word is the target of a redirection.
        interpreter: whether the command is one that has not been given its program yet.
        word: what has been read of the word.
    """

    quote: str = ""
    escaped: bool = False
    obscure: bool = False
    named: bool = False
    redirects: bool = False
    interpreter: bool = False
    word: str | None = None


def misplaced_values(tree: nodes.Template) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with where a command's templates stand, and how to mend it."""
    yield from _read(tree.body, {_State()})[1]


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
            state, i = state._replace(word=_grown(state.word, "x")), variable.end()
        else:
            state = _after_char(state, text[i], text[i + 1 : i + 2], wrong)
            i += 1
    return state


def _after_char(state: _State, char: str, following: str, wrong: list[tuple[str, str]]) -> _State:
    word = state.word
    if state.escaped:
        return state._replace(escaped=False, word=_grown(word, "x"))
    if state.quote == "#":
        return _State(obscure=state.obscure) if char == "\n" else state
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
        return _State(obscure=state.obscure)
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
    assigned = "A=" if _ASSIGNMENT.match(word) else ""
    open_name = _OPEN_NAME.search(word)
    return f"{assigned}{_VALUE}{open_name[0] if open_name else ''}"


def _ended(state: _State) -> _State:
    """Returns the state after the end of a word, if there was one."""
    word = state.word
    if word is None:
        return state
    state = state._replace(word=None)
    if state.redirects:
        return state._replace(redirects=False)
    if not state.named:
        if word in _PREFIXES or _OF_A_PREFIX.fullmatch(word) or _ASSIGNMENT.match(word):
            return state
        return state._replace(
            named=True,
            interpreter=_INTERPRETERS.fullmatch(word) is not None,
            obscure=state.obscure or word == "eval",
        )
    # Its first word that is no option is the program, or the file with it.
    return state._replace(interpreter=state.interpreter and word.startswith("-"))


def _after_value(state: _State, wrong: list[tuple[str, str]]) -> _State:
    word = state.word or ""
    if state.quote in ("'", '"'):
        fix = "Take away the quotes around it: a value is put in as one word, whatever it has."
        wrong.append(("has a template inside quotes", fix))
    elif state.quote == "#":
        wrong.append(("has a template in a comment", "Delete the comment."))
    elif state.escaped:
        wrong.append(("has a template after a backslash", "Delete the backslash."))
    elif state.obscure:
        fix = "Put the template before it, or give the script the environment's PARAM_<NAME>."
        wrong.append(("has a template in or after ` `, $( ), ${ }, << or eval", fix))
    elif _OPEN_NAME.search(word):
        fix = "Put a space between them, or write ${NAME} with braces."
        wrong.append(("has a template right after $ or ~", fix))
    elif not state.redirects and state.interpreter:
        fix = "Write out the script; a value may be an argument of it."
        wrong.append(("has a template where the script or the program is named", fix))
    elif not (state.named or state.redirects or _ASSIGNMENT.match(word)):
        fix = "Write out what runs; a value may be an argument of it."
        wrong.append(("has a template where the command is named", fix))
    return state._replace(word=_grown(state.word, _VALUE))
